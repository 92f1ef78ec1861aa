//! The division of a model's layers among the stages of a pipeline.
//!
//! A cut is the index of a stage's first layer. Every stage has at least one layer, and its layers are consecutive.

use crate::util::counted;
use std::fmt;
use std::ops::Range;

/// The layers of each stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageCuts {
    /// The first layer of each stage, and the total number of layers.
    bounds: Vec<usize>,
}

/// The error for more stages than layers.
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
            "{} cannot be divided among {}: each stage needs at least one layer; use fewer stages",
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

/// Divides `layers` layers into stages of equal length; if that is not possible, the first stages have one more layer
/// (`partition: uniform`).
///
/// # Errors
/// There are more stages than layers.
pub fn uniform_cuts(layers: usize, stages: usize) -> Result<StageCuts, TooManyStages> {
    check(layers, stages)?;
    let (base, remainder) = (layers / stages, layers % stages);
    Ok(StageCuts { bounds: (0..=stages).map(|stage| stage * base + stage.min(remainder)).collect() })
}

/// Divides layers with these weights into stages so that the largest cost of a stage is as small as possible. The cost
/// is the sum of the stage's weights, multiplied by its `slowness`. Of equally good divisions, the most even one is
/// returned: the one with the smallest sum of squared costs. Weights are numbers of parameters
/// (`partition: parameters`), or measured seconds; the slowness of equal hosts is 1.
///
/// # Errors
/// There are more stages than layers.
pub fn balanced_cuts(weights: &[f64], slowness: &[f64]) -> Result<StageCuts, TooManyStages> {
    check(weights.len(), slowness.len())?;
    let prefix_sums = sums_before(weights.iter().copied());
    let cost = |stage: usize, layers: Range<usize>| {
        Some((prefix_sums[layers.end] - prefix_sums[layers.start]) * slowness[stage])
    };
    Ok(most_even_cuts(weights.len(), slowness.len(), cost).expect("a division exists if no stage is rejected"))
}

/// Divides layers into stages so that the slowest stage is as fast as possible, and no stage needs more memory than its
/// rank has (`partition: time`). `seconds` contains, for each stage, the time of each layer on the rank that holds the
/// stage; `bytes` is the memory of each layer, and `limits` is the memory available to each stage. Of equally good
/// divisions, the one with the smallest sum of squared times is returned. Returns `None` if no division fits.
///
/// # Errors
/// There are more stages than layers.
///
/// ```
/// use candle_zero::pipeline::timed_cuts;
///
/// // The second rank takes twice as long for each of the six layers.
/// let seconds = [vec![1.0; 6], vec![2.0; 6]];
/// let cuts = timed_cuts(&seconds, &[100; 6], &[1000, 1000])?.unwrap();
/// assert_eq!([cuts.layers_of(0).len(), cuts.layers_of(1).len()], [4, 2]);
/// // The first rank has memory for three layers.
/// let cuts = timed_cuts(&seconds, &[100; 6], &[300, 1000])?.unwrap();
/// assert_eq!([cuts.layers_of(0).len(), cuts.layers_of(1).len()], [3, 3]);
/// assert_eq!(timed_cuts(&seconds, &[100; 6], &[300, 200])?, None);
/// # Ok::<(), candle_zero::pipeline::TooManyStages>(())
/// ```
pub fn timed_cuts(seconds: &[Vec<f64>], bytes: &[u64], limits: &[u64]) -> Result<Option<StageCuts>, TooManyStages> {
    let (layers, stages) = (bytes.len(), seconds.len());
    assert!(
        limits.len() == stages && seconds.iter().all(|times| times.len() == layers),
        "each stage needs a limit, and a time for each layer"
    );
    check(layers, stages)?;
    let prefix_sums: Vec<Vec<f64>> = seconds.iter().map(|times| sums_before(times.iter().copied())).collect();
    let memory = |layers: Range<usize>| bytes[layers].iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    let cost = |stage: usize, layers: Range<usize>| {
        let seconds = prefix_sums[stage][layers.end] - prefix_sums[stage][layers.start];
        (memory(layers) <= limits[stage]).then_some(seconds)
    };
    Ok(most_even_cuts(layers, stages, cost))
}

/// Returns, for each position, the sum of all values before it.
fn sums_before(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let sums = values.scan(0.0, |sum, value| {
        *sum += value;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

/// Returns the division in which the largest cost of a stage is as small as possible, and of several such divisions the
/// one with the smallest sum of squared costs. `cost` returns the cost of a stage with these layers, or `None` to
/// reject the stage.
fn most_even_cuts(
    layers: usize,
    stages: usize,
    cost: impl Fn(usize, Range<usize>) -> Option<f64>,
) -> Option<StageCuts> {
    let (largest, _) = best_cuts(layers, stages, |earlier, stage| Some(f64::max(earlier, stage)), &cost)?;
    let square_below = |earlier: f64, stage: f64| (stage <= largest).then_some(earlier + stage * stage);
    best_cuts(layers, stages, square_below, &cost).map(|(_, bounds)| StageCuts { bounds })
}

/// Returns the division with the smallest total, and that total. `add` adds a stage's cost to the total of the stages
/// before it, or returns `None` to reject the stage.
fn best_cuts(
    layers: usize,
    stages: usize,
    add: impl Fn(f64, f64) -> Option<f64>,
    cost: impl Fn(usize, Range<usize>) -> Option<f64>,
) -> Option<(f64, Vec<usize>)> {
    // best[j] is the smallest total for the first j layers in the stages so far.
    let mut best: Vec<Option<f64>> = vec![None; layers + 1];
    best[0] = Some(0.0);
    // The first layer of each stage, indexed by the end of the stage.
    let mut starts = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut next: Vec<Option<f64>> = vec![None; layers + 1];
        let mut start = vec![0; layers + 1];
        for end in 1..=layers {
            for (begin, earlier) in best[..end].iter().enumerate() {
                let Some(earlier) = *earlier else { continue };
                let Some(total) = cost(stage, begin..end).and_then(|cost| add(earlier, cost)) else { continue };
                // Of equally good starts, the last one is taken, which gives the stage the fewest layers.
                if next[end].is_none_or(|current| total <= current) {
                    (next[end], start[end]) = (Some(total), begin);
                }
            }
        }
        best = next;
        starts.push(start);
    }
    let total = best[layers]?;
    let mut bounds = vec![layers];
    for start in starts.iter().rev() {
        bounds.push(start[bounds[bounds.len() - 1]]);
    }
    bounds.reverse();
    Some((total, bounds))
}

/// Divides layers into stages so that each stage has about the same number of the `selected` layers
/// (`partition: type:REGEX`).
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
        // The embedding and the head each weigh as much as three blocks.
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
        insta::assert_snapshot!(uniform_cuts(3, 4).unwrap_err(), @"3 layers cannot be divided among 4 pipeline stages: each stage needs at least one layer; use fewer stages");
        assert!(balanced_cuts(&[1.0; 3], &[1.0; 4]).is_err());
    }

    /// Returns the bounds of all divisions of `layers` layers into `stages` stages.
    fn all_bounds(layers: usize, stages: usize) -> Vec<Vec<usize>> {
        let inner = |set: u32| (1..layers).filter(move |i| set >> (i - 1) & 1 == 1).collect::<Vec<_>>();
        let all = (0u32..1 << (layers - 1)).map(inner).filter(|inner| inner.len() + 1 == stages);
        all.map(|inner| [vec![0], inner, vec![layers]].concat()).collect()
    }

    proptest! {
        #[test]
        fn no_cut_that_fits_is_faster_and_one_is_found_if_there_is_any(
            (seconds, bytes, limits) in (1usize..9, 1usize..5).prop_flat_map(|(layers, stages)| {
                let row = proptest::collection::vec((0u32..50).prop_map(f64::from), layers);
                let bytes = proptest::collection::vec(0u64..20, layers);
                (proptest::collection::vec(row, stages), bytes, proptest::collection::vec(0u64..80, stages))
            }),
        ) {
            let (layers, stages) = (bytes.len(), seconds.len());
            let Ok(cuts) = timed_cuts(&seconds, &bytes, &limits) else {
                prop_assert!(stages > layers);
                return Ok(());
            };
            let slowest = |bounds: &[usize]| {
                let sum = |stage: usize| seconds[stage][bounds[stage]..bounds[stage + 1]].iter().sum::<f64>();
                (0..stages).map(sum).fold(0.0, f64::max)
            };
            let fits = |bounds: &[usize]| {
                let sum = |stage: usize| bytes[bounds[stage]..bounds[stage + 1]].iter().sum::<u64>();
                (0..stages).all(|stage| sum(stage) <= limits[stage])
            };
            let fitting: Vec<Vec<usize>> = all_bounds(layers, stages).into_iter().filter(|bounds| fits(bounds)).collect();
            let fastest = fitting.iter().map(|bounds| slowest(bounds)).reduce(f64::min);
            prop_assert_eq!(cuts.as_ref().map(|cuts| slowest(&cuts.bounds)), fastest);
            prop_assert!(cuts.is_none_or(|cuts| fitting.contains(&cuts.bounds)));
        }

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
            let largest = |bounds: &[usize]| {
                let sums = bounds.windows(2).map(|pair| weights[pair[0]..pair[1]].iter().sum::<f64>());
                sums.zip(&slowness).map(|(sum, slow)| sum * slow).fold(0.0, f64::max)
            };
            let found = largest(&cuts.bounds);
            for bounds in all_bounds(layers, slowness.len()) {
                prop_assert!(found <= largest(&bounds) + 1e-9);
            }
        }
    }
}
