//! Mixtures of experts composed of Candle's differentiable ops: a loop over the experts.

use super::wide;
use crate::nn::WeightLayout;
use crate::nn::experts::{ExpertActivation, ExpertAssignment, ExpertTensors, GateUpOrder, RouterOrder};
use candle_core::{D, DType, Result, Tensor};

/// Returns the weights of the chosen experts, as [`crate::nn::route`] computes them before it rounds them, from
/// `logits` `[rows, experts]`.
pub fn routing_weights(logits: &Tensor, choices: &[u32], k: usize, order: RouterOrder) -> Result<Tensor> {
    let chosen = Tensor::new(choices, logits.device())?.reshape(((), k))?;
    let logits = wide(logits)?;
    match order {
        RouterOrder::TopThenSoftmax => candle_nn::ops::softmax(&logits.gather(&chosen, 1)?, D::Minus1),
        RouterOrder::SoftmaxThenTop { renormalize } => {
            let weights = candle_nn::ops::softmax(&logits, D::Minus1)?.gather(&chosen, 1)?;
            if renormalize { weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?) } else { Ok(weights) }
        }
    }
}

/// See [`crate::nn::expert_rows`]; `x` is `[rows, width]`.
pub fn expert_rows(x: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    x.contiguous()?.index_select(&Tensor::new(assignment.row_of_slots(), x.device())?, 0)
}

/// See [`crate::nn::ExpertProjection`]. `linear` computes the product of one expert.
pub fn expert_projection(
    x: &Tensor,
    weights: &[ExpertTensors],
    biases: &[ExpertTensors],
    layout: WeightLayout,
    assignment: &ExpertAssignment,
    linear: impl Fn(&Tensor, &Tensor, Option<&Tensor>, WeightLayout) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut rows = Vec::new();
    for expert in assignment.active_experts() {
        let slots = assignment.slots_of(expert);
        let x = x.narrow(0, slots.start, slots.len())?.contiguous()?;
        let mut columns = Vec::new();
        for (part, weight) in weights.iter().enumerate() {
            let bias = biases.get(part).map(|bias| bias.of(expert)).transpose()?;
            columns.push(linear(&x, &weight.of(expert)?, bias.as_ref(), layout)?);
        }
        rows.push(Tensor::cat(&columns, 1)?);
    }
    if rows.is_empty() {
        let outputs = |weight: &ExpertTensors| weight.dims()[if layout == WeightLayout::OutIn { 0 } else { 1 }];
        return Tensor::zeros((0, weights.iter().map(outputs).sum::<usize>()), x.dtype(), x.device());
    }
    Tensor::cat(&rows, 0)
}

/// See [`crate::nn::combine_experts`].
pub fn combine_experts(y: &Tensor, weights: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let width = y.dim(1)?;
    let choices = Tensor::new(assignment.choice_of_slots(), y.device())?;
    let weights = weights.to_dtype(wide(y)?.dtype())?.flatten_all()?.index_select(&choices, 0)?.unsqueeze(1)?;
    let weighted = wide(y)?.broadcast_mul(&weights)?;
    let zeros = Tensor::zeros((assignment.rows(), width), weighted.dtype(), y.device())?;
    // Slots are sorted by expert, so the results of a row's experts are added in ascending order of the experts'
    // numbers.
    let rows = Tensor::new(assignment.row_of_slots(), y.device())?;
    zeros.index_add(&rows, &weighted.contiguous()?, 0)?.to_dtype(y.dtype())
}

/// See [`crate::nn::gated_activation`].
pub fn gated_activation(x: &Tensor, gate: ExpertActivation, order: GateUpOrder) -> Result<Tensor> {
    let width = x.dim(D::Minus1)? / 2;
    let h = wide(x)?;
    let (g, up) = match order {
        GateUpOrder::Halves => (h.narrow(D::Minus1, 0, width)?, h.narrow(D::Minus1, width, width)?),
        GateUpOrder::Interleaved => {
            let mut shape = x.dims().to_vec();
            shape[x.rank() - 1] = width;
            shape.push(2);
            let pairs = h.reshape(shape)?;
            (pairs.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?, pairs.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)?)
        }
    };
    let y = match gate {
        ExpertActivation::Silu => ((&g * sigmoid(&g)?)? * up)?,
        ExpertActivation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, up) = (g.minimum(limit)?, up.minimum(limit)?.maximum(-limit)?);
            ((up + 1.0)? * (&g * sigmoid(&(&g * alpha)?)?)?)?
        }
    };
    y.to_dtype(x.dtype())
}

/// Computes 1 / (1 + exp(-x)).
fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// See [`crate::nn::add_gated`].
pub fn add_gated(base: &Tensor, gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    shape[x.rank() - 1] = 1;
    let factor = sigmoid(&wide(&gate.reshape(shape)?)?)?;
    (wide(base)? + wide(x)?.broadcast_mul(&factor)?)?.to_dtype(base.dtype())
}

/// Returns the loss of [`crate::nn::load_balancing_loss`]: the sum of the experts' probabilities, each multiplied by
/// the factor of its expert in `factors`. Rows for which `mask` is false are left out. A loss of f64 logits is in
/// f64.
pub fn load_balancing_loss(logits: &[&Tensor], factors: &[f64], mask: Option<&[bool]>) -> Result<Tensor> {
    let mut loss = None;
    for logits in logits {
        let logits = wide(&logits.reshape(((), factors.len()))?)?;
        let mut p = candle_nn::ops::softmax(&logits, D::Minus1)?;
        if let Some(mask) = mask {
            let mask: Vec<f32> = mask.iter().map(|mask| f32::from(*mask)).collect();
            p = p.broadcast_mul(&Tensor::new(mask, p.device())?.unsqueeze(1)?.to_dtype(p.dtype())?)?;
        }
        let factors = Tensor::new(factors, p.device())?.to_dtype(p.dtype())?;
        let part = p.broadcast_mul(&factors)?.sum_all()?;
        loss = Some(loss.map_or(Ok(part.clone()), |loss: Tensor| loss + part)?);
    }
    loss.map_or_else(|| Tensor::zeros((), DType::F32, &candle_core::Device::Cpu), Ok)
}
