//! Predicts the time of a step on several hosts: the time on one host plus the time that the network between hosts
//! adds.
//!
//! The trace of a step is simulated; see `step_trace.rs`. Computation takes the measured time, and collectives take the
//! time that their messages between hosts need on the network. The time of collectives within a host is part of the
//! measured time.

use super::network::{Network, TransferTime};
use super::step_trace::{SimulatedStep, StepTrace};
use super::{Estimate, EstimateOptions, MeasuredStep, Shapes};
use crate::comm::{CollectiveKind, UniformHosts};
use crate::config::{BatchConfig, Config};
use crate::error::{EstimateError, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// The number of ranks up to which [`Estimate::weak_scaling`] doubles the number of hosts.
const MAX_RANKS: usize = 1024;

/// The collectives of one kind in a step, and the bytes they send between hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct InterHostTraffic {
    /// The number of collectives.
    pub calls: u64,
    /// The bytes received by the host that receives the most.
    pub bytes_in: u64,
    /// The bytes sent by the host that sends the most.
    pub bytes_out: u64,
}

/// A step on several hosts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Forecast {
    /// The number of hosts.
    pub hosts: usize,
    /// The number of ranks on all hosts.
    pub ranks: usize,
    /// The traffic between hosts by kind of collective; kinds that do not occur are missing.
    pub between: BTreeMap<CollectiveKind, InterHostTraffic>,
    /// The seconds that messages between hosts take if nothing is computed at the same time.
    pub wire_s: f64,
    /// The seconds of a step, if the time on one host is known.
    pub step_s: Option<f64>,
}

impl Forecast {
    /// Returns the bytes between hosts, summed over all kinds.
    pub fn bytes(&self) -> InterHostTraffic {
        let add = |a: InterHostTraffic, b: &InterHostTraffic| InterHostTraffic {
            calls: a.calls.saturating_add(b.calls),
            bytes_in: a.bytes_in.saturating_add(b.bytes_in),
            bytes_out: a.bytes_out.saturating_add(b.bytes_out),
        };
        self.between.values().fold(InterHostTraffic::default(), add)
    }
}

/// A row of a weak scaling table.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ScalingRow {
    /// The forecast of a step.
    #[serde(flatten)]
    pub forecast: Forecast,
    /// The time of a step on one host divided by the time of this step: 1 if additional hosts cost no time.
    pub efficiency: Option<f64>,
    /// The maximum model state of a rank in memory, as in [`Estimate::host_bytes`] and [`Estimate::device_bytes`].
    pub rank_bytes: usize,
}

impl Estimate {
    /// Predicts a step on `hosts` hosts with the same number of ranks each, given that a step on a single host with
    /// that many ranks takes as long as `measured`.
    ///
    /// # Errors
    /// [`EstimateError::Hosts`] if the ranks cannot be divided evenly.
    pub fn forecast(&self, hosts: usize, network: &Network, measured: Option<&MeasuredStep>) -> Result<Forecast> {
        let ranks = self.memory.world_size;
        if hosts == 0 || !ranks.is_multiple_of(hosts) {
            return Err(EstimateError::Hosts { ranks, hosts }.into());
        }
        let uniform_hosts = UniformHosts::new(hosts, ranks / hosts);
        let mut between = BTreeMap::<CollectiveKind, InterHostTraffic>::new();
        for (c, times) in self.step_trace.collectives() {
            let entry = between.entry(c.kind).or_default();
            // The number of micro steps is not bounded, so the sums saturate.
            let add = |sum: &mut u64, amount: usize| *sum = sum.saturating_add((amount as u64).saturating_mul(times));
            add(&mut entry.calls, 1);
            for transfer in uniform_hosts.transfers(c.kind, c.wire, c.dtype, c.elements) {
                add(&mut entry.bytes_in, transfer.bytes_in);
                add(&mut entry.bytes_out, transfer.bytes_out);
            }
        }
        let SimulatedStep { step, wire } = simulate(&self.step_trace, &uniform_hosts, network, measured);
        Ok(Forecast { hosts, ranks, between, wire_s: wire, step_s: measured.map(|_| step) })
    }

    /// Predicts steps on 1, 2, 4 ... hosts, up to 1,024 ranks, and on `hosts` hosts, with `ranks_per_host` ranks per
    /// host. Each rank keeps the batch size that it has in `config`.
    ///
    /// # Errors
    /// The errors of [`Estimate::with`].
    pub fn weak_scaling(
        shapes: &Shapes,
        config: &Config,
        options: EstimateOptions,
        (hosts, ranks_per_host): (usize, usize),
        network: &Network,
        measured: Option<&MeasuredStep>,
    ) -> Result<Vec<ScalingRow>> {
        let doubled = std::iter::successors(Some(1usize), |hosts| hosts.checked_mul(2));
        let mut counts: Vec<usize> =
            doubled.take_while(|hosts| *hosts == 1 || hosts.saturating_mul(ranks_per_host) <= MAX_RANKS).collect();
        counts.push(hosts);
        counts.sort_unstable();
        counts.dedup();
        let row = |hosts: usize| {
            let options = EstimateOptions { hosts, ..options };
            let estimate = Self::with(shapes, &with_ranks(config, hosts.saturating_mul(ranks_per_host)), options)?;
            let forecast = estimate.forecast(hosts, network, measured)?;
            let efficiency = measured.zip(forecast.step_s).map(|(single, step_s)| (single.step_s() / step_s).min(1.0));
            let rank_bytes = estimate.host_bytes().saturating_add(estimate.device_bytes());
            Ok(ScalingRow { forecast, efficiency, rank_bytes })
        };
        counts.into_iter().map(row).collect()
    }
}

/// Returns the configuration for a different number of ranks with the same number of samples per rank.
fn with_ranks(config: &Config, ranks: usize) -> Config {
    let rank_samples =
        config.batch.train_micro_batch_size_per_gpu.saturating_mul(config.batch.gradient_accumulation_steps);
    let batch = BatchConfig { train_batch_size: rank_samples.saturating_mul(ranks), ..config.batch };
    Config { world_size: ranks, batch, ..config.clone() }
}

/// Simulates a step. If the computing time is unknown, computation takes no time.
fn simulate(
    step_trace: &StepTrace,
    hosts: &UniformHosts,
    network: &Network,
    measured: Option<&MeasuredStep>,
) -> SimulatedStep {
    let travel_time = |c: &super::step_trace::CollectiveCall| {
        let times =
            hosts.transfers(c.kind, c.wire, c.dtype, c.elements).into_iter().map(|transfer| network.travel(&transfer));
        times
            .reduce(|a, b| TransferTime { seconds: a.seconds + b.seconds, processors: a.processors + b.processors })
            .unwrap_or_default()
    };
    match measured {
        None => step_trace.simulate(|_, _| 0.0, travel_time),
        Some(measured) => {
            let (seconds, rest) = measured.spread(step_trace.work());
            let SimulatedStep { step, wire } = step_trace.simulate(seconds, travel_time);
            SimulatedStep { step: step + rest, wire }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(ranks: usize, zero: serde_json::Value, accumulation: usize) -> Config {
        let config = json!({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW"}, "zero_optimization": zero,
        });
        Config::load(config.to_string().as_str(), ranks).unwrap()
    }

    fn estimate(ranks: usize, zero: serde_json::Value) -> Estimate {
        Estimate::new(&Shapes::preset("nano").unwrap(), &config(ranks, zero, 1)).unwrap()
    }

    fn step(estimate: &Estimate, hosts: usize, network: &str, seconds: f64) -> f64 {
        let measured = MeasuredStep::seconds(seconds).unwrap();
        estimate.forecast(hosts, &network.parse().unwrap(), Some(&measured)).unwrap().step_s.unwrap()
    }

    fn settings() -> impl Iterator<Item = serde_json::Value> {
        let stages =
            (0..4).flat_map(|stage| [true, false].map(|overlap| json!({"stage": stage, "overlap_comm": overlap})));
        stages.chain([
            json!({"stage": 2, "zero_quantized_gradients": true, "reduce_bucket_size": 1000}),
            json!({"stage": 3, "zero_quantized_weights": true, "stage3_param_persistence_threshold": 0}),
        ])
    }

    #[test]
    fn where_the_wire_costs_nothing_the_step_is_that_of_one_host() {
        for zero in settings() {
            let all = estimate(4, zero.clone());
            // At this rate, the bytes take less time than the tolerance.
            for (hosts, network) in [(1, "1bit,9s"), (2, "999999999999999GB/s,0us"), (4, "999999999999999GB/s,0us")] {
                let found = step(&all, hosts, network, 0.5);
                assert!((found - 0.5).abs() < 1e-9, "{zero} {hosts}: {found}");
            }
        }
    }

    #[test]
    fn a_step_lies_between_the_longer_of_both_threads_and_their_sum() {
        for zero in settings() {
            let all = estimate(4, zero.clone());
            let network: Network = "1Gbit,1ms".parse().unwrap();
            let wire = all.forecast(2, &network, None).unwrap();
            assert_eq!(wire.step_s, None);
            let found = step(&all, 2, "1Gbit,1ms", 0.3);
            assert!(wire.wire_s > 0.01 && found >= wire.wire_s.max(0.3) && found <= wire.wire_s + 0.3 + 1e-9, "{zero}");
            let overlaps = config(4, zero.clone(), 1).zero.overlap_comm;
            let is_sum = (found - wire.wire_s - 0.3).abs() < 1e-9;
            // At stage 1, gradients are kept until the backward pass has ended.
            assert_eq!(is_sum, !overlaps || zero["stage"] == 1, "{zero}: {found} {}", wire.wire_s);
        }
    }

    #[test]
    fn a_slower_or_longer_cable_never_makes_a_step_shorter() {
        for zero in settings() {
            let all = estimate(4, zero.clone());
            let by_rate = ["100Gbit,50us", "1Gbit,50us", "100Mbit,50us"].map(|network| step(&all, 2, network, 0.2));
            let by_latency = ["1Gbit,0us", "1Gbit,1ms", "1Gbit,30ms"].map(|network| step(&all, 2, network, 0.2));
            assert!(by_rate.is_sorted() && by_latency.is_sorted(), "{zero}: {by_rate:?} {by_latency:?}");
        }
    }

    #[test]
    fn micro_steps_that_are_not_gone_through_count_too() {
        let shapes = Shapes::preset("nano").unwrap();
        let network = Network::ASSUMED;
        let forecast_with = |accumulation| {
            let estimate = Estimate::new(&shapes, &config(4, json!({"stage": 3}), accumulation)).unwrap();
            let forecast = estimate.forecast(2, &network, None).unwrap();
            let calls = |kind: &CollectiveKind| forecast.between.get(kind).map_or(0, |between| between.calls);
            CollectiveKind::ALL
                .iter()
                .for_each(|kind| assert_eq!(calls(kind), estimate.step.kind(*kind).calls, "{kind:?}"));
            forecast
        };
        let [three, four, hundred] = [3, 4, 100].map(forecast_with);
        let each = four.wire_s - three.wire_s;
        assert!((hundred.wire_s - three.wire_s - 97.0 * each).abs() < 1e-9 * hundred.wire_s);
        let bytes = |forecast: &Forecast| forecast.bytes().bytes_in;
        assert_eq!(bytes(&hundred) - bytes(&three), 97 * (bytes(&four) - bytes(&three)));
    }

    #[test]
    fn more_hosts_share_the_state_and_their_ranks_have_the_same_batch() {
        let (shapes, config) = (Shapes::preset("nano").unwrap(), config(6, json!({"stage": 3}), 1));
        let measured = MeasuredStep::seconds(1.0).unwrap();
        let table = |hosts, each| {
            let scaled = Estimate::weak_scaling(
                &shapes,
                &config,
                EstimateOptions::default(),
                (hosts, each),
                &Network::ASSUMED,
                Some(&measured),
            );
            scaled.unwrap()
        };
        let rows = table(3, 2);
        let hosts: Vec<usize> = rows.iter().map(|row| row.forecast.hosts).collect();
        assert_eq!(hosts, [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512]);
        assert_eq!(rows[10].forecast.ranks, 1024);
        assert!(rows[0].forecast.step_s.is_some_and(|step| (step - 1.0).abs() < 1e-9));
        assert!(rows[0].efficiency.is_some_and(|share| share > 1.0 - 1e-9));
        // With many ranks, shards of small parameters are mostly padding.
        assert!(rows[1..].iter().all(|row| row.rank_bytes < rows[0].rank_bytes));
        assert!(rows.iter().all(|row| row.efficiency.is_some_and(|e| e > 0.0 && e <= 1.0)));
        let alone = Estimate::new(&shapes, &with_ranks(&config, 4)).unwrap();
        assert_eq!(alone.host_bytes(), rows[1].rank_bytes);
        assert_eq!(alone.forecast(2, &Network::ASSUMED, Some(&measured)).unwrap(), rows[1].forecast);
        assert_eq!(table(1, 2000).len(), 1);
    }

    #[test]
    fn ranks_that_cannot_be_divided_are_refused() {
        let all = estimate(6, json!({"stage": 2}));
        for hosts in [0, 4, 7] {
            let error = all.forecast(hosts, &Network::ASSUMED, None).unwrap_err();
            assert!(error.to_string().contains("6 ranks cannot be divided among"), "{error}");
        }
    }
}
