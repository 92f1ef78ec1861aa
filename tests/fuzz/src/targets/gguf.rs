//! A model in a GGUF file: its metadata, weights, tokenizer and chat template.

use crate::scratch;
use candle_zero_finetune::{BaseModel, Conversation, Template, Tokenizer};

/// Keys and values of the metadata.
pub(super) const WORDS: [&str; 27] = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt-oss",
    "general.architecture",
    "general.alignment",
    ".block_count",
    ".embedding_length",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".rope.scaling.type",
    ".rope.freq_base",
    ".expert_count",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.chat_template",
    "rope_freqs.weight",
    "output.weight",
    "blk.0.attn_q.bias",
    "{% for m in messages %}",
];

/// Opens a model and reads all of it.
///
/// # Panics
/// Panics if a weight's number of elements does not match its shape, or if the tokenizer returns an id outside its
/// vocabulary.
pub fn run(data: &[u8]) -> bool {
    let path = scratch::write("model.gguf", data);
    let mut is_read = false;
    if let Ok(base) = BaseModel::open(&path) {
        let values = base.values();
        for (name, shape) in base.config().parameters().expect("the parameters of an accepted model") {
            let elements: usize = shape.iter().product();
            if let Ok(read) = values.values(&name, &shape, 0..elements) {
                assert_eq!(read.len(), elements, "{name}");
            }
            let _ = values.values(&name, &shape, elements / 3..elements / 2);
        }
        let _ = values.fingerprint();
        is_read = true;
    }
    let Ok(tokenizer) = Tokenizer::open(&path) else { return false };
    if let Ok(encoded) = tokenizer.encode("a ab <s> é\n 😀 12") {
        assert!(encoded.ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "{:?}", encoded.ids);
        let _ = tokenizer.decode(&encoded.ids, false);
    }
    if let Ok(template) = Template::open(&path, &tokenizer) {
        let conversation = Conversation::new([("user", "a"), ("assistant", "b")]);
        let _ = (template.render(&conversation, true), template.render_with_targets(&conversation));
    }
    is_read
}

/// Returns a Llama with a SentencePiece tokenizer, a Qwen2 with a byte-level one, and a Llama without a tokenizer.
pub fn seeds() -> Vec<Vec<u8>> {
    let llama = [
        ("tokenizer.ggml.model", Value::Text("llama")),
        ("tokenizer.ggml.tokens", Value::Texts(&["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁a", "▁ab"])),
        ("tokenizer.ggml.scores", Value::Floats(&[0.0, 0.0, 0.0, 0.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5])),
        ("tokenizer.ggml.token_type", Value::Integers(&[2, 3, 3, 6, 1, 1, 1, 1, 1, 1])),
        ("tokenizer.ggml.bos_token_id", Value::Integer(1)),
        ("tokenizer.ggml.add_bos_token", Value::Flag(true)),
        (
            "tokenizer.chat_template",
            Value::Text("{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"),
        ),
    ];
    let qwen2 = [
        ("tokenizer.ggml.model", Value::Text("gpt2")),
        ("tokenizer.ggml.pre", Value::Text("qwen2")),
        ("tokenizer.ggml.tokens", Value::Texts(&["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", "Ċ", "1", "2"])),
        ("tokenizer.ggml.token_type", Value::Integers(&[3, 3, 1, 1, 1, 1, 1, 1, 1, 4])),
        ("tokenizer.ggml.merges", Value::Texts(&["a b", "Ġ a"])),
        ("tokenizer.ggml.eos_token_id", Value::Integer(1)),
        ("general.alignment", Value::Integer(64)),
    ];
    vec![file("llama", &llama, 32), file("qwen2", &qwen2, 64), file("llama", &[], 32)]
}

/// A value of the metadata.
enum Value<'a> {
    Integer(u32),
    Float(f32),
    Flag(bool),
    Text(&'a str),
    Texts(&'a [&'a str]),
    Floats(&'a [f32]),
    Integers(&'a [i32]),
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns an array of elements of a type.
fn array(kind: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes(), &elements.concat()].concat()
}

impl Value<'_> {
    /// Returns the code of the type, and the bytes.
    fn bytes(&self) -> (u32, Vec<u8>) {
        match self {
            Self::Integer(number) => (4, number.to_le_bytes().to_vec()),
            Self::Float(number) => (6, number.to_le_bytes().to_vec()),
            Self::Flag(flag) => (7, vec![u8::from(*flag)]),
            Self::Text(content) => (8, text(content)),
            Self::Texts(texts) => (9, array(8, &texts.iter().map(|content| text(content)).collect::<Vec<_>>())),
            Self::Floats(all) => {
                (9, array(6, &all.iter().map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>()))
            }
            Self::Integers(all) => {
                (9, array(5, &all.iter().map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>()))
            }
        }
    }
}

/// The codes of tensor formats in files.
const F32: u32 = 0;
const F16: u32 = 1;
const Q4_0: u32 = 2;
const Q8_0: u32 = 8;

/// Returns a file with a model of one block.
fn file(architecture: &str, more: &[(&str, Value)], alignment: usize) -> Vec<u8> {
    let sizes = [
        ("block_count", 1),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("context_length", 16),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ];
    let mut metadata = vec![("general.architecture".to_owned(), Value::Text(architecture).bytes())];
    metadata.extend(sizes.map(|(key, size)| (format!("{architecture}.{key}"), Value::Integer(size).bytes())));
    metadata.push((format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::Float(1e-5).bytes()));
    metadata.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.bytes())));
    let mut tensors = vec![
        ("token_embd.weight", vec![10, 32], Q8_0),
        ("output_norm.weight", vec![32], F32),
        ("blk.0.attn_norm.weight", vec![32], F32),
        ("blk.0.ffn_norm.weight", vec![32], F16),
        ("blk.0.attn_q.weight", vec![32, 32], Q4_0),
        ("blk.0.attn_k.weight", vec![16, 32], Q4_0),
        ("blk.0.attn_v.weight", vec![16, 32], Q8_0),
        ("blk.0.attn_output.weight", vec![32, 32], Q4_0),
        ("blk.0.ffn_gate.weight", vec![32, 32], Q4_0),
        ("blk.0.ffn_up.weight", vec![32, 32], Q4_0),
        ("blk.0.ffn_down.weight", vec![32, 32], Q4_0),
    ];
    if architecture == "qwen2" {
        tensors.extend([
            ("blk.0.attn_q.bias", vec![32], F32),
            ("blk.0.attn_k.bias", vec![16], F32),
            ("blk.0.attn_v.bias", vec![16], F32),
        ]);
    }
    let mut bytes = [&b"GGUF"[..], &3_u32.to_le_bytes()].concat();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, (kind, value)) in &metadata {
        bytes.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
    }
    let mut data = Vec::new();
    for (name, shape, format) in &tensors {
        bytes.extend(text(name));
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size: &u64| bytes.extend(size.to_le_bytes()));
        bytes.extend(format.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        let elements = shape.iter().product::<u64>() as usize;
        let length = match *format {
            F32 => elements * 4,
            F16 => elements * 2,
            Q4_0 => elements / 32 * 18,
            _ => elements / 32 * 34,
        };
        // The high byte of each number is small, so that the number is finite.
        data.extend((0..length).map(|at| (at * 5) as u8 & 0x3b));
        data.resize(data.len().next_multiple_of(alignment), 0);
    }
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
    bytes.extend(data);
    bytes
}
