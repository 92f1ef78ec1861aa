//! Decides whether a host may join the job, and finds the differences between that host and the first host.
//!
//! If the script's arguments or a file differ, the message to the host contains that host's own value, but at most a
//! digest of the first host's value. The first host's own output contains both values.

use super::checksums;
use super::handshake::printable;
use super::secret::digest;
use super::wire::HostHello;
use candle_zero::comm::clock_skew;

/// The maximum number of ranks of a host.
pub(super) const MAX_RANKS: usize = 1024;
/// The maximum number of characters of a host's text in a message.
const MAX_SHOWN_CHARS: usize = 1000;

/// The reason why a host may not join.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AdmissionRefusal {
    /// The message sent to the host.
    pub(super) for_host: String,
    /// The message printed by the first host.
    pub(super) for_first_host: String,
}

impl AdmissionRefusal {
    /// Creates a refusal with the same message for both hosts.
    fn plain(text: String) -> Option<Self> {
        Some(Self { for_host: text.clone(), for_first_host: text })
    }
}

/// Returns the refusal if a host cannot join the job of `first_host`. `holder` is the host that already uses
/// the same `--node_rank`.
pub(super) fn refusal(
    first_host: &HostHello,
    holder: Option<&HostHello>,
    hello: &HostHello,
) -> Option<AdmissionRefusal> {
    let HostHello { nodes, node, ranks, .. } = *hello;
    if nodes != first_host.nodes {
        return AdmissionRefusal::plain(format!(
            "--nnodes is {nodes} on host {} and {} on the first host; give both hosts the same value, or, if these are \
             two jobs, give one of them a different --master_port",
            name(hello),
            first_host.nodes
        ));
    }
    if node >= nodes {
        return AdmissionRefusal::plain(format!(
            "--node_rank {node} is not below --nnodes {nodes}; number the hosts from 0 to {}",
            nodes - 1
        ));
    }
    if !(1..=MAX_RANKS).contains(&ranks) {
        return AdmissionRefusal::plain(format!(
            "--num_ranks is {ranks} on host {}; give each host 1 to {MAX_RANKS} ranks",
            name(hello)
        ));
    }
    if let Some(other) = holder.filter(|other| other.launcher != hello.launcher) {
        return AdmissionRefusal::plain(format!(
            "--node_rank {node} is already used by host {}; give each host its own number from 0 to {}, and each job \
             its own --master_port",
            name(other),
            nodes - 1
        ));
    }
    difference(first_host, hello)
}

/// Returns the refusal if a host differs from the first host in a way that is not allowed.
fn difference(first_host: &HostHello, hello: &HostHello) -> Option<AdmissionRefusal> {
    let [here, there] = [name(first_host), name(hello)];
    if first_host.words != hello.words {
        let shown = |hello: &HostHello| printable(&hello.words.join(" "), MAX_SHOWN_CHARS);
        return Some(AdmissionRefusal {
            for_host: format!(
                "the script's arguments are `{}` on this host, with digest {}, but those on host {here} have digest \
                 {}; give the arguments that the output of host {here} shows",
                shown(hello),
                digest(&hello.words),
                digest(&first_host.words)
            ),
            for_first_host: format!(
                "the script's arguments are `{}` on host {here} and `{}` on host {there}; give both hosts the \
                 same arguments",
                shown(first_host),
                shown(hello)
            ),
        });
    }
    let mut names = first_host.files.keys().chain(hello.files.keys());
    names.find(|name| first_host.files.get(*name) != hello.files.get(*name)).map(|file| {
        let of = |hello: &HostHello| hello.files.get(file).map_or("missing".to_string(), |sum| printable(sum, 100));
        let (file, remedy) = (
            printable(file, MAX_SHOWN_CHARS),
            "copy the same file to both hosts; if it is the program, build it once and pass the executable",
        );
        AdmissionRefusal {
            for_host: format!(
                "{file} differs from the one on host {here}: on this host, it is {}; {remedy}",
                of(hello)
            ),
            for_first_host: format!(
                "{file} is {} on host {here} and {} on host {there}; {remedy}",
                of(first_host),
                of(hello)
            ),
        }
    })
}

/// Returns the name that a host gives itself.
pub(super) fn name(hello: &HostHello) -> String {
    printable(&hello.host, 64)
}

/// Returns how far a host's clock is ahead of this one's, in seconds.
pub(super) fn clock_ahead(hello: &HostHello) -> i64 {
    let seconds = |clock: u64| i64::try_from(clock).unwrap_or(i64::MAX);
    seconds(hello.clock).saturating_sub(seconds(clock_skew::seconds()))
}

/// Describes folders that exist both on the first host and on another one, but differ. A job may write into a folder,
/// so this is only a warning.
pub(super) fn folders<'a>(own: &'a HostHello, other: &'a HostHello) -> impl Iterator<Item = String> + 'a {
    own.folders.iter().filter_map(move |(folder, here)| {
        let (first, second) = (name(own), name(other));
        let there = other.folders.get(folder)?;
        let difference = checksums::difference([(first.as_str(), here), (second.as_str(), there)])?;
        Some(format!(
            "zerorun: warning: the folder {folder} differs between hosts {first} and {second}: {}; copy the same files \
             to both, unless the job itself writes there",
            printable(&difference, MAX_SHOWN_CHARS)
        ))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Returns the Hello of a host that joins a job of two hosts.
    pub(in crate::launch::nodes) fn hello(host: &str) -> HostHello {
        HostHello {
            nodes: 2,
            node: 0,
            ranks: 2,
            host: host.into(),
            words: vec!["--ds_config".into(), "zero3.json".into()],
            files: BTreeMap::from([("zero3.json".to_string(), "412 bytes with checksum 11".to_string())]),
            folders: BTreeMap::new(),
            clock: 1_000,
            launcher: 1,
        }
    }

    fn refusal_after(change: fn(&mut HostHello)) -> AdmissionRefusal {
        let mut other = HostHello { node: 1, launcher: 2, ..hello("b") };
        change(&mut other);
        refusal(&hello("a"), None, &other).unwrap()
    }

    #[test]
    fn hosts_that_differ_are_told_what_they_have_and_the_first_says_what_both_have() {
        assert_eq!(refusal(&hello("a"), None, &HostHello { node: 1, launcher: 2, ..hello("b") }), None);
        let words = refusal_after(|b| b.words[1] = "zero2.json".into());
        insta::assert_snapshot!(words.for_host, @"the script's arguments are `--ds_config zero2.json` on this host, with digest 351ba923, but those on host a have digest ed663171; give the arguments that the output of host a shows");
        insta::assert_snapshot!(words.for_first_host, @"the script's arguments are `--ds_config zero3.json` on host a and `--ds_config zero2.json` on host b; give both hosts the same arguments");
        let file = refusal_after(|b| b.files.values_mut().for_each(|sum| *sum = "413 bytes with checksum 12".into()));
        insta::assert_snapshot!(file.for_host, @"zero3.json differs from the one on host a: on this host, it is 413 bytes with checksum 12; copy the same file to both hosts; if it is the program, build it once and pass the executable");
        insta::assert_snapshot!(file.for_first_host, @"zero3.json is 412 bytes with checksum 11 on host a and 413 bytes with checksum 12 on host b; copy the same file to both hosts; if it is the program, build it once and pass the executable");
        let gone = refusal_after(|b| b.files.clear());
        insta::assert_snapshot!(gone.for_host, @"zero3.json differs from the one on host a: on this host, it is missing; copy the same file to both hosts; if it is the program, build it once and pass the executable");
        insta::assert_snapshot!(gone.for_first_host, @"zero3.json is 412 bytes with checksum 11 on host a and missing on host b; copy the same file to both hosts; if it is the program, build it once and pass the executable");
    }

    #[test]
    fn numbers_that_no_host_of_the_job_has_are_refused() {
        let for_host = |change: fn(&mut HostHello)| {
            let AdmissionRefusal { for_host, for_first_host } = refusal_after(change);
            assert_eq!(for_host, for_first_host);
            for_host
        };
        insta::assert_snapshot!(for_host(|b| b.nodes = 3), @"--nnodes is 3 on host b and 2 on the first host; give both hosts the same value, or, if these are two jobs, give one of them a different --master_port");
        insta::assert_snapshot!(for_host(|b| b.node = 2), @"--node_rank 2 is not below --nnodes 2; number the hosts from 0 to 1");
        insta::assert_snapshot!(for_host(|b| b.ranks = 0), @"--num_ranks is 0 on host b; give each host 1 to 1024 ranks");
        insta::assert_snapshot!(for_host(|b| b.ranks = usize::MAX), @"--num_ranks is 18446744073709551615 on host b; give each host 1 to 1024 ranks");
        let holder = HostHello { node: 1, launcher: 3, ..hello("c") };
        let two = refusal(&hello("a"), Some(&holder), &HostHello { node: 1, launcher: 2, ..hello("b") }).unwrap();
        insta::assert_snapshot!(two.for_host, @"--node_rank 1 is already used by host c; give each host its own number from 0 to 1, and each job its own --master_port");
        // This is the same launcher, after its connection broke.
        assert_eq!(refusal(&hello("a"), Some(&holder), &HostHello { node: 1, launcher: 3, ..hello("c") }), None);
    }

    #[test]
    fn what_a_host_calls_itself_obeys_no_terminal() {
        let message = refusal_after(|b| (b.nodes, b.host) = (3, "\u{1b}[2J".repeat(1000))).for_first_host;
        assert!(message.len() < 1000 && !message.contains('\u{1b}'), "{message}");
    }

    #[test]
    fn a_clock_may_say_anything() {
        for clock in [0, 1 << 40, u64::MAX] {
            clock_ahead(&HostHello { clock, ..hello("a") });
        }
    }
}
