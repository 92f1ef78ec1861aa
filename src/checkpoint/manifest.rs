//! The manifest: the description of a checkpoint, as JSON with its own checksum as the last entry.

use super::rank_file_layout::{BLOCK, PAGE, RankFileLayout};
use crate::error::{CheckpointError, Error, Result};
use crate::files::read_text;
use crate::layout::{ExpertPlacement, ShardCut};
use crate::util::counted;
use crate::zero::share::state_access::WEIGHTS;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use twox_hash::XxHash3_64;

/// The name of the manifest in the folder of a tag.
pub(super) const MANIFEST: &str = "manifest.json";

pub(super) const FORMAT: &str = "candle-zero checkpoint";

/// The format version that is written. Version 1 had no buffers, blocks, frozen parameters, predecessors, learning
/// rates set by the user, or rounding seed; its readers reject unknown fields. Version 3 is written only
/// for a pipeline of several ranks and for islands, version 4 only with factored states, and version 5 only with
/// experts that are divided among ranks.
pub(super) const VERSION: u32 = 2;
pub(super) const PIPELINE_VERSION: u32 = 3;
/// The version of a checkpoint with factored states.
pub(super) const FACTORED_VERSION: u32 = 4;

/// The version of a checkpoint with experts that are divided among ranks.
pub(super) const EXPERT_VERSION: u32 = 5;

/// The oldest format version that is read.
const OLDEST_VERSION: u32 = 1;

/// The content of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Manifest {
    pub(super) format: String,
    pub(super) version: u32,
    /// The tag.
    pub tag: String,
    /// Whether the user chose the tag. Automatic tags are named `global_stepN`, and
    /// [`SaveOptions::keep`](crate::checkpoint::SaveOptions::keep) limits their number.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_named: bool,
    /// The checkpoint in the same folder that the run had saved or loaded before this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,
    /// The number of ranks that saved the checkpoint.
    pub world_size: usize,
    /// The number of ranks along the pipeline that saved the checkpoint; 1 without a pipeline.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_ranks: usize,
    /// The island's progress through its local steps, if its ranks took any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub islands: Option<IslandProgress>,
    /// The ZeRO stage at which the checkpoint was saved. Loading does not depend on it.
    pub stage: u8,
    /// The precision of the model's parameters. The files contain f32.
    pub dtype: String,
    /// The number of optimizer steps, including skipped ones.
    pub global_steps: u64,
    /// The number of optimizer steps that changed nothing.
    pub skipped_steps: u64,
    /// The number of samples that all ranks together have trained on.
    pub global_samples: u64,
    /// The state of the loss scale, with fp16.
    pub scaler: Option<crate::precision::ScalerState>,
    /// The number of updates that the optimizer states have received.
    pub optimizer_steps: u64,
    /// The number of applied optimizer steps minus 1, as DeepSpeed's schedulers count.
    pub last_batch_iteration: i64,
    /// The learning rates set with [`Engine::set_lr`](crate::Engine::set_lr), by parameter group; `None` if those of the
    /// configuration or the schedule were in effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set_lr: Option<Vec<f64>>,
    /// The seed for stochastic rounding, if states were rounded stochastically.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding_seed: Option<u64>,
    /// The type of the optimizer.
    pub optimizer: Option<String>,
    /// The kinds of states in the files, all f32: `fp32` (the parameters), then the optimizer states.
    pub states: Vec<String>,
    /// The names and shapes of parameters, in the order of the files.
    pub parameters: Vec<Parameter>,
    /// The files, one for each rank. The list is empty until they are written.
    pub files: Vec<FileEntry>,
    /// The file with the model's buffers, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffers: Option<BufferFile>,
    /// The resolved configuration, with DeepSpeed's names.
    pub config: Value,
    /// The client state.
    pub client_state: Value,
}

/// The progress of an island between two exchanges.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct IslandProgress {
    /// The number of islands, each of which has saved its own checkpoint.
    pub islands: usize,
    /// A random number that the checkpoints of all islands have in common.
    pub save: u64,
    /// `local_steps.steps`, `local_steps.fragments` and `local_steps.fragment_delay`.
    pub schedule: [u64; 3],
    /// For each fragment, the number of samples that the island has trained on since the fragment's last exchange.
    pub samples: Vec<u64>,
    /// The fragments that have been sent and have not yet taken effect. Their mean changes are among the states.
    pub in_flight: Vec<usize>,
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Parameter {
    /// The name.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The states of the parameter in the files, if these are not all the states that the manifest names. A frozen
    /// parameter has only weights, and a parameter that was left out has no states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub states: Option<Vec<String>>,
    /// The number of consecutive elements that stay in one file, for states that are quantized in blocks; 0 without
    /// blocks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub block: u64,
    /// The number of updates before the first one of this parameter, if it was frozen until then.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub updates_before: u64,
    /// The number of elements of states that do not have one for each element of the parameter, such as the sums over
    /// rows and columns of Adafactor.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub state_lens: BTreeMap<String, u64>,
    /// The position in the pipeline of the ranks that saved the parameter.
    #[serde(default, skip_serializing_if = "is_first")]
    pub pipeline_rank: usize,
    /// With expert parallelism, the position of the ranks that saved the parameter of an expert, and the number of
    /// positions. The number of each of these ranks modulo the second value equals the first value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert: Option<[usize; 2]>,
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

fn is_first(position: &usize) -> bool {
    *position == 0
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileEntry {
    /// The name in the folder of the tag.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The number of bytes before the data: the safetensors header, which contains the checksums of the data.
    pub header_bytes: u64,
    /// XXH3 (64 bits) of the header, in hexadecimal.
    pub header_checksum: String,
    /// The host that wrote the file, if each host has its own folder (`checkpoint.use_node_local_storage`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// The file with the buffers of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct BufferFile {
    /// The name in the folder of the tag.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// XXH3 (64 bits) of the complete file, in hexadecimal.
    pub checksum: String,
}

impl FileEntry {
    /// Returns the message for the case in which the file is missing, with advice.
    pub(super) fn missing(&self) -> String {
        match &self.host {
            None => "the file is missing; load another tag".into(),
            Some(host) => format!(
                "the file is missing here: host {host} wrote it to its own folder; copy it from there to this folder, \
                 or load another tag"
            ),
        }
    }
}

impl Parameter {
    /// Returns whether the files contain a state of this parameter.
    pub fn has(&self, state: &str) -> bool {
        self.states.as_ref().is_none_or(|states| states.iter().any(|name| name == state))
    }

    /// Returns the number of elements. It cannot overflow in a manifest that has been read.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns how the parameter is divided among the ranks' files.
    pub(super) fn cut(&self) -> ShardCut {
        ShardCut {
            numel: self.numel(),
            block: usize::try_from(self.block).unwrap_or(usize::MAX).max(1),
            expert: self.expert.map(|[position, size]| ExpertPlacement { position, size }),
        }
    }

    fn checked_numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim))
    }
}

/// The maximum size of a header in bytes. Headers are read into memory. Even the header of a 60 TB file is
/// smaller.
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// The maximum size of a manifest in bytes: about ten times that of a manifest with 100,000 parameters. Manifests are
/// read into memory.
pub(super) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Returns the name of a checkpoint that was saved without a tag.
pub(super) fn automatic_tag(global_steps: u64) -> String {
    format!("global_step{global_steps}")
}

/// Returns the name of a rank's file.
pub(super) fn file_name(rank: usize, world_size: usize) -> String {
    format!("rank_{rank:05}_of_{world_size:05}.safetensors")
}

impl Manifest {
    /// Returns the manifest of one of several islands.
    pub(crate) fn of_island(self, progress: IslandProgress) -> Self {
        Self { version: self.version.max(PIPELINE_VERSION), islands: Some(progress), ..self }
    }

    /// Returns the text of the manifest file.
    pub(super) fn to_text(&self) -> String {
        let body = serde_json::to_string_pretty(self)
            .unwrap_or_else(|e| unreachable!("strings and numbers are valid JSON: {e}"));
        let body = body.strip_suffix("\n}").unwrap_or_else(|| unreachable!("an object ends with its brace"));
        format!("{body}{}", ending(body))
    }

    /// Reads and checks the manifest at `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: path.to_owned(), problem });
        let text = match read_text(path, MAX_MANIFEST_BYTES) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(wrong("there is no such file, so there is no checkpoint; give another tag".into()));
            }
            Err(e) => return Err(wrong(format!("{e}; make it readable, or load another tag"))),
        };
        Self::parse(&text).map_err(wrong)
    }

    /// Returns an error for a text that is too long to be read again.
    pub(super) fn check_length(text: &str) -> std::result::Result<(), String> {
        let bytes = text.len() as u64;
        let problem = || format!("it has {bytes} bytes, but only {MAX_MANIFEST_BYTES} are read");
        if bytes <= MAX_MANIFEST_BYTES { Ok(()) } else { Err(problem()) }
    }

    /// Returns whether the tag was chosen automatically, from the step.
    pub(super) fn is_automatic(&self) -> bool {
        !self.is_named && self.tag == automatic_tag(self.global_steps)
    }

    /// Parses and checks a manifest. The error describes the problem.
    pub(super) fn parse(text: &str) -> std::result::Result<Self, String> {
        let damaged = |problem: &str| format!("it is damaged: {problem}; load another tag");
        let checksum_start =
            text.rfind(",\n  \"checksum\": ").ok_or_else(|| damaged("it does not end with a checksum"))?;
        let (body, end) = text.split_at(checksum_start);
        let json: std::result::Result<Value, _> = serde_json::from_str(&format!("{body}\n}}"));
        let version = json.as_ref().ok().and_then(|v| v["version"].as_u64());
        if end != ending(body) {
            return Err(damaged("its checksum does not match"));
        }
        if let Some(version) = version.filter(|v| !(u64::from(OLDEST_VERSION)..=u64::from(EXPERT_VERSION)).contains(v))
        {
            return Err(format!(
                "its format version is {version}, but this program reads versions {OLDEST_VERSION} to {EXPERT_VERSION}; load it with \
                 the release that wrote it"
            ));
        }
        let manifest: Self = json.and_then(serde_json::from_value).map_err(|e| damaged(&e.to_string()))?;
        manifest.check().map_err(|problem| damaged(&problem))?;
        Ok(manifest)
    }

    /// Checks that the content is plausible: sizes that match, and one file for each rank, all inside the folder.
    fn check(&self) -> std::result::Result<(), String> {
        let require = |ok: bool, problem: String| if ok { Ok(()) } else { Err(problem) };
        require(self.format == FORMAT, format!("its format is {:?}, not {FORMAT:?}", self.format))?;
        let states_are_named = self.states.first().is_some_and(|s| s == WEIGHTS);
        require(states_are_named, format!("its states are {:?}, but the first must be {WEIGHTS:?}", self.states))?;
        let ranks = self.files.len();
        require(
            self.world_size > 0 && ranks == self.world_size,
            format!("it lists {} for {}", counted(ranks, "file"), counted(self.world_size, "rank")),
        )?;
        let pipeline_ranks = self.pipeline_ranks;
        require(
            pipeline_ranks > 0 && self.world_size.is_multiple_of(pipeline_ranks),
            format!(
                "it has {} along a pipeline but {} in total",
                counted(pipeline_ranks, "rank"),
                counted(self.world_size, "rank")
            ),
        )?;
        let stray = self.parameters.iter().find(|p| p.pipeline_rank >= pipeline_ranks);
        require(
            stray.is_none(),
            format!(
                "it has a parameter at position {} in a pipeline of {pipeline_ranks}",
                stray.map_or(0, |p| p.pipeline_rank)
            ),
        )?;
        let pieces = self.world_size / pipeline_ranks;
        let is_possible = |[position, size]: &[usize; 2]| position < size && pieces.is_multiple_of(*size);
        let stray = self.parameters.iter().find_map(|p| p.expert.filter(|expert| !is_possible(expert)));
        if let Some([position, size]) = stray {
            return Err(format!("it has an expert at position {position} of {size} on {}", counted(pieces, "rank")));
        }
        // Counters must have room to increase, and must be exact in f64.
        let counters = [self.global_steps, self.skipped_steps, self.global_samples, self.optimizer_steps];
        let next = self.last_batch_iteration.checked_add(1).and_then(|n| u64::try_from(n).ok());
        let are_possible = counters.into_iter().chain([next.unwrap_or(u64::MAX)]).all(|n| n < 1 << 53);
        require(
            are_possible && self.skipped_steps <= self.global_steps,
            "its counters of steps and samples are invalid".into(),
        )?;
        let scale = self.scaler.as_ref().map_or(1.0, |scaler| scaler.scale);
        require(scale.is_finite() && scale > 0.0, format!("its loss scale is {scale}"))?;
        let rates = self.set_lr.iter().flatten();
        require(
            rates.into_iter().all(|lr| (0.0..f64::INFINITY).contains(lr)),
            "its learning rates are invalid".into(),
        )?;
        for p in &self.parameters {
            let states = p.states.as_ref().unwrap_or(&self.states);
            let are_known =
                (states.is_empty() || p.has(WEIGHTS)) && states.iter().all(|state| self.states.contains(state));
            let are_known = are_known && p.updates_before <= self.optimizer_steps && p.block < 1 << 20;
            require(
                are_known,
                format!("{} has the states {states:?}, but only {:?} are possible", p.name, self.states),
            )?;
            // There are at most as many rows, and as many columns, as elements.
            let max_len = p.checked_numel().map_or(u64::MAX, |numel| numel as u64);
            let invalid = p
                .state_lens
                .iter()
                .find(|(state, len)| **state == WEIGHTS || !states.contains(state) || **len > max_len);
            let description = || {
                invalid.map_or(String::new(), |(state, len)| format!("{} of state {state}", counted(*len, "element")))
            };
            require(invalid.is_none(), format!("{} has {}", p.name, description()))?;
        }
        let mut sum = 0u64;
        for p in &self.parameters {
            let bytes = p.checked_numel().and_then(|n| (n as u64).checked_mul(4 * self.states.len() as u64));
            sum = bytes
                .and_then(|bytes| sum.checked_add(bytes))
                .ok_or_else(|| format!("shape {:?} of {} is larger than any memory", p.shape, p.name))?;
        }
        sum.checked_add(self.world_size as u64 * MAX_HEADER_BYTES).ok_or("its files are larger than any disk")?;
        if let Some(BufferFile { name, .. }) = &self.buffers {
            let is_of_the_folder = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
            require(is_of_the_folder, format!("the file of its buffers is named {name:?}"))?;
        }
        let layout = self.layout();
        for (rank, file) in self.files.iter().enumerate() {
            let name = file_name(rank, self.world_size);
            require(file.name == name, format!("the file of rank {rank} is named {:?}, not {name:?}", file.name))?;
            let max_bytes = self.max_header_bytes(layout.bytes(rank)).min(MAX_HEADER_BYTES);
            let header_is_possible =
                (8..max_bytes).contains(&file.header_bytes) && file.header_bytes.is_multiple_of(PAGE as u64);
            require(header_is_possible, format!("{name} has a header of {}", counted(file.header_bytes, "byte")))?;
            let bytes = file.header_bytes.checked_add(layout.bytes(rank));
            require(
                bytes == Some(file.bytes),
                format!(
                    "{name} has {}, but the shapes of its parameters need {}",
                    counted(file.bytes, "byte"),
                    bytes.unwrap_or(u64::MAX)
                ),
            )?;
        }
        Ok(())
    }

    /// Returns an upper bound on the size of a header in bytes, for a file with `data` bytes. A header contains names,
    /// some numbers, and the checksums of the file's blocks.
    fn max_header_bytes(&self, data: u64) -> u64 {
        // A character of a name takes at most six bytes.
        let names: u64 = self.parameters.iter().map(|p| 6 * p.name.len() as u64 + 200).sum();
        let states: u64 = self.states.iter().map(|state| 6 * state.len() as u64 * self.parameters.len() as u64).sum();
        let infos = names.saturating_mul(self.states.len() as u64).saturating_add(states);
        infos.saturating_add(data.div_ceil(BLOCK as u64) * 16).saturating_add(4 * PAGE as u64)
    }

    pub(super) fn layout(&self) -> RankFileLayout {
        let has = |state: &String| self.parameters.iter().map(|p| p.has(state)).collect();
        let lens = self.states.iter().enumerate().flat_map(|(number, state)| {
            let len_of = move |(param, p): (usize, &Parameter)| {
                let len = usize::try_from(*p.state_lens.get(state)?).unwrap_or(usize::MAX);
                Some(((number, param), len))
            };
            self.parameters.iter().enumerate().filter_map(len_of)
        });
        RankFileLayout {
            world_size: self.world_size,
            pipeline_ranks: self.pipeline_ranks,
            positions: self.parameters.iter().map(|p| p.pipeline_rank).collect(),
            cuts: self.parameters.iter().map(Parameter::cut).collect(),
            states: self.states.iter().map(has).collect(),
            lens: lens.collect(),
        }
    }
}

/// Returns the last lines of a manifest that begins with `body`.
fn ending(body: &str) -> String {
    format!(",\n  \"checksum\": \"{:016x}\"\n}}\n", XxHash3_64::oneshot(body.as_bytes()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;

    /// Returns the manifest of a model without parameters.
    pub fn manifest(tag: &str) -> Manifest {
        Manifest {
            format: FORMAT.into(),
            version: VERSION,
            tag: tag.into(),
            is_named: false,
            previous: None,
            pipeline_ranks: 1,
            islands: None,
            world_size: 1,
            stage: 0,
            dtype: "f32".into(),
            global_steps: 0,
            skipped_steps: 0,
            global_samples: 0,
            scaler: None,
            optimizer_steps: 0,
            last_batch_iteration: -1,
            set_lr: None,
            rounding_seed: None,
            optimizer: None,
            states: vec![WEIGHTS.into()],
            parameters: vec![],
            buffers: None,
            files: vec![FileEntry {
                name: file_name(0, 1),
                bytes: PAGE as u64,
                header_bytes: PAGE as u64,
                header_checksum: String::new(),
                host: None,
            }],
            config: Value::Null,
            client_state: Value::Null,
        }
    }

    #[test]
    fn a_header_that_its_file_has_no_use_for_is_refused_before_it_is_read() {
        let mut manifest = manifest("T");
        assert_eq!(Manifest::parse(&manifest.to_text()).unwrap(), manifest);
        let file = &mut manifest.files[0];
        (file.bytes, file.header_bytes) = (1 << 29, 1 << 29);
        let problem = Manifest::parse(&manifest.to_text()).unwrap_err();
        assert!(problem.contains("has a header of 536870912 bytes"), "{problem}");
    }
}
