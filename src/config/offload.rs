//! `zero_optimization.offload_optimizer`, `zero_optimization.offload_param` and `aio`.

use super::walk::Walk;
use super::{Aio, EightBit, EightBitConfig, OffloadOptimizer, OffloadParam, OffloadTo, OptimizerConfig, Rule};
use crate::layout::ZeroStage;
use std::path::PathBuf;

/// An offload section, and the first stage at which it has an effect, as in DeepSpeed.
pub(super) struct Section {
    pub path: &'static str,
    pub from: ZeroStage,
}

pub(super) const OPTIMIZER: Section = Section { path: "zero_optimization.offload_optimizer", from: ZeroStage::One };
pub(super) const PARAM: Section = Section { path: "zero_optimization.offload_param", from: ZeroStage::Three };

impl Section {
    fn join(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    /// `device` with its folder; `None`: nothing is offloaded.
    fn to(&self, walk: &mut Walk<'_>, stage: ZeroStage) -> Option<OffloadTo> {
        let nvme = match walk.str(&self.join("device"))? {
            "cpu" => false,
            "nvme" => true,
            _ => return None,
        };
        if stage < self.from {
            let needs = if self.from == ZeroStage::Three { "stage 3" } else { "stage 1, 2 or 3" };
            let text = format!("accepted and has no effect at stage {stage}, as in DeepSpeed: it needs {needs}");
            walk.note(self.path, text);
            return None;
        }
        if !nvme {
            return Some(OffloadTo::Cpu);
        }
        let key = self.join("nvme_path");
        match walk.str(&key) {
            Some(path) if !path.is_empty() => match whole_path(path) {
                Some(path) => Some(OffloadTo::Nvme { path }),
                None => {
                    let text = format!("{path:?} found: this user has no home folder; give a path that begins with /");
                    let place = walk.place(&key);
                    walk.problem(Rule::Conflict, &key, place, text);
                    None
                }
            },
            found => {
                let found = if found.is_some() { "\"\" found" } else { "has to be given" };
                let text = format!(
                    "{found}: device \"nvme\" needs a folder on a fast local disk; give its path, or use device \"cpu\""
                );
                let place = walk.place(&key).or_else(|| walk.place(&self.join("device")));
                walk.problem(Rule::Conflict, &key, place, text);
                None
            }
        }
    }

    /// A count that is at least `least` where files are used.
    fn count(&self, walk: &mut Walk<'_>, key: &str, to: &OffloadTo, least: usize, why: &str) -> usize {
        let path = self.join(key);
        let found = count(walk, &path);
        if to.nvme_path().is_some() && found < least {
            let place = walk.place(&path);
            let text = format!("{found} found, allowed with device \"nvme\" is {least} or more{why}");
            walk.problem(Rule::Range, &path, place, text);
        }
        found
    }
}

/// A path that begins with `~/` lies in the user's home, as in a shell.
fn whole_path(path: &str) -> Option<PathBuf> {
    match path.strip_prefix("~/") {
        None => Some(path.into()),
        Some(rest) => std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(rest)),
    }
}

/// Where master weights, moments and gradient shares live; problems go to the walk.
pub(super) fn optimizer(
    walk: &mut Walk<'_>,
    stage: ZeroStage,
    optimizer: Option<&OptimizerConfig>,
) -> Option<OffloadOptimizer> {
    let to = OPTIMIZER.to(walk, stage)?;
    let (least, why) = match optimizer {
        Some(OptimizerConfig::Adam(_)) => (4, ": Adam works on gradient, weights and two moments"),
        Some(OptimizerConfig::Sgd(sgd)) if sgd.momentum != 0.0 => {
            (3, ": SGD with momentum works on gradient, weights and momentum")
        }
        Some(OptimizerConfig::Lion(_)) => (3, ": Lion works on gradient, weights and momentum"),
        Some(OptimizerConfig::Adagrad(_)) => (3, ": Adagrad works on gradient, weights and the sum of squares"),
        Some(OptimizerConfig::Lamb(_)) => (4, ": Lamb works on gradient, weights and two moments"),
        Some(OptimizerConfig::Muon(_)) => (4, ": Muon's AdamW works on gradient, weights and two moments"),
        Some(OptimizerConfig::EightBit(EightBitConfig { kind: EightBit::Lion(_), .. })) => {
            (3, ": Lion8bit works on gradient, weights and momentum")
        }
        Some(OptimizerConfig::EightBit(_)) => (4, ": Adam works on gradient, weights and two moments"),
        // SGD, or an optimizer that is not given here.
        _ => (2, ": a step works on gradient and weights"),
    };
    Some(OffloadOptimizer {
        buffer_count: OPTIMIZER.count(walk, "buffer_count", &to, least, why),
        pipeline_read: walk.bool(&OPTIMIZER.join("pipeline_read")),
        pipeline_write: walk.bool(&OPTIMIZER.join("pipeline_write")),
        ratio: walk.float(&OPTIMIZER.join("ratio")),
        to,
    })
}

/// Where parameter shards live; problems go to the walk.
pub(super) fn param(walk: &mut Walk<'_>, stage: ZeroStage) -> Option<OffloadParam> {
    let to = PARAM.to(walk, stage)?;
    Some(OffloadParam {
        buffer_count: PARAM.count(walk, "buffer_count", &to, 1, ""),
        buffer_size: PARAM.count(walk, "buffer_size", &to, 1, ""),
        max_in_cpu: count(walk, &PARAM.join("max_in_cpu")),
        to,
    })
}

/// How files are accessed.
pub(super) fn aio(walk: &Walk<'_>) -> Aio {
    let of = |key: &str| count(walk, &format!("aio.{key}"));
    Aio {
        block_size: of("block_size"),
        queue_depth: of("queue_depth"),
        intra_op_parallelism: of("intra_op_parallelism"),
    }
}

fn count(walk: &Walk<'_>, path: &str) -> usize {
    // Beyond usize (on 32 bits) there is no difference to "all".
    usize::try_from(walk.count(path)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_begins_with_a_tilde_and_a_slash_lies_in_the_users_home() {
        let home = std::env::home_dir();
        assert_eq!(whole_path("~/.cache/offload"), home.map(|home| home.join(".cache/offload")));
        for path in ["/a/~/b", "~", "~user/a", "a"] {
            assert_eq!(whole_path(path), Some(path.into()));
        }
    }
}
