//! The division of a model's layers among the stages of a pipeline.
//!
//! A cut is the index of a stage's first layer. Every stage has consecutive layers, and at least one of them.

use crate::util::counted;
use std::fmt;
use std::ops::Range;

/// The layers of each stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageCuts {
    /// The first layer of each stage, and the total number of layers.
    bounds: Vec<usize>,
}

/// There are more stages than layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyStages {
    /// The number of stages.
    pub stages: usize,
    /// The number of layers.
    pub layers: usize,
}

impl fmt::Display for TooManyStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stages, layers } = *self;
        write!(
            f,
            "{} cannot be divided among {}: each needs at least one; use fewer stages",
            counted(layers, "layer"),
            counted(stages, "pipeline stage")
        )
    }
}

impl std::error::Error for TooManyStages {}

impl StageCuts {
    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Returns the layers of a stage.
    pub fn layers_of(&self, stage: usize) -> Range<usize> {
        self.bounds[stage]..self.bounds[stage + 1]
    }

    /// Returns the stage of a layer.
    pub fn stage_of(&self, layer: usize) -> usize {
        self.bounds.partition_point(|bound| *bound <= layer) - 1
    }
}

/// Divides `layers` layers into stages of equal length; if that is not possible, the first stages have one more
/// (`partition: uniform`).
///
/// # Errors
/// There are more stages than layers.
pub fn uniform_cuts(layers: usize, stages: usize) -> Result<StageCuts, TooManyStages> {
    check(layers, stages)?;
    let (each, more) = (layers / stages, layers % stages);
    Ok(StageCuts { bounds: (0..=stages).map(|stage| stage * each + stage.min(more)).collect() })
}

/// Divides layers with these weights into stages so that the largest sum of weights of a stage, multiplied by the
/// stage's `slowness`, is as small as possible. Of equally good divisions, it returns the most even one: the one with
/// the smallest sum of squares. Weights are numbers of parameters (`partition: parameters`), or measured seconds; the
/// slowness of equal hosts is 1.
///
/// # Errors
/// There are more stages than layers.
pub fn balanced_cuts(weights: &[f64], slowness: &[f64]) -> Result<StageCuts, TooManyStages> {
    let layers = weights.len();
    check(layers, slowness.len())?;
    let mut before = vec![0f64; layers + 1];
    weights.iter().enumerate().for_each(|(i, weight)| before[i + 1] = before[i] + weight);
    let cost = |begin: usize, end: usize, slow: f64| (before[end] - before[begin]) * slow;
    let (largest, _) = best_cuts(layers, slowness, |earlier, stage| Some(f64::max(earlier, stage)), cost);
    let square_below = |earlier: f64, stage: f64| (stage <= largest).then_some(earlier + stage * stage);
    let (_, bounds) = best_cuts(layers, slowness, square_below, cost);
    Ok(StageCuts { bounds })
}

/// Returns the division with the smallest total, and that total. `add` adds a stage's cost to the total of the stages
/// before it, or returns `None` to reject the stage.
fn best_cuts(
    layers: usize,
    slowness: &[f64],
    add: impl Fn(f64, f64) -> Option<f64>,
    cost: impl Fn(usize, usize, f64) -> f64,
) -> (f64, Vec<usize>) {
    // best[j]: the smallest total for the first j layers in the stages so far.
    let mut best: Vec<Option<f64>> = vec![None; layers + 1];
    best[0] = Some(0.0);
    // The first layer of each stage, indexed by the end of the stage.
    let mut starts = Vec::with_capacity(slowness.len());
    for slow in slowness {
        let mut next: Vec<Option<f64>> = vec![None; layers + 1];
        let mut start = vec![0; layers + 1];
        for end in 1..=layers {
            for (begin, earlier) in best[..end].iter().enumerate() {
                let total = earlier.and_then(|earlier| add(earlier, cost(begin, end, *slow)));
                let Some(total) = total else { continue };
                // Of equally good starts, the last one is taken, which gives the stage the fewest layers.
                if next[end].is_none_or(|known| total <= known) {
                    (next[end], start[end]) = (Some(total), begin);
                }
            }
        }
        best = next;
        starts.push(start);
    }
    let mut bounds = vec![layers];
    for start in starts.iter().rev() {
        bounds.push(start[bounds[bounds.len() - 1]]);
    }
    bounds.reverse();
    (best[layers].unwrap_or_default(), bounds)
}

/// Divides layers into stages so that each has about the same number of the `selected` layers (`partition: type:REGEX`).
///
/// # Errors
/// There are more stages than layers.
pub fn kind_cuts(selected: &[bool], stages: usize) -> Result<StageCuts, TooManyStages> {
    let weights: Vec<f64> = selected.iter().map(|selected| f64::from(u8::from(*selected))).collect();
    balanced_cuts(&weights, &vec![1.0; stages])
}

fn check(layers: usize, stages: usize) -> Result<(), TooManyStages> {
    assert!(stages > 0, "a pipeline has at least one stage");
    if stages > layers { Err(TooManyStages { stages, layers }) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lengths(cuts: &StageCuts) -> Vec<usize> {
        (0..cuts.stages()).map(|stage| cuts.layers_of(stage).len()).collect()
    }

    #[test]
    fn layers_are_divided_by_number_by_weight_and_by_speed() {
        assert_eq!(lengths(&uniform_cuts(10, 4).unwrap()), [3, 3, 2, 2]);
        // An embedding and a head that weigh as much as three blocks.
        let weights = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0];
        assert_eq!(lengths(&balanced_cuts(&weights, &[1.0; 2]).unwrap()), [4, 4]);
        assert_eq!(lengths(&balanced_cuts(&weights, &[1.0; 4]).unwrap()), [1, 3, 3, 1]);
        // With a heavy embedding, the other stages are even, and not merely lighter than it.
        let mut weights = vec![4.3];
        weights.extend([1.0; 16]);
        assert_eq!(lengths(&balanced_cuts(&weights, &[1.0; 7]).unwrap()), [1, 3, 3, 3, 3, 2, 2]);
        // The second host is half as fast.
        assert_eq!(lengths(&balanced_cuts(&[1.0; 9], &[1.0, 2.0]).unwrap()), [6, 3]);
    }

    #[test]
    fn more_stages_than_layers_are_refused() {
        insta::assert_snapshot!(uniform_cuts(3, 4).unwrap_err(), @"3 layers cannot be divided among 4 pipeline stages: each needs at least one; use fewer stages");
        assert!(balanced_cuts(&[1.0; 3], &[1.0; 4]).is_err());
    }

    proptest! {
        #[test]
        fn stages_cover_all_layers_and_no_other_cut_is_better(
            weights in proptest::collection::vec(0u32..50, 1..9), slowness in proptest::collection::vec(1u32..4, 1..5),
        ) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let slowness: Vec<f64> = slowness.into_iter().map(f64::from).collect();
            let Ok(cuts) = balanced_cuts(&weights, &slowness) else {
                prop_assert!(slowness.len() > weights.len());
                return Ok(());
            };
            let layers = weights.len();
            prop_assert_eq!((cuts.layers_of(0).start, cuts.layers_of(slowness.len() - 1).end), (0, layers));
            prop_assert!(lengths(&cuts).iter().all(|len| *len > 0));
            for layer in 0..layers {
                prop_assert!(cuts.layers_of(cuts.stage_of(layer)).contains(&layer));
            }
            let most = |bounds: &[usize]| {
                let sums = bounds.windows(2).map(|pair| weights[pair[0]..pair[1]].iter().sum::<f64>());
                sums.zip(&slowness).map(|(sum, slow)| sum * slow).fold(0.0, f64::max)
            };
            let found = most(&cuts.bounds);
            // All other divisions, as sets of inner bounds.
            for set in 0u32..1 << (layers - 1) {
                let inner: Vec<usize> = (1..layers).filter(|i| set >> (i - 1) & 1 == 1).collect();
                if inner.len() + 1 == slowness.len() {
                    prop_assert!(found <= most(&[vec![0], inner, vec![layers]].concat()) + 1e-9);
                }
            }
        }
    }
}
