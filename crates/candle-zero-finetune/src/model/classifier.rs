//! A trained text classifier without an engine: the model, its tokenizer, and the names of the labels.

use super::base_model::{CONFIG, builder_over};
use super::classifier_base::ClassifierBase;
use super::classifier_config::ClassifierConfig;
use super::trainable_model::TrainableModel;
use crate::chat::tokenizer::Tokenizer;
use crate::error::{FinetuneError, Result};
use crate::peft::adapter::Adapter;
use crate::peft::adapter_initial_values::AdapterInitialValues;
use candle_core::{D, DType, Device, Tensor};
use candle_zero::models::{DecoderConfig, class_names};
use std::path::Path;

/// A classifier that predicts the labels of texts. Each text is processed separately, so its result does not depend on
/// other texts.
///
/// ```no_run
/// let classifier = candle_zero_finetune::Classifier::open("model")?;
/// let output = classifier.classify("a fine film")?;
/// println!("{} with probability {:.3}", output.labels[0].0, output.labels[0].1);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct Classifier {
    model: TrainableModel,
    config: ClassifierConfig,
    tokenizer: Tokenizer,
}

/// The result of classifying a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ClassificationOutput {
    /// All labels with their probabilities, the most likely first.
    pub labels: Vec<(String, f64)>,
    /// The number of tokens that were classified, including those that the tokenizer adds, but not those cut off.
    pub tokens: usize,
    /// The number of tokens cut off at the end because the model's context is too short.
    pub truncated_tokens: usize,
}

impl Classifier {
    /// Opens the folder of a trained classifier, which `zerorun finetune --task classify` writes and
    /// `AutoModelForSequenceClassification` loads, and reads its weights in f32.
    ///
    /// # Errors
    /// Errors of [`ClassifierBase::open_trained`] and [`Tokenizer::open`]; a tokenizer with more ids than the
    /// embedding has rows; weights that are not finite.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let base = ClassifierBase::open_trained(folder)?;
        let tokenizer = Tokenizer::open(base.folder())?;
        base.check_tokens(tokenizer.vocab_size())?;
        let vb = builder_over(base.values(), DType::F32, &Device::Cpu);
        Ok(Self { model: base.config().build(vb)?, config: base.config().clone(), tokenizer })
    }

    /// Opens the folder of a model together with that of an adapter for it, which `zerorun finetune --task classify
    /// --lora` or PEFT (task type SEQ_CLS) writes, and reads the weights in f32. The names of the labels are those in
    /// the adapter's `config.json`, if it has one.
    ///
    /// # Errors
    /// Errors of [`ClassifierBase::open`], [`Adapter::read`] and [`Tokenizer::open`]; an adapter without a classifier
    /// or for another model; weights that are not finite.
    pub fn open_with_adapter(folder: impl AsRef<Path>, adapter: impl AsRef<Path>) -> Result<Self> {
        let (folder, adapter) = (folder.as_ref(), Adapter::read(adapter)?);
        let description = adapter.path().join(CONFIG);
        let json = description.is_file().then(|| DecoderConfig::parse(&description)).transpose()?;
        let names = match &json {
            Some(json) => class_names(json, &description)?,
            None => (0..adapter.labels()?).map(|i| format!("LABEL_{i}")).collect(),
        };
        let mut base = ClassifierBase::open(folder, &names)?;
        let padding = json.and_then(|json| u32::try_from(json["pad_token_id"].as_u64()?).ok());
        base.pad_with(padding);
        let tokenizer = Tokenizer::open(base.folder())?;
        base.check_tokens(tokenizer.vocab_size())?;
        let config = base.config().clone().with_lora(Some(adapter.config.clone()));
        let values = AdapterInitialValues::of_classifier(&base, &config, Some(adapter))?;
        let model = config.build(values.var_builder(DType::F32, &Device::Cpu))?;
        Ok(Self { model, config, tokenizer })
    }

    /// Returns the names of the labels, in the order of the classes.
    pub fn labels(&self) -> &[String] {
        self.config.labels()
    }

    /// Predicts the label of a text. A text longer than the model's context is cut, but the tokens that the tokenizer
    /// adds are kept.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or that yields no tokens; results that are not finite.
    pub fn classify(&self, text: &str) -> Result<ClassificationOutput> {
        let mut ids = self.tokenizer.encode(text)?.ids;
        let (before, after) = self.tokenizer.prefix_and_suffix();
        let room = self.config.ctx().saturating_sub(before.len() + after.len());
        let truncated_tokens = ids.len().saturating_sub(room);
        ids.truncate(room);
        let ids = [before, &ids, after].concat();
        let tokens = ids.len();
        if tokens == 0 {
            return Err(unusable("the tokenizer produces no tokens for it"));
        }
        let ids = Tensor::from_vec(ids, (1, tokens), &Device::Cpu)?;
        let logits = self.model.classifier()?.logits(&ids, &[tokens])?.squeeze(0)?.to_dtype(DType::F64)?;
        let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
        let probabilities: Vec<f64> = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?.to_vec1()?;
        if probabilities.iter().any(|p| !p.is_finite()) {
            return Err(unusable("the model's result is not finite: its weights are damaged"));
        }
        let mut labels: Vec<(String, f64)> = self.labels().iter().cloned().zip(probabilities).collect();
        // The sort is stable: labels with equal probabilities keep the order of the classes.
        labels.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ClassificationOutput { labels, tokens, truncated_tokens })
    }
}

fn unusable(reason: &str) -> candle_zero::Error {
    FinetuneError::Unclassified { reason: reason.into() }.into()
}
