//! A flat buffer of one floating-point dtype, owned or borrowed: the storage of buckets, shards and messages.

use super::huge_pages::prefer_huge;
use candle_core::DType;
use half::{bf16, f16};
use std::mem::MaybeUninit;
use std::ops::Range;

/// An owned flat buffer of one dtype.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Flat {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    BF16(Vec<bf16>),
    /// IEEE half precision.
    F16(Vec<f16>),
}

/// A borrowed flat buffer.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum FlatRef<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16.
    BF16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

/// A mutably borrowed flat buffer.
#[derive(Debug)]
#[non_exhaustive]
pub enum FlatMut<'a> {
    /// 32-bit floats.
    F32(&'a mut [f32]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

/// Evaluates one generic expression for the dtype of the buffer.
macro_rules! each {
    ($type:ident, $value:expr, $v:ident => $body:expr) => {
        match $value {
            $type::F32($v) => $body,
            $type::BF16($v) => $body,
            $type::F16($v) => $body,
        }
    };
}

impl Flat {
    /// Creates `len` zeros of `dtype`, which must be f32, bf16 or f16. Large buffers use huge pages if the system
    /// supports them.
    pub fn zeros(dtype: DType, len: usize) -> Self {
        let mut flat = match dtype {
            DType::F32 => Self::F32(vec![0.0; len]),
            DType::BF16 => Self::BF16(bytemuck::zeroed_vec(len)),
            DType::F16 => Self::F16(bytemuck::zeroed_vec(len)),
            other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
        };
        each!(Flat, &mut flat, v => prefer_huge(v));
        flat
    }

    /// Converts `values` to `dtype`. f32 values are moved without a copy.
    pub fn from_f32(values: Vec<f32>, dtype: DType) -> Self {
        if dtype == DType::F32 {
            return Self::F32(values);
        }
        let mut flat = Self::with_capacity(dtype, values.len());
        flat.extend_cast(FlatRef::F32(&values));
        flat
    }

    /// Creates an empty buffer of `dtype` with room for `capacity` elements. Large buffers use huge pages, as in
    /// [`zeros`](Self::zeros).
    pub fn with_capacity(dtype: DType, capacity: usize) -> Self {
        let mut flat = match dtype {
            DType::F32 => Self::F32(Vec::with_capacity(capacity)),
            DType::BF16 => Self::BF16(Vec::with_capacity(capacity)),
            DType::F16 => Self::F16(Vec::with_capacity(capacity)),
            other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
        };
        each!(Flat, &mut flat, v => prefer_huge(v));
        flat
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.as_ref().len()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.as_ref().dtype()
    }

    /// Returns the size in bytes.
    pub fn size_in_bytes(&self) -> usize {
        self.len() * self.dtype().size_in_bytes()
    }

    /// Returns the allocated bytes, including spare capacity.
    pub fn capacity_in_bytes(&self) -> usize {
        each!(Flat, self, v => v.capacity()) * self.dtype().size_in_bytes()
    }

    /// Makes room for exactly `more` further elements.
    pub fn reserve_exact(&mut self, more: usize) {
        each!(Flat, self, v => {
            v.reserve_exact(more);
            prefer_huge(v);
        })
    }

    /// Borrows all elements.
    pub fn as_ref(&self) -> FlatRef<'_> {
        match self {
            Self::F32(v) => FlatRef::F32(v),
            Self::BF16(v) => FlatRef::BF16(v),
            Self::F16(v) => FlatRef::F16(v),
        }
    }

    /// Borrows all elements mutably.
    pub fn as_mut(&mut self) -> FlatMut<'_> {
        match self {
            Self::F32(v) => FlatMut::F32(v),
            Self::BF16(v) => FlatMut::BF16(v),
            Self::F16(v) => FlatMut::F16(v),
        }
    }

    /// Borrows elements `range`.
    pub fn slice(&self, range: Range<usize>) -> FlatRef<'_> {
        self.as_ref().slice(range)
    }

    /// Borrows elements `range` mutably.
    pub fn slice_mut(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.as_mut().slice(range)
    }

    /// Sets every element to zero.
    pub fn fill_zero(&mut self) {
        each!(Flat, self, v => v.fill(Default::default()))
    }

    /// Appends `src`, cast to this buffer's dtype with rounding to nearest even.
    pub fn extend_cast(&mut self, src: FlatRef<'_>) {
        match (&mut *self, src) {
            (Self::F32(v), FlatRef::F32(src)) => return v.extend_from_slice(src),
            (Self::BF16(v), FlatRef::BF16(src)) => return v.extend_from_slice(src),
            (Self::F16(v), FlatRef::F16(src)) => return v.extend_from_slice(src),
            _ => {}
        }
        // The zeros are overwritten while they are still in cache.
        const BLOCK: usize = 4096;
        each!(Flat, self, v => v.reserve(src.len()));
        for from in (0..src.len()).step_by(BLOCK) {
            let block = src.slice(from..src.len().min(from + BLOCK));
            let start = self.len();
            self.extend_zeros(block.len());
            self.slice_mut(start..start + block.len()).copy_cast(block);
        }
    }

    /// Appends `count` zeros.
    pub fn extend_zeros(&mut self, count: usize) {
        each!(Flat, self, v => v.resize(v.len() + count, Default::default()))
    }

    /// Keeps only the first `len` elements.
    pub fn truncate(&mut self, len: usize) {
        each!(Flat, self, v => v.truncate(len))
    }

    /// Releases spare capacity.
    pub fn shrink_to_fit(&mut self) {
        each!(Flat, self, v => v.shrink_to_fit())
    }

    /// Returns the memory of the first `len` elements, with arbitrary contents, for a writer that fills it in any order
    /// and then calls [`set_len`](Self::set_len). Elements below the current length stay unchanged.
    pub(crate) fn uninit_bytes(&mut self, len: usize) -> &mut [MaybeUninit<u8>] {
        if self.len() < len {
            self.reserve_exact(len - self.len());
        }
        let bytes = len * self.dtype().size_in_bytes();
        let start: *mut MaybeUninit<u8> = each!(Flat, self, v => v.as_mut_ptr().cast());
        // SAFETY: the allocation has room for `len` elements and is borrowed mutably for as long as the result lives;
        // uninitialized bytes are not claimed to be initialized.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }

    /// Sets the length to `len` elements that have been written.
    ///
    /// # Safety
    /// The first `len` elements must have been initialized, through [`uninit_bytes`](Self::uninit_bytes) or before.
    pub(crate) unsafe fn set_len(&mut self, len: usize) {
        // SAFETY: `len` is within the capacity and initialized, as the caller promises; every bit pattern is a number.
        each!(Flat, self, v => unsafe { v.set_len(len) })
    }

    /// Returns the raw bytes, in this machine's byte order.
    pub fn as_bytes(&self) -> &[u8] {
        self.as_ref().as_bytes()
    }

    /// Returns the raw bytes as a mutable slice.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        each!(Flat, self, v => bytemuck::cast_slice_mut(v))
    }
}

impl<'a> FlatRef<'a> {
    /// Interprets bytes, which must be aligned for `dtype`, as elements.
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a [u8]) -> Self {
        match dtype {
            DType::F32 => Self::F32(bytemuck::cast_slice(bytes)),
            DType::BF16 => Self::BF16(bytemuck::cast_slice(bytes)),
            DType::F16 => Self::F16(bytemuck::cast_slice(bytes)),
            other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(FlatRef, self, v => v.len())
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    /// Returns elements `range`.
    pub fn slice(self, range: Range<usize>) -> FlatRef<'a> {
        match self {
            Self::F32(v) => FlatRef::F32(&v[range]),
            Self::BF16(v) => FlatRef::BF16(&v[range]),
            Self::F16(v) => FlatRef::F16(&v[range]),
        }
    }

    /// Returns the raw bytes, in this machine's byte order.
    pub fn as_bytes(&self) -> &'a [u8] {
        each!(FlatRef, self, v => bytemuck::cast_slice(v))
    }

    /// Returns an owned copy.
    pub fn to_flat(self) -> Flat {
        match self {
            Self::F32(v) => Flat::F32(v.to_vec()),
            Self::BF16(v) => Flat::BF16(v.to_vec()),
            Self::F16(v) => Flat::F16(v.to_vec()),
        }
    }

    /// Returns element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F32(v) => v[i],
            Self::BF16(v) => v[i].to_f32(),
            Self::F16(v) => v[i].to_f32(),
        }
    }
}

impl<'a> FlatMut<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(FlatMut, self, v => v.len())
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns elements `range`.
    pub fn slice(self, range: Range<usize>) -> FlatMut<'a> {
        match self {
            Self::F32(v) => FlatMut::F32(&mut v[range]),
            Self::BF16(v) => FlatMut::BF16(&mut v[range]),
            Self::F16(v) => FlatMut::F16(&mut v[range]),
        }
    }

    /// Splits into the elements before `mid` and the others.
    pub fn split_at(self, mid: usize) -> (FlatMut<'a>, FlatMut<'a>) {
        macro_rules! split {
            ($variant:ident, $v:expr) => {{
                let (front, back) = $v.split_at_mut(mid);
                (FlatMut::$variant(front), FlatMut::$variant(back))
            }};
        }
        match self {
            Self::F32(v) => split!(F32, v),
            Self::BF16(v) => split!(BF16, v),
            Self::F16(v) => split!(F16, v),
        }
    }

    /// Borrows the same buffer for a shorter time.
    pub fn reborrow(&mut self) -> FlatMut<'_> {
        match self {
            Self::F32(v) => FlatMut::F32(v),
            Self::BF16(v) => FlatMut::BF16(v),
            Self::F16(v) => FlatMut::F16(v),
        }
    }

    /// Returns a view for reading.
    pub fn as_ref(&self) -> FlatRef<'_> {
        match self {
            Self::F32(v) => FlatRef::F32(v),
            Self::BF16(v) => FlatRef::BF16(v),
            Self::F16(v) => FlatRef::F16(v),
        }
    }

    /// Sets every element to zero.
    pub fn fill_zero(&mut self) {
        each!(FlatMut, self, v => v.fill(Default::default()))
    }
}

impl From<Vec<f32>> for Flat {
    fn from(v: Vec<f32>) -> Self {
        Self::F32(v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_that_is_filled_in_any_order_becomes_elements() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut flat = Flat::zeros(dtype, 2);
            let (size, whole) = (dtype.size_in_bytes(), Flat::zeros(dtype, 5));
            let room = flat.uninit_bytes(5);
            assert_eq!(room.len(), 5 * size);
            let (first, second) = whole.as_bytes()[2 * size..].split_at(size);
            room[3 * size..].write_copy_of_slice(second);
            room[2 * size..3 * size].write_copy_of_slice(first);
            // SAFETY: two elements were there, and three were written.
            unsafe { flat.set_len(5) };
            assert_eq!(flat.as_bytes(), whole.as_bytes());
        }
    }
}
