//! Writes whole parameters to a safetensors file. They are gathered one at a time, and rank 0 writes them as they
//! arrive.

use super::param_access::f32_values;
use super::state_access::ParamStateKind;
use super::whole_model::ModelParameter;
use crate::comm::WireFormat;
use crate::comm::agree::{JointOperationFailure, agree, rank_failed};
use crate::error::Result;
use crate::files::{self, AtomicFile, InputOutputPaths, OutputKind};
use crate::param::ModelBuffer;
use crate::precision::{Flat, FlatRef};
use crate::tensor::residency;
use crate::util::lock;
#[cfg(feature = "cuda")]
use crate::zero::rank_core::DelayedUpdate;
use crate::zero::rank_core::RankCore;
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use serde_json::Value;
use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Read as _, Write};
use std::path::Path;

impl RankCore {
    /// Collective: writes parameters, rounded to `dtype`, and rank 0's buffers in their own types. The file gets its
    /// final name only once it is complete and on disk.
    ///
    /// # Errors
    /// A communication error, or a write error on rank 0. After a write error, all ranks return an error and can
    /// continue, so a full disk or a wrong path does not lose the model.
    pub fn export(&self, path: &Path, dtype: DType) -> Result<(), JointOperationFailure> {
        let model = self.model_parameters()?;
        let mut file =
            (self.job().rank() == 0).then(|| SafetensorsExport::begin(path, &model, self.buffers.list(), dtype));
        for parameter in &model {
            if let Some(values) = self.on_first_rank(parameter)? {
                file = file.map(|file| file.and_then(|file| file.append(values.as_ref())));
            }
        }
        for buffer in self.buffers.list() {
            let Some(Ok(open)) = file else { break };
            let bytes = buffer.bytes().map_err(Error::other);
            file = Some(bytes.and_then(|bytes| open.append_bytes(&bytes)));
        }
        let written = file.map_or(Ok(()), |file| file.and_then(SafetensorsExport::finish));
        let failed = |source| crate::Error::Io { action: "write", path: path.to_owned(), source };
        let other_rank_failed = |rank| failed(Error::other(rank_failed(rank)));
        agree(self.job(), written.map_err(failed), other_rank_failed)
    }

    /// Checks that [`export`](Self::export) can write the parameters of `model` to `path`, and that there is enough
    /// space.
    ///
    /// # Errors
    /// A path that cannot be written, an existing file that the export may not replace, or too little free space.
    pub fn check_export(&self, model: &[ModelParameter], path: &Path, dtype: DType) -> Result<()> {
        let failed = |source| crate::Error::Io { action: "write", path: path.to_owned(), source };
        let header = header(model, self.buffers.list(), dtype);
        let tensors = serde_json::from_slice(&header).map_err(|e| failed(e.into()))?;
        InputOutputPaths::default().writes("the export", path, OutputKind::File).check()?;
        check_earlier(path, &tensors).map_err(failed)?;
        let numel = |parameter: &ModelParameter| parameter.dims.iter().product::<usize>();
        let values = model.iter().map(|parameter| (numel(parameter) * dtype.size_in_bytes()) as u64);
        let buffers =
            self.buffers.list().iter().map(|b| (b.tensor.elem_count() * b.tensor.dtype().size_in_bytes()) as u64);
        let folder = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        files::check_free_space(files::folder_of(&folder), header.len() as u64 + values.chain(buffers).sum::<u64>())
    }

    /// Collective: returns a whole parameter in f32, from the master weights if they exist.
    pub fn full_f32(&self, param: usize) -> Result<Flat> {
        if self.is_whole_in_f32(param)? {
            let mut copy = Flat::with_capacity(DType::F32, self.params[param].numel);
            if self.holds(param) {
                residency::with_view(&self.params[param].tensor, |values| copy.extend_cast(values))?;
            }
            return self.spread_from_holders(param, copy);
        }
        self.full_state(ParamStateKind::Weights, param)
    }

    /// Returns whether every rank that holds a parameter has all of it, and no copy with more precision, or with newer
    /// weights, exists.
    fn is_whole_in_f32(&self, param: usize) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if matches!(*self.wait_for_update()?, DelayedUpdate::Ready(_)) {
            return Ok(false);
        }
        let (group, _) = self.slot_of(param);
        Ok(ParamStateKind::Weights.storage(&mut lock(&self.groups)[group]).is_none())
    }

    /// Collective: assembles a whole parameter from the elements that each rank owns.
    pub(super) fn gather_whole(&self, param: usize, mut part: Flat) -> Result<Flat> {
        let (mesh, parameter) = (self.mesh_of(&[param]), &self.params[param]);
        if !self.holds(param) {
            return self.spread_from_holders(param, part);
        }
        // This decision must not depend on the number of elements that this rank owns: a parameter with one element is
        // in only one shard.
        if mesh.shards() == 1 || !self.placement.optim.is_sharded() {
            return self.spread_from_holders(param, part);
        }
        let len = parameter.shard_len(mesh);
        part.extend_zeros(len - part.len());
        let chunks = self.wait(self.gather(WireFormat::Exact, part.into(), &[param])?)?;
        let mut values = Flat::with_capacity(DType::F32, parameter.numel);
        for shard in 0..mesh.shards() {
            values.extend_cast(chunks.slice(shard * len..shard * len + parameter.shard(mesh, shard).len()));
        }
        self.spread_from_holders(param, values)
    }

    /// Collective if the parameter is only on some ranks: returns the whole parameter on all ranks. `values` are those
    /// of the whole parameter on the ranks that hold it, and are not used on the others.
    fn spread_from_holders(&self, param: usize, values: Flat) -> Result<Flat> {
        if self.params[param].expert.is_none() {
            return Ok(values);
        }
        let is_first = self.holds(param) && self.rank_among(&[param]) == 0;
        self.broadcast_full(param, is_first.then(|| f32_values(values))).map(Flat::F32)
    }
}

/// A safetensors file under construction, with its destination.
struct SafetensorsExport {
    file: BufWriter<File>,
    new: AtomicFile,
    dtype: DType,
}

impl SafetensorsExport {
    /// Begins the file and writes its header. An existing file at `path` must be empty or an earlier export of the same
    /// parameters.
    fn begin(path: &Path, model: &[ModelParameter], buffers: &[ModelBuffer], dtype: DType) -> std::io::Result<Self> {
        let header = header(model, buffers, dtype);
        let tensors: serde_json::Map<String, Value> = serde_json::from_slice(&header)?;
        check_earlier(path, &tensors)?;
        let mut new = AtomicFile::create_for(path)?;
        let mut file = BufWriter::new(new.file().try_clone()?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        Ok(Self { file, new, dtype })
    }

    /// Writes one more parameter, in pieces, so that its bytes are not held twice.
    fn append(mut self, values: FlatRef<'_>) -> std::io::Result<Self> {
        const PIECE: usize = 1 << 14;
        let mut piece = Flat::with_capacity(self.dtype, PIECE);
        for start in (0..values.len()).step_by(PIECE) {
            piece.truncate(0);
            piece.extend_cast(values.slice(start..values.len().min(start + PIECE)));
            self.file.write_all(piece.as_ref().as_bytes())?;
        }
        Ok(self)
    }

    fn append_bytes(mut self, bytes: &[u8]) -> std::io::Result<Self> {
        self.file.write_all(bytes)?;
        Ok(self)
    }

    /// Syncs the file to disk and gives it its final name.
    fn finish(self) -> std::io::Result<()> {
        self.file.into_inner().map_err(|e| e.into_error())?;
        self.new.finish().map(drop)
    }
}

/// Returns the header of a safetensors file with these tensors.
fn header(model: &[ModelParameter], buffers: &[ModelBuffer], dtype: DType) -> Vec<u8> {
    let mut end = 0usize;
    let mut header = serde_json::Map::new();
    let params = model.iter().map(|parameter| (&parameter.name, &parameter.dims[..], dtype));
    let buffers = buffers.iter().map(|b| (&b.name, b.tensor.dims(), b.tensor.dtype()));
    for (name, dims, dtype) in params.chain(buffers) {
        let start = end;
        end += dims.iter().product::<usize>() * dtype.size_in_bytes();
        let info = serde_json::json!({
            "dtype": format!("{dtype:?}"), "shape": dims, "data_offsets": [start, end],
        });
        header.insert(name.clone(), info);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The format requires the data to be aligned to 8 bytes, and allows spaces at the end of the header.
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

/// Refuses an existing file at `path`, unless it is empty or a safetensors file with tensors of these names and shapes.
fn check_earlier(path: &Path, tensors: &serde_json::Map<String, Value>) -> std::io::Result<()> {
    /// The maximum length of a header.
    const MAX_HEADER_BYTES: u64 = 1 << 27;
    let mut file = match path.symlink_metadata() {
        Ok(_) => files::open(path)?,
        Err(_) => return Ok(()),
    };
    if file.metadata()?.len() == 0 {
        return Ok(());
    }
    let mut length = [0; 8];
    let mut found = Vec::new();
    let read = file.read_exact(&mut length).and_then(|()| {
        let length = u64::from_le_bytes(length);
        if length <= MAX_HEADER_BYTES { file.take(length).read_to_end(&mut found).map(drop) } else { Ok(()) }
    });
    let found: Option<serde_json::Map<String, Value>> = read.ok().and_then(|()| serde_json::from_slice(&found).ok());
    let is_earlier = found.is_some_and(|mut found| {
        found.remove("__metadata__");
        let is_same =
            |(name, info): (&String, &Value)| tensors.get(name).is_some_and(|new| new["shape"] == info["shape"]);
        found.len() == tensors.len() && found.iter().all(is_same)
    });
    if is_earlier {
        return Ok(());
    }
    let text = "a file of that name exists but is not an export of this model, so it is not replaced; use another \
                name, or remove it";
    Err(Error::new(ErrorKind::AlreadyExists, text))
}
