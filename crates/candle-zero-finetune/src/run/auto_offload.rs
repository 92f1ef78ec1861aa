//! Chooses the stage and the offload of a run without a DeepSpeed configuration and, on several hosts, how the hosts
//! work together.

use super::engine_config;
use super::memory_fit::{MemoryFitInput, memory_of_rank};
use super::options::{Objective, TuningMethod};
use super::pipeline_fit::{PipelineFitInput, PipelineShape};
use super::prepare::{PreparedRun, StartModel};
use super::traffic_estimate::HostNetwork;
use crate::data::sample_cache::cache_root;
use crate::error::Result;
use crate::model::classifier_config::ClassifierConfig;
use crate::peft::qlora_weight_selection::{PACKING, quantized_except};
use candle_zero::comm::Communicator;
use candle_zero::comm::agree::ranks_per_host;
use candle_zero::comm::stats::network_bench::rate_between_hosts;
use candle_zero::config::island_slots;
use candle_zero::estimate::Shapes;
use candle_zero::models::{ActivationBytesOptions, Decoder, DecoderClassifier, DecoderConfig};
use candle_zero::util::fnv1a;
use serde_json::Value;

/// The number of ranks of a run, their distribution over hosts, and the speed of the network between the hosts.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunTopology {
    pub world: usize,
    /// The number of ranks on each host, or `world` if the hosts have different numbers of ranks.
    pub per_host: usize,
    /// The bytes per second that a host receives from the others, if this rate was measured.
    pub network: Option<f64>,
}

/// The number of bytes of an all-gather that measures the network. The measurement takes about 0.1 s at 1 Gbit/s.
const MEASURED_BYTES: usize = 4 << 20;

impl RunTopology {
    /// Returns the topology of a communicator's ranks. Measures the network between hosts if `measures` is set, which
    /// must be the same on all ranks. Collective.
    pub fn of(comm: &dyn Communicator, measures: bool) -> Result<Self> {
        let (world, hosts) = (comm.size(), ranks_per_host(comm)?);
        let per_host = if hosts.iter().all(|ranks| *ranks == hosts[0]) { hosts[0] } else { world };
        let network = if measures && per_host < world { rate_between_hosts(comm, MEASURED_BYTES)? } else { None };
        Ok(Self { world, per_host, network })
    }
}

/// Returns the number of bytes that every rank may use, which is the minimum over all ranks. Collective.
pub(super) fn memory_of_all(comm: &dyn Communicator) -> Result<u64> {
    let own_memory = memory_of_rank(comm.ranks_here().len()).unwrap_or(u64::MAX) as f64;
    let memory_of_ranks = comm.gather_f64(vec![own_memory]).wait()?;
    Ok(memory_of_ranks.into_iter().flatten().fold(own_memory, f64::min) as u64)
}

/// The configuration of a run, with everything that was chosen.
pub(super) struct ChosenConfig {
    pub config: Value,
    pub pipeline: Option<PipelineShape>,
    /// The choice and its reason, if there was a choice.
    pub explanation: Option<String>,
}

/// Completes `config` with the stage and offload that fit into `memory` bytes on each rank, in a pipeline of `stages`
/// ranks if that is requested. On several hosts, also chooses a pipeline without a request if a host cannot hold the
/// model. Returns `config` unchanged for an encoder, or if the user has provided a configuration.
///
/// # Errors
/// Errors of [`MemoryFitInput::choose`]; a pipeline that is not possible or does not fit.
pub(super) fn choose_config(
    prepared: &PreparedRun,
    config: Value,
    memory: u64,
    (ranks, stages): (RunTopology, Option<usize>),
) -> Result<ChosenConfig> {
    let options = &prepared.options;
    let unchanged = |config| Ok(ChosenConfig { config, pipeline: None, explanation: None });
    let sizes = match &prepared.start {
        StartModel::Decoder { config, .. } => config.clone(),
        StartModel::Classifier { .. } if options.ds_config.is_some() => return unchanged(config),
        // A classifier's labels take the place of the vocabulary.
        StartModel::Classifier { config: ClassifierConfig::Decoder(sizes), .. } => {
            DecoderConfig { vocab: sizes.labels.len(), ..sizes.decoder.clone() }
        }
        StartModel::Classifier { .. } => return unchanged(config),
    };
    let sizes = &sizes;
    let is_trained = prepared.start.trained(&options.method);
    let trained = |shapes: Shapes| shapes.trainable(|name, _| is_trained(name));
    let prepare = |shapes: Shapes| match options.method {
        TuningMethod::Full => shapes,
        TuningMethod::Lora(_) => trained(shapes),
        TuningMethod::Qlora(_) => trained(shapes).quantized_by(PACKING, quantized_except(&options.keep_layers)),
    };
    let (dtype, trains_base) = (options.precision.dtype(), options.method == TuningMethod::Full);
    let values = engine_config::run_values(options, sizes.hidden_size, 1, 2);
    let (recompute, world) = (options.recompute, ranks.world);
    let pipeline = PipelineFitInput {
        sizes,
        prepare: &prepare,
        config: &config,
        values: &values,
        dtype,
        trains_base,
        recompute,
        world,
        memory,
    };
    let network = HostNetwork { hosts: world / ranks.per_host, rate: ranks.network };
    match (stages, &options.ds_config) {
        (Some(_), Some(_)) => {
            // Problems are reported before any rank has built its part.
            let shape = PipelineShape::of(&pipeline.estimate(&config)?)?;
            return Ok(ChosenConfig { config, pipeline: Some(shape), explanation: None });
        }
        (None, Some(_)) => return Ok(ChosenConfig { config, pipeline: None, explanation: None }),
        (Some(stages), None) => {
            let fit = pipeline.choose(&[stages])?.map_err(|smallest| smallest.refused(memory))?;
            let mut explanation = fit.explained(memory);
            if network.hosts > 1 {
                explanation += &network.describe_pipeline_traffic(pipeline.bytes_between_hosts(network.hosts));
            }
            return Ok(ChosenConfig { config: fit.config, pipeline: Some(fit.shape), explanation: Some(explanation) });
        }
        (None, None) => {}
    }
    let shapes = prepare(match &prepared.start {
        StartModel::Classifier { config: ClassifierConfig::Decoder(sizes), .. } => {
            Shapes::of("model", |vb| DecoderClassifier::new(sizes, vb))?
        }
        _ => Shapes::of("model", |vb| Decoder::new(sizes, vb))?,
    });
    // A preference pair is two rows.
    let texts = if matches!(options.objective, Objective::Prefer { .. }) { 2 } else { 1 };
    let element = dtype.size_in_bytes();
    let activations = |rows: usize, recompute: bool| {
        let tokens = rows.saturating_mul(texts).saturating_mul(sizes.ctx);
        sizes.activation_bytes(ActivationBytesOptions { tokens, element, recompute, trains_base })
    };
    // Each output has a separate folder, because an offload folder serves only one job at a time.
    let out = std::path::absolute(&options.out).unwrap_or_else(|_| options.out.clone());
    let folder = cache_root()?.join(format!("offload/{:016x}", fnv1a(out.as_os_str().as_encoded_bytes())));
    let local_steps = config.get("local_steps").filter(|section| !section.is_null());
    let may_divide = options.objective == Objective::Generate && options.pipeline.is_none() && local_steps.is_none();
    let divisions = if may_divide { divisions(sizes.blocks.len(), world, network.hosts) } else { Vec::new() };
    let demand = MemoryFitInput {
        shapes: &shapes,
        config: &config,
        recompute,
        ranks: world,
        ranks_per_host: ranks.per_host,
        islands: islands_of_job(&config, network.hosts),
        network: ranks.network,
        pipeline: (!divisions.is_empty()).then(|| pipeline.bytes_between_hosts(network.hosts)),
        activations: &activations,
        memory,
        folder: &folder,
    };
    choose(&demand, &pipeline, &divisions)
}

/// Returns the number of islands that the ranks of this job form. If the islands meet at a server, the job is one
/// island.
fn islands_of_job(config: &Value, hosts: usize) -> usize {
    match config.get("local_steps").and_then(Value::as_object) {
        Some(section) if island_slots(config).is_none() => {
            section.get("islands").and_then(Value::as_f64).map_or(hosts, |islands| islands.max(1.0) as usize)
        }
        _ => 1,
    }
}

/// Returns the numbers of ranks along a pipeline, smallest first, with which every host holds a part of a model with
/// `blocks` blocks. On one host, there are none.
fn divisions(blocks: usize, world: usize, hosts: usize) -> Vec<usize> {
    if hosts < 2 {
        return Vec::new();
    }
    (hosts..=world.min(blocks)).filter(|ranks| ranks.is_multiple_of(hosts) && world.is_multiple_of(*ranks)).collect()
}

/// Chooses a pipeline if the ranks of a host cannot hold the model, but those of all hosts can with one of these
/// numbers of ranks along the pipeline. Otherwise, chooses as [`MemoryFitInput::choose`] does.
fn choose(demand: &MemoryFitInput<'_>, pipeline: &PipelineFitInput<'_>, divisions: &[usize]) -> Result<ChosenConfig> {
    if !divisions.is_empty()
        && let Some(on_host) = demand.too_large_for_a_host()?
        // If the model cannot be divided, the other choices remain.
        && let Ok(Ok(fit)) = pipeline.choose(divisions)
    {
        let network = demand.host_network();
        let explanation = format!(
            "{}; {on_host}{}{}",
            fit.explained(demand.memory),
            network.describe_pipeline_traffic(pipeline.bytes_between_hosts(network.hosts)),
            demand.without_pipeline()?
        );
        return Ok(ChosenConfig { config: fit.config, pipeline: Some(fit.shape), explanation: Some(explanation) });
    }
    let choice = demand.choose()?;
    Ok(ChosenConfig { config: choice.config, pipeline: None, explanation: Some(choice.explanation) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::DType;
    use candle_zero::config::RunValues;
    use candle_zero::models::{DecoderConfig, IntoDecoderConfig, LlamaConfig};
    use candle_zero::nn::LoraConfig;
    use candle_zero::nn::is_adapter;
    use serde_json::json;
    use std::path::Path;

    /// Chooses for four ranks on two hosts with this memory per rank, connected by a link of 1 Gbit/s.
    fn on_two_hosts(trains_base: bool, gib: f64) -> (Option<PipelineShape>, String) {
        let config = LlamaConfig { ctx: 1024, ..LlamaConfig::preset("llama-3.2-1b").unwrap() };
        let lora = (!trains_base).then(LoraConfig::default);
        let sizes = DecoderConfig { lora, ..config.decoder().unwrap() };
        let prepare = |shapes: Shapes| if trains_base { shapes } else { shapes.trainable(|name, _| is_adapter(name)) };
        let config = json!({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
                            "optimizer": {"type": "AdamW"}});
        let (values, memory, world, recompute) = (RunValues::default(), (gib * f64::from(1 << 30)) as u64, 4, None);
        let pipeline = PipelineFitInput {
            sizes: &sizes,
            prepare: &prepare,
            config: &config,
            values: &values,
            dtype: DType::BF16,
            trains_base,
            recompute,
            world,
            memory,
        };
        let shapes = prepare(Shapes::of("model", |vb| Decoder::new(&sizes, vb)).unwrap());
        let activations = |rows: usize, recompute: bool| {
            sizes.activation_bytes(ActivationBytesOptions { tokens: rows * 1024, element: 2, recompute, trains_base })
        };
        let demand = MemoryFitInput {
            shapes: &shapes,
            config: &config,
            recompute,
            ranks: world,
            ranks_per_host: 2,
            islands: 1,
            network: Some(117e6),
            pipeline: Some(pipeline.bytes_between_hosts(2)),
            activations: &activations,
            memory,
            folder: Path::new("/scratch"),
        };
        let choice = choose(&demand, &pipeline, &divisions(sizes.blocks.len(), world, 2)).unwrap();
        assert_eq!(choice.config.get("pipeline").is_some(), choice.pipeline.is_some());
        (choice.pipeline, choice.explanation.unwrap())
    }

    #[test]
    fn hosts_form_a_pipeline_only_if_one_of_them_cannot_hold_the_model() {
        let (shape, why) = on_two_hosts(false, 4.0);
        assert_eq!(shape, None);
        insta::assert_snapshot!(why, @"stage 3, micro batches of 1 row: at most 3.0 GiB of 4.0 GiB per rank; stage 0, micro batches of 1 row would need 3.6 GiB. Each of the 2 hosts holds all shards (mics_shard_size), so in each step, a host receives only gradients, 21.5 MiB (0.19 s at the measured 111.6 MiB/s); with shards spread over all hosts, it would receive 3.4 GiB (30.88 s at the measured 111.6 MiB/s); in a pipeline (--pipeline), 32.0 MiB (0.29 s at the measured 111.6 MiB/s)");
        let (shape, why) = on_two_hosts(false, 2.25);
        assert_eq!(shape.map(|shape| shape.ranks), Some(4), "{why}");
        insta::assert_snapshot!(why, @"a pipeline of 4 ranks, stage 0, 8 micro batches of 1 row, blocks recomputed in the backward pass: at most 1.3 GiB of 2.2 GiB per rank; ranks wait for 37 % of a step; a host that holds the complete model would need 2.1 GiB per rank (stage 3, micro batches of 1 row, blocks recomputed in the backward pass). In each step, each of the 2 hosts receives only activations and their gradients, at most 32.0 MiB (0.29 s at the measured 111.6 MiB/s); with shards spread over all hosts (stage 3), it would receive 3.4 GiB (30.88 s at the measured 111.6 MiB/s), and if each host held all shards (mics_shard_size), 21.5 MiB (0.19 s at the measured 111.6 MiB/s)");
        // All hosts together cannot hold the states of all weights either.
        let (shape, why) = on_two_hosts(true, 8.0);
        assert_eq!(shape, None);
        insta::assert_snapshot!(why, @"stage 3 with optimizer states in files under /scratch, micro batches of 1 row: at most 5.5 GiB of 8.0 GiB per rank; stage 0, micro batches of 1 row would need 21.5 GiB. Each of the 2 hosts holds all shards (mics_shard_size), so in each step, a host receives only gradients, 2.3 GiB (21.13 s at the measured 111.6 MiB/s); with shards spread over all hosts, it would receive 5.6 GiB (51.61 s at the measured 111.6 MiB/s); in a pipeline (--pipeline), 64.0 MiB (0.57 s at the measured 111.6 MiB/s)");
        let (shape, why) = on_two_hosts(true, 64.0);
        assert_eq!(shape, None, "{why}");
    }

    #[test]
    fn pipelines_across_hosts_have_a_part_of_the_model_on_each_host() {
        assert_eq!(divisions(16, 8, 2), [2, 4, 8]);
        assert_eq!(divisions(16, 12, 3), [3, 6, 12]);
        assert_eq!(divisions(4, 12, 3), [3]);
        assert!(divisions(16, 8, 1).is_empty());
    }
}
