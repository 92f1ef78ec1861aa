//! Islands that are jobs of their own and meet at an island server: they join, leave and die, and the others go on.

use super::{BATCH, Model, Start, batch, config, engine, on_ranks, train, weights};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::island_server::{IslandServer, IslandServerOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

type Weights = Vec<Vec<f32>>;

fn server(options: impl FnOnce(&mut IslandServerOptions)) -> IslandServer {
    let mut all = IslandServerOptions::default();
    options(&mut all);
    IslandServer::start(&all).unwrap()
}

fn section(server: &IslandServer, mut keys: Value) -> Value {
    keys["server"] = json!(server.address().to_string());
    keys
}

fn configuration(section: &Value, stage: usize, islands: usize) -> Value {
    config(section, stage, islands)
}

fn engine_in_slot(
    comm: Arc<dyn candle_zero::comm::Communicator>,
    config: Value,
    slot: usize,
) -> candle_zero::Result<Engine<Model>> {
    let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(Arc::new(Start));
    builder.island_slot(slot).initialize(Model::new, config)
}

/// An island of `ranks` ranks on threads of its own, each of which runs `program`.
fn island<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(Arc<dyn candle_zero::comm::Communicator>) -> candle_zero::Result<T> + Send + Sync + 'static,
) -> JoinHandle<Vec<candle_zero::Result<T>>> {
    std::thread::spawn(move || threads::run(ranks, program).unwrap())
}

fn well<T>(island: JoinHandle<Vec<candle_zero::Result<T>>>) -> Vec<T> {
    island.join().unwrap().into_iter().map(|rank| rank.unwrap()).collect()
}

/// Returns the error of an island's first rank.
fn error<T>(island: JoinHandle<Vec<candle_zero::Result<T>>>) -> String {
    island.join().unwrap().into_iter().find_map(Result::err).unwrap().to_string()
}

/// Runs one island per slot, all from the beginning, and returns the weights of each rank after `steps` steps.
fn run_all(section: &Value, stage: usize, (islands, ranks): (usize, usize), steps: usize) -> Vec<Weights> {
    let all = (0..islands).map(|slot| {
        let config = configuration(section, stage, islands);
        island(ranks, move |comm| {
            let mut engine = engine_in_slot(comm, config.clone(), slot)?;
            assert_eq!((engine.island(), engine.world_size()), (Some((slot, islands)), islands * ranks));
            train(&mut engine, 1..=steps)?;
            let before = weights(&mut engine);
            engine.synchronize_islands()?;
            let mut all = weights(&mut engine);
            all.extend(before);
            Ok(all)
        })
    });
    all.collect::<Vec<_>>().into_iter().flat_map(well).collect()
}

#[test]
fn a_run_with_a_server_has_the_bits_of_the_run_in_one_job() {
    for (keys, stage, ranks) in [
        (json!({"steps": 4}), 1, 1),
        (json!({"steps": 4, "fragments": 2, "fragment_delay": 3, "fragment_alpha": 0.25}), 3, 2),
        (json!({"steps": 3, "fragments": 3, "outer_momentum": 0.0}), 0, 2),
    ] {
        let fixed = on_ranks(3 * ranks, |comm| {
            let mut engine = engine(comm, configuration(&keys, stage, 3))?;
            train(&mut engine, 1..=10)?;
            let before = weights(&mut engine);
            engine.synchronize_islands()?;
            let mut all = weights(&mut engine);
            all.extend(before);
            Ok(all)
        });
        let server = server(|_| {});
        let found = run_all(&section(&server, keys.clone()), stage, (3, ranks), 10);
        assert!(found == fixed, "{keys}, stage {stage}, {ranks} ranks per island");
    }
}

#[test]
fn each_wire_format_trains_nearly_the_same_weights() {
    let run = |wire: &str| {
        let server = server(|_| {});
        run_all(&section(&server, json!({"steps": 3, "wire_dtype": wire})), 1, (2, 1), 6).swap_remove(0)
    };
    let exact = run("fp32");
    for wire in ["bf16", "int8", "int4"] {
        let found = run(wire);
        let pairs = found.iter().flatten().zip(exact.iter().flatten());
        let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && largest < 0.02, "{wire}: {largest}");
    }
}

/// An island that a test directs step by step.
struct Directed {
    orders: Sender<Order>,
    answers: Receiver<Answer>,
    thread: JoinHandle<()>,
}

enum Order {
    Train(usize),
    Synchronize,
    Save(PathBuf),
    Load(PathBuf),
    /// The process dies: its connections end without a goodbye.
    Die,
}

#[derive(Debug)]
enum Answer {
    Ready { step: u64, slot: usize },
    Trained { weights: Weights, loss: f32 },
    Failed(String),
}

impl Directed {
    /// Starts an island of one rank in `slot`.
    fn start(config: Value, slot: usize) -> Self {
        let (orders, received) = channel();
        let (answer, answers) = channel();
        let thread = std::thread::spawn(move || {
            let received = Mutex::new(received);
            let answer = Mutex::new(answer);
            let told = threads::run(1, |comm| direct(comm, &config, slot, &received.lock().unwrap(), &answer));
            if let Err(error) = told.unwrap().remove(0) {
                _ = answer.lock().unwrap().send(Answer::Failed(error.to_string()));
            }
        });
        Self { orders, answers, thread }
    }

    fn answer(&self) -> Answer {
        self.answers.recv().unwrap()
    }

    /// Waits until the island trains, and returns its step and its slot.
    fn ready(&self) -> (u64, usize) {
        match self.answer() {
            Answer::Ready { step, slot } => (step, slot),
            other => panic!("{other:?}"),
        }
    }

    fn order(&self, order: Order) {
        self.orders.send(order).unwrap();
    }

    fn trained(&self) -> (Weights, f32) {
        match self.answer() {
            Answer::Trained { weights, loss } => (weights, loss),
            other => panic!("{other:?}"),
        }
    }

    fn failed(self) -> String {
        let failed = match self.answer() {
            Answer::Failed(why) => why,
            other => panic!("{other:?}"),
        };
        self.thread.join().unwrap();
        failed
    }

    fn end(self) {
        drop(self.orders);
        self.thread.join().unwrap();
    }

    fn die(self) {
        self.order(Order::Die);
        self.thread.join().unwrap();
    }
}

fn direct(
    comm: Arc<dyn candle_zero::comm::Communicator>,
    config: &Value,
    slot: usize,
    orders: &Receiver<Order>,
    answer: &Mutex<Sender<Answer>>,
) -> candle_zero::Result<()> {
    let tell = |told: Answer| _ = answer.lock().unwrap().send(told);
    let mut engine = engine_in_slot(comm, config.clone(), slot)?;
    let ready =
        |engine: &Engine<Model>| Answer::Ready { step: engine.global_steps(), slot: engine.island().unwrap().0 };
    tell(ready(&engine));
    for order in orders {
        match order {
            Order::Train(steps) => {
                let mut loss = f32::NAN;
                for _ in 0..steps {
                    let step = usize::try_from(engine.global_steps()).unwrap() + 1;
                    let batch = batch(step, slot, (0, 1));
                    let of_step = engine.forward(|model| model.loss(&batch))?;
                    engine.backward(&of_step)?;
                    engine.step()?;
                    loss = of_step.to_scalar()?;
                }
                tell(Answer::Trained { weights: weights(&mut engine), loss });
            }
            Order::Synchronize => {
                engine.synchronize_islands()?;
                tell(Answer::Trained { weights: weights(&mut engine), loss: f32::NAN });
            }
            Order::Save(dir) => {
                engine.save_checkpoint(dir, None, json!({"saved by": slot}))?;
                tell(ready(&engine));
            }
            Order::Load(dir) => {
                engine.load_checkpoint(dir, None, &LoadOptions::default())?;
                tell(ready(&engine));
            }
            Order::Die => {
                // A rank that is out of step says no goodbye.
                let bad = candle_core::Tensor::new(f32::NAN, &Device::Cpu)?;
                let loss = engine.forward(|model| model.loss(&batch(1, slot, (0, 1)))?.add(&bad))?;
                assert!(engine.backward(&loss).is_err());
                return Ok(());
            }
        }
    }
    Ok(())
}

fn keys() -> Value {
    json!({"steps": 4, "fragments": 2, "fragment_delay": 1, "min_islands": 2})
}

#[test]
fn islands_die_and_join_while_the_others_train_and_end_with_the_same_weights() {
    let server = server(|_| {});
    let config = configuration(&section(&server, keys()), 1, 4);
    let mut islands: Vec<Directed> = (0..2).map(|slot| Directed::start(config.clone(), slot)).collect();
    islands.iter().for_each(|island| assert_eq!(island.ready().0, 0));
    let train = |islands: &[Directed], steps: usize| -> Vec<(Weights, f32)> {
        islands.iter().for_each(|island| island.order(Order::Train(steps)));
        islands.iter().map(Directed::trained).collect()
    };
    let first = train(&islands, 5);
    assert!(first.iter().all(|(_, loss)| loss.is_finite()));
    // Two islands come; they wait until the next exchange.
    islands.extend((2..4).map(|slot| Directed::start(config.clone(), slot)));
    islands[..2].iter().for_each(|island| island.order(Order::Train(5)));
    islands[..2].iter().for_each(|island| _ = island.trained());
    let joined: Vec<(u64, usize)> = islands[2..].iter().map(Directed::ready).collect();
    assert!(joined.iter().all(|(step, _)| (6..=10).contains(step)), "{joined:?}");
    // All of them catch up with step 10, and train on together.
    for (island, (step, _)) in islands[2..].iter().zip(&joined) {
        island.order(Order::Train(10 - usize::try_from(*step).unwrap()));
        island.trained();
    }
    train(&islands, 4);
    // The donor dies, and an island without a change of its own.
    islands.remove(0).die();
    islands.remove(1).die();
    train(&islands, 5);
    // The first slot is free again.
    let again = Directed::start(config.clone(), 0);
    islands.iter().for_each(|island| island.order(Order::Train(4)));
    islands.iter().for_each(|island| _ = island.trained());
    let (step, slot) = again.ready();
    assert!((20..=23).contains(&step) && slot == 0, "{step}, {slot}");
    again.order(Order::Train(23 - usize::try_from(step).unwrap()));
    again.trained();
    islands.push(again);
    islands.iter().for_each(|island| island.order(Order::Synchronize));
    let last: Vec<(Weights, f32)> = islands.iter().map(Directed::trained).collect();
    assert!(last.iter().all(|(weights, _)| *weights == last[0].0));
    islands.into_iter().for_each(Directed::end);
}
