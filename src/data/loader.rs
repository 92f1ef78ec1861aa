//! Serves the batches of one rank, in the order of the steps.
//!
//! A batch is built on request, on the thread that requests it: 8 samples of 256 tokens that are in memory take 2
//! microseconds, whereas handing the work to another thread and taking the result back takes 6. The slow case is a
//! token file that is not in memory: a batch then waits for the disk, for up to 45 milliseconds. The loader therefore
//! requests the tokens of the next batch from the system, which reads them while the step runs. A batch then waits
//! for at most 0.2 milliseconds, and the hint costs half a microsecond per sample. (Measured on a virtual machine with
//! two AMD Zen 5 cores.)

use super::{SampleOrder, Sampler, TokenData};
use crate::Result;
use crate::config::BatchConfig;
use crate::error::DataError;
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The maximum number of tokens in one micro batch.
const MAX_TOKENS: usize = 1 << 31;

/// One micro batch of one rank.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// The input tokens, u32 `[micro, ctx]`.
    pub inputs: Tensor,
    /// The token that follows each input token, u32 `[micro, ctx]`.
    pub targets: Tensor,
}

/// The distribution of samples over steps, accumulation and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPartition {
    /// The number of samples per rank and forward pass.
    pub micro: usize,
    /// The number of micro batches per optimizer step.
    pub accumulation: usize,
    /// The number of ranks.
    pub world: usize,
    /// This rank.
    pub rank: usize,
}

impl BatchPartition {
    /// Returns the partition of the configured batch for one rank.
    pub fn new(batch: &BatchConfig, world: usize, rank: usize) -> Self {
        let (micro, accumulation) = (batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps);
        Self { micro, accumulation, world, rank }
    }

    /// Returns the global index of this rank's sample `j` of a micro batch, counted over all ranks and steps: step x
    /// global batch + accumulation index x (micro x world) + rank x micro + j.
    pub fn global_sample(&self, step: u64, accumulation_index: usize, j: usize) -> u64 {
        let samples_over_ranks = self.micro * self.world;
        let index_in_step = accumulation_index * samples_over_ranks + self.rank * self.micro + j;
        step * (samples_over_ranks * self.accumulation) as u64 + index_in_step as u64
    }
}

/// The endless sequence of one rank's micro batches.
///
/// ```
/// use candle_core::Device;
/// use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
///
/// let shape = BatchPartition { micro: 2, accumulation: 1, world: 1, rank: 0 };
/// let mut loader = Loader::new(TokenData::embedded(), SampleOrder::Sequential, shape, 16, 256, &Device::Cpu)?;
/// let batch = loader.next().expect("the sequence is endless")?;
/// assert_eq!(batch.inputs.dims(), [2, 16]);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Loader {
    data: Arc<TokenData>,
    sampler: Sampler,
    shape: BatchPartition,
    ctx: usize,
    vocab: usize,
    device: Device,
    position: u64,
    /// The global index of the sample at which position 0 starts.
    first_sample: u64,
}

impl Loader {
    /// Creates a loader that begins at the start of the data. It returns batches on `device`, with `ctx` tokens per
    /// sample, for a model with a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`DataError::TooShort`] if `data` is too short for a [sampler](Sampler::new); [`DataError::BatchTooLarge`] if a
    /// micro batch has more than 2^31 tokens; [`DataError::TokenOutOfVocabulary`] if data of at most 64 Mi tokens
    /// contains a token outside the model's vocabulary. In longer data, such a token is found when it is used.
    ///
    /// # Panics
    ///
    /// Panics if `ctx` or a count in `shape` is 0, or if the rank is not below the number of ranks.
    pub fn new(
        data: impl Into<Arc<TokenData>>,
        order: SampleOrder,
        shape: BatchPartition,
        ctx: usize,
        vocab: usize,
        device: &Device,
    ) -> Result<Self> {
        assert!(shape.micro > 0 && shape.accumulation > 0, "a batch has at least one sample");
        assert!(shape.rank < shape.world, "rank {} of {}", shape.rank, shape.world);
        let tokens = shape.micro.saturating_mul(ctx);
        if tokens > MAX_TOKENS {
            return Err(DataError::BatchTooLarge { samples: shape.micro, ctx, max_tokens: MAX_TOKENS }.into());
        }
        let data = data.into();
        let sampler = Sampler::new(order, &data, ctx)?;
        data.check_all(vocab)?;
        Ok(Self { data, sampler, shape, ctx, vocab, device: device.clone(), position: 0, first_sample: 0 })
    }

    /// Returns the number of micro batches delivered so far, since the start or since the loader was
    /// [resumed](Self::resume).
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Moves to a position that [`position`](Self::position) returned, at no cost. The first micro batch of optimizer
    /// step s (counted from 0) is at s x accumulation.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Resumes after `samples` samples of all ranks together, as given by [`LoadedCheckpoint::global_samples`]. No
    /// sample is repeated or lost, even if the number of ranks and the batch size were different.
    ///
    /// [`LoadedCheckpoint::global_samples`]: crate::checkpoint::LoadedCheckpoint::global_samples
    pub fn resume(&mut self, samples: u64) {
        (self.first_sample, self.position) = (samples, 0);
    }

    /// Returns the sampler that chooses the samples of the batches.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Returns the index of the first token of each sample of a micro batch.
    fn starts(&self, step: u64, accumulation_index: usize) -> impl Iterator<Item = usize> + '_ {
        let sample = move |j| self.first_sample + self.shape.global_sample(step, accumulation_index, j);
        (0..self.shape.micro).map(move |j| self.sampler.start(sample(j)) as usize)
    }

    /// Returns the optimizer step of the micro batch at `position`, and its accumulation index within the step.
    fn step_and_accumulation_index(&self, position: u64) -> (u64, usize) {
        let accumulation = self.shape.accumulation as u64;
        (position / accumulation, (position % accumulation) as usize)
    }

    /// Returns this rank's micro batch `accumulation_index` of optimizer step `step`, both counted from 0 at the point
    /// where the loader was [resumed](Self::resume).
    ///
    /// # Errors
    /// [`DataError::TokenOutOfVocabulary`]; Candle's error if the device is out of memory.
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

    /// Returns the next micro batch; there is always one. An error does not move the position.
    fn next(&mut self) -> Option<Self::Item> {
        let (step, accumulation_index) = self.step_and_accumulation_index(self.position);
        let batch = self.batch(step, accumulation_index);
        if batch.is_ok() {
            self.position += 1;
            let (step, accumulation_index) = self.step_and_accumulation_index(self.position);
            self.starts(step, accumulation_index).for_each(|start| self.data.will_need(start, self.ctx + 1));
        }
        Some(batch)
    }
}
