//! Tests that cannot run on this machine, because files, rights or a program are missing.
//!
//! They pass, as far as the test runner knows. So each writes a line past its capture to standard error, and to the
//! file that the variable `CANDLE_ZERO_SKIPS` names, of which `.ci/run` makes a list and a count.

use std::fmt::Display;
use std::io::Write;

/// `test` ends without having checked anything.
pub fn skipped<T: Fn()>(test: T, why: impl Display) {
    write_line("skipped", test, why);
}

/// `test` leaves a part out.
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
