//! The errors of hosts, their slots, and the environment of their ranks.

use std::path::PathBuf;

/// The maximum number of slots of a host. A larger number is considered a typing error.
pub(super) const MAX_SLOTS: usize = 1 << 16;
/// The exclusive upper bound of core numbers. This or any larger number is considered a typing error: Linux supports at
/// most 8192 cores.
pub(super) const MAX_CORES: usize = 1 << 16;

/// An error about hosts, their slots, or the environment of their ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    // The hostfile.
    /// A line of the hostfile is not an entry.
    #[error(
        "{}:{line}: `{text}` is not a hostfile entry; write NAME slots=N, for example `worker-0 slots=4`",
        path.display()
    )]
    BadEntry {
        /// The hostfile.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The beginning of the line.
        text: String,
    },
    /// A host's name looks like an option.
    #[error(
        "{}:{line}: `{host}` cannot be a host: programs would read it as an option; give the host's name without the \
         dash",
        path.display()
    )]
    OptionAsHost {
        /// The hostfile.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The name.
        host: String,
    },
    /// A host has two entries.
    #[error(
        "{}:{line}: host `{host}` already has an entry on line {first}; give each host one line with all its slots",
        path.display()
    )]
    DuplicateHost {
        /// The hostfile.
        path: PathBuf,
        /// The line of the second entry, counted from 1.
        line: usize,
        /// The host.
        host: String,
        /// The line of the first entry.
        first: usize,
    },
    /// A host has an impossible number of slots.
    #[error(
        "{}:{line}: host `{host}` has slots={slots}; at most {} are allowed, usually one for each GPU",
        path.display(),
        MAX_SLOTS
    )]
    TooManySlots {
        /// The hostfile.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The host.
        host: String,
        /// The number as written in the file.
        slots: String,
    },
    /// The hostfile is empty or contains only comments.
    #[error(
        "{} lists no hosts; write a line NAME slots=N for each host, for example `worker-0 slots=4`",
        path.display()
    )]
    NoEntry {
        /// The hostfile.
        path: PathBuf,
    },

    // The selection of hosts and slots.
    /// Both filters are given.
    #[error(
        "--include and --exclude are both given; give only one: the first lists what to use, the second what not to use"
    )]
    IncludeAndExclude,
    /// Both a filter and a number are given.
    #[error("{filter} and {count} are both given; give only one: a filter already selects hosts and slots")]
    FilterAndCount {
        /// The option of the filter.
        filter: &'static str,
        /// The option of the number.
        count: &'static str,
    },
    /// A filter names an unknown host.
    #[error(
        "{option} names host `{host}`, which is not one of the hosts: {known}; name one of them, or add it to the \
         hostfile"
    )]
    UnknownHost {
        /// The option of the filter.
        option: &'static str,
        /// The host.
        host: String,
        /// The known hosts, and the most similar one.
        known: String,
    },
    /// A filter names a slot that its host does not have.
    #[error(
        "{option} names slot {slot} of host `{host}`, whose slots are: {known}; name one of them, or give the host \
         more slots in the hostfile"
    )]
    UnknownSlot {
        /// The option of the filter.
        option: &'static str,
        /// The host.
        host: String,
        /// The slot.
        slot: usize,
        /// The host's slots.
        known: String,
    },
    /// A filter contains something else in place of a slot.
    #[error(
        "`{slot}` in `{node}` of {option} is not a slot; write whole numbers separated by commas, for example \
         HOST:0,2, or only HOST for all its slots"
    )]
    BadSlot {
        /// The option of the filter.
        option: &'static str,
        /// The filter's part for this host.
        node: String,
        /// The text in place of the slot.
        slot: String,
    },
    /// A filter's part for a host contains two colons.
    #[error("`{node}` of {option} has more than one colon; write HOST:0,1 for slots, and @ between hosts")]
    TwoColons {
        /// The option of the filter.
        option: &'static str,
        /// The filter's part for this host.
        node: String,
    },
    /// A filter has an empty host name.
    #[error("`{filter}` of {option} has an empty host name; write HOST or HOST:0,2, and @ between hosts")]
    NamelessHost {
        /// The option of the filter.
        option: &'static str,
        /// The filter.
        filter: String,
    },
    /// More hosts are requested than exist.
    #[error(
        "--num_nodes {asked} is above the number of hosts, {found}; give at most {found}, or add hosts to the hostfile"
    )]
    TooFewHosts {
        /// The requested number.
        asked: usize,
        /// The existing number.
        found: usize,
    },
    /// More ranks per host are requested than a host can have.
    #[error(
        "--num_gpus {slots} is above {}, the maximum number of slots of a host; give the number of ranks per host",
        MAX_SLOTS
    )]
    TooManyRanks {
        /// The requested number.
        slots: usize,
    },
    /// A number of hosts or slots is zero.
    #[error("{option} 0 would start no ranks; give at least 1, or leave {option} out to use all")]
    Zero {
        /// The option.
        option: &'static str,
    },
    /// No slot is left to start ranks on.
    #[error(
        "no slot is left to start a rank on; add slots to the hosts in the hostfile, or change --include and --exclude \
         so that some are kept"
    )]
    NoSlot,

    // The launchers of the hosts.
    /// The hostfile cannot be read.
    #[error("cannot read the hostfile {}: {why}; give --hostfile a file with a line NAME slots=N for each host", path.display())]
    NoHostfile {
        /// The hostfile.
        path: PathBuf,
        /// The error of the operating system.
        why: String,
    },
    /// The program that reaches a host could not be started.
    #[error("cannot reach host {host} with {program}: {why}; install it, or name another program in ZERORUN_RSH")]
    NotReached {
        /// The host.
        host: String,
        /// The program.
        program: String,
        /// The error of the operating system.
        why: String,
    },
    /// The port where hosts connect is in use.
    #[error(
        "port {port}, where the other hosts connect, cannot be used: {why}; stop the other job, or give another \
         --master_port"
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// The error of the operating system.
        why: String,
    },
    /// The first host's address belongs to another host.
    #[error(
        "--{option} {address} is {found}, which is not an address of this host, but the other hosts connect to this \
         one (--node_rank 0); set --master_addr to this host's address, or, if the others reach it at a different one \
         (NAT, a container's published port, a service), also set --bind_addr to an address of this host, for example \
         0.0.0.0"
    )]
    FirstIsElsewhere {
        /// The option, without its dashes.
        option: &'static str,
        /// The value of the option.
        address: String,
        /// The addresses that it resolves to.
        found: String,
    },
    /// The first host's name cannot be resolved.
    #[error(
        "--{option} {address} could not be resolved within {seconds} s: {why}; give a name that this host can resolve, \
         or an IP address"
    )]
    UnknownAddress {
        /// The option that gave the name, without its dashes.
        option: &'static str,
        /// The name.
        address: String,
        /// The number of seconds for which the name was looked up.
        seconds: u64,
        /// The error of the operating system.
        why: String,
    },
    /// The secret of the hosts cannot be used.
    #[error("{from} cannot be used as the secret of the hosts: {problem}")]
    BadSecret {
        /// The source of the secret.
        from: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// Another program listens on the first host's port.
    #[error(
        "the program at {address}, port {port}, is not this version of zerorun; stop that program, or give all hosts \
         another --master_port"
    )]
    NoLauncher {
        /// `--master_addr`.
        address: String,
        /// `--master_port`.
        port: u16,
    },
    /// The first host does not answer.
    #[error(
        "the first host, {address}, could not be reached on port {port} within {seconds} s: {why}; start zerorun with \
         --node_rank 0 there, set --master_addr to an address at which this host reaches it, and check that the port \
         is open"
    )]
    FirstUnreachable {
        /// `--master_addr`.
        address: String,
        /// `--master_port`.
        port: u16,
        /// The number of seconds for which connecting was tried.
        seconds: u64,
        /// The error of the operating system.
        why: String,
    },
    /// The first host refuses this one.
    #[error("the first host refused this one: {why}")]
    Refused {
        /// The reason that the first host gives.
        why: String,
    },
    /// A word of the command line is not UTF-8.
    #[error(
        "`{word}` is not UTF-8 text and cannot be passed to other hosts; rename the file, or write the argument as text"
    )]
    WordNotUtf8 {
        /// The word, with replacement characters for invalid bytes.
        word: String,
    },
    /// A file of variables cannot be read.
    #[error("cannot read the variables for other hosts from {}: {why}; make it readable, or remove it", path.display())]
    NoVariables {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        why: String,
    },
    /// The value for the number of hosts is not a number, a range or `auto`.
    #[error(
        "--nnodes {text} is not a number of hosts; write N, FEWEST:N with 1 <= FEWEST <= N, or auto, for example 2 or \
         1:4"
    )]
    BadNodes {
        /// The given value.
        text: String,
    },
    /// A host's index is not below the number of hosts.
    #[error("--node_rank {node} is not below --nnodes {nodes}; number the hosts from 0 to {}", nodes - 1)]
    NodeOutOfRange {
        /// `--node_rank`.
        node: usize,
        /// `--nnodes`.
        nodes: usize,
    },
    /// The number of hosts is unknown.
    #[error(
        "--nnodes auto cannot determine the number of hosts: zerorun was not started by mpirun, srun or jsrun, or \
         the variable that contains the number is not set; give the number"
    )]
    NodesUnknown,
    /// The number of processes that another launcher has started differs from the number of hosts.
    #[error(
        "--nnodes is {nodes}, but {by} is {found}; start zerorun once on each host (mpirun --map-by ppr:1:node, mpirun \
         -ppn 1, srun --ntasks-per-node=1) and set --nnodes to the number of hosts, or give this host's number as \
         --node_rank"
    )]
    NodesDiffer {
        /// `--nnodes`.
        nodes: usize,
        /// The launcher's number.
        found: usize,
        /// The variable that contains it.
        by: &'static str,
    },
    /// The number of ranks on a host cannot be used.
    #[error("PET_NPROC_PER_NODE is `{text}`; {why}")]
    BadRanks {
        /// The value.
        text: String,
        /// The problem and its remedy.
        why: String,
    },
    /// No `mpirun` of the requested kind exists.
    #[error(
        "--launcher {launcher} needs that library's mpirun on the PATH: {why}; install it, put its folder first in PATH, or \
         give another --launcher"
    )]
    NoMpirun {
        /// `--launcher`.
        launcher: &'static str,
        /// The problem.
        why: String,
    },
    /// `mpirun` passes the same variables to all hosts, but their GPUs differ.
    #[error(
        "{slots}, but with --launcher {launcher} all hosts get the same CUDA_VISIBLE_DEVICES; choose the same slots on \
         each, or use --launcher ssh"
    )]
    DevicesDiffer {
        /// `--launcher`.
        launcher: &'static str,
        /// Two hosts and the slots that each would use.
        slots: String,
    },
    /// This host's number or the first host's address is not given.
    #[error(
        "--nnodes {nodes} needs {missing}; give each host its index from 0 to {}, and give all hosts the first host's \
         address",
        nodes - 1
    )]
    NodeUnknown {
        /// `--nnodes`.
        nodes: usize,
        /// The missing option.
        missing: &'static str,
    },

    // The description of the hosts for other programs.
    /// A launcher of ranks needs the same number of slots on every host.
    #[error(
        "host `{host}` has {} and host `{other}` has {other_slots}, but {launcher} starts the same number of ranks on \
         every host; make them equal, with --num_gpus or in the hostfile",
        candle_zero::util::counted(*slots, "slot")
    )]
    UnevenHosts {
        /// The launcher.
        launcher: &'static str,
        /// The first host.
        host: String,
        /// Its number of slots.
        slots: usize,
        /// A host with a different number.
        other: String,
        /// Its number of slots.
        other_slots: usize,
    },
    /// Slurm cannot select the slots.
    #[error(
        "host `{host}` would use slots {slots}, but Slurm starts ranks on the first slots of every host; select slots \
         0 to {}",
        count - 1
    )]
    SlurmSlots {
        /// The host.
        host: String,
        /// The slots of the host.
        slots: String,
        /// The number of slots.
        count: usize,
    },
    /// The world info cannot be read.
    #[error(
        "cannot read the world info: {problem}; it must be the base64 of {{\"HOST\": [SLOT, ...], ...}}, as the \
         launcher wrote it"
    )]
    WorldInfo {
        /// The problem.
        problem: String,
    },

    // Variables for other hosts.
    /// A line of `.deepspeed_env` does not set a variable.
    #[error(
        "{}:{line}: `{text}` does not set a variable; write NAME=VALUE, or # in front of a comment",
        path.display()
    )]
    BadVariable {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The beginning of the line.
        text: String,
    },
    /// A line of `.deepspeed_env` sets an invalid variable name.
    #[error(
        "{}:{line}: `{name}` is not a variable name; write NAME=VALUE with letters, digits and _ in the name",
        path.display()
    )]
    BadVariableName {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The text in place of the name.
        name: String,
    },
    /// A variable for other hosts has a value that is not UTF-8.
    #[error("the value of {name} is not UTF-8 text and cannot be passed to other hosts; set it to text, or unset it")]
    ValueNotUtf8 {
        /// The variable.
        name: String,
    },

    // The cores of ranks.
    /// A core list contains something else in place of a core.
    #[error(
        "`{part}` in the core list `{list}` is neither a core nor a range of cores; write numbers below {} or \
         FIRST-LAST, for example 0,2-4",
        MAX_CORES
    )]
    BadCores {
        /// The list.
        list: String,
        /// The part of the list.
        part: String,
    },
    /// A range of cores ends before it starts.
    #[error("the range of cores `{part}` ends before it starts; write {last}-{first}")]
    BackwardCores {
        /// The range.
        part: String,
        /// The first number of the range.
        first: usize,
        /// The last number of the range.
        last: usize,
    },
    /// A core list is not in ascending order.
    #[error(
        "`{part}` in the core list `{list}` does not begin above the preceding core, {earlier}; write each core once, \
         in ascending order"
    )]
    UnorderedCores {
        /// The list.
        list: String,
        /// The part that is out of order.
        part: String,
        /// The last core before it.
        earlier: usize,
    },
    /// A core list names a core that ranks on this host cannot use.
    #[error(
        "--bind_core_list names core {core}, but zerorun's processes on host {host} may run on {known}; name only \
         these, or start zerorun with more cores (taskset, a container, Slurm)"
    )]
    NoSuchCore {
        /// The first such core.
        core: usize,
        /// The host.
        host: String,
        /// The available cores.
        known: String,
    },
    /// Something else binds threads.
    #[error(
        "KMP_AFFINITY is set, so Intel's OpenMP binds threads to cores of its choice; unset it, or leave out \
         --bind_cores_to_rank"
    )]
    KmpAffinity,
    /// There are more ranks than cores.
    #[error(
        "{ranks} ranks on a host need at least {ranks} cores to be bound to, but only {cores} can be used; give a \
         longer core list, or start fewer ranks"
    )]
    TooFewCores {
        /// The number of cores.
        cores: usize,
        /// The number of ranks.
        ranks: usize,
    },
}

/// Shortens external text to one line, for a message.
pub(super) fn one_line(text: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 40;
    let mut characters = text.chars();
    let mut line = String::new();
    for character in characters.by_ref().take(MAX_SHOWN_CHARS) {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    if characters.next().is_some() {
        line += "...";
    }
    line
}
