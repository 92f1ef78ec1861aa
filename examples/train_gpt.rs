//! Trains a GPT-2 or a Llama under ZeRO and prints a sample of what it learned.
//!
//!     zerorun --num_ranks 2 examples/train_gpt.rs --ds_config ds_configs/zero3.json --model nano --steps 200
//!     zerorun --num_ranks 2 examples/train_gpt.rs --ds_config ds_configs/zero3.json --arch llama --steps 200
//!
//! Everything about batches, precision, optimizer and ZeRO stage comes from the DeepSpeed configuration; the flags
//! of this program choose model, data and outputs. Without `--data` the model reads the corpus embedded in the library.

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::cli::DsArgs;
use candle_zero::comm::RankEnv;
use candle_zero::config::{Config, RunValues};
use candle_zero::data::{BatchShape, Loader, SampleOrder, TokenData};
use candle_zero::error::EngineError;
use candle_zero::estimate::{Estimate, Shapes};
use candle_zero::memory::MemoryKind;
use candle_zero::models::{
    Architecture, GptConfig, GptLayers, LanguageModel, LlamaConfig, LlamaLayers, Session, TokenRng, next_token,
};
use candle_zero::monitor::{MetricsWriter, Progress, available_memory, rss_peak_bytes};
use candle_zero::offload::OffloadReport;
use candle_zero::optim::ParameterGroup;
use clap::{Parser, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Display;
use std::io::{ErrorKind, Write as _};
use std::num::NonZeroUsize;
use std::path::PathBuf;
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
    /// Attention heads per block, instead of the model's default
    #[arg(long = "n_head", alias = "n-head")]
    n_head: Option<usize>,
    /// Key and value heads per block, instead of the model's default; Llama only
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
    /// Tokens per sample [default: the model's context length]
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
    /// Folder for checkpoints; one is saved at the end, and at SIGTERM or SIGINT, which end the training
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
    /// Tokens to generate at the end [default: 200 for text, 0 for token files, and if parameters are in files]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Recompute each block in backward instead of keeping its activations
    #[arg(long = "activation_checkpointing", alias = "activation-checkpointing")]
    activation_checkpointing: bool,
    /// Probability of dropping an element of the embeddings and of the residual branches; GPT-2 only [default: 0]
    #[arg(long, value_name = "P")]
    dropout: Option<f32>,
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
struct OverRanks {
    loss: f64,
    rss_peak_bytes: Option<u64>,
}

fn main() -> ExitCode {
    // Not `fn main() -> anyhow::Result<()>`, which prints a backtrace after the message if RUST_BACKTRACE is set.
    let args = Args::parse();
    let result = match args.arch {
        Arch::Gpt2 => gpt_config(&args).and_then(|c| run::<GptLayers>(&args, &c, [c.vocab, c.n_embd], gpt_sizes(&c))),
        Arch::Llama => {
            llama_config(&args).and_then(|c| run::<LlamaLayers>(&args, &c, [c.vocab, c.hidden_size], llama_sizes(&c)))
        }
    };
    match result {
        Ok(Ended::Trained) => ExitCode::SUCCESS,
        Ok(Ended::Stopped) => ExitCode::FAILURE,
        Err(error) => {
            // A closed stream does not change the exit code.
            _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// How a run without errors ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Trained,
    /// A signal asked the run to end. The last step is saved.
    Stopped,
}

/// Prints a line to standard output. A closed pipe, which no one reads, is not an error.
fn say(text: impl Display) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::anyhow!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Trains a model with the sizes of `config`, a vocabulary of `vocab` tokens and the width `width`. Checkpoints record
/// `sizes`.
fn run<A: Architecture>(
    args: &Args,
    config: &A::Config,
    [vocab, width]: [usize; 2],
    sizes: Value,
) -> anyhow::Result<Ended> {
    let ctx = A::ctx(config);
    let seq_len = args.seq_len.unwrap_or(ctx);
    anyhow::ensure!(
        (1..=ctx).contains(&seq_len),
        "--seq_len is {seq_len}; it must be 1 to {ctx}, the model's context: see --ctx"
    );
    let data = TokenData::open(args.data.as_deref())?;

    let run_values =
        RunValues { total_num_steps: Some(args.steps), hidden_size: Some(width as u64), ..RunValues::default() };
    if let Some(warning) = too_large::<A>(args, config, &run_values) {
        // An error means that no one reads stderr.
        _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    let mut builder = Engine::builder().run_values(run_values).same_on_all_ranks(data.name(), data.fingerprint());
    if let Some(seed) = args.seed {
        builder = builder.seed(seed);
    }
    if let Some(init) = &args.init {
        builder = builder.init_from(init);
    }
    if args.no_decay_1d {
        builder = builder.parameter_groups(vec![ParameterGroup::no_decay()]);
    }
    let mut engine = builder.initialize(|vb| LanguageModel::<A>::new(config, vb), args.ds.ds_config.as_path())?;

    if let (Some(path), 0) = (&args.export, engine.rank()) {
        engine.check_export(path)?;
    }
    let seed = args.seed.unwrap_or(engine.config().seed);
    // If the parameters are in files, all of them would be read once for each token of the sample.
    let in_files = engine.memory_report().row(MemoryKind::Parameters).file.held > 0;
    let sample = args.sample.unwrap_or(if data.is_byte_level() && !in_files { 200 } else { 0 });
    let text = data.is_byte_level();
    if text && vocab != BYTES && engine.rank() == 0 {
        say(format!("text is read as bytes, so only {BYTES} tokens occur; the model has a vocabulary of {vocab}"))?;
    }
    let mut prompt = vec![];
    data.extend(0, data.len().min(16).min(ctx), &mut prompt);
    let order = match args.order {
        OrderFlag::Shuffled => SampleOrder::Shuffled { seed },
        OrderFlag::Sequential => SampleOrder::Sequential,
    };
    let shape = BatchShape::new(&engine.config().batch, engine.world_size(), engine.rank());
    let mut loader = Loader::new(data, order, shape, seq_len, vocab, engine.device())?;

    if let Some(dir) = &args.save {
        // Checked now rather than after hours of training.
        engine.check_save_dir(dir)?;
    }
    if let (true, Some(dir)) = (args.resume, &args.save)
        && let Some(loaded) = engine.load_checkpoint(dir, None, &LoadOptions::default())?
    {
        if engine.rank() == 0 {
            say(format!("continues after step {}: {}", engine.global_steps(), loaded.path.display()))?;
        }
    }
    if engine.global_samples() > 0 {
        // The run continues from a checkpoint, or with the state of other islands.
        loader.resume(engine.global_samples());
    }
    if train(&mut engine, &mut loader, args, seq_len, &sizes)? == Ended::Stopped {
        if engine.rank() == 0 {
            let steps = engine.global_steps();
            say(format!("stopped by a signal: step {steps} is saved, and --resume continues from there"))?;
        }
        return Ok(Ended::Stopped);
    }
    if args.export.is_some() || sample > 0 {
        // With local steps, this gives all islands the same weights.
        engine.synchronize_islands()?;
    }
    if let Some(path) = &args.export {
        engine.export_safetensors(path)?;
    }
    // Every rank generates, because at stage 3 a forward pass gathers parameters from all ranks. All ranks draw the same
    // tokens.
    if sample > 0 {
        let tokens = generate(&mut engine, prompt, sample, seed)?;
        if engine.rank() == 0 {
            say(if text { as_text(&tokens) } else { format!("{tokens:?}") })?;
        }
    }
    Ok(Ended::Trained)
}

/// Returns a warning from rank 0 if the model's training state needs more memory than is available, according to the
/// estimate. Problems with the configuration are reported elsewhere.
fn too_large<A: Architecture>(args: &Args, config: &A::Config, run_values: &RunValues) -> Option<String> {
    let env = RankEnv::from_env().ok().filter(|env| env.rank == 0)?;
    let ds_config = Config::load_for(args.ds.ds_config.as_path(), env.world_size, run_values).ok()?;
    let shapes = Shapes::of("model", |vb| LanguageModel::<A>::new(config, vb)).ok()?;
    let estimate = Estimate::new(&shapes, &ds_config).ok()?;
    let (needs, left) = (estimate.host_bytes() as f64 * env.world_size as f64, available_memory()? as f64);
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    (needs > left).then(|| {
        format!(
            "the training state needs {:.1} GiB of memory and {:.1} GiB are available; use a smaller model, more \
             sharding or offload (zerorun estimate)",
            gib(needs),
            gib(left)
        )
    })
}

/// Returns the preset, modified by the flags.
fn gpt_config(args: &Args) -> anyhow::Result<GptConfig> {
    let preset = GptConfig::preset(args.model.as_deref().unwrap_or("nano"))?;
    check_context(args)?;
    let llamas_own = args.n_kv_head.is_none() && args.n_inner.is_none();
    anyhow::ensure!(llamas_own, "a GPT-2 has no --n_kv_head and no --n_inner; leave them out, or give --arch llama");
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
    let preset = LlamaConfig::preset(args.model.as_deref().unwrap_or("llama-nano"))?;
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
    anyhow::ensure!(args.ctx != Some(0), "--ctx is 0; a sample has at least one token: give 1 or more");
    Ok(())
}

/// Runs optimizer steps up to number `args.steps`, each reported by rank 0. With --save, SIGTERM and SIGINT end
/// training after a checkpoint.
fn train<A: Architecture>(
    engine: &mut Engine<LanguageModel<A>>,
    loader: &mut Loader,
    args: &Args,
    seq_len: usize,
    sizes: &Value,
) -> anyhow::Result<Ended> {
    let first = engine.rank() == 0;
    let mut metrics = match &args.metrics {
        Some(path) if first && args.resume => Some(MetricsWriter::resume(path, engine.global_steps())?),
        Some(path) if first => Some(MetricsWriter::create(path)?),
        _ => None,
    };
    let mut progress = if first { Progress::new(args.steps, None) } else { Progress::silent() };
    let batch = engine.config().batch;
    let tokens_per_step = (batch.train_batch_size * seq_len) as f64;
    let start = Instant::now();

    let (first_step, skipped_before) = (engine.global_steps(), engine.skipped_steps());
    for step in first_step..args.steps {
        if args.save.is_some() && engine.stop_requested()? {
            engine.wait_for_checkpoint()?;
            if step > first_step && !is_due(step, args) {
                save(engine, args, sizes)?;
            }
            progress.finish();
            return Ok(Ended::Stopped);
        }
        let step_start = Instant::now();
        let files_before = engine.offload_report();
        let (lr, loss_scale) = (engine.lr()[0], engine.loss_scale());
        let mut loss_sum = 0.0;
        for _ in 0..batch.gradient_accumulation_steps {
            let batch = loader.next().context("the data ended")??;
            let loss = engine.forward(|model| model.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            loss_sum += f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        }
        let over_ranks = gather(engine, loss_sum / batch.gradient_accumulation_steps as f64)?;
        let timings = engine.timings();
        let files = engine.offload_report().since(&files_before);
        let line = StepMetrics {
            step,
            loss: over_ranks.loss,
            lr,
            grad_norm: engine.global_grad_norm(),
            loss_scale,
            skipped: !engine.was_step_applied(),
            tokens_per_s: tokens_per_step / step_start.elapsed().as_secs_f64(),
            forward_ms: timings.forward_ms,
            backward_ms: timings.backward_ms,
            step_ms: timings.step_ms,
            comm_ms: timings.comm_ms,
            disk_ms: timings.disk_ms,
            disk_read_bytes: files.bytes_read,
            disk_written_bytes: files.bytes_written,
            disk_bytes_per_s: files.bytes_per_s(),
            rss_peak_bytes: over_ranks.rss_peak_bytes,
        };
        write(&mut metrics, &line);
        progress
            .step(step + 1, || format!("loss {:.4} lr {:.3e} {:.0} tokens/s", line.loss, line.lr, line.tokens_per_s));
        if is_due(step + 1, args) {
            save(engine, args, sizes)?;
        }
    }
    engine.wait_for_checkpoint()?;
    engine.wait_for_upload()?;
    progress.finish();
    let files = engine.offload_report();
    if first && files != OffloadReport::default() {
        say(files)?;
    }
    let summary = json!({
        "summary": true,
        "world_size": engine.world_size(),
        "steps": args.steps,
        "skipped_steps": engine.skipped_steps(),
        "seconds": start.elapsed().as_secs_f64(),
        "memory": engine.memory_report(),
        "comm": engine.comm_report(),
        "offload": engine.offload_report(),
    });
    write(&mut metrics, &summary);
    let (made, skipped) = (args.steps.saturating_sub(first_step), engine.skipped_steps() - skipped_before);
    if made > 0 && skipped == made {
        return Err(
            EngineError::NothingLearned { steps: made, adapts: engine.config().precision.adapts_loss_scale() }.into()
        );
    }
    Ok(Ended::Trained)
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
fn save<M>(engine: &mut Engine<M>, args: &Args, sizes: &Value) -> anyhow::Result<()> {
    let Some(dir) = &args.save else { return Ok(()) };
    let steps = engine.global_steps();
    let in_background = steps != args.steps && is_due(steps, args);
    let options = SaveOptions { in_background, keep: args.keep.map(NonZeroUsize::get), ..SaveOptions::default() };
    engine.save_checkpoint_with(dir, None, json!({ "model": sizes }), &options)?;
    Ok(())
}

/// Returns the mean loss and the largest memory over all ranks. Collective.
fn gather<M>(engine: &Engine<M>, loss: f64) -> anyhow::Result<OverRanks> {
    let memory = rss_peak_bytes().unwrap_or(0) as f64;
    let ranks = engine.gather_f64(&[loss, memory])?;
    let loss = ranks.iter().map(|rank| rank[0]).sum::<f64>() / ranks.len() as f64;
    let memory = ranks.iter().fold(0.0, |most: f64, rank| most.max(rank[1])) as u64;
    Ok(OverRanks { loss, rss_peak_bytes: (memory > 0).then_some(memory) })
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
