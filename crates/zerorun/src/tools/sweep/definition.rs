//! The definition of a sweep: the sweep file and flags, as checked settings.

use super::error::SweepToolError;
use super::parameter_syntax::domain_of;
use crate::error::Result;
use crate::tools::bench::size;
use candle_zero::error::SweepError;
use candle_zero::sweep::{SweepGoal, SweepSearcher, SweepSettings, SweepSpace, TrialScheduler};
use candle_zero::util::{list, suggest_names};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The keys of a sweep file.
const KEYS: [&str; 24] = [
    "command",
    "metric",
    "mode",
    "steps",
    "trials",
    "searcher",
    "scheduler",
    "asha",
    "median",
    "pbt",
    "seed",
    "max_failures",
    "retries",
    "ranks",
    "threads",
    "parallel",
    "memory",
    "hostfile",
    "include",
    "exclude",
    "ssh_port",
    "order",
    "features",
    "parameters",
];

/// The keys that determine how trials are run, but not what is searched. They may differ when a sweep continues.
pub(super) const FREE_KEYS: [&str; 9] =
    ["max_failures", "retries", "parallel", "memory", "threads", "hostfile", "include", "exclude", "ssh_port"];

/// The order in which a sweep receives the results of trials that run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResultDeliveryOrder {
    /// The order in which trials would end if all steps took equally long, so that the same sweep makes the same
    /// decisions.
    Steps,
    /// The order in which trials end.
    Finish,
}

/// The hosts on which trials run: only this one, unless a hostfile is given.
#[derive(Debug, Clone, Default)]
pub(super) struct SweepHostOptions {
    pub(super) hostfile: Option<PathBuf>,
    /// The filters, in the launcher's syntax; empty if not given.
    pub(super) include: String,
    pub(super) exclude: String,
    pub(super) ssh_port: Option<u16>,
}

/// The checked definition of a sweep.
#[derive(Debug, Clone)]
pub(super) struct SweepDefinition {
    /// The sweep file or the command line, for messages.
    pub(super) origin: String,
    /// The words of the command.
    pub(super) command: Vec<String>,
    pub(super) metric: String,
    pub(super) settings: SweepSettings,
    pub(super) order: ResultDeliveryOrder,
    pub(super) ranks: usize,
    pub(super) retries: u32,
    pub(super) threads: Option<usize>,
    pub(super) parallel: Option<usize>,
    /// The memory of a trial in bytes.
    pub(super) memory: Option<u64>,
    pub(super) hosts: SweepHostOptions,
    pub(super) features: Option<String>,
}

/// The definition's keys as written. Its methods check the values and return errors that name the remedy.
struct DefinitionKeys<'a> {
    origin: &'a str,
    table: &'a Map<String, Value>,
}

impl DefinitionKeys<'_> {
    fn error(&self, problem: impl Into<String>) -> candle_zero::Error {
        SweepToolError::Definition { origin: self.origin.to_owned(), problem: problem.into() }.into()
    }

    fn text(&self, key: &str, allowed: &str) -> Result<Option<&str>> {
        let is_text = |value: &'_ Value| value.as_str().is_some_and(|text| !text.is_empty());
        match self.table.get(key) {
            None => Ok(None),
            Some(value) if is_text(value) => Ok(value.as_str()),
            Some(value) => Err(self.error(format!("{key} is {value}; {allowed}"))),
        }
    }

    fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Option<T>> {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        let Some(found) = self.text(key, &format!("give one of {}", list(&names)))? else { return Ok(None) };
        match words.iter().find(|(name, _)| *name == found) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let hint = suggest_names(found, names.iter().copied());
                let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
                Err(self.error(format!("{key} is \"{found}\"; give one of {}{hint}", list(&names))))
            }
        }
    }

    fn whole_number(&self, key: &str, min: u64, max: u64) -> Result<Option<u64>> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        match value.as_u64().filter(|number| (min..=max).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(format!("{key} is {value}; give a whole number from {min} to {max}"))),
        }
    }

    /// Returns the value of a key in the section of a scheduler.
    fn section_value<'a>(&'a self, section: &str, key: &str) -> Option<&'a Value> {
        self.table.get(section)?.get(key)
    }

    fn section_whole_number(&self, section: &str, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.section_value(section, key) else { return Ok(None) };
        match value.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(format!("{section}.{key} is {value}; give a whole number"))),
        }
    }

    fn section_number(&self, section: &str, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.section_value(section, key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.error(format!("{section}.{key} is {value}; give a number")))
    }

    /// Refuses unknown keys, and sections of schedulers other than the chosen one.
    fn check_names(&self, scheduler: &str) -> Result<()> {
        let unknown = |path: &str, key: &str, known: &[&str]| {
            let hint = suggest_names(key, known.iter().copied());
            let hint = hint.unwrap_or_else(|| format!("the allowed keys are {}", list(known)));
            self.error(format!("{path}{key} is not a key of a sweep; {hint}"))
        };
        for (key, value) in self.table {
            if !KEYS.contains(&key.as_str()) {
                return Err(match key.starts_with('-') || key.contains('.') {
                    true => self
                        .error(format!("{key} is not a key of a sweep; parameters belong in the table [parameters]")),
                    false => unknown("", key, &KEYS),
                });
            }
            let Some((_, known)) = SECTIONS.iter().find(|(name, _)| name == key) else { continue };
            let Some(section) = value.as_object() else {
                return Err(
                    self.error(format!("{key} is {value}; give a table, such as {key} = {{ {} = 10 }}", known[0]))
                );
            };
            if scheduler != key {
                let problem = format!(
                    "{key} is given, but scheduler is {scheduler}; give scheduler = \"{key}\", or leave {key} out"
                );
                return Err(self.error(problem));
            }
            if let Some(key_of_section) = section.keys().find(|name| !known.contains(&name.as_str())) {
                return Err(unknown(&format!("{key}."), key_of_section, known));
            }
        }
        Ok(())
    }

    fn scheduler(&self, name: &str) -> Result<TrialScheduler> {
        let required = |key: &str, meaning: &str| {
            let value = self.section_whole_number(name, key)?;
            value.ok_or_else(|| self.error(format!("{name}.{key} is missing; give {meaning}")))
        };
        Ok(match name {
            "asha" => TrialScheduler::Asha {
                min_steps: required("min_steps", "the first step at which trials are compared")?,
                eta: self.section_whole_number(name, "eta")?.unwrap_or(4),
            },
            "median" => {
                let every = required("every", "the number of steps between comparisons")?;
                TrialScheduler::MedianStop {
                    every,
                    grace: self.section_whole_number(name, "grace")?.unwrap_or(every),
                    min_trials: self.section_whole_number(name, "min_trials")?.map_or(3, |trials| trials as usize),
                }
            }
            "pbt" => TrialScheduler::Pbt {
                every: required("every", "the number of steps between replacements")?,
                quantile: self.section_number(name, "quantile", 0.25)?,
                resample: self.section_number(name, "resample", 0.25)?,
            },
            _ => TrialScheduler::None,
        })
    }

    fn command(&self) -> Result<Vec<String>> {
        let remedy = "give the words of the command after zerorun, such as [\"finetune\", \"MODEL\", \"--data\", \
                      \"chats.jsonl\"]";
        match self.table.get("command") {
            None => Err(self.error(format!("command is missing; {remedy}, or write the command after `--`"))),
            Some(Value::String(text)) if text.contains(['"', '\'', '\\']) => {
                Err(self.error(format!("command is text with quotes, `{text}`; {remedy}")))
            }
            Some(Value::String(text)) => Ok(text.split_whitespace().map(str::to_owned).collect()),
            Some(Value::Array(words)) => {
                let words: Option<Vec<String>> = words.iter().map(|word| word.as_str().map(str::to_owned)).collect();
                words.ok_or_else(|| self.error(format!("command has a word that is not text; {remedy}")))
            }
            Some(other) => Err(self.error(format!("command is {other}; {remedy}"))),
        }
        .and_then(|mut words| {
            if words.first().is_some_and(|word| word == "zerorun") {
                words.remove(0);
            }
            if words.is_empty() { Err(self.error(format!("command is empty; {remedy}"))) } else { Ok(words) }
        })
    }

    fn hosts(&self) -> Result<SweepHostOptions> {
        let hostfile = self.text("hostfile", "give the path of a file with a line NAME slots=N for each host")?;
        if let (None, Some(key)) =
            (hostfile, ["include", "exclude", "ssh_port"].into_iter().find(|key| self.table.contains_key(*key)))
        {
            return Err(self.error(format!("{key} is given, but hostfile is not; give hostfile, or leave {key} out")));
        }
        let filter = |key| {
            let found = self.text(key, "give hosts and slots of the hostfile, such as \"HOST@HOST:0,2\"")?;
            Ok::<_, candle_zero::Error>(found.unwrap_or_default().to_owned())
        };
        Ok(SweepHostOptions {
            hostfile: hostfile.map(PathBuf::from),
            include: filter("include")?,
            exclude: filter("exclude")?,
            ssh_port: self.whole_number("ssh_port", 1, u64::from(u16::MAX))?.map(|port| port as u16),
        })
    }

    fn space(&self) -> Result<SweepSpace> {
        let remedy = "give a table [parameters] with at least one flag or key to vary, such as \"--lr\" = { \
                      log_uniform = [1e-5, 1e-3] }";
        let parameters = match self.table.get("parameters") {
            None => return Err(self.error(format!("parameters is missing; {remedy}"))),
            Some(Value::Object(parameters)) => parameters,
            Some(other) => return Err(self.error(format!("parameters is {other}; {remedy}"))),
        };
        let mut space = SweepSpace::new();
        for (name, value) in parameters {
            let domain = domain_of(value).map_err(|why| self.error(format!("parameter {name} {why}")))?;
            space = space.with(name, domain);
        }
        Ok(space)
    }
}

/// The sections of schedulers, with their keys.
const SECTIONS: [(&str, &[&str]); 3] = [
    ("asha", &["min_steps", "eta"]),
    ("median", &["every", "grace", "min_trials"]),
    ("pbt", &["every", "quantile", "resample"]),
];

impl SweepDefinition {
    /// Checks a definition. `origin` names the sweep file or the command line, for messages.
    pub(super) fn new(origin: &str, table: &Map<String, Value>) -> Result<Self> {
        let keys = DefinitionKeys { origin, table };
        let schedulers = ["none", "median", "asha", "pbt"].map(|name| (name, name));
        let scheduler = keys.word("scheduler", &schedulers)?.unwrap_or("none");
        keys.check_names(scheduler)?;
        let command = keys.command()?;
        let metric = keys.text("metric", "give the name of a value in the record of a run, such as \"val_loss\"")?;
        let metric = metric.ok_or_else(|| {
            keys.error(
                "metric is missing; give the name of a value in the record of a run, such as \"val_loss\" or \"loss\"",
            )
        })?;
        let steps = keys.whole_number("steps", 1, 1 << 53)?;
        let steps =
            steps.ok_or_else(|| keys.error("steps is missing; give the number of steps of a complete trial"))?;
        let mut settings = SweepSettings::new(keys.space()?, steps);
        let goals = [("min", SweepGoal::Minimize), ("max", SweepGoal::Maximize)];
        settings.goal = keys.word("mode", &goals)?.unwrap_or_default();
        let searchers = [("grid", SweepSearcher::Grid), ("random", SweepSearcher::Random), ("tpe", SweepSearcher::Tpe)];
        settings.searcher = keys.word("searcher", &searchers)?.unwrap_or_default();
        settings.trials = keys.whole_number("trials", 1, 10_000)?.map(|trials| trials as usize);
        settings.seed = keys.whole_number("seed", 0, u64::MAX)?.unwrap_or_default();
        settings.max_failures =
            keys.whole_number("max_failures", 0, 10_000)?.map_or(settings.max_failures, |max| max as usize);
        settings.scheduler = keys.scheduler(scheduler)?;
        settings.check().map_err(|error: SweepError| keys.error(error.to_string()))?;
        let orders = [("steps", ResultDeliveryOrder::Steps), ("finish", ResultDeliveryOrder::Finish)];
        Ok(Self {
            origin: origin.to_owned(),
            command,
            metric: metric.to_owned(),
            settings,
            order: keys.word("order", &orders)?.unwrap_or(ResultDeliveryOrder::Steps),
            ranks: keys.whole_number("ranks", 1, 1024)?.unwrap_or(1) as usize,
            retries: keys.whole_number("retries", 0, 1_000_000)?.unwrap_or(3) as u32,
            threads: keys.whole_number("threads", 1, 4096)?.map(|threads| threads as usize),
            parallel: keys.whole_number("parallel", 1, 4096)?.map(|trials| trials as usize),
            memory: match table.get("memory") {
                None => None,
                Some(Value::String(text)) => {
                    Some(size(text).map_err(|why| keys.error(format!("memory is \"{text}\"; {why}")))?)
                }
                Some(_) => keys.whole_number("memory", 1, 1 << 53)?,
            },
            hosts: keys.hosts()?,
            features: keys.text("features", "give Cargo features, separated by commas")?.map(str::to_owned),
        })
    }

    /// Returns an error about this definition.
    pub(super) fn error(&self, problem: impl Into<String>) -> candle_zero::Error {
        SweepToolError::Definition { origin: self.origin.clone(), problem: problem.into() }.into()
    }
}
