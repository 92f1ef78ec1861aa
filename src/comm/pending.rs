//! The second half of a collective: its result, for which a rank waits when it needs the value.

use crate::error::Result;

/// A collective in progress. Dropping it does not stop the collective: the other ranks depend on it.
#[must_use = "the result of a collective must be awaited"]
pub struct Pending<T>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    Launched(Box<dyn FnOnce() -> Result<T> + Send>),
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
        Self(PendingState::Launched(Box::new(wait)))
    }

    /// Applies `change` to the result once it is available.
    pub fn map<U>(self, change: impl FnOnce(T) -> U + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        match self.0 {
            PendingState::Ready(value) => Pending::ready(change(value)),
            PendingState::Launched(wait) => Pending::from_fn(move || wait().map(change)),
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`CommError`](crate::error::CommError): a peer died, gave up, left, fell silent or diverged, or the time limit
    /// was exceeded.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            PendingState::Ready(value) => Ok(value),
            PendingState::Launched(wait) => wait(),
        }
    }
}
