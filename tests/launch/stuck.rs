//! Jobs that are asked to end while they cannot continue, because no one reads their output or because starting them
//! takes a long time.

use std::process::{Child, ExitStatus};
use std::time::Duration;

use crate::support::processes::{
    as_program, pids, program, repository, runs, send, start, stderr, wait_for, wait_until_gone, zerorun,
};
use candle_zero::comm;
use candle_zero::comm::RankEnv;
use rustix::process::Signal;

/// Waits for the end of a process whose pipes are not read.
fn end_of(child: &mut Child) -> ExitStatus {
    wait_for("zerorun to end", || child.try_wait().unwrap())
}

/// Returns the number of unread bytes in a pipe.
fn unread(pipe: &impl std::os::fd::AsFd) -> u64 {
    rustix::io::ioctl_fionread(pipe).unwrap()
}

/// Waits until a pipe is full.
fn wait_until_full(pipe: &impl std::os::fd::AsFd) {
    let mut last = 0;
    wait_for("a full pipe", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = unread(pipe);
        let is_full = now > 0 && now == last;
        last = now;
        is_full.then_some(())
    });
}

#[test]
fn a_job_whose_output_nobody_reads_ends_with_a_signal() {
    for (signals, ranks) in [(&[Signal::TERM][..], "2"), (&[Signal::INT, Signal::INT], "2"), (&[Signal::TERM], "1")] {
        let dir = tempfile::tempdir().unwrap();
        // Neither stream is read, so there is no room for zerorun's message, either.
        let program = program(
            dir.path(),
            "talks",
            "echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK\nyes >&2 &\nexec yes",
        );
        let mut child = start(zerorun().args(["-n", ranks]).arg(&program).env("DIR", dir.path()));
        let ranks = pids(dir.path(), ranks.parse().unwrap());
        wait_until_full(child.stdout.as_ref().unwrap());
        wait_until_full(child.stderr.as_ref().unwrap());
        for signal in signals {
            send(*signal, &child);
            // The same signal sent twice in quick succession counts once.
            std::thread::sleep(Duration::from_millis(300));
        }
        let code = end_of(&mut child).code();
        assert_eq!(code, Some(128 + signals[0].as_raw()));
        wait_until_gone(&ranks);
    }
}

#[test]
fn a_signal_after_the_last_rank_has_ended_ends_the_wait_for_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "talks", "head -c 300000 /dev/zero | tr '\\0' '\\n'; echo $$ > $DIR/pid.$RANK");
    let mut child = start(zerorun().args(["-n", "2"]).arg(&program).env("DIR", dir.path()));
    wait_until_full(child.stdout.as_ref().unwrap());
    assert_eq!(child.try_wait().unwrap(), None, "a reader may still appear");
    send(Signal::TERM, &child);
    assert!(!end_of(&mut child).success());
}

#[test]
fn a_slow_reader_gets_every_line() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "talks", "i=0; while [ $i -lt 9000 ]; do echo line $i; i=$((i+1)); done");
    let child = start(zerorun().args(["-n", "2"]).arg(&program));
    wait_until_full(child.stdout.as_ref().unwrap());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap().lines().count()), (Some(0), 18_000));
}

#[test]
fn output_that_cannot_be_written_is_an_error_with_a_message() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "talks", "echo hello; exit 0");
    let train_gpt = repository().join("examples/train_gpt.rs").display().to_string();
    for (words, code) in [
        (vec!["-n", "2", program.to_str().unwrap()], 1),
        (vec!["schema"], 2),
        (vec!["report"], 1),
        (vec!["--print_package", &train_gpt], 1),
    ] {
        let output = zerorun().args(&words).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", stderr(&output));
        let message = "zerorun: cannot write to standard output: No space left on device (os error 28)\n";
        assert!(stderr(&output).ends_with(message), "{words:?}: {}", stderr(&output));
    }
}

#[test]
fn a_signal_during_the_start_of_many_ranks_is_obeyed_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "busy", "echo $$ > $DIR/pid.$RANK; while :; do :; done");
    let child = start(zerorun().args(["-n", "1000"]).arg(&program).env("DIR", dir.path()));
    let started = || std::fs::read_dir(dir.path()).unwrap().count() - 1;
    wait_for("some ranks", || (started() >= 8).then_some(()));
    send(Signal::TERM, &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    let ranks = started();
    assert!(ranks < 500, "{ranks} ranks were started");
    let remaining: Vec<i32> = std::fs::read_dir(dir.path())
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path()).ok()?.trim().parse().ok())
        .filter(|pid| runs(*pid))
        .collect();
    wait_until_gone(&remaining);
}

#[test]
#[ignore = "started on each rank by the next test"]
fn as_one_of_many() {
    let Ok(role) = std::env::var("LAUNCH_TEST_ROLE") else { return };
    let env = RankEnv::from_env().unwrap();
    let communicator = comm::from_env(&env).unwrap();
    communicator.barrier().wait().unwrap();
    if env.rank == 70 && role == "one fails" {
        communicator.abort("it has no data");
        std::process::exit(3);
    }
    let Err(error) = communicator.barrier().wait() else { return };
    eprintln!("told: {error}");
    std::process::exit(5);
}

fn many(role: &str) -> std::process::Output {
    let program = std::env::current_exe().unwrap();
    let mut command = zerorun();
    command.args(["-n", "100"]).arg(program).args(as_program(module_path!(), "as_one_of_many"));
    command.env("LAUNCH_TEST_ROLE", role).output().unwrap()
}

#[test]
fn many_ranks_meet_and_each_names_the_first_failure_alone() {
    let well = many("well");
    assert_eq!(well.status.code(), Some(0), "{}", stderr(&well));
    let failed = many("one fails");
    assert_eq!(failed.status.code(), Some(3), "{}", stderr(&failed));
    let errors = stderr(&failed);
    let reports: Vec<&str> = errors.lines().filter(|line| line.contains("told: ")).collect();
    assert!(!reports.is_empty());
    for line in reports {
        assert!(line.contains("told: rank 70 stopped (it has no data) while rank"), "{line}");
    }
}
