//! The profile report.

use super::spans::{MicroStepHalf, ProfiledCost};
use super::step_timings::StepTimings;
use crate::config::FlopsProfilerConfig;
use crate::param::{ROOT, UnitId};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The operations and time of a unit in one optimizer step, on rank 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModuleProfile {
    /// The name of the unit; empty for work outside units.
    pub name: String,
    /// The number of elements of its parameters.
    pub parameters: usize,
    /// The multiply-adds in the forward pass, in which `linear_cross_entropy` also computes its gradients.
    pub forward_macs: u64,
    /// The multiply-adds in the backward pass, including recomputation.
    pub backward_macs: u64,
    /// The milliseconds in the forward pass, including waits for the unit's parameters.
    pub forward_ms: f64,
    /// The milliseconds in the backward pass.
    pub backward_ms: f64,
}

impl ModuleProfile {
    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.forward_macs += other.forward_macs;
        self.backward_macs += other.backward_macs;
        self.forward_ms += other.forward_ms;
        self.backward_ms += other.backward_ms;
    }
}

/// The operations and time of one optimizer step, on rank 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FlopsProfile {
    /// The number of the step, counted from 1.
    pub step: u64,
    /// The number of ranks.
    pub world_size: usize,
    /// The number of samples of all ranks in the step.
    pub samples: usize,
    /// The work outside units first, then the units in the order in which they were built.
    pub modules: Vec<ModuleProfile>,
    /// The durations of the step's parts.
    pub timings: StepTimings,
    /// The operations per second of large matrix products in the model's dtype, measured on rank 0 while the other
    /// ranks wait.
    pub peak_flops: f64,
}

impl FlopsProfile {
    /// Returns a report of the recorded spans; `units` has the name and the number of parameters of each unit.
    pub(crate) fn new(
        units: Vec<(String, usize)>,
        costs: &BTreeMap<(MicroStepHalf, UnitId), ProfiledCost>,
        (step, samples, world_size): (u64, usize, usize),
        timings: StepTimings,
        peak_flops: f64,
    ) -> Self {
        let module = |(unit, (name, parameters))| {
            let [forward, backward] = [MicroStepHalf::Forward, MicroStepHalf::Backward]
                .map(|half| costs.get(&(half, unit)).copied().unwrap_or_default());
            ModuleProfile {
                name,
                parameters,
                forward_macs: forward.macs,
                backward_macs: backward.macs,
                forward_ms: forward.time.as_secs_f64() * 1e3,
                backward_ms: backward.time.as_secs_f64() * 1e3,
            }
        };
        let modules = units.into_iter().enumerate().map(module).collect();
        Self { step, world_size, samples, modules, timings, peak_flops }
    }

    /// Returns the sum over all modules.
    pub fn total(&self) -> ModuleProfile {
        let mut total = ModuleProfile::default();
        self.modules.iter().for_each(|module| total.add(module));
        total
    }

    /// Returns the operations of rank 0: two for each multiply-add.
    pub fn flops(&self) -> u64 {
        let total = self.total();
        2 * (total.forward_macs + total.backward_macs)
    }

    /// Returns the milliseconds of the complete step.
    pub fn step_ms(&self) -> f64 {
        self.timings.forward_ms + self.timings.backward_ms + self.timings.step_ms
    }

    /// Returns the operations per second of rank 0 over the complete step.
    pub fn flops_per_s(&self) -> f64 {
        self.flops() as f64 / self.step_ms() * 1e3
    }

    /// Returns the model FLOPs utilization: the operations per second as a fraction of the measured peak. Unlike the
    /// usual definition, this one also counts recomputed operations.
    pub fn mfu(&self) -> f64 {
        self.flops_per_s() / self.peak_flops
    }

    /// Returns the samples per second of all ranks.
    pub fn samples_per_s(&self) -> f64 {
        self.samples as f64 / self.step_ms() * 1e3
    }

    /// Merges modules by the first `depth` components of their names, in order of first occurrence.
    fn at_depth(&self, depth: usize) -> Vec<ModuleProfile> {
        let mut rows: Vec<ModuleProfile> = Vec::new();
        for module in &self.modules {
            let name = module.name.split('.').take(depth).collect::<Vec<_>>().join(".");
            match rows.iter_mut().find(|row| row.name == name) {
                Some(row) => row.add(module),
                None => rows.push(ModuleProfile { name, ..module.clone() }),
            }
        }
        rows
    }

    /// The prefix of every report text.
    pub(crate) const REPORT_PREFIX: &'static [u8] = b"flops profile of step ";

    /// Returns the profile as text, with the level of detail that `config` sets.
    pub(crate) fn text(&self, config: &FlopsProfilerConfig) -> String {
        let total = self.total();
        let rate = |macs: u64, ms: f64| si(2.0 * macs as f64 / ms * 1e3, "FLOPS");
        let (forward, backward, t) = (total.forward_macs, total.backward_macs, &self.timings);
        let rows = [
            ("world size", self.world_size.to_string()),
            ("batch size of all ranks", self.samples.to_string()),
            ("parameters", si(total.parameters as f64, "")),
            ("fwd MACs of rank 0", si(forward as f64, "MACs")),
            ("bwd MACs of rank 0", si(backward as f64, "MACs")),
            ("fwd+bwd flops of rank 0", si(self.flops() as f64, "FLOPs")),
            ("fwd latency", format!("{:.2} ms, {}", t.forward_ms, rate(forward, t.forward_ms))),
            ("bwd latency", format!("{:.2} ms, {}", t.backward_ms, rate(backward, t.backward_ms))),
            ("step latency", format!("{:.2} ms", t.step_ms)),
            ("iter latency", format!("{:.2} ms, {}", self.step_ms(), rate(forward + backward, self.step_ms()))),
            ("measured peak", si(self.peak_flops, "FLOPS")),
            ("MFU", format!("{:.1} %", self.mfu() * 100.0)),
            ("samples/second", format!("{:.2}", self.samples_per_s())),
        ];
        let mut text = format!("flops profile of step {}\n", self.step);
        rows.iter().for_each(|(name, value)| text += &format!("{name:<26}{value}\n"));
        text += "counted: multiply-adds of matrix products, convolutions and attention of candle-zero's layers on the CPU\n";
        let deepest = self.modules.iter().map(|module| module.name.split('.').count()).max().unwrap_or(0);
        let depths = match config.module_depth {
            Some(depth) => depth.min(deepest)..=depth.min(deepest),
            None => 1..=deepest,
        };
        for depth in depths.clone().filter(|depth| *depth > 0 && config.top_modules > 0) {
            let mut rows = self.at_depth(depth);
            rows.sort_by_key(|row| std::cmp::Reverse(row.forward_macs + row.backward_macs));
            rows.truncate(config.top_modules);
            text += &format!("\ntop modules at depth {depth}\n{}", ProfileTable(&rows, &total));
        }
        if config.detailed && *depths.end() > 0 {
            text += &format!("\nmodules\n{}", ProfileTable(&self.at_depth(*depths.end()), &total));
        }
        text.trim_end().to_string()
    }
}

impl fmt::Display for FlopsProfile {
    /// Formats the profile with the default settings of `flops_profiler`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(&FlopsProfilerConfig::default()))
    }
}

/// A table of rows, with the total for their percentages.
struct ProfileTable<'a>(&'a [ModuleProfile], &'a ModuleProfile);

impl fmt::Display for ProfileTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(rows, total) = self;
        let columns = ["parameters", "fwd MACs", "bwd MACs", "MACs %", "fwd ms", "bwd ms", "FLOP/s"];
        write!(f, "{:<24}", "module")?;
        columns.iter().try_for_each(|name| write!(f, "{name:>13}"))?;
        let all = total.forward_macs + total.backward_macs;
        for row in *rows {
            let macs = row.forward_macs + row.backward_macs;
            let name = if row.name.is_empty() { "(outside units)" } else { &row.name };
            let share = macs as f64 / all.max(1) as f64 * 100.0;
            let rate = 2.0 * macs as f64 / (row.forward_ms + row.backward_ms).max(1e-6) * 1e3;
            let sizes = [row.parameters as f64, row.forward_macs as f64, row.backward_macs as f64];
            write!(f, "\n{name:<24}")?;
            sizes.iter().try_for_each(|size| write!(f, "{:>13}", si(*size, "")))?;
            write!(f, "{share:>13.1}{:>13.2}{:>13.2}{:>13}", row.forward_ms, row.backward_ms, si(rate, ""))?;
        }
        writeln!(f)
    }
}

/// Formats a number with a unit, such as `1.50 GFLOP`, in steps of 1000. Numbers below 1000 have no decimals, and
/// others have two.
fn si(value: f64, unit: &str) -> String {
    let prefixes = ["", "K", "M", "G", "T", "P", "E"];
    let step = (0..prefixes.len() - 1).find(|step| value < 1000f64.powi(*step as i32 + 1));
    let step = step.unwrap_or(prefixes.len() - 1);
    let scaled = value / 1000f64.powi(step as i32);
    let digits = if step == 0 { 0 } else { 2 };
    format!("{scaled:.digits$} {}{unit}", prefixes[step]).trim_end().to_string()
}

/// Checks that the entry for work outside units comes first.
const _: () = assert!(ROOT == 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> FlopsProfile {
        let module = |name: &str, parameters, forward_macs, ms| ModuleProfile {
            name: name.into(),
            parameters,
            forward_macs,
            backward_macs: 2 * forward_macs,
            forward_ms: ms,
            backward_ms: 2.0 * ms,
        };
        FlopsProfile {
            step: 2,
            world_size: 2,
            samples: 16,
            modules: vec![
                module("", 1000, 2_000_000, 1.0),
                module("h.0", 500, 3_000_000, 2.0),
                module("h.1", 500, 4_000_000, 3.0),
                module("other.0.mlp", 250, 1_000_000, 4.0),
            ],
            timings: StepTimings { forward_ms: 12.0, backward_ms: 24.0, step_ms: 4.0, ..StepTimings::default() },
            peak_flops: 3e9,
        }
    }

    #[test]
    fn the_text_has_totals_and_modules_by_depth() {
        let profile = profile();
        assert_eq!((profile.flops(), profile.mfu(), profile.samples_per_s()), (60_000_000, 0.5, 400.0));
        insta::assert_snapshot!(profile, @r"
        flops profile of step 2
        world size                2
        batch size of all ranks   16
        parameters                2.25 K
        fwd MACs of rank 0        10.00 MMACs
        bwd MACs of rank 0        20.00 MMACs
        fwd+bwd flops of rank 0   60.00 MFLOPs
        fwd latency               12.00 ms, 1.67 GFLOPS
        bwd latency               24.00 ms, 1.67 GFLOPS
        step latency              4.00 ms
        iter latency              40.00 ms, 1.50 GFLOPS
        measured peak             3.00 GFLOPS
        MFU                       50.0 %
        samples/second            400.00
        counted: multiply-adds of matrix products, convolutions and attention of candle-zero's layers on the CPU

        top modules at depth 1
        module                     parameters     fwd MACs     bwd MACs       MACs %       fwd ms       bwd ms       FLOP/s
        h                              1.00 K       7.00 M      14.00 M         70.0         5.00        10.00       2.80 G

        top modules at depth 2
        module                     parameters     fwd MACs     bwd MACs       MACs %       fwd ms       bwd ms       FLOP/s
        h.1                               500       4.00 M       8.00 M         40.0         3.00         6.00       2.67 G

        top modules at depth 3
        module                     parameters     fwd MACs     bwd MACs       MACs %       fwd ms       bwd ms       FLOP/s
        h.1                               500       4.00 M       8.00 M         40.0         3.00         6.00       2.67 G

        modules
        module                     parameters     fwd MACs     bwd MACs       MACs %       fwd ms       bwd ms       FLOP/s
        (outside units)                1.00 K       2.00 M       4.00 M         20.0         1.00         2.00       4.00 G
        h.0                               500       3.00 M       6.00 M         30.0         2.00         4.00       3.00 G
        h.1                               500       4.00 M       8.00 M         40.0         3.00         6.00       2.67 G
        other.0.mlp                       250       1.00 M       2.00 M         10.0         4.00         8.00     500.00 M
        ");
    }

    #[test]
    fn depth_rows_and_details_are_as_asked_for() {
        let text = |module_depth, top_modules, detailed| {
            let config = FlopsProfilerConfig { module_depth, top_modules, detailed, ..FlopsProfilerConfig::default() };
            let text = profile().text(&config);
            text.lines()
                .skip(15)
                .map(|line| line.split("  ").next().unwrap_or_default().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(text(Some(0), 3, true), [""; 0]);
        assert_eq!(text(Some(1), 2, false), ["", "top modules at depth 1", "module", "h", "(outside units)"]);
        assert_eq!(text(Some(9), 1, false), ["", "top modules at depth 3", "module", "h.1"]);
        let modules = ["", "modules", "module", "(outside units)", "h.0", "h.1", "other.0"];
        assert_eq!(text(Some(2), 0, true), modules);
    }
}
