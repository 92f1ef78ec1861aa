//! Blocks of integers with a scale, encoded and decoded on the GPU: `kernels/block_quantization.cu`.

use super::kernel_launch::arguments;
use super::kernel_module::{KernelFunction, KernelModule, launch_over, module, suffix};
use crate::precision::{BLOCK, IntFormat};
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, LaunchConfig};
use candle_core::{CudaDevice, DType, Result};
use std::ffi::c_int;
use std::sync::Arc;

const KERNELS: KernelModule = module!("block_quantization");

/// The number of threads that process a block.
const WARP: usize = 32;

/// An encoder and decoder of blocks of [`IntFormat`] on one stream, with the same bytes and bits as the host.
pub(super) struct BlockQuantizer {
    encode: KernelFunction,
    decode: KernelFunction,
    sum: KernelFunction,
}

/// The layout of the elements of several ranks, the same number for each, and of the codes that represent them.
#[derive(Clone, Copy)]
pub(super) struct RankChunkLayout {
    /// The number of ranks.
    pub chunks: usize,
    /// The number of elements of each rank.
    pub count: usize,
    /// The distance from the elements of one rank to those of the next.
    pub element_stride: usize,
    /// The distance from the bytes of one rank to those of the next, a multiple of 4.
    pub byte_stride: usize,
}

impl BlockQuantizer {
    /// Loads the kernels for one integer format and one dtype, to run on `stream`.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn new(device: &CudaDevice, stream: &Arc<CudaStream>, ints: IntFormat, dtype: DType) -> Result<Self> {
        let ints = match ints {
            IntFormat::Int8 => "int8",
            IntFormat::Int4 => "int4",
        };
        let kernel = |operation: &str| -> Result<KernelFunction> {
            Ok(KERNELS.function(device, &format!("{operation}_{ints}_{}", suffix(dtype)))?.on(stream))
        };
        Ok(Self { encode: kernel("encode")?, decode: kernel("decode")?, sum: kernel("sum")? })
    }

    /// Encodes the elements of each part into blocks. If `skipped` is given, that part is skipped, and is not
    /// included in the number of parts.
    ///
    /// # Safety
    /// `elements` must point to the elements. `bytes`, an address that is a multiple of 4, must point to memory with
    /// room for their codes. Nothing else may write to either.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub unsafe fn encode(
        &self,
        parts: RankChunkLayout,
        skipped: Option<usize>,
        elements: CUdeviceptr,
        bytes: CUdeviceptr,
    ) -> Result<()> {
        let RankChunkLayout { count, element_stride, byte_stride, .. } = parts;
        let skipped = skipped.unwrap_or(usize::MAX);
        // SAFETY: the kernel takes a count, the bytes, a distance, the elements, a distance, and the index of a part.
        // The caller vouches for the addresses.
        unsafe { parts.run(&self.encode, arguments![count, bytes, byte_stride, elements, element_stride, skipped]) }
    }

    /// Decodes each part's blocks and writes the elements.
    ///
    /// # Safety
    /// Same as for [`encode`](Self::encode).
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub unsafe fn decode(&self, parts: RankChunkLayout, bytes: CUdeviceptr, elements: CUdeviceptr) -> Result<()> {
        let RankChunkLayout { count, element_stride, byte_stride, .. } = parts;
        // SAFETY: the kernel takes a count, the elements, a distance, the bytes, and a distance. The caller vouches for
        // the addresses.
        unsafe { parts.run(&self.decode, arguments![count, elements, element_stride, bytes, byte_stride]) }
    }

    /// Sums `count` unquantized elements of this rank and the decoded elements of the other ranks, in rank order and in
    /// f32, and rounds once.
    ///
    /// # Safety
    /// `to` and `own` must each point to `count` elements, and must be equal or must not overlap. `bytes`, an address
    /// that is a multiple of 4, must point to the codes of `count` elements of each other rank, in rank order.
    /// `byte_stride`, the distance between the codes of two ranks, must be a multiple of 4. Nothing else may write to
    /// any of this memory.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub unsafe fn sum(
        &self,
        count: usize,
        (to, own): (CUdeviceptr, CUdeviceptr),
        (bytes, byte_stride): (CUdeviceptr, usize),
        (rank, ranks): (usize, usize),
    ) -> Result<()> {
        let (rank, ranks) = (rank as c_int, ranks as c_int);
        let layout = RankChunkLayout { chunks: 1, count, element_stride: 0, byte_stride };
        // SAFETY: the kernel takes a count, the sums, the elements, the bytes, a distance, and two ints. The caller
        // vouches for the addresses.
        unsafe { layout.run(&self.sum, arguments![count, to, own, bytes, byte_stride, rank, ranks]) }
    }
}

impl RankChunkLayout {
    /// Runs a kernel with one warp for each block of each part.
    ///
    /// # Safety
    /// Same as for [`KernelFunction::run`].
    unsafe fn run<const N: usize>(
        self,
        kernel: &KernelFunction,
        arguments: [super::kernel_launch::KernelArgument<'_>; N],
    ) -> Result<()> {
        if self.chunks == 0 || self.count == 0 {
            return Ok(());
        }
        let one_part = launch_over(self.count.div_ceil(BLOCK) * WARP);
        let threads = LaunchConfig { grid_dim: (one_part.grid_dim.0, self.chunks as u32, 1), ..one_part };
        // SAFETY: as the caller promises.
        unsafe { kernel.run(threads, arguments) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cuda::DeviceFlat;
    use crate::precision::{Flat, FlatMut, FlatRef};
    use candle_core::backend::BackendDevice;
    use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};

    const LENGTHS: [usize; 8] = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1041, 65537];

    /// Returns numbers whose magnitude differs from block to block. Of every seven blocks, one contains only zeros, and
    /// one contains only subnormal numbers.
    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        let number = |i: usize| {
            let bits = crate::util::mix((seed * 1_000_003 + i) as u64);
            let value = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match i / BLOCK % 7 {
                2 => 0.0,
                4 => value * 1e-38,
                block => value * [1e-3, 1.0, 37.0, 1000.0][block % 4],
            }
        };
        (0..len).map(number).collect()
    }

    fn cases() -> impl Iterator<Item = (IntFormat, DType, usize)> {
        let ints = [IntFormat::Int8, IntFormat::Int4].into_iter();
        let kinds = ints.flat_map(|ints| [DType::F32, DType::BF16, DType::F16].map(|dtype| (ints, dtype)));
        kinds.flat_map(|(ints, dtype)| LENGTHS.map(|len| (ints, dtype, len)))
    }

    fn encoded(ints: IntFormat, values: FlatRef<'_>) -> Vec<u8> {
        let mut bytes = vec![0; ints.encoded_len(values.len())];
        ints.encode(values, &mut bytes);
        bytes
    }

    fn decoded(ints: IntFormat, bytes: &[u8], dtype: DType, len: usize) -> Flat {
        let mut values = Flat::zeros(dtype, len);
        ints.decode(bytes, values.as_mut());
        values
    }

    /// Uploads the bytes of each part, separated by bytes that no kernel may touch.
    fn upload(device: &CudaDevice, parts: &[Vec<u8>], stride: usize) -> CudaSlice<u8> {
        let mut all = vec![0x55u8; stride * parts.len() + 4];
        parts.iter().enumerate().for_each(|(i, part)| all[i * stride..i * stride + part.len()].copy_from_slice(part));
        device.clone_htod(&all).unwrap()
    }

    /// Encodes three of four parts, and decodes them into the first three.
    #[test]
    fn blocks_have_the_bytes_and_the_values_of_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let stream = device.cuda_stream();
        for (ints, dtype, len) in cases() {
            let label = format!("{len} of {dtype:?} as {ints:?}");
            let coder = BlockQuantizer::new(&device, &stream, ints, dtype).unwrap();
            let values = Flat::from_f32(numbers(1, 4 * len + 3), dtype);
            let stride = ints.encoded_len(len).next_multiple_of(4) + 8;
            let mut elements = DeviceFlat::of(&device, values.as_ref()).unwrap();
            let mut bytes = upload(&device, &[vec![], vec![], vec![]], stride);
            let parts = RankChunkLayout { chunks: 3, count: len, element_stride: len + 1, byte_stride: stride };
            for skipped_part in [None, Some(0), Some(2), Some(3)] {
                let (address, use_guard) = elements.address_mut(&stream).unwrap();
                // SAFETY: the addresses are those of four parts of elements and of room for the codes of three.
                unsafe {
                    coder.encode(parts, skipped_part, address, bytes.device_ptr_mut(&stream).0).unwrap();
                    coder.decode(parts, bytes.device_ptr(&stream).0, address).unwrap();
                }
                drop(use_guard);
                let encoded_parts = (0..4).filter(|part| Some(*part) != skipped_part).take(3);
                let part = |part: usize| values.slice(part * (len + 1)..part * (len + 1) + len);
                let on_host: Vec<_> = encoded_parts.map(|i| encoded(ints, part(i))).collect();
                let found = device.clone_dtoh(&bytes).unwrap();
                let expected = device.clone_dtoh(&upload(&device, &on_host, stride)).unwrap();
                assert!(found == expected, "{label}, without {skipped_part:?}");
                let mut expected_values = values.clone();
                for (i, codes) in on_host.iter().enumerate() {
                    let start = i * (len + 1);
                    expected_values.slice_mut(start..start + len).copy_cast(decoded(ints, codes, dtype, len).as_ref());
                }
                assert_eq!(elements.to_host(0..4 * len + 3).unwrap().as_bytes(), expected_values.as_bytes(), "{label}");
                elements.replace(values.as_ref()).unwrap();
            }
        }
    }

    #[test]
    fn sums_are_those_of_the_host_in_rank_order() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let stream = device.cuda_stream();
        for ((ints, dtype, len), rank) in cases().flat_map(|case| [0, 1, 3].map(|rank| (case, rank))) {
            let coder = BlockQuantizer::new(&device, &stream, ints, dtype).unwrap();
            let own = Flat::from_f32(numbers(9, len), dtype);
            let codes: Vec<_> = (0..3).map(|peer| encoded(ints, FlatRef::F32(&numbers(peer, len)))).collect();
            let stride = ints.encoded_len(len).next_multiple_of(4);
            let (bytes, mut values) = (upload(&device, &codes, stride), DeviceFlat::of(&device, own.as_ref()).unwrap());
            let (address, use_guard) = values.address_mut(&stream).unwrap();
            // SAFETY: the addresses are those of the elements and of the codes of as many elements of three peers.
            unsafe {
                coder.sum(len, (address, address), (bytes.device_ptr(&stream).0, stride), (rank, 4)).unwrap();
            }
            drop(use_guard);
            let mut sum = vec![0f32; len];
            let mut part = vec![0f32; len];
            for r in 0..4 {
                match r {
                    r if r == rank => FlatMut::F32(&mut part).copy_cast(own.as_ref()),
                    r => ints.decode(&codes[if r < rank { r } else { r - 1 }], FlatMut::F32(&mut part)),
                }
                sum.iter_mut().zip(&part).for_each(|(sum, x)| *sum = if r == 0 { *x } else { *sum + x });
            }
            let found = values.to_host(0..len).unwrap();
            let label = format!("rank {rank}, {len} of {dtype:?} as {ints:?}");
            assert_eq!(found.as_bytes(), Flat::from_f32(sum, dtype).as_bytes(), "{label}");
        }
    }

    #[test]
    fn what_is_not_finite_takes_its_block_with_it_as_on_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let stream = device.cuda_stream();
        let len = 3 * BLOCK + 5;
        let bad = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for (bad, at, (ints, dtype, _)) in bad
            .into_iter()
            .flat_map(|bad| [0, BLOCK + 77, len - 1].map(|at| (bad, at)))
            .flat_map(|(bad, at)| cases().filter(|case| case.2 == 1).map(move |case| (bad, at, case)))
        {
            let label = format!("{bad} at {at}, {dtype:?} as {ints:?}");
            let coder = BlockQuantizer::new(&device, &stream, ints, dtype).unwrap();
            let mut values = numbers(3, len);
            values[at] = bad;
            let values = Flat::from_f32(values, dtype);
            let stride = ints.encoded_len(len).next_multiple_of(4);
            let parts = RankChunkLayout { chunks: 1, count: len, element_stride: 0, byte_stride: stride };
            let mut elements = DeviceFlat::of(&device, values.as_ref()).unwrap();
            let mut bytes = upload(&device, &[vec![]], stride);
            let (address, use_guard) = elements.address_mut(&stream).unwrap();
            // SAFETY: the addresses are those of the elements and of room for their codes.
            unsafe {
                coder.encode(parts, None, address, bytes.device_ptr_mut(&stream).0).unwrap();
                coder.decode(parts, bytes.device_ptr(&stream).0, address).unwrap();
            }
            drop(use_guard);
            let on_host = encoded(ints, values.as_ref());
            assert_eq!(device.clone_dtoh(&bytes).unwrap()[..on_host.len()], on_host, "{label}");
            let actual = elements.to_host(0..len).unwrap();
            let expected = decoded(ints, &on_host, dtype, len);
            for i in 0..len {
                let (x, y) = (actual.as_ref().get(i), expected.as_ref().get(i));
                assert!(x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan(), "{label}: element {i} is {x}, not {y}");
                assert_eq!(x.is_finite(), i / BLOCK != at / BLOCK, "{label}: element {i}");
            }
        }
    }
}
