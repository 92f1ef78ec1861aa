//! What a run needs before there is an engine: the model's description, its tokenizer, its data.

use super::base::Base;
use super::cache::default_cache;
use super::dataset::{DataOptions, DataProgress, Dataset, Task};
use super::error::FinetuneError;
use super::options::{Held, Method, Objective, Options, misused, refused};
use super::pack::Packing;
use super::source::Source;
use super::template::Template;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use crate::files::free_folder;
use crate::models::DecoderConfig;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens of a row, where nothing else is said and the model's context has as many.
const USUAL_CTX: usize = 1024;

/// A run whose options, model and data were looked at, and are in order. No weight is in memory yet.
#[derive(Debug)]
pub struct Prepared {
    pub(super) options: Options,
    pub(super) base: Base,
    /// That of the base, with adapters and the rows' length.
    pub(super) config: DecoderConfig,
    pub(super) tokenizer: Tokenizer,
    pub(super) template: Option<Template>,
    pub(super) training: Arc<Dataset>,
    pub(super) validation: Option<Arc<Dataset>>,
}

impl Prepared {
    /// Looks at the options, opens the model, and tokenizes the data, or maps what was tokenized before. `progress` is told
    /// how far a data file is.
    ///
    /// # Errors
    /// Options that make no run; those of [`Base::open`], [`Tokenizer::open`], [`Template::open`] and
    /// [`Dataset::prepare`]; a folder for the result that is not empty.
    pub fn new(options: Options, progress: &mut dyn FnMut(DataProgress)) -> Result<Self> {
        options.check()?;
        if !(options.is_resumed() && options.is_result(&options.out)) {
            check_out(&options)?;
        }
        let base = Base::open(&options.model)?;
        let tokenizer = Tokenizer::open(base.folder())?;
        base.check_tokens(tokenizer.vocab_size())?;
        let template = match Template::open(base.folder(), &tokenizer) {
            Err(Error::Finetune(FinetuneError::NoTemplate { .. })) => None,
            found => Some(found?),
        };
        let longest = base.config().ctx;
        let ctx = options.ctx.unwrap_or(USUAL_CTX.min(longest));
        if ctx > longest {
            return Err(refused("--ctx", ctx, format!("2 to {longest}, the model's context")));
        }
        let config = DecoderConfig {
            ctx,
            lora: options.method.lora().cloned(),
            checkpoint_activations: options.recompute.unwrap_or(false),
            ..base.config().clone()
        };
        let cache = options.cache.clone().map_or_else(default_cache, Ok)?;
        let mut prepare = |sources: &[Source]| {
            let task = match options.objective {
                Objective::Generate => Task::Generate,
                Objective::Prefer { .. } => Task::Prefer,
            };
            let data =
                DataOptions { overlong: options.overlong, strict: options.strict, ..DataOptions::new(task, ctx) };
            Dataset::prepare(sources, &tokenizer, template.as_ref(), &data, &cache, progress)
        };
        let training = prepare(&options.data)?;
        let (training, validation) = match &options.validation {
            None => (training, None),
            Some(Held::Files(files)) => {
                let validation = prepare(files)?;
                (training, Some(validation))
            }
            Some(Held::Part(part)) => {
                let (samples, percent) = (training.len(), part * 100.0);
                let (training, validation) = training.split(*part, options.seed);
                if training.is_empty() || validation.is_empty() {
                    let nothing = if training.is_empty() { "train on" } else { "validate with" };
                    let why = format!(
                        "takes {percent}% of {samples} samples, which leaves none to {nothing}: give another part, or files"
                    );
                    return Err(misused("--val", why));
                }
                (training, Some(validation))
            }
        };
        let validation = validation.map(Arc::new);
        Ok(Self { options, base, config, tokenizer, template, training: Arc::new(training), validation })
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The model.
    pub fn base(&self) -> &Base {
        &self.base
    }

    /// The description of the model that is trained: the base's, with adapters and a context of a row's length.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The model's chat template, if it has one.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// The data that is trained on.
    pub fn training(&self) -> &Dataset {
        &self.training
    }

    /// The data that the model is validated with.
    pub fn validation(&self) -> Option<&Dataset> {
        self.validation.as_deref()
    }

    pub(super) fn packing(&self) -> Packing {
        let packed = self.options.packing && self.training.group() == 1;
        if packed { Packing::Packed { ctx: self.config.ctx } } else { Packing::Padded }
    }

    /// What fills rows up.
    pub(super) fn pad(&self) -> u32 {
        let ids = ["pad_token", "eos_token"].map(|name| self.tokenizer.special_id(name));
        ids.into_iter().flatten().next().unwrap_or(0)
    }
}

impl Options {
    /// Whether the run may go on from a checkpoint.
    pub(super) fn is_resumed(&self) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.resume)
    }

    /// Whether a folder has what a run with this method leaves.
    pub(super) fn is_result(&self, folder: &Path) -> bool {
        folder.join(if self.method == Method::Full { "config.json" } else { "adapter_config.json" }).is_file()
    }

    /// The folder for the model of the best validation: that of the result, with `-best` behind its name.
    pub fn best(&self) -> PathBuf {
        let mut name = self.out.file_name().unwrap_or_default().to_os_string();
        name.push("-best");
        self.out.with_file_name(name)
    }
}

/// Refuses a folder for the result that is not empty, now rather than after hours of training.
fn check_out(options: &Options) -> Result<()> {
    let out = &options.out;
    let refuse = |problem: &str| Err(FinetuneError::Output { path: out.clone(), problem: problem.into() }.into());
    if out.file_name().is_none() {
        return refuse("it has no name");
    }
    match free_folder(out).map_err(|source| Error::Io { action: "read", path: out.clone(), source })? {
        Ok(_) => Ok(()),
        Err(problem) => refuse(problem),
    }
}
