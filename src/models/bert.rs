//! BERT (Devlin et al. 2018) that classifies sequences, with the parameter names of Hugging Face's files.

use super::BertConfig;
use crate::error::ModelError;
use crate::nn::{
    Attend, Dropout, Embedding, LayerNorm, Linear, Sequences, Then, add, attention, cross_entropy, refuse,
};
use crate::zero::{Unit, unit};
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};

/// An encoder of texts and a classifier on it: learned positions, kinds of tokens, attention that looks both ways, layer
/// norms behind attention and MLP, a pooler on the first token.
///
/// Parameters have the names of Hugging Face's files: bert.embeddings.{word_embeddings, position_embeddings,
/// token_type_embeddings}.weight and LayerNorm, per block N bert.encoder.layer.N., bert.pooler.dense and classifier. Each
/// block is a unit ([`crate::zero::unit()`]).
///
/// As in transformers, lookups of the padding token add nothing to the table's gradient.
///
/// Rows of a batch are filled up behind their texts; lengths say how far these go. What fills a row up changes no bit of its
/// text's result.
#[derive(Debug, Clone)]
pub struct Bert {
    config: BertConfig,
    words: Embedding,
    positions: Embedding,
    kinds: Embedding,
    norm: LayerNorm,
    drop: Option<Dropout>,
    blocks: Vec<Unit<BertBlock>>,
    pooler: Linear,
    classifier_drop: Option<Dropout>,
    classifier: Linear,
}

/// One block: norm(x + attention(x)), then norm(that + mlp(that)).
#[derive(Debug, Clone)]
pub struct BertBlock {
    heads: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    activation: crate::nn::Activation,
    down: Linear,
    norm: LayerNorm,
    drop: Option<Dropout>,
}

/// All layers share a seed, for the draws of a forward are numbered ([`Dropout`]).
fn dropout(p: f32) -> Option<Dropout> {
    (p > 0.0).then(|| Dropout::new(p, 0))
}

impl BertBlock {
    /// A block of `config`'s sizes.
    pub fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, inner) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| LayerNorm::new(d, config.layer_norm_eps, vb.pp(name));
        let square = |name: &str| Linear::new(d, d, vb.pp(name));
        Ok(Self {
            heads: config.num_attention_heads,
            query: square("attention.self.query")?,
            key: square("attention.self.key")?,
            value: square("attention.self.value")?,
            output: square("attention.output.dense")?,
            attention_norm: norm("attention.output.LayerNorm")?,
            up: Linear::new(d, inner, vb.pp("intermediate.dense"))?,
            activation: config.activation,
            down: Linear::new(inner, d, vb.pp("output.dense"))?,
            norm: norm("output.LayerNorm")?,
            drop: dropout(config.hidden_dropout),
        })
    }

    /// The block on `x` `[batch, time, hidden_size]`.
    fn run(&self, x: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let attend = Attend { bidirectional: true, ..Attend::default() };
        let (q, k, v) = (self.query.forward(x)?, self.key.forward(x)?, self.value.forward(x)?);
        let attended = attention(&q, &k, &v, self.heads, self.heads, &attend, Some(sequences))?;
        let x = &self.attention_norm.forward(&self.onto(x, &self.output, &attended)?)?;
        let h = self.up.forward_then(x, Then { activation: Some(self.activation), ..Then::default() })?;
        self.norm.forward(&self.onto(x, &self.down, &h)?)
    }

    /// x + dropout(projection(h)).
    fn onto(&self, x: &Tensor, projection: &Linear, h: &Tensor) -> Result<Tensor> {
        match &self.drop {
            None => projection.forward_then(h, Then { residual: Some(x), ..Then::default() }),
            Some(drop) => add(x, &drop.forward(&projection.forward(h)?)?),
        }
    }
}

impl Bert {
    /// Builds the model over the parameters that `vb` gives.
    ///
    /// # Errors
    /// Sizes that make no model, and whatever the builder says about a parameter.
    pub fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        let (d, bert) = (config.hidden_size, vb.pp("bert"));
        let embeddings = bert.pp("embeddings");
        let words =
            Embedding::new(config.vocab_size, d, embeddings.pp("word_embeddings"))?.padding(Some(config.pad_token_id));
        let positions = Embedding::new(config.max_position_embeddings, d, embeddings.pp("position_embeddings"))?;
        let kinds = Embedding::new(config.type_vocab_size, d, embeddings.pp("token_type_embeddings"))?;
        let norm = LayerNorm::new(d, config.layer_norm_eps, embeddings.pp("LayerNorm"))?;
        let block = |i| {
            let block = unit(bert.pp(format!("encoder.layer.{i}")), |vb| BertBlock::new(config, vb))?;
            Ok(block.checkpointed(config.checkpoint_activations))
        };
        let blocks = (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?;
        let pooler = Linear::new(d, d, bert.pp("pooler.dense"))?;
        let classifier = Linear::new(d, config.labels.len(), vb.pp("classifier"))?;
        let (drop, classifier_drop) = (dropout(config.hidden_dropout), dropout(config.classifier_dropout));
        let config = config.clone();
        Ok(Self { config, words, positions, kinds, norm, drop, blocks, pooler, classifier_drop, classifier })
    }

    /// The sizes the model was built with.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// The states after the last block, `[batch, time, hidden_size]`, of ids `[batch, time]` (u32) whose rows hold texts of
    /// these lengths, each at least 1, and anything behind them. `kinds` `[batch, time]` (u32): 0 for a first text, 1 for
    /// a second; all 0 without it. States behind a text mean nothing.
    ///
    /// # Errors
    /// More tokens than the model has positions, an id outside the vocabulary, lengths that do not fit.
    pub fn states(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        let context = self.config.max_position_embeddings;
        if time > context {
            return Err(refuse(ModelError::SequenceTooLong { length: time, context }.into()));
        }
        if lengths.len() != batch {
            bail!("a batch of {batch} rows has {} lengths; give one for each row", lengths.len())
        }
        let sequences = Sequences::padded(lengths, time)?;
        let kinds = kinds.map_or_else(|| ids.zeros_like(), |kinds| Ok(kinds.clone()))?;
        let x = add(&self.words.forward(ids)?, &self.kinds.forward(&kinds)?)?;
        let x = add(&x, &self.positions.forward(&sequences.positions_on(ids.device())?)?)?;
        let mut x = self.norm.forward(&x)?;
        if let Some(drop) = &self.drop {
            x = drop.forward(&x)?;
        }
        for block in &self.blocks {
            let sequences = sequences.clone();
            x = block.forward_by(&x, move |block, x| block.run(x, &sequences))?;
        }
        Ok(x)
    }

    /// Logits `[batch, labels]`; see [`Bert::states`].
    ///
    /// # Errors
    /// As [`Bert::states`].
    pub fn forward(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let first = self.states(ids, kinds, lengths)?.narrow(1, 0, 1)?.squeeze(1)?;
        let mut pooled = self.pooler.forward(&first)?.tanh()?;
        if let Some(drop) = &self.classifier_drop {
            pooled = drop.forward(&pooled)?;
        }
        self.classifier.forward(&pooled)
    }

    /// The mean cross entropy, a scalar of f32, of `labels` `[batch]` (u32).
    ///
    /// # Errors
    /// As [`Bert::forward`], and labels that the model does not have.
    pub fn loss(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize], labels: &Tensor) -> Result<Tensor> {
        cross_entropy(&self.forward(ids, kinds, lengths)?, labels)
    }
}
