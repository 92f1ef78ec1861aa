//! Takes a tensor's storage out and puts it back, as the engine does.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use std::sync::Mutex;

/// An operation that exchanges a tensor's storage.
struct Swap(Mutex<CpuStorage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut self.0.lock().unwrap());
        Ok(())
    }
}

/// Puts `storage` into a tensor and returns the previous one.
pub fn swap(t: &Tensor, storage: CpuStorage) -> CpuStorage {
    let op = Swap(Mutex::new(storage));
    t.inplace_op1(&op).unwrap();
    op.0.into_inner().unwrap()
}
