//! The name of a model repository, and the selection of its files.

use std::fmt;

/// A model repository: `org/name`, or `org/name@revision` with a branch, tag or commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    name: String,
    revision: String,
}

/// The files of a repository that are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileSelection {
    /// The description, the tokenizer's files and the weights.
    All,
    /// The files of [`All`](Self::All) except the weights.
    WithoutWeights,
}

/// The default revision.
const DEFAULT_REVISION: &str = "main";
/// The maximum length of a name, and of a revision, in bytes.
const MAX_NAME_BYTES: usize = 96;

impl Repository {
    /// Returns the repository that a string names, or `None` if the string can only be a path.
    ///
    /// ```
    /// use candle_zero_finetune::hub::Repository;
    ///
    /// let repository = Repository::parse("HuggingFaceTB/SmolLM2-135M-Instruct@v1").unwrap();
    /// assert_eq!((repository.name(), repository.revision()), ("HuggingFaceTB/SmolLM2-135M-Instruct", "v1"));
    /// assert!(Repository::parse("./models/llama").is_none());
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let (organization, model) = name.split_once('/')?;
        let is_name = [organization, model].into_iter().all(is_part) && name.len() <= MAX_NAME_BYTES;
        let is_revision = revision.split('/').all(is_part) && revision.len() <= MAX_NAME_BYTES;
        (is_name && is_revision).then(|| Self { name: name.into(), revision: revision.into() })
    }

    /// Returns `org/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the branch, tag or commit, which is `main` by default.
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.revision == DEFAULT_REVISION { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Returns whether a string may be a component of a name. Such a component is also safe as a file or folder name and in
/// an address.
pub(super) fn is_part(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !text.is_empty() && text.bytes().all(is_letter) && !text.starts_with(['.', '-']) && !text.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_repository_is_told_from_what_can_only_be_a_path() {
        let parsed = |text: &str| Repository::parse(text).map(|found| (found.name, found.revision));
        let is = |name: &str, revision: &str| Some((name.to_string(), revision.to_string()));
        assert_eq!(parsed("Qwen/Qwen3-0.6B"), is("Qwen/Qwen3-0.6B", "main"));
        assert_eq!(parsed("a/b@refs/pr/1"), is("a/b", "refs/pr/1"));
        assert_eq!(parsed("a/b@0123abc"), is("a/b", "0123abc"));
        for path in [
            "", "gpt2", "/a/b", "a/b/c", "./a", "../a", "a/", "a/..", "a/b@", "a/b@../c", "a b/c", "a/b@/x", "a/é",
            "~/b",
        ] {
            assert_eq!(parsed(path), None, "{path}");
        }
        assert_eq!(parsed(&format!("a/{}", "b".repeat(200))), None);
    }
}
