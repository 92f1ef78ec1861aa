//! Samples and rows from data files: formats, notes, the cache, and packing.

use crate::support::processes::repository;
use candle_zero::Error;
use candle_zero::data::BatchPartition;
use candle_zero_finetune::error::FinetuneError;
use candle_zero_finetune::{
    Batches, Conversation, DataOptions, Dataset, NO_TARGET, RecordFormat, Sample, SequencePacking, Source, Template,
    Tokenizer, TrainingTask, Truncation, show,
};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// A folder with data files, a cache and the tiny tokenizer.
pub(crate) struct TestFolder {
    pub(crate) dir: TempDir,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Template,
}

impl TestFolder {
    pub(crate) fn new() -> Self {
        let model = repository().join("tests/fixtures/finetune/models/llama");
        let tokenizer = Tokenizer::open(&model).unwrap();
        let template = Template::open(&model, &tokenizer).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), tokenizer, template }
    }

    fn file(&self, name: &str, text: &str) -> Source {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Source { path, weight: 1.0 }
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    pub(crate) fn try_prepare(&self, sources: &[Source], options: &DataOptions) -> Result<Dataset, Error> {
        let template = Some(&self.template);
        Dataset::prepare(sources, &self.tokenizer, template, options, &self.cache(), &mut |_| {})
    }

    pub(crate) fn prepare(&self, sources: &[Source], task: TrainingTask) -> Dataset {
        self.try_prepare(sources, &DataOptions::new(task, 64)).unwrap()
    }

    /// Returns the samples of a file of one format.
    fn samples(&self, name: &str, text: &str, form: RecordFormat, task: TrainingTask) -> Vec<Sample> {
        let dataset = self.prepare(&[self.file(name, text)], task);
        let (_, report) = dataset.reports().next().unwrap();
        assert_eq!(report.forms.keys().collect::<Vec<_>>(), [&form], "{report}: {:?}", report.notes());
        let usual =
            |note: &String| note == "not read: id (1 record)" || note.contains("without the model's chat template");
        assert_eq!(report.notes().into_iter().filter(|note| !usual(note)).collect::<Vec<_>>(), Vec::<String>::new());
        (0..dataset.len()).map(|i| dataset.sample(i).to_sample()).collect()
    }

    /// Returns the text of a sample, with brackets around its targets.
    fn shown(&self, sample: &Sample) -> String {
        let mut text = String::new();
        let mut inside = false;
        let mut stream = self.tokenizer.stream(false);
        for (id, target) in sample.ids.iter().zip(&sample.targets) {
            if *target != inside {
                text.push(if inside { ']' } else { '[' });
                inside = *target;
            }
            text.push_str(&stream.push(*id).unwrap());
        }
        text + if inside { "]" } else { "" }
    }
}

#[test]
fn one_conversation_in_each_form_gives_the_same_sample() {
    let folder = TestFolder::new();
    let messages = r#"[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]"#;
    let quoted = messages.replace('"', "\"\"");
    let files = [
        ("a.jsonl", format!("{{\"messages\": {messages}}}\n"), RecordFormat::Messages),
        ("b.jsonl", format!("{{\"conversations\": {messages}}}"), RecordFormat::Messages),
        ("c.json", format!("[\n{{\"messages\": {messages}}}\n]"), RecordFormat::Messages),
        ("d.jsonl", messages.into(), RecordFormat::Messages),
        ("e.csv", format!("id,messages\n7,\"{quoted}\"\n"), RecordFormat::Messages),
        (
            "f.json",
            r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}"#.into(),
            RecordFormat::ShareGpt,
        ),
        ("g.jsonl", r#"{"instruction": "Hi", "input": "", "output": "Hello"}"#.into(), RecordFormat::Alpaca),
        ("h.csv", "instruction,output\nHi,Hello\n".into(), RecordFormat::Alpaca),
        (
            "i.jsonl",
            r#"{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]}"#
                .into(),
            RecordFormat::Completion,
        ),
    ];
    for (name, text, form) in files {
        let samples = folder.samples(name, &text, form, TrainingTask::Generate);
        let shown: Vec<String> = samples.iter().map(|sample| folder.shown(sample)).collect();
        let expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>]\n";
        assert_eq!(shown, [expected], "{name}");
    }
}

#[test]
fn completions_texts_and_labels_end_as_their_task_needs() {
    let folder = TestFolder::new();
    let shown = |name, text, form, task| {
        let samples = folder.samples(name, text, form, task);
        samples.iter().map(|sample| folder.shown(sample)).collect::<Vec<_>>()
    };
    let completion =
        shown("a.jsonl", r#"{"prompt": "2+2=", "completion": "4"}"#, RecordFormat::Completion, TrainingTask::Generate);
    assert_eq!(completion, ["2+2=[4<|im_end|>]"]);
    assert_eq!(
        shown("b.jsonl", r#"{"text": "Once"}"#, RecordFormat::Text, TrainingTask::Generate),
        ["[Once<|im_end|>]"]
    );
    let labels = "{\"text\": \"good\", \"label\": 10}\n{\"text\": \"bad\", \"label\": 9}\n";
    assert_eq!(shown("c.jsonl", labels, RecordFormat::Label, TrainingTask::Classify), ["good", "bad"]);
    let dataset = folder.prepare(&[folder.file("c.jsonl", labels)], TrainingTask::Classify);
    assert_eq!(dataset.labels(), ["9", "10"]);
    assert_eq!([dataset.sample(0).label, dataset.sample(1).label], [1, 0]);
    let pair = r#"{"prompt": "a?", "chosen": " yes", "rejected": " no"}"#;
    assert_eq!(
        shown("d.jsonl", pair, RecordFormat::Preference, TrainingTask::Prefer),
        ["a?[ yes<|im_end|>]", "a?[ no<|im_end|>]"]
    );
    // Both answers contain the prompt as messages. Earlier answers are not trained on.
    let turn = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let (ask, answer) = (turn("user", "q"), turn("assistant", "same"));
    let chat = |end| format!("[{ask}, {answer}, {ask}, {}]", turn("assistant", end));
    let pair = format!("{{\"prompt\": \"q\", \"chosen\": {}, \"rejected\": {}}}", chat("x"), chat("y"));
    let found = shown("e.jsonl", &pair, RecordFormat::Preference, TrainingTask::Prefer);
    assert!(found[0].ends_with("assistant\n[x<|im_end|>]\n") && found[0].contains("same<|im_end|>\n"), "{found:?}");
    assert!(found[1].ends_with("assistant\n[y<|im_end|>]\n"), "{found:?}");
}

const BAD: &str = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}
{"messages": [{"role": "user", "content": "only a question"}]}
{"messages": [{"role": "user"
{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "an answer that is longer than the context of twenty-four tokens allows it to be"}]}
{"messages": [{"role": "user", "content": "a question that is longer than the context of twenty-four tokens"}, {"role": "assistant", "content": "x"}]}
{"question": "?", "answer": "!"}
{"messages": "nothing"}
{"messages": []}
{"messages": [{"content": "x"}]}
{"conversations": [{"from": "owl", "value": "x"}]}
7
{"prompt": "x", "completion": 7}
{"chosen": "x", "rejected": "y"}
"#;

#[test]
fn lines_that_are_not_as_they_should_be_are_counted_and_named() {
    let folder = TestFolder::new();
    let source = folder.file("bad.jsonl", BAD);
    let options = DataOptions::new(TrainingTask::Generate, 24);
    let dataset = folder.try_prepare(std::slice::from_ref(&source), &options).unwrap();
    let (_, report) = dataset.reports().next().unwrap();
    let notes = [report.to_string()].into_iter().chain(report.notes()).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(notes);
    // The report from the cache is the same.
    let again = folder.try_prepare(&[source], &options).unwrap();
    let (_, report) = again.reports().next().unwrap();
    assert!(report.from_cache);
    assert_eq!(report.notes(), dataset.reports().next().unwrap().1.notes());
}

#[test]
fn wrong_data_is_refused_with_what_to_do() {
    let folder = TestFolder::new();
    let options = |task| DataOptions::new(task, 24);
    let mut said = vec![];
    let mut refuse = |name: &str, text: &str, options: &DataOptions| {
        let error = folder.try_prepare(&[folder.file(name, text)], options).unwrap_err().to_string();
        said.push(error.replace(folder.dir.path().to_str().unwrap(), "DIR"));
    };
    let generate = options(TrainingTask::Generate);
    refuse("a.jsonl", BAD, &DataOptions { strict: true, ..generate.clone() });
    refuse("b.jsonl", "", &generate);
    refuse("c.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n", &generate);
    refuse("d.jsonl", "{\"question\": 1, \"answer\": 2}\n{\"question\": 1}\n", &generate);
    refuse("e.arrow", "", &generate);
    refuse("f.jsonl", "{\"text\": \"x\"}\n", &options(TrainingTask::Classify));
    refuse("g.jsonl", "{\"text\": \"x\", \"label\": 1}\n", &options(TrainingTask::Prefer));
    refuse("h.txt", "words\n", &options(TrainingTask::Prefer));
    refuse("i.jsonl", "{\"chosen\": [], \"rejected\": []}\n", &options(TrainingTask::Prefer));
    refuse("j.json", "[{\"text\": ", &generate);
    refuse("k.csv", "a,b\n1\n", &generate);
    let missing = Source { path: folder.dir.path().join("none.jsonl"), weight: 1.0 };
    let error = folder.try_prepare(&[missing], &generate).unwrap_err();
    assert!(matches!(error, Error::Io { action: "read", .. }), "{error}");
    let weight = Source::parse("x.jsonl:0").unwrap_err();
    assert!(matches!(weight.downcast_ref(), Some(FinetuneError::Weight { .. })));
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn overlong_samples_are_cut_or_left_out_as_asked() {
    let folder = TestFolder::new();
    let source = folder.file("x.jsonl", BAD.lines().nth(3).unwrap());
    let text = folder.file("y.jsonl", &format!("{{\"text\": \"{}\"}}", "word ".repeat(40)));
    let options = DataOptions::new(TrainingTask::Generate, 24);
    let cut = folder.try_prepare(&[source.clone(), text.clone()], &options).unwrap();
    let pieces: Vec<usize> = (0..cut.len()).map(|i| cut.length(i)).collect();
    assert!(pieces.len() > 3 && pieces.iter().all(|length| *length <= 24), "{pieces:?}");
    let error =
        folder.try_prepare(&[source, text], &DataOptions { overlong: Truncation::Drop, ..options }).unwrap_err();
    assert!(error.to_string().contains("longer than the context"), "{error}");
}

#[test]
fn plain_text_fills_its_samples_and_loses_nothing() {
    let folder = TestFolder::new();
    let text = "A line of some words, and then the next.\n".repeat(5000);
    let dataset = folder.prepare(&[folder.file("x.txt", &text)], TrainingTask::Generate);
    let samples: Vec<Sample> = (0..dataset.len()).map(|i| dataset.sample(i).to_sample()).collect();
    assert!(samples.iter().filter(|sample| sample.ids.len() < 64).count() <= 1);
    let tokens: usize = samples.iter().map(|sample| sample.ids.len()).sum();
    assert_eq!(tokens, folder.tokenizer.encode(&text).unwrap().ids.len());
}

#[test]
fn a_cache_is_taken_when_nothing_changed_and_made_again_when_something_did() {
    let folder = TestFolder::new();
    let line = r#"{"text": "some words"}"#;
    let from_cache = |source: &Source, ctx| {
        let options = DataOptions::new(TrainingTask::Generate, ctx);
        folder.try_prepare(std::slice::from_ref(source), &options).unwrap().reports().next().unwrap().1.from_cache
    };
    let source = folder.file("x.jsonl", line);
    assert!(!from_cache(&source, 64));
    assert!(from_cache(&source, 64));
    assert!(!from_cache(&source, 32));
    // The file changes, but keeps its length.
    let source = folder.file("x.jsonl", &line.replace("some", "same"));
    assert!(!from_cache(&source, 64));
    assert!(from_cache(&source, 64));
    for entry in std::fs::read_dir(folder.cache()).unwrap() {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    }
    assert!(!from_cache(&source, 64));
    assert!(from_cache(&source, 64));
}

#[test]
fn weights_count_samples_and_a_split_parts_them() {
    let folder = TestFolder::new();
    let lines = |n: usize| (0..n).map(|i| format!("{{\"text\": \"number {i}\"}}\n")).collect::<String>();
    let (a, b) = (folder.file("a.jsonl", &lines(10)), folder.file("b.jsonl", &lines(8)));
    let dataset = folder.prepare(&[Source { weight: 2.5, ..a }, Source { weight: 0.5, ..b }], TrainingTask::Generate);
    assert_eq!(dataset.len(), 25 + 4);
    let mut seen = std::collections::BTreeMap::new();
    for i in 0..dataset.len() {
        *seen.entry((dataset.path(i).file_name().unwrap(), dataset.sample(i).line)).or_insert(0) += 1;
    }
    let times = |name: &str| seen.iter().filter(|((file, _), _)| *file == name).map(|(_, n)| *n).collect::<Vec<_>>();
    assert_eq!(times("a.jsonl").iter().filter(|n| **n == 3).count(), 5);
    assert_eq!(times("a.jsonl").iter().filter(|n| **n == 2).count(), 5);
    assert_eq!(times("b.jsonl"), [1; 4]);
    let (training, validation) = dataset.split(0.2, 7);
    assert_eq!((training.len(), validation.len()), (20 + 3, 2 + 2));
    let lines = |data: &Dataset| {
        (0..data.len())
            .map(|i| (data.path(i).to_owned(), data.sample(i).line))
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert!(lines(&training).is_disjoint(&lines(&validation)));
}

/// Creates a dataset with one sample for each length, which is the number of words in the sample's prompt.
fn dataset(folder: &TestFolder, lengths: &[usize]) -> Arc<Dataset> {
    let turn = |n: &usize| format!("{{\"prompt\": \"{}\", \"completion\": \"zz\"}}\n", "q ".repeat(*n));
    Arc::new(
        folder
            .prepare(&[folder.file("x.jsonl", &lengths.iter().map(turn).collect::<String>())], TrainingTask::Generate),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn rows_have_each_sample_once_whole_and_in_step_with_its_targets(
        lengths in prop::collection::vec(1_usize..14, 1..40),
        world in 1_usize..4,
        micro in 1_usize..4,
        accumulation in 1_usize..3,
        packed: bool,
        seed: u64,
    ) {
        let folder = TestFolder::new();
        let data = dataset(&folder, &lengths);
        let packing = if packed { SequencePacking::Packed { ctx: 64 } } else { SequencePacking::Padded };
        let shape = |rank| BatchPartition { micro, accumulation, world, rank };
        let batches_of = |rank| Batches::training(data.clone(), packing, shape(rank), seed, 3);
        let steps = batches_of(0).steps_per_epoch();
        let mut seen = vec![];
        for step in 0..steps {
            let mut targets = 0;
            for (accumulated, rank) in (0..accumulation).flat_map(|i| (0..world).map(move |rank| (i, rank))) {
                let batches = batches_of(rank);
                prop_assert_eq!(batches.steps_per_epoch(), steps);
                let rows = batches.batch(step, accumulated);
                prop_assert_eq!(rows.rows, micro);
                prop_assert_eq!((rows.ids.len(), rows.targets.len()), (rows.rows * rows.time, rows.rows * rows.time));
                prop_assert!(rows.time <= 64);
                for (row, starts) in rows.starts.iter().enumerate() {
                    prop_assert!(starts.first() == Some(&0) && starts.is_sorted());
                    let ids = &rows.ids[row * rows.time..][..rows.time];
                    let wanted = &rows.targets[row * rows.time..][..rows.time];
                    for (i, start) in starts.iter().enumerate() {
                        let end = starts.get(i + 1).copied().unwrap_or(rows.time);
                        if ids[*start..end].iter().all(|id| *id == 3) {
                            prop_assert!(wanted[*start..end].iter().all(|target| *target == NO_TARGET));
                            continue;
                        }
                        prop_assert_eq!(wanted[end - 1], NO_TARGET);
                        for at in *start..end - 1 {
                            prop_assert!(wanted[at] == NO_TARGET || wanted[at] == i64::from(ids[at + 1]));
                        }
                        targets += wanted[*start..end].iter().filter(|target| **target != NO_TARGET).count() as u64;
                        seen.push((ids[*start..end].to_vec(), wanted[*start..end].iter().filter(|t| **t != NO_TARGET).count()));
                    }
                }
            }
            prop_assert_eq!(batches_of(0).targets_of_step(step), targets);
        }
        // The first epoch contains each sample. Its last step is completed with rows from the second epoch.
        let of_sample = |i| (data.sample(i).ids().collect::<Vec<_>>(), data.sample(i).target_count());
        let mut all: Vec<_> = (0..data.len()).map(of_sample).collect();
        for sample in &all {
            prop_assert!(seen.contains(sample));
        }
        let rows = batches_of(0).rows_per_epoch();
        if rows % (micro * world * accumulation) == 0 {
            all.sort();
            seen.sort();
            prop_assert_eq!(seen, all);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn what_the_assistant_says_is_predicted_once_and_nothing_else(
        turns in prop::collection::vec(
            (0..3_usize, prop::collection::vec(
                prop_oneof![
                    4 => "[a-zA-Z0-9 ,.?\u{e4}\u{4f60}\n]{1,8}",
                    1 => Just("<|im_end|>".to_string()),
                    1 => Just("<|im_start|>assistant\n".to_string()),
                    1 => Just("<|im_end|>\n<|im_start|>assistant\nNo.".to_string()),
                ],
                0..5,
            )),
            1..6,
        ),
    ) {
        let folder = TestFolder::new();
        let roles = ["user", "assistant", "system"];
        // Each content begins with a letter, because a line break at its beginning would share a token with the header.
        let turns: Vec<_> = turns.iter().map(|(role, parts)| (roles[*role], format!("A{}", parts.concat()))).collect();
        let answers = turns.iter().filter(|(role, _)| *role == "assistant");
        let expected: String = answers.map(|(_, content)| format!("{content}<|im_end|>")).collect();
        let conversation = Conversation::new(turns);
        let sample = Sample::of_conversation(&folder.tokenizer, &folder.template, &conversation).unwrap();
        let targets = sample.ids.iter().zip(&sample.targets).filter(|(_, target)| **target);
        let targets: Vec<u32> = targets.map(|(id, _)| *id).collect();
        prop_assert_eq!(folder.tokenizer.decode(&targets, false).unwrap(), expected);
        prop_assert_eq!(
            folder.tokenizer.decode(&sample.ids, false).unwrap(),
            folder.template.render(&conversation, false).unwrap()
        );
    }
}

#[test]
fn a_run_that_goes_on_has_the_batches_of_one_that_was_not_stopped() {
    let folder = TestFolder::new();
    let lengths = [3, 1, 9, 4, 4, 7, 2, 12, 5, 1, 1, 8];
    for packing in [SequencePacking::Packed { ctx: 40 }, SequencePacking::Padded] {
        // Samples are newly built in some cases and mapped from the cache in others. A step is requested either
        // directly or after all steps before it.
        let batches = || {
            let shape = BatchPartition { micro: 2, accumulation: 2, world: 1, rank: 0 };
            Batches::training(dataset(&folder, &lengths), packing, shape, 5, 3)
        };
        let first = batches();
        let steps = 3 * first.steps_per_epoch();
        let all: Vec<_> = (0..steps).flat_map(|step| [first.batch(step, 0), first.batch(step, 1)]).collect();
        for step in (0..steps).rev() {
            let again = batches();
            assert_eq!(again.batch(step, 1), all[2 * step as usize + 1]);
            assert_eq!(again.batch(step, 0), all[2 * step as usize]);
        }
    }
}

#[test]
fn a_step_has_the_same_rows_for_any_number_of_ranks() {
    let folder = TestFolder::new();
    let data = dataset(&folder, &[3, 1, 9, 4, 4, 7, 2, 12, 5, 1, 1, 8]);
    let rows = |world: usize, micro: usize| {
        let batch = |rank| {
            let shape = BatchPartition { micro, accumulation: 1, world, rank };
            let batch = Batches::training(data.clone(), SequencePacking::Packed { ctx: 40 }, shape, 5, 3).batch(1, 0);
            (0..batch.rows)
                .map(|row| {
                    let ids = batch.ids[row * batch.time..][..batch.time].to_vec();
                    ids.into_iter().filter(|id| *id != 3).collect::<Vec<_>>()
                })
                .collect::<Vec<_>>()
        };
        (0..world).flat_map(batch).collect::<Vec<_>>()
    };
    assert_eq!(rows(1, 4), rows(2, 2));
    assert_eq!(rows(1, 4), rows(4, 1));
}

#[test]
fn validation_has_each_row_once_on_ranks_with_equally_many_batches() {
    let folder = TestFolder::new();
    let data = dataset(&folder, &[3, 1, 9, 4, 4]);
    let mut targets = 0;
    for rank in 0..4 {
        let shape = BatchPartition { micro: 1, accumulation: 1, world: 4, rank };
        let batches = Batches::validation(data.clone(), SequencePacking::Padded, shape, 3);
        assert_eq!(batches.steps_per_epoch(), 2);
        for step in 0..2 {
            let rows = batches.batch(step, 0);
            assert_eq!(rows.rows, 1);
            targets += rows.targets.iter().filter(|target| **target != NO_TARGET).count();
        }
    }
    assert_eq!(targets, (0..5).map(|i| data.sample(i).target_count()).sum::<usize>());
}

#[test]
fn shown_samples_have_their_targets_marked_and_colours_where_asked() {
    let folder = TestFolder::new();
    let data = folder.prepare(
        &[folder.file("x.jsonl", "{\"prompt\": \"a\\u001b[31mb\", \"completion\": \" yes\"}")],
        TrainingTask::Generate,
    );
    let plain = show(&data, &folder.tokenizer, 3, false).unwrap();
    assert!(plain.ends_with("tokens, 4 targets\na␛[31mb⟦ yes<|im_end|>⟧\n\n"), "{plain}");
    let coloured = show(&data, &folder.tokenizer, 1, true).unwrap();
    assert!(coloured.contains("a␛[31mb\u{1b}[32;1m yes<|im_end|>\u{1b}[0m"), "{coloured}");
}

#[test]
#[ignore = "measures MB/s on a generated file of CANDLE_ZERO_DATA_MB megabytes (default 20), and the peak memory"]
fn speed_of_tokenizing_and_packing() {
    use std::io::Write;
    let mut folder = TestFolder::new();
    if let Some(model) = std::env::var_os("CANDLE_ZERO_TOKENIZER") {
        folder.tokenizer = Tokenizer::open(&model).unwrap();
        folder.template = Template::open(&model, &folder.tokenizer).unwrap();
    }
    let megabytes = std::env::var("CANDLE_ZERO_DATA_MB").map_or(20, |text| text.parse().unwrap());
    let words: Vec<&str> = include_str!("../../src/data/corpus.txt").split_whitespace().collect();
    let path = folder.dir.path().join("x.jsonl");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    let (mut written, mut at) = (0, 0_usize);
    while written < megabytes << 20 {
        let mut say = |n: usize| {
            at = (at * 31 + 7) % (words.len() - 200);
            words[at..at + n].join(" ")
        };
        let turns = [("user", say(60)), ("assistant", say(120)), ("user", say(20)), ("assistant", say(90))];
        let turns = turns.map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        let line = serde_json::json!({"messages": turns}).to_string();
        written += line.len() + 1;
        writeln!(file, "{line}").unwrap();
    }
    file.into_inner().unwrap();
    drop(words);
    let memory = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status
            .lines()
            .filter(|line| line.starts_with("VmHWM") || line.starts_with("RssAnon"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let source = Source { path, weight: 1.0 };
    let options = DataOptions::new(TrainingTask::Generate, 4096);
    for _ in 0..2 {
        let start = std::time::Instant::now();
        let data = Arc::new(folder.try_prepare(std::slice::from_ref(&source), &options).unwrap());
        let tokenized = start.elapsed().as_secs_f64();
        let shape = BatchPartition { micro: 1, accumulation: 1, world: 1, rank: 0 };
        let batches = Batches::training(data.clone(), SequencePacking::Packed { ctx: 4096 }, shape, 1, 0);
        let tokens: u64 = (0..batches.steps_per_epoch()).map(|step| batches.batch(step, 0).ids.len() as u64).sum();
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{} samples, {tokens} tokens in rows, {:.1} MB/s ({tokenized:.2} s and {:.2} s), {}",
            data.len(),
            written as f64 / 1e6 / seconds,
            seconds - tokenized,
            memory()
        );
    }
}
