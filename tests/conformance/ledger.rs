//! Accounts for every recorded case of DeepSpeed's behaviour: it is in a fixture, which a test of its area runs, or in
//! the list of cases that are left out (tests/fixtures/left_out.json), with the reason.

use crate::support::processes::repository;
use crate::support::recorded::{is_left_out, left_out};
use crate::support::skips::skipped;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The areas in which nearly every case must hold, grouped by what they are about.
const STRICT: [(&str, &[&str]); 8] = [
    ("config", &["batch", "config", "config-default", "config-engine", "config-file"]),
    ("schedules", &["lr-schedule"]),
    ("scaling", &["loss-scaler"]),
    ("layout", &["partition", "zero12-layout", "zero3-layout", "gradient-bucket"]),
    ("optimizers", &["optimizer-choice", "optimizer-math"]),
    ("clipping", &["grad-clip"]),
    ("estimates", &["memory-estimate"]),
    ("data loading", &["data-loader"]),
];

/// The largest share of the cases of all these areas together that may be left out, in percent.
const MAX_LEFT_OUT_PERCENT: usize = 5;

fn read(path: &Path) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns the cases of all fixtures by id; a case that the tests of two areas use is in two fixtures.
fn fixtures() -> BTreeMap<String, Value> {
    let folder = repository().join("tests/fixtures");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let cases = files
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("conformance_"))
        .flat_map(|p| read(&p));
    cases.map(|case| (case["id"].as_str().unwrap().to_string(), case)).collect()
}

#[test]
fn at_most_a_twentieth_of_the_cases_that_matter_most_is_left_out() {
    let (cases, mut total, mut total_left_out) = (fixtures(), 0, 0);
    for (concern, areas) in STRICT {
        let concern_cases: Vec<_> =
            cases.values().filter(|case| areas.contains(&case["area"].as_str().unwrap())).collect();
        let left_out = concern_cases.iter().filter(|case| is_left_out(case)).count();
        println!("{concern}: {left_out} of {} cases left out", concern_cases.len());
        assert!(!concern_cases.is_empty(), "no cases of {concern}");
        (total, total_left_out) = (total + concern_cases.len(), total_left_out + left_out);
    }
    println!("together: {total_left_out} of {total}");
    assert!(total_left_out * 100 <= total * MAX_LEFT_OUT_PERCENT, "{total_left_out} of {total}");
}

#[test]
fn every_recorded_case_is_held_or_left_out_with_a_reason() {
    let path = repository().join("../shared/conformance/cases.json");
    if !path.exists() {
        return skipped(
            every_recorded_case_is_held_or_left_out_with_a_reason,
            format_args!("there is no {}", path.display()),
        );
    }
    let (recorded, fixtures, left_out) = (read(&path), fixtures(), left_out());
    for case in &recorded {
        let id = case["id"].as_str().unwrap();
        let Some(copy) = fixtures.get(id) else {
            assert!(left_out.contains_key(id), "{id} of {} is neither in a fixture nor left out", case["area"]);
            continue;
        };
        for (key, value) in case.as_object().unwrap().iter().filter(|(key, _)| *key != "source") {
            assert_eq!(&copy[key], value, "{key} of {id} differs from what was recorded");
        }
    }
    let ids: BTreeSet<_> = recorded.iter().map(|case| case["id"].as_str().unwrap()).collect();
    for id in left_out.keys().chain(fixtures.keys()) {
        assert!(ids.contains(id.as_str()), "{id} is not a recorded case");
    }
    let mut by_reason = BTreeMap::<_, Vec<_>>::new();
    left_out.iter().for_each(|(id, why)| by_reason.entry(why).or_default().push(id.as_str()));
    println!("{} of {} cases are left out:", left_out.len(), recorded.len());
    by_reason.iter().for_each(|(why, ids)| println!("  {why}: {}", ids.join(", ")));
}
