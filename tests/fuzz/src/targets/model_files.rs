//! The small files of a model. The first byte selects the description of a decoder or an encoder, the description of an
//! adapter, one of the files of a tokenizer, or a chat template.

use super::{join, split};
use crate::scratch;
use candle_zero::models::{DecoderConfig, EncoderConfig};
use candle_zero_finetune::{Adapter, Conversation, SpecialTokens, Template, Tokenizer};
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Words of these files.
pub(super) const WORDS: [&str; 52] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_scaling",
    "rope_parameters",
    "rope_type",
    "llama3",
    "linear",
    "yarn",
    "factor",
    "sliding_window",
    "layer_types",
    "text_config",
    "target_modules",
    "all-linear",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "Sequence",
    "ByteLevel",
    "Metaspace",
    "WordPiece",
    "Unigram",
    "vocab",
    "{{ ",
    " }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if ",
    "{% endif %}",
    "{% set x = ",
    " %}",
    "messages",
    "[::-1]",
    "|tojson(indent=4)",
    "|trim",
    ".split('a')",
    "range(9)",
];

/// Reads a file.
///
/// # Panics
/// Panics if the number of elements of a decoder's parameters differs from [`DecoderConfig::num_parameters`], or if an
/// adapter that was written cannot be read again.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    match first % 8 {
        0 => decoder(rest),
        1 => encoder(rest),
        2 => adapter(rest),
        3 => tokenizer("tokenizer", "tokenizer.json", rest),
        4 => tokenizer("word_piece", "vocab.txt", rest),
        5 => tokenizer("gpt2", "merges.txt", rest),
        6 => tokenizer("tokenizer_config", "tokenizer_config.json", rest),
        _ => template(rest),
    }
}

fn decoder(bytes: &[u8]) -> bool {
    let path = scratch::write("decoder/config.json", bytes);
    let Ok(config) = DecoderConfig::read(&path) else { return false };
    let Ok(parameters) = config.parameters() else { return false };
    let elements: usize = parameters.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert_eq!(config.num_parameters(), elements);
    true
}

fn encoder(bytes: &[u8]) -> bool {
    let path = scratch::write("encoder/config.json", bytes);
    EncoderConfig::read(&path).and_then(|config| config.parameters()).is_ok()
}

/// Returns the folder of an adapter.
fn adapter_folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let weights = scratch::fixture_bytes("finetune/lora/llama.attn_r8/initial/adapter_model.safetensors");
        scratch::write("adapter/adapter_model.safetensors", &weights);
        scratch::folder().join("adapter")
    })
}

fn adapter(bytes: &[u8]) -> bool {
    let folder = adapter_folder();
    scratch::write("adapter/adapter_config.json", bytes);
    let Ok(adapter) = Adapter::read(folder) else { return false };
    let base = DecoderConfig::read(scratch::fixture("finetune/models/llama/config.json")).expect("a model");
    let parameters = base.parameters().expect("a model");
    if adapter.check_fits(&parameters).is_err() {
        return false;
    }
    let written = scratch::folder().join("written");
    let _ = fs::remove_dir_all(&written);
    if adapter.write(&written, parameters.iter().map(|(name, _)| name.as_str())).is_ok() {
        Adapter::read(&written).expect("a written adapter can be read");
    }
    true
}

/// Reads a tokenizer whose folder has a file with this content; the other files are constant.
fn tokenizer(folder: &str, file: &str, bytes: &[u8]) -> bool {
    static OTHERS: OnceLock<()> = OnceLock::new();
    OTHERS.get_or_init(|| {
        scratch::write("gpt2/config.json", br#"{"model_type": "gpt2"}"#);
        scratch::write("gpt2/vocab.json", br#"{"<|endoftext|>": 0, "l": 1, "o": 2, "lo": 3, "H": 4, "e": 5}"#);
        scratch::write("tokenizer_config/tokenizer.json", TOKENIZER.as_bytes());
    });
    scratch::write(format!("{folder}/{file}"), bytes);
    let Ok(tokenizer) = Tokenizer::open(scratch::folder().join(folder)) else { return false };
    let Ok(encoded) = tokenizer.encode("Hello, é <|im_start|>\n 😀 12") else { return false };
    let _ = tokenizer.decode(&encoded.ids, true);
    true
}

fn template(bytes: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(bytes) else { return false };
    let tokens = SpecialTokens::new([("bos_token", "<s>"), ("eos_token", "</s>")]);
    let Ok(template) = Template::new(source, &tokens, vec!["</s>".into(), "<|im_end|>".into()]) else { return false };
    let conversation =
        Conversation::new([("user", "Hello, é?"), ("assistant", "Hi."), ("user", "2"), ("assistant", "4")]);
    let rendered = template.render(&conversation, true);
    let _ = template.render_with_targets(&conversation);
    rendered.is_ok()
}

/// Returns files of the models in tests/fixtures, and a few shorter ones that are written here.
pub fn seeds() -> Vec<Vec<u8>> {
    let models = ["gemma2", "gemma3", "gpt2", "llama", "llama32", "mistral", "phi3", "qwen2", "qwen3"];
    let configs =
        models.iter().map(|model| join(0, &scratch::fixture_bytes(&format!("finetune/models/{model}/config.json"))));
    let adapters = ["llama.attn_r8", "llama.all_r4_rslora", "llama.dora_r8"];
    let adapters = adapters
        .iter()
        .map(|name| join(2, &scratch::fixture_bytes(&format!("finetune/lora/{name}/initial/adapter_config.json"))));
    let templates = ["gemma3", "llama3", "qwen3", "smollm2", "tiny"]
        .map(|name| join(7, &scratch::fixture_bytes(&format!("finetune/chat/generation_templates/{name}.jinja"))));
    let others = [
        join(4, b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nh\n##e\n##llo\n,\n"),
        join(5, b"#version: 0.2\nl o\n"),
        join(6, &scratch::fixture_bytes("finetune/models/llama/tokenizer_config.json")),
        join(6, br#"{"bos_token":{"content":"<|im_start|>"},"unk_token":"e","add_bos_token":true,"additional_special_tokens":["H"]}"#),
        join(1, &scratch::fixture_bytes("finetune/bert/model/config.json")),
        join(3, TOKENIZER.as_bytes()),
        join(3, &scratch::fixture_bytes("finetune/models/llama/tokenizer.json")),
    ];
    configs.chain(adapters).chain(others).chain(templates).collect()
}

/// A small tokenizer.
const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,
"added_tokens":[{"id":0,"content":"<|im_start|>","single_word":false,"lstrip":false,"rstrip":true,"normalized":false,"special":true}],
"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},
"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}|\\s+(?!\\S)"},"behavior":"Isolated","invert":false},{"type":"Digits","individual_digits":true}]},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|im_start|>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<|im_start|>":{"id":"<|im_start|>","ids":[0],"tokens":["<|im_start|>"]}}},
"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},
"model":{"type":"BPE","dropout":null,"unk_token":"e","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,"byte_fallback":true,"ignore_merges":false,
"vocab":{"<|im_start|>":0,"l":1,"e":2,"H":3,"o":4,"lo":5,"▁":6,"1":7,"<0xC3>":8},"merges":[["l","o"]]}}"#;
