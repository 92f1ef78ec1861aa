//! The order in which a sweep receives the results of jobs that run at the same time.

use super::ask_tell::SweepJob;

/// The order in which a sweep receives the results of jobs that run at the same time, so that it makes the same
/// decisions however long its jobs take.
///
/// It is the order in which the jobs would end if all steps took equally long: the next result is that of the job with
/// the fewest steps left, and other results, even if they are already known, wait for it.
#[derive(Debug, Clone, Default)]
pub struct JobResultOrder {
    /// The time in steps.
    now: u64,
    /// The running jobs: the time at which each ends, and its trial.
    running: Vec<(u64, usize)>,
}

impl JobResultOrder {
    /// Creates the order of a sweep that has just begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a job that begins.
    pub fn begin(&mut self, job: &SweepJob) {
        self.running.push((self.now.saturating_add(job.to - job.from), job.trial));
    }

    /// Returns the trial whose result comes next.
    pub fn next(&self) -> Option<usize> {
        self.running.iter().min().map(|(_, trial)| *trial)
    }

    /// Returns the trials that are running.
    pub fn running(&self) -> impl Iterator<Item = usize> + '_ {
        self.running.iter().map(|(_, trial)| *trial)
    }

    /// Removes the job of a trial when the sweep receives its result.
    pub fn end(&mut self, trial: usize) {
        if let Some(at) = self.running.iter().position(|(_, running)| *running == trial) {
            let (end, _) = self.running.remove(at);
            self.now = self.now.max(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_told_by_their_number_of_steps() {
        let job = |trial, from, to| SweepJob { trial, from, to };
        let mut order = JobResultOrder::new();
        order.begin(&job(1, 0, 10));
        order.begin(&job(2, 0, 4));
        assert_eq!(order.next(), Some(2));
        order.end(2);
        // Trial 3 begins at 4 and ends at 10, like trial 1, whose number is smaller.
        order.begin(&job(3, 4, 10));
        assert_eq!((order.next(), order.running().count()), (Some(1), 2));
        order.end(1);
        order.begin(&job(4, 0, 1));
        assert_eq!(order.next(), Some(3));
        order.end(3);
        order.end(4);
        assert_eq!(order.next(), None);
    }
}
