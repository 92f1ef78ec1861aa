//! Bandwidths computed from a collective's time with DeepSpeed's formulas.

use crate::comm::CollectiveKind;
use std::fmt::Write as _;

/// The bandwidth of one collective in gigabits per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bandwidth {
    /// The bandwidth of the operation: the amount of data that it moves by definition, divided by its time.
    pub algorithm: f64,
    /// The bandwidth on the busiest link of an ideal algorithm: comparable between operations and numbers of ranks.
    pub bus: f64,
}

impl Bandwidth {
    /// Returns the bandwidth of an operation that took `ms` milliseconds on `world_size` ranks, where one rank's part
    /// has `bytes` bytes. `op` is DeepSpeed's name for the operation (`all_reduce`, `all_gather_into_tensor`, ...).
    /// Returns zeros if no time was measured.
    pub fn of(op: &str, bytes: f64, ms: f64, world_size: usize) -> Self {
        if ms <= 0.0 {
            return Self::default();
        }
        let n = world_size as f64;
        let gbps = bytes / ms * 8.0 / 1e6;
        let (algorithm, per_wire) = match op {
            "all_reduce" | "all_reduce_coalesced" | "inference_all_reduce" => (2.0, (n - 1.0) / n),
            "all_gather"
            | "all_gather_into_tensor"
            | "all_gather_coalesced"
            | "reduce_scatter"
            | "reduce_scatter_tensor" => (n, (n - 1.0) / n),
            "all_to_all_single" => (1.0, (n - 1.0) / n),
            _ => (1.0, 1.0),
        };
        Self { algorithm: gbps * algorithm, bus: gbps * algorithm * per_wire }
    }
}

impl CollectiveKind {
    /// Returns the kind of an operation, given its name in DeepSpeed or in this library.
    pub(in crate::comm) fn of_op(op: &str) -> Option<Self> {
        Some(match op {
            "all_reduce" | "all_reduce_coalesced" => Self::AllReduce,
            "reduce_scatter" | "reduce_scatter_tensor" | "reduce_scatter_fn" => Self::ReduceScatter,
            "all_gather" | "all_gather_into_tensor" | "all_gather_coalesced" => Self::AllGather,
            "control" | "all_gather_object" => Self::Control,
            "barrier" | "monitored_barrier" => Self::Barrier,
            "send" | "isend" => Self::Send,
            "receive" | "recv" | "irecv" => Self::Receive,
            _ => return None,
        })
    }
}

/// Formats a size, such as `1.5 KB`, with at most two decimals. Units are powers of 1024.
pub fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 9] = ["B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"];
    if bytes == 0 {
        return "0B".into();
    }
    let step = bytes.ilog2() / 10;
    let value = bytes as f64 / 1024f64.powi(step.cast_signed());
    let mut text = format!("{:?}", (value * 100.0).round() / 100.0);
    // Writing to a String does not fail.
    _ = write!(text, " {}", UNITS[step as usize]);
    text
}

/// Returns the mean of the values without the smallest and the largest fraction `p` of them; 0 if none are left.
pub fn trimmed_mean(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = (sorted.len() as f64 * p).round_ties_even() as usize;
    let remaining = sorted.get(cut..sorted.len().saturating_sub(cut)).unwrap_or_default();
    if remaining.is_empty() { 0.0 } else { remaining.iter().sum::<f64>() / remaining.len() as f64 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn cases(area: &str) -> Vec<Value> {
        let all: Vec<Value> =
            serde_json::from_str(include_str!("../../../tests/fixtures/conformance_monitor.json")).unwrap();
        all.into_iter().filter(|case| case["area"] == area).collect()
    }

    #[test]
    fn bandwidths_sizes_and_trimmed_means_are_as_recorded() {
        let is_close = |a: f64, b: &Value| (a - b.as_f64().unwrap()).abs() <= 1e-9 * a.abs();
        for case in cases("comms-log") {
            let (id, input, expect) = (&case["id"], &case["input"], &case["expect"]);
            let bytes = input["bytes"].as_f64().unwrap();
            if let Some(text) = expect["text"].as_str() {
                assert_eq!(size_text(bytes as u64), text);
                continue;
            }
            let (op, ms, world) = (input["op"].as_str(), input["ms"].as_f64(), input["world_size"].as_u64());
            let found = Bandwidth::of(op.unwrap(), bytes, ms.unwrap(), world.unwrap() as usize);
            assert!(
                is_close(found.algorithm, &expect["algbw_gbps"]) && is_close(found.bus, &expect["busbw_gbps"]),
                "{id} {found:?}"
            );
        }
        for case in cases("timers") {
            let values: Vec<f64> =
                case["input"]["data"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
            let mean = trimmed_mean(&values, case["input"]["p"].as_f64().unwrap());
            assert!(is_close(mean, &case["expect"]["mean"]), "{} {mean}", case["id"]);
        }
        assert_eq!((cases("comms-log").len(), cases("timers").len()), (8, 3));
        let texts = [1, 1023, 1024, 1536, (1 << 20) + (1 << 18), 1 << 30].map(size_text);
        assert_eq!(texts, ["1.0 B", "1023.0 B", "1.0 KB", "1.5 KB", "1.25 MB", "1.0 GB"]);
        assert_eq!(trimmed_mean(&[1.0, 2.0], 0.5), 0.0);
    }
}
