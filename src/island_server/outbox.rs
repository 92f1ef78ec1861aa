//! The frames that wait to be sent on a connection, and the thread that sends them.

use super::frame::{Frame, FrameKind};
use crate::util::lock;
use std::collections::VecDeque;
use std::io::BufWriter;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The number of waiting bytes above which a relay waits until its receiver has caught up.
const RELAY_BYTES: usize = 32 << 20;

/// The frames that wait to be sent on a connection.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<OutboxState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct OutboxState {
    frames: VecDeque<Frame>,
    bytes: usize,
    /// Whether further frames are dropped. Waiting frames are still sent.
    closed: bool,
    /// Whether the connection is broken, so that no frame is sent.
    broken: bool,
}

impl Outbox {
    /// Adds a frame.
    pub fn push(&self, frame: Frame) {
        let mut state = lock(&self.state);
        if !state.closed && !state.broken {
            state.bytes += frame.len();
            state.frames.push_back(frame);
            self.changed.notify_all();
        }
    }

    /// Waits until there is room for a frame, and adds it. Memory is therefore bounded even if the sender is faster
    /// than the receiver.
    pub fn push_when_there_is_room(&self, frame: Frame) {
        let mut state = lock(&self.state);
        while state.bytes > RELAY_BYTES && !state.closed && !state.broken {
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(state);
        self.push(frame);
    }

    /// Ends the connection once the waiting frames have been sent.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    /// Ends the connection now.
    pub fn break_off(&self) {
        let mut state = lock(&self.state);
        (state.broken, state.closed) = (true, true);
        state.frames.clear();
        self.changed.notify_all();
    }

    /// Returns the next frame, a ping if none comes in time, or `None` at the end.
    fn next(&self, interval: Duration) -> Option<Frame> {
        let state = lock(&self.state);
        let idle = |state: &mut OutboxState| state.frames.is_empty() && !state.closed && !state.broken;
        let waited = self.changed.wait_timeout_while(state, interval, idle);
        let (mut state, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        match state.frames.front() {
            _ if state.broken => None,
            Some(_) => state.frames.pop_front(),
            None if state.closed => None,
            None => Some(Frame::new(FrameKind::Ping, Vec::new())),
        }
    }

    /// Frees the space of a frame that was sent.
    fn release(&self, frame: &Frame) {
        let mut state = lock(&self.state);
        state.bytes = state.bytes.saturating_sub(frame.len());
        self.changed.notify_all();
    }
}

/// Starts the thread that sends the frames of `outbox`, and a ping whenever no frame has been sent for `interval`.
pub(super) fn start_writer(
    outbox: Arc<Outbox>,
    stream: TcpStream,
    interval: Duration,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("island-writer".into()).spawn(move || {
        let mut writer = BufWriter::new(&stream);
        while let Some(frame) = outbox.next(interval) {
            if frame.write(&mut writer).and_then(|()| writer.flush()).is_err() {
                outbox.break_off();
                break;
            }
            outbox.release(&frame);
        }
        drop(writer);
        // On a broken connection, this also ends the reader.
        let broken = lock(&outbox.state).broken;
        _ = stream.shutdown(if broken { Shutdown::Both } else { Shutdown::Write });
    })
}
