//! Parameters at stage 3: gathered when a unit needs them, prefetched, released.
//!
//! | file | contents |
//! | --- | --- |
//! | `unit.rs` | the unit of gathering and releasing; recomputation |
//! | `leaf_units.rs` | units that are gathered together with all units inside them |
//! | `param_gatherer.rs` | decides when each unit is gathered and released |
//! | `routed_units.rs`, `param_gatherer/routed.rs` | the units of a layer that runs only those chosen by its input |
//! | `expert_all_to_all.rs` | the exchange of rows between ranks among which experts are divided |
//! | `unit_trace.rs` | the order in which units are needed |
//! | `gather_group.rs` | parameters that are gathered together |
//! | `coalesced_layout.rs` | the layout of such parameters in a collective's buffer |
//! | `recompute_input.rs` | the input that recomputation keeps, and its storage |
//! | `recompute_check.rs` | checks that recomputation reproduces the output |
//! | `eval_var_builder_backend.rs` | the `VarBuilder` backend of a second instance of the model, for evaluation |

pub(crate) mod coalesced_layout;
pub(crate) mod eval_var_builder_backend;
pub(crate) mod expert_all_to_all;
mod gather_group;
pub(crate) mod leaf_units;
pub(crate) mod param_gatherer;
mod recompute_check;
mod recompute_input;
pub(crate) mod routed_units;
pub(crate) mod unit;
pub(crate) mod unit_trace;
