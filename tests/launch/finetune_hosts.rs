//! `zerorun finetune` on two hosts: the adapter's bytes are those of a run on one host, and the chosen distribution
//! over the hosts and its reason are printed.

use crate::mpi::{hosts, with_each};
use crate::nodes::cluster;
use crate::support::cluster::{Hosts, Mpi};
use crate::support::processes::{free_port, repository, start, stderr, stdout, zerorun};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_zerorun");

/// Adds the arguments of a short fine-tuning run to a command that begins with `zerorun`.
fn finetune(command: &mut Command, out: &Path, more: &[&str]) {
    let fixtures = repository().join("tests/fixtures/finetune");
    command.arg("finetune").arg(fixtures.join("models/llama"));
    command.arg("--data").arg(fixtures.join("smollm2/chats.jsonl"));
    command.args(["--steps", "3", "--batch", "8", "--lora", "r=4,dropout=0.1", "--ctx", "64"]);
    command.arg("--cache").arg(out.with_extension("cache")).arg("--out").arg(out).args(more);
}

/// Returns the result's files, without the model card.
fn files(out: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap());
    let name = |entry: &std::fs::DirEntry| entry.file_name().into_string().unwrap();
    let entries = entries.filter(|entry| name(entry) != "README.md" && entry.path().is_file());
    entries.map(|entry| (name(&entry), std::fs::read(entry.path()).unwrap())).collect()
}

fn succeeded(output: &Output) -> String {
    let output_text = format!("{}{}", stdout(output), stderr(output));
    assert!(output.status.success(), "{output_text}");
    output_text
}

/// Writes a hostfile with two ranks on each host.
fn hostfile(folder: &Path) -> std::path::PathBuf {
    let file = folder.join("hostfile");
    std::fs::write(&file, "10.77.0.1 slots=2\n10.77.0.2 slots=2\n").unwrap();
    file
}

/// Returns a command that runs `zerorun` on the first host, with a program in place of ssh.
fn first_host(hosts: &Hosts) -> Command {
    let mut command = hosts.command_on(0, 200).unwrap();
    command.arg("env").arg(format!("ZERORUN_RSH={}", hosts.remote_shell().display())).arg(LAUNCHER);
    command
}

/// Writes a configuration for stage 3 that divides the parameters among the ranks of each group of `shards` ranks, or
/// among all ranks. Returns its path.
fn stage_3(folder: &Path, shards: Option<usize>) -> String {
    let file = folder.join(format!("zero3-{shards:?}.json"));
    let mut zero = json!({"stage": 3});
    if let Some(ranks) = shards {
        zero["mics_shard_size"] = json!(ranks);
    }
    std::fs::write(&file, json!({ "zero_optimization": zero }).to_string()).unwrap();
    file.display().to_string()
}

#[test]
fn an_adapter_of_two_hosts_has_the_bytes_of_one_host_and_the_choice_has_its_reason() {
    let test = an_adapter_of_two_hosts_has_the_bytes_of_one_host_and_the_choice_has_its_reason;
    let Some(hosts) = cluster(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut one = zerorun();
    finetune(&mut one, &at("one"), &["-n", "4"]);
    succeeded(&one.output().unwrap());
    let expected = files(&at("one"));
    assert!(expected.contains_key("adapter_model.safetensors"));

    let hostfile = hostfile(folder.path());
    let mut command = first_host(&hosts);
    finetune(&mut command, &at("by-ssh"), &["--hostfile", hostfile.to_str().unwrap()]);
    let log = succeeded(&command.output().unwrap());
    assert!(files(&at("by-ssh")) == expected, "{log}");
    let chosen = log.lines().find(|line| line.contains("chosen for the available memory")).unwrap();
    for part in [
        "of the 2 hosts",
        "at the measured",
        "with shards spread over all hosts (stage 3), it would receive",
        "in a pipeline (--pipeline)",
    ] {
        assert!(chosen.contains(part), "{part}: {chosen}");
    }

    for (name, shards) in [("groups", Some(2)), ("all", None)] {
        let config = stage_3(folder.path(), shards);
        let mut command = first_host(&hosts);
        let flags = ["--hostfile", hostfile.to_str().unwrap(), "--ds_config", &config];
        finetune(&mut command, &at(name), &flags);
        let log = succeeded(&command.output().unwrap());
        assert!(files(&at(name)) == expected, "{name}: {log}");
    }

    // A pipeline across the hosts has the same bits as one rank, and two pipelines have the same bits as two ranks.
    for (pipeline, ranks) in [("4", 1), ("2", 2)] {
        let [one, divided] = ["ranks", "pipeline"].map(|name| at(&format!("{name}-{pipeline}")));
        let mut command = zerorun();
        finetune(&mut command, &one, &["-n", &ranks.to_string()]);
        succeeded(&command.output().unwrap());
        let mut command = first_host(&hosts);
        let flags = ["--hostfile", hostfile.to_str().unwrap(), "--pipeline", pipeline];
        finetune(&mut command, &divided, &flags);
        let log = succeeded(&command.output().unwrap());
        assert!(files(&divided) == files(&one), "{pipeline}: {log}");
        let chosen = log.lines().find(|line| line.contains("chosen for the available memory")).unwrap();
        for part in [&format!("a pipeline of {pipeline} ranks"), "each of the 2 hosts receives only activations"] {
            assert!(chosen.contains(part), "{part}: {chosen}");
        }
    }

    // One launcher runs on each host, as if a job scheduler had started it.
    let port = free_port().to_string();
    let launchers = ["0", "1"].map(|node| {
        let mut command = hosts.command_on(usize::from(node == "1"), 200).unwrap();
        command.arg(LAUNCHER);
        let node_flags =
            ["--nnodes", "2", "--node_rank", node, "--master_addr", "10.77.0.1", "--master_port", &port, "-n", "2"];
        finetune(&mut command, &at("nodes"), &node_flags);
        start(&mut command)
    });
    for launcher in launchers {
        succeeded(&launcher.wait_with_output().unwrap());
    }
    assert!(files(&at("nodes")) == expected);
}

#[test]
fn mpirun_starts_the_ranks_of_a_fine_tuning_with_both_libraries() {
    let test = mpirun_starts_the_ranks_of_a_fine_tuning_with_both_libraries;
    let Some(hosts) = hosts(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut one = zerorun();
    finetune(&mut one, &at("one"), &["-n", "4"]);
    succeeded(&one.output().unwrap());
    let hostfile = hostfile(folder.path());
    with_each(test, |mpi| {
        let name = if mpi == Mpi::OpenMpi { "openmpi" } else { "mpich" };
        let mut command = hosts.command_with_mpirun(mpi).unwrap();
        command.arg(LAUNCHER);
        let words = hosts.options(mpi).unwrap().join(" ");
        let flags = ["--hostfile", hostfile.to_str().unwrap(), "--launcher", name, "--launcher_args", &words];
        finetune(&mut command, &at(name), &flags);
        let log = succeeded(&command.output().unwrap());
        assert!(files(&at(name)) == files(&at("one")), "{name}: {log}");
    });
}

#[test]
fn flags_for_hosts_that_do_not_fit_each_other_are_refused_before_anything_is_read() {
    let refused = |flags: &[&str]| {
        let mut command = zerorun();
        command.args(["finetune", "no-such-model", "--data", "no-such-data", "--out", "no-such-out"]).args(flags);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        stderr(&output).split("\n\n").next().unwrap_or_default().to_string()
    };
    insta::assert_snapshot!(refused(&["--nnodes", "2", "--master_addr", "a"]), @"zerorun: --nnodes 2 needs --node_rank; give each host its index from 0 to 1, and give all hosts the first host's address");
    insta::assert_snapshot!(refused(&["--nnodes", "2", "--hostfile", "hosts"]), @"zerorun: the argument '--nnodes <N>' cannot be used with '--hostfile <FILE>'");
    insta::assert_snapshot!(refused(&["--min_nodes", "1", "--max_restarts", "1"]), @"zerorun: --min_nodes 1 is the minimum number of hosts after a restart, but this job has one host; give --hostfile or --nnodes, or leave --min_nodes out");
    insta::assert_snapshot!(refused(&["--hostfile", "no-such-file"]), @"zerorun: cannot read the hostfile no-such-file: No such file or directory (os error 2); give --hostfile a file with a line NAME slots=N for each host");
}
