//! The start of trials, on this host and on others.

use super::folder::SweepFolder;
use super::host_request::{HostRequest, TrainRequest};
use super::remote_trial::RemoteTrialLauncher;
use super::trial_command::{CommandTemplate, TrialPaths};
use super::trial_launch::launch;
use super::trial_process::{TrialProcess, TrialStartOutcome};
use super::trial_results::TrialResultReader;
use crate::error::{Error, Result};
use crate::launch::remote_shell::as_text;
use crate::tools::trial_subprocess::write_atomically;
use candle_zero::checkpoint::list_checkpoints;
use candle_zero::files::AtomicFolder;
use candle_zero::sweep::{SweepJob, SweepTrial};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The maximum time to wait until a checkpoint written by another host becomes visible on this host. Network file
/// systems cache directory listings, by default for up to 60 seconds.
const MAX_CACHE_AGE: Duration = Duration::from_secs(90);
/// The interval at which this host looks for that checkpoint.
const CACHE_INTERVAL: Duration = Duration::from_millis(500);

/// The settings for starting trials.
#[derive(Debug)]
pub(super) struct TrialStarter {
    /// The executable of `zerorun`.
    pub(super) launcher: PathBuf,
    pub(super) template: CommandTemplate,
    pub(super) results: TrialResultReader,
    /// The directory in which trials run.
    pub(super) directory: PathBuf,
    /// The number of threads of a rank; `None` if the user's variables set it.
    pub(super) threads: Option<usize>,
    /// The launcher of trials on other hosts.
    pub(super) hosts: RemoteTrialLauncher,
}

impl TrialStarter {
    /// Returns the files and folders of a trial.
    pub(super) fn paths(&self, trial: &SweepTrial) -> TrialPaths {
        let folder = self.results.folder.trial(trial.number);
        TrialPaths {
            ds_config: folder.join("ds_config.json"),
            record: Some((self.results.folder.runs(), SweepFolder::run_name(trial.number))),
            is_branch: trial.branch.is_some(),
            folder,
        }
    }

    /// Writes what a trial needs before its first job: its configuration, and the checkpoint that it branches from.
    /// Existing files are left unchanged.
    pub(super) fn prepare(&self, trial: &SweepTrial) -> Result<()> {
        let paths = self.paths(trial);
        create(&paths.folder)?;
        if let Some(config) = self.template.configuration_of(&trial.parameters)
            && !paths.ds_config.exists()
        {
            write_atomically(&paths.ds_config, &format!("{config:#}\n"))?;
        }
        let checkpoints = self.results.checkpoints(trial.number);
        let Some(branch) = trial.branch.filter(|_| !checkpoints.exists()) else { return Ok(()) };
        let donor = self.results.checkpoints(branch.trial);
        let at_step = |tag: &(String, Result<candle_zero::checkpoint::Manifest>)| {
            tag.1.as_ref().is_ok_and(|manifest| manifest.global_steps == branch.step)
        };
        let begin = Instant::now();
        let tag = loop {
            match list_checkpoints(&donor).tags.into_iter().find(at_step) {
                None if self.hosts.are_used() && begin.elapsed() < MAX_CACHE_AGE => std::thread::sleep(CACHE_INTERVAL),
                found => break found.map(|(tag, _)| tag),
            }
        };
        let Some(tag) = tag else {
            let text = format!("trial {} has no checkpoint of step {} there", branch.trial, branch.step);
            let source = std::io::Error::new(std::io::ErrorKind::NotFound, text);
            return Err(Error::Io { action: "branch from", path: donor, source });
        };
        let copy = || -> std::io::Result<()> {
            let new = AtomicFolder::create_for(&checkpoints)?;
            copy_folder(&donor.join(&tag), &new.path().join(&tag))?;
            let latest = new.path().join("latest");
            std::fs::write(&latest, &tag)?;
            File::open(&latest)?.sync_all()?;
            new.finish()
        };
        copy().map_err(|source| Error::Io { action: "copy a checkpoint to", path: checkpoints.clone(), source })
    }

    /// Starts a job. `host` is the name of another host, or `None` for this host, and `devices` are the slots that the
    /// job uses, if there is a hostfile.
    pub(super) fn start(
        &self,
        trial: &SweepTrial,
        job: &SweepJob,
        host: Option<&str>,
        devices: Option<&str>,
    ) -> Result<TrialStartOutcome> {
        let words = self.template.words_of(&trial.parameters, &self.paths(trial));
        if let Some(host) = host {
            let words = words.iter().map(|word| as_text(word)).collect::<Result<_>>()?;
            let request = TrainRequest {
                folder: as_text(self.results.folder.path().as_os_str())?,
                trial: job.trial,
                from: job.from,
                to: job.to,
                metric: self.results.metric.clone(),
                steps: self.results.steps,
                threads: self.threads,
                devices: devices.map(str::to_owned),
                words,
            };
            let output = self.results.folder.trial(job.trial).join(format!("host-{}.txt", job.to));
            return Ok(match self.hosts.start(host, &HostRequest::Train(request), &output)? {
                Ok(remote) => TrialStartOutcome::Started(TrialProcess::There(remote)),
                Err(why) => TrialStartOutcome::Unreachable(why),
            });
        }
        let mut command = Command::new(&self.launcher);
        command.args(words).current_dir(&self.directory);
        Ok(match launch(command, &self.results, job, self.threads, devices)? {
            Some(child) => TrialStartOutcome::Started(TrialProcess::Here(child)),
            None => TrialStartOutcome::Busy,
        })
    }
}

fn create(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { action: "create", path: folder.to_owned(), source })
}

/// Copies a folder with everything in it, and syncs the copies.
fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    candle_zero::files::sync_folder(to)
}
