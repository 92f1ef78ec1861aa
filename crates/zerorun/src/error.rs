//! The errors of the launcher and the tools, in addition to those of the packages that `zerorun` uses.
//! Each becomes a [`candle_zero::Error`].

pub(crate) use crate::dashboard::error::DashboardError;
pub(crate) use crate::launch::error::LaunchError;
pub(crate) use crate::launch::hosts::error::HostsError;
pub(crate) use crate::tools::error::ToolError;
pub(crate) use candle_zero::error::*;
pub(crate) use candle_zero_finetune::error::FinetuneError;

impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        Self::other(error)
    }
}

impl From<DashboardError> for Error {
    fn from(error: DashboardError) -> Self {
        Self::other(error)
    }
}

impl From<HostsError> for Error {
    fn from(error: HostsError) -> Self {
        LaunchError::Hosts(error).into()
    }
}

impl From<ToolError> for Error {
    fn from(error: ToolError) -> Self {
        Self::other(error)
    }
}
