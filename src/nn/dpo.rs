//! Direct preference optimization (Rafailov et al. 2023): the loss over pairs of a chosen and a rejected answer.

use crate::graph::{Grad, OpInputs};
use candle_core::{CpuStorage, DType, Device, Result, Tensor, bail};
use serde::Serialize;

/// The result of [`dpo_loss`].
#[derive(Debug, Clone)]
pub struct DpoLoss {
    /// The mean loss, an f32 scalar with a graph.
    pub loss: Tensor,
    /// The rewards of the answers.
    pub rewards: Rewards,
}

/// The implicit rewards of answers, as means over pairs. The reward of an answer is beta times the difference between
/// its log probabilities under the model and under the reference.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[non_exhaustive]
pub struct Rewards {
    /// The reward of the chosen answers.
    pub chosen: f64,
    /// The reward of the rejected answers.
    pub rejected: f64,
    /// The difference between the rewards of the chosen and the rejected answers.
    pub margin: f64,
    /// The fraction of pairs in which the chosen answer has the larger reward.
    pub accuracy: f64,
}

impl Rewards {
    /// Returns the rewards as numbers, for sums over batches and ranks.
    pub fn to_numbers(self) -> [f64; 4] {
        [self.chosen, self.rejected, self.margin, self.accuracy]
    }

    /// Creates the rewards from the numbers that [`Rewards::to_numbers`] returns.
    pub fn of_numbers([chosen, rejected, margin, accuracy]: [f64; 4]) -> Self {
        Self { chosen, rejected, margin, accuracy }
    }
}

/// Returns the mean over pairs of -log sigmoid(beta ((chosen - rejected) - (reference chosen - reference rejected))),
/// and the rewards.
///
/// All operands are `[pairs]`: sums of log probabilities of the answers' tokens, under the model (`policy`, with a
/// graph) and under its reference (without a graph), each for the chosen and the rejected answers. The reference of a
/// model with adapters is the model [without](crate::nn::without_adapters) its adapters.
///
/// # Errors
/// Fails if the operands have different shapes, if there are no pairs, or if beta is not positive and finite.
pub fn dpo_loss(policy: [&Tensor; 2], reference: [&Tensor; 2], beta: f64) -> Result<DpoLoss> {
    let pairs = policy[0].dims1()?;
    if pairs == 0 || [policy[1], reference[0], reference[1]].iter().any(|operand| operand.dims() != [pairs]) {
        let [a, b, c, d] = [policy[0], policy[1], reference[0], reference[1]].map(Tensor::dims);
        bail!(
            "dpo_loss: log probabilities have shapes {a:?}, {b:?}, {c:?}, {d:?}; all must have the same shape [pairs], \
             with at least one pair"
        )
    }
    if !(beta > 0.0 && beta.is_finite()) {
        bail!("dpo_loss: beta is {beta}; it must be a positive finite number, such as 0.1")
    }
    let difference = |[chosen, rejected]: [&Tensor; 2]| chosen.to_dtype(DType::F32)? - rejected.to_dtype(DType::F32)?;
    let margins = ((difference(policy)? - difference(reference)?.detach())? * beta)?;
    let margins = margins.to_device(&Device::Cpu)?;
    let values: Vec<f32> = margins.detach().to_vec1()?;
    let mean = |sum: f64| sum / pairs as f64;
    let reward = |side: usize| -> Result<f64> {
        let values = |operand: &Tensor| operand.detach().to_dtype(DType::F32)?.to_vec1::<f32>();
        let (policy, reference) = (values(policy[side])?, values(reference[side])?);
        Ok(mean(policy.iter().zip(reference).map(|(policy, reference)| beta * f64::from(policy - reference)).sum()))
    };
    let rewards = Rewards {
        chosen: reward(0)?,
        rejected: reward(1)?,
        margin: mean(values.iter().map(|margin| f64::from(*margin)).sum()),
        accuracy: mean(values.iter().filter(|margin| **margin > 0.0).count() as f64),
    };
    Ok(DpoLoss { loss: mean_of_losses(&margins, &values)?, rewards })
}

/// Returns the mean of -log sigmoid(x), computed as max(-x, 0) + log(1 + exp(-|x|)), which never overflows. It is not
/// composed of Candle's operations, because the derivatives that these give to the two parts do not add up to the
/// correct one at 0, where every training run begins.
fn mean_of_losses(margins: &Tensor, values: &[f32]) -> Result<Tensor> {
    const NAME: &str = "dpo_loss";
    let inputs = OpInputs::of([Some(margins)])?;
    let losses = values.iter().map(|x| f64::from(*x)).map(|x| (-x).max(0.0) + (-x.abs()).exp().ln_1p());
    let pairs = values.len() as f64;
    let mean = (losses.sum::<f64>() / pairs) as f32;
    // The derivative of a loss is -sigmoid(-x).
    let slopes: Vec<f64> = values.iter().map(|x| -1.0 / (1.0 + f64::from(*x).exp()) / pairs).collect();
    inputs.result(NAME, CpuStorage::F32(vec![mean]), (), move |grad, [to_margins]| {
        let factor = grad.read::<f32, _>(NAME, |grad| Ok(f64::from(grad.first().copied().unwrap_or(0.0))))?;
        to_margins.deliver(Grad::own(slopes.iter().map(|slope| (slope * factor) as f32).collect::<Vec<f32>>()))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Var;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn loss_and_gradients_are_those_of_the_formula() {
        let (chosen, rejected) = ([-3.0f32, -40.0, -700.0, 0.0], [-5.0f32, -20.0, -1.0, -900.0]);
        let (reference_chosen, reference_rejected) = ([-4.0f32, -30.0, -2.0, -1.0], [-4.5f32, -30.0, -600.0, -2.0]);
        let beta = 0.4;
        let [c, r] = [chosen, rejected].map(|values| Var::from_tensor(&tensor(&values)).unwrap());
        let reference = [tensor(&reference_chosen), tensor(&reference_rejected)];
        let dpo = dpo_loss([c.as_tensor(), r.as_tensor()], [&reference[0], &reference[1]], beta).unwrap();
        let margin = |i: usize| {
            let wide = |values: [f32; 4]| f64::from(values[i]);
            beta * ((wide(chosen) - wide(rejected)) - (wide(reference_chosen) - wide(reference_rejected)))
        };
        // In f64, the plain formula does not overflow for any of these.
        let loss = |x: f64| (1.0 + (-x).exp()).ln();
        let want = (0..4).map(|i| loss(margin(i))).sum::<f64>() / 4.0;
        let found = f64::from(dpo.loss.to_scalar::<f32>().unwrap());
        assert!((found / want - 1.0).abs() < 1e-6, "{found} {want}");
        let Rewards { chosen: chosen_reward, rejected: rejected_reward, margin: mean, accuracy } = dpo.rewards;
        assert_eq!(accuracy, 0.5);
        assert!((mean / ((0..4).map(margin).sum::<f64>() / 4.0) - 1.0).abs() < 1e-6);
        let reward =
            |policy: [f32; 4], by: [f32; 4]| (0..4).map(|i| beta * f64::from(policy[i] - by[i])).sum::<f64>() / 4.0;
        assert!((chosen_reward / reward(chosen, reference_chosen) - 1.0).abs() < 1e-6, "{chosen_reward}");
        assert!((rejected_reward / reward(rejected, reference_rejected) - 1.0).abs() < 1e-6, "{rejected_reward}");
        let grads = dpo.loss.backward().unwrap();
        let [dc, dr] = [&c, &r].map(|var| grads.get(var.as_tensor()).unwrap().to_vec1::<f32>().unwrap());
        for i in 0..4 {
            let want = -beta / (1.0 + margin(i).exp()) / 4.0;
            assert!((f64::from(dc[i]) - want).abs() < 1e-6 && (f64::from(dr[i]) + want).abs() < 1e-6, "{i}: {dc:?}");
        }
    }

    #[test]
    fn at_a_margin_of_zero_both_sides_still_learn() {
        let [c, r] = [-3.0f32, -5.0].map(|value| Var::from_tensor(&tensor(&[value])).unwrap());
        let dpo = dpo_loss([c.as_tensor(), r.as_tensor()], [&tensor(&[-3.0]), &tensor(&[-5.0])], 0.1).unwrap();
        assert!((dpo.loss.to_scalar::<f32>().unwrap() - 2f32.ln()).abs() < 1e-6);
        let grads = dpo.loss.backward().unwrap();
        let gradient = grads.get(c.as_tensor()).unwrap().to_vec1::<f32>().unwrap()[0];
        assert!((gradient + 0.05).abs() < 1e-6, "{gradient}");
    }

    #[test]
    fn operands_that_make_no_pairs_are_refused() {
        let (two, one) = (tensor(&[-1.0, -2.0]), tensor(&[-1.0]));
        let text = |operands: [&Tensor; 4], beta| {
            let [a, b, c, d] = operands;
            crate::error::without_backtrace(&dpo_loss([a, b], [c, d], beta).unwrap_err().to_string())
        };
        insta::assert_snapshot!(text([&two, &two, &one, &two], 0.1), @"dpo_loss: log probabilities have shapes [2], [2], [1], [2]; all must have the same shape [pairs], with at least one pair");
        insta::assert_snapshot!(text([&one; 4], 0.0), @"dpo_loss: beta is 0; it must be a positive finite number, such as 0.1");
    }
}
