//! Gradients and weights that are sent in fewer bytes: `communication_data_type`, `zero_quantized_gradients` and
//! `zero_quantized_weights`. The tests check the values and the bytes, and that other settings change neither.

use crate::support::tiny::{Outcome, Shape, config, train};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::Engine;
use candle_zero::comm::{CollectiveKind, CollectiveKindReport, CommReport, threads};
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
use candle_zero::layout::{shard_len, shard_range};
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::precision::{Flat, IntFormat};
use serde_json::{Value, json};

const STEPS: usize = 8;
const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn assert_same(a: &[Outcome], b: &[Outcome], case: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {case}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {case}");
        assert!(a.exported == b.exported, "parameters: {case}");
    }
}

// ---- values ----------------------------------------------------------------------------------------------------

/// One vector `w`, whose gradient is the input `x`, because the loss is sum(w * x).
struct Weights(Tensor);

/// More elements than a packed message holds, and not a multiple of any block length.
const LONG: usize = 70_001;
const SHORT: usize = 1_001;

fn gradient(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17) % 1009) as f32 * 0.37 - 150.0).collect()
}

/// Returns the weights after one step of SGD with learning rate 1, starting from zeros: the negated gradient.
fn weights_after_step(world: usize, len: usize, config: &Value) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let results = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let model = |vb: VarBuilder<'_>| Ok(Weights(vb.get_with_hints(len, "w", Init::Const(0.0))?));
        let mut engine = builder.initialize(model, config.clone())?;
        let x = Tensor::from_vec(gradient(rank, len), len, &Device::Cpu)?;
        let loss = engine.forward(|m| (&m.0 * &x)?.sum_all())?;
        engine.backward(&loss)?;
        engine.step()?;
        engine.export_safetensors(&file)
    });
    results.unwrap().into_iter().for_each(|r| r.unwrap());
    candle_core::safetensors::load(&file, &Device::Cpu).unwrap()["w"].to_vec1().unwrap()
}

#[test]
fn contributions_are_rounded_for_the_wire_and_summed_in_f32() {
    let world = 3;
    let rounded = |values: &[f32], dtype| Flat::from_f32(values.to_vec(), dtype);
    for (zero, dtype, ints) in [
        (json!({}), DType::F32, None),
        (json!({}), DType::BF16, None),
        (json!({}), DType::F16, None),
        (json!({"zero_quantized_gradients": true}), DType::F32, Some(IntFormat::Int4)),
        (json!({"zero_quantized_gradients": true}), DType::BF16, Some(IntFormat::Int4)),
    ] {
        for len in [SHORT, LONG] {
            let mut expect = vec![];
            for owner in 0..world {
                let mut sum = vec![0f32; shard_range(len, world, owner).len()];
                for rank in 0..world {
                    let mean: Vec<f32> = gradient(rank, len).iter().map(|x| x * (1.0 / world as f32)).collect();
                    let mut part = rounded(&mean[shard_range(len, world, owner)], dtype);
                    if let Some(ints) = ints.filter(|_| rank != owner) {
                        // The last shard is padded with zeros.
                        part.extend_zeros(shard_len(len, world) - part.len());
                        let mut bytes = vec![0; ints.encoded_len(part.len())];
                        ints.encode(part.as_ref(), &mut bytes);
                        part = Flat::zeros(DType::F32, part.len());
                        ints.decode(&bytes, part.as_mut());
                    }
                    sum.iter_mut().enumerate().for_each(|(i, s)| *s += part.as_ref().get(i));
                }
                let sum = rounded(&sum, dtype);
                expect.extend((0..sum.len()).map(|i| -sum.as_ref().get(i)));
            }
            for stage in 0..4 {
                let more = json!({
                    "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": null, "gradient_clipping": 0.0,
                    "communication_data_type": match dtype { DType::BF16 => "bf16", DType::F16 => "fp16", _ => "fp32" },
                    "zero_allow_untested_optimizer": true,
                });
                let found = weights_after_step(world, len, &config(stage, 1, zero.clone(), more));
                assert!(found == expect, "stage {stage}, {dtype:?}, {zero}, {len} elements");
            }
        }
    }
}

// ---- settings that keep values equal --------------------------------------------------------------------------

#[test]
fn gradients_in_fewer_bytes_give_the_same_bits_at_every_stage() {
    for (zero, more) in [
        (json!({}), json!({"communication_data_type": "bf16"})),
        (json!({}), json!({"communication_data_type": "fp16"})),
        (json!({"zero_quantized_gradients": true}), json!({})),
        (json!({"zero_quantized_gradients": true}), json!({"bf16": {"enabled": true}})),
    ] {
        let with = |stage, keys: Value| {
            let mut zero = zero.clone();
            keys.as_object().unwrap().iter().for_each(|(key, value)| zero[key] = value.clone());
            config(stage, 2, zero, more.clone())
        };
        for world in [2, 3] {
            let reference = train(world, SHAPE, &with(0, json!({})), STEPS);
            let exact = json!({"zero_quantized_gradients": false});
            let mut exact = config(0, 2, exact, more.clone());
            exact["communication_data_type"] = "fp32".into();
            assert_ne!(train(world, SHAPE, &exact, STEPS)[0].losses, reference[0].losses, "{zero}, {more}");
            for stage in 0..4 {
                for keys in [
                    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}),
                    json!({"reduce_bucket_size": 30, "sub_group_size": 100, "overlap_comm": false}),
                    json!({"reduce_bucket_size": 700, "reduce_scatter": false}),
                ] {
                    let run = train(world, SHAPE, &with(stage, keys.clone()), STEPS);
                    assert_same(&reference, &run, &format!("stage {stage}, world {world}, {zero}, {more}, {keys}"));
                }
            }
        }
    }
}

#[test]
fn quantized_weights_do_not_depend_on_what_is_gathered_together_nor_on_where_shards_lie() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = json!({"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 0});
    for gradients in [false, true] {
        for more in [json!({}), json!({"bf16": {"enabled": true}})] {
            let run = |world, shape, keys: &Value| {
                let mut zero = json!({"zero_quantized_weights": true, "zero_quantized_gradients": gradients});
                keys.as_object().unwrap().iter().for_each(|(key, value)| zero[key] = value.clone());
                train(world, shape, &config(3, 2, zero, more.clone()), STEPS)
            };
            for world in [2, 3] {
                let reference = run(world, SHAPE, &json!({}));
                let exact = train(world, SHAPE, &config(3, 2, json!({}), more.clone()), STEPS);
                assert_ne!(exact[0].losses, reference[0].losses);
                let in_files = json!({
                    "offload_param": files, "offload_optimizer": {"device": "nvme", "nvme_path": folder.path()},
                    "stage3_param_persistence_threshold": 0,
                });
                for (shape, keys) in [
                    (SHAPE, json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0})),
                    (SHAPE, json!({"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 0})),
                    (SHAPE, json!({"reduce_bucket_size": 30, "sub_group_size": 100, "overlap_comm": false})),
                    (Shape { units: false, ..SHAPE }, json!({"stage3_param_persistence_threshold": 0})),
                    (Shape { checkpointed: true, ..SHAPE }, json!({"stage3_param_persistence_threshold": 0})),
                    (SHAPE, in_files),
                ] {
                    let case = format!("world {world}, {shape:?}, {more}, {keys}");
                    assert_same(&reference, &run(world, shape, &keys), &case);
                }
            }
        }
    }
}

#[test]
fn owners_keep_exact_weights_and_below_stage_3_the_key_has_no_effect() {
    let keys = || json!({"zero_quantized_weights": true});
    let start = |stage, zero| train(2, SHAPE, &config(stage, 1, zero, json!({})), 0).remove(0);
    let (exact, quantized) = (start(0, json!({})), start(3, keys()));
    assert!(exact.exported == quantized.exported, "gathering changed nothing");
    for stage in 0..3 {
        let exact = train(2, SHAPE, &config(stage, 1, json!({}), json!({})), STEPS);
        let with_key = train(2, SHAPE, &config(stage, 1, keys(), json!({})), STEPS);
        assert_same(&exact, &with_key, &format!("stage {stage}"));
    }
}

#[test]
fn compression_between_hosts_only_gives_the_exact_runs_bits_on_one_host() {
    let both = json!({"zero_quantized_weights": true, "zero_quantized_gradients": true});
    for (mut zero, more) in [
        (both.clone(), json!({})),
        (both, json!({"bf16": {"enabled": true}})),
        (json!({}), json!({"communication_data_type": "bf16"})),
        (json!({}), json!({"communication_data_type": "fp16"})),
    ] {
        let mut exact_more = more.clone();
        exact_more.as_object_mut().unwrap().remove("communication_data_type");
        zero["compress_between_hosts_only"] = true.into();
        for (stage, groups) in [(0, None), (1, None), (2, None), (3, None), (3, Some(1)), (3, Some(2))] {
            let mut base = json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0});
            if let Some(groups) = groups {
                base["mics_shard_size"] = groups.into();
            }
            let exact = train(4, SHAPE, &config(stage, 2, base.clone(), exact_more.clone()), STEPS);
            zero.as_object().unwrap().iter().for_each(|(key, value)| base[key] = value.clone());
            let run = train(4, SHAPE, &config(stage, 2, base, more.clone()), STEPS);
            assert_same(&exact, &run, &format!("stage {stage}, groups of {groups:?}, {zero}, {more}"));
        }
    }
}

#[test]
fn on_one_rank_nothing_travels_and_nothing_is_rounded() {
    let keys = json!({"zero_quantized_weights": true, "zero_quantized_gradients": true});
    let exact = train(1, SHAPE, &config(3, 1, json!({}), json!({})), STEPS);
    assert_same(&exact, &train(1, SHAPE, &config(3, 1, keys, json!({})), STEPS), "world 1");
}

#[test]
fn an_overflow_on_one_rank_is_seen_through_quantized_gradients() {
    let zero = json!({"zero_quantized_gradients": true, "zero_quantized_weights": true});
    let more = json!({"fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1}});
    for stage in 0..4 {
        let config = config(stage, 1, zero.clone(), more.clone());
        for bad_rank in 0..2 {
            let results = threads::run(2, |comm| {
                let rank = comm.rank();
                let builder = Engine::builder().communicator(comm);
                let mut engine = builder.initialize(|vb| candle_nn::linear(40, 3, vb), config.clone())?;
                let mut step = |overflows: bool| {
                    let x = if overflows { f32::INFINITY } else { 0.5 };
                    let x = Tensor::full(x, (2, 40), &Device::Cpu)?.to_dtype(DType::F16)?;
                    let loss =
                        engine.forward(|m| candle_nn::Module::forward(m, &x)?.to_dtype(DType::F32)?.mean_all())?;
                    engine.backward(&loss)?;
                    engine.step()?;
                    Ok::<_, candle_zero::Error>((engine.was_step_applied(), engine.loss_scale()))
                };
                Ok([step(false)?, step(rank == bad_rank)?, step(false)?])
            });
            for rank in results.unwrap() {
                assert_eq!(rank.unwrap(), [(true, 16.0), (false, 8.0), (true, 8.0)], "stage {stage}");
            }
        }
    }
}

// ---- a nano GPT ------------------------------------------------------------------------------------------------

/// The number of samples in a step, over all ranks.
const NANO_BATCH: usize = 8;

/// Returns every step's mean loss over the ranks, and rank 0's communication reports after the first step and after
/// the last. The model is trained on candle-zero's sources.
fn train_nano(world: usize, config: &Value, steps: usize) -> (Vec<f64>, [CommReport; 2]) {
    let model = GptConfig::preset("nano").unwrap();
    let results = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Gpt::new(&model, vb), config.clone())?;
        let shape = BatchPartition::new(&engine.config().batch, world, rank);
        let (data, order) = (TokenData::embedded(), SampleOrder::Shuffled { seed: 1 });
        let loader = Loader::new(data, order, shape, model.ctx, model.vocab, &Device::Cpu)?;
        let (mut losses, mut reports) = (vec![], vec![]);
        for (step, batch) in loader.take(steps).enumerate() {
            let batch = batch?;
            let loss = engine.forward(|gpt| gpt.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            let all = engine.gather_f64(&[f64::from(loss.to_scalar::<f32>()?)])?;
            losses.push(all.iter().map(|l| l[0]).sum::<f64>() / world as f64);
            if step == 0 || step + 1 == steps {
                reports.push(engine.comm_report());
            }
        }
        Ok((losses, reports))
    });
    let (losses, reports) = results.unwrap().remove(0).unwrap();
    (losses, reports.try_into().unwrap())
}

/// Returns a configuration of stage 3 in which weights are gathered for the forward pass and again for the backward
/// pass, as for a model that does not fit into memory.
fn nano_config(world: usize, [weights, gradients]: [bool; 2], more: Value) -> Value {
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "zero_quantized_weights": weights, "zero_quantized_gradients": gradients,
    });
    let mut config = config(3, 1, zero, more);
    config["train_micro_batch_size_per_gpu"] = (NANO_BATCH / world).into();
    config["optimizer"]["params"]["lr"] = json!(1e-3);
    config["scheduler"]["params"] = json!({"warmup_max_lr": 1e-3, "warmup_num_steps": 20});
    config["gradient_clipping"] = json!(1.0);
    config
}

/// Returns the bytes of one kind of collective per step: as sent, and as they would be without compression.
fn bytes_per_step([first, last]: &[CommReport; 2], steps: usize, kind: CollectiveKind) -> (f64, f64) {
    let per_step = |bytes: fn(CollectiveKindReport) -> u64| {
        (bytes(last.kind(kind)) - bytes(first.kind(kind))) as f64 / (steps - 1) as f64
    };
    (per_step(|k| k.wire_bytes), per_step(|k| k.exact_bytes))
}

#[test]
fn int8_weights_and_int4_gradients_are_more_than_4_times_fewer_bytes() {
    const STEPS: usize = 3;
    let run = |quantized| train_nano(2, &nano_config(2, quantized, json!({})), STEPS).1;
    let (exact, both) = (run([false; 2]), run([true; 2]));
    let mut total = (0.0, 0.0);
    for (kind, min_ratio) in [(CollectiveKind::AllGather, 3.8), (CollectiveKind::ReduceScatter, 7.3)] {
        let (bytes, would_be) = bytes_per_step(&both, STEPS, kind);
        let (uncompressed, same) = bytes_per_step(&exact, STEPS, kind);
        assert_eq!(uncompressed, same);
        // The bytes that would be sent without compression are those that a run without the keys sends, except for
        // padding to complete blocks.
        assert!((would_be / uncompressed - 1.0).abs() < 0.01, "{kind:?}: {would_be}, {uncompressed}");
        println!("{kind:?}: {uncompressed} bytes a step, compressed {bytes}: {:.2} times fewer", uncompressed / bytes);
        assert!(uncompressed / bytes > min_ratio, "{kind:?}: {uncompressed} / {bytes}");
        total = (total.0 + uncompressed, total.1 + bytes);
    }
    println!("in total {:.2} times fewer", total.0 / total.1);
    assert!(total.0 / total.1 > 4.0);
    // With gradients in 16 bits, half as many bytes are sent.
    let bf16 = train_nano(2, &nano_config(2, [false; 2], json!({"communication_data_type": "bf16"})), STEPS).1;
    let gradients = |reports| bytes_per_step(reports, STEPS, CollectiveKind::ReduceScatter).0;
    assert_eq!(gradients(&exact), 2.0 * gradients(&bf16));
}

/// The name of a run, its number of ranks, whether weights and gradients are quantized, and further keys of its
/// configuration.
type CompressedRun = (&'static str, usize, [bool; 2], Value);

/// Prints the table in docs/compression.md:
/// `cargo test --release --test comm compression:: -- --ignored --nocapture`
#[test]
#[ignore = "7 runs of 300 steps, for .ci/long"]
fn training_300_steps_ends_within_a_percent_of_the_exact_loss() {
    let bf16 = || json!({"communication_data_type": "bf16"});
    check_300_steps(&[
        ("exact f32", 2, [false, false], json!({})),
        ("bf16 gradients", 2, [false, false], bf16()),
        ("int8 weights", 2, [true, false], json!({})),
        ("int4 gradients", 2, [false, true], json!({})),
        ("both", 2, [true, true], json!({})),
        ("exact f32, 4 ranks", 4, [false, false], json!({})),
        ("both, 4 ranks", 4, [true, true], json!({})),
    ]);
}

#[test]
#[ignore = "2 runs of 300 steps, for .ci/run"]
fn training_300_steps_with_both_kinds_of_compression_ends_within_a_percent_of_the_exact_loss() {
    check_300_steps(&[("exact f32", 2, [false, false], json!({})), ("both", 2, [true, true], json!({}))]);
}

/// Compares each run with the exact one, which is the first run with the same number of ranks.
fn check_300_steps(runs: &[CompressedRun]) {
    const STEPS: usize = 300;
    let run = |(_, world, quantized, more): &CompressedRun| {
        train_nano(*world, &nano_config(*world, *quantized, more.clone()), STEPS)
    };
    let results: Vec<_> = runs.iter().map(run).collect();
    // Means of 20 steps are compared, because single batches differ by more than the runs do.
    let mean = |losses: &[f64], to: usize| losses[to - 20..to].iter().sum::<f64>() / 20.0;
    println!("| steps | {} |", runs.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(" | "));
    println!("|{}", "---|".repeat(runs.len() + 1));
    for to in [20, 60, 100, 150, 200, 250, 300] {
        let row: Vec<String> = results.iter().map(|(losses, _)| format!("{:.4}", mean(losses, to))).collect();
        println!("| {} to {to} | {} |", to - 19, row.join(" | "));
    }
    let bytes = |(_, reports): &(_, [CommReport; 2])| -> f64 {
        [CollectiveKind::AllGather, CollectiveKind::ReduceScatter]
            .map(|kind| bytes_per_step(reports, STEPS, kind).0)
            .iter()
            .sum()
    };
    let row: Vec<String> = results.iter().map(|r| format!("{:.0}", bytes(r))).collect();
    println!("| bytes a step | {} |", row.join(" | "));
    let mut deviations = vec![];
    for ((_, world, ..), result) in runs.iter().zip(&results) {
        let exact = &results[runs.iter().position(|(_, other, ..)| other == world).unwrap()];
        deviations.push(mean(&result.0, STEPS) / mean(&exact.0, STEPS) - 1.0);
    }
    let row: Vec<String> = deviations.iter().map(|deviation| format!("{:+.2} %", deviation * 100.0)).collect();
    println!("| last 20 losses | {} |", row.join(" | "));
    assert!(mean(&results[0].0, STEPS) < 0.6 * results[0].0[0], "the model learns");
    assert!(deviations.iter().all(|deviation| deviation.abs() < 0.01), "{deviations:?}");
}
