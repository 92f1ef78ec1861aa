//! `checkpoint.upload_to`: checkpoints are uploaded to an object store, and loaded from there.

use crate::support::processes::{as_program, stderr};
use crate::support::skips::skipped;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::{Communicator, Pending, threads};
use candle_zero::error::Result;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 1 };

fn on_ranks<T: Send>(world: usize, url: &str, act: impl Fn(&mut Engine<Tiny>) -> Result<T> + Sync) -> Vec<Result<T>> {
    let settings = config(3, 1, json!({}), json!({"checkpoint": {"upload_to": url}}));
    let ranks = threads::run(world, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        act(&mut builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?)
    });
    ranks.unwrap()
}

fn step(engine: &mut Engine<Tiny>) -> Result<()> {
    let (ids, targets) = batch(engine.micro_steps() as usize * engine.world_size() + engine.rank());
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)?;
    engine.step()
}

/// The communicator of a thread that acts as a rank on one of two hosts.
struct HostCommunicator {
    inner: Arc<dyn Communicator>,
    here: Range<usize>,
}

impl Communicator for HostCommunicator {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn ranks_here(&self) -> Range<usize> {
        self.here.clone()
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.inner.gather_bytes(bytes)
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}

#[test]
fn hosts_with_folders_of_their_own_send_what_each_has_also_where_ranks_form_groups() {
    for groups in [false, true] {
        let (folder, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let url = format!("file://{}", store.path().display());
        let mut zero = json!({"stage3_param_persistence_threshold": 0});
        if groups {
            zero["mics_shard_size"] = json!(2);
        }
        let checkpoint = json!({"checkpoint": {"use_node_local_storage": true, "upload_to": url}});
        let settings = config(3, 1, zero, checkpoint);
        let ranks = threads::run(4, |inner| {
            let host = inner.rank() / 2;
            let comm = Arc::new(HostCommunicator { here: 2 * host..2 * host + 2, inner });
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?;
            step(&mut engine)?;
            engine.save_checkpoint(folder.path().join(host.to_string()), None, json!({}))?;
            engine.wait_for_upload()
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
        // The downloaded files form a checkpoint.
        let loaded = on_ranks(3, &url, |engine| {
            Ok(engine.load_checkpoint(&url, None, &LoadOptions::default())?.map(|_| engine.global_steps()))
        });
        let steps: Vec<_> = loaded.into_iter().map(|rank| rank.unwrap()).collect();
        assert_eq!(steps, [Some(1); 3], "groups: {groups}");
    }
}

/// Saves two checkpoints, discards the folder, and loads both on a different number of ranks.
#[test]
#[ignore = "a program for other tests"]
fn program() {
    let url = std::env::var("URL_OF_TEST").unwrap();
    let (dir, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for rank in on_ranks(2, &url, |engine| {
        assert!(engine.load_checkpoint(&url, None, &LoadOptions::default())?.is_none());
        step(engine)?;
        engine.save_checkpoint(dir.path(), None, json!({"note": "first"}))?;
        step(engine)?;
        engine.save_checkpoint(dir.path(), None, json!({"note": "second"}))?;
        engine.export_safetensors(dir.path().join("model"))
        // Dropping the engine waits for the upload.
    }) {
        rank.unwrap();
    }
    let exported = std::fs::read(dir.path().join("model")).unwrap();
    drop(dir);
    for rank in on_ranks(3, &url, |engine| {
        let loaded = engine.load_checkpoint(&url, None, &LoadOptions::default())?.unwrap();
        assert_eq!((&loaded.client_state["note"], engine.global_steps()), (&json!("second"), 2));
        engine.export_safetensors(again.path().join("model"))?;
        engine.load_checkpoint(&url, Some("global_step1"), &LoadOptions::default())?.unwrap();
        assert_eq!(engine.global_steps(), 1);
        Ok(())
    }) {
        rank.unwrap();
    }
    assert!(std::fs::read(again.path().join("model")).unwrap() == exported);
}

fn run(url: &str, environment: &[(&str, &str)]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(as_program(module_path!(), "program")).env("URL_OF_TEST", url).env("XDG_CACHE_HOME", cache.path());
    program.envs(environment.iter().copied()).output().unwrap()
}

#[test]
fn what_an_engine_saved_is_loaded_from_a_folder_as_a_store() {
    let store = tempfile::tempdir().unwrap();
    let output = run(&format!("file://{}", store.path().display()), &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(store.path().join("latest")).unwrap(), "global_step2");
}

#[test]
fn what_an_engine_saved_is_loaded_from_a_server_of_s3() {
    let test = what_an_engine_saved_is_loaded_from_a_server_of_s3;
    let Some(server) = std::env::var("CANDLE_ZERO_TEST_S3").ok().filter(|server| !server.is_empty()) else {
        return skipped(test, "CANDLE_ZERO_TEST_S3 does not name an S3 server (for example http://127.0.0.1:5000)");
    };
    let host = server.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    let request = format!("PUT /runs HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") || answer.contains("BucketAlreadyOwnedByYou"), "{answer}");
    let environment =
        [("AWS_ENDPOINT_URL", server.as_str()), ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let output = run(&format!("s3://runs/of/{}", std::process::id()), &environment);
    assert!(output.status.success(), "{}", stderr(&output));
    // The bucket does not exist.
    let output = run("s3://elsewhere/a", &environment);
    let text = stderr(&output);
    assert!(!output.status.success() && text.contains("s3://elsewhere/a") && text.contains("NoSuchBucket"), "{text}");
}

#[test]
fn what_cannot_be_sent_is_an_error_of_the_next_save_and_the_one_after_it_goes_on() {
    let (dir, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = format!("file://{}", store.path().display());
    // A file takes the place of the folder.
    std::fs::write(store.path().join("one"), "").unwrap();
    let ranks = on_ranks(2, &url, |engine| {
        step(engine)?;
        engine.save_checkpoint(dir.path(), Some("one"), Value::Null)?;
        let error = engine.save_checkpoint(dir.path(), Some("two"), Value::Null).unwrap_err().to_string();
        assert!(dir.path().join("one/manifest.json").exists() && !dir.path().join("two").exists());
        engine.save_checkpoint(dir.path(), Some("two"), Value::Null)?;
        engine.wait_for_upload()?;
        Ok(error)
    });
    let texts: Vec<String> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(texts.iter().all(|text| text.contains(&url)), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains(" one/rank_0000") || text.contains(" one: ")), "{texts:?}");
    assert!(Path::new(store.path()).join("two/manifest.json").exists());
}
