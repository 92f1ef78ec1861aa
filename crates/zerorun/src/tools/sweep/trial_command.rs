//! The command line of a trial: that of the sweep, with the trial's parameters, and with the flags that make the
//! trial save checkpoints, continue from them and keep its record.

use super::definition::SweepDefinition;
use crate::error::{ConfigError, Error, Result};
use crate::tools::config_values::{get, set};
use crate::tools::finetune;
use crate::tools::script_arguments::{DS_CONFIG, take};
use candle_zero::config::{Config, ConfigRule, RunValues};
use candle_zero::sweep::{ParameterDomain, TrialParameters};
use candle_zero::util::suggest_names;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The placeholder for the folder of a trial in the words of the command.
const TRIAL: &str = "{trial}";

/// The flags that the command of a sweep must not contain, each with the reason.
const RESERVED_FLAGS: [(&str, &str); 9] = [
    ("--save", "each trial has its own folder of checkpoints"),
    ("--resume", "trials continue from their own checkpoints"),
    ("--resume_anyway", "trials continue from their own checkpoints"),
    ("--steps", "the sweep's key steps sets it"),
    ("--epochs", "the sweep's key steps sets the length of a trial"),
    ("--metrics", "the record of each trial contains its metrics"),
    ("--run", "the record of each trial is named after the trial"),
    ("--runs", "the records of trials are in the folder of the sweep"),
    ("--num_ranks", "the sweep's key ranks sets it"),
];

/// Further flags of `zerorun finetune` that the command must not contain.
const RESERVED_FINETUNE_FLAGS: [(&str, &str); 5] = [
    ("--out", "each trial has its own folder for the result"),
    ("--patience", "the scheduler of the sweep decides when a trial ends"),
    ("--max_restarts", "the sweep's key retries sets the number of restarts"),
    ("--hostfile", "each trial runs on one host; the sweep's key hostfile distributes the trials among hosts"),
    ("--nnodes", "each trial runs on one host; the sweep's key hostfile distributes the trials among hosts"),
];

/// The files and folders that a trial uses.
#[derive(Debug, Clone)]
pub(super) struct TrialPaths {
    /// The folder of the trial, for checkpoints and results.
    pub(super) folder: PathBuf,
    /// The configuration of the trial, if it has one.
    pub(super) ds_config: PathBuf,
    /// The folder of runs and the name of the run, if a record is kept.
    pub(super) record: Option<(PathBuf, String)>,
    /// Whether the trial continues from a checkpoint that was saved with other settings.
    pub(super) is_branch: bool,
}

/// The program that is started.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TrialProgram {
    /// `zerorun finetune`.
    Finetune,
    /// A script or executable, as typed.
    Script(PathBuf),
}

/// The command of a sweep, from which the commands of its trials are built.
#[derive(Debug, Clone)]
pub(super) struct CommandTemplate {
    program: TrialProgram,
    /// The words after the program, without the configuration file.
    args: Vec<OsString>,
    /// The index at which the trial's flags are inserted.
    flags_index: usize,
    /// The configuration on which those of the trials are based.
    configuration: Option<Value>,
    ranks: usize,
    steps: u64,
}

impl CommandTemplate {
    /// Reads the command of a sweep. `directory` is the directory in which trials run. `saved` is the configuration of
    /// a sweep that is being resumed; it is used instead of the file.
    pub(super) fn new(definition: &SweepDefinition, directory: &Path, saved: Option<&Value>) -> Result<Self> {
        let (first, rest) = definition.command.split_first().ok_or_else(|| definition.error("command is empty"))?;
        let program = if first == "finetune" { TrialProgram::Finetune } else { TrialProgram::Script(first.into()) };
        let mut args: Vec<OsString> = rest.iter().map(OsString::from).collect();
        let ds_config = take(&mut args, &DS_CONFIG);
        let flags_index = ds_config.as_ref().map_or(0, |(at, _)| *at);
        let configuration = match (saved, &ds_config) {
            (Some(saved), _) => Some(saved.clone()).filter(|saved| !saved.is_null()),
            (None, Some((_, file))) => Some(candle_zero::config::read_value(&directory.join(file))?),
            (None, None) => None,
        };
        let (ranks, steps) = (definition.ranks, definition.settings.steps);
        Ok(Self { program, args, flags_index, configuration, ranks, steps })
    }

    /// Returns the configuration on which those of the trials are based.
    pub(super) fn configuration(&self) -> Option<&Value> {
        self.configuration.as_ref()
    }

    /// Returns the script and its arguments, unless the trials are those of `zerorun finetune`.
    pub(super) fn script(&self) -> Option<(&Path, &[OsString])> {
        match &self.program {
            TrialProgram::Finetune => None,
            TrialProgram::Script(path) => Some((path, &self.args)),
        }
    }

    /// Uses this executable instead of the script.
    pub(super) fn set_program(&mut self, built: PathBuf) {
        self.program = TrialProgram::Script(built);
    }

    /// Checks the command and every parameter.
    pub(super) fn check(&self, definition: &SweepDefinition) -> Result<()> {
        self.check_reserved_flags(definition)?;
        for (name, domain) in definition.settings.space.parameters() {
            match is_flag(name) {
                true => self.check_flag(definition, name, domain)?,
                false => self.check_path(definition, name, domain)?,
            }
        }
        let names: Vec<&str> = definition.settings.space.parameters().iter().map(|(name, _)| name.as_str()).collect();
        for (at, name) in names.iter().enumerate() {
            if let Some(other) = names[..at].iter().find(|other| normalized(other) == normalized(name)) {
                return Err(
                    definition.error(format!("parameters {other} and {name} are the same; give only one of them"))
                );
            }
        }
        if self.program == TrialProgram::Finetune {
            self.check_finetune(definition)?;
        } else if self.configuration.is_none() {
            let problem =
                "command has no --ds_config FILE; give the configuration file of the script, which trials may vary";
            return Err(definition.error(problem));
        }
        self.check_configuration(definition)
    }

    fn reserved_flags(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> + use<> {
        let more: &[_] = if self.program == TrialProgram::Finetune { &RESERVED_FINETUNE_FLAGS } else { &[] };
        RESERVED_FLAGS.iter().chain(more)
    }

    fn check_reserved_flags(&self, definition: &SweepDefinition) -> Result<()> {
        for (flag, why) in self.reserved_flags() {
            if self.args.iter().any(|word| is_word_of(word, flag)) {
                return Err(definition.error(format!("command has {flag}, but {why}; leave it out")));
            }
        }
        if self.program != TrialProgram::Finetune {
            let export = take(&mut self.args.clone(), &["--export"]);
            if export.is_some_and(|(_, file)| !file.to_string_lossy().contains(TRIAL)) {
                let problem = "command has --export, so all trials would write the same file; give --export \
                               {trial}/model.safetensors, in which {trial} is the folder of the trial";
                return Err(definition.error(problem));
            }
        }
        Ok(())
    }

    fn check_flag(&self, definition: &SweepDefinition, name: &str, domain: &ParameterDomain) -> Result<()> {
        if let Some((flag, why)) = self.reserved_flags().find(|(flag, _)| normalized(flag) == normalized(name)) {
            return Err(definition.error(format!("parameter {flag} cannot be varied: {why}; leave it out")));
        }
        if DS_CONFIG.contains(&name) {
            let problem = format!(
                "parameter {name} cannot be varied; vary keys of the configuration by their paths, such as optimizer.params.lr"
            );
            return Err(definition.error(problem));
        }
        if self.args.iter().any(|word| is_word_of(word, name)) {
            return Err(
                definition.error(format!("{name} is both in the command and a parameter; remove it from the command"))
            );
        }
        if let ParameterDomain::Choice(values) = domain
            && let Some(value) = values.iter().find(|value| value.is_object() || value.is_array() || value.is_null())
        {
            return Err(definition
                .error(format!("parameter {name} has the value {value}; a flag needs text, a number, true or false")));
        }
        Ok(())
    }

    /// Checks that a parameter can be a path of the configuration.
    fn check_path(&self, definition: &SweepDefinition, name: &str, domain: &ParameterDomain) -> Result<()> {
        let as_flag = format!("--{}", name.trim_start_matches('-'));
        let is_flag_of_finetune = self.program == TrialProgram::Finetune
            && finetune_flags().iter().any(|flag| normalized(flag) == normalized(&as_flag));
        if is_flag_of_finetune {
            return Err(definition
                .error(format!("parameter {name} is not a key of the configuration; write the flag as {as_flag}")));
        }
        if name.split('.').any(str::is_empty) {
            let problem = format!(
                "parameter `{name}` is neither a flag, such as --lr, nor a path of keys, such as optimizer.params.lr"
            );
            return Err(definition.error(problem));
        }
        let value = some_values(domain).next().unwrap_or(Value::Null);
        let mut config = self.configuration.clone().unwrap_or_else(|| json!({}));
        set(&mut config, name, value.clone());
        if *get(&config, name) != value {
            let problem = format!(
                "parameter {name} cannot be set, because the configuration has a value in place of one of its \
                 sections; give a section there, in the file given with --ds_config"
            );
            return Err(definition.error(problem));
        }
        Ok(())
    }

    /// Checks that the configuration allows the ends of all ranges and all values of choices.
    fn check_configuration(&self, definition: &SweepDefinition) -> Result<()> {
        let paths = || definition.settings.space.parameters().iter().filter(|(name, _)| !is_flag(name));
        let mut first = self.configuration.clone().unwrap_or_else(|| json!({}));
        for (name, domain) in paths() {
            if let Some(value) = some_values(domain).next() {
                set(&mut first, name, value);
            }
        }
        for (name, domain) in paths() {
            for value in some_values(domain) {
                let mut config = first.clone();
                set(&mut config, name, value.clone());
                let run = RunValues { total_num_steps: Some(self.steps), ..RunValues::default() };
                let Err(Error::Config(ConfigError::Problems { problems, .. })) =
                    Config::load_for(config, self.ranks, &run)
                else {
                    continue;
                };
                // Trials may have more settings than these, so a value is refused only if it is wrong in any case.
                let section = |path: &str| path.split('.').next() == name.split('.').next();
                let wrong = problems.iter().find(|problem| {
                    let rules = [
                        ConfigRule::UnknownKey,
                        ConfigRule::MisplacedKey,
                        ConfigRule::Type,
                        ConfigRule::Range,
                        ConfigRule::Removed,
                        ConfigRule::Unsupported,
                    ];
                    rules.contains(&problem.rule) && section(&problem.path)
                });
                if let Some(problem) = wrong {
                    let problem =
                        format!("parameter {name} with the value {value}: `{}`: {}", problem.path, problem.message);
                    return Err(definition.error(problem));
                }
            }
        }
        Ok(())
    }

    /// Checks the command line of `zerorun finetune` with the values of each flag that [`some_values`] returns.
    fn check_finetune(&self, definition: &SweepDefinition) -> Result<()> {
        let valid_flags = finetune_flags();
        let flags = || definition.settings.space.parameters().iter().filter(|(name, _)| is_flag(name));
        for (name, _) in flags() {
            if !valid_flags.iter().any(|flag| normalized(flag) == normalized(name)) {
                let hint = suggest_names(name, valid_flags.iter().map(String::as_str));
                let hint = hint.unwrap_or_else(|| "`zerorun finetune --help` lists them".into());
                return Err(definition.error(format!("parameter {name} is not a flag of zerorun finetune; {hint}")));
            }
        }
        let first: TrialParameters =
            flags().map(|(name, domain)| (name.clone(), some_values(domain).next().unwrap_or(Value::Null))).collect();
        let paths = TrialPaths {
            folder: "trial".into(),
            ds_config: "ds_config.json".into(),
            record: Some(("runs".into(), "trial".into())),
            is_branch: false,
        };
        let parse = |parameters: &TrialParameters| match finetune::command()
            .try_get_matches_from(self.words_of(parameters, &paths))
        {
            Ok(_) => Ok(()),
            Err(error) => {
                let text = error.render().to_string();
                let text = text.strip_prefix("error: ").unwrap_or(&text);
                Err(text
                    .split("\n\nUsage:")
                    .next()
                    .and_then(|text| text.split("\n\nFor more information").next())
                    .unwrap_or_default()
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" "))
            }
        };
        let no_parameters: TrialParameters = Vec::new();
        if let (Err(why), Err(_)) = (parse(&first), parse(&no_parameters)) {
            return Err(definition.error(format!("command is not a command line of zerorun finetune: {why}")));
        }
        for (at, (name, domain)) in flags().enumerate() {
            for value in some_values(domain) {
                let mut parameters = first.clone();
                parameters[at].1 = value.clone();
                parse(&parameters)
                    .map_err(|why| definition.error(format!("parameter {name} with the value {value}: {why}")))?;
            }
        }
        Ok(())
    }

    /// Returns the configuration of a trial, if it has one.
    pub(super) fn configuration_of(&self, parameters: &TrialParameters) -> Option<Value> {
        let paths: Vec<_> = parameters.iter().filter(|(name, _)| !is_flag(name)).collect();
        let mut config = match (&self.configuration, paths.is_empty()) {
            (None, true) => return None,
            (base, _) => base.clone().unwrap_or_else(|| json!({})),
        };
        paths.into_iter().for_each(|(path, value)| set(&mut config, path, value.clone()));
        Some(config)
    }

    /// Returns the words after `zerorun` in a trial's command line.
    pub(super) fn words_of(&self, parameters: &TrialParameters, paths: &TrialPaths) -> Vec<OsString> {
        let ranks = self.ranks.to_string();
        let record = paths.record.iter().flat_map(|(folder, name)| -> [OsString; 4] {
            ["--runs".into(), folder.into(), "--run".into(), name.into()]
        });
        match &self.program {
            TrialProgram::Finetune => {
                let prefix: [OsString; 3] = ["finetune".into(), "--num_ranks".into(), ranks.into()];
                prefix.into_iter().chain(record).chain(self.args_of(parameters, paths)).collect()
            }
            TrialProgram::Script(path) => {
                // A step and its checkpoint may take a long time.
                let prefix: [OsString; 4] = ["--num_ranks".into(), ranks.into(), "--grace".into(), "600s".into()];
                let script = [OsString::from(path)];
                prefix.into_iter().chain(record).chain(script).chain(self.args_of(parameters, paths)).collect()
            }
        }
    }

    /// Returns the words after the program.
    fn args_of(&self, parameters: &TrialParameters, paths: &TrialPaths) -> Vec<OsString> {
        let mut trial_flags: Vec<OsString> = Vec::new();
        if self.configuration_of(parameters).is_some() {
            trial_flags.extend(["--ds_config".into(), paths.ds_config.clone().into()]);
        }
        let checkpoints = paths.folder.join("checkpoints");
        trial_flags.extend([
            "--steps".into(),
            self.steps.to_string().into(),
            "--save".into(),
            checkpoints.into(),
            "--resume".into(),
        ]);
        if self.program == TrialProgram::Finetune {
            trial_flags.extend(["--out".into(), paths.folder.join("result").into()]);
            trial_flags.extend(paths.is_branch.then(|| "--resume_anyway".into()));
        }
        for (name, value) in parameters.iter().filter(|(name, _)| is_flag(name)) {
            match value {
                Value::Bool(given) if !self.takes_boolean(name) => trial_flags.extend(given.then(|| name.into())),
                Value::String(text) => trial_flags.extend([name.into(), text.into()]),
                other => trial_flags.extend([name.into(), other.to_string().into()]),
            }
        }
        let mut args: Vec<OsString> = self.args.iter().map(|word| in_folder(word, &paths.folder)).collect();
        let index = self.flags_index.min(args.len());
        args.splice(index..index, trial_flags);
        args
    }

    /// Returns whether a flag takes true or false as its value, rather than being given or left out.
    fn takes_boolean(&self, name: &str) -> bool {
        let is_this = |arg: &clap::Arg| names_of(arg).iter().any(|flag| normalized(flag) == normalized(name));
        self.program == TrialProgram::Finetune
            && finetune::command().get_arguments().any(|arg| is_this(arg) && arg.get_action().takes_values())
    }
}

/// Returns whether a parameter is a flag rather than a path of the configuration.
pub(super) fn is_flag(name: &str) -> bool {
    name.starts_with("--")
}

/// Returns the word with the trial's folder in place of [`TRIAL`].
fn in_folder(word: &OsString, folder: &Path) -> OsString {
    match word.to_str().filter(|word| word.contains(TRIAL)) {
        Some(text) => text.replace(TRIAL, &folder.to_string_lossy()).into(),
        None => word.clone(),
    }
}

/// Returns a flag in a form that is the same for all spellings of the flag.
fn normalized(flag: &str) -> String {
    flag.replace('-', "_")
}

/// Returns whether a word of a command line is this flag, with or without a value.
fn is_word_of(word: &OsString, flag: &str) -> bool {
    let name = word.to_str().map(|word| word.split_once('=').map_or(word, |(name, _)| name));
    name.is_some_and(|name| name.starts_with("--") && normalized(name) == normalized(flag))
        || flag == "--num_ranks" && ["-n", "--num_gpus"].iter().any(|short| word == short)
        || flag == "--hostfile" && name.is_some_and(|name| name.starts_with("-H"))
}

/// Returns values with which a domain is checked: all of a choice, or both ends of a range.
fn some_values(domain: &ParameterDomain) -> Box<dyn Iterator<Item = Value> + '_> {
    match domain {
        ParameterDomain::Choice(values) => Box::new(values.iter().cloned()),
        ParameterDomain::Real { low, high, .. } => Box::new([*low, *high].into_iter().map(Value::from)),
        ParameterDomain::Integer { low, high, step, .. } => {
            Box::new([*low, low + (high - low) / step * step].into_iter().map(Value::from))
        }
        _ => Box::new(std::iter::empty()),
    }
}

/// Returns the flags of `zerorun finetune`, with all their spellings.
fn finetune_flags() -> Vec<String> {
    finetune::command().get_arguments().filter(|arg| !arg.is_hide_set()).flat_map(names_of).collect()
}

fn names_of(arg: &clap::Arg) -> Vec<String> {
    let names = arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten());
    names.map(|name| format!("--{name}")).collect()
}
