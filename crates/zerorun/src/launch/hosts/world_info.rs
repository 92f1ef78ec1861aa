//! The ranks of a job on several hosts, numbered host by host.
//!
//! ```text
//! host    a        b              node   0, 1: the index of the host
//! rank    0 1 2    3 4            index  0 1 2, 0 1: the index among the ranks of its host
//! slot    0 1 2    1 0            local  0 1 2, 1 0: the rank modulo the number of ranks on the host, as in DeepSpeed
//! ```
//!
//! In its world info, DeepSpeed's launcher passes each host the placement of all ranks: the JSON object `{"a": [0, 1,
//! 2], "b": [0, 1]}` in URL-safe base64.

use super::HostSlots;
use super::core_list::ranges;
use super::error::{HostsError, one_line};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::fmt;

/// The variable that selects the GPUs visible to programs, which number them from 0.
pub(crate) const DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The hosts that get ranks, each with at least one slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorldInfo {
    hosts: Vec<HostSlots>,
}

/// The placement of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankPlacement {
    /// The rank among all ranks.
    pub(crate) rank: usize,
    /// The index of its host.
    pub(crate) node: usize,
    /// The index among the ranks of its host.
    pub(crate) index: usize,
    /// DeepSpeed's `LOCAL_RANK`: the rank modulo the number of ranks on this host. It is unique within a host, but it
    /// is certain to equal the index only if all hosts have the same number of ranks.
    pub(crate) local_rank: usize,
    /// The slot, at index `local_rank` of `CUDA_VISIBLE_DEVICES`.
    pub(crate) slot: usize,
}

impl WorldInfo {
    /// Creates the world. Hosts without slots get no rank and are left out.
    pub(crate) fn new(hosts: Vec<HostSlots>) -> Result<Self, HostsError> {
        let hosts: Vec<HostSlots> = hosts.into_iter().filter(|host| !host.slots.is_empty()).collect();
        if hosts.is_empty() { Err(HostsError::NoSlot) } else { Ok(Self { hosts }) }
    }

    /// Returns the hosts in the order of their ranks.
    pub(crate) fn hosts(&self) -> &[HostSlots] {
        &self.hosts
    }

    /// Returns the number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.hosts.iter().map(|host| host.slots.len()).sum()
    }

    /// Returns the ranks on one host.
    pub(crate) fn ranks_of(&self, node: usize) -> Vec<RankPlacement> {
        let first: usize = self.hosts[..node].iter().map(|host| host.slots.len()).sum();
        let slots = &self.hosts[node].slots;
        let placement = |index| {
            let rank = first + index;
            let local_rank = rank % slots.len();
            RankPlacement { rank, node, index, local_rank, slot: slots[local_rank] }
        };
        (0..slots.len()).map(placement).collect()
    }

    /// Returns the variables that describe a rank's placement.
    pub(crate) fn variables(&self, placement: &RankPlacement) -> [(&'static str, String); 8] {
        let slots = &self.hosts[placement.node].slots;
        let local_size = slots.len().to_string();
        [
            ("RANK", placement.rank.to_string()),
            ("WORLD_SIZE", self.size().to_string()),
            ("LOCAL_RANK", placement.local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", local_size.clone()),
            ("LOCAL_SIZE", local_size),
            ("CROSS_RANK", placement.node.to_string()),
            ("CROSS_SIZE", self.hosts.len().to_string()),
            (DEVICES, self.devices(placement.node)),
        ]
    }

    /// Returns the slots of a host in the form of `CUDA_VISIBLE_DEVICES`: the GPUs of its ranks, in the order of the
    /// local ranks.
    pub(crate) fn devices(&self, node: usize) -> String {
        commas(&self.hosts[node].slots)
    }

    /// Returns the number of ranks on each host, for a launcher (mpich, impi, mvapich) that accepts one number for all
    /// hosts.
    pub(crate) fn ranks_per_host(&self, launcher: &'static str) -> Result<usize, HostsError> {
        let first = &self.hosts[0];
        let slots = first.slots.len();
        match self.hosts.iter().find(|host| host.slots.len() != slots) {
            None => Ok(slots),
            Some(other) => Err(HostsError::UnevenHosts {
                launcher,
                host: one_line(&first.name),
                slots,
                other: one_line(&other.name),
                other_slots: other.slots.len(),
            }),
        }
    }

    /// Returns the number of ranks on each host, for Slurm, which cannot select slots: the slots to use must be the
    /// first ones of each host.
    pub(crate) fn first_slots_per_host(&self) -> Result<usize, HostsError> {
        let slots = self.ranks_per_host("slurm")?;
        match self.hosts.iter().find(|host| host.slots.last() != Some(&(slots - 1))) {
            None => Ok(slots),
            Some(host) => {
                Err(HostsError::SlurmSlots { host: one_line(&host.name), slots: ranges(&host.slots), count: slots })
            }
        }
    }

    /// Encodes the world info.
    pub(crate) fn encode(&self) -> String {
        // The spaces are those that Python writes, so that the text is the same as that of DeepSpeed's launcher.
        let host = |host: &HostSlots| format!("{}: [{}]", serde_json::json!(host.name), join(&host.slots, ", "));
        let json = format!("{{{}}}", self.hosts.iter().map(host).collect::<Vec<_>>().join(", "));
        to_base64(json.as_bytes())
    }

    /// Decodes world info.
    pub(crate) fn decode(text: &str) -> Result<Self, HostsError> {
        let problem = |problem: String| HostsError::WorldInfo { problem };
        let json = from_base64(text).ok_or_else(|| problem(format!("`{}` is not URL-safe base64", one_line(text))))?;
        let mut json = serde_json::Deserializer::from_slice(&json);
        let hosts = json.deserialize_map(WorldInfoVisitor).and_then(|hosts| json.end().map(|()| hosts));
        Self::new(hosts.map_err(|error| problem(error.to_string()))?)
    }
}

/// A visitor that reads the entries of a JSON object in their order, which is that of the ranks.
struct WorldInfoVisitor;

impl<'de> Visitor<'de> for WorldInfoVisitor {
    type Value = Vec<HostSlots>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of hosts with their slots")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<HostSlots>, A::Error> {
        let mut hosts: Vec<HostSlots> = Vec::new();
        while let Some((name, slots)) = map.next_entry::<String, Vec<usize>>()? {
            if hosts.iter().any(|host| host.name == name) {
                return Err(A::Error::custom(format!("host `{}` is given twice", one_line(&name))));
            }
            if !slots.is_sorted_by(|a, b| a < b) {
                return Err(A::Error::custom(format!("the slots of host `{}` are not ascending", one_line(&name))));
            }
            hosts.push(HostSlots { name, slots });
        }
        Ok(hosts)
    }
}

fn commas(numbers: &[usize]) -> String {
    join(numbers, ",")
}

fn join(numbers: &[usize], separator: &str) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(separator)
}

/// The digits of URL-safe base64 (RFC 4648).
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            // A group of n bytes has n + 1 digits.
            let digit = if at <= group.len() { DIGITS[(bits >> (18 - 6 * at)) as usize & 63] } else { b'=' };
            text.push(char::from(digit));
        }
    }
    text
}

/// Decodes base64. Returns `None` if a digit is invalid or missing. The padding at the end is optional.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.trim().trim_end_matches('=');
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for group in text.as_bytes().chunks(4) {
        let mut bits = 0_u32;
        for digit in group {
            bits = bits << 6 | u32::try_from(DIGITS.iter().position(|known| known == digit)?).ok()?;
        }
        let bits = bits << (6 * (4 - group.len()));
        let count = group.len().checked_sub(1).filter(|count| *count > 0)?;
        bytes.extend_from_slice(&bits.to_be_bytes()[1..=count]);
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::recorded_cases;
    use super::*;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;

    fn world(hosts: &[(&str, &[usize])]) -> WorldInfo {
        WorldInfo::new(
            hosts.iter().map(|(name, slots)| HostSlots { name: (*name).into(), slots: slots.to_vec() }).collect(),
        )
        .unwrap()
    }

    /// Returns a rank in the recorded form, in which numbers are not strings.
    fn process(world: &WorldInfo, placement: &RankPlacement) -> Value {
        let mut process = Map::from_iter([("node".to_string(), json!(world.hosts()[placement.node].name))]);
        for (name, value) in world.variables(placement) {
            match name {
                "CUDA_VISIBLE_DEVICES" => process.insert("VISIBLE".into(), json!(value)),
                // The records do not contain this variable: it is torchrun's name for LOCAL_SIZE.
                "LOCAL_WORLD_SIZE" => None,
                _ => process.insert(name.into(), json!(value.parse::<usize>().unwrap())),
            };
        }
        Value::Object(process)
    }

    #[test]
    fn the_recorded_cases_hold() {
        let cases = recorded_cases::of_area("launcher-ranks");
        for case in &cases {
            let found = match &case["input"]["world"] {
                Value::Null => {
                    let world = WorldInfo::new(recorded_cases::hosts(&case["input"]["world_info"])).unwrap();
                    let ranks = (0..world.hosts().len()).flat_map(|node| world.ranks_of(node));
                    json!({"processes": ranks.map(|placement| process(&world, &placement)).collect::<Vec<_>>()})
                }
                hosts => {
                    let world = WorldInfo::new(recorded_cases::hosts(hosts)).unwrap();
                    assert_eq!(WorldInfo::decode(&world.encode()).unwrap(), world);
                    json!({"base64": world.encode()})
                }
            };
            recorded_cases::check(case, Ok(found));
        }
        assert_eq!(cases.len(), 3);
    }

    #[test]
    fn the_recorded_cases_of_starters_hold() {
        let cases = recorded_cases::of_area("launcher-backend");
        for case in &cases {
            let input = &case["input"];
            let found = match input["launcher"].as_str() {
                None => WorldInfo::new(recorded_cases::hosts(&input["active"])).unwrap().first_slots_per_host(),
                Some(_) => WorldInfo::new(recorded_cases::counted_hosts(&input["hostfile_slots"]))
                    .unwrap()
                    .ranks_per_host("mpich"),
            };
            recorded_cases::check(case, found.map(|_| json!({"ok": true})));
        }
        assert_eq!(cases.len(), 7);
    }

    #[test]
    fn local_ranks_are_devices_and_all_of_them_are_used() {
        let world = world(&[("a", &[1, 4, 7]), ("b", &[0, 2])]);
        assert_eq!((world.size(), world.hosts().len()), (5, 2));
        let b = world.ranks_of(1);
        assert_eq!(b[0], RankPlacement { rank: 3, node: 1, index: 0, local_rank: 1, slot: 2 });
        assert_eq!(b[1], RankPlacement { rank: 4, node: 1, index: 1, local_rank: 0, slot: 0 });
        let variables = world.variables(&b[0]);
        assert_eq!(variables[4], ("LOCAL_SIZE", "2".to_string()));
        assert_eq!(variables[7], ("CUDA_VISIBLE_DEVICES", "0,2".to_string()));
    }

    #[test]
    fn hosts_without_slots_do_not_count() {
        let world = WorldInfo::new(vec![HostSlots::with_slots("a", 0), HostSlots::with_slots("b", 2)]).unwrap();
        assert_eq!(world.hosts(), [HostSlots::with_slots("b", 2)]);
        insta::assert_snapshot!(WorldInfo::new(vec![HostSlots::with_slots("a", 0)]).unwrap_err(), @"no slot is left to start a rank on; add slots to the hosts in the hostfile, or change --include and --exclude so that some are kept");
    }

    #[test]
    fn starters_with_one_number_for_all_hosts_need_equal_hosts() {
        let uneven = world(&[("a", &[0, 1]), ("b", &[0])]);
        insta::assert_snapshot!(uneven.ranks_per_host("mpich").unwrap_err(), @"host `a` has 2 slots and host `b` has 1, but mpich starts the same number of ranks on every host; make them equal, with --num_gpus or in the hostfile");
        assert_eq!(world(&[("a", &[0, 1]), ("b", &[2, 5])]).ranks_per_host("mpich").unwrap(), 2);
        let picked = world(&[("a", &[0, 1]), ("b", &[1, 2])]);
        insta::assert_snapshot!(picked.first_slots_per_host().unwrap_err(), @"host `b` would use slots 1-2, but Slurm starts ranks on the first slots of every host; select slots 0 to 1");
        assert_eq!(world(&[("a", &[0, 1]), ("b", &[0, 1])]).first_slots_per_host().unwrap(), 2);
    }

    #[test]
    fn a_wrong_world_info_is_refused() {
        let refusal = |text: &str| WorldInfo::decode(text).unwrap_err().to_string();
        let json = |json: &str| refusal(&to_base64(json.as_bytes()));
        insta::assert_snapshot!(refusal("e30+"), @r#"cannot read the world info: `e30+` is not URL-safe base64; it must be the base64 of {"HOST": [SLOT, ...], ...}, as the launcher wrote it"#);
        insta::assert_snapshot!(json(r#"{"a": [0], "a": [1]}"#), @r#"cannot read the world info: host `a` is given twice at line 1 column 20; it must be the base64 of {"HOST": [SLOT, ...], ...}, as the launcher wrote it"#);
        insta::assert_snapshot!(json(r#"{"a": [1, 0]}"#), @r#"cannot read the world info: the slots of host `a` are not ascending at line 1 column 13; it must be the base64 of {"HOST": [SLOT, ...], ...}, as the launcher wrote it"#);
        for wrong in [r#"{"a": [-1]}"#, r#"{"a": 2}"#, "[]", "{}", "", r#"{"a": [0]} x"#, r#"{"a": [0]"#] {
            json(wrong);
        }
        for wrong in ["e", "eyJhIjogWzBdfQ==x", "é"] {
            refusal(wrong);
        }
    }

    proptest! {
        #[test]
        fn a_world_info_is_read_back(slots in vec(btree_set(0..99_usize, 1..9), 1..9)) {
            let host = |(at, slots): (usize, BTreeSet<usize>)| HostSlots {
                name: format!("\"hôst-{}", 9 - at),
                slots: slots.into_iter().collect(),
            };
            let world = WorldInfo::new(slots.into_iter().enumerate().map(host).collect()).unwrap();
            prop_assert_eq!(WorldInfo::decode(&world.encode()).unwrap(), world);
        }

        #[test]
        fn base64_is_read_back_with_and_without_its_filling(bytes in vec(any::<u8>(), 0..40)) {
            let text = to_base64(&bytes);
            prop_assert_eq!(text.len() % 4, 0);
            prop_assert_eq!(from_base64(text.trim_end_matches('=')), Some(bytes.clone()));
            prop_assert_eq!(from_base64(&text), Some(bytes));
        }

        #[test]
        fn every_rank_and_every_local_rank_is_there_once(counts in vec(0..7_usize, 1..9)) {
            prop_assume!(counts.iter().any(|count| *count > 0));
            let hosts = counts.iter().enumerate().map(|(at, count)| HostSlots::with_slots(at.to_string(), *count));
            let world = WorldInfo::new(hosts.collect()).unwrap();
            let mut next = 0;
            for node in 0..world.hosts().len() {
                let ranks = world.ranks_of(node);
                let mut local: Vec<usize> = ranks.iter().map(|placement| placement.local_rank).collect();
                local.sort_unstable();
                prop_assert_eq!(local, (0..ranks.len()).collect::<Vec<_>>());
                for placement in ranks {
                    prop_assert_eq!(placement.rank, next);
                    next += 1;
                }
            }
            prop_assert_eq!(next, world.size());
        }
    }
}
