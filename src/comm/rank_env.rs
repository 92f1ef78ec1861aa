//! The environment variables through which launchers assign a rank to a process.
//!
//! The first matching row applies. A row matches if its rank or its world size is set; the rows of Slurm and PMIx match
//! only if the rank is set. If `PMIX_RANK` is set and `RANK` is not, `WORLD_SIZE` does not count for the first row.
//! `WORLD_SIZE=1` without `RANK` and without the first row's local variables means rank 0 of 1.
//!
//! | launcher | rank, world size | on this host |
//! | --- | --- | --- |
//! | zerorun, torchrun, DeepSpeed | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (DeepSpeed: `LOCAL_SIZE`) |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | MPICH, Intel MPI (Hydra), PALS | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` (PALS: `PALS_LOCAL_RANKID`) |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_NTASKS` (`SLURM_NPROCS`) | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
//! | LSF's jsrun | `JSM_NAMESPACE_RANK`, `JSM_NAMESPACE_SIZE` | `JSM_NAMESPACE_LOCAL_RANK` |
//! | PMIx | `PMIX_RANK`, `WORLD_SIZE` | `PALS_LOCAL_RANKID`, `LOCAL_SIZE` |
//! | none | rank 0 of 1 | |
//!
//! `srun --mpi=pmi2` sets MPICH's rank and world size; the local ranks then come from Slurm.
//!
//! PMIx provides a process's rank (within `PMIX_NAMESPACE`), but not the number of ranks. The user sets that number in
//! `WORLD_SIZE`, as DeepSpeed's launcher does for MPICH, and MPI confirms it. PALS and jsrun do not provide the number
//! of ranks on a host: [`RankEnv`] then contains the total number of ranks instead.
//!
//! Ranks started by an MPI launcher (all rows but the first and the last) are connected by MPI, on one host or several.
//! Ranks of `zerorun` are connected by MPI if it has started them on several hosts, or with `--backend mpi`. Ranks of
//! the first row that were started by hand or by a launcher other than `zerorun` meet at `MASTER_PORT`, on one host
//! (`rendezvous`). On several hosts, MPI connects them if an MPI launcher has set the same rank and world size.

use std::os::fd::RawFd;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, RankEnvError, Result};

/// The variable with the file descriptor of the memory that the ranks share.
#[doc(hidden)]
pub const SHM_FD: &str = "CANDLE_ZERO_SHM_FD";
/// The variable with the time that a rank waits for the others, in milliseconds.
#[doc(hidden)]
pub const TIMEOUT_MS: &str = "CANDLE_ZERO_TIMEOUT_MS";

/// A variable that is set if the launcher has bound each rank to its own cores.
#[doc(hidden)]
pub const BOUND: &str = "CANDLE_ZERO_BOUND";

/// A variable that is `mpi` if zerorun lets MPI connect the ranks even on one host.
#[doc(hidden)]
pub const BACKEND: &str = "CANDLE_ZERO_BACKEND";

/// The variable with a rank's index among the processes of its PMIx namespace.
const PMIX_RANK: &str = "PMIX_RANK";

/// The variable with the socket to the launcher through which an MPI library meets the other ranks, in the protocol of
/// MPICH's process managers.
#[doc(hidden)]
pub const PMI_FD: &str = "PMI_FD";

/// The variable with the script as it was typed after `zerorun`, which a rank uses to show its command line.
#[doc(hidden)]
pub const SCRIPT: &str = "ZERORUN_SCRIPT";

/// The time limit if [`TIMEOUT_MS`] is not set.
#[doc(hidden)]
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
const DEFAULT_ADDR: &str = "127.0.0.1";
/// The default of DeepSpeed and torchrun.
const DEFAULT_PORT: u16 = 29500;

/// The position of this process among the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnv {
    /// This rank, less than `world_size`.
    pub rank: usize,
    /// The number of ranks, at least 1.
    pub world_size: usize,
    /// This rank's index among the ranks of its host.
    pub local_rank: usize,
    /// The number of ranks on this host or, if the launcher does not provide it, the total number of ranks.
    pub local_world_size: usize,
    /// The host of rank 0 (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port for a rendezvous on that host (`MASTER_PORT`).
    pub master_port: u16,
    /// The inherited file descriptor of the memory that the ranks of this host share; set by zerorun.
    pub shm_fd: Option<RawFd>,
    /// Whether MPI connects the ranks: an MPI launcher (mpirun, mpiexec, srun, jsrun) started them, or zerorun lets MPI
    /// connect them.
    pub mpi: bool,
    /// The time that a rank waits for the others in a collective.
    pub timeout: Duration,
}

/// A variable that was found, with its numeric value.
#[derive(Debug, Clone, Copy)]
struct RankVariable {
    name: &'static str,
    value: usize,
}

/// The values of one row of the table in the documentation of this module.
struct RankNumbers {
    rank: RankVariable,
    world: RankVariable,
    local: Option<(RankVariable, RankVariable)>,
    mpi: bool,
}

impl RankEnv {
    /// Reads the environment of this process; if nothing is set, returns rank 0 of 1.
    ///
    /// # Errors
    /// Fails if a variable cannot be parsed, a group of variables is set only in part, a rank is not less than its
    /// world size, or ranks are on several hosts and nothing connects them (they were started by neither zerorun nor an
    /// MPI launcher).
    pub fn from_env() -> Result<Self> {
        // A value that is not UTF-8 is not a number: its replacement characters are rejected with the variable's name.
        Self::from_lookup(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Does the same as `from_env`, for any source of variables.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let vars = EnvironmentVariables(&lookup);
        let timeout = match vars.parsed::<u64>(TIMEOUT_MS, "a whole number of milliseconds, at least 1")? {
            None => DEFAULT_TIMEOUT,
            Some(0) => return Err(vars.invalid_value(TIMEOUT_MS, "a whole number of milliseconds, at least 1")),
            Some(milliseconds) => Duration::from_millis(milliseconds),
        };
        let shm_fd = vars.parsed::<RawFd>(SHM_FD, "the number of an open file descriptor")?;
        if shm_fd.is_some_and(|fd| fd < 0) {
            return Err(vars.invalid_value(SHM_FD, "the number of an open file descriptor"));
        }
        let master_addr = vars.get("MASTER_ADDR").unwrap_or_else(|| DEFAULT_ADDR.to_string());
        let master_port = vars.parsed::<u16>("MASTER_PORT", "a port number from 1 to 65535")?.unwrap_or(DEFAULT_PORT);

        let Some(found) = vars.find()? else {
            return Ok(Self {
                rank: 0,
                world_size: 1,
                local_rank: 0,
                local_world_size: 1,
                master_addr,
                master_port,
                shm_fd,
                mpi: false,
                timeout,
            });
        };
        let RankNumbers { rank, world, local, mpi } = if shm_fd.is_none() { vars.or_mpi_numbers(found) } else { found };
        check_below(rank, world)?;
        let (local_rank, local_world_size) = match local {
            None => (rank.value, world.value),
            Some((local_rank, local_world)) => {
                check_below(local_rank, local_world)?;
                (local_rank.value, local_world.value)
            }
        };
        let mpi = match shm_fd {
            None => mpi,
            // Under zerorun, which an MPI launcher may have started, the ranks are zerorun's: on one host, or on
            // several hosts that MPI connects.
            Some(_) => {
                let requests_mpi = vars.get(BACKEND).is_some_and(|backend| backend == "mpi");
                (requests_mpi || local_world_size < world.value) && vars.get(PMI_FD).is_some()
            }
        };
        if world.value > 1 && !mpi && local_world_size != world.value {
            let (local_world, world) = (local_world_size, world.value);
            let hosts = world.div_ceil(local_world);
            return Err(RankEnvError::SeveralHosts { local_world, world, hosts, first: master_addr }.into());
        }
        Ok(Self {
            rank: rank.value,
            world_size: world.value,
            local_rank,
            local_world_size,
            master_addr,
            master_port,
            shm_fd,
            mpi,
            timeout,
        })
    }
}

fn check_below(rank: RankVariable, world: RankVariable) -> Result<()> {
    if rank.value < world.value {
        return Ok(());
    }
    Err(RankEnvError::OutOfRange { rank_name: rank.name, rank: rank.value, world_name: world.name, world: world.value }
        .into())
}

const COUNT: &str = "a whole number";

/// A lookup of environment variables by name.
struct EnvironmentVariables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl EnvironmentVariables<'_> {
    /// Returns a variable's value. An empty value, as in `RANK= command`, counts as unset.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn invalid_value(&self, name: &'static str, expected: &'static str) -> Error {
        RankEnvError::Variable { name, value: self.get(name).unwrap_or_default(), expected }.into()
    }

    fn parsed<T: FromStr>(&self, name: &'static str, expected: &'static str) -> Result<Option<T>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .trim()
                .parse()
                .map(Some)
                .map_err(|_| Error::from(RankEnvError::Variable { name, value, expected })),
        }
    }

    fn number(&self, name: &'static str) -> Result<Option<RankVariable>> {
        Ok(self.parsed(name, COUNT)?.map(|value| RankVariable { name, value }))
    }

    /// Returns the first of several variables that is set.
    fn first_of(&self, names: &[&'static str]) -> Result<Option<RankVariable>> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Returns two numbers that belong together: both or neither.
    fn pair(&self, first: &'static str, second: &[&'static str]) -> Result<Option<(RankVariable, RankVariable)>> {
        match (self.number(first)?, self.first_of(second)?) {
            (None, None) => Ok(None),
            (Some(first), Some(second)) => Ok(Some((first, second))),
            (Some(first), None) => Err(RankEnvError::Incomplete { set: first.name, missing: second[0] }.into()),
            (None, Some(second)) => Err(RankEnvError::Incomplete { set: second.name, missing: first }.into()),
        }
    }

    fn find(&self) -> Result<Option<RankNumbers>> {
        let local = self.pair("LOCAL_RANK", &["LOCAL_WORLD_SIZE", "LOCAL_SIZE"]);
        let only = match (self.number("RANK")?, self.number("WORLD_SIZE")?) {
            // The only rank of a job needs no index.
            (None, Some(world)) if world.value == 1 && local.as_ref().is_ok_and(Option::is_none) => {
                Some((RankVariable { name: "RANK", value: 0 }, world))
            }
            // PMIx provides the rank.
            (None, Some(_)) if self.get(PMIX_RANK).is_some() => return self.mpi_numbers(),
            _ => None,
        };
        if let Some((rank, world)) = only.map_or_else(|| self.pair("RANK", &["WORLD_SIZE"]), |only| Ok(Some(only)))? {
            return Ok(Some(RankNumbers { rank, world, local: local?, mpi: false }));
        }
        if let Some((local_rank, _)) = local? {
            return Err(RankEnvError::Incomplete { set: local_rank.name, missing: "RANK" }.into());
        }
        self.mpi_numbers()
    }

    /// Returns an MPI launcher's numbers instead of `found` if both have the same rank and world size and the ranks are
    /// on several hosts: a script started by srun may set torchrun's variables from Slurm's.
    fn or_mpi_numbers(&self, found: RankNumbers) -> RankNumbers {
        let several = |numbers: &RankNumbers| numbers.local.is_some_and(|(_, here)| here.value < numbers.world.value);
        let same = |other: &RankNumbers| [other.rank.value, other.world.value] == [found.rank.value, found.world.value];
        match self.mpi_numbers() {
            Ok(Some(other)) if !found.mpi && same(&other) && (several(&found) || several(&other)) => {
                RankNumbers { local: other.local.or(found.local), ..other }
            }
            _ => found,
        }
    }

    /// Returns the numbers set by MPI launchers.
    fn mpi_numbers(&self) -> Result<Option<RankNumbers>> {
        if let Some((rank, world)) = self.pair("OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"])? {
            let local = self.pair("OMPI_COMM_WORLD_LOCAL_RANK", &["OMPI_COMM_WORLD_LOCAL_SIZE"])?;
            return Ok(Some(RankNumbers { rank, world, local, mpi: true }));
        }
        if let Some((rank, world)) = self.pair("PMI_RANK", &["PMI_SIZE"])? {
            let local = match self.pair("MPI_LOCALRANKID", &["MPI_LOCALNRANKS"])? {
                None if self.is_slurm_task(rank, world)? => self.slurm_local()?,
                None => self.local_among("PALS_LOCAL_RANKID", world)?,
                local => local,
            };
            return Ok(Some(RankNumbers { rank, world, local, mpi: true }));
        }
        // SLURM_NTASKS without a rank is not an error: every shell inside an allocation has it, while tasks
        // also have SLURM_PROCID.
        if self.get("SLURM_PROCID").is_some()
            && let Some((rank, world)) = self.pair("SLURM_PROCID", &["SLURM_NTASKS", "SLURM_NPROCS"])?
        {
            return Ok(Some(RankNumbers { rank, world, local: self.slurm_local()?, mpi: true }));
        }
        if let Some((rank, world)) = self.pair("JSM_NAMESPACE_RANK", &["JSM_NAMESPACE_SIZE"])? {
            let local = self.local_among("JSM_NAMESPACE_LOCAL_RANK", world)?;
            return Ok(Some(RankNumbers { rank, world, local, mpi: true }));
        }
        if self.get(PMIX_RANK).is_some()
            && let Some((rank, world)) = self.pair(PMIX_RANK, &["WORLD_SIZE"])?
        {
            // DeepSpeed's launcher for MPICH provides the number of ranks on a host.
            let local = self.local_among("PALS_LOCAL_RANKID", self.number("LOCAL_SIZE")?.unwrap_or(world))?;
            return Ok(Some(RankNumbers { rank, world, local, mpi: true }));
        }
        Ok(None)
    }

    /// Returns a rank's index on its host, and `count`: the number of ranks there, or an upper bound if the launcher
    /// does not provide it.
    fn local_among(&self, name: &'static str, count: RankVariable) -> Result<Option<(RankVariable, RankVariable)>> {
        Ok(self.number(name)?.map(|local_rank| (local_rank, count)))
    }

    /// Returns whether srun has started this MPI rank. A batch script is a Slurm task, too, but the ranks that mpirun
    /// starts in it are not.
    fn is_slurm_task(&self, rank: RankVariable, world: RankVariable) -> Result<bool> {
        let (task, tasks) = (self.number("SLURM_PROCID")?, self.number("SLURM_STEP_NUM_TASKS")?);
        Ok(task.zip(tasks).is_some_and(|(task, tasks)| (task.value, tasks.value) == (rank.value, world.value)))
    }

    fn slurm_local(&self) -> Result<Option<(RankVariable, RankVariable)>> {
        const TASKS: &str = "SLURM_STEP_TASKS_PER_NODE";
        const GRAMMAR: &str = "tasks per node such as 2(x3),1, with an entry for SLURM_NODEID";
        let (Some(local_rank), Some(tasks)) = (self.number("SLURM_LOCALID")?, self.get(TASKS)) else {
            return Ok(None);
        };
        let node = self.number("SLURM_NODEID")?.map_or(0, |node| node.value);
        match tasks_of_node(&tasks, node) {
            Some(value) => Ok(Some((local_rank, RankVariable { name: TASKS, value }))),
            None => Err(RankEnvError::Variable { name: TASKS, value: tasks, expected: GRAMMAR }.into()),
        }
    }
}

/// Returns entry `node` of Slurm's run-length list: `2(x3),1` is 2, 2, 2, 1.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first = 0usize;
    for entry in list.split(',') {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        let tasks = tasks.parse().ok()?;
        first = first.checked_add(times)?;
        if node < first {
            return Some(tasks);
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<RankEnv> {
        RankEnv::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_string()))
    }

    fn refusal(vars: &[(&str, &str)]) -> String {
        read(vars).unwrap_err().to_string()
    }

    fn numbers(env: &RankEnv) -> [usize; 4] {
        [env.rank, env.world_size, env.local_rank, env.local_world_size]
    }

    #[test]
    fn nothing_set_is_rank_0_of_1() {
        let single_rank = RankEnv {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master_addr: "127.0.0.1".to_string(),
            master_port: 29500,
            shm_fd: None,
            mpi: false,
            timeout: Duration::from_secs(600),
        };
        assert_eq!(read(&[]).unwrap(), single_rank);
        assert_eq!(read(&[("RANK", ""), ("SLURM_NTASKS", "4")]).unwrap(), single_rank, "a shell in a Slurm allocation");
    }

    #[test]
    fn what_zerorun_sets_is_read_whole() {
        let env = read(&[
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("LOCAL_SIZE", "4"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "4711"),
            ("CANDLE_ZERO_SHM_FD", "5"),
            ("CANDLE_ZERO_TIMEOUT_MS", "1500"),
            ("PMI_RANK", "7"),
        ])
        .unwrap();
        assert_eq!(numbers(&env), [2, 4, 2, 4]);
        assert_eq!((env.master_port, env.shm_fd, env.timeout), (4711, Some(5), Duration::from_millis(1500)));
    }

    #[test]
    fn other_launchers_names_are_known() {
        let fd = ("CANDLE_ZERO_SHM_FD", "3");
        let deepspeed = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"), fd];
        assert_eq!(numbers(&read(&deepspeed).unwrap()), [1, 2, 1, 2]);
        assert_eq!(numbers(&read(&[("RANK", "1"), ("WORLD_SIZE", "2"), fd]).unwrap()), [1, 2, 1, 2]);
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
            fd,
        ];
        assert_eq!(numbers(&read(&open_mpi).unwrap()), [1, 3, 1, 3]);
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2"), fd];
        assert_eq!(numbers(&read(&mpich).unwrap()), [0, 2, 0, 2]);
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NPROCS", "4"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "4"),
            fd,
        ];
        assert_eq!(numbers(&read(&slurm).unwrap()), [3, 4, 3, 4]);
        assert_eq!(numbers(&read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]).unwrap()), [0, 1, 0, 1]);
    }

    #[test]
    fn ranks_of_srun_with_pmi_2_have_slurms_places_on_their_host_and_those_of_an_mpirun_in_a_batch_script_not() {
        let pmi = [("PMI_RANK", "3"), ("PMI_SIZE", "4")];
        let srun = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "3,1"),
        ];
        assert_eq!(numbers(&read(&[&pmi[..], &srun].concat()).unwrap()), [3, 4, 0, 1]);
        let script = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ];
        assert_eq!(
            numbers(&read(&[&[("PMI_RANK", "0"), ("PMI_SIZE", "4")][..], &script].concat()).unwrap()),
            [0, 4, 0, 4]
        );
    }

    #[test]
    fn mpi_joins_the_ranks_of_its_launchers_alone_and_not_those_of_a_zerorun_under_one() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let env = read(&open_mpi).unwrap();
        assert_eq!((numbers(&env), env.mpi), ([3, 4, 1, 2], true));
        assert!(read(&[("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4")]).unwrap().mpi);
        let zerorun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("CANDLE_ZERO_SHM_FD", "3")];
        let env = read(&[&open_mpi[..], &zerorun].concat()).unwrap();
        assert_eq!((numbers(&env), env.mpi), ([0, 2, 0, 2], false));
        let asked = [("CANDLE_ZERO_BACKEND", "mpi"), ("PMI_FD", "4")];
        assert!(read(&[&zerorun[..], &asked].concat()).unwrap().mpi, "zerorun --backend mpi");
        assert!(!read(&[&zerorun[..], &asked[1..]].concat()).unwrap().mpi, "the socket of another launcher");
    }

    #[test]
    fn launchers_that_tell_no_number_of_ranks_on_a_host_leave_it_at_most_all() {
        let jsrun = [("JSM_NAMESPACE_RANK", "5"), ("JSM_NAMESPACE_SIZE", "8"), ("JSM_NAMESPACE_LOCAL_RANK", "1")];
        let env = read(&jsrun).unwrap();
        assert_eq!((numbers(&env), env.mpi), ([5, 8, 1, 8], true));
        assert_eq!(numbers(&read(&jsrun[..2]).unwrap()), [5, 8, 5, 8]);
        let cray = [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("PALS_LOCAL_RANKID", "1")];
        assert_eq!(numbers(&read(&cray).unwrap()), [5, 8, 1, 8]);
        let hydra = [("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "4")];
        assert_eq!(numbers(&read(&[&cray[..], &hydra].concat()).unwrap()), [5, 8, 2, 4]);
    }

    #[test]
    fn pmix_tells_the_rank_and_the_user_how_many_there_are() {
        let pmix = [("PMIX_RANK", "3"), ("PMIX_NAMESPACE", "job@1"), ("WORLD_SIZE", "4")];
        let env = read(&pmix).unwrap();
        assert_eq!((numbers(&env), env.mpi), ([3, 4, 3, 4], true));
        let local = [("PALS_LOCAL_RANKID", "1")];
        assert_eq!(numbers(&read(&[&pmix[..], &local].concat()).unwrap()), [3, 4, 1, 4]);
        let deepspeed = [("PALS_LOCAL_RANKID", "1"), ("LOCAL_SIZE", "2")];
        assert_eq!(numbers(&read(&[&pmix[..], &deepspeed].concat()).unwrap()), [3, 4, 1, 2]);
        // Launchers that set PMIX_RANK in addition to their own variables.
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "1")];
        assert_eq!(numbers(&read(&open_mpi).unwrap()), [1, 2, 1, 2]);
        let zerorun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("CANDLE_ZERO_SHM_FD", "3"), ("PMIX_RANK", "1")];
        assert!(!read(&zerorun).unwrap().mpi);
        assert_eq!(numbers(&read(&[("WORLD_SIZE", "1"), ("PMIX_RANK", "0")]).unwrap()), [0, 1, 0, 1]);
    }

    #[test]
    fn a_world_of_one_needs_no_rank() {
        assert_eq!(numbers(&read(&[("WORLD_SIZE", "1")]).unwrap()), [0, 1, 0, 1]);
    }

    #[test]
    fn a_half_set_group_is_refused_by_name() {
        insta::assert_snapshot!(refusal(&[("RANK", "0")]), @"RANK is set but WORLD_SIZE is not: a rank needs both; start the program with zerorun, or unset RANK");
        insta::assert_snapshot!(refusal(&[("WORLD_SIZE", "2")]), @"WORLD_SIZE is set but RANK is not: a rank needs both; start the program with zerorun, or unset WORLD_SIZE");
        insta::assert_snapshot!(refusal(&[("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")]), @"LOCAL_RANK is set but RANK is not: a rank needs both; start the program with zerorun, or unset LOCAL_RANK");
        insta::assert_snapshot!(refusal(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]), @"LOCAL_RANK is set but LOCAL_WORLD_SIZE is not: a rank needs both; start the program with zerorun, or unset LOCAL_RANK");
        insta::assert_snapshot!(refusal(&[("OMPI_COMM_WORLD_RANK", "0")]), @"OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not: a rank needs both; start the program with zerorun, or unset OMPI_COMM_WORLD_RANK");
        insta::assert_snapshot!(refusal(&[("PMI_SIZE", "2")]), @"PMI_SIZE is set but PMI_RANK is not: a rank needs both; start the program with zerorun, or unset PMI_SIZE");
        insta::assert_snapshot!(refusal(&[("JSM_NAMESPACE_RANK", "0")]), @"JSM_NAMESPACE_RANK is set but JSM_NAMESPACE_SIZE is not: a rank needs both; start the program with zerorun, or unset JSM_NAMESPACE_RANK");
        insta::assert_snapshot!(refusal(&[("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "job@1")]), @"PMIX_RANK is set but WORLD_SIZE is not: a rank needs both; start the program with zerorun, or unset PMIX_RANK");
        insta::assert_snapshot!(refusal(&[("JSM_NAMESPACE_RANK", "1"), ("JSM_NAMESPACE_SIZE", "2"), ("JSM_NAMESPACE_LOCAL_RANK", "2")]), @"JSM_NAMESPACE_LOCAL_RANK is 2, but must be below JSM_NAMESPACE_SIZE, which is 2");
        insta::assert_snapshot!(refusal(&[("SLURM_PROCID", "0")]), @"SLURM_PROCID is set but SLURM_NTASKS is not: a rank needs both; start the program with zerorun, or unset SLURM_PROCID");
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let shared = ("CANDLE_ZERO_SHM_FD", "3");
        insta::assert_snapshot!(refusal(&[("RANK", "two"), ("WORLD_SIZE", "2")]), @"environment variable RANK is `two`; it must be a whole number");
        insta::assert_snapshot!(refusal(&[("RANK", "-1"), ("WORLD_SIZE", "2")]), @"environment variable RANK is `-1`; it must be a whole number");
        insta::assert_snapshot!(refusal(&[("RANK", "2"), ("WORLD_SIZE", "2"), shared]), @"RANK is 2, but must be below WORLD_SIZE, which is 2");
        insta::assert_snapshot!(refusal(&[("RANK", "0"), ("WORLD_SIZE", "0")]), @"RANK is 0, but must be below WORLD_SIZE, which is 0");
        insta::assert_snapshot!(refusal(&[("CANDLE_ZERO_SHM_FD", "-1")]), @"environment variable CANDLE_ZERO_SHM_FD is `-1`; it must be the number of an open file descriptor");
        insta::assert_snapshot!(refusal(&[("CANDLE_ZERO_TIMEOUT_MS", "0")]), @"environment variable CANDLE_ZERO_TIMEOUT_MS is `0`; it must be a whole number of milliseconds, at least 1");
        insta::assert_snapshot!(refusal(&[("MASTER_PORT", "70000")]), @"environment variable MASTER_PORT is `70000`; it must be a port number from 1 to 65535");
        insta::assert_snapshot!(
            refusal(&[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), shared]),
            @"2 of 4 ranks are on this host, but these variables join only the ranks of one host; start one launcher \
                on each host instead of the ranks, `zerorun --nnodes 2 --node_rank N --master_addr 127.0.0.1 \
                --num_ranks 2 PROGRAM`, or let mpirun or srun start the ranks"
        );
    }

    #[test]
    fn torchruns_variables_are_those_of_ranks_that_meet_by_themselves_on_one_host() {
        let env = read(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap();
        assert_eq!((numbers(&env), env.shm_fd, env.mpi), ([1, 2, 1, 2], None, false));
        // A Slurm batch script on two nodes that sets these variables itself.
        let torch = [("RANK", "3"), ("WORLD_SIZE", "4")];
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
        ];
        let env = read(&[&torch[..], &slurm].concat()).unwrap();
        assert_eq!((numbers(&env), env.mpi), ([3, 4, 1, 2], true));
        let local = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(read(&[&torch[..], &local, &slurm].concat()).unwrap().mpi);
        let one_node = [&slurm[..2], &[("SLURM_LOCALID", "3"), ("SLURM_STEP_TASKS_PER_NODE", "4")]].concat();
        assert!(!read(&[&torch[..], &one_node].concat()).unwrap().mpi);
    }

    #[test]
    fn slurms_task_lists_are_expanded() {
        for (list, node, tasks) in [
            ("2", 0, Some(2)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("2,1", 1, Some(1)),
            ("", 0, None),
            ("2(x", 0, None),
            ("a", 0, None),
        ] {
            assert_eq!(tasks_of_node(list, node), tasks, "{list} node {node}");
        }
    }
}
