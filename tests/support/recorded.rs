//! The recorded cases that have no counterpart here, or another answer.

use serde_json::Value;
use std::collections::BTreeMap;

/// Why each case that is left out is left out, by its id.
pub fn left_out() -> BTreeMap<String, String> {
    serde_json::from_str(include_str!("../fixtures/left_out.json")).unwrap()
}

/// The recorded cases of DeepSpeed's launcher.
pub fn of_launcher() -> Vec<Value> {
    serde_json::from_str(include_str!("../fixtures/conformance_launcher.json")).unwrap()
}

/// One of them.
pub fn launcher_case(id: &str) -> Value {
    of_launcher().into_iter().find(|case| case["id"] == id).unwrap()
}

/// Whether a case is left out.
pub fn is_left_out(case: &Value) -> bool {
    left_out().contains_key(case["id"].as_str().unwrap())
}
