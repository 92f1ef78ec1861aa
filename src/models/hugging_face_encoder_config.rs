//! Reads the `config.json` of the known encoders, in the format of transformers 4 or 5.

use super::DecoderConfig;
use super::encoder_config::{
    EncoderBlockConfig, EncoderConfig, EncoderDropout, EncoderHead, EncoderNaming, EncoderPooling, EncoderPositions,
    HeadActivation,
};
use super::json_object_reader::JsonObjectReader;
use crate::error::{Error, ModelError, Result};
use crate::nn::Activation;
use serde_json::{Map, Value};
use std::path::Path;

/// The values of `model_type` of the known encoders.
#[doc(hidden)]
pub const ENCODER_TYPES: [&str; 6] = ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert"];

/// A class of transformers whose models are built like BERT, with the defaults for keys that their files omit.
struct BertFamily {
    naming: EncoderNaming,
    vocab: usize,
    /// The width of the embeddings, if there is a key for it.
    embedding: Option<usize>,
    hidden: usize,
    intermediate_size: usize,
    heads: usize,
    padding: u32,
    head_activation: HeadActivation,
}

const BERT: BertFamily = BertFamily {
    naming: EncoderNaming::Bert,
    vocab: 30_522,
    embedding: None,
    hidden: 768,
    intermediate_size: 3072,
    heads: 12,
    padding: 0,
    head_activation: HeadActivation::Tanh,
};
const ROBERTA: BertFamily = BertFamily { naming: EncoderNaming::Roberta, vocab: 50_265, padding: 1, ..BERT };
const XLM_ROBERTA: BertFamily = BertFamily { vocab: 30_522, ..ROBERTA };
const ELECTRA: BertFamily = BertFamily {
    naming: EncoderNaming::Electra,
    embedding: Some(128),
    hidden: 256,
    intermediate_size: 1024,
    heads: 4,
    head_activation: HeadActivation::Mlp(Activation::Gelu),
    ..BERT
};

impl EncoderConfig {
    /// Reads the shape from the `config.json` of a Hugging Face model.
    ///
    /// # Errors
    /// A file that cannot be read; a model whose type is not one of [`ENCODER_TYPES`]; a value that this library does
    /// not support.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_parsed(&DecoderConfig::parse(path)?, path)
    }

    /// Reads the shape from the parsed content of a `config.json`.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::read`], except that no file is read.
    pub fn from_hugging_face(config: &Value) -> Result<Self> {
        Self::from_parsed(config, Path::new("config.json"))
    }

    /// Reads the shape from the parsed content of `file`.
    #[doc(hidden)]
    pub fn from_parsed(content: &Value, file: &Path) -> Result<Self> {
        read(content, file)
    }
}

/// Reads the configuration from `content`, the content of `file`.
fn read(content: &Value, file: &Path) -> Result<EncoderConfig> {
    let empty = Map::new();
    let keys = EncoderConfigReader(JsonObjectReader::new(file, "", content.as_object().unwrap_or(&empty)));
    if keys.0.get("quantization_config").is_some() {
        return Err(keys.0.refuse("quantization_config", "absent: weights are read in f32, bf16 or f16"));
    }
    let config = match keys.0.get("model_type").and_then(Value::as_str) {
        Some("bert") => keys.like_bert(&BERT)?,
        Some("roberta") => keys.like_bert(&ROBERTA)?,
        Some("xlm-roberta") => keys.like_bert(&XLM_ROBERTA)?,
        Some("electra") => keys.like_bert(&ELECTRA)?,
        Some("distilbert") => keys.distilbert()?,
        Some("modernbert") => keys.modernbert()?,
        _ => {
            let known = ENCODER_TYPES.map(|known| format!("\"{known}\"")).join(", ");
            return Err(keys.0.refuse("model_type", format!("that of a known encoder: {known}")));
        }
    };
    match config.validate() {
        Ok(()) => Ok(config),
        Err(Error::Model(ModelError::Config { key, found, allowed })) => {
            let key = match config.naming {
                EncoderNaming::DistilBert => distilbert_key(key),
                _ => key,
            };
            Err(keys.0.refuse_as(key, found, allowed))
        }
        Err(other) => Err(other),
    }
}

/// Returns DistilBERT's name for a key.
fn distilbert_key(key: &'static str) -> &'static str {
    match key {
        "hidden_size" | "embedding_size" => "dim",
        "intermediate_size" => "hidden_dim",
        "num_hidden_layers" => "n_layers",
        "num_attention_heads" => "n_heads",
        "hidden_dropout_prob" => "dropout",
        "classifier_dropout" => "seq_classif_dropout",
        other => other,
    }
}

/// Returns the class names from `content`, the parsed `config.json` at `file`. The model may be of any kind.
///
/// # Errors
/// Names whose numbers do not start at 0 or have gaps, or an invalid `num_labels`.
#[doc(hidden)]
pub fn class_names(content: &Value, file: &Path) -> Result<Vec<String>> {
    let empty = Map::new();
    EncoderConfigReader(JsonObjectReader::new(file, "", content.as_object().unwrap_or(&empty))).labels()
}

/// A reader of an encoder's `config.json`.
struct EncoderConfigReader<'a>(JsonObjectReader<'a>);

impl EncoderConfigReader<'_> {
    fn size(&self, key: &str, default: usize) -> Result<usize> {
        // An absent key has a default in transformers; null does not.
        if self.0.is_null(key) {
            return Err(self.0.refuse(key, "a whole number of at least 1"));
        }
        Ok(self.0.size(key)?.unwrap_or(default))
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.0.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.0.refuse(key, "a number")),
        }
    }

    /// Returns an error unless each of these keys is absent or has its only supported value.
    fn only<const N: usize>(&self, keys: [(&str, Value); N]) -> Result<()> {
        match keys.into_iter().find(|(key, only)| self.0.get(key).is_some_and(|found| found != only)) {
            Some((key, only)) => Err(self.0.refuse(key, only)),
            None => Ok(()),
        }
    }

    fn activation(&self, key: &str) -> Result<Activation> {
        match self.0.get(key).map_or(Some("gelu"), Value::as_str) {
            Some("gelu") => Ok(Activation::Gelu),
            Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some("silu" | "swish") => Ok(Activation::Silu),
            _ => Err(self.0.refuse(key, "gelu, gelu_new, gelu_pytorch_tanh, silu or swish")),
        }
    }

    fn padding(&self, default: u32) -> Result<u32> {
        let Some(id) = self.0.get("pad_token_id") else { return Ok(default) };
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| self.0.refuse("pad_token_id", "a token id"))
    }

    /// Returns the class names in the order of their numbers, which start at 0 and have no gaps.
    fn labels(&self) -> Result<Vec<String>> {
        let Some(found) = self.0.get("id2label") else {
            return Ok((0..self.0.size("num_labels")?.unwrap_or(2)).map(|i| format!("LABEL_{i}")).collect());
        };
        let label = |i: usize| found.get(i.to_string()).and_then(Value::as_str).map(str::to_owned);
        let labels = found.as_object().and_then(|map| (0..map.len()).map(label).collect());
        labels.ok_or_else(|| self.0.refuse("id2label", "an object that maps the numbers 0, 1, 2, ... to names"))
    }

    /// Reads the configuration of a family that is built like BERT.
    fn like_bert(&self, family: &BertFamily) -> Result<EncoderConfig> {
        self.only([
            ("position_embedding_type", Value::from("absolute")),
            ("is_decoder", Value::from(false)),
            ("add_cross_attention", Value::from(false)),
        ])?;
        let hidden = self.number("hidden_dropout_prob", 0.1)? as f32;
        let classifier = self.number("classifier_dropout", f64::from(hidden))? as f32;
        let (rows, hidden_size) =
            (self.size("max_position_embeddings", 512)?, self.size("hidden_size", family.hidden)?);
        let is_roberta = family.naming == EncoderNaming::Roberta;
        let positions = match is_roberta {
            true => EncoderPositions::LearnedAfterPadding(rows),
            false => EncoderPositions::Learned(rows),
        };
        let pooled = if family.naming == EncoderNaming::Bert { 0.0 } else { classifier };
        Ok(EncoderConfig {
            naming: family.naming,
            vocab_size: self.size("vocab_size", family.vocab)?,
            embedding_size: match family.embedding {
                Some(default) => self.size("embedding_size", default)?,
                None => hidden_size,
            },
            hidden_size,
            intermediate_size: self.size("intermediate_size", family.intermediate_size)?,
            num_attention_heads: self.size("num_attention_heads", family.heads)?,
            blocks: self.equal_blocks("num_hidden_layers", 12)?,
            positions,
            type_vocab_size: self.size("type_vocab_size", 2)?,
            norm_eps: self.number("layer_norm_eps", 1e-12)?,
            norm_bias: true,
            norms_first: false,
            attention_bias: true,
            mlp_bias: true,
            gated: false,
            activation: self.activation("hidden_act")?,
            pad_token_id: self.padding(family.padding)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            head: EncoderHead {
                pooling: EncoderPooling::First,
                activation: family.head_activation,
                norm: false,
                bias: true,
            },
            labels: self.labels()?,
            dropout: EncoderDropout {
                embeddings: hidden,
                attention: hidden,
                intermediate: 0.0,
                mlp: hidden,
                pooled,
                classifier,
            },
            checkpoint_activations: false,
            lora: None,
            adapts_pooler: true,
        })
    }

    /// Reads the number of blocks from `key`, and returns that many blocks without windows.
    fn equal_blocks(&self, key: &'static str, default: usize) -> Result<Vec<EncoderBlockConfig>> {
        let blocks = self.size(key, default)?;
        // The number is checked before memory for the blocks is allocated.
        super::config_checks::require_blocks(key, blocks).map_err(|error| self.with_file(error))?;
        Ok(vec![EncoderBlockConfig { window: None, theta: 1e4 }; blocks])
    }

    /// Adds the file to an error about a value.
    fn with_file(&self, error: Error) -> Error {
        match error {
            Error::Model(ModelError::Config { key, found, allowed }) => self.0.refuse_as(key, found, allowed),
            other => other,
        }
    }

    fn distilbert(&self) -> Result<EncoderConfig> {
        self.only([("sinusoidal_pos_embds", Value::from(false))])?;
        let (hidden_size, dropout) = (self.size("dim", 768)?, self.number("dropout", 0.1)? as f32);
        Ok(EncoderConfig {
            naming: EncoderNaming::DistilBert,
            vocab_size: self.size("vocab_size", 30_522)?,
            embedding_size: hidden_size,
            hidden_size,
            intermediate_size: self.size("hidden_dim", 3072)?,
            num_attention_heads: self.size("n_heads", 12)?,
            blocks: self.equal_blocks("n_layers", 6)?,
            positions: EncoderPositions::Learned(self.size("max_position_embeddings", 512)?),
            type_vocab_size: 0,
            norm_eps: 1e-12,
            norm_bias: true,
            norms_first: false,
            attention_bias: true,
            mlp_bias: true,
            gated: false,
            activation: self.activation("activation")?,
            pad_token_id: self.padding(0)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            head: EncoderHead {
                pooling: EncoderPooling::First,
                activation: HeadActivation::Relu,
                norm: false,
                bias: true,
            },
            labels: self.labels()?,
            dropout: EncoderDropout {
                embeddings: dropout,
                mlp: dropout,
                classifier: self.number("seq_classif_dropout", 0.2)? as f32,
                ..EncoderDropout::default()
            },
            checkpoint_activations: false,
            lora: None,
            adapts_pooler: false,
        })
    }

    fn modernbert(&self) -> Result<EncoderConfig> {
        let hidden_size = self.size("hidden_size", 768)?;
        let pooling = match self.0.text("classifier_pooling")? {
            None | Some("cls") => EncoderPooling::First,
            Some("mean") => EncoderPooling::Mean,
            Some(_) => return Err(self.0.refuse("classifier_pooling", "\"cls\" or \"mean\"")),
        };
        Ok(EncoderConfig {
            naming: EncoderNaming::ModernBert,
            vocab_size: self.size("vocab_size", 50_368)?,
            embedding_size: hidden_size,
            hidden_size,
            intermediate_size: self.size("intermediate_size", 1152)?,
            num_attention_heads: self.size("num_attention_heads", 12)?,
            blocks: self.modernbert_blocks()?,
            positions: EncoderPositions::Rotary(self.size("max_position_embeddings", 8192)?),
            type_vocab_size: 0,
            norm_eps: self.number("norm_eps", 1e-5)?,
            norm_bias: self.0.flag("norm_bias", false)?,
            norms_first: true,
            attention_bias: self.0.flag("attention_bias", false)?,
            mlp_bias: self.0.flag("mlp_bias", false)?,
            gated: true,
            activation: self.activation("hidden_activation")?,
            pad_token_id: self.padding(50_283)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            head: EncoderHead {
                pooling,
                activation: HeadActivation::Mlp(self.activation("classifier_activation")?),
                norm: true,
                bias: self.0.flag("classifier_bias", false)?,
            },
            labels: self.labels()?,
            dropout: EncoderDropout {
                embeddings: self.number("embedding_dropout", 0.0)? as f32,
                attention: self.number("attention_dropout", 0.0)? as f32,
                intermediate: self.number("mlp_dropout", 0.0)? as f32,
                classifier: self.number("classifier_dropout", 0.0)? as f32,
                ..EncoderDropout::default()
            },
            checkpoint_activations: false,
            lora: None,
            adapts_pooler: false,
        })
    }

    /// Returns the blocks of a ModernBERT. In some of them, a position attends only to nearby positions.
    fn modernbert_blocks(&self) -> Result<Vec<EncoderBlockConfig>> {
        let blocks = self.equal_blocks("num_hidden_layers", 22)?.len();
        let every = self.size("global_attn_every_n_layers", 3)?;
        let is_full = match self.0.get("layer_types") {
            None => (0..blocks).map(|block| block.is_multiple_of(every)).collect(),
            Some(found) => {
                let is_full = |kind: &Value| match kind.as_str() {
                    Some("full_attention") => Some(true),
                    Some("sliding_attention") => Some(false),
                    _ => None,
                };
                let flags: Option<Vec<bool>> = found.as_array().and_then(|flags| flags.iter().map(is_full).collect());
                flags.filter(|flags| flags.len() == blocks).ok_or_else(|| {
                    let allowed = format!(
                        "a list of num_hidden_layers ({blocks}) values, \"full_attention\" or \"sliding_attention\""
                    );
                    self.0.refuse("layer_types", allowed)
                })?
            }
        };
        if self.0.get("rope_scaling").is_some() {
            return Err(self.0.refuse("rope_scaling", NO_SCALING));
        }
        let global = self.theta("full_attention", "rope_parameters.full_attention.", "global_rope_theta")?;
        let local = self.theta("sliding_attention", "rope_parameters.sliding_attention.", "local_rope_theta")?;
        let global = global.unwrap_or(160_000.0);
        // In the format of transformers 4, null means the same base everywhere.
        let local = local.unwrap_or(if self.0.is_null("local_rope_theta") { global } else { 1e4 });
        // A position sees the positions up to half of `local_attention` away.
        let window = self.size("local_attention", 128)? / 2 + 1;
        let block = |is_full: &bool| match is_full {
            true => EncoderBlockConfig { window: None, theta: global },
            false => EncoderBlockConfig { window: Some(window), theta: local },
        };
        Ok(is_full.iter().map(block).collect())
    }

    /// Returns the base of the wavelengths in blocks of `kind`, if a base is given: from `rope_parameters`, as
    /// transformers 5 writes it, or from `old_key`.
    fn theta(&self, kind: &str, prefix: &'static str, old_key: &str) -> Result<Option<f64>> {
        let layer_rope = match self.0.object("rope_parameters", "rope_parameters.")? {
            Some(kinds) => {
                let allowed_keys = ["full_attention", "sliding_attention"];
                if let Some(other) = kinds.keys().find(|key| !allowed_keys.contains(key)) {
                    return Err(kinds.refuse(other, "left out: the keys are full_attention and sliding_attention"));
                }
                kinds.object(kind, prefix)?
            }
            None => None,
        };
        let Some(rope) = layer_rope else { return self.0.positive(old_key) };
        if rope.get("rope_type").is_some_and(|found| found != "default") {
            return Err(rope.refuse("rope_type", "\"default\": no scaling of rotary positions is known for ModernBERT"));
        }
        if let Some(other) = rope.keys().find(|key| !["rope_type", "rope_theta"].contains(key)) {
            return Err(rope.refuse(other, "left out: the keys are rope_theta and rope_type"));
        }
        rope.positive("rope_theta")
    }
}

const NO_SCALING: &str = "absent: no scaling of rotary positions is known for ModernBERT";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn text(config: Value) -> String {
        EncoderConfig::from_hugging_face(&config).unwrap_err().to_string()
    }

    fn with(model_type: &str, key: &str, value: Value) -> String {
        let mut config = json!({ "model_type": model_type });
        config[key] = value;
        text(config)
    }

    #[test]
    fn values_that_are_not_computed_with_are_refused_by_key() {
        insta::assert_snapshot!(text(json!([])));
        insta::assert_snapshot!(text(json!({"model_type": "llama"})));
        let bert = |key: &str, value: Value| with("bert", key, value);
        insta::assert_snapshot!(bert("position_embedding_type", json!("relative_key")));
        insta::assert_snapshot!(bert("hidden_act", json!("relu")));
        insta::assert_snapshot!(bert("hidden_size", json!(770)));
        insta::assert_snapshot!(bert("hidden_size", json!(-1)));
        insta::assert_snapshot!(bert("hidden_size", json!(null)));
        insta::assert_snapshot!(bert("num_hidden_layers", json!(4_000_000_000u32)));
        insta::assert_snapshot!(bert("id2label", json!({"1": "a"})));
        insta::assert_snapshot!(bert("initializer_range", json!(-1)));
        insta::assert_snapshot!(bert("pad_token_id", json!(-1)));
        insta::assert_snapshot!(bert("id2label", json!({})));
        insta::assert_snapshot!(bert("pad_token_id", json!(40000)));
        insta::assert_snapshot!(bert("classifier_dropout", json!(1.0)));
        insta::assert_snapshot!(bert("quantization_config", json!({"bits": 4})));
        insta::assert_snapshot!(with("roberta", "is_decoder", json!(true)));
        insta::assert_snapshot!(with("roberta", "max_position_embeddings", json!(2)));
        insta::assert_snapshot!(with("electra", "embedding_size", json!(0)));
        insta::assert_snapshot!(with("distilbert", "sinusoidal_pos_embds", json!(true)));
        insta::assert_snapshot!(with("distilbert", "dim", json!(770)));
        insta::assert_snapshot!(with("distilbert", "activation", json!("relu")));
    }

    #[test]
    fn options_of_a_modernbert_that_are_not_known_are_refused_by_key() {
        let modern = |key: &str, value: Value| with("modernbert", key, value);
        insta::assert_snapshot!(modern("classifier_pooling", json!("max")));
        insta::assert_snapshot!(modern("layer_types", json!(["full_attention"])));
        insta::assert_snapshot!(modern("layer_types", json!("full_attention")));
        insta::assert_snapshot!(modern("rope_scaling", json!({"type": "yarn"})));
        insta::assert_snapshot!(modern(
            "rope_parameters",
            json!({"full_attention": {"rope_type": "yarn", "factor": 2.0}})
        ));
        insta::assert_snapshot!(modern("rope_parameters", json!({"rope_theta": 1e4})));
        insta::assert_snapshot!(modern("global_rope_theta", json!(0)));
        insta::assert_snapshot!(modern("local_attention", json!("wide")));
        insta::assert_snapshot!(modern("global_attn_every_n_layers", json!(0)));
        insta::assert_snapshot!(modern("hidden_activation", json!("relu")));
        insta::assert_snapshot!(modern("num_attention_heads", json!(256)));
        insta::assert_snapshot!(modern("norm_eps", json!(0)));
    }

    #[test]
    fn both_styles_of_a_modernbert_describe_the_same_blocks() {
        let blocks = |config: Value| EncoderConfig::from_hugging_face(&config).unwrap().blocks;
        let old = json!({"model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 9,
            "global_rope_theta": 5e4, "local_rope_theta": 2e4, "global_attn_every_n_layers": 2});
        let kinds = ["full_attention", "sliding_attention"];
        let new = json!({"model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 9,
            "layer_types": [kinds[0], kinds[1], kinds[0], kinds[1]],
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}});
        let full = EncoderBlockConfig { window: None, theta: 5e4 };
        let local = EncoderBlockConfig { window: Some(5), theta: 2e4 };
        assert_eq!(blocks(old.clone()), [full, local, full, local]);
        assert_eq!(blocks(new), [full, local, full, local]);
        let mut same_base = old;
        same_base["local_rope_theta"] = Value::Null;
        assert_eq!(blocks(same_base)[1], EncoderBlockConfig { theta: 5e4, ..local });
        let usual = blocks(json!({"model_type": "modernbert"}));
        assert_eq!(usual.len(), 22);
        assert_eq!(usual[3], EncoderBlockConfig { window: None, theta: 160_000.0 });
        assert_eq!(usual[4], EncoderBlockConfig { window: Some(65), theta: 1e4 });
    }
}
