//! Progress for people: a bar on a terminal, plain lines in a pipe or a file. Both are written to standard error.

#[cfg(feature = "cli")]
use indicatif::{ProgressBar, ProgressStyle};
#[cfg(feature = "cli")]
use std::io::IsTerminal as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// The divisor of the elapsed time that determines the pause between two lines, within the bounds below, if `every` is
/// not given.
const PAUSE_DIVISOR: u32 = 20;
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The interval at which a bar is redrawn while nothing is reported.
#[cfg(feature = "cli")]
const REDRAW_INTERVAL: Duration = Duration::from_millis(500);
/// The pause between two lines within the first step.
const FIRST_STEP_PAUSE: Duration = Duration::from_secs(10);

/// A display of a run's progress.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    /// The unit that lines count, or `None` for steps.
    unit: Option<&'static str>,
    display: ProgressDisplay,
}

#[derive(Debug)]
enum ProgressDisplay {
    Nothing,
    #[cfg(feature = "cli")]
    Bar(ProgressBar),
    Lines(PrintInterval),
}

/// The rule that decides when a line is due.
#[derive(Debug)]
struct PrintInterval {
    every: Option<u64>,
    start: Instant,
    /// The number of steps that were done before the first reported one.
    steps_before: u64,
    last_line: Option<Instant>,
    /// The time of the last line before the first step was reported.
    last_in_first_step: Option<Instant>,
}

impl Progress {
    /// Creates a display for `total` steps: a bar if standard error is a terminal (with feature `cli`), otherwise a
    /// line every `every` steps. Without `every`, a line is written about every second at first, and then less and less
    /// often, down to once a minute. The first and the last step are always shown; all other lines end with an estimate
    /// of the remaining time.
    pub fn new(total: u64, every: Option<u64>) -> Self {
        #[cfg(feature = "cli")]
        if std::io::stderr().is_terminal() {
            return Self { total, unit: None, display: ProgressDisplay::Bar(bar(total)) };
        }
        Self { total, unit: None, display: ProgressDisplay::Lines(PrintInterval::new(every, Instant::now())) }
    }

    /// Creates a display that shows nothing, for all ranks but one.
    pub fn silent() -> Self {
        Self { total: 0, unit: None, display: ProgressDisplay::Nothing }
    }

    /// Counts a unit other than steps, such as MiB: lines read "3/57 MiB" instead of "step 3/57".
    pub fn counting(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }

    /// Shows that work has begun after step `done`, before the first step is reported. A bar is drawn now, and redrawn
    /// regularly from then on; otherwise, a line is written.
    pub fn begin(&mut self, done: u64, message: impl FnOnce() -> String) {
        match &mut self.display {
            ProgressDisplay::Nothing => {}
            #[cfg(feature = "cli")]
            ProgressDisplay::Bar(bar) => {
                bar.set_message(message());
                bar.set_position(done);
                bar.enable_steady_tick(REDRAW_INTERVAL);
            }
            ProgressDisplay::Lines(_) => _ = writeln!(std::io::stderr(), "step {done}/{}: {}", self.total, message()),
        }
    }

    /// Shows the progress within the step after step `done`: `part` of `parts` parts. Lines show it only in the first
    /// step of a run, when there is nothing else to show yet, and at most every 10 seconds.
    pub fn show_step_progress(&mut self, done: u64, part: usize, parts: usize) {
        match &mut self.display {
            ProgressDisplay::Nothing => {}
            #[cfg(feature = "cli")]
            ProgressDisplay::Bar(bar) if part < parts => {
                bar.set_prefix(format!("{part}/{parts} of step {} ", done + 1));
            }
            #[cfg(feature = "cli")]
            ProgressDisplay::Bar(bar) => bar.set_prefix(""),
            ProgressDisplay::Lines(interval) => {
                if part < parts && interval.is_due_in_first_step(Instant::now()) {
                    let total = self.total;
                    _ = writeln!(
                        std::io::stderr(),
                        "step {done}/{total}: micro batch {part} of {parts} of the next step is done"
                    );
                }
            }
        }
    }

    /// Reports that step `done` (counted from 1) is done. `message` is called only if it is shown.
    pub fn step(&mut self, done: u64, message: impl FnOnce() -> String) {
        match &mut self.display {
            ProgressDisplay::Nothing => {}
            #[cfg(feature = "cli")]
            ProgressDisplay::Bar(bar) => {
                bar.set_message(in_unit(self.unit, message()));
                bar.set_position(done);
            }
            ProgressDisplay::Lines(interval) => {
                let now = Instant::now();
                if interval.is_due(done, self.total, now) {
                    let time_left = interval.time_left(done, self.total, now);
                    let time_left = time_left.map(|time| format!(", {} left", format_time(time)));
                    let (total, time_left) = (self.total, time_left.unwrap_or_default());
                    let steps = if self.unit.is_none() { "step " } else { "" };
                    let message = in_unit(self.unit, message());
                    _ = writeln!(
                        std::io::stderr(),
                        "{}",
                        format!("{steps}{done}/{total} {message}").trim_end().to_owned() + &time_left
                    );
                }
            }
        }
    }

    /// Leaves the bar on the screen, without a remaining time, and moves to the line below it.
    pub fn finish(&self) {
        #[cfg(feature = "cli")]
        if let ProgressDisplay::Bar(bar) = &self.display {
            // A finished run has no remaining time, even if it ended early.
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}] {msg}") {
                bar.set_style(style);
            }
            bar.abandon();
        }
    }
}

/// Puts the unit, if any, before a message.
fn in_unit(unit: Option<&str>, message: String) -> String {
    match unit {
        Some(unit) if message.is_empty() => unit.to_string(),
        Some(unit) => format!("{unit} {message}"),
        None => message,
    }
}

#[cfg(feature = "cli")]
fn bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed} < {eta}] {prefix}{msg}") {
        bar.set_style(style);
    }
    bar
}

impl PrintInterval {
    fn new(every: Option<u64>, start: Instant) -> Self {
        Self { every, start, steps_before: 0, last_line: None, last_in_first_step: None }
    }

    fn is_due(&mut self, done: u64, total: u64, now: Instant) -> bool {
        let pause = (now.duration_since(self.start) / PAUSE_DIVISOR).clamp(MIN_PAUSE, MAX_PAUSE);
        let due = match (self.last_line, self.every) {
            (None, _) => {
                self.steps_before = done.saturating_sub(1);
                true
            }
            _ if done == total => true,
            (_, Some(every)) => done.is_multiple_of(every),
            (Some(last), None) => now.duration_since(last) >= pause,
        };
        if due {
            self.last_line = Some(now);
        }
        due
    }

    /// Returns whether a line is due within the first step.
    fn is_due_in_first_step(&mut self, now: Instant) -> bool {
        let since = now.duration_since(self.last_in_first_step.unwrap_or(self.start));
        let due = self.last_line.is_none() && since >= FIRST_STEP_PAUSE;
        if due {
            self.last_in_first_step = Some(now);
        }
        due
    }

    /// Returns the time that the rest will take at the speed so far, or `None` after the first step of this run, which
    /// is not representative, and after the last step.
    fn time_left(&self, done: u64, total: u64, now: Instant) -> Option<Duration> {
        let completed = done.checked_sub(self.steps_before).filter(|completed| *completed > 1)?;
        let rest = total.checked_sub(done).filter(|rest| *rest > 0)?;
        let seconds = now.duration_since(self.start).as_secs_f64() * rest as f64 / completed as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// Formats a time such as `40s`, `3m 20s`, `2h 5m` or `4d 3h`.
fn format_time(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if days > 0 => format!("{days}d {}h", hours % 24),
        () if hours > 0 => format!("{hours}h {}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported_steps(every: Option<u64>, seconds_per_step: f64, steps: u64) -> Vec<u64> {
        let start = Instant::now();
        let mut interval = PrintInterval::new(every, start);
        let at = |step: u64| start + Duration::from_secs_f64(step as f64 * seconds_per_step);
        (1..=steps).filter(|step| interval.is_due(*step, steps, at(*step))).collect()
    }

    #[test]
    fn lines_come_every_so_many_steps_or_every_second_and_first_and_last_always() {
        assert_eq!(reported_steps(Some(4), 0.001, 11), [1, 4, 8, 11]);
        assert_eq!(reported_steps(None, 0.25, 11), [1, 5, 9, 11]);
        assert_eq!(reported_steps(None, 2.0, 11), (1..=11).collect::<Vec<_>>());
        assert_eq!(reported_steps(None, 0.001, 11), [1, 11]);
    }

    #[test]
    fn lines_become_rarer_in_a_long_run_and_stay_one_a_minute() {
        let ten_hours = reported_steps(None, 1.0, 36_000);
        assert!((500..800).contains(&ten_hours.len()), "{} lines", ten_hours.len());
        assert_eq!(ten_hours[..5], [1, 2, 3, 4, 5]);
        assert!(ten_hours.windows(2).all(|pair| pair[1] - pair[0] <= 60));
    }

    #[test]
    fn the_time_left_goes_by_the_steps_of_this_run() {
        let start = Instant::now();
        let mut interval = PrintInterval::new(None, start);
        let at = |seconds| start + Duration::from_secs(seconds);
        // The run was resumed after step 100.
        assert!(interval.is_due(101, 200, at(10)));
        assert_eq!(interval.time_left(101, 200, at(10)), None, "one step is not enough");
        assert_eq!(interval.time_left(120, 200, at(200)), Some(Duration::from_secs(800)));
        assert_eq!(interval.time_left(200, 200, at(200)), None);
        let words = [40, 200, 7500, 356_400].map(|seconds| format_time(Duration::from_secs(seconds)));
        assert_eq!(words, ["40s", "3m 20s", "2h 5m", "4d 3h"]);
    }
}
