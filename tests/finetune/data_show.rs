//! `zerorun data show`, and the cache that it shares with other processes.

use crate::support::processes::{repository, start, stderr, stdout, zerorun};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with data files and a user's cache.
struct TestFolder(TempDir);

impl TestFolder {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Returns the command for files in this folder, with the tiny tokenizer.
    fn show(&self, words: &[&str]) -> Command {
        let model = repository().join("tests/fixtures/finetune/models/llama");
        let mut command = zerorun();
        command.current_dir(self.0.path()).env("XDG_CACHE_HOME", self.0.path().join("home"));
        command.args(["data", "show"]).arg(model).args(words);
        command
    }

    fn shown(&self, words: &[&str]) -> Output {
        self.show(words).output().unwrap()
    }

    /// Returns the files in the default folder for samples, sorted by name.
    fn cached(&self) -> Vec<PathBuf> {
        let folder = self.0.path().join("home/candle-zero/samples");
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }
}

/// Returns conversations of several hundred bytes each.
fn conversations(count: usize) -> String {
    let line = |i| {
        let words = format!("number {i} of some words that stand here to be read ").repeat(8);
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{words}"}}, {{"role": "assistant", "content": "{i}"}}]}}"#
        )
    };
    (0..count).map(|i| line(i) + "\n").collect()
}

#[test]
fn files_are_recognized_their_lines_judged_and_their_targets_shown() {
    let folder = TestFolder::new();
    folder.file(
        "chats.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Hello\"}]}\n\
         {\"messages\": \n{\"text\": \"the rest\"}\n",
    );
    folder.file("pairs.csv", "prompt,completion\n2+2=,4\n3+3=,6\n");
    let output = folder.shown(&["chats.jsonl", "pairs.csv:2", "--count", "1", "--ctx", "64"]);
    assert!(output.status.success(), "{}", stderr(&output));
    insta::assert_snapshot!(stdout(&output), @r#"
    chats.jsonl: chat messages, text: 3 records, 2 samples, 22 tokens, 10 of them targets
      1 record (line 2) could not be used (line 2: it is not JSON (EOF while parsing a value at column 12))
      more than a tenth of the records are skipped: zerorun finetune accepts the file only with --allow_skipped
    pairs.csv: prompt and completion: 2 records, 2 samples, 12 tokens, 4 of them targets
      2 records (lines 2, 3) are used verbatim, without the model's chat template; for an instruct model, give messages, or --columns instruction=prompt,output=completion

    chats.jsonl, line 1: 16 tokens, 5 targets
    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    ⟦Hello<|im_end|>⟧


    pairs.csv, line 2: 6 tokens, 2 targets
    2+2=⟦4<|im_end|>⟧
    "#);
    assert_eq!(folder.cached().len(), 2);
    let again = folder.shown(&["chats.jsonl", "--ctx", "64"]);
    assert!(stdout(&again).contains("targets, from the cache\n"), "{}", stdout(&again));
}

#[test]
fn labels_are_numbered_and_named() {
    let folder = TestFolder::new();
    folder.file("x.csv", "text,label\nfine,good\nawful,bad\n");
    let shown = |words: &[&str]| stdout(&folder.shown(&[&["x.csv", "--task", "classify"], words].concat()));
    let sorted = shown(&[]);
    assert!(sorted.contains("labels: bad, good\n") && sorted.contains(", label good\nfine\n"), "{sorted}");
    assert!(shown(&["--labels", "good,bad"]).contains("labels: good, bad\n"));
}

#[test]
fn what_cannot_be_shown_is_said_with_what_to_do() {
    let folder = TestFolder::new();
    folder.file("x.jsonl", "{\"question\": 1}\n");
    let refused = |words: &[&str]| {
        let output = folder.shown(words);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{words:?}");
        stderr(&output).lines().next().unwrap().to_owned()
    };
    let messages = [
        refused(&["x.jsonl"]),
        refused(&["x.jsonl", "--strict"]),
        refused(&["none.jsonl"]),
        refused(&["x.jsonl:-1"]),
        refused(&["x.jsonl", "--ctx", "1"]),
        refused(&["x.jsonl", "--task", "learn"]),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    zerorun: x.jsonl has no sample to learn from: 1 record (line 1) could not be used (line 1: its keys (question) match no known format: messages; conversations; prompt, completion; instruction, input, output; text; text, label; prompt, chosen, rejected; map them with --columns prompt=question,completion=COLUMN)
    zerorun: line 1 of x.jsonl cannot be used: its keys (question) match no known format: messages; conversations; prompt, completion; instruction, input, output; text; text, label; prompt, chosen, rejected; map them with --columns prompt=question,completion=COLUMN; correct it, or leave out --strict to skip such lines
    zerorun: cannot read none.jsonl: No such file or directory (os error 2)
    zerorun: the weight of x.jsonl:-1 must be above 0 and at most 1000, as in data.jsonl:2.5
    zerorun: invalid value '1' for '--ctx <TOKENS>': 1 is not in 2..=4294967295
    zerorun: invalid value 'learn' for '--task <TASK>'
    ");
    assert_eq!(folder.cached(), Vec::<PathBuf>::new());
}

#[test]
fn of_processes_that_need_a_file_at_the_same_time_one_makes_it() {
    let folder = TestFolder::new();
    folder.file("x.jsonl", &conversations(2000));
    let running: Vec<_> =
        (0..4).map(|_| start(&mut folder.show(&["x.jsonl", "--count", "0", "--ctx", "1024"]))).collect();
    let outputs: Vec<Output> = running.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{}", stderr(&outputs[0]));
    let made = outputs.iter().filter(|output| !stdout(output).contains("from the cache")).count();
    assert_eq!(made, 1);
    assert_eq!(folder.cached().len(), 1);
}

#[test]
fn a_file_whose_maker_was_killed_is_made_by_the_next() {
    let folder = TestFolder::new();
    folder.file("x.jsonl", &conversations(20_000));
    let mut first = start(&mut folder.show(&["x.jsonl", "--ctx", "1024"]));
    let begun = Instant::now();
    let is_lock = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "lock");
    while !folder.cached().iter().any(is_lock) {
        assert!(begun.elapsed() < Duration::from_secs(60) && first.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    // By now, the program has replaced `env`, which started it.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(!folder.cached().is_empty());
    let second = folder.shown(&["x.jsonl", "--count", "0", "--ctx", "1024"]);
    assert!(second.status.success() && !stdout(&second).contains("from the cache"), "{}", stderr(&second));
    let remaining = folder.cached();
    assert!(remaining.len() == 1 && remaining[0].extension().unwrap() == "samples", "{remaining:?}");
}

#[test]
fn a_damaged_file_is_made_again_with_the_reason() {
    let folder = TestFolder::new();
    folder.file("x.jsonl", &conversations(3));
    let words = ["x.jsonl", "--count", "3", "--ctx", "1024"];
    let first = stdout(&folder.shown(&words));
    let path = folder.cached().remove(0);
    let mut bytes = std::fs::read(&path).unwrap();
    // Changes the last sample's number of tokens: its index entry, of 24 bytes, precedes the report, which is JSON.
    let report = bytes.windows(11).rposition(|window| window == b"{\"records\":").unwrap();
    bytes[report - 24 + 10] ^= 0xFF;
    std::fs::write(&path, bytes).unwrap();
    let second = folder.shown(&words);
    assert_eq!(stdout(&second), first);
    assert!(stderr(&second).contains(".samples: it is damaged, so it will be rebuilt"), "{}", stderr(&second));
}
