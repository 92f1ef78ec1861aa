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
    local_id: Option<ParamId>,
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
        let parameters = self.params.iter().enumerate().map(|(id, param)| ModelParameter {
            name: param.name.clone(),
            dims: param.shape.dims().to_vec(),
            is_trained: param.is_trained(),
            owner: 0,
            local_id: Some(id),
        });
        Ok(parameters.collect())
    }

    /// Collective along the pipeline: returns the parameters of the complete model.
    fn parameters_of_all_stages(&self, position: &PipelineContext) -> Result<Vec<ModelParameter>> {
        // A line for each parameter that this rank owns: its indices on this rank and in the model, whether it is
        // trained, and its dimensions.
        let line = |id: ParamId| {
            let param = &self.params[id];
            let mut numbers = vec![id, position.in_model[id], usize::from(param.is_trained())];
            numbers.extend(param.shape.dims());
            numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let owned = (0..self.params.len()).filter(|id| position.copied != Some(*id));
        let descriptions = texts(&*position.comm, &owned.map(line).collect::<Vec<_>>().join("\n"))?;
        let mut all = Vec::with_capacity(position.all_names.len());
        for (owner, text) in descriptions.iter().enumerate() {
            for line in text.lines() {
                let numbers: Vec<usize> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
                let [id, in_model, is_trained, dims @ ..] = &numbers[..] else {
                    unreachable!("each line has at least three numbers: {line}")
                };
                let parameter = ModelParameter {
                    name: position.all_names[*in_model].clone(),
                    dims: dims.to_vec(),
                    is_trained: *is_trained != 0,
                    owner,
                    local_id: (owner == position.comm.rank()).then_some(*id),
                };
                all.push((*in_model, parameter));
            }
        }
        all.sort_by_key(|(in_model, _)| *in_model);
        Ok(all.into_iter().map(|(_, parameter)| parameter).collect())
    }

    /// Collective: returns a complete parameter in f32, on rank 0 of the job and possibly on other ranks.
    ///
    /// # Errors
    /// A failed collective.
    pub fn on_first_rank(&self, parameter: &ModelParameter) -> Result<Option<Flat>> {
        let values = parameter.local_id.map(|id| self.full_f32(id)).transpose()?;
        let Some(position) = &self.pipeline else { return Ok(values) };
        // The other pipelines, which train on different data, have the same values.
        if parameter.owner == 0 || self.comm.rank() != 0 {
            return Ok(values);
        }
        let (comm, tag) = (&position.comm, fnv1a(parameter.name.as_bytes()));
        match (comm.rank(), values) {
            (0, _) => {
                let numel = parameter.dims.iter().product();
                comm.receive(parameter.owner, DType::F32, numel, tag).wait().map(Some)
            }
            (_, Some(values)) => comm.send(0, values, tag).wait().map(|()| None),
            (_, None) => Ok(None),
        }
    }
}
