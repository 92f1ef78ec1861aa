//! Access to some elements of a tensor on the host.

#[cfg(feature = "cuda")]
use super::device_elements::{gpu_of, with_each};
use super::residency::with_view;
use crate::precision::FlatRef;
use candle_core::{Result, Tensor};
use std::ops::Range;

/// Passes elements `range` of a contiguous tensor to `read`, on the host; if the tensor is on another device, only
/// these elements are copied.
pub(crate) fn with_host_slice<T>(
    tensor: &Tensor,
    range: Range<usize>,
    read: impl FnOnce(FlatRef<'_>) -> T,
) -> Result<T> {
    #[cfg(feature = "cuda")]
    if let Some(device) = gpu_of(tensor) {
        let mut values = crate::precision::Flat::zeros(tensor.dtype(), range.len());
        with_each([tensor], "read", |[all]| all.slice(range)?.read(device, values.as_mut()))?;
        return Ok(read(values.as_ref()));
    }
    with_view(tensor, |values| read(values.slice(range)))
}
