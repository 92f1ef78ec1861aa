//! A checkpoint of candle-zero. The first byte selects what the rest replaces: the manifest, the file of a rank, or the
//! header of such a file. Checksums are recomputed for changed files, because they would otherwise reveal every random
//! change.

use super::{join, split};
use crate::scratch;
use candle_zero::checkpoint::{
    Checkpoint, ConsolidateSettings, ConsolidatedDtype, Manifest, consolidate, examine, list_checkpoints, split_tag,
};
use serde_json::{Value, json};
use std::sync::OnceLock;
use twox_hash::XxHash3_64;

const TAG: &str = "global_step3";
const FILES: [&str; 2] = ["rank_00000_of_00002.safetensors", "rank_00001_of_00002.safetensors"];

/// Words of manifests and headers.
pub(super) const WORDS: [&str; 23] = [
    "world_size",
    "stage",
    "global_steps",
    "scaler",
    "optimizer",
    "states",
    "fp32",
    "exp_avg",
    "exp_avg_sq",
    "parameters",
    "name",
    "shape",
    "block",
    "updates_before",
    "files",
    "bytes",
    "header_bytes",
    "buffers",
    "previous",
    "set_lr",
    "__metadata__",
    "block_checksums",
    "block_bytes",
];

/// Reads a checkpoint.
///
/// # Panics
/// Panics if a manifest changes when it is written and read again, if the number of values read does not match the
/// parameter, or if `examine` and [`Checkpoint`] disagree about whether the checkpoint is intact.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    let [manifest, file, _] = originals();
    match first % 3 {
        0 => read(rest, file),
        1 => read(&with_file(manifest, rest), rest),
        _ => {
            // The file has a header of whole pages, followed by the original data.
            let header = rest.len().saturating_add(8).next_multiple_of(4096);
            let mut bytes = (header as u64 - 8).to_le_bytes().to_vec();
            bytes.extend_from_slice(rest);
            bytes.resize(header, b' ');
            bytes.extend_from_slice(&file[4096..]);
            read(&with_file(manifest, &bytes), &bytes)
        }
    }
}

/// Returns the manifest, without its checksum and its closing brace, and the files of the ranks.
fn originals() -> &'static [Vec<u8>; 3] {
    static ORIGINALS: OnceLock<[Vec<u8>; 3]> = OnceLock::new();
    ORIGINALS.get_or_init(|| {
        ["manifest.json", FILES[0], FILES[1]].map(|name| {
            let mut bytes = scratch::fixture_bytes(&format!("checkpoints/f32/{TAG}/{name}"));
            if name == "manifest.json" {
                let mut manifest: Value = serde_json::from_slice(&bytes).expect("a manifest");
                // Most of a manifest is the configuration, which is not read.
                manifest["config"] = json!({"train_batch_size": 4});
                manifest.as_object_mut().expect("an object").remove("checksum");
                bytes = without_brace(&manifest);
            }
            bytes
        })
    })
}

fn without_brace(manifest: &Value) -> Vec<u8> {
    let mut text = serde_json::to_string_pretty(manifest).expect("JSON can be written");
    text.truncate(text.len() - 2);
    text.into_bytes()
}

/// Returns a manifest in which the entry of the first file matches `file`.
fn with_file(manifest: &[u8], file: &[u8]) -> Vec<u8> {
    let mut manifest: Value = serde_json::from_slice(&[manifest, b"\n}"].concat()).expect("a manifest");
    let start = file.first_chunk().map_or(0, |length| u64::from_le_bytes(*length).saturating_add(8));
    let header = file.get(..usize::try_from(start).unwrap_or(usize::MAX)).unwrap_or(file);
    let entry = &mut manifest["files"][0];
    entry["bytes"] = json!(file.len());
    entry["header_bytes"] = json!(header.len());
    entry["header_checksum"] = json!(format!("{:016x}", XxHash3_64::oneshot(header)));
    without_brace(&manifest)
}

fn read(manifest: &[u8], file: &[u8]) -> bool {
    if let Ok(manifest) = serde_json::from_slice::<Manifest>(&[manifest, b"\n}"].concat()) {
        let text = serde_json::to_string(&manifest).expect("a manifest can be written");
        assert_eq!(serde_json::from_str::<Manifest>(&text).expect("a written manifest can be read"), manifest);
    }
    let end = format!(",\n  \"checksum\": \"{:016x}\"\n}}\n", XxHash3_64::oneshot(manifest));
    let folder = scratch::folder().join("checkpoints");
    let name = |name: &str| format!("checkpoints/{TAG}/{name}");
    scratch::write(name("manifest.json"), &[manifest, end.as_bytes()].concat());
    scratch::write(name(FILES[0]), file);
    scratch::write(name(FILES[1]), &originals()[2]);
    scratch::write("checkpoints/latest", TAG.as_bytes());
    let examined = examine(&folder, TAG, Some(&mut |_, _| {}));
    let _ = (list_checkpoints(&folder).choose(None), split_tag(&folder.join(TAG), None));
    let Ok(Some(checkpoint)) = Checkpoint::open(&folder, None) else {
        assert!(!examined.problems.is_empty(), "a checkpoint in which no problem was found cannot be opened");
        return false;
    };
    let Manifest { states, parameters, .. } = checkpoint.manifest();
    for (state, kind) in states.iter().enumerate() {
        for (index, parameter) in parameters.iter().enumerate().filter(|(_, parameter)| parameter.has(kind)) {
            if let Ok(values) = checkpoint.read(state, index, 0..parameter.numel()) {
                assert_eq!(values.len(), parameter.numel());
            }
        }
    }
    let is_intact = checkpoint.verify(|_| {}).is_ok();
    assert_eq!(is_intact, examined.problems.is_empty(), "{:?}", examined.problems);
    if is_intact {
        let out = scratch::folder().join("consolidated");
        let _ = std::fs::remove_dir_all(&out);
        let settings = ConsolidateSettings { dtype: ConsolidatedDtype::F16, max_shard_size: 64, n_head: None };
        let _ = consolidate(&checkpoint, &out, &settings, &mut |_| {});
    }
    is_intact
}

/// Returns two manifests, a file and a header.
pub fn seeds() -> Vec<Vec<u8>> {
    let [manifest, file, _] = originals();
    let header = file[8..4096].trim_ascii_end();
    let mut more: Value = serde_json::from_slice(&[manifest, &b"\n}"[..]].concat()).expect("a manifest");
    more["version"] = json!(2);
    more["previous"] = json!("global_step2");
    more["set_lr"] = json!([0.001, 1e-300]);
    more["rounding_seed"] = json!(u64::MAX);
    more["parameters"][3]["states"] = json!(["fp32"]);
    more["parameters"][0]["block"] = json!(4);
    more["parameters"][0]["updates_before"] = json!(2);
    more["buffers"] = json!({"name": "buffers.safetensors", "bytes": 8, "checksum": "0"});
    vec![join(0, manifest), join(1, file), join(2, header), join(0, &without_brace(&more))]
}
