//! A digest of values, used to compare two computations without keeping the first result.

use super::parallel;
use super::simd::{SimdLoop, level};

/// The number of bytes that one task digests.
const CHUNK: usize = 1 << 18;
/// The number of 64-bit words that are absorbed together.
const LANES: usize = 8;

/// Returns a digest of `bytes` and of their number, in one pass at memory speed. Equal bytes have equal digests for any
/// number of threads and any instruction set. Different bytes almost certainly have different digests, unless a
/// collision was constructed on purpose.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    let chunks = parallel::map(bytes.len().div_ceil(CHUNK), |i| {
        level().run(DigestChunk(&bytes[i * CHUNK..bytes.len().min((i + 1) * CHUNK)]))
    });
    chunks.into_iter().fold(mix(bytes.len() as u64), |all, chunk| mix(all ^ chunk).wrapping_add(chunk))
}

/// The loop that computes the digest of one chunk.
struct DigestChunk<'a>(&'a [u8]);

impl SimdLoop for DigestChunk<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let mut keys: [u64; LANES] = std::array::from_fn(|lane| GOLDEN.wrapping_mul(2 * lane as u64 + 1));
        let mut sums = keys;
        let (stripes, rest) = self.0.as_chunks::<{ 8 * LANES }>();
        stripes.iter().for_each(|stripe| absorb(stripe, &mut keys, &mut sums));
        let mut last = [0; 8 * LANES];
        last[..rest.len()].copy_from_slice(rest);
        absorb(&last, &mut keys, &mut sums);
        sums.into_iter().fold(0, |all, sum| mix(all ^ sum))
    }
}

/// An odd number without a pattern: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Absorbs one stripe (the inner loop of XXH3, Collet 2019). Each word is XORed with a key, which changes from stripe
/// to stripe. The product of the two halves of the result is added to the word's lane, and the word itself is added to
/// the neighbouring lane.
#[inline(always)]
fn absorb(stripe: &[u8; 8 * LANES], keys: &mut [u64; LANES], sums: &mut [u64; LANES]) {
    let (numbers, _) = stripe.as_chunks::<8>();
    let mut values = [0; LANES];
    for (value, number) in values.iter_mut().zip(numbers) {
        *value = u64::from_le_bytes(*number);
    }
    for lane in 0..LANES {
        let keyed = values[lane] ^ keys[lane];
        let product = (keyed & 0xffff_ffff).wrapping_mul(keyed >> 32);
        sums[lane] = sums[lane].wrapping_add(product).wrapping_add(values[lane ^ 1]);
        keys[lane] = keys[lane].wrapping_add(GOLDEN);
    }
}

/// Spreads every bit over all others (the finalizer of MurmurHash3).
#[inline(always)]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::kernels::instruction_set::InstructionSet;
    use std::collections::HashSet;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    #[test]
    fn threads_and_instructions_do_not_change_it() {
        let bytes = bytes(3 * CHUNK + 77);
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let [one, four] = [1, 4].map(|threads| pool(threads).install(|| digest(&bytes)));
        assert_eq!(one, four);
        let portable = InstructionSet::Portable.run(DigestChunk(&bytes));
        assert_eq!(level().run(DigestChunk(&bytes)), portable);
    }

    #[test]
    fn every_bit_length_and_order_counts() {
        let first = bytes(CHUNK + 200);
        let mut seen = HashSet::from([digest(&first)]);
        for bit in (0..8 * first.len()).step_by(997) {
            let mut other = first.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(digest(&other)), "bit {bit}");
        }
        for len in [0, 1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 199] {
            assert!(seen.insert(digest(&first[..len])), "{}", crate::util::counted(len, "byte"));
        }
        // Stripes, and then chunks, swap places.
        let mut other = first.clone();
        other[..128].rotate_left(64);
        assert!(seen.insert(digest(&other)));
        let mut other = [bytes(CHUNK), vec![9; CHUNK]].concat();
        seen.insert(digest(&other));
        other.rotate_left(CHUNK);
        assert!(seen.insert(digest(&other)));
    }

    #[test]
    fn signs_of_zero_count() {
        let digests = [[0f32, 1.0], [-0f32, 1.0]].map(|values| digest(bytemuck::cast_slice(&values)));
        assert_ne!(digests[0], digests[1]);
    }
}
