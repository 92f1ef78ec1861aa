//! The monitors of a run, all of which receive the same events.

use super::{
    CsvMonitor, Monitor, MonitorEvent, Prometheus, RunDescription, RunEnding, RunMilestone, TensorBoard, WandbMonitor,
};
use crate::Result;
use crate::config::Monitoring;
use crate::notice::{emit, warn};
use std::path::Path;

/// A function that creates a monitor, on the rank that writes.
pub(crate) type MonitorOpener = Box<dyn FnOnce() -> Result<Box<dyn Monitor>> + Send>;

/// The monitors of rank 0; other ranks have none.
#[derive(Default)]
pub(crate) struct Monitors {
    all: Vec<Box<dyn Monitor>>,
    run: MonitoredRun,
}

/// The state of the monitored run.
#[derive(Default)]
enum MonitoredRun {
    /// The run has not begun. Whether a checkpoint was loaded is known only when it begins.
    Waiting(Box<RunDescription>),
    Begun,
    /// The run has ended, or there is none.
    #[default]
    Ended,
}

impl Monitors {
    /// Opens the monitors requested by the configuration, the environment and the engine's builder.
    pub fn open(config: &Monitoring, additional: Vec<MonitorOpener>) -> Result<Self> {
        let mut all: Vec<Box<dyn Monitor>> = Vec::new();
        if let Some(tensorboard) = &config.tensorboard {
            all.push(Box::new(TensorBoard::create(tensorboard.folder())?));
        }
        if let Some(csv) = &config.csv_monitor {
            all.push(Box::new(CsvMonitor::create(csv.folder())?));
        }
        if let Some(wandb) = &config.wandb
            && let Some(monitor) = WandbMonitor::create(wandb)?
        {
            all.push(Box::new(monitor));
        }
        match Prometheus::requested_port()? {
            // The port was given to the process, not to one of its engines.
            Some(port) if Prometheus::is_listening() && port != 0 => {
                emit("another engine of this process serves metrics for Prometheus; this engine's are not included");
            }
            Some(port) => all.push(Box::new(Prometheus::listen(port)?)),
            None => {}
        }
        for open in additional {
            all.push(open()?);
        }
        Ok(Self { all, run: MonitoredRun::Ended })
    }

    /// Returns whether there are no monitors.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Describes the run that will begin.
    pub fn describe(&mut self, run: RunDescription) {
        if !self.all.is_empty() {
            self.run = MonitoredRun::Waiting(Box::new(run));
        }
    }

    /// Notes that a checkpoint was loaded.
    pub fn note_loaded(&mut self, folder: &Path, samples: u64) {
        match &mut self.run {
            MonitoredRun::Waiting(run) => (run.loaded_from, run.samples) = (Some(folder.to_owned()), samples),
            MonitoredRun::Begun => self.note(&RunMilestone::Loaded { samples }),
            MonitoredRun::Ended => {}
        }
    }

    /// Begins the run, if it has not begun.
    pub fn begin(&mut self) {
        self.run = match std::mem::take(&mut self.run) {
            MonitoredRun::Waiting(run) => {
                self.note(&RunMilestone::Begins(&run));
                MonitoredRun::Begun
            }
            other => other,
        };
    }

    /// Notes that a checkpoint is complete.
    pub fn note_saved(&mut self, folder: &Path) {
        if matches!(self.run, MonitoredRun::Begun) {
            self.note(&RunMilestone::Saved { folder });
        }
    }

    /// Ends the run, if it has begun.
    pub fn end(&mut self, ending: RunEnding) {
        if matches!(std::mem::take(&mut self.run), MonitoredRun::Begun) {
            self.note(&RunMilestone::Ends(ending));
        }
    }

    /// Writes to all monitors. A monitor that fails is dropped.
    pub fn write(&mut self, events: &[MonitorEvent]) {
        self.begin();
        self.for_each(|monitor| monitor.write(events));
    }

    fn note(&mut self, milestone: &RunMilestone<'_>) {
        self.for_each(|monitor| monitor.note(milestone));
    }

    fn for_each(&mut self, mut call: impl FnMut(&mut dyn Monitor) -> Result<()>) {
        self.all.retain_mut(|monitor| match call(&mut **monitor) {
            Ok(()) => true,
            Err(error) => {
                warn(&format!("a monitor failed, and training continues without it: {error}"));
                false
            }
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::monitor::JsonLines;
    use std::sync::mpsc::{Sender, channel};

    struct EventCounter(Sender<usize>);

    impl Monitor for EventCounter {
        fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
            self.0.send(events.len()).unwrap();
            Ok(())
        }
    }

    struct MilestoneRecorder(Sender<String>);

    impl Monitor for MilestoneRecorder {
        fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
            self.0.send(format!("{} events", events.len())).unwrap();
            Ok(())
        }

        fn note(&mut self, milestone: &RunMilestone<'_>) -> Result<()> {
            let text = match milestone {
                RunMilestone::Begins(run) => format!("{} begins after {} samples", run.name, run.samples),
                RunMilestone::Loaded { samples } => format!("loaded {samples} samples"),
                RunMilestone::Saved { folder } => format!("saved in {}", folder.display()),
                RunMilestone::Ends(ending) => ending.name().to_owned(),
            };
            self.0.send(text).unwrap();
            Ok(())
        }
    }

    #[test]
    fn milestones_come_in_order_and_the_beginning_before_all_events() {
        let (sender, noted) = channel();
        let open: MonitorOpener = Box::new(|| Ok(Box::new(MilestoneRecorder(sender))));
        let mut monitors = Monitors::open(&Monitoring::default(), vec![open]).unwrap();
        let run = RunDescription { name: "gpt".into(), ..RunDescription::default() };
        monitors.describe(run.clone());
        // A program that only evaluates has no milestones.
        monitors.note_saved(Path::new("before"));
        monitors.end(RunEnding::Finished);
        assert_eq!(noted.try_iter().count(), 0);
        monitors.describe(run);
        monitors.note_loaded(Path::new("ckpt"), 8);
        monitors.write(&[MonitorEvent::new("x", 1.0, 16)]);
        monitors.begin();
        monitors.note_saved(Path::new("ckpt"));
        monitors.note_loaded(Path::new("ckpt"), 8);
        monitors.end(RunEnding::Stopped);
        monitors.write(&[]);
        monitors.end(RunEnding::Finished);
        let noted: Vec<String> = noted.try_iter().collect();
        let expected =
            ["gpt begins after 8 samples", "1 events", "saved in ckpt", "loaded 8 samples", "stopped", "0 events"]
                .map(String::from);
        assert_eq!(noted, expected);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_monitor_that_fails_is_dropped_and_the_others_go_on() {
        let (sender, counts) = channel();
        let full: MonitorOpener = Box::new(|| Ok(Box::new(JsonLines::append("/dev/full")?)));
        let custom: MonitorOpener = Box::new(|| Ok(Box::new(EventCounter(sender))));
        let mut monitors = Monitors::open(&Monitoring::default(), vec![full, custom]).unwrap();
        for remaining in [2, 1, 1] {
            assert_eq!(monitors.all.len(), remaining);
            monitors.write(&[MonitorEvent::new("x", 1.0, 1)]);
        }
        assert_eq!(counts.try_iter().sum::<usize>(), 3);
    }
}
