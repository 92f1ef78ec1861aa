//! Parallel execution of kernels: a fixed list of tasks that the calling thread and helper threads take dynamically.
//! There are as many threads as rayon's current pool has.
//!
//! The result of a task never depends on the thread that runs it, so results have the same bits for any number of
//! threads.

use super::worker_pool;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `task(0)`, ..., `task(n_tasks - 1)`. Each free thread takes the next task in this order.
///
/// The calling thread also runs tasks, so it never waits for other threads to wake up. With one thread or one task,
/// everything runs on the calling thread, in order.
pub fn for_each(n_tasks: usize, task: impl Fn(usize) + Sync) {
    run_tasks(n_tasks, &task);
}

/// Does the work of [`for_each`]. It is not generic, so that each kernel's task is compiled only once.
fn run_tasks(n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let threads = rayon::current_num_threads().min(n_tasks);
    if threads <= 1 {
        return (0..n_tasks).for_each(task);
    }
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n_tasks {
                return;
            }
            task(i);
        }
    };
    worker_pool::run(threads - 1, &work);
}

/// Mutable data that is split into parts, one for each task.
///
/// # Safety
/// Parts with different indices must never overlap.
pub unsafe trait DisjointParts: Sync {
    /// The part that one task receives.
    type Part;

    /// Returns the part with this index.
    ///
    /// # Safety
    ///
    /// Each index may be taken only once.
    unsafe fn take(&self, index: usize) -> Self::Part;
}

/// Calls `f(i, part i)` once for each i in `0..n_tasks`.
pub fn for_each_part<P: DisjointParts>(n_tasks: usize, parts: P, f: impl Fn(usize, P::Part) + Sync) {
    // SAFETY: `for_each` passes every index once, and `parts` is consumed here.
    for_each(n_tasks, |i| f(i, unsafe { parts.take(i) }));
}

/// Does the same as [`for_each_part`] on the calling thread only, for work that is done before another thread would
/// wake up.
pub fn for_each_part_here<P: DisjointParts>(n_tasks: usize, parts: P, mut f: impl FnMut(usize, P::Part)) {
    // SAFETY: every index is passed once, and `parts` is consumed here.
    (0..n_tasks).for_each(|i| f(i, unsafe { parts.take(i) }));
}

/// A slice in consecutive chunks of the same length. The last may be shorter.
pub struct ParallelChunks<'a, T> {
    data: *mut T,
    len: usize,
    chunk: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<'a, T> ParallelChunks<'a, T> {
    /// Splits `data` into chunks of `chunk` elements.
    pub fn new(data: &'a mut [T], chunk: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), chunk, slice: PhantomData }
    }
}

// SAFETY: same as for a `&mut [T]`.
unsafe impl<T: Send> Send for ParallelChunks<'_, T> {}

// SAFETY: the threads get parts that do not overlap, as if each had been sent a `&mut [T]`.
unsafe impl<T: Send> Sync for ParallelChunks<'_, T> {}

// SAFETY: chunk i is `i * chunk..(i + 1) * chunk`, cut off at the slice's end.
unsafe impl<'a, T: Send> DisjointParts for ParallelChunks<'a, T> {
    type Part = &'a mut [T];

    unsafe fn take(&self, index: usize) -> &'a mut [T] {
        let start = (index * self.chunk).min(self.len);
        let len = self.chunk.min(self.len - start);
        // SAFETY: within the slice, which is borrowed mutably for 'a. No other part overlaps, and the caller takes this
        // part once.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

// SAFETY: each side's parts do not overlap, and the sides were separate mutable borrows.
unsafe impl<A: DisjointParts, B: DisjointParts> DisjointParts for (A, B) {
    type Part = (A::Part, B::Part);

    unsafe fn take(&self, index: usize) -> Self::Part {
        // SAFETY: the caller's promise holds for both sides.
        unsafe { (self.0.take(index), self.1.take(index)) }
    }
}

// SAFETY: same as for the parts that it may hold.
unsafe impl<A: DisjointParts> DisjointParts for Option<A> {
    type Part = Option<A::Part>;

    unsafe fn take(&self, index: usize) -> Self::Part {
        // SAFETY: the caller's promise holds.
        self.as_ref().map(|parts| unsafe { parts.take(index) })
    }
}

/// Runs both closures, concurrently if enough threads are available.
pub(crate) fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    if rayon::current_num_threads() == 1 {
        a();
        b();
    } else {
        rayon::join(a, b);
    }
}

/// Returns `f` of every number below `count`, in order.
pub(crate) fn map<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if count <= 1 || rayon::current_num_threads() == 1 {
        (0..count).map(f).collect()
    } else {
        (0..count).into_par_iter().map(&f).collect()
    }
}

/// Returns whether `f` holds for any number below `count`.
pub(crate) fn any(count: usize, f: impl Fn(usize) -> bool + Sync) -> bool {
    if count <= 1 || rayon::current_num_threads() == 1 { (0..count).any(f) } else { (0..count).into_par_iter().any(&f) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_given_once_and_the_last_may_be_short() {
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let (mut a, mut b) = (vec![0usize; 103], vec![0usize; 11]);
            pool.install(|| {
                let parts = (ParallelChunks::new(&mut a, 10), Some(ParallelChunks::new(&mut b, 1)));
                for_each_part(11, parts, |i, (a, b)| {
                    a.iter_mut().for_each(|x| *x += i + 1);
                    b.expect("given")[0] += i;
                })
            });
            assert!(a.iter().enumerate().all(|(i, x)| *x == i / 10 + 1));
            assert_eq!(b, (0..11).collect::<Vec<_>>());
        }
    }
}
