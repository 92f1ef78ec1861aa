//! The stage and the offload of a run that was given no DeepSpeed configuration.

use super::cache::own_cache;
use super::choose::{Demand, memory_of_rank};
use super::options::{Method, Objective};
use super::prepare::Prepared;
use super::quantized::{PACKING, is_quantized};
use crate::comm::Communicator;
use crate::error::Result;
use crate::estimate::Shapes;
use crate::models::{Decoder, Pass};
use crate::nn::is_adapter;
use crate::util::fnv1a;
use serde_json::Value;

/// `config` with what fits into the memory of every rank, and why; as it is, where the user has given a configuration. Collective.
///
/// # Errors
/// Those of [`Demand::choose`].
pub(super) fn fitted(prepared: &Prepared, config: Value, comm: &dyn Communicator) -> Result<(Value, Option<String>)> {
    let (options, sizes) = (&prepared.options, &prepared.config);
    if options.ds_config.is_some() {
        return Ok((config, None));
    }
    let shapes = Shapes::of("model", |vb| Decoder::new(sizes, vb))?;
    let shapes = match options.method {
        Method::Full => shapes,
        Method::Lora(_) => shapes.trainable(|name, _| is_adapter(name)),
        Method::Qlora(_) => shapes.trainable(|name, _| is_adapter(name)).quantized_by(PACKING, is_quantized),
    };
    // Ranks that measure different amounts take the least.
    let own = memory_of_rank(comm.size()).unwrap_or(u64::MAX) as f64;
    let memory = comm.gather_f64(vec![own]).wait()?.iter().flatten().fold(own, |least, bytes| bytes.min(least));
    // A pair of a preference is two rows.
    let texts = if matches!(options.objective, Objective::Prefer { .. }) { 2 } else { 1 };
    let element = options.precision.dtype().size_in_bytes();
    let trains_base = options.method == Method::Full;
    let activations = |rows: usize, recompute: bool| {
        let tokens = rows.saturating_mul(texts).saturating_mul(sizes.ctx);
        sizes.activation_bytes(Pass { tokens, element, recompute, trains_base })
    };
    // A folder of its own: one serves one job at a time.
    let out = std::path::absolute(&options.out).unwrap_or_else(|_| options.out.clone());
    let folder = own_cache()?.join(format!("offload/{:016x}", fnv1a(out.as_os_str().as_encoded_bytes())));
    let choice = Demand {
        shapes: &shapes,
        config: &config,
        recompute: options.recompute,
        ranks: comm.size(),
        activations: &activations,
        memory: memory as u64,
        folder: &folder,
    }
    .choose()?;
    Ok((choice.config, Some(choice.why)))
}
