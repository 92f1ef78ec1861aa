//! Decoders built from a configuration: from token ids to the states that the output projection takes.

use super::decoder_block::{BlockContext, BlockNorm, DecoderBlock, INITIAL_STD};
use super::{Architecture, BlockConfig, DecoderConfig, LanguageModel, ParameterNaming};
use crate::nn::{Dropout, Embedding, KeyValueCache, Linear, Rotary, Sequences, add, normal, refuse, scaled};
use crate::zero::Unit;
use crate::zero::unit;
use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use half::{bf16, f16};
use std::marker::PhantomData;

/// A language model described by a [`DecoderConfig`]: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3 or GPT-2.
///
/// The parameters have the names of the model's files in Hugging Face format. Each block is a unit
/// ([`crate::zero::unit()`]).
pub type Decoder = LanguageModel<DecoderLayers>;

/// Sizes that describe a decoder.
pub trait DecoderSizes: Clone {
    /// Returns the decoder's configuration.
    ///
    /// # Errors
    /// Invalid sizes.
    fn decoder(&self) -> crate::Result<DecoderConfig>;

    /// Returns the longest input, in tokens.
    fn ctx(&self) -> usize;
}

impl DecoderSizes for DecoderConfig {
    fn decoder(&self) -> crate::Result<DecoderConfig> {
        self.validate()?;
        Ok(self.clone())
    }

    fn ctx(&self) -> usize {
        self.ctx
    }
}

/// The layers of a [`Decoder`], or of a model whose sizes describe one.
#[derive(Debug, Clone)]
pub struct DecoderLayers<C = DecoderConfig> {
    embedding: Embedding,
    embedding_scale: Option<f64>,
    positions: Option<Embedding>,
    drop: Option<Dropout>,
    blocks: Vec<Unit<DecoderBlock>>,
    norm: BlockNorm,
    /// The output projection, or `None` if the token embedding is used.
    head: Option<Linear>,
    logit_soft_cap: Option<f64>,
    sizes: PhantomData<fn() -> C>,
}

impl<C> DecoderLayers<C> {
    /// Builds the layers of a valid `config`.
    pub(super) fn build(config: &DecoderConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, vocab) = (config.hidden_size, config.vocab);
        let [embedding, blocks, norm] = match config.naming {
            ParameterNaming::Llama | ParameterNaming::Phi3 => ["embed_tokens", "layers", "norm"],
            ParameterNaming::Gpt2 => ["wte", "h", "ln_f"],
        };
        let inner = match config.prefix.trim_end_matches('.') {
            "" => vb.clone(),
            prefix => vb.pp(prefix),
        };
        let embedding = Embedding::new(vocab, d, inner.pp(embedding))?.padding(config.padding);
        let learned = config.learned_positions.map(|rows| Embedding::new(rows, d, inner.pp("wpe")));
        let positions = learned.transpose()?;
        let mut rotaries = SharedRotaries::default();
        let mut units = Vec::with_capacity(config.blocks.len());
        for (i, rule) in config.blocks.iter().enumerate() {
            let rotary = rotaries.of(config, rule)?;
            let block = unit(inner.pp(format!("{blocks}.{i}")), |vb| DecoderBlock::new(config, rule, rotary, vb))?;
            units.push(block.checkpointed(config.checkpoint_activations));
        }
        let norm = BlockNorm::new(config, inner.pp(norm))?;
        let untied = !config.tie_word_embeddings;
        let head =
            untied.then(|| Linear::with_init(d, vocab, false, normal(INITIAL_STD), vb.pp("lm_head"))).transpose()?;
        let (embedding_scale, logit_soft_cap) = (config.embedding_scale, config.logit_soft_cap);
        let drop = config.dropout();
        let sizes = PhantomData;
        Ok(Self { embedding, embedding_scale, positions, drop, blocks: units, norm, head, logit_soft_cap, sizes })
    }

    /// Returns the input of the first block for tokens from position `first` on.
    fn embedded(&self, ids: &Tensor, first: usize, sequences: Option<&Sequences>) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        if let Some(factor) = self.embedding_scale {
            x = scaled(&x, rounded(factor, x.dtype()))?;
        }
        if let Some(table) = &self.positions {
            let (batch, time) = ids.dims2()?;
            // Looks positions up for every sequence rather than broadcasting one row over the batch: the lookup's
            // backward sums the batch in f32, but a broadcast's backward sums it in the storage dtype.
            let positions = match sequences {
                Some(sequences) => sequences.positions_on(ids.device())?,
                None => {
                    let positions = (0..batch).flat_map(|_| (first..first + time).map(|position| position as u32));
                    Tensor::from_iter(positions, ids.device())?.reshape((batch, time))?
                }
            };
            x = add(&x, &table.forward(&positions)?)?;
        }
        self.drop.as_ref().map_or(Ok(x.clone()), |drop| drop.forward(&x))
    }
}

/// Rounds a factor to the precision of its operand, as transformers does.
fn rounded(factor: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f64(factor).to_f64(),
        DType::F16 => f16::from_f64(factor).to_f64(),
        _ => factor,
    }
}

/// The rotary tables, shared by blocks with the same configuration.
#[derive(Default)]
struct SharedRotaries(Vec<(BlockConfig, Rotary)>);

impl SharedRotaries {
    fn of(&mut self, config: &DecoderConfig, rule: &BlockConfig) -> Result<Option<Rotary>> {
        if config.learned_positions.is_some() {
            return Ok(None);
        }
        if let Some((_, known)) = self.0.iter().find(|(known, _)| known.rotary == rule.rotary) {
            return Ok(Some(known.clone()));
        }
        let frequencies = rule.rotary.frequencies(config.head_dim)?;
        let rotary = Rotary::from_frequencies(config.ctx, frequencies)?;
        self.0.push((*rule, rotary.clone()));
        Ok(Some(rotary))
    }
}

impl<C: DecoderSizes> Architecture for DecoderLayers<C> {
    type Config = C;

    fn new(config: &C, vb: VarBuilder<'_>) -> Result<Self> {
        Self::build(&config.decoder().map_err(refuse)?, vb)
    }

    fn ctx(config: &C) -> usize {
        config.ctx()
    }

    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        let mut x = self.embedded(ids, 0, sequences)?;
        for block in &self.blocks {
            let sequences = sequences.cloned();
            x = block.forward_by(&x, move |block, x| {
                block.run(x, BlockContext { sequences: sequences.as_ref(), cache: None })
            })?;
        }
        self.norm.forward(&x)
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor> {
        let mut x = self.embedded(ids, caches.first().map_or(0, KeyValueCache::len), None)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.evaluate(|block| block.run(&x, BlockContext { sequences: None, cache: Some(cache) }))?;
        }
        self.norm.forward(&x)
    }

    fn output(&self) -> &Tensor {
        self.head.as_ref().map_or(self.embedding.weight(), Linear::weight)
    }

    fn logit_soft_cap(&self) -> Option<f64> {
        self.logit_soft_cap
    }
}
