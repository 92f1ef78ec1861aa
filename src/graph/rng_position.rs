//! The position of a thread in its random streams, which determines which layer draws which numbers.
//!
//! The engine gives each forward pass of each rank a separate stream ([`stream_of`]). A unit that recomputes its
//! forward pass returns to the position where its first forward pass began.

use crate::util::mix;
use std::cell::Cell;

/// The position of a thread's draws.
#[derive(Clone, Copy)]
pub(crate) struct RngPosition {
    pub stream: u64,
    /// The index of the next draw.
    pub next: u64,
    /// Whether an engine is training ([`draw_from`]). If so, elements are dropped even if nothing is recorded: a
    /// recomputing unit records nothing in its first forward pass, whose output its second forward pass must reproduce.
    pub in_training: bool,
}

thread_local! {
    static DRAWS: Cell<RngPosition> = const { Cell::new(RngPosition { stream: 0, next: 0, in_training: false }) };
}

/// The identity of a forward pass in a run.
#[derive(Clone, Copy)]
pub(crate) struct RngStreamKey {
    /// The run's seed.
    pub seed: u64,
    pub rank: u64,
    /// The optimizer step.
    pub step: u64,
    /// The micro step within the optimizer step.
    pub micro_step: u64,
    /// The index of the forward pass in the micro step, counted from 0.
    pub forward: u64,
}

/// Returns the stream of a forward pass. It differs for each forward pass of a run, and for runs with different seeds.
/// It is determined by the optimizer step and the position of the forward pass in that step, so a run that resumes from
/// a checkpoint uses the same stream.
pub(crate) fn stream_of(key: RngStreamKey) -> u64 {
    let RngStreamKey { seed, rank, step, micro_step, forward } = key;
    // The factors are odd, so that keys that differ in only one part have different streams.
    (rank << 40 | step)
        ^ mix(seed)
        ^ micro_step.wrapping_mul(0x9fb2_1c65_1e98_df25)
        ^ forward.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Runs `run` in training mode, with this thread's draws taken from `stream`, starting at index `next`. Afterwards, the
/// draws continue from the previous position. Returns the result of `run`.
pub(crate) fn draw_from<T>((stream, next): (u64, u64), run: impl FnOnce() -> T) -> T {
    struct RngPositionGuard(RngPosition);
    impl Drop for RngPositionGuard {
        fn drop(&mut self) {
            DRAWS.set(self.0);
        }
    }
    let _reset = RngPositionGuard(DRAWS.replace(RngPosition { stream, next, in_training: true }));
    run()
}

/// Returns the position of this thread's draws.
pub(crate) fn rng_position() -> RngPosition {
    DRAWS.get()
}

/// Returns the position in the form that [`draw_from`] accepts, to repeat the draws that follow.
pub(crate) fn stream_position() -> (u64, u64) {
    let RngPosition { stream, next, .. } = DRAWS.get();
    (stream, next)
}

/// Counts one more draw.
pub(crate) fn advance_draws() {
    let draws = DRAWS.get();
    DRAWS.set(RngPosition { next: draws.next + 1, ..draws });
}
