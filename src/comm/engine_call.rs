//! The engine call in which a collective is launched, for messages about ranks that are in different calls.

use std::cell::Cell;
use std::marker::PhantomData;

/// The calls that launch collectives. In shared memory, a call is represented by its index; index 0 means no call.
const CALLS: [&str; 14] = [
    "",
    "initialize",
    "forward",
    "backward",
    "step",
    "eval",
    "save_checkpoint",
    "load_checkpoint",
    "wait_for_checkpoint",
    "export_safetensors",
    "save_16bit_model",
    "gather_f64",
    "wait_for_upload",
    "synchronize_islands",
];

thread_local! {
    static CURRENT_CALL: Cell<usize> = const { Cell::new(0) };
}

/// A guard that keeps the current call set until it is dropped, on the thread that created it.
pub(crate) struct EngineCallGuard {
    previous: usize,
    not_send: PhantomData<*const ()>,
}

/// Marks this thread as being in `call`, unless it is already in another call, which then takes precedence.
pub(crate) fn during(call: &str) -> EngineCallGuard {
    let previous = CURRENT_CALL.get();
    if previous == 0 {
        let index = CALLS.iter().position(|name| *name == call);
        CURRENT_CALL.set(index.unwrap_or_else(|| unreachable!("{call} is not in CALLS")));
    }
    EngineCallGuard { previous, not_send: PhantomData }
}

impl Drop for EngineCallGuard {
    fn drop(&mut self) {
        CURRENT_CALL.set(self.previous);
    }
}

/// Returns the index of this thread's call.
pub(super) fn current() -> u64 {
    CURRENT_CALL.get() as u64
}

/// Returns the name of a call, if it has one.
pub(super) fn name(call: u64) -> Option<&'static str> {
    CALLS.get(usize::try_from(call).ok()?).copied().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_call_counts_until_it_ends() {
        assert_eq!(name(current()), None);
        let outer = during("save_checkpoint");
        let inner = during("wait_for_checkpoint");
        assert_eq!(name(current()), Some("save_checkpoint"));
        drop(inner);
        assert_eq!(name(current()), Some("save_checkpoint"));
        drop(outer);
        assert_eq!((name(current()), name(u64::MAX)), (None, None));
    }
}
