//! The engine on GPUs: stages 0 to 3 give the same bits, and their losses match those on the CPU within rounding. Ranks
//! are threads, each with its own GPU if there are enough. Without a GPU, each test is skipped; scripts/gpu_check.sh
//! counts that as "no GPU". CI runs the tests on the mock in tools/mock_cuda.

use crate::support::device::{counted_bytes, gpu, peak_bytes};
use crate::support::processes::{as_program, zerorun};
use crate::support::skips::skipped;
use crate::support::tiny::{Outcome, Shape, Tiny, absent_parameters_are_named, batch, config, train_on};
use candle_core::{DType, Device, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::comm::{CollectiveKind as Collective, Communicator, threads};
use candle_zero::memory::{MemoryKind, MemoryReport};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

mod offload;

const STEPS: usize = 10;
/// The relative tolerance: f32 sums are computed in a different order.
const CPU_TOLERANCE: f32 = 1e-4;

/// Returns whether a GPU answers; if none does, reports `test` as skipped.
fn gpu_answers<T: Fn()>(test: T) -> bool {
    gpu(0).map_err(|e| skipped(test, format_args!("no CUDA device is available: {e}"))).is_ok()
}

fn zero() -> Value {
    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700})
}

fn losses(outcome: &Outcome) -> Vec<f32> {
    outcome.losses.iter().map(|bits| f32::from_bits(*bits)).collect()
}

#[test]
fn stages_give_the_same_bits_and_the_losses_of_the_cpu() {
    if !gpu_answers(stages_give_the_same_bits_and_the_losses_of_the_cpu) {
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    for world in [1, 2, 4] {
        let on_gpu = |stage, shape| train_on(gpu, world, shape, &config(stage, 2, zero(), json!({})), STEPS);
        let reference = on_gpu(0, shape);
        let others = [(1, false), (2, false), (3, false), (3, true)];
        for (stage, checkpointed) in others {
            for (rank, (a, b)) in reference.iter().zip(on_gpu(stage, Shape { checkpointed, ..shape })).enumerate() {
                let what = format!("stage {stage}, rank {rank} of {world}, recomputing: {checkpointed}");
                assert_eq!(a.losses, b.losses, "losses: {what}");
                assert_eq!(a.norms, b.norms, "norms: {what}");
                assert!(a.exported == b.exported, "parameters: {what}");
            }
        }
        let on_cpu = train_on(|_| Ok(Device::Cpu), world, shape, &config(0, 2, json!({}), json!({})), STEPS);
        for (gpu, cpu) in reference.iter().zip(&on_cpu) {
            for (micro, (gpu, cpu)) in losses(gpu).into_iter().zip(losses(cpu)).enumerate() {
                let difference = ((gpu - cpu) / cpu).abs();
                assert!(difference <= CPU_TOLERANCE, "micro step {micro}, world {world}: {gpu} on the GPU, {cpu}");
            }
        }
    }
}

#[test]
fn bf16_trains_and_stages_agree() {
    if !gpu_answers(bf16_trains_and_stages_agree) {
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let bf16 = || json!({"bf16": {"enabled": true}});
    let reference = train_on(gpu, 2, shape, &config(0, 1, zero(), bf16()), 2 * STEPS);
    let first = losses(&reference[0]);
    assert!(first[2 * STEPS - 1] < first[0], "the model learns: {first:?}");
    for stage in 1..4 {
        let run = train_on(gpu, 2, shape, &config(stage, 1, zero(), bf16()), 2 * STEPS);
        assert_eq!(run[0].losses, reference[0].losses, "stage {stage}");
        assert!(run[0].exported == reference[0].exported, "parameters at stage {stage}");
    }
}

#[test]
fn an_absent_parameter_is_an_error_with_its_name() {
    if gpu_answers(an_absent_parameter_is_an_error_with_its_name) {
        absent_parameters_are_named(|| gpu(0));
    }
}

/// The variable that is set for a child process, which runs the body of a single test.
const ALONE: &str = "CANDLE_ZERO_CUDA_ALONE";

/// Runs `test` in a separate process with a variable of the mock, because other tests use the same GPUs. Returns its
/// lines of output that contain the word `stage`, each from that word on.
fn alone(test: &str, (name, value): (&str, u64)) -> String {
    alone_with(test, name, &value.to_string(), "use NCCL")
}

/// Runs `test` like [`alone`], with any variable, and checks that messages about collectives between GPUs contain
/// `expected`.
fn alone_with(test: &str, name: &str, value: &str, expected: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(as_program(module_path!(), test))
        .env(ALONE, "1")
        // NCCL needs this if ranks are threads of one process, each with its own GPU.
        .env("NCCL_P2P_DIRECT_DISABLE", "1")
        .env(name, value)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {value}: {stderr}");
    let messages = stderr.lines().filter(|line| line.contains("collectives between GPUs"));
    assert!(messages.clone().all(|line| line.contains(expected)), "{name} {value}: {stderr}");
    // The test runner's own text may precede the child's output on a line.
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().filter_map(|l| l.find("stage ").map(|at| format!("{}\n", &l[at..]))).collect()
}

fn seed(seed: u64) -> (&'static str, u64) {
    ("MOCK_CUDA_SEED", seed)
}

/// Returns whether the driver is the mock in tools/mock_cuda; if it is not, reports `test` as skipped.
fn is_mock<T: Fn()>(test: T) -> bool {
    let is_available = counted_bytes(0).is_some();
    if !is_available {
        skipped(test, "needs the mock of CUDA, tools/mock_cuda");
    }
    is_available
}

/// Runs the forward pass on this number of copies of a rank's batch, and returns the loss.
fn forward(engine: &mut Engine<Tiny>, copies: usize) -> candle_zero::Result<Tensor> {
    let (ids, targets) = batch(engine.rank());
    let on = |t: &Tensor| t.repeat((copies, 1))?.to_device(engine.device());
    let (ids, targets) = (on(&ids)?, on(&targets)?);
    engine.forward(|model| model.loss(&ids, &targets))
}

/// Runs the forward pass like [`forward`], and then the backward pass. Returns the loss.
fn backward(engine: &mut Engine<Tiny>, copies: usize) -> candle_zero::Result<Tensor> {
    let loss = forward(engine, copies)?;
    engine.backward(&loss)?;
    Ok(loss)
}

#[test]
fn an_engine_that_goes_from_thread_to_thread_has_the_bits_of_one_that_stays() {
    if !gpu_answers(an_engine_that_goes_from_thread_to_thread_has_the_bits_of_one_that_stays) {
        return;
    }
    /// Runs `run` in this thread, or in a separate one.
    fn on<T: Send>(moves: bool, run: impl FnOnce() -> T + Send) -> T {
        if moves { std::thread::scope(|scope| scope.spawn(run).join().unwrap()) } else { run() }
    }
    let run = |moves: bool, zero: Value| {
        let builder = Engine::builder().device(gpu(0).unwrap());
        let config = config(3, 1, zero, json!({}));
        let mut engine =
            on(moves, || builder.initialize(|vb| Tiny::new(Shape { layers: 1, ..Shape::default() }, vb), config))
                .unwrap();
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = on(moves, || forward(&mut engine, 1)).unwrap();
            on(moves, || engine.backward(&loss)).unwrap();
            on(moves, || engine.step()).unwrap();
            losses.push(on(moves, || loss.to_scalar::<f32>()).unwrap().to_bits());
        }
        let weights = on(moves, || {
            engine
                .safe_get_full_fp32_param("head.weight")?
                .flatten_all()?
                .to_vec1::<f32>()
                .map_err(candle_zero::Error::from)
        });
        on(moves, || drop(engine));
        (losses, weights.unwrap())
    };
    for zero in [zero(), offloaded(3)] {
        assert!(run(true, zero.clone()) == run(false, zero.clone()), "{zero}");
    }
}

/// Trains two ranks for two steps. Returns, for each rank, the bytes on its GPU after the last step, the GPU's peak,
/// the engine's report, and the number of the engine's trainable parameters. Nothing else may be on the GPUs, so each
/// test that calls this runs in its own process.
fn held_by_ranks(shape: Shape, config: &Value) -> Vec<(usize, usize, MemoryReport, usize)> {
    let held = threads::run(2, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(gpu(rank)?);
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
        for _ in 0..2 {
            backward(&mut engine, 1)?;
            engine.step()?;
        }
        let number = i32::try_from(rank).unwrap();
        let bytes = (counted_bytes(number).unwrap(), peak_bytes(number).unwrap());
        Ok((bytes.0, bytes.1, engine.memory_report(), engine.trainable_parameters().len()))
    });
    held.unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn between_steps_a_gpu_holds_the_bytes_of_the_formula() {
    let name = "between_steps_a_gpu_holds_the_bytes_of_the_formula";
    if !is_mock(between_steps_a_gpu_holds_the_bytes_of_the_formula) {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        alone(name, seed(0));
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let formats = [json!({}), json!({"bf16": {"enabled": true}})];
    for (stage, format) in (0..4u8).flat_map(|stage| formats.iter().map(move |format| (stage, format))) {
        for (rank, (bytes, _, report, tensors)) in
            held_by_ranks(shape, &config(stage, 1, zero(), format.clone())).into_iter().enumerate()
        {
            // Parameters, master weights and moments according to ZeRO's formula, plus the padding of the shards.
            let formula = |kind| {
                let row = report.row(kind);
                (row.formula.unwrap() + row.padding) as usize
            };
            let state: usize =
                [MemoryKind::Parameters, MemoryKind::MasterWeights, MemoryKind::Moments].map(formula).iter().sum();
            // This is NCCL's buffer for sums, which is held as long as the engine lives.
            let nccl_buffer = report.row(MemoryKind::Buckets).device.held;
            // In the graph, each parameter has a leaf of one byte and a token of one f32. An absent parameter has one
            // more byte.
            let others = tensors * if stage == 3 { 6 } else { 5 };
            assert_eq!(bytes, state + nccl_buffer + others, "stage {stage}, {format}, rank {rank}: {report}");
        }
    }
}

#[test]
fn with_everything_offloaded_a_gpu_holds_at_most_one_unit_beside_what_is_computed() {
    let name = "with_everything_offloaded_a_gpu_holds_at_most_one_unit_beside_what_is_computed";
    if !is_mock(with_everything_offloaded_a_gpu_holds_at_most_one_unit_beside_what_is_computed) {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        alone(name, seed(0));
        return;
    }
    let shape = Shape { layers: 3, units: true, ..Shape::default() };
    // Stage 3 comes first, because the maximum is not reset between runs.
    let mut others = Vec::new();
    for stage in [3, 2] {
        let mut offload = offloaded(stage);
        offload["stage3_prefetch_bucket_size"] = json!(0);
        let (bytes, peak, report, tensors) = held_by_ranks(shape, &config(stage, 1, offload, json!({}))).remove(0);
        let held = if stage == 3 { tensors } else { report.parameters * size_of::<f32>() };
        // This is NCCL's buffer for sums, which is held as long as the engine lives.
        let nccl_buffer = report.row(MemoryKind::Buckets).device.held;
        assert_eq!(bytes, held + nccl_buffer + 5 * tensors, "stage {stage}: {report}");
        let on_device = |kind| report.row(kind).device.peak;
        // The windows: at stage 3, the units that are gathered at one time; at any stage, the buckets in use.
        let windows = on_device(MemoryKind::Gathered) + on_device(MemoryKind::Buckets) - nccl_buffer;
        if stage == 3 {
            // The parameters outside units, and one of three equal units.
            let one = Shape { layers: 1, ..shape };
            let of_one = held_by_ranks(one, &config(3, 1, offloaded(3), json!({}))).remove(0).2.parameters;
            let unit = (report.parameters - of_one) / 2;
            let formula = size_of::<f32>() * (report.parameters - 2 * unit);
            assert_eq!(on_device(MemoryKind::Gathered), formula, "{report}");
        }
        others.push(peak - bytes - windows);
    }
    // Besides its windows, a GPU holds only activations and gradients of the layers in progress: at stage 3, no more
    // than with all parameters on it.
    assert!(others[0] <= others[1], "{others:?}");
}

/// Returns the tiny model's settings, with everything on the host that a stage can offload.
fn offloaded(stage: u8) -> Value {
    let mut offloaded = zero();
    offloaded["offload_optimizer"] = json!({"device": "cpu"});
    if stage == 3 {
        offloaded["offload_param"] = json!({"device": "cpu"});
    }
    offloaded
}

#[test]
fn states_on_the_gpu_on_the_host_and_in_files_give_the_same_bits() {
    if !gpu_answers(states_on_the_gpu_on_the_host_and_in_files_give_the_same_bits) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shape = Shape { layers: 1, units: true, ..Shape::default() };
    let optimizer = |name: &str, params: Value| json!({"optimizer": {"type": name, "params": params}, "zero_allow_untested_optimizer": true});
    let settings = [
        json!({}),
        json!({"bf16": {"enabled": true}}),
        json!({"fp16": {"enabled": true, "initial_scale_power": 8}}),
        optimizer("Adam", json!({"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": false})),
        optimizer("Lion", json!({"lr": 1e-3, "weight_decay": 0.1})),
        optimizer("Adagrad", json!({"lr": 1e-2, "weight_decay": 0.01})),
        optimizer("SGD", json!({"lr": 1e-2, "momentum": 0.9, "nesterov": true, "weight_decay": 0.01})),
        json!({"gradient_predivide_factor": 1.7, "prescale_gradients": false}),
    ];
    for (setting, stage) in settings.iter().flat_map(|setting| [1u8, 2, 3].map(|stage| (setting, stage))) {
        let run = |mut zero: Value| {
            // From stage 2 on, a predivide factor is possible only without a reduce-scatter.
            zero["reduce_scatter"] = json!(setting.get("gradient_predivide_factor").is_none());
            train_on(gpu, 2, shape, &config(stage, 2, zero, setting.clone()), 3)
        };
        let reference = run(zero());
        let mut in_files = zero();
        in_files["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
        for (place, zero) in [("the host", offloaded(stage)), ("files", in_files)] {
            let other = run(zero);
            for (a, b) in reference.iter().zip(&other) {
                assert_eq!(a.losses, b.losses, "stage {stage}, {setting}, {place}");
                assert_eq!(a.norms, b.norms, "stage {stage}, {setting}, {place}");
                assert!(a.exported == b.exported, "stage {stage}, {setting}, {place}");
            }
            let device = |run: &[Outcome]| run[0].memory.row(MemoryKind::Moments).device.held;
            assert_eq!(device(&other), 0, "{place}");
            assert!(device(&reference) > 0 || setting["optimizer"]["params"]["momentum"] == json!(0.0));
        }
    }
}

#[test]
fn optimizers_without_kernels_keep_their_states_on_the_host_and_stages_agree() {
    if !gpu_answers(optimizers_without_kernels_keep_their_states_on_the_host_and_stages_agree) {
        return;
    }
    let shape = Shape { layers: 1, units: true, ..Shape::default() };
    for name in ["Lamb", "Muon", "AdamW8bit"] {
        let setting = json!({
            "optimizer": {"type": name, "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": true,
        });
        let run = |stage| train_on(gpu, 2, shape, &config(stage, 1, zero(), setting.clone()), 3);
        let (reference, sharded) = (run(0), run(3));
        assert_eq!(reference[0].losses, sharded[0].losses, "{name}");
        assert!(reference[0].exported == sharded[0].exported, "{name}");
        let moments = sharded[0].memory.row(MemoryKind::Moments);
        assert!(moments.device.held == 0 && moments.host.held > 0, "{name}");
    }
}

#[test]
fn a_checkpoint_goes_on_with_states_elsewhere_and_shards_of_groups_change_no_bit() {
    if !gpu_answers(a_checkpoint_goes_on_with_states_elsewhere_and_shards_of_groups_change_no_bit) {
        return;
    }
    let shape = Shape { layers: 1, units: true, ..Shape::default() };
    let folder = tempfile::tempdir().unwrap();
    let bf16 = || json!({"bf16": {"enabled": true}});
    let steps = |config: Value, load: bool, save: bool| -> Vec<Vec<u32>> {
        let run = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(gpu(rank)?);
            let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
            if load {
                engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?;
            }
            let mut losses = Vec::new();
            for _ in 0..2 {
                let loss = backward(&mut engine, 1)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
                engine.step()?;
            }
            if save {
                // Another thread saves while the next backward pass runs.
                let options = SaveOptions { in_background: true, ..SaveOptions::default() };
                engine.save_checkpoint_with(folder.path(), None, json!({}), &options)?;
                backward(&mut engine, 1)?;
                engine.wait_for_checkpoint()?;
            }
            Ok(losses)
        });
        run.unwrap().into_iter().map(Result::unwrap).collect()
    };
    steps(config(3, 1, zero(), bf16()), false, true);
    let on_gpu = steps(config(2, 1, zero(), bf16()), true, false);
    assert_eq!(on_gpu, steps(config(3, 1, offloaded(3), bf16()), true, false));

    let mut groups = zero();
    groups["mics_shard_size"] = json!(2);
    let whole = train_on(gpu, 4, shape, &config(3, 1, zero(), bf16()), 2);
    let grouped = train_on(gpu, 4, shape, &config(3, 1, groups, bf16()), 2);
    assert_eq!(whole[0].losses, grouped[0].losses);
    assert!(whole[0].exported == grouped[0].exported);
}

#[test]
fn any_order_of_streams_and_threads_gives_the_same_bits() {
    let name = "any_order_of_streams_and_threads_gives_the_same_bits";
    if !is_mock(any_order_of_streams_and_threads_gives_the_same_bits) {
        return;
    }
    if std::env::var_os(ALONE).is_some() {
        let shape = Shape { layers: 1, units: true, ..Shape::default() };
        let mut delayed = offloaded(2);
        delayed["offload_optimizer"] = json!({"device": "cpu", "delayed_update": true, "delayed_update_after": 0});
        for (stage, zero) in [(2, zero()), (3, zero()), (2, offloaded(2)), (3, offloaded(3)), (2, delayed)] {
            let run = train_on(gpu, 2, shape, &config(stage, 1, zero, json!({})), 2);
            let digest = run[0].exported.iter().fold(0u64, |d, b| d.rotate_left(5) ^ u64::from(*b));
            println!("stage {stage}: {:?} {:?} {digest:x}", run[0].losses, run[0].norms);
        }
        return;
    }
    let want = alone(name, seed(0));
    assert!(want.contains("stage 2") && want.contains("stage 3"), "{want}");
    for n in 1..=20 {
        assert_eq!(alone(name, seed(n)), want, "seed {n}");
    }
}

#[test]
fn collectives_by_nccl_and_through_the_host_give_the_same_bits_and_nccls_own_sums_nearly() {
    let name = "collectives_by_nccl_and_through_the_host_give_the_same_bits_and_nccls_own_sums_nearly";
    if !is_mock(collectives_by_nccl_and_through_the_host_give_the_same_bits_and_nccls_own_sums_nearly) {
        return;
    }
    if std::env::var_os(ALONE).is_some() {
        let shape = Shape { layers: 1, units: true, ..Shape::default() };
        for (stage, bf16) in (0..4).flat_map(|stage| [(stage, false), (stage, true)]) {
            let run = train_on(gpu, 4, shape, &config(stage, 2, zero(), json!({"bf16": {"enabled": bf16}})), 2);
            let digest = run[0].exported.iter().fold(0u64, |d, b| d.rotate_left(5) ^ u64::from(*b));
            println!("stage {stage}: {:?} {:?} {digest:x}", losses(&run[0]), run[0].norms);
        }
        return;
    }
    let with = |choice, expected| alone_with(name, "CANDLE_ZERO_NCCL", choice, expected);
    let exact = with("exact", "use NCCL");
    assert_eq!(exact.lines().count(), 8, "{exact}");
    assert_eq!(exact, with("off", "no message"));
    let fast = with("fast", "its own sums");
    assert_ne!(exact, fast);
    let of_line = |line: &str| -> Vec<f32> {
        let (_, list) = line.split_once('[').unwrap();
        list.split(']').next().unwrap().split(", ").map(|loss| loss.parse().unwrap()).collect()
    };
    for (exact, fast) in exact.lines().zip(fast.lines()) {
        for (a, b) in of_line(exact).into_iter().zip(of_line(fast)) {
            assert!((a - b).abs() <= 2e-3 * a.abs(), "{exact}, {fast}");
        }
    }
}

#[test]
fn compressed_collectives_by_nccl_and_through_the_host_give_the_same_bits() {
    let name = "compressed_collectives_by_nccl_and_through_the_host_give_the_same_bits";
    if !is_mock(compressed_collectives_by_nccl_and_through_the_host_give_the_same_bits) {
        return;
    }
    if let Some(choice) = std::env::var_os(ALONE).and_then(|_| std::env::var_os("CANDLE_ZERO_NCCL")) {
        let shape = Shape { layers: 1, units: true, ..Shape::default() };
        for (stage, bf16) in [0, 2, 3].into_iter().flat_map(|stage| [(stage, false), (stage, true)]) {
            let mut zero = zero();
            zero["zero_quantized_gradients"] = json!(true);
            zero["zero_quantized_weights"] = json!(true);
            let run = train_on(gpu, 4, shape, &config(stage, 2, zero, json!({"bf16": {"enabled": bf16}})), 2);
            let digest = run[0].exported.iter().fold(0u64, |d, b| d.rotate_left(5) ^ u64::from(*b));
            println!("stage {stage}: {:?} {:?} {digest:x}", losses(&run[0]), run[0].norms);
            let on_host =
                [Collective::AllReduce, Collective::ReduceScatter].map(|kind| run[0].comm.kind(kind).wire_bytes);
            assert_eq!(on_host == [0; 2], choice != "off", "stage {stage}: {on_host:?} bytes through the host");
        }
        return;
    }
    let with = |choice, expected| alone_with(name, "CANDLE_ZERO_NCCL", choice, expected);
    let between_gpus = with("exact", "use NCCL");
    assert_eq!(between_gpus.lines().count(), 6, "{between_gpus}");
    assert_eq!(between_gpus, with("off", "no message"));
}

/// The variable that tells the ranks the folder of the test that starts them.
const FOLDER: &str = "CANDLE_ZERO_CUDA_FOLDER";

#[test]
#[ignore = "the next test starts it on each rank"]
fn as_a_rank_with_a_gpu() {
    let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let mut engine = Engine::initialize(|vb| Tiny::new(shape, vb), config(3, 1, zero(), json!({}))).unwrap();
    let rank = engine.rank();
    let mut step = || {
        backward(&mut engine, 1)?;
        engine.step()
    };
    for _ in 0..3 {
        step().unwrap();
    }
    if rank == 1 {
        // Kills the rank at an arbitrary point, while this thread continues.
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(u64::from(std::process::id()) % 40));
            std::fs::write(folder.join("killed"), "").unwrap();
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        });
    }
    let error = loop {
        if let Err(error) = step() {
            break error;
        }
    };
    let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let since = std::fs::metadata(folder.join("killed")).unwrap().modified().unwrap().elapsed().unwrap();
    println!("rank {rank} gets its error after {} s: {error}", since.as_secs());
    std::process::exit(1);
}

#[test]
fn a_rank_killed_in_a_collective_between_gpus_is_named_by_the_others_within_10_s() {
    if !is_mock(a_rank_killed_in_a_collective_between_gpus_is_named_by_the_others_within_10_s) {
        return;
    }
    for _ in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        let mut job = zerorun();
        job.args(["-n", "4", "--"]).arg(std::env::current_exe().unwrap());
        job.args(as_program(module_path!(), "as_a_rank_with_a_gpu")).env(FOLDER, folder.path());
        let output = job.output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(stderr.contains("collectives between GPUs use NCCL"), "{stderr}");
        for rank in [0, 2, 3] {
            let begin = format!("rank {rank} gets its error after ");
            let line = stdout.lines().find_map(|line| Some(&line[line.find(&begin)? + begin.len()..]));
            let line = line.unwrap_or_else(|| panic!("rank {rank} gets no error: {stdout} {stderr}"));
            let (seconds, error) = line.split_once(" s: ").unwrap();
            assert!(seconds.parse::<u64>().unwrap() < 10, "{line}");
            assert!(error.starts_with("rank 1 died ("), "{line}");
        }
    }
}

#[test]
fn out_of_memory_in_a_step_is_an_error_with_what_holds_it_and_the_last_checkpoint_loads() {
    let name = "out_of_memory_in_a_step_is_an_error_with_what_holds_it_and_the_last_checkpoint_loads";
    if !is_mock(out_of_memory_in_a_step_is_an_error_with_what_holds_it_and_the_last_checkpoint_loads) {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        insta::assert_snapshot!(alone(name, ("MOCK_CUDA_MEMORY", 100_000)), @"
        stage 2: the GPU of rank 0 has no memory left; it holds this model's state (parameters 8.7 KiB, moments 8.7 KiB, buckets 1.5 KiB), and activations, gradients in progress or other programs use the rest; use a smaller train_micro_batch_size_per_gpu or units that recompute, or, below stage 3, shard parameters (zero_optimization.stage 3)
        stage 3: the GPU of rank 0 has no memory left; it holds this model's state (parameters 4.3 KiB, moments 8.7 KiB, gathered 8.7 KiB, buckets 1.5 KiB), and activations, gradients in progress or other programs use the rest; use a smaller train_micro_batch_size_per_gpu or units that recompute, or, below stage 3, shard parameters (zero_optimization.stage 3)
        ");
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let folder = tempfile::tempdir().unwrap();
    for stage in [2, 3] {
        let config = config(stage, 1, zero(), json!({}));
        let folder = folder.path().join(stage.to_string());
        let step = |engine: &mut Engine<Tiny>, copies: usize| {
            backward(engine, copies)?;
            engine.step()
        };
        let make = |comm: Arc<dyn Communicator>| {
            let device = gpu(comm.rank())?;
            Engine::builder().communicator(comm).device(device).initialize(|vb| Tiny::new(shape, vb), config.clone())
        };
        let errors = threads::run(2, |comm| {
            let mut engine = make(comm)?;
            step(&mut engine, 1)?;
            engine.save_checkpoint(&folder, None, json!({}))?;
            Ok(step(&mut engine, 50).unwrap_err())
        });
        let errors: Vec<_> = errors.unwrap().into_iter().map(|error| error.unwrap().to_string()).collect();
        // This is the error of the rank whose GPU was full first; the other rank may only repeat it.
        let first_error = errors.iter().find(|error| error.starts_with("the GPU of rank")).unwrap();
        assert!(errors.iter().all(|error| error.contains(" has no memory left; ")), "{errors:?}");
        println!("stage {stage}: {}", first_error.replace("rank 1", "rank 0"));

        let loaded = threads::run(2, |comm| {
            let mut engine = make(comm)?;
            engine.load_checkpoint(&folder, None, &LoadOptions::default())?;
            step(&mut engine, 1)?;
            Ok(engine.global_steps())
        });
        assert!(loaded.unwrap().into_iter().all(|steps| steps.unwrap() == 2));
    }
}
