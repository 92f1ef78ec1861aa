//! The parameters of a sweep, as they are written in a sweep file and in flags.

use candle_zero::sweep::ParameterDomain;
use candle_zero::util::{list, suggest_names};
use serde_json::{Map, Value, json};

/// The kinds of parameters.
const KINDS: [&str; 5] = ["choice", "uniform", "log_uniform", "integer", "log_integer"];

/// Reads a parameter: a list of values, or a table with a kind.
pub(super) fn domain_of(value: &Value) -> Result<ParameterDomain, String> {
    let table = match value {
        Value::Array(values) => return Ok(ParameterDomain::Choice(values.clone())),
        Value::Object(table) => table,
        other => {
            return Err(format!("is {other}; give a list of values, or a table such as {{ uniform = [0.0, 1.0] }}"));
        }
    };
    let (kinds, options): (Vec<&String>, Vec<&String>) = table.keys().partition(|key| KINDS.contains(&key.as_str()));
    let kind = match kinds[..] {
        [kind] => kind.as_str(),
        [] => {
            let hint = options.first().and_then(|key| suggest_names(key, KINDS.into_iter()));
            let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
            return Err(format!("has no kind; give one of {}{hint}", list(&KINDS)));
        }
        _ => return Err(format!("has several kinds, {}; give one", list(&kinds))),
    };
    let (kind_options, values) = (allowed_options(kind), &table[kind]);
    if let Some(unknown) = options.iter().find(|option| !kind_options.contains(&option.as_str())) {
        let allowed = match kind_options.is_empty() {
            true => "leave it out".to_owned(),
            false => format!("its only option is {}", list(kind_options)),
        };
        return Err(format!("has the key {unknown}, which is not an option of {kind}; {allowed}"));
    }
    if kind == "choice" {
        let Some(values) = values.as_array() else {
            return Err(format!("is a choice of {values}; give a list of values"));
        };
        return Ok(ParameterDomain::Choice(values.clone()));
    }
    let bounds = values.as_array().map(Vec::as_slice);
    let Some([low, high]) = bounds else {
        return Err(format!("is {kind} with {values}; give two numbers, [LOW, HIGH]"));
    };
    let whole_number = |value: &Value, label: &str| {
        value.as_i64().ok_or_else(|| format!("is {kind} with {label} {value}; give a whole number"))
    };
    if kind.ends_with("integer") {
        let step = table.get("step").map_or(Ok(1), |step| whole_number(step, "step"))?;
        let (low, high) = (whole_number(low, "lower end")?, whole_number(high, "upper end")?);
        return Ok(ParameterDomain::Integer { low, high, step, log: kind == "log_integer" });
    }
    let number = |value: &Value, label: &str| {
        value.as_f64().ok_or_else(|| format!("is {kind} with {label} {value}; give a number"))
    };
    let points = table.get("points").map(|points| whole_number(points, "points")).transpose()?;
    let points = points.map(|points| usize::try_from(points).unwrap_or(0));
    Ok(ParameterDomain::Real {
        low: number(low, "lower end")?,
        high: number(high, "upper end")?,
        log: kind == "log_uniform",
        points,
    })
}

fn allowed_options(kind: &str) -> &'static [&'static str] {
    match kind {
        "uniform" | "log_uniform" => &["points"],
        "integer" => &["step"],
        _ => &[],
    }
}

/// Reads a parameter given as a flag, `NAME=KIND:VALUE,VALUE,...`. Returns its name, and the value that it would have
/// in a sweep file.
pub(super) fn parameter_of_flag(text: &str) -> Result<(String, Value), String> {
    let remedy = "give NAME=KIND:VALUES, for example --lr=log_uniform:1e-5,1e-3 or --batch=choice:4,8";
    let Some((name, rest)) = text.split_once('=') else { return Err(format!("`{text}` has no `=`; {remedy}")) };
    let Some((kind, values)) = rest.split_once(':') else { return Err(format!("`{text}` has no `:`; {remedy}")) };
    if !KINDS.contains(&kind) {
        let hint = suggest_names(kind, KINDS.into_iter()).map_or(String::new(), |hint| format!("; {hint}"));
        return Err(format!("`{text}` has the kind `{kind}`; give one of {}{hint}", list(&KINDS)));
    }
    let words: Vec<Value> = values.split(',').filter(|word| !word.is_empty()).map(value_of_word).collect();
    let mut table = Map::new();
    // The third number of a range is the value of the range's option.
    match (words.as_slice(), allowed_options(kind)) {
        ([low, high, third], [option]) => {
            table.insert((*option).to_owned(), third.clone());
            table.insert(kind.to_owned(), json!([low, high]));
        }
        (words, _) => _ = table.insert(kind.to_owned(), json!(words)),
    }
    Ok((name.to_owned(), Value::Object(table)))
}

/// Returns the word's value if the word is a number, boolean, null or quoted string in JSON, and otherwise the word as
/// text.
fn value_of_word(word: &str) -> Value {
    let value = serde_json::from_str(word).ok().filter(|value: &Value| !value.is_array() && !value.is_object());
    value.unwrap_or_else(|| word.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lists_tables_and_flags_mean_the_same() {
        let of_flag = |text: &str| domain_of(&parameter_of_flag(text).unwrap().1).unwrap();
        let of_file = |text: &str| {
            domain_of(&serde_json::to_value(toml::from_str::<toml::Table>(text).unwrap()["p"].clone()).unwrap())
                .unwrap()
        };
        for (flag, file) in [
            ("--a=choice:1,2.5,x,true", "p = [1, 2.5, \"x\", true]"),
            ("--a=choice:all", "p = { choice = [\"all\"] }"),
            ("--a=uniform:0,1", "p = { uniform = [0, 1] }"),
            ("--a=log_uniform:1e-5,1e-3,5", "p = { log_uniform = [1e-5, 1e-3], points = 5 }"),
            ("a.b=integer:8,64,8", "p = { integer = [8, 64], step = 8 }"),
            ("a.b=log_integer:1,1024", "p = { log_integer = [1, 1024] }"),
        ] {
            assert_eq!(of_flag(flag), of_file(file), "{flag}");
        }
        assert_eq!(parameter_of_flag("--lr=choice:1").unwrap().0, "--lr");
    }

    #[test]
    fn what_is_no_parameter_is_refused_with_what_is_allowed() {
        let of = |value: Value| domain_of(&value).unwrap_err();
        let wrong = [
            of(json!(3)),
            of(json!({"unifrom": [0, 1]})),
            of(json!({"uniform": [0, 1], "choice": [1]})),
            of(json!({"uniform": [0, 1], "step": 2})),
            of(json!({"choice": [0, 1], "points": 2})),
            of(json!({"choice": 5})),
            of(json!({"uniform": [0, 1, 2]})),
            of(json!({"uniform": [0, "x"]})),
            of(json!({"integer": [0, 1.5]})),
            of(json!({"integer": [0, 5], "step": "x"})),
            parameter_of_flag("--lr").unwrap_err(),
            parameter_of_flag("--lr=0.1").unwrap_err(),
            parameter_of_flag("--lr=loguniform:1,2").unwrap_err(),
        ];
        insta::assert_snapshot!(wrong.join("\n"), @r#"
        is 3; give a list of values, or a table such as { uniform = [0.0, 1.0] }
        has no kind; give one of choice, uniform, log_uniform, integer, log_integer; the nearest are uniform, log_uniform
        has several kinds, choice, uniform; give one
        has the key step, which is not an option of uniform; its only option is points
        has the key points, which is not an option of choice; leave it out
        is a choice of 5; give a list of values
        is uniform with [0,1,2]; give two numbers, [LOW, HIGH]
        is uniform with upper end "x"; give a number
        is integer with upper end 1.5; give a whole number
        is integer with step "x"; give a whole number
        `--lr` has no `=`; give NAME=KIND:VALUES, for example --lr=log_uniform:1e-5,1e-3 or --batch=choice:4,8
        `--lr=0.1` has no `:`; give NAME=KIND:VALUES, for example --lr=log_uniform:1e-5,1e-3 or --batch=choice:4,8
        `--lr=loguniform:1,2` has the kind `loguniform`; give one of choice, uniform, log_uniform, integer, log_integer; the nearest are log_uniform, uniform
        "#);
    }
}
