//! The folder of checkpoints: which of them are kept, which is the latest, and which entries are not checkpoints.

use crate::support::processes::as_program;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, LoadOptions, SaveOptions};
use candle_zero::comm::threads;
use candle_zero::error::{CheckpointError, Error, Result};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 1 };

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Runs `act` with the engine of a single rank.
fn on_one_rank<T: Send>(act: impl Fn(&mut Engine<Tiny>) -> Result<T> + Sync) -> T {
    let settings = config(1, 1, json!({}), json!({}));
    let ranks = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        act(&mut builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?)
    });
    ranks.unwrap().remove(0).unwrap()
}

fn train(engine: &mut Engine<Tiny>, steps: usize) -> Result<()> {
    for _ in 0..steps {
        let (ids, targets) = batch(engine.global_steps() as usize);
        let loss = engine.forward(|model| model.loss(&ids, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
    }
    Ok(())
}

fn keep(count: usize) -> SaveOptions {
    SaveOptions { keep: Some(count), ..SaveOptions::default() }
}

// ---- retention ---------------------------------------------------------------------------------------------------

#[test]
fn a_checkpoint_that_the_user_named_is_never_removed() {
    let dir = folder();
    on_one_rank(|engine| {
        train(engine, 1)?;
        engine.save_checkpoint(dir.path(), Some("best"), Value::Null)?;
        // The name has the automatic form, but the user chose it.
        engine.save_checkpoint(dir.path(), Some("global_step1"), Value::Null)?;
        for _ in 0..3 {
            train(engine, 1)?;
            engine.save_checkpoint_with(dir.path(), None, Value::Null, &keep(2))?;
        }
        Ok(())
    });
    assert_eq!(names(dir.path()), ["best", "global_step1", "global_step3", "global_step4", "latest"]);
}

#[test]
fn after_a_roll_back_the_new_line_of_steps_is_kept_and_not_the_abandoned_one() {
    let dir = folder();
    let save = |engine: &mut Engine<Tiny>| engine.save_checkpoint_with(dir.path(), None, Value::Null, &keep(3));
    on_one_rank(|engine| {
        for _ in 0..4 {
            train(engine, 2)?;
            save(engine)?;
        }
        Ok(())
    });
    assert_eq!(names(dir.path()), ["global_step4", "global_step6", "global_step8", "latest"]);
    on_one_rank(|engine| {
        engine.load_checkpoint(dir.path(), Some("global_step4"), &LoadOptions::default())?.unwrap();
        train(engine, 1)?;
        save(engine)?;
        // Step 8 is the newest step of the abandoned continuation.
        assert_eq!(visible(dir.path()), ["global_step4", "global_step5", "global_step8", "latest"]);
        train(engine, 1)?;
        save(engine)?;
        assert_eq!(visible(dir.path()), ["global_step4", "global_step5", "global_step6", "latest"]);
        train(engine, 1)?;
        save(engine).map(drop)
    });
    assert_eq!(names(dir.path()), ["global_step5", "global_step6", "global_step7", "latest"]);
}

#[test]
fn a_line_of_steps_goes_through_names_of_the_user_and_saves_in_the_background() {
    let dir = folder();
    let background = SaveOptions { in_background: true, ..keep(2) };
    // Another run leaves a checkpoint behind.
    on_one_rank(|engine| {
        train(engine, 9)?;
        engine.save_checkpoint(dir.path(), None, Value::Null)
    });
    on_one_rank(|engine| {
        for step in 1..=3 {
            train(engine, 1)?;
            engine.save_checkpoint_with(dir.path(), None, Value::Null, &background)?;
            if step == 2 {
                engine.save_checkpoint(dir.path(), Some("middle"), Value::Null)?;
            }
        }
        Ok(())
    });
    assert_eq!(names(dir.path()), ["global_step2", "global_step3", "latest", "middle"]);
}

/// Returns the names that do not begin with a dot.
fn visible(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|name| !name.starts_with('.')).collect()
}

// ---- latest ------------------------------------------------------------------------------------------------------

fn load_error(dir: &Path) -> String {
    let load = |engine: &mut Engine<Tiny>| {
        Ok(engine.load_checkpoint(dir, None, &LoadOptions::default()).map(|loaded| loaded.map(|l| l.path)))
    };
    match on_one_rank(load) {
        Ok(loaded) => panic!("{loaded:?} is loaded"),
        Err(error) => error.to_string().replace(dir.to_str().unwrap(), "DIR"),
    }
}

#[test]
fn checkpoints_without_latest_are_an_error_that_lists_them_and_an_empty_folder_is_none() {
    let dir = folder();
    let loaded = on_one_rank(|engine| engine.load_checkpoint(dir.path(), None, &LoadOptions::default()));
    assert!(loaded.is_none());
    on_one_rank(|engine| {
        for _ in 0..2 {
            train(engine, 1)?;
            engine.save_checkpoint(dir.path(), None, Value::Null)?;
        }
        Ok(())
    });
    let latest = dir.path().join("latest");
    std::fs::remove_file(&latest).unwrap();
    insta::assert_snapshot!(load_error(dir.path()), @"the checkpoint DIR cannot be used: it has no file `latest`, which names the checkpoint to load; give the tag, or write it to that file; available: global_step1, global_step2");
    std::os::unix::fs::symlink("gone", &latest).unwrap();
    insta::assert_snapshot!(load_error(dir.path()), @"the checkpoint DIR/latest cannot be used: it is a broken link; give the tag to load, or replace this file with one that names it; available: global_step1, global_step2");
    for steps in [1, 2] {
        std::fs::remove_dir_all(dir.path().join(format!("global_step{steps}"))).unwrap();
    }
    insta::assert_snapshot!(load_error(dir.path()), @"the checkpoint DIR/latest cannot be used: it is a broken link; give the tag to load, or replace this file with one that names it");
}

// ---- entries that are not files -----------------------------------------------------------------------------------

fn pipe(path: &Path) {
    _ = std::fs::remove_file(path);
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Returns the result of `act`, which must end in time; a thread that waits forever is left behind.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(act()));
    result.recv_timeout(Duration::from_secs(20)).expect("the call waits, or reads without end")
}

#[test]
fn pipes_sockets_and_devices_in_place_of_its_files_are_errors_in_words() {
    let saved = folder();
    on_one_rank(|engine| {
        train(engine, 1)?;
        engine.save_checkpoint(saved.path(), Some("one"), Value::Null)
    });
    for name in ["latest", "one/manifest.json", "one/rank_00000_of_00001.safetensors"] {
        let path = saved.path().join(name);
        let bytes = std::fs::read(&path).unwrap();
        let text = || {
            let dir = saved.path().to_owned();
            in_time(move || Checkpoint::open(&dir, None).map(|_| ()).unwrap_err().to_string())
        };
        pipe(&path);
        let found = text();
        assert!(found.contains("it is a pipe, but a file is needed"), "{name}: {found}");
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path);
        if listener.is_ok() {
            let found = text();
            assert!(found.contains("it is a socket, but a file is needed"), "{name}: {found}");
            std::fs::remove_file(&path).unwrap();
        }
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let found = text();
        assert!(found.contains("it is a device, but a file is needed"), "{name}: {found}");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    Checkpoint::open(saved.path(), None).unwrap().unwrap().verify(|_| {}).unwrap();
}

// ---- two jobs ----------------------------------------------------------------------------------------------------

/// Acts as another job: saves into the folder that the environment names, and runs until its input ends.
#[test]
#[ignore = "a program for other tests"]
fn saver() {
    let dir = std::env::var("DIR_OF_TEST").unwrap();
    on_one_rank(|engine| {
        train(engine, 5)?;
        engine.save_checkpoint(&dir, None, Value::Null)?;
        println!("saved");
        std::io::stdin().lines().for_each(drop);
        Ok(())
    });
}

/// The process that runs `saver`, and its output.
struct Saver(Child, Lines<BufReader<ChildStdout>>);

impl Saver {
    fn end(mut self) {
        drop(self.0.stdin.take());
        self.1.for_each(drop);
        assert!(self.0.wait().unwrap().success());
    }
}

fn start_saver(dir: &Path) -> Saver {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(as_program(module_path!(), "saver")).env("DIR_OF_TEST", dir);
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(std::io::Result::ok).any(|line| line.contains("saved")));
    Saver(child, lines)
}

#[test]
fn the_second_job_that_saves_into_a_folder_is_told_and_one_that_only_loads_is_not_disturbed() {
    let dir = folder();
    let other = start_saver(dir.path());
    on_one_rank(|engine| {
        engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
        let error = engine.save_checkpoint(dir.path(), Some("mine"), Value::Null).unwrap_err().to_string();
        let error = error.replace(dir.path().to_str().unwrap(), "DIR");
        let error = error.replace(&format!("process {}", other.0.id()), "process PID");
        insta::assert_snapshot!(error, @"cannot save checkpoints to DIR: a running job is already saving there (process PID); give each job its own folder, or stop the other one");
        Ok(())
    });
    other.end();
    assert_eq!(names(dir.path()), ["global_step5", "latest"]);
    // The folder is free again, even after a job was killed.
    let mut killed = start_saver(dir.path());
    killed.0.kill().unwrap();
    killed.0.wait().unwrap();
    assert_eq!(names(dir.path()), [".candle-zero.lock", "global_step5", "latest"]);
    on_one_rank(|engine| engine.save_checkpoint(dir.path(), Some("mine"), Value::Null));
    assert_eq!(names(dir.path()), ["global_step5", "latest", "mine"]);
}

// ---- before the first step ---------------------------------------------------------------------------------------

#[test]
fn a_folder_that_cannot_be_saved_into_is_found_without_a_save() {
    let dir = folder();
    std::fs::write(dir.path().join("file"), "mine").unwrap();
    on_one_rank(|engine| {
        let mut error = |path: &Path| {
            let text = engine.check_save_dir(path).unwrap_err().to_string();
            text.replace(dir.path().to_str().unwrap(), "DIR")
        };
        insta::assert_snapshot!(error(&dir.path().join("file")), @"the checkpoint DIR/file cannot be used: it is a file, but checkpoints are saved to a folder; give another path");
        insta::assert_snapshot!(error(&dir.path().join("file/below")), @"the checkpoint DIR/file/below cannot be used: it cannot be written (File exists (os error 17)); correct this, or save elsewhere; earlier checkpoints are not affected");
        insta::assert_snapshot!(error(Path::new("/proc/x")), @"the checkpoint /proc/x cannot be used: it cannot be written (No such file or directory (os error 2)); correct this, or save elsewhere; earlier checkpoints are not affected");
        // A refused call has no consequences.
        train(engine, 1)?;
        engine.check_save_dir(dir.path().join("new/ck"))?;
        engine.save_checkpoint(dir.path().join("new/ck"), Some("one"), Value::Null)
    });
    assert_eq!(names(&dir.path().join("new/ck")), ["latest", "one"]);
    let other = start_saver(dir.path());
    on_one_rank(|engine| {
        let error = engine.check_save_dir(dir.path()).unwrap_err();
        assert!(
            matches!(error, Error::Checkpoint(CheckpointError::Busy { owner: Some(pid), .. }) if pid == other.0.id())
        );
        Ok(())
    });
    other.end();
}
