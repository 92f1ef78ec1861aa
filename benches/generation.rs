//! Measures how long GPT-2 (124 M) takes to generate one more token with cached keys and values, and compares the
//! memory bandwidth that it achieves with the peak.
//!
//!     RAYON_NUM_THREADS=1 cargo bench --bench generation
//!
//! The bytes counted are those that must be read for a token: every weight once (of the embedding tables, only the one
//! that is also the output projection), and the keys and values of all positions.
#![allow(clippy::unwrap_used)]

mod keep_memory;
mod peak_memory;

use candle_core::{DType, Device, Shape, Tensor, WithDType};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use candle_zero::models::{Gpt, GptConfig, Session};
use divan::Bencher;
use divan::counter::BytesCount;
use half::bf16;
use std::hint::black_box;

fn main() {
    keep_memory::start_as_a_rank(&[]);
    println!("threads: {}", rayon::current_num_threads());
    divan::main();
}

/// Weights between -0.03 and 0.03.
struct Weights;

impl SimpleBackend for Weights {
    fn get(&self, shape: Shape, _: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let number = |i: u32| ((i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.06;
        Tensor::from_iter((0..shape.elem_count() as u32).map(number), device)?.reshape(shape)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name} was requested without a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// Runs the model on one token after `cached_tokens` earlier ones: one step of generation.
#[divan::bench(types = [f32, bf16], args = [16, 512, 1000], sample_size = 1, max_time = 2)]
fn gpt2_token<T: WithDType>(bencher: Bencher<'_, '_>, cached_tokens: usize) {
    let config = GptConfig::preset("gpt2").unwrap();
    let gpt = Gpt::new(&config, VarBuilder::from_backend(Box::new(Weights), T::DTYPE, Device::Cpu)).unwrap();
    let mut session = Session::new();
    session.reserve(cached_tokens + 1);
    let text: Vec<u32> =
        (0..cached_tokens as u32).map(|i| i.wrapping_mul(2_654_435_761) % config.vocab as u32).collect();
    gpt.extend(&mut session, &text).unwrap();

    let weights = config.num_parameters() - config.ctx * config.n_embd;
    let cached_elements = 2 * config.n_layer * (cached_tokens + 1) * config.n_embd;
    let bytes = (weights + cached_elements) * T::DTYPE.size_in_bytes();
    let mut one_more = || {
        session.truncate(cached_tokens);
        black_box(gpt.extend(&mut session, &[11]).unwrap());
    };
    // Allocates the buffers that later calls reuse.
    one_more();
    bencher.counter(BytesCount::new(bytes)).bench_local(one_more);
}
