//! Communicators from outside the crate: four methods are enough, collectives may run on a separate thread, and
//! training gives the same bits as with shared memory.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::DType;
use candle_zero::comm::{Communicator, InterHostFormat, Pending, WireFormat, threads};
use candle_zero::error::{CommError, Error};
use candle_zero::memory::MemoryReport;
use candle_zero::precision::{Flat, FlatMut, FlatRef, IntFormat};
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A collective, to be run on the network's thread.
type Job = Box<dyn FnOnce(&Wires) + Send>;

/// Channels to and from every rank, this one included.
struct Wires {
    to: Vec<Sender<Flat>>,
    from: Vec<Receiver<Flat>>,
    bytes_to: Vec<Sender<Vec<u8>>>,
    bytes_from: Vec<Receiver<Vec<u8>>>,
}

fn gone<E>(_: E) -> CommError {
    CommError::other("a rank is gone")
}

/// A rank's side of the channels, and the thread that runs one collective after another.
struct Network {
    rank: usize,
    size: usize,
    jobs: Sender<Job>,
}

impl Network {
    /// Launches `job`, and returns a handle that waits for its result later.
    fn launch<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Wires) -> std::result::Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let (result, receiver) = channel();
        let job: Job = Box::new(move |wires| _ = result.send(job(wires)));
        _ = self.jobs.send(job);
        Pending::from_fn(move || Ok(receiver.recv().map_err(gone)??))
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.launch(move |wires| {
            wires.bytes_to.iter().try_for_each(|to| to.send(bytes.clone())).map_err(gone)?;
            wires.bytes_from.iter().map(|from| from.recv().map_err(gone)).collect()
        })
    }
}

/// A value for each pair of ranks.
type Pairs<T> = Vec<Vec<T>>;

/// Returns the channel ends that all ranks of a world need. Sender [a][b] and receiver [b][a] belong to the channel
/// from rank a to rank b.
fn channels<T>(world: usize) -> (Pairs<Sender<T>>, Pairs<Receiver<T>>) {
    let mut from: Pairs<Receiver<T>> = (0..world).map(|_| vec![]).collect();
    let to = (0..world)
        .map(|_| {
            from.iter_mut()
                .map(|from| {
                    let (sender, receiver) = channel();
                    from.push(receiver);
                    sender
                })
                .collect()
        })
        .collect();
    (to, from)
}

/// Returns the networks of `world` ranks.
fn networks(world: usize) -> Vec<Network> {
    let ((to, from), (bytes_to, bytes_from)) = (channels(world), channels(world));
    let wires = to.into_iter().zip(from).zip(bytes_to.into_iter().zip(bytes_from));
    let network = |(rank, ((to, from), (bytes_to, bytes_from)))| {
        let (jobs, launched) = channel::<Job>();
        std::thread::spawn(move || {
            let wires = Wires { to, from, bytes_to, bytes_from };
            launched.into_iter().for_each(|job| job(&wires));
        });
        Network { rank, size: world, jobs }
    };
    wires.enumerate().map(network).collect()
}

/// A communicator that has only the required methods.
struct Minimal(Network);

impl Communicator for Minimal {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn size(&self) -> usize {
        self.0.size
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.0.gather_bytes(bytes)
    }

    fn abort(&self, _: &str) {}
}

/// A communicator with its own sums and gathers, which carry only exact elements.
struct Full(Network);

impl Full {
    fn exact(wire: WireFormat) -> std::result::Result<(), CommError> {
        if wire == WireFormat::Exact {
            Ok(())
        } else {
            Err(CommError::other("this network carries only exact elements"))
        }
    }
}

impl Communicator for Full {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn size(&self) -> usize {
        self.0.size
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.0.gather_bytes(bytes)
    }

    fn abort(&self, _: &str) {}

    fn all_gather_as(&self, wire: WireFormat, mut shard: Flat, _: u64) -> Pending<Flat> {
        self.0.launch(move |wires| {
            Self::exact(wire)?;
            wires.to.iter().try_for_each(|to| to.send(shard.as_ref().to_flat())).map_err(gone)?;
            shard.truncate(0);
            for from in &wires.from {
                shard.extend_cast(from.recv().map_err(gone)?.as_ref());
            }
            Ok(shard)
        })
    }

    fn reduce_scatter_as(&self, wire: WireFormat, mut input: Flat, _: u64) -> Pending<Flat> {
        let chunk = input.len() / self.0.size;
        self.0.launch(move |wires| {
            Self::exact(wire)?;
            for (rank, to) in wires.to.iter().enumerate() {
                to.send(input.slice(rank * chunk..(rank + 1) * chunk).to_flat()).map_err(gone)?;
            }
            let mut sum = vec![0f32; chunk];
            for (rank, from) in wires.from.iter().enumerate() {
                let part = from.recv().map_err(gone)?;
                let sum = FlatMut::F32(&mut sum);
                if rank == 0 { sum.copy_cast(part.as_ref()) } else { sum.add_scaled(part.as_ref(), 1.0) }
            }
            input.truncate(chunk);
            input.as_mut().copy_cast(FlatRef::F32(&sum));
            Ok(input)
        })
    }
}

type World = Vec<Arc<dyn Communicator>>;

fn shared(world: usize) -> World {
    threads::communicators(world, Duration::from_secs(60)).unwrap()
}

fn minimal(world: usize) -> World {
    networks(world).into_iter().map(|network| Arc::new(Minimal(network)) as Arc<dyn Communicator>).collect()
}

fn full(world: usize) -> World {
    networks(world).into_iter().map(|network| Arc::new(Full(network)) as Arc<dyn Communicator>).collect()
}

/// Runs `rank` on a thread for each rank.
fn on_ranks<T: Send>(world: World, rank: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync) -> Vec<Result<T>> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let start = |comm| std::thread::Builder::new().stack_size(64 << 20).spawn_scoped(scope, move || rank(comm));
        let threads: Vec<_> = world.into_iter().map(|comm| start(comm).unwrap()).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// For each rank, its losses and norms, as bits, and its memory; then the exported parameters.
type Run = (Vec<(Vec<u32>, Vec<u64>, MemoryReport)>, Vec<u8>);

fn train(world: World, config: &Value) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let size = world.len();
    let ranks = on_ranks(world, |comm| {
        let rank = comm.rank();
        let shape = Shape { units: true, checkpointed: false, layers: 3 };
        let builder = Engine::builder().communicator(comm);
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
        let (mut losses, mut norms) = (vec![], vec![]);
        for step in 0..3 {
            let (ids, targets) = batch(step * size + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            engine.step()?;
            norms.extend(engine.global_grad_norm().map(f64::to_bits));
        }
        let memory = engine.memory_report();
        engine.export_safetensors(&file)?;
        Ok((losses, norms, memory))
    });
    (ranks.into_iter().map(|rank| rank.unwrap()).collect(), std::fs::read(&file).unwrap())
}

/// Returns a configuration that gathers and releases every unit.
fn release_config(stage: u8, more: Value) -> Value {
    config(stage, 1, json!({"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 300}), more)
}

#[test]
fn at_stage_3_a_communicator_of_my_own_trains_to_the_bits_of_shared_memory() {
    for more in [json!({}), json!({"bf16": {"enabled": true}})] {
        let config = release_config(3, more);
        let reference = train(shared(3), &config);
        assert!(reference.0[0].0.windows(2).all(|losses| losses[0] != losses[1]), "the model learns");
        assert!(train(full(3), &config) == reference, "{config}");
        assert!(train(minimal(3), &config) == reference, "{config}");
    }
}

#[test]
fn four_methods_are_enough_for_every_stage() {
    for stage in 0..3 {
        let config = release_config(stage, json!({}));
        assert!(train(minimal(2), &config) == train(shared(2), &config), "stage {stage}");
    }
}

#[test]
fn collectives_of_four_methods_give_the_bits_of_shared_memory_also_as_blocks() {
    let collectives = |world: World| {
        on_ranks(world, |comm| {
            let (rank, world) = (comm.rank(), comm.size());
            let mut results = vec![];
            let between_hosts = [InterHostFormat::Blocks(IntFormat::Int4), InterHostFormat::Bf16, InterHostFormat::F16]
                .map(WireFormat::BetweenHosts);
            let wires = [WireFormat::Exact, WireFormat::Blocks(IntFormat::Int8), WireFormat::Blocks(IntFormat::Int4)];
            for wire in wires.into_iter().chain(between_hosts) {
                for dtype in [DType::F32, DType::BF16] {
                    let values = |len: usize| {
                        let value = |i: usize| ((i * 7 + rank * 13) % 101) as f32 / 7.0 - 5.0;
                        Flat::from_f32((0..len).map(value).collect(), dtype)
                    };
                    // The collectives are launched together and awaited in a different order.
                    let sum = comm.all_reduce_as(wire, values(1001), 1);
                    let part = comm.reduce_scatter_as(wire, values(700 * world), 2);
                    let gathered = comm.all_gather_as(wire, values(700), 3);
                    results.extend([gathered.wait()?, part.wait()?, sum.wait()?]);
                }
            }
            let numbers = comm.gather_f64(vec![rank as f64, -0.0, f64::NAN]).wait()?;
            comm.barrier().wait()?;
            Ok((results, numbers.concat().into_iter().map(f64::to_bits).collect::<Vec<_>>()))
        })
    };
    let results = |world| collectives(world).into_iter().map(|rank| rank.unwrap()).collect::<Vec<_>>();
    assert!(results(minimal(3)) == results(shared(3)));
}

#[test]
fn a_launch_returns_before_the_result_is_there() {
    for world in [minimal(2), full(2)] {
        let launch = |rank: usize, value: f32| world[rank].all_gather(Flat::from(vec![value]), 0);
        // One thread makes all calls: if launching waited for the other rank, this would never end.
        let first = [launch(0, 1.0), launch(1, 2.0)];
        let second = [launch(0, 3.0), launch(1, 4.0)];
        for pending in second {
            assert_eq!(pending.wait().unwrap(), Flat::from(vec![3.0, 4.0]));
        }
        for pending in first {
            assert_eq!(pending.wait().unwrap(), Flat::from(vec![1.0, 2.0]));
        }
    }
}

#[test]
fn ranks_of_four_methods_that_diverge_are_told_both_sides() {
    let errors = on_ranks(minimal(2), |comm| match comm.rank() {
        0 => comm.all_gather(Flat::from(vec![1.0; 8]), 7).wait(),
        _ => comm.all_gather(Flat::from(vec![1.0; 8]), 8).wait(),
    });
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Comm(CommError::Diverged { .. })), "{error}");
        let text = error.to_string();
        assert!(text.contains("(content hash 00000007)") && text.contains("(content hash 00000008)"), "{text}");
    }
}

#[test]
fn an_error_of_my_own_communicator_reaches_the_one_who_trains() {
    let config = config(3, 1, json!({"zero_quantized_weights": true}), json!({}));
    for result in on_ranks(full(2), |comm| {
        let shape = Shape { units: true, checkpointed: false, layers: 1 };
        let builder = Engine::builder().communicator(comm);
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
        let (ids, targets) = batch(0);
        engine.forward(|model| model.loss(&ids, &targets)).map(drop)
    }) {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Comm(CommError::Other(_))), "{error}");
        assert_eq!(error.to_string(), "this network carries only exact elements");
    }
}

/// Rank 0 of two. The peer echoes rank 0's messages, and the function changes the messages of both ranks.
struct Corrupting(fn(Vec<Vec<u8>>) -> Vec<Vec<u8>>);

impl Communicator for Corrupting {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        Pending::ready((self.0)(vec![bytes.clone(), bytes]))
    }

    fn abort(&self, _: &str) {}
}

#[test]
fn messages_that_are_missing_or_too_short_are_errors_that_say_so() {
    let sum = |corrupt| {
        Corrupting(corrupt).all_reduce(Flat::zeros(DType::F32, 4), 0).wait().map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(sum(|all| all), Ok(()));
    let few = sum(|mut all| {
        all.truncate(1);
        all
    });
    assert_eq!(few.unwrap_err(), "gather_bytes must return 2 messages on rank 0, one for each rank, but returned 1");
    let short = sum(|mut all| {
        all[1].pop();
        all
    });
    let expected = "gather_bytes returned 15 bytes from rank 1 and 16 from rank 0; every rank must make the same calls \
                    in the same order";
    assert_eq!(short.unwrap_err(), expected);
}
