//! `zerorun`: starts a training script on N ranks, or runs a tool. The work is in [`candle_zero::zerorun`].

use std::process::ExitCode;

fn main() -> ExitCode {
    candle_zero::zerorun::main()
}
