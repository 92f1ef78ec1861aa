//! Damaged checkpoints, full disks and killed jobs: a checkpoint is loaded completely, or not at all.

use crate::support::processes::{self, as_program, descendants, example, runs, start, wait_for, wait_up_to, zerorun};
use crate::support::skips::skipped;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, LoadOptions};
use candle_zero::comm::threads;
use candle_zero::error::{CheckpointError, Error, Result};
use proptest::prelude::*;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use twox_hash::XxHash3_64;

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn settings() -> Value {
    config(3, 1, json!({}), json!({"bf16": {"enabled": true}}))
}

fn with_engine<T: Send>(world: usize, run: impl Fn(&mut Engine<Tiny>) -> Result<T> + Sync) -> Vec<Result<T>> {
    let ranks = threads::run(world, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        run(&mut builder.initialize(|vb| Tiny::new(SHAPE, vb), settings())?)
    });
    ranks.unwrap()
}

fn step(engine: &mut Engine<Tiny>) -> Result<()> {
    let (ids, targets) = batch(engine.micro_steps() as usize * engine.world_size() + engine.rank());
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)?;
    engine.step()
}

/// Saves checkpoints `one` and `two` (the latest) of 2 ranks in `dir`.
fn save_two(dir: &Path) {
    for result in with_engine(2, |engine| {
        step(engine)?;
        engine.save_checkpoint(dir, Some("one"), json!({"note": "first"}))?;
        step(engine)?;
        engine.save_checkpoint(dir, Some("two"), json!({"note": "second"})).map(drop)
    }) {
        result.unwrap();
    }
}

/// Returns checksums of everything that the engine would save.
fn state(engine: &mut Engine<Tiny>, dir: &Path) -> Result<Vec<u64>> {
    let path = engine.save_checkpoint(dir, Some("state"), Value::Null)?;
    let mut files = vec!["manifest.json".to_owned()];
    files.extend((0..2).map(|rank| format!("rank_{rank:05}_of_00002.safetensors")));
    let all = files.iter().map(|name| XxHash3_64::oneshot(&std::fs::read(path.join(name)).unwrap())).collect();
    // All ranks wait here, so that none saves again while another one reads.
    engine.gather_f64(&[])?;
    Ok(all)
}

/// Loads the damaged checkpoint `two` in `dir` and returns the errors of all ranks. Checks that the engine is
/// unchanged, and that `one` still loads.
fn refusals(dir: &Path, tag: Option<&str>) -> Vec<String> {
    let states = folder();
    let ranks = with_engine(2, |engine| {
        // After a step, neither the optimizer states nor the counters are zero.
        step(engine)?;
        let before = state(engine, states.path())?;
        let error = engine.load_checkpoint(dir, tag, &LoadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(CheckpointError::Unusable { .. })), "{error}");
        assert_eq!(before, state(engine, states.path())?, "the engine has changed");
        assert_eq!((engine.global_steps(), engine.micro_steps()), (1, 1));
        step(engine)?;
        let loaded = engine.load_checkpoint(dir, Some("one"), &LoadOptions::default())?.unwrap();
        assert_eq!(loaded.client_state["note"], "first");
        Ok(error.to_string())
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

/// Runs `damage` on a copy of an intact folder and expects an error with all of `words` on one of the ranks.
fn damaged(intact: &Path, case: &str, words: &[&str], damage: impl FnOnce(&Path)) {
    let copy = folder();
    copy_all(intact, copy.path());
    damage(copy.path());
    let texts = refusals(copy.path(), None);
    assert!(texts.iter().any(|text| words.iter().all(|word| text.contains(word))), "{case}: {texts:?}");
}

fn copy_all(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&to).unwrap();
            copy_all(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

const RANKS: [&str; 2] = ["rank_00000_of_00002.safetensors", "rank_00001_of_00002.safetensors"];

#[test]
fn a_damaged_file_is_named_and_nothing_is_touched() {
    let intact = folder();
    save_two(intact.path());
    for (rank, name) in RANKS.iter().enumerate() {
        let len = std::fs::metadata(intact.path().join("two").join(name)).unwrap().len() as usize;
        for at in [0, 9, 100, 4095, 4096, 5000, len - 1] {
            let problem = if at < 4096 { "its header is damaged" } else { "are damaged" };
            damaged(intact.path(), &format!("bit at {at}"), &[name, problem], |dir| {
                flip(&dir.join("two").join(name), at);
            });
        }
        for remaining in [0, 7, 4096, len - 1] {
            damaged(intact.path(), "truncated", &[name, &format!("it has {remaining} bytes")], |dir| {
                let file = std::fs::OpenOptions::new().write(true).open(dir.join("two").join(name)).unwrap();
                file.set_len(remaining as u64).unwrap();
            });
        }
        damaged(intact.path(), "deleted", &[name, "missing"], |dir| {
            std::fs::remove_file(dir.join("two").join(name)).unwrap();
        });
        damaged(intact.path(), "the other rank's", &[name], |dir| {
            std::fs::copy(dir.join("two").join(RANKS[1 - rank]), dir.join("two").join(name)).unwrap();
        });
        damaged(intact.path(), "of another checkpoint", &[name], |dir| {
            std::fs::copy(dir.join("one").join(name), dir.join("two").join(name)).unwrap();
        });
        damaged(intact.path(), "huge header", &[name, "its header is damaged"], |dir| {
            let path = dir.join("two").join(name);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
            std::fs::write(path, bytes).unwrap();
        });
    }
    let manifest = |dir: &Path| dir.join("two/manifest.json");
    let len = std::fs::metadata(manifest(intact.path())).unwrap().len() as usize;
    for at in (0..len).step_by(len / 20).chain([len - 1, len - 2, len - 5]) {
        damaged(intact.path(), &format!("manifest, bit at {at}"), &["manifest.json"], |dir| flip(&manifest(dir), at));
    }
    damaged(intact.path(), "manifest cut", &["manifest.json", "damaged"], |dir| {
        let text = std::fs::read_to_string(manifest(dir)).unwrap();
        std::fs::write(manifest(dir), &text[..text.len() / 2]).unwrap();
    });
    damaged(intact.path(), "manifest gone", &["manifest.json"], |dir| std::fs::remove_file(manifest(dir)).unwrap());
    damaged(intact.path(), "latest names nothing", &["three", "available: one, two"], |dir| {
        std::fs::write(dir.join("latest"), "three").unwrap();
    });
    for tag in ["../two", "/etc", "", "two/../one", "\u{0}"] {
        damaged(intact.path(), tag, &["cannot be the name of a folder"], |dir| {
            std::fs::write(dir.join("latest"), tag).unwrap()
        });
    }
}

/// Writes a changed manifest with a correct checksum.
fn forge(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut manifest: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("checksum");
    change(&mut manifest);
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    let body = text.strip_suffix("\n}").unwrap();
    std::fs::write(path, format!("{body},\n  \"checksum\": \"{:016x}\"\n}}\n", XxHash3_64::oneshot(body.as_bytes())))
        .unwrap();
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let intact = folder();
    save_two(intact.path());
    let lie = |words: &[&str], change: &dyn Fn(&mut Value)| {
        damaged(intact.path(), &format!("{words:?}"), words, |dir| forge(&dir.join("two/manifest.json"), change));
    };
    lie(&["shapes of its parameters"], &|m| m["parameters"][0]["shape"][0] = json!(38));
    lie(&["larger than any memory"], &|m| m["parameters"][0]["shape"] = json!([u64::MAX, 2]));
    lie(&["larger than any memory"], &|m| m["parameters"][0]["shape"] = json!([1u64 << 62]));
    lie(&["has shape [12, 37]"], &|m| {
        let shape = m["parameters"][0]["shape"].as_array().unwrap().iter().rev().cloned().collect::<Vec<_>>();
        m["parameters"][0]["shape"] = json!(shape);
    });
    lie(&["it lacks"], &|m| m["parameters"][0]["name"] = json!("another"));
    for name in ["../one/rank_00000_of_00002.safetensors", "/etc/passwd", ""] {
        lie(&["the file of rank 0 is named"], &|m| m["files"][0]["name"] = json!(name));
    }
    lie(&["header of 7 bytes"], &|m| m["files"][0]["header_bytes"] = json!(7));
    lie(&["has a header of"], &|m| m["files"][0]["header_bytes"] = json!(u64::MAX));
    lie(&["has a header of"], &|m| m["files"][0]["header_bytes"] = json!(1u64 << 63));
    lie(&["has a header of"], &|m| m["files"][0]["header_bytes"] = json!(1u64 << 20));
    lie(&["shapes of its parameters"], &|m| {
        let header = m["files"][0]["header_bytes"].as_u64().unwrap();
        m["files"][0]["header_bytes"] = json!(header + 4096);
    });
    for (key, number) in [("global_steps", u64::MAX), ("skipped_steps", 3), ("global_samples", 1 << 53)] {
        lie(&["its counters"], &|m| m[key] = json!(number));
    }
    for number in [i64::MAX, i64::MIN, -2] {
        lie(&["its counters"], &|m| m["last_batch_iteration"] = json!(number));
    }
    let scaler = |scale: f64| json!({"scale": scale, "patience_left": 1, "steps": 0, "clean": 0});
    for scale in [0.0, -1.0] {
        lie(&["its loss scale"], &|m| m["scaler"] = scaler(scale));
    }
    lie(&["files for 3 ranks"], &|m| m["world_size"] = json!(3));
    lie(&["files for 0 ranks"], &|m| m["world_size"] = json!(0));
    lie(&["states"], &|m| m["states"] = json!([]));
    lie(&["unknown field"], &|m| m["more"] = json!(1));
    lie(&["format"], &|m| m["format"] = json!("another"));
    lie(&["version is 6", "reads versions 1 to 5"], &|m| m["version"] = json!(6));
    for (expert, found) in [([2, 2], "position 2 of 2"), ([0, 0], "position 0 of 0"), ([0, 3], "position 0 of 3")] {
        lie(&["an expert", found], &|m| m["parameters"][0]["expert"] = json!(expert));
    }
    lie(&["the shapes of its parameters need"], &|m| m["parameters"][0]["expert"] = json!([0, 2]));
    lie(&["version is 0", "reads versions 1 to 5"], &|m| m["version"] = json!(0));
    lie(&["element of state fp32"], &|m| m["parameters"][0]["state_lens"] = json!({"fp32": 1}));
    lie(&["18446744073709551615 elements of state exp_avg"], &|m| {
        m["parameters"][0]["state_lens"] = json!({"exp_avg": u64::MAX});
    });
    lie(&["bytes, but the shapes"], &|m| m["parameters"][0]["state_lens"] = json!({"exp_avg": 1}));
    for ranks in [0, 3, u64::MAX] {
        lie(&["along a pipeline"], &|m| m["pipeline_ranks"] = json!(ranks));
    }
    lie(&["position 2 in a pipeline of 2"], &|m| {
        m["pipeline_ranks"] = json!(2);
        m["parameters"][0]["pipeline_rank"] = json!(2);
    });
    lie(&["its learning rates"], &|m| m["set_lr"] = json!([-1.0]));
    lie(&["header is damaged"], &|m| m["files"][1]["header_checksum"] = json!("0"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_bytes_in_place_of_a_file_are_refused_without_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>(), file in 0usize..4,
    ) {
        static INTACT: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
        let intact = INTACT.get_or_init(|| {
            let intact = folder();
            save_two(intact.path());
            intact
        });
        let copy = folder();
        copy_all(intact.path(), copy.path());
        let name = ["two/manifest.json", "two/rank_00000_of_00002.safetensors", "two/rank_00001_of_00002.safetensors", "latest"][file];
        let path = copy.path().join(name);
        let mut all = std::fs::read(&path).unwrap();
        // Bytes are overwritten, so that most of the file stays unchanged.
        let start = at.index(all.len());
        let end = all.len().min(start + bytes.len());
        let is_same = all[start..end] == bytes[..end - start];
        all.splice(start..end, bytes);
        std::fs::write(&path, &all).unwrap();
        let verified = Checkpoint::open(copy.path(), None).and_then(|c| c.map_or(Ok(()), |c| c.verify(|_| {})));
        prop_assert!(verified.is_err() || is_same || file == 3);
    }
}

// ---- full disks --------------------------------------------------------------------------------------------------

#[test]
fn a_disk_that_fills_up_during_a_save_is_an_error_and_the_checkpoint_before_it_loads() {
    let folder = folder();
    let this = a_disk_that_fills_up_during_a_save_is_an_error_and_the_checkpoint_before_it_loads;
    // The save runs in a separate process, in which the folder is a file system of 200 KiB.
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new("unshare");
    let script = "mount -t tmpfs -o size=200k none \"$1\" && shift && exec \"$@\"";
    command.args(["--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(folder.path()).arg(program);
    command.args(as_program(module_path!(), "small_disk_program"));
    let output = match command.env("TEST_FOLDER", folder.path()).output() {
        Ok(output) => output,
        Err(error) => return skipped(this, format_args!("there is no unshare ({error})")),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if text.contains("unshare failed") || text.contains("mount:") {
        return skipped(this, format_args!("no file system can be mounted here: {text}"));
    }
    assert!(output.status.success() && text.contains("small disk: as promised"), "{text}");
}

#[test]
#[ignore = "started by the test above in a separate process"]
fn small_disk_program() {
    let Some(dir) = std::env::var_os("TEST_FOLDER").map(PathBuf::from) else { return };
    for background in [false, true] {
        let ranks = with_engine(2, |engine| {
            step(engine)?;
            engine.save_checkpoint(&dir, Some("fits"), json!({"note": "fits"}))?;
            if engine.rank() == 0 {
                std::fs::write(dir.join("filler"), vec![1u8; 30_000]).unwrap();
            }
            engine.gather_f64(&[])?;
            let options = candle_zero::checkpoint::SaveOptions { in_background: background, ..Default::default() };
            let mut saved = Ok(());
            for i in 0..8 {
                saved = engine.save_checkpoint_with(&dir, Some(&format!("more{i}")), Value::Null, &options).map(drop);
                // The error of a background save is returned by the next step, after that step itself is complete.
                saved = saved.and_then(|()| step(engine));
                if saved.is_err() {
                    break;
                }
            }
            let error = saved.unwrap_err().to_string();
            if engine.rank() == 0 {
                std::fs::remove_file(dir.join("filler")).unwrap();
            }
            engine.gather_f64(&[])?;
            let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
            let is_leftover =
                |name: &std::ffi::OsString| name.to_string_lossy().starts_with('.') && name != ".candle-zero.lock";
            assert!(!names.iter().any(is_leftover), "{names:?}");
            let loaded = engine.load_checkpoint(&dir, Some("fits"), &LoadOptions::default())?.unwrap();
            assert_eq!(loaded.client_state["note"], "fits");
            let newest = engine.load_checkpoint(&dir, None, &LoadOptions::default())?;
            assert!(newest.is_some());
            step(engine)?;
            Ok(error)
        });
        let texts: Vec<String> = ranks.into_iter().map(Result::unwrap).collect();
        assert!(texts.iter().any(|text| text.contains("No space left on device")), "{texts:?}");
        for entry in std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() { std::fs::remove_dir_all(entry).unwrap() } else { std::fs::remove_file(entry).unwrap() }
        }
    }
    println!("small disk: as promised");
}

// ---- killed jobs -------------------------------------------------------------------------------------------------

#[test]
fn a_job_killed_at_any_moment_leaves_a_whole_checkpoint_at_most_one_save_old() {
    let kills: u32 = std::env::var("CHECKPOINT_KILLS").map_or(12, |n| n.parse().unwrap());
    let program = example("train_gpt");
    let dir = folder();
    let (saves, metrics) = (dir.path().join("saves"), dir.path().join("metrics.jsonl"));
    let settings = dir.path().join("config.json");
    std::fs::write(&settings, config(2, 1, json!({}), json!({})).to_string()).unwrap();
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let done = || std::fs::read_to_string(&metrics).unwrap_or_default().matches("\"loss\"").count() as u64;
    let mut before = 0;
    for kill in 0..kills {
        let mut command = zerorun();
        command.args(["--num_ranks", "2"]).arg(&program).arg("--ds_config").arg(&settings);
        command.args(["--n_layer", "1", "--n_embd", "32", "--n_head", "2", "--ctx", "16", "--steps", "100000"]);
        command.args(["--sample", "0", "--resume", "--save_every", "1", "--keep", "3", "--save"]).arg(&saves);
        command.arg("--metrics").arg(&metrics).env("RAYON_NUM_THREADS", "1");
        let mut job = start(&mut command);
        let pid = i32::try_from(job.id()).unwrap();
        wait_for("steps", || {
            if job.try_wait().unwrap().is_some() {
                let mut text = String::new();
                job.stderr.take().unwrap().read_to_string(&mut text).unwrap();
                panic!("kill {kill}: the job ended unexpectedly: {text}");
            }
            (done() > before + 2).then_some(())
        });
        let delay = Duration::from_micros(u64::from(seed.wrapping_mul(kill * 2 + 1) % 40_000));
        std::thread::sleep(delay);
        let ranks = descendants(pid);
        for pid in std::iter::once(&pid).chain(&ranks) {
            let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
        }
        job.wait().unwrap();
        wait_for("the processes to end", || ranks.iter().all(|pid| !runs(*pid)).then_some(()));
        let steps = done();
        let checkpoint = Checkpoint::open(&saves, None).unwrap().unwrap();
        checkpoint.verify(|_| {}).unwrap();
        let saved = checkpoint.manifest().global_steps;
        // The save of a step finishes in the next one.
        assert!(saved + 1 >= steps, "kill {kill}: {saved} saved of {steps} steps");
        before = saved;
    }
    println!("{kills} kills, {before} steps");
}

/// Returns the command for 60 steps of a small model, with a save after each step. All outputs go to `dir`.
fn sixty_steps(dir: &Path, restarts: u32) -> std::process::Command {
    let settings = dir.join("config.json");
    std::fs::write(&settings, config(3, 1, json!({}), json!({"bf16": {"enabled": true}})).to_string()).unwrap();
    let mut command = zerorun();
    command.args(["--num_ranks", "2", "--max_restarts", &restarts.to_string()]).arg(example("train_gpt"));
    command.arg("--ds_config").arg(settings).args(["--steps", "60", "--sample", "0", "--save_every", "1"]);
    command.args(["--keep", "2", "--resume", "--save"]).arg(dir.join("saves"));
    command.arg("--metrics").arg(dir.join("metrics.jsonl")).arg("--export").arg(dir.join("model"));
    command.env("RAYON_NUM_THREADS", "1");
    command
}

/// Returns the step, the loss and the gradient norm of every line that has a loss.
fn trajectory(dir: &Path) -> Vec<[String; 3]> {
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .filter(|v| !v["loss"].is_null())
        .map(|v| ["step", "loss", "grad_norm"].map(|key| v[key].to_string()))
        .collect()
}

#[test]
fn a_job_whose_ranks_are_killed_ends_with_the_bits_of_one_that_never_was() {
    let kills: u32 = std::env::var("RESTART_KILLS").map_or(4, |n| n.parse().unwrap());
    let (calm, killed) = (folder(), folder());
    let output = sixty_steps(calm.path(), 0).output().unwrap();
    assert!(output.status.success(), "{}", processes::stderr(&output));
    let mut job = start(&mut sixty_steps(killed.path(), kills));
    let pid = i32::try_from(job.id()).unwrap();
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let done = || std::fs::read_to_string(killed.path().join("metrics.jsonl")).unwrap_or_default().lines().count();
    for kill in 0..kills {
        // Kills are spread over the run; a killed run repeats at most two steps.
        let min_lines = (kill as usize + 1) * 50 / (kills as usize + 1);
        // The pause before a restart grows to 30 s.
        let ranks = wait_up_to(Duration::from_secs(60), "steps of two ranks", || {
            Some(descendants(pid)).filter(|ranks| ranks.len() == 2 && done() >= min_lines)
        });
        std::thread::sleep(Duration::from_micros(u64::from(seed.wrapping_mul(kill * 2 + 1) % 20_000)));
        let rank = ranks[(seed >> kill) as usize % 2];
        kill_process(Pid::from_raw(rank).unwrap(), Signal::KILL).unwrap();
        wait_for("the ranks to end", || ranks.iter().all(|pid| !runs(*pid)).then_some(()));
    }
    let status = wait_up_to(Duration::from_secs(60), "the job to end", || job.try_wait().unwrap());
    assert!(status.success());
    assert_eq!(trajectory(calm.path()).len(), 60);
    assert_eq!(trajectory(calm.path()), trajectory(killed.path()));
    let model = |dir: &Path| std::fs::read(dir.join("model")).unwrap();
    assert!(model(calm.path()) == model(killed.path()), "parameters differ");
}
