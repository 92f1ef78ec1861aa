//! The order in which units are needed, recorded in the first micro step and followed in the next ones.

use crate::param::UnitId;

/// A use of a unit that is about to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitEvent {
    /// The unit's forward pass.
    Forward(UnitId),
    /// The unit's backward pass.
    Backward(UnitId),
}

impl UnitEvent {
    pub fn unit(self) -> UnitId {
        match self {
            Self::Forward(unit) | Self::Backward(unit) => unit,
        }
    }
}

/// A recording of unit events and, once the recording is complete, a position in it. A micro step that differs from
/// the recording replaces it.
#[derive(Debug, Default)]
pub(crate) struct UnitTrace {
    events: Vec<UnitEvent>,
    /// The number of events of this micro step so far.
    position: usize,
    complete: bool,
    /// The number of micro steps that differed from the recording.
    changes: u64,
    /// Whether this micro step differs from the recording.
    differs: bool,
}

impl UnitTrace {
    /// Reports that `event` happens now.
    pub fn advance(&mut self, event: UnitEvent) {
        if self.complete && self.events.get(self.position) != Some(&event) {
            self.events.truncate(self.position);
            self.complete = false;
            self.differs = true;
        }
        if !self.complete {
            self.events.push(event);
        }
        self.position += 1;
    }

    /// Ends the micro step.
    pub fn end(&mut self) {
        if self.complete && self.position != self.events.len() {
            self.events.truncate(self.position);
            self.differs = true;
        }
        self.changes += u64::from(std::mem::take(&mut self.differs));
        self.complete = !self.events.is_empty();
        self.position = 0;
    }

    /// Returns the number of micro steps so far that used different units from those of the previous micro step, or the
    /// same units in a different order.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the uses of units that come next, in order, or nothing during a recording.
    pub fn coming(&self) -> &[UnitEvent] {
        if self.complete { &self.events[self.position..] } else { &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::UnitEvent::{Backward, Forward};
    use super::*;

    fn run(trace: &mut UnitTrace, events: &[UnitEvent]) -> Vec<usize> {
        let upcoming = events
            .iter()
            .map(|e| {
                trace.advance(*e);
                trace.coming().len()
            })
            .collect();
        trace.end();
        upcoming
    }

    #[test]
    fn the_second_micro_step_knows_what_comes() {
        let mut trace = UnitTrace::default();
        let events = [Forward(0), Forward(1), Backward(1), Backward(0)];
        assert_eq!(run(&mut trace, &events), [0, 0, 0, 0]);
        assert_eq!(run(&mut trace, &events), [3, 2, 1, 0]);
    }

    #[test]
    fn a_changed_order_is_recorded_anew() {
        let mut trace = UnitTrace::default();
        run(&mut trace, &[Forward(0), Forward(1), Backward(1)]);
        let other = [Forward(0), Forward(2), Backward(2)];
        assert_eq!(run(&mut trace, &other), [2, 0, 0]);
        assert_eq!(run(&mut trace, &other), [2, 1, 0]);
        assert_eq!(run(&mut trace, &other[..2]), [2, 1]);
        assert_eq!(run(&mut trace, &other[..2]), [1, 0]);
        assert_eq!(trace.changes(), 2);
    }
}
