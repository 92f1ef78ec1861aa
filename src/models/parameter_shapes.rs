//! The parameters of a model, without a model.

use super::decoder::DecoderLayers;
use super::{Bert, BertConfig, DecoderConfig};
use crate::Result;
use crate::nn::LoraConfig;
use crate::util::lock;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::sync::{Arc, Mutex};

impl DecoderConfig {
    /// Names and shapes of the parameters, in the order in which a model asks for them. Nothing of their size is allocated.
    ///
    /// # Errors
    /// Sizes that make no model.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        let asked = ShapeRecorder::default();
        self.validate()?;
        // With tables of one position only.
        DecoderLayers::<Self>::build(&Self { ctx: 1, ..self.clone() }, asked.builder())?;
        Ok(asked.names())
    }

    /// Paths of the projections that can have an adapter.
    ///
    /// # Errors
    /// Sizes that make no model.
    pub fn projections(&self) -> Result<Vec<String>> {
        let all = Self { lora: Some(LoraConfig::default()), ..self.clone() };
        let names = all.parameters()?.into_iter().map(|(name, _)| name);
        Ok(names.filter_map(|name| Some(name.strip_suffix(".lora_A.weight")?.to_owned())).collect())
    }
}

impl BertConfig {
    /// Names and shapes of the parameters, in the order in which a model asks for them. Nothing of their size is allocated.
    ///
    /// # Errors
    /// Sizes that make no model.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        let asked = ShapeRecorder::default();
        Bert::new(self, asked.builder())?;
        Ok(asked.names())
    }
}

/// Records the names and shapes that a model asks for, without memory for them.
#[derive(Debug, Clone, Default)]
struct ShapeRecorder(Arc<Mutex<NamedShapes>>);

/// Names and shapes.
type NamedShapes = Vec<(String, Vec<usize>)>;

impl ShapeRecorder {
    fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, Device::Cpu)
    }

    /// All that was asked for.
    fn names(&self) -> NamedShapes {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl SimpleBackend for ShapeRecorder {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        lock(&self.0).push((name.to_owned(), shape.dims().to_vec()));
        // One element, seen as often as the shape says.
        Tensor::zeros(1, dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name} was asked for without a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
