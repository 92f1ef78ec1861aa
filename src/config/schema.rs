//! Generates a JSON Schema of the configuration from the table of keys, for editors.

use super::keys::{ConfigKey, ConfigSection, ConfigValueKind, KeyStatus, NO_DEFAULT, section, sections};
use serde_json::{Map, Value, json};

/// Returns a JSON Schema (draft 2020-12) of the configuration: every key with its type, bounds, default and meaning.
///
/// The schema describes plain forms and `"auto"`. Files may contain more than it describes: sections that
/// docs/config.md marks as lenient also accept `"3"` for 3 and `"true"` for true. Rules between keys are not part of
/// the schema; `zerorun check` checks them all.
pub fn json_schema() -> Value {
    let mut root = object(section(""));
    let defs = sections().skip(1).map(|section| (name(section), definition(section))).collect::<Map<_, _>>();
    let head = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of candle-zero: DeepSpeed 0.19.8's JSON",
        // A comment in the configuration.
        "patternProperties": {"^(_|//|comment)": true},
        "$defs": defs,
    });
    extend(&mut root, head);
    root
}

/// Returns the name of a section's definition. For a table of parameters, the name ends in the first of the types that
/// the table describes.
fn name(section: &ConfigSection) -> String {
    match section.types.first() {
        Some(type_name) => format!("{}.{type_name}", section.path),
        None => section.path.to_string(),
    }
}

fn definition(section: &'static ConfigSection) -> Value {
    let mut schema = object(section);
    let params = format!("{}.params", section.path);
    let choices: Vec<&ConfigSection> = sections().filter(|s| s.path == params && !s.types.is_empty()).collect();
    if !choices.is_empty() {
        select_params_by_type(&mut schema, section, &choices);
    }
    if section.path == "zero_optimization" {
        schema["type"] = json!(["object", "boolean"]);
    }
    schema
}

/// Returns the schema of an object that has the keys of a section and no others.
fn object(section: &'static ConfigSection) -> Value {
    let mut properties = Map::new();
    for key in section.keys {
        properties.insert(key.name.into(), property(section, key));
        for alias in key.aliases {
            let mut schema = property(section, key);
            schema["description"] = format!("The same as `{}`.", key.name).into();
            properties.insert((*alias).into(), schema);
        }
    }
    json!({"type": "object", "properties": properties, "additionalProperties": !section.checked})
}

/// Makes the type select the table of parameters. Optimizer names match in any letter case.
fn select_params_by_type(schema: &mut Value, section: &ConfigSection, choices: &[&ConfigSection]) {
    let one = |name: &&str| {
        if section.path == "optimizer" {
            let any_case = |c: char| format!("[{}{}]", c.to_ascii_lowercase(), c.to_ascii_uppercase());
            let letters = name.chars().map(|c| if c.is_ascii_alphabetic() { any_case(c) } else { c.to_string() });
            json!({"pattern": format!("^{}$", letters.collect::<String>())})
        } else {
            json!({"const": name})
        }
    };
    let names: Vec<&str> = choices.iter().flat_map(|choice| choice.types).copied().collect();
    let mut forms = vec![json!({"enum": names})];
    if section.path == "optimizer" {
        forms.extend(names.iter().map(one));
    }
    schema["properties"]["type"]["anyOf"] = forms.into();
    schema["required"] = json!(["type"]);
    // The type decides which keys `params` may have.
    schema["properties"]["params"] = json!({"type": "object", "description": "The parameters of this type."});
    let branches = choices.iter().map(|choice| {
        let types = choice.types.iter().map(one).collect::<Vec<_>>();
        json!({
            "if": {"properties": {"type": {"anyOf": types}}},
            "then": {"properties": {"params": reference(choice)}},
        })
    });
    schema["allOf"] = branches.collect();
}

fn reference(section: &ConfigSection) -> Value {
    json!({"$ref": format!("#/$defs/{}", name(section))})
}

fn property(section: &'static ConfigSection, key: &'static ConfigKey) -> Value {
    let mut schema = if key.kind == ConfigValueKind::Section {
        let path = section.join(key.name);
        let inner = sections().find(|s| s.path == path && s.types.is_empty()).map_or_else(|| json!({}), reference);
        if key.default == "null" { json!({"anyOf": [inner, {"type": "null"}]}) } else { inner }
    } else if !section.checked || key.kind == ConfigValueKind::Any {
        // Not checked.
        json!({})
    } else {
        let mut forms = vec![value(key.kind)];
        if key.default == "null" {
            forms.push(json!({"type": "null"}));
        }
        // A required name has no default that `"auto"` could select.
        let is_required_name = key.default == NO_DEFAULT && key.kind == ConfigValueKind::Str;
        if !is_required_name && !matches!(key.kind, ConfigValueKind::AutoOr(_)) {
            forms.push(json!({"const": "auto"}));
        }
        if forms.len() == 1 { forms.remove(0) } else { json!({"anyOf": forms}) }
    };
    schema["description"] = description(key).into();
    if let Some(default) = key.default_value() {
        schema["default"] = default;
    }
    if matches!(key.status, KeyStatus::Removed(_) | KeyStatus::RemovedUnlessOff(_) | KeyStatus::Moved(_)) {
        schema["deprecated"] = true.into();
    }
    schema
}

/// Returns the schema of the values that a kind accepts, without `null`, and without `"auto"` except for `AutoOr`.
fn value(kind: ConfigValueKind) -> Value {
    let strings = json!({"type": "array", "items": {"type": "string"}});
    match kind {
        ConfigValueKind::Bool => json!({"type": "boolean"}),
        ConfigValueKind::Int(min, max) | ConfigValueKind::IntNoBool(min, max) => {
            let mut schema = json!({"type": "integer"});
            bound(&mut schema, "minimum", (min != i64::MIN).then(|| min.into()));
            bound(&mut schema, "maximum", (max != i64::MAX).then(|| max.into()));
            schema
        }
        ConfigValueKind::Float(min, max) => {
            let mut schema = json!({"type": "number"});
            bound(&mut schema, "minimum", (min != f64::MIN).then(|| min.into()));
            bound(&mut schema, "maximum", (max != f64::MAX).then(|| max.into()));
            schema
        }
        ConfigValueKind::PerGroup(min, max) => {
            let number = value(ConfigValueKind::Float(min, max));
            json!({"anyOf": [number, {"type": "array", "items": number, "minItems": 1}]})
        }
        ConfigValueKind::Str => json!({"type": "string"}),
        ConfigValueKind::OneOf(words) => json!({"enum": words}),
        ConfigValueKind::OneOfAnyCase(words) => {
            let cases = words.iter().flat_map(|word| [(*word).to_string(), word.to_lowercase(), word.to_uppercase()]);
            let mut all: Vec<String> = Vec::new();
            cases.for_each(|word| {
                if !all.contains(&word) {
                    all.push(word)
                }
            });
            json!({"enum": all})
        }
        ConfigValueKind::Strings => strings,
        ConfigValueKind::StringsOrOne => json!({"anyOf": [strings, {"type": "string"}]}),
        ConfigValueKind::Betas => {
            let beta = json!({"type": "number", "minimum": 0, "exclusiveMaximum": 1});
            json!({"type": "array", "items": beta, "minItems": 2, "maxItems": 2})
        }
        ConfigValueKind::AutoOr(inner) => json!({"anyOf": [value(*inner), {"const": "auto"}]}),
        ConfigValueKind::Any | ConfigValueKind::Section => json!({}),
    }
}

fn bound(schema: &mut Value, word: &str, limit: Option<Value>) {
    if let Some(limit) = limit {
        schema[word] = limit;
    }
}

/// Returns the meaning of a key and, unless the key is honoured or treated with its section, its treatment.
fn description(key: &ConfigKey) -> String {
    let meaning = key.meaning;
    match key.status {
        KeyStatus::Honoured | KeyStatus::Inherited | KeyStatus::InRefusedSection => meaning.to_string(),
        KeyStatus::ImpliesEveryUnit(why) => format!("{meaning} Treated as every_unit: {why}."),
        KeyStatus::NoEffect(why) => format!("{meaning} Has no effect here: {why}."),
        KeyStatus::Refused(why) => format!("{meaning} Only the default is accepted: {why}."),
        KeyStatus::RefusedAbove1(why) => format!("{meaning} More than 1 is refused: {why}."),
        KeyStatus::Removed(why) | KeyStatus::RemovedUnlessOff(why) => format!("{meaning} Refused: {why}."),
        KeyStatus::Moved(to) => format!("{meaning} Treated as `{to}`."),
    }
}

fn extend(schema: &mut Value, more: Value) {
    if let (Value::Object(schema), Value::Object(more)) = (schema, more) {
        schema.extend(more);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::hjson::read_object;
    use crate::config::json_node::JsonValue;
    use std::collections::BTreeSet;

    /// Returns the definition that a property refers to, by `$ref` or through `anyOf`.
    fn target<'a>(schema: &'a Value, property: &'a Value) -> Option<&'a Value> {
        let resolve = |value: &'a Value| value["$ref"].as_str().map(|path| &schema["$defs"][&path["#/$defs/".len()..]]);
        resolve(property).or_else(|| property["anyOf"].as_array()?.iter().find_map(resolve))
    }

    #[test]
    fn it_lists_exactly_the_keys_of_the_tables() {
        let schema = json_schema();
        for section in sections() {
            let object = if section.path.is_empty() { &schema } else { &schema["$defs"][&name(section)] };
            let listed: BTreeSet<&str> = object["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            let table = section.keys.iter().flat_map(|key| std::iter::once(&key.name).chain(key.aliases)).copied();
            assert_eq!(listed, table.collect(), "{}", section.path);
            assert_eq!(object["additionalProperties"], json!(!section.checked), "{}", section.path);
        }
        let definitions = schema["$defs"].as_object().unwrap();
        assert_eq!(definitions.len() + 1, sections().count(), "two tables have the same name");
    }

    #[test]
    fn every_section_is_reached_from_the_root() {
        let schema = json_schema();
        let text = schema.to_string();
        for definition in schema["$defs"].as_object().unwrap().keys() {
            assert!(text.contains(&format!("\"#/$defs/{definition}\"")), "{definition} is not used");
        }
        for section in sections().filter(|section| !section.path.is_empty() && section.types.is_empty()) {
            let mut node = &schema;
            for name in section.path.split('.') {
                node = target(&schema, &node["properties"][name]).unwrap_or_else(|| panic!("{}", section.path));
            }
            assert_eq!(*node, schema["$defs"][section.path], "{}", section.path);
        }
    }

    /// Checks that the schema has every key, and that each plain value has a type that the schema allows.
    fn walk(schema: &Value, object: &Value, entries: &JsonValue, path: &str) {
        let JsonValue::Object(entries) = entries else { panic!("{path} is not an object") };
        for entry in entries {
            let path = format!("{path}.{}", entry.key);
            let mut property = &object["properties"][&entry.key];
            assert!(property.is_object(), "the schema has no {path}");
            if entry.key == "params" {
                let Some(JsonValue::String(name)) = entries.iter().find(|e| e.key == "type").map(|e| &e.node.value)
                else {
                    panic!("{path} without a type")
                };
                let section = sections().find(|s| s.types.contains(&name.as_str())).unwrap();
                let is_branch = |branch: &&Value| branch["then"]["properties"]["params"] == reference(section);
                let branch = object["allOf"].as_array().unwrap().iter().find(is_branch);
                property = &branch.unwrap_or_else(|| panic!("no branch for {name}"))["then"]["properties"]["params"];
            }
            match (&entry.node.value, target(schema, property)) {
                (inner @ JsonValue::Object(_), Some(section)) => walk(schema, section, inner, &path),
                (JsonValue::Object(_), None) => panic!("{path} is an object"),
                (plain, _) => {
                    let expected: &[&str] = match plain {
                        JsonValue::Bool(_) => &["boolean"],
                        JsonValue::Int(_) | JsonValue::Long(_) => &["integer", "number"],
                        JsonValue::Float(_) => &["integer", "number"],
                        JsonValue::String(_) => &["string", "enum", "const"],
                        JsonValue::List(_) => &["array"],
                        JsonValue::Null | JsonValue::Object(_) => &["null"],
                    };
                    let text = property.to_string();
                    assert!(expected.iter().any(|word| text.contains(&format!("\"{word}\""))), "{path}: {text}");
                }
            }
        }
    }

    #[test]
    fn the_bundled_configurations_conform() {
        let schema = json_schema();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/ds_configs");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|end| end == "json") {
                let root = read_object(&std::fs::read(&path).unwrap()).unwrap();
                walk(&schema, &schema, &root.value, &path.display().to_string());
                files += 1;
            }
        }
        assert!(files >= 9, "{files} files");
    }

    #[test]
    fn bounds_words_defaults_and_meanings_are_those_of_the_table() {
        let schema = json_schema();
        let zero = &schema["$defs"]["zero_optimization"]["properties"];
        assert_eq!(zero["stage"]["anyOf"][0], json!({"type": "integer", "minimum": 0, "maximum": 3}));
        assert_eq!(zero["stage"]["default"], json!(0));
        let device = &schema["$defs"]["zero_optimization.offload_param"]["properties"]["device"];
        assert_eq!(device["anyOf"][0]["enum"], json!(["none", "cpu", "nvme"]));
        assert!(schema["properties"]["seed"]["description"].as_str().unwrap().contains("initial weights"));
        assert_eq!(schema["properties"]["amp"]["deprecated"], json!(true));
        assert_eq!(schema["properties"]["bfloat16"]["$ref"], json!("#/$defs/bf16"));
    }
}
