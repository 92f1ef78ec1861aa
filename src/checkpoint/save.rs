//! Saving: every rank writes its shards at the same time, then rank 0 makes a checkpoint of them.
//!
//! ```text
//!   in the foreground   begin | write share | agree, publish
//!   in the background   begin | write share ............ | agree, publish
//!                             | forward, backward (state does not change) | step
//! ```
//!
//! A save in the background takes no snapshot: master weights and optimizer states change only in a step, and the next
//! step that changes them waits until the files are written.

use super::folder;
use super::layout::{Layout, WEIGHTS};
use super::manifest::{FORMAT, FileEntry, Manifest, Parameter, VERSION, file_name};
use super::rank_file::RankWriter;
use crate::config::TagValidation;
use crate::engine::Engine;
use crate::error::{CheckpointError, Result, without_backtrace};
use crate::monitor::say;
use crate::optim::Trainer;
use crate::param::fnv1a;
use crate::timeline;
use crate::zero::core::Core;
use crate::zero::share::{self, State};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a checkpoint is saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// Whether `latest` names it then (DeepSpeed's `save_latest`). Default true.
    pub save_latest: bool,
    /// Training goes on while it is written. Default false.
    pub in_background: bool,
    /// How many checkpoints stay in the folder, the newest by their steps; older ones are removed. Default all.
    pub keep: Option<usize>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { save_latest: true, in_background: false, keep: None }
    }
}

/// A save that is not over.
pub(crate) struct Saving {
    dir: PathBuf,
    manifest: Manifest,
    options: SaveOptions,
    /// Rank 0 says how fast it was.
    shows_statistics: bool,
    writing: Writing,
    /// Rank 0's hold on the folder.
    lock: Option<File>,
}

enum Writing {
    Done(Result<Written>),
    Thread(JoinHandle<Result<Written>>),
}

/// A rank's file, and how long the rank wrote.
type Written = (FileEntry, Duration);

impl<M> Engine<M> {
    /// Saves all state of the training run as checkpoint `tag` of the folder `dir`, and lets `latest` name it; in the
    /// background where `checkpoint.writer.decoupled` asks for it. Without a tag it is `global_stepN`. Collective: every
    /// rank calls it, with the same arguments; `client_state` is rank 0's. Where the tags differ after all,
    /// `checkpoint.tag_validation` says what happens. Gives the folder of the checkpoint.
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`](crate::error::EngineError::OutOfOrder) between micro steps of an accumulation; a
    /// file cannot be written: on all ranks, the engine can go on and earlier checkpoints are untouched; the error of
    /// an earlier save in the background; a failed collective.
    pub fn save_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: Value,
    ) -> Result<PathBuf> {
        let options = SaveOptions { in_background: self.config().saves_in_background, ..SaveOptions::default() };
        self.save_checkpoint_with(dir, tag, client_state, &options)
    }

    /// The same with options. A save in the background ends in the next [`step`](Self::step) that changes weights, in
    /// [`wait_for_checkpoint`](Self::wait_for_checkpoint), or when the engine is dropped.
    ///
    /// # Errors
    /// As [`save_checkpoint`](Self::save_checkpoint). A save in the background that fails says so where it ends.
    pub fn save_checkpoint_with(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: Value,
        options: &SaveOptions,
    ) -> Result<PathBuf> {
        self.wait_for_checkpoint()?;
        self.between_steps("save_checkpoint")?;
        let dir = dir.as_ref().to_owned();
        let mut manifest = self.manifest(tag, client_state);
        let options = options.clone();
        let validation = self.config().tag_validation;
        let _here = timeline::enter(self.recorder());
        let _span = timeline::span(timeline::Kind::Checkpoint, "save").of(|| manifest.tag.clone());
        let lock;
        (manifest.tag, lock) = self.attempt(|engine| engine.core().begin_save(&dir, &manifest.tag, validation))??;
        let path = dir.join(&manifest.tag);
        let share = Share::new(self.core().clone(), folder::saving(&dir, &manifest.tag), &manifest, self.trainer());
        let writing = match options.in_background {
            false => Writing::Done(share.write()),
            true => match std::thread::Builder::new().name("checkpoint".into()).spawn({
                let (share, carried) = (share.clone(), timeline::carry());
                move || {
                    let _here = carried.enter(timeline::Lane::Checkpoint);
                    share.write()
                }
            }) {
                Ok(thread) => Writing::Thread(thread),
                // Without a thread it is written now.
                Err(_) => Writing::Done(share.write()),
            },
        };
        let in_background = options.in_background;
        let shows_statistics = self.config().shows_save_statistics;
        *self.saving() = Some(Saving { dir, manifest, options, shows_statistics, writing, lock });
        if !in_background {
            self.wait_for_checkpoint()?;
        }
        Ok(path)
    }

    /// Ends a save in the background, if there is one. Collective.
    ///
    /// # Errors
    /// What the save could not do: the checkpoints before it are untouched, and the engine can go on.
    pub fn wait_for_checkpoint(&mut self) -> Result<()> {
        match self.saving().take() {
            Some(saving) => self.attempt(|engine| engine.core().end_save(saving))?,
            None => Ok(()),
        }
    }

    /// The manifest of the engine's state now, without files.
    fn manifest(&self, tag: Option<&str>, client_state: Value) -> Manifest {
        let core = self.core();
        let state = self.progress();
        let all = self.trainer().all_state_names();
        let states = std::iter::once(WEIGHTS).chain(all.iter().copied());
        let parameters = core.params.iter().map(|p| {
            let own = self.trainer().state_names(p.group);
            let states = std::iter::once(WEIGHTS).chain(own.iter().copied()).map(str::to_owned);
            let states = (own.len() < all.len()).then(|| states.collect());
            Parameter { name: p.name.clone(), shape: p.shape.dims().to_vec(), states }
        });
        let config = self.config().to_deepspeed_json();
        Manifest {
            format: FORMAT.into(),
            version: VERSION,
            tag: tag.map_or_else(|| format!("global_step{}", state.global_steps), str::to_owned),
            world_size: self.world_size(),
            stage: self.config().zero.stage as u8,
            dtype: format!("{:?}", self.dtype()).to_lowercase(),
            global_steps: state.global_steps,
            skipped_steps: state.skipped_steps,
            global_samples: state.global_samples,
            scaler: state.scaler,
            optimizer_steps: state.optimizer_steps,
            last_batch_iteration: state.last_batch_iteration,
            optimizer: self.trainer().name().map(str::to_owned),
            states: states.map(str::to_owned).collect(),
            parameters: parameters.collect(),
            files: vec![],
            config,
            client_state,
        }
    }
}

/// What a rank writes.
#[derive(Clone)]
struct Share {
    core: Arc<Core>,
    folder: PathBuf,
    layout: Layout,
    states: Vec<String>,
    /// The states that the optimizer has of each parameter.
    moments: Vec<&'static [&'static str]>,
}

impl Share {
    fn new(core: Arc<Core>, folder: PathBuf, manifest: &Manifest, trainer: &Trainer) -> Self {
        let moments = core.params.iter().map(|p| trainer.state_names(p.group)).collect();
        Self { core, folder, layout: manifest.layout(), states: manifest.states.clone(), moments }
    }

    fn write(&self) -> Result<Written> {
        let _span = timeline::span(timeline::Kind::Checkpoint, "write share");
        let start = Instant::now();
        let wrong = |source| folder::not_written(&self.folder, &source);
        let rank = self.core.comm.rank();
        let names: Vec<&str> = self.core.params.iter().map(|p| p.name.as_str()).collect();
        let mut file = RankWriter::create(&self.folder, &self.layout, &names, &self.states, rank).map_err(wrong)?;
        for (state, name) in self.states.iter().enumerate() {
            for param in 0..names.len() {
                let Some(kind) = State::of(name, self.moments[param]) else { continue };
                for piece in share::pieces(&self.layout.shard(state, param, rank)) {
                    file.make_room(piece.len()).map_err(wrong)?;
                    self.core.read_state(kind, param, piece, |values| file.append(values))?;
                }
            }
        }
        Ok((file.finish().map_err(wrong)?, start.elapsed()))
    }
}

impl Core {
    /// Begins a checkpoint, and gives the tag that all ranks save under, and rank 0's hold on the folder. The outer error
    /// is one of communication; the inner one leaves the ranks in step.
    fn begin_save(&self, dir: &Path, tag: &str, validation: TagValidation) -> Result<Result<(String, Option<File>)>> {
        if let Err(error) = self.agree(folder::check_tag(dir, tag), dir)? {
            return Ok(Err(error));
        }
        if let Err(error) = self.same_on_all_ranks("folders", &dir.to_string_lossy(), dir)? {
            return Ok(Err(error));
        }
        let tag = match (self.same_on_all_ranks("tags", tag, dir)?, validation) {
            (Ok(()), _) => tag.to_owned(),
            (Err(error), TagValidation::Fail) => return Ok(Err(error)),
            (Err(_), _) => {
                let common = self.tag_of_rank_0(tag)?;
                if self.comm.rank() == 0 && validation == TagValidation::Warn {
                    say(&format!("warning: ranks save under different tags; all take rank 0's, {common}"));
                }
                common
            }
        };
        let begun = match self.comm.rank() {
            0 => folder::begin(dir, &tag).map(Some),
            _ => Ok(None),
        };
        Ok(self.agree(begun, dir)?.map(|lock| (tag, lock)))
    }

    /// Rank 0's tag, where they differ: a checkpoint of several would be none.
    fn tag_of_rank_0(&self, own: &str) -> Result<String> {
        let mut bytes = own.as_bytes().to_vec();
        // As long on all ranks; a tag has no such byte.
        bytes.resize(folder::MAX_TAG, 0);
        let all = self.comm.gather_f64(bytes.into_iter().map(f64::from).collect()).wait()?;
        let bytes: Vec<u8> = all[0].iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into())
    }

    pub(crate) fn end_save(&self, saving: Saving) -> Result<Result<()>> {
        let _span = timeline::span(timeline::Kind::Checkpoint, "end save").of(|| saving.manifest.tag.clone());
        let Saving { dir, mut manifest, options, shows_statistics, writing, lock: _lock } = saving;
        let written = match writing {
            Writing::Done(result) => result,
            Writing::Thread(thread) => thread.join().unwrap_or_else(|_| {
                let problem = "the thread that wrote it panicked; its own words say why".into();
                Err(CheckpointError::Unusable { path: dir.clone(), problem }.into())
            }),
        };
        let seconds;
        (manifest.files, seconds) = match self.agree(written, &dir)? {
            Ok(own) => self.gather_entries(own)?,
            Err(error) => {
                if self.comm.rank() == 0 {
                    folder::give_up(&dir, &manifest.tag);
                }
                return Ok(Err(error));
            }
        };
        let published = match self.comm.rank() {
            0 => self.publish(&dir, &manifest, &options),
            _ => Ok(()),
        };
        if let (0, true, Ok(())) = (self.comm.rank(), shows_statistics, &published) {
            let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
            let rate = bytes as f64 / seconds.max(1e-9) / 1e6;
            say(&format!("checkpoint {}: {bytes} bytes written in {seconds:.3} s, {rate:.0} MB/s", manifest.tag));
        }
        self.agree(published, &dir)
    }

    fn publish(&self, dir: &Path, manifest: &Manifest, options: &SaveOptions) -> Result<()> {
        let published = folder::publish(dir, manifest, options.save_latest);
        published.inspect_err(|_| folder::give_up(dir, &manifest.tag))?;
        if let Some(keep) = options.keep
            && let Err(error) = folder::keep_newest(dir, keep.max(1), &manifest.tag)
        {
            // The checkpoint is saved all the same.
            say(&format!("warning: {error}. They stay; checkpoint {} is saved", manifest.tag));
        }
        Ok(())
    }

    /// The files of all ranks, and the seconds that the slowest wrote.
    fn gather_entries(&self, (own, time): Written) -> Result<(Vec<FileEntry>, f64)> {
        // Exact in f64: lengths below 2^53, and checksums in halves.
        let sum = u64::from_str_radix(&own.header_checksum, 16).unwrap_or_else(|e| unreachable!("hexadecimal: {e}"));
        let mut told = [own.bytes, own.header_bytes, sum >> 32, sum & 0xffff_ffff].map(|n| n as f64).to_vec();
        told.push(time.as_secs_f64());
        let all = self.comm.gather_f64(told).wait()?;
        let seconds = all.iter().map(|rank| rank[4]).fold(0.0, f64::max);
        let entry = |(rank, n): (usize, Vec<f64>)| FileEntry {
            name: file_name(rank, self.comm.size()),
            bytes: n[0] as u64,
            header_bytes: n[1] as u64,
            header_checksum: format!("{:016x}", (n[2] as u64) << 32 | n[3] as u64),
        };
        Ok((all.into_iter().enumerate().map(entry).collect(), seconds))
    }

    /// Whether all ranks succeeded. Who did learns that another did not.
    pub(super) fn agree<T>(&self, result: Result<T>, path: &Path) -> Result<Result<T>> {
        let failed = self.comm.gather_f64(vec![f64::from(u8::from(result.is_err()))]).wait()?;
        let first = failed.iter().position(|flag| flag[0] != 0.0);
        Ok(match (result, first) {
            (Ok(_), Some(rank)) => {
                let problem = format!("rank {rank} failed; see its error for the cause");
                Err(CheckpointError::Unusable { path: path.to_owned(), problem }.into())
            }
            (result, _) => result,
        })
    }

    /// Whether `word`, one of `what`, is the same on all ranks.
    pub(super) fn same_on_all_ranks(&self, what: &str, word: &str, path: &Path) -> Result<Result<()>> {
        let hash = fnv1a(word.as_bytes());
        let all = self.comm.gather_f64(vec![(hash >> 32) as f64, (hash & 0xffff_ffff) as f64]).wait()?;
        Ok(match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let word = without_backtrace(word);
                let problem = format!(
                    "rank {rank} and rank 0 name different {what}; this rank names {word}; give all ranks the same"
                );
                Err(CheckpointError::Unusable { path: path.to_owned(), problem }.into())
            }
        })
    }
}
