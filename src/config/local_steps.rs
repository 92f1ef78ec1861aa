//! Reads `local_steps`: islands of ranks that exchange the changes in their weights only after many steps.

use super::ConfigRule;
use super::walk::ConfigWalk;
use serde_json::Value;

/// The environment variable with the address of the island server. Its value takes precedence over
/// `local_steps.server`.
pub(crate) const ISLAND_SERVER: &str = "CANDLE_ZERO_ISLAND_SERVER";

/// The `local_steps` section.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LocalStepsConfig {
    /// `steps`: the number of steps that an island takes between two exchanges.
    pub steps: u64,
    /// `islands`: the number of islands or, with a server, of slots for islands; `None`: one per host.
    pub islands: Option<usize>,
    /// `server`, or the environment variable `CANDLE_ZERO_ISLAND_SERVER`: the address of the island server; `None`: the
    /// islands are parts of one job.
    pub server: Option<String>,
    /// `min_islands`: with a server, the number of islands that must have begun before the first exchange; `None`: all.
    pub min_islands: Option<usize>,
    /// `outer_lr`: the learning rate of the outer optimizer. Default 0.7.
    pub outer_lr: f64,
    /// `outer_momentum`: the momentum of the outer optimizer. Default 0.9.
    pub outer_momentum: f64,
    /// `nesterov`: whether the outer optimizer uses Nesterov momentum. Default true.
    pub nesterov: bool,
    /// `fragments`: the number of parts of the model that are exchanged in turn. Default 1.
    pub fragments: u64,
    /// `fragment_delay`: the number of steps between the beginning of an exchange and its effect, during which training
    /// continues. Default 0.
    pub fragment_delay: u64,
    /// `fragment_alpha`: the share of an island's own weights that is kept when an exchange takes effect. Default 0,
    /// or 0.5 with a delay.
    pub fragment_alpha: f64,
    /// `wire_dtype`: the format in which pseudo-gradients (the changes in the weights) are sent.
    pub wire: IslandWireDtype,
}

/// The format in which islands send pseudo-gradients (the changes in their weights) to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum IslandWireDtype {
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
        let position = walk.position(&path);
        walk.problem(rule, &path, position, message);
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
    let islands = walk.int("local_steps.islands").and_then(|islands| usize::try_from(islands).ok());
    let (server, min_islands) = server(walk, islands);
    let wire = match walk.str("local_steps.wire_dtype") {
        Some("bf16") => IslandWireDtype::Bf16,
        Some("int8") => IslandWireDtype::Int8,
        Some("int4") => IslandWireDtype::Int4,
        _ => IslandWireDtype::F32,
    };
    Some(LocalStepsConfig {
        steps,
        islands,
        server,
        min_islands,
        outer_lr,
        outer_momentum,
        nesterov: walk.bool("local_steps.nesterov"),
        fragments,
        fragment_delay,
        // The exchange does not contain the changes that an island makes to its weights during the delay.
        fragment_alpha: alpha.unwrap_or(if fragment_delay > 0 { 0.5 } else { 0.0 }),
        wire,
    })
}

/// Reads the address of the island server, and the number of islands that must have begun before the first exchange.
fn server(walk: &mut ConfigWalk<'_>, islands: Option<usize>) -> (Option<String>, Option<usize>) {
    let from_config = walk.str("local_steps.server").map(str::to_owned);
    let from_launcher = std::env::var(ISLAND_SERVER).ok().filter(|address| !address.is_empty());
    let min_islands = walk.get("local_steps.min_islands").and_then(Value::as_u64);
    let min_islands = min_islands.map(|min| usize::try_from(min).unwrap_or(usize::MAX));
    let mut refuse = |rule: ConfigRule, key: &str, message: String| {
        let path = format!("{SECTION}.{key}");
        let position = walk.position(&path);
        walk.problem(rule, &path, position, message);
    };
    let is_from_config = from_launcher.is_none();
    let Some(address) = from_launcher.or(from_config) else {
        if let Some(min) = min_islands {
            let why =
                "islands that are parts of one job all begin together; remove the key, or give local_steps.server";
            refuse(
                ConfigRule::Conflict,
                "min_islands",
                format!("expected null without local_steps.server, found {min}: {why}"),
            );
        }
        return (None, None);
    };
    if !is_address(&address) {
        let from = if is_from_config { "" } else { " in CANDLE_ZERO_ISLAND_SERVER (zerorun --island_server)" };
        let message = format!("expected HOST:PORT with a port from 1 to 65535, found {address:?}{from}");
        refuse(ConfigRule::Range, "server", message);
    }
    match (islands, min_islands) {
        (None | Some(1), _) => {
            let found = islands.map_or("\"auto\"".into(), |islands| islands.to_string());
            let why = "with an island server, this key is the number of slots for islands, which cannot be derived and \
                       must be at least 2";
            refuse(ConfigRule::Conflict, "islands", format!("expected a number of 2 or more, found {found}: {why}"));
        }
        (Some(islands), Some(min)) if min > islands => refuse(
            ConfigRule::Conflict,
            "min_islands",
            format!("expected at most {islands} (local_steps.islands), found {min}: the islands would wait forever"),
        ),
        _ => {}
    }
    (Some(address), min_islands)
}

/// Returns the number of slots for islands in an unresolved configuration if its islands meet at a server. Values of
/// the wrong type are reported when the configuration is resolved.
#[doc(hidden)]
pub fn island_slots(config: &Value) -> Option<usize> {
    let section = config.get(SECTION)?.as_object()?;
    let own = section.get("server").is_some_and(Value::is_string);
    let has_server = own || std::env::var(ISLAND_SERVER).is_ok_and(|address| !address.is_empty());
    // Whole numbers such as 2.0 are accepted.
    let slots = section.get("islands").filter(|_| has_server)?.as_f64()?;
    (slots >= 1.0 && slots.fract() == 0.0).then_some(slots as usize)
}

/// Returns whether a text has the form `HOST:PORT`.
pub fn is_address(text: &str) -> bool {
    let parts = text.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains(char::is_whitespace));
    parts.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0))
}

impl LocalStepsConfig {
    /// Returns the total number of ranks if a launcher starts `ranks` ranks. With an island server, these form one
    /// island, and the ranks of all slots are counted; otherwise, the result is `ranks`.
    pub(crate) fn world_size(config: Option<&Self>, ranks: usize) -> usize {
        let slots = config.filter(|config| config.server.is_some()).and_then(|config| config.islands);
        ranks.saturating_mul(slots.unwrap_or(1))
    }
}

const SECTION: &str = "local_steps";
