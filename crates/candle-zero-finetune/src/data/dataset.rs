//! The samples of data files, which are tokenized once and then mapped into memory.

use super::class_labels::labels_of;
use super::data_options::{DataOptions, TrainingTask};
use super::data_report::DataReport;
use super::sample_cache::{SampleCache, SampleRef, private_cache};
use super::sample_cache_builder::SampleCacheBuilder;
use super::source::Source;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::util::{mix, permute};
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The progress of reading a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileReadProgress {
    /// The index of the file, counted from 0.
    pub file: usize,
    /// The number of bytes of records read so far.
    pub bytes: u64,
    /// The size of the file in bytes.
    pub total_bytes: u64,
}

/// The samples of several files, each repeated according to its file's weight.
#[derive(Debug, Clone)]
pub struct Dataset {
    parts: Vec<FileSamples>,
    /// The number of samples that belong together.
    group: usize,
    labels: Vec<String>,
}

/// A file's samples, or some of them.
#[derive(Debug, Clone)]
struct FileSamples {
    cache: Arc<SampleCache>,
    path: PathBuf,
    report: Arc<DataReport>,
    weight: f64,
    /// The number of groups in the file.
    groups: u64,
    /// The included groups: `first..end` in the order derived from `key`, or in the file's order.
    first: u64,
    end: u64,
    key: Option<u64>,
}

impl Dataset {
    /// Reads `sources`, or maps samples from `folder` that were built from the same files, tokenizer, template and
    /// options. If several processes need the samples of a file at the same time, one builds them, and the others wait.
    ///
    /// `progress` is called regularly with the progress of a file.
    ///
    /// # Errors
    /// [`FinetuneError::NoSamples`] for a file without a sample; [`FinetuneError::Record`] for a record that
    /// cannot be used, if the options are strict; errors of [`labels_of`] for classification without given labels;
    /// errors of files and formats.
    ///
    /// # Panics
    ///
    /// Panics if `options.ctx` is below 2.
    pub fn prepare(
        sources: &[Source],
        tokenizer: &Tokenizer,
        template: Option<&Template>,
        options: &DataOptions,
        folder: &Path,
        progress: &mut dyn FnMut(FileReadProgress),
    ) -> Result<Self> {
        assert!(options.ctx > 1, "ctx must be at least 2: one token, and another to predict from it");
        private_cache(folder).map_err(|source| Error::Io { action: "create", path: folder.into(), source })?;
        let mut options = options.clone();
        if let (TrainingTask::Classify, true) = (options.task, options.labels.is_empty()) {
            options.labels = labels_of(sources, &options.columns)?;
        }
        let group = if options.task == TrainingTask::Prefer { 2 } else { 1 };
        let mut parts = vec![];
        for (file, source) in sources.iter().enumerate() {
            let builder = SampleCacheBuilder { source, tokenizer, template, options: &options };
            let mut progress = |bytes, total_bytes| progress(FileReadProgress { file, bytes, total_bytes });
            let (cache, report) = builder.open_or_build(folder, &mut progress)?;
            let groups = (cache.samples() / group) as u64;
            parts.push(FileSamples {
                cache: Arc::new(cache),
                path: source.path.clone(),
                report: Arc::new(report),
                weight: source.weight,
                groups,
                first: 0,
                end: groups,
                // A fraction of the samples is drawn from the complete file.
                key: (source.weight.fract() != 0.0).then(|| mix(file as u64)),
            });
        }
        Ok(Self { parts, group, labels: options.labels })
    }

    /// Returns the number of samples in an epoch: the sum, over all files, of the number of samples times
    /// the weight.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len() as usize).sum::<usize>() * self.group
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of consecutive samples that belong together: 2 for [`TrainingTask::Prefer`], otherwise 1.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Returns the names of the labels, in the order of their indices.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Returns a number that changes with the samples, their order and their weights.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        for FileSamples { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.fingerprint()).as_bytes());
        }
        hasher.finish()
    }

    /// Returns a number that changes with the ids, targets and labels of the samples, their order and their weights,
    /// but not with the files that they come from.
    pub(crate) fn content_fingerprint(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        for FileSamples { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.content_fingerprint()).as_bytes());
        }
        hasher.finish()
    }

    /// Iterates over the files and the reports on their records.
    pub fn reports(&self) -> impl Iterator<Item = (&Path, &DataReport)> {
        self.parts.iter().map(|part| (part.path.as_path(), &*part.report))
    }

    /// Refuses files if more than a tenth of their records cannot be used or contain nothing to train on.
    ///
    /// # Errors
    /// [`FinetuneError::Skipped`].
    pub fn check_skipped(&self) -> Result<()> {
        match self.parts.iter().find(|part| part.report.skips_many()) {
            Some(FileSamples { path, report, .. }) => {
                let (skipped, records) = (report.skipped(), report.records);
                let reason = report.skip_reasons();
                Err(FinetuneError::Skipped { path: path.clone(), skipped, records, reason }.into())
            }
            None => Ok(()),
        }
    }

    /// Returns the number of tokens in all files. Each file counts completely and once, whatever its weight and even
    /// after [`split`](Self::split).
    pub fn tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.cache.tokens()).sum()
    }

    /// Returns sample `i`.
    ///
    /// # Panics
    ///
    /// Panics if the sample does not exist, or if the cache file that contains it was changed while it was mapped.
    pub fn sample(&self, i: usize) -> SampleRef<'_> {
        let (part, index_in_file) = self.locate(i);
        part.cache.sample(index_in_file)
    }

    /// Returns the length of sample `i` in tokens. See [`sample`](Self::sample).
    pub fn length(&self, i: usize) -> usize {
        let (part, index_in_file) = self.locate(i);
        part.cache.length(index_in_file)
    }

    /// Iterates over the indices of the first samples of each file, at most `count` per file.
    pub(crate) fn first(&self, count: usize) -> impl Iterator<Item = usize> {
        let lengths = self.parts.iter().map(|part| part.len() as usize * self.group);
        let starts = lengths.scan(0, |end, length| {
            *end += length;
            Some((*end - length, length))
        });
        starts.flat_map(move |(start, length)| start..start + length.min(count))
    }

    /// Returns the file that sample `i` comes from.
    pub fn path(&self, i: usize) -> &Path {
        &self.locate(i).0.path
    }

    fn locate(&self, i: usize) -> (&FileSamples, usize) {
        let (mut group, within) = ((i / self.group) as u64, i % self.group);
        for part in &self.parts {
            if group < part.len() {
                return (part, part.group(group) as usize * self.group + within);
            }
            group -= part.len();
        }
        panic!("sample {i} of {}", self.len());
    }

    /// Splits off a fraction of each file's samples, which the seed selects, for validation. Returns the remaining
    /// samples and the validation set, in which each sample counts once regardless of weights.
    pub fn split(self, fraction: f64, seed: u64) -> (Self, Self) {
        let (mut remaining, mut validation) = (self.clone(), self);
        for (i, (remaining, validation)) in remaining.parts.iter_mut().zip(&mut validation.parts).enumerate() {
            let groups = remaining.end - remaining.first;
            let held_out = ((groups as f64 * fraction).round() as u64).min(groups);
            let key = Some(mix(seed ^ i as u64));
            (remaining.key, validation.key) = (key, key);
            validation.end = validation.first + held_out;
            remaining.first = validation.end;
            validation.weight = 1.0;
        }
        (remaining, validation)
    }
}

impl FileSamples {
    /// Returns the number of groups in an epoch.
    fn len(&self) -> u64 {
        ((self.end - self.first) as f64 * self.weight).round() as u64
    }

    /// Returns the file's group at position `i` of an epoch. The groups repeat in a cycle.
    fn group(&self, i: u64) -> u64 {
        let position = self.first + i % (self.end - self.first);
        self.key.map_or(position, |key| permute(position, self.groups, key))
    }
}
