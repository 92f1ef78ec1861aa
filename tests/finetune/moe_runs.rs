//! Runs of `zerorun finetune` on mixtures: the auxiliary loss of all ranks together, the loads of experts, experts that
//! no token chooses, packed experts, and refusals.

use crate::moe::MOE;
use crate::runs::{self, chats, finetune};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_zero::comm::threads;
use candle_zero::serde_json::Value;
use candle_zero_finetune::{
    Adapter, BaseModel, FineTune, Options, PipelineStages, PreparedRun, Source, StepReport, TrainingLength,
    TuningMethod, ValidationData, WarmupLength,
};
use safetensors::tensor::{SafeTensors, TensorView};
use std::path::{Path, PathBuf};

fn options(folder: &Path, name: &str, out: &str) -> Options {
    let data = chats(folder, 40);
    Options {
        data: vec![Source::parse(&data).unwrap()],
        method: TuningMethod::Full,
        length: TrainingLength::Steps(3),
        lr: Some(1e-3),
        batch: Some(4),
        ctx: Some(48),
        warmup: WarmupLength::Steps(1),
        cache: Some(folder.join("cache")),
        ..Options::new(MOE.path("models").join(name), folder.join(out))
    }
}

/// Returns the steps of a run.
fn train(options: &Options, world: usize, stage: u8) -> Vec<StepReport> {
    runs::train(options, world, stage).0
}

#[test]
fn the_auxiliary_loss_of_a_run_is_that_of_all_ranks_together() {
    let folder = tempfile::tempdir().unwrap();
    let run = |out: &str, world: usize, stage: u8, factor: f64| {
        let options = Options {
            micro_batch: 4 / world,
            router_aux_loss_coef: Some(factor),
            validation: Some(ValidationData::Fraction(0.2)),
            eval_every: Some(3),
            ..options(folder.path(), "qwen3_moe_step2", out)
        };
        train(&options, world, stage)
    };
    let one_rank = run("alone", 1, 0, 0.1);
    for (i, step) in one_rank.iter().enumerate() {
        let (balance, shares) = (step.router_aux_loss.unwrap(), step.experts.unwrap());
        // With perfect balance, the auxiliary loss is the number of experts per token.
        assert!(balance > 2.0 && balance < 16.0, "step {i}: {balance}");
        assert!(shares.largest_expert_share > 1.0 / 16.0 && shares.smallest_expert_share < 1.0 / 16.0);
    }
    let numbers = |steps: &[StepReport]| -> Vec<[Option<f64>; 4]> {
        steps.iter().map(|step| [Some(step.loss), step.grad_norm, step.router_aux_loss, step.val_loss]).collect()
    };
    assert_eq!(numbers(&run("sharded", 1, 3, 0.1)), numbers(&one_rank));
    let two_ranks = run("pair", 2, 3, 0.1);
    for (one, two) in one_rank.iter().zip(&two_ranks) {
        assert!((one.loss - two.loss).abs() < 5e-5, "{} {}", one.loss, two.loss);
        assert!((one.router_aux_loss.unwrap() - two.router_aux_loss.unwrap()).abs() < 1e-5);
        assert_eq!(one.experts, two.experts);
    }
    let without = run("without", 1, 0, 0.0);
    assert!(without.iter().all(|step| step.router_aux_loss.is_none() && step.experts.is_some()));
    let added = one_rank[0].loss - without[0].loss;
    assert!((added - 0.1 * one_rank[0].router_aux_loss.unwrap()).abs() < 1e-5, "{added}");
}

/// Copies a model, with zeros in the router's row of one expert in layer 1. That expert has a logit of 0 for each
/// token.
fn with_an_expert_that_is_never_chosen(folder: &Path, name: &str, expert: usize) -> PathBuf {
    let copy = folder.join("model");
    std::fs::create_dir_all(&copy).unwrap();
    for file in std::fs::read_dir(MOE.path("models").join(name)).unwrap() {
        let file = file.unwrap().path();
        std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    let file = copy.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let changed: Vec<_> = tensors
        .iter()
        .map(|(name, view)| {
            let mut data = view.data().to_vec();
            if name == "model.layers.1.mlp.gate.weight" {
                let row = data.len() / view.shape()[0];
                data[expert * row..(expert + 1) * row].fill(0);
            }
            (name.to_owned(), view.dtype(), view.shape().to_vec(), data)
        })
        .collect();
    let views =
        changed.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
    copy
}

#[test]
fn a_dead_expert_is_named_once_with_its_layer() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_an_expert_that_is_never_chosen(folder.path(), "qwen3_moe_step2", 5);
    let (data, metrics) = (chats(folder.path(), 60), folder.path().join("metrics.jsonl"));
    let out = folder.path().join("adapter");
    let words = ["--data", &data, "--steps", "9", "--batch", "4", "--ctx", "48", "--lora", "r=2,targets=q_proj"];
    let mut command = finetune(&model, folder.path(), &words);
    let output = command.arg("--out").arg(&out).arg("--metrics").arg(&metrics).output().unwrap();
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    // In so short a run, other experts may be unused, too.
    let warnings = text.lines().filter(|line| line.contains("no token chose "));
    let named = warnings.filter_map(|line| line.split_once("layer 1: ")?.1.split([';', ')']).next());
    let numbers = named.flat_map(|experts| experts.split([' ', ',']));
    assert_eq!(numbers.filter(|number| *number == "5").count(), 1, "{text}");
    let lines = std::fs::read_to_string(&metrics).unwrap();
    let steps: Vec<Value> = lines.lines().map(|line| candle_zero::serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<&Value> = steps.iter().filter(|line| !line["loss"].is_null()).collect();
    assert_eq!(steps.len(), 9);
    for step in steps {
        assert_eq!(step["smallest_expert_share"], 0.0, "{step}");
        assert!(step["unused_experts"].as_u64().unwrap() >= 1 && step["largest_expert_share"].as_f64().unwrap() > 0.0);
        assert!(step.get("router_aux_loss").is_none());
    }
}

#[test]
fn experts_in_mxfp4_are_trained_in_four_bits_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let (data, model) = (chats(folder.path(), 30), MOE.path("models/gpt_oss_mxfp4"));
    let lora = "r=2,targets=q_proj,target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj";
    let adapter = folder.path().join("adapter");
    let words = [
        &["--data", &data, "--steps", "2", "--batch", "2", "--ctx", "48", "--lora", lora][..],
        &["--qlora", "--keep_layers", "1", "--lr", "0.01", "--dtype", "bf16"],
    ];
    let output = finetune(&model, folder.path(), &words.concat()).arg("--out").arg(&adapter).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let read = Adapter::read(&adapter).unwrap();
    assert_eq!(read.config.target_parameters, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]);
    let merged = folder.path().join("merged");
    let output = zerorun().arg("merge").arg(&model).arg(&adapter).arg("--out").arg(&merged).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let base = BaseModel::open(&merged).unwrap();
    let config = base.config_json();
    assert!(config.get("quantization_config").is_none() && config["dtype"] == "bfloat16");
    let count = base.config().parameters().unwrap().len();
    assert!(stdout(&output).contains(&format!("{count} tensors, 6 of them with the adapter")), "{}", stdout(&output));
    let generate = |model: &Path, more: &[&str]| {
        let words = ["--prompt", "3 and 4?", "--max_tokens", "5", "--temperature", "0"];
        let output = zerorun().arg("generate").arg(model).args(words).args(more).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    generate(&merged, &[]);
    generate(&model, &["--adapter", adapter.to_str().unwrap()]);
}

#[test]
fn a_mixture_in_a_pipeline_has_the_bits_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "r=2,targets=q_proj,target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj";
    let options_for = |out: &str| Options {
        method: TuningMethod::Lora(lora.parse().unwrap()),
        ..options(folder.path(), "mixtral", out)
    };
    let one_rank = train(&options_for("alone"), 1, 0);
    let pipeline = train(&Options { pipeline: Some(PipelineStages::Number(2)), ..options_for("pipeline") }, 2, 0);
    for (one, two) in one_rank.iter().zip(&pipeline) {
        assert_eq!((one.loss, one.grad_norm), (two.loss, two.grad_norm));
        assert!(one.experts.is_some() && two.experts.is_none());
    }
    let [one, two] = ["alone", "pipeline"].map(|out| Adapter::read(folder.path().join(out)).unwrap());
    for name in ["base_layer.lora_A.weight", "base_layer.lora_B.weight", "lora_A.weight", "lora_B.weight"] {
        let name = format!("model.layers.1.mlp.experts.{name}");
        assert_eq!(one.tensor(&name).unwrap(), two.tensor(&name).unwrap(), "{name}");
    }
}

/// Returns the steps of a run on `world` ranks with experts divided among `size` of them.
fn train_divided(options: &Options, world: usize, stage: u8, size: usize) -> Vec<StepReport> {
    let config = options.out.with_extension("json");
    let text = format!(
        r#"{{"zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0}},
             "expert_parallel": {{"enabled": true, "autoep_size": {size}}}}}"#
    );
    std::fs::write(&config, text).unwrap();
    let options = Options { ds_config: Some(config), micro_batch: 4 / world, ..options.clone() };
    let ranks = threads::run(world, |comm| {
        let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
        let mut steps = vec![];
        while let Some(step) = run.step()? {
            steps.push(step);
        }
        run.finish()?;
        Ok(steps)
    });
    ranks.unwrap().remove(0).unwrap()
}

#[test]
fn a_mixture_with_divided_experts_is_fine_tuned_as_with_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "r=2,targets=q_proj,target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj";
    let methods = [
        ("full", TuningMethod::Full),
        ("lora", TuningMethod::Lora(lora.parse().unwrap())),
        ("qlora", TuningMethod::Qlora(lora.parse().unwrap())),
    ];
    for (method, tuning) in methods {
        for name in ["mixtral", "qwen3_moe_step2"] {
            let run = |world: usize, stage: u8, size: usize| {
                let out = format!("{method}_{name}_{world}_{stage}_{size}");
                let validation = Some(ValidationData::Fraction(0.2));
                let options = Options {
                    method: tuning.clone(),
                    validation,
                    eval_every: Some(3),
                    ..options(folder.path(), name, &out)
                };
                (train_divided(&options, world, stage, size), options.out)
            };
            let numbers = |steps: &[StepReport]| -> Vec<[Option<f64>; 3]> {
                steps.iter().map(|step| [Some(step.loss), step.grad_norm, step.val_loss]).collect()
            };
            let bytes = |out: &Path| {
                let names = ["adapter_model.safetensors", "model.safetensors"];
                names.map(|name| std::fs::read(out.join(name)).unwrap_or_default())
            };
            let (whole, _) = run(2, 0, 1);
            let (divided, out) = run(2, 0, 2);
            for (one, two) in whole.iter().zip(&divided) {
                assert!((one.loss - two.loss).abs() < 5e-5, "{method} {name}: {} {}", one.loss, two.loss);
                assert_eq!(one.experts, two.experts, "each row is counted once");
            }
            for stage in [2, 3] {
                let (steps, at_stage) = run(2, stage, 2);
                assert_eq!(numbers(&steps), numbers(&divided), "{method} {name}, stage {stage}");
                let (found, expected) = (bytes(&at_stage), bytes(&out));
                assert!(found == expected && expected.iter().any(|file| !file.is_empty()), "{method} {name}, {stage}");
            }
            if name == "qwen3_moe_step2" {
                let of_four = run(4, 3, 2).0;
                let again = run(4, 1, 2).0;
                assert_eq!(numbers(&of_four), numbers(&again), "{method} {name}");
            }
        }
    }
}

#[test]
fn options_that_a_mixture_cannot_have_are_refused_by_flag() {
    let folder = tempfile::tempdir().unwrap();
    let text = |options: Options| {
        let error = PreparedRun::new(options, &mut |_| ()).unwrap_err().to_string();
        error.replace(folder.path().to_str().unwrap(), "DIR")
    };
    let defaults = |name: &str| options(folder.path(), name, "out");
    let qlora = TuningMethod::Qlora("r=2".parse().unwrap());
    insta::assert_snapshot!(text(Options { router_aux_loss_coef: Some(-1.0), ..defaults("mixtral") }), @"--router_aux_loss_coef is -1, but must be a finite number of at least 0");
    insta::assert_snapshot!(text(Options { keep_layers: vec![0], ..defaults("mixtral") }), @"--keep_layers requires --qlora, because only QLoRA holds weights in 4 bits");
    insta::assert_snapshot!(text(Options { keep_layers: vec![0, 2], method: qlora, ..defaults("mixtral") }), @"--keep_layers contains 2, but the model's layers are numbered from 0 to 1");
    let in_pipeline = Options { pipeline: Some(PipelineStages::Number(2)), ..defaults("mixtral") };
    insta::assert_snapshot!(text(Options { router_aux_loss_coef: Some(0.1), ..in_pipeline }), @"--pipeline cannot be combined with the load-balancing loss of a mixture of experts, because no stage has the routers of all blocks; give --router_aux_loss_coef 0, or leave --pipeline out");
    let llama = Options { model: crate::fixtures::path("models/llama"), ..defaults("mixtral") };
    insta::assert_snapshot!(text(Options { router_aux_loss_coef: Some(0.1), ..llama }), @"--router_aux_loss_coef is for mixtures of experts, but the model is not one; leave it out");
}
