//! The content of one rank's optimizer file: the positions of its master weights and optimizer states, and its
//! counters.

use super::pickle::PickleProblem;
use super::pickle_value::PickleValue;
use super::stored_tensor::StoredTensor;
use super::tag_files::file_error;
use super::torch_archive::{TorchArchive, damaged_error};
use crate::error::Result;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The optimizer file of one rank.
#[derive(Debug)]
pub(super) struct OptimFile {
    pub archive: TorchArchive,
    pub stage: u8,
    pub world_size: usize,
    /// The flat tensors: one entry per parameter group at stages 1 and 2, and one per sub-group at stage 3.
    pub groups: Vec<OptimFileGroup>,
    /// The optimizer's own step counter, which skipped steps do not advance.
    pub step: Option<u64>,
    pub loss_scale: Option<f64>,
    pub scaler: Option<DynamicScaler>,
    pub param_groups: Json,
}

/// The flat tensors of one group.
#[derive(Debug)]
pub(super) struct OptimFileGroup {
    pub master: StoredTensor,
    /// The states by DeepSpeed's names; empty before the first step.
    pub states: BTreeMap<String, StoredTensor>,
}

/// The state of DeepSpeed's dynamic loss scaler, with DeepSpeed's names.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DynamicScaler {
    /// The current scale.
    pub cur_scale: f64,
    /// The number of steps so far, including skipped ones.
    pub cur_iter: i64,
    /// The step of the last overflow; -1 before the first.
    pub last_overflow_iter: i64,
    /// The factor by which the scale grows and shrinks.
    pub scale_factor: f64,
    /// The number of steps without overflow after which the scale grows.
    pub scale_window: i64,
    /// The minimum scale.
    pub min_scale: f64,
    /// The number of overflows that it takes to shrink the scale (`fp16.hysteresis`).
    pub delayed_shift: i64,
    /// The number of overflows remaining until the scale shrinks.
    pub cur_hysteresis: i64,
    /// Whether each step without overflow resets `cur_hysteresis`.
    pub consecutive_hysteresis: bool,
    /// Whether an overflow at the minimum scale ends the run.
    pub raise_error_at_min_scale: bool,
}

impl OptimFile {
    /// Reads everything except the tensors.
    pub fn open(path: &Path) -> Result<Self> {
        let (archive, pickle) = TorchArchive::open(path)?;
        let wrong = |problem: PickleProblem| damaged_error(path, &problem);
        let root = PickleValue::root(&pickle).get("optimizer_state_dict").map_err(wrong)?;
        let stage: u8 = root.get("zero_stage").and_then(|v| v.count()).map_err(wrong)?;
        let (masters, states) = find_states(&root, stage).map_err(wrong)?;
        let world_size = partition_count(&root).map_err(wrong)?;
        let (loss_scale, scaler) = scaler(&root).map_err(wrong)?;
        let groups = groups(&masters, states.as_ref(), &archive).map_err(wrong)?;
        let param_groups = param_groups(&root, stage).map_err(wrong)?;
        let step = match &states {
            Some(states) => step(states, groups.len(), &archive)?,
            None => None,
        };
        Ok(Self { archive, stage, world_size, groups, step, loss_scale, scaler, param_groups })
    }

    /// Returns an error unless this file is from the same run and step as the first rank's.
    pub fn check_same_checkpoint(&self, first: &Self) -> Result<()> {
        let states = |file: &Self| -> BTreeSet<String> {
            file.groups.iter().flat_map(|group| group.states.keys().cloned()).collect()
        };
        let facts = |file: &Self| {
            [
                ("zero_stage", file.stage.to_string()),
                ("partition_count", file.world_size.to_string()),
                ("the number of groups", file.groups.len().to_string()),
                ("the optimizer's step", file.step.map_or("missing".into(), |step| step.to_string())),
                ("the list of its optimizer states", format!("{:?}", states(file))),
            ]
        };
        let differs = facts(self).into_iter().zip(facts(first)).find(|(mine, theirs)| mine != theirs);
        let Some(((name, mine), (_, theirs))) = differs else { return Ok(()) };
        let problem = format!(
            "{name} is {mine}, but {theirs} in {}; the files are not from the same checkpoint; copy it again",
            first.archive.path().display()
        );
        Err(file_error(self.archive.path(), problem))
    }
}

/// Returns the list of master weights and the optimizer's states.
fn find_states<'a>(
    root: &PickleValue<'a>,
    stage: u8,
) -> Result<(PickleValue<'a>, Option<PickleValue<'a>>), PickleProblem> {
    match stage {
        1 | 2 => {
            let masters = root.get("single_partition_of_fp32_groups")?;
            // With `elastic_checkpoint`, `base_optimizer_state` is a list of the groups' states.
            let base = root.get("base_optimizer_state")?;
            let states = if base.items().is_ok() { Some(base) } else { base.find("state") };
            Ok((masters, states))
        }
        3 => Ok((root.get("fp32_flat_groups")?, root.get("optimizer_state_dict")?.find("state"))),
        other => Err(format!("{}.zero_stage is {other}; only 1, 2 and 3 can be read", root.path())),
    }
}

fn groups(
    masters: &PickleValue<'_>,
    states: Option<&PickleValue<'_>>,
    archive: &TorchArchive,
) -> Result<Vec<OptimFileGroup>, PickleProblem> {
    let mut groups = vec![];
    for (index, master) in masters.items()?.iter().enumerate() {
        let master = StoredTensor::of_weights(master)?;
        archive.check(&master)?;
        let mut tensors = BTreeMap::new();
        // Before the first step, a group has no state.
        if let Some(state) = states.and_then(|states| states.item(index).ok()) {
            for (name, value) in state.entries()? {
                // The counter can be a tensor, too.
                if name != STEP && value.call().is_some() {
                    let tensor = StoredTensor::of_weights(&value)?;
                    archive.check(&tensor)?;
                    tensors.insert(name.to_owned(), tensor);
                }
            }
        }
        groups.push(OptimFileGroup { master, states: tensors });
    }
    Ok(groups)
}

/// The name of the step counter.
const STEP: &str = "step";

/// Returns the step counter, which must be the same in all groups.
fn step(states: &PickleValue<'_>, groups: usize, archive: &TorchArchive) -> Result<Option<u64>> {
    let wrong = |problem: PickleProblem| damaged_error(archive.path(), &problem);
    let mut steps = vec![];
    for index in 0..groups {
        let Some(value) = states.item(index).ok().and_then(|state| state.find(STEP)) else { continue };
        steps.push(match value.call() {
            Some(_) => {
                let tensor = StoredTensor::of_weights(&value).map_err(wrong)?;
                let mut number = [0.0];
                if tensor.length != 1 {
                    return Err(wrong(format!("{} is a tensor of {} elements, not of 1", tensor.path, tensor.length)));
                }
                archive.read(&tensor, 0..1, &mut number)?;
                f64::from(number[0])
            }
            None => value.number().map_err(wrong)?,
        });
    }
    let Some(first) = steps.first().copied() else { return Ok(None) };
    if let Some(other) = steps.iter().find(|step| **step != first) {
        return Err(wrong(format!("parameter groups have taken different numbers of steps, {first} and {other}")));
    }
    if !(0.0..=9e15).contains(&first) || first.fract() != 0.0 {
        return Err(wrong(format!("{}.0.step is {first}, which is not a count", states.path())));
    }
    Ok(Some(first as u64))
}

/// Returns the number of ranks, which is stored as one number or one number per group.
fn partition_count(root: &PickleValue<'_>) -> Result<usize, PickleProblem> {
    let count = root.get("partition_count")?;
    let counts: Vec<usize> = match count.items() {
        Ok(items) => items.iter().map(PickleValue::count).collect::<Result<_, _>>()?,
        Err(_) => vec![count.count()?],
    };
    match counts.as_slice() {
        [first, rest @ ..] if *first > 0 && rest.iter().all(|other| other == first) => Ok(*first),
        [_, ..] => {
            Err(format!("{} is {counts:?}; all groups must be split across the same number of ranks", count.path()))
        }
        [] => Err(format!("{} is empty", count.path())),
    }
}

fn param_groups(root: &PickleValue<'_>, stage: u8) -> Result<Json, PickleProblem> {
    let name = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
    match root.find(name).and_then(|optimizer| optimizer.find("param_groups")) {
        Some(groups) => groups.json(),
        None => Ok(Json::Null),
    }
}

/// Returns the current scale and, if it is dynamic, the scaler's state.
fn scaler(root: &PickleValue<'_>) -> Result<(Option<f64>, Option<DynamicScaler>), PickleProblem> {
    let Some(object) = root.find("loss_scaler") else { return Ok((None, None)) };
    let state = object.attributes().ok_or_else(|| object.wrong_kind("a loss scaler with its state"))?;
    let cur_scale = state.get("cur_scale")?.number()?;
    if !matches!(object.call(), Some((name, _)) if name.ends_with(".DynamicLossScaler")) {
        return Ok((Some(cur_scale), None));
    }
    let integer = |name| state.get(name)?.integer();
    let number = |name| state.get(name)?.number();
    let truth = |name| state.get(name)?.truth();
    let scaler = DynamicScaler {
        cur_scale,
        cur_iter: integer("cur_iter")?,
        last_overflow_iter: integer("last_overflow_iter")?,
        scale_factor: number("scale_factor")?,
        scale_window: integer("scale_window")?,
        min_scale: number("min_scale")?,
        delayed_shift: integer("delayed_shift")?,
        cur_hysteresis: integer("cur_hysteresis")?,
        consecutive_hysteresis: truth("consecutive_hysteresis")?,
        raise_error_at_min_scale: truth("raise_error_at_min_scale")?,
    };
    Ok((Some(cur_scale), Some(scaler)))
}
