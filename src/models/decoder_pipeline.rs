//! A decoder as layers of a pipeline: the token embedding, the layers before the first block, each block, and the
//! output with the loss.

use super::config_checks::invalid_field;
use super::decoder::{DecoderInputLayers, DecoderOutputLayers, SharedRotaries};
use super::decoder_block::{BlockContext, DecoderBlock};
use super::language_model::logits;
use super::{DecoderConfig, IntoDecoderConfig};
use crate::error::Result;
use crate::nn::{Embedding, KeyValueCache, LossOptions, Sequences, WeightLayout, linear_cross_entropy_with};
use crate::pipeline::{InferenceState, PipelineLayer, PipelineModule};
use crate::util::lock;
use crate::zero::Unit;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use std::sync::{Arc, Mutex};

/// A micro batch of tokens for a language model.
#[derive(Debug, Clone)]
pub struct DecoderBatch {
    /// The ids, `[batch, time]` (u32).
    pub ids: Tensor,
    /// The token after each id, `[batch, time]` (u32, or i64 with -100 for targets that do not count).
    pub targets: Tensor,
    /// The texts that each row contains, if rows may contain more than one.
    pub sequences: Option<Sequences>,
    /// The divisor of the sum of cross entropies. Default: the number of targets that count in this micro batch.
    pub divisor: Option<f64>,
}

impl DecoderBatch {
    /// Returns a micro batch in which each row is one text and every target counts.
    pub fn new(ids: Tensor, targets: Tensor) -> Self {
        Self { ids, targets, sequences: None, divisor: None }
    }

    /// Returns a micro batch for inference, in which each row is one text. Inference needs no targets.
    pub fn for_inference(ids: Tensor) -> Self {
        Self::new(ids.clone(), ids)
    }
}

/// Returns a language model as layers of a pipeline, whose output is the loss: the mean cross entropy of the targets,
/// as in [`LanguageModel::loss_packed`](super::LanguageModel::loss_packed). In inference, the output is the logits.
/// Names and initial values of the parameters are those of the [`Decoder`](super::Decoder), [`Gpt`](super::Gpt) or
/// [`Llama`](super::Llama) with the same sizes.
///
/// # Errors
/// Invalid sizes; a mixture of experts with a load-balancing loss.
pub fn decoder_pipeline(sizes: &impl IntoDecoderConfig) -> Result<PipelineModule<DecoderBatch>> {
    let config = Arc::new(sizes.decoder()?);
    if config.mixture.as_ref().is_some_and(|mixture| mixture.balance_coefficient.is_some()) {
        let allowed = "absent in a pipeline, whose stages do not have the routers of all blocks; turn the \
                       load-balancing loss off";
        return Err(invalid_field("router_aux_loss_coef", "present", allowed));
    }
    let rotaries = Arc::new(Mutex::new(SharedRotaries::default()));
    let shared = |config: &Arc<DecoderConfig>| config.clone();
    let module = PipelineModule::new(|batch: &DecoderBatch| Ok(batch.ids.clone()), |loss, _| Ok(loss.clone()));
    let (embedding, input, output) = (shared(&config), shared(&config), shared(&config));
    let mut module = module
        .layer("", move |vb| embedding.token_embedding(&vb))
        .layer("", move |vb| DecoderInputLayers::new(&input, &vb).map(InputLayer));
    for block in 0..config.blocks.len() {
        let (config, rotaries) = (shared(&config), rotaries.clone());
        module = module.layer("", move |vb| {
            let block = config.block(block, &mut lock(&rotaries), &vb)?;
            Ok(BlockLayer { block, ctx: config.ctx })
        });
    }
    let ctx = config.ctx;
    let example = move |samples: usize, device: &Device| {
        Ok(DecoderBatch::for_inference(Tensor::zeros((samples, ctx), DType::U32, device)?))
    };
    Ok(module.layer("", move |vb| OutputLayer::new(&output, &vb)).with_context(ctx).example(example))
}

/// The scale, positions and dropout after the token embedding.
struct InputLayer(DecoderInputLayers);

impl PipelineLayer<DecoderBatch> for InputLayer {
    fn forward(&self, x: &Tensor, batch: &DecoderBatch) -> candle_core::Result<Tensor> {
        self.0.forward(x.clone(), 0, batch.sequences.as_ref())
    }

    fn infer(&self, x: &Tensor, batch: &DecoderBatch, state: &mut InferenceState) -> candle_core::Result<Tensor> {
        self.0.forward(x.clone(), state.position().unwrap_or(0), batch.sequences.as_ref())
    }
}

/// One block.
struct BlockLayer {
    block: Unit<DecoderBlock>,
    ctx: usize,
}

impl PipelineLayer<DecoderBatch> for BlockLayer {
    fn forward(&self, x: &Tensor, batch: &DecoderBatch) -> candle_core::Result<Tensor> {
        let sequences = batch.sequences.clone();
        let run = move |block: &DecoderBlock, x: &Tensor| {
            block.run(x, BlockContext { sequences: sequences.as_ref(), ..BlockContext::default() })
        };
        self.block.forward_by(x, run)
    }

    fn infer(&self, x: &Tensor, batch: &DecoderBatch, state: &mut InferenceState) -> candle_core::Result<Tensor> {
        match state.get_or_init(|| KeyValueCache::new(self.ctx)) {
            Some(cache) => {
                let context = BlockContext { cache: Some(cache), ..BlockContext::default() };
                self.block.evaluate(|block| block.run(x, context))
            }
            None => self.forward(x, batch),
        }
    }
}

/// The last norm, the output projection and the loss.
struct OutputLayer {
    output: DecoderOutputLayers,
    /// The token embedding, if it is also the output projection.
    embedding: Option<Embedding>,
}

impl OutputLayer {
    fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let embedding = config.tie_word_embeddings.then(|| config.token_embedding(vb)).transpose()?;
        Ok(Self { output: DecoderOutputLayers::new(config, vb)?, embedding })
    }
}

impl PipelineLayer<DecoderBatch> for OutputLayer {
    fn forward(&self, x: &Tensor, batch: &DecoderBatch) -> candle_core::Result<Tensor> {
        let options = LossOptions { soft_cap: self.output.logit_soft_cap(), divisor: batch.divisor };
        let states = self.output.states(x)?;
        let weight = self.output.weight(self.embedding.as_ref());
        linear_cross_entropy_with(&states, weight, WeightLayout::OutIn, &batch.targets, options)
    }

    fn infer(&self, x: &Tensor, _: &DecoderBatch, state: &mut InferenceState) -> candle_core::Result<Tensor> {
        let mut states = self.output.states(x)?;
        if state.position().is_some() {
            states = states.narrow(1, states.dim(1)? - 1, 1)?;
        }
        logits(&states, self.output.weight(self.embedding.as_ref()), self.output.logit_soft_cap())
    }
}
