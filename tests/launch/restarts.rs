//! `zerorun --max_restarts`: which jobs restart, with which settings, and what a failed start leaves behind.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use crate::support::processes::{
    as_program, pids, program, runs, send, start, stderr, stdout, wait_for, wait_until_gone, zerorun,
};
use candle_zero::comm;
use candle_zero::comm::RankEnv;
use candle_zero::precision::Flat;
use rustix::process::Signal;

/// A script that writes the number of ranks to `$DIR/start.N.R` for rank R of start N.
const NOTE: &str = "echo $WORLD_SIZE > $DIR/start.$ZERORUN_RESTART.$RANK";

/// A program, and the folder that its ranks write to.
struct Script {
    dir: tempfile::TempDir,
    path: PathBuf,
}

impl Script {
    fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = program(dir.path(), "script", &format!("{NOTE}\n{text}"));
        Self { dir, path }
    }

    fn command(&self, options: &str) -> std::process::Command {
        let mut command = zerorun();
        command.args(options.split_whitespace()).arg(&self.path).env("DIR", self.dir.path());
        command
    }

    fn run(&self, options: &str) -> Output {
        self.command(options).output().unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.file(name)).unwrap().trim().to_string()
    }

    /// Returns the number of ranks at each start.
    fn worlds(&self) -> Vec<usize> {
        let count = |start: usize| (0..8).filter(|rank| self.file(&format!("start.{start}.{rank}")).exists()).count();
        (0..).map(count).take_while(|ranks| *ranks > 0).collect()
    }
}

/// Returns the messages of `zerorun` itself, without the warning about too few cores. "T" replaces the time until the
/// failure.
fn messages(output: &Output) -> Vec<String> {
    let errors = stderr(output);
    let lines = errors.lines().filter(|line| line.starts_with("zerorun: ") && !line.contains("warning"));
    lines
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let is_time = |at: usize| at > 0 && words[at - 1] == "after";
            words
                .iter()
                .enumerate()
                .map(|(at, word)| if is_time(at) { "T" } else { word })
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect()
}

#[test]
fn a_job_that_fails_twice_goes_well_at_the_third_start() {
    let script = Script::new(
        "stat -L -c %i /proc/self/fd/$CANDLE_ZERO_SHM_FD > $DIR/shm.$ZERORUN_RESTART\n\
         echo $MASTER_PORT > $DIR/port.$ZERORUN_RESTART\n\
         [ $RANK = 1 ] && [ $ZERORUN_RESTART -lt 2 ] && exit 7\n\
         while [ $ZERORUN_RESTART -lt 2 ]; do sleep 0.02; done\n\
         echo $ZERORUN_RESTART $TORCHELASTIC_RESTART_COUNT $WORLD_SIZE",
    );
    let output = script.run("-n 2 --max_restarts 3");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(
        messages(&output),
        [
            "zerorun: rank 1 failed first: it ended with exit code 7 after T s; restart 1 of 3 with 2 ranks in 0.2 s",
            "zerorun: rank 1 failed first: it ended with exit code 7 after T s; restart 2 of 3 with 2 ranks in 0.4 s",
        ]
    );
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 2 2 2", "[rank 1] 2 2 2"]);
    assert_eq!(script.worlds(), [2, 2, 2]);
    let distinct = |name: &str| (0..3).map(|start| script.read(&format!("{name}.{start}"))).collect::<BTreeSet<_>>();
    assert_eq!(distinct("shm").len(), 3, "each start has its own shared memory");
    assert!(distinct("port").len() > 1, "{:?}", distinct("port"));
}

#[test]
fn a_port_that_was_given_stays() {
    let script = Script::new("echo $MASTER_PORT; [ $ZERORUN_RESTART = 1 ]");
    let output = script.run("--max-restarts 1 --master_port 4711");
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "4711\n4711\n"));
}

#[test]
#[ignore = "started on each rank by the next test"]
fn as_a_rank() {
    if std::env::var_os("LAUNCH_TEST_ROLE").is_none() {
        return;
    }
    let env = RankEnv::from_env().unwrap();
    let communicator = comm::from_env(&env).unwrap();
    let sum = || communicator.all_reduce(Flat::F32(vec![env.rank as f32 + 1.0; 3]), 0).wait();
    assert!(matches!(sum().unwrap(), Flat::F32(sum) if sum == [3.0; 3]));
    if env.rank == 1 && std::env::var("ZERORUN_RESTART").unwrap() == "0" {
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
    sum().unwrap();
}

#[test]
fn after_a_rank_was_killed_the_ranks_of_the_restart_work_together() {
    let program = std::env::current_exe().unwrap();
    let mut command = zerorun();
    command.args(["-n", "2", "--max_restarts", "1"]).arg(program).args(as_program(module_path!(), "as_a_rank"));
    let output = command.env("LAUNCH_TEST_ROLE", "yes").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(
        messages(&output),
        ["zerorun: rank 1 failed first: it was killed by SIGKILL (9) after T s; restart 1 of 1 with 2 ranks in 0.2 s"]
    );
}

#[test]
fn when_the_restarts_are_used_up_the_last_run_gives_the_exit_code_and_the_report() {
    let script = Script::new("echo \"Error: start $ZERORUN_RESTART\" >&2; exit $((10 + ZERORUN_RESTART))");
    let output = script.run("--max_restarts 2");
    assert_eq!(output.status.code(), Some(12));
    assert_eq!(
        messages(&output),
        [
            "zerorun: rank 0 failed: it ended with exit code 10 after T s; restart 1 of 2 with 1 rank in 0.2 s",
            "zerorun: rank 0 failed: it ended with exit code 11 after T s; restart 2 of 2 with 1 rank in 0.4 s",
            "zerorun: rank 0 failed: it ended with exit code 12 after T s",
            "zerorun: no restarts are left: --max_restarts 2 is exhausted",
        ]
    );
    assert_eq!(script.worlds(), [1, 1, 1]);
    let output = Script::new("kill -SEGV $$").run("-n 2 --max_restarts 1");
    assert_eq!(output.status.code(), Some(139), "{}", stderr(&output));
}

#[test]
fn without_the_option_nothing_is_restarted() {
    let script = Script::new("exit 3");
    let output = script.run("");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(messages(&output), ["zerorun: rank 0 failed: it ended with exit code 3 after T s"]);
    assert_eq!(script.worlds(), [1]);
}

#[test]
fn a_job_that_keeps_failing_at_its_start_goes_on_with_fewer_ranks() {
    let script = Script::new("[ $WORLD_SIZE = 1 ]");
    let output = script.run("-n 2 --max_restarts 5 --min_ranks 1");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(script.worlds(), [2, 2, 1]);
    let last = messages(&output).pop().unwrap();
    assert!(
        last.ends_with("; restart 2 of 5 with 1 rank (two starts with 2 ranks failed within 10 s) in 0.4 s"),
        "{last}"
    );
}

#[test]
fn there_are_never_fewer_ranks_than_allowed() {
    let script = Script::new("exit 1");
    let output = script.run("-n 3 --max_restarts 4 --min_ranks 2");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(script.worlds(), [3, 3, 2, 2, 2]);
    assert!(stderr(&output).matches("warning").count() <= 1, "{}", stderr(&output));
}

/// Waits for a line with `words` on the launcher's stderr, and returns the reader for the lines that follow.
fn read_until(stderr: impl Read, words: &str) -> impl BufRead {
    let mut reader = BufReader::new(stderr);
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "no line with {words}");
    }
    reader
}

#[test]
fn an_interrupt_between_two_starts_ends_the_job_at_once() {
    let script = Script::new("exit 3");
    let mut child = start(&mut script.command("--max_restarts 9"));
    let mut errors = read_until(child.stderr.take().unwrap(), "restart 5 of 9 with 1 rank in 3.2 s");
    // Between two starts, there is no process to which a program-specific signal could be passed on.
    send(Signal::USR1, &child);
    send(Signal::INT, &child);
    let sent = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(sent.elapsed() < Duration::from_secs(2), "{:?}", sent.elapsed());
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "zerorun: stopped by SIGINT (2)\n");
    assert_eq!(script.worlds(), [1; 5]);
}

#[test]
fn a_job_that_was_ended_by_a_signal_is_not_restarted() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let script = Script::new("echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; exec sleep 100");
        let child = start(&mut script.command("-n 2 --max_restarts 5"));
        let ranks = pids(script.dir.path(), 2);
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert_eq!(script.worlds(), [2]);
        assert!(ranks.iter().all(|rank| !runs(*rank)));
    }
}

#[test]
fn an_interrupt_while_a_failure_is_cleared_away_forbids_the_restart() {
    let script = Script::new("[ $RANK = 1 ] && exit 3; trap 'touch $DIR/asked' TERM; while :; do sleep 0.02; done");
    let child = start(&mut script.command("-n 2 --max_restarts 5"));
    wait_for("SIGTERM to rank 0", || script.file("asked").exists().then_some(()));
    send(Signal::INT, &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(messages(&output).pop().unwrap(), "zerorun: not restarted because of SIGINT (2)");
    assert_eq!(script.worlds(), [2]);
}

#[test]
fn what_cannot_be_started_is_not_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let broken = program(dir.path(), "no_interpreter", "");
    std::fs::write(&broken, "#!/no/such/shell\n").unwrap();
    let output = zerorun().args(["--max_restarts", "3"]).arg(&broken).output().unwrap();
    assert_eq!((output.status.code(), messages(&output).len()), (Some(2), 1), "{}", stderr(&output));
    // The same applies to a program that can be started once, but not again.
    let output = Script::new("rm $0; exit 3").run("--max_restarts 3");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(messages(&output).len(), 2, "{}", stderr(&output));
    assert!(messages(&output)[1].starts_with("zerorun: cannot start rank 0"), "{}", stderr(&output));
}

fn names_in(dir: &Path) -> BTreeSet<std::ffi::OsString> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn no_start_leaves_a_process_or_shared_memory() {
    let shared_memory = names_in(Path::new("/dev/shm"));
    // At each start, rank 0 and its helper sleep. Rank 1 waits until they run, and then fails.
    let script = Script::new(
        "me=$ZERORUN_RESTART\n\
         if [ $RANK = 1 ]; then\n\
           while [ ! -e $DIR/pid.rank.$me ]; do sleep 0.02; done; exit 3\n\
         fi\n\
         sleep 100 & echo $! > $DIR/pid.helper.$me\n\
         echo $$ > $DIR/new.$me; mv $DIR/new.$me $DIR/pid.rank.$me; exec sleep 100",
    );
    // When a start begins, no process of the previous one may still be running.
    let mut child = start(&mut script.command("-n 2 --max_restarts 1"));
    let of_first: Vec<i32> = wait_for("the first start", || {
        script
            .file("pid.rank.0")
            .exists()
            .then(|| ["pid.rank.0", "pid.helper.0"].map(|name| script.read(name).parse().unwrap()).to_vec())
    });
    wait_for("the second start", || script.file("start.1.0").exists().then_some(()));
    assert!(of_first.iter().all(|pid| !runs(*pid)));
    assert_eq!(child.wait().unwrap().code(), Some(3));
    wait_until_gone(&pids(script.dir.path(), 4));
    wait_for("/dev/shm to be as before", || names_in(Path::new("/dev/shm")).is_subset(&shared_memory).then_some(()));
}

#[test]
fn the_launcher_holds_no_more_open_files_after_restarts() {
    let script = Script::new("sleep 0.3; [ $RANK = 0 ] && ls /proc/$PPID/fd | wc -l; sleep 0.2; exit 1");
    let output = script.run("-n 2 --max_restarts 2");
    let text = stdout(&output);
    let counts: Vec<&str> = text.lines().collect();
    assert_eq!(counts, [counts[0]; 3]);
}

#[test]
fn killing_zerorun_after_a_restart_leaves_no_rank() {
    let script = Script::new(
        "[ $ZERORUN_RESTART = 0 ] && exit 1\n\
         echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; exec sleep 100",
    );
    let mut child = start(&mut script.command("-n 2 --max_restarts 1"));
    let ranks = pids(script.dir.path(), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until_gone(&ranks);
}
