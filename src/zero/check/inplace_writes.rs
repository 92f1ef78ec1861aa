//! Writes into parameters that the engine does not make: Candle's in-place calls (`slice_set`, `zero_set`, `Var::set`) on a tensor
//! of the model's.
//!
//! The optimizer's own copy of the weights knows nothing of them, so the next update would overwrite them without a word, at some
//! stages and not at others. A few elements of each parameter are remembered while the engine leaves the weights as they are, and
//! looked at again where they are used: a write of a whole tensor is found, a write of a few elements by chance.

use crate::error::{ParamError, Result};
use crate::param::{Param, UnitId};
use crate::precision::FlatRef;
use crate::tensor::residency::with_view;
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use candle_core::Device;

/// Elements that are remembered of a parameter.
const SAMPLES: usize = 16;

/// Elements of each parameter, as the engine has left them; nothing of one that was not in memory since.
#[derive(Default)]
pub(crate) struct WeightSamples(Vec<Option<[u32; SAMPLES]>>);

impl RankCore {
    /// Looks at all parameters in memory: those that are remembered must be what they were, the others are remembered from now on.
    ///
    /// # Errors
    /// [`ParamError::Written`].
    pub fn look_for_writes(&self) -> Result<()> {
        self.look_at(|_| true)
    }

    /// The same for the parameters of a unit.
    pub(in crate::zero) fn look_for_writes_in(&self, unit: UnitId) -> Result<()> {
        self.look_at(|param| param.unit == unit)
    }

    /// The engine has changed weights, or may have: they are remembered as they are now.
    ///
    /// # Errors
    /// A parameter that cannot be read.
    pub fn remember_weights(&self) -> Result<()> {
        lock(&self.remembered).0.clear();
        self.look_for_writes()
    }

    fn look_at(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        // A check puts back what it moves, and an evaluation is followed by a forward.
        if self.is_checking() || self.is_evaluating() {
            return Ok(());
        }
        let mut remembered = lock(&self.remembered);
        remembered.0.resize(self.params.len(), None);
        for (param, known) in self.params.iter().zip(&mut remembered.0).filter(|(param, _)| which(param)) {
            // What a GPU has is not read back for this.
            if param.numel == 0 || !matches!(param.tensor.device(), Device::Cpu) || !param.is_whole() {
                continue;
            }
            let now = with_view(&param.tensor, samples)?;
            if known.get_or_insert(now) != &now {
                return Err(ParamError::Written { name: param.name.clone() }.into());
            }
        }
        Ok(())
    }
}

/// Elements at even distances, the first and the last among them.
fn samples(values: FlatRef<'_>) -> [u32; SAMPLES] {
    let last = values.len() - 1;
    std::array::from_fn(|i| values.get(last * i / (SAMPLES - 1)).to_bits())
}
