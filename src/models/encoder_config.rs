//! The shape of an encoder that classifies texts.

use super::config_checks::{
    MAX_HEAD_DIM, MAX_POSITIONS, invalid_field, require_blocks, require_parameters, require_sizes,
};
use crate::error::Result;
use crate::nn::{Activation, LoraConfig};

/// The shape of an encoder with a sequence classification head: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA or
/// ModernBERT. The sizes have the names that most of their `config.json` files use.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// The naming of the parameters in Hugging Face's files.
    pub naming: EncoderNaming,
    /// The vocabulary size; token ids are 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// The width of the embeddings. A projection to `hidden_size` follows them if the two differ (ELECTRA).
    pub embedding_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP's intermediate layer.
    pub intermediate_size: usize,
    /// The number of attention heads per block; divides `hidden_size`.
    pub num_attention_heads: usize,
    /// The blocks, in order.
    pub blocks: Vec<EncoderBlockConfig>,
    /// The positions of tokens.
    pub positions: EncoderPositions,
    /// The number of token types: usually one for a first text and one for a second. Without token types, it is 0.
    pub type_vocab_size: usize,
    /// The number added to the variance in layer norms.
    pub norm_eps: f64,
    /// Whether layer norms have biases.
    pub norm_bias: bool,
    /// Whether a block normalizes the inputs of attention and of the MLP, rather than the sums after them. The first
    /// block then has no norm before attention, because the embeddings are normalized, and a norm follows the last
    /// block (ModernBERT).
    pub norms_first: bool,
    /// Whether attention's projections have biases.
    pub attention_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the MLP multiplies the activation of one half of its first projection by the other half (ModernBERT).
    pub gated: bool,
    /// The MLP's activation.
    pub activation: Activation,
    /// The padding token. Its lookups add nothing to the embedding's gradient.
    pub pad_token_id: u32,
    /// The standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// The layers between the states and the classifier.
    pub head: EncoderHead,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// The dropout probabilities. Attention weights are never dropped.
    pub dropout: EncoderDropout,
    /// Whether each block keeps only its input in the forward pass and runs again in the backward pass.
    pub checkpoint_activations: bool,
    /// The adapters of projections in the blocks, which are selected by their names in the files.
    pub lora: Option<LoraConfig>,
    /// Whether BERT's pooler gets an adapter too, if `lora` selects it by name.
    pub adapts_pooler: bool,
}

/// The settings that differ between the blocks of an encoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncoderBlockConfig {
    /// The window: a position attends to the positions whose distance from it is less than this number. `None` means
    /// that it attends to all positions.
    pub window: Option<usize>,
    /// The base of the wavelengths of rotary positions. It is not used with learned positions.
    pub theta: f64,
}

/// The positions of an encoder's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncoderPositions {
    /// A table with this number of rows. The first token has the first row.
    Learned(usize),
    /// A table with this number of rows. A padding token, wherever it is, has the row of its id, and the other tokens
    /// have the rows after that (RoBERTa).
    LearnedAfterPadding(usize),
    /// Queries and keys are rotated. A text has at most this number of tokens.
    Rotary(usize),
}

/// The layers between an encoder's states and its classifier: pooling, a linear layer, an activation and possibly a
/// norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncoderHead {
    /// The pooling of a text's states.
    pub pooling: EncoderPooling,
    /// The activation of the linear layer.
    pub activation: HeadActivation,
    /// Whether a layer norm follows the activation.
    pub norm: bool,
    /// Whether the linear layer has a bias.
    pub bias: bool,
}

/// The pooling of a text's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncoderPooling {
    /// The state of the first token.
    First,
    /// The mean of the states of all tokens.
    Mean,
}

/// The activation of an encoder's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeadActivation {
    /// The hyperbolic tangent.
    Tanh,
    /// max(x, 0).
    Relu,
    /// An activation that MLPs also use.
    Mlp(Activation),
}

/// The dropout probabilities of an encoder in training.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EncoderDropout {
    /// The probability for the sum of the embeddings, after its norm.
    pub embeddings: f32,
    /// The probability for the output that attention adds to the residual stream.
    pub attention: f32,
    /// The probability for the MLP's intermediate values.
    pub intermediate: f32,
    /// The probability for the output that the MLP adds to the residual stream.
    pub mlp: f32,
    /// The probability for the pooled state.
    pub pooled: f32,
    /// The probability for the classifier's input.
    pub classifier: f32,
}

/// The naming of an encoder's parameters in Hugging Face's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncoderNaming {
    /// Names such as `bert.encoder.layer.0.attention.self.query.weight`, with a pooler.
    Bert,
    /// Names as in BERT's files, but with the prefix `roberta.` and a head in `classifier`. XLM-RoBERTa has the same
    /// names.
    Roberta,
    /// Names as in BERT's files, but with the prefix `electra.` and a head in `classifier`.
    Electra,
    /// Names such as `distilbert.transformer.layer.0.attention.q_lin.weight`.
    DistilBert,
    /// Names such as `model.layers.0.attn.Wqkv.weight`, with queries, keys and values in one projection.
    ModernBert,
}

impl EncoderNaming {
    /// Returns the prefix of all parameters outside the head.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::Electra => "electra",
            Self::DistilBert => "distilbert",
            Self::ModernBert => "model",
        }
    }

    /// Returns the name of the module that maps the head's values to logits.
    pub fn classifier(self) -> &'static str {
        match self {
            Self::Roberta | Self::Electra => "classifier.out_proj",
            Self::Bert | Self::DistilBert | Self::ModernBert => "classifier",
        }
    }

    /// Returns the name of the module with the head's other parameters.
    pub fn head(self) -> &'static str {
        match self {
            Self::Bert => "bert.pooler",
            Self::Roberta | Self::Electra => "classifier.dense",
            Self::DistilBert => "pre_classifier",
            Self::ModernBert => "head",
        }
    }

    /// Returns the name of the linear layer of the head.
    pub(super) fn head_dense(self) -> &'static str {
        match self {
            Self::Bert => "bert.pooler.dense",
            Self::ModernBert => "head.dense",
            Self::Roberta | Self::Electra | Self::DistilBert => self.head(),
        }
    }
}

impl EncoderConfig {
    /// Returns the maximum length of a text, in tokens.
    pub fn ctx(&self) -> usize {
        match self.positions {
            EncoderPositions::Learned(rows) | EncoderPositions::Rotary(rows) => rows,
            EncoderPositions::LearnedAfterPadding(rows) => rows.saturating_sub(self.pad_token_id as usize + 1),
        }
    }

    /// Checks that the sizes describe a valid model.
    ///
    /// # Errors
    /// A size of 0 or beyond the limits, a `hidden_size` that is not a multiple of the number of heads, or a number
    /// outside its allowed range.
    pub fn validate(&self) -> Result<()> {
        require_sizes(&[
            ("vocab_size", self.vocab_size),
            ("embedding_size", self.embedding_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.blocks.len()),
            ("num_attention_heads", self.num_attention_heads),
            ("the number of labels", self.labels.len()),
        ])?;
        require_blocks("num_hidden_layers", self.blocks.len())?;
        let (EncoderPositions::Learned(rows)
        | EncoderPositions::LearnedAfterPadding(rows)
        | EncoderPositions::Rotary(rows)) = self.positions;
        require_sizes(&[("max_position_embeddings", rows)])?;
        require_parameters(self.elements())?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let allowed = format!("a multiple of num_attention_heads ({})", self.num_attention_heads);
            return Err(invalid_field("hidden_size", self.hidden_size, &allowed));
        }
        if self.pad_token_id as usize >= self.vocab_size {
            let allowed = format!("below vocab_size ({})", self.vocab_size);
            return Err(invalid_field("pad_token_id", self.pad_token_id, &allowed));
        }
        self.validate_positions(rows)?;
        // Layers store this number in f32, in which 1e-12 is small but not 0.
        if !((self.norm_eps as f32) > 0.0 && self.norm_eps.is_finite()) {
            let key = if self.naming == EncoderNaming::ModernBert { "norm_eps" } else { "layer_norm_eps" };
            return Err(invalid_field(key, self.norm_eps, "a positive finite number, such as 1e-12"));
        }
        if !(self.initializer_range >= 0.0 && self.initializer_range.is_finite()) {
            let allowed = "a finite number of at least 0, such as 0.02";
            return Err(invalid_field("initializer_range", self.initializer_range, allowed));
        }
        let EncoderDropout { embeddings, attention, intermediate, mlp, pooled, classifier } = self.dropout;
        let hidden = [embeddings, attention, intermediate, mlp];
        for (key, values) in [("hidden_dropout_prob", &hidden[..]), ("classifier_dropout", &[classifier, pooled])] {
            if let Some(p) = values.iter().find(|p| !(0.0..1.0).contains(*p)) {
                return Err(invalid_field(key, p, "at least 0 and below 1"));
            }
        }
        self.lora.as_ref().map_or(Ok(()), LoraConfig::validate)
    }

    /// Checks the positions, of which there are `rows`, and the windows and rotary bases of the blocks.
    fn validate_positions(&self, rows: usize) -> Result<()> {
        let key = "max_position_embeddings";
        let head = self.hidden_size / self.num_attention_heads;
        match self.positions {
            EncoderPositions::Learned(_) => (),
            EncoderPositions::LearnedAfterPadding(_) if self.ctx() == 0 => {
                let allowed = format!(
                    "above pad_token_id + 1 ({}): the rows up to pad_token_id are not used",
                    self.pad_token_id as u64 + 1
                );
                return Err(invalid_field(key, rows, &allowed));
            }
            EncoderPositions::LearnedAfterPadding(_) => (),
            EncoderPositions::Rotary(_) if rows > MAX_POSITIONS => {
                return Err(invalid_field(
                    key,
                    rows,
                    &format!("at most {MAX_POSITIONS}: positions are counted in f32"),
                ));
            }
            EncoderPositions::Rotary(_) if !head.is_multiple_of(2) || head > MAX_HEAD_DIM => {
                let allowed = format!(
                    "num_attention_heads ({}) times an even number of at most {MAX_HEAD_DIM}: rotary positions rotate \
                     pairs of elements of a head",
                    self.num_attention_heads
                );
                return Err(invalid_field("hidden_size", self.hidden_size, &allowed));
            }
            EncoderPositions::Rotary(_) => (),
        }
        if let Some(block) = self.blocks.iter().find(|block| !(block.theta > 0.0 && block.theta.is_finite())) {
            return Err(invalid_field("rope_theta", block.theta, "a positive finite number"));
        }
        match self.blocks.iter().any(|block| block.window == Some(0)) {
            true => Err(invalid_field("window", 0, "at least 1")),
            false => Ok(()),
        }
    }

    /// Returns the number of elements of all parameters, for sizes that have not been validated.
    fn elements(&self) -> u128 {
        let wide = |size: usize| size as u128;
        let [d, inner, embedding, vocab] =
            [self.hidden_size, self.intermediate_size, self.embedding_size, self.vocab_size].map(wide);
        let rows = match self.positions {
            EncoderPositions::Learned(rows) | EncoderPositions::LearnedAfterPadding(rows) => wide(rows),
            EncoderPositions::Rotary(_) => 0,
        };
        let ups = if self.gated { 2 } else { 1 };
        let block = (4 * d + (ups + 1) * inner + 9).saturating_mul(d).saturating_add(ups * inner);
        let tables = (vocab + rows + wide(self.type_vocab_size) + 2).saturating_mul(embedding);
        let projection = if embedding == d { 0 } else { (embedding + 1).saturating_mul(d) };
        let head = (d + wide(self.labels.len()) + 5).saturating_mul(d);
        let blocks = wide(self.blocks.len()).saturating_mul(block);
        blocks.saturating_add(tables).saturating_add(projection).saturating_add(head)
    }
}
