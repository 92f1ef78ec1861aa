//! Tests of the sweeps that the dashboard shows, with folders that the tool's own code has written.
#![allow(clippy::unwrap_used)]

use super::super::folder::StoredSweep;
use super::*;
use crate::dashboard::{Dashboard, ServedFolder};
use candle_zero::sweep::SweepDecision;
use serde_json::Map;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};

fn definition() -> Map<String, Value> {
    let definition = json!({
        "command": ["finetune", "model"], "metric": "loss", "steps": 8, "trials": 6, "scheduler": "asha",
        "asha": {"min_steps": 1, "eta": 2},
        "parameters": {"--lr": {"log_uniform": [1e-5, 1e-3]}, "<b>x": ["<i>", "</script>", 3]},
    });
    definition.as_object().unwrap().clone()
}

/// Writes a sweep as the tool does, with one trial at a time, and returns it at its end.
fn write_sweep(path: &Path) -> Sweep {
    std::fs::create_dir_all(path).unwrap();
    let folder = SweepFolder::at(path).unwrap();
    let stored = StoredSweep { definition: definition(), directory: "/work".into(), configuration: Value::Null };
    folder.store(&stored).unwrap();
    let settings = SweepDefinition::new("test", &definition()).unwrap().settings;
    let (mut journal, replayed) = Journal::open(&folder.journal(), Sweep::new(settings).unwrap()).unwrap();
    journal.add(&JournalEvent::Begin { parallel: 1 }).unwrap();
    let mut sweep = replayed.sweep;
    while let SweepDecision::Train(job) = sweep.ask() {
        let (trial, to) = (job.trial, job.to);
        let result = match trial {
            2 => Err("no <data>".to_owned()),
            3 => Ok(f64::NAN),
            trial => Ok(1.0 / trial as f64 + 1.0 / to as f64),
        };
        journal.add(&JournalEvent::Start(job)).unwrap();
        journal.add(&JournalEvent::End { trial, to, result: result.clone() }).unwrap();
        journal.add(&JournalEvent::Take { trial }).unwrap();
        sweep.tell(trial, result).unwrap();
    }
    sweep
}

fn read(reader: &DashboardSweepReader) -> Value {
    reader.read(&reader.locations()[0]).unwrap()
}

fn trial(view: &Value, number: usize) -> Value {
    let mut trials = view["trials"].as_array().unwrap().iter();
    trials.find(|trial| trial["trial"] == number).unwrap().clone()
}

#[test]
fn the_page_gets_the_trials_as_the_sweep_knows_them() {
    let dir = tempfile::tempdir().unwrap();
    let sweep = write_sweep(dir.path());
    let view = read(&DashboardSweepReader::new(dir.path()));
    assert_eq!(view["best"], sweep.best().unwrap().number);
    assert_eq!(view["trials"][0]["trial"], view["best"]);
    assert_eq!(view["trials"].as_array().unwrap().len(), sweep.trials().len());
    for expected in sweep.trials() {
        let values: Vec<&Value> = expected.parameters.iter().map(|(_, value)| value).collect();
        let found = trial(&view, expected.number);
        assert_eq!((found["state"].as_str(), &found["values"]), (Some(expected.state.name()), &json!(values)));
        assert_eq!((found["step"].as_u64(), found["run"].as_str().unwrap().len()), (Some(expected.reached()), 10));
    }
    assert_eq!((&trial(&view, 2)["error"], &trial(&view, 3)["value"]), (&json!("no <data>"), &json!("NaN")));
    let lr = json!({"name": "--lr", "kind": "log_uniform", "low": 1e-5, "high": 1e-3, "log": true});
    let choice = json!({"name": "<b>x", "kind": "choice", "values": ["<i>", "</script>", 3]});
    assert_eq!(view["parameters"], json!([lr, choice]));
    assert!(view["problem"].is_null() && view["failed"] == 1 && view["running"] == 0);
    assert_eq!(view["best_so_far"]["steps"], sweep.steps_done());
    let improvements = view["best_so_far"]["improvements"].as_array().unwrap();
    let lowest = sweep.trials().iter().flat_map(|trial| &trial.results).map(|result| result.1).fold(9.0, f64::min);
    assert_eq!(improvements.last().unwrap()["value"], lowest);
    assert!(improvements.windows(2).all(|pair| pair[0]["value"].as_f64() > pair[1]["value"].as_f64()));
}

#[test]
fn a_journal_that_grows_is_read_as_if_it_were_read_anew() {
    let dir = tempfile::tempdir().unwrap();
    write_sweep(dir.path());
    let journal = dir.path().join("journal.jsonl");
    let bytes = std::fs::read(&journal).unwrap();
    let reader = DashboardSweepReader::new(dir.path());
    let mut running = 0;
    for cut in (0..bytes.len()).step_by(17).chain([bytes.len(), 100]) {
        std::fs::write(&journal, &bytes[..cut]).unwrap();
        let view = read(&reader);
        assert_eq!(view, read(&DashboardSweepReader::new(dir.path())), "cut at {cut}");
        assert!(view["problem"].is_null(), "{view}");
        running += view["running"].as_u64().unwrap();
    }
    assert!(running > 0);
    std::fs::remove_file(&journal).unwrap();
    assert_eq!(read(&reader)["begun"], 0);
}

#[test]
fn a_running_trial_has_its_host_even_after_a_damaged_line() {
    let dir = tempfile::tempdir().unwrap();
    write_sweep(dir.path());
    let journal = dir.path().join("journal.jsonl");
    let text = std::fs::read_to_string(&journal).unwrap();
    let start = text.lines().nth(1).unwrap();
    let place = r#"{"event":"place","trial":1,"host":"worker-1"}"#;
    for (begin, is_damaged) in [(start.to_owned(), false), (format!("{start}\nx"), true)] {
        std::fs::write(&journal, format!("{begin}\n{place}\n")).unwrap();
        let view = read(&DashboardSweepReader::new(dir.path()));
        assert_eq!(trial(&view, 1)["host"], "worker-1", "{view}");
        assert_eq!(view["problem"].is_string(), is_damaged, "{view}");
    }
    std::fs::write(&journal, format!("{place}\n")).unwrap();
    let view = read(&DashboardSweepReader::new(dir.path()));
    assert!(view["problem"].as_str().unwrap().contains("line 1 places a trial that is not running"), "{view}");
    // The end of the trial is the end of its time on the host.
    let end = text.lines().nth(2).unwrap();
    std::fs::write(&journal, format!("{start}\n{place}\n{end}\n")).unwrap();
    assert_eq!(trial(&read(&DashboardSweepReader::new(dir.path())), 1)["host"], Value::Null);
}

#[test]
fn a_damaged_line_is_named_and_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let sweep = write_sweep(dir.path());
    let journal = dir.path().join("journal.jsonl");
    let text = std::fs::read_to_string(&journal).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let undamaged = read(&DashboardSweepReader::new(dir.path()));
    for (at, line) in lines.iter().enumerate() {
        let mut changed = lines.clone();
        changed[at] = "{\"event\":\"<unknown>\"}";
        std::fs::write(&journal, changed.join("\n") + "\n").unwrap();
        let view = read(&DashboardSweepReader::new(dir.path()));
        let problem = view["problem"].as_str().unwrap();
        assert!(problem.contains(&format!("journal.jsonl: line {} is damaged", at + 1)), "{problem}");
        let line: Value = serde_json::from_str(line).unwrap();
        for expected in sweep.trials() {
            let (before, after) = (trial(&undamaged, expected.number), trial(&view, expected.number));
            if line["event"] != "end" || line["trial"] != expected.number {
                let facts = |trial: &Value| (trial["step"].clone(), trial["value"].clone(), trial["state"].clone());
                assert_eq!(facts(&after), facts(&before), "line {}", at + 1);
            }
            assert!(after["values"].is_null() || after["values"] == before["values"]);
        }
    }
    let other = "{\"event\":\"start\",\"trial\":1,\"from\":0,\"to\":3}\n{\"event\":\"take\",\"trial\":9}\nxx\n";
    std::fs::write(&journal, other).unwrap();
    let view = read(&DashboardSweepReader::new(dir.path()));
    let problem = view["problem"].as_str().unwrap();
    let problem = problem.replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(problem, @"DIR/journal.jsonl: line 1 starts a trial that this sweep would not start; the contents of the other lines are shown, but the parameters of trials that begin later are unknown; the journal has 1 more damaged line");
    assert_eq!((&trial(&view, 1)["state"], &trial(&view, 1)["values"]), (&json!("running"), &Value::Null));
}

#[test]
fn a_sweep_is_found_from_its_folder_its_runs_and_the_folder_that_contains_it() {
    let dir = tempfile::tempdir().unwrap();
    let sweep_folder = dir.path().join("lr");
    assert!(DashboardSweepReader::new(&sweep_folder).locations().is_empty());
    write_sweep(&sweep_folder);
    std::fs::create_dir(dir.path().join("other")).unwrap();
    let location = |runs: Option<PathBuf>, prefix: &str| SweepLocation {
        name: "lr".into(),
        folder: sweep_folder.clone(),
        runs,
        prefix: prefix.into(),
    };
    let runs = sweep_folder.join("runs");
    assert_eq!(DashboardSweepReader::new(&sweep_folder).locations(), [location(Some(runs.clone()), "")]);
    assert_eq!(DashboardSweepReader::new(&runs).locations(), [location(None, "")]);
    assert_eq!(DashboardSweepReader::new(dir.path()).locations(), [location(Some(runs), "lr/")]);
    assert!(DashboardSweepReader::new(&sweep_folder.join("trials")).locations().is_empty());
}

fn get(dashboard: &Dashboard, path: &str) -> (u16, String) {
    let link = dashboard.link();
    let port = link.rsplit_once(':').unwrap().1.split_once('/').unwrap().0.parse().unwrap();
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    client.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn the_dashboard_serves_sweeps_with_the_runs_of_their_trials() {
    let dir = tempfile::tempdir().unwrap();
    write_sweep(&dir.path().join("<lr>"));
    let run = "trial-0001-20260131-235959";
    std::fs::create_dir_all(dir.path().join("<lr>/runs").join(run)).unwrap();
    std::fs::write(dir.path().join("<lr>/runs").join(run).join("run.json"), "{\"format\":1,\"name\":\"t\"}").unwrap();
    std::fs::create_dir(dir.path().join("wrong")).unwrap();
    std::fs::write(dir.path().join("wrong/sweep.json"), "{").unwrap();
    let (folder, sweeps) = (ServedFolder::new(dir.path()), Box::new(DashboardSweepReader::new(dir.path())));
    let dashboard = Dashboard::serve(folder, Some(sweeps), (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let ok = |path: &str| -> Value {
        let (status, body) = get(&dashboard, path);
        assert!(status == 200 && !body.contains('<'), "{status} {body}");
        serde_json::from_str(&body).unwrap()
    };
    let list = ok("/api/runs");
    assert_eq!((&list["sweeps"], list["runs"].as_array().unwrap().len()), (&json!(["<lr>", "wrong"]), 1));
    assert_eq!(list["runs"][0]["id"], format!("<lr>/{run}"));
    assert_eq!(ok(&format!("/api/run?id=%3Clr%3E/{run}"))["run"]["id"], format!("<lr>/{run}"));
    assert_eq!(ok(&format!("/api/metrics?id=%3Clr%3E/{run}"))["id"], format!("<lr>/{run}"));
    let sweep = ok("/api/sweep?name=%3Clr%3E");
    assert_eq!((&sweep["prefix"], sweep["trials"].as_array().unwrap().len()), (&json!("<lr>/"), 6));
    let version = sweep["version"].as_str().unwrap();
    assert_eq!(ok(&format!("/api/sweep?name=%3Clr%3E&known={version}"))["unchanged"], true);
    let (status, body) = get(&dashboard, "/api/sweep?name=wrong");
    assert!(status == 500 && body.contains("sweep.json is damaged"), "{status} {body}");
    for path in [
        "/api/sweep?name=other".to_owned(),
        "/api/sweep".to_owned(),
        format!("/api/run?id={run}"),
        format!("/api/run?id=%3Clr%3E/runs/{run}"),
        format!("/api/run?id=%3Clr%3E/../runs/{run}"),
        "/api/run?id=%3Clr%3E/..".to_owned(),
        "/api/run?id=%3Clr%3E/".to_owned(),
        format!("/api/live?run=%3Clr%3E/{run}x@0.0.0.0.0"),
    ] {
        assert_eq!(get(&dashboard, &path).0, 404, "{path}");
    }
}
