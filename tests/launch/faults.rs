//! Ranks that die, panic, leave, hang or stop responding in the middle of real training under the real `zerorun`: the
//! other ranks exit within seconds, without being stopped and with an error that names the rank, and no processes or
//! files remain.
//!
//! The training program is this test binary itself (`training_program` below), which `zerorun` starts again on each
//! rank with the fault in its environment. Therefore, the program is built with the tests, and users do not see it
//! among the examples.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::support::processes::{as_program, send, start, wait_for, wait_until_gone, zerorun};
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use candle_zero::Engine;
use candle_zero::models::{Gpt, GptConfig};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

const RANKS: usize = 4;
/// The maximum time from the fault to the end of all processes.
const LIMIT: Duration = Duration::from_secs(10);

// ---- the training program ---------------------------------------------------------------------------------------

/// A fault on one rank: where it occurs, and what the rank does there. It is passed as words in an environment
/// variable.
#[derive(Debug, Clone, Copy)]
struct Fault {
    rank: usize,
    place: &'static str,
    /// The number of times that the rank passes the place before the fault.
    nth: u64,
    action: Action,
}

/// The action of a rank when it reaches its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Reports that it has reached the place, and continues.
    Continue,
    /// Reports that it has reached the place, and makes the others wait for half a second.
    Pause,
    /// Reports that it has reached the place, and stays there forever.
    Stay,
    Panic,
    /// Returns an error. The process ends [`Case::linger_ms`] later.
    Fail,
    /// Ends as if everything were done.
    Leave,
}

const PLACES: [&str; 7] = ["start", "initialize", "forward", "between", "backward", "step", "export"];
const ACTIONS: [Action; 6] =
    [Action::Continue, Action::Pause, Action::Stay, Action::Panic, Action::Fail, Action::Leave];

impl Fault {
    fn to_words(self) -> String {
        let Self { rank, place, nth, action } = self;
        format!("{rank} {place} {nth} {action:?}")
    }

    fn from_words(words: &str) -> Self {
        let words: Vec<&str> = words.split(' ').collect();
        let [rank, place, nth, action] = words[..] else { panic!("{words:?}") };
        Self {
            rank: rank.parse().unwrap(),
            place: PLACES.into_iter().find(|p| *p == place).unwrap(),
            nth: nth.parse().unwrap(),
            action: ACTIONS.into_iter().find(|d| format!("{d:?}") == action).unwrap(),
        }
    }
}

/// The fault that this rank causes, if any.
struct Plan(Option<Fault>);

impl Plan {
    fn action(&self, place: &str, nth: u64) -> Option<Action> {
        self.0.filter(|fault| (fault.place, fault.nth) == (place, nth)).map(|fault| fault.action)
    }

    /// Passes a place. Returns `true` if the rank is to leave.
    fn pass(&self, place: &str, nth: u64) -> candle_core::Result<bool> {
        let Some(action) = self.action(place, nth) else { return Ok(false) };
        println!("at {place} {nth}");
        match action {
            Action::Continue => Ok(false),
            Action::Pause => {
                std::thread::sleep(Duration::from_millis(500));
                Ok(false)
            }
            Action::Stay => loop {
                std::thread::sleep(Duration::from_secs(100));
            },
            Action::Panic => panic!("on purpose"),
            Action::Fail => candle_core::bail!("failed on purpose"),
            Action::Leave => Ok(true),
        }
    }
}

/// An identity operation that passes the place "backward" in its backward pass.
struct Backward(Plan, u64);

impl CustomOp1 for Backward {
    fn name(&self) -> &'static str {
        "backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let CpuStorage::F32(loss) = storage else { panic!("the loss is f32") };
        Ok((CpuStorage::F32(vec![loss[layout.start_offset()]]), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.0.pass("backward", self.1)?;
        Ok(Some(grad.clone()))
    }
}

fn train(fault: Option<Fault>, out: &Path, stage: u8, steps: u64) -> candle_zero::Result<()> {
    let plan = Plan(fault);
    if plan.pass("start", 0)? {
        return Ok(());
    }
    let config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 100_000},
    });
    let gpt = GptConfig { n_layer: 3, n_head: 4, n_embd: 64, ctx: 64, vocab: 99, ..GptConfig::preset("nano").unwrap() };
    let mut engine = Engine::initialize(
        |vb| {
            let gpt = Gpt::new(&gpt, vb)?;
            plan.pass("initialize", 0)?;
            Ok(gpt)
        },
        config,
    )?;
    let tokens = |shift: usize| {
        let numbers = (0..128).map(|i| ((7 * i + 3 * engine.rank() + shift) % 99) as u32);
        Tensor::from_iter(numbers, &Device::Cpu)?.reshape((2, 64))
    };
    let (inputs, targets) = (tokens(0)?, tokens(7)?);
    for step in 0..steps {
        let loss = engine.forward(|gpt| {
            plan.pass("forward", step)?;
            gpt.loss(&inputs, &targets)?.apply_op1(Backward(Plan(fault), step))
        })?;
        if plan.pass("between", step)? {
            return Ok(());
        }
        engine.backward(&loss)?;
        plan.pass("step", step)?;
        engine.step()?;
    }
    for nth in 0..3 {
        plan.pass("export", nth)?;
        engine.export_safetensors(out.join("model.safetensors"))?;
    }
    Ok(())
}

#[test]
#[ignore = "started on each rank by the tests of this file"]
fn training_program() {
    let Ok(words) = std::env::var("TEST_FAULT") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    // The test harness has not yet ended its own line of output.
    println!("\npid {}", std::process::id());
    let fault = Some(Fault::from_words(&words)).filter(|fault| fault.rank as u64 == number("RANK"));
    let out = PathBuf::from(std::env::var_os("TEST_OUT").unwrap());
    if let Err(error) = train(fault, &out, number("TEST_STAGE") as u8, number("TEST_STEPS")) {
        eprintln!("error: {error}");
        if fault.is_some() {
            std::thread::sleep(Duration::from_millis(number("TEST_LINGER_MS")));
            std::process::exit(7);
        }
        std::process::exit(1);
    }
}

// ---- running it -------------------------------------------------------------------------------------------------

/// The way in which the program is started, and its fault.
#[derive(Clone, Copy)]
struct Case {
    fault: Fault,
    stage: u8,
    steps: u64,
    timeout: &'static str,
    linger_ms: u64,
    backtrace: &'static str,
}

fn case(rank: usize, place: &'static str, nth: u64, action: Action) -> Case {
    // The stage varies from case to case.
    let stage = ((rank + nth as usize) % 4) as u8;
    Case { fault: Fault { rank, place, nth, action }, stage, steps: 6, timeout: "60s", linger_ms: 0, backtrace: "0" }
}

/// A run in progress.
struct Run {
    case: Case,
    zerorun: Child,
    lines: Receiver<String>,
    errors: std::thread::JoinHandle<String>,
    pids: [Option<i32>; RANKS],
    /// The folder that contains the temporary folder and the folder of the exported model.
    dir: TempDir,
    /// The earlier content of /dev/shm.
    shared_memory: BTreeSet<PathBuf>,
}

fn names_in(dir: &Path) -> BTreeSet<PathBuf> {
    std::fs::read_dir(dir).map(|entries| entries.map(|e| e.unwrap().path()).collect()).unwrap_or_default()
}

impl Run {
    fn start(case: Case) -> Self {
        let dir = tempfile::tempdir().unwrap();
        ["tmp", "out"].iter().for_each(|name| std::fs::create_dir(dir.path().join(name)).unwrap());
        let shared_memory = names_in(Path::new("/dev/shm"));
        let mut command = zerorun();
        command.args(["--num_ranks", &RANKS.to_string(), "--timeout", case.timeout]);
        command.arg(std::env::current_exe().unwrap());
        command.args(as_program(module_path!(), "training_program"));
        command.env("RAYON_NUM_THREADS", "1").env("CANDLE_NUM_THREADS", "1").env("RUST_BACKTRACE", case.backtrace);
        command.env("TMPDIR", dir.path().join("tmp")).env("TEST_OUT", dir.path().join("out"));
        command.env("TEST_FAULT", case.fault.to_words()).env("TEST_STAGE", case.stage.to_string());
        command.env("TEST_STEPS", case.steps.to_string()).env("TEST_LINGER_MS", case.linger_ms.to_string());
        let mut zerorun = start(&mut command);
        let (sender, lines) = channel();
        let stdout = BufReader::new(zerorun.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut stderr = zerorun.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        Self { case, zerorun, lines, errors, pids: [None; RANKS], dir, shared_memory }
    }

    /// Reads the ranks' output up to a line that ends with `end`, or all of it if `end` is `None`.
    fn read_until(&mut self, end: Option<&str>) {
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(60)) {
            let (rank, text) = line.strip_prefix("[rank ").unwrap().split_once("] ").unwrap();
            if let Some(pid) = text.strip_prefix("pid ") {
                self.pids[rank.parse::<usize>().unwrap()] = Some(pid.parse().unwrap());
            }
            if end.is_some_and(|end| text.ends_with(end)) {
                return;
            }
        }
        assert!(end.is_none(), "the output ended or paused for a minute before {end:?}: {:?}", self.case.fault);
    }

    /// Waits until the rank with the fault has reached the place, and returns its process.
    fn wait_for_the_place(&mut self) -> Pid {
        let Fault { rank, place, nth, .. } = self.case.fault;
        self.read_until(Some(&format!("at {place} {nth}")));
        Pid::from_raw(self.pids[rank].unwrap()).unwrap()
    }

    /// Waits for the end of all processes and checks what must hold after every fault.
    fn end(mut self) -> Outcome {
        self.read_until(None);
        let status = self.zerorun.wait().unwrap();
        let errors = self.errors.join().unwrap();
        let pids: Vec<i32> = self.pids.iter().flatten().copied().collect();
        wait_until_gone(&pids);
        assert_eq!(names_in(&self.dir.path().join("tmp")), BTreeSet::new(), "files left in the temporary folder");
        // Other programs on this machine may also use /dev/shm for a moment.
        wait_for("/dev/shm to be as before", || {
            names_in(Path::new("/dev/shm")).is_subset(&self.shared_memory).then_some(())
        });
        let exported = names_in(&self.dir.path().join("out"));
        let complete = self.dir.path().join("out/model.safetensors");
        assert!(exported.iter().all(|path| *path == complete), "left next to the exported file: {exported:?}");
        Outcome { rank: self.case.fault.rank, status, errors }
    }
}

/// The outcome of a run.
struct Outcome {
    /// The rank with the fault.
    rank: usize,
    status: ExitStatus,
    errors: String,
}

impl Outcome {
    /// Checks that each of the other ranks reported `message` and was not stopped, and that `zerorun` ended with `code`
    /// and blamed the right rank for `cause`.
    fn check(&self, message: &str, code: i32, cause: &str) {
        let Self { rank: culprit, status, errors } = self;
        for rank in (0..RANKS).filter(|rank| rank != culprit) {
            let reports =
                |line: &&str| line.strip_prefix(&format!("[rank {rank}] error: ")).is_some_and(|e| e.contains(message));
            assert!(errors.lines().any(|line| reports(&line)), "rank {rank} did not report `{message}`:\n{errors}");
        }
        let report = errors.split_once("zerorun: rank ").unwrap_or_else(|| panic!("{errors}")).1;
        assert!(report.starts_with(&format!("{culprit} failed first: {cause}")), "{errors}");
        let others = ["ranks 1-3", "ranks 0, 2-3", "ranks 0-1, 3", "ranks 0-2"][*culprit];
        assert!(report.contains(&format!("zerorun:   {others}: exit code 1, not stopped by zerorun\n")), "{errors}");
        assert_eq!(status.code(), Some(code), "{errors}");
    }
}

fn killed(case: Case, delay_ms: u64) {
    let mut run = Run::start(case);
    let pid = run.wait_for_the_place();
    std::thread::sleep(Duration::from_millis(delay_ms));
    kill_process(pid, Signal::KILL).unwrap();
    let at = Instant::now();
    let ended = run.end();
    assert!(at.elapsed() < LIMIT, "{:?}", at.elapsed());
    let message = format!("rank {} died (its process was killed by SIGKILL (9))", case.fault.rank);
    ended.check(&message, 137, "it was killed by SIGKILL (9)");
}

#[test]
fn a_rank_that_is_killed_is_named_by_all_others_within_seconds() {
    killed(case(1, "start", 0, Action::Stay), 0);
    killed(case(3, "initialize", 0, Action::Stay), 10);
    killed(Case { steps: 1000, ..case(2, "initialize", 0, Action::Continue) }, 1);
    killed(case(0, "forward", 3, Action::Stay), 5);
    killed(case(2, "between", 1, Action::Stay), 0);
    // In the next four cases, the rank is killed at an arbitrary point while training is running.
    killed(Case { steps: 1000, ..case(1, "step", 3, Action::Continue) }, 0);
    killed(Case { steps: 1000, ..case(3, "step", 2, Action::Continue) }, 4);
    killed(Case { steps: 1000, ..case(2, "step", 0, Action::Continue) }, 9);
    killed(Case { steps: 1000, ..case(0, "step", 3, Action::Continue) }, 17);
    killed(case(1, "export", 2, Action::Stay), 0);
}

#[test]
fn a_rank_that_panics_is_named_by_all_others_within_seconds() {
    for (rank, place, nth) in [
        (0, "initialize", 0),
        (3, "initialize", 0),
        (1, "forward", 0),
        (2, "forward", 3),
        (3, "between", 2),
        (0, "backward", 1),
        (2, "backward", 1),
        (1, "step", 3),
        (3, "step", 0),
        (2, "export", 1),
    ] {
        let mut run = Run::start(case(rank, place, nth, Action::Panic));
        run.wait_for_the_place();
        let at = Instant::now();
        let ended = run.end();
        assert!(at.elapsed() < LIMIT, "{:?}", at.elapsed());
        let message = format!("rank {rank} stopped (it panicked; see its own output)");
        ended.check(&message, 101, "it ended with exit code 101");
        assert!(ended.errors.contains("\nzerorun:   | on purpose\n"), "{}", ended.errors);
    }
}

#[test]
fn a_rank_that_leaves_early_is_named_by_all_others_and_its_exit_code_0_does_not_count() {
    for (rank, place, nth) in [
        (2, "start", 0),
        (0, "between", 0),
        (1, "between", 1),
        (2, "between", 2),
        (3, "between", 3),
        (0, "between", 3),
        (1, "between", 4),
        (2, "between", 4),
        (3, "between", 5),
        (0, "between", 5),
    ] {
        let mut run = Run::start(case(rank, place, nth, Action::Leave));
        run.wait_for_the_place();
        let at = Instant::now();
        let ended = run.end();
        assert!(at.elapsed() < LIMIT, "{:?}", at.elapsed());
        let cause = "it left the job while other ranks needed it, and ended with exit code 0";
        ended.check(&format!("rank {rank} left the job"), 1, cause);
    }
}

#[test]
fn a_rank_that_fails_and_lingers_is_blamed_although_the_others_end_first() {
    // If a method of the engine returns an error, the engine informs the other ranks. The rank's process ends a second
    // later, or never.
    let slow = Case { linger_ms: 1000, ..case(3, "forward", 1, Action::Fail) };
    // Candle adds a backtrace to its messages. The messages of the other ranks stay readable.
    let ended = Run::start(Case { backtrace: "1", ..slow }).end();
    ended.check("rank 3 stopped (failed on purpose)", 7, "it ended with exit code 7");
    let report = "\nzerorun:   | error: failed on purpose\nzerorun:   ranks 0-2: exit code 1, not stopped by zerorun";
    assert!(ended.errors.contains(report), "{}", ended.errors);
    let never = Case { linger_ms: 100_000, ..case(0, "backward", 1, Action::Fail) };
    let ended = Run::start(never).end();
    ended.check("rank 0 stopped (failed on purpose)", 1, "it gave up after an error, and was stopped by zerorun");
    // An error in the program itself, which the engine does not notice: the engine is dropped, and the process ends
    // later. Until then, another engine might be created.
    let unseen = Case { linger_ms: 500, ..case(1, "between", 2, Action::Fail) };
    Run::start(unseen).end().check("rank 1 died (its process ended with exit code 7)", 7, "it ended with exit code 7");
}

#[test]
fn a_rank_that_is_stopped_is_named_when_its_heart_has_been_silent_for_eight_seconds() {
    let mut run = Run::start(Case { steps: 1000, ..case(2, "step", 1, Action::Continue) });
    let pid = run.wait_for_the_place();
    kill_process(pid, Signal::STOP).unwrap();
    let at = Instant::now();
    let ended = run.end();
    assert!(at.elapsed() > Duration::from_secs(8) && at.elapsed() < Duration::from_secs(16), "{:?}", at.elapsed());
    let cause = "it was unresponsive for too long, and was stopped by zerorun with SIGTERM";
    ended.check("rank 2 did not respond for 8 s", 1, cause);
}

#[test]
fn a_rank_that_hangs_in_code_of_the_script_is_a_timeout_that_names_it() {
    let mut run = Run::start(Case { timeout: "3s", ..case(1, "between", 1, Action::Stay) });
    run.wait_for_the_place();
    let at = Instant::now();
    let ended = run.end();
    assert!(at.elapsed() > Duration::from_secs(3) && at.elapsed() < LIMIT, "{:?}", at.elapsed());
    let cause = "other ranks waited for it longer than --timeout, and it was stopped by zerorun with SIGTERM";
    ended.check("waited 3s for rank 1", 1, cause);
}

#[test]
fn a_job_that_was_suspended_for_longer_than_a_heartbeat_may_be_silent_goes_on() {
    let mut run = Run::start(Case { timeout: "5s", ..case(3, "between", 1, Action::Pause) });
    run.wait_for_the_place();
    // The other ranks have begun to wait for this rank.
    std::thread::sleep(Duration::from_millis(200));
    send(Signal::TSTP, &run.zerorun);
    std::thread::sleep(Duration::from_secs(10));
    assert!(run.lines.try_recv().is_err(), "it was not stopped");
    send(Signal::CONT, &run.zerorun);
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.errors);
}
