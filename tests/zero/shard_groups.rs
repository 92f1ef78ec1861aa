//! `mics_shard_size`: states are sharded inside groups, and losses, gradient norms and weights are those of plain
//! stage 3, bit for bit.

use crate::support::tiny::{Outcome, Shape, Tiny, batch, config, train, train_over};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, Pending, threads};
use candle_zero::memory::MemoryKind;
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;

const STEPS: usize = 4;
const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 3 };

/// A communicator over threads that implements only the four required methods and `ranks_here`, with `ranks_per_host`
/// ranks on each host.
struct Bare {
    inner: Arc<dyn Communicator>,
    ranks_per_host: usize,
}

impl Communicator for Bare {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn ranks_here(&self) -> Range<usize> {
        let first = self.rank() / self.ranks_per_host * self.ranks_per_host;
        first..first + self.ranks_per_host
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.inner.gather_bytes(bytes)
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}

/// Returns a configuration of stage 3 in groups of `ranks`, or without groups.
fn grouped(ranks: Option<usize>, accumulation: usize, more: &Value, top: &Value) -> Value {
    let mut zero = json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0});
    if let Some(ranks) = ranks {
        zero["mics_shard_size"] = ranks.into();
    }
    for (key, value) in more.as_object().unwrap() {
        zero[key] = value.clone();
    }
    config(3, accumulation, zero, top.clone())
}

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    assert_eq!(a.len(), b.len());
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

#[test]
fn groups_change_no_bit() {
    let zeros = [
        json!({}),
        json!({"reduce_bucket_size": 30, "sub_group_size": 100, "overlap_comm": false}),
        json!({"reduce_bucket_size": 700, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 40}),
        json!({"stage3_max_reuse_distance": 1_000_000, "reduce_scatter": false}),
        json!({"leaf_module": {"name_suffixes": ["1"]}, "ignore_unused_parameters": true}),
    ];
    for (world, groups) in [(4, vec![1, 2, 4]), (6, vec![2, 3])] {
        for (i, zero) in zeros.iter().enumerate() {
            let accumulation = 1 + 2 * (i % 2);
            let shape = Shape { checkpointed: i % 3 == 1, ..SHAPE };
            let of = |ranks| train(world, shape, &grouped(ranks, accumulation, zero, &json!({})), STEPS);
            let plain = of(None);
            for ranks in &groups {
                let what = format!("world size {world} in groups of {ranks}, accumulation {accumulation}, {zero}");
                assert_same(&plain, &of(Some(*ranks)), &what);
            }
        }
    }
}

#[test]
fn groups_change_no_bit_of_other_optimizers_and_formats() {
    let tops = [
        json!({"bf16": {"enabled": true}}),
        json!({"fp16": {"enabled": true, "initial_scale_power": 10}}),
        json!({
            "optimizer": {"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-4}}, "zero_allow_untested_optimizer": true,
        }),
        json!({
            "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 5e-3, "eps": 1e-4}},
            "zero_allow_untested_optimizer": true,
        }),
        json!({"gradient_clipping": 0.0, "prescale_gradients": true}),
    ];
    for top in &tops {
        // At stage 3, prescale_gradients is possible only without a reduce-scatter.
        let zero = if top.get("prescale_gradients").is_some() { json!({"reduce_scatter": false}) } else { json!({}) };
        let of = |ranks| train(4, SHAPE, &grouped(ranks, 2, &zero, top), STEPS);
        let plain = of(None);
        for ranks in [1, 2] {
            assert_same(&plain, &of(Some(ranks)), &format!("groups of {ranks}, {top}"));
        }
    }
}

#[test]
fn a_communicator_with_four_methods_gives_the_same_bits() {
    for zero in [json!({}), json!({"zero_quantized_weights": true, "zero_quantized_gradients": true})] {
        for ranks in [1, 2] {
            let config = grouped(Some(ranks), 2, &zero, &json!({}));
            let bare = train_over(|inner| Arc::new(Bare { inner, ranks_per_host: 2 }), 4, SHAPE, &config, STEPS);
            assert_same(&train(4, SHAPE, &config, STEPS), &bare, &format!("groups of {ranks}, {zero}"));
        }
    }
}

#[test]
fn quantized_groups_stay_alike_and_learn_as_without_groups() {
    let zero = json!({"zero_quantized_weights": true, "zero_quantized_gradients": true});
    let of = |ranks| train(4, SHAPE, &grouped(ranks, 1, &zero, &json!({})), 10);
    let (plain, groups) = (of(None), of(Some(2)));
    for (plain, group) in plain.iter().zip(&groups) {
        let mean = |run: &Outcome| run.losses.iter().map(|bits| f32::from_bits(*bits)).sum::<f32>() / 10.;
        assert!((mean(plain) - mean(group)).abs() < 0.02, "{} {}", mean(plain), mean(group));
    }
}

/// Matrices that are sent separately, and whose shards are padded.
struct Wide(Vec<Unit<Linear>>);

#[test]
fn large_parameters_have_the_same_bits_and_every_group_the_same_weights() {
    const WIDE: usize = 301;
    let of = |ranks: Option<usize>, dtype: DType| {
        let mut config = grouped(ranks, 2, &json!({}), &json!({}));
        if dtype == DType::BF16 {
            config["bf16"] = json!({"enabled": true});
        }
        let runs = threads::run(4, |comm| {
            let rank = comm.rank();
            let build = |vb: VarBuilder<'_>| {
                let layer = |i: usize| unit(vb.pp(format!("{i}")), |vb| linear(WIDE, WIDE, vb));
                Ok(Wide((0..2).map(layer).collect::<candle_core::Result<_>>()?))
            };
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(build, config.clone())?;
            let mut seen = Vec::new();
            for micro in 0..6 {
                let x = Tensor::arange(0f32, WIDE as f32, &Device::Cpu)?.reshape((1, WIDE))?;
                let x = x.affine(1e-3 * (micro + rank) as f64, -0.2)?.sin()?.to_dtype(dtype)?;
                let loss = engine.forward(|model| {
                    let x = model.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
                    x.to_dtype(DType::F32)?.sqr()?.mean_all()
                })?;
                seen.push(u64::from(loss.to_scalar::<f32>()?.to_bits()));
                engine.backward(&loss)?;
                engine.step()?;
            }
            seen.push(engine.global_grad_norm().unwrap().to_bits());
            let whole = engine.safe_get_full_fp32_param("1.weight")?;
            let own = engine.safe_get_local_fp32_param("1.weight")?;
            Ok((seen, whole.flatten_all()?.to_vec1::<f32>()?, own.to_vec1::<f32>()?))
        });
        runs.unwrap().into_iter().map(candle_zero::Result::unwrap).collect::<Vec<_>>()
    };
    for dtype in [DType::F32, DType::BF16] {
        let (plain, groups) = (of(None, dtype), of(Some(2), dtype));
        for (plain, group) in plain.iter().zip(&groups) {
            assert_eq!((&plain.0, &plain.1), (&group.0, &group.1));
        }
        assert_eq!((&groups[0].2, &groups[1].2), (&groups[2].2, &groups[3].2));
        assert_eq!([&groups[0].2[..], &groups[1].2[..]].concat(), groups[0].1);
    }
}

#[test]
fn a_rank_holds_its_part_of_a_group_and_gathers_it_from_the_group() {
    let of = |ranks| train(4, SHAPE, &grouped(ranks, 1, &json!({}), &json!({})), STEPS).swap_remove(0);
    let (plain, groups) = (of(None), of(Some(2)));
    for kind in [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Moments] {
        let [one, two] = [&plain, &groups].map(|run| run.memory.row(kind).bytes.peak);
        assert_eq!(two, 2 * one, "{kind:?}: a shard in a group is twice as large");
    }
    let wire = |run: &Outcome, kind| run.comm.kind(kind).wire_bytes;
    use candle_zero::comm::CollectiveKind::{AllGather, ReduceScatter};
    // Of N parts, a rank receives N - 1 from other ranks: 3 of 4 without groups, and 1 of 2 with groups.
    assert!(3 * wire(&groups, AllGather) < 2 * wire(&plain, AllGather) + 4096);
    // With groups, a rank receives one more part for each other group.
    assert_eq!(3 * wire(&groups, ReduceScatter), 4 * wire(&plain, ReduceScatter));
}

#[test]
fn groups_of_one_rank_hold_everything_as_stage_0_does() {
    let of = |stage, zero| train(2, SHAPE, &config(stage, 1, zero, json!({})), STEPS).swap_remove(0);
    let (stage_0, group) = (of(0, json!({})), of(3, json!({"mics_shard_size": 1})));
    for kind in [MemoryKind::Gradients, MemoryKind::Moments] {
        let [a, b] = [&stage_0, &group].map(|run| run.memory.row(kind).bytes.held);
        // A rank's piece is padded to the length of the others.
        assert!((a..a + 40 * 12 * 4).contains(&b), "{kind:?}: {a} {b}");
    }
    assert_eq!(
        (&stage_0.losses, &stage_0.norms, stage_0.exported == group.exported),
        (&group.losses, &group.norms, true)
    );
}

#[test]
fn weights_that_are_set_lie_in_every_group() {
    let of = |ranks| {
        let runs = threads::run(4, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine =
                builder.initialize(|vb| Tiny::new(SHAPE, vb), grouped(ranks, 1, &json!({}), &json!({})))?;
            let new = Tensor::arange(0f32, 12., &Device::Cpu)?.affine(0.01, 0.5)?;
            engine.safe_set_full_fp32_param("layer.1.norm.weight", &new)?;
            let (ids, targets) = batch(3);
            let loss = engine.eval(|model| model.loss(&ids, &targets))?.to_scalar::<f32>()?;
            Ok((loss.to_bits(), engine.safe_get_full_fp32_param("layer.1.norm.weight")?.to_vec1::<f32>()?))
        });
        runs.unwrap().into_iter().map(candle_zero::Result::unwrap).collect::<Vec<_>>()
    };
    assert_eq!(of(None), of(Some(2)));
}

#[test]
fn groups_that_do_not_fit_the_hosts_are_refused() {
    let refused = |world: usize, ranks| {
        let refused = threads::run(world, |inner| {
            let builder =
                Engine::builder().communicator(Arc::new(Bare { inner, ranks_per_host: 2 })).device(Device::Cpu);
            let config = grouped(Some(ranks), 1, &json!({}), &json!({}));
            Ok(builder.initialize(|vb| Tiny::new(SHAPE, vb), config).err().map(|error| error.to_string()))
        });
        refused.unwrap().remove(0).unwrap()
    };
    insta::assert_snapshot!(refused(6, 3).unwrap(), @"zero_optimization.mics_shard_size is 3, but one host has ranks 0 to 1: each group of 3 ranks, counted from rank 0, must be on one host; give a number that divides the number of ranks on each host");
    // A group of all ranks is plain stage 3.
    assert_eq!(refused(4, 4), None);
}
