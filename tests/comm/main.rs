//! Collectives: their results, their errors, and the bytes that are sent.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod collectives;
mod compression;
mod messages;
mod own_communicator;
mod wire_bytes;
