//! The settings of low-rank adapters: their sizes, and the projections that get one.

use crate::error::{LoraError, Result};
use std::collections::BTreeSet;
use std::str::FromStr;

/// The settings of low-rank adapters (LoRA, Hu et al. 2021): a projection with the weight W gets two small matrices, A
/// `[r, in]` and B `[out, r]`, and computes with W + s B A, of which only A and B are trained.
///
/// ```
/// use candle_zero::nn::LoraConfig;
///
/// let config: LoraConfig = "r=8,alpha=16,targets=q_proj+v_proj,rslora".parse()?;
/// assert!(config.selects("model.layers.0.self_attn.q_proj"));
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// The rank of the adapters.
    pub r: usize,
    /// The numerator of the factor s, which is alpha / r, or alpha / sqrt(r) with `rslora`.
    pub alpha: f64,
    /// The probability with which training drops elements of an adapter's input. The input of the base weight is
    /// unaffected, even with DoRA (unlike in PEFT).
    pub dropout: f32,
    /// The projections that get an adapter.
    pub targets: LoraTargets,
    /// The parameters of experts that get an adapter (PEFT's `target_parameters`): those whose name is one of these
    /// names, or ends with a dot followed by one of them. A mixture of experts has the parameters
    /// `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, whatever the names in its files.
    pub target_parameters: Vec<String>,
    /// Whether s is alpha / sqrt(r) (Kalajdzievski 2023).
    pub rslora: bool,
    /// Whether the norms of the rows of W + s B A are replaced by trained parameters (DoRA, Liu et al. 2024). The
    /// original norms count as constants in the backward pass, as in PEFT.
    pub dora: bool,
}

/// The selection of projections that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTargets {
    /// All projections except the output projection, routers and experts.
    AllLinear,
    /// The projections whose name is one of these names, or ends with a dot followed by one of them, as in PEFT.
    Names(Vec<String>),
}

impl Default for LoraConfig {
    /// Returns the settings with r 16 and alpha 32, for [`LoraTargets::AllLinear`].
    fn default() -> Self {
        Self {
            r: 16,
            alpha: 32.0,
            dropout: 0.0,
            targets: LoraTargets::AllLinear,
            target_parameters: Vec::new(),
            rslora: false,
            dora: false,
        }
    }
}

/// The maximum rank; no layer has more inputs or outputs.
const MAX_RANK: usize = 1 << 20;

impl LoraConfig {
    /// Returns the factor s of an adapter's product B A.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.rslora { r.sqrt() } else { r }
    }

    /// Returns whether the projection of this name gets an adapter.
    pub fn selects(&self, module: &str) -> bool {
        match &self.targets {
            LoraTargets::AllLinear => true,
            LoraTargets::Names(names) => names.iter().any(|name| is_last_part(module, name)),
        }
    }

    /// Returns the paths, within their module, of the adapters of two parameters of experts, which are given in the
    /// order of their registration. The path of a parameter without an adapter is `None`. As in PEFT, the module is
    /// wrapped once for each parameter, and the wrapper of the second parameter wraps that of the first.
    pub(crate) fn expert_wrappers(&self, parameters: &[String; 2]) -> [Option<&'static str>; 2] {
        let is_selected = |name: &String| self.target_parameters.iter().any(|target| is_last_part(name, target));
        match parameters.each_ref().map(is_selected) {
            [true, true] => [Some(BASE_LAYER), Some("")],
            [first, second] => [first.then_some(""), second.then_some("")],
        }
    }

    /// Checks that the values describe a valid adapter.
    ///
    /// # Errors
    /// A rank of 0 or above 1,048,576, an alpha or a factor s that is not positive and finite in f32, a dropout
    /// probability outside [0, 1), no targets, an empty name, or dropout or DoRA for experts.
    pub fn validate(&self) -> Result<()> {
        if !(1..=MAX_RANK).contains(&self.r) {
            return Err(refused("r", self.r, &format!("from 1 to {MAX_RANK}")));
        }
        // Products are in f32: an infinite factor would make all weights infinite, and a factor of 0 would disable the
        // adapter.
        let is_number = |x: f64| x as f32 > 0.0 && (x as f32).is_finite();
        if !(is_number(self.alpha) && is_number(self.scale())) {
            return Err(refused("alpha", format!("{:?}", self.alpha), "a number that is positive and finite in f32"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(refused("dropout", self.dropout, "at least 0 and below 1"));
        }
        if self.target_parameters.iter().any(String::is_empty) {
            let found = format!("\"{}\"", self.target_parameters.join("+"));
            return Err(refused("target_parameters", found, TARGET_PARAMETERS));
        }
        if !self.target_parameters.is_empty() {
            let reason = "with target_parameters: as in PEFT, adapters of experts have neither dropout nor DoRA";
            if self.dropout > 0.0 {
                return Err(refused("dropout", self.dropout, &format!("0 {reason}")));
            }
            if self.dora {
                return Err(refused("dora", true, &format!("false {reason}")));
            }
        }
        match &self.targets {
            LoraTargets::Names(names) if names.is_empty() && !self.target_parameters.is_empty() => Ok(()),
            LoraTargets::Names(names) if names.is_empty() || names.iter().any(String::is_empty) => {
                let found = if names.is_empty() { "empty".into() } else { format!("\"{}\"", names.join("+")) };
                Err(refused("targets", found, TARGETS))
            }
            _ => Ok(()),
        }
    }

    /// Checks that each target matches one of these projections, given as module paths.
    ///
    /// # Errors
    /// [`LoraError::NoSuchTarget`] if one does not.
    pub fn check_targets<'a>(&self, projections: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let LoraTargets::Names(names) = &self.targets else { return Ok(()) };
        let projections: BTreeSet<&str> = projections.into_iter().collect();
        let unmatched = names.iter().find(|name| !projections.iter().any(|module| is_last_part(module, name)));
        let Some(target) = unmatched else { return Ok(()) };
        let known: BTreeSet<&str> = projections.iter().filter_map(|module| module.rsplit('.').next()).collect();
        let known: Vec<&str> = known.into_iter().collect();
        Err(LoraError::NoSuchTarget { target: target.clone(), known: known.join(", ") }.into())
    }
}

impl LoraConfig {
    /// Checks that each of the target parameters matches one of these parameters of experts, given by their names.
    ///
    /// # Errors
    /// [`LoraError::NoSuchParameter`] if one does not.
    pub fn check_target_parameters<'a>(&self, parameters: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let parameters: BTreeSet<&str> = parameters.into_iter().collect();
        let is_unmatched = |target: &&String| !parameters.iter().any(|name| is_last_part(name, target));
        let Some(target) = self.target_parameters.iter().find(is_unmatched) else { return Ok(()) };
        // The names within a block.
        let within_block = |name: &'a str| name.match_indices("mlp.").next().map_or(name, |(at, _)| &name[at..]);
        let known: BTreeSet<&str> = parameters.iter().map(|name| within_block(name)).collect();
        let known: Vec<&str> = known.into_iter().collect();
        let known = match known.is_empty() {
            true => "the model has no mixture of experts; leave target_parameters out".to_owned(),
            false => format!("the parameters that can have an adapter are {}", known.join(", ")),
        };
        Err(LoraError::NoSuchParameter { target: target.clone(), known }.into())
    }
}

/// The module inside a wrapper of PEFT.
const BASE_LAYER: &str = "base_layer";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";
const MAGNITUDE: &str = ".lora_magnitude_vector";

/// Returns whether a parameter of this name belongs to an adapter. To train only adapters, pass
/// `|name, _| is_adapter(name)` to [`EngineBuilder::trainable`](crate::EngineBuilder::trainable).
pub fn is_adapter(parameter: &str) -> bool {
    adapted_module(parameter).is_some()
}

/// Returns the projection whose adapter this parameter belongs to.
#[doc(hidden)]
pub fn adapted_module(parameter: &str) -> Option<&str> {
    [A, B, MAGNITUDE].iter().find_map(|end| parameter.strip_suffix(end))
}

/// Returns whether `part` is `name`, or the end of `name` after a dot.
fn is_last_part(name: &str, part: &str) -> bool {
    name.strip_suffix(part).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

const TARGETS: &str = "all-linear or names of projections joined by +, such as q_proj+v_proj";
const TARGET_PARAMETERS: &str =
    "names of parameters of experts joined by +, such as mlp.experts.gate_up_proj+mlp.experts.down_proj";
const KEYS: [&str; 7] = ["r", "alpha", "dropout", "targets", "target_parameters", "rslora", "dora"];

fn refused(key: &'static str, found: impl std::fmt::Display, allowed: &str) -> crate::Error {
    LoraError::Value { key, found: found.to_string(), allowed: allowed.into() }.into()
}

impl FromStr for LoraConfig {
    type Err = crate::Error;

    /// Reads `r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,rslora,dora`: any of the keys, in any order. Omitted
    /// keys have their values from [`LoraConfig::default`], except that alpha is twice r. With
    /// `target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj`, experts have adapters; projections have them
    /// only if `targets` selects them.
    fn from_str(settings: &str) -> Result<Self> {
        let mut config = Self::default();
        let (mut seen, mut alpha) = (Vec::new(), None);
        for item in settings.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (key, value) = item.split_once('=').map_or((item, None), |(key, value)| (key, Some(value.trim())));
            let Some(key) = KEYS.iter().find(|known| **known == key.trim()) else {
                return Err(unknown(settings, key.trim()));
            };
            if seen.contains(key) {
                return Err(LoraError::RepeatedKey { settings: settings.into(), key: (*key).into() }.into());
            }
            seen.push(*key);
            let value = || value.filter(|value| !value.is_empty()).ok_or("empty");
            match *key {
                "r" => config.r = number("r", value(), "a whole number of at least 1, such as r=16")?,
                "alpha" => alpha = Some(number("alpha", value(), "a positive number, such as alpha=32")?),
                "dropout" => {
                    config.dropout = number("dropout", value(), "at least 0 and below 1, such as dropout=0.05")?
                }
                "targets" => config.targets = targets(value().map_err(|found| refused("targets", found, TARGETS))?),
                "target_parameters" => {
                    let names = value().map_err(|found| refused("target_parameters", found, TARGET_PARAMETERS))?;
                    config.target_parameters = names.split('+').map(|name| name.trim().into()).collect();
                }
                "rslora" => config.rslora = flag("rslora", value())?,
                _ => config.dora = flag("dora", value())?,
            }
        }
        if seen.contains(&"target_parameters") && !seen.contains(&"targets") {
            config.targets = LoraTargets::Names(Vec::new());
        }
        config.alpha = alpha.unwrap_or(2.0 * config.r as f64);
        config.validate()?;
        Ok(config)
    }
}

fn number<T: FromStr>(key: &'static str, value: Result<&str, &str>, allowed: &str) -> Result<T> {
    let refuse = |found: &str| refused(key, found, allowed);
    let value = value.map_err(refuse)?;
    value.parse().map_err(|_| refuse(value))
}

/// Parses a switch, which is turned on by its name, or set by its value.
fn flag(key: &'static str, value: Result<&str, &str>) -> Result<bool> {
    match value {
        Err(_) | Ok("true") => Ok(true),
        Ok("false") => Ok(false),
        Ok(found) => Err(refused(key, found, &format!("true or false; {key} without a value means true"))),
    }
}

fn targets(value: &str) -> LoraTargets {
    match value {
        "all-linear" => LoraTargets::AllLinear,
        names => LoraTargets::Names(names.split('+').map(|name| name.trim().into()).collect()),
    }
}

fn unknown(settings: &str, found: &str) -> crate::Error {
    let distances = KEYS.iter().map(|key| (strsim::damerau_levenshtein(key, found), key));
    let suggestion = distances.filter(|(distance, _)| *distance <= 2).min_by_key(|(distance, _)| *distance);
    let suggestion = suggestion.filter(|_| found.len() > 2).map(|(_, key)| key.to_string());
    LoraError::UnknownKey { settings: settings.into(), found: found.into(), suggestion }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_in_any_order_with_defaults_for_the_rest() {
        let config: LoraConfig = "targets=q_proj+mlp.c_proj, rslora ,r=8".parse().unwrap();
        let names = LoraTargets::Names(vec!["q_proj".into(), "mlp.c_proj".into()]);
        let want = LoraConfig { r: 8, alpha: 16.0, targets: names, rslora: true, ..LoraConfig::default() };
        assert_eq!(config, want);
        assert_eq!("".parse::<LoraConfig>().unwrap(), LoraConfig::default());
        let config: LoraConfig = "dora=true,rslora=false,alpha=7.5,dropout=0.1,targets=all-linear".parse().unwrap();
        let want = LoraConfig { alpha: 7.5, dropout: 0.1, dora: true, ..LoraConfig::default() };
        assert_eq!(config, want);
    }

    #[test]
    fn the_scale_is_alpha_over_r_or_over_its_root() {
        let config = LoraConfig { r: 4, alpha: 8.0, ..LoraConfig::default() };
        assert_eq!(config.scale(), 2.0);
        assert_eq!(LoraConfig { rslora: true, ..config }.scale(), 4.0);
    }

    #[test]
    fn parameters_of_experts_are_targets_of_their_own_and_nested_as_in_peft() {
        let names = ["m.layers.0.mlp.experts.gate_up_proj", "m.layers.0.mlp.experts.down_proj"].map(str::to_owned);
        let wrappers = |settings: &str| settings.parse::<LoraConfig>().unwrap().expert_wrappers(&names);
        let both = "r=4,target_parameters=mlp.experts.gate_up_proj+experts.down_proj";
        assert_eq!(wrappers(both), [Some("base_layer"), Some("")]);
        assert_eq!(wrappers("target_parameters=down_proj"), [None, Some("")]);
        assert_eq!(wrappers("target_parameters=experts.gate_up_proj"), [Some(""), None]);
        assert_eq!(wrappers("r=4"), [None, None]);
        let config: LoraConfig = both.parse().unwrap();
        assert_eq!(config.targets, LoraTargets::Names(vec![]));
        assert!(!config.selects("m.layers.0.self_attn.q_proj"));
        let config: LoraConfig = format!("targets=all-linear,{both}").parse().unwrap();
        assert_eq!((config.targets, config.target_parameters.len()), (LoraTargets::AllLinear, 2));
    }

    #[test]
    fn a_target_matches_whole_last_parts_of_a_name() {
        let config: LoraConfig = "targets=c_proj+attn.q".parse().unwrap();
        for (module, selected) in [
            ("h.0.attn.c_proj", true),
            ("h.0.mlp.c_proj", true),
            ("c_proj", true),
            ("h.0.mlp.xc_proj", false),
            ("h.0.c_proj.inner", false),
            ("h.0.attn.q", true),
            ("h.0.q", false),
            ("h.0.self_attn.q", false),
        ] {
            assert_eq!(config.selects(module), selected, "{module}");
        }
    }

    #[test]
    fn settings_that_cannot_be_used_are_refused_by_key() {
        let text = |settings: &str| settings.parse::<LoraConfig>().unwrap_err().to_string();
        insta::assert_snapshot!(text("r=16,alpa=32"), @r#"LoRA settings "r=16,alpa=32": there is no key alpa (did you mean alpha?); the keys are r, alpha, dropout, targets and target_parameters, each with a value, and the switches rslora and dora"#);
        insta::assert_snapshot!(text("rank=16"), @r#"LoRA settings "rank=16": there is no key rank; the keys are r, alpha, dropout, targets and target_parameters, each with a value, and the switches rslora and dora"#);
        insta::assert_snapshot!(text("r=16,r=8"), @r#"LoRA settings "r=16,r=8": r is given twice; give it once"#);
        insta::assert_snapshot!(text("r"), @"LoRA settings: r is empty, but must be a whole number of at least 1, such as r=16");
        insta::assert_snapshot!(text("r=0"), @"LoRA settings: r is 0, but must be from 1 to 1048576");
        insta::assert_snapshot!(text("r=-3"), @"LoRA settings: r is -3, but must be a whole number of at least 1, such as r=16");
        insta::assert_snapshot!(text("alpha=inf"), @"LoRA settings: alpha is inf, but must be a number that is positive and finite in f32");
        insta::assert_snapshot!(text("dropout=1"), @"LoRA settings: dropout is 1, but must be at least 0 and below 1");
        insta::assert_snapshot!(text("rslora=yes"), @"LoRA settings: rslora is yes, but must be true or false; rslora without a value means true");
        insta::assert_snapshot!(text("targets="), @"LoRA settings: targets is empty, but must be all-linear or names of projections joined by +, such as q_proj+v_proj");
        insta::assert_snapshot!(text("target_parameters=a+"), @r#"LoRA settings: target_parameters is "a+", but must be names of parameters of experts joined by +, such as mlp.experts.gate_up_proj+mlp.experts.down_proj"#);
        insta::assert_snapshot!(text("target_parameters=a,dropout=0.1"), @"LoRA settings: dropout is 0.1, but must be 0 with target_parameters: as in PEFT, adapters of experts have neither dropout nor DoRA");
        insta::assert_snapshot!(text("target_parameters=a,dora"), @"LoRA settings: dora is true, but must be false with target_parameters: as in PEFT, adapters of experts have neither dropout nor DoRA");
        insta::assert_snapshot!(text("targets=q_proj+"), @r#"LoRA settings: targets is "q_proj+", but must be all-linear or names of projections joined by +, such as q_proj+v_proj"#);
    }

    #[test]
    fn a_target_that_no_projection_has_is_refused_with_those_that_there_are() {
        let projections = ["l.0.q_proj", "l.0.k_proj", "l.1.k_proj"];
        let config: LoraConfig = "targets=q_proj".parse().unwrap();
        config.check_targets(projections).unwrap();
        let config: LoraConfig = "targets=q_proj+query".parse().unwrap();
        let text = config.check_targets(projections).unwrap_err().to_string();
        insta::assert_snapshot!(text, @"LoRA target query is not the end of a projection's name; the projections that can have an adapter are k_proj, q_proj; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)");
    }
}
