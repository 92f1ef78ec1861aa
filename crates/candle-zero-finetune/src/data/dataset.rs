//! Samples of data files: tokenized once, and mapped from then on.

use super::data_options::{DataOptions, Task};
use super::data_report::DataReport;
use super::dataset_builder::DatasetBuilder;
use super::labels::labels_of;
use super::sample_cache::{SampleCache, SampleRef, private_cache};
use super::source::Source;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::util::{mix, permute};
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How far a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataProgress {
    /// Number of the file, from 0.
    pub file: usize,
    /// Bytes of records read so far.
    pub bytes: u64,
    /// Bytes of the file.
    pub of: u64,
}

/// Samples of several files, each counted by its weight.
#[derive(Debug, Clone)]
pub struct Dataset {
    parts: Vec<FileSamples>,
    /// Samples that belong together.
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
    /// Groups in the file.
    groups: u64,
    /// Which of them it has: `first..end` in the order that `key` makes, or in that of the file.
    first: u64,
    end: u64,
    key: Option<u64>,
}

impl Dataset {
    /// Reads `sources`, or maps what was made of the same files, tokenizer, template and options before, in `folder`. Of
    /// processes that need the same file at the same time, one makes it and the others wait.
    ///
    /// `progress` is told now and then how far a file is.
    ///
    /// # Errors
    /// [`FinetuneError::NoSamples`] for a file of which nothing can be learned; [`FinetuneError::Record`] for a record that
    /// cannot be used, where the options are strict; those of files and formats.
    pub fn prepare(
        sources: &[Source],
        tokenizer: &Tokenizer,
        template: Option<&Template>,
        options: &DataOptions,
        folder: &Path,
        progress: &mut dyn FnMut(DataProgress),
    ) -> Result<Self> {
        assert!(options.ctx > 1, "a sample has a token and one to predict");
        private_cache(folder).map_err(|source| Error::Io { action: "create", path: folder.into(), source })?;
        let mut options = options.clone();
        if let (Task::Classify, true) = (options.task, options.labels.is_empty()) {
            options.labels = labels_of(sources, &options.columns)?;
        }
        let group = if options.task == Task::Prefer { 2 } else { 1 };
        let mut parts = vec![];
        for (file, source) in sources.iter().enumerate() {
            let builder = DatasetBuilder { source, tokenizer, template, options: &options };
            let mut progress = |bytes, of| progress(DataProgress { file, bytes, of });
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
                // A part of the samples is one of all of the file.
                key: (source.weight.fract() != 0.0).then(|| mix(file as u64)),
            });
        }
        Ok(Self { parts, group, labels: options.labels })
    }

    /// Number of samples in an epoch: of each file, its samples times its weight.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len() as usize).sum::<usize>() * self.group
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Samples that belong together, one after another: 2 of [`Task::Prefer`], else 1.
    pub fn group(&self) -> usize {
        self.group
    }

    /// The names of the labels by number.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// A number that changes with the samples, their order and their weights.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        for FileSamples { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.fingerprint()).as_bytes());
        }
        hasher.finish()
    }

    /// A number that changes with the ids and targets of the samples, their order and their weights, whatever files they are
    /// from.
    pub(crate) fn content(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        for FileSamples { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.content()).as_bytes());
        }
        hasher.finish()
    }

    /// The files and what became of their records.
    pub fn reports(&self) -> impl Iterator<Item = (&Path, &DataReport)> {
        self.parts.iter().map(|part| (part.path.as_path(), &*part.report))
    }

    /// Refuses files of which more than a tenth of the records could not be used, or has nothing to be learned.
    ///
    /// # Errors
    /// [`FinetuneError::Skipped`].
    pub fn check_skipped(&self) -> Result<()> {
        match self.parts.iter().find(|part| part.report.skips_many()) {
            Some(FileSamples { path, report, .. }) => {
                let (skipped, records) = (report.skipped(), report.records);
                let why = report.why_skipped();
                Err(FinetuneError::Skipped { path: path.clone(), skipped, records, why }.into())
            }
            None => Ok(()),
        }
    }

    /// Tokens of all samples, each file once.
    pub fn tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.cache.tokens()).sum()
    }

    /// Sample `i`.
    ///
    /// # Panics
    ///
    /// If there is none, or if its file was changed while it was mapped.
    pub fn sample(&self, i: usize) -> SampleRef<'_> {
        let (part, of_file) = self.place(i);
        part.cache.sample(of_file)
    }

    /// TrainingLength of sample `i` in tokens, as [`sample`](Self::sample) has it.
    pub fn length(&self, i: usize) -> usize {
        let (part, of_file) = self.place(i);
        part.cache.length(of_file)
    }

    /// The first samples of each file, at most `count`.
    pub(crate) fn first(&self, count: usize) -> impl Iterator<Item = usize> {
        let lengths = self.parts.iter().map(|part| part.len() as usize * self.group);
        let starts = lengths.scan(0, |end, length| {
            *end += length;
            Some((*end - length, length))
        });
        starts.flat_map(move |(start, length)| start..start + length.min(count))
    }

    /// The file that sample `i` comes from.
    pub fn path(&self, i: usize) -> &Path {
        &self.place(i).0.path
    }

    fn place(&self, i: usize) -> (&FileSamples, usize) {
        let (mut group, within) = ((i / self.group) as u64, i % self.group);
        for part in &self.parts {
            if group < part.len() {
                return (part, part.group(group) as usize * self.group + within);
            }
            group -= part.len();
        }
        panic!("sample {i} of {}", self.len());
    }

    /// Takes a part of each file out for validation, `fraction` of its samples, which the seed chooses. Gives what is left,
    /// and the part, in which each sample counts once whatever the weights.
    pub fn split(self, fraction: f64, seed: u64) -> (Self, Self) {
        let (mut left, mut out) = (self.clone(), self);
        for (i, (left, out)) in left.parts.iter_mut().zip(&mut out.parts).enumerate() {
            let groups = left.end - left.first;
            let held = ((groups as f64 * fraction).round() as u64).min(groups);
            let key = Some(mix(seed ^ i as u64));
            (left.key, out.key) = (key, key);
            out.end = out.first + held;
            left.first = out.end;
            out.weight = 1.0;
        }
        (left, out)
    }
}

impl FileSamples {
    /// Groups in an epoch.
    fn len(&self) -> u64 {
        ((self.end - self.first) as f64 * self.weight).round() as u64
    }

    /// Which group of the file comes as number `i` of an epoch: all of them again and again.
    fn group(&self, i: u64) -> u64 {
        let position = self.first + i % (self.end - self.first);
        self.key.map_or(position, |key| permute(position, self.groups, key))
    }
}
