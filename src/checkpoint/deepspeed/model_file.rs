//! The content of the first rank's model file: parameters, counters, and the values that the user's script stored.

use super::pickle::PickleProblem;
use super::pickle_value::PickleValue;
use super::stored_tensor::{StoredTensor, elements, shape};
use super::tag_files::file_error;
use super::torch_archive::{TorchArchive, damaged_error};
use crate::error::Result;
use crate::util::{counted, list};
use candle_core::DType;
use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;
use std::path::Path;

/// A parameter of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeepSpeedParameter {
    /// The name in the model.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    elements: usize,
}

impl DeepSpeedParameter {
    /// Returns the number of elements, which is the product of the dimensions.
    pub fn elements(&self) -> usize {
        self.elements
    }
}

/// A buffer of the model: a tensor that is not trained, such as running statistics.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeepSpeedBuffer {
    /// The name in the model.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The type: that of the file, or, for types that Candle lacks, one that can represent their values (int8 as I16,
    /// bool as U8).
    pub dtype: DType,
}

/// A model file.
#[derive(Debug)]
pub(super) struct ModelFile {
    pub archive: TorchArchive,
    /// The model's buffers, and their positions.
    pub buffers: Vec<(DeepSpeedBuffer, StoredTensor)>,
    /// The reasons why other buffers cannot be read.
    pub unread_buffers: Vec<String>,
    /// Trained parameters in the order of the flat space, one list per group (at stage 3, sub-group).
    pub groups: Vec<Vec<DeepSpeedParameter>>,
    /// The aliases of parameters: the alias, and the name in `groups`.
    pub aliases: Vec<(String, String)>,
    pub world_size: usize,
    pub global_steps: u64,
    pub global_samples: u64,
    pub skipped_steps: u64,
    pub last_batch_iteration: Option<i64>,
    pub ds_version: Option<String>,
    pub ds_config: Json,
    pub client_state: Map<String, Json>,
}

/// The keys that DeepSpeed itself writes; all others belong to the client state.
const DEEPSPEED_KEYS: &[&str] = &[
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "num_experts",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
];
/// The maximum length of a parameter's name.
const MAX_NAME_BYTES: usize = 1000;
/// The maximum ratio of the buffers' bytes to the stored bytes. The ratio can exceed 1 because buffers may share
/// storage.
const MAX_BUFFER_SHARING: u64 = 100;

impl ModelFile {
    /// Reads everything except the tensors.
    pub fn open(path: &Path) -> Result<Self> {
        let (archive, pickle) = TorchArchive::open(path)?;
        let root = PickleValue::root(&pickle);
        match unsupported_part(&root) {
            Ok(None) => {}
            Ok(Some(problem)) => return Err(file_error(path, problem)),
            Err(problem) => return Err(damaged_error(path, &problem)),
        }
        Self::read(&root, archive).map_err(|problem| damaged_error(path, &problem))
    }

    fn read(root: &PickleValue<'_>, archive: TorchArchive) -> Result<Self, PickleProblem> {
        let groups: Vec<_> = root.get("param_shapes")?.items()?.iter().map(parameters).collect::<Result<_, _>>()?;
        check_names(&groups)?;
        let counter = |name| match root.find(name) {
            Some(value) => value.count(),
            None => Ok(0),
        };
        let scheduler = root.find("lr_scheduler").and_then(|state| state.find("last_batch_iteration"));
        let version = root.find("ds_version").map(|version| version.text().map(str::to_owned));
        let (buffers, unread_buffers) = buffers(root, &archive)?;
        Ok(Self {
            archive,
            buffers,
            unread_buffers,
            groups,
            aliases: aliases(root)?,
            world_size: root.get("dp_world_size")?.count()?,
            global_steps: counter("global_steps")?,
            global_samples: counter("global_samples")?,
            skipped_steps: counter("skipped_steps")?,
            last_batch_iteration: scheduler.map(|iteration| iteration.integer()).transpose()?,
            ds_version: version.transpose()?,
            ds_config: root.find("ds_config").map_or(Ok(Json::Null), |config| config.json())?,
            client_state: client_state(root)?,
        })
    }
}

/// Returns the part of a valid checkpoint that this library cannot read, if there is one.
fn unsupported_part(root: &PickleValue<'_>) -> Result<Option<String>, PickleProblem> {
    let parts = root.find("mp_world_size").map_or(Ok(1), |size| size.integer())?;
    if parts != 1 {
        return Ok(Some(format!(
            "mp_world_size is {parts}: the model was split (tensor parallelism); only models that are complete on each \
             rank can be read"
        )));
    }
    let frozen = root.find("frozen_param_shapes").map_or(Ok(vec![]), |frozen| frozen.entries())?;
    let names: Vec<_> = frozen.iter().map(|(_, value)| value.path()).collect();
    Ok((!names.is_empty()).then(|| {
        format!(
            "{} frozen ({}); only models in which every parameter is trained can be read",
            if frozen.len() == 1 { "1 parameter is".into() } else { format!("{} parameters are", frozen.len()) },
            list(&names)
        )
    }))
}

/// Reads one ordered map from names to shapes.
fn parameters(map: &PickleValue<'_>) -> Result<Vec<DeepSpeedParameter>, PickleProblem> {
    let parameter = |(name, value): (&str, PickleValue<'_>)| {
        if name.len() > MAX_NAME_BYTES {
            return Err(format!(
                "{} has a name of {} bytes; at most {MAX_NAME_BYTES} are allowed",
                value.path(),
                name.len()
            ));
        }
        let shape = shape(&value)?;
        let elements = elements(&shape).ok_or_else(|| format!("{} has an impossible shape {shape:?}", value.path()))?;
        Ok(DeepSpeedParameter { name: name.to_owned(), shape, elements })
    };
    map.entries()?.into_iter().map(parameter).collect()
}

fn check_names(groups: &[Vec<DeepSpeedParameter>]) -> Result<(), PickleProblem> {
    let mut names = BTreeSet::new();
    match groups.iter().flatten().find(|parameter| !names.insert(&parameter.name)) {
        None => Ok(()),
        Some(duplicate) => Err(format!("parameter {} is in param_shapes twice", duplicate.name)),
    }
}

fn aliases(root: &PickleValue<'_>) -> Result<Vec<(String, String)>, PickleProblem> {
    let Some(shared) = root.find("shared_params") else { return Ok(vec![]) };
    let alias = |(name, value): (&str, PickleValue<'_>)| {
        let target = value.text()?;
        match name.len().max(target.len()) <= MAX_NAME_BYTES {
            true => Ok((name.to_owned(), target.to_owned())),
            false => Err(format!("shared_params has a name of more than {MAX_NAME_BYTES} bytes")),
        }
    };
    shared.entries()?.into_iter().map(alias).collect()
}

/// Buffers with their values, and the reasons why others cannot be read.
type ReadBuffers = (Vec<(DeepSpeedBuffer, StoredTensor)>, Vec<String>);

/// Returns the tensors of `module` that `buffer_names` lists, and the reasons why some cannot be read. At stage 3,
/// parameters are empty there, but buffers are complete.
fn buffers(root: &PickleValue<'_>, archive: &TorchArchive) -> Result<ReadBuffers, PickleProblem> {
    let (mut buffers, mut unread) = (vec![], vec![]);
    let (Some(names), Some(module)) = (root.find("buffer_names"), root.find("module")) else {
        return Ok((buffers, unread));
    };
    let names = names.items()?.iter().map(PickleValue::text).collect::<Result<BTreeSet<_>, _>>()?;
    for (name, value) in module.entries()?.into_iter().filter(|(name, _)| names.contains(name)) {
        if name.len() > MAX_NAME_BYTES {
            return Err(format!(
                "{} has a name of {} bytes; at most {MAX_NAME_BYTES} are allowed",
                value.path(),
                name.len()
            ));
        }
        match StoredTensor::of(&value) {
            Ok(tensor) => {
                archive.check(&tensor)?;
                let buffer =
                    DeepSpeedBuffer { name: name.into(), shape: tensor.shape.clone(), dtype: tensor.kind.dtype() };
                buffers.push((buffer, tensor));
            }
            Err(problem) => unread.push(problem),
        }
    }
    // The buffers are read into memory, where each has its own storage.
    let bytes = buffers.iter().fold(0u64, |sum, (_, tensor)| sum.saturating_add(tensor.bytes()));
    match bytes > archive.storage_bytes().saturating_mul(MAX_BUFFER_SHARING) {
        true => Err(format!(
            "the buffers in module take {}, but the file stores only {}",
            counted(bytes, "byte"),
            counted(archive.storage_bytes(), "byte")
        )),
        false => Ok((buffers, unread)),
    }
}

fn client_state(root: &PickleValue<'_>) -> Result<Map<String, Json>, PickleProblem> {
    let entries = root.entries()?.into_iter().filter(|(key, _)| !DEEPSPEED_KEYS.contains(key));
    entries.map(|(key, value)| Ok((key.to_owned(), value.json()?))).collect()
}
