//! Walks over the values of a file, compares them with the table of keys, and collects values, problems and notes.

use super::json_node::{JsonEntry, JsonValue};
use super::keys::{self, ConfigKey, ConfigSection, ConfigValueKind, KeyStatus, join};
use super::note::printable;
use super::{ConfigNote, ConfigProblem, ConfigRule, RunValues, TextPosition, suggest, value_conversion};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The old name of `bf16`.
const OLD_BF16: &str = "bfloat16";

/// The result of a walk.
#[derive(Default)]
pub(crate) struct ConfigWalk<'a> {
    /// Every value under DeepSpeed's names, with defaults filled in.
    pub tree: Map<String, Value>,
    /// The path and position of each key in the file.
    pub given: HashMap<String, Option<TextPosition>>,
    /// The parameters of the optimizer and the schedule, whose tables of keys depend on their types.
    pub params: HashMap<String, &'a [JsonEntry]>,
    /// The batch keys whose value is `"auto"`.
    pub autos: Vec<String>,
    /// The run's values for keys that are `"auto"`.
    pub run: RunValues,
    pub problems: Vec<ConfigProblem>,
    pub notes: Vec<ConfigNote>,
}

impl<'a> ConfigWalk<'a> {
    /// Walks over the outermost object.
    pub fn new(entries: &'a [JsonEntry], run: &RunValues) -> Self {
        let mut walk = Self { tree: defaults(keys::section("")), run: *run, ..Self::default() };
        walk.section(keys::section(""), entries);
        walk.bare_zero(entries);
        walk
    }

    /// Walks over an object whose defaults are already in the tree.
    pub fn section(&mut self, section: &'static ConfigSection, entries: &'a [JsonEntry]) {
        let is_on =
            |switch: &str| entries.iter().any(|entry| entry.key == switch && entry.node.value == JsonValue::Bool(true));
        let section_is_off = section.switch.is_some_and(|switch| !is_on(switch));
        let problems_before = self.problems.len();
        let mut first_name: HashMap<&str, &str> = HashMap::new();
        let mut deprecated_entries = Vec::new();
        let has_bf16 = section.path.is_empty() && entries.iter().any(|entry| entry.key == "bf16");
        for entry in entries {
            if has_bf16 && entry.key == OLD_BF16 {
                self.note(OLD_BF16, "an old name: ignored, because `bf16` is given too, as in DeepSpeed");
                continue;
            }
            let path = section.join(&printable(&entry.key));
            let Some(key) = section.key(&entry.key) else {
                self.unknown(section, entry, path);
                continue;
            };
            if let Some(other) = first_name.insert(key.name, &entry.key) {
                let message = format!("the same as `{}`, which is given too; remove one of them", section.join(other));
                self.problem(ConfigRule::Conflict, &path, entry.position, message);
                continue;
            }
            self.given.insert(section.join(key.name), entry.position);
            match key.status {
                KeyStatus::RemovedUnlessOff(_) if is_off(&entry.node.value) => {
                    self.note(&path, "is off, so it is ignored; this library does not support it");
                }
                KeyStatus::Removed(why) | KeyStatus::RemovedUnlessOff(why) => {
                    self.problem(ConfigRule::Removed, &path, entry.position, why);
                }
                KeyStatus::Moved(to) => deprecated_entries.push((key, entry, to)),
                _ => self.key(section, key, entry, section_is_off),
            }
        }
        for (key, entry, to) in deprecated_entries {
            self.translate(section, key, entry, to);
        }
        if self.problems.len() == problems_before {
            self.note_section(section);
        }
    }

    fn key(&mut self, section: &'static ConfigSection, key: &'static ConfigKey, entry: &'a JsonEntry, is_off: bool) {
        let path = section.join(key.name);
        if entry.key == OLD_BF16 {
            self.note(OLD_BF16, "an old name: treated as `bf16`");
        }
        if key.kind == ConfigValueKind::Section {
            return self.object(key, entry, path);
        }
        if entry.node.value == JsonValue::String("auto".into())
            && !matches!(key.kind, ConfigValueKind::AutoOr(_) | ConfigValueKind::Any)
        {
            return self.auto(section, key, entry, path);
        }
        if let (ConfigValueKind::Str, JsonValue::String(text)) = (key.kind, &entry.node.value)
            && text.ends_with(',')
        {
            let text = printable(text);
            self.note(
                &path,
                format!("\"{text}\" ends with a comma: an unquoted string extends to the end of its line"),
            );
        }
        match value_conversion::convert(&entry.node, key, section.lenient) {
            Ok(value) => {
                // A key that would be refused has no effect in a section that is switched off.
                let is_refused = matches!(key.status, KeyStatus::Refused(_) | KeyStatus::RefusedAbove1(_));
                if section.checked && !(is_off && is_refused) {
                    self.check_status(key, &path, &value, entry);
                }
                self.set(&path, value);
            }
            // Nothing in a section that is not checked can change training.
            Err(_) if !section.checked => {}
            Err((rule, message)) => self.problem(rule, &section.join(&entry.key), entry.node.position, message),
        }
    }

    /// Notes or refuses a value according to the status of its key.
    fn check_status(&mut self, key: &ConfigKey, path: &str, value: &Value, entry: &JsonEntry) {
        if key.default_value().as_ref() == Some(value) {
            return;
        }
        let position = entry.node.position;
        match key.status {
            KeyStatus::NoEffect(why) => self.note(path, format!("accepted, but has no effect here: {why}")),
            KeyStatus::Refused(why) => self.problem(ConfigRule::Unsupported, path, position, unsupported(value, why)),
            KeyStatus::RefusedAbove1(why) if value.as_i64().is_some_and(|n| n > 1) => {
                self.problem(ConfigRule::Unsupported, path, position, unsupported(value, why));
            }
            _ => {}
        }
    }

    fn object(&mut self, key: &'static ConfigKey, entry: &'a JsonEntry, path: String) {
        match &entry.node.value {
            JsonValue::Null if key.default == "null" => {}
            // The deprecated bare form, which `bare_zero` reads.
            JsonValue::Bool(_) if path == "zero_optimization" => {}
            JsonValue::Object(inner) if path.ends_with(".params") => {
                self.params.insert(path, inner);
            }
            JsonValue::Object(inner) => {
                if let KeyStatus::Refused(why) = key.status {
                    let message = format!("not supported: {why}; remove the section");
                    return self.problem(ConfigRule::Unsupported, &path, entry.position, message);
                }
                let section = keys::section(&path);
                if key.default == "null" {
                    self.set(&path, Value::Object(defaults(section)));
                }
                self.section(section, inner);
                if path == "comms_logger" {
                    // As in DeepSpeed, only the presence of this section counts.
                    let is_switched_off =
                        self.given.contains_key("comms_logger.enabled") && !self.bool("comms_logger.enabled");
                    if is_switched_off {
                        self.note(&path, "its presence enables it, as in DeepSpeed; without the section it is off");
                    }
                    self.set("comms_logger.enabled", Value::Bool(true));
                }
            }
            _ => {
                let message = format!(
                    "expected {}, found {}",
                    value_conversion::describe_kind(ConfigValueKind::Section),
                    value_conversion::describe_value(&entry.node)
                );
                self.problem(ConfigRule::Type, &path, entry.node.position, message);
            }
        }
    }

    fn unknown(&mut self, section: &'static ConfigSection, entry: &JsonEntry, path: String) {
        let is_comment =
            section.path.is_empty() && ["_", "//", "comment"].iter().any(|start| entry.key.starts_with(start));
        if is_comment {
            self.note(&path, "a comment: ignored");
        } else if section.checked {
            // Comparing a name with every key is slow: a file with only unknown keys would take minutes.
            const MAX_SUGGESTIONS: usize = 1000;
            let (rule, message) = if self.problems.len() < MAX_SUGGESTIONS {
                suggest::advice(section, &entry.key)
            } else {
                (ConfigRule::UnknownKey, "no such key here".to_string())
            };
            self.problem(rule, &path, entry.position, message);
        }
    }

    /// Translates a deprecated key.
    fn translate(&mut self, section: &'static ConfigSection, key: &ConfigKey, entry: &JsonEntry, to: &'static str) {
        let path = section.join(key.name);
        let value = match value_conversion::convert(&entry.node, key, section.lenient) {
            Ok(value) => value,
            Err((rule, message)) => return self.problem(rule, &path, entry.node.position, message),
        };
        let target = section.join(to.split('.').next().unwrap_or(to));
        if self.given.contains_key(&target) && target.starts_with("zero_optimization.") {
            let message = format!("deprecated, and its new form `{target}` is given too; remove this one");
            return self.problem(ConfigRule::Conflict, &path, entry.position, message);
        }
        match (key.name, value) {
            ("cpu_offload" | "cpu_offload_param", Value::Bool(on)) => {
                let device = if on { "cpu" } else { "none" };
                self.note(&path, format!("deprecated: treated as `{}` = \"{device}\"", section.join(to)));
                if on {
                    let mut offload = defaults(keys::section(&target));
                    offload.insert("device".into(), device.into());
                    self.set(&target, Value::Object(offload));
                }
            }
            ("stage3_gather_fp16_weights_on_model_save", value) => {
                self.note(&path, format!("deprecated: treated as `{target}`"));
                if let (Some(key), true) = (section.key(to), value == Value::Bool(true)) {
                    self.check_status(key, &target, &value, entry);
                }
                self.set(&target, value);
            }
            // `allgather_size` is read by `bare_zero`.
            _ => {}
        }
    }

    /// Reads `zero_optimization: true` as stage 1 with `allgather_size` as its `allgather_bucket_size`, and `false` as
    /// stage 0.
    fn bare_zero(&mut self, entries: &[JsonEntry]) {
        let find = |name: &str| entries.iter().find(|entry| entry.key == name);
        let bare = match find("zero_optimization").map(|entry| &entry.node.value) {
            Some(JsonValue::Bool(on)) => Some(*on),
            _ => None,
        };
        if let Some(on) = bare {
            let stage = u8::from(on);
            self.note("zero_optimization", format!("deprecated form: treated as {{\"stage\": {stage}}}"));
            self.set("zero_optimization.stage", stage.into());
        }
        let Some(entry) = find("allgather_size") else { return };
        let Some(key) = keys::section("").key("allgather_size") else { return };
        match (bare, value_conversion::convert(&entry.node, key, false)) {
            (Some(true), Ok(size)) => {
                self.note("allgather_size", "deprecated: treated as `zero_optimization.allgather_bucket_size`");
                self.set("zero_optimization.allgather_bucket_size", size);
            }
            // A value that does not fit has already been reported.
            (_, Err(_)) => {}
            _ => self.note("allgather_size", "accepted, but has no effect: it belongs to `zero_optimization: true`"),
        }
    }

    /// Adds the single note or refusal for a section that is treated as a whole.
    fn note_section(&mut self, section: &ConfigSection) {
        let values = self.get(section.path).and_then(Value::as_object).cloned().unwrap_or_default();
        let is_on = match section.switch {
            Some(switch) => values.get(switch) == Some(&Value::Bool(true)),
            None => section.keys.iter().any(|key| {
                key.kind != ConfigValueKind::Section
                    && key.default_value().is_some_and(|v| values.get(key.name) != Some(&v))
            }),
        };
        match section.status {
            KeyStatus::NoEffect(why) if is_on => {
                self.note(section.path, format!("accepted, but has no effect here: {why}"))
            }
            KeyStatus::Refused(why) if is_on => {
                let path = join(section.path, section.switch.unwrap_or_default());
                let position = self.position(&path);
                self.problem(ConfigRule::Unsupported, &path, position, unsupported(&Value::Bool(true), why));
            }
            _ => {
                if let Some(note) = section.when_off
                    && !self.notes.iter().any(|n| n.path.starts_with(section.path))
                {
                    self.note(section.path, note);
                }
            }
        }
    }

    /// Adds a problem.
    pub fn problem(
        &mut self,
        rule: ConfigRule,
        path: &str,
        position: Option<TextPosition>,
        message: impl Into<String>,
    ) {
        self.problems.push(ConfigProblem { rule, path: path.into(), position, message: message.into() });
    }

    /// Adds a note.
    pub fn note(&mut self, path: &str, message: impl Into<String>) {
        self.notes.push(ConfigNote { path: path.into(), message: message.into() });
    }

    /// Returns the position of a key in the file.
    pub fn position(&self, path: &str) -> Option<TextPosition> {
        self.given.get(path).copied().flatten()
    }

    /// Returns the value at a path.
    pub fn get(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        let first = self.tree.get(names.next()?)?;
        names.try_fold(first, |value, name| value.get(name))
    }

    /// Sets the value at a path. Missing parents are created.
    pub fn set(&mut self, path: &str, value: Value) {
        set(&mut self.tree, path, value);
    }

    /// Returns the value of a boolean key.
    pub fn bool(&self, path: &str) -> bool {
        self.get(path).and_then(Value::as_bool).unwrap_or_else(|| panic!("{path} is a boolean in the table"))
    }

    /// Returns the value of an integer key, or `None` for null and for a required key that is absent.
    pub fn int(&self, path: &str) -> Option<i64> {
        self.get(path).and_then(Value::as_i64)
    }

    /// Returns the value of an integer key that has a default and is at least 0.
    pub fn count(&self, path: &str) -> u64 {
        self.get(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} is a count in the table"))
    }

    /// Returns the value of a number key that has a default.
    pub fn float(&self, path: &str) -> f64 {
        self.get(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is a number in the table"))
    }

    /// Returns the value of a key that holds a list of strings. The list is empty if the key's section is absent.
    pub fn strings(&self, path: &str) -> Vec<String> {
        let strings = self.get(path).and_then(Value::as_array).into_iter().flatten();
        strings.filter_map(|value| value.as_str().map(String::from)).collect()
    }

    /// Returns the value of a string key, or `None` for null.
    pub fn str(&self, path: &str) -> Option<&str> {
        self.get(path).and_then(Value::as_str)
    }
}

/// Returns whether a section is switched off.
fn is_off(value: &JsonValue) -> bool {
    match value {
        JsonValue::Object(entries) => {
            entries.iter().any(|entry| entry.key == "enabled" && entry.node.value == JsonValue::Bool(false))
        }
        other => *other == JsonValue::Bool(false),
    }
}

fn unsupported(value: &Value, why: &str) -> String {
    format!("{value} is not supported: {why}")
}

/// Sets the value at a path. Parents that are missing or are not objects become objects.
pub(crate) fn set(tree: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            tree.insert(path.into(), value);
        }
        Some((first, rest)) => {
            let inner = tree.entry(first).or_insert_with(|| Value::Object(Map::new()));
            if !inner.is_object() {
                *inner = Value::Object(Map::new());
            }
            if let Value::Object(map) = inner {
                set(map, rest, value);
            }
        }
    }
}

/// Returns the defaults of a section and of its nested sections.
pub(crate) fn defaults(section: &ConfigSection) -> Map<String, Value> {
    let mut map = Map::new();
    for key in section.keys {
        let Some(default) = key.default_value() else { continue };
        let path = section.join(key.name);
        let value = match (key.kind, &default) {
            (ConfigValueKind::Section, Value::Object(_)) if key.name != "params" => {
                Value::Object(defaults(keys::section(&path)))
            }
            _ => default,
        };
        map.insert(key.name.into(), value);
    }
    map
}
