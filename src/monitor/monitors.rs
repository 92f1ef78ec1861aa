//! The monitors of a run, all of which receive the same events.

use super::{CsvMonitor, Monitor, MonitorEvent, Prometheus, TensorBoard};
use crate::Result;
use crate::config::Monitoring;
use crate::notice::{emit, warn};

/// A function that creates a monitor, on the rank that writes.
pub(crate) type MonitorOpener = Box<dyn FnOnce() -> Result<Box<dyn Monitor>> + Send>;

/// The monitors of rank 0; other ranks have none.
#[derive(Default)]
pub(crate) struct Monitors(Vec<Box<dyn Monitor>>);

impl Monitors {
    /// Opens the monitors requested by the configuration, the environment and the engine's builder.
    pub fn open(config: &Monitoring, more: Vec<MonitorOpener>) -> Result<Self> {
        let mut all: Vec<Box<dyn Monitor>> = Vec::new();
        if let Some(tensorboard) = &config.tensorboard {
            all.push(Box::new(TensorBoard::create(tensorboard.folder())?));
        }
        if let Some(csv) = &config.csv_monitor {
            all.push(Box::new(CsvMonitor::create(csv.folder())?));
        }
        match Prometheus::asked_for()? {
            // The port was given to the process, not to one of its engines.
            Some(port) if Prometheus::is_listening() && port != 0 => {
                emit("another engine of this process serves metrics for Prometheus; this engine's are not included");
            }
            Some(port) => all.push(Box::new(Prometheus::listen(port)?)),
            None => {}
        }
        for open in more {
            all.push(open()?);
        }
        Ok(Self(all))
    }

    /// Returns whether there are no monitors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes to all monitors. A monitor that fails is dropped.
    pub fn write(&mut self, events: &[MonitorEvent]) {
        self.0.retain_mut(|monitor| match monitor.write(events) {
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

    struct Told(Sender<usize>);

    impl Monitor for Told {
        fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
            self.0.send(events.len()).unwrap();
            Ok(())
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_monitor_that_fails_is_dropped_and_the_others_go_on() {
        let (sender, told) = channel();
        let full: MonitorOpener = Box::new(|| Ok(Box::new(JsonLines::append("/dev/full")?)));
        let own: MonitorOpener = Box::new(|| Ok(Box::new(Told(sender))));
        let mut monitors = Monitors::open(&Monitoring::default(), vec![full, own]).unwrap();
        for left in [2, 1, 1] {
            assert_eq!(monitors.0.len(), left);
            monitors.write(&[MonitorEvent::new("x", 1.0, 1)]);
        }
        assert_eq!(told.try_iter().sum::<usize>(), 3);
    }
}
