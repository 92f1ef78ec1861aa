//! The measurements of a gradient check, and the verdict on them.
//!
//! ```text
//!   gap     the change in the loss according to two forward passes, minus the change according to the gradient
//!   bend    the difference between the mean of both perturbed forward passes and the unperturbed one
//! ```
//!
//! Both are zero for a linear loss with a correct gradient. Rounding, random draws and kinks (ReLU, max pooling) make
//! both equally large, randomly and independently in every direction. A wrong gradient makes the gap large and does not
//! affect the bend. A large gap therefore counts as a mistake as soon as chance is unlikely to make gaps exceed bends
//! by so much along so many directions.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The maximum number of directions; after that many, the loss counts as one that cannot be judged.
const MAX_DIRECTIONS: u32 = 8;
/// A gap counts as a mistake if the probability that chance causes such a gap, given the bends, is below this limit.
/// For gaps from [`GradientTolerance::large`] to [`MAX_EXPLAINED_GAP`], [`GradientTolerance::seldom`] sets the limit.
const MAX_FALSE_ALARM_PROBABILITY: f64 = 1e-4;
/// The largest relative gap that a missing part of the gradient can explain; above it, a verdict needs more directions.
const MAX_EXPLAINED_GAP: f64 = 4.0;

/// The tolerances of a comparison, for one floating-point format.
pub(super) struct GradientTolerance {
    /// The perturbation, relative to a parameter's values.
    pub step: f64,
    /// The gap that needs an explanation, relative to the expected change in the loss.
    pub allowed: f64,
    /// The relative rounding error in the output of a full forward pass.
    pub noise: f64,
    /// The limit of the output's bend relative to its change; above it, a larger perturbation adds no information.
    pub bends: f64,
    /// The fraction of the expected change above which kinks rarely cause a gap.
    large: f64,
    /// The probability threshold for gaps above `large`. In 16 bits, it is high, because the curvature that the large
    /// perturbations reveal would otherwise hide mistakes.
    seldom: f64,
}

impl GradientTolerance {
    /// Returns the tolerances for a model that computes in `format`.
    pub fn of(format: DType) -> Self {
        match format {
            DType::BF16 => {
                Self { step: 1.0 / 16.0, allowed: 0.15, noise: 2f64.powi(-10), bends: 0.5, large: 0.4, seldom: 0.05 }
            }
            DType::F16 => {
                Self { step: 1.0 / 64.0, allowed: 0.05, noise: 2f64.powi(-13), bends: 0.25, large: 0.15, seldom: 0.03 }
            }
            _ => Self { step: 5e-4, allowed: 2e-3, noise: 2f64.powi(-21), bends: 0.02, large: 0.05, seldom: 0.01 },
        }
    }
}

/// The result of comparing a gradient with differences of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GradientCheckVerdict {
    /// The gradient and the differences agree.
    Right,
    /// They differ by more than the format, the bend of the loss and chance can explain.
    Wrong,
    /// The loss changes too little, or bends too much, for a verdict.
    CannotTell,
}

/// One row of a [`GradientReport`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GradientRow {
    /// The name of the parameter, or of the group of parameters that were perturbed together.
    pub name: String,
    /// The change in the loss along the direction, according to the gradient that the backward pass computed. If
    /// several directions were checked, this field and the next four are those of the direction with the largest
    /// difference relative to the allowed one.
    pub by_gradient: f64,
    /// The change in the loss, measured with forward passes whose parameters are perturbed.
    pub by_difference: f64,
    /// The allowed difference between the two.
    pub allowed: f64,
    /// The expected size of the change for a gradient of this norm.
    pub expected: f64,
    /// The part of the difference that rounding can cause.
    pub noise: f64,
    /// The number of directions that were checked, each in a separate step.
    pub directions: u32,
    /// The verdict.
    pub verdict: GradientCheckVerdict,
}

/// The result of a gradient check: see [`Engine::check_gradients`](crate::Engine::check_gradients).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GradientReport {
    /// The optimizer step, counted from 0; the last one, if there were several.
    pub step: u64,
    /// One row for all parameters together, or one for each parameter or unit.
    pub rows: Vec<GradientRow>,
    /// The reason why nothing could be compared.
    pub not_judged: Option<String>,
}

impl GradientReport {
    /// Returns the rows whose gradient is wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &GradientRow> {
        self.rows.iter().filter(|row| row.verdict == GradientCheckVerdict::Wrong)
    }
}

impl fmt::Display for GradientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.not_judged {
            return write!(f, "gradients were not checked: {why}");
        }
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max("parameter".len());
        write!(f, "{:<width$}  {:>12}  {:>12}  verdict", "parameter", "gradient", "difference")?;
        for row in &self.rows {
            let verdict = match row.verdict {
                GradientCheckVerdict::Right => "right",
                GradientCheckVerdict::Wrong => "WRONG",
                GradientCheckVerdict::CannotTell => "cannot tell",
            };
            write!(f, "\n{:<width$}  {:>12.4e}  {:>12.4e}  {verdict}", row.name, row.by_gradient, row.by_difference)?;
        }
        Ok(())
    }
}

/// The measurements along one direction, added up over ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DirectionSample {
    pub by_difference: f64,
    pub by_gradient: f64,
    pub bend: f64,
    pub noise: f64,
    pub expected: f64,
}

impl DirectionSample {
    pub fn is_finite(&self) -> bool {
        self.by_difference.is_finite() && self.by_gradient.is_finite()
    }

    fn gap(&self) -> f64 {
        (self.by_difference - self.by_gradient).abs()
    }

    /// Returns the size of the change that differences are compared with.
    fn size(&self) -> f64 {
        self.expected.max(self.by_difference.abs() / 8.0)
    }

    /// Returns the gap that the format and the bend explain.
    fn allowed(&self, limits: &GradientTolerance) -> f64 {
        limits.allowed * self.size() + 4.0 * self.noise + 1.25 * self.bend
    }
}

/// The samples of one group of parameters so far, each along a different direction.
#[derive(Debug, Clone, Default)]
pub(super) struct DirectionSamples(Vec<DirectionSample>);

impl DirectionSamples {
    pub fn add(&mut self, look: DirectionSample) {
        self.0.push(look);
    }

    /// Returns the verdict on all samples together, or `None` if another sample is needed.
    pub fn verdict(&self, limits: &GradientTolerance) -> Option<GradientCheckVerdict> {
        // Each value is relative to the size of its change, because samples of later steps belong to other gradients.
        let squares = |of: &dyn Fn(&DirectionSample) -> f64| {
            self.0.iter().map(|look| (of(look) / look.size().max(f64::MIN_POSITIVE)).powi(2)).sum::<f64>()
        };
        let (gap, allowed) = (squares(&DirectionSample::gap), squares(&|look| look.allowed(limits)));
        let (bend, expected) = (squares(&|look| look.bend.hypot(look.noise / 2.0)), squares(&|look| look.expected));
        if self.0.is_empty() {
            return None;
        }
        if gap <= allowed || gap == 0.0 {
            let tells = expected > 0.0 && allowed <= 0.25 * expected;
            return Some(if tells { GradientCheckVerdict::Right } else { GradientCheckVerdict::CannotTell });
        }
        let is_large =
            (limits.large.powi(2)..MAX_EXPLAINED_GAP.powi(2)).contains(&(gap / expected.max(f64::MIN_POSITIVE)));
        let looks = self.0.len() as u32;
        let seldom = match (is_large, looks) {
            (true, 1) => limits.seldom,
            // Each sample is another chance of a false alarm.
            (true, _) => limits.seldom / 3.0,
            (false, _) => MAX_FALSE_ALARM_PROBABILITY,
        };
        match looks {
            looks if by_chance(looks, bend / gap) < seldom => Some(GradientCheckVerdict::Wrong),
            MAX_DIRECTIONS.. => Some(GradientCheckVerdict::CannotTell),
            _ => None,
        }
    }

    /// Returns the row of a report.
    pub fn row(&self, name: String, limits: &GradientTolerance) -> GradientRow {
        let excess = |look: &DirectionSample| look.gap() / look.allowed(limits);
        let look = self.0.iter().max_by(|a, b| excess(a).total_cmp(&excess(b))).copied();
        let look = look.unwrap_or_default();
        GradientRow {
            name,
            by_gradient: look.by_gradient,
            by_difference: look.by_difference,
            allowed: look.allowed(limits),
            expected: look.expected,
            noise: look.noise,
            directions: self.0.len() as u32,
            verdict: self.verdict(limits).unwrap_or(GradientCheckVerdict::CannotTell),
        }
    }
}

/// Returns the probability that the sum of the squares of the bends along `looks` directions is at most `part` times
/// that of the gaps, if both are random, normally distributed and of equal variance: the lower tail of the F
/// distribution, near 0.
fn by_chance(looks: u32, part: f64) -> f64 {
    // 1 / (k B(k, k)), k = looks / 2, by recurrence from the values for looks 1 and 2.
    let first = if looks % 2 == 1 { (1, std::f64::consts::FRAC_2_PI) } else { (2, 1.0) };
    let steps = (first.0..looks).step_by(2).map(|n| 4.0 * f64::from(n + 1) / f64::from(n + 2));
    steps.fold(first.1, |factor, step| factor * step) * part.powf(f64::from(looks) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::mix;

    /// A generator of normally distributed numbers.
    struct Normal(u64);

    impl Normal {
        fn next(&mut self) -> f64 {
            let unit = |word: u64| (word >> 11) as f64 / (1u64 << 53) as f64;
            self.0 += 1;
            let (a, b) = (unit(mix(2 * self.0)), unit(mix(2 * self.0 + 1)));
            (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
        }
    }

    /// Returns the verdict, and the number of samples needed, for losses whose kinks cause gaps and bends of `kinks`
    /// times the expected change, and whose gradient lacks a share `missing` of that change.
    fn judged(
        numbers: &mut Normal,
        limits: &GradientTolerance,
        kinks: f64,
        missing: f64,
    ) -> (GradientCheckVerdict, usize) {
        let mut looks = DirectionSamples::default();
        loop {
            let by_gradient = numbers.next();
            let gap = kinks * numbers.next() + missing * numbers.next();
            let bend = (kinks * numbers.next()).abs();
            looks.add(DirectionSample {
                by_gradient,
                by_difference: by_gradient + gap,
                bend,
                noise: 1e-4,
                expected: 1.0,
            });
            if let Some(verdict) = looks.verdict(limits) {
                return (verdict, looks.0.len());
            }
        }
    }

    #[test]
    fn chance_is_that_of_the_f_distribution() {
        let mut numbers = Normal(7);
        for looks in 1..=4u32 {
            let part = [1e-3, 1e-2, 0.03, 0.05][looks as usize - 1];
            let mut squares = || (0..looks).map(|_| numbers.next().powi(2)).sum::<f64>();
            let met = (0..200_000).filter(|_| squares() < part * squares()).count() as f64 / 200_000.0;
            let said = by_chance(looks, part);
            assert!(met < said * 1.1 && met > said * 0.7, "{looks}: {met} {said}");
        }
    }

    #[test]
    fn kinks_are_hardly_ever_called_a_mistake() {
        for format in [DType::F32, DType::F16, DType::BF16] {
            let limits = GradientTolerance::of(format);
            for (at, kinks) in [0.003, 0.02, 0.1, 0.5].into_iter().enumerate() {
                let mut numbers = Normal(11);
                let all = (0..2000).map(|_| judged(&mut numbers, &limits, kinks, 0.0).0);
                let wrong = all.filter(|verdict| *verdict == GradientCheckVerdict::Wrong).count();
                assert!(wrong <= [5, 10, 60, 140][at], "{format:?} {kinks}: {wrong} of 2,000");
            }
        }
    }

    #[test]
    fn what_is_missing_is_found_at_once_where_the_loss_is_smooth_and_soon_where_it_is_not() {
        let limits = GradientTolerance::of(DType::F32);
        for (kinks, missing, looks) in [(1e-4, 0.5, 1), (0.003, 0.3, 2), (0.01, 0.3, 3), (0.03, 0.3, 5)] {
            let mut numbers = Normal(13);
            let all: Vec<_> = (0..1000).map(|_| judged(&mut numbers, &limits, kinks, missing)).collect();
            let found = all
                .iter()
                .filter(|(verdict, after)| *verdict == GradientCheckVerdict::Wrong && *after <= looks)
                .count();
            assert!(found > 750, "{kinks} {missing}: {found} of 1,000");
        }
    }
}
