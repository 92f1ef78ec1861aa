//! Where tokens come from: text as bytes, files of 16-bit tokens, or the embedded corpus.

use crate::error::{DataError, Error, Result};
use memmap2::{Advice, Mmap};
use rayon::prelude::*;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Vocabulary of byte-level text.
const BYTES: usize = 256;

/// The default data: sources and documents of this project as they were on one day. Frozen, so that the losses of a
/// first training run, and the tables made from them, change with the code that trains and not with every edited line.
const CORPUS: &str = include_str!("corpus.txt");

/// A sequence of tokens.
#[derive(Debug)]
pub struct TokenData {
    tokens: Tokens,
    /// Its name in messages.
    name: String,
    files: usize,
    skipped_files: usize,
}

#[derive(Debug)]
enum Tokens {
    /// Text: each byte is a token.
    Bytes(Vec<u8>),
    /// A mapped file of little-endian u16.
    U16(Mmap),
}

impl TokenData {
    /// Opens `path`:
    ///
    /// - a file ending in `.bin` or `.u16`: little-endian 16-bit tokens, mapped, not read. It must not be shortened
    ///   while it is in use.
    /// - any other file: UTF-8 text, each byte a token.
    /// - a folder: all UTF-8 text files below it in the order of their paths, each ending in a newline. Hidden
    ///   entries, folders named `target` and links to folders are left out; other files that are not UTF-8 are
    ///   skipped and counted.
    /// - `None`: the sources and documents of this library.
    ///
    /// # Errors
    /// [`Error::Io`]; [`DataError::NotText`] for a single file that is not UTF-8; [`DataError::NoText`] for a folder
    /// without text; [`DataError::OddTokenFile`] for half a token.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::embedded()) };
        let name = path.display().to_string();
        let kind = fs::metadata(path).map_err(|source| io("read", path, source))?;
        if kind.is_dir() {
            return Self::open_folder(path, name);
        }
        let tokens = match path.extension().and_then(|e| e.to_str()) {
            Some("bin" | "u16") => Tokens::U16(map_tokens(path)?),
            _ => {
                let bytes = fs::read(path).map_err(|source| io("read", path, source))?;
                if let Err(error) = std::str::from_utf8(&bytes) {
                    return Err(DataError::NotText { path: path.into(), offset: error.valid_up_to() }.into());
                }
                Tokens::Bytes(bytes)
            }
        };
        Ok(Self { tokens, name, files: 1, skipped_files: 0 })
    }

    /// The corpus inside this library: 2 MB of Rust and Markdown, the same in every version.
    pub fn embedded() -> Self {
        let tokens = Tokens::Bytes(CORPUS.as_bytes().to_vec());
        Self { tokens, name: "the embedded corpus".into(), files: 1, skipped_files: 0 }
    }

    fn open_folder(path: &Path, name: String) -> Result<Self> {
        let mut files = vec![];
        list_files(path, &mut files)?;
        files.sort();
        let (mut bytes, mut skipped_files) = (vec![], 0);
        for file in &files {
            let text = fs::read(file).map_err(|source| io("read", file, source))?;
            if std::str::from_utf8(&text).is_err() {
                skipped_files += 1;
                continue;
            }
            bytes.extend_from_slice(&text);
            if text.last().is_some_and(|last| *last != b'\n') {
                bytes.push(b'\n');
            }
        }
        if bytes.is_empty() {
            return Err(DataError::NoText { path: path.into(), skipped: skipped_files }.into());
        }
        let files = files.len() - skipped_files;
        Ok(Self { tokens: Tokens::Bytes(bytes), name, files, skipped_files })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        match &self.tokens {
            Tokens::Bytes(bytes) => bytes.len(),
            Tokens::U16(map) => map.len() / 2,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether each token is a byte of text.
    pub fn is_byte_level(&self) -> bool {
        matches!(self.tokens, Tokens::Bytes(_))
    }

    /// The name of this data in messages: its path, or that it is embedded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Files that the tokens come from.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Files of a folder that were left out because they are not UTF-8 text.
    pub fn skipped_files(&self) -> usize {
        self.skipped_files
    }

    /// Appends tokens `start .. start + count` to `to`.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub fn extend(&self, start: usize, count: usize, to: &mut Vec<u32>) {
        match &self.tokens {
            Tokens::Bytes(bytes) => to.extend(bytes[start..start + count].iter().map(|b| u32::from(*b))),
            Tokens::U16(map) => to.extend(map[2 * start..2 * (start + count)].chunks_exact(2).map(token)),
        }
    }

    /// Tells the system that tokens `start .. start + count` will be wanted, so that those of a file that are not in
    /// memory are read while this goes on.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub(super) fn will_need(&self, start: usize, count: usize) {
        assert!(start + count <= self.len(), "tokens {start} .. {} of {}", start + count, self.len());
        if let Tokens::U16(map) = &self.tokens {
            // A hint: without it the tokens are read when they are touched.
            let _ = map.advise_range(Advice::WillNeed, 2 * start, 2 * count);
        }
    }

    /// The smallest vocabulary that holds every token: 256 for text, else the largest token + 1. Reads a token file
    /// once from end to end.
    pub fn vocab_needed(&self) -> usize {
        match &self.tokens {
            Tokens::Bytes(_) => BYTES,
            Tokens::U16(map) => map.par_chunks_exact(2).map(token).max().map_or(0, |largest| largest as usize + 1),
        }
    }

    /// Checks that tokens `tokens`, which start at position `start`, are below `vocab`.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfVocabulary`] with the first that is not.
    pub(super) fn check_vocab(&self, start: usize, tokens: &[u32], vocab: usize) -> Result<()> {
        // The largest is found in vectors; only an error is worth a search for the first.
        let largest = tokens.iter().fold(0, |largest, t| largest.max(*t));
        if (largest as usize) < vocab {
            return Ok(());
        }
        match tokens.iter().position(|t| *t as usize >= vocab) {
            None => Ok(()),
            Some(at) => Err(DataError::TokenOutOfVocabulary {
                token: tokens[at],
                position: start + at,
                vocab,
                data: self.name.clone(),
            }
            .into()),
        }
    }
}

fn token(bytes: &[u8]) -> u32 {
    u32::from(u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn map_tokens(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|source| io("open", path, source))?;
    // SAFETY: the map is read-only and private to this value. Another process that changes the file changes the
    // tokens that we see, which are checked against the vocabulary each time they are read; shortening the file
    // while it is mapped is excluded by the contract of `TokenData::open`.
    let map = unsafe { Mmap::map(&file) }.map_err(|source| io("map", path, source))?;
    if map.len() % 2 == 1 {
        return Err(DataError::OddTokenFile { path: path.into(), bytes: map.len() }.into());
    }
    Ok(map)
}

fn list_files(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|source| io("read", dir, source))? {
        let entry = entry.map_err(|source| io("read", dir, source))?;
        let (name, path) = (entry.file_name(), entry.path());
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let kind = entry.file_type().map_err(|source| io("read", &path, source))?;
        if kind.is_dir() {
            if name != "target" {
                list_files(&path, files)?;
            }
        } else if kind.is_file() || path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { action, path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_corpus_is_frozen() {
        assert_eq!(
            twox_hash::XxHash3_64::oneshot(CORPUS.as_bytes()),
            0x0428_36fe_27ef_71f0,
            "first losses and tables depend on each of its bytes"
        );
    }
}
