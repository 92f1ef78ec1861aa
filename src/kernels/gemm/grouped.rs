//! Several products in one pass, such as those of the experts of a layer.
//!
//! Products can have very different numbers of rows. Assigning threads to products would leave some threads idle;
//! therefore, all products are first divided into tasks of similar size, and these are divided among the threads:
//!
//! ```text
//!   rows of expert 0   | task | task | task | task |    the columns of each product are divided as the caches require,
//!   rows of expert 1   |    task     |    task     |    and further if the product is large
//!   rows of expert 2   |           task            |
//! ```
//!
//! The tasks are those of [`super::blocked`]. Therefore, every result has the bits of a separate product.

use super::arithmetic::ElementArithmetic;
use super::blocked::{GemmPart, GemmPlan, MIN_PARALLEL_MULTIPLICATIONS, WORDS_OF_A, bytes_of};
use super::epilogue::{Epilogue, EpilogueOutput};
use super::matrix::{Matrix, MatrixMut};
use super::microkernel::Microkernels;
use super::scratch::with_words;
use super::task_grid::TaskGrid;
use crate::kernels::element::Element;
use crate::kernels::parallel;

/// The number of tasks per thread into which all products together are divided, so that threads of unequal speed finish
/// at about the same time.
const TASKS_PER_THREAD: usize = 8;
/// The number of 32-bit words of a cache line.
const LINE: usize = 16;

/// A product of [`gemm_grouped`](super::gemm_grouped): `result = epilogue(a b)`.
pub struct Product<'a, E, C> {
    pub result: MatrixMut<'a, C>,
    pub a: Matrix<'a, E>,
    pub b: Matrix<'a, E>,
    pub epilogue: Epilogue<'a, C>,
}

impl<'a, E: Element, C: Element> Product<'a, E, C> {
    /// Checks the shapes, and returns the operands unless the result is empty.
    pub(super) fn check(self) -> Option<CheckedProduct<'a, E, C>> {
        let Self { result, a, b, epilogue } = self;
        assert_eq!(a.cols(), b.rows(), "inner dimensions differ");
        assert_eq!((result.rows(), result.cols()), (a.rows(), b.cols()), "the result has a different shape");
        let output = EpilogueOutput::new(result, epilogue);
        (a.rows() > 0 && b.cols() > 0).then_some((output, a, b))
    }
}

/// A product's result, with its epilogue, and the operands.
pub(super) type CheckedProduct<'a, E, C> = (EpilogueOutput<'a, C>, Matrix<'a, E>, Matrix<'a, E>);

/// Computes the products. The processor must have the instructions of the words' arithmetic.
pub(super) fn gemm<W: ElementArithmetic<E> + Microkernels, E: Element, C: Element>(
    products: &[CheckedProduct<'_, E, C>],
) {
    let bytes_of_b = products.iter().map(|(_, _, b)| bytes_of(b)).sum();
    let plans: Vec<_> =
        products.iter().map(|(output, a, b)| GemmPlan::new::<W>(output, (*a, *b), bytes_of_b)).collect();
    let total = plans.iter().map(GemmPlan::multiplications).sum::<usize>();
    let threads = if total <= MIN_PARALLEL_MULTIPLICATIONS { 1 } else { rayon::current_num_threads() };
    // The number of multiplications of a task, unless the caches require smaller tasks.
    let task_multiplications = if threads == 1 { usize::MAX } else { (total / (TASKS_PER_THREAD * threads)).max(1) };
    for wave in waves::<W, E, C>(&plans) {
        with_words(wave.words_of_a, |packed_a| {
            with_words(wave.words_of_sums, |sums| {
                let spans = wave.regions.iter().map(|region| region.plan.spans.count).max().unwrap_or(0);
                for span in 0..spans {
                    let parts: Vec<_> = wave.regions.iter().filter(|region| span < region.plan.spans.count).collect();
                    let parts = parts.into_iter().map(|region| {
                        let Region { plan, index, a_offset, sums_offset } = *region;
                        let rows = plan.regions.piece(index).len();
                        let task_count = (plan.multiplications() / plan.regions.count).div_ceil(task_multiplications);
                        let grid = TaskGrid::for_grouped::<W>(rows, plan.cols(), plan.words_per_column(), task_count);
                        plan.part(index, span, grid, packed_a.wrapping_add(a_offset), sums.wrapping_add(sums_offset))
                    });
                    run::<W, E, C>(&parts.collect::<Vec<_>>(), threads);
                }
            });
        });
    }
}

/// A region of rows of a product, and its place in the memory of its wave.
#[derive(Clone, Copy)]
struct Region<'a, 'b, E, C> {
    plan: &'a GemmPlan<'b, E, C>,
    index: usize,
    a_offset: usize,
    sums_offset: usize,
}

/// Regions that are computed together.
struct Wave<'a, 'b, E, C> {
    regions: Vec<Region<'a, 'b, E, C>>,
    words_of_a: usize,
    words_of_sums: usize,
}

/// Divides the regions of all products into waves whose packed operands and waiting sums take little memory.
fn waves<'a, 'b, W: ElementArithmetic<E>, E: Element, C: Element>(
    plans: &'a [GemmPlan<'b, E, C>],
) -> Vec<Wave<'a, 'b, E, C>> {
    let mut waves: Vec<Wave<'a, 'b, E, C>> = Vec::new();
    for plan in plans {
        let words_of_a = plan.words_of_a().next_multiple_of(LINE);
        let words_of_sums = plan.waiting_sums::<W>().next_multiple_of(LINE);
        for index in 0..plan.regions.count {
            let fits = |wave: &Wave<'_, '_, E, C>| {
                wave.words_of_a + words_of_a <= WORDS_OF_A && wave.words_of_sums + words_of_sums <= WORDS_OF_A
            };
            if waves.last().is_none_or(|wave| !fits(wave)) {
                waves.push(Wave { regions: Vec::new(), words_of_a: 0, words_of_sums: 0 });
            }
            if let Some(wave) = waves.last_mut() {
                wave.regions.push(Region { plan, index, a_offset: wave.words_of_a, sums_offset: wave.words_of_sums });
                wave.words_of_a += words_of_a;
                wave.words_of_sums += words_of_sums;
            }
        }
    }
    waves
}

/// Runs the tasks of all parts: first those that pack `a`, for which the others wait.
fn run<W: ElementArithmetic<E> + Microkernels, E: Element, C: Element>(parts: &[GemmPart<'_, E, C>], threads: usize) {
    let packs = starts(parts, GemmPart::pack_task_count);
    let products = starts(parts, GemmPart::product_task_count);
    let (n_packs, n_products) = (packs[parts.len()], products[parts.len()]);
    let task = |task: usize| match task.checked_sub(n_packs) {
        None => {
            let (part, task) = locate(&packs, task);
            parts[part].run::<W>(task);
        }
        Some(task) => {
            let (part, task) = locate(&products, task);
            parts[part].run::<W>(parts[part].pack_task_count() + task);
        }
    };
    let tasks = n_packs + n_products;
    if threads == 1 { (0..tasks).for_each(task) } else { parallel::for_each(tasks, task) }
}

/// Returns the index of the first task of each part, and the number of all tasks.
fn starts<P>(parts: &[P], count: impl Fn(&P) -> usize) -> Vec<usize> {
    let mut starts = vec![0];
    starts.extend(parts.iter().scan(0, |all, part| {
        *all += count(part);
        Some(*all)
    }));
    starts
}

/// Returns the part of a task, and the task's number in it.
fn locate(starts: &[usize], task: usize) -> (usize, usize) {
    let part = starts.partition_point(|start| *start <= task) - 1;
    (part, task - starts[part])
}
