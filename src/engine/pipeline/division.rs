//! The division of a model among the ranks of a pipeline: which rank holds which layers, and the parameters of each
//! layer.
//!
//! The division depends only on the model and the configuration, and is therefore the same on every rank.

use super::layer_times::LayerTimes;
use crate::config::PipelineConfig;
use crate::error::{EngineError, ParamError, Result};
use crate::layout::{MeshAxis, RankMesh, ZeroStage};
use crate::param::{BufferFilter, WeightSource};
use crate::pipeline::{
    PartitionMethod, PipelineLayer, PipelineModule, PipelineSchedule, StageCuts, balanced_cuts, kind_cuts, uniform_cuts,
};
use crate::util::{counted, fnv1a};
use crate::zero::gather::unit::building;
use crate::zero::share::var_builder_backend::VarBuilderBackend;
use candle_core::{DType, Device, Shape};
use candle_nn::VarBuilder;
use std::collections::{BTreeMap, BTreeSet};

/// The layers of one stage.
pub(super) type StageLayers<B> = Vec<Box<dyn PipelineLayer<B>>>;

/// The layers of a rank.
pub(crate) struct RankLayers<B> {
    pub stages: BTreeMap<usize, StageLayers<B>>,
    /// The first layer, on the rank of the last stage, if the first and the last layer share a weight.
    pub lookup: Option<Box<dyn PipelineLayer<B>>>,
}

/// The stages of each rank, and the layers and parameters of each stage.
pub(crate) struct PipelineDivision {
    /// The layers of each stage.
    pub cuts: StageCuts,
    /// A schedule that determines the stages of each rank, but not yet the number of micro batches.
    pub stages: PipelineSchedule,
    /// The parameter that the first layer and the last one share, if they are in different stages.
    pub tied: Option<String>,
    /// The number of elements of each layer's parameters.
    pub elements: Vec<usize>,
    /// The index of each parameter in the complete model, by name.
    pub numbers: BTreeMap<String, usize>,
    /// The names of the complete model's buffers.
    pub buffers: BTreeSet<String>,
    /// The names and shapes of the complete model's parameters and buffers, and the cuts, as a hash.
    pub fingerprint: u64,
}

impl PipelineDivision {
    /// Divides the layers of `module` among `ranks` ranks along a pipeline. `times` are the measured times of the
    /// layers, if there are any.
    ///
    /// # Errors
    /// Numbers of ranks, chunks and layers that are incompatible; a `type:` partition whose expression is invalid or
    /// matches too few layers; a layer that cannot be built; a model without parameters; a buffer that two layers
    /// share; a parameter that two layers share, unless it is the first layer's only parameter and the other layer is
    /// the last one.
    pub fn new<B>(
        module: &PipelineModule<B>,
        config: &PipelineConfig,
        ranks: usize,
        (source, is_buffer): (WeightSource, Option<&BufferFilter>),
        times: Option<&LayerTimes>,
    ) -> Result<Self> {
        let refused = |why: String| EngineError::Pipeline { why };
        let stages =
            PipelineSchedule::new(config.schedule, ranks, config.chunks, ranks).map_err(|e| refused(e.to_string()))?;
        let layers = LayerParameters::of(module, source, is_buffer)?;
        check_number_of_stages(config, (ranks, module.len()))?;
        let cuts = match (&config.partition, times) {
            (PartitionMethod::Time, Some(times)) => times.cuts(stages),
            (PartitionMethod::Uniform, _) => uniform_cuts(module.len(), stages.stages()),
            // An estimate has no times.
            (PartitionMethod::Parameters | PartitionMethod::Time, _) => {
                let weights: Vec<f64> = layers.elements.iter().map(|elements| *elements as f64).collect();
                balanced_cuts(&weights, &vec![1.0; stages.stages()])
            }
            (PartitionMethod::LayerKind(expression), _) => {
                let invalid = |error| refused(format!("pipeline.partition is type:{expression}: {error}"));
                let pattern = PartitionMethod::kind_pattern(expression).map_err(invalid)?;
                let selected: Vec<bool> = (0..module.len()).map(|layer| pattern.is_match(module.kind(layer))).collect();
                let found = selected.iter().filter(|selected| **selected).count();
                if found < stages.stages() {
                    let kinds: BTreeSet<&str> = (0..module.len()).map(|layer| module.kind(layer)).collect();
                    let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
                    let why = format!(
                        "pipeline.partition is type:{expression}, and each of the {} must have a layer whose type name \
                         matches, but {} {} such a name; the types are {kinds}",
                        counted(stages.stages(), "stage"),
                        counted(found, "layer"),
                        if found == 1 { "has" } else { "have" }
                    );
                    return Err(refused(why).into());
                }
                kind_cuts(&selected, stages.stages())
            }
        };
        let cuts = cuts.map_err(|e| refused(e.to_string()))?;
        let tied = layers.tied.filter(|_| stages.stages() > 1);
        let fingerprint = fnv1a(format!("{} {cuts:?}", layers.shapes).as_bytes());
        let LayerParameters { elements, numbers, buffers, .. } = layers;
        Ok(Self { cuts, stages, tied, elements, numbers, buffers, fingerprint })
    }

    /// Divides the ranks of a job into pipelines.
    ///
    /// # Errors
    /// The number of stages does not divide the number of ranks.
    pub fn mesh(config: &PipelineConfig, world_size: usize) -> Result<RankMesh> {
        let ranks = config.stages.unwrap_or(world_size);
        RankMesh::new(world_size, &[(MeshAxis::Pipeline, ranks)])
            .map_err(|e| EngineError::Pipeline { why: format!("pipeline.stages is {ranks}, but {e}") }.into())
    }

    /// Checks that a pipeline can run at ZeRO stage `stage`.
    ///
    /// # Errors
    /// Gradients or parameters would be sharded.
    pub fn check_stage(stage: ZeroStage) -> Result<()> {
        if stage <= ZeroStage::One {
            return Ok(());
        }
        let why = format!(
            "zero_optimization.stage is {stage}, but gradients and parameters of a pipeline's stages are not sharded; use \
             stage 0 or 1"
        );
        Err(EngineError::Pipeline { why }.into())
    }

    /// Returns whether a rank holds the first stage.
    pub fn is_first(&self, rank: usize) -> bool {
        self.stages.rank_of(0) == rank
    }

    /// Returns whether a rank holds the last stage.
    pub fn is_last(&self, rank: usize) -> bool {
        self.stages.rank_of(self.stages.stages() - 1) == rank
    }

    /// Returns the parameter that a rank holds only as a copy, if there is one. The rank of the last stage trains it.
    pub fn copied(&self, rank: usize) -> Option<&str> {
        self.tied.as_deref().filter(|_| self.is_first(rank) && !self.is_last(rank))
    }

    /// Builds the layers of a rank.
    pub fn build<B>(
        &self,
        module: &PipelineModule<B>,
        rank: usize,
        vb: VarBuilder<'_>,
    ) -> candle_core::Result<RankLayers<B>> {
        let stage = |stage: usize| -> candle_core::Result<(usize, StageLayers<B>)> {
            let layers = self.cuts.layers_of(stage).map(|layer| module.build(layer, vb.clone()));
            Ok((stage, layers.collect::<candle_core::Result<_>>()?))
        };
        let stages = self.stages.stages_of(rank).into_iter().map(stage);
        let stages = stages.collect::<candle_core::Result<_>>()?;
        let needs_lookup = self.is_last(rank) && self.tied.is_some();
        Ok(RankLayers { stages, lookup: needs_lookup.then(|| module.build(0, vb)).transpose()? })
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
        "{} along the pipeline (pipeline.stages; auto: all ranks){chunks} {} more stages than the model's {} can fill; \
         use fewer ranks or chunks",
        counted(ranks, "rank"),
        if ranks == 1 { "needs" } else { "need" },
        counted(layers, "layer")
    );
    Err(EngineError::Pipeline { why }.into())
}

/// The parameters and buffers of each layer, found by building all layers without memory for parameters.
struct LayerParameters {
    /// The number of elements of each layer's parameters.
    elements: Vec<usize>,
    numbers: BTreeMap<String, usize>,
    buffers: BTreeSet<String>,
    /// The names and shapes of all parameters and buffers.
    shapes: String,
    /// The parameter that the first layer and the last one share.
    tied: Option<String>,
}

impl LayerParameters {
    fn of<B>(module: &PipelineModule<B>, source: WeightSource, is_buffer: Option<&BufferFilter>) -> Result<Self> {
        const DTYPE: DType = DType::F32;
        let (mut elements, mut numbers, mut shapes) = (Vec::new(), BTreeMap::new(), String::new());
        let mut buffers = BTreeSet::new();
        let mut owners: BTreeMap<String, usize> = BTreeMap::new();
        let mut tied = None;
        let registry = VarBuilderBackend::of_shapes(DTYPE).with_source(source);
        for layer in 0..module.len() {
            let vb = VarBuilder::from_backend(Box::new(registry.clone()), DTYPE, Device::Cpu);
            building(&registry, || module.build(layer, vb)).map_err(|e| registry.explain(e))?;
            let (mut params, layer_buffers) = registry.take();
            let layer_buffers = layer_buffers.into_iter().map(|buffer| (buffer.name, buffer.tensor.shape().clone()));
            let selected =
                params.extract_if(.., |param| is_buffer.is_some_and(|rule| rule(&param.name, param.shape.dims())));
            let layer_buffers: Vec<(String, Shape)> =
                layer_buffers.chain(selected.map(|param| (param.name, param.shape))).collect();
            for (name, shape) in layer_buffers {
                shapes.push_str(&format!("buffer {name} {shape:?};"));
                if let Some(first) = owners.insert(name.clone(), layer) {
                    let why = format!(
                        "layers {first} and {layer} share buffer {name}, but a buffer is kept only by the rank of its \
                         stage; put the shared buffer into one layer, or give each layer a separate buffer"
                    );
                    return Err(EngineError::Pipeline { why }.into());
                }
                buffers.insert(name);
            }
            shapes.extend(params.iter().map(|param| format!("{} {:?};", param.name, param.shape)));
            elements.push(params.iter().map(|param| param.numel).sum());
            for param in params {
                if let Some(first) = owners.insert(param.name.clone(), layer) {
                    let is_only_parameter = owners.values().filter(|owner| **owner == 0).count() == 0;
                    if first == 0 && is_only_parameter && layer + 1 == module.len() {
                        tied = Some(param.name);
                        continue;
                    }
                    let why = format!(
                        "layers {first} and {layer} share parameter {}; only the first layer and the last one may \
                         share one, and it must be the first layer's only parameter; put the shared parameter into \
                         one layer",
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
        Ok(Self { elements, numbers, buffers, shapes, tied })
    }
}
