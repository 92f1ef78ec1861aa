//! Measures collectives between two ranks, which are processes started by `zerorun`.
//!
//!     cargo bench --bench collectives
//!
//! A measurement lasts from a common start until the slower rank is done. Bytes per second refer to the complete,
//! unsharded buffer. The yardstick, `copy`, is a plain copy through shared memory: each rank reads a buffer of that size,
//! which the other rank has written, from the pages of a memfd into its own memory, and both ranks do so at the same
//! time. All of this memory has been touched beforehand. Each round runs the copy and every collective in turn, so that
//! all of them run with the machine in the same state.
//!
//! Results marked `(new)` are in memory that the system allocates during the call, so their times include page faults.
//! Other results are in memory that was already in use: a reduction leaves its result in its input, and a gather does
//! too if there is room.
#![allow(clippy::unwrap_used)]

use candle_core::DType;
use candle_zero::comm::RankEnv;
use candle_zero::comm::{self, Communicator, WireFormat};
use candle_zero::precision::{Flat, IntFormat};
use memmap2::{MmapMut, MmapOptions};
use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode};
use std::time::Instant;

const RANKS: usize = 2;
const BYTES: [usize; 3] = [1 << 20, 16 << 20, 64 << 20];
const ROUNDS: usize = 25;
const SHORT_BYTES: usize = 1 << 10;
const SHORT_ROUNDS: usize = 20_000;
/// The environment variable with the file descriptor of the shared memory that the ranks copy from.
const MEMORY: &str = "BENCH_MEMORY_FD";

fn main() -> ExitCode {
    let env = RankEnv::from_env().unwrap();
    if env.world_size > 1 {
        let comm = comm::from_env(&env).unwrap();
        BYTES.iter().for_each(|bytes| long(&*comm, *bytes));
        short(&*comm);
        return ExitCode::SUCCESS;
    }
    // The descriptor is not closed on exec, so the ranks inherit it.
    let memory = rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&memory, (RANKS * BYTES.iter().max().unwrap()) as u64).unwrap();
    let mut zerorun = Command::new(env!("CARGO_BIN_EXE_zerorun"));
    zerorun.args(["-n", &RANKS.to_string()]).arg(std::env::current_exe().unwrap());
    zerorun.env(MEMORY, memory.as_raw_fd().to_string());
    if zerorun.status().unwrap().success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the time in seconds until all ranks have run `f`.
fn time(comm: &dyn Communicator, f: impl FnOnce()) -> f64 {
    comm.barrier().wait().unwrap();
    let start = Instant::now();
    f();
    comm.barrier().wait().unwrap();
    start.elapsed().as_secs_f64()
}

/// Returns elements in memory that has already been written to. Memory that was only requested as zeros would not be
/// mapped yet.
fn touched(len: usize) -> Flat {
    Flat::from(vec![1f32; len])
}

fn long(comm: &dyn Communicator, bytes: usize) {
    let (rank, len) = (comm.rank(), bytes / 4);
    let mut memory = shared_memory();
    memory[rank * bytes..(rank + 1) * bytes].fill(rank as u8 + 1);
    comm.barrier().wait().unwrap();
    let source = &memory[(1 - rank) * bytes..(2 - rank) * bytes];
    let mut destination = vec![9u8; bytes];
    let (mut sum, mut scattered, mut gathered) = (touched(len), touched(len), touched(len));
    let mut times = [
        ("copy", vec![]),
        ("reduce-scatter", vec![]),
        ("all-gather", vec![]),
        ("all-gather (new)", vec![]),
        ("all-reduce", vec![]),
        ("reduce-scatter, int4", vec![]),
        ("all-gather, int8", vec![]),
    ];
    for _ in 0..ROUNDS {
        let take = |flat: &mut Flat| std::mem::replace(flat, Flat::zeros(DType::F32, 0));
        let seconds = [
            time(comm, || black_box(&mut destination).copy_from_slice(black_box(source))),
            {
                let input = take(&mut scattered);
                let seconds = time(comm, || scattered = comm.reduce_scatter(input, 0).wait().unwrap());
                scattered.extend_zeros(len - scattered.len());
                seconds
            },
            {
                let mut shard = take(&mut gathered);
                shard.truncate(len / RANKS);
                time(comm, || gathered = comm.all_gather(shard, 0).wait().unwrap())
            },
            {
                let (shard, mut out) = (touched(len / RANKS), None);
                time(comm, || out = Some(comm.all_gather(shard, 0).wait().unwrap()))
            },
            {
                let input = take(&mut sum);
                time(comm, || sum = comm.all_reduce(input, 0).wait().unwrap())
            },
            {
                let (input, wire) = (take(&mut scattered), WireFormat::Blocks(IntFormat::Int4));
                let seconds = time(comm, || scattered = comm.reduce_scatter_as(wire, input, 0).wait().unwrap());
                scattered.extend_zeros(len - scattered.len());
                seconds
            },
            {
                let (mut shard, wire) = (take(&mut gathered), WireFormat::Blocks(IntFormat::Int8));
                shard.truncate(len / RANKS);
                time(comm, || gathered = comm.all_gather_as(wire, shard, 0).wait().unwrap())
            },
        ];
        times.iter_mut().zip(seconds).for_each(|((_, times), seconds)| times.push(seconds));
    }
    if rank == 0 {
        println!("{} MiB", bytes >> 20);
        let mut copy = None;
        for (name, times) in &mut times {
            times.sort_by(f64::total_cmp);
            let [best, median] = [times[0], times[times.len() / 2]].map(|seconds| bytes as f64 / seconds / 1e9);
            let of_copy = 100.0 * median / *copy.get_or_insert(median);
            println!("  {name:<20} median {median:6.2} GB/s ({of_copy:3.0} % of copy)   best {best:6.2} GB/s");
        }
    }
}

fn shared_memory() -> MmapMut {
    let fd = std::env::var(MEMORY).unwrap();
    let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}")).unwrap();
    // SAFETY: each rank writes its own part, and reads the other's only after a barrier.
    unsafe { MmapOptions::new().map_mut(&file).unwrap() }
}

fn short(comm: &dyn Communicator) {
    let mut values = Flat::zeros(DType::F32, SHORT_BYTES / 4);
    let mut times: Vec<f64> = Vec::with_capacity(SHORT_ROUNDS);
    for _ in 0..SHORT_ROUNDS {
        let start = Instant::now();
        values = comm.all_reduce(values, 0).wait().unwrap();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    if comm.rank() == 0 {
        let [median, p99] = [times[SHORT_ROUNDS / 2], times[SHORT_ROUNDS * 99 / 100]].map(|seconds| seconds * 1e6);
        println!("{SHORT_BYTES} bytes: all-reduce median {median:.2} us, 99 % below {p99:.2} us");
    }
}
