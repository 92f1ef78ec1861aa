//! `zerorun inspect` and `zerorun consolidate` on checkpoints that engines have saved.

use crate::support::processes::{repository, stderr, stdout, zerorun};
use crate::support::tiny::{Shape, Tiny, config};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::comm::threads;
use candle_zero::models::{Gpt, GptConfig, Llama, LlamaConfig};
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Output;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Saves checkpoints `tags` of an untrained model from two ranks. Returns the file of its exported parameters.
fn save_model<M: 'static>(
    dir: &Path,
    tags: &[&str],
    client_state: &Value,
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M> + Sync,
) -> PathBuf {
    let exported = dir.join("exported.safetensors");
    // An existing export of a different model would not be replaced.
    _ = std::fs::remove_file(&exported);
    let ranks = threads::run(2, |comm| -> Result<()> {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(&build, config(2, 1, json!({}), json!({})))?;
        for tag in tags {
            engine.save_checkpoint(dir, Some(tag), client_state.clone())?;
        }
        engine.export_safetensors(&exported)
    });
    ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    exported
}

fn save(dir: &Path, tags: &[&str]) -> PathBuf {
    let shape = Shape { units: true, checkpointed: false, layers: 2 };
    save_model(dir, tags, &json!({"epoch": 3, "note": "text"}), |vb| Tiny::new(shape, vb))
}

fn tool(name: &str, path: &Path, more: &[&str]) -> Output {
    zerorun().arg(name).arg(path).args(more).output().unwrap()
}

fn inspect(path: &Path, more: &[&str]) -> Output {
    tool("inspect", path, more)
}

fn json_of(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// Changes a file without changing its length.
fn flip_last_byte(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_whole_checkpoint_is_told_in_words_and_in_json() {
    let dir = folder();
    save(dir.path(), &["first", "second"]);
    let output = inspect(dir.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for words in ["first", "(latest)", "2 ranks at stage 2, f32", "AdamW", "fp32, exp_avg, exp_avg_sq", "epoch, note"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.contains("complete: manifest, lengths and headers"), "{text}");

    let output = inspect(dir.path(), &["--tag", "first", "--verify", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let all = json_of(&output);
    assert_eq!(all["found"]["latest"], "second");
    assert_eq!(all["found"]["tags"].as_array().unwrap().len(), 2);
    let one = &all["checkpoint"];
    assert_eq!((&one["tag"], &one["whole"], &one["verified"]), (&json!("first"), &json!(true), &json!(true)));
    assert_eq!(one["client_state_keys"], json!(["epoch", "note"]));
    let files = std::fs::read_dir(dir.path().join("first")).unwrap().flatten();
    let bytes: u64 = files.filter(|f| f.file_name() != "manifest.json").map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(one["bytes"], bytes);

    // The folder of a tag is accepted too.
    let output = inspect(&dir.path().join("first"), &["--json"]);
    assert_eq!(json_of(&output)["checkpoint"]["tag"], "first");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn inspect_lists_buffers_with_type_and_shape() {
    let dir = folder();
    save_model(dir.path(), &["tag"], &Value::Null, |vb| {
        vb.pp("rows").get_with_hints_dtype((1, 3), "position_ids", Init::Const(0.0), DType::I64)?;
        candle_nn::batch_norm(5, 1e-5, vb.pp("norm"))
    });
    let expected = json!([
        {"name": "norm.running_mean", "dtype": "f32", "shape": [5]},
        {"name": "norm.running_var", "dtype": "f32", "shape": [5]},
        {"name": "rows.position_ids", "dtype": "i64", "shape": [1, 3]},
    ]);
    let output = inspect(dir.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let one = &json_of(&output)["checkpoint"];
    assert_eq!(one["buffers"], expected);
    let files = std::fs::read_dir(dir.path().join("tag")).unwrap().flatten();
    let bytes: u64 = files.filter(|f| f.file_name() != "manifest.json").map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(one["bytes"], bytes);
    let text = stdout(&inspect(dir.path(), &[]));
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [
        vec!["buffers", "3", "in", "buffers.safetensors"],
        vec!["norm.running_var", "f32", "[5]"],
        vec!["rows.position_ids", "i64", "[1,", "3]"],
    ] {
        assert!(rows.contains(&row), "{row:?}: {text}");
    }
    assert!(text.contains("in 3 files"), "{text}");
    // A checkpoint without buffers lists none, and a damaged file is reported.
    save(&dir.path().join("other"), &["plain"]);
    assert_eq!(json_of(&inspect(&dir.path().join("other"), &["--json"]))["checkpoint"]["buffers"], json!([]));
    flip_last_byte(&dir.path().join("tag/buffers.safetensors"));
    let output = inspect(dir.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let one = &json_of(&output)["checkpoint"];
    assert!(one["problems"][0].as_str().unwrap().contains("buffers.safetensors"), "{one}");
    assert_eq!(one["buffers"], json!([]));
}

#[test]
fn damage_is_told_by_file_and_exit_code_1() {
    let dir = folder();
    save(dir.path(), &["tag"]);
    let file = |rank: usize| dir.path().join(format!("tag/rank_0000{rank}_of_00002.safetensors"));

    // Changed data is detected only when it is read.
    flip_last_byte(&file(1));
    assert_eq!(inspect(dir.path(), &[]).status.code(), Some(0));
    let output = inspect(dir.path(), &["--verify"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("rank_00001_of_00002") && text.contains("are damaged: their checksum differs"), "{text}");

    // Every damaged file is reported.
    std::fs::remove_file(file(0)).unwrap();
    let output = inspect(dir.path(), &["--verify", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let one = &json_of(&output)["checkpoint"];
    assert_eq!((one["problems"].as_array().unwrap().len(), &one["whole"]), (2, &json!(false)));
    assert!(one["problems"][0].as_str().unwrap().contains("the file is missing"), "{one}");

    // A tag's folder that has lost its manifest still counts as the folder of a tag.
    std::fs::remove_file(dir.path().join("tag/manifest.json")).unwrap();
    for path in [dir.path().to_owned(), dir.path().join("tag")] {
        let output = inspect(&path, &[]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stdout(&output).contains("manifest.json"), "{}", stdout(&output));
    }
}

#[test]
fn a_latest_that_cannot_be_read_is_damage_to_both_tools_and_small_files_have_no_progress() {
    let dir = folder();
    save(dir.path(), &["tag"]);
    let (latest, out) = (dir.path().join("latest"), dir.path().join("out"));
    let both = || [inspect(dir.path(), &["--verify"]), consolidate(dir.path(), &out, &[])];
    for output in both() {
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    }
    std::fs::remove_dir_all(&out).unwrap();
    std::fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &latest).unwrap();
    for output in both() {
        assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
        assert!(stderr(&output).contains("it is a device, but a file is needed"), "{}", stderr(&output));
    }
    std::fs::remove_file(&latest).unwrap();
    for output in both() {
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    }
}

#[test]
fn the_folder_of_an_adapter_or_a_model_is_said_to_be_that() {
    for (file, what) in [("adapter_config.json", "the folder of an adapter"), ("config.json", "the folder of a model")]
    {
        let dir = folder();
        std::fs::write(dir.path().join(file), "{}").unwrap();
        let output = inspect(dir.path(), &[]);
        assert_eq!(output.status.code(), Some(2), "{file}");
        assert!(stderr(&output).contains(what) && !stdout(&output).contains("0 checkpoints"), "{}", stderr(&output));
    }
}

#[test]
fn where_there_is_nothing_the_exit_code_is_2() {
    let dir = folder();
    let cases: [(PathBuf, &[&str], &str); 3] = [
        (dir.path().join("absent"), &[], "cannot read"),
        (dir.path().to_owned(), &[], "there is no checkpoint in it"),
        (dir.path().to_owned(), &["--tga", "x"], "unexpected argument"),
    ];
    for (path, more, words) in cases {
        let output = inspect(&path, more);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    save(dir.path(), &["tag"]);
    let output = inspect(dir.path(), &["--tag", "tga"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("available: tag"), "{}", stderr(&output));
    let output = inspect(&dir.path().join("tag"), &["--tag", "other"]);
    assert_eq!(output.status.code(), Some(2));
    std::fs::remove_file(dir.path().join("latest")).unwrap();
    let output = inspect(dir.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(json_of(&output)["problem"].as_str().unwrap().contains("available: tag"));
}

fn consolidate(dir: &Path, out: &Path, more: &[&str]) -> Output {
    zerorun().arg("consolidate").arg(dir).arg(out).args(more).output().unwrap()
}

/// Returns all tensors of a file, by name.
fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect()
}

fn bits(tensor: &Tensor) -> (DType, Vec<usize>, Vec<u32>) {
    let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    (tensor.dtype(), tensor.dims().to_vec(), values.into_iter().map(f32::to_bits).collect())
}

fn names_in(out: &Path) -> BTreeSet<String> {
    std::fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn read_json(file: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Checks that `found` contains exactly the exported parameters, rounded to `dtype`, with `prefix` before their names.
fn assert_exported(found: &BTreeMap<String, Tensor>, exported: &Path, dtype: DType, prefix: &str) {
    let expected = tensors(exported);
    assert_eq!(found.len(), expected.len());
    for (name, tensor) in expected {
        assert_eq!(bits(&found[&format!("{prefix}{name}")]), bits(&tensor.to_dtype(dtype).unwrap()), "{name}");
    }
}

#[test]
fn consolidated_values_are_the_exported_ones_rounded_as_asked() {
    let dir = folder();
    let exported = save(dir.path(), &["tag"]);
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)] {
        let out = dir.path().join("deep").join(name);
        let output = consolidate(dir.path(), &out, &["--dtype", name]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(names_in(&out), ["model.safetensors".to_string()].into());
        assert_exported(&tensors(&out.join("model.safetensors")), &exported, dtype, "");
        assert!(
            stdout(&output).contains("There is no config.json: the checkpoint's parameters are not"),
            "{}",
            stdout(&output)
        );
    }
    // Nothing else is left next to the three outputs.
    assert_eq!(names_in(&dir.path().join("deep")).len(), 3);
}

#[test]
fn a_parameter_of_several_pieces_is_whole() {
    let dir = folder();
    // Pieces have 4 Mi elements. They end neither where a rank's shard ends nor where a checksum's block ends.
    let init = candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 };
    let exported = save_model(dir.path(), &["tag"], &Value::Null, |vb| {
        Ok((vb.get_with_hints(3, "short", init)?, vb.get_with_hints(4_500_001, "long", init)?))
    });
    let out = dir.path().join("out");
    let output = consolidate(dir.path(), &out, &["--dtype", "bf16"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_exported(&tensors(&out.join("model.safetensors")), &exported, DType::BF16, "");
}

#[test]
fn above_the_limit_an_index_names_the_file_of_every_parameter() {
    let dir = folder();
    let exported = save(dir.path(), &["tag"]);
    let (out, limit) = (dir.path().join("out"), 2000);
    // An empty folder is accepted.
    std::fs::create_dir(&out).unwrap();
    let output = consolidate(&dir.path().join("tag"), &out, &["--max_shard_size", "2KB"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let index = read_json(&out.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    let files: BTreeSet<&str> = map.values().map(|file| file.as_str().unwrap()).collect();
    assert!(files.len() > 2, "{index}");
    let (mut all, mut total) = (BTreeMap::new(), 0);
    for (i, file) in files.iter().enumerate() {
        assert_eq!(*file, format!("model-{:05}-of-{:05}.safetensors", i + 1, files.len()));
        let found = tensors(&out.join(file));
        let bytes: usize = found.values().map(|t| t.elem_count() * 4).sum();
        assert!(bytes <= limit || found.len() == 1, "{file} has {bytes} bytes");
        total += bytes;
        for (name, tensor) in found {
            assert_eq!(map[&name], *file);
            assert!(all.insert(name.clone(), tensor).is_none(), "{name} occurs twice");
        }
    }
    assert_eq!(all.len(), map.len());
    assert_eq!(index["metadata"]["total_size"], total);
    assert_exported(&all, &exported, DType::F32, "");
    assert_eq!(names_in(&out).len(), files.len() + 1);
}

#[test]
fn a_gpt2_has_the_names_and_the_config_of_transformers() {
    let config =
        GptConfig { n_layer: 2, n_embd: 12, n_head: 3, ctx: 7, vocab: 19, ..GptConfig::preset("nano").unwrap() };
    let model_state = json!({"architecture": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 12, "ctx": 7, "vocab": 19});
    let other = json!({"architecture": "gpt2", "n_layer": 5, "n_head": 3});
    let cases: [(Value, &[&str], std::result::Result<(), &str>); 4] = [
        (json!({"model": model_state}), &[], Ok(())),
        (Value::Null, &["--n_head", "3"], Ok(())),
        (Value::Null, &[], Err("do not determine the number of heads; set it with --n_head")),
        (json!({"model": other}), &[], Err("contains n_layer 5, but its parameters imply 2")),
    ];
    for (client_state, more, expected) in cases {
        let dir = folder();
        let exported = save_model(dir.path(), &["tag"], &client_state, |vb| Gpt::new(&config, vb));
        let out = dir.path().join("out");
        let output = consolidate(dir.path(), &out, more);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_exported(&tensors(&out.join("model.safetensors")), &exported, DType::F32, "transformer.");
        match expected {
            Ok(()) => {
                let json = read_json(&out.join("config.json"));
                assert_eq!(json["architectures"], json!(["GPT2LMHeadModel"]));
                assert_eq!(json["torch_dtype"], "float32");
                for (key, value) in
                    [("vocab_size", 19), ("n_positions", 7), ("n_embd", 12), ("n_layer", 2), ("n_head", 3)]
                {
                    assert_eq!(json[key], value, "{key}");
                }
                assert_eq!(
                    (&json["activation_function"], &json["layer_norm_epsilon"]),
                    (&json!("gelu_new"), &json!(1e-5))
                );
                assert_eq!(json["tie_word_embeddings"], true);
            }
            Err(words) => {
                assert!(stdout(&output).contains(words), "{}", stdout(&output));
                assert!(!out.join("config.json").exists());
            }
        }
    }
}

#[test]
fn heads_that_cannot_be_are_refused_before_anything_is_written() {
    let config =
        GptConfig { n_layer: 1, n_embd: 12, n_head: 3, ctx: 7, vocab: 19, ..GptConfig::preset("nano").unwrap() };
    let dir = folder();
    save_model(dir.path(), &["gpt"], &json!({"model": {"n_head": 3}}), |vb| Gpt::new(&config, vb));
    save_model(dir.path(), &["untold"], &Value::Null, |vb| Gpt::new(&config, vb));
    save(dir.path(), &["tiny"]);
    let out = dir.path().join("out");
    for (tag, n_head, words) in [
        ("gpt", "2", "contains n_head 3, but 2 is given"),
        ("untold", "5", "a multiple of n_head (5)"),
        ("untold", "0", "n_head is 0"),
        ("tiny", "2", "the checkpoint's parameters are not those of a GPT-2"),
    ] {
        let output = consolidate(dir.path(), &out, &["--tag", tag, "--n-head", n_head]);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert!(!out.exists());
    }
}

#[test]
fn a_llama_that_its_client_state_describes_has_a_config() {
    let nano = LlamaConfig::preset("llama-nano").unwrap();
    for tie_word_embeddings in [true, false] {
        let config = LlamaConfig { num_hidden_layers: 2, tie_word_embeddings, ..nano.clone() };
        let mut model = serde_json::to_value(&config).unwrap();
        model["architecture"] = json!("llama");
        let dir = folder();
        let exported = save_model(dir.path(), &["tag"], &json!({"model": model}), |vb| Llama::new(&config, vb));
        let out = dir.path().join("out");
        let output = consolidate(dir.path(), &out, &["--dtype", "bf16"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_exported(&tensors(&out.join("model.safetensors")), &exported, DType::BF16, "");
        let json = read_json(&out.join("config.json"));
        assert_eq!((&json["model_type"], &json["torch_dtype"]), (&json!("llama"), &json!("bfloat16")));
        assert_eq!((&json["num_key_value_heads"], &json["max_position_embeddings"]), (&json!(2), &json!(128)));
        assert_eq!(json["tie_word_embeddings"], tie_word_embeddings);

        // Sizes that do not match the model are rejected.
        model["num_hidden_layers"] = json!(u64::MAX);
        let dir = folder();
        save_model(dir.path(), &["tag"], &json!({"model": model}), |vb| Llama::new(&config, vb));
        let output = consolidate(dir.path(), &dir.path().join("out"), &[]);
        assert!(stdout(&output).contains("num_hidden_layers is 18446744073709551615"), "{}", stdout(&output));
    }
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left_of_what_fails() {
    let dir = folder();
    save(dir.path(), &["tag"]);
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("mine"), "text").unwrap();
    let before = names_in(dir.path());
    let absent = dir.path().join("absent");
    let cases: [(&Path, &Path, &[&str], &str); 6] = [
        (dir.path(), &out, &[], "but this folder is not empty"),
        (dir.path(), &out.join("mine"), &[], "but this is a file"),
        (dir.path(), &absent, &["--tag", "tga"], "available: tag"),
        (dir.path(), &absent, &["--max_shard_size", "0"], "give 1 or more"),
        (dir.path(), &absent, &["--dtype", "f64"], "invalid value 'f64'"),
        (&out, &absent, &[], "there is no checkpoint in it"),
    ];
    for (from, to, more, words) in cases {
        let output = consolidate(from, to, more);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
    flip_last_byte(&dir.path().join("tag/rank_00000_of_00002.safetensors"));
    // The last bytes are optimizer state, in the only block, which also contains the parameters.
    let output = consolidate(dir.path(), &absent, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("are damaged: their checksum differs"), "{}", stderr(&output));
    assert_eq!(names_in(dir.path()), before);
    assert_eq!(names_in(&out), ["mine".to_string()].into());
}

#[test]
fn a_value_that_f16_cannot_hold_is_told_by_its_parameter() {
    let dir = folder();
    let scale = |vb: VarBuilder<'_>| vb.get_with_hints((3, 5), "scale", candle_nn::Init::Const(1e6));
    save_model(dir.path(), &["tag"], &Value::Null, scale);
    let out = dir.path().join("out");
    let output = consolidate(dir.path(), &out, &["--dtype", "f16"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("scale has the value 1000000, which f16 cannot represent"), "{}", stderr(&output));
    assert!(!out.exists());
}

/// Writes consolidated models and the logits that candle-zero computes from them, for scripts/check_consolidated.sh.
#[test]
#[ignore = "writes to the folder that CANDLE_ZERO_CONSOLIDATED names, for scripts/check_consolidated.sh"]
fn models_and_logits_for_transformers() {
    let dir = PathBuf::from(std::env::var_os("CANDLE_ZERO_CONSOLIDATED").unwrap());
    let gpt = GptConfig { n_layer: 3, ..GptConfig::preset("nano").unwrap() };
    let llama = LlamaConfig { num_hidden_layers: 3, ..LlamaConfig::preset("llama-nano").unwrap() };
    let untied = LlamaConfig { tie_word_embeddings: false, ..llama.clone() };
    let client_state = |config: Value, architecture: &str| {
        let mut model = config;
        model["architecture"] = json!(architecture);
        json!({"model": model})
    };
    let gpt_state = client_state(serde_json::to_value(&gpt).unwrap(), "gpt2");
    for_transformers(&dir.join("gpt2"), &gpt_state, &[], |vb| Gpt::new(&gpt, vb), |model, ids| model.forward(ids));
    for (name, config, more) in
        [("llama", llama, &[][..]), ("llama_untied", untied, &["--max_shard_size", "500KB"][..])]
    {
        let state = client_state(serde_json::to_value(&config).unwrap(), "llama");
        for_transformers(&dir.join(name), &state, more, |vb| Llama::new(&config, vb), |model, ids| model.forward(ids));
    }
}

/// Writes the consolidated model to `dir/model`, and ids and logits to `dir/logits.safetensors`.
fn for_transformers<M: 'static>(
    dir: &Path,
    client_state: &Value,
    more: &[&str],
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M> + Sync,
    forward: impl Fn(&M, &Tensor) -> candle_core::Result<Tensor>,
) {
    std::fs::create_dir_all(dir).unwrap();
    let exported = save_model(dir, &["tag"], client_state, &build);
    let output = consolidate(dir, &dir.join("model"), more);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let vb = VarBuilder::from_tensors(tensors(&exported).into_iter().collect(), DType::F32, &Device::Cpu);
    let model = build(vb).unwrap();
    let ids = Tensor::from_iter((0..128u32).map(|i| (i * i * 7 + 3 * i) % 256), &Device::Cpu).unwrap();
    let ids = ids.reshape((2, 64)).unwrap();
    let logits = forward(&model, &ids).unwrap();
    let both = [("ids", ids.to_dtype(DType::I64).unwrap()), ("logits", logits.detach())];
    candle_core::safetensors::save(&both.into(), dir.join("logits.safetensors")).unwrap();
}

#[test]
fn import_writes_a_checkpoint_that_verifies_and_its_exit_code_says_what_is_wrong() {
    let dir = folder();
    let sample = repository().join("tests/fixtures/deepspeed/zero3_f32_tiny/checkpoint");
    let out = dir.path().join("out");
    let import = |from: &Path, more: &[&str]| zerorun().arg("import").arg(from).arg(&out).args(more).output().unwrap();
    let done = import(&sample, &["--as", "taken"]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(stdout(&done).trim(), out.join("taken").to_str().unwrap());
    assert!(inspect(&out, &["--verify"]).status.success());
    let refused = |output: Output, code: i32, words: &str| {
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    };
    refused(import(&sample, &["--as", "taken"]), 2, "already");
    refused(import(&sample, &["--as", "../taken"]), 2, "cannot be the name of a folder");
    refused(import(&dir.path().join("nowhere"), &[]), 2, "nowhere");
    refused(import(&sample, &["--tag", "nothing"]), 2, "nothing");
    let copy = dir.path().join("copy");
    let tag = std::fs::read_to_string(sample.join("latest")).unwrap();
    std::fs::create_dir_all(copy.join(tag.trim())).unwrap();
    std::fs::copy(sample.join("latest"), copy.join("latest")).unwrap();
    for entry in std::fs::read_dir(sample.join(tag.trim())).unwrap().map(|e| e.unwrap()) {
        let bytes = std::fs::read(entry.path()).unwrap();
        std::fs::write(copy.join(tag.trim()).join(entry.file_name()), &bytes[..bytes.len() / 2]).unwrap();
    }
    refused(import(&copy, &["--as", "cut"]), 1, "copy");
    assert!(!out.join("cut").exists());
}
