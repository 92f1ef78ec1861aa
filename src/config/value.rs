//! A value of a file as the value of a key: kinds, lax forms, bounds.

use super::Rule;
use super::keys::{Key, Kind};
use super::node::{Json, Node};
use super::note::shown;
use serde_json::Value;

/// Why a value does not fit its key.
pub(crate) type Misfit = (Rule, String);

/// The value in its plain form (`5e8` as 500000000), or why it does not fit.
///
/// Strict sections take pydantic's lax forms: `"3"` for a whole number, `"true"`, `"on"`, 0 and 1 for a boolean.
pub(crate) fn convert(node: &Node, key: &Key, strict: bool) -> Result<Value, Misfit> {
    if node.value == Json::Null && key.default == "null" {
        return Ok(Value::Null);
    }
    of_kind(node, key.kind, strict)
}

fn of_kind(node: &Node, kind: Kind, strict: bool) -> Result<Value, Misfit> {
    let wrong = || Err((Rule::Type, format!("{} is needed, {} found", needed(kind), found(node))));
    match kind {
        Kind::Bool => boolean(node, strict).map_or_else(wrong, |b| Ok(Value::Bool(b))),
        Kind::Int(min, max) | Kind::IntNoBool(min, max) => {
            let bool_is_one = strict && matches!(kind, Kind::Int(..));
            match integer(node, strict, bool_is_one) {
                None => match &node.value {
                    Json::Long(digits) => {
                        let bound =
                            if digits.starts_with('-') { format!("{min} or more") } else { format!("at most {max}") };
                        Err((Rule::Range, format!("{} found, allowed is {bound}", shown(digits))))
                    }
                    _ => wrong(),
                },
                Some(i) if (min..=max).contains(&i) => Ok(Value::from(i)),
                Some(i) => Err((Rule::Range, format!("{i} found, allowed is {}", int_range(min, max)))),
            }
        }
        Kind::Float(min, max) => match float(node, strict) {
            None => wrong(),
            Some(x) if (min..=max).contains(&x) => Ok(Value::from(x)),
            Some(x) => Err((Rule::Range, format!("{x} found, allowed is {}", float_range(min, max)))),
        },
        Kind::PerGroup(min, max) => match &node.value {
            Json::List(items) => {
                let of_group = |item| of_kind(item, Kind::Float(min, max), strict);
                let mut numbers = items.iter().map(of_group).collect::<Result<Vec<_>, _>>()?;
                match numbers.len() {
                    0 => {
                        Err((Rule::Range, "an empty list found: give a number, or one for each parameter group".into()))
                    }
                    1 => Ok(numbers.remove(0)),
                    _ => Ok(Value::from(numbers)),
                }
            }
            _ => of_kind(node, Kind::Float(min, max), strict),
        },
        Kind::Str => match &node.value {
            Json::String(s) => Ok(Value::from(s.as_str())),
            _ => wrong(),
        },
        Kind::OneOf(words) | Kind::OneOfAnyCase(words) => {
            let Json::String(s) = &node.value else { return wrong() };
            let any_case = matches!(kind, Kind::OneOfAnyCase(_));
            let same = |word: &&&str| **word == s || (any_case && word.eq_ignore_ascii_case(s));
            words
                .iter()
                .find(same)
                .map(|word| Value::from(*word))
                .ok_or_else(|| (Rule::Range, format!("{} found, allowed is {}", found(node), needed(kind))))
        }
        Kind::Strings | Kind::StringsOrOne => match (&node.value, strings(node)) {
            (Json::String(s), _) if kind == Kind::StringsOrOne => Ok(Value::from(vec![s.as_str()])),
            (_, Some(mut words)) => {
                if kind == Kind::StringsOrOne {
                    let mut seen = std::collections::HashSet::new();
                    words.retain(|word| seen.insert(*word));
                }
                Ok(Value::from(words))
            }
            _ => wrong(),
        },
        Kind::Betas => {
            let Json::List(items) = &node.value else { return wrong() };
            match items.iter().map(|item| float(item, strict)).collect::<Option<Vec<_>>>().as_deref() {
                Some(&[a, b]) if [a, b].iter().all(|beta| (0.0..1.0).contains(beta)) => Ok(Value::from(vec![a, b])),
                Some(&[a, b]) => Err((Rule::Range, format!("[{a}, {b}] found, each has to be at least 0 and below 1"))),
                _ => wrong(),
            }
        }
        Kind::AutoOr(inner) => match &node.value {
            Json::String(s) if s == "auto" => Ok(Value::from("auto")),
            _ => of_kind(node, *inner, strict).map_err(|(rule, text)| (rule, format!("{text}, or \"auto\""))),
        },
        Kind::Any => Ok(node.to_value()),
        // The walk goes into objects by itself.
        Kind::Section => wrong(),
    }
}

/// The items of a list of strings.
fn strings(node: &Node) -> Option<Vec<&str>> {
    let Json::List(items) = &node.value else { return None };
    items
        .iter()
        .map(|item| match &item.value {
            Json::String(s) => Some(s.as_str()),
            _ => None,
        })
        .collect()
}

fn boolean(node: &Node, strict: bool) -> Option<bool> {
    const YES: [&str; 6] = ["1", "on", "t", "true", "y", "yes"];
    const NO: [&str; 6] = ["0", "off", "f", "false", "n", "no"];
    match &node.value {
        Json::Bool(b) => Some(*b),
        Json::Int(i @ (0 | 1)) => Some(*i == 1),
        Json::Float(x) if strict && (*x == 0.0 || *x == 1.0) => Some(*x == 1.0),
        Json::String(s) if strict => {
            let among = |words: [&str; 6]| words.iter().any(|word| word.eq_ignore_ascii_case(s));
            if among(YES) { Some(true) } else { among(NO).then_some(false) }
        }
        _ => None,
    }
}

fn integer(node: &Node, strict: bool, bool_is_one: bool) -> Option<i64> {
    // 2^63: the first float beyond i64.
    const END: f64 = 9_223_372_036_854_775_808.0;
    match &node.value {
        Json::Int(i) => Some(*i),
        Json::Float(x) if x.fract() == 0.0 && (-END..END).contains(x) => Some(*x as i64),
        Json::Bool(b) if bool_is_one => Some(i64::from(*b)),
        Json::String(s) if strict => s.trim().parse().ok(),
        _ => None,
    }
}

fn float(node: &Node, strict: bool) -> Option<f64> {
    match &node.value {
        Json::Int(i) => Some(*i as f64),
        Json::Long(digits) => digits.parse().ok().filter(|x: &f64| x.is_finite()),
        Json::Float(x) => Some(*x).filter(|x| x.is_finite()),
        Json::String(s) if strict => s.trim().parse().ok().filter(|x: &f64| x.is_finite()),
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

/// The values that a kind accepts, as words of a message.
pub(crate) fn needed(kind: Kind) -> String {
    match kind {
        Kind::Bool => "true or false".into(),
        Kind::Int(i64::MIN, i64::MAX) | Kind::IntNoBool(i64::MIN, i64::MAX) => "a whole number".into(),
        Kind::Int(min, max) | Kind::IntNoBool(min, max) => format!("a whole number ({})", int_range(min, max)),
        Kind::Float(f64::MIN, f64::MAX) => "a number".into(),
        Kind::Float(min, max) => format!("a number ({})", float_range(min, max)),
        Kind::PerGroup(min, max) => {
            format!("{} or a list of one for each parameter group", needed(Kind::Float(min, max)))
        }
        Kind::Str => "a string".into(),
        Kind::OneOf(words) => format!("one of {}", quoted(words)),
        Kind::OneOfAnyCase(words) => format!("one of {} (in any letter case)", quoted(words)),
        Kind::Strings => "a list of strings".into(),
        Kind::StringsOrOne => "a list of strings, or one string,".into(),
        Kind::Betas => "a list of two numbers".into(),
        Kind::AutoOr(inner) => format!("{} or \"auto\"", needed(*inner)),
        Kind::Any => "anything".into(),
        Kind::Section => "an object `{...}`".into(),
    }
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

/// The value found, as words of a message.
pub(crate) fn found(node: &Node) -> String {
    const LONGEST: usize = 40;
    match &node.value {
        Json::Null => "null".into(),
        Json::Bool(b) => format!("{b}"),
        Json::Int(i) => format!("the number {i}"),
        Json::Long(digits) => format!("the number {}", shown(digits)),
        Json::Float(x) => format!("the number {x}"),
        Json::String(s) if s.chars().nth(LONGEST).is_some() => {
            format!("the string \"{}...\"", s.chars().take(LONGEST).collect::<String>().escape_debug())
        }
        Json::String(s) => format!("the string \"{}\"", s.escape_debug()),
        Json::List(items) => format!("a list of {}", items.len()),
        Json::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value, kind: Kind, strict: bool) -> Result<Value, String> {
        of_kind(&Node::from_value(&value), kind, strict).map_err(|(_, text)| text)
    }

    const INT: Kind = Kind::Int(0, 3);

    #[test]
    fn whole_floats_are_whole_numbers_everywhere() {
        for strict in [true, false] {
            assert_eq!(read(json!(2.0), INT, strict), Ok(json!(2)));
            assert_eq!(read(json!(5e8), Kind::Int(0, i64::MAX), strict), Ok(json!(500_000_000)));
            assert!(read(json!(1.5), INT, strict).is_err());
            assert!(read(json!(9.3e18), Kind::Int(0, i64::MAX), strict).is_err());
        }
    }

    #[test]
    fn lax_forms_hold_in_strict_sections_only() {
        assert_eq!(read(json!("2"), INT, true), Ok(json!(2)));
        assert_eq!(read(json!(true), INT, true), Ok(json!(1)));
        assert!(read(json!(true), Kind::IntNoBool(0, 3), true).is_err());
        assert!(read(json!("5e8"), Kind::Int(0, i64::MAX), true).is_err());
        assert_eq!(read(json!("False"), Kind::Bool, true), Ok(json!(false)));
        assert_eq!(read(json!("ON"), Kind::Bool, true), Ok(json!(true)));
        assert_eq!(read(json!("3"), Kind::Float(0.0, 9.0), true), Ok(json!(3.0)));
        for value in [json!("2"), json!(true)] {
            assert!(read(value, INT, false).is_err());
        }
        assert!(read(json!("true"), Kind::Bool, false).is_err());
        for value in [json!(2), json!("maybe"), Value::Null, json!([])] {
            assert!(read(value, Kind::Bool, true).is_err());
        }
    }

    #[test]
    fn words_keep_the_case_of_the_table() {
        let kind = Kind::OneOfAnyCase(&["fp32", "bf16"]);
        assert_eq!(read(json!("BF16"), kind, false), Ok(json!("bf16")));
        assert!(read(json!("CPU"), Kind::OneOf(&["none", "cpu"]), true).is_err());
    }

    #[test]
    fn one_string_is_a_list_only_where_deepspeed_says_so() {
        assert_eq!(read(json!(["a", "b", "a"]), Kind::StringsOrOne, true), Ok(json!(["a", "b"])));
        assert_eq!(read(json!("a"), Kind::StringsOrOne, true), Ok(json!(["a"])));
        assert!(read(json!("a"), Kind::AutoOr(&Kind::Strings), false).is_err());
        assert!(read(json!(["a", 1]), Kind::Strings, false).is_err());
    }

    #[test]
    fn a_list_for_one_parameter_group_is_its_number() {
        let kind = Kind::PerGroup(0.0, f64::MAX);
        assert_eq!(read(json!([0.5]), kind, false), Ok(json!(0.5)));
        assert_eq!(read(json!(2), kind, false), Ok(json!(2.0)));
        assert_eq!(read(json!([1, 0.5]), kind, false), Ok(json!([1.0, 0.5])));
        for value in [json!([]), json!([-1]), json!(["x"]), json!([[0.5]]), json!("x")] {
            assert!(read(value.clone(), kind, false).is_err(), "{value}");
        }
    }

    #[test]
    fn betas_are_two_numbers_below_one() {
        assert_eq!(read(json!([0, 0.95]), Kind::Betas, false), Ok(json!([0.0, 0.95])));
        for value in [json!([0.9, 1.0]), json!([-0.1, 0.9]), json!([0.9]), json!(0.9), json!([0.9, "x"])] {
            assert!(read(value.clone(), Kind::Betas, false).is_err(), "{value}");
        }
    }
}
