//! The files of zerorun that read hostfiles and the messages between launchers. zerorun is a program, so its files are
//! included here.

#[path = "../../../crates/zerorun/src/launch/error.rs"]
pub(crate) mod error;
#[path = "../../../crates/zerorun/src/launch/hosts/mod.rs"]
pub(crate) mod hosts;
pub(crate) mod nodes;
#[path = "../../../crates/zerorun/src/launch/pmi.rs"]
pub(crate) mod pmi;
