//! Batch normalization with the statistics of the batches of all ranks.

use crate::graph::{Grad, OpInputs};
use crate::kernels::batch_norm::{self as kernel, BatchNormSizes, ChannelStatistics};
use crate::kernels::buffer;
use crate::nn::norm;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::zero::gather::unit::link_under_construction;
use crate::zero::rank_core::EngineLink;
use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::{BatchNormConfig, Init, ModuleT, VarBuilder};

const NAME: &str = "sync_batch_norm";

/// Batch normalization (Ioffe and Szegedy 2015) over the batches of all ranks, like PyTorch's `SyncBatchNorm`: N ranks
/// with parts of a batch compute the same result as one rank with the full batch. Without an engine, it is plain batch
/// norm.
///
/// x is `[batch, features, ..]` of f32, bf16 or f16. Arithmetic is in f32; sums are in f64, in rank order. Training
/// uses one collective in the forward pass and one in the backward pass, each with two numbers per feature; the former
/// also contains the number of elements. The running statistics are equal on all ranks. In a model on a GPU, the
/// layer's training passes run on the host.
///
/// "running_mean" and "running_var" are [buffers](crate::EngineBuilder::buffers) of f32, in 16-bit models too. "weight"
/// and "bias", in x's dtype or f32, exist if `affine` is set. The names are those of [`candle_nn::BatchNorm`] and of
/// PyTorch.
#[derive(Clone)]
pub struct SyncBatchNorm {
    weight_and_bias: Option<(Tensor, Tensor)>,
    running_mean: Var,
    running_var: Var,
    eps: f64,
    momentum: f64,
    link: EngineLink,
}

/// Builds a [`SyncBatchNorm`] with this number of features, with the arguments of [`candle_nn::batch_norm()`].
///
/// # Errors
/// A negative `eps`, a `momentum` outside the range 0 to 1, or `remove_mean: false`, which is not supported; any error
/// of the `VarBuilder`.
pub fn sync_batch_norm<C: Into<BatchNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<SyncBatchNorm> {
    let BatchNormConfig { eps, remove_mean, affine, momentum } = config.into();
    if !(eps >= 0.0 && (0.0..=1.0).contains(&momentum) && remove_mean) {
        bail!(
            "{NAME}: eps is {eps}, momentum {momentum} and remove_mean {remove_mean}; eps must be at least 0, \
             momentum from 0 to 1, and remove_mean true"
        )
    }
    let statistic = |name, value| {
        let hint = Init::Const(value);
        Var::from_tensor(&vb.get_with_hints_dtype(num_features, name, hint, DType::F32)?)
    };
    let parameter = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    Ok(SyncBatchNorm {
        running_mean: statistic("running_mean", 0.0)?,
        running_var: statistic("running_var", 1.0)?,
        weight_and_bias: if affine { Some((parameter("weight", 1.0)?, parameter("bias", 0.0)?)) } else { None },
        eps,
        momentum,
        link: link_under_construction(),
    })
}

impl SyncBatchNorm {
    /// Returns the running mean, f32 `[features]`.
    pub fn running_mean(&self) -> &Tensor {
        self.running_mean.as_tensor()
    }

    /// Returns the running variance, f32 `[features]`.
    pub fn running_var(&self) -> &Tensor {
        self.running_var.as_tensor()
    }

    /// Returns weight and bias, `[features]` each, of an affine layer.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// Normalizes by the statistics of this batch on all ranks, and updates the running statistics with them. This is a
    /// collective operation in an engine.
    ///
    /// # Errors
    /// An input with a different number of features; fewer than two elements per feature on all ranks together; a
    /// failed collective.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        let sizes = self.sizes(x)?;
        let device = x.device().clone();
        if !device.is_cpu() {
            let host = |t: &Tensor| t.to_device(&Device::Cpu);
            let affine = match &self.weight_and_bias {
                Some((weight, bias)) => Some((host(weight)?, host(bias)?)),
                None => None,
            };
            return self.normalize_batch(&host(x)?, sizes, affine)?.to_device(&device);
        }
        self.normalize_batch(x, sizes, self.weight_and_bias.clone())
    }

    /// Normalizes by the running statistics, with gradients for x, weight and bias.
    ///
    /// # Errors
    /// An input with a different number of features.
    pub fn forward_eval(&self, x: &Tensor) -> Result<Tensor> {
        self.sizes(x)?;
        let dtype = x.dtype();
        let shape: Vec<usize> = x.dims().iter().enumerate().map(|(i, dim)| if i == 1 { *dim } else { 1 }).collect();
        let [mean, var] = [&self.running_mean, &self.running_var].map(|var| var.as_detached_tensor());
        let mut scale = (var + self.eps)?.sqrt()?.recip()?;
        if let Some((weight, _)) = &self.weight_and_bias {
            scale = (scale * weight.to_dtype(DType::F32)?)?;
        }
        let y = x.to_dtype(DType::F32)?.broadcast_sub(&mean.reshape(&shape[..])?)?;
        let y = y.broadcast_mul(&scale.reshape(&shape[..])?)?;
        match &self.weight_and_bias {
            Some((_, bias)) => y.broadcast_add(&bias.to_dtype(DType::F32)?.reshape(&shape[..])?)?.to_dtype(dtype),
            None => y.to_dtype(dtype),
        }
    }

    fn sizes(&self, x: &Tensor) -> Result<BatchNormSizes> {
        let features = self.running_mean.dim(0)?;
        match x.dims() {
            [images, channels, rest @ ..] if *channels == features => {
                Ok(BatchNormSizes { images: *images, channels: features, pixels: rest.iter().product() })
            }
            dims => bail!("{NAME}: the input has shape {dims:?}; it must be [batch, {features}, ..]"),
        }
    }

    /// Runs the forward pass of training on the CPU.
    fn normalize_batch(&self, x: &Tensor, sizes: BatchNormSizes, affine: Option<(Tensor, Tensor)>) -> Result<Tensor> {
        let x = x.contiguous()?;
        let (weight, bias) = match affine {
            Some((weight, bias)) => (Some(weight.contiguous()?), Some(bias.contiguous()?)),
            None => (None, None),
        };
        let params = [weight.as_ref(), bias.as_ref()];
        params.into_iter().flatten().try_for_each(|parameter| norm::check_format(NAME, &x, parameter))?;
        let formats = params.map(|parameter| parameter.map_or(DType::F32, Tensor::dtype));
        let inputs = OpInputs::of([Some(&x), params[0], params[1]])?;
        let shape = x.shape().clone();
        with_element!(x.dtype(), NAME, E => {
            let moments = with_elements::<E, _>(&x, NAME, |x| Ok(kernel::moments(x, sizes)))?;
            let (count, moments) = self.merge_over_ranks(sizes.count(), moments)?;
            if count < 2.0 {
                bail!(
                    "{NAME}: the number of elements per feature on all ranks together is {count}; the variance needs \
                     at least two"
                )
            }
            let statistics: Vec<ChannelStatistics> = moments.iter().map(|[mean, squares]| ChannelStatistics {
                mean: *mean as f32,
                inverse: (1.0 / (squares / count + self.eps).sqrt()) as f32,
            }).collect();
            self.update(count, &moments)?;
            let mut y = buffer::<E>(x.elem_count());
            let (w, b) = (widened(weight.as_ref())?, widened(bias.as_ref())?);
            with_elements::<E, _>(&x, NAME, |x| {
                kernel::forward(x, sizes, &statistics, w.as_deref().zip(b.as_deref()).map(|(w, b)| [w, b]), &mut y);
                Ok(())
            })?;
            let layer = self.clone();
            inputs.result(NAME, E::storage(y), shape, move |grad, [to_x, to_weight, to_bias]| {
                let sums = with_grad::<E, _>(&x, &grad, |x, dy| kernel::backward_sums(x, dy, sizes, &statistics))?;
                if to_x.is_wanted() {
                    let means: Vec<[f32; 2]> =
                        layer.sums_over_ranks(&sums)?.iter().map(|sums| sums.map(|sum| (sum / count) as f32)).collect();
                    let weight = widened(weight.as_ref())?;
                    to_x.accumulate::<E>(grad.len(), |dx, add| {
                        with_grad::<E, _>(&x, &grad, |x, dy| {
                            kernel::backward([x, dy], sizes, &statistics, weight.as_deref(), &means, (dx, add));
                        })
                    })?;
                }
                let column = |i: usize| sums.iter().map(|sums| sums[i] as f32).collect::<Vec<f32>>();
                with_element!(formats[0], NAME, P => to_weight.deliver_sums::<P>(&column(1)))?;
                with_element!(formats[1], NAME, P => to_bias.deliver_sums::<P>(&column(0)))
            })
        })
    }

    /// Returns the number of elements, and the mean and sum of squared deviations of each feature, over all ranks. This
    /// is a collective operation in an engine.
    fn merge_over_ranks(&self, count: usize, local: Vec<[f64; 2]>) -> Result<(f64, Vec<[f64; 2]>)> {
        let Some(core) = self.link.core() else { return Ok((count as f64, local)) };
        let values = std::iter::once(count as f64).chain(local.into_iter().flatten()).collect();
        let ranks = core.gather_numbers(values)?;
        let total: f64 = ranks.iter().map(|rank| rank[0]).sum();
        let features = ranks[0].len() / 2;
        let merge = |feature: usize| {
            // Merges the ranks' statistics as if all elements were one batch (Chan, Golub and LeVeque 1979).
            let (mut merged_count, mut mean, mut squares) = (0.0, 0.0, 0.0);
            for rank in &ranks {
                let [n, rank_mean, rank_squares] = [rank[0], rank[1 + 2 * feature], rank[2 + 2 * feature]];
                if n > 0.0 {
                    let distance = rank_mean - mean;
                    squares += rank_squares + distance * distance * merged_count * n / (merged_count + n);
                    mean += distance * n / (merged_count + n);
                    merged_count += n;
                }
            }
            [mean, squares]
        };
        Ok((total, (0..features).map(merge).collect()))
    }

    /// Returns the sums over all ranks. This is a collective operation in an engine.
    fn sums_over_ranks(&self, local: &[[f64; 2]]) -> Result<Vec<[f64; 2]>> {
        let Some(core) = self.link.core() else { return Ok(local.to_vec()) };
        let ranks = core.gather_numbers(local.iter().flatten().copied().collect())?;
        let sum = |i: usize| ranks.iter().map(|rank| rank[i]).sum::<f64>();
        Ok((0..local.len()).map(|feature| [sum(2 * feature), sum(2 * feature + 1)]).collect())
    }

    /// Updates the running statistics with those of a batch. The variance is the sample variance.
    fn update(&self, count: f64, moments: &[[f64; 2]]) -> Result<()> {
        let batch =
            |i: usize| moments.iter().map(move |values| if i == 0 { values[0] } else { values[1] / (count - 1.0) });
        for (i, running) in [&self.running_mean, &self.running_var].into_iter().enumerate() {
            let old = running.to_vec1::<f32>()?;
            let new = old
                .iter()
                .zip(batch(i))
                .map(|(old, batch)| (f64::from(*old) * (1.0 - self.momentum) + batch * self.momentum) as f32);
            running.set(&Tensor::from_iter(new, running.device())?)?;
        }
        Ok(())
    }
}

impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { self.forward_train(x) } else { self.forward_eval(x) }
    }
}

impl std::fmt::Debug for SyncBatchNorm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { eps, momentum, .. } = self;
        f.debug_struct("SyncBatchNorm").field("eps", eps).field("momentum", momentum).finish_non_exhaustive()
    }
}

/// Returns the current values of a parameter in f32.
fn widened(parameter: Option<&Tensor>) -> Result<Option<Vec<f32>>> {
    parameter.map(|parameter| norm::widened(parameter, NAME)).transpose()
}

/// Calls `f` with an input and the gradient of the result.
fn with_grad<E: TensorElement, T>(x: &Tensor, grad: &Grad, f: impl FnOnce(&[E], &[E]) -> T) -> Result<T> {
    with_elements::<E, _>(x, NAME, |x| grad.read::<E, _>(NAME, |dy| Ok(f(x, dy))))
}
