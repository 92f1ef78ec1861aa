//! The flags of `zerorun finetune`, and their conversion to options.

use crate::error::Result;
use crate::island_flags::{ISLANDS, IslandFlags};
use crate::tools::dataset_flags::DatasetFlags;
use crate::tools::resolve_model::{HELP, ResolvedModel};
use candle_zero::nn::LoraConfig;
use candle_zero_finetune::{
    CheckpointOptions, LocalStepsOptions, LrDecay, ModelPrecision, Objective, Options, PipelineStages, Source,
    TrainingLength, TuningMethod, ValidationData, WarmupLength,
};
use clap::{Args, ValueEnum, value_parser};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

/// The flags for model, data and training.
#[derive(Debug, Args)]
pub(super) struct FinetuneFlags {
    #[arg(value_name = "MODEL", help = HELP)]
    pub(super) model: PathBuf,

    /// Training data: files, each optionally followed by a colon and a weight
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<String>,

    /// Output folder; must be absent or empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Task: text generation, or text classification (encoders and language models)
    #[arg(long, value_enum, default_value_t)]
    task: FinetuneTaskArg,

    /// Adapter settings: r, alpha, dropout, targets (all-linear, or names joined by +), target_parameters (of experts,
    /// joined by +), rslora, dora [default: r=16,alpha=32,targets=all-linear]
    #[arg(long, value_name = "SETTINGS", conflicts_with = "full")]
    lora: Option<LoraConfig>,

    /// Continue training this adapter, a folder in PEFT format, with its settings
    #[arg(long, value_name = "DIR", conflicts_with_all = ["full", "lora"])]
    adapter: Option<PathBuf>,

    /// Train adapters on top of NF4 weights
    #[arg(long, conflicts_with = "full")]
    qlora: bool,

    /// With --qlora, layers (counted from 0) whose weights are not quantized to 4 bits
    #[arg(long = "keep_layers", alias = "keep-layers", value_name = "N,N", value_delimiter = ',', requires = "qlora")]
    keep_layers: Vec<usize>,

    /// Train all weights [default with --task classify]
    #[arg(long)]
    full: bool,

    /// Factor of the load-balancing loss of a mixture of experts; 0 turns it off [default: that of config.json if
    /// output_router_logits is set there, otherwise 0]
    #[arg(long = "router_aux_loss_coef", aliases = ["router-aux-loss-coef", "aux_loss_coef"], value_name = "X")]
    router_aux_loss_coef: Option<f64>,

    /// Train on preferences (chosen and rejected answers), with the model without adapters as the reference
    #[arg(long, value_name = "beta=B", value_parser = beta)]
    dpo: Option<f64>,

    /// DeepSpeed configuration [default: stage and offload are chosen from the available memory]
    #[arg(long = "ds_config", aliases = ["deepspeed_config", "ds-config"], value_name = "FILE")]
    ds_config: Option<PathBuf>,

    /// Divide the model's layers among this many ranks, which form a pipeline; auto: all ranks. If the job has more
    /// ranks, they form several pipelines. 1: no pipeline [default: as in the configuration's pipeline section; without
    /// a configuration, a pipeline only if there are several hosts and one host cannot hold the model]
    #[arg(long, value_name = "RANKS|auto")]
    pipeline: Option<PipelineStages>,

    /// Local steps: islands of ranks train independently for this many steps, and then exchange the changes in their
    /// weights [default: as in the configuration's local_steps section; 100 with --islands or --island_server]
    #[arg(long = "local_steps", alias = "local-steps", value_name = "H", value_parser = value_parser!(u64).range(1..),
          help_heading = ISLANDS)]
    local_steps: Option<u64>,

    /// With local steps: the number of islands, each with the same number of ranks; with --island_server, the number of
    /// slots for islands [default: one island per host]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..), help_heading = ISLANDS)]
    islands: Option<u16>,

    #[command(flatten)]
    pub(super) island: IslandFlags,

    /// Number format of the model during training
    #[arg(long, value_enum, default_value_t)]
    dtype: FinetuneDtype,

    /// Number of optimizer steps
    #[arg(long, value_name = "N", conflicts_with = "epochs")]
    steps: Option<u64>,

    /// Number of epochs [default: 3, or up to 15 with fewer than 400 samples]
    #[arg(long, value_name = "E")]
    epochs: Option<f64>,

    /// Peak learning rate [default: for adapters 2e-4 at a hidden size of 4096, proportionally more for a smaller one,
    /// up to 1e-3, and less for a larger one; with --dpo, a tenth of that; 2e-5 with --full]
    #[arg(long, value_name = "RATE")]
    lr: Option<f64>,

    /// Rows per step, over all ranks [default: 8, or, with little data, 4, 2 or 1, so that an epoch has at least 30
    /// steps]
    #[arg(long, value_name = "ROWS")]
    batch: Option<usize>,

    /// Micro batch: rows per rank and forward pass
    #[arg(long = "micro_batch", alias = "micro-batch", value_name = "ROWS", default_value = "1")]
    micro_batch: usize,

    #[command(flatten)]
    samples: DatasetFlags,

    /// Continue even if more than a tenth of a file's records cannot be used
    #[arg(long = "allow_skipped", alias = "allow-skipped", conflicts_with = "strict")]
    allow_skipped: bool,

    /// Warm-up steps of the learning rate, or a percentage of all steps
    #[arg(long, value_name = "N|P%", default_value = "3%")]
    warmup: WarmupLength,

    /// Learning rate schedule after the warm-up
    #[arg(long, value_enum, default_value_t)]
    scheduler: SchedulerFlag,

    /// Order of the rows
    #[arg(long, value_enum, default_value_t)]
    order: OrderFlag,

    /// Pack as many samples into a row as fit
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    packing: bool,

    /// Validation data: files, or a percentage of the training data, such as 5%
    #[arg(long, value_name = "FILE|P%", num_args = 1..)]
    val: Vec<String>,

    /// Steps between validations [default: a tenth of all steps]
    #[arg(long = "eval_every", alias = "eval-every", value_name = "N")]
    eval_every: Option<u64>,

    /// Early stopping: end after N validations without improvement
    #[arg(long, value_name = "N")]
    patience: Option<u64>,

    /// Checkpoint folder; a checkpoint is saved at the end, and on SIGTERM, SIGINT or SIGHUP, which end the training
    #[arg(long, value_name = "DIR")]
    pub(super) save: Option<PathBuf>,

    /// Also save a checkpoint every N steps, in the background
    #[arg(long = "save_every", alias = "save-every", value_name = "N", requires = "save",
          value_parser = value_parser!(u64).range(1..))]
    save_every: Option<u64>,

    /// Number of newest checkpoints to keep, or all [default: 2 for adapters, otherwise all]
    #[arg(long, value_name = "K|all", requires = "save")]
    keep: Option<KeepCheckpoints>,

    /// Resume from the newest checkpoint in the folder of --save, or start from the beginning if there is none
    #[arg(long, requires = "save")]
    pub(super) resume: bool,

    /// Resume even if settings differ from those of the checkpoint, and report the differences
    #[arg(long = "resume_anyway", alias = "resume-anyway", requires = "resume")]
    resume_anyway: bool,

    /// Seed for adapter initialization, row order and dropout
    #[arg(long, default_value_t = 42)]
    seed: u64,

    /// Write one JSON line per step to this file; steps are counted from 0
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) metrics: Option<PathBuf>,

    /// Answer this prompt at the end and after each validation; repeatable
    #[arg(long, value_name = "TEXT")]
    pub(super) prompt: Vec<String>,

    /// Maximum number of tokens in an answer to --prompt
    #[arg(long = "max_tokens", alias = "max-tokens", value_name = "N", default_value = "64", requires = "prompt")]
    pub(super) max_tokens: usize,

    /// Recompute each block in the backward pass instead of keeping its activations
    #[arg(long = "activation_checkpointing", alias = "activation-checkpointing")]
    activation_checkpointing: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum FinetuneDtype {
    #[default]
    F32,
    Bf16,
    #[value(alias = "f16")]
    Fp16,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum FinetuneTaskArg {
    #[default]
    Generate,
    Classify,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum SchedulerFlag {
    #[default]
    Cosine,
    Linear,
    Constant,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, ValueEnum)]
enum OrderFlag {
    #[default]
    Shuffled,
    Sequential,
}

/// The number of checkpoints to keep.
#[derive(Debug, Clone, Copy)]
enum KeepCheckpoints {
    Newest(NonZeroUsize),
    All,
}

/// The default number of newest checkpoints that a run keeps if it trains an adapter: the newest one, and another
/// in case the newest cannot be read. Each checkpoint contains the optimizer state, so it is three times as large as
/// the adapter.
const DEFAULT_KEPT_CHECKPOINTS: usize = 2;

impl FromStr for KeepCheckpoints {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            _ => text.parse().map(Self::Newest).map_err(|_| "give a whole number of at least 1, or all".into()),
        }
    }
}

/// Parses `beta=0.1` or `0.1`.
fn beta(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_prefix("beta=").unwrap_or(text);
    number.parse().map_err(|_| "give beta and a number, such as beta=0.1".to_string())
}

impl FinetuneFlags {
    /// Checks that the flags do not conflict. The error describes the conflict.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        if self.full && self.dpo.is_some() {
            return Err("--dpo needs adapters: the model without them is the reference; leave out --full".into());
        }
        if self.task == FinetuneTaskArg::Classify && self.dpo.is_some() {
            return Err("--dpo is for text generation; leave out --dpo or --task classify".into());
        }
        let is_divided = self.pipeline.is_some_and(|stages| stages != PipelineStages::Number(1));
        if is_divided && !self.prompt.is_empty() {
            return Err(
                "--prompt is not supported in a pipeline, whose ranks have only parts of the model; leave out \
                        --prompt or --pipeline, and use zerorun generate with the result"
                    .into(),
            );
        }
        if self.task == FinetuneTaskArg::Classify && !self.prompt.is_empty() {
            return Err("--prompt is for text generation: a classifier does not answer prompts".into());
        }
        Ok(())
    }

    /// Returns the conflict of `--max_restarts` with the other flags, if any.
    pub(super) fn restarts_conflict(&self, restarts: u32) -> Option<String> {
        (restarts > 0 && self.island.island_server.is_some() && !self.resume).then(|| {
            "with --island_server, --max_restarts needs --save DIR and --resume, because only with them does a restarted \
             island know which files in its result folders are its own; give both, or leave --max_restarts out"
                .to_owned()
        })
    }

    /// Returns the name of the run's record if the user gives none: that of the model.
    pub(super) fn run_name(&self) -> String {
        let name = self.model.file_name().unwrap_or(self.model.as_os_str()).to_string_lossy().into_owned();
        name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
    }

    /// Returns the options of the run, with the resolved model.
    pub(super) fn options(&self, model: ResolvedModel) -> Result<Options> {
        let lora = || self.lora.clone().unwrap_or_default();
        let classify = self.task == FinetuneTaskArg::Classify;
        let has_adapter = self.qlora || self.lora.is_some() || self.adapter.is_some();
        let full = self.full || classify && !has_adapter;
        let sources = |files: &[String]| files.iter().map(|file| Source::parse(file)).collect::<Result<Vec<_>>>();
        Ok(Options {
            data: sources(&self.data)?,
            method: match (full, self.qlora) {
                (true, _) => TuningMethod::Full,
                (false, true) => TuningMethod::Qlora(lora()),
                (false, false) => TuningMethod::Lora(lora()),
            },
            adapter: self.adapter.clone(),
            objective: match self.dpo {
                Some(beta) => Objective::Prefer { beta },
                None if classify => Objective::Classify,
                None => Objective::Generate,
            },
            ds_config: self.ds_config.clone(),
            pipeline: self.pipeline,
            local_steps: LocalStepsOptions {
                steps: self.local_steps,
                islands: self.islands.map(usize::from),
                server: self.island.island_server.clone(),
            },
            precision: match self.dtype {
                FinetuneDtype::F32 => ModelPrecision::F32,
                FinetuneDtype::Bf16 => ModelPrecision::Bf16,
                FinetuneDtype::Fp16 => ModelPrecision::F16,
            },
            length: match (self.steps, self.epochs) {
                (Some(steps), _) => TrainingLength::Steps(steps),
                (None, epochs) => epochs.map_or(TrainingLength::Auto, TrainingLength::Epochs),
            },
            lr: self.lr,
            batch: self.batch,
            micro_batch: self.micro_batch,
            ctx: self.samples.ctx(),
            warmup: self.warmup,
            scheduler: match self.scheduler {
                SchedulerFlag::Cosine => LrDecay::Cosine,
                SchedulerFlag::Linear => LrDecay::Linear,
                SchedulerFlag::Constant => LrDecay::Constant,
            },
            shuffle: self.order == OrderFlag::Shuffled,
            packing: self.packing,
            overlong: self.samples.overlong(),
            strict: self.samples.strict,
            allow_skipped: self.allow_skipped,
            columns: self.samples.columns.clone().unwrap_or_default(),
            labels: self.samples.labels.clone(),
            validation: (!self.val.is_empty()).then(|| ValidationData::parse(&self.val)).transpose()?,
            eval_every: self.eval_every,
            patience: self.patience,
            saving: self.save.clone().map(|dir| CheckpointOptions {
                dir,
                every: self.save_every,
                keep: match self.keep {
                    Some(KeepCheckpoints::Newest(number)) => Some(number.get()),
                    Some(KeepCheckpoints::All) => None,
                    None => (!full).then_some(DEFAULT_KEPT_CHECKPOINTS),
                },
                resume: self.resume,
            }),
            resume_anyway: self.resume_anyway,
            seed: self.seed,
            recompute: self.activation_checkpointing.then_some(true),
            keep_layers: self.keep_layers.clone(),
            router_aux_loss_coef: self.router_aux_loss_coef,
            cache: self.samples.cache.clone(),
            base_name: model.repository.map(|repository| repository.name().to_owned()),
            ..Options::new(model.path, &self.out)
        })
    }
}
