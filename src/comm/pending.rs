//! The second half of a collective: its result, which is waited for where it is needed.

use crate::error::Result;

/// A collective under way. Dropping it does not stop the collective: the other ranks count on it.
#[must_use = "a collective's result is waited for"]
pub struct Pending<T>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    Launched(Box<dyn FnOnce() -> Result<T> + Send>),
}

impl<T> Pending<T> {
    /// A result that is there already.
    pub fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    /// A result that `wait` waits for: the second half of a collective that has been launched. It runs in
    /// [`wait`](Self::wait), on the thread that needs the result, or never.
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

    /// The result as `change` makes it when it is there.
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
    /// is over.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            PendingState::Ready(value) => Ok(value),
            PendingState::Launched(wait) => wait(),
        }
    }
}
