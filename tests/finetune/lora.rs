//! The training of adapters matches that of PEFT step by step and gives the same bits at stages 0 and 3. Adapters are
//! exported as PEFT files, merged models and GGUF files.

use crate::fixtures::{
    adamw, adapted, base, batches, copy, json as record, max_difference, mean, numbers, path, rank_batch, step, tensors,
};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::comm::threads;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::nn::is_adapter;
use candle_zero::{Engine, Result};
use candle_zero_finetune::{Adapter, AdapterInitialValues, AdapterTensor, BaseModel, GgufFormat, MergedModel};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// The tolerances from the records' README.
const LOSS: f64 = 1e-4;
const NORM: f64 = 2e-4;
const LOGITS: f32 = 2e-4;
const WEIGHTS: f32 = 1e-4;

const CASES: [(&str, &str); 9] = [
    ("llama", "attn_r8"),
    ("llama", "all_r4_rslora"),
    ("llama", "dora_r8"),
    ("qwen3", "attn_r8"),
    ("qwen3", "all_r4_rslora"),
    ("qwen3", "dora_r8"),
    ("gpt2", "attn_r8"),
    ("gpt2", "all_r4_rslora"),
    ("gpt2", "dora_r8"),
];

fn folder(model: &str, case: &str) -> String {
    format!("lora/{model}.{case}")
}

struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    final_loss: f64,
    adapter: Adapter,
}

fn train(model: &str, case: &str, world: usize, stage: u8) -> Run {
    let (base, folder) = (base(model), folder(model, case));
    let run = record(format!("{folder}/run.json"));
    let rates = numbers(&run["lr"]);
    let batches = batches();
    let config = adamw(5e-3, stage);
    let runs = threads::run(world, |comm| -> Result<_> {
        let rank = comm.rank();
        let rates = rates.clone();
        let initial = Adapter::read(path(format!("{folder}/initial")))?;
        let sizes = adapted(&base, &initial);
        let lora = initial.config.clone();
        let mut engine = Engine::builder()
            .communicator(comm)
            .device(Device::Cpu)
            .initial_values(Arc::new(AdapterInitialValues::new(&base, &sizes, Some(initial))?))
            .trainable(|name, _| is_adapter(name))
            .schedule(move |applied: u64| rates.get(applied as usize).copied().unwrap_or(0.0))
            .initialize(|vb| Decoder::new(&sizes, vb), config.clone())?;
        let (mut losses, mut norms) = (vec![], vec![]);
        for batch in &batches {
            let (inputs, targets) = rank_batch(batch, world, rank);
            let (loss, norm) = step(&mut engine, |model| model.loss(&inputs, &targets))?;
            losses.push(loss);
            norms.push(norm);
        }
        let (inputs, targets) = rank_batch(&batches[0], world, rank);
        let loss = engine.eval(|model| model.loss(&inputs, &targets))?;
        let final_loss = mean(&mut engine, &loss)?;
        Ok(Run { losses, norms, final_loss, adapter: Adapter::of_engine(&mut engine, lora, Some(model.into()))? })
    });
    runs.unwrap().remove(0).unwrap()
}

fn compare(run: &Run, record: &Value, context: &str) {
    let (losses, norms) = (numbers(&record["loss"]), numbers(&record["grad_norm"]));
    assert_eq!((losses.len(), run.losses.len()), (12, 12));
    let mut worst = (run.final_loss - record["loss_after_on_batch0"].as_f64().unwrap()).abs();
    let mut worst_norm = 0f64;
    for step in 0..12 {
        worst = worst.max((run.losses[step] - losses[step]).abs());
        worst_norm = worst_norm.max((run.norms[step] / norms[step] - 1.0).abs());
    }
    println!("{context}: loss {worst:.1e}, norm {worst_norm:.1e}");
    assert!(worst <= LOSS && worst_norm <= NORM, "{context}: loss {worst:.1e}, norm {worst_norm:.1e}");
}

/// Returns the largest difference between an adapter's tensors and those in a PEFT file. The adapter must have all
/// tensors of the file.
fn adapter_differs_by(adapter: &Adapter, peft: &Path) -> f32 {
    let file = candle_core::safetensors::load(peft, &Device::Cpu).unwrap();
    let mut worst = 0f32;
    for (key, want) in &file {
        let AdapterTensor { shape, values } = adapter.tensor(key.strip_prefix("base_model.model.").unwrap()).unwrap();
        let found = Tensor::new(&values[..], &Device::Cpu).unwrap().reshape(&shape[..]).unwrap();
        worst = worst.max(max_difference(&found, want));
    }
    worst
}

fn logits(config: &DecoderConfig, vb: VarBuilder<'_>, model: &str) -> Tensor {
    let ids = tensors(format!("logits/{model}.safetensors"))["input_ids"].to_dtype(DType::U32).unwrap();
    Decoder::new(config, vb).unwrap().forward(&ids).unwrap().get(1).unwrap()
}

fn follow(model: &str, case: &str) {
    let (base, folder) = (base(model), folder(model, case));
    let record = record(format!("{folder}/run.json"));
    let final_file = path(format!("{folder}/final/adapter_model.safetensors"));
    for world in [1, 2] {
        let mut first: Option<Adapter> = None;
        for stage in [0, 3] {
            let context = format!("{model}.{case}, stage {stage}, world size {world}");
            let run = train(model, case, world, stage);
            compare(&run, &record, &context);
            let difference = adapter_differs_by(&run.adapter, &final_file);
            assert!(difference <= WEIGHTS, "{context}: the adapter differs by {difference}");
            let first = first.get_or_insert_with(|| run.adapter.clone());
            assert!(*first == run.adapter, "{context}: bits differ from those of stage 0");
        }
    }
    // PEFT's final adapter is read, written, read again, applied to the base, and merged into it.
    let out = tempfile::tempdir().unwrap();
    let names = base.config().parameters().unwrap();
    let read = Adapter::read(final_file.parent().unwrap()).unwrap();
    read.write(out.path().join("adapter"), names.iter().map(|(name, _)| name.as_str())).unwrap();
    let adapter = Adapter::read(out.path().join("adapter")).unwrap();
    let [ours, theirs] = [out.path().join("adapter"), final_file.parent().unwrap().to_owned()].map(|folder| {
        let file = candle_core::safetensors::load(folder.join("adapter_model.safetensors"), &Device::Cpu).unwrap();
        let mut keys: Vec<String> = file.into_keys().collect();
        keys.sort();
        keys
    });
    assert_eq!(ours, theirs);
    assert_eq!(adapter_differs_by(&adapter, &final_file), 0.0);
    let want = &tensors(format!("{folder}/logits.safetensors"))["final_adapter"];
    let sizes = adapted(&base, &adapter);
    let values = AdapterInitialValues::new(&base, &sizes, Some(adapter.clone())).unwrap();
    let difference = max_difference(&logits(&sizes, values.var_builder(DType::F32, &Device::Cpu), model), want);
    assert!(difference <= LOGITS, "{model}.{case}: logits differ by {difference}");

    let merged = MergedModel::new(&base, Some(&adapter)).unwrap();
    let target = out.path().join("merged");
    merged.write_hugging_face(&target, Some(candle_zero::checkpoint::ConsolidatedDtype::F32)).unwrap();
    let written = BaseModel::open(&target).unwrap();
    let difference =
        max_difference(&logits(written.config(), written.var_builder(DType::F32, &Device::Cpu), model), want);
    assert!(difference <= LOGITS, "{model}.{case}: merged logits differ by {difference}");
    let changed = tensors(format!("{folder}/merged.safetensors"));
    let file = candle_core::safetensors::load(target.join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, want) in &changed {
        let difference = max_difference(&file[name], want);
        assert!(difference <= WEIGHTS, "{model}.{case}: merged {name} differs by {difference}");
    }
    for (name, shape) in base.config().parameters().unwrap() {
        if !changed.contains_key(&name) {
            let want = base.values().values(&name, &shape, 0..shape.iter().product()).unwrap();
            let found = file[&name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(found == want, "{model}.{case}: {name} is not the base's");
        }
    }
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        if base.folder().join(name).is_file() {
            assert_eq!(std::fs::read(target.join(name)).unwrap(), std::fs::read(base.folder().join(name)).unwrap());
        }
    }
}

#[test]
fn every_recorded_adapter_is_followed() {
    let records = std::fs::read_dir(path("lora")).unwrap().count();
    assert_eq!(records, CASES.len());
    assert!(CASES.iter().all(|(model, case)| path(folder(model, case)).is_dir()));
}

macro_rules! cases {
    ($($name:ident: $number:literal;)*) => {
        $(#[test]
        fn $name() {
            let (model, case) = CASES[$number];
            follow(model, case);
        })*
    };
}

cases! {
    lora_on_attention_of_llama_follows_peft: 0;
    rslora_on_all_of_llama_follows_peft: 1;
    dora_on_llama_follows_peft: 2;
    lora_on_attention_of_qwen3_follows_peft: 3;
    rslora_on_all_of_qwen3_follows_peft: 4;
    dora_on_qwen3_follows_peft: 5;
    lora_on_attention_of_gpt2_follows_peft: 6;
    rslora_on_all_of_gpt2_follows_peft: 7;
    dora_on_gpt2_follows_peft: 8;
}

#[test]
fn a_fresh_adapter_changes_nothing_whatever_its_kind() {
    for model in ["llama", "gpt2", "phi3", "gemma2"] {
        let base = base(model);
        let want = logits(base.config(), base.var_builder(DType::F32, &Device::Cpu), model);
        let ids = tensors(format!("logits/{model}.safetensors"))["input_ids"].to_dtype(DType::U32).unwrap();
        for lora in ["r=4", "r=4,dora,dropout=0.5", "r=2,rslora"] {
            let sizes = DecoderConfig { lora: Some(lora.parse().unwrap()), ..base.config().clone() };
            let config =
                json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}});
            let runs = threads::run(1, |comm| {
                let values = Arc::new(AdapterInitialValues::new(&base, &sizes, None)?);
                let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(values);
                let builder = builder.trainable(|name, _| is_adapter(name));
                let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config.clone())?;
                engine.eval(|model| model.forward(&ids)?.get(1))
            });
            let difference = max_difference(&runs.unwrap().remove(0).unwrap(), &want);
            assert!(difference <= 1e-5, "{model}, {lora}: logits differ by {difference}");
        }
    }
}

/// Returns a copy of a model's folder with the common tokenizer of the test models.
fn with_tokenizer(model: &str) -> tempfile::TempDir {
    let folder = copy(model);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(path("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn a_written_gguf_holds_the_merged_model() {
    for (model, case) in [("llama", "all_r4_rslora"), ("mistral", ""), ("qwen2", ""), ("qwen3", "dora_r8")] {
        let folder_of_base = with_tokenizer(model);
        let base = BaseModel::open(folder_of_base.path()).unwrap();
        let out = tempfile::tempdir().unwrap();
        let case = folder(model, case);
        let adapter = path(format!("{case}/final"));
        let adapter = adapter.is_dir().then(|| Adapter::read(adapter).unwrap());
        let merged = MergedModel::new(&base, adapter.as_ref()).unwrap();
        let want = match &adapter {
            Some(_) => tensors(format!("{case}/logits.safetensors"))["final_adapter"].clone(),
            None => logits(base.config(), base.var_builder(DType::F32, &Device::Cpu), model),
        };
        for (format, tolerance) in [(GgufFormat::F16, 0.02), (GgufFormat::Q8_0, 0.35)] {
            let file = out.path().join("model.gguf");
            merged.write_gguf(&file, format).unwrap();
            let read = BaseModel::open(&file).unwrap();
            // In the file, Mistral's context is limited to its attention window, because llama.cpp does not apply the
            // window.
            let time = read.config().ctx.min(48);
            assert_eq!(time < 48, model == "mistral");
            let ids = tensors(format!("logits/{model}.safetensors"))["input_ids"].to_dtype(DType::U32).unwrap();
            let ids = ids.narrow(0, 1, 1).unwrap().narrow(1, 0, time).unwrap().contiguous().unwrap();
            let built = Decoder::new(read.config(), read.var_builder(DType::F32, &Device::Cpu)).unwrap();
            let found = built.forward(&ids).unwrap().get(0).unwrap();
            let difference = max_difference(&found, &want.narrow(0, 0, time).unwrap());
            println!("{model} {format:?}: logits differ by {difference}");
            assert!(difference <= tolerance, "{model} {format:?}: logits differ by {difference}");
        }
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 1);
    }
}

/// Returns the metadata and the list of tensors that Candle reads from a GGUF file.
fn content(file: &Path) -> Content {
    Content::read(&mut std::fs::File::open(file).unwrap()).unwrap()
}

#[test]
fn a_written_gguf_has_the_keys_and_tensors_of_llama_cpp() {
    let out = tempfile::tempdir().unwrap();
    let written = |model: &str| {
        let folder = with_tokenizer(model);
        let base = BaseModel::open(folder.path()).unwrap();
        let file = out.path().join(model);
        MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap();
        content(&file)
    };
    let llama = written("llama32");
    let text = |key: &str| llama.metadata[key].to_string().unwrap().clone();
    let number = |key: &str| llama.metadata[key].to_u32().unwrap();
    assert_eq!(text("general.architecture"), "llama");
    assert_eq!((text("tokenizer.ggml.model"), text("tokenizer.ggml.pre")), ("gpt2".into(), "gpt-2".into()));
    let numbers = [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "vocab_size",
    ];
    let found = numbers.map(|key| number(&format!("llama.{key}")));
    assert_eq!(found, [2, 256, 64, 96, 4, 2, 16, 16, 512]);
    assert_eq!(["bos", "eos", "padding"].map(|token| number(&format!("tokenizer.ggml.{token}_token_id"))), [0, 2, 3]);
    assert_eq!(llama.metadata["llama.rope.freq_base"].to_f32().unwrap(), 5e5);
    let tokens = llama.metadata["tokenizer.ggml.tokens"].to_vec().unwrap();
    assert_eq!((tokens.len(), tokens[1].to_string().unwrap().as_str()), (512, "<|im_start|>"));
    let kinds = llama.metadata["tokenizer.ggml.token_type"].to_vec().unwrap();
    assert_eq!([0, 1, 4].map(|id: usize| kinds[id].to_i32().unwrap()), [3, 3, 1]);
    assert!(!llama.metadata["tokenizer.ggml.merges"].to_vec().unwrap().is_empty());
    let shape = |content: &Content, name: &str| content.tensor_infos[name].shape.dims().to_vec();
    assert_eq!(shape(&llama, "rope_freqs.weight"), [8]);
    assert_eq!(shape(&llama, "blk.1.ffn_down.weight"), [64, 96]);
    assert!(!llama.tensor_infos.contains_key("output.weight"));

    let gpt2 = written("gpt2");
    assert_eq!(gpt2.metadata["general.architecture"].to_string().unwrap(), "gpt2");
    assert_eq!(shape(&gpt2, "blk.0.attn_qkv.weight"), [144, 48]);
    assert_eq!(shape(&gpt2, "position_embd.weight"), [128, 48]);
    // A Conv1D weight is transposed.
    let weight = tensors("models/gpt2/model.safetensors")["transformer.h.0.attn.c_attn.weight"].t().unwrap();
    let mut file = std::fs::File::open(out.path().join("gpt2")).unwrap();
    let found = gpt2.tensor(&mut file, "blk.0.attn_qkv.weight", &Device::Cpu).unwrap();
    let difference = max_difference(&found.dequantize(&Device::Cpu).unwrap(), &weight.contiguous().unwrap());
    assert!(difference < 1e-3, "{difference}");
}

#[test]
fn a_model_that_gguf_has_no_keys_for_is_refused_and_nothing_is_written() {
    let out = tempfile::tempdir().unwrap();
    let base = base("gemma2");
    let error =
        MergedModel::new(&base, None).unwrap().write_gguf(out.path().join("x.gguf"), GgufFormat::F16).unwrap_err();
    let text = error.to_string().replace(&base.folder().display().to_string(), "MODEL");
    insta::assert_snapshot!(text, @"MODEL cannot be written as GGUF: its query_pre_attn_scalar is 12, but architecture gemma2 of llama.cpp assumes 16 for a model with 2 blocks");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn an_adapter_for_another_base_is_refused_with_its_tensor() {
    let adapter = Adapter::read(path("lora/llama.attn_r8/final")).unwrap();
    let base = base("qwen3");
    let text = |error: candle_zero::Error| error.to_string().replace(&path("").display().to_string(), "");
    insta::assert_snapshot!(text(MergedModel::new(&base, Some(&adapter)).unwrap_err()), @"the adapter lora/llama.attn_r8/final (trained on llama) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: it has shape [8, 48], but the model needs [8, 40]; use the model that it was trained on");
    let sizes = adapted(&base, &adapter);
    insta::assert_snapshot!(text(AdapterInitialValues::new(&base, &sizes, Some(adapter)).unwrap_err()), @"the adapter lora/llama.attn_r8/final (trained on llama) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: it has shape [8, 48], but the model needs [8, 40]; use the model that it was trained on");
    let sizes = DecoderConfig { lora: Some("targets=q_proj+c_attn".parse().unwrap()), ..base.config().clone() };
    insta::assert_snapshot!(text(AdapterInitialValues::new(&base, &sizes, None).unwrap_err()), @"LoRA target c_attn is not the end of a projection's name; the projections that can have an adapter are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)");
}

#[test]
fn merging_into_a_folder_with_files_is_refused_and_changes_nothing() {
    let out = tempfile::tempdir().unwrap();
    std::fs::write(out.path().join("mine"), "x").unwrap();
    let base = base("llama");
    let error = MergedModel::new(&base, None).unwrap().write_hugging_face(out.path(), None).unwrap_err();
    let text = error.to_string().replace(&out.path().display().to_string(), "OUT");
    insta::assert_snapshot!(text, @"cannot write to OUT: the output must be a new or empty folder, but this folder is not empty; give another path");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 1);
}
