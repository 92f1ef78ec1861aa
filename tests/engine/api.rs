//! The engine's methods as users call them: order of calls, evaluation, export, prefetching, reports.

use crate::support::tiny::{Shape, Tiny, batch, config, train};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::{CollectiveKind as Collective, CommReport, Communicator, Pending, WireFormat, threads};
use candle_zero::error::{EngineError, Error};
use candle_zero::memory::MemoryKind;
use candle_zero::precision::Flat;
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Returns the keys that release everything at stage 3 as early as possible.
fn released() -> Value {
    json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
}

fn units(layers: usize) -> Shape {
    Shape { units: true, layers, ..Shape::default() }
}

/// Runs `rank` on every rank, and returns the results if there is no error.
fn on_ranks<T: Send>(world: usize, rank: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    threads::run(world, rank).unwrap().into_iter().map(|r| r.unwrap()).collect()
}

fn bits(loss: &Tensor) -> u32 {
    loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap().to_bits()
}

// ---- order of calls --------------------------------------------------------------------------------------------

fn linear_loss(model: &Linear) -> Result<Tensor> {
    model.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    let mut engine = Engine::initialize(|vb| linear(4, 3, vb), config(2, 1, json!({}), json!({}))).unwrap();
    let loss = engine.eval(linear_loss).unwrap();
    insta::assert_snapshot!(engine.backward(&loss).unwrap_err(), @"backward was called before forward; the order of calls in a micro step is forward, backward, step");
    insta::assert_snapshot!(engine.step().unwrap_err(), @"step was called before backward; the order of calls in a micro step is forward, backward, step");
    engine.forward(linear_loss).unwrap();
    insta::assert_snapshot!(engine.step().unwrap_err(), @"step was called before backward; the order of calls in a micro step is forward, backward, step");
    // A second forward pass is allowed; here, only its loss is used.
    let loss = engine.forward(linear_loss).unwrap();
    engine.backward(&loss).unwrap();
    insta::assert_snapshot!(engine.backward(&loss).unwrap_err(), @"backward was called twice on one loss; the order of calls in a micro step is forward, backward, step");
    insta::assert_snapshot!(engine.forward(linear_loss).unwrap_err(), @"forward was called after backward without a step; the order of calls in a micro step is forward, backward, step");
    engine.step().unwrap();
    insta::assert_snapshot!(engine.step().unwrap_err(), @"step was called before backward; the order of calls in a micro step is forward, backward, step");
    insta::assert_snapshot!(engine.backward(&loss).unwrap_err(), @"backward was called before forward; the order of calls in a micro step is forward, backward, step");
    assert_eq!((engine.global_steps(), engine.micro_steps(), engine.skipped_steps()), (1, 1, 0));
    // The refused calls have left no trace: an engine that never received them is in the same state.
    let mut other = Engine::initialize(|vb| linear(4, 3, vb), config(2, 1, json!({}), json!({}))).unwrap();
    let loss = other.forward(linear_loss).unwrap();
    other.backward(&loss).unwrap();
    other.step().unwrap();
    assert_eq!(bits(&other.eval(linear_loss).unwrap()), bits(&engine.eval(linear_loss).unwrap()));
}

#[test]
fn a_loss_has_one_element_of_any_rank() {
    let mut engine = Engine::initialize(|vb| linear(4, 3, vb), config(1, 1, json!({}), json!({}))).unwrap();
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let many = engine.forward(|model| model.forward(&x)).unwrap();
    insta::assert_snapshot!(engine.backward(&many).unwrap_err(), @"backward needs a loss of one element but got a tensor of shape [2, 3]; reduce it first (mean_all)");
    engine.backward(&many.sum_all().unwrap().reshape((1, 1)).unwrap()).unwrap();
    engine.step().unwrap();
}

#[test]
fn without_an_optimizer_an_engine_evaluates_and_does_not_train() {
    for stage in 0..4 {
        let config = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}});
        on_ranks(2, |comm| {
            let mut engine = Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb), config.clone())?;
            let loss = engine.eval(linear_loss)?;
            let trained = engine.forward(linear_loss)?;
            assert_eq!(bits(&loss), bits(&trained));
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.backward(&trained).unwrap_err(), @r#"the configuration has no optimizer section, so the engine can only run eval; add, for example, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}"#);
            }
            assert_eq!(engine.memory_report().row(MemoryKind::Moments).bytes.peak, 0);
            Ok(())
        });
    }
}

// ---- eval ------------------------------------------------------------------------------------------------------

/// Takes two optimizer steps of two micro steps each, and calls `probe` after every forward and every backward pass.
fn probed(config: &Value, shape: Shape, probe: impl Fn(&mut Engine<Tiny>, u32) -> Result<()> + Sync) -> Vec<Vec<u32>> {
    on_ranks(2, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).initialize(|vb| Tiny::new(shape, vb), config.clone())?;
        let mut losses = vec![];
        for micro in 0..4 {
            let (ids, targets) = batch(2 * micro + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(bits(&loss));
            probe(&mut engine, bits(&loss))?;
            engine.backward(&loss)?;
            probe(&mut engine, bits(&loss))?;
            engine.step()?;
            losses.push(engine.global_grad_norm().map_or(0, |norm| (norm as f32).to_bits()));
        }
        Ok(losses)
    })
}

#[test]
fn eval_gives_forwards_values_and_leaves_no_trace_wherever_it_is_called() {
    for stage in 0..4 {
        for shape in [units(2), Shape { units: false, ..units(2) }, Shape { checkpointed: true, ..units(2) }] {
            for zero in [released(), json!({"stage3_param_persistence_threshold": 40})] {
                let config = config(stage, 2, zero, json!({}));
                let plain = probed(&config, shape, |_, _| Ok(()));
                let evaluated = probed(&config, shape, |engine, _| {
                    let counters = (engine.global_steps(), engine.micro_steps(), engine.skipped_steps());
                    let (lr, norm) = (engine.lr(), engine.global_grad_norm());
                    for sample in [0, 7] {
                        let (ids, targets) = batch(sample);
                        let output = engine.eval(|model| model.loss(&ids, &targets)).unwrap();
                        assert!(!output.track_op(), "no graph");
                        let again = engine.eval(|model| model.loss(&ids, &targets)).unwrap();
                        assert_eq!(bits(&output), bits(&again));
                    }
                    assert_eq!(counters, (engine.global_steps(), engine.micro_steps(), engine.skipped_steps()));
                    assert_eq!((lr, norm), (engine.lr(), engine.global_grad_norm()));
                    let report = engine.memory_report();
                    assert_eq!(report.row(MemoryKind::Gathered).bytes.held, 0, "eval leaves nothing gathered");
                    Ok(())
                });
                assert_eq!(plain, evaluated, "stage {stage}, {shape:?}");
            }
        }
    }
}

#[test]
fn eval_between_forward_and_backward_gives_the_value_of_forward() {
    let shape = units(2);
    for stage in 0..4 {
        on_ranks(2, |comm| {
            let rank = comm.rank();
            let config = config(stage, 1, released(), json!({}));
            let mut engine = Engine::builder().communicator(comm).initialize(|vb| Tiny::new(shape, vb), config)?;
            for step in 0..4 {
                let (ids, targets) = batch(2 * step + rank);
                let before = engine.eval(|model| model.loss(&ids, &targets))?;
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                let between = engine.eval(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                let after = engine.eval(|model| model.loss(&ids, &targets))?;
                assert_eq!([bits(&before), bits(&between), bits(&after)], [bits(&loss); 3], "stage {stage}");
                engine.step()?;
                let next = engine.eval(|model| model.loss(&ids, &targets))?;
                // The warm-up begins with two steps at a learning rate of 0.
                assert_eq!(bits(&next) == bits(&loss), engine.global_steps() <= 2, "stage {stage}, step {step}");
            }
            Ok(())
        });
    }
}

// ---- export and init_from --------------------------------------------------------------------------------------

/// Trains for `steps` steps, starting from `init` if it is given, and exports the model to `file`.
fn train_and_export(config: &Value, init: Option<&Path>, steps: usize, file: &Path) {
    on_ranks(3, |comm| {
        let rank = comm.rank();
        let mut builder = Engine::builder().communicator(comm);
        if let Some(init) = init {
            builder = builder.init_from(init);
        }
        let mut engine = builder.initialize(|vb| Tiny::new(units(2), vb), config.clone())?;
        for step in 0..steps {
            let (ids, targets) = batch(3 * step + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.export_safetensors(file)
    });
}

#[test]
fn an_export_read_back_is_the_same_to_the_bit_at_every_stage_and_precision() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    for more in [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true, "loss_scale": 64}})] {
        for from in 0..4 {
            train_and_export(&config(from, 1, released(), more.clone()), None, 3, &first);
            let exported = std::fs::read(&first).unwrap();
            for to in 0..4 {
                train_and_export(&config(to, 1, released(), more.clone()), Some(&first), 0, &second);
                assert!(std::fs::read(&second).unwrap() == exported, "stage {from} to {to}, {more}");
            }
        }
    }
}

#[test]
fn master_weights_are_exported_and_read_with_all_their_digits() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model");
    train_and_export(&config(3, 1, released(), json!({"bf16": {"enabled": true}})), None, 3, &file);
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let values = tensors["layer.0.qkv.weight"].flatten_all().unwrap();
    let rounded = values.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    assert_eq!(values.dtype(), DType::F32);
    assert_ne!(values.to_vec1::<f32>().unwrap(), rounded.to_vec1::<f32>().unwrap(), "more digits than bf16 has");
}

#[test]
fn training_goes_on_from_an_export_as_from_the_original_without_optimizer_state() {
    // SGD without momentum has no state, so an export is complete.
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let sgd = |stage, more: &Value| {
        let mut config = config(stage, 1, released(), more.clone());
        config["optimizer"] = json!({"type": "SGD", "params": {"lr": 0.1}});
        config["zero_allow_untested_optimizer"] = json!(true);
        config.as_object_mut().unwrap().remove("scheduler");
        config
    };
    for more in [json!({}), json!({"bf16": {"enabled": true}})] {
        train_and_export(&sgd(0, &more), None, 2, &file("start"));
        train_and_export(&sgd(0, &more), Some(&file("start")), 2, &file("reference"));
        // A single run trains on the same batches.
        let outcomes = on_ranks(3, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm);
            let mut engine = builder.initialize(|vb| Tiny::new(units(2), vb), sgd(3, &more))?;
            for step in [0, 1, 0, 1] {
                let (ids, targets) = batch(3 * step + rank);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            engine.export_safetensors(file("in_one_go"))?;
            Ok(engine.global_steps())
        });
        assert_eq!(outcomes, [4, 4, 4]);
        let [reference, in_one_go] = ["reference", "in_one_go"].map(|name| std::fs::read(file(name)).unwrap());
        assert!(reference == in_one_go, "{more}");
    }
}

// ---- prefetching -----------------------------------------------------------------------------------------------

type Log = Arc<Mutex<Vec<String>>>;

/// A communicator that records the order in which collectives begin.
struct Recording {
    inner: Arc<dyn Communicator>,
    log: Log,
}

impl Recording {
    fn note(&self, operation: &str, elements: usize) {
        self.log.lock().unwrap().push(format!("{operation} {elements}"));
    }
}

impl Communicator for Recording {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.note("all-reduce", input.len());
        self.inner.all_reduce_as(wire, input, tag)
    }

    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.note("reduce", input.len());
        self.inner.reduce_scatter_as(wire, input, tag)
    }

    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        self.note("gather", shard.len() * self.size());
        self.inner.all_gather_as(wire, shard, tag)
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.inner.gather_bytes(bytes)
    }

    fn barrier(&self) -> Pending<()> {
        self.inner.barrier()
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }

    fn report(&self) -> CommReport {
        self.inner.report()
    }
}

/// A layer that adds a bias, and logs when it runs.
struct Bias {
    bias: Tensor,
    log: Log,
}

impl Module for Bias {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let width = self.bias.elem_count();
        self.log.lock().unwrap().push(format!("run {width}"));
        x.narrow(0, 0, width)? + &self.bias
    }
}

/// Returns rank 0's actions in the forward and backward passes of three optimizer steps with units of 40, 30, 20 and 10
/// elements, its communication report, and its peak number of bytes in gathered parameters.
fn order(prefetch: usize, zero: Value) -> (Vec<String>, CommReport, usize) {
    let mut config = config(3, 1, released(), json!({"gradient_check": false}));
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = json!(prefetch);
    config["zero_optimization"]["reduce_bucket_size"] = json!(1);
    for (key, value) in zero.as_object().unwrap() {
        config["zero_optimization"][key] = value.clone();
    }
    let results = on_ranks(2, |comm| {
        let log = Log::default();
        let comm = Arc::new(Recording { inner: comm, log: log.clone() });
        let build = |vb: VarBuilder<'_>| {
            let bias = |width: usize| {
                let vb = vb.pp(format!("{width}"));
                let bias = |vb: VarBuilder<'_>| Ok(Bias { bias: vb.get(width, "bias")?, log: log.clone() });
                unit(vb, bias)
            };
            [40, 30, 20, 10].into_iter().map(bias).collect::<Result<Vec<Unit<Bias>>>>()
        };
        let mut engine = Engine::builder().communicator(comm).initialize(build, config.clone())?;
        let mut steps = vec![];
        for _ in 0..3 {
            log.lock().unwrap().clear();
            let x = Tensor::ones(40, DType::F32, &Device::Cpu)?;
            let loss = engine
                .forward(|units| units.iter().try_fold(x.clone(), |x, unit| unit.forward(&x))?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            steps.push(log.lock().unwrap().join(", "));
            engine.step()?;
        }
        Ok((steps, engine.comm_report(), engine.memory_report().row(MemoryKind::Gathered).bytes.peak))
    });
    results.into_iter().next().unwrap()
}

#[test]
fn the_first_step_gathers_on_demand_and_later_ones_a_unit_ahead() {
    let (steps, ahead, peak_ahead) = order(50, json!({}));
    insta::assert_snapshot!(steps[0], @"gather 40, run 40, gather 30, run 30, gather 20, run 20, gather 10, run 10, gather 10, gather 20, reduce 10, gather 30, reduce 20, gather 40, reduce 30, reduce 40");
    insta::assert_snapshot!(steps[1], @"gather 40, gather 30, gather 20, run 40, gather 10, run 30, gather 30, run 20, gather 20, run 10, gather 10, reduce 10, gather 40, reduce 20, reduce 30, reduce 40");
    assert_eq!(steps[1], steps[2]);
    let (steps, on_demand, peak_on_demand) = order(0, json!({}));
    assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
    // The same data is transferred, but earlier: more of it is in memory at the same time.
    assert_eq!(ahead.kind(Collective::AllGather).wire_bytes, on_demand.kind(Collective::AllGather).wire_bytes);
    assert_eq!(ahead.kind(Collective::AllGather).calls, on_demand.kind(Collective::AllGather).calls);
    assert!(peak_ahead > peak_on_demand, "{peak_ahead} {peak_on_demand}");
}

#[test]
fn prefetching_stays_within_its_bucket_and_the_live_parameters() {
    // Bucket sizes: 0, the two smallest units, everything.
    let runs = [0, 30, 1000].map(|bucket| order(bucket, json!({})));
    let peaks = runs.each_ref().map(|(_, _, peak)| *peak);
    assert!(peaks[0] <= peaks[1] && peaks[1] < peaks[2], "{peaks:?}");
    insta::assert_snapshot!(runs[1].0[1], @"gather 40, gather 30, run 40, gather 20, gather 10, run 30, run 20, gather 20, run 10, gather 10, gather 30, reduce 10, reduce 20, gather 40, reduce 30, reduce 40");
    insta::assert_snapshot!(runs[2].0[1], @"gather 40, gather 30, gather 20, gather 10, run 40, gather 40, run 30, gather 30, run 20, gather 20, run 10, gather 10, reduce 10, reduce 20, reduce 30, reduce 40");
    // At most 60 elements may be live: prefetching never exceeds that.
    let (steps, _, _) = order(1000, json!({"stage3_max_live_parameters": 60}));
    insta::assert_snapshot!(steps[1], @"gather 40, run 40, gather 30, gather 20, gather 10, run 30, gather 30, run 20, gather 20, run 10, gather 10, reduce 10, reduce 20, gather 40, reduce 30, reduce 40");
    // Without overlap, nothing is prefetched.
    assert_eq!(order(1000, json!({"overlap_comm": false})).0, runs[0].0);
}

// ---- reports ---------------------------------------------------------------------------------------------------

#[test]
fn the_memory_report_is_a_table() {
    let outcomes =
        train(2, units(2), &config(3, 1, released(), json!({"bf16": {"enabled": true}, "gradient_check": false})), 2);
    insta::assert_snapshot!(outcomes[1].memory, @r"
        2221 parameters at stage 3 on 2 ranks; bytes of this rank:
        kind                    device           host         pinned peak in memory          files          formula      padding
        parameters                   0           2222              0           2222              0             2221            1
        gradients                    0              0              0           2222              0             2221            1
        master weights               0           4444              0           4444              0             4442            2
        moments                      0           8888              0           8888              0             8884            4
        persistent                   0              0              0              0              0                -            0
        gathered                     0              0              0           4442              0                -            0
        second copy                  0              0              0              0              0                -            0
        buckets                      0              0              0           4444              0                -            0
        staging                      0              0              0              0              0                -            0
        activations                  0              0              0              0              0                -            0
        gradient check               0              0              0              0              0                -            0
        buffers                      0              0              0              0              0                -            0
        ");
    let outcomes = train(2, units(2), &config(1, 1, json!({}), json!({"gradient_check": false})), 2);
    insta::assert_snapshot!(outcomes[0].memory, @r"
        2221 parameters at stage 1 on 2 ranks; bytes of this rank:
        kind                    device           host         pinned peak in memory          files          formula      padding
        parameters                   0           8884              0           8884              0             8884            0
        gradients                    0              0              0           8884              0             8884            0
        master weights               0              0              0              0              0                0            0
        moments                      0           8888              0           8888              0             8884            4
        persistent                   0              0              0              0              0                -            0
        gathered                     0              0              0              0              0                -            0
        second copy                  0              0              0              0              0                -            0
        buckets                      0              0              0           8888              0                -            0
        staging                      0              0              0              0              0                -            0
        activations                  0              0              0              0              0                -            0
        gradient check               0              0              0              0              0                -            0
        buffers                      0              0              0              0              0                -            0
        ");
}

#[test]
fn the_comm_report_is_a_table() {
    for (stage, report) in [2, 3]
        .map(|stage| (stage, train(2, units(2), &config(stage, 1, released(), json!({"gradient_check": false})), 2)))
    {
        let mut report = report[0].comm.clone();
        assert!(report.waited_s > 0.0 && report.kinds.values().all(|kind| kind.busy_s > 0.0), "{report}");
        // Seconds differ between runs.
        report.waited_s = 1.5;
        report.kinds.values_mut().for_each(|kind| kind.busy_s = 0.25);
        match stage {
            2 => insta::assert_snapshot!(report, @r"
                collective         calls       elements     wire bytes    busy s
                reduce_scatter         2           4444           8888     0.250
                all_gather             2           2222           8888     0.250
                control                4             17            135     0.250
                training thread waited 1.500 s
                "),
            _ => insta::assert_snapshot!(report, @r"
                collective         calls       elements     wire bytes    busy s
                reduce_scatter         2           4444           8888     0.250
                all_gather            12           4444          17776     0.250
                control                4             17            135     0.250
                training thread waited 1.500 s
                "),
        }
    }
}

#[test]
fn reports_serialize() {
    let outcomes = train(1, units(1), &config(2, 1, json!({}), json!({})), 1);
    let memory = serde_json::to_value(&outcomes[0].memory).unwrap();
    assert_eq!(memory["stage"], 2);
    assert_eq!(memory["rows"][0]["kind"], "parameters");
    assert_eq!(memory["rows"][0]["held"], json!(outcomes[0].memory.row(MemoryKind::Parameters).bytes.held));
    assert!(serde_json::to_value(&outcomes[0].comm).unwrap()["kinds"].is_object());
}

#[test]
fn a_stopped_engine_says_why_at_every_call() {
    let mut engine = Engine::initialize(|vb| linear(4, 3, vb), config(2, 1, json!({}), json!({}))).unwrap();
    engine.forward(|_| candle_core::bail!("no data today")).unwrap_err();
    let folder = tempfile::tempdir().unwrap();
    let errors = [
        engine.forward(linear_loss).unwrap_err(),
        engine.eval(linear_loss).unwrap_err(),
        engine.export_safetensors(folder.path().join("model")).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Engine(EngineError::Stopped(_))));
        assert_eq!(error.to_string(), "the engine stopped after an earlier error: no data today");
    }
    // After the first error, the order of calls does not matter.
    let mut engine = Engine::initialize(|vb| linear(4, 3, vb), config(2, 1, json!({}), json!({}))).unwrap();
    let loss = engine.forward(linear_loss).unwrap();
    let infinite = loss.affine(f64::INFINITY, 0.0).unwrap();
    let first = engine.backward(&infinite).unwrap_err();
    assert!(matches!(first, Error::Engine(EngineError::NonFiniteLoss { .. })), "{first}");
    for error in [engine.backward(&loss).unwrap_err(), engine.step().unwrap_err()] {
        assert!(matches!(error, Error::Engine(EngineError::Stopped(_))), "{error}");
    }
}
