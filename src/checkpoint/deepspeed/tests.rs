//! Checkpoints of every small size, written here in DeepSpeed's layout: those that DeepSpeed itself wrote are few
//! (tests/checkpoint/deepspeed_import.rs).
#![allow(clippy::unwrap_used)]

use super::*;
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
        let all = |items: &[Self], out: &mut Vec<u8>| {
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
                all(items, out);
                out.push(b'e');
            }
            Tuple(items) => {
                all(items, out);
                out.push(b't');
            }
            Dict(entries) => {
                let items: Vec<_> = entries.iter().flat_map(|(k, v)| [k.clone(), v.clone()]).collect();
                out.push(b'}');
                all(&items, out);
                out.push(b'u');
            }
            Call(function, arguments) => {
                function.pickle(out);
                Tuple(arguments.clone()).pickle(out);
                out.push(b'R');
            }
            Self::Storage(about) => {
                Tuple(about.clone()).pickle(out);
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

/// A file of `torch.save`.
#[derive(Default)]
struct Saved {
    storages: Vec<Vec<f32>>,
}

impl Saved {
    fn tensor(&mut self, values: Vec<f32>) -> Python {
        let (length, key) = (int(values.len()), self.storages.len().to_string());
        self.storages.push(values);
        let about = vec![text("storage"), Name("torch", "FloatStorage"), text(&key), text("cpu"), length.clone()];
        let ordered = Call(Name("collections", "OrderedDict").into(), vec![]);
        let shape = Tuple(vec![length]);
        let arguments = vec![Python::Storage(about), Int(0), shape, Tuple(vec![Int(1)]), Python::False, ordered];
        Call(Name("torch._utils", "_rebuild_tensor_v2").into(), arguments)
    }

    fn write(&self, path: &Path, value: &Python) {
        let mut pickle = b"\x80\x02".to_vec();
        value.pickle(&mut pickle);
        pickle.push(b'.');
        let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
        let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        let bytes = self.storages.iter().map(|s| s.iter().flat_map(|v| v.to_le_bytes()).collect());
        let storages = bytes.enumerate().map(|(key, bytes): (usize, Vec<u8>)| (format!("data/{key}"), bytes));
        for (name, bytes) in std::iter::once(("data.pkl".into(), pickle)).chain(storages) {
            zip.start_file(format!("saved/{name}"), options).unwrap();
            zip.write_all(&bytes).unwrap();
        }
        zip.finish().unwrap();
    }
}

/// The properties of a checkpoint to be made.
#[derive(Debug, Clone)]
struct Case {
    stage: u8,
    world_size: usize,
    /// Shapes of the parameters of each group.
    groups: Vec<Vec<Vec<usize>>>,
    /// The elastic form of stages 1 and 2: states in a list, without padding.
    is_elastic: bool,
    /// PyTorch's own Adam counts in tensors.
    counts_in_tensors: bool,
}

const STATES: [State; 3] = [State::Master, State::ExpAvg, State::ExpAvgSq];

/// Every element has a value of its own.
fn values(state: State, group: usize, parameter: usize, shape: &[usize]) -> Vec<f32> {
    let elements: usize = shape.iter().product();
    let first = (state as usize * 10_000 + group * 1000 + parameter * 100) as f32;
    (0..elements).map(|i| first + i as f32).collect()
}

impl Case {
    /// The flat tensor of a group in the file of `rank`. Padding is NaN: it must never be seen.
    fn flat(&self, state: State, group: usize, rank: usize) -> Vec<f32> {
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
        let part = flat.len().next_multiple_of(2 * self.world_size) / self.world_size;
        if state != State::Master && !self.is_elastic {
            flat.resize(part * self.world_size, f32::NAN);
        }
        flat.into_iter().skip(rank * part).take(part).collect()
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

    fn optim(&self, rank: usize, file: &mut Saved) -> Python {
        let groups = 0..self.groups.len();
        let masters = List(groups.clone().map(|g| file.tensor(self.flat(State::Master, g, rank))).collect());
        let mut state = |group| {
            let step = if self.counts_in_tensors { file.tensor(vec![7.0]) } else { Int(7) };
            let [first, second] = [State::ExpAvg, State::ExpAvgSq].map(|s| file.tensor(self.flat(s, group, rank)));
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

    /// Writes it with a changed model file and opens it.
    fn open_with(
        &self,
        change: impl FnOnce(&mut Vec<(Python, Python)>),
    ) -> (tempfile::TempDir, Result<DeepSpeedCheckpoint>) {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..self.world_size {
            let mut file = Saved::default();
            let value = self.optim(rank, &mut file);
            file.write(&folder.path().join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")), &value);
        }
        let mut model = self.model();
        change(&mut model);
        let start = if self.stage == 3 { "zero_pp_rank_0_" } else { "" };
        Saved::default().write(&folder.path().join(format!("{start}mp_rank_00_model_states.pt")), &Dict(model));
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

/// One group of two parameters on two ranks.
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
            "1 parameter(s) are frozen (frozen_param_shapes.h.w)",
        ),
        (|m| m[1].1 = Int(4), "dp_world_size is 4, but the optimizer files are of 2"),
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
            (&negative, "param_shapes.0.w.0.0 is the number -1, where a count is needed"),
            (&endless, "param_shapes.0.w has no possible shape"),
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
        let mut file = Saved::default();
        let masters = List(vec![file.tensor(case.flat(State::Master, 0, rank))]);
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
    assert_eq!((checkpoint.optimizer_step(), checkpoint.has(State::ExpAvg)), (None, false));
    assert_eq!(checkpoint.read(State::Master, 1).unwrap(), values(State::Master, 0, 1, &[5]));
    let text = checkpoint.read(State::ExpAvg, 1).unwrap_err().to_string();
    assert!(text.contains("holds no exp_avg of group 0, but nothing"), "{text}");
}
