//! Reads the windows and rotary positions of a decoder's blocks from a `config.json`.

use super::json_object_reader::JsonObjectReader;
use super::model_families::{ModelFamily, SlidingWindowRule};
use super::{BlockConfig, BlockMlp, LongRopeScaling, QueryGrowth, RotaryConfig, RotaryScaling, YarnScaling};
use crate::error::Result;
use crate::nn::frequencies::{Llama3RopeScaling, YarnRopeScaling};
use serde_json::Value;
use std::sync::Arc;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";
const ORIGINAL: &str = "original_max_position_embeddings";
const PARTIAL: &str = "partial_rotary_factor";

/// Reads the windows and rotary positions of the blocks of a model with a context of `ctx` positions.
pub(super) fn block_configs(
    keys: &JsonObjectReader<'_>,
    family: &ModelFamily,
    blocks: usize,
    ctx: usize,
) -> Result<Vec<BlockConfig>> {
    // For a model without windows, Qwen's class writes 0.
    let is_zero = || keys.get("sliding_window").is_some_and(|window| *window == 0);
    let has_no_windows = keys.is_null("sliding_window")
        || (family.is("qwen") && is_zero() && !keys.flag("use_sliding_window", false)?);
    let window = match has_no_windows {
        true => None,
        false => keys.size("sliding_window")?.or(family.window),
    };
    let without_positions = blocks_without_positions(keys, family, blocks)?;
    let types = block_types(keys, family, blocks, window, &without_positions)?;
    let rotary = |kind: &str| match family.is("gemma3") && kind == SLIDING {
        true => local_rotary(keys, family, ctx),
        false => rotary(keys, family, kind, ctx),
    };
    let (full, sliding) = (rotary(FULL)?, rotary(SLIDING)?);
    let block_config = |(kind, no_positions): (&&str, &bool)| {
        let (window, rotary) = match (*kind, window) {
            (FULL, _) => (None, &full),
            (_, Some(window)) => (Some(window), &sliding),
            (_, None) => {
                return Err(keys.refuse("sliding_window", "a number if layer_types contains sliding_attention"));
            }
        };
        // In Cohere 2, only blocks with a window have positions.
        let has_none = *no_positions || (family.is("cohere2") && window.is_none());
        Ok(BlockConfig { window, rotary: (!has_none).then(|| rotary.clone()), mlp: BlockMlp::Dense })
    };
    types.iter().zip(&without_positions).map(block_config).collect()
}

/// Reads which blocks of SmolLM 3 have no positions.
fn blocks_without_positions(keys: &JsonObjectReader<'_>, family: &ModelFamily, blocks: usize) -> Result<Vec<bool>> {
    const KEY: &str = "no_rope_layers";
    if family.layers != SlidingWindowRule::SmolLm3 {
        return Ok(vec![false; blocks]);
    }
    let Some(value) = keys.get(KEY) else {
        let interval = keys.size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((0..blocks).map(|block| (block + 1) % interval == 0).collect());
    };
    let flags = value.as_array().map(|values| {
        let flag = |entry: &Value| entry.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 0);
        values.iter().map(flag).collect::<Option<Vec<_>>>()
    });
    let Some(Some(flags)) = flags else {
        return Err(keys.refuse(KEY, "a list of 1s (blocks with rotary positions) and 0s (blocks without)"));
    };
    if flags.len() != blocks {
        let found = format!("a list of length {}", flags.len());
        return Err(keys.refuse_as(KEY, found, format!("of length num_hidden_layers ({blocks})")));
    }
    Ok(flags)
}

/// Reads the attention type of each block.
fn block_types<'a>(
    keys: &JsonObjectReader<'a>,
    family: &ModelFamily,
    blocks: usize,
    window: Option<usize>,
    without_positions: &[bool],
) -> Result<Vec<&'a str>> {
    let windowed = || vec![if window.is_some() { SLIDING } else { FULL }; blocks];
    let slides = match family.layers {
        SlidingWindowRule::Full => return Ok(vec![FULL; blocks]),
        SlidingWindowRule::Windowed => return Ok(windowed()),
        SlidingWindowRule::Qwen | SlidingWindowRule::SmolLm3 => keys.flag("use_sliding_window", false)?,
        SlidingWindowRule::TypesOrWindowed | SlidingWindowRule::Pattern { .. } => true,
    };
    if let Some(value) = keys.get("layer_types") {
        let types = value.as_array().map(|types| types.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let Some(Some(types)) = types else { return Err(keys.refuse("layer_types", "a list of strings")) };
        if types.len() != blocks {
            let found = format!("a list of length {}", types.len());
            return Err(keys.refuse_as("layer_types", found, format!("of length num_hidden_layers ({blocks})")));
        }
        if let Some(other) = types.iter().find(|kind| ![FULL, SLIDING].contains(kind)) {
            let found = format!("a list that contains {other:?}");
            return Err(keys.refuse_as("layer_types", found, format!("a list of {FULL} and {SLIDING}")));
        }
        if !slides && types.contains(&SLIDING) {
            let allowed = format!("true if layer_types contains {SLIDING}");
            return Err(keys.refuse("use_sliding_window", allowed));
        }
        return Ok(types);
    }
    let types_by =
        |is_full: &dyn Fn(usize) -> bool| (0..blocks).map(|i| if is_full(i) { FULL } else { SLIDING }).collect();
    match family.layers {
        SlidingWindowRule::Qwen => {
            // Unlike sizes, this number may be 0.
            let first = match keys.get("max_window_layers") {
                None => 28,
                Some(value) => {
                    value.as_u64().ok_or_else(|| keys.refuse("max_window_layers", "a whole number of at least 0"))?
                }
            };
            Ok(types_by(&|i| !slides || (i as u64) < first))
        }
        SlidingWindowRule::SmolLm3 => Ok(types_by(&|i| !slides || window.is_none() || !without_positions[i])),
        SlidingWindowRule::Pattern { default, keys: names } => {
            let sizes = names.iter().map(|key| keys.size(key)).collect::<Result<Vec<_>>>()?;
            let pattern = sizes.into_iter().flatten().next().unwrap_or(default);
            Ok(types_by(&|i| (i + 1) % pattern == 0))
        }
        SlidingWindowRule::Full | SlidingWindowRule::Windowed | SlidingWindowRule::TypesOrWindowed => Ok(windowed()),
    }
}

/// Reads the rotary positions of Gemma 3's blocks with a window.
fn local_rotary(keys: &JsonObjectReader<'_>, family: &ModelFamily, ctx: usize) -> Result<RotaryConfig> {
    if keys.get("rope_parameters").is_some() {
        return rotary(keys, &ModelFamily { theta: 1e4, ..*family }, SLIDING, ctx);
    }
    let theta = keys.positive("rope_local_base_freq")?.unwrap_or(1e4);
    Ok(RotaryConfig { theta, ..RotaryConfig::default() })
}

/// Reads the rotary positions of blocks with attention type `kind`.
fn rotary(keys: &JsonObjectReader<'_>, family: &ModelFamily, kind: &str, ctx: usize) -> Result<RotaryConfig> {
    let outer_theta = keys.positive("rope_theta")?;
    let outer = RotaryScalingContext {
        family,
        ctx,
        original: match family.is("phi3") {
            true => keys.size(ORIGINAL)?.or(Some(4096)),
            false => None,
        },
    };
    let partial = keys.positive(PARTIAL)?;
    // In transformers, only the classes of Phi-3 and of models that rotate parts of heads read the key.
    let rotates_complete = family.partial_rotary_factor == 1.0 && !family.is("phi3");
    let check_complete = |keys: &JsonObjectReader<'_>| match rotates_complete
        && keys.positive(PARTIAL)?.is_some_and(|part| part != 1.0)
    {
        true => Err(keys.refuse(PARTIAL, "1: complete heads are rotated")),
        false => Ok(()),
    };
    check_complete(keys)?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    let old = old.map(|keys| Ok::<_, crate::Error>((scaling(&keys, outer)?, growth(&keys)?))).transpose()?;
    let parameters = match (keys.object("rope_parameters", "rope_parameters.")?, &old) {
        (Some(parameters), _) => parameters,
        (None, Some((scaling, query_growth))) => {
            // OLMo 3 scales only the positions of blocks without a window.
            let is_scaled = !(family.is("olmo3") && kind == SLIDING);
            return Ok(RotaryConfig {
                theta: outer_theta.unwrap_or(family.theta),
                scaling: if is_scaled { scaling.clone() } else { RotaryScaling::None },
                partial_rotary_factor: partial.unwrap_or(family.partial_rotary_factor),
                query_growth: *query_growth,
            });
        }
        (None, None) => {
            let theta = outer_theta.unwrap_or(family.theta);
            let partial = partial.unwrap_or(family.partial_rotary_factor);
            let default = RotaryConfig { theta, partial_rotary_factor: partial, ..RotaryConfig::default() };
            return Ok(match family.model_type {
                "ministral3" if outer_theta.is_none() => ministral3(),
                "gpt_oss" => RotaryConfig { scaling: gpt_oss(), ..default },
                _ => default,
            });
        }
    };
    // There is an entry for each attention type, or one for all.
    let parameters = match parameters.keys().any(|key| [FULL, SLIDING].contains(&key)) {
        false => parameters,
        true if kind == FULL => parameters.object(FULL, "rope_parameters.full_attention.")?.unwrap_or(parameters),
        true => parameters.object(SLIDING, "rope_parameters.sliding_attention.")?.unwrap_or(parameters),
    };
    let inner = parameters.positive("rope_theta")?;
    if let (Some(inner), Some(outer_theta)) = (inner, outer_theta)
        && inner != outer_theta
        && kind == FULL
    {
        return Err(parameters.refuse("rope_theta", format!("equal to the outer rope_theta ({outer_theta})")));
    }
    check_complete(&parameters)?;
    let inner_partial = parameters.positive(PARTIAL)?;
    if let (Some(inner), Some(outer)) = (inner_partial, partial)
        && inner != outer
    {
        let allowed = format!("equal to the outer partial_rotary_factor ({outer})");
        return Err(parameters.refuse(PARTIAL, allowed));
    }
    let (scaling, query_growth) = (scaling(&parameters, outer)?, growth(&parameters)?);
    if kind == FULL && old.is_some_and(|(old, _)| old != scaling) {
        return Err(keys.refuse("rope_scaling", "absent or equal to rope_parameters"));
    }
    Ok(RotaryConfig {
        theta: inner.or(outer_theta).unwrap_or(family.theta),
        scaling,
        partial_rotary_factor: inner_partial.or(partial).unwrap_or(family.partial_rotary_factor),
        query_growth,
    })
}

/// Returns the rotary positions that a Ministral 3 has if its file specifies none.
fn ministral3() -> RotaryConfig {
    const ORIGINAL_POSITIONS: usize = 16_384;
    let frequencies = YarnRopeScaling {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        original_max_position_embeddings: ORIGINAL_POSITIONS,
    };
    RotaryConfig {
        theta: 1e6,
        scaling: RotaryScaling::Yarn(YarnScaling { frequencies, attention_factor: 1.0 }),
        partial_rotary_factor: 1.0,
        query_growth: Some(QueryGrowth { beta: 0.1, original: ORIGINAL_POSITIONS }),
    }
}

/// Returns the frequency scaling that a gpt-oss model has if its file specifies none.
fn gpt_oss() -> RotaryScaling {
    let factor = 32f64;
    let frequencies = YarnRopeScaling {
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        original_max_position_embeddings: 4096,
    };
    RotaryScaling::Yarn(YarnScaling { frequencies, attention_factor: 0.1 * factor.ln() + 1.0 })
}

/// The values on which a scaling depends, apart from its own keys.
#[derive(Clone, Copy)]
struct RotaryScalingContext<'a> {
    family: &'a ModelFamily,
    /// `max_position_embeddings`.
    ctx: usize,
    /// The original context, if the family has an outer key for it, which then takes precedence.
    original: Option<usize>,
}

/// Reads the growth of queries.
fn growth(keys: &JsonObjectReader<'_>) -> Result<Option<QueryGrowth>> {
    let Some(beta) = keys.positive("llama_4_scaling_beta")? else { return Ok(None) };
    let original = keys.size(ORIGINAL)?.ok_or_else(|| keys.refuse(ORIGINAL, "a whole number"))?;
    Ok(Some(QueryGrowth { beta, original }))
}

/// Reads the frequency scaling.
fn scaling(keys: &JsonObjectReader<'_>, outer: RotaryScalingContext<'_>) -> Result<RotaryScaling> {
    let (new, old) = (keys.text("rope_type")?, keys.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(keys.refuse("type", format!("equal to rope_type ({new:?})")));
    }
    let required = |key: &str| keys.positive(key)?.ok_or_else(|| keys.refuse(key, "a positive number"));
    let original = || Ok::<_, crate::Error>(outer.original.or(keys.size(ORIGINAL)?).unwrap_or(outer.ctx));
    match new.or(old) {
        None | Some("default") => Ok(RotaryScaling::None),
        Some("linear") => Ok(RotaryScaling::Linear { factor: required("factor")? }),
        Some("dynamic") => Ok(RotaryScaling::Dynamic { factor: required("factor")?, original: outer.ctx }),
        // In earlier files of Phi-3, longrope is named su or yarn.
        Some("longrope" | "su") => longrope(keys, original()?, outer.ctx),
        Some("yarn") if outer.family.is("phi3") => longrope(keys, original()?, outer.ctx),
        Some("yarn") => yarn(keys, original()?, outer.ctx),
        Some("llama3") => {
            let original = keys.size(ORIGINAL)?.ok_or_else(|| keys.refuse(ORIGINAL, "a whole number"))?;
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if low >= high {
                return Err(keys.refuse("high_freq_factor", format!("above low_freq_factor ({low})")));
            }
            Ok(RotaryScaling::Llama3(Llama3RopeScaling {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }))
        }
        Some(_) => {
            let key = if new.is_some() { "rope_type" } else { "type" };
            Err(keys.refuse(key, "default, linear, dynamic, yarn, longrope or llama3"))
        }
    }
}

/// Reads YaRN's parameters.
fn yarn(keys: &JsonObjectReader<'_>, original: usize, ctx: usize) -> Result<RotaryScaling> {
    let factor = match keys.is_null("factor") {
        true => ctx as f64 / original as f64,
        false => keys.positive("factor")?.ok_or_else(|| keys.refuse("factor", "a positive number"))?,
    };
    let growth = |scale: f64, mscale: f64| if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 };
    let (given_factor, mscale) = (keys.positive("attention_factor")?, keys.number("mscale")?);
    let attention_factor = match (given_factor, mscale, keys.number("mscale_all_dim")?) {
        (Some(factor), ..) => factor,
        (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => growth(factor, mscale) / growth(factor, all),
        _ => growth(factor, 1.0),
    };
    Ok(RotaryScaling::Yarn(YarnScaling {
        frequencies: YarnRopeScaling {
            factor,
            beta_fast: keys.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.positive("beta_slow")?.unwrap_or(1.0),
            truncate: keys.flag("truncate", true)?,
            original_max_position_embeddings: original,
        },
        attention_factor,
    }))
}

/// Reads LongRoPE's parameters.
fn longrope(keys: &JsonObjectReader<'_>, original: usize, ctx: usize) -> Result<RotaryScaling> {
    let factors = |key: &str| {
        let values = keys.get(key).and_then(Value::as_array);
        let positive = |value: &Value| value.as_f64().filter(|factor| *factor > 0.0 && factor.is_finite());
        let values = values.and_then(|values| values.iter().map(positive).collect::<Option<Vec<f64>>>());
        values.ok_or_else(|| keys.refuse(key, "a list of positive numbers, one for each pair of elements of a head"))
    };
    let (short, long) = (factors("short_factor")?, factors("long_factor")?);
    if short.len() != long.len() {
        let found = format!("a list of length {}", long.len());
        let allowed = format!("a list of the length of short_factor ({})", short.len());
        return Err(keys.refuse_as("long_factor", found, allowed));
    }
    let factor = keys.positive("factor")?.unwrap_or(ctx as f64 / original as f64);
    let attention_factor = match keys.positive("attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None if original < 2 => return Err(keys.refuse_as(ORIGINAL, original, "at least 2 with rope type longrope")),
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RotaryScaling::LongRope(Arc::new(LongRopeScaling { short, long, original, attention_factor })))
}
