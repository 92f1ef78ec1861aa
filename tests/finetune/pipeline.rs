//! Fine-tuning in a pipeline: the same bits and result files as on one rank, checkpoints for any number of ranks, and
//! refusals.

use crate::fixtures::{MODELS, path};
use crate::runs::{chats, finetune, write};
use crate::support::processes::{stderr, stdout};
use candle_zero::Result;
use candle_zero::comm::threads;
use candle_zero::serde_json::{Value, json};
use candle_zero_finetune::{
    CheckpointOptions, FineTune, Options, PipelineStages, PreparedRun, Source, StepReport, TrainingLength,
    TuningMethod, ValidationData, WarmupLength,
};
use std::path::{Path, PathBuf};

/// Copies a model into `folder`, with Llama's tokenizer, because the other models have none. Returns the copy.
fn model(folder: &Path, name: &str) -> PathBuf {
    let copy = folder.join(format!("model-{name}"));
    std::fs::create_dir_all(&copy).unwrap();
    let list = |model: &str| std::fs::read_dir(path("models").join(model)).unwrap().map(|entry| entry.unwrap().path());
    let is_of_tokenizer = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().contains("token");
    for file in list("llama").filter(is_of_tokenizer).chain(list(name)) {
        std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    copy
}

fn options(folder: &Path, name: &str, data: &str, out: &str) -> Options {
    Options {
        data: vec![Source::parse(data).unwrap()],
        method: TuningMethod::Lora("r=4,dropout=0.1".parse().unwrap()),
        length: TrainingLength::Steps(3),
        lr: Some(5e-3),
        batch: Some(4),
        ctx: Some(48),
        warmup: WarmupLength::Steps(1),
        validation: Some(ValidationData::Fraction(0.2)),
        eval_every: Some(2),
        cache: Some(folder.join("cache")),
        ..Options::new(model(folder, name), folder.join(out))
    }
}

fn in_pipeline(options: &Options, stages: usize, out: &str) -> Options {
    let out = options.out.with_file_name(out);
    Options { pipeline: Some(PipelineStages::Number(stages)), out, ..options.clone() }
}

/// Writes a DeepSpeed configuration.
fn config(folder: &Path, name: &str, config: &Value) -> Option<PathBuf> {
    Some(write(folder, name, &config.to_string()).into())
}

/// The numbers of a step that do not depend on time: loss, norm, learning rate, tokens and validation loss.
type Numbers = (f64, Option<f64>, f64, u64, Option<f64>);

fn numbers(step: &StepReport) -> Numbers {
    (step.loss, step.grad_norm, step.lr, step.tokens, step.val_loss)
}

/// Trains on `world` ranks to the end, or for `steps` steps without a result. Returns the steps of rank 0.
fn train_until(options: &Options, world: usize, steps: Option<u64>) -> Vec<Numbers> {
    let ranks = threads::run(world, |comm| -> Result<_> {
        let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
        assert_eq!(run.engine().world_size(), world);
        let mut done = vec![];
        while let Some(step) = run.step()? {
            done.push(numbers(&step));
            if steps == Some(step.step + 1) {
                return Ok(done);
            }
        }
        run.finish()?;
        Ok(done)
    });
    let mut ranks: Vec<_> = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks report different steps: {ranks:?}");
    ranks.remove(0)
}

fn train(options: &Options, world: usize) -> Vec<Numbers> {
    train_until(options, world, None)
}

/// Returns the weights of a result and of the best model.
fn weights(options: &Options) -> Vec<Vec<u8>> {
    let name = match options.method {
        TuningMethod::Full => "model.safetensors",
        _ => "adapter_model.safetensors",
    };
    [options.out.clone(), options.best()].map(|folder| std::fs::read(folder.join(name)).unwrap()).into()
}

#[test]
fn a_pipeline_has_the_steps_validations_and_adapters_of_one_rank_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 30);
    // The embeddings of GPT-2 and Llama are tied; those of Mistral are not.
    for model in ["gpt2", "llama", "mistral"] {
        let lora = || "r=4,dropout=0.1".parse().unwrap();
        for (method, name) in
            [(TuningMethod::Lora(lora()), "lora"), (TuningMethod::Qlora(lora()), "qlora"), (TuningMethod::Full, "full")]
        {
            let plain = Options { method, ..options(folder.path(), model, &data, &format!("{model}-{name}")) };
            let steps = train(&plain, 1);
            assert!(steps[2].0 < steps[0].0 && steps.iter().filter(|step| step.4.is_some()).count() == 2, "{steps:?}");
            for ranks in [2, 4] {
                let divided = in_pipeline(&plain, ranks, &format!("{model}-{name}-{ranks}"));
                assert_eq!(train(&divided, ranks), steps, "{model}, {name}, {ranks} ranks");
                assert!(weights(&divided) == weights(&plain), "{model}, {name}, {ranks} ranks: the weights differ");
            }
        }
    }
}

#[test]
fn every_family_of_decoders_can_be_divided() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 30);
    for model in MODELS {
        let plain = Options { length: TrainingLength::Steps(2), ..options(folder.path(), model, &data, model) };
        let divided = in_pipeline(&plain, 2, &format!("{model}-2"));
        assert_eq!(train(&divided, 2), train(&plain, 1), "{model}");
        assert!(weights(&divided) == weights(&plain), "{model}");
    }
}

#[test]
fn two_pipelines_have_the_bits_of_two_ranks_and_padded_rows_too() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 30);
    for (packing, micro_batch) in [(true, 1), (false, 2)] {
        let name = format!("two-{packing}");
        let plain = Options { packing, micro_batch, ..options(folder.path(), "llama", &data, &name) };
        let steps = train(&plain, 2);
        let divided = in_pipeline(&plain, 2, &format!("{name}-divided"));
        assert_eq!(train(&divided, 4), steps, "packing {packing}");
        assert!(weights(&divided) == weights(&plain), "packing {packing}");
        // The results are the same with a pipeline from a configuration, with a different schedule and sharded
        // optimizer states.
        let section = json!({"stages": 2, "schedule": "zero_bubble"});
        let ds_config =
            config(folder.path(), "pipeline.json", &json!({"pipeline": section, "zero_optimization": {"stage": 1}}));
        let configured = Options { ds_config, out: folder.path().join(format!("{name}-configured")), ..plain.clone() };
        assert_eq!(train(&configured, 4), steps, "packing {packing}");
        assert!(weights(&configured) == weights(&plain), "packing {packing}");
    }
}

#[test]
fn a_run_resumes_with_another_number_of_stages_and_without_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 30);
    for (method, name) in [(TuningMethod::Lora("r=4".parse().unwrap()), "lora"), (TuningMethod::Full, "full")] {
        let length = TrainingLength::Steps(4);
        let plain = Options { method, length, ..options(folder.path(), "gpt2", &data, &format!("whole-{name}")) };
        let steps = train(&plain, 1);
        let saving = |name: &str| {
            let dir = folder.path().join(format!("saves-{name}"));
            Some(CheckpointOptions { dir, every: Some(1), keep: None, resume: true })
        };
        // The first run of each pair ends without a result after two steps, which are saved.
        for (from, to) in [(2, 4), (4, 2), (2, 1), (1, 2)] {
            let name = format!("{name}-{from}-{to}");
            let run = Options { saving: saving(&name), ..in_pipeline(&plain, from, &name) };
            assert_eq!(train_until(&run, from, Some(2)), steps[..2], "{name}");
            let resumed = Options { pipeline: Some(PipelineStages::Number(to)), ..run };
            assert_eq!(train(&resumed, to), steps[2..], "{name}");
            assert!(weights(&resumed) == weights(&plain), "{name}");
        }
    }
}

/// Returns the names and contents of the files in a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file = |path: PathBuf| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap());
    let mut files: Vec<_> = entries.filter(|path| path.is_file()).map(file).collect();
    files.sort();
    files
}

#[test]
fn the_command_says_how_the_model_is_divided_and_writes_the_files_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let run = |out: &str, words: &[&str]| {
        let out = folder.path().join(out);
        let words =
            [&["--data", &data, "--steps", "3", "--batch", "4", "--ctx", "48", "--out", out.to_str().unwrap()], words]
                .concat();
        let output = finetune(&path("models/llama"), folder.path(), &words).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (files(&out), format!("{}{}", stdout(&output), stderr(&output)))
    };
    let (expected, _) = run("one", &[]);
    let metrics = folder.path().join("metrics.jsonl");
    let (divided, log) = run("two", &["-n", "2", "--pipeline", "auto", "--metrics", metrics.to_str().unwrap()]);
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&divided), names(&expected));
    for (found, expected) in divided.iter().zip(&expected) {
        assert!(found == expected, "{} differs", found.0);
    }
    let line = |part: &str| log.lines().find(|line| line.contains(part)).unwrap_or_default().to_owned();
    insta::assert_snapshot!(line("parameter tensors"), @"[rank 0] 42 of 71 parameter tensors are trained, at stage 0 on 2 ranks, in 1 pipeline of 2 ranks, which wait for 22 % of a step");
    assert!(line("chosen for").contains("a pipeline of 2 ranks, stage 0, 4 micro batches of 1 row: at most"), "{log}");
    let lines = std::fs::read_to_string(metrics).unwrap();
    assert_eq!(lines.lines().count(), 4, "{lines}");
    assert!(lines.lines().last().unwrap().contains("\"world_size\":2"), "{lines}");
}

#[test]
fn what_cannot_be_combined_with_a_pipeline_is_refused_before_a_rank_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 8);
    let out = folder.path().join("out").to_str().unwrap().to_string();
    let refusal = |words: &[&str]| {
        let words = [&["--data", &data, "--out", &out, "--ctx", "48"], words].concat();
        let output = finetune(&path("models/llama"), folder.path(), &words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!Path::new(&out).exists());
        stderr(&output).replace(folder.path().to_str().unwrap(), "DIR").lines().next().unwrap_or_default().to_string()
    };
    let with = |name: &str, content: Value| write(folder.path(), name, &content.to_string());
    let flag = ["-n", "2", "--pipeline", "2"];
    let with_config = |content: Value| {
        let file = with("ds.json", content);
        refusal(&["-n", "2", "--ds_config", &file])
    };
    insta::assert_snapshot!(refusal(&["-n", "4", "--pipeline", "3"]), @"zerorun: --pipeline is 3, which does not divide 4 ranks; give a number that does, or a different number of ranks");
    insta::assert_snapshot!(refusal(&["--pipeline", "2"]), @"zerorun: --pipeline is 2, which does not divide 1 rank; give a number that does, or a different number of ranks");
    insta::assert_snapshot!(refusal(&["--pipeline", "0"]), @"zerorun: invalid value '0' for '--pipeline <RANKS|auto>': --pipeline is 0, but must be a number of ranks, at least 1, or auto for all ranks");
    insta::assert_snapshot!(refusal(&[&flag[..], &["--dpo", "beta=0.1"]].concat()), @"zerorun: --pipeline cannot be combined with --dpo, which also needs the output of the model without its adapters for each pair; leave out one of the two");
    insta::assert_snapshot!(refusal(&[&flag[..], &["--task", "classify"]].concat()), @"zerorun: --pipeline divides the layers of language models, not those of a classifier; train it without a pipeline");
    insta::assert_snapshot!(refusal(&[&flag[..], &["--prompt", "a"]].concat()), @"zerorun: --prompt is not supported in a pipeline, whose ranks have only parts of the model; leave out --prompt or --pipeline, and use zerorun generate with the result");
    insta::assert_snapshot!(refusal(&["-n", "8", "--pipeline", "8"]), @"zerorun: cannot train in a pipeline: 8 ranks along the pipeline (pipeline.stages; auto: all ranks) need more stages than the model's 6 layers can fill; use fewer ranks or chunks");
    insta::assert_snapshot!(with_config(json!({"pipeline": {"stages": 3}})), @"zerorun: --ds_config has pipeline.stages: 3, which does not divide 2 ranks; give a number that does, or a different number of ranks");
    insta::assert_snapshot!(with_config(json!({"pipeline": {"stages": "two"}})), @r#"zerorun: the configuration given as a value: `pipeline.stages`: expected a whole number (1 or more), found the string "two"; "auto" is also allowed"#);
    insta::assert_snapshot!(with_config(json!({"pipeline": {}, "zero_optimization": {"stage": 3}})), @"zerorun: --ds_config has a pipeline section, and a pipeline shards neither gradients nor parameters, but zero_optimization.stage is 3; set it to 0 or 1");
    let file = json!({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder.path().join("nvme")}});
    insta::assert_snapshot!(with_config(json!({"pipeline": {}, "zero_optimization": file})), @"zerorun: --ds_config has a pipeline section, and a pipeline keeps all parameters of its stages in memory; remove zero_optimization.offload_param from the configuration");
    insta::assert_snapshot!(with_config(json!({"pipeline": {}, "local_steps": {"steps": 5}})), @"zerorun: --ds_config has a pipeline section, and a pipeline cannot be combined with local_steps; remove one of the two");
    let file = with("stages.json", json!({"pipeline": {"stages": 4}}));
    insta::assert_snapshot!(refusal(&["-n", "4", "--pipeline", "2", "--ds_config", &file]), @r#"zerorun: --pipeline is 2, but the DeepSpeed configuration has pipeline.stages: 4; give only one of them, or "auto" there"#);
    insta::assert_snapshot!(refusal(&["-n", "4", "--ds_config", &file, "--batch", "3", "--micro_batch", "2"]), @"zerorun: --batch is 3, which is not a multiple of the 2 rows that are computed at the same time (--micro_batch 2 in 1 pipeline); give --batch 2 or 4, or another --micro_batch");
}
