//! Reads the variables of another launcher that has started `zerorun` once on each host.
//!
//! | started by | this host's index | the number of hosts |
//! | --- | --- | --- |
//! | torchrun's conventions (Kubeflow) | `PET_NODE_RANK` | `PET_NNODES` |
//! | Kubernetes, an indexed Job | `JOB_COMPLETION_INDEX` | |
//! | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` |
//! | MPICH, Intel MPI, srun with pmi2 | `PMI_RANK` | `PMI_SIZE` |
//! | Slurm's srun | `SLURM_NODEID` | `SLURM_STEP_NUM_NODES`, `SLURM_NNODES` |
//! | LSF's jsrun | `JSM_NAMESPACE_RANK` | `JSM_NAMESPACE_SIZE` |
//! | PALS | `PALS_RANKID` | |
//! | PMIx | `PMIX_RANK` | |
//!
//! The first row whose variable for this host's index is set takes effect. Inside a Slurm job, the values of `mpirun`
//! are the right ones, so its rows precede Slurm's.

use crate::error::{HostsError, RankEnvError, Result};
use crate::launch::nodes::DEFAULT_PORT;
use std::str::FromStr;

/// The variables for this host's index and for the number of hosts.
const NODE_VARIABLES: [(&str, &[&str]); 8] = [
    ("PET_NODE_RANK", &[]),
    ("JOB_COMPLETION_INDEX", &[]),
    ("OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"]),
    ("PMI_RANK", &["PMI_SIZE"]),
    ("SLURM_NODEID", &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"]),
    ("JSM_NAMESPACE_RANK", &["JSM_NAMESPACE_SIZE"]),
    ("PALS_RANKID", &[]),
    ("PMIX_RANK", &[]),
];

const COUNT: &str = "a whole number";
const PORT: &str = "a port number from 1 to 65535";

/// The environment variables of this process, or made-up ones in tests.
pub(crate) struct LauncherVariables<'a>(pub(crate) &'a dyn Fn(&str) -> Option<String>);

/// Returns an environment variable of this process. A value that is not UTF-8 gets replacement characters. It is then
/// refused as a number, and the error names the variable.
pub(crate) fn of_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A host's index and, if known, the number of hosts, as given by the launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeNumber {
    /// This host's index.
    pub(super) node: usize,
    /// The number of hosts, and the variable that gives it.
    pub(super) nodes: Option<(usize, &'static str)>,
}

impl LauncherVariables<'_> {
    /// Returns a variable's value. An empty value counts as unset.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    /// Parses a variable as a number.
    ///
    /// # Errors
    /// Fails if the value is not a number.
    pub(super) fn number<T: FromStr>(&self, name: &'static str, expected: &'static str) -> Result<Option<T>> {
        let read = |value: String| match value.trim().parse() {
            Ok(number) => Ok(number),
            Err(_) => Err(RankEnvError::Variable { name, value, expected }.into()),
        };
        self.get(name).map(read).transpose()
    }

    /// Returns this host's index and, if known, the number of hosts, or `None` if no launcher gives the index.
    ///
    /// # Errors
    /// Fails if a value is not a number.
    pub(super) fn node_number(&self) -> Result<Option<NodeNumber>> {
        for (rank, sizes) in NODE_VARIABLES {
            let Some(node) = self.number(rank, COUNT)? else { continue };
            let mut nodes = None;
            for size in sizes {
                if nodes.is_none() {
                    nodes = self.number(size, COUNT)?.map(|number| (number, *size));
                }
            }
            return Ok(Some(NodeNumber { node, nodes }));
        }
        Ok(None)
    }

    /// Parses `PET_RDZV_ENDPOINT` (HOST or HOST:PORT) into the first host's address and the port. Port 0 means any port
    /// and is returned as `None`.
    ///
    /// # Errors
    /// Fails if the host is empty or the port is invalid.
    pub(super) fn endpoint(&self) -> Result<Option<(String, Option<u16>)>> {
        const NAME: &str = "PET_RDZV_ENDPOINT";
        let Some(value) = self.get(NAME) else { return Ok(None) };
        let text = value.trim();
        // The port of an IPv6 address follows the bracket.
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port)),
            _ => (text, None),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
        match port.map(str::parse::<u16>).transpose() {
            Ok(port) if !host.is_empty() => Ok(Some((host, port.filter(|port| *port > 0)))),
            _ => Err(RankEnvError::Variable { name: NAME, value, expected: "HOST or HOST:PORT" }.into()),
        }
    }

    /// Parses `PET_MASTER_PORT`.
    ///
    /// # Errors
    /// Fails if the value is not a port.
    pub(super) fn master_port(&self) -> Result<Option<u16>> {
        match self.number("PET_MASTER_PORT", PORT)? {
            Some(0) => {
                Err(RankEnvError::Variable { name: "PET_MASTER_PORT", value: "0".into(), expected: PORT }.into())
            }
            port => Ok(port),
        }
    }

    /// Parses `PET_NPROC_PER_NODE`.
    ///
    /// # Errors
    /// Fails if the value is neither a number from 1 to 1024 nor one of torchrun's keywords, or if it is `gpu` and
    /// there is no GPU.
    pub(super) fn ranks(&self) -> Result<Option<u16>> {
        let Some(text) = self.get("PET_NPROC_PER_NODE") else { return Ok(None) };
        let refused = |why| HostsError::BadRanks { text: text.clone(), why }.into();
        super::ranks_per_host::ranks(text.trim()).map(Some).map_err(refused)
    }

    /// Returns this host's index and the number of hosts. `node_rank` is `--node_rank`. `nodes` is `--nnodes`, or
    /// `None` for `auto`; the other launcher's variables then give the number.
    ///
    /// # Errors
    /// Fails if one of them is unknown or invalid, or if the launcher has started a different number of processes.
    pub(super) fn node(&self, node_rank: Option<usize>, nodes: Option<usize>) -> Result<(usize, usize)> {
        let numbers = self.node_number()?;
        let launched = numbers.and_then(|numbers| numbers.nodes);
        let Some(nodes) = nodes.or(launched.map(|(nodes, _)| nodes)) else {
            return Err(HostsError::NodesUnknown.into());
        };
        if let (None, Some((found, by))) = (node_rank, launched)
            && found != nodes
        {
            return Err(HostsError::NodesDiffer { nodes, found, by }.into());
        }
        match node_rank.or(numbers.map(|numbers| numbers.node)) {
            Some(node) if node < nodes => Ok((node, nodes)),
            Some(node) => Err(HostsError::NodeOutOfRange { node, nodes }.into()),
            None => Err(HostsError::NodeUnknown { nodes, missing: "--node_rank" }.into()),
        }
    }

    /// Returns the address and the port of the first host. The address is from the command line, else from torchrun's
    /// variables, else from `MASTER_ADDR`.
    ///
    /// # Errors
    /// Fails if the endpoint or the port is invalid, or if nothing gives the address. The error about a missing address
    /// names `nodes`, the number of hosts.
    pub(super) fn first_host(
        &self,
        master_addr: Option<String>,
        port: Option<u16>,
        nodes: usize,
    ) -> Result<(String, u16)> {
        let (address, endpoint_port) = self.endpoint()?.map_or((None, None), |(address, port)| (Some(address), port));
        let port = port.or(endpoint_port).or(self.master_port()?).unwrap_or(DEFAULT_PORT);
        let address =
            master_addr.or(address).or_else(|| self.get("PET_MASTER_ADDR")).or_else(|| self.get("MASTER_ADDR"));
        match address {
            Some(address) => Ok((address, port)),
            None => Err(HostsError::NodeUnknown { nodes, missing: "--master_addr" }.into()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Calls `f` with variables given as `A=1 B=2`.
    fn with<T>(variables: &str, f: impl FnOnce(&LauncherVariables<'_>) -> T) -> T {
        let all: Vec<(&str, &str)> = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        let lookup = |name: &str| all.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_string());
        f(&LauncherVariables(&lookup))
    }

    fn node(variables: &str, nodes: Option<usize>) -> Result<(usize, usize)> {
        with(variables, |variables| variables.node(None, nodes))
    }

    #[test]
    fn each_launchers_variables_give_the_hosts_number_and_how_many_there_are() {
        for variables in [
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0",
            "PMI_RANK=1 PMI_SIZE=2",
            "SLURM_NODEID=1 SLURM_NNODES=2",
            "SLURM_NODEID=1 SLURM_NNODES=8 SLURM_STEP_NUM_NODES=2",
            "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 PMIX_RANK=0",
            // On all hosts except the first, mpirun's processes are started by its daemons, which are Slurm tasks.
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_NODEID=0 SLURM_NNODES=1",
        ] {
            assert_eq!(node(variables, Some(2)).unwrap(), (1, 2), "{variables}");
            assert_eq!(node(variables, None).unwrap(), (1, 2), "{variables}: auto");
        }
        for variables in
            ["PALS_RANKID=1", "PMIX_RANK=1", "JOB_COMPLETION_INDEX=1", "PET_NODE_RANK=1 PMI_RANK=0 PMI_SIZE=3"]
        {
            assert_eq!(node(variables, Some(2)).unwrap(), (1, 2), "{variables}");
            assert!(node(variables, None).is_err(), "{variables}: auto");
        }
        assert_eq!(
            with("PMI_RANK=0 PMI_SIZE=4", |all| all.node(Some(1), Some(2))).unwrap(),
            (1, 2),
            "the command line"
        );
    }

    #[test]
    fn numbers_that_do_not_fit_are_named() {
        let message = |variables: &str, nodes| node(variables, nodes).unwrap_err().to_string();
        insta::assert_snapshot!(message("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", Some(2)), @"--nnodes is 2, but OMPI_COMM_WORLD_SIZE is 4; start zerorun once on each host (mpirun --map-by ppr:1:node, mpirun -ppn 1, srun --ntasks-per-node=1) and set --nnodes to the number of hosts, or give this host's number as --node_rank");
        insta::assert_snapshot!(message("PALS_RANKID=2", Some(2)), @"--node_rank 2 is not below --nnodes 2; number the hosts from 0 to 1");
        insta::assert_snapshot!(message("SLURM_NODEID=x", Some(2)), @"environment variable SLURM_NODEID is `x`; it must be a whole number");
        insta::assert_snapshot!(message("JOB_COMPLETION_INDEX=0", None), @"--nnodes auto cannot determine the number of hosts: zerorun was not started by mpirun, srun or jsrun, or the variable that contains the number is not set; give the number");
        insta::assert_snapshot!(message("", Some(2)), @"--nnodes 2 needs --node_rank; give each host its index from 0 to 1, and give all hosts the first host's address");
    }

    #[test]
    fn the_first_host_is_that_of_the_command_line_then_torchruns() {
        let first = |variables: &str, given: Option<&str>, port| {
            with(variables, |variables| variables.first_host(given.map(String::from), port, 2))
        };
        let of = |address: &str, port| (address.to_string(), port);
        assert_eq!(first("PET_RDZV_ENDPOINT=a:1234", None, None).unwrap(), of("a", 1234));
        assert_eq!(first("PET_RDZV_ENDPOINT=a PET_MASTER_ADDR=b PET_MASTER_PORT=7", None, None).unwrap(), of("a", 7));
        assert_eq!(first("PET_RDZV_ENDPOINT=a:1234", Some("c"), Some(5)).unwrap(), of("c", 5));
        assert_eq!(first("PET_MASTER_ADDR=b MASTER_ADDR=d", None, None).unwrap(), of("b", DEFAULT_PORT));
        assert_eq!(first("MASTER_ADDR=d", None, None).unwrap(), of("d", DEFAULT_PORT));
        assert_eq!(first("PET_RDZV_ENDPOINT=[::1]:0", None, None).unwrap(), of("::1", DEFAULT_PORT));
        assert_eq!(first("PET_RDZV_ENDPOINT=fe80::1", None, None).unwrap(), of("fe80::1", DEFAULT_PORT));
        let message = |variables: &str| first(variables, None, None).unwrap_err().to_string();
        insta::assert_snapshot!(message("PET_RDZV_ENDPOINT=a:http"), @"environment variable PET_RDZV_ENDPOINT is `a:http`; it must be HOST or HOST:PORT");
        insta::assert_snapshot!(message("PET_RDZV_ENDPOINT=:29400"), @"environment variable PET_RDZV_ENDPOINT is `:29400`; it must be HOST or HOST:PORT");
        insta::assert_snapshot!(message("PET_MASTER_ADDR=a PET_MASTER_PORT=0"), @"environment variable PET_MASTER_PORT is `0`; it must be a port number from 1 to 65535");
        insta::assert_snapshot!(message(""), @"--nnodes 2 needs --master_addr; give each host its index from 0 to 1, and give all hosts the first host's address");
    }
}
