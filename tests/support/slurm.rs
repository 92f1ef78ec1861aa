//! Slurm for tests: a controller, and a node on each of two [`Hosts`].

use super::cluster::Hosts;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The number of seconds after which the daemons end at the latest, even if the test process is gone.
const LIFE: u32 = 600;

/// Slurm with a node on each of two hosts, with the host's name. Dropping this value ends the daemons and all processes
/// that they have started.
pub struct Slurm {
    // The fields are dropped in this order. Dropping the hosts ends all processes that run there.
    hosts: Hosts,
    daemons: Daemons,
    folder: tempfile::TempDir,
}

struct Daemons(Vec<Child>);

impl Drop for Daemons {
    fn drop(&mut self) {
        for daemon in &mut self.0 {
            _ = daemon.kill();
            _ = daemon.wait();
        }
    }
}

impl Slurm {
    /// Returns the first of Slurm's programs that is missing on this machine.
    pub fn missing_program() -> Option<&'static str> {
        // The exit status does not matter, because some programs require a configuration even to print their version.
        let is_installed = |name: &&str| Command::new(name).arg("-V").output().is_ok();
        ["slurmctld", "slurmd", "srun", "sbatch", "squeue", "sinfo"].into_iter().find(|name| !is_installed(name))
    }

    /// Starts the daemons and waits until both nodes are ready.
    pub fn start(hosts: Hosts) -> Self {
        let mut slurm = Self { hosts, daemons: Daemons(Vec::new()), folder: tempfile::tempdir().unwrap() };
        slurm.configure();
        let mut controller = slurm.command(0, LIFE, "slurmctld");
        controller.args(["-D", "-i"]);
        slurm.spawn(controller);
        for node in [0, 1] {
            // `ip netns exec` has created a mount namespace, so only this node sees these mounts. Batch scripts refer
            // to the first node by name, so /etc/hosts must contain it. MPICH names its files in /dev/shm after the
            // job's number, which each new Slurm counts from 1, and killed ranks leave files behind.
            let mounts = "mount --bind \"$0\" /etc/hosts && mount -t tmpfs none /dev/shm && exec slurmd -D";
            let mut daemon = slurm.command(node, LIFE, "sh");
            daemon.args(["-c", mounts]).arg(slurm.file("hosts"));
            slurm.spawn(daemon);
        }
        let begin = Instant::now();
        loop {
            let output = slurm.command(0, 10, "sinfo").args(["-h", "-o", "%D %T"]).output().unwrap();
            let state = String::from_utf8_lossy(&output.stdout).trim().to_string();
            if state == "2 idle" {
                return slurm;
            }
            let log = std::fs::read_to_string(slurm.file("log")).unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60), "Slurm's nodes are not ready: {state}\n{log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn configure(&self) {
        let [a, b] = self.hosts.names();
        let folder = self.folder.path().display();
        // No keys are used, because no one else is on the network of the two hosts. The nodes claim more resources than
        // this machine has.
        let text = format!(
            "ClusterName=test\n\
             SlurmctldHost={a}(10.77.0.1)\n\
             SlurmUser=root\n\
             SlurmdUser=root\n\
             AuthType=auth/none\n\
             CredType=cred/none\n\
             StateSaveLocation={folder}\n\
             SlurmdSpoolDir={folder}/%n\n\
             SlurmctldPidFile={folder}/slurmctld.pid\n\
             SlurmdPidFile={folder}/%n.pid\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\n\
             SlurmdParameters=config_overrides\n\
             ReturnToService=2\n\
             NodeName={a} NodeAddr=10.77.0.1 CPUs=8 RealMemory=65536\n\
             NodeName={b} NodeAddr=10.77.0.2 CPUs=8 RealMemory=65536\n\
             PartitionName=all Nodes=ALL Default=YES\n"
        );
        std::fs::write(self.file("slurm.conf"), text).unwrap();
        // Slurmd does not start if it must detect the version of cgroups, so the file names one. Nothing uses cgroups.
        std::fs::write(self.file("cgroup.conf"), "CgroupPlugin=cgroup/v1\n").unwrap();
        std::fs::write(self.file("hosts"), format!("127.0.0.1 localhost\n10.77.0.1 {a}\n10.77.0.2 {b}\n")).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn spawn(&mut self, mut daemon: Command) {
        let log = File::options().create(true).append(true).open(self.file("log")).unwrap();
        daemon.stdout(log.try_clone().unwrap()).stderr(log);
        self.daemons.0.push(daemon.spawn().unwrap());
    }

    /// Returns the nodes.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns a command that runs a program on a node for at most `seconds` seconds, with MPICH's library and this
    /// Slurm. The program's arguments are appended.
    pub fn command(&self, node: usize, seconds: u32, program: &str) -> Command {
        let mut command = self.hosts.command_on(node, seconds).expect("MPICH's library");
        command.env("SLURM_CONF", self.file("slurm.conf")).arg(program);
        command
    }

    /// Returns a command that runs `srun` on the first node with these options, for at most 240 s. The program and its
    /// arguments must be appended.
    pub fn srun(&self, options: &str) -> Command {
        let mut command = self.command(0, 240, "srun");
        command.args(options.split_whitespace());
        command
    }
}
