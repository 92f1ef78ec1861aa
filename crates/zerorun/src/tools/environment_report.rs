//! `zerorun report`: describes this machine and what it can train.

use crate::error::CommError;
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::Error;
use candle_zero::comm::mpi_library;
use candle_zero::kernels::{self, InstructionSet};
use candle_zero::offload::{available_memory, free_space, group_limit, is_memory, open_direct};
use candle_zero::util::{counted, proc_field};
use clap::Parser;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Describe this machine for training: processor, memory, disk, GPU, MPI library, and the features of this build.
///
/// Exit code: 0 if the report is printed, 1 if standard output could not be written, 2 if DIR is not a folder in which
/// a file can be written, CANDLE_ZERO_SIMD is invalid, or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "report", bin_name = "zerorun report")]
struct ReportArguments {
    /// Folder on the disk that will hold checkpoints or offloaded state
    #[arg(default_value = ".")]
    dir: PathBuf,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <ReportArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(ReportArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl ReportArguments {
    fn run(self) -> ExitCode {
        let machine = match MachineReport::inspect(&self.dir) {
            Ok(machine) => machine,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        let text = match self.json {
            true => serde_json::to_string(&machine)
                .unwrap_or_else(|e| unreachable!("strings and numbers are valid JSON: {e}")),
            false => machine.to_string(),
        };
        if print(text) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The instruction sets used by kernels of candle-zero or the gemm crate, by their Linux names.
const KERNEL_INSTRUCTION_SETS: [&str; 8] =
    ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"];

/// The bytes of model state per parameter: weights, gradient and two moments in f32; or, with bf16 or fp16, weights and
/// gradient in 2 bytes each, two moments, and master weights.
const STATE_BYTES_PER_PARAMETER: u64 = 16;

#[derive(Debug, Serialize)]
struct MachineReport {
    version: &'static str,
    kernel: String,
    processor: String,
    /// The number of cores that this process may use.
    cores: usize,
    simd: Vec<&'static str>,
    simd_level: MachineSimd,
    memory: MachineMemory,
    disk: MachineDisk,
    gpus: Vec<String>,
    /// The MPI library that ranks on several hosts would use.
    mpi: Option<String>,
    /// The reason why no MPI library is available.
    mpi_problem: Option<String>,
    /// The optional features that this program was built with.
    features: Vec<&'static str>,
    verdicts: Vec<String>,
}

/// The SIMD level that all kernels use.
#[derive(Debug, Serialize)]
struct MachineSimd {
    name: &'static str,
    /// Whether products take less time in bf16 than in f32.
    is_faster_in_bf16: bool,
    /// The value of `CANDLE_ZERO_SIMD`.
    variable: String,
    /// The levels of this processor, widest first.
    available: Vec<&'static str>,
}

/// Memory sizes in bytes.
#[derive(Debug, Serialize)]
struct MachineMemory {
    total: u64,
    available: u64,
    /// The limit RLIMIT_DATA.
    limit: Option<u64>,
    /// The limit of the control groups, which may be those of a container or a cluster job.
    group_limit: Option<u64>,
}

#[derive(Debug, Serialize)]
struct MachineDisk {
    folder: PathBuf,
    free: u64,
    is_memory: bool,
    direct_access: bool,
}

impl MachineReport {
    fn inspect(folder: &Path) -> Result<Self, Error> {
        let level = kernels::checked_level()?;
        let variable = std::env::var(kernels::SIMD).ok().filter(|value| !value.is_empty());
        let write_error = |source| Error::Io { action: "write a file in", path: folder.to_owned(), source };
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let flags = proc_field(&cpu, "flags").unwrap_or_default();
        let total = proc_field(&memory, "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse().ok());
        let (mpi, mpi_problem) = match mpi_library() {
            Ok(name) => (Some(name), None),
            Err(CommError::NoMpi { tried }) => (None, Some(format!("tried {tried}"))),
            Err(error) => (None, Some(error.to_string())),
        };
        // Direct access is tested with an unnamed file.
        let direct_access = open_direct(&tempfile::tempfile_in(folder).map_err(write_error)?).is_some();
        let mut machine = Self {
            version: env!("CARGO_PKG_VERSION"),
            kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
            processor: proc_field(&cpu, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            simd: KERNEL_INSTRUCTION_SETS
                .into_iter()
                .filter(|used| flags.split(' ').any(|flag| flag == *used))
                .collect(),
            simd_level: MachineSimd {
                name: level.name(),
                is_faster_in_bf16: level.is_faster_in_bf16(),
                variable: variable.unwrap_or_else(|| kernels::AUTO.to_owned()),
                available: InstructionSet::available().map(InstructionSet::name).collect(),
            },
            memory: MachineMemory {
                total: total.map_or(0, |kib: u64| kib.saturating_mul(1024)),
                available: available_memory(),
                limit: getrlimit(Resource::Data).current,
                group_limit: group_limit(),
            },
            disk: MachineDisk {
                folder: folder.to_owned(),
                free: free_space(folder),
                is_memory: is_memory(folder),
                direct_access,
            },
            gpus: gpus(),
            mpi,
            mpi_problem,
            features: [("cuda", cfg!(feature = "cuda")), ("hub", cfg!(feature = "hub")), ("s3", cfg!(feature = "s3"))]
                .into_iter()
                .filter_map(|(name, is_on)| is_on.then_some(name))
                .collect(),
            verdicts: vec![],
        };
        machine.verdicts = machine.verdicts();
        Ok(machine)
    }

    /// Returns the verdicts as plain sentences.
    fn verdicts(&self) -> Vec<String> {
        let products = match self.simd_level.name {
            _ if self.simd_level.is_faster_in_bf16 => {
                "matrix products in f32 and bf16 use candle-zero's kernels; bf16 is faster"
            }
            "portable" => "matrix products run in plain loops: slow, but with the same bits on every machine",
            _ => {
                "matrix products use candle-zero's kernels; on this processor and at this SIMD level, bf16 is widened to \
                 f32 and is no faster"
            }
        };
        let limit = self.memory.limit.unwrap_or(u64::MAX);
        let million_parameters = |bytes: u64| bytes as f64 / STATE_BYTES_PER_PARAMETER as f64 / 1e6;
        let mut verdicts = vec![
            products.to_owned(),
            format!(
                "start at most {}, because more would have to share cores; the threads are divided among the ranks",
                counted(self.cores, "rank")
            ),
            format!(
                "the memory that is free now can hold the state of {:.0} million parameters ({STATE_BYTES_PER_PARAMETER} bytes \
                 each), not counting activations",
                million_parameters(self.memory.available.min(limit))
            ),
        ];
        verdicts.push(match (self.disk.is_memory, self.disk.direct_access) {
            (true, _) => "the folder is in memory: offloading to it saves no memory".to_owned(),
            (false, direct) => format!(
                "the disk has room for the offloaded state of another {:.0} million parameters; files are accessed {}",
                million_parameters(self.disk.free),
                if direct { "without the page cache" } else { "through the page cache, which is slower" }
            ),
        });
        verdicts.push(match (self.gpus.is_empty(), self.features.contains(&"cuda")) {
            (true, _) => "no NVIDIA GPU: models run on the processor".to_owned(),
            (false, true) => "models can run on the GPU (Device::new_cuda)".to_owned(),
            (false, false) => "there is a GPU, but this program cannot use it; build with --features cuda".to_owned(),
        });
        verdicts.push(match &self.mpi {
            Some(_) => "ranks can run on several hosts if each has the same library".to_owned(),
            None => "no usable MPI library: ranks run only on this host".to_owned(),
        });
        verdicts
    }
}

impl fmt::Display for MachineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
        let or_none = |list: &[&str]| if list.is_empty() { "none".to_owned() } else { list.join(" ") };
        let gpus: Vec<&str> = self.gpus.iter().map(String::as_str).collect();
        let limits = [(self.memory.limit, "limited to"), (self.memory.group_limit, "limited by its control group to")];
        let limits = limits.iter().filter_map(|(limit, word)| Some(format!(", {word} {}", gib((*limit)?))));
        let limit: String = limits.collect();
        writeln!(f, "candle-zero  {}, features: {}", self.version, or_none(&self.features))?;
        writeln!(f, "system       {}", self.kernel)?;
        writeln!(f, "processor    {}, {}", self.processor, counted(self.cores, "core"))?;
        writeln!(f, "simd         {}", or_none(&self.simd))?;
        let MachineSimd { name, variable, available, .. } = &self.simd_level;
        let available = available.join(", ");
        writeln!(f, "simd level   {name} (CANDLE_ZERO_SIMD={variable}; this processor has {available})")?;
        writeln!(f, "memory       {}, {} available{limit}", gib(self.memory.total), gib(self.memory.available))?;
        writeln!(f, "disk         {} free in {}", gib(self.disk.free), self.disk.folder.display())?;
        writeln!(f, "gpu          {}", or_none(&gpus))?;
        let problem = || format!("none ({})", self.mpi_problem.as_deref().unwrap_or_default());
        write!(f, "mpi          {}", wrapped(&self.mpi.clone().unwrap_or_else(problem)))?;
        let mut text = String::new();
        self.verdicts.iter().try_for_each(|verdict| write!(text, "\n- {verdict}"))?;
        f.write_str(&text)
    }
}

/// Wraps the text after a row's name so that its lines fit on a terminal.
fn wrapped(text: &str) -> String {
    const WIDTH: usize = 100;
    const INDENT: usize = 13;
    let (mut lines, mut column) = (String::new(), INDENT);
    for word in text.split(' ') {
        let length = word.chars().count() + 1;
        if column > INDENT && column + length > WIDTH {
            lines += &format!("\n{:INDENT$}", "");
            column = INDENT;
        } else if column > INDENT {
            lines.push(' ');
        }
        lines += word;
        column += length;
    }
    lines
}

/// Returns the names of the NVIDIA GPUs, as given by the driver.
fn gpus() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let text = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("information")).ok();
    let mut names: Vec<String> =
        entries.filter_map(text).filter_map(|text| Some(proc_field(&text, "Model")?.to_owned())).collect();
    names.sort();
    names
}
