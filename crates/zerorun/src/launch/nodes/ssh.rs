//! `--hostfile`: starts the launcher on each host in the file, by ssh or, on this host, directly.
//!
//! Each launcher gets the same working directory, program and arguments, and the variables for other hosts
//! ([`exports`]). The directory and the program must therefore be at the same path on all hosts. The secret is passed
//! through the launcher's standard input, so that no process list shows it. If the user gives none, a new one is
//! created. Signals are passed on in the same way.

use super::listen_address::BIND_ADDR;
use super::secret::JobSecret;
use crate::error::{HostsError, LaunchError, Result};
use crate::launch::console::eprint;
use crate::launch::core_binding::CoreBinding;
use crate::launch::exported_variables::exports;
use crate::launch::hosts::host_filter::HostSelection;
use crate::launch::hosts::world_info::{DEVICES, WorldInfo};
use crate::launch::hosts::{HostSlots, hostfile};
use crate::launch::local_job_spec::LocalJobSpec;
use crate::launch::mpirun::MpirunOptions;
use crate::launch::remote_shell::{EXIT_UNREACHABLE, RemoteShellOptions, as_text, is_here, not_reached};
use crate::launch::signals::{self, LauncherEvent, die_with_parent, write_signal};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// The option that makes a launcher read the secret and then signals from its standard input, and end when its standard
/// input ends.
pub(crate) const SECRET_FROM_STDIN: &str = "until_stdin_ends";
/// The interval at which ended launchers are detected.
const TICK: Duration = Duration::from_millis(300);
/// The time limit for the other launchers to end after the first host's launcher has ended, and for the first host's to
/// end after another has failed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// The pause before a host's launcher is started again.
const RESTART_DELAY: Duration = Duration::from_secs(5);

/// The hosts that the user asks for.
#[derive(Debug, Clone)]
pub(crate) struct MultiHostOptions {
    /// The hostfile.
    pub(crate) file: PathBuf,
    pub(crate) selection: HostSelection,
    /// The minimum number of hosts to continue with after a failure, or `None` for all.
    pub(crate) min_nodes: Option<usize>,
    /// The first host's address, or `None` for its name.
    pub(crate) master_addr: Option<String>,
    /// The address at which the first host listens, or `None` for `master_addr`.
    pub(crate) bind_addr: Option<String>,
    /// The port of ssh, or `None` for ssh's default.
    pub(crate) ssh_port: Option<u16>,
    /// Whether every host is reached by ssh, even if it is this host or the only one.
    pub(crate) force_multi: bool,
    /// The `mpirun` that starts the ranks in place of a launcher on each host.
    pub(crate) mpirun: Option<MpirunOptions>,
}

impl MultiHostOptions {
    /// Returns the hosts and slots that are used.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is invalid, a filter names an unknown host or slot, or no slot is left.
    pub(crate) fn world(&self) -> Result<WorldInfo> {
        let text = std::fs::read_to_string(&self.file)
            .map_err(|source| HostsError::NoHostfile { path: self.file.clone(), why: source.to_string() })?;
        let hosts = self.selection.apply(&hostfile::parse(&text, &self.file)?)?;
        Ok(WorldInfo::new(hosts)?)
    }

    /// Returns the number of ranks if all of them are on this host, unless `force_multi` is set.
    pub(crate) fn only_here(&self, world: &WorldInfo) -> Option<usize> {
        match world.hosts() {
            [host] if !self.force_multi && is_here(&host.name) => Some(host.slots.len()),
            _ => None,
        }
    }
}

/// The options of the job for every host's launcher.
pub(crate) struct JobWideOptions<'a> {
    pub(crate) max_restarts: u32,
    pub(crate) binding: Option<&'a CoreBinding>,
}

/// One host's launcher.
struct HostLauncher<'a> {
    host: &'a HostSlots,
    /// Whether it is started directly on this host instead of through ssh.
    local: bool,
    command: Command,
    /// The line with the secret.
    secret: String,
    child: Option<Child>,
    /// The time at which the launcher ended.
    ended: Option<Instant>,
    /// How often it was asked to end.
    end_requests: u32,
}

/// Runs the program of `job` on the hosts, through a launcher on each, and returns the exit code. Must be called on the
/// main thread.
///
/// # Errors
/// Fails if the secret cannot be used, a word or a variable cannot be passed on, or a launcher cannot be started.
pub(crate) fn run(
    job: &LocalJobSpec,
    hosts: &MultiHostOptions,
    world: &WorldInfo,
    job_wide: &JobWideOptions<'_>,
) -> Result<u8> {
    let (_, events) = signals::listen()?;
    let exports = exports()?;
    let secret = JobSecret::of_environment()?.map_or_else(JobSecret::random, Ok)?.line();
    let mut launchers = Vec::new();
    for node in 0..world.hosts().len() {
        let host = &world.hosts()[node];
        let words = launcher_command(job, hosts, world, node, job_wide)?;
        let local = is_here(&host.name) && !hosts.force_multi;
        // The GPUs are those of the slots, whatever the variable's value is on this host.
        let mut exports: Vec<_> = exports.iter().filter(|(name, _)| name != DEVICES).cloned().collect();
        exports.push((DEVICES.into(), world.devices(node)));
        let shell = RemoteShellOptions { port: hosts.ssh_port, detects_lost_hosts: false };
        let command = command(host, local, &words, &exports, &shell);
        let secret = secret.clone();
        launchers.push(HostLauncher { host, local, command, secret, child: None, ended: None, end_requests: 0 });
    }
    for launcher in &mut launchers {
        launcher.start()?;
    }
    let code = supervise(&mut launchers, &events, job_wide.max_restarts > 0)?;
    wait_all(&mut launchers);
    launchers.iter_mut().filter_map(|launcher| launcher.child.as_mut()).for_each(|child| {
        // The launcher may be on a host that cannot be reached.
        let _ = child.kill();
        let _ = child.wait();
    });
    Ok(code)
}

/// Waits for the launcher of the first host, and returns its exit code, which is the job's. If `restarts` is true,
/// starts the launchers of other hosts again after they have failed; otherwise, ends all launchers and returns 1 if
/// another host is lost.
fn supervise(launchers: &mut [HostLauncher<'_>], events: &Receiver<LauncherEvent>, restarts: bool) -> Result<u8> {
    loop {
        match events.recv_timeout(TICK) {
            Ok(LauncherEvent::End(signal)) => launchers.iter_mut().for_each(|launcher| launcher.end(signal)),
            Ok(LauncherEvent::Pass(signal)) => launchers.iter_mut().for_each(|launcher| _ = launcher.pass_on(signal)),
            Ok(LauncherEvent::Suspend) => signals::suspend_self(),
            _ => {}
        }
        if !launchers[0].is_running() {
            return Ok(launchers[0].code());
        }
        for node in 1..launchers.len() {
            if launchers[node].is_running() {
                continue;
            }
            let code = launchers[node].code();
            let since = launchers[node].ended.map_or(Duration::ZERO, |ended| ended.elapsed());
            let host = &launchers[node].host.name;
            let lost = match code {
                0 => None,
                // ssh's own code for a host that it cannot reach.
                EXIT_UNREACHABLE => Some(format!("zerorun: host {host} cannot be reached, or its launcher was killed")),
                // After a failure of the job, the launcher of the first host also ends within this time.
                code if since >= SHUTDOWN_TIMEOUT => Some(format!(
                    "zerorun: the launcher on host {host} ended with exit code {code}, and the others are waiting for \
                     it; see its output above"
                )),
                _ => None,
            };
            if let Some(text) = lost.filter(|_| !restarts) {
                eprint(&text);
                launchers.iter_mut().for_each(|launcher| launcher.end(Signal::TERM));
                wait_all(launchers);
                return Ok(1);
            }
            if restarts && code != 0 && since >= RESTART_DELAY {
                launchers[node].start()?;
            }
        }
    }
}

fn wait_all(launchers: &mut [HostLauncher<'_>]) {
    let until = Instant::now() + SHUTDOWN_TIMEOUT;
    while launchers.iter_mut().any(HostLauncher::is_running) && Instant::now() < until {
        std::thread::sleep(TICK);
    }
}

impl HostLauncher<'_> {
    fn start(&mut self) -> Result<()> {
        let spawned = self.command.spawn();
        let mut child = spawned.map_err(|source| not_reached(&self.host.name, &self.command, &source))?;
        // The pipe has room for the secret. If the launcher has already ended, its exit code gives the reason.
        let _ = child.stdin.as_mut().map(|stdin| stdin.write_all(self.secret.as_bytes()));
        (self.child, self.ended) = (Some(child), None);
        Ok(())
    }

    fn is_running(&mut self) -> bool {
        let running = self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        if !running && self.ended.is_none() {
            self.ended = Some(Instant::now());
        }
        running
    }

    /// Waits until the launcher has ended, and returns its exit code.
    fn code(&mut self) -> u8 {
        let status = self.child.as_mut().and_then(|child| child.wait().ok());
        status.map_or(EXIT_UNREACHABLE, |status| crate::launch::failure_report::RankExitStatus::of(status).exit_code())
    }

    /// Passes a signal to the launcher: directly on this host, through standard input on another one. Returns whether it
    /// was sent.
    fn pass_on(&mut self, signal: Signal) -> bool {
        let Some(child) = &mut self.child else { return false };
        match child.stdin.as_mut().filter(|_| !self.local) {
            Some(stdin) => write_signal(stdin, signal).is_ok(),
            None => send_signal(child, signal),
        }
    }

    /// Asks the launcher to end. From the third time on, or if the signal cannot be passed on, ends ssh too, because the
    /// host may be unreachable.
    fn end(&mut self, signal: Signal) {
        let is_sent = self.pass_on(signal);
        self.end_requests += 1;
        if let Some(child) = &self.child
            && !self.local
            && (!is_sent || self.end_requests > 2)
        {
            send_signal(child, signal);
        }
    }
}

/// Sends a signal to a process, and returns whether that succeeded. A process that has ended needs no signal.
fn send_signal(child: &Child, signal: Signal) -> bool {
    kill_process(Pid::from_child(child), signal).is_ok()
}

/// Returns the words that start a host's launcher.
fn launcher_command(
    job: &LocalJobSpec,
    hosts: &MultiHostOptions,
    world: &WorldInfo,
    node: usize,
    job_wide: &JobWideOptions<'_>,
) -> Result<Vec<String>> {
    let launcher =
        std::env::current_exe().map_err(|source| LaunchError::Setup { what: "finding the launcher itself", source })?;
    let nodes = world.hosts().len();
    let master = hosts.master_addr.clone().unwrap_or_else(|| world.hosts()[0].name.clone());
    let mut words = vec![as_text(launcher.as_os_str())?];
    let mut option = |name: &str, value: String| words.extend([format!("--{name}"), value]);
    option("nnodes", format!("{}:{nodes}", hosts.min_nodes.unwrap_or(nodes)));
    option("node_rank", node.to_string());
    option("num_ranks", world.hosts()[node].slots.len().to_string());
    option("master_addr", master);
    if let Some(address) = hosts.bind_addr.as_ref().filter(|_| node == 0) {
        option(BIND_ADDR, address.clone());
    }
    option("master_port", job.master_port.unwrap_or(super::DEFAULT_PORT).to_string());
    option("grace", format!("{}ms", job.grace.as_millis()));
    option("max_restarts", job_wide.max_restarts.to_string());
    if let Some(timeout) = job.timeout {
        option("timeout", format!("{}ms", timeout.as_millis()));
    }
    if let Some(port) = job.prometheus {
        option("prometheus", port.to_string());
    }
    if let Some(server) = &job.island.server {
        option("island_server", server.clone());
    }
    if let Some(slot) = job.island.slot {
        option("island_slot", slot.to_string());
    }
    for word in job.run.to_args() {
        words.push(as_text(&word)?);
    }
    words.extend(job_wide.binding.iter().flat_map(|binding| binding.to_args()));
    words.extend([format!("--{SECRET_FROM_STDIN}"), "--".into()]);
    words.push(as_text(job.program.as_os_str())?);
    for word in &job.args {
        words.push(as_text(word)?);
    }
    Ok(words)
}

/// Returns the command that runs `words` on a host.
fn command(
    host: &HostSlots,
    local: bool,
    words: &[String],
    exports: &[(String, String)],
    shell: &RemoteShellOptions,
) -> Command {
    let mut command = if local {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).envs(exports.iter().map(|(name, value)| (name, value)));
        command
    } else {
        shell.command(&host.name, words, exports, &working_directory())
    };
    // Standard input passes on the secret and signals. Its end asks the launcher to end, even if the other host's
    // processes would not notice that ssh has ended.
    command.stdin(Stdio::piped());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    die_with_parent(&mut command, Signal::TERM);
    command
}

fn working_directory() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| Path::new("/").into())
}
