//! Monitors, printed lines and profiles as users see them: files, standard error, a port.

use crate::support::processes::{self, example, start, stderr, wait_for, zerorun};
use crate::support::tiny::{Shape, Tiny, batch, config, train};
use candle_core::{DType, Tensor};
use candle_zero::comm::{CollectiveKind, threads};
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::monitor::{CsvMonitor, JsonLines, Monitor, MonitorEvent};
use candle_zero::profiler::FlopsProfile;
use candle_zero::{Engine, Error};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};

fn cases(area: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(include_str!("../fixtures/conformance_monitor.json")).unwrap();
    all.into_iter().filter(|case| case["area"] == area).collect()
}

/// Returns the header and the rows of a CSV file.
fn csv(path: &Path) -> (String, Vec<(u64, f64)>) {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (header, rows) = text.split_once('\n').unwrap();
    let row = |line: &str| {
        let (step, value) = line.split_once(',').unwrap();
        (step.parse().unwrap(), value.parse().unwrap())
    };
    (header.to_string(), rows.lines().map(row).collect())
}

// ---- files -----------------------------------------------------------------------------------------------------

#[test]
fn csv_files_have_the_recorded_names_headers_and_rows() {
    for case in cases("monitor") {
        let dir = tempfile::tempdir().unwrap();
        let (input, expect) = (&case["input"], &case["expect"]);
        let [path, job] = ["output_path", "job_name"].map(|key| input[key].as_str().unwrap());
        let mut monitor = CsvMonitor::create(dir.path().join(path).join(job)).unwrap();
        for event in input["events"].as_array().unwrap() {
            let (tag, value, step) = (event[0].as_str(), event[1].as_f64(), event[2].as_u64());
            monitor.write(&[MonitorEvent::new(tag.unwrap(), value.unwrap(), step.unwrap())]).unwrap();
        }
        let (header, rows) = csv(&dir.path().join(expect["file"].as_str().unwrap()));
        assert_eq!(json!(header.split(',').collect::<Vec<_>>()), expect["header"]);
        let rows: Vec<Value> = rows.iter().map(|(step, value)| json!([step, value])).collect();
        assert_eq!(json!(rows), expect["rows"]);
    }
}

#[test]
fn every_optimizer_step_is_written_once_with_losses_of_all_ranks_and_the_coming_rate() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({
        "csv_monitor": {"enabled": true, "output_path": dir.path(), "job_name": "job"},
        "tensorboard": {"enabled": true, "output_path": dir.path().join("tb"), "job_name": ""},
        "wall_clock_breakdown": true, "steps_per_print": 1000,
    });
    let lines = dir.path().join("events.jsonl");
    let (world, steps) = (2, 3);
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let lines = lines.clone();
        let builder = Engine::builder().communicator(comm).monitor(move || JsonLines::append(lines));
        let shape = Shape { layers: 1, ..Shape::default() };
        let config = config(1, 2, json!({}), more.clone());
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config)?;
        let mut records = vec![];
        for step in 0..steps {
            let mut losses = 0.0;
            for micro in 0..2 {
                let (ids, targets) = batch((2 * step + micro) * world + rank);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()?;
                losses += f64::from(loss.to_scalar::<f32>()?);
            }
            records.push((losses / 2.0, engine.lr()[0], engine.global_grad_norm().unwrap()));
        }
        engine.write_events(&[MonitorEvent::new("Own/value", rank as f64 + 0.5, engine.global_samples())]);
        Ok(records)
    });
    let ranks: Vec<Vec<(f64, f64, f64)>> =
        ranks.unwrap().into_iter().map(|r: candle_zero::Result<_>| r.unwrap()).collect();
    let samples = |step: usize| 8 * (step as u64 + 1);
    let file = |name: &str| csv(&dir.path().join("job").join(format!("Train_Samples_{name}.csv")));
    let expected = |value: fn(&[(f64, f64, f64)]) -> f64| -> Vec<(u64, f64)> {
        let at = |step: usize| value(&ranks.iter().map(|rank| rank[step]).collect::<Vec<_>>());
        (0..steps).map(|step| (samples(step), at(step))).collect()
    };
    let mean = |all: &[(f64, f64, f64)]| (all[0].0 + all[1].0) / 2.0;
    assert_eq!(file("train_loss"), ("step,train_loss".into(), expected(mean)));
    assert_eq!(file("lr"), ("step,lr".into(), expected(|all| all[0].1)));
    assert_eq!(file("grad_norm"), ("step,grad_norm".into(), expected(|all| all[0].2)));
    let time = |name: &str| file(&format!("elapsed_time_ms_{name}")).1;
    for ((whole, inner), reduce) in time("backward").iter().zip(time("backward_inner")).zip(time("backward_allreduce"))
    {
        assert!(inner.1 > 0.0 && reduce.1 >= 0.0 && (inner.1 + reduce.1 - whole.1).abs() < 1e-9);
    }
    // Without fp16, there is no loss scale; rank 1 has written nothing.
    assert!(!dir.path().join("job/Train_Samples_loss_scale.csv").exists());
    assert_eq!(csv(&dir.path().join("job/Own_value.csv")).1, [(samples(steps - 1), 0.5)]);
    assert_eq!(std::fs::read_dir(dir.path().join("tb")).unwrap().count(), 1);

    let text = std::fs::read_to_string(&lines).unwrap();
    let mut by_tag = BTreeMap::<String, Vec<(u64, f64)>>::new();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let row = (line["step"].as_u64().unwrap(), line["value"].as_f64().unwrap());
        by_tag.entry(line["tag"].as_str().unwrap().into()).or_default().push(row);
    }
    assert_eq!(by_tag.len(), 9);
    assert_eq!(by_tag["Train/Samples/train_loss"], expected(mean));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_of_every_rank_before_training() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    for section in ["tensorboard", "csv_monitor"] {
        let more = json!({section: {"enabled": true, "output_path": dir.path().join("file")}});
        let ranks = threads::run(2, |comm| {
            let builder = Engine::builder().communicator(comm);
            builder.initialize(|vb| candle_nn::linear(4, 3, vb), config(1, 1, json!({}), more.clone())).map(drop)
        });
        let errors: Vec<Error> = ranks.unwrap().into_iter().map(|r| r.unwrap_err()).collect();
        assert!(
            matches!(&errors[0], Error::Io { path, .. } if path.ends_with("file/DeepSpeedJobName")),
            "{}",
            errors[0]
        );
        assert!(errors[1].to_string().contains("file/DeepSpeedJobName"), "{}", errors[1]);
    }
}

#[test]
fn the_comms_logger_counts_what_the_report_counts() {
    let train = |more: Value| {
        let ranks = threads::run(2, |comm| {
            let builder = Engine::builder().communicator(comm);
            let mut engine =
                builder.initialize(|vb| Tiny::new(Shape::default(), vb), config(1, 1, json!({}), more.clone()))?;
            let (ids, targets) = batch(0);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            Ok((engine.comm_summary(), engine.comm_report()))
        });
        ranks.unwrap().into_iter().map(|r: candle_zero::Result<_>| r.unwrap()).collect::<Vec<_>>()
    };
    for (summary, report) in train(json!({"comms_logger": {}})) {
        let rows = summary.unwrap().rows;
        for (kind, counted) in &report.kinds {
            let of_kind: Vec<_> = rows.iter().filter(|row| row.kind == *kind).collect();
            assert_eq!(of_kind.iter().map(|row| row.calls).sum::<u64>(), counted.calls, "{kind:?}");
            let parts = if *kind == CollectiveKind::ReduceScatter { 2 } else { 1 };
            let size = if *kind == CollectiveKind::Control { 8 } else { 4 };
            let bytes: u64 = of_kind.iter().map(|row| row.bytes * row.calls).sum();
            // The last number of a control message may have fewer than 8 bytes.
            let limit = if *kind == CollectiveKind::Control { 8 * counted.calls } else { 1 };
            let gap = (counted.elements * size).checked_sub(bytes * parts);
            assert!(gap.is_some_and(|gap| gap < limit), "{kind:?}: {bytes} of {}", counted.elements * size);
            assert!(of_kind.iter().all(|row| row.total_ms > 0.0 && row.bus_gbps <= row.algorithm_gbps));
        }
        assert!(rows.iter().any(|row| row.kind == CollectiveKind::AllGather && row.bus_gbps > 0.0));
    }
    assert!(train(json!({})).iter().all(|(summary, _)| summary.is_none()));
}

#[test]
fn collectives_are_printed_as_they_come_and_in_a_table_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({"comms_logger": {"verbose": true, "prof_all": false, "prof_ops": ["all_gather", "gossip"]}});
    let output = train_gpt(dir.path(), &["-n", "2"], more, &["--steps", "2"]).output().unwrap();
    let lines = messages(&output);
    assert!(lines[0].starts_with("config: comms_logger.prof_ops: there is no operation `gossip`, only all_reduce,"));
    assert!(lines[1].starts_with("rank=0 | comm op: all_gather | time (ms): "), "{}", lines[1]);
    assert!(lines[1].contains(" | msg size: ") && lines[1].contains(" | algbw (Gbps): "), "{}", lines[1]);
    let ops = lines.iter().filter(|line| line.starts_with("rank=0 | comm op: ")).count();
    assert_eq!((lines.len(), lines.last().unwrap().as_str()), (ops + 2, "collectives of rank 0"));
    let text = stderr(&output);
    let table: Vec<&str> = text.lines().skip_while(|line| !line.contains("Comm. Op")).collect();
    assert!(table.len() > 1 && table[1..].iter().all(|line| line.contains("all_gather ")), "{text}");
    let calls = table[1..].iter().map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[words.len() - 5].parse::<usize>().unwrap()
    });
    assert_eq!(calls.sum::<usize>(), ops);
}

// ---- printed lines ---------------------------------------------------------------------------------------------

/// Returns the command `zerorun OPTIONS train_gpt ARGS` with a small model and `more` in its configuration.
fn train_gpt(dir: &Path, options: &[&str], more: Value, args: &[&str]) -> Command {
    let mut config = json!({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2},
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(dir.join("ds_config.json"), config.to_string()).unwrap();
    let mut command = zerorun();
    command.current_dir(dir).args(options).arg(example("train_gpt"));
    command.args(["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--ctx", "32", "--sample", "0"]);
    command.args(["--ds_config", "ds_config.json", "--metrics", "metrics.jsonl"]).args(args);
    command
}

/// Returns the engine's messages, without the rank and the engine's prefix.
fn messages(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", stderr(output));
    stderr(output).lines().filter_map(|line| Some(line.split_once("[candle-zero] ")?.1.to_string())).collect()
}

#[test]
fn progress_throughput_times_and_memory_are_printed_in_the_rhythm_of_steps_per_print() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({"steps_per_print": 2, "wall_clock_breakdown": true, "memory_breakdown": true});
    let lines = messages(&train_gpt(dir.path(), &["-n", "2"], more, &["--steps", "5"]).output().unwrap());
    let starting = |start: &str| lines.iter().filter(|line| line.starts_with(start)).collect::<Vec<_>>();
    let progress = |step| format!("step={step}, skipped=0, lr=[0.003], mom=[[0.9, 0.95]]");
    assert_eq!(starting("step="), [&progress(2), &progress(4)]);
    assert_eq!(starting("time (ms) | forward ").len(), 2);
    // The throughput is not reported in the first two steps.
    let [speed] = starting("micro_step=")[..] else { panic!("{lines:?}") };
    assert!(speed.starts_with("micro_step=8/global_step=4, RunningAvgSamplesPerSec="), "{speed}");
    let number = |name: &str| {
        let text = speed.split(name).nth(1).unwrap().split([',', 'G']).next().unwrap();
        text.parse::<f64>().unwrap()
    };
    let numbers = ["RunningAvgSamplesPerSec=", "CurrSamplesPerSec=", "MemAllocated=", "MaxMemAllocated="].map(number);
    assert!(numbers.iter().all(|n| *n > 0.0) && numbers[3] >= numbers[2], "{speed}");
    for step in ["before forward", "after forward", "after backward"] {
        // Memory is printed in two of the five optimizer steps, and each of them has two micro steps.
        assert_eq!(starting(&format!("memory (MiB) {step} | parameters ")).len(), 4, "{step}");
    }
    let after = starting("memory (MiB) after step | parameters ");
    assert!(after.len() == 2 && after.iter().all(|line| line.contains(" | moments ")), "{after:?}");
    assert!(after.iter().all(|line| line.contains(" | resident ") && line.contains(", at most ")), "{after:?}");
}

#[test]
fn the_state_is_dumped_once_at_the_start_and_without_keys_nothing_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let lines = messages(&train_gpt(dir.path(), &[], json!({}), &["--steps", "1"]).output().unwrap());
    assert_eq!(lines, [""; 0]);
    let output = train_gpt(dir.path(), &["-n", "2"], json!({"dump_state": true}), &["--steps", "1"]).output().unwrap();
    assert_eq!(messages(&output), ["configuration: {"]);
    let text = stderr(&output);
    for line in ["\"train_batch_size\": 8", "ranks: 2", "dtype: F32", "in 2 units or outside", "moments "] {
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
    }
}

// ---- Prometheus ------------------------------------------------------------------------------------------------

#[test]
fn prometheus_reads_a_running_job_and_a_taken_port_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["-n", "2", "--prometheus", "0"];
    let mut job = start(&mut train_gpt(dir.path(), &options, json!({}), &["--steps", "100000"]));
    let mut output = BufReader::new(job.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("metrics for Prometheus: http://") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the job ended");
    }
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_string();
    // The rest of the output must be read, or the job would block.
    let rest = std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    let body = wait_for("a step", || {
        let mut client = TcpStream::connect(&address).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer.contains("train_loss").then_some(answer)
    });
    assert!(body.contains("\ncandle_zero_value{tag=\"Train/Samples/lr\"} 0.003\n"), "{body}");
    let loss = body.split("candle_zero_value{tag=\"Train/Samples/train_loss\"} ").nth(1).unwrap();
    assert!((0.1..7.0).contains(&loss.lines().next().unwrap().parse::<f64>().unwrap()), "{body}");

    let port = address.split(':').nth(1).unwrap();
    let second = tempfile::tempdir().unwrap();
    let taken = train_gpt(second.path(), &["--prometheus", port], json!({}), &["--steps", "1"]).output().unwrap();
    assert!(!taken.status.success());
    assert!(
        stderr(&taken).contains(&format!("on 127.0.0.1, port {port}: Address already in use")),
        "{}",
        stderr(&taken)
    );
    processes::send(rustix::process::Signal::TERM, &job);
    job.wait().unwrap();
    rest.join().unwrap().unwrap();
}

/// A monitor that collects the events of an engine.
struct Collector(std::sync::mpsc::Sender<MonitorEvent>);

impl Monitor for Collector {
    fn write(&mut self, events: &[MonitorEvent]) -> candle_zero::Result<()> {
        events.iter().for_each(|event| self.0.send(event.clone()).unwrap());
        Ok(())
    }
}

/// The name, the operator and the value of a label.
type Label<'a> = (&'a str, &'a str, &'a str);

/// Returns the selectors in a PromQL expression: for each, the metric's name and the labels.
fn selectors(expression: &str) -> Vec<(&str, Vec<Label<'_>>)> {
    let ends_name = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let mut found = Vec::new();
    for part in expression.split_inclusive('}') {
        let Some((before, labels)) = part.strip_suffix('}').and_then(|part| part.split_once('{')) else { continue };
        let start = before.rfind(ends_name).map_or(0, |at| at + 1);
        let mut list = Vec::new();
        for label in labels.split(", ") {
            let (name, rest) = label.split_at(label.find(ends_name).unwrap());
            let (operator, value) = rest.split_once('"').unwrap();
            list.push((name, operator, value.strip_suffix('"').unwrap()));
        }
        found.push((&before[start..], list));
    }
    found
}

#[test]
fn the_dashboard_of_grafana_asks_for_metrics_labels_and_tags_that_are_served() {
    let (sender, collected) = std::sync::mpsc::channel();
    let more = json!({"wall_clock_breakdown": true, "fp16": {"enabled": true, "initial_scale_power": 8}});
    let mut engine = Engine::builder()
        .monitor(move || Ok(Collector(sender)))
        .initialize(|vb| Tiny::new(Shape::default(), vb), config(1, 1, json!({}), more))
        .unwrap();
    let (ids, targets) = batch(0);
    for _ in 0..2 {
        let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    // `zerorun finetune` records both metrics; `train_gpt` records only the second.
    engine.record_metrics(&[("val_loss", 1.0), ("tokens_per_s", 2.0)]);
    drop(engine);
    let events: Vec<MonitorEvent> = collected.iter().collect();
    let mut prometheus = candle_zero::monitor::Prometheus::listen(0).unwrap();
    prometheus.write(&events).unwrap();
    let mut client = TcpStream::connect(prometheus.address()).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let served: Vec<_> = answer.lines().filter(|line| !line.starts_with('#')).flat_map(selectors).collect();

    let dashboard: Value = serde_json::from_str(include_str!("../../docs/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let expressions: Vec<&str> = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap())
        .map(|target| target["expr"].as_str().unwrap())
        .collect();
    assert!(expressions.len() > 15, "{expressions:?}");
    for expression in expressions {
        let found = selectors(expression);
        assert!(!found.is_empty(), "{expression}");
        for (metric, labels) in found {
            // Prometheus itself adds `instance`.
            let requested: Vec<_> = labels.into_iter().filter(|(name, ..)| *name != "instance").collect();
            let is_served =
                served.iter().any(|(name, has)| *name == metric && requested.iter().all(|label| has.contains(label)));
            assert!(is_served, "{expression}: {served:?}");
        }
    }
    let variable = &dashboard["templating"]["list"][1];
    assert_eq!(variable["query"]["query"], "label_values(candle_zero_value, instance)");
    assert!(served.iter().any(|(name, _)| *name == "candle_zero_value"));
}

// ---- Weights & Biases ------------------------------------------------------------------------------------------

#[test]
fn a_run_of_weights_and_biases_continues_from_its_checkpoint_and_has_each_step_once() {
    let dir = tempfile::tempdir().unwrap();
    let train = |steps: &str| {
        let more = json!({"wandb": {"enabled": true, "project": "p", "group": "g"}, "steps_per_print": 1000});
        let args = ["--steps", steps, "--save", "checkpoints", "--resume"];
        let mut command = train_gpt(dir.path(), &["-n", "2", "--run", "small"], more, &args);
        messages(&command.env_remove("WANDB_DIR").env_remove("WANDB_MODE").output().unwrap())
    };
    let first = train("3").join("\n");
    let second = train("5").join("\n");
    let folders: Vec<_> = std::fs::read_dir(dir.path().join("wandb")).unwrap().map(|e| e.unwrap().path()).collect();
    let [folder] = &folders[..] else { panic!("{folders:?}") };
    let name = folder.file_name().unwrap().to_str().unwrap();
    let id = name.rsplit_once('-').unwrap().1;
    assert!(name.starts_with("offline-run-20") && id.len() == 8, "{name}");
    let message = |action: &str| {
        let folder = format!("wandb/{name}");
        format!("Weights & Biases run {id} {action} {folder}; upload it with wandb sync")
    };
    assert!(first.contains(&message("is written to")), "{first}");
    assert!(second.contains(&message("is continued in")), "{second}");
    let bytes = std::fs::read(folder.join(format!("run-{id}.wandb"))).unwrap();
    let count = |text: &str| bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
    // The file is smaller than a block, so no text is divided. Each value is in the history and in the summary.
    assert!(bytes.starts_with(b":W&B") && bytes.len() < 32 << 10, "{}", bytes.len());
    assert_eq!((count("Train/Samples/train_loss"), count("tokens_per_s")), (10, 10));
    assert_eq!((count("\"train_batch_size\":8"), count("\"seq_len\":32")), (2, 2));
}

// ---- flops -----------------------------------------------------------------------------------------------------

/// Returns rank 0's profile of a GPT's second step on `world` ranks, with two micro steps of two samples per rank.
fn profiled(world: usize, stage: u8, sizes: &GptConfig, more: Value) -> FlopsProfile {
    let mut sections = json!({"flops_profiler": {"enabled": true}});
    sections.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let config = config(stage, 2, json!({"stage3_param_persistence_threshold": 0}), sections);
    let profiles = threads::run(world, |comm| {
        let mut engine = Engine::builder().communicator(comm).initialize(|vb| Gpt::new(sizes, vb), config.clone())?;
        let ids = Tensor::zeros((2, sizes.ctx), DType::U32, engine.device())?;
        for micro in 0..6 {
            // The profiled step is the second of three.
            assert_eq!(engine.flops_profile().is_some(), micro >= 4 && engine.rank() == 0);
            let loss = engine.forward(|model| model.loss(&ids, &ids))?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        Ok(engine.flops_profile().cloned())
    });
    let mut profiles: Vec<_> = profiles.unwrap().into_iter().map(|r: candle_zero::Result<_>| r.unwrap()).collect();
    assert!(profiles[1..].iter().all(Option::is_none));
    profiles.remove(0).unwrap()
}

#[test]
fn the_multiply_adds_of_the_nano_gpt_are_those_of_the_formula_to_the_unit() {
    let nano = GptConfig::preset("nano").unwrap();
    let (batch, time, width, vocab) = (2 * 2, nano.ctx as u64, nano.n_embd as u64, nano.vocab as u64);
    let tokens = batch * time;
    // In a block, c_attn has 3, c_proj 1 and the MLP 8 matrices of width x width. A query sees (time + 1) / 2 keys on
    // average, and each pair costs one product for the score and one for the value.
    let (linear, attention) = (tokens * 12 * width * width, batch * time * (time + 1) * width);
    let head = tokens * vocab * width;
    for (world, stage, recompute) in [(1, 0, false), (2, 2, false), (2, 3, false), (1, 1, true), (2, 3, true)] {
        let sizes = GptConfig { checkpoint_activations: recompute, ..nano.clone() };
        let profile = profiled(world, stage, &sizes, json!({}));
        let [outside, blocks @ ..] = &profile.modules[..] else { panic!() };
        let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
        assert_eq!((names, outside.name.as_str()), (vec!["h.0", "h.1", "h.2", "h.3"], ""));
        for block in blocks {
            assert_eq!(block.parameters as u64, 12 * width * width + 13 * width);
            assert_eq!(block.forward_macs, linear + attention, "{stage}");
            let again = if recompute { linear + attention } else { 0 };
            // The backward pass computes two products for each product with a matrix, and five instead of two for each
            // pair.
            assert_eq!(block.backward_macs, again + 2 * linear + attention / 2 * 5, "{stage}");
            assert!(block.forward_ms > 0.0 && block.backward_ms > 0.0, "{block:?}");
        }
        // The loss computes its gradients in the forward pass.
        assert_eq!((outside.forward_macs, outside.backward_macs), (3 * head, 0));
        assert_eq!(outside.parameters as u64, (vocab + time + 2) * width);
        if !recompute {
            // 6 operations for each token and each matrix element, plus attention.
            let matrices = 4 * 12 * width * width + vocab * width;
            assert_eq!(profile.flops(), 6 * matrices * tokens + 4 * 7 * attention);
        }
        let total = profile.total();
        let parts = [(total.forward_ms, profile.timings.forward_ms), (total.backward_ms, profile.timings.backward_ms)];
        assert!(parts.iter().all(|(parts, whole)| *parts <= *whole && *parts > 0.7 * whole), "{parts:?}");
        assert!(profile.peak_flops > 1e8 && profile.mfu() > 0.0 && profile.mfu() < 2.0, "{}", profile.mfu());
        assert_eq!((profile.step, profile.world_size, profile.samples), (2, world, 4 * world));
    }
}

#[test]
fn profiling_changes_no_bit_of_training() {
    for (stage, checkpointed) in [(0, false), (2, false), (3, false), (3, true)] {
        let run = |more: Value| {
            let shape = Shape { units: true, checkpointed, layers: 2 };
            let config = config(stage, 2, json!({"stage3_param_persistence_threshold": 0}), more);
            train(2, shape, &config, 3).into_iter().map(|o| (o.losses, o.norms, o.exported)).collect::<Vec<_>>()
        };
        assert_eq!(run(json!({"flops_profiler": {"enabled": true}})), run(json!({})), "stage {stage}");
    }
}

#[test]
fn the_profile_is_printed_after_its_step_or_written_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let more = |file: Value| {
        json!({"flops_profiler": {"enabled": true, "profile_step": 2, "output_file": file},
                                    "steps_per_print": 1000})
    };
    let output = train_gpt(dir.path(), &["-n", "2"], more(Value::Null), &["--steps", "3"]).output().unwrap();
    assert_eq!(messages(&output), ["flops profile of step 3"]);
    let text = stderr(&output);
    for word in ["samples/second", "MFU ", "fwd+bwd flops of rank 0", "top modules at depth 2", "\nmodules\n", "h.1 "] {
        let text = text.replace("[0] ", "").replace("[rank 0] ", "");
        assert!(text.contains(word), "{word}: {text}");
    }
    let output = train_gpt(dir.path(), &["-n", "2"], more(json!("profile.txt")), &["--steps", "3"]).output().unwrap();
    assert_eq!(messages(&output), [""; 0]);
    let text = std::fs::read_to_string(dir.path().join("profile.txt")).unwrap();
    assert!(text.starts_with("flops profile of step 3\n") && text.contains("\ntop modules at depth 1\n"), "{text}");
    let nowhere = train_gpt(dir.path(), &[], more(json!("no/such/profile.txt")), &["--steps", "1"]).output().unwrap();
    assert!(stderr(&nowhere).contains("cannot write to no/such: "), "{}", stderr(&nowhere));
}
