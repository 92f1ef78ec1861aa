//! `zerorun` on several hosts: a launcher on each, the same bits as on one machine, and the effects of losing a host.

use crate::mpi::{hosts, steps};
use crate::support::cluster::{Hosts, Mpi};
use crate::support::processes::{
    example, free_port, pids, program, runs, send, start, stderr, stdout, wait_for, wait_up_to, zerorun,
};
use crate::support::skips::skipped;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// Returns two hosts with MPICH, or reports why there are none.
pub fn cluster<T: Fn() + Copy>(test: T) -> Option<Hosts> {
    if Mpi::Mpich.folder().is_none() {
        skipped(test, "no MPICH; scripts/fetch_mpi.sh fetches it");
        return None;
    }
    hosts(test)
}

const LAUNCHER: &str = env!("CARGO_BIN_EXE_zerorun");

/// Returns the launcher of one of two hosts, for two ranks.
fn launcher(hosts: &Hosts, node: usize, options: &str) -> Command {
    let mut command = hosts.command_on(node, 300).unwrap();
    command.args([LAUNCHER, "--nnodes", "2", "--node_rank", &node.to_string(), "--master_addr", "10.77.0.1"]);
    command.args(["--num_ranks", "2"]).args(options.split_whitespace());
    command
}

/// A training run of `nano` at stage 3 with `train_gpt`.
struct Training {
    program: PathBuf,
    folder: tempfile::TempDir,
    /// Whether each host saves checkpoints to its own disk.
    on_own_disks: bool,
}

impl Training {
    fn new() -> Self {
        Self { program: example("train_gpt"), folder: tempfile::tempdir().unwrap(), on_own_disks: false }
    }

    fn metrics(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.jsonl"))
    }

    /// Adds the program to a command. Its metrics and checkpoints are named after `name`; checkpoints are saved every
    /// `save_every` steps.
    fn of(&self, mut command: Command, name: &str, steps: usize, save_every: Option<usize>) -> Command {
        // The number of samples in a step is the same for any number of ranks.
        let config = self.folder.path().join("zero3.json");
        let settings = serde_json::json!({
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "checkpoint": {"use_node_local_storage": self.on_own_disks},
        });
        std::fs::write(&config, settings.to_string()).unwrap();
        command.arg(&self.program).args(["--model", "nano", "--steps", &steps.to_string(), "--ds_config"]).arg(config);
        command.args(["--sample", "0", "--metrics"]).arg(self.metrics(name));
        if let Some(every) = save_every {
            command.args(["--resume", "--save_every", &every.to_string()]);
            command.arg("--save").arg(self.folder.path().join(format!("{name}.save")));
        }
        command
    }

    fn on_one_host(&self, count: usize) -> Vec<[String; 2]> {
        let mut one = zerorun();
        one.args(["-n", "4"]);
        let output = self.of(one, "one", count, None).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        steps(&self.metrics("one"))
    }
}

pub fn wait_with_output(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

/// The processes that are killed when a test ends, even if it fails.
struct KillOnDrop(Vec<i32>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        for pid in self.0.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn a_launcher_on_each_of_two_hosts_and_a_hostfile_give_the_bits_of_one_host() {
    let test = a_launcher_on_each_of_two_hosts_and_a_hostfile_give_the_bits_of_one_host;
    let Some(hosts) = cluster(test) else { return };
    let training = Training::new();
    let expected = training.on_one_host(3);
    assert_eq!(expected.len(), 3);
    let both = [0, 1].map(|node| start(&mut training.of(launcher(&hosts, node, ""), "nodes", 3, None)));
    let [first, second] = both.map(wait_with_output);
    assert!(first.status.success() && second.status.success(), "{}{}", stderr(&first), stderr(&second));
    assert_eq!(steps(&training.metrics("nodes")), expected, "--nnodes");
    let [name, _] = hosts.names();
    assert!(stderr(&first).contains(&format!("[{name} rank 0] step 1/3 ")), "{}", stderr(&first));

    let file = training.folder.path().join("hostfile");
    std::fs::write(&file, "10.77.0.1 slots=2\n10.77.0.2 slots=2\n").unwrap();
    let mut command = hosts.command_on(0, 110).unwrap();
    command.arg("env").arg(format!("ZERORUN_RSH={}", hosts.remote_shell().display()));
    command.args([LAUNCHER, "--hostfile"]).arg(&file);
    let output = training.of(command, "hostfile", 3, None).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(steps(&training.metrics("hostfile")), expected, "--hostfile");
}

#[test]
fn hosts_that_save_on_their_own_disks_go_on_together() {
    let test = hosts_that_save_on_their_own_disks_go_on_together;
    let Some(hosts) = cluster(test) else { return };
    let training = Training { on_own_disks: true, ..Training::new() };
    let mount = training.folder.path().join("disks.save");
    let disks = [0, 1].map(|node| training.folder.path().join(format!("disk {node}")));
    std::fs::create_dir(&mount).unwrap();
    disks.iter().for_each(|disk| std::fs::create_dir(disk).unwrap());
    let run = |until: usize| {
        let both = [0, 1].map(|node| {
            let mut command = hosts.command_on(node, 110).unwrap();
            // The disk is mounted at the same path on both hosts.
            command.args(["sh", "-c", "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"", "sh"]);
            command.args([&disks[node], &mount]).args([LAUNCHER, "--nnodes", "2", "--node_rank", &node.to_string()]);
            command.args(["--master_addr", "10.77.0.1", "--num_ranks", "2"]);
            start(&mut training.of(command, "disks", until, Some(1)))
        });
        for output in both.map(wait_with_output) {
            assert!(output.status.success(), "{}", stderr(&output));
        }
        steps(&training.metrics("disks"))
    };
    let expected = training.on_one_host(4);
    assert_eq!(run(2), expected[..2]);
    for (node, disk) in disks.iter().enumerate() {
        let tag = disk.join("global_step2");
        let ranks: Vec<bool> =
            (0..4).map(|rank| tag.join(format!("rank_{rank:05}_of_00004.safetensors")).exists()).collect();
        assert_eq!(ranks, [node == 0, node == 0, node == 1, node == 1]);
    }
    assert_eq!(run(4), expected);
    assert_eq!(std::fs::read_dir(&mount).unwrap().count(), 0);
}

#[test]
fn the_start_command_of_the_jobset_runs_on_two_hosts() {
    let test = the_start_command_of_the_jobset_runs_on_two_hosts;
    let Some(hosts) = cluster(test) else { return };
    let mut training = Training::new();
    let expected = training.on_one_host(2);
    // As in the container image, programs are on the PATH, and the working directory differs.
    let image = tempfile::tempdir().unwrap();
    for (name, file) in [("zerorun", Path::new(LAUNCHER)), ("train", &training.program)] {
        std::os::unix::fs::symlink(file, image.path().join(name)).unwrap();
    }
    let path = format!("{}:/usr/bin:/bin", image.path().display());
    training.program = "train".into();
    let mut deploy = Command::new(LAUNCHER);
    deploy.args(["deploy", "k8s", "--nodes", "2", "-n", "2"]);
    let output = training.of(deploy, "jobset", 2, None).output().unwrap();
    let manifest = stdout(&output);
    let command = manifest.lines().find_map(|line| line.trim().strip_prefix("command: ")).unwrap();
    let mut words: Vec<String> = serde_json::from_str(command).unwrap();
    assert!(words[0] == "zerorun" && words.contains(&"train".into()), "{words:?}");
    // The cluster's DNS would resolve this name.
    let first = words.iter_mut().find(|word| *word == "train-host-0-0.train").unwrap();
    *first = "10.77.0.1".into();
    let both = [0, 1].map(|node| {
        let mut command = hosts.command_on(node, 110).unwrap();
        command.current_dir("/").args(["env", &format!("PATH={path}"), &format!("JOB_COMPLETION_INDEX={node}")]);
        start(command.args(&words))
    });
    for output in both.map(wait_with_output) {
        assert!(output.status.success(), "{}", stderr(&output));
    }
    assert_eq!(steps(&training.metrics("jobset")), expected);
}

/// Returns the number of steps that a training run has reported so far.
pub fn step_count(metrics: &Path) -> usize {
    std::fs::read_to_string(metrics).map_or(0, |text| text.lines().filter(|line| line.contains("\"loss\"")).count())
}

/// Returns the process IDs of the ranks on a host.
fn ranks(hosts: &Hosts, host: usize) -> Vec<i32> {
    hosts.processes(host, "train_gpt")
}

/// The way in which a host is removed from a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// The cable is unplugged.
    Cable,
    /// All processes on the host are killed.
    Kill,
}

/// Returns the next 64-bit number after `state` (SplitMix64).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the number in an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
fn a_host_that_is_taken_away_at_random_is_named_on_the_other_within_15_s_and_nothing_is_left() {
    let test = a_host_that_is_taken_away_at_random_is_named_on_the_other_within_15_s_and_nothing_is_left;
    let Some(hosts) = cluster(test) else { return };
    let cuts = number("CANDLE_ZERO_CUTS").unwrap_or(3);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = number("CANDLE_ZERO_CUTS_SEED").unwrap_or(now.as_nanos() as u64);
    println!("{cuts} cuts: CANDLE_ZERO_CUTS_SEED={seed}");
    let (mut state, mut ways) = (seed, Vec::new());
    for cut in 0..cuts {
        if ways.is_empty() {
            // Each way occurs once before any is repeated.
            ways = vec![(0, Cut::Cable), (1, Cut::Cable), (0, Cut::Kill), (1, Cut::Kill)];
        }
        let (lost, way) = ways.swap_remove((random(&mut state) % ways.len() as u64) as usize);
        let delay = Duration::from_micros(random(&mut state) % 1_900_000);
        let context = format!("cut {cut} (CANDLE_ZERO_CUTS_SEED={seed}): {way:?} of host {lost} after {delay:?}");
        println!("{context}");
        take_away(&hosts, lost, way, delay, &context);
    }
}

/// Removes a host from a job of two hosts, `delay` after the job's second step.
fn take_away(hosts: &Hosts, lost: usize, way: Cut, delay: Duration, context: &str) {
    let training = Training::new();
    let mut both = [0, 1].map(|node| start(&mut training.of(launcher(hosts, node, ""), "cut", 10_000, None)));
    let began = wait_up_to(Duration::from_secs(100), "the second step", || {
        let ended = both.iter_mut().any(|launcher| launcher.try_wait().unwrap().is_some());
        (ended || step_count(&training.metrics("cut")) > 1).then_some(!ended)
    });
    if !began {
        let errors = both.map(|launcher| stderr(&wait_with_output(launcher)));
        panic!("{context}: a launcher ended before the second step: {errors:?}");
    }
    std::thread::sleep(delay);
    let _kills = KillOnDrop([ranks(hosts, 0), ranks(hosts, 1)].concat());
    match way {
        Cut::Cable => hosts.plug(lost, false),
        Cut::Kill => hosts.kill_all(lost),
    }
    let cut_time = Instant::now();
    let outputs = both.map(wait_with_output);
    let elapsed = cut_time.elapsed();
    if way == Cut::Cable {
        hosts.plug(lost, true);
    }
    assert!(elapsed < Duration::from_secs(15), "{context}: {elapsed:?}");
    let why = match way {
        Cut::Cable => "it sent nothing for 8 s",
        Cut::Kill => "it closed the connection",
    };
    let names = hosts.names();
    for host in (0..2).filter(|host| way == Cut::Cable || *host != lost) {
        let errors = stderr(&outputs[host]);
        assert_eq!(outputs[host].status.code(), Some(1), "{context}: {errors}");
        let [launcher, rank] = match host {
            0 => [format!("zerorun: host {} is gone: {why}", names[1]), "its host is gone".to_string()],
            _ => [format!("zerorun: the first host, 10.77.0.1, is gone: {why}"), "the first host is gone".to_string()],
        };
        assert!(errors.contains(&launcher), "{context}: {errors}");
        let is_told = errors.contains(&format!("on host {}: {rank}", names[1 - host]));
        // If all connections break at the same time, MPICH over UCX may end ranks with a segmentation fault before
        // they receive the message.
        assert!(is_told || way == Cut::Kill, "{context}: the ranks report it too: {errors}");
    }
    for host in 0..2 {
        assert_eq!([ranks(hosts, host), hosts.processes(host, "zerorun")].concat(), [0; 0], "{context}: host {host}");
    }
}

#[test]
fn a_job_goes_on_without_a_host_that_is_cut_off_and_with_it_when_it_is_back() {
    let test = a_job_goes_on_without_a_host_that_is_cut_off_and_with_it_when_it_is_back;
    // The job takes hundreds of steps and keeps its checkpoints, so it does not save at each step.
    const EVERY: usize = 20;
    let Some(hosts) = cluster(test) else { return };
    let training = Training::new();
    let options = "--max_restarts 3 --min_nodes 1";
    let both = [0, 1].map(|node| start(&mut training.of(launcher(&hosts, node, options), "back", 2000, Some(EVERY))));
    let metrics = training.metrics("back");
    let limit = Duration::from_secs(100);
    let second = wait_up_to(limit, "the first checkpoint", || (step_count(&metrics) > EVERY).then(|| ranks(&hosts, 1)));
    let _kills = KillOnDrop([second.clone(), ranks(&hosts, 0)].concat());
    hosts.plug(1, false);
    wait_up_to(limit, "the end of the ranks that were cut off", || second.iter().all(|pid| !runs(*pid)).then_some(()));
    let before = step_count(&metrics);
    wait_up_to(limit, "steps without them", || (step_count(&metrics) > before + EVERY).then_some(()));
    assert_eq!(ranks(&hosts, 1), [0; 0]);
    hosts.plug(1, true);
    wait_up_to(limit, "the other host's ranks", || (ranks(&hosts, 1).len() == 2).then_some(()));
    let before = step_count(&metrics);
    wait_up_to(limit, "steps with them", || (step_count(&metrics) > before + EVERY).then_some(()));
    for pid in hosts.processes(0, "zerorun") {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    }
    let [first, second] = both.map(wait_with_output);
    let errors = stderr(&first);
    assert_eq!([first.status.code(), second.status.code()], [Some(143); 2], "{errors}{}", stderr(&second));
    let [_, name] = hosts.names();
    assert!(errors.contains(&format!("host {name} is gone: it sent nothing for 8 s; restart 1 of 3")), "{errors}");
    assert!(errors.contains("a host is back; the job continues with it"), "{errors}");
    // The steps of two ranks equal those of a job with two ranks that starts from the same checkpoint.
    let lines = stdout(&first);
    let began: Vec<usize> = lines
        .lines()
        .filter_map(|line| line.split_once("continues after step ")?.1.split_once(':')?.0.parse().ok())
        .collect();
    let [from, to] = began[..] else { panic!("{errors}") };
    let [saved, small] = ["back", "small"].map(|name| training.folder.path().join(format!("{name}.save")));
    let tag = format!("global_step{from}");
    std::fs::create_dir_all(small.join(&tag)).unwrap();
    for file in std::fs::read_dir(saved.join(&tag)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), small.join(&tag).join(file.file_name())).unwrap();
    }
    std::fs::write(small.join("latest"), &tag).unwrap();
    let mut two = zerorun();
    two.args(["-n", "2"]);
    let output = training.of(two, "small", to, Some(EVERY)).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let of_two = steps(&training.metrics("small"));
    assert_eq!(steps(&metrics)[from..to], of_two[..], "from step {from} to {to}");
    // The losses match those of one host only as closely as sums over two ranks match sums over four.
    let (found, one) = (steps(&metrics), training.on_one_host(10));
    for (at, (found, one)) in found.iter().zip(&one).enumerate() {
        let [found, one] = [found, one].map(|[loss, _]| loss.parse::<f64>().unwrap());
        assert!((found - one).abs() < 1e-3 * one, "step {at}: {found} {one}");
    }
}

#[test]
fn a_signal_to_one_launcher_ends_the_ranks_of_both_in_good_order() {
    let test = a_signal_to_one_launcher_ends_the_ranks_of_both_in_good_order;
    let Some(hosts) = cluster(test) else { return };
    let training = Training::new();
    let both = [0, 1].map(|node| start(&mut training.of(launcher(&hosts, node, ""), "signal", 10_000, Some(1))));
    wait_up_to(Duration::from_secs(100), "the second step", || {
        (step_count(&training.metrics("signal")) > 1).then_some(())
    });
    let _kills = KillOnDrop([ranks(&hosts, 0), ranks(&hosts, 1)].concat());
    for pid in hosts.processes(1, "zerorun") {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    }
    let [first, second] = both.map(wait_with_output);
    assert_eq!([first.status.code(), second.status.code()], [Some(143); 2], "{}{}", stderr(&first), stderr(&second));
    assert!(
        stdout(&first).contains("is saved, and --resume continues from there"),
        "{}{}",
        stdout(&first),
        stderr(&first)
    );
}

/// Creates a host's folder with a program, a configuration and data.
pub fn host_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    program(folder.path(), "train", "sleep 5");
    std::fs::write(folder.path().join("zero3.json"), "{}").unwrap();
    std::fs::write(folder.path().join("corpus.txt"), "to be").unwrap();
    folder
}

/// Returns a launcher in the folder of a host, with the program's arguments.
pub fn launcher_in(folder: &Path, port: u16, options: &str, args: &str) -> Command {
    let mut command = zerorun();
    command.args(["--master_addr", "127.0.0.1", "--master-port", &port.to_string(), "--timeout", "20s"]);
    command.args(options.split_whitespace()).arg("./train").args(args.split_whitespace()).current_dir(folder);
    command
}

/// Returns the output of a launcher, with placeholders for parts that differ each time.
pub fn normalized_stderr(output: &Output, port: u16) -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let text = stderr(output).replace(name.trim(), "NAME").replace(&port.to_string(), "PORT");
    let mut parts = text.trim_end().split(" with checksum ");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        text + " with checksum SUM" + part.trim_start_matches(|c: char| c.is_ascii_hexdigit())
    })
}

pub const ARGS: &str = "--ds_config=zero3.json --data corpus.txt";

/// Returns the message of the second of two launchers on this machine, after `change` is applied to the folder of its
/// host, and the message of the first launcher about the refusal.
fn refused(options: &str, args: &str, change: impl Fn(&Path)) -> (String, String) {
    let (folders, port) = ([host_folder(), host_folder()], free_port());
    change(folders[1].path());
    let first = start(&mut launcher_in(folders[0].path(), port, "--nnodes 3 --node_rank 0", ARGS));
    let listens = || std::net::TcpStream::connect(("127.0.0.1", port)).ok();
    wait_up_to(Duration::from_secs(20), "the first launcher", listens);
    let output = launcher_in(folders[1].path(), port, options, args).output().unwrap();
    send(Signal::TERM, &first);
    let first = wait_with_output(first);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let is_refusal = |line: &&str| line.contains("was refused");
    (normalized_stderr(&output, port), normalized_stderr(&first, port).lines().filter(is_refusal).collect())
}

#[test]
fn a_host_that_does_not_belong_to_the_job_is_told_why() {
    let messages = |options: &str, args: &str| refused(options, args, |_| {});
    let (second, first) = messages("--nnodes 2 --node_rank 1", ARGS);
    insta::assert_snapshot!(second, @"zerorun: the first host refused this one: --nnodes is 2 on host NAME and 3 on the first host; give both hosts the same value, or, if these are two jobs, give one of them a different --master_port");
    insta::assert_snapshot!(first, @"zerorun: host NAME (127.0.0.1) was refused: --nnodes is 2 on host NAME and 3 on the first host; give both hosts the same value, or, if these are two jobs, give one of them a different --master_port");
    let (second, first) = messages("--nnodes 3 --node_rank 0", ARGS);
    insta::assert_snapshot!(second, @"zerorun: port PORT, where the other hosts connect, cannot be used: Address already in use (os error 98); stop the other job, or give another --master_port");
    assert_eq!(first, "");
    // The refused host prints its own value, and only a digest of the first host's value.
    let (second, first) = messages("--nnodes 3 --node_rank 1", "--lr 3");
    insta::assert_snapshot!(second, @"zerorun: the first host refused this one: the script's arguments are `--lr 3` on this host, with digest 727752e9, but those on host NAME have digest 53495c78; give the arguments that the output of host NAME shows");
    insta::assert_snapshot!(first, @"zerorun: host NAME (127.0.0.1) was refused: the script's arguments are `--ds_config=zero3.json --data corpus.txt` on host NAME and `--lr 3` on host NAME; give both hosts the same arguments");
}

#[test]
fn a_host_with_another_program_configuration_or_data_is_told_which() {
    let messages = |change: fn(&Path)| refused("--nnodes 3 --node_rank 1", ARGS, change);
    let (second, first) = messages(|folder| _ = program(folder, "train", "sleep 50"));
    insta::assert_snapshot!(second, @"zerorun: the first host refused this one: the program differs from the one on host NAME: on this host, it is 19 bytes with checksum SUM; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    insta::assert_snapshot!(first, @"zerorun: host NAME (127.0.0.1) was refused: the program is 18 bytes with checksum SUM on host NAME and 19 bytes with checksum SUM on host NAME; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    let (second, first) = messages(|folder| std::fs::write(folder.join("zero3.json"), "{ }").unwrap());
    insta::assert_snapshot!(second, @"zerorun: the first host refused this one: zero3.json differs from the one on host NAME: on this host, it is 3 bytes with checksum SUM; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    insta::assert_snapshot!(first, @"zerorun: host NAME (127.0.0.1) was refused: zero3.json is 2 bytes with checksum SUM on host NAME and 3 bytes with checksum SUM on host NAME; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    let (second, first) = messages(|folder| std::fs::remove_file(folder.join("corpus.txt")).unwrap());
    insta::assert_snapshot!(second, @"zerorun: the first host refused this one: corpus.txt differs from the one on host NAME: on this host, it is missing; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    insta::assert_snapshot!(first, @"zerorun: host NAME (127.0.0.1) was refused: corpus.txt is 5 bytes with checksum SUM on host NAME and missing on host NAME; copy the same file to both hosts; if it is the program, build it once and pass the executable");
}

#[test]
fn two_hosts_with_one_number_are_told_so() {
    let (folder, port) = (host_folder(), free_port());
    let launch =
        |node: usize| start(&mut launcher_in(folder.path(), port, &format!("--nnodes 3 --node_rank {node}"), ARGS));
    let first = launch(0);
    let mut both = vec![launch(1), launch(1)];
    // Of the two launchers, the later one is refused.
    let later = wait_up_to(Duration::from_secs(20), "the refusal", || {
        (0..2).find(|at| both[*at].try_wait().unwrap().is_some())
    });
    let output = wait_with_output(both.remove(later));
    for launcher in [first, both.remove(0)] {
        send(Signal::TERM, &launcher);
        wait_with_output(launcher);
    }
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    insta::assert_snapshot!(normalized_stderr(&output, port), @"zerorun: the first host refused this one: --node_rank 1 is already used by host NAME; give each host its own number from 0 to 2, and each job its own --master_port");
}

#[test]
fn hosts_that_do_not_find_one_another_say_what_to_look_at() {
    let (folder, port) = (host_folder(), free_port());
    let launch_alone = |node: usize, code: i32| {
        let options = format!("--nnodes 2 --node_rank {node} --timeout 1s");
        let mut command = zerorun();
        command.args(["--master_addr", "127.0.0.1", "--master_port", &port.to_string()]);
        command.args(options.split_whitespace()).arg("./train").current_dir(folder.path());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        normalized_stderr(&output, port)
    };
    insta::assert_snapshot!(launch_alone(1, 2), @"zerorun: the first host, 127.0.0.1, could not be reached on port PORT within 1 s: Connection refused (os error 111); start zerorun with --node_rank 0 there, set --master_addr to an address at which this host reaches it, and check that the port is open");
    insta::assert_snapshot!(launch_alone(0, 1), @"zerorun: 1 of 2 hosts connected within 1 s; missing: --node_rank 1; start zerorun on each missing host with the same --nnodes, --master_addr and --master_port, and check that this port of the first host can be reached");
}

#[test]
fn a_launcher_that_is_killed_is_done_without_and_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    // At each start, rank 0 writes the number of ranks. The ranks end on request, or at the end of the test.
    let script = program(
        folder.path(),
        "script",
        "[ $RANK = 0 ] && echo $WORLD_SIZE >> $DIR/worlds\ntrap 'exit 0' TERM\nuntil [ -e $DIR/end ]; do sleep 0.1; done",
    );
    let port = free_port().to_string();
    let launch = |node: usize| {
        let mut command = zerorun();
        command.args(["--nnodes", "2:3", "--node_rank", &node.to_string(), "--master_addr", "127.0.0.1"]);
        command.args(["--master_port", &port, "--max_restarts", "2"]).arg(&script).env("DIR", folder.path());
        start(&mut command)
    };
    let worlds = |expected: &str| {
        wait_up_to(Duration::from_secs(60), expected, || {
            let worlds = std::fs::read_to_string(folder.path().join("worlds")).unwrap_or_default();
            (worlds.split_whitespace().collect::<Vec<_>>().join(" ") == expected).then_some(())
        });
    };
    let [first, second, mut third] = [0, 1, 2].map(launch);
    worlds("3");
    send(Signal::KILL, &third);
    third.wait().unwrap();
    worlds("3 2");
    let third = launch(2);
    worlds("3 2 3");
    std::fs::write(folder.path().join("end"), "").unwrap();
    let [first, second, third] = [first, second, third].map(wait_with_output);
    let errors = stderr(&first);
    for output in [first, second, third] {
        assert!(output.status.success(), "{}", stderr(&output));
    }
    assert!(errors.contains("is gone: it closed the connection; restart 1 of 2"), "{errors}");
    assert!(errors.contains("a host is back; the job continues with it"), "{errors}");
}

#[test]
fn a_hostfile_that_is_wrong_or_names_an_unreachable_host_ends_with_its_name() {
    let folder = host_folder();
    let unreachable = program(folder.path(), "rsh", "echo \"rsh: $1: no such host\" >&2; exit 255");
    let port = free_port();
    let message = |lines: Option<&str>, shell: &Path, code: i32| {
        let file = folder.path().join("hosts");
        _ = std::fs::remove_file(&file);
        lines.into_iter().for_each(|lines| std::fs::write(&file, lines).unwrap());
        let mut command = zerorun();
        command.env("ZERORUN_RSH", shell).args(["--master_port", &port.to_string(), "--hostfile", "hosts", "./train"]);
        let output = command.current_dir(folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        // The first host's launcher may report its own end before or after these messages.
        let is_relevant = |line: &&str| line.contains("hosts") || line.contains("far.invalid");
        normalized_stderr(&output, port).lines().filter(is_relevant).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(message(None, &unreachable, 2), @"zerorun: cannot read the hostfile hosts: No such file or directory (os error 2); give --hostfile a file with a line NAME slots=N for each host");
    insta::assert_snapshot!(message(Some("a slots=2\nb\n"), &unreachable, 2), @"zerorun: hosts:2: `b` is not a hostfile entry; write NAME slots=N, for example `worker-0 slots=4`");
    let far = Some("localhost slots=1\nfar.invalid slots=1\n");
    insta::assert_snapshot!(message(far, Path::new("/no/such/shell"), 2), @"zerorun: cannot reach host far.invalid with /no/such/shell: No such file or directory (os error 2); install it, or name another program in ZERORUN_RSH");
    insta::assert_snapshot!(message(far, &unreachable, 1), @r"
    rsh: far.invalid: no such host
    zerorun: host far.invalid cannot be reached, or its launcher was killed
    ");
}

#[test]
fn a_launcher_of_a_hostfile_that_cannot_start_its_ranks_ends_the_job() {
    let folder = host_folder();
    // This program acts as a host without zerorun.
    let shell = program(folder.path(), "rsh", "echo \"sh: zerorun: not found\" >&2; exit 127");
    std::fs::write(folder.path().join("hosts"), "localhost slots=1\nfar.invalid slots=1\n").unwrap();
    let mut command = zerorun();
    command.env("ZERORUN_RSH", shell).args([
        "--master_port",
        &free_port().to_string(),
        "--hostfile",
        "hosts",
        "./train",
    ]);
    let output = command.current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let errors = stderr(&output);
    let line = errors.lines().find(|line| line.contains("the launcher on host")).unwrap_or(&errors);
    insta::assert_snapshot!(line, @"zerorun: the launcher on host far.invalid ended with exit code 127, and the others are waiting for it; see its output above");
}

/// Runs a job of two hosts and sends it signals, each after the one before has arrived everywhere. The first host is this
/// host unless `first_is_remote`. The ranks write each signal that they receive to a file, and end one second after a
/// signal that asks them to.
fn recording_job(folder: &Path, signals: &[Signal], first_is_remote: bool) -> Output {
    let shell = program(folder, "rsh", "exec sh -c \"$2\"");
    let record = "trap 'echo usr1 >> $DIR/got.$RANK' USR1; trap 'echo usr2 >> $DIR/got.$RANK' USR2
for signal in INT TERM HUP; do trap \"sleep 1; echo $signal >> $DIR/got.$RANK; exit 0\" $signal; done
echo $$ > $DIR/new.$RANK; mv $DIR/new.$RANK $DIR/pid.$RANK; while :; do sleep 0.02; done";
    let rank = program(folder, "rank", record);
    let hosts = if first_is_remote { ["far-0.invalid", "far-1.invalid"] } else { ["localhost", "far-1.invalid"] };
    let hostfile = folder.join("hosts");
    std::fs::write(&hostfile, hosts.map(|host| format!("{host} slots=1\n")).concat()).unwrap();
    let mut command = zerorun();
    command.env("ZERORUN_RSH", shell).env("DIR", folder).args(["--master_addr", "127.0.0.1"]);
    command.args(["--master_port", &free_port().to_string(), "--hostfile"]).arg(hostfile).arg(rank);
    let child = start(&mut command);
    let _kills = KillOnDrop(pids(folder, 2));
    for (sent, signal) in signals.iter().enumerate() {
        send(*signal, &child);
        let received = |rank| std::fs::read_to_string(folder.join(format!("got.{rank}"))).unwrap_or_default();
        wait_for("the signal on both hosts", || {
            (0..2).all(|rank| received(rank).lines().count() == sent + 1).then_some(())
        });
    }
    wait_with_output(child)
}

#[test]
fn a_signal_to_the_launcher_of_a_hostfile_reaches_the_ranks_of_every_host() {
    for (end, code, name) in [(Signal::INT, 130, "INT"), (Signal::TERM, 143, "TERM"), (Signal::HUP, 129, "HUP")] {
        for first_is_remote in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let signals = [Signal::USR1, Signal::USR2, Signal::USR1, end];
            let output = recording_job(folder.path(), &signals, first_is_remote);
            assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
            for rank in 0..2 {
                let received = std::fs::read_to_string(folder.path().join(format!("got.{rank}"))).unwrap();
                assert_eq!(received, format!("usr1\nusr2\nusr1\n{name}\n"), "rank {rank}: {}", stderr(&output));
            }
        }
    }
}
