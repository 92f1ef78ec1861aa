//! The launcher's recorded cases: tests cover each of them, at least in part, and at most a tenth of the cases about
//! zerorun are left out.

use crate::support::processes::repository;
use crate::support::recorded::{is_left_out, of_launcher};
use std::path::PathBuf;

/// Returns the sources of tests that may cover a case, as one text.
fn sources() -> String {
    let root = repository();
    let files =
        ["crates/zerorun/src/launch/hosts", "tests/launch"].map(|folder| std::fs::read_dir(root.join(folder)).unwrap());
    let files = files.into_iter().flatten().map(|file| file.unwrap().path()).filter(|path| path.is_file());
    let files: Vec<PathBuf> = files.chain([root.join("crates/zerorun/src/args/tests.rs")]).collect();
    files.into_iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

#[test]
fn every_case_is_held_by_a_test_or_left_out_and_at_most_a_tenth_is() {
    let (cases, sources) = (of_launcher(), sources());
    let is_covered = |case: &serde_json::Value| {
        let [id, area] = ["id", "area"].map(|key| case[key].as_str().unwrap());
        // A test covers all cases of an area, or names the cases that it covers.
        sources.contains(&format!("of_area(\"{area}\")")) || sources.contains(&format!("\"{id}\""))
    };
    for case in &cases {
        assert!(is_covered(case), "no test covers {}, not even in part", case["id"]);
    }
    // The cases of this area are about the command lines of other launchers, most of which zerorun does not build.
    let zerorun_cases: Vec<_> = cases.iter().filter(|case| case["area"] != "launcher-backend").collect();
    let left_out = zerorun_cases.iter().filter(|case| is_left_out(case)).count();
    assert!(left_out * 10 <= zerorun_cases.len(), "{left_out} of {} are left out", zerorun_cases.len());
    assert_eq!(zerorun_cases.len(), 42);
}
