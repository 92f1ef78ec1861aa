//! The recorded cases of DeepSpeed, and those that are left out because there is no equivalent or the result differs.

use serde_json::Value;
use std::collections::BTreeMap;

/// Returns the reason for leaving out each omitted case, by the id of the case.
pub fn left_out() -> BTreeMap<String, String> {
    serde_json::from_str(include_str!("../fixtures/left_out.json")).unwrap()
}

/// Returns the recorded cases of DeepSpeed's launcher.
pub fn of_launcher() -> Vec<Value> {
    serde_json::from_str(include_str!("../fixtures/conformance_launcher.json")).unwrap()
}

/// Returns one recorded case of DeepSpeed's launcher.
pub fn launcher_case(id: &str) -> Value {
    of_launcher().into_iter().find(|case| case["id"] == id).unwrap()
}

/// Returns whether a case is left out.
pub fn is_left_out(case: &Value) -> bool {
    left_out().contains_key(case["id"].as_str().unwrap())
}
