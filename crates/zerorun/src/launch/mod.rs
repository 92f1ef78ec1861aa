//! Starts a program on N ranks.
//!
//! `zerorun train.rs` takes these steps. `script_target` finds the package that the file belongs to, or generates one
//! (`script_package`; its manifest may be at the top of the code, see `frontmatter`). `cargo_build` builds the
//! executable with cargo. `local_job_spec` defines the job of one host and the environment of its ranks. `ranks` starts
//! the executable N times, passes on its output (`rank_output`, `stderr_tail`) and signals (`signals`), and stops
//! everything when a rank fails (`failure_report`). `restarts` decides whether the job starts again. `job_record` adds
//! the output of the ranks, and how they ended, to the record of the run. Output of `zerorun` itself goes through
//! `console`. `core_binding` gives each rank its own cores. `hosts` computes which ranks run on which host. `nodes`
//! starts and connects the launchers of several hosts, and `pmi` connects the MPI libraries of the ranks; instead,
//! `mpirun` can start all ranks. `remote_shell` runs commands on other hosts. In the ranks, `comm/rank_env.rs` reads
//! the variables that the launcher has set.

pub(crate) mod cargo_build;
pub(crate) mod comm_backend;
pub(crate) mod console;
pub(crate) mod core_binding;
pub(crate) mod error;
pub(crate) mod exported_variables;
pub(crate) mod failure_report;
mod frontmatter;
#[allow(
    dead_code,
    reason = "the arguments of DeepSpeed's node launcher and multi-node runners are computed only for recorded cases"
)]
pub(crate) mod hosts;
mod job_record;
pub(crate) mod local_job_spec;
pub(crate) mod mpirun;
pub(crate) mod nodes;
mod pmi;
mod rank_output;
pub(crate) mod ranks;
pub(crate) mod remote_shell;
pub(crate) mod restarts;
pub(crate) mod run_record_flags;
pub(crate) mod script_package;
pub(crate) mod script_target;
pub(crate) mod signals;
mod stderr_tail;

use crate::dashboard::{Dashboard, ServedFolder};
use candle_zero::kernels::checked_level;
use candle_zero::runs::RunsFolder;
use candle_zero::{Result, timeline};
use comm_backend::CommBackend;
use console::{eprint, print};
use core_binding::CoreBinding;
use hosts::world_info::WorldInfo;
use local_job_spec::LocalJobSpec;
use nodes::ssh::JobWideOptions;
use run_record_flags::RunRecordFlags;
use script_target::ScriptTarget;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a job is started: on which hosts, and by which launchers.
#[derive(Debug, Clone)]
pub(crate) enum LaunchMode {
    /// On this host.
    OneHost,
    /// On the hosts in a hostfile; this launcher starts a launcher on each.
    Hostfile(nodes::ssh::MultiHostOptions),
    /// On several hosts, on each of which something else starts a launcher.
    PerHostLaunchers(nodes::NodeOptions),
}

impl LaunchMode {
    /// Returns the hosts and slots of a hostfile, if there is one.
    pub(crate) fn world(&self) -> Result<Option<WorldInfo>> {
        match self {
            Self::Hostfile(hosts) => hosts.world().map(Some),
            Self::OneHost | Self::PerHostLaunchers(_) => Ok(None),
        }
    }
}

/// The options for starting a script: the parsed and checked command line of `zerorun SCRIPT`.
#[derive(Debug)]
pub(crate) struct LaunchOptions {
    pub(crate) ranks: usize,
    pub(crate) job_hosts: LaunchMode,
    /// The transport between ranks that are all on this host.
    pub(crate) backend: CommBackend,
    /// The core binding, or `None` if ranks run on any core.
    pub(crate) binding: Option<CoreBinding>,
    /// The timeout of collectives. `None` means the value from the environment, or else the ranks' default.
    pub(crate) timeout: Option<Duration>,
    /// How long the ranks may take to end after a signal to the launcher.
    pub(crate) grace: Duration,
    pub(crate) features: Option<String>,
    /// The port of rank 0; on several hosts, the port to which the hosts' launchers connect. `None` means a free port
    /// or, on several hosts, the default port.
    pub(crate) master_port: Option<u16>,
    /// The port for metrics. `None` means the value from the environment.
    pub(crate) prometheus: Option<u16>,
    /// The record of the run. Settings that are not given come from the environment.
    pub(crate) run: RunRecordFlags,
    /// The options of a job that is one of several islands.
    pub(crate) island: local_job_spec::IslandOptions,
    pub(crate) max_restarts: u32,
    /// The minimum number of ranks after a restart. It is not greater than `ranks`.
    pub(crate) min_ranks: usize,
    /// The timeline file. `None` means the value from the environment.
    pub(crate) timeline: Option<PathBuf>,
    pub(crate) print_package: bool,
    /// The script as typed.
    pub(crate) script: PathBuf,
    pub(crate) script_args: Vec<OsString>,
}

/// Builds a program, unless it is an executable already, and returns its path. `script` is the path as typed.
pub(crate) fn build(target: ScriptTarget, script: &Path, features: Option<&str>) -> Result<PathBuf> {
    match target {
        ScriptTarget::Program { path } => Ok(path),
        ScriptTarget::InPackage(in_package) => cargo_build::build(&in_package.into_build(script, features)),
        ScriptTarget::Single(single) => cargo_build::build(&single.generate(features)?),
    }
}

/// Builds the script and runs its ranks until they end. Returns the exit code.
///
/// Must be called on the main thread: the kernel kills the ranks when the thread that started them ends.
pub(crate) fn start(options: &LaunchOptions) -> Result<u8> {
    // Every rank would fail with the same error.
    checked_level()?;
    // Problems with the hosts are reported before anything is built.
    let world = options.job_hosts.world()?;
    // With several hosts in a hostfile, each host's launcher checks its own cores.
    let local_ranks = match (&options.job_hosts, &world) {
        (LaunchMode::Hostfile(hosts), Some(world)) if hosts.mpirun.is_none() => hosts.only_here(world),
        (_, Some(_)) => None,
        _ => Some(options.ranks),
    };
    let cores = match (&options.binding, local_ranks) {
        (Some(binding), Some(ranks)) => Some(binding.cores(ranks, &candle_zero::util::host_name())?),
        _ => None,
    };
    let target = script_target::find(&options.script)?;
    let program = match target {
        ScriptTarget::Program { path } => {
            if let Some(features) = &options.features {
                eprint(&format!("zerorun: --features {features} has no effect: {} is already built", path.display()));
            }
            path
        }
        ScriptTarget::InPackage(in_package) => {
            if options.print_package {
                return Ok(u8::from(!print(in_package.manifest_dir.display())));
            }
            cargo_build::build(&in_package.into_build(&options.script, options.features.as_deref()))?
        }
        ScriptTarget::Single(single) => {
            let package = single.generate(options.features.as_deref())?;
            if options.print_package {
                return Ok(u8::from(!print(package.package_dir.display())));
            }
            cargo_build::build(&package)?
        }
    };
    let timeline_file = options.timeline.clone().or_else(|| {
        let file = std::env::var_os(timeline::FILE).filter(|file| !file.is_empty());
        file.map(Into::into)
    });
    let has_several_hosts = !matches!(options.job_hosts, LaunchMode::OneHost);
    if has_several_hosts && timeline_file.is_some() {
        eprint("zerorun: no timeline is recorded: timelines are available only on a single host");
    }
    let timeline_file = timeline_file.filter(|_| !has_several_hosts);
    let job_timeline = timeline_file.as_deref().map(timeline::JobTimeline::begin).transpose()?;
    let job = LocalJobSpec {
        program,
        args: options.script_args.clone(),
        world: options.ranks,
        timeout: options.timeout,
        grace: options.grace,
        on_signal: None,
        script: Some(options.script.clone()),
        master_port: options.master_port,
        prometheus: options.prometheus,
        run: options.run.clone(),
        island: options.island.clone(),
        restart: 0,
        timeline: job_timeline.as_ref().map(|job| job.folder().to_owned()),
        multi_host: None,
        cores,
        devices: None,
    };
    let run = RunOptions {
        backend: options.backend,
        max_restarts: options.max_restarts,
        min_ranks: Some(options.min_ranks),
        binding: options.binding.as_ref(),
    };
    let result = run_on(job, &options.job_hosts, world.as_ref(), &run);
    match job_timeline.map(timeline::JobTimeline::finish) {
        Some(Ok(summary)) => eprint(&format!("zerorun: {summary}; open it at https://ui.perfetto.dev")),
        // The result of the job takes precedence.
        Some(Err(error)) => eprint(&format!("zerorun: {error}")),
        None => {}
    }
    result
}

/// The options for running the ranks of a job.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunOptions<'a> {
    /// The transport between ranks that are all on this host.
    pub(crate) backend: CommBackend,
    pub(crate) max_restarts: u32,
    /// The minimum number of ranks after a restart on one host, or `None` for all.
    pub(crate) min_ranks: Option<usize>,
    pub(crate) binding: Option<&'a CoreBinding>,
}

/// Runs the program of `job` on the hosts, which are those of `world` if there is a hostfile. Returns the exit code.
///
/// Must be called on the main thread.
pub(crate) fn run_on(
    mut job: LocalJobSpec,
    job_hosts: &LaunchMode,
    world: Option<&WorldInfo>,
    options: &RunOptions<'_>,
) -> Result<u8> {
    let _dashboard = serve_dashboard(&mut job, job_hosts)?;
    let max_restarts = options.max_restarts;
    let policy = restarts::RestartPolicy { max_restarts, min_ranks: options.min_ranks.unwrap_or(job.world) };
    match (job_hosts, world) {
        (LaunchMode::PerHostLaunchers(node), _) => nodes::run(job, node, max_restarts),
        (LaunchMode::Hostfile(hosts), Some(world)) => match (hosts.only_here(world), &hosts.mpirun) {
            (_, Some(mpirun)) => mpirun::become_mpirun(&job, mpirun, world, hosts.master_addr.as_deref()),
            (Some(ranks), None) => {
                let job = LocalJobSpec { world: ranks, devices: Some(world.devices(0)), ..job };
                restarts::run(options.backend, job, &restarts::RestartPolicy { min_ranks: ranks, ..policy })
            }
            (None, None) => {
                let job_wide = JobWideOptions { max_restarts, binding: options.binding };
                nodes::ssh::run(&job, hosts, world, &job_wide)
            }
        },
        _ => restarts::run(options.backend, job, &policy),
    }
}

/// Starts the dashboard that the job's flags request. If something else starts launchers on several hosts, only the
/// first host serves it.
fn serve_dashboard(job: &mut LocalJobSpec, job_hosts: &LaunchMode) -> Result<Option<Dashboard>> {
    let is_other_host = matches!(job_hosts, LaunchMode::PerHostLaunchers(nodes::NodeOptions { node: 1.., .. }));
    let Some(address) = job.run.dashboard.filter(|_| !is_other_host) else { return Ok(None) };
    let served = ServedFolder::new(RunsFolder::find(job.run.folder.clone()).path());
    let dashboard = Dashboard::serve(served.clone(), None, address)?;
    job.run.served = Some(served);
    eprint(&format!("zerorun: dashboard: {}", dashboard.link()));
    if dashboard.is_open_to_others() {
        eprint(OPEN_DASHBOARD);
    }
    Ok(Some(dashboard))
}

/// The warning about a dashboard that other hosts can reach.
pub(crate) const OPEN_DASHBOARD: &str = "zerorun: warning: everyone who can reach this port can read the records of all \
                                         runs in the folder; requests to a running program need the token in the link";
