//! Data files as samples: tokenized once, in parallel, and mapped from then on.

use super::columns::Columns;
use super::data_report::{Note, Report};
use super::raw_record::{Raw, Record};
use super::record_parser::{Example, Form, Reading};
use super::record_reader::{Records, Source};
use super::sample::Sample;
use super::sample_cache::{Cache, SampleRef, Writer, private_cache};
use crate::error::{Error, Result};
use crate::files::{self, FileLock};
use crate::finetune::chat::conversation::{Conversation, SAID, field};
use crate::finetune::chat::omitted_texts::Unwritten;
use crate::finetune::chat::template::Template;
use crate::finetune::chat::tokenizer::Tokenizer;
use crate::finetune::error::FinetuneError;
use crate::notice;
use crate::util::{mix, permute};
use minijinja::value::Value;
use rayon::prelude::*;
use std::hash::Hasher as _;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of records that are worked on at once; a single larger record is worked on alone.
const BATCH: usize = 2 << 20;

/// Bytes of a file that its fingerprint reads at most.
const HASHED: u64 = 64 << 20;

/// Changes when the same data gives other samples than before.
const VERSION: u64 = 2;

/// What is learned from data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Task {
    /// To say what the assistant says, to complete, or to go on with a text.
    #[default]
    Generate,
    /// To tell a text's label.
    Classify,
    /// To prefer one answer to another. Samples come in pairs, the chosen one first.
    Prefer,
}

/// What becomes of a sample that is longer than the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overlong {
    /// It is cut at the context; raw text is cut into pieces of that length, none lost.
    #[default]
    Truncate,
    /// It is left out.
    Drop,
}

/// How samples are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// What is learned.
    pub task: Task,
    /// The most tokens of a sample.
    pub ctx: usize,
    /// What becomes of longer ones.
    pub overlong: Overlong,
    /// Whether a record that cannot be used is an error, rather than counted.
    pub strict: bool,
    /// The names of the labels, in the order of their numbers; empty: all labels of the files, sorted.
    pub labels: Vec<String>,
    /// What the columns are read as, where they have names of their own.
    pub columns: Columns,
}

impl DataOptions {
    /// Tokens of a sample at most, where nothing else is said and the model's context has as many.
    pub const USUAL_CTX: usize = 1024;

    /// Samples of at most `ctx` tokens for `task`.
    pub fn new(task: Task, ctx: usize) -> Self {
        Self { task, ctx, overlong: Overlong::Truncate, strict: false, labels: vec![], columns: Columns::default() }
    }
}

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
    parts: Vec<Part>,
    /// Samples that belong together.
    group: usize,
    labels: Vec<String>,
}

/// A file's samples, or some of them.
#[derive(Debug, Clone)]
struct Part {
    cache: Arc<Cache>,
    path: PathBuf,
    report: Arc<Report>,
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
            let maker = Maker { source, tokenizer, template, options: &options };
            let mut progress = |bytes, of| progress(DataProgress { file, bytes, of });
            let (cache, report) = maker.open_or_make(folder, &mut progress)?;
            let groups = (cache.samples() / group) as u64;
            parts.push(Part {
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
        for Part { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.fingerprint()).as_bytes());
        }
        hasher.finish()
    }

    /// A number that changes with the ids and targets of the samples, their order and their weights, whatever files they are
    /// from.
    pub(in crate::finetune) fn content(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        for Part { cache, weight, first, end, key, .. } in &self.parts {
            hasher.write(format!("{:x} {weight} {first} {end} {key:?} ", cache.content()).as_bytes());
        }
        hasher.finish()
    }

    /// The files and what became of their records.
    pub fn reports(&self) -> impl Iterator<Item = (&Path, &Report)> {
        self.parts.iter().map(|part| (part.path.as_path(), &*part.report))
    }

    /// Refuses files of which more than a tenth of the records could not be used, or has nothing to be learned.
    ///
    /// # Errors
    /// [`FinetuneError::Skipped`].
    pub fn check_skipped(&self) -> Result<()> {
        match self.parts.iter().find(|part| part.report.skips_many()) {
            Some(Part { path, report, .. }) => {
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

    /// Length of sample `i` in tokens, as [`sample`](Self::sample) has it.
    pub fn length(&self, i: usize) -> usize {
        let (part, of_file) = self.place(i);
        part.cache.length(of_file)
    }

    /// The first samples of each file, at most `count`.
    pub(in crate::finetune) fn first(&self, count: usize) -> impl Iterator<Item = usize> {
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

    fn place(&self, i: usize) -> (&Part, usize) {
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

impl Part {
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

/// What a file's samples are made with.
struct Maker<'a> {
    source: &'a Source,
    tokenizer: &'a Tokenizer,
    template: Option<&'a Template>,
    options: &'a DataOptions,
}

/// What became of a record.
enum Outcome {
    /// Samples with the numbers of their labels, and what is to be said of them.
    Samples {
        form: Form,
        samples: Vec<(Sample, u32)>,
        notes: Vec<Note>,
    },
    /// Tokens of plain text.
    Tokens(Vec<u32>),
    Broken(String),
}

impl Maker<'_> {
    /// What was made before, or is made now.
    fn open_or_make(&self, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(Cache, Report)> {
        let (fingerprint, bytes) = self.fingerprint()?;
        let name = self.source.path.file_stem().unwrap_or_default().to_string_lossy();
        let name: String = name.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).take(60).collect();
        let path = folder.join(format!("{name}-{fingerprint:016x}.samples"));
        let open = || -> Result<Result<(Cache, Report), &'static str>> {
            Ok(Cache::open(&path, fingerprint)?.and_then(|cache| {
                let report = serde_json::from_slice::<Report>(cache.report()).map_err(|_| "it is damaged")?;
                Ok((cache, Report { from_cache: true, ..report }))
            }))
        };
        if let Ok(found) = open()? {
            return Ok(found);
        }
        let io = |source| Error::Io { action: "write", path: path.clone(), source };
        let _lock = FileLock::wait(&path.with_extension("lock")).map_err(io)?;
        // Who had the lock before may have made it.
        match open()? {
            Ok(found) => return Ok(found),
            Err(why) if path.exists() => notice::say(&format!("{}: {why}; it is made again", path.display())),
            Err(_) => (),
        }
        let mut writer = Writer::new(&path).map_err(io)?;
        let report = self.make(&mut writer, &mut |read| progress(read.min(bytes), bytes), &io)?;
        if report.samples == 0 {
            let (path, reason) = (self.source.path.clone(), report.why_nothing());
            return Err(FinetuneError::NoSamples { path, reason }.into());
        }
        let json = serde_json::to_vec(&report).map_err(|e| io(e.into()))?;
        writer.finish(&path, fingerprint, &json).map_err(io)?;
        match Cache::open(&path, fingerprint)? {
            Ok(cache) => Ok((cache, report)),
            Err(why) => Err(io(std::io::Error::other(why))),
        }
    }

    /// Reads the file and writes its samples.
    fn make(
        &self,
        writer: &mut Writer,
        progress: &mut dyn FnMut(u64),
        io: &dyn Fn(std::io::Error) -> Error,
    ) -> Result<Report> {
        let mut records = Records::open(&self.source.path, &self.options.columns)?;
        let pairs = self.options.task == Task::Prefer;
        let (mut report, mut read) = (Report { pairs, ..Report::of(&self.source.path) }, 0);
        // Tokens of plain text that do not fill a sample yet, and the line that they begin in.
        let (mut pending, mut begun) = (vec![], 1);
        loop {
            let mut batch = vec![];
            let mut bytes = 0;
            while bytes < BATCH {
                let Some(record) = records.next()? else { break };
                bytes += record.bytes();
                batch.push(record);
            }
            if batch.is_empty() {
                break;
            }
            let lines: Vec<u64> = batch.iter().map(|record| record.line).collect();
            let outcomes: Vec<Outcome> = batch.into_par_iter().map(|record| self.outcome(record)).collect();
            for (line, outcome) in lines.into_iter().zip(outcomes) {
                report.records += 1;
                match outcome {
                    Outcome::Broken(reason) if self.options.strict => {
                        return Err(FinetuneError::Record { path: self.source.path.clone(), line, reason }.into());
                    }
                    Outcome::Broken(reason) => report.note(line, Note::Broken(reason)),
                    Outcome::Samples { form, samples, notes } => {
                        *report.forms.entry(form).or_default() += 1;
                        notes.into_iter().for_each(|note| report.note(line, note));
                        for (sample, label) in samples {
                            report.targets += sample.targets.iter().skip(1).filter(|target| **target).count() as u64;
                            report.tokens += sample.ids.len() as u64;
                            writer.push(&sample, label, line).map_err(io)?;
                        }
                    }
                    Outcome::Tokens(tokens) => {
                        *report.forms.entry(Form::Text).or_default() += 1;
                        if pending.is_empty() {
                            begun = line;
                        }
                        pending.extend(tokens);
                        let whole = pending.len() - pending.len() % self.options.ctx;
                        for ids in pending[..whole].chunks(self.options.ctx) {
                            self.push_text(ids, begun, writer, &mut report).map_err(io)?;
                            begun = line;
                        }
                        pending.drain(..whole);
                    }
                }
            }
            read += bytes as u64;
            progress(records.position().unwrap_or(read));
        }
        if pending.len() > 1 {
            self.push_text(&pending, begun, writer, &mut report).map_err(io)?;
        }
        report.samples = writer.samples();
        Ok(report)
    }

    fn push_text(&self, ids: &[u32], line: u64, writer: &mut Writer, report: &mut Report) -> std::io::Result<()> {
        report.targets += ids.len() as u64 - 1;
        report.tokens += ids.len() as u64;
        writer.push(&Sample { ids: ids.to_vec(), targets: vec![true; ids.len()] }, 0, line)
    }

    fn outcome(&self, record: Record) -> Outcome {
        let made = match record.raw {
            Raw::Text(text) if self.options.task == Task::Generate => {
                self.tokenizer.encode(&text).map(|encoded| Outcome::Tokens(encoded.ids)).map_err(words)
            }
            raw => raw.value().and_then(|(value, unread)| self.samples(&value, &unread)),
        };
        made.unwrap_or_else(Outcome::Broken)
    }

    /// The samples of a record, of which some columns were not read from the file.
    fn samples(&self, record: &Value, unread: &[String]) -> Result<Outcome, String> {
        let has_labels = self.options.task == Task::Classify;
        let reading = Reading { columns: &self.options.columns, has_template: self.template.is_some(), has_labels };
        let read = reading.read(record, unread)?;
        let form = read.form;
        let mut notes: Vec<Note> = read.remarks.into_iter().map(Note::Remark).collect();
        notes.extend(read.left.into_iter().map(Note::Ignored));
        if !read.is_learned {
            notes.push(Note::Remark("were left out by a weight of 0".into()));
            return Ok(Outcome::Samples { form, samples: vec![], notes });
        }
        let ctx = self.options.ctx;
        let samples = match (self.options.task, read.example) {
            (Task::Classify, Example::Label { text, label }) => {
                let number = self.options.labels.iter().position(|known| *known == label);
                let known = || crate::util::list(&self.options.labels);
                let number = number.ok_or_else(|| match label.as_str() {
                    NO_LABEL => no_label(),
                    label => format!("its label {label:?} is not among the known ones ({})", known()),
                })?;
                self.labelled(&text, &mut notes)?.map(|sample| (sample, number as u32)).into_iter().collect()
            }
            (Task::Prefer, Example::Preference(pair)) => {
                let [chosen, rejected] = &*pair;
                let fitted =
                    [chosen, rejected].map(|example| Ok(self.fitted(self.answer(example, &mut notes)?, &mut notes)));
                match fitted {
                    [Err(reason), _] | [_, Err(reason)] => return Err(reason),
                    [Ok(Some(chosen)), Ok(Some(rejected))] => {
                        if chosen == rejected {
                            notes.push(Note::Remark(
                                "have one answer as chosen and rejected, which teaches nothing".into(),
                            ));
                        }
                        vec![(chosen, 0), (rejected, 1)]
                    }
                    _ => vec![],
                }
            }
            (Task::Generate, Example::Text(text) | Example::Label { text, .. }) => {
                if text.trim().is_empty() {
                    notes.push(Note::EmptyAnswer);
                }
                let sample = self.between_ends(&text, |_| true, &mut notes)?;
                if sample.ids.len() > ctx && self.options.overlong == Overlong::Truncate {
                    notes.push(Note::Cut);
                    let pieces = sample.ids.chunks(ctx).filter(|ids| ids.len() > 1);
                    let whole = |ids: &[u32]| Sample { ids: ids.to_vec(), targets: vec![true; ids.len()] };
                    pieces.map(|ids| (whole(ids), 0)).collect()
                } else {
                    self.fitted(sample, &mut notes).map(|sample| (sample, 0)).into_iter().collect()
                }
            }
            (Task::Generate, example @ (Example::Chat { .. } | Example::Completion { .. })) => {
                let sample = self.answer(&example, &mut notes)?;
                self.fitted(sample, &mut notes).map(|sample| (sample, 0)).into_iter().collect()
            }
            (Task::Classify, _) => return Err(not_labelled(form)),
            (Task::Prefer, _) => {
                return Err(format!(
                    "it is {form}, and chosen and rejected are needed; --columns chosen=COLUMN,rejected=COLUMN says which \
                     they are"
                ));
            }
            (Task::Generate, _) => return Err(format!("it is {form}, which is for preference training (--dpo)")),
        };
        Ok(Outcome::Samples { form, samples, notes })
    }

    /// A conversation or a completion, of any length.
    fn answer(&self, example: &Example, notes: &mut Vec<Note>) -> Result<Sample, String> {
        match example {
            Example::Chat { conversation, learned } => {
                let Some(template) = self.template else {
                    return Err("it is a chat, and the model has no chat template".into());
                };
                self.chat(template, conversation, learned, notes)
            }
            Example::Completion { prompt, completion } => {
                if completion.trim().is_empty() {
                    notes.push(Note::EmptyAnswer);
                }
                self.between_ends(&format!("{prompt}{completion}"), |end| end > prompt.len(), notes)
            }
            Example::Text(_) | Example::Label { .. } | Example::Preference(_) => Err("it has no answer".into()),
        }
    }

    /// A conversation, of which the messages `learned` are targets where they are the assistant's.
    fn chat(
        &self,
        template: &Template,
        conversation: &Conversation,
        learned: &[bool],
        notes: &mut Vec<Note>,
    ) -> Result<Sample, String> {
        let is_learned = |message: usize| learned.get(message).copied().unwrap_or(true);
        if (0..conversation.len()).any(|i| is_learned(i) && conversation.is_empty_answer(i)) {
            notes.push(Note::EmptyAnswer);
        }
        notes.extend(unread_keys(template, conversation).into_iter().map(Note::Ignored));
        let traced = template.trace(conversation).map_err(|e| words(e.into()))?;
        let unwritten = Unwritten::of(conversation, &traced);
        for (message, keys) in unwritten.lost {
            if is_learned(message) {
                return Err(format!(
                    "the template does not write the {keys} of message {}, so that an empty answer would be learned; take a \
                     model whose chat template does, or leave the record out",
                    message + 1
                ));
            }
            notes.push(Note::Remark(format!("have an earlier answer whose {keys} the template does not write")));
        }
        notes.extend(unwritten.remarks.into_iter().map(Note::Remark));
        if conversation.tools.len().is_some_and(|tools| tools > 0) && !template.mentions("tools") {
            notes.push(Note::Remark("have tools that the template does not write".into()));
        }
        if conversation.messages.iter().any(|message| template.keeps_text(message)) {
            let why = "call a tool with arguments that are no JSON object: the template writes them as a quoted text";
            notes.push(Note::Remark(why.into()));
        }
        if traced.endless.iter().any(|message| is_learned(*message)) {
            notes.push(Note::Endless);
        }
        let all = (0..conversation.len()).all(|i| is_learned(i) || !conversation.is_assistant(i));
        let mut targets = vec![];
        for (target, owner) in traced.rendered.targets.into_iter().zip(traced.owners) {
            match owner {
                Some(message) if !is_learned(message) => {}
                None if !all => {
                    return Err("which message each {% generation %} block of the chat template belongs to is not certain, \
                                and not all answers are to be learned; write one block around each answer in a copy of it"
                        .into());
                }
                _ => targets.push(target),
            }
        }
        Ok(Sample::of_spans(self.tokenizer.encode(&traced.rendered.text).map_err(words)?, &targets))
    }

    /// A text between the tokens that the tokenizer adds, and with the token that ends it; what it has of these itself does
    /// not come twice. Tokens are targets by where they end.
    fn between_ends(
        &self,
        text: &str,
        is_target: impl Fn(usize) -> bool,
        notes: &mut Vec<Note>,
    ) -> Result<Sample, String> {
        let encoded = self.tokenizer.encode(text).map_err(words)?;
        let (before, after) = self.tokenizer.around();
        let end = self.tokenizer.special_id("eos_token");
        let has_start = !before.is_empty() && encoded.ids.starts_with(before);
        let end_text = self.tokenizer.special_tokens().get("eos_token").filter(|text| !text.is_empty());
        let has_end = end_text.is_some_and(|end| text.trim_end().ends_with(end));
        if has_start || has_end {
            notes.push(Note::Remark(
                "have the tokenizer's own special token at an end already: it is not added again".into(),
            ));
        }
        let before = if has_start { &[] } else { before };
        let mut sample = Sample { ids: before.to_vec(), targets: vec![false; before.len()] };
        sample.targets.extend(encoded.offsets.iter().map(|(start, end)| is_target(*end.max(&(start + 1)))));
        sample.ids.extend(encoded.ids);
        if !has_end {
            sample.ids.extend(after);
            sample.ids.extend(end.filter(|end| sample.ids.last() != Some(end)));
        }
        if end.is_none() && after.is_empty() {
            notes.push(Note::Endless);
        }
        sample.targets.resize(sample.ids.len(), true);
        Ok(sample)
    }

    /// A text between the tokens that the tokenizer adds, cut at the context within the text; nothing is to be predicted.
    fn labelled(&self, text: &str, notes: &mut Vec<Note>) -> Result<Option<Sample>, String> {
        let mut encoded = self.tokenizer.encode(text).map_err(words)?.ids;
        let (before, after) = self.tokenizer.around();
        let room = self.options.ctx.saturating_sub(before.len() + after.len());
        if encoded.len() > room {
            match self.options.overlong {
                Overlong::Drop => {
                    notes.push(Note::Dropped);
                    return Ok(None);
                }
                Overlong::Truncate => notes.push(Note::Truncated),
            }
            encoded.truncate(room);
        }
        let ids = [before, &encoded, after].concat();
        Ok((!ids.is_empty()).then(|| Sample { targets: vec![false; ids.len()], ids }))
    }

    /// The sample within the context, if there is something to predict.
    fn fitted(&self, mut sample: Sample, notes: &mut Vec<Note>) -> Option<Sample> {
        let ctx = self.options.ctx;
        let predicts = |targets: &[bool]| targets.iter().skip(1).any(|target| *target);
        if !predicts(&sample.targets) {
            notes.push(Note::WithoutTarget);
            return None;
        }
        if sample.ids.len() > ctx {
            if self.options.overlong == Overlong::Drop {
                notes.push(Note::Dropped);
                return None;
            }
            let cut = sample.targets[ctx..].contains(&true);
            sample.ids.truncate(ctx);
            sample.targets.truncate(ctx);
            if !predicts(&sample.targets) {
                notes.push(Note::TargetBeyond);
                return None;
            }
            notes.push(if cut { Note::TruncatedTarget } else { Note::Truncated });
        }
        Some(sample)
    }

    /// What the samples are made of as a number, and the bytes of the file.
    fn fingerprint(&self) -> Result<(u64, u64)> {
        let path = &self.source.path;
        let io = |source| Error::Io { action: "read", path: path.clone(), source };
        let mut file = files::open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?;
        let bytes = found.len();
        let mut hash = twox_hash::XxHash3_64::with_seed(VERSION);
        let times = if bytes > HASHED { format!("{} {}", found.mtime(), found.mtime_nsec()) } else { String::new() };
        let template = self.template.map(Template::fingerprint);
        hash.write(
            format!("{bytes} {times} {:x} {template:?} {:?}", self.tokenizer.fingerprint(), self.options).as_bytes(),
        );
        // A larger file is known by its time and its two ends.
        let mut piece = vec![0; 1 << 20];
        for start in [0, bytes.saturating_sub(HASHED / 2)] {
            file.seek(SeekFrom::Start(start)).map_err(io)?;
            let mut left = if bytes > HASHED { HASHED / 2 } else { HASHED };
            while left > 0 {
                let read = file.read(&mut piece).map_err(io)?;
                hash.write(&piece[..read]);
                left = if read == 0 { 0 } else { left.saturating_sub(read as u64) };
            }
        }
        Ok((hash.finish(), bytes))
    }
}

/// An error in words.
fn words(error: Error) -> String {
    error.to_string()
}

/// The most labels of data: a column with more has something else.
const MOST_LABELS: usize = 10_000;

/// The label that stands for none in many data sets.
const NO_LABEL: &str = "-1";

fn no_label() -> String {
    "its label is -1, which stands for no label in many data sets; leave such records out, or name all labels, -1 among them, \
     with --labels"
        .into()
}

/// The keys of messages that are in none of the words of the template, as notes name them.
fn unread_keys(template: &Template, conversation: &Conversation) -> Vec<String> {
    let is_read = |key: &str| ["role", "content"].contains(&key) || SAID.contains(&key) || template.mentions(key);
    let mut found: Vec<String> = vec![];
    for message in &conversation.messages {
        for key in message.try_iter().into_iter().flatten() {
            let name = key.as_str().unwrap_or_default();
            if is_read(name) || field(message, name).is_none() {
                continue;
            }
            let named = format!("messages[].{name}");
            if !found.contains(&named) {
                found.push(named);
            }
        }
    }
    found
}

/// All labels of the records of some files, two or more: numbers by size, names by letter.
///
/// # Errors
/// [`FinetuneError::NoSamples`] for files without a label; [`FinetuneError::Labels`] for one label, more than 10,000, or two that
/// differ by white space around them; those of files and formats.
pub fn labels_of(sources: &[Source], columns: &Columns) -> Result<Vec<String>> {
    let mut labels = std::collections::BTreeSet::new();
    let mut report = Report::default();
    let refused = |path: &Path, problem| Err(FinetuneError::Labels { path: path.into(), problem }.into());
    for source in sources {
        report.by_row = Report::of(&source.path).by_row;
        let mut records = Records::open(&source.path, columns)?;
        while let Some(record) = records.next()? {
            let line = record.line;
            let reading = Reading { columns, has_template: false, has_labels: true };
            let read = record.raw.value().and_then(|(value, unread)| reading.read(&value, &unread));
            match read.map(|read| (read.form, read.example)) {
                Ok((_, Example::Label { label, .. })) if label == NO_LABEL => {
                    report.note(line, Note::Broken(no_label()))
                }
                Ok((_, Example::Label { label, .. })) => {
                    // Numbers of up to 18 digits come in their order before names.
                    labels.insert((label.parse::<i64>().unwrap_or(i64::MAX), label));
                }
                Ok((form, _)) => report.note(line, Note::Broken(not_labelled(form))),
                Err(reason) => report.note(line, Note::Broken(reason)),
            }
            if labels.len() > MOST_LABELS {
                return refused(
                    &source.path,
                    format!("there are more than {MOST_LABELS}; label is the class of a text"),
                );
            }
        }
    }
    let path = sources.last().map(|source| source.path.clone()).unwrap_or_default();
    let labels: Vec<String> = labels.into_iter().map(|(_, label)| label).collect();
    let mut trimmed: Vec<&str> = labels.iter().map(|label| label.trim()).collect();
    trimmed.sort_unstable();
    if let Some(two) = trimmed.windows(2).find(|two| two[0] == two[1]) {
        let alike: Vec<&String> = labels.iter().filter(|label| label.trim() == two[0]).collect();
        return refused(&path, format!("{alike:?} differ only by white space around them; write them alike"));
    }
    match &labels[..] {
        [only] if !report.broken.is_empty() => refused(
            &path,
            format!(
                "all records that have one have {only:?}; at least two labels are needed to tell apart ({})",
                report.why_nothing()
            ),
        ),
        [] => Err(FinetuneError::NoSamples { path, reason: report.why_nothing() }.into()),
        [only] => refused(&path, format!("all records have {only:?}; at least two labels are needed to tell apart")),
        _ => Ok(labels),
    }
}

/// Why a record has no label.
fn not_labelled(form: Form) -> String {
    format!("it is {form}, and text and label are needed; --columns text=COLUMN,label=COLUMN says which they are")
}
