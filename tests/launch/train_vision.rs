//! The bundled example `train_vision` as a user runs it: a ResNet-18 with Candle's batch norm, through `zerorun`.

use crate::support::processes::{example, stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

fn train_vision() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| example("train_vision"))
}

const SMALL: [&str; 6] = ["--width", "2", "--validation", "20", "--epochs", "2"];
const GENERATED: [&str; 4] = ["--image", "8", "--images", "32"];

/// Runs the example in `folder` with a configuration that has a batch size of 16.
fn run(folder: &Path, ranks: usize, stage: u8, args: &[&str]) -> Output {
    let config = json!({
        "train_batch_size": 16,
        "zero_allow_untested_optimizer": true,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    std::fs::write(folder.join("ds_config.json"), config.to_string()).unwrap();
    let mut command = zerorun();
    command.current_dir(folder).args(["-n", &ranks.to_string()]).arg(train_vision());
    command.args(["--ds_config", "ds_config.json", "--metrics", "m.jsonl", "--export", "net.safetensors"]);
    command.args(SMALL).args(args).output().unwrap()
}

/// Returns the computed results of a run: its metrics without times, and the exported weights and running statistics.
fn result(folder: &Path, output: &Output) -> (Vec<Value>, Vec<u8>) {
    assert!(output.status.success(), "{}", stderr(output));
    let lines = std::fs::read_to_string(folder.join("m.jsonl")).unwrap();
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("seconds").unwrap();
        line
    };
    (lines.lines().map(line).collect(), std::fs::read(folder.join("net.safetensors")).unwrap())
}

#[test]
fn a_resnet_18_with_batch_norm_has_the_same_bits_at_all_stages() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [1, 2] {
        let train = |stage, more: &[&str]| {
            let output = run(folder.path(), ranks, stage, &[&GENERATED, more].concat());
            (result(folder.path(), &output), stdout(&output))
        };
        let (reference, text) = train(0, &[]);
        assert_eq!(reference.0.len(), 2);
        assert!(text.contains("epoch 2 step 4: loss ") && text.contains("validation accuracy"), "{text}");
        let names = reference.1.windows(12).filter(|w| *w == b"running_mean").count();
        assert_eq!(names, 20, "a ResNet-18 has 20 batch norms");
        for stage in 1..4 {
            assert!(train(stage, &[]).0 == reference, "stage {stage}, world size {ranks}");
        }
        assert!(train(3, &["--activation_checkpointing"]).0 == reference, "recomputed, world size {ranks}");
    }
}

#[test]
fn the_large_stem_with_its_overlapping_maximum_has_the_same_bits_at_all_stages() {
    let folder = tempfile::tempdir().unwrap();
    let train = |stage| {
        let args = ["--image", "32", "--images", "32", "--large_stem", "--steps", "2"];
        result(folder.path(), &run(folder.path(), 2, stage, &args))
    };
    let reference = train(0);
    assert_eq!(reference.0.len(), 1);
    assert!(train(3) == reference);
}

#[test]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run(folder.path(), 2, 2, &GENERATED);
    let (_, expected) = result(folder.path(), &whole);
    // A schedule that ends earlier would have different rates. Therefore, the run takes all its steps, and the last
    // epoch's checkpoint is removed afterwards.
    let save = |more: &[&str]| run(folder.path(), 2, 2, &[&GENERATED[..], &["--save", "saved"], more].concat());
    result(folder.path(), &save(&[]));
    std::fs::remove_dir_all(folder.path().join("saved/global_step4")).unwrap();
    std::fs::write(folder.path().join("saved/latest"), "global_step2").unwrap();
    let output = save(&["--resume"]);
    assert!(stdout(&output).contains("continues after step 2"), "{}", stdout(&output));
    assert!(result(folder.path(), &output).1 == expected);
}

#[test]
fn it_reads_cifar_10s_files_and_trains_with_statistics_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let cifar = folder.path().join("cifar");
    std::fs::create_dir(&cifar).unwrap();
    let records = |count: usize| {
        let record = |i: usize| (0..3073).map(move |b| if b == 0 { (i % 10) as u8 } else { (i * 7 + b * 3) as u8 });
        (0..count).flat_map(record).collect::<Vec<u8>>()
    };
    let names = (1..=5).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".into()]);
    names.for_each(|name| std::fs::write(cifar.join(name), records(4)).unwrap());
    let args = ["--data", "cifar", "--sync_batch_norm"];
    let output = run(folder.path(), 2, 3, &args);
    let (lines, _) = result(folder.path(), &output);
    assert_eq!(lines[1]["step"], 2, "20 images are one batch of 16");

    std::fs::write(cifar.join("data_batch_3.bin"), vec![0; 3000]).unwrap();
    let damaged = run(folder.path(), 1, 0, &args);
    assert!(!damaged.status.success());
    assert!(stderr(&damaged).contains("data_batch_3.bin has 3000 bytes"), "{}", stderr(&damaged));
    std::fs::remove_file(cifar.join("data_batch_3.bin")).unwrap();
    let missing = run(folder.path(), 1, 0, &args);
    assert!(stderr(&missing).contains("data_batch_3.bin"), "{}", stderr(&missing));
}
