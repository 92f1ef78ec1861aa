//! The figures of DeepSpeed's estimators for a model: `estimate_zero2_model_states_mem_needs` and
//! `estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19.8, to compare with.
//!
//! They are rules of thumb. No activations, buckets and prefetched parameters are counted, and 18 bytes per parameter
//! (16-bit gradients beside f32 ones) are DeepSpeed's need; [`Estimate`](super::Estimate) has this engine's.

use serde::Serialize;

/// The machines of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machines {
    /// GPUs of each.
    pub gpus_per_node: u64,
    /// How many.
    pub nodes: u64,
    /// By what memory of the host is multiplied, for what is not counted (`additional_buffer_factor`). DeepSpeed's
    /// default is 1.5.
    pub buffer_factor: f64,
}

impl Machines {
    /// An estimator with DeepSpeed's own factor.
    pub fn new(gpus_per_node: u64, nodes: u64) -> Self {
        Self { gpus_per_node, nodes, buffer_factor: 1.5 }
    }

    fn gpus(&self) -> f64 {
        self.gpus_per_node as f64 * self.nodes as f64
    }
}

/// The parts that go to the host's memory at stage 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offloaded {
    /// Nothing.
    Nothing,
    /// Optimizer states and gradients.
    Optimizer,
    /// Parameters as well.
    OptimizerAndParameters,
}

/// The figures of an estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryNeeds {
    /// Bytes of the host's memory, for each machine.
    pub cpu_bytes: u64,
    /// Bytes of each GPU's memory.
    pub gpu_bytes: u64,
}

/// `estimate_zero2_model_states_mem_needs` of a model with `parameters` parameters.
pub fn zero2(parameters: u64, machines: Machines, cpu_offload: bool) -> MemoryNeeds {
    let (p, all) = (parameters as f64, machines.gpus());
    let (cpu, gpu) = if cpu_offload {
        (p * f64::max(4.0 * all, 16.0), 2.0 * p)
    } else {
        (p * 4.0 * machines.gpus_per_node as f64, 2.0 * p + (18.0 * p / all).floor())
    };
    MemoryNeeds { cpu_bytes: (cpu * machines.buffer_factor) as u64, gpu_bytes: gpu as u64 }
}

/// `estimate_zero3_model_states_mem_needs` of a model with `parameters` parameters, `largest_layer` of them in its
/// largest layer. `zero_init`: parameters are partitioned as they are made, and no machine ever holds all of them.
pub fn zero3(
    parameters: u64,
    largest_layer: u64,
    machines: Machines,
    offloaded: Offloaded,
    zero_init: bool,
) -> MemoryNeeds {
    let (p, layer, all) = (parameters as f64, largest_layer as f64, machines.gpus());
    let here = 1.0 / machines.nodes as f64;
    // Every process of a machine makes a whole model first.
    let copies = 4.0 * machines.gpus_per_node as f64;
    let held = |bytes: f64| if zero_init { bytes * here } else { f64::max(copies, bytes * here) };
    let (cpu, gpu) = match offloaded {
        Offloaded::OptimizerAndParameters => (p * held(18.0), 0.0),
        Offloaded::Optimizer => (p * held(16.0), (2.0 * p / all).floor()),
        Offloaded::Nothing => (if zero_init { layer } else { p } * copies, (18.0 * p / all).floor()),
    };
    MemoryNeeds { cpu_bytes: (cpu * machines.buffer_factor) as u64, gpu_bytes: (4.0 * layer + gpu) as u64 }
}
