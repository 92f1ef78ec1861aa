//! Records in the forms of published data sets: the model is trained on the text that the records mark as targets, or a
//! message names what is left out. The tests cover keys, formats and templates.

use super::data::TestFolder;
use crate::support::processes::repository;
use candle_zero_finetune::{
    ColumnMapping, DataOptions, Dataset, Source, Template, Tokenizer, TrainingTask, labels_of, show,
};
use proptest::prelude::*;

/// A template that writes messages between markers, without tools.
const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A template with tools and calls, whose arguments are written as JSON.
const TOOLS: &str = "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}\
                     {{ '<|im_end|>\\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
                     {% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\
                     {% set c = c.function if c.function is defined else c %}{{ '<call>{\"name\": \"' + c.name + '\", \"arguments\": ' }}\
                     {{ c.arguments | tojson }}{{ '}</call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}\
                     {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A template like that of DeepSeek-R1, which removes thoughts and writes arguments as text.
const THOUGHTLESS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}\
                           {% for c in m.tool_calls %}{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% endif %}\
                           {% if m.content is not none %}{% set c = m.content %}{% if '</think>' in c %}\
                           {% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
                           {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A template that passes contents through a filter that also accepts values other than text.
const TRIMS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content | trim }}{{ '<|im_end|>\\n' }}\
                     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A template with two `generation` blocks per answer; the second contains the end marker.
const BLOCKS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
                      {% generation %}{{ m.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}\
                      {{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}";

/// A template with a `generation` block around only the last answer.
const LAST: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}\
                    {% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
                    {{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}";

/// A template with `generation` blocks around pieces of an answer. It changes the text in the blocks.
const PIECES: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
                      {% for part in m.content.split('E') %}{% generation %}{{ part | upper }}{% endgeneration %}{{ 'E' }}{% endfor %}\
                      {% generation %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
                      {{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}";

fn template(folder: &TestFolder, source: &str) -> Template {
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"].map(String::from).into();
    Template::new(source, folder.tokenizer.special_tokens(), special).unwrap()
}

/// Returns the report on a file with this name and text, with its notes and its samples, in which brackets enclose
/// targets; or the reason why the file is refused.
fn made_with(
    folder: &TestFolder,
    template: Option<&Template>,
    name: &str,
    text: &str,
    options: &DataOptions,
) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    let sources = [Source { path, weight: 1.0 }];
    let made = Dataset::prepare(&sources, &folder.tokenizer, template, options, dir.path(), &mut |_| {});
    match made {
        Err(error) => format!("refused: {error}"),
        Ok(data) => {
            let (_, report) = data.reports().next().unwrap();
            format!("{report}\n{}\n{}", report.notes().join("\n"), show(&data, &folder.tokenizer, 9, false).unwrap())
        }
    }
}

/// Returns the same as [`made_with`] for a JSONL file, with the template `source` and with `columns` as the value of
/// `--columns`, which may be empty.
fn made(source: &str, text: &str, task: TrainingTask, columns: &str) -> String {
    let folder = TestFolder::new();
    let columns = if columns.is_empty() { ColumnMapping::default() } else { columns.parse().unwrap() };
    let options = DataOptions { columns, ..DataOptions::new(task, 1024) };
    made_with(&folder, Some(&template(&folder, source)), "x.jsonl", text, &options)
}

/// Checks that `made` contains each of `parts` or, for a part that begins with `!`, that it does not contain the text
/// after the `!`.
#[track_caller]
fn holds(made: &str, parts: &[&str]) {
    for part in parts {
        let (part, is_there) = part.strip_prefix('!').map_or((*part, true), |part| (part, false));
        assert_eq!(made.contains(part), is_there, "{part:?} in:\n{made}");
    }
}

fn turn(role: &str, content: &str) -> String {
    serde_json::json!({"role": role, "content": content}).to_string()
}

#[test]
fn keys_that_change_what_is_learned_are_honoured_or_refused_by_name() {
    let chat = format!("\"messages\": [{}, {}]", turn("user", "a?"), turn("assistant", "b"));
    let generate = |text: &str| made(CHATML, text, TrainingTask::Generate, "");
    // Unpaired preferences.
    for label in ["true", "false", "0", "\"false\""] {
        holds(
            &generate(&format!("{{{chat}, \"label\": {label}}}")),
            &["refused", "it has label", "KTO", "--columns ignore=label"],
        );
    }
    holds(&generate(r#"{"prompt": "a", "completion": "b", "label": false}"#), &["refused", "it has label", "KTO"]);
    holds(
        &made(CHATML, &format!("{{{chat}, \"label\": true}}"), TrainingTask::Generate, "ignore=label"),
        &["⟦b<|im_end|>⟧", "label (1 record)"],
    );
    // Pictures, in columns and in message contents.
    holds(&generate(&format!("{{{chat}, \"images\": [\"1.jpg\"]}}")), &["refused", "it has images"]);
    holds(&generate(&format!("{{{chat}, \"images\": []}}")), &["⟦b<|im_end|>⟧", "!images"]);
    let seen = r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]}"#;
    holds(&generate(seen), &["refused", "message 1: it has content of type \"image_url\""]);
    // System texts.
    for key in ["system", "system_prompt"] {
        holds(
            &generate(&format!("{{\"{key}\": \"S\", {chat}}}")),
            &["<|im_start|>system\nS<|im_end|>", "⟦b<|im_end|>⟧"],
        );
    }
    let pair = r#"{"system": "S", "prompt": "a?", "chosen": "good", "rejected": "bad"}"#;
    holds(
        &made(CHATML, pair, TrainingTask::Prefer, ""),
        &["refused", "it has system: this format has no place for it"],
    );
    let pair = pair.replace("prompt", "question");
    holds(
        &made(CHATML, &pair, TrainingTask::Prefer, ""),
        &["system\nS<", "user\na?<", "⟦good<|im_end|>⟧", "⟦bad<|im_end|>⟧", "1 pair,"],
    );
    holds(&generate(r#"{"system": "S", "prompt": "a?", "completion": "b"}"#), &["refused", "it has system"]);
    // Context and history.
    let dolly = r#"{"instruction": "When?", "context": "In May.", "response": "May", "category": "qa"}"#;
    holds(
        &generate(dolly),
        &["When?\n\nIn May.<|im_end|>", "⟦May<|im_end|>⟧", "not read: category (1 record)", "!context"],
    );
    holds(&generate(&format!("{{{chat}, \"context\": \"In May.\"}}")), &["refused", "it has context"]);
    let history = r#"{"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}"#;
    holds(&generate(history), &["user\na<|im_end|>", "⟦b<|im_end|>⟧", "⟦d<|im_end|>⟧"]);
    holds(&generate(&format!("{{{chat}, \"history\": [[\"a\", \"b\"]]}}")), &["refused", "it has history"]);
    // Each of these records has a key that rates the record or its answers.
    holds(&generate(&format!("{{{chat}, \"score\": 0.1}}")), &["1 record (line 1) has a score, which is ignored"]);
    let scored = r#"{"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2.0, "score_rejected": 8}"#;
    holds(&made(CHATML, scored, TrainingTask::Prefer, ""), &["has a better score for the rejected answer"]);
    // Other keys are listed, including those of messages.
    let more = r#"{"id": 7, "source": "web", "messages": [{"role": "user", "content": "a", "ts": 1}, {"role": "assistant", "content": "b", "ts": 2}]}"#;
    holds(&generate(more), &["not read: id (1 record), messages[].ts (1 record), source (1 record)"]);
    let null = r#"{"messages": [{"role": "user", "content": "a", "name": null, "tool_calls": null}, {"role": "assistant", "content": "b"}], "tools": null, "prompt": null}"#;
    holds(&generate(null), &["⟦b<|im_end|>⟧", "!not read"]);
    let kwargs = format!("{{{chat}, \"chat_template_kwargs\": {{\"mood\": \"glad\"}}}}");
    holds(
        &made(&format!("{{{{ mood }}}}{CHATML}"), &kwargs, TrainingTask::Generate, ""),
        &["glad<|im_start|>user", "⟦b<|im_end|>⟧"],
    );
}

#[test]
fn weights_of_messages_and_records_say_what_is_learned() {
    let generate = |text: &str| made(CHATML, text, TrainingTask::Generate, "");
    for (key, no, yes) in [
        ("weight", "0", "1"),
        ("train", "false", "true"),
        ("loss_weight", "0.0", "1.0"),
        ("training", "\"false\"", "\"1\""),
    ] {
        let text = format!(
            r#"{{"messages": [{{"role": "user", "content": "a?"}}, {{"role": "assistant", "content": "NO", "{key}": {no}}},
                {{"role": "user", "content": "b?"}}, {{"role": "assistant", "content": "YES", "{key}": {yes}}}]}}"#
        )
        .replace('\n', " ");
        for source in [CHATML, BLOCKS] {
            holds(&made(source, &text, TrainingTask::Generate, ""), &["⟦YES", "NO<|im_end|>\n", "!⟦NO", "!not read"]);
        }
        let turns = format!(
            r#"{{"conversations": [{{"from": "human", "value": "a?"}}, {{"from": "gpt", "value": "NO", "{key}": {no}}},
                {{"from": "human", "value": "b?"}}, {{"from": "gpt", "value": "YES", "{key}": {yes}}}]}}"#
        )
        .replace('\n', " ");
        holds(&generate(&turns), &["ShareGPT", "⟦YES<|im_end|>⟧", "!⟦NO"]);
        holds(
            &generate(&format!(
                "{{\"prompt\": \"a\", \"completion\": \"b\", \"{key}\": {no}}}\n{{\"prompt\": \"c\", \"completion\": \"d\", \"{key}\": {yes}}}"
            )),
            &["c⟦d<|im_end|>⟧", "!a⟦b", "1 record (line 1) was omitted because of a weight of 0"],
        );
    }
    let part =
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}"#;
    holds(&generate(part), &["refused", "message 2: its weight is 0.5", "0 (not trained on) or 1"]);
    let user =
        r#"{"messages": [{"role": "user", "content": "a", "train": true}, {"role": "assistant", "content": "b"}]}"#;
    holds(&generate(user), &["refused", "message 1: it has train, but only the assistant's messages are trained on"]);
    holds(&generate(&user.replace("train", "weight").replace("true", "1")), &["⟦b<|im_end|>⟧"]);
    let detail = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train_detail": [1]}]}"#;
    holds(&generate(detail), &["refused", "train_detail"]);
}

#[test]
fn prompts_as_messages_are_never_learned_whatever_blocks_the_template_has() {
    let old = [turn("user", "U1"), turn("assistant", "OLD"), turn("user", "U2")].join(", ");
    let (new, bad) = (turn("assistant", "NEW"), turn("assistant", "BAD"));
    let texts = [
        (TrainingTask::Generate, format!("{{\"prompt\": [{old}], \"completion\": [{new}]}}")),
        (TrainingTask::Generate, format!("{{\"prompt\": [{old}], \"completion\": \"NEW\"}}")),
        (TrainingTask::Prefer, format!("{{\"prompt\": [{old}], \"chosen\": [{new}], \"rejected\": [{bad}]}}")),
        (TrainingTask::Prefer, format!("{{\"chosen\": [{old}, {new}], \"rejected\": [{old}, {bad}]}}")),
    ];
    for (task, text) in texts {
        for source in [CHATML, BLOCKS, LAST] {
            let made = made(source, &text, task, "");
            holds(&made, &["OLD<|im_end|>", "⟦NEW", "!⟦OLD", "!OLD⟦", "!refused"]);
            assert_eq!(made.contains("⟦BAD"), task == TrainingTask::Prefer, "{made}");
        }
        holds(&made(PIECES, &text, task, ""), &["OLDE<|im_end|>\n", "⟦N⟧E⟦W⟧E⟦<|im_end|>⟧", "!⟦OLD", "!refused"]);
    }
}

#[test]
fn calls_of_tools_are_learned_in_each_form_or_the_record_is_refused() {
    let tools = r#"[{"type": "function", "function": {"name": "fly", "parameters": {}}}]"#;
    let bare = r#"[{"name": "fly", "parameters": {}}]"#;
    let call = r#"{"name": "fly", "arguments": "{\"up\": 100}"}"#;
    let object = call.replace("\"{\\\"up\\\": 100}\"", "{\"up\": 100}");
    let ask = turn("user", "go");
    let quoted = serde_json::to_string(&object).unwrap();
    let calls = format!(r#""tool_calls": [{{"id": "c1", "type": "function", "function": {call}}}]"#);
    let files = [
        format!(
            r#"{{"messages": [{ask}, {{"role": "assistant", {calls}}}], "tools": {tools}, "parallel_tool_calls": false}}"#
        ),
        format!(r#"{{"messages": [{ask}, {{"role": "assistant", "content": null, {calls}}}], "tools": {tools}}}"#),
        format!(r#"{{"messages": [{ask}, {{"role": "assistant", "content": "", {calls}}}], "tools": {tools}}}"#),
        format!(
            r#"{{"messages": [{ask}, {{"role": "assistant", "content": null, "function_call": {call}}}], "functions": {bare}}}"#
        ),
        format!(
            r#"{{"conversations": [{{"from": "human", "value": "go"}}, {{"from": "function_call", "value": {quoted}}}], "tools": {}}}"#,
            serde_json::to_string(bare).unwrap()
        ),
        format!(
            r#"{{"messages": [{ask}, {{"role": "assistant", "content": [{{"type": "tool_call", "value": {quoted}}}], "loss_weight": 1.0}}], "tools": {tools}}}"#
        ),
    ];
    for text in files {
        let with = made(TOOLS, &text, TrainingTask::Generate, "");
        holds(
            &with,
            &[
                "⟦<call>{\"name\": \"fly\", \"arguments\": {\"up\": 100}}</call><|im_end|>⟧",
                "\"parameters\": {}",
                "!refused",
                "!has tools",
            ],
        );
        holds(
            &made(THOUGHTLESS, &text, TrainingTask::Generate, ""),
            &["⟦fly({\"up\": 100})<|im_end|>⟧", "has tools that the template does not render"],
        );
        let without = made(CHATML, &text, TrainingTask::Generate, "");
        holds(&without, &["refused", "the template does not render the tool_calls of message 2"]);
    }
    // Arguments that are not a JSON object remain text, with a note.
    let text = format!(
        r#"{{"messages": [{ask}, {{"role": "assistant", "content": "", "tool_calls": [{{"type": "function", "function": {{"name": "fly", "arguments": "up"}}}}]}}]}}"#
    );
    holds(&made(TOOLS, &text, TrainingTask::Generate, ""), &["calls a tool with arguments that are not a JSON object"]);
    // The answer contains a call that the template does not render.
    let text =
        format!(r#"{{"messages": [{ask}, {{"role": "assistant", "content": "Yes.", {calls}}}], "tools": {tools}}}"#);
    holds(
        &made(CHATML, &text, TrainingTask::Generate, ""),
        &["⟦Yes.<|im_end|>⟧", "has tool_calls that the template does not render", "has tools that"],
    );
    // Tool results.
    let talk = r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": "{\"name\":\"f\",\"arguments\":{}}"}, {"from": "observation", "value": "RESULT"}, {"from": "gpt", "value": "one"}], "tools": "[]"}"#;
    holds(
        &made(TOOLS, talk, TrainingTask::Generate, ""),
        &["⟦<call>{\"name\": \"f\", \"arguments\": {}}</call><|im_end|>⟧", "tool\nRESULT<", "⟦one<|im_end|>⟧"],
    );
    let missing = r#"{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}"#;
    holds(
        &made(CHATML, missing, TrainingTask::Generate, ""),
        &["refused", "message 1 has no content, which the template needs"],
    );
}

#[test]
fn forms_of_messages_are_read_alike() {
    let files = [
        r#"{"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "value": "a"}, {"role": "assistant", "value": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0}, {"role": "assistant", "content": [{"type": "text", "value": "b"}], "loss_weight": 1.0}]}"#,
        r#"{"conversation": [{"system": "", "input": "a", "output": "b"}]}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}"#,
        r#"{"instruction": "a", "input": "", "output": "b", "history": [], "system": ""}"#,
        r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#,
    ];
    for text in files {
        for source in [CHATML, TRIMS, TOOLS] {
            holds(&made(source, text, TrainingTask::Generate, ""), &["user\na<|im_end|>", "assistant\n⟦b<|im_end|>⟧"]);
        }
    }
}

#[test]
fn pairs_of_answers_are_read_in_each_form() {
    let talk = "{\"from\": \"human\", \"value\": \"q\"}";
    let (ask, good, bad) = (turn("user", "q"), turn("assistant", "good"), turn("assistant", "bad"));
    let files = [
        format!(
            "{{\"conversations\": [{talk}], \"chosen\": {{\"from\": \"gpt\", \"value\": \"good\"}}, \"rejected\": {{\"from\": \"gpt\", \"value\": \"bad\"}}}}"
        ),
        format!("{{\"messages\": [{ask}], \"chosen\": {good}, \"rejected\": {bad}}}"),
        format!("{{\"messages\": [{ask}], \"chosen\": \"good\", \"rejected\": \"bad\"}}"),
        format!("{{\"chosen\": [{ask}, {good}], \"rejected\": [{ask}, {bad}]}}"),
        format!(
            "{{\"prompt\": \"q\", \"chosen\": [{ask}, {good}], \"rejected\": [{ask}, {bad}], \"score_chosen\": 8.0, \"score_rejected\": 2.0}}"
        ),
        format!("{{\"prompt\": null, \"chosen\": [{ask}, {good}], \"rejected\": [{ask}, {bad}]}}"),
        format!(
            "{{\"input\": {{\"messages\": [{ask}]}}, \"preferred_output\": [{good}], \"non_preferred_output\": [{bad}]}}"
        ),
        "{\"instruction\": \"q\", \"input\": \"\", \"chosen\": \"good\", \"rejected\": \"bad\"}".into(),
        "{\"question\": \"q\", \"chosen\": \"good\", \"rejected\": \"bad\"}".into(),
    ];
    for text in files {
        let made = made(CHATML, &text, TrainingTask::Prefer, "");
        holds(
            &made,
            &[
                "1 record, 1 pair",
                "user\nq<|im_end|>\n<|im_start|>assistant\n⟦good<|im_end|>⟧",
                "assistant\n⟦bad<|im_end|>⟧",
            ],
        );
    }
    let transcripts =
        r#"{"chosen": "\n\nHuman: What?\n\nAssistant: good", "rejected": "\n\nHuman: What?\n\nAssistant: great"}"#;
    holds(
        &made(CHATML, transcripts, TrainingTask::Prefer, ""),
        &["Assistant:⟦ good<|im_end|>⟧", "Assistant:⟦ great<|im_end|>⟧"],
    );
    holds(
        &made(CHATML, r#"{"chosen": "one two", "rejected": "one three"}"#, TrainingTask::Prefer, ""),
        &["one⟦ two<", "one⟦ three<"],
    );
    holds(
        &made(CHATML, r#"{"chosen": "x", "rejected": "y"}"#, TrainingTask::Prefer, ""),
        &["refused", "without a common beginning"],
    );
    let same = r#"{"prompt": "a?", "chosen": "same", "rejected": "same"}"#;
    holds(&made(CHATML, same, TrainingTask::Prefer, ""), &["has identical chosen and rejected answers"]);
    holds(
        &made(CHATML, r#"{"prompt": "a", "chosen": " ", "rejected": "x"}"#, TrainingTask::Prefer, ""),
        &["an empty answer"],
    );
}

#[test]
fn columns_are_read_by_the_names_that_the_user_gives() {
    let text = r#"{"question": "a", "answer": "b", "messages": [], "text": "other"}"#;
    holds(
        &made(CHATML, text, TrainingTask::Generate, "prompt=question,completion=answer"),
        &["a⟦b<|im_end|>⟧", "without the model's chat template", "text (1 record)"],
    );
    holds(
        &made(CHATML, text, TrainingTask::Generate, "instruction=question,output=answer"),
        &["user\na<|im_end|>", "⟦b<|im_end|>⟧", "!without the model's"],
    );
    let text = r#"{"question": "a", "answer": "b"}"#;
    holds(
        &made(CHATML, text, TrainingTask::Generate, ""),
        &["refused", "(question, answer)", "--columns prompt=question,completion=answer"],
    );
    holds(
        &made(
            CHATML,
            r#"{"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
            TrainingTask::Generate,
            "messages=talk",
        ),
        &["⟦b<|im_end|>⟧"],
    );
    holds(
        &made(
            CHATML,
            r#"{"q": "a", "best": " b", "worst": " c"}"#,
            TrainingTask::Prefer,
            "prompt=q,chosen=best,rejected=worst",
        ),
        &["a⟦ b<", "a⟦ c<"],
    );
    let labels = "{\"sentence\": \"a\", \"class\": 1}\n{\"sentence\": \"b\", \"class\": 0}";
    holds(&made(CHATML, labels, TrainingTask::Classify, "text=sentence,label=class"), &["label 1\na", "label 0\nb"]);
    let wrapped = r#"{"version": "0.1", "data": [{"instruction": "a", "output": "b"}]}"#;
    holds(
        &made(CHATML, wrapped, TrainingTask::Generate, ""),
        &["refused", "data is a list of objects", "jq -c '.data[]'"],
    );
    for wrong in ["prompt", "prompt=", "promt=a", "prompt=a,prompt=b", "ignore=a,text=a"] {
        let message = wrong.parse::<ColumnMapping>().unwrap_err().to_string();
        assert!(message.starts_with("--columns is "), "{message}");
    }
}

#[test]
fn what_the_template_does_not_write_of_an_answer_is_said() {
    let thought = format!(
        "{{\"messages\": [{}, {}]}}",
        turn("user", "2+2?"),
        turn("assistant", "<think>\n2 and 2\n</think>\n\n4")
    );
    holds(
        &made(THOUGHTLESS, &thought, TrainingTask::Generate, ""),
        &["⟦\n\n4<|im_end|>⟧", "has thoughts, up to </think>, that the template does not render"],
    );
    holds(&made(CHATML, &thought, TrainingTask::Generate, ""), &["⟦<think>", "!thoughts"]);
    let reasoned = r#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]}"#;
    holds(
        &made(CHATML, reasoned, TrainingTask::Generate, ""),
        &["⟦4<|im_end|>⟧", "has reasoning_content that the template does not render"],
    );
    let silent = "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}";
    let text =
        format!("{{\"messages\": [{}, {}, {}]}}", turn("system", "S"), turn("user", "a"), turn("assistant", "b"));
    holds(
        &made(silent, &text, TrainingTask::Generate, ""),
        &["⟦b<|im_end|>⟧", "has a system message that the template does not render completely"],
    );
    let object = format!(
        "{{\"messages\": [{}, {}, {{\"role\": \"tool\", \"content\": {{\"t\": \"x\"}}}}, {}]}}",
        turn("user", "a"),
        turn("assistant", "b"),
        turn("assistant", "c")
    );
    holds(&made(TOOLS, &object, TrainingTask::Generate, ""), &["object is written as Python prints it"]);
    let partial = "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}";
    let two = [turn("user", "a"), turn("assistant", "FIRST"), turn("user", "b"), turn("assistant", "LAST")].join(",");
    holds(
        &made(partial, &format!("{{\"messages\": [{two}]}}"), TrainingTask::Generate, ""),
        &["⟦LAST<|im_end|>⟧", "no {% generation %} block encloses"],
    );
}

#[test]
fn the_end_of_an_answer_is_learned_or_missing_by_name() {
    let two = [turn("user", "a"), turn("assistant", "ONE"), turn("user", "b"), turn("assistant", "TWO")].join(",");
    let text = format!("{{\"messages\": [{two}]}}");
    // Constant text that is not a token.
    for (source, end) in [
        ("{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|stop|>\n{% endfor %}", "<|stop|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} ###\n{% endfor %}", " ###"),
    ] {
        let made = made(source, &text, TrainingTask::Generate, "");
        holds(&made, &[&format!("ONE{end}⟧"), &format!("TWO{end}⟧"), "!end is not trained on"]);
    }
    let endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    holds(
        &made(endless, &text, TrainingTask::Generate, ""),
        &["ONE⟧", "TWO⟧", "has an answer whose end is not trained on"],
    );
    let open = BLOCKS.replace("{% generation %}{{ '<|im_end|>' }}{% endgeneration %}", "{{ '<|im_end|>' }}");
    holds(&made(&open, &text, TrainingTask::Generate, ""), &["⟦ONE⟧<|im_end|>", "end is not trained on"]);
    holds(&made(BLOCKS, &text, TrainingTask::Generate, ""), &["⟦ONE<|im_end|>⟧", "!end is not trained on"]);
}

#[test]
fn tokens_that_stand_around_a_text_do_not_come_twice() {
    let folder = TestFolder::new();
    let model = repository().join("tests/fixtures/finetune/models/llama");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(model.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let config = r#"{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": true}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let folder = TestFolder { tokenizer: Tokenizer::open(dir.path()).unwrap(), ..folder };
    let options = DataOptions::new(TrainingTask::Generate, 64);
    let made = |text: &str| made_with(&folder, None, "x.jsonl", text, &options);
    let note = "has the tokenizer's special token at the beginning or end, so it is not added again";
    holds(&made(r#"{"prompt": "a", "completion": "b"}"#), &["\n<|endoftext|>a⟦b<|im_end|>⟧", "!special token"]);
    holds(
        &made(r#"{"prompt": "<|endoftext|>a", "completion": "b<|im_end|>"}"#),
        &["\n<|endoftext|>a⟦b<|im_end|>⟧\n", note],
    );
    holds(&made(r#"{"text": "<|endoftext|>a<|im_end|>\n"}"#), &["\n⟦<|endoftext|>a<|im_end|>\n⟧", note]);
}

#[test]
fn a_template_for_tools_is_taken_where_there_are_tools() {
    let model = repository().join("tests/fixtures/finetune/models/llama");
    let folder = TestFolder::new();
    let tools = r#", "tools": [{"type": "function", "function": {"name": "fly"}}]"#;
    let talk = |more: &str| format!("{{\"messages\": [{}, {}]{more}}}", turn("user", "a"), turn("assistant", "b"));
    let options = DataOptions::new(TrainingTask::Generate, 256);
    for as_files in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(model.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let mut config = serde_json::json!({"eos_token": "<|im_end|>"});
        if as_files {
            std::fs::write(dir.path().join("chat_template.jinja"), CHATML).unwrap();
            std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
            std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), TOOLS).unwrap();
        } else {
            config["chat_template"] =
                serde_json::json!([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]);
        }
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = Template::open(dir.path(), &folder.tokenizer).unwrap();
        let made = |text: &str| made_with(&folder, Some(&template), "x.jsonl", text, &options);
        holds(&made(&talk(tools)), &["\"name\": \"fly\"", "⟦b<|im_end|>⟧"]);
        holds(&made(&talk("")), &["⟦b<|im_end|>⟧", "!fly"]);
        holds(&made(&talk(", \"tools\": []")), &["⟦b<|im_end|>⟧"]);
    }
}

#[test]
fn labels_that_are_none_and_pairs_of_texts_are_refused() {
    let classify = |text: &str| made(CHATML, text, TrainingTask::Classify, "");
    let unsure = "{\"text\": \"q\", \"label\": -1}\n{\"text\": \"a\", \"label\": 0}\n{\"text\": \"b\", \"label\": 1}";
    holds(
        &classify(unsure),
        &["label 0\na", "label 1\nb", "1 record (line 1) could not be used", "stands for \"no label\""],
    );
    let folder = TestFolder::new();
    let labels = ["-1", "0", "1"].map(String::from).into();
    let options = DataOptions { labels, ..DataOptions::new(TrainingTask::Classify, 64) };
    holds(&made_with(&folder, None, "x.jsonl", unsure, &options), &["label -1\nq", "!could not"]);
    holds(
        &made_with(
            &folder,
            None,
            "x.csv",
            "text,label\na,\nb,x\nc,y\n",
            &DataOptions { labels: vec![], ..options.clone() },
        ),
        &["its label is empty", "label x\nb"],
    );
    let spaced = "text,label\na, negative\nb,negative\nc,good\n";
    holds(
        &made_with(&folder, None, "x.csv", spaced, &DataOptions { labels: vec![], ..options }),
        &["refused", "differ only in surrounding white space"],
    );
    holds(
        &classify("{\"sentence\": \"a\", \"label\": 1}"),
        &["refused", "(sentence, label) do not include text and label", "--columns text=COLUMN"],
    );
    holds(
        &classify("{\"text\": \"a\", \"text_pair\": \"b\", \"label\": 1}\n{\"text\": \"c\", \"label\": 0}"),
        &["refused", "it has text_pair: pairs of texts"],
    );
    holds(
        &made(CHATML, "{\"text\": \"a\", \"label\": 1}", TrainingTask::Generate, ""),
        &["⟦a<|im_end|>⟧", "not read: label (1 record)"],
    );
    assert!(labels_of(&[], &ColumnMapping::default()).is_err());
}

#[test]
fn empty_answers_and_texts_as_they_stand_are_said() {
    let generate = |text: &str| made(CHATML, text, TrainingTask::Generate, "");
    holds(
        &generate("{\"prompt\": \"c\", \"completion\": \"\"}"),
        &["an empty answer", "used verbatim, without the model's chat template"],
    );
    holds(
        &generate("{\"prompt\": \"c\", \"completion\": \"d\"}"),
        &["--columns instruction=prompt,output=completion", "!empty answer"],
    );
    let folder = TestFolder::new();
    let options = DataOptions::new(TrainingTask::Generate, 64);
    holds(
        &made_with(&folder, None, "x.jsonl", "{\"prompt\": \"c\", \"completion\": \"d\"}", &options),
        &["c⟦d<|im_end|>⟧", "!without the model's"],
    );
    let printed = "{\n  \"messages\": [\n    {\"role\": \"user\", \"content\": \"a\"},\n    {\"role\": \"assistant\", \"content\": \"b\"}\n  ]\n}\n";
    holds(&generate(&printed.repeat(2)), &["2 records, 2 samples", "line 7:"]);
}

/// Returns a text that occurs nowhere else.
fn word(n: usize) -> String {
    format!("w{n}q")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn each_text_of_an_answer_is_learned_or_missing_by_name(
        kinds in prop::collection::vec(0_usize..6, 1..5),
        source in prop::sample::select(vec![CHATML, TOOLS, THOUGHTLESS, TRIMS, BLOCKS]),
        as_list: bool,
    ) {
        let mut texts: Vec<String> = vec![];
        let mut next = || { texts.push(word(texts.len())); texts[texts.len() - 1].clone() };
        let mut messages = vec![];
        for kind in kinds {
            messages.push(serde_json::json!({"role": "user", "content": "question"}));
            let content = next();
            let mut answer = serde_json::json!({"role": "assistant", "content": content});
            match kind {
                0 => {}
                1 => answer["reasoning_content"] = next().into(),
                2 => answer["content"] = format!("<think>{}</think>{content}", next()).into(),
                3 => answer["tool_calls"] = serde_json::json!([{"type": "function", "function": {"name": next(), "arguments": {"key": next()}}}]),
                4 => answer["function_call"] = serde_json::json!({"name": next(), "arguments": format!("{{\"key\": \"{}\"}}", next())}),
                _ => answer["content"] = serde_json::json!([{"type": "text", "text": content}, {"type": "text", "text": next()}]),
            }
            messages.push(answer);
        }
        let record = if as_list { serde_json::json!(messages) } else { serde_json::json!({"messages": messages}) };
        let made = made(source, &record.to_string(), TrainingTask::Generate, "");
        prop_assume!(!made.contains("uncertain"));
        let mut learned = String::new();
        for part in made.split('⟦').skip(1) {
            learned += part.split('⟧').next().unwrap_or_default();
        }
        for text in texts {
            prop_assert!(
                learned.contains(&text) || made.contains("refused") || made.contains("that the template does not render"),
                "{} is lost in:\n{}", text, made
            );
        }
    }
}
