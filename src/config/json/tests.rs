//! Tests of the reader.
#![allow(clippy::unwrap_used)]

use super::{read as read_any, *};
use proptest::prelude::*;

fn read(bytes: &[u8]) -> Result<Node> {
    read_any(bytes, false)
}

fn value(text: &str) -> serde_json::Value {
    read(text.as_bytes()).unwrap().to_value()
}

fn refusal(text: &str) -> String {
    match read(text.as_bytes()).unwrap_err() {
        ReadError::Syntax { place, expected, found } => format!("{place}: expected {expected}, found {found}"),
        ReadError::Duplicate { path, first, second } => format!("duplicate {path}: {first} and {second}"),
    }
}

#[test]
fn every_key_and_value_knows_its_place() {
    let root = read(b"{\n  \"a\": 1,\r\n\t\"\xc3\xa4\": { \"b\": [2] }\n}").unwrap();
    let Json::Object(entries) = &root.value else { panic!("an object") };
    let Json::Object(inner) = &entries[1].node.value else { panic!("an object") };
    let at = |line, column| Some(Place { line, column });
    assert_eq!([root.place, entries[0].place, entries[0].node.place], [at(1, 1), at(2, 3), at(2, 8)]);
    assert_eq!([entries[1].place, inner[0].place, inner[0].node.place], [at(3, 2), at(3, 9), at(3, 14)]);
}

#[test]
fn comments_and_trailing_commas_are_blank() {
    let text = "// c\n# d\n{ /* e * / */ \"a\": [1, 2,], # x\n \"b\": {\"c\": null,}, }\n# end";
    assert_eq!(value(text), serde_json::json!({"a": [1, 2], "b": {"c": null}}));
}

#[test]
fn strings_and_numbers_are_those_of_json() {
    assert_eq!(value(r#""a\"\\\/\b\f\n\r\t\u00e4\ud83d\ude00""#), "a\"\\/\u{8}\u{c}\n\r\t\u{e4}\u{1f600}");
    for text in ["0", "-12", "9223372036854775807", "5e8", "-1.5E-3", "0.25", "1e+2"] {
        assert_eq!(value(text), serde_json::from_str::<serde_json::Value>(text).unwrap(), "{text}");
    }
    assert_eq!(value("18446744073709551615"), serde_json::json!(18446744073709551615.0));
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
        "{a: 1}",
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
    ]
    .map(refusal)
    .into();
    insta::assert_snapshot!(list.join("\n"));
}

#[test]
fn depth_and_size_have_limits() {
    let deep = |n: usize| "[".repeat(n) + &"]".repeat(n);
    assert!(read(deep(MAX_DEPTH).as_bytes()).is_ok());
    insta::assert_snapshot!(refusal(&deep(MAX_DEPTH + 1)), @"line 1, column 65: expected at most 64 objects and lists in one another, found `[`");
    let long = vec![b' '; MAX_BYTES + 1];
    assert!(matches!(read(&long), Err(ReadError::Syntax { .. })));
}

#[test]
fn bytes_that_are_no_text_are_refused_with_their_place() {
    let ReadError::Syntax { place, found, .. } = read(b"{\n \"\xff\"}").unwrap_err() else { panic!("syntax") };
    assert_eq!((place, found.as_str()), (Place { line: 2, column: 3 }, "the byte 0xff"));
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map(any::<String>(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
    }

    #[test]
    fn broken_json_never_panics(text in r#"[{}\[\]",:\\/*#ue0-9.\- a\n]{0,60}"#) {
        let _ = read(text.as_bytes());
    }

    #[test]
    fn what_serde_writes_is_read_back(wanted in any_json()) {
        let text = serde_json::to_string_pretty(&wanted).unwrap();
        prop_assert_eq!(read(text.as_bytes()).unwrap().to_value(), wanted);
    }
}
