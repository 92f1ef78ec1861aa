//! Measures samples per second in the same way as DeepSpeed's throughput timer.

use std::time::Duration;

/// The number of optimizer steps that are not timed. The first steps allocate memory and record the order of units.
const WARM_UP_STEPS: u64 = 2;

/// A timer of micro steps, from the beginning of the forward pass to the end of the step.
#[derive(Debug, Default)]
pub(crate) struct ThroughputTimer {
    /// The number of optimizer steps in this process.
    steps: u64,
    /// The total time of the timed steps.
    total: Duration,
    step: Duration,
}

/// The throughput of all ranks together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SamplesPerSecond {
    /// The samples per second in the last optimizer step.
    pub current: f64,
    /// The samples per second in all timed steps.
    pub average: f64,
}

impl ThroughputTimer {
    /// Adds the time that a micro step took.
    pub fn add(&mut self, duration: Duration) {
        self.step += duration;
    }

    /// Ends an optimizer step of `samples` samples, and returns the throughput. The first two steps are not reported.
    pub fn boundary(&mut self, samples: usize) -> Option<SamplesPerSecond> {
        let duration = std::mem::take(&mut self.step);
        self.steps += 1;
        let timed_steps = self.steps.checked_sub(WARM_UP_STEPS).filter(|timed_steps| *timed_steps > 0)?;
        self.total += duration;
        let per_second = |steps: u64, duration: Duration| steps as f64 * samples as f64 / duration.as_secs_f64();
        Some(SamplesPerSecond { current: per_second(1, duration), average: per_second(timed_steps, self.total) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_begins_with_the_third_step_and_micro_steps_add_up() {
        let mut throughput = ThroughputTimer::default();
        let mut step = |micro: [u64; 2]| {
            micro.iter().for_each(|ms| throughput.add(Duration::from_millis(*ms)));
            throughput.boundary(8)
        };
        assert_eq!((step([9000, 9000]), step([500, 500])), (None, None));
        assert_eq!(step([1500, 500]), Some(SamplesPerSecond { current: 4.0, average: 4.0 }));
        assert_eq!(step([250, 750]), Some(SamplesPerSecond { current: 8.0, average: 16.0 / 3.0 }));
    }
}
