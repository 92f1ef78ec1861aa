//! Adapters and models that do not match their description: merge, generate and finetune name the problem and write
//! nothing.

use crate::fixtures::{copy, path};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// A test's folder, which contains `adapter`, a copy of an adapter that PEFT wrote; `model`, its base model; and
/// `data.jsonl`.
struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new(case: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let (from, to) = (path(format!("lora/llama.{case}/final")), folder.path("adapter"));
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        std::fs::rename(copy("llama").keep(), folder.path("model")).unwrap();
        let line = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        std::fs::write(folder.path("data.jsonl"), format!("{line}\n")).unwrap();
        folder
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn set(&self, key: &str, value: Value) -> &Self {
        let file = self.path("adapter/adapter_config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(file, config.to_string()).unwrap();
        self
    }

    fn change(&self, file: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
        let file = self.path(file);
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, file).unwrap();
    }

    /// Returns the messages of merge, generate and finetune about the model with the adapter. Each command must fail
    /// and write nothing.
    fn refused(&self) -> Vec<String> {
        let (model, adapter, data) = (self.path("model"), self.path("adapter"), self.path("data.jsonl"));
        let words = |words: &[&Path]| words.iter().map(|word| word.as_os_str().to_owned()).collect::<Vec<_>>();
        let out = self.path("out");
        let [adapter_flag, out_flag, prompt_flag, data_flag, steps_flag] =
            ["--adapter", "--out", "--prompt", "--data", "--steps"].map(Path::new);
        let commands = [
            (words(&[Path::new("merge"), &model, &adapter, out_flag, &out])),
            (words(&[Path::new("merge"), &model, &adapter, out_flag, &self.path("out.gguf")])),
            (words(&[Path::new("generate"), &model, adapter_flag, &adapter, prompt_flag, Path::new("a")])),
            (words(&[
                Path::new("finetune"),
                &model,
                adapter_flag,
                &adapter,
                data_flag,
                &data,
                out_flag,
                &out,
                steps_flag,
                Path::new("1"),
                Path::new("--ctx"),
                Path::new("32"),
            ])),
        ];
        let before = std::fs::read_dir(self.0.path()).unwrap().count();
        let messages = commands.map(|words| {
            let output = zerorun().args(&words).env("XDG_CACHE_HOME", self.path("adapter")).output().unwrap();
            assert_ne!(output.status.code(), Some(0), "{words:?}: {}", stdout(&output));
            let text = stderr(&output).replace(self.0.path().to_str().unwrap(), "DIR");
            assert!(!text.contains("panicked") && !text.contains("learning rate of the run"), "{text}");
            text.trim_end().to_owned()
        });
        assert_eq!(std::fs::read_dir(self.0.path()).unwrap().count(), before, "{messages:?}");
        messages.into_iter().collect()
    }

    /// Returns the message, which must be the same from all commands.
    fn refused_alike(&self) -> String {
        let messages = self.refused();
        let first = messages[0].trim_start_matches("zerorun: ").to_owned();
        assert!(messages.iter().all(|text| text.contains(&first)), "{messages:#?}");
        first
    }
}

#[test]
fn an_adapter_whose_start_changed_the_base_is_refused_by_all_commands() {
    let folder = TestFolder::new("attn_r8");
    folder.set("init_lora_weights", json!("pissa_niter_16"));
    insta::assert_snapshot!(folder.refused_alike(), @r#"DIR/adapter/adapter_config.json is not a usable adapter: init_lora_weights is "pissa_niter_16", which changes the base's weights before training, so the adapter fits only the changed weights; the supported values are true, false, "gaussian", "eva", "orthogonal", "mica"; save the adapter from PEFT as a plain one, with model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL), where INITIAL is the adapter before training"#);
}

#[test]
fn modules_that_a_regular_expression_names_are_those_of_the_tensors() {
    let folder = TestFolder::new("all_r4_rslora");
    let merged = |out: &str| {
        let (model, adapter) = (folder.path("model"), folder.path("adapter"));
        let output =
            zerorun().arg("merge").args([&model, &adapter]).arg("--out").arg(folder.path(out)).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        std::fs::read(folder.path(out).join("model.safetensors")).unwrap()
    };
    let of_names = merged("names");
    folder.set("target_modules", json!(r"(?:model\.)?layers\.\d+\.(?:self_attn|mlp)\.(?:[qkvo]|gate|up|down)_proj"));
    assert!(merged("pattern") == of_names);
    // A run that continues training with the adapter writes the targets' names instead of the pattern.
    let (model, adapter, data) = (folder.path("model"), folder.path("adapter"), folder.path("data.jsonl"));
    let mut command = zerorun();
    command.arg("finetune").arg(&model).arg("--adapter").arg(&adapter).arg("--data").arg(&data);
    let output = command.args(["--steps", "1", "--out"]).arg(folder.path("more")).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let config = std::fs::read(folder.path("more").join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let names = config["target_modules"].as_array().unwrap();
    assert!(names.iter().any(|name| name == "layers.0.self_attn.q_proj") && names.len() == 7 * 3, "{names:?}");
}

#[test]
fn an_incomplete_adapter_is_refused_with_the_names_of_what_is_missing() {
    let folder = TestFolder::new("attn_r8");
    folder.change("adapter/adapter_model.safetensors", |tensors| tensors.retain(|name, _| !name.contains("layers.2.")));
    insta::assert_snapshot!(folder.refused_alike(), @"the adapter DIR/adapter (trained on llama) is incomplete: according to its adapter_config.json and this model, it should also have model.layers.2.self_attn.q_proj.lora_A.weight, model.layers.2.self_attn.q_proj.lora_B.weight, model.layers.2.self_attn.v_proj.lora_A.weight, model.layers.2.self_attn.v_proj.lora_B.weight; copy it again from its source, or use the model that it was trained on");

    let folder = TestFolder::new("all_r4_rslora");
    folder.change("adapter/adapter_model.safetensors", |tensors| {
        tensors.retain(|name, _| !name.contains("layers.1.mlp.up_proj.lora_B"));
    });
    insta::assert_snapshot!(folder.refused_alike(), @"the adapter DIR/adapter (trained on llama) is incomplete: according to its adapter_config.json and this model, it should also have model.layers.1.mlp.up_proj.lora_B.weight; copy it again from its source, or use the model that it was trained on");

    let folder = TestFolder::new("dora_r8");
    folder.change("adapter/adapter_model.safetensors", |tensors| {
        tensors.retain(|name, _| !name.ends_with("layers.0.self_attn.q_proj.lora_magnitude_vector"));
    });
    insta::assert_snapshot!(folder.refused_alike(), @"the adapter DIR/adapter (trained on llama) is incomplete: according to its adapter_config.json and this model, it should also have model.layers.0.self_attn.q_proj.lora_magnitude_vector; copy it again from its source, or use the model that it was trained on");

    // The adapter has tensors for one layer too many.
    let folder = TestFolder::new("attn_r8");
    folder.change("adapter/adapter_model.safetensors", |tensors| {
        let more: Vec<_> = tensors
            .iter()
            .filter(|(name, _)| name.contains("layers.0."))
            .map(|(name, tensor)| (name.replace("layers.0.", "layers.7."), tensor.clone()))
            .collect();
        tensors.extend(more);
    });
    assert!(folder.refused_alike().contains("the model has no such projection"));
}

#[test]
fn values_that_are_not_finite_are_refused_by_tensor_and_file() {
    let set = |tensors: &mut HashMap<String, Tensor>, end: &str, element: usize, value: f32| {
        let (name, tensor) = tensors.iter().find(|(name, _)| name.ends_with(end)).unwrap();
        let mut values: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        values[element] = value;
        let tensor = Tensor::from_vec(values, tensor.shape(), &Device::Cpu).unwrap();
        tensors.insert(name.clone(), tensor);
    };
    let folder = TestFolder::new("attn_r8");
    folder.change("adapter/adapter_model.safetensors", |tensors| {
        set(tensors, "layers.1.self_attn.v_proj.lora_A.weight", 5, f32::NAN);
    });
    insta::assert_snapshot!(folder.refused_alike(), @"tensor base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight in DIR/adapter/adapter_model.safetensors has the value NaN (element 5): the file is damaged, or the training that wrote it diverged; use another copy, or an earlier checkpoint");

    let folder = TestFolder::new("attn_r8");
    folder.change("model/model.safetensors", |tensors| set(tensors, "layers.2.mlp.up_proj.weight", 100, f32::INFINITY));
    insta::assert_snapshot!(folder.refused_alike(), @"tensor model.layers.2.mlp.up_proj.weight in DIR/model/model.safetensors has the value inf (element 100): the file is damaged, or the training that wrote it diverged; use another copy, or an earlier checkpoint");

    // First, a factor overflows in f32; then, products are too large.
    let folder = TestFolder::new("attn_r8");
    folder.set("lora_alpha", json!(1e308));
    insta::assert_snapshot!(folder.refused_alike(), @"DIR/adapter/adapter_config.json is not a usable adapter: LoRA settings: alpha is 1e308, but must be a number that is positive and finite in f32");
    let folder = TestFolder::new("attn_r8");
    folder.change("adapter/adapter_model.safetensors", |tensors| {
        set(tensors, "layers.0.self_attn.q_proj.lora_A.weight", 0, 1e38);
        set(tensors, "layers.0.self_attn.q_proj.lora_B.weight", 0, 1e38);
    });
    let messages = folder.refused();
    insta::assert_snapshot!(messages[0], @"zerorun: model.layers.0.self_attn.q_proj.weight with the adapter DIR/adapter has the value inf: the adapter's values are too large, or its lora_alpha is; train it again with a lower learning rate, or correct its adapter_config.json");
    assert!(messages[1].contains("layers.0.self_attn.q_proj.weight with the adapter"), "{}", messages[1]);
    assert!(messages[2].contains("logits are not finite"), "{}", messages[2]);
    // The error follows the warning about a single-step run.
    let is_expected = |line: &&str| ["zerorun: warning: ", "step 0/"].iter().any(|start| line.starts_with(start));
    let loss = messages[3].lines().find(|line| !is_expected(line)).unwrap();
    insta::assert_snapshot!(loss, @"zerorun: the loss is NaN on rank 0 in optimizer step 0 (micro step 0); look for non-finite or very large values in the initial weights and in the data of this step");
}

#[test]
fn a_weight_that_the_written_precision_cannot_hold_is_named_with_it() {
    let folder = TestFolder::new("attn_r8");
    folder.change("model/model.safetensors", |tensors| {
        let name = "model.layers.0.mlp.down_proj.weight";
        tensors.insert(name.into(), tensors[name].affine(1.0, 3.4e38).unwrap());
    });
    let (model, out) = (folder.path("model"), folder.path("out"));
    for (words, found) in [
        (["--dtype", "f16"], "which f16 cannot hold"),
        (["--dtype", "bf16"], "which bf16 cannot hold"),
        (["--format", "gguf-f16"], "which f16 cannot hold"),
        (["--format", "gguf-q8_0"], "which q8_0 cannot hold"),
    ] {
        let output = zerorun().arg("merge").arg(&model).arg("--out").arg(&out).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = stderr(&output);
        let name = "zerorun: model.layers.0.mlp.down_proj.weight has the value 3.4e38";
        assert!(text.starts_with(name) && text.contains(found), "{text}");
        assert!(!out.exists());
    }
}
