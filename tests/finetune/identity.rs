//! Without `--resume_anyway`, a checkpoint is resumed only by a run whose settings, as far as they affect the result,
//! are those of the run that saved it; any other run is refused with a list of the differences. Cached samples are used
//! only with the model files for which they were created; merged models have all of the base's templates; seeds take
//! effect.

use crate::fixtures::{copy, max_difference, path};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::{Device, Tensor, quantized::gguf_file};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;

/// A folder with a model and data for runs of four steps.
struct TestFolder {
    dir: tempfile::TempDir,
    model: PathBuf,
}

impl TestFolder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        std::fs::rename(copy("llama").keep(), &model).unwrap();
        for (name, add) in [("a.jsonl", 0), ("b.jsonl", 1)] {
            let chat = |i: usize| {
                json!({"messages": [
                    {"role": "user", "content": format!("{i}?")},
                    {"role": "assistant", "content": format!("{}", i * 3 % 7 + add)},
                ]})
            };
            let lines: String = (0..12).map(|i| format!("{}\n", chat(i))).collect();
            std::fs::write(dir.path().join(name), lines).unwrap();
        }
        Self { dir, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the training with changed or additional arguments.
    fn train(&self, out: &str, words: &[&str]) -> Output {
        let defaults = "--data a.jsonl --steps 4 --lora r=2,alpha=4 --ctx 32 --lr 1e-2 --cache cache";
        let is_overridden = |flag: &str| words.contains(&flag) || flag == "--lora" && words.contains(&"--adapter");
        let mut command = zerorun();
        command.current_dir(self.dir.path()).arg("finetune").arg(&self.model).args(["--out", out]);
        let defaults: Vec<&str> = defaults.split(' ').collect();
        defaults.chunks(2).filter(|pair| !is_overridden(pair[0])).for_each(|pair| _ = command.args(pair));
        command.args(words).output().unwrap()
    }

    /// Runs the training, which must succeed, and returns its output.
    fn trained(&self, out: &str, words: &[&str]) -> String {
        let output = self.train(out, words);
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output) + &stderr(&output)
    }

    /// Returns the message of a run that continues from `saves` with these arguments. The run must be refused before a
    /// rank starts.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.train("other", &[&["--save", "saves", "--resume"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}{}", stdout(&output), stderr(&output));
        assert!(!self.path("other").exists());
        stderr(&output).trim_end().to_owned()
    }

    fn adapter(&self, out: &str) -> Vec<u8> {
        std::fs::read(self.path(out).join("adapter_model.safetensors")).unwrap()
    }
}

/// Returns the settings that a refusal names.
fn named(text: &str) -> Vec<&str> {
    let list = text.split_once("different settings: ").unwrap().1.split_once(" (saved -> now)").unwrap().0;
    list.split("; ").map(|difference| difference.split_once(": ").unwrap().0).collect()
}

#[test]
fn a_run_with_other_settings_is_not_continued_and_all_of_them_are_named() {
    let folder = TestFolder::new();
    folder.trained("first", &["--save", "saves"]);
    let text = folder.refused(&["--lr", "1e-3", "--lora", "r=2,alpha=400", "--data", "b.jsonl"]);
    let (data, rest) = text.split_once("data: ").unwrap();
    assert!(data.ends_with("alpha: 4.0 -> 400.0; "), "{text}");
    assert!(rest.ends_with(
        "; lr: 0.01 -> 0.001 (saved -> now); continuing would mix the two runs; give the saved settings, or another \
         folder for --save to start over, or continue anyway with --resume_anyway"
    ), "{text}");
    for (words, expected) in [
        (&["--lora", "r=4,alpha=4"][..], &["r"][..]),
        (&["--lora", "r=2,alpha=4,rslora,dora,dropout=0.1,targets=q_proj"], &["dora", "dropout", "rslora", "targets"]),
        (&["--qlora"], &["method"]),
        (&["--steps", "8"], &["steps"]),
        (&["--seed", "7"], &["seed"]),
        (&["--ctx", "24"], &["ctx"]),
        (&["--batch", "4"], &["batch"]),
        (&["--packing", "false"], &["packing"]),
        (&["--order", "sequential"], &["order"]),
        (&["--scheduler", "linear"], &["rate"]),
        (&["--warmup", "2"], &["warmup"]),
        (&["--dtype", "bf16"], &["bf16.enabled"]),
    ] {
        let text = folder.refused(words);
        let found = named(&text);
        assert!(expected.iter().all(|name| found.contains(name)), "{words:?}: {text}");
        assert!(found.len() <= expected.len() + 6, "{words:?}: {text}");
    }
    // The run has already taken more steps than requested.
    let text = folder.refused(&["--steps", "3", "--resume_anyway"]);
    assert!(text.contains("is at step 4, but this run ends at step 3"), "{text}");

    // With --resume_anyway, the run reports the differences and continues.
    let words = ["--save", "saves", "--resume", "--steps", "8", "--lr", "1e-3", "--resume_anyway"];
    let output = folder.trained("anyway", &words);
    assert!(output.contains("this run continues from it as requested: lr: 0.01 -> 0.001; steps: 4 -> 8"), "{output}");
    // The checkpoint now belongs to that run.
    let output = folder.trained("again", &words[..7]);
    assert!(!output.contains("different settings"), "{output}");
}

/// Returns the names of the settings that the newest checkpoint in a folder records.
fn recorded(saves: &Path) -> Vec<String> {
    let tag = std::fs::read_to_string(saves.join("latest")).unwrap();
    let manifest = std::fs::read(saves.join(tag.trim()).join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["client_state"]["identity"].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn a_base_that_was_changed_is_found_whatever_weight_it_is() {
    let folder = TestFolder::new();
    folder.trained("first", &["--save", "saves"]);
    let file = folder.model.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    // Flips one bit of a weight in the middle of the file.
    let offset = bytes.len() / 2 / 4 * 4 + 1;
    bytes[offset] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(named(&folder.refused(&[])), ["base's weights"]);
}

#[test]
fn what_changes_nothing_of_a_result_may_differ_and_the_same_run_goes_on() {
    let folder = TestFolder::new();
    // The data fills two or more rows per step, which two ranks can share.
    let lines = std::fs::read_to_string(folder.path("a.jsonl")).unwrap();
    std::fs::write(folder.path("many.jsonl"), lines.repeat(20)).unwrap();
    folder.trained("whole", &["--data", "many.jsonl"]);
    // The folder is made to look like that of a run that was stopped after step 2: the newest checkpoint is of that
    // step.
    folder.trained("first", &["--data", "many.jsonl", "--save", "saves", "--save_every", "2"]);
    let tags = |dir: &Path| {
        let mut tags: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        tags.retain(|tag| tag != "latest" && !tag.to_string_lossy().starts_with('.'));
        tags.sort();
        tags
    };
    let saves = folder.path("saves");
    let found = tags(&saves);
    assert_eq!(found.len(), 2, "{found:?}");
    std::fs::remove_dir_all(saves.join(&found[1])).unwrap();
    std::fs::write(saves.join("latest"), found[0].to_str().unwrap()).unwrap();
    // The run continues on two ranks at stage 3, and saves at different steps. The number of rows in a step stays the
    // same.
    let config = json!({"zero_optimization": {"stage": 3}}).to_string();
    std::fs::write(folder.path("ds.json"), config).unwrap();
    let words =
        ["--save", "saves", "--resume", "-n", "2", "--save_every", "1", "--keep", "1", "--ds_config", "ds.json"];
    let output = folder.trained("second", &[&words[..], &["--data", "many.jsonl"]].concat());
    assert!(output.contains("continues after step 2") && !output.contains("different settings"), "{output}");
    // Two ranks sum gradients in a different order.
    let adapter = |out: &str| candle_core::safetensors::load_buffer(&folder.adapter(out), &Device::Cpu).unwrap();
    let (uninterrupted, resumed) = (adapter("whole"), adapter("second"));
    assert_eq!(uninterrupted.len(), resumed.len());
    for (name, values) in &uninterrupted {
        let difference = max_difference(values, &resumed[name]);
        assert!(difference < 1e-4, "{name} differs by {difference}");
    }
}

#[test]
fn rows_of_a_step_that_nobody_gave_stay_on_another_number_of_ranks_or_are_named() {
    let folder = TestFolder::new();
    // The default on three ranks is 3 rows per step.
    folder.trained("first", &["--save", "saves", "-n", "3"]);
    folder.trained("same", &["--save", "saves", "--resume"]);
    assert_eq!(folder.adapter("first"), folder.adapter("same"));
    assert_eq!(named(&folder.refused(&["-n", "2"])), ["batch"]);
}

#[test]
fn a_checkpoint_holds_the_settings_of_its_run() {
    let folder = TestFolder::new();
    folder.trained("first", &["--save", "saves"]);
    let of_every_run = recorded(&folder.path("saves"));
    // A run is compared with its checkpoint by these names: as long as they stay the same, checkpoints saved by earlier
    // versions can be resumed.
    insta::assert_snapshot!(of_every_run.join("\n"), @"
    adapter that it began with
    alpha
    base's weights
    batch
    bf16.bf16_master_weights_and_grads
    bf16.bf16_optimizer_states
    bf16.check_grad_overflow
    bf16.enabled
    bf16.immediate_grad_update
    chat template
    ctx
    data
    data_types.keep_in_fp32_modules
    dora
    dropout
    fp16.auto_cast
    fp16.consecutive_hysteresis
    fp16.enabled
    fp16.fp16_master_weights_and_grads
    fp16.hysteresis
    fp16.initial_scale_power
    fp16.loss_scale
    fp16.loss_scale_window
    fp16.min_loss_scale
    gradient_allreduce_op
    gradient_clipping
    gradient_predivide_factor
    lr
    method
    objective
    optimizer.params.adam_w_mode
    optimizer.params.betas
    optimizer.params.bias_correction
    optimizer.params.eps
    optimizer.params.weight_decay
    optimizer.type
    order
    packing
    prescale_gradients
    r
    rate
    rslora
    seed
    steps
    targets
    tokenizer
    tokens of a row
    torch_autocast.enabled
    warmup
    zero_optimization.zero_quantized_gradients
    zero_optimization.zero_quantized_weights
    ");
    folder.trained("second", &["--save", "others", "--qlora", "--keep_layers", "0"]);
    let added = recorded(&folder.path("others")).into_iter().filter(|name| !of_every_run.contains(name));
    insta::assert_snapshot!(added.collect::<Vec<_>>().join("\n"), @"keep_layers");
}

#[test]
fn seeds_have_masks_of_their_own_and_one_seed_the_same_bits_at_all_stages() {
    let folder = TestFolder::new();
    let words = |seed| ["--order", "sequential", "--adapter", "first", "--seed", seed];
    folder.trained("first", &["--lora", "r=2,alpha=4,dropout=0.5", "--steps", "1"]);
    folder.trained("one", &words("1"));
    folder.trained("two", &words("2"));
    assert_ne!(folder.adapter("one"), folder.adapter("two"));
    for stage in [0, 3] {
        let config = json!({"zero_optimization": {"stage": stage}}).to_string();
        std::fs::write(folder.path("ds.json"), config).unwrap();
        let out = format!("stage{stage}");
        folder.trained(&out, &[&words("1")[..], &["--ds_config", "ds.json"]].concat());
        assert_eq!(folder.adapter(&out), folder.adapter("one"), "stage {stage}");
    }
}

#[test]
fn samples_are_made_again_where_the_special_tokens_or_their_file_have_changed() {
    let folder = TestFolder::new();
    let show = || {
        let mut command = zerorun();
        command.current_dir(folder.dir.path()).args(["data", "show"]).arg(&folder.model);
        let output = command.args(["a.jsonl", "--cache", "cache"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (stdout(&output), stderr(&output))
    };
    let files = || {
        let files = std::fs::read_dir(folder.path("cache")).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|end| end == "samples")).collect::<Vec<_>>()
    };
    let (before, _) = show();
    let [file] = &files()[..] else { panic!("one file") };
    // The file is damaged: one bit of an id, or of the targets, is flipped.
    let original = std::fs::read(file).unwrap();
    for offset in [64, 66, 150] {
        let mut bytes = original.clone();
        bytes[offset] ^= 1;
        std::fs::write(file, &bytes).unwrap();
        let (samples, messages) = show();
        assert!(messages.contains("it is damaged, so it will be rebuilt"), "{offset}: {messages}");
        assert_eq!(samples.replace("from the cache", ""), before.replace("from the cache", ""));
        assert_eq!(std::fs::read(file).unwrap(), original);
    }
    // The special tokens change.
    let config = folder.model.join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    for (key, value) in [("bos_token", "<|im_end|>"), ("eos_token", "<|endoftext|>"), ("add_eos_token", "")] {
        let count = files().len();
        settings[key] = if value.is_empty() { json!(true) } else { json!(value) };
        std::fs::write(&config, settings.to_string()).unwrap();
        show();
        assert_eq!(files().len(), count + 1, "{key}");
    }
}

#[test]
fn a_merged_model_has_all_templates_of_the_base_as_a_folder_and_as_gguf() {
    let folder = TestFolder::new();
    let config = folder.model.join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    let merge = |out: &str| {
        let output = zerorun().arg("merge").arg(&folder.model).arg("--out").arg(folder.path(out)).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    };
    let keys = |file: &str| {
        let mut file = std::fs::File::open(folder.path(file)).unwrap();
        let metadata = gguf_file::Content::read(&mut file).unwrap().metadata;
        let text = |key: &str| metadata.get(key).map(|value| value.to_string().unwrap().clone());
        let names = metadata.get("tokenizer.chat_templates").map(|names| format!("{names:?}"));
        (text("tokenizer.chat_template"), text("tokenizer.chat_template.tool_use"), names)
    };
    // The templates are in a list.
    let entry = |name: &str, template: &str| json!({"name": name, "template": template});
    settings["chat_template"] = json!([entry("default", "usual"), entry("tool_use", "tools")]);
    std::fs::write(&config, settings.to_string()).unwrap();
    _ = std::fs::remove_file(folder.model.join("chat_template.jinja"));
    merge("list");
    merge("list.gguf");
    let written: Value =
        serde_json::from_slice(&std::fs::read(folder.path("list/tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!(written["chat_template"], settings["chat_template"]);
    let expected =
        (Some("usual".to_owned()), Some("tools".to_owned()), Some(r#"Array([String("tool_use")])"#.to_owned()));
    assert_eq!(keys("list.gguf"), expected);

    // The templates are in files.
    settings.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&config, settings.to_string()).unwrap();
    std::fs::create_dir(folder.model.join("additional_chat_templates")).unwrap();
    std::fs::write(folder.model.join("chat_template.jinja"), "usual").unwrap();
    std::fs::write(folder.model.join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    merge("files");
    merge("files.gguf");
    for name in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
        assert_eq!(
            std::fs::read(folder.path("files").join(name)).unwrap(),
            std::fs::read(folder.model.join(name)).unwrap()
        );
    }
    assert_eq!(keys("files.gguf"), expected);
}

#[test]
fn of_a_model_for_images_too_nothing_is_written_that_is_no_such_model() {
    let folder = TestFolder::new();
    let from = path("models/gemma3");
    let text: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    let config = json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"}, "torch_dtype": "float32"});
    std::fs::write(folder.model.join("config.json"), config.to_string()).unwrap();
    let tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    for prefix in ["language_model.model.", "model.language_model."] {
        let renamed = |name: &str| name.replacen("model.", prefix, 1);
        let mut tensors: std::collections::HashMap<_, _> =
            tensors.iter().map(|(name, tensor)| (renamed(name), tensor.clone())).collect();
        let patch = tensors.values().next().unwrap().clone();
        tensors.insert("vision_tower.vision_model.embeddings.patch_embedding.weight".into(), patch);
        candle_core::safetensors::save(&tensors, folder.model.join("model.safetensors")).unwrap();
        // The written files also contain the part for images, under the same names.
        let out = folder.path(prefix.trim_end_matches('.'));
        let output = zerorun().arg("merge").arg(&folder.model).arg("--out").arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let merged = candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu).unwrap();
        let names = |all: &std::collections::HashMap<String, Tensor>| all.keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(names(&merged), names(&tensors));
        let written: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(written["text_config"], config["text_config"]);
        let output =
            zerorun().arg("generate").arg(&folder.model).args(["--prompt", "a", "--max_tokens", "2"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
}
