//! `zerorun inspect`: lists the checkpoints in a folder, and checks whether the selected one is complete.

use super::byte_progress::ByteProgress;
use crate::error::ToolError;
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::checkpoint::{
    CheckpointExamination, CheckpointListing, Manifest, Parameter, SavedBuffer, examine, list_checkpoints, split_tag,
};
use candle_zero::util::counted;
use clap::Parser;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show the checkpoints in a folder, and whether the selected one is complete.
///
/// Exit code: 0 if the checkpoint is complete, 1 if it is damaged or standard output could not be written, 2 if there
/// is no checkpoint or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "inspect", bin_name = "zerorun inspect")]
struct InspectArguments {
    /// Folder that checkpoints were saved to, or the folder of one tag
    dir: PathBuf,

    /// Tag of the checkpoint to inspect [default: the tag named in `latest`]
    #[arg(long)]
    tag: Option<String>,

    /// Read every byte and compare it with its checksum
    #[arg(long)]
    verify: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <InspectArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(InspectArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl InspectArguments {
    fn run(self) -> ExitCode {
        let (dir, tag) = match split_tag(&self.dir, self.tag.as_deref()) {
            Ok(location) => location,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        let listing = list_checkpoints(&dir);
        if listing.tags.is_empty()
            && listing.unfinished.is_empty()
            && let Some(what) = other_content(&dir)
        {
            return refused(&ToolError::NoCheckpoints { dir, what }.into(), EXIT_SETUP);
        }
        let lists = if self.json { list_json(&listing) } else { Value::String(list(&listing)) };
        let latest_is_damaged = tag.is_none() && listing.latest.is_err();
        let tag = match listing.choose(tag) {
            Ok(tag) => tag,
            Err(error) => {
                if self.json {
                    print(json!({"folder": dir, "problem": error.to_string(), "found": lists}));
                } else if let Value::String(text) = &lists {
                    print(text.trim_end());
                }
                let code = refused(&error, EXIT_SETUP);
                return if latest_is_damaged { ExitCode::FAILURE } else { code };
            }
        };
        let mut progress = ByteProgress::default();
        let mut report_progress = |done: u64, total: u64| progress.report(done, total);
        let examined = examine(&dir, &tag, if self.verify { Some(&mut report_progress) } else { None });
        progress.finish();
        let report = CheckpointReport { tag: &tag, examined: &examined, verified: self.verify };
        let printed = match lists {
            Value::String(text) => print(format!("{text}\n{report}").trim_end()),
            found => print(json!({"folder": dir, "found": found, "checkpoint": report.json()})),
        };
        if printed && examined.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Describes a folder without checkpoints, if fine-tuning or Hugging Face's libraries wrote it.
fn other_content(dir: &Path) -> Option<&'static str> {
    const KNOWN_FILES: [(&str, &str); 2] = [
        ("adapter_config.json", "the folder of an adapter, which zerorun merge and zerorun generate accept"),
        ("config.json", "the folder of a model, which zerorun finetune, generate and merge accept"),
    ];
    KNOWN_FILES.iter().find(|(name, _)| dir.join(name).is_file()).map(|(_, what)| *what)
}

/// Formats one line per tag.
fn list(listing: &CheckpointListing) -> String {
    let count = listing.tags.len();
    let mut text = format!("{}: {}\n", listing.dir.display(), counted(count, "checkpoint"));
    let latest = listing.latest.as_ref().ok().and_then(Option::as_deref);
    for (tag, manifest) in &listing.tags {
        let what = manifest.as_ref().map_or_else(|e| e.to_string(), |m| format!("step {}", m.global_steps));
        let mark = if latest == Some(tag) { "  (latest)" } else { "" };
        let _ = writeln!(text, "  {tag:24}{what}{mark}");
    }
    for tag in &listing.unfinished {
        let _ = writeln!(
            text,
            "  {tag:24}being saved, or left by an interrupted save; in the latter case, the next save removes it"
        );
    }
    if let Err(error) = &listing.latest {
        let _ = writeln!(text, "  {error}");
    }
    text
}

fn list_json(listing: &CheckpointListing) -> Value {
    let latest = listing.latest.as_ref().ok().and_then(Option::as_deref);
    let tags = listing.tags.iter().map(|(tag, manifest)| match manifest {
        Ok(manifest) => json!({"tag": tag, "global_steps": manifest.global_steps, "problem": null}),
        Err(error) => json!({"tag": tag, "global_steps": null, "problem": error.to_string()}),
    });
    json!({"latest": latest, "tags": tags.collect::<Vec<_>>(), "unfinished": listing.unfinished})
}

/// The known facts about a checkpoint.
struct CheckpointReport<'a> {
    tag: &'a str,
    examined: &'a CheckpointExamination,
    verified: bool,
}

impl CheckpointReport<'_> {
    fn json(&self) -> Value {
        let CheckpointExamination { path, manifest, buffers, problems } = self.examined;
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let mut all = json!({
            "tag": self.tag, "path": path, "whole": problems.is_empty(), "verified": self.verified,
            "problems": problems,
        });
        if let (Some(m), Value::Object(all)) = (manifest, &mut all) {
            let details = json!({
                "world_size": m.world_size, "stage": m.stage, "dtype": m.dtype, "optimizer": m.optimizer,
                "global_steps": m.global_steps, "skipped_steps": m.skipped_steps,
                "global_samples": m.global_samples, "states": m.states, "parameters": m.parameters.len(),
                "elements": elements(m), "buffers": buffers.iter().map(buffer_json).collect::<Vec<_>>(),
                "bytes": bytes(m), "client_state_keys": client_state_keys(m),
            });
            all.extend(details.as_object().cloned().unwrap_or_default());
        }
        all
    }
}

fn elements(manifest: &Manifest) -> usize {
    manifest.parameters.iter().map(Parameter::numel).sum()
}

fn bytes(manifest: &Manifest) -> u64 {
    let buffers = manifest.buffers.as_ref().map_or(0, |file| file.bytes);
    buffers + manifest.files.iter().map(|file| file.bytes).sum::<u64>()
}

fn buffer_json(buffer: &SavedBuffer) -> Value {
    json!({"name": buffer.name, "dtype": buffer.dtype.as_str(), "shape": buffer.shape})
}

/// Formats a buffer's name, type and shape as a line.
fn buffer_line(buffer: &SavedBuffer) -> String {
    format!("    {:40}{:6}{:?}", buffer.name, buffer.dtype.as_str(), buffer.shape)
}

fn client_state_keys(manifest: &Manifest) -> Vec<&str> {
    manifest.client_state.as_object().into_iter().flat_map(|map| map.keys().map(String::as_str)).collect()
}

impl fmt::Display for CheckpointReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckpointExamination { path, manifest, buffers, problems } = self.examined;
        writeln!(f, "{}", path.display())?;
        if let Some(m) = manifest {
            let mut row = |name: &str, value: String| writeln!(f, "  {name:14}{value}");
            row("saved by", format!("{} at stage {}, {}", counted(m.world_size, "rank"), m.stage, m.dtype))?;
            row("optimizer", m.optimizer.clone().unwrap_or_else(|| "none".into()))?;
            row("steps", format!("{}, {} of them skipped", m.global_steps, m.skipped_steps))?;
            row("samples", m.global_samples.to_string())?;
            row("states", m.states.join(", "))?;
            row("parameters", format!("{} with {}", m.parameters.len(), counted(elements(m), "element")))?;
            if let Some(file) = &m.buffers {
                row("buffers", format!("{} in {}", buffers.len(), file.name))?;
            }
            let files = m.files.len() + usize::from(m.buffers.is_some());
            row("bytes", format!("{} in {}", bytes(m), counted(files, "file")))?;
            let keys = client_state_keys(m);
            row("client state", if keys.is_empty() { "no keys".into() } else { keys.join(", ") })?;
            buffers.iter().try_for_each(|buffer| writeln!(f, "{}", buffer_line(buffer)))?;
        }
        for problem in problems {
            writeln!(f, "  damaged: {problem}")?;
        }
        match (problems.is_empty(), self.verified) {
            (true, true) => writeln!(f, "  complete: every byte is as it was written"),
            (true, false) => writeln!(f, "  complete: manifest, lengths and headers (--verify also reads all data)"),
            (false, true) => writeln!(f, "  {} damaged", files(problems.len())),
            (false, false) => writeln!(f, "  {} damaged (--verify also reads all data)", files(problems.len())),
        }
    }
}

fn files(count: usize) -> String {
    format!("{count} {}", if count == 1 { "file is" } else { "files are" })
}
