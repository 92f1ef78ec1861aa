//! Rendezvous of the ranks of one host that were started individually, by hand or by torchrun: how they meet, and how
//! they notice that one of them has ended.
//!
//! ```text
//!   rank 0: listens on a socket named by MASTER_PORT <-- JoinRequest -- rank r
//!           all connected: creates the memory   -- its descriptor, or the reason why there is none --> rank r
//!   then:   each connection stays open while both of its processes live; a hang-up means that one of them has ended
//! ```
//!
//! No launcher watches these ranks: rank 0 watches the others, and they watch rank 0. If rank 0 has exited normally,
//! later deaths are detected only by missing heartbeats.
//!
//! The socket's name is in the kernel's abstract namespace: it disappears with the process and is visible only to
//! processes in the same network namespace. The user of each connecting process is checked.

mod client;
mod members;
mod messages;
mod peer_credentials;
mod peer_watch;
mod server;
mod socket;

use super::rank_env::RankEnv;
use super::shm::region::SharedMemoryRegion;
use crate::error::Result;
use std::sync::{Arc, OnceLock};

/// Meets the other ranks, starts the mutual watch, and returns the memory that the ranks share.
///
/// # Errors
/// Fails if a rank does not connect in time, two processes claim the same rank, ranks disagree about WORLD_SIZE,
/// another job uses the port, or a system call fails.
pub(super) fn meet(env: &RankEnv) -> Result<Arc<SharedMemoryRegion>> {
    let region = if env.rank == 0 {
        let (region, members) = server::admit_all(env)?;
        peer_watch::watch_others(region.clone(), members)?;
        region
    } else {
        let (region, first) = client::join(env)?;
        peer_watch::watch_rank_0(region.clone(), first)?;
        region
    };
    if JOINED_REGION.set((region.clone(), env.rank)).is_ok() {
        // SAFETY: the function never unwinds, and only stores to memory that stays mapped.
        unsafe { atexit(leave) };
    }
    Ok(region)
}

/// The memory of the job that this process has joined, and the process's rank. [`leave`] uses both when the process
/// ends.
static JOINED_REGION: OnceLock<(Arc<SharedMemoryRegion>, usize)> = OnceLock::new();

unsafe extern "C" {
    /// The C library's `atexit`: the function is called when the process ends by `exit` or by returning from `main`.
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

/// Notifies the others that this rank is exiting normally, unless it has given up.
extern "C" fn leave() {
    if let Some((region, rank)) = JOINED_REGION.get() {
        region.finish(*rank);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::comm::{Communicator, CpuCommunicator};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU16, Ordering};
    use std::time::Duration;

    /// Returns a port that no other test of this process uses; other processes use other blocks of ten ports.
    fn port() -> u16 {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        20_000 + (std::process::id() % 4_000) as u16 * 10 + NEXT.fetch_add(1, Ordering::Relaxed)
    }

    fn env(rank: usize, world_size: usize, master_port: u16, milliseconds: u64) -> RankEnv {
        RankEnv {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            master_addr: "127.0.0.1".into(),
            master_port,
            shm_fd: None,
            mpi: false,
            timeout: Duration::from_millis(milliseconds),
        }
    }

    /// Runs the rendezvous with a thread for each rank, each with its own environment variables, and returns each rank's
    /// result.
    fn run<const N: usize>(ranks: [RankEnv; N]) -> [String; N] {
        let threads = ranks.map(|env| std::thread::spawn(move || meet(&env).map(drop)));
        threads.map(|rank| rank.join().unwrap().err().map_or("met".to_string(), |error| error.to_string()))
    }

    #[test]
    fn ranks_meet_in_any_order_and_have_one_memory() {
        let port = port();
        let ranks = [2, 0, 1].map(|rank| {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis([100, 0, 50][rank]));
                let env = env(rank, 3, port, 20_000);
                let comm = CpuCommunicator::new(meet(&env).unwrap(), rank, env.timeout).unwrap();
                comm.gather_bytes(vec![rank as u8 + 10]).wait().unwrap()
            })
        });
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), [[10], [11], [12]]);
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_to_those_that_did() {
        let port = port();
        let [first, third] = run([env(0, 3, port, 300), env(2, 3, port, 20_000)]);
        let [first, third] = [first, third].map(|text| text.replace(&port.to_string(), "PORT"));
        insta::assert_snapshot!(first, @"2 of 3 ranks connected to MASTER_PORT PORT on this host within 300ms; missing ranks: 1; start each of them with its RANK, the same WORLD_SIZE and MASTER_PORT, as the same user and in the same network namespace; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun");
        insta::assert_snapshot!(third, @"rank 0 cancelled the rendezvous: 2 of 3 ranks connected to MASTER_PORT PORT on this host within 300ms; missing ranks: 1; start each of them with its RANK, the same WORLD_SIZE and MASTER_PORT, as the same user and in the same network namespace; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun");
    }

    #[test]
    fn rank_0_that_does_not_come_is_missed() {
        let port = port();
        let [second] = run([env(1, 2, port, 300)]);
        insta::assert_snapshot!(second.replace(&port.to_string(), "PORT"), @"rank 1 of 2 found no rank 0 at MASTER_PORT PORT on this host within 300ms; start it with RANK=0, WORLD_SIZE=2 and the same MASTER_PORT, as the same user and in the same network namespace, or all ranks with `zerorun --num_ranks 2`; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun");
    }

    #[test]
    fn ranks_that_differ_about_their_number_are_told_both() {
        let port = port();
        let results = run([env(0, 3, port, 20_000), env(1, 2, port, 20_000)]);
        let [first, second] = results.map(|text| text.replace(&port.to_string(), "PORT"));
        insta::assert_snapshot!(first, @"WORLD_SIZE is 3 on rank 0 and 2 on rank 1; give all ranks of a job the same value, and each job its own MASTER_PORT (here PORT)");
        insta::assert_snapshot!(second, @"rank 0 cancelled the rendezvous: WORLD_SIZE is 3 on rank 0 and 2 on rank 1; give all ranks of a job the same value, and each job its own MASTER_PORT (here PORT)");
    }

    #[test]
    fn a_rank_of_two_processes_and_a_port_of_two_jobs_are_told() {
        let port = port();
        let pid = std::process::id().to_string();
        let normalize = |text: String| text.replace(&port.to_string(), "PORT").replace(&pid, "PID");
        let [first, second, same] = run([env(0, 3, port, 20_000), env(1, 3, port, 20_000), env(1, 3, port, 20_000)]);
        assert_eq!(second, same);
        insta::assert_snapshot!(normalize(first), @"processes PID and PID both claim rank 1; give each its own RANK, and each job its own MASTER_PORT (here PORT)");
        insta::assert_snapshot!(normalize(second), @"rank 0 cancelled the rendezvous: processes PID and PID both claim rank 1; give each its own RANK, and each job its own MASTER_PORT (here PORT)");
        let port = self::port();
        let waiting_rank = std::thread::spawn(move || meet(&env(0, 2, port, 20_000)).map(drop));
        while UnixStream::connect_addr(&socket::address(port).unwrap()).is_err() {
            std::thread::yield_now();
        }
        let [other] = run([env(0, 2, port, 20_000)]);
        insta::assert_snapshot!(other.replace(&port.to_string(), "PORT"), @"another job already uses MASTER_PORT PORT on this host; give each job its own port");
        assert_eq!(run([env(1, 2, port, 20_000)]), ["met"]);
        waiting_rank.join().unwrap().unwrap();
    }
}
