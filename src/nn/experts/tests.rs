//! Tests the layers of mixtures of experts against a loop over the experts, composed of Candle's operations in f64, and
//! the routers also against recordings of transformers.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::error::without_backtrace;
use crate::nn::lora::tests::{differentiated, distance, tensor};
use crate::nn::{Linear, WeightLayout, add, composed, linear, without_adapters};
use crate::util::counted;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Module;
use std::sync::Arc;

const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::BF16, 4e-2), (DType::F16, 5e-3)];

fn to_f64(t: &[Tensor]) -> Vec<Tensor> {
    t.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Checks the result and the gradients of `found` at the operands `t` against those of `want` in f64.
fn check(
    t: &[Tensor],
    tolerance: f64,
    label: &str,
    found: impl Fn(&[Tensor]) -> Result<Tensor>,
    want: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let (found, found_grads) = differentiated(t, found);
    let (want, want_grads) = differentiated(&to_f64(t), want);
    assert!(distance(&found, &want) < tolerance, "{label}: result off by {}", distance(&found, &want));
    for (i, (found, want)) in found_grads.iter().zip(&want_grads).enumerate() {
        let found = found.as_ref().unwrap_or_else(|| panic!("{label}: operand {i} has no gradient"));
        assert_eq!(found.dtype(), t[i].dtype(), "{label}: operand {i}");
        // Candle's loop gives no gradient to the tensor of an expert that no row chose.
        let zeros = || t[i].zeros_like().unwrap().to_dtype(DType::F64).unwrap();
        let off = distance(found, &want.clone().unwrap_or_else(zeros));
        assert!(off < tolerance, "{label}: the gradient of operand {i} is off by {off}");
    }
}

const EXPERTS: usize = 7;
const ROWS: usize = 41;

/// Returns the choices of two experts for each row. Experts 3 and 6 are chosen by no row, and expert 1 by most rows.
fn choices() -> Vec<u32> {
    let others = [0, 2, 4, 5];
    (0..ROWS)
        .flat_map(|row| {
            let (one, other) = (others[(row * row + 3) % 4], others[(row * row + row / 3 + 2) % 4]);
            if row % 5 == 0 && one != other { [one, other] } else { [other, 1] }
        })
        .collect()
}

fn assignment() -> Arc<ExpertAssignment> {
    Arc::new(ExpertAssignment::new(&choices(), 2, EXPERTS).unwrap())
}

#[test]
fn the_assignment_of_these_tests_has_empty_and_full_experts() {
    let counts = assignment().counts();
    assert_eq!((counts[3], counts[6]), (0, 0));
    assert!(counts[1] > 30 && counts.iter().filter(|count| **count > 0).count() == 5, "{counts:?}");
}

// --- Routers ---

const ORDERS: [RouterOrder; 3] = [
    RouterOrder::SoftmaxThenTop { renormalize: false },
    RouterOrder::SoftmaxThenTop { renormalize: true },
    RouterOrder::TopThenSoftmax,
];

#[test]
fn weights_and_their_gradients_are_those_of_the_definition_in_both_orders() {
    for (dtype, tolerance) in DTYPES {
        for order in ORDERS {
            for (experts, k) in [(1, 1), (5, 2), (16, 5), (4, 4), (130, 8)] {
                let t = [(tensor(&[3, 23, experts], 1, DType::F32) * 3.0).unwrap().to_dtype(dtype).unwrap()];
                let options = RouterOptions { experts_per_row: k, order, keep_f32: false };
                let choices = route(&t[0], options).unwrap().choices().to_vec();
                check(
                    &t,
                    tolerance,
                    &format!("{dtype:?} {order:?} {k} of {experts}"),
                    |t| Ok(route(&t[0], options)?.weights().clone()),
                    |t| composed::routing_weights(&t[0].reshape(((), experts))?, &choices, k, order),
                );
            }
        }
    }
}

#[test]
fn the_best_experts_are_chosen_and_of_equal_ones_the_lowest() {
    for order in ORDERS {
        let logits = Tensor::new(&[[1f32, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-9.0, 5.0, -8.0, 4.0]], &Device::Cpu);
        let routing = route(&logits.unwrap(), RouterOptions { experts_per_row: 2, order, keep_f32: false }).unwrap();
        assert_eq!(routing.choices(), [1, 3, 0, 1, 1, 3]);
        assert_eq!(routing.counts(), [1, 3, 0, 2]);
        let sums = routing.weights().sum(1).unwrap().to_vec1::<f32>().unwrap();
        let are_whole = sums.iter().all(|sum| (sum - 1.0).abs() < 1e-6);
        assert_eq!(are_whole, order != RouterOrder::SoftmaxThenTop { renormalize: false });
    }
    // The probabilities of experts 0, 2 and 3 are 0 in f32. If the softmax comes first, these experts are equal.
    let logits = Tensor::new(&[[0f32, 200.0, -10.0, 10.0]], &Device::Cpu).unwrap();
    let choose = |order| {
        let options = RouterOptions { experts_per_row: 2, order, keep_f32: false };
        route(&logits, options).unwrap().choices().to_vec()
    };
    assert_eq!(choose(ORDERS[0]), [1, 0]);
    assert_eq!(choose(RouterOrder::TopThenSoftmax), [1, 3]);
}

#[test]
fn weights_are_rounded_to_the_dtype_of_the_logits_unless_they_stay_in_f32() {
    let logits = tensor(&[9, 6], 2, DType::BF16);
    let order = RouterOrder::SoftmaxThenTop { renormalize: true };
    let routing = |keep_f32| route(&logits, RouterOptions { experts_per_row: 2, order, keep_f32 }).unwrap();
    let (in_bf16, in_f32) = (routing(false), routing(true));
    assert_eq!((in_bf16.weights().dtype(), in_f32.weights().dtype()), (DType::BF16, DType::F32));
    let rounded = in_f32.weights().to_dtype(DType::BF16).unwrap();
    assert_eq!(values(in_bf16.weights()), values(&rounded));
    assert_ne!(values(in_f32.weights()), values(&rounded));
}

#[test]
fn numbers_of_experts_that_cannot_be_are_refused() {
    let refusal = |logits: Tensor, k| {
        let options = RouterOptions { experts_per_row: k, order: ORDERS[0], keep_f32: false };
        without_backtrace(&route(&logits, options).unwrap_err().to_string()).to_string()
    };
    insta::assert_snapshot!(refusal(tensor(&[5, 4], 1, DType::F32), 5), @"router: 5 of 4 experts cannot be chosen for each row (the logits have shape [5, 4]); choose between 1 and 4");
    insta::assert_snapshot!(refusal(tensor(&[5, 4], 1, DType::F32), 0), @"router: 0 of 4 experts cannot be chosen for each row (the logits have shape [5, 4]); choose between 1 and 4");
    insta::assert_snapshot!(refusal(tensor(&[5, 4], 1, DType::F64), 2), @"router: the logits have dtype F64; f32, bf16 or f16 is needed");
    insta::assert_snapshot!(refusal(Tensor::new(1f32, &Device::Cpu).unwrap(), 1), @"router: the logits have shape []; their last dimension must be the number of experts");
}

// --- Recordings of transformers ---

macro_rules! recordings {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!("../../../tests/fixtures/routers/", $name, ".safetensors")).as_slice())),*]
    };
}

#[test]
fn choices_counts_and_auxiliary_losses_are_those_of_transformers() {
    let recorded = include_str!("../../../tests/fixtures/routers/routers.json");
    let recorded: serde_json::Value = serde_json::from_str(recorded).unwrap();
    let files = recordings!["gpt_oss", "mixtral", "olmoe", "olmoe_clip", "qwen2_moe", "qwen3_moe", "qwen3_moe_step2"];
    for (name, bytes) in files {
        let recorded = &recorded[name];
        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu).unwrap();
        let top_first = recorded["top_first"].as_bool().unwrap();
        let order = if top_first { RouterOrder::TopThenSoftmax } else { ORDERS[0] };
        let experts_per_row = recorded["experts_per_row"].as_u64().unwrap() as usize;
        let options = RouterOptions { experts_per_row, order, keep_f32: false };
        let counts = recorded["counts"].as_array().unwrap();
        let layers: Vec<Routing> = (0..counts.len())
            .map(|layer| route(&tensors[&format!("router_logits.{layer}")], options).unwrap())
            .collect();
        for (i, layer) in layers.iter().enumerate() {
            let index = tensors[&format!("router_index.{i}")].flatten_all().unwrap().to_vec1::<i64>().unwrap();
            let chosen: Vec<i64> = layer.choices().iter().map(|expert| i64::from(*expert)).collect();
            assert_eq!(chosen, index, "{name}, layer {i}");
            assert_eq!(serde_json::json!(layer.counts()), counts[i], "{name}, layer {i}");
        }
        let loss = |mask: Option<&[bool]>| load_balancing_loss(&layers, mask).unwrap().to_scalar::<f32>().unwrap();
        let close = |found: f32, key: &str| {
            let want = recorded[key].as_f64().unwrap();
            assert!((f64::from(found) - want).abs() < 1e-6 * want, "{name}: {key} is {found}, not {want}");
        };
        close(loss(None), "aux_loss");
        // In the second of two rows of 48 tokens, the padding begins at position 29.
        let mask: Vec<bool> = (0..96).map(|row| row < 48 + 29).collect();
        close(loss(Some(&mask)), "padded_aux_loss");
    }
}

// --- The auxiliary loss ---

/// Computes the loss of two layers from its formula.
fn loss_in_f64(logits: &[Tensor], choices: [&[u32]; 2], k: usize, mask: Option<&[bool]>) -> Result<Tensor> {
    let experts = logits[0].dim(1)?;
    let rows = logits[0].dim(0)?;
    let counts = |row: usize| mask.is_none_or(|mask| mask[row]);
    let n = 2.0 * (0..rows).filter(|row| counts(*row)).count() as f64;
    let mut chosen = vec![0f64; experts];
    for choices in choices {
        for (i, expert) in choices.iter().enumerate().filter(|(i, _)| counts(i / k)) {
            let _ = i;
            chosen[*expert as usize] += 1.0 / n;
        }
    }
    let mask: Vec<f64> = (0..rows).map(|row| if counts(row) { 1.0 / n } else { 0.0 }).collect();
    let mask = Tensor::new(mask, &Device::Cpu)?.unsqueeze(1)?;
    let mean = |logits: &Tensor| candle_nn::ops::softmax(logits, 1)?.broadcast_mul(&mask)?.sum(0);
    let means = (mean(&logits[0])? + mean(&logits[1])?)?;
    (means * Tensor::new(chosen, &Device::Cpu)?)?.sum_all()? * experts as f64
}

#[test]
fn the_auxiliary_loss_and_its_gradient_are_those_of_the_formula() {
    let mask: Vec<bool> = (0..31).map(|row| row % 4 != 1).collect();
    for (dtype, tolerance) in DTYPES {
        for order in ORDERS {
            for mask in [None, Some(&mask[..])] {
                let t = [1, 2].map(|seed| (tensor(&[31, 6], seed, DType::F32) * 2.0).unwrap().to_dtype(dtype).unwrap());
                let options = RouterOptions { experts_per_row: 2, order, keep_f32: false };
                let layers = |t: &[Tensor]| t.iter().map(|t| route(t, options)).collect::<Result<Vec<_>>>();
                let chosen: Vec<Vec<u32>> = layers(&t).unwrap().iter().map(|layer| layer.choices().to_vec()).collect();
                check(
                    &t,
                    tolerance,
                    &format!("{dtype:?} {order:?} masked {}", mask.is_some()),
                    |t| load_balancing_loss(&layers(t)?, mask),
                    |t| loss_in_f64(t, [&chosen[0], &chosen[1]], 2, mask),
                );
            }
        }
    }
}

#[test]
fn the_auxiliary_loss_of_perfect_balance_is_the_number_of_experts_per_row() {
    // Row i chooses experts i and i + 1.
    let logits = (0..8).flat_map(|row| (0..8).map(move |e| if e == row || e == (row + 1) % 8 { 3f32 } else { 0.0 }));
    let logits = Tensor::from_iter(logits, &Device::Cpu).unwrap().reshape((8, 8)).unwrap();
    let options = RouterOptions { experts_per_row: 2, order: ORDERS[1], keep_f32: false };
    let layers = vec![route(&logits, options).unwrap(); 3];
    let loss = load_balancing_loss(&layers, None).unwrap().to_scalar::<f32>().unwrap();
    assert!((loss - 2.0).abs() < 1e-6, "{loss}");
}

#[test]
fn auxiliary_losses_that_cannot_be_are_refused() {
    let routing = |rows, experts| {
        let options = RouterOptions { experts_per_row: 2, order: ORDERS[0], keep_f32: false };
        route(&tensor(&[rows, experts], 1, DType::F32), options).unwrap()
    };
    let refusal = |layers: &[Routing], mask: Option<&[bool]>| {
        without_backtrace(&load_balancing_loss(layers, mask).unwrap_err().to_string()).to_string()
    };
    insta::assert_snapshot!(refusal(&[], None), @"load_balancing_loss: there is no layer with experts; compute the loss only for models that have one");
    insta::assert_snapshot!(refusal(&[routing(5, 4), routing(5, 3)], None), @"load_balancing_loss: layer 1 has 5 rows, 3 experts, 2 of them for each row, and logits in F32; layer 0 has 5 rows, 4 experts, 2 of them for each row, and logits in F32; all must be equal");
    insta::assert_snapshot!(refusal(&[routing(2, 4)], Some(&[true; 3])), @"load_balancing_loss: the mask has 3 elements; there are 2 rows");
    insta::assert_snapshot!(refusal(&[routing(2, 4)], Some(&[false; 2])), @"load_balancing_loss: no row counts (2 rows in total); leave out micro batches that contain only padding");
}

// --- Rows ---

#[test]
fn rows_go_to_their_experts_and_back_with_their_gradients() {
    let assignment = assignment();
    for (dtype, tolerance) in DTYPES {
        let x = [tensor(&[ROWS, 9], 1, dtype)];
        let rows = |t: &[Tensor]| expert_rows(&t[0], &assignment);
        check(&x, tolerance, &format!("{dtype:?}"), rows, |t| composed::expert_rows(&t[0], &assignment));
        // The weights of a 16-bit model may be f32.
        for weights_dtype in [dtype, DType::F32] {
            let t = [tensor(&[assignment.slots(), 9], 2, dtype), tensor(&[ROWS, 2], 3, weights_dtype)];
            check(
                &t,
                tolerance,
                &format!("{dtype:?} with weights in {weights_dtype:?}"),
                |t| combine_experts(&t[0], &t[1], &assignment, &(ROWS, 9).into()),
                |t| composed::combine_experts(&t[0], &t[1], &assignment),
            );
        }
    }
}

#[test]
fn a_row_adds_its_experts_by_rising_number_starting_from_zero() {
    // Row 0 chooses the experts in the order 2, 0, 1. A sum of three terms in f32 depends on their order.
    let assignment = Arc::new(ExpertAssignment::new(&[2, 0, 1], 3, 3).unwrap());
    let y = Tensor::new(&[[1e8f32], [1.0], [-1e8]], &Device::Cpu).unwrap();
    let weights = Tensor::new(&[[1f32, 1.0, 1.0]], &Device::Cpu).unwrap();
    let sum = combine_experts(&y, &weights, &assignment, &(1, 1).into()).unwrap();
    assert_eq!(values(&sum), [(0.0 + 1e8 + 1.0) - 1e8]);
    let weights = Tensor::new(&[[3f32, 5.0, 7.0]], &Device::Cpu).unwrap();
    let sum = combine_experts(
        &Tensor::ones((3, 1), DType::F32, &Device::Cpu).unwrap(),
        &weights,
        &assignment,
        &(1, 1).into(),
    );
    assert_eq!(values(&sum.unwrap()), [15.0]);
}

#[test]
fn gated_activations_are_those_of_the_definition() {
    let gates = [ExpertActivation::Silu, ExpertActivation::Clamped { alpha: 1.702, limit: 1.503 }];
    for (dtype, tolerance) in DTYPES {
        for gate in gates {
            for order in [GateUpOrder::Halves, GateUpOrder::Interleaved] {
                for shape in [vec![1, 2], vec![7, 3, 10], vec![300, 130]] {
                    // The values reach beyond the limits on both sides. No 16-bit number is exactly at a limit.
                    let t =
                        [((tensor(&shape, 1, DType::F32) * 4.0).unwrap() + 0.003).unwrap().to_dtype(dtype).unwrap()];
                    check(
                        &t,
                        tolerance,
                        &format!("{dtype:?} {gate:?} {order:?} {shape:?}"),
                        |t| gated_activation(&t[0], gate, order),
                        |t| composed::gated_activation(&t[0], gate, order),
                    );
                }
            }
        }
        let t = [tensor(&[3, 11, 8], 1, dtype), tensor(&[3, 11, 1], 2, dtype), tensor(&[3, 11, 8], 3, dtype)];
        let label = format!("{dtype:?} add_gated");
        let (found, want) =
            (|t: &[Tensor]| add_gated(&t[0], &t[1], &t[2]), |t: &[Tensor]| composed::add_gated(&t[0], &t[1], &t[2]));
        check(&t, tolerance, &label, found, want);
    }
}

#[test]
fn the_clamped_activation_is_that_of_its_formula() {
    let value = |gate: f32, up: f32| {
        let x = Tensor::new(&[[gate, up]], &Device::Cpu).unwrap();
        let y = gated_activation(&x, ExpertActivation::Clamped { alpha: 1.702, limit: 7.0 }, GateUpOrder::Interleaved);
        f64::from(values(&y.unwrap())[0])
    };
    let formula = |gate: f64, up: f64| (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp());
    assert!((value(2.0, 0.5) - formula(2.0, 0.5)).abs() < 1e-6);
    assert!((value(20.0, -30.0) - formula(7.0, -7.0)).abs() < 1e-5, "the gate is limited above, up on both sides");
    assert!((value(-20.0, 30.0) - formula(-20.0, 7.0)).abs() < 1e-6, "the gate is not limited below");
}

// --- Projections ---

#[derive(Debug, Clone, Copy)]
struct Case {
    layout: WeightLayout,
    fused: bool,
    /// The outputs of each weight.
    outputs: &'static [usize],
    bias: bool,
    adapter: Option<DType>,
    dtype: DType,
}

const INPUTS: usize = 9;
const RANK: usize = 3;
const SCALE: f64 = 0.75;

const PLAIN: Case =
    Case { layout: WeightLayout::OutIn, fused: false, outputs: &[6], bias: false, adapter: None, dtype: DType::F32 };

/// Returns the input, the weights, the biases and the adapter's matrices.
fn operands(case: Case) -> Vec<Tensor> {
    let mut all = vec![tensor(&[assignment().slots(), INPUTS], 0, case.dtype)];
    let mut seed = 0;
    let mut push = |dims: &[usize]| {
        // The values are the same in both forms.
        seed += 1;
        let whole = tensor(&[&[EXPERTS], dims].concat(), seed, case.dtype);
        if case.fused {
            all.push(whole);
        } else {
            all.extend((0..EXPERTS).map(|expert| whole.get(expert).unwrap()));
        }
    };
    for outputs in case.outputs {
        push(&if case.layout == WeightLayout::OutIn { [*outputs, INPUTS] } else { [INPUTS, *outputs] });
    }
    for outputs in case.outputs.iter().filter(|_| case.bias) {
        push(&[*outputs]);
    }
    if let Some(dtype) = case.adapter {
        all.push(tensor(&[EXPERTS * RANK, INPUTS], 18, dtype));
        all.push(tensor(&[case.outputs.iter().sum(), EXPERTS * RANK], 19, dtype));
    }
    all
}

/// Returns the input, weights, biases and adapter from the operands.
fn split_operands(case: Case, t: &[Tensor]) -> (Tensor, Vec<ExpertTensors>, Vec<ExpertTensors>, Option<ExpertAdapter>) {
    let mut rest = &t[1..];
    let mut take = || {
        let (first, others) = rest.split_at(if case.fused { 1 } else { EXPERTS });
        rest = others;
        if case.fused { ExpertTensors::Fused(first[0].clone()) } else { ExpertTensors::Separate(first.to_vec()) }
    };
    let weights = case.outputs.iter().map(|_| take()).collect();
    let biases = case.outputs.iter().filter(|_| case.bias).map(|_| take()).collect();
    let adapter = case.adapter.map(|_| ExpertAdapter { a: rest[0].clone(), b: rest[1].clone(), scale: SCALE });
    (t[0].clone(), weights, biases, adapter)
}

fn projected(case: Case, t: &[Tensor]) -> Result<Tensor> {
    let (x, weights, biases, adapter) = split_operands(case, t);
    let projection = ExpertProjection::new(weights, biases, case.layout)?;
    let projection = adapter.map_or(Ok(projection.clone()), |adapter| projection.clone().with_adapter(adapter))?;
    projection.forward(&x, &assignment())
}

fn definition(case: Case, t: &[Tensor]) -> Result<Tensor> {
    let (x, weights, biases, adapter) = split_operands(case, t);
    let assignment = assignment();
    let y = composed::expert_projection(&x, &weights, &biases, case.layout, &assignment, composed::linear)?;
    adapter.map_or(Ok(y.clone()), |adapter| y + adapter.composed(&x, &assignment, composed::linear)?)
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
        for fused in [false, true] {
            for (dtype, _) in DTYPES {
                for (outputs, bias) in [(&[6][..], false), (&[6][..], true), (&[5, 3][..], false), (&[4, 4][..], true)]
                {
                    all.push(Case { layout, fused, outputs, bias, adapter: None, dtype });
                    all.push(Case { layout, fused, outputs, bias, adapter: Some(DType::F32), dtype });
                }
                all.push(Case { layout, fused, adapter: Some(dtype), dtype, ..PLAIN });
            }
        }
    }
    all
}

fn tolerance(dtype: DType) -> f64 {
    DTYPES.iter().find(|(candidate, _)| *candidate == dtype).unwrap().1
}

#[test]
fn projections_and_their_gradients_are_those_of_a_loop_over_the_experts() {
    for case in cases() {
        let (found, want) = (|t: &[Tensor]| projected(case, t), |t: &[Tensor]| definition(case, t));
        check(&operands(case), tolerance(case.dtype), &format!("{case:?}"), found, want);
    }
}

/// Returns the bits of a result and of all gradients.
fn bits(case: Case) -> (Vec<f32>, Vec<Vec<f32>>) {
    let (y, grads) = differentiated(&operands(case), |t| projected(case, t));
    (values(&y), grads.iter().map(|grad| values(grad.as_ref().unwrap())).collect())
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    for case in cases().into_iter().filter(|case| case.outputs.len() == 2) {
        let one = pool(1).install(|| bits(case));
        for threads in [2, 3] {
            assert!(pool(threads).install(|| bits(case)) == one, "{case:?}, {threads} threads");
        }
    }
}

#[test]
fn fused_and_separate_tensors_give_the_same_bits() {
    for case in cases().into_iter().filter(|case| !case.fused) {
        let (separate, fused) = (bits(case), bits(Case { fused: true, ..case }));
        assert!(separate.0 == fused.0, "{case:?}");
        let joined = |(_, grads): (Vec<f32>, Vec<Vec<f32>>)| grads.concat();
        assert!(joined(separate) == joined(fused), "{case:?}");
    }
}

#[test]
fn a_projection_has_the_bits_of_a_linear_layer_for_each_expert() {
    for (dtype, _) in DTYPES {
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            let case = Case { layout, dtype, bias: true, ..PLAIN };
            let (x, weights, biases, _) = split_operands(case, &operands(case));
            let want = composed::expert_projection(&x, &weights, &biases, layout, &assignment(), linear).unwrap();
            assert_eq!(values(&projected(case, &operands(case)).unwrap()), values(&want), "{case:?}");
        }
    }
}

#[test]
fn rows_of_an_expert_have_the_same_bits_whatever_the_others_choose() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case { adapter: Some(DType::F32), dtype, ..PLAIN };
        let operands = operands(case);
        let [a, b] = [operands.len() - 2, operands.len() - 1].map(|i| operands[i].clone());
        let (_, weights, ..) = split_operands(case, &operands);
        // Expert 4 gets the same 300 rows, after some that expert 1 gets.
        let expert_4_rows = tensor(&[300, INPUTS], 5, dtype);
        let run = |before: usize| {
            let chosen: Vec<u32> = std::iter::repeat_n(1, before).chain(std::iter::repeat_n(4, 300)).collect();
            let assignment = Arc::new(ExpertAssignment::new(&chosen, 1, EXPERTS).unwrap());
            let x = Tensor::cat(&[&tensor(&[before, INPUTS], 6, dtype), &expert_4_rows], 0).unwrap();
            let (y, grads) = differentiated(&[x, a.clone(), b.clone()], |t| {
                let adapter = ExpertAdapter { a: t[1].clone(), b: t[2].clone(), scale: SCALE };
                let projection = ExpertProjection::new(weights.clone(), Vec::new(), case.layout)?;
                projection.with_adapter(adapter)?.forward(&t[0], &assignment)?.narrow(0, before, 300)
            });
            let grad_a = grads[1].as_ref().unwrap().narrow(0, 4 * RANK, RANK).unwrap();
            let grad_x = grads[0].as_ref().unwrap().narrow(0, before, 300).unwrap();
            [values(&y), values(&grad_a), values(&grad_x)]
        };
        let alone = run(0);
        assert!(alone.iter().all(|values| values.iter().any(|x| *x != 0.0)));
        for before in [1, 100, 300] {
            assert!(run(before) == alone, "{dtype:?}, {} before", counted(before, "row"));
        }
    }
}

#[test]
fn columns_of_b_belong_to_the_experts_in_turn() {
    // In PEFT, A is [experts, r, in] and B is [out, r, experts]. With one input and one output, the delta is a number.
    let weights = ExpertTensors::Fused(Tensor::zeros((2, 1, 1), DType::F32, &Device::Cpu).unwrap());
    let a = Tensor::new(&[[1f32], [10.0], [100.0], [1000.0]], &Device::Cpu).unwrap();
    let b = Tensor::new(&[[2f32, 3.0, 5.0, 7.0]], &Device::Cpu).unwrap();
    let projection = ExpertProjection::new(vec![weights], Vec::new(), WeightLayout::OutIn).unwrap();
    let projection = projection.with_adapter(ExpertAdapter { a, b, scale: 1.0 }).unwrap();
    let assignment = Arc::new(ExpertAssignment::new(&[0, 1], 1, 2).unwrap());
    let x = Tensor::ones((2, 1), DType::F32, &Device::Cpu).unwrap();
    let y = projection.forward(&x, &assignment).unwrap();
    assert_eq!(values(&y), [2.0 * 1.0 + 5.0 * 10.0, 3.0 * 100.0 + 7.0 * 1000.0]);
    let without = without_adapters(|| projection.forward(&x, &assignment)).unwrap();
    assert_eq!(values(&without), [0.0, 0.0]);
}

#[test]
fn weights_in_f32_take_16_bit_rows_and_experts_without_rows_still_have_gradients() {
    // This is the loop over the experts, which other devices also use.
    for fused in [false, true] {
        let case = Case { fused, bias: true, outputs: &[5, 3], adapter: Some(DType::F32), ..PLAIN };
        let mut t = operands(case);
        t[0] = t[0].to_dtype(DType::BF16).unwrap();
        check(&t, tolerance(DType::BF16), "f32 weights", |t| projected(case, t), |t| definition(case, t));
    }
}

#[test]
fn no_rows_at_all_give_gradients_of_zeros() {
    let empty = Arc::new(ExpertAssignment::new(&[], 2, EXPERTS).unwrap());
    let fused = Case { fused: true, adapter: Some(DType::F32), ..PLAIN };
    // Rows whose dtype differs from that of the weights use the loop over the experts.
    for (case, rows_dtype) in [(Case { bias: true, ..PLAIN }, DType::F32), (fused, DType::F32), (fused, DType::BF16)] {
        let mut t = operands(case);
        t[0] = t[0].narrow(0, 0, 0).unwrap().to_dtype(rows_dtype).unwrap();
        let vars: Vec<Var> = t.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
        let t: Vec<Tensor> = vars.iter().map(|var| var.as_tensor()).cloned().collect();
        let (x, weights, biases, adapter) = split_operands(case, &t);
        let projection = ExpertProjection::new(weights, biases, case.layout).unwrap();
        let projection = match adapter {
            Some(adapter) => projection.with_adapter(adapter).unwrap(),
            None => projection,
        };
        let y = projection.forward(&x, &empty).unwrap();
        assert_eq!(y.dims(), [0, 6]);
        let loss = (y.sum_all().unwrap() + 0.0).unwrap();
        let grads = loss.backward().unwrap();
        for (i, var) in vars.iter().enumerate() {
            let grad = grads.get(var).unwrap_or_else(|| panic!("{case:?}: operand {i} has no gradient"));
            assert!(values(grad).iter().all(|x| *x == 0.0), "{case:?}");
        }
    }
}

#[test]
fn only_the_tensors_of_experts_with_rows_are_read() {
    // Experts 3 and 6 have shapes but no values, like parameters that a rank has released.
    let case = Case { outputs: &[5, 3], bias: true, ..PLAIN };
    let mut t = operands(case);
    let want = values(&projected(case, &t).unwrap());
    let released = |t: &Tensor| {
        let storage = candle_core::Storage::Cpu(candle_core::CpuStorage::F32(Vec::new()));
        Tensor::from_storage(storage, t.shape().clone(), candle_core::op::BackpropOp::none(), false)
    };
    for parameter in 0..4 {
        for expert in [3, 6] {
            let index = 1 + parameter * EXPERTS + expert;
            t[index] = released(&t[index]);
        }
    }
    assert_eq!(values(&projected(case, &t).unwrap()), want);
    t[1 + 1] = released(&t[1 + 1]);
    let error = projected(case, &t).unwrap_err().to_string();
    assert!(error.contains("experts") && error.contains("holds 0 elements"), "{error}");
}

#[test]
fn projections_that_do_not_fit_are_refused() {
    let refusal = |result: Result<ExpertProjection>| without_backtrace(&result.unwrap_err().to_string()).to_string();
    let fused = |dims: &[usize]| ExpertTensors::Fused(tensor(dims, 1, DType::F32));
    let new = |weights, biases| ExpertProjection::new(weights, biases, WeightLayout::OutIn);
    insta::assert_snapshot!(refusal(new(vec![fused(&[4, 6])], vec![])), @"experts: the weight of each of 4 experts has shape [6]; there must be at least one expert, and a matrix for each");
    insta::assert_snapshot!(refusal(new(vec![], vec![])), @"experts: a projection has 0 weights and 0 biases; there must be at least one weight, and either a bias for each weight or no bias");
    insta::assert_snapshot!(refusal(new(vec![fused(&[4, 6, 9]), fused(&[3, 6, 9])], vec![])), @"experts: a weight of 3 experts with 9 inputs and dtype F32 is joined to one of 4 experts with 9 inputs and dtype F32; these must be equal");
    insta::assert_snapshot!(refusal(new(vec![fused(&[4, 6, 9])], vec![fused(&[4, 9])])), @"experts: the biases of 4 experts have shape [9]; the weights of 4 experts require [6]");
    let uneven = [4, 5].map(|outputs| tensor(&[outputs, 9], 1, DType::F32));
    insta::assert_snapshot!(refusal(new(vec![ExpertTensors::Separate(uneven.to_vec())], vec![])), @"experts: the weight of expert 1 has shape [5, 9] and dtype F32; expert 0 has [4, 9] and F32, and all must be equal");
    let adapter = ExpertAdapter { a: tensor(&[8, 9], 1, DType::F32), b: tensor(&[6, 7], 1, DType::F32), scale: 1.0 };
    insta::assert_snapshot!(refusal(new(vec![fused(&[4, 6, 9])], vec![]).unwrap().with_adapter(adapter)), @"experts: the adapter's matrices have shapes [8, 9] and [6, 7]; 4 experts of 9 inputs and 6 outputs need [4 r, 9] and [6, 4 r]");
    let projection = new(vec![fused(&[4, 6, 9])], vec![]).unwrap();
    let error = projection.forward(&tensor(&[3, 9], 1, DType::F32), &assignment()).unwrap_err().to_string();
    insta::assert_snapshot!(without_backtrace(&error), @"experts: the input has shape [3, 9] and the assignment has 7 experts; for 82 slots, a projection of 4 experts needs an input of shape [82, 9] and an assignment of as many experts");
    let down = new(vec![fused(&[4, 9, 5])], vec![]).unwrap();
    let error = ExpertMlp::new(projection, down, ExpertActivation::Silu, GateUpOrder::Halves).unwrap_err().to_string();
    insta::assert_snapshot!(without_backtrace(&error), @"experts: gate and up of 4 experts have 6 outputs, and down of 4 experts has 5 inputs; the numbers of experts must be equal, and there must be 10 outputs");
}

// --- The complete layer ---

/// Runs a block of a mixture: router, experts, and a shared expert with a gate. The operands are x, the router's
/// weight, gate and up, down, and the shared expert's weights.
fn block(t: &[Tensor], options: RouterOptions) -> Result<Tensor> {
    let logits = linear(&t[0], &t[1], None, WeightLayout::OutIn)?;
    let routing = route(&logits, options)?;
    let fused = |t: &Tensor| vec![ExpertTensors::Fused(t.clone())];
    let projection = |weights| ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn);
    let (gate_up, down) = (projection(fused(&t[2]))?, projection(fused(&t[3]))?);
    let mlp = ExpertMlp::new(gate_up, down, ExpertActivation::Silu, GateUpOrder::Halves)?;
    let y = mlp.forward(&t[0], &routing)?;
    let shared = Linear::from_tensors(t[4].clone(), None).forward(&t[0])?;
    add_gated(&y, &linear(&t[0], &t[5], None, WeightLayout::OutIn)?, &shared)
}

/// Computes the same as [`block`], in a plain loop.
fn block_in_a_loop(t: &[Tensor], choices: &[u32], options: RouterOptions) -> Result<Tensor> {
    let (batch, time, width) = t[0].dims3()?;
    let x = t[0].reshape((batch * time, width))?;
    let k = options.experts_per_row;
    let weights = composed::routing_weights(&x.matmul(&t[1].t()?)?, choices, k, options.order)?;
    let inner = t[3].dim(2)?;
    let mut out = x.zeros_like()?;
    for expert in 0..t[2].dim(0)? {
        let slots: Vec<u32> = (0..choices.len() as u32).filter(|i| choices[*i as usize] == expert as u32).collect();
        if slots.is_empty() {
            continue;
        }
        let rows: Vec<u32> = slots.iter().map(|i| i / k as u32).collect();
        let (n, rows) = (slots.len(), Tensor::new(rows, &Device::Cpu)?);
        let gate_up = x.index_select(&rows, 0)?.matmul(&t[2].get(expert)?.t()?)?;
        let (gate, up) = (gate_up.narrow(1, 0, inner)?, gate_up.narrow(1, inner, inner)?);
        let y = (((&gate / (gate.neg()?.exp()? + 1.0)?)? * up)?).matmul(&t[3].get(expert)?.t()?)?;
        let weights = weights.flatten_all()?.index_select(&Tensor::new(slots, &Device::Cpu)?, 0)?.reshape((n, 1))?;
        out = out.index_add(&rows, &y.broadcast_mul(&weights)?, 0)?;
    }
    let factor = ((x.matmul(&t[5].t()?)?.neg()?.exp()? + 1.0)?).recip()?;
    (out + x.matmul(&t[4].t()?)?.broadcast_mul(&factor)?)?.reshape((batch, time, width))
}

#[test]
fn a_whole_block_is_a_plain_loop_over_its_experts() {
    let shapes: [&[usize]; 6] = [&[2, 21, 8], &[6, 8], &[6, 10, 8], &[6, 8, 5], &[8, 8], &[1, 8]];
    for order in ORDERS {
        let options = RouterOptions { experts_per_row: 2, order, keep_f32: true };
        let t: Vec<Tensor> = (1..).zip(shapes).map(|(seed, shape)| tensor(shape, seed, DType::F32)).collect();
        let logits = linear(&t[0], &t[1], None, WeightLayout::OutIn).unwrap();
        let choices = route(&logits, options).unwrap().choices().to_vec();
        let found = |t: &[Tensor]| block(t, options);
        check(&t, 1e-5, &format!("{order:?}"), found, |t| block_in_a_loop(t, &choices, options));
        let threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (y, grads) = differentiated(&t, |t| block(t, options));
                (values(&y), grads.iter().map(|grad| values(grad.as_ref().unwrap())).collect::<Vec<_>>())
            })
        };
        assert!(threads(1) == threads(2), "{order:?}");
    }
}

#[test]
fn the_mlp_of_an_adapted_mixture_is_its_parts_one_after_the_other() {
    // The MLP is one operation. Its result must have the same bits as that of its parts.
    for (dtype, _) in DTYPES {
        for adapters in [false, true] {
            let mut t = vec![tensor(&[ROWS, 8], 1, dtype)];
            let shapes: [&[usize]; 4] = [&[EXPERTS, 5, 8], &[EXPERTS, 5, 8], &[EXPERTS, 6, 5], &[EXPERTS, 6]];
            t.extend((2..).zip(shapes).map(|(seed, shape)| tensor(shape, seed, dtype)));
            let low_rank = |outputs: usize, inputs: usize| [vec![EXPERTS * 2, inputs], vec![outputs, EXPERTS * 2]];
            let adapter_shapes = low_rank(10, 8).into_iter().chain(low_rank(6, 5));
            t.extend((7..).zip(adapter_shapes).map(|(seed, shape)| tensor(&shape, seed, DType::F32)));
            t.push(tensor(&[ROWS, EXPERTS], 12, dtype));
            let projections = |t: &[Tensor]| -> Result<(ExpertProjection, ExpertProjection)> {
                let fused = |i: usize| ExpertTensors::Fused(t[i].clone());
                let gate_up = ExpertProjection::new(vec![fused(1), fused(2)], Vec::new(), WeightLayout::OutIn)?;
                let down = ExpertProjection::new(vec![fused(3)], vec![fused(4)], WeightLayout::OutIn)?;
                let adapter = |i: usize| ExpertAdapter { a: t[i].clone(), b: t[i + 1].clone(), scale: SCALE };
                Ok(match adapters {
                    true => (gate_up.with_adapter(adapter(5))?, down.with_adapter(adapter(7))?),
                    false => (gate_up, down),
                })
            };
            let options = RouterOptions { experts_per_row: 2, order: ORDERS[1], keep_f32: false };
            let (gate, order) = (ExpertActivation::Silu, GateUpOrder::Halves);
            let whole = differentiated(&t, |t| {
                let (gate_up, down) = projections(t)?;
                ExpertMlp::new(gate_up, down, gate, order)?.forward(&t[0], &route(&t[9], options)?)
            });
            let parts = differentiated(&t, |t| {
                let ((gate_up, down), routing) = (projections(t)?, route(&t[9], options)?);
                let assignment = routing.assignment();
                let gate_up_values = gate_up.forward(&expert_rows(&t[0], assignment)?, assignment)?;
                let y = down.forward(&gated_activation(&gate_up_values, gate, order)?, assignment)?;
                combine_experts(&y, routing.weights(), assignment, &(ROWS, 6).into())
            });
            let label = format!("{dtype:?}, adapters {adapters}");
            assert!(values(&whole.0) == values(&parts.0), "{label}");
            for (i, (whole, parts)) in whole.1.iter().zip(&parts.1).enumerate() {
                let bits = |grad: &Option<Tensor>| grad.as_ref().map(values);
                assert!(bits(whole) == bits(parts), "{label}: operand {i}");
            }
        }
    }
}

#[test]
fn gradients_of_two_uses_of_the_same_experts_are_added() {
    let case = Case { bias: true, adapter: Some(DType::F32), ..PLAIN };
    let t = operands(case);
    let (_, once) = differentiated(&t, |t| projected(case, t));
    let (_, twice) = differentiated(&t, |t| add(&projected(case, t)?, &projected(case, t)?));
    for (i, (once, twice)) in once.iter().zip(&twice).enumerate() {
        let (once, twice) = (once.as_ref().unwrap(), twice.as_ref().unwrap());
        assert!(distance(twice, &(once * 2.0).unwrap()) < 1e-6, "operand {i}");
    }
}
