//! The messages about invalid configurations.

use candle_zero::config::Config;
use serde_json::json;

fn refusal(text: &str, world_size: usize) -> String {
    Config::load(text, world_size).unwrap_err().to_string()
}

/// Returns the message for a file, without its folder.
fn file_refusal(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(&path, text).unwrap();
    let message = Config::load(path, 1).unwrap_err().to_string();
    message.replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn a_missing_file() {
    insta::assert_snapshot!(refusal("no/such/ds.json", 1), @"cannot read the configuration no/such/ds.json: No such file or directory (os error 2); give the path of a DeepSpeed JSON file, or JSON text that starts with `{`");
}

#[test]
fn a_folder_in_place_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let message = Config::load(folder.path(), 1).unwrap_err().to_string();
    insta::assert_snapshot!(message.replace(&folder.path().display().to_string(), "FOLDER"), @"cannot read the configuration FOLDER: Is a directory (os error 21); give the path of a DeepSpeed JSON file, or JSON text that starts with `{`");
}

#[test]
fn a_pipe_in_place_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let message = Config::load(path, 1).unwrap_err().to_string();
    insta::assert_snapshot!(message.replace(&format!("{}/", folder.path().display()), ""), @"cannot read the configuration ds.json: it is a pipe, but a file is needed; give the path of a DeepSpeed JSON file, or JSON text that starts with `{`");
}

#[test]
fn broken_json_in_a_file() {
    insta::assert_snapshot!(file_refusal("{\n  \"train_batch_size\": 8  \"bf16\": {}\n}"), @r#"ds.json: line 2, column 26: expected `,` or `}` after the value of `train_batch_size`, found `"`"#);
    insta::assert_snapshot!(file_refusal("{\n  \"train_batch_size\": 8,\n  \"bf16\": {\"enabled\": true\n}"), @"ds.json: line 4, column 2: expected `}` for the object that starts at line 1, column 1, found the end of the text");
}

#[test]
fn a_string_without_quotes_that_took_in_what_follows() {
    insta::assert_snapshot!(file_refusal("train_batch_size: 8\noptimizer: { type: AdamW }\n"), @"ds.json: line 2, column 20: expected a JSON value for `type` (text must be in double quotes; an unquoted string extends to the end of its line, and this line contains a bracket), found `AdamW`");
    insta::assert_snapshot!(file_refusal("{ train_batch_size: 8\n  optimizer: {\n    type: AdamW,\n  }\n}"), @r#"ds.json: line 3, column 5: `optimizer.type`: "AdamW," is unknown; use Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, Adam8bit, AdamW8bit or Lion8bit. Did you mean "AdamW"?"#);
    insta::assert_snapshot!(file_refusal("{ train_batch_size: 8 ranks }"), @"ds.json: line 1, column 23: expected `,` or `}` after the value of `train_batch_size`, found `ranks`");
}

#[test]
fn names_and_numbers_that_no_terminal_should_see() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"\\u001b[31mred\": 1}", 1), @r"the configuration given as text: line 1, column 25: `\u{1b}[31mred`: not a key at the top level, and no name is similar; remove it, or start its name with `_` if it is a comment");
    insta::assert_snapshot!(refusal(&format!("{{\"train_batch_size\": 8, \"{}\": 1}}", "k".repeat(100_000)), 1), @"the configuration given as text: line 1, column 25: `kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk...`: not a key at the top level, and no name is similar; remove it");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"\\u001b[2J\"}}", 1), @r#"the configuration given as text: line 1, column 39: `optimizer.type`: "\u{1b}[2J" is unknown; use Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, Adam8bit, AdamW8bit or Lion8bit."#);
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 9223372036854775808}", 1), @"the configuration given as text: line 1, column 22: `train_batch_size`: expected at most 9223372036854775807, found 9223372036854775808");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"steps_per_print\": 18446744073709551615}", 1), @"the configuration given as text: line 1, column 44: `steps_per_print`: expected at most 9223372036854775807, found 18446744073709551615");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"learning_rate\": 1}}}", 1), @"the configuration given as text: line 1, column 67: `optimizer.params.learning_rate`: not a key of `optimizer.params`; did you mean `optimizer.params.lr`?");
}

#[test]
fn a_list_at_the_top_of_a_file() {
    insta::assert_snapshot!(file_refusal("[1, 2]"), @"ds.json: line 1, column 1: expected an object `{...}` as the outermost value, found `[`");
}

#[test]
fn a_duplicate_key() {
    insta::assert_snapshot!(file_refusal("{\"bf16\": {\"enabled\": true,\n  \"enabled\": false}}"), @"ds.json: duplicate key: `bf16.enabled` is given twice, at line 1, column 11 and at line 2, column 3; remove one of them");
}

#[test]
fn wrong_types() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": \"8\"}", 1), @r#"the configuration given as text: line 1, column 22: `train_batch_size`: expected a whole number, found the string "8""#);
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"fp16\": null}", 1), @"the configuration given as text: line 1, column 33: `fp16`: expected an object `{...}`, found null");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": [1]}}", 1), @"the configuration given as text: line 1, column 56: `zero_optimization.stage`: expected a whole number (0 to 3), found a list of length 1");
}

#[test]
fn stage_7() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8,\n \"zero_optimization\": {\"stage\": 7}}", 1), @"the configuration given as text: line 2, column 33: `zero_optimization.stage`: expected 0 to 3, found 7");
}

#[test]
fn an_unknown_key_and_a_misplaced_one() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"gradient_cliping\": 1}", 1), @"the configuration given as text: line 1, column 25: `gradient_cliping`: not a key at the top level; did you mean `gradient_clipping`?");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8,\n  \"offload_optimizer\": {}}", 1), @"the configuration given as text: line 2, column 3: `offload_optimizer`: not a key at the top level: it belongs at `zero_optimization.offload_optimizer`; move it there");
}

#[test]
fn an_inconsistent_batch() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 3}", 2), @"the configuration given as text: line 1, column 2: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 32 != 4 * 3 * 2; with the other two values, train_batch_size must be 24");
    insta::assert_snapshot!(refusal("{\"gradient_accumulation_steps\": 3}", 2), @"the configuration given as text: `train_batch_size`: either train_batch_size or train_micro_batch_size_per_gpu (the micro batch of a rank) is required");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 33, \"train_micro_batch_size_per_gpu\": 17}", 2), @"the configuration given as text: line 1, column 2: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 33 != 17 * 0 (derived) * 2; choose a train_batch_size that is a multiple of 34");
}

#[test]
fn a_world_that_does_not_divide_the_batch() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 64}", 3), @"the configuration given as text: line 1, column 2: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 64 != 21 (derived) * 1 (derived) * 3; choose a train_batch_size that is a multiple of 3");
}

#[test]
fn no_ranks() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 64}", 0), @"the world size is 0; a run has at least 1 rank");
}

#[test]
fn fp16_and_bf16() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}", 1), @"the configuration given as text: line 1, column 61: `bf16.enabled`: bf16 (bfloat16) and fp16 are both enabled, but they are mutually exclusive; disable one of them");
}

/// Returns the error about one offload section at stage 3.
fn offload_refusal(section: &str, keys: &str, optimizer: &str) -> String {
    let text = format!(
        "{{\"train_batch_size\": 8, \"optimizer\": {optimizer}, \"zero_allow_untested_optimizer\": true,\n \
         \"zero_optimization\": {{\"stage\": 3,\n  \"{section}\": {{\"device\": \"nvme\", {keys}}}}}}}"
    );
    refusal(&text, 1)
}

const ADAM: &str = "{\"type\": \"Adam\"}";

#[test]
fn nvme_without_a_folder() {
    insta::assert_snapshot!(offload_refusal("offload_optimizer", "", ADAM), @r#"the configuration given as text: line 3, column 25: `zero_optimization.offload_optimizer.nvme_path`: required: device "nvme" needs a folder on a fast local disk; give its path, or use device "cpu""#);
    insta::assert_snapshot!(offload_refusal("offload_param", "\"nvme_path\": \"\"", ADAM), @r#"the configuration given as text: line 3, column 39: `zero_optimization.offload_param.nvme_path`: found "": device "nvme" needs a folder on a fast local disk; give its path, or use device "cpu""#);
}

#[test]
fn too_few_buffers() {
    let momentum = "{\"type\": \"SGD\", \"params\": {\"momentum\": 0.9}}";
    let count = |count: u8| format!("\"nvme_path\": \"/x\", \"buffer_count\": {count}");
    insta::assert_snapshot!(offload_refusal("offload_optimizer", &count(3), ADAM), @r#"the configuration given as text: line 3, column 62: `zero_optimization.offload_optimizer.buffer_count`: device "nvme" needs 4 or more, found 3: Adam needs the gradient, the weights and two moments"#);
    insta::assert_snapshot!(offload_refusal("offload_optimizer", &count(2), momentum), @r#"the configuration given as text: line 3, column 62: `zero_optimization.offload_optimizer.buffer_count`: device "nvme" needs 3 or more, found 2: SGD with momentum needs the gradient, the weights and the momentum"#);
    insta::assert_snapshot!(offload_refusal("offload_optimizer", &count(1), "{\"type\": \"SGD\"}"), @r#"the configuration given as text: line 3, column 62: `zero_optimization.offload_optimizer.buffer_count`: device "nvme" needs 2 or more, found 1: a step needs the gradient and the weights"#);
    insta::assert_snapshot!(offload_refusal("offload_param", &count(0), ADAM), @r#"the configuration given as text: line 3, column 58: `zero_optimization.offload_param.buffer_count`: device "nvme" needs 1 or more, found 0"#);
    insta::assert_snapshot!(offload_refusal("offload_param", "\"nvme_path\": \"/x\", \"buffer_size\": 0", ADAM), @r#"the configuration given as text: line 3, column 58: `zero_optimization.offload_param.buffer_size`: device "nvme" needs 1 or more, found 0"#);
}

#[test]
fn requests_of_no_bytes() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"aio\": {\"block_size\": 0}}", 1), @"the configuration given as text: line 1, column 47: `aio.block_size`: expected 1 or more, found 0");
}

#[test]
fn auto_where_nothing_can_answer() {
    insta::assert_snapshot!(refusal("{\"gradient_accumulation_steps\": \"auto\"}", 1), @"the configuration given as text: `train_batch_size`: either train_batch_size or train_micro_batch_size_per_gpu (the micro batch of a rank) is required");
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": \"auto\"}}}", 1), @r#"the configuration given as text: line 1, column 94: `scheduler.params.total_num_steps`: "auto" has no value here; give a whole number (1 or more), or load the configuration with RunValues::total_num_steps (zerorun check: --total_num_steps)"#);
}

#[test]
fn an_unsupported_optimizer_and_an_unknown_one() {
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"MuSGD\"}}", 1), @r#"the configuration given as text: line 1, column 39: `optimizer.type`: "MuSGD" is not supported; use Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, Adam8bit, AdamW8bit or Lion8bit"#);
    insta::assert_snapshot!(refusal("{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"AdamX\"}}", 1), @r#"the configuration given as text: line 1, column 39: `optimizer.type`: "AdamX" is unknown; use Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, Adam8bit, AdamW8bit or Lion8bit. Did you mean "AdamW"?"#);
}

#[test]
fn all_problems_of_a_file_in_its_order() {
    let text = "{\n  \"bf16\": {\"enabled\": true, \"loss_scale\": 0},\n  \"amp\": {},\n  \"zero_optimization\": {\n    \
                \"reduce_bucket_size\": 0\n  }\n}";
    insta::assert_snapshot!(file_refusal(text), @r#"
    ds.json has 4 problems:
      line 2, column 29: `bf16.loss_scale`: not a key of `bf16`: it belongs at `fp16.loss_scale`; move it there
      line 3, column 3: `amp`: not supported, and DeepSpeed 0.19.8 refuses the whole file because of it; remove it, or set its `enabled` to false
      line 5, column 27: `zero_optimization.reduce_bucket_size`: expected 1 or more, found 0
      `train_batch_size`: either train_batch_size or train_micro_batch_size_per_gpu (the micro batch of a rank) is required
    "#);
}

#[test]
fn a_value_that_was_never_text_has_no_place() {
    let error = Config::load(json!({"train_batch_size": 8, "steps_per_print": 0}), 1).unwrap_err();
    insta::assert_snapshot!(error, @"the configuration given as a value: `steps_per_print`: expected 1 or more, found 0");
}

#[test]
fn settings_of_lars_adafactor_and_schedule_free_that_contradict_each_other() {
    let configs = [
        r#"{"train_batch_size": 8, "optimizer": {"type": "lars", "params": {"momentum": 1}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "LARS", "params": {"trust_coefficient": -0.001}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "LARS", "params": {"trust_coef": 0.001}}}"#,
        r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "decay_power": 0}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"lr": 1, "relative_step": true}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"lr": 1, "warmup_init": true}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"clip_threshold": 0}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"decay_rate": 0.8}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"beta1": 1.0}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"eps": 1e-30}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor"}, "zero_optimization": {"stage": 1}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"relative_step": true}}, "scheduler": {"type": "WarmupLR"}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree"}, "scheduler": {"type": "WarmupLR"}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree"}, "local_steps": {"steps": 10}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree"}, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree", "params": {"warmup_steps": 0.5}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree", "params": {"r": -1}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamWScheduleFree", "params": {"betas": [0.9, 1]}}}"#,
        r#"{"train_batch_size": 8, "optimizer": {"type": "ScheduleFree"}}"#,
    ];
    let refused: Vec<String> = configs.iter().map(|config| format!("{config}\n  {}", refusal(config, 1))).collect();
    insta::assert_snapshot!(refused.join("\n"));
}
