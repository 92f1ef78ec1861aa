//! Output of a training engine on rank 0: printed lines, and events for monitors.

use super::Engine;
use super::step_clock::WaitSeconds;
use crate::Result;
use crate::comm::CommSummary;
use crate::config::Precision;
use crate::files::{AtomicFile, check_replaceable};
use crate::monitor::{MonitorEvent, rss_bytes, rss_peak_bytes};
use crate::notice::{emit, warn};
use crate::optim::Momentum;
use crate::profiler::{FlopsProfile, peak_flops, spans};
use crate::util::counted;
use std::io::Write as _;

impl<M> Engine<M> {
    /// Writes custom values to the monitors, like DeepSpeed's `monitor.write_events`, and to the record of the run, if
    /// there is one. Does nothing on ranks other than 0. The engine's own events use
    /// [`global_samples`](Self::global_samples) as their step.
    ///
    /// ```
    /// # use candle_zero::Engine;
    /// # use candle_zero::monitor::{MonitorEvent, JsonLines};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("values.jsonl");
    /// # let config = r#"{"train_batch_size": 1}"#;
    /// let builder = Engine::builder().monitor({
    ///     let path = path.clone();
    ///     move || JsonLines::append(path)
    /// });
    /// let mut engine = builder.initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
    /// let samples = engine.global_samples();
    /// engine.write_events(&[MonitorEvent::new("Validation/loss", 0.25, samples)]);
    /// assert_eq!(std::fs::read_to_string(path)?, "{\"step\":0,\"tag\":\"Validation/loss\",\"value\":0.25}\n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_events(&mut self, events: &[MonitorEvent]) {
        self.reporter.monitors.write(events);
        self.record_values(events.iter().map(|event| (event.tag.clone(), event.value)));
    }

    /// Returns this rank's collectives so far by kind and size, if `comms_logger` is enabled, like DeepSpeed's
    /// `log_summary`. When the engine is dropped, rank 0 prints its summary.
    pub fn comm_summary(&self) -> Option<CommSummary> {
        self.reporter.comm_log.as_ref().map(|log| log.summary())
    }

    /// Returns the operations and times of the step that `flops_profiler` selects: on rank 0, once that step has ended.
    pub fn flops_profile(&self) -> Option<&FlopsProfile> {
        self.reporter.profile.as_ref()
    }

    /// Finishes the profile after the profiled step. Collective in that step: rank 0 measures the machine while the
    /// others wait.
    fn end_profile(&mut self) -> Result<()> {
        let Some(profiler) = self.config.monitoring.flops_profiler.as_ref() else { return Ok(()) };
        if profiler.profile_step.checked_add(1) != Some(self.global_steps) {
            return Ok(());
        }
        if self.job().rank() == 0 {
            let run = (self.global_steps, self.config.batch.train_batch_size, self.world_size());
            let peak = peak_flops(self.dtype());
            let profile = FlopsProfile::new(self.core.units(), &spans::take(), run, self.clock.last, peak);
            let text = profile.text(profiler);
            match &profiler.output_file {
                None => emit(&text),
                Some(path) => {
                    let write = || {
                        check_replaceable(path, FlopsProfile::REPORT_PREFIX, "profile")?;
                        let mut file = AtomicFile::create_for(path)?;
                        file.file().write_all(format!("{text}\n").as_bytes())?;
                        file.finish()
                    };
                    if let Err(error) = write() {
                        warn(&format!(
                            "flops_profiler: cannot write {}: {error}; here is the profile\n{text}",
                            path.display()
                        ));
                    }
                }
            }
            self.reporter.profile = Some(profile);
        }
        self.core.comm().barrier().wait()
    }

    /// Prints the final reports when the engine is dropped.
    pub(super) fn report_at_end(&self) {
        if let (0, Some(summary)) = (self.job().rank(), self.comm_summary()) {
            emit(&format!("collectives of rank 0\n{summary}"));
        }
    }

    /// Reports a finished optimizer step. Collective in the step that `flops_profiler` selects, and in steps that end
    /// with a report of all ranks.
    pub(super) fn report_step(&mut self) -> Result<()> {
        let waited = WaitSeconds { collectives: self.comm_report().waited_s, files: self.offload_report().waited_s };
        self.clock.boundary(waited);
        self.report_order();
        self.report_progress();
        self.report_ranks()?;
        self.end_profile()
    }

    /// Reports changes in the order of units, for `log_trace_cache_warnings`.
    fn report_order(&mut self) {
        let changes = self.core.order_changes();
        let new = changes - std::mem::replace(&mut self.reporter.order_changes, changes);
        if new > 0 && self.config.zero.log_trace_cache_warnings && self.job().rank() == 0 {
            warn(&format!(
                "step {}: units were used in a different order than before in {}, so the next units could not be \
                 gathered in advance",
                self.global_steps,
                counted(new, "micro step")
            ));
        }
    }

    fn report_progress(&mut self) {
        let speed = self.reporter.throughput.boundary(self.config.batch.train_batch_size);
        if self.job().rank() != 0 {
            return;
        }
        let interval = self.config.steps_per_print;
        if interval.is_none_or(|n| self.global_steps.is_multiple_of(n)) {
            if interval.is_some() {
                emit(&self.progress_line());
            }
            if let (Some(speed), Some(_), true) = (speed, interval, self.config.monitoring.throughput) {
                let (micro, global) = (self.micro_steps + 1, self.global_steps);
                let [current, peak] = [rss_bytes(), rss_peak_bytes()].map(gigabytes);
                emit(&format!(
                    "micro_step={micro}/global_step={global}, RunningAvgSamplesPerSec={}, CurrSamplesPerSec={}, \
                     MemAllocated={current}GB, MaxMemAllocated={peak}GB",
                    speed.average, speed.current
                ));
            }
            if self.config.wall_clock_breakdown {
                emit(&self.time_line());
            }
        }
        if !self.reporter.monitors.is_empty() {
            let events = self.events();
            self.reporter.monitors.write(&events);
        }
        self.record_step();
    }

    /// Returns the line that is printed for `steps_per_print`. As in DeepSpeed, the learning rate and momentum are
    /// those of the next step.
    fn progress_line(&self) -> String {
        let momentum = |momentum: &Momentum| match momentum {
            Momentum::Betas(a, b) => format!("[{a:?}, {b:?}]"),
            Momentum::Factor(factor) => format!("{factor:?}"),
        };
        let mom: Vec<String> = self.momentum().iter().map(momentum).collect();
        let (step, skipped, lr) = (self.global_steps, self.skipped_steps, self.lr());
        format!("step={step}, skipped={skipped}, lr={lr:?}, mom=[{}]", mom.join(", "))
    }

    /// Returns the line that is printed for `wall_clock_breakdown`.
    fn time_line(&self) -> String {
        let t = self.clock.last;
        let (f, b, s, c) = (t.forward_ms, t.backward_ms, t.step_ms, t.comm_ms);
        let files =
            if self.core.offload_report().is_some() { format!(", for files {:.2}", t.disk_ms) } else { String::new() };
        format!("time (ms) | forward {f:.2} | backward {b:.2} | step {s:.2} | of which waiting {c:.2}{files}")
    }

    /// Returns the optimizer step's events under DeepSpeed's tags.
    fn events(&self) -> Vec<MonitorEvent> {
        let mut values = vec![("train_loss", self.reporter.loss), ("lr", self.lr()[0])];
        if let Precision::Fp16(_) = self.config.precision {
            values.push(("loss_scale", self.loss_scale()));
        }
        values.extend(self.grad_norm.map(|norm| ("grad_norm", norm)));
        if self.config.wall_clock_breakdown {
            let t = self.clock.last;
            let reduce_ms = self.clock.last_backward_wait_ms;
            values.extend([
                ("elapsed_time_ms_forward", t.forward_ms),
                ("elapsed_time_ms_backward", t.backward_ms),
                ("elapsed_time_ms_backward_inner", t.backward_ms - reduce_ms),
                ("elapsed_time_ms_backward_allreduce", reduce_ms),
                ("elapsed_time_ms_step", t.step_ms),
            ]);
        }
        let event = |(name, value)| MonitorEvent::new(format!("Train/Samples/{name}"), value, self.global_samples);
        values.into_iter().map(event).collect()
    }

    /// Adds a micro step's time to the throughput.
    pub(super) fn end_micro_step(&mut self) {
        if let Some(start) = self.reporter.micro_step.take() {
            self.reporter.throughput.add(start.elapsed());
        }
    }

    /// Reports memory for `memory_breakdown`, at the interval of `steps_per_print`; `step` is the number of this
    /// optimizer step, counted from 1.
    pub(super) fn report_memory(&self, point: &str, step: u64) {
        let interval = self.config.steps_per_print;
        let is_due = interval.is_none_or(|n| step.is_multiple_of(n));
        if !self.config.monitoring.memory_breakdown || self.job().rank() != 0 || !is_due {
            return;
        }
        let mib = |bytes: usize| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
        let report = self.memory_report();
        let rows = report.rows.iter().filter(|row| row.bytes.held > 0);
        let rows: Vec<String> = rows.map(|row| format!("{} {}", row.kind.name(), mib(row.bytes.held))).collect();
        let [current, peak] = [rss_bytes(), rss_peak_bytes()].map(|bytes| mib(bytes.unwrap_or_default() as usize));
        emit(&format!("memory (MiB) {point} | {} | resident {current}, at most {peak}", rows.join(" | ")));
    }

    /// Prints the configuration and parameters for `dump_state`.
    pub(super) fn dump_state(&self) {
        if !self.config.monitoring.dump_state || self.job().rank() != 0 {
            return;
        }
        let config = &self.config.to_deepspeed_json();
        let config = serde_json::to_string_pretty(config).expect("a tree of values is JSON");
        let (units, params) = (counted(self.core.units().len() - 1, "unit"), self.core.params().len());
        emit(&format!(
            "configuration: {config}\nranks: {}\ndevice: {:?}\ndtype: {:?}\nparameters: {params}, in {units} or outside \
             units\noptimizer: {:?}\nloss scale: {:?}\nmemory: {}",
            self.world_size(),
            self.device,
            self.dtype(),
            self.trainer,
            self.loss_scale(),
            self.memory_report()
        ));
    }
}

fn gigabytes(bytes: Option<u64>) -> String {
    bytes.map_or("?".into(), |bytes| format!("{:.2}", bytes as f64 / f64::from(1 << 30)))
}
