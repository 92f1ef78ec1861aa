//! Compares every vector type with the same operations on single numbers.

use super::*;
use crate::kernels::element::ElementDtype;
use crate::kernels::f32_access::{get, put};
use crate::kernels::instruction_set::InstructionSet;
use half::{bf16, f16};

/// Returns numbers of many magnitudes, including the special ones.
fn numbers() -> Vec<f32> {
    let patterns = (0..if cfg!(miri) { 64 } else { 4096u32 }).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761)));
    let moderate = (-300..300).step_by(if cfg!(miri) { 60 } else { 1 }).map(|i| i as f32 * 0.37);
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE / 2.0];
    patterns.chain(moderate).chain(special).collect()
}

/// Returns whether both have the same bits or both are NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// # Safety
/// The processor must have the vector's instructions.
unsafe fn apply<V: SimdVector>(a: &[f32], b: &[f32], f: unsafe fn(V, V) -> V) -> Vec<f32> {
    let mut out = vec![0.0; a.len()];
    // SAFETY: the caller guarantees that the processor has the instructions; only full vectors of numbers are accessed.
    unsafe {
        V::with(|| {
            for start in (0..a.len() / V::LANES).map(|i| i * V::LANES) {
                f(V::load(a[start..].as_ptr()), V::load(b[start..].as_ptr())).store(out[start..].as_mut_ptr());
            }
        });
    }
    out
}

/// # Safety
/// The processor must have the vector's instructions.
unsafe fn check<V: SimdVector>(fused: bool) {
    let mut a = numbers();
    a.truncate(a.len() / MAX_LANES * MAX_LANES);
    let mut b = a.clone();
    b.rotate_left(77 % a.len());
    let check = |f: unsafe fn(V, V) -> V, want: &dyn Fn(f32, f32) -> f32| {
        // SAFETY: the caller guarantees that the processor has the instructions.
        let got = unsafe { apply::<V>(&a, &b, f) };
        for ((got, a), b) in got.iter().zip(&a).zip(&b) {
            assert!(same(*got, want(*a, *b)), "{a} {b}: {got} {}", want(*a, *b));
        }
    };
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.add(b) }, &|a, b| a + b);
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.sub(b) }, &|a, b| a - b);
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.mul(b) }, &|a, b| a * b);
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.div(b) }, &|a, b| a / b);
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.max(b) }, &|a, b| if a > b { a } else { b });
    let multiply_add = |a: f32, b: f32, c: f32| if fused { a.mul_add(b, c) } else { a * b + c };
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.mul_add(b, a) }, &|a, b| multiply_add(a, b, a));
    // SAFETY: `check` calls the closure only if its own caller guarantees the instructions.
    check(|a, b| unsafe { a.mul_sub(b, a) }, &|a, b| multiply_add(a, b, -a));
    // SAFETY: the caller guarantees that the processor has the instructions.
    let powers = unsafe { apply::<V>(&a, &b, |a, _| a.exp2()) };
    for (got, x) in powers.iter().zip(&a) {
        let want = f64::from(*x).exp2();
        let right = match *x {
            x if x.is_nan() => got.is_nan(),
            x if x < -126.0 => (0.0..1.3e-38).contains(got),
            x if x > 127.4 => *got == f32::INFINITY || f64::from(*got) > 0.9 * want,
            _ => (f64::from(*got) - want).abs() < (3e-7 + 1e-7 * f64::from(x.abs())) * want,
        };
        assert!(right, "2^{x}: {got} {want}");
    }
    // SAFETY: the caller guarantees that the processor has the instructions.
    let tangents = unsafe { apply::<V>(&a, &b, |a, _| tanh(a)) };
    for (got, x) in tangents.iter().zip(&a) {
        let want = f64::from(*x).tanh();
        let right = if x.is_nan() { got.is_nan() } else { (f64::from(*got) - want).abs() <= 6e-7 * want.abs() };
        // For tiny numbers, intermediate products are subnormal or 0 and lose digits, so only the magnitude is checked.
        assert!(right || (x.abs() < 1e-30 && got.abs() <= 2.0 * x.abs()), "tanh {x}: {got} {want}");
    }
    for lane in 0..=V::LANES {
        let (mut got, lanes) = ([0.0; MAX_LANES], std::array::from_fn::<f32, MAX_LANES, _>(|i| i as f32 + 1.0));
        // SAFETY: the caller guarantees that the processor has the instructions; there are as many numbers as in the
        // longest vector.
        unsafe { V::with(|| V::load(lanes.as_ptr()).blend_from_lane(lane, V::splat(-1.0)).store(got.as_mut_ptr())) };
        assert!((0..V::LANES).all(|i| got[i] == if i < lane { -1.0 } else { lanes[i] }), "{lane}: {got:?}");
    }
    let mut square = [[0.0; MAX_LANES]; MAX_LANES];
    let mut halves = [[0.0; MAX_LANES]; 2];
    // SAFETY: the caller guarantees that the processor has the instructions; the rows are as long as the longest
    // vector.
    unsafe {
        V::with(|| {
            let row = |i| std::array::from_fn::<f32, MAX_LANES, _>(|j| (100 * i + j) as f32);
            let mut rows: TransposeBlock<V> = std::array::from_fn(|i| V::load(row(i).as_ptr()));
            rows[1].store_halves(halves[0].as_mut_ptr(), halves[1].as_mut_ptr());
            V::transpose(&mut rows);
            (0..V::LANES).for_each(|i| rows[i].store(square[i].as_mut_ptr()));
        });
    }
    let half = V::LANES / 2;
    for i in 0..V::LANES {
        assert!((0..V::LANES).all(|j| square[i][j] == (100 * j + i) as f32), "{i}: {square:?}");
        assert_eq!(halves[i / half][i % half], (100 + i) as f32);
    }
    // SAFETY: the caller guarantees that the processor has the instructions.
    unsafe {
        check_elements::<V, f32>(&a);
        check_elements::<V, bf16>(&a);
        check_elements::<V, f16>(&a);
    }
    let [low, high] = [0, 16].map(|shift| move |word: f32| f32::from_bits(word.to_bits() >> shift << 16));
    for (part, want) in [low, high].into_iter().enumerate() {
        let words: Vec<f32> = (0..MAX_LANES as u32).map(|i| f32::from_bits(0x3F81_4012 + 0x0102_0301 * i)).collect();
        let mut got = [0.0; MAX_LANES];
        // SAFETY: the caller guarantees that the processor has the instructions; there are as many numbers as in the
        // longest vector.
        unsafe { V::with(|| V::load(words.as_ptr()).split_bf16()[part].store(got.as_mut_ptr())) };
        assert!((0..V::LANES).all(|i| same(got[i], want(words[i]))), "{got:?}");
    }
}

/// # Safety
/// The processor must have the vector's instructions.
unsafe fn check_elements<V: SimdVector, E: Element>(numbers: &[f32]) {
    for (i, from) in numbers.chunks_exact(V::LANES).enumerate() {
        let n = i % (V::LANES + 1);
        let (mut to, mut back) = (vec![put::<E>(7.0); V::LANES], vec![9.0; V::LANES]);
        // SAFETY: the caller guarantees that the processor has the instructions; a vector's numbers and `n` elements
        // are read.
        unsafe {
            V::with(|| {
                V::load(from.as_ptr()).narrow(to.as_mut_ptr(), n);
                V::widen(to[..n].to_vec().as_ptr(), n).store(back.as_mut_ptr());
            });
        }
        for lane in 0..V::LANES {
            let rounded = if lane < n { get(put::<E>(from[lane])) } else { 7.0 };
            let got = get(to[lane]);
            // The AVX512_BF16 instruction treats subnormal numbers as 0.
            let flushed_to_zero = E::KIND == ElementDtype::BF16 && got == 0.0 && rounded.abs() <= f32::MIN_POSITIVE;
            assert!(same(got, rounded) || flushed_to_zero, "{:?} of {}: {rounded} {got}", E::KIND, from[lane]);
            assert!(same(back[lane], if lane < n { got } else { 0.0 }), "{:?}: {got} {}", E::KIND, back[lane]);
        }
    }
}

/// # Safety
/// The processor must have the bf16 instructions.
#[cfg(target_arch = "x86_64")]
unsafe fn check_pairs() {
    let numbers = |from: usize| std::array::from_fn::<f32, MAX_LANES, _>(|i| (from + i) as f32 * 0.3);
    let (a, b) = (numbers(1), numbers(100));
    let mut got = [[bf16::ZERO; 2 * MAX_LANES]; 2];
    // SAFETY: the caller guarantees that the processor has the instructions; a row of `got` is as long
    // as a vector.
    unsafe {
        Avx512Bf16::with(|| {
            let (a, b) = (Avx512Bf16::load(a.as_ptr()), Avx512Bf16::load(b.as_ptr()));
            Avx512Bf16::pair(a, b).store(got[0].as_mut_ptr().cast());
            Avx512Bf16::concat_to_bf16(a, b).store(got[1].as_mut_ptr().cast());
        });
    }
    for i in 0..MAX_LANES {
        let [a, b] = [a[i], b[i]].map(bf16::from_f32);
        assert_eq!((got[0][2 * i], got[0][2 * i + 1]), (a, b));
        assert_eq!((got[1][i], got[1][MAX_LANES + i]), (a, b));
    }
}

#[test]
fn vectors_compute_what_their_numbers_alone_would_give() {
    for level in InstructionSet::available() {
        // SAFETY: the processor supports the level.
        unsafe {
            match level {
                InstructionSet::Portable => check::<PortableVector>(false),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => check::<Avx2>(true),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => {
                    check::<Avx512>(true);
                    if is_x86_feature_detected!("avx512bf16") {
                        check::<Avx512Bf16>(true);
                        check_pairs();
                    }
                }
                #[cfg(target_arch = "aarch64")]
                InstructionSet::Neon => check::<Neon>(true),
            }
        }
    }
}
