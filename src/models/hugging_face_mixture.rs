//! Reads a decoder's mixture of experts from a `config.json`.

use super::json_object_reader::JsonObjectReader;
use super::mixture_config::{MAX_EXPERTS, MixtureNaming};
use super::mixture_families::{ExpertWeighting, MixtureFamily};
use super::model_families::ModelFamily;
use super::{BlockMlp, MixtureConfig};
use crate::error::Result;
use crate::nn::{ExpertActivation, RouterOptions, RouterOrder};
use serde_json::Value;

/// Reads the mixture of a model with `blocks` blocks, and the layers that follow attention in each of them. The mixture
/// is `None` if no block is sparse.
pub(super) fn mixture(
    keys: &JsonObjectReader<'_>,
    family: &ModelFamily,
    blocks: usize,
) -> Result<(Option<MixtureConfig>, Vec<BlockMlp>)> {
    let Some(mixture_family) = &family.mixture else { return Ok((None, vec![BlockMlp::Dense; blocks])) };
    let mlps = block_mlps(keys, mixture_family, blocks)?;
    let config = config(keys, mixture_family)?;
    let has_sparse = mlps.contains(&BlockMlp::Mixture);
    Ok((has_sparse.then_some(config), mlps))
}

fn config(keys: &JsonObjectReader<'_>, family: &MixtureFamily) -> Result<MixtureConfig> {
    let size = |key: &str, default: usize| Ok::<usize, crate::Error>(keys.size(key)?.unwrap_or(default));
    if keys.number("router_jitter_noise")?.is_some_and(|noise| noise != 0.0) {
        return Err(keys.refuse("router_jitter_noise", "0: noise in the router's input is not supported"));
    }
    let (experts_key, experts) = experts(keys, family)?;
    if experts > MAX_EXPERTS {
        return Err(keys.refuse(experts_key, format!("at most {MAX_EXPERTS}")));
    }
    let experts_per_row = size(PER_TOKEN, family.experts_per_token)?;
    if experts_per_row > experts {
        return Err(keys.refuse_as(PER_TOKEN, experts_per_row, format!("at most {experts_key} ({experts})")));
    }
    // Published files of gpt-oss contain the number twice.
    if keys.size("experts_per_token")?.is_some_and(|other| other != experts_per_row) {
        return Err(keys.refuse("experts_per_token", format!("equal to {PER_TOKEN} ({experts_per_row})")));
    }
    let order = match family.weighting {
        ExpertWeighting::Renormalized => RouterOrder::SoftmaxThenTop { renormalize: true },
        ExpertWeighting::Key(key) => RouterOrder::SoftmaxThenTop { renormalize: keys.flag(key, false)? },
        ExpertWeighting::OfChosenLogits => RouterOrder::TopThenSoftmax,
    };
    let gate = match family.naming {
        MixtureNaming::GptOss => ExpertActivation::Clamped {
            alpha: keys.positive("swiglu_alpha")?.unwrap_or(1.702) as f32,
            limit: keys.positive("swiglu_limit")?.unwrap_or(7.0) as f32,
        },
        MixtureNaming::Mixtral | MixtureNaming::Qwen => ExpertActivation::Silu,
    };
    let (width_key, width) = family.expert_width;
    let shared_width = match family.shared_width {
        Some(default) => Some(size("shared_expert_intermediate_size", default)?),
        None => None,
    };
    Ok(MixtureConfig {
        naming: family.naming,
        experts,
        router: RouterOptions { experts_per_row, order, keep_f32: family.naming == MixtureNaming::Mixtral },
        expert_width: size(width_key, width)?,
        gate,
        shared_width,
        balance_coefficient: balance_coefficient(keys, family)?,
    })
}

/// The key of the number of experts that the router chooses for each token.
const PER_TOKEN: &str = "num_experts_per_tok";

/// Reads the number of experts, whose key differs between versions of transformers.
fn experts(keys: &JsonObjectReader<'_>, family: &MixtureFamily) -> Result<(&'static str, usize)> {
    const NAMES: [&str; 2] = ["num_experts", "num_local_experts"];
    match [keys.size(NAMES[0])?, keys.size(NAMES[1])?] {
        [Some(one), Some(other)] if one != other => {
            Err(keys.refuse(NAMES[1], format!("equal to {} ({one}), or absent", NAMES[0])))
        }
        [Some(experts), _] => Ok((NAMES[0], experts)),
        [None, Some(experts)] => Ok((NAMES[1], experts)),
        [None, None] => Ok((NAMES[0], family.experts)),
    }
}

/// Reads the factor of the load-balancing loss, which is `None` unless `output_router_logits` is set.
fn balance_coefficient(keys: &JsonObjectReader<'_>, family: &MixtureFamily) -> Result<Option<f64>> {
    const KEY: &str = "router_aux_loss_coef";
    let factor = keys.number(KEY)?.unwrap_or(family.balance_coefficient);
    if factor < 0.0 {
        return Err(keys.refuse(KEY, "a number of at least 0"));
    }
    Ok(keys.flag("output_router_logits", false)?.then_some(factor))
}

/// Reads which blocks are sparse.
fn block_mlps(keys: &JsonObjectReader<'_>, family: &MixtureFamily, blocks: usize) -> Result<Vec<BlockMlp>> {
    const DENSE: &str = "mlp_only_layers";
    if !family.has_dense_blocks {
        return Ok(vec![BlockMlp::Mixture; blocks]);
    }
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    let default_mlp = |block: usize| if (block + 1).is_multiple_of(step) { BlockMlp::Mixture } else { BlockMlp::Dense };
    let mut mlps: Vec<BlockMlp> = (0..blocks).map(default_mlp).collect();
    let Some(dense) = keys.get(DENSE) else { return Ok(mlps) };
    let numbers = dense.as_array().map(|values| values.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    let Some(Some(numbers)) = numbers else { return Err(keys.refuse(DENSE, "a list of layer numbers")) };
    for number in numbers {
        let mlp = usize::try_from(number).ok().and_then(|number| mlps.get_mut(number));
        let Some(mlp) = mlp else {
            let found = format!("a list that contains {number}");
            return Err(keys.refuse_as(DENSE, found, format!("a list of numbers below num_hidden_layers ({blocks})")));
        };
        *mlp = BlockMlp::Dense;
    }
    Ok(mlps)
}
