//! Collectives between ranks that are threads: correct sums (exact and quantized), correct bytes, and an error instead
//! of a hang.

use candle_core::DType;
use candle_zero::comm::{CollectiveKind, Communicator, InterHostFormat, WireFormat, threads};
use candle_zero::error::{CommError, Error};
use candle_zero::precision::{Flat, IntFormat};
use half::bf16;
use proptest::prelude::*;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 101) as f32 - 50.0
}

pub(super) fn all<T: Send>(world: usize, f: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    threads::run(world, f).unwrap().into_iter().map(|r| r.unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn sums_and_gathers_are_right_for_any_size(world in 1usize..5, n in 0usize..700_000) {
        let results = all(world, |comm| {
            let (rank, world) = (comm.rank(), comm.size());
            let data = |r: usize, len: usize| Flat::from((0..len).map(|i| value(r, i)).collect::<Vec<_>>());
            // All collectives are launched before any is awaited: the queue keeps their order.
            let reduced = comm.reduce_scatter(data(rank, n * world), 1);
            let summed = comm.all_reduce(data(rank, n + 1), 2);
            let gathered = comm.all_gather(data(rank, n), 3);
            Ok((reduced.wait()?, summed.wait()?, gathered.wait()?))
        });
        for (rank, (reduced, summed, gathered)) in results.into_iter().enumerate() {
            let sum = |i: usize| (0..world).map(|r| value(r, i)).sum::<f32>();
            let expect = |range: std::ops::Range<usize>| Flat::from(range.map(sum).collect::<Vec<_>>());
            prop_assert_eq!(reduced, expect(rank * n..(rank + 1) * n));
            prop_assert_eq!(summed, expect(0..n + 1));
            let parts = (0..world).flat_map(|r| (0..n).map(move |i| value(r, i))).collect::<Vec<_>>();
            prop_assert_eq!(gathered, Flat::from(parts));
        }
    }
}

/// Returns the values that arrive if `values` are sent as `ints`.
fn round_trip(ints: IntFormat, values: &[f32], dtype: DType) -> Flat {
    let sent = Flat::from_f32(values.to_vec(), dtype);
    let mut bytes = vec![0; ints.encoded_len(sent.len())];
    ints.encode(sent.as_ref(), &mut bytes);
    let mut round_trip = Flat::zeros(dtype, sent.len());
    ints.decode(&bytes, round_trip.as_mut());
    round_trip
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn blocks_are_summed_in_rank_order_and_gathered(world in 2usize..5, n in 0usize..300_000, kind in 0usize..4) {
        let ints = [IntFormat::Int8, IntFormat::Int4][kind % 2];
        // In bf16, received values would be rounded once more here than in a sum, so bf16 is used only for gathers.
        let dtype = [DType::F32, DType::BF16][kind / 2];
        let values_of = |r: usize| -> Vec<f32> { (0..n * world).map(|i| value(r, i) * 0.37).collect() };
        let results = all(world, |comm| {
            let (rank, wire) = (comm.rank(), WireFormat::Blocks(ints));
            let reduced = comm.reduce_scatter_as(wire, Flat::from(values_of(rank)), 1);
            let summed = comm.all_reduce_as(wire, Flat::from(values_of(rank)), 2);
            let gathered = comm.all_gather_as(wire, Flat::from_f32(values_of(rank)[..n].to_vec(), dtype), 3);
            Ok((reduced.wait()?, summed.wait()?, gathered.wait()?))
        });
        let mut sums = vec![];
        for (rank, (reduced, ..)) in results.iter().enumerate() {
            let mut sum = vec![0f32; n];
            for r in 0..world {
                let part = &values_of(r)[rank * n..(rank + 1) * n];
                let part = if r == rank { Flat::from(part.to_vec()) } else { round_trip(ints, part, DType::F32) };
                sum.iter_mut().enumerate().for_each(|(i, s)| *s += part.as_ref().get(i));
            }
            prop_assert_eq!(reduced, &Flat::from(sum.clone()));
            sums.extend(sum);
        }
        let mut parts = Flat::zeros(dtype, 0);
        (0..world).for_each(|r| parts.extend_cast(round_trip(ints, &values_of(r)[..n], dtype).as_ref()));
        for (_, summed, gathered) in results {
            prop_assert_eq!(summed, Flat::from(sums.clone()));
            prop_assert_eq!(gathered, parts.clone());
        }
    }
}

#[test]
fn what_is_coded_between_hosts_alone_is_exact_on_one_host() {
    let codes = [IntFormat::Int8, IntFormat::Int4]
        .map(InterHostFormat::Blocks)
        .into_iter()
        .chain([InterHostFormat::Bf16, InterHostFormat::F16]);
    for (code, world) in codes.flat_map(|code| [1, 2, 3].map(|world| (code, world))) {
        let outcome = |wire: WireFormat| {
            all(world, |comm| {
                let values =
                    |len: usize| Flat::from((0..len).map(|i| value(comm.rank(), i) * 0.37).collect::<Vec<_>>());
                let reduced = comm.reduce_scatter_as(wire, values(999 * world), 1);
                let summed = comm.all_reduce_as(wire, values(1001), 2);
                let gathered = comm.all_gather_as(wire, values(70), 3);
                let within = comm.all_gather_within_as(wire, 1, values(70), 4);
                let grouped = comm.reduce_to_groups_as(wire, 1, values(30 * world), 5);
                let results = [reduced.wait()?, summed.wait()?, gathered.wait()?, within.wait()?, grouped.wait()?];
                Ok((results, comm.report().data_wire_bytes()))
            })
        };
        assert!(outcome(WireFormat::BetweenHosts(code)) == outcome(WireFormat::Exact), "{code:?}, world size {world}");
    }
}

#[test]
fn results_lie_in_the_memory_of_the_arguments_where_that_has_room() {
    // There are several pieces, and the gathered buffer is so large that copies bypass the cache.
    let (world, n) = (3, 500_001);
    all(world, |comm| {
        let mut shard = Flat::with_capacity(DType::F32, n * world);
        shard.extend_cast(Flat::from((0..n).map(|i| value(comm.rank(), i)).collect::<Vec<_>>()).as_ref());
        let address = shard.as_bytes().as_ptr() as usize;
        let gathered = comm.all_gather(shard, 0).wait()?;
        assert_eq!(gathered.as_bytes().as_ptr() as usize, address);
        let parts = (0..world).flat_map(|r| (0..n).map(move |i| value(r, i))).collect::<Vec<_>>();
        assert!(gathered == Flat::from(parts));
        let sum = comm.all_reduce(gathered, 1).wait()?;
        assert_eq!(sum.as_bytes().as_ptr() as usize, address);
        let chunk = comm.reduce_scatter(sum, 2).wait()?;
        assert_eq!((chunk.as_bytes().as_ptr() as usize, chunk.len()), (address, n));
        let exact = (0..n).map(|i| (world * world) as f32 * value(comm.rank(), i)).collect::<Vec<_>>();
        assert!(chunk == Flat::from(exact));
        Ok(())
    });
}

#[test]
fn sums_of_bf16_are_formed_in_f32_and_rounded_once() {
    // 256 + 1 + 1 + 1: in bf16, every partial sum would be rounded to 256.
    let parts = [256.0, 1.0, 1.0, 1.0];
    for sum in all(4, |comm| comm.all_reduce(Flat::BF16(vec![bf16::from_f32(parts[comm.rank()]); 9]), 0).wait()) {
        assert_eq!(sum, Flat::BF16(vec![bf16::from_f32(259.0); 9]));
    }
}

#[test]
fn bytes_on_the_wire_are_counted_as_the_formula_says() {
    let (world, n) = (4, 300_000);
    for report in all(world, |comm| {
        comm.reduce_scatter(Flat::from(vec![1.0; n * world]), 0).wait()?;
        comm.all_gather(Flat::from(vec![1.0; n]), 0).wait()?;
        comm.all_reduce(Flat::from(vec![1.0; n * world]), 0).wait()?;
        Ok(comm.report())
    }) {
        let total = (n * world * 4) as u64;
        let part = total * (world as u64 - 1) / world as u64;
        assert_eq!(report.kind(CollectiveKind::ReduceScatter).wire_bytes, part);
        assert_eq!(report.kind(CollectiveKind::AllGather).wire_bytes, part);
        assert_eq!(report.kind(CollectiveKind::AllReduce).wire_bytes, 2 * part);
        assert_eq!(report.kind(CollectiveKind::AllReduce).calls, 1);
    }
}

#[test]
fn bytes_of_blocks_are_counted_with_their_scales_beside_what_they_would_have_been() {
    // There are several pieces, and the last block is not full.
    let (world, n) = (4, 300_001);
    for ints in [IntFormat::Int8, IntFormat::Int4] {
        for report in all(world, |comm| {
            let wire = WireFormat::Blocks(ints);
            comm.reduce_scatter_as(wire, Flat::from(vec![1.0; n * world]), 0).wait()?;
            comm.all_gather_as(wire, Flat::zeros(DType::BF16, n), 0).wait()?;
            comm.all_reduce_as(wire, Flat::from(vec![1.0; n * world]), 0).wait()?;
            Ok(comm.report())
        }) {
            let others = world as u64 - 1;
            let (codes, exact) = (ints.encoded_len(n) as u64 * others, (4 * n) as u64 * others);
            let bytes = |kind| (report.kind(kind).wire_bytes, report.kind(kind).exact_bytes);
            assert_eq!(bytes(CollectiveKind::ReduceScatter), (codes, exact));
            assert_eq!(bytes(CollectiveKind::AllGather), (codes, exact / 2));
            assert_eq!(bytes(CollectiveKind::AllReduce), (codes + exact, 2 * exact), "the sums are sent unquantized");
            assert_eq!(report.data_wire_bytes(), 3 * codes + exact);
            let text = report.to_string();
            let line = format!("quantized: {} bytes of gradients and weights instead of", 3 * codes + exact);
            assert!(text.contains(&line), "{text}");
        }
    }
}

#[test]
fn a_rank_that_sends_another_form_of_the_same_elements_is_told_apart() {
    let odd = |comm: Arc<dyn Communicator>| {
        let sum = comm.all_reduce_as(WireFormat::Blocks(IntFormat::Int4), Flat::from(vec![1.0; 8]), 7);
        assert!(sum.wait().is_err());
    };
    for error in errors_of_others(odd) {
        let text = error.to_string();
        assert!(
            text.contains("with 8 f32 elements as int4") && text.contains("with 8 f32 elements (content"),
            "{text}"
        );
    }
}

#[test]
fn control_values_arrive_in_rank_order() {
    for values in all(3, |comm| comm.gather_f64(vec![comm.rank() as f64, 0.5]).wait()) {
        assert_eq!(values, [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]);
    }
}

/// Runs `odd` on rank 1 and an all-reduce of 8 elements on the other ranks, and returns their errors.
fn errors_of_others(odd: impl Fn(Arc<dyn Communicator>) + Sync) -> Vec<CommError> {
    let start = Instant::now();
    let results = threads::run(3, |comm| {
        if comm.rank() == 1 {
            odd(comm);
            return Ok(None);
        }
        match comm.all_reduce(Flat::from(vec![1.0; 8]), 7).wait() {
            Err(Error::Comm(e)) => Ok(Some(e)),
            other => panic!("{other:?}"),
        }
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    results.unwrap().into_iter().filter_map(|r| r.unwrap()).collect()
}

#[test]
fn ranks_that_diverge_are_told_both_sides() {
    let errors = errors_of_others(|comm| {
        let mine = comm.all_gather(Flat::from(vec![1.0; 5]), 7).wait().unwrap_err();
        assert!(matches!(mine, Error::Comm(CommError::Diverged { rank: 1, .. })), "{mine}");
    });
    insta::assert_snapshot!(errors[0], @"ranks have diverged: rank 0 is in all_reduce no. 1 with 8 f32 elements (content hash 00000007), and rank 1 is in all_gather no. 1 with 5 f32 elements (content hash 00000007); every rank must run the same model with the same configuration, and make the same calls in the same order: forward, step, eval, save_checkpoint, load_checkpoint and exports must be called on all ranks, never on only some of them as in `if rank == 0`");
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = errors_of_others(drop);
    insta::assert_snapshot!(errors[1], @"rank 1 left the job while rank 2 waited for it in all_reduce no. 1 with 8 f32 elements (content hash 00000007); every rank must run the same number of steps and make the same number of collective calls");
}

#[test]
fn a_rank_that_gives_up_is_named_with_its_reason() {
    let errors = errors_of_others(|comm| comm.abort("the loss is NaN"));
    insta::assert_snapshot!(errors[0], @"rank 1 stopped (the loss is NaN) while rank 0 waited in all_reduce no. 1 with 8 f32 elements (content hash 00000007)");
}

#[test]
fn a_rank_that_panics_is_named() {
    let result = std::panic::catch_unwind(|| errors_of_others(|_comm| panic!("on purpose")));
    assert_eq!(*result.unwrap_err().downcast::<&str>().unwrap(), "on purpose");
}

#[test]
fn a_rank_that_does_not_come_is_a_timeout() {
    let mut ranks = threads::communicators(2, Duration::from_millis(300)).unwrap();
    let absent = ranks.pop().unwrap();
    let error = ranks[0].barrier().wait().unwrap_err();
    insta::assert_snapshot!(error, @"rank 0 waited 300ms for rank 1 in barrier no. 1 with 0 bytes (content hash 00000000); if a step may take longer, raise the limit (zerorun --timeout)");
    // The ranks stay out of step: the same error is returned again, immediately.
    assert!(matches!(ranks[0].barrier().wait(), Err(Error::Comm(CommError::Timeout { .. }))));
    drop(ranks);
    drop(absent);
}

#[test]
fn all_ranks_are_told_of_the_first_failure_and_not_of_its_echo() {
    for round in 0..40 {
        let errors = threads::run(4, |comm| {
            for step in 0..10 {
                if comm.rank() == 2 && step == round % 10 {
                    comm.abort("the disk is full");
                    return Ok(None);
                }
                if let Err(error) = comm.all_reduce(Flat::from(vec![1.0; 8]), 7).wait() {
                    return Ok(Some(error));
                }
            }
            panic!("rank 2 should have given up before this point");
        });
        for error in errors.unwrap().into_iter().filter_map(|r| r.unwrap()) {
            assert!(matches!(error, Error::Comm(CommError::RankAborted { peer: 2, .. })), "round {round}: {error}");
        }
    }
}

#[test]
fn a_rank_that_has_left_is_named_although_another_one_is_awaited_first() {
    let notified = Barrier::new(2);
    let errors = threads::run(3, |comm| match comm.rank() {
        0 => {
            let error = comm.barrier().wait().unwrap_err();
            notified.wait();
            Ok(Some(error))
        }
        1 => {
            // This rank enters no collective until rank 0 has its error.
            notified.wait();
            Ok(Some(comm.barrier().wait().unwrap_err()))
        }
        _ => Ok(None),
    });
    for error in errors.unwrap().into_iter().filter_map(|r| r.unwrap()) {
        assert!(matches!(error, Error::Comm(CommError::RankLeft { peer: 2, .. })), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_right_after_its_last_piece_has_failed_nobody() {
    for round in 0..200 {
        all(3, |comm| {
            // Each rank is sometimes the slow one.
            let late = (comm.rank() + round) % 3;
            (0..late * 50).for_each(|_| std::hint::spin_loop());
            comm.all_reduce(Flat::from(vec![1.0; 3]), 0).wait()?;
            comm.barrier().wait()
        });
    }
}

#[test]
fn a_rank_that_gives_up_does_not_wait_for_its_own_collectives() {
    let mut ranks = threads::communicators(2, Duration::from_secs(600)).unwrap();
    let absent = ranks.pop().unwrap();
    let start = Instant::now();
    let barriers = [ranks[0].barrier(), ranks[0].barrier()];
    ranks[0].abort("enough");
    for pending in barriers {
        let Err(Error::Comm(error)) = pending.wait() else { panic!("a rank that gave up got a result") };
        let gave_up = matches!(error, CommError::RankAborted { peer: 0, .. } | CommError::GaveUp { rank: 0, .. });
        assert!(gave_up, "{error}");
    }
    drop(ranks);
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(absent);
}

#[test]
fn a_failed_collective_is_told_to_the_others_although_nobody_has_come_for_its_result() {
    let ranks = threads::communicators(3, Duration::from_secs(4)).unwrap();
    let unawaited = ranks[0].barrier();
    std::thread::sleep(Duration::from_secs(2));
    // Rank 2 never arrives. Rank 1 is notified when rank 0 times out, before rank 1 itself times out, and its error
    // names the cause.
    let start = Instant::now();
    let error = ranks[1].barrier().wait().unwrap_err();
    assert!(start.elapsed() < Duration::from_millis(3500), "{:?}", start.elapsed());
    assert!(matches!(&error, Error::Comm(CommError::Timeout { peer: 2, .. })), "{error}");
    drop(unawaited);
}

#[test]
fn a_result_that_nobody_wants_is_computed_all_the_same() {
    for sum in all(3, |comm| {
        drop(comm.all_reduce(Flat::from(vec![5.0]), 1));
        comm.all_reduce(Flat::from(vec![comm.rank() as f32]), 2).wait()
    }) {
        assert_eq!(sum, Flat::from(vec![3.0]));
    }
}
