//! The parameters that a sweep varies.

use super::domain::ParameterDomain;
use super::error::SweepError;
use super::random::RandomStream;
use serde_json::Value;

/// The maximum number of parameters.
const MAX_PARAMETERS: usize = 64;

/// The parameters that a sweep varies, each with its values.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SweepSpace {
    parameters: Vec<(String, ParameterDomain)>,
}

/// The values of a trial's parameters, in the order of the space.
pub type TrialParameters = Vec<(String, Value)>;

impl SweepSpace {
    /// Creates a space without parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, domain: ParameterDomain) -> Self {
        self.parameters.push((name.into(), domain));
        self
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &[(String, ParameterDomain)] {
        &self.parameters
    }

    pub(super) fn check(&self) -> Result<(), SweepError> {
        let count = self.parameters.len();
        if count == 0 || count > MAX_PARAMETERS {
            return Err(SweepError::setting("the number of parameters", count, "give 1 to 64 parameters to vary"));
        }
        for (at, (name, domain)) in self.parameters.iter().enumerate() {
            if self.parameters[..at].iter().any(|(other, _)| other == name) {
                return Err(SweepError::Conflict { problem: format!("parameter {name} is given twice; give it once") });
            }
            domain.check(name)?;
        }
        Ok(())
    }

    /// Returns the number of combinations; `None` if it is infinite or above 2^53.
    pub fn count(&self) -> Option<u64> {
        self.product(ParameterDomain::count)
    }

    /// Returns the number of combinations of a grid.
    pub(super) fn grid_count(&self) -> Option<u64> {
        self.product(ParameterDomain::grid_count)
    }

    fn product(&self, count: impl Fn(&ParameterDomain) -> Option<u64>) -> Option<u64> {
        let product = self.parameters.iter().try_fold(1u64, |all, (_, domain)| all.checked_mul(count(domain)?))?;
        (product <= 1 << 53).then_some(product)
    }

    /// Returns the combination with this index, in which the last parameter varies fastest.
    pub(super) fn combination(&self, mut index: u64) -> TrialParameters {
        let mut values: TrialParameters = Vec::with_capacity(self.parameters.len());
        for (name, domain) in self.parameters.iter().rev() {
            let count = domain.grid_count().unwrap_or(1);
            values.push((name.clone(), domain.grid_value(index % count)));
            index /= count;
        }
        values.reverse();
        values
    }

    /// Draws values of all parameters.
    pub(super) fn draw(&self, random: &mut RandomStream) -> TrialParameters {
        self.parameters.iter().map(|(name, domain)| (name.clone(), domain.draw(random))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_has_every_combination_once() {
        let space = SweepSpace::new()
            .with("a", ParameterDomain::choice(["x", "y"]))
            .with("b", ParameterDomain::integer(1, 3))
            .with("c", ParameterDomain::Real { low: 0.0, high: 1.0, log: false, points: Some(2) });
        assert_eq!((space.count(), space.grid_count()), (None, Some(12)));
        let all: std::collections::BTreeSet<String> =
            (0..12).map(|index| format!("{:?}", space.combination(index))).collect();
        assert_eq!(all.len(), 12);
        let text = |index| space.combination(index).iter().map(|(_, v)| v.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(
            (text(0), text(1), text(2), text(11)),
            ("\"x\" 1 0.0".into(), "\"x\" 1 1.0".into(), "\"x\" 2 0.0".into(), "\"y\" 3 1.0".into())
        );
    }
}
