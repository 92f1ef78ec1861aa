//! Training data in text files: reading records, rendering conversations with templates, and creating samples. The
//! first byte selects the task and the template; the second byte selects the format.

use super::{join, split};
use crate::scratch;
use candle_zero_finetune::{
    Conversation, DataOptions, Dataset, Source, SpecialTokens, Template, Tokenizer, TrainingTask, Truncation, show,
};
use serde_json::Value;
use std::sync::OnceLock;

/// Tokens of JSON, and the keys of records.
pub(super) const WORDS: [&str; 47] = [
    "\n",
    "\\n",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "{}",
    "[]",
    "\"\"",
    "messages",
    "conversations",
    "role",
    "content",
    "system",
    "user",
    "assistant",
    "model",
    "tool",
    "from",
    "value",
    "human",
    "gpt",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "text",
    "label",
    "chosen",
    "rejected",
    "tools",
    "tool_calls",
    "function",
    "arguments",
    "name",
    "type",
    "reasoning_content",
    "weight",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
    "<end_of_turn>",
    "chat_template_kwargs",
    "\u{2028}",
];

/// The extensions of the formats.
const EXTENSIONS: [&str; 5] = ["jsonl", "json", "csv", "tsv", "txt"];

/// The task and the template for which data is read.
pub(super) struct DataKind {
    task: TrainingTask,
    /// The template's index; one past the last template's index means no template.
    template: usize,
}

impl DataKind {
    /// Returns the kind that a byte selects.
    pub fn of(byte: u8) -> Self {
        let task = [TrainingTask::Generate, TrainingTask::Classify, TrainingTask::Prefer][usize::from(byte) % 3];
        Self { task, template: usize::from(byte) / 3 % (shared().templates.len() + 1) }
    }

    fn template(&self) -> Option<&'static Template> {
        shared().templates.get(self.template)
    }
}

/// The tokenizer and the templates, which all inputs share.
struct Shared {
    tokenizer: Tokenizer,
    templates: Vec<Template>,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let tokenizer = Tokenizer::open(scratch::fixture("finetune/models/llama")).expect("the tokenizer of a Llama");
        let ends = || ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"].map(String::from).to_vec();
        let tokens = SpecialTokens::new([("bos_token", "<|endoftext|>"), ("eos_token", "<|im_end|>")]);
        let mut templates = Vec::new();
        for name in ["tiny", "smollm2", "llama3", "qwen3", "gemma3"] {
            let recorded = scratch::fixture_bytes(&format!("finetune/chat/{name}.json"));
            let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
            let plain = recorded["chat_template"].as_str().expect("a template").to_owned();
            let marked = scratch::fixture_bytes(&format!("finetune/chat/generation_templates/{name}.jinja"));
            for source in [plain, String::from_utf8(marked).expect("a template")] {
                templates.push(Template::new(&source, &tokens, ends()).expect("a template"));
            }
        }
        Shared { tokenizer, templates }
    })
}

/// Creates samples from records, or renders one conversation.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    let (format, rest) = split(rest);
    let kind = DataKind::of(first);
    match EXTENSIONS.get(usize::from(format) % (EXTENSIONS.len() + 1)) {
        Some(extension) => prepare(&format!("data.{extension}"), rest, &kind),
        None => std::str::from_utf8(rest).is_ok_and(|text| render(text, &kind)),
    }
}

/// Creates samples from a file.
///
/// # Panics
/// Panics if samples are inconsistent.
pub(super) fn prepare(name: &str, bytes: &[u8], kind: &DataKind) -> bool {
    let path = scratch::write(name, bytes);
    let folder = scratch::folder().join("samples");
    let _ = std::fs::remove_dir_all(&folder);
    let overlong = if bytes.len().is_multiple_of(2) { Truncation::Truncate } else { Truncation::Drop };
    let options = DataOptions { overlong, ..DataOptions::new(kind.task, 64) };
    let tokenizer = &shared().tokenizer;
    let sources = [Source { path, weight: 1.0 }];
    let prepared = Dataset::prepare(&sources, tokenizer, kind.template(), &options, &folder, &mut |_| {});
    let Ok(dataset) = prepared else { return false };
    for index in 0..dataset.len().min(64) {
        let sample = dataset.sample(index);
        assert!(sample.len() <= 64 && sample.len() == dataset.length(index), "{} tokens", sample.len());
        assert!(sample.ids().all(|id| (id as usize) < tokenizer.vocab_size()));
        // The first token cannot be predicted.
        assert_eq!((1..sample.len()).filter(|at| sample.is_target(*at)).count(), sample.target_count());
        assert!(kind.task == TrainingTask::Classify || sample.target_count() > 0, "a sample without a target");
    }
    let _ = (show(&dataset, tokenizer, 2, false), dataset.check_skipped(), dataset.tokens());
    for (_, report) in dataset.reports() {
        let _ = report.notes();
    }
    let length = dataset.len();
    let (training, validation) = dataset.split(0.5, 1);
    assert_eq!(training.len() + validation.len(), length);
    true
}

/// Renders a conversation, which is a JSON list of messages.
///
/// # Panics
/// Panics if the targets are not in order within the text, or if a plain rendering fails or gives a different text.
fn render(text: &str, kind: &DataKind) -> bool {
    let (Ok(conversation), Some(template)) = (Conversation::from_json(text), kind.template()) else { return false };
    let rendered = template.render(&conversation, false);
    let _ = template.render(&conversation, true);
    let Ok(traced) = template.render_with_targets(&conversation) else { return false };
    assert_eq!(rendered.expect("a conversation with targets can be rendered"), traced.text);
    let mut end = 0;
    for target in &traced.targets {
        assert!(end <= target.start && target.start < target.end, "{:?}", traced.targets);
        assert!(traced.text.get(target.clone()).is_some(), "{:?}", traced.targets);
        end = target.end;
    }
    true
}

/// Returns records in all formats.
pub fn seeds() -> Vec<Vec<u8>> {
    let seed = |task: u8, template: u8, format: u8, text: &[u8]| join(task + 3 * template, &join(format, text));
    let mut seeds = Vec::new();
    let jsonl = [
        ("alpaca", 0),
        ("completion", 0),
        ("label_of_text", 1),
        ("preference_of_messages", 2),
        ("sharegpt", 0),
        ("text", 0),
    ];
    for (template, (name, task)) in jsonl.into_iter().enumerate() {
        let bytes = scratch::fixture_bytes(&format!("finetune/parquet/{name}.jsonl"));
        seeds.push(seed(task, template as u8 * 2, 0, &bytes));
    }
    for template in 0..10 {
        seeds.push(seed(0, template, 5, MESSAGES[usize::from(template) % 2].as_bytes()));
        seeds.push(seed(0, template, 0, format!("{{\"messages\":{},\"tools\":{TOOLS}}}\n", MESSAGES[1]).as_bytes()));
    }
    seeds.push(seed(
        0,
        0,
        0,
        format!("{{\"messages\":{}}}\n{{\"messages\":{}}}\n", MESSAGES[0], MESSAGES[0]).as_bytes(),
    ));
    seeds.push(seed(
        0,
        0,
        1,
        format!("[\n {{\"messages\": {}}},\n {{\"prompt\": \"a\", \"completion\": \"b\"}}\n]\n", MESSAGES[0])
            .as_bytes(),
    ));
    seeds.push(seed(0, 0, 2, b"prompt,completion\n\"1 + 1, \"\"=\"\"\",2\n\"a\nb\",c\r\n"));
    seeds.push(seed(1, 0, 3, b"text\tlabel\ngood\t1\nbad\t0\n"));
    seeds.push(seed(0, 10, 4, "Several lines\nof text, é 😀.\n\n".repeat(20).as_bytes()));
    seeds
}

const MESSAGES: [&str; 2] = [
    r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello, é 😀?"},{"role":"assistant","content":"Hi."},{"role":"user","content":"2+2"},{"role":"assistant","content":"4","weight":1}]"#,
    r#"[{"role":"user","content":[{"type":"text","text":"Weather?"}]},{"role":"assistant","reasoning_content":"A call.","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"weather","arguments":"{\"city\": \"Bonn\"}"}}]},{"role":"tool","tool_call_id":"a","name":"weather","content":"12"},{"role":"assistant","content":"<think>\nx\n</think>\n\n12 degrees."}]"#,
];

const TOOLS: &str = r#"[{"type":"function","function":{"name":"weather","description":"d","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}]"#;
