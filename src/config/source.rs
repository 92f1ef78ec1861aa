//! The sources of a configuration, and the functions that load it.

use super::hjson::{self, HjsonError};
use super::json_node::JsonNode;
use super::{Config, ConfigNote, PipelineConfig, RunValues, resolve};
use crate::error::{ConfigError, Error, Result};
use crate::files;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A configuration in any of its forms; see [`Config::load`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConfigSource {
    /// A file of JSON or Hjson text.
    Path(PathBuf),
    /// JSON or Hjson text.
    Text(String),
    /// A JSON value.
    Value(Value),
    /// A configuration that has already been loaded.
    Resolved(Box<Config>),
}

impl Config {
    /// Reads, checks and resolves a configuration for `world_size` ranks.
    ///
    /// `source` is a path, JSON text (a string whose first non-blank character is `{`), a [`serde_json::Value`], or a
    /// `Config`. For a `Config`, only the number of ranks is checked again. Text is parsed as Hjson, as in DeepSpeed:
    /// JSON with comments (`#`, `//`, `/* */`), in which quotes around keys, commas at line ends and, in a file, the
    /// outer braces are optional. Keys without effect in candle-zero are listed in [`Config::notes`].
    ///
    /// # Errors
    /// Fails if the file cannot be read, the text is not Hjson, a key is given twice, or a rule is broken. Messages
    /// give the line and column. Also fails if `world_size` is 0 or differs from that of a `Config`.
    pub fn load(source: impl Into<ConfigSource>, world_size: usize) -> Result<Self> {
        Self::load_for(source, world_size, &RunValues::default())
    }

    /// Does the same as [`Config::load`], with this run's values for `"auto"`.
    ///
    /// # Errors
    /// Fails in the same cases as [`Config::load`].
    pub fn load_for(source: impl Into<ConfigSource>, world_size: usize, run: &RunValues) -> Result<Self> {
        if world_size == 0 {
            return Err(ConfigError::NoRanks.into());
        }
        let (origin, root) = match source.into().open()? {
            OpenedSource::Resolved(config) if config.launched_ranks() == world_size => return Ok(*config),
            OpenedSource::Resolved(config) => {
                return Err(ConfigError::WorldSize { resolved: config.launched_ranks(), world_size }.into());
            }
            OpenedSource::Root(origin, root) => (origin, root),
        };
        resolve::resolve(&root, world_size, run)
            .map_err(|rejection| Error::from(ConfigError::Problems { origin, problems: rejection.problems }))
    }
}

/// A source that has been read.
enum OpenedSource {
    Resolved(Box<Config>),
    /// The name of the source, and its values.
    Root(String, JsonNode),
}

impl ConfigSource {
    fn open(self) -> Result<OpenedSource> {
        let (origin, root) = match self {
            Self::Resolved(config) => return Ok(OpenedSource::Resolved(config)),
            Self::Value(value) => ("the configuration given as a value".to_string(), JsonNode::from_value(&value)),
            Self::Text(text) => {
                let origin = "the configuration given as text".to_string();
                let root = read(&origin, text.as_bytes())?;
                (origin, root)
            }
            Self::Path(path) => {
                let bytes = read_file(&path)?;
                let origin = path.display().to_string();
                let root = read(&origin, &bytes)?;
                (origin, root)
            }
        };
        Ok(OpenedSource::Root(origin, root))
    }

    /// Reads only `pipeline`, which determines the number of ranks that the other sections are resolved for.
    ///
    /// # Errors
    /// Fails if the source cannot be read or the section has problems. Other problems are found when the complete
    /// configuration is read.
    pub(crate) fn pipeline(&self, run: &RunValues) -> Result<PipelineConfig> {
        let (origin, root) = match self.clone().open()? {
            OpenedSource::Resolved(config) => return Ok(config.pipeline),
            OpenedSource::Root(origin, root) => (origin, root),
        };
        let mut problems = resolve::resolve(&root, 1, run).err().map_or(Vec::new(), |rejection| rejection.problems);
        problems.retain(|problem| problem.path == "pipeline" || problem.path.starts_with("pipeline."));
        if problems.is_empty() {
            return Ok(resolve::pipeline_section(&root, run));
        }
        Err(ConfigError::Problems { origin, problems }.into())
    }
}

/// The result of checking a configuration, valid or not.
#[doc(hidden)]
pub struct CheckOutcome {
    /// The notes about the configuration.
    pub notes: Vec<ConfigNote>,
    /// The configuration, or the problems with it.
    pub outcome: Result<Config>,
}

/// Reads, checks and resolves the bytes of a file.
#[doc(hidden)]
pub fn check(path: &Path, bytes: &[u8], world_size: usize, run: &RunValues) -> CheckOutcome {
    let origin = path.display().to_string();
    let root = match read(&origin, bytes) {
        Ok(root) => root,
        Err(error) => return CheckOutcome { notes: Vec::new(), outcome: Err(error) },
    };
    match resolve::resolve(&root, world_size, run) {
        Ok(config) => CheckOutcome { notes: config.notes.clone(), outcome: Ok(config) },
        Err(resolve::ConfigRejection { problems, notes }) => {
            CheckOutcome { notes, outcome: Err(ConfigError::Problems { origin, problems }.into()) }
        }
    }
}

/// Reads a file, up to one byte more than the parser accepts.
#[doc(hidden)]
pub fn read_file(path: &Path) -> Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(hjson::MAX_BYTES as u64 + 1).read_to_end(&mut bytes))
        .map_err(|source| ConfigError::File { path: path.into(), source })?;
    Ok(bytes)
}

/// Reads the values of a file as written, without comments.
#[doc(hidden)]
pub fn read_value(path: &Path) -> Result<Value> {
    Ok(read(&path.display().to_string(), &read_file(path)?)?.to_value())
}

fn read(origin: &str, bytes: &[u8]) -> Result<JsonNode> {
    let origin = origin.to_string();
    hjson::read_object(bytes).map_err(|error| match error {
        HjsonError::Syntax { position, expected, found } => {
            Error::from(ConfigError::Syntax { origin, position, expected, found })
        }
        HjsonError::Duplicate { path, first, second } => {
            Error::from(ConfigError::DuplicateKey { origin, path, first, second })
        }
    })
}

impl From<&str> for ConfigSource {
    fn from(text: &str) -> Self {
        text.to_string().into()
    }
}

impl From<String> for ConfigSource {
    fn from(text: String) -> Self {
        if text.trim_start_matches('\u{feff}').trim_start().starts_with('{') {
            Self::Text(text)
        } else {
            Self::Path(text.into())
        }
    }
}

impl From<&String> for ConfigSource {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl From<&Path> for ConfigSource {
    fn from(path: &Path) -> Self {
        Self::Path(path.into())
    }
}

impl From<PathBuf> for ConfigSource {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl From<&PathBuf> for ConfigSource {
    fn from(path: &PathBuf) -> Self {
        Self::Path(path.clone())
    }
}

impl From<Value> for ConfigSource {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

impl From<Config> for ConfigSource {
    fn from(config: Config) -> Self {
        Self::Resolved(Box::new(config))
    }
}
