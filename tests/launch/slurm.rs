//! Training under Slurm's `srun`, on two nodes whose daemons the tests start: each rank is a task, or each node has a
//! launcher.

use crate::mpi::{config, steps, three_steps, train};
use crate::nodes::{cluster, step_count};
use crate::support::processes::{as_program, example, program, start, stderr, stdout, wait_up_to, zerorun};
use crate::support::skips::{skipped, skipped_in_part};
use crate::support::slurm::Slurm;
use candle_zero::comm::RankEnv;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Returns two nodes, or reports why there are none.
fn slurm<T: Fn() + Copy>(test: T) -> Option<Slurm> {
    if let Some(name) = Slurm::missing_program() {
        skipped(test, format!("no {name}; apt-get install slurm-wlm"));
        return None;
    }
    cluster(test).map(Slurm::start)
}

/// Returns an `srun` command for four tasks, each of which is a rank. The program and its arguments are appended.
fn four_tasks(slurm: &Slurm, options: &str) -> Command {
    let mut srun = slurm.srun(&format!("--mpi=pmi2 -N 2 -n 4 {options}"));
    // MPICH sends UCX addresses as PMI 1 lines of more than 1024 bytes, which Slurm 22.05 sometimes reads only in part.
    srun.env("MPIR_CVAR_CH4_NETMOD", "ofi");
    srun
}

/// Trains `nano` for three steps at stage 3 in four tasks. If a task is still waiting for an answer from Slurm's PMI
/// after a minute, although a start takes only seconds, this is reported and the tasks are started once more.
fn train_in_tasks<T: Fn()>(
    test: T,
    slurm: &Slurm,
    options: &str,
    train_gpt: &Path,
    metrics: &Path,
) -> Vec<[String; 2]> {
    let train = || start(three_steps(&mut four_tasks(slurm, options), train_gpt, &config(3), metrics));
    let mut srun = train();
    let begin = Instant::now();
    while srun.try_wait().unwrap().is_none() && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    if srun.try_wait().unwrap().is_none() {
        let tasks: Vec<i32> = [0, 1].iter().flat_map(|node| slurm.hosts().processes(*node, "train_gpt")).collect();
        let states: Vec<String> = tasks.iter().map(|pid| state(*pid)).collect();
        eprintln!("the tasks after a minute:\n{}", states.join("\n"));
        if tasks.iter().any(|pid| waits_for_pmi(*pid)) {
            skipped_in_part(
                test,
                "a task got no answer from Slurm's PMI for a minute; the tasks were started once more",
            );
            kill_process(Pid::from_child(&srun), Signal::TERM).unwrap();
            srun.wait().unwrap();
            srun = train();
        }
    }
    let output = srun.wait_with_output().unwrap();
    assert!(output.status.success(), "{options}: {} {}", output.status, stderr(&output));
    steps(metrics)
}

/// Tells whether the process is reading from the descriptor that connects it to Slurm's PMI.
fn waits_for_pmi(pid: i32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let environment = read("environ");
    let descriptor = environment.split('\0').find_map(|line| line.strip_prefix("PMI_FD=")?.parse::<i32>().ok());
    let call = read("syscall");
    let argument = call.split_whitespace().nth(1);
    descriptor.is_some_and(|descriptor| argument == Some(&format!("{descriptor:#x}")))
}

/// Describes what the threads of a process are doing.
fn state(pid: i32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().map_while(Result::ok);
    let threads: Vec<String> = tasks
        .map(|task| {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default().trim().to_string();
            format!("{} ({}, {})", read("comm"), read("wchan"), read("syscall"))
        })
        .collect();
    format!("{pid}: {}", threads.join("; "))
}

/// Returns the steps of four ranks on one host at stage 3.
fn on_one_host(train_gpt: &Path, folder: &Path) -> Vec<[String; 2]> {
    let mut one = zerorun();
    one.args(["-n", "4"]);
    train(one, train_gpt, 3, folder, "one")
}

#[test]
fn four_tasks_of_srun_on_two_nodes_have_the_bits_of_four_ranks_on_one_host() {
    let test = four_tasks_of_srun_on_two_nodes_have_the_bits_of_four_ranks_on_one_host;
    let Some(slurm) = slurm(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let expected = on_one_host(&train_gpt, folder.path());
    // Without a number of tasks per node, Slurm fills the first node: three tasks run there and one on the second.
    for (name, options) in [("two and two", "--ntasks-per-node=2"), ("three and one", "")] {
        let metrics = folder.path().join(format!("{name}.jsonl"));
        assert_eq!(train_in_tasks(test, &slurm, options, &train_gpt, &metrics), expected, "{name}");
    }
}

#[test]
fn a_launcher_on_each_node_by_srun_or_by_the_batch_script_of_deploy_gives_the_bits_of_one_host() {
    let test = a_launcher_on_each_node_by_srun_or_by_the_batch_script_of_deploy_gives_the_bits_of_one_host;
    let Some(slurm) = slurm(test) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let expected = on_one_host(&train_gpt, folder.path());

    let launcher = env!("CARGO_BIN_EXE_zerorun");
    let mut srun = slurm.srun("-N 2 --ntasks-per-node=1");
    srun.args([launcher, "--nnodes", "auto", "--master_addr", "10.77.0.1", "-n", "2"]);
    assert_eq!(train(srun, &train_gpt, 3, folder.path(), "srun"), expected, "srun");

    // `sbatch --wait` polls only every ten seconds, so the script polls more often.
    let text = format!(
        "cd {}\n\
         zerorun deploy slurm --nodes 2 -n 2 \"$@\" > job.sh && id=$(sbatch --parsable -o job.out job.sh) || exit\n\
         while :; do\n\
         case $(squeue -h -t all -j $id -o %T) in\n\
         PENDING | CONFIGURING | RUNNING | COMPLETING) sleep 0.1 ;;\n\
         COMPLETED) exit 0 ;;\n\
         *) cat job.out >&2; exit 1 ;;\n\
         esac\n\
         done",
        folder.path().display()
    );
    let submit = program(folder.path(), "submit", &text);
    let mut batch = slurm.command(0, 240, submit.to_str().unwrap());
    let bin = Path::new(launcher).parent().unwrap();
    batch.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default()));
    assert_eq!(train(batch, &train_gpt, 3, folder.path(), "sbatch"), expected, "sbatch");
}

/// Acts as the program that the next test starts in every task.
#[test]
#[ignore = "started in every task by the next test"]
fn as_a_task() {
    let RankEnv { rank, world_size, local_rank, local_world_size, mpi, .. } = RankEnv::from_env().unwrap();
    println!("place: {rank} of {world_size}, {local_rank} of {local_world_size} here, mpi {mpi}");
}

#[test]
fn a_task_of_srun_knows_its_place_on_its_node_with_pmi_2_and_without() {
    let Some(slurm) = slurm(a_task_of_srun_knows_its_place_on_its_node_with_pmi_2_and_without) else { return };
    for mpi in ["pmi2", "none"] {
        let mut srun = slurm.srun(&format!("--mpi={mpi} -N 2 -n 4"));
        srun.arg(std::env::current_exe().unwrap()).args(as_program(module_path!(), "as_a_task"));
        let output = srun.output().unwrap();
        let text = stdout(&output);
        let mut places: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once("place: ")?.1)).collect();
        places.sort_unstable();
        let expected = [
            "0 of 4, 0 of 3 here, mpi true",
            "1 of 4, 1 of 3 here, mpi true",
            "2 of 4, 2 of 3 here, mpi true",
            "3 of 4, 0 of 1 here, mpi true",
        ];
        assert_eq!(places, expected, "{mpi}: {text} {}", stderr(&output));
    }
}

#[test]
fn all_tasks_of_srun_with_k_end_when_one_is_killed_and_nothing_is_left() {
    let Some(slurm) = slurm(all_tasks_of_srun_with_k_end_when_one_is_killed_and_nothing_is_left) else { return };
    let (folder, train_gpt) = (tempfile::tempdir().unwrap(), example("train_gpt"));
    let metrics = folder.path().join("m");
    let mut srun = four_tasks(&slurm, "-K --ntasks-per-node=2");
    srun.arg(train_gpt).args(["--model", "nano", "--steps", "100000", "--sample", "0", "--ds_config", &config(3)]);
    let srun = start(srun.arg("--metrics").arg(&metrics));
    wait_up_to(Duration::from_secs(60), "a step", || (step_count(&metrics) > 0).then_some(()));
    let tasks = slurm.hosts().processes(1, "train_gpt");
    assert_eq!(tasks.len(), 2);
    let begin = Instant::now();
    kill_process(Pid::from_raw(tasks[1]).unwrap(), Signal::KILL).unwrap();
    let output = srun.wait_with_output().unwrap();
    let errors = stderr(&output);
    assert!(begin.elapsed() < Duration::from_secs(20), "{errors}");
    assert!(!output.status.success() && errors.contains(": Killed"), "{} {errors}", output.status);
    wait_up_to(Duration::from_secs(20), "the tasks to end", || {
        [0, 1].iter().all(|node| slurm.hosts().processes(*node, "train_gpt").is_empty()).then_some(())
    });
}
