//! Tests the adapted product against its definition in Candle's operations in f64.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::nn::Activation;
use candle_core::{Device, Var};

/// Returns a tensor of numbers in [-1, 1) that differ from seed to seed.
pub(in crate::nn) fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 7919 + seed * 104_729 + i * i * 31) % 2003) as f32 / 1001.5 - 1.0;
    let values = (0..shape.iter().product()).map(value);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    layout: WeightLayout,
    bias: bool,
    dora: bool,
    residual: bool,
    activation: Option<Activation>,
    mask: Option<DropoutMask>,
    /// The dtype of x, the weight, the bias and the residual.
    base: DType,
    /// The dtype of the adapter's parameters.
    adapter: DType,
}

const PLAIN: Case = Case {
    rows: 5,
    layout: WeightLayout::OutIn,
    bias: false,
    dora: false,
    residual: false,
    activation: None,
    mask: None,
    base: DType::F32,
    adapter: DType::F32,
};
const SIZES: [usize; 3] = [9, 7, 3];
const SCALE: f64 = 0.75;

/// Returns x, weight, A, B, bias, residual and magnitude.
fn operands(case: Case) -> Vec<Tensor> {
    let [inputs, outputs, rank] = SIZES;
    let weight = if case.layout == WeightLayout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
    let (base, adapter) = (case.base, case.adapter);
    let shapes: [(&[usize], DType); 7] = [
        (&[case.rows, inputs], base),
        (&weight, base),
        (&[rank, inputs], adapter),
        (&[outputs, rank], adapter),
        (&[outputs], base),
        (&[case.rows, outputs], base),
        (&[outputs], adapter),
    ];
    shapes.iter().enumerate().map(|(i, (shape, dtype))| tensor(shape, i, *dtype)).collect()
}

fn run(case: Case, t: &[Tensor]) -> Result<Tensor> {
    let adapter =
        LoraOperands { a: &t[2], b: &t[3], magnitude: case.dora.then_some(&t[6]), scale: SCALE, mask: case.mask };
    let epilogue = LinearEpilogue { activation: case.activation, residual: case.residual.then_some(&t[5]) };
    linear_with_epilogue(&t[0], &t[1], case.bias.then_some(&t[4]), case.layout, &adapter, epilogue)
}

fn definition(case: Case, t: &[Tensor]) -> Result<Tensor> {
    let dropped = match case.mask {
        Some(DropoutMask { p, seed, draw }) => {
            (&t[0] * dropout(&t[0].ones_like()?.to_dtype(DType::F32)?, p, seed, draw)?.to_dtype(DType::F64)?)?
        }
        None => t[0].clone(),
    };
    let weight = if case.layout == WeightLayout::OutIn { t[1].clone() } else { t[1].t()? };
    let mut y = (t[0].matmul(&weight.t()?)? + (dropped.matmul(&t[2].t()?)?.matmul(&t[3].t()?)? * SCALE)?)?;
    if case.dora {
        let norm = (&weight + (t[3].matmul(&t[2])? * SCALE)?)?.sqr()?.sum(1)?.sqrt()?.detach();
        y = y.broadcast_mul(&(&t[6] / norm)?)?;
    }
    if case.bias {
        y = y.broadcast_add(&t[4])?;
    }
    match case.activation {
        Some(Activation::Silu) => y = (&y / (y.neg()?.exp()? + 1.0)?)?,
        Some(other) => panic!("no definition of {other:?} here"),
        None => {}
    }
    if case.residual { y + &t[5] } else { Ok(y) }
}

/// Returns the result, and the gradients of all operands that have one.
pub(in crate::nn) fn differentiated(
    t: &[Tensor],
    function: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> (Tensor, Vec<Option<Tensor>>) {
    let vars: Vec<Var> = t.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = function(&tensors).unwrap();
    let weights = tensor(y.dims(), 99, DType::F64).to_dtype(y.dtype()).unwrap();
    let grads = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    (y.detach(), tensors.iter().map(|t| grads.get(t).cloned()).collect())
}

/// Returns the largest difference between the elements of two tensors, divided by the largest magnitude in `want`.
pub(in crate::nn) fn distance(found: &Tensor, want: &Tensor) -> f64 {
    let flat = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (found, want) = (flat(found), flat(want));
    assert_eq!(found.len(), want.len());
    let largest = want.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
    // `max` is not used, because it ignores NaN.
    found.iter().zip(&want).map(|(a, b)| (a - b).abs() / largest).fold(0.0, |most, d| if d <= most { most } else { d })
}

fn check(case: Case, tolerance: f64, label: &str) {
    let t = operands(case);
    let (found, found_grads) = differentiated(&t, |t| run(case, t));
    let in_f64: Vec<Tensor> = t.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect();
    let (want, want_grads) = differentiated(&in_f64, |t| definition(case, t));
    assert_eq!(found.dtype(), case.base, "{label}");
    assert!(distance(&found, &want) < tolerance, "{label}: the result is off by {}", distance(&found, &want));
    for (i, (found, want)) in found_grads.iter().zip(&want_grads).enumerate() {
        assert_eq!(found.is_some(), want.is_some(), "{label}: operand {i}");
        if let (Some(found), Some(want)) = (found, want) {
            assert_eq!(found.dtype(), t[i].dtype(), "{label}: operand {i}");
            let off = distance(found, want);
            assert!(off < tolerance, "{label}: the gradient of operand {i} is off by {off}");
        }
    }
}

#[test]
fn results_and_gradients_are_those_of_the_definition() {
    const MASK: DropoutMask = DropoutMask { p: 0.3, seed: 5, draw: 2 };
    const SIXTEEN_BIT: [DType; 2] = [DType::BF16, DType::F16];
    for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
        for dora in [false, true] {
            for (bias, residual, activation, mask) in [
                (false, false, None, None),
                (true, true, None, None),
                (true, false, Some(Activation::Silu), None),
                (false, true, Some(Activation::Silu), Some(MASK)),
                (true, true, None, Some(MASK)),
            ] {
                let case = Case { layout, dora, bias, residual, activation, mask, ..PLAIN };
                let label = format!("{layout:?} dora {dora} bias {bias} residual {residual} mask {}", mask.is_some());
                check(case, 1e-5, &label);
                for base in SIXTEEN_BIT {
                    // There are more rows than are widened at a time.
                    let case = Case { base, rows: 2 * ROWS + 3, ..case };
                    let tolerance = if base == DType::BF16 { 4e-2 } else { 5e-3 };
                    check(case, tolerance, &format!("{label}, {base:?} under f32"));
                    check(Case { adapter: base, ..case }, tolerance, &format!("{label}, {base:?}"));
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_rows_are_around_it() {
    for base in [DType::F32, DType::BF16] {
        for dora in [false, true] {
            let case = Case { base, dora, rows: 2 * ROWS + 3, bias: true, ..PLAIN };
            let t = operands(case);
            let whole = run(case, &t).unwrap().to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
            for (first, rows) in [(0, 1), (ROWS - 1, 3), (11, 40)] {
                let mut part = t.clone();
                part[0] = t[0].narrow(0, first, rows).unwrap();
                let case = Case { rows, ..case };
                let found = run(case, &part).unwrap().to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                assert_eq!(found, whole[first..first + rows], "{base:?} dora {dora} from {first}");
            }
        }
    }
}

#[test]
fn gradients_of_one_input_of_two_layers_are_added() {
    let case = Case { bias: true, rows: ROWS + 1, ..PLAIN };
    let t = operands(case);
    let (_, once) = differentiated(&t, |t| run(case, t));
    let (_, twice) = differentiated(&t, |t| run(case, t)? + run(case, t)?);
    for (i, (once, twice)) in once.iter().zip(&twice).enumerate() {
        let (Some(once), Some(twice)) = (once, twice) else { continue };
        assert!(distance(twice, &(once * 2.0).unwrap()) < 1e-6, "operand {i}");
    }
}

#[test]
fn matrices_that_do_not_fit_the_weight_are_refused() {
    let mut t = operands(PLAIN);
    t[2] = tensor(&[3, 8], 1, DType::F32);
    let text = run(PLAIN, &t).unwrap_err().to_string();
    let text = crate::error::without_backtrace(&text);
    insta::assert_snapshot!(text, @"linear (adapter): the adapter's matrices have shapes [3, 8] and [7, 3]; a weight of 9 inputs and 7 outputs needs [r, 9] and [7, r]");
    let dora = Case { dora: true, ..PLAIN };
    let mut t = operands(dora);
    t[6] = tensor(&[6], 1, DType::F32);
    let text = run(dora, &t).unwrap_err().to_string();
    insta::assert_snapshot!(crate::error::without_backtrace(&text), @"linear (adapter): the magnitude has shape [6]; a weight of 7 outputs needs [7]");
}
