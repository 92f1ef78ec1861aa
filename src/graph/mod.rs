//! Parameters and layers in Candle's autograd graph, with gradients that bypass Candle.
//!
//! Candle creates a tensor of zeros for every gradient and adds to it, one element at a time in 16-bit formats.
//! Therefore, the gradients of this library's own operations are passed outside the graph, and the graph only
//! determines when they are computed:
//!
//! ```text
//!   token of a ---+                                   +--> Candle's operations use y; their gradient goes to y's slot
//!   token of b ---+--> operation --> token of y --> y |
//!                      bwd: takes y's slot,           +--> ours look up y's token and use it; they deliver to
//!                           fills a's and b's slots        y's slot themselves
//! ```
//!
//! A token is a tensor of one element. Candle adds up the tokens' gradients, which costs nothing, and runs the
//! operation's backward pass once, when all uses of `y`, of either kind, have been differentiated. A parameter works in
//! the same way, but has no inputs: when the backward pass of its token runs, its slot holds the complete gradient.
//!
//! Values and gradients of an operation are on the device of its inputs. On the host, a gradient is a flat buffer. On a
//! GPU, it is a tensor that is not shared (`gpu_gradients`), and Candle's operations there use tokens and slots as
//! they do on the host.
//!
//! Any other tensor that a layer receives (a `Var`, the result of Candle's operations) gets a separate token for that
//! one use. The backward pass of this token hands the slot's content to Candle.

mod autocast;
mod autograd_meta;
mod backward_flags;
#[cfg(feature = "cuda")]
mod gpu_gradients;
mod grad_slot;
pub(crate) mod precomputed_op;
mod recorded_op;
mod rng_position;

pub(crate) use autocast::{autocast, autocast_format};
pub(crate) use autograd_meta::{
    SavedTensor, exclude_from_gradient_check, node_of, register_recompute, want_grad_while, with_token,
};
pub(crate) use backward_flags::{
    is_single_backward, is_without_gradients, with_deferred_weight_gradients, with_single_backward, without_gradients,
};
pub(crate) use grad_slot::{DeferredGradient, Grad, GradSlot, abandon};
pub(crate) use recorded_op::{
    InputGradSink, OpInputs, ResultStorage, SavedResult, copy_to_result, deliver_gradients, subgraph_input,
};
pub(crate) use rng_position::{RngStreamKey, advance_draws, draw_from, rng_position, stream_of, stream_position};
