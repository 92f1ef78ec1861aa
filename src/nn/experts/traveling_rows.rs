//! Rows that travel to the ranks of their experts, and their results, which travel back (expert parallelism).
//!
//! ```text
//!   own rows --send_rows--> rows of all ranks that chose an expert of this rank --experts--> results --return_results--> sum
//! ```
//!
//! A row is sent to each rank at most once, however many of the rank's experts it chose; there, the weighted results of
//! these experts are summed. The sums of all ranks are added in the order of the ranks, which is that of the experts.
//! No row is dropped. Even a rank that neither sends nor receives a row takes part, with empty messages.

use super::{ExpertAssignment, Routing};
use crate::graph::{Grad, OpInputs, is_without_gradients};
use crate::kernels::buffer;
use crate::kernels::embedding::embedding;
use crate::kernels::expert_combine::{RowSlots, sum_slots};
use crate::nn::f32_weight_linear::with_f32_values;
use crate::precision::Flat;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::util::counted;
use crate::zero::{ExpertAllToAll, ExpertMessageKind};
use candle_core::{Result, Shape, Tensor, Var, bail};
use std::sync::Arc;

const NAME: &str = "experts";

/// The maximum number of experts of a layer: their numbers are sent as f32, which represents every integer up to this
/// one exactly.
const MAX_EXPERTS: usize = 1 << 24;

/// The routes of one forward pass, and of its backward pass.
#[derive(Debug)]
pub(super) struct RowRoutes {
    exchange: ExpertAllToAll,
    /// The number of rows that go to each rank.
    sent: Vec<usize>,
    /// The number of rows that come from each rank.
    received: Vec<usize>,
    /// The rows in the order in which they are sent: rank by rank, in ascending order.
    rows: Vec<u32>,
    /// For each row, its positions in `rows`, in the order of the ranks.
    positions: Vec<u32>,
    position_starts: Vec<u32>,
    /// For each choice of a row, the position in `rows` at which the row is sent to the rank of the chosen expert.
    position_of_choice: Vec<u32>,
    /// The number of experts that each row chooses.
    choices: usize,
}

/// The rows that a rank has received.
pub(super) struct ReceivedRows {
    /// The choices of these rows among the experts of this rank. The other experts have no slots.
    pub assignment: Arc<ExpertAssignment>,
    pub rows: Tensor,
    /// The weights of all choices, `[rows, experts per row]`, in f32.
    pub weights: Tensor,
}

impl RowRoutes {
    /// Sends each row of `x` `[.., width]` to the ranks of its experts. This is a collective operation: all ranks of
    /// the job must call it.
    ///
    /// # Errors
    /// An input that does not match the routing; too many experts; a failed collective; invalid rows from other ranks.
    pub fn send(exchange: ExpertAllToAll, x: &Tensor, routing: &Routing) -> Result<(Arc<Self>, ReceivedRows)> {
        let (experts, k) = (routing.assignment().experts(), routing.experts_per_row());
        let width = x.dims().last().copied().unwrap_or(0);
        let own_rows = routing.assignment().rows();
        if x.elem_count() != own_rows * width || width == 0 {
            bail!(
                "{NAME}: the input has shape {:?}; the router chose experts for {}",
                x.dims(),
                counted(own_rows, "row")
            )
        }
        if experts > MAX_EXPERTS {
            bail!("{NAME}: {experts} experts are divided among ranks; at most {MAX_EXPERTS} can be")
        }
        let mut routes = Self::of_choices(exchange, routing.choices(), k);
        routes.received = routes.exchange.counts(&routes.sent, (k, width.max(2 * k)))?;
        let (assignment, weights) = routes.exchange_choices(routing, experts)?;
        let routes = Arc::new(routes);
        let assignment = Arc::new(assignment.narrow(routes.exchange.experts()));
        let weights = routes.received_weights(routing.weights(), weights)?;
        let rows = with_element!(x.dtype(), NAME, E => routes.send_rows::<E>(x, own_rows, width))?;
        Ok((routes, ReceivedRows { assignment, rows, weights }))
    }

    /// Sorts rows by the ranks that hold their experts. `choices` contains `k` experts for each row.
    fn of_choices(exchange: ExpertAllToAll, choices: &[u32], k: usize) -> Self {
        let (own_rows, ranks) = (choices.len() / k.max(1), exchange.ranks());
        let mut by_rank = vec![Vec::new(); ranks];
        for (row, chosen) in choices.chunks_exact(k.max(1)).enumerate() {
            for expert in chosen {
                let rows: &mut Vec<u32> = &mut by_rank[exchange.rank_of(*expert as usize)];
                if rows.last() != Some(&(row as u32)) {
                    rows.push(row as u32);
                }
            }
        }
        let sent: Vec<usize> = by_rank.iter().map(Vec::len).collect();
        let rows = by_rank.concat();
        let mut position_starts = vec![0u32; own_rows + 1];
        rows.iter().for_each(|row| position_starts[*row as usize + 1] += 1);
        for row in 0..own_rows {
            position_starts[row + 1] += position_starts[row];
        }
        let mut next = position_starts.clone();
        let mut positions = vec![0u32; rows.len()];
        for (position, row) in rows.iter().enumerate() {
            positions[next[*row as usize] as usize] = position as u32;
            next[*row as usize] += 1;
        }
        let rank_starts: Vec<usize> = (0..ranks).map(|rank| sent[..rank].iter().sum()).collect();
        let position_of_choice = choices.iter().enumerate().map(|(choice, expert)| {
            let rank = exchange.rank_of(*expert as usize);
            let row = (choice / k) as u32;
            let index = by_rank[rank].binary_search(&row).unwrap_or_else(|_| unreachable!("every choice is sent"));
            (rank_starts[rank] + index) as u32
        });
        let position_of_choice = position_of_choice.collect();
        Self { exchange, sent, received: Vec::new(), rows, positions, position_starts, position_of_choice, choices: k }
    }

    /// Exchanges the choices of all rows, and their weights. Returns the choices of the received rows, and the weights
    /// of these choices.
    fn exchange_choices(&self, routing: &Routing, experts: usize) -> Result<(ExpertAssignment, Vec<f32>)> {
        let k = self.choices;
        let outgoing = with_f32_values(routing.weights(), |weights| {
            let mut values = Vec::with_capacity(self.rows.len() * 2 * k);
            for row in &self.rows {
                let choices = *row as usize * k..(*row as usize + 1) * k;
                values.extend(routing.choices()[choices.clone()].iter().map(|expert| *expert as f32));
                values.extend_from_slice(&weights[choices]);
            }
            Ok(values)
        })?;
        let counts = [&self.sent[..], &self.received];
        let incoming = self.exchange.exchange(ExpertMessageKind::Choices, Flat::F32(outgoing), counts, 2 * k)?;
        let Flat::F32(incoming) = incoming else { bail!("{NAME}: choices arrived in a format other than f32") };
        let (mut choices, mut weights) =
            (Vec::with_capacity(incoming.len() / 2), Vec::with_capacity(incoming.len() / 2));
        for (position, row) in incoming.chunks_exact(2 * k).enumerate() {
            let (chosen, row_weights) = row.split_at(k);
            if let Some(invalid) = chosen.iter().find(|e| !(e.fract() == 0.0 && (0.0..experts as f32).contains(*e))) {
                return self.exchange.refuse(self.origin_of(position), &format!("a row chooses expert {invalid}"));
            }
            choices.extend(chosen.iter().map(|expert| *expert as u32));
            weights.extend_from_slice(row_weights);
        }
        Ok((ExpertAssignment::new(&choices, k, experts)?, weights))
    }

    /// Returns the rank from which a received row came.
    fn origin_of(&self, position: usize) -> usize {
        let mut end = 0;
        self.received
            .iter()
            .take_while(|rows| {
                end += **rows;
                end <= position
            })
            .count()
    }

    /// Returns the received `weights` as the result of an operation that sends their gradients back.
    fn received_weights(self: &Arc<Self>, own_weights: &Tensor, weights: Vec<f32>) -> Result<Tensor> {
        let (own_weights, inputs) = (own_weights.contiguous()?, OpInputs::of([Some(own_weights)])?);
        let (routes, dtype, k) = (self.clone(), own_weights.dtype(), self.choices);
        let shape = (self.received.iter().sum::<usize>(), k);
        inputs.result("expert weights", f32::storage(weights), shape, move |grad, [to_own_weights]| {
            let counts = [&routes.received[..], &routes.sent];
            let grad = grad.into_own()?;
            let returned = routes.exchange.exchange(ExpertMessageKind::WeightGradients, grad, counts, k)?;
            let Flat::F32(returned) = returned else {
                bail!("{NAME}: gradients of weights arrived in a format other than f32")
            };
            let sums = routes.position_of_choice.iter().enumerate();
            let sums: Vec<f32> = sums.map(|(choice, position)| returned[*position as usize * k + choice % k]).collect();
            with_element!(dtype, NAME, W => to_own_weights.deliver_sums::<W>(&sums))
        })
    }

    /// Sends the rows of `x`, and returns those that arrive.
    fn send_rows<E: TensorElement>(self: &Arc<Self>, x: &Tensor, own_rows: usize, width: usize) -> Result<Tensor> {
        let x = x.contiguous()?;
        let (inputs, routes) = (OpInputs::of([Some(&x)])?, self.clone());
        let values = with_elements::<E, _>(&x, NAME, |x| {
            self.transfer::<E>(
                ExpertMessageKind::Rows,
                self.in_send_order(x, width),
                [&self.sent, &self.received],
                width,
            )
        })?;
        let shape = (self.received.iter().sum::<usize>(), width);
        inputs.result("sent rows", E::storage(values), shape, move |grad, [to_x]| {
            let counts = [&routes.received[..], &routes.sent];
            let grad = grad.read::<E, _>(NAME, |grad| Ok(grad.to_vec()))?;
            let returned = routes.transfer::<E>(ExpertMessageKind::RowGradients, grad, counts, width)?;
            to_x.accumulate::<E>(own_rows * width, |dx, add| {
                sum_slots(routes.by_row(), &returned, width, None, dx, add);
                Ok(())
            })
        })
    }

    /// Sends back the results `y` `[received rows, width]`, and returns, for each of this rank's own rows, the sum of
    /// its results, in the shape `shape`.
    ///
    /// # Errors
    /// A failed collective.
    pub fn return_results(self: &Arc<Self>, y: &Tensor, shape: &Shape) -> Result<Tensor> {
        // If another rank differentiates the layer, this rank must send gradients to it, even if this rank itself
        // trains nothing.
        let is_silent = !y.track_op() && self.exchange.trains() && !is_without_gradients();
        let y = if is_silent { Var::from_tensor(y)?.as_tensor().clone() } else { y.contiguous()? };
        with_element!(y.dtype(), NAME, E => self.return_results_as::<E>(&y, shape))
    }

    fn return_results_as<E: TensorElement>(self: &Arc<Self>, y: &Tensor, shape: &Shape) -> Result<Tensor> {
        let width = y.dim(1)?;
        let (inputs, routes) = (OpInputs::of([Some(y)])?, self.clone());
        let values = with_elements::<E, _>(y, NAME, |y| Ok(y.to_vec()))?;
        let returned = self.transfer::<E>(ExpertMessageKind::Results, values, [&self.received, &self.sent], width)?;
        let mut sums = buffer::<E>(shape.elem_count());
        sum_slots(self.by_row(), &returned, width, None, &mut sums, false);
        inputs.result("returned rows", E::storage(sums), shape.clone(), move |grad, [to_y]| {
            let counts = [&routes.sent[..], &routes.received];
            let grad = grad.read::<E, _>(NAME, |grad| Ok(routes.in_send_order(grad, width)))?;
            to_y.deliver(Grad::own(routes.transfer::<E>(ExpertMessageKind::ResultGradients, grad, counts, width)?))
        })
    }

    /// Returns rows in the order in which they are sent.
    fn in_send_order<E: TensorElement>(&self, rows: &[E], width: usize) -> Vec<E> {
        let mut values = buffer::<E>(self.rows.len() * width);
        embedding(&self.rows, rows, width, &mut values);
        values
    }

    fn transfer<E: TensorElement>(
        &self,
        content: ExpertMessageKind,
        values: Vec<E>,
        counts: [&[usize]; 2],
        width: usize,
    ) -> Result<Vec<E>> {
        let mut arrived = self.exchange.exchange(content, E::flat(values), counts, width)?;
        match E::of_flat_mut(&mut arrived) {
            Some(values) => Ok(std::mem::take(values)),
            None => bail!("{NAME}: rows arrived in a format other than {:?}", E::DTYPE),
        }
    }

    /// Returns, for each row, its positions in `rows`, in the order of the ranks.
    fn by_row(&self) -> RowSlots<'_> {
        RowSlots { slots: &self.positions, starts: &self.position_starts }
    }
}
