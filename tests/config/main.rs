//! Configurations: accepted ones, notes about them, and the messages about refused ones.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod configs_in_the_wild;
mod files;
mod messages;
mod wrong_configs;
