//! A configuration, in JSON or Hjson.

use crate::scratch;
use candle_zero::Config;
use candle_zero::config::{RunValues, check, read_value};
use serde_json::Value;
use std::path::Path;

/// Tokens of Hjson, and keys and values of configurations.
pub(super) const WORDS: [&str; 38] = [
    "\n",
    "'''",
    "'",
    "#",
    "//",
    "/*",
    "*/",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "\r",
    "\t",
    "auto",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "WarmupLR",
    "OneCycle",
    "params",
    "betas",
    "fp16",
    "bf16",
    "enabled",
    "initial_scale_power",
    "loss_scale",
    "zero_optimization",
    "stage",
    "offload_optimizer",
    "nvme_path",
    "device",
    "aio",
    "gradient_clipping",
    "activation_checkpointing",
    "comms_logger",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
];

/// Reads a configuration.
///
/// # Panics
/// Panics if the values change when they are written as JSON and read again, or if the resolved configuration is not
/// accepted again or leads to a different one.
pub fn run(data: &[u8]) -> bool {
    let path = scratch::write("config.json", data);
    if let Ok(value) = read_value(&path) {
        for text in [serde_json::to_string(&value), serde_json::to_string_pretty(&value)] {
            let path = scratch::write("again.json", text.expect("JSON can be written").as_bytes());
            // Hjson within the limit of 4 MiB may exceed it when it is rewritten as JSON.
            match read_value(&path) {
                Ok(again) => assert_eq!(again, value),
                Err(error) => assert!(data.len() > 1 << 16, "{error}"),
            }
        }
    }
    let mut is_valid = false;
    for world_size in [1, 6] {
        let run = RunValues::default();
        if let Ok(config) = check(&path, data, world_size, &run).outcome {
            is_valid = true;
            let json: Value = config.to_deepspeed_json();
            let again = Config::load(json.clone(), world_size).unwrap_or_else(|error| panic!("{error}\n{json:#}"));
            assert_eq!(again.to_deepspeed_json(), json);
        }
    }
    is_valid
}

/// Returns the configurations in ds_configs, one that uses all features of Hjson, and one with many sections.
pub fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ds_configs");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let mut seeds: Vec<_> = paths.into_iter().map(|path| std::fs::read(path).expect("a readable file")).collect();
    seeds.push(HJSON.as_bytes().to_vec());
    seeds.push(SECTIONS.as_bytes().to_vec());
    seeds
}

const HJSON: &str = "# A comment
train_batch_size: 12, // another
'gradient_clipping': 1.5
/* a block */ optimizer: { type: AdamW, params: { lr: 1e-3 betas: [0.9, 0.999] eps: 1e-8 } }
scheduler: { type: WarmupDecayLR
  params: { total_num_steps: 100, warmup_num_steps: 10 } }
bf16: { enabled: true }
tensorboard: { enabled: false, output_path: a/b c, job_name: '''
  several
  lines
  ''' }
wall_clock_breakdown: false
";

const SECTIONS: &str = r#"{
 "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "steps_per_print": 10, "seed": 42,
 "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}},
 "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10}},
 "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
 "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_param_persistence_threshold": "auto",
  "sub_group_size": 1e9, "offload_optimizer": {"device": "cpu", "ratio": 0.5},
  "offload_param": {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 5}},
 "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
 "activation_checkpointing": {"partition_activations": false}, "comms_logger": {"enabled": true, "prof_ops": ["all_reduce"]},
 "csv_monitor": {"enabled": true, "output_path": "out", "job_name": "é\u00e9\ud83d\ude00"}, "gradient_allreduce_op": "sum",
 "checkpoint": {"tag_validation": "Warn", "use_node_local_storage": true, "writer": {"type": "FAST", "decoupled": true}}
}
"#;
