//! Creates inputs by changing seeds at random.

use crate::random::Random;
use crate::targets::Target;

/// The maximum size of an input in bytes.
const MAX_INPUT_LENGTH: usize = 1 << 20;

/// Numbers at which arithmetic often goes wrong.
const INTEGERS: [u64; 20] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x0100_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    1 << 40,
    (1 << 53) + 1,
    1 << 62,
    u64::MAX >> 1,
    1 << 63,
    u64::MAX,
];

/// Numbers as text formats write them.
const NUMBERS: [&str; 22] = [
    "0",
    "-1",
    "1",
    "-0",
    "0.5",
    "1e-400",
    "1e999",
    "-1e308",
    "255",
    "65536",
    "2147483647",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "100000000000000000000000000000",
    "null",
    "NaN",
];

/// Returns the input of a case: a seed of the target with some changes. The inputs of the first cases are the unchanged
/// seeds.
pub fn input(target: &Target, seeds: &[Vec<u8>], seed: u64, case: u64) -> Vec<u8> {
    let mut random = Random::of_case(seed, target.name, case);
    if let Some(unchanged) = usize::try_from(case).ok().and_then(|case| seeds.get(case)) {
        return unchanged.clone();
    }
    let mut data = seeds[random.below(seeds.len())].clone();
    // Half of all cases get one change, a quarter get two, and so on.
    let changes = 1 + (random.next() | 1 << 6).trailing_zeros();
    for _ in 0..changes {
        change(&mut data, &mut random, seeds, target.words);
    }
    data.truncate(MAX_INPUT_LENGTH);
    data
}

/// Returns a random position from 0 to `length`. Headers are at the beginning or the end of a file, so half of the
/// positions are near the beginning or the end.
fn position(random: &mut Random, length: usize) -> usize {
    match random.below(4) {
        0 => random.below((length + 1).min(256)),
        1 => length - random.below((length + 1).min(1024)),
        _ => random.below(length + 1),
    }
}

/// Returns a random range of at most `longest` bytes in data of `length` bytes.
fn piece(random: &mut Random, length: usize, longest: usize) -> std::ops::Range<usize> {
    let start = position(random, length);
    start..start + random.below((length - start + 1).min(longest + 1))
}

/// Returns a random word from one of the groups.
fn word<'a>(random: &mut Random, words: &[&[&'a str]]) -> &'a str {
    let number = random.below(words.iter().map(|group| group.len()).sum());
    words.iter().copied().flatten().nth(number).copied().unwrap_or_default()
}

fn change(data: &mut Vec<u8>, random: &mut Random, seeds: &[Vec<u8>], words: &[&[&str]]) {
    let at = position(random, data.len());
    match random.below(if words.is_empty() { 11 } else { 15 }) {
        0 | 1 => {
            if let Some(byte) = data.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        2 => {
            if let Some(byte) = data.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        3 => drop(data.splice(at..at, (0..=random.below(4)).map(|_| random.next() as u8).collect::<Vec<_>>())),
        4 => drop(data.drain(piece(random, data.len(), 64))),
        5 => {
            let copy = data[piece(random, data.len(), 256)].to_vec();
            drop(data.splice(at..at, copy));
        }
        6 => {
            let other = random.below(seeds.len());
            splice(data, random, &seeds[other]);
        }
        7 | 8 => integer(data, random, at),
        9 => data.truncate(at),
        10 if random.below(8) == 0 => {
            // Repeating a piece creates nested structures and long texts.
            let copy = data[piece(random, data.len(), 8)].to_vec();
            let times = [16, 256, 4096, 20_000][random.below(4)];
            drop(data.splice(at..at, copy.repeat(times)));
        }
        10 => {
            let moved: Vec<u8> = data.drain(piece(random, data.len(), 256)).collect();
            let at = position(random, data.len());
            drop(data.splice(at..at, moved));
        }
        11 | 12 => number(data, random, at),
        13 => drop(data.splice(at..at, word(random, words).bytes())),
        _ => {
            // A random word replaces the word at this position.
            let start = data[..at].iter().rposition(|byte| !byte.is_ascii_alphanumeric()).map_or(0, |at| at + 1);
            let rest = data[start..].iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
            let end = rest.map_or(data.len(), |length| start + length);
            drop(data.splice(start..end, word(random, words).bytes()));
        }
    }
}

/// Replaces the data from some position on with the rest of a seed, or a piece of the data with a piece of the seed.
fn splice(data: &mut Vec<u8>, random: &mut Random, other: &[u8]) {
    if random.below(2) == 0 {
        data.truncate(position(random, data.len()));
        data.extend_from_slice(&other[position(random, other.len())..]);
    } else {
        let (replaced, source) = (piece(random, data.len(), 512), piece(random, other.len(), 512));
        drop(data.splice(replaced, other[source].iter().copied()));
    }
}

/// Overwrites bytes with a little-endian number, or slightly changes the number there.
fn integer(data: &mut [u8], random: &mut Random, at: usize) {
    let width = [1, 2, 4, 8][random.below(4)];
    let length = data.len() as u64;
    let Some(bytes) = data.get_mut(at..at + width) else { return };
    let old = bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let new = match random.below(4) {
        0 => old.wrapping_add(1 + random.below(16) as u64),
        1 => old.wrapping_sub(1 + random.below(16) as u64),
        2 => length.wrapping_add(random.below(17) as u64).wrapping_sub(8),
        _ => INTEGERS[random.below(INTEGERS.len())],
    };
    bytes.copy_from_slice(&new.to_le_bytes()[..width]);
}

/// Replaces the next decimal number with a different one.
fn number(data: &mut Vec<u8>, random: &mut Random, at: usize) {
    let Some(start) = data[at..].iter().position(u8::is_ascii_digit).map(|offset| at + offset) else { return };
    let end = data[start..].iter().position(|byte| !byte.is_ascii_digit()).map_or(data.len(), |length| start + length);
    drop(data.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes()));
}
