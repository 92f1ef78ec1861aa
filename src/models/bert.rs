//! BERT (Devlin et al. 2018) for sequence classification, with the parameter names of Hugging Face's files.

use super::BertConfig;
use crate::error::ModelError;
use crate::nn::{
    AttentionOptions, Dropout, Embedding, LayerNorm, Linear, LinearEpilogue, LossOptions, Sequences, add, attention,
    cross_entropy_with, embedding, normal, refuse,
};
use crate::zero::Unit;
use crate::zero::unit;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};

/// A text encoder with a classifier: learned positions, token types, bidirectional attention, layer norms after
/// attention and MLP, and a pooler on the first token.
///
/// Parameters have the names of Hugging Face's files: bert.embeddings.{word_embeddings, position_embeddings,
/// token_type_embeddings}.weight and LayerNorm, bert.encoder.layer.N. for each block N, bert.pooler.dense and
/// classifier. Each block is a unit ([`crate::zero::unit()`]).
///
/// As in transformers, lookups of the padding token add nothing to the table's gradient.
///
/// Rows of a batch are padded after their texts, and the lengths give the ends of the texts. Padding is skipped: it
/// costs no time, and does not change a single bit of a result or a gradient.
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

/// One block: y = norm(x + attention(x)), then norm(y + mlp(y)).
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

/// Returns the dropout layer, if `p` is above 0. All layers can share a seed, because each use draws new random
/// numbers ([`Dropout`]).
fn dropout(p: f32) -> Option<Dropout> {
    (p > 0.0).then(|| Dropout::new(p, 0))
}

impl BertBlock {
    /// Builds a block with the sizes in `config`.
    pub fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, inner) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| LayerNorm::new(d, config.layer_norm_eps, vb.pp(name));
        let linear = |inputs, outputs, name: &str| {
            Linear::with_init(inputs, outputs, true, normal(config.initializer_range), vb.pp(name))
        };
        let square = |name: &str| linear(d, d, name);
        Ok(Self {
            heads: config.num_attention_heads,
            query: square("attention.self.query")?,
            key: square("attention.self.key")?,
            value: square("attention.self.value")?,
            output: square("attention.output.dense")?,
            attention_norm: norm("attention.output.LayerNorm")?,
            up: linear(d, inner, "intermediate.dense")?,
            activation: config.activation,
            down: linear(inner, d, "output.dense")?,
            norm: norm("output.LayerNorm")?,
            drop: dropout(config.hidden_dropout),
        })
    }

    /// Applies the block to `x` `[1, tokens, hidden_size]`.
    fn run(&self, x: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let options = AttentionOptions { bidirectional: true, ..AttentionOptions::default() };
        let (q, k, v) = (self.query.forward(x)?, self.key.forward(x)?, self.value.forward(x)?);
        let attended = attention(&q, &k, &v, self.heads, self.heads, &options, Some(sequences))?;
        let x = &self.attention_norm.forward(&self.add_projected(x, &self.output, &attended)?)?;
        let h = self
            .up
            .forward_then(x, LinearEpilogue { activation: Some(self.activation), ..LinearEpilogue::default() })?;
        self.norm.forward(&self.add_projected(x, &self.down, &h)?)
    }

    /// Returns x + dropout(projection(h)).
    fn add_projected(&self, x: &Tensor, projection: &Linear, h: &Tensor) -> Result<Tensor> {
        match &self.drop {
            None => projection.forward_then(h, LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() }),
            Some(drop) => add(x, &drop.forward(&projection.forward(h)?)?),
        }
    }
}

impl Bert {
    /// Builds the model with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
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
        let head = |outputs, vb| Linear::with_init(d, outputs, true, normal(config.initializer_range), vb);
        let pooler = head(d, bert.pp("pooler.dense"))?;
        let classifier = head(config.labels.len(), vb.pp("classifier"))?;
        let (drop, classifier_drop) = (dropout(config.hidden_dropout), dropout(config.classifier_dropout));
        let config = config.clone();
        Ok(Self { config, words, positions, kinds, norm, drop, blocks, pooler, classifier_drop, classifier })
    }

    /// Returns the sizes that the model was built with.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Returns the states after the last block, `[batch, time, hidden_size]`, for ids `[batch, time]` (u32). The rows
    /// contain texts of the given lengths, each at least 1, followed by arbitrary ids. `kinds` `[batch, time]` (u32) is
    /// 0 for a first text and 1 for a second; without it, all are 0. States after the end of a text have no meaning.
    ///
    /// # Errors
    /// More tokens than the model has positions, an id outside the vocabulary, or lengths that do not match the tokens.
    pub fn states(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        let states = self.texts(ids, kinds, lengths)?;
        let firsts = text_starts(lengths);
        // After a text, its last state is repeated.
        let places = firsts.iter().zip(lengths).flat_map(|(first, len)| (0..time).map(move |i| first + i.min(len - 1)));
        rows(&states, places)?.reshape((batch, time, ()))
    }

    /// Returns the states of all texts, one after the other without gaps, `[tokens, hidden_size]`.
    fn texts(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        let context = self.config.max_position_embeddings;
        // This also checks the lengths.
        let padded = Sequences::padded(lengths, time)?;
        if padded.batch() != batch {
            bail!("a batch of {batch} rows has {} lengths; give one for each row", lengths.len())
        }
        if let Some(length) = lengths.iter().copied().max().filter(|length| *length > context) {
            return Err(refuse(ModelError::SequenceTooLong { length, context }.into()));
        }
        let tokens = lengths.iter().sum();
        let places = lengths.iter().enumerate().flat_map(|(row, length)| row * time..row * time + length);
        let places: Vec<u32> = places.map(|place| place as u32).collect();
        let places = Tensor::from_vec(places, tokens, ids.device())?;
        let of_texts = |values: &Tensor| values.flatten_all()?.index_select(&places, 0)?.unsqueeze(0);
        let ids = of_texts(ids)?;
        let kinds = kinds.map_or_else(|| ids.zeros_like(), of_texts)?;
        let sequences = Sequences::from_lengths(&[lengths.to_vec()], tokens)?;
        let x = add(&self.words.forward(&ids)?, &self.kinds.forward(&kinds)?)?;
        let x = add(&x, &self.positions.forward(&sequences.positions_on(ids.device())?)?)?;
        let mut x = self.norm.forward(&x)?;
        if let Some(drop) = &self.drop {
            x = drop.forward(&x)?;
        }
        for block in &self.blocks {
            let sequences = sequences.clone();
            x = block.forward_by(&x, move |block, x| block.run(x, &sequences))?;
        }
        x.squeeze(0)
    }

    /// Returns the logits `[batch, labels]`; see [`Bert::states`].
    ///
    /// # Errors
    /// The errors of [`Bert::states`].
    pub fn forward(&self, ids: &Tensor, kinds: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let first = rows(&self.texts(ids, kinds, lengths)?, text_starts(lengths).into_iter())?;
        let mut pooled = self.pooler.forward(&first)?.tanh()?;
        if let Some(drop) = &self.classifier_drop {
            pooled = drop.forward(&pooled)?;
        }
        self.classifier.forward(&pooled)
    }

    /// Returns the cross entropy, a scalar of f32: the sum over `labels` `[batch]` (u32, or i64 with -100 for labels
    /// that do not count) divided by `divisor`, or by the number of labels that count.
    ///
    /// # Errors
    /// The errors of [`Bert::forward`]; labels that the model does not have; without a divisor, no label that counts.
    pub fn loss(
        &self,
        ids: &Tensor,
        kinds: Option<&Tensor>,
        lengths: &[usize],
        labels: &Tensor,
        divisor: Option<f64>,
    ) -> Result<Tensor> {
        let options = LossOptions { divisor, ..LossOptions::default() };
        cross_entropy_with(&self.forward(ids, kinds, lengths)?, labels, options)
    }
}

/// Returns the start of each text of these lengths, one after the other.
fn text_starts(lengths: &[usize]) -> Vec<usize> {
    let next = |end: &mut usize, length: &usize| Some(std::mem::replace(end, *end + length));
    lengths.iter().scan(0, next).collect()
}

/// Returns the rows of `x` at `places`.
fn rows(x: &Tensor, places: impl Iterator<Item = usize>) -> Result<Tensor> {
    let places: Vec<u32> = places.map(|place| place as u32).collect();
    embedding(&Tensor::new(places, x.device())?, x)
}
