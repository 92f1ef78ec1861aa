//! Elements as f32 inside loops that are compiled for a SIMD level: one at a time, in rows, and as operands of
//! functions over slices.

use super::element::{self, Element, ElementDtype};
use super::half_conversion::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};

pub(crate) use super::simd::vectorized;
use std::ops::Range;

/// The number of elements that are widened, computed and narrowed together if these steps are separate loops.
const BLOCK: usize = 128;

/// Returns the element as f32. The conversion of one f16 takes many instructions; for rows of f16, use [`widen`].
#[inline(always)]
pub(crate) fn get<E: Element>(x: E) -> f32 {
    match E::KIND {
        ElementDtype::F32 => bytemuck::cast(x),
        ElementDtype::BF16 => f32_from_bf16(bytemuck::cast(x)),
        ElementDtype::F16 => f32_from_f16(bytemuck::cast(x)),
    }
}

/// Returns the nearest element, rounding ties to even. The conversion to one f16 takes many instructions; for rows of
/// f16, use [`narrow`].
#[inline(always)]
pub(crate) fn put<E: Element>(x: f32) -> E {
    match E::KIND {
        ElementDtype::F32 => bytemuck::cast(x),
        ElementDtype::BF16 => bytemuck::cast(bf16_from_f32(x)),
        ElementDtype::F16 => bytemuck::cast(f16_from_f32(x)),
    }
}

/// Does the same as [`get`] for a row.
#[inline(always)]
pub(crate) fn widen<E: Element>(src: &[E], dst: &mut [f32]) {
    element::widen(src, dst);
}

/// Does the same as [`put`] for a row.
#[inline(always)]
pub(crate) fn narrow<E: Element>(src: &[f32], dst: &mut [E]) {
    element::narrow(src, dst);
}

/// Returns a row as f32: the row itself, or its elements widened into `scratch`, which has the same length.
#[inline(always)]
pub(crate) fn as_f32<'a, E: Element>(row: &'a [E], scratch: &'a mut [f32]) -> &'a [f32] {
    if E::KIND == ElementDtype::F32 {
        return bytemuck::cast_slice(row);
    }
    widen(row, scratch);
    scratch
}

/// Computes `y[i] = f(element i of each input)`, for slices of the same length.
#[inline(always)]
pub(crate) fn map<I: Element, E: Element, const N: usize>(inputs: [&[I]; N], y: &mut [E], f: impl Fn([f32; N]) -> f32) {
    // f16 is converted in slices, by the processor's own instructions if it has them; conversions of bf16 vectorize
    // together with `f`.
    if I::KIND == ElementDtype::F16 || E::KIND == ElementDtype::F16 {
        map_in_blocks(inputs, y, f)
    } else {
        compute(inputs, y, f)
    }
}

/// Does the same as [`map`] for a function of many instructions: widening, computing and narrowing are separate loops.
#[inline(always)]
pub(crate) fn map_long<E: Element, const N: usize>(inputs: [&[E]; N], y: &mut [E], f: impl Fn([f32; N]) -> f32) {
    if E::KIND == ElementDtype::F32 { compute(inputs, y, f) } else { map_in_blocks(inputs, y, f) }
}

/// Computes `y[i] = second(x[i], first(x[i]))`, for slices of the same length. It uses two loops: the combined
/// dependency chain of the functions is so long that one loop would keep few elements in flight.
#[inline(always)]
pub(crate) fn map_in_two_passes<E: Element>(
    x: &[E],
    y: &mut [E],
    first: impl Fn(f32) -> f32,
    second: impl Fn(f32, f32) -> f32,
) {
    assert_eq!(x.len(), y.len(), "the slice lengths differ");
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<BLOCK>(), y.as_chunks_mut::<BLOCK>());
    let mut scratch = [[0f32; BLOCK]; 3];
    for (x, y) in x.iter().zip(y) {
        block_in_two_passes(x, y, &mut scratch, &first, &second);
    }
    block_in_two_passes(x_rest, y_rest, &mut scratch, &first, &second);
}

/// Does the same as [`map_in_two_passes`] for at most one block. In calls with a full block, the compiler knows the
/// length.
#[inline(always)]
fn block_in_two_passes<E: Element>(
    x: &[E],
    y: &mut [E],
    scratch: &mut [[f32; BLOCK]; 3],
    first: &impl Fn(f32) -> f32,
    second: &impl Fn(f32, f32) -> f32,
) {
    let [wide, intermediate, output] = scratch.each_mut().map(|scratch| &mut scratch[..y.len()]);
    let x = as_f32(x, wide);
    for (intermediate, x) in intermediate.iter_mut().zip(x) {
        *intermediate = first(*x);
    }
    if E::KIND == ElementDtype::F32 {
        for ((y, x), intermediate) in y.iter_mut().zip(x).zip(&*intermediate) {
            *y = put(second(*x, *intermediate));
        }
    } else {
        for ((output, x), intermediate) in output.iter_mut().zip(x).zip(&*intermediate) {
            *output = second(*x, *intermediate);
        }
        narrow(output, y);
    }
}

/// Computes `y[i] = f(y[i], element i of each input)`, for slices of the same length.
#[inline(always)]
pub(crate) fn update<I: Element, E: Element, const N: usize>(
    y: &mut [E],
    inputs: [&[I]; N],
    f: impl Fn(f32, [f32; N]) -> f32,
) {
    if I::KIND != ElementDtype::F16 && E::KIND != ElementDtype::F16 {
        return compute_in_place(y, inputs, f);
    }
    let (mut widened, mut scratch) = ([0f32; BLOCK], [[0f32; BLOCK]; N]);
    for start in (0..y.len()).step_by(BLOCK) {
        let range = start..y.len().min(start + BLOCK);
        let y = &mut y[range.clone()];
        if E::KIND == ElementDtype::F32 {
            compute_in_place(y, block(inputs, range, &mut scratch), &f);
            continue;
        }
        let widened = &mut widened[..y.len()];
        widen(y, widened);
        compute_in_place(widened, block(inputs, range, &mut scratch), &f);
        narrow(widened, y);
    }
}

/// Computes `sum[i] += x[i]`, for slices of the same length.
#[inline(always)]
pub(crate) fn add_to<E: Element>(sum: &mut [f32], x: &[E]) {
    update(
        sum,
        [x],
        #[inline(always)]
        |sum, [x]| sum + x,
    );
}

#[inline(always)]
fn map_in_blocks<I: Element, E: Element, const N: usize>(inputs: [&[I]; N], y: &mut [E], f: impl Fn([f32; N]) -> f32) {
    let (mut output, mut scratch) = ([0f32; BLOCK], [[0f32; BLOCK]; N]);
    for start in (0..y.len()).step_by(BLOCK) {
        let range = start..y.len().min(start + BLOCK);
        if E::KIND == ElementDtype::F32 {
            compute(block(inputs, range.clone(), &mut scratch), &mut y[range], &f);
            continue;
        }
        let output = &mut output[..range.len()];
        compute(block(inputs, range.clone(), &mut scratch), output, &f);
        narrow(output, &mut y[range]);
    }
}

/// Returns a range of each input as f32.
#[inline(always)]
fn block<'a, I: Element, const N: usize>(
    inputs: [&'a [I]; N],
    range: Range<usize>,
    scratch: &'a mut [[f32; BLOCK]; N],
) -> [&'a [f32]; N] {
    let len = range.len();
    if I::KIND != ElementDtype::F32 {
        for (scratch, x) in scratch.iter_mut().zip(inputs) {
            widen(&x[range.clone()], &mut scratch[..len]);
        }
    }
    let scratch = &*scratch;
    std::array::from_fn(
        #[inline(always)]
        |i| {
            if I::KIND == ElementDtype::F32 {
                &bytemuck::cast_slice(inputs[i])[range.clone()]
            } else {
                &scratch[i][..len]
            }
        },
    )
}

#[inline(always)]
fn compute<I: Element, E: Element, const N: usize>(inputs: [&[I]; N], y: &mut [E], f: impl Fn([f32; N]) -> f32) {
    assert!(inputs.iter().all(|x| x.len() == y.len()), "the slice lengths differ");
    for (i, y) in y.iter_mut().enumerate() {
        *y = put(f(elements_at(&inputs, i)));
    }
}

#[inline(always)]
fn compute_in_place<I: Element, E: Element, const N: usize>(
    y: &mut [E],
    inputs: [&[I]; N],
    f: impl Fn(f32, [f32; N]) -> f32,
) {
    assert!(inputs.iter().all(|x| x.len() == y.len()), "the slice lengths differ");
    for (i, y) in y.iter_mut().enumerate() {
        *y = put(f(get(*y), elements_at(&inputs, i)));
    }
}

/// Returns element `i` of each input. All inputs must be longer than `i`.
#[inline(always)]
fn elements_at<I: Element, const N: usize>(inputs: &[&[I]; N], i: usize) -> [f32; N] {
    inputs.map(
        #[inline(always)]
        |x| {
            debug_assert!(i < x.len());
            // SAFETY: the callers' loops run over the result, and the callers have checked that all inputs have the
            // result's length. With a bounds check in the loop, the compiler would leave the elements of the last
            // vector to a scalar loop.
            get(unsafe { *x.get_unchecked(i) })
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn functions_of_slices_are_those_of_their_elements<E: Element>() {
        for n in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 77] {
            let [a, b]: [Vec<E>; 2] = [0.37, -0.011].map(|f| (0..n).map(|i| put(i as f32 * f + 3.0)).collect());
            let wide = |x: &[E]| x.iter().map(|x| get(*x)).collect::<Vec<f32>>();
            let mut scratch = vec![0f32; n];
            assert_eq!(as_f32(&a, &mut scratch), wide(&a));
            let want: Vec<E> = a.iter().zip(&b).map(|(a, b)| put(get(*a) * 2.0 - get(*b))).collect();
            let mut y = vec![E::default(); n];
            map([&a, &b], &mut y, |[a, b]| a * 2.0 - b);
            assert_eq!(wide(&y), wide(&want));
            y.fill(E::default());
            map_long([&a, &b], &mut y, |[a, b]| a * 2.0 - b);
            assert_eq!(wide(&y), wide(&want));
            y.fill(E::default());
            map::<f32, _, _>([&wide(&a), &wide(&b)], &mut y, |[a, b]| a * 2.0 - b);
            assert_eq!(wide(&y), wide(&want));
            let mut sums = wide(&b);
            add_to(&mut sums, &a);
            assert!(sums.iter().zip(a.iter().zip(&b)).all(|(sum, (a, b))| *sum == get(*b) + get(*a)));
            y.copy_from_slice(&a);
            update(&mut y, [&b], |a, [b]| a * 2.0 - b);
            assert_eq!(wide(&y), wide(&want));
        }
    }

    #[test]
    fn functions_of_slices_are_those_of_their_elements_in_every_dtype() {
        functions_of_slices_are_those_of_their_elements::<f32>();
        functions_of_slices_are_those_of_their_elements::<bf16>();
        functions_of_slices_are_those_of_their_elements::<f16>();
    }
}
