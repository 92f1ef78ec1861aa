//! What a check of gradients has measured, and what it makes of it.
//!
//! ```text
//!   gap     the change of the loss by two forwards, less that by the gradient
//!   bend    how far the mean of both forwards is from the one between them
//! ```
//!
//! Both are zero for a straight loss with a true gradient. Rounding, draws and kinks (ReLU, max pooling) make one as large as the
//! other, each by chance, along every direction anew. A mistake makes the gap large and leaves the bend alone. So a gap that is too
//! large is a mistake as soon as chance hardly makes gaps so much larger than bends along so many directions.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Directions along which a gap is looked at before the loss counts as one that cannot be judged.
const LOOKS: u32 = 8;
/// A gap is a mistake if chance makes one with such bends more seldom than this.
const SELDOM: f64 = 1e-4;
/// A gap larger than this, as a part of the change that is expected, is not that of a gradient with a part missing: it needs more
/// looks.
const LARGEST: f64 = 4.0;

/// How exact a comparison is in a format.
pub(super) struct GradientTolerance {
    /// The size of moves, as a part of a parameter's values.
    pub step: f64,
    /// The gap that needs an explanation, as a part of the expected change of the loss.
    pub allowed: f64,
    /// What the rounding of a whole forward makes of its output, as a part of it.
    pub noise: f64,
    /// A move bends the output by more than this part of its change: a longer one says no more.
    pub bends: f64,
    /// Kinks seldom make a gap of this part of the expected change,
    large: f64,
    /// so for those this is seldom enough.
    seldom: f64,
}

impl GradientTolerance {
    /// Those of a model that computes in `format`.
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

/// What became of comparing a gradient with differences of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientVerdict {
    /// Both agree.
    Right,
    /// They differ by more than the format, the bend of the loss and chance explain.
    Wrong,
    /// The loss changes too little, or bends too much, to tell.
    CannotTell,
}

/// One row of a [`GradientReport`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GradientRow {
    /// The parameter, or what was moved together.
    pub name: String,
    /// How the loss changes along the direction, by the gradient that backward gave. Of several directions that with the largest
    /// difference counts, here and below.
    pub by_gradient: f64,
    /// The same by running forward with the parameters moved.
    pub by_difference: f64,
    /// What the two may differ by.
    pub allowed: f64,
    /// The size that such a change has, for a gradient of this length.
    pub expected: f64,
    /// What rounding may make of the difference.
    pub noise: f64,
    /// Directions that were tried, each in a step of its own.
    pub directions: u32,
    /// What came of it.
    pub verdict: GradientVerdict,
}

/// What a check of gradients has found: see [`Engine::check_gradients`](crate::Engine::check_gradients).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GradientReport {
    /// The optimizer step, from 0; the last, if there were several.
    pub step: u64,
    /// One row for all parameters, or one for each.
    pub rows: Vec<GradientRow>,
    /// Why nothing could be compared.
    pub not_judged: Option<String>,
}

impl GradientReport {
    /// The rows whose gradient is wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &GradientRow> {
        self.rows.iter().filter(|row| row.verdict == GradientVerdict::Wrong)
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
                GradientVerdict::Right => "right",
                GradientVerdict::Wrong => "WRONG",
                GradientVerdict::CannotTell => "cannot tell",
            };
            write!(f, "\n{:<width$}  {:>12.4e}  {:>12.4e}  {verdict}", row.name, row.by_gradient, row.by_difference)?;
        }
        Ok(())
    }
}

/// What was measured along one direction, added up over ranks.
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

    /// The size of the change that counts.
    fn size(&self) -> f64 {
        self.expected.max(self.by_difference.abs() / 8.0)
    }

    /// The gap that the format and the bend explain.
    fn allowed(&self, limits: &GradientTolerance) -> f64 {
        limits.allowed * self.size() + 4.0 * self.noise + 1.25 * self.bend
    }
}

/// The looks at one group of parameters so far, each along another direction.
#[derive(Debug, Clone, Default)]
pub(super) struct DirectionSamples(Vec<DirectionSample>);

impl DirectionSamples {
    pub fn add(&mut self, look: DirectionSample) {
        self.0.push(look);
    }

    /// What they say together; nothing if another one is needed.
    pub fn verdict(&self, limits: &GradientTolerance) -> Option<GradientVerdict> {
        // As parts of the size of each change: those of later steps are of other gradients.
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
            return Some(if tells { GradientVerdict::Right } else { GradientVerdict::CannotTell });
        }
        let is_large = (limits.large.powi(2)..LARGEST.powi(2)).contains(&(gap / expected.max(f64::MIN_POSITIVE)));
        let looks = self.0.len() as u32;
        let seldom = match (is_large, looks) {
            (true, 1) => limits.seldom,
            // Each look is another chance to be mistaken.
            (true, _) => limits.seldom / 3.0,
            (false, _) => SELDOM,
        };
        match looks {
            looks if by_chance(looks, bend / gap) < seldom => Some(GradientVerdict::Wrong),
            LOOKS.. => Some(GradientVerdict::CannotTell),
            _ => None,
        }
    }

    /// The row of a report.
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
            verdict: self.verdict(limits).unwrap_or(GradientVerdict::CannotTell),
        }
    }
}

/// How seldom the squares of `looks` gaps add up to so much more than those of their bends that the second are this part
/// of the first, if both are by chance, normal and of one size: the lower tail of the F distribution, near 0.
fn by_chance(looks: u32, part: f64) -> f64 {
    // 1 / (k B(k, k)), k = looks / 2, from those for 1 and 2.
    let first = if looks % 2 == 1 { (1, std::f64::consts::FRAC_2_PI) } else { (2, 1.0) };
    let steps = (first.0..looks).step_by(2).map(|n| 4.0 * f64::from(n + 1) / f64::from(n + 2));
    steps.fold(first.1, |factor, step| factor * step) * part.powf(f64::from(looks) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::mix;

    /// Numbers as a normal distribution has them.
    struct Normal(u64);

    impl Normal {
        fn next(&mut self) -> f64 {
            let unit = |word: u64| (word >> 11) as f64 / (1u64 << 53) as f64;
            self.0 += 1;
            let (a, b) = (unit(mix(2 * self.0)), unit(mix(2 * self.0 + 1)));
            (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
        }
    }

    /// The verdict on losses whose kinks make gaps and bends of `kinks` times the change that is expected, and whose gradient
    /// leaves out `missing` of it, with the looks that it took.
    fn judged(numbers: &mut Normal, limits: &GradientTolerance, kinks: f64, missing: f64) -> (GradientVerdict, usize) {
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
                let wrong = all.filter(|verdict| *verdict == GradientVerdict::Wrong).count();
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
            let found =
                all.iter().filter(|(verdict, after)| *verdict == GradientVerdict::Wrong && *after <= looks).count();
            assert!(found > 750, "{kinks} {missing}: {found} of 1,000");
        }
    }
}
