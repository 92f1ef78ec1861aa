//! The best configuration of a sweep, as files that can be run without the sweep.
//!
//! `run.sh` trains with this configuration from the first step. If population-based training has created the best trial
//! as a branch, the first steps were trained with other parameters, so the script has one command for each set of
//! parameters.

use super::report::object;
use super::trial_command::TrialPaths;
use super::trial_launch::THREADS;
use super::trial_starter::TrialStarter;
use crate::error::{Error, Result};
use crate::launch::hosts::export_rules::literal_word;
use crate::tools::trial_subprocess::write_atomically;
use candle_zero::stop_signal::STOP_AT;
use candle_zero::sweep::{Sweep, SweepTrial};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A part of the training of the best trial.
struct TrainingPart<'a> {
    trial: &'a SweepTrial,
    /// The step after which this part ends.
    end_step: u64,
}

/// Writes the best configuration into the folder of the sweep, and returns the path of its script. If no trial has a
/// result, nothing is written.
pub(super) fn write(starter: &TrialStarter, sweep: &Sweep) -> Result<Option<PathBuf>> {
    let Some(best) = sweep.best() else { return Ok(None) };
    let folder = starter.results.folder.best();
    std::fs::create_dir_all(&folder).map_err(|source| Error::Io { action: "create", path: folder.clone(), source })?;
    let parts = training_parts(sweep, best, starter.results.steps);
    let mut commands = String::new();
    for (at, part) in parts.iter().enumerate() {
        let name =
            if at + 1 == parts.len() { "ds_config.json".to_owned() } else { format!("ds_config-{}.json", at + 1) };
        if let Some(config) = starter.template.configuration_of(&part.trial.parameters) {
            write_atomically(&folder.join(&name), &format!("{config:#}\n"))?;
        }
        let paths =
            TrialPaths { folder: OUT.into(), ds_config: Path::new(HERE).join(&name), record: None, is_branch: at > 0 };
        if part.end_step < starter.results.steps {
            commands += &format!("{STOP_AT}={} ", part.end_step);
        }
        let words = starter.template.words_of(&part.trial.parameters, &paths);
        commands += &format!("\"${{ZERORUN:-zerorun}}\" {}\n", words.iter().map(quoted).collect::<Vec<_>>().join(" "));
    }
    let script = folder.join("run.sh");
    write_atomically(&script, &script_of(starter, best, &commands))?;
    let part =
        |part: &TrainingPart<'_>| json!({"parameters": object(&part.trial.parameters), "until_step": part.end_step});
    let summary = json!({
        "trial": best.number,
        "metric": starter.results.metric,
        "value": best.value(),
        "step": best.reached(),
        "parameters": object(&best.parameters),
        "configuration": starter.template.configuration_of(&best.parameters).unwrap_or(Value::Null),
        "training": parts.iter().map(part).collect::<Vec<_>>(),
    });
    write_atomically(&folder.join("best.json"), &format!("{summary:#}\n"))?;
    Ok(Some(script))
}

/// The placeholders for the folder of the result and the folder of the script, which are replaced when words are
/// quoted.
const OUT: &str = "@OUT@";
const HERE: &str = "@HERE@";

/// Returns the parts of the training of a trial, in order.
fn training_parts<'a>(sweep: &'a Sweep, trial: &'a SweepTrial, steps: u64) -> Vec<TrainingPart<'a>> {
    let mut parts = vec![TrainingPart { trial, end_step: steps }];
    while let Some(branch) = parts.last().and_then(|part| part.trial.branch) {
        let Some(donor) = sweep.trial(branch.trial) else { break };
        parts.push(TrainingPart { trial: donor, end_step: branch.step });
    }
    parts.reverse();
    parts
}

fn script_of(starter: &TrialStarter, best: &SweepTrial, commands: &str) -> String {
    let threads = starter
        .threads
        .map(|threads| THREADS.map(|name| format!("export {name}=\"${{{name}:-{threads}}}\"\n")).concat());
    format!(
        "#!/bin/sh\n\
         # Trains the best configuration of a sweep, that of trial {}, from its first step.\n\
         #\n\
         #   sh run.sh OUT    OUT is a new folder for checkpoints and the result\n\
         set -eu\n\
         out=${{1:?give a new folder for checkpoints and the result}}\n\
         here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
         mkdir -p \"$out\"\n\
         out=$(cd \"$out\" && pwd)\n\
         cd {}\n\
         {}{commands}",
        best.number,
        quoted(&starter.directory.clone().into()),
        threads.unwrap_or_default(),
    )
}

/// Quotes a word for the script, and replaces [`OUT`] and [`HERE`] with the script's variables for these folders.
fn quoted(word: &OsString) -> String {
    let safe = literal_word(&word.to_string_lossy());
    match safe.starts_with('\'') {
        true => safe.replace(OUT, "'\"$out\"'").replace(HERE, "'\"$here\"'"),
        false => safe.replace(OUT, "\"$out\"").replace(HERE, "\"$here\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, expected) in [
            ("--lr", "--lr"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's $HOME", "'it'\\''s $HOME'"),
            ("@OUT@/result", "\"$out\"/result"),
            ("@OUT@/a b", "''\"$out\"'/a b'"),
        ] {
            assert_eq!(quoted(&word.into()), expected, "{word}");
        }
    }
}
