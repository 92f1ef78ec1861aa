//! `zerorun estimate`: what a run needs, before it starts.

use crate::support::processes::{repository, stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Output;

fn estimate(args: &[&str]) -> Output {
    zerorun().arg("estimate").args(args).output().unwrap()
}

/// Writes a configuration to a folder, which is removed when the returned `TempDir` is dropped.
fn config_of(config: &Value) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("ds_config.json");
    std::fs::write(&file, config.to_string()).unwrap();
    (folder, file)
}

/// Writes a configuration with `zero` as its section `zero_optimization` to a folder, like [`config_of`].
fn config(zero: &Value) -> (tempfile::TempDir, PathBuf) {
    config_of(&json!({
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
    }))
}

#[test]
fn a_model_is_estimated_in_words_and_as_json() {
    let (_folder, file) = config(&json!({"stage": 2}));
    let args = ["--model", "gpt2", "--ds_config", file.to_str().unwrap(), "-n", "2"];
    let output = estimate(&args);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for line in [
        "gpt2: 124439808 parameters, 12 units; stage 2 on 2 ranks",
        "parameters                     237.4 MiB       237.4 MiB",
        "gradients                              -       118.7 MiB",
        "master weights                 237.4 MiB       237.4 MiB",
        "moments                        474.7 MiB       474.7 MiB",
        "the paper's formula              1.0 GiB",
        "not included:\n- activations",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("on this machine, 2 ranks need at most "), "{text}");

    let output = estimate(&[&args[..], &["--json", "--deepspeed", "--gpu"]].concat());
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&all["model"], &all["units"]), (&json!("gpt2"), &json!(12)));
    assert_eq!(all["memory"]["parameters"], 124_439_808);
    assert_eq!(all["memory"]["rows"][0]["device"]["held"], 2 * 124_439_808);
    // States are on the model's device unless they are offloaded.
    assert_eq!(all["memory"]["rows"][3]["device"]["held"], 8 * 124_439_808 / 2);
    assert_eq!(all["deepspeed"]["stage 2, optimizer offloaded"]["gpu_bytes"], 2 * 124_439_808);
    assert_eq!(all["totals"]["file"], 0);
    // 2 Psi (N - 1) / N elements of two bytes.
    let wire = |kind: &str| all["step"]["collectives"][kind]["wire_bytes"].as_u64().unwrap();
    assert_eq!(wire("reduce_scatter") + wire("all_gather"), 2 * 124_439_808);
}

#[test]
fn model_state_is_compared_with_a_named_gpu() {
    let (_folder, file) = config(&json!({"stage": 2, "offload_optimizer": {"device": "cpu"}}));
    let args = ["--model", "llama-2-7b", "--ds_config", file.to_str().unwrap(), "-n", "2", "--gpu"];
    let text = stdout(&estimate(&[&args[..], &["rtx4090"]].concat()));
    let verdict =
        "of the 24.0 GiB of each GPU (rtx4090), model state takes at most 13.0 GiB: it fits, and 10.9 GiB is left";
    assert!(text.contains(verdict), "{text}");
    let output = estimate(&[&args[..], &["8GiB", "--json"]].concat());
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(all["gpu"], json!({"name": "8GiB", "bytes": 8u64 << 30, "fits": false}));
    let output = estimate(&[&args[..], &["h101"]].concat());
    assert!(!output.status.success() && stderr(&output).contains("known GPUs are t4, "), "{}", stderr(&output));
}

#[test]
fn auto_is_what_the_engine_takes_it_as_and_that_is_said() {
    let (_folder, file) = config(&json!({"stage": 2, "reduce_bucket_size": "auto"}));
    let file = file.to_str().unwrap();
    let args = ["--model", "gpt2", "--ds_config", file, "-n", "2"];
    let text = stdout(&estimate(&args));
    let message = |width: u64| format!("- zero_optimization.reduce_bucket_size: \"auto\": taken as {}", width * width);
    assert!(text.contains(&message(768)), "{text}");
    let output = estimate(&[&args[..], &["--n_embd", "96", "--json"]].concat());
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(all["said"][0]["path"], "zero_optimization.reduce_bucket_size");
    assert!(message(96).ends_with(all["said"][0]["message"].as_str().unwrap()), "{all}");
}

#[test]
fn what_no_machine_has_is_said_to_be_missing() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_folder, file) =
        config(&json!({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder.path()}}));
    let file = file.to_str().unwrap();
    let large =
        ["--model", "llama-2-7b", "--n_layer", "8000", "--n_embd", "16384", "--n_head", "128", "--n_kv_head", "8"];
    let output = estimate(&[&large[..], &["--ds_config", file]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(text.matches("that is too little: ").count(), 2, "{text}");
    let output = estimate(&[&large[..], &["--ds_config", file, "--json"]].concat());
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(all["machine"]["fits"], false);
    assert!(all["machine"]["files_needed"].as_u64() > all["machine"]["files_available"].as_u64());
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "an estimate leaves nothing behind");
}

#[test]
fn frozen_parameters_are_named_by_patterns_and_packed() {
    let (_folder, file) = config(&json!({"stage": 3, "stage3_param_persistence_threshold": 0}));
    let file = file.to_str().unwrap();
    let run = |args: &[&str]| {
        let all = [&["--model", "gpt2", "--ds_config", file, "--frozen", "h.*", "--frozen", "w*"], args].concat();
        stdout(&estimate(&all))
    };
    let held = |args: &[&str], kind: usize| {
        let all: Value = serde_json::from_str(&run(&[args, &["--json"]].concat())).unwrap();
        assert_eq!(all["trained"], 1536);
        all["memory"]["rows"][kind]["host"]["held"].as_u64().unwrap()
    };
    let (parameters, moments) = (0, 3);
    let plain = held(&[], parameters);
    let packed = held(&["--frozen_packing", "nf4-double"], parameters);
    assert!(plain == 2 * 124_439_808 && packed < plain * 27 / 100, "{plain} {packed}");
    assert!(held(&[], moments) <= 8 * 1600);
    assert!(run(&[]).starts_with("gpt2: 124439808 parameters (1536 of them trained), 12 units; stage 3"));
}

#[test]
fn the_papers_table_is_printed() {
    let text = stdout(&estimate(&["--table"]));
    insta::assert_snapshot!(text.trim_end(), @"
    Gigabytes of model state per device, mixed precision with Adam (arXiv 1910.02054, table 1)

       DP     7.5B Pos   7.5B Pos+g 7.5B Pos+g+p     128B Pos   128B Pos+g 128B Pos+g+p       1T Pos     1T Pos+g   1T Pos+g+p
        1          120          120          120         2048         2048         2048        16000        16000        16000
        4         52.5         41.3           30          896          704          512         7000         5500         4000
       16         35.6         21.6          7.5          608          368          128         4750         2875         1000
       64         31.4         16.6         1.88          536          284           32         4187         2218          250
      256         30.4         15.4         0.47          518          263            8         4046         2054         62.5
     1024         30.1         15.1         0.12          513          257            2         4011         2013         15.6
    ");
    let cells: Value = serde_json::from_str(&stdout(&estimate(&["--table", "--json"]))).unwrap();
    assert_eq!(cells.as_array().unwrap().len(), 54);
    assert_eq!(
        cells[11],
        json!({"model": "7.5B", "ranks": 64, "stage": "Pos+g+p", "bytes": 1_875_000_000.0, "printed_gb": "1.88"})
    );
}

#[test]
fn hosts_add_their_bytes_a_step_and_a_table() {
    let (_folder, file) = config(&json!({"stage": 2, "overlap_comm": true, "reduce_bucket_size": 500_000}));
    let args = ["--model", "nano", "--ds_config", file.to_str().unwrap(), "-n", "8", "--hosts", "2"];
    let run = |more: &[&str]| {
        let output = estimate(&[&args[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    let text = run(&["--network", "1Gbit,1ms", "--step", "0.1"]);
    let (start, end) = (text.find("2 hosts of").unwrap(), text.find("on this machine, 4 ranks").unwrap());
    insta::assert_snapshot!(text[start..end].trim_end(), @"
    2 hosts of 4 ranks           collectives     into a host   out of a host
    reduce_scatter                         9         3.2 MiB         3.2 MiB
    all_gather                             9       822.8 KiB       822.8 KiB
    control                                1            96 B            96 B
    sum                                   19         4.0 MiB         4.0 MiB

    messages between hosts take 73.2 ms of a step
    a step takes 139.7 ms: 100.0 ms as on one host, and 39.7 ms waiting for others

    hosts                ranks              step        efficiency       into a host   memory per rank
    1                        4          100.0 ms           100.0 %                 -           5.2 MiB
    2                        8          139.7 ms            71.6 %           4.0 MiB           3.7 MiB
    4                       16          149.1 ms            67.1 %           5.6 MiB           3.0 MiB
    8                       32          158.6 ms            63.0 %           6.2 MiB           2.7 MiB
    16                      64          172.7 ms            57.9 %           6.5 MiB           2.5 MiB
    32                     128          198.3 ms            50.4 %           6.7 MiB           2.4 MiB
    64                     256          248.5 ms            40.2 %           6.8 MiB           2.4 MiB
    128                    512          348.1 ms            28.7 %           6.9 MiB           2.4 MiB
    256                   1024          547.4 ms            18.3 %           7.0 MiB           2.4 MiB
    ");
    assert!(text.contains("latency of 1Gbit,1ms in both directions at the same time: 119.6 MB of data"), "{text}");

    let text = run(&[]);
    assert!(text.contains("give --step SECONDS or --measured FILE.jsonl, measured on one host, to predict"), "{text}");
    assert!(
        text.contains("latency of 10Gbit,50us in both directions at the same time, the default of --network"),
        "{text}"
    );

    // The metrics of a run on two ranks, in which each step except the first takes 100 ms.
    let metrics = file.with_file_name("metrics.jsonl");
    let step = |n: u64| json!({"step": n, "forward_ms": if n == 0 { 900.0 } else { 30.0 }, "backward_ms": 60.0, "step_ms": 10.0});
    let lines = (0..9).map(step).chain([json!({"summary": true, "world_size": 2})]);
    std::fs::write(&metrics, lines.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let text = run(&["--measured", metrics.to_str().unwrap(), "--json"]);
    let all: Value = serde_json::from_str(&text).unwrap();
    let hosts = &all["across_hosts"];
    assert_eq!((&hosts["hosts"], &hosts["ranks_of_each"]), (&json!(2), &json!(4)));
    assert_eq!(hosts["network"]["text"], "10Gbit,50us");
    assert_eq!(hosts["weak_scaling"].as_array().unwrap().len(), 9);
    assert_eq!(hosts["weak_scaling"][1]["step_s"], hosts["forecast"]["step_s"]);
    assert_eq!(hosts["forecast"]["between"]["control"], json!({"calls": 1, "bytes_in": 96, "bytes_out": 96}));
    let [one_host, step] = [&hosts["measured_s"], &hosts["forecast"]["step_s"]].map(|s| s.as_f64().unwrap());
    assert!((one_host - 0.1).abs() < 1e-9 && step > one_host && step < 0.12, "{one_host} {step}");
    let assumed = all["assumed"].to_string();
    assert!(
        assumed.contains("the medians of 6 measured steps") && assumed.contains("as the measured steps on 2"),
        "{assumed}"
    );
}

#[test]
fn what_is_wrong_ends_with_code_2_and_its_name() {
    let (_folder, file) = config(&json!({"stage": 2}));
    let file = file.to_str().unwrap();
    for (args, words) in [
        (vec![], "required"),
        (vec!["--model", "gpt3", "--ds_config", file], "gpt2"),
        (vec!["--model", "gpt2"], "--ds_config"),
        (vec!["--model", "gpt2", "--table"], "cannot be used with"),
        (vec!["--model", "gpt2", "--ds_config", "/no/such.json"], "/no/such.json"),
        (vec!["--model", "gpt2", "--n_head", "7", "--ds_config", file], "n_embd"),
        (vec!["--model", "gpt2", "--n_inner", "7", "--ds_config", file], "n_inner"),
        (vec!["--model", "gpt2", "--vocab", "99999999999", "--ds_config", file], "--vocab"),
        (vec!["--model", "nano", "--frozen", "layers.*", "--ds_config", file], "layers.*"),
        (vec!["--model", "nano", "--frozen", "*", "--ds_config", file], "nothing to train"),
        (vec!["--model", "nano", "--frozen_packing", "nf4", "--ds_config", file], "--frozen"),
        (vec!["--model", "nano", "--frozen", "h.*", "--frozen_packing", "fp4", "--ds_config", file], "nf4-double"),
        (vec!["--model", "nano", "--ds_config", file, "-n", "3", "--hosts", "2"], "a multiple of 2"),
        (vec!["--model", "nano", "--ds_config", file, "-n", "2", "--hosts", "0"], "0 is not in"),
        (vec!["--model", "nano", "--ds_config", file, "--network", "1Gbit,1ms"], "--hosts"),
        (vec!["--model", "nano", "--ds_config", file, "--hosts", "1", "--network", "1Gb/s,1ms"], "kbit, Mbit or Gbit"),
        (vec!["--model", "nano", "--ds_config", file, "--hosts", "1", "--network", "1Gbit,1m"], "us, ms or s"),
        (vec!["--model", "nano", "--ds_config", file, "--hosts", "1", "--step", "0"], "more than 0 s"),
        (
            vec!["--model", "nano", "--ds_config", file, "--hosts", "1", "--measured", "/no/such.jsonl"],
            "/no/such.jsonl",
        ),
        (vec!["--model", "nano", "--ds_config", file, "--hosts", "1", "--measured", file], "train_gpt's --metrics"),
        (vec!["--safetensors", file, "--ds_config", file], "weight_map"),
        (vec!["--safetensors", "/no/such.safetensors", "--ds_config", file], "/no/such.safetensors"),
    ] {
        let output = estimate(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(words), "{words}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn a_pipeline_is_estimated_rank_by_rank() {
    let file = repository().join("ds_configs/pipeline.json");
    let args = ["--model", "llama-nano", "--ds_config", file.to_str().unwrap(), "--pipeline"];
    let output = estimate(&[&args[..], &["-n", "2", "--network", "1Gbit,300us", "--step", "2"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    insta::assert_snapshot!(stdout(&output), @"
    llama-nano: 758912 parameters, 7 layers; stage 1, 1 pipeline of 2 ranks, schedule 1f1b, accumulation 8

    rank        layers      parameters         trained            host   host, at most  micro batches held
    0              0-3          395776          363008         4.3 MiB         8.4 MiB                   2
    1              4-6          395904          395904         4.5 MiB         9.1 MiB                   1

    per micro batch and boundary, 64.0 KiB crosses the network forward, and the same amount backward
    ranks wait for 14.1 % of a step; one message takes 0.8 ms (1Gbit,300us)
    a step takes 1.165 s, instead of 2.000 s on one rank

    not included:
    - the activations of the micro batches that a rank holds at a time (the last column of the table)
    - data on its way to the model, and a checkpoint while it is written
    - the program itself: its code, its threads, and memory that the allocator keeps
    assumed:
    - for the waiting time: a stage takes time in proportion to its parameters without embeddings, and forward passes, gradients of inputs and gradients of weights all take the same time
    ");
    let output = estimate(&[&args[..], &["-n", "4", "--frozen", "*.mlp.*", "--json"]].concat());
    let all: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let ranks = all["ranks"].as_array().unwrap();
    let sum = |key: &str| ranks.iter().map(|rank| rank[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!((ranks.len(), &all["step_s"]), (4, &Value::Null));
    // The first rank has a copy of the tied embedding.
    assert_eq!(sum("parameters"), all["parameters"].as_u64().unwrap() + 256 * 128);
    assert!(sum("trained") < sum("parameters"), "{all}");
    // 1F1B with 8 micro batches on 4 equal ranks would wait for 3 / 11 of a step.
    assert!(all["waiting_share"].as_f64().unwrap() >= 3.0 / 11.0, "{all}");
    // The times of the layers are not known yet.
    let timed =
        json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "pipeline": {"partition": "time"}});
    let (_folder, file) = config_of(&timed);
    let args = ["--model", "llama-nano", "--ds_config", file.to_str().unwrap(), "-n", "2", "--pipeline"];
    let text = stdout(&estimate(&args));
    assert!(text.contains("0              0-3") && text.contains("measures the time of each layer"), "{text}");
}

#[test]
fn a_pipeline_that_cannot_be_estimated_is_refused_in_words() {
    let refused = |config: Value, more: &[&str]| {
        let (folder, file) = config_of(&config);
        let args = ["--model", "nano", "--ds_config", file.to_str().unwrap()];
        let output = estimate(&[&args[..], more].concat());
        assert_eq!(output.status.code(), Some(2));
        stderr(&output).replace(folder.path().to_str().unwrap(), "DIR")
    };
    let config = |stage: u8, pipeline: Value| {
        json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage},
               "pipeline": pipeline})
    };
    insta::assert_snapshot!(refused(config(1, json!({"stages": 2})), &["-n", "2"]), @"zerorun: cannot train in a pipeline: pipeline.stages is 2, but this estimate covers only data-parallel ranks; use PipelineEstimate (zerorun estimate --pipeline), or remove the key");
    insta::assert_snapshot!(refused(config(3, json!({})), &["-n", "2", "--pipeline"]), @"zerorun: cannot train in a pipeline: zero_optimization.stage is 3, but gradients and parameters of a pipeline's stages are not sharded; use stage 0 or 1");
    insta::assert_snapshot!(refused(config(1, json!({})), &["-n", "8", "--pipeline"]), @"zerorun: cannot train in a pipeline: 8 ranks along the pipeline (pipeline.stages; auto: all ranks) need more stages than the model's 7 layers can fill; use fewer ranks or chunks");
    insta::assert_snapshot!(refused(config(1, json!({"stages": 3})), &["-n", "4", "--pipeline"]), @"zerorun: cannot train in a pipeline: pipeline.stages is 3, but 4 ranks cannot be divided into groups of the configured sizes (pipeline 3), which need a multiple of 3 ranks; start a different number of ranks, or change these sizes");
    insta::assert_snapshot!(refused(config(1, json!({})), &["-n", "2", "--pipeline", "--frozen", "nothing"]), @"zerorun: the pattern `nothing` selects no parameter to freeze; the model has wte.weight, wpe.weight, h.0.ln_1.weight, h.0.ln_1.bias, h.0.attn.c_attn.weight, h.0.attn.c_attn.bias, h.0.attn.c_proj.weight, h.0.attn.c_proj.bias and 44 more (* matches any characters, as in h.*)");
    insta::assert_snapshot!(refused(config(1, json!({})), &["-n", "2", "--pipeline", "--hosts", "2"]), @"
    zerorun: the argument '--pipeline' cannot be used with '--hosts <N>'

    Usage: zerorun estimate --ds_config <FILE> --num_ranks <N> --pipeline <--model <NAME>|--safetensors <FILE>|--table>

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refused(config(1, json!({})), &["-n", "2", "--step", "2"]), @"
    zerorun: the following required arguments were not provided:
      <--hosts <N>|--pipeline>

    Usage: zerorun estimate --ds_config <FILE> --num_ranks <N> --step <SECONDS> <--model <NAME>|--safetensors <FILE>|--table> <--hosts <N>|--pipeline>

    For more information, try '--help'.
    ");
}
