//! The flags for jobs on several hosts, which the command lines for scripts and for `zerorun finetune` share.

use super::launcher_variables::LauncherVariables;
use crate::error::{HostsError, Result};
use crate::launch::LaunchMode;
use crate::launch::hosts::host_filter::HostSelection;
use crate::launch::mpirun::{MpirunFlavor, MpirunOptions};
use crate::launch::nodes::NodeOptions;
use crate::launch::nodes::listen_address::BIND_ADDR;
use crate::launch::nodes::ssh::{MultiHostOptions, SECRET_FROM_STDIN};
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// The heading in the help.
pub(crate) const HOSTS: &str = "Several hosts";

/// The maximum number of hosts in a job.
const MAX_NODES: usize = 4096;

/// The flags for jobs on several hosts.
#[derive(Debug, Args)]
pub(crate) struct HostFlags {
    /// Run over ssh on the hosts listed in this file, one per line as `NAME slots=RANKS`
    #[arg(short = 'H', long, value_name = "FILE", help_heading = HOSTS)]
    pub(crate) hostfile: Option<PathBuf>,

    /// With --hostfile: use only these hosts and slots, such as HOST@HOST:0,2
    #[arg(short, long, value_name = "FILTER", default_value = "", hide_default_value = true, requires = "hostfile", help_heading = HOSTS)]
    pub(crate) include: String,

    /// With --hostfile: use all hosts and slots except these
    #[arg(short, long, value_name = "FILTER", default_value = "", hide_default_value = true, requires = "hostfile", help_heading = HOSTS)]
    pub(crate) exclude: String,

    /// With --hostfile: use the first N hosts
    #[arg(long = "num_nodes", alias = "num-nodes", value_name = "N", requires = "hostfile", help_heading = HOSTS)]
    pub(crate) num_nodes: Option<usize>,

    /// With --hostfile: port for ssh
    #[arg(long = "ssh_port", alias = "ssh-port", value_name = "PORT", requires = "hostfile", help_heading = HOSTS)]
    pub(crate) ssh_port: Option<u16>,

    /// With --hostfile: use ssh even if there is only one host, and even for the local host
    #[arg(long = "force_multi", alias = "force-multi", requires = "hostfile", help_heading = HOSTS)]
    pub(crate) force_multi: bool,

    /// With --hostfile: launcher of the ranks, either zerorun on each host (over ssh) or mpirun on this host
    #[arg(long, value_enum, ignore_case = true, default_value = "ssh", requires = "hostfile", help_heading = HOSTS)]
    launcher: HostLauncherFlag,

    /// With --launcher openmpi or mpich: arguments for mpirun, separated by spaces, quoted as one argument
    #[arg(long = "launcher_args", alias = "launcher-args", value_name = "ARGS", allow_hyphen_values = true,
          requires = "hostfile", help_heading = HOSTS)]
    pub(crate) launcher_args: Option<String>,

    /// Without --hostfile: number of hosts on which something else starts zerorun; auto takes this number from mpirun,
    /// srun or jsrun. With FEWEST:N, a job restarted by --max_restarts may continue with as few as FEWEST
    /// hosts [also: $PET_NNODES]
    #[arg(long, value_name = "N", conflicts_with = "hostfile", help_heading = HOSTS)]
    pub(crate) nnodes: Option<String>,

    /// With --nnodes: this host's number, from 0 [default: from the launcher that started zerorun; see docs/cluster.md]
    #[arg(long = "node_rank", alias = "node-rank", value_name = "R", help_heading = HOSTS)]
    pub(crate) node_rank: Option<usize>,

    /// Address of host 0 [default: the first name in the hostfile; with --nnodes: $PET_RDZV_ENDPOINT, $PET_MASTER_ADDR
    /// or $MASTER_ADDR]
    #[arg(long = "master_addr", alias = "master-addr", value_name = "ADDRESS", help_heading = HOSTS)]
    pub(crate) master_addr: Option<String>,

    /// On host 0, if the others reach it at another address (NAT, a published container port): the local address to
    /// listen on, such as 0.0.0.0 [default: the address of --master_addr]
    #[arg(long = BIND_ADDR, alias = "bind-addr", value_name = "ADDRESS", help_heading = HOSTS)]
    pub(crate) bind_addr: Option<String>,

    /// With --max_restarts: minimum number of hosts to continue with when others fail [default: FEWEST of
    /// --nnodes, otherwise all]
    #[arg(long = "min_nodes", alias = "min-nodes", value_name = "M", help_heading = HOSTS)]
    pub(crate) min_nodes: Option<usize>,

    /// With --nnodes: read the secret from the first line of standard input, and end the job on this host when standard
    /// input ends
    #[arg(long = SECRET_FROM_STDIN, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

/// The launcher that starts the ranks on the hosts in a hostfile, with DeepSpeed's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum HostLauncherFlag {
    /// zerorun on each host, over ssh
    Ssh,
    /// Open MPI's mpirun
    Openmpi,
    /// MPICH's mpirun, or another that accepts its arguments
    Mpich,
}

impl HostFlags {
    /// Returns how the job is started. `own_ranks` is the number of ranks on each host, if the user gave it. With
    /// `--nnodes`, also fills in the port to which the hosts connect.
    pub(crate) fn job_hosts(
        &self,
        own_ranks: Option<usize>,
        master_port: &mut Option<u16>,
        variables: &LauncherVariables<'_>,
    ) -> Result<LaunchMode> {
        if let Some(file) = &self.hostfile {
            let selection = HostSelection {
                include: self.include.clone(),
                exclude: self.exclude.clone(),
                num_nodes: self.num_nodes,
                num_gpus: own_ranks,
            };
            let kind = match self.launcher {
                HostLauncherFlag::Ssh => None,
                HostLauncherFlag::Openmpi => Some(MpirunFlavor::OpenMpi),
                HostLauncherFlag::Mpich => Some(MpirunFlavor::Mpich),
            };
            let words = self.launcher_args.as_deref().unwrap_or_default().split_whitespace();
            let args: Vec<String> = words.map(String::from).collect();
            return Ok(LaunchMode::Hostfile(MultiHostOptions {
                file: file.clone(),
                selection,
                min_nodes: self.min_nodes,
                master_addr: self.master_addr.clone(),
                bind_addr: self.bind_addr.clone(),
                ssh_port: self.ssh_port,
                force_multi: self.force_multi,
                mpirun: kind.map(|kind| MpirunOptions { kind, args }),
            }));
        }
        let Some(text) = &self.nnodes else { return Ok(LaunchMode::OneHost) };
        let range = match text.trim() {
            "auto" => None,
            _ => Some(hosts(text).ok_or_else(|| HostsError::BadNodes { text: text.clone() })?),
        };
        let may_run_alone = !self.until_stdin_ends;
        if may_run_alone && range.is_some_and(|(_, nodes)| nodes == 1) {
            return Ok(LaunchMode::OneHost);
        }
        let (node, nodes) = variables.node(self.node_rank, range.map(|(_, nodes)| nodes))?;
        if may_run_alone && nodes == 1 {
            return Ok(LaunchMode::OneHost);
        }
        let (master_addr, port) = variables.first_host(self.master_addr.clone(), *master_port, nodes)?;
        *master_port = Some(port);
        let fewest = range.map_or(nodes, |(fewest, _)| fewest);
        let min_nodes = self.min_nodes.unwrap_or(fewest).min(nodes);
        let (bind_addr, until_stdin_ends) = (self.bind_addr.clone(), self.until_stdin_ends);
        let options = NodeOptions { nodes, min_nodes, node, master_addr, bind_addr, until_stdin_ends };
        Ok(LaunchMode::PerHostLaunchers(options))
    }

    /// Returns the conflict of `--launcher` with the other options, if any. `zerorun_only` lists the command line's
    /// options that have an effect only on ranks that `zerorun` itself starts, and whether each is set.
    pub(crate) fn launcher_conflict(&self, zerorun_only: &[(&str, bool)]) -> Option<String> {
        let Some(name) = self.launcher.to_possible_value().filter(|_| self.launcher != HostLauncherFlag::Ssh) else {
            return self.launcher_args.as_ref().map(|_| {
                "--launcher_args is for mpirun; give --launcher openmpi or --launcher mpich, or leave --launcher_args out"
                    .to_string()
            });
        };
        let ssh_only = [
            ("--min_nodes", self.min_nodes.is_some()),
            ("--ssh_port", self.ssh_port.is_some()),
            ("--force_multi", self.force_multi),
            ("--bind_addr", self.bind_addr.is_some()),
        ];
        zerorun_only.iter().chain(&ssh_only).find(|(_, is_given)| *is_given).map(|(option, _)| {
            format!(
                "{option} is for ranks that zerorun starts, but with --launcher {}, mpirun starts them; leave {option} out, pass \
                 mpirun's equivalent in --launcher_args, or use --launcher ssh",
                name.get_name()
            )
        })
    }

    /// Returns the conflict of `--min_nodes` with the other options, if any.
    pub(crate) fn min_nodes_conflict(&self, max_restarts: u32) -> Option<String> {
        let fewest = self.min_nodes?;
        if self.hostfile.is_none() && self.nnodes.is_none() {
            return Some(format!(
                "--min_nodes {fewest} is the minimum number of hosts after a restart, but this job has one host; give \
                 --hostfile or --nnodes, or leave --min_nodes out"
            ));
        }
        if fewest == 0 {
            return Some(
                "--min_nodes 0 is the minimum number of hosts after a restart, but a job needs at least one host; give \
                 a --min_nodes of at least 1, or leave --min_nodes out"
                    .to_string(),
            );
        }
        (max_restarts == 0).then(|| {
            format!(
                "--min_nodes {fewest} is the minimum number of hosts after a restart, but restarts are off; give a \
                 --max_restarts of at least 1, or leave --min_nodes out"
            )
        })
    }
}

/// Parses the minimum and the maximum number of hosts from `N` or `FEWEST:N`.
fn hosts(text: &str) -> Option<(usize, usize)> {
    let (fewest, most) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number > 0);
    number(fewest).zip(number(most)).filter(|(fewest, most)| fewest <= most && *most <= MAX_NODES)
}

/// Returns the words of a command line without the options that may differ from host to host: those under the heading
/// [`HOSTS`], and the option `also`. `command` defines the command line.
pub(crate) fn without_host_flags(words: Vec<OsString>, command: &clap::Command, also: &str) -> Vec<OsString> {
    let options = command.get_arguments().filter(|arg| arg.get_help_heading() == Some(HOSTS) || arg.get_id() == also);
    let options: Vec<&clap::Arg> = options.collect();
    let option_named = |name: &str| {
        options.iter().find(|arg| {
            let long = name.strip_prefix("--");
            let longs = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
            long.is_some_and(|long| longs.into_iter().any(|alias| alias == long))
                || arg.get_short().is_some_and(|short| name.strip_prefix('-') == Some(short.to_string().as_str()))
        })
    };
    let (mut remaining, mut words) = (Vec::new(), words.into_iter());
    while let Some(word) = words.next() {
        if word == "--" {
            remaining.push(word);
            break;
        }
        let text = word.to_string_lossy().into_owned();
        let (name, value) = text.split_once('=').map_or((text.as_str(), None), |(name, value)| (name, Some(value)));
        // A short option joined with its value, such as `-n2`.
        let joined = text.strip_prefix('-').filter(|rest| !rest.starts_with('-') && rest.chars().count() > 1);
        let joined = joined.and_then(|rest| option_named(&format!("-{}", rest.chars().next()?)));
        match option_named(name) {
            Some(option) if value.is_none() && option.get_action().takes_values() => _ = words.next(),
            Some(_) => {}
            None if joined.is_some() => {}
            None => remaining.push(word),
        }
    }
    remaining.extend(words);
    remaining
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Arguments {
        #[arg(short = 'n', long = "num_ranks", visible_alias = "num_gpus")]
        _ranks: u16,
        #[command(flatten)]
        _hosts: HostFlags,
        #[arg(long, num_args = 1..)]
        _data: Vec<String>,
    }

    #[test]
    fn options_that_differ_from_host_to_host_are_left_out_in_every_spelling() {
        let command = Arguments::command();
        let without = |words: &str| {
            let words = words.split(' ').map(OsString::from).collect();
            let without = without_host_flags(words, &command, "_ranks");
            without.join(OsString::from(" ").as_os_str()).to_string_lossy().into_owned()
        };
        assert_eq!(without("a --nnodes 2 --node_rank=1 --node-rank 1 --data x y -n 2 --out o"), "a --data x y --out o");
        assert_eq!(without("a -n2 -n=2 --num_gpus 3 -H hosts --force_multi b"), "a b");
        assert_eq!(without("--prompt hi -- --nnodes 2"), "--prompt hi -- --nnodes 2");
        assert_eq!(without("--noise 2 -x3"), "--noise 2 -x3");
    }
}
