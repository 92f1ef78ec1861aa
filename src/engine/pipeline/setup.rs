//! The ranks of a pipeline and what each of them holds: the stages, their layers, and the indices of their parameters
//! in the complete model.

use crate::comm::Communicator;
use crate::comm::agree::texts;
use crate::config::PipelineConfig;
use crate::error::{EngineError, ParamError, Result};
use crate::layout::{MeshAxis, RankMesh};
use crate::param::{BufferFilter, WeightSource};
use crate::pipeline::{
    PartitionMethod, PipelineModule, PipelineSchedule, StageCuts, balanced_cuts, kind_cuts, uniform_cuts,
};
use crate::util::{counted, fnv1a};
use crate::zero::gather::unit::building;
use crate::zero::share::var_builder_backend::VarBuilderBackend;
use crate::zero::step::stage_vote::PipelinePosition;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// This rank among those of a pipeline.
pub(in crate::engine) struct PipelineSetup {
    /// The ranks along the pipeline. This rank's number among them is its position.
    pub(super) along: Arc<dyn Communicator>,
    /// The ranks that train the same stages on different data.
    pub(super) data: Arc<dyn Communicator>,
    /// The layers of each stage.
    pub(super) cuts: StageCuts,
    /// A schedule that determines the stages of each rank, but not yet the number of micro batches.
    pub(super) stages: PipelineSchedule,
    /// The complete job, and the ranks in it that hold the first stage and the last one of this pipeline.
    pub(super) job: Arc<dyn Communicator>,
    mesh: RankMesh,
    pub(super) ends: [usize; 2],
    /// The parameter that the first layer and the last one share.
    pub(super) tied: Option<String>,
    /// Whether this rank holds the first stage, and the last one.
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// The index of each parameter in the complete model, by name.
    numbers: BTreeMap<String, usize>,
    /// The names and shapes of the complete model's parameters, and the cuts, as a hash.
    fingerprint: u64,
}

impl PipelineSetup {
    /// Collective: divides the ranks of a job into pipelines, and the model's layers among their ranks.
    ///
    /// # Errors
    /// Numbers of ranks, chunks and layers that are incompatible; a layer that cannot be built; a parameter that two
    /// layers share, unless it is the only one of the first layer and the other layer is the last.
    pub(super) fn new<B>(
        module: &PipelineModule<B>,
        config: &PipelineConfig,
        job: &Arc<dyn Communicator>,
        (source, is_buffer): (WeightSource, Option<&BufferFilter>),
    ) -> Result<Self> {
        let refused = |why: String| EngineError::Pipeline { why };
        let ranks = config.stages.unwrap_or(job.size());
        let mesh = RankMesh::new(job.size(), &[(MeshAxis::Pipeline, ranks)])
            .map_err(|e| refused(format!("pipeline.stages is {ranks}, but {e}")))?;
        // With several hosts, activations cross the slower network, and gradients of the same stage stay on a host.
        let several_hosts = job.ranks_here().len() < job.size();
        let mesh = if several_hosts { mesh.with_outermost(MeshAxis::Pipeline) } else { mesh };
        let along = job.group(&mesh.groups(&[MeshAxis::Pipeline]))?;
        let data = job.group(&mesh.groups(&[MeshAxis::Data]))?;
        let stages =
            PipelineSchedule::new(config.schedule, ranks, config.chunks, ranks).map_err(|e| refused(e.to_string()))?;
        let layers = LayerParameters::of(module, source, is_buffer)?;
        check_number_of_stages(config, (ranks, module.len()))?;
        let cuts = match &config.partition {
            PartitionMethod::Uniform => uniform_cuts(module.len(), stages.stages()),
            PartitionMethod::Parameters => {
                let weights: Vec<f64> = layers.elements.iter().map(|elements| *elements as f64).collect();
                balanced_cuts(&weights, &vec![1.0; stages.stages()])
            }
            PartitionMethod::LayerKind(text) => {
                let selected: Vec<bool> = (0..module.len()).map(|layer| module.is_of_kind(layer, text)).collect();
                let found = selected.iter().filter(|selected| **selected).count();
                if found < stages.stages() {
                    let kinds: BTreeSet<&str> = (0..module.len()).map(|layer| module.kind(layer)).collect();
                    let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
                    let why = format!(
                        "pipeline.partition is type:{text}, and the {} need at least one layer each whose type has \
                         {text:?} in its name, but only {found} were found; the types are {kinds}",
                        counted(stages.stages(), "stage")
                    );
                    return Err(refused(why).into());
                }
                kind_cuts(&selected, stages.stages())
            }
        };
        let cuts = cuts.map_err(|e| refused(e.to_string()))?;
        let is_first = stages.rank_of(0) == along.rank();
        let is_last = stages.rank_of(stages.stages() - 1) == along.rank();
        let tied = layers.tied.filter(|_| stages.stages() > 1);
        let end = |stage: usize| mesh.moved(job.rank(), MeshAxis::Pipeline, stages.rank_of(stage));
        let (job, ends) = (job.clone(), [0, stages.stages() - 1].map(end));
        let (numbers, fingerprint) = (layers.numbers, fnv1a(format!("{} {cuts:?}", layers.shapes).as_bytes()));
        Ok(Self { along, data, cuts, stages, job, mesh, ends, tied, is_first, is_last, numbers, fingerprint })
    }

    /// Returns the communicator of all ranks of the job.
    pub(in crate::engine) fn job(&self) -> &Arc<dyn Communicator> {
        &self.job
    }

    /// Returns the names of the complete model's parameters.
    pub(in crate::engine) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.numbers.keys().map(String::as_str)
    }

    /// Returns the parameter of which this rank has a copy, and which the rank of the last stage trains.
    pub(in crate::engine) fn copied(&self) -> Option<String> {
        self.tied.clone().filter(|_| self.is_first && !self.is_last)
    }

    /// Collective along the pipeline: returns the indices that are in `used` on any rank, and whether any rank
    /// `trains`.
    pub(in crate::engine) fn used_by_any_stage(
        &self,
        used: &BTreeSet<usize>,
        trains: bool,
    ) -> Result<(BTreeSet<usize>, bool)> {
        let numbers: Vec<String> = used.iter().map(ToString::to_string).collect();
        let all = texts(&*self.along, &format!("{} {}", u8::from(trains), numbers.join(" ")))?;
        let words = || all.iter().map(|text| text.split(' '));
        let used = words().flat_map(|words| words.skip(1).filter_map(|number| number.parse().ok())).collect();
        Ok((used, words().any(|mut words| words.next() == Some("1"))))
    }

    /// Returns whether this rank prints and reports for all ranks of its pipeline.
    pub(in crate::engine) fn reports(&self) -> bool {
        self.along.rank() == 0
    }

    /// Returns this rank's position. `names` are those of its parameters, in order of registration.
    pub(in crate::engine) fn position<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> PipelinePosition {
        let mut all_names: Vec<(usize, &String)> = self.numbers.iter().map(|(name, number)| (*number, name)).collect();
        all_names.sort_unstable();
        let is_copy = |name: &&str| !self.is_last && self.tied.as_deref() == Some(*name);
        PipelinePosition {
            comm: self.along.clone(),
            job: self.job.clone(),
            mesh: self.mesh,
            copied: names.clone().position(|name| is_copy(&name)),
            in_model: names.map(|name| self.numbers[name]).collect(),
            is_last: self.is_last,
            fingerprint: self.fingerprint,
            all_names: all_names.into_iter().map(|(_, name)| name.clone()).collect(),
        }
    }
}

/// Checks that each stage can have at least one layer.
fn check_number_of_stages(config: &PipelineConfig, (ranks, layers): (usize, usize)) -> Result<()> {
    let stages = ranks.checked_mul(config.chunks);
    if stages.is_some_and(|stages| stages <= layers) {
        return Ok(());
    }
    let chunks = match config.chunks {
        1 => String::new(),
        chunks => format!(" with {} each (pipeline.chunks)", counted(chunks, "chunk")),
    };
    let why = format!(
        "{} along the pipeline (pipeline.stages; auto: all ranks){chunks} {} more stages than the model's {}; use fewer",
        counted(ranks, "rank"),
        if ranks == 1 { "needs" } else { "need" },
        counted(layers, "layer")
    );
    Err(EngineError::Pipeline { why }.into())
}

/// The parameters of each layer, found by building all layers without memory.
struct LayerParameters {
    /// The number of elements of each layer.
    elements: Vec<usize>,
    numbers: BTreeMap<String, usize>,
    /// The names and shapes of all parameters.
    shapes: String,
    /// The parameter that the first layer and the last one share.
    tied: Option<String>,
}

impl LayerParameters {
    fn of<B>(module: &PipelineModule<B>, source: WeightSource, is_buffer: Option<&BufferFilter>) -> Result<Self> {
        const DTYPE: DType = DType::F32;
        let (mut elements, mut numbers, mut shapes) = (Vec::new(), BTreeMap::new(), String::new());
        let mut owners: BTreeMap<String, usize> = BTreeMap::new();
        let mut tied = None;
        let registry = VarBuilderBackend::of_shapes(DTYPE).with_source(source);
        for layer in 0..module.len() {
            let vb = VarBuilder::from_backend(Box::new(registry.clone()), DTYPE, Device::Cpu);
            building(&registry, || module.build(layer, vb)).map_err(|e| registry.explain(e))?;
            let (params, mut buffers) = registry.take();
            let chosen =
                params.iter().filter(|param| is_buffer.is_some_and(|rule| rule(&param.name, param.shape.dims())));
            buffers.extend(chosen.map(|param| param.name.clone()));
            if let Some(buffer) = buffers.first() {
                let why = format!(
                    "layer {layer} has a buffer, {buffer}; buffers are not supported in pipelines: compute such values in \
                     the layer instead of requesting them from the VarBuilder"
                );
                return Err(EngineError::Pipeline { why }.into());
            }
            shapes.extend(params.iter().map(|param| format!("{} {:?};", param.name, param.shape)));
            elements.push(params.iter().map(|param| param.numel).sum());
            for param in params {
                if let Some(first) = owners.insert(param.name.clone(), layer) {
                    let alone = owners.values().filter(|owner| **owner == 0).count() == 0;
                    if first == 0 && alone && layer + 1 == module.len() {
                        tied = Some(param.name);
                        continue;
                    }
                    let why = format!(
                        "layers {first} and {layer} share parameter {}; only the first layer and the last one may \
                         share one, and it must be the first layer's only parameter: put what they share into one layer",
                        param.name
                    );
                    return Err(EngineError::Pipeline { why }.into());
                }
                let number = numbers.len();
                numbers.insert(param.name, number);
            }
        }
        if numbers.is_empty() {
            return Err(ParamError::NoParameters.into());
        }
        Ok(Self { elements, numbers, shapes, tied })
    }
}
