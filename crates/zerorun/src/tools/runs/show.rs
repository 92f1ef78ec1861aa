//! `zerorun runs show`: describes a run.

use super::folder_flag::{FolderFlag, RunsOutput};
use super::listing::{partly_damaged, steps};
use super::table::{duration, loss, number, plain, setting};
use crate::error::Result;
use candle_zero::runs::{RecordedRun, RunMetrics, ValueAtStep, utc};
use candle_zero::util::{counted, format_bytes};
use clap::Args;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// The number of newest samples that are shown.
const SHOWN_SAMPLES: usize = 3;
/// The number of newest events that are shown.
const SHOWN_EVENTS: usize = 20;

#[derive(Debug, Args)]
pub(super) struct ShowFlags {
    #[command(flatten)]
    folder: FolderFlag,

    /// The run: its name, or a prefix of its name
    #[arg(value_name = "RUN")]
    run: String,

    /// Print one JSON object with everything except the metrics by step
    #[arg(long)]
    json: bool,
}

impl ShowFlags {
    pub(super) fn output(&self) -> Result<RunsOutput> {
        let run = self.folder.find().open(&self.run)?;
        let (metrics, events, samples) = (run.metrics()?, run.events()?, run.samples()?);
        let mut problems: Vec<String> = partly_damaged(&run).map(|error| error.to_string()).into_iter().collect();
        if let (Some(problem), true) = (&metrics.problem, problems.is_empty()) {
            problems.push(format!("the record {} is damaged: {problem}; the rest is shown", run.folder().display()));
        }
        let text = match self.json {
            true => {
                let mut all = run.to_json();
                all["info"] = json!(run.info());
                all["last"] = json!(metrics.rows.last());
                all["events"] = json!(events);
                all["samples"] = json!(samples);
                serde_json::to_string_pretty(&all)
                    .unwrap_or_else(|error| unreachable!("text and numbers are JSON: {error}"))
            }
            false => describe(&run, &metrics, &events, &samples),
        };
        Ok(RunsOutput { text, problems })
    }
}

/// Returns the description of a run.
fn describe(
    run: &RecordedRun,
    metrics: &RunMetrics,
    events: &[Map<String, Value>],
    samples: &[Map<String, Value>],
) -> String {
    let (info, summary) = (run.info(), run.summary());
    let mut text = format!("{}\n", plain(&run.id()));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            _ = writeln!(text, "  {name:14}{}", plain(&value).replace('\n', "\n                "));
        }
    };
    let state = match (&summary.error, summary.outcome) {
        (Some(error), _) => format!("{}: {error}", run.state().name()),
        (None, _) => run.state().name().to_owned(),
    };
    line("state", state);
    line("start", format!("{} UTC", utc(info.created)));
    let restarts = summary.sessions.saturating_sub(1);
    let continued = if restarts > 0 { format!(", continued {}", counted(restarts, "time")) } else { String::new() };
    line("duration", format!("{}{continued}", duration(run.seconds())));
    line("steps", steps(run));
    line("loss", values(summary.loss, summary.best_loss));
    line("validation", values(summary.validation, summary.best_validation));
    let checkpoint = summary.checkpoint_step.map(|step| format!("after step {step}"));
    line(
        "checkpoint",
        checkpoint.map_or(String::new(), |at| format!("{at}, in {}", summary.checkpoints.clone().unwrap_or_default())),
    );
    line("command", info.command.join(" "));
    line("directory", info.directory.clone());
    let machine = &info.machine;
    line(
        "machine",
        format!(
            "{}: {}, {} ({}), {}, {}",
            machine.host,
            machine.processor,
            counted(machine.cores, "core"),
            machine.simd,
            format_bytes(machine.memory_bytes),
            machine.system
        ),
    );
    line("ranks", info.world_size.to_string());
    let build = if info.versions.debug { " (built with debug assertions)" } else { "" };
    line("candle-zero", format!("{}{build}", info.versions.candle_zero));
    let git = info.git.as_ref();
    let branch = git.and_then(|git| git.branch.as_ref()).map_or(String::new(), |branch| format!(" ({branch})"));
    line("git", git.map_or(String::new(), |git| format!("{}{branch}", git.commit)));
    if let Some(last) = metrics.rows.last() {
        _ = writeln!(text, "last values (step {})", last.step);
        for (name, value) in &last.values {
            _ = writeln!(text, "  {:30}{}", plain(name), number(*value));
        }
    }
    section(&mut text, "events", SHOWN_EVENTS, events, event);
    section(&mut text, "samples", SHOWN_SAMPLES, samples, |sample| {
        let text_of = |name: &str| sample.get(name).and_then(Value::as_str).unwrap_or_default();
        format!("step {}  {:?}: {:?}", sample.get("step").unwrap_or(&Value::Null), text_of("prompt"), text_of("text"))
    });
    if !run.settings().is_empty() {
        text.push_str("settings\n");
        for (name, value) in run.settings() {
            let name = name.strip_prefix("configuration.").or(name.strip_prefix("settings.")).unwrap_or(&name);
            _ = writeln!(text, "  {} = {}", plain(name), plain(&setting(&value)).replace('\n', " "));
        }
    }
    text
}

/// Writes a heading and the newest `max_lines` lines, unless there are no lines.
fn section(
    text: &mut String,
    name: &str,
    max_lines: usize,
    lines: &[Map<String, Value>],
    to_line: impl Fn(&Map<String, Value>) -> String,
) {
    if lines.is_empty() {
        return;
    }
    let omitted = lines.len().saturating_sub(max_lines);
    let note = if omitted > 0 { format!(" (and {omitted} earlier)") } else { String::new() };
    _ = writeln!(text, "{name}{note}");
    for line in &lines[omitted..] {
        _ = writeln!(text, "  {}", plain(&to_line(line)).replace('\n', "\n    "));
    }
}

/// Returns the last value and the best one.
fn values(last: Option<ValueAtStep>, best: Option<ValueAtStep>) -> String {
    match (last, best) {
        (Some(last), Some(best)) => {
            format!("{} (step {}), best {} (step {})", loss(last.value), last.step, loss(best.value), best.step)
        }
        (Some(last), None) => format!("{} (step {})", loss(last.value), last.step),
        (None, _) => String::new(),
    }
}

/// Returns an event as a line.
fn event(event: &Map<String, Value>) -> String {
    let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or_default();
    let number = |key: &str| event.get(key).and_then(Value::as_u64);
    let time = event.get("time").and_then(Value::as_f64).map_or(String::new(), utc);
    let step = number("step").unwrap_or_default();
    let description = match text("event") {
        "start" => {
            let source = match text("loaded") {
                "" => String::new(),
                path => format!(" after step {step}, from {path}"),
            };
            let restart = number("restart").filter(|restart| *restart > 0);
            let restart = restart.map_or(String::new(), |restart| format!(" (restart {restart})"));
            let ranks = counted(number("world_size").unwrap_or(1), "rank");
            let pid = number("pid").unwrap_or_default();
            format!("start{restart}{source}, {ranks}, process {pid} on {}", text("host"))
        }
        "checkpoint" => format!("checkpoint after step {step}: {}", text("path")),
        "request" => format!("asked to {} after step {step}", text("request")),
        "load" => format!("continues after step {step}, from {}", text("path")),
        "end" => match text("message") {
            "" => format!("{} after step {step}", text("outcome")),
            message => format!("{} after step {step}: {message}", text("outcome")),
        },
        "" => Value::from(event.clone()).to_string(),
        other => match text("message") {
            "" => format!("{other} after step {step}"),
            message => format!("{other} after step {step}: {message}"),
        },
    };
    format!("{time}  {description}")
}
