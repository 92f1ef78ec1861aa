//! Writes folders of fine-tuning results.

use crate::chat::template_files::{ADDITIONAL_TEMPLATES, additional_templates};
use crate::error::{Error, OutputError, Result};
use candle_zero::checkpoint::{ConsolidatedDtype, create, write_json};
use candle_zero::files::{self, AtomicFolder, free_folder};
use serde_json::Value;
use std::io::Write as _;
use std::path::Path;

/// Creates a temporary folder next to `out`. `out` itself must be absent or empty.
pub(crate) fn new_folder(out: &Path) -> Result<AtomicFolder> {
    let wrong = |action| move |source| Error::Io { action, path: out.to_owned(), source };
    match free_folder(out).map_err(wrong("read"))? {
        Ok(out) => AtomicFolder::create_for(&out).map_err(wrong("create")),
        Err(problem) => Err(OutputError::Refused { path: out.to_owned(), problem: problem.into() }.into()),
    }
}

/// The files that a model's folder may contain in addition to `config.json` and the weights.
pub(crate) const COMPANION_FILES: [&str; 12] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "LICENSE",
];

/// The files of a tokenizer, including its chat template.
pub(crate) const TOKENIZER: &[&str] = COMPANION_FILES.split_at(10).0.split_at(1).1;

/// Writes `config` into the folder `to` as its `config.json`, with the dtype of the weights and without a
/// `quantization_config`, and copies the existing [`COMPANION_FILES`] and additional chat templates there from the
/// folder `from`.
pub(crate) fn write_companion_files(from: &Path, mut config: Value, to: &Path, dtype: ConsolidatedDtype) -> Result<()> {
    if let Some(config) = config.as_object_mut() {
        // The key is called `dtype` in transformers 5, and `torch_dtype` in transformers 4.
        let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        config.insert(key.into(), dtype.names().1.into());
        config.remove("quantization_config");
    }
    write_json(to, "config.json", &config)?;
    copy_files(from, to, &COMPANION_FILES)
}

/// Copies the existing files with these names, and the additional chat templates, from one folder to another.
pub(crate) fn copy_files(from: &Path, to: &Path, names: &[&str]) -> Result<()> {
    const MAX_FILE_BYTES: u64 = 1 << 28;
    let read = |path: &Path| {
        let wrong = |source| Error::Io { action: "read", path: path.to_owned(), source };
        files::read(path, MAX_FILE_BYTES).map_err(wrong)
    };
    let copy = |path: &Path, to: &Path, name: &str| {
        let bytes = read(path)?;
        create(to, name, |file| {
            let wrong = |source| Error::Io { action: "write", path: to.join(name), source };
            file.write_all(&bytes).map_err(wrong)
        })
    };
    for name in names {
        let path = from.join(name);
        if path.is_file() {
            copy(&path, to, name)?;
        }
    }
    let additional = additional_templates(from)?;
    if !additional.is_empty() {
        let to = to.join(ADDITIONAL_TEMPLATES);
        std::fs::create_dir(&to).map_err(|source| Error::Io { action: "create", path: to.clone(), source })?;
        for path in additional {
            copy(&path, &to, &path.file_name().unwrap_or_default().to_string_lossy())?;
        }
    }
    Ok(())
}
