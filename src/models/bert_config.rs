//! The shape of a sequence classification encoder, from the `config.json` of a BERT model.

use super::DecoderConfig;
use super::config_checks::{refused, require_blocks, require_parameters, require_sizes};
use super::json_keys::JsonKeys;
use crate::error::{Error, ModelError, Result};
use crate::nn::Activation;
use serde_json::{Map, Value};
use std::path::Path;

/// The `model_type` of the supported encoder.
#[doc(hidden)]
pub const BERT: &str = "bert";

/// The shape of a BERT (Devlin et al. 2018) with a sequence classification head. The sizes have the names
/// that `config.json` uses.
#[derive(Debug, Clone, PartialEq)]
pub struct BertConfig {
    /// The vocabulary size; token ids are 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP's intermediate layer.
    pub intermediate_size: usize,
    /// The number of transformer blocks.
    pub num_hidden_layers: usize,
    /// The number of attention heads per block; divides `hidden_size`.
    pub num_attention_heads: usize,
    /// The number of positions, which is the maximum length of an input in tokens.
    pub max_position_embeddings: usize,
    /// The number of token types: one for a first text and one for a second.
    pub type_vocab_size: usize,
    /// The number added to the variance in layer norms.
    pub layer_norm_eps: f64,
    /// The standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// The MLP's activation.
    pub activation: Activation,
    /// The padding token.
    pub pad_token_id: u32,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// The probability with which training drops elements of the sum of the embeddings, and of the output that each
    /// attention and each MLP adds to the residual stream. Attention weights are never dropped.
    pub hidden_dropout: f32,
    /// The dropout probability of the classifier's input.
    pub classifier_dropout: f32,
    /// Whether each block keeps only its input in the forward pass and runs again in the backward pass.
    pub checkpoint_activations: bool,
}

impl BertConfig {
    /// Reads the shape from the `config.json` of a Hugging Face model.
    ///
    /// # Errors
    /// A file that cannot be read; a model other than BERT; a value that this library does not support.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_parsed(&DecoderConfig::parse(path)?, path)
    }

    /// Reads the shape from the parsed content of a `config.json`.
    ///
    /// # Errors
    /// The errors of [`BertConfig::read`].
    pub fn from_hugging_face(config: &Value) -> Result<Self> {
        Self::from_parsed(config, Path::new("config.json"))
    }

    /// Reads the shape from the parsed content of `file`.
    #[doc(hidden)]
    pub fn from_parsed(content: &Value, file: &Path) -> Result<Self> {
        let empty = Map::new();
        let keys = JsonKeys::new(file, "", content.as_object().unwrap_or(&empty));
        match keys.get("model_type").and_then(Value::as_str) {
            Some(BERT) => (),
            _ => return Err(keys.refuse("model_type", "\"bert\", the only supported encoder")),
        }
        for (key, only) in [("position_embedding_type", Value::from("absolute")), ("is_decoder", Value::from(false))] {
            if keys.get(key).is_some_and(|found| *found != only) {
                return Err(keys.refuse(key, only));
            }
        }
        let activation = match keys.get("hidden_act").map_or(Some("gelu"), Value::as_str) {
            Some("gelu") => Activation::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluTanh,
            Some("silu" | "swish") => Activation::Silu,
            _ => return Err(keys.refuse("hidden_act", "gelu, gelu_new, gelu_pytorch_tanh or silu")),
        };
        let size = |key, default| Ok::<_, Error>(keys.size(key)?.unwrap_or(default));
        let number = |key, default| match keys.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| keys.refuse(key, "a number")),
        };
        let hidden_dropout = number("hidden_dropout_prob", 0.1)?;
        let config = Self {
            vocab_size: size("vocab_size", 30_522)?,
            hidden_size: size("hidden_size", 768)?,
            intermediate_size: size("intermediate_size", 3072)?,
            num_hidden_layers: size("num_hidden_layers", 12)?,
            num_attention_heads: size("num_attention_heads", 12)?,
            max_position_embeddings: size("max_position_embeddings", 512)?,
            type_vocab_size: size("type_vocab_size", 2)?,
            layer_norm_eps: number("layer_norm_eps", 1e-12)?,
            initializer_range: number("initializer_range", 0.02)?,
            activation,
            pad_token_id: match keys.get("pad_token_id") {
                None => 0,
                Some(id) => {
                    let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                    id.ok_or_else(|| keys.refuse("pad_token_id", "a token id"))?
                }
            },
            labels: labels(&keys)?,
            hidden_dropout: hidden_dropout as f32,
            classifier_dropout: number("classifier_dropout", hidden_dropout)? as f32,
            checkpoint_activations: false,
        };
        match config.validate() {
            Ok(()) => Ok(config),
            Err(Error::Model(ModelError::Config { key, found, allowed })) => Err(keys.refuse_as(key, found, allowed)),
            Err(other) => Err(other),
        }
    }

    /// Checks that the sizes describe a valid model.
    ///
    /// # Errors
    /// A size of 0 or beyond the limits, a width that the heads do not divide, or a number outside its allowed range.
    pub fn validate(&self) -> Result<()> {
        require_sizes(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
            ("the number of labels", self.labels.len()),
        ])?;
        require_blocks("num_hidden_layers", self.num_hidden_layers)?;
        let [vocab, d, inner, layers, ctx, types] = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.max_position_embeddings,
            self.type_vocab_size,
        ]
        .map(|size| size as u128);
        let block = (4 * d + 2 * inner + 9).saturating_mul(d).saturating_add(inner);
        let rows = vocab + ctx + types + 3 + d + self.labels.len() as u128;
        require_parameters(layers.saturating_mul(block).saturating_add(rows.saturating_mul(d)))?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let allowed = format!("a multiple of num_attention_heads ({})", self.num_attention_heads);
            return Err(refused("hidden_size", self.hidden_size, &allowed));
        }
        if self.pad_token_id as usize >= self.vocab_size {
            let allowed = format!("below vocab_size ({})", self.vocab_size);
            return Err(refused("pad_token_id", self.pad_token_id, &allowed));
        }
        // Layers store it in f32. There, 1e-12 is small but not 0.
        if !((self.layer_norm_eps as f32) > 0.0 && self.layer_norm_eps.is_finite()) {
            return Err(refused("layer_norm_eps", self.layer_norm_eps, "a positive finite number, such as 1e-12"));
        }
        if !(self.initializer_range >= 0.0 && self.initializer_range.is_finite()) {
            let allowed = "a finite number of at least 0, such as 0.02";
            return Err(refused("initializer_range", self.initializer_range, allowed));
        }
        for (key, p) in [("hidden_dropout_prob", self.hidden_dropout), ("classifier_dropout", self.classifier_dropout)]
        {
            if !(0.0..1.0).contains(&p) {
                return Err(refused(key, p, "at least 0 and below 1"));
            }
        }
        Ok(())
    }
}

/// Returns the class names in the order of their numbers, which start at 0 and have no gaps.
fn labels(keys: &JsonKeys<'_>) -> Result<Vec<String>> {
    let Some(found) = keys.get("id2label") else {
        return Ok((0..keys.size("num_labels")?.unwrap_or(2)).map(|i| format!("LABEL_{i}")).collect());
    };
    let label = |i: usize| found.get(i.to_string()).and_then(Value::as_str).map(str::to_owned);
    let labels = found.as_object().and_then(|map| (0..map.len()).map(label).collect());
    labels.ok_or_else(|| keys.refuse("id2label", "an object that maps the numbers 0, 1, 2, ... to names"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_that_are_not_computed_with_are_refused_by_key() {
        let text = |config: Value| BertConfig::from_hugging_face(&config).unwrap_err().to_string();
        insta::assert_snapshot!(text(json!([])), @r#"config.json: model_type is absent, but must be "bert", the only supported encoder"#);
        insta::assert_snapshot!(text(json!({"model_type": "llama"})), @r#"config.json: model_type is "llama", but must be "bert", the only supported encoder"#);
        let with = |key: &str, value: Value| {
            let mut config = json!({"model_type": "bert"});
            config[key] = value;
            text(config)
        };
        insta::assert_snapshot!(with("position_embedding_type", json!("relative_key")), @r#"config.json: position_embedding_type is "relative_key", but must be "absolute""#);
        insta::assert_snapshot!(with("hidden_act", json!("relu")), @r#"config.json: hidden_act is "relu", but must be gelu, gelu_new, gelu_pytorch_tanh or silu"#);
        insta::assert_snapshot!(with("hidden_size", json!(770)), @"config.json: hidden_size is 770, but must be a multiple of num_attention_heads (12)");
        insta::assert_snapshot!(with("hidden_size", json!(-1)), @"config.json: hidden_size is -1, but must be a whole number from 1 to 4294967295");
        insta::assert_snapshot!(with("num_hidden_layers", json!(4_000_000_000u32)), @"config.json: num_hidden_layers is 4000000000, but must be at most 16384");
        insta::assert_snapshot!(with("id2label", json!({"1": "a"})), @r#"config.json: id2label is {"1":"a"}, but must be an object that maps the numbers 0, 1, 2, ... to names"#);
        insta::assert_snapshot!(with("initializer_range", json!(-1)), @"config.json: initializer_range is -1, but must be a finite number of at least 0, such as 0.02");
        insta::assert_snapshot!(with("pad_token_id", json!(-1)), @"config.json: pad_token_id is -1, but must be a token id");
        insta::assert_snapshot!(with("id2label", json!({})), @"config.json: the number of labels is 0, but must be at least 1");
        insta::assert_snapshot!(with("pad_token_id", json!(40000)), @"config.json: pad_token_id is 40000, but must be below vocab_size (30522)");
        insta::assert_snapshot!(with("classifier_dropout", json!(1.0)), @"config.json: classifier_dropout is 1, but must be at least 0 and below 1");
    }
}
