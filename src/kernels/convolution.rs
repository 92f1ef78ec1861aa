//! Convolution along one axis as matrix products over patches (`im2col`).
//!
//! ```text
//!   x [c_in, l_in]  ->  patches [c_in * kernel, l_out]  ->  y [c_out, l_out] = w [c_out, c_in * kernel] patches
//! ```
//!
//! Column t of the patches holds the input elements that output t depends on. The backward pass adds the gradients of
//! patches to those of the elements that the patches were copied from. In a transposed convolution, the forward pass
//! and the input's gradient trade places. Everything is in f32, except that [`channel_sums`] adds in f64. Inputs and
//! outputs have the shape `[batch, groups * c, length]`, weights `[groups * c_out, c_in, kernel]`.

use super::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use super::parallel::{ParallelChunks, for_each_part};
use super::{add::add_into, buffer, mac_count};
use crate::util::pieces;
use std::ops::Range;

/// The maximum number of patch columns that are computed at a time. They stay in a core's cache.
const COLUMNS: usize = 512;

/// The maximum number of parts into which the batch is split for the weight's gradient. They are summed concurrently.
const PARTS: usize = 8;

/// The number of a group's weights above which one product occupies all threads, so the batch is not split.
const MANY_WEIGHTS: usize = 1 << 18;

/// The sizes of a convolution from `l_in` to `l_out`. Channels are counted per group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionSizes {
    pub batch: usize,
    pub groups: usize,
    pub c_in: usize,
    pub c_out: usize,
    pub l_in: usize,
    pub l_out: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
}

impl ConvolutionSizes {
    /// Returns the number of elements of one group of one input.
    fn input(self) -> usize {
        self.c_in * self.l_in
    }

    /// Returns the number of elements of one group of one result.
    fn output(self) -> usize {
        self.c_out * self.l_out
    }

    /// Returns the number of elements of one group's weight.
    fn weights(self) -> usize {
        self.c_out * self.patch()
    }

    /// Returns the sizes whose product is the number of multiply-adds of each pass.
    fn mac_sizes(self) -> [usize; 4] {
        [self.batch * self.groups, self.c_out, self.patch(), self.l_out]
    }

    /// Returns the number of rows of the patches.
    fn patch(self) -> usize {
        self.c_in * self.kernel
    }

    /// Returns those of `columns` whose output reads an element of the input (not the padding) through the tap `tap`,
    /// and the element that the first of them reads.
    fn columns_of_tap(self, tap: usize, columns: &Range<usize>) -> (Range<usize>, usize) {
        let ahead = tap * self.dilation;
        let first = self.padding.saturating_sub(ahead).div_ceil(self.stride).clamp(columns.start, columns.end);
        let end = (self.l_in + self.padding).saturating_sub(ahead).div_ceil(self.stride).clamp(first, columns.end);
        (first..end, if first < end { first * self.stride + ahead - self.padding } else { 0 })
    }

    /// Copies the patches of some columns of one group of one input. The patches have a row for each channel and tap.
    fn patches(self, x: &[f32], columns: &Range<usize>, patches: &mut [f32]) {
        let width = columns.len();
        for_each_part(self.c_in, ParallelChunks::new(patches, self.kernel * width), |channel, rows| {
            let x = &x[channel * self.l_in..][..self.l_in];
            for (tap, row) in rows.chunks_exact_mut(width).enumerate() {
                let (inside, start) = self.columns_of_tap(tap, columns);
                row[..inside.start - columns.start].fill(0.0);
                row[inside.end - columns.start..].fill(0.0);
                let row = &mut row[inside.start - columns.start..inside.end - columns.start];
                if self.stride == 1 {
                    row.copy_from_slice(&x[start..start + inside.len()]);
                } else {
                    row.iter_mut()
                        .zip(x[start.min(x.len())..].iter().step_by(self.stride))
                        .for_each(|(to, x)| *to = *x);
                }
            }
        });
    }

    /// Adds the gradients of patches to those of the elements of one group of one input, from which the patches were
    /// copied.
    fn add_patches(self, patches: &[f32], columns: &Range<usize>, dx: &mut [f32]) {
        let width = columns.len();
        for_each_part(self.c_in, ParallelChunks::new(dx, self.l_in), |channel, dx| {
            let rows = &patches[channel * self.kernel * width..][..self.kernel * width];
            for (tap, row) in rows.chunks_exact(width).enumerate() {
                let (inside, start) = self.columns_of_tap(tap, columns);
                let row = &row[inside.start - columns.start..inside.end - columns.start];
                if self.stride == 1 {
                    dx[start..start + inside.len()].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                } else {
                    let start = start.min(dx.len());
                    dx[start..].iter_mut().step_by(self.stride).zip(row).for_each(|(sum, value)| *sum += value);
                }
            }
        });
    }

    /// Computes the convolution, and adds `bias` (one value for each channel of the result).
    pub fn forward(self, x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
        let convolve_images = || {
            for_each_part(self.batch * self.groups, ParallelChunks::new(y, self.output()), |image, y| {
                let group = image % self.groups;
                let x = &x[image * self.input()..][..self.input()];
                let weight = Matrix::new(&weight[group * self.weights()..][..self.weights()], self.c_out, self.patch());
                if let Some(bias) = bias {
                    let bias = &bias[group * self.c_out..][..self.c_out];
                    y.chunks_exact_mut(self.l_out).zip(bias).for_each(|(row, bias)| row.fill(*bias));
                }
                let mut patches = buffer::<f32>(self.patch() * self.l_out.min(COLUMNS));
                for columns in pieces(self.l_out, COLUMNS) {
                    let patches = &mut patches[..self.patch() * columns.len()];
                    self.patches(x, &columns, patches);
                    let y = MatrixMut::strided(&mut y[columns.start..], self.c_out, columns.len(), self.l_out);
                    let epilogue = Epilogue { accumulate: bias.is_some(), ..Epilogue::default() };
                    gemm(y, weight, Matrix::new(patches, self.patch(), columns.len()), epilogue);
                }
            })
        };
        mac_count::on_this_thread(self.mac_sizes(), convolve_images);
    }

    /// Computes the gradient of the input from that of the result. This is also the transposed convolution of `dy`,
    /// with one `bias` value for each channel of the input.
    pub fn input_gradient(self, dy: &[f32], weight: &[f32], bias: Option<&[f32]>, dx: &mut [f32]) {
        let compute_images = || {
            for_each_part(self.batch * self.groups, ParallelChunks::new(dx, self.input()), |image, dx| {
                let group = image % self.groups;
                let dy = &dy[image * self.output()..][..self.output()];
                let weight = Matrix::new(&weight[group * self.weights()..][..self.weights()], self.c_out, self.patch());
                match bias {
                    Some(bias) => {
                        let bias = &bias[group * self.c_in..][..self.c_in];
                        dx.chunks_exact_mut(self.l_in.max(1)).zip(bias).for_each(|(row, bias)| row.fill(*bias));
                    }
                    None => dx.fill(0.0),
                }
                let mut patches = buffer::<f32>(self.patch() * self.l_out.min(COLUMNS));
                for columns in pieces(self.l_out, COLUMNS) {
                    let patches = &mut patches[..self.patch() * columns.len()];
                    let dy = Matrix::strided(&dy[columns.start..], self.c_out, columns.len(), self.l_out);
                    gemm(MatrixMut::new(patches, self.patch(), columns.len()), weight.t(), dy, Epilogue::default());
                    self.add_patches(patches, &columns, dx);
                }
            })
        };
        mac_count::on_this_thread(self.mac_sizes(), compute_images);
    }

    /// Computes the gradient of the weight from that of the result.
    pub fn weight_gradient(self, x: &[f32], dy: &[f32], dw: &mut [f32]) {
        mac_count::on_this_thread(self.mac_sizes(), || self.sum_weight_gradients(x, dy, dw));
    }

    fn sum_weight_gradients(self, x: &[f32], dy: &[f32], dw: &mut [f32]) {
        // The sizes decide this, so that the bits are the same for any number of threads.
        let parts = if self.weights() > MANY_WEIGHTS { 1 } else { self.batch.clamp(1, PARTS) };
        if parts == 1 {
            return for_each_part(self.groups, ParallelChunks::new(dw, self.weights()), |group, dw| {
                self.group_weight_gradient(x, dy, (0..self.batch, group), dw)
            });
        }
        let len = dw.len();
        let mut sums = buffer::<f32>(parts * len);
        for_each_part(parts * self.groups, ParallelChunks::new(&mut sums, self.weights()), |task, dw| {
            let part = task / self.groups;
            let images = part * self.batch / parts..(part + 1) * self.batch / parts;
            self.group_weight_gradient(x, dy, (images, task % self.groups), dw)
        });
        dw.copy_from_slice(&sums[..len]);
        sums[len..].chunks_exact(len).for_each(|part| add_into(dw, part));
    }

    /// Writes the gradient of one group's weight, summed over some images, to `dw`.
    fn group_weight_gradient(self, x: &[f32], dy: &[f32], (images, group): (Range<usize>, usize), dw: &mut [f32]) {
        dw.fill(0.0);
        let mut patches = buffer::<f32>(self.patch() * self.l_out.min(COLUMNS));
        for image in images.map(|image| image * self.groups + group) {
            let (x, dy) = (&x[image * self.input()..][..self.input()], &dy[image * self.output()..][..self.output()]);
            for columns in pieces(self.l_out, COLUMNS) {
                let patches = &mut patches[..self.patch() * columns.len()];
                self.patches(x, &columns, patches);
                let dy = Matrix::strided(&dy[columns.start..], self.c_out, columns.len(), self.l_out);
                let epilogue = Epilogue { accumulate: true, ..Epilogue::default() };
                let patches = Matrix::new(patches, self.patch(), columns.len());
                gemm(MatrixMut::new(dw, self.c_out, self.patch()), dy, patches.t(), epilogue);
            }
        }
    }
}

/// Returns the sum of each channel of `[batch, channels, length]`, which is the gradient of a bias.
pub fn channel_sums(dy: &[f32], channels: usize, length: usize) -> Vec<f32> {
    let mut sums = vec![0f64; channels];
    for image in dy.chunks_exact((channels * length).max(1)) {
        for (sum, row) in sums.iter_mut().zip(image.chunks_exact(length.max(1))) {
            *sum += row.iter().map(|value| f64::from(*value)).sum::<f64>();
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| (crate::util::mix(i ^ seed << 32) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
    }

    /// Calls `visit` with the positions of input, weight and result for every product of the convolution.
    fn products(s: ConvolutionSizes, mut visit: impl FnMut(usize, usize, usize)) {
        for (image, group) in (0..s.batch).flat_map(|image| (0..s.groups).map(move |group| (image, group))) {
            for (o, t) in (0..s.c_out).flat_map(|o| (0..s.l_out).map(move |t| (o, t))) {
                for (i, tap) in (0..s.c_in).flat_map(|i| (0..s.kernel).map(move |tap| (i, tap))) {
                    let Some(at) = (t * s.stride + tap * s.dilation).checked_sub(s.padding) else { continue };
                    if at < s.l_in {
                        visit(
                            ((image * s.groups + group) * s.c_in + i) * s.l_in + at,
                            ((group * s.c_out + o) * s.c_in + i) * s.kernel + tap,
                            ((image * s.groups + group) * s.c_out + o) * s.l_out + t,
                        );
                    }
                }
            }
        }
    }

    fn close(got: &[f32], want: &[f64], name: &str) {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((f64::from(*got) - want).abs() <= 1e-5 * want.abs().max(10.0), "{name} {i}: {got} not {want}");
        }
    }

    #[test]
    fn forward_and_both_gradients_are_the_sums_of_the_definition_at_any_number_of_threads() {
        let mut all = Vec::new();
        for (batch, groups, c_in, c_out, l_in) in
            [(1, 1, 1, 1, 1), (3, 1, 4, 5, 17), (9, 3, 2, 1, 40), (2, 2, 3, 20, 1500)]
        {
            for (kernel, stride, padding, dilation) in
                [(1, 1, 0, 1), (3, 1, 1, 1), (3, 2, 1, 1), (4, 3, 2, 2), (5, 1, 7, 3), (2, 5, 0, 1), (1, 2, 3, 1)]
            {
                let extent = dilation * (kernel - 1) + 1;
                if l_in + 2 * padding < extent {
                    continue;
                }
                let l_out = (l_in + 2 * padding - extent) / stride + 1;
                all.push(ConvolutionSizes {
                    batch,
                    groups,
                    c_in,
                    c_out,
                    l_in,
                    l_out,
                    kernel,
                    stride,
                    padding,
                    dilation,
                });
            }
        }
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        let three = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        for s in all {
            let x = numbers(s.batch * s.groups * s.input(), 1);
            let w = numbers(s.groups * s.weights(), 2);
            let dy = numbers(s.batch * s.groups * s.output(), 3);
            let (bias, in_bias) = (numbers(s.groups * s.c_out, 4), numbers(s.groups * s.c_in, 5));
            let mut y: Vec<f64> = (0..dy.len()).map(|i| f64::from(bias[i / s.l_out % bias.len()])).collect();
            let mut dx: Vec<f64> = (0..x.len()).map(|i| f64::from(in_bias[i / s.l_in % in_bias.len()])).collect();
            let mut dw = vec![0f64; w.len()];
            products(s, |i, j, o| {
                y[o] += f64::from(x[i]) * f64::from(w[j]);
                dx[i] += f64::from(dy[o]) * f64::from(w[j]);
                dw[j] += f64::from(dy[o]) * f64::from(x[i]);
            });
            let run = || {
                let (mut a, mut b, mut c) = (buffer(y.len()), buffer(x.len()), buffer(w.len()));
                s.forward(&x, &w, Some(&bias), &mut a);
                s.input_gradient(&dy, &w, Some(&in_bias), &mut b);
                s.weight_gradient(&x, &dy, &mut c);
                [a, b, c]
            };
            let [a, b, c] = one.install(run);
            close(&a, &y, &format!("{s:?} y"));
            close(&b, &dx, &format!("{s:?} dx"));
            close(&c, &dw, &format!("{s:?} dw"));
            assert!(three.install(run) == [a, b, c], "{s:?}: different bits with three threads");
        }
    }

    #[test]
    fn a_channels_sum_is_over_all_images() {
        assert_eq!(channel_sums(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2, 2), [14.0, 22.0]);
    }
}
