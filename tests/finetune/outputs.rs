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
struct TestFolder(TempDir);

impl TestFolder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let chat = |i: usize| {
            let (user, assistant) = (format!("{i} and {i}?"), format!("{}", 2 * i));
            candle_zero::serde_json::json!({"messages": [
                {"role": "user", "content": user}, {"role": "assistant", "content": assistant},
            ]})
        };
        let lines: String = (0..12).map(|i| format!("{}\n", chat(i))).collect();
        folder.write("data/d.jsonl", &lines);
        folder.write("ds.json", "{\"zero_optimization\": {\"stage\": 2}}");
        folder
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
        std::fs::write(self.at(name), text).unwrap();
    }

    /// Returns all files in the folder except those in `cache`, with their bytes, and links with their targets.
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
        let common = ["finetune", model, "--data", "data/d.jsonl", "--ctx", "48", "--batch", "2", "--cache", "cache"];
        self.command(&[&common, words].concat())
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
    let folder = TestFolder::new();
    let model = copy("llama");
    std::fs::rename(model.path(), folder.at("me")).unwrap();
    folder.write("me/NOTES.md", "notes");
    folder.write("proj/config.json", "{}");
    folder.write("proj/adapter_config.json", "{}");
    folder.write("proj/src/main.rs", "code");
    let run = |words: &[&str]| folder.refusal(folder.finetune("me", &[&RESUMED, words].concat()));
    insta::assert_snapshot!(run(&["--out", "me"]), @"zerorun: --out me is MODEL me, which is an input; give another path");
    insta::assert_snapshot!(run(&["--out", "."]), @"zerorun: --out . contains MODEL me, which is an input; give another path");
    insta::assert_snapshot!(run(&["--out", "proj"]), @"zerorun: cannot write to proj: it has files that were not written by this run; give another path");
    insta::assert_snapshot!(run(&["--out", "proj/src/../../data"]), @"zerorun: --out proj/src/../../data contains --data data/d.jsonl, which is an input; give another path");
    // The project is also refused after a run with the same checkpoints has written elsewhere.
    assert!(folder.finetune("me", &[&RESUMED[..], &["--out", "o"]].concat()).status().unwrap().success());
    insta::assert_snapshot!(run(&["--out", "proj"]), @"zerorun: cannot write to proj: its adapter_config.json is not the one that this run wrote; give another path");
    // The same applies to the folder of the best model.
    std::fs::rename(folder.at("proj"), folder.at("n-best")).unwrap();
    insta::assert_snapshot!(run(&["--out", "n", "--val", "20%"]), @"zerorun: cannot write to n-best: it has files that were not written by this run; give another path");
}

#[test]
fn a_run_that_is_resumed_exchanges_the_files_that_it_has_written_and_no_others() {
    let folder = TestFolder::new();
    let run = |words: &[&str]| folder.finetune(&llama(), &[&RESUMED, words].concat());
    assert!(run(&["--out", "o"]).status().unwrap().success());
    let adapter = std::fs::read(folder.at("o/adapter_model.safetensors")).unwrap();
    folder.write("o/NOTES.md", "notes");
    symlink("../data", folder.at("o/link")).unwrap();
    let before = folder.files();
    let again = run(&["--out", "o"]).output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    assert!(folder.files() == before);
    assert_eq!(std::fs::read(folder.at("o/adapter_model.safetensors")).unwrap(), adapter);
    // The result is not replaced without --resume, nor by a run that finds no checkpoint.
    let fresh = folder.finetune(&llama(), &["--steps", "2", "--out", "o"]);
    insta::assert_snapshot!(folder.refusal(fresh), @"zerorun: cannot write to o: the output must be a new or empty folder, but this folder is not empty; give another path");
    std::fs::create_dir(folder.at("none")).unwrap();
    let other = folder.finetune(&llama(), &["--steps", "2", "--out", "o", "--save", "none", "--resume", "--seed", "7"]);
    insta::assert_snapshot!(folder.refusal(other), @"zerorun: cannot write to o: it has files that were not written by this run; give another path");
    // Files that the user has changed belong to the user.
    folder.write("o/adapter_config.json", "{\"mine\": true}");
    insta::assert_snapshot!(folder.refusal(run(&["--out", "o"])), @"zerorun: cannot write to o: its adapter_config.json is not the one that this run wrote; give another path");
}

#[test]
fn metrics_are_written_over_earlier_metrics_and_over_nothing_else() {
    let folder = TestFolder::new();
    let model = copy("llama");
    std::fs::rename(model.path(), folder.at("m")).unwrap();
    std::fs::hard_link(folder.at("data/d.jsonl"), folder.at("hard.jsonl")).unwrap();
    symlink("m/model.safetensors", folder.at("weights")).unwrap();
    folder.write("notes.jsonl", "{\"step\": \"one\"}\n");
    let run = |metrics: &str| {
        let words = ["--steps", "1", "--lora", "r=2", "--out", "o", "--ds_config", "ds.json", "--metrics", metrics];
        folder.finetune("m", &words)
    };
    insta::assert_snapshot!(folder.refusal(run("data/d.jsonl")), @"zerorun: --metrics data/d.jsonl is --data data/d.jsonl, which is an input; give another path");
    insta::assert_snapshot!(folder.refusal(run("hard.jsonl")), @"zerorun: --metrics hard.jsonl is --data data/d.jsonl, which is an input; give another path");
    insta::assert_snapshot!(folder.refusal(run("weights")), @"zerorun: --metrics weights is a file of MODEL m, which is an input; give another path");
    insta::assert_snapshot!(folder.refusal(run("m/../ds.json")), @"zerorun: --metrics m/../ds.json is --ds_config ds.json, which is an input; give another path");
    insta::assert_snapshot!(folder.refusal(run("o/m.jsonl")), @"zerorun: cannot write to o/m.jsonl: there is no folder o; give another path");
    let before = folder.files();
    let output = run("notes.jsonl").output().unwrap();
    assert!(!output.status.success() && folder.files() == before, "{}", stderr(&output));
    assert!(
        stderr(&output).contains("it contains something other than metrics, so it is not changed"),
        "{}",
        stderr(&output)
    );
    for _ in 0..2 {
        let output = run("m.jsonl").output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(std::fs::read_to_string(folder.at("m.jsonl")).unwrap().lines().count(), 2);
        std::fs::remove_dir_all(folder.at("o")).unwrap();
    }
}

#[test]
fn what_cannot_be_written_is_found_before_the_first_step() {
    let folder = TestFolder::new();
    symlink("nowhere", folder.at("dangling")).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, folder.at("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let run = |words: &[&str]| {
        folder.refusal(folder.finetune(&llama(), &[&["--steps", "2", "--lora", "r=2"], words].concat()))
    };
    insta::assert_snapshot!(run(&["--out", "dangling"]), @"zerorun: cannot write to dangling: it is a broken link, or leads through one; give another path");
    insta::assert_snapshot!(run(&["--out", "data/d.jsonl/o"]), @"zerorun: cannot write to data/d.jsonl/o: Not a directory (os error 20); give another path");
    insta::assert_snapshot!(run(&["--out", "pipe"]), @"zerorun: cannot write to pipe: the output must be a new or empty folder, but this is a file; give another path");
    insta::assert_snapshot!(run(&["--out", "o", "--metrics", "pipe"]), @"zerorun: cannot write to pipe: it is a pipe, but a file is needed; give another path");
    insta::assert_snapshot!(run(&["--out", "o", "--save", "o/ck"]), @"zerorun: --save o/ck is in --out o, but both are outputs; give each its own path");
    insta::assert_snapshot!(run(&["--out", "o", "--save", "./o"]), @"zerorun: --out o is --save ./o, but both are outputs; give each its own path");
    assert!(run(&["--out", "/proc/o"]).starts_with("zerorun: cannot "), "/proc");
    folder.write("nvme.json", "{\"zero_optimization\": {\"stage\": 2, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"o/n\"}}}");
    insta::assert_snapshot!(run(&["--out", "o", "--ds_config", "nvme.json"]), @"zerorun: nvme_path o/n is in --out o, but both are outputs; give each its own path");
}

#[test]
fn a_second_job_with_the_same_output_is_refused_at_its_start() {
    let folder = TestFolder::new();
    for (shared, first, second) in [
        ("--out", ["--out", "o", "--metrics", "m1"], ["--out", "./o", "--metrics", "m2"]),
        ("--metrics", ["--out", "o1", "--metrics", "m"], ["--out", "o2", "--metrics", "m"]),
    ] {
        let endless = ["--steps", "1000000", "--lora", "r=2"];
        let mut running = folder.finetune(&llama(), &[&endless[..], &first].concat());
        let mut running = running.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while !folder.at(first[3]).exists() {
            assert!(begun.elapsed() < Duration::from_secs(60) && running.try_wait().unwrap().is_none(), "no metrics");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = folder.finetune(&llama(), &[&endless[..], &second].concat()).output().unwrap();
        let text = folder.text(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let (path, number) = (if shared == "--out" { "./o" } else { "m" }, running.id());
        let known = format!(
            "zerorun: cannot write to {path}: another running job is writing there (process {number}); wait for it, or \
             give another path"
        );
        let unknown = known.replace(&format!(" (process {number})"), "");
        assert!(text == known || text == unknown, "{text}");
        running.kill().unwrap();
        running.wait().unwrap();
        for name in [first[3], second[3]] {
            _ = std::fs::remove_file(folder.at(name));
        }
    }
    // Leftovers of the killed jobs do not block other runs, and are removed.
    for out in ["o", "o1"] {
        assert!(
            folder.finetune(&llama(), &["--steps", "1", "--out", out, "--metrics", "m"]).status().unwrap().success()
        );
    }
    let names = std::fs::read_dir(folder.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".")));
}

#[test]
fn what_a_killed_job_left_beside_an_output_goes_and_what_is_named_alike_stays() {
    let folder = TestFolder::new();
    let mark = "candle-zero creates incomplete files here; files left by a killed job are removed by the next one\n";
    folder.write(".candle-zero-writing-aaaaaa/.candle-zero-unfinished", mark);
    folder.write(".candle-zero-writing-aaaaaa/new/adapter_model.safetensors", "half");
    folder.write(".candle-zero-writing-bbbbbb/thesis", "mine");
    folder.write(".candle-zero-writing-cccccc/.candle-zero-unfinished", "mine");
    folder.write(".candle-zero-writing-dddddd", "mine");
    folder.write(".weightsAbCdEf.safetensors", "mine");
    assert!(folder.finetune(&llama(), &["--steps", "1", "--lora", "r=2", "--out", "o"]).status().unwrap().success());
    assert!(!folder.at(".candle-zero-writing-aaaaaa").exists());
    for name in [
        ".candle-zero-writing-bbbbbb/thesis",
        ".candle-zero-writing-cccccc/.candle-zero-unfinished",
        ".candle-zero-writing-dddddd",
        ".weightsAbCdEf.safetensors",
    ] {
        assert_eq!(std::fs::read_to_string(folder.at(name)).unwrap(), "mine", "{name}");
    }
}

#[test]
fn a_best_model_that_cannot_be_written_does_not_end_the_training() {
    let folder = TestFolder::new();
    let options =
        Options { validation: Some(ValidationData::Fraction(0.25)), eval_every: Some(1), ..folder.options("o") };
    let lost = threads::run(2, |comm| {
        let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm.clone())?;
        comm.barrier().wait()?;
        if comm.rank() == 0 {
            folder.write("o-best/thesis", "mine");
        }
        comm.barrier().wait()?;
        while run.step()?.is_some() {}
        let lost = run.best_is_lost();
        run.finish().map(|()| lost)
    });
    assert_eq!(lost.unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>(), [true, true]);
    assert!(folder.at("o/adapter_model.safetensors").is_file());
    let best: Vec<_> = std::fs::read_dir(folder.at("o-best")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(best, ["thesis"]);
}

#[test]
fn a_result_whose_place_is_taken_meanwhile_is_saved_elsewhere() {
    let folder = TestFolder::new();
    for (method, file) in
        [(folder.options("o").method, "adapter_model.safetensors"), (TuningMethod::Full, "model.safetensors")]
    {
        let run = |out: &str, is_taken: bool| {
            let options = Options { method: method.clone(), ..folder.options(out) };
            let results = threads::run(2, |comm| {
                let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm.clone())?;
                comm.barrier().wait()?;
                if is_taken && comm.rank() == 0 {
                    folder.write(&format!("{out}/thesis"), "mine");
                }
                comm.barrier().wait()?;
                while run.step()?.is_some() {}
                run.finish()
            });
            results.unwrap().remove(0)
        };
        let out = format!("taken-{file}");
        run(&format!("alone-{file}"), false).unwrap();
        let error = run(&out, true).unwrap_err();
        let Error::Output(OutputError::SavedElsewhere { saved, .. }) = &error else { panic!("{error}") };
        assert!(
            error.to_string().contains("it has files that were not written by this run")
                || error.to_string().contains("new or empty folder"),
            "{error}"
        );
        let [expected, rescued] =
            [folder.at(&format!("alone-{file}")), saved.clone()].map(|at| std::fs::read(at.join(file)).unwrap());
        assert!(expected == rescued);
        assert_eq!(std::fs::read_dir(folder.at(&out)).unwrap().count(), 1);
    }
}

#[test]
fn other_commands_write_over_no_input_either() {
    let folder = TestFolder::new();
    let model = copy("llama");
    std::fs::rename(model.path(), folder.at("m")).unwrap();
    assert!(folder.finetune("m", &[&RESUMED[..], &["--out", "adapter"]].concat()).status().unwrap().success());
    let refusal = |words: &[&str]| folder.refusal(folder.command(words));
    insta::assert_snapshot!(refusal(&["merge", "m", "adapter", "--out", "adapter"]), @"zerorun: --out adapter is ADAPTER adapter, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["merge", "m", "adapter", "--out", "m/../m"]), @"zerorun: --out m/../m is MODEL m, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["merge", "m", "--out", "m/model.gguf"]), @"zerorun: --out m/model.gguf is a file of MODEL m, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["consolidate", "ck", "ck/global_step2/hf"]), @"zerorun: OUT ck/global_step2/hf is in DIR ck, which is an input; give another path");
    insta::assert_snapshot!(refusal(&["data", "show", "m", "data/d.jsonl", "--cache", "data/d.jsonl"]), @"zerorun: cannot write to data/d.jsonl: it is a file, but a folder is needed; give another path");
    let deepspeed = path("../deepspeed/zero3_f32_tiny/checkpoint");
    assert!(Command::new("cp").arg("-r").arg(deepspeed).arg(folder.at("deepspeed")).status().unwrap().success());
    insta::assert_snapshot!(refusal(&["import", "deepspeed", "deepspeed", "--as", "mine"]), @"zerorun: OUT deepspeed is DIR deepspeed, which is an input; give another path");
    let merged = folder.command(&["merge", "m", "adapter", "--out", "m/merged"]).output().unwrap();
    assert!(merged.status.success(), "{}", stderr(&merged));
}

#[test]
fn tokenized_data_is_readable_for_its_user_alone() {
    let folder = TestFolder::new();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let cache_folder = folder.at("home/.cache/candle-zero");
    std::fs::create_dir_all(cache_folder.join("samples")).unwrap();
    for folder in [cache_folder.clone(), cache_folder.join("samples")] {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let show = |cache: &[&str]| {
        let model = llama();
        let words = [&["data", "show", &model, "data/d.jsonl"], cache].concat();
        assert!(folder.command(&words).stdout(Stdio::null()).status().unwrap().success());
    };
    show(&[]);
    let samples = || {
        let mut file = std::fs::read_dir(cache_folder.join("samples")).unwrap().map(|entry| entry.unwrap().path());
        file.find(|path| path.extension().is_some_and(|end| end == "samples")).unwrap()
    };
    assert_eq!([mode(&cache_folder), mode(&cache_folder.join("samples")), mode(&samples())], [0o700, 0o700, 0o600]);
    // The permissions of a file from an earlier version are tightened.
    std::fs::set_permissions(samples(), std::fs::Permissions::from_mode(0o644)).unwrap();
    show(&[]);
    assert_eq!(mode(&samples()), 0o600);
    // The user's own folder keeps its permissions.
    std::fs::create_dir(folder.at("shared")).unwrap();
    std::fs::set_permissions(folder.at("shared"), std::fs::Permissions::from_mode(0o755)).unwrap();
    show(&["--cache", "shared"]);
    assert_eq!(mode(&folder.at("shared")), 0o755);
    show(&["--cache", "new"]);
    assert_eq!(mode(&folder.at("new")), 0o700);
}
