//! The model from which a classifier is trained: the folder of an encoder or of a language model in Hugging Face's
//! format.

use super::base_model::{CONFIG, LM_HEAD, check_rows, check_weight, weights_of};
use super::classifier_config::ClassifierConfig;
use super::output_dir::write_companion_files;
use crate::error::{Error, FinetuneError, ParamError, Result};
use candle_zero::checkpoint::{ConsolidatedDtype, write_json};
use candle_zero::engine::InitialValues;
use candle_zero::error::ModelError;
use candle_zero::models::{
    DecoderClassifierConfig, DecoderConfig, ENCODER_TYPES, EncoderConfig, EncoderNaming, SCORE, class_names,
};
use candle_zero::param::WeightFiles;
use candle_zero::util::{fnv1a, list};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A published encoder or language model, and the classes that it is to distinguish. No weights are loaded yet.
///
/// The files may be those of a model with any head or none: a classifier for other classes and heads for other tasks
/// are ignored. If the files do not provide the classifier, or the layers between the encoder and the classifier, these
/// are initialized randomly: weights with the standard deviation `initializer_range`, and biases with 0.
/// [`ClassifierBase::notes`] names the modules that are initialized randomly.
///
/// ```no_run
/// use candle_zero::Engine;
/// use candle_zero_finetune::{ClassifierBase, ColumnMapping, DataOptions, Source, TrainingTask, labels_of};
///
/// let labels = labels_of(&[Source::parse("reviews.csv")?], &ColumnMapping::default())?;
/// let base = ClassifierBase::open("bert-base-uncased", &labels)?;
/// let data = DataOptions { labels: base.data_labels().to_vec(), ..DataOptions::new(TrainingTask::Classify, 128) };
/// let config = r#"{"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}"#;
/// let builder = Engine::builder().initial_values(base.values());
/// let engine = builder.initialize(|vb| base.config().build(vb), config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ClassifierBase {
    folder: PathBuf,
    json: Value,
    config: ClassifierConfig,
    data_labels: Vec<String>,
    values: Arc<ClassifierWeights>,
    notes: Vec<String>,
}

impl ClassifierBase {
    /// Opens a folder with the `config.json` and the weights of an encoder or a language model, to classify texts by
    /// `labels`, the labels of the data ([`labels_of`](crate::labels_of)). Reads only headers, and compares the
    /// weights' names, shapes and types with the description.
    ///
    /// A classifier in the files is kept if all labels are names of its classes, or if all labels are numbers of its
    /// classes.
    ///
    /// # Errors
    /// A folder without a model, or with a model of an unknown type ([`FinetuneError::NoClassifierBase`]); unsupported
    /// values in the description; tensors of the model that are missing, superfluous, or of a different shape or type.
    pub fn open(folder: impl AsRef<Path>, labels: &[String]) -> Result<Self> {
        Self::open_for(folder.as_ref(), Some(labels))
    }

    /// Opens the folder of a trained classifier, with its labels.
    ///
    /// # Errors
    /// Errors of [`open`](Self::open); files without a part of the classifier ([`FinetuneError::NoClassifier`]).
    pub fn open_trained(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let base = Self::open_for(folder, None)?;
        match base.values.random.first() {
            None => Ok(base),
            Some(name) => Err(FinetuneError::NoClassifier { path: folder.to_owned(), tensor: name.clone() }.into()),
        }
    }

    /// Opens a folder for `labels` or, if this is `None`, for the labels of the model.
    fn open_for(folder: &Path, labels: Option<&[String]>) -> Result<Self> {
        let description = folder.join(CONFIG);
        let unknown = |found: String| FinetuneError::NoClassifierBase { path: folder.to_owned(), found };
        if !description.is_file() {
            return Err(unknown("has no config.json".into()).into());
        }
        let mut json = DecoderConfig::parse(&description)?;
        let model_type = json["model_type"].as_str().unwrap_or_default().to_owned();
        let mut config = match ENCODER_TYPES.contains(&model_type.as_str()) {
            true => ClassifierConfig::Encoder(EncoderConfig::from_parsed(&json, &description)?),
            false => ClassifierConfig::Decoder(decoder(&json, folder, &description)?),
        };
        let files = weights_of(folder)?;
        let labels = labels.unwrap_or(config.labels()).to_vec();
        let mut notes = vec![];
        let (data_labels, names) = match known_labels(&files, &config, &labels) {
            Ok(data_labels) => (data_labels, config.labels().to_vec()),
            Err(reason) => {
                let std = config.initializer_range();
                notes.push(format!("the classifier is initialized randomly (standard deviation {std}): {reason}"));
                (labels.clone(), labels)
            }
        };
        let mut random_modules = if notes.is_empty() { vec![] } else { vec![config.classifier()] };
        config.set_labels(names);
        let architecture = architecture(&json, &model_type);
        describe(&mut json, config.labels(), architecture);
        if let ClassifierConfig::Encoder(encoder) = &mut config {
            let head = encoder.naming.head();
            let has_head = files.tensors().any(|(name, _)| is_in_module(name, head))
                || files.find(&format!("{head}.dense.weight")).is_some();
            if !has_head {
                random_modules.push(head);
                encoder.adapts_pooler = false;
                notes.push(match encoder.naming {
                    EncoderNaming::Bert => "the pooler is initialized randomly: the model has none".into(),
                    _ => format!("{head} is initialized randomly: the model has none"),
                });
            }
        }
        let is_random = |name: &str| random_modules.iter().any(|module| is_in_module(name, module));
        let (random, read): (Vec<_>, Vec<_>) = config.parameters()?.into_iter().partition(|(name, _)| is_random(name));
        for (name, shape) in &read {
            check_weight(&files, name, shape, &description)?;
        }
        notes.extend(ignored_tensors(&files, &config, read.iter().map(|(name, _)| name.as_str()).collect())?);
        let random = random.into_iter().map(|(name, _)| name).collect();
        let values = Arc::new(ClassifierWeights { files, random });
        Ok(Self { folder: folder.to_owned(), json, config, data_labels, values, notes })
    }

    /// Returns the model's description, with the names of the classes.
    pub fn config(&self) -> &ClassifierConfig {
        &self.config
    }

    /// Sets the padding token of a language model whose description has none.
    pub(crate) fn pad_with(&mut self, id: Option<u32>) {
        if let (ClassifierConfig::Decoder(config), Some(id)) = (&mut self.config, id)
            && config.pad_token_id.is_none()
        {
            config.pad_token_id = Some(id);
            if let Some(json) = self.json.as_object_mut() {
                json.insert("pad_token_id".into(), id.into());
            }
        }
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

    /// Returns the modules that are trained completely, and saved with the adapters, if the other weights are frozen:
    /// the classifier (with the `pre_classifier` of a DistilBERT), and everything else that is initialized randomly.
    /// The names are the last parts of the modules' paths, as in PEFT's `modules_to_save`.
    pub fn saved_modules(&self) -> Vec<String> {
        let is_random = |module: &str| self.values.random.iter().any(|name| is_in_module(name, module));
        let modules: &[(&str, bool)] = match &self.config {
            ClassifierConfig::Decoder(_) => &[(SCORE, true)],
            ClassifierConfig::Encoder(encoder) => match encoder.naming {
                EncoderNaming::Bert => &[("classifier", true), ("pooler", false)],
                EncoderNaming::DistilBert => &[("classifier", true), ("pre_classifier", true)],
                EncoderNaming::ModernBert => &[("classifier", true), ("head", false)],
                // The classifier is the complete head.
                _ => &[("classifier", true)],
            },
        };
        let saved = modules.iter().filter(|(module, always)| *always || is_random(module));
        saved.map(|(module, _)| (*module).to_owned()).collect()
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
        check_rows(self.config.vocab_size(), ids)
    }

    /// Writes the files that, together with the `model.safetensors` of the trained model (f32), make up a folder that
    /// transformers can load: `config.json` with the names of the classes, and the tokenizer's files.
    ///
    /// # Errors
    /// Files that cannot be read or written, or that already exist.
    pub fn write_companion_files(&self, folder: &Path) -> Result<()> {
        write_companion_files(&self.folder, self.json.clone(), folder, ConsolidatedDtype::F32)
    }

    /// Writes the `config.json` with the names of the classes. An adapter has no other file that names them.
    pub(crate) fn write_config(&self, folder: &Path) -> Result<()> {
        write_json(folder, CONFIG, &self.json)
    }
}

/// Reads the description of a language model.
fn decoder(json: &Value, folder: &Path, description: &Path) -> Result<DecoderClassifierConfig> {
    let path = folder.to_owned();
    if json.get("text_config").is_some_and(|text| !text.is_null()) {
        return Err(FinetuneError::NoClassifierBase { path, found: "has a model for images and text".into() }.into());
    }
    let decoder = DecoderConfig::from_parsed(json, description).map_err(|error| match error {
        Error::Model(ModelError::UnknownModelType { found, .. }) => {
            FinetuneError::NoClassifierBase { path, found: format!("has a model of type {found}") }.into()
        }
        other => other,
    })?;
    let invalid = |key: &str, allowed: &str| {
        let (file, found) = (description.to_owned(), json[key].to_string());
        Error::from(ModelError::HuggingFace { file, key: key.into(), found, allowed: allowed.into() })
    };
    let pad_token_id = match &json["pad_token_id"] {
        Value::Null => None,
        id => {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < decoder.vocab);
            Some(id.ok_or_else(|| invalid("pad_token_id", "a token id below vocab_size"))?)
        }
    };
    let initializer_range = match &json["initializer_range"] {
        Value::Null => 0.02,
        std => {
            let std = std.as_f64().filter(|std| *std >= 0.0 && std.is_finite());
            std.ok_or_else(|| invalid("initializer_range", "a finite number of at least 0, such as 0.02"))?
        }
    };
    let labels = class_names(json, description)?;
    Ok(DecoderClassifierConfig { decoder, labels, pad_token_id, initializer_range })
}

/// Returns transformers' class for the classifier: that of the described model, with a different head.
fn architecture(json: &Value, model_type: &str) -> Option<String> {
    let encoder = match model_type {
        "bert" => Some("Bert"),
        "roberta" => Some("Roberta"),
        "xlm-roberta" => Some("XLMRoberta"),
        "distilbert" => Some("DistilBert"),
        "electra" => Some("Electra"),
        "modernbert" => Some("ModernBert"),
        "gemma3_text" => Some("Gemma3Text"),
        _ => None,
    };
    let of_decoder = || {
        let name = json["architectures"][0].as_str()?;
        ["ForCausalLM", "LMHeadModel", "ForSequenceClassification"].iter().find_map(|head| name.strip_suffix(head))
    };
    Some(format!("{}ForSequenceClassification", encoder.or_else(of_decoder)?))
}

/// Returns whether a parameter belongs to a module. `module` is the end of the module's path, or the complete path.
pub(crate) fn is_in_module(parameter: &str, module: &str) -> bool {
    parameter
        .match_indices(module)
        .any(|(at, _)| (at == 0 || parameter[..at].ends_with('.')) && parameter[at + module.len()..].starts_with('.'))
}

/// Returns the data's labels in the order of the class numbers of the classifier in the files, or why that classifier
/// cannot be used.
fn known_labels(files: &WeightFiles, config: &ClassifierConfig, labels: &[String]) -> Result<Vec<String>, String> {
    let (names, classifier) = (config.labels(), config.classifier());
    let shape = |name: &str| files.find(&format!("{classifier}.{name}")).map(|(_, tensor)| tensor.shape());
    let Some(weight) = shape("weight") else { return Err("the model has none".into()) };
    let bias = match (config.has_classifier_bias(), shape("bias")) {
        (true, None) => return Err("the model's classifier has no bias".into()),
        (true, bias) => bias,
        (false, _) => None,
    };
    if weight != [names.len(), config.hidden_size()] || bias.is_some_and(|bias| bias != [names.len()]) {
        return Err(format!(
            "the model's classifier has shape {weight:?}, but the number of labels in its config.json is {}",
            names.len()
        ));
    }
    let numbers: Vec<String> = (0..names.len()).map(|number| number.to_string()).collect();
    match [names, &numbers].into_iter().find(|known| labels.iter().all(|label| known.contains(label))) {
        Some(known) => Ok(known.to_vec()),
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
fn describe(json: &mut Value, labels: &[String], architecture: Option<String>) {
    let Some(config) = json.as_object_mut() else { return };
    let names: Map<String, Value> =
        labels.iter().enumerate().map(|(number, name)| (number.to_string(), name.as_str().into())).collect();
    let numbers: Map<String, Value> =
        labels.iter().enumerate().map(|(number, name)| (name.clone(), number.into())).collect();
    config.remove("num_labels");
    match architecture {
        Some(architecture) => _ = config.insert("architectures".into(), json!([architecture])),
        // transformers' auto classes choose by model_type.
        None => _ = config.remove("architectures"),
    }
    config.insert("problem_type".into(), "single_label_classification".into());
    config.insert("id2label".into(), names.into());
    config.insert("label2id".into(), numbers.into());
}

/// Returns a note on tensors that are not among the parameters `used`. Tensors of other heads are ignored; other
/// tensors of the model are an error.
fn ignored_tensors(files: &WeightFiles, config: &ClassifierConfig, used: BTreeSet<&str>) -> Result<Option<String>> {
    let mut extra = files.unused(&used);
    extra.retain(|name| {
        let is_buffer = name.ends_with("embeddings.position_ids") || name.ends_with("embeddings.token_type_ids");
        !is_buffer && !is_in_module(name, config.classifier())
    });
    let belongs_to_model = |name: &&str| match config {
        ClassifierConfig::Decoder(_) => *name != LM_HEAD,
        ClassifierConfig::Encoder(encoder) => {
            let (naming, roots) =
                (encoder.naming, ["embeddings.", "encoder.", "transformer.", "layers.", "final_norm."]);
            let bare = name.strip_prefix(naming.prefix()).and_then(|rest| rest.strip_prefix('.'));
            let is_pooler = bare.unwrap_or(name).starts_with("pooler.");
            // The files of encoders whose classifier has no pooler often contain a pooler.
            match is_pooler {
                true => naming == EncoderNaming::Bert,
                false => bare.is_some() || roots.iter().any(|root| name.starts_with(root)),
            }
        }
    };
    let unknown: Vec<&str> = extra.iter().copied().filter(belongs_to_model).collect();
    if !unknown.is_empty() {
        return Err(ParamError::ExtraTensors { path: files.path().to_owned(), names: list(&unknown) }.into());
    }
    Ok((!extra.is_empty()).then(|| format!("not used, because they belong to heads for other tasks: {}", list(&extra))))
}

/// The files' weights, without those that are initialized randomly.
#[derive(Debug)]
struct ClassifierWeights {
    files: WeightFiles,
    random: Vec<String>,
}

impl InitialValues for ClassifierWeights {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_has_the_parameters_below_its_path() {
        assert!(is_in_module("classifier.weight", "classifier"));
        assert!(is_in_module("classifier.out_proj.bias", "classifier"));
        assert!(is_in_module("bert.pooler.dense.weight", "pooler"));
        assert!(is_in_module("classifier.out_proj.bias", "classifier.out_proj"));
        assert!(!is_in_module("pre_classifier.weight", "classifier"));
        assert!(!is_in_module("classifiers.weight", "classifier"));
        assert!(!is_in_module("classifier", "classifier"));
    }
}
