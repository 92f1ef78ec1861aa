//! Initial values of a model with adapters: those of the base, of an adapter whose training is continued, and of DoRA's
//! magnitudes.

use crate::error::Result;
use crate::model::base_model::builder_over;
use crate::model::classifier_base::ClassifierBase;
use crate::model::classifier_config::ClassifierConfig;
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

/// The initial values of a model with adapters, for
/// [`EngineBuilder::initial_values`](candle_zero::EngineBuilder::initial_values): the base's weights, and those of an
/// adapter, if there is one. Without an adapter, the layers initialize A randomly and B with 0, and DoRA's magnitudes
/// are initialized with the norms of the rows of their weights (of the columns, in Conv1D's layout).
#[derive(Debug)]
pub struct AdapterInitialValues {
    base: Arc<dyn InitialValues>,
    /// The shapes of the base's matrices.
    shapes: HashMap<String, Vec<usize>>,
    adapter: Option<Adapter>,
    packed: Option<QuantizationRoundTrip>,
}

/// A rule that selects, by name and shape, the weights to pack.
type PackingRule = Box<dyn Fn(&str, &[usize]) -> bool + Send + Sync>;

/// The packing and unpacking that weights undergo before the model uses them, and the rule that selects these weights.
struct QuantizationRoundTrip {
    packing: WeightPacking,
    dtype: DType,
    rule: PackingRule,
}

impl std::fmt::Debug for QuantizationRoundTrip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuantizationRoundTrip")
            .field("packing", &self.packing)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl AdapterInitialValues {
    /// Returns the values for a model of `config`, which is the configuration of `base` with adapters
    /// ([`DecoderConfig::lora`]).
    ///
    /// # Errors
    /// Targets that match no projection; an adapter for a different model or with different settings.
    pub fn new(base: &BaseModel, config: &DecoderConfig, adapter: Option<Adapter>) -> Result<Self> {
        let parameters = config.parameters()?;
        if let Some(lora) = &config.lora {
            lora.check_targets(config.projections()?.iter().map(String::as_str))?;
            lora.check_target_parameters(config.expert_parameters().iter().map(String::as_str))?;
        }
        Self::with_parameters(base.values(), parameters, adapter)
    }

    /// Returns the values for a classifier of `config`, which is the configuration of `base` with adapters
    /// ([`ClassifierConfig::with_lora`]).
    ///
    /// # Errors
    /// Targets that match no projection; an adapter for a different model or with different settings, or of a language
    /// model.
    pub fn of_classifier(base: &ClassifierBase, config: &ClassifierConfig, adapter: Option<Adapter>) -> Result<Self> {
        if let Some(lora) = config.lora() {
            lora.check_targets(config.projections()?.iter().map(String::as_str))?;
            lora.check_target_parameters(config.expert_parameters().iter().map(String::as_str))?;
        }
        adapter.as_ref().map_or(Ok(()), Adapter::check_classifies)?;
        Self::with_parameters(base.values(), config.parameters()?, adapter)
    }

    fn with_parameters(
        base: Arc<dyn InitialValues>,
        parameters: Vec<(String, Vec<usize>)>,
        adapter: Option<Adapter>,
    ) -> Result<Self> {
        if let Some(adapter) = &adapter {
            adapter.check_fits(&parameters)?;
        }
        let shapes = parameters.into_iter().filter(|(_, shape)| shape.len() == 2).collect();
        Ok(Self { base, shapes, adapter, packed: None })
    }

    /// Returns the values for a model of `dtype` whose weights are packed if `rule` returns true
    /// ([`EngineBuilder::quantized`](candle_zero::EngineBuilder::quantized)). Magnitudes are initialized with the norms
    /// of the weights after packing and unpacking, so that an adapter has no effect at first.
    #[must_use]
    pub fn quantized(
        self,
        packing: WeightPacking,
        dtype: DType,
        rule: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { packed: Some(QuantizationRoundTrip { packing, dtype, rule: Box::new(rule) }), ..self }
    }

    /// Returns a builder for a model without an engine; see [`BaseModel::var_builder`]. The builder is useful only with
    /// an adapter: without one, the model requests tensors that do not exist.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        builder_over(Arc::new(self), dtype, device)
    }

    /// Returns the weight that a magnitude belongs to, and the weight's shape.
    fn weight_of(&self, magnitude: &str) -> Option<(String, &[usize])> {
        let name = format!("{}.weight", magnitude.strip_suffix(".lora_magnitude_vector")?);
        let shape = self.shapes.get(&name)?;
        Some((name, shape))
    }

    /// Returns elements of one of the base's weights as the model uses them.
    fn weights(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        let Some(QuantizationRoundTrip { packing, dtype, .. }) =
            self.packed.as_ref().filter(|packed| (packed.rule)(name, shape))
        else {
            return self.base.values(name, shape, range);
        };
        // Elements that are packed together are read together.
        let (unit, numel) = (packing.unit(), shape.iter().product());
        let aligned = range.start / unit * unit..range.end.next_multiple_of(unit).min(numel);
        let mut values = self.base.values(name, shape, aligned.clone())?;
        let mut bytes = vec![0; packing.packed_len(values.len())];
        packing.pack(FlatRef::F32(&values), &mut bytes);
        let mut rounded = Flat::zeros(*dtype, values.len());
        packing.unpack(&bytes, rounded.as_mut());
        let part = rounded.slice(range.start - aligned.start..range.end - aligned.start);
        values.truncate(range.len());
        FlatMut::F32(&mut values).copy_cast(part);
        Ok(values)
    }

    /// Returns the norms of a weight's rows for these outputs, or of its columns in Conv1D's layout.
    fn norms(&self, name: &str, shape: &[usize], outputs: Range<usize>) -> Result<Vec<f32>> {
        const CHUNK_ELEMENTS: usize = 1 << 20;
        let [lines, width] = *shape else { return Ok(Vec::new()) };
        let read = |lines: Range<usize>| self.weights(name, shape, lines.start * width..lines.end * width);
        let step = (CHUNK_ELEMENTS / width.max(1)).max(1);
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

impl InitialValues for AdapterInitialValues {
    fn has(&self, name: &str) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.tensor(name).is_some())
            || self.weight_of(name).is_some()
            || self.base.has(name)
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        if let Some(tensor) = self.adapter.as_ref().and_then(|adapter| adapter.tensor(name)) {
            // The tensor has the shape of the model's parameter of this name.
            return Ok(tensor.values[range].to_vec());
        }
        match self.weight_of(name) {
            Some((weight, shape)) => self.norms(&weight, shape, range),
            None => self.base.values(name, shape, range),
        }
    }

    fn fingerprint(&self) -> u64 {
        let adapter = self.adapter.as_ref().map_or(0, Adapter::fingerprint);
        fnv1a([self.base.fingerprint(), adapter].map(u64::to_le_bytes).as_flattened())
    }
}
