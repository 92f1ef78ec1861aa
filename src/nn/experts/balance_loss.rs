//! The auxiliary loss of mixtures of experts, which is smallest if all experts are chosen equally often.

use super::Routing;
use super::routing::rows_in_f32;
use crate::graph::OpInputs;
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::routing::softmax;
use crate::nn::composed;
use crate::nn::in_f32::{has_kernels, with_grad};
use crate::tensor::element::with_element;
use crate::util;
use crate::zero::gather::unit::link_under_construction;
use crate::zero::rank_core::EngineLink;
use candle_core::{CpuStorage, Result, Tensor, bail};

/// Returns the load-balancing loss of a complete model (Fedus et al. 2021), a scalar in f32, from the routings of its
/// sparse layers:
///
/// ```text
///   loss = E sum over e of (T_e / R) (S_e / R)
/// ```
///
/// E is the number of experts. T_e is the number of rows that were routed to expert e, and S_e is the sum of its
/// probabilities (a softmax over all experts, whatever the router's order of operations), both over the rows of all
/// layers. R is the number of rows times the number of layers. This is one loss for the model, not the mean of the
/// layers' losses. With perfect balance, the loss is the number of experts per row. T_e is a constant for the gradient.
///
/// `mask`, if given, has one element for each row of a layer. Rows with `false` (padding) do not count.
///
/// # Errors
/// No layer; layers of different sizes or dtypes; `mask` of a different length; no row that counts.
pub fn load_balancing_loss(layers: &[Routing], mask: Option<&[bool]>) -> Result<Tensor> {
    loss_over_ranks(layers, mask, &EngineLink::default())
}

/// The load-balancing loss of a batch that is divided among the ranks of an engine.
///
/// The loss is not a mean over rows. If each rank computed the loss for its own rows only, the loss in training would
/// differ from that of a single rank with all rows. T_e and R are therefore counted over all ranks, and each rank's
/// part is scaled so that the mean over ranks, which an engine computes, is the loss of the complete batch. Without an
/// engine, this is [`load_balancing_loss`].
#[derive(Debug, Clone)]
pub struct SyncBalanceLoss {
    link: EngineLink,
}

impl SyncBalanceLoss {
    /// Creates the loss for the model that is being built.
    pub fn of_model() -> Self {
        Self { link: link_under_construction() }
    }

    /// Returns this rank's part of [`load_balancing_loss`]. This is a collective operation in an engine: all ranks must
    /// call it.
    ///
    /// # Errors
    /// The errors of [`load_balancing_loss`], except that a rank may have no row that counts if another rank has one; a
    /// failed collective.
    pub fn loss(&self, layers: &[Routing], mask: Option<&[bool]>) -> Result<Tensor> {
        loss_over_ranks(layers, mask, &self.link)
    }
}

/// Computes this rank's part of the loss. In an engine, `link` connects this rank to the others.
fn loss_over_ranks(layers: &[Routing], mask: Option<&[bool]>, link: &EngineLink) -> Result<Tensor> {
    let Some(first) = layers.first() else {
        bail!("{NAME}: there is no layer with experts; compute the loss only for models that have one")
    };
    let (rows, experts, k) = (first.assignment().rows(), first.assignment().experts(), first.experts_per_row());
    for (i, layer) in layers.iter().enumerate() {
        let sizes = [layer.assignment().rows(), layer.assignment().experts(), layer.experts_per_row()];
        if sizes != [rows, experts, k] || layer.logits().dtype() != first.logits().dtype() {
            bail!(
                "{NAME}: layer {i} has {}, {}, {} of them for each row, and logits in {:?}; layer 0 has {}, {}, {k} of \
                 them for each row, and logits in {:?}; all must be equal",
                util::counted(sizes[0], "row"),
                util::counted(sizes[1], "expert"),
                sizes[2],
                layer.logits().dtype(),
                util::counted(rows, "row"),
                util::counted(experts, "expert"),
                first.logits().dtype()
            )
        }
    }
    if let Some(mask) = mask
        && mask.len() != rows
    {
        bail!(
            "{NAME}: the mask has {}; there {} {}",
            util::counted(mask.len(), "element"),
            util::is_or_are(rows),
            util::counted(rows, "row")
        )
    }
    let counted_rows = mask.map_or(rows, |mask| mask.iter().filter(|mask| **mask).count());
    let is_counted = |row: usize| mask.is_none_or(|mask| mask[row]);
    // The number of rows that count, and then how often they chose each expert.
    let mut numbers = vec![0f64; 1 + experts];
    numbers[0] = counted_rows as f64;
    for layer in layers {
        for (i, expert) in layer.choices().iter().enumerate() {
            numbers[1 + *expert as usize] += f64::from(u8::from(is_counted(i / k)));
        }
    }
    let mut ranks = 1.0;
    if let Some(core) = link.core() {
        let all_ranks = core.gather_numbers(numbers.clone())?;
        ranks = all_ranks.len() as f64;
        for (i, sum) in numbers.iter_mut().enumerate() {
            *sum = all_ranks.iter().map(|rank| rank[i]).sum();
        }
    }
    if numbers[0] == 0.0 {
        bail!(
            "{NAME}: no row counts ({} in total); leave out micro batches that contain only padding",
            util::counted(rows, "row")
        )
    }
    let n = numbers[0] * layers.len() as f64;
    // The factors of the sums of probabilities.
    let factors: Vec<f64> = numbers[1..].iter().map(|chosen| ranks * experts as f64 * chosen / (n * n)).collect();
    if !layers.iter().all(|layer| has_kernels(layer.logits())) {
        let logits: Vec<&Tensor> = layers.iter().map(Routing::logits).collect();
        return composed::load_balancing_loss(&logits, &factors, mask);
    }
    let mut sums = vec![0f64; experts];
    for layer in layers {
        let mut probabilities = rows_in_f32(&layer.logits().detach())?;
        for (row, values) in probabilities.chunks_exact_mut(experts).enumerate().filter(|(row, _)| is_counted(*row)) {
            debug_assert!(row < rows);
            softmax(values);
            sums.iter_mut().zip(values).for_each(|(sum, p)| *sum += f64::from(*p));
        }
    }
    let loss = sums.iter().zip(&factors).map(|(sum, factor)| sum * factor).sum::<f64>();
    let mut inputs = OpInputs::of([])?;
    let sinks = inputs.add(layers.iter().map(Routing::logits))?;
    let logits: Vec<Tensor> = layers.iter().map(|layer| layer.logits().clone()).collect();
    let mask = mask.map(<[bool]>::to_vec);
    inputs.result(NAME, CpuStorage::F32(vec![loss as f32]), (), move |grad, []| {
        let scale = with_grad::<f32, _>(&grad, NAME, |grad| Ok(grad.first().copied().unwrap_or(0.0)))?;
        let slopes: Vec<f32> = factors.iter().map(|factor| (f64::from(scale) * factor) as f32).collect();
        for (logits, sink) in logits.iter().zip(&sinks).filter(|(_, sink)| sink.is_wanted()) {
            let mut values = rows_in_f32(&logits.detach())?;
            for_each_part(rows, ParallelChunks::new(&mut values, experts), |row, values| {
                if mask.as_ref().is_some_and(|mask| !mask[row]) {
                    return values.fill(0.0);
                }
                softmax(values);
                let mean = values.iter().zip(&slopes).map(|(p, slope)| p * slope).sum::<f32>();
                values.iter_mut().zip(&slopes).for_each(|(p, slope)| *p *= slope - mean);
            });
            with_element!(logits.dtype(), NAME, E => sink.deliver_sums::<E>(&values))?;
        }
        Ok(())
    })
}

const NAME: &str = "load_balancing_loss";
