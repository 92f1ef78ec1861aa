//! Ranks on one host that are started one by one with torchrun's variables: they compute the same bits as under
//! `zerorun`, and errors name the rank.

use crate::mpi::steps;
use crate::support::processes::{
    as_program, example, free_port, repository, send, start, stderr, wait_for, wait_up_to, zerorun,
};
use candle_zero::comm::{self, RankEnv};
use rustix::process::Signal;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "APART_TEST_FOLDER";

/// Sets the variables of a rank, and removes those of other launchers.
fn as_rank(command: &mut Command, rank: usize, world: usize, port: u16) -> &mut Command {
    for name in ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "CANDLE_ZERO_SHM_FD", "CANDLE_ZERO_TIMEOUT_MS"] {
        command.env_remove(name);
    }
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).stdin(Stdio::null())
}

/// Starts this test binary as a rank that repeatedly enters a barrier with the others.
fn start_rank(folder: &Path, rank: usize, world: usize, port: u16, timeout: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "as_a_rank"));
    as_rank(&mut command, rank, world, port).env("CANDLE_ZERO_TIMEOUT_MS", timeout).env(FOLDER, folder);
    start(&mut command)
}

#[test]
#[ignore = "started on each rank by the tests below"]
fn as_a_rank() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let env = RankEnv::from_env().unwrap();
    let meet = || -> candle_zero::Result<()> {
        let comm = comm::from_env(&env)?;
        for round in 0.. {
            comm.barrier().wait()?;
            if round == 3 {
                std::fs::write(Path::new(&folder).join(format!("met.{}", env.rank)), "").unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    };
    let error = meet().unwrap_err();
    eprintln!("rank {}: {error}", env.rank);
    std::process::exit(3);
}

/// Returns the error message of a rank. The rank must have exited with code 3.
fn error_of(rank: Child) -> String {
    let output = rank.wait_with_output().unwrap();
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    errors.lines().find(|line| line.starts_with("rank ")).unwrap_or(&errors).to_string()
}

#[test]
fn ranks_that_are_started_one_by_one_have_the_bits_of_zerorun() {
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let config = format!("{}/ds_configs/zero3.json", repository().display());
    for (ranks, local) in [(2, true), (4, false)] {
        let metrics = |name: &str| folder.path().join(format!("{name}-{ranks}.jsonl"));
        let training = |command: &mut Command, name: &str| {
            command.args(["--model", "nano", "--steps", "3", "--sample", "0", "--ds_config", &config]);
            start(command.arg("--metrics").arg(metrics(name)).env("RAYON_NUM_THREADS", "1"))
        };
        let port = free_port();
        let all: Vec<Child> = (0..ranks)
            .map(|rank| {
                let mut command = Command::new(&train_gpt);
                as_rank(&mut command, rank, ranks, port);
                if local {
                    // These variables are set by torchrun.
                    command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
                }
                training(&mut command, "apart")
            })
            .collect();
        for rank in all {
            let output = rank.wait_with_output().unwrap();
            assert!(output.status.success(), "{ranks}: {}", stderr(&output));
        }
        let mut one = zerorun();
        let output = training(one.args(["-n", &ranks.to_string()]).arg(&train_gpt), "zerorun").wait_with_output();
        let output = output.unwrap();
        assert!(output.status.success(), "{ranks}: {}", stderr(&output));
        let expected = steps(&metrics("zerorun"));
        assert_eq!((expected.len(), steps(&metrics("apart"))), (3, expected), "world size {ranks}");
    }
}

#[test]
fn the_others_end_in_seconds_with_the_name_of_a_rank_that_is_killed_or_stopped() {
    for (victim, signal, limit) in [(1, Signal::KILL, 5), (0, Signal::KILL, 5), (2, Signal::STOP, 15)] {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let mut ranks: Vec<Child> = (0..3).map(|rank| start_rank(folder.path(), rank, 3, port, "60000")).collect();
        wait_for("all ranks to pass the barrier", || {
            (0..3).all(|rank| folder.path().join(format!("met.{rank}")).exists()).then_some(())
        });
        let mut victim_process = ranks.remove(victim);
        send(signal, &victim_process);
        let began = Instant::now();
        for rank in ranks {
            let error = error_of(rank);
            let expected = match signal {
                Signal::KILL => format!("rank {victim} died (its process ended without a message)"),
                _ => format!("rank {victim} did not respond for 8 s"),
            };
            assert!(error.contains(&expected), "{error}");
        }
        assert!(began.elapsed() < Duration::from_secs(limit), "{victim}: {:?}", began.elapsed());
        victim_process.kill().unwrap();
        victim_process.wait().unwrap();
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_over() {
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let without_port = |text: String| text.replace(&port.to_string(), "PORT");
    let [first, second] = [0, 1].map(|rank| start_rank(folder.path(), rank, 3, port, "1500"));
    insta::assert_snapshot!(without_port(error_of(first)), @"rank 0: 2 of 3 ranks connected to MASTER_PORT PORT on this host within 1.5s; missing ranks: 2; start each of them with its RANK, the same WORLD_SIZE and MASTER_PORT, as the same user and in the same network namespace; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun");
    insta::assert_snapshot!(without_port(error_of(second)), @"rank 1: rank 0 cancelled the rendezvous: 2 of 3 ranks connected to MASTER_PORT PORT on this host within 1.5s; missing ranks: 2; start each of them with its RANK, the same WORLD_SIZE and MASTER_PORT, as the same user and in the same network namespace; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun");
}

#[test]
fn ranks_that_are_told_different_worlds_end_at_once() {
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let without_port = |text: String| text.replace(&port.to_string(), "PORT");
    let began = Instant::now();
    let [first, second] = [(0, 2), (1, 3)].map(|(rank, world)| start_rank(folder.path(), rank, world, port, "60000"));
    insta::assert_snapshot!(without_port(error_of(first)), @"rank 0: WORLD_SIZE is 2 on rank 0 and 3 on rank 1; give all ranks of a job the same value, and each job its own MASTER_PORT (here PORT)");
    insta::assert_snapshot!(without_port(error_of(second)), @"rank 1: rank 0 cancelled the rendezvous: WORLD_SIZE is 2 on rank 0 and 3 on rank 1; give all ranks of a job the same value, and each job its own MASTER_PORT (here PORT)");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_rank_that_ends_before_all_are_there_is_named_to_those_that_wait() {
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let [first, mut second] = [0, 1].map(|rank| start_rank(folder.path(), rank, 3, port, "60000"));
    // Both sockets must exist: rank 0's listener and its connection to rank 1.
    let ending = format!("port {port}");
    wait_up_to(Duration::from_secs(20), "the rendezvous", || {
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        (sockets.lines().filter(|line| line.ends_with(&ending)).count() == 2).then_some(())
    });
    // The other rank must also have identified itself.
    std::thread::sleep(Duration::from_millis(300));
    second.kill().unwrap();
    second.wait().unwrap();
    insta::assert_snapshot!(error_of(first), @"rank 0: the process of rank 1 ended before all ranks had joined; see its own output");
}
