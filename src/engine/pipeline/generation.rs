//! Text that a decoder in a pipeline continues token by token.
//!
//! ```text
//!   first stage   the new token  --> [blocks, with the keys and values of earlier tokens] --> next stage
//!   last stage    logits of the last position --> the next token ----> all ranks
//! ```

use super::division::StageLayers;
use super::pipeline_engine::PipelineEngine;
use crate::error::{EngineError, Result};
use crate::models::{DecoderBatch, TokenRng, next_token, require_tokens};
use crate::pipeline::InferenceState;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// The states that the layers of this rank keep for a text, by stage and position in the stage.
type LayerStates = BTreeMap<(usize, usize), InferenceState>;

impl PipelineEngine<DecoderBatch> {
    /// Returns `n` tokens that continue `prompt`: the most likely ones at temperature 0, otherwise sampled with `seed`.
    /// They are the tokens that [`LanguageModel::generate`](crate::models::LanguageModel::generate) returns for the
    /// same weights on one rank. Until this call returns, each rank keeps the keys and values of its own blocks. If the
    /// text is longer than the model's context, only the last tokens count, and each new token requires a pass over the
    /// full context. Collective along the pipeline, whose ranks pass the same arguments.
    ///
    /// # Errors
    /// An empty prompt; a model that was not built by [`decoder_pipeline`](crate::models::decoder_pipeline); a token
    /// outside the vocabulary; arguments that differ between ranks; a failed collective.
    pub fn generate(&mut self, prompt: &[u32], n: usize, temperature: f64, seed: u64) -> Result<Vec<u32>> {
        self.engine.check_in_step()?;
        // After these checks, all ranks have the same result, and remain in step.
        let arguments = format!("{prompt:?} {n} {temperature} {seed}");
        if let Some(other) = self.engine.first_stage_to_differ(&arguments)? {
            let why = format!(
                "the ranks at positions 0 and {other} continue different prompts, or differ in the number of tokens, the \
                 temperature or the seed; pass the same arguments on all ranks of a pipeline"
            );
            return Err(EngineError::PipelineInference { why }.into());
        }
        require_tokens(prompt)?;
        let Some(context) = self.module.context() else {
            let why =
                "the model's context length is unknown; build the layers with models::decoder_pipeline".to_string();
            return Err(EngineError::PipelineInference { why }.into());
        };
        let generated = self.continue_text(prompt, (n, temperature, seed), context);
        self.engine.in_step(generated)
    }

    fn continue_text(
        &mut self,
        prompt: &[u32],
        (n, temperature, seed): (usize, f64, u64),
        context: usize,
    ) -> Result<Vec<u32>> {
        let (mut rng, mut states, mut text) = (TokenRng::new(seed), LayerStates::new(), prompt.to_vec());
        let mut processed = 0;
        for _ in 0..n {
            let logits = match text.len() {
                len if len <= context => self.logits_after(&text[processed..], &mut states)?,
                // The positions of all tokens shift, so no stored state can be used.
                len => self.logits_after(&text[len - context..], &mut LayerStates::new())?,
            };
            processed = text.len();
            let token = match logits {
                Some(logits) => {
                    let row = logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    Some(next_token(&row, temperature, &mut rng))
                }
                None => None,
            };
            text.push(self.engine.token_of_last_stage(token)?);
        }
        Ok(text.split_off(prompt.len()))
    }

    /// Runs new tokens of a text through the stages of this rank. On the rank of the last stage, returns the logits of
    /// the token that follows them.
    fn logits_after(&mut self, tokens: &[u32], states: &mut LayerStates) -> Result<Option<Tensor>> {
        let batch = DecoderBatch::for_inference(Tensor::new(tokens, self.engine.device())?.unsqueeze(0)?);
        let apply = |stage: usize, layers: &StageLayers<DecoderBatch>, x: Tensor| {
            layers.iter().enumerate().try_fold(x, |x, (index, layer)| {
                let state = states.entry((stage, index)).or_insert_with(InferenceState::of_text);
                let output = layer.infer(&x, &batch, state)?;
                state.advance(tokens.len());
                Ok(output)
            })
        };
        let logits = self.pass_through(0, &batch, apply)?;
        self.boundaries.finish()?;
        Ok(logits)
    }
}
