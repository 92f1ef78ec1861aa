//! `--launcher openmpi` and `--launcher mpich`: `mpirun` starts the ranks on the hosts in a hostfile, in place of
//! zerorun's own launchers.
//!
//! This process becomes `mpirun` ([`mpirun_args`] returns its arguments), whose exit code is the job's. This mode
//! supports hosts that have only Open MPI: `zerorun` itself uses MPICH's protocol to connect ranks.

use super::exported_variables::exports;
use super::hosts::error::HostsError;
use super::hosts::world_info::{DEVICES, WorldInfo};
use super::local_job_spec::{KEEP_MEMORY, LocalJobSpec};
use super::nodes::DEFAULT_PORT;
use crate::error::{Error, LaunchError, Result};
use candle_zero::comm::rank_env::TIMEOUT_MS;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The name of the program, which is the same for both kinds.
const MPIRUN: &str = "mpirun";

/// The MPI library that an `mpirun` belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MpirunFlavor {
    /// Open MPI.
    OpenMpi,
    /// MPICH, or another library whose mpirun accepts MPICH's arguments.
    Mpich,
}

/// The settings for starting ranks with `mpirun`.
#[derive(Debug, Clone)]
pub(crate) struct MpirunOptions {
    pub(crate) kind: MpirunFlavor,
    /// The user's arguments for `mpirun`.
    pub(crate) args: Vec<String>,
}

impl MpirunFlavor {
    /// Returns the name in `--launcher`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
        }
    }

    /// Returns whether a version text is that of this kind of `mpirun`.
    fn recognizes(self, version: &str) -> bool {
        match self {
            Self::OpenMpi => version.contains("Open MPI") || version.contains("OpenRTE"),
            // This includes Intel MPI.
            Self::Mpich => ["HYDRA", "Intel(R) MPI"].iter().any(|words| version.contains(words)),
        }
    }

    /// Checks the `mpirun` on the PATH.
    fn check(self) -> Result<()> {
        let launcher = self.name();
        let refused = |why: String| Error::from(HostsError::NoMpirun { launcher, why });
        let output = Command::new(MPIRUN).arg("--version").output().map_err(|source| refused(source.to_string()))?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let first_line = version.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
        let mismatch = || refused(format!("the one on the PATH identifies itself as: {first_line}"));
        if self.recognizes(&version) { Ok(()) } else { Err(mismatch()) }
    }
}

/// Becomes `mpirun`. Returns only on failure.
///
/// # Errors
/// Fails if there is no `mpirun` of this kind, the working directory cannot be found, the hosts need different values
/// of `CUDA_VISIBLE_DEVICES`, or a variable or a word cannot be passed on.
pub(crate) fn become_mpirun(
    job: &LocalJobSpec,
    mpirun: &MpirunOptions,
    world: &WorldInfo,
    master_addr: Option<&str>,
) -> Result<u8> {
    mpirun.kind.check()?;
    let folder = std::env::current_dir()
        .map_err(|source| LaunchError::Setup { what: "finding the working directory", source })?;
    let mut variables = exports()?;
    variables.retain(|(name, _)| name != DEVICES);
    variables.extend(devices(world, mpirun.kind)?.map(|devices| (DEVICES.to_string(), devices)));
    variables.push(("MASTER_ADDR".into(), master_addr.unwrap_or(&world.hosts()[0].name).into()));
    variables.push(("MASTER_PORT".into(), job.master_port.unwrap_or(DEFAULT_PORT).to_string()));
    variables.extend(job.timeout.map(|timeout| (TIMEOUT_MS.to_string(), timeout.as_millis().to_string())));
    for (name, value) in job.run.given() {
        let text = value.into_string();
        let text = text.map_err(|word| HostsError::WordNotUtf8 { word: word.to_string_lossy().into_owned() })?;
        variables.retain(|(other, _)| other != name);
        variables.push((name.into(), text));
    }
    let (name, value) = KEEP_MEMORY;
    if cfg!(target_env = "gnu") && std::env::var_os(name).is_none() {
        variables.push((name.into(), value.into()));
    }
    let program = [OsString::from(&job.program)];
    let words = mpirun_args(mpirun, world, folder, &variables);
    let why = Command::new(MPIRUN).args(words).args(program).args(&job.args).exec();
    Err(HostsError::NoMpirun { launcher: mpirun.kind.name(), why: why.to_string() }.into())
}

/// Returns the arguments, up to the program.
fn mpirun_args(
    mpirun: &MpirunOptions,
    world: &WorldInfo,
    folder: PathBuf,
    variables: &[(String, String)],
) -> Vec<OsString> {
    let hosts = world.hosts().iter().map(|host| format!("{}:{}", host.name, host.slots.len()));
    let hosts = hosts.collect::<Vec<_>>().join(",");
    let mut words: Vec<OsString> = vec!["-n".into(), world.size().to_string().into()];
    let mut add = |arguments: &[&str]| words.extend(arguments.iter().map(OsString::from));
    match mpirun.kind {
        MpirunFlavor::OpenMpi => {
            add(&["--host", &hosts]);
            // Mapping by slot makes the ranks of a host consecutive.
            if !mpirun.args.iter().any(|word| word == "--map-by" || word == "-map-by") {
                add(&["--map-by", "slot"]);
            }
            add(&["--wdir"]);
        }
        MpirunFlavor::Mpich => add(&["-hosts", &hosts, "-wdir"]),
    }
    words.push(folder.into());
    words.extend(mpirun.args.iter().map(OsString::from));
    for (name, value) in variables {
        match mpirun.kind {
            MpirunFlavor::OpenMpi => words.extend(["-x".into(), format!("{name}={value}").into()]),
            MpirunFlavor::Mpich => words.extend(["-genv".into(), name.into(), value.into()]),
        }
    }
    words
}

/// Returns the value of `CUDA_VISIBLE_DEVICES`, which `mpirun` passes to all hosts, or `None` if ranks use the right
/// GPUs without it.
fn devices(world: &WorldInfo, kind: MpirunFlavor) -> Result<Option<String>, HostsError> {
    let hosts = world.hosts();
    let Some(node) = (1..hosts.len()).find(|node| hosts[*node].slots != hosts[0].slots) else {
        return Ok(Some(world.devices(0)));
    };
    // The slots of every host are numbered from 0 without gaps, so ranks use the right GPUs without the variable.
    if hosts.iter().all(|host| host.slots.iter().copied().eq(0..host.slots.len())) {
        return Ok(None);
    }
    let (host, other) = (&hosts[0].name, &hosts[node].name);
    let (first, later) = (world.devices(0), world.devices(node));
    let slots = format!("host `{host}` would use slots {first} and host `{other}` slots {later}");
    Err(HostsError::DevicesDiffer { launcher: kind.name(), slots })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::hosts::HostSlots;
    use super::*;

    fn line(kind: MpirunFlavor, args: &str) -> String {
        let world = WorldInfo::new(vec![HostSlots::with_slots("a", 2), HostSlots::with_slots("b", 1)]).unwrap();
        let args = args.split_whitespace().map(String::from).collect();
        let variables =
            [("NCCL_DEBUG".to_string(), "INFO".to_string()), ("UCX_TLS".to_string(), "tcp self".to_string())];
        let words = mpirun_args(&MpirunOptions { kind, args }, &world, "/data/my runs".into(), &variables);
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn mpirun_gets_hosts_with_their_slots_the_folder_the_variables_and_the_users_arguments() {
        insta::assert_snapshot!(line(MpirunFlavor::OpenMpi, "--bind-to none"), @"-n|3|--host|a:2,b:1|--map-by|slot|--wdir|/data/my runs|--bind-to|none|-x|NCCL_DEBUG=INFO|-x|UCX_TLS=tcp self");
        insta::assert_snapshot!(line(MpirunFlavor::OpenMpi, "--map-by node"), @"-n|3|--host|a:2,b:1|--wdir|/data/my runs|--map-by|node|-x|NCCL_DEBUG=INFO|-x|UCX_TLS=tcp self");
        insta::assert_snapshot!(line(MpirunFlavor::Mpich, "-iface eth0"), @"-n|3|-hosts|a:2,b:1|-wdir|/data/my runs|-iface|eth0|-genv|NCCL_DEBUG|INFO|-genv|UCX_TLS|tcp self");
    }

    #[test]
    fn gpus_are_the_slots_where_all_hosts_have_the_same() {
        let of = |slots: [&[usize]; 2]| {
            let [a, b] = slots.map(|slots| slots.to_vec());
            let world = WorldInfo::new(vec![
                HostSlots { name: "a".into(), slots: a },
                HostSlots { name: "b".into(), slots: b },
            ])
            .unwrap();
            devices(&world, MpirunFlavor::OpenMpi)
        };
        assert_eq!(of([&[1, 3], &[1, 3]]).unwrap().as_deref(), Some("1,3"));
        assert_eq!(of([&[0, 1], &[0]]).unwrap(), None);
        insta::assert_snapshot!(of([&[0, 1], &[2, 3]]).unwrap_err(), @"host `a` would use slots 0,1 and host `b` slots 2,3, but with --launcher openmpi all hosts get the same CUDA_VISIBLE_DEVICES; choose the same slots on each, or use --launcher ssh");
    }

    #[test]
    fn an_mpirun_is_known_by_what_it_says_of_its_version() {
        assert!(
            MpirunFlavor::OpenMpi.recognizes("mpirun (Open MPI) 5.0.11")
                && !MpirunFlavor::Mpich.recognizes("mpirun (Open MPI) 5.0.11")
        );
        assert!(
            MpirunFlavor::Mpich.recognizes("HYDRA build details:\n    Version: 5.0.2")
                && !MpirunFlavor::OpenMpi.recognizes("HYDRA build details:")
        );
    }
}
