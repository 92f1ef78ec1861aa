//! Implements `zerorun estimate --pipeline`: the memory of each rank of a pipeline, and the time of a step.

use super::hosts_forecast::ForecastArguments;
use crate::error::Result;
use candle_zero::estimate::{MeasuredStep, Network, PipelineEstimate, PipelineRankEstimate};
use candle_zero::memory::{MemoryReport, MemoryRow};
use candle_zero::pipeline::PartitionMethod;
use candle_zero::util::{counted, format_bytes};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The estimate of a pipeline, with the time of a step.
pub(super) struct PipelineReport {
    model: &'static str,
    /// The number of elements of the complete model.
    parameters: usize,
    estimate: PipelineEstimate,
    /// The bytes of an activation of one micro batch, which crosses each boundary forward and, as a gradient, backward.
    activation: usize,
    /// The link between two ranks, or `None` if messages take no time.
    network: Option<Network>,
    measured: Option<MeasuredStep>,
}

/// The needs that are not estimated.
const NOT_INCLUDED: [&str; 3] = [
    "the activations of the micro batches that a rank holds at a time (the last column of the table)",
    "data on its way to the model, and a checkpoint while it is written",
    "the program itself: its code, its threads, and memory that the allocator keeps",
];

const ASSUMED: &str = "for the waiting time: a stage takes time in proportion to its parameters without embeddings, \
                       and forward passes, gradients of inputs and gradients of weights all take the same time";

impl PipelineReport {
    /// Returns the report on `estimate`. An activation of one micro batch has `elements` elements.
    ///
    /// # Errors
    /// Fails as [`ForecastArguments::measured_step`] does.
    pub(super) fn new(
        model: &'static str,
        parameters: usize,
        estimate: PipelineEstimate,
        elements: usize,
        forecast: &ForecastArguments,
    ) -> Result<Self> {
        let activation = elements.saturating_mul(estimate.config.precision.dtype().size_in_bytes());
        let (network, measured) = (forecast.network(), forecast.measured_step()?);
        Ok(Self { model, parameters, estimate, activation, network, measured })
    }

    /// Returns the seconds that a message between two ranks takes.
    fn message_s(&self) -> f64 {
        self.network.map_or(0.0, |network| network.latency_s() + self.activation as f64 / network.bytes_per_s())
    }

    /// Returns the predicted seconds of a step, if a step was measured on one rank, and the share of a step in which
    /// ranks wait on average.
    fn step(&self) -> Result<(Option<f64>, f64)> {
        match &self.measured {
            Some(measured) => {
                let step = self.estimate.step(measured, self.message_s());
                Ok((Some(step.seconds), step.bubble()))
            }
            None => Ok((None, self.estimate.step(&MeasuredStep::seconds(1.0)?, 0.0).bubble())),
        }
    }

    pub(super) fn json(&self) -> Result<Value> {
        let (seconds, bubble) = self.step()?;
        Ok(json!({
            "model": self.model,
            "parameters": self.parameters,
            "layers": self.estimate.layers,
            "pipelines": self.estimate.pipelines,
            "schedule": self.estimate.config.pipeline.schedule.name(),
            "micro_batches": self.estimate.schedule().micro_batches(),
            "ranks": self.estimate.ranks,
            "activation_bytes": self.activation,
            "network": self.network.map(|network| network.to_string()),
            "waiting_share": bubble,
            "step_s": seconds,
            "assumed": [ASSUMED],
            "not_included": NOT_INCLUDED,
        }))
    }

    pub(super) fn text(&self) -> Result<String> {
        let Self { model, parameters, estimate, .. } = self;
        let (ranks, schedule) = (estimate.ranks.len(), estimate.schedule());
        let mut text = format!(
            "{model}: {}, {}; stage {}, {} of {}, schedule {}, accumulation {}\n\n",
            counted(*parameters, "parameter"),
            counted(estimate.layers, "layer"),
            estimate.config.zero.stage,
            counted(estimate.pipelines, "pipeline"),
            counted(ranks, "rank"),
            estimate.config.pipeline.schedule.name(),
            schedule.micro_batches()
        );
        text +=
            "rank        layers      parameters         trained            host   host, at most  micro batches held\n";
        for (at, rank) in estimate.ranks.iter().enumerate() {
            let PipelineRankEstimate { layers, parameters, trained, memory, held_activations, .. } = rank;
            let layers: Vec<String> = layers.iter().map(|range| format!("{}-{}", range.start, range.end - 1)).collect();
            let held = format_bytes(sum(memory, |row| row.host.held));
            let peak = format_bytes(sum(memory, |row| row.host.peak));
            _ = writeln!(
                text,
                "{at:<6}{:>12}{parameters:>16}{trained:>16}{held:>16}{peak:>16}{held_activations:>20}",
                layers.join(" ")
            );
        }
        if estimate.config.pipeline.partition == PartitionMethod::Time {
            text += "\nA job measures the time of each layer at its start (pipeline.partition: time); here, stages have about \
                     the same number of parameters.\n";
        }
        let (seconds, bubble) = self.step()?;
        _ = write!(
            text,
            "\nper micro batch and boundary, {} crosses the network forward, and the same amount backward\nranks wait \
             for {:.1} % of a step",
            format_bytes(self.activation as u64),
            100.0 * bubble
        );
        match (&self.network, seconds) {
            (Some(network), Some(_)) => {
                let message = self.message_s() * 1e3;
                _ = writeln!(text, "; one message takes {message:.1} ms ({network})");
            }
            _ => text += ", if messages take no time\n",
        }
        if let (Some(seconds), Some(measured)) = (seconds, &self.measured) {
            _ = writeln!(text, "a step takes {seconds:.3} s, instead of {:.3} s on one rank", measured.step_s());
        }
        text += "\nnot included:";
        NOT_INCLUDED.iter().for_each(|line| _ = write!(text, "\n- {line}"));
        _ = write!(text, "\nassumed:\n- {ASSUMED}");
        Ok(text)
    }
}

fn sum(memory: &MemoryReport, column: impl Fn(&MemoryRow) -> usize) -> u64 {
    memory.rows.iter().map(column).sum::<usize>() as u64
}
