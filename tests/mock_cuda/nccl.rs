//! The mock of NCCL: collectives among threads and processes, in the order of each communicator, and the faults that it
//! finds.

use crate::device::Device;
use crate::{SEEDS, answer, answer_of, child, has_mock, role};
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUstream};
use libloading::os::unix::Library;
use std::ffi::{c_int, c_void};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const F32: c_int = 7;
const SUM: c_int = 0;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
/// The variables that give a child its rank and the id of its communicator.
const RANK: &str = "MOCK_CUDA_TEST_RANK";
const ID: &str = "MOCK_CUDA_TEST_ID";

type Comm = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

/// The beginning of ncclConfig_t.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    unset: c_int,
}

/// The functions of the library that are called here.
struct Nccl {
    unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int) -> c_int,
    init_config: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int, *mut Config) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    asynchronous_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, Comm, CUstream) -> c_int,
    reduce_scatter: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, Comm, CUstream) -> c_int,
    all_gather: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, Comm, CUstream) -> c_int,
    broadcast: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, Comm, CUstream) -> c_int,
    all_to_all: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, Comm, CUstream) -> c_int,
    send: unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, Comm, CUstream) -> c_int,
    receive: unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, Comm, CUstream) -> c_int,
}

fn nccl() -> &'static Nccl {
    static NCCL: OnceLock<Nccl> = OnceLock::new();
    NCCL.get_or_init(|| {
        // SAFETY: the mock's functions have NCCL's types, and the mock is never unloaded.
        unsafe {
            let library = Box::leak(Box::new(Library::new("libnccl.so.2").unwrap()));
            macro_rules! function {
                ($name:literal) => {
                    *library.get($name).unwrap()
                };
            }
            Nccl {
                unique_id: function!("ncclGetUniqueId"),
                init: function!("ncclCommInitRank"),
                init_config: function!("ncclCommInitRankConfig"),
                destroy: function!("ncclCommDestroy"),
                abort: function!("ncclCommAbort"),
                asynchronous_error: function!("ncclCommGetAsyncError"),
                group_start: function!("ncclGroupStart"),
                group_end: function!("ncclGroupEnd"),
                all_reduce: function!("ncclAllReduce"),
                reduce_scatter: function!("ncclReduceScatter"),
                all_gather: function!("ncclAllGather"),
                broadcast: function!("ncclBroadcast"),
                all_to_all: function!("ncclAlltoAll"),
                send: function!("ncclSend"),
                receive: function!("ncclRecv"),
            }
        }
    })
}

fn unique_id() -> Id {
    let mut id = Id([0; 128]);
    // SAFETY: the library writes 128 bytes.
    assert_eq!(unsafe { (nccl().unique_id)(&mut id) }, 0);
    id
}

/// One rank, on the device of the same index, with a stream for its own work and one for collectives.
struct Rank {
    rank: usize,
    device: Device,
    comm: Comm,
    compute: CUstream,
    wire: CUstream,
}

/// A collective on device memory and a communicator's stream.
type Collective = unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, Comm, CUstream) -> c_int;

impl Rank {
    fn join(rank: usize, size: usize, id: Id) -> Self {
        let device = Device::new(rank as i32);
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: the library writes a communicator.
        assert_eq!(unsafe { (nccl().init)(&mut comm, size as c_int, id, rank as c_int) }, 0);
        let (compute, wire) = (device.stream(), device.stream());
        Self { rank, device, comm, compute, wire }
    }

    fn filled(&self, values: &[f32]) -> CUdeviceptr {
        let p = self.device.filled(self.compute, values);
        self.device.order(self.compute, self.wire);
        p
    }

    fn read(&self, p: CUdeviceptr, len: usize) -> Vec<f32> {
        self.device.read(self.wire, p, len)
    }

    /// Sums `input` over all ranks.
    fn sum(&self, input: CUdeviceptr, output: CUdeviceptr, len: usize) {
        // SAFETY: the buffers have this many elements.
        assert_eq!(unsafe { (nccl().all_reduce)(input, output, len, F32, SUM, self.comm, self.wire) }, 0);
    }

    fn run(&self, collective: Collective, input: CUdeviceptr, output: CUdeviceptr, count: usize) {
        // SAFETY: the buffers have this many elements.
        assert_eq!(unsafe { collective(input, output, count, F32, self.comm, self.wire) }, 0);
    }

    fn asynchronous_error(&self) -> c_int {
        let mut error = -1;
        // SAFETY: the communicator is live.
        assert_eq!(unsafe { (nccl().asynchronous_error)(self.comm, &mut error) }, 0);
        error
    }

    fn abort(&self) {
        // SAFETY: the communicator is live, and is not used after this.
        assert_eq!(unsafe { (nccl().abort)(self.comm) }, 0);
    }

    fn leave(self) {
        // SAFETY: the communicator is live, and is not used after this.
        assert_eq!(unsafe { (nccl().destroy)(self.comm) }, 0);
    }
}

/// Runs `work` on this number of ranks, each a thread with its own device.
fn on_ranks<T: Send>(size: usize, work: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let (id, work) = (unique_id(), &work);
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || work(Rank::join(rank, size, id)));
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn collectives_of_threads_give_what_their_names_say() {
    if !has_mock(collectives_of_threads_give_what_their_names_say) {
        return;
    }
    for size in [1, 2, 4] {
        let ranks = on_ranks(size, |rank| {
            let (r, n) = (rank.rank as f32, size);
            let (input, output) = (rank.filled(&[r; 3]), rank.filled(&vec![0.0; 3 * n]));
            rank.run(nccl().all_gather, input, output, 3);
            let gathered = rank.read(output, 3 * n);
            let sum = rank.filled(&[0.0; 3]);
            rank.sum(input, sum, 3);
            let summed = rank.read(sum, 3);
            // A sum can also be computed in place.
            rank.sum(input, input, 3);
            assert_eq!(rank.read(input, 3), summed);
            let parts = rank.filled(&(0..2 * n).map(|i| r + i as f32).collect::<Vec<_>>());
            let part = rank.filled(&[0.0; 2]);
            // SAFETY: the buffers have this many elements.
            unsafe { (nccl().reduce_scatter)(parts, part, 2, F32, SUM, rank.comm, rank.wire) };
            let scattered = rank.read(part, 2);
            let swapped = rank.filled(&vec![0.0; 2 * n]);
            rank.run(nccl().all_to_all, parts, swapped, 2);
            let swapped = rank.read(swapped, 2 * n);
            let root = (n - 1) as c_int;
            // SAFETY: the buffers have this many elements.
            unsafe { (nccl().broadcast)(parts, part, 2, F32, root, rank.comm, rank.wire) };
            let broadcast = rank.read(part, 2);
            rank.leave();
            (gathered, summed, scattered, swapped, broadcast)
        });
        let all: f32 = (0..size).map(|r| r as f32).sum();
        for (r, (gathered, summed, scattered, swapped, broadcast)) in ranks.into_iter().enumerate() {
            let of_each = |of: &dyn Fn(usize) -> [f32; 2]| (0..size).flat_map(of).collect::<Vec<_>>();
            assert_eq!(gathered, (0..size).flat_map(|r| [r as f32; 3]).collect::<Vec<_>>());
            assert_eq!(summed, [all; 3]);
            assert_eq!(scattered, [0, 1].map(|i| all + (size * (2 * r + i)) as f32));
            assert_eq!(swapped, of_each(&|from| [0, 1].map(|i| (from + 2 * r + i) as f32)));
            assert_eq!(broadcast, [0, 1].map(|i| (size - 1 + i) as f32));
        }
    }
}

#[test]
fn messages_of_a_group_pass_one_another() {
    if !has_mock(messages_of_a_group_pass_one_another) {
        return;
    }
    let received = on_ranks(3, |rank| {
        let (mine, theirs) = (rank.filled(&[rank.rank as f32; 5]), rank.filled(&[0.0; 5]));
        let (next, before) = ((rank.rank + 1) % 3, (rank.rank + 2) % 3);
        // The messages are sent twice, because messages between two ranks must arrive in order.
        for _ in 0..2 {
            // SAFETY: the buffers have this many elements.
            unsafe {
                (nccl().group_start)();
                (nccl().receive)(theirs, 5, F32, before as c_int, rank.comm, rank.wire);
                (nccl().send)(mine, 5, F32, next as c_int, rank.comm, rank.wire);
                assert_eq!((nccl().group_end)(), 0);
            }
        }
        let received = rank.read(theirs, 5);
        rank.leave();
        received
    });
    assert_eq!(received, [[2.0; 5], [0.0; 5], [1.0; 5]]);
}

#[test]
fn calls_that_do_not_block_reach_the_stream_when_the_library_says_so() {
    if !has_mock(calls_that_do_not_block_reach_the_stream_when_the_library_says_so) {
        return;
    }
    let id = unique_id();
    let (refused, was_refused) = std::sync::mpsc::sync_channel(1);
    let start = |rank: usize| {
        let device = Device::new(rank as i32);
        let mut config = Config { size: 24, magic: 0xcafe_beef, version: 21400, blocking: 0, unset: c_int::MIN };
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: the library writes a communicator.
        let code = unsafe { (nccl().init_config)(&mut comm, 2, id, rank as c_int, &mut config) };
        assert_eq!(code, IN_PROGRESS);
        let (compute, wire) = (device.stream(), device.stream());
        let rank = Rank { rank, device, comm, compute, wire };
        let values = rank.filled(&[1.0; 4]);
        // SAFETY: the buffer has this many elements.
        let sum = || unsafe { (nccl().all_reduce)(values, values, 4, F32, SUM, rank.comm, rank.wire) };
        let wait = || {
            let mut turns = 0;
            while rank.asynchronous_error() == IN_PROGRESS {
                std::thread::sleep(Duration::from_millis(1));
                turns += 1;
            }
            turns
        };
        if rank.rank == 0 {
            assert_eq!(sum(), INVALID_USAGE, "before the peer has arrived");
            refused.send(()).unwrap();
        }
        // The peer may already have arrived.
        wait();
        assert_eq!([sum(), sum()], [IN_PROGRESS, INVALID_USAGE]);
        assert_eq!(rank.read(values, 4), [1.0; 4], "the call is not on the stream yet");
        assert!(wait() > 0, "nothing was in progress");
        assert_eq!(rank.read(values, 4), [2.0; 4]);
        rank.leave();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| start(0));
        was_refused.recv().unwrap();
        scope.spawn(|| start(1));
    });
}

#[test]
fn a_collective_goes_on_though_no_host_waits_for_it() {
    if !has_mock(a_collective_goes_on_though_no_host_waits_for_it) {
        return;
    }
    let barrier = std::sync::Barrier::new(2);
    on_ranks(2, |rank| {
        let values = rank.filled(&[1.0; 4]);
        rank.sum(values, values, 4);
        if rank.rank == 0 {
            assert_eq!(rank.read(values, 4), [2.0; 4]);
        }
        // Rank 1 waits for its stream only now, when rank 0 has its sums.
        barrier.wait();
        assert_eq!(rank.read(values, 4), [2.0; 4]);
        rank.leave();
    });
}

#[test]
fn a_missing_wait_before_a_collective_is_found() {
    if !has_mock(a_missing_wait_before_a_collective_is_found) {
        return;
    }
    let name = "nccl::a_missing_wait_before_a_collective_is_found";
    if let Some(role) = role() {
        let sums = on_ranks(2, |rank| {
            let values = rank.device.filled(rank.compute, &[1.0; 4]);
            if role == "ordered" {
                rank.device.order(rank.compute, rank.wire);
            }
            rank.sum(values, values, 4);
            let sum = rank.read(values, 4)[3];
            rank.leave();
            sum
        });
        return answer(sums[0]);
    }
    let answers =
        |role| -> Vec<String> { SEEDS.step_by(4).map(|seed| answer_of(&child(name, role, seed, &[]))).collect() };
    assert!(answers("ordered").iter().all(|a| a == "2.0"));
    let wrong = answers("not ordered").iter().filter(|a| *a == "NaN").count();
    assert!(wrong > 0, "no order reveals it");
}

#[test]
fn different_collectives_hang_are_named_and_end_by_an_abort() {
    if !has_mock(different_collectives_hang_are_named_and_end_by_an_abort) {
        return;
    }
    let name = "nccl::different_collectives_hang_are_named_and_end_by_an_abort";
    if role().is_some() {
        on_ranks(2, |rank| {
            let values = rank.filled(&[1.0; 8]);
            rank.sum(values, values, if rank.rank == 0 { 4 } else { 8 });
            let (comm, started) = (rank.comm as usize, Instant::now());
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_secs(2));
                    // SAFETY: the communicator is live, and is not used after this.
                    unsafe { (nccl().abort)(comm as Comm) };
                });
                rank.device.wait(rank.wire);
            });
            assert!(started.elapsed() >= Duration::from_secs(2), "the collective ended");
        });
        return answer(());
    }
    let output = child(name, "different", 0, &[]);
    assert_eq!(answer_of(&output), "()");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let line = stderr.lines().find(|line| line.contains("rank 0 is in"));
    insta::assert_snapshot!(
        line.unwrap_or(&stderr),
        @"mock_cuda: nccl: rank 0 is in an all-reduce of 4 elements, rank 1 in an all-reduce of 8: both wait forever"
    );
}

#[test]
fn processes_sum_and_one_that_is_killed_is_an_error_of_the_other() {
    if !has_mock(processes_sum_and_one_that_is_killed_is_an_error_of_the_other) {
        return;
    }
    let name = "nccl::processes_sum_and_one_that_is_killed_is_an_error_of_the_other";
    if let (Ok(rank), Ok(id)) = (std::env::var(RANK), std::env::var(ID)) {
        let bytes: Vec<u8> = id.split(' ').map(|byte| byte.parse().unwrap()).collect();
        let rank = Rank::join(rank.parse().unwrap(), 2, Id(bytes.try_into().unwrap()));
        let values = rank.filled(&[1.5; 1000]);
        rank.sum(values, values, 1000);
        answer(rank.read(values, 1000)[999]);
        if rank.rank == 1 {
            std::process::abort();
        }
        rank.sum(values, values, 1000);
        while rank.asynchronous_error() == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        answer(rank.asynchronous_error());
        rank.abort();
        return rank.device.wait(rank.wire);
    }
    let id = unique_id().0.map(|byte| byte.to_string()).join(" ");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]).env(RANK, rank.to_string()).env(ID, &id);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [0, 1].map(start).map(|child| child.wait_with_output().unwrap());
    assert!(ranks.iter().all(|output| answer_of(output) == "3.0"));
    let first = String::from_utf8_lossy(&ranks[0].stdout).into_owned();
    assert!(ranks[0].status.success() && first.contains(&format!("answer: {REMOTE_ERROR}")), "{first}");
}
