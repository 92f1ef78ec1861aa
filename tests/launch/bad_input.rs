//! The messages for user mistakes: the exact text on stderr of `zerorun` and `train_gpt`.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use crate::support::processes::{example, program, stderr, stdout, zerorun};
use serde_json::{Value, json};

fn train_gpt() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| example("train_gpt"))
}

/// The folder in which the mistakes are made.
struct Folder(tempfile::TempDir);

impl Folder {
    /// Creates a folder with a configuration `ok.json`.
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("ok.json", config(json!({})).to_string());
        folder
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.0.path().join(name), bytes).unwrap();
    }

    fn run(&self, ranks: usize, args: &str, backtrace: &str) -> Output {
        let mut command = zerorun();
        command.current_dir(self.0.path()).env("RUST_BACKTRACE", backtrace).env_remove("RUST_LIB_BACKTRACE");
        command.env("RAYON_NUM_THREADS", "1").args(["-n", &ranks.to_string()]).arg(train_gpt());
        let args: Vec<&str> = args.split_whitespace().collect();
        let small = [("--n_layer", "1"), ("--n_embd", "16"), ("--ctx", "8"), ("--steps", "1"), ("--sample", "0")];
        for (flag, value) in small.into_iter().filter(|(flag, _)| !args.contains(flag)) {
            command.args([flag, value]);
        }
        command.args(args).output().unwrap()
    }

    /// Returns the exit code and the stderr of `zerorun -n 1 train_gpt ARGS`, which must be the same with and without
    /// backtraces.
    fn mistake(&self, args: &str) -> String {
        let messages = ["0", "1"].map(|backtrace| {
            let output = self.run(1, args, backtrace);
            assert_eq!(stdout(&output), "");
            format!("{}{}", comparable(&stderr(&output)), output.status)
        });
        assert_eq!(messages[0], messages[1], "a backtrace in the message");
        let [messages, _] = messages;
        messages
    }

    /// Does the same as [`Folder::mistake`] with two ranks. Returns the messages of the ranks (equal except for the
    /// rank numbers), then those of `zerorun`.
    fn mistake_of_two(&self, args: &str) -> String {
        let output = self.run(2, args, "0");
        let errors = comparable(&stderr(&output));
        let (mut of_ranks, of_zerorun): (Vec<&str>, Vec<&str>) =
            errors.lines().partition(|line| line.starts_with("[rank "));
        of_ranks.sort();
        [of_ranks, of_zerorun].concat().join("\n") + &format!("\n{}", output.status)
    }
}

/// Replaces the elapsed time, and the amount of memory that other processes leave available, with placeholders.
fn comparable(errors: &str) -> String {
    let time = |line: &str| match line.rsplit_once(" after ") {
        Some((text, time)) if line.starts_with("zerorun: rank ") && time.ends_with(" s") => {
            format!("{text} after T s\n")
        }
        _ => match line.split_once(" of memory, but only ").zip(line.split_once(" GiB is available")) {
            Some(((needed, _), (_, advice))) => format!("{needed} of memory, but only M GiB is available{advice}\n"),
            None => format!("{line}\n"),
        },
    };
    errors.lines().map(time).collect()
}

/// Returns a valid configuration with `more` in it.
fn config(more: Value) -> Value {
    let mut config = json!({
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn a_correct_start_says_nothing_of_the_kind() {
    let output = Folder::new().run(1, "--ds_config ok.json", "0");
    assert!(output.status.success());
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
}

#[test]
fn configurations_that_cannot_be_read() {
    let folder = Folder::new();
    folder.write("broken.json", "{\n  \"train_batch_size\": 4,\n  \"optimizer\": {\"type\": AdamW}\n}\n");
    folder.write("twice.json", "{\n  \"train_batch_size\": 4,\n  \"train_batch_size\": 8\n}\n");
    folder.write("empty.json", "");
    insta::assert_snapshot!(folder.mistake(""), @r#"
    error: the following required arguments were not provided:
      --ds_config <FILE>

    Usage: train_gpt --ds_config <FILE> --n_layer <N_LAYER> --n_embd <N_EMBD> --ctx <CTX> --steps <STEPS> --sample <N>

    For more information, try '--help'.
    zerorun: rank 0 failed: it ended with exit code 2 after T s
    exit status: 2
    "#);
    insta::assert_snapshot!(folder.mistake("--ds_config missing.json"), @r#"
    error: cannot read the configuration missing.json: No such file or directory (os error 2); give the path of a DeepSpeed JSON file, or JSON text that starts with `{`
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(folder.mistake("--ds_config ."), @r#"
    error: cannot read the configuration .: Is a directory (os error 21); give the path of a DeepSpeed JSON file, or JSON text that starts with `{`
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(folder.mistake("--ds_config broken.json"), @r#"
    error: broken.json: line 3, column 25: expected a JSON value for `type` (text must be in double quotes; an unquoted string extends to the end of its line, and this line contains a bracket), found `AdamW`
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(folder.mistake("--ds_config twice.json"), @r#"
    error: twice.json: duplicate key: `train_batch_size` is given twice, at line 2, column 3 and at line 3, column 3; remove one of them
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(folder.mistake("--ds_config empty.json"), @r#"
    error: empty.json: line 1, column 1: expected an object `{...}` as the outermost value, found the end of the text
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
}

#[test]
fn configurations_that_break_rules() {
    let folder = Folder::new();
    let mistake = |more: Value| {
        folder.write("bad.json", serde_json::to_string_pretty(&config(more)).unwrap());
        folder.mistake("--ds_config bad.json")
    };
    insta::assert_snapshot!(mistake(json!({"train_batch_size": "four"})), @r#"
    error: bad.json: line 8, column 23: `train_batch_size`: expected a whole number, found the string "four"
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(json!({"gradient_cliping": 1.0})), @r#"
    error: bad.json: line 2, column 3: `gradient_cliping`: not a key at the top level; did you mean `gradient_clipping`?
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(json!({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2})), @r#"
    error: bad.json: line 9, column 3: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 4 != 3 * 2 * 1; with the other two values, train_batch_size must be 6
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}})), @r#"
    error: bad.json: line 3, column 5: `bf16.enabled`: bf16 (bfloat16) and fp16 are both enabled, but they are mutually exclusive; disable one of them
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(json!({"zero_optimization": {"stage": 7}})), @r#"
    error: bad.json: line 10, column 14: `zero_optimization.stage`: expected 0 to 3, found 7
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(json!({"optimizer": {"type": "AdamX", "params": {"lr": -1.0}}})), @r#"
    error: bad.json: line 6, column 5: `optimizer.type`: "AdamX" is unknown; use Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, Adam8bit, AdamW8bit or Lion8bit. Did you mean "AdamW"?
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
}

#[test]
fn data_that_cannot_be_used() {
    let folder = Folder::new();
    folder.write("short.txt", "eight at");
    folder.write("latin1.txt", b"caf\xe9 au lait, s'il vous plait");
    folder.write("odd.u16", [0; 99]);
    let tokens: Vec<u8> = (0..100u16).flat_map(|i| (if i == 7 { 256 } else { i }).to_le_bytes()).collect();
    folder.write("tokens.u16", tokens);
    std::fs::create_dir(folder.0.path().join("empty")).unwrap();
    let mistake = |data: &str| folder.mistake(&format!("--ds_config ok.json --order sequential --data {data}"));
    insta::assert_snapshot!(mistake("missing.txt"), @r#"
    error: cannot read missing.txt: No such file or directory (os error 2)
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("empty"), @r#"
    error: empty contains no text (files that are not UTF-8: 0); hidden files and folders named target are not read, and token files (.bin, .u16) must be given by their own path
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("short.txt"), @r#"
    error: short.txt has 8 tokens, but a sample with a context length of 8 needs 10; use more data or a shorter context
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("latin1.txt"), @r#"
    error: latin1.txt is not UTF-8 text (byte 3); a file of little-endian 16-bit tokens must end in .bin or .u16
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("odd.u16"), @r#"
    error: odd.u16 has 99 bytes; 16-bit tokens need an even number of bytes: is it a complete token file?
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("tokens.u16"), @r#"
    error: token 256 at position 7 of tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 257 or more
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
}

#[test]
fn models_that_there_are_not() {
    let folder = Folder::new();
    let mistake = |flags: &str| folder.mistake(&format!("--ds_config ok.json {flags}"));
    insta::assert_snapshot!(mistake("--model gpt3"), @r#"
    error: there is no model preset "gpt3" (did you mean "gpt2"?); the presets are nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--n_head 3"), @r#"
    error: model configuration: n_embd is 16, but must be a multiple of n_head (3), so that every head has the same width
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--vocab 0"), @r#"
    error: model configuration: vocab is 0, but must be at least 1
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    let huge = "18446744073709551615";
    insta::assert_snapshot!(mistake(&format!("--ctx {huge}")), @r#"
    error: model configuration: ctx is 18446744073709551615, but must be at most 4294967295
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(&format!("--vocab {huge}")), @r#"
    error: model configuration: vocab is 18446744073709551615, but must be at most 4294967295
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake(&format!("--n_layer {huge}")), @r#"
    error: model configuration: n_layer is 18446744073709551615, but must be at most 4294967295
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    folder.write("huge.json", config(json!({"train_batch_size": 1_000_000_000_000u64})).to_string());
    insta::assert_snapshot!(folder.mistake("--ds_config huge.json"), @r#"
    error: huge.json: line 1, column 53: `train_batch_size`: 1000000000000 samples per step on 1 rank amount to 1000000000000 per rank in each forward pass; the maximum is 4294967296, so set gradient_accumulation_steps or use a smaller batch
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    // 256 TiB, which no system provides.
    let too_large = folder.mistake("--ds_config ok.json --vocab 4294967295 --n_embd 16384");
    let (warning, error) = too_large.split_once('\n').unwrap();
    assert!(
        warning.starts_with("warning: the training state needs ") && warning.contains(" GiB is available"),
        "{warning}"
    );
    insta::assert_snapshot!(error, @r#"
    error: the system does not have enough memory for the 70368744161280 elements of parameter wte.weight on this rank; use a smaller model, or more ranks at stage 3
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--n_layers 3"), @r#"
    error: unexpected argument '--n_layers' found

      tip: a similar argument exists: '--n_layer'

    Usage: train_gpt --ds_config <FILE> --n_layer <N_LAYER> --n_embd <N_EMBD> --ctx <CTX> --steps <STEPS> --sample <N>

    For more information, try '--help'.
    zerorun: rank 0 failed: it ended with exit code 2 after T s
    exit status: 2
    "#);
}

#[test]
fn weights_that_do_not_fit() {
    let folder = Folder::new();
    let ok = folder.run(1, "--ds_config ok.json --export ok.safetensors", "0");
    assert!(ok.status.success(), "{}", stderr(&ok));
    folder.write("empty.safetensors", "");
    folder.write("short.safetensors", &std::fs::read(folder.0.path().join("ok.safetensors")).unwrap()[..5000]);
    let mistake = |flags: &str| folder.mistake(&format!("--ds_config ok.json --init {flags}"));
    insta::assert_snapshot!(mistake("missing.safetensors"), @r#"
    error: cannot read missing.safetensors: No such file or directory (os error 2)
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("."), @r#"
    error: cannot read .: Is a directory (os error 21)
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("ok.json"), @r#"
    error: ok.json is not a valid index of safetensors files: it has no object "weight_map"
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("empty.safetensors"), @r#"
    error: empty.safetensors is not a readable safetensors file: header too small
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("short.safetensors"), @r#"
    error: short.safetensors is not a readable safetensors file: it was cut short (it has 5000 of the 31400 bytes that its header describes)
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("ok.safetensors --n_layer 2"), @r#"
    error: ok.safetensors has no tensor h.1.ln_1.weight of shape [16], which the model needs; the file must hold exactly the model's tensors; it has h.0.attn.c_attn.bias, h.0.attn.c_attn.weight, h.0.attn.c_proj.bias and 13 more
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("ok.safetensors --ctx 16"), @r#"
    error: tensor wpe.weight in ok.safetensors has shape [8, 16], but the model's parameter has [16, 16]; check the model's sizes
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    let ok = folder.run(1, "--ds_config ok.json --n_layer 3 --export deep.safetensors", "0");
    assert!(ok.status.success(), "{}", stderr(&ok));
    insta::assert_snapshot!(mistake("deep.safetensors"), @r#"
    error: deep.safetensors holds tensors that the model does not have: h.1.attn.c_attn.bias, h.1.attn.c_attn.weight, h.1.attn.c_proj.bias, h.1.attn.c_proj.weight, h.1.ln_1.bias, h.1.ln_1.weight, h.1.ln_2.bias, h.1.ln_2.weight and 16 more; does it belong to a different model, or to one of a different size?
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
}

#[test]
fn outputs_that_cannot_be_written() {
    let folder = Folder::new();
    let mistake = |flags: &str| folder.mistake(&format!("--ds_config ok.json {flags}"));
    insta::assert_snapshot!(mistake("--export no/such/model.safetensors"), @r#"
    error: cannot write to no/such/model.safetensors: there is no folder no/such; give another path
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--export ."), @r#"
    error: cannot write to .: it is a folder, but a file is needed; give another path
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--metrics no/such/metrics.jsonl"), @r#"
    error: cannot create no/such/metrics.jsonl: No such file or directory (os error 2)
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    folder.write("file", "mine");
    insta::assert_snapshot!(mistake("--save file"), @r#"
    error: the checkpoint file cannot be used: it is a file, but checkpoints are saved to a folder; give another path
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
    insta::assert_snapshot!(mistake("--save /proc/x"), @r#"
    error: the checkpoint /proc/x cannot be used: it cannot be written (No such file or directory (os error 2)); correct this, or save elsewhere; earlier checkpoints are not affected
    zerorun: rank 0 failed: it ended with exit code 1 after T s
    exit status: 1
    "#);
}

#[test]
fn metrics_on_a_full_disk_end_and_training_goes_on() {
    let folder = Folder::new();
    let output = folder.run(1, "--ds_config ok.json --steps 3 --metrics /dev/full", "0");
    assert!(output.status.success(), "{}", stderr(&output));
    let errors = stderr(&output);
    let messages: Vec<&str> = errors.lines().filter(|line| line.contains("/dev/full")).collect();
    assert_eq!(
        messages,
        ["cannot write /dev/full: No space left on device (os error 28): training continues, but no more metrics \
             are written"]
    );
}

#[test]
fn a_timeline_that_cannot_be_written_in_the_end_does_not_make_the_job_one_that_failed() {
    let folder = Folder::new();
    // A folder takes the name of the file to be written.
    let program = program(folder.0.path(), "program", "mkdir trace.json");
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args(["-n", "1", "--timeline", "trace.json"]).arg(program);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let errors = stderr(&output);
    assert!(
        errors.contains("cannot write the timeline") && errors.contains("the ranks' records remain in"),
        "{errors}"
    );
}

#[test]
fn with_several_ranks_the_last_lines_tell_the_cause() {
    let folder = Folder::new();
    folder.write("odd.json", config(json!({"train_batch_size": 7})).to_string());
    // Both ranks find the mistake at the same time, so the rank that reports it first is random.
    let any_rank = |text: String| text.replace("rank 1", "rank 0");
    insta::assert_snapshot!(any_rank(folder.mistake_of_two("--ds_config odd.json")), @r#"
    [rank 0] error: odd.json: line 1, column 53: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 7 != 3 (derived) * 1 (derived) * 2; choose a train_batch_size that is a multiple of 2
    [rank 0] error: odd.json: line 1, column 53: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 7 != 3 (derived) * 1 (derived) * 2; choose a train_batch_size that is a multiple of 2
    zerorun: rank 0 failed first: it ended with exit code 1 after T s
    zerorun:   | error: odd.json: line 1, column 53: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 7 != 3 (derived) * 1 (derived) * 2; choose a train_batch_size that is a multiple of 2
    zerorun:   rank 0: exit code 1, not stopped by zerorun
    exit status: 1
    "#);
    insta::assert_snapshot!(any_rank(folder.mistake_of_two("--ds_config ok.json --data missing.txt")), @r#"
    [rank 0] error: cannot read missing.txt: No such file or directory (os error 2)
    [rank 0] error: cannot read missing.txt: No such file or directory (os error 2)
    zerorun: rank 0 failed first: it ended with exit code 1 after T s
    zerorun:   | error: cannot read missing.txt: No such file or directory (os error 2)
    zerorun:   rank 0: exit code 1, not stopped by zerorun
    exit status: 1
    "#);
    // With little data, both ranks check all tokens.
    let tokens: Vec<u8> = (0..100u16).flat_map(|i| (if i == 27 { 256 } else { i }).to_le_bytes()).collect();
    folder.write("tokens.u16", tokens);
    insta::assert_snapshot!(any_rank(folder.mistake_of_two("--ds_config ok.json --order sequential --data tokens.u16")), @r#"
    [rank 0] error: token 256 at position 27 of tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 257 or more
    [rank 0] error: token 256 at position 27 of tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 257 or more
    zerorun: rank 0 failed first: it ended with exit code 1 after T s
    zerorun:   | error: token 256 at position 27 of tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 257 or more
    zerorun:   rank 0: exit code 1, not stopped by zerorun
    exit status: 1
    "#);
}

#[test]
fn programs_that_cannot_be_started() {
    let folder = Folder::new();
    let mistake = |args: &[&str]| {
        let output = zerorun().current_dir(folder.0.path()).args(args).output().unwrap();
        assert_eq!(stdout(&output), "");
        format!("{}{}", comparable(&stderr(&output)), output.status)
    };
    insta::assert_snapshot!(mistake(&["--num_ranks", "2", "ok.json", "--ds_config", "ok.json"]), @r#"
    zerorun: cannot start ok.json: its name does not end in .rs, and it is not executable; give a Rust file (.rs) or an executable
    exit status: 2
    "#);
    insta::assert_snapshot!(mistake(&["--ds_config", "ok.json", "train_gpt.rs"]), @r#"
    zerorun: unexpected argument '--ds_config' found

      tip: to pass '--ds_config' as a value, use '-- --ds_config'

    Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

    For more information, try '--help'.
    exit status: 2
    "#);
}

#[test]
fn a_path_that_is_no_text_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::OsStr::from_bytes(b"chats\xff.jsonl");
    let output = zerorun().args(["finetune", "model", "--out", "o", "--data"]).arg(path).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(stderr(&output).trim_end(), @"zerorun: `chats�.jsonl` is not UTF-8 text; rename the file or folder, or create a link to it");
}
