//! What follows from what was prepared and the number of ranks: the engine's configuration, batches, steps.

use super::choose::memory_of_rank;
#[cfg(doc)]
use super::error::FinetuneError;
use super::fitted::fitted;
use super::identity::{Identity, Saved};
use super::options::Length;
use super::pack::Batches;
use super::prepare::Prepared;
use super::rate::Rates;
use super::settings;
use crate::config::Config;
use crate::data::BatchShape;
use crate::error::Result;

/// The plan of a run on some ranks.
pub(super) struct Plan {
    pub config: Config,
    pub rates: Rates,
    pub training: Batches,
    pub validation: Option<Batches>,
    /// Steps of the run.
    pub total: u64,
    /// The stage and the offload that were chosen and why, where there was something to choose.
    pub chosen: Option<String>,
}

impl Plan {
    /// The plan of a rank, which may take `memory` bytes, of a run that continues from a checkpoint with `remembered` rows a step,
    /// where it does.
    ///
    /// # Errors
    /// A configuration that cannot be used, or that contradicts the options; without one, too little memory.
    pub fn new(prepared: &Prepared, memory: u64, world: usize, rank: usize, remembered: Option<usize>) -> Result<Self> {
        let options = &prepared.options;
        let config = settings::filled_in(options, world, remembered)?;
        let (config, chosen) = fitted(prepared, config, memory, world)?;
        let resolve = |warmup, steps| settings::resolve(&config, options, world, prepared.hidden_size(), warmup, steps);
        let shape = BatchShape::new(&resolve(1, 2)?.batch, world, rank);
        let (packing, pad) = (prepared.packing(), prepared.pad());
        let data = prepared.training.clone();
        let training = match options.shuffle {
            true => Batches::training(data, packing, shape, options.seed, pad),
            false => Batches::in_order(data, packing, shape, pad),
        };
        let total = match options.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => training.steps(epochs),
        };
        let rates = Rates::new(options.peak_lr(), options.warmup, total, options.scheduler);
        let config = resolve(rates.warmup(), total)?;
        // There is nothing to accumulate.
        let shape = BatchShape { accumulation: 1, ..shape };
        let validation = prepared.validation.clone();
        let validation = validation.map(|data| Batches::validation(data, packing, shape, pad));
        Ok(Self { config, rates, training, validation, total, chosen })
    }
}

impl Prepared {
    /// Checks that a run on `world` ranks can be planned, and may continue from its newest checkpoint where it is to: what can be
    /// known of it before a rank is started.
    ///
    /// # Errors
    /// A configuration that cannot be used, or that contradicts the options; without one, too little memory;
    /// [`FinetuneError::OtherRun`], [`FinetuneError::StepsMade`].
    pub fn check_for(&self, world: usize) -> Result<()> {
        let saved = self.saved();
        let remembered = saved.as_ref().and_then(Saved::batch);
        let plan = Plan::new(self, memory_of_rank(world).unwrap_or(u64::MAX), world, 0, remembered)?;
        match saved {
            // The rank that continues says what there is to say.
            Some(saved) => saved.check(&Identity::of(self, &plan)?, plan.total, self.options.resume_anyway).map(drop),
            None => Ok(()),
        }
    }
}
