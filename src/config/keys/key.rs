//! The rows of the table of configuration keys ([`super`]): keys, and sections of keys.

/// The type of value that a key accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ConfigValueKind {
    Bool,
    /// An integer between two bounds; `2.0` and `5e8` count as integers.
    Int(i64, i64),
    /// The same as `Int`, but without pydantic's conversion of true to 1.
    IntNoBool(i64, i64),
    /// A finite number between two bounds.
    Float(f64, f64),
    /// The same as `Float`, or a list with one number per parameter group (the engine's builder defines the groups).
    PerGroup(f64, f64),
    Str,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// One of these words in any letter case. The value gets the table's spelling.
    OneOfAnyCase(&'static [&'static str]),
    /// A list of strings.
    Strings,
    /// A list of distinct strings, or one string.
    StringsOrOne,
    /// The two decay rates of Adam.
    Betas,
    /// `"auto"`, or a value of the given kind.
    AutoOr(&'static ConfigValueKind),
    /// Any value; not checked.
    Any,
    /// An object with its own table. It may be absent if the default is `null`.
    Section,
}

/// The treatment of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyStatus {
    /// The key has the same effect as in DeepSpeed, or is specific to candle-zero.
    Honoured,
    /// The section's status applies.
    Inherited,
    /// A value other than the default is noted.
    NoEffect(&'static str),
    /// A value other than the default is an error, because ignoring it would change training.
    Refused(&'static str),
    /// A number above 1 is an error.
    RefusedAbove1(&'static str),
    /// The key's presence is an error, as in DeepSpeed 0.19.8.
    Removed(&'static str),
    /// The same as `Removed`, unless the key is switched off, which is noted.
    RemovedUnlessOff(&'static str),
    /// A value other than the default is noted and only requests `activation_checkpointing.every_unit`.
    ImpliesEveryUnit(&'static str),
    /// A key of a section that is refused as a whole if the section is on.
    InRefusedSection,
    /// The key is translated to another key, with a note.
    Moved(&'static str),
}

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConfigKey {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub kind: ConfigValueKind,
    /// The default as JSON text, or [`NO_DEFAULT`].
    pub default: &'static str,
    pub status: KeyStatus,
    pub meaning: &'static str,
}

/// The mark of a key without a default. Such a key is required, deprecated or removed, or is not printed if absent.
pub(crate) const NO_DEFAULT: &str = "-";

/// One object of a configuration.
#[derive(Debug)]
pub(crate) struct ConfigSection {
    /// The path from the root; empty for the root.
    pub path: &'static str,
    /// The types of optimizer or schedule whose parameters this section lists; empty if its keys do not depend on a
    /// type.
    pub types: &'static [&'static str],
    /// Whether DeepSpeed reads the section with pydantic, which accepts lax number forms; `"auto"` then means the
    /// default.
    pub lenient: bool,
    /// Whether the section's contents are checked. If false, the section cannot change training and is ignored
    /// completely.
    pub checked: bool,
    /// The treatment of the section if it is on.
    pub status: KeyStatus,
    /// The key that switches the section on. Without one, the section is on if any value differs from its default.
    pub switch: Option<&'static str>,
    /// A note that is printed once if the section is present but not on.
    pub when_off: Option<&'static str>,
    pub keys: &'static [ConfigKey],
}

impl ConfigSection {
    /// Creates a section whose keys are treated one by one.
    pub(super) const fn new(path: &'static str, lenient: bool, keys: &'static [ConfigKey]) -> Self {
        Self {
            path,
            types: &[],
            lenient,
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

    /// Returns the key with that name or alias.
    pub fn key(&self, name: &str) -> Option<&'static ConfigKey> {
        self.keys.iter().find(|key| key.name == name || key.aliases.contains(&name))
    }

    /// Returns the path of one of the section's keys.
    pub fn join(&self, name: &str) -> String {
        join(self.path, name)
    }
}

/// Returns `section.name`, or `name` at the root.
pub(crate) fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_string() } else { format!("{section}.{name}") }
}

impl ConfigKey {
    /// Returns the default as a value, or `None` if the key has none.
    pub fn default_value(&self) -> Option<serde_json::Value> {
        (self.default != NO_DEFAULT)
            .then(|| serde_json::from_str(self.default).unwrap_or_else(|e| panic!("default of {}: {e}", self.name)))
    }
}

/// Builds rows of the table: `"name" | "alias": kind, default, status, meaning;`
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
