//! The measured peak performance of the machine.

use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use crate::kernels::{Element, buffer};
use candle_core::DType;
use half::{bf16, f16};
use std::time::{Duration, Instant};

/// The number of rows and columns: large enough that the multiplications dominate, small enough for many repetitions.
const MATRIX_SIZE: usize = 1024;
/// The duration of the measurement.
const MEASUREMENT_TIME: Duration = Duration::from_secs(1);

/// Returns the operations per second of the fastest of many large matrix products in `dtype`, with this process's
/// threads.
pub(crate) fn peak_flops(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => measure(bf16::ONE),
        DType::F16 => measure(f16::ONE),
        _ => measure(1f32),
    }
}

fn measure<E: Element>(one: E) -> f64 {
    let operand = vec![one; MATRIX_SIZE * MATRIX_SIZE];
    let mut result = buffer::<E>(MATRIX_SIZE * MATRIX_SIZE);
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed() < MEASUREMENT_TIME {
        let begin = Instant::now();
        let [a, b] = [(), ()].map(|()| Matrix::new(&operand, MATRIX_SIZE, MATRIX_SIZE));
        gemm(MatrixMut::new(&mut result, MATRIX_SIZE, MATRIX_SIZE), a, b, Epilogue::default());
        best = best.min(begin.elapsed().as_secs_f64());
    }
    2.0 * (MATRIX_SIZE as f64).powi(3) / best
}
