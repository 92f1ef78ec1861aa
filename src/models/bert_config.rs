//! The shape of an encoder that classifies sequences, from the `config.json` of a BERT.

use super::config::{refused, require_parameters, require_sizes};
use crate::error::{Error, Result};
use crate::files;
use crate::nn::Activation;
use serde_json::{Map, Value};
use std::path::Path;

/// The shape of a BERT (Devlin et al. 2018) with a head that classifies sequences. The sizes have the names of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct BertConfig {
    /// Token ids, 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside of the MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_hidden_layers: usize,
    /// Attention heads per block; divides `hidden_size`.
    pub num_attention_heads: usize,
    /// Positions: the longest input, in tokens.
    pub max_position_embeddings: usize,
    /// Kinds of tokens: of a first text and of a second one.
    pub type_vocab_size: usize,
    /// Added to the variance in layer norms.
    pub layer_norm_eps: f64,
    /// The MLP's activation.
    pub activation: Activation,
    /// The token that fills rows up.
    pub pad_token_id: u32,
    /// Names of the classes.
    pub labels: Vec<String>,
    /// The probability with which training drops elements of the sum of the embeddings, and of what each attention and each
    /// MLP adds to the residual stream. Attention's weights are never dropped.
    pub hidden_dropout: f32,
    /// The same for the classifier's input.
    pub classifier_dropout: f32,
    /// Whether each block keeps only its input in forward and runs again in backward.
    pub checkpoint_activations: bool,
}

const MOST_BYTES: u64 = 1 << 24;

impl BertConfig {
    /// What the `config.json` of a Hugging Face model describes.
    ///
    /// # Errors
    /// A file that cannot be read; another model than a BERT; a value that this library does not compute with.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let text = files::read_text(path, MOST_BYTES).map_err(wrong)?;
        let config: Value =
            serde_json::from_str(&text).map_err(|e| wrong(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))?;
        Self::from_hugging_face(&config)
    }

    /// The same of a file's parsed content.
    ///
    /// # Errors
    /// As [`BertConfig::read`].
    pub fn from_hugging_face(config: &Value) -> Result<Self> {
        let empty = Map::new();
        let keys = Keys(config.as_object().unwrap_or(&empty));
        match keys.get("model_type").and_then(Value::as_str) {
            Some("bert") => (),
            _ => return Err(keys.refuse("model_type", "\"bert\", the encoder that is known")),
        }
        for (key, only) in [("position_embedding_type", Value::from("absolute")), ("is_decoder", Value::from(false))] {
            if keys.get(key).is_some_and(|found| *found != only) {
                return Err(keys.refuse(key, &only.to_string()));
            }
        }
        let activation = match keys.get("hidden_act").map_or(Some("gelu"), Value::as_str) {
            Some("gelu") => Activation::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluTanh,
            Some("silu" | "swish") => Activation::Silu,
            _ => return Err(keys.refuse("hidden_act", "gelu, gelu_new, gelu_pytorch_tanh or silu")),
        };
        let hidden_dropout = keys.number("hidden_dropout_prob", 0.1)?;
        let classifier_dropout = keys.number("classifier_dropout", hidden_dropout)?;
        let config = Self {
            vocab_size: keys.size("vocab_size", 30_522)?,
            hidden_size: keys.size("hidden_size", 768)?,
            intermediate_size: keys.size("intermediate_size", 3072)?,
            num_hidden_layers: keys.size("num_hidden_layers", 12)?,
            num_attention_heads: keys.size("num_attention_heads", 12)?,
            max_position_embeddings: keys.size("max_position_embeddings", 512)?,
            type_vocab_size: keys.size("type_vocab_size", 2)?,
            layer_norm_eps: keys.number("layer_norm_eps", 1e-12)?,
            activation,
            pad_token_id: keys.size("pad_token_id", 0)? as u32,
            labels: keys.labels()?,
            hidden_dropout: hidden_dropout as f32,
            classifier_dropout: classifier_dropout as f32,
            checkpoint_activations: false,
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// A size of 0 or beyond all bounds, a width that the heads do not divide, a number that cannot be computed with.
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
        // Layers hold it in f32, where 1e-12 is small but a number.
        if !((self.layer_norm_eps as f32) > 0.0 && self.layer_norm_eps.is_finite()) {
            return Err(refused("layer_norm_eps", self.layer_norm_eps, "a positive finite number, as 1e-12"));
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

/// Typed values of `config.json`.
struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn refuse(&self, key: &'static str, allowed: &str) -> Error {
        refused(key, self.get(key).map_or_else(|| "absent".to_owned(), Value::to_string), allowed)
    }

    fn size(&self, key: &'static str, default: usize) -> Result<usize> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let size = value.as_u64().and_then(|size| u32::try_from(size).ok());
        size.map(|size| size as usize).ok_or_else(|| self.refuse(key, "a whole number below 2^32"))
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.refuse(key, "a number"))
    }

    /// Names of classes by their numbers, which go from 0 without a gap.
    fn labels(&self) -> Result<Vec<String>> {
        let Some(found) = self.get("id2label") else {
            return Ok((0..self.size("num_labels", 2)?).map(|i| format!("LABEL_{i}")).collect());
        };
        let label = |i: usize| found.get(i.to_string()).and_then(Value::as_str).map(str::to_owned);
        let labels = found.as_object().and_then(|map| (0..map.len()).map(label).collect());
        labels.ok_or_else(|| self.refuse("id2label", "an object of names by the numbers 0, 1, 2, ..."))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_that_are_not_computed_with_are_refused_by_key() {
        let text = |config: Value| BertConfig::from_hugging_face(&config).unwrap_err().to_string();
        insta::assert_snapshot!(text(json!([])), @r#"model configuration: model_type is absent, but must be "bert", the encoder that is known"#);
        insta::assert_snapshot!(text(json!({"model_type": "llama"})), @r#"model configuration: model_type is "llama", but must be "bert", the encoder that is known"#);
        let with = |key: &str, value: Value| {
            let mut config = json!({"model_type": "bert"});
            config[key] = value;
            text(config)
        };
        insta::assert_snapshot!(with("position_embedding_type", json!("relative_key")), @r#"model configuration: position_embedding_type is "relative_key", but must be "absolute""#);
        insta::assert_snapshot!(with("hidden_act", json!("relu")), @r#"model configuration: hidden_act is "relu", but must be gelu, gelu_new, gelu_pytorch_tanh or silu"#);
        insta::assert_snapshot!(with("hidden_size", json!(770)), @"model configuration: hidden_size is 770, but must be a multiple of num_attention_heads (12)");
        insta::assert_snapshot!(with("hidden_size", json!(-1)), @"model configuration: hidden_size is -1, but must be a whole number below 2^32");
        insta::assert_snapshot!(with("id2label", json!({"1": "a"})), @r#"model configuration: id2label is {"1":"a"}, but must be an object of names by the numbers 0, 1, 2, ..."#);
        insta::assert_snapshot!(with("id2label", json!({})), @"model configuration: the number of labels is 0, but must be at least 1");
        insta::assert_snapshot!(with("pad_token_id", json!(40000)), @"model configuration: pad_token_id is 40000, but must be below vocab_size (30522)");
        insta::assert_snapshot!(with("classifier_dropout", json!(1.0)), @"model configuration: classifier_dropout is 1, but must be at least 0 and below 1");
    }
}
