//! The format in which a thread multiplies operands of f32 (`torch_autocast`).
//!
//! The engine sets it around a forward; a unit that recomputes its forward, in whatever backward, goes back to that of the
//! first one.

use candle_core::DType;
use std::cell::Cell;

thread_local! {
    static FORMAT: Cell<Option<DType>> = const { Cell::new(None) };
}

/// Runs `run` with the products of linear layers in `format` where their operands are f32; `None`: as they are. What the
/// thread had before holds again afterwards.
pub(crate) fn autocast<T>(format: Option<DType>, run: impl FnOnce() -> T) -> T {
    struct AutocastReset(Option<DType>);
    impl Drop for AutocastReset {
        fn drop(&mut self) {
            FORMAT.set(self.0);
        }
    }
    let _reset = AutocastReset(FORMAT.replace(format));
    run()
}

/// The format that this thread has now.
pub(crate) fn autocast_format() -> Option<DType> {
    FORMAT.get()
}
