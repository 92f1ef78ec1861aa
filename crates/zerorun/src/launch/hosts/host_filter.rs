//! Selects the hosts and slots to use: by `--include` or `--exclude`, or by `--num_nodes` and `--num_gpus`.
//!
//! ```text
//! FILTER = NODE [@ NODE]...            worker-0@worker-1:0,2
//! NODE   = HOST | HOST : SLOT [, SLOT]...
//! ```
//!
//! A host that is named twice gets the slots of both mentions, and slots take precedence over a bare name (`a@a:0` is
//! `a:0`). Whatever the order in a filter, hosts keep the order of the hostfile, and slots are in ascending order.

use super::HostSlots;
use super::core_list::ranges;
use super::error::{HostsError, one_line};
use candle_zero::util::{list, suggest_names};
use std::collections::{BTreeMap, BTreeSet};

/// The user's selection of hosts and slots. By default, all are used.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct HostSelection {
    /// The filter of `--include`; empty if not given.
    pub(crate) include: String,
    /// The filter of `--exclude`; empty if not given.
    pub(crate) exclude: String,
    /// The number of hosts to use from the beginning of the hostfile.
    pub(crate) num_nodes: Option<usize>,
    /// The number of slots of each host, which overrides the hostfile. Slots are numbered from 0.
    pub(crate) num_gpus: Option<usize>,
}

impl HostSelection {
    /// Returns the selected hosts and slots. The result may be empty, which [`super::world_info::WorldInfo::new`]
    /// refuses.
    pub(crate) fn apply(&self, hosts: &[HostSlots]) -> Result<Vec<HostSlots>, HostsError> {
        match (self.filter()?, self.count()?) {
            (Some(filter), Some(count)) => Err(HostsError::FilterAndCount { filter: filter.option(), count }),
            (Some(filter), None) => filter.apply(hosts),
            (None, _) => self.first(hosts),
        }
    }

    fn filter(&self) -> Result<Option<HostFilter>, HostsError> {
        match (self.include.as_str(), self.exclude.as_str()) {
            ("", "") => Ok(None),
            (include, "") => Ok(Some(HostFilter::Include(nodes(include, "--include")?))),
            ("", exclude) => Ok(Some(HostFilter::Exclude(nodes(exclude, "--exclude")?))),
            _ => Err(HostsError::IncludeAndExclude),
        }
    }

    /// Returns the option that gives a number, if any.
    fn count(&self) -> Result<Option<&'static str>, HostsError> {
        let counts = [("--num_nodes", self.num_nodes), ("--num_gpus", self.num_gpus)];
        match counts.iter().find(|(_, count)| *count == Some(0)) {
            Some((option, _)) => Err(HostsError::Zero { option }),
            None => Ok(counts.iter().find(|(_, count)| count.is_some()).map(|(option, _)| *option)),
        }
    }

    fn first(&self, hosts: &[HostSlots]) -> Result<Vec<HostSlots>, HostsError> {
        let count = self.num_nodes.unwrap_or(hosts.len());
        let Some(selected) = hosts.get(..count) else {
            return Err(HostsError::TooFewHosts { asked: count, found: hosts.len() });
        };
        match self.num_gpus {
            Some(slots) if slots > super::error::MAX_SLOTS => Err(HostsError::TooManyRanks { slots }),
            Some(slots) => Ok(selected.iter().map(|host| HostSlots::with_slots(&host.name, slots)).collect()),
            None => Ok(selected.to_vec()),
        }
    }
}

/// The slots by host. A host that is named without slots has an empty set.
type SlotsByHost = BTreeMap<String, BTreeSet<usize>>;

#[derive(Debug)]
enum HostFilter {
    Include(SlotsByHost),
    Exclude(SlotsByHost),
}

impl HostFilter {
    fn option(&self) -> &'static str {
        match self {
            Self::Include(_) => "--include",
            Self::Exclude(_) => "--exclude",
        }
    }

    /// Applies the filter, and drops hosts without slots.
    fn apply(&self, hosts: &[HostSlots]) -> Result<Vec<HostSlots>, HostsError> {
        let (Self::Include(nodes) | Self::Exclude(nodes)) = self;
        for (name, slots) in nodes {
            check(name, slots, hosts, self.option())?;
        }
        let remaining = hosts.iter().map(|host| {
            let slots = host.slots.iter().copied().filter(|slot| self.keeps(&host.name, *slot)).collect();
            HostSlots { name: host.name.clone(), slots }
        });
        Ok(remaining.filter(|host| !host.slots.is_empty()).collect())
    }

    fn keeps(&self, host: &str, slot: usize) -> bool {
        let is_named =
            |nodes: &SlotsByHost| nodes.get(host).is_some_and(|slots| slots.is_empty() || slots.contains(&slot));
        match self {
            Self::Include(nodes) => is_named(nodes),
            Self::Exclude(nodes) => !is_named(nodes),
        }
    }
}

fn check(name: &str, slots: &BTreeSet<usize>, hosts: &[HostSlots], option: &'static str) -> Result<(), HostsError> {
    let Some(host) = hosts.iter().find(|host| host.name == name) else {
        let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
        let known = match suggest_names(name, names.iter().copied()) {
            Some(suggestion) if names.len() > 1 => format!("{}; {suggestion}", list(&names)),
            _ => list(&names),
        };
        return Err(HostsError::UnknownHost { option, host: one_line(name), known });
    };
    match slots.iter().find(|slot| !host.slots.contains(slot)) {
        None => Ok(()),
        Some(slot) => Err(HostsError::UnknownSlot {
            option,
            host: one_line(name),
            slot: *slot,
            known: if host.slots.is_empty() { "none".into() } else { ranges(&host.slots) },
        }),
    }
}

fn nodes(filter: &str, option: &'static str) -> Result<SlotsByHost, HostsError> {
    let mut nodes = SlotsByHost::new();
    for node in filter.split('@') {
        let (host, slots) = match node.split_once(':') {
            Some((_, slots)) if slots.contains(':') => {
                return Err(HostsError::TwoColons { option, node: one_line(node) });
            }
            Some((host, slots)) => (host, slots.split(',').map(|text| slot(text, node, option)).collect()),
            None => (node, Ok(vec![])),
        };
        if host.is_empty() {
            return Err(HostsError::NamelessHost { option, filter: one_line(filter) });
        }
        nodes.entry(host.to_string()).or_default().extend(slots?);
    }
    Ok(nodes)
}

fn slot(text: &str, node: &str, option: &'static str) -> Result<usize, HostsError> {
    // DeepSpeed allows blanks around its numbers.
    text.trim().parse().map_err(|_| HostsError::BadSlot { option, node: one_line(node), slot: one_line(text) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::recorded_cases;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn three() -> Vec<HostSlots> {
        vec![HostSlots::with_slots("h-c", 2), HostSlots::with_slots("h-a", 3), HostSlots::with_slots("h-b", 1)]
    }

    fn include(filter: &str) -> HostSelection {
        HostSelection { include: filter.into(), ..HostSelection::default() }
    }

    fn exclude(filter: &str) -> HostSelection {
        HostSelection { exclude: filter.into(), ..HostSelection::default() }
    }

    fn kept(selection: &HostSelection) -> String {
        let hosts = selection.apply(&three()).unwrap();
        hosts.iter().map(|host| format!("{}:{}", host.name, ranges(&host.slots))).collect::<Vec<_>>().join(" ")
    }

    fn refusal(selection: &HostSelection) -> String {
        selection.apply(&three()).unwrap_err().to_string()
    }

    #[test]
    fn the_recorded_cases_hold() {
        let cases = recorded_cases::of_area("launcher-filter");
        for case in &cases {
            let input = &case["input"];
            let hosts = match &input["hostfile_slots"] {
                Value::Null => recorded_cases::hosts(&input["hosts"]),
                counts => recorded_cases::counted_hosts(counts),
            };
            let text = |key: &str| input[key].as_str().unwrap().to_string();
            let selection =
                HostSelection { include: text("include"), exclude: text("exclude"), ..HostSelection::default() };
            let found = selection.apply(&hosts);
            recorded_cases::check(
                case,
                found.map(|hosts| json!({"ok": true, "active": recorded_cases::as_recorded(&hosts)})),
            );
        }
        assert_eq!(cases.len(), 17);
    }

    /// Reads the options' values from a command line, up to the script.
    fn parse_selection(words: &Value) -> HostSelection {
        let mut words = words.as_array().unwrap().iter().map(|word| word.as_str().unwrap());
        let mut selection = HostSelection::default();
        while let Some(option) = words.next().filter(|word| word.starts_with('-')) {
            let value = words.next().unwrap();
            match option {
                "-i" => selection.include = value.into(),
                "-e" => selection.exclude = value.into(),
                "--num_nodes" => selection.num_nodes = Some(value.parse().unwrap()),
                "--num_gpus" => selection.num_gpus = Some(value.parse().unwrap()),
                other => panic!("{other}"),
            }
        }
        selection
    }

    #[test]
    fn the_recorded_cases_of_filters_with_numbers_hold() {
        for case in ["cliexcl-1", "cliexcl-3", "cliexcl-5"].map(recorded_cases::case) {
            let found = parse_selection(&case["input"]["argv"]).apply(&[HostSlots::with_slots("localhost", 1)]);
            assert!(matches!(found, Err(HostsError::FilterAndCount { .. })), "{}: {found:?}", case["id"]);
            recorded_cases::check(&case, found.map(|_| json!({"ok": true})));
        }
    }

    #[test]
    fn filters_keep_and_drop_hosts_and_slots_in_the_order_of_the_hostfile() {
        for (filter, included, excluded) in [
            ("h-a", "h-a:0-2", "h-c:0-1 h-b:0"),
            ("h-b@h-c", "h-c:0-1 h-b:0", "h-a:0-2"),
            ("h-a:2,0,2", "h-a:0,2", "h-c:0-1 h-a:1 h-b:0"),
            ("h-a:0@h-a: 1", "h-a:0-1", "h-c:0-1 h-a:2 h-b:0"),
            ("h-a@h-a:1", "h-a:1", "h-c:0-1 h-a:0,2 h-b:0"),
            ("h-a:1@h-a", "h-a:1", "h-c:0-1 h-a:0,2 h-b:0"),
            ("h-b:0@h-c:1", "h-c:1 h-b:0", "h-c:0 h-a:0-2"),
        ] {
            assert_eq!(kept(&include(filter)), included, "include {filter}");
            assert_eq!(kept(&exclude(filter)), excluded, "exclude {filter}");
        }
        assert_eq!(kept(&exclude("h-a@h-b@h-c")), "");
        assert_eq!(kept(&HostSelection::default()), "h-c:0-1 h-a:0-2 h-b:0");
    }

    #[test]
    fn a_host_without_slots_goes_with_a_filter_and_stays_without_one() {
        let hosts = [HostSlots::with_slots("a", 0), HostSlots::with_slots("b", 1)];
        assert_eq!(exclude("a").apply(&hosts).unwrap(), hosts[1..]);
        assert_eq!(include("a").apply(&hosts).unwrap(), []);
        assert_eq!(HostSelection::default().apply(&hosts).unwrap(), hosts);
        insta::assert_snapshot!(include("a:0").apply(&hosts).unwrap_err(), @"--include names slot 0 of host `a`, whose slots are: none; name one of them, or give the host more slots in the hostfile");
    }

    #[test]
    fn numbers_take_the_first_hosts_and_slots_that_the_hostfile_need_not_have() {
        let nodes = |num_nodes| HostSelection { num_nodes, ..HostSelection::default() };
        assert_eq!(kept(&nodes(Some(2))), "h-c:0-1 h-a:0-2");
        assert_eq!(kept(&nodes(Some(3))), kept(&HostSelection::default()));
        assert_eq!(kept(&HostSelection { num_gpus: Some(2), ..nodes(Some(1)) }), "h-c:0-1");
        assert_eq!(kept(&HostSelection { num_gpus: Some(2), ..nodes(None) }), "h-c:0-1 h-a:0-1 h-b:0-1");
    }

    #[test]
    fn errors_name_the_option_and_what_there_is() {
        insta::assert_snapshot!(refusal(&include("jeff")), @"--include names host `jeff`, which is not one of the hosts: h-c, h-a, h-b; name one of them, or add it to the hostfile");
        insta::assert_snapshot!(refusal(&exclude("h-aa:0")), @"--exclude names host `h-aa`, which is not one of the hosts: h-c, h-a, h-b; the nearest are h-a, h-c, h-b; name one of them, or add it to the hostfile");
        insta::assert_snapshot!(refusal(&include("h-a:0,4")), @"--include names slot 4 of host `h-a`, whose slots are: 0-2; name one of them, or give the host more slots in the hostfile");
        insta::assert_snapshot!(refusal(&include("h-a:0-2")), @"`0-2` in `h-a:0-2` of --include is not a slot; write whole numbers separated by commas, for example HOST:0,2, or only HOST for all its slots");
        insta::assert_snapshot!(refusal(&exclude("h-a:")), @"`` in `h-a:` of --exclude is not a slot; write whole numbers separated by commas, for example HOST:0,2, or only HOST for all its slots");
        insta::assert_snapshot!(refusal(&include("h-a:0:1")), @"`h-a:0:1` of --include has more than one colon; write HOST:0,1 for slots, and @ between hosts");
        insta::assert_snapshot!(refusal(&include("h-a@")), @"`h-a@` of --include has an empty host name; write HOST or HOST:0,2, and @ between hosts");
        insta::assert_snapshot!(refusal(&HostSelection { exclude: "h-a".into(), ..include("h-b") }), @"--include and --exclude are both given; give only one: the first lists what to use, the second what not to use");
        insta::assert_snapshot!(refusal(&HostSelection { num_gpus: Some(1), ..include("h-b") }), @"--include and --num_gpus are both given; give only one: a filter already selects hosts and slots");
        insta::assert_snapshot!(refusal(&HostSelection { num_nodes: Some(4), ..HostSelection::default() }), @"--num_nodes 4 is above the number of hosts, 3; give at most 3, or add hosts to the hostfile");
        insta::assert_snapshot!(refusal(&HostSelection { num_nodes: Some(0), ..HostSelection::default() }), @"--num_nodes 0 would start no ranks; give at least 1, or leave --num_nodes out to use all");
        insta::assert_snapshot!(refusal(&HostSelection { num_gpus: Some(1 << 20), ..HostSelection::default() }), @"--num_gpus 1048576 is above 65536, the maximum number of slots of a host; give the number of ranks per host");
    }

    #[test]
    fn an_include_and_the_same_exclude_part_the_slots() {
        let hosts = three();
        let all: Vec<(String, usize)> = pairs(&hosts);
        proptest!(|(picked in proptest::sample::subsequence(all.clone(), 1..=all.len()).prop_shuffle())| {
            let filter: Vec<String> = picked.iter().map(|(host, slot)| format!("{host}:{slot}")).collect();
            let filter = filter.join("@");
            let mut both = pairs(&include(&filter).apply(&hosts).unwrap());
            prop_assert_eq!(both.len(), picked.len());
            both.extend(pairs(&exclude(&filter).apply(&hosts).unwrap()));
            both.sort();
            let mut all = all.clone();
            all.sort();
            prop_assert_eq!(both, all);
        });
    }

    fn pairs(hosts: &[HostSlots]) -> Vec<(String, usize)> {
        hosts.iter().flat_map(|host| host.slots.iter().map(|slot| (host.name.clone(), *slot))).collect()
    }
}
