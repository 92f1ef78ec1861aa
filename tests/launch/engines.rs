//! Several engines in the processes of a job.

use crate::support::gan::Gan;
use crate::support::processes::{as_program, stderr, stdout, zerorun};
use candle_core::{Device, Tensor};
use candle_nn::{Module, linear};
use candle_zero::Engine;
use candle_zero::comm::threads;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn config(nvme: Option<&Path>) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    });
    if let Some(path) = nvme {
        config["zero_optimization"]["offload_optimizer"] = json!({"device": "nvme", "nvme_path": path});
    }
    config
}

/// Runs one step of an engine with one linear layer and returns the loss.
fn step(engine: &mut Engine<candle_nn::Linear>) -> candle_zero::Result<f32> {
    let x = Tensor::full((engine.rank() + 1) as f32, (2, 4), &Device::Cpu)?;
    let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.to_scalar::<f32>()?)
}

fn engine(seed: u64, config: Value) -> candle_zero::Result<Engine<candle_nn::Linear>> {
    Engine::builder().device(Device::Cpu).seed(seed).initialize(|vb| linear(4, 5, vb), config)
}

#[test]
#[ignore = "started on each rank by the tests below"]
fn as_a_rank() {
    let Ok(role) = std::env::var("LAUNCH_TEST_ROLE") else { return };
    let rank = std::env::var("RANK").unwrap();
    match role.as_str() {
        "one after the other" => {
            for seed in 0..3 {
                let mut engine = engine(seed, config(None)).unwrap();
                assert!(step(&mut engine).unwrap() > step(&mut engine).unwrap());
            }
        }
        "side by side" => {
            let folder = std::env::var("LAUNCH_TEST_FOLDER").unwrap();
            let config = config(Some(Path::new(&folder)));
            let mut student = engine(1, config.clone()).unwrap();
            let mut teacher = engine(2, config).unwrap();
            for _ in 0..3 {
                assert!(step(&mut student).unwrap() > step(&mut student).unwrap());
                assert!(step(&mut teacher).unwrap() > step(&mut teacher).unwrap());
            }
        }
        "one fails" => {
            let mut student = engine(1, config(None)).unwrap();
            let mut teacher = engine(2, config(None)).unwrap();
            let error = if rank == "1" {
                let nan = Tensor::full(f32::NAN, (2, 4), &Device::Cpu).unwrap();
                let loss = student.forward(|model| model.forward(&nan)?.sqr()?.mean_all()).unwrap();
                assert!(student.backward(&loss).unwrap_err().to_string().contains("NaN"));
                step(&mut teacher).unwrap_err()
            } else {
                step(&mut student).unwrap_err();
                step(&mut teacher).unwrap_err()
            };
            println!("the teacher of rank {rank}: {error}");
        }
        "GAN" => {
            let bits = Gan::new(2, None).and_then(|mut gan| gan.train(50)).unwrap();
            println!("bits of rank {rank}: {bits:?}");
        }
        role => panic!("{role}"),
    }
}

fn two_ranks(role: &str, folder: &Path) -> Output {
    let program = std::env::current_exe().unwrap();
    let mut command = zerorun();
    command.args(["-n", "2", "--timeout", "60s"]).arg(program).args(as_program(module_path!(), "as_a_rank"));
    command.env("LAUNCH_TEST_ROLE", role).env("LAUNCH_TEST_FOLDER", folder).output().unwrap()
}

fn successful_output(role: &str) -> String {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = two_ranks(role, folder.path());
    assert_eq!(output.status.code(), Some(0), "{role}: {}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

#[test]
fn an_engine_is_dropped_and_another_made() {
    successful_output("one after the other");
}

#[test]
fn two_engines_train_side_by_side_and_share_a_folder_of_offloaded_state() {
    successful_output("side by side");
}

#[test]
fn the_error_of_one_engine_reaches_the_other_engines_of_all_ranks_in_words() {
    let output = successful_output("one fails");
    for rank in 0..2 {
        let prefix = format!("the teacher of rank {rank}: ");
        let line = output.lines().find_map(|line| line.split_once(&prefix)).unwrap_or_else(|| panic!("{output}")).1;
        assert!(line.contains("the loss is NaN on rank 1"), "{line}");
    }
}

#[test]
fn a_gan_of_two_engines_trains_with_the_same_bits_as_processes_and_as_threads() {
    let output = successful_output("GAN");
    let threads = threads::run(2, |comm| Gan::new(2, Some(comm))?.train(50)).unwrap();
    for (rank, bits) in threads.into_iter().enumerate() {
        let prefix = format!("bits of rank {rank}: ");
        let line = output.lines().find_map(|line| line.split_once(&prefix)).unwrap().1;
        assert!(line == format!("{:?}", bits.unwrap()), "rank {rank}");
    }
}
