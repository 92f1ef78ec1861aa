//! The dashboard: a page in the browser about recorded runs, served by this program.
//!
//! ```text
//!   browser  GET /, /page.js ...          assets.rs        the page, compiled into the program
//!            GET /api/runs, /api/run ...  api.rs           the records of runs as JSON (metrics_columns.rs: metrics)
//!            GET /api/sweep               api.rs           a sweep and its trials as JSON (sweeps.rs: their reader)
//!            GET /api/live                live.rs          additions to the records, as server-sent events
//!            POST /api/request            api.rs           requests to a running program, only with the token
//! ```
//!
//! `server` accepts connections and answers each on its own thread; `http` reads requests and writes responses;
//! `access` decides which requests are answered. The page displays all text as plain text, and its policy
//! (`http::POLICY`) keeps the browser from loading or running anything but the page's own files.

mod access;
mod api;
mod assets;
pub(crate) mod error;
mod http;
mod live;
mod metrics_columns;
mod server;
mod server_state;
mod sweeps;

pub(crate) use server::Dashboard;
pub(crate) use server_state::ServedFolder;
pub(crate) use sweeps::{SweepLocation, SweepReader};
