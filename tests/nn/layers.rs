//! Tests of every layer op: values and gradients are compared with the same function composed of Candle's ops in f64,
//! and gradients are also compared with finite differences of the op itself.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_zero::nn::{
    self, Activation, AttentionOptions, LinearEpilogue, LossOptions, RmsNormOptions, Sequences, WeightLayout, composed,
};

/// Returns numbers from -1 to 1 that differ from seed to seed.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mix = |i: u32| {
        let mut x = i.wrapping_mul(0x9E37_79B1).wrapping_add(seed.wrapping_mul(0x85EB_CA77)) ^ 0x5A5A_1234;
        x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
        x = (x ^ (x >> 12)).wrapping_mul(0x297A_2D39);
        x ^ (x >> 15)
    };
    (0..n as u32).map(|i| mix(i) as f32 / 2f32.powi(31) - 1.0).collect()
}

/// Returns a tensor of [`numbers`], rounded to `dtype`.
pub fn tensor(shape: &[usize], seed: u32, dtype: DType) -> Tensor {
    let data = numbers(shape.iter().product(), seed);
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

pub struct Case {
    name: String,
    /// The shapes of the differentiable arguments.
    shapes: Vec<Vec<usize>>,
    op: Function,
    composed: Function,
    /// Whether intermediate 16-bit numbers are also rounded, as products of 16-bit operands require: probabilities in
    /// attention, logits before a softmax, the value before an activation.
    rounds_intermediates: bool,
}

pub fn case(
    name: impl Into<String>,
    shapes: &[&[usize]],
    op: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    let shapes = shapes.iter().map(|s| s.to_vec()).collect();
    let (op, composed): (Function, Function) = (Box::new(op), Box::new(composed));
    Case { name: name.into(), shapes, op, composed, rounds_intermediates: false }
}

pub fn rounding_intermediates(case: Case) -> Case {
    Case { rounds_intermediates: true, ..case }
}

fn ids(shape: &[usize], below: u32) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    Tensor::from_iter((0..n).map(|i| (i * 7 + i * i * 3) % below), &Device::Cpu).unwrap().reshape(shape).unwrap()
}

fn epilogue(activation: Option<Activation>, residual: &Tensor) -> LinearEpilogue<'_> {
    LinearEpilogue { activation, residual: Some(residual) }
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (rows, inputs, outputs) in [(vec![3, 2], 5, 4), (vec![1], 1, 1), (vec![2, 7], 33, 3), (vec![131], 6, 259)] {
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            let x = [&rows[..], &[inputs]].concat();
            let w = if layout == WeightLayout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
            all.push(case(
                format!("linear {rows:?} {inputs}->{outputs} {layout:?}"),
                &[&x, &w],
                move |a| nn::linear(&a[0], &a[1], None, layout),
                move |a| composed::linear(&a[0], &a[1], None, layout),
            ));
            all.push(case(
                format!("linear {rows:?} {inputs}->{outputs} {layout:?} with bias"),
                &[&x, &w, &[outputs]],
                move |a| nn::linear(&a[0], &a[1], Some(&a[2]), layout),
                move |a| composed::linear(&a[0], &a[1], Some(&a[2]), layout),
            ));
        }
    }
    for (shape, rows, width) in [(vec![2, 5], 7, 3), (vec![40], 150, 9), (vec![1, 1], 1, 1)] {
        let (i, j) = (ids(&shape, rows as u32), ids(&shape, rows as u32));
        all.push(case(
            format!("embedding {shape:?} of {rows}x{width}"),
            &[&[rows, width]],
            move |a| nn::embedding(&i, &a[0]),
            move |a| composed::embedding(&j, &a[0]),
        ));
    }
    for shape in [vec![3, 5], vec![2, 3, 33], vec![150, 4]] {
        let width = shape[shape.len() - 1];
        all.push(case(
            format!("layer_norm {shape:?}"),
            &[&shape, &[width], &[width]],
            |a| nn::layer_norm(&a[0], &a[1], &a[2], 1e-5),
            |a| composed::layer_norm(&a[0], &a[1], &a[2], 1e-5),
        ));
    }
    // The input is scaled so that both tails and the bend between them occur.
    all.push(case(
        "gelu_tanh",
        &[&[3, 1501]],
        |a| nn::gelu_tanh(&(&a[0] * 8.0)?),
        |a| composed::gelu_tanh(&(&a[0] * 8.0)?),
    ));
    for (batch, time, heads, head) in [(2, 5, 3, 4), (1, 1, 1, 1), (2, 67, 2, 5), (1, 130, 1, 3)] {
        all.push(rounding_intermediates(case(
            format!("causal_attention {batch} x {time}, {heads} heads of {head}"),
            &[&[batch, time, 3 * heads * head]],
            move |a| nn::causal_attention(&(&a[0] * 2.0)?, heads),
            move |a| composed::causal_attention(&(&a[0] * 2.0)?, heads),
        )));
    }
    for (batch, time, heads, kv_heads, head) in [(2, 5, 4, 2, 4), (1, 70, 6, 1, 3), (1, 33, 2, 2, 64)] {
        let (q, kv) = ([batch, time, heads * head], [batch, time, kv_heads * head]);
        all.push(rounding_intermediates(case(
            format!("grouped_attention {batch} x {time}, {heads} heads and {kv_heads} of {head}"),
            &[&q, &kv, &kv],
            move |a| nn::grouped_attention(&(&a[0] * 2.0)?, &a[1], &a[2], heads, kv_heads),
            move |a| composed::grouped_attention(&(&a[0] * 2.0)?, &a[1], &a[2], heads, kv_heads),
        )));
    }
    all.extend(cases_of_fine_tuning());
    all.extend(super::grids::cases());
    for activation in [
        None,
        Some(Activation::GeluTanh),
        Some(Activation::Gelu),
        Some(Activation::Silu),
        Some(Activation::ReluSquared),
    ] {
        let (rows, inputs, outputs) = (19, 7, 35);
        let all_shapes: [&[usize]; 4] = [&[rows, inputs], &[inputs, outputs], &[outputs], &[rows, outputs]];
        all.push(rounding_intermediates(case(
            format!("linear_then {activation:?}"),
            &all_shapes,
            move |a| {
                nn::linear_with_epilogue(&a[0], &a[1], Some(&a[2]), WeightLayout::InOut, epilogue(activation, &a[3]))
            },
            move |a| {
                composed::linear_with_epilogue(
                    &a[0],
                    &a[1],
                    Some(&a[2]),
                    WeightLayout::InOut,
                    epilogue(activation, &a[3]),
                )
            },
        )));
    }
    for shape in [vec![3, 17], vec![1, 2], vec![2, 3, 64]] {
        let width = [shape[shape.len() - 1]];
        all.push(case(
            format!("rms_norm {shape:?}"),
            &[&shape, &width],
            |a| nn::rms_norm(&a[0], &a[1], 1e-5),
            |a| composed::rms_norm(&a[0], &a[1], 1e-5),
        ));
        all.push(case(format!("silu {shape:?}"), &[&shape], |a| nn::silu(&a[0]), |a| composed::silu(&a[0])));
        let two: [&[usize]; 2] = [&shape, &shape];
        let (op, composed) = (|a: &[Tensor]| nn::swiglu(&a[0], &a[1]), |a: &[Tensor]| composed::swiglu(&a[0], &a[1]));
        all.push(case(format!("swiglu {shape:?}"), &two, op, composed));
        all.push(case(format!("add {shape:?}"), &two, |a| nn::add(&a[0], &a[1]), |a| &a[0] + &a[1]));
    }
    for (batch, time, heads, head) in [(2, 5, 3, 4), (1, 1, 1, 2), (1, 40, 2, 64)] {
        let rotary = nn::Rotary::new(head, 64, 10_000.0).unwrap();
        all.push(case(
            format!("rotary {batch} x {time}, {heads} heads of {head}"),
            &[&[batch, time, heads * head]],
            move |a| rotary.forward(&a[0]),
            move |a| composed::rotary(&a[0], head, 10_000.0),
        ));
    }
    for (layout, classes) in [(WeightLayout::OutIn, 11), (WeightLayout::InOut, 300)] {
        let targets = ids(&[2, 9], classes as u32);
        let weight = if layout == WeightLayout::OutIn { [classes, 5] } else { [5, classes] };
        let again = targets.clone();
        all.push(rounding_intermediates(case(
            format!("linear_cross_entropy {layout:?}"),
            &[&[2, 9, 5], &weight],
            move |a| nn::linear_cross_entropy(&a[0], &a[1], layout, &targets),
            move |a| composed::cross_entropy(&composed::linear(&a[0], &a[1], None, layout)?, &again),
        )));
    }
    for shape in [vec![2, 3, 11], vec![5, 33], vec![1, 1]] {
        let classes = shape[shape.len() - 1] as u32;
        let (i, j) = (ids(&shape[..shape.len() - 1], classes), ids(&shape[..shape.len() - 1], classes));
        all.push(case(
            format!("cross_entropy {shape:?}"),
            &[&shape],
            move |a| nn::cross_entropy(&(&a[0] * 4.0)?, &i),
            move |a| composed::cross_entropy(&(&a[0] * 4.0)?, &j),
        ));
    }
    all
}

/// Returns cases for additional features of published decoders: capped scores and logits, windows, packed rows, and
/// norms of heads.
fn cases_of_fine_tuning() -> Vec<Case> {
    let mut all = Vec::new();
    let usual = AttentionOptions::default();
    let bound = AttentionOptions { scale: Some(0.4), soft_cap: Some(1.5), window: Some(9), bidirectional: false };
    let both_ways = AttentionOptions { bidirectional: true, ..usual };
    let packed = Sequences::from_lengths(&[vec![1, 30, 9], vec![40]], 40).unwrap();
    for (attend, sequences) in [
        (AttentionOptions { soft_cap: Some(0.8), ..usual }, None),
        (AttentionOptions { window: Some(5), ..usual }, None),
        (bound, Some(packed.clone())),
        (both_ways, None),
        (both_ways, Some(packed.clone())),
        (AttentionOptions { window: Some(4), ..both_ways }, None),
        (AttentionOptions { window: Some(2), ..both_ways }, Some(packed.clone())),
        (AttentionOptions { bidirectional: true, ..bound }, Some(packed.clone())),
        (usual, Some(packed.clone())),
    ] {
        let (q, kv) = ([2, 40, 12], [2, 40, 6]);
        let (a, b) = (sequences.clone(), sequences.clone());
        all.push(rounding_intermediates(case(
            format!("attention {attend:?} {sequences:?}"),
            &[&q, &kv, &kv],
            move |x| nn::attention(&(&x[0] * 2.0)?, &x[1], &x[2], 4, 2, &attend, a.as_ref()),
            move |x| composed::attention(&(&x[0] * 2.0)?, &x[1], &x[2], 4, 2, &attend, b.as_ref()),
        )));
        let (a, b) = (sequences.clone(), sequences.clone());
        all.push(rounding_intermediates(case(
            format!("fused_attention {attend:?} {sequences:?}"),
            &[&[2, 40, 24]],
            move |x| nn::fused_attention(&x[0], 2, &attend, a.as_ref()),
            move |x| composed::fused_attention(&x[0], 2, &attend, b.as_ref()),
        )));
    }
    for (attend, sequences) in [(usual, None), (bound, Some(packed.clone())), (both_ways, None)] {
        let (q, kv) = ([2, 40, 12], [2, 40, 6]);
        let (a, b) = (sequences.clone(), sequences.clone());
        all.push(rounding_intermediates(case(
            format!("attention with sinks {attend:?} {sequences:?}"),
            &[&q, &kv, &kv, &[4]],
            move |x| {
                let sinks = (&x[3] * 3.0)?;
                nn::attention_with_sinks([&(&x[0] * 2.0)?, &x[1], &x[2]], &sinks, 4, 2, &attend, a.as_ref())
            },
            move |x| {
                let sinks = (&x[3] * 3.0)?;
                composed::attention_with_sinks([&(&x[0] * 2.0)?, &x[1], &x[2]], &sinks, 4, 2, &attend, b.as_ref())
            },
        )));
    }
    for (plus_one, by_head) in [(true, false), (false, true), (true, true)] {
        let options = RmsNormOptions { eps: 1e-6, plus_one, by_head };
        let width = if by_head { 8 } else { 24 };
        all.push(case(
            format!("rms_norm {options:?}"),
            &[&[3, 23, 24], &[width]],
            move |a| nn::rms_norm_with(&a[0], &a[1], options),
            move |a| composed::rms_norm_with(&a[0], &a[1], options),
        ));
    }
    let shape: [&[usize]; 2] = [&[3, 17], &[3, 17]];
    let gated = |a: &[Tensor]| nn::gelu_gated(&a[0], &a[1]);
    all.push(case("gelu_gated", &shape, gated, |a| composed::gelu_gated(&a[0], &a[1])));
    let gated = |a: &[Tensor]| nn::exact_gelu_gated(&a[0], &a[1]);
    all.push(case("exact_gelu_gated", &shape, gated, |a| composed::exact_gelu_gated(&a[0], &a[1])));
    let wide = |a: &[Tensor]| a[0].affine(4.0, 0.0);
    all.push(case("gelu", &shape[..1], move |a| nn::gelu(&wide(a)?), move |a| composed::gelu(&wide(a)?)));
    // Every dtype can represent this factor.
    all.push(case("scaled", &shape[..1], |a| nn::scale(&a[0], 5.5), |a| &a[0] * 5.5));
    let turned = packed.positions().iter().map(|position| *position as usize).collect::<Vec<_>>();
    let rotary = nn::Rotary::from_frequencies(40, vec![1.0, 0.3, 0.02]).unwrap();
    let sequences = packed.clone();
    all.push(case(
        "rotary in sequences",
        &[&[2, 40, 12]],
        move |a| rotary.forward_in(&a[0], &sequences),
        move |a| composed::rotary_at(&a[0], &[1.0, 0.3, 0.02], &turned),
    ));
    let options = LossOptions { soft_cap: Some(1.7), divisor: Some(5.0) };
    let (i, j) = (ids(&[2, 9], 11), ids(&[2, 9], 11));
    let sum = move |logits: &Tensor| composed::log_probabilities(logits, &j, Some(1.7))?.sum_all()? / -5.0;
    let (sum_again, targets) = (sum.clone(), i.clone());
    all.push(case(
        "cross_entropy of capped logits",
        &[&[2, 9, 11]],
        move |a| nn::cross_entropy_with(&(&a[0] * 4.0)?, &i, options),
        move |a| sum(&(&a[0] * 4.0)?),
    ));
    all.push(rounding_intermediates(case(
        "linear_cross_entropy of capped logits",
        &[&[2, 9, 5], &[11, 5]],
        move |a| nn::linear_cross_entropy_with(&a[0], &a[1], WeightLayout::OutIn, &targets, options),
        move |a| sum_again(&composed::linear(&a[0], &a[1], None, WeightLayout::OutIn)?),
    )));
    for (layout, cap) in [(WeightLayout::OutIn, None), (WeightLayout::InOut, Some(2.0))] {
        let weight = if layout == WeightLayout::OutIn { [11, 5] } else { [5, 11] };
        let (i, j) = (ids(&[2, 9], 11), ids(&[2, 9], 11));
        all.push(rounding_intermediates(case(
            format!("linear_log_probabilities {layout:?} {cap:?}"),
            &[&[2, 9, 5], &weight],
            move |a| nn::linear_log_probabilities(&a[0], &a[1], layout, &i, cap),
            move |a| {
                let logits = composed::linear(&a[0], &a[1], None, layout)?;
                composed::log_probabilities(&logits, &j, cap)?.reshape((2, 9))
            },
        )));
    }
    all
}

pub fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the result and every argument's gradient, for a gradient of the result that has the same values in every
/// dtype.
fn run(function: &Function, args: &[Tensor]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let vars: Vec<Var> = args.iter().map(|a| Var::from_tensor(a).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = function(&tensors).unwrap();
    let grad = tensor(y.dims(), 99, DType::BF16).to_dtype(DType::F16).unwrap().to_dtype(y.dtype()).unwrap();
    let grads = y.mul(&grad).unwrap().sum_all().unwrap().backward().unwrap();
    (flat(&y), tensors.iter().map(|t| flat(grads.get(t).expect("a gradient for every argument"))).collect())
}

/// Asserts that each value of `got` differs from that of `want` by at most `relative` times the latter plus `absolute`
/// times the largest value of `want`.
pub fn close(got: &[f64], want: &[f64], relative: f64, absolute: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let largest = want.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= relative * w.abs() + absolute * largest, "{what}: element {i} is {g}, not {w}");
    }
}

fn compare(dtype: DType, composed_tolerance: f64, relative: f64, absolute: f64) {
    for case in cases() {
        let args: Vec<Tensor> = (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, dtype)).collect();
        // This tolerance is relative to the largest element, because intermediate values are as large as that and
        // errors add up.
        let absolute = if case.rounds_intermediates && dtype != DType::F32 { 4.0 * relative } else { absolute };
        let args_f64: Vec<Tensor> = args.iter().map(|a| a.to_dtype(DType::F64).unwrap()).collect();
        let (y, grads) = run(&case.op, &args);
        let (want_y, want_grads) = run(&case.composed, &args_f64);
        close(&y, &want_y, relative, absolute, &format!("{} {dtype:?} value", case.name));
        let (_, composed_grads) = run(&case.composed, &args);
        for (i, want) in want_grads.iter().enumerate() {
            close(&grads[i], want, relative, absolute, &format!("{} {dtype:?} gradient {i}", case.name));
            let what = format!("{} {dtype:?} composed gradient {i}", case.name);
            close(&composed_grads[i], want, composed_tolerance, composed_tolerance, &what);
        }
    }
}

#[test]
fn f32_values_and_gradients_are_those_of_f64_up_to_rounding() {
    compare(DType::F32, 1e-5, 1e-6, 4e-6);
}

// The tolerances allow one rounding, at most 2^-8 of the value in bf16 and 2^-11 in f16, and the errors of f32 sums.
// (Scaling some arguments by powers of two does not round.)

#[test]
fn bf16_values_and_gradients_are_rounded_once() {
    compare(DType::BF16, 3e-2, 2f64.powi(-8), 4e-6);
}

#[test]
fn f16_values_and_gradients_are_rounded_once() {
    compare(DType::F16, 4e-3, 2f64.powi(-11), 4e-6);
}

#[test]
fn gradients_are_the_slopes_of_the_values() {
    let step = 2f32.powi(-7);
    // Finite differences of a maximum are wrong if another element is closer to it than the step.
    // Therefore, max_pool2d is tested in `grids`, with suitable numbers.
    for case in cases().into_iter().filter(|case| !case.name.starts_with("max_pool2d")) {
        let args: Vec<Tensor> = (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, DType::F32)).collect();
        let weights = {
            let y = (case.op)(&args).unwrap();
            flat(&tensor(y.dims(), 99, DType::BF16))
        };
        let value =
            |args: &[Tensor]| -> f64 { flat(&(case.op)(args).unwrap()).iter().zip(&weights).map(|(y, w)| y * w).sum() };
        let (_, grads) = run(&case.op, &args);
        for (a, grad) in grads.iter().enumerate() {
            let largest = grad.iter().fold(0.05f64, |m, x| m.max(x.abs()));
            let data: Vec<f32> = args[a].flatten_all().unwrap().to_vec1().unwrap();
            // Evenly spaced elements of large arguments are checked, and all elements of small ones.
            for i in (0..data.len()).step_by(data.len().div_ceil(40)) {
                let shifted = |by: f32| {
                    let mut data = data.clone();
                    data[i] += by;
                    let mut args = args.clone();
                    args[a] = Tensor::from_vec(data, args[a].shape(), &Device::Cpu).unwrap();
                    value(&args)
                };
                let slope = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
                // The error of the difference quotient is proportional to the third derivative, which is large for
                // scaled arguments.
                let error = (slope - grad[i]).abs();
                assert!(error <= 5e-3 * largest, "{} argument {a} element {i}: {slope} not {}", case.name, grad[i]);
            }
        }
    }
}

/// Returns the values of a norm in `x`'s dtype, and the gradients of x, weight and bias for the sum weighted by `c`.
fn norm(kind: &str, x: &Tensor, weight: &Tensor, bias: &Tensor, c: &Tensor) -> (Vec<f32>, Vec<(DType, Vec<f32>)>) {
    let args = [x, weight, bias].map(|t| Var::from_tensor(t).unwrap());
    let [x, weight, bias] = &args;
    let y = match kind {
        "layer_norm" => nn::layer_norm(x, weight, bias, 1e-5).unwrap(),
        _ => nn::rms_norm(x, weight, 1e-5).unwrap(),
    };
    assert_eq!(y.dtype(), x.dtype());
    let values = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let grads = (y.to_dtype(DType::F32).unwrap() * c).unwrap().sum_all().unwrap().backward().unwrap();
    let grads = args.iter().filter_map(|arg| grads.get(arg)).map(|grad| (grad.dtype(), values(grad))).collect();
    (values(&y), grads)
}

#[test]
fn norms_with_f32_parameters_take_16_bit_activations() {
    for dtype in [DType::BF16, DType::F16] {
        let low = tensor(&[70, 24], 1, dtype);
        let (x, c) = (low.to_dtype(DType::F32).unwrap(), tensor(&[70, 24], 2, dtype).to_dtype(DType::F32).unwrap());
        let [weight, bias] = [3, 4].map(|seed| tensor(&[24], seed, DType::F32));
        let round = |t: &[f32]| {
            let t = Tensor::new(t, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        for kind in ["layer_norm", "rms_norm"] {
            let (exact, exact_grads) = norm(kind, &x, &weight, &bias, &c);
            let (mixed, grads) = norm(kind, &low, &weight, &bias, &c);
            assert_eq!(mixed, round(&exact), "{kind} {dtype:?}");
            assert_eq!(grads[0], (dtype, round(&exact_grads[0].1)), "{kind} {dtype:?}");
            // Parameters have gradients in their own format, bit for bit those of an f32 input.
            assert_eq!(grads[1..], exact_grads[1..], "{kind} {dtype:?}");
            assert_eq!(grads.len(), if kind == "layer_norm" { 3 } else { 2 });
        }
        let error = nn::rms_norm(&x, &weight.to_dtype(dtype).unwrap(), 1e-5).unwrap_err().to_string();
        assert!(error.contains("rms_norm"), "{error}");
    }
}

/// Returns the values of a function, and the gradients of its arguments for the sum weighted by `c`.
fn run_weighted(args: &[&Tensor], c: &Tensor, function: impl Fn(&[Var]) -> Tensor) -> (Tensor, Vec<Tensor>) {
    let args: Vec<Var> = args.iter().map(|arg| Var::from_tensor(arg).unwrap()).collect();
    let y = function(&args);
    let loss = (y.to_dtype(DType::F32).unwrap() * c).unwrap().sum_all().unwrap();
    let mut grads = loss.backward().unwrap();
    (y.detach(), args.iter().map(|arg| grads.remove(arg).unwrap()).collect())
}

/// Returns a tensor's values, rounded to `dtype`, as f32.
fn rounded(t: &Tensor, dtype: DType) -> Vec<f32> {
    t.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn linear_layers_with_f32_parameters_take_16_bit_activations() {
    const F32: DType = DType::F32;
    for low in [DType::BF16, DType::F16] {
        for (layout, shape) in [(WeightLayout::OutIn, [21, 37]), (WeightLayout::InOut, [37, 21])] {
            // In the last case, the bias is wider than the weight and the input.
            for [weight_dtype, bias_dtype] in [[F32, F32], [F32, low], [low, F32]] {
                let what = format!("{low:?} {layout:?} {weight_dtype:?} {bias_dtype:?}");
                let (x, c) = (tensor(&[4, 9, 37], 1, low), tensor(&[4, 9, 21], 2, low).to_dtype(F32).unwrap());
                let (weight, bias) = (tensor(&shape, 3, weight_dtype), tensor(&[21], 4, bias_dtype));
                let run = |args: &[Var]| nn::linear(&args[0], &args[1], Some(&args[2]), layout).unwrap();
                let wide = [&x, &weight, &bias].map(|t| t.to_dtype(F32).unwrap());
                let (exact, exact_grads) = run_weighted(&wide.each_ref(), &c, run);
                let (y, grads) = run_weighted(&[&x, &weight, &bias], &c, run);
                assert_eq!((y.dtype(), rounded(&y, F32)), (low, rounded(&exact, low)), "{what}");
                // Each gradient is that of an f32 layer, rounded once to its target's format.
                for ((grad, exact), format) in grads.iter().zip(&exact_grads).zip([low, weight_dtype, bias_dtype]) {
                    assert_eq!((grad.dtype(), rounded(grad, F32)), (format, rounded(exact, format)), "{what}");
                }
                // The next operation receives the rounded result.
                let residual = tensor(&[4, 9, 21], 5, low);
                let epilogue = epilogue(Some(Activation::GeluTanh), &residual);
                let followed = nn::linear_with_epilogue(&x, &weight, Some(&bias), layout, epilogue).unwrap();
                let by_hand = nn::add(&residual, &nn::gelu_tanh(&y).unwrap()).unwrap();
                assert_eq!(rounded(&followed, F32), rounded(&by_hand, F32), "{what}");
            }
        }
        // A 16-bit weight with an f32 input is refused.
        let (x, weight) = (tensor(&[2, 5], 1, F32), tensor(&[3, 5], 2, low));
        let error = nn::linear(&x, &weight, None, WeightLayout::OutIn).unwrap_err().to_string();
        assert!(error.contains("linear"), "{error}");
    }
}

#[test]
fn an_f32_table_gives_16_bit_rows_and_takes_an_f32_gradient() {
    for low in [DType::BF16, DType::F16] {
        let (ids, table) = (ids(&[3, 17], 11), tensor(&[12, 7], 1, DType::F32));
        let c = tensor(&[3, 17, 7], 2, low).to_dtype(DType::F32).unwrap();
        let (exact, exact_grads) = run_weighted(&[&table], &c, |args| nn::embedding(&ids, &args[0]).unwrap());
        let (y, grads) = run_weighted(&[&table], &c, |args| nn::embedding_in(&ids, &args[0], low).unwrap());
        assert_eq!((y.dtype(), rounded(&y, DType::F32)), (low, rounded(&exact, low)));
        assert_eq!(grads[0].dtype(), DType::F32);
        assert_eq!(rounded(&grads[0], DType::F32), rounded(&exact_grads[0], DType::F32));
        let error = nn::embedding_in(&ids, &table.to_dtype(low).unwrap(), DType::F32).unwrap_err().to_string();
        assert!(error.contains("rows of F32 are requested from a table of"), "{error}");
    }
}

#[test]
fn an_output_projection_in_f32_takes_16_bit_states() {
    for low in [DType::BF16, DType::F16] {
        let (h, weight, targets) = (tensor(&[2, 70, 16], 1, low), tensor(&[11, 16], 2, DType::F32), ids(&[2, 70], 11));
        let one = Tensor::new(1f32, &Device::Cpu).unwrap();
        let run = |args: &[Var]| nn::linear_cross_entropy(&args[0], &args[1], WeightLayout::OutIn, &targets).unwrap();
        let (exact, exact_grads) = run_weighted(&[&h.to_dtype(DType::F32).unwrap(), &weight], &one, run);
        let (loss, grads) = run_weighted(&[&h, &weight], &one, run);
        assert_eq!(rounded(&loss, DType::F32), rounded(&exact, DType::F32));
        for ((grad, exact), format) in grads.iter().zip(&exact_grads).zip([low, DType::F32]) {
            assert_eq!((grad.dtype(), rounded(grad, DType::F32)), (format, rounded(exact, format)), "{low:?}");
        }
    }
}
