//! Configurations: which are accepted, with which notes, and which are refused, with which message.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod configs_in_the_wild;
mod files;
mod messages;
mod wrong_configs;
