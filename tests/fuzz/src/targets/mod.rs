//! The list of targets.

pub mod chat;
pub mod checkpoint;
mod deepspeed_files;
pub mod gguf;
pub mod hjson;
pub mod hostfile;
pub mod model_files;
pub mod parquet;
pub mod pickle;
pub mod safetensors;
pub mod torch_archive;
pub mod wire;

/// A reader that the fuzzer tests.
pub struct Target {
    /// The name.
    pub name: &'static str,
    /// Reads an input, and returns whether it was accepted.
    pub run: fn(&[u8]) -> bool,
    /// Returns the seeds: small inputs, most of which are accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// The words that the mutator inserts, in groups that targets can share.
    pub words: &'static [&'static [&'static str]],
}

/// The words of JSON.
const JSON: [&str; 10] = ["{", "}", "[", "]", "\"", ",", ":", "null", "true", "false"];

/// All targets.
pub const TARGETS: [Target; 11] = [
    Target { name: "chat", run: chat::run, seeds: chat::seeds, words: &[&JSON, &chat::WORDS] },
    Target { name: "checkpoint", run: checkpoint::run, seeds: checkpoint::seeds, words: &[&JSON, &checkpoint::WORDS] },
    Target { name: "gguf", run: gguf::run, seeds: gguf::seeds, words: &[&gguf::WORDS] },
    Target { name: "hjson", run: hjson::run, seeds: hjson::seeds, words: &[&JSON, &hjson::WORDS] },
    Target { name: "hostfile", run: hostfile::run, seeds: hostfile::seeds, words: &[&hostfile::WORDS] },
    Target {
        name: "model_files",
        run: model_files::run,
        seeds: model_files::seeds,
        words: &[&JSON, &model_files::WORDS],
    },
    Target { name: "parquet", run: parquet::run, seeds: parquet::seeds, words: &[] },
    Target { name: "pickle", run: pickle::run, seeds: pickle::seeds, words: &[&pickle::WORDS] },
    Target {
        name: "safetensors",
        run: safetensors::run,
        seeds: safetensors::seeds,
        words: &[&JSON, &safetensors::WORDS],
    },
    Target { name: "torch_archive", run: torch_archive::run, seeds: torch_archive::seeds, words: &[] },
    Target { name: "wire", run: wire::run, seeds: wire::seeds, words: &[&JSON, &wire::WORDS] },
];

/// Splits an input into its first byte, which selects what to do, and the rest.
fn split(data: &[u8]) -> (u8, &[u8]) {
    data.split_first().map_or((0, data), |(first, rest)| (*first, rest))
}

/// Joins what [`split`] separates.
fn join(first: u8, rest: &[u8]) -> Vec<u8> {
    [&[first], rest].concat()
}
