//! Reads `local_steps`: islands of ranks that exchange what they learned only every so many steps.

use super::walk::ConfigWalk;
use super::{ConfigRule, SgdConfig};
use crate::comm::WireFormat;
use crate::precision::IntFormat;
use candle_core::DType;

/// The `local_steps` section.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LocalStepsConfig {
    /// `steps`: the number of steps that an island takes between two exchanges.
    pub steps: u64,
    /// `islands`: the number of islands; `None`: one per host.
    pub islands: Option<usize>,
    /// `outer_lr`, `outer_momentum` and `nesterov`: the outer optimizer.
    pub outer: SgdConfig,
    /// `fragments`: the number of parts of the model that take turns in being exchanged. Default 1.
    pub fragments: u64,
    /// `fragment_delay`: the number of steps that an exchange may take while training continues. Default 0.
    pub fragment_delay: u64,
    /// `fragment_alpha`: the share of an island's own weights that stays when an exchange arrives. Default 0.
    pub fragment_alpha: f64,
    /// `wire_dtype`: the format in which pseudo-gradients are sent.
    pub wire: IslandWire,
}

/// The format in which islands send pseudo-gradients to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum IslandWire {
    /// `fp32`: unchanged.
    #[default]
    F32,
    /// `bf16`: rounded to bfloat16.
    Bf16,
    /// `int8`: 8-bit integers with a scale per block.
    Int8,
    /// `int4`: 4-bit integers with a scale per block.
    Int4,
}

impl IslandWire {
    /// The names in configurations.
    pub(super) const NAMES: [&str; 4] = ["fp32", "bf16", "int8", "int4"];

    const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Int8, Self::Int4];

    /// Returns the dtype of the buffer that is sent, and its encoding.
    pub(crate) fn encoding(self) -> (DType, WireFormat) {
        match self {
            Self::F32 => (DType::F32, WireFormat::Exact),
            Self::Bf16 => (DType::BF16, WireFormat::Exact),
            Self::Int8 => (DType::F32, WireFormat::Blocks(IntFormat::Int8)),
            Self::Int4 => (DType::F32, WireFormat::Blocks(IntFormat::Int4)),
        }
    }
}

/// Reads the section; `None` if it is absent. Problems are collected in `walk`.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>) -> Option<LocalStepsConfig> {
    walk.get(SECTION).filter(|section| !section.is_null())?;
    let steps = walk.count("local_steps.steps");
    let fragments = walk.count("local_steps.fragments");
    let fragment_delay = walk.count("local_steps.fragment_delay");
    let mut refuse = |key: &str, message: String| {
        let path = format!("{SECTION}.{key}");
        let place = walk.place(&path);
        walk.problem(ConfigRule::Conflict, &path, place, message);
    };
    if fragments > steps {
        let why = "because each fragment is exchanged once in so many steps";
        refuse("fragments", format!("expected at most {steps} (local_steps.steps), {why}; found {fragments}"));
    }
    if fragment_delay >= steps {
        let why = "because a fragment takes effect before it is sent again";
        refuse(
            "fragment_delay",
            format!("expected less than {steps} (local_steps.steps), {why}; found {fragment_delay}"),
        );
    }
    let outer = SgdConfig {
        lr: walk.float("local_steps.outer_lr"),
        momentum: walk.float("local_steps.outer_momentum"),
        dampening: 0.0,
        weight_decay: 0.0,
        // Without momentum there is nothing to look ahead with.
        nesterov: walk.bool("local_steps.nesterov") && walk.float("local_steps.outer_momentum") > 0.0,
    };
    let wire =
        walk.str("local_steps.wire_dtype").and_then(|name| IslandWire::NAMES.iter().position(|own| *own == name));
    Some(LocalStepsConfig {
        steps,
        islands: walk.int("local_steps.islands").and_then(|islands| usize::try_from(islands).ok()),
        outer,
        fragments,
        fragment_delay,
        fragment_alpha: walk.float("local_steps.fragment_alpha"),
        wire: wire.map_or(IslandWire::F32, |at| IslandWire::ALL[at]),
    })
}

const SECTION: &str = "local_steps";
