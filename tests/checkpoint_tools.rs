//! `zerorun inspect` and `zerorun consolidate` on checkpoints that engines have saved.
#![allow(clippy::unwrap_used)]

mod common;
mod launch_support;

use candle_core::Device;
use candle_zero::comm::threads;
use candle_zero::{Engine, Result};
use common::{Shape, Tiny, config};
use launch_support::{stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Saves checkpoints `tags` of an untrained model from two ranks, and exports its parameters as the result.
fn save(dir: &Path, tags: &[&str], more: Value) -> PathBuf {
    let exported = dir.join("exported.safetensors");
    let shape = Shape { units: true, checkpointed: false, layers: 2 };
    let ranks = threads::run(2, |comm| -> Result<()> {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config(2, 1, json!({}), more.clone()))?;
        for tag in tags {
            engine.save_checkpoint(dir, Some(tag), json!({"epoch": 3, "note": "text"}))?;
        }
        engine.export_safetensors(&exported)
    });
    ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    exported
}

fn tool(name: &str, path: &Path, more: &[&str]) -> Output {
    zerorun().arg(name).arg(path).args(more).output().unwrap()
}

fn inspect(path: &Path, more: &[&str]) -> Output {
    tool("inspect", path, more)
}

fn json_of(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// The length of the file must stay.
fn flip_last_byte(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_whole_checkpoint_is_told_in_words_and_in_json() {
    let dir = folder();
    save(dir.path(), &["first", "second"], json!({}));
    let output = inspect(dir.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for words in ["first", "(latest)", "2 ranks at stage 2, f32", "AdamW", "fp32, exp_avg, exp_avg_sq", "epoch, note"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.contains("whole: manifest, lengths and headers"), "{text}");

    let output = inspect(dir.path(), &["--tag", "first", "--verify", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let all = json_of(&output);
    assert_eq!(all["found"]["latest"], "second");
    assert_eq!(all["found"]["tags"].as_array().unwrap().len(), 2);
    let one = &all["checkpoint"];
    assert_eq!((&one["tag"], &one["whole"], &one["verified"]), (&json!("first"), &json!(true), &json!(true)));
    assert_eq!(one["client_state_keys"], json!(["epoch", "note"]));
    let files = std::fs::read_dir(dir.path().join("first")).unwrap().flatten();
    let bytes: u64 = files.filter(|f| f.file_name() != "manifest.json").map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(one["bytes"], bytes);

    // The folder of a tag is as good.
    let output = inspect(&dir.path().join("first"), &["--json"]);
    assert_eq!(json_of(&output)["checkpoint"]["tag"], "first");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn damage_is_told_by_file_and_exit_code_1() {
    let dir = folder();
    save(dir.path(), &["tag"], json!({}));
    let file = |rank: usize| dir.path().join(format!("tag/rank_0000{rank}_of_00002.safetensors"));

    // Data that is not what was written shows only when it is read.
    flip_last_byte(&file(1));
    assert_eq!(inspect(dir.path(), &[]).status.code(), Some(0));
    let output = inspect(dir.path(), &["--verify"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("rank_00001_of_00002") && text.contains("are damaged: they have another checksum"), "{text}");

    // Every damaged file is told.
    std::fs::remove_file(file(0)).unwrap();
    let output = inspect(dir.path(), &["--verify", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let one = &json_of(&output)["checkpoint"];
    assert_eq!((one["problems"].as_array().unwrap().len(), &one["whole"]), (2, &json!(false)));
    assert!(one["problems"][0].as_str().unwrap().contains("the file is missing"), "{one}");

    // The folder of a tag that has lost its manifest is one all the same.
    std::fs::remove_file(dir.path().join("tag/manifest.json")).unwrap();
    for path in [dir.path().to_owned(), dir.path().join("tag")] {
        let output = inspect(&path, &[]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stdout(&output).contains("manifest.json"), "{}", stdout(&output));
    }
}

#[test]
fn where_there_is_nothing_the_exit_code_is_2() {
    let dir = folder();
    let cases: [(PathBuf, &[&str], &str); 3] = [
        (dir.path().join("absent"), &[], "cannot read"),
        (dir.path().to_owned(), &[], "there is no checkpoint in it"),
        (dir.path().to_owned(), &["--tga", "x"], "unexpected argument"),
    ];
    for (path, more, words) in cases {
        let output = inspect(&path, more);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    save(dir.path(), &["tag"], json!({}));
    let output = inspect(dir.path(), &["--tag", "tga"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("There are: tag"), "{}", stderr(&output));
    let output = inspect(&dir.path().join("tag"), &["--tag", "other"]);
    assert_eq!(output.status.code(), Some(2));
    std::fs::remove_file(dir.path().join("latest")).unwrap();
    let output = inspect(dir.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(json_of(&output)["problem"].as_str().unwrap().contains("there are: tag"));
}
