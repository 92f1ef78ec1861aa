//! Decoders that classify: the classified token, heads and adapters, and complete runs.

use crate::fixtures::{base, copy, max_difference, path, tensors, values};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::{DType, Device, IndexOp as _, Tensor};
use candle_nn::VarBuilder;
use candle_zero::models::Decoder;
use candle_zero_finetune::{Adapter, Classifier, ClassifierBase, ClassifierConfig};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

fn labels(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).into()).collect()
}

/// Returns the weights of a model, and the weight of its output projection.
fn weights(model: &str) -> (HashMap<String, Tensor>, Tensor) {
    let weights = tensors(Path::new("models").join(model).join("model.safetensors"));
    let names = ["lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"];
    let output = names.iter().find_map(|name| weights.get(*name)).unwrap().clone();
    (weights, output)
}

/// Returns a copy of a model's folder whose weights contain `score.weight` for three classes, which consists of rows of
/// the output projection.
fn with_score(model: &str) -> tempfile::TempDir {
    let folder = copy(model);
    let (mut weights, output) = weights(model);
    weights.remove("lm_head.weight");
    weights.insert("score.weight".into(), output.narrow(0, 10, 3).unwrap().contiguous().unwrap());
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    change_config(folder.path(), |config| config["id2label"] = json!({"0": "x", "1": "y", "2": "z"}));
    folder
}

fn change_config(folder: &Path, change: impl FnOnce(&mut Value)) {
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(file, config.to_string()).unwrap();
}

/// The logits of a language model, which other tests compare with those of transformers, are the product of its states
/// and the output projection. A classifier whose `score.weight` consists of rows of that projection must have the
/// logits of those rows.
#[test]
fn logits_are_those_of_the_last_token_that_is_not_padding() {
    for name in ["llama", "mistral", "qwen2", "phi3", "gpt2"] {
        let model_base = base(name);
        let language_model =
            Decoder::new(model_base.config(), model_base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        let folder = with_score(name);
        let opened = ClassifierBase::open_trained(&folder).unwrap();
        let ClassifierConfig::Decoder(mut config) = opened.config().clone() else { panic!("{name} is a decoder") };
        assert_eq!(config.labels, ["x", "y", "z"]);
        config.pad_token_id = Some(3);
        let vb = VarBuilder::from_tensors(tensors(folder.path().join("model.safetensors")), DType::F32, &Device::Cpu);
        let vb = if name == "gpt2" { gpt2_names(vb, &folder) } else { vb };
        let classifier = ClassifierConfig::Decoder(config).build(vb).unwrap();
        let ids: Vec<u32> = (0..3 * 12).map(|i| i * 31 % 200 + 20).collect();
        let mut ids: Vec<Vec<u32>> = ids.chunks(12).map(<[u32]>::to_vec).collect();
        // One text itself ends with padding tokens, one is padded, and one fills its row.
        (ids[0][7], ids[0][8]) = (3, 3);
        let (lengths, last) = ([9, 5, 12], [6, 4, 11]);
        let rows = Tensor::new(ids.clone(), &Device::Cpu).unwrap();
        let logits = classifier.classifier().unwrap().logits(&rows, &lengths).unwrap();
        assert_eq!(logits.dims(), [3, 3]);
        for (row, last) in last.into_iter().enumerate() {
            let unpadded = Tensor::new(&ids[row][..lengths[row]], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let want = language_model.forward(&unpadded).unwrap().i((0, last, 10..13)).unwrap();
            let difference = max_difference(&logits.get(row).unwrap(), &want);
            assert!(difference <= 2e-5, "{name}: row {row} differs by {difference}");
        }
    }
}

/// Returns a builder for the weights in `folder`. Names that lack the prefix of a classifier's parameters get it.
fn gpt2_names(_: VarBuilder<'static>, folder: &tempfile::TempDir) -> VarBuilder<'static> {
    let named = tensors(folder.path().join("model.safetensors")).into_iter().map(|(name, tensor)| {
        let has_prefix = name.starts_with("transformer.") || name.starts_with("score.");
        (if has_prefix { name } else { format!("transformer.{name}") }, tensor)
    });
    VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu)
}

#[test]
fn heads_are_new_unless_the_files_have_one_for_the_labels() {
    let (plain, scored) = (copy("llama"), with_score("llama"));
    let notes = |folder: &tempfile::TempDir, names: &[&str]| {
        ClassifierBase::open(folder, &labels(names)).unwrap().notes().join("\n")
    };
    insta::assert_snapshot!(notes(&plain, &["no", "yes"]), @"the classifier is initialized randomly (standard deviation 0.02): the model has none");
    insta::assert_snapshot!(notes(&scored, &["no", "yes"]), @r#"the classifier is initialized randomly (standard deviation 0.02): the model's classifier has the labels "x", "y", "z", but the data has the labels "no", "yes""#);
    assert_eq!(notes(&scored, &["x", "z"]), "");
    let base = ClassifierBase::open(&plain, &labels(&["no", "yes"])).unwrap();
    let out = tempfile::tempdir().unwrap();
    base.write_companion_files(out.path()).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({"0": "no", "1": "yes"}));
    let error = ClassifierBase::open_trained(&plain).unwrap_err().to_string();
    let error = error.replace(plain.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(error, @"DIR is not a trained classifier: its files lack score.weight; train one with zerorun finetune DIR --task classify --data FILE --out DIR");
}

/// Writes texts whose label depends on a word.
fn opinions(folder: &Path) -> String {
    let fillers = ["the film was", "a plot and", "it is", "the story of a man is"];
    let words = [("good", "positive"), ("bad", "negative"), ("fine", "positive"), ("poor", "negative")];
    let line = |i: usize| {
        let (word, label) = words[i % 4];
        json!({"text": format!("{} {word}", fillers[i / 4 % 4]), "label": label}).to_string() + "\n"
    };
    let path = folder.join("opinions.jsonl");
    std::fs::write(&path, (0..32).map(line).collect::<String>()).unwrap();
    path.to_str().unwrap().into()
}

fn finetune(model: &Path, folder: &Path, out: &str, arguments: &[&str]) -> std::process::Output {
    let mut command = zerorun();
    command.arg("finetune").arg(model).args(["--task", "classify", "--data", &opinions(folder)]);
    command.arg("--out").arg(folder.join(out)).arg("--cache").arg(folder.join("cache"));
    command.args(["--batch", "4", "--lr", "1e-2", "--ctx", "32"]).args(arguments).output().unwrap()
}

fn stage(folder: &Path, stage: u8) -> String {
    let path = folder.join(format!("stage{stage}.json"));
    let zero = json!({"stage": stage, "stage3_param_persistence_threshold": 0});
    std::fs::write(&path, json!({"zero_optimization": zero}).to_string()).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn full_training_of_a_decoder_leaves_a_classifier_with_the_same_bytes_at_every_stage_and_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for world in ["1", "2"] {
        let bytes = [0, 3].map(|number| {
            let out = format!("out{world}-{number}");
            let arguments = ["--steps", "4", "-n", world, "--ds_config", &stage(folder.path(), number)];
            let output = finetune(&path("models/llama"), folder.path(), &out, &arguments);
            assert!(output.status.success(), "{}", stderr(&output));
            assert!(stderr(&output).contains("the classifier is initialized randomly"), "{}", stderr(&output));
            std::fs::read(folder.path().join(out).join("model.safetensors")).unwrap()
        });
        assert!(bytes[0] == bytes[1], "world size {world}");
    }
    let out = folder.path().join("out1-0");
    let base = ClassifierBase::open_trained(&out).unwrap();
    assert_eq!(base.config().labels(), ["negative", "positive"]);
    assert!(tensors(out.join("model.safetensors")).keys().all(|name| name != "lm_head.weight"));
    let classifier = Classifier::open(&out).unwrap();
    assert_eq!(classifier.classify("the film was good").unwrap().labels.len(), 2);
}

#[test]
fn adapters_of_classifiers_are_those_of_peft_and_predict_what_was_learned() {
    let folder = tempfile::tempdir().unwrap();
    let bert = crate::classify::bert();
    let encoders = crate::support::processes::repository().join("tests/fixtures/encoders");
    let modern = crate::classify::bert();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(encoders.join("modernbert").join(file), modern.path().join(file)).unwrap();
    }
    let llama = path("models/llama");
    let cases = [
        (llama.as_path(), "llama", "--lora=r=4", vec!["score.weight"]),
        (llama.as_path(), "llama-q", "--qlora", vec!["score.weight"]),
        (bert.path(), "bert", "--lora=r=4", vec!["classifier.bias", "classifier.weight"]),
        (modern.path(), "modern", "--qlora", vec!["classifier.bias", "classifier.weight"]),
    ];
    for (model, name, method, head) in cases {
        for world in ["1", "2"] {
            let bytes = [0, 3].map(|number| {
                let out = format!("{name}{world}-{number}");
                let zero = stage(folder.path(), number);
                let arguments = [method, "--steps", "6", "-n", world, "--ds_config", &zero];
                let output = finetune(model, folder.path(), &out, &arguments);
                assert!(output.status.success(), "{name}: {}", stderr(&output));
                std::fs::read(folder.path().join(out).join("adapter_model.safetensors")).unwrap()
            });
            assert!(bytes[0] == bytes[1], "{name}, world size {world}");
        }
        let out = folder.path().join(format!("{name}1-0"));
        let read = |file: &str| -> Value { serde_json::from_slice(&std::fs::read(out.join(file)).unwrap()).unwrap() };
        let config = read("adapter_config.json");
        assert_eq!(config["task_type"], "SEQ_CLS");
        let module = if name.starts_with("llama") { "score" } else { "classifier" };
        assert_eq!(config["modules_to_save"], json!([module]));
        assert_eq!(read("config.json")["id2label"], json!({"0": "negative", "1": "positive"}));
        let file = tensors(out.join("adapter_model.safetensors"));
        let mut found: Vec<&str> = file.keys().filter(|key| !key.contains(".lora_")).map(String::as_str).collect();
        found.sort_unstable();
        assert_eq!(found, head.iter().map(|name| format!("base_model.model.{name}")).collect::<Vec<_>>());
        let lora = file.keys().filter(|key| key.contains(".lora_")).count();
        assert!(lora > 0 && file.keys().all(|key| key.starts_with("base_model.model.")));
        let adapter = Adapter::read(&out).unwrap();
        assert_eq!(adapter.saved_modules(), Some(&[module.to_owned()][..]));
        // The tool predicts with the base and the adapter.
        let mut command = zerorun();
        let output = command.arg("classify").arg(model).arg("--adapter").arg(&out).arg("--json");
        let output = output.args(["the film was good", "the film was bad"]).output().unwrap();
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let answers: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(answers[0]["labels"].as_object().unwrap().len(), 2);
        // Training continues from the adapter.
        let zero = stage(folder.path(), 0);
        let arguments = ["--adapter", out.to_str().unwrap(), "--steps", "1", "--ds_config", &zero];
        let further = format!("{name}-further");
        let output = finetune(model, folder.path(), &further, &arguments);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let trained = tensors(folder.path().join(further).join("adapter_model.safetensors"));
        assert_eq!(trained.len(), file.len());
        assert!(trained.iter().any(|(key, tensor)| values(tensor) != values(&file[key])));
    }
}

#[test]
fn adapters_that_are_no_classifiers_or_those_of_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let llama = path("models/llama");
    let zero = stage(folder.path(), 0);
    let arguments = ["--lora=r=4", "--steps", "1", "--ds_config", &zero];
    let output = finetune(&llama, folder.path(), "adapter", &arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let adapter = folder.path().join("adapter");
    let said = |output: std::process::Output| {
        assert!(!output.status.success());
        let said = stderr(&output).replace(folder.path().to_str().unwrap(), "DIR");
        let said = said.replace(llama.to_str().unwrap(), "LLAMA");
        said.lines().find(|line| !line.is_empty()).unwrap_or_default().to_owned()
    };
    // A classifier's adapter is used on a language model.
    let mut generate = zerorun();
    generate.arg("generate").arg(&llama).arg("--adapter").arg(&adapter).args(["--prompt", "a"]);
    insta::assert_snapshot!(said(generate.output().unwrap()));
    let mut merge = zerorun();
    merge.arg("merge").arg(&llama).arg(&adapter).arg("--out").arg(folder.path().join("merged"));
    insta::assert_snapshot!(said(merge.output().unwrap()));
    // A language model's adapter is used for a classifier.
    let config = adapter.join("adapter_config.json");
    let classifier_config: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    let mut lm_config = classifier_config.clone();
    (lm_config["task_type"], lm_config["modules_to_save"]) = (json!("CAUSAL_LM"), Value::Null);
    std::fs::write(&config, lm_config.to_string()).unwrap();
    let file = adapter.join("adapter_model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let mut remaining = tensors(&file);
    remaining.remove("base_model.model.score.weight").unwrap();
    candle_core::safetensors::save(&remaining, &file).unwrap();
    let begin = ["--adapter", adapter.to_str().unwrap(), "--steps", "1", "--ds_config", &zero];
    insta::assert_snapshot!(said(finetune(&llama, folder.path(), "out", &begin)));
    let classify = |model: &Path| {
        let mut classify = zerorun();
        classify.arg("classify").arg(model).arg("--adapter").arg(&adapter).arg("a text").output().unwrap()
    };
    insta::assert_snapshot!(said(classify(&llama)));
    // The adapter of a classifier lacks its score, has a different number of labels, or is for a different model.
    std::fs::write(&config, classifier_config.to_string()).unwrap();
    insta::assert_snapshot!(said(classify(&llama)));
    std::fs::write(&file, whole).unwrap();
    change_config(&adapter, |config| config["id2label"] = json!({"0": "a", "1": "b", "2": "c"}));
    insta::assert_snapshot!(said(classify(&llama)));
    change_config(&adapter, |config| config["id2label"] = json!({"0": "a", "1": "b"}));
    insta::assert_snapshot!(said(classify(&path("models/mistral"))).replace(path("").to_str().unwrap(), "FIXTURES/"));
}
