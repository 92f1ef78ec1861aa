//! The errors of the launcher, for the files of zerorun that `launch` includes.

pub(crate) use crate::launch::error::LaunchError;
pub(crate) use crate::launch::hosts::error::HostsError;
pub(crate) use candle_zero::error::{Error, Result};

impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        Self::other(error)
    }
}

impl From<HostsError> for Error {
    fn from(error: HostsError) -> Self {
        LaunchError::Hosts(error).into()
    }
}
