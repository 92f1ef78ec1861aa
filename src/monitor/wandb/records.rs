//! The records of a Weights & Biases run, as protobuf messages, and the part of them that is read back.
//!
//! ```text
//! Record    1 num | 2 history | 3 summary | 5 config | 17 run | 18 exit | 21 header
//! header    1 version_info: 1 producer
//! run       1 run_id | 2 entity | 3 project | 4 config | 6 run_group | 8 display_name | 13 host
//!           | 17 start_time: 1 seconds, 2 nanos
//! config    1 update: 1 key, 16 value_json
//! history   1 item: 2 nested_key, 16 value_json | 2 step: 1 num
//! summary   1 update: 2 nested_key, 16 value_json
//! exit      1 exit_code | 2 runtime
//! ```

use super::super::protobuf::{ProtobufMessage, ProtobufReader};
use super::super::{MonitorEvent, RunDescription, RunEnding};
use crate::config::WandbConfig;
use serde_json::{Value, json};

/// The numbers of the fields of `Record`.
const NUM: u32 = 1;
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const CONFIG: u32 = 5;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const HEADER: u32 = 21;
/// The number of the field of an item that contains the item's value as JSON.
const VALUE_JSON: u32 = 16;

/// The identity of a run, which stays the same when the run continues.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WandbRunIdentity {
    pub id: String,
    pub display_name: String,
    /// The time at which the run began, in seconds since 1970.
    pub start: f64,
}

/// A builder of numbered records.
#[derive(Debug, Default)]
pub(super) struct RecordBuilder {
    count: u64,
}

impl RecordBuilder {
    /// Creates a builder of records for a file whose last record has this number.
    pub fn after(last: u64) -> Self {
        Self { count: last }
    }

    fn record(&mut self, field: u32, message: &ProtobufMessage) -> Vec<u8> {
        self.count += 1;
        ProtobufMessage::default().varint(NUM, self.count).message(field, message).0
    }

    pub fn header(&mut self) -> Vec<u8> {
        let producer = concat!("candle-zero ", env!("CARGO_PKG_VERSION"));
        let version = ProtobufMessage::default().text(1, producer);
        self.record(HEADER, &ProtobufMessage::default().message(1, &version))
    }

    pub fn run(&mut self, identity: &WandbRunIdentity, config: &WandbConfig, run: &RunDescription) -> Vec<u8> {
        let (seconds, nanos) = (identity.start.floor(), (identity.start.fract() * 1e9).floor());
        let start = ProtobufMessage::default().varint(1, seconds as u64).varint(2, nanos as u64);
        let host = crate::util::host_name();
        let message = ProtobufMessage::default()
            .text(1, &identity.id)
            .optional_text(2, config.team.as_deref())
            .text(3, &config.project)
            .message(4, &configuration(run))
            .optional_text(6, config.group.as_deref())
            .text(8, &identity.display_name)
            .optional_text(13, Some(host.as_str()).filter(|host| !host.is_empty()))
            .message(17, &start);
        self.record(RUN, &message)
    }

    /// Returns the record of the configuration of a run that continues.
    pub fn config(&mut self, run: &RunDescription) -> Vec<u8> {
        self.record(CONFIG, &configuration(run))
    }

    /// Returns the records of one step: a row of the history, and a summary with the same values, which are the newest
    /// of the run.
    pub fn row(&mut self, step: u64, events: &[MonitorEvent], now: f64, start: f64) -> [Vec<u8>; 2] {
        let mut items = vec![
            ("_step", step.to_string()),
            ("_timestamp", number(now)),
            ("_runtime", number((now - start).max(0.0))),
        ];
        for event in events {
            items.retain(|(tag, _)| *tag != event.tag);
            items.push((&event.tag, number(event.value)));
        }
        let list = |field| {
            items.iter().fold(ProtobufMessage::default(), |list, (tag, value)| {
                list.message(field, &ProtobufMessage::default().text(2, tag).text(VALUE_JSON, value))
            })
        };
        let history = list(1).message(2, &ProtobufMessage::default().varint(1, step));
        [self.record(HISTORY, &history), self.record(SUMMARY, &list(1))]
    }

    pub fn exit(&mut self, ending: RunEnding, runtime: f64) -> Vec<u8> {
        // These are the exit codes that wandb itself uses; 255 is that of an interrupted program.
        let code = match ending {
            RunEnding::Finished => 0,
            RunEnding::Failed => 1,
            RunEnding::Stopped => 255,
        };
        let runtime = runtime.clamp(0.0, f64::from(i32::MAX)) as u64;
        self.record(EXIT, &ProtobufMessage::default().varint(1, code).varint(2, runtime))
    }
}

/// Returns the configuration of a run, with the names that the record of the run uses.
fn configuration(run: &RunDescription) -> ProtobufMessage {
    let items = [
        ("configuration", run.configuration.clone()),
        ("settings", run.settings.clone()),
        ("world_size", json!(run.world_size)),
        ("total_steps", json!(run.total_steps)),
    ];
    let items = items.into_iter().filter(|(_, value)| !value.is_null());
    items.fold(ProtobufMessage::default(), |config: ProtobufMessage, (key, value): (&str, Value)| {
        config.message(1, &ProtobufMessage::default().text(1, key).text(VALUE_JSON, &value.to_string()))
    })
}

/// Returns a number as JSON, or as the words that wandb reads for numbers that JSON does not have.
fn number(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => format!("{value:?}"),
    }
}

/// The part of a record that is read back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RecordHead {
    pub num: u64,
    pub kind: ReadBackRecord,
}

/// The kind of a record that was read back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ReadBackRecord {
    /// A row of the history, with its step. `is_engine_row` is true if it contains the values that the engine writes at
    /// each step.
    Row {
        step: u64,
        is_engine_row: bool,
    },
    Exit,
    Other,
}

impl RecordHead {
    /// Reads a record. `engine_tag` is a tag that is part of all rows of the engine.
    pub fn read(record: &[u8], engine_tag: &str) -> Self {
        let fields = ProtobufReader(record);
        let num = fields.clone().varint(NUM.into()).unwrap_or_default();
        let kind = if let Some(history) = fields.clone().all_bytes(HISTORY.into()).next() {
            let history = ProtobufReader(history);
            let step = history.clone().all_bytes(2).next().and_then(|step| ProtobufReader(step).varint(1));
            let is_engine_row = history
                .all_bytes(1)
                .any(|item| ProtobufReader(item).all_bytes(2).any(|key| key == engine_tag.as_bytes()));
            ReadBackRecord::Row { step: step.unwrap_or_default(), is_engine_row }
        } else if fields.all_bytes(EXIT.into()).next().is_some() {
            ReadBackRecord::Exit
        } else {
            ReadBackRecord::Other
        };
        Self { num, kind }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(bytes: &[u8]) -> &str {
        std::str::from_utf8(bytes).unwrap()
    }

    /// Returns the message in a field of a record.
    fn field_bytes(record: &[u8], field: u32) -> Vec<u8> {
        ProtobufReader(record).all_bytes(field.into()).next().unwrap().to_vec()
    }

    #[test]
    fn the_record_of_the_run_has_the_names_of_the_section_and_the_configuration() {
        let identity = WandbRunIdentity { id: "abc12345".into(), display_name: "gpt".into(), start: 1.5 };
        let config = WandbConfig { group: Some("g".into()), team: Some("t".into()), project: "p".into() };
        let run = RunDescription {
            world_size: 2,
            configuration: json!({"seed": 1}),
            settings: Value::Null,
            ..RunDescription::default()
        };
        let mut builder = RecordBuilder::default();
        builder.header();
        let record = builder.run(&identity, &config, &run);
        assert_eq!(ProtobufReader(&record).varint(1), Some(2));
        let run = field_bytes(&record, RUN);
        for (field, expected) in [(1, "abc12345"), (2, "t"), (3, "p"), (6, "g"), (8, "gpt")] {
            assert_eq!(text(&field_bytes(&run, field)), expected);
        }
        let start = field_bytes(&run, 17);
        assert_eq!((ProtobufReader(&start).varint(1), ProtobufReader(&start).varint(2)), (Some(1), Some(500_000_000)));
        let config = field_bytes(&run, 4);
        let items: Vec<(String, String)> = ProtobufReader(&config)
            .all_bytes(1)
            .map(|item| (text(&field_bytes(item, 1)).into(), text(&field_bytes(item, VALUE_JSON)).into()))
            .collect();
        assert_eq!(
            items,
            [("configuration".into(), "{\"seed\":1}".into()), ("world_size".to_string(), "2".to_string())]
        );
    }

    #[test]
    fn a_row_has_every_value_to_the_bit_and_its_step() {
        let values = [0.1 + 0.2, 1e-300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e22];
        let events: Vec<MonitorEvent> =
            values.iter().enumerate().map(|(i, value)| MonitorEvent::new(format!("tag/{i}"), *value, 8)).collect();
        let mut builder = RecordBuilder::after(40);
        let rows = builder.row(8, &events, 12.5, 2.0);
        for (record, field) in rows.iter().zip([HISTORY, SUMMARY]) {
            let list = field_bytes(record, field);
            let items: Vec<(String, String)> = ProtobufReader(&list)
                .all_bytes(1)
                .map(|item| (text(&field_bytes(item, 2)).into(), text(&field_bytes(item, VALUE_JSON)).into()))
                .collect();
            let head: Vec<(&str, &str)> = items[..3].iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            assert_eq!(head, [("_step", "8"), ("_timestamp", "12.5"), ("_runtime", "10.5")]);
            for ((tag, json), event) in items[3..].iter().zip(&events) {
                assert_eq!(*tag, event.tag);
                let read: f64 = match json.as_str() {
                    "Infinity" => f64::INFINITY,
                    "-Infinity" => f64::NEG_INFINITY,
                    number => number.parse().unwrap(),
                };
                assert!(read.to_bits() == event.value.to_bits() || read.is_nan() && event.value.is_nan(), "{json}");
            }
        }
        let head = RecordHead::read(&rows[0], "tag/3");
        assert_eq!(head, RecordHead { num: 41, kind: ReadBackRecord::Row { step: 8, is_engine_row: true } });
        assert_eq!(RecordHead::read(&rows[0], "tag").kind, ReadBackRecord::Row { step: 8, is_engine_row: false });
        assert_eq!(RecordHead::read(&rows[1], "").kind, ReadBackRecord::Other);
        assert_eq!(RecordHead::read(&builder.exit(RunEnding::Finished, 1.0), "").kind, ReadBackRecord::Exit);
    }

    #[test]
    fn the_last_of_several_values_of_a_tag_counts() {
        let events = [MonitorEvent::new("x", 1.0, 1), MonitorEvent::new("x", 2.0, 1)];
        let [row, _] = RecordBuilder::default().row(1, &events, 0.0, 0.0);
        let row = field_bytes(&row, HISTORY);
        let values: Vec<Vec<u8>> = ProtobufReader(&row)
            .all_bytes(1)
            .filter(|item| field_bytes(item, 2) == b"x")
            .map(|item| field_bytes(item, VALUE_JSON))
            .collect();
        assert_eq!(values, [b"2.0"]);
    }
}
