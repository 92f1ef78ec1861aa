//! Tests of the writer of runs.

use super::super::{LoadedFrom, RecordedState, RunSpec, RunsFolder, SUMMARY, json_line_reader};
use super::*;
use std::collections::BTreeMap;
use std::fs::OpenOptions;

fn plan(folder: &Path, name: &str) -> RecordPlan {
    RecordPlan::new(Some(RunSpec::new(name).folder(folder)), None, |_| None).unwrap().unwrap()
}

fn start(loaded: Option<(&Path, u64)>) -> RunStart {
    let loaded = loaded.map(|(folder, step)| LoadedFrom { folder: folder.into(), path: folder.join("tag"), step });
    let configuration = json!({"seed": 1, "comet": {"api_key": "secret"}});
    RunStart { world_size: 2, configuration, time: now(), loaded }
}

fn open(folder: &Path, name: &str, job: &str, restart: u64) -> RunWriter {
    RunWriter::open_as(&plan(folder, name), &start(None), job, restart).unwrap()
}

fn steps(writer: &mut RunWriter, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let loss = 10.0 / step as f64;
        writer.record(step, [("loss".to_owned(), loss), ("lr".to_owned(), 0.1)]).unwrap();
    }
}

fn ids(folder: &Path) -> Vec<String> {
    RunsFolder::find(Some(folder.into())).ids().unwrap()
}

const JOB_A: &str = "20260131-235959-aaaaaa";
const JOB_B: &str = "20260131-235959-bbbbbb";

#[test]
fn a_run_is_read_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = open(dir.path(), "x", JOB_A, 0);
    let folder = writer.folder().to_owned();
    assert_eq!(RecordedRun::open(&folder).unwrap().state(), RecordedState::Running);
    steps(&mut writer, 1..=4);
    writer.record(4, [("val_loss".to_owned(), 2.0)]).unwrap();
    steps(&mut writer, 5..=5);
    writer.record(5, [("val_loss".to_owned(), f64::NAN)]).unwrap();
    writer.sample(5, "a", "b\nc").unwrap();
    writer.checkpoint(5, dir.path(), &dir.path().join("t")).unwrap();
    for step in 4..=5 {
        writer.expert_loads(step, vec![BlockLoads { block: 1, choices: vec![step, 0] }]).unwrap();
    }
    writer.end(5, RunEnding::Finished, None).unwrap();
    let run = RecordedRun::open(&folder).unwrap();
    let loads = run.expert_loads().unwrap().unwrap();
    assert_eq!((loads.step, loads.session, &loads.blocks[0].choices[..]), (5, 1, &[5, 0][..]));
    assert_eq!((run.state(), run.id().as_str()), (RecordedState::Finished, "x-20260131-235959"));
    let summary = run.summary();
    assert_eq!((summary.steps, summary.loss.unwrap().value, summary.best_loss.unwrap().step), (5, 2.0, 5));
    assert_eq!(summary.best_validation.unwrap().step, 4);
    assert!(summary.validation.unwrap().value.is_nan());
    assert_eq!(summary.checkpoint_step, Some(5));
    assert_eq!(run.info().configuration["comet"]["api_key"], "***");
    assert_eq!(run.metrics().unwrap().rows.len(), 5);
    assert_eq!(run.samples().unwrap()[0]["text"], "b\nc");
    assert!(!folder.join(crate::files::LOCK).exists());
}

#[test]
fn a_kill_at_any_byte_leaves_a_record_that_is_read_and_continued() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = open(dir.path(), "x", JOB_A, 0);
    let folder = writer.folder().to_owned();
    steps(&mut writer, 1..=3);
    writer.error(3, "an error").unwrap();
    drop(writer);
    let [metrics, events] = [METRICS, EVENTS].map(|name| std::fs::read(folder.join(name)).unwrap());
    let summaries = [std::fs::read(folder.join(SUMMARY)).ok(), None];
    for cut in 0..=metrics.len() {
        for summary in &summaries {
            std::fs::write(folder.join(METRICS), &metrics[..cut]).unwrap();
            std::fs::write(folder.join(EVENTS), &events[..cut.min(events.len())]).unwrap();
            match summary {
                Some(summary) => std::fs::write(folder.join(SUMMARY), summary).unwrap(),
                None => _ = std::fs::remove_file(folder.join(SUMMARY)),
            }
            let run = RecordedRun::open(&folder).unwrap();
            let rows = metrics[..cut].iter().filter(|byte| **byte == b'\n').count().saturating_sub(1);
            assert_eq!(run.summary().steps, rows as u64, "cut at {cut}");
            assert_eq!(run.metrics().unwrap().rows.len(), rows);
            assert_eq!(run.summary().problem, None);
        }
    }
    // The metrics end with an incomplete line, and the job restarts. The events are complete: with a long command line,
    // they are longer than the metrics.
    std::fs::write(folder.join(METRICS), &metrics[..metrics.len() - 3]).unwrap();
    std::fs::write(folder.join(EVENTS), &events).unwrap();
    let mut writer = open(dir.path(), "x", JOB_A, 1);
    assert_eq!(writer.folder(), folder);
    steps(&mut writer, 1..=2);
    writer.end(2, RunEnding::Finished, None).unwrap();
    let run = RecordedRun::open(&folder).unwrap();
    assert_eq!((run.summary().steps, run.summary().sessions, run.state()), (2, 2, RecordedState::Finished));
    assert_eq!(run.metrics().unwrap().problem, None);
    assert_eq!(*run.summary(), RunSummary::of_files(&folder).unwrap());
}

#[test]
fn a_restarted_job_continues_its_runs_and_other_jobs_get_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (open(dir.path(), "x", JOB_A, 0), open(dir.path(), "x", JOB_B, 0));
    let third = open(dir.path(), "x", JOB_A, 0);
    assert_eq!(ids(dir.path()), ["x-20260131-235959", "x-20260131-235959-2", "x-20260131-235959-3"]);
    let folders = [&first, &third].map(|writer| writer.folder().to_owned());
    drop((first, second, third));
    // Engines are built in the same order again, at the same time or one after the other.
    let again = open(dir.path(), "x", JOB_A, 1);
    assert_eq!(again.folder(), folders[0]);
    drop(again);
    assert_eq!(open(dir.path(), "x", JOB_A, 1).folder(), folders[1]);
    assert_eq!(ids(dir.path()).len(), 3);
    open(dir.path(), "y", JOB_A, 1);
    assert_eq!(ids(dir.path()).len(), 4);
}

#[test]
fn writers_in_many_threads_each_get_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (folder, job) = (dir.path(), format!("20260131-235959-{thread:06}"));
            scope.spawn(move || {
                for _ in 0..5 {
                    let mut writer = open(folder, "x", &job, 0);
                    steps(&mut writer, 1..=3);
                    writer.end(3, RunEnding::Finished, None).unwrap();
                }
            });
        }
    });
    let runs = RunsFolder::find(Some(dir.path().into())).runs().unwrap();
    assert_eq!(runs.len(), 40);
    assert!(runs.iter().all(|run| run.run.as_ref().unwrap().summary().steps == 3));
}

#[test]
fn a_loaded_checkpoint_continues_the_run_of_this_name_that_saved_it() {
    let dir = tempfile::tempdir().unwrap();
    let [runs, saved, copied] = ["runs", "saved", "copied"].map(|name| dir.path().join(name));
    std::fs::create_dir(&saved).unwrap();
    std::fs::create_dir(&copied).unwrap();
    let mut writer = open(&runs, "x", JOB_A, 0);
    let folder = writer.folder().to_owned();
    steps(&mut writer, 1..=3);
    writer.checkpoint(3, &saved, &saved.join("tag")).unwrap();
    steps(&mut writer, 4..=5);
    let resume =
        |name: &str, from: &Path| RunWriter::open_as(&plan(&runs, name), &start(Some((from, 3))), JOB_B, 0).unwrap();
    assert_ne!(resume("x", &saved).folder(), folder, "it is still being written");
    drop(writer);
    assert_ne!(resume("x", &copied).folder(), folder, "a copy is another run");
    assert_ne!(resume("y", &saved).folder(), folder, "another name is another run");
    let mut writer = resume("x", &saved);
    assert_eq!(writer.folder(), folder);
    assert_eq!(RecordedRun::open(&folder).unwrap().summary().steps, 3);
    writer.record(4, [("loss".to_owned(), 7.0)]).unwrap();
    writer.end(4, RunEnding::Stopped, None).unwrap();
    let run = RecordedRun::open(&folder).unwrap();
    let losses: Vec<f64> = run.metrics().unwrap().rows.iter().map(|row| row.values["loss"]).collect();
    assert_eq!(losses, [10.0, 5.0, 10.0 / 3.0, 7.0]);
    assert_eq!(run.summary().best_loss.unwrap().value, 10.0 / 3.0);
    assert_eq!(*run.summary(), RunSummary::of_files(&folder).unwrap());
}

#[test]
fn a_list_of_runs_reads_two_small_files_of_each() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = 0;
    for number in 0..20 {
        let mut writer = open(dir.path(), "x", &format!("20260131-{number:06}-aaaaaa"), 0);
        steps(&mut writer, 1..=500);
        let folder = writer.folder().to_owned();
        writer.end(500, RunEnding::Finished, None).unwrap();
        bytes += [INFO, SUMMARY].map(|name| folder.join(name).metadata().unwrap().len()).iter().sum::<u64>();
        assert!(folder.join(METRICS).metadata().unwrap().len() > 20_000);
    }
    let folder = RunsFolder::find(Some(dir.path().into()));
    json_line_reader::cost::take();
    let runs = folder.runs().unwrap();
    assert_eq!(json_line_reader::cost::take(), (40, bytes));
    assert!(runs.iter().all(|run| run.run.as_ref().unwrap().summary().steps == 500));
    // If the summary covers only a part of a file, the rest is read.
    let first_folder = runs[0].run.as_ref().unwrap().folder().to_owned();
    let mut metrics = OpenOptions::new().append(true).open(first_folder.join(METRICS)).unwrap();
    metrics.write_all(b"{\"step\":501,\"time\":1,\"loss\":0.001}\n").unwrap();
    let run = RecordedRun::open(&first_folder).unwrap();
    assert_eq!((run.summary().steps, run.summary().best_loss.unwrap().step), (501, 501));
    let (files, read) = json_line_reader::cost::take();
    assert!(files == 3 && read < bytes / 20 + 100, "{files} files, {read} bytes");
    // If the summary does not match the contents of the file, everything is read.
    std::fs::write(first_folder.join(METRICS), "{\"step\":7,\"loss\":1}\n").unwrap();
    assert_eq!(RecordedRun::open(&first_folder).unwrap().summary().steps, 7);
}

#[test]
fn what_is_read_again_of_a_running_run_is_what_was_appended() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = open(dir.path(), "x", JOB_A, 0);
    steps(&mut writer, 1..=500);
    writer.flush().unwrap();
    let (runs, mut running) = (RunsFolder::find(Some(dir.path().into())), BTreeMap::new());
    let folder = writer.folder().to_owned();
    let info = folder.join(INFO).metadata().unwrap().len();
    let mut run = RecordedRun::open(&folder).unwrap();
    runs.refreshed_runs(&mut running).unwrap();
    for last in [501, 503, 503] {
        let before = folder.join(METRICS).metadata().unwrap().len();
        steps(&mut writer, run.summary().steps + 1..=last);
        writer.flush().unwrap();
        let appended = folder.join(METRICS).metadata().unwrap().len() - before;
        let files = if appended == 0 { 1 } else { 2 };
        json_line_reader::cost::take();
        run.refresh().unwrap();
        assert_eq!(json_line_reader::cost::take(), (files, info + appended));
        let listed = runs.refreshed_runs(&mut running).unwrap();
        assert_eq!(json_line_reader::cost::take(), (files, info + appended));
        assert_eq!(listed[0].run.as_ref().unwrap().summary(), run.summary());
        assert_eq!((run.summary().steps, run.state()), (last, RecordedState::Running));
        assert_eq!(*run.summary(), RunSummary::of_files(&folder).unwrap());
    }
    // Steps are repeated, and then the run ends.
    writer.record(2, [("loss".to_owned(), 9.0)]).unwrap();
    writer.flush().unwrap();
    run.refresh().unwrap();
    assert_eq!((run.summary().steps, run.summary().loss.unwrap().value), (2, 9.0));
    writer.end(2, RunEnding::Finished, None).unwrap();
    run.refresh().unwrap();
    assert_eq!((run.state(), run.summary().clone()), (RecordedState::Finished, RunSummary::of_files(&folder).unwrap()));
    runs.refreshed_runs(&mut running).unwrap();
    assert!(running.is_empty());
    // Another run has taken the place of this one.
    runs.remove(&run.id(), false).unwrap();
    assert!(run.refresh().is_err());
    assert_eq!(run.summary().steps, 2);
    let mut other = open(dir.path(), "y", JOB_B, 0);
    steps(&mut other, 1..=900);
    let other_folder = other.folder().to_owned();
    other.end(900, RunEnding::Stopped, None).unwrap();
    std::fs::rename(other_folder, &folder).unwrap();
    run.refresh().unwrap();
    assert_eq!(*run.summary(), *RecordedRun::open(&folder).unwrap().summary());
}

#[test]
fn a_damaged_record_is_named_and_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let folders: Vec<PathBuf> = (0..5)
        .map(|number| {
            let mut writer = open(dir.path(), "x", &format!("20260131-{number:06}-aaaaaa"), 0);
            steps(&mut writer, 1..=2);
            let folder = writer.folder().to_owned();
            writer.end(2, RunEnding::Finished, None).unwrap();
            folder
        })
        .collect();
    let info = std::fs::read_to_string(folders[0].join(INFO)).unwrap();
    std::fs::write(folders[0].join(INFO), &info[..40]).unwrap();
    std::fs::write(folders[1].join(INFO), info.replace("\"format\": 1", "\"format\": 9")).unwrap();
    std::fs::remove_file(folders[2].join(INFO)).unwrap();
    std::fs::write(folders[3].join(METRICS), "{\"step\":1,\"loss\":2}\n\0\0\0\n{\"step\":2,\"loss\":1}\n").unwrap();
    std::fs::create_dir(dir.path().join("not a run")).unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let runs = RunsFolder::find(Some(dir.path().into())).runs().unwrap();
    assert_eq!(runs.len(), 5);
    let text = |number: usize| {
        let error = runs[number].run.as_ref().unwrap_err();
        error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
    };
    insta::assert_snapshot!(text(0), @"the record DIR/x-20260131-000000/run.json is damaged: it is not JSON (EOF while parsing a value at line 4 column 8)");
    insta::assert_snapshot!(text(1), @"the record DIR/x-20260131-000001/run.json has format 9, but this version reads formats up to 1; use a newer zerorun");
    insta::assert_snapshot!(text(2), @"the record DIR/x-20260131-000002/run.json is damaged: it is missing");
    let third = runs[3].run.as_ref().unwrap().summary();
    assert_eq!(third.steps, 2);
    insta::assert_snapshot!(third.problem.as_ref().unwrap(), @"metrics.jsonl: the line at byte 20 is not a JSON object");
    assert_eq!(runs[4].run.as_ref().unwrap().summary().problem, None);
}

#[test]
fn removing_a_run_removes_only_its_own_files_and_no_run_that_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let folder = RunsFolder::find(Some(dir.path().into()));
    let mut writer = open(dir.path(), "x", JOB_A, 0);
    writer.expert_loads(1, Vec::new()).unwrap();
    let id = writer.folder().file_name().unwrap().to_str().unwrap().to_owned();
    let error = folder.remove(&id, false).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&std::process::id().to_string(), "PID"), @"run x-20260131-235959 is still running (process PID); stop it first, or give --force to remove its record anyway");
    std::fs::write(writer.folder().join("notes.txt"), "mine").unwrap();
    drop(writer);
    assert_eq!(folder.remove(&id, false).unwrap(), Some(dir.path().join(&id)));
    assert_eq!(std::fs::read_dir(dir.path().join(&id)).unwrap().count(), 1);
    let writer = open(dir.path(), "y", JOB_A, 0);
    assert_eq!(folder.remove("y-20260131-235959", true).unwrap(), None);
    drop(writer);
    assert_eq!(ids(dir.path()), [""; 0]);
}

#[test]
fn a_disk_that_is_full_ends_the_record_and_no_torn_line_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = open(dir.path(), "x", JOB_A, 0);
    steps(&mut writer, 1..=1);
    writer.events.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = writer.error(1, "x").unwrap_err().to_string();
    assert!(error.starts_with("cannot write ") && error.contains("No space left"), "{error}");
}
