//! Converts a value in a file to the value of a key: types, lax forms, bounds.

use super::ConfigRule;
use super::json_node::{JsonNode, JsonValue};
use super::keys::{ConfigKey, ConfigValueKind};
use super::note::printable;
use serde_json::Value;

/// The reason why a value does not fit its key.
pub(crate) type ValueMismatch = (ConfigRule, String);

/// Returns the value in its plain form (`5e8` as 500000000), or the reason why it does not fit.
///
/// All sections accept 0 and 1 for a boolean. With `lenient`, pydantic's lax forms are also accepted, such as `"3"` for
/// an integer, and `"true"` and `"on"` for a boolean.
pub(crate) fn convert(node: &JsonNode, key: &ConfigKey, lenient: bool) -> Result<Value, ValueMismatch> {
    if node.value == JsonValue::Null && key.default == "null" {
        return Ok(Value::Null);
    }
    convert_kind(node, key.kind, lenient)
}

fn convert_kind(node: &JsonNode, kind: ConfigValueKind, lenient: bool) -> Result<Value, ValueMismatch> {
    let mismatch =
        || Err((ConfigRule::Type, format!("expected {}, found {}", describe_kind(kind), describe_value(node))));
    match kind {
        ConfigValueKind::Bool => boolean(node, lenient).map_or_else(mismatch, |b| Ok(Value::Bool(b))),
        ConfigValueKind::Int(min, max) | ConfigValueKind::IntNoBool(min, max) => {
            let bool_is_one = lenient && matches!(kind, ConfigValueKind::Int(..));
            match integer(node, lenient, bool_is_one) {
                None => match &node.value {
                    JsonValue::Long(digits) => {
                        let bound =
                            if digits.starts_with('-') { format!("{min} or more") } else { format!("at most {max}") };
                        Err((ConfigRule::Range, format!("expected {bound}, found {}", printable(digits))))
                    }
                    _ => mismatch(),
                },
                Some(i) if (min..=max).contains(&i) => Ok(Value::from(i)),
                Some(i) => Err((ConfigRule::Range, format!("expected {}, found {i}", int_range(min, max)))),
            }
        }
        ConfigValueKind::Float(min, max) => match float(node, lenient) {
            None => mismatch(),
            Some(x) if (min..=max).contains(&x) => Ok(Value::from(x)),
            Some(x) => Err((ConfigRule::Range, format!("expected {}, found {x}", float_range(min, max)))),
        },
        ConfigValueKind::PerGroup(min, max) => match &node.value {
            JsonValue::List(items) => {
                let convert_item = |item| convert_kind(item, ConfigValueKind::Float(min, max), lenient);
                let mut numbers = items.iter().map(convert_item).collect::<Result<Vec<_>, _>>()?;
                match numbers.len() {
                    0 => Err((
                        ConfigRule::Range,
                        "found an empty list; give a number, or one for each parameter group".into(),
                    )),
                    1 => Ok(numbers.remove(0)),
                    _ => Ok(Value::from(numbers)),
                }
            }
            _ => convert_kind(node, ConfigValueKind::Float(min, max), lenient),
        },
        ConfigValueKind::Str => match &node.value {
            JsonValue::String(s) => Ok(Value::from(s.as_str())),
            _ => mismatch(),
        },
        ConfigValueKind::OneOf(words) | ConfigValueKind::OneOfAnyCase(words) => {
            let JsonValue::String(s) = &node.value else { return mismatch() };
            let any_case = matches!(kind, ConfigValueKind::OneOfAnyCase(_));
            let same = |word: &&&str| **word == s || (any_case && word.eq_ignore_ascii_case(s));
            words.iter().find(same).map(|word| Value::from(*word)).ok_or_else(|| {
                (ConfigRule::Range, format!("expected {}, found {}", describe_kind(kind), describe_value(node)))
            })
        }
        ConfigValueKind::Strings | ConfigValueKind::StringsOrOne => match (&node.value, strings(node)) {
            (JsonValue::String(s), _) if kind == ConfigValueKind::StringsOrOne => Ok(Value::from(vec![s.as_str()])),
            (_, Some(mut words)) => {
                if kind == ConfigValueKind::StringsOrOne {
                    let mut seen = std::collections::HashSet::new();
                    words.retain(|word| seen.insert(*word));
                }
                Ok(Value::from(words))
            }
            _ => mismatch(),
        },
        ConfigValueKind::Betas => {
            let JsonValue::List(items) = &node.value else { return mismatch() };
            match items.iter().map(|item| float(item, lenient)).collect::<Option<Vec<_>>>().as_deref() {
                Some(&[a, b]) if [a, b].iter().all(|beta| (0.0..1.0).contains(beta)) => Ok(Value::from(vec![a, b])),
                Some(&[a, b]) => Err((
                    ConfigRule::Range,
                    format!("expected two numbers of at least 0 and below 1, found [{a}, {b}]"),
                )),
                _ => mismatch(),
            }
        }
        ConfigValueKind::AutoOr(inner) => match &node.value {
            JsonValue::String(s) if s == "auto" => Ok(Value::from("auto")),
            _ => convert_kind(node, *inner, lenient)
                .map_err(|(rule, text)| (rule, format!("{text}; \"auto\" is also allowed"))),
        },
        ConfigValueKind::Any => Ok(node.to_value()),
        // The walk enters objects itself.
        ConfigValueKind::Section => mismatch(),
    }
}

/// Returns the items of a list of strings.
fn strings(node: &JsonNode) -> Option<Vec<&str>> {
    let JsonValue::List(items) = &node.value else { return None };
    items
        .iter()
        .map(|item| match &item.value {
            JsonValue::String(s) => Some(s.as_str()),
            _ => None,
        })
        .collect()
}

fn boolean(node: &JsonNode, lenient: bool) -> Option<bool> {
    const TRUE_WORDS: [&str; 6] = ["1", "on", "t", "true", "y", "yes"];
    const FALSE_WORDS: [&str; 6] = ["0", "off", "f", "false", "n", "no"];
    match &node.value {
        JsonValue::Bool(b) => Some(*b),
        JsonValue::Int(i @ (0 | 1)) => Some(*i == 1),
        JsonValue::Float(x) if lenient && (*x == 0.0 || *x == 1.0) => Some(*x == 1.0),
        JsonValue::String(s) if lenient => {
            let is_one_of = |words: [&str; 6]| words.iter().any(|word| word.eq_ignore_ascii_case(s));
            if is_one_of(TRUE_WORDS) { Some(true) } else { is_one_of(FALSE_WORDS).then_some(false) }
        }
        _ => None,
    }
}

fn integer(node: &JsonNode, lenient: bool, bool_is_one: bool) -> Option<i64> {
    // 2^63, the first float above the range of i64.
    const END_OF_I64: f64 = 9_223_372_036_854_775_808.0;
    match &node.value {
        JsonValue::Int(i) => Some(*i),
        JsonValue::Float(x) if x.fract() == 0.0 && (-END_OF_I64..END_OF_I64).contains(x) => Some(*x as i64),
        JsonValue::Bool(b) if bool_is_one => Some(i64::from(*b)),
        JsonValue::String(s) if lenient => s.trim().parse().ok(),
        _ => None,
    }
}

fn float(node: &JsonNode, lenient: bool) -> Option<f64> {
    match &node.value {
        JsonValue::Int(i) => Some(*i as f64),
        JsonValue::Long(digits) => digits.parse().ok().filter(|x: &f64| x.is_finite()),
        JsonValue::Float(x) => Some(*x).filter(|x| x.is_finite()),
        JsonValue::String(s) if lenient => s.trim().parse().ok().filter(|x: &f64| x.is_finite()),
        _ => None,
    }
}

fn int_range(min: i64, max: i64) -> String {
    match (min, max) {
        (i64::MIN, i64::MAX) => "any whole number".into(),
        (min, i64::MAX) => format!("{min} or more"),
        (min, max) => format!("{min} to {max}"),
    }
}

fn float_range(min: f64, max: f64) -> String {
    match (min, max) {
        (min, f64::MAX) if min == f64::MIN => "any number".into(),
        (min, f64::MAX) => format!("{min} or more"),
        (min, max) => format!("{min} to {max}"),
    }
}

/// Describes the values that a kind accepts, for a message.
pub(crate) fn describe_kind(kind: ConfigValueKind) -> String {
    match kind {
        ConfigValueKind::Bool => "true or false".into(),
        ConfigValueKind::Int(i64::MIN, i64::MAX) | ConfigValueKind::IntNoBool(i64::MIN, i64::MAX) => {
            "a whole number".into()
        }
        ConfigValueKind::Int(min, max) | ConfigValueKind::IntNoBool(min, max) => {
            format!("a whole number ({})", int_range(min, max))
        }
        ConfigValueKind::Float(f64::MIN, f64::MAX) => "a number".into(),
        ConfigValueKind::Float(min, max) => format!("a number ({})", float_range(min, max)),
        ConfigValueKind::PerGroup(min, max) => {
            format!("{} or a list with one per parameter group", describe_kind(ConfigValueKind::Float(min, max)))
        }
        ConfigValueKind::Str => "a string".into(),
        ConfigValueKind::OneOf(words) => format!("one of {}", quoted(words)),
        ConfigValueKind::OneOfAnyCase(words) => format!("one of {} (case-insensitive)", quoted(words)),
        ConfigValueKind::Strings => "a list of strings".into(),
        ConfigValueKind::StringsOrOne => "a list of strings or one string".into(),
        ConfigValueKind::Betas => "a list of two numbers".into(),
        ConfigValueKind::AutoOr(inner) => format!("{} or \"auto\"", describe_kind(*inner)),
        ConfigValueKind::Any => "anything".into(),
        ConfigValueKind::Section => "an object `{...}`".into(),
    }
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

/// Describes the value found, for a message.
pub(crate) fn describe_value(node: &JsonNode) -> String {
    const MAX_SHOWN_CHARS: usize = 40;
    match &node.value {
        JsonValue::Null => "null".into(),
        JsonValue::Bool(b) => format!("{b}"),
        JsonValue::Int(i) => format!("the number {i}"),
        JsonValue::Long(digits) => format!("the number {}", printable(digits)),
        JsonValue::Float(x) => format!("the number {x}"),
        JsonValue::String(s) if s.chars().nth(MAX_SHOWN_CHARS).is_some() => {
            format!("the string \"{}...\"", s.chars().take(MAX_SHOWN_CHARS).collect::<String>().escape_debug())
        }
        JsonValue::String(s) => format!("the string \"{}\"", s.escape_debug()),
        JsonValue::List(items) => format!("a list of length {}", items.len()),
        JsonValue::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value, kind: ConfigValueKind, lenient: bool) -> Result<Value, String> {
        convert_kind(&JsonNode::from_value(&value), kind, lenient).map_err(|(_, text)| text)
    }

    const INT: ConfigValueKind = ConfigValueKind::Int(0, 3);

    #[test]
    fn whole_floats_are_whole_numbers_everywhere() {
        for lenient in [true, false] {
            assert_eq!(read(json!(2.0), INT, lenient), Ok(json!(2)));
            assert_eq!(read(json!(5e8), ConfigValueKind::Int(0, i64::MAX), lenient), Ok(json!(500_000_000)));
            assert!(read(json!(1.5), INT, lenient).is_err());
            assert!(read(json!(9.3e18), ConfigValueKind::Int(0, i64::MAX), lenient).is_err());
        }
    }

    #[test]
    fn lax_forms_hold_in_strict_sections_only() {
        assert_eq!(read(json!("2"), INT, true), Ok(json!(2)));
        assert_eq!(read(json!(true), INT, true), Ok(json!(1)));
        assert!(read(json!(true), ConfigValueKind::IntNoBool(0, 3), true).is_err());
        assert!(read(json!("5e8"), ConfigValueKind::Int(0, i64::MAX), true).is_err());
        assert_eq!(read(json!("False"), ConfigValueKind::Bool, true), Ok(json!(false)));
        assert_eq!(read(json!("ON"), ConfigValueKind::Bool, true), Ok(json!(true)));
        assert_eq!(read(json!("3"), ConfigValueKind::Float(0.0, 9.0), true), Ok(json!(3.0)));
        for value in [json!("2"), json!(true)] {
            assert!(read(value, INT, false).is_err());
        }
        assert!(read(json!("true"), ConfigValueKind::Bool, false).is_err());
        for value in [json!(2), json!("maybe"), Value::Null, json!([])] {
            assert!(read(value, ConfigValueKind::Bool, true).is_err());
        }
    }

    #[test]
    fn words_keep_the_case_of_the_table() {
        let kind = ConfigValueKind::OneOfAnyCase(&["fp32", "bf16"]);
        assert_eq!(read(json!("BF16"), kind, false), Ok(json!("bf16")));
        assert!(read(json!("CPU"), ConfigValueKind::OneOf(&["none", "cpu"]), true).is_err());
    }

    #[test]
    fn one_string_is_a_list_only_where_deepspeed_says_so() {
        assert_eq!(read(json!(["a", "b", "a"]), ConfigValueKind::StringsOrOne, true), Ok(json!(["a", "b"])));
        assert_eq!(read(json!("a"), ConfigValueKind::StringsOrOne, true), Ok(json!(["a"])));
        assert!(read(json!("a"), ConfigValueKind::AutoOr(&ConfigValueKind::Strings), false).is_err());
        assert!(read(json!(["a", 1]), ConfigValueKind::Strings, false).is_err());
    }

    #[test]
    fn a_list_for_one_parameter_group_is_its_number() {
        let kind = ConfigValueKind::PerGroup(0.0, f64::MAX);
        assert_eq!(read(json!([0.5]), kind, false), Ok(json!(0.5)));
        assert_eq!(read(json!(2), kind, false), Ok(json!(2.0)));
        assert_eq!(read(json!([1, 0.5]), kind, false), Ok(json!([1.0, 0.5])));
        for value in [json!([]), json!([-1]), json!(["x"]), json!([[0.5]]), json!("x")] {
            assert!(read(value.clone(), kind, false).is_err(), "{value}");
        }
    }

    #[test]
    fn betas_are_two_numbers_below_one() {
        assert_eq!(read(json!([0, 0.95]), ConfigValueKind::Betas, false), Ok(json!([0.0, 0.95])));
        for value in [json!([0.9, 1.0]), json!([-0.1, 0.9]), json!([0.9]), json!(0.9), json!([0.9, "x"])] {
            assert!(read(value.clone(), ConfigValueKind::Betas, false).is_err(), "{value}");
        }
    }
}
