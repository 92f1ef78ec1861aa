//! Ranks that are bound to cores, and the GPUs of a hostfile's slots.

use crate::support::processes::{free_port, program, stderr, stdout, zerorun};
use crate::support::skips::skipped;
use std::path::Path;
use std::process::Output;

/// Returns the cores on which this process may run.
fn allowed_cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let number = |text: &str| text.trim().parse::<usize>().unwrap();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        number(first)..=number(last)
    };
    list.split(',').flat_map(range).collect()
}

/// A script that prints the cores on which it may run and the thread counts in its environment.
const SHOW: &str = "sed -n 's/^Cpus_allowed_list:[[:space:]]*/on /p' /proc/self/status | tr '\\n' ' '\n\
                    echo with $RAYON_NUM_THREADS $CANDLE_NUM_THREADS $OMP_NUM_THREADS";

/// Returns the output lines of a program's ranks, in rank order.
fn lines(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", stderr(output));
    let mut lines: Vec<String> = stdout(output).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

#[test]
fn bound_ranks_have_cores_of_their_own_and_as_many_threads() {
    let test = bound_ranks_have_cores_of_their_own_and_as_many_threads;
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "show", SHOW);
    let [first, second, ..] = allowed_cores()[..] else {
        return skipped(test, "this process may run on only one core");
    };
    let bound = |ranks: &str, list: &str| {
        let mut command = zerorun();
        command.env_remove("OMP_NUM_THREADS").args(["-n", ranks, "--bind_cores_to_rank", "--bind_core_list", list]);
        lines(&command.arg(&program).output().unwrap())
    };
    let both = format!("{first},{second}");
    let one_each = [format!("[rank 0] on {first} with 1 1 1"), format!("[rank 1] on {second} with 1 1 1")];
    assert_eq!(bound("2", &both), one_each);
    let together = if first + 1 == second { format!("{first}-{second}") } else { both };
    assert_eq!(bound("1", &together), [format!("on {together} with 2 2 2")]);
    assert_eq!(bound("1", &second.to_string()), [format!("on {second} with 1 1 1")]);
    // Without these flags, ranks are not bound, and OpenMP chooses its number of threads.
    let output = zerorun().env_remove("OMP_NUM_THREADS").arg(&program).output().unwrap();
    let cores = std::thread::available_parallelism().unwrap();
    assert!(lines(&output)[0].ends_with(&format!(" with {cores} {cores}")), "{}", stdout(&output));
}

#[test]
fn cores_that_cannot_be_had_are_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "never", "touch $DIR/started");
    let refusal = |words: &[&str], variable: Option<&str>| {
        let mut command = zerorun();
        command.env("DIR", dir.path()).args(["-n", "2", "--bind_cores_to_rank"]).args(words).arg(&program);
        variable.into_iter().for_each(|variable| _ = command.env(variable, "compact"));
        let output = command.output().unwrap();
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{}", stderr(&output));
        assert!(!dir.path().join("started").exists());
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let message = stderr(&output).replace(host.trim(), "HOST");
        let (before, after) = message.split_once("may run on ").unwrap_or((&message, ""));
        match after.split_once(';') {
            Some((_, rest)) => format!("{before}may run on CORES;{rest}"),
            None => before.to_string(),
        }
    };
    let first = allowed_cores()[0].to_string();
    insta::assert_snapshot!(refusal(&["--bind_core_list", &first], None), @"zerorun: 2 ranks on a host need at least 2 cores to be bound to, but only 1 can be used; give a longer core list, or start fewer ranks");
    insta::assert_snapshot!(refusal(&["--bind_core_list", "50000-50001"], None), @"zerorun: --bind_core_list names core 50000, but zerorun's processes on host HOST may run on CORES; name only these, or start zerorun with more cores (taskset, a container, Slurm)");
    insta::assert_snapshot!(refusal(&[], Some("KMP_AFFINITY")), @"zerorun: KMP_AFFINITY is set, so Intel's OpenMP binds threads to cores of its choice; unset it, or leave out --bind_cores_to_rank");
}

/// Returns a command of `zerorun` with a hostfile that contains `text`, and with a replacement for ssh that runs the
/// other hosts' commands on this host. Both files are written to `dir`.
fn hosts(dir: &Path, text: &str) -> std::process::Command {
    let file = dir.join("hostfile");
    std::fs::write(&file, text).unwrap();
    let shell = program(dir, "rsh", "exec sh -c \"$2\"");
    let port = free_port();
    let mut command = zerorun();
    command.env("ZERORUN_RSH", shell).env("CUDA_VISIBLE_DEVICES", "7");
    command.args(["--timeout", "60s", "--master_port", &port.to_string(), "--hostfile"]).arg(file);
    command
}

#[test]
fn ranks_see_the_gpus_of_their_hosts_slots() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "show", "echo $LOCAL_RANK of $LOCAL_SIZE: $CUDA_VISIBLE_DEVICES");
    let on_this_host =
        |filter: &[&str]| lines(&hosts(dir.path(), "localhost slots=4\n").args(filter).arg(&program).output().unwrap());
    assert_eq!(on_this_host(&["--include", "localhost:3,1"]), ["[rank 0] 0 of 2: 1,3", "[rank 1] 1 of 2: 1,3"]);
    assert_eq!(on_this_host(&["--num_gpus", "1"]), ["0 of 1: 0"]);
    let mut command = hosts(dir.path(), "localhost slots=2\nfar.invalid slots=3\n");
    let output = command.args(["--include", "far.invalid:0,2@localhost:1"]).arg(&program).output().unwrap();
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let line_of = |rank: usize, rest: &str| format!("[{} rank {rank}] {rest}", name.trim());
    assert_eq!(lines(&output), [line_of(0, "0 of 1: 1"), line_of(1, "0 of 2: 0,2"), line_of(2, "1 of 2: 0,2")]);
}

#[test]
fn each_host_of_a_hostfile_binds_its_own_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "show", SHOW);
    let core = allowed_cores()[0].to_string();
    let mut command = hosts(dir.path(), "localhost slots=1\nfar.invalid slots=1\n");
    command.env("OMP_NUM_THREADS", "5").args(["--bind_cores_to_rank", "--bind_core_list", &core]);
    let output = command.arg(&program).output().unwrap();
    let ending = format!("] on {core} with 1 1 5");
    let lines = lines(&output);
    assert!(lines.len() == 2 && lines.iter().all(|line| line.ends_with(&ending)), "{lines:?}");
}
