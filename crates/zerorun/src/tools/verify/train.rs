//! A rank of one of the jobs that `zerorun verify` compares: trains, and writes its log.

use super::compare::RankResults;
use candle_core::{DType, Device};
use candle_zero::config::Config;
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
use candle_zero::engine::PipelineEngine;
use candle_zero::models::{DecoderBatch, Gpt, GptConfig, decoder_pipeline};
use candle_zero::{Engine, Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Instant;
use twox_hash::XxHash3_64;

/// The name of the configuration file in a row's folder.
pub(super) const CONFIG: &str = "ds_config.json";
/// The number of tokens per sample.
const TOKENS_PER_SAMPLE: usize = 48;

/// Returns the file of a rank's log.
pub(super) fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

fn sizes() -> Result<GptConfig> {
    GptConfig::preset("nano")
}

/// Returns the number of layers that can be divided among the ranks of a pipeline.
pub(super) fn layers() -> Result<usize> {
    Ok(decoder_pipeline(&sizes()?)?.len())
}

/// Trains with the configuration in `folder` for `steps` optimizer steps, on the embedded corpus.
pub(super) fn run(folder: &Path, steps: u32) -> Result<()> {
    // Engine messages would appear between the lines of the table.
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::default());
    let path = folder.join(CONFIG);
    let unreadable = |source| Error::Io { action: "read", path: path.clone(), source };
    let text = std::fs::read(&path).map_err(unreadable)?;
    let config: Value = serde_json::from_slice(&text).map_err(|error| unreadable(error.into()))?;
    match config.get("pipeline") {
        Some(_) => in_pipeline(folder, steps),
        None => data_parallel(folder, steps),
    }
}

fn data_parallel(folder: &Path, steps: u32) -> Result<()> {
    let sizes = sizes()?;
    let mut engine = Engine::initialize(|vb| Gpt::new(&sizes, vb), folder.join(CONFIG))?;
    let batch = engine.config().batch;
    let loader = loader(engine.config(), (engine.rank(), engine.world_size()), engine.device())?;
    let mut log = RankResults { names: engine.parameter_names(), ..RankResults::default() };
    let mut times = Vec::new();
    for step in 0..u64::from(steps) {
        let mut losses = Vec::new();
        for micro_step in 0..batch.gradient_accumulation_steps {
            let batch = loader.batch(step, micro_step)?;
            let loss = engine.forward(|model| model.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            losses.push(f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?).to_bits());
        }
        log.losses.push(losses);
        let hash = |param| Ok(XxHash3_64::oneshot(engine.whole_parameter(param)?.as_ref().as_bytes()));
        log.parameters.push((0..log.names.len()).map(hash).collect::<Result<_>>()?);
        let time = engine.timings();
        times.push(time.forward_ms + time.backward_ms + time.step_ms);
    }
    log.complete(times, &engine.memory_report());
    log.write(&file(folder, engine.rank()))
}

fn in_pipeline(folder: &Path, steps: u32) -> Result<()> {
    let mut engine = Engine::builder().initialize_pipeline(decoder_pipeline(&sizes()?)?, folder.join(CONFIG))?;
    let loader = loader(engine.config(), engine.data_position(), engine.device())?;
    let mut log = RankResults { names: engine.parameter_names(), ..RankResults::default() };
    let mut times = Vec::new();
    for step in 0..u64::from(steps) {
        let start = Instant::now();
        let loss = engine.train_batch(|micro_batch| {
            let batch = loader.batch(step, micro_batch)?;
            Ok(DecoderBatch::new(batch.inputs, batch.targets))
        })?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        log.losses.push(vec![loss.to_bits()]);
        let hashes = log.names.iter().filter_map(|name| parameter_hash(&mut engine, name).transpose());
        log.parameters.push(hashes.collect::<Result<_>>()?);
    }
    log.complete(times, &engine.memory_report());
    log.write(&file(folder, engine.position().0))
}

/// Returns the loader of part `position` of the data, which is divided into `parts` parts.
fn loader(config: &Config, (position, parts): (usize, usize), device: &Device) -> Result<Loader> {
    let shape = BatchPartition::new(&config.batch, parts, position);
    let order = SampleOrder::Shuffled { seed: config.seed };
    Loader::new(TokenData::embedded(), order, shape, TOKENS_PER_SAMPLE, sizes()?.vocab, device)
}

/// Returns a hash of a parameter, if this rank has it.
fn parameter_hash(engine: &mut PipelineEngine<DecoderBatch>, name: &str) -> Result<Option<u64>> {
    let Some(values) = engine.parameter(name)? else { return Ok(None) };
    let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
    Ok(Some(XxHash3_64::oneshot(&bytes)))
}
