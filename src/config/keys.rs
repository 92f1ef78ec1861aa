//! The single table of configuration keys, those of DeepSpeed and those specific to candle-zero: path, type, default,
//! meaning and treatment.
//!
//! Everything else reads it: the walk over a file, the suggestions for a misspelt key, the printed configuration and
//! docs/config.md. The defaults of DeepSpeed's keys are those in the source of DeepSpeed 0.19.8.

mod key;
mod optim;
mod other_sections;
mod shorthand;
mod top_level;
mod zero;

pub(crate) use key::{ConfigKey, ConfigSection, ConfigValueKind, KeyStatus, NO_DEFAULT, join};

/// Returns all sections. The root is the first.
pub(crate) fn sections() -> impl Iterator<Item = &'static ConfigSection> {
    [top_level::SECTIONS, zero::SECTIONS, optim::SECTIONS, other_sections::SECTIONS].into_iter().flatten()
}

/// Returns the section at a path, which must exist. For a section whose keys depend on a type, see [`typed_section`].
pub(crate) fn section(path: &str) -> &'static ConfigSection {
    sections()
        .find(|section| section.path == path && section.types.is_empty())
        .unwrap_or_else(|| panic!("the table has no section {path}"))
}

/// Returns the parameters of one type of optimizer or schedule, by its exact name.
pub(crate) fn typed_section(path: &str, type_name: &str) -> Option<&'static ConfigSection> {
    sections().find(|section| section.path == path && section.types.contains(&type_name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::value_conversion;

    #[test]
    fn every_default_parses_and_is_of_its_kind() {
        for section in sections() {
            for key in section.keys {
                let Some(default) = key.default_value() else { continue };
                if !default.is_null() && key.kind != ConfigValueKind::Section {
                    let node = crate::config::json_node::JsonNode::from_value(&default);
                    let converted = value_conversion::convert(&node, key, false);
                    assert_eq!(converted.as_ref(), Ok(&default), "{}", section.join(key.name));
                }
            }
        }
    }

    #[test]
    fn no_name_stands_twice_in_a_section_and_every_object_has_a_table() {
        for section in sections() {
            let mut names: Vec<&str> = section.keys.iter().flat_map(|k| [&[k.name], k.aliases].concat()).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{}", section.path);
            for key in section.keys.iter().filter(|key| key.kind == ConfigValueKind::Section) {
                let path = section.join(key.name);
                assert!(sections().any(|s| s.path == path), "{path} has no table");
            }
        }
    }

    #[test]
    fn every_section_hangs_under_a_key() {
        for section in sections().filter(|section| !section.path.is_empty()) {
            let (parent, name) = section.path.rsplit_once('.').unwrap_or(("", section.path));
            let found =
                sections().any(|s| s.path == parent && s.key(name).is_some_and(|k| k.kind == ConfigValueKind::Section));
            assert!(found, "{}", section.path);
        }
    }
}
