//! The time of a step on one host: given by the user, or taken from the metrics of a run.

use super::step_trace::{PhaseWork, StepPhase};
use crate::error::{Error, EstimateError, Result};
use serde_json::Value;
use std::path::Path;

/// The number of initial steps of a run, which allocate memory and record the order of units. These steps are left out,
/// but never more than half of all steps.
const FIRST_STEPS: usize = 3;
/// The metrics that report the phases of a step.
const PHASES: [&str; 3] = ["forward_ms", "backward_ms", "step_ms"];

/// The time of a step on one host: computation, memory and disk access, and collectives within the host.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredStep {
    step_s: f64,
    /// The seconds that the forward pass, the backward pass and the optimizer step take.
    phases: Option<[f64; 3]>,
    steps: usize,
    ranks: Option<usize>,
}

impl MeasuredStep {
    /// Describes a step of `step_s` seconds.
    ///
    /// # Errors
    /// [`EstimateError::Step`] if `step_s` is not a finite number above 0.
    pub fn seconds(step_s: f64) -> Result<Self, EstimateError> {
        match step_s.is_normal() && step_s > 0.0 {
            true => Ok(Self { step_s, phases: None, steps: 0, ranks: None }),
            false => Err(EstimateError::Step { found: step_s }),
        }
    }

    /// Takes the median time of a step from the metrics that `train_gpt` and `zerorun finetune` write. The first steps
    /// are left out.
    ///
    /// # Errors
    /// A file that cannot be read; [`EstimateError::Metrics`] if it contains no steps that can be used.
    pub fn metrics(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })?;
        Self::of_lines(&text).map_err(|problem| EstimateError::Metrics { path: path.to_owned(), problem }.into())
    }

    fn of_lines(text: &str) -> Result<Self, String> {
        let (mut steps, mut ranks) = (Vec::new(), None);
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let line: Value = match serde_json::from_str(line) {
                Ok(line) => line,
                // The file of a killed run may end in a partial line.
                Err(_) if number == text.lines().count() => break,
                Err(error) => return Err(format!("line {number} is not JSON: {error}")),
            };
            ranks = line["world_size"].as_u64().and_then(|ranks| usize::try_from(ranks).ok()).or(ranks);
            if line["step"].is_u64() {
                steps.push(phases(&line).ok_or_else(|| {
                    format!("line {number} lacks valid {}: numbers of at least 0", PHASES.join(", "))
                })?);
            }
        }
        let steps = &steps[FIRST_STEPS.min(steps.len() / 2)..];
        let total = |step: &[f64; 3]| step.iter().sum::<f64>();
        let step_s = median(steps.iter().map(total).collect()).filter(|s| s.is_normal());
        let problem = if steps.is_empty() { "it contains no steps" } else { "its steps take no time" };
        let step_s = step_s.ok_or(problem)?;
        let medians = [0, 1, 2].map(|phase| median(steps.iter().map(|step| step[phase]).collect()).unwrap_or(0.0));
        // The medians of the phases do not exactly add up to the median of the step.
        let phases = Some(medians).filter(|m| total(m) > 0.0).map(|m| m.map(|s| s * step_s / total(&m)));
        Ok(Self { step_s, phases, steps: steps.len(), ranks })
    }

    /// Returns the seconds of a step.
    pub fn step_s(&self) -> f64 {
        self.step_s
    }

    /// Returns the number of steps that the median was taken from, or 0 if the time was given.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the number of ranks of the run, if its metrics report it.
    pub fn ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// Returns a function that converts an amount of work in a phase to seconds, given the total work of a step. Also
    /// returns the seconds of a step that no work accounts for.
    pub(super) fn spread(&self, total_work: PhaseWork) -> (impl Fn(StepPhase, f64) -> f64 + use<>, f64) {
        let phase_seconds = self.phases.map(|[forward, backward, update]| PhaseWork { forward, backward, update });
        let forward_and_backward = total_work.forward + total_work.backward;
        let share = move |total: f64, work: f64, seconds: f64| if total > 0.0 { seconds * work / total } else { 0.0 };
        let step_s = self.step_s;
        let seconds = move |phase: StepPhase, work: f64| match (phase_seconds, phase) {
            (Some(seconds), _) => share(total_work.of(phase), work, seconds.of(phase)),
            // If the optimizer's time is unknown, it is part of the other phases.
            (None, StepPhase::Update) => 0.0,
            (None, _) => share(forward_and_backward, work, step_s),
        };
        let spent: f64 = [StepPhase::Forward, StepPhase::Backward, StepPhase::Update]
            .map(|p| seconds(p, total_work.of(p)))
            .iter()
            .sum();
        (seconds, (step_s - spent).max(0.0))
    }
}

/// Returns the seconds of the phases of a step.
fn phases(line: &Value) -> Option<[f64; 3]> {
    let mut seconds = [0.0; 3];
    for (key, seconds) in PHASES.iter().zip(&mut seconds) {
        *seconds = line[*key].as_f64().filter(|ms| *ms >= 0.0)? / 1e3;
    }
    Some(seconds)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[half]),
        _ => Some((values[half - 1] + values[half]) / 2.0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn step(step: u64, forward: f64) -> String {
        json!({"step": step, "forward_ms": forward, "backward_ms": 2.0 * forward, "step_ms": 10.0}).to_string()
    }

    #[test]
    fn the_median_of_later_steps_is_taken() {
        let lines: Vec<String> = [900.0, 500.0, 100.0, 30.0, 20.0, 31.0, 29.0, 30.0]
            .iter()
            .zip(0..)
            .map(|(forward, number)| step(number, *forward))
            .chain([json!({"summary": true, "world_size": 2}).to_string()])
            .collect();
        let measured = MeasuredStep::of_lines(&lines.join("\n")).unwrap();
        assert!((measured.step_s() - 0.1).abs() < 1e-12);
        assert_eq!((measured.steps(), measured.ranks()), (5, Some(2)));
        let cut = format!("{}\n{{\"step\": 8, \"forw", lines.join("\n"));
        assert_eq!(MeasuredStep::of_lines(&cut).unwrap(), measured);
        // If there are few steps, the later half is used.
        assert!((MeasuredStep::of_lines(&lines[..2].join("\n")).unwrap().step_s() - 1.51).abs() < 1e-12);
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        for (text, words) in [
            ("", "no steps"),
            ("{\"summary\": true}", "no steps"),
            ("{\n{}", "line 1 is not JSON"),
            ("{\"step\": 0, \"loss\": 1.0}", "line 1 lacks valid forward_ms, backward_ms, step_ms"),
            ("{\"step\": 0, \"forward_ms\": -1, \"backward_ms\": 1, \"step_ms\": 1}", "numbers of at least 0"),
            ("{\"step\": 0, \"forward_ms\": 0, \"backward_ms\": 0, \"step_ms\": 0}", "take no time"),
        ] {
            let problem = MeasuredStep::of_lines(text).unwrap_err();
            assert!(problem.contains(words), "{text}: {problem}");
        }
        assert!(matches!(MeasuredStep::metrics("/no/such.jsonl").unwrap_err(), Error::Io { .. }));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(MeasuredStep::seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn time_is_spread_over_work_and_none_is_lost() {
        let all = PhaseWork { forward: 10.0, backward: 30.0, update: 5.0 };
        let (seconds, rest) = MeasuredStep::seconds(4.0).unwrap().spread(all);
        assert_eq!([seconds(StepPhase::Forward, 10.0), seconds(StepPhase::Backward, 15.0), rest], [1.0, 1.5, 0.0]);
        assert_eq!(seconds(StepPhase::Update, 5.0), 0.0);
        let measured = MeasuredStep::of_lines(&step(0, 30.0)).unwrap();
        let (seconds, rest) = measured.spread(all);
        let times = [
            seconds(StepPhase::Forward, 5.0),
            seconds(StepPhase::Backward, 30.0),
            seconds(StepPhase::Update, 5.0),
            rest,
        ];
        let expected = [0.015, 0.06, 0.01, 0.0];
        assert!(times.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{times:?}");
        // No work falls into this phase, but its measured time must still be part of the step.
        let (_, rest) = measured.spread(PhaseWork { update: 0.0, ..all });
        assert!((rest - 0.01).abs() < 1e-12);
        assert_eq!(MeasuredStep::seconds(4.0).unwrap().spread(PhaseWork::default()).1, 4.0);
    }
}
