//! The leaves of a JSON tree under dotted names, as in `zero_optimization.stage`.

use serde_json::Value;

/// Calls `visit` with the dotted name and the value of each leaf of a JSON tree: a list, an empty object, or a value
/// that contains no others. The dotted names begin with `name` if it is not empty.
pub fn json_leaves<'a>(name: &str, tree: &'a Value, visit: &mut dyn FnMut(String, &'a Value)) {
    match tree {
        Value::Object(entries) if !entries.is_empty() => {
            for (key, value) in entries {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                json_leaves(&name, value, visit);
            }
        }
        leaf => visit(name.to_owned(), leaf),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_leaves_of_json_have_dotted_names_and_empty_objects_are_leaves() {
        let tree = json!({"a": {"b": 1, "c": {}}, "d": [{"e": 2}], "f": null});
        let mut found = Vec::new();
        for name in ["", "x"] {
            json_leaves(name, &tree, &mut |name, leaf| found.push(format!("{name}={leaf}")));
        }
        let leaves = ["a.b=1", "a.c={}", "d=[{\"e\":2}]", "f=null"];
        let below_x = leaves.map(|leaf| format!("x.{leaf}"));
        assert_eq!(found[..4], leaves);
        assert_eq!(found[4..], below_x);
        json_leaves("x", &json!(3), &mut |name, leaf| assert_eq!((name.as_str(), leaf), ("x", &json!(3))));
    }
}
