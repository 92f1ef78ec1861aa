//! Writes events as JSON lines.

use super::{MetricsWriter, Monitor, MonitorEvent};
use crate::Result;
use serde_json::json;
use std::path::Path;

/// A monitor that appends one line such as `{"step": 64, "tag": "Train/Samples/lr", "value": 0.001}` per event.
#[derive(Debug)]
pub struct JsonLines(MetricsWriter);

impl JsonLines {
    /// Opens the file to append to it, or creates it.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn append(path: impl AsRef<Path>) -> Result<Self> {
        MetricsWriter::append(path).map(Self)
    }
}

impl Monitor for JsonLines {
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
        events.iter().try_for_each(|MonitorEvent { tag, value, step }| {
            self.0.write(&json!({"step": step, "tag": tag, "value": value}))
        })
    }
}
