//! The files of a checkpoint folder, identified by their names.

use super::pickle::PickleProblem;
use crate::error::{CheckpointError, Error, Result};
use crate::files;
use crate::util::counted;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// The maximum length of a tag that is read.
const MAX_TAG_BYTES: u64 = 1000;
const OPTIM_SUFFIX: &str = "_optim_states.pt";
const MODEL_SUFFIX: &str = "_model_states.pt";

/// The files of one tag.
#[derive(Debug)]
pub(super) struct TagFiles {
    folder: PathBuf,
    /// The prefix of optimizer files in bf16 runs, otherwise empty.
    prefix: &'static str,
    /// The optimizer file of each rank.
    optim: BTreeMap<usize, PathBuf>,
}

impl TagFiles {
    /// Reads the names in the tag's folder.
    pub fn list(folder: PathBuf) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: folder.clone(), source };
        let mut names = vec![];
        for entry in std::fs::read_dir(&folder).map_err(io)? {
            names.extend(entry.map_err(io)?.file_name().into_string());
        }
        let (prefix, optim) = optim_files(&names).map_err(|problem| file_error(&folder, problem))?;
        let optim = optim.into_iter().map(|(rank, name)| (rank, folder.join(name))).collect();
        Ok(Self { folder, prefix, optim })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the model file of the first rank.
    pub fn model(&self, stage: u8) -> Result<PathBuf> {
        let start = if stage == 3 { "zero_pp_rank_0_" } else { "" };
        let path = self.folder.join(format!("{start}mp_rank_00{MODEL_SUFFIX}"));
        match path.exists() {
            true => Ok(path),
            false => Err(file_error(
                &path,
                format!(
                    "this file, which names the parameters at stage {stage}, is missing; copy it into the folder with \
                     the other files"
                ),
            )),
        }
    }

    /// Returns the optimizer file of one rank.
    pub fn optim(&self, rank: usize) -> Result<&Path> {
        self.optim.get(&rank).map(PathBuf::as_path).ok_or_else(|| {
            let name = format!("{}zero_pp_rank_{rank}_mp_rank_00{OPTIM_SUFFIX}", self.prefix);
            let ranks: Vec<_> = self.optim.keys().map(usize::to_string).collect();
            let found = crate::util::list(&ranks);
            let problem = format!(
                "this file of rank {rank} is missing (ranks of the existing files: {found}); copy the files of all \
                 ranks into one folder"
            );
            file_error(&self.folder.join(name), problem)
        })
    }

    /// Returns an error if there are files of ranks that the run did not have.
    pub fn check_world_size(&self, world_size: usize) -> Result<()> {
        match self.optim.range(world_size..).next() {
            None => Ok(()),
            Some((rank, path)) => {
                let problem = format!(
                    "this is a file of rank {rank}, but the checkpoint is for {}, so the folder contains files of two \
                     checkpoints; remove the files of one of them",
                    counted(world_size, "rank")
                );
                Err(file_error(path, problem))
            }
        }
    }
}

/// Returns the error about a file or folder that is not as expected.
pub(super) fn file_error(path: &Path, problem: String) -> Error {
    CheckpointError::DeepSpeed { path: path.to_owned(), problem }.into()
}

/// Returns the prefix of the optimizer files, and the file of each rank.
fn optim_files(names: &[String]) -> Result<(&'static str, BTreeMap<usize, &String>), PickleProblem> {
    let mut prefixes = [false; 2];
    let mut files = BTreeMap::new();
    for name in names.iter().filter(|name| name.ends_with(OPTIM_SUFFIX)) {
        let (prefix, rank) = parse(name)?;
        prefixes[usize::from(!prefix.is_empty())] = true;
        if let Some(other) = files.insert(rank, name) {
            return Err(format!("{other} and {name} are both for rank {rank}; keep only the files of one run"));
        }
    }
    match prefixes {
        [true, true] => {
            Err("some optimizer files begin with bf16_ and some do not; keep only the files of one run".into())
        }
        [false, true] => Ok(("bf16_", files)),
        [true, false] => Ok(("", files)),
        [false, false] => Err(
            "it has no file that ends in _optim_states.pt; only checkpoints of ZeRO stages 1, 2 and 3 that were saved \
             with optimizer states can be read"
                .into(),
        ),
    }
}

/// Returns the prefix and the rank in `[bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt`.
fn parse(name: &str) -> Result<(&'static str, usize), PickleProblem> {
    let (prefix, rest) = match name.strip_prefix("bf16_") {
        Some(rest) => ("bf16_", rest),
        None => ("", name),
    };
    let numbers = || {
        let middle = rest.strip_prefix("zero_pp_rank_")?.strip_suffix(OPTIM_SUFFIX)?;
        let (rank, model_rank) = middle.split_once("_mp_rank_")?;
        Some((rank.parse::<usize>().ok()?, model_rank.parse::<usize>().ok()?))
    };
    match numbers() {
        Some((rank, 0)) => Ok((prefix, rank)),
        Some(_) => {
            Err(format!("{name} is for a model that was split (tensor or pipeline parallelism), which cannot be read"))
        }
        None => Err(format!(
            "{name} is not a name that DeepSpeed uses at ZeRO stages 1 to 3 \
             ([bf16_]zero_pp_rank_R_mp_rank_00{OPTIM_SUFFIX}); checkpoints of experts (MoE) cannot be read"
        )),
    }
}

/// Returns the folder of the tag: `tag` in `dir`, or the tag that `latest` there names, or `dir` itself.
pub(super) fn find(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    let io = |path: &Path| {
        let path = path.to_owned();
        |source| Error::Io { action: "read", path, source }
    };
    if !std::fs::metadata(dir).map_err(io(dir))?.is_dir() {
        let problem = "it is a file; give the folder that was passed to save_checkpoint".to_owned();
        return Err(file_error(dir, problem));
    }
    let latest = dir.join("latest");
    let (tag, named_by) = match tag {
        Some(tag) => (tag.to_owned(), dir),
        None => match files::open(&latest) {
            Ok(file) => {
                let mut text = String::new();
                file.take(MAX_TAG_BYTES).read_to_string(&mut text).map_err(io(&latest))?;
                (text.trim_end().to_owned(), latest.as_path())
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return tag_itself(dir, &latest),
            Err(e) => return Err(io(&latest)(e)),
        },
    };
    let mut components = Path::new(&tag).components();
    if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
        return Err(file_error(
            named_by,
            format!("{tag:?} is not a tag: it must be the name of a folder next to `latest`"),
        ));
    }
    let folder = dir.join(&tag);
    match folder.is_dir() {
        true => Ok(folder),
        false => {
            let problem = format!("there is no folder for the tag {tag:?}; tags here: {}; give one of them", tags(dir));
            Err(file_error(&folder, problem))
        }
    }
}

/// Returns `dir` if it is the folder of a tag.
fn tag_itself(dir: &Path, latest: &Path) -> Result<PathBuf> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok());
    let mut names = names.filter(|name| name.ends_with(OPTIM_SUFFIX) || name.ends_with(MODEL_SUFFIX));
    match names.next() {
        Some(_) => Ok(dir.to_owned()),
        None => Err(file_error(
            latest,
            format!(
                "this file, which names the tag, is missing; folders here: {}; give the tag, or the folder that was \
                 passed to save_checkpoint",
                tags(dir)
            ),
        )),
    }
}

/// Lists the folders in `dir`, for a message.
fn tags(dir: &Path) -> String {
    let folders = std::fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
    let mut names: Vec<_> = folders.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    if names.is_empty() { "none".into() } else { crate::util::list(&names) }
}
