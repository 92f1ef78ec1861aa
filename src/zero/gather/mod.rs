//! Parameters at stage 3: gathered when a unit needs them, prefetched, released.
//!
//! | file | what |
//! | --- | --- |
//! | `unit.rs` | what is gathered and released together; recomputation |
//! | `leaf_units.rs` | units that are gathered as one with all units inside |
//! | `param_gatherer.rs` | which units are gathered when, and released |
//! | `unit_trace.rs` | the order in which units are needed |
//! | `gather_group.rs`, `coalesced_layout.rs` | parameters that are gathered together, and how they lie in a collective's buffer |
//! | `recompute_input.rs`, `recompute_check.rs` | what recomputation keeps, and where; whether it gives the same again |
//! | `eval_backend.rs` | the `VarBuilder` backend of a second instance of the model, for evaluation |

pub(crate) mod coalesced_layout;
pub(crate) mod eval_backend;
mod gather_group;
pub(crate) mod leaf_units;
pub(crate) mod param_gatherer;
mod recompute_check;
mod recompute_input;
pub(crate) mod unit;
pub(crate) mod unit_trace;
