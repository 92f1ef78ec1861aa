//! Token sources: text as bytes, files of 16-bit tokens, or the embedded corpus.

use super::concatenated_bytes::{ConcatenatedBytes, MIN_MAPPED_BYTES};
use crate::error::{DataError, Error, Result};
use crate::files;
use memmap2::{Advice, Mmap};
use rayon::prelude::*;
use std::fs;
use std::hash::Hasher;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The vocabulary size of byte-level text.
const BYTE_VOCABULARY: usize = 256;

/// Data of up to this many tokens is checked against the vocabulary before the first token is used. Checking this many
/// takes a few hundredths of a second.
const MAX_CHECKED_AT_START: usize = 64 << 20;

/// The number of tokens in each piece that goes into the fingerprint.
const FINGERPRINT_PIECE_TOKENS: usize = 4 << 10;
/// The maximum number of such pieces.
const FINGERPRINT_PIECES: usize = 256;

/// The default data: a snapshot of this project's sources and documents. It is frozen so that the losses of a first
/// training run, and the tables that show them, change only with the training code and not with every edited line.
const CORPUS: &str = include_str!("corpus.txt");

/// A sequence of tokens.
#[derive(Debug)]
pub struct TokenData {
    tokens: TokenStorage,
    /// The name that messages use.
    name: String,
    files: usize,
    skipped_files: usize,
}

#[derive(Debug)]
enum TokenStorage {
    /// Text in which each byte is a token.
    Text(ConcatenatedBytes),
    /// A mapped file of little-endian u16 tokens.
    U16(Mmap),
}

impl TokenData {
    /// Opens `path`:
    ///
    /// - a file ending in `.bin` or `.u16`: little-endian 16-bit tokens, mapped, not read. The file must not be
    ///   shortened while it is in use.
    /// - any other file: UTF-8 text, each byte a token. A file of 1 MiB or more is mapped, so that the ranks of a
    ///   machine share its memory, and must not be shortened while it is in use either.
    /// - a folder: all UTF-8 text files below it, in the order of their paths. A newline is added to each file that
    ///   does not end in one. Hidden entries, folders named `target` and links to folders are left out; other files
    ///   that are not UTF-8 are skipped and counted.
    /// - `None`: the [embedded corpus](Self::embedded).
    ///
    /// # Errors
    /// [`Error::Io`]; [`DataError::NotText`] for a single file that is not UTF-8; [`DataError::NoText`] for a folder
    /// without text; [`DataError::OddTokenFile`] for a file that ends in half a token.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::embedded()) };
        let name = path.display().to_string();
        let kind = fs::metadata(path).map_err(|source| io("read", path, source))?;
        if kind.is_dir() {
            return Self::open_folder(path, name);
        }
        let tokens = match path.extension().and_then(|e| e.to_str()) {
            Some("bin" | "u16") => TokenStorage::U16(map_tokens(path)?),
            _ => {
                let (mut text, bytes) = (ConcatenatedBytes::default(), open(path)?);
                if let Err(error) = std::str::from_utf8(bytes.as_ref()) {
                    return Err(DataError::NotText { path: path.into(), offset: error.valid_up_to() }.into());
                }
                bytes.append_to(&mut text);
                TokenStorage::Text(text)
            }
        };
        Ok(Self { tokens, name, files: 1, skipped_files: 0 })
    }

    /// Returns the corpus embedded in this library: 2 MB of Rust and Markdown, the same in every version.
    pub fn embedded() -> Self {
        let tokens = TokenStorage::Text(ConcatenatedBytes::of_static(CORPUS));
        Self { tokens, name: "the embedded corpus".into(), files: 1, skipped_files: 0 }
    }

    fn open_folder(path: &Path, name: String) -> Result<Self> {
        let mut files = vec![];
        list_files(path, &mut files)?;
        files.sort();
        let (mut text, mut skipped_files) = (ConcatenatedBytes::default(), 0);
        for file in &files {
            let bytes = open(file)?;
            if std::str::from_utf8(bytes.as_ref()).is_err() {
                skipped_files += 1;
                continue;
            }
            let ends_a_line = bytes.as_ref().last().is_none_or(|last| *last == b'\n');
            bytes.append_to(&mut text);
            if !ends_a_line {
                text.append(b"\n");
            }
        }
        if text.len() == 0 {
            return Err(DataError::NoText { path: path.into(), skipped: skipped_files }.into());
        }
        let files = files.len() - skipped_files;
        Ok(Self { tokens: TokenStorage::Text(text), name, files, skipped_files })
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        match &self.tokens {
            TokenStorage::Text(text) => text.len(),
            TokenStorage::U16(map) => map.len() / 2,
        }
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether each token is a byte of text.
    pub fn is_byte_level(&self) -> bool {
        matches!(self.tokens, TokenStorage::Text(_))
    }

    /// Returns the name of this data in messages: its path, or a note that it is embedded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of files that the tokens come from.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Returns the number of files in a folder that were skipped because they are not UTF-8 text.
    pub fn skipped_files(&self) -> usize {
        self.skipped_files
    }

    /// Returns a number that changes with the number of tokens and with their content. It covers all tokens if there
    /// are at most 1 Mi, and otherwise evenly spread samples, so that long files are not read completely.
    pub fn fingerprint(&self) -> u64 {
        let (len, piece) = (self.len(), FINGERPRINT_PIECE_TOKENS.min(self.len()));
        let mut hash = twox_hash::XxHash3_64::with_seed(len as u64);
        let mut tokens = Vec::with_capacity(piece);
        // All tokens, or evenly spaced pieces from the first token to the last.
        let pieces = if len <= FINGERPRINT_PIECES * FINGERPRINT_PIECE_TOKENS {
            len.div_ceil(piece.max(1))
        } else {
            FINGERPRINT_PIECES
        };
        for i in 0..pieces {
            let start =
                if pieces < FINGERPRINT_PIECES { i * piece } else { (len - piece) * i / (FINGERPRINT_PIECES - 1) };
            tokens.clear();
            self.extend(start, piece.min(len - start), &mut tokens);
            tokens.iter().for_each(|token| hash.write(&token.to_le_bytes()));
        }
        hash.finish()
    }

    /// Appends tokens `start .. start + count` to `to`.
    ///
    /// # Panics
    ///
    /// Panics if the range ends after the last token.
    pub fn extend(&self, start: usize, count: usize, to: &mut Vec<u32>) {
        match &self.tokens {
            TokenStorage::Text(text) => {
                text.parts(start, count).for_each(|part| to.extend(part.iter().map(|b| u32::from(*b))));
            }
            TokenStorage::U16(map) => to.extend(map[2 * start..2 * (start + count)].chunks_exact(2).map(token)),
        }
    }

    /// Informs the system that tokens `start .. start + count` will be needed soon, so that the system reads missing
    /// tokens from their file in the background.
    ///
    /// # Panics
    ///
    /// Panics if the range ends after the last token.
    pub(super) fn will_need(&self, start: usize, count: usize) {
        assert!(start + count <= self.len(), "tokens {start} .. {} of {}", start + count, self.len());
        match &self.tokens {
            // This is only a hint: without it, the tokens are read when they are first accessed.
            TokenStorage::U16(map) => _ = map.advise_range(Advice::WillNeed, 2 * start, 2 * count),
            TokenStorage::Text(text) => text.will_need(start, count),
        }
    }

    /// Returns the smallest vocabulary that contains every token: 256 for text, otherwise the largest token + 1. Reads
    /// a complete token file once.
    pub fn vocab_needed(&self) -> usize {
        match &self.tokens {
            TokenStorage::Text(_) => BYTE_VOCABULARY,
            TokenStorage::U16(map) => {
                map.par_chunks_exact(2).map(token).max().map_or(0, |largest| largest as usize + 1)
            }
        }
    }

    /// Checks that all tokens are below `vocab`, if the check takes negligible time.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfVocabulary`] with the first token that is not below `vocab`.
    pub(super) fn check_all(&self, vocab: usize) -> Result<()> {
        const PIECE: usize = 1 << 16;
        if self.is_byte_level() && vocab >= BYTE_VOCABULARY || self.len() > MAX_CHECKED_AT_START {
            return Ok(());
        }
        let pieces = self.len().div_ceil(PIECE);
        let check = |piece: usize| {
            let (start, mut tokens) = (piece * PIECE, Vec::with_capacity(PIECE));
            self.extend(start, PIECE.min(self.len() - start), &mut tokens);
            self.check_vocab(start, &tokens, vocab)
        };
        (0..pieces).into_par_iter().map(check).find_first(Result::is_err).unwrap_or(Ok(()))
    }

    /// Checks that `tokens`, which start at position `start`, are below `vocab`.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfVocabulary`] with the first token that is not below `vocab`.
    pub(super) fn check_vocab(&self, start: usize, tokens: &[u32], vocab: usize) -> Result<()> {
        // Finding the maximum is vectorized; only an error is worth a search for the first bad token.
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

/// The bytes of a text file.
enum FileBytes {
    Read(Vec<u8>),
    Mapped(Mmap),
}

impl FileBytes {
    fn append_to(self, text: &mut ConcatenatedBytes) {
        match self {
            Self::Read(bytes) => text.append(&bytes),
            Self::Mapped(map) => text.append_map(map),
        }
    }
}

impl AsRef<[u8]> for FileBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Read(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

/// Reads a text file, or maps it if it is large.
fn open(path: &Path) -> Result<FileBytes> {
    let read_error = |source| io("read", path, source);
    let mut file = files::open(path).map_err(read_error)?;
    if file.metadata().map_err(read_error)?.len() >= MIN_MAPPED_BYTES {
        // SAFETY: the map is read-only and private to this value. Another process that changes the file changes the
        // bytes that we see, each of which is a token; shortening it while it is mapped is excluded by the contract of
        // `TokenData::open`.
        if let Ok(map) = unsafe { Mmap::map(&file) } {
            return Ok(FileBytes::Mapped(map));
        }
    }
    let mut bytes = vec![];
    file.read_to_end(&mut bytes).map_err(read_error)?;
    Ok(FileBytes::Read(bytes))
}

fn map_tokens(path: &Path) -> Result<Mmap> {
    let file = files::open(path).map_err(|source| io("open", path, source))?;
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
#[allow(clippy::unwrap_used)]
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

    #[test]
    fn a_fingerprint_changes_with_the_content_and_the_length() {
        let fingerprint = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), text).unwrap();
            TokenData::open(Some(file.path())).unwrap().fingerprint()
        };
        let text = "to be, or not to be ".repeat(100_000);
        assert_eq!(fingerprint(&text), fingerprint(&text));
        assert_ne!(fingerprint(&text), fingerprint(&text[1..]));
        let (first, rest) = text.split_at(text.len() - 1);
        assert_ne!(fingerprint(&text), fingerprint(&format!("{first}!")), "the last token counts: {rest}");
        for len in [0, 1, 5_000, 9_000] {
            let changed = text[..len].replacen("to", "ot", 1);
            assert_eq!(fingerprint(&text[..len]) == fingerprint(&changed), len < 2, "{len}");
        }
        assert_ne!(fingerprint(&text[..5_000]), fingerprint(&format!("{}!", &text[..4_999])));
    }
}
