//! Batch normalization (Ioffe and Szegedy 2015) of `[images, channels, pixels]`: a channel has one mean and one
//! variance over all images and pixels. Sums are computed in f64, in an order that depends only on the sizes.

use super::Element;
use super::f32_access::{self, as_f32, vectorized};
use super::parallel::{ParallelChunks, for_each_part};

/// The number of lanes of a sum, which are added up independently.
const LANES: usize = 8;

/// The three dimensions of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchNormSizes {
    pub images: usize,
    pub channels: usize,
    pub pixels: usize,
}

impl BatchNormSizes {
    /// Returns the number of elements of a channel.
    pub fn count(self) -> usize {
        self.images * self.pixels
    }

    fn channel_range(self, image: usize, channel: usize) -> std::ops::Range<usize> {
        let start = (image * self.channels + channel) * self.pixels;
        start..start + self.pixels
    }

    /// Returns a sum for each channel. The function that `add(channel)` returns maps the inputs' elements at a position
    /// to a term of the sum.
    fn sums<E: Element, A: Fn([f32; N]) -> f64, const N: usize>(
        self,
        inputs: [&[E]; N],
        add: impl Fn(usize) -> A + Sync,
    ) -> Vec<f64> {
        let mut sums = vec![0f64; self.channels];
        for_each_part(self.channels, ParallelChunks::new(&mut sums, 1), |channel, sum| {
            let add = add(channel);
            let mut buffer = [const { Vec::new() }; N];
            buffer.iter_mut().for_each(|buffer| buffer.resize(self.pixels, 0f32));
            let mut lanes = [0f64; LANES];
            for image in 0..self.images {
                vectorized!({
                    let mut buffers = buffer.iter_mut();
                    let runs = inputs.map(|input| {
                        let buffer = buffers.next().map(Vec::as_mut_slice).unwrap_or_default();
                        as_f32(&input[self.channel_range(image, channel)], buffer)
                    });
                    add_in_lanes(&mut lanes, runs, &add);
                });
            }
            sum[0] = lanes.iter().sum();
        });
        sums
    }

    /// Computes each element of `y` from the inputs' elements at the same position, with the function that
    /// `f(channel)` returns. With `add`, the results are added to `y`.
    fn map<E: Element, F: Fn([f32; N]) -> f32, const N: usize>(
        self,
        inputs: [&[E]; N],
        y: &mut [E],
        add: bool,
        f: impl Fn(usize) -> F + Sync,
    ) {
        let image_len = (self.channels * self.pixels).max(1);
        for_each_part(y.len().div_ceil(image_len), ParallelChunks::new(y, image_len), |image, y| {
            for (channel, y) in y.chunks_mut(self.pixels).enumerate() {
                let inputs = inputs.map(|input| &input[self.channel_range(image, channel)]);
                let f = f(channel);
                vectorized!(match add {
                    true => f32_access::update(
                        y,
                        inputs,
                        #[inline(always)]
                        |y, x| y + f(x),
                    ),
                    false => f32_access::map(inputs, y, f),
                });
            }
        });
    }
}

/// Adds the term that `add` computes from the elements at each position to the position's lane.
#[inline(always)]
fn add_in_lanes<const N: usize>(lanes: &mut [f64; LANES], runs: [&[f32]; N], add: impl Fn([f32; N]) -> f64) {
    let groups = runs.map(|run| run.as_chunks::<LANES>());
    let count = groups.iter().map(|(chunks, _)| chunks.len()).min().unwrap_or(0);
    for group in 0..count {
        let values = groups.map(|(chunks, _)| chunks[group]);
        for lane in 0..LANES {
            lanes[lane] += add(values.map(
                #[inline(always)]
                |values| values[lane],
            ));
        }
    }
    for lane in 0..groups.iter().map(|(_, rest)| rest.len()).min().unwrap_or(0) {
        lanes[lane] += add(groups.map(
            #[inline(always)]
            |(_, rest)| rest[lane],
        ));
    }
}

/// Returns the mean of each channel and the sum of squared distances from it.
pub fn moments<E: Element>(x: &[E], sizes: BatchNormSizes) -> Vec<[f64; 2]> {
    let sums = sizes.sums([x], |_| {
        #[inline(always)]
        |[x]: [f32; 1]| f64::from(x)
    });
    let means: Vec<f64> = sums.into_iter().map(|sum| sum / sizes.count().max(1) as f64).collect();
    let squares = sizes.sums([x], |channel| {
        let mean = means[channel];
        #[inline(always)]
        move |[x]: [f32; 1]| (f64::from(x) - mean).powi(2)
    });
    means.iter().zip(squares).map(|(mean, squares)| [*mean, squares]).collect()
}

/// The values that normalize a channel.
#[derive(Debug, Clone, Copy)]
pub struct ChannelStatistics {
    pub mean: f32,
    /// 1 / sqrt(variance + eps).
    pub inverse: f32,
}

/// Computes (x - mean) * inverse * weight + bias. Without `affine`, the weight is 1 and the bias 0.
pub fn forward<E: Element>(
    x: &[E],
    sizes: BatchNormSizes,
    statistics: &[ChannelStatistics],
    affine: Option<[&[f32]; 2]>,
    y: &mut [E],
) {
    sizes.map([x], y, false, |channel| {
        let ChannelStatistics { mean, inverse } = statistics[channel];
        let affine = affine.map(|affine| affine.map(|values| values[channel]));
        #[inline(always)]
        move |[x]: [f32; 1]| {
            let y = (x - mean) * inverse;
            match affine {
                Some([weight, bias]) => y * weight + bias,
                None => y,
            }
        }
    });
}

/// Returns two sums for each channel: of the result's gradient, and of that gradient times the normalized input.
pub fn backward_sums<E: Element>(
    x: &[E],
    dy: &[E],
    sizes: BatchNormSizes,
    statistics: &[ChannelStatistics],
) -> Vec<[f64; 2]> {
    let sums = sizes.sums([dy], |_| {
        #[inline(always)]
        |[dy]: [f32; 1]| f64::from(dy)
    });
    let products = sizes.sums([x, dy], |channel| {
        let ChannelStatistics { mean, inverse } = statistics[channel];
        #[inline(always)]
        move |[x, dy]: [f32; 2]| f64::from((x - mean) * inverse) * f64::from(dy)
    });
    sums.into_iter().zip(products).map(|(sum, product)| [sum, product]).collect()
}

/// Writes the gradient of x to `dx` or adds it there. `means` are the means of [`backward_sums`] over all elements that
/// the statistics cover.
pub fn backward<E: Element>(
    [x, dy]: [&[E]; 2],
    sizes: BatchNormSizes,
    statistics: &[ChannelStatistics],
    weight: Option<&[f32]>,
    means: &[[f32; 2]],
    (dx, add): (&mut [E], bool),
) {
    sizes.map([x, dy], dx, add, |channel| {
        let ChannelStatistics { mean, inverse } = statistics[channel];
        let [mean_dy, mean_product] = means[channel];
        let weight = weight.map_or(1.0, |weight| weight[channel]);
        #[inline(always)]
        move |[x, dy]: [f32; 2]| (dy - mean_dy - (x - mean) * inverse * mean_product) * inverse * weight
    });
}
