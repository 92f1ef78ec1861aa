//! Whole f32 parameters as a safetensors file, gathered one at a time and written by rank 0 as they come.

use super::core::Core;
use crate::error::{Error, Result};
use crate::layout::{shard_len, shard_range};
use crate::param::{lock, residency};
use crate::precision::{Flat, FlatRef};
use candle_core::DType;
use std::io::{BufWriter, Write};
use std::path::Path;
use tempfile::NamedTempFile;

impl Core {
    /// Collective. The file appears under its name only when it is complete and on disk.
    pub fn export(&self, path: &Path) -> Result<()> {
        let io = |source| Error::Io { action: "write", path: path.to_owned(), source };
        let mut file = if self.comm.rank() == 0 { Some(self.begin(path).map_err(io)?) } else { None };
        for param in 0..self.params.len() {
            let whole = self.whole_f32(param)?;
            if let Some(file) = &mut file {
                let FlatRef::F32(values) = whole.as_ref() else { unreachable!("asked for f32") };
                // In pieces, so that the bytes of a parameter are not held twice.
                for piece in values.chunks(1 << 14) {
                    let bytes: Vec<u8> = piece.iter().flat_map(|v| v.to_le_bytes()).collect();
                    file.write_all(&bytes).map_err(io)?;
                }
            }
        }
        if let Some(file) = file {
            let file = file.into_inner().map_err(|e| io(e.into_error()))?;
            file.as_file().sync_all().map_err(io)?;
            let done = file.persist(path).map_err(|e| io(e.error))?;
            drop(done);
            std::fs::File::open(folder(path)).and_then(|f| f.sync_all()).map_err(io)?;
        }
        self.comm.barrier().wait()
    }

    /// Opens a file beside `path` and writes the header.
    fn begin(&self, path: &Path) -> std::io::Result<BufWriter<NamedTempFile>> {
        let mut end = 0usize;
        let mut header = serde_json::Map::new();
        for param in &self.params {
            let start = end;
            end += param.numel * 4;
            let info = serde_json::json!({
                "dtype": "F32", "shape": param.shape.dims(), "data_offsets": [start, end],
            });
            header.insert(param.name.clone(), info);
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        // The format wants the data aligned to 8 bytes; spaces are allowed there.
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = BufWriter::new(tempfile::Builder::new().prefix(".candle-zero-").tempfile_in(folder(path))?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        Ok(file)
    }

    /// Collective: a whole parameter in f32, from the master weights where there are any.
    pub fn whole_f32(&self, param: usize) -> Result<Flat> {
        let (world, numel) = (self.comm.size(), self.params[param].numel);
        let groups = lock(&self.groups);
        let (group, slot) = self.places[param];
        let (group, slot) = (&groups[group], &groups[group].slots[slot]);
        let mut own = Flat::with_capacity(DType::F32, 0);
        match (&group.master, &group.weights) {
            (Some(share), _) | (None, Some(share)) => own.extend_cast(share.slice(slot.range())),
            // f32 at stages 0 to 2: every rank holds the whole.
            (None, None) => {
                residency::with_view(&self.params[param].tensor, |whole| own.extend_cast(whole))?;
                return Ok(own);
            }
        }
        // Not a question of how much this rank owns: a parameter of one element lies on one rank alone.
        if world == 1 || !self.placement.optim.is_sharded() {
            return Ok(own);
        }
        let shard = shard_len(numel, world);
        own.extend_zeros(shard - own.len());
        let chunks = self.comm.all_gather(own, self.tag(&[param])).wait()?;
        let mut whole = Flat::with_capacity(DType::F32, numel);
        for r in 0..world {
            whole.extend_cast(chunks.slice(r * shard..r * shard + shard_range(numel, world, r).len()));
        }
        Ok(whole)
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
