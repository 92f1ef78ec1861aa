//! `zerorun schedule`: shows the learning rate and the momentum of each optimizer step, without training.

use crate::error::{OptimError, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, refused};
use candle_zero::config::{Config, RunValues};
use candle_zero::optim::{Momentum, Schedule};
use clap::Parser;
use serde_json::json;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufWriter, Write};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;

/// The maximum number of steps to show.
const MAX_STEPS: u64 = 10_000_000;
/// The size of a plot, in characters.
const PLOT_ROWS: usize = 12;
const PLOT_COLUMNS: usize = 64;

/// Show the learning rate and the momentum of each optimizer step of a configuration, without training: one JSON object
/// per line, such as `{"step":1,"lr":0.001,"betas":[0.9,0.999]}`; with SGD, `"momentum":0.9` takes the place of betas.
///
/// Exit code: 0 if everything is shown, 1 if the output could not be written, 2 if the configuration or the command
/// line is wrong, or the schedule reaches a value that no optimizer accepts.
#[derive(Debug, Parser)]
#[command(name = "schedule", bin_name = "zerorun schedule")]
struct ScheduleArguments {
    /// Configuration file
    #[arg(long = "ds_config", alias = "ds-config", value_name = "FILE")]
    ds_config: PathBuf,

    /// Number of optimizer steps to show
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_STEPS))]
    steps: u64,

    /// Number of ranks; must be consistent with the batch-size keys of the configuration
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,

    /// Plot the learning rate, and the momentum if it changes
    #[arg(long)]
    plot: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <ScheduleArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(ScheduleArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl ScheduleArguments {
    fn run(self) -> ExitCode {
        let schedule = match self.schedule() {
            Ok(schedule) => schedule,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        let mut out = BufWriter::new(std::io::stdout().lock());
        let result = if self.plot { self.draw(schedule, &mut out) } else { self.list(schedule, &mut out) };
        let written = out.flush();
        match (result, written) {
            (Ok(Ok(())), Ok(())) => ExitCode::SUCCESS,
            (Err(error), _) => refused(&error, EXIT_SETUP),
            _ => ExitCode::FAILURE,
        }
    }

    /// Returns the schedule of the file, after printing the notes about the sections `optimizer` and `scheduler`.
    fn schedule(&self) -> Result<Schedule> {
        let config = {
            // The number of steps shown replaces "auto".
            let run = RunValues { total_num_steps: Some(self.steps), ..RunValues::default() };
            Config::load_for(self.ds_config.clone(), usize::from(self.ranks), &run)?
        };
        for note in config.notes.iter().filter(|n| ["optimizer.", "scheduler."].iter().any(|s| n.path.starts_with(s))) {
            eprint(&format!("zerorun: {}: {}", note.path, note.message));
        }
        let optimizer = config.optimizer.as_ref().ok_or(OptimError::NoOptimizer)?;
        Schedule::new(config.scheduler.as_ref(), Some(optimizer))
    }

    /// Writes one line per step. The inner result indicates whether the lines could be written.
    fn list(&self, mut schedule: Schedule, out: &mut impl Write) -> Result<std::io::Result<()>> {
        for step in 1..=self.steps {
            let (lr, _) = schedule.current_values()?;
            let momentum = match schedule.momentum() {
                Momentum::Betas(beta1, beta2) => format!("\"betas\":{}", json!([beta1, beta2])),
                Momentum::Factor(momentum) => format!("\"momentum\":{}", json!(momentum)),
            };
            let line = format!("{{\"step\":{step},\"lr\":{},{momentum}}}", json!(lr));
            if let Err(error) = writeln!(out, "{line}") {
                return Ok(Err(error));
            }
            schedule.step();
        }
        Ok(Ok(()))
    }

    /// Draws the learning rate, and the momentum if it changes.
    fn draw(&self, mut schedule: Schedule, out: &mut impl Write) -> Result<std::io::Result<()>> {
        let (mut rates, mut momenta) = (ScheduleCurve::new(self.steps), ScheduleCurve::new(self.steps));
        let momentum_name = match schedule.momentum() {
            Momentum::Betas(..) => "beta1",
            Momentum::Factor(_) => "momentum",
        };
        for _ in 1..=self.steps {
            rates.push(schedule.current_values()?.0);
            momenta.push(match schedule.momentum() {
                Momentum::Betas(momentum, _) | Momentum::Factor(momentum) => momentum,
            });
            schedule.step();
        }
        let mut text = rates.plot("learning rate");
        if !momenta.is_flat() {
            text += "\n";
            text += &momenta.plot(momentum_name);
        }
        Ok(out.write_all(text.as_bytes()))
    }
}

/// Values by step, collected in the columns of a plot.
struct ScheduleCurve {
    steps: u64,
    pushed: u64,
    /// The range of values in each column.
    columns: Vec<RangeInclusive<f64>>,
}

impl ScheduleCurve {
    fn new(steps: u64) -> Self {
        Self { steps, pushed: 0, columns: Vec::new() }
    }

    fn push(&mut self, value: f64) {
        let width = self.steps.min(PLOT_COLUMNS as u64);
        let column = (self.pushed * width / self.steps) as usize;
        self.pushed += 1;
        match self.columns.get_mut(column) {
            Some(range) => *range = range.start().min(value)..=range.end().max(value),
            None => self.columns.push(value..=value),
        }
    }

    /// Returns the smallest and the largest value.
    fn bounds(&self) -> (f64, f64) {
        let wider = |(least, greatest): (f64, f64), range: &RangeInclusive<f64>| {
            (least.min(*range.start()), greatest.max(*range.end()))
        };
        self.columns.iter().fold((f64::INFINITY, f64::NEG_INFINITY), wider)
    }

    fn is_flat(&self) -> bool {
        let (least, greatest) = self.bounds();
        least == greatest
    }

    /// Draws the plot, with the smallest value in the lowest row and the largest in the highest.
    fn plot(&self, title: &str) -> String {
        let (least, greatest) = self.bounds();
        let rows = if least == greatest { 1 } else { PLOT_ROWS };
        // If all values are equal, 0 is divided by 0, and the NaN becomes row 0.
        let row = |value: f64| ((value - least) / (greatest - least) * (rows - 1) as f64).round() as usize;
        let mut text = format!("{title}\n");
        for y in (0..rows).rev() {
            let label = match y {
                0 => format!("{least:.3e}"),
                y if y == rows - 1 => format!("{greatest:.3e}"),
                _ => String::new(),
            };
            let marks: String = self
                .columns
                .iter()
                .map(|range| if (row(*range.start())..=row(*range.end())).contains(&y) { '*' } else { ' ' })
                .collect();
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", format!("{label:>10} |{marks}").trim_end());
        }
        let width = self.columns.len();
        let _ = writeln!(text, "{:>10} +{}", "", "-".repeat(width));
        let last = format!("step {}", self.steps);
        let _ = writeln!(text, "{:>10}  {:width$}{last}", "", "1", width = width.saturating_sub(last.len()).max(2));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: impl ExactSizeIterator<Item = f64>) -> ScheduleCurve {
        let mut curve = ScheduleCurve::new(values.len() as u64);
        values.for_each(|value| curve.push(value));
        curve
    }

    #[test]
    fn a_plot_has_its_ends_and_its_jumps() {
        let stairs = curve([0.0, 0.0, 4.0, 4.0, 2.0, 2.0, 0.0, 0.0, 11.0, 11.0].into_iter());
        insta::assert_snapshot!(stairs.plot("learning rate"), @r"
        learning rate
           1.100e1 |        **
                   |
                   |
                   |
                   |
                   |
                   |
                   |  **
                   |
                   |    **
                   |
           0.000e0 |**    **
                   +----------
                    1  step 10
        ");
        // A column that represents several values shows their complete range.
        let saw = curve((0..1000).map(|i| f64::from(i % 2)));
        assert_eq!(saw.columns.len(), PLOT_COLUMNS);
        assert!(saw.plot("x").lines().filter(|line| line.contains(&"*".repeat(PLOT_COLUMNS))).count() == PLOT_ROWS);
    }

    #[test]
    fn what_does_not_change_is_one_row() {
        let flat = curve([0.25; 3].into_iter());
        assert!(flat.is_flat());
        insta::assert_snapshot!(flat.plot("learning rate"), @r"
        learning rate
          2.500e-1 |***
                   +---
                    1 step 3
        ");
    }
}
