//! A few elements of each parameter, by which a write into it is found.

use crate::error::{ParamError, Result};
use crate::param::Param;
use crate::precision::FlatRef;
use crate::tensor::residency::with_view;
use candle_core::Device;

/// Elements that are remembered of a parameter.
const SAMPLES: usize = 16;

/// Elements of each parameter, as the engine has left them; nothing of one that was not in memory since.
#[derive(Default)]
pub(crate) struct WeightSamples(Vec<Option<[u32; SAMPLES]>>);

impl WeightSamples {
    /// Forgets all elements.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Compares the parameters in memory of which `which` says so with what is remembered of them, and remembers the others.
    ///
    /// # Errors
    /// [`ParamError::Written`].
    pub(super) fn compare(&mut self, params: &[Param], which: impl Fn(&Param) -> bool) -> Result<()> {
        self.0.resize(params.len(), None);
        for (param, known) in params.iter().zip(&mut self.0).filter(|(param, _)| which(param)) {
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
