//! A rank of a measured job: trains, and writes what it measured.

use super::super::super::model_size_flags::SizedPreset;
use crate::error::{Error, Result};
use candle_zero::Engine;
use candle_zero::candle_nn::VarBuilder;
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
use candle_zero::files::replace_unsynced;
use candle_zero::models::{Architecture, Gpt, LanguageModel, Llama};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The name of the configuration file in a job's folder.
pub(super) const CONFIG: &str = "ds_config.json";
/// The number of steps before the measured ones: the first step allocates buffers and records the order of units.
const WARM_UP_STEPS: u64 = 2;

/// The measurements of a rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RankMeasurement {
    /// The time of each measured step in milliseconds.
    pub(super) step_ms: Vec<f64>,
    /// The bytes of gradients and parameters that this rank sent in these steps.
    pub(super) sent_bytes: u64,
}

impl RankMeasurement {
    fn write(&self, path: &Path) -> Result<()> {
        let write = || replace_unsynced(path, "rank-", &serde_json::to_vec(self)?);
        write().map_err(|source| Error::Io { action: "write", path: path.into(), source })
    }

    /// Reads the measurements of all ranks of a job.
    pub(super) fn read_all(folder: &Path, ranks: usize) -> Result<Vec<Self>> {
        let read = |rank| {
            let path = file(folder, rank);
            let read = || Ok(serde_json::from_slice(&std::fs::read(&path)?)?);
            read().map_err(|source| Error::Io { action: "read", path: path.clone(), source })
        };
        (0..ranks).map(read).collect()
    }
}

/// Returns the file of a rank's measurement.
fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Trains the model with the configuration in `folder`.
pub(super) fn run(folder: &Path, model: &SizedPreset, seq_len: usize, steps: u64) -> Result<()> {
    // Engine messages would appear between the lines of the tool.
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::default());
    match model {
        SizedPreset::Gpt(_, config) => train(|vb| Gpt::new(config, vb), folder, (seq_len, config.vocab), steps),
        SizedPreset::Llama(_, config) => train(|vb| Llama::new(config, vb), folder, (seq_len, config.vocab), steps),
    }
}

fn train<A: Architecture>(
    build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<LanguageModel<A>>,
    folder: &Path,
    (seq_len, vocab): (usize, usize),
    steps: u64,
) -> Result<()> {
    let mut engine = Engine::initialize(build, folder.join(CONFIG))?;
    let batch = engine.config().batch;
    let shape = BatchPartition::new(&batch, engine.world_size(), engine.rank());
    let order = SampleOrder::Shuffled { seed: engine.config().seed };
    let loader = Loader::new(TokenData::embedded(), order, shape, seq_len, vocab, engine.device())?;
    let mut measured = RankMeasurement::default();
    let mut sent_before = 0;
    for step in 0..WARM_UP_STEPS + steps {
        if step == WARM_UP_STEPS {
            sent_before = engine.comm_report().data_wire_bytes();
        }
        let start = Instant::now();
        for micro_step in 0..batch.gradient_accumulation_steps {
            let batch = loader.batch(step, micro_step)?;
            let loss = engine.forward(|model| model.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        if step >= WARM_UP_STEPS {
            measured.step_ms.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    measured.sent_bytes = engine.comm_report().data_wire_bytes() - sent_before;
    measured.write(&file(folder, engine.rank()))
}
