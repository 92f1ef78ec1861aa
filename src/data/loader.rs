//! Batches of one rank, in the order of the steps.
//!
//! A batch is made when it is asked for, on the thread that asks: 8 samples of 256 tokens that are in memory take 2
//! microseconds, and to hand the work to another thread and take the result back cost 6. What can take long is a token
//! file that is not in memory: then a batch waited for the disk, at worst 45 milliseconds. So the loader tells the
//! system which tokens the next batch will want, and they are read while the step runs: at worst 0.2 milliseconds, for
//! half a microsecond per sample. (Figures of a virtual machine with two AMD Zen 5 cores.)

use super::{SampleOrder, Sampler, TokenData};
use crate::Result;
use crate::config::BatchConfig;
use crate::error::DataError;
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The most tokens of one micro batch.
const MOST_TOKENS: usize = 1 << 31;

/// One micro batch of one rank.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// Tokens, u32 `[micro, ctx]`.
    pub inputs: Tensor,
    /// The token after each of them, u32 `[micro, ctx]`.
    pub targets: Tensor,
}

/// How samples are dealt to steps, accumulation and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples per rank and forward.
    pub micro: usize,
    /// Micro batches per optimizer step.
    pub accumulation: usize,
    /// Number of ranks.
    pub world: usize,
    /// This rank.
    pub rank: usize,
}

impl BatchShape {
    /// The configured batch, for one rank.
    pub fn new(batch: &BatchConfig, world: usize, rank: usize) -> Self {
        let (micro, accumulation) = (batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps);
        Self { micro, accumulation, world, rank }
    }

    /// The number of this rank's sample `j` of a micro batch, counted over all ranks and steps:
    /// step x global batch + accumulation index x (micro x world) + rank x micro + j.
    pub fn global_sample(&self, step: u64, accumulation_index: usize, j: usize) -> u64 {
        let over_ranks = self.micro * self.world;
        let in_step = accumulation_index * over_ranks + self.rank * self.micro + j;
        step * (over_ranks * self.accumulation) as u64 + in_step as u64
    }
}

/// The endless sequence of one rank's micro batches.
///
/// ```
/// use candle_core::Device;
/// use candle_zero::data::{BatchShape, Loader, SampleOrder, TokenData};
///
/// let shape = BatchShape { micro: 2, accumulation: 1, world: 1, rank: 0 };
/// let mut loader = Loader::new(TokenData::embedded(), SampleOrder::Sequential, shape, 16, 256, &Device::Cpu)?;
/// let batch = loader.next().expect("the sequence is endless")?;
/// assert_eq!(batch.inputs.dims(), [2, 16]);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Loader {
    data: Arc<TokenData>,
    sampler: Sampler,
    shape: BatchShape,
    ctx: usize,
    vocab: usize,
    device: Device,
    position: u64,
    /// Number of the first sample at position 0.
    first: u64,
}

impl Loader {
    /// Batches of `ctx` tokens for a model of `vocab` tokens, on `device`, from the start.
    ///
    /// # Errors
    /// [`DataError::TooShort`] when `data` does not hold one sample; [`DataError::BatchTooLarge`];
    /// [`DataError::TokenOutOfVocabulary`] for data of at most 64 Mi
    /// tokens with one that the model does not know. In longer data it is found when it is used.
    ///
    /// # Panics
    ///
    /// If `ctx` or an entry of `shape` that counts is 0, or if the rank is not below the number of ranks.
    pub fn new(
        data: impl Into<Arc<TokenData>>,
        order: SampleOrder,
        shape: BatchShape,
        ctx: usize,
        vocab: usize,
        device: &Device,
    ) -> Result<Self> {
        assert!(shape.micro > 0 && shape.accumulation > 0, "a batch has at least one sample");
        assert!(shape.rank < shape.world, "rank {} of {}", shape.rank, shape.world);
        let tokens = shape.micro.saturating_mul(ctx);
        if tokens > MOST_TOKENS {
            return Err(DataError::BatchTooLarge { samples: shape.micro, ctx, most: MOST_TOKENS }.into());
        }
        let data = data.into();
        let sampler = Sampler::new(order, &data, ctx)?;
        data.check_all(vocab)?;
        Ok(Self { data, sampler, shape, ctx, vocab, device: device.clone(), position: 0, first: 0 })
    }

    /// Micro batches delivered so far, since the start or since it was [resumed](Self::resume).
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Goes to a place that [`position`](Self::position) told, at no cost. The first micro batch of optimizer step
    /// s (from 0) is at s x accumulation.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Goes on after `samples` samples of all ranks together, as [`LoadedCheckpoint::global_samples`] says: no sample twice, none
    /// lost, whatever the number of ranks and the batch were.
    ///
    /// [`LoadedCheckpoint::global_samples`]: crate::checkpoint::LoadedCheckpoint::global_samples
    pub fn resume(&mut self, samples: u64) {
        (self.first, self.position) = (samples, 0);
    }

    /// The sampler behind the batches.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Where the samples of a micro batch start.
    fn starts(&self, step: u64, accumulation_index: usize) -> impl Iterator<Item = usize> + '_ {
        let sample = move |j| self.first + self.shape.global_sample(step, accumulation_index, j);
        (0..self.shape.micro).map(move |j| self.sampler.start(sample(j)) as usize)
    }

    /// The optimizer step of the micro batch at `position`, and its number among the step's.
    fn place(&self, position: u64) -> (u64, usize) {
        let accumulation = self.shape.accumulation as u64;
        (position / accumulation, (position % accumulation) as usize)
    }

    /// This rank's micro batch `accumulation_index` of optimizer step `step`, both from 0, counted from where it was
    /// [resumed](Self::resume).
    ///
    /// # Errors
    /// [`DataError::TokenOutOfVocabulary`]; Candle's error when the
    /// device is out of memory.
    pub fn batch(&self, step: u64, accumulation_index: usize) -> Result<TokenBatch> {
        let (micro, ctx) = (self.shape.micro, self.ctx);
        let mut inputs = Vec::with_capacity(micro * ctx);
        let mut targets = Vec::with_capacity(micro * ctx);
        for (j, start) in self.starts(step, accumulation_index).enumerate() {
            self.data.extend(start, ctx, &mut inputs);
            self.data.extend(start + 1, ctx, &mut targets);
            self.data.check_vocab(start, &inputs[j * ctx..], self.vocab)?;
            self.data.check_vocab(start + ctx, &targets[(j + 1) * ctx - 1..], self.vocab)?;
        }
        let tensor = |tokens: Vec<u32>| Tensor::from_vec(tokens, (micro, ctx), &self.device);
        Ok(TokenBatch { inputs: tensor(inputs)?, targets: tensor(targets)? })
    }
}

impl Iterator for Loader {
    type Item = Result<TokenBatch>;

    /// The next micro batch; there is always one. An error does not move the position.
    fn next(&mut self) -> Option<Self::Item> {
        let (step, accumulation_index) = self.place(self.position);
        let batch = self.batch(step, accumulation_index);
        if batch.is_ok() {
            self.position += 1;
            let (step, accumulation_index) = self.place(self.position);
            self.starts(step, accumulation_index).for_each(|start| self.data.will_need(start, self.ctx + 1));
        }
        Some(batch)
    }
}
