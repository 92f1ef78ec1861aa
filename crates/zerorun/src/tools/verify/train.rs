//! A rank of one row: trains, and writes its log.

use super::compare::RankResults;
use candle_core::DType;
use candle_zero::data::{BatchShape, Loader, SampleOrder, TokenData};
use candle_zero::memory::MemoryReport;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::{Engine, Result};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// The name of the configuration file in a row's folder.
pub(super) const CONFIG: &str = "ds_config.json";
/// The number of tokens per sample.
const TOKENS_PER_SAMPLE: usize = 48;

/// Returns the file of a rank's log.
pub(super) fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Trains with the configuration in `folder` for `steps` optimizer steps, on the embedded corpus.
pub(super) fn run(folder: &Path, steps: u32) -> Result<()> {
    // Engine messages would appear between the lines of the table.
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::default());
    let sizes = GptConfig::preset("nano")?;
    let mut engine = Engine::initialize(|vb| Gpt::new(&sizes, vb), folder.join(CONFIG))?;
    let batch = engine.config().batch;
    let shape = BatchShape::new(&batch, engine.world_size(), engine.rank());
    let order = SampleOrder::Shuffled { seed: engine.config().seed };
    let loader = Loader::new(TokenData::embedded(), order, shape, TOKENS_PER_SAMPLE, sizes.vocab, engine.device())?;
    let mut log = RankResults { names: engine.parameter_names(), ..RankResults::default() };
    let mut times = Vec::new();
    for step in 0..u64::from(steps) {
        let mut losses = Vec::new();
        for micro_step in 0..batch.gradient_accumulation_steps {
            let batch = loader.batch(step, micro_step)?;
            let loss = engine.forward(|model| model.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
        }
        log.losses.push(losses);
        let hash = |param| Ok(XxHash3_64::oneshot(engine.whole_parameter(param)?.as_ref().as_bytes()));
        log.parameters.push((0..log.names.len()).map(hash).collect::<Result<_>>()?);
        let time = engine.timings();
        times.push(time.forward_ms + time.backward_ms + time.step_ms);
    }
    times.sort_by(f64::total_cmp);
    log.ms_per_step = times[times.len() / 2];
    let memory: MemoryReport = engine.memory_report();
    log.peak_bytes = memory.model_state_peak();
    log.file_bytes = memory.rows.iter().map(|row| row.file.peak).sum();
    log.write(&file(folder, engine.rank()))
}
