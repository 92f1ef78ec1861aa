//! Parameters under the names that transformers expects, and the matching `config.json`.

use super::manifest::{Manifest, Parameter};
use crate::models::{GptConfig, LlamaConfig};
use crate::zero::share::state_access::WEIGHTS;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The prefix of parameter names in a GPT-2.
const GPT_PREFIX: &str = "transformer.";

/// The description of a checkpoint for transformers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HuggingFaceDescription {
    /// The prefix of every name.
    pub prefix: &'static str,
    /// The content of `config.json`, or the reason why there is none.
    pub config: Result<Value, String>,
}

/// Describes the checkpoint's model from its client state's `model` or its parameters; `dtype` is that of the files.
pub(super) fn describe(manifest: &Manifest, n_head: Option<usize>, dtype: &str) -> HuggingFaceDescription {
    let model = &manifest.client_state["model"];
    let shapes: ShapesByName =
        manifest.parameters.iter().map(|p: &Parameter| (p.name.as_str(), p.shape.as_slice())).collect();
    let mut description = match (model["architecture"].as_str(), gpt_sizes(&shapes)) {
        (Some("gpt2") | None, Some(sizes)) => HuggingFaceDescription {
            prefix: GPT_PREFIX,
            config: gpt_config(model, sizes, n_head).map(|c| gpt_json(&c, dtype)),
        },
        (Some("gpt2"), None) => {
            missing("the checkpoint's parameters are not those of a GPT-2, although its client state describes a GPT-2")
        }
        (Some("llama"), _) => HuggingFaceDescription {
            prefix: "",
            config: llama_config(model, &shapes).map(|config| llama_json(&config, dtype)),
        },
        (Some(other), _) => missing(&format!(
            "the checkpoint's client state gives the architecture {other:?}; only gpt2 and llama are supported"
        )),
        (None, None) => missing(
            "the checkpoint's parameters are not those of a GPT-2, and its client state has no `model` that gives the \
             architecture and sizes of another supported model",
        ),
    };
    if manifest.parameters.iter().any(|parameter| !parameter.has(WEIGHTS)) {
        description.config = Err("the checkpoint's frozen parameters were not saved".to_owned());
    }
    description
}

fn missing(why: &str) -> HuggingFaceDescription {
    HuggingFaceDescription { prefix: "", config: Err(why.to_owned()) }
}

/// Shapes of parameters by name.
type ShapesByName<'a> = BTreeMap<&'a str, &'a [usize]>;

/// The sizes of a GPT-2 that follow from its shapes: all except the number of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gpt2Sizes {
    n_layer: usize,
    n_embd: usize,
    ctx: usize,
    vocab: usize,
}

/// Returns the sizes of the GPT-2 that has exactly these parameters.
fn gpt_sizes(shapes: &ShapesByName) -> Option<Gpt2Sizes> {
    let [vocab, d] = *shapes.get("wte.weight").copied()? else { return None };
    let [ctx, _] = *shapes.get("wpe.weight").copied()? else { return None };
    let (triple, inner) = (d.checked_mul(3)?, d.checked_mul(4)?);
    let n_layer = shapes.keys().filter(|name| name.ends_with(".attn.c_attn.weight")).count();
    let embeddings = [("wte.weight", vec![vocab, d]), ("wpe.weight", vec![ctx, d])];
    let final_norm = [("ln_f.weight", vec![d]), ("ln_f.bias", vec![d])];
    let mut expected: Vec<(String, Vec<usize>)> =
        embeddings.into_iter().chain(final_norm).map(|(name, shape)| (name.to_string(), shape)).collect();
    for layer in 0..n_layer {
        for (name, inputs, outputs) in
            [("attn.c_attn", d, triple), ("attn.c_proj", d, d), ("mlp.c_fc", d, inner), ("mlp.c_proj", inner, d)]
        {
            expected.push((format!("h.{layer}.{name}.weight"), vec![inputs, outputs]));
            expected.push((format!("h.{layer}.{name}.bias"), vec![outputs]));
        }
        for norm in ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"] {
            expected.push((format!("h.{layer}.{norm}"), vec![d]));
        }
    }
    (n_layer > 0 && are_exactly(shapes, &expected)).then_some(Gpt2Sizes { n_layer, n_embd: d, ctx, vocab })
}

fn are_exactly(shapes: &ShapesByName, expected: &[(String, Vec<usize>)]) -> bool {
    let has = |(name, shape): &(String, Vec<usize>)| shapes.get(name.as_str()).is_some_and(|found| found == shape);
    shapes.len() == expected.len() && expected.iter().all(has)
}

/// Builds the configuration: sizes from the shapes, the rest from the client state's `model`.
fn gpt_config(model: &Value, sizes: Gpt2Sizes, n_head: Option<usize>) -> Result<GptConfig, String> {
    let Gpt2Sizes { n_layer, n_embd, ctx, vocab } = sizes;
    for (key, found) in [("n_layer", n_layer), ("n_embd", n_embd), ("ctx", ctx), ("vocab", vocab)] {
        if model[key].as_u64().is_some_and(|recorded| recorded != found as u64) {
            return Err(format!(
                "the checkpoint's client state contains {key} {}, but its parameters imply {found}",
                model[key]
            ));
        }
    }
    let recorded = model["n_head"].as_u64().and_then(|n| usize::try_from(n).ok());
    let n_head = match (recorded, n_head) {
        (Some(recorded), Some(given)) if recorded != given => {
            return Err(format!(
                "the checkpoint's client state contains n_head {recorded}, but {given} is given; omit n_head"
            ));
        }
        (recorded, given) => {
            recorded.or(given).ok_or("the shapes do not determine the number of heads; set it with --n_head")?
        }
    };
    let eps = model["eps"].as_f64().unwrap_or(1e-5);
    let dropout = model["dropout"].as_f64().unwrap_or(0.0) as f32;
    let config = GptConfig { n_layer, n_head, n_embd, ctx, vocab, eps, checkpoint_activations: false, dropout };
    config.validate().map_err(|e| e.to_string())?;
    Ok(config)
}

fn gpt_json(config: &GptConfig, dtype: &str) -> Value {
    let GptConfig { n_layer, n_head, n_embd, ctx, vocab, eps, dropout, .. } = config;
    // The end-of-text token is known only for the published vocabulary.
    let end = (*vocab == 50257).then_some(50256);
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_positions": ctx,
        "n_ctx": ctx,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_inner": null,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": eps,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    })
}

/// Returns the client state's `model` as the configuration of a Llama, if the parameters match it.
fn llama_config(model: &Value, shapes: &ShapesByName) -> Result<LlamaConfig, String> {
    let mut sizes = model.clone();
    if let Some(sizes) = sizes.as_object_mut() {
        sizes.remove("architecture");
    }
    let config: LlamaConfig = serde_json::from_value(sizes)
        .map_err(|e| format!("the checkpoint's client state does not describe a Llama: {e}"))?;
    // The number of heads must not overflow when it is doubled.
    if config.num_attention_heads > shapes.values().flat_map(|shape| shape.iter()).copied().max().unwrap_or(0) {
        return Err(
            "the checkpoint's client state describes a Llama with more heads than the largest dimension of the \
             parameters"
                .to_owned(),
        );
    }
    config.validate().map_err(|e| e.to_string())?;
    // This is checked before anything of the claimed size is built.
    if config.num_hidden_layers <= shapes.len() && are_exactly(shapes, &llama_parameters(&config)) {
        return Ok(config);
    }
    Err("the checkpoint's parameters are not those of the Llama that its client state describes".to_owned())
}

fn llama_parameters(config: &LlamaConfig) -> Vec<(String, Vec<usize>)> {
    let (d, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab);
    let kv = d / config.num_attention_heads * config.num_key_value_heads;
    let mut all =
        vec![("model.embed_tokens.weight".to_string(), vec![vocab, d]), ("model.norm.weight".to_string(), vec![d])];
    if !config.tie_word_embeddings {
        all.push(("lm_head.weight".to_string(), vec![vocab, d]));
    }
    for layer in 0..config.num_hidden_layers {
        for (name, shape) in [
            ("input_layernorm", vec![d]),
            ("self_attn.q_proj", vec![d, d]),
            ("self_attn.k_proj", vec![kv, d]),
            ("self_attn.v_proj", vec![kv, d]),
            ("self_attn.o_proj", vec![d, d]),
            ("post_attention_layernorm", vec![d]),
            ("mlp.gate_proj", vec![inner, d]),
            ("mlp.up_proj", vec![inner, d]),
            ("mlp.down_proj", vec![d, inner]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    all
}

fn llama_json(config: &LlamaConfig, dtype: &str) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.ctx,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size / config.num_attention_heads,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": false,
        "mlp_bias": false,
        "bos_token_id": null,
        "eos_token_id": null,
        "torch_dtype": dtype,
    })
}
