//! Batch normalization (Ioffe and Szegedy 2015) of `[images, channels, pixels]`: a channel has one mean and one
//! variance over all images and pixels. Sums are in f64, in an order that the sizes alone decide.

use super::Element;
use rayon::prelude::*;

/// Lanes of a sum: as many independent additions.
const LANES: usize = 8;

/// The three dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub images: usize,
    pub channels: usize,
    pub pixels: usize,
}

impl Sizes {
    /// Elements of a channel.
    pub fn count(self) -> usize {
        self.images * self.pixels
    }

    fn run(self, image: usize, channel: usize) -> std::ops::Range<usize> {
        let start = (image * self.channels + channel) * self.pixels;
        start..start + self.pixels
    }

    /// Sums over each channel, of what `add` makes of the elements that `at` finds in the inputs.
    fn sums<E: Element, const N: usize>(
        self,
        inputs: [&[E]; N],
        add: impl Fn(usize, [f32; N]) -> f64 + Sync,
    ) -> Vec<f64> {
        let channel = |channel: usize| {
            let mut runs = [const { Vec::new() }; N];
            runs.iter_mut().for_each(|run| run.resize(self.pixels, 0f32));
            let mut lanes = [0f64; LANES];
            for image in 0..self.images {
                runs.iter_mut().zip(inputs).for_each(|(run, input)| E::widen(&input[self.run(image, channel)], run));
                for pixel in 0..self.pixels {
                    lanes[pixel % LANES] += add(channel, std::array::from_fn(|input| runs[input][pixel]));
                }
            }
            lanes.iter().sum()
        };
        (0..self.channels).into_par_iter().map(channel).collect()
    }

    /// Computes `y` image by image, channel by channel. `of` makes a run of pixels of those of the inputs.
    fn map<E: Element, const N: usize>(
        self,
        inputs: [&[E]; N],
        y: &mut [E],
        add: bool,
        of: impl Fn(usize, [f32; N]) -> f32 + Sync,
    ) {
        let image = |(image, y): (usize, &mut [E])| {
            let mut runs = [const { Vec::new() }; N];
            runs.iter_mut().for_each(|run| run.resize(self.pixels, 0f32));
            let mut result = vec![0f32; self.pixels];
            for (channel, y) in y.chunks_mut(self.pixels).enumerate() {
                runs.iter_mut().zip(inputs).for_each(|(run, input)| E::widen(&input[self.run(image, channel)], run));
                match add {
                    true => E::widen(y, &mut result),
                    false => result.fill(0.0),
                }
                for (pixel, result) in result.iter_mut().enumerate() {
                    *result += of(channel, std::array::from_fn(|input| runs[input][pixel]));
                }
                E::narrow(&result, y);
            }
        };
        y.par_chunks_mut((self.channels * self.pixels).max(1)).enumerate().for_each(image);
    }
}

/// Mean, and sum of squared distances from it, of each channel.
pub fn moments<E: Element>(x: &[E], sizes: Sizes) -> Vec<[f64; 2]> {
    let sums = sizes.sums([x], |_, [x]| f64::from(x));
    let means: Vec<f64> = sums.into_iter().map(|sum| sum / sizes.count().max(1) as f64).collect();
    let squares = sizes.sums([x], |channel, [x]| (f64::from(x) - means[channel]).powi(2));
    means.iter().zip(squares).map(|(mean, squares)| [*mean, squares]).collect()
}

/// The values by which a channel is normalized.
#[derive(Debug, Clone, Copy)]
pub struct Normal {
    pub mean: f32,
    /// 1 / sqrt(variance + eps)
    pub inverse: f32,
}

/// (x - mean) x inverse x weight + bias; without `affine`, a weight of 1 and a bias of 0.
pub fn forward<E: Element>(x: &[E], sizes: Sizes, normal: &[Normal], affine: Option<[&[f32]; 2]>, y: &mut [E]) {
    sizes.map([x], y, false, |channel, [x]| {
        let Normal { mean, inverse } = normal[channel];
        let y = (x - mean) * inverse;
        affine.map_or(y, |[weight, bias]| y * weight[channel] + bias[channel])
    });
}

/// Sums of the result's gradient, and of it times the normalized input, of each channel.
pub fn backward_sums<E: Element>(x: &[E], dy: &[E], sizes: Sizes, normal: &[Normal]) -> Vec<[f64; 2]> {
    let sums = sizes.sums([dy], |_, [dy]| f64::from(dy));
    let products = sizes.sums([x, dy], |channel, [x, dy]| {
        let Normal { mean, inverse } = normal[channel];
        f64::from((x - mean) * inverse) * f64::from(dy)
    });
    sums.into_iter().zip(products).map(|(sum, product)| [sum, product]).collect()
}

/// The gradient of x, added to `dx` or written there; `means` are those of [`backward_sums`] over all elements that the
/// statistics are of.
pub fn backward<E: Element>(
    [x, dy]: [&[E]; 2],
    sizes: Sizes,
    normal: &[Normal],
    weight: Option<&[f32]>,
    means: &[[f32; 2]],
    (dx, add): (&mut [E], bool),
) {
    sizes.map([x, dy], dx, add, |channel, [x, dy]| {
        let Normal { mean, inverse } = normal[channel];
        let [mean_dy, mean_product] = means[channel];
        let weight = weight.map_or(1.0, |weight| weight[channel]);
        (dy - mean_dy - (x - mean) * inverse * mean_product) * inverse * weight
    });
}
