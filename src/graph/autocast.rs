//! The format in which a thread multiplies f32 operands (`torch_autocast`).
//!
//! The engine sets this format for the duration of a forward pass. A unit that recomputes its forward pass, in any
//! backward pass, restores the format of its first forward pass.

use candle_core::DType;
use std::cell::Cell;

thread_local! {
    static FORMAT: Cell<Option<DType>> = const { Cell::new(None) };
}

/// Runs `run` with the products of linear layers computed in `format` if their operands are f32. With `None`, operands
/// keep their format. The thread's previous format is restored afterwards.
pub(crate) fn autocast<T>(format: Option<DType>, run: impl FnOnce() -> T) -> T {
    struct AutocastGuard(Option<DType>);
    impl Drop for AutocastGuard {
        fn drop(&mut self) {
            FORMAT.set(self.0);
        }
    }
    let _reset = AutocastGuard(FORMAT.replace(format));
    run()
}

/// Returns the format that this thread uses now.
pub(crate) fn autocast_format() -> Option<DType> {
    FORMAT.get()
}
