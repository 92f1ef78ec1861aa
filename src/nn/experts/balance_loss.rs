//! The auxiliary loss of mixtures of experts, which is smallest if all experts are chosen equally often.

use super::Routing;
use super::routing::rows_in_f32;
use crate::graph::OpInputs;
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::routing::softmax;
use crate::nn::composed;
use crate::nn::in_f32::{has_kernels, with_grad};
use crate::tensor::element::with_element;
use candle_core::{CpuStorage, Result, Tensor, bail};

/// Returns the load-balancing loss of a whole model (Fedus et al. 2021), a scalar in f32, from the routings of its sparse
/// layers:
///
/// ```text
///   loss = E sum over e of (T_e / R) (S_e / R)
/// ```
///
/// T_e is the number of rows that chose expert e, S_e the sum of its probabilities (a softmax over all experts, whatever
/// the router's order of operations), both over the rows of all layers; R is the number of rows times the number of
/// layers. This is one loss for the model, not the mean of the layers' losses. With perfect balance, it is the number of
/// experts per row. T_e is a constant for the gradient.
///
/// `counts`, if given, has one element for each row of a layer. Rows with `false` (padding) do not count.
///
/// # Errors
/// No layer; layers of different sizes; a `counts` of a different length, or without a row that counts.
pub fn load_balancing_loss(layers: &[Routing], counts: Option<&[bool]>) -> Result<Tensor> {
    let Some(first) = layers.first() else {
        bail!("{NAME}: there is no layer with experts; compute the loss only for models that have one")
    };
    let (rows, experts, k) = (first.assignment().rows(), first.assignment().experts(), first.experts_per_row());
    for (i, layer) in layers.iter().enumerate() {
        let sizes = [layer.assignment().rows(), layer.assignment().experts(), layer.experts_per_row()];
        if sizes != [rows, experts, k] || layer.logits().dtype() != first.logits().dtype() {
            bail!(
                "{NAME}: layer {i} has {} rows, {} experts, {} of them for each row, and logits in {:?}; the first has {rows}, \
                 {experts}, {k} and {:?}, and all must be equal",
                sizes[0],
                sizes[1],
                sizes[2],
                layer.logits().dtype(),
                first.logits().dtype()
            )
        }
    }
    if let Some(counts) = counts
        && counts.len() != rows
    {
        bail!("{NAME}: the mask has {} elements; there are {rows} rows", counts.len())
    }
    let counted = counts.map_or(rows, |counts| counts.iter().filter(|counts| **counts).count());
    if counted == 0 {
        bail!("{NAME}: none of the {rows} rows counts; leave out micro batches that are only padding")
    }
    let does_count = |row: usize| counts.is_none_or(|counts| counts[row]);
    let n = (counted * layers.len()) as f64;
    let mut chosen = vec![0u64; experts];
    for layer in layers {
        for (i, expert) in layer.choices().iter().enumerate() {
            chosen[*expert as usize] += u64::from(does_count(i / k));
        }
    }
    // The factors of the sums of probabilities.
    let factors: Vec<f64> = chosen.iter().map(|chosen| experts as f64 * *chosen as f64 / (n * n)).collect();
    if !layers.iter().all(|layer| has_kernels(layer.logits())) {
        let logits: Vec<&Tensor> = layers.iter().map(Routing::logits).collect();
        return composed::load_balancing_loss(&logits, &factors, counts);
    }
    let mut sums = vec![0f64; experts];
    for layer in layers {
        let mut probabilities = rows_in_f32(&layer.logits().detach())?;
        for (row, values) in probabilities.chunks_exact_mut(experts).enumerate().filter(|(row, _)| does_count(*row)) {
            debug_assert!(row < rows);
            softmax(values);
            sums.iter_mut().zip(values).for_each(|(sum, p)| *sum += f64::from(*p));
        }
    }
    let loss = sums.iter().zip(&factors).map(|(sum, factor)| sum * factor).sum::<f64>();
    let mut inputs = OpInputs::of([])?;
    let sinks = inputs.add(layers.iter().map(Routing::logits))?;
    let logits: Vec<Tensor> = layers.iter().map(|layer| layer.logits().clone()).collect();
    let counts = counts.map(<[bool]>::to_vec);
    inputs.result(NAME, CpuStorage::F32(vec![loss as f32]), (), move |grad, []| {
        let scale = with_grad::<f32, _>(&grad, NAME, |grad| Ok(grad.first().copied().unwrap_or(0.0)))?;
        let slopes: Vec<f32> = factors.iter().map(|factor| (f64::from(scale) * factor) as f32).collect();
        for (logits, sink) in logits.iter().zip(&sinks).filter(|(_, sink)| sink.is_wanted()) {
            let mut values = rows_in_f32(&logits.detach())?;
            for_each_part(rows, ParallelChunks::new(&mut values, experts), |row, values| {
                if counts.as_ref().is_some_and(|counts| !counts[row]) {
                    return values.fill(0.0);
                }
                softmax(values);
                let mean = values.iter().zip(&slopes).map(|(p, slope)| p * slope).sum::<f32>();
                values.iter_mut().zip(&slopes).for_each(|(p, slope)| *p *= slope - mean);
            });
            with_element!(logits.dtype(), NAME, E => sink.give_sums::<E>(&values))?;
        }
        Ok(())
    })
}

const NAME: &str = "load_balancing_loss";
