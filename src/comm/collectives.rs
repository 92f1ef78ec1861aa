//! The collectives, as sequences of pieces.

use super::exchange::Exchange;
use super::fingerprint::Kind;
use super::shm::SLOT_BYTES;
use crate::error::CommError;
use crate::precision::{Flat, FlatMut, FlatRef};
use candle_core::DType;
use half::{bf16, f16};
use std::ops::Range;

type Result<T> = std::result::Result<T, CommError>;

/// Ranges of at most `step` elements that cover `len`; one empty range for an empty buffer, so that every collective
/// meets its peers at least once.
fn pieces(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(step).max(1);
    (0..count).map(move |i| i * step..((i + 1) * step).min(len))
}

pub(super) fn reduce_scatter(ex: &mut Exchange, input: Flat, tag: u64) -> Result<Flat> {
    ex.begin(Kind::ReduceScatter, input.dtype(), input.len(), tag);
    reduce_chunk(ex, &input)
}

pub(super) fn all_gather(ex: &mut Exchange, shard: Flat, tag: u64) -> Result<Flat> {
    ex.begin(Kind::AllGather, shard.dtype(), shard.len(), tag);
    gather_chunks(ex, &shard)
}

/// A reduce-scatter and an all-gather under one name: the sums are those of [`reduce_scatter`], bit for bit.
pub(super) fn all_reduce(ex: &mut Exchange, mut input: Flat, tag: u64) -> Result<Flat> {
    ex.begin(Kind::AllReduce, input.dtype(), input.len(), tag);
    let len = input.len();
    let chunk = len.div_ceil(ex.size());
    input.extend_zeros(chunk * ex.size() - len);
    let own = reduce_chunk(ex, &input)?;
    drop(input);
    let mut whole = gather_chunks(ex, &own)?;
    whole.truncate(len);
    Ok(whole)
}

pub(super) fn gather_f64(ex: &mut Exchange, values: &[f64]) -> Result<Vec<Vec<f64>>> {
    ex.begin(Kind::Control, DType::F64, values.len(), 0);
    let mine: &[u8] = bytemuck::cast_slice(values);
    assert!(mine.len() <= SLOT_BYTES, "control messages are a few numbers");
    ex.piece(mine.len(), |slot| slot.copy_from_slice(mine))?;
    let rank = ex.rank();
    Ok((0..ex.size())
        .map(|r| if r == rank { values.to_vec() } else { bytemuck::cast_slice(ex.peer(r, 0, mine.len())).to_vec() })
        .collect())
}

pub(super) fn barrier(ex: &mut Exchange) -> Result<()> {
    ex.begin(Kind::Barrier, DType::U8, 0, 0);
    ex.piece(0, |_| {})
}

/// This rank's chunk of the sum of all ranks' `input` (world size x n elements).
fn reduce_chunk(ex: &mut Exchange, input: &Flat) -> Result<Flat> {
    let (world, rank, dtype) = (ex.size(), ex.rank(), input.dtype());
    assert!(input.len().is_multiple_of(world), "{} elements in {world} equal chunks", input.len());
    let chunk = input.len() / world;
    let size = dtype.size_in_bytes();
    // A piece holds the same range of every peer's chunk, one after the other.
    let step = SLOT_BYTES / (size * world);
    let mut out = Flat::zeros(dtype, chunk);
    let mut sum = vec![0f32; step.min(chunk)];
    for range in pieces(chunk, step) {
        let (len, bytes) = (range.len(), range.len() * size);
        let of = |r: usize| input.slice(r * chunk + range.start..r * chunk + range.end);
        ex.piece(bytes * world, |slot| {
            for r in (0..world).filter(|r| *r != rank) {
                slot[r * bytes..(r + 1) * bytes].copy_from_slice(of(r).as_bytes());
            }
        })?;
        for r in 0..world {
            let part = if r == rank { of(rank) } else { typed(dtype, ex.peer(r, rank * bytes, bytes)) };
            add(&mut sum[..len], part, r == 0);
        }
        out.slice_mut(range).copy_cast(FlatRef::F32(&sum[..len]));
    }
    Ok(out)
}

/// The `shard`s of all ranks, in rank order.
fn gather_chunks(ex: &mut Exchange, shard: &Flat) -> Result<Flat> {
    let (world, rank, dtype, n) = (ex.size(), ex.rank(), shard.dtype(), shard.len());
    let size = dtype.size_in_bytes();
    let mut out = Flat::zeros(dtype, n * world);
    out.as_bytes_mut()[rank * n * size..(rank + 1) * n * size].copy_from_slice(shard.as_bytes());
    for range in pieces(n, SLOT_BYTES / size) {
        let bytes = range.len() * size;
        ex.piece(bytes, |slot| slot.copy_from_slice(shard.slice(range.clone()).as_bytes()))?;
        for r in (0..world).filter(|r| *r != rank) {
            let start = (r * n + range.start) * size;
            out.as_bytes_mut()[start..start + bytes].copy_from_slice(ex.peer(r, 0, bytes));
        }
    }
    Ok(out)
}

/// Bytes of a slot as elements. Slots are page-aligned and offsets multiples of the element size.
fn typed(dtype: DType, bytes: &[u8]) -> FlatRef<'_> {
    match dtype {
        DType::F32 => FlatRef::F32(bytemuck::cast_slice(bytes)),
        DType::BF16 => FlatRef::BF16(bytemuck::cast_slice(bytes)),
        DType::F16 => FlatRef::F16(bytemuck::cast_slice(bytes)),
        other => panic!("a flat buffer of {other:?}"),
    }
}

/// `sum` = `part` for the first rank, `sum` += `part` for the others, in f32.
fn add(sum: &mut [f32], part: FlatRef<'_>, first: bool) {
    if first {
        return FlatMut::F32(sum).copy_cast(part);
    }
    match part {
        FlatRef::F32(p) => sum.iter_mut().zip(p).for_each(|(s, p)| *s += p),
        FlatRef::BF16(p) => sum.iter_mut().zip(p).for_each(|(s, p)| *s += bf16::to_f32(*p)),
        FlatRef::F16(p) => sum.iter_mut().zip(p).for_each(|(s, p)| *s += f16::to_f32(*p)),
    }
}
