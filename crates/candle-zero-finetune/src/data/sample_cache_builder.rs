//! Builds the samples of one data file: parses and tokenizes records in parallel, and writes them into the cache.

use super::class_labels::{NO_LABEL, no_label_reason, not_labelled};
use super::data_options::{DataOptions, TrainingTask, Truncation};
use super::data_report::{DataReport, RecordNote};
use super::raw_record::{RawRecord, RecordContent};
use super::record_parser::{RecordFormat, RecordParser, TrainingExample};
use super::record_reader::RecordReader;
use super::sample::Sample;
use super::sample_cache::{SampleCache, SampleCacheWriter};
use super::source::Source;
use crate::chat::conversation::{ASSISTANT_TEXT_KEYS, Conversation, field};
use crate::chat::omitted_texts::OmittedTexts;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::files::{self, FileLock};
use candle_zero::notice;
use minijinja::value::Value;
use rayon::prelude::*;
use std::hash::Hasher as _;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The number of bytes at which a batch of records is complete. The records of a batch are processed together.
const BATCH_BYTES: usize = 2 << 20;

/// The maximum size in bytes of a file that is read completely for its fingerprint. Of a larger file, only this many
/// bytes are read.
const MAX_FINGERPRINTED_BYTES: u64 = 64 << 20;

/// The version of the samples, which changes when the same data yields different samples.
const SAMPLES_VERSION: u64 = 2;

/// A builder of the samples of one file.
pub(super) struct SampleCacheBuilder<'a> {
    pub source: &'a Source,
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a Template>,
    pub options: &'a DataOptions,
}

/// The outcome of processing a record.
enum RecordOutcome {
    /// Samples with the indices of their labels, and remarks on them.
    Samples {
        format: RecordFormat,
        samples: Vec<(Sample, u32)>,
        notes: Vec<RecordNote>,
    },
    /// The tokens of plain text.
    Tokens(Vec<u32>),
    Broken(String),
}

impl SampleCacheBuilder<'_> {
    /// Opens samples that were built before, or builds them.
    pub fn open_or_build(
        &self,
        folder: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(SampleCache, DataReport)> {
        let (fingerprint, bytes) = self.fingerprint()?;
        let name = self.source.path.file_stem().unwrap_or_default().to_string_lossy();
        let name: String = name.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).take(60).collect();
        let path = folder.join(format!("{name}-{fingerprint:016x}.samples"));
        let open = || -> Result<Result<(SampleCache, DataReport), &'static str>> {
            Ok(SampleCache::open(&path, fingerprint)?.and_then(|cache| {
                let report = serde_json::from_slice::<DataReport>(cache.report()).map_err(|_| "it is damaged")?;
                Ok((cache, DataReport { from_cache: true, ..report }))
            }))
        };
        if let Ok(found) = open()? {
            return Ok(found);
        }
        let io = |source| Error::Io { action: "write", path: path.clone(), source };
        let _lock = FileLock::wait(&path.with_extension("lock")).map_err(io)?;
        // The previous holder of the lock may have built the samples.
        match open()? {
            Ok(found) => return Ok(found),
            Err(why) if path.exists() => notice::emit(&format!("{}: {why}, so it will be rebuilt", path.display())),
            Err(_) => (),
        }
        let mut writer = SampleCacheWriter::new(&path).map_err(io)?;
        let report = self.build(&mut writer, &mut |read| progress(read.min(bytes), bytes), &io)?;
        if report.samples == 0 {
            let (path, reason) = (self.source.path.clone(), report.no_samples_reason());
            return Err(FinetuneError::NoSamples { path, reason }.into());
        }
        let json = serde_json::to_vec(&report).map_err(|e| io(e.into()))?;
        writer.finish(&path, fingerprint, &json).map_err(io)?;
        match SampleCache::open(&path, fingerprint)? {
            Ok(cache) => Ok((cache, report)),
            Err(why) => Err(io(std::io::Error::other(why))),
        }
    }

    /// Reads the file and writes its samples.
    fn build(
        &self,
        writer: &mut SampleCacheWriter,
        progress: &mut dyn FnMut(u64),
        io: &dyn Fn(std::io::Error) -> Error,
    ) -> Result<DataReport> {
        let mut records = RecordReader::open(&self.source.path, &self.options.columns)?;
        let pairs = self.options.task == TrainingTask::Prefer;
        let (mut report, mut read) = (DataReport { pairs, ..DataReport::of(&self.source.path) }, 0);
        // The tokens of plain text that do not fill a sample yet, and the line in which they begin.
        let (mut pending, mut first_line) = (vec![], 1);
        loop {
            let mut batch = vec![];
            let mut bytes = 0;
            while bytes < BATCH_BYTES {
                let Some(record) = records.next()? else { break };
                bytes += record.bytes();
                batch.push(record);
            }
            if batch.is_empty() {
                break;
            }
            let lines: Vec<u64> = batch.iter().map(|record| record.line).collect();
            let outcomes: Vec<RecordOutcome> = batch.into_par_iter().map(|record| self.outcome(record)).collect();
            for (line, outcome) in lines.into_iter().zip(outcomes) {
                report.records += 1;
                match outcome {
                    RecordOutcome::Broken(reason) if self.options.strict => {
                        return Err(FinetuneError::Record { path: self.source.path.clone(), line, reason }.into());
                    }
                    RecordOutcome::Broken(reason) => report.note(line, RecordNote::Broken(reason)),
                    RecordOutcome::Samples { format, samples, notes } => {
                        *report.forms.entry(format).or_default() += 1;
                        notes.into_iter().for_each(|note| report.note(line, note));
                        for (sample, label) in samples {
                            report.targets += sample.targets.iter().skip(1).filter(|target| **target).count() as u64;
                            report.tokens += sample.ids.len() as u64;
                            writer.push(&sample, label, line).map_err(io)?;
                        }
                    }
                    RecordOutcome::Tokens(tokens) => {
                        *report.forms.entry(RecordFormat::Text).or_default() += 1;
                        if pending.is_empty() {
                            first_line = line;
                        }
                        pending.extend(tokens);
                        let complete_len = pending.len() - pending.len() % self.options.ctx;
                        for ids in pending[..complete_len].chunks(self.options.ctx) {
                            self.push_text(ids, first_line, writer, &mut report).map_err(io)?;
                            first_line = line;
                        }
                        pending.drain(..complete_len);
                    }
                }
            }
            read += bytes as u64;
            progress(records.position().unwrap_or(read));
        }
        if pending.len() > 1 {
            self.push_text(&pending, first_line, writer, &mut report).map_err(io)?;
        }
        report.samples = writer.samples();
        Ok(report)
    }

    fn push_text(
        &self,
        ids: &[u32],
        line: u64,
        writer: &mut SampleCacheWriter,
        report: &mut DataReport,
    ) -> std::io::Result<()> {
        report.targets += ids.len() as u64 - 1;
        report.tokens += ids.len() as u64;
        writer.push(&Sample { ids: ids.to_vec(), targets: vec![true; ids.len()] }, 0, line)
    }

    fn outcome(&self, record: RawRecord) -> RecordOutcome {
        let outcome = match record.raw {
            RecordContent::Text(text) if self.options.task == TrainingTask::Generate => {
                self.tokenizer.encode(&text).map(|encoded| RecordOutcome::Tokens(encoded.ids)).map_err(error_text)
            }
            raw => raw.value().and_then(|(value, unread)| self.samples(&value, &unread)),
        };
        outcome.unwrap_or_else(RecordOutcome::Broken)
    }

    /// Returns the samples of a record. The columns `unread` were not read from the file.
    fn samples(&self, record: &Value, unread: &[String]) -> Result<RecordOutcome, String> {
        let has_labels = self.options.task == TrainingTask::Classify;
        let parser = RecordParser { columns: &self.options.columns, has_template: self.template.is_some(), has_labels };
        let parsed = parser.parse(record, unread)?;
        let format = parsed.format;
        let mut notes: Vec<RecordNote> = parsed.remarks.into_iter().map(RecordNote::Remark).collect();
        notes.extend(parsed.unread_keys.into_iter().map(RecordNote::Ignored));
        if !parsed.is_trained_on {
            notes.push(RecordNote::Remark("were omitted because of a weight of 0".into()));
            return Ok(RecordOutcome::Samples { format, samples: vec![], notes });
        }
        let ctx = self.options.ctx;
        let samples = match (self.options.task, parsed.example) {
            (TrainingTask::Classify, TrainingExample::Label { text, label }) => {
                let index = self.options.labels.iter().position(|known| *known == label);
                let known_labels = || candle_zero::util::list(&self.options.labels);
                let index = index.ok_or_else(|| match label.as_str() {
                    NO_LABEL => no_label_reason(),
                    label => format!("its label {label:?} is not one of the known labels ({})", known_labels()),
                })?;
                self.label_sample(&text, &mut notes)?.map(|sample| (sample, index as u32)).into_iter().collect()
            }
            (TrainingTask::Prefer, TrainingExample::Preference(pair)) => {
                let [chosen, rejected] = &*pair;
                let fitted =
                    [chosen, rejected].map(|example| Ok(self.fit(self.answer(example, &mut notes)?, &mut notes)));
                match fitted {
                    [Err(reason), _] | [_, Err(reason)] => return Err(reason),
                    [Ok(Some(chosen)), Ok(Some(rejected))] => {
                        if chosen == rejected {
                            notes.push(RecordNote::Remark(
                                "have identical chosen and rejected answers, which teach nothing".into(),
                            ));
                        }
                        vec![(chosen, 0), (rejected, 1)]
                    }
                    _ => vec![],
                }
            }
            (TrainingTask::Generate, TrainingExample::Text(text) | TrainingExample::Label { text, .. }) => {
                if text.trim().is_empty() {
                    notes.push(RecordNote::EmptyAnswer);
                }
                let sample = self.text_sample(&text, |_| true, &mut notes)?;
                if sample.ids.len() > ctx && self.options.overlong == Truncation::Truncate {
                    notes.push(RecordNote::Cut);
                    let pieces = sample.ids.chunks(ctx).filter(|ids| ids.len() > 1);
                    let to_sample = |ids: &[u32]| Sample { ids: ids.to_vec(), targets: vec![true; ids.len()] };
                    pieces.map(|ids| (to_sample(ids), 0)).collect()
                } else {
                    self.fit(sample, &mut notes).map(|sample| (sample, 0)).into_iter().collect()
                }
            }
            (TrainingTask::Generate, example @ (TrainingExample::Chat { .. } | TrainingExample::Completion { .. })) => {
                let sample = self.answer(&example, &mut notes)?;
                self.fit(sample, &mut notes).map(|sample| (sample, 0)).into_iter().collect()
            }
            (TrainingTask::Classify, _) => return Err(not_labelled(format)),
            (TrainingTask::Prefer, _) => {
                return Err(format!(
                    "it contains {format}, but chosen and rejected are required; map them with --columns \
                     chosen=COLUMN,rejected=COLUMN"
                ));
            }
            (TrainingTask::Generate, _) => {
                return Err(format!("it contains {format}, which are only for preference training (--dpo)"));
            }
        };
        Ok(RecordOutcome::Samples { format, samples, notes })
    }

    /// Returns the sample of a conversation or a completion, of any length.
    fn answer(&self, example: &TrainingExample, notes: &mut Vec<RecordNote>) -> Result<Sample, String> {
        match example {
            TrainingExample::Chat { conversation, trained_on } => {
                let Some(template) = self.template else {
                    return Err("it is a chat, but the model has no chat template".into());
                };
                self.chat(template, conversation, trained_on, notes)
            }
            TrainingExample::Completion { prompt, completion } => {
                if completion.trim().is_empty() {
                    notes.push(RecordNote::EmptyAnswer);
                }
                self.text_sample(&format!("{prompt}{completion}"), |end| end > prompt.len(), notes)
            }
            TrainingExample::Text(_) | TrainingExample::Label { .. } | TrainingExample::Preference(_) => {
                Err("it has no answer".into())
            }
        }
    }

    /// Returns the sample of a conversation. The assistant's messages that are marked in `trained_on` are targets.
    fn chat(
        &self,
        template: &Template,
        conversation: &Conversation,
        trained_on: &[bool],
        notes: &mut Vec<RecordNote>,
    ) -> Result<Sample, String> {
        let is_trained_on = |message: usize| trained_on.get(message).copied().unwrap_or(true);
        if (0..conversation.len()).any(|i| is_trained_on(i) && conversation.is_empty_answer(i)) {
            notes.push(RecordNote::EmptyAnswer);
        }
        notes.extend(unread_keys(template, conversation).into_iter().map(RecordNote::Ignored));
        let traced = template.trace(conversation).map_err(|e| error_text(e.into()))?;
        let omitted = OmittedTexts::of(conversation, &traced);
        for (message, keys) in omitted.omitted_answers {
            if is_trained_on(message) {
                return Err(format!(
                    "the template does not render the {keys} of message {}, so an empty answer would be trained on; \
                     use a model whose chat template does, or omit the record",
                    message + 1
                ));
            }
            notes.push(RecordNote::Remark(format!("have an earlier answer whose {keys} the template does not render")));
        }
        notes.extend(omitted.remarks.into_iter().map(RecordNote::Remark));
        if conversation.tools.len().is_some_and(|tools| tools > 0) && !template.mentions("tools") {
            notes.push(RecordNote::Remark("have tools that the template does not render".into()));
        }
        if conversation.messages.iter().any(|message| template.double_encodes_arguments(message)) {
            let remark =
                "call a tool with arguments that are not a JSON object: the template renders them as a quoted string";
            notes.push(RecordNote::Remark(remark.into()));
        }
        if traced.without_end.iter().any(|message| is_trained_on(*message)) {
            notes.push(RecordNote::Endless);
        }
        let trains_on_all = (0..conversation.len()).all(|i| is_trained_on(i) || !conversation.is_assistant(i));
        let mut targets = vec![];
        for (target, owner) in traced.rendered.targets.into_iter().zip(traced.owners) {
            match owner {
                Some(message) if !is_trained_on(message) => {}
                None if !trains_on_all => {
                    return Err(
                        "it is uncertain which message each {% generation %} block of the chat template belongs \
                                to, and not all answers are trained on; in a copy of the template, write one block \
                                around each answer"
                            .into(),
                    );
                }
                _ => targets.push(target),
            }
        }
        Ok(Sample::of_spans(self.tokenizer.encode(&traced.rendered.text).map_err(error_text)?, &targets))
    }

    /// Returns the sample of a text: the text's tokens between those that the tokenizer adds, followed by `eos_token`.
    /// Tokens that the text already has at its beginning or end are not added again. Whether a token of the text is a
    /// target depends on the position at which the token ends.
    fn text_sample(
        &self,
        text: &str,
        is_target: impl Fn(usize) -> bool,
        notes: &mut Vec<RecordNote>,
    ) -> Result<Sample, String> {
        let encoded = self.tokenizer.encode(text).map_err(error_text)?;
        let (before, after) = self.tokenizer.prefix_and_suffix();
        let end = self.tokenizer.special_id("eos_token");
        let has_start = !before.is_empty() && encoded.ids.starts_with(before);
        let end_text = self.tokenizer.special_tokens().get("eos_token").filter(|text| !text.is_empty());
        let has_end = end_text.is_some_and(|end| text.trim_end().ends_with(end));
        if has_start || has_end {
            notes.push(RecordNote::Remark(
                "have the tokenizer's special token at the beginning or end, so it is not added again".into(),
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
            notes.push(RecordNote::Endless);
        }
        sample.targets.resize(sample.ids.len(), true);
        Ok(sample)
    }

    /// Returns a sample without targets: the text, cut so that it fits into the context, between the tokens that the
    /// tokenizer adds. Returns `None` if the text is too long and must be left out, or if there are no tokens.
    fn label_sample(&self, text: &str, notes: &mut Vec<RecordNote>) -> Result<Option<Sample>, String> {
        let mut encoded = self.tokenizer.encode(text).map_err(error_text)?.ids;
        let (before, after) = self.tokenizer.prefix_and_suffix();
        let room = self.options.ctx.saturating_sub(before.len() + after.len());
        if encoded.len() > room {
            match self.options.overlong {
                Truncation::Drop => {
                    notes.push(RecordNote::Dropped);
                    return Ok(None);
                }
                Truncation::Truncate => notes.push(RecordNote::Truncated),
            }
            encoded.truncate(room);
        }
        let ids = [before, &encoded, after].concat();
        Ok((!ids.is_empty()).then(|| Sample { targets: vec![false; ids.len()], ids }))
    }

    /// Returns the sample, cut at the context length if it is longer, or `None` if it must be left out.
    fn fit(&self, mut sample: Sample, notes: &mut Vec<RecordNote>) -> Option<Sample> {
        let ctx = self.options.ctx;
        let predicts = |targets: &[bool]| targets.iter().skip(1).any(|target| *target);
        if !predicts(&sample.targets) {
            notes.push(RecordNote::WithoutTarget);
            return None;
        }
        if sample.ids.len() > ctx {
            if self.options.overlong == Truncation::Drop {
                notes.push(RecordNote::Dropped);
                return None;
            }
            let lost_targets = sample.targets[ctx..].contains(&true);
            sample.ids.truncate(ctx);
            sample.targets.truncate(ctx);
            if !predicts(&sample.targets) {
                notes.push(RecordNote::TargetBeyond);
                return None;
            }
            notes.push(if lost_targets { RecordNote::TruncatedTarget } else { RecordNote::Truncated });
        }
        Some(sample)
    }

    /// Returns two numbers: a fingerprint, which changes whenever anything that the samples are built from changes, and
    /// the file's size in bytes.
    fn fingerprint(&self) -> Result<(u64, u64)> {
        let path = &self.source.path;
        let io = |source| Error::Io { action: "read", path: path.clone(), source };
        let mut file = files::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        let bytes = metadata.len();
        let mut hash = twox_hash::XxHash3_64::with_seed(SAMPLES_VERSION);
        let times = if bytes > MAX_FINGERPRINTED_BYTES {
            format!("{} {}", metadata.mtime(), metadata.mtime_nsec())
        } else {
            String::new()
        };
        let template = self.template.map(Template::fingerprint);
        hash.write(
            format!("{bytes} {times} {:x} {template:?} {:?}", self.tokenizer.fingerprint(), self.options).as_bytes(),
        );
        // A file that is too large to be read completely is identified by its size, its modification time, its
        // beginning and its end.
        let mut piece = vec![0; 1 << 20];
        for start in [0, bytes.saturating_sub(MAX_FINGERPRINTED_BYTES / 2)] {
            file.seek(SeekFrom::Start(start)).map_err(io)?;
            let mut remaining =
                if bytes > MAX_FINGERPRINTED_BYTES { MAX_FINGERPRINTED_BYTES / 2 } else { MAX_FINGERPRINTED_BYTES };
            while remaining > 0 {
                let read = file.read(&mut piece).map_err(io)?;
                hash.write(&piece[..read]);
                remaining = if read == 0 { 0 } else { remaining.saturating_sub(read as u64) };
            }
        }
        Ok((hash.finish(), bytes))
    }
}

/// Returns the text of an error.
fn error_text(error: Error) -> String {
    error.to_string()
}

/// Returns the message keys that do not occur in the template, formatted for notes.
fn unread_keys(template: &Template, conversation: &Conversation) -> Vec<String> {
    let is_read =
        |key: &str| ["role", "content"].contains(&key) || ASSISTANT_TEXT_KEYS.contains(&key) || template.mentions(key);
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
