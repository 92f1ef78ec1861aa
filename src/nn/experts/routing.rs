//! Routers: the experts of each row, and their weights.

use super::ExpertAssignment;
use super::options::{RouterOptions, RouterOrder};
use crate::graph::OpInputs;
use crate::kernels::element::Element as _;
use crate::kernels::routing::{softmax, top};
use crate::kernels::{buffer, parallel};
use crate::nn::composed;
use crate::nn::in_f32::has_kernels;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::util::counted;
use candle_core::{DType, Result, Tensor, bail};
use std::sync::Arc;

/// The choices of a router for a batch of rows.
#[derive(Debug, Clone)]
pub struct Routing {
    logits: Tensor,
    weights: Tensor,
    choices: Arc<Vec<u32>>,
    experts_per_row: usize,
    assignment: Arc<ExpertAssignment>,
}

impl Routing {
    /// Returns the router's logits, `[.., experts]`.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Returns the weights of the chosen experts, `[rows, experts per row]`, in the order of the choices.
    pub fn weights(&self) -> &Tensor {
        &self.weights
    }

    /// Returns the chosen experts, row by row; within a row, the best is first.
    pub fn choices(&self) -> &[u32] {
        &self.choices
    }

    /// Returns the number of experts that each row chooses.
    pub fn experts_per_row(&self) -> usize {
        self.experts_per_row
    }

    /// Returns the rows, sorted by expert.
    pub fn assignment(&self) -> &Arc<ExpertAssignment> {
        &self.assignment
    }

    /// Returns the number of rows that chose each expert.
    pub fn counts(&self) -> Vec<usize> {
        self.assignment.counts()
    }
}

/// Chooses experts for each row of the router's `logits` `[.., experts]`. The logits are usually those of
/// [`linear`](crate::nn::linear()), with the model's dtype.
///
/// All numbers are computed in f32, and weights are rounded once. Among equal numbers, the expert with the lowest index
/// is chosen. The gradient passes through the weights of the chosen experts; the choice itself is constant.
///
/// # Errors
/// A number of experts per row that is 0 or exceeds the number of experts; logits without a dimension; a dtype other
/// than f32, bf16 or f16 on the CPU.
pub fn route(logits: &Tensor, options: RouterOptions) -> Result<Routing> {
    let (choices, assignment) = choose(logits, options)?;
    routing_from_choices(logits, options, choices, assignment)
}

/// Returns the experts of each row, the best first, and the rows sorted by expert.
pub(super) fn choose(logits: &Tensor, options: RouterOptions) -> Result<(Arc<Vec<u32>>, Arc<ExpertAssignment>)> {
    let k = options.experts_per_row;
    let experts = logits.dims().last().copied().unwrap_or(0);
    if experts == 0 {
        bail!("router: the logits have shape {:?}; their last dimension must be the number of experts", logits.dims())
    }
    if k == 0 || k > experts {
        bail!(
            "router: {k} of {} cannot be chosen for each row (the logits have shape {:?}); choose between 1 and \
             {experts}",
            counted(experts, "expert"),
            logits.dims()
        )
    }
    let rows = logits.elem_count() / experts;
    if logits.device().is_cpu() && !has_kernels(logits) {
        bail!("router: the logits have dtype {:?}; f32, bf16 or f16 is needed", logits.dtype())
    }
    let order = options.order;
    let host = rows_in_f32(&logits.detach())?;
    let mut choices = vec![0u32; rows * k];
    parallel::for_each_part(
        rows.div_ceil(ROWS_PER_TASK),
        parallel::ParallelChunks::new(&mut choices, ROWS_PER_TASK * k),
        |task, choices| {
            for (row, chosen) in (task * ROWS_PER_TASK..).zip(choices.chunks_exact_mut(k)) {
                let mut row = host[row * experts..][..experts].to_vec();
                if matches!(order, RouterOrder::SoftmaxThenTop { .. }) {
                    softmax(&mut row);
                }
                top(&row, chosen);
            }
        },
    );
    let assignment = Arc::new(ExpertAssignment::new(&choices, k, experts)?);
    Ok((Arc::new(choices), assignment))
}

/// Returns a routing with these choices, whose weights are computed from the logits.
pub(super) fn routing_from_choices(
    logits: &Tensor,
    options: RouterOptions,
    choices: Arc<Vec<u32>>,
    assignment: Arc<ExpertAssignment>,
) -> Result<Routing> {
    let (order, k, experts) = (options.order, options.experts_per_row, assignment.experts());
    let rows = assignment.rows();
    let dtype = if options.keep_f32 { DType::F32 } else { logits.dtype() };
    let weights = if logits.device().is_cpu() {
        weights_of(logits, rows_in_f32(&logits.detach())?, &choices, order, [rows, experts, k], dtype)?
    } else {
        let logits = logits.reshape((rows, experts))?;
        composed::routing_weights(&logits, &choices, k, order)?.to_dtype(dtype)?
    };
    Ok(Routing { logits: logits.clone(), weights, choices, experts_per_row: k, assignment })
}

const NAME: &str = "router";
/// The number of rows that one task computes.
const ROWS_PER_TASK: usize = 64;

/// Returns the values of a tensor in f32.
pub(super) fn rows_in_f32(logits: &Tensor) -> Result<Vec<f32>> {
    let logits = logits.to_device(&candle_core::Device::Cpu)?.contiguous()?;
    with_element!(logits.dtype(), NAME, E => with_elements::<E, _>(&logits, NAME, |values| {
        let mut wide = buffer::<f32>(values.len());
        E::widen(values, &mut wide);
        Ok(wide)
    }))
}

/// Returns the weights of the chosen experts as an operation on the logits, whose values are `host`.
fn weights_of(
    logits: &Tensor,
    mut host: Vec<f32>,
    choices: &Arc<Vec<u32>>,
    order: RouterOrder,
    [rows, experts, k]: [usize; 3],
    dtype: DType,
) -> Result<Tensor> {
    let inputs = OpInputs::of([Some(logits)])?;
    let (logits_dtype, choices) = (logits.dtype(), choices.clone());
    let mut weights = vec![0f32; rows * k];
    for ((row, chosen), weights) in
        host.chunks_exact_mut(experts).zip(choices.chunks_exact(k)).zip(weights.chunks_exact_mut(k))
    {
        row_weights(order, row, chosen, weights);
    }
    // With `SoftmaxThenTop`, a softmax over all experts has replaced the logits.
    let probabilities = if inputs.are_wanted() { host } else { Vec::new() };
    let unrounded = if inputs.are_wanted() { weights.clone() } else { Vec::new() };
    let storage = with_element!(dtype, NAME, W => {
        let mut rounded = buffer::<W>(weights.len());
        W::narrow(&weights, &mut rounded);
        Ok(W::storage(rounded))
    })?;
    inputs.result(NAME, storage, (rows, k), move |grad, [to_logits]| {
        let mut weight_grads = buffer::<f32>(rows * k);
        with_element!(dtype, NAME, W => grad.read::<W, _>(NAME, |grad| {
            W::widen(grad, &mut weight_grads);
            Ok(())
        }))?;
        with_element!(logits_dtype, NAME, E => to_logits.make::<E>(rows * experts, |dlogits| {
            let parts = parallel::ParallelChunks::new(dlogits, experts);
            parallel::for_each_part(rows, parts, |row, dlogits| {
                let at = row * k..(row + 1) * k;
                let (chosen, weights, grads) = (&choices[at.clone()], &unrounded[at.clone()], &weight_grads[at]);
                let mut slopes = vec![0f32; experts];
                row_gradient(order, &probabilities[row * experts..][..experts], chosen, weights, grads, &mut slopes);
                E::narrow(&slopes, dlogits);
            });
            Ok(())
        }))
    })
}

/// Writes the weights of the chosen experts. With [`RouterOrder::SoftmaxThenTop`], also replaces the row of logits with
/// its softmax.
fn row_weights(order: RouterOrder, row: &mut [f32], chosen: &[u32], weights: &mut [f32]) {
    let pick = |row: &[f32], weights: &mut [f32]| {
        weights.iter_mut().zip(chosen).for_each(|(weight, expert)| *weight = row[*expert as usize]);
    };
    match order {
        RouterOrder::SoftmaxThenTop { renormalize } => {
            softmax(row);
            pick(row, weights);
            if renormalize {
                let sum = weights.iter().sum::<f32>();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
        }
        RouterOrder::TopThenSoftmax => {
            pick(row, weights);
            softmax(weights);
        }
    }
}

/// Computes the gradient of a row of logits and writes it to `slopes`, which must contain zeros. `probabilities` is the
/// row after [`row_weights`], `weights` the result before it was rounded, and `grads` the gradient of the result.
fn row_gradient(
    order: RouterOrder,
    probabilities: &[f32],
    chosen: &[u32],
    weights: &[f32],
    grads: &[f32],
    slopes: &mut [f32],
) {
    let mean = weights.iter().zip(grads).map(|(weight, grad)| weight * grad).sum::<f32>();
    let chosen = chosen.iter().map(|expert| *expert as usize);
    match order {
        RouterOrder::TopThenSoftmax => {
            for (expert, (weight, grad)) in chosen.zip(weights.iter().zip(grads)) {
                slopes[expert] = weight * (grad - mean);
            }
        }
        RouterOrder::SoftmaxThenTop { renormalize } => {
            // First the gradient of the chosen probabilities, then that of the softmax.
            let sum = chosen.clone().map(|expert| probabilities[expert]).sum::<f32>();
            for (expert, grad) in chosen.clone().zip(grads) {
                slopes[expert] = if renormalize { (grad - mean) / sum } else { *grad };
            }
            let inner = chosen.map(|expert| slopes[expert] * probabilities[expert]).sum::<f32>();
            for (slope, p) in slopes.iter_mut().zip(probabilities) {
                *slope = p * (*slope - inner);
            }
        }
    }
}
