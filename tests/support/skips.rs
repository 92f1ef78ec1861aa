//! Tests that cannot run on this machine because files, permissions or a program are missing.
//!
//! The test runner reports them as passed. Therefore, each writes a line to standard error, bypassing the runner's
//! capture, and to the file that the variable `CANDLE_ZERO_SKIPS` names. `.ci/run` lists and counts these lines.

use std::fmt::Display;
use std::io::Write;

/// Reports that `test` ends without having checked anything.
pub fn skipped<T: Fn()>(test: T, why: impl Display) {
    write_line("skipped", test, why);
}

/// Reports that `test` leaves out a part.
pub fn skipped_in_part<T: Fn()>(test: T, why: impl Display) {
    write_line("skipped in part", test, why);
}

fn write_line<T>(what: &str, _: T, why: impl Display) {
    let why = why.to_string();
    let why: Vec<&str> = why.lines().collect();
    let line = format!("{what}: {}: {}\n", std::any::type_name::<T>(), why.join("; "));
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    if let Some(path) = std::env::var_os("CANDLE_ZERO_SKIPS") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}
