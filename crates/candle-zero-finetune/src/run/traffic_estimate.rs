//! Describes how many bytes a step moves between hosts or islands, with the chosen memory settings and with the
//! alternatives.

use super::memory_fit::{MemoryFit, MemoryFitInput};
use crate::error::Result;
use candle_zero::comm::CollectiveKind;
use candle_zero::config::LocalStepsConfig;
use candle_zero::estimate::{Estimate, EstimateOptions};
use candle_zero::util::{counted, format_bytes};
use serde_json::json;

/// The hosts of a job, and the network between them.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostNetwork {
    pub hosts: usize,
    /// The bytes per second that a host receives from the others, if this rate is known.
    pub rate: Option<f64>,
}

impl HostNetwork {
    /// Returns a number of bytes, with the time that they take if the rate is known.
    fn with_time(self, bytes: u64) -> String {
        match self.rate {
            Some(rate) => {
                let seconds = bytes as f64 / rate;
                let time = if seconds < 0.1 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") };
                format!("{} ({time} at the measured {}/s)", format_bytes(bytes), format_bytes(rate as u64))
            }
            None => format_bytes(bytes),
        }
    }

    /// Returns a description of how much a step of a pipeline moves between hosts.
    pub fn describe_pipeline_traffic(self, bytes: u64) -> String {
        format!(
            ". In each step, each of the {} hosts receives only activations and their gradients, at most {}",
            self.hosts,
            self.with_time(bytes)
        )
    }
}

impl MemoryFitInput<'_> {
    /// Returns a description of how much an island receives with this choice and, if there are several hosts and no
    /// island server, of how much a host would receive without local steps.
    pub(super) fn between_islands(&self, local_steps: &LocalStepsConfig, choice: &MemoryFit) -> Result<String> {
        let (network, steps) = (self.host_network(), local_steps.steps);
        let exchange_bytes = local_steps.change_bytes(self.shapes.num_trained() as u64).unwrap_or(u64::MAX) as f64;
        let interval = if steps == 1 { "step".to_owned() } else { format!("{steps} steps") };
        if local_steps.server.is_some() {
            // The server adds the changes, and returns their mean.
            let bytes = (exchange_bytes / steps as f64) as u64;
            return Ok(format!(
                ". This island trains independently, and every {interval} it exchanges the changes in its weights with \
                 the others through the server; in a step, it receives {} on average",
                format_bytes(bytes)
            ));
        }
        // The islands divide the sum of the changes among themselves, and then gather it.
        let remote_share = 1.0 - 1.0 / self.islands as f64;
        let bytes = (2.0 * remote_share * exchange_bytes / steps as f64) as u64;
        let mut text = format!(
            ". The {} of {} train independently, and every {interval} they exchange the changes in their weights; in a \
             step, an island receives {} on average",
            counted(self.islands, "island"),
            counted(self.island_ranks(), "rank"),
            network.with_time(bytes)
        );
        if network.hosts > 1 {
            let mut config = self.config.clone();
            config.as_object_mut().map(|config| config.remove("local_steps"));
            let plain = MemoryFitInput { config: &config, islands: 1, ..*self };
            let [gathers, sums] = plain.bytes_into_host(0, choice.micro_batch, choice.recompute)?;
            text += &format!("; without local steps, a host would receive {}", network.with_time(gathers + sums));
        }
        Ok(text)
    }

    /// Returns the bytes that a host receives in the gathers and in the sums of a step if all ranks form one group.
    fn bytes_into_host(&self, stage: u8, micro_batch: usize, recompute: bool) -> Result<[u64; 2]> {
        let hosts = self.ranks / self.ranks_per_host;
        let config = self.load(&json!({ "stage": stage }), Some(micro_batch), recompute)?;
        let options = EstimateOptions { recompute, ..EstimateOptions::default() };
        let step = Estimate::with(self.shapes, &config, options)?.step;
        // A rank receives everything but its own part; a host, everything but the parts of its ranks.
        let into_host =
            |bytes: u64| bytes as f64 * self.ranks as f64 / (self.ranks as f64 - 1.0) * (1.0 - 1.0 / hosts as f64);
        let gathers = step.kind(CollectiveKind::AllGather).wire_bytes;
        let sums =
            step.kind(CollectiveKind::ReduceScatter).wire_bytes + step.kind(CollectiveKind::AllReduce).wire_bytes;
        Ok([gathers, sums].map(|bytes| into_host(bytes) as u64))
    }

    /// Returns a description of how much a step moves between hosts with this choice, and with the alternatives.
    pub(super) fn between_hosts(&self, choice: &MemoryFit) -> Result<String> {
        let network = self.host_network();
        let (hosts, with_time) = (network.hosts, |bytes: u64| network.with_time(bytes));
        let over_all = |stage: u8| self.bytes_into_host(stage, choice.micro_batch, choice.recompute);
        let [gathers, sums] = over_all(choice.stage)?;
        let mut text = match (choice.stage, choice.within_hosts) {
            (3, true) => format!(
                ". Each of the {hosts} hosts holds all shards (mics_shard_size), so in each step, a host receives only \
                 gradients, {}; with shards spread over all hosts, it would receive {}",
                with_time(sums),
                with_time(gathers + sums)
            ),
            (3, false) => format!(
                ". Shards are divided among all {hosts} hosts, because a host cannot hold all of them; in each step, a host \
                 receives {}",
                with_time(gathers + sums)
            ),
            _ => {
                let [shard_gathers, shard_sums] = over_all(3)?;
                format!(
                    ". Every rank holds all parameters, so in each step, each of the {hosts} hosts receives only gradients and \
                     updated weights, {}; with shards spread over all hosts (stage 3), it would receive {}",
                    with_time(gathers + sums),
                    with_time(shard_gathers + shard_sums)
                )
            }
        };
        if let Some(bytes) = self.pipeline {
            text += &format!("; in a pipeline (--pipeline), {}", with_time(bytes));
        }
        Ok(text)
    }

    pub(super) fn host_network(&self) -> HostNetwork {
        HostNetwork { hosts: self.ranks / self.ranks_per_host, rate: self.network }
    }

    /// Returns a description of how much a step would move between hosts without a pipeline.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub(super) fn without_pipeline(&self) -> Result<String> {
        let (network, sizes) = (self.host_network(), self.micro_batches()?);
        let micro_batch = sizes.last().copied().unwrap_or(1);
        let [gathers, sums] = self.bytes_into_host(3, micro_batch, self.recompute.unwrap_or(false))?;
        Ok(format!(
            "; with shards spread over all hosts (stage 3), it would receive {}, and if each host held all shards \
             (mics_shard_size), {}",
            network.with_time(gathers + sums),
            network.with_time(sums)
        ))
    }
}
