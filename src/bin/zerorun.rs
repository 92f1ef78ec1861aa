//! `zerorun`: starts a training script on N ranks, or runs a tool. The work is in [`candle_zero::zerorun`].

use candle_zero::zerorun::BoundedAllocator;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: BoundedAllocator = BoundedAllocator;

fn main() -> ExitCode {
    candle_zero::zerorun::main()
}
