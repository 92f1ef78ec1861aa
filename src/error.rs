//! The one error type. Every message names what was found, where, what is allowed, and the mend.

pub use crate::kernels::error::KernelError;

use crate::config::{ConfigProblem, Listed, Place};
use std::path::PathBuf;
use std::sync::Arc;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything a user can meet, in groups. Broken invariants are assertions, not values of this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- files -------------------------------------------------------------------------------
    /// A file or folder could not be read, written or created.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb ("read", "create", ...).
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The port for Prometheus cannot be listened on.
    #[error(
        "cannot serve metrics for Prometheus on port {port} of 127.0.0.1: {source}. Give another port, or 0 for a free \
         one."
    )]
    PrometheusPort {
        /// The port that was asked for.
        port: u16,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The timeline of a job cannot be written.
    #[error("cannot write the timeline {}: {problem}", path.display())]
    Timeline {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the mend.
        problem: String,
    },

    // ---- tuning ------------------------------------------------------------------------------
    /// A search for settings that cannot begin as it is asked for.
    #[error("autotuning.{key} is {found}, but must be {allowed}")]
    TuneSetting {
        /// The key.
        key: String,
        /// What it is.
        found: String,
        /// What it may be.
        allowed: String,
    },
    /// A script whose settings cannot be searched for.
    #[error("cannot tune: {problem}.")]
    TuneScript {
        /// What was found, and the mend.
        problem: String,
    },

    // ---- checkpoints -------------------------------------------------------------------------
    /// A checkpoint that cannot be written, read or used. Nothing has changed: neither the engine nor other
    /// checkpoints.
    #[error("the checkpoint {} cannot be used: {problem}.", path.display())]
    Checkpoint {
        /// The folder or file.
        path: PathBuf,
        /// What was found, what is allowed, and the mend.
        problem: String,
    },

    // ---- checkpoints of DeepSpeed ------------------------------------------------------------
    /// A checkpoint that DeepSpeed wrote cannot be read.
    #[error("cannot read the DeepSpeed checkpoint {}: {problem}.", path.display())]
    DeepSpeedCheckpoint {
        /// The folder, or the file in it.
        path: PathBuf,
        /// What is wrong with it, what is allowed, and the mend.
        problem: String,
    },

    // ---- offload -----------------------------------------------------------------------------
    /// `nvme_path` is no folder that state can be offloaded to.
    #[error("cannot offload to {}: {problem}.", path.display())]
    OffloadFolder {
        /// `nvme_path`.
        path: PathBuf,
        /// What is wrong with it, and the mend.
        problem: String,
    },
    /// Another job offloads to the same folder.
    #[error(
        "cannot offload to {}: a job that is running uses it already{}. Give each job a folder of its own as nvme_path, \
         or stop the other one.",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    OffloadBusy {
        /// `nvme_path`.
        path: PathBuf,
        /// The process that locked it, where the system says.
        owner: Option<u32>,
    },
    /// The disk cannot hold what is to be offloaded.
    #[error(
        "cannot offload to {}: files there need {needed} bytes, and {available} are there: {} bytes are missing. \
         Free that space, or name a folder on a larger disk as nvme_path.",
        path.display(),
        needed.saturating_sub(*available)
    )]
    OffloadSpace {
        /// `nvme_path`.
        path: PathBuf,
        /// Bytes of all files on that disk, of all ranks; after the first step, of this rank.
        needed: u64,
        /// Bytes that the file system can give to them, those included that they have.
        available: u64,
    },
    /// A file of offloaded state could not be read, written or made larger.
    #[error("cannot {action} the file of {what} in {}: {source}. {}", path.display(), mend_of(source))]
    OffloadIo {
        /// What was attempted, as a verb.
        action: &'static str,
        /// What the file holds.
        what: &'static str,
        /// `nvme_path`.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A thread for file access could not be started.
    #[error("cannot start a thread for file access: {0}. Lower aio.queue_depth or aio.intra_op_parallelism.")]
    OffloadThread(std::io::Error),

    // ---- configuration -----------------------------------------------------------------------
    /// The configuration file could not be read.
    #[error(
        "cannot read the configuration {}: {source}. Give the path of a DeepSpeed JSON file, or JSON text that starts \
         with `{{`.",
        path.display()
    )]
    ConfigFile {
        /// The path that was tried.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The text of a configuration is no JSON (comments and trailing commas are allowed, as in DeepSpeed).
    #[error("{origin}: {place}: expected {expected}, found {found}.")]
    ConfigSyntax {
        /// The file, or "the configuration text".
        origin: String,
        /// Where.
        place: Place,
        /// What may stand there.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A key stands twice in one object.
    #[error("{origin}: duplicate key: `{path}` is given twice: {first} and {second}. Remove one of them.")]
    ConfigDuplicateKey {
        /// The file, or "the configuration text".
        origin: String,
        /// Path of the key.
        path: String,
        /// Its first place.
        first: Place,
        /// Its second place.
        second: Place,
    },
    /// A configuration that can be read, but breaks rules; all of them are listed, in file order.
    #[error("{origin}{}", Listed(problems))]
    Config {
        /// The file, "the configuration text" or "the configuration value".
        origin: String,
        /// What is wrong; at least one.
        problems: Vec<ConfigProblem>,
    },
    /// A run of no ranks was asked for.
    #[error("the world size is 0: a run has at least 1 rank.")]
    ConfigNoRanks,
    /// A resolved [`Config`](crate::Config) was used with another number of ranks.
    #[error(
        "the Config was resolved for {resolved} rank(s), but the run has {world_size}. Load it again from its file or \
         text: the batch keys depend on the number of ranks."
    )]
    ConfigWorldSize {
        /// Ranks that the Config was resolved for.
        resolved: usize,
        /// Ranks of this run.
        world_size: usize,
    },
    /// A new batch size does not fit (DeepSpeed's `set_train_batch_size`).
    #[error(
        "train_batch_size {train_batch_size} does not fit train_micro_batch_size_per_gpu {micro_batch} on \
         {world_size} rank(s): a positive multiple of {micro_batch} * {world_size} is needed."
    )]
    BatchSize {
        /// The size that was asked for.
        train_batch_size: usize,
        /// Samples per rank and forward.
        micro_batch: usize,
        /// Ranks.
        world_size: usize,
    },
    /// A script was started without its configuration.
    #[error("{problem}. Start it as: {program} --ds_config FILE")]
    ConfigArgument {
        /// What is wrong with the arguments.
        problem: String,
        /// The program as it was started.
        program: String,
    },

    // ---- data --------------------------------------------------------------------------------
    /// A single data file that is not text.
    #[error(
        "{} is not UTF-8 text (byte {offset}); a file of little-endian 16-bit tokens must end in .bin or .u16",
        path.display()
    )]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where the text ends.
        offset: usize,
    },
    /// A data folder without a text file.
    #[error(
        "{} holds no text (files that are not UTF-8: {skipped}); hidden files and folders named target are not \
         read, and token files (.bin, .u16) are given by their own path",
        path.display()
    )]
    NoText {
        /// The folder.
        path: PathBuf,
        /// Files that are not text.
        skipped: usize,
    },
    /// A file of 16-bit tokens with half a token at its end.
    #[error("{} has {bytes} bytes; 16-bit tokens need an even number: is it a token file, and complete?", path.display())]
    OddTokenFile {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// Fewer tokens than one sample has.
    #[error(
        "{data} has {tokens} tokens; a sample of context {ctx} needs {needed}: give more data or take a shorter context"
    )]
    DataTooShort {
        /// Name of the data.
        data: String,
        /// Its tokens.
        tokens: usize,
        /// Input tokens of a sample.
        ctx: usize,
        /// Tokens that the first sample needs.
        needed: usize,
    },
    /// A token that the model has no embedding for.
    #[error(
        "token {token} at position {position} of {data} is out of the model's vocabulary of {vocab}; allowed is \
         0 to {}: use data of that vocabulary, or a model with a vocabulary of {} or more", vocab - 1, token + 1
    )]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Its index in the data.
        position: usize,
        /// Size of the model's vocabulary.
        vocab: usize,
        /// Name of the data.
        data: String,
    },

    // ---- parameters and weights --------------------------------------------------------------
    /// The model's constructor asked for nothing.
    #[error(
        "the model has no parameters: its constructor took nothing from the VarBuilder; take every weight with vb.get, vb.get_with_hints or candle_nn's layers"
    )]
    NoParameters,
    /// One name, two shapes.
    #[error(
        "parameter {name} is asked for twice, with shape {first:?} and with {second:?}; give the layers different prefixes (vb.pp)"
    )]
    ParameterTwice {
        /// The name.
        name: String,
        /// Shape at the first request.
        first: Vec<usize>,
        /// Shape at the second.
        second: Vec<usize>,
    },
    /// A dtype other than the engine's.
    #[error(
        "parameter {name} is asked for as {found}, but this engine trains in {expected} (the fp16 and bf16 sections decide); take it without a dtype of its own"
    )]
    ParameterDtype {
        /// The name.
        name: String,
        /// What the model wants.
        found: String,
        /// What the configuration says.
        expected: String,
    },
    /// A request without a shape.
    #[error(
        "parameter {name} is asked for without a shape (get_unchecked), which works only after it has been registered; use vb.get with its shape"
    )]
    ParameterWithoutShape {
        /// The name.
        name: String,
    },
    /// Not a safetensors file.
    #[error("{} is not a safetensors file that can be read: {why}", path.display())]
    BadWeightFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A parameter without its tensor.
    #[error("{} has no tensor {name} of shape {shape:?}, which the model needs; the file must hold exactly the model's parameters", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// Its shape in the model.
        shape: Vec<usize>,
    },
    /// Tensors without a parameter.
    #[error("{} holds tensors that the model does not have: {names}; is it the file of another model or size?", path.display())]
    ExtraTensors {
        /// The file.
        path: PathBuf,
        /// The first few names.
        names: String,
    },
    /// A tensor of another shape.
    #[error("tensor {name} in {} has shape {found:?}, but the model's parameter has {expected:?}; check the model's sizes", path.display())]
    MisshapenTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape in the model.
        expected: Vec<usize>,
    },
    /// A tensor that is not floating point.
    #[error("tensor {name} in {} is of type {found}; F32, F16 and BF16 can be read", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// Its type.
        found: String,
    },
    /// A parameter was used while it was sharded.
    #[error(
        "an operation used a parameter that is not gathered now: {names}; use parameters only inside the closure given to engine.forward, and a unit's parameters only inside that unit's forward ({why})"
    )]
    ParameterAbsent {
        /// Candidates: parameters that were absent.
        names: String,
        /// Candle's words, without a backtrace.
        why: String,
    },
    /// Ranks read different configurations, or have different schedules of their own.
    #[error(
        "rank {rank} reads another configuration than rank {other}; every rank must be given the same file or value, \
         and the same schedule"
    )]
    ConfigsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// A parameter group that no optimizer can work with.
    #[error("parameter group {index} (from 0): {problem}")]
    ParameterGroup {
        /// Its number among those given.
        index: usize,
        /// What is wrong, and the mend.
        problem: String,
    },
    /// Names of an optimizer's states that checkpoints cannot tell apart.
    #[error("the states of optimizer {optimizer} are called {names}: {problem}; give each a name of its own")]
    OptimizerStates {
        /// The optimizer.
        optimizer: String,
        /// Its states.
        names: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// An optimizer of the user's own under ZeRO, which the configuration has not allowed.
    #[error(
        "optimizer {name} counts as untested with ZeRO (stage {stage}): set \"zero_allow_untested_optimizer\": true in the configuration, or use stage 0"
    )]
    UntestedOptimizer {
        /// Its name.
        name: String,
        /// `zero_optimization.stage`.
        stage: u8,
    },
    /// Ranks begin with different weights.
    #[error(
        "rank {rank} begins with other weights than rank {other}: another seed, or another init_from file; every rank must be given the same (unlike DeepSpeed, rank 0's weights are not sent to the others)"
    )]
    WeightsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// Ranks built different models.
    #[error(
        "rank {rank} built a model that differs from rank {other}'s: {mine} against {theirs} (with a hash of names, shapes and units); every rank must build the same model"
    )]
    ModelsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// This rank's model.
        mine: String,
        /// The other's.
        theirs: String,
    },

    // ---- training ----------------------------------------------------------------------------
    /// Engine methods out of order.
    #[error("{call} was called {when}; the order of a micro step is forward, backward, step")]
    OutOfOrder {
        /// The method.
        call: &'static str,
        /// What preceded it.
        when: &'static str,
    },
    /// `backward` on something that is no scalar.
    #[error("backward needs a loss of one element, and got a tensor of shape {shape:?}; reduce it first (mean_all)")]
    LossShape {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// NaN or infinity in the loss.
    #[error(
        "the loss is {loss} on rank {rank} in optimizer step {step} (micro step {micro_step}); lower the learning rate, clip gradients (gradient_clipping), and look at the data of this step"
    )]
    NonFiniteLoss {
        /// The value.
        loss: f64,
        /// The rank.
        rank: usize,
        /// Optimizer step, from 0.
        step: u64,
        /// Micro step, from 0.
        micro_step: u64,
    },
    /// NaN or infinity in a gradient of f32 training.
    #[error(
        "{where_} in optimizer step {step}; the weights are unchanged. Lower the learning rate, clip gradients (gradient_clipping), and look at the data of this step"
    )]
    NonFiniteGradient {
        /// Parameter and rank as far as this rank can see.
        where_: String,
        /// Optimizer step, from 0.
        step: u64,
    },
    /// Parameters that the first backward did not reach.
    #[error(
        "{count} trainable parameters received no gradient in the first backward: {names}. Either the model does not use them, or an operation without backward cuts the graph before them: candle_nn's LayerNorm, RmsNorm, softmax_last_dim, rope and sdpa do; use candle_zero::nn's layers, or layer_norm_slow, rms_norm_slow, softmax(D::Minus1), rope_slow"
    )]
    NoGradient {
        /// How many.
        count: usize,
        /// The first few.
        names: String,
    },
    /// Training without an optimizer.
    #[error(
        "the configuration has no optimizer section, so the engine can only run eval; add for example \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"lr\": 1e-3}}}}"
    )]
    NoOptimizer,
    /// An earlier error ended the job.
    #[error("the engine stopped after an earlier error: {0}")]
    Stopped(String),

    // ---- models and layers -------------------------------------------------------------------
    /// A token id that the embedding's table does not have.
    #[error(
        "token id {id} at position {position} (counted over the flattened ids) is outside the embedding's table of {rows} rows; ids must be below {rows}: the tokenizer and the model's vocabulary must agree"
    )]
    TokenOutOfRange {
        /// The id found.
        id: u32,
        /// Where, in the flattened ids.
        position: usize,
        /// Rows of the table.
        rows: usize,
    },
    /// A target that is no class of the logits.
    #[error(
        "target {target} at position {position} (counted over the flattened targets) is no class of logits with {classes} classes; targets must be below {classes}"
    )]
    TargetOutOfRange {
        /// The target found.
        target: u32,
        /// Where, in the flattened targets.
        position: usize,
        /// Classes of the logits.
        classes: usize,
    },
    /// A model configuration that cannot be built.
    #[error("model configuration: {key} is {found}, but must be {allowed}")]
    ModelConfig {
        /// The field.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: String,
    },
    /// A preset name that nobody defined.
    #[error("there is no model preset \"{found}\"{}; the presets are {known}", suggestion.as_ref().map(|s| format!(" (did you mean \"{s}\"?)")).unwrap_or_default())]
    UnknownModelPreset {
        /// The name asked for.
        found: String,
        /// The nearest known name, when one is near.
        suggestion: Option<String>,
        /// All names.
        known: String,
    },
    /// More tokens than the model has positions.
    #[error(
        "{length} tokens are longer than the model's context of {context}; cut the input or build the model with ctx >= {length}"
    )]
    SequenceTooLong {
        /// Tokens given.
        length: usize,
        /// The model's context.
        context: usize,
    },

    // ---- optimizer and schedule --------------------------------------------------------------
    /// A parameter of the learning-rate schedule that no schedule can have.
    #[error("{key} is {found}; allowed is {allowed}: {mend}")]
    ScheduleParameter {
        /// Path of the key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: &'static str,
        /// What to do.
        mend: &'static str,
    },
    /// A value of a schedule that no optimizer can work with.
    #[error(
        "the schedule has {found} as {what} of optimizer step {step}; allowed is {allowed}: correct the schedule \
         (OneCycle: lower decay_mom_rate), or train for fewer steps"
    )]
    ScheduleValue {
        /// Which value.
        what: &'static str,
        /// Number of the optimizer step, from 1; skipped ones do not count.
        step: i64,
        /// The value.
        found: f64,
        /// What it may be.
        allowed: &'static str,
    },
    /// Gradients overflow although the dynamic loss scale is as small as it may be.
    #[error(
        "a gradient is not finite at optimizer step {step}, and the loss scale cannot fall below {scale} \
         (fp16.min_loss_scale): training diverges; lower the learning rate, look for NaN in data and loss, \
         train in bf16, or lower fp16.min_loss_scale"
    )]
    LossScaleAtMinimum {
        /// The scale, equal to its minimum.
        scale: f64,
        /// Optimizer steps so far, skipped ones and this one included.
        step: u64,
    },

    // ---- communication -----------------------------------------------------------------------
    /// A collective failed, or the memory that carries it.
    #[error(transparent)]
    Comm(#[from] CommError),

    // ---- launcher ----------------------------------------------------------------------------
    /// What was to be started is neither a Rust file nor an executable.
    #[error("cannot start {}: {found}; {mend}", path.display())]
    NotStartable {
        /// The path as it was typed.
        path: PathBuf,
        /// What is at that path.
        found: String,
        /// What to give instead.
        mend: String,
    },
    /// The manifest in front of a script (its frontmatter) cannot be used.
    #[error("{}:{line}: {problem}; {mend}", path.display())]
    Frontmatter {
        /// The script.
        path: PathBuf,
        /// Line in the script, counted from 1.
        line: usize,
        /// What was found.
        problem: String,
        /// What is allowed.
        mend: String,
    },
    /// No folder for the packages that are generated from scripts.
    #[error("no folder for script builds: ZERORUN_CACHE_DIR, XDG_CACHE_HOME and HOME are all unset; set one of them")]
    NoScriptCache,
    /// Cargo could not be started.
    #[error("cannot start {cargo} to build {}: {source}; install Rust (rustup.rs) or start a built executable", script.display())]
    CargoNotStarted {
        /// The cargo program that was tried.
        cargo: String,
        /// What was to be built.
        script: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// rustc refused the script; its messages have been printed.
    #[error("{} does not compile", script.display())]
    ScriptDoesNotCompile {
        /// The script.
        script: PathBuf,
    },
    /// Cargo failed for another reason than an error in the code; its message has been printed.
    #[error("cargo could not build {}: {problem} (package in {})", script.display(), package.display())]
    CargoFailed {
        /// The script.
        script: PathBuf,
        /// Folder of the package that was built.
        package: PathBuf,
        /// What cargo did.
        problem: String,
    },
    /// A rank's process could not be started.
    #[error("cannot start rank {rank} ({}): {source}", program.display())]
    RankNotStarted {
        /// The rank.
        rank: usize,
        /// The program.
        program: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Signals, pipes or threads that the launcher itself needs are not to be had.
    #[error("cannot set up the launcher: {what}: {source}")]
    LauncherSetup {
        /// What was attempted.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Some of the variables that tell a process its rank are set, others are missing.
    #[error("{set} is set but {missing} is not: a rank needs both; start the program with zerorun, or unset {set}")]
    RankVariablesIncomplete {
        /// A variable that is set.
        set: &'static str,
        /// The variable (or variables) that is missing.
        missing: &'static str,
    },
    /// A variable about ranks has a value that cannot be read.
    #[error("environment variable {name} is `{value}`; it must be {expected}")]
    RankVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The kernels cannot run as the environment says.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A rank number is not below the number of ranks.
    #[error("{rank_name} is {rank} but {world_name} is {world}; it must be below that")]
    RankOutOfRange {
        /// Variable with the rank.
        rank_name: &'static str,
        /// The rank.
        rank: usize,
        /// Variable with the number of ranks.
        world_name: &'static str,
        /// The number of ranks.
        world: usize,
    },
    /// The environment says that there are several ranks, but nothing joins them.
    #[error(
        "{rank_name} says rank {rank} of {world}, but CANDLE_ZERO_SHM_FD is not set, so the ranks cannot reach one another; \
         start the program with `zerorun --num_ranks {world}` on one host (several hosts are not offered yet)"
    )]
    RanksNotJoined {
        /// Variable with the rank.
        rank_name: &'static str,
        /// The rank.
        rank: usize,
        /// The number of ranks.
        world: usize,
    },
    /// Ranks on several hosts.
    #[error(
        "{local_world} of {world} ranks are on this host: several hosts are not offered yet; \
         start all ranks on one host with `zerorun --num_ranks {world}`"
    )]
    SeveralHosts {
        /// Ranks on this host.
        local_world: usize,
        /// All ranks.
        world: usize,
    },

    // ---- below us ----------------------------------------------------------------------------
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What can happen between ranks. Cloned, because every later collective fails as the first one did.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The shared memory or a thread could not be had.
    #[error(
        "cannot {action} the memory that ranks share: {source}; check the limits of memory and processes (ulimit -a)"
    )]
    Region {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// The inherited descriptor is not the launcher's.
    #[error(
        "file descriptor {fd} (CANDLE_ZERO_SHM_FD) is not the shared memory of this job: found {found}; start the program with zerorun, and unset CANDLE_ZERO_SHM_FD where it is left over from another job"
    )]
    ForeignRegion {
        /// The descriptor.
        fd: i32,
        /// What it is.
        found: String,
    },
    /// Two processes claim one rank.
    #[error("rank {rank} is taken already ({state}); an engine may be initialized once per rank and job")]
    RankTaken {
        /// The rank.
        rank: usize,
        /// What became of its first holder.
        state: String,
    },
    /// A communicator of the user's own failed.
    #[error(transparent)]
    Other(Arc<dyn std::error::Error + Send + Sync>),
    /// A peer's process ended.
    #[error(
        "rank {peer} died ({why}) while rank {rank} waited in {op}; look at rank {peer}'s output, or the kernel log for an out-of-memory kill"
    )]
    RankDied {
        /// This rank.
        rank: usize,
        /// The dead one.
        peer: usize,
        /// How the launcher saw it end.
        why: String,
        /// The collective.
        op: String,
    },
    /// A peer gave up.
    #[error("rank {peer} stopped ({why}) while rank {rank} waited in {op}")]
    RankAborted {
        /// This rank.
        rank: usize,
        /// The one that gave up.
        peer: usize,
        /// Its last words.
        why: String,
        /// The collective.
        op: String,
    },
    /// A peer left in good order while others still need it.
    #[error(
        "rank {peer} has left the job while rank {rank} waits for it in {op}; every rank must make the same number of steps and collective calls"
    )]
    RankLeft {
        /// This rank.
        rank: usize,
        /// The one that left.
        peer: usize,
        /// The collective.
        op: String,
    },
    /// A peer's process shows no life.
    #[error(
        "rank {peer} has shown no sign of life for {seconds} s while rank {rank} waited in {op}; it was stopped or its machine is overloaded"
    )]
    HeartbeatLost {
        /// This rank.
        rank: usize,
        /// The silent one.
        peer: usize,
        /// The collective.
        op: String,
        /// Length of the silence.
        seconds: u64,
    },
    /// A peer lives but does not come.
    #[error(
        "rank {rank} waited {limit:?} for rank {peer} in {op}; if a step may take longer, raise the limit (zerorun --timeout)"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The awaited one.
        peer: usize,
        /// The collective.
        op: String,
        /// The limit.
        limit: std::time::Duration,
    },
    /// Ranks issued different collectives.
    #[error(
        "ranks have diverged: rank {rank} is in {here}, rank {peer} in {there}; every rank must run the same model with the same configuration, in the same order"
    )]
    Diverged {
        /// This rank.
        rank: usize,
        /// What it issued.
        here: String,
        /// The other rank.
        peer: usize,
        /// What that one issued.
        there: String,
    },
    /// The communication thread is gone.
    #[error("the communication thread of this rank has ended after an earlier failure; the first error tells why")]
    ThreadEnded,
}

impl CommError {
    /// The failure of a communicator of your own.
    pub fn other(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(Arc::from(source.into()))
    }
}

/// What to do about a file of offloaded state that fails.
fn mend_of(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "Free space there, or name a folder on a larger disk as nvme_path"
        }
        std::io::ErrorKind::FileTooLarge => {
            "Raise the limit of file sizes (`ulimit -f`), or name a folder on a file system that allows larger files as \
             nvme_path"
        }
        _ => "Look at the disk's health, or name a folder on another one as nvme_path",
    }
}

/// Whether a line is the first frame of a backtrace. Candle appends one to its messages where RUST_BACKTRACE is set.
pub(crate) fn begins_backtrace(line: &str) -> bool {
    line.strip_prefix("   ").is_some_and(|frame| frame.trim_start().starts_with("0: "))
}

/// A message without the backtrace that may follow it.
pub(crate) fn without_backtrace(message: &str) -> String {
    let lines: Vec<&str> = message.lines().take_while(|line| !begins_backtrace(line)).collect();
    lines.join("\n")
}
