//! Tree-structured Parzen estimator (Bergstra et al. 2011): draws values that are likely among good trials and unlikely
//! among the others.
//!
//! The best `min(ceil(0.1 n), 25)` of n trials are the good ones. For each parameter, a density is estimated from the
//! values of the good trials and another from those of the others; of 24 values drawn from the first, the one with the
//! largest ratio of the first density to the second is taken. Each density includes the prior of the parameter as one
//! more component.

use super::domain::ParameterDomain;
use super::random::RandomStream;
use super::space::{SweepSpace, TrialParameters};
use serde_json::Value;

/// The number of trials whose parameters are drawn at random before the first estimate.
pub(super) const STARTUP_TRIALS: usize = 10;
/// The number of drawn values from which the most promising one is taken.
const CANDIDATES: usize = 24;
/// The maximum number of good trials.
const MAX_GOOD: usize = 25;
/// The maximum number of draws from a component until a value is in the range. After that, a value is drawn uniformly.
const REDRAWS: usize = 100;

/// Returns the parameters of the next trial. `ranked` contains the parameters of earlier trials, the best first.
pub(super) fn suggest(space: &SweepSpace, ranked: &[&TrialParameters], random: &mut RandomStream) -> TrialParameters {
    let good = ranked.len().div_ceil(10).min(MAX_GOOD);
    let (good, others) = ranked.split_at(good);
    let suggested = space.parameters().iter().enumerate().map(|(at, (name, domain))| {
        let values = |trials: &[&TrialParameters]| trials.iter().map(|trial| trial[at].1.clone()).collect::<Vec<_>>();
        let (good_density, other_density) =
            (Density::new(domain, &values(good)), Density::new(domain, &values(others)));
        let candidates = (0..CANDIDATES).map(|_| {
            let point = good_density.draw(random);
            (good_density.log_at(point) - other_density.log_at(point), point)
        });
        let best = candidates.fold((f64::NEG_INFINITY, None), |best, (score, point)| match best {
            (highest, Some(_)) if score <= highest => best,
            _ => (score, Some(point)),
        });
        (name.clone(), best.1.map_or_else(|| domain.draw(random), |point| domain.value_at(point)))
    });
    suggested.collect()
}

/// A density over the values of a parameter.
enum Density {
    /// The probability of each value of a choice.
    Choice(Vec<f64>),
    /// Normal distributions with equal weights, each cut off at the ends of the range.
    Mixture { low: f64, high: f64, components: Vec<Component> },
}

/// A normal distribution that is cut off at the ends of a range.
struct Component {
    mean: f64,
    deviation: f64,
    /// The probability that the distribution assigns to the range before it is cut off at the ends of the range.
    mass: f64,
}

impl Density {
    fn new(domain: &ParameterDomain, values: &[Value]) -> Self {
        if let ParameterDomain::Choice(all) = domain {
            // The prior counts as one trial, spread over all values.
            let prior = 1.0 / all.len() as f64;
            let count = |one: &Value| values.iter().filter(|value| *value == one).count() as f64;
            let total = values.len() as f64 + 1.0;
            return Self::Choice(all.iter().map(|one| (count(one) + prior) / total).collect());
        }
        let (low, high) = domain.bounds();
        let mut means: Vec<f64> = values.iter().filter_map(|value| domain.coordinate(value)).collect();
        means.sort_by(f64::total_cmp);
        let width = high - low;
        let narrowest = width / (1.0 + means.len() as f64).min(100.0);
        let component = |mean: f64, deviation: f64| {
            let mass = normal_cdf((high - mean) / deviation) - normal_cdf((low - mean) / deviation);
            Component { mean, deviation, mass: mass.max(f64::MIN_POSITIVE) }
        };
        let mut components = vec![component(low + width / 2.0, width)];
        for (at, mean) in means.iter().enumerate() {
            let before = if at == 0 { low } else { means[at - 1] };
            let after = means.get(at + 1).copied().unwrap_or(high);
            let deviation = (mean - before).max(after - mean).clamp(narrowest, width);
            components.push(component(*mean, deviation));
        }
        Self::Mixture { low, high, components }
    }

    /// Draws a point: a coordinate, or the index of a value.
    fn draw(&self, random: &mut RandomStream) -> f64 {
        match self {
            Self::Choice(probabilities) => {
                let (drawn, mut sum) = (random.unit(), 0.0);
                let found = probabilities.iter().position(|probability| {
                    sum += probability;
                    drawn < sum
                });
                found.unwrap_or(probabilities.len() - 1) as f64
            }
            Self::Mixture { low, high, components } => {
                let component = &components[random.below(components.len() as u64) as usize];
                for _ in 0..REDRAWS {
                    let point = component.mean + component.deviation * random.normal();
                    if (*low..=*high).contains(&point) {
                        return point;
                    }
                }
                low + random.unit() * (high - low)
            }
        }
    }

    /// Returns the logarithm of the density at a point, without a constant that all densities over a range share.
    fn log_at(&self, point: f64) -> f64 {
        match self {
            Self::Choice(probabilities) => probabilities[(point as usize).min(probabilities.len() - 1)].ln(),
            Self::Mixture { components, .. } => {
                let logs = components.iter().map(|one| {
                    let distance = (point - one.mean) / one.deviation;
                    -0.5 * distance * distance - (one.deviation * one.mass).ln()
                });
                let logs: Vec<f64> = logs.collect();
                let largest = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = logs.iter().map(|log| (log - largest).exp()).sum();
                largest + (sum / logs.len() as f64).ln()
            }
        }
    }
}

/// Returns the value of the standard normal distribution function at `x` (Abramowitz and Stegun 7.1.26, with an error
/// of at most 1e-7).
fn normal_cdf(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let polynomial = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let tail = polynomial.iter().fold(0.0, |sum, factor| (sum * t) + factor) * t * (-z * z).exp();
    if x >= 0.0 { 1.0 - tail / 2.0 } else { tail / 2.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::random::RandomPurpose;
    use super::*;

    #[test]
    fn the_normal_distribution_is_that_of_the_tables() {
        for (x, expected) in [(0.0, 0.5), (1.0, 0.841_344_746), (-1.96, 0.024_997_895), (3.0, 0.998_650_102)] {
            assert!((normal_cdf(x) - expected).abs() < 1e-7, "{x}");
        }
    }

    #[test]
    fn densities_sum_to_one() {
        let domain = ParameterDomain::uniform(-1.0, 3.0);
        let density = Density::new(&domain, &[0.1.into(), 0.15.into(), 2.9.into()]);
        let steps = 40_000;
        let width = 4.0 / f64::from(steps);
        let sum: f64 = (0..steps).map(|i| density.log_at(-1.0 + (f64::from(i) + 0.5) * width).exp() * width).sum();
        // The factor that all densities of a range share is left out.
        assert!((sum / (2.0 * std::f64::consts::PI).sqrt() - 1.0).abs() < 1e-5, "{sum}");
        let Density::Choice(probabilities) = Density::new(&ParameterDomain::choice(["a", "b"]), &["a".into()]) else {
            panic!()
        };
        assert_eq!(probabilities, [0.75, 0.25]);
    }

    #[test]
    fn values_like_those_of_good_trials_are_suggested() {
        let space = SweepSpace::new()
            .with("x", ParameterDomain::uniform(0.0, 1.0))
            .with("kind", ParameterDomain::choice(["a", "b", "c"]));
        let trials: Vec<TrialParameters> = (0..40)
            .map(|i| {
                let x = f64::from(i) / 40.0;
                let kind = if i < 6 { "b" } else { ["a", "c"][i as usize % 2] };
                vec![("x".to_owned(), x.into()), ("kind".to_owned(), kind.into())]
            })
            .collect();
        let ranked: Vec<&TrialParameters> = trials.iter().collect();
        let mut random = RandomStream::new(1, RandomPurpose::Trial(1));
        let suggested: Vec<TrialParameters> = (0..20).map(|_| suggest(&space, &ranked, &mut random)).collect();
        let with_good_x = suggested.iter().filter(|one| one[0].1.as_f64().unwrap() < 0.25).count();
        let with_good_kind = suggested.iter().filter(|one| one[1].1 == "b").count();
        assert!(with_good_x >= 18 && with_good_kind >= 18, "{with_good_x} {with_good_kind}");
    }
}
