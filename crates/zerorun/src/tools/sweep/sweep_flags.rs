//! The flags of `zerorun sweep`. All except `--out` set keys of the sweep file, or of a section in it.

use super::error::SweepToolError;
use super::parameter_syntax::parameter_of_flag;
use crate::error::{Error, Result};
use candle_zero::files;
use clap::Args;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The maximum number of bytes of a sweep file.
const MAX_FILE_BYTES: u64 = 1 << 20;

#[derive(Debug, Args)]
pub(super) struct SweepFlags {
    /// Sweep file
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Folder of the sweep; must be absent, empty or that of the same sweep [default: sweeps/NAME, where NAME is the
    /// name of the sweep file without its extension; sweeps/sweep without a file]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Parameter: a flag of the command or a path in the configuration, and its values, given as choice, uniform,
    /// log_uniform, integer or log_integer; repeatable
    #[arg(long = "param", value_name = "NAME=KIND:VALUES", allow_hyphen_values = true)]
    parameters: Vec<String>,

    /// Number of steps of a complete trial
    #[arg(long, value_name = "N")]
    steps: Option<u64>,

    /// Recorded value by which trials are compared: val_loss, loss, val_accuracy or another
    #[arg(long, value_name = "NAME")]
    metric: Option<String>,

    /// Whether small or large values are better: min or max [default: min]
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,

    /// Number of trials [default: 20, or all combinations of a grid]
    #[arg(long, value_name = "N")]
    trials: Option<u64>,

    /// How parameters are chosen: grid, random or tpe [default: random]
    #[arg(long, value_name = "NAME")]
    searcher: Option<String>,

    /// Scheduler, which decides which trials are trained to the end: none (every trial is), median, asha or pbt
    /// [default: none]
    #[arg(long, value_name = "NAME")]
    scheduler: Option<String>,

    /// With asha: the first step at which trials are compared
    #[arg(long = "min_steps", alias = "min-steps", value_name = "N")]
    min_steps: Option<u64>,

    /// With asha: one in this many trials continues [default: 4]
    #[arg(long, value_name = "N")]
    eta: Option<u64>,

    /// With median or pbt: the number of steps between comparisons
    #[arg(long, value_name = "N")]
    every: Option<u64>,

    /// Seed of all random choices [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Maximum number of failed trials; the sweep ends if more fail [default: 10]
    #[arg(long = "max_failures", alias = "max-failures", value_name = "N")]
    max_failures: Option<u64>,

    /// Number of times that a trial is restarted if it was killed without having saved a new checkpoint [default: 3]
    #[arg(long, value_name = "N")]
    retries: Option<u64>,

    /// Number of ranks of a trial [default: 1]
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N")]
    ranks: Option<u64>,

    /// Number of threads of a rank [default: the cores, divided among the ranks of all trials]
    #[arg(long, value_name = "N")]
    threads: Option<u64>,

    /// Number of trials at a time [default: as many as cores and memory allow]
    #[arg(long, value_name = "N")]
    parallel: Option<u64>,

    /// Memory that a trial needs, such as 512MiB or 4GiB [default: an estimate, if one is possible for the model]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,

    /// Run the trials on the hosts listed in this file, one per line as `NAME slots=N`, over ssh; a trial uses as many
    /// slots as it has ranks [default: only on this host]
    #[arg(short = 'H', long, value_name = "FILE")]
    hostfile: Option<String>,

    /// With --hostfile: use only these hosts and slots, such as HOST@HOST:0,2
    #[arg(long, value_name = "FILTER")]
    include: Option<String>,

    /// With --hostfile: use all hosts and slots except these
    #[arg(long, value_name = "FILTER")]
    exclude: Option<String>,

    /// With --hostfile: port for ssh
    #[arg(long = "ssh_port", alias = "ssh-port", value_name = "PORT")]
    ssh_port: Option<u64>,

    /// Order in which results count: steps, so that the same sweep always makes the same decisions, or finish, so that
    /// no trial waits for another [default: steps]
    #[arg(long, value_name = "ORDER")]
    order: Option<String>,

    /// Cargo features for the build of a script, as for `cargo build --features`
    #[arg(long, value_name = "FEATURES")]
    features: Option<String>,

    /// finetune or a script, followed by its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl SweepFlags {
    /// Returns the folder of the sweep.
    pub(super) fn folder(&self) -> PathBuf {
        match (&self.out, &self.file) {
            (Some(out), _) => out.clone(),
            (None, file) => {
                let stem = file.as_deref().and_then(Path::file_stem).unwrap_or("sweep".as_ref());
                Path::new("sweeps").join(stem)
            }
        }
    }

    /// Reads the sweep file, if there is one, and adds the flags. Returns the origin of the definition, for messages,
    /// and its keys.
    pub(super) fn definition(&self) -> Result<(String, Map<String, Value>)> {
        let origin = self.file.as_ref().map_or("the command line".to_owned(), |file| file.display().to_string());
        let mut table = self.file.as_deref().map_or_else(|| Ok(Map::new()), read)?;
        let wrong =
            |problem: String| -> Error { SweepToolError::Definition { origin: origin.clone(), problem }.into() };
        let text = |value: &Option<String>| value.clone().map(Value::from);
        let number = |value: Option<u64>| value.map(Value::from);
        let flag_values = [
            ("steps", number(self.steps)),
            ("metric", text(&self.metric)),
            ("mode", text(&self.mode)),
            ("trials", number(self.trials)),
            ("searcher", text(&self.searcher)),
            ("scheduler", text(&self.scheduler)),
            ("seed", number(self.seed)),
            ("max_failures", number(self.max_failures)),
            ("retries", number(self.retries)),
            ("ranks", number(self.ranks)),
            ("threads", number(self.threads)),
            ("parallel", number(self.parallel)),
            ("memory", text(&self.memory)),
            ("hostfile", text(&self.hostfile)),
            ("include", text(&self.include)),
            ("exclude", text(&self.exclude)),
            ("ssh_port", number(self.ssh_port)),
            ("order", text(&self.order)),
            ("features", text(&self.features)),
            ("command", (!self.command.is_empty()).then(|| json!(self.command))),
        ];
        table.extend(flag_values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        self.add_scheduler_flags(&mut table).map_err(&wrong)?;
        for parameter in &self.parameters {
            let (name, domain) = parameter_of_flag(parameter).map_err(|why| wrong(format!("--param {why}")))?;
            let parameters = table.entry("parameters").or_insert_with(|| json!({}));
            let Some(parameters) = parameters.as_object_mut() else { continue };
            if parameters.insert(name.clone(), domain).is_some() {
                return Err(wrong(format!("parameter {name} is given twice; give it once")));
            }
        }
        Ok((origin, table))
    }

    /// Adds the flags that are keys of the chosen scheduler's section.
    fn add_scheduler_flags(&self, table: &mut Map<String, Value>) -> std::result::Result<(), String> {
        let scheduler = table.get("scheduler").and_then(Value::as_str).unwrap_or("none").to_owned();
        let flags = [
            ("min_steps", self.min_steps, &["asha"][..]),
            ("eta", self.eta, &["asha"]),
            ("every", self.every, &["median", "pbt"]),
        ];
        for (key, value, schedulers) in flags.into_iter().filter_map(|(key, value, of)| Some((key, value?, of))) {
            if !schedulers.contains(&scheduler.as_str()) {
                let allowed = schedulers.join(" or ");
                return Err(format!(
                    "--{key} is given, but scheduler is {scheduler}; give --scheduler {allowed}, or leave --{key} out"
                ));
            }
            let section = table.entry(scheduler.clone()).or_insert_with(|| json!({}));
            if let Some(section) = section.as_object_mut() {
                section.insert(key.into(), value.into());
            }
        }
        Ok(())
    }
}

/// Reads a sweep file.
fn read(file: &Path) -> Result<Map<String, Value>> {
    let text = files::read_text(file, MAX_FILE_BYTES).map_err(|source| Error::Io {
        action: "read",
        path: file.to_owned(),
        source,
    })?;
    let wrong = |problem: String| -> Error {
        SweepToolError::Definition { origin: file.display().to_string(), problem }.into()
    };
    let table: toml::Table = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let why = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let found = text.lines().nth(line - 1).unwrap_or_default().trim();
        wrong(format!("line {line}, `{found}`: {why}; write the file in TOML, as `zerorun sweep --help` shows"))
    })?;
    match serde_json::to_value(table) {
        Ok(Value::Object(table)) => Ok(table),
        _ => Err(wrong("it has a value that is not text, a number, true or false, a list or a table".into())),
    }
}
