//! param.
