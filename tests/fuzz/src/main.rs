//! Runs fuzz targets with any Rust toolchain, without libFuzzer: changes seeds at random, and runs the inputs in
//! separate processes, which may fail.
//!
//! ```text
//! candle-zero-fuzz [--target NAME]... [--seconds 10] [--seed 1] [--first 0] [--jobs 1]   all targets, or some
//! candle-zero-fuzz --target NAME --input FILE                                            one input
//! candle-zero-fuzz --seeds DIR                                                           writes the seeds to DIR/NAME/
//! candle-zero-fuzz --planted                                                             checks that faults are found
//! ```
//!
//! Case N of a target depends only on the seed and N. Each target runs for `--seconds`, and `--jobs` of them run at a
//! time. With one target, all jobs run different cases of it. A panic, a signal, a case that takes more than 10 seconds
//! of CPU time or a minute in total, and more than 1 GiB of memory are failures: the program spends up to 15 seconds
//! shrinking the input and writes it to `artifacts/`, and the exit code is 1. If candle-zero's sandbox ends the process
//! with an error message, that is not a failure.

use candle_zero::untrusted_work::SandboxAllocator;
use candle_zero_fuzz::mutator;
use candle_zero_fuzz::planted::PLANTED;
use candle_zero_fuzz::scratch;
use candle_zero_fuzz::targets::{TARGETS, Target};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The allocator of zerorun, which bounds the memory of candle-zero's sandbox.
#[global_allocator]
static ALLOCATOR: SandboxAllocator = SandboxAllocator;

/// The maximum CPU time of a case.
const MAX_CPU_TIME: Duration = Duration::from_secs(10);
/// The maximum wall-clock time of a case: a case may wait, but not forever.
const MAX_WALL_TIME: Duration = Duration::from_secs(60);
/// The maximum resident memory of a process.
const MAX_MEMORY: u64 = 1 << 30;
/// The maximum address space. An allocation beyond this limit fails, as a much larger allocation would on any machine.
const MAX_ADDRESS_SPACE: u64 = 16 << 30;
/// The time available for reducing a failing input.
const MINIMIZATION_TIME: Duration = Duration::from_secs(15);
/// The maximum number of failures that are written for a target.
const MAX_FAILURES: usize = 8;

/// The maximum length of the messages that are printed about a failure.
const MAX_TEXT_LENGTH: usize = 3000;

/// The exit code of a process after a panic.
const EXIT_PANIC: i32 = 101;
/// The exit code of a process that has used too much memory.
const EXIT_MEMORY: i32 = 102;
/// The exit code of a process that candle-zero's sandbox ends after an error message.
const EXIT_SANDBOX: i32 = 1;

/// The environment variable that makes this program run cases itself. Its value does not matter.
const WORKER: &str = "CANDLE_ZERO_FUZZ_WORKER";

/// The command line.
struct Options {
    targets: Vec<&'static Target>,
    seconds: f64,
    seed: u64,
    first: u64,
    /// The difference between the indices of successive cases.
    step: u64,
    jobs: usize,
    input: Option<PathBuf>,
    seeds: Option<PathBuf>,
    planted: bool,
}

impl Options {
    fn read() -> Result<Self, String> {
        let mut options = Self {
            targets: Vec::new(),
            seconds: 10.0,
            seed: 1,
            first: 0,
            step: 1,
            jobs: 1,
            input: None,
            seeds: None,
            planted: false,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            if word == "--planted" {
                options.planted = true;
                continue;
            }
            let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
            let wrong = || format!("{value} is not a valid value of {word}");
            match word.as_str() {
                "--target" => {
                    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
                    let target = TARGETS.iter().chain(&PLANTED).find(|target| target.name == value);
                    options.targets.push(
                        target.ok_or_else(|| {
                            format!("there is no target {value}; the targets are {}", names.join(", "))
                        })?,
                    );
                }
                "--seconds" => options.seconds = value.parse().map_err(|_| wrong())?,
                "--seed" => options.seed = value.parse().map_err(|_| wrong())?,
                "--first" => options.first = value.parse().map_err(|_| wrong())?,
                "--step" => options.step = value.parse().map_err(|_| wrong())?,
                "--jobs" => options.jobs = value.parse().ok().filter(|jobs| *jobs > 0).ok_or_else(wrong)?,
                "--input" => options.input = Some(value.into()),
                "--seeds" => options.seeds = Some(value.into()),
                _ => return Err(format!("there is no option {word}; see tests/fuzz/src/main.rs")),
            }
        }
        if options.targets.is_empty() {
            options.targets = TARGETS.iter().collect();
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    let options = match Options::read() {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("{problem}");
            return ExitCode::from(2);
        }
    };
    if let Some(folder) = &options.seeds {
        return match write_seeds(&options, folder) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{}: {error}", folder.display());
                ExitCode::from(2)
            }
        };
    }
    if options.planted {
        return find_planted();
    }
    match (std::env::var_os(WORKER).is_some(), &options.input) {
        (true, None) => run_cases(&options),
        (true, Some(input)) => run_input(&options, input),
        (false, None) => run_targets(&options),
        (false, Some(input)) => {
            let Ok(bytes) = fs::read(input) else {
                eprintln!("{} cannot be read", input.display());
                return ExitCode::from(2);
            };
            match try_input(options.targets[0], &bytes) {
                Some(failure) => {
                    println!("{}", failure.text);
                    ExitCode::FAILURE
                }
                None => ExitCode::SUCCESS,
            }
        }
    }
}

fn write_seeds(options: &Options, folder: &Path) -> std::io::Result<()> {
    for target in &options.targets {
        fs::create_dir_all(folder.join(target.name))?;
        for (index, seed) in (target.seeds)().iter().enumerate() {
            fs::write(folder.join(target.name).join(format!("seed-{index:02}")), seed)?;
        }
    }
    Ok(())
}

// ---- the process that runs cases ------------------------------------------------------------------------------------

/// The numbers that a process running cases writes for the process that watches it.
#[derive(Default, Clone, Copy)]
struct Progress {
    /// The index of the current case.
    case: u64,
    /// The number of cases that are done.
    done: u64,
    /// The number of inputs that were accepted.
    accepted: u64,
}

impl Progress {
    fn path() -> PathBuf {
        scratch::folder().join("progress")
    }

    fn write(self, file: &File) {
        let bytes = [self.case, self.done, self.accepted].map(u64::to_le_bytes).concat();
        file.write_all_at(&bytes, 0).expect("a writable file");
    }

    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_default();
        let number = |at: usize| {
            let bytes = bytes.get(at * 8..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        Self { case: number(0), done: number(1), accepted: number(2) }
    }
}

/// Limits the resources of this process, and makes every panic end it, even if candle-zero would catch the panic.
fn prepare_worker() {
    let limit = libc::rlimit { rlim_cur: MAX_ADDRESS_SPACE, rlim_max: MAX_ADDRESS_SPACE };
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both limits are valid, and are only read.
    unsafe {
        libc::setrlimit(libc::RLIMIT_AS, &raw const limit);
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
    }
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::exit(EXIT_PANIC);
    }));
}

/// Returns the peak resident memory of this process.
fn peak_memory() -> u64 {
    // SAFETY: zeros are a valid value, which the system replaces.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024
}

fn check_memory() {
    let peak = peak_memory();
    if peak > MAX_MEMORY {
        eprintln!("{} MiB of memory", peak >> 20);
        std::process::exit(EXIT_MEMORY);
    }
}

fn run_input(options: &Options, input: &Path) -> ExitCode {
    let target = options.targets[0];
    let data = fs::read(input).expect("a readable input");
    prepare_worker();
    let is_accepted = on_default_stack(move || (target.run)(&data));
    check_memory();
    println!("{}", if is_accepted { "accepted" } else { "refused" });
    ExitCode::SUCCESS
}

fn run_cases(options: &Options) -> ExitCode {
    let (target, end) = (options.targets[0], Instant::now() + Duration::from_secs_f64(options.seconds));
    let (seed, step) = (options.seed, options.step);
    let mut progress = Progress { case: options.first, ..Progress::default() };
    let file = File::create(Progress::path()).expect("a writable file");
    progress.write(&file);
    prepare_worker();
    on_default_stack(move || {
        let seeds = (target.seeds)();
        while Instant::now() < end {
            progress.write(&file);
            let data = mutator::input(target, &seeds, seed, progress.case);
            progress.accepted += u64::from((target.run)(&data));
            check_memory();
            progress.done += 1;
            progress.case += step;
            if progress.done.is_multiple_of(4096) {
                // candle-zero's notices are of no use if nothing fails.
                // SAFETY: descriptor 2 is this process's own message file; truncating it affects no memory.
                unsafe { libc::ftruncate(2, 0) };
            }
        }
        progress.write(&file);
    });
    ExitCode::SUCCESS
}

/// Runs `work` on a thread with a stack of the default size, the smallest with which candle-zero runs.
fn on_default_stack<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(work).join().unwrap_or_else(|_| std::process::exit(EXIT_PANIC))
}

// ---- the process that watches ---------------------------------------------------------------------------------------

/// A failure of a target.
struct Failure {
    /// The kind and the place of the failure, by which failures are told apart.
    signature: String,
    /// The messages of the process.
    text: String,
}

/// The outcome of a process that ran cases.
enum Ending {
    Done,
    /// The sandbox ended the process.
    Sandbox,
    Failed(Failure),
}

/// A process that runs cases, and its folder.
struct Worker {
    folder: tempfile::TempDir,
    child: std::process::Child,
}

impl Worker {
    fn start(target: &Target, arguments: &[String]) -> Self {
        let folder = scratch::create().expect("a temporary folder");
        let errors = OpenOptions::new().create(true).append(true).open(folder.path().join("stderr"));
        let child = Command::new(std::env::current_exe().expect("the path of this program"))
            .args(["--target", target.name])
            .args(arguments)
            .env(WORKER, "1")
            .env(scratch::FOLDER, folder.path())
            .env("RAYON_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors.expect("a writable file"))
            .spawn();
        Self { folder, child: child.expect("this program can be started") }
    }

    fn progress(&self) -> Progress {
        Progress::read(&self.folder.path().join("progress"))
    }

    /// Returns the resident memory and the CPU time.
    fn usage(&self) -> Option<(u64, Duration)> {
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", self.child.id())).ok();
        let pages: u64 = read("statm")?.split(' ').nth(1)?.parse().ok()?;
        // The fields follow the name, which is in parentheses and may contain spaces.
        let stat = read("stat")?;
        let mut times = stat.rsplit_once(')')?.1.split(' ').skip(12).map(str::parse::<u64>);
        let ticks = times.next()?.ok()? + times.next()?.ok()?;
        Some((pages * 4096, Duration::from_millis(ticks * 10)))
    }

    /// Waits for the process to end, and kills it if a case takes too much time or memory.
    fn wait(&mut self) -> Ending {
        let mut case = (None, Instant::now(), Duration::ZERO);
        let mut interval = Duration::from_millis(1);
        loop {
            if let Some(status) = self.child.try_wait().expect("a process that can be waited for") {
                return self.ending(status);
            }
            std::thread::sleep(interval);
            interval = (interval * 2).min(Duration::from_millis(100));
            let (done, Some((memory, computed))) = (Some(self.progress().done), self.usage()) else { continue };
            if case.0 != done {
                case = (done, Instant::now(), computed);
            }
            let problem = if memory > 2 * MAX_MEMORY {
                format!("memory of {} MiB or more", memory >> 20)
            } else if computed.saturating_sub(case.2) > MAX_CPU_TIME {
                format!("a case of more than {} s of processor time", MAX_CPU_TIME.as_secs())
            } else if case.1.elapsed() > MAX_WALL_TIME {
                format!("a case of more than {} s", MAX_WALL_TIME.as_secs())
            } else {
                continue;
            };
            let _ = self.child.kill();
            let _ = self.child.wait();
            let text = format!("{problem}\n{}", self.messages());
            return Ending::Failed(Failure { signature: problem, text });
        }
    }

    /// Returns the end of the process's standard error.
    fn messages(&self) -> String {
        let Ok(mut file) = File::open(self.folder.path().join("stderr")) else { return String::new() };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = Vec::new();
        let _ = file.seek(SeekFrom::Start(length.saturating_sub(1 << 16)));
        let _ = file.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn ending(&self, status: std::process::ExitStatus) -> Ending {
        let text = self.messages();
        let signature = match (status.code(), status.signal()) {
            (Some(0), _) => return Ending::Done,
            (Some(EXIT_SANDBOX), _) if text.lines().last().is_some_and(|line| line.starts_with("error: ")) => {
                return Ending::Sandbox;
            }
            (Some(EXIT_MEMORY), _) => "memory above the limit".to_owned(),
            (Some(_), _) => {
                let panic = text.rsplit_once("panicked at ").and_then(|(_, rest)| rest.lines().next());
                panic.map_or_else(|| status.to_string(), |place| format!("panic at {place}"))
            }
            _ => status.to_string(),
        };
        Ending::Failed(Failure { text: format!("{signature}\n{text}"), signature })
    }
}

/// Runs a target on one input, and returns the failure if there is one.
fn try_input(target: &Target, data: &[u8]) -> Option<Failure> {
    let folder = scratch::create().expect("a temporary folder");
    let input = folder.path().join("input");
    fs::write(&input, data).expect("a writable file");
    match Worker::start(target, &["--input".into(), input.display().to_string()]).wait() {
        Ending::Failed(failure) => Some(failure),
        _ => None,
    }
}

/// Shrinks a failing input by leaving out parts of it, for at most [`MINIMIZATION_TIME`].
fn minimize(target: &Target, data: Vec<u8>, signature: &str) -> Vec<u8> {
    let end = Instant::now() + MINIMIZATION_TIME;
    let mut data = data;
    let mut size = data.len().div_ceil(2);
    while size > 0 && Instant::now() < end {
        let mut at = 0;
        let mut is_shorter = false;
        while at < data.len() && Instant::now() < end {
            let rest = data.get(at + size..).unwrap_or_default();
            let shorter = [&data[..at], rest].concat();
            if try_input(target, &shorter).is_some_and(|failure| failure.signature == signature) {
                data = shorter;
                is_shorter = true;
            } else {
                at += size;
            }
        }
        size = if is_shorter && size > 1 { size.min(data.len().div_ceil(2)) } else { size / 2 };
    }
    data
}

/// The result of a target, or of one part of its cases.
#[derive(Default)]
struct TargetResult {
    done: u64,
    accepted: u64,
    /// The number of cases that the sandbox has ended.
    ended: u64,
    seconds: f64,
    failures: BTreeSet<String>,
}

/// Runs the cases of a target for some time, in a new process whenever one has ended early, and reports failures.
fn run_target(target: &Target, options: &Options, part: u64, parts: u64) -> TargetResult {
    let mut result = TargetResult::default();
    let mut next = options.first + part;
    loop {
        let remaining = options.seconds - result.seconds;
        if remaining <= 0.0 || result.failures.len() >= MAX_FAILURES {
            break;
        }
        let start = Instant::now();
        let [seconds, seed, first, step] = [
            ("--seconds", remaining.to_string()),
            ("--seed", options.seed.to_string()),
            ("--first", next.to_string()),
            ("--step", parts.to_string()),
        ]
        .map(|(option, value)| [option.to_owned(), value]);
        let mut worker = Worker::start(target, &[seconds, seed, first, step].concat());
        let ending = worker.wait();
        result.seconds += start.elapsed().as_secs_f64();
        let progress = worker.progress();
        result.done += progress.done;
        result.accepted += progress.accepted;
        next = progress.case + parts;
        match ending {
            Ending::Done => break,
            Ending::Sandbox => result.ended += 1,
            Ending::Failed(failure) => {
                let is_new = result.failures.insert(failure.signature.clone());
                if is_new {
                    report(target, options, progress.case, failure);
                }
            }
        }
    }
    result
}

/// Writes the input of a failure, and prints how to reproduce it.
fn report(target: &Target, options: &Options, case: u64, failure: Failure) {
    let seed = options.seed;
    // Some targets' seeds are also written to the folder of this process, which is removed at the end.
    let data = mutator::input(target, &(target.seeds)(), seed, case);
    let reproduced = try_input(target, &data);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts");
    let path = folder.join(format!("{}-{seed}-{case}.bin", target.name));
    let data = match &reproduced {
        Some(failure) => minimize(target, data, &failure.signature),
        None => data,
    };
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, &data));
    let text: String = failure.text.trim_end().chars().take(MAX_TEXT_LENGTH).collect();
    println!("\n{}: case {case} of seed {seed}: {text}", target.name);
    if let Err(error) = written {
        println!("{}: {error}", path.display());
    }
    let command = "cargo run --release --manifest-path tests/fuzz/Cargo.toml --";
    match reproduced {
        Some(_) => println!(
            "repeat: {command} --target {} --input tests/fuzz/artifacts/{}",
            target.name,
            path.file_name().unwrap_or_default().display()
        ),
        None => println!("the failure occurs only after other cases: {command} --target {} --seed {seed}", target.name),
    }
}

/// Runs targets with faults, and checks that each fault is found.
fn find_planted() -> ExitCode {
    let mut are_found = true;
    for target in &PLANTED {
        let failure = try_input(target, &[]);
        let signature = failure.map_or_else(|| "nothing".to_owned(), |failure| failure.signature);
        println!("{}: {signature}", target.name);
        are_found &= target.words.iter().copied().flatten().any(|word| signature.starts_with(word));
    }
    if are_found { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_targets(options: &Options) -> ExitCode {
    let folder = scratch::create().expect("a temporary folder");
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var(scratch::FOLDER, folder.path()) };
    let parts = if options.targets.len() == 1 { options.jobs as u64 } else { 1 };
    let tasks: Vec<(usize, u64)> =
        (0..options.targets.len()).flat_map(|target| (0..parts).map(move |part| (target, part))).collect();
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<TargetResult>> = options.targets.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.min(tasks.len()) {
            scope.spawn(|| {
                while let Some((index, part)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run_target(options.targets[*index], options, *part, parts);
                    let mut all = results[*index].lock().expect("no thread has panicked");
                    all.done += result.done;
                    all.accepted += result.accepted;
                    all.ended += result.ended;
                    all.seconds = all.seconds.max(result.seconds);
                    all.failures.extend(result.failures);
                }
            });
        }
    });
    println!("\n{:<14} {:>9} {:>9} {:>9} {:>9} {:>9}", "target", "cases", "cases/s", "accepted", "ended", "failures");
    let mut failures = 0;
    for (target, result) in options.targets.iter().zip(results) {
        let result = result.into_inner().expect("no thread has panicked");
        let TargetResult { done, accepted, ended, seconds, .. } = result;
        let rate = done as f64 / seconds;
        println!("{:<14} {done:>9} {rate:>9.0} {accepted:>9} {ended:>9} {:>9}", target.name, result.failures.len());
        failures += result.failures.len();
    }
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
