//! The recorded cases of DeepSpeed's launcher, for tests of this crate's modules.

use super::HostSlots;
use super::error::HostsError;
use serde_json::{Value, json};

fn all() -> Vec<Value> {
    let file = include_str!("../../../../../tests/fixtures/conformance_launcher.json");
    serde_json::from_str(file).expect("the fixture is JSON")
}

/// Returns the cases of an area.
pub(super) fn of_area(area: &str) -> Vec<Value> {
    all().into_iter().filter(|case| case["area"] == area).collect()
}

/// Returns one case.
pub(crate) fn case(id: &str) -> Value {
    all().into_iter().find(|case| case["id"] == id).expect("a recorded case")
}

/// Compares the result with that of a case. Any error matches a refusal, whatever its type in Python.
pub(super) fn check(case: &Value, found: Result<Value, HostsError>) {
    let expected = &case["expect"];
    match found {
        Ok(found) => assert_eq!(&found, expected, "{}", case["id"]),
        Err(error) => assert_eq!(expected["ok"], false, "{}: {error}", case["id"]),
    }
}

/// Reads `[["a", [0, 2]], ...]` as hosts.
pub(super) fn hosts(recorded: &Value) -> Vec<HostSlots> {
    let pairs: Vec<(String, Vec<usize>)> = serde_json::from_value(recorded.clone()).expect("hosts with slots");
    pairs.into_iter().map(|(name, slots)| HostSlots { name, slots }).collect()
}

/// Reads `[["a", 4], ...]` as hosts.
pub(super) fn counted_hosts(recorded: &Value) -> Vec<HostSlots> {
    let pairs: Vec<(String, usize)> = serde_json::from_value(recorded.clone()).expect("hosts with counts");
    pairs.into_iter().map(|(name, count)| HostSlots::with_slots(name, count)).collect()
}

/// Writes hosts in the recorded form. This is the inverse of [`hosts`].
pub(super) fn as_recorded(hosts: &[HostSlots]) -> Vec<Value> {
    hosts.iter().map(|host| json!([host.name, host.slots])).collect()
}
