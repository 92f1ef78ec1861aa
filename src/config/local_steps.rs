//! Reads `local_steps`: islands of ranks that exchange the changes in their weights only after many steps.

use super::ConfigRule;
use super::walk::ConfigWalk;
use serde_json::Value;

/// The `local_steps` section.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LocalStepsConfig {
    /// `steps`: the number of steps that an island takes between two exchanges.
    pub steps: u64,
    /// `islands`: the number of islands; `None`: one per host.
    pub islands: Option<usize>,
    /// `outer_lr`: the learning rate of the outer optimizer. Default 0.7.
    pub outer_lr: f64,
    /// `outer_momentum`: the momentum of the outer optimizer. Default 0.9.
    pub outer_momentum: f64,
    /// `nesterov`: whether the outer optimizer uses Nesterov momentum. Default true.
    pub nesterov: bool,
    /// `fragments`: the number of parts of the model that take turns being exchanged. Default 1.
    pub fragments: u64,
    /// `fragment_delay`: the number of steps that an exchange may take while training continues. Default 0.
    pub fragment_delay: u64,
    /// `fragment_alpha`: the share of an island's own weights that stays when an exchange takes effect. Default 0, or 0.5
    /// with a delay.
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

/// Reads the section; `None` if it is absent. Problems are collected in `walk`.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>) -> Option<LocalStepsConfig> {
    walk.get(SECTION).filter(|section| !section.is_null())?;
    let steps = walk.count("local_steps.steps");
    let fragments = walk.count("local_steps.fragments");
    let fragment_delay = walk.count("local_steps.fragment_delay");
    let [outer_lr, outer_momentum] = ["outer_lr", "outer_momentum"].map(|key| walk.float(&format!("{SECTION}.{key}")));
    let alpha = walk.get("local_steps.fragment_alpha").and_then(Value::as_f64);
    let mut refuse = |rule: ConfigRule, key: &str, message: String| {
        let path = format!("{SECTION}.{key}");
        let place = walk.place(&path);
        walk.problem(rule, &path, place, message);
    };
    if fragments > steps {
        let why = "because each fragment is exchanged once in this many steps";
        refuse(
            ConfigRule::Conflict,
            "fragments",
            format!("expected at most {steps} (local_steps.steps), {why}; found {fragments}"),
        );
    }
    if fragment_delay >= steps {
        let why = "because a fragment must take effect before it is sent again";
        refuse(
            ConfigRule::Conflict,
            "fragment_delay",
            format!("expected less than {steps} (local_steps.steps), {why}; found {fragment_delay}"),
        );
    }
    if outer_lr == 0.0 {
        refuse(
            ConfigRule::Range,
            "outer_lr",
            "expected more than 0, found 0: the training of the islands would have no effect".into(),
        );
    }
    if outer_momentum >= 1.0 {
        refuse(
            ConfigRule::Range,
            "outer_momentum",
            format!("expected less than 1, found {outer_momentum}: the weights would diverge"),
        );
    }
    if alpha.is_some_and(|alpha| alpha >= 1.0) {
        refuse(
            ConfigRule::Range,
            "fragment_alpha",
            "expected less than 1, found 1: no exchange would have an effect".into(),
        );
    }
    let wire = match walk.str("local_steps.wire_dtype") {
        Some("bf16") => IslandWire::Bf16,
        Some("int8") => IslandWire::Int8,
        Some("int4") => IslandWire::Int4,
        _ => IslandWire::F32,
    };
    Some(LocalStepsConfig {
        steps,
        islands: walk.int("local_steps.islands").and_then(|islands| usize::try_from(islands).ok()),
        outer_lr,
        outer_momentum,
        nesterov: walk.bool("local_steps.nesterov"),
        fragments,
        fragment_delay,
        // The exchange does not contain the changes in an island's weights that occur while it is on its way.
        fragment_alpha: alpha.unwrap_or(if fragment_delay > 0 { 0.5 } else { 0.0 }),
        wire,
    })
}

const SECTION: &str = "local_steps";
