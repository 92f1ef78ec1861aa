//! Measures the peak memory bandwidth, for comparison with the results of the benches.

use divan::Bencher;
use divan::counter::BytesCount;
use rayon::prelude::*;
use std::hint::black_box;

/// The size of each array in bytes: far larger than most caches.
const ARRAY: usize = 256 << 20;

/// Returns how many of a slice's `len` elements each thread of the pool processes.
fn elements_per_thread(len: usize) -> usize {
    len.div_ceil(rayon::current_num_threads())
}

/// Measures reading, by summing an array.
#[divan::bench(sample_size = 1, max_time = 1)]
fn peak_memory_read(bencher: Bencher<'_, '_>) {
    let from = vec![1f32; ARRAY / 4];
    let chunk_len = elements_per_thread(from.len());
    bencher.counter(BytesCount::new(ARRAY)).bench_local(|| {
        from.par_chunks(chunk_len).for_each(|from| {
            black_box(sum(from));
        });
    });
}

/// Measures reading and writing. Reads that the processor makes before it overwrites a cache line are not counted.
#[divan::bench(sample_size = 1, max_time = 1)]
fn peak_memory_copy(bencher: Bencher<'_, '_>) {
    let (from, mut to) = (vec![1f32; ARRAY / 4], vec![0f32; ARRAY / 4]);
    let chunk_len = elements_per_thread(from.len());
    bencher.counter(BytesCount::new(2 * ARRAY)).bench_local(|| {
        to.par_chunks_mut(chunk_len).zip(from.par_chunks(chunk_len)).for_each(|(to, from)| to.copy_from_slice(from));
    });
}

/// Measures a = b + 2 c (McCalpin 1995), counted in the same way as the copy.
#[divan::bench(sample_size = 1, max_time = 1)]
fn peak_memory_triad(bencher: Bencher<'_, '_>) {
    let (mut a, b, c) = (vec![0f32; ARRAY / 4], vec![1f32; ARRAY / 4], vec![2f32; ARRAY / 4]);
    let chunk_len = elements_per_thread(a.len());
    bencher.counter(BytesCount::new(3 * ARRAY)).bench_local(|| {
        let chunks = a.par_chunks_mut(chunk_len).zip(b.par_chunks(chunk_len)).zip(c.par_chunks(chunk_len));
        chunks.for_each(|((a, b), c)| {
            for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                *a = b + 2.0 * c;
            }
        });
    });
}

/// Returns the sum, computed with the widest vectors that this machine supports, up to eight elements wide.
fn sum(x: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        return unsafe { sum_by_eight(x) };
    }
    sum_of(x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_by_eight(x: &[f32]) -> f32 {
    sum_of(x)
}

/// Returns the sum. Four simultaneous streams keep memory busier than one.
#[inline(always)]
fn sum_of(x: &[f32]) -> f32 {
    let mut sums = [[0f32; 16]; 4];
    let (first, second) = x.split_at(x.len() / 2);
    let ((a, b), (c, d)) = (first.split_at(first.len() / 2), second.split_at(second.len() / 2));
    let lines = |x| <[f32]>::as_chunks::<16>(x).0.iter();
    for (((a, b), c), d) in lines(a).zip(lines(b)).zip(lines(c)).zip(lines(d)) {
        for (sums, x) in sums.iter_mut().zip([a, b, c, d]) {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
    }
    sums.as_flattened().iter().sum()
}
