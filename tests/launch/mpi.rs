//! Ranks that an MPI launcher starts, on this host and on two: the bits of one machine, and an error instead of a hang.

use crate::support::cluster::{Hosts, Mpi, mpirun};
use crate::support::processes::{as_program, example, stderr, stdout, zerorun};
use crate::support::skips::{skipped, skipped_in_part};
use candle_core::DType;
use candle_zero::comm::{self, Communicator, Kind, RankEnv, Wire, threads};
use candle_zero::precision::{Flat, Ints};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Ranks on each host.
const TWO_AND_TWO: [usize; 2] = [2, 2];

/// Two hosts, or why there are none.
pub fn hosts<T: Fn()>(test: T) -> Option<Hosts> {
    match Hosts::new() {
        Ok(hosts) => Some(hosts),
        Err(why) => {
            skipped(test, format!("no network namespaces: {why}"));
            None
        }
    }
}

/// Calls `f` with each library that was fetched.
fn with_each<T: Fn() + Copy>(test: T, mut f: impl FnMut(Mpi)) {
    let there: Vec<Mpi> = Mpi::ALL.into_iter().filter(|mpi| mpi.folder().is_some()).collect();
    match there.len() {
        2 => {}
        0 => skipped(test, "no MPI library; scripts/fetch_mpi.sh fetches two"),
        _ => skipped_in_part(test, format!("of the MPI libraries only {there:?}; scripts/fetch_mpi.sh fetches two")),
    }
    there.into_iter().for_each(&mut f);
}

/// Losses and gradient norms of the steps, as written.
pub fn steps(metrics: &Path) -> Vec<[String; 2]> {
    let text = std::fs::read_to_string(metrics).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .filter(|line| line.get("loss").is_some())
        .map(|line| ["loss", "grad_norm"].map(|key| line[key].to_string()))
        .collect()
}

/// Trains `nano` for three steps, started by `start`, at a stage.
fn train(mut start: Command, train_gpt: &Path, stage: usize, folder: &Path, name: &str) -> Vec<[String; 2]> {
    let config = format!("{}/ds_configs/zero{stage}.json", env!("CARGO_MANIFEST_DIR"));
    let metrics = folder.join(format!("{name}-{stage}.jsonl"));
    start
        .arg(train_gpt)
        .args(["--model", "nano", "--steps", "3", "--sample", "0", "--ds_config", &config, "--metrics"])
        .arg(&metrics);
    let output = start.output().unwrap();
    assert!(output.status.success(), "{name}, stage {stage}: {} {}", output.status, stderr(&output));
    let steps = steps(&metrics);
    assert_eq!(steps.len(), 3, "{name}, stage {stage}");
    steps
}

#[test]
fn four_ranks_on_two_hosts_have_the_bits_of_four_on_one_at_every_stage() {
    let test = four_ranks_on_two_hosts_have_the_bits_of_four_on_one_at_every_stage;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    for stage in 0..4 {
        let mut one = zerorun();
        one.args(["-n", "4"]);
        let expected = train(one, &train_gpt, stage, folder.path(), "one");
        with_each(test, |mpi| {
            let start = hosts.mpirun(mpi, TWO_AND_TWO).unwrap();
            assert_eq!(
                train(start, &train_gpt, stage, folder.path(), &format!("{mpi:?}")),
                expected,
                "{mpi:?} {stage}"
            );
        });
    }
}

#[test]
fn two_ranks_of_a_plain_mpirun_have_the_bits_of_two_of_zerorun() {
    let test = two_ranks_of_a_plain_mpirun_have_the_bits_of_two_of_zerorun;
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    with_each(test, |mpi| {
        let mut one = zerorun();
        one.args(["-n", "2"]);
        let expected = train(one, &train_gpt, 3, folder.path(), "one");
        let start = mpirun(mpi, 2).unwrap();
        assert_eq!(train(start, &train_gpt, 3, folder.path(), &format!("{mpi:?}")), expected, "{mpi:?}");
    });
}

const ROLE: &str = "MPI_TEST_ROLE";

/// This test binary as the program of a rank in a role, started by `start`.
fn in_role(mut start: Command, role: &str) -> Output {
    start.args(["env", &format!("{ROLE}={role}")]).arg(std::env::current_exe().unwrap());
    start.args(as_program(module_path!(), "as_a_rank")).output().unwrap()
}

/// Numbers whose sums depend on the order in which they are summed.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 101) as f32 * 0.37 + 1.0 / (1 + i % 17 + rank) as f32
}

fn data(rank: usize, len: usize, dtype: DType) -> Flat {
    Flat::from_f32((0..len).map(|i| value(rank, i)).collect(), dtype)
}

/// One of each collective, launched together.
fn collectives(comm: &dyn Communicator, n: usize, dtype: DType, wire: Wire) -> candle_zero::Result<Vec<Flat>> {
    let (rank, world) = (comm.rank(), comm.size());
    let reduced = comm.reduce_scatter_as(wire, data(rank, n * world, dtype), 1);
    let whole = comm.all_reduce_as(wire, data(rank, n + 1, dtype), 2);
    let gathered = comm.all_gather_as(wire, data(rank, n, dtype), 3);
    let bytes = comm.gather_bytes(vec![rank as u8; n % 1000]);
    comm.barrier().wait()?;
    for (r, bytes) in bytes.wait()?.into_iter().enumerate() {
        assert_eq!(bytes, vec![r as u8; n % 1000]);
    }
    Ok(vec![reduced.wait()?, whole.wait()?, gathered.wait()?])
}

/// What the next tests start on each rank.
#[test]
#[ignore = "what the next tests start on each rank"]
fn as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let comm = match comm::from_env(&RankEnv::from_env().unwrap()) {
        Ok(comm) => comm,
        Err(error) => return println!("rank is told: {error}"),
    };
    let (rank, world) = (comm.rank(), comm.size());
    let last = rank + 1 == world;
    match role.as_str() {
        "collectives" => {
            for (dtype, wire) in [
                (DType::F32, Wire::Exact),
                (DType::BF16, Wire::Exact),
                (DType::F32, Wire::Blocks(Ints::Int8)),
                (DType::BF16, Wire::Blocks(Ints::Int4)),
            ] {
                for n in [0, 1, 5, 999, 70_001, 400_000] {
                    let here = collectives(&*comm, n, dtype, wire).unwrap();
                    let there = threads::run(world, |comm| collectives(&*comm, n, dtype, wire)).unwrap().remove(rank);
                    assert!(here == there.unwrap(), "rank {rank} of {world}: {n} {dtype:?} {wire:?}");
                }
            }
            let before = comm.report();
            let n = 300_000;
            comm.reduce_scatter(data(rank, n * world, DType::F32), 1).wait().unwrap();
            comm.all_gather(data(rank, n, DType::F32), 1).wait().unwrap();
            for kind in [Kind::ReduceScatter, Kind::AllGather] {
                let bytes = comm.report().kind(kind).wire_bytes - before.kind(kind).wire_bytes;
                println!("rank {rank} of {world}: {} took {bytes} bytes", kind.name());
                assert!(kind == Kind::AllGather || bytes == 4 * (n * (world - 1)) as u64);
            }
            println!("rank {rank} of {world} has the same bits");
        }
        "gives up" if last => comm.abort("the test wants it"),
        "leaves" if last => {}
        "gives up" | "leaves" | "differs" => {
            let n = if last { 8 } else { 4 };
            let error = comm.all_reduce(data(rank, n, DType::F32), 7).wait().unwrap_err();
            println!("rank {rank} is told: {error}");
        }
        role => panic!("a role {role}"),
    }
}

#[test]
fn collectives_on_two_hosts_are_those_of_threads_to_the_bit() {
    let test = collectives_on_two_hosts_are_those_of_threads_to_the_bit;
    let Some(hosts) = hosts(test) else { return };
    with_each(test, |mpi| {
        for ranks in [[2, 2], [1, 1], [1, 2], [3, 1]] {
            let output = in_role(hosts.mpirun(mpi, ranks).unwrap(), "collectives");
            let world: usize = ranks.iter().sum();
            let right = stdout(&output).matches("has the same bits").count();
            assert!(output.status.success() && right == world, "{mpi:?} {ranks:?}: {}", stderr(&output));
        }
    });
}

#[test]
fn ranks_of_the_other_host_are_told_who_gave_up_left_or_differs() {
    let test = ranks_of_the_other_host_are_told_who_gave_up_left_or_differs;
    let Some(hosts) = hosts(test) else { return };
    let [_, second] = hosts.names();
    with_each(test, |mpi| {
        for (role, words) in [
            ("gives up", format!("rank 3 stopped (on host {second}: the test wants it)")),
            ("leaves", "rank 3 has left the job".to_string()),
            ("differs", "ranks have diverged".to_string()),
        ] {
            let output = in_role(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), role);
            let said = stdout(&output);
            for rank in 0..2 {
                let line = said.lines().find(|line| line.contains(&format!("rank {rank} is told: ")));
                assert!(line.is_some_and(|line| line.contains(&words)), "{mpi:?} {role}: {said} {}", stderr(&output));
            }
            assert!(output.status.code() != Some(124), "{mpi:?} {role}: it hung");
        }
    });
}

#[test]
fn a_library_that_is_missing_or_not_the_launchers_is_named() {
    let test = a_library_that_is_missing_or_not_the_launchers_is_named;
    let mut without = Command::new("env");
    for (name, value) in [("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")] {
        without.arg(format!("OMPI_COMM_WORLD_{name}={value}"));
    }
    without.arg("CANDLE_ZERO_MPI_LIBRARY=/nonexistent/libmpi.so");
    let told = |output: Output| {
        let said = stdout(&output);
        said.lines().find_map(|line| Some(line.split_once("rank is told: ")?.1.to_string())).unwrap_or(stderr(&output))
    };
    insta::assert_snapshot!(told(in_role(without, "leaves")), @"the ranks were started on several hosts or by an MPI launcher, but no MPI library was found (tried /nonexistent/libmpi.so, which CANDLE_ZERO_MPI_LIBRARY names (/nonexistent/libmpi.so: cannot open shared object file: No such file or directory)); install MPICH or, for mpirun alone, Open MPI, put its lib folder into LD_LIBRARY_PATH, or name the file with CANDLE_ZERO_MPI_LIBRARY");
    for [launcher, other] in [[Mpi::OpenMpi, Mpi::Mpich], [Mpi::Mpich, Mpi::OpenMpi]] {
        let (Some(mut start), Some(library)) = (mpirun(launcher, 2), other.library()) else {
            return skipped_in_part(test, "no two MPI libraries; scripts/fetch_mpi.sh fetches them");
        };
        start.arg("env").arg(format!("CANDLE_ZERO_MPI_LIBRARY={}", library.display()));
        let text = told(in_role(start, "leaves"));
        let words = match launcher {
            Mpi::OpenMpi => format!(
                "Open MPI's mpirun has started the ranks, and the library that was found is {}",
                library.display()
            ),
            Mpi::Mpich => "MPI says rank 0 of 1".into(),
        };
        assert!(text.contains(&words), "{launcher:?}: {text}");
    }
}
