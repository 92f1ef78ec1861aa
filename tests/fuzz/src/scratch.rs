//! Files in memory, for entry points that take paths.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The environment variable that names the folder of a process. The driver sets it, and removes the folder afterwards.
pub const FOLDER: &str = "CANDLE_ZERO_FUZZ_FOLDER";

/// Creates a folder in memory (/dev/shm) if the system has it, and on the disk otherwise.
///
/// # Errors
/// Fails if the folder cannot be created.
pub fn create() -> std::io::Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let mut builder = tempfile::Builder::new();
    builder.prefix("candle-zero-fuzz-");
    if memory.is_dir() { builder.tempdir_in(memory) } else { builder.tempdir() }
}

/// Returns this process's folder.
pub fn folder() -> &'static Path {
    static CREATED: OnceLock<PathBuf> = OnceLock::new();
    CREATED.get_or_init(|| match std::env::var_os(FOLDER) {
        Some(folder) => folder.into(),
        None => create().expect("a temporary folder").keep(),
    })
}

/// Writes a file in this process's folder, creating the folders above it, and returns its path.
pub fn write(name: impl AsRef<Path>, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    if std::fs::write(&path, bytes).is_err() {
        std::fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("a writable folder");
        std::fs::write(&path, bytes).expect("a writable file");
    }
    path
}

/// Returns the path of a file or folder in tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

/// Returns the content of a file in tests/fixtures.
pub fn fixture_bytes(name: &str) -> Vec<u8> {
    let path = fixture(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
