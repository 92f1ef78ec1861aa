//! The rows of the table: keys, and sections of keys.

/// The kind of value that a key takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ConfigValueKind {
    Bool,
    /// A whole number between two bounds; `2.0` and `5e8` are whole.
    Int(i64, i64),
    /// As `Int`; pydantic's "true is 1" does not hold.
    IntNoBool(i64, i64),
    /// A finite number between two bounds.
    Float(f64, f64),
    /// As `Float`, or a list with one for each parameter group, of which there is one.
    PerGroup(f64, f64),
    Str,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// One of these words in any letter case; kept in the table's.
    OneOfAnyCase(&'static [&'static str]),
    /// A list of strings.
    Strings,
    /// A list of different strings, or one string.
    StringsOrOne,
    /// Adam's two decays.
    Betas,
    /// `"auto"`, or the other kind.
    AutoOr(&'static ConfigValueKind),
    /// Whatever; not looked into.
    Any,
    /// An object with a table of its own; with the default `null` it may be absent.
    Section,
}

/// The treatment of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyStatus {
    /// Does here what it does in DeepSpeed.
    Honoured,
    /// As the section says.
    OfSection,
    /// Another value than the default is noted.
    NoEffect(&'static str),
    /// Another value than the default is an error, because its silent loss would change training.
    Refused(&'static str),
    /// A number above 1 is an error.
    RefusedAbove1(&'static str),
    /// Its presence is an error, as in DeepSpeed 0.19.8.
    Removed(&'static str),
    /// The same unless it is switched off, which is noted.
    RemovedUnlessOff(&'static str),
    /// Another value than the default only asks for `activation_checkpointing.every_unit`, which is noted.
    AsEveryUnit(&'static str),
    /// A key of a section that is refused when it is on.
    OfRefused,
    /// Translated to another key, and noted.
    Moved(&'static str),
}

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConfigKey {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub kind: ConfigValueKind,
    /// JSON text; [`NO_DEFAULT`] where there is none.
    pub default: &'static str,
    pub status: KeyStatus,
    pub meaning: &'static str,
}

/// The mark of a key without a default: required, deprecated or removed.
pub(crate) const NO_DEFAULT: &str = "-";

/// One object of a configuration.
#[derive(Debug)]
pub(crate) struct ConfigSection {
    /// Path from the root; empty for the root.
    pub path: &'static str,
    /// The types that this table of parameters is for; empty where there is only one.
    pub types: &'static [&'static str],
    /// DeepSpeed reads it with pydantic: lax number forms, and `"auto"` means the default.
    pub strict: bool,
    /// Whether its contents are looked at. False: it cannot change training and is ignored whole.
    pub checked: bool,
    /// The treatment of the section when it is on.
    pub status: KeyStatus,
    /// The key that switches it on; without one it is on as soon as a value differs from its default.
    pub switch: Option<&'static str>,
    /// A note, given once when the section is present but not on.
    pub when_off: Option<&'static str>,
    pub keys: &'static [ConfigKey],
}

impl ConfigSection {
    /// A section whose keys are judged one by one.
    pub(super) const fn new(path: &'static str, strict: bool, keys: &'static [ConfigKey]) -> Self {
        Self {
            path,
            types: &[],
            strict,
            checked: true,
            status: KeyStatus::Honoured,
            switch: None,
            when_off: None,
            keys,
        }
    }

    pub(super) const fn status(mut self, status: KeyStatus) -> Self {
        self.status = status;
        self
    }

    pub(super) const fn switch(mut self, key: &'static str) -> Self {
        self.switch = Some(key);
        self
    }

    pub(super) const fn when_off(mut self, note: &'static str) -> Self {
        self.when_off = Some(note);
        self
    }

    pub(super) const fn unchecked(mut self) -> Self {
        self.checked = false;
        self
    }

    pub(super) const fn types(mut self, types: &'static [&'static str]) -> Self {
        self.types = types;
        self
    }

    /// The key of that name or alias.
    pub fn key(&self, name: &str) -> Option<&'static ConfigKey> {
        self.keys.iter().find(|key| key.name == name || key.aliases.contains(&name))
    }

    /// Path of one of its keys.
    pub fn join(&self, name: &str) -> String {
        join(self.path, name)
    }
}

/// `section.name`, or `name` at the root.
pub(crate) fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_string() } else { format!("{section}.{name}") }
}

impl ConfigKey {
    /// The default as a value; `None` where there is none.
    pub fn default_value(&self) -> Option<serde_json::Value> {
        (self.default != NO_DEFAULT)
            .then(|| serde_json::from_str(self.default).unwrap_or_else(|e| panic!("default of {}: {e}", self.name)))
    }
}

/// Rows of the table: `"name" | "alias": kind, default, status, meaning;`
macro_rules! keys {
    ($($name:literal $(| $alias:literal)*: $kind:expr, $default:literal, $status:expr, $meaning:literal;)*) => {
        &[$(crate::config::keys::key::ConfigKey {
            name: $name,
            aliases: &[$($alias),*],
            kind: $kind,
            default: $default,
            status: $status,
            meaning: $meaning,
        }),*]
    };
}
pub(crate) use keys;
