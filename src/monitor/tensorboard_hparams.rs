//! The records of TensorBoard's table of hyperparameters (the HParams plugin), as values of summaries.
//!
//! ```text
//! value       1 tag | 8 tensor (empty) | 9 metadata: 1 plugin_data: 1 plugin_name, 2 content
//! content     2 experiment | 3 session_start_info | 4 session_end_info
//! experiment  3 time_created_secs (f64) | 4 hparam_infos: 1 name, 4 type, 5 domain_discrete | 5 metric_infos: 1 name: 2 tag
//! start       1 hparams: 1 key, 2 value (2 f64, 3 string or 4 bool) | 4 group_name | 5 start_time_secs (f64)
//! end         1 status | 2 end_time_secs (f64)
//! ```

use super::hyperparameters::{Hyperparameter, hyperparameters};
use super::protobuf::ProtobufMessage;
use super::{RunDescription, RunEnding};

/// The tags under which TensorBoard looks for the records.
const EXPERIMENT: &str = "_hparams_/experiment";
const SESSION_START: &str = "_hparams_/session_start_info";
const SESSION_END: &str = "_hparams_/session_end_info";
/// A tensor without elements: of type f32, with one dimension of size 0.
const EMPTY_TENSOR: [u8; 6] = [0x08, 1, 0x12, 2, 0x12, 0];
/// The tags of values that the table shows next to the hyperparameters.
const METRICS: [&str; 4] = ["Train/Samples/train_loss", "val_loss", "Train/Samples/lr", "Train/Samples/grad_norm"];

/// Returns the values that describe a run that begins: the list of hyperparameters and metrics, and the values of the
/// hyperparameters.
pub(super) fn beginning(run: &RunDescription, now: f64) -> [ProtobufMessage; 2] {
    let hyperparameters = hyperparameters(run);
    let mut experiment = ProtobufMessage::default().double(3, now);
    let mut start = ProtobufMessage::default();
    for (name, value) in &hyperparameters {
        experiment = experiment.message(4, &info(name, value));
        let value = match value {
            Hyperparameter::Bool(value) => ProtobufMessage::default().varint(4, u64::from(*value)),
            Hyperparameter::Number(value) => ProtobufMessage::default().double(2, *value),
            Hyperparameter::Text(value) => ProtobufMessage::default().text(3, value),
        };
        start = start.message(1, &ProtobufMessage::default().text(1, name).message(2, &value));
    }
    for tag in METRICS {
        let name = ProtobufMessage::default().text(2, tag);
        experiment = experiment.message(5, &ProtobufMessage::default().message(1, &name));
    }
    let start = start.double(5, now);
    [value(EXPERIMENT, 2, &experiment), value(SESSION_START, 3, &start)]
}

/// Returns the value that records how a run ended. There is none for a run that was stopped: it may continue, and
/// TensorBoard keeps the first such value that it reads.
pub(super) fn ending(ending: RunEnding, now: f64) -> Option<ProtobufMessage> {
    let status = match ending {
        RunEnding::Finished => 1,
        RunEnding::Failed => 2,
        RunEnding::Stopped => return None,
    };
    Some(value(SESSION_END, 4, &ProtobufMessage::default().varint(1, status).double(2, now)))
}

/// Returns the description of a hyperparameter.
fn info(name: &str, value: &Hyperparameter) -> ProtobufMessage {
    let info = ProtobufMessage::default().text(1, name);
    match value {
        Hyperparameter::Text(_) => info.varint(4, 1),
        Hyperparameter::Bool(_) => {
            let both = [0, 1].map(|value| ProtobufMessage::default().varint(4, value));
            let domain = both.iter().fold(ProtobufMessage::default(), |list, value| list.message(1, value));
            info.varint(4, 2).message(5, &domain)
        }
        Hyperparameter::Number(_) => info.varint(4, 3),
    }
}

/// Returns a value of a summary whose metadata contains a record of the plugin.
fn value(tag: &str, field: u32, record: &ProtobufMessage) -> ProtobufMessage {
    let content = ProtobufMessage::default().message(field, record);
    let plugin = ProtobufMessage::default().text(1, "hparams").message(2, &content);
    let metadata = ProtobufMessage::default().message(1, &plugin);
    ProtobufMessage::default().text(1, tag).bytes(8, &EMPTY_TENSOR).message(9, &metadata)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::protobuf::{ProtobufReader, ProtobufValue};
    use super::*;
    use serde_json::json;

    /// Returns the message at a path of fields.
    fn message_at<'a>(message: &'a [u8], path: &[u64]) -> &'a [u8] {
        path.iter().fold(message, |message, field| ProtobufReader(message).all_bytes(*field).next().unwrap())
    }

    #[test]
    fn the_values_of_hyperparameters_are_those_of_the_run() {
        let settings = json!({"model": "nano", "steps": 20, "shuffle": true});
        let run = RunDescription { world_size: 2, settings, ..RunDescription::default() };
        let [experiment, start] = beginning(&run, 12.5);
        assert_eq!(message_at(&experiment.0, &[1]), EXPERIMENT.as_bytes());
        assert_eq!(message_at(&start.0, &[1]), SESSION_START.as_bytes());
        assert_eq!(message_at(&start.0, &[9, 1, 1]), b"hparams");
        let start = message_at(&start.0, &[9, 1, 2, 3]);
        let entries: Vec<String> = ProtobufReader(start)
            .all_bytes(1)
            .map(|entry| {
                let (_, value) = ProtobufReader(message_at(entry, &[2])).next().unwrap();
                let value = match value {
                    ProtobufValue::Varint(bool) => format!("bool {bool}"),
                    ProtobufValue::Bytes(text) => format!("text {}", std::str::from_utf8(text).unwrap()),
                    ProtobufValue::Fixed(bytes) => f64::from_le_bytes(bytes.try_into().unwrap()).to_string(),
                };
                format!("{}: {value}", std::str::from_utf8(message_at(entry, &[1])).unwrap())
            })
            .collect();
        assert_eq!(entries, ["model: text nano", "shuffle: bool 1", "steps: 20", "world_size: 2"]);
        let experiment = message_at(&experiment.0, &[9, 1, 2, 2]);
        let types: Vec<u64> =
            ProtobufReader(experiment).all_bytes(4).map(|info| ProtobufReader(info).varint(4).unwrap()).collect();
        assert_eq!(types, [1, 2, 3, 3]);
        let metrics: Vec<&[u8]> =
            ProtobufReader(experiment).all_bytes(5).map(|info| message_at(info, &[1, 2])).collect();
        assert_eq!(metrics, METRICS.map(str::as_bytes));
    }

    #[test]
    fn the_status_says_how_the_run_ended() {
        for (end, status) in [(RunEnding::Finished, 1), (RunEnding::Failed, 2)] {
            let value = ending(end, 1.0).unwrap();
            assert_eq!(ProtobufReader(message_at(&value.0, &[9, 1, 2, 4])).varint(1), Some(status));
        }
        assert!(ending(RunEnding::Stopped, 1.0).is_none());
    }
}
