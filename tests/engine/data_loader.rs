//! Token files, folders of text, and the batches built from them.

use candle_core::Device;
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenBatch, TokenData};
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn u16_file(dir: &Path, tokens: impl IntoIterator<Item = u16>) -> TokenData {
    let path = dir.join("tokens.u16");
    let bytes: Vec<u8> = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
    fs::write(&path, bytes).unwrap();
    TokenData::open(Some(&path)).unwrap()
}

fn rows(batch: &TokenBatch) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    (batch.inputs.to_vec2().unwrap(), batch.targets.to_vec2().unwrap())
}

/// Returns an error's text without the name of the temporary folder.
fn message(error: candle_zero::Error, dir: &Path) -> String {
    error.to_string().replace(dir.to_str().unwrap(), "DIR")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_global_order_does_not_depend_on_world_and_accumulation(
        micro in 1usize..4, accumulation in 1usize..4, world in 1usize..5, shuffled: bool, seed: u64,
    ) {
        let data = Arc::new(TokenData::embedded());
        let order = if shuffled { SampleOrder::Shuffled { seed } } else { SampleOrder::Sequential };
        let global = micro * accumulation * world;
        let inputs = |micro, accumulation, world| {
            let mut rows = vec![];
            for step in 0..3 {
                for accumulation_index in 0..accumulation {
                    for rank in 0..world {
                        let shape = BatchPartition { micro, accumulation, world, rank };
                        let loader = Loader::new(data.clone(), order, shape, 8, 256, &Device::Cpu).unwrap();
                        rows.extend(loader.batch(step, accumulation_index).unwrap().inputs.to_vec2::<u32>().unwrap());
                    }
                }
            }
            rows
        };
        let alone = inputs(global, 1, 1);
        prop_assert_eq!(alone.len(), 3 * global);
        prop_assert_eq!(&alone, &inputs(micro, accumulation, world));
        prop_assert_eq!(&alone, &inputs(1, global, 1));
        prop_assert_eq!(&alone, &inputs(1, 1, global));
    }
}

#[test]
fn sequential_samples_follow_the_rule_and_wrap() {
    let dir = tempfile::tempdir().unwrap();
    let data = u16_file(dir.path(), 0..50);
    let shape = BatchPartition { micro: 2, accumulation: 2, world: 2, rank: 1 };
    let mut loader = Loader::new(data, SampleOrder::Sequential, shape, 10, 50, &Device::Cpu).unwrap();
    // Rank 1 has global samples 2, 3 | 6, 7 | 10, 11, ...; sample i starts at (10 i) mod 39.
    for expected in [[20, 30], [21, 31], [22, 32]] {
        let (inputs, targets) = rows(&loader.next().unwrap().unwrap());
        for (row, start) in expected.into_iter().enumerate() {
            assert_eq!(inputs[row], (start..start + 10).collect::<Vec<u32>>());
            assert_eq!(targets[row], (start + 1..start + 11).collect::<Vec<u32>>());
        }
    }
}

#[test]
fn a_loader_put_to_a_position_goes_on_as_if_it_had_never_stopped() {
    let shape = BatchPartition { micro: 2, accumulation: 3, world: 2, rank: 1 };
    let new = || {
        let order = SampleOrder::Shuffled { seed: 5 };
        Loader::new(TokenData::embedded(), order, shape, 16, 256, &Device::Cpu).unwrap()
    };
    let mut straight = new();
    for _ in 0..7 {
        straight.next().unwrap().unwrap();
    }
    let mut resumed = new();
    resumed.set_position(straight.position());
    for _ in 0..5 {
        assert_eq!(rows(&straight.next().unwrap().unwrap()), rows(&resumed.next().unwrap().unwrap()));
    }
    assert_eq!((straight.position(), resumed.position()), (12, 12));
}

#[test]
fn a_shuffled_epoch_covers_the_data_once() {
    let dir = tempfile::tempdir().unwrap();
    let shape = BatchPartition { micro: 3, accumulation: 1, world: 1, rank: 0 };
    let data = u16_file(dir.path(), 0..61);
    let loader = Loader::new(data, SampleOrder::Shuffled { seed: 1 }, shape, 10, 61, &Device::Cpu).unwrap();
    assert_eq!(loader.sampler().epoch_len(), 6);
    let mut seen: Vec<u32> = (0..2).flat_map(|step| rows(&loader.batch(step, 0).unwrap()).0.concat()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..60).collect::<Vec<u32>>());
}

#[test]
fn the_embedded_data_is_text_of_this_project() {
    let data = TokenData::open(None).unwrap();
    assert!(data.is_byte_level() && data.len() > 10_000);
    assert_eq!(data.vocab_needed(), 256);
    let mut tokens = vec![];
    data.extend(0, data.len(), &mut tokens);
    let text = String::from_utf8(tokens.into_iter().map(|t| t as u8).collect()).unwrap();
    assert!(text.contains("pub struct TokenData"));
}

#[test]
fn a_folder_is_read_in_path_order_without_hidden_target_and_binary_files() {
    let dir = tempfile::tempdir().unwrap();
    for (path, bytes) in [
        ("b.txt", &b"second"[..]),
        ("a/z.md", b"first\n"),
        ("a/.hidden", b"no"),
        (".git/x", b"no"),
        ("target/x.txt", b"no"),
        ("c.png", b"\xff\xd8"),
        ("d/e/f.rs", b"third\n"),
    ] {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let data = TokenData::open(Some(dir.path())).unwrap();
    assert_eq!((data.files(), data.skipped_files()), (3, 1));
    let mut tokens = vec![];
    data.extend(0, data.len(), &mut tokens);
    assert_eq!(tokens, "first\nsecond\nthird\n".bytes().map(u32::from).collect::<Vec<_>>());
}

#[test]
fn large_text_is_no_memory_of_this_process() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let line = "Some text of which there is a lot, and no two bytes in a row are alike.\n";
    for name in ["a.txt", "b.txt"] {
        fs::write(dir.path().join(name), line.repeat((128 << 20) / line.len())).unwrap();
    }
    fs::write(dir.path().join("c.txt"), "the end").unwrap();
    let anonymous = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let before = anonymous();
    let data = TokenData::open(Some(dir.path())).unwrap();
    let mut tokens = vec![];
    data.extend(data.len() - 8 - line.len(), 8 + line.len(), &mut tokens);
    let text = String::from_utf8(tokens.into_iter().map(|t| t as u8).collect()).unwrap();
    assert_eq!(text, format!("{line}the end\n"));
    // The limit leaves room for other tests, which run at the same time.
    assert!(anonymous().saturating_sub(before) < 160 << 20);
}

#[test]
fn token_files_tell_the_vocabulary_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let data = u16_file(dir.path(), [3, 50_256, 0]);
    assert_eq!((data.len(), data.vocab_needed(), data.is_byte_level()), (3, 50_257, false));
}

#[test]
fn a_token_out_of_the_vocabulary_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let data = || u16_file(dir.path(), (0..40).map(|i| if i == 27 { 700 } else { i }));
    let shape = BatchPartition { micro: 1, accumulation: 1, world: 1, rank: 0 };
    let open = |data| Loader::new(data, SampleOrder::Sequential, shape, 10, 256, &Device::Cpu);
    insta::assert_snapshot!(message(open(data()).unwrap_err(), dir.path()), @"token 700 at position 27 of DIR/tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 701 or more");
    // A file that is too long to be checked completely is checked when it is used.
    drop(data());
    let file = fs::OpenOptions::new().write(true).open(dir.path().join("tokens.u16")).unwrap();
    file.set_len(2 * ((64 << 20) + 1)).unwrap();
    let mut loader = open(TokenData::open(Some(&dir.path().join("tokens.u16"))).unwrap()).unwrap();
    assert!(loader.next().unwrap().is_ok() && loader.next().unwrap().is_ok());
    let error = loader.next().unwrap().unwrap_err();
    insta::assert_snapshot!(message(error, dir.path()), @"token 700 at position 27 of DIR/tokens.u16 is outside the model's vocabulary of 256 (allowed: 0 to 255); use data with that vocabulary, or a model with a vocabulary of 701 or more");
    assert_eq!(loader.position(), 2);
}

#[test]
fn data_shorter_than_a_sample_is_refused_with_both_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let data = Arc::new(u16_file(dir.path(), 0..11));
    let shape = BatchPartition { micro: 1, accumulation: 1, world: 1, rank: 0 };
    let open = |order, ctx| Loader::new(data.clone(), order, shape, ctx, 256, &Device::Cpu);
    insta::assert_snapshot!(message(open(SampleOrder::Sequential, 10).unwrap_err(), dir.path()), @"DIR/tokens.u16 has 11 tokens, but a sample with a context length of 10 needs 12; use more data or a shorter context");
    assert!(open(SampleOrder::Sequential, 9).is_ok());
    assert!(open(SampleOrder::Shuffled { seed: 0 }, 10).is_ok());
    assert!(open(SampleOrder::Shuffled { seed: 0 }, 11).is_err());
}

#[test]
fn files_that_are_no_data_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        message(TokenData::open(Some(&path)).unwrap_err(), dir.path())
    };
    insta::assert_snapshot!(open("half.bin", b"abc"), @"DIR/half.bin has 3 bytes; 16-bit tokens need an even number of bytes: is it a complete token file?");
    insta::assert_snapshot!(open("image.txt", b"PNG\xff\xfe"), @"DIR/image.txt is not UTF-8 text (byte 3); a file of little-endian 16-bit tokens must end in .bin or .u16");
    for name in ["tokens.bin", "text"] {
        let path = dir.path().join(name);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let text = message(TokenData::open(Some(&path)).unwrap_err(), dir.path());
        assert!(text.contains("it is a device, but a file is needed"), "{text}");
        fs::remove_file(&path).unwrap();
    }
    let missing = TokenData::open(Some(&dir.path().join("missing.txt"))).unwrap_err();
    insta::assert_snapshot!(message(missing, dir.path()), @"cannot read DIR/missing.txt: No such file or directory (os error 2)");
    fs::remove_file(dir.path().join("half.bin")).unwrap();
    insta::assert_snapshot!(message(TokenData::open(Some(dir.path())).unwrap_err(), dir.path()), @"DIR contains no text (files that are not UTF-8: 1); hidden files and folders named target are not read, and token files (.bin, .u16) must be given by their own path");
}
