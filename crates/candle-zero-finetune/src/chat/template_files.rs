//! The chat templates in a model's folder: the default one, and others by name.

use super::tokenizer_files::object;
use crate::error::{Error, Result};
use candle_zero::files;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The maximum size of a template file in bytes.
const MAX_TEMPLATE_BYTES: u64 = 16 << 20;

/// The subfolder of a model's folder for additional templates. Each file is named after its template.
pub(crate) const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";

/// Returns all templates in a model's folder by name; the usual one is named `default`. They are the template in
/// chat_template.jinja (or, if that file is missing, the templates in tokenizer_config.json) and the templates in the
/// folder `additional_chat_templates`.
///
/// # Errors
/// Fails if a file or folder cannot be read, or if tokenizer_config.json is not a JSON object.
pub(crate) fn named_templates(folder: &Path) -> Result<BTreeMap<String, String>> {
    let read = |path: &Path| {
        let wrong = |source| Error::Io { action: "read", path: path.to_owned(), source };
        files::read_text(path, MAX_TEMPLATE_BYTES).map_err(wrong)
    };
    let (default_file, mut named) = (folder.join("chat_template.jinja"), BTreeMap::new());
    if default_file.is_file() {
        named.insert(DEFAULT.to_owned(), read(&default_file)?);
    } else {
        let config = object(&folder.join("tokenizer_config.json"))?;
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        match config.get("chat_template") {
            Some(serde_json::Value::Array(entries)) => {
                let pair = |entry: &serde_json::Value| Some((text(entry.get("name")?)?, text(entry.get("template")?)?));
                named.extend(entries.iter().filter_map(pair));
            }
            Some(serde_json::Value::Object(entries)) => {
                named.extend(entries.iter().filter_map(|(name, template)| Some((name.clone(), text(template)?))));
            }
            one => named.extend(one.and_then(text).map(|template| (DEFAULT.to_owned(), template))),
        }
    }
    for path in additional_templates(folder)? {
        if let Some(name) = path.file_stem().and_then(std::ffi::OsStr::to_str) {
            named.insert(name.to_owned(), read(&path)?);
        }
    }
    Ok(named)
}

const DEFAULT: &str = "default";

/// Returns the additional template files, sorted.
///
/// # Errors
/// Fails if the folder cannot be read.
pub(crate) fn additional_templates(folder: &Path) -> Result<Vec<PathBuf>> {
    let folder = folder.join(ADDITIONAL_TEMPLATES);
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let failed = |source| Error::Io { action: "read", path: folder.clone(), source };
    let entries = std::fs::read_dir(&folder).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path()));
    let mut found: Vec<PathBuf> = entries.collect::<Result<_>>()?;
    found.retain(|path| path.extension().is_some_and(|extension| extension == "jinja") && path.is_file());
    found.sort();
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates_of_a_configuration_are_found_in_all_their_forms() {
        let both = BTreeMap::from([("default", "a"), ("tool_use", "b")].map(|(k, v)| (k.to_owned(), v.to_owned())));
        let found = |templates: serde_json::Value| {
            let folder = tempfile::tempdir().unwrap();
            let config = json!({"chat_template": templates}).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            named_templates(folder.path()).unwrap()
        };
        assert_eq!(found(json!({"default": "a", "tool_use": "b"})), both);
        let list = [json!({"name": "default", "template": "a"}), json!({"name": "tool_use", "template": "b"})];
        assert_eq!(found(json!(list)), both);
        assert_eq!(found(json!("a")), BTreeMap::from([("default".to_owned(), "a".to_owned())]));
    }
}
