//! The recorded cases of DeepSpeed's command line and processes, run with the real `zerorun`.

use crate::support::processes::{
    descendants, free_port, pids, program, runs, start, stderr, stdout, wait_until_gone, zerorun,
};
use crate::support::recorded::launcher_case;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::ExitStatus;

/// A script that writes its process ID and then waits for a signal.
const SLEEPER: &str = "echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; exec sleep 100";

fn words(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn recorded_command_lines_that_are_wrong_are_refused() {
    for id in ["cli-noscript", "cli-badport"] {
        let case = launcher_case(id);
        assert_eq!(case["expect"]["ok"], false, "{id}");
        let dir = tempfile::tempdir().unwrap();
        program(dir.path(), "t.py", "touch started");
        let output = zerorun().args(words(&case["input"]["argv"])).current_dir(dir.path()).output().unwrap();
        // Python also ends with this code if the command line is invalid.
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{id}: {}", stderr(&output));
        assert!(!dir.path().join("started").exists(), "{id}");
    }
}

#[test]
fn an_option_of_deepspeeds_for_what_is_a_tool_here_is_refused_and_not_taken_for_a_script() {
    let output = zerorun().args(words(&launcher_case("cli-autotune")["input"]["argv"])).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("zerorun: unexpected argument '--autotuning' found"), "{}", stderr(&output));
}

#[test]
fn ranks_have_the_recorded_environment_and_arguments() {
    let case = launcher_case("proc-args");
    let expected = case["expect"]["env_rank1"].as_object().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let argv = words(&case["input"]["argv"]);
    program(dir.path(), &argv[0], "env | sed 's/^/env /'; for word; do echo word $word; done");
    let mut command = zerorun();
    command.args(["-n", &case["input"]["ranks"].to_string()]).arg(format!("./{}", argv[0])).args(&argv[1..]);
    let output = command.current_dir(dir.path()).output().unwrap();
    let lines = stdout(&output);
    let of_rank = |rank: usize, kind: &str| -> Vec<String> {
        let start = format!("[rank {rank}] {kind} ");
        lines.lines().filter_map(|line| line.strip_prefix(&start)).map(str::to_string).collect()
    };
    let environment = of_rank(1, "env");
    let compared = expected.iter().filter(|(name, _)| *name != "CUDA_VISIBLE_DEVICES");
    for (name, value) in compared {
        let line = format!("{name}={}", value.as_str().unwrap());
        assert!(environment.contains(&line), "{line}: {environment:?}");
    }
    for rank in 0..2 {
        let recorded = words(&case["expect"][format!("rank{rank}_argv")]);
        let own: Vec<String> = recorded[1..].iter().filter(|word| !word.starts_with("--local_rank")).cloned().collect();
        assert_eq!(of_rank(rank, "word"), own);
    }
}

/// Compares the outcome of a job whose launcher was killed with the recorded case.
fn check_killed(status: ExitStatus, ranks: &[i32]) {
    let expected = &launcher_case("proc-launcher-killed")["expect"];
    assert_eq!(expected["exit_code_nonzero"], !status.success(), "{status}");
    wait_until_gone(ranks);
    assert_eq!(expected["ranks_left_running"], ranks.iter().filter(|rank| runs(**rank)).count());
}

#[test]
fn killing_zerorun_leaves_no_rank() {
    let count = launcher_case("proc-launcher-killed")["input"]["ranks"].as_u64().unwrap() as usize;
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "sleeper", SLEEPER);
    let mut child = start(zerorun().args(["-n", &count.to_string()]).arg(&program).env("DIR", dir.path()));
    let ranks = pids(dir.path(), count);
    assert!(ranks.iter().all(|rank| runs(*rank)));
    child.kill().unwrap();
    check_killed(child.wait().unwrap(), &ranks);
}

#[test]
fn killing_the_launcher_of_the_first_host_of_a_hostfile_leaves_no_rank_and_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let sleeper = program(dir.path(), "sleeper", SLEEPER);
    let file = dir.path().join("hostfile");
    std::fs::write(&file, "localhost slots=1\nfar.invalid slots=1\n").unwrap();
    let port = free_port();
    let mut command = zerorun();
    // This host also acts as the other host.
    command.env("ZERORUN_RSH", program(dir.path(), "rsh", "exec sh -c \"$2\"")).env("DIR", dir.path());
    command.args(["--master_port", &port.to_string(), "--hostfile"]).arg(&file);
    let child = start(command.arg(&sleeper));
    let ranks = pids(dir.path(), 2);
    let is_first = |pid: &i32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("--node_rank\x000\0")
    };
    let launcher = descendants(child.id() as i32).into_iter().find(is_first).unwrap();
    kill_process(Pid::from_raw(launcher).unwrap(), Signal::KILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(137), "{}", stderr(&output));
    check_killed(output.status, &ranks);
}
