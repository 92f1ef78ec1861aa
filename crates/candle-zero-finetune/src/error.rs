//! Errors of fine-tuning: of a model's folder, its tokenizer and template, of data.

pub use candle_zero::error::{
    CheckpointError, ConfigError, Error, LoraError, ModelError, OutputError, ParamError, Result,
};
use std::path::{Path, PathBuf};

/// Errors of fine-tuning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneError {
    /// A value of an option.
    #[error("{flag} is {found}, but must be {allowed}")]
    Option {
        /// The option, as the command has it.
        flag: &'static str,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// An option that does not go with the others.
    #[error("{flag} {problem}")]
    OptionUse {
        /// The option, as the command has it.
        flag: &'static str,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A path under which there is no model.
    #[error(
        "{} is no model: {reason}; give a folder with config.json and safetensors files, as Hugging Face has them, or a \
         GGUF file",
        path.display()
    )]
    NoModel {
        /// The path.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A folder for classifying that was not trained for it.
    #[error(
        "{} is not a trained classifier: its files lack {tensor}; train one with zerorun finetune {} --task classify --data \
         FILE --out DIR",
        path.display(), path.display()
    )]
    NoClassifier {
        /// The folder.
        path: PathBuf,
        /// A tensor that a classifier needs.
        tensor: String,
    },
    /// A text that has no label.
    #[error("cannot tell the label of the text: {reason}")]
    Unclassified {
        /// What is wrong.
        reason: String,
    },
    /// A model of which a part is read.
    #[error(
        "{} has a model for images and texts, of which only the language model is read here: it answers, but what training or \
         merging would write were not the model that its config.json describes; take the language model on its own; \
         transformers writes it so: whole = Gemma3ForConditionalGeneration.from_pretrained(MODEL, dtype=\"auto\"); text = \
         Gemma3ForCausalLM(whole.config.text_config); text.model = whole.model.language_model; text.tie_weights(); \
         text.save_pretrained(DIR); the tokenizer's files belong beside it",
        path.display()
    )]
    MoreThanText {
        /// The model's folder.
        path: PathBuf,
    },
    /// A model that cannot learn to classify.
    #[error(
        "{} {found}; --task classify takes the folder of a BERT (model_type \"bert\") in Hugging Face's format, with any head \
         or none; a language model is fine-tuned without it",
        path.display()
    )]
    NoEncoder {
        /// The folder.
        path: PathBuf,
        /// What it has.
        found: String,
    },
    /// A tensor of another shape than the description says.
    #[error(
        "tensor {name} in {} has shape {found:?}, and {} describes one of {expected:?}; take both files from one model",
        file.display(), description.display()
    )]
    NotAsDescribed {
        /// The tensor, as the model calls it.
        name: String,
        /// The file of weights.
        file: PathBuf,
        /// Its shape there.
        found: Box<[usize]>,
        /// The file of the description.
        description: PathBuf,
        /// The shape by the description.
        expected: Box<[usize]>,
    },
    /// More tokens than rows of the embedding.
    #[error(
        "the tokenizer has ids up to {last}, and the model's embedding has {rows} rows: {beyond} ids have none; take the \
         tokenizer that belongs to the model"
    )]
    TokensBeyondEmbedding {
        /// The largest id.
        last: usize,
        /// Rows of the embedding.
        rows: usize,
        /// Ids without a row.
        beyond: usize,
    },
    /// A GGUF file that cannot be read.
    #[error("{} is not a GGUF file that can be read: {reason}", path.display())]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A value of a GGUF file's metadata that no model here computes with.
    #[error("{}: {key} is {found}, but must be {allowed}", path.display())]
    GgufValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A tensor of a GGUF file in a format that is not read.
    #[error("tensor {name} in {} is of type {found}; read are {allowed}", path.display())]
    GgufDtype {
        /// The file.
        path: PathBuf,
        /// The tensor, as the file calls it.
        name: String,
        /// Its type.
        found: String,
        /// Those that are read.
        allowed: &'static str,
    },
    /// A file of the tokenizer that cannot be used.
    #[error("{} cannot be used: {reason}; copy the tokenizer's files again from where the model is from", path.display())]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A model without a tokenizer.
    #[error(
        "{} has no tokenizer: {found}; save one there with transformers, \
         AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and tokenizer_config.json from \
         where the model is from",
        folder.display()
    )]
    NoTokenizer {
        /// The model's folder.
        folder: PathBuf,
        /// What is there instead.
        found: String,
    },
    /// A special token that the tokenizer does not know.
    #[error(
        "{name} is {token:?}, which tokenizer.json does not have; take tokenizer.json and tokenizer_config.json of one model"
    )]
    UnknownSpecialToken {
        /// Its key in tokenizer_config.json.
        name: String,
        /// Its text.
        token: String,
    },
    /// A text that the tokenizer refuses.
    #[error("the tokenizer cannot encode a text of {bytes} bytes: {reason}")]
    Encode {
        /// Its length.
        bytes: usize,
        /// The tokenizer's reason.
        reason: String,
    },
    /// Ids that the tokenizer refuses.
    #[error("the tokenizer cannot decode: {reason}")]
    Decode {
        /// The tokenizer's reason.
        reason: String,
    },
    /// Chat data for a model without a chat template.
    #[error(
        "{} has no chat template, neither in tokenizer_config.json nor as chat_template.jinja, and chat data needs \
         one; copy the file from an instruction-tuned model with the same special tokens, or use prompt/completion data",
        folder.display()
    )]
    NoTemplate {
        /// The model's folder.
        folder: PathBuf,
    },
    /// A chat template that is not Jinja.
    #[error("the chat template cannot be read: {reason}")]
    TemplateSyntax {
        /// The parser's reason, with the line.
        reason: String,
    },
    /// A chat template that goes on and on, or writes more than any conversation needs.
    #[error(
        "{template} does not end, or writes more than 128 MiB{}; take another one, as the published one of the model",
        line.map_or(String::new(), |line| format!(" (line {line} of the template)"))
    )]
    TemplateWithoutEnd {
        /// The template and its file.
        template: String,
        /// The line in which it was stopped.
        line: Option<usize>,
    },
    /// A conversation that the chat template does not render.
    #[error("the chat template refuses the conversation: {reason}")]
    TemplateRefuses {
        /// Its own message, or the renderer's.
        reason: String,
    },
    /// Text of the assistant whose place in the rendered text is not certain.
    #[error(
        "where message {message} (of the assistant) stands in the rendered text is not certain: {reason}; write \
         {{% generation %}} before and {{% endgeneration %}} after what the assistant says, its end token included, in a \
         copy of the chat template"
    )]
    Spans {
        /// Its number in the conversation, from 1.
        message: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// Generation markers of a chat template that do not enclose text.
    #[error(
        "the {{% generation %}} markers of the chat template do not enclose whole stretches of its text; write one pair \
         around each answer, outside of loops over its pieces, and no private character (U+10FFFC, U+10FFFD) in data"
    )]
    GenerationMarkers,
    /// A conversation that has not the form of one.
    #[error(
        "the conversation is not a list of messages with role and content: {reason}; write \
         [{{\"role\": \"user\", \"content\": \"...\"}}, {{\"role\": \"assistant\", \"content\": \"...\"}}]"
    )]
    Conversation {
        /// What is wrong.
        reason: String,
    },
    /// Nothing to be continued.
    #[error("the prompt has no tokens, and a model continues at least one; give a text")]
    EmptyPrompt,
    /// A prompt that leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens, and the model's context {ctx}, which is to have the answer too; give a shorter one"
    )]
    LongPrompt {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of the context.
        ctx: usize,
    },
    /// A number of the choice of tokens.
    #[error("{name} is {found}, but must be {allowed}")]
    Sampling {
        /// Its name.
        name: &'static str,
        /// The number.
        found: String,
        /// The allowed ones.
        allowed: &'static str,
    },
    /// A weight of a data file that cannot be used.
    #[error("the weight of {text} must be above 0 and at most 1000, as in data.jsonl:2.5")]
    Weight {
        /// The argument.
        text: String,
    },
    /// A data file of an unknown kind.
    #[error(
        "{} is of a kind that cannot be read; allowed are .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt and \
         .md: rename or convert it",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A data file of which the records cannot be told apart.
    #[error("{} cannot be read: {problem}", path.display())]
    DataFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A Parquet file that cannot be read.
    #[error("{} cannot be read as Parquet: {problem}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// No folder for tokenized samples.
    #[error("there is no folder for tokenized samples: neither XDG_CACHE_HOME nor HOME is set; give one with --cache")]
    NoCache,
    /// A record that cannot be used, where that is to stop.
    #[error(
        "{unit} {line} of {} cannot be used: {reason}; correct it, or leave out --strict to skip such {unit}s",
        path.display(),
        unit = unit(path)
    )]
    Record {
        /// The file.
        path: PathBuf,
        /// The line in which the record begins, or its row.
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// A data file of which many records cannot be used.
    #[error(
        "{skipped} of {} records of {} are skipped: {why}; correct them, or give --allow_skipped to learn from the others",
        records,
        path.display()
    )]
    Skipped {
        /// The file.
        path: PathBuf,
        /// Records that cannot be used, or have nothing to be learned.
        skipped: u64,
        /// All records.
        records: u64,
        /// What is wrong with them.
        why: String,
    },
    /// A data file of which nothing can be learned.
    #[error("{} has no sample to learn from: {reason}", path.display())]
    NoSamples {
        /// The file.
        path: PathBuf,
        /// What became of its records.
        reason: String,
    },
    /// Labels that cannot be learned.
    #[error("the labels of {} cannot be learned: {problem}", path.display())]
    Labels {
        /// The last data file.
        path: PathBuf,
        /// What is wrong with them, and what is needed.
        problem: String,
    },
    /// A file of an adapter that cannot be used.
    #[error("{} is not an adapter that can be used: {reason}", path.display())]
    AdapterFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what is allowed.
        reason: String,
    },
    /// An adapter for another model.
    #[error(
        "the adapter {}{} is not one for this model: {tensor}: {problem}; take the model that it was trained on",
        path.display(),
        base.as_ref().map_or(String::new(), |base| format!(" (trained on {base})"))
    )]
    AdapterDoesNotFit {
        /// The adapter's folder.
        path: PathBuf,
        /// The model that it was trained on, where it says so.
        base: Option<String>,
        /// The tensor.
        tensor: String,
        /// What does not fit.
        problem: String,
    },
    /// An adapter without some of its tensors.
    #[error(
        "the adapter {}{} is not whole: by its adapter_config.json and this model it should have {names} too; copy it again \
         from where it is from, or take the model that it was trained on",
        path.display(),
        base.as_ref().map_or(String::new(), |base| format!(" (trained on {base})"))
    )]
    IncompleteAdapter {
        /// The adapter's folder.
        path: PathBuf,
        /// The model that it was trained on, where it says so.
        base: Option<String>,
        /// The first few tensors that are missing.
        names: String,
    },
    /// A weight that is no number any more when an adapter is merged into it.
    #[error(
        "{tensor} with the adapter {} has the value {value}: the adapter's values or its lora_alpha are too large; train it \
         again with a lower learning rate, or correct its adapter_config.json",
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
    /// Logits that are no numbers, of weights that are.
    #[error(
        "the model's logits are not finite: its weights are too large for what it computes with; take the model and the \
         adapter from an earlier checkpoint, or another --dtype"
    )]
    LogitsNotFinite,
    /// A trained weight that is no number.
    #[error(
        "the trained {tensor} has the value {value} (element {element}): the last steps have diverged, and no result is \
         written; lower the learning rate, and continue from an earlier checkpoint or start anew"
    )]
    Diverged {
        /// The tensor.
        tensor: String,
        /// The place of the first such value in it, row by row, from 0.
        element: usize,
        /// The value: NaN or infinite.
        value: f32,
    },
    /// A weight that a precision cannot hold.
    #[error("{tensor} has the value {value:?}, which {format} cannot hold; take another precision")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The value.
        value: f32,
        /// The precision.
        format: String,
    },
    /// A model or a tokenizer that a GGUF file cannot hold.
    #[error("{} cannot be written as GGUF: {problem}", path.display())]
    Gguf {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong, and what is allowed.
        problem: String,
    },
    /// A checkpoint of a run with other settings.
    #[error(
        "checkpoint {} was saved by a run with other settings: {differences} (saved -> now); continued so, the result would \
         be neither run's; give the saved settings, or another folder for --save to start anew, or continue all the same with \
         --resume_anyway",
        checkpoint.display()
    )]
    OtherRun {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Each setting that differs, with the saved value and that of this run.
        differences: String,
    },
    /// A checkpoint behind the last step of the run.
    #[error(
        "checkpoint {} has {made} steps made, and this run is to have {total} in all: a result of fewer steps cannot be made \
         from it; give at least as many steps, or another folder for --save to start anew",
        checkpoint.display()
    )]
    StepsMade {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Steps that it has.
        made: u64,
        /// Steps of the run.
        total: u64,
    },
    /// A run for which there is not enough memory in any way.
    #[error(
        "this run needs {needed} a rank even with all states in files, and {had} are available to each of {ranks}; take a \
         shorter context or a smaller model, or give the job more memory"
    )]
    NothingFits {
        /// Ranks of the job.
        ranks: usize,
        /// The least memory of a rank.
        needed: String,
        /// What is available to a rank.
        had: String,
    },
}

/// What the records of a data file are known by.
pub(super) fn unit(path: &Path) -> &'static str {
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet")) { "row" } else { "line" }
}

impl From<FinetuneError> for Error {
    fn from(error: FinetuneError) -> Self {
        Self::other(error)
    }
}

impl FinetuneError {
    /// The error about tensor `name` of shape `found` in the first file, of which the second one says another shape.
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
