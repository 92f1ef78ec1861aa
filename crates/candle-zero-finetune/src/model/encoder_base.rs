//! The encoder from which a classifier is trained: the folder of a BERT model in Hugging Face's format.

use super::base_model::{CONFIG, check_rows, check_weight, weights_of};
use super::output_dir::write_beside;
use crate::error::{FinetuneError, ParamError, Result};
use candle_zero::checkpoint::ConsolidatedDtype;
use candle_zero::engine::InitialValues;
use candle_zero::models::{BERT, BertConfig, DecoderConfig};
use candle_zero::param::WeightFiles;
use candle_zero::util::{fnv1a, list};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A published encoder, and the classes that it is to distinguish. No weights are loaded yet.
///
/// The files may be those of a BERT with any head or none: a classifier for other classes and heads for other tasks are
/// ignored. Parameters that a classifier needs and the files lack are initialized randomly, weights with the standard
/// deviation `initializer_range` and biases with 0. [`EncoderBase::notes`] lists them.
///
/// ```no_run
/// use candle_zero::Engine;
/// use candle_zero_finetune::{Columns, DataOptions, EncoderBase, Source, TrainingTask, labels_of};
/// use candle_zero::models::Bert;
///
/// let base = EncoderBase::open("bert-base-uncased", &labels_of(&[Source::parse("reviews.csv")?], &Columns::default())?)?;
/// let data = DataOptions { labels: base.data_labels().to_vec(), ..DataOptions::new(TrainingTask::Classify, 128) };
/// let config = r#"{"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}"#;
/// let builder = Engine::builder().initial_values(base.values());
/// let engine = builder.initialize(|vb| Bert::new(base.config(), vb), config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct EncoderBase {
    folder: PathBuf,
    json: Value,
    config: BertConfig,
    data_labels: Vec<String>,
    values: Arc<EncoderWeights>,
    notes: Vec<String>,
}

/// The prefix of parameters that are initialized randomly if the files lack them.
const CLASSIFIER: &str = "classifier.";
const POOLER: &str = "bert.pooler.";

impl EncoderBase {
    /// Opens a folder with the `config.json` and the weights of a BERT, to classify texts by `labels`, the labels of
    /// the data ([`labels_of`](crate::labels_of)). Reads only headers, and compares the weights' names, shapes and
    /// types with the description.
    ///
    /// A classifier in the files is kept if its classes include the labels by name, or if the labels are its class
    /// numbers.
    ///
    /// # Errors
    /// A folder without a model, or with a model that is not a BERT ([`FinetuneError::NoEncoder`]); unsupported values
    /// in the description; tensors of the encoder that are missing, superfluous, or of a different shape or type.
    pub fn open(folder: impl AsRef<Path>, labels: &[String]) -> Result<Self> {
        Self::open_for(folder.as_ref(), Some(labels))
    }

    /// Opens the folder of a trained classifier, with its own labels.
    ///
    /// # Errors
    /// Errors of [`open`](Self::open); files without a classifier or a pooler ([`FinetuneError::NoClassifier`]).
    pub fn open_trained(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let base = Self::open_for(folder, None)?;
        match base.values.random.first() {
            None => Ok(base),
            Some(name) => Err(FinetuneError::NoClassifier { path: folder.to_owned(), tensor: name.clone() }.into()),
        }
    }

    /// Opens a folder for these labels or, if `None`, those of the model.
    fn open_for(folder: &Path, labels: Option<&[String]>) -> Result<Self> {
        let description = folder.join(CONFIG);
        if !description.is_file() {
            let (path, found) = (folder.to_owned(), "has no config.json".into());
            return Err(FinetuneError::NoEncoder { path, found }.into());
        }
        let mut json = DecoderConfig::parse(&description)?;
        if let Some(other) = json["model_type"].as_str().filter(|found| *found != BERT) {
            let (path, found) = (folder.to_owned(), format!("has a model of type {other:?}"));
            return Err(FinetuneError::NoEncoder { path, found }.into());
        }
        let mut config = BertConfig::from_parsed(&json, &description)?;
        let files = weights_of(folder)?;
        let labels = labels.unwrap_or(&config.labels).to_vec();
        let labels = labels.as_slice();
        let mut notes = vec![];
        let (data_labels, names) = match known_labels(&files, &config, labels) {
            Ok(data_labels) => (data_labels, config.labels.clone()),
            Err(why) => {
                let std = config.initializer_range;
                notes.push(format!("the classifier is initialized randomly (standard deviation {std}): {why}"));
                (labels.to_vec(), labels.to_vec())
            }
        };
        config.labels = names;
        describe(&mut json, &config.labels);
        let keeps_classifier = notes.is_empty();
        let has_pooler = files.find("bert.pooler.dense.weight").is_some();
        if !has_pooler {
            notes.push("the pooler is initialized randomly: the model has none".into());
        }
        let is_random =
            |name: &str| !keeps_classifier && name.starts_with(CLASSIFIER) || !has_pooler && name.starts_with(POOLER);
        let (random, read): (Vec<_>, Vec<_>) = config.parameters()?.into_iter().partition(|(name, _)| is_random(name));
        for (name, shape) in &read {
            check_weight(&files, name, shape, &description)?;
        }
        notes.extend(left_out(&files, read.iter().map(|(name, _)| name.as_str()).collect())?);
        let random = random.into_iter().map(|(name, _)| name).collect();
        let values = Arc::new(EncoderWeights { files, random });
        Ok(Self { folder: folder.to_owned(), json, config, data_labels, values, notes })
    }

    /// Returns the model's description, with the names of the classes.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Returns the labels as written in the data, in the order of the classes, for
    /// [`DataOptions::labels`](crate::DataOptions::labels).
    pub fn data_labels(&self) -> &[String] {
        &self.data_labels
    }

    /// Returns which parameters are initialized randomly and which tensors of the files are ignored, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the folder, which contains the tokenizer's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the weights, for [`EngineBuilder::initial_values`](candle_zero::EngineBuilder::initial_values).
    pub fn values(&self) -> Arc<dyn InitialValues> {
        self.values.clone()
    }

    /// Checks that the embedding has a row for each id of a tokenizer. `ids` is the largest id plus one.
    ///
    /// # Errors
    /// Ids without a row. The message contains their number.
    pub fn check_tokens(&self, ids: usize) -> Result<()> {
        check_rows(self.config.vocab_size, ids)
    }

    /// Writes the files that, together with the `model.safetensors` of the trained model (f32), make up a folder that
    /// transformers can load: `config.json` with the names of the classes, and the tokenizer's files.
    ///
    /// # Errors
    /// Files that cannot be read or written, or that already exist.
    pub fn write_beside(&self, folder: &Path) -> Result<()> {
        write_beside(&self.folder, self.json.clone(), folder, ConsolidatedDtype::F32)
    }
}

/// Returns the data's labels in the order of the class numbers of the classifier in the files, or why that classifier
/// cannot be used.
fn known_labels(files: &WeightFiles, config: &BertConfig, labels: &[String]) -> Result<Vec<String>, String> {
    let names = &config.labels;
    let shape = |name: &str| files.find(&format!("{CLASSIFIER}{name}")).map(|(_, tensor)| tensor.shape());
    let (Some(weight), Some(bias)) = (shape("weight"), shape("bias")) else {
        return Err("the model has none".into());
    };
    if weight != [names.len(), config.hidden_size] || bias != [names.len()] {
        return Err(format!(
            "the model's classifier has shape {weight:?}, but the number of labels in its config.json is {}",
            names.len()
        ));
    }
    let numbers: Vec<String> = (0..names.len()).map(|number| number.to_string()).collect();
    match [names, &numbers].into_iter().find(|known| labels.iter().all(|label| known.contains(label))) {
        Some(known) => Ok(known.clone()),
        None => Err(format!(
            "the model's classifier has the labels {}, but the data has the labels {}",
            list(&quoted(names)),
            list(&quoted(labels))
        )),
    }
}

fn quoted(labels: &[String]) -> Vec<String> {
    labels.iter().map(|label| format!("{label:?}")).collect()
}

/// Changes the description to that of a classifier of these classes.
fn describe(json: &mut Value, labels: &[String]) {
    let Some(config) = json.as_object_mut() else { return };
    let names: Map<String, Value> =
        labels.iter().enumerate().map(|(number, name)| (number.to_string(), name.as_str().into())).collect();
    let numbers: Map<String, Value> =
        labels.iter().enumerate().map(|(number, name)| (name.clone(), number.into())).collect();
    config.remove("num_labels");
    config.insert("architectures".into(), json!(["BertForSequenceClassification"]));
    config.insert("problem_type".into(), "single_label_classification".into());
    config.insert("id2label".into(), names.into());
    config.insert("label2id".into(), numbers.into());
}

/// Returns a note on tensors that are not among the parameters `used`. Tensors of other heads are ignored; other
/// tensors of the encoder are an error.
fn left_out(files: &WeightFiles, used: BTreeSet<&str>) -> Result<Option<String>> {
    const ENCODER_PREFIXES: [&str; 4] = ["bert.", "embeddings.", "encoder.", "pooler."];
    let mut extra = files.unused(&used);
    extra.retain(|name| !name.ends_with("embeddings.position_ids") && !name.starts_with(CLASSIFIER));
    let of_encoder = |name: &&str| ENCODER_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let unknown: Vec<&str> = extra.iter().copied().filter(of_encoder).collect();
    if !unknown.is_empty() {
        return Err(ParamError::ExtraTensors { path: files.path().to_owned(), names: list(&unknown) }.into());
    }
    Ok((!extra.is_empty()).then(|| format!("not used, because they belong to heads for other tasks: {}", list(&extra))))
}

/// The files' weights, without those that are initialized randomly.
#[derive(Debug)]
struct EncoderWeights {
    files: WeightFiles,
    random: Vec<String>,
}

impl InitialValues for EncoderWeights {
    fn has(&self, name: &str) -> bool {
        !self.random.iter().any(|random| random == name) && self.files.find(name).is_some()
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        self.files.values(name, shape, range)
    }

    fn fingerprint(&self) -> u64 {
        let random = fnv1a(self.random.concat().as_bytes());
        fnv1a([self.files.fingerprint(), random].map(u64::to_le_bytes).as_flattened())
    }
}
