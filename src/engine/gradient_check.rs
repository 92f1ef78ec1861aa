//! The check of gradients: in the first step if the configuration says so, and of every parameter if it is asked for.
//!
//! ```text
//!   forward    run with all weights moved a little up | down | run       -> how the output changes
//!   backward   gradient of the output x that change                      -> how the loss changes
//!              gradients of the parameters x their moves                 -> how it should change, if they are right
//!   step       both are added up over ranks and compared, before any weight changes
//! ```
//!
//! Both are numbers of one direction in which each element of each trained parameter goes up or down by chance
//! (`zero/direction.rs`). A part of the graph that is cut off, a wrong backward or a term that is dropped makes them differ by
//! about as much as the missing part is long.

use super::Engine;
use crate::config::Precision;
use crate::error::{EngineError, Error, Result, without_backtrace};
use crate::graph::draw_from;
use crate::notice::say;
use crate::param::{Param, ParamId};
use crate::zero::gradient_check::{Change, Measured, Moved, Moves, Probe, done_together};
use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::fmt;
use std::path::PathBuf;

/// The environment variable that has the first step look at every parameter, write what it finds into the file that it names,
/// and end the run.
pub(crate) const CHECK_GRADIENTS: &str = "CANDLE_ZERO_CHECK_GRADIENTS";
/// Bytes that the changes of one output may take while every parameter is looked at.
const ROOM: usize = 1 << 30;
/// A difference that is not so many times what rounding may make is looked at once more, with larger moves, before it is called
/// a mistake.
const CLEAR: f64 = 16.0;
/// How much further a parameter is moved that has hardly changed the output.
const LARGER: f64 = 8.0;
/// How far a parameter is moved at most, as a part of its size.
const LARGEST: f64 = 0.3;
/// A change so many times what rounding may make is large enough.
const ENOUGH: f64 = 2000.0;
/// Steps after which a check is given up whose gradients were never finite.
const TRIES: u32 = 64;

thread_local! {
    /// The forward of an engine that this thread runs, and which of its repetitions.
    static AROUND: Cell<Around> = const { Cell::new(Around { forward: 0, repetition: 0 }) };
    static FORWARDS: Cell<u64> = const { Cell::new(0) };
}

/// Where in the forward of an engine this thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Around {
    /// Its number; 0: in none.
    forward: u64,
    /// 0: the one that counts; else for a check.
    repetition: u64,
}

/// A forward that a check repeats.
struct Repeat<'a, M> {
    /// Its number in this thread.
    forward: u64,
    /// The place of its draws.
    stream: u64,
    /// How often it has been repeated.
    repetition: u64,
    run: &'a mut dyn FnMut(&M) -> candle_core::Result<Tensor>,
}

impl<M> Repeat<'_, M> {
    /// The output with parameters moved.
    fn again(&mut self, engine: &Engine<M>, moves: &Moves<'_>) -> Result<Tensor> {
        self.repetition += 1;
        let around = Around { forward: self.forward, repetition: self.repetition };
        let run_once = || engine.core.forward_again(moves, || (self.run)(&engine.model));
        around.enter(|| draw_from((self.stream, 0), || engine.cast(run_once)))
    }
}

/// The outputs of a forward with each group of parameters moved up, and down.
struct Tried {
    moved: Vec<(Tensor, Tensor)>,
    /// Ranks did something in it together, so they repeat it equally often.
    together: bool,
}

impl Around {
    fn enter<T>(self, run: impl FnOnce() -> T) -> T {
        struct Reset(Around);
        impl Drop for Reset {
            fn drop(&mut self) {
                AROUND.set(self.0);
            }
        }
        let _reset = Reset(AROUND.replace(self));
        run()
    }
}

/// The check of an engine.
#[derive(Debug, Default)]
pub(super) struct Check {
    phase: Phase,
    /// Every parameter is looked at by itself.
    of_each: bool,
    /// Writes the report into this file when it is there, and ends the run.
    ends_run: Option<PathBuf>,
    tries: u32,
    /// It is the second look, along another direction and with larger moves.
    is_second: bool,
    /// Why there is no verdict.
    why_not: Option<String>,
    groups: Vec<Group>,
    /// Forwards of this engine inside of another one's: that forward, and the place of the draws where it began.
    inside: Option<(Around, u64, u64)>,
    report: Option<GradientReport>,
}

#[derive(Debug, Default)]
enum Phase {
    /// Nothing to be done.
    #[default]
    Idle,
    /// Forwards are repeated until a backward comes.
    Armed,
    /// The backward has come; all ranks compare at the coming step. With the factor that gradients have.
    Measured(Vec<Change>, Vec<Compared>, f64),
}

/// What is moved together.
#[derive(Debug, Clone)]
struct Group {
    name: String,
    params: Vec<ParamId>,
}

/// This rank's part of the gradient along a direction.
#[derive(Debug, Clone, Copy, Default)]
struct Compared {
    product: f64,
    squares: f64,
}

/// How exact a comparison is in a format.
struct Limits {
    /// The size of moves, as a part of a parameter's values.
    step: f64,
    /// The difference that counts as a mistake, as a part of the expected change of the loss.
    allowed: f64,
    /// What the rounding of a whole forward makes of its output, as a part of it.
    noise: f64,
    /// A forward is repeated without a move where the loss bends by more than this part of its change.
    bends: f64,
}

/// What became of comparing a gradient with differences of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientVerdict {
    /// Both agree.
    Right,
    /// They differ by more than the format and the bend of the loss explain.
    Wrong,
    /// The loss changes too little, or bends too much, to tell.
    CannotTell,
}

/// One row of a [`GradientReport`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GradientRow {
    /// The parameter, or what was moved together.
    pub name: String,
    /// How the loss changes along the direction, by the gradient that backward gave.
    pub by_gradient: f64,
    /// The same by running forward with the parameters moved.
    pub by_difference: f64,
    /// What the two may differ by.
    pub allowed: f64,
    /// The size that such a change has, for a gradient of this length.
    pub expected: f64,
    /// What rounding may make of the difference.
    pub noise: f64,
    /// What came of it.
    pub verdict: GradientVerdict,
}

/// What a check of gradients has found: see [`Engine::check_gradients`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GradientReport {
    /// The optimizer step, from 0.
    pub step: u64,
    /// One row for all parameters, or one for each.
    pub rows: Vec<GradientRow>,
    /// Why nothing could be compared.
    pub not_judged: Option<String>,
}

impl GradientReport {
    /// The rows whose gradient is wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &GradientRow> {
        self.rows.iter().filter(|row| row.verdict == GradientVerdict::Wrong)
    }
}

impl fmt::Display for GradientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.not_judged {
            return write!(f, "gradients were not checked: {why}");
        }
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max("parameter".len());
        write!(f, "{:<width$}  {:>12}  {:>12}  verdict", "parameter", "gradient", "difference")?;
        for row in &self.rows {
            let verdict = match row.verdict {
                GradientVerdict::Right => "right",
                GradientVerdict::Wrong => "WRONG",
                GradientVerdict::CannotTell => "cannot tell",
            };
            write!(f, "\n{:<width$}  {:>12.4e}  {:>12.4e}  {verdict}", row.name, row.by_gradient, row.by_difference)?;
        }
        Ok(())
    }
}

impl Check {
    /// The check of a first step.
    pub(super) fn of_first_step(is_wanted: bool) -> Self {
        let ends_run = std::env::var_os(CHECK_GRADIENTS).map(PathBuf::from);
        let of_each = ends_run.is_some();
        let phase = if is_wanted || of_each { Phase::Armed } else { Phase::Idle };
        Self { phase, of_each, ends_run, ..Self::default() }
    }
}

impl<M> Engine<M> {
    /// Checks the gradient of every trained parameter in the coming micro step: each forward runs twice more for each of them,
    /// with that parameter moved a little up and down, and the coming optimizer step compares how the loss changes with the
    /// gradients that backward gave. [`gradient_report`](Self::gradient_report) has the result, also where some are wrong,
    /// which ends the step with an error. Collective.
    ///
    /// With `gradient_check` in the configuration the first step does the same with all parameters at once, for two forwards
    /// (also [`EngineBuilder::gradient_check`](crate::EngineBuilder::gradient_check)).
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] between forward and step.
    pub fn check_gradients(&mut self) -> Result<()> {
        self.between_steps("check_gradients")?;
        self.check = Check { phase: Phase::Armed, of_each: true, ..Check::default() };
        self.arm();
        Ok(())
    }

    /// What the last check of gradients has found: that of the first step, or of
    /// [`check_gradients`](Self::check_gradients). Nothing before it is over.
    pub fn gradient_report(&self) -> Option<&GradientReport> {
        self.check.report.as_ref()
    }

    fn limits(&self) -> Limits {
        let format = match self.config.precision {
            Precision::F32 => self.config.autocast.unwrap_or(DType::F32),
            _ => self.config.precision.dtype(),
        };
        // In a second look moves are larger, and in 16 bits gradients less exact than the loss.
        let look = usize::from(self.check.is_second);
        let of = |steps: [f64; 2], allowed: [f64; 2], noise: i32, bends: f64| Limits {
            step: steps[look],
            allowed: allowed[look],
            noise: 2f64.powi(noise),
            bends,
        };
        match format {
            DType::BF16 => of([1.0 / 16.0, 1.0 / 8.0], [0.15, 0.3], -10, 0.5),
            DType::F16 => of([1.0 / 64.0, 1.0 / 16.0], [0.05, 0.2], -13, 0.25),
            _ => of([2e-3, 1.6e-2], [2e-3, 4e-3], -19, 0.02),
        }
    }

    /// Begins to look at forwards, if there is something to be checked.
    pub(super) fn arm(&mut self) {
        if !matches!(self.check.phase, Phase::Armed) || !self.trainer.can_train() {
            return;
        }
        self.core.arm_check(u64::from(self.check.is_second));
    }

    /// The place of the draws of a forward that another engine's is around; nothing where none is.
    pub(super) fn stream_inside(&mut self) -> Option<u64> {
        let around = AROUND.get();
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

    /// Whether this thread repeats the forward of another engine.
    pub(super) fn is_repeating() -> bool {
        AROUND.get().repetition > 0
    }

    /// Runs `run` as the forward of this engine; while a check wants it, first with moved parameters, so that what `run` leaves
    /// behind is that of the forward that counts.
    pub(super) fn run_forward(
        &mut self,
        stream: u64,
        mut run: impl FnMut(&M) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let outer = AROUND.get();
        let forward = FORWARDS.get() + 1;
        FORWARDS.set(forward);
        let is_probed = matches!(self.check.phase, Phase::Armed) && outer.forward == 0 && self.trainer.can_train();
        let mut repeat = Repeat { forward, stream, repetition: 0, run: &mut run };
        let tried = match is_probed {
            true => {
                let tried = self.try_moves(&mut repeat);
                self.or_give_up(tried)?
            }
            false => None,
        };
        let around = if outer.forward == 0 { Around { forward, repetition: 0 } } else { outer };
        let run_once = || draw_from((stream, 0), || self.cast(|| self.core.forward(|| (repeat.run)(&self.model))));
        let output = around.enter(run_once)?;
        if let Some(tried) = tried {
            let probed = self.keep_probe(tried, &output, &mut repeat);
            self.or_give_up(probed)?;
        }
        Ok(output)
    }

    /// The forward of this engine inside of another one's that is repeated.
    pub(super) fn repeat_inside(
        &mut self,
        stream: u64,
        mut run: impl FnMut(&M) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        draw_from((stream, 0), || self.cast(|| self.core.forward_again(&Moves::NONE, || run(&self.model))))
    }

    /// The outputs of the coming forward with parameters moved, group by group.
    fn try_moves(&mut self, repeat: &mut Repeat<'_, M>) -> Result<Option<Tried>> {
        let before = done_together();
        if self.check.of_each {
            return self.try_each(repeat).map(Some);
        }
        self.check.groups = self.groups(1);
        let moves = Moves { sign: 1.0, size: self.limits().step, only: None };
        let moved = (repeat.again(self, &moves)?, repeat.again(self, &moves.down())?);
        let together = done_together() > before && self.world_size() > 1;
        Ok(Some(Tried { moved: vec![moved], together }))
    }

    /// The same for each parameter by itself. One that hardly changes the output is moved further, as long as the output does not
    /// bend.
    fn try_each(&mut self, repeat: &mut Repeat<'_, M>) -> Result<Tried> {
        let before = done_together();
        let output = repeat.again(self, &Moves::NONE)?;
        let together = done_together() > before && self.world_size() > 1;
        let value = values(&output)?;
        let (limits, rounding) = (self.limits(), self.rounding_of(&output, &value));
        self.check.groups = self.groups(value.len());
        let mut moved = Vec::new();
        for group in self.check.groups.clone() {
            let mut size = limits.step;
            loop {
                let moves = Moves { sign: 1.0, size, only: Some(&group.params) };
                let (up, down) = (repeat.again(self, &moves)?, repeat.again(self, &moves.down())?);
                let change = Moved::between(&value, &values(&up)?, &values(&down)?);
                let (difference, bend) = (norm(&change.difference), norm(&change.bend));
                let is_enough = difference > rounding * ENOUGH || bend > limits.bends * difference + rounding * 4.0;
                size *= LARGER;
                if (if together { self.any_rank(is_enough)? } else { is_enough }) || size > LARGEST {
                    moved.push((up, down));
                    break;
                }
            }
        }
        Ok(Tried { moved, together })
    }

    /// What rounding may make of an output's elements.
    fn rounding_of(&self, output: &Tensor, value: &[f32]) -> f64 {
        let largest = value.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        f64::from(largest) * unit_of(output.dtype()).max(self.limits().noise)
    }

    /// Keeps with the output of a forward how moves have changed it.
    fn keep_probe(
        &mut self,
        Tried { moved, together }: Tried,
        output: &Tensor,
        repeat: &mut Repeat<'_, M>,
    ) -> Result<()> {
        let about = self.core.last_output();
        if about.is_none() && output.track_op() {
            self.check.why_not = Some(format!("forward gives {:?}", output.dtype()));
        }
        let limits = self.limits();
        let value = values(output)?;
        let mut probe = Probe { groups: Vec::new(), rounding: self.rounding_of(output, &value) };
        let mut bends = false;
        for (up, down) in moved {
            if up.dims() != output.dims() || down.dims() != output.dims() {
                self.check.why_not = Some("the output has another shape when forward runs again".into());
                continue;
            }
            let moved = Moved::between(&value, &values(&up)?, &values(&down)?);
            let difference = norm(&moved.difference);
            bends |= norm(&moved.bend) > limits.bends * difference + probe.rounding * 4.0;
            // Much more than moves of this size should make of it.
            bends |= difference > 16.0 * limits.step * norm(&value);
            probe.groups.push(moved);
        }
        // Where ranks do something together they repeat it together, whatever this one knows already.
        if together {
            bends = self.any_rank(bends)?;
        }
        if bends {
            // Either the loss bends, or something in it is drawn anew each time.
            let second = repeat.again(self, &Moves::NONE)?;
            let differs = match second.dims() == output.dims() {
                true => norm(&values(&second)?.iter().zip(&value).map(|(a, b)| a - b).collect::<Vec<_>>()),
                false => f64::INFINITY,
            };
            if differs > probe.rounding * (value.len() as f64).sqrt() * 4.0 {
                self.check.why_not = Some(
                    "the loss is not the same when it is computed twice: something in it is drawn at random, without a seed \
                     of the engine's (candle_nn::Dropout, Tensor::rand; candle_zero::nn::Dropout repeats its draws)"
                        .into(),
                );
            }
        }
        if let Some(about) = about {
            about.set_probe(probe);
        }
        Ok(())
    }

    /// Collective: whether any rank says so.
    pub(super) fn any_rank(&self, own: bool) -> Result<bool> {
        let all = self.gather_f64(&[f64::from(u8::from(own))])?;
        Ok(all.iter().any(|rank| rank.first() != Some(&0.0)))
    }

    /// What is moved together: every parameter by itself if that is asked for and there is room for the changes of the output,
    /// else those of a unit; all of them otherwise.
    fn groups(&self, elements: usize) -> Vec<Group> {
        let params = self.core.params();
        let trained = || params.iter().enumerate().filter(|(_, param)| param.is_trained() && param.numel > 0);
        let fits = |groups: usize| groups.saturating_mul(elements).saturating_mul(8) <= ROOM;
        if self.check.of_each && fits(trained().count()) {
            return trained().map(|(id, param)| Group { name: param.name.clone(), params: vec![id] }).collect();
        }
        let units = self.core.units();
        if self.check.of_each && fits(units.len()) {
            let of_unit = |(unit, (name, _)): (usize, &(String, usize))| {
                let params =
                    trained().filter(|(_, param): &(usize, &Param)| param.unit == unit).map(|(id, _)| id).collect();
                Group { name: if name.is_empty() { "outside of units".into() } else { name.clone() }, params }
            };
            return units.iter().enumerate().map(of_unit).filter(|group| !group.params.is_empty()).collect();
        }
        vec![Group { name: "all parameters".into(), params: trained().map(|(id, _)| id).collect() }]
    }

    /// The backward of a micro step is about to begin: whether it is measured.
    pub(super) fn begin_measuring(&mut self) -> bool {
        let measures = matches!(self.check.phase, Phase::Armed);
        if measures {
            self.core.begin_measuring();
        }
        measures
    }

    /// It is over.
    pub(super) fn end_measuring(&mut self) {
        let Measured { mut outputs, along, unprobed } = self.core.end_measuring();
        if self.check.groups.is_empty() {
            self.check.groups = self.groups(1);
        }
        outputs.resize(self.check.groups.len(), Change::default());
        let compared = self.check.groups.iter().map(|group| {
            group.params.iter().fold(Compared::default(), |sum, param| Compared {
                product: sum.product + along[*param].product,
                squares: sum.squares + along[*param].squares,
            })
        });
        let compared = compared.collect();
        if unprobed {
            self.check.why_not.get_or_insert_with(|| {
                "a part of the loss was computed in a forward that ran inside of another engine's".into()
            });
        }
        let factor = self.scaler.scale() / self.config.batch.gradient_accumulation_steps as f64;
        self.check.phase = Phase::Measured(outputs, compared, factor);
    }

    /// Collective: compares what all ranks have measured. `overflow`: a gradient is not finite, and the step is skipped.
    pub(super) fn judge_gradients(&mut self, overflow: bool) -> Result<()> {
        if overflow && matches!(self.check.phase, Phase::Measured(..)) && self.check.tries < TRIES {
            self.check.phase = Phase::Armed;
            self.check.tries += 1;
            self.arm();
            return Ok(());
        }
        let (outputs, compared, factor) = match std::mem::take(&mut self.check.phase) {
            Phase::Measured(outputs, compared, factor) => (outputs, compared, factor),
            other => {
                self.check.phase = other;
                return Ok(());
            }
        };
        let mut own = vec![f64::from(u8::from(self.check.why_not.is_some()))];
        for (change, compared) in outputs.iter().zip(&compared) {
            own.extend([change.difference, change.bend, change.noise, compared.product, compared.squares.sqrt()]);
        }
        let all = self.gather_f64(&own)?;
        let sum = |at: usize| all.iter().map(|rank| rank.get(at).copied().unwrap_or(f64::NAN)).sum::<f64>() / factor;
        let skipped = all.iter().position(|rank| rank.first() != Some(&0.0));
        let limits = self.limits();
        let rows: Vec<GradientRow> = (0..self.check.groups.len())
            .map(|number| {
                let at = |field: usize| sum(1 + 5 * number + field);
                row(self.check.groups[number].name.clone(), &limits, [at(0), at(1), at(2), at(3), at(4)])
            })
            .collect();
        let finite = rows.iter().all(|row| row.by_gradient.is_finite() && row.by_difference.is_finite());
        let not_judged = match skipped {
            Some(rank) => {
                Some(self.check.why_not.take().unwrap_or_else(|| format!("rank {rank} could not repeat its forward")))
            }
            None if !finite => Some("the loss or a gradient is not finite near these weights".into()),
            None => None,
        };
        let report = GradientReport { step: self.global_steps, rows, not_judged };
        let when = if self.check.is_second { "second" } else { "first" };
        if let (Some(why), 0) = (&report.not_judged, self.rank()) {
            say(&format!("the gradient of the {when} step was not checked: {why}"));
        }
        let is_unclear = |row: &GradientRow| (row.by_difference - row.by_gradient).abs() < CLEAR * row.noise;
        let looks_again = report.not_judged.is_none() && !self.check.of_each && !self.check.is_second;
        if looks_again && report.wrong().any(is_unclear) {
            self.check.is_second = true;
            self.check.phase = Phase::Armed;
            self.arm();
            return Ok(());
        }
        let wrong: Vec<&GradientRow> = if report.not_judged.is_some() { Vec::new() } else { report.wrong().collect() };
        let error = wrong.first().map(|first| EngineError::WrongGradient {
            what: if self.check.of_each {
                let names: Vec<&str> = wrong.iter().map(|row| row.name.as_str()).collect();
                format!("the gradient of {} is wrong", crate::util::list(&names))
            } else {
                format!("the gradient of the {when} step is wrong")
            },
            by_gradient: first.by_gradient,
            by_difference: first.by_difference,
        });
        let ends_run = self.check.ends_run.take();
        if let (Some(file), 0) = (&ends_run, self.rank()) {
            let text = serde_json::to_string(&report).unwrap_or_default();
            std::fs::write(file, text).map_err(|source| Error::Io { action: "write", path: file.clone(), source })?;
        }
        self.check.report = Some(report);
        if ends_run.is_some() {
            return Err(EngineError::GradientsChecked.into());
        }
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// What comes of repeating a forward: where the model fails at it, there is no check.
    fn or_give_up<T: Default>(&mut self, probed: Result<T>) -> Result<T> {
        let Err(Error::Candle(error)) = probed else { return probed };
        let why = without_backtrace(&error.to_string());
        self.check.why_not = Some(format!("forward could not run again: {why}"));
        Ok(T::default())
    }
}

/// Judges one group by its numbers: change by difference, bend, noise, change by gradient, expected size.
fn row(name: String, limits: &Limits, [by_difference, bend, noise, by_gradient, expected]: [f64; 5]) -> GradientRow {
    let size = expected.max(by_difference.abs() / 8.0);
    let allowed = limits.allowed * size + 4.0 * noise.abs() + 1.25 * bend.abs();
    let verdict = if (by_difference - by_gradient).abs() > allowed {
        GradientVerdict::Wrong
    } else if allowed > 0.5 * expected && expected > 0.0 {
        GradientVerdict::CannotTell
    } else {
        GradientVerdict::Right
    };
    GradientRow { name, by_gradient, by_difference, allowed, expected, noise: noise.abs(), verdict }
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// The values of an output in f32.
fn values(output: &Tensor) -> Result<Vec<f32>> {
    Ok(output.detach().to_device(&candle_core::Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// What a format loses of a number at most, as a part of it.
fn unit_of(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-9),
        DType::F16 => 2f64.powi(-12),
        _ => 2f64.powi(-24),
    }
}
