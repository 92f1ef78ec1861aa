//! `zerorun check`: reads, checks and resolves a configuration without starting a job.

use super::config_diagnostic::{self, ConfigDiagnostic};
use crate::error::{ConfigError, Error, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP};
use candle_zero::config::{CheckOutcome, Config, ConfigNote, RunValues, check, read_file};
use candle_zero::util::counted;
use clap::Parser;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Check and resolve a configuration. Lists every problem with its position, then the notes that a job would print:
/// keys without effect, translated settings, and the value of each `"auto"`.
///
/// Exit code: 0 if a job would accept the configuration, 2 if a job would refuse it, standard output could not be
/// written, or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "check", bin_name = "zerorun check")]
struct CheckArguments {
    /// DeepSpeed JSON file
    file: PathBuf,

    /// Number of ranks of the job
    #[arg(long = "world_size", alias = "world-size", value_name = "N", default_value = "1")]
    world_size: NonZeroUsize,

    /// Value of "auto" for the schedule's total_num_steps
    #[arg(long = "total_num_steps", alias = "total-num-steps", value_name = "N")]
    total_num_steps: Option<u64>,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <CheckArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(CheckArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl CheckArguments {
    fn run(&self) -> ExitCode {
        let world_size = self.world_size.get();
        let run = RunValues { total_num_steps: self.total_num_steps, ..RunValues::default() };
        let (bytes, checked) = match read_file(&self.file) {
            Ok(bytes) => {
                let checked = check(&self.file, &bytes, world_size, &run);
                (bytes, checked)
            }
            Err(error) => (Vec::new(), CheckOutcome { notes: Vec::new(), outcome: Err(error) }),
        };
        let ok = checked.outcome.is_ok();
        let text = if self.json {
            format!("{}\n", json(checked))
        } else {
            report(&self.file, &String::from_utf8_lossy(&bytes), checked, world_size)
        };
        let printed = std::io::stdout().write_all(text.as_bytes()).is_ok();
        if ok && printed { ExitCode::SUCCESS } else { ExitCode::from(EXIT_SETUP) }
    }
}

/// Returns all problems, in file order.
fn diagnostics(error: Error) -> Vec<ConfigDiagnostic> {
    let file_problem = |rule, position, message| vec![ConfigDiagnostic::new("$".into(), rule, position, message)];
    match error {
        Error::Config(ConfigError::Problems { problems, .. }) => {
            problems.into_iter().map(|p| ConfigDiagnostic::new(p.path, p.rule.name(), p.position, p.message)).collect()
        }
        Error::Config(ConfigError::Syntax { position, expected, found, .. }) => {
            file_problem("syntax", Some(position), format!("expected {expected}, found {found}"))
        }
        Error::Config(ConfigError::DuplicateKey { path, first, second, .. }) => {
            let message = format!("given twice, at {first} and at {second}; remove one of them");
            vec![ConfigDiagnostic {
                first: Some(first),
                ..ConfigDiagnostic::new(path, "duplicate key", Some(second), message)
            }]
        }
        other => file_problem("file", None, other.to_string()),
    }
}

fn json(checked: CheckOutcome) -> Value {
    let notes: Vec<Value> = checked.notes.iter().map(|n| json!({"path": n.path, "message": n.message})).collect();
    let (errors, resolved) = match checked.outcome {
        Ok(config) => (Vec::new(), config.to_deepspeed_json()),
        Err(error) => (diagnostics(error), Value::Null),
    };
    let errors = errors.iter().map(|diagnostic| {
        let (line, column) = (diagnostic.position.map(|p| p.line), diagnostic.position.map(|p| p.column));
        let ConfigDiagnostic { path, rule, message, .. } = diagnostic;
        json!({"path": path, "line": line, "column": column, "rule": rule, "message": message})
    });
    let errors: Vec<Value> = errors.collect();
    json!({"ok": errors.is_empty(), "errors": errors, "said": notes, "resolved": resolved})
}

/// Renders the problems, or the configuration in one line, followed by the notes.
fn report(file: &Path, text: &str, checked: CheckOutcome, world_size: usize) -> String {
    let name = file.display();
    let mut all = String::new();
    // Writing to a String cannot fail.
    let _ = match checked.outcome {
        Ok(config) => writeln!(all, "{name}: ok for {}: {}", counted(world_size, "rank"), summary(&config)),
        Err(error) => {
            let diagnostics = diagnostics(error);
            all = config_diagnostic::render_all(&name.to_string(), text, &diagnostics);
            writeln!(all, "{name}: {}", counted(diagnostics.len(), "problem"))
        }
    };
    for ConfigNote { path, message, .. } in &checked.notes {
        let _ = writeln!(all, "  {path}: {message}");
    }
    all
}

/// Summarizes the configuration in one line.
fn summary(config: &Config) -> String {
    let all = config.to_deepspeed_json();
    let is_enabled = |section: &str| all[section]["enabled"] == true;
    let format = if is_enabled("bf16") {
        "bf16"
    } else if is_enabled("fp16") {
        "fp16"
    } else {
        "f32"
    };
    let type_of = |section: &str| all[section]["type"].as_str().unwrap_or("none").to_string();
    let batch = config.batch;
    format!(
        "batch {} = {} x {} x {}, stage {}, {format}, optimizer {}, scheduler {}",
        batch.train_batch_size,
        batch.train_micro_batch_size_per_gpu,
        batch.gradient_accumulation_steps,
        config.world_size,
        config.zero.stage,
        type_of("optimizer"),
        type_of("scheduler"),
    )
}
