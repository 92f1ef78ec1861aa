//! Checkpoints of DeepSpeed from tests/fixtures, in which one file is replaced.

use crate::scratch;
use candle_zero::checkpoint::deepspeed::{DeepSpeedCheckpoint, DeepSpeedStateKind};
use candle_zero::checkpoint::import;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

const TAG: &str = "global_step5";

/// A file of a checkpoint.
pub(super) struct DeepSpeedFile {
    folder: PathBuf,
    name: String,
    pub bytes: Vec<u8>,
}

/// Returns the files of two checkpoints, at stages 2 and 3, and also writes these files to the folder of this process.
pub(super) fn files() -> &'static [DeepSpeedFile] {
    static FILES: OnceLock<Vec<DeepSpeedFile>> = OnceLock::new();
    FILES.get_or_init(|| {
        let mut files = Vec::new();
        for checkpoint in ["zero2_fp16_tiny", "zero3_f32_tiny"] {
            let entries = std::fs::read_dir(scratch::fixture(&format!("deepspeed/{checkpoint}/checkpoint/{TAG}")));
            for entry in entries.expect("a checkpoint of DeepSpeed") {
                let path = entry.expect("a file of the checkpoint").path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let bytes = std::fs::read(&path).expect("a readable file");
                scratch::write(Path::new(checkpoint).join(TAG).join(&name), &bytes);
                files.push(DeepSpeedFile { folder: checkpoint.into(), name, bytes });
            }
        }
        files.sort_by(|a, b| (&a.folder, &a.name).cmp(&(&b.folder, &b.name)));
        files
    })
}

impl DeepSpeedFile {
    /// Returns the content of the pickle.
    pub fn pickle(&self) -> Vec<u8> {
        let entries = entries(&self.bytes);
        let pickle = entries.into_iter().find(|(name, _)| name.ends_with("/data.pkl"));
        pickle.expect("a file written by torch.save contains a pickle").1
    }

    /// Returns the file with a different pickle.
    pub fn with_pickle(&self, pickle: &[u8]) -> Vec<u8> {
        let mut zip = ZipWriter::new(Cursor::new(Vec::with_capacity(self.bytes.len() + pickle.len())));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in entries(&self.bytes) {
            let bytes = if name.ends_with("/data.pkl") { pickle } else { &bytes };
            zip.start_file(name, options).expect("an entry");
            zip.write_all(bytes).expect("an entry");
        }
        zip.finish().expect("an archive").into_inner()
    }

    /// Reads the checkpoint with different content in place of this file. Returns whether it is accepted.
    pub fn read_as(&self, bytes: &[u8]) -> bool {
        let path = scratch::folder().join(&self.folder).join(TAG).join(&self.name);
        std::fs::write(&path, bytes).expect("a writable file");
        let is_read = read(&scratch::folder().join(&self.folder));
        std::fs::write(&path, &self.bytes).expect("a writable file");
        is_read
    }
}

fn entries(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut zip = ZipArchive::new(Cursor::new(archive)).expect("an archive");
    let length = zip.len();
    let entry = |index| {
        let mut entry = zip.by_index(index).expect("an entry");
        let name = entry.name().expect("a name").into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("an entry");
        (name, bytes)
    };
    (0..length).map(entry).collect()
}

/// Reads everything in a checkpoint, and writes it as a checkpoint of candle-zero.
fn read(folder: &Path) -> bool {
    let Ok(checkpoint) = DeepSpeedCheckpoint::open(folder, Some(TAG)) else { return false };
    for state in [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq] {
        for (index, parameter) in checkpoint.parameters().iter().enumerate() {
            if let Ok(values) = checkpoint.read(state, index) {
                assert_eq!(values.len(), parameter.elements(), "{}", parameter.name);
            }
        }
    }
    for index in 0..checkpoint.buffers().len() {
        let _ = checkpoint.read_buffer(index);
    }
    let _ = checkpoint.verify();
    let imported = scratch::folder().join("imported");
    let _ = std::fs::remove_dir_all(&imported);
    import(&checkpoint, &imported, TAG, |_, _| {}).is_ok()
}
