//! Islands that are separate jobs and meet at an island server: they join, leave and die, and the others continue.

use super::support::processes::wait_up_to;
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
use std::time::Duration;

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

/// Starts an island of `ranks` ranks, each of which runs `program` on its own thread.
fn island<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(Arc<dyn candle_zero::comm::Communicator>) -> candle_zero::Result<T> + Send + Sync + 'static,
) -> JoinHandle<Vec<candle_zero::Result<T>>> {
    std::thread::spawn(move || threads::run(ranks, program).unwrap())
}

fn results<T>(island: JoinHandle<Vec<candle_zero::Result<T>>>) -> Vec<T> {
    island.join().unwrap().into_iter().map(|rank| rank.unwrap()).collect()
}

/// Returns the first error of an island's ranks.
fn error<T>(island: JoinHandle<Vec<candle_zero::Result<T>>>) -> String {
    island.join().unwrap().into_iter().find_map(Result::err).unwrap().to_string()
}

/// Runs one island per slot, all from the beginning, for `steps` steps and a synchronization. Returns the weights of
/// each rank after the synchronization, followed by those before it.
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
    all.collect::<Vec<_>>().into_iter().flat_map(results).collect()
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
    /// The process dies: its connections end without notice.
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
            let result = threads::run(1, |comm| direct(comm, &config, slot, &received.lock().unwrap(), &answer));
            if let Err(error) = result.unwrap().remove(0) {
                _ = answer.lock().unwrap().send(Answer::Failed(error.to_string()));
            }
        });
        Self { orders, answers, thread }
    }

    fn answer(&self) -> Answer {
        self.answers.recv().unwrap()
    }

    /// Waits until the island is ready to train, and returns its step and its slot.
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
    let tell = |message: Answer| _ = answer.lock().unwrap().send(message);
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
                    let step_loss = engine.forward(|model| model.loss(&batch))?;
                    engine.backward(&step_loss)?;
                    engine.step()?;
                    loss = step_loss.to_scalar()?;
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
                // A rank does not announce its end after an error that leaves it out of step.
                let bad = candle_core::Tensor::new(f32::NAN, &Device::Cpu)?;
                let loss = engine.forward(|model| model.loss(&batch(1, slot, (0, 1)))?.add(&bad))?;
                assert!(engine.backward(&loss).is_err());
                return Ok(());
            }
        }
    }
    Ok(())
}

fn train_all(islands: &[Directed], steps: usize) -> Vec<Weights> {
    islands.iter().for_each(|island| island.order(Order::Train(steps)));
    islands.iter().map(|island| island.trained().0).collect()
}

/// Waits until the server has these members and these islands are waiting to join.
fn wait_until(server: &IslandServer, members: &[usize], waiting: &[usize]) {
    wait_up_to(Duration::from_secs(60), "the expected members and waiting islands", || {
        let status = server.status();
        (status.members == members && status.waiting == waiting).then_some(())
    });
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
    train_all(&islands, 5);
    islands.extend((2..4).map(|slot| Directed::start(config.clone(), slot)));
    wait_until(&server, &[0, 1], &[2, 3]);
    // The exchange after step 6 takes effect after step 7.
    islands[..2].iter().for_each(|island| island.order(Order::Train(5)));
    for (slot, island) in islands.iter().enumerate().skip(2) {
        assert_eq!(island.ready(), (7, slot));
        island.order(Order::Train(3));
    }
    islands.iter().for_each(|island| _ = island.trained());
    train_all(&islands, 4);
    // The next donor and another island die.
    islands.remove(0).die();
    islands.remove(1).die();
    train_all(&islands, 5);
    wait_until(&server, &[1, 3], &[]);
    let again = Directed::start(config.clone(), 0);
    wait_until(&server, &[1, 3], &[0]);
    islands.iter().for_each(|island| island.order(Order::Train(4)));
    assert_eq!(again.ready(), (21, 0));
    again.order(Order::Train(2));
    islands.push(again);
    islands.iter().for_each(|island| _ = island.trained());
    islands.iter().for_each(|island| island.order(Order::Synchronize));
    let last: Vec<(Weights, f32)> = islands.iter().map(Directed::trained).collect();
    assert!(last.iter().all(|(weights, _)| *weights == last[0].0));
    islands.into_iter().for_each(Directed::end);
    wait_until(&server, &[], &[]);
}

#[test]
fn an_island_that_joins_where_the_others_synchronize_has_their_weights() {
    let server = server(|_| {});
    let keys = json!({"steps": 4, "fragments": 2, "min_islands": 2});
    let config = configuration(&section(&server, keys), 1, 3);
    let mut islands: Vec<Directed> = (0..2).map(|slot| Directed::start(config.clone(), slot)).collect();
    islands.iter().for_each(|island| assert_eq!(island.ready().0, 0));
    train_all(&islands, 6);
    let joining = Directed::start(config, 2);
    wait_until(&server, &[0, 1], &[2]);
    // The exchange after step 8 names a donor. The synchronization then changes the weights of the other fragment.
    train_all(&islands, 2);
    islands.iter().for_each(|island| island.order(Order::Synchronize));
    islands.iter().for_each(|island| _ = island.trained());
    assert_eq!(joining.ready(), (8, 2));
    islands.push(joining);
    train_all(&islands, 5);
    wait_until(&server, &[0, 1, 2], &[]);
    synchronized(islands);
}

/// Executes a run in which island 2 joins after step 8, and island 1 is gone before the exchange after step 12: it
/// dies, or a replay tells it to leave. Returns the weights at the end.
fn eventful(server: &IslandServer, is_replay: bool) -> Weights {
    let config = configuration(&section(server, json!({"steps": 4, "min_islands": 2})), 1, 3);
    let mut islands: Vec<Directed> = (0..2).map(|slot| Directed::start(config.clone(), slot)).collect();
    islands.iter().for_each(|island| assert_eq!(island.ready().0, 0));
    train_all(&islands, 6);
    let joining = Directed::start(config, 2);
    wait_until(server, &[0, 1], &[2]);
    train_all(&islands, 2);
    // The donor gives its state at the beginning of its next step.
    islands.iter().for_each(|island| island.order(Order::Train(3)));
    assert_eq!(joining.ready(), (8, 2));
    joining.order(Order::Train(3));
    islands.push(joining);
    islands.iter().for_each(|island| _ = island.trained());
    let leaving = islands.remove(1);
    if is_replay {
        leaving.order(Order::Train(1));
    } else {
        leaving.die();
        train_all(&islands, 3);
        return synchronized(islands);
    }
    train_all(&islands, 3);
    let why = leaving.failed();
    assert!(why.ends_with("in the recorded run, it left before the exchange after step 12"), "{why}");
    synchronized(islands)
}

/// Ends islands, and returns the weights that all of them have at the end.
fn synchronized(islands: Vec<Directed>) -> Weights {
    islands.iter().for_each(|island| island.order(Order::Synchronize));
    let mut last: Vec<(Weights, f32)> = islands.iter().map(Directed::trained).collect();
    assert!(last.iter().all(|(weights, _)| *weights == last[0].0));
    islands.into_iter().for_each(Directed::end);
    last.swap_remove(0).0
}

#[test]
fn a_replayed_run_has_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record");
    let expected = {
        let server = server(|options| options.record = Some(record.clone()));
        eventful(&server, false)
    };
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.contains(r#""event":"join","slot":2,"donor":0"#), "{text}");
    let again = dir.path().join("again");
    let found = {
        let server = server(|options| {
            options.replay = Some(record.clone());
            options.record = Some(again.clone());
        });
        eventful(&server, true)
    };
    assert!(found == expected);
    // Both records have the same exchanges, with the same members, samples and weights.
    let rounds = |path: &Path| -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().filter(|line| line.contains(r#""event":"round""#)).map(str::to_string).collect()
    };
    assert_eq!(rounds(&again), rounds(&record));
}

#[test]
fn a_replay_of_another_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record");
    let run = |options: &dyn Fn(&mut IslandServerOptions), lr: f64| {
        let server = server(options);
        let mut config = configuration(&section(&server, json!({"steps": 2})), 1, 2);
        config["optimizer"]["params"]["lr"] = json!(lr);
        let islands: Vec<Directed> = (0..2).map(|slot| Directed::start(config.clone(), slot)).collect();
        islands.iter().for_each(|island| _ = island.ready());
        islands.iter().for_each(|island| island.order(Order::Train(4)));
        islands
            .into_iter()
            .map(|island| match island.answer() {
                Answer::Failed(why) => why.replace(&server.address().to_string(), "ADDRESS"),
                _ => "trained".into(),
            })
            .collect::<Vec<String>>()
    };
    assert_eq!(run(&|options| options.record = Some(record.clone()), 1e-2), ["trained", "trained"]);
    let refused = run(&|options| options.replay = Some(record.clone()), 2e-2);
    insta::assert_snapshot!(refused[0], @"the island server at ADDRESS refuses this island: the replay differs from its record at the exchange after step 4: the weights have different bits; begin from the same weights and data, with the same number of steps, as the recorded run");
    assert_eq!(refused[0], refused[1]);
}

#[test]
fn an_island_that_is_behind_is_told_to_start_again_and_one_that_loads_keeps_the_bits() {
    let dir = tempfile::tempdir().unwrap();
    let keys = json!({"steps": 4, "fragments": 2, "fragment_delay": 2});
    let server = server(|_| {});
    let config = configuration(&section(&server, keys), 1, 2);
    let start = || -> Vec<Directed> { (0..2).map(|slot| Directed::start(config.clone(), slot)).collect() };
    let islands = start();
    islands.iter().for_each(|island| _ = island.ready());
    train_all(&islands, 7);
    islands.iter().for_each(|island| island.order(Order::Save(dir.path().to_owned())));
    islands.iter().for_each(|island| _ = island.ready());
    let expected = train_all(&islands, 4);
    islands.into_iter().for_each(Directed::die);
    wait_until(&server, &[], &[]);
    // Both resume: the run continues with the same bits.
    let islands = start();
    islands.iter().for_each(|island| _ = island.ready());
    islands.iter().for_each(|island| island.order(Order::Load(dir.path().to_owned())));
    islands.iter().for_each(|island| assert_eq!(island.ready().0, 7));
    assert!(train_all(&islands, 4) == expected);
    islands.into_iter().for_each(Directed::die);
    wait_until(&server, &[], &[]);
    // One of them resumes from its checkpoint, and the other begins at step 0.
    let islands = start();
    islands.iter().for_each(|island| _ = island.ready());
    islands[0].order(Order::Load(dir.path().to_owned()));
    islands[0].ready();
    islands[0].order(Order::Train(3));
    islands[1].order(Order::Train(4));
    islands[0].trained();
    let [first, second] = islands.try_into().unwrap_or_else(|_| panic!("two islands"));
    let why = second.failed().replace(&server.address().to_string(), "ADDRESS");
    insta::assert_snapshot!(why, @"the island server at ADDRESS refuses this island: it is behind: the first exchange of the others is after step 8; start it again, and it joins them (zerorun --max_restarts does so)");
    // The second island joins when it is started again, and its checkpoint is not loaded.
    let again = Directed::start(config.clone(), 1);
    wait_until(&server, &[0], &[1]);
    first.order(Order::Train(5));
    first.trained();
    assert_eq!(again.ready(), (14, 1));
    again.order(Order::Load(dir.path().to_owned()));
    assert_eq!(again.ready(), (14, 1));
    first.die();
    again.end();
}

#[test]
fn islands_that_do_not_fit_are_refused_and_the_others_continue() {
    let server = server(|_| {});
    let address = server.address().to_string();
    let config = configuration(&section(&server, json!({"steps": 2, "min_islands": 1})), 1, 2);
    let first = Directed::start(config.clone(), 0);
    first.ready();
    let refused = |config: Value, slot: usize| Directed::start(config, slot).failed().replace(&address, "ADDRESS");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config);
        config
    };
    insta::assert_snapshot!(refused(with(&|config| config["local_steps"]["wire_dtype"] = json!("bf16")), 1), @"the island server at ADDRESS refuses this island: it and the islands of the run have different values of local_steps.wire_dtype; start the same program with the same files and configuration for all islands");
    insta::assert_snapshot!(refused(with(&|config| config["local_steps"]["steps"] = json!(3)), 1), @"the island server at ADDRESS refuses this island: it and the islands of the run have different configurations or data; start the same program with the same files and configuration for all islands");
    insta::assert_snapshot!(refused(with(&|config| config["optimizer"]["params"]["lr"] = json!(0.5)), 1), @"the island server at ADDRESS refuses this island: it and the islands of the run have different configurations or data; start the same program with the same files and configuration for all islands");
    insta::assert_snapshot!(
        refused(with(&|config| {
            config["local_steps"]["islands"] = json!(4);
            config["train_batch_size"] = json!(4 * BATCH);
        }), 1), @"the island server at ADDRESS refuses this island: it and the islands of the run have different numbers of islands (local_steps.islands): 4 and 2; start the same program with the same files and configuration for all islands");
    insta::assert_snapshot!(refused(config.clone(), 0), @"the island server at ADDRESS refuses this island: slot 0 is taken by another island; request a different slot, or end that island");
    insta::assert_snapshot!(refused(config.clone(), 7), @"the island server at ADDRESS refuses this island: it requests slot 7, but the run has 2 slots (local_steps.islands); request a slot from 0 to 1");
    let of_two = config.clone();
    let two_ranks = island(2, move |comm| engine_in_slot(comm, of_two.clone(), 1).map(drop));
    insta::assert_snapshot!(error(two_ranks).replace(&address, "ADDRESS"), @"the island server at ADDRESS refuses this island: it and the islands of the run have different numbers of ranks per island: 2 and 1; start the same program with the same files and configuration for all islands");
    let of_other = config.clone();
    let other_model = island(1, move |comm| {
        use candle_nn::VarBuilder;
        let build = |vb: VarBuilder<'_>| candle_zero::nn::Linear::new(6, 4, vb.pp("a"));
        Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, of_other.clone()).map(drop)
    });
    insta::assert_snapshot!(error(other_model).replace(&address, "ADDRESS"), @"the island server at ADDRESS refuses this island: it and the islands of the run have different models; start the same program with the same files and configuration for all islands");
    // This connection is from a program that is not an island.
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(&address).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // The server may also reset the connection.
    _ = stream.read_to_end(&mut answer);
    first.order(Order::Train(5));
    first.trained();
    first.end();
}

#[test]
fn all_slots_taken_and_servers_that_are_not_there_are_named() {
    let server = server(|_| {});
    let address = server.address().to_string();
    let config = configuration(&section(&server, json!({"steps": 2})), 1, 2);
    let islands: Vec<Directed> = (0..2).map(|slot| Directed::start(config.clone(), slot)).collect();
    islands.iter().for_each(|island| _ = island.ready());
    let third = config.clone();
    let third = island(1, move |comm| engine(comm, third.clone()).map(drop));
    insta::assert_snapshot!(error(third).replace(&address, "ADDRESS"), @"the island server at ADDRESS refuses this island: all 2 slots are taken; end an island, or start all islands with a larger local_steps.islands");
    // The server ends while islands train.
    drop(server);
    islands.iter().for_each(|island| island.order(Order::Train(2)));
    for island in islands {
        let why = island.failed().replace(&address, "ADDRESS");
        assert!(why.starts_with("lost the island server at ADDRESS: "), "{why}");
        assert!(why.ends_with("the island resumes from its checkpoint when the server runs again"), "{why}");
    }
    let why = Directed::start(config, 0).failed().replace(&address, "ADDRESS");
    insta::assert_snapshot!(why, @"cannot reach the island server at ADDRESS: Connection refused (os error 111); start it with `zerorun island-server`, or correct local_steps.server (zerorun --island_server)");
    // Another program listens at the address.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let config = configuration(&json!({"steps": 2, "server": address}), 1, 2);
    insta::assert_snapshot!(Directed::start(config, 0).failed().replace(&address, "ADDRESS"), @"the program at ADDRESS is not an island server: it sent a frame of kind 83; correct local_steps.server (zerorun --island_server)");
}

#[test]
fn keys_of_a_server_that_do_not_fit_each_other_are_named() {
    let problems = |section: Value| {
        let config = json!({"train_batch_size": 8, "local_steps": section});
        candle_zero::config::Config::load(config, 2).unwrap_err().to_string()
    };
    insta::assert_snapshot!(problems(json!({"server": "host0", "islands": 2})), @r#"the configuration given as a value: `local_steps.server`: expected HOST:PORT with a port from 1 to 65535, found "host0""#);
    insta::assert_snapshot!(problems(json!({"server": "host0:29600"})), @r#"the configuration given as a value: `local_steps.islands`: expected a number of 2 or more, found "auto": with an island server, this key is the number of slots for islands, which cannot be derived and must be at least 2"#);
    insta::assert_snapshot!(problems(json!({"server": "host0:29600", "islands": 1})), @"the configuration given as a value: `local_steps.islands`: expected a number of 2 or more, found 1: with an island server, this key is the number of slots for islands, which cannot be derived and must be at least 2");
    insta::assert_snapshot!(problems(json!({"server": "host0:29600", "islands": 2, "min_islands": 3})), @"the configuration given as a value: `local_steps.min_islands`: expected at most 2 (local_steps.islands), found 3: the islands would wait forever");
    insta::assert_snapshot!(problems(json!({"islands": 2, "min_islands": 2})), @"the configuration given as a value: `local_steps.min_islands`: expected null without local_steps.server, found 2: islands that are parts of one job all begin together; remove the key, or give local_steps.server");
    insta::assert_snapshot!(problems(json!({"server": "host0:29600", "islands": 3})), @"the configuration given as a value: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 8 != 1 (derived) * 1 (derived) * 6; choose a train_batch_size that is a multiple of 6");
}
