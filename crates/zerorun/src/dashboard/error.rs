//! The errors of the dashboard.

use std::net::IpAddr;

/// An error of the dashboard.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DashboardError {
    /// The server cannot listen.
    #[error("cannot serve the dashboard on {address}, port {port}: {source}; give another port, or 0 for a free one")]
    Port {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// The reason.
        source: std::io::Error,
    },
    /// The system has provided no random numbers for the token.
    #[error("cannot create the token of the dashboard: {reason}")]
    Token {
        /// The reason.
        reason: String,
    },
}
