//! Prepares the inputs of a run before the engine is built: the model's description, its tokenizer and its data.

use super::options::{Objective, Options, PipelineStages, TuningMethod, ValidationData, option_use_error, refused};
use super::run_identity::SavedRun;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::data::batches::SequencePacking;
use crate::data::class_labels::labels_of;
use crate::data::data_options::{DataOptions, TrainingTask};
use crate::data::dataset::{Dataset, FileReadProgress};
use crate::data::sample_cache::default_cache;
use crate::data::source::Source;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use crate::model::base_model::BaseModel;
use crate::model::classifier_base::ClassifierBase;
use crate::model::classifier_config::ClassifierConfig;
use crate::peft::adapter::{Adapter, is_saved};
use crate::peft::adapter_initial_values::AdapterInitialValues;
use crate::peft::qlora_weight_selection::{PACKING, quantized_except};
use candle_zero::engine::InitialValues;
use candle_zero::models::DecoderConfig;
use candle_zero::nn::is_adapter;
use candle_zero::util::counted;
use std::path::Path;
use std::sync::Arc;

/// A run whose options, model and data have been checked. No weights have been loaded yet.
#[derive(Debug)]
pub struct PreparedRun {
    pub(super) options: Options,
    pub(super) start: StartModel,
    /// The initial values of the parameters.
    pub(super) values: Arc<dyn InitialValues>,
    /// The fingerprint of the adapter that the run starts from, if there is one.
    pub(super) adapter: Option<u64>,
    ctx: usize,
    pub(super) tokenizer: Tokenizer,
    pub(super) template: Option<Template>,
    pub(super) training: Arc<Dataset>,
    pub(super) validation: Option<Arc<Dataset>>,
    /// Whether another process holds the locks on the outputs.
    pub(super) is_claimed: bool,
}

/// The model that a run starts from, and the description of the one that is trained.
#[derive(Debug)]
pub(super) enum StartModel {
    /// A language model. The description includes adapters and the row length.
    Decoder { base: Box<BaseModel>, config: DecoderConfig },
    /// A model to be trained as a classifier. The description includes adapters and, for a decoder, the row length.
    /// With adapters, the modules `saved` are trained completely.
    Classifier { base: Box<ClassifierBase>, config: ClassifierConfig, saved: Vec<String> },
}

impl StartModel {
    fn open(options: &Options) -> Result<Self> {
        let checkpoint_activations = options.recompute.unwrap_or(false);
        if options.objective == Objective::Classify {
            let labels = match options.labels.is_empty() {
                true => labels_of(&options.data, &options.columns)?,
                false => options.labels.clone(),
            };
            let base = Box::new(ClassifierBase::open(&options.model, &labels)?);
            let config = base.config().clone().with_lora(options.method.lora().cloned());
            let (config, saved) = (config.recomputing(checkpoint_activations), base.saved_modules());
            if options.router_aux_loss_coef.is_some() {
                let problem = "is for text generation: a classifier is trained without a load-balancing loss";
                return Err(option_use_error("--router_aux_loss_coef", problem));
            }
            check_keep_layers(options, config.blocks())?;
            return Ok(Self::Classifier { base, config, saved });
        }
        let base = Box::new(BaseModel::open(&options.model)?);
        let lora = options.method.lora().cloned();
        let mut config = DecoderConfig { lora, checkpoint_activations, ..base.config().clone() };
        set_balance(&mut config, options)?;
        check_keep_layers(options, config.blocks.len())?;
        Ok(Self::Decoder { base, config })
    }

    /// Returns the folder or file with the tokenizer.
    pub(super) fn tokenizer_path(&self) -> &Path {
        match self {
            Self::Decoder { base, .. } => base.tokenizer_path(),
            Self::Classifier { base, .. } => base.folder(),
        }
    }

    fn check_tokens(&self, ids: usize) -> Result<()> {
        match self {
            Self::Decoder { base, .. } => base.check_tokens(ids),
            Self::Classifier { base, .. } => base.check_tokens(ids),
        }
    }

    /// Sets the padding token of a classifier whose description has none.
    fn pad_with(&mut self, id: Option<u32>) {
        if let Self::Classifier { base, config, .. } = self {
            base.pad_with(id);
            if let (ClassifierConfig::Decoder(config), ClassifierConfig::Decoder(source)) = (config, base.config()) {
                config.pad_token_id = source.pad_token_id;
            }
        }
    }

    /// Returns the rule that selects, by name, the parameters that are trained with a method.
    pub(super) fn trained(&self, method: &TuningMethod) -> impl Fn(&str) -> bool + Clone + Send + Sync + use<> {
        let is_full = *method == TuningMethod::Full;
        let saved = if let Self::Classifier { saved, .. } = self { saved.clone() } else { vec![] };
        move |name| is_full || is_adapter(name) || is_saved(name, &saved)
    }

    /// Returns the initial values of the parameters of a model for rows of `ctx` tokens, including those of the adapter
    /// whose training is continued, if there is one.
    fn values(&mut self, ctx: usize, adapter: Option<Adapter>, options: &Options) -> Result<Arc<dyn InitialValues>> {
        match self {
            Self::Decoder { base, config } => {
                config.ctx = ctx;
                Ok(match config.lora {
                    Some(_) => {
                        let values = AdapterInitialValues::new(base, config, adapter)?;
                        Arc::new(match options.method {
                            TuningMethod::Qlora(_) => values.quantized(
                                PACKING,
                                options.precision.dtype(),
                                quantized_except(&options.keep_layers),
                            ),
                            _ => values,
                        })
                    }
                    None => base.values(),
                })
            }
            Self::Classifier { base, config, saved } => {
                config.set_ctx(ctx);
                if config.lora().is_none() {
                    return Ok(base.values());
                }
                let mut adapter = adapter;
                if let Some(initial) = adapter.take() {
                    initial.check_classifies()?;
                    // PEFT also lists modules that the model does not have.
                    let parameters = config.parameters()?;
                    let exists = |module: &String| {
                        parameters.iter().any(|(name, _)| is_saved(name, std::slice::from_ref(module)))
                    };
                    let additional = initial.saved_modules().unwrap_or_default().iter();
                    let additional: Vec<String> =
                        additional.filter(|module| exists(module) && !saved.contains(module)).cloned().collect();
                    saved.extend(additional);
                    adapter = Some(initial.of_classifier(saved.clone()));
                }
                let values = AdapterInitialValues::of_classifier(base, config, adapter)?;
                Ok(Arc::new(match options.method {
                    TuningMethod::Qlora(_) => {
                        values.quantized(PACKING, options.precision.dtype(), quantized_except(&options.keep_layers))
                    }
                    _ => values,
                }))
            }
        }
    }

    /// Returns the maximum number of tokens in a row: the context length of the model.
    fn max_ctx(&self) -> usize {
        match self {
            Self::Decoder { base, .. } => base.config().ctx,
            Self::Classifier { base, .. } => base.config().ctx(),
        }
    }
}

/// Sets the factor of the load-balancing loss, and checks that the run can have one.
fn set_balance(config: &mut DecoderConfig, options: &Options) -> Result<()> {
    const FLAG: &str = "--router_aux_loss_coef";
    match (&mut config.mixture, options.router_aux_loss_coef) {
        (Some(mixture), Some(factor)) => mixture.balance_coefficient = Some(factor),
        (None, Some(_)) => {
            return Err(option_use_error(FLAG, "is for mixtures of experts, but the model is not one; leave it out"));
        }
        (_, None) => (),
    }
    let Some(mixture) = &mut config.mixture else { return Ok(()) };
    mixture.balance_coefficient = mixture.balance_coefficient.filter(|factor| *factor > 0.0);
    let is_divided = matches!(options.pipeline, Some(PipelineStages::Auto | PipelineStages::Number(2..)));
    match is_divided && mixture.balance_coefficient.is_some() {
        true => Err(option_use_error(
            "--pipeline",
            "cannot be combined with the load-balancing loss of a mixture of experts, because no stage has the routers of \
             all blocks; give --router_aux_loss_coef 0, or leave --pipeline out",
        )),
        false => Ok(()),
    }
}

/// Checks that the model has the blocks whose weights QLoRA does not pack.
fn check_keep_layers(options: &Options, blocks: usize) -> Result<()> {
    match options.keep_layers.iter().find(|block| **block >= blocks) {
        Some(block) => Err(option_use_error(
            "--keep_layers",
            format!("contains {block}, but the model's layers are numbered from 0 to {}", blocks - 1),
        )),
        None => Ok(()),
    }
}

impl PreparedRun {
    /// Checks the options, opens the model, and tokenizes the data, or memory-maps the tokenized data of an earlier
    /// run. `progress` is called with the progress of a data file.
    ///
    /// # Errors
    /// Invalid options; errors of [`BaseModel::open`] or [`ClassifierBase::open`], [`Adapter::read`],
    /// [`AdapterInitialValues::new`] or [`AdapterInitialValues::of_classifier`], [`Tokenizer::open`],
    /// [`Template::open`], [`labels_of`], [`Dataset::prepare`] and [`Dataset::check_skipped`]; an output that is not
    /// writable, or whose place is occupied by something that this run has not written.
    pub fn new(mut options: Options, progress: &mut dyn FnMut(FileReadProgress)) -> Result<Self> {
        options.check()?;
        options.outputs().check()?;
        options.check_free(&options.written())?;
        let adapter = options.adapter.as_ref().map(Adapter::read).transpose()?;
        if let (Some(adapter), TuningMethod::Lora(lora) | TuningMethod::Qlora(lora)) = (&adapter, &mut options.method) {
            *lora = adapter.config.clone();
        }
        let mut start = StartModel::open(&options)?;
        let tokenizer = Tokenizer::open(start.tokenizer_path())?;
        start.check_tokens(tokenizer.vocab_size())?;
        start.pad_with(["pad_token", "eos_token"].into_iter().find_map(|name| tokenizer.special_id(name)));
        let template = match Template::open(start.tokenizer_path(), &tokenizer) {
            Err(error) if matches!(error.downcast_ref(), Some(FinetuneError::NoTemplate { .. })) => None,
            found => Some(found?),
        };
        let max_ctx = start.max_ctx();
        let ctx = options.ctx.unwrap_or(DataOptions::DEFAULT_CTX.min(max_ctx));
        if ctx > max_ctx {
            return Err(refused("--ctx", ctx, format!("2 to {max_ctx}, the model's context")));
        }
        let adapter_fingerprint = adapter.as_ref().map(Adapter::fingerprint);
        let values = start.values(ctx, adapter, &options)?;
        let labels = match &start {
            StartModel::Decoder { .. } => vec![],
            StartModel::Classifier { base, .. } => base.data_labels().to_vec(),
        };
        let cache = options.cache.clone().map_or_else(default_cache, Ok)?;
        let mut prepare = |sources: &[Source]| {
            let task = match options.objective {
                Objective::Generate => TrainingTask::Generate,
                Objective::Prefer { .. } => TrainingTask::Prefer,
                Objective::Classify => TrainingTask::Classify,
            };
            let (overlong, strict, labels) = (options.overlong, options.strict, labels.clone());
            let columns = options.columns.clone();
            let data = DataOptions { overlong, strict, labels, columns, ..DataOptions::new(task, ctx) };
            let dataset = Dataset::prepare(sources, &tokenizer, template.as_ref(), &data, &cache, progress)?;
            if !options.allow_skipped {
                dataset.check_skipped()?;
            }
            Ok::<_, Error>(dataset)
        };
        let training = prepare(&options.data)?;
        let (training, validation) = match &options.validation {
            None => (training, None),
            Some(ValidationData::Files(files)) => {
                let validation = prepare(files)?;
                (training, Some(validation))
            }
            Some(ValidationData::Fraction(fraction)) => {
                let (samples, percent) = (training.len(), fraction * 100.0);
                let (training, validation) = training.split(*fraction, options.seed);
                if training.is_empty() || validation.is_empty() {
                    let purpose = if training.is_empty() { "train on" } else { "validate with" };
                    let problem = format!(
                        "takes {percent}% of {}, which leaves none to {purpose}; give a different percentage, or files",
                        counted(samples, "sample")
                    );
                    return Err(option_use_error("--val", problem));
                }
                (training, Some(validation))
            }
        };
        let validation = validation.map(Arc::new);
        let (adapter, training) = (adapter_fingerprint, Arc::new(training));
        let is_claimed = false;
        Ok(Self { options, start, values, adapter, ctx, tokenizer, template, training, validation, is_claimed })
    }

    /// Returns the run recorded in the newest checkpoint, if this run may resume and there is a checkpoint.
    pub(super) fn saved(&self) -> Option<SavedRun> {
        let saving = self.options.saving.as_ref().filter(|saving| saving.resume)?;
        SavedRun::newest(&saving.dir)
    }

    /// Marks the outputs as claimed by the process that started this one.
    #[doc(hidden)]
    pub fn claimed(self) -> Self {
        Self { is_claimed: true, ..self }
    }

    /// Returns the options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the language model that the run starts from and the description of the one that is trained: the former's
    /// description with adapters, and with the row length as its context. Returns `None` if a classifier is trained.
    pub fn decoder(&self) -> Option<(&BaseModel, &DecoderConfig)> {
        match &self.start {
            StartModel::Decoder { base, config } => Some((base.as_ref(), config)),
            StartModel::Classifier { .. } => None,
        }
    }

    /// Returns the model that a classifier is trained from, if one is trained.
    pub fn classifier(&self) -> Option<&ClassifierBase> {
        match &self.start {
            StartModel::Decoder { .. } => None,
            StartModel::Classifier { base, .. } => Some(base),
        }
    }

    /// Returns the maximum number of tokens in a row.
    pub fn ctx(&self) -> usize {
        self.ctx
    }

    /// Returns the model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the model's chat template, if it has one.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// Returns the training data.
    pub fn training(&self) -> &Dataset {
        &self.training
    }

    /// Returns the validation data.
    pub fn validation(&self) -> Option<&Dataset> {
        self.validation.as_deref()
    }

    pub(crate) fn packing(&self) -> SequencePacking {
        let packed = self.options.packing && self.training.group() == 1 && self.training.labels().is_empty();
        if packed { SequencePacking::Packed { ctx: self.ctx } } else { SequencePacking::Padded }
    }

    /// Returns the width of the residual stream.
    pub(crate) fn hidden_size(&self) -> usize {
        match &self.start {
            StartModel::Decoder { config, .. } => config.hidden_size,
            StartModel::Classifier { config, .. } => config.hidden_size(),
        }
    }

    /// Returns the padding token or, if the tokenizer has none, its end-of-text token, or else 0.
    pub(crate) fn pad(&self) -> u32 {
        let ids = ["pad_token", "eos_token"].map(|name| self.tokenizer.special_id(name));
        ids.into_iter().flatten().next().unwrap_or(0)
    }
}
