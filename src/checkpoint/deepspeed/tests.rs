//! Tests with small checkpoints of various sizes. The tests themselves write these in DeepSpeed's layout, because only
//! a few checkpoints written by DeepSpeed are available (tests/checkpoint/deepspeed_import.rs).
#![allow(clippy::unwrap_used)]

use super::*;
use crate::checkpoint::{Checkpoint, import};
use candle_core::DType;
use proptest::prelude::*;
use std::io::Write;

/// A Python value.
#[derive(Clone)]
enum Python {
    None,
    False,
    Int(i32),
    Text(String),
    Name(&'static str, &'static str),
    List(Vec<Python>),
    Tuple(Vec<Python>),
    Dict(Vec<(Python, Python)>),
    Call(Box<Python>, Vec<Python>),
    Storage(Vec<Python>),
}

use Python::{Call, Dict, Int, List, Name, Tuple};

impl Python {
    fn pickle(&self, out: &mut Vec<u8>) {
        let pickle_items = |items: &[Self], out: &mut Vec<u8>| {
            out.push(b'(');
            items.iter().for_each(|item| item.pickle(out));
        };
        match self {
            Self::None => out.push(b'N'),
            Self::False => out.push(0x89),
            Int(number) => out.extend([b"J".as_slice(), &number.to_le_bytes()].concat()),
            Self::Text(text) => {
                out.push(b'X');
                out.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
                out.extend(text.as_bytes());
            }
            Name(module, name) => out.extend(format!("c{module}\n{name}\n").as_bytes()),
            List(items) => {
                out.push(b']');
                pickle_items(items, out);
                out.push(b'e');
            }
            Tuple(items) => {
                pickle_items(items, out);
                out.push(b't');
            }
            Dict(entries) => {
                let items: Vec<_> = entries.iter().flat_map(|(k, v)| [k.clone(), v.clone()]).collect();
                out.push(b'}');
                pickle_items(&items, out);
                out.push(b'u');
            }
            Call(function, arguments) => {
                function.pickle(out);
                Tuple(arguments.clone()).pickle(out);
                out.push(b'R');
            }
            Self::Storage(description) => {
                Tuple(description.clone()).pickle(out);
                out.push(b'Q');
            }
        }
    }
}

fn text(text: &str) -> Python {
    Python::Text(text.into())
}

fn int(number: usize) -> Python {
    Int(i32::try_from(number).unwrap())
}

fn dict<const N: usize>(entries: [(&str, Python); N]) -> Python {
    Dict(entries.map(|(key, value)| (text(key), value)).to_vec())
}

/// A file in the format of `torch.save`.
#[derive(Default)]
struct SavedFile {
    storages: Vec<Vec<u8>>,
}

impl SavedFile {
    fn tensor(&mut self, values: Vec<f32>) -> Python {
        let shape = [values.len()];
        self.tensor_of("FloatStorage", values.into_iter().flat_map(f32::to_le_bytes).collect(), &shape)
    }

    /// Adds a tensor with elements of any type, in row-major order.
    fn tensor_of(&mut self, storage: &'static str, bytes: Vec<u8>, shape: &[usize]) -> Python {
        let (length, key) = (int(shape.iter().product()), self.storages.len().to_string());
        self.storages.push(bytes);
        let description = vec![text("storage"), Name("torch", storage), text(&key), text("cpu"), length];
        let ordered = Call(Name("collections", "OrderedDict").into(), vec![]);
        let stride = |axis: usize| int(shape[axis + 1..].iter().product());
        let strides = Tuple((0..shape.len()).map(stride).collect());
        let shape = Tuple(shape.iter().map(|size| int(*size)).collect());
        let arguments = vec![Python::Storage(description), Int(0), shape, strides, Python::False, ordered];
        Call(Name("torch._utils", "_rebuild_tensor_v2").into(), arguments)
    }

    fn write(&self, path: &Path, value: &Python) {
        let mut pickle = b"\x80\x02".to_vec();
        value.pickle(&mut pickle);
        pickle.push(b'.');
        let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
        let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        let storages = self.storages.iter().enumerate().map(|(key, bytes)| (format!("data/{key}"), bytes.clone()));
        for (name, bytes) in std::iter::once(("data.pkl".into(), pickle)).chain(storages) {
            zip.start_file(format!("saved/{name}"), options).unwrap();
            zip.write_all(&bytes).unwrap();
        }
        zip.finish().unwrap();
    }
}

/// The properties of a checkpoint to generate.
#[derive(Debug, Clone)]
struct Case {
    stage: u8,
    world_size: usize,
    /// The shapes of the parameters of each group.
    groups: Vec<Vec<Vec<usize>>>,
    /// Whether the elastic format of stages 1 and 2 is used: states in a list, without padding.
    is_elastic: bool,
    /// Whether step counters are tensors, as in PyTorch's own Adam.
    counts_in_tensors: bool,
}

const STATES: [DeepSpeedStateKind; 3] =
    [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq];

/// Returns a distinct value for every element.
fn values(state: DeepSpeedStateKind, group: usize, parameter: usize, shape: &[usize]) -> Vec<f32> {
    let elements: usize = shape.iter().product();
    let first = (state as usize * 10_000 + group * 1000 + parameter * 100) as f32;
    (0..elements).map(|i| first + i as f32).collect()
}

impl Case {
    /// Returns the flat tensor of a group in the file of `rank`. Padding is NaN: it must never be read.
    fn flat(&self, state: DeepSpeedStateKind, group: usize, rank: usize) -> Vec<f32> {
        let shapes = self.groups[group].iter().enumerate();
        let parameters = shapes.map(|(index, shape)| values(state, group, index, shape));
        if self.stage == 3 {
            let piece = |values: Vec<f32>| {
                let length = values.len().div_ceil(self.world_size);
                let padded = values.into_iter().chain(std::iter::repeat(f32::NAN));
                padded.skip(rank * length).take(length).collect::<Vec<_>>()
            };
            return parameters.flat_map(piece).collect();
        }
        let mut flat: Vec<f32> = parameters.flatten().collect();
        let part_len = flat.len().next_multiple_of(2 * self.world_size) / self.world_size;
        if state != DeepSpeedStateKind::Master && !self.is_elastic {
            flat.resize(part_len * self.world_size, f32::NAN);
        }
        flat.into_iter().skip(rank * part_len).take(part_len).collect()
    }

    fn model(&self) -> Vec<(Python, Python)> {
        let size = |shape: &[usize]| Tuple(shape.iter().map(|s| int(*s)).collect());
        let map = |(group, shapes): (usize, &Vec<Vec<usize>>)| {
            let entry = |(index, shape): (usize, &Vec<usize>)| {
                (text(&format!("g{group}.p{index}")), Call(Name("torch", "Size").into(), vec![size(shape)]))
            };
            Dict(shapes.iter().enumerate().map(entry).collect())
        };
        let shapes = List(self.groups.iter().enumerate().map(map).collect());
        let model = dict([("param_shapes", shapes), ("dp_world_size", int(self.world_size)), ("note", Python::None)]);
        let Dict(entries) = model else { unreachable!() };
        entries
    }

    fn optim(&self, rank: usize, file: &mut SavedFile) -> Python {
        let groups = 0..self.groups.len();
        let masters =
            List(groups.clone().map(|g| file.tensor(self.flat(DeepSpeedStateKind::Master, g, rank))).collect());
        let mut state = |group| {
            let step = if self.counts_in_tensors { file.tensor(vec![7.0]) } else { Int(7) };
            let [first, second] = [DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq]
                .map(|s| file.tensor(self.flat(s, group, rank)));
            dict([("step", step), ("exp_avg", first), ("exp_avg_sq", second)])
        };
        let states = match self.is_elastic && self.stage < 3 {
            true => List(groups.clone().map(&mut state).collect()),
            false => dict([("state", Dict(groups.clone().map(|g| (int(g), state(g))).collect()))]),
        };
        let stage = ("zero_stage", Int(self.stage.into()));
        let counts = List(vec![int(self.world_size); self.groups.len()]);
        let optimizer = match self.stage {
            3 => dict([
                stage,
                ("partition_count", int(self.world_size)),
                ("fp32_flat_groups", masters),
                ("optimizer_state_dict", states),
            ]),
            _ => dict([
                stage,
                ("partition_count", counts),
                ("single_partition_of_fp32_groups", masters),
                ("base_optimizer_state", states),
            ]),
        };
        dict([("optimizer_state_dict", optimizer)])
    }

    /// Writes the checkpoint with a changed model file and opens it.
    fn open_with(
        &self,
        change: impl FnOnce(&mut Vec<(Python, Python)>),
    ) -> (tempfile::TempDir, Result<DeepSpeedCheckpoint>) {
        self.open_saved_with(|model, _| change(model))
    }

    /// Writes the checkpoint with a changed model file that may contain tensors, and opens it.
    fn open_saved_with(
        &self,
        change: impl FnOnce(&mut Vec<(Python, Python)>, &mut SavedFile),
    ) -> (tempfile::TempDir, Result<DeepSpeedCheckpoint>) {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..self.world_size {
            let mut file = SavedFile::default();
            let value = self.optim(rank, &mut file);
            file.write(&folder.path().join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")), &value);
        }
        let (mut model, mut file) = (self.model(), SavedFile::default());
        change(&mut model, &mut file);
        let start = if self.stage == 3 { "zero_pp_rank_0_" } else { "" };
        file.write(&folder.path().join(format!("{start}mp_rank_00_model_states.pt")), &Dict(model));
        let checkpoint = DeepSpeedCheckpoint::open(folder.path(), None);
        (folder, checkpoint)
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = proptest::collection::vec(0..5usize, 0..3);
    let groups = proptest::collection::vec(proptest::collection::vec(shape, 1..5), 1..4);
    (1..4u8, 1..6usize, groups, any::<bool>(), any::<bool>()).prop_map(
        |(stage, world_size, groups, is_elastic, counts_in_tensors)| Case {
            stage,
            world_size,
            groups,
            is_elastic,
            counts_in_tensors,
        },
    )
}

proptest! {
    #[test]
    fn every_element_is_found_and_no_padding(case in cases(), a in 0..30usize, b in 0..30usize) {
        let (_folder, checkpoint) = case.open_with(|_| {});
        let checkpoint = checkpoint.unwrap();
        prop_assert_eq!(checkpoint.stage(), case.stage);
        prop_assert_eq!(checkpoint.world_size(), case.world_size);
        prop_assert_eq!(checkpoint.optimizer_step(), Some(7));
        for (group, shapes) in case.groups.iter().enumerate() {
            for (index, shape) in shapes.iter().enumerate() {
                let parameter = checkpoint.index_of(&format!("g{group}.p{index}")).unwrap();
                prop_assert_eq!(&checkpoint.parameters()[parameter].shape, shape);
                for state in STATES {
                    let expected = values(state, group, index, shape);
                    prop_assert_eq!(&checkpoint.read(state, parameter).unwrap(), &expected);
                    let (a, b) = (a.min(b).min(expected.len()), a.max(b).min(expected.len()));
                    prop_assert_eq!(&checkpoint.read_range(state, parameter, a..b).unwrap(), &expected[a..b]);
                }
            }
        }
    }
}

/// Returns a case with one group of two parameters on two ranks.
fn small(stage: u8) -> Case {
    let groups = vec![vec![vec![3, 3], vec![5]]];
    Case { stage, world_size: 2, groups, is_elastic: false, counts_in_tensors: false }
}

#[test]
fn what_cannot_be_read_is_told() {
    type Change = fn(&mut Vec<(Python, Python)>);
    let shapes = |sizes: &[i32]| {
        let size = Tuple(sizes.iter().map(|s| Int(*s)).collect());
        List(vec![Dict(vec![(text("w"), Call(Name("torch", "Size").into(), vec![size]))])])
    };
    let (larger, negative, endless) = (shapes(&[100]), shapes(&[-1]), shapes(&[i32::MAX; 9]));
    let changes: [(Change, &str); 4] = [
        (|m| m.push((text("mp_world_size"), Int(2))), "mp_world_size is 2"),
        (
            |m| m.push((text("frozen_param_shapes"), dict([("h.w", Int(0))]))),
            "1 parameter is frozen (frozen_param_shapes.h.w)",
        ),
        (|m| m[1].1 = Int(4), "dp_world_size is 4, but 2 in the optimizer files"),
        (|m| drop(m.remove(0)), "param_shapes is missing"),
    ];
    for stage in [2, 3] {
        let problem = |result: Result<DeepSpeedCheckpoint>| result.unwrap_err().to_string();
        for (change, expected) in changes {
            let text = problem(small(stage).open_with(change).1);
            assert!(text.contains(expected) && text.contains("mp_rank_00_model_states.pt"), "{text}");
        }
        for (shapes, expected) in [
            (&larger, "but param_shapes need"),
            (&negative, "param_shapes.0.w.0.0 is the number -1, but a count is needed"),
            (&endless, "param_shapes.0.w has an impossible shape"),
        ] {
            let text = problem(small(stage).open_with(|m| m[0].1 = shapes.clone()).1);
            assert!(text.contains(expected), "{text}");
        }
    }
}

#[test]
fn before_the_first_step_there_are_masters_alone() {
    let case = small(2);
    let (folder, checkpoint) = case.open_with(|_| {});
    drop(checkpoint);
    for rank in 0..2 {
        let mut file = SavedFile::default();
        let masters = List(vec![file.tensor(case.flat(DeepSpeedStateKind::Master, 0, rank))]);
        let optimizer = dict([
            ("zero_stage", Int(2)),
            ("partition_count", List(vec![Int(2)])),
            ("single_partition_of_fp32_groups", masters),
            ("base_optimizer_state", dict([("state", Dict(vec![]))])),
        ]);
        let path = folder.path().join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
        file.write(&path, &dict([("optimizer_state_dict", optimizer)]));
    }
    let checkpoint = DeepSpeedCheckpoint::open(folder.path(), None).unwrap();
    assert_eq!((checkpoint.optimizer_step(), checkpoint.has(DeepSpeedStateKind::ExpAvg)), (None, false));
    assert_eq!(checkpoint.read(DeepSpeedStateKind::Master, 1).unwrap(), values(DeepSpeedStateKind::Master, 0, 1, &[5]));
    let text = checkpoint.read(DeepSpeedStateKind::ExpAvg, 1).unwrap_err().to_string();
    assert!(text.contains("has no exp_avg for group 0 (its states: none)"), "{text}");
}

// ---- buffers -----------------------------------------------------------------------------------

/// A buffer: its name, PyTorch's storage and bytes, its shape, and its type and bytes in this library.
type SavedBuffer = (&'static str, &'static str, Vec<u8>, Vec<usize>, DType, Vec<u8>);

/// Returns buffers of all types.
fn all_types() -> Vec<SavedBuffer> {
    fn bytes<const N: usize, T>(values: &[T], of: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(of).collect()
    }
    let same = |name, storage, bytes: Vec<u8>, shape: &[usize], dtype| {
        (name, storage, bytes.clone(), shape.to_vec(), dtype, bytes)
    };
    let shorts = bytes(&[-7i16, 7], |v| v.to_le_bytes());
    vec![
        same("n.running_mean", "FloatStorage", bytes(&[0.5f32, -1.0], |v| v.to_le_bytes()), &[2], DType::F32),
        same("n.running_var", "BFloat16Storage", vec![0x80, 0x3f, 0, 0x40], &[2], DType::BF16),
        same("n.num_batches_tracked", "LongStorage", bytes(&[1i64 << 40], |v| v.to_le_bytes()), &[], DType::I64),
        same("half", "HalfStorage", vec![0, 0x3c], &[1], DType::F16),
        same("double", "DoubleStorage", bytes(&[1.0f64 / 3.0; 6], |v| v.to_le_bytes()), &[2, 3], DType::F64),
        same("int", "IntStorage", bytes(&[-5i32], |v| v.to_le_bytes()), &[1], DType::I32),
        same("short", "ShortStorage", shorts.clone(), &[2, 1], DType::I16),
        same("byte", "ByteStorage", vec![255, 0], &[2], DType::U8),
        same("mask", "BoolStorage", vec![1, 0, 1, 1], &[1, 1, 2, 2], DType::U8),
        // Candle has no i8.
        ("char", "CharStorage", vec![0xf9, 7], vec![2], DType::I16, shorts),
        same("none", "FloatStorage", vec![], &[0], DType::F32),
    ]
}

/// Opens a checkpoint with buffers of all types and `more`. One of the model's parameters is in `module` too.
fn with_buffers(stage: u8, more: &[(&str, Python)]) -> (tempfile::TempDir, Result<DeepSpeedCheckpoint>) {
    small(stage).open_saved_with(|model, file| {
        let mut module = vec![(text("g0.p0"), file.tensor(vec![9.0; if stage == 3 { 0 } else { 9 }]))];
        let mut names = vec![];
        for (name, storage, bytes, shape, ..) in all_types() {
            module.push((text(name), file.tensor_of(storage, bytes, &shape)));
            names.push(text(name));
        }
        for (name, value) in more {
            module.push((text(name), value.clone()));
            names.push(text(name));
        }
        model.push((text("module"), Dict(module)));
        model.push((text("buffer_names"), List(names)));
    })
}

#[test]
fn buffers_of_every_type_are_read_and_imported_and_parameters_in_module_are_not() {
    for stage in 1..4 {
        let (folder, checkpoint) = with_buffers(stage, &[]);
        let checkpoint = checkpoint.unwrap();
        checkpoint.verify().unwrap();
        assert_eq!(checkpoint.buffers().len(), all_types().len());
        let out = folder.path().join("out");
        import(&checkpoint, &out, "taken", |_, _| {}).unwrap();
        let imported = Checkpoint::open(&out, None).unwrap().unwrap();
        assert_eq!(imported.manifest().parameters.len(), 2);
        assert_eq!(imported.buffers().len(), all_types().len());
        for (index, (name, _, _, shape, dtype, bytes)) in all_types().into_iter().enumerate() {
            let buffer = &checkpoint.buffers()[index];
            assert_eq!((buffer.name.as_str(), &buffer.shape, buffer.dtype), (name, &shape, dtype), "stage {stage}");
            assert_eq!(checkpoint.read_buffer(index).unwrap(), bytes, "{name}");
            let saved = imported.buffers().iter().find(|saved| saved.name == name).unwrap();
            assert_eq!((&saved.shape, saved.dtype, &saved.bytes), (&shape, dtype, &bytes), "{name}");
        }
        let text = checkpoint.read_buffer(99).unwrap_err().to_string();
        assert!(text.contains("buffer 99 was requested, but there are only 11"), "{text}");
    }
}

#[test]
fn a_buffer_that_cannot_be_read_is_told_by_name_and_the_others_are_imported() {
    let complex = SavedFile::default().tensor_of("ComplexFloatStorage", vec![], &[0]);
    let (folder, checkpoint) = with_buffers(2, &[("freqs_cis", complex), ("odd", Int(4))]);
    let checkpoint = checkpoint.unwrap();
    let [freqs, odd] = checkpoint.unread_buffers() else { panic!("{:?}", checkpoint.unread_buffers()) };
    assert!(freqs.starts_with("module.freqs_cis.0.1 is a tensor of torch.ComplexFloatStorage"), "{freqs}");
    assert!(odd.starts_with("module.odd is the number 4, but a tensor is needed"), "{odd}");
    import(&checkpoint, folder.path().join("out"), "taken", |_, _| {}).unwrap();
    let imported = Checkpoint::open(folder.path().join("out"), None).unwrap().unwrap();
    assert_eq!(imported.buffers().len(), all_types().len());
}

#[test]
fn a_damaged_buffer_is_an_error_that_names_the_file() {
    // The storage does not contain all elements.
    let (_folder, checkpoint) = small(3).open_saved_with(|model, file| {
        let short = file.tensor_of("FloatStorage", vec![0; 4], &[2]);
        model.push((text("module"), dict([("mean", short)])));
        model.push((text("buffer_names"), List(vec![text("mean")])));
    });
    let problem = checkpoint.unwrap_err().to_string();
    assert!(
        problem.contains("zero_pp_rank_0_mp_rank_00_model_states.pt") && problem.contains("module.mean"),
        "{problem}"
    );
    // Far more buffers share one storage than in any model, and each would get separate memory.
    let (_folder, checkpoint) = small(2).open_saved_with(|model, file| {
        let one = file.tensor(vec![1.0; 50]);
        let names: Vec<String> = (0..101).map(|i| format!("b{i}")).collect();
        model.push((text("module"), Dict(names.iter().map(|name| (text(name), one.clone())).collect())));
        model.push((text("buffer_names"), List(names.iter().map(|name| text(name)).collect())));
    });
    let problem = checkpoint.unwrap_err().to_string();
    assert!(problem.contains("take 20200 bytes, but the file stores only 200 bytes"), "{problem}");
    // A byte is changed, so the data does not match its checksum.
    let (folder, checkpoint) = with_buffers(2, &[]);
    drop(checkpoint);
    let path = folder.path().join("mp_rank_00_model_states.pt");
    let mut bytes = std::fs::read(&path).unwrap();
    let value = (1i64 << 40).to_le_bytes();
    let position = bytes.windows(8).position(|window| window == value).unwrap();
    bytes[position] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let problem = DeepSpeedCheckpoint::open(folder.path(), None).unwrap().verify().unwrap_err().to_string();
    assert!(problem.contains("mp_rank_00_model_states.pt") && problem.contains("data/"), "{problem}");
}
