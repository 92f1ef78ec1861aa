//! `zerorun estimate`: computes the memory and the traffic of a training run before it starts.

use super::gpu_capacity::GpuCapacity;
use super::hosts_forecast::{self, ForecastArguments, MultiHostForecast};
use super::model_size_flags::ModelSizeFlags;
use super::pipeline_report::PipelineReport;
use crate::error::{OptimError, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::comm::CollectiveKind as Collective;
use candle_zero::config::{Config, PipelineConfig, RunValues};
use candle_zero::estimate::deepspeed::{Machines, MemoryNeeds, Zero3Offload, zero2, zero3};
use candle_zero::estimate::{Estimate, EstimateOptions, PipelineEstimate, Shapes, UnitRule, paper};
use candle_zero::memory::MemoryRow;
use candle_zero::offload::{available_memory, free_space};
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::util::{counted, format_bytes, matches};
use clap::{ArgGroup, Parser, ValueEnum};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Estimate, before anything runs, what a model and a configuration need: bytes of each rank by kind, bytes on the wire
/// and to and from files in each step, and whether this machine has enough memory and disk space. No weights are read
/// or created.
///
/// Exit code: 0 if the estimate is printed, 1 if standard output could not be written, 2 if the model, the
/// configuration or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "estimate", bin_name = "zerorun estimate",
          group = ArgGroup::new("what").args(["model", "safetensors", "table"]).required(true),
          group = ArgGroup::new("spread").args(["hosts", "pipeline"]))]
struct EstimateArguments {
    /// Built-in model: nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-nano, llama-mini, tinyllama-1.1b,
    /// llama-3.2-1b, llama-3.2-3b, llama-2-7b
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Parameters of a safetensors file, or of the files named in an index (model.safetensors.index.json); only headers
    /// are read
    #[arg(long, value_name = "FILE")]
    safetensors: Option<PathBuf>,

    /// With --safetensors: prefix of the unit names, that is, the part of a parameter's name before a number, such as
    /// model.layers; repeatable. Use "none" for a model without units [default: the part of each name before its first
    /// number]
    #[arg(long, value_name = "PREFIX", requires = "safetensors")]
    unit: Vec<String>,

    /// Names of frozen parameters, such as "h.*", in which * matches any characters; repeatable. The others are trained
    #[arg(long, value_name = "PATTERN", conflicts_with = "table")]
    frozen: Vec<String>,

    /// Storage format of frozen matrices [default: determined by zero_quantized_nontrainable_weights]
    #[arg(long = "frozen_packing", alias = "frozen-packing", value_name = "HOW", requires = "frozen")]
    frozen_packing: Option<FrozenPacking>,

    /// Print the ZeRO paper's table instead: model state of 7.5e9, 128e9 and 1e12 parameters by stage
    #[arg(long)]
    table: bool,

    #[command(flatten)]
    sizes: ModelSizeFlags,

    /// Configuration file
    #[arg(long = "ds_config", alias = "ds-config", value_name = "FILE", required_unless_present = "table")]
    ds_config: Option<PathBuf>,

    /// Number of ranks of the job
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    ranks: u32,

    /// Value of "auto" for the schedule's total_num_steps; does not affect the estimate
    #[arg(long = "total_num_steps", alias = "total-num-steps", value_name = "N", default_value = "1000")]
    total_num_steps: u64,

    /// Assume that the model runs on GPUs, one per rank. With a name (h100, a100-40, rtx4090 and others) or a memory
    /// size (24GiB), also print whether the model state fits
    #[arg(long, value_name = "GPU", num_args = 0..=1)]
    gpu: Option<Option<GpuCapacity>>,

    /// Let units recompute their forward pass, as train_gpt's flag of the same name does
    #[arg(long = "activation_checkpointing", alias = "activation-checkpointing")]
    recompute: bool,

    /// Estimate a pipeline formed by the ranks: the layers and the memory of each rank, and the share of a step in
    /// which ranks wait. The configuration's `pipeline` section determines how the layers of a built-in model are
    /// divided
    #[arg(long, conflicts_with_all = ["safetensors", "table", "gpu", "recompute", "deepspeed"])]
    pipeline: bool,

    #[command(flatten)]
    forecast: ForecastArguments,

    /// Also print the results of DeepSpeed's own estimators, for as many GPUs in one machine as there are ranks
    #[arg(long)]
    deepspeed: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The storage formats of frozen matrices.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FrozenPacking {
    /// 8 bits
    Int8,
    /// 4 bits, scales in bf16
    Nf4,
    /// 4 bits, scales in 8 bits
    Nf4Double,
}

impl From<FrozenPacking> for WeightPacking {
    fn from(packing: FrozenPacking) -> Self {
        match packing {
            FrozenPacking::Int8 => Self::Int8,
            FrozenPacking::Nf4 => Self::Nf4(Nf4Scales::Bf16),
            FrozenPacking::Nf4Double => Self::Nf4(Nf4Scales::DoubleQuantized),
        }
    }
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <EstimateArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> std::result::Result<ExitCode, CommandLineError> {
    Ok(EstimateArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl EstimateArguments {
    fn run(self) -> ExitCode {
        let text = match (self.table, self.json) {
            (true, true) => Ok(table_json().to_string()),
            (true, false) => Ok(paper::table()),
            (false, json) if self.pipeline => {
                let report = self.pipeline();
                report.and_then(|report| if json { Ok(report.json()?.to_string()) } else { report.text() })
            }
            (false, json) => self.answer().map(|answer| if json { answer.json().to_string() } else { answer.text() }),
        };
        match text {
            Ok(text) if print(&text) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => refused(&error, EXIT_SETUP),
        }
    }

    fn answer(&self) -> Result<EstimateReport> {
        let shapes = match (&self.safetensors, &self.model) {
            (Some(path), _) => Shapes::safetensors(path, &self.unit_rule())?,
            (None, name) => self.sizes.preset(name.as_deref().unwrap_or_default())?.shapes()?,
        };
        let shapes = if self.frozen.is_empty() { shapes } else { shapes.frozen(&self.frozen)? };
        let shapes = self.frozen_packing.into_iter().fold(shapes, |shapes, packing| shapes.quantized(packing.into()));
        let config = Config::load_for(self.config_file(), self.ranks as usize, &self.run_values())?;
        let hosts = self.forecast.hosts(config.world_size)?;
        config.optimizer.as_ref().ok_or(OptimError::NoOptimizer)?;
        let options = EstimateOptions {
            gpu: self.gpu.is_some(),
            recompute: self.recompute,
            hosts: hosts.unwrap_or(1),
            disk_access: None,
        };
        let estimate = Estimate::with(&shapes, &config, options)?;
        let forecast = |hosts| self.forecast.forecast(hosts, &estimate, (&shapes, &config, options));
        let hosts = hosts.map(forecast).transpose()?;
        let ranks_per_host = hosts.as_ref().map_or(config.world_size, |hosts| hosts.ranks_per_host);
        let need = HostMemoryNeed::new(&estimate, &config, ranks_per_host);
        let gpu = self.gpu.clone().flatten();
        Ok(EstimateReport { need, shapes, config, estimate, hosts, gpu, deepspeed: self.deepspeed })
    }

    /// Returns the estimate of a pipeline.
    fn pipeline(&self) -> Result<PipelineReport> {
        let preset = self.sizes.preset(self.model.as_deref().unwrap_or_default())?;
        // Patterns must match parameters of the complete model, not of each rank.
        let shapes = preset.shapes()?;
        let shapes = if self.frozen.is_empty() { shapes } else { shapes.frozen(&self.frozen)? };
        let is_trained = |name: &str, _: &[usize]| !self.frozen.iter().any(|pattern| matches(pattern, name));
        let prepare = |shapes: Shapes| {
            let shapes = shapes.trainable(is_trained);
            self.frozen_packing.into_iter().fold(shapes, |shapes, packing| shapes.quantized(packing.into()))
        };
        let (run, ranks) = (self.run_values(), self.ranks as usize);
        let estimate = PipelineEstimate::new(&preset.layers()?, self.config_file(), ranks, &run, prepare)?;
        estimate.config.optimizer.as_ref().ok_or(OptimError::NoOptimizer)?;
        let elements = preset.activation(estimate.config.batch.train_micro_batch_size_per_gpu);
        PipelineReport::new(preset.name(), shapes.num_parameters(), estimate, elements, &self.forecast)
    }

    fn config_file(&self) -> PathBuf {
        self.ds_config.clone().unwrap_or_default()
    }

    /// Returns the values for "auto" that train_gpt also uses.
    fn run_values(&self) -> RunValues {
        RunValues {
            total_num_steps: Some(self.total_num_steps),
            hidden_size: self.sizes.width(self.model.as_deref()),
            ..RunValues::default()
        }
    }

    fn unit_rule(&self) -> UnitRule {
        match &self.unit[..] {
            [] => UnitRule::Numbered,
            [none] if none == "none" => UnitRule::None,
            prefixes => UnitRule::Prefixes(prefixes.iter().map(|p| p.trim_end_matches('.').to_string()).collect()),
        }
    }
}

/// The combined needs of all ranks of a host, and the resources of this machine.
struct HostMemoryNeed {
    ranks: usize,
    host: u64,
    available: u64,
    files: u64,
    /// The folder of the files and its free space.
    folder: Option<(PathBuf, u64)>,
}

impl HostMemoryNeed {
    fn new(estimate: &Estimate, config: &Config, ranks: usize) -> Self {
        let all = |bytes: usize| (bytes as u64).saturating_mul(ranks as u64);
        let zero = &config.zero;
        let sections =
            [zero.offload_param.as_ref().map(|o| &o.device), zero.offload_optimizer.as_ref().map(|o| &o.device)];
        let folder = sections.into_iter().flatten().find_map(|to| to.nvme_path()).map(Path::to_owned);
        Self {
            ranks,
            host: all(estimate.host_bytes()),
            available: available_memory(),
            files: all(estimate.file_bytes()),
            folder: folder.map(|path| (path.clone(), free_space(&path))),
        }
    }

    fn fits(&self) -> bool {
        self.host <= self.available && self.folder.as_ref().is_none_or(|(_, free)| self.files <= *free)
    }

    /// Returns the verdicts as plain sentences.
    fn verdicts(&self) -> Vec<String> {
        let who = if self.ranks == 1 { "one rank needs".to_string() } else { format!("{} ranks need", self.ranks) };
        let comparison = |need: u64, has: u64| match has.checked_sub(need) {
            Some(remaining) => format!("that is enough, and {} is left", format_bytes(remaining)),
            None => format!("that is too little: {} more is needed", format_bytes(need - has)),
        };
        let mut verdicts = vec![format!(
            "on this machine, {who} at most {} of memory, and {} is available: {}",
            format_bytes(self.host),
            format_bytes(self.available),
            comparison(self.host, self.available)
        )];
        if let Some((folder, free)) = self.folder.as_ref().filter(|_| self.files > 0) {
            let (need, folder) = (format_bytes(self.files), folder.display());
            verdicts.push(format!(
                "files take {need}, and {} is free in {folder}: {}",
                format_bytes(*free),
                comparison(self.files, *free)
            ));
        }
        verdicts
    }
}

/// A column of the printed memory table.
type MemoryColumn = fn(&MemoryRow) -> usize;

/// The estimate, with its model and configuration.
struct EstimateReport {
    shapes: Shapes,
    config: Config,
    estimate: Estimate,
    need: HostMemoryNeed,
    hosts: Option<MultiHostForecast>,
    /// The GPU of each rank, if its memory is known.
    gpu: Option<GpuCapacity>,
    deepspeed: bool,
}

/// The needs that no estimate includes, whatever the configuration.
const NOT_INCLUDED: [&str; 3] = [
    "activations, which depend on the micro batch and the length of the samples, and data kept by units that recompute \
     their forward pass",
    "data on its way to the model, and a checkpoint while it is written",
    "the program itself: its code, its threads, and memory that the allocator keeps",
];

impl EstimateReport {
    fn assumptions(&self) -> Vec<String> {
        let mut assumptions = self.shapes.assumptions().to_vec();
        assumptions.push("for the peaks: units run, and parameters are used, in the order of the model".into());
        if self.config.pipeline != PipelineConfig::default() {
            assumptions.push(
                "the configuration's pipeline section has no effect: these ranks are data-parallel; --pipeline estimates a \
                 pipeline"
                    .into(),
            );
        }
        if self.estimate.file_bytes() > 0 {
            assumptions.push(
                "files are accessed in the way that would be chosen on this machine now, without the page cache if possible"
                    .into(),
            );
        }
        assumptions.extend(self.hosts.iter().flat_map(MultiHostForecast::assumptions));
        assumptions
    }

    fn not_included(&self) -> impl Iterator<Item = &'static str> {
        let of_hosts = if self.hosts.is_some() { &hosts_forecast::NOT_INCLUDED[..] } else { &[] };
        NOT_INCLUDED.iter().chain(of_hosts).copied()
    }

    /// Returns the figures of DeepSpeed's estimators for all ranks as the GPUs of one machine.
    fn deepspeed(&self) -> Vec<(&'static str, MemoryNeeds)> {
        let (all, layer) = (self.shapes.num_parameters() as u64, self.shapes.largest_unit() as u64);
        let machines = Machines::new(self.config.world_size as u64, 1);
        vec![
            ("stage 2", zero2(all, machines, false)),
            ("stage 2, optimizer offloaded", zero2(all, machines, true)),
            ("stage 3", zero3(all, layer, machines, Zero3Offload::Nothing, true)),
            ("stage 3, optimizer offloaded", zero3(all, layer, machines, Zero3Offload::Optimizer, true)),
            ("stage 3, parameters too", zero3(all, layer, machines, Zero3Offload::OptimizerAndParameters, true)),
        ]
    }

    fn json(&self) -> Value {
        let need = &self.need;
        let notes = self.config.notes.iter().map(|note| json!({"path": note.path, "message": note.message}));
        let mut all = json!({
            "model": self.shapes.name(),
            "units": self.shapes.num_units(),
            "trained": self.shapes.num_trained(),
            "memory": self.estimate.memory,
            "step": self.estimate.step,
            "totals": {
                "device": self.estimate.device_bytes(),
                "host": self.estimate.host_bytes(),
                "file": self.estimate.file_bytes(),
            },
            "machine": {
                "fits": need.fits(),
                "host_needed": need.host,
                "host_available": need.available,
                "files_needed": need.files,
                "files_available": need.folder.as_ref().map(|(_, free)| free),
            },
            "assumed": self.assumptions(),
            "not_included": self.not_included().collect::<Vec<_>>(),
            "said": notes.collect::<Vec<_>>(),
        });
        if let Some(GpuCapacity { name, bytes }) = &self.gpu {
            let fits = self.estimate.device_bytes() as u64 <= *bytes;
            all["gpu"] = json!({"name": name, "bytes": bytes, "fits": fits});
        }
        if let Some(hosts) = &self.hosts {
            all["across_hosts"] = hosts.json();
        }
        if self.deepspeed {
            let needs = self.deepspeed().into_iter().map(|(name, needs)| (name.to_string(), json!(needs)));
            all["deepspeed"] = Value::Object(needs.collect());
        }
        all
    }

    fn text(&self) -> String {
        let memory = &self.estimate.memory;
        let (name, psi, units) = (self.shapes.name(), memory.parameters, counted(self.shapes.num_units(), "unit"));
        let ranks = memory.world_size;
        let trained = match self.shapes.num_trained() {
            all if all == psi => String::new(),
            trained => format!(" ({trained} of them trained)"),
        };
        let mut text = format!(
            "{name}: {}{trained}, {units}; stage {} on {}\n\n",
            counted(psi, "parameter"),
            memory.stage,
            counted(ranks, "rank")
        );
        self.write_memory(&mut text);
        self.write_step(&mut text);
        text.extend(self.hosts.as_ref().map(MultiHostForecast::text));
        let on_gpu = self.gpu.as_ref().map(|gpu| gpu.verdict(self.estimate.device_bytes() as u64));
        for verdict in on_gpu.into_iter().chain(self.need.verdicts()) {
            _ = writeln!(text, "\n{verdict}");
        }
        if self.deepspeed {
            _ = writeln!(text, "\nDeepSpeed's estimators, for {} in one machine:", counted(ranks, "GPU"));
            for (name, MemoryNeeds { cpu_bytes, gpu_bytes }) in self.deepspeed() {
                let (gpu, cpu) = (format_bytes(gpu_bytes), format_bytes(cpu_bytes));
                _ = writeln!(text, "  {name:<30} {gpu:>12} per GPU {cpu:>12} on the host");
            }
        }
        text += "\nnot included:";
        self.not_included().for_each(|line| _ = write!(text, "\n- {line}"));
        text += "\nassumed:";
        self.assumptions().iter().for_each(|line| _ = write!(text, "\n- {line}"));
        if !self.config.notes.is_empty() {
            text += "\nnotes on the configuration:";
        }
        self.config.notes.iter().for_each(|note| _ = write!(text, "\n- {}: {}", note.path, note.message));
        text
    }

    /// Writes a line for each kind of memory in use, the sums, and the result of the ZeRO paper's formula.
    fn write_memory(&self, text: &mut String) {
        let tiers: [(&str, MemoryColumn); 5] = [
            ("GPU, at most", |row| row.device.peak),
            ("host", |row| row.host.held),
            ("host, at most", |row| row.host.peak),
            ("page-locked", |row| row.pinned.peak),
            ("files", |row| row.file.peak),
        ];
        // Without a GPU, the columns about it are left out.
        let of_gpu = |name: &str| matches!(name, "GPU, at most" | "page-locked");
        let has_gpu = self.estimate.device_bytes() > 0;
        let tiers: Vec<_> = tiers.into_iter().filter(|(name, _)| has_gpu || !of_gpu(name)).collect();
        _ = write!(text, "{:<24}", "per rank");
        tiers.iter().for_each(|(name, _)| _ = write!(text, "{name:>16}"));
        *text += "\n";
        let rows = self.estimate.memory.rows.iter();
        for row in rows.clone().filter(|row| tiers.iter().any(|(_, column)| column(row) > 0)) {
            _ = write!(text, "{:<24}", row.kind.name());
            tiers.iter().for_each(|(_, column)| _ = write!(text, "{:>16}", binary_or_none(column(row) as u64)));
            *text += "\n";
        }
        _ = write!(text, "{:<24}", "sum");
        for (_, column) in &tiers {
            _ = write!(text, "{:>16}", binary_or_none(rows.clone().map(column).sum::<usize>() as u64));
        }
        let formula: f64 = rows.filter_map(|row| row.formula).sum();
        _ = writeln!(text, "\n{:<24}{:>16}", "the paper's formula", format_bytes(formula as u64));
    }

    /// Writes the traffic of a step.
    fn write_step(&self, text: &mut String) {
        let step = &self.estimate.step;
        _ = writeln!(text, "\n{:<24}{:>16}{:>16}", "per rank and step", "collectives", "bytes in");
        for kind in Collective::ALL {
            let traffic = step.kind(kind);
            if traffic.calls > 0 {
                let bytes = binary_or_none(traffic.wire_bytes);
                _ = writeln!(text, "{:<24}{:>16}{bytes:>16}", kind.name(), traffic.calls);
            }
        }
        for (name, bytes) in [("read from files", step.bytes_read), ("written to files", step.bytes_written)] {
            if bytes > 0 {
                _ = writeln!(text, "{name:<40}{:>16}", format_bytes(bytes));
            }
        }
    }
}

/// Returns the ZeRO paper's table as JSON.
fn table_json() -> Value {
    let cells = paper::MODELS.iter().flat_map(|(model, parameters)| {
        paper::DEGREES.iter().flat_map(move |ranks| {
            paper::STAGES.iter().map(move |(stage, placement)| {
                let bytes = paper::model_state_bytes(*parameters, *ranks, *placement);
                json!({"model": model, "ranks": ranks, "stage": stage, "bytes": bytes,
                       "printed_gb": paper::cell(*parameters, *ranks, *placement)})
            })
        })
    });
    Value::Array(cells.collect())
}

fn binary_or_none(bytes: u64) -> String {
    if bytes == 0 { "-".into() } else { format_bytes(bytes) }
}
