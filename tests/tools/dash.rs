//! `zerorun dash` and `--dashboard`: the page of a job, requests to the page, and what the job's record says about its
//! ranks. The page itself is tested in a browser, by `scripts/test_dashboard.py`.

use crate::support::processes::{as_program, send, start, stderr, wait_for, zerorun};
use candle_core::{DType, Tensor};
use candle_nn::Module as _;
use candle_zero::Engine;
use candle_zero::runs::{RecordedRun, RecordedState, RunRequest, RunsFolder};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

#[test]
#[ignore = "a program that other tests start"]
fn trains_until_it_is_asked_to_stop() {
    let zero = json!({"stage": 2});
    let config =
        json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero});
    let builder = Engine::builder().gradient_check(false);
    let mut engine = builder.initialize(|vb| candle_nn::linear(4, 1, vb), config).unwrap();
    let x = Tensor::ones((1, 4), DType::F32, engine.device()).unwrap();
    println!("hello from {}", engine.rank());
    while !engine.stop_requested().unwrap() {
        let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all()).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        if engine.save_requested() {
            engine.save_checkpoint(std::env::var("TEST_SAVE").unwrap(), None, Value::Null).unwrap();
        }
    }
    // Both ranks have stopped after the same step. Otherwise, the gather would wait until the timeout.
    let steps = engine.gather_f64(&[engine.global_steps() as f64]).unwrap();
    assert_eq!(steps[0], steps[1]);
}

/// Starts the program on two ranks.
fn job(folder: &Path, flags: &[&str]) -> Child {
    let mut command = zerorun();
    command.args(["-n", "2", "--timeout", "60s", "--runs"]).arg(folder.join("runs")).args(flags);
    command.arg(std::env::current_exe().unwrap()).args(as_program(module_path!(), "trains_until_it_is_asked_to_stop"));
    command.env("TEST_SAVE", folder.join("saved")).env_remove("CANDLE_ZERO_RUNS_DIR");
    start(&mut command)
}

/// Returns the only run, once all ranks have reported and the program has checked for requests.
fn reported(folder: &Path) -> (RecordedRun, Value) {
    wait_for("a report of the ranks", || {
        let runs = RunsFolder::find(Some(folder.join("runs"))).runs().ok()?;
        let run = runs.into_iter().next()?.run.ok()?;
        let ranks = run.ranks().ok()??;
        (ranks["answers"] == json!(["save", "stop"])).then_some((run, ranks))
    })
}

fn output_of(job: Child) -> Output {
    job.wait_with_output().unwrap()
}

fn text(run: &RecordedRun, name: &str) -> String {
    std::fs::read_to_string(run.folder().join(name)).unwrap_or_default()
}

#[test]
fn a_job_saves_and_stops_on_request_on_all_ranks_after_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &["--run", "asked"]);
    let (run, ranks) = reported(dir.path());
    let of_rank = |rank: usize, key: &str| ranks["ranks"][rank][key].as_f64().unwrap();
    for rank in 0..2 {
        assert!(of_rank(rank, "rss_bytes") > 1e6 && of_rank(rank, "forward_ms") > 0.0);
        assert!(ranks["ranks"][rank]["memory"]["parameters"]["held"].as_u64() > Some(0));
    }
    assert_ne!(of_rank(0, "pid"), of_rank(1, "pid"));
    run.request(RunRequest::Save).unwrap();
    wait_for("a checkpoint", || dir.path().join("saved/latest").exists().then_some(()));
    run.request(RunRequest::Stop).unwrap();
    let output = output_of(job);
    assert!(output.status.success(), "{}", stderr(&output));
    let run = RecordedRun::open(run.folder()).unwrap();
    assert_eq!(run.state(), RecordedState::Stopped);
    let events = run.events().unwrap();
    let requests: Vec<&Value> =
        events.iter().filter(|event| event["event"] == "request").map(|event| &event["request"]).collect();
    assert_eq!(requests, ["save", "stop"]);
    assert_eq!(events.iter().filter(|event| event["event"] == "checkpoint").count(), 1);
    let launch = run.launch_events().unwrap();
    let ends: Vec<&Value> =
        launch.iter().filter(|event| event["event"] == "rank").map(|event| &event["outcome"]).collect();
    assert_eq!(ends, ["ended", "ended"]);
    let log = text(&run, "log.txt");
    for rank in 0..2 {
        let hello = format!("hello from {rank}");
        assert!(log.lines().any(|line| line.contains(&format!(" [rank {rank}] ")) && line.ends_with(&hello)), "{log}");
    }
    assert!(RunRequest::ALL.iter().all(|request| !run.folder().join(format!("{}.request", request.name())).exists()));
}

#[test]
fn the_record_says_which_rank_was_killed_and_the_others_were_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &["--run", "killed"]);
    let (run, ranks) = reported(dir.path());
    let pid = Pid::from_raw(ranks["ranks"][1]["pid"].as_i64().unwrap() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    assert!(!output_of(job).status.success());
    let launch = run.launch_events().unwrap();
    let first = launch.iter().find(|event| event["event"] == "rank").unwrap();
    assert_eq!(
        (&first["rank"], &first["outcome"], &first["how"]),
        (&json!(1), &json!("failed"), &json!("was killed by SIGKILL (9)"))
    );
    let failure = launch.iter().find(|event| event["event"] == "failure").unwrap();
    assert!(
        failure["message"].as_str().unwrap().starts_with("rank 1 failed first: it was killed by SIGKILL (9)"),
        "{failure:?}"
    );
    assert_ne!(RecordedRun::open(run.folder()).unwrap().state(), RecordedState::Finished);
}

/// Returns the token and the address in the link that a process prints, and a reader for the process's later output.
fn link(from: impl std::io::Read) -> (String, String, impl BufRead) {
    let mut lines = BufReader::new(from);
    loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "no link was printed");
        if let Some((_, link)) = line.trim_end().split_once("dashboard: http://") {
            let (address, token) = link.split_once("/#token=").unwrap();
            assert_eq!(token.len(), 48);
            return (token.to_owned(), address.to_owned(), lines);
        }
    }
}

fn ask(address: &str, request: &str) -> String {
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(format!("{request}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_job_with_a_dashboard_is_recorded_without_a_name_and_stops_when_its_page_asks() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = job(dir.path(), &["--dashboard", "0"]);
    let (token, address, mut rest) = link(job.stderr.take().unwrap());
    // The launcher continues to write, so its output must be read.
    let rest = std::thread::spawn(move || {
        let mut text = String::new();
        rest.read_to_string(&mut text).map(|_| text)
    });
    let (run, _) = reported(dir.path());
    let list = ask(&address, "GET /api/runs HTTP/1.1\r\nHost: localhost");
    assert!(list.contains(&format!("\"id\":\"{}\"", run.id())), "{list}");
    let request = format!("POST /api/request?id={}&what=stop HTTP/1.1\r\nHost: localhost", run.id());
    assert!(ask(&address, &request).starts_with("HTTP/1.1 403 "));
    assert!(ask(&address, &format!("{request}\r\nAuthorization: Bearer {token}")).starts_with("HTTP/1.1 200 "));
    assert!(job.wait().unwrap().success());
    rest.join().unwrap().unwrap();
    assert_eq!(RecordedRun::open(run.folder()).unwrap().state(), RecordedState::Stopped);
    assert!(TcpStream::connect(&address).is_err(), "the page ends with the job");
}

#[test]
fn dash_serves_a_folder_until_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let folder: PathBuf = dir.path().join("no runs yet");
    let mut dash = start(zerorun().arg("dash").arg(&folder).args(["--port", "0"]));
    let (_, address, _) = link(dash.stdout.take().unwrap());
    let list = ask(&address, "GET /api/runs HTTP/1.1\r\nHost: localhost");
    assert!(list.contains("\"runs\":[],\"sweeps\":[]}"), "{list}");
    send(Signal::TERM, &dash);
    let output = output_of(dash);
    assert!(output.status.success(), "{output:?}");
    let text = stderr(&output).replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(text, @"zerorun: there is no folder DIR/no runs yet yet; the page will show runs as soon as they are recorded there");
}

#[test]
fn a_wrong_command_line_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = |words: &[&str]| {
        let mut command: Command = zerorun();
        let output = command.args(words).current_dir(dir.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = stderr(&output).replace(&port, "PORT");
        text.split("\n\n").next().unwrap_or_default().trim_end().to_owned()
    };
    insta::assert_snapshot!(refused(&["dash", "--port", &port]), @"zerorun: cannot serve the dashboard on 127.0.0.1, port PORT: Address already in use (os error 98); give another port, or 0 for a free one");
    insta::assert_snapshot!(refused(&["dash", "file"]), @"zerorun: cannot read file: Not a directory (os error 20)");
    insta::assert_snapshot!(refused(&["dash", "--bind", "host0"]), @"zerorun: invalid value 'host0' for '--bind <ADDRESS>': give a numeric address of this machine, such as 127.0.0.1, or 0.0.0.0 for all");
    insta::assert_snapshot!(refused(&["dash", "--port", "70000"]), @"zerorun: invalid value '70000' for '--port <PORT>': 70000 is not in 0..=65535");
    insta::assert_snapshot!(refused(&["--dashboard", "x", "train.rs"]), @"zerorun: invalid value 'x' for '--dashboard <[ADDRESS:]PORT>': give a port from 0 to 65535, or a numeric address and a port, for example 8321 or 0.0.0.0:8321");
    insta::assert_snapshot!(refused(&["--dashboard", "0", "--runs", "off", "train.rs"]), @"zerorun: --dashboard shows the record of the run, but --runs or CANDLE_ZERO_RUNS_DIR is off; give a folder in --runs, or leave --dashboard out");
    insta::assert_snapshot!(refused(&["--dashboard", "0", "train.rs"]), @"zerorun: --dashboard shows the record of the run, but --runs or CANDLE_ZERO_RUNS_DIR is off; give a folder in --runs, or leave --dashboard out");
    insta::assert_snapshot!(refused(&["-H", "hosts", "--launcher", "openmpi", "--dashboard", "0", "train.rs"]), @"zerorun: --dashboard is for ranks that zerorun starts, but with --launcher openmpi, mpirun starts them; leave --dashboard out, pass mpirun's equivalent in --launcher_args, or use --launcher ssh");
}
