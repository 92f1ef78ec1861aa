//! Training data in Parquet. The first byte selects the task and the template.

use super::chat::{DataKind, prepare};
use super::{join, split};
use crate::scratch;

/// Creates samples from a file.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    prepare("data.parquet", rest, &DataKind::of(first))
}

/// Returns the files in tests/fixtures/finetune/parquet, each for the task that its name states.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for folder in ["finetune/parquet", "finetune/parquet/refused"] {
        let entries = std::fs::read_dir(scratch::fixture(folder)).expect("a folder of tests/fixtures");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.sort();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "parquet")) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let task = match name.split(['_', '.']).next() {
                Some("label") => 1,
                Some("preference") => 2,
                _ => 0,
            };
            seeds.push(join(task, &std::fs::read(path).expect("a readable file")));
        }
    }
    seeds
}
