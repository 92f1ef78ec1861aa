//! Bytes on the wire per step: 2, 2, 2 and 3 Psi (N-1)/N at stages 0 to 3, plus the padding of shards. Psi is the size
//! of all parameters, and N the number of ranks.

use crate::support::tiny::{Outcome, Shape, VOCAB, WIDTH, config, train};
use candle_zero::comm::{CollectiveKind, CommReport};
use candle_zero::layout::shard_len;
use serde_json::{Value, json};

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 3 };

/// Returns the number of elements of each parameter of the tiny model.
fn numels() -> Vec<usize> {
    let block = [WIDTH, WIDTH, WIDTH * 3 * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH];
    let blocks = (0..SHAPE.layers).flat_map(|_| block);
    [VOCAB * WIDTH].into_iter().chain(blocks).chain([WIDTH * VOCAB, VOCAB]).collect()
}

/// Returns the bytes of gradients and parameters per step: the difference between a longer and a shorter run, so that
/// the bytes that are sent at the start do not count.
fn per_step(world: usize, config: &Value) -> Vec<(CommReport, u64)> {
    let run = |steps| train(world, SHAPE, config, steps);
    let bytes = |o: &Outcome| o.comm.data_wire_bytes();
    let (long, short) = (run(7), run(3));
    long.iter().zip(&short).map(|(l, s)| (l.comm.clone(), (bytes(l) - bytes(s)) / 4)).collect()
}

#[test]
fn a_step_moves_2_2_2_3_psi_and_named_padding() {
    let psi: usize = numels().iter().sum();
    for (more, element) in [(json!({}), 4.0), (json!({"bf16": {"enabled": true}}), 2.0)] {
        for world in [1, 2, 3, 4] {
            let n = world as f64;
            // Each shard is padded to the same length on every rank.
            let padded: usize = numels().iter().map(|m| shard_len(*m, world) * world).sum();
            for (stage, volume) in [(0u8, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)] {
                let zero = json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0});
                for (report, bytes) in per_step(world, &config(stage, 1, zero, more.clone())) {
                    let formula = volume * psi as f64 * element * (n - 1.0) / n;
                    let padding = volume * (padded - psi) as f64 * element * (n - 1.0) / n;
                    let case = format!("stage {stage}, world {world}, {more}\n{report}");
                    assert_eq!(bytes as f64, formula + padding, "{case}");
                    assert!(padding <= formula * 0.02 || world == 1, "too much padding: {padding} of {formula}");
                }
            }
        }
    }
}

#[test]
fn parameters_kept_for_their_backward_save_a_gather() {
    // DeepSpeed's default reuse distance (1e9 elements) keeps a small model gathered between the forward and the
    // backward pass.
    let psi: usize = numels().iter().sum();
    let zero = json!({"stage3_param_persistence_threshold": 0});
    for (_, bytes) in per_step(2, &config(3, 1, zero, json!({}))) {
        let volume = bytes as f64 / (psi as f64 * 4.0 / 2.0);
        assert!((2.0..2.02).contains(&volume), "{volume} Psi");
    }
}

#[test]
fn every_kind_of_collective_is_counted_apart() {
    let zero = || json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0});
    for (stage, kinds) in [
        (0, vec![CollectiveKind::AllReduce, CollectiveKind::Control]),
        (1, vec![CollectiveKind::ReduceScatter, CollectiveKind::AllGather, CollectiveKind::Control]),
        (2, vec![CollectiveKind::ReduceScatter, CollectiveKind::AllGather, CollectiveKind::Control]),
        (3, vec![CollectiveKind::ReduceScatter, CollectiveKind::AllGather, CollectiveKind::Control]),
    ] {
        let outcome = train(2, SHAPE, &config(stage, 1, zero(), json!({"gradient_check": false})), 2).remove(0);
        assert_eq!(outcome.comm.kinds.keys().copied().collect::<Vec<_>>(), kinds, "stage {stage}");
        // One vote in each of the two steps, one comparison of the models at the start, and one exchange about
        // parameters without a gradient.
        assert_eq!(outcome.comm.kind(CollectiveKind::Control).calls, 4);
    }
}
