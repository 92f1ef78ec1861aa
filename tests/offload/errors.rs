//! Folders that cannot be offloaded to, folders in use, and disks that are too small or full: the error of each rank.
//!
//! Small and read-only file systems are mounted in the mount namespace of a child process, which runs this test binary
//! (`program` below). If the system does not allow mounting, the test is skipped.

use crate::support::processes::as_program;
use crate::support::skips::skipped;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::error::{Error, OffloadError, Result};
use candle_zero::offload::DiskAccess;
use serde_json::{Value, json};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use tempfile::TempDir;

const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: true };

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Returns a configuration with parameters and optimizer states in files in `folder`.
fn all_in(folder: &Path) -> Value {
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "sub_group_size": 3000,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0},
    });
    config(3, 1, zero, json!({"bf16": {"enabled": true}}))
}

fn start(comm: Arc<dyn Communicator>, config: &Value) -> Result<Engine<Tiny>> {
    Engine::builder().communicator(comm).initialize(|vb| Tiny::new(SHAPE, vb), config.clone())
}

/// Takes one optimizer step, and returns the bits of its loss and gradient norm.
fn step(engine: &mut Engine<Tiny>) -> Result<(u32, u64)> {
    let (ids, targets) = batch(engine.micro_steps() as usize * engine.world_size() + engine.rank());
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok((
        loss.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?.to_bits(),
        engine.global_grad_norm().unwrap().to_bits(),
    ))
}

/// Returns the error that a job of one rank reports for `folder`.
fn refusal(folder: &Path) -> String {
    let results = threads::run(1, |comm| start(comm, &all_in(folder)).map(drop));
    results.unwrap().remove(0).unwrap_err().to_string()
}

// ---- folders ---------------------------------------------------------------------------------------------------

#[test]
fn what_is_no_folder_to_write_to_is_refused_before_anything_is_built() {
    let folder = folder();
    let name = |text: String| text.replace(folder.path().to_str().unwrap(), "FOLDER");
    insta::assert_snapshot!(name(refusal(&folder.path().join("no/such"))), @"cannot offload to FOLDER/no/such: neither this folder nor its parent exists; create it (mkdir -p FOLDER/no/such), or correct nvme_path");
    let file = folder.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    insta::assert_snapshot!(name(refusal(&file)), @"cannot offload to FOLDER/file: it is a file; nvme_path must name a folder");
    insta::assert_snapshot!(name(refusal(&file.join("below"))), @"cannot offload to FOLDER/file/below: Not a directory (os error 20); correct nvme_path");
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    // This is a file system in which no one can create files, whatever the permission bits are.
    let text = refusal(Path::new("/sys")).replace("it is read-only for this user", "permission denied");
    insta::assert_snapshot!(text, @"cannot offload to /sys: no file can be created in it: permission denied; use a writable folder");
}

#[test]
fn a_folder_belongs_to_one_job_at_a_time() {
    let folder = folder();
    // This lock, which no engine of this process holds, represents another job.
    let other = std::fs::File::create(folder.path().join(".candle-zero.lock")).unwrap();
    other.try_lock().unwrap();
    let text = refusal(folder.path()).replace(folder.path().to_str().unwrap(), "FOLDER");
    let text = text.replace(&format!("process {}", std::process::id()), "process PID");
    insta::assert_snapshot!(text, @"cannot offload to FOLDER: a running job is already using it (process PID); give each job its own folder as nvme_path, or stop the other one");
    // The folder is also recognized under another name.
    let link = folder.path().with_extension("link");
    std::os::unix::fs::symlink(folder.path(), &link).unwrap();
    let text = refusal(&link);
    std::fs::remove_file(&link).unwrap();
    assert!(text.contains("a running job is already using it"), "{text}");
    drop(other);
    threads::run(1, |comm| start(comm, &all_in(folder.path())).map(drop)).unwrap().remove(0).unwrap();
}

#[test]
fn all_ranks_and_engines_of_a_process_share_a_folder() {
    let folder = folder();
    let results = threads::run(2, |comm| {
        let mut first = start(comm.clone(), &all_in(folder.path()))?;
        step(&mut first)?;
        let mut second = start(comm.clone(), &all_in(folder.path()))?;
        step(&mut second)?;
        step(&mut first)?;
        drop(first);
        step(&mut second)?;
        if comm.rank() == 0 {
            // The lock is still held.
            assert!(std::fs::File::open(folder.path().join(".candle-zero.lock")).unwrap().try_lock().is_err());
        }
        comm.barrier().wait()
    });
    assert!(results.unwrap().iter().all(Result::is_ok));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_a_dead_job_left_is_removed_and_nothing_else() {
    let folder = folder();
    let names = [".candle-zero-offload-x7Yz", ".candle-zero", "model.safetensors"];
    names.iter().for_each(|name| std::fs::write(folder.path().join(name), "old").unwrap());
    threads::run(2, |comm| start(comm, &all_in(folder.path())).map(drop)).unwrap().remove(0).unwrap();
    let left = names.map(|name| folder.path().join(name).exists());
    assert_eq!(left, [false, true, true]);
}

#[test]
fn a_rank_whose_folder_is_refused_stops_the_others_with_its_words() {
    let folder = folder();
    let results = threads::run(2, |comm| {
        let path = [folder.path().to_owned(), folder.path().join("no/such")][comm.rank()].clone();
        start(comm, &all_in(&path)).map(drop)
    });
    let texts: Vec<String> = results.unwrap().into_iter().map(|r| r.unwrap_err().to_string()).collect();
    let text = texts[0].replace(folder.path().to_str().unwrap(), "FOLDER");
    let text = &text[..text.find(" while rank").unwrap_or(text.len())];
    insta::assert_snapshot!(text, @"rank 1 stopped (cannot offload to FOLDER/no/such: neither this folder nor its parent exists; create it (mkdir -p FOLDER/no/such), or correct nvme_path)");
}

// ---- file systems ----------------------------------------------------------------------------------------------

/// Runs `program` as `case` for the folder `at`, after the shell has run `setup` ($1 is the folder) in its own
/// mount namespace. Returns the reason if the system does not allow what `setup` needs.
fn run(case: &str, setup: &str, at: &Path, other: &Path) -> std::result::Result<Output, String> {
    let is_root = rustix::process::geteuid().is_root();
    let mut command = Command::new("unshare");
    command.arg(if is_root { "-m" } else { "-Urm" });
    let script = format!("( {setup} ) || exit 77; shift; exec \"$@\"");
    command.args(["sh", "-c", &script, "sh"]).arg(at).arg(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "program"));
    command.env("TEST_CASE", case).env("TEST_FOLDER", at).env("TEST_OTHER", other);
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return Err(format!("there is no unshare ({error})")),
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) || stderr.starts_with("unshare:") {
        return Err(format!("no file system can be mounted here: {stderr}"));
    }
    assert!(output.status.success(), "{case}: {}\n{stderr}", String::from_utf8_lossy(&output.stdout));
    Ok(output)
}

/// Returns the findings of `program`.
fn found(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("found ")).unwrap_or_else(|| panic!("{text}"));
    serde_json::from_str(line).unwrap()
}

#[test]
#[ignore = "the tests of this file start it in a separate process"]
fn program() {
    let Ok(case) = std::env::var("TEST_CASE") else { return };
    let folder = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let (at, other) = (folder("TEST_FOLDER"), folder("TEST_OTHER"));
    let found = match case.as_str() {
        "train" => json!(train_on_2_ranks(&at)),
        "refusal" => json!(refusal(&at)),
        "too small" => too_small(&at, &other),
        "full" => full(&at),
        _ => panic!("{case}"),
    };
    println!("\nfound {found}");
}

fn train_on_2_ranks(at: &Path) -> Vec<(u32, u64)> {
    let results = threads::run(2, |comm| {
        let mut engine = start(comm, &all_in(at))?;
        (0..3).map(|_| step(&mut engine)).collect::<Result<Vec<_>>>()
    });
    results.unwrap().into_iter().flat_map(|r| r.unwrap()).collect()
}

fn too_small(at: &Path, other: &Path) -> Value {
    let alone = threads::run(1, |comm| start(comm, &all_in(at)).map(drop)).unwrap().remove(0).unwrap_err();
    let Error::Offload(OffloadError::Space { needed, available, .. }) = &alone else { panic!("{alone}") };
    // Only rank 1's files do not fit.
    let both = threads::run(2, |comm| {
        let path = [other, at][comm.rank()];
        start(comm, &all_in(path)).map(drop)
    });
    let both: Vec<String> = both.unwrap().into_iter().map(|r| r.unwrap_err().to_string()).collect();
    // All ranks share the small disk.
    let shared = threads::run(2, |comm| start(comm, &all_in(at)).map(drop)).unwrap();
    let shared: Vec<String> = shared.into_iter().map(|r| r.unwrap_err().to_string()).collect();
    // The optimizer's states, which need more space, are on a different disk.
    let mut config = all_in(at);
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = json!(other);
    config["zero_optimization"]["offload_param"]["nvme_path"] = json!(at.join("narrow"));
    let apart = threads::run(1, |comm| start(comm, &config).map(drop)).unwrap().remove(0).unwrap_err();
    json!({
        "needed": needed, "available": available, "text": alone.to_string(), "both": both, "shared": shared,
        "apart": apart.to_string(),
    })
}

/// Trains after filling the file system of `at`, in which space is already reserved for the engine's files. Returns the
/// steps, or the error, for each kind of access, with and without inputs kept in files.
fn full(at: &Path) -> Value {
    let mut runs = vec![];
    for access in [DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped] {
        for keeps in [false, true] {
            let mut config = all_in(&at.join("files"));
            config["activation_checkpointing"] = json!({"cpu_checkpointing": keeps});
            let results = threads::run(1, |comm| {
                let builder = Engine::builder().communicator(comm).disk_access(access);
                let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
                fill(&at.join("filler"));
                let steps = (0..3).map(|_| step(&mut engine)).collect::<Result<Vec<_>>>();
                // There is no space for another job.
                let another = threads::run(1, |comm| start(comm, &all_in(&at.join("others"))).map(drop));
                let error = another.unwrap().remove(0).unwrap_err();
                assert!(matches!(error, Error::Offload(OffloadError::Space { .. })), "{error}");
                steps
            });
            std::fs::remove_file(at.join("filler")).unwrap();
            match results.unwrap().remove(0) {
                Ok(steps) => runs.push(json!(steps)),
                Err(error) => runs.push(json!(error.to_string())),
            }
        }
    }
    json!(runs)
}

/// Writes a file until no further byte fits.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for size in [1 << 20, 4096, 1] {
        loop {
            match file.write(&vec![1u8; size]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    file.sync_all().unwrap();
}

#[test]
fn a_folder_on_a_read_only_file_system_is_refused() {
    let folder = folder();
    let setup = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\"";
    let output = match run("refusal", setup, folder.path(), folder.path()) {
        Ok(output) => output,
        Err(why) => return skipped(a_folder_on_a_read_only_file_system_is_refused, why),
    };
    let text = found(&output).as_str().unwrap().replace(folder.path().to_str().unwrap(), "FOLDER");
    insta::assert_snapshot!(text, @"cannot offload to FOLDER: no file can be created in it: it is read-only for this user; use a writable folder");
}

#[test]
fn a_folder_in_memory_is_warned_about_once_and_works() {
    let (folder, disk) = (folder(), folder());
    let output = match run("train", "mount -t tmpfs none \"$1\"", folder.path(), folder.path()) {
        Ok(output) => output,
        Err(why) => return skipped(a_folder_in_memory_is_warned_about_once_and_works, why),
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("tmpfs")).collect();
    let text = warnings.join("\n").replace(folder.path().to_str().unwrap(), "FOLDER");
    insta::assert_snapshot!(text, @"[candle-zero] warning: FOLDER is on tmpfs: data offloaded to it stays in memory; set nvme_path to a folder on a disk");
    assert_eq!(found(&output), json!(train_on_2_ranks(disk.path())));
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_the_first_step_with_the_bytes_that_are_missing() {
    const SIZE: u64 = 256 << 10;
    let (folder, disk) = (folder(), folder());
    let setup = format!(
        "mount -t tmpfs -o size={SIZE} none \"$1\" && mkdir \"$1/narrow\" && \
         mount -t tmpfs -o size=16k none \"$1/narrow\""
    );
    let this = a_disk_that_is_too_small_is_refused_before_the_first_step_with_the_bytes_that_are_missing;
    let output = match run("too small", &setup, folder.path(), disk.path()) {
        Ok(output) => output,
        Err(why) => return skipped(this, why),
    };
    let found = found(&output);
    let number = |key: &str| found[key].as_u64().unwrap();
    // If there is space, exactly these bytes are reserved.
    let reserved = |world| {
        let ranks = threads::run(world, |comm| {
            let report = start(comm, &all_in(disk.path()))?.memory_report();
            Ok(report.rows.iter().map(|row| row.file.held as u64).sum::<u64>())
        });
        ranks.unwrap().into_iter().map(|rank: Result<u64>| rank.unwrap()).sum::<u64>()
    };
    assert_eq!(number("needed"), reserved(1));
    assert!((SIZE - 16384..=SIZE).contains(&number("available")), "{found}");
    let name = |text: &Value| text.as_str().unwrap().replace(folder.path().to_str().unwrap(), "FOLDER");
    let missing = number("needed") - number("available");
    let expected = format!(
        "cannot offload to FOLDER: files there need {} bytes, but {} are available: {missing} more bytes are needed; \
         free that much space, or set nvme_path to a folder on a larger disk",
        number("needed"),
        number("available")
    );
    assert_eq!(name(&found["text"]), expected);
    let [first, second] = [&found["both"][0], &found["both"][1]].map(name);
    assert!(second.starts_with("cannot offload to FOLDER: files there need "), "{second}");
    assert!(first.starts_with(&format!("rank 1 stopped ({second})")), "{first}");
    let begin = format!("cannot offload to FOLDER: files there need {} bytes, but ", reserved(2));
    for text in found["shared"].as_array().unwrap() {
        assert!(name(text).starts_with(&begin), "{text}, not {begin}");
        assert!(name(text).contains(&format!(" but {} are available: ", number("available"))), "{text}");
    }
    assert!(name(&found["apart"]).starts_with("cannot offload to FOLDER/narrow: "), "{}", found["apart"]);
}

#[test]
fn a_disk_that_fills_up_during_training_does_not_matter() {
    let folder = folder();
    if !rustix::process::geteuid().is_root() {
        return skipped(a_disk_that_fills_up_during_training_does_not_matter, "only root can mount a disk image");
    }
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let at = folder.path().join("disk");
    std::fs::create_dir(&at).unwrap();
    let setup = format!(
        "mkfs.ext4 -q -m 0 '{0}' && mount -o loop '{0}' \"$1\" && mkdir \"$1/files\" \"$1/others\"",
        image.display()
    );
    let output = match run("full", &setup, &at, &at) {
        Ok(output) => output,
        Err(why) => return skipped(a_disk_that_fills_up_during_training_does_not_matter, why),
    };
    let found = found(&output);
    let memory = threads::run(1, |comm| {
        let mut config = all_in(&at);
        for key in ["offload_optimizer", "offload_param"] {
            config["zero_optimization"][key] = json!({"device": "none"});
        }
        let mut engine = start(comm, &config)?;
        (0..3).map(|_| step(&mut engine)).collect::<Result<Vec<_>>>()
    });
    let memory = json!(memory.unwrap().remove(0).unwrap());
    for (i, run) in found.as_array().unwrap().iter().enumerate() {
        if i % 2 == 0 {
            assert_eq!(*run, memory, "{found}");
        } else {
            // Space for the kept inputs of recomputing units is reserved when they are kept for the first time.
            let text = run.as_str().unwrap_or_else(|| panic!("{found}"));
            assert!(text.contains("more bytes are needed; free that much space"), "{text}");
        }
    }
}

#[test]
fn a_lock_on_the_folder_itself_is_nobodys_business() {
    let folder = folder();
    // This lock is like that of `flock DIR sleep 60`.
    let held = std::fs::File::open(folder.path()).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    threads::run(2, |comm| start(comm, &all_in(folder.path())).and_then(|mut engine| step(&mut engine)))
        .unwrap()
        .into_iter()
        .for_each(|rank| _ = rank.unwrap());
}
