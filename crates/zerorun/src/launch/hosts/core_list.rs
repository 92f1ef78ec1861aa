//! The cores for the ranks of one host: the list of `--bind_core_list`, and its division among ranks.
//!
//! ```text
//! LIST = PART [, PART]...     0,2-4,6 are the cores 0 2 3 4 6
//! PART = N | N-N              ascending, without overlap
//! ```
//!
//! Each rank gets the same number of consecutive cores of the list. Remaining cores at the end of the list stay unused.
//! Without a list, the cores of each NUMA node are consecutive, so that a rank's cores span as few nodes as possible.

use super::error::{HostsError, one_line};

/// The cores that ranks may be bound to, in the order of assignment: ascending, or ascending within each NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CoreList(Vec<usize>);

impl CoreList {
    /// Creates a list of ascending cores.
    pub(crate) fn of(cores: Vec<usize>) -> Self {
        debug_assert!(cores.is_sorted_by(|a, b| a < b), "{cores:?}");
        Self(cores)
    }

    /// Returns the same cores, grouped by NUMA node. Each of `nodes` lists the hardware threads of one node.
    pub(crate) fn by_node(mut self, nodes: &[Self]) -> Self {
        let node = |core: usize| nodes.iter().position(|node| node.0.contains(&core));
        self.0.sort_by_key(|core| (node(*core).unwrap_or(nodes.len()), *core));
        self
    }

    /// Parses the text of `--bind_core_list`.
    pub(crate) fn parse(text: &str) -> Result<Self, HostsError> {
        let mut cores: Vec<usize> = Vec::new();
        for part in text.split(',') {
            let (first, last) =
                bounds(part).ok_or_else(|| HostsError::BadCores { list: one_line(text), part: one_line(part) })?;
            if first > last {
                return Err(HostsError::BackwardCores { part: one_line(part), first, last });
            }
            if let Some(earlier) = cores.last().copied().filter(|earlier| first <= *earlier) {
                return Err(HostsError::UnorderedCores { list: one_line(text), part: one_line(part), earlier });
            }
            cores.extend(first..=last);
        }
        Ok(Self(cores))
    }

    /// Returns the cores.
    pub(crate) fn cores(&self) -> &[usize] {
        &self.0
    }

    /// Returns the first `count` cores, or all if there are fewer.
    pub(crate) fn first(&self, count: usize) -> Self {
        Self(self.0[..count.min(self.0.len())].to_vec())
    }

    /// Returns the cores of local rank `local_rank` among `ranks` ranks of the host.
    pub(crate) fn share(&self, local_rank: usize, ranks: usize) -> Result<&[usize], HostsError> {
        assert!(local_rank < ranks, "local rank {local_rank} of {ranks}");
        match self.0.len() / ranks {
            0 => Err(HostsError::TooFewCores { cores: self.0.len(), ranks }),
            each => Ok(&self.0[each * local_rank..each * (local_rank + 1)]),
        }
    }
}

/// Parses `4` as 4 to 4, and `2-4` as 2 to 4.
fn bounds(part: &str) -> Option<(usize, usize)> {
    let number = |text: &str| text.trim().parse().ok().filter(|core| *core < super::error::MAX_CORES);
    match part.split_once('-') {
        None => number(part).map(|core| (core, core)),
        Some((first, last)) => Some((number(first)?, number(last)?)),
    }
}

/// Formats ascending numbers, with `2-4` for 2, 3, 4. This is the inverse of [`CoreList::parse`].
pub(crate) fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let texts = runs.filter_map(|run| match run {
        [] => None,
        [one] => Some(one.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
    });
    texts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::recorded_cases;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn refusal(text: &str) -> String {
        CoreList::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_recorded_cases_hold() {
        let cases = recorded_cases::of_area("launcher-corelist");
        for case in &cases {
            let found = CoreList::parse(case["input"]["text"].as_str().unwrap());
            recorded_cases::check(case, found.map(|list| json!({"ok": true, "cores": list.0})));
        }
        assert_eq!(cases.len(), 5);
    }

    #[test]
    fn errors_name_the_part_and_the_rule() {
        insta::assert_snapshot!(refusal("0,x"), @"`x` in the core list `0,x` is neither a core nor a range of cores; write numbers below 65536 or FIRST-LAST, for example 0,2-4");
        insta::assert_snapshot!(refusal(""), @"`` in the core list `` is neither a core nor a range of cores; write numbers below 65536 or FIRST-LAST, for example 0,2-4");
        insta::assert_snapshot!(refusal("0-99999999"), @"`0-99999999` in the core list `0-99999999` is neither a core nor a range of cores; write numbers below 65536 or FIRST-LAST, for example 0,2-4");
        insta::assert_snapshot!(refusal("1,6-2"), @"the range of cores `6-2` ends before it starts; write 2-6");
        insta::assert_snapshot!(refusal("0,2-6,5-9"), @"`5-9` in the core list `0,2-6,5-9` does not begin above the preceding core, 6; write each core once, in ascending order");
        insta::assert_snapshot!(refusal("8,2-6"), @"`2-6` in the core list `8,2-6` does not begin above the preceding core, 8; write each core once, in ascending order");
        insta::assert_snapshot!(CoreList::of(vec![0, 1, 2]).share(0, 4).unwrap_err(), @"4 ranks on a host need at least 4 cores to be bound to, but only 3 can be used; give a longer core list, or start fewer ranks");
    }

    #[test]
    fn ranks_share_the_cores_evenly_and_leave_the_rest() {
        let list = CoreList::parse("0,2-6,8").unwrap();
        assert_eq!([0, 1, 2].map(|rank| list.share(rank, 3).unwrap()), [[0, 2], [3, 4], [5, 6]]);
        assert_eq!(list.share(0, 1).unwrap(), [0, 2, 3, 4, 5, 6, 8]);
        assert_eq!(CoreList::of(vec![0, 1, 2, 3]).share(3, 4).unwrap(), [3]);
    }

    #[test]
    fn a_rank_lies_on_as_few_numa_nodes_as_it_can() {
        let list = |text| CoreList::parse(text).unwrap();
        // Cores with consecutive numbers are on different nodes, as on many machines.
        let nodes = [list("0,2,4,6,8,10,12,14"), list("1,3,5,7,9,11,13,15")];
        let cores = list("0-7").by_node(&nodes);
        assert_eq!([0, 1].map(|rank| cores.share(rank, 2).unwrap()), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!([0, 1, 2, 3].map(|rank| cores.share(rank, 4).unwrap()), [[0, 2], [4, 6], [1, 3], [5, 7]]);
        assert_eq!(list("0-3").by_node(&[]), list("0-3"), "if the kernel lists no nodes");
        assert_eq!(list("1,40").by_node(&nodes).cores(), [1, 40], "a core of no node comes last");
    }

    proptest! {
        #[test]
        fn ranges_are_read_back(cores in proptest::collection::btree_set(0..200_usize, 1..40)) {
            let cores: Vec<usize> = cores.into_iter().collect();
            prop_assert_eq!(CoreList::parse(&ranges(&cores)).unwrap().0, cores);
        }

        #[test]
        fn shares_are_equal_and_disjoint(count in 1..300_usize, ranks in 1..40_usize) {
            let list = CoreList::of((0..count).collect());
            let all: Result<Vec<&[usize]>, _> = (0..ranks).map(|rank| list.share(rank, ranks)).collect();
            match all {
                Err(_) => prop_assert!(count < ranks),
                Ok(shares) => {
                    prop_assert!(shares.iter().all(|share| share.len() == count / ranks));
                    prop_assert_eq!(shares.concat(), list.0[..count / ranks * ranks].to_vec());
                }
            }
        }
    }
}
