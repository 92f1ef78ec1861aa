//! The batch triad: train batch = micro batch x accumulation x ranks, inferred exactly as in DeepSpeed.

use super::auto::BATCH_KEYS;
use super::walk::ConfigWalk;
use super::{BatchConfig, ConfigRule};
use crate::error::{ConfigError, Result};
use crate::util::counted;

/// The reason why three numbers do not form a valid batch: the index of the offending key, and the message.
type BatchFault = (usize, String);

/// The maximum number of samples in one forward pass of a rank.
const MAX_MICRO_BATCH: u64 = 1 << 32;

const RULE: &str = "train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size";

impl BatchConfig {
    /// Returns the configuration with a different train batch size. The micro batch size stays the same; only the
    /// accumulation changes (DeepSpeed's `set_train_batch_size`).
    ///
    /// # Errors
    /// Fails unless `train_batch_size` is a positive multiple of micro batch x `world_size`.
    pub fn with_train_batch_size(self, train_batch_size: usize, world_size: usize) -> Result<Self> {
        let micro_batch = self.train_micro_batch_size_per_gpu;
        let fits = micro_batch
            .checked_mul(world_size)
            .filter(|unit| *unit > 0 && train_batch_size > 0 && train_batch_size.is_multiple_of(*unit));
        match fits {
            Some(unit) => Ok(Self {
                train_batch_size,
                train_micro_batch_size_per_gpu: micro_batch,
                gradient_accumulation_steps: train_batch_size / unit,
            }),
            None => Err(ConfigError::BatchSize { train_batch_size, micro_batch, world_size }.into()),
        }
    }
}

/// Resolves the three batch keys. Problems are added to `walk`.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>, world_size: usize) -> Option<BatchConfig> {
    let mut given = BATCH_KEYS.map(|key| walk.int(key));
    let is_auto = BATCH_KEYS.map(|key| walk.autos.iter().any(|auto| auto == key));
    // Values that do not follow from the train batch are taken from the run.
    let mut from_run = [false; 3];
    if given[0].is_none() {
        from_run[1] = given[1].is_none() && (is_auto[0] || is_auto[1]);
        from_run[2] = given[2].is_none() && is_auto[2];
    }
    let run = [0, walk.run.train_micro_batch_size_per_gpu, walk.run.gradient_accumulation_steps];
    for index in (0..3).filter(|index| from_run[*index]) {
        given[index] = Some(i64::try_from(run[index]).unwrap_or(i64::MAX));
    }
    let world = u64::try_from(world_size).unwrap_or(u64::MAX);
    match infer(given, world) {
        Ok(triple) => {
            for (index, key) in BATCH_KEYS.iter().enumerate() {
                if from_run[index] {
                    walk.note(key, format!("\"auto\": taken as {}", triple[index]));
                } else if is_auto[index] {
                    walk.note(key, format!("\"auto\": derived as {} from the other batch keys", triple[index]));
                }
                walk.set(key, triple[index].into());
            }
            let [Ok(t), Ok(m), Ok(g)] = triple.map(usize::try_from) else { return None };
            Some(BatchConfig { train_batch_size: t, train_micro_batch_size_per_gpu: m, gradient_accumulation_steps: g })
        }
        // A wrong type of value for a batch key has already been reported.
        Err(_) if BATCH_KEYS.iter().any(|key| walk.problems.iter().any(|problem| problem.path == *key)) => None,
        Err((key, message)) => {
            let position = walk.position(BATCH_KEYS[key]);
            walk.problem(ConfigRule::Batch, BATCH_KEYS[key], position, message);
            None
        }
    }
}

/// Infers train batch, micro batch and accumulation from those that are given.
fn infer(given: [Option<i64>; 3], world: u64) -> Result<[u64; 3], BatchFault> {
    let mut positive = [None; 3];
    for (index, value) in given.into_iter().enumerate() {
        positive[index] = match value.map(|v| u64::try_from(v).ok().filter(|v| *v > 0)) {
            None => None,
            Some(Some(v)) => Some(v),
            Some(None) => {
                let value = value.unwrap_or_default();
                return Err((index, format!("expected a number greater than 0, found {value}")));
            }
        };
    }
    let too_large = || (0, format!("{RULE}: the product exceeds 64 bits"));
    let product = |m: u64, g: u64| m.checked_mul(g).and_then(|p| p.checked_mul(world)).ok_or_else(too_large);
    let [t, m, g] = match positive {
        [Some(t), Some(m), Some(g)] => [t, m, g],
        [Some(t), Some(m), None] => [t, m, t / m / world],
        [Some(t), None, Some(g)] => [t, t / world / g, g],
        [Some(t), None, None] => [t, t / world, 1],
        [None, Some(m), Some(g)] => [product(m, g)?, m, g],
        [None, Some(m), None] => [product(m, 1)?, m, 1],
        [None, None, _] => {
            let message = "either train_batch_size or train_micro_batch_size_per_gpu (the micro batch of a rank) is \
                        required";
            return Err((0, message.into()));
        }
    };
    let inferred = |index: usize| if positive[index].is_none() { " (derived)" } else { "" };
    let product = product(m, g)?;
    if t == product && m > MAX_MICRO_BATCH {
        let found =
            format!("{t} samples per step on {} amount to {m} per rank in each forward pass", counted(world, "rank"));
        return Err((
            0,
            format!(
                "{found}; the maximum is {MAX_MICRO_BATCH}, so set gradient_accumulation_steps or use a smaller batch"
            ),
        ));
    }
    if t == product {
        return Ok([t, m, g]);
    }
    // If a floor division above had a remainder, the product differs from the train batch. A quotient of zero is
    // reported under the same rule.
    let fits = m.max(1).checked_mul(g.max(1)).and_then(|p| p.checked_mul(world));
    let fix = match fits {
        Some(fits) if positive[2].is_none() || positive[1].is_none() => {
            format!("choose a train_batch_size that is a multiple of {}", unit(positive, world).unwrap_or(fits))
        }
        Some(fits) => format!("with the other two values, train_batch_size must be {fits}"),
        None => "choose smaller numbers".into(),
    };
    let found = format!("{t} != {m}{} * {g}{} * {world}", inferred(1), inferred(2));
    Err((0, format!("{RULE}: {found}; {fix}")))
}

/// Returns the number that must divide the train batch if one or both of the other keys are inferred.
fn unit(positive: [Option<u64>; 3], world: u64) -> Option<u64> {
    positive[1].or(positive[2]).unwrap_or(1).checked_mul(world)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_missing_ones_are_worked_out_as_deepspeed_does() {
        for (given, world, expected) in [
            ([Some(32), Some(16), Some(1)], 2, [32, 16, 1]),
            ([Some(60), Some(3), None], 4, [60, 3, 5]),
            ([Some(32), None, Some(2)], 2, [32, 8, 2]),
            ([Some(32), None, None], 2, [32, 16, 1]),
            ([None, Some(17), Some(2)], 2, [68, 17, 2]),
            ([None, Some(18), None], 2, [36, 18, 1]),
        ] {
            assert_eq!(infer(given, world), Ok(expected), "{given:?} on {world}");
        }
    }

    #[test]
    fn a_floor_division_to_zero_is_refused() {
        for given in [[Some(33), Some(17), None], [Some(1), None, None], [Some(3), None, Some(2)]] {
            assert_eq!(infer(given, 2).unwrap_err().0, 0, "{given:?}");
        }
    }

    #[test]
    fn a_product_beyond_64_bits_is_refused_not_wrapped() {
        assert!(infer([None, Some(i64::MAX), Some(i64::MAX)], 2).is_err());
        assert!(infer([Some(1), Some(i64::MAX), Some(4)], u64::MAX).is_err());
    }

    #[test]
    fn another_train_batch_size_changes_only_the_accumulation() {
        let batch =
            BatchConfig { train_batch_size: 24, train_micro_batch_size_per_gpu: 3, gradient_accumulation_steps: 2 };
        let new = batch.with_train_batch_size(60, 4).unwrap();
        assert_eq!((new.train_micro_batch_size_per_gpu, new.gradient_accumulation_steps), (3, 5));
        insta::assert_snapshot!(batch.with_train_batch_size(61, 4).unwrap_err(), @"train_batch_size 61 does not fit train_micro_batch_size_per_gpu 3 on 4 ranks; a positive multiple of 3 * 4 is needed");
        assert!(batch.with_train_batch_size(0, 4).is_err());
    }

    proptest! {
        #[test]
        fn what_is_accepted_keeps_the_rule_and_the_given_values(
            given in prop::array::uniform3(prop::option::of(-2_i64..70)), world in 1_u64..9,
        ) {
            if let Ok([t, m, g]) = infer(given, world) {
                prop_assert_eq!(t, m * g * world);
                for (given, value) in given.into_iter().zip([t, m, g]) {
                    prop_assert!(given.is_none_or(|given| given as u64 == value) && value > 0);
                }
            }
        }
    }
}
