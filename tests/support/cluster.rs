//! Hosts for tests: network namespaces of this machine, joined by a virtual cable, and the MPI libraries that
//! scripts/fetch_mpi.sh has fetched.

use super::processes::program;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An implementation of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpi {
    OpenMpi,
    Mpich,
}

impl Mpi {
    pub const ALL: [Self; 2] = [Self::OpenMpi, Self::Mpich];

    fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
        }
    }

    /// Returns the folder of the implementation, with bin and lib, or `None` if it was not fetched.
    pub fn folder(self) -> Option<PathBuf> {
        let folder = Self::root().join(self.name());
        folder.join("bin/mpirun").exists().then_some(folder)
    }

    /// Returns the folder of the fetched libraries.
    fn root() -> PathBuf {
        // TARGET/PROFILE/deps/TEST
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(3).unwrap().join("mpi")
    }

    /// Returns the file of the library, or `None` if it was not fetched.
    pub fn library(self) -> Option<PathBuf> {
        let name = match self {
            Self::OpenMpi => "libmpi.so.40",
            Self::Mpich => "libmpi.so.12",
        };
        Some(self.folder()?.join("lib").join(name))
    }
}

/// Returns the folder of Debian's MPICH, which has the library under a different name, or `None` if it was not fetched.
pub fn debian_mpich() -> Option<PathBuf> {
    let libraries = Mpi::root().join("debian/usr/lib");
    let mut folders = std::fs::read_dir(libraries).ok()?.map(|entry| entry.unwrap().path());
    folders.find(|folder| folder.join("libmpich.so.12").exists())
}

/// Returns a command that has a clean environment and ends after at most `seconds` seconds.
fn limited(folder: &Path, seconds: u32) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", &seconds.to_string()]).env_clear().stdin(Stdio::null());
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).env("HOME", "/tmp").env("RAYON_NUM_THREADS", "1");
    // Both hosts are the same machine, so MPICH's transport would use shared memory instead of the cable.
    command.env("UCX_TLS", "tcp,self");
    if let Some(skips) = std::env::var_os("CANDLE_ZERO_SIMD") {
        command.env("CANDLE_ZERO_SIMD", skips);
    }
    command
}

/// The first command in a private mount namespace. MPI libraries leave files in /dev/shm when ranks are killed, and
/// other tests check that folder.
const OWN_SHM: &str = "mount -t tmpfs none /dev/shm";

/// Returns `mpirun` for ranks on this host, or `None` if it was not fetched. The caller appends the program and its
/// arguments.
pub fn mpirun(mpi: Mpi, ranks: usize) -> Option<Command> {
    let folder = mpi.folder()?;
    let mut command = limited(&folder, 120);
    if Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success()) {
        command.args(["unshare", "-m", "sh", "-c", &format!("{OWN_SHM}; exec \"$@\""), "sh"]);
    }
    command.arg(folder.join("bin/mpirun"));
    if mpi == Mpi::OpenMpi {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    }
    command.args(["-n", &ranks.to_string()]);
    Some(command)
}

/// Two hosts, 10.77.0.1 and 10.77.0.2. Dropping this value removes them and all processes that run there.
pub struct Hosts {
    names: [String; 2],
    folder: tempfile::TempDir,
    /// The lock that only the test with these hosts holds. Other tests wait until it is released before they create two
    /// hosts, because ranks that wait for each other use all cores of a small machine.
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Hosts {
    /// Creates the hosts.
    ///
    /// # Errors
    /// Returns the reason if they cannot be created here.
    pub fn new() -> Result<Self, String> {
        static CREATED: AtomicUsize = AtomicUsize::new(0);
        let number = format!("{}-{}", std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b"].map(|host| format!("cz{number}{host}"));
        // A test that failed while it held the lock does not affect the next one.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let hosts = Self { names, folder: tempfile::tempdir().unwrap(), _turn: turn };
        let [a, b] = &hosts.names;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b])?;
        for (host, name) in hosts.names.iter().enumerate() {
            // An IPv6 address is unusable until the kernel has checked for duplicates.
            ip(&["netns", "exec", name, "sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6"])?;
            ip(&["-n", name, "address", "add", &format!("10.77.0.{}/24", host + 1), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
        }
        hosts.wait_for_the_cable()?;
        Ok(hosts)
    }

    /// Waits until both hosts detect the cable. Until then, MPICH's transport finds no route between them.
    fn wait_for_the_cable(&self) -> Result<(), String> {
        let until = Instant::now() + Duration::from_secs(20);
        for name in &self.names {
            while ip(&["-n", name, "-brief", "link", "show", "cable"])?.split_whitespace().nth(1) != Some("UP") {
                if Instant::now() > until {
                    return Err(format!("the cable of {name} was not detected within 20 s"));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Returns the names of the hosts.
    pub fn names(&self) -> [&str; 2] {
        [&self.names[0], &self.names[1]]
    }

    /// Returns a command that runs on one of the hosts with MPICH's library for at most `seconds` seconds, or `None` if
    /// the library was not fetched. The caller appends the program and its arguments.
    pub fn command_on(&self, host: usize, seconds: u32) -> Option<Command> {
        let lib = Mpi::Mpich.library()?;
        let name = &self.names[host];
        let mut command = limited(lib.ancestors().nth(2)?, seconds);
        command.arg("env").arg(format!("LD_LIBRARY_PATH={}", lib.parent()?.display()));
        command.args(["ip", "netns", "exec", name]);
        command.args(["unshare", "-u", "sh", "-c", &format!("hostname {name}; {OWN_SHM}; exec \"$@\""), "sh"]);
        Some(command)
    }

    /// Returns the program that replaces ssh between the hosts.
    pub fn remote_shell(&self) -> PathBuf {
        let [a, b] = &self.names;
        let text = format!(
            "[ \"$1\" = -x ] && shift\ncase $1 in 10.77.0.1) host={a};; 10.77.0.2) host={b};; *) exit 255;; esac\nshift\n\
             exec ip netns exec $host unshare -u sh -c \"hostname $host; {OWN_SHM}; $*\""
        );
        program(self.folder.path(), "reach", &text)
    }

    /// Unplugs a host's cable, or plugs it in again.
    pub fn plug(&self, host: usize, plugged: bool) {
        ip(&["-n", &self.names[host], "link", "set", "cable", if plugged { "up" } else { "down" }]).unwrap();
        if plugged {
            self.wait_for_the_cable().unwrap();
        }
    }

    /// Kills all processes on a host.
    pub fn kill_all(&self, host: usize) {
        // A process that starts in the meantime is killed in the next round.
        for _ in 0..3 {
            for pid in self.pids(host).into_iter().filter_map(Pid::from_raw) {
                // A process that has already ended needs no signal.
                _ = kill_process(pid, Signal::KILL);
            }
        }
    }

    fn pids(&self, host: usize) -> Vec<i32> {
        let output = Command::new("ip").args(["netns", "pids", &self.names[host]]).output().unwrap();
        let pids = String::from_utf8_lossy(&output.stdout).into_owned();
        pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Returns the IDs of a host's processes that run a program with this name.
    pub fn processes(&self, host: usize, program: &str) -> Vec<i32> {
        let runs_program = |pid: &i32| {
            let file = std::fs::read_link(format!("/proc/{pid}/exe"));
            file.is_ok_and(|file| file.file_name().is_some_and(|name| name == program))
        };
        self.pids(host).into_iter().filter(runs_program).collect()
    }

    /// Returns `mpirun` on the first host, for `ranks[0]` ranks on that host and `ranks[1]` on the second. The caller
    /// appends the program and its arguments.
    pub fn mpirun(&self, mpi: Mpi, ranks: [usize; 2]) -> Option<Command> {
        let mut command = self.command_with_mpirun(mpi)?;
        command.arg(mpi.folder()?.join("bin/mpirun"));
        let hosts = format!("10.77.0.1:{},10.77.0.2:{}", ranks[0], ranks[1]);
        command.args([if mpi == Mpi::OpenMpi { "--host" } else { "-hosts" }, &hosts]);
        command.args(self.options(mpi)?).args(["-n", &(ranks[0] + ranks[1]).to_string()]);
        Some(command)
    }

    /// Returns a command that runs on the first host, with this `mpirun` on its PATH. The caller appends the program
    /// and its arguments.
    pub fn command_with_mpirun(&self, mpi: Mpi) -> Option<Command> {
        let a = &self.names[0];
        let mut command = limited(&mpi.folder()?, 120);
        let script = format!("hostname {a}; {OWN_SHM}; exec \"$@\"");
        command.args(["ip", "netns", "exec", a, "unshare", "-u", "sh", "-c", &script, "sh"]);
        Some(command)
    }

    /// Returns the arguments that `mpirun` needs to reach the hosts.
    pub fn options(&self, mpi: Mpi) -> Option<Vec<String>> {
        let (folder, remote_shell) = (mpi.folder()?, self.remote_shell());
        let words = match mpi {
            Mpi::OpenMpi => format!(
                "--allow-run-as-root --bind-to none --prefix {} --mca plm ssh --mca plm_rsh_agent {} --mca pml ob1 --mca btl \
                 tcp,self --mca btl_tcp_if_include 10.77.0.0/24 --prtemca oob_tcp_if_include 10.77.0.0/24",
                folder.display(),
                remote_shell.display()
            ),
            Mpi::Mpich => format!("-launcher ssh -launcher-exec {} -iface cable", remote_shell.display()),
        };
        Some(words.split(' ').map(String::from).collect())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            if let Ok(output) = Command::new("ip").args(["netns", "pids", name]).output() {
                for pid in String::from_utf8_lossy(&output.stdout).split_whitespace() {
                    _ = Command::new("kill").args(["-KILL", pid]).status();
                }
            }
            _ = ip(&["netns", "delete", name]);
        }
    }
}

/// Runs `ip` and returns its output.
fn ip(args: &[&str]) -> Result<String, String> {
    match Command::new("ip").args(args).output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("ip: {error}")),
    }
}
