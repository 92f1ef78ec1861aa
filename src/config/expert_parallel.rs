//! Reads `expert_parallel`: the number of ranks among which the experts of each layer are divided.

use super::walk::ConfigWalk;
use super::{ConfigRule, ZeroConfig};

const SIZE: &str = "expert_parallel.autoep_size";

/// Returns the number of ranks among which experts are divided; 1 if the section is off. Problems are added to `walk`.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>, zero: &ZeroConfig, world_size: usize, has_local_steps: bool) -> usize {
    if !walk.bool("expert_parallel.enabled") {
        return 1;
    }
    let found = walk.int(SIZE).unwrap_or(1);
    let divisors = (1..=world_size).filter(|ranks| world_size.is_multiple_of(*ranks));
    let Some(size) = divisors.clone().find(|ranks| i64::try_from(*ranks) == Ok(found)) else {
        let allowed: Vec<String> = divisors.map(|ranks| ranks.to_string()).collect();
        let text = format!(
            "expected a divisor of the number of ranks, {world_size} (one of {}), found {found}",
            allowed.join(", ")
        );
        let position = walk.position(SIZE);
        walk.problem(ConfigRule::Range, SIZE, position, text);
        return 1;
    };
    if size == 1 {
        return 1;
    }
    let conflicts = [
        (has_local_steps, "local_steps", "each island holds a complete copy of the model"),
        (
            zero.mics_shard_size.is_some(),
            "zero_optimization.mics_shard_size",
            "experts are sharded only among the ranks that hold them",
        ),
        (
            zero.hpz_partition_size > 1,
            "zero_optimization.zero_hpz_partition_size",
            "experts are not gathered between hosts",
        ),
        (
            zero.quantized_weights || zero.quantized_gradients,
            "zero_optimization.zero_quantized_weights or zero_quantized_gradients",
            "collectives among the ranks of an expert are not compressed",
        ),
        (
            zero.compress_between_hosts_only,
            "zero_optimization.compress_between_hosts_only",
            "collectives among the ranks of an expert are not compressed",
        ),
        (walk.bool("torch_autocast.enabled"), "torch_autocast", "experts are computed in the model's own format"),
    ];
    for (is_on, other, why) in conflicts {
        if is_on {
            let position = walk.position(SIZE);
            let text = format!(
                "{size} cannot be used together with {other}, because {why}; remove expert_parallel or {other}"
            );
            walk.problem(ConfigRule::Conflict, SIZE, position, text);
        }
    }
    size
}
