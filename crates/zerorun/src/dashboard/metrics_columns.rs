//! The metrics of a run as columns for the page, with at most a given number of rows.

use candle_zero::runs::{MetricsRow, json_number};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Rows as columns. If there are more rows than requested, groups of consecutive rows become one row each, which has
/// the step and time of the last row of the group, and the mean, minimum and maximum of each value.
#[derive(Debug, Default)]
pub(super) struct MetricsColumns {
    steps: Vec<u64>,
    times: Vec<f64>,
    values: BTreeMap<String, Vec<Option<ValueRange>>>,
    is_reduced: bool,
}

/// A summary of the values that consecutive rows have under one name.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ValueRange {
    sum: f64,
    count: f64,
    low: f64,
    high: f64,
}

impl ValueRange {
    fn of(value: f64) -> Self {
        Self { sum: value, count: 1.0, low: value, high: value }
    }

    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1.0;
        // `min` and `max` ignore NaN, so the range is that of the other values.
        (self.low, self.high) = (self.low.min(value), self.high.max(value));
    }

    fn mean(&self) -> f64 {
        self.sum / self.count
    }
}

/// Adds a value to row `index` of a column, which may end before this row.
fn add(column: &mut Vec<Option<ValueRange>>, index: usize, value: f64) {
    column.resize(column.len().max(index), None);
    match column.get_mut(index) {
        Some(Some(range)) => range.add(value),
        _ => column.push(Some(ValueRange::of(value))),
    }
}

impl MetricsColumns {
    /// Converts `rows`, which must be sorted by step, to columns with at most `max_rows` rows.
    pub(super) fn of(rows: &[MetricsRow], max_rows: usize) -> Self {
        let rows_per_group = rows.len().div_ceil(max_rows.max(1)).max(1);
        let mut columns = Self { is_reduced: rows_per_group > 1, ..Self::default() };
        for (index, group) in rows.chunks(rows_per_group).enumerate() {
            let Some(last) = group.last() else { continue };
            columns.steps.push(last.step);
            columns.times.push(last.time);
            for (name, value) in group.iter().flat_map(|row| &row.values) {
                match columns.values.get_mut(name) {
                    Some(column) => add(column, index, *value),
                    None => add(columns.values.entry(name.clone()).or_default(), index, *value),
                }
            }
        }
        for column in columns.values.values_mut() {
            column.resize(columns.steps.len(), None);
        }
        columns
    }

    /// Returns the columns as JSON. A missing value is null; numbers that are not finite are text.
    pub(super) fn to_json(&self) -> Value {
        let column = |statistic: fn(&ValueRange) -> f64| -> Map<String, Value> {
            let number =
                |range: &Option<ValueRange>| range.as_ref().map_or(Value::Null, |range| json_number(statistic(range)));
            self.values.iter().map(|(name, ranges)| (name.clone(), ranges.iter().map(number).collect())).collect()
        };
        let mut all = json!({"steps": self.steps, "times": self.times, "values": column(ValueRange::mean)});
        if self.is_reduced {
            all["low"] = column(|range| range.low).into();
            all["high"] = column(|range| range.high).into();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: u64) -> Vec<MetricsRow> {
        let row = |step: u64| {
            let mut row = MetricsRow::default();
            (row.step, row.time) = (step, step as f64);
            row.values.insert("loss".into(), step as f64);
            if step.is_multiple_of(4) {
                row.values.insert("val_loss".into(), f64::NAN);
            }
            row
        };
        (1..=count).map(row).collect()
    }

    #[test]
    fn few_rows_are_kept_as_they_are() {
        insta::assert_snapshot!(MetricsColumns::of(&rows(5), 10).to_json(), @r#"{"steps":[1,2,3,4,5],"times":[1.0,2.0,3.0,4.0,5.0],"values":{"loss":[1.0,2.0,3.0,4.0,5.0],"val_loss":[null,null,null,"NaN",null]}}"#);
        insta::assert_snapshot!(MetricsColumns::of(&[], 10).to_json(), @r#"{"steps":[],"times":[],"values":{}}"#);
    }

    #[test]
    fn many_rows_become_means_with_their_ranges() {
        insta::assert_snapshot!(MetricsColumns::of(&rows(10), 3).to_json(), @r#"{"high":{"loss":[4.0,8.0,10.0],"val_loss":["NaN","NaN",null]},"low":{"loss":[1.0,5.0,9.0],"val_loss":["NaN","NaN",null]},"steps":[4,8,10],"times":[4.0,8.0,10.0],"values":{"loss":[2.5,6.5,9.5],"val_loss":["NaN","NaN",null]}}"#);
        for (count, most) in [(1, 1), (100, 1), (1000, 7), (1001, 500), (3, 2)] {
            let columns = MetricsColumns::of(&rows(count), most);
            assert!(columns.steps.len() <= most && columns.steps.last() == Some(&count));
            assert!(columns.values.values().all(|column| column.len() == columns.steps.len()));
            let counted: f64 = columns.values["loss"].iter().flatten().map(|range| range.count).sum();
            assert_eq!(counted, count as f64);
        }
    }
}
