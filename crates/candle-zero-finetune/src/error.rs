//! Errors of fine-tuning: of a model's folder, its tokenizer and chat template, and of data.

pub use candle_zero::error::{
    CheckpointError, ConfigError, Error, LoraError, ModelError, OutputError, ParamError, Result,
};
use candle_zero::models::ENCODER_TYPES;
use std::path::{Path, PathBuf};

/// Errors of fine-tuning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneError {
    /// An invalid value of an option.
    #[error("{flag} is {found}, but must be {allowed}")]
    Option {
        /// The option as written on the command line.
        flag: &'static str,
        /// The value of the option.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// An option that does not fit the other options.
    #[error("{flag} {problem}")]
    OptionUse {
        /// The option as written on the command line.
        flag: &'static str,
        /// The problem, and what to do about it.
        problem: String,
    },
    /// A path without a model.
    #[error(
        "{} is not a model: {reason}; give a folder in Hugging Face format (config.json and safetensors files) or a \
         GGUF file",
        path.display()
    )]
    NoModel {
        /// The path.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A folder that is not a trained classifier.
    #[error(
        "{} is not a trained classifier: its files lack {tensor}; train one with zerorun finetune {} --task classify --data \
         FILE --out DIR",
        path.display(), path.display()
    )]
    NoClassifier {
        /// The folder.
        path: PathBuf,
        /// A missing tensor that a classifier needs.
        tensor: String,
    },
    /// A text that cannot be classified.
    #[error("cannot classify the text: {reason}")]
    Unclassified {
        /// The problem.
        reason: String,
    },
    /// A model that cannot be trained to classify.
    #[error(
        "{} {found}; --task classify requires an encoder (model_type {}) or a language model, with any head or none, in a \
         folder in Hugging Face format",
        path.display(), ENCODER_TYPES.join(", ")
    )]
    NoClassifierBase {
        /// The folder.
        path: PathBuf,
        /// A description of what the folder contains instead.
        found: String,
    },
    /// A tensor of experts in MXFP4 that cannot be read.
    #[error("{}: tensor {tensor} {problem}", path.display())]
    PackedExperts {
        /// The file with the weights, or the index.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// The problem, and what to do about it.
        problem: String,
    },
    /// A tensor whose shape differs from the model description.
    #[error(
        "tensor {name} in {} has shape {found:?}, but {}",
        file.display(), shape_mismatch(file, description, expected)
    )]
    NotAsDescribed {
        /// The name of the tensor in the model.
        name: String,
        /// The file with the weights.
        file: PathBuf,
        /// The shape of the tensor in that file.
        found: Box<[usize]>,
        /// The file with the description.
        description: PathBuf,
        /// The shape according to the description.
        expected: Box<[usize]>,
    },
    /// A tokenizer with more tokens than the embedding has rows.
    #[error(
        "the tokenizer has ids up to {last}, but the model's embedding has {} ({beyond} too few); use the \
         tokenizer that belongs to the model",
        candle_zero::util::counted(*rows, "row")
    )]
    TokensBeyondEmbedding {
        /// The largest token id.
        last: usize,
        /// The number of rows of the embedding.
        rows: usize,
        /// The number of ids without a row.
        beyond: usize,
    },
    /// A GGUF file that cannot be read.
    #[error("{} is not a readable GGUF file: {reason}", path.display())]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A metadata value of a GGUF file that no supported model can use.
    #[error("{}: {key} is {found}, but must be {allowed}", path.display())]
    GgufValue {
        /// The file.
        path: PathBuf,
        /// The metadata key.
        key: String,
        /// The value of the key.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A tensor of a GGUF file in an unsupported format.
    #[error("tensor {name} in {} has type {found}; the supported types are {allowed}", path.display())]
    GgufDtype {
        /// The file.
        path: PathBuf,
        /// The name of the tensor in the file.
        name: String,
        /// The type of the tensor.
        found: String,
        /// The supported types.
        allowed: &'static str,
    },
    /// A tokenizer file that cannot be used.
    #[error("{} cannot be used: {reason}; copy the tokenizer's files again from the model's source", path.display())]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A model without a tokenizer.
    #[error(
        "{} has no tokenizer: {found}; save a tokenizer there with transformers, \
         AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and \
         tokenizer_config.json from the model's source",
        folder.display()
    )]
    NoTokenizer {
        /// The model's folder.
        folder: PathBuf,
        /// A description of what the folder contains instead.
        found: String,
    },
    /// A special token that the tokenizer does not contain.
    #[error("{name} is {token:?}, which the tokenizer does not have; take all tokenizer files from the same model")]
    UnknownSpecialToken {
        /// The key of the token in tokenizer_config.json or special_tokens_map.json.
        name: String,
        /// The text of the token.
        token: String,
    },
    /// A text that the tokenizer refuses.
    #[error("the tokenizer cannot encode a text of {}: {reason}", candle_zero::util::counted(*bytes, "byte"))]
    Encode {
        /// The length of the text in bytes.
        bytes: usize,
        /// The tokenizer's reason.
        reason: String,
    },
    /// Ids that the tokenizer refuses.
    #[error("the tokenizer cannot decode the ids: {reason}")]
    Decode {
        /// The tokenizer's reason.
        reason: String,
    },
    /// Chat data for a model without a chat template.
    #[error(
        "{} has no chat template, neither in tokenizer_config.json nor as chat_template.jinja, but chat data needs \
         one; copy chat_template.jinja from an instruction-tuned model with the same special tokens, or use \
         prompt/completion data",
        folder.display()
    )]
    NoTemplate {
        /// The model's folder or GGUF file.
        folder: PathBuf,
    },
    /// A chat template with invalid Jinja syntax.
    #[error("the chat template cannot be read: {reason}")]
    TemplateSyntax {
        /// The parser's message, with the line.
        reason: String,
    },
    /// A chat template that does not end, or that writes more than any conversation needs.
    #[error(
        "{template} does not terminate, or writes more text than any conversation needs{}; use another template, such \
         as the model's published one",
        line.map_or(String::new(), |line| format!(" (line {line} of the template)"))
    )]
    TemplateWithoutEnd {
        /// The template and its file.
        template: String,
        /// The line in which the rendering was stopped.
        line: Option<usize>,
    },
    /// A conversation that the chat template refuses or cannot render.
    #[error("the chat template refuses the conversation: {reason}")]
    TemplateRefuses {
        /// The message of the template or of the renderer.
        reason: String,
    },
    /// A message whose position in the rendered text is uncertain: one of the assistant's, or one that contains a text
    /// with which answers begin.
    #[error(
        "the position of message {message} in the rendered text is uncertain: {reason}; write {{% \
         generation %}} before and {{% endgeneration %}} after the assistant's text, including its end token, in a \
         copy of the chat template"
    )]
    Spans {
        /// The number of the message in the conversation, counted from 1.
        message: usize,
        /// The problem.
        reason: &'static str,
    },
    /// Generation markers of a chat template that do not enclose text.
    #[error(
        "the {{% generation %}} markers of the chat template do not enclose contiguous text; write one pair around \
         each answer, outside loops over its parts, and use no private-use character (U+10FFFC, U+10FFFD) in data"
    )]
    GenerationMarkers,
    /// A conversation in an invalid format.
    #[error(
        "the conversation is not a list of messages with role and content: {reason}; write \
         [{{\"role\": \"user\", \"content\": \"...\"}}, {{\"role\": \"assistant\", \"content\": \"...\"}}]"
    )]
    Conversation {
        /// The problem.
        reason: String,
    },
    /// An empty prompt.
    #[error("the prompt has no tokens, but at least one is required; give some text")]
    EmptyPrompt,
    /// A prompt that leaves no room for an answer.
    #[error(
        "the prompt has {}, but the model's context of {} must also hold the answer; give a shorter prompt",
        candle_zero::util::counted(*tokens, "token"),
        candle_zero::util::counted(*ctx, "token")
    )]
    LongPrompt {
        /// The number of tokens in the prompt.
        tokens: usize,
        /// The number of tokens in the context.
        ctx: usize,
    },
    /// An invalid sampling parameter.
    #[error("{name} is {found}, but must be {allowed}")]
    Sampling {
        /// The name of the parameter.
        name: &'static str,
        /// The value of the parameter.
        found: String,
        /// The allowed values.
        allowed: &'static str,
    },
    /// A weight of a data file that cannot be used.
    #[error("the weight of {text} must be above 0 and at most 1000, as in data.jsonl:2.5")]
    Weight {
        /// The argument.
        text: String,
    },
    /// A data file of an unknown format.
    #[error(
        "{} has no known extension (.jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt, .text or .md); rename or \
         convert it",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A data file that cannot be split into records.
    #[error("{} cannot be read: {problem}", path.display())]
    DataFile {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do about it.
        problem: String,
    },
    /// A Parquet file that cannot be read.
    #[error("{} cannot be read as Parquet: {problem}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do about it.
        problem: String,
    },
    /// No folder for tokenized samples is known.
    #[error("there is no folder for tokenized samples: neither XDG_CACHE_HOME nor HOME is set; give one with --cache")]
    NoCache,
    /// A record that cannot be used, if the options are strict.
    #[error(
        "{unit} {line} of {} cannot be used: {reason}; correct it, or leave out --strict to skip such {unit}s",
        path.display(),
        unit = unit(path)
    )]
    Record {
        /// The file.
        path: PathBuf,
        /// The line in which the record begins, or its row in a Parquet file.
        line: u64,
        /// The problem.
        reason: String,
    },
    /// A data file with many records that cannot be used.
    #[error(
        "{skipped} of {} in {} {} skipped: {reason}; correct the data, or give --allow_skipped to learn from the \
         others",
        candle_zero::util::counted(*records, "record"),
        path.display(),
        candle_zero::util::is_or_are(*skipped)
    )]
    Skipped {
        /// The file.
        path: PathBuf,
        /// The number of records that cannot be used or contain nothing to train on.
        skipped: u64,
        /// The total number of records.
        records: u64,
        /// The problem with these records.
        reason: String,
    },
    /// A data file without a sample to learn from.
    #[error("{} has no sample to learn from: {reason}", path.display())]
    NoSamples {
        /// The file.
        path: PathBuf,
        /// A summary of the outcomes of the file's records.
        reason: String,
    },
    /// Labels that cannot be used.
    #[error("the labels of {} cannot be used: {problem}", path.display())]
    Labels {
        /// The data file that was read last.
        path: PathBuf,
        /// The problem with the labels, and what is required.
        problem: String,
    },
    /// An adapter file that cannot be used.
    #[error("{} is not a usable adapter: {reason}", path.display())]
    AdapterFile {
        /// The file.
        path: PathBuf,
        /// The problem, and what is allowed.
        reason: String,
    },
    /// An adapter for another model.
    #[error(
        "the adapter {}{} does not fit this model: {tensor}: {problem}; use the model that it was trained on",
        path.display(),
        base.as_ref().map_or(String::new(), |base| format!(" (trained on {base})"))
    )]
    AdapterDoesNotFit {
        /// The adapter's folder.
        path: PathBuf,
        /// The model that it was trained on, if the adapter names it.
        base: Option<String>,
        /// The tensor.
        tensor: String,
        /// The mismatch.
        problem: String,
    },
    /// An adapter without some of its tensors.
    #[error(
        "the adapter {}{} is incomplete: according to its adapter_config.json and this model, it should also have \
         {names}; copy it again from its source, or use the model that it was trained on",
        path.display(),
        base.as_ref().map_or(String::new(), |base| format!(" (trained on {base})"))
    )]
    IncompleteAdapter {
        /// The adapter's folder.
        path: PathBuf,
        /// The model that it was trained on, if the adapter names it.
        base: Option<String>,
        /// The first few tensors that are missing.
        names: String,
    },
    /// A weight that becomes NaN or infinite when an adapter is merged into it.
    #[error(
        "{tensor} with the adapter {} has the value {value}: the adapter's values are too large, or its lora_alpha is; \
         train it again with a lower learning rate, or correct its adapter_config.json",
        adapter.display()
    )]
    MergedNotFinite {
        /// The tensor.
        tensor: String,
        /// The adapter's folder.
        adapter: PathBuf,
        /// The value: NaN or infinite.
        value: f32,
    },
    /// Logits that are not finite although the weights are.
    #[error(
        "the model's logits are not finite: its weights are too large for the precision that it computes in; use the \
         model and the adapter of an earlier checkpoint, or another --dtype"
    )]
    LogitsNotFinite,
    /// A trained weight that is NaN or infinite.
    #[error(
        "the trained {tensor} has the value {value} (element {element}): training has diverged, and no result \
         is written; lower the learning rate, and continue from an earlier checkpoint or start over"
    )]
    Diverged {
        /// The tensor.
        tensor: String,
        /// The position of the first such value in the tensor, in row-major order, counted from 0.
        element: usize,
        /// The value: NaN or infinite.
        value: f32,
    },
    /// A weight that a precision cannot represent.
    #[error("{tensor} has the value {value:?}, which {format} cannot hold; use another precision")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The value.
        value: f32,
        /// The precision.
        format: String,
    },
    /// A model or a tokenizer that a GGUF file cannot represent.
    #[error("{} cannot be written as GGUF: {problem}", path.display())]
    Gguf {
        /// The folder or file.
        path: PathBuf,
        /// The problem, and what is allowed.
        problem: String,
    },
    /// A checkpoint of a run with different settings.
    #[error(
        "checkpoint {} was saved by a run with different settings: {differences} (saved -> now); continuing would mix \
         the two runs; give the saved settings, or another folder for --save to start over, or continue anyway with \
         --resume_anyway",
        checkpoint.display()
    )]
    OtherRun {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Each setting that differs, with the saved value and that of this run.
        differences: String,
    },
    /// A checkpoint with more steps than the run.
    #[error(
        "checkpoint {} is at step {steps}, but this run ends at step {total}, and the checkpoint cannot produce a \
         result with fewer steps; give at least as many steps, or another folder for --save to start over",
        checkpoint.display()
    )]
    CheckpointBeyondEnd {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// The number of steps in the checkpoint.
        steps: u64,
        /// The number of steps of the run.
        total: u64,
    },
    /// A run that does not fit into memory in any configuration.
    #[error(
        "this run needs {needed} per rank even with all states in files, but only {available} per rank is available \
         ({}); use a shorter context or a smaller model, or give the job more memory",
        candle_zero::util::counted(*ranks, "rank")
    )]
    NothingFits {
        /// The number of ranks of the job.
        ranks: usize,
        /// The minimum memory of a rank.
        needed: String,
        /// The memory available to a rank.
        available: String,
    },
    /// A pipeline that does not fit into memory.
    #[error(
        "a pipeline of {} needs {needed} per rank, but only {available} per rank is available; use more ranks along \
         the pipeline, a shorter context or a smaller model, or leave out --pipeline, so that states may be put in \
         files",
        candle_zero::util::counted(*ranks, "rank")
    )]
    PipelineTooLarge {
        /// The number of ranks along the pipeline.
        ranks: usize,
        /// The minimum memory of a rank.
        needed: String,
        /// The memory available to a rank.
        available: String,
    },
}

/// Returns the unit that locates the records of a data file: `line` or `row`.
pub(super) fn unit(path: &Path) -> &'static str {
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet")) { "row" } else { "line" }
}

impl From<FinetuneError> for Error {
    fn from(error: FinetuneError) -> Self {
        Self::other(error)
    }
}

/// Returns the end of the message about a tensor whose shape differs from the description. A GGUF file contains its own
/// description.
fn shape_mismatch(file: &Path, description: &Path, shape: &[usize]) -> String {
    if file == description {
        return format!(
            "the file's metadata describes shape {shape:?}; the file is inconsistent; download or convert it again"
        );
    }
    format!("{} describes shape {shape:?}; take both files from the same model", description.display())
}

impl FinetuneError {
    /// Returns the error for tensor `name` of shape `found` in the first file, for which the second file describes
    /// a different shape.
    pub(super) fn not_as_described(
        name: &str,
        [file, description]: [&Path; 2],
        found: &[usize],
        expected: &[usize],
    ) -> Self {
        Self::NotAsDescribed {
            name: name.to_owned(),
            file: file.to_owned(),
            found: found.into(),
            description: description.to_owned(),
            expected: expected.into(),
        }
    }
}
