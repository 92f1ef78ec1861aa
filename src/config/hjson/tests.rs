//! Tests of the parser.
#![allow(clippy::unwrap_used)]

use super::{read as read_any, *};
use proptest::prelude::*;

fn read(bytes: &[u8]) -> Result<JsonNode> {
    read_any(bytes, false)
}

fn value(text: &str) -> serde_json::Value {
    read(text.as_bytes()).unwrap().to_value()
}

fn refusal(text: &str) -> String {
    match read_any(text.as_bytes(), !text.starts_with('[')).unwrap_err() {
        HjsonError::Syntax { position, expected, found } => format!("{position}: expected {expected}, found {found}"),
        HjsonError::Duplicate { path, first, second } => format!("duplicate {path}: {first} and {second}"),
    }
}

#[test]
fn every_key_and_value_knows_its_place() {
    let root = read(b"{\n  \"a\": 1,\r\n\t\"\xc3\xa4\": { \"b\": [2] }\n}").unwrap();
    let JsonValue::Object(entries) = &root.value else { panic!("an object") };
    let JsonValue::Object(inner) = &entries[1].node.value else { panic!("an object") };
    let at = |line, column| Some(TextPosition { line, column });
    assert_eq!([root.position, entries[0].position, entries[0].node.position], [at(1, 1), at(2, 3), at(2, 8)]);
    assert_eq!([entries[1].position, inner[0].position, inner[0].node.position], [at(3, 2), at(3, 9), at(3, 14)]);
}

#[test]
fn comments_and_trailing_commas_are_blank() {
    let text = "// c\n# d\n{ /* e * / */ \"a\": [1, 2,], # x\n \"b\": {\"c\": null,}, }\n# end";
    assert_eq!(value(text), serde_json::json!({"a": [1, 2], "b": {"c": null}}));
}

#[test]
fn what_hjson_leaves_out_is_understood() {
    let expected = serde_json::json!({"a": 1, "b": {"c": "x y, z", "d": [1, "two", 3.5]}, "e": null});
    for text in [
        "{ a: 1, b: { c: \"x y, z\", d: [1, \"two\", 3.5] }, e: null }",
        "a: 1\nb: {\n  c: x y, z\n  d: [\n    1\n    two\n    3.5\n  ]\n}\ne: null",
        "# c\na: 1 // d\nb: { 'c': 'x y, z' 'd': [1, 'two' 3.5] }\r\ne: null # f",
        "{\"a\": 1\n\"b\": {\"c\": x y, z\r\n\"d\": [1, '''two''', 3.5]}\n\"e\": null /* g */}",
    ] {
        assert_eq!(read_any(text.as_bytes(), true).unwrap().to_value(), expected, "{text}");
    }
    assert_eq!(
        read_any(b"{ train_batch_size: 8 }", true).unwrap().to_value(),
        serde_json::json!({"train_batch_size": 8})
    );
}

#[test]
fn a_string_without_quotes_is_its_line() {
    for (text, expected) in [
        ("a b  \n", "a b"),
        ("http://x/y # no comment\n", "http://x/y # no comment"),
        ("8 ranks, of 9\n", "8 ranks, of 9"),
        ("AdamW,\n", "AdamW,"),
        ("2024-01-01\n", "2024-01-01"),
        ("007\n", "007"),
        ("nullable\n", "nullable"),
        ("f(x) = {x} [y]\n", "f(x) = {x} [y]"),
        ("ä \"quoted\"", "ä \"quoted\""),
    ] {
        assert_eq!(value(&format!("{{k: {text}\n}}")), serde_json::json!({"k": expected}), "{text}");
        assert_eq!(
            read_any(format!("k: {text}").as_bytes(), true).unwrap().to_value(),
            serde_json::json!({"k": expected})
        );
    }
    for (text, expected) in
        [("8 # c\n", serde_json::json!(8)), ("true // c\n", true.into()), ("-1.5e3/*c*/\n", (-1500.0).into())]
    {
        assert_eq!(value(&format!("{{k: {text}}}")), serde_json::json!({"k": expected}), "{text}");
    }
}

#[test]
fn a_long_string_loses_its_indentation() {
    assert_eq!(value("{\n  k: '''\n     one\n       two\n     '''\n}"), serde_json::json!({"k": "one\n  two"}));
    assert_eq!(value("{k: '''it's \"so\"'''}"), serde_json::json!({"k": "it's \"so\""}));
    assert_eq!(value("{k: 'a \"b\" \\' c'}"), serde_json::json!({"k": "a \"b\" ' c"}));
}

#[test]
fn a_long_line_is_read_in_one_go() {
    let list = format!("[{}]", vec!["1"; 500_000].join(","));
    let JsonValue::List(items) = read(list.as_bytes()).unwrap().value else { panic!("a list") };
    assert_eq!(items.len(), 500_000);
    let text = format!("{{k: x{}\n}}", ", x".repeat(500_000));
    assert!(read(text.as_bytes()).is_ok());
}

#[test]
fn strings_and_numbers_are_those_of_json() {
    assert_eq!(value(r#""a\"\\\/\b\f\n\r\t\u00e4\ud83d\ude00""#), "a\"\\/\u{8}\u{c}\n\r\t\u{e4}\u{1f600}");
    for text in ["0", "-12", "9223372036854775807", "5e8", "-1.5E-3", "0.25", "1e+2"] {
        assert_eq!(value(text), serde_json::from_str::<serde_json::Value>(text).unwrap(), "{text}");
    }
    assert_eq!(value("18446744073709551615"), serde_json::json!(18_446_744_073_709_551_615_u64));
    assert_eq!(value("-9223372036854775809"), serde_json::json!(-9_223_372_036_854_775_809.0));
}

#[test]
fn a_duplicate_key_in_any_object_is_refused_with_both_places() {
    insta::assert_snapshot!(refusal("{\"a\": {\"b\": 1,\n \"c\": 2, \"\\u0062\": 3}}"), @"duplicate a.b: line 1, column 8 and line 2, column 10");
}

#[test]
fn a_syntax_error_says_where_and_what_was_expected() {
    let list: Vec<_> = [
        "",
        "{\"a\": 1 \"b\": 2}",
        "{\"a\" 1}",
        "{a 1}",
        "{\"a\": CONFIG_MIN}",
        "{\"a\": 01}",
        "{\"a\": 1.}",
        "{\"a\": 1e999}",
        "{\"a\": \"b\n\"}",
        "{\"a\": \"\\x\"}",
        "{\"a\": \"\\ud800\"}",
        "[1 2]",
        "{\"a\": 1} x",
        "{\"a\": NaN}",
        "/* open",
        "{\"a\": [1, 2",
        "{,}",
        "{a: 1,, b: 2}",
        "{\n  a: 1\n  b: {c: 2\n}",
        "a: 1\n}",
        "a",
        "{a: [1, 2}",
        "{a: [1\n b: 2}",
        "{a: {b: 1]}",
        "{a:\n  b: 1}",
        "{a: x, b: 2}",
        "{a: 1 b: 2\n}",
        "{a: true \"b\": 2\n}",
        "{\n a: { b: AdamW }\n c: 2\n}",
        "{a: [0.9 0.95]}",
        "{a: [x, y]}",
        "{a: 'b}",
        "{a: '''b}",
        "{a: \u{1b}}",
        "{\"\u{1b}[1m\" 1}",
    ]
    .map(refusal)
    .into();
    insta::assert_snapshot!(list.join("\n"));
}

#[test]
fn depth_and_size_have_limits() {
    let deep = |n: usize| "[".repeat(n) + &"]".repeat(n);
    assert!(read(deep(MAX_DEPTH).as_bytes()).is_ok());
    insta::assert_snapshot!(refusal(&deep(MAX_DEPTH + 1)), @"line 1, column 65: expected at most 64 nested objects and lists, found `[`");
    let long = vec![b' '; MAX_BYTES + 1];
    assert!(matches!(read(&long), Err(HjsonError::Syntax { .. })));
}

#[test]
fn bytes_that_are_no_text_are_refused_with_their_place() {
    let HjsonError::Syntax { position, found, .. } = read(b"{\n \"\xff\"}").unwrap_err() else { panic!("syntax") };
    assert_eq!((position, found.as_str()), (TextPosition { line: 2, column: 3 }, "the byte 0xff"));
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("a JSON number", |x| x.is_finite()).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        "[a-z][a-z ]{0,5}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map(any::<String>(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Writes a value as Hjson, omitting outer braces, quotes and commas wherever they are optional.
fn write_hjson(value: &serde_json::Value, indent: usize, output: &mut String) {
    use serde_json::Value;
    use std::fmt::Write;
    let line = format!("\n{}", " ".repeat(indent));
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric());
                let key = if plain { key.clone() } else { serde_json::to_string(key).unwrap() };
                write!(output, "{line}{key}: ").unwrap();
                match value {
                    Value::Object(_) => {
                        output.push('{');
                        write_hjson(value, indent + 2, output);
                        write!(output, "{line}}}").unwrap();
                    }
                    value => write_hjson(value, indent, output),
                }
            }
        }
        Value::Array(items) => {
            output.push('[');
            for item in items {
                write!(output, "{line}  ").unwrap();
                match item {
                    Value::Object(_) => {
                        output.push('{');
                        write_hjson(item, indent + 4, output);
                        write!(output, "{line}  }}").unwrap();
                    }
                    item => write_hjson(item, indent + 2, output),
                }
            }
            write!(output, "{line}]").unwrap();
        }
        Value::String(s)
            if s.starts_with(|c: char| c.is_ascii_alphabetic())
                && s.chars().all(|c| c.is_ascii_alphanumeric() || c == ' ')
                && s.trim() == s
                && !["true", "false", "null"].contains(&s.as_str()) =>
        {
            output.push_str(s)
        }
        other => output.push_str(&other.to_string()),
    }
}

proptest! {
    #[test]
    fn what_is_written_without_quotes_braces_and_commas_is_the_same_value(
        map in prop::collection::hash_map("[a-z]{1,4}|.{0,6}", any_json(), 1..6),
    ) {
        let expected = serde_json::Value::Object(map.into_iter().collect());
        let mut text = String::new();
        write_hjson(&expected, 0, &mut text);
        let read = read_any(text.as_bytes(), true).map(|node| node.to_value());
        prop_assert_eq!(read, Ok(expected), "{}", text);
    }

    #[test]
    fn every_json_text_means_what_it_means_to_serde(expected in any_json()) {
        for text in [expected.to_string(), serde_json::to_string_pretty(&expected).unwrap()] {
            prop_assert_eq!(read(text.as_bytes()).unwrap().to_value(), expected.clone());
        }
    }

    #[test]
    fn broken_hjson_never_panics(text in r#"[{}\[\]",:'\\/*#ut0-9.\- a\n]{0,60}"#) {
        for only_object in [true, false] {
            let _ = read_any(text.as_bytes(), only_object);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
    }

    #[test]
    fn broken_json_never_panics(text in r#"[{}\[\]",:\\/*#ue0-9.\- a\n]{0,60}"#) {
        let _ = read(text.as_bytes());
    }
}
