//! The unit that the training thread works on, and the cost of that work.
//!
//! ```text
//!   forward    outside | unit | outside | unit | ... | outside        guards
//!   backward   outside | unit | unit | ... | outside                  hooks before a unit's last operation, and before
//!                                                                     the one that computed its input
//! ```

use crate::kernels::mac_count;
use crate::param::{ROOT, UnitId};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// One half of a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MicroStepHalf {
    Forward,
    Backward,
}

/// The half of a micro step, and the unit, to which work belongs.
type ProfiledPart = (MicroStepHalf, UnitId);

/// The time and the multiply-adds of some work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ProfiledCost {
    pub time: Duration,
    pub macs: u64,
}

#[derive(Default)]
struct FlopsProfilerState {
    /// The current work, its start, and the thread's multiply-add count at that time. `None` between engine calls.
    current: Option<(ProfiledPart, Instant, u64)>,
    costs: BTreeMap<ProfiledPart, ProfiledCost>,
}

thread_local! {
    static SPANS: RefCell<FlopsProfilerState> = RefCell::default();
}

/// Switches to `part`, and returns the previous part.
fn switch(part: Option<ProfiledPart>) -> Option<ProfiledPart> {
    SPANS.with_borrow_mut(|spans| {
        let (time, macs) = (Instant::now(), mac_count::macs());
        let previous = std::mem::replace(&mut spans.current, part.map(|part| (part, time, macs)));
        previous.map(|(part, since, counted)| {
            let cost = spans.costs.entry(part).or_default();
            cost.time += time - since;
            cost.macs += macs.wrapping_sub(counted);
            part
        })
    })
}

/// A guard that returns to the previous work when dropped.
pub(crate) struct ProfilerSpan(Option<ProfiledPart>);

impl Drop for ProfilerSpan {
    fn drop(&mut self) {
        switch(self.0);
    }
}

/// Records one half of a micro step until the result is dropped.
pub(crate) fn record(half: MicroStepHalf) -> ProfilerSpan {
    ProfilerSpan(switch(Some((half, ROOT))))
}

/// Returns whether this thread records.
pub(crate) fn is_recording() -> bool {
    SPANS.with_borrow(|spans| spans.current.is_some())
}

/// Records the work of a unit until the result is dropped, if this thread records.
pub(crate) fn enter(half: MicroStepHalf, unit: UnitId) -> Option<ProfilerSpan> {
    is_recording().then(|| ProfilerSpan(switch(Some((half, unit)))))
}

/// Marks the start of a unit's backward pass.
pub(crate) fn begin_backward(unit: UnitId) {
    if is_recording() {
        switch(Some((MicroStepHalf::Backward, unit)));
    }
}

/// Marks that a unit's input has its gradient: the work that follows is outside the unit, unless another unit has
/// begun.
pub(crate) fn end_backward(unit: UnitId) {
    let runs =
        SPANS.with_borrow(|spans| spans.current.is_some_and(|(part, ..)| part == (MicroStepHalf::Backward, unit)));
    if runs {
        switch(Some((MicroStepHalf::Backward, ROOT)));
    }
}

/// Discards all records.
pub(crate) fn clear() {
    SPANS.take();
}

/// Returns the records since the last call of this function or of [`clear`], and discards them.
pub(crate) fn take() -> BTreeMap<ProfiledPart, ProfiledCost> {
    SPANS.take().costs
}
