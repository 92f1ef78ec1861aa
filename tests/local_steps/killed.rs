//! Islands that `zerorun` starts and `kill -9` ends: the others continue, and the killed islands join again.

use super::convergence;
use super::on_ranks;
use super::support::processes::{as_program, runs, start, stderr, wait_up_to, zerorun};
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, RankEnv, threads};
use candle_zero::models::{Gpt, GptConfig};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SLOTS: usize = 4;
const WINDOW: u64 = 10;
const STEPS: u64 = 60;
const BATCH: usize = 4;
const LENGTH: usize = 16;
const VOCABULARY: usize = 17;
/// The limit for every wait for a process. It is long because a machine that runs many tests at a time is slow.
const LIMIT: Duration = Duration::from_secs(300);

fn config(section: Value) -> Value {
    json!({
        "train_batch_size": SLOTS * BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_check": false,
        "local_steps": section,
    })
}

/// Returns inputs and targets of generated text: each token depends on the two before it.
fn text(seed: u64) -> (Tensor, Tensor) {
    let mut rows = Vec::new();
    for row in 0..BATCH as u64 {
        let mut tokens = vec![((seed * 31 + row * 7) % VOCABULARY as u64) as u32, ((seed * 13 + row) % 5) as u32];
        while tokens.len() < LENGTH + 1 {
            let [.., a, b] = tokens[..] else { unreachable!() };
            tokens.push((a * 3 + b * 5 + 1) % VOCABULARY as u32);
        }
        rows.push(tokens);
    }
    let tensor = |from: usize| {
        let values: Vec<u32> = rows.iter().flat_map(|row| row[from..from + LENGTH].to_vec()).collect();
        Tensor::from_vec(values, (BATCH, LENGTH), &Device::Cpu).unwrap()
    };
    (tensor(0), tensor(1))
}

/// Trains up to the last step, calling `after_step` after each step, and returns the loss on text that was not trained
/// on.
fn train_and_validate(
    comm: Arc<dyn Communicator>,
    section: Value,
    steps: u64,
    mut after_step: impl FnMut(&Engine<Gpt>),
) -> candle_zero::Result<f32> {
    let gpt = GptConfig {
        vocab: VOCABULARY,
        ctx: LENGTH,
        n_embd: 16,
        n_layer: 1,
        n_head: 2,
        ..GptConfig::preset("nano").unwrap()
    };
    let builder = Engine::builder().communicator(comm).device(Device::Cpu);
    let mut engine = builder.initialize(|vb| Gpt::new(&gpt, vb), config(section))?;
    while engine.global_steps() < steps {
        let (inputs, targets) = text(engine.global_steps() * SLOTS as u64 + engine.rank() as u64);
        let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
        after_step(&engine);
    }
    engine.synchronize_islands()?;
    let losses = (0..4).map(|number| {
        let (inputs, targets) = text(1_000_000 + number);
        engine.eval(|model| model.loss(&inputs, &targets))?.to_scalar::<f32>().map_err(Into::into)
    });
    Ok(losses.collect::<candle_zero::Result<Vec<f32>>>()?.iter().sum::<f32>() / 4.0)
}

#[test]
#[ignore = "started as an island by the other tests"]
fn as_an_island() {
    let Some(dir) = std::env::var_os("ISLAND_TEST_DIR") else { return };
    let dir = Path::new(&dir);
    let number = |name: &str| std::env::var(name).unwrap();
    let gates: Vec<u64> = number("ISLAND_TEST_GATES").split(',').map(|gate| gate.parse().unwrap()).collect();
    let comm = candle_zero::comm::from_env(&RankEnv::from_env().unwrap()).unwrap();
    let section = json!({"steps": WINDOW, "islands": SLOTS, "min_islands": 3});
    let steps = number("ISLAND_TEST_STEPS").parse().unwrap();
    let slot = number("CANDLE_ZERO_ISLAND_SLOT");
    std::fs::write(dir.join(format!("pid.{slot}")), std::process::id().to_string()).unwrap();
    let loss = train_and_validate(comm, section, steps, |engine| {
        let (slot, step) = (engine.island().unwrap().0, engine.global_steps());
        if gates.contains(&step) {
            std::fs::write(dir.join(format!("at.{step}.{slot}")), std::process::id().to_string()).unwrap();
            wait_up_to(LIMIT, "the gate", || dir.join(format!("open.{step}")).exists().then_some(()));
        }
    });
    println!("final loss {}", loss.unwrap());
}

/// An island server in a separate process.
struct Server {
    process: Child,
    address: String,
    messages: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start() -> Self {
        let mut command = zerorun();
        command.args(["island-server", "--port", "0"]);
        let mut process = start(&mut command);
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("island server: listening on ").unwrap().to_string();
        let messages = Arc::new(Mutex::new(Vec::new()));
        let errors = BufReader::new(process.stderr.take().unwrap());
        std::thread::spawn({
            let messages = messages.clone();
            move || errors.lines().map_while(Result::ok).for_each(|line| messages.lock().unwrap().push(line))
        });
        Self { process, address, messages }
    }

    /// Waits until the server has printed `text` for the `count`th time.
    fn wait_for(&self, text: &str, count: usize) {
        wait_up_to(LIMIT, text, || {
            let messages = self.messages.lock().unwrap();
            (messages.iter().filter(|line| line.contains(text)).count() >= count).then_some(())
        });
    }

    fn end(mut self) {
        super::support::processes::send(Signal::TERM, &self.process);
        assert_eq!(self.process.wait().unwrap().code(), Some(0));
    }
}

fn island(server: &Server, slot: usize, dir: &Path, (gates, steps): (&str, u64)) -> Child {
    island_of(server, slot, "as_an_island", dir, (gates, steps))
}

/// Starts the test `program` as an island.
fn island_of(server: &Server, slot: usize, program: &str, dir: &Path, (gates, steps): (&str, u64)) -> Child {
    let mut command: Command = zerorun();
    command.args(["--island_server", &server.address, "--island_slot", &slot.to_string(), "--max_restarts", "30"]);
    command.arg(std::env::current_exe().unwrap()).args(as_program(module_path!(), program));
    command.env("ISLAND_TEST_DIR", dir).env("ISLAND_TEST_GATES", gates).env("ISLAND_TEST_STEPS", steps.to_string());
    // All islands are on one host.
    command.envs(["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"].map(|name| (name, "1")));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the island in `slot` is at a gate, and returns its process.
fn at_gate(dir: &Path, step: u64, slot: usize) -> Pid {
    let file = dir.join(format!("at.{step}.{slot}"));
    let pid = wait_up_to(LIMIT, "an island at a gate", || std::fs::read_to_string(&file).ok()?.parse().ok());
    Pid::from_raw(pid).unwrap()
}

fn open_gate(dir: &Path, step: u64) {
    std::fs::write(dir.join(format!("open.{step}")), "").unwrap();
}

fn final_loss(island: Child) -> f32 {
    let output = island.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let loss = text.lines().find_map(|line| line.split_once("final loss ")).unwrap_or_else(|| panic!("{text}")).1;
    loss.trim().parse().unwrap()
}

/// Returns the loss of a run of all islands in one job.
fn loss_of_one_job() -> f32 {
    let section = json!({"steps": WINDOW, "islands": SLOTS});
    threads::run(SLOTS, |comm| train_and_validate(comm, section.clone(), STEPS, |_| {})).unwrap().remove(0).unwrap()
}

#[test]
fn two_islands_that_are_killed_and_one_that_comes_later_join_without_stopping_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (server, gates) = (Server::start(), ("12,32", STEPS));
    let mut islands: Vec<Child> = (0..3).map(|slot| island(&server, slot, dir, gates)).collect();
    let victim = at_gate(dir, 12, 1);
    [0, 2].iter().for_each(|slot| _ = at_gate(dir, 12, *slot));
    kill_process(victim, Signal::KILL).unwrap();
    islands.push(island(&server, 3, dir, gates));
    server.wait_for("island 1 waits to join", 1);
    server.wait_for("island 3 waits to join", 1);
    open_gate(dir, 12);
    let victims = [at_gate(dir, 32, 0), at_gate(dir, 32, 1), at_gate(dir, 32, 2), at_gate(dir, 32, 3)];
    // The donor dies, and the island that was killed before dies again.
    victims[..2].iter().for_each(|victim| kill_process(*victim, Signal::KILL).unwrap());
    server.wait_for("island 0 waits to join", 1);
    server.wait_for("island 1 waits to join", 2);
    open_gate(dir, 32);
    let losses: Vec<f32> = islands.into_iter().map(final_loss).collect();
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    server.wait_for("joins after step 20", 2);
    server.wait_for("joins after step 40", 2);
    server.end();
    let expected = loss_of_one_job();
    println!("loss {} instead of {expected}", losses[0]);
    assert!((losses[0] / expected - 1.0).abs() < 0.25, "{} instead of {expected}", losses[0]);
}

#[test]
#[ignore = "takes minutes: 20 kills; run it with: cargo test --release --test local_steps random_kills -- --ignored --nocapture"]
fn random_kills_hang_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start();
    // The gate is beyond the last step. In a release build, the steps take one or two minutes.
    let islands: Vec<Child> = (0..SLOTS).map(|slot| island(&server, slot, dir, ("1000000", 60_000))).collect();
    let mut random = std::process::id() as u64;
    let mut draw = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let mut kills = 0;
    while kills < 20 {
        std::thread::sleep(Duration::from_millis(draw(3000)));
        let slot = draw(SLOTS as u64);
        let pid = std::fs::read_to_string(dir.join(format!("pid.{slot}"))).ok().and_then(|pid| pid.parse().ok());
        if let Some(pid) = pid.filter(|pid| runs(*pid)) {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
            kills += 1;
            println!("killed island {slot}");
        }
        assert!(islands.iter().any(|island| runs(island.id() as i32)), "all islands ended after {kills} kills");
    }
    let losses: Vec<f32> = islands.into_iter().map(final_loss).collect();
    println!("{kills} kills, losses {losses:?}");
    assert!(losses.iter().all(|loss| loss.is_finite()));
    server.end();
}

#[test]
#[ignore = "started as an island by the other tests"]
fn as_an_island_that_trains_nano() {
    let Some(dir) = std::env::var_os("ISLAND_TEST_DIR") else { return };
    let dir = Path::new(&dir);
    let steps = std::env::var("ISLAND_TEST_STEPS").unwrap().parse().unwrap();
    let comm = candle_zero::comm::from_env(&RankEnv::from_env().unwrap()).unwrap();
    let slot = std::env::var("CANDLE_ZERO_ISLAND_SLOT").unwrap();
    std::fs::write(dir.join(format!("pid.{slot}")), std::process::id().to_string()).unwrap();
    let section = json!({"steps": 50, "islands": SLOTS, "min_islands": 3});
    let result = convergence::train_and_validate(comm, Some(section), steps, |engine| {
        let step = engine.global_steps();
        if step.is_multiple_of(50) {
            std::fs::write(dir.join(format!("step.{slot}")), format!("{step}\n")).unwrap();
        }
    });
    println!("final loss {}", result.unwrap().0);
}

#[test]
#[ignore = "takes a quarter of an hour; run it with: cargo test --release --test local_steps killed -- --ignored --nocapture"]
fn islands_that_are_killed_twice_and_join_twice_are_within_one_percent_of_synchronous_training() {
    let steps: u64 = std::env::var("CANDLE_ZERO_STEPS").map_or(10_000, |steps| steps.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start();
    let start = |slot: usize| island_of(&server, slot, "as_an_island_that_trains_nano", dir, ("", steps));
    // Waits until island 0 has taken the given share of its steps.
    let wait_for_share = |share: f64| {
        let first = (steps as f64 * share) as u64;
        wait_up_to(Duration::from_secs(3600), "a step of island 0", || {
            let text = std::fs::read_to_string(dir.join("step.0")).ok()?;
            let step: u64 = text.strip_suffix('\n')?.parse().ok()?;
            (step >= first).then_some(())
        });
    };
    let kill = |slot: usize| {
        let pid = std::fs::read_to_string(dir.join(format!("pid.{slot}"))).unwrap().parse().unwrap();
        assert!(runs(pid), "island {slot} is not running");
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    };
    let mut islands: Vec<Child> = (0..3).map(start).collect();
    wait_for_share(0.15);
    let mut late = start(3);
    wait_for_share(0.3);
    kill(1);
    wait_for_share(0.45);
    super::support::processes::send(Signal::TERM, &late);
    late.wait().unwrap();
    wait_for_share(0.6);
    islands.push(start(3));
    wait_for_share(0.7);
    kill(1);
    let losses: Vec<f32> = islands.into_iter().map(final_loss).collect();
    server.wait_for("island 1 waits to join", 2);
    server.wait_for("island 3 waits to join", 2);
    server.end();
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    let ranks = convergence::ISLANDS;
    let (synchronous, _) =
        on_ranks(ranks, |comm| convergence::train_and_validate(comm, None, steps as usize, |_| {}))[0];
    let change = f64::from(losses[0]) / synchronous - 1.0;
    println!("validation loss {} instead of {synchronous} ({:+.2} %)", losses[0], 100.0 * change);
    assert!(change < 0.01, "{} instead of {synchronous}", losses[0]);
}
