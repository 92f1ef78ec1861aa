//! optim.
