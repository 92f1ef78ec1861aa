//! Ranks that an MPI launcher starts, on this host and on two hosts: they compute the same bits as on one machine, and
//! problems lead to an error instead of a hang.

use crate::support::cluster::{Hosts, Mpi, debian_mpich, mpirun};
use crate::support::processes::{
    as_program, example, free_port, program, repository, runs, start, stderr, stdout, wait_up_to, zerorun,
};
use crate::support::skips::{skipped, skipped_in_part};
use candle_core::DType;
use candle_zero::comm::{self, CollectiveKind, Communicator, InterHostFormat, RankEnv, WireFormat, threads};
use candle_zero::layout::{MeshAxis, RankMesh};
use candle_zero::precision::{Flat, FlatRef, IntFormat};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

/// The number of ranks on each host.
const TWO_AND_TWO: [usize; 2] = [2, 2];

/// Returns two hosts, or reports why there are none.
pub fn hosts<T: Fn()>(test: T) -> Option<Hosts> {
    match Hosts::new() {
        Ok(hosts) => Some(hosts),
        Err(why) => {
            skipped(test, format!("no network namespaces: {why}"));
            None
        }
    }
}

/// Calls `f` with each MPI library that was fetched.
pub fn with_each<T: Fn() + Copy>(test: T, mut f: impl FnMut(Mpi)) {
    let available: Vec<Mpi> = Mpi::ALL.into_iter().filter(|mpi| mpi.folder().is_some()).collect();
    match available.len() {
        2 => {}
        0 => skipped(test, "no MPI library; scripts/fetch_mpi.sh fetches two"),
        _ => skipped_in_part(test, format!("only the MPI library {available:?}; scripts/fetch_mpi.sh fetches two")),
    }
    available.into_iter().for_each(&mut f);
}

/// Returns the losses and gradient norms of the steps, as text from the metrics file.
pub fn steps(metrics: &Path) -> Vec<[String; 2]> {
    let text = std::fs::read_to_string(metrics).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .filter(|line| line.get("loss").is_some())
        .map(|line| ["loss", "grad_norm"].map(|key| line[key].to_string()))
        .collect()
}

/// Returns the path of the bundled configuration of a stage.
pub fn config(stage: usize) -> String {
    format!("{}/ds_configs/zero{stage}.json", repository().display())
}

/// Trains `nano` for three steps at a stage, with `start` as the beginning of the command.
pub fn train(start: Command, train_gpt: &Path, stage: usize, folder: &Path, name: &str) -> Vec<[String; 2]> {
    train_by(start, train_gpt, &config(stage), &folder.join(format!("{name}-{stage}.jsonl")))
}

/// Adds the program that trains `nano` for three steps, and its arguments, to the beginning of a command.
pub fn three_steps<'a>(start: &'a mut Command, train_gpt: &Path, config: &str, metrics: &Path) -> &'a mut Command {
    start.arg(train_gpt).args(["--model", "nano", "--steps", "3", "--sample", "0", "--ds_config", config]);
    start.arg("--metrics").arg(metrics)
}

/// Trains like [`train`], but with the configuration at `config`, and writes the metrics to the file `metrics`.
fn train_by(mut start: Command, train_gpt: &Path, config: &str, metrics: &Path) -> Vec<[String; 2]> {
    let name = metrics.display();
    let output = three_steps(&mut start, train_gpt, config, metrics).output().unwrap();
    assert!(output.status.success(), "{name}: {} {}", output.status, stderr(&output));
    let steps = steps(metrics);
    assert_eq!(steps.len(), 3, "{name}");
    steps
}

/// Returns the number of elements of a kind of collective, and the number of its bytes that came from other hosts,
/// according to the summary that rank 0 has written.
fn between_hosts(metrics: &Path, kind: &str) -> [u64; 2] {
    let text = std::fs::read_to_string(metrics).unwrap();
    let summary: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let of_kind = &summary["comm"]["kinds"][kind];
    ["elements", "between_hosts_bytes"].map(|key| of_kind[key].as_u64().unwrap())
}

/// Writes the configuration of stage 3, with this key added to zero_optimization, to a file in `folder`, and returns
/// its path.
fn with_key(key: &str, value: usize, folder: &Path) -> String {
    let mut all: Value = serde_json::from_str(&std::fs::read_to_string(config(3)).unwrap()).unwrap();
    all["zero_optimization"][key] = value.into();
    let file = folder.join(format!("{key}.json"));
    std::fs::write(&file, all.to_string()).unwrap();
    file.to_str().unwrap().to_string()
}

#[test]
fn shards_of_each_host_change_no_bit_and_only_sums_of_gradients_cross() {
    let test = shards_of_each_host_change_no_bit_and_only_sums_of_gradients_cross;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let mut one = zerorun();
    one.args(["-n", "4"]);
    let expected = train(one, &train_gpt, 3, folder.path(), "one");
    for ranks in [1, 2] {
        let in_groups = with_key("mics_shard_size", ranks, folder.path());
        with_each(test, |mpi| {
            let metrics = folder.path().join(format!("{mpi:?}-{ranks}.jsonl"));
            let steps = train_by(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), &train_gpt, &in_groups, &metrics);
            assert_eq!(steps, expected, "{mpi:?}, groups of {ranks}");
            let [reduced, bytes] = between_hosts(&metrics, "reduce_scatter");
            // Two remote ranks send their parts of one of the four pieces in f32. Ranks that hold the same shard also
            // send each other the sums of their pieces. Each sum from the other host enters this host once, and rank 0
            // receives one of them.
            assert_eq!(bytes, (2 + 1) * (reduced / 4 * 4), "{mpi:?}, groups of {ranks}");
            assert_eq!(between_hosts(&metrics, "all_gather")[1], 0, "{mpi:?}, groups of {ranks}");
        });
    }
}

#[test]
fn bytes_between_hosts_are_those_of_the_formula_and_a_second_copy_keeps_backwards_gathers_off_the_cable() {
    let test = bytes_between_hosts_are_those_of_the_formula_and_a_second_copy_keeps_backwards_gathers_off_the_cable;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let with_copy = with_key("zero_hpz_partition_size", 2, folder.path());
    with_each(test, |mpi| {
        let run = |config: &str, name: &str| {
            let metrics = folder.path().join(format!("{mpi:?}-{name}.jsonl"));
            let steps = train_by(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), &train_gpt, config, &metrics);
            (steps, between_hosts(&metrics, "reduce_scatter"), between_hosts(&metrics, "all_gather"))
        };
        let (steps, [reduced, reduced_bytes], [gathered, gathered_bytes]) = run(&config(3), "without");
        let (same_steps, same_reduced, [in_all, from_hosts]) = run(&with_copy, "with");
        // Two remote ranks send their parts of one of the four chunks in f32.
        assert_eq!(reduced_bytes, 2 * reduced / 4 * 4, "{mpi:?}");
        // Two shards from the other host arrive in two lanes.
        assert_eq!(gathered_bytes, 2 * gathered / 2 * 4, "{mpi:?}");
        assert_eq!((same_steps, same_reduced), (steps, [reduced, reduced_bytes]), "{mpi:?}");
        // The backward pass gathers from the copy, in parts that are twice as large as shards.
        let in_backward = in_all - gathered;
        assert!(5 * in_backward > gathered, "{mpi:?}: {in_backward} of {gathered}");
        assert_eq!(from_hosts, 4 * (gathered - in_backward), "{mpi:?}");
    });
}

/// Writes the bundled configuration of a stage, with these keys and with compression only between hosts, to a file in
/// `folder`, and returns its path.
fn compressed(stage: usize, keys: &Value, folder: &Path, name: &str) -> String {
    let mut all: Value = serde_json::from_str(&std::fs::read_to_string(config(stage)).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        match key.as_str() {
            "communication_data_type" => all[key] = value.clone(),
            _ => all["zero_optimization"][key] = value.clone(),
        }
    }
    all["zero_optimization"]["compress_between_hosts_only"] = true.into();
    let file = folder.join(format!("{name}.json"));
    std::fs::write(&file, all.to_string()).unwrap();
    file.to_str().unwrap().to_string()
}

/// Returns the estimated number of bytes of a kind of collective that enter a host in a step of `nano` on two hosts
/// with two ranks each.
fn estimated(config: &str, kind: &str) -> u64 {
    let mut estimate = zerorun();
    estimate.args(["estimate", "--model", "nano", "-n", "4", "--hosts", "2", "--json", "--ds_config", config]);
    let output = estimate.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    all["across_hosts"]["forecast"]["between"][kind]["bytes_in"].as_u64().unwrap()
}

#[test]
fn what_is_compressed_between_hosts_alone_crosses_once_a_host_with_the_same_bits_at_every_stage() {
    let test = what_is_compressed_between_hosts_alone_crosses_once_a_host_with_the_same_bits_at_every_stage;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let mut one = zerorun();
    one.args(["-n", "4"]);
    let exact = train(one, &train_gpt, 3, folder.path(), "one");
    let number = |text: &str| text.parse::<f64>().unwrap();
    for keys in [json!({"communication_data_type": "bf16"}), json!({"zero_quantized_gradients": true})] {
        let in_16_bits = keys.get("communication_data_type").is_some();
        with_each(test, |mpi| {
            let mut first: Option<Vec<[String; 2]>> = None;
            // The last case uses groups of two ranks (MiCS).
            for (stage, groups) in [(0, None), (1, None), (2, None), (3, None), (3, Some(2))] {
                let mut keys = keys.clone();
                if let Some(ranks) = groups {
                    keys["mics_shard_size"] = ranks.into();
                }
                let config = compressed(stage, &keys, folder.path(), "compressed");
                let case = format!("{mpi:?}, stage {stage}, {keys}");
                let metrics = folder.path().join(format!("{mpi:?}-{stage}-{in_16_bits}-{groups:?}.jsonl"));
                let steps = train_by(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), &train_gpt, &config, &metrics);
                assert_ne!(steps, exact, "{case}");
                for (found, exact) in steps.iter().zip(&exact) {
                    let [loss, exact] = [&found[0], &exact[0]].map(|text| number(text));
                    assert!((loss - exact).abs() < 2e-3 * exact, "{case}: {loss} {exact}");
                }
                match &first {
                    Some(first) if groups.is_none() => assert_eq!(steps, *first, "{case}"),
                    Some(_) => {}
                    None => first = Some(steps),
                }
                let kind = if stage == 0 { "all_reduce" } else { "reduce_scatter" };
                let [reduced, bytes] = between_hosts(&metrics, kind);
                // Each of the sums that the other host's ranks hold arrives once in f32.
                let sums = if stage == 0 || groups.is_some() { reduced / 4 * 4 } else { 0 };
                // The other host sends its sum of one of the four chunks.
                let codes = if in_16_bits { reduced / 4 * 2 } else { bytes - sums };
                assert_eq!(bytes, codes + sums, "{case}");
                // The codes take half a byte per element and four bytes per block of 128 elements. The last block of a
                // bucket may be partly filled.
                let blocks = (codes - if in_16_bits { codes } else { reduced / 4 / 2 }).div_ceil(4);
                assert!(in_16_bits || (0..reduced / 400).contains(&(blocks - reduced / 4 / 128)), "{case}: {blocks}");
                if groups.is_none() {
                    assert_eq!(2 * bytes, 3 * estimated(&config, kind), "two ranks, three steps: {case}");
                }
            }
        });
    }
}

#[test]
fn weights_compressed_between_hosts_alone_cross_as_int8_and_on_one_host_nothing_is_compressed() {
    let test = weights_compressed_between_hosts_alone_cross_as_int8_and_on_one_host_nothing_is_compressed;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let on_one_host = |config: &str, name: &str| {
        let (mut one, metrics) = (zerorun(), folder.path().join(name));
        one.args(["-n", "4"]).arg(&train_gpt);
        one.args(["--model", "nano", "--steps", "3", "--sample", "0", "--ds_config", config, "--metrics"])
            .arg(&metrics);
        let output = one.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (steps(&metrics), stdout(&output) + &stderr(&output))
    };
    let both = json!({"zero_quantized_weights": true, "zero_quantized_gradients": true});
    let (exact, _) = on_one_host(&config(3), "exact.jsonl");
    let key = compressed(3, &both, folder.path(), "both");
    let everywhere = folder.path().join("everywhere.json");
    let without_key = std::fs::read_to_string(&key).unwrap().replace("\"compress_between_hosts_only\":true,", "");
    assert!(!without_key.contains("between_hosts"), "{without_key}");
    std::fs::write(&everywhere, without_key).unwrap();
    let everywhere = everywhere.to_str().unwrap();
    let (same, log) = on_one_host(&key, "key.jsonl");
    assert_eq!(same, exact);
    let note = "compress_between_hosts_only: all ranks are on one host, so nothing is compressed";
    assert_eq!(log.matches(note).count(), 1, "{log}");
    let keys = json!({"zero_hpz_partition_size": 2, "zero_quantized_weights": true, "zero_quantized_gradients": true});
    let with_copy = compressed(3, &keys, folder.path(), "copy");
    let keys = json!({"mics_shard_size": 2, "zero_quantized_weights": true});
    let groups = compressed(3, &keys, folder.path(), "groups");
    with_each(test, |mpi| {
        let run = |config: &str, name: &str| {
            let metrics = folder.path().join(format!("{mpi:?}-{name}.jsonl"));
            let steps = train_by(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), &train_gpt, config, &metrics);
            (steps, between_hosts(&metrics, "all_gather"))
        };
        let (coded, [gathered, bytes]) = run(&key, "both");
        assert_ne!(coded, exact, "{mpi:?}");
        // Each lane receives one shard, with one byte per element and four bytes per block. In f32, there would be four
        // bytes per element.
        let least = gathered + gathered / 32;
        assert!((least..least + gathered / 100).contains(&bytes), "{mpi:?}: {bytes} of {gathered}");
        assert_eq!(run(&with_copy, "copy").0, coded, "{mpi:?}");
        // With one rank on each host, a host's sum is that rank's part.
        let one_each = |config: &str, name: &str| {
            let metrics = folder.path().join(format!("{mpi:?}-{name}-1-1.jsonl"));
            train_by(hosts.mpirun(mpi, [1, 1]).unwrap(), &train_gpt, config, &metrics)
        };
        assert_eq!(one_each(&key, "both"), one_each(everywhere, "everywhere"), "{mpi:?}");
        // Gathers of groups within one host do not cross the cable.
        let (in_groups, [_, crossed]) = run(&groups, "groups");
        assert_eq!((in_groups, crossed), (exact.clone(), 0), "{mpi:?}");
    });
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

#[test]
fn mpirun_starts_the_ranks_of_a_hostfile_if_it_is_asked_to() {
    let test = mpirun_starts_the_ranks_of_a_hostfile_if_it_is_asked_to;
    let Some(hosts) = hosts(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let mut one = zerorun();
    one.args(["-n", "4"]);
    let expected = train(one, &train_gpt, 3, folder.path(), "one");
    let file = folder.path().join("hosts");
    std::fs::write(&file, "10.77.0.1 slots=3\n10.77.0.2 slots=2\n10.77.0.3 slots=2\n").unwrap();
    let launcher = |mpi: Mpi| if mpi == Mpi::OpenMpi { "openmpi" } else { "mpich" };
    let start = |mpi: Mpi, name: &str| {
        let mut command = hosts.command_with_mpirun(mpi).unwrap();
        command
            .args([env!("CARGO_BIN_EXE_zerorun"), "--hostfile"])
            .arg(&file)
            .args(["--include", "10.77.0.1:0,1@10.77.0.2"]);
        command.args(["--launcher", name, "--launcher_args", &hosts.options(mpi).unwrap().join(" "), "--"]);
        command
    };
    with_each(test, |mpi| {
        let name = launcher(mpi);
        assert_eq!(train(start(mpi, name), &train_gpt, 3, folder.path(), name), expected, "{mpi:?}");
        // With this program, an environment variable on the other host, the working directory, an argument and the exit
        // code of a rank are checked.
        let script = program(folder.path(), "rank", "echo \"$(hostname) $PWD $CANDLE_ZERO_X $1\"; sleep 2; exit 7");
        let mut command = start(mpi, name);
        command
            .env("CANDLE_ZERO_X", "two words")
            .current_dir(folder.path())
            .args([script.as_os_str(), "it's".as_ref()]);
        let output = command.output().unwrap();
        let printed = stdout(&output);
        for host in hosts.names() {
            let line = format!("{host} {} two words it's", folder.path().display());
            assert!(printed.contains(&line), "{mpi:?}: {printed} {}", stderr(&output));
        }
        assert_eq!(output.status.code(), Some(7), "{mpi:?}: {}", stderr(&output));
        let other = if mpi == Mpi::OpenMpi { "mpich" } else { "openmpi" };
        let output = start(mpi, other).arg(&script).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{mpi:?}");
        let errors = stderr(&output);
        assert!(errors.contains(&format!("--launcher {other} needs that library's mpirun on the PATH")), "{errors}");
    });
    let mut no_mpirun = Command::new(crate::support::processes::launcher());
    no_mpirun.env("PATH", "/no/such").arg("--hostfile").arg(&file).args(["--num_nodes", "2", "--launcher", "openmpi"]);
    let errors = stderr(&no_mpirun.arg(&train_gpt).output().unwrap());
    insta::assert_snapshot!(errors.trim_end(), @"zerorun: --launcher openmpi needs that library's mpirun on the PATH: No such file or directory (os error 2); install it, put its folder first in PATH, or give another --launcher");
}

#[test]
fn ranks_of_one_host_are_joined_by_mpi_if_that_is_asked_for() {
    let test = ranks_of_one_host_are_joined_by_mpi_if_that_is_asked_for;
    let mut without_library = zerorun();
    without_library.args(["-n", "2", "--backend", "mpi", "--"]).arg(std::env::current_exe().unwrap());
    without_library.args(as_program(module_path!(), "as_a_rank")).env(ROLE, "leaves");
    let report = stdout(&without_library.env("CANDLE_ZERO_MPI_LIBRARY", "/no/such/libmpi.so").output().unwrap());
    assert!(
        report.contains("rank reports: ") && report.contains("/no/such/libmpi.so from CANDLE_ZERO_MPI_LIBRARY"),
        "{report}"
    );
    let Some(library) = Mpi::Mpich.library() else {
        return skipped_in_part(test, "no MPICH; scripts/fetch_mpi.sh fetches it");
    };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let start = |backend: &str| {
        let mut command = zerorun();
        command.env("CANDLE_ZERO_MPI_LIBRARY", &library).env("UCX_TLS", "tcp,self");
        command.args(["-n", "2", "--backend", backend]);
        command
    };
    let [shm, mpi] = ["shm", "mpi"].map(|backend| train(start(backend), &train_gpt, 3, folder.path(), backend));
    assert_eq!(shm, mpi);
    // The ranks' memory maps show whether MPI is loaded.
    let mut loads = start("mpi");
    loads.args(["--max_restarts", "1", "--"]).arg(std::env::current_exe().unwrap());
    loads
        .args(as_program(module_path!(), "as_a_rank"))
        .env(ROLE, format!("maps {}", folder.path().join("once").display()));
    let output = loads.output().unwrap();
    let printed = stdout(&output);
    assert!(output.status.success() && stderr(&output).contains("restart 1 of 1"), "{printed} {}", stderr(&output));
    for rank in 0..2 {
        let line = printed.lines().find(|line| line.contains(&format!("rank {rank} of 2 has loaded libmpi.so.12")));
        assert!(line.is_some_and(|line| line.starts_with(&format!("[rank {rank}] "))), "{printed}");
    }
}

#[test]
fn a_launcher_that_mpirun_starts_on_each_host_knows_its_place() {
    let test = a_launcher_that_mpirun_starts_on_each_host_knows_its_place;
    // The ranks need MPICH, regardless of how their launchers are started.
    let Some(library) = Mpi::Mpich.library() else { return skipped(test, "no MPICH; scripts/fetch_mpi.sh fetches it") };
    with_each(test, |mpi| {
        let port = free_port().to_string();
        let mut start = mpirun(mpi, 2).unwrap();
        start.arg("env").arg(format!("CANDLE_ZERO_MPI_LIBRARY={}", library.display()));
        start.args([env!("CARGO_BIN_EXE_zerorun"), "--nnodes", "auto", "--master_addr", "127.0.0.1"]);
        start.args(["--master_port", &port, "--timeout", "60s", "--"]);
        let output = in_role(start, "raw 1 1");
        let printed = stdout(&output);
        let count = printed.matches("has the same bits").count();
        assert!(output.status.success() && count == 2, "{mpi:?}: {printed} {}", stderr(&output));
    });
}

const ROLE: &str = "MPI_TEST_ROLE";

/// Returns the command that runs this test binary as the program of a rank in a role, started by `start`.
fn role_of(mut start: Command, role: &str) -> Command {
    start.args(["env", &format!("{ROLE}={role}")]).arg(std::env::current_exe().unwrap());
    start.args(as_program(module_path!(), "as_a_rank"));
    start
}

fn in_role(start: Command, role: &str) -> Output {
    role_of(start, role).output().unwrap()
}

/// Returns element `i` of a rank's data. The sums of such elements depend on the order of summation.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 101) as f32 * 0.37 + 1.0 / (1 + i % 17 + rank) as f32
}

fn data(rank: usize, len: usize, dtype: DType) -> Flat {
    Flat::from_f32((0..len).map(|i| value(rank, i)).collect(), dtype)
}

/// Returns a command that simulates, on this host, several hosts with these numbers of ranks. The simulated hosts
/// differ only in their names. The program and its arguments are appended. Returns `None` if names cannot be set, or if
/// the MPI library is missing.
fn named_hosts(mpi: Mpi, ranks: &[usize]) -> Option<Command> {
    let probe = Command::new("unshare").args(["-u", "true"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return None;
    }
    let ends: Vec<String> = (1..=ranks.len()).map(|hosts| ranks[..hosts].iter().sum::<usize>().to_string()).collect();
    let mut command = mpirun(mpi, ranks.iter().sum())?;
    if mpi == Mpi::OpenMpi {
        command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]);
    }
    let name = format!(
        "host=0; for end in {}; do [ ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} -lt $end ] || host=$((host + 1)); done; \
         hostname host-$host; exec \"$@\"",
        ends.join(" ")
    );
    command.args(["unshare", "-u", "sh", "-c", &name, "sh"]);
    Some(command)
}

/// Returns the number of bytes that a rank receives in a reduce-scatter of chunks of `n` f32 elements if partial sums
/// are passed from host to host.
fn bytes_in_a_chain(counts: &[usize], rank: usize, n: usize) -> usize {
    let (world, lanes) = (counts.iter().sum::<usize>(), *counts.iter().min().unwrap());
    let start = |host: usize| counts[..host].iter().sum::<usize>();
    let host = (0..counts.len()).rfind(|host| start(*host) <= rank).unwrap();
    let (lane, last) = (rank - start(host), counts.len() - 1);
    let chunks = if lane < lanes { (0..world).filter(|owner| owner % lanes == lane).count() } else { 0 };
    let of_this_host = chunks * (counts[host] - 1);
    let of_the_host_before = if host > 0 { chunks } else { 0 };
    let sums = usize::from(start(last) + rank % lanes != rank);
    4 * n * (of_this_host + of_the_host_before + sums)
}

/// Runs a reduce-scatter, an all-reduce, two gathers and a barrier, all at the same time. Returns the results in
/// `dtype`.
fn collectives(comm: &dyn Communicator, n: usize, dtype: DType, wire: WireFormat) -> candle_zero::Result<Vec<Flat>> {
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

/// Returns `values` as they arrive on another host, in f32.
fn crossed(code: InterHostFormat, values: &Flat) -> Flat {
    let mut arrived = Flat::zeros(DType::F32, values.len());
    let rounded = |dtype: DType| {
        let mut rounded = Flat::zeros(dtype, values.len());
        rounded.as_mut().copy_cast(values.as_ref());
        rounded
    };
    match code {
        InterHostFormat::Blocks(ints) => {
            let mut codes = vec![0; ints.encoded_len(values.len())];
            ints.encode(values.as_ref(), &mut codes);
            ints.decode(&codes, arrived.as_mut());
        }
        InterHostFormat::Bf16 => arrived.as_mut().copy_cast(rounded(DType::BF16).as_ref()),
        InterHostFormat::F16 => arrived.as_mut().copy_cast(rounded(DType::F16).as_ref()),
        other => panic!("this test does not compute {other:?}"),
    }
    arrived
}

/// Adds parts in their order, in f32.
fn add_in_order<'a>(parts: impl Iterator<Item = FlatRef<'a>>) -> Flat {
    let add = |sum: Option<Flat>, part: FlatRef<'a>| match sum {
        None => {
            let mut sum = Flat::zeros(DType::F32, part.len());
            sum.as_mut().copy_cast(part);
            Some(sum)
        }
        Some(mut sum) => {
            sum.as_mut().add_scaled(part, 1.0);
            Some(sum)
        }
    };
    parts.fold(None, add).unwrap()
}

/// Returns the sum of chunk `owner` over `parts`, one part per rank. `counts` are the numbers of ranks on the hosts; a
/// host sends its sum as codes.
fn sum_of_hosts(code: InterHostFormat, counts: &[usize], parts: &[Flat], owner: usize) -> Flat {
    let (world, dtype) = (parts.len(), parts[0].dtype());
    let chunk = parts[0].len() / world;
    let mut first = 0;
    let sums: Vec<Flat> = (counts.iter())
        .map(|count| {
            let ranks = first..first + count;
            first += count;
            let sum = add_in_order(ranks.clone().map(|rank| parts[rank].slice(owner * chunk..(owner + 1) * chunk)));
            if ranks.contains(&owner) { sum } else { crossed(code, &sum) }
        })
        .collect();
    let mut rounded = Flat::zeros(dtype, chunk);
    rounded.as_mut().copy_cast(add_in_order(sums.iter().map(Flat::as_ref)).as_ref());
    rounded
}

/// Checks collectives in which hosts' sums are sent as codes: their results, and the bytes that they transfer.
fn compare_with_sums_of_hosts(comm: &dyn Communicator, counts: &[usize]) {
    let (rank, world) = (comm.rank(), comm.size());
    let several = counts.len() > 1;
    let ints = [(DType::F32, IntFormat::Int8), (DType::F32, IntFormat::Int4), (DType::BF16, IntFormat::Int4)];
    let codes = ints.map(|(dtype, ints)| (dtype, InterHostFormat::Blocks(ints))).into_iter().chain([
        (DType::F32, InterHostFormat::Bf16),
        (DType::F32, InterHostFormat::F16),
        (DType::BF16, InterHostFormat::F16),
    ]);
    for (dtype, code) in codes {
        for n in [0, 1, 5, 999, 70_001, 400_000] {
            let (wire, case) =
                (WireFormat::BetweenHosts(code), format!("rank {rank} of {counts:?}: {n} {dtype:?} {code:?}"));
            let before = comm.report();
            let reduced = comm.reduce_scatter_as(wire, data(rank, n * world, dtype), 1);
            let whole = comm.all_reduce_as(wire, data(rank, n + 1, dtype), 2);
            let gathered = comm.all_gather_as(wire, data(rank, n, dtype), 3);
            let parts: Vec<Flat> = (0..world).map(|r| data(r, n * world, dtype)).collect();
            assert!(reduced.wait().unwrap() == sum_of_hosts(code, counts, &parts, rank), "{case}");
            // Codes arrive once from each of the other hosts.
            let (report, kind) = (comm.report(), CollectiveKind::ReduceScatter);
            let increase =
                |of: fn(&comm::CollectiveKindReport) -> u64| (of(&report.kind(kind)) - of(&before.kind(kind))) as usize;
            let bytes = match code {
                InterHostFormat::Blocks(ints) => ints.encoded_len(n),
                _ => 2 * n,
            };
            let others = counts.len() - 1;
            assert_eq!(increase(|k| k.between_hosts_bytes), others * bytes, "{case}");
            let saved = others as i64 * (4 * n as i64 - bytes as i64);
            assert_eq!(increase(|k| k.exact_bytes) as i64 - increase(|k| k.wire_bytes) as i64, saved, "{case}");
            let mut parts: Vec<Flat> = (0..world).map(|r| data(r, n + 1, dtype)).collect();
            let padded = (n + 1).next_multiple_of(world);
            parts.iter_mut().for_each(|part| part.extend_zeros(padded - n - 1));
            let mut sums = Flat::zeros(dtype, 0);
            (0..world).for_each(|owner| sums.extend_cast(sum_of_hosts(code, counts, &parts, owner).as_ref()));
            sums.truncate(n + 1);
            assert!(whole.wait().unwrap() == sums, "{case}");
            let mut shards = Flat::zeros(dtype, 0);
            for r in 0..world {
                let mut shard = data(r, n, DType::F32);
                shard.as_mut().copy_cast(data(r, n, dtype).as_ref());
                shards.extend_cast(if several { crossed(code, &shard) } else { shard }.as_ref());
            }
            assert!(gathered.wait().unwrap() == shards, "{case}");
        }
    }
    println!("rank {rank} of {world} has the same bits");
}

/// Sends messages between all ranks and runs collectives in the groups of two meshes, at the same time.
fn messages_and_groups(comm: &dyn Communicator, n: usize) -> candle_zero::Result<Vec<Flat>> {
    let (rank, world) = (comm.rank(), comm.size());
    let peers: Vec<usize> = (0..world).filter(|peer| *peer != rank).collect();
    let sent: Vec<_> = peers.iter().map(|to| comm.send(*to, data(rank, n, DType::BF16), 3)).collect();
    let mut results = Vec::new();
    let inner = RankMesh::new(world, &[(MeshAxis::Pipeline, 2)]).expect("an even number of ranks");
    for mesh in [inner, inner.with_outermost(MeshAxis::Pipeline)] {
        for axis in [MeshAxis::Data, MeshAxis::Pipeline] {
            let group = comm.group(&mesh.groups(&[axis]))?;
            let sum = group.reduce_scatter(data(rank, n * group.size(), DType::F32), 4);
            let whole = group.all_gather(data(rank, n, DType::BF16), 5);
            let mean = group.all_reduce(data(rank, n, DType::F32), 6);
            results.extend([sum.wait()?, whole.wait()?, mean.wait()?]);
            let counts = vec![n / 2; group.size()];
            let exchanged = group.all_to_all(data(rank, n / 2 * group.size(), DType::F16), &counts, &counts, 7);
            results.push(exchanged.wait()?);
            group.barrier().wait()?;
        }
    }
    for from in peers {
        results.push(comm.receive(from, DType::BF16, n, 3).wait()?);
    }
    sent.into_iter().try_for_each(comm::Pending::wait)?;
    Ok(results)
}

/// Acts as the program that other tests start on each rank.
#[test]
#[ignore = "started on each rank by other tests"]
fn as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let comm = match comm::from_env(&RankEnv::from_env().unwrap()) {
        Ok(comm) => comm,
        Err(error) => return println!("rank reports: {error}"),
    };
    let (rank, world) = (comm.rank(), comm.size());
    let last = rank + 1 == world;
    match role.split_once(' ').unwrap_or((role.as_str(), "")) {
        // The way in which sums are computed between hosts (each rank's parts are sent as they are, "raw", or partial
        // sums are passed from host to host, "chain"), and the number of ranks on each host.
        (way @ ("raw" | "chain"), counts) => {
            // Every rank also runs the same collectives in as many threads as there are ranks, and compares the
            // results.
            let sizes: &[usize] = if world > 8 { &[999, 20_011] } else { &[0, 1, 5, 999, 70_001, 400_000] };
            for (dtype, wire) in [
                (DType::F32, WireFormat::Exact),
                (DType::BF16, WireFormat::Exact),
                (DType::F16, WireFormat::Exact),
                (DType::F32, WireFormat::Blocks(IntFormat::Int8)),
                (DType::BF16, WireFormat::Blocks(IntFormat::Int8)),
                (DType::BF16, WireFormat::Blocks(IntFormat::Int4)),
            ] {
                for n in sizes.iter().copied() {
                    let found = collectives(&*comm, n, dtype, wire).unwrap();
                    let want = threads::run(world, |comm| collectives(&*comm, n, dtype, wire)).unwrap().remove(rank);
                    assert!(found == want.unwrap(), "rank {rank} of {world}: {n} {dtype:?} {wire:?}");
                }
            }
            let counts: Vec<usize> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
            let before = comm.report();
            let n = 60_000;
            comm.reduce_scatter(data(rank, n * world, DType::F32), 1).wait().unwrap();
            let bytes = comm.report().kind(CollectiveKind::ReduceScatter).wire_bytes
                - before.kind(CollectiveKind::ReduceScatter).wire_bytes;
            let expected = if way == "raw" { 4 * n * (world - 1) } else { bytes_in_a_chain(&counts, rank, n) };
            assert_eq!(bytes, expected as u64, "rank {rank} of {counts:?}");
            println!("rank {rank} of {world} has the same bits");
        }
        ("groups", counts) => {
            let counts: Vec<usize> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
            for n in [0, 5, 1_000_003] {
                let found = messages_and_groups(&*comm, n).unwrap();
                let want = threads::run(world, |comm| messages_and_groups(&*comm, n)).unwrap().remove(rank);
                assert!(found == want.unwrap(), "rank {rank} of {counts:?}: {n}");
            }
            let received = comm.report().kind(CollectiveKind::Receive);
            let host = |rank: usize| (0..).find(|host| rank < counts[..=*host].iter().sum()).unwrap();
            let others = (0..world).filter(|other| host(*other) != host(rank)).count() as u64;
            assert_eq!(received.between_hosts_bytes * (world as u64 - 1), received.wire_bytes * others);
            println!("rank {rank} of {world} has the same bits");
        }
        ("host-sums", counts) => {
            let counts: Vec<usize> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
            compare_with_sums_of_hosts(&*comm, &counts);
        }
        ("waits", file) => loop {
            match comm.all_reduce(data(rank, 5, DType::F32), 7).wait() {
                Ok(_) => std::fs::write(format!("{file}.{rank}"), "").unwrap(),
                Err(error) => return println!("rank {rank} reports: {error}"),
            }
        },
        ("configs" | "data", _) => {
            let clipping = if role == "configs" { 1.0 + rank as f64 } else { 1.0 };
            let config = serde_json::json!({
                "train_micro_batch_size_per_gpu": 1, "gradient_clipping": clipping,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            });
            let builder = candle_zero::Engine::builder().device(candle_core::Device::Cpu).communicator(comm);
            let builder = builder.same_on_all_ranks("/data/tokens.bin", if role == "data" { rank as u64 } else { 0 });
            let error = builder.initialize(|vb| candle_nn::linear(4, 5, vb), config).map(drop).unwrap_err();
            println!("rank {rank} reports: {error}");
        }
        ("maps", file) => {
            // The first start fails, because the last rank creates `file` and ends. The restart checks the memory maps.
            comm.barrier().wait().unwrap();
            if last && !Path::new(file).exists() {
                std::fs::write(file, "").unwrap();
                std::process::exit(3);
            }
            if !last && !Path::new(file).exists() {
                comm.all_reduce(data(rank, 5, DType::F32), 7).wait().unwrap();
            }
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(maps.contains("/libmpi.so.12"), "{maps}");
            println!("rank {rank} of {world} has loaded libmpi.so.12");
        }
        ("gives-up", _) if last => comm.abort("the test wants it"),
        ("leaves", _) if last => {}
        ("no-message-gives-up", _) if last => comm.abort("the test wants it"),
        ("no-message-leaves", _) if last => {}
        ("no-message-differs", _) if last => drop(comm.send(0, data(rank, 5, DType::F32), 8).wait()),
        (way, _) if way.starts_with("no-message") => {
            // Only rank 0 waits for the last rank; the others wait for rank 0.
            let from = if rank == 0 { world - 1 } else { 0 };
            let error = comm.receive(from, DType::F32, 5, 7).wait().unwrap_err();
            println!("rank {rank} reports: {error}");
        }
        ("gives-up" | "leaves" | "differs", n) => {
            // The last rank's few elements are sent as raw parts, regardless of the others.
            let n = if last { 8 } else { n.parse().unwrap_or(4) };
            let error = comm.all_reduce(data(rank, n, DType::F32), 7).wait().unwrap_err();
            println!("rank {rank} reports: {error}");
        }
        (role, _) => panic!("unknown role {role}"),
    }
}

/// Runs the role `way` on hosts with these numbers of ranks, and checks that all ranks compute the same bits as ranks
/// that are threads.
fn compare_with_threads(mpi: Mpi, start: Command, way: &str, ranks: &[usize]) {
    let counts: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let output = in_role(start, &format!("{way} {}", counts.join(" ")));
    let count = stdout(&output).matches("has the same bits").count();
    assert!(output.status.success() && count == ranks.iter().sum::<usize>(), "{mpi:?} {ranks:?}: {}", stderr(&output));
}

#[test]
fn collectives_on_two_hosts_are_those_of_threads_to_the_bit() {
    let test = collectives_on_two_hosts_are_those_of_threads_to_the_bit;
    let Some(hosts) = hosts(test) else { return };
    with_each(test, |mpi| {
        let raw = [[2, 2], [1, 1], [1, 2], [3, 1]].map(|ranks| ("raw", ranks));
        for (way, ranks) in raw.into_iter().chain([[3, 3], [2, 4], [4, 2]].map(|ranks| ("chain", ranks))) {
            compare_with_threads(mpi, hosts.mpirun(mpi, ranks).unwrap(), way, &ranks);
        }
    });
}

#[test]
fn messages_and_groups_across_hosts_have_the_bits_of_threads() {
    let test = messages_and_groups_across_hosts_have_the_bits_of_threads;
    let Some(hosts) = hosts(test) else { return };
    with_each(test, |mpi| {
        for ranks in [[2, 2], [1, 3], [1, 1], [2, 4]] {
            compare_with_threads(mpi, hosts.mpirun(mpi, ranks).unwrap(), "groups", &ranks);
        }
    });
}

#[test]
fn messages_and_groups_of_processes_have_the_bits_of_threads() {
    let mut start = zerorun();
    start.args(["-n", "4"]).arg(std::env::current_exe().unwrap()).args(as_program(module_path!(), "as_a_rank"));
    let output = start.env(ROLE, "groups 4").output().unwrap();
    let count = stdout(&output).matches("has the same bits").count();
    assert!(output.status.success() && count == 4, "{} {}", stdout(&output), stderr(&output));
}

#[test]
fn a_rank_that_waits_for_a_message_of_another_host_is_told_why_it_does_not_come() {
    let test = a_rank_that_waits_for_a_message_of_another_host_is_told_why_it_does_not_come;
    let Some(hosts) = hosts(test) else { return };
    let [_, second] = hosts.names();
    with_each(test, |mpi| {
        for (role, words) in [
            (
                "no-message-gives-up",
                format!(
                    "rank 3 stopped (on host {second}: the test wants it) while rank 0 waited in receive no. 1 with 5 f32"
                ),
            ),
            ("no-message-leaves", "rank 3 left the job while rank 0 waited".to_string()),
            (
                "no-message-differs",
                "rank 0 is in receive no. 1 with 5 f32 elements (content hash 00000007), and rank 3 is in send no. 1 with 5 f32 elements (content hash 00000008)"
                    .to_string(),
            ),
        ] {
            let output = in_role(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), role);
            assert!(report_of(0, &output).contains(&words), "{mpi:?} {role}: {} {}", stdout(&output), stderr(&output));
            assert!(output.status.code() != Some(124), "{mpi:?} {role}: it hung");
        }
    });
}

#[test]
fn sums_through_several_hosts_and_of_many_ranks_are_those_of_threads_to_the_bit() {
    let test = sums_through_several_hosts_and_of_many_ranks_are_those_of_threads_to_the_bit;
    with_each(test, |mpi| {
        // With 9 and 7 ranks, integers and 16-bit numbers are also sent as partial sums, and a chunk's owner is
        // not always one of the ranks that add it up.
        for ranks in [&[2, 3, 2][..], &[3, 2, 2, 4], &[9, 7]] {
            match named_hosts(mpi, ranks) {
                Some(start) => compare_with_threads(mpi, start, "chain", ranks),
                None => return skipped_in_part(test, "simulated hosts cannot be given names here"),
            }
        }
    });
}

#[test]
fn sums_of_hosts_cross_as_codes_once_for_each_owner_and_are_added_in_the_order_of_hosts() {
    let test = sums_of_hosts_cross_as_codes_once_for_each_owner_and_are_added_in_the_order_of_hosts;
    let Some(hosts) = hosts(test) else { return };
    with_each(test, |mpi| {
        for ranks in [[2, 2], [1, 1], [1, 2], [3, 1]] {
            compare_with_threads(mpi, hosts.mpirun(mpi, ranks).unwrap(), "host-sums", &ranks);
        }
        for ranks in [&[3][..], &[2, 3, 2], &[1, 2, 1, 4]] {
            match named_hosts(mpi, ranks) {
                Some(start) => compare_with_threads(mpi, start, "host-sums", ranks),
                None => return skipped_in_part(test, "simulated hosts cannot be given names here"),
            }
        }
    });
}

#[test]
fn ranks_of_the_other_host_are_told_who_gave_up_left_or_differs() {
    let test = ranks_of_the_other_host_are_told_who_gave_up_left_or_differs;
    let Some(hosts) = hosts(test) else { return };
    let [_, second] = hosts.names();
    with_each(test, |mpi| {
        // Few elements are sent as raw parts; many elements, with three ranks per host, are sent as partial sums.
        for (ranks, n) in [(TWO_AND_TWO, 4), ([3, 3], 400_000)] {
            let last = ranks[0] + ranks[1] - 1;
            for (role, words) in [
                ("gives-up", format!("rank {last} stopped (on host {second}: the test wants it)")),
                ("leaves", format!("rank {last} left the job")),
                ("differs", "ranks have diverged".to_string()),
            ] {
                let output = in_role(hosts.mpirun(mpi, ranks).unwrap(), &format!("{role} {n}"));
                let printed = stdout(&output);
                for rank in 0..ranks[0] {
                    let line = printed.lines().find(|line| line.contains(&format!("rank {rank} reports: ")));
                    let is_told = line.is_some_and(|line| line.contains(&words));
                    assert!(is_told, "{mpi:?} {ranks:?} {role}: {printed} {}", stderr(&output));
                }
                assert!(output.status.code() != Some(124), "{mpi:?} {ranks:?} {role}: it hung");
            }
        }
    });
}

#[test]
fn ranks_under_mpirun_are_told_within_15_s_that_the_cable_is_out_and_end() {
    let test = ranks_under_mpirun_are_told_within_15_s_that_the_cable_is_out_and_end;
    let Some(hosts) = hosts(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let program = program.file_name().unwrap().to_str().unwrap();
    with_each(test, |mpi| {
        let file = folder.path().join(format!("{mpi:?}"));
        let mut job = role_of(hosts.mpirun(mpi, TWO_AND_TWO).unwrap(), &format!("waits {}", file.display()));
        // The output goes to a file instead of a pipe, because mpirun's daemon on the disconnected host would keep its
        // end of a pipe open.
        let log = folder.path().join(format!("{mpi:?}.log"));
        let to = File::create(&log).unwrap();
        job.stdout(to.try_clone().unwrap()).stderr(to);
        let mut job = job.spawn().unwrap();
        let began = || (0..4).all(|rank| file.with_extension(rank.to_string()).exists()).then_some(());
        wait_up_to(Duration::from_secs(60), "the first sums", began);
        let ranks = [0, 1].map(|host| hosts.processes(host, program)).concat();
        assert_eq!(ranks.len(), 4, "{mpi:?}");
        hosts.plug(1, false);
        let all_ended = || ranks.iter().all(|pid| !runs(*pid)).then_some(());
        wait_up_to(Duration::from_secs(15), "the end of all ranks", all_ended);
        // mpirun may wait for its daemon on that host.
        std::thread::sleep(Duration::from_secs(1));
        job.kill().unwrap();
        job.wait().unwrap();
        let printed = std::fs::read_to_string(&log).unwrap();
        hosts.plug(1, true);
        let [_, second] = hosts.names();
        let words = format!("on host {second}: its host is gone: it sent nothing for 8 s");
        for rank in 0..2 {
            let line = printed.lines().find(|line| line.contains(&format!("rank {rank} reports: ")));
            assert!(line.is_some_and(|line| line.contains(&words)), "{mpi:?}: {printed}");
        }
    });
}

/// Returns the error message that a rank reports in the complete output.
fn report_of(rank: usize, output: &Output) -> String {
    let printed = stdout(output);
    let prefix = format!("rank {rank} reports: ");
    let line = printed.lines().find_map(|line| Some(line.split_once(&prefix)?.1.to_string()));
    line.unwrap_or_else(|| panic!("{printed}{}", stderr(output)))
}

#[test]
fn hosts_with_other_configurations_or_data_are_told_what_differs() {
    let test = hosts_with_other_configurations_or_data_are_told_what_differs;
    let Some(hosts) = hosts(test) else { return };
    let mut reports = Vec::new();
    with_each(test, |mpi| {
        for role in ["configs", "data"] {
            let output = in_role(hosts.mpirun(mpi, [1, 1]).unwrap(), role);
            reports.push((role, report_of(1, &output)));
        }
    });
    for (role, text) in reports {
        let expected = match role {
            "configs" => "gradient_clipping is 2.0 on rank 1 and 1.0 on rank 0",
            _ => "the content of /data/tokens.bin on rank 1 is not that of /data/tokens.bin on rank 0",
        };
        assert!(text.contains(expected), "{role}: {text}");
    }
}

#[test]
fn hosts_with_other_programs_are_named() {
    let test = hosts_with_other_programs_are_named;
    let Some(hosts) = hosts(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    for (host, name) in hosts.names().into_iter().enumerate() {
        let program = folder.path().join(name);
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        // The file differs as it would after a rebuild, but runs as before.
        let mut file = File::options().append(true).open(&program).unwrap();
        std::io::Write::write_all(&mut file, &vec![0; host]).unwrap();
    }
    with_each(test, |mpi| {
        let mut start = hosts.mpirun(mpi, [1, 1]).unwrap();
        start.args(["env", &format!("{ROLE}=leaves"), "sh", "-c"]);
        start.arg(format!("exec {}/$(hostname) \"$@\"", folder.path().display())).arg("sh");
        let output = start.args(as_program(module_path!(), "as_a_rank")).output().unwrap();
        let [a, b] = hosts.names();
        let printed = stdout(&output);
        let message = format!("rank reports: hosts {a} and {b} run programs with different contents");
        assert_eq!(printed.matches(&message).count(), 2, "{mpi:?}: {printed}{}", stderr(&output));
    });
}

/// Builds a mock of an MPI library. It has the functions that ranks call first, but connects no ranks. If `kind`
/// is `old`, the mock represents a version before MPI 3; if it is `one_thread`, the mock supports only a single
/// thread; otherwise, it has all required features.
fn mock_mpi_library(folder: &Path, kind: &str) -> std::path::PathBuf {
    let mut code = String::new();
    let mut function = |name: &str, arguments: &str, body: &str| {
        code += &format!(
            "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn MPI_{name}({arguments}) -> i32 {{ unsafe {{ {body} }} 0 }}\n"
        );
    };
    let granted = if kind == "one_thread" { 0 } else { 3 };
    function("Init_thread", "_: *mut i32, _: *mut u8, _: i32, granted: *mut i32", &format!("*granted = {granted};"));
    function("Comm_rank", "_: usize, rank: *mut i32", "*rank = 0;");
    function("Comm_size", "_: usize, size: *mut i32", "*size = 1;");
    for name in ["Comm_set_errhandler", "Isend", "Irecv", "Test", "Allgather", "Error_string", "Abort", "Finalize"] {
        function(name, "", "");
    }
    if kind != "old" {
        let body = "std::ptr::copy(c\"A stand-in 1.0\".as_ptr().cast(), text, 15); *len = 14;";
        function("Get_library_version", "text: *mut u8, len: *mut i32", body);
    }
    let [source, library] = ["mpi.rs", "libmpi.so"].map(|name| folder.join(name));
    std::fs::write(&source, format!("#![allow(non_snake_case, unused_unsafe)]\n{code}")).unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output =
        rustc.args(["--edition", "2024", "--crate-type", "cdylib", "-o"]).args([&library, &source]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    library
}

/// Sets the environment so that libraries are found in this folder, and no `mpirun` is found.
fn with_libraries_of(folder: &Path, command: &mut Command) {
    command.env("LD_LIBRARY_PATH", folder).env("PATH", "/usr/bin:/bin").env("UCX_TLS", "tcp,self");
}

/// Checks that `zerorun report` finds MPICH in this folder under Debian's name.
fn is_reported(folder: &Path) {
    let mut report = zerorun();
    with_libraries_of(folder, report.arg("report"));
    let printed = stdout(&report.output().unwrap());
    assert!(printed.contains("\nmpi          libmpich.so.12 (MPICH Version: "), "{printed}");
}

/// Starts two launchers on this machine, like those of two hosts with one rank each, which find libraries in this
/// folder. The ranks run the collectives.
fn compare_under_two_launchers(libraries: &Path) {
    let path = libraries.display().to_string();
    let port = free_port().to_string();
    let both = [0, 1].map(|node| {
        let mut command = zerorun();
        command.args(["--nnodes", "2", "--node_rank", &node.to_string(), "--master_addr", "127.0.0.1"]);
        command.args(["--master_port", &port, "--timeout", "60s", "--"]).arg(std::env::current_exe().unwrap());
        with_libraries_of(libraries, command.args(as_program(module_path!(), "as_a_rank")).env(ROLE, "raw 1 1"));
        start(&mut command)
    });
    for (rank, launcher) in both.into_iter().enumerate() {
        let output = launcher.wait_with_output().unwrap();
        let is_same = stdout(&output).contains(&format!("rank {rank} of 2 has the same bits"));
        assert!(output.status.success() && is_same, "{path}: {}", stderr(&output));
    }
}

#[test]
fn mpich_is_found_under_the_name_that_debian_gives_it() {
    let test = mpich_is_found_under_the_name_that_debian_gives_it;
    match Mpi::Mpich.library() {
        Some(library) => {
            let folder = tempfile::tempdir().unwrap();
            let link = |from: &Path, to: &str| std::os::unix::fs::symlink(from, folder.path().join(to)).unwrap();
            link(&library, "libmpich.so.12");
            // This is where the library looks for its transports.
            link(&library.with_file_name("mpich"), "mpich");
            is_reported(folder.path());
            compare_under_two_launchers(folder.path());
        }
        None => skipped_in_part(test, "no MPICH; scripts/fetch_mpi.sh fetches it"),
    }
    match debian_mpich() {
        // No ranks are started: in one out of three runs, ranks with Debian's MPICH 4.0.2 waited for each other
        // indefinitely in MPI_Finalize.
        Some(folder) => is_reported(&folder),
        None => skipped_in_part(test, "no MPICH from Debian; scripts/fetch_mpi.sh fetches it if apt-get is available"),
    }
}

#[test]
fn a_library_that_is_missing_or_not_the_launchers_is_named() {
    let test = a_library_that_is_missing_or_not_the_launchers_is_named;
    let mut without_library = Command::new("env");
    for (name, value) in [("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")] {
        without_library.arg(format!("OMPI_COMM_WORLD_{name}={value}"));
    }
    without_library.arg("CANDLE_ZERO_MPI_LIBRARY=/nonexistent/libmpi.so");
    let report = |output: Output| {
        let text = stdout(&output);
        text.lines().find_map(|line| Some(line.split_once("rank reports: ")?.1.to_string())).unwrap_or(stderr(&output))
    };
    insta::assert_snapshot!(report(in_role(without_library, "leaves")), @"the ranks were started on several hosts or by an MPI launcher, but no MPI library was found (tried /nonexistent/libmpi.so from CANDLE_ZERO_MPI_LIBRARY (/nonexistent/libmpi.so: cannot open shared object file: No such file or directory)); install MPICH (or, for mpirun only, Open MPI), add its lib folder to LD_LIBRARY_PATH, or set CANDLE_ZERO_MPI_LIBRARY to its file");
    // These files have the names of MPI libraries, but cannot be loaded.
    let folder = tempfile::tempdir().unwrap();
    for name in ["libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12", "libmpi.so.40"] {
        std::fs::write(folder.path().join(name), "no library").unwrap();
    }
    let mut start = Command::new("env");
    start.args(["PMI_RANK=1", "PMI_SIZE=2", "PATH=/usr/bin:/bin"]);
    start.arg(format!("LD_LIBRARY_PATH={}", folder.path().display()));
    let text = report(in_role(start, "leaves")).replace(&folder.path().display().to_string(), "FOLDER");
    insta::assert_snapshot!(text, @"the MPI library libmpi_abi.so.1 was found but cannot be loaded (FOLDER/libmpi_abi.so.1: file too short); install its dependencies, or set CANDLE_ZERO_MPI_LIBRARY to another file");
    for (kind, expected) in
        [("old", "MPI_Get_library_version"), ("one_thread", "several threads"), ("whole", "rank 0 of 1")]
    {
        let folder = tempfile::tempdir().unwrap();
        let library = mock_mpi_library(folder.path(), kind);
        let mut start = Command::new("env");
        start.args(["PMI_RANK=1", "PMI_SIZE=2"]).arg(format!("CANDLE_ZERO_MPI_LIBRARY={}", library.display()));
        let text = report(in_role(start, "leaves")).replace(&library.display().to_string(), "LIBRARY");
        assert!(text.contains(expected), "{kind}: {text}");
        match kind {
            "old" => {
                insta::assert_snapshot!(text, @"LIBRARY has no MPI_Get_library_version: it is not an MPI library that this program can use; use MPICH, Intel MPI, or Open MPI 4 or later")
            }
            "one_thread" => {
                insta::assert_snapshot!(text, @"LIBRARY (A stand-in 1.0) does not let several threads call it in turn (MPI_THREAD_SERIALIZED); use a build with thread support")
            }
            _ => {
                insta::assert_snapshot!(text, @"the environment reports rank 1 of 2, but MPI reports rank 0 of 1 (LIBRARY (A stand-in 1.0)): the library is not that of the mpirun that started the ranks or, under zerorun, is not MPICH-compatible; set CANDLE_ZERO_MPI_LIBRARY to the right file; Slurm's srun needs --mpi=pmi2")
            }
        }
    }
    for [launcher, other] in [[Mpi::OpenMpi, Mpi::Mpich], [Mpi::Mpich, Mpi::OpenMpi]] {
        let (Some(mut start), Some(library)) = (mpirun(launcher, 2), other.library()) else {
            return skipped_in_part(test, "fewer than two MPI libraries; scripts/fetch_mpi.sh fetches them");
        };
        start.arg("env").arg(format!("CANDLE_ZERO_MPI_LIBRARY={}", library.display()));
        let text = report(in_role(start, "leaves"));
        let words = match launcher {
            Mpi::OpenMpi => {
                format!("Open MPI's mpirun started the ranks, but the library found is {}", library.display())
            }
            Mpi::Mpich => "MPI reports rank 0 of 1".into(),
        };
        assert!(text.contains(&words), "{launcher:?}: {text}");
    }
}
