#![allow(clippy::unwrap_used)]
//! Compares steps on a GPU with those on the host.

use super::*;
use crate::config::{AdagradConfig, AdamConfig, EightBit, EightBitConfig, LionConfig, OptimizerConfig, SgdConfig};
use crate::cuda::DeviceFlat;
use crate::optim::{Optimizer, StepContext, from_config};
use crate::precision::Flat;
use candle_core::backend::BackendDevice;
use std::ops::Range;

/// Returns numbers of both signs over many magnitudes, including zeros and subnormal numbers.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let special = [0.0, -0.0, 1e-40, -1e-40, f32::MIN_POSITIVE, 6e4, -3e-6, 1.003_906_3];
    let number = |i: u64| ((i * 2741 + seed * 877) % 2001) as f32 / 1000.0 - 1.0;
    let value = |i: u64| if i % 37 == 5 { special[(i / 37 % 8) as usize] } else { number(i).powi(5) };
    (0..len as u64).map(value).collect()
}

/// Returns every optimizer that has a kernel, in all its variants.
fn optimizers() -> Vec<Box<dyn Optimizer>> {
    let mut configs = Vec::new();
    for (decoupled, bias_correction, weight_decay) in
        [(true, true, 0.1), (false, true, 0.1), (true, false, 0.0), (false, false, 0.01)]
    {
        let (lr, betas, eps) = (1e-2, (0.9, 0.95), 1e-8);
        configs.push(OptimizerConfig::Adam(AdamConfig { lr, betas, eps, weight_decay, bias_correction, decoupled }));
    }
    for weight_decay in [0.0, 0.1] {
        configs.push(OptimizerConfig::Lion(LionConfig { lr: 1e-3, betas: (0.9, 0.99), weight_decay }));
        configs.push(OptimizerConfig::Adagrad(AdagradConfig { lr: 1e-2, eps: 1e-10, weight_decay }));
        for (momentum, dampening, nesterov) in [(0.0, 0.0, false), (0.9, 0.1, false), (0.9, 0.0, true)] {
            configs.push(OptimizerConfig::Sgd(SgdConfig { lr: 1e-2, momentum, dampening, weight_decay, nesterov }));
        }
    }
    configs.iter().map(from_config).collect()
}

/// A parameter, its states and its 16-bit copy, on the host and on a device. Elements `range` of each form the array of
/// one step.
struct Arrays {
    range: Range<usize>,
    host: Vec<Flat>,
    half: Option<Flat>,
    on_device: Vec<DeviceFlat>,
    half_on_device: Option<DeviceFlat>,
}

impl Arrays {
    /// Creates arrays in which `len` elements follow `start` others and precede two more.
    fn new(device: &CudaDevice, states: usize, (len, start): (usize, usize), half: Option<DType>) -> Self {
        let all = start + len + 2;
        let mut host: Vec<Flat> = vec![Flat::from(numbers(all, len as u64))];
        host.extend((0..states).map(|_| Flat::zeros(DType::F32, all)));
        let half = half.map(|dtype| Flat::zeros(dtype, all));
        let upload = |flat: &Flat| DeviceFlat::of(device, flat.as_ref()).unwrap();
        let on_device = host.iter().map(upload).collect();
        let half_on_device = half.as_ref().map(upload);
        Self { range: start..start + len, host, half, on_device, half_on_device }
    }

    /// Adds a step on the device.
    fn add(&mut self, steps: &mut MultiTensorStep<'_>, rule: &ElementwiseUpdate, gradient: &DeviceFlat) {
        let slice = |flat| DeviceFlat::slice_mut(flat, self.range.clone()).unwrap();
        let mut slices: Vec<DeviceFlatMut<'_>> = self.on_device.iter_mut().map(slice).collect();
        let param = slices.remove(0);
        let half = self.half_on_device.as_mut().map(slice);
        // SAFETY: all memory exists when the steps run, is separate for each array and is used only on Candle's stream.
        unsafe { steps.add(rule, param, &gradient.slice(self.range.clone()).unwrap(), slices, half).unwrap() }
    }

    /// Computes the same step on the host.
    fn update(&mut self, optimizer: &dyn Optimizer, ctx: &StepContext, gradient: &Flat) {
        let numbers = |flat| match flat {
            &mut Flat::F32(ref mut numbers) => &mut numbers[self.range.clone()],
            _ => unreachable!("master weights and states are f32"),
        };
        let mut slices: Vec<&mut [f32]> = self.host.iter_mut().map(numbers).collect();
        let param = slices.remove(0);
        let half = self.half.as_mut().map(|flat| flat.slice_mut(self.range.clone()));
        optimizer.update(ctx, param, gradient.slice(self.range.clone()), &mut slices, half);
    }

    fn check(&self, label: &str) {
        let pairs = self.host.iter().zip(&self.on_device).chain(self.half.iter().zip(&self.half_on_device));
        for (i, (host, on_device)) in pairs.enumerate() {
            let actual = on_device.to_host(0..host.len()).unwrap();
            assert!(actual.as_bytes() == host.as_bytes(), "{label}, elements {:?}: buffer {i}", self.range);
        }
    }
}

/// Runs three steps on the host and on a device, where one launch updates all arrays. Each array is given by its length
/// and its start.
fn compare(
    device: &CudaDevice,
    optimizer: &dyn Optimizer,
    arrays: &[(usize, usize)],
    grad: DType,
    half: Option<DType>,
) {
    let states = optimizer.state_names().len();
    let mut all: Vec<Arrays> = arrays.iter().map(|array| Arrays::new(device, states, *array, half)).collect();
    for number in 1..=3 {
        let mut ctx = StepContext::new(optimizer.lr() / number as f64, number);
        ctx.grad_scale = 0.37;
        if number == 3 {
            // A change like those made by a schedule or a parameter group.
            (ctx.betas, ctx.eps, ctx.weight_decay) = (Some((0.8, 0.9)), Some(1e-6), Some(0.2));
        }
        let rule = optimizer.elementwise(&ctx).unwrap();
        let of = |arrays: &Arrays| Flat::from_f32(numbers(arrays.host[0].len(), 1 + number), grad);
        let gradients: Vec<Flat> = all.iter().map(of).collect();
        let uploaded: Vec<_> = gradients.iter().map(|flat| DeviceFlat::of(device, flat.as_ref()).unwrap()).collect();
        let mut steps = MultiTensorStep::new(device);
        all.iter_mut().zip(&uploaded).for_each(|(arrays, gradient)| arrays.add(&mut steps, &rule, gradient));
        assert_eq!(steps.launches.len(), 1, "one launch for all");
        steps.run().unwrap();
        all.iter_mut().zip(&gradients).for_each(|(arrays, gradient)| arrays.update(optimizer, &ctx, gradient));
        let label = format!("step {number} of {}, gradient {grad:?}, half {half:?}", optimizer.name());
        all.iter().for_each(|arrays| arrays.check(&label));
    }
}

#[test]
fn steps_have_the_bits_of_the_host() {
    let Ok(device) = CudaDevice::new(0) else { return };
    let lengths = [1, 17, 0, 3, 1041, 1000, 4096, 4097];
    let short: Vec<_> = lengths.iter().flat_map(|len| [0, 3, 4].map(|start| (*len, start))).collect();
    for optimizer in optimizers() {
        for grad in [DType::F32, DType::BF16, DType::F16] {
            for half in [None, Some(DType::BF16), Some(DType::F16)] {
                compare(&device, &*optimizer, &short, grad, half);
            }
            let long = [(65537, 0), (1, 0), (65537, 3)];
            compare(&device, &*optimizer, &long, grad, Some(DType::BF16));
            compare(&device, &*optimizer, &long[..1], grad, None);
        }
    }
}

#[test]
fn arrays_of_equal_constants_and_dtypes_share_a_launch() {
    let Ok(device) = CudaDevice::new(0) else { return };
    let config = LionConfig { lr: 1e-3, betas: (0.9, 0.99), weight_decay: 0.1 };
    let optimizer = from_config(&OptimizerConfig::Lion(config));
    let mut all = Vec::new();
    let mut steps = MultiTensorStep::new(&device);
    for (i, grad) in [DType::F32, DType::BF16].repeat(6).into_iter().enumerate() {
        // Groups with separate rates, and copies of both formats.
        let ctx = StepContext::new([1e-2, 1e-3, 1e-4][i / 4], 1);
        let half = [None, Some(DType::BF16), Some(DType::F16)][i % 3];
        let mut arrays = Arrays::new(&device, 1, (1000 * i, i % 2), half);
        let gradient = Flat::from_f32(numbers(arrays.host[0].len(), 7), grad);
        let uploaded = DeviceFlat::of(&device, gradient.as_ref()).unwrap();
        arrays.add(&mut steps, &optimizer.elementwise(&ctx).unwrap(), &uploaded);
        arrays.update(&*optimizer, &ctx, &gradient);
        all.push((arrays, uploaded));
    }
    let launches: Vec<_> = steps.launches.iter().map(|launch| (launch.grad, launch.half, launch.table.len())).collect();
    let (f32, bf16, f16) = (DType::F32, DType::BF16, DType::F16);
    let by_rate = [
        vec![(bf16, bf16, 2), (f32, f16, 1)],
        vec![(f32, bf16, 2), (bf16, f16, 1), (bf16, bf16, 1)],
        vec![(f32, f16, 1), (bf16, bf16, 1), (f32, bf16, 1), (bf16, f16, 1)],
    ];
    assert_eq!(launches, by_rate.concat(), "parameters without a copy use the bf16 kernel; empty ones are skipped");
    steps.run().unwrap();
    all.iter().for_each(|(arrays, _)| arrays.check("several launches"));
}

#[test]
fn a_launch_takes_so_many_arrays_and_the_next_one_the_others() {
    let Ok(device) = CudaDevice::new(0) else { return };
    let config = SgdConfig { lr: 1e-2, momentum: 0.0, dampening: 0.0, weight_decay: 0.1, nesterov: false };
    let optimizer = from_config(&OptimizerConfig::Sgd(config));
    let ctx = StepContext::new(1e-2, 1);
    let count = MAX_STEPS + 5;
    let mut arrays = Arrays::new(&device, 0, (count, 0), None);
    let gradient = Flat::from(numbers(count + 2, 3));
    let uploaded = DeviceFlat::of(&device, gradient.as_ref()).unwrap();
    let mut steps = MultiTensorStep::new(&device);
    let rule = optimizer.elementwise(&ctx).unwrap();
    for i in 0..count {
        let param = arrays.on_device[0].slice_mut(i..i + 1).unwrap();
        // SAFETY: all memory exists when the steps run, and each element is used once, only on Candle's stream.
        unsafe { steps.add(&rule, param, &uploaded.slice(i..i + 1).unwrap(), Vec::new(), None).unwrap() }
    }
    let lengths: Vec<_> = steps.launches.iter().map(|launch| launch.table.len()).collect();
    assert_eq!(lengths, [MAX_STEPS, 5]);
    steps.run().unwrap();
    arrays.update(&*optimizer, &ctx, &gradient);
    arrays.check("two launches");
}

#[test]
fn a_step_of_buffers_that_do_not_fit_is_an_error() {
    let Ok(device) = CudaDevice::new(0) else { return };
    let config = SgdConfig { lr: 1e-2, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false };
    let rule = from_config(&OptimizerConfig::Sgd(config)).elementwise(&StepContext::new(1e-2, 1)).unwrap();
    let refused = |param: DType, grad: usize, states: &[DType], half: Option<(DType, usize)>| {
        let zeros = |dtype: DType, len: usize| DeviceFlat::zeros(&device, dtype, len).unwrap();
        let (mut param, gradient) = (zeros(param, 5), zeros(DType::BF16, grad));
        let mut states: Vec<DeviceFlat> = states.iter().map(|dtype| zeros(*dtype, 5)).collect();
        let mut half = half.map(|(dtype, len)| (zeros(dtype, len), len));
        let states = states.iter_mut().map(|state| state.slice_mut(0..5).unwrap()).collect();
        let half = half.as_mut().map(|(half, len)| half.slice_mut(0..*len).unwrap());
        let (param, gradient) = (param.slice_mut(0..5).unwrap(), gradient.slice(0..grad).unwrap());
        let mut steps = MultiTensorStep::new(&device);
        // SAFETY: all memory exists when the steps run, is separate for each array and is used only on Candle's stream.
        let refused = unsafe { steps.add(&rule, param, &gradient, states, half).is_err() };
        assert_eq!(steps.launches.is_empty(), refused);
        steps.run().unwrap();
        refused
    };
    let (f32, bf16) = (DType::F32, DType::BF16);
    assert!(!refused(f32, 5, &[f32], Some((bf16, 5))));
    assert!(refused(bf16, 5, &[f32], None));
    assert!(refused(f32, 4, &[f32], None));
    assert!(refused(f32, 5, &[], None));
    assert!(refused(f32, 5, &[f32, f32], None));
    assert!(refused(f32, 5, &[bf16], None));
    assert!(refused(f32, 5, &[f32], Some((f32, 5))));
    assert!(refused(f32, 5, &[f32], Some((bf16, 4))));
}

#[test]
fn optimizers_whose_steps_need_more_have_no_kernel() {
    let adam = AdamConfig {
        lr: 1e-3,
        betas: (0.9, 0.99),
        eps: 1e-8,
        weight_decay: 0.0,
        bias_correction: true,
        decoupled: true,
    };
    let eight_bit = EightBitConfig { kind: EightBit::AdamW(adam), min_8bit_size: 4096 };
    let optimizer = from_config(&OptimizerConfig::EightBit(eight_bit));
    let ctx = StepContext::new(1e-3, 1);
    assert!(optimizer.elementwise(&ctx).is_none(), "states of eight bits");
    assert!(optimizer.auxiliary().unwrap().elementwise(&ctx).is_some(), "the auxiliary optimizer's states are f32");
}
