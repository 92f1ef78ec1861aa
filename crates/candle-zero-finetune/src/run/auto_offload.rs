//! Chooses the stage and the offload of a run without a DeepSpeed configuration.

use super::memory_fit::{MemoryDemand, memory_of_rank};
use super::options::{Objective, TuningMethod};
use super::prepare::{PreparedRun, StartModel};
use crate::data::sample_cache::own_cache;
use crate::error::Result;
use crate::model::classifier_config::ClassifierConfig;
use crate::peft::qlora::{PACKING, is_quantized};
use candle_zero::comm::Communicator;
use candle_zero::comm::agree::ranks_per_host;
use candle_zero::comm::stats::network_bench::rate_between_hosts;
use candle_zero::estimate::Shapes;
use candle_zero::models::{ActivationPass, Decoder, DecoderClassifier, DecoderConfig};
use candle_zero::util::fnv1a;
use serde_json::Value;

/// The ranks of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunRanks {
    pub world: usize,
    /// This rank.
    pub rank: usize,
    /// The number of ranks on each host; all ranks if hosts have different numbers.
    pub per_host: usize,
    /// The bytes per second that a host receives from the others, if this rate was measured.
    pub network: Option<f64>,
}

/// The number of bytes of an all-gather that measures the network. The measurement takes 0.1 s at 1 Gbit/s.
const MEASURED_BYTES: usize = 4 << 20;

impl RunRanks {
    /// Returns the ranks of a communicator. Measures the network between hosts if `measures` is set, which must be the
    /// same on all ranks. Collective.
    pub fn of(comm: &dyn Communicator, measures: bool) -> Result<Self> {
        let (world, hosts) = (comm.size(), ranks_per_host(comm)?);
        let per_host = if hosts.iter().all(|ranks| *ranks == hosts[0]) { hosts[0] } else { world };
        let network = if measures && per_host < world { rate_between_hosts(comm, MEASURED_BYTES)? } else { None };
        Ok(Self { world, rank: comm.rank(), per_host, network })
    }
}

/// Returns the number of bytes that every rank may use, which is the minimum over all ranks. Collective.
pub(super) fn memory_of_all(comm: &dyn Communicator) -> Result<u64> {
    let own = memory_of_rank(comm.ranks_here().len()).unwrap_or(u64::MAX) as f64;
    let of_ranks = comm.gather_f64(vec![own]).wait()?;
    Ok(of_ranks.into_iter().flatten().fold(own, f64::min) as u64)
}

/// Returns `config` with the stage and offload that fit into `memory` bytes on each rank, and the reason. Returns it
/// unchanged for an encoder, or if the user has provided a configuration.
///
/// # Errors
/// Errors of [`MemoryDemand::choose`].
pub(super) fn fitted(
    prepared: &PreparedRun,
    config: Value,
    memory: u64,
    ranks: RunRanks,
) -> Result<(Value, Option<String>)> {
    let options = &prepared.options;
    let (shapes, sizes) = match &prepared.start {
        _ if options.ds_config.is_some() => return Ok((config, None)),
        StartModel::Decoder { config, .. } => (Shapes::of("model", |vb| Decoder::new(config, vb))?, config.clone()),
        StartModel::Classifier { config: ClassifierConfig::Decoder(sizes), .. } => {
            // Its labels take the place of the vocabulary.
            let alike = DecoderConfig { vocab: sizes.labels.len(), ..sizes.decoder.clone() };
            (Shapes::of("model", |vb| DecoderClassifier::new(sizes, vb))?, alike)
        }
        StartModel::Classifier { .. } => return Ok((config, None)),
    };
    let is_trained = prepared.start.trained(&options.method);
    let trained = |shapes: Shapes| shapes.trainable(move |name, _| is_trained(name));
    let shapes = match options.method {
        TuningMethod::Full => shapes,
        TuningMethod::Lora(_) => trained(shapes),
        TuningMethod::Qlora(_) => trained(shapes).quantized_by(PACKING, is_quantized),
    };
    // A preference pair is two rows.
    let texts = if matches!(options.objective, Objective::Prefer { .. }) { 2 } else { 1 };
    let element = options.precision.dtype().size_in_bytes();
    let trains_base = options.method == TuningMethod::Full;
    let activations = |rows: usize, recompute: bool| {
        let tokens = rows.saturating_mul(texts).saturating_mul(sizes.ctx);
        sizes.activation_bytes(ActivationPass { tokens, element, recompute, trains_base })
    };
    // Each output has a separate folder, because an offload folder serves only one job at a time.
    let out = std::path::absolute(&options.out).unwrap_or_else(|_| options.out.clone());
    let folder = own_cache()?.join(format!("offload/{:016x}", fnv1a(out.as_os_str().as_encoded_bytes())));
    let (recompute, activations) = (options.recompute, &activations);
    let demand = MemoryDemand {
        shapes: &shapes,
        config: &config,
        recompute,
        ranks: ranks.world,
        ranks_per_host: ranks.per_host,
        network: ranks.network,
        activations,
        memory,
        folder: &folder,
    };
    let choice = demand.choose()?;
    Ok((choice.config, Some(choice.why)))
}
