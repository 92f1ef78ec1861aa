//! Chooses a stage, offload settings and a micro batch size that make a run fit into memory.
//!
//! Candidates are ordered by speed: everything in memory; everything in memory, with recomputed blocks; optimizer
//! states in files; both optimizer states and parameters in files. The first candidate that, according to [`Estimate`],
//! needs at most a fixed share of the memory is chosen. Smaller micro batches are tried before the next candidate,
//! because they cost little on a CPU.

use crate::error::{FinetuneError, Result};
use candle_zero::config::{Config, LocalStepsConfig};
use candle_zero::estimate::{Estimate, EstimateOptions, Shapes};
use candle_zero::util::format_bytes;
use serde_json::{Value, json};
use std::path::Path;

/// The input for choosing a stage, offload settings and a micro batch size: a run, and the memory that it may use.
#[non_exhaustive]
pub struct MemoryFitInput<'a> {
    /// The parameters, which of them are trained, and how the others are held.
    pub shapes: &'a Shapes,
    /// The configuration without what is chosen here: `zero_optimization` and `activation_checkpointing`. It contains
    /// `train_batch_size`. A `train_micro_batch_size_per_gpu` is kept; without one, it is chosen too.
    pub config: &'a Value,
    /// Whether blocks are recomputed in the backward pass, or `None` to choose.
    pub recompute: Option<bool>,
    /// The number of ranks of the job.
    pub ranks: usize,
    /// The number of ranks on each host.
    pub ranks_per_host: usize,
    /// The number of islands that these ranks form; 1 if they exchange gradients in every step, or if they form one of
    /// several islands that meet at a server.
    pub islands: usize,
    /// The bytes per second that a host receives from the others, if this rate is known.
    pub network: Option<f64>,
    /// The bytes that a host would receive in a step of a pipeline across the hosts, if such a pipeline is possible.
    pub pipeline: Option<u64>,
    /// A function that returns the size in bytes of the activations of a micro batch with this number of rows, with or
    /// without recomputed blocks. An example is
    /// [`DecoderConfig::activation_bytes`](candle_zero::models::DecoderConfig::activation_bytes).
    pub activations: &'a dyn Fn(usize, bool) -> usize,
    /// The bytes that a rank may use, for example from [`memory_of_rank`].
    pub memory: u64,
    /// A folder on a fast local disk for states that do not fit into memory.
    pub folder: &'a Path,
}

/// The stage, the offload settings and the micro batch size chosen for a [`MemoryFitInput`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MemoryFit {
    /// The complete configuration.
    pub config: Value,
    /// The value of `zero_optimization.stage`.
    pub stage: u8,
    /// Whether master weights, moments and gradient shards are in files.
    pub optimizer_in_files: bool,
    /// Whether parameter shards are in files.
    pub parameters_in_files: bool,
    /// Whether blocks are recomputed in the backward pass.
    pub recompute: bool,
    /// Whether each host holds all shards (`mics_shard_size`). If it does, gathers stay within each host.
    pub within_hosts: bool,
    /// The number of rows in a rank's micro batch.
    pub micro_batch: usize,
    /// The maximum memory of a rank in bytes.
    pub bytes: u64,
    /// A readable description of the choice and its reason.
    pub explanation: String,
}

/// The share of the memory that a choice may fill. The rest is for the program, data in transfer, and the allocator's
/// overhead.
pub(super) const USABLE_MEMORY: f64 = 0.8;

/// The number of elements that are prefetched if memory is scarce (the first elements of the next unit), and the size
/// of a sub-group if the optimizer states are in files.
const PREFETCHED_ELEMENTS: usize = 10_000_000;

const MICRO_BATCH: &str = "train_micro_batch_size_per_gpu";

impl MemoryFitInput<'_> {
    /// Returns the fastest choice that fits.
    ///
    /// # Errors
    /// Nothing fits, in which case the message contains the minimum memory; a configuration that cannot be used.
    pub fn choose(&self) -> Result<MemoryFit> {
        let max_bytes = (self.memory as f64 * USABLE_MEMORY) as u64;
        let sizes = self.micro_batches()?;
        let (mut first, mut smallest): (Option<MemoryFit>, Option<MemoryFit>) = (None, None);
        let candidates = self.candidates();
        // Gathers between hosts take the longest, so all candidates that keep the shards within each host, even those
        // with states in files, are tried before any that shards over all hosts.
        let over_all = |candidate: &PlacementCandidate| PlacementCandidate { shards: ShardRanks::All, ..*candidate };
        let over_all: Vec<_> = match self.ranks_per_host < self.island_ranks() {
            true => candidates.iter().filter(|candidate| candidate.placement.stage() == 3).map(over_all).collect(),
            false => Vec::new(),
        };
        for candidate in candidates.into_iter().chain(over_all) {
            for size in &sizes {
                let choice = self.needs(&candidate, *size)?;
                if choice.bytes <= max_bytes {
                    return self.with_reason(choice, first);
                }
                if smallest.as_ref().is_none_or(|smallest| choice.bytes < smallest.bytes) {
                    smallest = Some(choice.clone());
                }
                first.get_or_insert(choice);
            }
        }
        let smallest = smallest.map_or(0, |smallest| smallest.bytes);
        let needed = format_bytes((smallest as f64 / USABLE_MEMORY).ceil() as u64);
        let available = format_bytes(self.memory);
        Err(FinetuneError::NothingFits { ranks: self.ranks, needed, available }.into())
    }

    /// Returns the possible numbers of rows in a micro batch, largest first.
    pub(super) fn micro_batches(&self) -> Result<Vec<usize>> {
        let config = self.load(&json!({"stage": 0}), None, false)?;
        let batch = config.batch;
        let rows = batch.train_batch_size / config.world_size;
        let is_given = self.config.get(MICRO_BATCH).is_some();
        let is_allowed = |size: &usize| if is_given { *size == batch.train_micro_batch_size_per_gpu } else { true };
        let small = (1..=rows.isqrt()).filter(|size| rows.is_multiple_of(*size));
        let mut sizes: Vec<usize> = small.flat_map(|size| [size, rows / size]).filter(is_allowed).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        Ok(sizes)
    }

    fn candidates(&self) -> Vec<PlacementCandidate> {
        let in_memory = [
            StatePlacement::Memory(0),
            StatePlacement::Memory(1),
            StatePlacement::Memory(2),
            StatePlacement::Memory(3),
            StatePlacement::MinimalGathers,
        ];
        let is_useful = |placement: &StatePlacement| match placement {
            // Packed weights stay packed only at stage 3.
            _ if self.shapes.is_quantized() => placement.stage() == 3,
            // A single rank has no other ranks to shard with.
            StatePlacement::Memory(stage) => *stage == 0 || self.island_ranks() > 1,
            // Gathering less at a time saves nothing on a single rank, whose shards are as large as the parameters.
            StatePlacement::MinimalGathers => self.island_ranks() > 1,
            StatePlacement::OptimizerInFiles | StatePlacement::AllInFiles => true,
        };
        let in_memory: Vec<StatePlacement> = in_memory.into_iter().filter(is_useful).collect();
        let on_disk = [StatePlacement::OptimizerInFiles, StatePlacement::AllInFiles];
        let shards = match self.ranks_per_host < self.island_ranks() {
            true => ShardRanks::OfHost(self.ranks_per_host),
            false => ShardRanks::All,
        };
        let with = |recompute| {
            move |placement: &StatePlacement| PlacementCandidate { placement: *placement, recompute, shards }
        };
        let mut all: Vec<PlacementCandidate> = in_memory.iter().map(with(false)).collect();
        all.extend(in_memory.iter().map(with(true)));
        all.extend(on_disk.iter().flat_map(|placement| [with(false)(placement), with(true)(placement)]));
        all.retain(|candidate| self.recompute.is_none_or(|recompute| candidate.recompute == recompute));
        all
    }

    /// Returns the number of ranks among which states are sharded.
    pub(super) fn island_ranks(&self) -> usize {
        self.ranks / self.islands.max(1)
    }

    /// Returns the configuration with a section for parameters and states.
    fn config(&self, zero: &Value, micro_batch: Option<usize>, recompute: bool) -> Value {
        let mut config = self.config.clone();
        config["zero_optimization"] = zero.clone();
        if let Some(rows) = micro_batch {
            config[MICRO_BATCH] = json!(rows);
        }
        if recompute {
            config["activation_checkpointing"] = json!({"every_unit": true});
        }
        config
    }

    /// Loads the configuration with a section for parameters and states.
    pub(super) fn load(&self, zero: &Value, micro_batch: Option<usize>, recompute: bool) -> Result<Config> {
        Config::load(self.config(zero, micro_batch, recompute), self.ranks)
    }

    /// Returns the memory needs of a candidate.
    fn needs(&self, candidate: &PlacementCandidate, micro_batch: usize) -> Result<MemoryFit> {
        let PlacementCandidate { placement, recompute, shards } = *candidate;
        let mut zero = placement.section(self.folder);
        if let (ShardRanks::OfHost(ranks), 3) = (shards, placement.stage()) {
            zero["mics_shard_size"] = json!(ranks);
        }
        let config = self.load(&zero, Some(micro_batch), recompute)?;
        let hosts = self.host_network().hosts;
        let options = EstimateOptions { recompute, hosts, ..EstimateOptions::default() };
        let state = Estimate::with(self.shapes, &config, options)?.host_bytes();
        Ok(MemoryFit {
            config: self.config(&zero, Some(micro_batch), recompute),
            stage: placement.stage(),
            optimizer_in_files: matches!(placement, StatePlacement::OptimizerInFiles | StatePlacement::AllInFiles),
            parameters_in_files: placement == StatePlacement::AllInFiles,
            recompute,
            within_hosts: zero.get("mics_shard_size").is_some(),
            micro_batch,
            bytes: state.saturating_add((self.activations)(micro_batch, recompute)) as u64,
            explanation: String::new(),
        })
    }

    /// Adds the reason to the choice. `first` is the fastest candidate, if it did not fit.
    fn with_reason(&self, mut choice: MemoryFit, first: Option<MemoryFit>) -> Result<MemoryFit> {
        let (bytes, memory) = (format_bytes(choice.bytes), format_bytes(self.memory));
        choice.explanation = format!("{}: at most {bytes} of {memory} per rank", choice.description(Some(self.folder)));
        if let Some(first) = first {
            choice.explanation += &format!("; {} would need {}", first.description(None), format_bytes(first.bytes));
        }
        if self.shapes.is_quantized() {
            choice.explanation += ". Packed weights stay packed only at stage 3";
        }
        let config = self.load(&json!({"stage": 0}), Some(choice.micro_batch), choice.recompute)?;
        let is_island = |local_steps: &&LocalStepsConfig| self.islands > 1 || local_steps.server.is_some();
        if let Some(local_steps) = config.local_steps.as_ref().filter(is_island) {
            choice.explanation += &self.between_islands(local_steps, &choice)?;
        } else if self.ranks_per_host < self.ranks {
            choice.explanation += &self.between_hosts(&choice)?;
        }
        Ok(choice)
    }

    /// Returns a description of the memory that the ranks of a host would need to hold all states, or `None` if they
    /// have enough.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub(super) fn too_large_for_a_host(&self) -> Result<Option<String>> {
        let max_bytes = (self.memory as f64 * USABLE_MEMORY) as u64;
        let mut smallest: Option<MemoryFit> = None;
        let in_memory = |candidate: &PlacementCandidate| {
            matches!(candidate.placement, StatePlacement::Memory(_) | StatePlacement::MinimalGathers)
        };
        let sizes = self.micro_batches()?;
        for candidate in self.candidates().into_iter().filter(in_memory) {
            for size in &sizes {
                let choice = self.needs(&candidate, *size)?;
                if choice.bytes <= max_bytes {
                    return Ok(None);
                }
                if smallest.as_ref().is_none_or(|smallest| choice.bytes < smallest.bytes) {
                    smallest = Some(choice);
                }
            }
        }
        Ok(smallest.map(|smallest| {
            format!(
                "a host that holds the complete model would need {} per rank ({})",
                format_bytes(smallest.bytes),
                smallest.description(None)
            )
        }))
    }
}

impl MemoryFit {
    /// Returns a readable description of the choice.
    fn description(&self, folder: Option<&Path>) -> String {
        let offload = match (self.optimizer_in_files, self.parameters_in_files) {
            (_, true) => " with parameters and optimizer states in files",
            (true, false) => " with optimizer states in files",
            (false, false) => "",
        };
        let location = folder.filter(|_| !offload.is_empty()).map(|folder| format!(" under {}", folder.display()));
        let rows = if self.micro_batch == 1 { "1 row".into() } else { format!("{} rows", self.micro_batch) };
        let recompute = if self.recompute { ", blocks recomputed in the backward pass" } else { "" };
        format!("stage {}{offload}{}, micro batches of {rows}{recompute}", self.stage, location.unwrap_or_default())
    }
}

/// One combination of the choices, except for the micro batch size.
#[derive(Debug, Clone, Copy)]
struct PlacementCandidate {
    placement: StatePlacement,
    recompute: bool,
    /// The ranks among which stage 3 shards.
    shards: ShardRanks,
}

/// The ranks among which stage 3 shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShardRanks {
    /// All ranks of the job, or of an island if there are several islands.
    All,
    /// The ranks of one host. The value is the number of ranks on each host.
    OfHost(usize),
}

/// The location of states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StatePlacement {
    /// In memory, at a stage.
    Memory(u8),
    /// At stage 3, gathering no more than is about to be used.
    MinimalGathers,
    OptimizerInFiles,
    AllInFiles,
}

impl StatePlacement {
    fn stage(self) -> u8 {
        if let Self::Memory(stage) = self { stage } else { 3 }
    }

    /// Returns the section `zero_optimization`.
    fn section(self, folder: &Path) -> Value {
        let mut section = json!({"stage": self.stage()});
        if matches!(self, Self::Memory(_)) {
            return section;
        }
        section["stage3_max_reuse_distance"] = json!(0);
        section["stage3_prefetch_bucket_size"] = json!(PREFETCHED_ELEMENTS);
        if matches!(self, Self::OptimizerInFiles | Self::AllInFiles) {
            section["sub_group_size"] = json!(PREFETCHED_ELEMENTS);
            section["offload_optimizer"] =
                json!({"device": "nvme", "nvme_path": folder, "pipeline_read": true, "pipeline_write": true});
        }
        if self == Self::AllInFiles {
            section["offload_param"] = json!({"device": "nvme", "nvme_path": folder, "max_in_cpu": 0});
        }
        section
    }
}

/// Returns the number of bytes that each of `ranks` processes on this machine may use: its share of the available
/// memory ([`monitor::available_memory`](candle_zero::monitor::available_memory)), within the limits of the process
/// (`ulimit` -d and -v). Returns `None` if neither is known.
pub fn memory_of_rank(ranks: usize) -> Option<u64> {
    let available = candle_zero::monitor::available_memory().map(|bytes| bytes / ranks.max(1) as u64);
    available.into_iter().chain(candle_zero::monitor::process_limit()).min()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::is_quantized;
    use candle_zero::models::{ActivationBytesOptions, Decoder, DecoderConfig, IntoDecoderConfig, LlamaConfig};
    use candle_zero::nn::{LoraConfig, is_adapter};
    use candle_zero::precision::{Nf4Scales, WeightPacking};

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Tuning {
        Full,
        Lora,
        Qlora,
    }

    const GIB: u64 = 1 << 30;

    fn choose(preset: &str, method: Tuning, ranks: usize, gib: f64) -> Result<MemoryFit> {
        on_hosts(preset, method, (ranks, ranks, None), gib)
    }

    /// Chooses for `ranks` ranks, `ranks_per_host` of them on each host, and the given network rate between hosts.
    fn on_hosts(preset: &str, method: Tuning, hosts: (usize, usize, Option<f64>), gib: f64) -> Result<MemoryFit> {
        in_islands(preset, method, hosts, (1, Value::Null), gib)
    }

    /// Chooses for ranks that form this number of islands, with this `local_steps` section.
    fn in_islands(
        preset: &str,
        method: Tuning,
        (ranks, ranks_per_host, network): (usize, usize, Option<f64>),
        (islands, local_steps): (usize, Value),
        gib: f64,
    ) -> Result<MemoryFit> {
        let config = LlamaConfig { ctx: 1024, ..LlamaConfig::preset(preset)? };
        let lora = (method != Tuning::Full).then(LoraConfig::default);
        let config = DecoderConfig { lora, ..config.decoder()? };
        let shapes = Shapes::of(preset, |vb| Decoder::new(&config, vb))?;
        let shapes = match method {
            Tuning::Full => shapes,
            Tuning::Lora => shapes.trainable(|name, _| is_adapter(name)),
            Tuning::Qlora => shapes
                .trainable(|name, _| is_adapter(name))
                .quantized_by(WeightPacking::Nf4(Nf4Scales::Bf16), is_quantized),
        };
        let trains_base = method == Tuning::Full;
        let activations = |rows: usize, recompute: bool| {
            config.activation_bytes(ActivationBytesOptions { tokens: rows * 1024, element: 2, recompute, trains_base })
        };
        let json = json!({"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},
                          "local_steps": local_steps});
        let memory = (gib * GIB as f64) as u64;
        let (activations, folder, config) = (&activations, Path::new("/scratch"), &json);
        let (shapes, recompute, network, pipeline) = (&shapes, None, network, None);
        let demand = MemoryFitInput {
            shapes,
            config,
            recompute,
            ranks,
            ranks_per_host,
            islands,
            network,
            pipeline,
            activations,
            memory,
            folder,
        };
        demand.choose()
    }

    #[test]
    fn what_is_chosen_is_the_fastest_that_fits() {
        let why = |preset, method, ranks, gib| match choose(preset, method, ranks, gib) {
            Ok(choice) => choice.explanation,
            Err(error) => error.to_string(),
        };
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Lora, 1, 64.0), @"stage 0, micro batches of 8 rows: at most 11.1 GiB of 64.0 GiB per rank");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Lora, 1, 8.0), @"stage 0, micro batches of 2 rows: at most 4.6 GiB of 8.0 GiB per rank; stage 0, micro batches of 8 rows would need 11.1 GiB");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Lora, 1, 2.0), @"stage 3 with parameters and optimizer states in files under /scratch, micro batches of 4 rows, blocks recomputed in the backward pass: at most 1.6 GiB of 2.0 GiB per rank; stage 0, micro batches of 8 rows would need 11.1 GiB");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Lora, 2, 4.0), @"stage 3, micro batches of 1 row: at most 3.0 GiB of 4.0 GiB per rank; stage 0, micro batches of 4 rows would need 6.8 GiB");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Full, 2, 64.0), @"stage 0, micro batches of 4 rows: at most 24.6 GiB of 64.0 GiB per rank");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Full, 2, 16.0), @"stage 2, micro batches of 4 rows, blocks recomputed in the backward pass: at most 12.7 GiB of 16.0 GiB per rank; stage 0, micro batches of 4 rows would need 24.6 GiB");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Full, 1, 8.0), @"stage 3 with optimizer states in files under /scratch, micro batches of 4 rows, blocks recomputed in the backward pass: at most 6.1 GiB of 8.0 GiB per rank; stage 0, micro batches of 8 rows would need 28.8 GiB");
        insta::assert_snapshot!(why("llama-3.2-1b", Tuning::Qlora, 1, 4.0), @"stage 3, micro batches of 1 row: at most 2.4 GiB of 4.0 GiB per rank; stage 3, micro batches of 8 rows would need 9.9 GiB. Packed weights stay packed only at stage 3");
        insta::assert_snapshot!(why("llama-2-7b", Tuning::Lora, 2, 16.0), @"stage 3, micro batches of 1 row: at most 11.5 GiB of 16.0 GiB per rank; stage 0, micro batches of 4 rows would need 27.5 GiB");
        insta::assert_snapshot!(why("llama-2-7b", Tuning::Qlora, 2, 6.0), @"stage 3, micro batches of 2 rows, blocks recomputed in the backward pass: at most 4.1 GiB of 6.0 GiB per rank; stage 3, micro batches of 4 rows would need 17.4 GiB. Packed weights stay packed only at stage 3");
        insta::assert_snapshot!(why("llama-2-7b", Tuning::Qlora, 1, 6.0), @"stage 3 with optimizer states in files under /scratch, micro batches of 1 row, blocks recomputed in the backward pass: at most 4.8 GiB of 6.0 GiB per rank; stage 3, micro batches of 8 rows would need 33.5 GiB. Packed weights stay packed only at stage 3");
        insta::assert_snapshot!(why("llama-2-7b", Tuning::Lora, 1, 1.0), @"this run needs 2.1 GiB per rank even with all states in files, but only 1.0 GiB per rank is available (1 rank); use a shorter context or a smaller model, or give the job more memory");
    }

    #[test]
    fn each_host_holds_all_shards_if_it_can_and_the_reason_says_what_crosses_the_network() {
        let why = |method, gib| match on_hosts("llama-3.2-1b", method, (4, 2, Some(117e6)), gib) {
            Ok(choice) => choice.explanation,
            Err(error) => error.to_string(),
        };
        insta::assert_snapshot!(why(Tuning::Lora, 64.0), @"stage 0, micro batches of 2 rows: at most 4.6 GiB of 64.0 GiB per rank. Every rank holds all parameters, so in each step, each of the 2 hosts receives only gradients and updated weights, 21.5 MiB (0.19 s at the measured 111.6 MiB/s); with shards spread over all hosts (stage 3), it would receive 1.7 GiB (15.46 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Lora, 4.0), @"stage 3, micro batches of 1 row: at most 3.0 GiB of 4.0 GiB per rank; stage 0, micro batches of 2 rows would need 4.6 GiB. Each of the 2 hosts holds all shards (mics_shard_size), so in each step, a host receives only gradients, 21.5 MiB (0.19 s at the measured 111.6 MiB/s); with shards spread over all hosts, it would receive 3.4 GiB (30.88 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Qlora, 4.0), @"stage 3, micro batches of 1 row: at most 2.3 GiB of 4.0 GiB per rank; stage 3, micro batches of 2 rows would need 3.4 GiB. Packed weights stay packed only at stage 3. Each of the 2 hosts holds all shards (mics_shard_size), so in each step, a host receives only gradients, 21.5 MiB (0.19 s at the measured 111.6 MiB/s); with shards spread over all hosts, it would receive 1.5 GiB (13.78 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Full, 8.0), @"stage 3 with optimizer states in files under /scratch, micro batches of 1 row: at most 5.5 GiB of 8.0 GiB per rank; stage 0, micro batches of 2 rows would need 22.5 GiB. Each of the 2 hosts holds all shards (mics_shard_size), so in each step, a host receives only gradients, 2.3 GiB (21.13 s at the measured 111.6 MiB/s); with shards spread over all hosts, it would receive 5.6 GiB (51.61 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Full, 1.5), @"this run needs 4.1 GiB per rank even with all states in files, but only 1.5 GiB per rank is available (4 ranks); use a shorter context or a smaller model, or give the job more memory");
    }

    #[test]
    fn with_local_steps_the_choice_is_that_of_an_island_and_the_reason_says_what_islands_exchange() {
        let why = |method, hosts, (islands, section), gib| match in_islands(
            "llama-3.2-1b",
            method,
            hosts,
            (islands, section),
            gib,
        ) {
            Ok(choice) => choice.explanation,
            Err(error) => error.to_string(),
        };
        let two_hosts = (4, 2, Some(117e6));
        let each_host = || (2, json!({"steps": 100, "islands": 2}));
        insta::assert_snapshot!(why(Tuning::Lora, two_hosts, each_host(), 64.0), @"stage 0, micro batches of 2 rows: at most 4.8 GiB of 64.0 GiB per rank. The 2 islands of 2 ranks train independently, and every 100 steps they exchange the changes in their weights; in a step, an island receives 440.3 KiB (3.9 ms at the measured 111.6 MiB/s) on average; without local steps, a host would receive 21.5 MiB (0.19 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Full, two_hosts, (2, json!({"steps": 50, "wire_dtype": "int4"})), 64.0), @"stage 0, micro batches of 2 rows: at most 38.2 GiB of 64.0 GiB per rank. The 2 islands of 2 ranks train independently, and every 50 steps they exchange the changes in their weights; in a step, an island receives 12.5 MiB (0.11 s at the measured 111.6 MiB/s) on average; without local steps, a host would receive 2.3 GiB (21.13 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Lora, two_hosts, each_host(), 4.0), @"stage 3, micro batches of 1 row: at most 3.0 GiB of 4.0 GiB per rank; stage 0, micro batches of 2 rows would need 4.8 GiB. The 2 islands of 2 ranks train independently, and every 100 steps they exchange the changes in their weights; in a step, an island receives 440.3 KiB (3.9 ms at the measured 111.6 MiB/s) on average; without local steps, a host would receive 43.0 MiB (0.39 s at the measured 111.6 MiB/s)");
        insta::assert_snapshot!(why(Tuning::Full, two_hosts, (1, json!({"islands": 1})), 64.0), @"stage 0, micro batches of 2 rows: at most 22.5 GiB of 64.0 GiB per rank. Every rank holds all parameters, so in each step, each of the 2 hosts receives only gradients and updated weights, 2.3 GiB (21.13 s at the measured 111.6 MiB/s); with shards spread over all hosts (stage 3), it would receive 2.8 GiB (25.80 s at the measured 111.6 MiB/s)");
        let server = json!({"steps": 10, "islands": 2, "server": "host0:29600"});
        insta::assert_snapshot!(why(Tuning::Lora, (2, 2, None), (1, server), 64.0), @"stage 0, micro batches of 2 rows: at most 4.8 GiB of 64.0 GiB per rank. This island trains independently, and every 10 steps it exchanges the changes in its weights with the others through the server; in a step, it receives 4.3 MiB on average");
        insta::assert_snapshot!(why(Tuning::Lora, two_hosts, (3, json!({"islands": 3})), 64.0), @"cannot take local steps: local_steps.islands is 3, but 4 ranks cannot be divided into that many islands of equal size; use a divisor of 4, or start a different number of ranks");
    }

    #[test]
    fn more_memory_never_chooses_what_is_slower() {
        let rank = |choice: &MemoryFit| (choice.parameters_in_files, choice.optimizer_in_files, choice.recompute);
        for method in [Tuning::Full, Tuning::Lora, Tuning::Qlora] {
            for ranks in [1, 2] {
                let choices: Vec<MemoryFit> = (0..8)
                    .filter_map(|power| choose("llama-3.2-1b", method, ranks, f64::from(1 << power)).ok())
                    .collect();
                assert!(choices.len() >= 4, "{method:?}");
                assert!(choices.windows(2).all(|pair| rank(&pair[0]) >= rank(&pair[1])), "{method:?}: {choices:#?}");
                assert!(choices.iter().all(|choice| method != Tuning::Qlora || choice.stage == 3));
            }
        }
    }

    #[test]
    fn the_chosen_configuration_is_one_that_the_engine_takes() {
        for gib in [2.0, 8.0, 64.0] {
            let choice = choose("llama-3.2-1b", Tuning::Lora, 2, gib).unwrap();
            let config = Config::load(choice.config.clone(), 2).unwrap();
            assert_eq!(config.zero.stage.number(), choice.stage);
            assert_eq!(config.zero.param_files().is_some(), choice.parameters_in_files);
            assert_eq!(config.activation_checkpointing, choice.recompute);
            assert_eq!(config.batch.train_batch_size, 8);
        }
    }
}
