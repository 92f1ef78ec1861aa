//! A training step reuses the buffers of the previous step: `step()` allocates almost nothing, memory does not grow,
//! and ranks get hardly any pages from the system.
#![allow(clippy::unwrap_used)]

mod support;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use crate::support::processes::{example, stderr, zerorun};
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::models::{Gpt, GptConfig};
use serde_json::json;
use std::alloc::{GlobalAlloc, Layout, System};
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

/// The system's allocator, with counts of the allocated and the freed bytes.
struct Counting;

static ALLOCATED: AtomicU64 = AtomicU64::new(0);
static FREED: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller upholds the contract of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller upholds the contract of the system's allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        FREED.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller upholds the contract of the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATED.fetch_add(size as u64, SeqCst);
        FREED.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller upholds the contract of the system's allocator.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Returns a lock that lets only one test run at a time, because counts are for the whole process. Ranks compute on
/// their own threads, because a pool thread would allocate its buffers in whichever step it first gets work.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Later tests find the pool already initialized.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).build_global();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of all ranks in one optimizer step.
#[derive(Debug, Clone, Copy)]
struct StepBytes {
    /// The bytes allocated inside `engine.step()`.
    in_step: u64,
    /// The bytes allocated in forward, backward and step.
    allocated: u64,
    /// The bytes held at the end, minus those held at the beginning.
    grown: i64,
}

const GPT: GptConfig = GptConfig {
    n_layer: 2,
    n_head: 2,
    n_embd: 64,
    ctx: 32,
    vocab: 256,
    eps: 1e-5,
    checkpoint_activations: false,
    dropout: 0.0,
};

/// Trains on `world` ranks that are threads, and returns the bytes of each step.
fn train(world: usize, stage: u8, bf16: bool, steps: usize) -> Vec<StepBytes> {
    let config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let together = Barrier::new(world);
    // All ranks are between two parts of a step while they wait here, so nothing changes while the counts are read.
    let counts = || {
        together.wait();
        let counts = (ALLOCATED.load(SeqCst), FREED.load(SeqCst));
        together.wait();
        counts
    };
    let results = threads::run(world, |comm| -> candle_zero::Result<_> {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Gpt::new(&GPT, vb), config.clone())?;
        let ids = |shift: usize| {
            let ids = (0..2 * GPT.ctx).map(|i| ((i + shift) * 31 % 251) as u32);
            Tensor::from_iter(ids, &Device::Cpu)?.reshape((2, GPT.ctx))
        };
        let (inputs, targets) = (ids(0)?, ids(1)?);
        let mut all = Vec::with_capacity(steps);
        for _ in 0..steps {
            let begin = counts();
            let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
            engine.backward(&loss)?;
            drop(loss);
            let before_step = counts();
            engine.step()?;
            let end = counts();
            all.push(StepBytes {
                in_step: end.0 - before_step.0,
                allocated: end.0 - begin.0,
                grown: (end.0 - begin.0) as i64 - (end.1 - begin.1) as i64,
            });
        }
        Ok(all)
    });
    results.unwrap().remove(0).unwrap()
}

/// The bytes that a step may allocate for bookkeeping (lists of shards, votes, labels), per rank.
const BOOKKEEPING: u64 = 24 << 10;

#[test]
fn a_step_allocates_no_buffers_except_those_that_publication_fills() {
    let _alone = alone();
    for (bf16, world, stage) in cases() {
        let parameter_bytes = (GPT.num_parameters() * if bf16 { 2 } else { 4 }) as u64;
        // A rank copies its shards to send them, gets those of all ranks, and copies small parameters out of the
        // result. A single rank gets back what it sent.
        let published = match (stage, world) {
            (1 | 2, 1) => 2 * parameter_bytes,
            (1 | 2, ranks) => (2 * ranks + 1) * parameter_bytes,
            _ => 0,
        };
        let most = published + BOOKKEEPING * world;
        for step in &train(world as usize, stage, bf16, 10)[4..] {
            assert!(step.in_step <= most, "bf16 {bf16}, world size {world}, stage {stage}: {step:?}, allowed {most}");
        }
    }
}

#[test]
fn memory_does_not_grow_from_step_to_step() {
    let _alone = alone();
    for (bf16, world, stage) in cases() {
        let steps = &train(world as usize, stage, bf16, 10)[4..];
        // A leak would occur in every step. A list of collectives in progress may double its capacity once, in the
        // first step in which more of them are pending than ever before.
        let without_growth = steps.iter().filter(|step| step.grown == 0).count();
        let grown: i64 = steps.iter().map(|step| step.grown).sum();
        let what = format!("bf16 {bf16}, world size {world}, stage {stage}: {grown} bytes more, {steps:?}");
        assert!(without_growth * 2 > steps.len() && grown.abs() < 16 << 10, "{what}");
        let (least, most) =
            steps.iter().map(|step| step.allocated).fold((u64::MAX, 0), |(a, b), x| (a.min(x), b.max(x)));
        assert!(most - least < 32 << 10, "bf16 {bf16}, world size {world}, stage {stage}: {steps:?}");
    }
}

fn cases() -> impl Iterator<Item = (bool, u64, u8)> {
    let stages = |bf16, world| (0..=3).map(move |stage| (bf16, world, stage));
    [(false, 1), (false, 2), (true, 1), (true, 2)].into_iter().flat_map(move |(bf16, world)| stages(bf16, world))
}

/// Returns the number of minor page faults of the processes that this process has started and waited for, and of their
/// own children.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn faults_of_children() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name in parentheses may contain anything; `cminflt` is the ninth field after it.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(8).unwrap().parse().unwrap()
}

/// Returns the number of page faults of a complete run of the `nano` model under zerorun.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn faults_of_run(program: &Path, folder: &Path, steps: usize) -> u64 {
    let mut command = zerorun();
    command.current_dir(folder).args(["-n", "2"]).arg(program).args(["--ds_config", "ds_config.json"]);
    let before = faults_of_children();
    let output = command.args(["--sample", "0", "--steps", &steps.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    faults_of_children() - before
}

/// The maximum number of page faults of both ranks in one step: half of those that the activations of one block's wide
/// layer, 1 MiB in pages of 4 KiB, would cause on one rank. About 12 were measured, and 670 to 6900 if ranks do not
/// keep freed memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MOST_FAULTS: f64 = 128.0;

#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn ranks_under_zerorun_get_hardly_a_page_from_the_system_after_the_first_steps() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let program = example("train_gpt");
    for stage in 0..=3 {
        let config = json!({
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
        });
        std::fs::write(folder.path().join("ds_config.json"), config.to_string()).unwrap();
        let faults = |steps| faults_of_run(&program, folder.path(), steps) as f64;
        let per_step = (faults(24) - faults(4)) / 20.0;
        assert!(per_step < MOST_FAULTS, "stage {stage}: {per_step} page faults in each step of two ranks");
    }
}
