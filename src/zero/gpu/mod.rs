//! Work that runs on the GPU, or waits for it.
//!
//! | file | contents |
//! | --- | --- |
//! | `gradient_pack.rs` | packs gradients into a bucket |
//! | `device_step.rs` | the optimizer step of a share that is on the GPU |
//! | `host_step_weights.rs` | weights on the GPU that a step on the host changes |
//! | `gpu_timeline.rs` | records when the model's work ran |

pub(in crate::zero) mod device_step;
pub(in crate::zero) mod gpu_timeline;
pub(in crate::zero) mod gradient_pack;
pub(in crate::zero) mod host_step_weights;
