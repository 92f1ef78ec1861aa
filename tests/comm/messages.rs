//! Messages between two ranks, all-to-all exchanges, and groups of ranks.

use super::collectives::all;
use candle_core::DType;
use candle_zero::comm::{CollectiveKind, Communicator, threads};
use candle_zero::error::{CommError, Error};
use candle_zero::layout::{MeshAxis, RankMesh};
use candle_zero::precision::Flat;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns element `i` of message `k` from one rank to another.
fn element(from: usize, to: usize, k: usize, i: usize) -> f32 {
    (from * 1000 + to * 100 + k * 10) as f32 + (i % 7) as f32
}

fn message(from: usize, to: usize, k: usize, len: usize) -> Flat {
    Flat::from((0..len).map(|i| element(from, to, k, i)).collect::<Vec<_>>())
}

fn error_of<T>(result: candle_zero::Result<T>) -> CommError {
    match result {
        Err(Error::Comm(error)) => error,
        Err(other) => panic!("not a communication error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn messages_arrive_in_order_whichever_rank_is_served_first(
        world in 2usize..5, lengths in proptest::collection::vec(0usize..200_000, 1..4), reversed in any::<bool>(),
    ) {
        all(world, |comm| {
            let rank = comm.rank();
            let mut peers: Vec<usize> = (0..world).filter(|peer| *peer != rank).collect();
            if reversed {
                peers.reverse();
            }
            let mut sending = Vec::new();
            for (k, len) in lengths.iter().enumerate() {
                sending.extend(peers.iter().map(|to| comm.send(*to, message(rank, *to, k, *len), k as u64)));
            }
            // A collective in between is independent of messages.
            comm.barrier().wait()?;
            for (k, len) in lengths.iter().enumerate() {
                let coming = peers.iter().rev().map(|from| (*from, comm.receive(*from, DType::F32, *len, k as u64)));
                for (from, arrived) in coming.collect::<Vec<_>>() {
                    assert_eq!(arrived.wait()?, message(from, rank, k, *len));
                }
            }
            sending.into_iter().try_for_each(candle_zero::comm::Pending::wait)?;
            let report = comm.report();
            let calls = (lengths.len() * peers.len()) as u64;
            let bytes = 4 * lengths.iter().sum::<usize>() * peers.len();
            assert_eq!((report.kind(CollectiveKind::Send).calls, report.kind(CollectiveKind::Send).wire_bytes), (calls, 0));
            let received = report.kind(CollectiveKind::Receive);
            assert_eq!((received.calls, received.wire_bytes), (calls, bytes as u64));
            Ok(())
        });
    }

    #[test]
    fn an_all_to_all_brings_each_part_to_its_rank(
        world in 1usize..5, counts in proptest::collection::vec(0usize..3000, 16), half in any::<bool>(),
    ) {
        let dtype = if half { DType::BF16 } else { DType::F32 };
        let count = |from: usize, to: usize| counts[from * 4 + to];
        let part = |from: usize, to: usize| {
            Flat::from_f32((0..count(from, to)).map(|i| element(from, to, 0, i)).collect(), dtype)
        };
        let joined = |parts: Vec<Flat>| {
            let mut joined = Flat::zeros(dtype, 0);
            parts.iter().for_each(|part| joined.extend_cast(part.as_ref()));
            joined
        };
        all(world, |comm| {
            let rank = comm.rank();
            let sent: Vec<usize> = (0..world).map(|to| count(rank, to)).collect();
            let received: Vec<usize> = (0..world).map(|from| count(from, rank)).collect();
            let input = joined((0..world).map(|to| part(rank, to)).collect());
            let arrived = comm.all_to_all(input, &sent, &received, 3).wait()?;
            assert_eq!(arrived, joined((0..world).map(|from| part(from, rank)).collect()));
            Ok(())
        });
    }
}

#[test]
fn a_message_that_the_other_rank_does_not_expect_is_an_error_that_shows_both() {
    let errors = threads::run(2, |comm| {
        if comm.rank() == 0 {
            comm.send(1, message(0, 1, 0, 5), 0xab).wait()?;
            comm.barrier().wait()
        } else {
            comm.receive(0, DType::F32, 6, 0xcd).wait().map(drop)
        }
    });
    let mut errors = errors.unwrap().into_iter().map(|result| error_of(result).to_string());
    let sender_error = errors.next().unwrap();
    let receiver_error = errors.next().unwrap();
    assert!(sender_error.contains("rank 1 stopped"), "{sender_error}");
    assert!(receiver_error.starts_with("ranks have diverged: rank 1 is in receive no. 1 with 6 f32 elements (content hash 000000cd), and rank 0 is in send no. 1 with 5 f32 elements (content hash 000000ab)"), "{receiver_error}");
}

#[test]
fn a_rank_that_gives_up_or_leaves_ends_the_waits_for_its_messages() {
    let gives_up = threads::run(3, |comm| match comm.rank() {
        0 => comm.receive(1, DType::F32, 5, 0).wait().map(drop),
        1 => {
            comm.abort("no disk");
            Ok(())
        }
        // The message is larger than a mailbox, and its receiver reads nothing.
        _ => comm.send(1, message(2, 1, 0, 1_000_000), 0).wait(),
    });
    let gives_up = gives_up.unwrap();
    for result in [&gives_up[0], &gives_up[2]] {
        let Err(Error::Comm(CommError::RankAborted { peer: 1, why, .. })) = result else { panic!("{result:?}") };
        assert_eq!(why, "no disk");
    }
    let start = Instant::now();
    let leaves = threads::run(2, |comm| match comm.rank() {
        0 => comm.receive(1, DType::F32, 5, 0).wait().map(drop),
        _ => Ok(()),
    });
    assert!(matches!(error_of(leaves.unwrap().swap_remove(0)), CommError::RankLeft { rank: 0, peer: 1, .. }));
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_message_arrives_although_its_rank_leaves_right_after_it() {
    let results = threads::run(2, |comm| match comm.rank() {
        0 => {
            std::thread::sleep(Duration::from_millis(100));
            comm.receive(1, DType::F32, 10_000, 0).wait()
        }
        _ => {
            drop(comm.send(0, message(1, 0, 0, 10_000), 0));
            Ok(Flat::zeros(DType::F32, 0))
        }
    });
    assert_eq!(results.unwrap().swap_remove(0).unwrap(), message(1, 0, 0, 10_000));
}

#[test]
fn a_rank_that_sends_nothing_in_time_is_named() {
    let results: Vec<_> = std::thread::scope(|scope| {
        let ranks = threads::communicators(2, Duration::from_millis(200)).unwrap();
        let waits = |comm: &Arc<dyn Communicator>| comm.receive(1, DType::F32, 5, 0).wait();
        let first = scope.spawn({
            let comm = ranks[0].clone();
            move || waits(&comm)
        });
        vec![first.join().unwrap()]
    });
    let error = error_of(results.into_iter().next().unwrap());
    assert!(matches!(error, CommError::Timeout { rank: 0, peer: 1, .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn the_groups_of_a_mesh_sum_at_the_same_time_and_count_their_ranks_from_zero(
        data in 1usize..4, pipeline in 1usize..3, outermost in any::<bool>(), n in 0usize..50_000,
    ) {
        let mesh = RankMesh::new(data * pipeline, &[(MeshAxis::Pipeline, pipeline)]).unwrap();
        let mesh = if outermost { mesh.with_outermost(MeshAxis::Pipeline) } else { mesh };
        all(data * pipeline, |comm| {
            let rank = comm.rank();
            for axes in [[MeshAxis::Data], [MeshAxis::Pipeline]] {
                let group = comm.group(&mesh.groups(&axes))?;
                let members = mesh.group(rank, &axes);
                assert_eq!((group.rank(), group.size()), (members.iter().position(|r| *r == rank).unwrap(), members.len()));
                let part = |r: usize| message(r, 0, 0, n * members.len());
                let sums = group.reduce_scatter(part(rank), 1);
                let gathered = group.all_gather(message(rank, 0, 0, n), 2);
                // All ranks of the job exchange values at the same time.
                let sizes = comm.gather_f64(vec![n as f64]).wait()?;
                assert_eq!(sizes, vec![vec![n as f64]; data * pipeline]);
                let sum = |i: usize| members.iter().map(|r| element(*r, 0, 0, i)).sum::<f32>();
                let shard = group.rank() * n..(group.rank() + 1) * n;
                assert_eq!(sums.wait()?, Flat::from(shard.map(sum).collect::<Vec<_>>()));
                let mut all = Flat::zeros(DType::F32, 0);
                members.iter().for_each(|r| all.extend_cast(message(*r, 0, 0, n).as_ref()));
                assert_eq!(gathered.wait()?, all);
                let next = (group.rank() + 1) % group.size();
                if next != group.rank() {
                    let last = (group.rank() + group.size() - 1) % group.size();
                    let sent = group.send(next, message(rank, members[next], 0, n), 9);
                    let arrived = group.receive(last, DType::F32, n, 9).wait()?;
                    assert_eq!(arrived, message(members[last], rank, 0, n));
                    sent.wait()?;
                }
            }
            // Requesting the same groups again returns the same communicator; otherwise, 20 groups would be too many.
            for _ in 0..20 {
                comm.group(&mesh.groups(&[MeshAxis::Data]))?.barrier().wait()?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_failed_rank_is_named_in_the_collectives_of_other_groups() {
    let results = threads::run(4, |comm| {
        let group = comm.group(&[vec![0, 1], vec![2, 3]])?;
        match comm.rank() {
            // Rank 1 waits for rank 3, which is in the other group and fails; rank 0 waits for rank 1.
            0 => group.all_reduce(message(0, 0, 0, 5), 0).wait().map(drop),
            1 => comm.receive(3, DType::F32, 5, 0).wait().map(drop),
            2 => group.all_reduce(message(2, 0, 0, 5), 0).wait().map(drop),
            _ => {
                group.abort("no disk");
                Ok(())
            }
        }
    });
    for (rank, result) in results.unwrap().into_iter().enumerate().take(3) {
        match error_of(result) {
            CommError::RankAborted { rank: named, peer: 3, why, .. } => {
                assert_eq!((named, &why[..]), (rank, "no disk"));
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
}

#[test]
fn what_is_no_division_of_the_ranks_is_refused() {
    let refused = |groups: &'static [&'static [usize]]| {
        let groups: Vec<Vec<usize>> = groups.iter().map(|group| group.to_vec()).collect();
        let errors = threads::run(3, |comm| comm.group(&groups).map(drop));
        error_of(errors.unwrap().swap_remove(0)).to_string()
    };
    insta::assert_snapshot!(refused(&[&[0, 1]]), @"rank 0 cannot form groups of ranks: rank 2 is in no group (every rank must be in exactly one group, and all ranks must pass the same groups in each call)");
    insta::assert_snapshot!(refused(&[&[0, 1], &[1, 2]]), @"rank 0 cannot form groups of ranks: rank 1 is in two groups or twice in one (every rank must be in exactly one group, and all ranks must pass the same groups in each call)");
    insta::assert_snapshot!(refused(&[&[0, 1], &[2, 3]]), @"rank 0 cannot form groups of ranks: rank 3 does not exist: there are 3 ranks (every rank must be in exactly one group, and all ranks must pass the same groups in each call)");
    let errors = threads::run(2, |comm| {
        let groups = if comm.rank() == 0 { vec![vec![0, 1]] } else { vec![vec![0], vec![1]] };
        comm.group(&groups).map(drop)
    });
    insta::assert_snapshot!(error_of(errors.unwrap().swap_remove(0)), @"rank 0 cannot form groups of ranks: rank 1 passes groups that differ from those of this rank, [[0, 1]] (every rank must be in exactly one group, and all ranks must pass the same groups in each call)");
    let errors = threads::run(2, |comm| comm.group(&[vec![0, 1]])?.group(&[vec![0, 1]]).map(drop));
    insta::assert_snapshot!(error_of(errors.unwrap().swap_remove(0)), @"rank 0 cannot form groups of ranks: this communicator belongs to a group; call `group` on the communicator of the job (every rank must be in exactly one group, and all ranks must pass the same groups in each call)");
}
