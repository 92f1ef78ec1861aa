//! Derives the engine's configuration, batches and steps from the prepared inputs and the number of ranks.

use super::auto_offload::{ChosenConfig, RunTopology, choose_config};
use super::batch_size::{BatchSizing, epochs_for};
use super::engine_config::{self, DataParallelDegree};
use super::learning_rate::LearningRates;
use super::memory_fit::memory_of_rank;
use super::options::{LrDecay, Objective, Options, TrainingLength};
use super::pipeline_fit::{PipelineShape, requested_stages};
use super::prepare::{PreparedRun, StartModel};
use super::run_identity::{RunIdentity, SavedRun, fingerprint};
use crate::data::batches::{Batches, RowOrder, SequencePacking};
#[cfg(doc)]
use crate::error::FinetuneError;
use crate::error::Result;
use candle_zero::comm::Communicator;
use candle_zero::config::Config;
use candle_zero::data::BatchPartition;
use candle_zero::json_leaves::json_leaves;
use candle_zero::nn::{LoraConfig, LoraTargets};
use candle_zero::util::counted;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The plan of a run on a given number of ranks.
pub(super) struct RunPlan {
    /// The configuration, resolved for the parts into which the data is divided.
    pub config: Config,
    pub rates: LearningRates,
    /// The ranks along the pipeline, if there is one.
    pub pipeline: Option<PipelineShape>,
    /// The batches of rank 0. [`Batches::of_rank`] returns those of the others.
    pub training: Batches,
    pub validation: Option<Batches>,
    /// The number of parts into which the validation data is divided.
    pub validation_parts: usize,
    /// The number of hosts, which is the number of islands by default.
    pub hosts: usize,
    /// The number of steps of the run.
    pub total: u64,
    /// The number of tokens in a row, if rows are made shorter so that an epoch has more steps.
    pub shortened_row_tokens: Option<usize>,
    /// The chosen stage and offload and the reason, if there was a choice.
    pub config_explanation: Option<String>,
}

impl RunPlan {
    /// Creates the plan of a rank that may use `memory` bytes. If the run continues from a checkpoint, `remembered` is
    /// the number of rows per step, as recorded in the checkpoint.
    ///
    /// # Errors
    /// A configuration that cannot be used or that contradicts the options; too little memory, if there is no
    /// configuration.
    pub fn new(prepared: &PreparedRun, memory: u64, ranks: RunTopology, remembered: Option<usize>) -> Result<Self> {
        let options = &prepared.options;
        let order = options.shuffle.then_some(options.seed).map_or(RowOrder::Sequential, RowOrder::Shuffled);
        let mut config = engine_config::read(options)?;
        let stages = requested_stages(options, &mut config, ranks.world)?;
        let all_ranks = engine_config::ranks_of_all_islands(&config, ranks.world);
        let parts = DataParallelDegree { count: all_ranks / stages.unwrap_or(1), are_pipelines: stages.is_some() };
        let unit = parts.count.max(1).saturating_mul(options.micro_batch.max(1));
        let default_packing = prepared.packing();
        let sizing = BatchSizing::new(&prepared.training, default_packing, order, unit, remembered);
        let (config, uses_sizing) =
            engine_config::complete_config(config, options, parts, sizing.rows, prepared.hidden_size())?;
        let ChosenConfig { config, pipeline, explanation } = choose_config(prepared, config, memory, (ranks, stages))?;
        let pipeline_ranks = pipeline.map_or(1, |pipeline| pipeline.ranks);
        let own_parts = ranks.world / pipeline_ranks;
        // The configuration itself counts the ranks of other islands.
        let resolve =
            |warmup, steps| engine_config::resolve(&config, options, own_parts, prepared.hidden_size(), warmup, steps);
        let shape = BatchPartition::new(&resolve(1, 2)?.batch, all_ranks / pipeline_ranks, 0);
        let (packing, pad) = (if uses_sizing { sizing.packing } else { default_packing }, prepared.pad());
        let data = prepared.training.clone();
        let training = match options.shuffle {
            true => Batches::training(data, packing, shape, options.seed, pad),
            false => Batches::in_order(data, packing, shape, pad),
        };
        let total = match options.length {
            TrainingLength::Steps(steps) => steps,
            TrainingLength::Epochs(epochs) => training.steps(epochs),
            TrainingLength::Auto => training.steps(epochs_for(prepared.training.len() / prepared.training.group())),
        };
        let rates =
            LearningRates::new(options.peak_lr(prepared.hidden_size()), options.warmup, total, options.scheduler);
        let config = resolve(rates.warmup(), total)?;
        // A validation does not accumulate gradients. An island that is a separate job validates on all of the data.
        let shape = BatchPartition { accumulation: 1, world: own_parts, ..shape };
        let validation = prepared.validation.clone();
        let validation = validation.map(|data| Batches::validation(data, default_packing, shape, pad));
        let shortened_row_tokens = match packing {
            SequencePacking::Packed { .. } if packing != default_packing => Some(training.longest_row()),
            _ => None,
        };
        Ok(Self {
            config,
            rates,
            pipeline,
            training,
            validation,
            validation_parts: own_parts,
            hosts: ranks.world / ranks.per_host,
            total,
            shortened_row_tokens,
            config_explanation: explanation,
        })
    }

    /// Returns the identity of the run, for its checkpoints. Reads all weights of the base.
    ///
    /// # Errors
    /// Weights that cannot be read or are not finite.
    pub fn identity(&self, prepared: &PreparedRun) -> Result<RunIdentity> {
        let (values, parameters) = match &prepared.start {
            StartModel::Decoder { base, .. } => (base.values(), base.config().parameters()?),
            StartModel::Classifier { base, .. } => (base.values(), base.config().parameters()?),
        };
        let mut settings = self.settings(prepared);
        settings.insert("base's weights".into(), hex(fingerprint(&*values, &parameters)?));
        Ok(RunIdentity::new(settings))
    }

    /// Returns the settings that determine the result, by name, with fingerprints of inputs that are too large to
    /// store.
    pub fn settings(&self, prepared: &PreparedRun) -> BTreeMap<String, Value> {
        let options = &prepared.options;
        let mut settings = BTreeMap::new();
        let mut set = |name: &str, value: Value| _ = settings.insert(name.to_owned(), value);
        set("tokenizer", hex(prepared.tokenizer.fingerprint()));
        set("chat template", prepared.template.as_ref().map_or(Value::Null, |template| hex(template.fingerprint())));
        set("method", json!(options.method.name()));
        if let Some(LoraConfig { r, alpha, dropout, targets, target_parameters, rslora, dora }) = options.method.lora()
        {
            set("r", json!(r));
            set("alpha", json!(alpha));
            set("dropout", json!(dropout));
            let targets = match targets {
                LoraTargets::AllLinear => "all-linear".to_owned(),
                LoraTargets::Names(names) => {
                    let mut names = names.clone();
                    names.sort_unstable();
                    names.join("+")
                }
            };
            set("targets", json!(targets));
            if !target_parameters.is_empty() {
                let mut names = target_parameters.clone();
                names.sort_unstable();
                set("target_parameters", json!(names.join("+")));
            }
            set("rslora", json!(rslora));
            set("dora", json!(dora));
        }
        if !options.keep_layers.is_empty() {
            let mut blocks = options.keep_layers.clone();
            blocks.sort_unstable();
            blocks.dedup();
            set("keep_layers", json!(blocks));
        }
        if let StartModel::Decoder { config, .. } = &prepared.start
            && let Some(factor) = config.mixture.as_ref().and_then(|mixture| mixture.balance_coefficient)
        {
            set("router_aux_loss_coef", json!(factor));
        }
        set("adapter that it began with", prepared.adapter.map_or(Value::Null, hex));
        set(
            "objective",
            match options.objective {
                Objective::Generate => json!("generate"),
                Objective::Prefer { beta } => json!(format!("prefer, beta {beta}")),
                Objective::Classify => json!("classify"),
            },
        );
        set("data", hex(prepared.training.content_fingerprint()));
        if !prepared.training.labels().is_empty() {
            set("labels", json!(prepared.training.labels()));
        }
        set("ctx", json!(prepared.ctx()));
        if let Some(tokens) = self.shortened_row_tokens {
            set("tokens of a row", json!(tokens));
        }
        set("packing", json!(options.packing));
        set("order", json!(if options.shuffle { "shuffled" } else { "sequential" }));
        set("seed", json!(options.seed));
        settings.extend(config_settings(self));
        if self.config.local_steps.is_some() && self.validation.is_some() {
            // Islands exchange everything before a validation.
            settings.insert("local_steps.eval_every".into(), json!(eval_every(options, self.total)));
        }
        settings
    }
}

/// Returns the settings of the engine's configuration and the learning rate.
fn config_settings(plan: &RunPlan) -> BTreeMap<String, Value> {
    const SECTIONS: [&str; 13] = [
        "optimizer",
        "scheduler",
        "gradient_clipping",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "prescale_gradients",
        "communication_data_type",
        "data_types",
        "fp16",
        "bf16",
        "torch_autocast",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
    ];
    let printed = plan.config.to_deepspeed_json();
    let mut settings = BTreeMap::new();
    for section in SECTIONS {
        let value = section.split('.').fold(&printed, |value, key| &value[key]);
        json_leaves(section, value, &mut |name, leaf| _ = settings.insert(name, leaf.clone()));
    }
    // The setting has the name of its flag.
    if let Some(lr) = settings.remove("optimizer.params.lr") {
        settings.insert("lr".into(), lr);
    }
    settings.insert("batch".into(), json!(plan.config.batch.train_batch_size));
    let delayed = plan.config.zero.offload_optimizer.as_ref().and_then(|offload| offload.delayed_update_after);
    settings.insert("delayed_update_after".into(), json!(delayed));
    if let Some(local_steps) = &plan.config.local_steps {
        let wire = format!("{:?}", local_steps.wire).to_lowercase();
        for (name, value) in [
            ("steps", json!(local_steps.steps)),
            ("islands", json!(local_steps.islands.unwrap_or(plan.hosts))),
            ("outer_lr", json!(local_steps.outer_lr)),
            ("outer_momentum", json!(local_steps.outer_momentum)),
            ("nesterov", json!(local_steps.nesterov)),
            ("fragments", json!(local_steps.fragments)),
            ("fragment_delay", json!(local_steps.fragment_delay)),
            ("fragment_alpha", json!(local_steps.fragment_alpha)),
            ("wire_dtype", json!(wire)),
        ] {
            settings.insert(format!("local_steps.{name}"), value);
        }
    }
    // A DeepSpeed scheduler specifies its steps in its own settings.
    if plan.config.scheduler.is_none() {
        let (shape, warmup) = (plan.rates.shape(), plan.rates.warmup());
        settings.insert("warmup".into(), json!(counted(warmup, "step")));
        settings.insert("rate".into(), json!(format!("{shape:?}").to_lowercase()));
        // With a constant rate, a longer run begins with exactly the steps of a shorter one.
        if shape != LrDecay::Constant {
            settings.insert("steps".into(), json!(plan.total));
        }
    }
    settings.retain(|_, value| !value.is_null() && !value.is_object());
    settings
}

fn hex(number: u64) -> Value {
    json!(format!("{number:016x}"))
}

/// Returns the number of steps between two validations of a run of `total` steps.
pub(super) fn eval_every(options: &Options, total: u64) -> u64 {
    options.eval_every.unwrap_or(total.div_ceil(10)).max(1)
}

/// Returns the number of rows per step, as recorded in the newest checkpoint on rank 0, if the run continues from one.
/// Collective.
pub(super) fn remembered_batch(prepared: &PreparedRun, comm: &dyn Communicator) -> Result<Option<usize>> {
    let recorded = if comm.rank() == 0 { prepared.saved().and_then(|saved| saved.batch()).unwrap_or(0) } else { 0 };
    let recorded = comm.gather_f64(vec![recorded as f64]).wait()?;
    let first = recorded.first().and_then(|values| values.first()).copied().unwrap_or(0.0);
    Ok(Some(first as usize).filter(|rows| *rows > 0))
}

impl PreparedRun {
    /// Checks, before any rank is started, that a run on `world` ranks, of which `per_host` are on each host, can be
    /// planned and, if requested, may continue from its newest checkpoint.
    ///
    /// # Errors
    /// A configuration that cannot be used or that contradicts the options; too little memory, if there is no
    /// configuration; [`FinetuneError::OtherRun`], [`FinetuneError::CheckpointBeyondEnd`]; folders and files in the
    /// configuration that conflict with others; a disk without room for the result.
    pub fn check_for(&self, world: usize, per_host: usize) -> Result<()> {
        let saved = self.saved();
        let remembered = saved.as_ref().and_then(SavedRun::batch);
        let ranks = RunTopology { world, per_host, network: None };
        let plan = RunPlan::new(self, memory_of_rank(per_host).unwrap_or(u64::MAX), ranks, remembered)?;
        self.options.outputs_with(&plan.config).check()?;
        self.check_room()?;
        match saved {
            // Rank 0 reports any remarks when it resumes.
            Some(saved) => saved.check(&plan.identity(self)?, plan.total, self.options.resume_anyway).map(drop),
            None => Ok(()),
        }
    }
}
