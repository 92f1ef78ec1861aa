//! The trait of a monitor, and its events.

use crate::Result;

/// One value of a scalar that is followed over a run.
#[derive(Debug, Clone, PartialEq)]
pub struct MonitorEvent {
    /// Its name, such as `Train/Samples/lr`.
    pub tag: String,
    /// Its value.
    pub value: f64,
    /// Where on the x axis; the engine's own events have the samples of all ranks so far.
    pub step: u64,
}

impl MonitorEvent {
    /// A value of `tag` at `step`.
    pub fn new(tag: impl Into<String>, value: f64, step: u64) -> Self {
        Self { tag: tag.into(), value, step }
    }
}

/// Where events go: files, a port, or something of your own.
///
/// Whatever makes a monitor opens what it writes to, so that a folder that cannot be written is an error before the
/// first step. A monitor that fails later is dropped with one message, and training continues.
pub trait Monitor: Send {
    /// Takes events, in the order in which they happened. What was taken must be visible outside of the process when
    /// this returns: the process may be killed at any time.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), or another error that says what cannot be written.
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()>;
}
