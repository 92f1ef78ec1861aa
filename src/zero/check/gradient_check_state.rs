//! The state of a gradient check, and the results of its forward passes and its backward pass.

use super::perturbation_direction::{DirectionalGradient, PerturbationDirection};
use crate::graph::Grad;
use crate::memory::MemoryLedgerEntry;
use crate::param::ParamId;
use crate::precision::Flat;
use crate::util::lock;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static COLLECTIVE_STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of collective steps that this thread has taken so far: steps that all ranks take together while a
/// model runs, such as the gathering of a unit.
pub(crate) fn collective_steps() -> u64 {
    COLLECTIVE_STEPS.get()
}

/// Counts one more step that all ranks take together.
pub(in crate::zero) fn count_collective_step() {
    COLLECTIVE_STEPS.set(COLLECTIVE_STEPS.get() + 1);
}

/// The perturbation with which a forward pass runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Perturbation<'a> {
    /// The direction: 1 is up, -1 is down, 0 is unchanged.
    pub sign: f32,
    /// The distance, relative to the size of each parameter.
    pub size: f64,
    /// The parameters to move, or all trained ones if there is no list.
    pub params: Option<&'a [ParamId]>,
}

impl Perturbation<'_> {
    /// No perturbation: all parameters stay unchanged.
    pub const NONE: Self = Self { sign: 0.0, size: 0.0, params: None };

    /// Returns the same perturbation in the opposite direction.
    pub fn down(self) -> Self {
        Self { sign: -self.sign, ..self }
    }
}

/// The state of a gradient check on one rank.
#[derive(Default)]
pub(crate) struct RankCheckState {
    /// Whether a check is in progress: floating-point outputs of forward passes then report their gradients even if
    /// this requires a large copy.
    pub(super) armed: AtomicBool,
    /// Whether a forward pass runs for the check, with moved or unmoved parameters.
    pub(super) shifts: AtomicBool,
    /// Whether layers of the model keep their choices during a check.
    pub(super) holds_choices: AtomicBool,
    /// Whether the current backward pass is measured.
    pub(super) measures: AtomicBool,
    pub(super) state: Mutex<GradientCheckState>,
}

/// The data of a check in progress.
#[derive(Default)]
pub(super) struct GradientCheckState {
    /// The distance by which parameters are moved, relative to the size of each.
    pub(super) relative_step: f64,
    pub(super) seed: u64,
    /// The direction: 1 is up, -1 is down, 0 is unchanged.
    pub(super) sign: f32,
    /// The parameters that are moved, or all trained ones if there is no list.
    pub(super) params: Option<Vec<ParamId>>,
    /// The direction of each parameter that has been moved.
    pub(super) directions: Vec<Option<PerturbationDirection>>,
    /// The parameters that are currently moved, with their original values.
    pub(super) originals: Vec<(ParamId, Flat, MemoryLedgerEntry)>,
    /// The measured gradients of parameters, by parameter.
    pub(super) gradients: Vec<DirectionalGradient>,
    /// The measured changes of outputs, by group of parameters.
    pub(super) outputs: Vec<DirectionalChange>,
    /// Whether outputs without a probe had a gradient.
    pub(super) unprobed: bool,
}

/// The change in an output, or in the loss, along a direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DirectionalChange {
    /// Half of the difference between the values moved up and down.
    pub difference: f64,
    /// The distance between the mean of the two moved values and the unmoved value.
    pub bend: f64,
    /// The sum of the squares of the terms of `bend`, one for each element of an output.
    pub bend_squares: f64,
    /// The part of the difference that may come from rounding the output.
    pub noise: f64,
}

/// The change in an output when groups of parameters are moved.
pub(crate) struct OutputProbe {
    pub groups: Vec<PerturbedOutputChange>,
    /// The absolute rounding error of the output's format at its largest element.
    pub rounding: f64,
}

/// The change in an output's elements along one direction.
#[derive(Default)]
pub(crate) struct PerturbedOutputChange {
    /// Half of the difference between the values moved up and down.
    pub difference: Vec<f32>,
    /// The distances between the means of the moved values and the unmoved values.
    pub bend: Vec<f32>,
}

/// The results of a measured backward pass.
pub(crate) struct MeasuredGradients {
    /// The changes of outputs, by group of parameters.
    pub outputs: Vec<DirectionalChange>,
    /// The gradients along directions, by parameter.
    pub gradients: Vec<DirectionalGradient>,
    /// Whether a part of the loss comes from an output that was not probed.
    pub unprobed: bool,
}

impl PerturbedOutputChange {
    /// Computes how an output changes between `down` and `up`.
    pub fn between(value: &[f32], up: &[f32], down: &[f32]) -> Self {
        let difference = up.iter().zip(down).map(|(up, down)| (up - down) / 2.0).collect();
        let bend = value.iter().zip(up.iter().zip(down));
        Self { difference, bend: bend.map(|(value, (up, down))| ((up - value) + (down - value)) / 2.0).collect() }
    }
}

impl RankCheckState {
    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    pub(in crate::zero) fn is_measuring(&self) -> bool {
        self.measures.load(Ordering::Relaxed)
    }

    /// Adds the gradient of an output, which has arrived, to the measured changes.
    pub(super) fn output_arrived(&self, probe: Option<&OutputProbe>, grad: &Grad) -> candle_core::Result<()> {
        let mut state = lock(&self.state);
        let Some(probe) = probe else {
            state.unprobed = true;
            return Ok(());
        };
        let mut wide = Flat::with_capacity(candle_core::DType::F32, grad.len());
        grad.view(|values| wide.extend_cast(values))?;
        let Flat::F32(grad) = wide else { unreachable!("the copy was created in f32") };
        let sums = |change: &[f32]| {
            let terms = grad.iter().zip(change).map(|(grad, change)| f64::from(*grad) * f64::from(*change));
            terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term))
        };
        let length = grad.iter().map(|grad| f64::from(*grad).powi(2)).sum::<f64>().sqrt();
        state.outputs.resize(probe.groups.len(), DirectionalChange::default());
        for (change, group) in state.outputs.iter_mut().zip(&probe.groups) {
            let (bend, bend_squares) = sums(&group.bend);
            change.difference += sums(&group.difference).0;
            change.bend += bend;
            change.bend_squares += bend_squares;
            change.noise += length * probe.rounding;
        }
        Ok(())
    }
}
