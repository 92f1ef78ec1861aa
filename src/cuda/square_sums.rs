//! Sums of squares of many arrays in one launch: `kernels/square_sums.cu`.

use super::flat_view::{DeviceFlatRef, each};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, module};
use crate::precision::{LANES, SQUARES_CHUNK};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, LaunchConfig};
use candle_core::{CudaDevice, Result};

const KERNELS: KernelModule = module!("square_sums");

/// The number of chunks that a block sums. A block is one warp.
const CHUNKS_PER_BLOCK: usize = 2;

/// Returns the sum of each array's squares, with the bits of [`sum_of_squares`](crate::precision::sum_of_squares) on
/// the host. A sum is finite if and only if all elements are. Uses one launch for all arrays, and waits for the sums.
///
/// # Errors
/// Returns an error if the driver reports one.
pub(crate) fn sums_of_squares(device: &CudaDevice, arrays: &[DeviceFlatRef<'_>]) -> Result<Vec<f64>> {
    let chunks: usize = arrays.iter().map(chunks_of).sum();
    let mut sums = Vec::new();
    if chunks > 0 {
        sums = device.clone_dtoh(&launch(device, arrays)?)?;
        device.cuda_stream().synchronize().w()?;
    }
    let mut rest = sums.as_slice();
    let sum = |array| {
        let (array_sums, remaining) = rest.split_at(chunks_of(array));
        rest = remaining;
        array_sums.iter().sum()
    };
    Ok(arrays.iter().map(sum).collect())
}

fn chunks_of(array: &DeviceFlatRef<'_>) -> usize {
    array.len().div_ceil(SQUARES_CHUNK)
}

/// Launches the sums of all arrays' chunks, in order. There must be at least one chunk.
pub(super) fn launch(device: &CudaDevice, arrays: &[DeviceFlatRef<'_>]) -> Result<CudaSlice<f64>> {
    let chunks: usize = arrays.iter().map(chunks_of).sum();
    let stream = device.cuda_stream();
    let (mut table, mut guards, mut first) = (Vec::new(), Vec::new(), 0);
    // The kernel searches for a chunk's array, so every array in its table must have at least one chunk.
    for array in arrays.iter().filter(|array| array.len() > 0) {
        // The guard notifies other streams when the elements have been read, so it is dropped after the launch.
        let (pointer, guard) = each!(DeviceFlatRef, array, v => v.device_ptr(&stream));
        let format: u64 = match array {
            DeviceFlatRef::F32(_) => 0,
            DeviceFlatRef::BF16(_) => 1,
            DeviceFlatRef::F16(_) => 2,
        };
        table.push([pointer, array.len() as u64, format, first]);
        guards.push(guard);
        first += chunks_of(array) as u64;
    }
    let device_table: CudaSlice<u64> = device.clone_htod(table.as_flattened())?;
    // SAFETY: the kernel writes all sums.
    let mut sums: CudaSlice<f64> = unsafe { device.alloc(chunks)? };
    let launch = LaunchConfig {
        grid_dim: (chunks.div_ceil(CHUNKS_PER_BLOCK) as u32, 1, 1),
        block_dim: ((CHUNKS_PER_BLOCK * LANES) as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    let function = KERNELS.function(device, "sums_of_squares")?;
    let arguments = arguments![table.len(), &device_table, chunks, SQUARES_CHUNK, &mut sums];
    // SAFETY: the kernel takes a count of arrays and their table, whose pointers point to the stated number of elements
    // in the stated format, the total number of chunks, the number of elements in a chunk, and room for one sum per
    // chunk.
    unsafe { function.run(launch, arguments)? };
    Ok(sums)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cuda::DeviceFlat;
    use crate::precision::{Flat, sum_of_squares};
    use candle_core::DType;
    use candle_core::backend::BackendDevice;

    const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    /// Returns values of both signs over many magnitudes.
    fn values(len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| ((i * 2741 + 877) % 2001) as f32 - 1000.0).map(|x| x * x * x / 1e6).collect()
    }

    /// Returns the sum of the squares of each buffer's elements, starting at element `start`, computed on the device.
    fn sums_from(device: &CudaDevice, start: usize, flats: &[Flat]) -> Vec<f64> {
        let on_device: Vec<_> = flats.iter().map(|flat| DeviceFlat::of(device, flat.as_ref()).unwrap()).collect();
        let range = |flat: &DeviceFlat| start.min(flat.len())..flat.len();
        let arrays: Vec<_> = on_device.iter().map(|flat| flat.slice(range(flat)).unwrap()).collect();
        sums_of_squares(device, &arrays).unwrap()
    }

    fn bits(sums: &[f64]) -> Vec<u64> {
        sums.iter().map(|sum| sum.to_bits()).collect()
    }

    #[test]
    fn sums_of_squares_have_the_bits_of_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let lengths = [0, 1, 15, 17, 511, 512, 1041, 65535, 65536, 65537, 3 * 65536 + 1041];
        let all: Vec<Flat> =
            lengths.iter().flat_map(|len| DTYPES.map(|dtype| Flat::from_f32(values(*len), dtype))).collect();
        for start in [0, 3] {
            let host = |flat: &Flat| sum_of_squares(flat.slice(start.min(flat.len())..flat.len()));
            let on_host: Vec<f64> = all.iter().map(host).collect();
            assert_eq!(bits(&sums_from(&device, start, &all)), bits(&on_host), "all at once, from {start}");
            for (flat, sum) in all.iter().zip(on_host) {
                let single = sums_from(&device, start, std::slice::from_ref(flat));
                assert_eq!(bits(&single), bits(&[sum]), "{} of {:?}, from {start}", flat.len(), flat.dtype());
            }
        }
    }

    #[test]
    fn nothing_has_no_sums_and_empty_arrays_have_zero() {
        let Ok(device) = CudaDevice::new(0) else { return };
        assert!(sums_from(&device, 0, &[]).is_empty());
        assert_eq!(sums_from(&device, 0, &DTYPES.map(|dtype| Flat::zeros(dtype, 0))), [0.0; 3]);
        let between = [Flat::zeros(DType::F32, 0), Flat::from_f32(vec![2.0], DType::F16), Flat::zeros(DType::BF16, 0)];
        assert_eq!(sums_from(&device, 0, &between), [0.0, 4.0, 0.0]);
    }

    #[test]
    fn an_element_that_is_not_finite_makes_its_sum_so_and_no_other() {
        let Ok(device) = CudaDevice::new(0) else { return };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (len, at) in [(1, 0), (17, 16), (1041, 500), (65536 + 5, 0), (65536 + 5, 65536 + 4)] {
                let flats: Vec<Flat> = [false, true, false]
                    .iter()
                    .flat_map(|spoiled| {
                        let mut numbers = values(len);
                        if *spoiled {
                            numbers[at] = bad;
                        }
                        DTYPES.map(|dtype| Flat::from_f32(numbers.clone(), dtype))
                    })
                    .collect();
                let finite: Vec<bool> = sums_from(&device, 0, &flats).iter().map(|sum| sum.is_finite()).collect();
                let expected = [true, false, true].map(|finite| [finite; 3]).concat();
                assert_eq!(finite, expected, "{bad} at {at} of {len}");
            }
        }
    }

    #[test]
    fn the_largest_finite_values_do_not_overflow_the_sum() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let flat = Flat::from_f32(vec![f32::MAX; 65536 + 1], DType::F32);
        assert_eq!(bits(&sums_from(&device, 0, std::slice::from_ref(&flat))), bits(&[sum_of_squares(flat.as_ref())]));
    }
}
