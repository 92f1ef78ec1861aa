//! `zero_hpz_partition_size`: values gathered from all hosts are gathered again from a copy on this host, with the same
//! bits.

use crate::support::experts::{self, EXPERT, Mixture, allow, rows};
use crate::support::tiny::{Outcome, Shape, Tiny, batch, config, train_over};
use candle_core::{Device, Tensor};
use candle_zero::comm::{Communicator, Pending, WireFormat, threads};
use candle_zero::memory::MemoryKind;
use candle_zero::precision::Flat;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of ranks on a host.
const RANKS_PER_HOST: usize = 2;

/// The numbers of elements that a rank contributed to gathers among all ranks, and to those within its group.
#[derive(Default)]
struct Gathered {
    from_all: AtomicUsize,
    within: AtomicUsize,
}

/// A communicator over threads that act as ranks on hosts with [`RANKS_PER_HOST`] ranks each.
struct OnHosts {
    inner: Arc<dyn Communicator>,
    gathered: Arc<Gathered>,
}

impl Communicator for OnHosts {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn ranks_here(&self) -> Range<usize> {
        let first = self.rank() / RANKS_PER_HOST * RANKS_PER_HOST;
        first..first + RANKS_PER_HOST
    }

    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        self.gathered.from_all.fetch_add(shard.len(), Ordering::Relaxed);
        self.inner.all_gather_as(wire, shard, tag)
    }

    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.gathered.within.fetch_add(shard.len(), Ordering::Relaxed);
        self.inner.all_gather_within_as(wire, ranks, shard, tag)
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.inner.gather_bytes(bytes)
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}

fn on_hosts(inner: Arc<dyn Communicator>) -> (Arc<dyn Communicator>, Arc<Gathered>) {
    let gathered = Arc::<Gathered>::default();
    (Arc::new(OnHosts { inner, gathered: gathered.clone() }), gathered)
}

/// Returns a configuration of stage 3 with a second copy in groups of `ranks` ranks, in which no parameter stays
/// gathered.
fn stage_3(ranks: usize, accumulation: usize, more: &Value) -> Value {
    let mut zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "zero_hpz_partition_size": ranks,
    });
    for (key, value) in more.as_object().unwrap() {
        zero[key] = value.clone();
    }
    config(3, accumulation, zero, json!({}))
}

const STEPS: usize = 3;
const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 3 };

fn train(world: usize, shape: Shape, config: &Value) -> Vec<Outcome> {
    train_over(|comm| on_hosts(comm).0, world, shape, config, STEPS)
}

#[test]
fn a_second_copy_changes_no_bit() {
    let zeros = [
        json!({}),
        json!({"zero_quantized_weights": true}),
        json!({"stage3_prefetch_bucket_size": 0}),
        json!({"stage3_max_reuse_distance": 1_000_000}),
        json!({"leaf_module": {"name_suffixes": ["1"]}}),
    ];
    for (checkpointed, accumulation, zero) in [false, true]
        .into_iter()
        .flat_map(|c| [1, 3].map(|a| (c, a)))
        .flat_map(|(c, a)| zeros.each_ref().map(|z| (c, a, z)))
    {
        let shape = Shape { checkpointed, ..SHAPE };
        for world in [4, 6] {
            let [one, two] = [1, 2].map(|ranks| train(world, shape, &stage_3(ranks, accumulation, zero)));
            for (one, two) in one.iter().zip(&two) {
                let what =
                    format!("world size {world}, recomputation {checkpointed}, accumulation {accumulation}, {zero}");
                assert_eq!((&one.losses, &one.norms), (&two.losses, &two.norms), "{what}");
                assert!(one.exported == two.exported, "{what}");
                assert_eq!(one.memory.row(MemoryKind::SecondCopy).bytes.peak, 0);
            }
        }
    }
}

#[test]
fn experts_are_gathered_from_the_second_copy_with_the_same_bits() {
    let run = |ranks: usize| {
        let config = stage_3(ranks, 2, &json!({"stage3_prefetch_bucket_size": 2 * EXPERT}));
        let ranks = threads::run(4, |comm| {
            let rank = comm.rank();
            let (comm, gathered) = on_hosts(comm);
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Mixture::new(experts::SHAPE, vb), config.clone())?;
            let mut losses = vec![];
            for micro in 0..6 {
                allow((0..3).map(|i| (2 * rank + micro + i) % experts::SHAPE.experts));
                let x = rows(micro * 4 + rank, 5);
                let loss = engine.forward(|model| model.loss(&x))?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
            }
            let norm = engine.global_grad_norm().map(f64::to_bits);
            let copy = engine.memory_report().row(MemoryKind::SecondCopy).bytes.peak;
            Ok((losses, norm, copy, gathered.within.load(Ordering::Relaxed)))
        });
        ranks.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap()
    };
    for (one, two) in run(1).into_iter().zip(run(2)) {
        assert_eq!((one.0, one.1), (two.0, two.1));
        assert!((one.2, one.3) == (0, 0) && two.2 > EXPERT && two.3 > EXPERT);
    }
}

#[test]
fn each_parameter_comes_from_all_hosts_once_per_step_and_takes_one_copy_per_group() {
    let accumulation = 3;
    let of = |ranks: usize| {
        let runs = threads::run(4, |comm| {
            let (comm, gathered) = on_hosts(comm);
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), stage_3(ranks, accumulation, &json!({})))?;
            for step in 0..2 * accumulation {
                if step == accumulation {
                    // Only the second step is counted.
                    [&gathered.from_all, &gathered.within].iter().for_each(|count| count.store(0, Ordering::Relaxed));
                }
                let (ids, targets) = batch(step);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            let row = engine.memory_report().row(MemoryKind::SecondCopy).bytes;
            let shares: usize = engine.memory_report().row(MemoryKind::Parameters).bytes.held / 4;
            Ok([
                gathered.from_all.load(Ordering::Relaxed),
                gathered.within.load(Ordering::Relaxed),
                shares,
                row.held,
                row.peak,
            ])
        });
        runs.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap()
    };
    let (without, with) = (of(1), of(RANKS_PER_HOST));
    for ([all, within, ..], [all_with, within_with, shares, held, peak]) in without.into_iter().zip(with) {
        // With the copy, each parameter is gathered from all hosts once per step; without it, none is gathered within a
        // group.
        assert_eq!((all_with, within), (shares, 0));
        // In a group, a part is larger by a factor of world size / group size.
        assert_eq!(all_with + within_with / (4 / RANKS_PER_HOST), all);
        assert_eq!((held, peak), (0, 4 * shares * (4 / RANKS_PER_HOST)), "parts of f32, until weights change");
    }
}

#[test]
fn weights_that_are_set_between_micro_steps_are_those_of_the_next() {
    let of = |ranks: usize| {
        let runs = threads::run(4, |comm| {
            let builder = Engine::builder().communicator(on_hosts(comm).0).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), stage_3(ranks, 2, &json!({})))?;
            let mut losses = Vec::new();
            for micro in 0..4 {
                let (ids, targets) = batch(micro);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
                let new = Tensor::arange(0f32, 12., &Device::Cpu)?.affine(0.01 * micro as f64, 0.5)?;
                engine.safe_set_full_fp32_param("layer.1.norm.weight", &new)?;
                losses.push(engine.eval(|model| model.loss(&ids, &targets))?.to_scalar::<f32>()?.to_bits());
            }
            Ok(losses)
        });
        runs.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap()
    };
    assert_eq!(of(1), of(RANKS_PER_HOST));
}

#[test]
fn groups_that_do_not_fit_the_hosts_are_refused() {
    let refused = threads::run(4, |comm| {
        let builder = Engine::builder().communicator(on_hosts(comm).0).device(Device::Cpu);
        Ok(builder.initialize(|vb| Tiny::new(SHAPE, vb), stage_3(3, 1, &json!({}))).err().unwrap().to_string())
    });
    let text = refused.unwrap().remove(0).unwrap();
    insta::assert_snapshot!(text, @"zero_optimization.zero_hpz_partition_size is 3, but one host has ranks 0 to 1: each group of 3 ranks, counted from rank 0, must be on one host; give a number that divides the number of ranks on each host");
}
