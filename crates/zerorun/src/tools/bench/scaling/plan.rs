//! The jobs that are measured: kinds of scaling, stages, numbers of ranks, and the batch of each.

use clap::ValueEnum;
use serde::Serialize;
use std::fmt;

/// The maximum number of micro batches per rank and step.
const MAX_ACCUMULATION: usize = 1024;

/// The quantity that stays the same when the number of ranks grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ScalingKind {
    /// Fixed work per rank: the batch grows with the number of ranks.
    Weak,
    /// Fixed total work: the batch stays the same.
    Strong,
}

impl fmt::Display for ScalingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weak => "weak",
            Self::Strong => "strong",
        })
    }
}

/// A job, regardless of the kind of scaling for which it is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScalingJob {
    pub(super) stage: u8,
    pub(super) ranks: usize,
    /// The number of micro batches per rank and step.
    pub(super) accumulation: usize,
}

/// A row of the printed table: a job as a point on a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScalingPoint {
    pub(super) kind: ScalingKind,
    pub(super) job: ScalingJob,
}

/// Returns the numbers of ranks to measure, in ascending order: the given numbers or, if only one is given, the powers
/// of two below it and the number itself. If none is given, `cores` takes the place of a single given number.
pub(super) fn rank_counts(given: &[u16], cores: usize) -> Vec<usize> {
    let max = match given {
        [] => cores.max(1),
        [max] => usize::from(*max),
        several => {
            let mut counts: Vec<usize> = several.iter().map(|count| usize::from(*count)).collect();
            counts.sort_unstable();
            counts.dedup();
            return counts;
        }
    };
    std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count < max).chain([max]).collect()
}

/// Returns the points to measure, curve by curve.
///
/// # Errors
/// Fails for strong scaling if a batch that can be divided among all numbers of ranks would have too many micro batches
/// per rank; the text contains the remedy.
pub(super) fn points(kinds: &[ScalingKind], stages: &[u8], ranks: &[usize]) -> Result<Vec<ScalingPoint>, String> {
    let multiple = ranks.iter().try_fold(1, |multiple, count| {
        let next = multiple / greatest_common_divisor(multiple, *count) * count;
        (next / ranks[0] <= MAX_ACCUMULATION).then_some(next)
    });
    let mut points = Vec::new();
    for kind in in_order(kinds) {
        let multiple = match (kind, multiple) {
            (ScalingKind::Weak, _) => None,
            (ScalingKind::Strong, Some(multiple)) => Some(multiple),
            (ScalingKind::Strong, None) => {
                let text = format!(
                    "strong scaling needs a batch that is a multiple of all numbers of ranks; the smallest one for \
                     {ranks:?} would have more than {MAX_ACCUMULATION} micro batches per rank; give other numbers, or \
                     only --scaling weak"
                );
                return Err(text);
            }
        };
        for stage in in_order(stages) {
            for ranks in ranks.iter().copied() {
                let accumulation = multiple.map_or(1, |multiple| multiple / ranks);
                points.push(ScalingPoint { kind, job: ScalingJob { stage, ranks, accumulation } });
            }
        }
    }
    Ok(points)
}

/// Returns each value once, in the order in which it is first given.
fn in_order<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut unique = Vec::new();
    for value in values {
        if !unique.contains(value) {
            unique.push(*value);
        }
    }
    unique
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_number_is_the_largest_and_several_are_taken_as_they_are() {
        for (given, cores, expected) in [
            (&[][..], 1, vec![1]),
            (&[], 6, vec![1, 2, 4, 6]),
            (&[1], 8, vec![1]),
            (&[8], 2, vec![1, 2, 4, 8]),
            (&[3, 1, 3], 2, vec![1, 3]),
        ] {
            assert_eq!(rank_counts(given, cores), expected, "{given:?}");
        }
    }

    #[test]
    fn weak_scaling_keeps_the_work_of_a_rank_and_strong_scaling_that_of_all() {
        let both = [ScalingKind::Weak, ScalingKind::Strong, ScalingKind::Weak];
        let points = points(&both, &[3, 0, 3], &[1, 2, 6]).unwrap();
        let text: Vec<String> = points
            .iter()
            .map(|ScalingPoint { kind, job }| format!("{kind} {} {} {}", job.stage, job.ranks, job.accumulation))
            .collect();
        assert_eq!(
            text,
            [
                "weak 3 1 1",
                "weak 3 2 1",
                "weak 3 6 1",
                "weak 0 1 1",
                "weak 0 2 1",
                "weak 0 6 1",
                "strong 3 1 6",
                "strong 3 2 3",
                "strong 3 6 1",
                "strong 0 1 6",
                "strong 0 2 3",
                "strong 0 6 1"
            ]
        );
    }

    #[test]
    fn numbers_without_a_common_batch_are_refused_for_strong_scaling_alone() {
        let ranks = [7, 11, 13, 17, 19, 1021];
        assert!(points(&[ScalingKind::Weak], &[0], &ranks).is_ok());
        let error = points(&[ScalingKind::Strong], &[0], &ranks).unwrap_err();
        insta::assert_snapshot!(error, @"strong scaling needs a batch that is a multiple of all numbers of ranks; the smallest one for [7, 11, 13, 17, 19, 1021] would have more than 1024 micro batches per rank; give other numbers, or only --scaling weak");
    }
}
