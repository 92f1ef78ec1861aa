//! Parses the command line. Everything after the script's name belongs to the script.

use super::host_flags::HostFlags;
use super::island_flags::IslandFlags;
use super::launcher_variables::{LauncherVariables, of_process};
use super::ranks_per_host;
use crate::error::Result;
use crate::launch::LaunchOptions;
use crate::launch::comm_backend::CommBackend;
use crate::launch::console::CommandLineError;
use crate::launch::core_binding::CoreBinding;
use crate::launch::hosts::core_list::CoreList;
use crate::launch::run_record_flags::RunRecordFlags;
use crate::tools;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  zerorun train.rs                                  one rank
  zerorun --num_ranks 4 train.rs --steps 100        four ranks; `--steps 100` goes to the script
  zerorun -n 2 examples/train_gpt.rs --ds_config ds_configs/zero3.json
                                                    an example of the package that contains it
  zerorun -n 2 --features cuda train.rs             with a cargo feature
  zerorun -n 2 ./target/release/train               a program that is already built
  zerorun --hostfile hosts train.rs                 on the hosts listed in a file, over ssh
  zerorun --print_package train.rs                  print the folder of the generated package

A script is one Rust file. It may begin with its manifest:
  #!/usr/bin/env zerorun
  ---
  [dependencies]
  candle-zero = \"0.1\"
  candle-core = \"0.11.1\"
  ---
  fn main() { ... }

Without a manifest, it gets candle-zero, candle-core, candle-nn and anyhow.";

const USAGE: &str = "zerorun [OPTIONS] SCRIPT [ARGS]...";

/// Start a training script on N ranks on one or several hosts: build it, run it, and stop all ranks if one fails.
#[derive(Debug, Parser)]
#[command(name = "zerorun", version, override_usage = USAGE)]
struct ZerorunArguments {
    /// Number of ranks (processes) on each host; or cpu (one per core), gpu (one per GPU), or auto (one per GPU or,
    /// without GPUs, one per core). With --hostfile, overrides the slots in that file [also: $PET_NPROC_PER_NODE]
    #[arg(
        short = 'n',
        long = "num_ranks",
        visible_aliases = ["num_gpus", "num_accelerators", "nproc_per_node"],
        aliases = ["num-ranks", "num-gpus", "num-accelerators", "nproc-per-node"],
        value_name = "N",
        default_value = "1",
        value_parser = ranks_per_host::ranks,
    )]
    ranks: u16,

    /// Maximum time that a rank waits for the others, such as 500ms, 90s, 10m or 2h; a number without a unit is in
    /// seconds [default: $CANDLE_ZERO_TIMEOUT_MS, else 10m]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,

    /// Time for the ranks to exit after zerorun receives SIGINT, SIGTERM or SIGHUP, for example to save a checkpoint
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    grace: Duration,

    /// Cargo features for the build, as for `cargo build --features`
    #[arg(long, value_name = "FEATURES")]
    features: Option<String>,

    /// MASTER_PORT of the ranks [default: a free port]; on several hosts, the port where the hosts' launchers connect
    /// [default: 29500] [also: $PET_MASTER_PORT]
    #[arg(long = "master_port", alias = "master-port", value_name = "PORT",
          value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,

    #[command(flatten)]
    hosts: HostFlags,

    /// Bind each rank to its own cores: the host's physical cores, divided evenly. A rank gets one thread per core
    #[arg(long = "bind_cores_to_rank", alias = "bind-cores-to-rank")]
    bind_cores_to_rank: bool,

    /// With --bind_cores_to_rank: use these cores of each host, such as 0,2-4,6 [default: one thread of each physical
    /// core]
    #[arg(long = "bind_core_list", alias = "bind-core-list", value_name = "LIST", requires = "bind_cores_to_rank",
          value_parser = CoreList::parse)]
    bind_core_list: Option<CoreList>,

    /// Transport between the ranks of one host: shared memory, or MPI as under mpirun, for testing. Several hosts
    /// always use MPI [default: shm]
    #[arg(long, value_enum)]
    backend: Option<CommBackend>,

    /// Serve training metrics for Prometheus from rank 0, at this port on 127.0.0.1; 0 picks a free port
    #[arg(long, value_name = "PORT")]
    prometheus: Option<u16>,

    #[command(flatten)]
    run: RunRecordFlags,

    #[command(flatten)]
    islands: IslandFlags,

    /// Maximum number of job restarts, in total, after a rank failure [also: $PET_MAX_RESTARTS]
    #[arg(long = "max_restarts", alias = "max-restarts", value_name = "K", default_value = "0")]
    max_restarts: u32,

    /// With --max_restarts: minimum number of ranks to continue with when starts keep failing within 10 s [default: the
    /// value of --num_ranks]
    #[arg(long = "min_ranks", alias = "min-ranks", value_name = "M",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    min_ranks: Option<u16>,

    /// Record a timeline of all ranks as a trace in FILE, for Perfetto (ui.perfetto.dev) [default:
    /// $CANDLE_ZERO_TIMELINE]
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,

    /// Print the folder of the package that would be built (generated for a script), and exit
    #[arg(long = "print_package", alias = "print-package")]
    print_package: bool,

    /// Rust file or executable, followed by its arguments
    // One positional argument holds both, because clap would otherwise take the script's `--timeout` for `zerorun`'s.
    #[arg(value_names = ["SCRIPT", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<OsString>,
}

impl ZerorunArguments {
    /// Fills in, from the variables of another launcher, the options that the command line omits. With a hostfile, the
    /// variables are ignored.
    fn fill_in(&mut self, matches: &ArgMatches, variables: &LauncherVariables<'_>) -> Result<()> {
        const RESTARTS: &str = "PET_MAX_RESTARTS";
        let is_default = |name: &str| matches.value_source(name) == Some(ValueSource::DefaultValue);
        if self.hosts.hostfile.is_some() {
            return Ok(());
        }
        if is_default("max_restarts") {
            self.max_restarts = variables.number(RESTARTS, "a whole number")?.unwrap_or(self.max_restarts);
        }
        if is_default("ranks") {
            self.ranks = variables.ranks()?.unwrap_or(self.ranks);
        }
        self.hosts.nnodes = self.hosts.nnodes.take().or_else(|| variables.get("PET_NNODES"));
        self.master_port = match self.master_port {
            None if self.hosts.nnodes.is_none() => variables.master_port()?,
            port => port,
        };
        Ok(())
    }
}

/// Parses a command line whose first word is the program's own name.
pub(super) fn read(words: impl IntoIterator<Item = OsString>) -> std::result::Result<LaunchOptions, CommandLineError> {
    read_with_variables(words, &LauncherVariables(&of_process))
}

/// Returns the command line of `zerorun` without its tools. The help lists the tools first.
pub(crate) fn command() -> clap::Command {
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n       zerorun COMMAND [OPTIONS]...\n\n{}\n\
         {{all-args}}{{after-help}}",
        tools::help()
    );
    ZerorunArguments::command().help_template(template).after_help(EXAMPLES)
}

/// Parses a command line with the given environment variables.
fn read_with_variables(
    words: impl IntoIterator<Item = OsString>,
    variables: &LauncherVariables<'_>,
) -> std::result::Result<LaunchOptions, CommandLineError> {
    let mut reader = command();
    let matches = reader.try_get_matches_from_mut(words).map_err(|e| CommandLineError(e.format(&mut reader)))?;
    let has_ranks_flag = matches.value_source("ranks") != Some(ValueSource::DefaultValue);
    let arguments = ZerorunArguments::from_arg_matches(&matches);
    let mut arguments = arguments.map_err(|e| CommandLineError(e.format(&mut reader)))?;
    let filled_in = arguments.fill_in(&matches, variables);
    filled_in.map_err(|error| CommandLineError(reader.error(ErrorKind::ValueValidation, error)))?;
    let checks = [min_ranks_conflict, backend_conflict, launcher_conflict, |arguments: &ZerorunArguments| {
        arguments.run.conflict()
    }];
    let conflict = checks
        .iter()
        .find_map(|check| check(&arguments))
        .or_else(|| arguments.hosts.min_nodes_conflict(arguments.max_restarts));
    if let Some(conflict) = conflict {
        return Err(CommandLineError(reader.error(ErrorKind::ArgumentConflict, conflict)));
    }
    let ranks_per_host = has_ranks_flag.then_some(usize::from(arguments.ranks));
    let job_hosts = arguments.hosts.job_hosts(ranks_per_host, &mut arguments.master_port, variables);
    let job_hosts = job_hosts.map_err(|error| CommandLineError(reader.error(ErrorKind::ValueValidation, error)))?;
    let mut command = arguments.command.into_iter();
    let script = command.next().map(PathBuf::from).unwrap_or_default();
    if let Some(tools::ZerorunTool { name, .. }) = tools::named(script.as_os_str()) {
        let text = format!(
            "`{name}` is a tool and must be the first word: `zerorun {name} ...`. To start a script of that name, \
             write ./{name}"
        );
        return Err(CommandLineError(reader.error(ErrorKind::ArgumentConflict, text)));
    }
    Ok(LaunchOptions {
        ranks: usize::from(arguments.ranks),
        job_hosts,
        backend: arguments.backend.unwrap_or(CommBackend::Shm),
        binding: arguments.bind_cores_to_rank.then_some(CoreBinding { list: arguments.bind_core_list }),
        timeout: arguments.timeout,
        grace: arguments.grace,
        features: arguments.features,
        master_port: arguments.master_port,
        prometheus: arguments.prometheus,
        run: arguments.run,
        island: arguments.islands.options(),
        max_restarts: arguments.max_restarts,
        min_ranks: usize::from(arguments.min_ranks.unwrap_or(arguments.ranks)),
        timeline: arguments.timeline,
        print_package: arguments.print_package,
        script,
        script_args: command.collect(),
    })
}

/// Returns the conflict of `--backend` with the other options, if any.
fn backend_conflict(arguments: &ZerorunArguments) -> Option<String> {
    let has_several_hosts = arguments.hosts.hostfile.is_some() || arguments.hosts.nnodes.is_some();
    (has_several_hosts && arguments.backend == Some(CommBackend::Shm)).then(|| {
        "--backend shm is for ranks on one host, because hosts do not share memory; leave --backend out, so that the \
         ranks use MPI"
            .to_string()
    })
}

/// Returns the conflict of `--launcher` with the other options, if any.
fn launcher_conflict(arguments: &ZerorunArguments) -> Option<String> {
    let zerorun_only = [
        ("--max_restarts", arguments.max_restarts > 0),
        ("--bind_cores_to_rank", arguments.bind_cores_to_rank),
        ("--prometheus", arguments.prometheus.is_some()),
        ("--dashboard", arguments.run.dashboard.is_some()),
    ];
    arguments.hosts.launcher_conflict(&[zerorun_only.as_slice(), &arguments.islands.given()].concat())
}

/// Returns the conflict of `--min_ranks` with the other options, if any.
fn min_ranks_conflict(arguments: &ZerorunArguments) -> Option<String> {
    let (fewest, ranks) = (arguments.min_ranks?, arguments.ranks);
    if arguments.hosts.hostfile.is_some() || arguments.hosts.nnodes.is_some() {
        return Some(format!(
            "--min_ranks {fewest} is for one host; on several hosts, each keeps its number of ranks; give --min_nodes \
             instead, or leave --min_ranks out"
        ));
    }
    if arguments.max_restarts == 0 {
        return Some(format!(
            "--min_ranks {fewest} is the minimum number of ranks after a restart, but restarts are off; give a \
             --max_restarts of at least 1, or leave --min_ranks out"
        ));
    }
    (fewest > ranks).then(|| {
        format!("--min_ranks {fewest} is above --num_ranks {ranks}; give at most {ranks}, or a larger --num_ranks")
    })
}

/// Parses a duration such as `500ms`, `90s`, `10m`, `2h` or `90`.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("give a whole number with ms, s, m or h, for example 90s or 10m".to_string()),
    };
    let number: u64 = number.parse().map_err(|_| "give a whole number with ms, s, m or h, for example 90s or 10m")?;
    match number.checked_mul(milliseconds) {
        Some(0) => Err("give more than 0".to_string()),
        // The ranks count in milliseconds and add the number to a clock's time, so the limit is far below the clock's
        // maximum.
        Some(total) if total <= 1000 * 3_600_000 => Ok(Duration::from_millis(total)),
        _ => Err("give at most 1000h".to_string()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
