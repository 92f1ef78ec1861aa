//! Casts between flat buffers of different dtypes, and arithmetic across them in f32.
//!
//! Conversions use f32 blocks that stay in the first-level cache, and run in parallel if a buffer is long enough.

use super::{FlatMut, FlatRef};
use crate::kernels::Element;
use crate::kernels::f32_access::{self, put};
use crate::kernels::parallel;
use crate::kernels::simd::{SimdLoop, level};
use half::bf16;

/// Buffers are divided among threads at multiples of this number of elements. A buffer of at most twice as many
/// elements stays on the calling thread.
const CHUNK: usize = 128 * 1024;

/// The number of elements that are widened, computed and narrowed together.
const BLOCK: usize = 1024;

impl FlatMut<'_> {
    /// Copies `src`, which has the same length, multiplied by `factor`. The product is computed in f32 and rounded
    /// once.
    pub fn copy_scaled(self, src: FlatRef<'_>, factor: f32) {
        if factor == 1.0 {
            return self.copy_cast(src);
        }
        copy_scaled(self, src, factor);
    }

    /// Multiplies every element by `factor` in f32, and rounds once.
    pub fn scale(self, factor: f32) {
        scale(self, factor);
    }

    /// Adds `src`, which has the same length, multiplied by `factor`, in f32, and rounds once.
    pub fn add_scaled(self, src: FlatRef<'_>, factor: f32) {
        add_scaled(self, src, factor);
    }

    /// Copies `src`, which has the same length, cast with rounding to nearest even.
    pub fn copy_cast(self, src: FlatRef<'_>) {
        copy(self, src);
    }
}

/// Copies `src` into `dst` of equal length, rounded to nearest even if the format is narrower.
pub(super) fn copy(dst: FlatMut<'_>, src: FlatRef<'_>) {
    in_chunks(dst, src, &|dst, src| level().run(CastLoop { dst, src }));
}

/// Computes `dst[i] = src[i] * factor` in f32 and rounds once.
pub(super) fn copy_scaled(dst: FlatMut<'_>, src: FlatRef<'_>, factor: f32) {
    in_chunks(dst, src, &|dst, src| level().run(ScaleLoop { dst, src, factor }));
}

/// Computes `dst[i] += src[i] * factor` in f32 and rounds once.
pub(super) fn add_scaled(dst: FlatMut<'_>, src: FlatRef<'_>, factor: f32) {
    in_chunks(dst, src, &|dst, src| level().run(AddScaledLoop { dst, src, factor }));
}

/// Runs `f` over corresponding parts of both buffers, on the threads of the pool.
fn in_chunks(dst: FlatMut<'_>, src: FlatRef<'_>, f: &(impl Fn(FlatMut<'_>, FlatRef<'_>) + Sync)) {
    let len = dst.len();
    assert_eq!(len, src.len(), "both buffers must have the same length");
    if len <= 2 * CHUNK {
        return f(dst, src);
    }
    let mid = (len / 2).next_multiple_of(CHUNK);
    let (front, back) = dst.split_at(mid);
    parallel::join(|| in_chunks(front, src.slice(0..mid), f), || in_chunks(back, src.slice(mid..len), f));
}

struct CastLoop<'a> {
    dst: FlatMut<'a>,
    src: FlatRef<'a>,
}

impl SimdLoop for CastLoop<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match (self.dst, self.src) {
            (FlatMut::F32(d), FlatRef::F32(s)) => d.copy_from_slice(s),
            (FlatMut::BF16(d), FlatRef::BF16(s)) => d.copy_from_slice(s),
            (FlatMut::F16(d), FlatRef::F16(s)) => d.copy_from_slice(s),
            (FlatMut::F32(d), s) => widen(d, s),
            (d, FlatRef::F32(s)) => narrow(d, s),
            (dst, src) => map(dst, src, |_, s| s),
        }
    }
}

struct ScaleLoop<'a> {
    dst: FlatMut<'a>,
    src: FlatRef<'a>,
    factor: f32,
}

impl SimdLoop for ScaleLoop<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let factor = self.factor;
        map(self.dst, self.src, |_, s| s * factor);
    }
}

struct AddScaledLoop<'a> {
    dst: FlatMut<'a>,
    src: FlatRef<'a>,
    factor: f32,
}

impl SimdLoop for AddScaledLoop<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let factor = self.factor;
        map(self.dst, self.src, |d, s| d + s * factor);
    }
}

/// Computes `dst[i] = f(dst[i], src[i])`.
#[inline(always)]
fn map(mut dst: FlatMut<'_>, src: FlatRef<'_>, f: impl Fn(f32, f32) -> f32) {
    match (&mut dst, src) {
        (FlatMut::F32(d), FlatRef::F32(s)) => return map_direct(d, s, f),
        (FlatMut::F32(d), FlatRef::BF16(s)) => return map_direct(d, s, f),
        (FlatMut::BF16(d), FlatRef::F32(s)) => return map_direct(d, s, f),
        (FlatMut::BF16(d), FlatRef::BF16(s)) => return map_direct(d, s, f),
        // These formats are handled below, because the instructions that convert f16 work on slices.
        (FlatMut::F16(_), _) | (_, FlatRef::F16(_)) => {}
    }
    let (mut a, mut b) = ([0f32; BLOCK], [0f32; BLOCK]);
    for start in (0..dst.len()).step_by(BLOCK) {
        let range = start..(start + BLOCK).min(dst.len());
        let (a, b) = (&mut a[..range.len()], &mut b[..range.len()]);
        let part = dst.reborrow().slice(range.clone());
        widen(a, part.as_ref());
        widen(b, src.slice(range));
        a.iter_mut().zip(&*b).for_each(|(a, b)| *a = f(*a, *b));
        narrow(part, a);
    }
}

#[inline(always)]
fn map_direct<D: HalfNumber, S: HalfNumber>(dst: &mut [D], src: &[S], f: impl Fn(f32, f32) -> f32) {
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = put(f(d.widen(), s.widen())));
}

/// Adds `src` to `sum`, in f32. This function is inlined into a [`SimdLoop`].
#[inline(always)]
pub(crate) fn accumulate(sum: &mut [f32], src: FlatRef<'_>) {
    map(FlatMut::F32(sum), src, |sum, s| sum + s);
}

/// A number format that is converted with a few integer operations, in vectors of any width.
trait HalfNumber: Element {
    /// Does the same as [`crate::kernels::f32_access::get`], but makes a NaN quiet, as the half crate does.
    fn widen(self) -> f32;
}

impl HalfNumber for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl HalfNumber for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let quiet_nan = bits | 0x40;
        f32::from_bits(if bits & 0x7fff > 0x7f80 { quiet_nan } else { bits } << 16)
    }
}

/// Converts `src` to f32, exactly. This function is inlined into a [`SimdLoop`].
#[inline(always)]
pub(crate) fn widen(dst: &mut [f32], src: FlatRef<'_>) {
    match src {
        FlatRef::F32(src) => dst.copy_from_slice(src),
        FlatRef::BF16(src) => map_direct(dst, src, |_, s| s),
        FlatRef::F16(src) => f32_access::widen(src, dst),
    }
}

/// Rounds `src` to the dtype of `dst`, to nearest even. This function is inlined into a [`SimdLoop`].
#[inline(always)]
pub(crate) fn narrow(dst: FlatMut<'_>, src: &[f32]) {
    match dst {
        FlatMut::F32(dst) => dst.copy_from_slice(src),
        FlatMut::BF16(dst) => map_direct(dst, src, |_, s| s),
        FlatMut::F16(dst) => f32_access::narrow(src, dst),
    }
}

/// Computes `dst[i] *= factor` in f32 and rounds once.
pub(super) fn scale(dst: FlatMut<'_>, factor: f32) {
    match dst {
        FlatMut::F32(d) => crate::kernels::add::scale_into(d, factor),
        FlatMut::BF16(d) => crate::kernels::add::scale_into(d, factor),
        FlatMut::F16(d) => crate::kernels::add::scale_into(d, factor),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::kernels::simd::InstructionSet;
    use crate::precision::Flat;
    use candle_core::DType;
    use half::f16;

    const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    /// Returns every bf16 and f16 number, and f32 numbers around the ties between them.
    fn every_kind_of_number() -> Vec<f32> {
        let bits = (0..=u16::MAX)
            .flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low));
        bits.map(f32::from_bits).chain((0..=u16::MAX).map(|x| f16::from_bits(x).to_f32())).collect()
    }

    fn bits(flat: &Flat) -> Vec<u32> {
        match flat {
            Flat::F32(v) => v.iter().map(|x| x.to_bits()).collect(),
            Flat::BF16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
            Flat::F16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
        }
    }

    #[test]
    fn every_level_casts_every_number_as_the_half_crate_does() {
        let x = every_kind_of_number();
        let narrow = |dtype| match dtype {
            DType::F32 => Flat::F32(x.clone()),
            DType::BF16 => Flat::BF16(x.iter().map(|x| bf16::from_f32(*x)).collect()),
            _ => Flat::F16(x.iter().map(|x| f16::from_f32(*x)).collect()),
        };
        for src in DTYPES.map(narrow) {
            let wide: Vec<f32> = (0..src.len()).map(|i| src.as_ref().get(i)).collect();
            for dtype in DTYPES {
                let expect = match dtype {
                    _ if dtype == src.dtype() => src.clone(),
                    DType::F32 => Flat::F32(wide.clone()),
                    DType::BF16 => Flat::BF16(wide.iter().map(|x| bf16::from_f32(*x)).collect()),
                    _ => Flat::F16(wide.iter().map(|x| f16::from_f32(*x)).collect()),
                };
                for level in InstructionSet::available() {
                    let mut dst = Flat::zeros(dtype, src.len());
                    level.run(CastLoop { dst: dst.as_mut(), src: src.as_ref() });
                    assert!(bits(&dst) == bits(&expect), "{:?} to {dtype:?} with {level:?}", src.dtype());
                }
            }
        }
    }

    #[test]
    fn long_buffers_get_the_same_bits_with_any_number_of_threads() {
        let n = 5 * CHUNK + 1234;
        let x: Vec<f32> = (0..n).map(|i| (i as f32 - 1e5) * 0.37).collect();
        for (dtype, src) in DTYPES.into_iter().flat_map(|d| DTYPES.map(|s| (d, Flat::from_f32(x.clone(), s)))) {
            let results = [1, 3].map(|threads| {
                let mut dst = Flat::from_f32(x.clone(), dtype);
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    dst.as_mut().add_scaled(src.as_ref(), 0.3);
                    let mut scaled = Flat::zeros(dtype, n);
                    scaled.as_mut().copy_scaled(src.as_ref(), 0.7);
                    (dst, scaled)
                })
            });
            assert!(results[0] == results[1]);
            for i in [0, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK + 1, n - 1] {
                let exact = |x: f32| Flat::from_f32(vec![x], dtype).as_ref().get(0);
                let (before, s) = (exact(x[i]), src.as_ref().get(i));
                assert_eq!(results[0].0.as_ref().get(i), exact(before + s * 0.3));
                assert_eq!(results[0].1.as_ref().get(i), exact(s * 0.7));
            }
        }
    }

    #[test]
    fn sums_across_dtypes_are_rounded_once() {
        let n = 2500;
        let x: Vec<f32> = (0..n).map(|i| 1.0 + i as f32 * 0.37).collect();
        for dst in [DType::F32, DType::BF16, DType::F16] {
            for src in [DType::F32, DType::BF16, DType::F16] {
                let (mut d, s) = (Flat::from_f32(x.clone(), dst), Flat::from_f32(x.clone(), src));
                let before = d.clone();
                d.as_mut().add_scaled(s.as_ref(), 0.5);
                let exact: Vec<f32> = (0..n).map(|i| before.as_ref().get(i) + s.as_ref().get(i) * 0.5).collect();
                assert_eq!(d, Flat::from_f32(exact, dst), "{dst:?} += {src:?}");
                d.as_mut().copy_scaled(s.as_ref(), 2.0);
                let exact: Vec<f32> = (0..n).map(|i| s.as_ref().get(i) * 2.0).collect();
                assert_eq!(d, Flat::from_f32(exact, dst), "{dst:?} = {src:?}");
            }
        }
        let mut d = Flat::zeros(DType::BF16, 1);
        d.as_mut().copy_cast(FlatRef::F32(&[1.003_907]));
        assert_eq!(d.as_ref().get(0), 1.0078125, "just above half a step rounds up");
    }
}
