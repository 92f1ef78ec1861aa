//! Errors of fine-tuning: of a model's folder, its tokenizer and template, of data.

use std::path::PathBuf;

/// Errors of fine-tuning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneError {
    /// A file of the tokenizer that cannot be used.
    #[error("{} cannot be used: {reason}; copy the tokenizer's files again from where the model is from", path.display())]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
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
}
