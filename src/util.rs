//! Small helpers for every module: locks, ranges split into pieces, stable hashes and permutations, facts about the
//! host, names and bytes formatted for messages, and name patterns.

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks the mutex, ignoring poison: a panic in another holder has already been reported and leaves no relevant state
/// half-updated.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Returns the value of a lock or a condition variable, even after a panic in another holder (see [`lock`]).
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Splits `0..len` into consecutive ranges of at most `max_len` numbers; none if `len` is 0.
pub(crate) fn pieces(len: usize, max_len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(max_len).map(move |start| start..len.min(start + max_len))
}

/// Returns the bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a stable 64-bit hash (FNV-1a); the hasher of std may change between Rust releases.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Applies SplitMix64's output function (Steele, Lea, Flood 2014): an invertible scrambling of 64 bits.
#[inline]
pub fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the image of `position` in a permutation of `0..len` determined by `key`. This needs no memory: a Feistel
/// network permutes the numbers below the next power of four, and a result outside the range is permuted again until it
/// is inside (on average at most four times, since the range contains at least a quarter of these numbers).
pub fn permute(position: u64, len: u64, key: u64) -> u64 {
    /// The number of rounds: enough for every bit of the input to reach every bit of the output several times over.
    const ROUNDS: u64 = 6;
    let half_bits = (64 - (len - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half_bits) - 1;
    let mut x = position;
    loop {
        let (mut left, mut right) = (x >> half_bits, x & mask);
        for round in 0..ROUNDS {
            let f = mix(key ^ mix(right ^ (round << 56)));
            (left, right) = (right, left ^ (f & mask));
        }
        x = left << half_bits | right;
        if x < len {
            return x;
        }
    }
}

/// Returns the folder of a user's caches: `$XDG_CACHE_HOME` (`xdg`) if it is an absolute path, as the XDG base
/// directory specification requires, otherwise `.cache` in the user's `home`.
pub fn cache_home(xdg: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| home.map(|home| home.join(".cache")))
}

/// Returns a message with the names most similar to `name`; `None` if there are none.
pub fn suggest_names<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<String> {
    /// The minimum similarity, from 0 to 1, of a name that is suggested.
    const MIN_SIMILARITY: f64 = 0.5;
    const MAX_SUGGESTIONS: usize = 3;
    let rated = |other: &'a str| (strsim::normalized_damerau_levenshtein(name, other), other);
    let mut similar: Vec<_> = all.map(rated).filter(|(similarity, _)| *similarity >= MIN_SIMILARITY).collect();
    similar.sort_by(|a, b| b.0.total_cmp(&a.0));
    let similar: Vec<&str> = similar.into_iter().map(|(_, name)| name).take(MAX_SUGGESTIONS).collect();
    match similar[..] {
        [] => None,
        [one] => Some(format!("the nearest is {one}")),
        _ => Some(format!("the nearest are {}", similar.join(", "))),
    }
}

/// Returns the name of this host; empty if the system does not provide it.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// Returns the value of the field `name` in the text of a file of /proc.
pub fn proc_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// Formats names for a message: the first few, and how many more there are.
pub fn list<S: AsRef<str>>(names: &[S]) -> String {
    const MAX_LISTED_NAMES: usize = 8;
    let mut text = names.iter().take(MAX_LISTED_NAMES).map(|n| n.as_ref()).collect::<Vec<_>>().join(", ");
    if names.len() > MAX_LISTED_NAMES {
        text += &format!(" and {} more", names.len() - MAX_LISTED_NAMES);
    }
    text
}

/// Formats a count with its noun: "1 step", "2 steps".
pub fn counted(count: impl Display + PartialEq + From<u8>, noun: &str) -> String {
    let plural = if count == 1.into() { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Returns the verb that follows a count with its noun: "1 step is", "2 steps are".
pub fn is_or_are(count: impl PartialEq + From<u8>) -> &'static str {
    if count == 1.into() { "is" } else { "are" }
}

/// Formats a number of bytes, with one decimal and a binary unit from 1 KiB on.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1 << 10 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // A value that would be shown as 1024 becomes 1 of the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Returns whether `name` matches `pattern`, in which `*` matches any characters, including none.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(head) else { return false };
    // The rest of the pattern must match a suffix of the name that begins at a character boundary.
    (0..=name.len()).filter(|at| name.is_char_boundary(*at)).any(|at| matches(rest, &name[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_keep_leading_zeros() {
        assert_eq!(hex(&[0, 0xab]), "00ab");
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "a.b", true),
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("h.*.ln_*", "h.12.ln_1.weight", true),
            ("h.*.ln_*", "h.12.attn.weight", false),
            ("*.bias", "h.0.c_attn.bias", true),
            ("*.bias", "h.0.c_attn.bias2", false),
            ("*é*", "wé", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn one_is_singular_and_all_others_are_not() {
        let texts = [0usize, 1, 2, 1000].map(|count| counted(count, "micro step"));
        assert_eq!(texts, ["0 micro steps", "1 micro step", "2 micro steps", "1000 micro steps"]);
    }

    #[test]
    fn bytes_have_the_largest_unit_that_leaves_a_whole() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_048_575, "1.0 MiB"), (5 << 29, "2.5 GiB")];
        for (bytes, text) in cases {
            assert_eq!(format_bytes(bytes), text);
        }
        assert_eq!(format_bytes(u64::MAX), "16384.0 PiB");
    }
}
