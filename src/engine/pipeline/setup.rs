//! The ranks of a pipeline, and the position of this rank among them.

use super::division::PipelineDivision;
use super::layer_times::LayerTimes;
use crate::comm::Communicator;
use crate::comm::agree::texts;
use crate::config::PipelineConfig;
use crate::error::Result;
use crate::layout::{MeshAxis, RankMesh};
use crate::param::{BufferFilter, WeightSource};
use crate::pipeline::PipelineModule;
use crate::zero::step::pipeline_vote::PipelineContext;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The communicators of a rank in a pipeline, and the division of the model.
pub(in crate::engine) struct PipelineSetup {
    /// The ranks along the pipeline. This rank's number among them is its position.
    pub(super) pipeline_comm: Arc<dyn Communicator>,
    /// The ranks that train the same stages on different data.
    pub(super) data: Arc<dyn Communicator>,
    pub(super) division: Arc<PipelineDivision>,
    /// The complete job.
    pub(super) job: Arc<dyn Communicator>,
    mesh: RankMesh,
    /// The ranks of the job that hold the first stage and the last one of this pipeline.
    pub(super) ends: [usize; 2],
}

impl PipelineSetup {
    /// Collective: divides the ranks of a job into pipelines, and the model's layers among their ranks. `measure`
    /// returns the times of the layers, if they are measured.
    ///
    /// # Errors
    /// A number of stages that does not divide the number of ranks; the error of `measure`; the errors of
    /// [`PipelineDivision::new`]; a failed collective.
    pub(super) fn new<B>(
        module: &PipelineModule<B>,
        config: &PipelineConfig,
        job: &Arc<dyn Communicator>,
        (source, is_buffer): (WeightSource, Option<&BufferFilter>),
        measure: impl FnOnce(&RankMesh) -> Result<Option<LayerTimes>>,
    ) -> Result<Self> {
        let mesh = PipelineDivision::mesh(config, job.size())?;
        // With several hosts, a pipeline extends from host to host: activations cross the slower network, and gradients
        // of the same stage stay on a host.
        let several_hosts = job.ranks_here().len() < job.size();
        let mesh = if several_hosts { mesh.with_outermost(MeshAxis::Pipeline) } else { mesh };
        let pipeline_comm = job.group(&mesh.groups(&[MeshAxis::Pipeline]))?;
        let data = job.group(&mesh.groups(&[MeshAxis::Data]))?;
        let times = measure(&mesh)?;
        let ranks = pipeline_comm.size();
        let division = PipelineDivision::new(module, config, ranks, (source, is_buffer), times.as_ref())?;
        let end = |stage: usize| mesh.with_coordinate(job.rank(), MeshAxis::Pipeline, division.stages.rank_of(stage));
        let ends = [0, division.stages.stages() - 1].map(end);
        Ok(Self { pipeline_comm, data, division: Arc::new(division), job: job.clone(), mesh, ends })
    }

    /// Returns the communicator of all ranks of the job.
    pub(in crate::engine) fn job(&self) -> &Arc<dyn Communicator> {
        &self.job
    }

    /// Returns the names of the complete model's parameters.
    pub(in crate::engine) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.division.numbers.keys().map(String::as_str)
    }

    /// Returns the names of the complete model's buffers.
    pub(in crate::engine) fn buffers(&self) -> &BTreeSet<String> {
        &self.division.buffers
    }

    /// Returns the name of the parameter of which this rank has a copy, if there is one. The rank of the last stage
    /// trains that parameter.
    pub(in crate::engine) fn copied(&self) -> Option<String> {
        self.division.copied(self.pipeline_comm.rank()).map(str::to_owned)
    }

    /// Collective along the pipeline: returns the indices that are in `used` on any rank, and whether any rank
    /// `trains`.
    pub(in crate::engine) fn used_by_any_stage(
        &self,
        used: &BTreeSet<usize>,
        trains: bool,
    ) -> Result<(BTreeSet<usize>, bool)> {
        let numbers: Vec<String> = used.iter().map(ToString::to_string).collect();
        let all = texts(&*self.pipeline_comm, &format!("{} {}", u8::from(trains), numbers.join(" ")))?;
        let words = || all.iter().map(|text| text.split(' '));
        let used = words().flat_map(|words| words.skip(1).filter_map(|number| number.parse().ok())).collect();
        Ok((used, words().any(|mut words| words.next() == Some("1"))))
    }

    /// Returns whether this rank prints and reports for all ranks of its pipeline.
    pub(in crate::engine) fn reports(&self) -> bool {
        self.pipeline_comm.rank() == 0
    }

    /// Returns the context of this rank. `names` are those of its parameters, in order of registration.
    pub(in crate::engine) fn position<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> PipelineContext {
        let mut all_names: Vec<(usize, &String)> =
            self.division.numbers.iter().map(|(name, number)| (*number, name)).collect();
        all_names.sort_unstable();
        let is_last = self.division.is_last(self.pipeline_comm.rank());
        let is_copy = |name: &&str| !is_last && self.division.tied.as_deref() == Some(*name);
        PipelineContext {
            comm: self.pipeline_comm.clone(),
            job: self.job.clone(),
            mesh: self.mesh,
            copied: names.clone().position(|name| is_copy(&name)),
            in_model: names.map(|name| self.division.numbers[name]).collect(),
            is_last,
            fingerprint: self.division.fingerprint,
            all_names: all_names.into_iter().map(|(_, name)| name.clone()).collect(),
            all_buffers: self.division.buffers.clone(),
        }
    }
}
