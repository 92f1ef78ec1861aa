//! Encoders that classify sequences, with the parameter names of Hugging Face's files.

use super::encoder_block::{EncoderBlock, dropout};
use super::unpadded_batch::{UnpaddedBatch, rows};
use super::{EncoderConfig, EncoderNaming, EncoderPooling, EncoderPositions, HeadActivation, SequenceClassifier};
use crate::nn::{
    Dropout, Embedding, LayerNorm, Linear, LinearEpilogue, LossOptions, Projection, ProjectionOptions, Rotary,
    WeightLayout, add, cross_entropy_with, matmul, normal, refuse,
};
use crate::zero::Unit;
use crate::zero::unit;
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// A text encoder with a classifier, described by an [`EncoderConfig`]: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA
/// or ModernBERT.
///
/// Parameters have the names of Hugging Face's files, as [`EncoderNaming`] lists them. Each block is a unit
/// ([`crate::zero::unit()`]).
///
/// As in transformers, lookups of the padding token add nothing to the gradient of the word embeddings.
///
/// Rows of a batch are padded after their texts, and the lengths give the ends of the texts. Padding is skipped: it
/// costs no time, and does not change a single bit of a result or a gradient.
#[derive(Debug, Clone)]
pub struct Encoder {
    config: EncoderConfig,
    embeddings: EncoderEmbeddings,
    blocks: Vec<Unit<EncoderBlock>>,
    last_norm: Option<LayerNorm>,
    head: ClassificationHead,
}

/// The layers from token ids to the input of the first block.
#[derive(Debug, Clone)]
struct EncoderEmbeddings {
    words: Embedding,
    positions: Option<Embedding>,
    token_types: Option<Embedding>,
    norm: LayerNorm,
    drop: Option<Dropout>,
    projection: Option<Linear>,
}

impl EncoderEmbeddings {
    fn new(config: &EncoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let (width, inner) = (config.embedding_size, vb.pp("embeddings"));
        let [words, norm] = match config.naming {
            EncoderNaming::ModernBert => ["tok_embeddings", "norm"],
            _ => ["word_embeddings", "LayerNorm"],
        };
        let padding = Some(config.pad_token_id);
        let table = |rows, name: &str| Embedding::new(rows, width, inner.pp(name));
        let words = table(config.vocab_size, words)?.padding(padding);
        let positions = match config.positions {
            EncoderPositions::Learned(rows) => Some(table(rows, "position_embeddings")?),
            EncoderPositions::LearnedAfterPadding(rows) => Some(table(rows, "position_embeddings")?.padding(padding)),
            EncoderPositions::Rotary(_) => None,
        };
        let token_types = (config.type_vocab_size > 0).then(|| table(config.type_vocab_size, "token_type_embeddings"));
        let norm = config.norm(width, inner.pp(norm))?;
        let project = || {
            let init = normal(config.initializer_range);
            Linear::with_init(width, config.hidden_size, true, init, vb.pp("embeddings_project"))
        };
        let projection = (width != config.hidden_size).then(project).transpose()?;
        let drop = dropout(config.dropout.embeddings);
        Ok(Self { words, positions, token_types: token_types.transpose()?, norm, drop, projection })
    }

    /// Returns the input of the first block, `[1, tokens, hidden_size]`, for `texts`. `token_types` contains the types
    /// of the tokens; with `None`, all types are 0.
    fn forward(&self, config: &EncoderConfig, texts: &UnpaddedBatch, token_types: Option<&Tensor>) -> Result<Tensor> {
        let device = texts.ids.device();
        let mut x = self.words.forward(&texts.ids)?;
        if let Some(table) = &self.token_types {
            let types = token_types.map_or_else(|| texts.ids.zeros_like(), |types| texts.join(types))?;
            x = add(&x, &table.forward(&types)?)?;
        }
        if let Some(table) = &self.positions {
            let positions = match config.positions {
                EncoderPositions::LearnedAfterPadding(_) => {
                    let positions = positions_after(config.pad_token_id, &texts.texts()?);
                    Tensor::from_vec(positions, texts.ids.shape(), device)?
                }
                _ => texts.sequences.positions_on(device)?,
            };
            x = add(&x, &table.forward(&positions)?)?;
        }
        x = self.norm.forward(&x)?;
        if let Some(drop) = &self.drop {
            x = drop.forward(&x)?;
        }
        self.projection.as_ref().map_or(Ok(x.clone()), |projection| projection.forward(&x))
    }
}

/// Returns the positions of the tokens of all texts, one text after the other. In each text, the first token that is
/// not padding has position `padding` + 1, and the next one `padding` + 2. Padding tokens have position `padding`.
fn positions_after(padding: u32, texts: &[Vec<u32>]) -> Vec<u32> {
    let text_positions = |ids: &Vec<u32>| {
        let position = |count: &mut u32, id: &u32| {
            *count += u32::from(*id != padding);
            Some(if *id == padding { padding } else { padding + *count })
        };
        ids.iter().scan(0u32, position).collect::<Vec<_>>()
    };
    texts.iter().flat_map(text_positions).collect()
}

/// The layers from states to logits.
#[derive(Debug, Clone)]
struct ClassificationHead {
    pooling: EncoderPooling,
    pooled_drop: Option<Dropout>,
    dense: Projection,
    activation: HeadActivation,
    norm: Option<LayerNorm>,
    classifier_drop: Option<Dropout>,
    classifier: Linear,
}

impl ClassificationHead {
    fn new(config: &EncoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let (d, naming, std) = (config.hidden_size, config.naming, config.initializer_range);
        // Targets given by name may include the pooler, as in PEFT. `AllLinear` means the layers of the blocks.
        let by_name = |lora: &&crate::nn::LoraConfig| lora.targets != crate::nn::LoraTargets::AllLinear;
        let lora = config.lora.as_ref().filter(|_| config.adapts_pooler && naming == EncoderNaming::Bert);
        let options =
            ProjectionOptions { layout: WeightLayout::OutIn, bias: config.head.bias, std, lora: lora.filter(by_name) };
        let dense = Projection::new(d, d, options, vb.pp(naming.head_dense()))?;
        let norm = config.head.norm.then(|| config.norm(d, vb.pp(naming.head()).pp("norm"))).transpose()?;
        let classifier = Linear::with_init(d, config.labels.len(), true, normal(std), vb.pp(naming.classifier()))?;
        Ok(Self {
            pooling: config.head.pooling,
            pooled_drop: dropout(config.dropout.pooled),
            dense,
            activation: config.head.activation,
            norm,
            classifier_drop: dropout(config.dropout.classifier),
            classifier,
        })
    }

    /// Returns the logits `[texts, labels]` for states `[tokens, hidden_size]`.
    fn forward(&self, states: &Tensor, texts: &UnpaddedBatch) -> Result<Tensor> {
        let dropped = |drop: &Option<Dropout>, x: Tensor| drop.as_ref().map_or(Ok(x.clone()), |drop| drop.forward(&x));
        let pooled = match self.pooling {
            EncoderPooling::First => rows(states, texts.starts().into_iter())?,
            EncoderPooling::Mean => mean_of_texts(states, texts)?,
        };
        let pooled = dropped(&self.pooled_drop, pooled)?;
        let h = match self.activation {
            HeadActivation::Tanh => self.dense.forward(&pooled)?.tanh()?,
            HeadActivation::Relu => self.dense.forward(&pooled)?.relu()?,
            HeadActivation::Mlp(activation) => {
                let activation = Some(activation);
                self.dense.forward_with_epilogue(&pooled, LinearEpilogue { activation, ..LinearEpilogue::default() })?
            }
        };
        let h = self.norm.as_ref().map_or(Ok(h.clone()), |norm| norm.forward(&h))?;
        self.classifier.forward(&dropped(&self.classifier_drop, h)?)
    }
}

/// Returns the mean of each text's states, `[texts, hidden_size]`.
fn mean_of_texts(states: &Tensor, texts: &UnpaddedBatch) -> Result<Tensor> {
    let (lengths, tokens, device) = (texts.lengths(), states.dim(0)?, states.device());
    let in_text = texts.starts().into_iter().zip(lengths).flat_map(|(start, length)| {
        (0..tokens).map(move |token| if (start..start + length).contains(&token) { 1f32 } else { 0.0 })
    });
    let ones = Tensor::from_iter(in_text, device)?.reshape((lengths.len(), tokens))?.to_dtype(states.dtype())?;
    let counts = Tensor::from_iter(lengths.iter().map(|length| *length as f32), device)?;
    let counts = counts.reshape((lengths.len(), 1))?.to_dtype(states.dtype())?;
    matmul(&ones, states)?.broadcast_div(&counts)
}

impl Encoder {
    /// Builds the model with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
    pub fn new(config: &EncoderConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        Self::with_positions(config, config.ctx(), vb)
    }

    /// Builds the model of a valid `config`. If its positions are rotary, texts have at most `positions` tokens.
    pub(super) fn with_positions(config: &EncoderConfig, positions: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let inner = vb.pp(config.naming.prefix());
        let embeddings = EncoderEmbeddings::new(config, &inner)?;
        let list = match config.naming {
            EncoderNaming::Bert | EncoderNaming::Roberta | EncoderNaming::Electra => "encoder.layer",
            EncoderNaming::DistilBert => "transformer.layer",
            EncoderNaming::ModernBert => "layers",
        };
        // Blocks with the same rotary base (theta) share a table of angles.
        let mut tables: Vec<(f64, Rotary)> = vec![];
        let mut rotary = |theta: f64| -> Result<Option<Rotary>> {
            if !matches!(config.positions, EncoderPositions::Rotary(_)) {
                return Ok(None);
            }
            if let Some((_, cached)) = tables.iter().find(|(cached, _)| *cached == theta) {
                return Ok(Some(cached.clone()));
            }
            let table = Rotary::new(config.hidden_size / config.num_attention_heads, positions, theta)?;
            tables.push((theta, table.clone()));
            Ok(Some(table))
        };
        let block = |(i, block_config): (usize, &super::EncoderBlockConfig)| {
            let rotary = rotary(block_config.theta)?;
            let block = unit(inner.pp(format!("{list}.{i}")), |vb| EncoderBlock::new(config, i, rotary, vb))?;
            Ok(block.checkpointed(config.checkpoint_activations))
        };
        let blocks = config.blocks.iter().enumerate().map(block).collect::<Result<_>>()?;
        let last_norm = config.norms_first.then(|| config.norm(config.hidden_size, inner.pp("final_norm")));
        let last_norm = last_norm.transpose()?;
        let head = ClassificationHead::new(config, &vb)?;
        Ok(Self { config: config.clone(), embeddings, blocks, last_norm, head })
    }

    /// Returns the sizes that the model was built with.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Returns the states after the last block and the final norm, if there is one, `[batch, time, hidden_size]`, for
    /// ids `[batch, time]` (u32). The rows contain texts of the given lengths, each at least 1, followed by arbitrary
    /// ids. `token_types` `[batch, time]` (u32) contains the tokens' types, usually 0 for a first text and 1 for a
    /// second; with `None`, all types are 0. Models without types ignore `token_types`. States after the end of a text
    /// have no meaning.
    ///
    /// # Errors
    /// More tokens than the model has positions, an id outside the vocabulary, or lengths that do not match the tokens.
    pub fn states(&self, ids: &Tensor, token_types: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        let texts = UnpaddedBatch::new(ids, lengths, self.config.ctx())?;
        let states = self.states_of_texts(&texts, token_types)?;
        // After a text, its last state is repeated.
        let starts = texts.starts();
        let indices =
            starts.iter().zip(lengths).flat_map(|(first, len)| (0..time).map(move |i| first + i.min(len - 1)));
        rows(&states, indices)?.reshape((batch, time, ()))
    }

    /// Returns the states of all texts, one after the other without gaps, `[tokens, hidden_size]`.
    fn states_of_texts(&self, texts: &UnpaddedBatch, token_types: Option<&Tensor>) -> Result<Tensor> {
        let mut x = self.embeddings.forward(&self.config, texts, token_types)?;
        for block in &self.blocks {
            let sequences = texts.sequences.clone();
            x = block.forward_by(&x, move |block, x| block.run(x, &sequences))?;
        }
        if let Some(norm) = &self.last_norm {
            x = norm.forward(&x)?;
        }
        x.squeeze(0)
    }

    /// Returns the logits `[batch, labels]`; for the arguments, see [`Encoder::states`].
    ///
    /// # Errors
    /// The errors of [`Encoder::states`].
    pub fn forward(&self, ids: &Tensor, token_types: Option<&Tensor>, lengths: &[usize]) -> Result<Tensor> {
        let texts = UnpaddedBatch::new(ids, lengths, self.config.ctx())?;
        self.head.forward(&self.states_of_texts(&texts, token_types)?, &texts)
    }

    /// Returns the cross entropy, an f32 scalar: the sum over `labels` `[batch]` (u32, or i64 with -100 for labels
    /// that do not count) divided by `divisor`, or by the number of labels that count.
    ///
    /// # Errors
    /// The errors of [`Encoder::forward`]; labels that the model does not have; without a divisor, no label that
    /// counts.
    pub fn loss(
        &self,
        ids: &Tensor,
        token_types: Option<&Tensor>,
        lengths: &[usize],
        labels: &Tensor,
        divisor: Option<f64>,
    ) -> Result<Tensor> {
        let options = LossOptions { divisor, ..LossOptions::default() };
        cross_entropy_with(&self.forward(ids, token_types, lengths)?, labels, options)
    }
}

impl SequenceClassifier for Encoder {
    fn logits(&self, ids: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        self.forward(ids, None, lengths)
    }

    fn labels(&self) -> &[String] {
        &self.config.labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_after_padding_count_the_other_tokens() {
        let texts = [vec![0, 7, 1, 9, 1], vec![1], vec![5]];
        assert_eq!(positions_after(1, &texts), [2, 3, 1, 4, 1, 1, 2]);
        assert_eq!(positions_after(7, &texts), [8, 7, 9, 10, 11, 8, 8]);
    }
}
