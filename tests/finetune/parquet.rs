//! Parquet files as data: files that pyarrow wrote (`scripts/record_parquet.py`), compared with the same rows as JSON
//! lines.

use crate::data::TestFolder;
use crate::support::processes::repository;
use candle_zero_finetune::{DataOptions, Dataset, RecordFormat, Sample, Source, TrainingTask, show};
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    repository().join("tests/fixtures/finetune/parquet").join(name)
}

fn source(path: PathBuf) -> Source {
    Source { path, weight: 1.0 }
}

/// Returns options that ignore a column of pictures, which cannot be read.
fn without_pictures(task: TrainingTask) -> DataOptions {
    DataOptions { columns: "ignore=image".parse().unwrap(), ..DataOptions::new(task, 64) }
}

/// Returns the samples of a file, each with the index of its label, and the file's labels and format.
fn samples(folder: &TestFolder, path: PathBuf, task: TrainingTask) -> (Vec<(Sample, u32)>, Vec<String>, RecordFormat) {
    let dataset = folder.try_prepare(&[source(path)], &without_pictures(task)).unwrap();
    let (_, report) = dataset.reports().next().unwrap();
    let [form] = report.forms.keys().collect::<Vec<_>>()[..] else { panic!("{report}") };
    let samples = (0..dataset.len()).map(|i| (dataset.sample(i).to_sample(), dataset.sample(i).label));
    (samples.collect(), dataset.labels().to_vec(), *form)
}

#[test]
fn samples_are_those_of_the_same_rows_as_json_lines() {
    let folder = TestFolder::new();
    let (generate, classify, prefer) = (TrainingTask::Generate, TrainingTask::Classify, TrainingTask::Prefer);
    let files = [
        ("chats", &["snappy", "zstd", "gzip", "lz4", "plain", "text"][..], RecordFormat::Messages, generate),
        ("sharegpt", &[], RecordFormat::ShareGpt, generate),
        ("completion", &[], RecordFormat::Completion, generate),
        ("completion_of_messages", &[], RecordFormat::Completion, generate),
        ("alpaca", &[], RecordFormat::Alpaca, generate),
        ("text", &[], RecordFormat::Text, generate),
        ("preference", &[], RecordFormat::Preference, prefer),
        ("preference_of_messages", &[], RecordFormat::Preference, prefer),
        ("label", &[], RecordFormat::Label, classify),
        ("label_of_text", &[], RecordFormat::Label, classify),
        ("label_of_bool", &[], RecordFormat::Label, classify),
    ];
    for (name, kinds, form, task) in files {
        let expected = samples(&folder, fixture(&format!("{name}.jsonl")), task);
        assert_eq!(expected.2, form, "{name}");
        assert!(expected.0.len() > 2 && expected.0.iter().all(|(sample, _)| !sample.ids.is_empty()), "{name}");
        let kinds =
            if kinds.is_empty() { vec![String::new()] } else { kinds.iter().map(|kind| format!(".{kind}")).collect() };
        for kind in kinds {
            let name = format!("{name}{kind}.parquet");
            assert_eq!(samples(&folder, fixture(&name), task), expected, "{name}");
        }
    }
}

#[test]
fn a_row_is_named_by_its_number() {
    let folder = TestFolder::new();
    let file = source(fixture("label_with_gaps.parquet"));
    // A record with a text and no label is a text to be continued, which classification cannot use.
    let dataset = folder.prepare(std::slice::from_ref(&file), TrainingTask::Classify);
    let (_, report) = dataset.reports().next().unwrap();
    insta::assert_snapshot!(report.notes().join("\n"), @"1 record (row 3) could not be used (row 3: it contains text, but text and label are required; map them with --columns text=COLUMN,label=COLUMN)");
    let shown = show(&dataset, &folder.tokenizer, 3, false).unwrap().replace(fixture("").to_str().unwrap(), "");
    let lines: Vec<&str> = shown.lines().filter(|line| line.contains("tokens")).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    label_with_gaps.parquet, row 1: 5 tokens, 0 targets, label 0
    label_with_gaps.parquet, row 2: 5 tokens, 0 targets, label 1
    label_with_gaps.parquet, row 4: 5 tokens, 0 targets, label 1
    ");
    let options = DataOptions { strict: true, ..DataOptions::new(TrainingTask::Classify, 64) };
    let error = folder.try_prepare(&[file], &options).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(fixture("").to_str().unwrap(), "DIR/"), @"row 3 of DIR/label_with_gaps.parquet cannot be used: it contains text, but text and label are required; map them with --columns text=COLUMN,label=COLUMN; correct it, or leave out --strict to skip such rows");
}

#[test]
fn pictures_are_refused_whether_they_can_be_read_or_not() {
    let folder = TestFolder::new();
    let options = DataOptions::new(TrainingTask::Generate, 64);
    let refused = folder.try_prepare(&[source(fixture("completion.parquet"))], &options).unwrap_err().to_string();
    assert!(refused.contains("it has image") && refused.contains("--columns ignore=image"), "{refused}");
}

#[test]
fn samples_are_kept_until_the_file_changes() {
    let folder = TestFolder::new();
    let path = folder.cache().with_file_name("x.parquet");
    let options = without_pictures(TrainingTask::Generate);
    let prepare = || -> Dataset { folder.try_prepare(&[source(path.clone())], &options).unwrap() };
    let from_cache = || prepare().reports().next().unwrap().1.from_cache;
    std::fs::copy(fixture("completion.parquet"), &path).unwrap();
    assert!(!from_cache());
    assert!(from_cache());
    let before = prepare().fingerprint();
    std::fs::copy(fixture("text.parquet"), &path).unwrap();
    assert!(!from_cache());
    assert_ne!(prepare().fingerprint(), before);
}

#[test]
fn what_cannot_be_read_is_refused_with_what_to_do() {
    let folder = TestFolder::new();
    let dir = folder.cache().with_file_name("");
    let mut said = vec![];
    let mut refuse = |name: &str, bytes: &[u8]| {
        let path = dir.join(name).with_extension("parquet");
        std::fs::write(&path, bytes).unwrap();
        let options = DataOptions::new(TrainingTask::Generate, 64);
        let error = folder.try_prepare(&[source(path)], &options).unwrap_err().to_string();
        said.push(error.replace(dir.to_str().unwrap(), "DIR/"));
    };
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(fixture("refused")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files {
        refuse(path.file_stem().unwrap().to_str().unwrap(), &std::fs::read(&path).unwrap());
    }
    let valid = std::fs::read(fixture("chats.snappy.parquet")).unwrap();
    refuse("z0_empty", b"");
    refuse("z1_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
    refuse("z2_lines", &std::fs::read(fixture("chats.jsonl")).unwrap());
    refuse("z3_cut", &valid[..valid.len() - 1]);
    refuse("z4_short", &valid[..4]);
    // Zeros replace bytes of the file's pages, of its footer, and of the footer's length.
    let zeros = |at: usize, count: usize| {
        let mut damaged = valid.clone();
        damaged[at..at + count].fill(0);
        damaged
    };
    refuse("z5_page", &zeros(40, 20));
    refuse("z6_later", &zeros(valid.len() / 3, 200));
    let length = u32::from_le_bytes(valid[valid.len() - 8..][..4].try_into().unwrap()) as usize;
    refuse("z7_footer", &zeros(valid.len() - 8 - length, 20));
    refuse("z8_length", &zeros(valid.len() - 8, 4));
    insta::assert_snapshot!(said.join("\n"));
}
