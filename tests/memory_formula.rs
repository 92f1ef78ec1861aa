//! The memory of each rank equals the ZeRO formula plus the padding that the report names, and the ledger equals the
//! allocated bytes.
#![allow(clippy::unwrap_used)]

mod support;

use crate::support::tiny::{Shape, config, train};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::memory::{MemoryKind, MemoryReport};
use candle_zero::offload::DiskAccess;
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Barrier, Mutex};

/// The system's allocator, with a count of the bytes that are currently allocated.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
/// The maximum of `LIVE` since `PEAK` was last reset.
static PEAK: AtomicIsize = AtomicIsize::new(0);
static ALONE: Mutex<()> = Mutex::new(());

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller upholds the contract of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

fn add(bytes: isize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns settings with which stage 3 releases everything as soon as possible.
fn zero() -> Value {
    json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
}

fn precisions() -> [Value; 2] {
    [json!({}), json!({"bf16": {"enabled": true}})]
}

fn assert_formula(report: &MemoryReport, what: &str) {
    for kind in [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::MasterWeights, MemoryKind::Moments] {
        let row = report.row(kind);
        let expected = row.formula.unwrap() + row.padding;
        assert_eq!(row.bytes.peak as f64, expected, "{}: {what}\n{report}", kind.name());
    }
    assert_eq!(report.row(MemoryKind::Persistent).bytes.peak, 0);
    assert_eq!(report.row(MemoryKind::Gathered).bytes.held, 0, "nothing is gathered between steps");
    assert_eq!(report.row(MemoryKind::Buckets).bytes.held, 0, "no bucket is in use between steps");
}

#[test]
fn every_rank_holds_what_the_formula_says_plus_named_padding() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    for world in [1, 2, 4] {
        for more in precisions() {
            for stage in 0..4u8 {
                // The first run uses one bucket for everything; the second uses buckets smaller than most gradients.
                let mut outcomes = train(world, shape, &config(stage, 1, zero(), more.clone()), 3);
                let mut small = zero();
                small["reduce_bucket_size"] = json!(50);
                small["overlap_comm"] = json!(false);
                outcomes.extend(train(world, shape, &config(stage, 1, small, more.clone()), 3));
                for outcome in &outcomes {
                    let report = &outcome.memory;
                    assert_formula(report, &format!("stage {stage}, world {world}, {more}"));
                    // The formula itself, written out again: bytes per parameter from section 5 of the ZeRO paper.
                    let (psi, n) = (report.parameters as f64, world as f64);
                    let k = if more == json!({}) { [4.0, 4.0, 0.0, 8.0] } else { [2.0, 2.0, 4.0, 8.0] };
                    let part = |sharded: bool| if sharded { psi / n } else { psi };
                    let total = part(stage == 3) * k[0] + part(stage >= 2) * k[1] + part(stage >= 1) * (k[2] + k[3]);
                    let rows = report.rows.iter().filter_map(|r| r.formula).sum::<f64>();
                    assert!((rows - total).abs() < 1e-6, "{rows} {total}");
                    // The padding is less than one element per parameter, rank and state.
                    let padding: f64 = report.rows.iter().map(|r| r.padding).sum();
                    assert!((0.0..16.0 * 12.0).contains(&padding), "{padding}");
                }
            }
        }
    }
}

#[test]
fn states_of_every_optimizer_take_what_the_formula_says_and_factored_ones_are_on_every_rank() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    // The numbers of elements in the model's matrices and vectors, and the sum of the rows and columns of its matrices.
    let (matrices, vectors, rows_and_columns) = (2.0 * 37.0 * 12.0 + 2.0 * (12.0 * 36.0 + 144.0), 181.0, 242.0);
    let all = matrices + vectors;
    let no_schedule = |params: Value, kind: &str| json!({"optimizer": {"type": kind, "params": params}, "scheduler": null, "zero_allow_untested_optimizer": true});
    // For each optimizer, the number of elements of its sharded states, of its other states, and of the average.
    let optimizers = [
        (no_schedule(json!({}), "LARS"), all, 0.0, 0.0),
        (no_schedule(json!({}), "Adafactor"), vectors, rows_and_columns, 0.0),
        (no_schedule(json!({"beta1": 0.9}), "Adafactor"), vectors + all, rows_and_columns, 0.0),
        (no_schedule(json!({}), "AdamWScheduleFree"), 2.0 * all, 0.0, all),
    ];
    for (keys, sharded, everywhere, averaged) in optimizers {
        for (world, stage) in [(1, 0), (2, 0), (2, 1), (2, 3), (4, 2)] {
            for outcome in train(world, shape, &config(stage, 1, zero(), keys.clone()), 2) {
                let (report, what) = (&outcome.memory, format!("{keys}, stage {stage}, world {world}"));
                assert_formula(report, &what);
                let part = if stage > 0 { world as f64 } else { 1.0 };
                let formula = |kind| report.row(kind).formula.unwrap();
                let expected = 4.0 * (sharded / part + everywhere);
                assert!((formula(MemoryKind::Moments) - expected).abs() < 1e-6, "{what}\n{report}");
                assert!((formula(MemoryKind::MasterWeights) - 4.0 * averaged / part).abs() < 1e-6, "{what}\n{report}");
            }
        }
    }
}

#[test]
fn ranks_of_groups_hold_their_part_of_a_group() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    for (ranks, more) in [1, 2].into_iter().flat_map(|ranks| precisions().map(|more| (ranks, more))) {
        let mut zero = zero();
        zero["mics_shard_size"] = json!(ranks);
        for outcome in train(4, shape, &config(3, 1, zero, more.clone()), 3) {
            let report = &outcome.memory;
            assert_formula(report, &format!("groups of {ranks}, {more}"));
            // The states take 4 + 4 + 8 bytes per parameter in f32, and 2 + 2 + 4 + 8 in bf16.
            let (psi, states) = (report.parameters as f64, 16.0);
            let rows = report.rows.iter().filter_map(|r| r.formula).sum::<f64>();
            assert!((rows - psi * states / ranks as f64).abs() < 1e-6, "{rows}");
            // The padding is less than one element per parameter, piece and state.
            let padding: f64 = report.rows.iter().map(|r| r.padding).sum();
            assert!((0.0..4.0 * 16.0 * 12.0).contains(&padding), "{padding}");
        }
    }
}

// ---- offload to files ------------------------------------------------------------------------------------------

/// Whether the optimizer's states and the parameters are in files.
const OFFLOADS: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

fn offloaded(folder: &Path, [optimizer, param]: [bool; 2], more: &Value, max_in_cpu: usize) -> Value {
    let mut zero = zero();
    if optimizer {
        zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder});
        zero["offload_optimizer"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    if param {
        zero["offload_param"] = json!({"device": "nvme", "nvme_path": folder, "max_in_cpu": max_in_cpu});
    }
    zero
}

fn is_in_files(kind: MemoryKind, [optimizer, param]: [bool; 2]) -> bool {
    if kind == MemoryKind::Parameters { param } else { optimizer }
}

#[test]
fn files_hold_what_the_formula_says_plus_named_padding_and_memory_nothing_of_it() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    for world in [1, 2] {
        for more in precisions() {
            let is_half = more != json!({});
            let in_memory = train(world, shape, &config(3, 1, zero(), more.clone()), 3);
            for (offload, stage) in
                OFFLOADS.iter().map(|offload| (*offload, 3)).chain([([true, false], 2), ([true, false], 1)])
            {
                for sets in 1..=3 {
                    let pipeline = json!({"pipeline_read": sets > 1, "pipeline_write": sets > 2});
                    let zero = offloaded(folder.path(), offload, &pipeline, 0);
                    // If only parameters are in files, they are always transferred in a pipeline.
                    let sets = if offload[0] { sets } else { 3 };
                    let outcomes = train(world, shape, &config(stage, 1, zero, more.clone()), 3);
                    for (outcome, in_memory) in outcomes.iter().zip(&in_memory) {
                        let report = &outcome.memory;
                        let message =
                            format!("{offload:?}, stage {stage}, world {world}, {more}, {sets} sets\n{report}");
                        for kind in [
                            MemoryKind::Parameters,
                            MemoryKind::Gradients,
                            MemoryKind::MasterWeights,
                            MemoryKind::Moments,
                        ] {
                            let row = report.row(kind);
                            let expected = row.formula.unwrap() + row.padding;
                            if kind == MemoryKind::Gradients && (stage == 1 || !is_in_files(kind, offload)) {
                                // The formula with its padding does not apply: gradients are complete at stage 1, and
                                // buffers in memory need no padding for files.
                                assert_eq!(row.bytes.held, 0, "{message}");
                            } else if is_in_files(kind, offload) {
                                assert_eq!(row.file.held as f64, expected, "{}: {message}", kind.name());
                                assert_eq!(row.bytes.held, 0, "{}: {message}", kind.name());
                            } else {
                                assert_eq!((row.file.peak, row.bytes.held as f64), (0, expected), "{message}");
                            }
                            // The padding is less than 2048 elements of at most 8 bytes for each of 15 parameters.
                            assert!(row.padding < 15.0 * 2048.0 * 8.0, "{message}");
                        }
                        let gathered = |report: &MemoryReport| report.row(MemoryKind::Gathered).bytes.peak;
                        if stage == 3 {
                            assert_eq!(gathered(report), gathered(&in_memory.memory), "{message}");
                        }
                        // The element sizes of the kinds of state that a step transfers. All shares are in one
                        // sub-group.
                        let half = if is_half { 2 } else { 4 };
                        let optimizer =
                            [(offload[0] && is_half, 4), (offload[0], 4), (offload[0], 4), (offload[0], half)];
                        let streams = [(offload[1], half)].into_iter().chain(optimizer).filter(|s| s.0);
                        let streams: Vec<usize> = streams.map(|s| s.1).collect();
                        let moments = report.row(MemoryKind::Moments);
                        let share = ((moments.formula.unwrap() + moments.padding) / 8.0) as usize;
                        let buffers = sets * streams.len();
                        let count = if offload[0] { 4 } else { buffers };
                        let window = (share * count / buffers).next_multiple_of(2048).min(share);
                        let most: usize = streams.iter().map(|size| sets * (window * size + 4095)).sum();
                        // While files are created, each of 8 threads may copy a parameter for direct access.
                        let most = most.max(8 * (12 * 37 * 4usize).next_multiple_of(4096) + 8 * 4095);
                        let staging = report.row(MemoryKind::Staging).bytes;
                        assert!(staging.held == 0 && (1..=most).contains(&staging.peak), "at most {most}: {message}");
                    }
                }
            }
        }
    }
}

#[test]
fn ratio_and_max_in_cpu_split_a_kind_between_files_and_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let shape = Shape { units: true, layers: 2, ..Shape::default() };
    for world in [1, 2] {
        for more in precisions() {
            let mut zero = offloaded(folder.path(), [true, true], &json!({"ratio": 0.5}), 3 * 2048);
            zero["sub_group_size"] = json!(1);
            for outcome in train(world, shape, &config(3, 1, zero, more.clone()), 2) {
                let report = &outcome.memory;
                let rows = [MemoryKind::Parameters, MemoryKind::MasterWeights, MemoryKind::Moments]
                    .map(|kind| report.row(kind));
                for row in rows.into_iter().filter(|row| row.formula.unwrap() > 0.0) {
                    let expected = row.formula.unwrap() + row.padding;
                    assert_eq!((row.file.held + row.bytes.held) as f64, expected, "{report}");
                    // There is one sub-group per parameter.
                    let share = row.bytes.held as f64 / expected;
                    match row.kind {
                        MemoryKind::Parameters => {
                            assert_eq!(row.bytes.held, 3 * 2048 * if more == json!({}) { 4 } else { 2 })
                        }
                        _ => assert!((0.4..=0.5).contains(&share), "{share}: {report}"),
                    }
                }
                let gradients = report.row(MemoryKind::Gradients);
                let expected = (gradients.formula.unwrap() + gradients.padding) / 2.0;
                assert!(gradients.bytes.held == 0 && gradients.file.held as f64 >= expected, "{report}");
            }
        }
    }
}

struct Wide(Vec<Unit<Linear>>);

const WIDTH: usize = 300;

impl Wide {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let layer = |i| unit(vb.pp(format!("{i}")), |vb| linear(WIDTH, WIDTH, vb));
        (0..6).map(layer).collect::<candle_core::Result<_>>().map(Self)
    }
}

/// The maximum number of bytes that a thread keeps for the operands of Candle's products: a buffer of the size of a
/// second-level cache, which the gemm crate keeps on each thread after the first product if its kernel needs one.
const PACKING: isize = 8 << 20;

/// Computes products as a model does, without an engine.
fn multiply() -> candle_core::Result<()> {
    let x = Var::ones((2, WIDTH), DType::F32, &Device::Cpu)?;
    let w = Var::ones((WIDTH, WIDTH), DType::F32, &Device::Cpu)?;
    x.matmul(&w.t()?)?.sum_all()?.backward()?;
    Ok(())
}

/// Returns the live bytes of all ranks together between steps, and the ledger's sum.
fn live_and_ledger(world: usize, config: &Value, access: Option<DiskAccess>) -> (isize, isize) {
    let results = threads::run(world, |comm| {
        let barrier = comm.clone();
        let start = LIVE.load(Ordering::SeqCst);
        barrier.barrier().wait()?;
        // Memory that threads keep for products does not belong to a model. It is therefore allocated, and its size is
        // checked, before counting.
        multiply()?;
        barrier.barrier().wait()?;
        let before = LIVE.load(Ordering::SeqCst);
        assert!(before - start <= world as isize * PACKING, "{} bytes for packing", before - start);
        barrier.barrier().wait()?;
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let builder = match access {
            Some(access) => builder.disk_access(access),
            None => builder,
        };
        let mut engine = builder.initialize(Wide::new, config.clone())?;
        for _ in 0..2 {
            let x = Tensor::ones((2, WIDTH), engine.dtype(), &Device::Cpu)?;
            let loss = engine.forward(|m| {
                let y = m.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
                y.sqr()?.mean_all()
            })?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        barrier.barrier().wait()?;
        let live = LIVE.load(Ordering::SeqCst) - before;
        barrier.barrier().wait()?;
        let held: usize = engine.memory_report().rows.iter().map(|r| r.bytes.held).sum();
        Ok((live, held as isize))
    });
    let results: Vec<_> = results.unwrap().into_iter().map(|r| r.unwrap()).collect();
    (results[0].0, results.iter().map(|r| r.1).sum())
}

#[test]
fn the_ledger_equals_what_the_allocator_gave() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for world in [1, 2, 4] {
        for more in precisions() {
            let in_memory = (0..4u8).map(|stage| (stage, zero()));
            let in_memory = in_memory.map(|(stage, zero)| (stage, zero, None));
            let accesses = [Some(DiskAccess::Direct), Some(DiskAccess::Mapped), None];
            let in_files = OFFLOADS.iter().flat_map(|offload| accesses.map(|access| (*offload, access)));
            let in_files =
                in_files.map(|(offload, access)| (3, offloaded(folder.path(), offload, &json!({}), 0), access));
            for (stage, zero, access) in in_memory.chain(in_files) {
                let offload = zero.to_string().matches("nvme\"").count();
                let (live, ledger) = live_and_ledger(world, &config(stage, 1, zero, more.clone()), access);
                // Besides the model states, there are names, queues and the tensors' own nodes: a few tens of KiB per
                // rank.
                let slack = 100_000 * world as isize;
                let what = format!(
                    "stage {stage}, world {world}, {more}, {offload} in files {access:?}: {live} live, {ledger} in the ledger"
                );
                assert!(live >= ledger && live - ledger < slack, "{what}");
                println!("{what}");
            }
        }
    }
}

#[test]
fn building_a_model_at_stage_3_never_holds_a_whole_parameter() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // Each of four parameters takes 4 MB and is divided among 4 ranks. A complete copy of one would be visible.
    let peak = Mutex::new(0isize);
    let before = LIVE.load(Ordering::SeqCst);
    let config = config(3, 1, zero(), json!({}));
    // No rank starts on the optimizer's state (8 MB per rank) while others are still building.
    let all_built = Barrier::new(4);
    let build = |vb: VarBuilder<'_>| {
        let init = candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 };
        let weights = (0..4)
            .map(|i| {
                let w = vb.get_with_hints((1000, 1000), &format!("w{i}"), init);
                let live = LIVE.load(Ordering::SeqCst) - before;
                let mut peak = peak.lock().unwrap();
                *peak = (*peak).max(live);
                w
            })
            .collect::<candle_core::Result<Vec<_>>>();
        all_built.wait();
        weights
    };
    for result in threads::run(4, |comm| {
        let engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config.clone())?;
        assert_eq!(engine.memory_report().row(MemoryKind::Parameters).bytes.peak, 4 * 250_000 * 4);
        assert_eq!(engine.memory_report().row(MemoryKind::Gathered).bytes.peak, 0);
        Ok(())
    })
    .unwrap()
    {
        result.unwrap();
    }
    let shares = 4 * 4_000_000;
    let most = *peak.lock().unwrap();
    assert!(most < shares + 4_000_000, "{most} bytes at most, {shares} in the shares of all ranks");
}

// ---- evaluation ------------------------------------------------------------------------------------------------

const CHAIN: usize = 100;
const CHAIN_WIDTH: usize = 32;
const CHAIN_ROWS: usize = 1024;
/// The number of bytes in the result of one layer of the chain.
const ACTIVATION: isize = (CHAIN_ROWS * CHAIN_WIDTH * 4) as isize;

/// One hundred candle-nn layers, with `per_unit` of them in each unit, or all of them outside units.
struct Chain(Vec<Unit<Layers>>, Layers);

struct Layers(Vec<Linear>);

impl Module for Layers {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())
    }
}

impl Chain {
    fn new(per_unit: Option<usize>, vb: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let layers = |first: usize, count: usize, vb: VarBuilder<'_>| {
            let layer = |i| linear(CHAIN_WIDTH, CHAIN_WIDTH, vb.pp(i));
            Ok(Layers((first..first + count).map(layer).collect::<candle_core::Result<_>>()?))
        };
        let Some(per_unit) = per_unit else { return Ok(Self(vec![], layers(0, CHAIN, vb.pp("layers"))?)) };
        let unit_of = |i: usize| unit(vb.pp(format!("unit.{i}")), |vb| layers(0, per_unit, vb));
        Ok(Self((0..CHAIN / per_unit).map(unit_of).collect::<candle_core::Result<_>>()?, Layers(vec![])))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.iter().try_fold(x.clone(), |x, unit| unit.forward(&x))?)
    }
}

/// Returns the maximum number of bytes, beyond those at the beginning, that are allocated while `run` runs.
fn peak_of<T>(run: impl FnOnce() -> T) -> isize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    drop(run());
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn an_evaluation_needs_the_memory_of_a_plain_forward_without_variables() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let x = Tensor::ones((CHAIN_ROWS, CHAIN_WIDTH), DType::F32, &Device::Cpu).unwrap();
    let plain = Chain::new(None, &VarBuilder::zeros(DType::F32, &Device::Cpu)).unwrap();
    let without_variables = peak_of(|| plain.forward(&x).unwrap());
    assert!(without_variables < 5 * ACTIVATION, "{without_variables}");
    for stage in [0, 3] {
        let engine = |per_unit: Option<usize>| {
            let config = config(stage, 1, zero(), json!({}));
            Engine::builder().device(Device::Cpu).initialize(move |vb| Chain::new(per_unit, &vb), config).unwrap()
        };
        let weights = (CHAIN * CHAIN_WIDTH * (CHAIN_WIDTH + 1) * 4) as isize * isize::from(stage == 3) * 2;
        // The caller of a unit holds the unit's input during the call, and tensors without their values take some
        // bytes.
        let slack = ACTIVATION + weights + 4096;
        // One layer in each unit, ten layers in each, and no units.
        for per_unit in [Some(1), Some(10), None] {
            let mut engine = engine(per_unit);
            let what = format!("stage {stage}, {per_unit:?} layers in a unit");
            // The first evaluation allocates memory that stays allocated.
            engine.eval(|m| m.forward(&x)).unwrap();
            let training = peak_of(|| engine.forward(|m| m.forward(&x)).unwrap());
            assert!(training > 2 * CHAIN as isize * ACTIVATION, "{what}: {training}");
            let eval = peak_of(|| engine.eval(|m| m.forward(&x)).unwrap());
            // Candle keeps three results of each layer that is outside units, or of each layer in one unit at a time.
            let kept = 3 * ACTIVATION * per_unit.unwrap_or(CHAIN) as isize;
            assert!(eval <= without_variables + kept + slack, "{what}: {eval}, {without_variables}");
            engine.build_for_eval(|vb| Chain::new(per_unit, &vb)).unwrap();
            engine.eval(|m| m.forward(&x)).unwrap();
            let eval = peak_of(|| engine.eval(|m| m.forward(&x)).unwrap());
            assert!(eval <= without_variables + slack, "{what}, built for eval: {eval}, {without_variables}");
        }
    }
}
