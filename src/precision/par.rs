//! Work divided over the threads of the current pool, or done on the spot where that has only one.
//!
//! A rank of a full machine has one core and a pool of one thread. Handing work to that thread and waiting for it
//! would cost two context switches and gain nothing.

use rayon::prelude::*;

/// Runs both, at once if there are threads for it.
pub(crate) fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    if rayon::current_num_threads() == 1 {
        a();
        b();
    } else {
        rayon::join(a, b);
    }
}

/// `f` of every number below `count`, in order.
pub(crate) fn map<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if count <= 1 || rayon::current_num_threads() == 1 {
        (0..count).map(f).collect()
    } else {
        (0..count).into_par_iter().map(&f).collect()
    }
}

/// Whether `f` holds for any number below `count`.
pub(crate) fn any(count: usize, f: impl Fn(usize) -> bool + Sync) -> bool {
    if count <= 1 || rayon::current_num_threads() == 1 { (0..count).any(f) } else { (0..count).into_par_iter().any(&f) }
}
