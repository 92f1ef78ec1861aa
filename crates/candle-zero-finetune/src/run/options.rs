//! The options of a fine-tuning run.

use crate::data::column_mapping::ColumnMapping;
use crate::data::data_options::Truncation;
use crate::data::source::Source;
use crate::error::FinetuneError;
use crate::error::Result;
use candle_core::DType;
use candle_zero::nn::LoraConfig;
use candle_zero::runs::RunSpec;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The weights that are trained.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum TuningMethod {
    /// All weights.
    Full,
    /// Low-rank adapters. The base's weights are frozen.
    Lora(LoraConfig),
    /// Low-rank adapters. The base's weights are frozen, and the projections of the blocks are in NF4 (QLoRA, arXiv
    /// 2305.14314).
    Qlora(LoraConfig),
}

impl TuningMethod {
    /// Returns the name of the method.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Lora(_) => "lora",
            Self::Qlora(_) => "qlora",
        }
    }

    /// Returns the adapters' settings, if there are adapters.
    pub fn lora(&self) -> Option<&LoraConfig> {
        match self {
            Self::Full => None,
            Self::Lora(lora) | Self::Qlora(lora) => Some(lora),
        }
    }
}

/// The training objective.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Objective {
    /// Generating the assistant's messages, with the cross entropy of the targets.
    Generate,
    /// Preferring one answer to another, by direct preference optimization against the model without its adapters.
    Prefer {
        /// The weight of a difference in log probability.
        beta: f64,
    },
    /// Predicting the label of a text, with the cross entropy of the classes. The model is an encoder or a decoder.
    /// With adapters, the head is trained completely.
    Classify,
}

/// The length of training.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum TrainingLength {
    /// Three epochs, or up to fifteen with fewer than 400 samples, because the model must then see each sample more
    /// often.
    Auto,
    /// This number of epochs.
    Epochs(f64),
    /// This number of optimizer steps.
    Steps(u64),
}

/// The precision of the model during training. Trained weights have f32 copies in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ModelPrecision {
    /// Single precision.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// Half precision, with loss scaling.
    F16,
}

impl ModelPrecision {
    /// Returns the dtype of the model's tensors.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// The decay of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LrDecay {
    /// Cosine decay to zero.
    #[default]
    Cosine,
    /// Linear decay to zero.
    Linear,
    /// No decay.
    Constant,
}

/// The length of the learning rate's warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum WarmupLength {
    /// A fraction of all steps.
    Fraction(f64),
    /// This number of steps.
    Steps(u64),
}

/// The data for validation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ValidationData {
    /// Separate files.
    Files(Vec<Source>),
    /// A fraction of the training data, above 0 and below 1, that is not trained on.
    Fraction(f64),
}

/// The checkpoints that a run saves, and whether it resumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// The folder for checkpoints.
    pub dir: PathBuf,
    /// The number of steps between checkpoints. `None` saves a checkpoint only at the end.
    pub every: Option<u64>,
    /// The number of newest checkpoints that are kept. `None` keeps all.
    pub keep: Option<usize>,
    /// Whether the run resumes from the newest existing checkpoint.
    pub resume: bool,
}

/// The number of ranks along a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PipelineStages {
    /// All ranks of the job.
    Auto,
    /// This number of ranks. If the job has more, they form several pipelines, which train on different rows.
    Number(usize),
}

/// Settings of local steps, with which islands of ranks train independently and exchange the changes in their weights
/// after many steps. The given settings complete the `local_steps` section of the DeepSpeed configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LocalStepsOptions {
    /// The number of steps that an island takes between two exchanges. Default: 100 if one of the other settings is
    /// given.
    pub steps: Option<u64>,
    /// The number of islands, or of slots for islands if they meet at a server. Default: one island per host.
    pub islands: Option<usize>,
    /// The address of an island server, `HOST:PORT`. With a server, this job is one of several islands. Default: no
    /// server; the islands are parts of this job.
    pub server: Option<String>,
}

/// All options of a fine-tuning run. Options that are not set have suitable defaults.
///
/// ```
/// use candle_zero_finetune::{TrainingLength, Options};
///
/// let options = Options { length: TrainingLength::Steps(100), ..Options::new("SmolLM2-135M-Instruct", "adapter") };
/// assert!(options.method.lora().is_some_and(|lora| lora.r == 16));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The model: a folder in Hugging Face's format, a GGUF file, or a folder with one. For classification, it is a
    /// folder in Hugging Face's format, of an encoder or a language model.
    pub model: PathBuf,
    /// The model's name in the adapter's file. Default: its folder.
    pub base_name: Option<String>,
    /// The training data.
    pub data: Vec<Source>,
    /// The folder for the result. It must be absent or empty, or contain only what the run that is resumed wrote there.
    pub out: PathBuf,
    /// The weights that are trained. Default: LoRA of rank 16 on all projections.
    pub method: TuningMethod,
    /// The folder of an adapter whose training is continued. Its settings replace those of the method. Default: a new
    /// adapter that initially has no effect.
    pub adapter: Option<PathBuf>,
    /// The objective. Default: to generate the assistant's messages.
    pub objective: Objective,
    /// A DeepSpeed configuration. Its settings take precedence over these options, with two exceptions. A batch, a
    /// learning rate, a number of ranks along the pipeline, or a number of local steps or islands that contradicts
    /// these options is an error. The server of [`LocalStepsOptions`] replaces `local_steps.server`. Only this
    /// configuration determines stage and offload. Without a configuration, they are chosen from the available memory,
    /// except for an encoder, which is trained at stage 0.
    pub ds_config: Option<PathBuf>,
    /// The number of ranks along a pipeline, which divides the layers of the model among ranks. 1 means no pipeline.
    /// Default: the `pipeline` section of the DeepSpeed configuration; without a configuration, a pipeline is used on
    /// several hosts if the model does not fit into the memory of one host.
    pub pipeline: Option<PipelineStages>,
    /// Local steps. Default: the `local_steps` section of the DeepSpeed configuration; without a configuration, all
    /// ranks exchange their gradients in every step.
    pub local_steps: LocalStepsOptions,
    /// The precision of the model. Default: f32.
    pub precision: ModelPrecision,
    /// The length of training. Default: three epochs, or up to fifteen with few samples.
    pub length: TrainingLength,
    /// The peak learning rate. Default: for adapters, 2e-4 if the model's hidden size is 4096, proportionally more for
    /// a smaller one, up to 1e-3, and less for a larger one, and a tenth of that for preferences; 2e-5 for
    /// training all weights.
    pub lr: Option<f64>,
    /// The number of rows, or preference pairs, in a step, across all ranks. Default: 8 (or 4, 2 or 1 with little data,
    /// so that an epoch has 30 steps or more). The default is rounded up to a multiple of the number of rows that the
    /// ranks compute at the same time; any other number must be such a multiple. With very little data, rows
    /// also hold fewer samples than would fit.
    pub batch: Option<usize>,
    /// The number of rows that a rank computes at a time. Default: 1.
    pub micro_batch: usize,
    /// The number of tokens in a row. Default: 1024, or the model's context length if that is shorter.
    pub ctx: Option<usize>,
    /// The warm-up of the learning rate. Default: 3% of the steps.
    pub warmup: WarmupLength,
    /// The decay of the learning rate after the warm-up. Default: cosine.
    pub scheduler: LrDecay,
    /// Whether rows are shuffled by the seed, differently in each epoch, instead of following the order of the data.
    /// Default: true.
    pub shuffle: bool,
    /// Whether a row holds as many samples as fit, instead of one, if they are neither labelled nor in pairs. Default:
    /// true.
    pub packing: bool,
    /// The handling of samples that are longer than a row. Default: they are cut.
    pub overlong: Truncation,
    /// Whether a record that cannot be used is an error. Default: false; such records are skipped and counted.
    pub strict: bool,
    /// Whether a file is accepted even if more than a tenth of its records cannot be used. Default: false.
    pub allow_skipped: bool,
    /// The roles of columns whose names differ from the known ones.
    pub columns: ColumnMapping,
    /// The labels to predict, in the order of their indices. Default: all labels of the data, sorted.
    pub labels: Vec<String>,
    /// The validation data. Default: none.
    pub validation: Option<ValidationData>,
    /// The number of steps between validations. Default: a tenth of all steps.
    pub eval_every: Option<u64>,
    /// The number of validations without improvement after which training stops. Default: it does not stop early.
    pub patience: Option<u64>,
    /// The checkpoints. Default: none.
    pub saving: Option<CheckpointOptions>,
    /// Whether the run continues from a checkpoint that was saved with different settings. Default: false; the
    /// checkpoint is refused and the error lists the differences.
    pub resume_anyway: bool,
    /// The seed for the initial adapters, the order of the data, and dropout. Default: 42.
    pub seed: u64,
    /// Whether blocks are recomputed in the backward pass, so that their activations need not be kept. Default: with a
    /// DeepSpeed configuration, its section `activation_checkpointing` decides; otherwise, false for an encoder, and
    /// chosen from the available memory for other models.
    pub recompute: Option<bool>,
    /// The numbers of the blocks whose weights QLoRA does not hold in 4 bits. Default: none.
    pub keep_layers: Vec<usize>,
    /// The factor of the load-balancing loss of a mixture of experts in the loss that is trained on; 0 turns it off.
    /// Default: that of the model's `config.json`, if `output_router_logits` is set there, otherwise 0.
    pub router_aux_loss_coef: Option<f64>,
    /// The record of the run, for `zerorun runs`. Default: none.
    pub run: Option<RunSpec>,
    /// The folder for tokenized data. Default: `candle-zero/samples` in the user's cache.
    pub cache: Option<PathBuf>,
}

impl Options {
    /// Returns the default options.
    pub fn new(model: impl Into<PathBuf>, out: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            base_name: None,
            data: vec![],
            out: out.into(),
            method: TuningMethod::Lora(LoraConfig::default()),
            adapter: None,
            objective: Objective::Generate,
            ds_config: None,
            pipeline: None,
            local_steps: LocalStepsOptions::default(),
            precision: ModelPrecision::F32,
            length: TrainingLength::Auto,
            lr: None,
            batch: None,
            micro_batch: 1,
            ctx: None,
            warmup: WarmupLength::Fraction(0.03),
            scheduler: LrDecay::Cosine,
            shuffle: true,
            packing: true,
            overlong: Truncation::Truncate,
            strict: false,
            allow_skipped: false,
            columns: ColumnMapping::default(),
            labels: vec![],
            validation: None,
            eval_every: None,
            patience: None,
            saving: None,
            resume_anyway: false,
            seed: 42,
            recompute: None,
            keep_layers: vec![],
            router_aux_loss_coef: None,
            run: None,
            cache: None,
        }
    }

    /// Returns the peak learning rate for a model of this hidden size.
    pub(super) fn peak_lr(&self, hidden_size: usize) -> f64 {
        // A step of an Adam-like optimizer changes each element of an adapter by the same amount, which changes the
        // output of a wider model more.
        let by_width = 2e-4 * 4096.0 / hidden_size.max(1) as f64;
        let base_lr = if self.method == TuningMethod::Full { 2e-5 } else { by_width.min(1e-3) };
        let factor = if matches!(self.objective, Objective::Prefer { .. }) { 0.1 } else { 1.0 };
        self.lr.unwrap_or(base_lr * factor)
    }

    /// Returns the reason why a run with this objective cannot use a pipeline, or `None` if it can.
    pub(super) fn pipeline_obstacle(&self) -> Option<&'static str> {
        match self.objective {
            Objective::Generate => None,
            Objective::Classify => {
                Some("divides the layers of language models, not those of a classifier; train it without a pipeline")
            }
            Objective::Prefer { .. } => Some(
                "cannot be combined with --dpo, which also needs the output of the model without its adapters for each \
                 pair; leave out one of the two",
            ),
        }
    }

    /// Returns an error for options that do not describe a valid run.
    pub(crate) fn check(&self) -> Result<()> {
        let at_least_one = "a whole number of at least 1";
        let positive = |x: f64| x > 0.0 && x.is_finite();
        if self.data.is_empty() {
            return Err(refused("--data", "empty", "one file or more"));
        }
        match self.length {
            TrainingLength::Epochs(epochs) if !(positive(epochs) && epochs <= 1e6) => {
                return Err(refused("--epochs", epochs, "above 0 and at most 1000000"));
            }
            TrainingLength::Steps(0) => return Err(refused("--steps", 0, at_least_one)),
            _ => (),
        }
        if let Some(lr) = self.lr.filter(|lr| !positive(*lr)) {
            return Err(refused("--lr", lr, "a positive finite number"));
        }
        for (flag, value) in [("--batch", self.batch), ("--micro_batch", Some(self.micro_batch))] {
            if value == Some(0) {
                return Err(refused(flag, 0, at_least_one));
            }
            if let Some(rows) = value.filter(|rows| *rows > MAX_ROWS) {
                return Err(refused(flag, rows, format!("at most {MAX_ROWS}")));
            }
        }
        for (flag, value) in [("--eval_every", self.eval_every), ("--patience", self.patience)] {
            if value == Some(0) {
                return Err(refused(flag, 0, at_least_one));
            }
            if value.is_some() && self.validation.is_none() {
                return Err(option_use_error(flag, "requires validation; give --val FILE or --val 5%"));
            }
        }
        if let Some(ctx) = self.ctx.filter(|ctx| *ctx < 2) {
            return Err(refused("--ctx", ctx, "at least 2: one token, and another to predict from it"));
        }
        if let Some(ctx) = self.ctx.filter(|ctx| *ctx > MAX_CTX) {
            return Err(refused("--ctx", ctx, format!("at most {MAX_CTX}")));
        }
        match self.warmup {
            WarmupLength::Fraction(fraction) if !(0.0..=1.0).contains(&fraction) => {
                return Err(refused(
                    "--warmup",
                    fraction,
                    "a number of steps, or a percentage of all steps, such as 3%",
                ));
            }
            _ => (),
        }
        if self.adapter.is_some() && self.method == TuningMethod::Full {
            return Err(option_use_error("--adapter", "requires adapters; leave out --full"));
        }
        if let Some(ValidationData::Fraction(fraction)) = self.validation
            && !(fraction > 0.0 && fraction < 1.0)
        {
            return Err(refused(
                "--val",
                format!("{}%", fraction * 100.0),
                "a file, or more than 0% and less than 100%",
            ));
        }
        if let (Some(PipelineStages::Auto | PipelineStages::Number(2..)), Some(problem)) =
            (self.pipeline, self.pipeline_obstacle())
        {
            return Err(option_use_error("--pipeline", problem));
        }
        if !self.keep_layers.is_empty() && !matches!(self.method, TuningMethod::Qlora(_)) {
            return Err(option_use_error(
                "--keep_layers",
                "requires --qlora, because only QLoRA holds weights in 4 bits",
            ));
        }
        if let Some(factor) = self.router_aux_loss_coef.filter(|factor| !(*factor >= 0.0 && factor.is_finite())) {
            return Err(refused("--router_aux_loss_coef", factor, "a finite number of at least 0"));
        }
        if let Objective::Prefer { beta } = self.objective {
            if !positive(beta) {
                return Err(refused("--dpo", format!("beta={beta}"), "beta above 0, such as beta=0.1"));
            }
            if self.method == TuningMethod::Full {
                let problem = "requires adapters, because the model without them is the reference; leave out --full";
                return Err(option_use_error("--dpo", problem));
            }
        }
        Ok(())
    }
}

/// The limits on rows in a step and on tokens in a row, which no real run reaches.
const MAX_ROWS: usize = 1 << 24;
const MAX_CTX: usize = 1 << 27;

/// Returns the error for an option's value.
pub(crate) fn refused(flag: &'static str, found: impl fmt::Display, allowed: impl Into<String>) -> candle_zero::Error {
    FinetuneError::Option { flag, found: found.to_string(), allowed: allowed.into() }.into()
}

/// Returns the error for an option that does not fit the others.
pub(super) fn option_use_error(flag: &'static str, problem: impl Into<String>) -> candle_zero::Error {
    FinetuneError::OptionUse { flag, problem: problem.into() }.into()
}

/// Parses `5%` as a fraction.
fn percentage(text: &str) -> Option<f64> {
    Some(text.strip_suffix('%')?.trim().parse::<f64>().ok()? / 100.0)
}

/// Returns the percentage for a number written as a fraction, as other trainers accept it: 5% for 0.05.
fn fraction(text: &str) -> Option<String> {
    let part = text.trim().parse::<f64>().ok().filter(|part| *part > 0.0 && *part < 1.0)?;
    // The percentage is rounded to a millionth of a percent, because 0.07 * 100 is not exactly 7.
    Some(format!("{}%", (part * 1e8).round() / 1e6))
}

impl FromStr for WarmupLength {
    type Err = candle_zero::Error;

    /// Parses `100` or `3%`.
    fn from_str(text: &str) -> Result<Self> {
        let steps = || text.parse().ok().map(Self::Steps);
        let warmup = percentage(text).map(Self::Fraction).or_else(steps);
        warmup.ok_or_else(|| match fraction(text) {
            Some(percent) => {
                refused("--warmup", text, format!("a number of steps, or a percentage of all steps, such as {percent}"))
            }
            None => refused("--warmup", text, "a number of steps, or a percentage of all steps, such as 3%"),
        })
    }
}

impl FromStr for PipelineStages {
    type Err = candle_zero::Error;

    /// Parses `auto` or `2`.
    fn from_str(text: &str) -> Result<Self> {
        let number = || text.parse().ok().filter(|stages| *stages > 0).map(Self::Number);
        let stages = if text == "auto" { Some(Self::Auto) } else { number() };
        stages.ok_or_else(|| refused("--pipeline", text, "a number of ranks, at least 1, or auto for all ranks"))
    }
}

impl ValidationData {
    /// Parses the arguments of `--val`: files, or a percentage such as `5%`.
    ///
    /// # Errors
    /// A percentage together with other arguments; a fraction such as `0.05` instead of a percentage; a file with an
    /// invalid weight.
    pub fn parse<T: AsRef<str>>(arguments: &[T]) -> Result<Self> {
        if let [only] = arguments
            && let Some(fraction) = percentage(only.as_ref())
        {
            return Ok(Self::Fraction(fraction));
        }
        if let Some(part) = arguments.iter().find(|argument| percentage(argument.as_ref()).is_some()) {
            let problem =
                format!("has {} besides files; give either a part of the training data or files", part.as_ref());
            return Err(option_use_error("--val", problem));
        }
        let fraction_of = |text: &str| fraction(text).filter(|_| !Path::new(text).exists());
        if let Some((text, percent)) = arguments.iter().find_map(|text| Some((text, fraction_of(text.as_ref())?))) {
            let allowed = format!("files, or a part of the training data such as {percent}");
            return Err(refused("--val", text.as_ref(), allowed));
        }
        Ok(Self::Files(arguments.iter().map(|file| Source::parse(file.as_ref())).collect::<Result<_>>()?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn with_data() -> Options {
        Options { data: vec![Source::parse("a.jsonl").unwrap()], ..Options::new("m", "o") }
    }

    #[test]
    fn shares_are_read_as_parts_and_files_as_files() {
        assert_eq!(ValidationData::parse(&["5%"]).unwrap(), ValidationData::Fraction(0.05));
        assert!(
            matches!(ValidationData::parse(&["a.jsonl", "b.csv"]).unwrap(), ValidationData::Files(files) if files.len() == 2)
        );
        assert_eq!("3%".parse::<WarmupLength>().unwrap(), WarmupLength::Fraction(0.03));
        assert_eq!("12".parse::<WarmupLength>().unwrap(), WarmupLength::Steps(12));
    }

    #[test]
    fn a_fraction_is_refused_with_its_percentage() {
        insta::assert_snapshot!(ValidationData::parse(&["0.05"]).unwrap_err(), @"--val is 0.05, but must be files, or a part of the training data such as 5%");
        insta::assert_snapshot!(ValidationData::parse(&["a.jsonl", ".07"]).unwrap_err(), @"--val is .07, but must be files, or a part of the training data such as 7%");
        insta::assert_snapshot!("0.03".parse::<WarmupLength>().unwrap_err(), @"--warmup is 0.03, but must be a number of steps, or a percentage of all steps, such as 3%");
        insta::assert_snapshot!("x".parse::<WarmupLength>().unwrap_err(), @"--warmup is x, but must be a number of steps, or a percentage of all steps, such as 3%");
    }

    #[test]
    fn values_that_make_no_run_are_refused_by_flag() {
        let text = |options: Options| options.check().unwrap_err().to_string();
        with_data().check().unwrap();
        insta::assert_snapshot!(text(Options::new("m", "o")), @"--data is empty, but must be one file or more");
        insta::assert_snapshot!(text(Options { length: TrainingLength::Steps(0), ..with_data() }), @"--steps is 0, but must be a whole number of at least 1");
        insta::assert_snapshot!(text(Options { length: TrainingLength::Epochs(-1.0), ..with_data() }), @"--epochs is -1, but must be above 0 and at most 1000000");
        insta::assert_snapshot!(text(Options { lr: Some(f64::NAN), ..with_data() }), @"--lr is NaN, but must be a positive finite number");
        insta::assert_snapshot!(text(Options { batch: Some(0), ..with_data() }), @"--batch is 0, but must be a whole number of at least 1");
        insta::assert_snapshot!(text(Options { ctx: Some(1), ..with_data() }), @"--ctx is 1, but must be at least 2: one token, and another to predict from it");
        insta::assert_snapshot!(text(Options { patience: Some(3), ..with_data() }), @"--patience requires validation; give --val FILE or --val 5%");
        insta::assert_snapshot!(text(Options { warmup: WarmupLength::Fraction(2.0), ..with_data() }), @"--warmup is 2, but must be a number of steps, or a percentage of all steps, such as 3%");
        insta::assert_snapshot!(text(Options { validation: Some(ValidationData::Fraction(1.0)), ..with_data() }), @"--val is 100%, but must be a file, or more than 0% and less than 100%");
        insta::assert_snapshot!(text(Options { adapter: Some("a".into()), method: TuningMethod::Full, ..with_data() }), @"--adapter requires adapters; leave out --full");
        let dpo = Objective::Prefer { beta: 0.1 };
        insta::assert_snapshot!(text(Options { objective: dpo, method: TuningMethod::Full, ..with_data() }), @"--dpo requires adapters, because the model without them is the reference; leave out --full");
        let dpo = Objective::Prefer { beta: 0.0 };
        insta::assert_snapshot!(text(Options { objective: dpo, ..with_data() }), @"--dpo is beta=0, but must be beta above 0, such as beta=0.1");
        let divided = |objective| Options { objective, pipeline: Some(PipelineStages::Auto), ..with_data() };
        insta::assert_snapshot!(text(divided(Objective::Prefer { beta: 0.1 })), @"--pipeline cannot be combined with --dpo, which also needs the output of the model without its adapters for each pair; leave out one of the two");
        insta::assert_snapshot!(text(divided(Objective::Classify)), @"--pipeline divides the layers of language models, not those of a classifier; train it without a pipeline");
        insta::assert_snapshot!("0".parse::<PipelineStages>().unwrap_err(), @"--pipeline is 0, but must be a number of ranks, at least 1, or auto for all ranks");
        insta::assert_snapshot!("x".parse::<WarmupLength>().unwrap_err(), @"--warmup is x, but must be a number of steps, or a percentage of all steps, such as 3%");
        insta::assert_snapshot!(ValidationData::parse(&["5%", "a.jsonl"]).unwrap_err(), @"--val has 5% besides files; give either a part of the training data or files");
    }
}
