//! Fine-tunes a model in Hugging Face format with low-rank adapters, as `zerorun finetune` does.
//!
//!     zerorun --num_ranks 2 examples/finetune.rs SmolLM2-135M-Instruct chats.jsonl adapter --steps 100

use candle_zero::comm::{self, RankEnv};
use candle_zero::runs::RunSpec;
use candle_zero_finetune::{FineTune, Options, PreparedRun, Source, TrainingLength, TuningMethod};
use clap::Parser;
use std::path::PathBuf;

#[derive(Parser)]
struct Args {
    /// A folder with config.json and safetensors files, or a GGUF file
    model: PathBuf,
    /// Conversations as JSON lines, or in another format that `zerorun data show` recognizes
    data: String,
    /// Folder for the adapter
    out: PathBuf,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Settings of the adapter
    #[arg(long, default_value = "r=16,alpha=32")]
    lora: String,
    /// A DeepSpeed configuration [default: stage and offload are chosen from the available memory]
    #[arg(long = "ds_config")]
    ds_config: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let run = args.model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let options = Options {
        run: Some(RunSpec::by_default(&run)),
        data: vec![Source::parse(&args.data)?],
        method: TuningMethod::Lora(args.lora.parse()?),
        length: TrainingLength::Steps(args.steps),
        ds_config: args.ds_config,
        ..Options::new(args.model, args.out)
    };
    // This tokenizes the data once for all ranks, and checks all inputs.
    let prepared = PreparedRun::new(options, &mut |_| ())?;
    let comm = comm::from_env(&RankEnv::from_env()?)?;
    let mut run = FineTune::start(prepared, comm)?;
    while let Some(step) = run.step()? {
        if run.engine().rank() == 0 {
            println!("step {} loss {:.4} {:.0} tokens/s", step.step + 1, step.loss, step.tokens_per_s);
        }
    }
    run.finish()?;
    Ok(())
}
