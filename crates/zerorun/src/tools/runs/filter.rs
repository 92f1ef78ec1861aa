//! Selects the runs that are listed: `--filter`, `--state` and `--since`.

use crate::error::{Result, ToolError};
use candle_zero::runs::{RecordedRun, RecordedState, parse_utc};
use candle_zero::util::{matches, suggest_names};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

/// A condition on a value of a run: `key=value`.
#[derive(Debug, Clone)]
pub(super) struct RunFilter {
    key: String,
    value: String,
}

/// Parses `key=value`.
pub(super) fn filter(text: &str) -> std::result::Result<RunFilter, String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok(RunFilter { key: key.trim().to_owned(), value: value.trim().to_owned() })
        }
        _ => Err("give a key and a value, such as optimizer.params.lr=0.001 or host=node*".into()),
    }
}

/// Parses the name of a state.
pub(super) fn state(text: &str) -> std::result::Result<RecordedState, String> {
    let names = RecordedState::ALL.map(RecordedState::name);
    RecordedState::ALL
        .into_iter()
        .find(|state| state.name().eq_ignore_ascii_case(text))
        .ok_or_else(|| format!("give one of {}", names.join(", ")))
}

/// Parses an age (`90m`, `12h`, `7d`, `2w`), or a date in UTC with or without a time of day. Returns the time in
/// seconds since 1970.
pub(super) fn since(text: &str) -> std::result::Result<f64, String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "m" => Some(60.0),
        "h" => Some(3600.0),
        "d" => Some(86_400.0),
        "w" => Some(604_800.0),
        _ => None,
    };
    let time_of_age =
        seconds.and_then(|seconds| Some(number.parse::<u32>().ok()?).map(|number| now - f64::from(number) * seconds));
    time_of_age.or_else(|| parse_utc(text)).ok_or_else(|| {
        "give an age, such as 90m, 12h, 7d or 2w, or a date in UTC, such as 2026-01-31 or 2026-01-31T18:00".into()
    })
}

/// Returns the values of a run that filters can name.
fn values(run: &RecordedRun) -> Vec<(String, Value)> {
    let info = run.info();
    let mut all: Vec<(String, Value)> = vec![
        ("name".into(), info.name.clone().into()),
        ("id".into(), run.id().into()),
        ("state".into(), run.state().name().into()),
        ("host".into(), info.machine.host.clone().into()),
        ("world_size".into(), info.world_size.into()),
        ("version".into(), info.versions.candle_zero.clone().into()),
    ];
    if let Some(git) = &info.git {
        all.push(("commit".into(), git.commit.clone().into()));
        all.extend(git.branch.clone().map(|branch| ("branch".into(), branch.into())));
    }
    all.extend(run.settings());
    all
}

/// Returns whether `name` is the requested key, or ends with a dot and the requested key.
fn is_key(name: &str, key: &str) -> bool {
    name == key || name.strip_suffix(key).is_some_and(|rest| rest.ends_with('.'))
}

/// Returns whether a value matches the requested one, compared as numbers or as text. In the requested text, `*`
/// matches anything.
fn is_value(value: &Value, requested: &str) -> bool {
    match (value, requested.parse::<f64>()) {
        (Value::Number(number), Ok(requested)) => number.as_f64() == Some(requested),
        (Value::String(text), _) => matches(requested, text),
        (other, _) => matches(requested, &other.to_string()),
    }
}

/// Keeps the runs that match all filters.
///
/// # Errors
/// Fails if there are runs, but none has the key of a filter.
pub(super) fn keep(runs: &mut Vec<RecordedRun>, filters: &[RunFilter]) -> Result<()> {
    if filters.is_empty() || runs.is_empty() {
        return Ok(());
    }
    let all: Vec<Vec<(String, Value)>> = runs.iter().map(values).collect();
    for RunFilter { key, .. } in filters {
        if !all.iter().flatten().any(|(name, _)| is_key(name, key)) {
            let names: BTreeSet<&str> = all.iter().flatten().map(|(name, _)| name.as_str()).collect();
            let without_section = |name: &'_ str| {
                name.strip_prefix("configuration.").or(name.strip_prefix("settings.")).map(String::from)
            };
            let names: Vec<String> =
                names.into_iter().map(|name| without_section(name).unwrap_or_else(|| name.into())).collect();
            let hint = suggest_names(key, names.iter().map(String::as_str));
            return Err(ToolError::RunFilter { key: key.clone(), hint }.into());
        }
    }
    let fulfils = |values: &Vec<(String, Value)>| {
        filters.iter().all(|RunFilter { key, value }| {
            values.iter().any(|(name, found)| is_key(name, key) && is_value(found, value))
        })
    };
    let mut is_kept = all.iter().map(fulfils);
    runs.retain(|_| is_kept.next() == Some(true));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_given_whole_or_by_their_last_parts() {
        let name = "configuration.optimizer.params.lr";
        for key in ["lr", "params.lr", "optimizer.params.lr", name] {
            assert!(is_key(name, key), "{key}");
        }
        for key in ["r", "params", "configuration.lr", ""] {
            assert!(!is_key(name, key), "{key}");
        }
    }

    #[test]
    fn values_are_compared_as_numbers_or_as_text() {
        assert!(is_value(&json!(0.001), "1e-3") && is_value(&json!(4), "4.0") && !is_value(&json!(4), "40"));
        assert!(is_value(&json!("AdamW"), "Adam*") && !is_value(&json!("AdamW"), "Adam"));
        assert!(is_value(&json!(true), "true") && is_value(&json!([1, 2]), "[1,2]"));
    }

    #[test]
    fn times_and_states_that_do_not_exist_are_refused() {
        insta::assert_snapshot!(since("yesterday").unwrap_err(), @"give an age, such as 90m, 12h, 7d or 2w, or a date in UTC, such as 2026-01-31 or 2026-01-31T18:00");
        insta::assert_snapshot!(since("7y").unwrap_err(), @"give an age, such as 90m, 12h, 7d or 2w, or a date in UTC, such as 2026-01-31 or 2026-01-31T18:00");
        insta::assert_snapshot!(state("done").unwrap_err(), @"give one of running, finished, stopped, failed, killed");
        insta::assert_snapshot!(filter("lr").unwrap_err(), @"give a key and a value, such as optimizer.params.lr=0.001 or host=node*");
        assert_eq!(since("1970-01-02").unwrap(), 86_400.0);
        assert!(since("2d").unwrap() < since("1h").unwrap());
        assert_eq!(filter("a.b = x=y").unwrap().value, "x=y");
    }
}
