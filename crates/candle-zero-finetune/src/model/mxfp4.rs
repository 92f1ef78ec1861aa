//! Experts in MXFP4 (OCP Microscaling Formats, 1.0): blocks of 32 elements of 4 bits, with a power of two as their
//! common factor. gpt-oss is published in this format.
//!
//! ```text
//!   NAME_blocks  U8 [experts, out, in / 32, 16]   two elements in a byte, the first one in the low four bits
//!   NAME_scales  U8 [experts, out, in / 32]       the factor is 2^(scale - 127)
//!   NAME         the parameter of the model: [experts, in, out]
//! ```

use crate::error::{FinetuneError, Result};
use candle_zero::engine::InitialValues;
use candle_zero::param::{FileTensor, WeightFiles, check_finite};
use candle_zero::util::counted;
use std::ops::Range;
use std::sync::Arc;

/// The number of elements in a block.
pub(crate) const BLOCK: usize = 32;
/// The values of the codes.
pub(crate) const CODES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// The scale whose factor is 1.
const SCALE_OF_1: i32 = 127;

/// Returns the factor of a block.
pub(crate) fn factor(scale: u8) -> f32 {
    2f64.powi(i32::from(scale) - SCALE_OF_1) as f32
}

/// A reader of weights in files, some of which may be in MXFP4.
#[derive(Debug)]
pub(super) struct Mxfp4WeightReader {
    files: Arc<WeightFiles>,
}

/// The tensors of a parameter in MXFP4.
struct PackedTensors<'a> {
    blocks: FileTensor<'a>,
    scales: FileTensor<'a>,
}

/// Returns the names of the tensors with a parameter's blocks and scales.
pub(super) fn packed_names(name: &str) -> [String; 2] {
    [format!("{name}_blocks"), format!("{name}_scales")]
}

/// Returns whether files contain a parameter in MXFP4.
pub(super) fn is_packed(files: &WeightFiles, name: &str) -> bool {
    files.find(name).is_none() && packed_names(name).iter().any(|name| files.find(name).is_some())
}

/// Checks that a parameter `[experts, in, out]` in MXFP4 is complete, and that its tensors have the right shapes and
/// dtypes.
///
/// # Errors
/// A tensor that is missing, or whose shape or dtype does not match; a number of inputs that is not a multiple of the
/// block size.
pub(super) fn check_packed(files: &WeightFiles, name: &str, shape: &[usize]) -> Result<()> {
    find_packed(files, name, shape).map(drop)
}

fn find_packed<'a>(files: &'a WeightFiles, name: &str, shape: &[usize]) -> Result<PackedTensors<'a>> {
    let [blocks, scales] = packed_names(name);
    let &[experts, inputs, outputs] = shape else {
        let problem = format!("belongs to a parameter of shape {shape:?}; MXFP4 needs the shape [experts, in, out]");
        return Err(wrong(files, &blocks, problem));
    };
    if !inputs.is_multiple_of(BLOCK) {
        let inputs = counted(inputs, "input");
        let problem = format!("belongs to experts with {inputs}; MXFP4 needs a multiple of {BLOCK}");
        return Err(wrong(files, &blocks, problem));
    }
    let find = |name: &str, other: &str, shape: &[usize]| {
        let Some((_, tensor)) = files.find(name) else {
            let problem = format!("is missing, but there is {other}; MXFP4 needs both, so download the files again");
            return Err(wrong(files, name, problem));
        };
        let (dtype, _) = tensor.raw();
        if tensor.shape() != shape || dtype != "U8" {
            let problem = format!(
                "has shape {:?} and dtype {dtype}; the experts that config.json describes need {shape:?} and U8",
                tensor.shape()
            );
            let path = tensor.file().to_owned();
            return Err(FinetuneError::PackedExperts { path, tensor: name.into(), problem }.into());
        }
        Ok(tensor)
    };
    let blocks_per_row = inputs / BLOCK;
    Ok(PackedTensors {
        blocks: find(&blocks, &scales, &[experts, outputs, blocks_per_row, BLOCK / 2])?,
        scales: find(&scales, &blocks, &[experts, outputs, blocks_per_row])?,
    })
}

fn wrong(files: &WeightFiles, tensor: &str, problem: String) -> crate::error::Error {
    FinetuneError::PackedExperts { path: files.path().to_owned(), tensor: tensor.into(), problem }.into()
}

impl Mxfp4WeightReader {
    pub fn new(files: Arc<WeightFiles>) -> Self {
        Self { files }
    }
}

impl InitialValues for Mxfp4WeightReader {
    fn has(&self, name: &str) -> bool {
        self.files.has(name) || is_packed(&self.files, name)
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        if !is_packed(&self.files, name) {
            return self.files.values(name, shape, range);
        }
        let PackedTensors { blocks, scales } = find_packed(&self.files, name, shape)?;
        let mut values = vec![0f32; range.len()];
        unpack(blocks.raw().1, scales.raw().1, [shape[1], shape[2]], range.clone(), &mut values);
        // Scales are much smaller, and are needed again for the next range.
        blocks.release();
        check_finite(blocks.file(), &packed_names(name)[1], range.start, &values)?;
        Ok(values)
    }

    fn fingerprint(&self) -> u64 {
        self.files.fingerprint()
    }
}

/// Unpacks elements `range` of the matrices `[inputs, outputs]` of all experts, expert by expert, into `values`.
fn unpack(blocks: &[u8], scales: &[u8], [inputs, outputs]: [usize; 2], range: Range<usize>, values: &mut [f32]) {
    let blocks_per_row = inputs / BLOCK;
    // Rows of the same expert whose inputs are in the same blocks are written together.
    let mut row = range.start / outputs;
    while row * outputs < range.end {
        let (expert, input) = (row / inputs, row % inputs);
        let next = (row - input % BLOCK + BLOCK).min(range.end.div_ceil(outputs));
        for output in 0..outputs {
            let block = (expert * outputs + output) * blocks_per_row + input / BLOCK;
            let factor = factor(scales[block]);
            let codes = &blocks[block * BLOCK / 2..][..BLOCK / 2];
            for row in row..next {
                let (at, position) = (row * outputs + output, row % inputs % BLOCK);
                if range.contains(&at) {
                    let code = codes[position / 2] >> (4 * (position % 2)) & 15;
                    values[at - range.start] = CODES[usize::from(code)] * factor;
                }
            }
        }
        row = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_those_of_the_definition_in_any_range() {
        let (experts, inputs, outputs) = (3, 64, 5);
        let blocks: Vec<u8> = (0..experts * outputs * inputs / 2).map(|i| (i * 89 + i / 7) as u8).collect();
        let scales: Vec<u8> = (0..experts * outputs * inputs / BLOCK).map(|i| (120 + i % 13) as u8).collect();
        let mut expected = Vec::new();
        for expert in 0..experts {
            for input in 0..inputs {
                for output in 0..outputs {
                    let element = (expert * outputs + output) * inputs + input;
                    let byte = blocks[element / 2];
                    let code = if element % 2 == 0 { byte & 15 } else { byte >> 4 };
                    let sign = if code < 8 { 1.0 } else { -1.0 };
                    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
                    expected.push(sign * size * 2f32.powi(i32::from(scales[element / BLOCK]) - 127));
                }
            }
        }
        for range in [0..expected.len(), 0..1, 7..8, 3..333, 319..322, 320..640, 100..959] {
            let mut values = vec![9.0; range.len()];
            unpack(&blocks, &scales, [inputs, outputs], range.clone(), &mut values);
            assert_eq!(values, expected[range]);
        }
    }
}
