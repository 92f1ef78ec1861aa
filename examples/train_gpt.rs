//! Trains a GPT-2 or a Llama under ZeRO, and prints a text that the trained model generates.
//!
//!     zerorun --num_ranks 2 examples/train_gpt.rs --ds_config ds_configs/zero3.json --model nano --steps 200
//!     zerorun --num_ranks 2 examples/train_gpt.rs --ds_config ds_configs/zero3.json --arch llama --steps 200
//!     zerorun --num_ranks 2 examples/train_gpt.rs --ds_config ds_configs/pipeline.json --model nano --steps 200
//!
//! Everything about batches, precision, optimizer, ZeRO stage and pipeline comes from the DeepSpeed configuration; the
//! flags of this program select model, data and outputs. Without `--data`, the model trains on the corpus embedded in
//! the library.

use candle_core::{DType, Device, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, LoadedCheckpoint, SaveOptions};
use candle_zero::cli::DsArgs;
use candle_zero::comm::RankEnv;
use candle_zero::config::{Config, RunValues, read_value};
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenBatch, TokenData};
use candle_zero::engine::PipelineEngine;
use candle_zero::error::EngineError;
use candle_zero::estimate::{Estimate, PipelineEstimate, Shapes};
use candle_zero::memory::{MemoryKind, MemoryReport};
use candle_zero::models::{
    Architecture, DecoderBatch, GptConfig, GptLayers, IntoDecoderConfig, LanguageModel, LlamaConfig, LlamaLayers,
    Session, TokenRng, decoder_pipeline, next_token,
};
use candle_zero::monitor::{MetricsWriter, Progress, available_memory, rss_peak_bytes};
use candle_zero::offload::OffloadReport;
use candle_zero::optim::ParameterGroup;
use candle_zero::runs::{RunEnding, RunSpec};
use candle_zero::stop_signal::asked_to_stop;
use clap::{Parser, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Display;
use std::io::{ErrorKind, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// The vocabulary size of text, whose tokens are its bytes.
const BYTES: usize = 256;

#[derive(Parser)]
#[command(about = "Trains a GPT-2 or a Llama under ZeRO")]
struct Args {
    #[command(flatten)]
    ds: DsArgs,
    /// Type of model
    #[arg(long, value_enum, default_value = "gpt2")]
    arch: Arch,
    /// Size of the model: nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl; with --arch llama: llama-nano,
    /// llama-mini, tinyllama-1.1b, llama-3.2-1b, llama-3.2-3b, llama-2-7b [default: nano or llama-nano]
    #[arg(long)]
    model: Option<String>,
    /// Number of blocks, instead of the model's default
    #[arg(long = "n_layer", alias = "n-layer")]
    n_layer: Option<usize>,
    /// Number of attention heads per block, instead of the model's default
    #[arg(long = "n_head", alias = "n-head")]
    n_head: Option<usize>,
    /// Number of key and value heads per block, instead of the model's default; Llama only
    #[arg(long = "n_kv_head", alias = "n-kv-head")]
    n_kv_head: Option<usize>,
    /// Width, instead of the model's default
    #[arg(long = "n_embd", alias = "n-embd")]
    n_embd: Option<usize>,
    /// Width inside the MLP, instead of the model's default; Llama only
    #[arg(long = "n_inner", alias = "n-inner")]
    n_inner: Option<usize>,
    /// Context length in tokens, instead of the model's default
    #[arg(long)]
    ctx: Option<usize>,
    /// Number of tokens per sample [default: the model's context length]
    #[arg(long = "seq_len", alias = "seq-len", value_name = "N")]
    seq_len: Option<usize>,
    /// Vocabulary size, instead of the model's default
    #[arg(long)]
    vocab: Option<usize>,
    /// A text file, a folder of text, or a .bin or .u16 file of 16-bit tokens [default: the embedded corpus]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Order of the samples
    #[arg(long, value_enum, default_value = "shuffled")]
    order: OrderFlag,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Seed for initial weights, order and sample [default: the seed in the configuration]
    #[arg(long)]
    seed: Option<u64>,
    /// Disable weight decay for norms and biases, that is, for all one-dimensional parameters
    #[arg(long = "no_decay_1d", alias = "no-decay-1d")]
    no_decay_1d: bool,
    /// File with initial weights
    #[arg(long, value_name = "FILE.safetensors")]
    init: Option<PathBuf>,
    /// File for the trained weights
    #[arg(long, value_name = "FILE.safetensors")]
    export: Option<PathBuf>,
    /// Folder for checkpoints; one is saved at the end, and on SIGTERM, SIGINT or SIGHUP, which end training
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Also save a checkpoint every N optimizer steps, while training continues
    #[arg(long = "save_every", alias = "save-every", value_name = "N", requires = "save",
          value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Number of newest checkpoints to keep in the folder [default: all]
    #[arg(long, value_name = "K", requires = "save")]
    keep: Option<NonZeroUsize>,
    /// Resume from the newest checkpoint in the --save folder, or start from the beginning if there is none
    #[arg(long, requires = "save")]
    resume: bool,
    /// File for metrics, with one JSON line per optimizer step
    #[arg(long, value_name = "FILE.jsonl")]
    metrics: Option<PathBuf>,
    /// Number of tokens to generate at the end [default: 200 for text, 0 for token files, in a pipeline, and if
    /// parameters are in files]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Recompute each block in the backward pass instead of keeping its activations
    #[arg(long = "activation_checkpointing", alias = "activation-checkpointing")]
    activation_checkpointing: bool,
    /// Probability of dropping an element of the embeddings and of the residual branches; GPT-2 only [default: 0]
    #[arg(long, value_name = "P")]
    dropout: Option<f32>,
}

impl Args {
    /// Returns the name of the preset.
    fn model_name(&self) -> &str {
        self.model.as_deref().unwrap_or(match self.arch {
            Arch::Gpt2 => "nano",
            Arch::Llama => "llama-nano",
        })
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Arch {
    Gpt2,
    Llama,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderFlag {
    Shuffled,
    Sequential,
}

/// One line of the metrics file, which describes one optimizer step.
#[derive(Serialize)]
struct StepMetrics {
    /// The index of the step, counted from 0.
    step: u64,
    /// The mean over ranks and micro batches.
    loss: f64,
    /// The learning rate of this step.
    lr: f64,
    /// The gradient norm before clipping, without the loss scale.
    grad_norm: Option<f64>,
    /// The loss scale of this step.
    loss_scale: f64,
    /// Whether the step was skipped because of overflow, leaving the weights unchanged.
    skipped: bool,
    tokens_per_s: f64,
    forward_ms: f64,
    backward_ms: f64,
    step_ms: f64,
    comm_ms: f64,
    /// The time spent waiting for files of offloaded state, which is part of the other durations.
    disk_ms: f64,
    /// The numbers of bytes that rank 0 read from files and wrote to them.
    disk_read_bytes: u64,
    disk_written_bytes: u64,
    /// The throughput of rank 0's file requests while they were in progress.
    disk_bytes_per_s: f64,
    /// The peak memory of the rank that used the most.
    rss_peak_bytes: Option<u64>,
}

/// The figures that ranks exchange after a step.
struct RankAggregates {
    loss: f64,
    rss_peak_bytes: Option<u64>,
}

/// The engine of the complete model, or of a pipeline that divides the model's layers among ranks.
enum Trainer<A: Architecture> {
    DataParallel(Box<Engine<LanguageModel<A>>>),
    Pipeline(Box<PipelineEngine<DecoderBatch>>),
}

/// Calls a method that both engines have.
macro_rules! on_either {
    ($trainer:expr, $engine:ident => $call:expr) => {
        match $trainer {
            Trainer::DataParallel($engine) => $call,
            Trainer::Pipeline($engine) => $call,
        }
    };
}

impl<A: Architecture> Trainer<A> {
    fn rank(&self) -> usize {
        match self {
            Self::DataParallel(engine) => engine.job_rank(),
            Self::Pipeline(engine) => engine.rank(),
        }
    }

    fn config(&self) -> &Config {
        on_either!(self, engine => engine.config())
    }

    fn device(&self) -> &Device {
        on_either!(self, engine => engine.device())
    }

    fn global_steps(&self) -> u64 {
        on_either!(self, engine => engine.global_steps())
    }

    fn global_samples(&self) -> u64 {
        on_either!(self, engine => engine.global_samples())
    }

    fn skipped_steps(&self) -> u64 {
        on_either!(self, engine => engine.skipped_steps())
    }

    fn offload_report(&self) -> OffloadReport {
        on_either!(self, engine => engine.offload_report())
    }

    /// Returns which part of the data this rank reads, and the number of parts.
    fn data_position(&self) -> (usize, usize) {
        match self {
            Self::DataParallel(engine) => (engine.rank(), engine.world_size()),
            Self::Pipeline(engine) => engine.data_position(),
        }
    }

    fn is_divided(&self) -> bool {
        matches!(self, Self::Pipeline(_))
    }

    /// Checks whether the weights can be written to `path` at the end.
    fn check_export(&mut self, path: &Path) -> candle_zero::Result<()> {
        match self {
            Self::DataParallel(engine) if engine.job_rank() == 0 => engine.check_export(path),
            Self::DataParallel(_) => Ok(()),
            Self::Pipeline(engine) => engine.check_export(path),
        }
    }

    /// Loads the newest checkpoint in `dir`, if there is one.
    fn load(&mut self, dir: &Path) -> candle_zero::Result<Option<LoadedCheckpoint>> {
        on_either!(self, engine => engine.load_checkpoint(dir, None, &LoadOptions::default()))
    }

    /// Runs an optimizer step. Returns its loss, which is this rank's mean over micro batches; in a pipeline, it is the
    /// mean over all pipelines too.
    fn step(&mut self, loader: &mut Loader) -> candle_zero::Result<f64> {
        let micro_batches = self.config().batch.gradient_accumulation_steps;
        match self {
            Self::DataParallel(engine) => {
                let mut sum = 0.0;
                for _ in 0..micro_batches {
                    let batch = next(loader)?;
                    let loss = engine.forward(|model| model.loss(&batch.inputs, &batch.targets))?;
                    engine.backward(&loss)?;
                    engine.step()?;
                    sum += f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                }
                Ok(sum / micro_batches as f64)
            }
            Self::Pipeline(engine) => engine.train_batch(|_| {
                let batch = next(loader)?;
                Ok(DecoderBatch::new(batch.inputs, batch.targets))
            }),
        }
    }
}

/// Returns the next micro batch.
fn next(loader: &mut Loader) -> candle_zero::Result<TokenBatch> {
    loader.next().expect("the sequence of micro batches is endless")
}

fn main() -> ExitCode {
    // This is not `fn main() -> anyhow::Result<()>`, because that would print a backtrace after the message if
    // RUST_BACKTRACE is set.
    let args = Args::parse();
    let result = match args.arch {
        Arch::Gpt2 => gpt_config(&args).and_then(|c| run::<GptLayers>(&args, &c, [c.vocab, c.n_embd], gpt_sizes(&c))),
        Arch::Llama => {
            llama_config(&args).and_then(|c| run::<LlamaLayers>(&args, &c, [c.vocab, c.hidden_size], llama_sizes(&c)))
        }
    };
    match result {
        // A job that the user stops on the dashboard does not count as failed, because a failed job would be restarted.
        Ok(Outcome::Stopped) if is_by_signal() => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            // A closed stream does not change the exit code.
            _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether a signal, rather than the dashboard, asked this rank to stop.
fn is_by_signal() -> bool {
    !matches!(asked_to_stop(), Ok(false))
}

/// The outcome of a run without errors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Trained,
    /// The run has paused at the step in `CANDLE_ZERO_STOP_AT`, which is saved.
    Paused,
    /// A signal, or the user on the dashboard, asked the run to end. The last step is saved.
    Stopped,
}

/// Prints a line to standard output. A closed pipe, which no one reads, is not an error.
fn print_line(text: impl Display) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::anyhow!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Trains a model with the sizes of `config`, a vocabulary of `vocab` tokens and the width `width`. Checkpoints record
/// `sizes`.
fn run<A: Architecture<Config: IntoDecoderConfig>>(
    args: &Args,
    config: &A::Config,
    [vocab, width]: [usize; 2],
    sizes: Value,
) -> anyhow::Result<Outcome> {
    let ctx = A::ctx(config);
    let seq_len = args.seq_len.unwrap_or(ctx);
    anyhow::ensure!(
        (1..=ctx).contains(&seq_len),
        "--seq_len is {seq_len}; it must be 1 to {ctx}, the model's context (see --ctx)"
    );
    let data = TokenData::open(args.data.as_deref())?;

    let run_values =
        RunValues { total_num_steps: Some(args.steps), hidden_size: Some(width as u64), ..RunValues::default() };
    let divided = is_divided(&args.ds.ds_config)?;
    anyhow::ensure!(
        !divided || args.sample.is_none_or(|tokens| tokens == 0),
        "--sample is not supported in a pipeline, whose ranks have only parts of the model; leave it out"
    );
    if let Some(warning) = memory_warning::<A>(args, config, divided, &run_values) {
        // An error means that no one reads stderr.
        _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    let record = RunSpec::by_default(&format!("train_gpt-{}", args.model_name())).total_steps(args.steps);
    let record = record.settings(json!({ "model": sizes, "data": data.name(), "seq_len": seq_len }));
    let mut builder =
        Engine::builder().run(record).run_values(run_values).same_on_all_ranks(data.name(), data.fingerprint());
    if let Some(seed) = args.seed {
        builder = builder.seed(seed);
    }
    if let Some(init) = &args.init {
        builder = builder.init_from(init);
    }
    if args.no_decay_1d {
        builder = builder.parameter_groups(vec![ParameterGroup::no_decay()]);
    }
    let ds_config = args.ds.ds_config.as_path();
    let mut engine: Trainer<A> = match divided {
        true => Trainer::Pipeline(Box::new(builder.initialize_pipeline(decoder_pipeline(config)?, ds_config)?)),
        false => {
            Trainer::DataParallel(Box::new(builder.initialize(|vb| LanguageModel::<A>::new(config, vb), ds_config)?))
        }
    };
    let outcome = run_engine(&mut engine, data, args, [vocab, ctx, seq_len], &sizes);
    outcome.inspect_err(|error| {
        on_either!(&mut engine, engine => engine.end_run(RunEnding::Failed, Some(&format!("{error:#}"))));
    })
}

/// Trains a model with a vocabulary of `vocab` tokens, at most `ctx` tokens in a context and `seq_len` in a sample.
fn run_engine<A: Architecture>(
    engine: &mut Trainer<A>,
    data: TokenData,
    args: &Args,
    [vocab, ctx, seq_len]: [usize; 3],
    sizes: &Value,
) -> anyhow::Result<Outcome> {
    if let Some(path) = &args.export {
        engine.check_export(path)?;
    }
    let seed = args.seed.unwrap_or(engine.config().seed);
    // If the parameters are in files, all of them would be read once for each token of the sample.
    let memory = on_either!(&*engine, engine => engine.memory_report());
    let parameters_in_files = memory.row(MemoryKind::Parameters).file.held > 0;
    let samples_by_default = data.is_byte_level() && !parameters_in_files && !engine.is_divided();
    let sample = args.sample.unwrap_or(if samples_by_default { 200 } else { 0 });
    let is_text = data.is_byte_level();
    if is_text && vocab != BYTES && engine.rank() == 0 {
        print_line(format!(
            "text is read as bytes, so only {BYTES} different tokens occur; the model has a vocabulary of {vocab}"
        ))?;
    }
    let mut prompt = vec![];
    data.extend(0, data.len().min(16).min(ctx), &mut prompt);
    let order = match args.order {
        OrderFlag::Shuffled => SampleOrder::Shuffled { seed },
        OrderFlag::Sequential => SampleOrder::Sequential,
    };
    let (part, parts) = engine.data_position();
    let shape = BatchPartition::new(&engine.config().batch, parts, part);
    let mut loader = Loader::new(data, order, shape, seq_len, vocab, engine.device())?;

    if let Some(dir) = &args.save {
        // The folder is checked here rather than after hours of training.
        on_either!(&mut *engine, engine => engine.check_save_dir(dir))?;
    }
    if let (true, Some(dir)) = (args.resume, &args.save)
        && let Some(loaded) = engine.load(dir)?
        && engine.rank() == 0
    {
        print_line(format!("continues after step {}: {}", engine.global_steps(), loaded.path.display()))?;
    }
    if engine.global_samples() > 0 {
        // The run continues from a checkpoint, or with the state of other islands.
        loader.resume(engine.global_samples());
    }
    let outcome = train(engine, &mut loader, args, seq_len, sizes)?;
    if outcome != Outcome::Trained {
        if engine.rank() == 0 {
            let steps = engine.global_steps();
            let why = match outcome {
                Outcome::Paused => "as planned",
                _ if is_by_signal() => "by a signal",
                _ => "on request",
            };
            match steps {
                0 => print_line(format!("stopped {why} before the first step was complete: nothing is lost"))?,
                _ => print_line(format!("stopped {why}: step {steps} is saved, and --resume continues from there"))?,
            }
        }
        return Ok(outcome);
    }
    if let (Trainer::DataParallel(engine), true) = (&mut *engine, args.export.is_some() || sample > 0) {
        // With local steps, this gives all islands the same weights.
        engine.synchronize_islands()?;
    }
    if let Some(path) = &args.export {
        on_either!(&mut *engine, engine => engine.export_safetensors(path))?;
    }
    // Every rank generates, because, at stage 3, a forward pass gathers parameters from all ranks. All ranks draw the
    // same tokens.
    if let (Trainer::DataParallel(engine), 1..) = (&mut *engine, sample) {
        let prompt_len = prompt.len();
        let tokens = generate(engine, prompt, sample, seed)?;
        let format_tokens = |tokens: &[u32]| if is_text { as_text(tokens) } else { format!("{tokens:?}") };
        engine.record_sample(&format_tokens(&tokens[..prompt_len]), &format_tokens(&tokens[prompt_len..]));
        if engine.rank() == 0 {
            print_line(format_tokens(&tokens))?;
        }
    }
    Ok(Outcome::Trained)
}

/// Returns whether the configuration has a section `pipeline` that divides the model's layers among several ranks.
fn is_divided(ds_config: &Path) -> anyhow::Result<bool> {
    let config = read_value(ds_config)?;
    let Some(section) = config.get("pipeline").filter(|section| !section.is_null()) else { return Ok(false) };
    // By default, all ranks form one pipeline.
    let stages = section.get("stages").and_then(Value::as_u64);
    Ok(stages.unwrap_or(RankEnv::from_env()?.world_size as u64) > 1)
}

/// Returns a warning, only on rank 0, if the model's training state needs more memory than is available, according to
/// the estimate. Problems with the configuration are reported elsewhere.
fn memory_warning<A: Architecture<Config: IntoDecoderConfig>>(
    args: &Args,
    config: &A::Config,
    divided: bool,
    run_values: &RunValues,
) -> Option<String> {
    let env = RankEnv::from_env().ok().filter(|env| env.rank == 0)?;
    let ds_config = args.ds.ds_config.as_path();
    let needs = if divided {
        let module = decoder_pipeline(config).ok()?;
        let estimate = PipelineEstimate::new(&module, ds_config, env.world_size, run_values, |shapes| shapes).ok()?;
        let peak_bytes =
            |memory: &MemoryReport| memory.rows.iter().map(|row| row.host.peak + row.pinned.peak).sum::<usize>();
        (estimate.ranks.iter().map(|rank| peak_bytes(&rank.memory)).sum::<usize>() * estimate.pipelines) as f64
    } else {
        let ds_config = Config::load_for(ds_config, env.world_size, run_values).ok()?;
        let shapes = Shapes::of("model", |vb| LanguageModel::<A>::new(config, vb)).ok()?;
        Estimate::new(&shapes, &ds_config).ok()?.host_bytes() as f64 * env.world_size as f64
    };
    let available = available_memory()? as f64;
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    (needs > available).then(|| {
        format!(
            "the training state needs {:.1} GiB of memory, but only {:.1} GiB is available; use a smaller model, \
             more sharding or offload (zerorun estimate)",
            gib(needs),
            gib(available)
        )
    })
}

/// Returns the preset, modified by the flags.
fn gpt_config(args: &Args) -> anyhow::Result<GptConfig> {
    let preset = GptConfig::preset(args.model_name())?;
    check_context(args)?;
    let has_no_llama_flags = args.n_kv_head.is_none() && args.n_inner.is_none();
    anyhow::ensure!(
        has_no_llama_flags,
        "a GPT-2 has no --n_kv_head and no --n_inner; leave them out, or give --arch llama"
    );
    let config = GptConfig {
        n_layer: args.n_layer.unwrap_or(preset.n_layer),
        n_head: args.n_head.unwrap_or(preset.n_head),
        n_embd: args.n_embd.unwrap_or(preset.n_embd),
        ctx: args.ctx.unwrap_or(preset.ctx),
        vocab: args.vocab.unwrap_or(preset.vocab),
        checkpoint_activations: args.activation_checkpointing,
        dropout: args.dropout.unwrap_or(preset.dropout),
        ..preset
    };
    config.validate()?;
    Ok(config)
}

/// Returns the preset, modified by the flags.
fn llama_config(args: &Args) -> anyhow::Result<LlamaConfig> {
    let preset = LlamaConfig::preset(args.model_name())?;
    check_context(args)?;
    anyhow::ensure!(args.dropout.is_none(), "a Llama has no --dropout; leave it out, or give --arch gpt2");
    let config = LlamaConfig {
        hidden_size: args.n_embd.unwrap_or(preset.hidden_size),
        intermediate_size: args.n_inner.unwrap_or(preset.intermediate_size),
        num_hidden_layers: args.n_layer.unwrap_or(preset.num_hidden_layers),
        num_attention_heads: args.n_head.unwrap_or(preset.num_attention_heads),
        num_key_value_heads: args.n_kv_head.unwrap_or(preset.num_key_value_heads),
        ctx: args.ctx.unwrap_or(preset.ctx),
        vocab: args.vocab.unwrap_or(preset.vocab),
        checkpoint_activations: args.activation_checkpointing,
        ..preset
    };
    config.validate()?;
    Ok(config)
}

fn gpt_sizes(config: &GptConfig) -> Value {
    json!({
        "architecture": "gpt2", "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
        "ctx": config.ctx, "vocab": config.vocab,
    })
}

fn llama_sizes(config: &LlamaConfig) -> Value {
    json!({
        "architecture": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "ctx": config.ctx, "vocab": config.vocab,
        "rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    })
}

fn check_context(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(args.ctx != Some(0), "--ctx is 0, but a sample has at least one token; give 1 or more");
    Ok(())
}

/// Runs optimizer steps until `args.steps` have been completed; rank 0 reports each of them. With --save, a signal
/// (SIGTERM, SIGINT or SIGHUP), the user on the dashboard, or the step in `CANDLE_ZERO_STOP_AT` ends training after a
/// checkpoint.
fn train<A: Architecture>(
    engine: &mut Trainer<A>,
    loader: &mut Loader,
    args: &Args,
    seq_len: usize,
    sizes: &Value,
) -> anyhow::Result<Outcome> {
    let is_first_rank = engine.rank() == 0;
    let mut metrics = match &args.metrics {
        Some(path) if is_first_rank && args.resume => Some(MetricsWriter::resume(path, engine.global_steps())?),
        Some(path) if is_first_rank => Some(MetricsWriter::create(path)?),
        _ => None,
    };
    let mut progress = if is_first_rank { Progress::new(args.steps, None) } else { Progress::silent() };
    let batch = engine.config().batch;
    let tokens_per_step = (batch.train_batch_size * seq_len) as f64;
    let start = Instant::now();

    let (first_step, skipped_before) = (engine.global_steps(), engine.skipped_steps());
    for step in first_step..args.steps {
        if args.save.is_some() && on_either!(&*engine, engine => engine.stop_requested())? {
            on_either!(&mut *engine, engine => engine.wait_for_checkpoint())?;
            if step > first_step && !is_due(step, args) {
                save(engine, args, sizes)?;
            }
            progress.finish();
            let is_planned = on_either!(&*engine, engine => engine.is_planned_stop());
            return Ok(if is_planned { Outcome::Paused } else { Outcome::Stopped });
        }
        let step_start = Instant::now();
        let files_before = engine.offload_report();
        let (lr, loss_scale) = on_either!(&*engine, engine => (engine.lr()[0], engine.loss_scale()));
        let loss = engine.step(loader)?;
        let aggregates = gather(engine, loss)?;
        let timings = on_either!(&*engine, engine => engine.timings());
        let files = engine.offload_report().since(&files_before);
        let line = StepMetrics {
            step,
            loss: aggregates.loss,
            lr,
            grad_norm: on_either!(&*engine, engine => engine.global_grad_norm()),
            loss_scale,
            skipped: !on_either!(&*engine, engine => engine.was_step_applied()),
            tokens_per_s: tokens_per_step / step_start.elapsed().as_secs_f64(),
            forward_ms: timings.forward_ms,
            backward_ms: timings.backward_ms,
            step_ms: timings.step_ms,
            comm_ms: timings.comm_ms,
            disk_ms: timings.disk_ms,
            disk_read_bytes: files.bytes_read,
            disk_written_bytes: files.bytes_written,
            disk_bytes_per_s: files.bytes_per_s(),
            rss_peak_bytes: aggregates.rss_peak_bytes,
        };
        write(&mut metrics, &line);
        on_either!(&mut *engine, engine => engine.record_metrics(&[("tokens_per_s", line.tokens_per_s)]));
        progress
            .step(step + 1, || format!("loss {:.4} lr {:.3e} {:.0} tokens/s", line.loss, line.lr, line.tokens_per_s));
        let is_requested = args.save.is_some() && on_either!(&*engine, engine => engine.save_requested());
        if is_due(step + 1, args) || is_requested {
            save(engine, args, sizes)?;
        }
    }
    on_either!(&mut *engine, engine => engine.wait_for_checkpoint().and_then(|()| engine.wait_for_upload()))?;
    progress.finish();
    let files = engine.offload_report();
    if is_first_rank && files != OffloadReport::default() {
        print_line(files)?;
    }
    let summary = json!({
        "summary": true,
        "world_size": on_either!(&*engine, engine => engine.world_size()),
        "steps": args.steps,
        "skipped_steps": engine.skipped_steps(),
        "seconds": start.elapsed().as_secs_f64(),
        "memory": on_either!(&*engine, engine => engine.memory_report()),
        "comm": on_either!(&*engine, engine => engine.comm_report()),
        "offload": engine.offload_report(),
    });
    write(&mut metrics, &summary);
    let (steps, skipped) = (args.steps.saturating_sub(first_step), engine.skipped_steps() - skipped_before);
    if steps > 0 && skipped == steps {
        return Err(EngineError::NothingLearned { steps, adapts: engine.config().precision.adapts_loss_scale() }.into());
    }
    Ok(Outcome::Trained)
}

/// Writes a line of metrics. Training matters more than its log: if a line cannot be written, a message reports
/// this, and no more lines are written.
fn write(metrics: &mut Option<MetricsWriter>, line: &impl Serialize) {
    if let Some(Err(error)) = metrics.as_mut().map(|metrics| metrics.write(line)) {
        _ = writeln!(std::io::stderr(), "{error}: training continues, but no more metrics are written");
        *metrics = None;
    }
}

/// Returns whether a checkpoint is saved after `steps` steps.
fn is_due(steps: u64, args: &Args) -> bool {
    args.save.is_some() && (steps == args.steps || args.save_every.is_some_and(|every| steps.is_multiple_of(every)))
}

/// Saves a checkpoint. If it is due because of `--save_every`, training continues meanwhile.
fn save<A: Architecture>(engine: &mut Trainer<A>, args: &Args, sizes: &Value) -> anyhow::Result<()> {
    let Some(dir) = &args.save else { return Ok(()) };
    let steps = engine.global_steps();
    let in_background = steps != args.steps && is_due(steps, args);
    let options = SaveOptions { in_background, keep: args.keep.map(NonZeroUsize::get), ..SaveOptions::default() };
    let state = json!({ "model": sizes });
    on_either!(engine, engine => engine.save_checkpoint_with(dir, None, state, &options))?;
    Ok(())
}

/// Returns the mean loss and the largest memory over all ranks. Collective.
fn gather<A: Architecture>(engine: &Trainer<A>, loss: f64) -> anyhow::Result<RankAggregates> {
    let memory = rss_peak_bytes().unwrap_or(0) as f64;
    let ranks = on_either!(engine, engine => engine.gather_f64(&[loss, memory]))?;
    // All ranks of a pipeline have the mean.
    let mean = ranks.iter().map(|rank| rank[0]).sum::<f64>() / ranks.len() as f64;
    let loss = if engine.is_divided() { loss } else { mean };
    let memory = ranks.iter().fold(0.0, |most: f64, rank| most.max(rank[1])) as u64;
    Ok(RankAggregates { loss, rss_peak_bytes: (memory > 0).then_some(memory) })
}

/// Extends `tokens` by `count` tokens, each sampled from the model's distribution, slightly sharpened. Each
/// evaluation processes the tokens that the model has not seen yet.
fn generate<A: Architecture>(
    engine: &mut Engine<LanguageModel<A>>,
    mut tokens: Vec<u32>,
    count: usize,
    seed: u64,
) -> anyhow::Result<Vec<u32>> {
    const TEMPERATURE: f64 = 0.8;
    let (mut random, mut session) = (TokenRng::new(seed), Session::new());
    session.reserve(tokens.len() + count);
    for _ in 0..count {
        let new = &tokens[session.tokens().len()..];
        let logits = engine.eval(|model| Tensor::new(model.extend(&mut session, new)?, &Device::Cpu))?;
        tokens.push(next_token(&logits.to_vec1::<f32>()?, TEMPERATURE, &mut random));
    }
    Ok(tokens)
}

/// Returns bytes as text. Bytes that are not valid UTF-8, and characters that would control a terminal, become
/// replacement characters.
fn as_text(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().map(|t| u8::try_from(*t).unwrap_or(b'?')).collect();
    let moves_the_cursor = |c: char| c.is_control() && c != '\n' && c != '\t';
    String::from_utf8_lossy(&bytes).replace(moves_the_cursor, "\u{fffd}")
}
