//! Lists the parameters of a model without building it.

use super::decoder::DecoderLayers;
use super::{DecoderClassifier, DecoderClassifierConfig, DecoderConfig, Encoder, EncoderConfig, EncoderNaming};
use crate::Result;
use crate::nn::LoraConfig;
use crate::util::lock;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::sync::{Arc, Mutex};

impl DecoderConfig {
    /// Returns the names and shapes of the parameters, in the order in which a model requests them. Their memory is not
    /// allocated.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        let recorder = ShapeRecorder::default();
        self.validate()?;
        // The rotary tables need only one position.
        DecoderLayers::<Self>::build(&Self { ctx: 1, ..self.clone() }, recorder.builder())?;
        Ok(recorder.take_recorded())
    }

    /// Returns the paths of the projections that can have an adapter.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn projections(&self) -> Result<Vec<String>> {
        let with_adapters = Self { lora: Some(LoraConfig::default()), ..self.clone() };
        Ok(adapter_paths(with_adapters.parameters()?))
    }
}

/// Returns the paths of the modules that have an adapter, according to the names of these parameters.
fn adapter_paths(parameters: NamedShapes) -> Vec<String> {
    let names = parameters.into_iter().map(|(name, _)| name);
    names.filter_map(|name| Some(name.strip_suffix(".lora_A.weight")?.to_owned())).collect()
}

impl EncoderConfig {
    /// Returns the names and shapes of the parameters, in the order in which a model requests them. Their memory is not
    /// allocated.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        let recorder = ShapeRecorder::default();
        self.validate()?;
        // The rotary tables need only one position.
        Encoder::with_positions(self, 1, recorder.builder())?;
        Ok(recorder.take_recorded())
    }

    /// Returns the paths of the projections that can have an adapter: those of the blocks, and that of BERT's pooler if
    /// `adapts_pooler` is set.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn projections(&self) -> Result<Vec<String>> {
        let with_adapters = Self { lora: Some(LoraConfig::default()), ..self.clone() };
        let mut paths = adapter_paths(with_adapters.parameters()?);
        if self.adapts_pooler && self.naming == EncoderNaming::Bert {
            paths.push(self.naming.head_dense().to_owned());
        }
        Ok(paths)
    }
}

impl DecoderClassifierConfig {
    /// Returns the names and shapes of the parameters, in the order in which a model requests them. Their memory is not
    /// allocated.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        let recorder = ShapeRecorder::default();
        self.validate()?;
        // The rotary tables need only one position.
        let decoder = DecoderConfig { ctx: 1, ..self.decoder.clone() };
        DecoderClassifier::new(&Self { decoder, ..self.clone() }, recorder.builder())?;
        Ok(recorder.take_recorded())
    }
}

/// A recorder of the names and shapes that a model requests, which allocates no memory for them.
#[derive(Debug, Clone, Default)]
struct ShapeRecorder(Arc<Mutex<NamedShapes>>);

/// Parameter names with their shapes.
type NamedShapes = Vec<(String, Vec<usize>)>;

impl ShapeRecorder {
    fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, Device::Cpu)
    }

    /// Returns all requested names and shapes.
    fn take_recorded(&self) -> NamedShapes {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl SimpleBackend for ShapeRecorder {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        lock(&self.0).push((name.to_owned(), shape.dims().to_vec()));
        // One element, broadcast to the shape.
        Tensor::zeros(1, dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name} was requested without a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
