//! The monitor trait and its events.

use crate::Result;

/// A value of a scalar that is tracked over a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MonitorEvent {
    /// The name of the scalar, such as `Train/Samples/lr`.
    pub tag: String,
    /// The value.
    pub value: f64,
    /// The position on the x axis. The engine's own events use the number of samples of all ranks so far.
    pub step: u64,
}

impl MonitorEvent {
    /// Creates an event with a value of `tag` at `step`.
    pub fn new(tag: impl Into<String>, value: f64, step: u64) -> Self {
        Self { tag: tag.into(), value, step }
    }
}

/// A destination of events: files, a port, or a custom implementation.
///
/// The constructor of a monitor should open the files or ports that it writes to, so that a folder that is not writable
/// causes an error before the first step. A monitor that fails later is dropped with one message, and training
/// continues.
pub trait Monitor: Send {
    /// Writes events, in the order in which they happened. They must be visible outside the process when this
    /// method returns, because the process may be killed at any time.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), or another error that names what cannot be written.
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()>;
}
