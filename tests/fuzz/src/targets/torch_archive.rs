//! One of the zip archives of a DeepSpeed checkpoint. The first byte selects the file.

use super::deepspeed_files::files;
use super::{join, split};

/// Reads the checkpoint with this file.
pub fn run(data: &[u8]) -> bool {
    let (first, archive) = split(data);
    files()[usize::from(first) % files().len()].read_as(archive)
}

/// Returns the files of two checkpoints.
pub fn seeds() -> Vec<Vec<u8>> {
    files().iter().enumerate().map(|(index, file)| join(index as u8, &file.bytes)).collect()
}
