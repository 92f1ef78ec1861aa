//! Flags of this thread, which determine how operations are recorded and differentiated.

use std::cell::Cell;

thread_local! {
    static WITHOUT_GRADIENTS: Cell<bool> = const { Cell::new(false) };
    static SINGLE_BACKWARD: Cell<bool> = const { Cell::new(false) };
    static DEFERRED_WEIGHT_GRADIENTS: Cell<bool> = const { Cell::new(false) };
}

/// Sets a flag of this thread while `run` runs, and restores its previous value afterwards, even if `run` panics.
fn with_flag<T>(flag: &'static std::thread::LocalKey<Cell<bool>>, run: impl FnOnce() -> T) -> T {
    struct ThreadFlagGuard(&'static std::thread::LocalKey<Cell<bool>>, bool);
    impl Drop for ThreadFlagGuard {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _reset = ThreadFlagGuard(flag, flag.replace(true));
    run()
}

/// Runs `run` without recording operations: results have no graph, and nothing is kept for a backward pass.
pub(crate) fn without_gradients<T>(run: impl FnOnce() -> T) -> T {
    with_flag(&WITHOUT_GRADIENTS, run)
}

/// Runs a backward pass that is the only one of its graph. Each operation drops its kept data as soon as it has run, so
/// that activations are freed while the backward pass proceeds.
pub(crate) fn with_single_backward<T>(backward: impl FnOnce() -> T) -> T {
    with_flag(&SINGLE_BACKWARD, backward)
}

/// Runs the first part of a divided backward pass (arXiv 2401.10241), in which layers may leave the gradients of their
/// weights for later. The gradient in a parameter's slot becomes a [`DeferredGradient`](super::DeferredGradient).
pub(crate) fn with_deferred_weight_gradients<T>(backward: impl FnOnce() -> T) -> T {
    with_flag(&DEFERRED_WEIGHT_GRADIENTS, backward)
}

/// Returns whether operations are not recorded.
pub(crate) fn is_without_gradients() -> bool {
    WITHOUT_GRADIENTS.get()
}

/// Returns whether the current backward pass is the only one of its graph.
pub(crate) fn is_single_backward() -> bool {
    SINGLE_BACKWARD.get()
}

/// Returns whether the backward pass that this thread runs leaves gradients of weights for later.
pub(super) fn defers_weight_gradients() -> bool {
    DEFERRED_WEIGHT_GRADIENTS.get()
}
