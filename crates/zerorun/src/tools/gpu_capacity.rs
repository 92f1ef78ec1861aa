//! The memory of GPUs, by name or as a size.

use candle_zero::util::format_bytes;
use std::str::FromStr;

/// The total memory of a GPU in MiB, as nvidia-smi shows it. The driver reserves a little of the nominal memory.
const GPU_MEMORY_MIB: [(&str, u64); 17] = [
    ("t4", 15_360),
    ("v100-16", 16_384),
    ("v100-32", 32_768),
    ("a10", 23_028),
    ("a10g", 23_028),
    ("l4", 23_034),
    ("rtx3090", 24_576),
    ("rtx4090", 24_564),
    ("rtx5090", 32_607),
    ("a6000", 49_140),
    ("l40s", 46_068),
    ("a100-40", 40_960),
    ("a100", 81_920),
    ("h100", 81_559),
    ("h200", 143_771),
    ("gh200", 97_871),
    ("b200", 183_359),
];

/// A GPU that only one rank uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuCapacity {
    /// The name or size as the user wrote it.
    pub name: String,
    /// The total memory of the GPU.
    pub bytes: u64,
}

impl FromStr for GpuCapacity {
    type Err = String;

    /// Parses a name in the table, or a size such as `24GiB` or `80GB`.
    fn from_str(text: &str) -> Result<Self, String> {
        let normalized: String = text.to_lowercase().chars().filter(|c| !matches!(c, ' ' | '_')).collect();
        let is_named = |name: &str| name == normalized || name == normalized.trim_end_matches("-80");
        let entry = GPU_MEMORY_MIB.iter().find(|(name, _)| is_named(name));
        let bytes = match entry {
            Some((_, mebibytes)) => Some(mebibytes << 20),
            None => size(&normalized),
        };
        let names = || GPU_MEMORY_MIB.map(|(name, _)| name).join(", ");
        let bytes =
            bytes.ok_or_else(|| format!("known GPUs are {}; give one, or the GPU's memory, such as 24GiB", names()))?;
        Ok(Self { name: text.to_owned(), bytes })
    }
}

impl GpuCapacity {
    /// Returns a sentence about whether a rank's model state fits.
    pub fn verdict(&self, need: u64) -> String {
        let Self { name, bytes } = self;
        let (has, takes) = (format_bytes(*bytes), format_bytes(need));
        match bytes.checked_sub(need) {
            Some(remaining) => format!(
                "of the {has} of each GPU ({name}), model state takes at most {takes}: it fits, and {} is left for \
                 activations and CUDA's own memory",
                format_bytes(remaining)
            ),
            None => format!(
                "of the {has} of each GPU ({name}), model state takes at most {takes}: it does not fit ({} more is \
                 needed); use a higher stage, more ranks, or offload_optimizer and offload_param",
                format_bytes(need - bytes)
            ),
        }
    }
}

/// Parses a number with a unit as bytes.
fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).filter(|at| *at > 0)?;
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "mb" => 1_000_000,
        "gb" | "g" => 1_000_000_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_a_name_or_a_size() {
        let bytes = |text: &str| text.parse::<GpuCapacity>().unwrap().bytes;
        assert_eq!(bytes("h100"), 81_559 << 20);
        assert_eq!(bytes("H100-80"), bytes("h100"));
        assert_eq!(bytes("A100-40"), 40_960 << 20);
        assert_eq!(bytes("24GiB"), 24 << 30);
        assert_eq!(bytes("80 GB"), 80_000_000_000);
        for wrong in ["", "h101", "0GiB", "GiB", "24", "24GiBs", "99999999999999999999GB", "18446744073709551615GiB"] {
            let why = wrong.parse::<GpuCapacity>().unwrap_err();
            assert!(
                why.starts_with("known GPUs are t4, ")
                    && why.ends_with("; give one, or the GPU's memory, such as 24GiB"),
                "{why}"
            );
        }
    }

    #[test]
    fn a_verdict_has_what_is_left_or_missing() {
        let gpu = GpuCapacity { name: "24GiB".into(), bytes: 24 << 30 };
        insta::assert_snapshot!(gpu.verdict(4 << 30), @"of the 24.0 GiB of each GPU (24GiB), model state takes at most 4.0 GiB: it fits, and 20.0 GiB is left for activations and CUDA's own memory");
        insta::assert_snapshot!(gpu.verdict(25 << 30), @"of the 24.0 GiB of each GPU (24GiB), model state takes at most 25.0 GiB: it does not fit (1.0 GiB more is needed); use a higher stage, more ranks, or offload_optimizer and offload_param");
    }
}
