//! Texts about hosts: hostfiles and the selection among their hosts, encoded world info (the slots of each host), lists
//! of cores, and files with variables. The first byte selects the kind of text.

use super::{join, split};
use crate::launch::hosts::core_list::{CoreList, ranges};
use crate::launch::hosts::export_rules::{ExportedVariables, expanded_word, literal_word};
use crate::launch::hosts::host_filter::HostSelection;
use crate::launch::hosts::hostfile::parse;
use crate::launch::hosts::world_info::WorldInfo;
use std::collections::BTreeSet;
use std::path::Path;

/// Words of these texts.
pub(super) const WORDS: [&str; 16] = [
    "slots=",
    "slots",
    "=",
    "\n",
    "#",
    " ",
    "\t",
    "@",
    ":",
    ",",
    "-",
    "worker-0",
    "worker-1",
    "\u{feff}",
    "max_slots=8",
    "\r",
];

/// Reads a text.
///
/// # Panics
/// Panics if something that was read changes when it is written and read again, if a selection contains a host or slot
/// that the hostfile lacks, or if ranks are not numbered in order.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    let Ok(text) = std::str::from_utf8(rest) else { return false };
    match first % 4 {
        0 => hostfile(text),
        1 => WorldInfo::decode(text).is_ok_and(|world| check_world(&world)),
        2 => cores(text),
        _ => variables(text),
    }
}

/// Reads a filter from the first line, and a hostfile from the rest.
fn hostfile(text: &str) -> bool {
    let path = Path::new("hostfile");
    let (filter, text) = text.split_once('\n').unwrap_or_default();
    let Ok(hosts) = parse(text, path) else { return false };
    // A byte order mark is skipped at the beginning, and is part of a name elsewhere.
    let lines = hosts.iter().map(|host| format!("{} slots={}\n", host.name, host.slots.len()));
    let lines = "#\n".to_owned() + &lines.collect::<String>();
    assert_eq!(parse(&lines, path).expect("a written hostfile can be read"), hosts);
    let [include, exclude] = match filter.strip_prefix('!') {
        Some(filter) => ["", filter],
        None => [filter, ""],
    };
    let all = HostSelection::default().apply(&hosts).expect("all hosts can be selected");
    assert_eq!(all, hosts);
    let selection = HostSelection { include: include.into(), exclude: exclude.into(), ..HostSelection::default() };
    let Ok(selected) = selection.apply(&hosts) else { return false };
    for host in &selected {
        let all = hosts.iter().find(|listed| listed.name == host.name).expect("a selected host is in the hostfile");
        let listed: BTreeSet<_> = all.slots.iter().collect();
        assert!(host.slots.iter().all(|slot| listed.contains(slot)), "{host:?} of {all:?}");
    }
    WorldInfo::new(selected).is_ok_and(|world| check_world(&world))
}

fn check_world(world: &WorldInfo) -> bool {
    assert_eq!(WorldInfo::decode(&world.encode()).expect("an encoded world can be decoded"), *world);
    let mut rank = 0;
    for node in 0..world.hosts().len().min(4) {
        for placement in world.ranks_of(node) {
            assert_eq!(placement.rank, rank);
            rank += 1;
            // A rank's variables contain as many numbers as the host has slots, so they are built only for the first
            // ranks.
            if rank < 8 {
                let _ = world.variables(&placement);
            }
        }
    }
    let _ = (world.ranks_per_host("mpich"), world.first_slots_per_host());
    rank <= world.size()
}

fn cores(text: &str) -> bool {
    let Ok(list) = CoreList::parse(text) else { return false };
    assert_eq!(CoreList::parse(&ranges(list.cores())).expect("a written list can be read"), list);
    for ranks in [1, 3] {
        let _ = list.share(ranks - 1, ranks);
    }
    true
}

fn variables(text: &str) -> bool {
    let mut variables = ExportedVariables::default();
    if variables.add_file(text, Path::new(".deepspeed_env")).is_err() {
        return false;
    }
    for (_, value) in variables.iter() {
        let _ = (expanded_word(value), literal_word(value));
    }
    let lines: String = variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let mut again = ExportedVariables::default();
    again.add_file(&lines, Path::new("again")).expect("written variables can be read");
    assert_eq!(again, variables);
    true
}

/// Returns texts of all kinds.
pub fn seeds() -> Vec<Vec<u8>> {
    let world = "eyJ3b3JrZXItMCI6IFswLCAxXSwgIndvcmtlci0xIjogWzAsIDJdfQ==";
    [
        (0, "worker-0:0,2@worker-1\nworker-0 slots=4\nworker-1 slots=4\n"),
        (0, "!worker-1:1\n# hosts\n\nworker-0 slots=2 max_slots=8\n worker-1\tslots=3\n10.0.0.7 slots=1\n"),
        (0, "\n\u{feff}é slots=512\r\nb slots=0\n"),
        (1, world),
        (2, "0,2-4,6"),
        (2, "0-511,700,65535"),
        (3, "# variables\nNCCL_DEBUG=INFO\nPATH = a b 'c' \"$HOME\"\n\nX=\n"),
    ]
    .map(|(first, text)| join(first, text.as_bytes()))
    .to_vec()
}
