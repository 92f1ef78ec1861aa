//! The values that a parameter can have.

use super::error::SweepError;
use super::random::RandomStream;
use serde_json::Value;

/// The maximum number of values of a choice.
const MAX_VALUES: usize = 10_000;
/// The number up to which an f64 represents every whole number exactly.
const MAX_INTEGER: i64 = 1 << 53;
/// The number of significant digits of a drawn number: enough for any search, and short on a command line.
const DRAWN_DIGITS: usize = 6;

/// The values that a parameter can have.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ParameterDomain {
    /// One of these values.
    Choice(Vec<Value>),
    /// A number in a range.
    Real {
        /// The smallest number.
        low: f64,
        /// The largest number.
        high: f64,
        /// Whether the logarithm is uniform, so that each order of magnitude is equally likely.
        log: bool,
        /// The number of values that a grid takes, including both ends.
        points: Option<usize>,
    },
    /// A whole number in a range.
    Integer {
        /// The smallest number.
        low: i64,
        /// The largest number.
        high: i64,
        /// The distance between neighbouring numbers, counted from the smallest.
        step: i64,
        /// Whether the logarithm is uniform.
        log: bool,
    },
}

impl ParameterDomain {
    /// Returns a uniform distribution of numbers.
    pub fn uniform(low: f64, high: f64) -> Self {
        Self::Real { low, high, log: false, points: None }
    }

    /// Returns a distribution of numbers whose logarithm is uniform.
    pub fn log_uniform(low: f64, high: f64) -> Self {
        Self::Real { low, high, log: true, points: None }
    }

    /// Returns a uniform distribution of whole numbers, including both ends.
    pub fn integer(low: i64, high: i64) -> Self {
        Self::Integer { low, high, step: 1, log: false }
    }

    /// Returns a choice between values.
    pub fn choice<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Self {
        Self::Choice(values.into_iter().map(Into::into).collect())
    }

    /// Returns the kind, as it is written in a sweep file.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Choice(_) => "choice",
            Self::Real { log: false, .. } => "uniform",
            Self::Real { log: true, .. } => "log_uniform",
            Self::Integer { log: false, .. } => "integer",
            Self::Integer { log: true, .. } => "log_integer",
        }
    }

    /// Checks the domain of the parameter `name`.
    pub(super) fn check(&self, name: &str) -> Result<(), SweepError> {
        let key = format!("parameter {name}");
        let wrong = |found: String, allowed: &str| Err(SweepError::setting(&key, found, allowed));
        match self {
            Self::Choice(values) if values.is_empty() => {
                wrong("a choice of no values".into(), "give at least one value")
            }
            Self::Choice(values) if values.len() > MAX_VALUES => {
                wrong(format!("a choice of {} values", values.len()), "give at most 10000 values")
            }
            Self::Choice(values) => match values.iter().enumerate().find(|(at, value)| values[..*at].contains(value)) {
                Some((_, value)) => wrong(format!("a choice that contains {value} twice"), "give each value once"),
                None => Ok(()),
            },
            Self::Real { low, high, log, points } => {
                let range = format!("{} = [{low}, {high}]", self.kind());
                match () {
                    () if !low.is_finite() || !high.is_finite() => wrong(range, "give finite numbers"),
                    () if *log && *low <= 0.0 => wrong(
                        range,
                        "zero and negative numbers have no logarithm; give a lower end above 0, or use uniform",
                    ),
                    () if low >= high => wrong(range, "give a lower end below the upper end, or one value as a choice"),
                    () if !(high - low).is_finite() => wrong(range, "give ends that are closer to each other"),
                    () if points.is_some_and(|points| !(2..=MAX_VALUES).contains(&points)) => wrong(
                        format!("{range}, points = {}", points.unwrap_or_default()),
                        "give 2 to 10000 points, which include both ends",
                    ),
                    () => Ok(()),
                }
            }
            Self::Integer { low, high, step, log } => {
                let range = format!("{} = [{low}, {high}]", self.kind());
                match () {
                    () if low.unsigned_abs().max(high.unsigned_abs()) > MAX_INTEGER.unsigned_abs() => {
                        wrong(range, "give whole numbers of at most 2^53")
                    }
                    () if low >= high => wrong(range, "give a lower end below the upper end, or one value as a choice"),
                    () if *log && *low < 1 => wrong(range, "give a lower end of at least 1, or use integer"),
                    () if *step < 1 || *step > high - low => wrong(
                        format!("{range}, step = {step}"),
                        "give a step from 1 to the difference between the ends",
                    ),
                    () if *log && *step != 1 => {
                        wrong(format!("{range}, step = {step}"), "leave step out, or use integer")
                    }
                    () => Ok(()),
                }
            }
        }
    }

    /// Returns the number of values; `None` if any number in a range is possible.
    pub fn count(&self) -> Option<u64> {
        match self {
            Self::Choice(values) => Some(values.len() as u64),
            Self::Real { .. } => None,
            Self::Integer { low, high, step, .. } => Some(((high - low) / step + 1).cast_unsigned()),
        }
    }

    /// Returns the number of values that a grid takes.
    pub(super) fn grid_count(&self) -> Option<u64> {
        match self {
            Self::Real { points, .. } => points.map(|points| points as u64),
            other => other.count(),
        }
    }

    /// Returns the value with this index among those that a grid takes.
    pub(super) fn grid_value(&self, index: u64) -> Value {
        match self {
            Self::Choice(values) => values[index as usize].clone(),
            Self::Real { points, .. } => {
                let fraction = index as f64 / (points.unwrap_or(2) - 1).max(1) as f64;
                self.at(fraction)
            }
            Self::Integer { low, step, .. } => (low + index.cast_signed() * step).into(),
        }
    }

    /// Draws a value.
    pub(super) fn draw(&self, random: &mut RandomStream) -> Value {
        match self {
            Self::Choice(values) => values[random.below(values.len() as u64) as usize].clone(),
            Self::Real { .. } | Self::Integer { log: true, .. } => self.at(random.unit()),
            Self::Integer { .. } => self.grid_value(random.below(self.count().unwrap_or(1))),
        }
    }

    /// Returns the ends of the range as coordinates. A whole number is the middle of an interval, so that the numbers
    /// at the ends are as likely as the others.
    pub(super) fn bounds(&self) -> (f64, f64) {
        let scaled = |log: bool, number: f64| if log { number.ln() } else { number };
        match self {
            Self::Choice(values) => (0.0, values.len() as f64),
            Self::Real { low, high, log, .. } => (scaled(*log, *low), scaled(*log, *high)),
            Self::Integer { low, high, step, log } => {
                let half = *step as f64 / 2.0;
                (scaled(*log, *low as f64 - half), scaled(*log, *high as f64 + half))
            }
        }
    }

    /// Returns the coordinate of a number in the range: the number or its logarithm.
    pub(super) fn coordinate(&self, value: &Value) -> Option<f64> {
        let number = value.as_f64()?;
        match self {
            Self::Choice(_) => None,
            Self::Real { log, .. } | Self::Integer { log, .. } => Some(if *log { number.ln() } else { number }),
        }
    }

    /// Returns the value whose [`coordinate`](Self::coordinate) is closest to a number.
    pub(super) fn value_at(&self, coordinate: f64) -> Value {
        match self {
            Self::Choice(values) => values[(coordinate.max(0.0) as usize).min(values.len() - 1)].clone(),
            Self::Real { low, high, log, .. } => {
                let number = if *log { coordinate.exp() } else { coordinate };
                rounded(number).clamp(*low, *high).into()
            }
            Self::Integer { low, high, step, log } => {
                let number = if *log { coordinate.exp() } else { coordinate };
                let steps = ((number - *low as f64) / *step as f64).round() as i64;
                (low + steps.clamp(0, (high - low) / step) * step).into()
            }
        }
    }

    /// Returns the value at a fraction, from 0 to 1, of the range.
    fn at(&self, fraction: f64) -> Value {
        let (low, high) = self.bounds();
        self.value_at(low + fraction * (high - low))
    }

    /// Returns a value near `value`: 0.8 or 1.2 times a number, or a neighbour of a value in a choice.
    pub(super) fn perturbed(&self, value: &Value, random: &mut RandomStream) -> Value {
        let up = random.below(2) == 1;
        match self {
            Self::Choice(values) => {
                let at = values.iter().position(|other| other == value).unwrap_or(0);
                let next = if up { (at + 1).min(values.len() - 1) } else { at.saturating_sub(1) };
                values[next].clone()
            }
            Self::Real { low, high, .. } => {
                let number = value.as_f64().unwrap_or(*low) * if up { 1.2 } else { 0.8 };
                rounded(number).clamp(*low, *high).into()
            }
            Self::Integer { low, high, step, .. } => {
                let number = value.as_i64().unwrap_or(*low);
                let target = ((number as f64 * if up { 1.2 } else { 0.8 } - *low as f64) / *step as f64).round() as i64;
                let index = (number - low) / step;
                // If a fifth of the number is less than half a step, the number moves by one step instead.
                let target = if target == index { index + if up { 1 } else { -1 } } else { target };
                (low + target.clamp(0, (high - low) / step) * step).into()
            }
        }
    }
}

/// Rounds a drawn number to [`DRAWN_DIGITS`] significant digits.
fn rounded(number: f64) -> f64 {
    let text = format!("{number:.digits$e}", digits = DRAWN_DIGITS - 1);
    text.parse().unwrap_or(number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::random::RandomPurpose;
    use super::*;
    use proptest::prelude::*;

    fn domains() -> impl Strategy<Value = ParameterDomain> {
        prop_oneof![
            (1usize..6).prop_map(|count| ParameterDomain::choice((0..count as i64).collect::<Vec<_>>())),
            (-1e3..1e3, 1e-3..1e3).prop_map(|(low, width)| ParameterDomain::uniform(low, low + width)),
            (1e-8..1.0, 1.1..1e4).prop_map(|(low, factor)| ParameterDomain::log_uniform(low, low * factor)),
            (-50i64..50, 1i64..100, 1i64..9).prop_map(|(low, width, step)| {
                ParameterDomain::Integer { low, high: low + width.max(step), step, log: false }
            }),
            (1i64..50, 1i64..1000).prop_map(|(low, width)| ParameterDomain::Integer {
                low,
                high: low + width,
                step: 1,
                log: true
            }),
        ]
    }

    fn contains(domain: &ParameterDomain, value: &Value) -> bool {
        match domain {
            ParameterDomain::Choice(values) => values.contains(value),
            ParameterDomain::Real { low, high, .. } => value.as_f64().is_some_and(|x| (*low..=*high).contains(&x)),
            ParameterDomain::Integer { low, high, step, .. } => {
                value.as_i64().is_some_and(|x| (*low..=*high).contains(&x) && (x - low) % step == 0)
            }
        }
    }

    proptest! {
        #[test]
        fn drawn_perturbed_and_grid_values_are_in_the_domain(domain in domains(), seed: u64) {
            domain.check("x").unwrap();
            let mut random = RandomStream::new(seed, RandomPurpose::Trial(1));
            for _ in 0..20 {
                let drawn = domain.draw(&mut random);
                prop_assert!(contains(&domain, &drawn), "{drawn}");
                let perturbed = domain.perturbed(&drawn, &mut random);
                prop_assert!(contains(&domain, &perturbed), "{perturbed} from {drawn}");
                if let Some(at) = domain.coordinate(&drawn) {
                    let (low, high) = domain.bounds();
                    prop_assert!((low - 1e-9..=high + 1e-9).contains(&at));
                    prop_assert!(contains(&domain, &domain.value_at(at)));
                }
            }
            for index in 0..domain.grid_count().unwrap_or(0).min(50) {
                prop_assert!(contains(&domain, &domain.grid_value(index)));
            }
        }
    }

    #[test]
    fn a_grid_of_a_range_includes_its_ends_and_a_logarithmic_one_has_equal_ratios() {
        let values = |domain: &ParameterDomain| -> Vec<Value> {
            (0..domain.grid_count().unwrap()).map(|index| domain.grid_value(index)).collect()
        };
        let real = |low, high, log| ParameterDomain::Real { low, high, log, points: Some(3) };
        assert_eq!(values(&real(0.0, 1.0, false)), [0.0, 0.5, 1.0]);
        assert_eq!(values(&real(1e-5, 1e-3, true)), [1e-5, 1e-4, 1e-3]);
        assert_eq!(values(&ParameterDomain::Integer { low: 2, high: 9, step: 3, log: false }), [2, 5, 8]);
    }

    #[test]
    fn every_value_of_a_finite_domain_is_drawn_about_equally_often() {
        for domain in [ParameterDomain::integer(3, 6), ParameterDomain::choice(["a", "b", "c", "d"])] {
            let mut random = RandomStream::new(5, RandomPurpose::Order);
            let mut counts = std::collections::BTreeMap::new();
            (0..4000).for_each(|_| *counts.entry(domain.draw(&mut random).to_string()).or_insert(0) += 1);
            assert!(counts.len() == 4 && counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
        }
    }
}
