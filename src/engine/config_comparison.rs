//! Compares the configurations of two ranks key by key, so that an error can name the keys that differ.

use crate::comm::Communicator;
use crate::comm::agree::texts;
use crate::config::Config;
use crate::error::{EngineError, Error, Result};
use crate::json_leaves::json_leaves;
use crate::optim::GroupedOptimizer;
use crate::param::BufferSync;
use crate::util::fnv1a;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of keys in an error.
const MAX_LISTED_KEYS: usize = 3;
/// The maximum number of characters of a value in an error.
const MAX_SHOWN_CHARS: usize = 48;

/// The user's custom components that replace those of the configuration.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code, reason = "compared between ranks as text")]
pub(super) struct CustomComponents {
    pub optimizer: bool,
    pub schedule: bool,
    pub buffer_sync: BufferSync,
}

/// The name and the hash of content that must be the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContentFingerprint {
    #[serde(rename = "what")]
    pub(super) name: String,
    pub(super) content: u64,
}

/// A rank's configuration with DeepSpeed's keys, its custom components, and its data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RankConfig {
    keys: BTreeMap<String, String>,
    data: Vec<ContentFingerprint>,
}

impl RankConfig {
    pub(super) fn new(
        config: &Config,
        custom: CustomComponents,
        trainer: &GroupedOptimizer,
        groups: &[usize],
        data: &[ContentFingerprint],
    ) -> Self {
        let mut keys = BTreeMap::new();
        json_leaves("", &config.to_deepspeed_json(), &mut |name, leaf| _ = keys.insert(name, leaf.to_string()));
        keys.insert("the set of custom components".into(), format!("{custom:?}"));
        keys.insert("the optimizer's groups or schedule".into(), format!("{trainer:?} {groups:?}"));
        Self { keys, data: data.to_vec() }
    }

    /// Returns a hash of the data. Names are not included, because hosts may store the data in different places.
    pub(super) fn data_hash(data: &[ContentFingerprint]) -> u64 {
        fnv1a(&data.iter().flat_map(|shared| shared.content.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Collective: returns the error that describes how this rank and `other` differ.
    ///
    /// # Errors
    /// A failed collective.
    pub(super) fn difference_error(&self, comm: &dyn Communicator, other: usize) -> Result<Error> {
        let all = texts(comm, &serde_json::to_string(self).unwrap_or_else(|e| unreachable!("texts and numbers: {e}")))?;
        let theirs =
            serde_json::from_str(&all[other]).unwrap_or_else(|_| Self { keys: BTreeMap::new(), data: Vec::new() });
        Ok(self.error(&theirs, comm.in_job(comm.rank()), comm.in_job(other)))
    }

    fn error(&self, theirs: &Self, rank: usize, other: usize) -> Error {
        let names: BTreeSet<&String> = self.keys.keys().chain(theirs.keys.keys()).collect();
        let differ: Vec<&String> =
            names.into_iter().filter(|name| self.keys.get(*name) != theirs.keys.get(*name)).collect();
        if differ.is_empty() {
            let pair = self.data.iter().zip(&theirs.data).find(|(mine, theirs)| mine.content != theirs.content);
            if let Some((mine, theirs)) = pair {
                let (mine, theirs) = (mine.name.clone(), theirs.name.clone());
                return EngineError::DataDiffer { rank, other, mine, theirs }.into();
            }
        }
        let more = differ.len().saturating_sub(MAX_LISTED_KEYS);
        let value = |config: &Self, name: &String| match config.keys.get(name) {
            Some(value) if value.chars().count() <= MAX_SHOWN_CHARS => Some(value.clone()),
            Some(_) => None,
            None => Some("absent".into()),
        };
        let differences =
            differ.into_iter().take(MAX_LISTED_KEYS).map(|name| match (value(self, name), value(theirs, name)) {
                (Some(mine), Some(theirs)) => format!("{name} is {mine} on rank {rank} and {theirs} on rank {other}"),
                _ => format!("{name} differs"),
            });
        let mut keys = differences.collect::<Vec<_>>().join(", ");
        if keys.is_empty() {
            keys = "a value passed to same_on_all_ranks, or a setting without a key".into();
        }
        if more > 0 {
            keys += &format!(", and {more} more");
        }
        EngineError::ConfigsDiffer { rank, other, keys }.into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::Engine;
    use crate::comm::threads;
    use crate::data::TokenData;
    use candle_core::Device;
    use candle_nn::linear;
    use serde_json::{Value, json};

    fn config(stage: usize) -> Value {
        json!({
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage},
        })
    }

    /// Returns the error messages of two ranks, each given its configuration and its data.
    fn error_messages(rank: impl Fn(usize) -> (Value, Vec<(String, u64)>) + Sync) -> [String; 2] {
        let ranks = threads::run(2, |comm| {
            let (config, data) = rank(comm.rank());
            let mut builder = Engine::builder().device(Device::Cpu).communicator(comm);
            for (name, content) in data {
                builder = builder.same_on_all_ranks(name, content);
            }
            builder.initialize(|vb| linear(4, 5, vb), config).map(drop)
        });
        let messages = ranks.unwrap().into_iter().map(|rank| rank.err().map_or("nothing".into(), |e| e.to_string()));
        messages.collect::<Vec<String>>().try_into().unwrap()
    }

    #[test]
    fn keys_that_differ_are_named_with_both_values() {
        let [first, second] = error_messages(|rank| {
            let mut config = config(2 + rank);
            config["gradient_clipping"] = json!(1.0 + rank as f64);
            (config, vec![])
        });
        insta::assert_snapshot!(first, @"rank 0 has a different configuration from rank 1: gradient_clipping is 1.0 on rank 0 and 2.0 on rank 1, zero_optimization.overlap_comm is false on rank 0 and true on rank 1, zero_optimization.stage is 2 on rank 0 and 3 on rank 1; every rank must get the same file or value, and the same schedule");
        insta::assert_snapshot!(second, @"rank 1 has a different configuration from rank 0: gradient_clipping is 2.0 on rank 1 and 1.0 on rank 0, zero_optimization.overlap_comm is true on rank 1 and false on rank 0, zero_optimization.stage is 3 on rank 1 and 2 on rank 0; every rank must get the same file or value, and the same schedule");
        let [first, _] = error_messages(|rank| {
            let mut config = config(2);
            config["optimizer"]["params"]["lr"] = json!(1e-2 * (rank + 1) as f64);
            (config, vec![])
        });
        insta::assert_snapshot!(first, @"rank 0 has a different configuration from rank 1: optimizer.params.lr is 0.01 on rank 0 and 0.02 on rank 1, the optimizer's groups or schedule differs; every rank must get the same file or value, and the same schedule");
    }

    #[test]
    fn data_that_differ_are_named_and_other_names_of_the_same_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            TokenData::open(Some(&path)).unwrap()
        };
        let data = [write("a.txt", "to be ".repeat(100)), write("b.txt", "to bf ".repeat(100))];
        let content = |rank: usize| vec![(format!("/data/{rank}.txt"), data[rank].fingerprint())];
        let [first, second] = error_messages(|rank| (config(2), content(rank)));
        insta::assert_snapshot!(first, @"the content of /data/0.txt on rank 0 is not that of /data/1.txt on rank 1; every rank must read the same data; copy the files to all hosts, or put them where all hosts can read them");
        insta::assert_snapshot!(second, @"the content of /data/1.txt on rank 1 is not that of /data/0.txt on rank 0; every rank must read the same data; copy the files to all hosts, or put them where all hosts can read them");
        let same = |rank: usize| vec![(format!("/data/{rank}.txt"), data[0].fingerprint())];
        assert_eq!(error_messages(|rank| (config(2), same(rank))), ["nothing", "nothing"]);
        let [first, _] = error_messages(|rank| (config(2), if rank == 0 { content(0) } else { vec![] }));
        insta::assert_snapshot!(first, @"rank 0 has a different configuration from rank 1: a value passed to same_on_all_ranks, or a setting without a key; every rank must get the same file or value, and the same schedule");
    }
}
