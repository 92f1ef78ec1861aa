//! A few elements of each parameter, which reveal writes to it.

use crate::error::{ParamError, Result};
use crate::param::Param;
use crate::precision::FlatRef;
use crate::tensor::residency::with_view;
use candle_core::Device;

/// The number of elements that are remembered per parameter.
const SAMPLES_PER_PARAMETER: usize = 16;

/// Elements of each parameter as they were after the engine's last change. `None` for parameters that have not been in
/// memory since that change.
#[derive(Default)]
pub(crate) struct WeightSamples(Vec<Option<[u32; SAMPLES_PER_PARAMETER]>>);

impl WeightSamples {
    /// Forgets all elements.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Compares the parameters in memory that `which` selects with their remembered elements, and remembers elements of
    /// those that have none yet.
    ///
    /// # Errors
    /// [`ParamError::Written`].
    pub(super) fn compare(&mut self, params: &[Param], which: impl Fn(&Param) -> bool) -> Result<()> {
        self.0.resize(params.len(), None);
        for (param, remembered) in params.iter().zip(&mut self.0).filter(|(param, _)| which(param)) {
            // Values on a GPU are not read back for this comparison.
            if param.numel == 0 || !matches!(param.tensor.device(), Device::Cpu) || !param.is_whole() {
                continue;
            }
            let current = with_view(&param.tensor, samples)?;
            if remembered.get_or_insert(current) != &current {
                return Err(ParamError::Written { name: param.name.clone() }.into());
            }
        }
        Ok(())
    }
}

/// Returns evenly spaced elements, including the first and the last.
fn samples(values: FlatRef<'_>) -> [u32; SAMPLES_PER_PARAMETER] {
    let last = values.len() - 1;
    std::array::from_fn(|i| values.get(last * i / (SAMPLES_PER_PARAMETER - 1)).to_bits())
}
