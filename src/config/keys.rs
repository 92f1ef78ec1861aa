//! The one table of DeepSpeed's keys: path, type, default, meaning, and what becomes of each here.
//!
//! Everything else reads it: the walk over a file, the nearest known key of a misspelt one, the printed configuration
//! and docs/config.md. Defaults are those of DeepSpeed 0.19.8's source.

mod core;
mod optim;
mod other;
mod zero;

/// The kind of value that a key takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
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
    AutoOr(&'static Kind),
    /// Whatever; not looked into.
    Any,
    /// An object with a table of its own; with the default `null` it may be absent.
    Section,
}

/// What becomes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Does here what it does in DeepSpeed.
    Honoured,
    /// As the section says.
    OfSection,
    /// Another value than the default is noted.
    NoEffect(&'static str),
    /// Another value than the default is noted.
    NotYet(&'static str),
    /// Another value than the default is an error, because its silent loss would change training.
    Refused(&'static str),
    /// A number above 1 is an error.
    RefusedAbove1(&'static str),
    /// Its presence is an error, as in DeepSpeed 0.19.8.
    Removed(&'static str),
    /// The same unless it is switched off, which is noted.
    RemovedUnlessOff(&'static str),
    /// Translated to another key, and noted.
    Moved(&'static str),
}

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub kind: Kind,
    /// JSON text; [`NO_DEFAULT`] where there is none.
    pub default: &'static str,
    pub status: Status,
    pub meaning: &'static str,
}

/// The mark of a key without a default: required, deprecated or removed.
pub(crate) const NO_DEFAULT: &str = "-";

/// One object of a configuration.
#[derive(Debug)]
pub(crate) struct Section {
    /// Path from the root; empty for the root.
    pub path: &'static str,
    /// The types that this table of parameters is for; empty where there is only one.
    pub types: &'static [&'static str],
    /// DeepSpeed reads it with pydantic: lax number forms, and `"auto"` means the default.
    pub strict: bool,
    /// Whether its contents are looked at. False: it cannot change training and is ignored whole.
    pub checked: bool,
    /// What becomes of the section when it is on.
    pub status: Status,
    /// The key that switches it on; without one it is on as soon as a value differs from its default.
    pub switch: Option<&'static str>,
    /// Said once when the section is there but not on.
    pub when_off: Option<&'static str>,
    pub keys: &'static [Key],
}

impl Section {
    /// A section whose keys speak for themselves.
    const fn new(path: &'static str, strict: bool, keys: &'static [Key]) -> Self {
        Self { path, types: &[], strict, checked: true, status: Status::Honoured, switch: None, when_off: None, keys }
    }

    const fn status(mut self, status: Status) -> Self {
        self.status = status;
        self
    }

    const fn switch(mut self, key: &'static str) -> Self {
        self.switch = Some(key);
        self
    }

    const fn when_off(mut self, note: &'static str) -> Self {
        self.when_off = Some(note);
        self
    }

    const fn unchecked(mut self) -> Self {
        self.checked = false;
        self
    }

    const fn types(mut self, types: &'static [&'static str]) -> Self {
        self.types = types;
        self
    }

    /// The key of that name or alias.
    pub fn key(&self, name: &str) -> Option<&'static Key> {
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

impl Key {
    /// The default as a value; `None` where there is none.
    pub fn default_value(&self) -> Option<serde_json::Value> {
        (self.default != NO_DEFAULT)
            .then(|| serde_json::from_str(self.default).unwrap_or_else(|e| panic!("default of {}: {e}", self.name)))
    }
}

/// All sections; the root is the first.
pub(crate) fn sections() -> impl Iterator<Item = &'static Section> {
    [core::SECTIONS, zero::SECTIONS, optim::SECTIONS, other::SECTIONS].into_iter().flatten()
}

/// The section of that path. Sections with types are found by [`typed_section`].
pub(crate) fn section(path: &str) -> &'static Section {
    sections()
        .find(|section| section.path == path && section.types.is_empty())
        .unwrap_or_else(|| panic!("the table has no section {path}"))
}

/// The parameters of one type of optimizer or schedule, by its exact name.
pub(crate) fn typed_section(path: &str, of_type: &str) -> Option<&'static Section> {
    sections().find(|section| section.path == path && section.types.contains(&of_type))
}

/// Rows of the table: `"name" | "alias": kind, default, status, meaning;`
macro_rules! keys {
    ($($name:literal $(| $alias:literal)*: $kind:expr, $default:literal, $status:expr, $meaning:literal;)*) => {
        &[$(crate::config::keys::Key {
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

/// Short names for the tables.
mod short {
    pub(super) use super::Kind::{
        Any, AutoOr, Betas, Bool, OneOf, OneOfAnyCase, Section as Object, Str, Strings, StringsOrOne,
    };
    pub(super) use super::Status::{Honoured as H, OfSection as S};
    pub(super) use super::{Kind, Section, Status, keys};
    pub(super) const INT: Kind = Kind::Int(i64::MIN, i64::MAX);
    pub(super) const COUNT: Kind = Kind::Int(0, i64::MAX);
    pub(super) const POSITIVE: Kind = Kind::Int(1, i64::MAX);
    pub(super) const FLOAT: Kind = Kind::Float(f64::MIN, f64::MAX);
    pub(super) const NOT_NEGATIVE: Kind = Kind::Float(0.0, f64::MAX);
    pub(super) const RATE_PER_GROUP: Kind = Kind::PerGroup(0.0, f64::MAX);
    pub(super) const SHARE: Kind = Kind::Float(0.0, 1.0);
    pub(super) const DTYPE: Kind = OneOfAnyCase(&["fp32", "fp16", "bf16"]);

    pub(super) const fn none(why: &'static str) -> Status {
        Status::NoEffect(why)
    }
    pub(super) const fn yet(why: &'static str) -> Status {
        Status::NotYet(why)
    }
    pub(super) const fn refuse(why: &'static str) -> Status {
        Status::Refused(why)
    }
    pub(super) const fn above1(why: &'static str) -> Status {
        Status::RefusedAbove1(why)
    }
    pub(super) const fn gone(why: &'static str) -> Status {
        Status::Removed(why)
    }
    pub(super) const fn gone_unless_off(why: &'static str) -> Status {
        Status::RemovedUnlessOff(why)
    }
    pub(super) const fn moved(to: &'static str) -> Status {
        Status::Moved(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::value;

    #[test]
    fn every_default_parses_and_is_of_its_kind() {
        for section in sections() {
            for key in section.keys {
                let Some(default) = key.default_value() else { continue };
                if !default.is_null() && key.kind != Kind::Section {
                    let node = crate::config::json::Node::from_value(&default);
                    let read = value::convert(&node, key, false);
                    assert_eq!(read.as_ref(), Ok(&default), "{}", section.join(key.name));
                }
            }
        }
    }

    #[test]
    fn no_name_stands_twice_in_a_section_and_every_object_has_a_table() {
        for section in sections() {
            let mut names: Vec<&str> = section.keys.iter().flat_map(|k| [&[k.name], k.aliases].concat()).collect();
            let before = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), before, "{}", section.path);
            for key in section.keys.iter().filter(|key| key.kind == Kind::Section) {
                let path = section.join(key.name);
                assert!(sections().any(|s| s.path == path), "{path} has no table");
            }
        }
    }

    #[test]
    fn every_section_hangs_under_a_key() {
        for section in sections().filter(|section| !section.path.is_empty()) {
            let (parent, name) = section.path.rsplit_once('.').unwrap_or(("", section.path));
            let found = sections().any(|s| s.path == parent && s.key(name).is_some_and(|k| k.kind == Kind::Section));
            assert!(found, "{}", section.path);
        }
    }
}
