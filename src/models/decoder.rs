//! Decoders built from a configuration: from token ids to the states that the output projection takes.

use super::decoder_block::{BlockContext, BlockNorm, DecoderBlock, INITIAL_STD};
use super::{Architecture, BlockConfig, DecoderConfig, LanguageModel, ParameterNaming, RotaryConfig, RoutedStates};
use super::{BalanceLossOptions, MixtureConfig};
use crate::nn::{
    Dropout, Embedding, GradientCheckedRouter, KeyValueCache, Linear, Rotary, Sequences, SyncBalanceLoss, add, columns,
    normal, refuse, scale, scale_in_f32,
};
use crate::zero::Unit;
use crate::zero::unit;
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use std::collections::BTreeMap;
use std::marker::PhantomData;

/// A language model described by a [`DecoderConfig`], of any family that [`DecoderConfig::read`] supports.
///
/// The parameters have the names of the model's files in Hugging Face format. Each block is a unit
/// ([`crate::zero::unit()`]).
pub type Decoder = LanguageModel<DecoderLayers>;

/// A conversion of a model's sizes to the configuration of a decoder.
pub trait IntoDecoderConfig: Clone {
    /// Returns the decoder's configuration.
    ///
    /// # Errors
    /// Returns an error if a size is invalid.
    fn decoder(&self) -> crate::Result<DecoderConfig>;

    /// Returns the maximum length of an input, in tokens.
    fn ctx(&self) -> usize;
}

impl IntoDecoderConfig for DecoderConfig {
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
    input: DecoderInputLayers,
    blocks: Vec<Unit<DecoderBlock>>,
    output: DecoderOutputLayers,
    routers: Option<Routers>,
    sizes: PhantomData<fn() -> C>,
}

/// The routers of sparse blocks, for the losses outside the blocks.
#[derive(Debug, Clone)]
struct Routers {
    /// The numbers of the sparse blocks, in ascending order, with their routers.
    blocks: BTreeMap<usize, GradientCheckedRouter>,
    experts: usize,
    balance: SyncBalanceLoss,
    coefficient: Option<f64>,
}

impl Routers {
    fn new(config: &DecoderConfig, mixture: &MixtureConfig) -> Self {
        Self {
            blocks: config.sparse_blocks().map(|block| (block, GradientCheckedRouter::new(mixture.router))).collect(),
            experts: mixture.experts,
            balance: SyncBalanceLoss::of_model(),
            coefficient: mixture.balance_coefficient,
        }
    }
}

impl<C> DecoderLayers<C> {
    /// Builds the layers of a valid `config`.
    pub(super) fn build(config: &DecoderConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let embedding = config.token_embedding(&vb)?;
        let input = DecoderInputLayers::new(config, &vb)?;
        let mut rotaries = SharedRotaries::default();
        let blocks = (0..config.blocks.len()).map(|block| config.block(block, &mut rotaries, &vb));
        let blocks = blocks.collect::<Result<_>>()?;
        let output = DecoderOutputLayers::new(config, &vb)?;
        let routers = config.mixture.as_ref().map(|mixture| Routers::new(config, mixture));
        let routers = routers.filter(|routers| !routers.blocks.is_empty());
        Ok(Self { embedding, input, blocks, output, routers, sizes: PhantomData })
    }

    /// Returns the input of the first block for tokens that start at position `first`.
    fn embed(&self, ids: &Tensor, first: usize, sequences: Option<&Sequences>) -> Result<Tensor> {
        self.input.forward(self.embedding.forward(ids)?, first, sequences)
    }
}

impl DecoderConfig {
    /// Returns the builder of everything but the output projection.
    fn inner<'a>(&self, vb: &VarBuilder<'a>) -> VarBuilder<'a> {
        match self.prefix.trim_end_matches('.') {
            "" => vb.clone(),
            prefix => vb.pp(prefix),
        }
    }

    /// Returns the names of the embedding, the list of blocks, and the last norm.
    fn layer_names(&self) -> [&'static str; 3] {
        match self.naming {
            ParameterNaming::Gpt2 => ["wte", "h", "ln_f"],
            _ => ["embed_tokens", "layers", "norm"],
        }
    }

    /// Builds the token embedding.
    pub(super) fn token_embedding(&self, vb: &VarBuilder<'_>) -> Result<Embedding> {
        let [name, ..] = self.layer_names();
        Ok(Embedding::new(self.vocab, self.hidden_size, self.inner(vb).pp(name))?.padding(self.padding))
    }

    /// Builds a block, which shares rotary tables with other blocks.
    pub(super) fn block(
        &self,
        block: usize,
        rotaries: &mut SharedRotaries,
        vb: &VarBuilder<'_>,
    ) -> Result<Unit<DecoderBlock>> {
        let ([_, name, _], rule) = (self.layer_names(), &self.blocks[block]);
        let rotary = rotaries.of(self, rule)?;
        let unit = unit(self.inner(vb).pp(format!("{name}.{block}")), |vb| DecoderBlock::new(self, rule, rotary, vb))?;
        Ok(unit.checkpointed(self.checkpoint_activations))
    }
}

/// The layers between the token embedding and the first block: the scale of the embedding, learned positions and
/// dropout.
#[derive(Debug, Clone)]
pub(super) struct DecoderInputLayers {
    embedding_scale: Option<f64>,
    positions: Option<Embedding>,
    drop: Option<Dropout>,
}

impl DecoderInputLayers {
    pub(super) fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let learned = config.learned_positions;
        let learned = learned.map(|rows| Embedding::new(rows, config.hidden_size, config.inner(vb).pp("wpe")));
        let (embedding_scale, drop) = (config.embedding_scale, config.dropout());
        Ok(Self { embedding_scale, positions: learned.transpose()?, drop })
    }

    /// Returns the input of the first block for the embeddings `x` `[batch, time, hidden_size]` of tokens that start at
    /// position `first`.
    pub(super) fn forward(&self, mut x: Tensor, first: usize, sequences: Option<&Sequences>) -> Result<Tensor> {
        if let Some(factor) = self.embedding_scale {
            x = scale(&x, factor)?;
        }
        if let Some(table) = &self.positions {
            let (batch, time, _) = x.dims3()?;
            // Looks positions up for every sequence rather than broadcasting one row over the batch: the lookup's
            // backward pass sums the batch in f32, but a broadcast's backward pass sums it in the storage dtype.
            let positions = match sequences {
                Some(sequences) => sequences.positions_on(x.device())?,
                None => {
                    let positions = (0..batch).flat_map(|_| (first..first + time).map(|position| position as u32));
                    Tensor::from_iter(positions, x.device())?.reshape((batch, time))?
                }
            };
            x = add(&x, &table.forward(&positions)?)?;
        }
        self.drop.as_ref().map_or(Ok(x.clone()), |drop| drop.forward(&x))
    }
}

/// The layers after the last block: the last norm, and the output projection unless it is the token embedding.
#[derive(Debug, Clone)]
pub(super) struct DecoderOutputLayers {
    norm: BlockNorm,
    /// The output projection, or `None` if the token embedding is used.
    head: Option<Linear>,
    logit_scale: Option<f64>,
    logit_soft_cap: Option<f64>,
}

impl DecoderOutputLayers {
    pub(super) fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let ([_, _, name], untied) = (config.layer_names(), !config.tie_word_embeddings);
        let norm = BlockNorm::new(config, config.inner(vb).pp(name))?;
        let (width, vocab, init) = (config.hidden_size, config.vocab, normal(INITIAL_STD));
        let head = untied.then(|| Linear::with_init(width, vocab, false, init, vb.pp("lm_head"))).transpose()?;
        let (logit_scale, logit_soft_cap) = (config.logit_scale, config.logit_soft_cap);
        Ok(Self { norm, head, logit_scale, logit_soft_cap })
    }

    /// Returns the input of the output projection. The scale of logits is applied to it.
    pub(super) fn states(&self, x: &Tensor) -> Result<Tensor> {
        let states = self.norm.forward(x)?;
        self.logit_scale.map_or(Ok(states.clone()), |scale| scale_in_f32(&states, scale))
    }

    /// Returns the weight of the output projection: its own, or that of the `embedding`.
    pub(super) fn weight<'a>(&'a self, embedding: Option<&'a Embedding>) -> &'a Tensor {
        match (&self.head, embedding) {
            (Some(head), _) => head.weight(),
            (None, Some(embedding)) => embedding.weight(),
            (None, None) => unreachable!("an output without a projection has an embedding"),
        }
    }

    pub(super) fn logit_soft_cap(&self) -> Option<f64> {
        self.logit_soft_cap
    }
}

/// The rotary tables of queries and of keys, shared by blocks with the same configuration.
#[derive(Default)]
pub(super) struct SharedRotaries(Vec<(RotaryConfig, [Rotary; 2])>);

impl SharedRotaries {
    pub(super) fn of(&mut self, config: &DecoderConfig, block: &BlockConfig) -> Result<Option<[Rotary; 2]>> {
        let rotary = block.rotary.as_ref().filter(|_| config.learned_positions.is_none());
        let Some(rotary) = rotary else { return Ok(None) };
        if let Some((_, tables)) = self.0.iter().find(|(key, _)| key == rotary) {
            return Ok(Some(tables.clone()));
        }
        let tables = rotary.rotations(config.head_dim, config.rotary_pairs, config.ctx)?;
        self.0.push((rotary.clone(), tables.clone()));
        Ok(Some(tables))
    }
}

impl<C: IntoDecoderConfig> Architecture for DecoderLayers<C> {
    type Config = C;

    fn new(config: &C, vb: VarBuilder<'_>) -> Result<Self> {
        Self::build(&config.decoder().map_err(refuse)?, vb)
    }

    fn ctx(config: &C) -> usize {
        config.ctx()
    }

    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        let mut x = self.embed(ids, 0, sequences)?;
        for block in &self.blocks {
            let sequences = sequences.cloned();
            x = block.forward_by(&x, move |block, x| {
                block.run(x, BlockContext { sequences: sequences.as_ref(), ..BlockContext::default() })
            })?;
        }
        self.output.states(&x)
    }

    fn routed_states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<RoutedStates> {
        let Some(routers) = &self.routers else {
            return Ok(RoutedStates { states: self.states(ids, sequences)?, routings: Vec::new() });
        };
        let mut x = self.embed(ids, 0, sequences)?;
        let (width, mut routings) = (x.dims3()?.2, Vec::with_capacity(routers.blocks.len()));
        for (number, block) in self.blocks.iter().enumerate() {
            let (sequences, router) = (sequences.cloned(), routers.blocks.get(&number));
            let is_sparse = router.is_some();
            x = block.forward_by(&x, move |block, x| {
                let sequences = sequences.as_ref();
                block.run(x, BlockContext { sequences, with_router_logits: is_sparse, ..BlockContext::default() })
            })?;
            if let Some(router) = router {
                let logits = columns(&x, width..width + routers.experts)?;
                routings.push((number, router.route(&logits)?));
                x = columns(&x, 0..width)?;
            }
        }
        Ok(RoutedStates { states: self.output.states(&x)?, routings })
    }

    fn balance_loss(&self) -> Option<BalanceLossOptions<'_>> {
        let routers = self.routers.as_ref()?;
        routers.coefficient.map(|coefficient| BalanceLossOptions { loss: &routers.balance, coefficient })
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor> {
        let mut x = self.embed(ids, caches.first().map_or(0, KeyValueCache::len), None)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block
                .evaluate(|block| block.run(&x, BlockContext { cache: Some(cache), ..BlockContext::default() }))?;
        }
        self.output.states(&x)
    }

    fn output(&self) -> &Tensor {
        self.output.weight(Some(&self.embedding))
    }

    fn logit_soft_cap(&self) -> Option<f64> {
        self.output.logit_soft_cap()
    }
}
