//! Shared helpers of the launcher's tests: `zerorun` in a clean environment, small programs, and waiting.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Returns a port on which no process listens. It is outside the range from which the system assigns ports, so that no
/// other test gets it before this one uses it.
pub fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(31);
    loop {
        let offset = first.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % 19_000;
        let port = 10_000 + offset as u16;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

/// Returns `zerorun` without the variables that it sets itself or that affect builds.
pub fn zerorun() -> Command {
    // A shell starts background jobs with SIGINT ignored, and nohup starts a command with SIGHUP ignored. zerorun
    // leaves ignored signals ignored.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT,HUP").arg(launcher());
    clean(command)
}

/// Returns `zerorun` under a limit that `ulimit` sets, such as `-v 90000`.
pub fn zerorun_within(limit: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]).arg(launcher());
    clean(command)
}

fn clean(mut command: Command) -> Command {
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "RAYON_NUM_THREADS",
        "CANDLE_NUM_THREADS",
        "GLIBC_TUNABLES",
        "CANDLE_ZERO_TIMEOUT_MS",
        "CARGO_TARGET_DIR",
        "RUSTFLAGS",
        "CARGO_TERM_COLOR",
    ] {
        command.env_remove(name);
    }
    // Training records runs in the working directory unless it is told not to.
    command.env_remove("CANDLE_ZERO_RUN").env_remove("CANDLE_ZERO_JOB").env("CANDLE_ZERO_RUNS_DIR", "off");
    command.stdin(Stdio::null());
    command
}

/// Returns the repository's folder, which tests of all packages use.
pub fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("ds_configs").is_dir()).unwrap()
}

/// Returns the executable of `zerorun`. Cargo builds it only for the tests of its own package. The tests of other
/// packages use the one that CANDLE_ZERO_TEST_LAUNCHER names, or build it here.
pub fn launcher() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    match option_env!("CARGO_BIN_EXE_zerorun") {
        Some(path) => Path::new(path),
        None => BUILT.get_or_init(|| match std::env::var_os("CANDLE_ZERO_TEST_LAUNCHER") {
            Some(path) => path.into(),
            None => build("crates/zerorun", "zerorun"),
        }),
    }
}

/// Returns the executable of one of the examples.
pub fn example(name: &str) -> PathBuf {
    build("examples", name)
}

/// Builds a program of a package of this repository with the build settings of this test.
fn build(package: &str, name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // TARGET/PROFILE/deps/TEST
    let folder = test.ancestors().nth(2).unwrap();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        profile => profile,
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--manifest-path"]).arg(repository().join(package).join("Cargo.toml"));
    cargo.args(["--bin", name, "--profile", profile, "--target-dir"]).arg(folder.parent().unwrap());
    let features = [("cuda", cfg!(feature = "cuda")), ("hub", cfg!(feature = "hub")), ("s3", cfg!(feature = "s3"))];
    // The examples have only the first of these features.
    let count = if name == "zerorun" { 3 } else { 1 };
    for (feature, _) in features.iter().take(count).filter(|(_, is_on)| *is_on) {
        cargo.args(["--features", feature]);
    }
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    folder.join(name)
}

/// Writes an executable shell script.
pub fn program(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns arguments that make a test binary run only one test of a module, so that the test acts as a program.
pub fn as_program(module: &str, test: &str) -> [String; 5] {
    // The first part of a module's path is the binary. Tests are named without it.
    let (_, module) = module.split_once("::").unwrap();
    let exact = format!("{module}::{test}");
    ["--exact", &exact, "--include-ignored", "--nocapture", "--test-threads=1"].map(String::from)
}

/// Starts a command with both outputs captured.
pub fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the processes that `pid` has started, and their descendants.
pub fn descendants(pid: i32) -> Vec<i32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children: Vec<i32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    let further: Vec<i32> = children.iter().flat_map(|pid| descendants(*pid)).collect();
    children.into_iter().chain(further).collect()
}

/// Waits until `done` returns a value, for at most 20 seconds.
pub fn wait_for<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    wait_up_to(Duration::from_secs(20), what, done)
}

/// Waits like [`wait_for`], with a different time limit.
pub fn wait_up_to<T>(limit: Duration, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < limit, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until `count` processes have written their process IDs to files `dir/pid.*`, and returns the IDs.
pub fn pids(dir: &Path, count: usize) -> Vec<i32> {
    wait_for("the processes to start", || {
        let mut pids = Vec::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("pid.") {
                pids.extend(std::fs::read_to_string(path).unwrap().trim().parse::<i32>().ok());
            }
        }
        (pids.len() == count).then_some(pids)
    })
}

/// Returns whether a process is running. A zombie is not, and neither is a process that no longer exists.
pub fn runs(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub fn wait_until_gone(pids: &[i32]) {
    wait_for("the processes to end", || pids.iter().all(|pid| !runs(*pid)).then_some(()));
}

pub fn send(signal: rustix::process::Signal, to: &Child) {
    rustix::process::kill_process(rustix::process::Pid::from_child(to), signal).unwrap();
}
