//! The figures of DeepSpeed's own estimators for a model, for comparison: `estimate_zero2_model_states_mem_needs` and
//! `estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19.8.
//!
//! They are rules of thumb. They do not count activations, buckets or prefetched parameters, and their 18 bytes per
//! parameter (16-bit gradients in addition to f32 ones) are what DeepSpeed needs; [`Estimate`](super::Estimate) counts
//! what this engine needs.

use serde::Serialize;

/// The machines of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machines {
    /// The number of GPUs per machine.
    pub gpus_per_node: u64,
    /// The number of machines.
    pub nodes: u64,
    /// The factor applied to host memory to allow for what is not counted (`additional_buffer_factor`). DeepSpeed's
    /// default is 1.5.
    pub buffer_factor: f64,
}

impl Machines {
    /// Describes the machines, with DeepSpeed's default factor.
    pub fn new(gpus_per_node: u64, nodes: u64) -> Self {
        Self { gpus_per_node, nodes, buffer_factor: 1.5 }
    }

    fn gpus(&self) -> f64 {
        self.gpus_per_node as f64 * self.nodes as f64
    }
}

/// The parts that are offloaded to host memory at stage 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zero3Offload {
    /// Nothing.
    Nothing,
    /// Optimizer states and gradients.
    Optimizer,
    /// Optimizer states, gradients and parameters.
    OptimizerAndParameters,
}

/// The figures of an estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryNeeds {
    /// The bytes of host memory on each machine.
    pub cpu_bytes: u64,
    /// The bytes of memory on each GPU.
    pub gpu_bytes: u64,
}

/// Returns the result of `estimate_zero2_model_states_mem_needs` for a model with `parameters` parameters.
pub fn zero2(parameters: u64, machines: Machines, cpu_offload: bool) -> MemoryNeeds {
    let (p, gpus) = (parameters as f64, machines.gpus());
    let (cpu, gpu) = if cpu_offload {
        (p * f64::max(4.0 * gpus, 16.0), 2.0 * p)
    } else {
        (p * 4.0 * machines.gpus_per_node as f64, 2.0 * p + (18.0 * p / gpus).floor())
    };
    MemoryNeeds { cpu_bytes: (cpu * machines.buffer_factor) as u64, gpu_bytes: gpu as u64 }
}

/// Returns the result of `estimate_zero3_model_states_mem_needs` for a model with `parameters` parameters,
/// `largest_layer` of them in its largest layer. With `zero_init`, parameters are partitioned as they are created, and
/// no process ever has all of them.
pub fn zero3(
    parameters: u64,
    largest_layer: u64,
    machines: Machines,
    offloaded: Zero3Offload,
    zero_init: bool,
) -> MemoryNeeds {
    let (p, layer, gpus) = (parameters as f64, largest_layer as f64, machines.gpus());
    let machine_share = 1.0 / machines.nodes as f64;
    // Every process of a machine first creates the full model or, with `zero_init`, its largest layer.
    let copies = 4.0 * machines.gpus_per_node as f64;
    let per_parameter =
        |bytes: f64| if zero_init { bytes * machine_share } else { f64::max(copies, bytes * machine_share) };
    let (cpu, gpu) = match offloaded {
        Zero3Offload::OptimizerAndParameters => (p * per_parameter(18.0), 0.0),
        Zero3Offload::Optimizer => (p * per_parameter(16.0), (2.0 * p / gpus).floor()),
        Zero3Offload::Nothing => (if zero_init { layer } else { p } * copies, (18.0 * p / gpus).floor()),
    };
    MemoryNeeds { cpu_bytes: (cpu * machines.buffer_factor) as u64, gpu_bytes: (4.0 * layer + gpu) as u64 }
}
