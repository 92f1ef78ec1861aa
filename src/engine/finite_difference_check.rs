//! The gradient check, which runs in the first step unless the configuration disables it, and for every parameter
//! separately on request.
//!
//! ```text
//!   forward    run with all weights perturbed up | down | run          -> how the output changes
//!   backward   gradient of the output x that change                    -> how the loss changes
//!              gradients of the parameters x their perturbations       -> how the loss should change if they are right
//!   step       both changes in the loss are added up over ranks and compared, before any weight changes
//! ```
//!
//! Both changes are along one direction, in which each element of each trained parameter randomly goes up or down
//! (`zero/check/perturbation_direction.rs`). A part of the graph that is cut off, a wrong backward pass or a dropped
//! term makes the two changes differ by about the norm of the missing part. Differences that may also be due to
//! rounding or to kinks of the loss are checked again in the next steps, each time along a different direction
//! (`gradient_check_report.rs`).

use super::Engine;
use super::gradient_check_report::{
    DirectionSample, GradientCheckVerdict, GradientReport, GradientRow, GradientTolerance,
};
use super::gradient_check_state::{
    CURRENT_FORWARD, CheckPhase, CurrentForward, DirectionalDerivative, EngineCheckState, FORWARDS, PerturbedGroup,
};
use crate::config::Precision;
use crate::error::{EngineError, Error, Result, without_backtrace};
use crate::graph::draw_from;
use crate::notice::emit;
use crate::param::{Param, ParamId};
use crate::zero::check::gradient_check_state::{
    DirectionalChange, MeasuredGradients, OutputProbe, Perturbation, PerturbedOutputChange, collective_steps,
};
use candle_core::{DType, Tensor};

/// The maximum number of bytes for the changes in one output while every parameter is checked separately.
const MAX_CHANGES_BYTES: usize = 1 << 30;
/// The factor by which the perturbation of a parameter grows if it hardly changes the output.
const PERTURBATION_GROWTH: f64 = 8.0;
/// The maximum perturbation of a parameter, relative to its size.
const MAX_PERTURBATION: f64 = 0.3;
/// The factor by which a sufficiently large change exceeds the possible rounding error.
const MIN_CHANGE_TO_ROUNDING: f64 = 8000.0;
/// The number of steps with a non-finite loss or gradient after which a check is abandoned.
const MAX_NONFINITE_STEPS: u32 = 64;

/// A forward pass that a check repeats.
struct GradientCheckForward<'a, M> {
    /// The index of the forward pass in this thread, counted from 1.
    forward: u64,
    /// The position in the random number stream where the forward pass begins.
    stream: u64,
    /// The number of repetitions so far.
    repetition: u64,
    /// Whether a repetition called a collective.
    is_together: bool,
    run: &'a mut dyn FnMut(&M) -> candle_core::Result<Tensor>,
}

impl<M> GradientCheckForward<'_, M> {
    /// Runs the forward pass again with perturbed parameters and returns its output.
    fn rerun_forward(&mut self, engine: &Engine<M>, moves: &Perturbation<'_>) -> Result<Tensor> {
        self.repetition += 1;
        let around = CurrentForward { forward: self.forward, repetition: self.repetition };
        let before = collective_steps();
        let run_once = || engine.core.forward_again(moves, || (self.run)(&engine.model));
        let output = around.enter(|| draw_from((self.stream, 0), || engine.cast(run_once)));
        self.is_together |= collective_steps() > before && engine.world_size() > 1;
        output
    }
}

/// The outputs of a forward pass with each group of parameters perturbed up and down.
#[derive(Default)]
struct PerturbedOutputs {
    moved: Vec<(Tensor, Tensor)>,
    /// The output without perturbation, if each parameter is checked separately or layers keep the discrete choices of
    /// a check's first forward pass.
    unmoved: Option<Tensor>,
}

impl<M> Engine<M> {
    /// Checks the gradient of every trained parameter in the next micro step. Each forward pass runs at least two
    /// more times per parameter, with that parameter moved slightly up and down. If the changes in the output would
    /// take more than 1 GiB, the parameters of each unit, or else all parameters, are moved together. The next
    /// optimizer step compares the change in the loss with the gradients that the backward pass computed. Parameters
    /// whose result is unclear are checked again in the next steps, up to eight steps in total. Then
    /// [`gradient_report`](Self::gradient_report) returns the result. As soon as a gradient is known to be wrong, the
    /// step ends with an error. Collective.
    ///
    /// The first step of a run does the same with all parameters together, which takes two extra forward passes, unless
    /// `gradient_check` in the configuration or [`EngineBuilder::gradient_check`](crate::EngineBuilder::gradient_check)
    /// disables it.
    ///
    /// # Errors
    /// [`EngineError::MidAccumulation`] in the middle of an accumulation; [`EngineError::ExpertParallel`] if experts
    /// are divided among ranks.
    pub fn check_gradients(&mut self) -> Result<()> {
        self.between_steps("check_gradients")?;
        if self.core.experts().is_some() {
            let why = "gradients cannot be checked, because the experts of a rank change the losses of other ranks; check \
                       them without expert_parallel";
            return Err(EngineError::ExpertParallel { why: why.into() }.into());
        }
        self.check = EngineCheckState { phase: CheckPhase::Armed, of_each: true, ..EngineCheckState::default() };
        self.arm();
        Ok(())
    }

    /// Returns the result of the last gradient check: that of the first step, or of
    /// [`check_gradients`](Self::check_gradients); `None` until a check has finished.
    pub fn gradient_report(&self) -> Option<&GradientReport> {
        self.check.report.as_ref()
    }

    fn limits(&self) -> GradientTolerance {
        GradientTolerance::of(match self.config.precision {
            Precision::F32 => self.config.autocast.unwrap_or(DType::F32),
            _ => self.config.precision.dtype(),
        })
    }

    /// Starts observing forward passes, if there is something to check.
    pub(super) fn arm(&mut self) {
        if !matches!(self.check.phase, CheckPhase::Armed) || !self.trainer.can_train() {
            return;
        }
        self.core.arm_check(self.check.looks);
    }

    /// Returns the random stream position of a forward pass that runs inside one of another engine; `None` for any
    /// other forward pass.
    pub(super) fn stream_inside(&mut self) -> Option<u64> {
        let around = CURRENT_FORWARD.get();
        if around.forward == 0 {
            return None;
        }
        let forwards = self.forwards;
        let (known, first, next) = self.check.inside.get_or_insert((around, forwards, forwards));
        if known.forward != around.forward {
            (*known, *first, *next) = (around, forwards, forwards);
        } else if known.repetition != around.repetition {
            (*known, *next) = (around, *first);
        }
        let own = *next;
        *next += 1;
        Some(own)
    }

    /// Returns whether this thread repeats the forward pass of another engine.
    pub(super) fn is_repeating() -> bool {
        CURRENT_FORWARD.get().repetition > 0
    }

    /// Runs `run` as the forward pass of this engine. During a check, perturbed forward passes run first, so that side
    /// effects of `run` are those of the real forward pass.
    pub(super) fn run_forward(
        &mut self,
        stream: u64,
        mut run: impl FnMut(&M) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let outer = CURRENT_FORWARD.get();
        let forward = FORWARDS.get() + 1;
        FORWARDS.set(forward);
        let is_probed = matches!(self.check.phase, CheckPhase::Armed) && outer.forward == 0 && self.trainer.can_train();
        let mut repeat = GradientCheckForward { forward, stream, repetition: 0, is_together: false, run: &mut run };
        let tried = match is_probed {
            true => {
                let tried = self.try_moves(&mut repeat);
                self.or_give_up(tried)?
            }
            false => None,
        };
        let around = if outer.forward == 0 { CurrentForward { forward, repetition: 0 } } else { outer };
        let run_once = || draw_from((stream, 0), || self.cast(|| self.core.forward(|| (repeat.run)(&self.model))));
        let output = around.enter(run_once)?;
        if let Some(tried) = tried {
            let probed = self.keep_probe(tried, &output);
            self.or_give_up(probed)?;
        }
        Ok(output)
    }

    /// Runs the forward pass of this engine inside a repeated forward pass of another engine.
    pub(super) fn repeat_inside(
        &mut self,
        stream: u64,
        mut run: impl FnMut(&M) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        draw_from((stream, 0), || self.cast(|| self.core.forward_again(&Perturbation::NONE, || run(&self.model))))
    }

    /// Returns the outputs of the next forward pass with parameters perturbed, group by group.
    fn try_moves(&mut self, repeat: &mut GradientCheckForward<'_, M>) -> Result<Option<PerturbedOutputs>> {
        let mut tried = PerturbedOutputs::default();
        if self.check.of_each || self.core.holds_choices() {
            tried.unmoved = Some(repeat.rerun_forward(self, &Perturbation::NONE)?);
        }
        let elements = tried.unmoved.as_ref().map_or(1, Tensor::elem_count);
        if self.check.groups.is_empty() {
            self.check.groups = self.groups(elements);
        }
        let limits = self.limits();
        for number in self.check.open(&limits) {
            let params = std::mem::take(&mut self.check.groups[number].params);
            let unmoved = tried.unmoved.as_ref().filter(|_| self.check.of_each);
            let moved = self.try_group(&params, self.check.groups[number].step, unmoved, repeat);
            self.check.groups[number].params = params;
            let (step, up, down) = moved?;
            self.check.groups[number].step = Some(step);
            tried.moved.push((up, down));
        }
        // Layers have kept the choices that they made with perturbed parameters, so the passes are repeated, beginning
        // with an unperturbed one. This happens only once for each model.
        if tried.unmoved.is_none() && self.core.holds_choices() {
            return self.try_moves(repeat);
        }
        Ok(Some(tried))
    }

    /// Returns the size of a group's perturbation and the outputs with the group moved up and down. If the output
    /// `unmoved` hardly changes, the perturbation is enlarged as long as the output changes linearly.
    fn try_group(
        &self,
        params: &[ParamId],
        step: Option<f64>,
        unmoved: Option<&Tensor>,
        repeat: &mut GradientCheckForward<'_, M>,
    ) -> Result<(f64, Tensor, Tensor)> {
        let limits = self.limits();
        let mut size = step.unwrap_or(limits.step);
        let mut smaller: Option<(f64, Tensor, Tensor, Vec<f32>)> = None;
        loop {
            let moves = Perturbation { sign: 1.0, size, params: self.check.of_each.then_some(params) };
            let (up, down) = (repeat.rerun_forward(self, &moves)?, repeat.rerun_forward(self, &moves.down())?);
            let Some(unmoved) = unmoved.filter(|_| step.is_none()) else { return Ok((size, up, down)) };
            let value = values(unmoved)?;
            let PerturbedOutputChange { difference, bend } =
                PerturbedOutputChange::between(&value, &values(&up)?, &values(&down)?);
            let (change, rounding) = (norm(&difference), self.rounding_of(unmoved, &value));
            let is_straight = smaller.as_ref().is_none_or(|(.., before)| {
                let factor = PERTURBATION_GROWTH as f32;
                let differs: Vec<f32> =
                    difference.iter().zip(before).map(|(now, before)| now / factor - before).collect();
                norm(&differs) <= 0.5 * limits.allowed * change / PERTURBATION_GROWTH + rounding
            });
            let is_enough =
                change > rounding * MIN_CHANGE_TO_ROUNDING || norm(&bend) > limits.bends * change + rounding * 4.0;
            // If the forward pass calls collectives, all ranks must repeat it the same number of times.
            let any_rank = |own: bool| if repeat.is_together { self.any_rank(own) } else { Ok(own) };
            let (is_bent, is_last) = (any_rank(!is_straight)?, any_rank(is_enough)?);
            if let Some((size, up, down, _)) = smaller.take().filter(|_| is_bent) {
                return Ok((size, up, down));
            }
            if is_last || size * PERTURBATION_GROWTH > MAX_PERTURBATION {
                return Ok((size, up, down));
            }
            smaller = Some((size, up, down, difference));
            size *= PERTURBATION_GROWTH;
        }
    }

    /// Returns the possible rounding error of an output.
    fn rounding_of(&self, output: &Tensor, value: &[f32]) -> f64 {
        let largest = value.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        f64::from(largest) * unit_of(output.dtype()).max(self.limits().noise)
    }

    /// Stores, along with the output of a forward pass, how perturbations changed the output.
    fn keep_probe(&mut self, PerturbedOutputs { moved, unmoved }: PerturbedOutputs, output: &Tensor) -> Result<()> {
        let about = self.core.last_output();
        if about.is_none() && output.track_op() {
            self.check.why_not = Some(format!("the forward pass returns a tensor of dtype {:?}", output.dtype()));
        }
        let value = values(output)?;
        let mut probe = OutputProbe { groups: Vec::new(), rounding: self.rounding_of(output, &value) };
        for (up, down) in &moved {
            if up.dims() != output.dims() || down.dims() != output.dims() {
                self.check.why_not = Some("the output has a different shape when the forward pass runs again".into());
                continue;
            }
            probe.groups.push(PerturbedOutputChange::between(&value, &values(up)?, &values(down)?));
        }
        if let Some(unmoved) = unmoved.filter(|unmoved| unmoved.dims() == output.dims()) {
            let differs = norm(&values(&unmoved)?.iter().zip(&value).map(|(a, b)| a - b).collect::<Vec<_>>());
            if differs > probe.rounding * (value.len() as f64).sqrt() * 4.0 {
                self.check.why_not = Some(
                    "the loss differs when it is computed twice: it contains random draws that do not use the engine's \
                     seed (candle_nn::Dropout, Tensor::rand; candle_zero::nn::Dropout repeats its draws)"
                        .into(),
                );
            }
        }
        if let Some(about) = about {
            about.set_probe(probe);
        }
        Ok(())
    }

    /// Collective: returns whether `own` is true on any rank.
    pub(super) fn any_rank(&self, own: bool) -> Result<bool> {
        let all = self.gather_f64(&[f64::from(u8::from(own))])?;
        Ok(all.iter().any(|rank| rank.first() != Some(&0.0)))
    }

    /// Returns the groups of parameters to perturb together. If a separate check of each parameter was requested, each
    /// parameter is a group, or each unit if the changes in the output would otherwise take too much memory. In all
    /// other cases, all parameters form one group.
    fn groups(&self, elements: usize) -> Vec<PerturbedGroup> {
        let params = self.core.params();
        let trained = || params.iter().enumerate().filter(|(_, param)| param.is_trained() && param.numel > 0);
        let fits = |groups: usize| groups.saturating_mul(elements).saturating_mul(8) <= MAX_CHANGES_BYTES;
        if self.check.of_each && fits(trained().count()) {
            return trained().map(|(id, param)| PerturbedGroup::new(param.name.clone(), vec![id])).collect();
        }
        let units = self.core.units();
        if self.check.of_each && fits(units.len()) {
            let of_unit = |(unit, (name, _)): (usize, &(String, usize))| {
                let params =
                    trained().filter(|(_, param): &(usize, &Param)| param.unit == unit).map(|(id, _)| id).collect();
                PerturbedGroup::new(if name.is_empty() { "outside units".into() } else { name.clone() }, params)
            };
            return units.iter().enumerate().map(of_unit).filter(|group| !group.params.is_empty()).collect();
        }
        vec![PerturbedGroup::new("all parameters".into(), trained().map(|(id, _)| id).collect())]
    }

    /// Starts measuring the next backward pass if a check needs it; returns whether it is measured.
    pub(super) fn begin_measuring(&mut self) -> bool {
        let measures = matches!(self.check.phase, CheckPhase::Armed);
        if measures {
            self.core.begin_measuring();
        }
        measures
    }

    /// Ends measuring after the backward pass.
    pub(super) fn end_measuring(&mut self) {
        let MeasuredGradients { mut outputs, gradients, unprobed } = self.core.end_measuring();
        if self.check.groups.is_empty() {
            self.check.groups = self.groups(1);
        }
        let open = self.check.open(&self.limits());
        outputs.resize(open.len(), DirectionalChange::default());
        let compared = open.iter().map(|number| {
            self.check.groups[*number].params.iter().fold(DirectionalDerivative::default(), |sum, param| {
                DirectionalDerivative {
                    product: sum.product + gradients[*param].product,
                    squares: sum.squares + gradients[*param].squares,
                }
            })
        });
        let compared = compared.collect();
        if unprobed {
            self.check.why_not.get_or_insert_with(|| {
                "a part of the loss was computed in a forward pass that ran inside another engine's forward pass".into()
            });
        }
        let factor = self.scaler.scale() / self.config.batch.gradient_accumulation_steps as f64;
        self.check.phase = CheckPhase::Measured(outputs, compared, factor);
    }

    /// Collective: compares the measurements of all ranks. If `overflow` is set, a loss or a gradient is not finite,
    /// and nothing can be compared in this step.
    pub(super) fn judge_gradients(&mut self, overflow: bool) -> Result<()> {
        if overflow && matches!(self.check.phase, CheckPhase::Measured(..)) && self.check.tries < MAX_NONFINITE_STEPS {
            self.check.phase = CheckPhase::Armed;
            self.check.tries += 1;
            self.arm();
            return Ok(());
        }
        let (outputs, compared, factor) = match std::mem::take(&mut self.check.phase) {
            CheckPhase::Measured(outputs, compared, factor) => (outputs, compared, factor),
            other => {
                self.check.phase = other;
                return Ok(());
            }
        };
        let mut own = vec![f64::from(u8::from(self.check.why_not.is_some()))];
        for (change, compared) in outputs.iter().zip(&compared) {
            own.extend([change.difference, change.bend, change.bend_squares, change.noise]);
            own.extend([compared.product, compared.squares.sqrt()]);
        }
        // Only the ranks of this island take part. They have all measurements of its loss, and other islands may have
        // returned above because of an overflow.
        let all = self.core.comm().gather_f64(own).wait()?;
        let sum = |at: usize| all.iter().map(|rank| rank.get(at).copied().unwrap_or(f64::NAN)).sum::<f64>();
        let limits = self.limits();
        let mut is_finite = true;
        for (at, number) in self.check.open(&limits).into_iter().enumerate() {
            let [by_difference, bend, bend_squares, noise, by_gradient, expected] =
                std::array::from_fn(|field| sum(1 + 6 * at + field));
            // Bends caused by kinks are random and may cancel each other out in the sum over ranks, but not in the sum
            // of squares. The bend of a smooth loss adds up over ranks.
            let bend = bend.abs().max(bend_squares.sqrt());
            let [by_difference, by_gradient, bend, noise, expected] =
                [by_difference, by_gradient, bend, noise, expected].map(|value| value / factor);
            let look = DirectionSample { by_difference, by_gradient, bend, noise, expected };
            is_finite &= look.is_finite();
            self.check.groups[number].looks.add(look);
        }
        self.check.looks += 1;
        let not_judged = match all.iter().position(|rank| rank.first() != Some(&0.0)) {
            Some(rank) => Some(
                self.check.why_not.take().unwrap_or_else(|| format!("rank {rank} could not repeat the forward pass")),
            ),
            None if !is_finite => Some("the loss or a gradient is not finite near these weights".into()),
            None => None,
        };
        let report = self.check.report_of(self.global_steps, not_judged, &limits);
        let is_open = report.not_judged.is_none() && !self.check.open(&limits).is_empty();
        let is_over = !is_open || (report.wrong().next().is_some() && self.check.ends_run.is_none());
        if let (Some(file), 0) = (&self.check.ends_run, self.job().rank()) {
            // The script may end before the last check.
            let text = serde_json::to_string(&report).unwrap_or_default();
            std::fs::write(file, text).map_err(|source| Error::Io { action: "write", path: file.clone(), source })?;
        }
        if !is_over {
            self.check.phase = CheckPhase::Armed;
            self.arm();
            return Ok(());
        }
        self.conclude(report)
    }

    /// Ends the check with a report.
    fn conclude(&mut self, report: GradientReport) -> Result<()> {
        // A check of each parameter may be requested for any step.
        let steps = match (self.check.of_each, self.check.looks) {
            (false, 1) => "the first step".to_string(),
            (false, looks) => format!("the first {looks} steps"),
            (true, 1) => "this step".to_string(),
            (true, looks) => format!("the last {looks} steps"),
        };
        let wrong: Vec<&GradientRow> = if report.not_judged.is_some() { Vec::new() } else { report.wrong().collect() };
        let error = wrong.first().map(|first| EngineError::WrongGradient {
            subject: match self.check.of_each {
                true => {
                    let names: Vec<&str> = wrong.iter().map(|row| row.name.as_str()).collect();
                    format!("the gradient of {} is wrong", crate::util::list(&names))
                }
                false => format!("the gradient of {steps} is wrong"),
            },
            by_gradient: first.by_gradient,
            by_difference: first.by_difference,
        });
        if self.job().rank() == 0 {
            // In 16 bits, a single check cannot rule out small differences, so only large ones are reported.
            let cannot_tell = |row: &GradientRow| {
                let difference = (row.by_difference - row.by_gradient).abs();
                row.verdict == GradientCheckVerdict::CannotTell && difference > 0.25 * row.expected
            };
            match &report.not_judged {
                Some(why) => emit(&format!("the gradient of {steps} was not checked: {why}")),
                None if !self.check.of_each && report.rows.iter().any(cannot_tell) => emit(&format!(
                    "the gradient of {steps} could not be checked: rounding, kinks of the loss (ReLU, max pooling) or \
                     draws that do not use the engine's seed (candle_nn::Dropout) change the loss as much as a small \
                     change in the weights does"
                )),
                None => {}
            }
        }
        self.check.report = Some(report);
        if self.check.ends_run.take().is_some() {
            return Err(EngineError::GradientsChecked.into());
        }
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Abandons the check if the model fails in a repeated forward pass.
    fn or_give_up<T: Default>(&mut self, probed: Result<T>) -> Result<T> {
        let Err(Error::Candle(error)) = probed else { return probed };
        let why = without_backtrace(&error.to_string());
        self.check.why_not = Some(format!("the forward pass could not be repeated: {why}"));
        Ok(T::default())
    }
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// Returns the values of an output in f32.
fn values(output: &Tensor) -> Result<Vec<f32>> {
    Ok(output.detach().to_device(&candle_core::Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Returns the relative rounding error that the check assumes for a format.
fn unit_of(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-9),
        DType::F16 => 2f64.powi(-12),
        _ => 2f64.powi(-24),
    }
}
