//! Outputs of every command: they never overwrite other files, and no result is lost.

use crate::fixtures::{copy, path};
use crate::support::processes::{stderr, zerorun};
use candle_zero::comm::threads;
use candle_zero::error::{Error, OutputError};
use candle_zero_finetune::{FineTune, Options, PreparedRun, Source, TrainingLength, TuningMethod, ValidationData};
use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with data and a configuration.
struct World(TempDir);

impl World {
    fn new() -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        let chat = |i: usize| {
            let (user, assistant) = (format!("{i} and {i}?"), format!("{}", 2 * i));
            candle_zero::serde_json::json!({"messages": [
                {"role": "user", "content": user}, {"role": "assistant", "content": assistant},
            ]})
        };
        let lines: String = (0..12).map(|i| format!("{}\n", chat(i))).collect();
        world.write("data/d.jsonl", &lines);
        world.write("ds.json", "{\"zero_optimization\": {\"stage\": 2}}");
        world
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
        std::fs::write(self.at(name), text).unwrap();
    }

    /// Returns all files in the folder with their bytes, and links with their targets.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn visit(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let (path, kind) = (entry.path(), entry.file_type().unwrap());
                if kind.is_dir() {
                    visit(&path, found);
                } else if kind.is_symlink() {
                    found.insert(path.clone(), path.read_link().unwrap().into_os_string().into_encoded_bytes());
                } else if kind.is_file() {
                    found.insert(path.clone(), std::fs::read(path).unwrap());
                }
            }
        }
        let mut found = BTreeMap::new();
        visit(self.0.path(), &mut found);
        found.retain(|path, _| !path.starts_with(self.at("cache")));
        found
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = zerorun();
        command.args(words).current_dir(self.0.path()).env("HOME", self.at("home")).env_remove("XDG_CACHE_HOME");
        command
    }

    /// Returns the command for a short run with these additional arguments.
    fn finetune(&self, model: &str, words: &[&str]) -> Command {
        let usual = ["finetune", model, "--data", "data/d.jsonl", "--ctx", "48", "--batch", "2", "--cache", "cache"];
        self.command(&[&usual, words].concat())
    }

    fn text(&self, output: &Output) -> String {
        let text = stderr(output).replace(&format!("{}/", self.0.path().canonicalize().unwrap().display()), "");
        text.replace(&format!("{}/", self.0.path().display()), "").trim().to_owned()
    }

    /// Returns the message of a command that is refused at its start, before it has changed anything.
    fn refusal(&self, mut command: Command) -> String {
        let before = self.files();
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let after = self.files();
        assert!(before == after, "{:?}", before.keys().collect::<Vec<_>>());
        self.text(&output).replace(path("models").to_str().unwrap(), "MODELS")
    }

    fn options(&self, out: &str) -> Options {
        Options {
            data: vec![Source::parse(self.at("data/d.jsonl").to_str().unwrap()).unwrap()],
            method: TuningMethod::Lora("r=2".parse().unwrap()),
            length: TrainingLength::Steps(4),
            batch: Some(2),
            ctx: Some(48),
            cache: Some(self.at("cache")),
            ..Options::new(path("models/llama"), self.at(out))
        }
    }
}

fn llama() -> String {
    path("models/llama").to_str().unwrap().to_owned()
}

const RESUMED: [&str; 7] = ["--steps", "2", "--save", "ck", "--resume", "--lora", "r=2"];

#[test]
fn a_folder_with_the_name_of_a_result_that_this_run_has_not_written_stays_as_it_is() {
    let world = World::new();
    let model = copy("llama");
    std::fs::rename(model.path(), world.at("me")).unwrap();
    world.write("me/NOTES.md", "notes");
    world.write("proj/config.json", "{}");
    world.write("proj/adapter_config.json", "{}");
    world.write("proj/src/main.rs", "code");
    let run = |words: &[&str]| world.refusal(world.finetune("me", &[&RESUMED, words].concat()));
    insta::assert_snapshot!(run(&["--out", "me"]), @"zerorun: --out me is MODEL me, which is an input; give another path");
    insta::assert_snapshot!(run(&["--out", "."]), @"zerorun: --out . contains MODEL me, which is an input; give another path");
    insta::assert_snapshot!(run(&["--out", "proj"]), @"zerorun: cannot write to proj: it has files that were not written by this run; give another path");
    insta::assert_snapshot!(run(&["--out", "proj/src/../../data"]), @"zerorun: --out proj/src/../../data contains --data data/d.jsonl, which is an input; give another path");
    // The project is also refused after a run with the same checkpoints has written elsewhere.
    assert!(world.finetune("me", &[&RESUMED[..], &["--out", "o"]].concat()).status().unwrap().success());
    insta::assert_snapshot!(run(&["--out", "proj"]), @"zerorun: cannot write to proj: its adapter_config.json is not the one that this run wrote; give another path");
    // The same applies to the folder of the best model.
    std::fs::rename(world.at("proj"), world.at("n-best")).unwrap();
    insta::assert_snapshot!(run(&["--out", "n", "--val", "20%"]), @"zerorun: cannot write to n-best: it has files that were not written by this run; give another path");
}

#[test]
fn a_run_that_is_resumed_exchanges_the_files_that_it_has_written_and_no_others() {
    let world = World::new();
    let run = |words: &[&str]| world.finetune(&llama(), &[&RESUMED, words].concat());
    assert!(run(&["--out", "o"]).status().unwrap().success());
    let adapter = std::fs::read(world.at("o/adapter_model.safetensors")).unwrap();
    world.write("o/NOTES.md", "notes");
    symlink("../data", world.at("o/link")).unwrap();
    let before = world.files();
    let again = run(&["--out", "o"]).output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    assert!(world.files() == before);
    assert_eq!(std::fs::read(world.at("o/adapter_model.safetensors")).unwrap(), adapter);
    // The result is not replaced without --resume, nor by a run that finds no checkpoint.
    let fresh = world.finetune(&llama(), &["--steps", "2", "--out", "o"]);
    insta::assert_snapshot!(world.refusal(fresh), @"zerorun: cannot write to o: the output must be a new or empty folder, but this folder is not empty; give another path");
    std::fs::create_dir(world.at("none")).unwrap();
    let other = world.finetune(&llama(), &["--steps", "2", "--out", "o", "--save", "none", "--resume", "--seed", "7"]);
    insta::assert_snapshot!(world.refusal(other), @"zerorun: cannot write to o: it has files that were not written by this run; give another path");
    // Files that the user has changed belong to the user.
    world.write("o/adapter_config.json", "{\"mine\": true}");
    insta::assert_snapshot!(world.refusal(run(&["--out", "o"])), @"zerorun: cannot write to o: its adapter_config.json is not the one that this run wrote; give another path");
}

#[test]
fn metrics_are_written_over_earlier_metrics_and_over_nothing_else() {
    let world = World::new();
    let model = copy("llama");
    std::fs::rename(model.path(), world.at("m")).unwrap();
    std::fs::hard_link(world.at("data/d.jsonl"), world.at("hard.jsonl")).unwrap();
    symlink("m/model.safetensors", world.at("weights")).unwrap();
    world.write("notes.jsonl", "{\"step\": \"one\"}\n");
    let run = |metrics: &str| {
        let words = ["--steps", "1", "--lora", "r=2", "--out", "o", "--ds_config", "ds.json", "--metrics", metrics];
        world.finetune("m", &words)
    };
    insta::assert_snapshot!(world.refusal(run("data/d.jsonl")), @"zerorun: --metrics data/d.jsonl is --data data/d.jsonl, which is an input; give another path");
    insta::assert_snapshot!(world.refusal(run("hard.jsonl")), @"zerorun: --metrics hard.jsonl is --data data/d.jsonl, which is an input; give another path");
    insta::assert_snapshot!(world.refusal(run("weights")), @"zerorun: --metrics weights is a file of MODEL m, which is an input; give another path");
    insta::assert_snapshot!(world.refusal(run("m/../ds.json")), @"zerorun: --metrics m/../ds.json is --ds_config ds.json, which is an input; give another path");
    insta::assert_snapshot!(world.refusal(run("o/m.jsonl")), @"zerorun: cannot write to o/m.jsonl: there is no folder o; give another path");
    let before = world.files();
    let output = run("notes.jsonl").output().unwrap();
    assert!(!output.status.success() && world.files() == before, "{}", stderr(&output));
    assert!(
        stderr(&output).contains("it contains something other than metrics, so it is not changed"),
        "{}",
        stderr(&output)
    );
    for _ in 0..2 {
        let output = run("m.jsonl").output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(std::fs::read_to_string(world.at("m.jsonl")).unwrap().lines().count(), 2);
        std::fs::remove_dir_all(world.at("o")).unwrap();
    }
}

#[test]
fn what_cannot_be_written_is_found_before_the_first_step() {
    let world = World::new();
    symlink("nowhere", world.at("dangling")).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, world.at("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let run =
        |words: &[&str]| world.refusal(world.finetune(&llama(), &[&["--steps", "2", "--lora", "r=2"], words].concat()));
    insta::assert_snapshot!(run(&["--out", "dangling"]), @"zerorun: cannot write to dangling: it is a broken link, or leads through one; give another path");
    insta::assert_snapshot!(run(&["--out", "data/d.jsonl/o"]), @"zerorun: cannot write to data/d.jsonl/o: Not a directory (os error 20); give another path");
    insta::assert_snapshot!(run(&["--out", "pipe"]), @"zerorun: cannot write to pipe: the output must be a new or empty folder, but this is a file; give another path");
    insta::assert_snapshot!(run(&["--out", "o", "--metrics", "pipe"]), @"zerorun: cannot write to pipe: it is a pipe, but a file is needed; give another path");
    insta::assert_snapshot!(run(&["--out", "o", "--save", "o/ck"]), @"zerorun: --save o/ck is in --out o, but both are outputs; give each its own path");
    insta::assert_snapshot!(run(&["--out", "o", "--save", "./o"]), @"zerorun: --out o is --save ./o, but both are outputs; give each its own path");
    assert!(run(&["--out", "/proc/o"]).starts_with("zerorun: cannot "), "/proc");
    world.write("nvme.json", "{\"zero_optimization\": {\"stage\": 2, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"o/n\"}}}");
    insta::assert_snapshot!(run(&["--out", "o", "--ds_config", "nvme.json"]), @"zerorun: nvme_path o/n is in --out o, but both are outputs; give each its own path");
}

#[test]
fn a_second_job_with_the_same_output_is_refused_at_its_start() {
    let world = World::new();
    for (shared, first, second) in [
        ("--out", ["--out", "o", "--metrics", "m1"], ["--out", "./o", "--metrics", "m2"]),
        ("--metrics", ["--out", "o1", "--metrics", "m"], ["--out", "o2", "--metrics", "m"]),
    ] {
        let endless = ["--steps", "1000000", "--lora", "r=2"];
        let mut running = world.finetune(&llama(), &[&endless[..], &first].concat());
        let mut running = running.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while !world.at(first[3]).exists() {
            assert!(begun.elapsed() < Duration::from_secs(60) && running.try_wait().unwrap().is_none(), "no metrics");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = world.finetune(&llama(), &[&endless[..], &second].concat()).output().unwrap();
        let text = world.text(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let (place, number) = (if shared == "--out" { "./o" } else { "m" }, running.id());
        let known = format!(
            "zerorun: cannot write to {place}: another running job is writing there (process {number}); wait for it, or \
             give another path"
        );
        let unknown = known.replace(&format!(" (process {number})"), "");
        assert!(text == known || text == unknown, "{text}");
        running.kill().unwrap();
        running.wait().unwrap();
        for name in [first[3], second[3]] {
            _ = std::fs::remove_file(world.at(name));
        }
    }
    // Leftovers of the killed jobs do not block other runs, and are removed.
    for out in ["o", "o1"] {
        assert!(
            world.finetune(&llama(), &["--steps", "1", "--out", out, "--metrics", "m"]).status().unwrap().success()
        );
    }
    let names = std::fs::read_dir(world.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".")));
}

#[test]
fn what_a_killed_job_left_beside_an_output_goes_and_what_is_named_alike_stays() {
    let world = World::new();
    let mark = "candle-zero creates incomplete files here; files left by a killed job are removed by the next one\n";
    world.write(".candle-zero-writing-aaaaaa/.candle-zero-unfinished", mark);
    world.write(".candle-zero-writing-aaaaaa/new/adapter_model.safetensors", "half");
    world.write(".candle-zero-writing-bbbbbb/thesis", "mine");
    world.write(".candle-zero-writing-cccccc/.candle-zero-unfinished", "mine");
    world.write(".candle-zero-writing-dddddd", "mine");
    world.write(".weightsAbCdEf.safetensors", "mine");
    assert!(world.finetune(&llama(), &["--steps", "1", "--lora", "r=2", "--out", "o"]).status().unwrap().success());
    assert!(!world.at(".candle-zero-writing-aaaaaa").exists());
    for name in [
        ".candle-zero-writing-bbbbbb/thesis",
        ".candle-zero-writing-cccccc/.candle-zero-unfinished",
        ".candle-zero-writing-dddddd",
        ".weightsAbCdEf.safetensors",
    ] {
        assert_eq!(std::fs::read_to_string(world.at(name)).unwrap(), "mine", "{name}");
    }
}

#[test]
fn a_best_model_that_cannot_be_written_does_not_end_the_training() {
    let world = World::new();
    let options = Options { validation: Some(ValidationData::Part(0.25)), eval_every: Some(1), ..world.options("o") };
    let lost = threads::run(2, |comm| {
        let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm.clone())?;
        comm.barrier().wait()?;
        if comm.rank() == 0 {
            world.write("o-best/thesis", "mine");
        }
        comm.barrier().wait()?;
        while run.step()?.is_some() {}
        let lost = run.best_is_lost();
        run.finish().map(|()| lost)
    });
    assert_eq!(lost.unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>(), [true, true]);
    assert!(world.at("o/adapter_model.safetensors").is_file());
    let best: Vec<_> = std::fs::read_dir(world.at("o-best")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(best, ["thesis"]);
}

#[test]
fn a_result_whose_place_is_taken_meanwhile_is_saved_elsewhere() {
    let world = World::new();
    for (method, file) in
        [(world.options("o").method, "adapter_model.safetensors"), (TuningMethod::Full, "model.safetensors")]
    {
        let run = |out: &str, is_taken: bool| {
            let options = Options { method: method.clone(), ..world.options(out) };
            let ended = threads::run(2, |comm| {
                let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm.clone())?;
                comm.barrier().wait()?;
                if is_taken && comm.rank() == 0 {
                    world.write(&format!("{out}/thesis"), "mine");
                }
                comm.barrier().wait()?;
                while run.step()?.is_some() {}
                run.finish()
            });
            ended.unwrap().remove(0)
        };
        let out = format!("taken-{file}");
        run(&format!("alone-{file}"), false).unwrap();
        let error = run(&out, true).unwrap_err();
        let Error::Output(OutputError::Elsewhere { saved, .. }) = &error else { panic!("{error}") };
        assert!(
            error.to_string().contains("it has files that were not written by this run")
                || error.to_string().contains("new or empty folder"),
            "{error}"
        );
        let [alone, rescued] =
            [world.at(&format!("alone-{file}")), saved.clone()].map(|at| std::fs::read(at.join(file)).unwrap());
        assert!(alone == rescued);
        assert_eq!(std::fs::read_dir(world.at(&out)).unwrap().count(), 1);
    }
}

#[test]
fn other_commands_write_over_no_input_either() {
    let world = World::new();
    let model = copy("llama");
    std::fs::rename(model.path(), world.at("m")).unwrap();
    assert!(world.finetune("m", &[&RESUMED[..], &["--out", "adapter"]].concat()).status().unwrap().success());
    let refusal = |words: &[&str]| world.refusal(world.command(words));
    insta::assert_snapshot!(refusal(&["merge", "m", "adapter", "--out", "adapter"]), @"zerorun: --out adapter is ADAPTER adapter, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["merge", "m", "adapter", "--out", "m/../m"]), @"zerorun: --out m/../m is MODEL m, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["merge", "m", "--out", "m/model.gguf"]), @"zerorun: --out m/model.gguf is a file of MODEL m, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["consolidate", "ck", "ck/global_step2/hf"]), @"zerorun: OUT ck/global_step2/hf is in DIR ck, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["data", "show", "m", "data/d.jsonl", "--cache", "data/d.jsonl"]), @"zerorun: cannot write to data/d.jsonl: it is a file, but a folder is needed; give another path");
    let deepspeed = path("../deepspeed/zero3_f32_tiny/checkpoint");
    assert!(Command::new("cp").arg("-r").arg(deepspeed).arg(world.at("deepspeed")).status().unwrap().success());
    insta::assert_snapshot!(refusal(&["import", "deepspeed", "deepspeed", "--as", "mine"]), @"zerorun: OUT deepspeed is DIR deepspeed, which is an input; give another path");
    let merged = world.command(&["merge", "m", "adapter", "--out", "m/merged"]).output().unwrap();
    assert!(merged.status.success(), "{}", stderr(&merged));
}

#[test]
fn tokenized_data_is_readable_for_its_user_alone() {
    let world = World::new();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let own = world.at("home/.cache/candle-zero");
    std::fs::create_dir_all(own.join("samples")).unwrap();
    for folder in [own.clone(), own.join("samples")] {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let show = |cache: &[&str]| {
        let model = llama();
        let words = [&["data", "show", &model, "data/d.jsonl"], cache].concat();
        assert!(world.command(&words).stdout(Stdio::null()).status().unwrap().success());
    };
    show(&[]);
    let samples = || {
        let mut file = std::fs::read_dir(own.join("samples")).unwrap().map(|entry| entry.unwrap().path());
        file.find(|path| path.extension().is_some_and(|end| end == "samples")).unwrap()
    };
    assert_eq!([mode(&own), mode(&own.join("samples")), mode(&samples())], [0o700, 0o700, 0o600]);
    // The permissions of a file from an earlier version are tightened.
    std::fs::set_permissions(samples(), std::fs::Permissions::from_mode(0o644)).unwrap();
    show(&[]);
    assert_eq!(mode(&samples()), 0o600);
    // The user's own folder keeps its permissions.
    std::fs::create_dir(world.at("shared")).unwrap();
    std::fs::set_permissions(world.at("shared"), std::fs::Permissions::from_mode(0o755)).unwrap();
    show(&["--cache", "shared"]);
    assert_eq!(mode(&world.at("shared")), 0o755);
    show(&["--cache", "new"]);
    assert_eq!(mode(&world.at("new")), 0o700);
}
