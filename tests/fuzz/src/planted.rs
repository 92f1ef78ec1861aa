//! Targets with faults, which the driver must find. For other targets, `words` are inserted into inputs; here, they are
//! the possible beginnings of a correct report of the fault.

use crate::targets::Target;
use std::hint::black_box;

/// The faults.
pub const PLANTED: [Target; 8] = [
    planted("panic", |_| panic!("a fault"), &[&[concat!("panic at ", file!())]]),
    planted(
        "caught panic",
        |_| std::panic::catch_unwind(|| panic!("a fault")).is_ok(),
        &[&[concat!("panic at ", file!())]],
    ),
    planted("overflow", |data| usize::MAX + black_box(1 + data.len()) == 0, &[&[concat!("panic at ", file!())]]),
    planted("abort", |_| std::process::abort(), &[&["signal: 6"]]),
    planted("endless recursion", |data| depth(black_box(data.len())) == 0, &[&["signal: 6"]]),
    planted("large allocation", |_| black_box(vec![0_u8; 1 << 35]).is_empty(), &[&["signal: 6"]]),
    planted("much memory", |_| black_box(vec![1_u8; 1200 << 20]).is_empty(), &[&["memory"]]),
    planted(
        "endless loop",
        |_| loop {
            black_box(())
        },
        &[&["a case of more than"]],
    ),
];

const fn planted(name: &'static str, run: fn(&[u8]) -> bool, words: &'static [&'static [&'static str]]) -> Target {
    Target { name, run, seeds: || vec![Vec::new()], words }
}

fn depth(below: usize) -> usize {
    if below == usize::MAX { 0 } else { 1 + black_box(depth(black_box(below + 1))) }
}
