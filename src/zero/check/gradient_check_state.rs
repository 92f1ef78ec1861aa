//! The state of a check of gradients, and what its forwards and its backward bring.

use super::perturbation::{DirectionalGradient, PerturbationDirection};
use crate::graph::Grad;
use crate::memory::LedgerEntry;
use crate::param::ParamId;
use crate::precision::Flat;
use crate::util::lock;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static TOGETHER: Cell<u64> = const { Cell::new(0) };
}

/// What this thread has done so far that all ranks do together while a model runs.
pub(crate) fn collective_steps() -> u64 {
    TOGETHER.get()
}

/// One thing more.
pub(in crate::zero) fn count_collective_step() {
    TOGETHER.set(TOGETHER.get() + 1);
}

/// What a forward is run with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Perturbation<'a> {
    /// 1: up, -1: down, 0: as they are.
    pub sign: f32,
    /// How far, as a part of the size of each parameter.
    pub size: f64,
    /// The parameters; all that are trained, if there is no list.
    pub only: Option<&'a [ParamId]>,
}

impl Perturbation<'_> {
    /// Everything stays where it is.
    pub const NONE: Self = Self { sign: 0.0, size: 0.0, only: None };

    /// The other way.
    pub fn down(self) -> Self {
        Self { sign: -self.sign, ..self }
    }
}

/// The state of a check.
#[derive(Default)]
pub(crate) struct GradientCheck {
    /// Forwards are looked at: what they change is kept, and their outputs give their gradients.
    pub(super) armed: AtomicBool,
    /// A forward runs with other values of parameters.
    pub(super) shifts: AtomicBool,
    /// The backward under way is measured.
    pub(super) measures: AtomicBool,
    pub(super) state: Mutex<GradientCheckState>,
}

/// What a check under way knows.
#[derive(Default)]
pub(super) struct GradientCheckState {
    /// How far parameters are moved, as a part of the size of each.
    pub(super) relative: f64,
    pub(super) seed: u64,
    /// 1: up, -1: down.
    pub(super) sign: f32,
    /// The parameters that are moved; all of them, if there is no list.
    pub(super) only: Option<Vec<ParamId>>,
    /// The direction of each parameter that has been moved.
    pub(super) directions: Vec<Option<PerturbationDirection>>,
    /// The parameters that are moved now, with their own values.
    pub(super) kept: Vec<(ParamId, Flat, LedgerEntry)>,
    /// What the backward has brought, by parameter.
    pub(super) along: Vec<DirectionalGradient>,
    /// What it has brought of outputs, by group of parameters.
    pub(super) outputs: Vec<DirectionalChange>,
    /// Outputs without a probe had a gradient.
    pub(super) unprobed: bool,
}

/// How an output, or the loss, changes along a direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DirectionalChange {
    /// Half of the difference between both moves.
    pub difference: f64,
    /// How far the mean of both moves is from the value between them.
    pub bend: f64,
    /// The sum of the squares of the terms of `bend`, one for each element of an output.
    pub bend_squares: f64,
    /// What rounding of the output may make of the difference.
    pub noise: f64,
}

/// How an output changes when groups of parameters are moved.
pub(crate) struct OutputProbe {
    pub groups: Vec<OutputDifference>,
    /// What the output's format loses of its largest element.
    pub rounding: f64,
}

/// An output's elements along one direction.
#[derive(Default)]
pub(crate) struct OutputDifference {
    /// Half of the difference between both moves.
    pub difference: Vec<f32>,
    /// How far their mean is from the value between them.
    pub bend: Vec<f32>,
}

/// What a measured backward has brought.
pub(crate) struct MeasuredGradients {
    /// By group of parameters.
    pub outputs: Vec<DirectionalChange>,
    /// By parameter.
    pub along: Vec<DirectionalGradient>,
    /// A part of the loss comes from an output that was not probed.
    pub unprobed: bool,
}

impl OutputDifference {
    /// How an output changes between `down` and `up`.
    pub fn between(value: &[f32], up: &[f32], down: &[f32]) -> Self {
        let difference = up.iter().zip(down).map(|(up, down)| (up - down) / 2.0).collect();
        let bend = value.iter().zip(up.iter().zip(down));
        Self { difference, bend: bend.map(|(value, (up, down))| ((up - value) + (down - value)) / 2.0).collect() }
    }
}

impl GradientCheck {
    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    pub(in crate::zero) fn is_measuring(&self) -> bool {
        self.measures.load(Ordering::Relaxed)
    }

    /// The gradient of an output has come.
    pub(super) fn output_arrived(&self, probe: Option<&OutputProbe>, grad: &Grad) -> candle_core::Result<()> {
        let mut state = lock(&self.state);
        let Some(probe) = probe else {
            state.unprobed = true;
            return Ok(());
        };
        let mut wide = Flat::with_capacity(candle_core::DType::F32, grad.len());
        grad.view(|values| wide.extend_cast(values))?;
        let Flat::F32(grad) = wide else { unreachable!("it was made so") };
        let sums = |change: &[f32]| {
            let terms = grad.iter().zip(change).map(|(grad, change)| f64::from(*grad) * f64::from(*change));
            terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term))
        };
        let length = grad.iter().map(|grad| f64::from(*grad).powi(2)).sum::<f64>().sqrt();
        state.outputs.resize(probe.groups.len(), DirectionalChange::default());
        for (change, moved) in state.outputs.iter_mut().zip(&probe.groups) {
            let (bend, bend_squares) = sums(&moved.bend);
            change.difference += sums(&moved.difference).0;
            change.bend += bend;
            change.bend_squares += bend_squares;
            change.noise += length * probe.rounding;
        }
        Ok(())
    }
}
