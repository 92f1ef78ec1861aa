//! The parameters of the complete model, one after the other, on the rank that writes them. In a pipeline, a rank has
//! only those of its stages; the first rank receives the others from the ranks that own them.

use crate::comm::agree::texts;
use crate::error::Result;
use crate::param::ParamId;
use crate::precision::Flat;
use crate::util::fnv1a;
use crate::zero::rank_core::RankCore;
use crate::zero::step::pipeline_vote::PipelineContext;
use candle_core::DType;

/// A parameter of the complete model.
#[derive(Debug, Clone)]
pub(crate) struct ModelParameter {
    pub name: String,
    pub dims: Vec<usize>,
    pub is_trained: bool,
    /// The position along the pipeline of the rank that owns it; 0 without a pipeline.
    owner: usize,
    /// The index among this rank's parameters, if this rank owns it.
    own: Option<ParamId>,
}

impl RankCore {
    /// Returns the parameters of the complete model, in the order of registration. Collective in a pipeline.
    ///
    /// # Errors
    /// A failed collective.
    pub fn model_parameters(&self) -> Result<Vec<ModelParameter>> {
        if let Some(position) = &self.pipeline {
            return self.parameters_of_all_stages(position);
        }
        let own = self.params.iter().enumerate().map(|(param, about)| ModelParameter {
            name: about.name.clone(),
            dims: about.shape.dims().to_vec(),
            is_trained: about.is_trained(),
            owner: 0,
            own: Some(param),
        });
        Ok(own.collect())
    }

    /// Collective along the pipeline: returns the parameters of the complete model.
    fn parameters_of_all_stages(&self, position: &PipelineContext) -> Result<Vec<ModelParameter>> {
        // A line for each parameter that this rank owns: its indices on this rank and in the model, whether it is
        // trained, and its dimensions.
        let line = |param: ParamId| {
            let about = &self.params[param];
            let mut numbers = vec![param, position.in_model[param], usize::from(about.is_trained())];
            numbers.extend(about.shape.dims());
            numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let own = (0..self.params.len()).filter(|param| position.copied != Some(*param));
        let of_ranks = texts(&*position.comm, &own.map(line).collect::<Vec<_>>().join("\n"))?;
        let mut all = Vec::with_capacity(position.all_names.len());
        for (owner, text) in of_ranks.iter().enumerate() {
            for line in text.lines() {
                let numbers: Vec<usize> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
                let [param, in_model, is_trained, dims @ ..] = &numbers[..] else {
                    unreachable!("each line has at least three numbers: {line}")
                };
                let about = ModelParameter {
                    name: position.all_names[*in_model].clone(),
                    dims: dims.to_vec(),
                    is_trained: *is_trained != 0,
                    owner,
                    own: (owner == position.comm.rank()).then_some(*param),
                };
                all.push((*in_model, about));
            }
        }
        all.sort_by_key(|(in_model, _)| *in_model);
        Ok(all.into_iter().map(|(_, about)| about).collect())
    }

    /// Collective: returns a complete parameter in f32, on rank 0 of the job and possibly on other ranks.
    ///
    /// # Errors
    /// A failed collective.
    pub fn on_first_rank(&self, about: &ModelParameter) -> Result<Option<Flat>> {
        let whole = about.own.map(|param| self.whole_f32(param)).transpose()?;
        let Some(position) = &self.pipeline else { return Ok(whole) };
        // The other pipelines, which train on different data, have the same values.
        if about.owner == 0 || self.comm.rank() != 0 {
            return Ok(whole);
        }
        let (along, tag) = (&position.comm, fnv1a(about.name.as_bytes()));
        match (along.rank(), whole) {
            (0, _) => {
                let numel = about.dims.iter().product();
                along.receive(about.owner, DType::F32, numel, tag).wait().map(Some)
            }
            (_, Some(whole)) => along.send(0, whole, tag).wait().map(|()| None),
            (_, None) => Ok(None),
        }
    }
}
