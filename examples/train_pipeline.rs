//! Trains a GPT-2 whose blocks are divided among ranks: a pipeline, for hosts that are connected by a slow network.
//!
//!     zerorun --num_ranks 2 examples/train_pipeline.rs --ds_config ds_configs/pipeline.json --steps 100
//!
//! The section `pipeline` of the configuration determines how the blocks are divided. Every rank reads the data of its
//! pipeline: the first stage uses the inputs, and the last stage uses the targets. At the end, the model continues a
//! text.

use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::cli::DsArgs;
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
use candle_zero::models::{DecoderBatch, GptConfig, decoder_pipeline};
use candle_zero::monitor::MetricsWriter;
use candle_zero::runs::RunSpec;
use clap::Parser;
use serde_json::json;
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Trains a GPT-2 in a pipeline")]
struct Args {
    #[command(flatten)]
    ds: DsArgs,
    /// Size of the model: nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl
    #[arg(long, default_value = "nano")]
    model: String,
    /// A text file, a folder of text, or a .bin or .u16 file of 16-bit tokens [default: the embedded corpus]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Folder for checkpoints; one is saved at the end
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Also save a checkpoint every N optimizer steps
    #[arg(long = "save_every", alias = "save-every", value_name = "N", requires = "save",
          value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Resume from the newest checkpoint in the --save folder, or start from the beginning if there is none
    #[arg(long, requires = "save")]
    resume: bool,
    /// File for metrics, with one JSON line per optimizer step
    #[arg(long, value_name = "FILE.jsonl")]
    metrics: Option<PathBuf>,
    /// Number of tokens to generate at the end [default: 100 for text, 0 for token files]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
}

/// The temperature of the sample, slightly below 1, which favours likely tokens.
const TEMPERATURE: f64 = 0.8;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let model = GptConfig::preset(&args.model)?;
    let data = TokenData::open(args.data.as_deref())?;
    let is_text = data.is_byte_level();
    let run = RunSpec::by_default(&format!("train_pipeline-{}", args.model)).total_steps(args.steps);
    let builder = Engine::builder().run(run).same_on_all_ranks(data.name(), data.fingerprint());
    let mut engine = builder.initialize_pipeline(decoder_pipeline(&model)?, args.ds.ds_config.as_path())?;

    // The ranks of a pipeline train on the same micro batches, and different pipelines on different ones.
    let (pipeline, pipelines) = engine.data_position();
    let shape = BatchPartition::new(&engine.config().batch, pipelines, pipeline);
    let order = SampleOrder::Shuffled { seed: engine.config().seed };
    let mut loader = Loader::new(data, order, shape, model.ctx, model.vocab, engine.device())?;

    if let (true, Some(dir)) = (args.resume, &args.save)
        && let Some(loaded) = engine.load_checkpoint(dir, None, &LoadOptions::default())?
    {
        loader.resume(loaded.global_samples);
    }
    let first_step = engine.global_steps();
    let prints = engine.position().0 == 0 && pipeline == 0;
    let mut metrics = match &args.metrics {
        Some(path) if prints && args.resume => Some(MetricsWriter::resume(path, first_step)?),
        Some(path) if prints => Some(MetricsWriter::create(path)?),
        _ => None,
    };
    for step in first_step..args.steps {
        let loss = engine.train_batch(|micro_batch| {
            let batch = loader.batch(step - first_step, micro_batch)?;
            Ok(DecoderBatch::new(batch.inputs, batch.targets))
        })?;
        if let Some(metrics) = &mut metrics {
            metrics.write(&json!({"step": step, "loss": loss, "grad_norm": engine.global_grad_norm()}))?;
        }
        if prints && (step + 1).is_multiple_of(10) {
            println!("step {:4}  loss {loss:.5}", step + 1);
        }
        if let Some(dir) = &args.save
            && (step + 1 == args.steps || args.save_every.is_some_and(|every| (step + 1).is_multiple_of(every)))
        {
            engine.save_checkpoint(dir, None, json!(null))?;
        }
    }
    // All ranks must call `generate`, because each of them runs its own blocks for each token.
    let count = args.sample.unwrap_or(if is_text { 100 } else { 0 });
    if count > 0 {
        let tokens = engine.generate(&[u32::from(b'\n')], count, TEMPERATURE, engine.config().seed)?;
        if prints && is_text {
            let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(b'?')).collect();
            println!("sample: {:?}", String::from_utf8_lossy(&bytes));
        } else if prints {
            println!("sample: {tokens:?}");
        }
    }
    Ok(())
}
