//! Checkpoints written by DeepSpeed 0.19.8, read and compared bit for bit with the values that DeepSpeed itself merged
//! and those that it held in memory; and damaged checkpoints, whose errors must name the damaged file.

use crate::support::processes::repository;
use crate::support::skips::skipped_in_part;
use candle_zero::Error;
use candle_zero::checkpoint::deepspeed::{DeepSpeedCheckpoint, DeepSpeedStateKind};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Returns the folders of the checkpoints that are in the repository.
fn tiny() -> [PathBuf; 2] {
    let fixtures = repository().join("tests/fixtures/deepspeed");
    ["zero2_fp16_tiny", "zero3_f32_tiny"].map(|name| fixtures.join(name))
}

/// Returns the folders of all checkpoints, including the larger ones, which exist (next to the repository) only on
/// machines on which they were generated. If the larger ones are missing, reports that `test` runs without them.
fn all<T: Fn()>(test: T) -> Vec<PathBuf> {
    let shared = repository().join("../shared/deepspeed_checkpoints");
    let mut folders = tiny().to_vec();
    match std::fs::read_dir(&shared) {
        Ok(entries) => folders.extend(entries.map(|e| e.unwrap().path()).filter(|path| path.is_dir())),
        Err(e) => skipped_in_part(test, format_args!("the larger checkpoints in {}: {e}", shared.display())),
    }
    folders
}

fn open(folder: &Path) -> DeepSpeedCheckpoint {
    DeepSpeedCheckpoint::open(folder.join("checkpoint"), None).unwrap()
}

fn json_of(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn bits(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn masters_have_the_bits_that_deepspeed_merges() {
    for folder in all(masters_have_the_bits_that_deepspeed_merges) {
        let checkpoint = open(&folder);
        let bytes = std::fs::read(folder.join("consolidated_f32.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(expected.len(), checkpoint.parameters().len());
        for (index, parameter) in checkpoint.parameters().iter().enumerate() {
            let tensor = expected.tensor(&parameter.name).unwrap();
            assert_eq!(tensor.shape(), parameter.shape);
            let found = checkpoint.read(DeepSpeedStateKind::Master, index).unwrap();
            assert!(bits(&found) == tensor.data(), "{} of {}", parameter.name, folder.display());
        }
    }
}

#[test]
fn moments_have_the_bits_that_the_engine_held() {
    for folder in all(moments_have_the_bits_that_the_engine_held) {
        let checkpoint = open(&folder);
        assert_eq!(checkpoint.optimizer_states(), ["exp_avg", "exp_avg_sq"]);
        let bytes = std::fs::read(folder.join("moments_f32.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(expected.len(), 2 * checkpoint.parameters().len());
        for (index, parameter) in checkpoint.parameters().iter().enumerate() {
            for state in [DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq] {
                let name = format!("{}.{}", parameter.name, state.name());
                let found = checkpoint.read(state, index).unwrap();
                assert!(bits(&found) == expected.tensor(&name).unwrap().data(), "{name} of {}", folder.display());
            }
        }
    }
}

#[test]
fn a_range_is_the_same_elements_as_in_the_whole() {
    for folder in tiny() {
        let checkpoint = open(&folder);
        for (index, parameter) in checkpoint.parameters().iter().enumerate() {
            let (all, n) = (checkpoint.read(DeepSpeedStateKind::ExpAvg, index).unwrap(), parameter.elements());
            for range in [0..1, n / 2..n / 2, n / 2 - 1..n / 2 + 2, n / 3..n, n - 1..n] {
                let part = checkpoint.read_range(DeepSpeedStateKind::ExpAvg, index, range.clone()).unwrap();
                assert_eq!(bits(&part), bits(&all[range]), "{}", parameter.name);
            }
        }
    }
}

#[test]
fn counters_and_what_stands_beside_them() {
    for folder in all(counters_and_what_stands_beside_them) {
        let checkpoint = open(&folder);
        let run = json_of(folder.join("trajectory.json"));
        assert_eq!(json!(checkpoint.world_size()), run["world"]);
        assert_eq!(json!(checkpoint.stage()), run["ds_config"]["zero_optimization"]["stage"]);
        let counters = &run["counters_at_save"];
        assert_eq!(json!(checkpoint.global_steps()), counters["global_steps"]);
        assert_eq!(json!(checkpoint.global_samples()), counters["global_samples"]);
        assert_eq!(json!(checkpoint.skipped_steps()), counters["skipped_steps"]);
        assert_eq!(checkpoint.last_batch_iteration(), Some(4));
        assert_eq!(checkpoint.optimizer_step(), Some(5));
        assert_eq!(checkpoint.ds_version(), Some("0.19.8"));
        assert_eq!(checkpoint.ds_config(), &run["ds_config"]);
        assert_eq!(Value::Object(checkpoint.client_state().clone()), run["client_state"]);
        assert_eq!(checkpoint.param_groups()[0]["lr"], json!(0.00023999999999999998));
        assert_eq!(checkpoint.aliases(), [("lm_head.weight".to_owned(), "wte.weight".to_owned())]);
        assert_eq!(checkpoint.index_of("lm_head.weight"), Some(0));
        assert_eq!(checkpoint.index_of("ln_f.bias"), Some(checkpoint.parameters().len() - 1));
        assert_eq!(checkpoint.index_of("ln_f"), None);
        checkpoint.verify().unwrap();
    }
}

#[test]
fn the_loss_scaler_has_its_state() {
    let [fp16, f32] = tiny().map(|folder| open(&folder));
    assert_eq!((f32.loss_scale(), f32.dynamic_scaler()), (1.0, None));
    assert_eq!(fp16.loss_scale(), 8192.0);
    let scaler = fp16.dynamic_scaler().unwrap();
    assert_eq!((scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter), (8192.0, 5, -1));
    assert_eq!((scaler.scale_factor, scaler.scale_window, scaler.min_scale), (2.0, 4, 1.0));
    assert_eq!((scaler.delayed_shift, scaler.cur_hysteresis, scaler.consecutive_hysteresis), (2, 2, false));
    assert!(scaler.raise_error_at_min_scale);
}

#[test]
fn the_tag_can_be_given_or_the_folder_itself() {
    for folder in tiny() {
        let dir = folder.join("checkpoint");
        let tag = dir.join("global_step5");
        assert_eq!(DeepSpeedCheckpoint::open(&dir, Some("global_step5")).unwrap().folder(), tag);
        assert_eq!(DeepSpeedCheckpoint::open(&tag, None).unwrap().folder(), tag);
    }
}

// ---- damaged copies ----------------------------------------------------------------------------

/// A copy of a checkpoint, which a test damages.
struct DamagedCopy(tempfile::TempDir);

impl DamagedCopy {
    fn of(folder: &Path) -> Self {
        let copy = Self(tempfile::tempdir().unwrap());
        let source = folder.join("checkpoint");
        std::fs::create_dir(copy.path("global_step5")).unwrap();
        std::fs::copy(source.join("latest"), copy.path("latest")).unwrap();
        for name in names(&source.join("global_step5")) {
            std::fs::copy(source.join("global_step5").join(&name), copy.file(&name)).unwrap();
        }
        copy
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path("global_step5").join(name)
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(self.file(name)).unwrap();
        change(&mut bytes);
        std::fs::write(self.file(name), bytes).unwrap();
    }

    fn open(&self) -> Result<DeepSpeedCheckpoint, Error> {
        DeepSpeedCheckpoint::open(self.0.path(), None)
    }

    /// Returns the message, which must name `file`.
    fn problem(&self, file: &str) -> String {
        let text = self.open().unwrap_err().to_string();
        assert!(text.contains(file), "{text}");
        text
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the entries of a file, and the index of the pickle.
fn unpack(path: &Path) -> (Vec<(String, Vec<u8>)>, usize) {
    let mut zip = zip::ZipArchive::new(std::fs::File::open(path).unwrap()).unwrap();
    let mut entries = vec![];
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index).unwrap();
        let mut bytes = vec![];
        entry.read_to_end(&mut bytes).unwrap();
        entries.push((entry.name().unwrap().into_owned(), bytes));
    }
    let pickle = entries.iter().position(|(name, _)| name.ends_with("/data.pkl")).unwrap();
    (entries, pickle)
}

/// Writes entries with correct checksums.
fn pack(path: &Path, entries: &[(String, Vec<u8>)]) {
    let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    for (name, bytes) in entries {
        zip.start_file(name.as_str(), options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
}

const OPTIM_1: &str = "zero_pp_rank_1_mp_rank_00_optim_states.pt";

#[test]
fn a_missing_file_is_named() {
    for (folder, model) in
        tiny().iter().zip(["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
    {
        let copy = DamagedCopy::of(folder);
        std::fs::remove_file(copy.file(OPTIM_1)).unwrap();
        assert!(copy.problem(OPTIM_1).contains("rank 1 is missing"));
        let copy = DamagedCopy::of(folder);
        std::fs::remove_file(copy.file(model)).unwrap();
        assert!(copy.problem(model).contains("missing"));
        let copy = DamagedCopy::of(folder);
        std::fs::remove_file(copy.path("latest")).unwrap();
        let text = copy.problem("latest");
        assert!(text.contains("folders here: global_step5"), "{text}");
        std::fs::write(copy.path("latest"), "global_step9").unwrap();
        let text = copy.problem("global_step9");
        assert!(text.contains("tags here: global_step5"), "{text}");
        std::fs::write(copy.path("latest"), "../elsewhere").unwrap();
        assert!(copy.problem("latest").contains("is not a tag"));
    }
}

#[test]
fn a_file_too_many_is_named() {
    for folder in tiny() {
        let copy = DamagedCopy::of(&folder);
        let name = "zero_pp_rank_2_mp_rank_00_optim_states.pt";
        std::fs::copy(copy.file(OPTIM_1), copy.file(name)).unwrap();
        assert!(copy.problem(name).contains("for 2 ranks"));
    }
    let copy = DamagedCopy::of(&tiny()[0]);
    std::fs::copy(copy.file(OPTIM_1), copy.file(&format!("bf16_{OPTIM_1}"))).unwrap();
    assert!(copy.problem("bf16_").contains("both for rank 1"));
}

#[test]
fn truncated_files_are_named() {
    for folder in tiny() {
        for name in names(&folder.join("checkpoint/global_step5")) {
            if name == "zero_pp_rank_1_mp_rank_00_model_states.pt" {
                continue; // This file is not needed.
            }
            let copy = DamagedCopy::of(&folder);
            for length in [0, 1, 100, 5000] {
                copy.change(&name, |bytes| bytes.truncate(bytes.len().min(length)));
                copy.problem(&name);
            }
            let copy = DamagedCopy::of(&folder);
            copy.change(&name, |bytes| bytes.truncate(bytes.len() - 1));
            copy.problem(&name);
        }
    }
}

#[test]
fn a_changed_pickle_is_seen_by_its_checksum() {
    for folder in tiny() {
        let copy = DamagedCopy::of(&folder);
        copy.change(OPTIM_1, |bytes| {
            let position = bytes.windows(15).position(|w| w == b"partition_count").unwrap();
            bytes[position] ^= 1;
        });
        let text = copy.problem(OPTIM_1);
        assert!(text.contains("data.pkl") && text.to_lowercase().contains("checksum"), "{text}");
    }
}

#[test]
fn a_changed_storage_is_seen_when_it_is_asked_for() {
    let copy = DamagedCopy::of(&tiny()[1]);
    copy.change(OPTIM_1, |bytes| {
        let position = bytes.len() / 2;
        bytes[position] ^= 1;
    });
    let text = copy.open().unwrap().verify().unwrap_err().to_string();
    assert!(text.contains(OPTIM_1) && text.contains("data/"), "{text}");
}

#[test]
fn files_of_two_checkpoints_are_told_apart() {
    let [two, three] = tiny();
    let copy = DamagedCopy::of(&two);
    std::fs::copy(three.join("checkpoint/global_step5").join(OPTIM_1), copy.file(OPTIM_1)).unwrap();
    assert!(copy.problem(OPTIM_1).contains("zero_stage is 3, but 2 in"));
}

#[test]
fn a_storage_that_is_too_short_is_named() {
    let copy = DamagedCopy::of(&tiny()[1]);
    let (mut entries, _) = unpack(&copy.file(OPTIM_1));
    entries.iter_mut().find(|(name, _)| name.ends_with("data/7")).unwrap().1.truncate(100);
    pack(&copy.file(OPTIM_1), &entries);
    let text = copy.problem(OPTIM_1);
    assert!(text.contains("fp32_flat_groups.1") && text.contains("data/7, which has 100 bytes"), "{text}");
}

#[test]
fn requests_beyond_the_end_are_errors() {
    let checkpoint = open(&tiny()[0]);
    let text = checkpoint.read(DeepSpeedStateKind::Master, 99).unwrap_err().to_string();
    assert!(text.contains("parameter 99 was requested, but there are only 16"), "{text}");
    let text = checkpoint.read_range(DeepSpeedStateKind::Master, 2, 30..34).unwrap_err().to_string();
    assert!(text.contains("elements 30 to 34 of h.0.ln_1.weight were requested, but it has only 33"), "{text}");
}

/// Reads everything that can be read; must not panic.
fn read_all(copy: &DamagedCopy) {
    let Ok(checkpoint) = copy.open() else { return };
    for index in 0..checkpoint.parameters().len() {
        for state in [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq] {
            let _ = checkpoint.read(state, index);
        }
    }
    let _ = checkpoint.verify();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The checksums are correct, so that the change reaches the pickle reader.
    #[test]
    fn a_changed_pickle_is_read_or_refused(
        which in 0..2usize,
        file in any::<proptest::sample::Index>(),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let copy = DamagedCopy::of(&tiny()[which]);
        let names = names(&copy.path("global_step5"));
        let path = copy.file(file.get::<String>(&names));
        let (entries, pickle) = unpack(&path);
        // Each change is tested separately, because most changes make the reader stop early.
        for (position, byte) in changes {
            let mut entries = entries.clone();
            let bytes = &mut entries[pickle].1;
            let position = position.index(bytes.len());
            bytes[position] = byte;
            pack(&path, &entries);
            read_all(&copy);
        }
    }

    #[test]
    fn a_changed_archive_is_read_or_refused(
        which in 0..2usize,
        file in any::<proptest::sample::Index>(),
        // A change is either near the end, where the list of entries is, or anywhere in the file.
        changes in proptest::collection::vec((any::<bool>(), 0..2000usize, any::<u8>()), 1..4),
    ) {
        let copy = DamagedCopy::of(&tiny()[which]);
        let name = file.get(&names(&copy.path("global_step5"))).clone();
        copy.change(&name, |bytes| {
            for (is_at_end, position, byte) in changes {
                let last = bytes.len() - 1;
                let position = if is_at_end { last - position } else { position * last / 2000 };
                bytes[position] = byte;
            }
        });
        read_all(&copy);
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let copy = DamagedCopy::of(&tiny()[0]);
        copy.change(OPTIM_1, |old| *old = bytes);
        copy.problem(OPTIM_1);
    }
}
