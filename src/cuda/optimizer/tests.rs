#![allow(clippy::unwrap_used)]
//! Steps on a GPU against those on the host.

use super::*;
use crate::config::{AdagradConfig, AdamConfig, EightBit, EightBitConfig, LionConfig, OptimizerConfig, SgdConfig};
use crate::cuda::DeviceFlat;
use crate::optim::{Optimizer, StepContext, from_config};
use crate::precision::Flat;
use candle_core::backend::BackendDevice;

/// Numbers of both signs over many magnitudes, zeros and subnormal numbers among them.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let odd = [0.0, -0.0, 1e-40, -1e-40, f32::MIN_POSITIVE, 6e4, -3e-6, 1.003_906_3];
    let number = |i: u64| ((i * 2741 + seed * 877) % 2001) as f32 / 1000.0 - 1.0;
    let of = |i: u64| if i % 37 == 5 { odd[(i / 37 % 8) as usize] } else { number(i).powi(5) };
    (0..len as u64).map(of).collect()
}

/// Every optimizer that has a kernel, in all its variants.
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

/// Steps of the first `len` and then the last elements of buffers of `start + len`, on the host and on a device.
fn compare(device: &CudaDevice, optimizer: &dyn Optimizer, len: usize, start: usize, grad: DType, half: Option<DType>) {
    let all = start + len;
    let states = optimizer.state_names().len();
    let mut masters: Vec<Flat> = vec![Flat::from(numbers(all, 1))];
    masters.extend((0..states).map(|_| Flat::zeros(DType::F32, all)));
    let mut copy = half.map(|dtype| Flat::zeros(dtype, all));
    let upload = |flat: &Flat| DeviceFlat::of(device, flat.as_ref()).unwrap();
    let mut on_device: Vec<DeviceFlat> = masters.iter().map(upload).collect();
    let mut copy_on_device = copy.as_ref().map(upload);
    for step_number in 1..=3 {
        let gradient = Flat::from_f32(numbers(all, 1 + step_number), grad);
        let mut ctx = StepContext::new(optimizer.lr() / step_number as f64, step_number);
        ctx.grad_scale = 0.37;
        if step_number == 3 {
            // As a schedule or a group changes them.
            (ctx.betas, ctx.eps, ctx.weight_decay) = (Some((0.8, 0.9)), Some(1e-6), Some(0.2));
        }
        let uploaded_gradient = upload(&gradient);

        let mut slices: Vec<DeviceMut<'_>> =
            on_device.iter_mut().map(|storage| storage.part_mut(start..all).unwrap()).collect();
        let param = slices.remove(0);
        let copied = copy_on_device.as_mut().map(|storage| storage.part_mut(start..all).unwrap());
        let rule = optimizer.elementwise(&ctx).unwrap();
        let elements_of_grad = uploaded_gradient.part(start..all).unwrap();
        step(device, &rule, param, &elements_of_grad, slices, copied).unwrap();

        let mut slices: Vec<&mut [f32]> = masters
            .iter_mut()
            .map(|flat| match flat {
                Flat::F32(numbers) => &mut numbers[start..],
                _ => unreachable!("master weights and states are f32"),
            })
            .collect();
        let param = slices.remove(0);
        let copied = copy.as_mut().map(|flat| flat.slice_mut(start..all));
        optimizer.update(&ctx, param, gradient.slice(start..all), &mut slices, copied);

        let name = optimizer.name();
        let what = format!("step {step_number} of {name}, {len} from {start}, gradient {grad:?}, half {half:?}");
        let pairs = masters.iter().zip(&on_device).chain(copy.iter().zip(&copy_on_device));
        for (i, (host, storage)) in pairs.enumerate() {
            let mut read = Flat::zeros(host.dtype(), all);
            storage.read(0..all, read.as_mut()).unwrap();
            assert!(read.as_bytes() == host.as_bytes(), "{what}: buffer {i}");
        }
    }
}

#[test]
fn steps_have_the_bits_of_the_host() {
    let Ok(device) = CudaDevice::new(0) else { return };
    for optimizer in optimizers() {
        for grad in [DType::F32, DType::BF16, DType::F16] {
            for half in [None, Some(DType::BF16), Some(DType::F16)] {
                for (len, start) in [(1, 0), (17, 0), (1000, 0), (1000, 4), (1001, 3)] {
                    compare(&device, &*optimizer, len, start, grad, half);
                }
            }
            compare(&device, &*optimizer, 65537, 0, grad, Some(DType::BF16));
        }
    }
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
        let states = states.iter_mut().map(|state| state.part_mut(0..5).unwrap()).collect();
        let half = half.as_mut().map(|(half, len)| half.part_mut(0..*len).unwrap());
        let (param, gradient) = (param.part_mut(0..5).unwrap(), gradient.part(0..grad).unwrap());
        step(&device, &rule, param, &gradient, states, half).is_err()
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
    assert!(optimizer.auxiliary().unwrap().elementwise(&ctx).is_some(), "the auxiliary's are f32");
}
