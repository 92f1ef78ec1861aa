//! Determines the order of samples by integer arithmetic, without reading data.

use super::TokenData;
use crate::error::{DataError, Result};
use crate::util::{mix, permute};

/// The order of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SampleOrder {
    /// Global sample i starts at token (i x context) mod (tokens - context - 1).
    Sequential,
    /// The data is cut into samples of one context each; every epoch visits each of them once, in an order determined
    /// by the seed and the epoch number.
    Shuffled {
        /// The seed for the order.
        seed: u64,
    },
}

/// A map from the index of a sample to the index of its first token in a token sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    order: SampleOrder,
    ctx: u64,
    /// The modulus (sequential), or the number of samples per epoch (shuffled).
    period: u64,
}

impl Sampler {
    /// Creates a sampler for the samples in `data`. Each has `ctx` input tokens and as many targets, shifted by one.
    ///
    /// # Errors
    /// [`DataError::TooShort`] if `data` does not contain one full sample and, in sequential order, another token.
    ///
    /// # Panics
    ///
    /// Panics if `ctx` is 0.
    pub fn new(order: SampleOrder, data: &TokenData, ctx: usize) -> Result<Self> {
        assert!(ctx > 0, "a sample has at least one token");
        // A sample takes ctx + 1 tokens: the last target is one token after the last input. The modulus of the
        // sequential order must not be 0 either.
        let needed = ctx + 1 + usize::from(order == SampleOrder::Sequential);
        if data.len() < needed {
            return Err(DataError::TooShort { data: data.name().into(), tokens: data.len(), ctx, needed }.into());
        }
        Ok(Self::of_len(order, data.len() as u64, ctx as u64))
    }

    fn of_len(order: SampleOrder, tokens: u64, ctx: u64) -> Self {
        let period = match order {
            SampleOrder::Sequential => tokens - ctx - 1,
            SampleOrder::Shuffled { .. } => (tokens - 1) / ctx,
        };
        Self { order, ctx, period }
    }

    /// Returns the index of the first token of global sample `i`. The inputs are the `ctx` tokens from there on; the
    /// targets start one token later.
    pub fn start(&self, i: u64) -> u64 {
        match self.order {
            SampleOrder::Sequential => ((u128::from(i) * u128::from(self.ctx)) % u128::from(self.period)) as u64,
            SampleOrder::Shuffled { seed } => {
                let (epoch, position) = (i / self.period, i % self.period);
                self.ctx * permute(position, self.period, mix(seed ^ mix(epoch)))
            }
        }
    }

    /// Returns the number of samples in an epoch: as many as fit without overlap (shuffled), or the number of samples
    /// after which the start positions certainly repeat (sequential).
    pub fn epoch_len(&self) -> u64 {
        self.period
    }
}

/// Returns the number of samples that each of `world` ranks gets from a data set of `samples`, as DeepSpeed's data
/// loader counts them: the last ranks are padded with repeated samples.
pub fn samples_per_rank(samples: usize, world: usize) -> usize {
    samples.div_ceil(world)
}

/// Returns the number of micro batches per rank and epoch, as DeepSpeed's data loader counts them. `drop_last` drops an
/// incomplete last micro batch (`dataloader_drop_last`).
pub fn batches_per_rank(samples: usize, world: usize, micro: usize, drop_last: bool) -> usize {
    let samples = samples_per_rank(samples, world);
    if drop_last { samples / micro } else { samples.div_ceil(micro) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    proptest! {
        #[test]
        fn an_epoch_visits_every_sample_once(len in 1u64..3000, ctx in 1u64..40, seed: u64, epoch in 0u64..1000) {
            let sampler = Sampler::of_len(SampleOrder::Shuffled { seed }, len * ctx + 1, ctx);
            prop_assert_eq!(sampler.epoch_len(), len);
            let mut starts: Vec<u64> = (epoch * len..(epoch + 1) * len).map(|i| sampler.start(i)).collect();
            starts.sort_unstable();
            prop_assert_eq!(starts, (0..len).map(|s| s * ctx).collect::<Vec<_>>());
        }

        #[test]
        fn the_permutation_reaches_any_size(len in 1u64.., position: u64, key: u64) {
            prop_assert!(permute(position % len, len, key) < len);
        }

        #[test]
        fn a_sequential_sample_never_ends_after_the_data(tokens in 3u64..1 << 40, ctx in 1u64..5000, i: u64) {
            prop_assume!(tokens >= ctx + 2);
            let sampler = Sampler::of_len(SampleOrder::Sequential, tokens, ctx);
            prop_assert!(sampler.start(i) + ctx < tokens);
        }
    }

    #[test]
    fn seeds_and_epochs_give_different_orders_and_the_same_one_is_the_same() {
        let order = |seed: u64, epoch: u64| {
            let sampler = Sampler::of_len(SampleOrder::Shuffled { seed }, 1001, 10);
            (epoch * 100..epoch * 100 + 100).map(|i| sampler.start(i)).collect::<Vec<_>>()
        };
        assert_eq!(order(7, 3), order(7, 3));
        assert_ne!(order(7, 3), order(8, 3));
        assert_ne!(order(7, 3), order(7, 4));
        let sorted = (0..100).map(|s| s * 10).collect::<Vec<_>>();
        assert_ne!(order(7, 3), sorted);
    }

    #[test]
    fn every_place_is_reached_about_equally_often() {
        // 2000 seeds, 10 positions: 200 each; five standard deviations are 67.
        let mut counts = [0i32; 10];
        for seed in 0..2000 {
            counts[Sampler::of_len(SampleOrder::Shuffled { seed }, 11, 1).start(0) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (c - 200).abs() < 67), "{counts:?}");
    }

    #[test]
    fn the_loader_lengths_of_the_conformance_cases_hold() {
        let file: Value = serde_json::from_str(include_str!("../../tests/fixtures/conformance_data.json")).unwrap();
        let mut run = 0;
        for case in file.as_array().unwrap().iter().filter(|c| c["area"] == "data-loader") {
            let (id, expect) = (&case["id"], &case["expect"]);
            let number = |key: &str| case["input"][key].as_u64().unwrap() as usize;
            let (samples, world, micro) = (number("dataset"), number("world_size"), number("micro_batch"));
            let drop_last = case["input"]["drop_last"].as_bool().unwrap();
            if let Some(expected) = expect["samples_per_rank"].as_u64() {
                assert_eq!(samples_per_rank(samples, world) as u64, expected, "{id}");
            }
            let expected = expect["batches_per_rank"].as_u64().unwrap();
            assert_eq!(batches_per_rank(samples, world, micro, drop_last) as u64, expected, "{id}");
            run += 1;
        }
        assert_eq!(run, 6);
        assert_eq!(batches_per_rank(10, 2, 3, false), 2);
    }
}
