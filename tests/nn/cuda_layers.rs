//! The layers on a GPU: values, compared with the same functions composed of Candle's operations on the GPU; values and
//! gradients, compared with the formulas in f64 on the CPU; gradients, compared with finite differences; and the same
//! bits in every run. If no GPU answers, each test is skipped; CI runs the tests on the mock in tools/mock_cuda, where
//! threads take turns, so shapes are small.

use crate::support::device::gpu;
use crate::support::skips::skipped;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_zero::nn::{
    self, Activation, LinearEpilogue, LossOptions, RmsNormOptions, Rotary, RotaryLayout, RotaryPairs, Sequences,
    WeightLayout, composed,
};

/// Returns a GPU; if none answers, reports `test` as skipped.
pub(super) fn gpu_for<T: Fn()>(test: T) -> Option<Device> {
    gpu(0).map_err(|e| skipped(test, format_args!("no CUDA device is available: {e}"))).ok()
}

/// Returns numbers in [-2, 2) that differ from seed to seed, rounded to `dtype`.
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
    /// The shapes of the differentiable arguments.
    pub shapes: Vec<Vec<usize>>,
    pub layer: Function,
    pub composed: Function,
    /// Whether 16-bit results have an error beyond one rounding, because products on the device round their results.
    pub rounds_intermediates: bool,
}

pub(super) fn case(
    name: impl Into<String>,
    shapes: &[&[usize]],
    layer: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    let shapes = shapes.iter().map(|s| s.to_vec()).collect();
    Case {
        name: name.into(),
        shapes,
        layer: Box::new(layer),
        composed: Box::new(composed),
        rounds_intermediates: false,
    }
}

/// Returns the result, and the gradient of each argument for a gradient of the result that every dtype can represent.
pub(super) fn run(function: &Function, args: &[Tensor]) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = args.iter().map(|a| Var::from_tensor(a).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = function(&tensors).unwrap();
    let grad = tensor(y.dims(), 99, DType::BF16).to_dtype(DType::F16).unwrap().to_dtype(y.dtype()).unwrap();
    let grad = grad.to_device(y.device()).unwrap();
    let product = y.mul(&grad).unwrap();
    // A scalar has no dimensions to sum.
    let sum = if product.rank() == 0 { product } else { product.sum_all().unwrap() };
    let grads = sum.backward().unwrap();
    let gradient = |t: &Tensor| grads.get(t).cloned().unwrap_or_else(|| t.zeros_like().unwrap());
    (y.detach(), tensors.iter().map(gradient).collect())
}

/// Asserts that each value of `got` differs from that of `want` by at most `tolerance` times `floor`, or times the
/// magnitude of the value of `want` if that is larger.
fn close(got: &[f64], want: &[f64], tolerance: f64, floor: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * w.abs().max(floor), "{what}: element {i} is {g}, not {w}");
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(1.0, |most: f64, x| most.max(x.abs()))
}

/// Compares every case with the composed function in f64 on the CPU (in every dtype) and on the GPU (only values in
/// f32), checks that a second run gives the same bits, and compares gradients with finite differences.
pub(super) fn check(gpu: &Device, cases: Vec<Case>) {
    for case in cases {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
            let host: Vec<Tensor> = (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, dtype)).collect();
            let args: Vec<Tensor> = host.iter().map(|a| a.to_device(gpu).unwrap()).collect();
            let wide: Vec<Tensor> = host.iter().map(|a| a.to_dtype(DType::F64).unwrap()).collect();
            let tolerance = if case.rounds_intermediates && dtype != DType::F32 { 4.0 * tolerance } else { tolerance };
            let ((y, grads), (want, want_grads)) = (run(&case.layer, &args), run(&case.composed, &wide));
            let what = format!("{} {dtype:?}", case.name);
            assert_eq!(y.device().location(), gpu.location(), "{what}");
            let floor = if case.rounds_intermediates { largest(&flat(&want)) } else { 1.0 };
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

/// Compares gradients with finite differences of the values, in f32.
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
        // A few elements of each argument are checked.
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
    let extremes = Tensor::new(&[-1e18f32, -1e4, -110.0, 110.0, 1e4, 1e18], &gpu).unwrap();
    let functions: [fn(&Tensor) -> Result<Tensor>; 3] = [nn::gelu_tanh, nn::gelu, nn::silu];
    for function in functions {
        let x = Var::from_tensor(&extremes).unwrap();
        let y = function(&x).unwrap();
        let slope = flat(y.sum_all().unwrap().backward().unwrap().get(&x).unwrap());
        assert_eq!(flat(&y)[..3], [0.0; 3], "activations far below zero are zero");
        assert_eq!(flat(&y)[3..], flat(&extremes)[3..], "activations far above zero are the identity");
        close(&slope, &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 1e-11, 1.0, "slopes far from zero");
    }
}

#[test]
fn a_gradient_that_comes_in_parts_is_their_sum() {
    let Some(gpu) = gpu_for(a_gradient_that_comes_in_parts_is_their_sum) else { return };
    for (dtype, tolerance) in [(DType::F32, 4e-6), (DType::BF16, 0.04)] {
        // The parts come from layers and from Candle's operations, in any order, and one result is unused.
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

#[test]
fn norms_are_those_of_the_formulas_with_their_slopes() {
    let Some(gpu) = gpu_for(norms_are_those_of_the_formulas_with_their_slopes) else { return };
    let mut cases = Vec::new();
    for shape in [vec![1, 17], vec![2, 3, 33], vec![70, 5], vec![2, 1000], vec![3, 1025]] {
        let width: &[usize] = &shape[shape.len() - 1..];
        cases.push(case(
            format!("layer_norm {shape:?}"),
            &[&shape, width, width],
            |a| nn::layer_norm(&a[0], &a[1], &a[2], 1e-5),
            |a| composed::layer_norm(&a[0], &a[1], &a[2], 1e-5),
        ));
        cases.push(case(
            format!("rms_norm {shape:?}"),
            &[&shape, width],
            |a| nn::rms_norm(&a[0], &a[1], 1e-5),
            |a| composed::rms_norm(&a[0], &a[1], 1e-5),
        ));
    }
    for (plus_one, by_head) in [(true, false), (false, true), (true, true)] {
        let options = RmsNormOptions { eps: 1e-6, plus_one, by_head };
        cases.push(case(
            format!("rms_norm {options:?}"),
            &[&[2, 5, 24], &[if by_head { 8 } else { 24 }]],
            move |a| nn::rms_norm_with(&a[0], &a[1], options),
            move |a| composed::rms_norm_with(&a[0], &a[1], options),
        ));
    }
    check(&gpu, cases);
    // If a row has one element, only the bias (layer norm), or the weight with the element's sign (RMS norm), remains.
    let [x, weight, bias] = [[3, 1], [1, 1], [1, 1]].map(|shape| tensor(&shape, 1, DType::F32));
    let on = |t: &Tensor| t.flatten_all().unwrap().to_device(&gpu).unwrap();
    let column = x.to_device(&gpu).unwrap();
    let y = nn::layer_norm(&column, &on(&weight), &on(&bias), 1e-5).unwrap();
    assert_eq!(flat(&y), flat(&bias).repeat(3));
    let y = nn::rms_norm(&column, &on(&weight), 1e-5).unwrap();
    close(
        &flat(&y),
        &flat(&composed::rms_norm(&x, &weight.flatten_all().unwrap(), 1e-5).unwrap()),
        1e-6,
        1.0,
        "width 1",
    );
}

#[test]
fn norms_with_f32_parameters_take_16_bit_activations() {
    let Some(gpu) = gpu_for(norms_with_f32_parameters_take_16_bit_activations) else { return };
    for dtype in [DType::BF16, DType::F16] {
        let x = tensor(&[130, 24], 1, dtype);
        let [weight, bias] = [3, 4].map(|seed| tensor(&[24], seed, DType::F32).to_device(&gpu).unwrap());
        let layer: Function = Box::new(|a| nn::layer_norm(&a[0], &a[1], &a[2], 1e-5));
        let args = [x.to_device(&gpu).unwrap(), weight.clone(), bias.clone()];
        let wide = [args[0].to_dtype(DType::F32).unwrap(), weight, bias];
        let ((y, grads), (exact, exact_grads)) = (run(&layer, &args), run(&layer, &wide));
        assert_eq!(flat(&y), flat(&exact.to_dtype(dtype).unwrap()));
        assert_eq!(flat(&grads[0]), flat(&exact_grads[0].to_dtype(dtype).unwrap()));
        for i in [1, 2] {
            assert_eq!(grads[i].dtype(), DType::F32);
            assert_eq!(flat(&grads[i]), flat(&exact_grads[i]), "parameters' gradients are those of an f32 input");
        }
    }
}

#[test]
fn rotary_positions_are_those_of_the_formulas_and_turn_back() {
    let Some(gpu) = gpu_for(rotary_positions_are_those_of_the_formulas_and_turn_back) else { return };
    let mut cases = Vec::new();
    for (batch, time, heads, head, first) in [(1, 1, 1, 2, 0), (2, 17, 3, 10, 0), (1, 5, 2, 64, 30)] {
        let rotary = Rotary::new(head, 64, 10_000.0).unwrap();
        cases.push(case(
            format!("rotary {batch} x {time}, {heads} heads of {head}, from {first}"),
            &[&[batch, time, heads * head]],
            move |a| rotary.forward_from(&a[0], first),
            move |a| composed::rotary_from(&a[0], head, 10_000.0, first),
        ));
    }
    let packed = Sequences::from_lengths(&[vec![1, 9, 4], vec![14]], 14).unwrap();
    let positions: Vec<usize> = packed.positions().iter().map(|position| *position as usize).collect();
    let rotary = Rotary::from_frequencies(40, vec![1.0, 0.3, 0.02]).unwrap();
    cases.push(case(
        "rotary in sequences",
        &[&[2, 14, 12]],
        move |a| rotary.forward_in(&a[0], &packed),
        move |a| composed::rotary_at(&a[0], &[1.0, 0.3, 0.02], &positions),
    ));
    for (head, pairs) in [(12, RotaryPairs::Adjacent), (6, RotaryPairs::Adjacent), (10, RotaryPairs::Halves)] {
        let layout = RotaryLayout { head, pairs };
        let rotary = Rotary::with(40, layout, vec![1.0, 0.3, 0.02], |t| 1.0 + t as f64 / 64.0).unwrap();
        let positions: Vec<usize> = (0..34).map(|row| 5 + row % 17).collect();
        cases.push(case(
            format!("rotary in a part of {head} elements, {pairs:?}"),
            &[&[2, 17, 2 * head]],
            move |a| rotary.forward_from(&a[0], 5),
            move |a| composed::rotary_with(&a[0], layout, &[1.0, 0.3, 0.02], &positions, |t| 1.0 + t as f64 / 64.0),
        ));
    }
    check(&gpu, cases);
    // Tables grow with the positions that occur.
    let rotary = Rotary::new(8, 50, 10_000.0).unwrap();
    for time in [3, 50, 7] {
        let x = tensor(&[1, time, 8], 1, DType::F32);
        let y = rotary.forward(&x.to_device(&gpu).unwrap()).unwrap();
        close(&flat(&y), &flat(&rotary.forward(&x).unwrap()), 1e-6, 1.0, "tables");
    }
}

fn ids(shape: &[usize], below: u32, device: &Device) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    Tensor::from_iter((0..n).map(|i| (i * 7 + i * i * 3) % below), device).unwrap().reshape(shape).unwrap()
}

#[test]
fn looked_up_rows_give_their_gradients_in_a_fixed_order() {
    let Some(gpu) = gpu_for(looked_up_rows_give_their_gradients_in_a_fixed_order) else { return };
    let mut cases = Vec::new();
    for (shape, rows, width) in [(vec![1, 1], 1, 1), (vec![2, 40], 7, 17), (vec![9], 1000, 130)] {
        let ids_on = move |device: &Device| ids(&shape, rows as u32, device);
        let (on_gpu, on_host) = (ids_on(&gpu), ids_on(&Device::Cpu));
        let again = on_gpu.clone();
        cases.push(case(
            format!("embedding of {rows} x {width}"),
            &[&[rows, width]],
            move |a| nn::embedding(&again, &a[0]),
            move |a| composed::embedding(if a[0].device().is_cpu() { &on_host } else { &on_gpu }, &a[0]),
        ));
    }
    check(&gpu, cases);
    // Further cases are an f32 table in a 16-bit model, a padding row, and a table that is also the output projection.
    let (indices, table) = (ids(&[3, 17], 11, &gpu), tensor(&[12, 7], 1, DType::F32).to_device(&gpu).unwrap());
    let low: Function = Box::new(move |a| nn::embedding_in(&indices, &a[0], DType::BF16));
    let (y, grads) = run(&low, std::slice::from_ref(&table));
    assert_eq!((y.dtype(), grads[0].dtype()), (DType::BF16, DType::F32));
    let vb = candle_nn::VarMap::new();
    let builder = candle_nn::VarBuilder::from_varmap(&vb, DType::F32, &gpu);
    let layer = nn::Embedding::new(5, 3, builder).unwrap().padding(Some(2));
    let rows = Tensor::new(&[2u32, 1, 2, 4, 1], &gpu).unwrap();
    let loss = candle_nn::Module::forward(&layer, &rows).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    let want = [[0.0; 3], [2.0; 3], [0.0; 3], [0.0; 3], [1.0; 3]].concat();
    assert_eq!(flat(grads.get(layer.weight()).unwrap()), want);
    let tied = |device: Device| -> Function {
        let indices = ids(&[2, 9], 12, &device);
        let targets = ids(&[2, 9], 11, &device);
        Box::new(move |a| {
            let h = nn::embedding(&indices, &a[0])?;
            nn::linear_cross_entropy(&nn::gelu_tanh(&h)?, &a[0], WeightLayout::OutIn, &targets)
        })
    };
    let (loss, grads) = run(&tied(gpu.clone()), std::slice::from_ref(&table));
    let (want, want_grads) = run(&tied(Device::Cpu), &[table.to_device(&Device::Cpu).unwrap()]);
    close(&flat(&loss), &flat(&want), 1e-6, 1.0, "loss of a tied table");
    close(&flat(&grads[0]), &flat(&want_grads[0]), 1e-6, 1.0, "gradient of a tied table");
}

#[test]
fn dropout_has_the_bits_of_the_host() {
    let Some(gpu) = gpu_for(dropout_has_the_bits_of_the_host) else { return };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (shape, p, seed, draw) in
            [(vec![1], 0.5, 1, 0), (vec![3, 17], 0.3, 7, 5), (vec![5, 41, 5], 0.9, 1 << 60, 1 << 23)]
        {
            let x = tensor(&shape, 1, dtype);
            let layer: Function = Box::new(move |a| nn::dropout(&a[0], p, seed, draw));
            let ((y, grads), (want, want_grads)) =
                (run(&layer, &[x.to_device(&gpu).unwrap()]), run(&layer, std::slice::from_ref(&x)));
            assert_eq!(flat(&y), flat(&want), "{shape:?} {dtype:?}");
            assert_eq!(flat(&grads[0]), flat(&want_grads[0]), "{shape:?} {dtype:?}");
        }
    }
}

#[test]
fn losses_are_those_of_the_formulas_with_their_slopes() {
    let Some(gpu) = gpu_for(losses_are_those_of_the_formulas_with_their_slopes) else { return };
    let mut cases = Vec::new();
    for shape in [vec![1, 1], vec![2, 3, 11], vec![5, 257], vec![2, 9001]] {
        let (classes, leading) = (shape[shape.len() - 1] as u32, shape[..shape.len() - 1].to_vec());
        let (i, j) = (ids(&leading, classes, &gpu), ids(&leading, classes, &Device::Cpu));
        let reference = move |x: &Tensor, on_gpu: &Tensor| {
            composed::cross_entropy(&(x * 4.0)?, if x.device().is_cpu() { &j } else { on_gpu })
        };
        let again = i.clone();
        cases.push(case(
            format!("cross_entropy {shape:?}"),
            &[&shape],
            move |a| nn::cross_entropy(&(&a[0] * 4.0)?, &i),
            move |a| reference(&a[0], &again),
        ));
    }
    for (layout, cap, divisor) in [
        (WeightLayout::OutIn, None, None),
        (WeightLayout::InOut, Some(1.7), None),
        (WeightLayout::OutIn, Some(3.0), Some(5.0)),
    ] {
        let (classes, width) = (53, 5);
        let weight = if layout == WeightLayout::OutIn { [classes, width] } else { [width, classes] };
        let options = LossOptions { soft_cap: cap, divisor };
        let (i, j) = (ids(&[2, 9], classes as u32, &gpu), ids(&[2, 9], classes as u32, &Device::Cpu));
        let (a_i, b_i, b_j) = (i.clone(), i.clone(), j.clone());
        let loss = case(
            format!("linear_cross_entropy {layout:?} {options:?}"),
            &[&[2, 9, width], &weight],
            move |a| nn::linear_cross_entropy_with(&a[0], &a[1], layout, &a_i, options),
            move |a| {
                let targets = if a[0].device().is_cpu() { &b_j } else { &b_i };
                let logits = composed::linear(&a[0], &a[1], None, layout)?;
                composed::log_probabilities(&logits, targets, cap)?.sum_all()? / -divisor.unwrap_or(18.0)
            },
        );
        let again = i.clone();
        let logarithms = case(
            format!("linear_log_probabilities {layout:?} {cap:?}"),
            &[&[2, 9, width], &weight],
            move |a| nn::linear_log_probabilities(&a[0], &a[1], layout, &i, cap),
            move |a| {
                let targets = if a[0].device().is_cpu() { &j } else { &again };
                let logits = composed::linear(&a[0], &a[1], None, layout)?;
                composed::log_probabilities(&logits, targets, cap)?.reshape((2, 9))
            },
        );
        cases.extend([loss, logarithms].map(|case| Case { rounds_intermediates: true, ..case }));
    }
    check(&gpu, cases);
}

#[test]
fn rows_that_do_not_count_have_no_loss_and_no_gradient() {
    let Some(gpu) = gpu_for(rows_that_do_not_count_have_no_loss_and_no_gradient) else { return };
    let some = [3i64, -100, 0, -100, -100, 6, 2];
    let (h, weight) = (tensor(&[7, 4], 1, DType::F32), tensor(&[9, 4], 2, DType::F32));
    let options = LossOptions { soft_cap: None, divisor: Some(3.0) };
    for targets in [some.as_slice(), &[-100; 7]] {
        let on = |device: &Device| Tensor::new(targets, device).unwrap();
        let loss = |device: Device| -> Function {
            let targets = on(&device);
            Box::new(move |a| nn::linear_cross_entropy_with(&a[0], &a[1], WeightLayout::OutIn, &targets, options))
        };
        let of_logits = |device: Device| -> Function {
            let targets = on(&device);
            Box::new(move |a| nn::cross_entropy_with(&a[0].matmul(&a[1].t()?)?, &targets, options))
        };
        let logarithms = |device: Device| -> Function {
            let targets = on(&device);
            Box::new(move |a| nn::linear_log_probabilities(&a[0], &a[1], WeightLayout::OutIn, &targets, None))
        };
        let functions: [&dyn Fn(Device) -> Function; 3] = [&loss, &of_logits, &logarithms];
        for (i, function) in functions.into_iter().enumerate() {
            let args = [&h, &weight].map(|t| t.to_device(&gpu).unwrap());
            let (y, grads) = run(&function(gpu.clone()), &args);
            let (want, want_grads) = run(&function(Device::Cpu), &[h.clone(), weight.clone()]);
            close(&flat(&y), &flat(&want), 1e-6, 1.0, &format!("value {i} of {targets:?}"));
            for (got, want) in grads.iter().zip(&want_grads) {
                close(&flat(got), &flat(want), 2e-6, 1.0, &format!("gradient {i} of {targets:?}"));
            }
        }
        let none = nn::cross_entropy(&h.to_device(&gpu).unwrap(), &on(&gpu).affine(0.0, -100.0).unwrap());
        assert!(none.is_err(), "the mean over zero rows");
    }
}

#[test]
fn an_empty_batch_has_an_empty_result() {
    let Some(gpu) = gpu_for(an_empty_batch_has_an_empty_result) else { return };
    let on = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &gpu).unwrap();
    // These are empty views of larger tensors, because a driver may refuse to allocate zero bytes.
    let (x, weight) = (on(&[2, 3, 8]).narrow(0, 1, 0).unwrap(), on(&[8]));
    let rotary = Rotary::new(4, 8, 10_000.0).unwrap();
    let no_ids = Tensor::zeros((2, 3), DType::U32, &gpu).unwrap().narrow(0, 1, 0).unwrap();
    let results = [
        nn::silu(&x).unwrap(),
        nn::swiglu(&x, &x).unwrap(),
        nn::layer_norm(&x, &weight, &weight, 1e-5).unwrap(),
        nn::rms_norm(&x, &weight, 1e-5).unwrap(),
        rotary.forward(&x).unwrap(),
        nn::dropout(&x, 0.5, 1, 1).unwrap(),
        nn::embedding(&no_ids, &on(&[5, 8])).unwrap(),
    ];
    for y in results {
        assert_eq!(y.dims(), [0, 3, 8]);
    }
}

#[test]
fn f64_is_composed_and_gives_what_the_kernels_give() {
    let Some(gpu) = gpu_for(f64_is_composed_and_gives_what_the_kernels_give) else { return };
    let x = tensor(&[3, 8], 1, DType::F64).to_device(&gpu).unwrap();
    let weight = tensor(&[8], 2, DType::F64).to_device(&gpu).unwrap();
    let wide: Function = Box::new(|a| nn::silu(&nn::rms_norm(&a[0], &a[1], 1e-5)?));
    let args = [x, weight];
    let (y, grads) = run(&wide, &args);
    assert_eq!((y.dtype(), grads[1].dtype()), (DType::F64, DType::F64));
    let narrow = args.each_ref().map(|t| t.to_dtype(DType::F32).unwrap());
    let (low, low_grads) = run(&wide, &narrow);
    close(&flat(&low), &flat(&y), 1e-6, 1.0, "value");
    close(&flat(&low_grads[1]), &flat(&grads[1]), 1e-5, 1.0, "gradient");
}

#[test]
fn linear_layers_and_what_follows_are_those_of_the_formulas_with_their_slopes() {
    let Some(gpu) = gpu_for(linear_layers_and_what_follows_are_those_of_the_formulas_with_their_slopes) else { return };
    let mut cases = Vec::new();
    let functions = [
        None,
        Some(Activation::GeluTanh),
        Some(Activation::Gelu),
        Some(Activation::Silu),
        Some(Activation::ReluSquared),
    ];
    for (i, activation) in functions.into_iter().enumerate() {
        let (rows, inputs, outputs) = ([70, 2, 1, 5, 33][i], [7, 1, 33, 9, 12][i], [3, 35, 1, 17, 20][i]);
        let layout = if i % 2 == 0 { WeightLayout::OutIn } else { WeightLayout::InOut };
        let weight = if i % 2 == 0 { [outputs, inputs] } else { [inputs, outputs] };
        let all: [&[usize]; 4] = [&[rows, inputs], &weight, &[outputs], &[rows, outputs]];
        fn epilogue(activation: Option<Activation>, residual: &Tensor) -> LinearEpilogue<'_> {
            LinearEpilogue { activation, residual: Some(residual) }
        }
        cases.push(case(
            format!("linear_then {activation:?} {layout:?}"),
            &all,
            move |a| nn::linear_with_epilogue(&a[0], &a[1], Some(&a[2]), layout, epilogue(activation, &a[3])),
            move |a| composed::linear_with_epilogue(&a[0], &a[1], Some(&a[2]), layout, epilogue(activation, &a[3])),
        ));
        let activation_only = LinearEpilogue { activation, residual: None };
        // One weight is used twice: before the activation, and on the activation's result.
        cases.push(case(
            format!("linear_then twice {activation:?} {layout:?}"),
            &[&[2, 3, 4], &[4, 4]],
            move |a| {
                let h = nn::linear_with_epilogue(&a[0], &a[1], None, layout, activation_only)?;
                nn::add(&nn::linear(&h, &a[1], None, layout)?, &a[0])
            },
            move |a| {
                let h = composed::linear_with_epilogue(&a[0], &a[1], None, layout, activation_only)?;
                composed::linear(&h, &a[1], None, layout)? + &a[0]
            },
        ));
    }
    check(&gpu, cases.into_iter().map(|case| Case { rounds_intermediates: true, ..case }).collect());
}
