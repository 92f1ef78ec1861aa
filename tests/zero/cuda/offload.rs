//! What is offloaded beside a GPU: where it lies, and what is copied while something else goes on.

use super::{backward, gpu_answers, offloaded, zero};
use crate::support::device::gpu;
use crate::support::tiny::{Outcome, Shape, Tiny, config, train_on};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::memory::{Kind, MemoryRow};
use serde_json::{Value, json};

fn shape() -> Shape {
    Shape { layers: 2, units: true, ..Shape::default() }
}

fn same_bits(a: &[Outcome], b: &[Outcome], what: &str) {
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.losses, b.losses, "{what}");
        assert_eq!(a.norms, b.norms, "{what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

#[test]
fn windows_are_page_locked_where_pin_memory_says_so_and_change_no_bit() {
    if !gpu_answers(windows_are_page_locked_where_pin_memory_says_so_and_change_no_bit) {
        return;
    }
    let run = |optimizer: bool, param: bool| {
        let mut zero = offloaded(3);
        zero["offload_optimizer"]["pin_memory"] = json!(optimizer);
        zero["offload_param"]["pin_memory"] = json!(param);
        train_on(gpu, 2, shape(), &config(3, 2, zero, json!({"bf16": {"enabled": true}})), 3)
    };
    let reference = run(true, true);
    // Two windows of 4 MiB: of gradients, and of shards. Updated weights stay on the host.
    let windows = 8 << 20;
    let locked = |run: &[Outcome]| {
        let MemoryRow { pinned, host, .. } = run[0].memory.row(Kind::Staging);
        (pinned.held / windows, host.held / windows)
    };
    assert_eq!(locked(&reference), (2, 0));
    for (optimizer, param, expected) in [(true, false, (1, 1)), (false, true, (1, 1)), (false, false, (0, 2))] {
        let other = run(optimizer, param);
        assert_eq!(locked(&other), expected, "pin_memory {optimizer}, {param}");
        same_bits(&reference, &other, &format!("pin_memory {optimizer}, {param}"));
    }
}

#[test]
fn shards_of_weights_stay_on_the_gpu_where_only_the_optimizer_is_offloaded() {
    if !gpu_answers(shards_of_weights_stay_on_the_gpu_where_only_the_optimizer_is_offloaded) {
        return;
    }
    for format in [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true}})] {
        let run = |zero: Value| train_on(gpu, 2, shape(), &config(3, 1, zero, format.clone()), 3);
        let reference = run(zero());
        let mut optimizer = zero();
        optimizer["offload_optimizer"] = json!({"device": "cpu"});
        let other = run(optimizer);
        same_bits(&reference, &other, &format.to_string());
        let row = |kind| other[0].memory.row(kind);
        let weights = row(Kind::Parameters);
        assert_eq!((weights.device.held as f64, weights.host.held), (weights.formula.unwrap() + weights.padding, 0));
        assert_eq!((row(Kind::Moments).device.held, row(Kind::MasterWeights).device.held), (0, 0));
        assert_eq!(row(Kind::Gradients).device.peak, 0, "gradients are kept on the host");
    }
}

#[test]
fn gradients_leave_while_backward_runs_and_weights_come_back_while_the_next_are_updated() {
    if !gpu_answers(gradients_leave_while_backward_runs_and_weights_come_back_while_the_next_are_updated) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let mut config = config(2, 1, offloaded(2), json!({"bf16": {"enabled": true}}));
    config["zero_optimization"]["reduce_bucket_size"] = json!(100);
    threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(gpu(0)?).timeline(&trace);
        let mut engine = builder.initialize(|vb| Tiny::new(shape(), vb), config.clone())?;
        for _ in 0..2 {
            backward(&mut engine, 1)?;
            engine.step()?;
        }
        Ok(())
    })
    .unwrap()
    .into_iter()
    .collect::<Result<(), _>>()
    .unwrap();
    let events: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let times = |name: &str| -> Vec<(f64, f64)> {
        let all = events["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X" && e["name"].as_str().unwrap().starts_with(name));
        let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
        all.map(|event| (number(event, "ts"), number(event, "ts") + number(event, "dur"))).collect()
    };
    // Copies that have begun before what they run beside has ended.
    let beside = |copy: &str, work: &str| {
        let work = times(work);
        times(copy).iter().filter(|copy| work.iter().any(|work| work.0 < copy.0 && copy.0 < work.1)).count()
    };
    assert!(beside("to the host", "backward") > 0, "{events}");
    assert!(beside("to the GPU", "sub-group") > 0, "{events}");
}
