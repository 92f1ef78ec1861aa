//! DeepSpeed's JSON configuration, read, checked and resolved.
//!
//! The way of a file: text -> raw values with their places -> [`Config`], in which every default is filled in.

mod resolved;

pub use resolved::*;
