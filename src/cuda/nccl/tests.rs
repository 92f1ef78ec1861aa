#![allow(clippy::unwrap_used)]

use super::*;
use crate::comm::{Communicator, WireFormat, threads};
use crate::precision::{Flat, IntFormat};
use candle_core::backend::BackendDevice;
use libloading::os::unix::Library as Loaded;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SEED: &str = "MOCK_CUDA_SEED";
const CHILD: &str = "CANDLE_ZERO_TEST_NCCL_CHILD";
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
/// Limits so small that a few hundred elements are enough to exercise every method.
const SMALL: NcclBufferLimits = NcclBufferLimits { short: 64, scratch: 1536 };

/// Returns the library, if there are `devices` devices that threads of one process can use together.
fn nccl(devices: usize) -> Option<NcclLibrary> {
    CudaDevice::new(devices - 1).ok()?;
    let is_usable = devices == 1 || is_mock() || std::env::var("NCCL_P2P_DIRECT_DISABLE").as_deref() == Ok("1");
    NcclLibrary::find().ok().filter(|_| is_usable)
}

/// Returns the device of a rank, either with the thread's stream or with a separate stream, for which cudarc keeps
/// events of each buffer.
fn device(rank: usize) -> CudaDevice {
    if rank.is_multiple_of(2) { CudaDevice::new(rank) } else { CudaDevice::new_with_stream(rank) }.unwrap()
}

fn is_mock() -> bool {
    // SAFETY: nothing is read at the address.
    unsafe { Loaded::this().get::<*const ()>(c"mock_cuda_live_bytes") }.is_ok()
}

fn watch(seconds: f32) -> WaitAbortConditions {
    WaitAbortConditions { timeout: Duration::from_secs_f32(seconds), is_failed: Box::new(|| None) }
}

/// Runs `work` on `size` ranks, each a thread with a separate device.
fn on_ranks<T: Send>(
    library: &NcclLibrary,
    size: usize,
    watch: impl Fn(usize) -> WaitAbortConditions + Sync,
    work: impl Fn(NcclComm) -> T + Sync,
) -> Vec<T> {
    let (id, watch, work) = (library.unique_id().unwrap(), &watch, &work);
    std::thread::scope(|scope| {
        let start = |rank| {
            scope.spawn(move || {
                work(NcclComm::join_within(library, &device(rank), (rank, size), id, watch(rank), SMALL).unwrap())
            })
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns numbers of very different magnitudes, whose sum depends on the order.
fn numbers(rank: usize, len: usize, dtype: DType) -> Flat {
    let number = |i: usize| {
        let bits = crate::util::mix((rank * 1_000_003 + i) as u64);
        let value = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        value * [1e-3, 1.0, 37.0, 1000.0][(bits & 3) as usize]
    };
    Flat::from_f32((0..len).map(number).collect(), dtype)
}

fn on_device(comm: &NcclComm, values: &Flat) -> DeviceFlat {
    let device = &comm.0.device;
    DeviceFlat::of(device, values.as_ref()).unwrap()
}

fn result(launched: PendingNcclCollective) -> Flat {
    let result = launched.settle().unwrap();
    result.to_host(0..result.len()).unwrap()
}

/// Lengths of chunks: zero, less than the number of ranks, and odd lengths of one piece and of several.
const LENGTHS: [usize; 5] = [0, 1, 3, 129, 517];

fn has_the_bits_of_the_host(library: &NcclLibrary, size: usize, codes: Option<IntFormat>) {
    let (wire, sums) = codes.map_or_else(Default::default, |ints| (WireFormat::Blocks(ints), NcclSumMode::Coded(ints)));
    let on_host = |comm: &dyn Communicator, dtype, n: usize| {
        let chunks = comm.reduce_scatter_as(wire, numbers(comm.rank(), n * size, dtype), 0).wait().unwrap();
        let whole = comm.all_reduce_as(wire, numbers(comm.rank(), n * size + 1, dtype), 0).wait().unwrap();
        let gathered = comm.all_gather_as(wire, numbers(comm.rank(), n, dtype), 0).wait().unwrap();
        [chunks, whole, gathered]
    };
    let cases = || DTYPES.into_iter().flat_map(|dtype| LENGTHS.map(|n| (dtype, n)));
    let hosts = threads::run(size, |comm| Ok(cases().map(|(dtype, n)| on_host(&*comm, dtype, n)).collect::<Vec<_>>()));
    let gpus = on_ranks(
        library,
        size,
        |_| watch(60.0),
        |comm| {
            // All collectives are in progress at the same time.
            let launch = |(dtype, n)| {
                let input = |len| on_device(&comm, &numbers(comm.rank(), len, dtype));
                let chunks = comm.reduce_scatter(sums, input(n * size)).unwrap();
                let whole = comm.all_reduce(sums, input(n * size + 1)).unwrap();
                [chunks, whole, comm.all_gather(codes, input(n)).unwrap()]
            };
            let launched: Vec<_> = cases().map(launch).collect();
            launched.into_iter().map(|all| all.map(result)).collect::<Vec<_>>()
        },
    );
    for (rank, (host, gpu)) in hosts.unwrap().into_iter().zip(gpus).enumerate() {
        for ((case, host), gpu) in cases().zip(host.unwrap()).zip(gpu) {
            assert!(host == gpu, "rank {rank} of {size}, {case:?}, {sums:?}: {gpu:?}, the host has {host:?}");
        }
    }
}

#[test]
fn exact_sums_have_the_bits_of_the_host() {
    for size in [1, 2, 4] {
        let Some(library) = nccl(size) else { return };
        has_the_bits_of_the_host(&library, size, None);
    }
}

#[test]
fn what_travels_as_integers_has_the_bits_of_the_host() {
    for (size, ints) in [1, 2, 4].into_iter().flat_map(|size| [(size, IntFormat::Int8), (size, IntFormat::Int4)]) {
        let Some(library) = nccl(size) else { return };
        has_the_bits_of_the_host(&library, size, Some(ints));
    }
}

#[test]
fn collectives_have_the_same_bits_whatever_the_order_of_streams() {
    let Some(library) = nccl(4).filter(|_| is_mock()) else { return };
    if std::env::var_os(CHILD).is_some() {
        for codes in [None, Some(IntFormat::Int4)] {
            has_the_bits_of_the_host(&library, 3, codes);
        }
        return check_dropped_launches(&library);
    }
    let name = "cuda::nccl::tests::collectives_have_the_same_bits_whatever_the_order_of_streams";
    for seed in 1..=20 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([name, "--exact", "--nocapture"]).env(SEED, seed.to_string()).env(CHILD, "");
        let output = child.output().unwrap();
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "the child ran the test");
    }
}

/// Tests launches that are dropped, or whose buffers are dropped immediately, while others reuse the memory.
fn check_dropped_launches(library: &NcclLibrary) {
    let ended = on_ranks(
        library,
        2,
        |_| watch(60.0),
        |comm| {
            for turn in 0..8 {
                let shard = numbers(comm.rank(), 1000 + turn, DType::BF16);
                let dropped = comm.all_gather(None, on_device(&comm, &shard)).unwrap();
                let launched = comm.all_gather(None, on_device(&comm, &shard)).unwrap();
                drop(dropped);
                let zeros = DeviceFlat::zeros(&comm.0.device, DType::BF16, 2000 + 2 * turn).unwrap();
                let whole = result(launched);
                for rank in 0..2 {
                    let part = whole.slice(rank * (1000 + turn)..(rank + 1) * (1000 + turn));
                    assert_eq!(part.as_bytes(), numbers(rank, 1000 + turn, DType::BF16).as_bytes());
                }
                assert_eq!(zeros.to_host(0..zeros.len()).unwrap(), Flat::zeros(DType::BF16, zeros.len()));
            }
        },
    );
    assert_eq!(ended.len(), 2);
}

#[test]
fn a_collective_whose_times_are_kept_tells_when_it_ran() {
    let Some(library) = nccl(2) else { return };
    on_ranks(
        &library,
        2,
        |_| watch(60.0),
        |comm| {
            let before = Instant::now();
            let launch = || comm.all_gather(None, on_device(&comm, &numbers(0, 1000, DType::BF16))).unwrap();
            let untimed = launch();
            comm.keep_times(true);
            let timed = launch();
            timed.wait_on_host().unwrap();
            assert!(untimed.times().unwrap().is_none());
            let [begin, end] = timed.times().unwrap().unwrap();
            // The GPU's clock counts in steps of half a microsecond.
            assert!(before <= begin + Duration::from_millis(1) && begin <= end && end <= Instant::now());
        },
    );
}

#[test]
fn gathers_and_fast_sums_give_what_their_names_say() {
    for size in [1, 2, 4] {
        let Some(library) = nccl(size) else { return };
        if size > 1 {
            check_dropped_launches(&library);
        }
        for (dtype, n) in DTYPES.into_iter().flat_map(|dtype| [0, 1, 77].map(|n| (dtype, n))) {
            let whole =
                |len: usize| Flat::from_f32((0..size * len).map(|i| (i / len.max(1) + i % 5) as f32).collect(), dtype);
            on_ranks(
                &library,
                size,
                |_| watch(60.0),
                |comm| {
                    let rank = comm.rank();
                    let shard = Flat::from_f32((0..n).map(|i| (rank + (rank * n + i) % 5) as f32).collect(), dtype);
                    let gathered = comm.all_gather(None, on_device(&comm, &shard)).unwrap();
                    gathered.wait_on_host().unwrap();
                    assert_eq!(result(gathered), whole(n));
                    // The elements are small integers, whose sums are exact in any order.
                    let input = on_device(&comm, &whole(n));
                    let sum = result(comm.reduce_scatter(NcclSumMode::Fast, input).unwrap());
                    let of = |i: usize| (size * ((rank * n + i) / n.max(1) + (rank * n + i) % 5)) as f32;
                    assert_eq!(sum, Flat::from_f32((0..n).map(of).collect(), dtype));
                    let sum = result(comm.all_reduce(NcclSumMode::Fast, on_device(&comm, &shard)).unwrap());
                    let of = |i: usize| (0..size).map(|r| (r + (r * n + i) % 5) as f32).sum();
                    assert_eq!(sum, Flat::from_f32((0..n).map(of).collect(), dtype));
                },
            );
        }
    }
}

/// Checks that the streams of a rank continue, and that its collectives do not.
fn is_ended(comm: &NcclComm, launched: PendingNcclCollective, why: &NcclError) {
    let text = why.to_string();
    assert_eq!(launched.settle().map(drop).unwrap_err().to_string(), text);
    let values = on_device(comm, &numbers(0, 5, DType::F32));
    assert_eq!(values.to_host(0..5).unwrap(), numbers(0, 5, DType::F32));
    assert_eq!(comm.all_reduce(NcclSumMode::Exact, values).map(drop).unwrap_err().to_string(), text);
    comm.0.wire.synchronize().unwrap();
}

#[test]
fn a_peer_that_gives_up_ends_the_waits_of_the_others() {
    let Some(library) = nccl(4).filter(|_| is_mock()) else { return };
    for sums in [NcclSumMode::Exact, NcclSumMode::Fast] {
        on_ranks(
            &library,
            4,
            |_| watch(60.0),
            |comm| {
                let input = || on_device(&comm, &numbers(comm.rank(), 400, DType::F32));
                assert_eq!(result(comm.reduce_scatter(sums, input()).unwrap()).len(), 100);
                if comm.rank() == 2 {
                    comm.abort();
                    let why = comm.all_gather(None, input()).map(drop).unwrap_err();
                    assert!(why.to_string().starts_with("rank 2 gave up earlier"), "{why}");
                    return;
                }
                let since = Instant::now();
                let launched = comm.reduce_scatter(sums, input());
                // Any of the calls may detect the failure.
                let why = match launched {
                    Ok(launched) => {
                        let why = launched.wait_on_host().unwrap_err();
                        is_ended(&comm, launched, &why);
                        why
                    }
                    Err(why) => why,
                };
                assert!(matches!(why, NcclError::AsyncError { .. }), "{why}");
                assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
            },
        );
    }
}

#[test]
fn a_failure_that_the_caller_knows_ends_a_wait() {
    let Some(library) = nccl(2) else { return };
    let (is_dead, barrier) = (Arc::new(AtomicBool::new(false)), Barrier::new(2));
    let conditions = |_| {
        let is_dead = is_dead.clone();
        let is_failed = move || {
            is_dead
                .load(Ordering::Relaxed)
                .then(|| CallerFailure::from(Box::<dyn std::error::Error + Send + Sync>::from("rank 1 died")))
        };
        WaitAbortConditions { timeout: Duration::from_secs(60), is_failed: Box::new(is_failed) }
    };
    on_ranks(&library, 2, conditions, |comm| {
        if comm.rank() == 0 {
            let launched = comm.all_gather(None, on_device(&comm, &numbers(0, 9, DType::F16))).unwrap();
            let since = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    is_dead.store(true, Ordering::Relaxed);
                });
                let why = launched.wait_on_host().unwrap_err();
                assert_eq!(why.to_string(), "rank 1 died");
                assert!((200..5000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
                is_ended(&comm, launched, &why);
            });
        }
        barrier.wait();
    });
}

#[test]
fn different_collectives_end_when_the_time_is_over() {
    let Some(library) = nccl(2).filter(|_| is_mock()) else { return };
    on_ranks(
        &library,
        2,
        |rank| watch(if rank == 0 { 1.5 } else { 60.0 }),
        |comm| {
            let launched = comm.all_gather(None, on_device(&comm, &numbers(0, 4 + comm.rank(), DType::F32))).unwrap();
            let why = launched.wait_on_host().unwrap_err();
            if comm.rank() == 0 {
                let text = "rank 0 waited in an all-gather between GPUs for 1.5 s: a peer does not take part in it, or is in \
                        another collective";
                assert_eq!(why.to_string(), text);
            } else {
                assert!(matches!(why, NcclError::AsyncError { .. }), "{why}");
            }
            is_ended(&comm, launched, &why);
        },
    );
}

#[test]
fn a_peer_that_leaves_ends_the_waits_of_the_others_when_the_time_is_over() {
    let Some(library) = nccl(2) else { return };
    on_ranks(
        &library,
        2,
        |_| watch(1.0),
        |comm| {
            let gathered = comm.all_gather(None, on_device(&comm, &numbers(0, 7, DType::BF16))).unwrap();
            if comm.rank() == 0 {
                assert_eq!(result(gathered).len(), 14);
                let launched = comm.all_gather(None, on_device(&comm, &numbers(0, 7, DType::BF16))).unwrap();
                let why = launched.wait_on_host().unwrap_err();
                assert!(
                    matches!(
                        why,
                        NcclError::PeerTimeout { rank: 0, op: "an all-gather", .. } | NcclError::AsyncError { .. }
                    ),
                    "{why}"
                );
                is_ended(&comm, launched, &why);
            }
        },
    );
}

#[test]
fn a_collective_is_settled_by_another_thread() {
    let Some(library) = nccl(2) else { return };
    on_ranks(
        &library,
        2,
        |_| watch(60.0),
        |comm| {
            for len in [1000, 3000] {
                let launched =
                    comm.all_reduce(NcclSumMode::Exact, on_device(&comm, &numbers(0, len, DType::F32))).unwrap();
                let sum = std::thread::scope(|scope| scope.spawn(|| result(launched)).join().unwrap());
                let mut twice = numbers(0, len, DType::F32);
                twice.as_mut().scale(2.0);
                assert_eq!(sum, twice);
            }
        },
    );
}

#[test]
fn a_peer_that_does_not_join_ends_the_meeting_when_the_time_is_over() {
    let Some(library) = nccl(2) else { return };
    let device = CudaDevice::new(0).unwrap();
    let joined = NcclComm::join(&library, &device, 0, 2, library.unique_id().unwrap(), watch(1.0));
    let why = joined.map(drop).unwrap_err().to_string();
    assert!(why.starts_with("rank 0 waited in the rendezvous between GPUs for 1 s"), "{why}");
}

#[test]
fn room_for_what_comes_from_peers_is_bounded() {
    let Some(library) = nccl(4).filter(|_| is_mock()) else { return };
    on_ranks(
        &library,
        4,
        |_| watch(60.0),
        |comm| {
            let input = on_device(&comm, &numbers(comm.rank(), 40_000, DType::F32));
            result(comm.reduce_scatter(NcclSumMode::Exact, input).unwrap());
            assert_eq!(comm.0.scratch_bytes(), 3 * 128 * 4);
            // Codes use the same memory; chunks are split into pieces that fit there.
            let input = || on_device(&comm, &numbers(comm.rank(), 40_000, DType::F32));
            result(comm.reduce_scatter(NcclSumMode::Coded(IntFormat::Int4), input()).unwrap());
            result(comm.all_gather(Some(IntFormat::Int8), input()).unwrap());
            assert_eq!(comm.0.scratch_bytes(), SMALL.scratch);
        },
    );
}
