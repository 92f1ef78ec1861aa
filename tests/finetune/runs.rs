//! Complete fine-tuning runs: the same bits at every stage and after every kill, the loss of the global batch,
//! validation, results, and refusals.

use crate::fixtures::{copy, path};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_zero::comm::threads;
use candle_zero::{Result, serde_json::json};
use candle_zero_finetune::{
    Adapter, BaseModel, CheckpointOptions, FineTune, LrDecay, Objective, Options, PreparedRun, Source, StepReport,
    StopReason, TrainingLength, TuningMethod, ValidationData, WarmupLength,
};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Writes conversations about sums, whose answers a tiny model can partly learn.
pub fn chats(folder: &Path, count: usize) -> String {
    let chat = |i: usize| {
        let (a, b) = (i * 7 % 10, i * 3 % 10);
        json!({"messages": [
            {"role": "user", "content": format!("{a} and {b}?")},
            {"role": "assistant", "content": format!("{}", a + b)},
        ]})
    };
    let lines: String = (0..count).map(|i| format!("{}\n", chat(i))).collect();
    write(folder, "chats.jsonl", &lines)
}

pub fn write(folder: &Path, name: &str, text: &str) -> String {
    let file = folder.join(name);
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().into()
}

fn options(folder: &Path, data: &str, out: &str) -> Options {
    Options {
        data: vec![Source::parse(data).unwrap()],
        method: TuningMethod::Lora("r=4".parse().unwrap()),
        length: TrainingLength::Steps(6),
        lr: Some(5e-3),
        batch: Some(4),
        ctx: Some(48),
        warmup: WarmupLength::Steps(1),
        cache: Some(folder.join("cache")),
        ..Options::new(path("models/llama"), folder.join(out))
    }
}

/// Returns the steps of a run on `world` ranks at a stage, the best validation (the number of steps and the loss), and
/// the reason why the run ended.
pub fn train(options: &Options, world: usize, stage: u8) -> (Vec<StepReport>, Option<(u64, f64)>, Option<StopReason>) {
    let folder = options.cache.clone().unwrap();
    std::fs::create_dir_all(&folder).unwrap();
    let config = folder.join(format!("stage{stage}.json"));
    let zero = json!({"stage": stage, "stage3_param_persistence_threshold": 0});
    std::fs::write(&config, json!({"zero_optimization": zero}).to_string()).unwrap();
    let options = Options { ds_config: Some(config), ..options.clone() };
    let ranks = threads::run(world, |comm| -> Result<_> {
        let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
        let mut steps = vec![];
        while let Some(step) = run.step()? {
            steps.push(step);
        }
        let (best, ended) = (run.best(), run.stop_reason());
        run.finish()?;
        Ok((steps, best, ended))
    });
    ranks.unwrap().remove(0).unwrap()
}

fn adapter_bytes(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("adapter_model.safetensors")).unwrap()
}

/// Returns the numbers of steps, of rows per epoch, of rows per step, and of epochs of a run on `world` ranks.
fn planned(options: &Options, world: usize) -> (u64, usize, usize, f64) {
    let ranks = threads::run(world, |comm| -> Result<_> {
        let run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
        let batch = run.engine().config().batch.train_batch_size;
        Ok((run.total_steps(), run.rows_per_epoch(), batch, run.epochs()))
    });
    ranks.unwrap().remove(0).unwrap()
}

#[test]
fn an_epoch_has_thirty_steps_where_the_data_have_as_many_samples() {
    let folder = tempfile::tempdir().unwrap();
    let free = |data: &str| Options {
        length: TrainingLength::Epochs(1.0),
        batch: None,
        ctx: Some(128),
        ..options(folder.path(), data, "out")
    };
    for count in [1, 7, 30, 57, 200, 900, 2000] {
        let data = chats(folder.path(), count);
        let options = free(&data);
        let (full, ..) = {
            let (steps, rows, batch, _) = planned(&Options { batch: Some(8), ..options.clone() }, 1);
            assert_eq!((steps, batch), (rows.div_ceil(8) as u64, 8));
            (rows, steps)
        };
        for world in [1, 2] {
            let context = format!("{count} samples, {full} full rows, world size {world}");
            let (steps, rows, batch, epochs) = planned(&options, world);
            println!("{context}: {steps} steps of {batch} of {rows} rows");
            // An epoch has at least 30 steps, if there are enough samples.
            assert!(steps >= (count / world).min(30) as u64, "{context}: {steps} steps");
            // If rows are not full, there are no more of them than these steps require.
            assert!(rows <= full.max(60 * world), "{context}: {rows} rows");
            // A run never has more epochs than requested, except for the rest of the last step.
            assert!((epochs - 1.0) * (rows as f64) < batch as f64, "{context}: {epochs} epochs");
            assert!(batch <= 8 && (batch.is_power_of_two() || batch == world), "{context}: {batch} rows a step");
            // By default, a run has three to fifteen epochs.
            let (_, rows, batch, epochs) = planned(&Options { length: TrainingLength::Auto, ..options.clone() }, world);
            let rest = batch as f64 / rows as f64;
            assert!(
                epochs >= 3.0 && epochs < 15.0 + rest && (count < 400 || epochs < 3.0 + rest),
                "{context}: {epochs} epochs"
            );
        }
        if full >= 60 {
            assert_eq!(
                planned(&options, 1).2,
                planned(&options, 2).2,
                "the rows of a step do not depend on the number of ranks"
            );
        }
    }
}

#[test]
fn what_the_user_says_of_steps_holds_and_few_of_them_are_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 57);
    let printed = |out: &str, more: &[&str]| {
        let out = folder.path().join(out);
        let mut command = zerorun();
        command.arg("finetune").arg(path("models/llama")).args(["--data", &data, "--ctx", "128", "--out"]).arg(&out);
        let output = command.arg("--cache").arg(folder.path().join("cache")).args(more).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let all = stdout(&output) + &stderr(&output);
        let lines = all.lines().filter(|line| line.contains("through the data") || line.contains("warning"));
        lines.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(printed("a", &["--epochs", "1"]), @"57 samples in 57 rows of up to 15 tokens (not 128, so that an epoch has more steps), 1 per step (1 per rank at once): 57 steps, once through the data");
    insta::assert_snapshot!(printed("b", &["--epochs", "1", "--batch", "8"]), @r"
    57 samples in 8 rows of up to 128 tokens, 8 per step (1 per rank at once): 1 step, once through the data
    zerorun: warning: a model learns little in 1 step; the data fills 8 rows, and each step takes 8; give --epochs 30 or more, or a smaller --batch
    ");
    insta::assert_snapshot!(printed("c", &["--steps", "1"]), @r"
    57 samples in 57 rows of up to 15 tokens (not 128, so that an epoch has more steps), 1 per step (1 per rank at once): 1 step, 0.02 times through the data
    zerorun: warning: a model learns little in 1 step; the data fills 57 rows, and each step takes 1; give --epochs 1 or more
    ");
    insta::assert_snapshot!(printed("d", &["--epochs", "2", "--packing", "false", "--batch", "1"]), @"57 samples in 57 rows of up to 128 tokens, 1 per step (1 per rank at once): 114 steps, 2 times through the data");
    let ds = write(
        folder.path(),
        "ds8.json",
        r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}"#,
    );
    insta::assert_snapshot!(printed("e", &["--epochs", "1", "--ds_config", &ds]), @r"
    57 samples in 8 rows of up to 128 tokens, 8 per step (8 per rank at once): 1 step, once through the data
    zerorun: warning: a model learns little in 1 step; the data fills 8 rows, and each step takes 8; give --epochs 30 or more, or a smaller --batch
    ");
}

#[test]
fn all_stages_end_with_the_same_adapter_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    for world in [1, 2] {
        let bytes: Vec<Vec<u8>> = (0..4)
            .map(|stage| {
                let options = options(folder.path(), &data, &format!("out-{world}-{stage}"));
                train(&options, world, stage);
                adapter_bytes(&options.out)
            })
            .collect();
        assert!(bytes.iter().all(|other| *other == bytes[0]), "world size {world}");
    }
}

#[test]
fn the_loss_is_that_of_the_global_batch_however_it_is_split() {
    let folder = tempfile::tempdir().unwrap();
    // The answers have very different lengths: a mean of the micro batches' means would differ from the mean over all
    // targets.
    let chat = |i: usize| {
        let answer = "yes ".repeat(1 + i * i % 17);
        json!({"messages": [{"role": "user", "content": "so?"}, {"role": "assistant", "content": answer}]})
    };
    let lines: String = (0..24).map(|i| format!("{}\n", chat(i))).collect();
    let data = write(folder.path(), "uneven.jsonl", &lines);
    let losses = |world, micro_batch, packing| {
        let out = format!("out-{world}-{micro_batch}-{packing}");
        let options = Options { micro_batch, packing, ..options(folder.path(), &data, &out) };
        train(&options, world, 0).0.iter().map(|step| step.loss).collect::<Vec<_>>()
    };
    for packing in [false, true] {
        let unsplit = losses(1, 4, packing);
        for (world, micro_batch) in [(1, 1), (2, 2), (2, 1), (4, 1)] {
            let split = losses(world, micro_batch, packing);
            let error = unsplit.iter().zip(&split).fold(0f64, |most, (a, b)| most.max((a - b).abs()));
            assert!(error < 2e-5, "world size {world}, micro batch {micro_batch}: {error}");
        }
    }
}

#[test]
fn a_run_that_goes_on_from_a_checkpoint_ends_with_the_bits_of_one_that_never_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let full = Options { validation: Some(ValidationData::Fraction(0.2)), ..options(folder.path(), &data, "whole") };
    let (steps, best, _) = train(&full, 2, 2);
    let saving =
        Some(CheckpointOptions { dir: folder.path().join("saves"), every: Some(2), keep: Some(1), resume: true });
    // The first part is configured to end early. Its rates are constant, so that they equal those of the complete run.
    let constant =
        |options: Options| Options { scheduler: LrDecay::Constant, warmup: WarmupLength::Steps(0), ..options };
    let full = constant(Options { out: folder.path().join("constant"), ..full });
    let (whole_steps, whole_best, _) = train(&full, 2, 2);
    assert_ne!(whole_steps, steps);
    assert!(best.is_some() && whole_best.is_some());
    let part = |steps| Options {
        length: TrainingLength::Steps(steps),
        eval_every: Some(1),
        saving: saving.clone(),
        ..full.clone()
    };
    let first = Options { out: folder.path().join("first"), ..part(3) };
    train(&first, 2, 2);
    let second = Options { out: folder.path().join("second"), ..part(6) };
    let (rest, _, ended) = train(&second, 2, 3);
    assert_eq!((rest.len(), ended), (3, Some(StopReason::Complete)));
    assert_eq!(rest[0].step, 3);
    for (a, b) in rest.iter().zip(&whole_steps[3..]) {
        assert_eq!((a.loss, a.grad_norm, a.lr), (b.loss, b.grad_norm, b.lr));
    }
    assert_eq!(adapter_bytes(&second.out), adapter_bytes(&full.out));
}

#[test]
fn validation_keeps_the_best_model_and_patience_ends_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    // A rate this high soon makes the model worse.
    let options = Options {
        validation: Some(ValidationData::Fraction(0.25)),
        eval_every: Some(1),
        patience: Some(2),
        length: TrainingLength::Steps(60),
        lr: Some(0.2),
        scheduler: LrDecay::Constant,
        ..options(folder.path(), &data, "out")
    };
    for world in [1, 2] {
        let options = Options { out: folder.path().join(format!("out{world}")), ..options.clone() };
        let (steps, best, ended) = train(&options, world, 3);
        assert_eq!(ended, Some(StopReason::NoImprovement));
        let losses: Vec<f64> = steps.iter().map(|step| step.val_loss.unwrap()).collect();
        let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
        let best_step = losses.iter().position(|loss| *loss == lowest).unwrap();
        assert_eq!(best, Some((best_step as u64 + 1, lowest)));
        assert_eq!(steps.len(), best_step + 3);
        assert_ne!(adapter_bytes(&options.best()), adapter_bytes(&options.out));
        Adapter::read(options.best()).unwrap();
    }
}

#[test]
fn all_weights_leave_as_a_folder_that_opens() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 20);
    let options = Options { method: TuningMethod::Full, lr: Some(1e-3), ..options(folder.path(), &data, "out") };
    let (steps, ..) = train(&options, 2, 3);
    assert!(steps.last().unwrap().loss < steps[0].loss);
    let trained = BaseModel::open(&options.out).unwrap();
    assert_eq!(trained.config(), BaseModel::open(&options.model).unwrap().config());
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with('.')), "left behind: {names:?}");
}

#[test]
fn preferences_are_learned_and_validated() {
    let folder = tempfile::tempdir().unwrap();
    let pair = |i: usize| {
        let [a, b] = [i * 7 % 10, i * 3 % 10];
        json!({"prompt": format!("{a} or {b}?"), "chosen": format!("{a}"), "rejected": format!("{b} {b}")})
    };
    let lines: String = (0..24).map(|i| format!("{}\n", pair(i))).collect();
    let data = write(folder.path(), "pairs.jsonl", &lines);
    let options = Options {
        objective: Objective::Prefer { beta: 0.1 },
        validation: Some(ValidationData::Fraction(0.25)),
        eval_every: Some(6),
        lr: Some(1e-2),
        ..options(folder.path(), &data, "out")
    };
    let (steps, ..) = train(&options, 2, 3);
    // The adapter has no effect at first: no answer is preferred.
    assert!((steps[0].loss - 2f64.ln()).abs() < 1e-6, "{}", steps[0].loss);
    let last = steps.last().unwrap();
    assert!(last.loss < 0.5 && last.val_loss.unwrap() < 0.6 && last.val_accuracy.unwrap() > 0.5, "{last:?}");
}

/// Returns a `zerorun finetune` command for a model.
pub fn finetune(model: &Path, folder: &Path, words: &[&str]) -> std::process::Command {
    let mut command = zerorun();
    command.arg("finetune").arg(model).args(["--cache".as_ref(), folder.join("cache").as_os_str()]).args(words);
    command
}

#[test]
fn the_command_trains_prints_and_leaves_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let [out, metrics] = ["out", "metrics.jsonl"].map(|name| folder.path().join(name).to_str().unwrap().to_string());
    let words = [
        "--data",
        &data,
        "--out",
        &out,
        "--metrics",
        &metrics,
        "--steps",
        "4",
        "--ctx",
        "48",
        "--val",
        "20%",
        "-n",
        "2",
        "--prompt",
        "1 and 2?",
        "--max_tokens",
        "4",
    ];
    let output = finetune(&path("models/llama"), folder.path(), &words).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (printed, errors) = (stdout(&output), stderr(&output));
    assert!(printed.contains("chat messages") && printed.contains("the result is in"), "{printed}");
    assert!(errors.contains("validation loss") && errors.contains("\"1 and 2?\": "), "{errors}");
    Adapter::read(&out).unwrap();
    let lines = std::fs::read_to_string(metrics).unwrap();
    assert_eq!(lines.lines().count(), 5);
    for key in ["\"loss\":", "\"lr\":", "\"grad_norm\":", "\"tokens_per_s\":", "\"rss_peak_bytes\":"] {
        assert!(lines.lines().take(4).all(|line| line.contains(key)), "{key}");
    }
}

/// Returns a pseudorandom delay that is the same in every run.
fn milliseconds(kill: u64) -> Duration {
    Duration::from_millis(60 + kill.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 700)
}

#[test]
fn a_run_that_is_killed_twenty_times_ends_with_the_same_adapter_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 60);
    let run = |name: &str| {
        let [out, saves] = [name.to_string(), format!("{name}-saves")].map(|name| folder.path().join(name));
        let [out, saves] = [out, saves].map(|path| path.to_str().unwrap().to_string());
        let words = [
            "--data",
            &data,
            "--out",
            &out,
            "--steps",
            "60",
            "--batch",
            "4",
            "--ctx",
            "48",
            "--lr",
            "5e-3",
            "--lora",
            "r=4,dropout=0.1",
            "-n",
            "2",
            "--save",
            &saves,
            "--save_every",
            "1",
            "--keep",
            "2",
            "--resume",
            "--val",
            "10%",
        ];
        finetune(&path("models/llama"), folder.path(), &words)
    };
    let uninterrupted = run("alone").output().unwrap();
    assert!(uninterrupted.status.success(), "{}", stderr(&uninterrupted));
    let (mut kills, begun) = (0, Instant::now());
    for kill in 0..20 {
        let mut child = run("killed").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(milliseconds(kill));
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
            kills += 1;
        }
        child.wait().unwrap();
    }
    println!("{kills} kills in {:.1} s", begun.elapsed().as_secs_f64());
    assert!(kills > 0, "no run was killed before its end");
    let last = run("killed").output().unwrap();
    assert!(last.status.success(), "{}", stderr(&last));
    for part in ["", "-best"] {
        let [uninterrupted, killed] =
            ["alone", "killed"].map(|name| adapter_bytes(&folder.path().join(format!("{name}{part}"))));
        assert!(uninterrupted == killed, "the adapters{part} differ");
    }
}

#[test]
fn wrong_runs_are_refused_before_a_rank_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let (data, model) = (chats(folder.path(), 8), path("models/llama"));
    let out = folder.path().join("out").to_str().unwrap().to_string();
    let refusal = |model: &Path, words: &[&str]| {
        let output = finetune(model, folder.path(), words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!Path::new(&out).exists());
        let text = stderr(&output).replace(folder.path().to_str().unwrap(), "DIR");
        text.replace(path("models").to_str().unwrap(), "MODELS").trim().to_string()
    };
    let with = |words: &[&str]| refusal(&model, &[&["--data", &data, "--out", &out], words].concat());
    insta::assert_snapshot!(with(&["--lora", "r=0"]), @r"
    zerorun: invalid value 'r=0' for '--lora <SETTINGS>': LoRA settings: r is 0, but must be from 1 to 1048576

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(with(&["--lora", "targets=query"]), @"zerorun: LoRA target query is not the end of a projection's name; the projections that can have an adapter are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)");
    insta::assert_snapshot!(with(&["--ctx", "100000"]), @"zerorun: --ctx is 100000, but must be 2 to 128, the model's context");
    insta::assert_snapshot!(with(&["--dpo", "beta=x"]), @r"
    zerorun: invalid value 'beta=x' for '--dpo <beta=B>': give beta and a number, such as beta=0.1

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(with(&["--val", "0.05"]), @"zerorun: --val is 0.05, but must be files, or a part of the training data such as 5%");
    insta::assert_snapshot!(with(&["--batch", "3", "--micro_batch", "2"]), @"zerorun: --batch is 3, which is not a multiple of the 2 rows that are computed at the same time (--micro_batch 2 on 1 rank); give --batch 2 or 4, or another --micro_batch");
    insta::assert_snapshot!(with(&["--batch", "3", "-n", "2"]), @"zerorun: --batch is 3, which is not a multiple of the 2 rows that are computed at the same time (--micro_batch 1 on 2 ranks); give --batch 2 or 4, or another --micro_batch");
    insta::assert_snapshot!(with(&["--lora", "targets=norm"]), @"zerorun: LoRA target norm is not the end of a projection's name; the projections that can have an adapter are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)");
    insta::assert_snapshot!(with(&["--val", "1%"]), @"zerorun: --val takes 1% of 8 samples, which leaves none to validate with; give a different percentage, or files");
    insta::assert_snapshot!(with(&["--full", "--qlora"]), @r"
    zerorun: the argument '--full' cannot be used with '--qlora'

    Usage: zerorun finetune --data <FILE>... --out <DIR> --cache <DIR> --full <MODEL>

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(with(&["--dpo", "0.1"]), @"zerorun: DIR/chats.jsonl has no sample to learn from: 8 records (lines 1, 2, 3, 4, 5, ...) could not be used (line 1: it contains chat messages, but chosen and rejected are required; map them with --columns chosen=COLUMN,rejected=COLUMN)");
    insta::assert_snapshot!(with(&["--save_every", "3"]), @r"
    zerorun: the following required arguments were not provided:
      --save <DIR>

    Usage: zerorun finetune --data <FILE>... --out <DIR> --save <DIR> --cache <DIR> --save_every <N> <MODEL>

    For more information, try '--help'.
    ");
    let ds = write(
        folder.path(),
        "ds.json",
        r#"{"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}"#,
    );
    insta::assert_snapshot!(with(&["--ds_config", &ds, "--batch", "8"]), @r#"zerorun: --batch is 8, but the DeepSpeed configuration has train_batch_size: 4; give only one of them, or "auto" there"#);
    insta::assert_snapshot!(with(&["--ds_config", &ds, "--lr", "0.2"]), @r#"zerorun: --lr is 0.2, but the DeepSpeed configuration has optimizer.params.lr: 0.1; give only one of them, or "auto" there"#);
    let used = folder.path().join("used");
    std::fs::create_dir(&used).unwrap();
    write(&used, "notes.txt", "mine");
    insta::assert_snapshot!(refusal(&model, &["--data", &data, "--out", used.to_str().unwrap()]), @"zerorun: cannot write to DIR/used: the output must be a new or empty folder, but this folder is not empty; give another path");
    let best = folder.path().join("out-best");
    std::fs::rename(&used, &best).unwrap();
    insta::assert_snapshot!(with(&["--val", "20%"]), @"zerorun: cannot write to DIR/out-best: the output must be a new or empty folder, but this folder is not empty; give another path");
    insta::assert_snapshot!(refusal(&folder.path().join("nothing"), &["--data", &data, "--out", &out]), @"zerorun: DIR/nothing is not a model: there is no such file or folder; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    #[cfg(not(feature = "hub"))]
    insta::assert_snapshot!(refusal(Path::new("org/name"), &["--data", &data, "--out", &out]), @"zerorun: org/name is not a model: there is no such file or folder, and only a zerorun built with --features hub can download repositories from the Hugging Face Hub; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    let without = copy("llama");
    std::fs::remove_file(without.path().join("tokenizer.json")).unwrap();
    let text = refusal(without.path(), &["--data", &data, "--out", &out]);
    insta::assert_snapshot!(text.replace(without.path().to_str().unwrap(), "MODEL"), @"zerorun: MODEL has no tokenizer: it has neither tokenizer.json nor vocab.txt nor exactly one GGUF file; save a tokenizer there with transformers, AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and tokenizer_config.json from the model's source");
}

#[test]
fn many_records_that_are_skipped_end_the_run_unless_that_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let good = r#"{"question": "a", "answer": "b"}"#;
    let data = write(
        folder.path(),
        "x.jsonl",
        &format!("{}{{\"question\": 1}}\n{{\"answer\": 1}}\n", format!("{good}\n").repeat(12)),
    );
    let run = |words: &[&str]| {
        let out = folder.path().join("out").to_str().unwrap().to_string();
        let columns =
            ["--columns", "prompt=question,completion=answer", "--steps", "1", "--data", &data, "--out", &out];
        let output = finetune(&path("models/llama"), folder.path(), &[&columns, words].concat()).output().unwrap();
        (output.status.code(), stderr(&output).replace(folder.path().to_str().unwrap(), "DIR"))
    };
    let (code, errors) = run(&[]);
    let found = "2 of 14 records in DIR/x.jsonl are skipped: 2 records (lines 13, 14) could not be used (line 13: ";
    assert!(code == Some(2) && errors.contains(found) && errors.contains("--allow_skipped"), "{errors}");
    assert!(!folder.path().join("out").exists());
    let (code, errors) = run(&["--allow_skipped"]);
    assert!(code == Some(0) && errors.contains("2 records (lines 13, 14) could not be used"), "{errors}");
}
