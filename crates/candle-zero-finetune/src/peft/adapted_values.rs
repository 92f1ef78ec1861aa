//! First values of a model with adapters: the base's, an adapter's that goes on training, and what DoRA's magnitudes begin as.

use crate::error::Result;
use crate::model::base_model::builder_over;
use crate::model::merged_model::layout_of;
use crate::{Adapter, BaseModel};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use candle_zero::engine::InitialValues;
use candle_zero::models::DecoderConfig;
use candle_zero::nn::WeightLayout;
use candle_zero::precision::{Flat, FlatMut, FlatRef, WeightPacking};
use candle_zero::util::fnv1a;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// First values of a model with adapters, for
/// [`EngineBuilder::initial_values`](candle_zero::EngineBuilder::initial_values): the base's weights, and an adapter's where there
/// is one. Without one A begins at random and B at 0, as the layers ask for it, and a magnitude of DoRA's as the lengths of
/// its weight's rows.
#[derive(Debug)]
pub struct AdaptedValues {
    base: Arc<dyn InitialValues>,
    /// Of the base's matrices.
    shapes: HashMap<String, Vec<usize>>,
    adapter: Option<Adapter>,
    packed: Option<PackedWeights>,
}

/// Weights that the model computes with as they come out of a packing.
struct PackedWeights {
    packing: WeightPacking,
    dtype: DType,
    rule: fn(&str, &[usize]) -> bool,
}

impl std::fmt::Debug for PackedWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedWeights")
            .field("packing", &self.packing)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl AdaptedValues {
    /// The values for a model of `config`, that of `base` with adapters ([`DecoderConfig::lora`]).
    ///
    /// # Errors
    /// Targets that no projection has; an adapter for another model or with other settings.
    pub fn new(base: &BaseModel, config: &DecoderConfig, adapter: Option<Adapter>) -> Result<Self> {
        let parameters = config.parameters()?;
        if let Some(lora) = &config.lora {
            lora.check_targets(config.projections()?.iter().map(String::as_str))?;
        }
        if let Some(adapter) = &adapter {
            adapter.check_fits(&parameters)?;
        }
        let shapes = parameters.into_iter().filter(|(_, shape)| shape.len() == 2).collect();
        Ok(Self { base: base.values(), shapes, adapter, packed: None })
    }

    /// The same for a model of `dtype` whose weights are packed where `rule` says so
    /// ([`EngineBuilder::quantized`](candle_zero::EngineBuilder::quantized)): magnitudes begin as the lengths of what comes out of the
    /// packing, so that an adapter begins without effect.
    #[must_use]
    pub fn quantized(self, packing: WeightPacking, dtype: DType, rule: fn(&str, &[usize]) -> bool) -> Self {
        Self { packed: Some(PackedWeights { packing, dtype, rule }), ..self }
    }

    /// The same for a model without an engine; see [`BaseModel::var_builder`]. Of use with an adapter: otherwise the model asks for
    /// one that is not there.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        builder_over(Arc::new(self), dtype, device)
    }

    /// The weight that a magnitude belongs to, and its shape.
    fn weight_of(&self, magnitude: &str) -> Option<(String, &[usize])> {
        let name = format!("{}.weight", magnitude.strip_suffix(".lora_magnitude_vector")?);
        let shape = self.shapes.get(&name)?;
        Some((name, shape))
    }

    /// Elements of a base's weight that the model computes with.
    fn weights(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        let Some(PackedWeights { packing, dtype, .. }) =
            self.packed.as_ref().filter(|packed| (packed.rule)(name, shape))
        else {
            return self.base.values(name, shape, range);
        };
        // What is packed together is read together.
        let (unit, numel) = (packing.unit(), shape.iter().product());
        let whole = range.start / unit * unit..range.end.next_multiple_of(unit).min(numel);
        let mut values = self.base.values(name, shape, whole.clone())?;
        let mut bytes = vec![0; packing.packed_len(values.len())];
        packing.pack(FlatRef::F32(&values), &mut bytes);
        let mut rounded = Flat::zeros(*dtype, values.len());
        packing.unpack(&bytes, rounded.as_mut());
        let part = rounded.slice(range.start - whole.start..range.end - whole.start);
        values.truncate(range.len());
        FlatMut::F32(&mut values).copy_cast(part);
        Ok(values)
    }

    /// The lengths of a weight's rows for these outputs.
    fn lengths(&self, name: &str, shape: &[usize], outputs: Range<usize>) -> Result<Vec<f32>> {
        const ELEMENTS: usize = 1 << 20;
        let [lines, width] = *shape else { return Ok(Vec::new()) };
        let read = |lines: Range<usize>| self.weights(name, shape, lines.start * width..lines.end * width);
        let step = (ELEMENTS / width.max(1)).max(1);
        let square = |x: &f32| f64::from(*x) * f64::from(*x);
        let mut sums = vec![0f64; outputs.len()];
        match layout_of(name) {
            WeightLayout::OutIn => {
                for first in outputs.clone().step_by(step) {
                    let lines = first..outputs.end.min(first + step);
                    for (line, values) in lines.clone().zip(read(lines)?.chunks_exact(width.max(1))) {
                        sums[line - outputs.start] = values.iter().map(square).sum();
                    }
                }
            }
            WeightLayout::InOut => {
                for first in (0..lines).step_by(step) {
                    for values in read(first..lines.min(first + step))?.chunks_exact(width.max(1)) {
                        sums.iter_mut().zip(&values[outputs.clone()]).for_each(|(sum, x)| *sum += square(x));
                    }
                }
            }
        }
        Ok(sums.into_iter().map(|sum| sum.sqrt() as f32).collect())
    }
}

impl InitialValues for AdaptedValues {
    fn has(&self, name: &str) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.tensor(name).is_some())
            || self.weight_of(name).is_some()
            || self.base.has(name)
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        if let Some(tensor) = self.adapter.as_ref().and_then(|adapter| adapter.tensor(name)) {
            // Its shape is that of the model's parameter of this name.
            return Ok(tensor.values[range].to_vec());
        }
        match self.weight_of(name) {
            Some((weight, shape)) => self.lengths(&weight, shape, range),
            None => self.base.values(name, shape, range),
        }
    }

    fn fingerprint(&self) -> u64 {
        let adapter = self.adapter.as_ref().map_or(0, Adapter::fingerprint);
        fnv1a([self.base.fingerprint(), adapter].map(u64::to_le_bytes).as_flattened())
    }
}
