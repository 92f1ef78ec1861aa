//! Implements `zerorun estimate --hosts`: bytes between hosts, the resulting step time, and steps on more hosts.

use crate::error::{EstimateError, Result};
use candle_zero::comm::CollectiveKind;
use candle_zero::config::Config;
use candle_zero::estimate::{
    Estimate, EstimateOptions, Forecast, InterHostTraffic, MeasuredStep, Network, ScalingRow, Shapes,
};
use candle_zero::util::{counted, format_bytes};
use clap::Args;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::PathBuf;

/// The flags about hosts and their network.
#[derive(Debug, Clone, Args)]
pub(super) struct ForecastArguments {
    /// Also predict the step time on this many hosts, with the ranks divided evenly among them
    #[arg(long, value_name = "N", conflicts_with = "table", value_parser = clap::value_parser!(u32).range(1..=65536))]
    hosts: Option<u32>,

    /// Network of each host: rate in each direction (bit, kbit, Mbit or Gbit, as in tc, or MB/s or GB/s of data),
    /// one-way latency (us, ms or s), and the share of the host's processors that network traffic occupies, such as
    /// 25Gbit,50us,10% [default: 10Gbit,50us,0%; with --pipeline, messages take no time]
    #[arg(long, value_name = "RATE,LATENCY[,BUSY]", requires = "spread")]
    network: Option<Network>,

    /// Seconds per step on one host with as many ranks as each host has in the forecast; with --pipeline, on one rank
    /// that accumulates the gradients of the same micro batches
    #[arg(long, value_name = "SECONDS", requires = "spread", conflicts_with = "measured")]
    step: Option<f64>,

    /// Read the step time from this metrics file (--metrics of train_gpt or zerorun finetune) of a run on one host,
    /// with as many ranks as for --step
    #[arg(long, value_name = "FILE.jsonl", requires = "spread")]
    measured: Option<PathBuf>,
}

impl ForecastArguments {
    /// Returns the number of hosts for `ranks` ranks, if requested.
    ///
    /// # Errors
    /// Fails if the ranks cannot be divided evenly among the hosts.
    pub(super) fn hosts(&self, ranks: usize) -> Result<Option<usize>> {
        match self.hosts.map(|hosts| hosts as usize) {
            Some(hosts) if !ranks.is_multiple_of(hosts) => Err(EstimateError::Hosts { ranks, hosts }.into()),
            hosts => Ok(hosts),
        }
    }

    /// Returns the measured step, if one is given.
    ///
    /// # Errors
    /// Fails if the time in seconds is not a number above 0, or if the metrics cannot be read or used.
    pub(super) fn measured_step(&self) -> Result<Option<MeasuredStep>> {
        Ok(match (&self.measured, self.step) {
            (Some(path), _) => Some(MeasuredStep::metrics(path)?),
            (None, Some(step)) => Some(MeasuredStep::seconds(step)?),
            (None, None) => None,
        })
    }

    /// Returns the network link of each host, if it is given.
    pub(super) fn network(&self) -> Option<Network> {
        self.network
    }

    /// Returns the forecast for this number of hosts.
    ///
    /// # Errors
    /// Fails as [`measured_step`](Self::measured_step) does, if the ranks cannot be divided evenly among the hosts, or
    /// if the configuration cannot be estimated.
    pub(super) fn forecast(
        &self,
        hosts: usize,
        estimate: &Estimate,
        (shapes, config, options): (&Shapes, &Config, EstimateOptions),
    ) -> Result<MultiHostForecast> {
        let measured = self.measured_step()?;
        let (network, ranks_per_host) = (self.network.unwrap_or(Network::ASSUMED), config.world_size / hosts);
        let forecast = estimate.forecast(hosts, &network, measured.as_ref())?;
        let sizes = (hosts, ranks_per_host);
        let rows = Estimate::weak_scaling(shapes, config, options, sizes, &network, measured.as_ref())?;
        let is_network_given = self.network.is_some();
        Ok(MultiHostForecast { ranks_per_host, network, is_network_given, measured, forecast, rows })
    }
}

/// The forecast, with its network and measurement.
pub(super) struct MultiHostForecast {
    /// The number of ranks of each host.
    pub ranks_per_host: usize,
    network: Network,
    /// Whether the user gave the network.
    is_network_given: bool,
    measured: Option<MeasuredStep>,
    forecast: Forecast,
    rows: Vec<ScalingRow>,
}

/// The effects that forecasts do not include.
pub(super) const NOT_INCLUDED: [&str; 2] = [
    "TCP slow start after idle periods, lost packets, and other traffic on the network",
    "ranks that wait for one another because they differ in speed, and the optimizer's share per rank, which becomes \
     smaller on more hosts",
];

impl MultiHostForecast {
    pub(super) fn json(&self) -> Value {
        let Self { ranks_per_host, network, measured, forecast, rows, .. } = self;
        json!({
            "hosts": forecast.hosts,
            "ranks_of_each": ranks_per_host,
            "network": {"text": network.to_string(), "bytes_per_s": network.bytes_per_s(),
                        "latency_s": network.latency_s(), "busy": network.busy()},
            "measured_s": measured.as_ref().map(MeasuredStep::step_s),
            "forecast": forecast,
            "weak_scaling": rows,
        })
    }

    pub(super) fn assumptions(&self) -> Vec<String> {
        let Self { ranks_per_host, network, measured, .. } = self;
        let default_note = if self.is_network_given { "" } else { ", the default of --network" };
        let mut assumptions = vec![format!(
            "each host's link has a bandwidth and latency of {network} in both directions at the same time{default_note}: {} of \
             data a second",
            decimal(network.bytes_per_s())
        )];
        assumptions.push(match network.busy() {
            0.0 => {
                "messages take no processor time on the hosts; zerorun bench network measures how much they really take"
                    .into()
            }
            busy => format!("while a host's link is busy, {:.1} % of its processors cannot compute", 100.0 * busy),
        });
        match measured {
            None => {}
            Some(measured) if measured.steps() == 0 => assumptions.push(
                "the forward pass takes one part of the step and the backward pass two (three if units recompute), and \
                 each unit takes a share in proportion to its parameters"
                    .into(),
            ),
            Some(measured) => {
                assumptions.push(format!(
                    "the forward pass, the backward pass and the optimizer take the medians of {}, and each unit takes \
                     a share in proportion to its parameters",
                    match measured.steps() {
                        1 => "one measured step".to_string(),
                        steps => format!("{steps} measured steps"),
                    }
                ));
                if let Some(ranks) = measured.ranks().filter(|ranks| ranks != ranks_per_host) {
                    let host_ranks = counted(*ranks_per_host, "rank");
                    assumptions.push(format!("a step on {host_ranks} takes as long as the measured steps on {ranks}"));
                }
            }
        }
        assumptions
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        self.write_bytes(&mut text);
        self.write_step(&mut text);
        self.write_rows(&mut text);
        text
    }

    fn write_bytes(&self, text: &mut String) {
        let Self { ranks_per_host, forecast, .. } = self;
        let ranks = if *ranks_per_host == 1 { "one rank" } else { &format!("{ranks_per_host} ranks") };
        let head = match forecast.hosts {
            1 => format!("one host of {ranks}"),
            hosts => format!("{hosts} hosts of {ranks}"),
        };
        _ = writeln!(text, "\n{:<24}{:>16}{:>16}{:>16}", head, "collectives", "into a host", "out of a host");
        let mut line = |name: &str, InterHostTraffic { calls, bytes_in, bytes_out, .. }| {
            let (into, out) = (binary_or_none(bytes_in), binary_or_none(bytes_out));
            _ = writeln!(text, "{name:<24}{calls:>16}{into:>16}{out:>16}");
        };
        for (kind, between) in CollectiveKind::ALL.iter().filter_map(|kind| Some((kind, forecast.between.get(kind)?))) {
            line(kind.name(), *between);
        }
        line("sum", forecast.bytes());
    }

    fn write_step(&self, text: &mut String) {
        let Forecast { wire_s, step_s, .. } = self.forecast;
        _ = writeln!(text, "\nmessages between hosts take {} of a step", seconds(wire_s));
        _ = match self.measured.as_ref().map(MeasuredStep::step_s).zip(step_s) {
            Some((one_host_s, step_s)) => writeln!(
                text,
                "a step takes {}: {} as on one host, and {} waiting for others",
                seconds(step_s),
                seconds(one_host_s),
                seconds((step_s - one_host_s).max(0.0))
            ),
            None => writeln!(
                text,
                "give --step SECONDS or --measured FILE.jsonl, measured on one host, to predict the complete step"
            ),
        };
    }

    fn write_rows(&self, text: &mut String) {
        let time = if self.measured.is_some() { "step" } else { "messages" };
        let columns = ["ranks", time, "efficiency", "into a host", "memory per rank"];
        _ = write!(text, "\n{:<8}", "hosts");
        columns.iter().for_each(|name| _ = write!(text, "{name:>18}"));
        *text += "\n";
        for ScalingRow { forecast, efficiency, rank_bytes, .. } in &self.rows {
            let efficiency = efficiency.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
            let time = seconds(forecast.step_s.unwrap_or(forecast.wire_s));
            let into = binary_or_none(forecast.bytes().bytes_in);
            let memory = format_bytes(*rank_bytes as u64);
            _ = write!(text, "{:<8}", forecast.hosts);
            let cells = [forecast.ranks.to_string(), time, efficiency, into, memory];
            cells.iter().for_each(|cell| _ = write!(text, "{cell:>18}"));
            *text += "\n";
        }
    }
}

/// Formats a time in the most readable unit.
fn seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".into(),
        s if s < 0.999_95e-3 => format!("{:.1} us", s * 1e6),
        s if s < 0.999_95 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// Formats bytes with a decimal unit, as is usual for networks.
fn decimal(bytes: f64) -> String {
    match bytes {
        b if b < 1e3 => format!("{b:.1} B"),
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.2} GB", b / 1e9),
    }
}

fn binary_or_none(bytes: u64) -> String {
    if bytes == 0 { "-".into() } else { format_bytes(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let texts = [0.0, 12.34e-6, 0.999_9e-3, 0.999_96e-3, 0.25, 0.999_96, 75.0].map(seconds);
        assert_eq!(texts, ["0 s", "12.3 us", "999.9 us", "1.0 ms", "250.0 ms", "1.00 s", "75.00 s"]);
        assert_eq!([12.0, 1.5e3, 119.55e6, 2.989e9].map(decimal), ["12.0 B", "1.5 kB", "119.5 MB", "2.99 GB"]);
    }
}
