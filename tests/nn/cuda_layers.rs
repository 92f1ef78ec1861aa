//! The layers on a GPU: values and gradients against the same functions composed of Candle's operations there and against the
//! formulas in f64 on the CPU, slopes by finite differences, and the same bits in every run. Where no GPU answers, each test is
//! skipped; CI runs them on the stand-in of tools/mock_cuda, where threads take turns: shapes are small.

use crate::support::device::gpu;
use crate::support::skips::skipped;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_zero::nn::{self, composed};

/// A GPU; `test` is skipped where none answers.
pub(super) fn gpu_for<T: Fn()>(test: T) -> Option<Device> {
    gpu(0).map_err(|e| skipped(test, format_args!("no CUDA device answers: {e}"))).ok()
}

/// Numbers in [-2, 2) that differ from seed to seed, rounded to `dtype`.
pub(super) fn tensor(shape: &[usize], seed: u32, dtype: DType) -> Tensor {
    let mix = |i: u32| (i ^ seed.wrapping_mul(0x85EB_CA77)).wrapping_mul(2_654_435_761).rotate_left(15) ^ i;
    let n = shape.iter().product::<usize>() as u32;
    let data = (0..n).map(|i| (mix(i).wrapping_mul(0x9E37_79B1) >> 8) as f32 / 4_194_304.0 - 2.0);
    Tensor::from_iter(data, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

pub(super) fn flat(t: &Tensor) -> Vec<f64> {
    let t = t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    t.flatten_all().unwrap().to_vec1().unwrap()
}

pub(super) type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

pub(super) struct Case {
    pub name: String,
    /// Shapes of the differentiable arguments.
    pub shapes: Vec<Vec<usize>>,
    pub layer: Function,
    pub composed: Function,
    /// What 16-bit operands cost beyond one rounding: products of the device round their results.
    pub rounds_on_the_way: bool,
}

pub(super) fn case(
    name: impl Into<String>,
    shapes: &[&[usize]],
    layer: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    let shapes = shapes.iter().map(|s| s.to_vec()).collect();
    Case { name: name.into(), shapes, layer: Box::new(layer), composed: Box::new(composed), rounds_on_the_way: false }
}

/// The result, and the gradient of each argument under a gradient of the result that every dtype has.
pub(super) fn run(function: &Function, args: &[Tensor]) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = args.iter().map(|a| Var::from_tensor(a).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = function(&tensors).unwrap();
    let grad = tensor(y.dims(), 99, DType::BF16).to_dtype(DType::F16).unwrap().to_dtype(y.dtype()).unwrap();
    let grad = grad.to_device(y.device()).unwrap();
    let grads = y.mul(&grad).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |t: &Tensor| grads.get(t).cloned().unwrap_or_else(|| t.zeros_like().unwrap());
    (y.detach(), tensors.iter().map(of).collect())
}

/// Asserts that `got` is `want` up to `tolerance` of the larger of each value and `floor`.
fn close(got: &[f64], want: &[f64], tolerance: f64, floor: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * w.abs().max(floor), "{what}: element {i} is {g}, not {w}");
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(1.0, |most: f64, x| most.max(x.abs()))
}

/// Every case in every dtype: against the composed function on the GPU (f32) and in f64 on the CPU (all), twice with the same bits.
pub(super) fn check(gpu: &Device, cases: Vec<Case>) {
    for case in cases {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
            let host: Vec<Tensor> = (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, dtype)).collect();
            let args: Vec<Tensor> = host.iter().map(|a| a.to_device(gpu).unwrap()).collect();
            let wide: Vec<Tensor> = host.iter().map(|a| a.to_dtype(DType::F64).unwrap()).collect();
            let tolerance = if case.rounds_on_the_way && dtype != DType::F32 { 4.0 * tolerance } else { tolerance };
            let ((y, grads), (want, want_grads)) = (run(&case.layer, &args), run(&case.composed, &wide));
            let what = format!("{} {dtype:?}", case.name);
            assert_eq!(y.device().location(), gpu.location(), "{what}");
            let floor = if case.rounds_on_the_way { largest(&flat(&want)) } else { 1.0 };
            close(&flat(&y), &flat(&want), 1.01 * tolerance, floor, &format!("{what} value"));
            if dtype == DType::F32 {
                let (composed, _) = run(&case.composed, &args);
                close(&flat(&y), &flat(&composed), tolerance, floor, &format!("{what} value of the composed layer"));
            }
            for (i, (got, want)) in grads.iter().zip(&want_grads).enumerate() {
                let want = flat(want);
                assert_eq!(got.dtype(), dtype, "{what} gradient {i}");
                close(&flat(got), &want, 4.0 * tolerance, largest(&want), &format!("{what} gradient {i}"));
            }
            let (again, grads_again) = run(&case.layer, &args);
            assert!(flat(&again) == flat(&y), "{what}: the same values in another run");
            for (a, b) in grads.iter().zip(&grads_again) {
                assert!(flat(a) == flat(b), "{what}: the same gradients in another run");
            }
        }
        finite_differences(gpu, &case);
    }
}

/// Gradients are the slopes of the values, in f32.
fn finite_differences(gpu: &Device, case: &Case) {
    let step = 2f32.powi(-6);
    let args: Vec<Tensor> =
        (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, DType::F32).to_device(gpu).unwrap()).collect();
    let (y, grads) = run(&case.layer, &args);
    let weights = flat(&tensor(y.dims(), 99, DType::BF16));
    let value =
        |args: &[Tensor]| flat(&(case.layer)(args).unwrap()).iter().zip(&weights).map(|(y, w)| y * w).sum::<f64>();
    for (a, grad) in grads.iter().enumerate() {
        let (grad, data) = (flat(grad), flat(&args[a]));
        // A few elements of each argument.
        for i in (0..data.len()).step_by(data.len().div_ceil(4).max(1)) {
            let shifted = |by: f32| {
                let mut data: Vec<f32> = data.iter().map(|x| *x as f32).collect();
                data[i] += by;
                let mut args = args.clone();
                args[a] = Tensor::from_vec(data, args[a].shape(), gpu).unwrap();
                value(&args)
            };
            let slope = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            let error = (slope - grad[i]).abs();
            let allowed = 1e-2 * largest(&grad);
            assert!(error <= allowed, "{} argument {a} element {i}: {slope} not {}", case.name, grad[i]);
        }
    }
}

#[test]
fn activations_and_gates_are_those_of_the_formulas_with_their_slopes() {
    let Some(gpu) = gpu_for(activations_and_gates_are_those_of_the_formulas_with_their_slopes) else { return };
    let mut cases = Vec::new();
    for shape in [vec![1, 1], vec![3, 17], vec![2, 5, 103]] {
        let wide = |a: &[Tensor]| a[0].affine(4.0, 0.0);
        type Elementwise = fn(&Tensor) -> Result<Tensor>;
        let functions: [(&str, Elementwise, Elementwise); 3] = [
            ("gelu_tanh", nn::gelu_tanh, composed::gelu_tanh),
            ("gelu", nn::gelu, composed::gelu),
            ("silu", nn::silu, composed::silu),
        ];
        for (name, layer, reference) in functions {
            let name = format!("{name} {shape:?}");
            cases.push(case(name, &[&shape], move |a| layer(&wide(a)?), move |a| reference(&wide(a)?)));
        }
        let two: [&[usize]; 2] = [&shape, &shape];
        let swiglu = |a: &[Tensor]| nn::swiglu(&a[0], &a[1]);
        cases.push(case(format!("swiglu {shape:?}"), &two, swiglu, |a| composed::swiglu(&a[0], &a[1])));
        let geglu = |a: &[Tensor]| nn::gelu_gated(&a[0], &a[1]);
        cases.push(case(format!("gelu_gated {shape:?}"), &two, geglu, |a| composed::gelu_gated(&a[0], &a[1])));
    }
    check(&gpu, cases);
    let far = Tensor::new(&[-1e18f32, -1e4, -110.0, 110.0, 1e4, 1e18], &gpu).unwrap();
    let functions: [fn(&Tensor) -> Result<Tensor>; 3] = [nn::gelu_tanh, nn::gelu, nn::silu];
    for function in functions {
        let x = Var::from_tensor(&far).unwrap();
        let y = function(&x).unwrap();
        let slope = flat(y.sum_all().unwrap().backward().unwrap().get(&x).unwrap());
        assert_eq!(flat(&y)[..3], [0.0; 3], "far below zero activations are zero");
        assert_eq!(flat(&y)[3..], flat(&far)[3..], "far above they are the identity");
        close(&slope, &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 1e-11, 1.0, "slopes far out");
    }
}

#[test]
fn a_gradient_that_comes_in_parts_is_their_sum() {
    let Some(gpu) = gpu_for(a_gradient_that_comes_in_parts_is_their_sum) else { return };
    for (dtype, tolerance) in [(DType::F32, 4e-6), (DType::BF16, 0.04)] {
        // From layers, from Candle's operations, in whatever order, and of a result that nobody used.
        let function = |silu: fn(&Tensor) -> Result<Tensor>, gelu: fn(&Tensor) -> Result<Tensor>| -> Function {
            Box::new(move |a| {
                let h = silu(&a[0])?;
                let _unused = gelu(&h)?;
                let t = h.t()?.contiguous()?.t()?;
                ((gelu(&h)? + (silu(&h)? + &h)?)? + (silu(&t)? * 0.5)?)? + gelu(&a[0])?
            })
        };
        let x = tensor(&[5, 7], 1, dtype);
        let (y, grads) = run(&function(nn::silu, nn::gelu_tanh), &[x.to_device(&gpu).unwrap()]);
        let (want, want_grads) =
            run(&function(composed::silu, composed::gelu_tanh), &[x.to_dtype(DType::F64).unwrap()]);
        close(&flat(&y), &flat(&want), tolerance, 1.0, "value");
        close(&flat(&grads[0]), &flat(&want_grads[0]), tolerance, 1.0, "gradient");
    }
}
