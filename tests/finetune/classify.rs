//! Training an encoder to classify: its initial values, its rows, and its independence from padding.

use crate::fixtures::{path, tensors};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::{Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::data::BatchPartition;
use candle_zero::models::EncoderDropout;
use candle_zero::{Engine, Result};
use candle_zero_finetune::{
    BaseModel, Batches, ClassificationBatch, ClassificationScores, ClassifierBase, ClassifierConfig, ColumnMapping,
    DataOptions, Dataset, RowBatch, SequencePacking, Source, Tokenizer, TrainingTask, Truncation, labels_of,
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use tempfile::TempDir;

/// Creates the tiny BERT with a WordPiece tokenizer.
pub fn bert() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(path("bert/model").join(file), folder.path().join(file)).unwrap();
    }
    let special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"];
    let letters = ('a'..='z').flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
    let words = ["good", "bad", "fine", "poor", "the", "film", "was", "and", "##ly", "plot", ".", ",", "!", "cafe"];
    let tokens = special.into_iter().map(String::from).chain(letters).chain(words.map(String::from));
    let vocab: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    let added = |(id, token): (usize, &str)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let sequence = |id: &str, kind: u8| json!({"Sequence": {"id": id, "type_id": kind}});
    let token = |id: &str, kind: u8| json!({"SpecialToken": {"id": id, "type_id": kind}});
    let single = [token("[CLS]", 0), sequence("A", 0), token("[SEP]", 0)];
    let pair = [single.as_slice(), &[sequence("B", 1), token("[SEP]", 1)]].concat();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": special.into_iter().enumerate().map(added).collect::<Vec<_>>(),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": true
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": {
                "[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}
            }
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": vocab
        }
    });
    let config = json!({
        "tokenizer_class": "BertTokenizer", "do_lower_case": true, "cls_token": "[CLS]", "sep_token": "[SEP]",
        "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "model_max_length": 64
    });
    for (file, content) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", config)] {
        std::fs::write(folder.path().join(file), content.to_string()).unwrap();
    }
    folder
}

fn labels(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).into()).collect()
}

/// Writes a data file in `folder`.
fn file(folder: &TempDir, name: &str, text: &str) -> Source {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    Source { path, weight: 1.0 }
}

fn prepare(folder: &TempDir, sources: &[Source], options: &DataOptions) -> Result<Dataset> {
    let tokenizer = Tokenizer::open(folder).unwrap();
    Dataset::prepare(sources, &tokenizer, None, options, &folder.path().join("cache"), &mut |_| {})
}

#[test]
fn a_vocabulary_in_vocab_txt_gives_the_ids_of_tokenizer_json() {
    let folder = bert();
    let original = Tokenizer::open(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut words: Vec<(u64, &str)> = vocab.iter().map(|(word, id)| (id.as_u64().unwrap(), word.as_str())).collect();
    words.sort_unstable();
    assert!(words.iter().enumerate().all(|(at, (id, _))| at as u64 == *id));
    let lines: String = words.iter().map(|(_, word)| format!("{word}\n")).collect();
    std::fs::write(folder.path().join("vocab.txt"), lines).unwrap();
    std::fs::remove_file(path).unwrap();
    for has_config in [true, false] {
        if !has_config {
            std::fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
        }
        let found = Tokenizer::open(folder.path()).unwrap();
        for text in
            ["The film was good.", "", "GOODLY Café, and badlyfine!", "a [SEP] b", "漢字 and 12", " \u{301}\t x\u{0} "]
        {
            assert_eq!(found.encode(text).unwrap(), original.encode(text).unwrap(), "{text:?}");
        }
        assert_eq!(found.prefix_and_suffix(), original.prefix_and_suffix());
        assert_eq!(found.special_id("pad_token"), original.special_id("pad_token"));
    }
    // Tokens that are named only in special_tokens_map.json take the place of BERT's.
    let special = json!({"pad_token": words[0].1, "sep_token": {"content": words[7].1}});
    std::fs::write(folder.path().join("special_tokens_map.json"), special.to_string()).unwrap();
    let found = Tokenizer::open(folder.path()).unwrap();
    assert_eq!(found.special_id("pad_token"), Some(0));
    assert_eq!(found.special_id("sep_token"), Some(7));
    assert_eq!(found.prefix_and_suffix().1, [7]);
}

#[test]
fn texts_have_the_ids_of_the_tokenizer_itself_also_where_they_are_cut() {
    let folder = bert();
    let long = "the film was good and the plot was badly poor ".repeat(8);
    let texts = [
        "The film was good.",
        "",
        "GOODLY Café, and badlyfine!",
        "a [SEP] b",
        "漢字 and 12",
        " \u{301}\t x\u{0} ",
        &long,
    ];
    let lines: String = texts.iter().map(|text| json!({"text": text, "label": "x"}).to_string() + "\n").collect();
    let source = file(&folder, "x.jsonl", &lines);
    let mut reference = tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
    for ctx in [8, 12, 64] {
        let options = DataOptions { labels: labels(&["x", "y"]), ..DataOptions::new(TrainingTask::Classify, ctx) };
        let dataset = prepare(&folder, std::slice::from_ref(&source), &options).unwrap();
        let mut longer = 0;
        for (i, text) in texts.iter().enumerate() {
            let complete = reference.with_truncation(None).unwrap().encode(*text, true).unwrap();
            let cut = tokenizers::TruncationParams { max_length: ctx, ..Default::default() };
            let expected = reference.with_truncation(Some(cut)).unwrap().encode(*text, true).unwrap();
            assert_eq!(dataset.sample(i).to_sample().ids, expected.get_ids(), "{text:?} in {ctx}");
            assert!(expected.get_ids().ends_with(&[2]) && expected.len() <= ctx);
            longer += u64::from(complete.len() > ctx);
        }
        let (_, report) = dataset.reports().next().unwrap();
        assert_eq!(report.truncated.count, longer, "{ctx}: {:?}", report.notes());
        assert!(longer > 0);
        let dropped =
            prepare(&folder, std::slice::from_ref(&source), &DataOptions { overlong: Truncation::Drop, ..options })
                .unwrap();
        assert_eq!(dropped.len(), texts.len() - longer as usize);
    }
}

#[test]
fn labels_are_names_or_whole_numbers_of_any_type() {
    let folder = tempfile::tempdir().unwrap();
    let found = |name: &str, text: &str| labels_of(&[file(&folder, name, text)], &ColumnMapping::default()).unwrap();
    let line = |label: Value| json!({"text": "x", "label": label}).to_string() + "\n";
    let numbers = [json!(10), json!(9.0), json!(-2), json!("2")].map(line).concat();
    assert_eq!(found("a.jsonl", &numbers), ["-2", "2", "9", "10"]);
    assert_eq!(found("b.csv", "text,label\nx,no\ny,yes\n"), ["no", "yes"]);
    assert_eq!(
        found("c.jsonl", &[json!(true), json!(false), json!(0.5), json!([1])].map(line).concat()),
        ["False", "True"]
    );
}

#[test]
fn data_without_labels_to_learn_is_refused() {
    let folder = bert();
    let said = |error: candle_zero::Error| error.to_string().replace(folder.path().to_str().unwrap(), "DIR");
    let refused =
        |name: &str, text: &str| said(labels_of(&[file(&folder, name, text)], &ColumnMapping::default()).unwrap_err());
    insta::assert_snapshot!(refused("none.csv", "text,class\nx,1\ny,2\n"), @"DIR/none.csv has no sample to learn from: 2 records (lines 2, 3) could not be used (line 2: it contains text, but text and label are required; map them with --columns text=COLUMN,label=COLUMN)");
    insta::assert_snapshot!(refused("one.jsonl", "{\"text\": \"x\", \"label\": 1}\n{\"text\": \"y\", \"label\": 1}\n"), @r#"the labels of DIR/one.jsonl cannot be used: all records have the label "1"; at least two labels are required"#);
    insta::assert_snapshot!(refused("list.jsonl", "{\"text\": \"x\", \"label\": [0, 1]}\n"), @"DIR/list.jsonl has no sample to learn from: 1 record (line 1) could not be used (line 1: its label is a list, but must be a name or a whole number)");
    insta::assert_snapshot!(refused("real.jsonl", "{\"text\": \"x\", \"label\": 0.25}\n"), @"DIR/real.jsonl has no sample to learn from: 1 record (line 1) could not be used (line 1: its label is 0.25, but must be a name or a whole number)");
    insta::assert_snapshot!(refused("null.jsonl", "{\"text\": \"x\", \"label\": null}\n"), @"DIR/null.jsonl has no sample to learn from: 1 record (line 1) could not be used (line 1: it contains text, but text and label are required; map them with --columns text=COLUMN,label=COLUMN)");
    insta::assert_snapshot!(refused("text.jsonl", "{\"text\": [1], \"label\": \"a\"}\n"), @"DIR/text.jsonl has no sample to learn from: 1 record (line 1) could not be used (line 1: text is a list, not a string)");
    insta::assert_snapshot!(refused("plain.txt", "some words\n"), @"DIR/plain.txt has no sample to learn from: 1 record (line 1) could not be used (line 1: it is plain text)");
    insta::assert_snapshot!(refused("cut.json", "[{\"text\": "), @"DIR/cut.json has no sample to learn from: 1 record (line 1) could not be used (line 1: the file ends within the list)");
    let many: String = (0..10_002).map(|i| format!("x,{i}\n")).collect();
    insta::assert_snapshot!(refused("many.csv", &format!("text,label\n{many}")), @"the labels of DIR/many.csv cannot be used: there are more than 10000; a label must be a class that several texts share");
    // The validation file has a label that the training data does not have.
    let options = DataOptions { labels: labels(&["no", "yes"]), ..DataOptions::new(TrainingTask::Classify, 16) };
    let source = file(&folder, "val.csv", "text,label\nx,no\ny,maybe\nz,yes\n");
    let dataset = prepare(&folder, std::slice::from_ref(&source), &options).unwrap();
    let notes = dataset.reports().flat_map(|(_, report)| report.notes()).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(notes, @r#"1 record (line 3) could not be used (line 3: its label "maybe" is not one of the known labels (no, yes))"#);
    let strict = DataOptions { strict: true, ..options };
    insta::assert_snapshot!(said(prepare(&folder, &[source], &strict).unwrap_err()), @r#"line 3 of DIR/val.csv cannot be used: its label "maybe" is not one of the known labels (no, yes); correct it, or leave out --strict to skip such lines"#);
}

/// Replaces the weights in the folder with changed copies of the fixture's weights.
fn change_weights(folder: &Path, change: impl Fn(String, Tensor) -> Option<(String, Tensor)>) {
    let changed: HashMap<String, Tensor> =
        tensors("bert/model/model.safetensors").into_iter().filter_map(|(name, tensor)| change(name, tensor)).collect();
    candle_core::safetensors::save(&changed, folder.join("model.safetensors")).unwrap();
}

fn change_config(folder: &Path, change: impl FnOnce(&mut Value)) {
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(file, config.to_string()).unwrap();
}

/// Returns the initial values of all parameters of a model on this base.
fn first_values(base: &ClassifierBase) -> HashMap<String, Vec<f32>> {
    let runs = threads::run(1, |comm| -> Result<_> {
        let settings = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}});
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(base.values());
        let mut engine = builder.initialize(|vb| base.config().build(vb), settings)?;
        let names = engine.trainable_parameters();
        let mut values = HashMap::new();
        for name in names {
            let value = engine.safe_get_full_fp32_param(&name)?;
            values.insert(name, crate::fixtures::values(&value));
        }
        Ok(values)
    });
    runs.unwrap().remove(0).unwrap()
}

#[test]
fn weights_of_a_bert_are_found_by_whatever_names_they_have() {
    let folder = bert();
    let dir = folder.path();
    let model_labels = labels(&["LABEL_0", "LABEL_1", "LABEL_2"]);
    let base = ClassifierBase::open(dir, &model_labels).unwrap();
    assert_eq!((base.notes(), base.data_labels()), (&[][..], model_labels.as_slice()));
    let original = first_values(&base);
    for (name, tensor) in tensors("bert/model/model.safetensors") {
        assert_eq!(original[&name], crate::fixtures::values(&tensor), "{name}");
    }
    // Numeric labels refer to the model's classes, even if only some of them occur.
    let base = ClassifierBase::open(dir, &labels(&["0", "2"])).unwrap();
    assert_eq!((base.notes(), base.data_labels()), (&[][..], labels(&["0", "1", "2"]).as_slice()));
    assert_eq!(base.config().labels(), model_labels);
    assert_eq!(first_values(&base), original);

    let check = |base: &ClassifierBase, except: &[&str]| {
        for (name, values) in first_values(base) {
            match except.iter().any(|prefix| name.starts_with(prefix)) {
                false => assert_eq!(values, original[&name], "{name}"),
                true if name.ends_with("bias") => assert!(values.iter().all(|value| *value == 0.0), "{name}"),
                true => {
                    let std = (values.iter().map(|x| f64::from(x * x)).sum::<f64>() / values.len() as f64).sqrt();
                    assert!((0.01..0.03).contains(&std), "{name}: {std}");
                }
            }
        }
    };
    // The weights have the names used in the oldest files, and a head for masked language modelling in place of the
    // pooler and the classifier.
    change_weights(dir, |name, tensor| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        if name.contains("pooler") {
            return Some((name.replace("bert.pooler", "cls.predictions.transform"), tensor));
        }
        (!name.starts_with("classifier")).then_some((name, tensor))
    });
    let base = ClassifierBase::open(dir, &labels(&["no", "yes"])).unwrap();
    insta::assert_snapshot!(base.notes().join("\n"), @r"
    the classifier is initialized randomly (standard deviation 0.02): the model has none
    the pooler is initialized randomly: the model has none
    not used, because they belong to heads for other tasks: cls.predictions.transform.dense.bias, cls.predictions.transform.dense.weight
    ");
    assert_eq!(base.config().labels(), ["no", "yes"]);
    check(&base, &["classifier.", "bert.pooler."]);
    // The weights are those of a plain encoder, with the buffer of its positions.
    change_weights(dir, |name, tensor| match name.strip_prefix("bert.") {
        Some("embeddings.LayerNorm.bias") => Some(("embeddings.LayerNorm.beta".into(), tensor)),
        Some(bare) => Some((bare.to_owned(), tensor)),
        None => Some(("embeddings.position_ids".into(), Tensor::arange(0i64, 64, &Device::Cpu).unwrap())),
    });
    let base = ClassifierBase::open(dir, &labels(&["no", "yes"])).unwrap();
    assert_eq!(base.notes().len(), 1);
    check(&base, &["classifier."]);
    // The model's classifier is for different labels.
    change_weights(dir, |name, tensor| Some((name, tensor)));
    let base = ClassifierBase::open(dir, &labels(&["no", "yes"])).unwrap();
    insta::assert_snapshot!(base.notes().join("\n"), @r#"the classifier is initialized randomly (standard deviation 0.02): the model's classifier has the labels "LABEL_0", "LABEL_1", "LABEL_2", but the data has the labels "no", "yes""#);
    check(&base, &["classifier."]);
}

#[test]
fn folders_that_are_no_encoder_are_refused() {
    let folder = bert();
    let dir = folder.path();
    let refused = || {
        let error = ClassifierBase::open(dir, &labels(&["a", "b"])).unwrap_err();
        error.to_string().replace(dir.to_str().unwrap(), "DIR")
    };
    change_weights(dir, |name, tensor| (name != "bert.encoder.layer.1.output.dense.bias").then_some((name, tensor)));
    insta::assert_snapshot!(refused(), @"DIR/model.safetensors has no tensor bert.encoder.layer.1.output.dense.bias of shape [48], which the model needs; the file must hold exactly the model's tensors; it has bert.embeddings.LayerNorm.bias, bert.embeddings.LayerNorm.weight, bert.embeddings.position_embeddings.weight and 37 more");
    change_weights(dir, |name, tensor| Some((name, tensor)));
    change_config(dir, |config| config["num_hidden_layers"] = 1.into());
    insta::assert_snapshot!(refused(), @"DIR/model.safetensors holds tensors that the model does not have: bert.encoder.layer.1.attention.output.LayerNorm.bias, bert.encoder.layer.1.attention.output.LayerNorm.weight, bert.encoder.layer.1.attention.output.dense.bias, bert.encoder.layer.1.attention.output.dense.weight, bert.encoder.layer.1.attention.self.key.bias, bert.encoder.layer.1.attention.self.key.weight, bert.encoder.layer.1.attention.self.query.bias, bert.encoder.layer.1.attention.self.query.weight and 8 more; does it belong to a different model, or to one of a different size?");
    change_config(dir, |config| (config["num_hidden_layers"], config["intermediate_size"]) = (2.into(), 90.into()));
    insta::assert_snapshot!(refused(), @"tensor bert.encoder.layer.0.intermediate.dense.weight in DIR/model.safetensors has shape [96, 48], but DIR/config.json describes shape [90, 48]; take both files from the same model");
    change_config(dir, |config| config["hidden_act"] = "relu".into());
    insta::assert_snapshot!(refused(), @r#"DIR/config.json: hidden_act is "relu", but must be gelu, gelu_new, gelu_pytorch_tanh, silu or swish"#);
    change_config(dir, |config| config["model_type"] = "t5".into());
    insta::assert_snapshot!(refused(), @r#"DIR has a model of type "t5"; --task classify requires an encoder (model_type bert, roberta, xlm-roberta, distilbert, electra, modernbert) or a language model, with any head or none, in a folder in Hugging Face format"#);
    std::fs::remove_file(dir.join("config.json")).unwrap();
    insta::assert_snapshot!(refused(), @"DIR has no config.json; --task classify requires an encoder (model_type bert, roberta, xlm-roberta, distilbert, electra, modernbert) or a language model, with any head or none, in a folder in Hugging Face format");
    // An encoder is not a language model, either.
    let encoder = path("bert/model");
    let error = BaseModel::open(&encoder).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(encoder.to_str().unwrap(), "DIR"), @r#"DIR/config.json: model_type is "bert", but must be that of a language model; an encoder is fine-tuned with --task classify"#);
    let base = ClassifierBase::open(&encoder, &labels(&["a", "b"])).unwrap();
    base.check_tokens(512).unwrap();
    insta::assert_snapshot!(base.check_tokens(513).unwrap_err(), @"the tokenizer has ids up to 512, but the model's embedding has 512 rows (1 too few); use the tokenizer that belongs to the model");
}

#[test]
fn the_description_that_is_written_names_the_classes() {
    let folder = bert();
    change_config(folder.path(), |config| config["num_labels"] = 3.into());
    let base = ClassifierBase::open(folder.path(), &labels(&["no", "yes"])).unwrap();
    let out = tempfile::tempdir().unwrap();
    base.write_companion_files(out.path()).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["id2label"], json!({"0": "no", "1": "yes"}));
    assert_eq!(config["label2id"], json!({"no": 0, "yes": 1}));
    assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
    assert_eq!(config["problem_type"], "single_label_classification");
    assert_eq!((&config["num_labels"], &config["dtype"]), (&Value::Null, &"float32".into()));
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let [a, b] = [folder.path(), out.path()].map(|folder| std::fs::read(folder.join(name)).unwrap());
        assert_eq!(a, b);
    }
    assert!(!out.path().join("model.safetensors").exists());
}

/// Returns texts in rows of `time` tokens.
fn rows(texts: &[(&[u32], u32)], time: usize, filler: u32) -> RowBatch {
    let mut rows = RowBatch { rows: texts.len(), time, ..RowBatch::default() };
    for (ids, label) in texts {
        rows.ids.extend(*ids);
        rows.ids.extend((ids.len()..time).map(|_| filler));
        rows.starts.push(if ids.len() < time { vec![0, ids.len()] } else { vec![0] });
        rows.labels.push(*label);
    }
    rows
}

/// Trains for three steps on four texts. Returns the bits of all ranks' losses, and the weights afterwards. The rows of
/// each batch are `more` tokens longer than its longest text.
fn train(world: usize, stage: u8, more: usize, filler: u32) -> (Vec<u32>, Vec<u8>) {
    let settings = json!({
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let base = ClassifierBase::open(path("bert/model"), &labels(&["0", "1", "2"])).unwrap();
    let mut config = base.config().clone();
    if let ClassifierConfig::Encoder(encoder) = &mut config {
        // Dropout does not depend on padding, either.
        let dropout = EncoderDropout { embeddings: 0.1, attention: 0.1, mlp: 0.1, classifier: 0.1, ..encoder.dropout };
        encoder.dropout = dropout;
    }
    let texts: Vec<Vec<u32>> = [21, 6, 13, 1].iter().map(|n| (0..*n).map(|i| i * 37 % 500 + 5).collect()).collect();
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("model.safetensors");
    let runs = threads::run(world, |comm| -> Result<_> {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(base.values());
        let mut engine = builder.initialize(|vb| config.build(vb), settings.clone())?;
        let mut bits = vec![];
        for _ in 0..3 {
            for micro in 0..2 / world {
                let part = 2 * (micro * world + rank)..2 * (micro * world + rank) + 2;
                let part: Vec<(&[u32], u32)> = part.map(|i| (texts[i].as_slice(), i as u32 % 3)).collect();
                let longest = part.iter().map(|(ids, _)| ids.len()).max().unwrap();
                let texts = ClassificationBatch::of(&rows(&part, longest + more, filler), &Device::Cpu)?;
                let loss = engine.forward(|model| texts.loss(model.classifier()?, 2.0))?;
                engine.backward(&loss)?;
                engine.step()?;
                bits.push(f64::from(loss.to_scalar::<f32>()?));
            }
        }
        let bits = engine.gather_f64(&bits)?;
        engine.export_safetensors(&file)?;
        Ok(bits.concat().into_iter().map(|loss| (loss as f32).to_bits()).collect::<Vec<u32>>())
    });
    (runs.unwrap().remove(0).unwrap(), std::fs::read(&file).unwrap())
}

#[test]
fn padding_changes_no_bit_of_a_training() {
    for world in [1, 2] {
        for stage in [0, 3] {
            let (losses, weights) = train(world, stage, 0, 3);
            assert_eq!(losses.len(), 6);
            assert!(losses[0] != losses[2] && losses[2] != losses[4], "the model trains: {losses:?}");
            for (more, filler) in [(1, 3), (19, 3), (7, 88)] {
                let (padded, after) = train(world, stage, more, filler);
                assert_eq!(padded, losses, "{more} more, stage {stage}, world size {world}");
                assert!(after == weights, "weights with {more} more, stage {stage}, world size {world}");
            }
        }
    }
}

#[test]
fn a_batch_of_a_validation_is_judged_by_the_rows_that_have_a_text() {
    let folder = bert();
    let lines: String = (0..5).map(|i| format!("{},{}\n", "good ".repeat(i + 1), i % 2)).collect();
    let source = file(&folder, "x.csv", &format!("text,label\n{lines}"));
    let base = ClassifierBase::open(
        folder.path(),
        &labels_of(std::slice::from_ref(&source), &ColumnMapping::default()).unwrap(),
    )
    .unwrap();
    let options = DataOptions { labels: base.data_labels().to_vec(), ..DataOptions::new(TrainingTask::Classify, 16) };
    let dataset = Arc::new(prepare(&folder, &[source], &options).unwrap());
    let weights = candle_core::safetensors::load(path("bert/model/model.safetensors"), &Device::Cpu).unwrap();
    let vb = candle_nn::VarBuilder::from_tensors(weights, candle_core::DType::F32, &Device::Cpu);
    let model = base.config().build(vb).unwrap();
    let judged = |micro: usize, world: usize| {
        let (mut scores, mut sum) = (ClassificationScores::new(3), 0.0);
        let mut counted = 0;
        for rank in 0..world {
            let shape = BatchPartition { micro, accumulation: 1, world, rank };
            let batches = Batches::validation(dataset.clone(), SequencePacking::Padded, shape, 3);
            for step in 0..batches.steps_per_epoch() {
                let texts = ClassificationBatch::of(&batches.batch(step, 0), &Device::Cpu).unwrap();
                sum += texts.judge(&texts.logits(model.classifier().unwrap()).unwrap(), &mut scores).unwrap();
                // A row without a text has a loss of 0 and no gradient.
                let loss = texts.loss(model.classifier().unwrap(), 2.0).unwrap().to_scalar::<f32>().unwrap();
                assert!(loss.is_finite());
                counted += if rank == 0 { batches.targets_of_step(step) } else { 0 };
            }
        }
        assert_eq!((scores.texts(), counted), (5, 5));
        (scores, sum)
    };
    let (scores, sum) = judged(5, 1);
    for (micro, world) in [(1, 1), (4, 1), (2, 2), (1, 4)] {
        let (found, other) = judged(micro, world);
        assert_eq!(found, scores);
        assert!((other - sum).abs() < 1e-5, "{other} {sum}");
    }
}

/// Writes texts that each contain one opinion word, which determines the label, among other words.
fn opinions(folder: &TempDir, count: usize) -> String {
    const WORDS: [&str; 8] = ["the", "film", "was", "and", "plot", ",", "cafe", "!"];
    let text = |i: usize| {
        let pick = |j: usize, of: usize| (i * 7919 + j * 104_729 + i * i * j * 31) / 7 % of;
        let good = pick(1, 2) == 0;
        let word = if good { ["good", "fine"] } else { ["bad", "poor"] }[pick(2, 2)];
        let words = |from: usize, n: usize| (0..n).map(move |j| WORDS[pick(from + j, WORDS.len())]);
        let all: Vec<&str> = words(3, pick(20, 9)).chain([word]).chain(words(40, pick(30, 9))).collect();
        json!({"text": all.join(" "), "label": if good { "positive" } else { "negative" }})
    };
    let lines: String = (0..count).map(|i| text(i).to_string() + "\n").collect();
    file(folder, "opinions.jsonl", &lines).path.to_str().unwrap().into()
}

/// Runs `zerorun finetune` on the model in `folder`.
fn command(folder: &TempDir, out: &str, arguments: &[&str]) -> std::process::Output {
    let dir = folder.path();
    let mut command = zerorun();
    command.arg("finetune").arg(dir).arg("--out").arg(dir.join(out)).arg("--cache").arg(dir.join("cache"));
    command.args(["--batch", "16", "--micro_batch", "8", "--lr", "1e-3"]).args(arguments).output().unwrap()
}

fn config(folder: &TempDir, stage: u8) -> String {
    let path = folder.path().join(format!("stage{stage}.json"));
    let zero = json!({"stage": stage, "stage3_param_persistence_threshold": 0});
    std::fs::write(&path, json!({"zero_optimization": zero}).to_string()).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn the_tool_learns_to_tell_labels_by_a_rule_and_leaves_a_model_that_tells_them() {
    let folder = bert();
    let data = opinions(&folder, 600);
    let metrics = folder.path().join("metrics.jsonl");
    let zero = config(&folder, 3);
    let arguments = ["--task", "classify", "--data", &data, "--val", "20%", "--epochs", "4", "--ctx", "32", "-n", "2"];
    let more = ["--metrics", metrics.to_str().unwrap(), "--ds_config", &zero];
    let output = command(&folder, "out", &[arguments.as_slice(), &more].concat());
    let (errors, printed) = (stderr(&output), stdout(&output));
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("the classifier is initialized randomly"), "{errors}");
    assert!(printed.contains("text and label: 600 records"), "{printed}");
    let lines = std::fs::read_to_string(&metrics).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = |key: &str| lines.iter().rev().find_map(|line| line[key].as_f64()).unwrap();
    assert!(last("val_accuracy") >= 0.95 && last("val_f1") >= 0.95, "{errors}");
    // The result is a model with these classes that gives the same answers.
    for out in ["out", "out-best"] {
        let out = folder.path().join(out);
        let base = ClassifierBase::open(&out, &labels(&["positive", "negative"])).unwrap();
        assert_eq!((base.notes(), base.data_labels()), (&[][..], labels(&["negative", "positive"]).as_slice()));
        let weights = candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu).unwrap();
        let vb = candle_nn::VarBuilder::from_tensors(weights, candle_core::DType::F32, &Device::Cpu);
        let model = base.config().build(vb).unwrap();
        let options =
            DataOptions { labels: base.data_labels().to_vec(), ..DataOptions::new(TrainingTask::Classify, 32) };
        let dataset = Arc::new(prepare(&folder, &[Source::parse(&data).unwrap()], &options).unwrap());
        let shape = BatchPartition { micro: 50, accumulation: 1, world: 1, rank: 0 };
        let batches = Batches::validation(dataset, SequencePacking::Padded, shape, 3);
        let mut scores = ClassificationScores::new(2);
        for step in 0..batches.steps_per_epoch() {
            let texts = ClassificationBatch::of(&batches.batch(step, 0), &Device::Cpu).unwrap();
            texts.judge(&texts.logits(model.classifier().unwrap()).unwrap(), &mut scores).unwrap();
        }
        assert_eq!(scores.texts(), 600);
        assert!(scores.accuracy() >= 0.95 && scores.macro_f1() >= 0.95, "{scores}");
        assert!(scores.classes().all(|class| class.precision >= 0.9 && class.recall >= 0.9));
    }
    // `zerorun classify` gives the same answers.
    let texts = ["the film was fine", "poor plot , the film was poor"];
    let printed = stdout(&classify(&folder.path().join("out"), &texts, ""));
    let answers: Vec<&str> = printed.lines().filter_map(|line| line.split('\t').next()).collect();
    assert_eq!(answers, ["positive", "negative"], "{printed}");
    // From standard input, each line is a text. A text longer than the context is cut, and the output reports this.
    let long = "the film was good ".repeat(40);
    let output = classify(&folder.path().join("out"), &["--json"], &format!("the film was fine\n\n{long}\n"));
    let lines: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    for line in &lines {
        assert_eq!(line["label"], "positive", "{line}");
        let sum: f64 = line["labels"].as_object().unwrap().values().map(|p| p.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-9 && line["probability"] == line["labels"]["positive"], "{line}");
    }
    // There are 64 positions, two of which are for the tokens at the ends.
    assert_eq!((&lines[0]["cut_tokens"], &lines[1]["cut_tokens"]), (&Value::Null, &json!(160 - 62)));
}

/// Runs `zerorun classify` on a model's folder.
fn classify(model: &Path, arguments: &[&str], input: &str) -> std::process::Output {
    let mut child = zerorun()
        .arg("classify")
        .arg(model)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_model_that_is_not_a_trained_classifier_tells_no_labels() {
    let folder = bert();
    let refused = |change: &dyn Fn(&Path)| {
        let folder = bert();
        change(folder.path());
        let output = classify(folder.path(), &["a text"], "");
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        stderr(&output).replace(folder.path().to_str().unwrap(), "MODEL").trim().to_owned()
    };
    // The fixture has a classifier for three labels.
    assert!(classify(folder.path(), &["a text"], "").status.success());
    insta::assert_snapshot!(refused(&|folder| change_weights(folder, |name, tensor| (!name.starts_with("classifier.")).then_some((name, tensor)))), @"zerorun: MODEL is not a trained classifier: its files lack classifier.weight; train one with zerorun finetune MODEL --task classify --data FILE --out DIR");
    insta::assert_snapshot!(refused(&|folder| change_config(folder, |config| config["model_type"] = "llama".into())), @r#"zerorun: MODEL/config.json: hidden_act is "gelu", but must be silu, swish, gelu_new or gelu_pytorch_tanh"#);
}

#[test]
fn a_classifier_has_the_same_bits_at_all_stages_and_after_a_stop() {
    let folder = bert();
    let data = opinions(&folder, 80);
    let common = ["--task", "classify", "--data", &data, "--val", "10%", "--ctx", "24", "--warmup", "0", "--scheduler"];
    let bytes = |out: &str, arguments: &[&str]| {
        let output = command(&folder, out, &[common.as_slice(), &["constant"], arguments].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        std::fs::read(folder.path().join(out).join("model.safetensors")).unwrap()
    };
    for world in ["1", "2"] {
        let first = bytes(&format!("whole{world}"), &["--steps", "6", "-n", world, "--ds_config", &config(&folder, 0)]);
        for stage in [1, 2, 3] {
            let of_stage = ["--steps", "6", "-n", world, "--ds_config", &config(&folder, stage)];
            let out = format!("out{world}-{stage}");
            assert!(bytes(&out, &of_stage) == first, "stage {stage}, world size {world}");
        }
        let saves = folder.path().join(format!("saves{world}"));
        let zero = config(&folder, 2);
        let resumed = ["-n", world, "--ds_config", &zero, "--save", saves.to_str().unwrap(), "--resume", "--steps"];
        let out = format!("resumed{world}");
        bytes(&out, &[resumed.as_slice(), &["3"]].concat());
        assert!(bytes(&out, &[resumed.as_slice(), &["6"]].concat()) == first, "world size {world}, resumed");
    }
}

#[test]
fn wrong_uses_of_the_task_are_refused_before_a_rank_is_started() {
    let folder = bert();
    let data = opinions(&folder, 20);
    let refused = |arguments: &[&str]| {
        let output = command(&folder, "out", &[&["--task", "classify"], arguments].concat());
        assert!(!output.status.success());
        assert!(!folder.path().join("out").exists());
        let errors = stderr(&output).replace(folder.path().to_str().unwrap(), "DIR");
        errors.lines().find(|line| !line.is_empty()).unwrap_or_default().to_owned()
    };
    insta::assert_snapshot!(refused(&["--data", &data, "--dpo", "beta=0.1"]), @"zerorun: --dpo is for text generation; leave out --dpo or --task classify");
    insta::assert_snapshot!(refused(&["--data", &data, "--prompt", "x"]), @"zerorun: --prompt is for text generation: a classifier does not answer prompts");
    insta::assert_snapshot!(refused(&["--data", &data, "--ctx", "65"]), @"zerorun: --ctx is 65, but must be 2 to 64, the model's context");
    let one = file(&folder, "one.csv", "text,label\nx,a\ny,a\n").path;
    insta::assert_snapshot!(refused(&["--data", one.to_str().unwrap()]), @r#"zerorun: the labels of DIR/one.csv cannot be used: all records have the label "a"; at least two labels are required"#);
    let none = file(&folder, "none.csv", "text,sort\nx,a\ny,b\n").path;
    insta::assert_snapshot!(refused(&["--data", none.to_str().unwrap()]), @"zerorun: DIR/none.csv has no sample to learn from: 2 records (lines 2, 3) could not be used (line 2: it contains text, but text and label are required; map them with --columns text=COLUMN,label=COLUMN)");
    let other = file(&folder, "other.csv", "text,label\nx,neutral\n").path;
    insta::assert_snapshot!(refused(&["--data", &data, "--val", other.to_str().unwrap()]), @r#"zerorun: DIR/other.csv has no sample to learn from: 1 record (line 2) could not be used (line 2: its label "neutral" is not one of the known labels (negative, positive))"#);
}
