//! A check that the hosts run the same program and have similar clocks, if no launcher of this library has compared
//! them.

use super::link::MpiLink;
use super::topology::HostTopology;
use crate::comm::clock_skew;
use crate::error::CommError;
use crate::notice::warn;
use std::hash::Hasher;
use std::io::Read;
use twox_hash::XxHash3_64;

/// The data that the first rank of a host reports: a hash of its program (0 if the program cannot be read), and its
/// clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostPreflight {
    program: u64,
    clock: u64,
}

/// Collective, called directly after another collective: returns an error if a host runs a different program. Rank 0
/// warns about clocks that differ greatly from its own.
///
/// # Errors
/// Fails if MPI fails or programs differ.
pub(super) fn check(link: &MpiLink, hosts: &HostTopology) -> Result<(), CommError> {
    if hosts.host_ranks().len() < 2 {
        return Ok(());
    }
    // The clock is read first, because reading the program may take some time on one host.
    let clock = clock_skew::seconds();
    let program = if link.rank() == hosts.local_ranks().start { own_program().unwrap_or(0) } else { 0 };
    let all = link.gather(&[program, clock].map(u64::to_le_bytes).concat())?;
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
    let facts: Vec<(&str, HostPreflight)> = hosts
        .host_ranks()
        .iter()
        .map(|ranks| {
            let bytes = &all[ranks.start];
            (hosts.name_of(ranks.start), HostPreflight { program: word(bytes, 0), clock: word(bytes, 1) })
        })
        .collect();
    if link.rank() == 0 {
        warnings(&facts).iter().for_each(|text| warn(text));
    }
    difference(&facts)
}

fn warnings(facts: &[(&str, HostPreflight)]) -> Vec<String> {
    let first = facts[0].1.clock;
    facts.iter().filter_map(|(host, facts)| clock_skew::warning(host, facts.clock as i64 - first as i64)).collect()
}

fn difference(facts: &[(&str, HostPreflight)]) -> Result<(), CommError> {
    let (first, own) = facts[0];
    let differs =
        |other: &&(&str, HostPreflight)| own.program != 0 && other.1.program != 0 && other.1.program != own.program;
    match facts.iter().find(differs) {
        Some((host, _)) => Err(CommError::ProgramsDiffer { first: first.into(), host: (*host).into() }),
        None => Ok(()),
    }
}

/// Returns a hash of the program of this process.
fn own_program() -> std::io::Result<u64> {
    let (mut file, mut hash, mut buffer) =
        (std::fs::File::open("/proc/self/exe")?, XxHash3_64::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finish()),
            read => hash.write(&buffer[..read]),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn facts(program: u64, clock: u64) -> HostPreflight {
        HostPreflight { program, clock }
    }

    #[test]
    fn a_host_with_another_program_is_named_and_an_unread_one_is_not() {
        assert!(difference(&[("a", facts(7, 0)), ("b", facts(7, 0)), ("c", facts(0, 0))]).is_ok());
        let error = difference(&[("a", facts(7, 0)), ("b", facts(7, 0)), ("c", facts(8, 0))]).unwrap_err();
        insta::assert_snapshot!(error, @"hosts a and c run programs with different contents; copy the same file to all hosts");
        assert_ne!(own_program().unwrap(), 0);
    }

    #[test]
    fn a_host_with_another_time_is_named() {
        let texts = warnings(&[("a", facts(0, 1_000)), ("b", facts(0, 1_010)), ("c", facts(0, 880))]);
        insta::assert_snapshot!(texts.join("\n"), @"warning: the clock of host c is 120 s behind the first host's: the times of logs and checkpoints cannot be compared; synchronize both clocks with a time server");
    }
}
