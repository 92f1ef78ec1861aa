//! Progress for people: a bar on a terminal, plain lines in a pipe or a file. Both go to standard error.

#[cfg(feature = "cli")]
use indicatif::{ProgressBar, ProgressStyle};
#[cfg(feature = "cli")]
use std::io::IsTerminal as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// Pause between two lines when no step count is asked for.
const LINE_PAUSE: Duration = Duration::from_secs(1);

/// Shows how far a run is.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    display: Display,
}

#[derive(Debug)]
enum Display {
    Nothing,
    #[cfg(feature = "cli")]
    Bar(ProgressBar),
    Lines(Rhythm),
}

/// When a line is due.
#[derive(Debug)]
struct Rhythm {
    every: Option<u64>,
    last_line: Option<Instant>,
}

impl Progress {
    /// Progress over `total` steps: a bar if standard error is a terminal (with feature `cli`), else a line every
    /// `every` steps, or about every second. The first and the last step always show.
    pub fn new(total: u64, every: Option<u64>) -> Self {
        #[cfg(feature = "cli")]
        if std::io::stderr().is_terminal() {
            return Self { total, display: Display::Bar(bar(total)) };
        }
        Self { total, display: Display::Lines(Rhythm { every, last_line: None }) }
    }

    /// Shows nothing: for all ranks but one.
    pub fn silent() -> Self {
        Self { total: 0, display: Display::Nothing }
    }

    /// Reports that step `done` (from 1) is done. `message` is only made when it is shown.
    pub fn step(&mut self, done: u64, message: impl FnOnce() -> String) {
        match &mut self.display {
            Display::Nothing => {}
            #[cfg(feature = "cli")]
            Display::Bar(bar) => {
                bar.set_message(message());
                bar.set_position(done);
            }
            Display::Lines(rhythm) => {
                if rhythm.is_due(done, self.total, Instant::now()) {
                    _ = writeln!(std::io::stderr(), "step {done}/{} {}", self.total, message());
                }
            }
        }
    }

    /// Leaves the bar as it is and frees the line below it.
    pub fn finish(&self) {
        #[cfg(feature = "cli")]
        if let Display::Bar(bar) = &self.display {
            bar.abandon();
        }
    }
}

#[cfg(feature = "cli")]
fn bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed} < {eta}] {msg}") {
        bar.set_style(style);
    }
    bar
}

impl Rhythm {
    fn is_due(&mut self, done: u64, total: u64, now: Instant) -> bool {
        let due = match (self.last_line, self.every) {
            (None, _) => true,
            _ if done == total => true,
            (_, Some(every)) => done.is_multiple_of(every),
            (Some(last), None) => now.duration_since(last) >= LINE_PAUSE,
        };
        if due {
            self.last_line = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(every: Option<u64>, seconds_per_step: f64) -> Vec<u64> {
        let (mut rhythm, start) = (Rhythm { every, last_line: None }, Instant::now());
        let at = |step: u64| start + Duration::from_secs_f64(step as f64 * seconds_per_step);
        (1..=11).filter(|step| rhythm.is_due(*step, 11, at(*step))).collect()
    }

    #[test]
    fn lines_come_every_so_many_steps_or_every_second_and_first_and_last_always() {
        assert_eq!(shown(Some(4), 0.001), [1, 4, 8, 11]);
        assert_eq!(shown(None, 0.25), [1, 5, 9, 11]);
        assert_eq!(shown(None, 2.0), (1..=11).collect::<Vec<_>>());
        assert_eq!(shown(None, 0.001), [1, 11]);
    }
}
