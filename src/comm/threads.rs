//! Ranks that are threads of one process, for tests, doc examples and small experiments.

use super::shm::region::SharedMemoryRegion;
use super::{Communicator, CpuCommunicator};
use crate::error::Result;
use std::sync::Arc;
use std::time::Duration;

/// The stack size of a rank's thread. Candle's `backward` recurses once per operation of the graph.
const STACK_BYTES: usize = 256 << 20;
/// The default limit of one wait for a peer.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Returns the communicators of `world_size` ranks of this process, in rank order.
pub fn communicators(world_size: usize, timeout: Duration) -> Result<Vec<Arc<dyn Communicator>>> {
    let region = Arc::new(SharedMemoryRegion::anonymous(world_size)?);
    (0..world_size)
        .map(|rank| Ok(Arc::new(CpuCommunicator::new(region.clone(), rank, timeout)?) as Arc<dyn Communicator>))
        .collect()
}

/// Runs `rank` once per rank, each on a thread with a large stack, and returns the results in rank order.
///
/// # Errors
/// Fails if the memory that the ranks share cannot be created. A rank's own error is at the rank's position in the
/// list.
///
/// # Panics
/// Panics if a rank panics (its panic is propagated once all ranks have ended), or if a rank's thread cannot be
/// started.
///
/// ```
/// let sums = candle_zero::comm::threads::run(3, |comm| {
///     let mine = candle_zero::precision::Flat::from(vec![comm.rank() as f32]);
///     comm.all_reduce(mine, 0).wait()
/// })?;
/// for sum in sums {
///     assert_eq!(sum?, candle_zero::precision::Flat::from(vec![3.0]));
/// }
/// # Ok::<(), candle_zero::Error>(())
/// ```
pub fn run<T: Send>(
    world_size: usize,
    rank: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    let communicators: Vec<Arc<dyn Communicator>> = if world_size == 1 {
        vec![Arc::new(super::SoloCommunicator::default())]
    } else {
        communicators(world_size, DEFAULT_TIMEOUT)?
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = communicators
            .into_iter()
            .enumerate()
            .map(|(r, comm)| {
                std::thread::Builder::new()
                    .name(format!("rank-{r}"))
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, move || rank(comm))
                    .unwrap_or_else(|e| panic!("cannot start the thread of rank {r}: {e}"))
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        Ok(results.into_iter().map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect())
    })
}
