//! The second half of a collective: its result, for which a rank waits when it needs the value.

use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A collective in progress. Dropping it does not stop the collective: the other ranks depend on it.
#[must_use = "the result of a collective must be awaited"]
pub struct Pending<T>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    Launched {
        wait: Box<dyn FnOnce() -> Result<T> + Send>,
        /// Whether the result is available, if this is known without waiting.
        is_available: Option<Arc<AtomicBool>>,
    },
}

impl<T> Pending<T> {
    /// Returns a result that is already available.
    pub fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    /// Returns a result for which `wait` waits: the second half of a collective that has been launched. `wait` runs in
    /// [`Pending::wait`](Self::wait), on the thread that needs the result, or never.
    ///
    /// ```
    /// use candle_zero::comm::Pending;
    ///
    /// let (sender, receiver) = std::sync::mpsc::channel();
    /// std::thread::spawn(move || sender.send(7));
    /// let pending = Pending::from_fn(move || Ok(receiver.recv().unwrap_or_default()));
    /// assert_eq!(pending.wait()?, 7);
    /// # Ok::<(), candle_zero::Error>(())
    /// ```
    pub fn from_fn(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self(PendingState::Launched { wait: Box::new(wait), is_available: None })
    }

    /// Returns a result for which `wait` waits. Once `is_available` is true, `wait` returns soon.
    pub(super) fn observed(is_available: Arc<AtomicBool>, wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self(PendingState::Launched { wait: Box::new(wait), is_available: Some(is_available) })
    }

    /// Returns whether the result is known to be available. If not, it may be available nevertheless.
    pub(crate) fn is_available(&self) -> bool {
        match &self.0 {
            PendingState::Ready(_) => true,
            PendingState::Launched { is_available, .. } => {
                is_available.as_ref().is_some_and(|is_available| is_available.load(Ordering::Acquire))
            }
        }
    }

    /// Applies `change` to the result once it is available.
    pub fn map<U>(self, change: impl FnOnce(T) -> U + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        match self.0 {
            PendingState::Ready(value) => Pending::ready(change(value)),
            PendingState::Launched { wait, is_available } => {
                Pending(PendingState::Launched { wait: Box::new(move || wait().map(change)), is_available })
            }
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Fails with a [`CommError`](crate::error::CommError) if a peer died, gave up, left, fell silent or diverged, or
    /// the time limit was exceeded.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            PendingState::Ready(value) => Ok(value),
            PendingState::Launched { wait, .. } => wait(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_available_once_its_flag_says_so_and_one_without_a_flag_is_not_known_to_be() {
        assert!(Pending::ready(1).map(|value| value + 1).is_available());
        assert!(!Pending::from_fn(|| Ok(1)).is_available());
        let flag = Arc::new(AtomicBool::new(false));
        let pending = Pending::observed(flag.clone(), || Ok(1)).map(|value| value + 1);
        assert!(!pending.is_available());
        flag.store(true, Ordering::Release);
        assert!(pending.is_available());
        assert!(matches!(pending.wait(), Ok(2)));
    }
}
