//! Adafactor (arXiv 1804.04235), as in transformers.

use super::{
    FactoredOptimizer, FactoredSlice, Momentum, Optimizer, OptimizerNeeds, RateRule, SQUARES_BLOCK, SlicePosition,
    SquareSums, StepContext,
};
use crate::config::AdafactorConfig;
use crate::kernels::parallel::{self, ParallelChunks, for_each_part};
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::{FlatMut, FlatRef, LANES, add_squares, cast};
use std::ops::Range;

/// Adafactor. `g` is the scaled gradient of a matrix of `r` rows and `c` columns, and `t` is the number of the step:
///
/// ```text
/// b2  = 1 - t^decay_rate
/// R_i = b2 * R_i + (1 - b2) * mean over j of (g_ij^2 + eps_0)
/// C_j = b2 * C_j + (1 - b2) * mean over i of (g_ij^2 + eps_0)
/// u   = g_ij / sqrt(R_i / mean(R) * C_j)
/// lr  = lr * max(eps_1, rms(p))                 (scale_parameter only)
/// u   = lr * u / max(1, rms(u) / clip_threshold)
/// m   = b1 * m + (1 - b1) * u, in place of u    (beta1 only)
/// p   = p - lr * wd * p - u
/// ```
///
/// With relative steps, `lr` is the smaller of 1 / sqrt(t) and 0.01 or, with `warmup_init`, 1e-6 * t. `rms` is the root
/// mean square over the full parameter. A tensor with more than two dimensions is a batch of matrices in the last two,
/// whose rows and columns are separate, but which share one `rms`. A parameter with fewer dimensions has a second
/// moment for each element, `v = b2 * v + (1 - b2) * (g^2 + eps_0)`, and `u = g / sqrt(v)`.
///
/// torch.optim.Adafactor differs: its decay does not include the scale of the parameter, its learning rate is at most
/// 1 / sqrt(t), it has no `beta1`, and it adds nothing to the squares.
#[derive(Debug)]
pub(super) struct Adafactor {
    matrices: AdafactorPart,
    vectors: AdafactorPart,
}

/// Adafactor for parameters of one kind.
#[derive(Debug)]
struct AdafactorPart {
    config: AdafactorConfig,
    kind: PartKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    /// Parameters with factored second moments.
    Matrices,
    /// Parameters with a second moment for each element.
    Vectors,
}

/// The number of elements that one thread processes at a time.
const CHUNK: usize = 64 * SQUARES_BLOCK;

/// The number of rows, or of columns, whose sums one thread adds up at a time.
const SUMS: usize = 256;

impl Adafactor {
    pub(super) fn new(config: AdafactorConfig) -> Self {
        let part = |kind| AdafactorPart { config, kind };
        Self { matrices: part(PartKind::Matrices), vectors: part(PartKind::Vectors) }
    }
}

impl Optimizer for Adafactor {
    fn name(&self) -> &str {
        self.matrices.name()
    }

    fn lr(&self) -> f64 {
        self.matrices.lr()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.matrices.state_names()
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        Optimizer::update(&self.matrices, ctx, param, grad, state, half);
    }

    fn needs(&self) -> OptimizerNeeds<'_> {
        self.matrices.needs()
    }

    fn trains(&self, _: &str, shape: &[usize]) -> bool {
        shape.len() >= 2 && !shape.contains(&0)
    }

    fn auxiliary(&self) -> Option<&dyn Optimizer> {
        Some(&self.vectors)
    }

    fn rate_rule(&self) -> RateRule {
        self.matrices.rate_rule()
    }
}

/// Returns the relative step after `applied` steps.
fn relative_step(applied: u64) -> f64 {
    (1.0 / ((applied + 1) as f64).sqrt()).min(1e-2)
}

/// Returns the relative step after `applied` steps with `warmup_init`.
fn relative_step_with_warmup(applied: u64) -> f64 {
    let step = (applied + 1) as f64;
    (1.0 / step.sqrt()).min(1e-6 * step)
}

impl Optimizer for AdafactorPart {
    fn name(&self) -> &str {
        "Adafactor"
    }

    fn lr(&self) -> f64 {
        match self.rate_rule() {
            RateRule::OfSteps(rule) => rule(0),
            _ => self.config.lr.unwrap_or_default(),
        }
    }

    fn momentum(&self) -> Momentum {
        Momentum::Factor(self.config.beta1.unwrap_or(0.0))
    }

    fn state_names(&self) -> &'static [&'static str] {
        match (self.kind, self.config.beta1) {
            (PartKind::Matrices, None) => &[],
            (PartKind::Matrices, Some(_)) => &["exp_avg"],
            (PartKind::Vectors, None) => &["exp_avg_sq"],
            (PartKind::Vectors, Some(_)) => &["exp_avg_sq", "exp_avg"],
        }
    }

    fn update(&self, _: &StepContext, _: &mut [f32], _: FlatRef<'_>, _: &mut [&mut [f32]], _: Option<FlatMut<'_>>) {
        unreachable!("FactoredOptimizer::update takes the place of this method");
    }

    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::Factors(self)
    }

    fn rate_rule(&self) -> RateRule {
        match self.config {
            AdafactorConfig { lr: Some(_), .. } => RateRule::Schedule,
            AdafactorConfig { warmup_init: true, .. } => RateRule::OfSteps(relative_step_with_warmup),
            AdafactorConfig { warmup_init: false, .. } => RateRule::OfSteps(relative_step),
        }
    }
}

/// A parameter as a batch of matrices.
#[derive(Debug, Clone, Copy)]
struct FactoredShape {
    rows: usize,
    cols: usize,
    count: usize,
}

impl FactoredShape {
    fn of(shape: &[usize]) -> Self {
        match shape {
            [leading @ .., rows, cols] => Self { rows: *rows, cols: *cols, count: leading.iter().product() },
            _ => unreachable!("vectors have no factored states"),
        }
    }

    /// Returns the number of rows of all matrices.
    fn all_rows(self) -> usize {
        self.count * self.rows
    }
}

impl AdafactorPart {
    /// Returns the decay rate of the second moment.
    fn beta2(&self, ctx: &StepContext) -> f64 {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        1.0 - (ctx.step as f64).powf(self.config.decay_rate)
    }

    /// Returns the number that is added to squared gradients.
    fn eps(&self, ctx: &StepContext) -> f64 {
        ctx.eps.unwrap_or(self.config.eps.0)
    }

    /// Returns the second moments, with which directions are computed.
    fn moments<'a>(&self, ctx: &StepContext, shape: &'a [usize], factored: &'a [f32]) -> SecondMoments<'a> {
        if self.kind == PartKind::Vectors {
            let beta2 = self.beta2(ctx);
            return SecondMoments::Elements {
                keep: beta2 as f32,
                take: (1.0 - beta2) as f32,
                eps: self.eps(ctx) as f32,
            };
        }
        let batch = FactoredShape::of(shape);
        let (rows, cols) = factored.split_at(batch.all_rows());
        let mean = |rows: &[f32]| rows.iter().map(|row| f64::from(*row)).sum::<f64>() / batch.rows as f64;
        let means = rows.chunks(batch.rows).map(mean).collect();
        SecondMoments::Factored { batch, rows, cols, means }
    }
}

/// Divides the states of the elements into the second moment, if it is not factored, and the first moment, if there is
/// one.
fn split_states<'a>(kind: PartKind, state: &'a mut [&mut [f32]]) -> (Option<&'a mut [f32]>, Option<&'a mut [f32]>) {
    let mut states = state.iter_mut().map(|state| &mut **state);
    let second = if kind == PartKind::Vectors { states.next() } else { None };
    (second, states.next())
}

impl FactoredOptimizer for AdafactorPart {
    fn factored_names(&self) -> &'static [&'static str] {
        match self.kind {
            PartKind::Matrices => &["exp_avg_sq_row", "exp_avg_sq_col"],
            PartKind::Vectors => &[],
        }
    }

    fn factored_lens(&self, shape: &[usize]) -> Vec<usize> {
        if self.kind == PartKind::Vectors {
            return Vec::new();
        }
        let batch = FactoredShape::of(shape);
        vec![batch.all_rows(), batch.count * batch.cols]
    }

    fn add_sums(&self, ctx: &StepContext, position: SlicePosition<'_>, grad: FlatRef<'_>, sums: &mut [f64]) {
        let batch = FactoredShape::of(position.shape);
        let (rows, cols) = sums.split_at_mut(batch.all_rows());
        let slice = SliceSquares {
            first: position.first,
            grad,
            cols: batch.cols,
            grad_scale: ctx.grad_scale,
            eps: self.eps(ctx),
        };
        let range = position.first..position.first + grad.len();
        if range.is_empty() {
            return;
        }
        // A sum is accumulated element by element, in order, so its bits do not depend on where slices end.
        let touched = range.start / batch.cols..(range.end - 1) / batch.cols + 1;
        let tasks = touched.len().div_ceil(SUMS);
        for_each_part(tasks, ParallelChunks::new(&mut rows[touched.clone()], SUMS), |i, sums| {
            for (k, sum) in sums.iter_mut().enumerate() {
                let row = touched.start + i * SUMS + k;
                slice.add_row(row, sum);
            }
        });
        for (matrix, cols) in cols.chunks_mut(batch.cols).enumerate() {
            let matrix_rows = matrix * batch.rows..(matrix + 1) * batch.rows;
            let matrix_rows = matrix_rows.start.max(touched.start)..matrix_rows.end.min(touched.end);
            if matrix_rows.is_empty() {
                continue;
            }
            for_each_part(cols.len().div_ceil(SUMS), ParallelChunks::new(cols, SUMS), |i, sums| {
                for row in matrix_rows.clone() {
                    slice.add_columns(row, i * SUMS, sums);
                }
            });
        }
    }

    fn take_sums(&self, ctx: &StepContext, shape: &[usize], sums: &[f64], factored: &mut [f32]) {
        let (batch, beta2) = (FactoredShape::of(shape), self.beta2(ctx));
        for (i, (moment, sum)) in factored.iter_mut().zip(sums).enumerate() {
            let terms = if i < batch.all_rows() { batch.cols } else { batch.rows };
            *moment = (beta2 * f64::from(*moment) + (1.0 - beta2) * sum / terms as f64) as f32;
        }
    }

    fn add_squares(
        &self,
        ctx: &StepContext,
        position: SlicePosition<'_>,
        FactoredSlice { param, grad, state, factored }: FactoredSlice<'_, '_>,
        squares: &mut SquareSums,
    ) {
        let len = param.len();
        assert_eq!(grad.len(), len, "the gradient is not as long as the parameter");
        let moments = self.moments(ctx, position.shape, factored);
        let (second, _) = split_states(self.kind, state);
        let second = second.map(|second| &*second);
        let chunks = parallel::map(len.div_ceil(CHUNK), |i| {
            let range = i * CHUNK..len.min((i + 1) * CHUNK);
            level().run(DirectionSquares {
                moments: &moments,
                grad_scale: ctx.grad_scale,
                first: position.first + range.start,
                param: &param[range.clone()],
                grad: grad.slice(range.clone()),
                second: second.map(|second| &second[range]),
            })
        });
        for block in chunks.iter().flatten() {
            squares.weights += block.weights;
            squares.update += block.update;
        }
    }

    fn update(
        &self,
        ctx: &StepContext,
        position: SlicePosition<'_>,
        FactoredSlice { param, grad, state, factored }: FactoredSlice<'_, '_>,
        squares: SquareSums,
        half: Option<FlatMut<'_>>,
    ) {
        let AdafactorConfig { eps, clip_threshold, beta1, weight_decay, scale_parameter, .. } = self.config;
        let rms = |squares: f64| (squares / position.shape.iter().product::<usize>() as f64).sqrt();
        let lr = ctx.lr * if scale_parameter { rms(squares.weights).max(eps.1) } else { 1.0 };
        let moments = self.moments(ctx, position.shape, factored);
        let (keep, take) = beta1.map_or((0.0, 1.0), |beta1| (beta1, 1.0 - beta1));
        let constants = UpdateConstants {
            moments: &moments,
            grad_scale: ctx.grad_scale,
            step_size: (lr / (rms(squares.update) / clip_threshold).max(1.0)) as f32,
            decay: (lr * ctx.weight_decay.unwrap_or(weight_decay)) as f32,
            keep: keep as f32,
            take: take as f32,
        };
        let run = |i: usize, param: &mut [f32], second: Option<&mut [f32]>, first_moment: Option<&mut [f32]>| {
            let grad = grad.slice(i * CHUNK..i * CHUNK + param.len());
            let first = position.first + i * CHUNK;
            level().run(ChunkUpdate { constants: &constants, first, param, grad, second, first_moment });
        };
        let (second, first_moment) = split_states(self.kind, state);
        let tasks = param.len().div_ceil(CHUNK);
        let chunks = |state| ParallelChunks::new(state, CHUNK);
        let parts = (chunks(&mut *param), (second.map(chunks), first_moment.map(chunks)));
        for_each_part(tasks, parts, |i, (param, (second, first_moment))| run(i, param, second, first_moment));
        if let Some(half) = half {
            half.copy_cast(FlatRef::F32(param));
        }
    }
}

/// The squares of a slice of a gradient.
struct SliceSquares<'a> {
    /// The index of the slice's first element in the parameter.
    first: usize,
    grad: FlatRef<'a>,
    cols: usize,
    grad_scale: f32,
    eps: f64,
}

impl SliceSquares<'_> {
    /// Adds the squares of the elements of a row that are in the slice.
    fn add_row(&self, row: usize, sum: &mut f64) {
        match self.grad.slice(self.in_columns(row, &(0..self.cols))) {
            FlatRef::F32(grad) => grad.iter().for_each(|g| *sum += self.square(*g)),
            FlatRef::BF16(grad) => grad.iter().for_each(|g| *sum += self.square(g.to_f32())),
            FlatRef::F16(grad) => grad.iter().for_each(|g| *sum += self.square(g.to_f32())),
        }
    }

    /// Adds the squares of the elements of a row that are in the slice to `sums`, the sums of consecutive columns that
    /// begin with `column`.
    fn add_columns(&self, row: usize, column: usize, sums: &mut [f64]) {
        let columns = column..column + sums.len();
        let part = self.in_columns(row, &columns);
        let skipped = self.first.saturating_sub(row * self.cols + column).min(sums.len());
        let sums = sums[skipped..].iter_mut();
        match self.grad.slice(part) {
            FlatRef::F32(grad) => sums.zip(grad).for_each(|(sum, g)| *sum += self.square(*g)),
            FlatRef::BF16(grad) => sums.zip(grad).for_each(|(sum, g)| *sum += self.square(g.to_f32())),
            FlatRef::F16(grad) => sums.zip(grad).for_each(|(sum, g)| *sum += self.square(g.to_f32())),
        }
    }

    /// Returns the elements of the slice that are in `columns` of a row.
    fn in_columns(&self, row: usize, columns: &Range<usize>) -> Range<usize> {
        let in_slice = |column: usize| (row * self.cols + column).saturating_sub(self.first).min(self.grad.len());
        in_slice(columns.start)..in_slice(columns.end)
    }

    fn square(&self, g: f32) -> f64 {
        let g = f64::from(g * self.grad_scale);
        g * g + self.eps
    }
}

/// The second moments of a parameter.
enum SecondMoments<'a> {
    Factored {
        batch: FactoredShape,
        rows: &'a [f32],
        cols: &'a [f32],
        /// The mean of the row moments of each matrix.
        means: Vec<f64>,
    },
    /// The constants with which the moment of each element is updated from its squared gradient.
    Elements { keep: f32, take: f32, eps: f32 },
}

impl SecondMoments<'_> {
    /// Replaces the gradients of a block, which begins at element `first` of the parameter, by directions. `second`
    /// contains the old moments of the block's elements, if they have any.
    #[inline(always)]
    fn directions(&self, first: usize, grad: &mut [f32], second: Option<&[f32]>) {
        match (self, second) {
            (Self::Elements { keep, take, eps }, Some(second)) => {
                for (g, v) in grad.iter_mut().zip(second) {
                    *g /= new_moment(*keep, *take, *eps, *g, *v).sqrt();
                }
            }
            (Self::Factored { batch, rows, cols, means }, _) => {
                let mut offset = 0;
                while offset < grad.len() {
                    let (row, col) = ((first + offset) / batch.cols, (first + offset) % batch.cols);
                    let matrix = row / batch.rows;
                    let len = (batch.cols - col).min(grad.len() - offset);
                    let row_factor = (means[matrix] / f64::from(rows[row])).sqrt() as f32;
                    let start = matrix * batch.cols + col;
                    for (g, column) in grad[offset..offset + len].iter_mut().zip(&cols[start..start + len]) {
                        *g = row_factor * *g / column.sqrt();
                    }
                    offset += len;
                }
            }
            (Self::Elements { .. }, None) => unreachable!("vectors have a second moment for each element"),
        }
    }
}

/// Returns the second moment of an element after a step.
#[inline(always)]
fn new_moment(keep: f32, take: f32, eps: f32, g: f32, v: f32) -> f32 {
    keep * v + take * (g * g + eps)
}

/// Scales the gradients of a block and writes them to `output`.
#[inline(always)]
fn scaled_gradients(output: &mut [f32], grad: FlatRef<'_>, grad_scale: f32) {
    cast::widen(output, grad);
    output.iter_mut().for_each(|g| *g *= grad_scale);
}

/// The computation of the squares of one chunk of weights and directions, block by block.
struct DirectionSquares<'a> {
    moments: &'a SecondMoments<'a>,
    grad_scale: f32,
    first: usize,
    param: &'a [f32],
    grad: FlatRef<'a>,
    second: Option<&'a [f32]>,
}

impl SimdLoop for DirectionSquares<'_> {
    type Output = Vec<SquareSums>;

    #[inline(always)]
    fn run(self) -> Vec<SquareSums> {
        let mut sums = Vec::with_capacity(self.param.len().div_ceil(SQUARES_BLOCK));
        let mut directions = [0.0f32; SQUARES_BLOCK];
        for start in (0..self.param.len()).step_by(SQUARES_BLOCK) {
            let range = start..self.param.len().min(start + SQUARES_BLOCK);
            let directions = &mut directions[..range.len()];
            scaled_gradients(directions, self.grad.slice(range.clone()), self.grad_scale);
            self.moments.directions(self.first + start, directions, self.second.map(|v| &v[range.clone()]));
            let (mut weights, mut update) = ([0.0; LANES], [0.0; LANES]);
            add_squares(&mut weights, &self.param[range]);
            add_squares(&mut update, directions);
            sums.push(SquareSums { weights: weights.iter().sum(), update: update.iter().sum() });
        }
        sums
    }
}

/// The constants of a step, the same for all elements of a parameter.
struct UpdateConstants<'a> {
    moments: &'a SecondMoments<'a>,
    grad_scale: f32,
    /// The learning rate, multiplied by the parameter's root mean square if scale_parameter is true, and by the factor
    /// that clips the update.
    step_size: f32,
    decay: f32,
    /// The factors of the old first moment and of the update in the new one.
    keep: f32,
    take: f32,
}

/// The update of one chunk, block by block.
struct ChunkUpdate<'a> {
    constants: &'a UpdateConstants<'a>,
    first: usize,
    param: &'a mut [f32],
    grad: FlatRef<'a>,
    second: Option<&'a mut [f32]>,
    first_moment: Option<&'a mut [f32]>,
}

impl SimdLoop for ChunkUpdate<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let UpdateConstants { moments, grad_scale, step_size, decay, keep, take } = *self.constants;
        let (mut grads, mut directions) = ([0.0f32; SQUARES_BLOCK], [0.0f32; SQUARES_BLOCK]);
        for start in (0..self.param.len()).step_by(SQUARES_BLOCK) {
            let range = start..self.param.len().min(start + SQUARES_BLOCK);
            let (grads, directions) = (&mut grads[..range.len()], &mut directions[..range.len()]);
            scaled_gradients(grads, self.grad.slice(range.clone()), grad_scale);
            directions.copy_from_slice(grads);
            moments.directions(self.first + start, directions, self.second.as_deref().map(|v| &v[range.clone()]));
            if let (SecondMoments::Elements { keep, take, eps }, Some(second)) = (moments, &mut self.second) {
                for (v, g) in second[range.clone()].iter_mut().zip(&*grads) {
                    *v = new_moment(*keep, *take, *eps, *g, *v);
                }
            }
            if let Some(first_moment) = &mut self.first_moment {
                for (u, m) in directions.iter_mut().zip(&mut first_moment[range.clone()]) {
                    *m = keep * *m + take * (step_size * *u);
                    *u = *m;
                }
            } else {
                directions.iter_mut().for_each(|u| *u *= step_size);
            }
            for (p, u) in self.param[range].iter_mut().zip(&*directions) {
                *p = *p - decay * *p - *u;
            }
        }
    }
}

#[cfg(test)]
mod tests;
