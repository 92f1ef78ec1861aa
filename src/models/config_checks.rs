//! Helpers shared by the models' configurations: presets by name, limits, checks and errors.

use crate::error::{Error, ModelError, Result};
use std::fmt::Display;

/// Returns the preset called `name`.
///
/// # Errors
/// Returns an error that lists the known names if `name` is not one of them.
pub(super) fn find_preset<'a, P>(presets: &'a [P], name_of: impl Fn(&P) -> &'static str, name: &str) -> Result<&'a P> {
    if let Some(preset) = presets.iter().find(|preset| name_of(preset) == name) {
        return Ok(preset);
    }
    let names: Vec<&str> = presets.iter().map(name_of).collect();
    let nearest = names
        .iter()
        .map(|known| (strsim::damerau_levenshtein(known, name), known))
        .filter(|(distance, _)| *distance <= 3)
        .min_by_key(|(distance, _)| *distance);
    Err(ModelError::UnknownPreset {
        found: name.to_string(),
        suggestion: nearest.map(|(_, known)| known.to_string()),
        known: names.join(", "),
    }
    .into())
}

/// Returns the error for a field with an invalid value.
pub(super) fn invalid_field(key: &'static str, found: impl Display, allowed: &str) -> Error {
    ModelError::Config { key, found: found.to_string(), allowed: allowed.into() }.into()
}

/// The maximum number of parameters of a model. Their bytes, in any precision and with everything that training adds,
/// can be counted in 64 bits.
const MAX_PARAMETERS: u128 = 1 << 50;

/// The largest number of positions; above it, f32 cannot represent every position exactly.
pub(super) const MAX_POSITIONS: usize = 1 << 24;

/// The maximum number of elements of a head. The table for rotary positions grows with the size of a head, and is
/// computed before the weights show whether that size is right.
pub(super) const MAX_HEAD_DIM: usize = 1 << 14;

/// The maximum number of blocks of a model.
pub(super) const MAX_BLOCKS: usize = 1 << 14;

/// Checks that a model has a sensible number of blocks: each of them takes memory even without its parameters.
pub(super) fn require_blocks(key: &'static str, blocks: usize) -> Result<()> {
    if blocks > MAX_BLOCKS {
        return Err(invalid_field(key, blocks, &format!("at most {MAX_BLOCKS}")));
    }
    Ok(())
}

/// Checks that no size is 0 or exceeds the range of a token id or a dimension.
pub(super) fn require_sizes(sizes: &[(&'static str, usize)]) -> Result<()> {
    let max_size = u32::MAX as usize;
    match sizes.iter().find(|(_, size)| !(1..=max_size).contains(size)) {
        Some((key, 0)) => Err(invalid_field(key, 0, "at least 1")),
        Some((key, size)) => Err(invalid_field(key, size, &format!("at most {max_size}"))),
        None => Ok(()),
    }
}

/// Checks that the number of parameters is at most [`MAX_PARAMETERS`].
pub(super) fn require_parameters(parameters: u128) -> Result<()> {
    if parameters > MAX_PARAMETERS {
        let allowed = format!("at most {MAX_PARAMETERS} elements; use smaller sizes");
        return Err(invalid_field("the number of parameters", parameters, &allowed));
    }
    Ok(())
}
