//! The steps of optimizers: `kernels/optimizer.cu`.

use super::flat::{DeviceMut, DeviceRef};
use super::launch::{Argument, arguments};
use super::load::{Module, module, over, suffix};
use candle_core::{CudaDevice, DType, Result, bail};

const KERNELS: Module = module!("optimizer");

/// Elements that a thread takes together.
const FOUR: usize = 4;

/// The constants of one step of an optimizer that treats every element alike, in the order of its kernel.
///
/// It stands in a trait that is public, and has no public name: an optimizer of another crate has no kernel here.
#[derive(Debug, Clone, Copy)]
pub enum Elementwise {
    /// `grad_scale`, both betas, 1 - both, `l2`, `decay`, `step_size`, `root_scale`, `eps`.
    Adam([f32; 10]),
    /// `grad_scale`, both betas, 1 - both, `keep`, `lr`.
    Lion([f32; 7]),
    /// `grad_scale`, `l2`, `lr`, `eps`.
    Adagrad([f32; 4]),
    /// `lr`, `scale`, `l2`.
    Sgd([f32; 3]),
    /// `lr`, `scale`, `l2`, `keep`, `take`, `of_grad`, `of_buffer`.
    SgdMomentum([f32; 7]),
}

impl Elementwise {
    /// The kernel's name without dtypes, and its number of states.
    fn kernel(&self) -> (&'static str, usize) {
        match self {
            Self::Adam(_) => ("adam", 2),
            Self::Lion(_) => ("lion", 1),
            Self::Adagrad(_) => ("adagrad", 1),
            Self::Sgd(_) => ("sgd", 0),
            Self::SgdMomentum(_) => ("sgd_momentum", 1),
        }
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

/// One step on one slice, as `Optimizer::update` does it on the host, with the same bits: one launch, which reads and writes
/// each array once. NaN is NaN, of whatever bits.
///
/// `param` and `state`, which are f32, are updated in place; `half` is written. It is fastest where all arrays begin with a
/// multiple of four elements.
///
/// # Errors
/// Arrays of another dtype, length or number; the driver's.
pub(crate) fn step(
    device: &CudaDevice,
    rule: &Elementwise,
    param: DeviceMut<'_>,
    grad: &DeviceRef<'_>,
    state: Vec<DeviceMut<'_>>,
    half: Option<DeviceMut<'_>>,
) -> Result<()> {
    let (kernel, states) = rule.kernel();
    let count = param.len();
    let is_f32 = |array: &DeviceMut<'_>| (array.dtype(), array.len()) == (DType::F32, count);
    if !is_f32(&param) || !state.iter().all(is_f32) || state.len() != states {
        bail!("{kernel}: the parameter and {states} states are f32 and of equal length")
    }
    if grad.len() != count {
        bail!("{kernel}: a gradient of {} elements for {count}", grad.len())
    }
    // Kernels are made for a half copy; it may be missing.
    let half_dtype = half.as_ref().map_or(DType::BF16, DeviceMut::dtype);
    if half_dtype == DType::F32 || half.as_ref().is_some_and(|half| half.len() != count) {
        bail!("{kernel}: the half copy is bf16 or f16 and has {count} elements")
    }
    if count == 0 {
        return Ok(());
    }
    let function = KERNELS.function(device, &format!("{kernel}_{}_{}", suffix(grad.dtype()), suffix(half_dtype)))?;
    let threads = over(count.div_ceil(FOUR));
    let mut state = state.into_iter();
    let (first, second) = (state.next(), state.next());
    let mut arguments = Vec::from(arguments![count, param, grad, first, second, half]);
    arguments.extend(rule.constants().iter().copied().map(Argument::Float));
    // SAFETY: the kernel takes a count, a parameter of that many elements, a gradient of the first dtype in its name, as many
    // states as it has and null for the others, a half copy of the second dtype or null, and its constants.
    unsafe { function.run(threads, arguments) }
}

#[cfg(test)]
mod tests;
