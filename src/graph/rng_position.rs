//! Where a thread's random draws are: which layer draws which numbers.
//!
//! The engine gives each forward of each rank a stream of its own ([`stream_of`]), and a unit that recomputes its forward goes back to
//! where the first one began.

use crate::util::mix;
use std::cell::Cell;

/// Where a thread's draws are.
#[derive(Clone, Copy)]
pub(crate) struct RngPosition {
    pub stream: u64,
    /// The number of the next draw.
    pub next: u64,
    /// Whether an engine is training ([`draw_from`]). Then elements are dropped even where nothing is recorded:
    /// a unit that recomputes runs its first forward so, and must give what its second one gives.
    pub in_training: bool,
}

thread_local! {
    static DRAWS: Cell<RngPosition> = const { Cell::new(RngPosition { stream: 0, next: 0, in_training: false }) };
}

/// A forward of a run.
#[derive(Clone, Copy)]
pub(crate) struct RngStreamKey {
    /// The run's.
    pub seed: u64,
    pub rank: u64,
    /// The optimizer step.
    pub step: u64,
    /// The micro step in it.
    pub micro_step: u64,
    /// The forward of the micro step, from 0.
    pub forward: u64,
}

/// The stream of a forward: another one for each of a run, and for runs of other seeds. It follows from where the forward is in its
/// optimizer step, so a run that goes on from a checkpoint has it too.
pub(crate) fn stream_of(key: RngStreamKey) -> u64 {
    let RngStreamKey { seed, rank, step, micro_step, forward } = key;
    // Odd factors, so that streams that differ in one of them only differ.
    (rank << 40 | step)
        ^ mix(seed)
        ^ micro_step.wrapping_mul(0x9fb2_1c65_1e98_df25)
        ^ forward.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Runs `run` as training, with the draws of this thread taken from number `next` of `stream` on; afterwards they go on
/// where they were. Returns the result of `run`.
pub(crate) fn draw_from<T>((stream, next): (u64, u64), run: impl FnOnce() -> T) -> T {
    struct RngPositionReset(RngPosition);
    impl Drop for RngPositionReset {
        fn drop(&mut self) {
            DRAWS.set(self.0);
        }
    }
    let _reset = RngPositionReset(DRAWS.replace(RngPosition { stream, next, in_training: true }));
    run()
}

/// Where this thread's draws are.
pub(crate) fn rng_position() -> RngPosition {
    DRAWS.get()
}

/// The same as [`draw_from`] takes it, to repeat the draws that follow.
pub(crate) fn stream_position() -> (u64, u64) {
    let RngPosition { stream, next, .. } = DRAWS.get();
    (stream, next)
}

/// One more draw has been made.
pub(crate) fn advance_draws() {
    let draws = DRAWS.get();
    DRAWS.set(RngPosition { next: draws.next + 1, ..draws });
}
