//! The time that each layer takes on each rank, and the memory that it needs: `pipeline.partition` `time`.
//!
//! ```text
//!   every rank    builds each layer separately, and takes the shortest of several passes for each kind of layer
//!   all ranks     times of all ranks, and their memory limits ----> the same cuts on all ranks
//! ```
//!
//! The layers are plain Candle models here: they are built outside the engine, one at a time, and dropped after the
//! measurement. Layers of the same kind whose parameters and inputs have the same shapes are measured once. The last
//! layer is always measured, because its time includes the loss.

use crate::comm::Communicator;
use crate::comm::agree::first_to_differ;
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::graph::precomputed_op::seed_backward;
use crate::layout::{MeshAxis, RankMesh};
use crate::monitor::{available_memory, process_limit};
use crate::notice::emit;
use crate::optim::TrainableFilter;
use crate::pipeline::{PartitionMethod, PipelineModule, PipelineSchedule, StageCuts, TooManyStages, timed_cuts};
use crate::util::lock;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The number of runs in which a layer is measured, after a first run that does not count.
const RUNS: usize = 3;

/// The measurements of all ranks of a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LayerTimes {
    /// The seconds of each layer at each position along the pipeline: those of the slowest rank there.
    seconds: Vec<Vec<f64>>,
    /// The bytes of each layer's training state on a rank.
    bytes: Vec<u64>,
    /// The bytes that the ranks at each position may use: the lowest limit among these ranks.
    limits: Vec<u64>,
    /// Whether this rank reports for all ranks.
    reports: bool,
}

/// The measurements of this rank.
struct OwnTimes {
    seconds: Vec<f64>,
    /// The number of elements of each layer's trained parameters, and of its frozen ones.
    elements: Vec<[u64; 2]>,
}

impl LayerTimes {
    /// Collective: measures the layers of `module` on all ranks of a job. `is_trained` selects the parameters that are
    /// trained; without it, all are.
    ///
    /// # Errors
    /// The module has no example of a micro batch; a layer cannot be built or run; a rank has failed.
    pub fn measured<B>(
        module: &PipelineModule<B>,
        config: &Config,
        device: &Device,
        is_trained: Option<&TrainableFilter>,
        (job, mesh): (&Arc<dyn Communicator>, &RankMesh),
    ) -> Result<Self> {
        let samples = config.batch.train_micro_batch_size_per_gpu;
        let Some(batch) = module.example_batch(samples, device) else {
            let why = "pipeline.partition is time, but the layers cannot be measured without a micro batch; set one with \
                       PipelineModule::example, or use another pipeline.partition";
            return Err(EngineError::Pipeline { why: why.into() }.into());
        };
        let times = OwnTimes::measured(module, &batch?, (config.precision.dtype(), device), is_trained)?;
        let bytes = times.elements.iter().map(|elements| training_bytes(*elements, config, mesh.len(MeshAxis::Data)));
        let bytes: Vec<u64> = bytes.collect();
        let rank_values: Vec<f64> = times.seconds.into_iter().chain([memory_limit(device, &**job) as f64]).collect();
        let all = job.gather_f64(rank_values).wait()?;
        Ok(Self { reports: job.rank() == 0, ..Self::of_ranks(&all, bytes, mesh) })
    }

    /// Returns the measurements, given the times of each rank of the job, each list followed by the rank's memory
    /// limit.
    fn of_ranks(all: &[Vec<f64>], bytes: Vec<u64>, mesh: &RankMesh) -> Self {
        let (positions, layers) = (mesh.len(MeshAxis::Pipeline), bytes.len());
        let (mut seconds, mut limits) = (vec![vec![0f64; layers]; positions], vec![u64::MAX; positions]);
        for (rank, numbers) in all.iter().enumerate() {
            let position = mesh.coordinate(rank, MeshAxis::Pipeline);
            seconds[position].iter_mut().zip(numbers).for_each(|(max, seconds)| *max = max.max(*seconds));
            limits[position] = limits[position].min(numbers[layers] as u64);
        }
        Self { seconds, bytes, limits, reports: false }
    }

    /// Divides the layers among the stages of `schedule`. If no division fits the memory, only the times count, and
    /// rank 0 reports this.
    pub fn cuts(&self, schedule: PipelineSchedule) -> std::result::Result<StageCuts, TooManyStages> {
        let rank_of = |stage: usize| schedule.rank_of(stage);
        let seconds: Vec<Vec<f64>> = (0..schedule.stages()).map(|stage| self.seconds[rank_of(stage)].clone()).collect();
        // The stages of a rank share its memory equally.
        let chunks = (schedule.stages() / schedule.ranks()) as u64;
        let limits: Vec<u64> = (0..schedule.stages()).map(|stage| self.limits[rank_of(stage)] / chunks).collect();
        if let Some(cuts) = timed_cuts(&seconds, &self.bytes, &limits)? {
            return Ok(cuts);
        }
        if self.reports {
            emit(
                "no division of the layers among the pipeline's stages fits the memory that the ranks have available; the \
                 layers are divided only by time",
            );
        }
        let unlimited = vec![u64::MAX; limits.len()];
        Ok(timed_cuts(&seconds, &self.bytes, &unlimited)?.expect("every division fits"))
    }
}

impl OwnTimes {
    fn measured<B>(
        module: &PipelineModule<B>,
        batch: &B,
        (dtype, device): (DType, &Device),
        is_trained: Option<&TrainableFilter>,
    ) -> Result<Self> {
        let mut measured_seconds: BTreeMap<String, f64> = BTreeMap::new();
        let mut times = Self { seconds: Vec::new(), elements: Vec::new() };
        let mut x = module.input(batch)?;
        for layer in 0..module.len() {
            let vars = VarMap::new();
            let built_layer = module.build(layer, VarBuilder::from_varmap(&vars, dtype, device))?;
            let shapes = shapes_of(&vars);
            let unnumbered: Vec<(String, &Shape)> =
                shapes.iter().map(|(name, shape)| (without_number(name), shape)).collect();
            let key = format!("{} {unnumbered:?} {:?} {:?}", module.kind(layer), x.dims(), x.dtype());
            let is_last = layer + 1 == module.len();
            let run = |x: &Tensor| {
                let y = built_layer.forward(x, batch)?;
                if is_last { module.loss(&y, batch) } else { Ok(y) }
            };
            let (seconds, y) = match measured_seconds.get(&key).filter(|_| !is_last) {
                Some(seconds) => (*seconds, run(&x)?),
                None => shortest(&x, device, run)?,
            };
            measured_seconds.insert(key, seconds);
            times.seconds.push(seconds);
            let mut elements = [0; 2];
            for (name, shape) in &shapes {
                let is_frozen = is_trained.is_some_and(|rule| !rule(name, shape.dims()));
                elements[usize::from(is_frozen)] += shape.elem_count() as u64;
            }
            times.elements.push(elements);
            x = y.detach();
        }
        Ok(times)
    }
}

/// Returns the shortest time that a forward and backward pass takes, and the output.
fn shortest(
    x: &Tensor,
    device: &Device,
    run: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<(f64, Tensor)> {
    let has_gradient = |tensor: &Tensor| matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16);
    let input = if has_gradient(x) { Var::from_tensor(x)?.into_inner() } else { x.clone() };
    let mut best = f64::INFINITY;
    let mut output = None;
    for index in 0..=RUNS {
        device.synchronize()?;
        let start = Instant::now();
        let y = run(&input)?;
        if has_gradient(&y) {
            seed_backward(&y, y.detach())?.backward()?;
        }
        device.synchronize()?;
        if index > 0 {
            best = best.min(start.elapsed().as_secs_f64());
        }
        output = Some(y);
    }
    Ok((best, output.expect("the layer has run")))
}

/// Returns the names and shapes of the parameters that a layer has, sorted by name.
fn shapes_of(vars: &VarMap) -> Vec<(String, Shape)> {
    let vars = lock(vars.data());
    let mut shapes: Vec<(String, Shape)> = vars.iter().map(|(name, var)| (name.clone(), var.shape().clone())).collect();
    shapes.sort_by(|a, b| a.0.cmp(&b.0));
    shapes
}

/// Returns a name without its numeric parts, in which layers of the same kind differ.
fn without_number(name: &str) -> String {
    name.split('.').filter(|part| part.parse::<usize>().is_err()).collect::<Vec<_>>().join(".")
}

/// Returns the maximum number of bytes of the training state: weights, and for each trained element its gradient, its
/// f32 master weight if the weight has 16 bits, and two optimizer states in f32. At stage 1, the master weights and the
/// states are divided among the pipelines.
fn training_bytes([trained, frozen]: [u64; 2], config: &Config, pipelines: usize) -> u64 {
    const F32: u64 = 4;
    let dtype = config.precision.dtype().size_in_bytes() as u64;
    let optimizer_bytes = 2 * F32 + if dtype < F32 { F32 } else { 0 };
    let shards = if config.zero.stage.placement().optim.is_sharded() { pipelines as u64 } else { 1 };
    (trained + frozen) * dtype + trained * F32 + (trained * optimizer_bytes).div_ceil(shards)
}

/// Returns the bytes that this rank may use: its part of the memory that the host has available, within the limits of
/// the process. The memory of a GPU is not limited here.
fn memory_limit(device: &Device, job: &dyn Communicator) -> u64 {
    if !device.is_cpu() {
        return u64::MAX;
    }
    let host_share = available_memory().map(|bytes| bytes / job.ranks_here().len().max(1) as u64);
    [host_share, process_limit()].into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// Collective: checks that all ranks divide the layers by the same rule, because only some rules require measurements.
///
/// # Errors
/// Two ranks have different rules; a rank has failed.
pub(super) fn check_same_partition(job: &dyn Communicator, partition: &PartitionMethod) -> Result<()> {
    let Some(other) = first_to_differ(job, &format!("{partition:?}"))? else { return Ok(()) };
    let why = format!(
        "ranks 0 and {other} have different values of pipeline.partition; give all ranks the same configuration"
    );
    Err(EngineError::Pipeline { why }.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::comm::SoloCommunicator;
    use crate::config::RunValues;
    use crate::pipeline::PipelineScheduleKind;
    use candle_nn::Module;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn schedule(kind: PipelineScheduleKind, ranks: usize, chunks: usize) -> PipelineSchedule {
        PipelineSchedule::new(kind, ranks, chunks, ranks).unwrap()
    }

    fn lengths(times: &LayerTimes, schedule: PipelineSchedule) -> Vec<usize> {
        let cuts = times.cuts(schedule).unwrap();
        (0..cuts.stages()).map(|stage| cuts.layers_of(stage).len()).collect()
    }

    #[test]
    fn a_slow_rank_and_a_rank_with_little_memory_get_fewer_layers() {
        const LAYERS: usize = 6;
        let mesh = RankMesh::new(4, &[(MeshAxis::Pipeline, 2)]).unwrap();
        let rank = |seconds: f64, limit: u64| [vec![seconds; LAYERS], vec![limit as f64]].concat();
        let times = |slow: f64, limit: u64| {
            // At each position, each of the two pipelines has a rank with its own speed and memory.
            let rank_values =
                |number| match (mesh.coordinate(number, MeshAxis::Pipeline), mesh.coordinate(number, MeshAxis::Data)) {
                    (0, _) => rank(1.0, u64::MAX),
                    (_, 0) => rank(1.0, limit),
                    (_, _) => rank(slow, u64::MAX),
                };
            LayerTimes::of_ranks(&(0..4).map(rank_values).collect::<Vec<_>>(), vec![100; LAYERS], &mesh)
        };
        let plain = schedule(PipelineScheduleKind::OneForwardOneBackward, 2, 1);
        assert_eq!(times(1.0, u64::MAX).limits, [u64::MAX; 2]);
        assert_eq!(lengths(&times(1.0, u64::MAX), plain), [3, 3]);
        assert_eq!(lengths(&times(2.0, u64::MAX), plain), [4, 2]);
        assert_eq!(lengths(&times(1.0, 100), plain), [5, 1]);
        // Nothing fits into 50 bytes, so only the times decide.
        assert_eq!(lengths(&times(2.0, 50), plain), [4, 2]);
        // In a V, the first rank has the outer stages.
        let v = schedule(PipelineScheduleKind::ZeroBubbleV, 2, 2);
        assert_eq!(lengths(&times(4.0, u64::MAX), v), [2, 1, 1, 2]);
        assert_eq!(lengths(&times(1.0, 200), v), [2, 1, 1, 2]);
    }

    /// A layer that doubles its input, adds a bias, and counts its forward passes.
    struct Doubling(Arc<AtomicUsize>, Tensor);

    impl Module for Doubling {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            self.0.fetch_add(1, Ordering::Relaxed);
            (x * 2.0)?.broadcast_add(&self.1)
        }
    }

    #[test]
    fn equal_layers_are_measured_once_and_all_have_a_time_and_their_elements() {
        let counts: Vec<Arc<AtomicUsize>> = (0..4).map(|_| Arc::default()).collect();
        let mut module = PipelineModule::new(|x: &Tensor| Ok(x.clone()), |y, _| y.mean_all());
        for (layer, count) in counts.iter().enumerate() {
            let count = count.clone();
            let build = move |vb: VarBuilder<'_>| {
                vb.get(2, "frozen")?;
                Ok(Doubling(count.clone(), vb.get(3, "bias")?))
            };
            module = module.layer(format!("layer.{layer}"), build);
        }
        let is_trained: TrainableFilter = Arc::new(|name, _| !name.contains("frozen"));
        let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
        let times = OwnTimes::measured(&module, &x, (DType::F32, &Device::Cpu), Some(&is_trained)).unwrap();
        assert_eq!(times.elements, [[3, 2]; 4]);
        assert!(times.seconds.iter().all(|seconds| seconds.is_finite() && *seconds > 0.0));
        assert_eq!(times.seconds[..2].iter().collect::<Vec<_>>(), times.seconds[1..3].iter().collect::<Vec<_>>());
        // The last layer includes the loss.
        let runs: Vec<usize> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        assert_eq!(runs, [RUNS + 1, 1, 1, RUNS + 1]);
    }

    #[test]
    fn the_training_state_is_that_of_the_configuration() {
        let config = |text: &str, ranks| Config::load_for(text, ranks, &RunValues::default()).unwrap();
        let f32 = config(r#"{"train_micro_batch_size_per_gpu": 1}"#, 1);
        assert_eq!(training_bytes([10, 100], &f32, 1), 10 * (4 + 4 + 8) + 100 * 4);
        let bf16 =
            r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}"#;
        assert_eq!(training_bytes([10, 0], &config(bf16, 2), 2), 10 * (2 + 4) + 10 * 12 / 2);
        assert!(memory_limit(&Device::Cpu, &SoloCommunicator::default()) > 0);
    }
}
