//! The recorded cases that have no counterpart here, or another answer.

use serde_json::Value;
use std::collections::BTreeMap;

/// Why each case that is left out is left out, by its id.
pub fn left_out() -> BTreeMap<String, String> {
    serde_json::from_str(include_str!("../fixtures/left_out.json")).unwrap()
}

/// Whether a case is among them.
pub fn is_left_out(case: &Value) -> bool {
    left_out().contains_key(case["id"].as_str().unwrap())
}
