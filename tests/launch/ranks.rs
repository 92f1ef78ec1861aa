//! `zerorun` with programs that are already built: environment, output, exits.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::processes::{
    as_program, pids, program, runs, send, start, stderr, stdout, wait_for, wait_until_gone, zerorun,
};
use candle_zero::comm;
use candle_zero::comm::RankEnv;
use candle_zero::precision::Flat;
use rustix::process::Signal;

/// A script that writes its process ID and then waits for a signal.
const SLEEPER: &str = "echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; exec sleep 100";

#[test]
fn each_rank_gets_its_environment_and_the_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let script = "for v in RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT \
                  CANDLE_ZERO_TIMEOUT_MS; do eval echo $v=\\$$v; done\n\
                  echo shm=$(stat -L -c %i /proc/self/fd/$CANDLE_ZERO_SHM_FD)\necho args=$#:$*";
    let program = program(dir.path(), "show", script);
    let output = zerorun().args(["-n", "3", "--timeout", "90s"]).arg(&program).args(["--x", "a b", "-n", "9"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let mut values: BTreeMap<(String, String), String> = BTreeMap::new();
    for line in stdout(&output).lines() {
        let (rank, rest) = line.strip_prefix("[rank ").unwrap().split_once("] ").unwrap();
        let (name, value) = rest.split_once('=').unwrap();
        assert_eq!(values.insert((name.to_string(), rank.to_string()), value.to_string()), None, "{line}");
    }
    let value = |name: &str, rank: &str| values[&(name.to_string(), rank.to_string())].clone();
    for rank in ["0", "1", "2"] {
        assert_eq!(value("RANK", rank), rank);
        assert_eq!(value("LOCAL_RANK", rank), rank);
        for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"] {
            assert_eq!(value(name, rank), "3", "{name}");
        }
        assert_eq!(value("MASTER_ADDR", rank), "127.0.0.1");
        assert!(value("MASTER_PORT", rank).parse::<u16>().unwrap() > 0);
        assert_eq!(value("CANDLE_ZERO_TIMEOUT_MS", rank), "90000");
        assert_eq!(value("args", rank), "4:--x a b -n 9");
        for name in ["MASTER_PORT", "shm"] {
            assert_eq!(value(name, rank), value(name, "0"), "all ranks have the same {name}");
        }
    }
}

#[test]
fn the_cores_are_divided_unless_the_user_has_said_how_many() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "show", "echo $RAYON_NUM_THREADS $CANDLE_NUM_THREADS");
    let cores = std::thread::available_parallelism().unwrap().get();
    for ranks in [1, 2, cores + 1] {
        let output = zerorun().args(["-n", &ranks.to_string()]).arg(&program).output().unwrap();
        let threads = (cores / ranks).max(1);
        for line in stdout(&output).lines() {
            assert!(line.ends_with(&format!("{threads} {threads}")), "{line}");
        }
        let warnings = stderr(&output).matches("zerorun: warning:").count();
        assert_eq!(warnings, usize::from(ranks > cores), "{}", stderr(&output));
    }
    let output = zerorun().arg(&program).env("RAYON_NUM_THREADS", "7").output().unwrap();
    assert_eq!(stdout(&output), format!("7 {cores}\n"));
}

#[test]
fn lines_of_several_ranks_come_whole_with_the_rank_in_front() {
    let dir = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 200 ]; do printf 'out %s ' $RANK; printf '%s end\\n' $i; \
                  printf 'err %s ' $RANK >&2; printf '%s end\\n' $i >&2; i=$((i+1)); done; printf 'out %s 200 end' $RANK";
    let program = program(dir.path(), "talk", script);
    let output = zerorun().args(["-n", "2"]).arg(&program).output().unwrap();
    for (text, word, count) in [(stdout(&output), "out", 201), (stderr(&output), "err", 200)] {
        assert!(text.ends_with('\n'));
        for rank in 0..2 {
            let found: Vec<&str> = text.lines().filter(|line| line.starts_with(&format!("[rank {rank}] "))).collect();
            let expected: Vec<String> = (0..count).map(|i| format!("[rank {rank}] {word} {rank} {i} end")).collect();
            assert_eq!(found, expected);
        }
        assert_eq!(text.lines().count(), 2 * count);
    }
}

#[test]
fn one_rank_writes_as_if_there_were_no_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let program =
        program(dir.path(), "talk", "printf '1%%\\r2%%\\r'; printf 'no end'; read line; printf \"$line\" >&2");
    let mut command = zerorun();
    let input = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(input.path(), "typed\n").unwrap();
    let output = command.arg(&program).stdin(input.reopen().unwrap()).output().unwrap();
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("1%\r2%\rno end", "typed"));
}

#[test]
fn a_redrawn_progress_line_becomes_its_last_state_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "bar", "printf '10%%\\r'; printf '\\r90%%\\r'; printf 'done\\nnext\\r\\n'");
    let output = zerorun().args(["-n", "2"]).arg(&program).output().unwrap();
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] done", "[rank 0] next", "[rank 1] done", "[rank 1] next"]);
}

#[test]
fn the_first_failure_gives_the_exit_code_and_all_others_are_stopped_within_5_seconds() {
    let dir = tempfile::tempdir().unwrap();
    // Rank 0 and its helper sleep, rank 1 fails, rank 2 ignores SIGTERM, rank 3 exits before it is stopped, and rank 4
    // is already done.
    let script = format!(
        "case $RANK in\n\
         1) while [ $(ls $DIR/pid.* 2>/dev/null | wc -l) -lt 3 ]; do sleep 0.02; done\n\
            while [ ! -s $DIR/four ] || kill -0 $(cat $DIR/four) 2>/dev/null; do sleep 0.02; done\n\
            touch $DIR/failing; exit 3;;\n\
         2) trap '' TERM; echo $$ > $DIR/pid.2; while :; do sleep 0.1; done;;\n\
         3) while [ ! -e $DIR/failing ]; do sleep 0.02; done; sleep 0.5; exit 9;;\n\
         4) echo $$ > $DIR/four; exit 0;;\n\
         esac\n\
         sleep 100 & echo $! > $DIR/pid.helper\n{SLEEPER}"
    );
    let program = program(dir.path(), "mixed", &script);
    let output = zerorun().args(["-n", "5"]).arg(&program).env("DIR", dir.path()).output().unwrap();
    let failed_at = std::fs::metadata(dir.path().join("failing")).unwrap().modified().unwrap();
    assert!(failed_at.elapsed().unwrap() < Duration::from_secs(5), "{:?}", failed_at.elapsed());
    assert_eq!(output.status.code(), Some(3));
    let errors = stderr(&output);
    let messages: Vec<&str> = errors.lines().filter(|line| !line.contains("warning")).collect();
    let (head, rest) = messages.split_first().unwrap();
    assert!(head.starts_with("zerorun: rank 1 failed first: it ended with exit code 3 after "), "{errors}");
    assert_eq!(
        rest,
        [
            "zerorun:   rank 0: stopped by zerorun with SIGTERM",
            "zerorun:   rank 2: killed by zerorun with SIGKILL (SIGTERM did not help)",
            "zerorun:   rank 3: exit code 9, not stopped by zerorun",
            "zerorun:   rank 4: had already finished",
        ]
    );
    wait_until_gone(&pids(dir.path(), 3));
}

#[test]
fn a_rank_that_is_killed_counts_as_128_and_the_signal() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "die", "kill -SEGV $$");
    let output = zerorun().arg(&program).output().unwrap();
    assert_eq!(output.status.code(), Some(139));
    assert!(stderr(&output).contains("rank 0 failed: it was killed by SIGSEGV (11)"), "{}", stderr(&output));
}

#[test]
fn a_rank_that_ends_well_and_early_stops_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "early", "[ $RANK = 0 ] && exit 0; sleep 0.5; echo late");
    let output = zerorun().args(["-n", "2"]).arg(&program).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "[rank 1] late\n"));
}

#[test]
fn signals_reach_every_rank() {
    for (signal, name, code) in [(Signal::TERM, "TERM", 143), (Signal::INT, "INT", 130), (Signal::HUP, "HUP", 129)] {
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "trap 'echo got {name}; exit 0' {name}; echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; \
             while :; do sleep 0.02; done"
        );
        let program = program(dir.path(), "trap", &script);
        let child = start(zerorun().args(["-n", "2"]).arg(&program).env("DIR", dir.path()));
        let ranks = pids(dir.path(), 2);
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{name}: {}", stderr(&output));
        let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
        lines.sort();
        assert_eq!(lines, [format!("[rank 0] got {name}"), format!("[rank 1] got {name}")]);
        assert!(ranks.iter().all(|rank| !runs(*rank)));
    }
}

#[test]
fn a_second_interrupt_kills_ranks_that_do_not_mind_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let script = "trap 'touch $DIR/got.$RANK' INT; echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; \
                  while :; do sleep 0.02; done";
    let program = program(dir.path(), "stubborn", script);
    let child = start(zerorun().args(["-n", "2"]).arg(&program).env("DIR", dir.path()));
    let ranks = pids(dir.path(), 2);
    send(Signal::INT, &child);
    wait_for("the first interrupt", || (0..2).all(|r| dir.path().join(format!("got.{r}")).exists()).then_some(()));
    assert!(ranks.iter().all(|rank| runs(*rank)), "the first interrupt leaves the choice to the ranks");
    // Signals in quick succession count as one interrupt; see the next test.
    std::thread::sleep(Duration::from_millis(300));
    send(Signal::INT, &child);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(ranks.iter().all(|rank| !runs(*rank)));
}

#[test]
fn a_signal_that_comes_twice_at_once_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let script = "trap 'sleep 0.4; echo saved; exit 0' TERM; echo $$ > $DIR/new; mv $DIR/new $DIR/pid.0; \
                  while :; do sleep 0.02; done";
    let program = program(dir.path(), "saver", script);
    let child = start(zerorun().arg(&program).env("DIR", dir.path()));
    pids(dir.path(), 1);
    send(Signal::TERM, &child);
    send(Signal::TERM, &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(143), "saved\n"));
}

#[test]
fn features_for_what_is_built_already_are_said_to_have_no_effect() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "built", "echo runs");
    let output = zerorun().args(["--features", "cuda"]).arg(&program).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "runs\n"));
    let message = format!("zerorun: --features cuda has no effect: {} is already built\n", program.display());
    assert_eq!(stderr(&output), message);
}

#[test]
fn wrong_things_to_start_are_refused_with_exit_code_2() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("data.json"), "{}").unwrap();
    std::fs::write(dir.path().join("train.rs"), "fn main() {}").unwrap();
    std::fs::write(dir.path().join("open.rs"), "---\n[package]\n").unwrap();
    program(dir.path(), "no_interpreter", "");
    std::fs::write(dir.path().join("no_interpreter"), "#!/no/such/shell\n").unwrap();
    let refusal = |args: &[&str]| {
        let output = zerorun().args(args).current_dir(dir.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert_eq!(stdout(&output), "");
        stderr(&output)
    };
    insta::assert_snapshot!(refusal(&["missing.rs"]), @"zerorun: cannot start missing.rs: there is no such file; give a Rust file (.rs) or an executable");
    insta::assert_snapshot!(refusal(&["chek", "x.json"]), @"zerorun: cannot start chek: there is no such file here and no program with that name on the PATH; did you mean the command `zerorun check`?");
    insta::assert_snapshot!(refusal(&["train"]), @"zerorun: cannot start train: there is no such file here and no program with that name on the PATH; did you mean train.rs?");
    insta::assert_snapshot!(refusal(&["data.json"]), @"zerorun: cannot start data.json: its name does not end in .rs, and it is not executable; give a Rust file (.rs) or an executable");
    insta::assert_snapshot!(refusal(&["."]), @"zerorun: cannot start .: it is a folder; give a Rust file (.rs) or an executable");
    insta::assert_snapshot!(refusal(&["open.rs"]), @"zerorun: open.rs:1: the frontmatter that begins here is not closed; close it with a line `---`");
    insta::assert_snapshot!(refusal(&["--num_ranks", "none", "train.rs"]), @r#"
    zerorun: invalid value 'none' for '--num_ranks <N>': give a number from 1 to 1024, or `auto`, `cpu` or `gpu`

    For more information, try '--help'.
    "#);
    let unstartable = refusal(&["-n", "2", "no_interpreter"]).replace(&dir.path().display().to_string(), "DIR");
    insta::assert_snapshot!(unstartable, @"zerorun: cannot start rank 0 (DIR/no_interpreter): No such file or directory (os error 2)");
}

#[test]
fn version_and_help_go_to_stdout() {
    let version = zerorun().arg("--version").output().unwrap();
    assert_eq!(
        (version.status.code(), stdout(&version)),
        (Some(0), format!("zerorun {}\n", env!("CARGO_PKG_VERSION")))
    );
    let help = zerorun().arg("--help").output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("Examples:") && stdout(&help).contains("--num_ranks"), "{}", stdout(&help));
}

#[test]
#[ignore = "started on each rank by the next test"]
fn as_a_rank() {
    let Ok(role) = std::env::var("LAUNCH_TEST_ROLE") else { return };
    let env = RankEnv::from_env().unwrap();
    let communicator = comm::from_env(&env).unwrap();
    let sum = communicator.all_reduce(Flat::F32(vec![env.rank as f32 + 1.0; 3]), 0).wait().unwrap();
    assert!(matches!(sum, Flat::F32(sum) if sum == [3.0; 3]));
    if role == "joins twice" {
        let again = comm::from_env(&env).unwrap();
        drop(communicator);
        again.barrier().wait().unwrap();
        drop(again);
        // A rank that has no communicator for a moment has not left the job.
        comm::from_env(&env).unwrap().barrier().wait().unwrap();
        return;
    }
    if role == "fails" && env.rank == 1 {
        // The rank ends as in a crash, without a message to the others.
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
    let Err(error) = communicator.barrier().wait() else { return };
    eprintln!("told: {error}");
    std::process::exit(5);
}

fn two_ranks(role: &str) -> std::process::Output {
    let program = std::env::current_exe().unwrap();
    let mut command = zerorun();
    command.args(["-n", "2"]).arg(program).args(as_program(module_path!(), "as_a_rank"));
    command.env("LAUNCH_TEST_ROLE", role).output().unwrap()
}

#[test]
fn ranks_share_memory_and_a_rank_that_dies_is_named_to_the_others() {
    let succeeded = two_ranks("goes well");
    assert_eq!(succeeded.status.code(), Some(0), "{}", stderr(&succeeded));
    let failed = two_ranks("fails");
    assert_eq!(failed.status.code(), Some(137));
    let errors = stderr(&failed);
    assert!(errors.contains("[rank 0] told: rank 1 died (its process was killed by SIGKILL (9))"), "{errors}");
    assert!(errors.contains("zerorun: rank 1 failed first: it was killed by SIGKILL (9)"), "{errors}");
    assert!(errors.contains("zerorun:   rank 0: exit code 5, not stopped by zerorun"), "{errors}");
}

#[test]
fn a_process_that_joins_twice_has_one_communicator_that_stays() {
    let output = two_ranks("joins twice");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}
