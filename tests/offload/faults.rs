//! Disks that fail and jobs that are killed while their state is in files.
//!
//! A limit on file sizes (`RLIMIT_FSIZE`) simulates a failing disk: it is lowered from outside in the middle of
//! training, and every write beyond it is refused, even into reserved space. The limit does not apply to writes through
//! a mapping, which cannot fail because their space is reserved.

use crate::support::processes::{
    self, as_program, descendants, example, repository, runs, start, stderr, wait_for, zerorun,
};
use crate::support::skips::skipped;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_zero::Engine;
use candle_zero::offload::DiskAccess;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn is_empty(folder: &Path) -> bool {
    // A job that was killed leaves behind the file that it had locked.
    let mut entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    entries.all(|name| name == ".candle-zero.lock")
}

/// Returns a configuration with parameters (at stage 3) and optimizer states in files in `folder`.
fn all_in(folder: &Path, stage: u8) -> Value {
    let mut zero = json!({
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder, "pipeline_read": true, "pipeline_write": true},
    });
    if stage == 3 {
        zero["offload_param"] = json!({"device": "nvme", "nvme_path": folder, "max_in_cpu": 0});
    }
    config(stage, 1, zero, json!({"bf16": {"enabled": true}}))
}

// ---- the training program --------------------------------------------------------------------------------------

#[test]
#[ignore = "the tests of this file start it on each rank"]
fn training_program() {
    let Some(folder) = std::env::var_os("TEST_FOLDER") else { return };
    let word = |name: &str| std::env::var(name).unwrap();
    let access = match word("TEST_ACCESS").as_str() {
        "direct" => DiskAccess::Direct,
        "cached" => DiskAccess::Cached,
        _ => DiskAccess::Mapped,
    };
    println!("\npid {}", std::process::id());
    let config = all_in(Path::new(&folder), word("TEST_STAGE").parse().unwrap());
    let shape = Shape { layers: 3, units: true, ..Shape::default() };
    let builder = Engine::builder().disk_access(access);
    let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config).unwrap();
    for step in 0..word("TEST_STEPS").parse().unwrap() {
        // Reports the program's position to the test, and gives the test time to act.
        println!("step {step}");
        std::io::stdout().flush().unwrap();
        if engine.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        let (ids, targets) = batch(step * engine.world_size() + engine.rank());
        let mut train = || {
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()
        };
        if let Err(error) = train() {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
    println!("done");
}

/// Runs the program on 2 ranks, of which rank 1 may write no further than `limit` from its third step on. Returns
/// whether the program succeeded, and both outputs.
fn with_a_limit(stage: u8, access: &str, limit: u64) -> (bool, String, String) {
    let folder = folder();
    // These are enough steps for the limit to take effect in time on a busy machine.
    let steps = if access == "mapped" { "12" } else { "200" };
    // A write beyond the limit returns an error only if the signal SIGXFSZ is ignored.
    let mut command = Command::new("env");
    let zerorun = zerorun();
    command.arg("--ignore-signal=XFSZ").arg(zerorun.get_program()).args(zerorun.get_args());
    for (name, _) in zerorun.get_envs().filter(|(_, value)| value.is_none()) {
        command.env_remove(name);
    }
    command.args(["--num_ranks", "2", "--timeout", "60s"]).arg(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "training_program"));
    command.env("TEST_FOLDER", folder.path()).env("TEST_ACCESS", access).env("TEST_STAGE", stage.to_string());
    command.env("TEST_STEPS", steps).stdin(Stdio::null());
    let mut job = start(&mut command);
    let mut errors = job.stderr.take().unwrap();
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        errors.read_to_string(&mut text).unwrap();
        text
    });
    let (mut pid, mut lines, mut limited) = (0, String::new(), None);
    for line in BufReader::new(job.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(number) = line.strip_prefix("[rank 1] pid ") {
            pid = number.parse().unwrap();
        }
        if line == "[rank 1] step 2" {
            let limit = Rlimit { current: Some(limit), maximum: None };
            prlimit(Pid::from_raw(pid), Resource::Fsize, limit).unwrap();
            limited = Some(Instant::now());
        }
        lines += &format!("{line}\n");
    }
    let status = job.wait().unwrap();
    assert!(limited.unwrap().elapsed() < Duration::from_secs(10));
    assert!(is_empty(folder.path()));
    let name = |text: String| text.replace(folder.path().to_str().unwrap(), "FOLDER");
    (status.success(), lines, name(errors.join().unwrap()))
}

/// Returns the first error that a rank printed.
fn error_of(rank: usize, errors: &str) -> &str {
    let prefix = format!("[rank {rank}] error: ");
    errors.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_else(|| panic!("{errors}"))
}

#[test]
fn a_disk_that_refuses_writes_ends_the_job_with_an_error_on_every_rank() {
    // Either nothing may be written, or no more than the file of gradients holds, so that the step fails midway: the
    // other files are twice as long.
    let gradients_only = 30 * 4096;
    for (stage, access, limit, what) in [
        (3, "direct", 0, &["gradients"][..]),
        (2, "cached", 0, &["gradients"]),
        (3, "cached", gradients_only, &["master weights", "exp_avg", "exp_avg_sq"]),
        (2, "direct", gradients_only, &["master weights", "exp_avg", "exp_avg_sq"]),
    ] {
        let (success, lines, errors) = with_a_limit(stage, access, limit);
        assert!(!success && !lines.contains("done"), "{lines}");
        let cause = error_of(1, &errors);
        let fix = "raise the limit on file sizes (`ulimit -f`), or set nvme_path to a folder on a file system that \
                    allows larger files";
        let text = |what| format!("cannot write the file of {what} in FOLDER: File too large (os error 27); {fix}");
        assert!(what.iter().any(|what| cause == text(what)), "{cause}");
        let others = error_of(0, &errors);
        assert!(others.starts_with(&format!("rank 1 stopped ({cause})")), "{others}");
        println!("stage {stage}, {access}, limit {limit}: {cause}");
    }
}

#[test]
fn reserved_space_can_be_written_through_a_mapping_whatever_the_limit_of_file_sizes() {
    let (success, lines, errors) = with_a_limit(3, "mapped", 0);
    assert!(success && lines.contains("[rank 0] done"), "{lines}{errors}");
}

#[test]
#[ignore = "the next test starts it"]
fn weights_program() {
    let Some(folder) = std::env::var_os("TEST_FOLDER") else { return };
    for access in [DiskAccess::Direct, DiskAccess::Cached] {
        // At stage 2 in f32, the tensors contain complete parameters, which the test can read.
        let mut config = all_in(Path::new(&folder), 2);
        config["bf16"]["enabled"] = json!(false);
        let build = |vb: candle_nn::VarBuilder<'_>| candle_nn::linear(40, 70, vb);
        let mut engine = Engine::builder().disk_access(access).initialize(build, config).unwrap();
        let train = |engine: &mut Engine<candle_nn::Linear>| {
            let x = candle_core::Tensor::ones((2, 40), candle_core::DType::F32, engine.device())?;
            let loss = engine.forward(|m| candle_nn::Module::forward(m, &x)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()
        };
        train(&mut engine).unwrap();
        let before = engine.model().weight().to_vec2::<f32>().unwrap();
        let old = prlimit(None, Resource::Fsize, Rlimit { current: Some(0), maximum: None }).unwrap();
        let error = train(&mut engine).unwrap_err();
        prlimit(None, Resource::Fsize, old).unwrap();
        assert!(error.to_string().starts_with("cannot write the file of gradients in "), "{error}");
        assert_eq!(engine.model().weight().to_vec2::<f32>().unwrap(), before);
        // The disk works again, but this rank has stopped.
        let stopped = engine.step().unwrap_err().to_string();
        assert_eq!(stopped, format!("the engine stopped after an earlier error: {error}"));
        drop(engine);
    }
    println!("done");
}

#[test]
fn a_disk_that_refuses_gradients_is_noticed_before_any_weight_has_changed() {
    let folder = folder();
    let mut command = Command::new("env");
    command.arg("--ignore-signal=XFSZ").arg(std::env::current_exe().unwrap()).env("TEST_FOLDER", folder.path());
    command.args(as_program(module_path!(), "weights_program"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(processes::stdout(&output).contains("done"));
}

// ---- the bundled configurations --------------------------------------------------------------------------------

#[test]
fn a_bundled_configuration_makes_its_folder_below_the_home_of_a_new_user() {
    let home = folder();
    let mut command = zerorun();
    command.args(["--num_ranks", "2"]).arg(example("train_gpt")).arg("--ds_config");
    command.arg(repository().join("ds_configs/zero3_nvme.json"));
    command.args(["--n_layer", "1", "--n_embd", "16", "--n_head", "2", "--ctx", "8", "--steps", "1", "--sample", "0"]);
    let output =
        command.env("HOME", home.path()).env_remove("XDG_CACHE_HOME").env("RAYON_NUM_THREADS", "1").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output).matches("created the folder").count(), 1, "{}", stderr(&output));
    let files = home.path().join(".cache/candle-zero/offload");
    assert_eq!(std::fs::read_dir(files).unwrap().count(), 0);
}

// ---- little memory ---------------------------------------------------------------------------------------------

#[test]
fn training_and_export_need_a_fraction_of_the_state_in_memory_from_the_beginning_to_the_end() {
    let dir = folder();
    let text = std::fs::read_to_string(repository().join("ds_configs/infinity.json")).unwrap();
    let [config, metrics, weights] = ["config.json", "metrics.jsonl", "weights"].map(|name| dir.path().join(name));
    std::fs::write(&config, text.replace("\"~/.cache/candle-zero/offload\"", &format!("\"{}\"", dir.path().display())))
        .unwrap();
    // There are 78 million parameters with 1.2 GB of state, or 600 MB per rank.
    let limit = 256 << 20;
    let mut command = zerorun();
    command.args(["--num_ranks", "2"]).arg(example("train_gpt")).arg("--ds_config").arg(config);
    command.args(["--n_layer", "24", "--n_embd", "512", "--n_head", "8", "--vocab", "4096", "--ctx", "64"]);
    command.args(["--steps", "2", "--metrics"]).arg(&metrics).arg("--export").arg(&weights);
    // A backtrace needs memory, and the standard library deadlocks if there is none.
    command.env("RUST_BACKTRACE", "0").env("RAYON_NUM_THREADS", "1");
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--data={limit}")).arg("--").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let output = match limited.output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return skipped(
                training_and_export_need_a_fraction_of_the_state_in_memory_from_the_beginning_to_the_end,
                "there is no prlimit (util-linux)",
            );
        }
        Err(error) => panic!("{error}"),
    };
    assert!(output.status.success(), "{}", stderr(&output));
    let parameters = 77_000_000;
    assert!(std::fs::metadata(weights).unwrap().len() > 4 * parameters);
    let metrics = std::fs::read_to_string(metrics).unwrap();
    let peaks: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let peaks: Vec<u64> = peaks.iter().filter_map(|row| row["rss_peak_bytes"].as_u64()).collect();
    // The peaks include pages of mapped files, which the limit does not count.
    assert!(!peaks.is_empty() && peaks.iter().all(|peak| *peak < limit), "{peaks:?}");
}

// ---- killed jobs -----------------------------------------------------------------------------------------------

/// Returns whether a process has ended, including all of its threads, which could hold a file open.
fn is_gone(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads <= 1 && !runs(pid)
}

fn train_gpt(program: &Path, config: &Path, metrics: &Path, steps: u64) -> Child {
    let mut command = zerorun();
    command.args(["--num_ranks", "2"]).arg(program).arg("--ds_config").arg(config);
    command.args(["--model", "nano", "--steps", &steps.to_string(), "--sample", "0", "--metrics"]).arg(metrics);
    start(command.env("RAYON_NUM_THREADS", "1"))
}

#[test]
fn a_killed_job_leaves_nothing_and_does_not_block_the_next_one() {
    let program = example("train_gpt");
    let dir = folder();
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let text = std::fs::read_to_string(repository().join("ds_configs/zero3_nvme.json")).unwrap();
    let config = dir.path().join("config.json");
    std::fs::write(&config, text.replace("\"~/.cache/candle-zero/offload\"", &format!("\"{}\"", files.display())))
        .unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let steps = |metrics: &Path| std::fs::read_to_string(metrics).unwrap_or_default().matches("\"loss\"").count();
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    // The kills occur before the first step and at four moments during later steps. They hit all processes, or only the
    // ranks.
    for (i, least) in [0, 2, 2, 3, 3].into_iter().enumerate() {
        let _ = std::fs::remove_file(&metrics);
        let delay = Duration::from_micros(u64::from(seed.rotate_left(i as u32 * 5) % 60_000));
        let mut job = train_gpt(&program, &config, &metrics, 10_000);
        let zerorun = i32::try_from(job.id()).unwrap();
        let ranks = wait_for("the ranks and their steps", || {
            Some(descendants(zerorun)).filter(|ranks| ranks.len() >= 2 && steps(&metrics) >= least)
        });
        std::thread::sleep(delay);
        let all = if i % 2 == 0 { vec![zerorun] } else { vec![] };
        for pid in all.iter().chain(&ranks) {
            let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
        }
        job.wait().unwrap();
        wait_for("the processes to end", || ranks.iter().all(|pid| is_gone(*pid)).then_some(()));
        assert!(is_empty(&files), "killed {delay:?} after {least} steps");
    }
    std::fs::write(files.join(".candle-zero-offload-old"), "").unwrap();
    let _ = std::fs::remove_file(&metrics);
    let output = train_gpt(&program, &config, &metrics, 2).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(is_empty(&files));
    assert_eq!(steps(&metrics), 2);
}
