//! LARS, Adafactor and AdamWScheduleFree, compared with values that scripts/record_optimizers.py recorded from an
//! implementation of the LARS paper, from transformers and from schedulefree, respectively.

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::optim::ParameterGroup;
use serde_json::{Value, json};

/// The names of the parameters, in the order of the fixture's numbers.
const NAMES: [&str; 3] = ["w", "b", "t"];

fn recorded() -> Value {
    serde_json::from_str(include_str!("../fixtures/recorded_optimizers.json")).unwrap()
}

fn shape(recorded: &Value, name: &str) -> Vec<usize> {
    serde_json::from_value(recorded["shapes"][name].clone()).unwrap()
}

/// Returns the initial value of element `i` of tensor `k`.
fn initial(k: i64, i: i64) -> f32 {
    (2 * ((2741 * (i + 1) + 877 * (k + 1) + 13 * i * i) % 2001) - 2001) as f32 / 16384.0
}

/// Returns the gradient of element `i` of tensor `k` in step `s`.
fn gradient(s: i64, k: i64, i: i64) -> f32 {
    let numerator = 2 * ((1103 * (i + 1) + 389 * s * (i + 3) + 617 * (k + 1) * s + 71 * i * i) % 1001) - 1001;
    numerator as f32 / 4096.0 * 2.0f32.powi(-3 * (i % 4) as i32)
}

fn tensor(value: impl Fn(i64) -> f32, shape: &[usize]) -> candle_core::Result<Tensor> {
    let count = shape.iter().product::<usize>() as i64;
    Tensor::from_iter((0..count).map(value), &Device::Cpu)?.reshape(shape)
}

/// Returns the parameter groups of a case: one for its vectors. The other parameters use the optimizer's own settings.
fn groups(of_vectors: &Value) -> Vec<ParameterGroup> {
    let mut group = ParameterGroup::new().dims(0..=1);
    for (key, value) in of_vectors.as_object().unwrap() {
        group = match key.as_str() {
            "lr" => group.lr(value.as_f64().unwrap()),
            "weight_decay" => group.weight_decay(value.as_f64().unwrap()),
            "trust_ratio" => group.trust_ratio(value.as_bool().unwrap()),
            key => panic!("a group has no setting {key}"),
        };
    }
    vec![group]
}

fn assert_near(found: &[f32], expected: &Value, context: &str) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(*found) - expected).abs();
        assert!(difference <= 1e-6 * expected.abs().max(1.0), "{context}, element {i}: {found} and {expected}");
    }
}

/// Trains as a case of the fixture does, and compares the weights after each recorded step.
fn check_case(recorded: &Value, case: &Value, world: usize, stage: u8) {
    let context = format!("{} {}, stage {stage}, world {world}", case["type"], case["params"]);
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_check": false, "gradient_clipping": 0,
        "zero_allow_untested_optimizer": true,
        "optimizer": {"type": case["type"], "params": case["params"]},
        "zero_optimization": {"stage": stage, "sub_group_size": 16, "stage3_param_persistence_threshold": 0},
    });
    let ranks = threads::run(world, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let build = |vb: VarBuilder<'_>| NAMES.map(|name| vb.get(shape(recorded, name), name)).into_iter().collect();
        let mut engine: Engine<Vec<Tensor>> =
            builder.parameter_groups(groups(&case["of_vectors"])).initialize(build, config.clone())?;
        for (k, name) in NAMES.iter().enumerate() {
            let values = tensor(|i| initial(k as i64, i), &shape(recorded, name))?;
            engine.safe_set_full_fp32_param(name, &values)?;
        }
        let steps = case["steps"].as_object().unwrap();
        let last: i64 = steps.keys().map(|step| step.parse().unwrap()).max().unwrap();
        for step in 1..=last + 1 {
            let mut trained = Vec::new();
            // The gradient of this loss is the required one.
            let loss = engine.forward(|params| {
                trained = params
                    .iter()
                    .map(|p| p.flatten_all()?.to_vec1())
                    .collect::<candle_core::Result<Vec<Vec<f32>>>>()?;
                let terms = NAMES.iter().enumerate().zip(params).map(|((k, name), p)| {
                    (p * tensor(|i| gradient(step, k as i64, i), &shape(recorded, name))?)?.sum_all()
                });
                Tensor::stack(&terms.collect::<candle_core::Result<Vec<_>>>()?, 0)?.sum_all()
            })?;
            if let Some(expected) = steps.get(&(step - 1).to_string()) {
                for (name, values) in NAMES.iter().zip(&trained) {
                    assert_near(values, &expected["trained"][name], &format!("{context}, step {}, {name}", step - 1));
                }
            }
            if step > last {
                break;
            }
            engine.backward(&loss)?;
            engine.step()?;
            if let Some(expected) = steps.get(&step.to_string()).and_then(|step| step.get("averaged")) {
                for (k, name) in NAMES.iter().enumerate() {
                    let average = engine.eval(|params| params[k].flatten_all())?.to_vec1::<f32>()?;
                    assert_near(&average, &expected[name], &format!("{context}, average of step {step}, {name}"));
                    let full = engine.safe_get_full_fp32_param(name)?.flatten_all()?.to_vec1::<f32>()?;
                    assert_eq!(full, average, "{context}: the average is what is exported");
                }
            }
        }
        Ok::<_, candle_zero::Error>(())
    });
    ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
}

#[test]
fn weights_follow_the_reference_to_a_millionth_over_20_steps_with_groups() {
    let recorded = recorded();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        for (world, stage) in [(1, 0), (2, 1), (2, 2)] {
            check_case(&recorded, case, world, stage);
        }
    }
}

#[test]
fn second_moments_of_matrices_are_sums_over_rows_and_columns_that_every_rank_has() {
    let recorded = recorded();
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "Adafactor"},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": 2},
    });
    let ranks = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let build = |vb: VarBuilder<'_>| NAMES.map(|name| vb.get(shape(&recorded, name), name)).into_iter().collect();
        let mut engine: Engine<Vec<Tensor>> = builder.initialize(build, config.clone())?;
        let loss = engine.forward(|params| {
            let terms = params.iter().map(|p| p.affine(1.0, 1.0)?.sqr()?.sum_all());
            Tensor::stack(&terms.collect::<candle_core::Result<Vec<_>>>()?, 0)?.sum_all()
        })?;
        engine.backward(&loss)?;
        let grad = engine.safe_get_full_grad("t")?.unwrap();
        engine.step()?;
        let mut states = Vec::new();
        for (key, dim) in [("exp_avg_sq_row", 2), ("exp_avg_sq_col", 1)] {
            let found = engine.safe_get_full_optimizer_state("t", key)?.to_vec1::<f32>()?;
            // The decay rate of the first step is 0.
            let expected = grad.sqr()?.mean(dim)?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(found.len(), expected.len());
            let difference = found.iter().zip(&expected).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f32::max);
            assert!(difference < 1e-6, "{key}: {found:?} {expected:?}");
            states.push((found, engine.safe_get_local_optimizer_state("t", key)?.to_vec1::<f32>()?));
        }
        assert!(states.iter().all(|(full, local)| full == local));
        let refused = engine.safe_set_full_optimizer_state("t", &grad, "exp_avg_sq_row").unwrap_err();
        Ok::<_, candle_zero::Error>((states, refused.to_string()))
    });
    let ranks: Vec<_> = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    assert_eq!(ranks[0], ranks[1]);
    insta::assert_snapshot!(ranks[0].1, @"the optimizer state exp_avg_sq_row of parameter t is factored; it can be read but not set");
}
