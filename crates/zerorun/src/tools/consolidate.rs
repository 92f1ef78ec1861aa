//! `zerorun consolidate`: writes a checkpoint's parameters as Hugging Face files.

use super::byte_progress::ByteProgress;
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::checkpoint::{Checkpoint, ConsolidateSettings, Consolidated, ConsolidatedDtype};
use candle_zero::checkpoint::{absent_or_empty, consolidate, list_checkpoints, split_tag};
use candle_zero::files::{InputKind, InputOutputPaths, OutputKind};
use clap::{Parser, ValueEnum};
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write a checkpoint's parameters to a folder, in the layout of Hugging Face models.
///
/// Exit code: 0 if everything is written; 1 if the checkpoint is damaged or contains a value that f16 cannot represent,
/// or a file or standard output cannot be written; 2 if there is no checkpoint, OUT is not empty, or the command line
/// is wrong. OUT stays unchanged unless all of its files are written.
#[derive(Debug, Parser)]
#[command(name = "consolidate", bin_name = "zerorun consolidate")]
struct ConsolidateArguments {
    /// Folder that checkpoints were saved to, or the folder of one tag
    dir: PathBuf,

    /// Output folder; must be absent or empty
    out: PathBuf,

    /// Tag of the checkpoint [default: the tag named in `latest`]
    #[arg(long)]
    tag: Option<String>,

    /// Precision of the files; the checkpoint contains f32
    #[arg(long, value_enum, default_value = "f32")]
    dtype: ConsolidateDtype,

    /// Maximum size of the tensors in a file, such as 5GB, 500MB or 2GiB; a number without a unit is in bytes
    #[arg(long = "max_shard_size", alias = "max-shard-size", value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,

    /// Number of attention heads of a GPT-2, for config.json, if the checkpoint does not contain this number
    #[arg(long = "n_head", alias = "n-head", value_name = "N")]
    n_head: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ConsolidateDtype {
    F32,
    Bf16,
    F16,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <ConsolidateArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(ConsolidateArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl ConsolidateArguments {
    fn run(self) -> ExitCode {
        let outputs = InputOutputPaths::default().reads("DIR", &self.dir, InputKind::Checkpoints);
        let outputs = outputs.writes("OUT", &self.out, OutputKind::Folder);
        let claimed = split_tag(&self.dir, self.tag.as_deref()).and_then(|found| {
            absent_or_empty(&self.out)?;
            Ok((found, outputs.claim()?))
        });
        let ((dir, tag), _claims) = match claimed {
            Ok(found) => found,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        let listing = list_checkpoints(&dir);
        let latest_is_damaged = tag.is_none() && listing.latest.is_err();
        let tag = match listing.choose(tag) {
            Ok(tag) => tag,
            // As in `inspect`, a damaged folder does not count as a wrong command line.
            Err(error) => return refused(&error, if latest_is_damaged { 1 } else { EXIT_SETUP }),
        };
        let checkpoint = match Checkpoint::open(&dir, Some(&tag)) {
            Ok(Some(checkpoint)) => checkpoint,
            Ok(None) => unreachable!("a tag is given"),
            Err(error) => return refused(&error, 1),
        };
        let settings = self.settings();
        if let Err(error) = settings.check(&checkpoint) {
            return refused(&error, EXIT_SETUP);
        }
        let (mut progress, total) = (ByteProgress::default(), settings.bytes(&checkpoint));
        let done = consolidate(&checkpoint, &self.out, &settings, &mut |bytes| progress.report(bytes, total));
        progress.finish();
        match done {
            Ok(done) if print(ConsolidateReport { out: &self.out, done: &done }) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => refused(&error, 1),
        }
    }

    fn settings(&self) -> ConsolidateSettings {
        let dtype = match self.dtype {
            ConsolidateDtype::F32 => ConsolidatedDtype::F32,
            ConsolidateDtype::Bf16 => ConsolidatedDtype::Bf16,
            ConsolidateDtype::F16 => ConsolidatedDtype::F16,
        };
        ConsolidateSettings { dtype, max_shard_size: self.max_shard_size, n_head: self.n_head }
    }
}

/// Parses a size such as `5GB`, `500MB`, `2GiB` or `4096`.
fn size(text: &str) -> Result<u64, String> {
    let wrong =
        || "give bytes, or a whole number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, for example 5GB".to_string();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "" => 1,
        "KB" => 1000,
        "MB" => 1000 * 1000,
        "GB" => 1000 * 1000 * 1000,
        "TB" => 1000 * 1000 * 1000 * 1000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return Err(wrong()),
    };
    let bytes = number.parse::<u64>().map_err(|_| wrong())?.checked_mul(unit);
    match bytes {
        Some(0) => Err("a file of 0 bytes cannot hold a parameter; give 1 or more".to_string()),
        Some(bytes) => Ok(bytes),
        None => Err("no disk is this large".to_string()),
    }
}

/// The report in text form.
struct ConsolidateReport<'a> {
    out: &'a Path,
    done: &'a Consolidated,
}

impl fmt::Display for ConsolidateReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Consolidated { files, bytes, without_config, .. } = self.done;
        let count = files.len();
        write!(f, "{}: {bytes} bytes of parameters in ", self.out.display())?;
        match files.as_slice() {
            [one] => f.write_str(one)?,
            _ => write!(f, "{count} files and model.safetensors.index.json")?,
        }
        match without_config {
            None => f.write_str(", and config.json"),
            Some(why) => {
                f.write_char('\n')?;
                write!(f, "There is no config.json: {why}.")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_a_unit_of_either_kind_or_are_bytes() {
        for (text, bytes) in [("7", 7), ("5GB", 5_000_000_000), ("2KB", 2000), ("2KiB", 2048), ("1TiB", 1 << 40)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "-1", "1.5GB", "0", "0GB", "5 GB", "5gb", "99999999TiB", "99999999999999999999"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
