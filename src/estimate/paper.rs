//! Table 1 of the ZeRO paper (Rajbhandari et al. 2019, arXiv 1910.02054): gigabytes of model state per device.

use crate::layout::{Placement, Sharding, ZeroStage};
use std::fmt::Write as _;

/// The models in the table with their parameter counts.
pub const MODELS: [(&str, f64); 3] = [("7.5B", 7.5e9), ("128B", 128e9), ("1T", 1e12)];

/// The degrees of data parallelism in the table.
pub const DEGREES: [usize; 6] = [1, 4, 16, 64, 256, 1024];

/// The stages in the table with their names in the paper.
pub const STAGES: [(&str, ZeroStage); 3] =
    [("Pos", ZeroStage::One), ("Pos+g", ZeroStage::Two), ("Pos+g+p", ZeroStage::Three)];

/// The bytes per parameter of mixed-precision training with Adam: 16-bit weights, 16-bit gradients, and f32 weights
/// with two moments (the paper's K = 12).
const BYTES_PER_PARAMETER: [f64; 3] = [2.0, 2.0, 12.0];

/// Returns the number of bytes of model state on each of `ranks` devices, for `parameters` parameters.
pub fn model_state_bytes(parameters: f64, ranks: usize, stage: ZeroStage) -> f64 {
    let Placement { params, grads, optim } = stage.placement();
    let per_device = |sharding: Sharding, bytes: f64| if sharding.is_sharded() { bytes / ranks as f64 } else { bytes };
    parameters
        * (per_device(params, BYTES_PER_PARAMETER[0])
            + per_device(grads, BYTES_PER_PARAMETER[1])
            + per_device(optim, BYTES_PER_PARAMETER[2]))
}

/// Returns the gigabytes (1e9 bytes) of a table cell, truncated or rounded as in the paper.
pub fn cell(parameters: f64, ranks: usize, stage: ZeroStage) -> String {
    let gigabytes = model_state_bytes(parameters, ranks, stage) / 1e9;
    // From 100 on, the paper truncates fractions. Below 100, it rounds to one decimal place, and below 10 to two, with
    // halves rounded up.
    let rounded = match gigabytes {
        g if g >= 100.0 => g.floor(),
        g if g >= 9.995 => (g * 10.0).round() / 10.0,
        g => (g * 100.0).round() / 100.0,
    };
    rounded.to_string()
}

/// Returns the table.
pub fn table() -> String {
    let mut text =
        String::from("Gigabytes of model state per device, mixed precision with Adam (arXiv 1910.02054, table 1)\n\n");
    let mut line = format!("{:>5}", "DP");
    for (model, _) in MODELS {
        for (stage, _) in STAGES {
            _ = write!(line, " {:>12}", format!("{model} {stage}"));
        }
    }
    text += &line;
    for ranks in DEGREES {
        _ = write!(text, "\n{ranks:>5}");
        for (_, parameters) in MODELS {
            for (_, stage) in STAGES {
                _ = write!(text, " {:>12}", cell(parameters, ranks, stage));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_as_printed() {
        // Ordered by model, then by degree.
        let printed = [
            [
                ["120", "120", "120"],
                ["52.5", "41.3", "30"],
                ["35.6", "21.6", "7.5"],
                ["31.4", "16.6", "1.88"],
                ["30.4", "15.4", "0.47"],
                ["30.1", "15.1", "0.12"],
            ],
            [
                ["2048", "2048", "2048"],
                ["896", "704", "512"],
                ["608", "368", "128"],
                ["536", "284", "32"],
                ["518", "263", "8"],
                ["513", "257", "2"],
            ],
            [
                ["16000", "16000", "16000"],
                ["7000", "5500", "4000"],
                ["4750", "2875", "1000"],
                ["4187", "2218", "250"],
                ["4046", "2054", "62.5"],
                ["4011", "2013", "15.6"],
            ],
        ];
        for ((name, parameters), rows) in MODELS.iter().zip(printed) {
            for (ranks, row) in DEGREES.iter().zip(rows) {
                for ((stage, placement), cell_) in STAGES.iter().zip(row) {
                    assert_eq!(cell(*parameters, *ranks, *placement), cell_, "{name}, DP {ranks}, {stage}");
                }
            }
        }
    }
}
