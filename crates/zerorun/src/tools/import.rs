//! `zerorun import`: converts a DeepSpeed checkpoint into a candle-zero checkpoint.

use super::byte_progress::ByteProgress;
use crate::error::{CheckpointError, Error};
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::checkpoint::deepspeed::DeepSpeedCheckpoint;
use candle_zero::checkpoint::{import, new_checkpoint_path};
use candle_zero::files::{InputKind, InputOutputPaths, OutputKind};
use clap::Parser;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Convert a DeepSpeed checkpoint (ZeRO stages 1 to 3: weights, Adam's moments, counters) into a candle-zero
/// checkpoint. No pickle is executed.
///
/// Exit code: 0 if everything is written, 1 if the checkpoint is damaged or a file or standard output cannot be
/// written, 2 if there is no checkpoint, OUT cannot be used, or the command line is wrong. OUT gets no new checkpoint
/// unless all of its files are written.
#[derive(Debug, Parser)]
#[command(name = "import", bin_name = "zerorun import")]
struct ImportArguments {
    /// Folder passed to DeepSpeed's save_checkpoint, or the folder of one tag
    dir: PathBuf,

    /// Checkpoint folder to write to
    out: PathBuf,

    /// DeepSpeed's tag [default: the tag named in `latest`]
    #[arg(long)]
    tag: Option<String>,

    /// Name of the new checkpoint [default: global_stepN, where N is the number of steps]
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <ImportArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(ImportArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl ImportArguments {
    fn run(self) -> ExitCode {
        let checkpoint = match DeepSpeedCheckpoint::open(&self.dir, self.tag.as_deref()) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                // If the file in the error exists, it is damaged; otherwise there is no checkpoint.
                let file_exists =
                    matches!(&error, Error::Checkpoint(CheckpointError::DeepSpeed { path, .. }) if path.is_file());
                return refused(&error, if file_exists { 1 } else { EXIT_SETUP });
            }
        };
        let name = self.name.unwrap_or_else(|| format!("global_step{}", checkpoint.global_steps()));
        let outputs = InputOutputPaths::default().reads("DIR", &self.dir, InputKind::Checkpoints);
        let outputs = outputs.writes("OUT", &self.out, OutputKind::Checkpoints);
        let _claims =
            match outputs.check().and_then(|()| new_checkpoint_path(&self.out, &name)).and_then(|_| outputs.claim()) {
                Ok(claims) => claims,
                Err(error) => return refused(&error, EXIT_SETUP),
            };
        let mut progress = ByteProgress::default();
        let done = checkpoint
            .verify()
            .and_then(|()| import(&checkpoint, &self.out, &name, |done, total| progress.report(done, total)));
        progress.finish();
        match done {
            Ok(path) if print(path.display()) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => refused(&error, 1),
        }
    }
}
