//! Optimizer steps: `kernels/optimizer.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::{KernelArgument, arguments};
use super::kernel_module::{KernelModule, module, suffix};
use crate::util::counted;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{CudaDevice, DType, Result, bail};

const KERNELS: KernelModule = module!("optimizer");

/// The number of threads of a block.
const THREADS: u32 = 256;
/// The number of elements that a block processes, a multiple of the four that a thread processes together.
const CHUNK: usize = 4096;
/// The maximum number of steps in a launch; most models have fewer parameter tensors. The table of the steps takes
/// 56 KiB; for a copy of more than 64 KiB, the driver may make the host wait.
const MAX_STEPS: usize = 1024;

/// The constants of one step of an optimizer that treats every element alike, in the order of its kernel.
///
/// This type appears in a public trait but has no public name, because candle-zero has no kernels for optimizers from
/// other crates.
#[derive(Debug, Clone, Copy)]
pub enum ElementwiseUpdate {
    /// `grad_scale`, both betas, 1 minus each beta, `l2`, `decay`, `step_size`, `root_scale`, `eps`.
    Adam([f32; 10]),
    /// `grad_scale`, both betas, 1 minus each beta, `keep`, `lr`.
    Lion([f32; 7]),
    /// `grad_scale`, `l2`, `lr`, `eps`.
    Adagrad([f32; 4]),
    /// `lr`, `scale`, `l2`.
    Sgd([f32; 3]),
    /// `lr`, `scale`, `l2`, `keep`, `take`, `of_grad`, `of_buffer`.
    SgdMomentum([f32; 7]),
}

impl ElementwiseUpdate {
    /// Returns the kernel's name without dtypes, and its number of states.
    fn kernel(&self) -> (&'static str, usize) {
        match self {
            Self::Adam(_) => ("adam", 2),
            Self::Lion(_) => ("lion", 1),
            Self::Adagrad(_) => ("adagrad", 1),
            Self::Sgd(_) => ("sgd", 0),
            Self::SgdMomentum(_) => ("sgd_momentum", 1),
        }
    }

    /// Returns whether both have the same kernel and constants with the same bits.
    fn is_same(&self, other: &Self) -> bool {
        let bits = |rule: &Self| rule.constants().iter().map(|constant| constant.to_bits()).collect::<Vec<_>>();
        self.kernel() == other.kernel() && bits(self) == bits(other)
    }

    fn constants(&self) -> &[f32] {
        match self {
            Self::Adam(constants) => constants,
            Self::Lion(constants) | Self::SgdMomentum(constants) => constants,
            Self::Adagrad(constants) => constants,
            Self::Sgd(constants) => constants,
        }
    }
}

/// The steps of many arrays, each computed as by `Optimizer::update` on the host, with the same bits. One launch covers
/// all steps with equal constants and dtypes, and reads and writes each array once. The bits of a NaN may differ.
pub(crate) struct MultiTensorStep<'a> {
    device: &'a CudaDevice,
    launches: Vec<MultiTensorLaunch>,
}

/// Steps with equal constants and dtypes.
struct MultiTensorLaunch {
    rule: ElementwiseUpdate,
    grad: DType,
    half: DType,
    /// The addresses of each step's arrays, its number of elements, and the index of its first chunk, in the kernel's
    /// layout.
    table: Vec<[u64; 7]>,
    chunks: usize,
}

impl<'a> MultiTensorStep<'a> {
    /// Creates an empty collection.
    pub fn new(device: &'a CudaDevice) -> Self {
        Self { device, launches: Vec::new() }
    }

    /// Adds a step of one array. `param` and `state`, which are f32, are updated in place, and `half` is written. The
    /// step is fastest if all arrays start at a multiple of four elements.
    ///
    /// # Safety
    /// Until [`run`](Self::run) returns, the memory of the arrays stays valid, no other step writes to it, and any
    /// other use of it is ordered by Candle's stream.
    ///
    /// # Errors
    /// Returns an error if an array has the wrong dtype or length, or if the number of arrays is wrong.
    pub unsafe fn add(
        &mut self,
        rule: &ElementwiseUpdate,
        mut param: DeviceFlatMut<'_>,
        grad: &DeviceFlatRef<'_>,
        mut state: Vec<DeviceFlatMut<'_>>,
        mut half: Option<DeviceFlatMut<'_>>,
    ) -> Result<()> {
        let (kernel, states) = rule.kernel();
        let count = param.len();
        let is_f32 = |array: &DeviceFlatMut<'_>| (array.dtype(), array.len()) == (DType::F32, count);
        if !is_f32(&param) || !state.iter().all(is_f32) || state.len() != states {
            bail!("{kernel}: the parameter and {} must be f32 and of equal length", counted(states, "state"))
        }
        if grad.len() != count {
            bail!("{kernel}: the gradient has {}, but the parameter has {count}", counted(grad.len(), "element"))
        }
        // Kernels expect the dtype of a 16-bit copy, but there may be no such copy.
        let half_dtype = half.as_ref().map_or(DType::BF16, DeviceFlatMut::dtype);
        if half_dtype == DType::F32 || half.as_ref().is_some_and(|half| half.len() != count) {
            bail!("{kernel}: the 16-bit copy must be bf16 or f16 and have {}", counted(count, "element"))
        }
        if count == 0 {
            return Ok(());
        }
        let stream = self.device.cuda_stream();
        let mut states = state.iter_mut().map(|state| state.address(&stream));
        let (first, second) = (states.next().unwrap_or(0), states.next().unwrap_or(0));
        let half = half.as_mut().map_or(0, |half| half.address(&stream));
        let arrays = [param.address(&stream), grad.address(&stream), first, second, half];
        let launch = self.launch(rule, grad.dtype(), half_dtype);
        let [param, grad, first, second, half] = arrays;
        launch.table.push([param, grad, first, second, half, count as u64, launch.chunks as u64]);
        launch.chunks += count.div_ceil(CHUNK);
        Ok(())
    }

    /// Returns the launch that a step belongs to.
    fn launch(&mut self, rule: &ElementwiseUpdate, grad: DType, half: DType) -> &mut MultiTensorLaunch {
        let fits = |launch: &MultiTensorLaunch| {
            (launch.grad, launch.half) == (grad, half) && launch.rule.is_same(rule) && launch.table.len() < MAX_STEPS
        };
        let index = self.launches.iter().position(fits).unwrap_or(self.launches.len());
        if index == self.launches.len() {
            self.launches.push(MultiTensorLaunch { rule: *rule, grad, half, table: Vec::new(), chunks: 0 });
        }
        &mut self.launches[index]
    }

    /// Launches the steps. The host does not wait.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn run(self) -> Result<()> {
        for MultiTensorLaunch { rule, grad, half, table, chunks } in self.launches {
            let name = format!("{}_{}_{}", rule.kernel().0, suffix(grad), suffix(half));
            let function = KERNELS.function(self.device, &name)?;
            let device_table: CudaSlice<u64> = self.device.clone_htod(table.as_flattened())?;
            let threads = LaunchConfig {
                grid_dim: (u32::try_from(chunks).map_err(candle_core::Error::wrap)?, 1, 1),
                block_dim: (THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            let mut arguments = Vec::from(arguments![table.len(), &device_table, CHUNK]);
            arguments.extend(rule.constants().iter().copied().map(KernelArgument::Float));
            // SAFETY: the kernel takes a count of steps and their table, the number of elements in a chunk, its
            // constants, and a block for each chunk. `add` has checked that a step has a parameter with the stated
            // number of elements, a gradient of the first dtype in the kernel's name, as many states as the rule has
            // and null for the others, and a 16-bit copy of the second dtype or null; its caller guarantees that their
            // memory exists and is used only by this launch.
            unsafe { function.run(threads, arguments)? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
