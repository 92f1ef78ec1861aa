//! Reads `zero_optimization.offload_optimizer`, `zero_optimization.offload_param` and `aio`.

use super::walk::ConfigWalk;
use super::{Aio, ConfigRule, EightBit, EightBitConfig, OffloadOptimizer, OffloadParam, OffloadTo, OptimizerConfig};
use crate::layout::ZeroStage;
use crate::util::cache_home;
use serde_json::Value;
use std::ffi::OsString;
use std::path::PathBuf;

/// An offload section, and the lowest stage at which it has an effect, as in DeepSpeed.
pub(super) struct OffloadSectionSpec {
    pub path: &'static str,
    pub min_stage: ZeroStage,
}

pub(super) const OPTIMIZER: OffloadSectionSpec =
    OffloadSectionSpec { path: "zero_optimization.offload_optimizer", min_stage: ZeroStage::One };
pub(super) const PARAM: OffloadSectionSpec =
    OffloadSectionSpec { path: "zero_optimization.offload_param", min_stage: ZeroStage::Three };

/// The value of `offload_optimizer.delayed_update_after` if it is absent.
const DELAYED_UPDATE_AFTER: u64 = 40;

impl OffloadSectionSpec {
    fn join(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    /// Returns `device` and its folder, or `None` if nothing is offloaded or there is a problem.
    fn resolve_target(&self, walk: &mut ConfigWalk<'_>, stage: ZeroStage) -> Option<OffloadTo> {
        let nvme = match walk.str(&self.join("device"))? {
            "cpu" => false,
            "nvme" => true,
            _ => return None,
        };
        if stage < self.min_stage {
            let needs = if self.min_stage == ZeroStage::Three { "stage 3" } else { "stage 1, 2 or 3" };
            let text = format!("accepted, but has no effect at stage {stage}, as in DeepSpeed: it needs {needs}");
            walk.note(self.path, text);
            return None;
        }
        if !nvme {
            return Some(OffloadTo::Cpu);
        }
        let key = self.join("nvme_path");
        match walk.str(&key) {
            Some(path) if !path.is_empty() => {
                match expand_home(path, std::env::var_os("XDG_CACHE_HOME"), std::env::home_dir()) {
                    Some(path) => Some(OffloadTo::Nvme { path }),
                    None => {
                        let text =
                            format!("{path:?} found, but this user has no home folder; give a path that starts with /");
                        let position = walk.position(&key);
                        walk.problem(ConfigRule::Conflict, &key, position, text);
                        None
                    }
                }
            }
            found => {
                let found = if found.is_some() { "found \"\"" } else { "required" };
                let text = format!(
                    "{found}: device \"nvme\" needs a folder on a fast local disk; give its path, or use device \"cpu\""
                );
                let position = walk.position(&key).or_else(|| walk.position(&self.join("device")));
                walk.problem(ConfigRule::Conflict, &key, position, text);
                None
            }
        }
    }

    /// Reads a count, which must be `min` or more if state is offloaded to files.
    fn count(&self, walk: &mut ConfigWalk<'_>, key: &str, device: &OffloadTo, min: usize, why: &str) -> usize {
        let path = self.join(key);
        let found = count(walk, &path);
        if device.nvme_path().is_some() && found < min {
            let position = walk.position(&path);
            let text = format!("device \"nvme\" needs {min} or more, found {found}{why}");
            walk.problem(ConfigRule::Range, &path, position, text);
        }
        found
    }
}

/// Expands `~/` at the beginning of a path to the user's home, as a shell does, and `~/.cache/` to the user's cache
/// folder, which `$XDG_CACHE_HOME` (`xdg`) may override.
fn expand_home(path: &str, xdg: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    let home = home.filter(|home| home.is_absolute());
    match (path.strip_prefix("~/.cache/"), path.strip_prefix("~/")) {
        (Some(rest), _) => cache_home(xdg, home).map(|cache| cache.join(rest)),
        (None, Some(rest)) => home.map(|home| home.join(rest)),
        (None, None) => Some(path.into()),
    }
}

/// Resolves where master weights, moments and gradient shards are stored. Problems are added to the walk.
pub(super) fn optimizer(
    walk: &mut ConfigWalk<'_>,
    stage: ZeroStage,
    optimizer: Option<&OptimizerConfig>,
) -> Option<OffloadOptimizer> {
    let device = OPTIMIZER.resolve_target(walk, stage)?;
    let (min, why) = match optimizer {
        Some(OptimizerConfig::Adam(_)) => (4, ": Adam needs the gradient, the weights and two moments"),
        Some(OptimizerConfig::Sgd(sgd)) if sgd.momentum != 0.0 => {
            (3, ": SGD with momentum needs the gradient, the weights and the momentum")
        }
        Some(OptimizerConfig::Lion(_)) => (3, ": Lion needs the gradient, the weights and the momentum"),
        Some(OptimizerConfig::Adagrad(_)) => (3, ": Adagrad needs the gradient, the weights and the sum of squares"),
        Some(OptimizerConfig::Lamb(_)) => (4, ": Lamb needs the gradient, the weights and two moments"),
        Some(OptimizerConfig::Muon(_)) => (4, ": Muon's AdamW needs the gradient, the weights and two moments"),
        Some(OptimizerConfig::Lars(_)) => (3, ": LARS needs the gradient, the weights and the momentum"),
        Some(OptimizerConfig::Adafactor(adafactor)) if adafactor.beta1.is_some() => {
            (4, ": Adafactor with beta1 needs the gradient, the weights and two moments")
        }
        Some(OptimizerConfig::Adafactor(_)) => (3, ": Adafactor needs the gradient, the weights and the second moment"),
        Some(OptimizerConfig::ScheduleFree(_)) => {
            (4, ": AdamWScheduleFree needs the gradient, the weights and two states")
        }
        Some(OptimizerConfig::EightBit(EightBitConfig { kind: EightBit::Lion(_), .. })) => {
            (3, ": Lion8bit needs the gradient, the weights and the momentum")
        }
        Some(OptimizerConfig::EightBit(_)) => (4, ": Adam needs the gradient, the weights and two moments"),
        // SGD, or an optimizer that the file does not name.
        _ => (2, ": a step needs the gradient and the weights"),
    };
    Some(OffloadOptimizer {
        buffer_count: OPTIMIZER.count(walk, "buffer_count", &device, min, why),
        pipeline_read: walk.bool(&OPTIMIZER.join("pipeline_read")),
        pipeline_write: walk.bool(&OPTIMIZER.join("pipeline_write")),
        ratio: walk.float(&OPTIMIZER.join("ratio")),
        delayed_update_after: delayed_update_after(walk),
        pin_memory: walk.bool(&OPTIMIZER.join("pin_memory")),
        device,
    })
}

/// Returns the number of updates before the first delayed one; `None` if no update is delayed. `delayed_update` and
/// `delayed_update_after` have no defaults in the table of keys, because a configuration may be printed for DeepSpeed,
/// which has neither key.
fn delayed_update_after(walk: &ConfigWalk<'_>) -> Option<u64> {
    let given = |key: &str| walk.get(&OPTIMIZER.join(key));
    let is_delayed = given("delayed_update").and_then(Value::as_bool).unwrap_or(false);
    is_delayed.then(|| given("delayed_update_after").and_then(Value::as_u64).unwrap_or(DELAYED_UPDATE_AFTER))
}

/// Resolves where parameter shards are stored. Problems are added to the walk.
pub(super) fn param(walk: &mut ConfigWalk<'_>, stage: ZeroStage) -> Option<OffloadParam> {
    let device = PARAM.resolve_target(walk, stage)?;
    Some(OffloadParam {
        buffer_count: PARAM.count(walk, "buffer_count", &device, 1, ""),
        buffer_size: PARAM.count(walk, "buffer_size", &device, 1, ""),
        max_in_cpu: count(walk, &PARAM.join("max_in_cpu")),
        pin_memory: walk.bool(&PARAM.join("pin_memory")),
        device,
    })
}

/// Resolves how files are accessed.
pub(super) fn aio(walk: &ConfigWalk<'_>) -> Aio {
    let value = |key: &str| count(walk, &format!("aio.{key}"));
    Aio {
        block_size: value("block_size"),
        queue_depth: value("queue_depth"),
        intra_op_parallelism: value("intra_op_parallelism"),
    }
}

fn count(walk: &ConfigWalk<'_>, path: &str) -> usize {
    // A count that exceeds usize (on 32-bit systems) is the same as "all".
    usize::try_from(walk.count(path)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_begins_with_a_tilde_and_a_slash_lies_in_the_users_home() {
        let expand = |path: &str, home: &str| expand_home(path, None, Some(home.into()));
        assert_eq!(expand("~/a/b", "/h"), Some("/h/a/b".into()));
        assert_eq!(expand("~/.cache/offload", "/h"), Some("/h/.cache/offload".into()));
        for path in ["/a/~/b", "~", "~user/a", "a"] {
            assert_eq!(expand(path, "/h"), Some(path.into()));
            assert_eq!(expand_home(path, None, None), Some(path.into()));
        }
        assert_eq!((expand("~/a", "h"), expand_home("~/.cache/a", None, None)), (None, None));
    }

    #[test]
    fn a_path_in_the_users_cache_lies_where_xdg_cache_home_says_if_that_is_absolute() {
        let expand = |path: &str, xdg: &str| expand_home(path, Some(xdg.into()), Some("/h".into()));
        assert_eq!(expand("~/.cache/candle-zero/offload", "/x"), Some("/x/candle-zero/offload".into()));
        assert_eq!(expand_home("~/.cache/a", Some("/x".into()), None), Some("/x/a".into()));
        for ignored in ["", "x", "./x"] {
            assert_eq!(expand("~/.cache/a", ignored), Some("/h/.cache/a".into()), "{ignored:?}");
        }
        // The variable does not affect other folders.
        for (path, expanded) in [("~/.cached/a", "/h/.cached/a"), ("/h/.cache/a", "/h/.cache/a"), ("~/a", "/h/a")] {
            assert_eq!(expand(path, "/x"), Some(expanded.into()));
        }
    }
}
