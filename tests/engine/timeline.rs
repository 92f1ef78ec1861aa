//! `zerorun --timeline` and `EngineBuilder::timeline`: the events of each rank over time, in Perfetto's format.

use crate::support::processes::{descendants, example, start, stderr, wait_for, zerorun};
use crate::support::tiny::{Shape, config, train, train_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns a folder for a test's files.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The start and the end, in microseconds.
type Time = (f64, f64);

/// A trace in Perfetto's format.
struct Trace {
    /// The time, rank, lane and content of each event.
    events: Vec<(Time, u64, String, Value)>,
    dropped: u64,
}

impl Trace {
    /// Reads a trace and checks every event in it.
    fn read(path: &Path) -> Self {
        let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let (mut ranks, mut lanes) = (BTreeMap::new(), BTreeMap::new());
        let mut sorted = BTreeSet::new();
        let mut events = Vec::new();
        for event in trace["traceEvents"].as_array().unwrap() {
            let (rank, lane) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let name = event["name"].as_str().unwrap();
            match event["ph"].as_str().unwrap() {
                "M" => {
                    assert!(events.is_empty(), "names come first");
                    let named = event["args"]["name"].as_str().map(str::to_owned);
                    match name {
                        "process_name" => assert_eq!(ranks.insert(rank, named.unwrap()), None),
                        "thread_name" => assert_eq!(lanes.insert((rank, lane), named.unwrap()), None),
                        "process_sort_index" | "thread_sort_index" => {
                            assert!(event["args"]["sort_index"].is_u64());
                            assert!(sorted.insert((name.to_owned(), rank, lane)));
                        }
                        other => panic!("{other}"),
                    }
                }
                "X" => {
                    assert!(event["cat"].is_string() && event["args"].is_object() && !name.is_empty(), "{event}");
                    let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                    assert!(ts >= 0.0 && dur >= 0.0, "{event}");
                    assert_eq!(ranks[&rank], format!("rank {rank}"));
                    events.push(((ts, ts + dur), rank, lanes[&(rank, lane)].clone(), event.clone()));
                }
                other => panic!("{other}"),
            }
        }
        assert!(events.is_sorted_by(|a, b| a.0.0 <= b.0.0), "in chronological order");
        assert_eq!(sorted.len(), ranks.len() + lanes.len());
        let trace = Self { events, dropped: trace["otherData"]["dropped_events"].as_u64().unwrap() };
        trace.check_nesting();
        trace
    }

    /// Checks that any two events of a lane are nested or disjoint.
    fn check_nesting(&self) {
        let mut open: BTreeMap<(u64, &str), Vec<Time>> = BTreeMap::new();
        for (time, rank, lane, event) in &self.events {
            let enclosing = open.entry((*rank, lane)).or_default();
            // Sums of decimals are inexact; a nanosecond is 0.001.
            while enclosing.last().is_some_and(|enclosing| enclosing.1 <= time.0 + 1e-4) {
                enclosing.pop();
            }
            let end = enclosing.last().map_or(f64::INFINITY, |enclosing| enclosing.1);
            assert!(time.1 <= end + 1e-4, "{event} ends after the enclosing event, at {end}");
            enclosing.push(*time);
        }
    }

    /// Returns the times of a rank's events that `choose` selects by category and name.
    fn times(&self, rank: u64, choose: impl Fn(&str, &str) -> bool) -> Vec<Time> {
        let chosen = self.events.iter().filter(|(_, of, _, event)| {
            *of == rank && choose(event["cat"].as_str().unwrap(), event["name"].as_str().unwrap())
        });
        chosen.map(|(time, ..)| *time).collect()
    }

    fn ranks(&self) -> BTreeSet<u64> {
        self.events.iter().map(|(_, rank, ..)| *rank).collect()
    }

    /// Returns the number of microseconds during which units compute while data is transferred.
    fn overlap(&self, rank: u64) -> f64 {
        let compute = without(&self.times(rank, |cat, _| cat == "unit"), &self.times(rank, |cat, _| cat == "wait"));
        let transfers = self.times(rank, |cat, name| cat == "collective" && name != "control" && name != "barrier");
        assert!(!compute.is_empty() && !transfers.is_empty());
        let common = |a: &Time, b: &Time| (a.1.min(b.1) - a.0.max(b.0)).max(0.0);
        compute.iter().flat_map(|a| transfers.iter().map(move |b| common(a, b))).sum()
    }
}

/// Returns the parts of `times` that are not in `taken`; both are sorted.
fn without(times: &[Time], taken: &[Time]) -> Vec<Time> {
    let mut remaining = Vec::new();
    for (mut from, to) in times.iter().copied() {
        for taken in taken {
            if taken.1 > from && taken.0 < to {
                remaining.push((from, taken.0));
                from = taken.1;
            }
        }
        remaining.push((from, to));
    }
    remaining.into_iter().filter(|(from, to)| from < to).collect()
}

/// Returns a command that runs two ranks at stage 3 over shared memory, and the path of the trace that it writes.
fn two_ranks(folder: &Path, overlap: bool, steps: &str) -> (Command, PathBuf) {
    let (config, trace) = (folder.join(format!("{overlap}.json")), folder.join(format!("trace-{overlap}.json")));
    let written = json!({
        "gradient_check": false,
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "overlap_comm": overlap, "stage3_max_reuse_distance": 0},
    });
    std::fs::write(&config, written.to_string()).unwrap();
    let mut command = zerorun();
    command.args(["-n", "2", "--timeline"]).arg(&trace).arg(example("train_gpt"));
    command.args(["--model", "nano", "--steps", steps, "--sample", "0", "--ds_config"]).arg(config);
    (command, trace)
}

#[test]
fn the_ranks_of_a_job_gather_and_reduce_while_units_compute() {
    let folder = folder();
    let run = |overlap| {
        let (mut command, path) = two_ranks(folder.path(), overlap, "4");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let trace = Trace::read(&path);
        let message = format!("zerorun: {} events of 2 ranks are in {};", trace.events.len(), path.display());
        assert!(stderr(&output).contains(&message), "{message} {}", stderr(&output));
        trace
    };
    let trace = run(true);
    assert_eq!((trace.ranks(), trace.dropped), ([0, 1].into(), 0));
    for rank in [0, 1] {
        for (call, count) in [("forward", 8), ("backward", 8), ("step", 8), ("initialize", 1)] {
            let calls = trace.times(rank, |cat, name| (cat, name) == ("engine", call));
            assert_eq!(calls.len(), count, "{call} of rank {rank}");
        }
        for call in ["forward h.0", "forward h.3", "backward h.0", "backward h.3", "backward root"] {
            assert_eq!(trace.times(rank, |cat, name| (cat, name) == ("unit", call)).len(), 8, "{call} of rank {rank}");
        }
        assert_eq!(trace.times(rank, |_, name| name == "vote").len(), 4);
        assert!(!trace.times(rank, |cat, name| cat == "optimizer" && name == "sub-group").is_empty());
    }
    for (_, _, lane, event) in &trace.events {
        let expected = if event["cat"] == "collective" { "collectives" } else { "training" };
        assert_eq!(lane, expected, "{event}");
        assert_eq!(event["args"]["bytes"].is_u64(), event["cat"] == "collective", "{event}");
    }
    let steps: Vec<u64> = trace.events.iter().filter_map(|(_, _, _, event)| event["args"]["step"].as_u64()).collect();
    assert_eq!(steps.iter().copied().collect::<BTreeSet<_>>(), (0..4).collect());
    // Without overlap, only the moment between the launch of a collective and the wait for it remains.
    let without_overlap = run(false);
    let sum = |trace: &Trace| trace.overlap(0) + trace.overlap(1);
    let (during, after) = (sum(&trace), sum(&without_overlap));
    assert!(during > 2.0 * after && during > 1000.0, "{during} us during computation, {after} us without overlap_comm");
    let leftovers: Vec<String> = names(folder.path()).into_iter().filter(|name| name.starts_with('.')).collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

fn names(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_rank_that_is_killed_leaves_what_it_did_and_what_the_others_did() {
    let folder = folder();
    let (mut command, path) = two_ranks(folder.path(), true, "1000000");
    let mut job = start(&mut command);
    let environment = |pid: &i32| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let victim = wait_for("rank 1 to start", || {
        let is_1 = |pid: &i32| environment(pid).split(|byte| *byte == 0).any(|variable| variable == b"RANK=1");
        descendants(job.id() as i32).into_iter().find(is_1)
    });
    let parts = || names(folder.path()).into_iter().find(|name| name.starts_with(".candle-zero-timeline-"));
    let lengths = |parts: String| {
        let files = std::fs::read_dir(folder.path().join(parts)).unwrap();
        // Skips the file that marks the folder as removable if the job is killed.
        let files = files.map(|file| file.unwrap()).filter(|file| file.file_name() != ".candle-zero-unfinished");
        files.map(|file| file.metadata().unwrap().len()).collect::<Vec<_>>()
    };
    wait_for("both ranks to record something", || {
        let lengths = parts().map(lengths).unwrap_or_default();
        (lengths.len() == 2 && lengths.iter().all(|length| *length > 100_000)).then_some(())
    });
    kill_process(Pid::from_raw(victim).unwrap(), Signal::KILL).unwrap();
    let output = job.wait().map(|status| (status, job.wait_with_output().unwrap())).unwrap();
    assert_eq!(output.0.code(), Some(137), "{}", stderr(&output.1));
    assert!(stderr(&output.1).contains("events of 2 ranks are in"), "{}", stderr(&output.1));
    let trace = Trace::read(&path);
    for rank in [0, 1] {
        assert!(trace.times(rank, |cat, name| (cat, name) == ("engine", "step")).len() > 5, "rank {rank}");
    }
    assert_eq!(parts(), None);
}

#[test]
fn ranks_that_are_threads_share_a_trace_and_compute_the_same() {
    let folder = folder();
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    for (stage, more) in [(0, json!({})), (1, json!({})), (2, json!({})), (3, json!({"overlap_comm": false}))] {
        let path = folder.path().join(format!("{stage}.json"));
        let config = config(stage, 2, more, json!({"gradient_check": false}));
        let plain = train(2, shape, &config, 5);
        let recorded = train_with(2, shape, &config, 5, |builder| builder.timeline(&path));
        for (a, b) in plain.iter().zip(&recorded) {
            assert!(a.losses == b.losses && a.norms == b.norms && a.exported == b.exported, "stage {stage}");
        }
        let trace = Trace::read(&path);
        assert_eq!(trace.ranks(), [0, 1].into());
        for (rank, unit) in [(0, "layer.0"), (0, "layer.1"), (1, "layer.0"), (1, "layer.1")] {
            // Below stage 3, a unit's backward pass is recorded only if its output comes from one of candle-zero's
            // operations; the blocks of this model end with an addition by Candle.
            for pass in if stage == 3 { &["forward", "backward"][..] } else { &["forward"] } {
                let times = trace.times(rank, |cat, name| cat == "unit" && name == format!("{pass} {unit}"));
                assert_eq!(times.len(), 10, "{pass} of {unit}, stage {stage}");
            }
        }
    }
}

#[test]
fn files_and_checkpoints_have_lanes_and_engines_that_follow_share_a_file() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let shape = Shape { units: true, layers: 2, checkpointed: true };
    let offload = json!({
        "offload_optimizer": {"device": "nvme", "nvme_path": folder.path()}, "sub_group_size": 1000,
    });
    let train =
        || train_with(1, shape, &config(3, 1, offload.clone(), json!({})), 2, |builder| builder.timeline(&path));
    train();
    let first = Trace::read(&path);
    let bytes = |operation: &str| -> u64 {
        let files =
            first.events.iter().filter(|(_, _, lane, event)| lane.starts_with("files ") && event["name"] == operation);
        files.map(|(_, _, _, event)| event["args"]["bytes"].as_u64().unwrap()).sum()
    };
    assert!(bytes("read") > 0 && bytes("write") > 0);
    assert!(!first.times(0, |cat, name| cat == "wait" && name == "wait for file").is_empty());
    train();
    let both = Trace::read(&path);
    let engines = |trace: &Trace| trace.times(0, |_, name| name == "initialize").len();
    assert_eq!((engines(&first), engines(&both)), (1, 2));
}

#[test]
fn the_environment_alone_is_enough() {
    let folder = folder();
    let (mut command, _) = two_ranks(folder.path(), true, "2");
    // Only the program runs: zerorun and its own arguments are left out.
    let words: Vec<_> = command.get_args().skip_while(|word| *word != example("train_gpt")).map(Into::into).collect();
    let words: Vec<std::ffi::OsString> = words;
    let path = folder.path().join("alone.json");
    let output = Command::new(&words[0]).args(&words[1..]).env("CANDLE_ZERO_TIMELINE", &path).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(Trace::read(&path).ranks(), [0].into());
    // The launcher accepts the variable in place of its own option.
    command = zerorun();
    let path = folder.path().join("job.json");
    let job = command.args(["-n", "2"]).args(&words).env("CANDLE_ZERO_TIMELINE", &path).output().unwrap();
    assert!(job.status.success(), "{}", stderr(&job));
    assert_eq!(Trace::read(&path).ranks(), [0, 1].into());
}

#[test]
fn a_place_where_no_file_can_be_is_refused_before_anything_starts() {
    for (path, problem) in
        [("no/such/folder/trace.json", "the folder no/such/folder does not exist"), ("support", "it is a folder")]
    {
        let output = zerorun().args(["--timeline", path, "/bin/echo", "started"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stdout.is_empty());
        let message = format!("zerorun: cannot write the timeline {path}: {problem}");
        assert!(stderr(&output).starts_with(&message), "{}", stderr(&output));
    }
    let folder = folder();
    let nowhere = folder.path().join("none/trace.json");
    let built = candle_zero::Engine::builder()
        .timeline(nowhere)
        .initialize(|vb| candle_nn::linear(2, 2, vb), json!({"train_batch_size": 1}));
    let error = built.err().unwrap().to_string();
    assert!(error.starts_with("cannot write the timeline ") && error.contains("none/trace.json"), "{error}");
}

#[test]
fn a_program_without_an_engine_leaves_an_empty_trace() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let output = zerorun().arg("--timeline").arg(&path).args(["/bin/echo", "hello"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(Trace::read(&path).events.is_empty());
}
