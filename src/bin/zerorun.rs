//! `zerorun`: starts a training script on N ranks. The work is in [`candle_zero::launch`].

use std::process::ExitCode;

fn main() -> ExitCode {
    candle_zero::launch::main()
}
