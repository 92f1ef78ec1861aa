//! `use_node_local_storage`: each host has its own folder, which the other hosts cannot see.

use crate::support::convnet;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, ConsolidateSettings, LoadOptions, SaveOptions, consolidate};
use candle_zero::comm::{Communicator, Pending, threads};
use candle_zero::error::Result;
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The communicator of a thread that acts as a rank on one of several hosts.
struct HostCommunicator {
    inner: Arc<dyn Communicator>,
    here: Range<usize>,
    /// The number of pieces of files sent so far.
    pieces: AtomicUsize,
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
        self.pieces.fetch_add(usize::from(bytes.len() > 200_000), Ordering::Relaxed);
        self.inner.gather_bytes(bytes)
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}

/// Runs `act` with an engine on each rank of `hosts`, which lists each host's number of ranks. `act` gets the index of
/// its host. Returns the results of all ranks, and the number of pieces of files sent between hosts.
fn on_hosts<T: Send>(
    hosts: &[usize],
    stage: u8,
    act: impl Fn(&mut Engine<Tiny>, usize) -> Result<T> + Sync,
) -> (Vec<Result<T>>, usize) {
    let world: usize = hosts.iter().sum();
    let sent = AtomicUsize::new(0);
    // A step has the same number of samples for any world size.
    let batch = json!({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24,
        "checkpoint": {"use_node_local_storage": true}});
    let settings = config(stage, 12 / world, json!({"stage3_param_persistence_threshold": 0}), batch);
    let ranks = threads::run(world, |inner| {
        let mut first = 0;
        let host = hosts.iter().position(|ranks| {
            first += ranks;
            inner.rank() < first
        });
        let host = host.unwrap();
        let comm = Arc::new(HostCommunicator { inner, here: first - hosts[host]..first, pieces: AtomicUsize::new(0) });
        let builder = Engine::builder().communicator(comm.clone()).device(Device::Cpu);
        let result = act(&mut builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?, host);
        sent.fetch_add(comm.pieces.load(Ordering::Relaxed), Ordering::Relaxed);
        result
    });
    (ranks.unwrap(), sent.into_inner())
}

fn step(engine: &mut Engine<Tiny>) -> Result<()> {
    let accumulation = engine.config().batch.gradient_accumulation_steps;
    for _ in 0..accumulation {
        let (ids, targets) = batch(engine.micro_steps() as usize * engine.world_size() + engine.rank());
        let loss = engine.forward(|model| model.loss(&ids, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
    }
    Ok(())
}

/// Saves checkpoints `one` and `two` (the latest) on two hosts with two ranks each, in one folder per host.
fn save_on_two_hosts(stage: u8) -> [TempDir; 2] {
    let dirs = [folder(), folder()];
    let (ranks, _) = on_hosts(&[2, 2], stage, |engine, host| {
        step(engine)?;
        engine.save_checkpoint(dirs[host].path(), Some("one"), json!({"rank": engine.rank()}))?;
        step(engine)?;
        engine.save_checkpoint(dirs[host].path(), Some("two"), json!({"rank": engine.rank()})).map(drop)
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
    dirs
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns a folder that combines the content of `dirs`, as if all hosts saw the same folder.
fn combined(dirs: &[TempDir]) -> TempDir {
    let all = folder();
    for tag in dirs.iter().flat_map(|dir| names(dir.path()).into_iter().map(move |name| dir.path().join(name))) {
        let to = all.path().join(tag.file_name().unwrap());
        if tag.is_file() {
            std::fs::copy(&tag, to).unwrap();
            continue;
        }
        std::fs::create_dir_all(&to).unwrap();
        for file in names(&tag) {
            std::fs::copy(tag.join(&file), to.join(file)).unwrap();
        }
    }
    all
}

/// Returns all states of a checkpoint in a folder that all hosts share, by name.
fn states(dir: &Path, tag: &str) -> Vec<(String, Vec<u32>)> {
    let checkpoint = Checkpoint::open(dir, Some(tag)).unwrap().unwrap();
    checkpoint.verify(|_| {}).unwrap();
    let manifest = checkpoint.manifest();
    let mut all = vec![];
    for (s, state) in manifest.states.iter().enumerate() {
        for (p, parameter) in manifest.parameters.iter().enumerate() {
            let values = checkpoint.read(s, p, 0..parameter.numel()).unwrap();
            all.push((format!("{state}.{}", parameter.name), values.iter().map(|v| v.to_bits()).collect()));
        }
    }
    all
}

const RANKS: [&str; 4] = [
    "rank_00000_of_00004.safetensors",
    "rank_00001_of_00004.safetensors",
    "rank_00002_of_00004.safetensors",
    "rank_00003_of_00004.safetensors",
];

#[test]
fn each_host_has_its_own_files_and_the_folders_together_are_an_ordinary_checkpoint() {
    let dirs = save_on_two_hosts(3);
    for (host, dir) in dirs.iter().enumerate() {
        assert_eq!(names(dir.path()), ["latest", "one", "two"]);
        let expected = [["manifest.json"].as_slice(), &RANKS[2 * host..][..2]].concat();
        assert_eq!(names(&dir.path().join("two")), expected);
        // A single folder's error names the hosts of the other files.
        let error = Checkpoint::open(dir.path(), None).err().unwrap().to_string();
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(error.contains(&format!("host {} wrote it", name.trim())), "{error}");
        assert!(error.contains(RANKS[2 * (1 - host)]), "{error}");
    }
    let manifests = dirs.each_ref().map(|dir| std::fs::read(dir.path().join("two/manifest.json")).unwrap());
    assert!(manifests[0] == manifests[1]);
    let all = combined(&dirs);
    let checkpoint = Checkpoint::open(all.path(), None).unwrap().unwrap();
    assert_eq!(checkpoint.manifest().client_state, json!({"rank": 0}));
    let out = all.path().join("out");
    consolidate(&checkpoint, &out, &ConsolidateSettings::default(), &mut |_| {}).unwrap();
    assert!(names(&out).contains(&"model.safetensors".to_string()), "{:?}", names(&out));
    // One host with 3 ranks loads the combined folder.
    let resaved = folder();
    let (ranks, sent) = on_hosts(&[3], 1, |engine, _| {
        engine.load_checkpoint(all.path(), None, &LoadOptions::default())?.unwrap();
        engine.save_checkpoint(resaved.path(), Some("two"), Value::Null).map(drop)
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
    assert_eq!(sent, 0);
    assert!(states(all.path(), "two") == states(resaved.path(), "two"));
}

#[test]
fn every_placement_of_ranks_loads_what_another_has_saved() {
    let dirs = save_on_two_hosts(3);
    let expected = states(combined(&dirs).path(), "two");
    let (a, b, new) = (dirs[0].path(), dirs[1].path(), folder());
    let missing = new.path().join("not there yet");
    // The number of ranks on each host, the stage, the folder of each host, and whether parts are sent between hosts.
    let placements: [(&[usize], u8, &[&Path], bool); 7] = [
        (&[2, 2], 3, &[a, b], false),
        // Each rank needs all weights.
        (&[2, 2], 0, &[a, b], true),
        (&[2, 2], 2, &[a, b], true),
        (&[2, 2], 3, &[b, a], true),
        (&[1, 1], 3, &[a, b], true),
        (&[1, 2, 1], 3, &[b, &missing, a], true),
        (&[3, 1], 1, &[a, b], true),
    ];
    for (hosts, stage, at, are_sent) in placements {
        let resaved: Vec<TempDir> = hosts.iter().map(|_| folder()).collect();
        let (ranks, sent) = on_hosts(hosts, stage, |engine, host| {
            let loaded = engine.load_checkpoint(at[host], None, &LoadOptions::default())?.unwrap();
            assert_eq!((engine.global_steps(), &loaded.client_state["rank"]), (2, &json!(0)));
            engine.save_checkpoint(resaved[host].path(), Some("two"), Value::Null).map(drop)
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
        assert_eq!(sent > 0, are_sent, "{hosts:?} at stage {stage}");
        assert!(states(combined(&resaved).path(), "two") == expected, "{hosts:?} at stage {stage}");
    }
    // No temporary file remains.
    assert_eq!((names(a), names(&missing)), (names(b), vec![]));
}

#[test]
fn a_run_that_goes_on_has_the_bits_of_one_that_never_stopped_also_in_the_background() {
    let dirs = [folder(), folder()];
    let run = |from: u64| {
        let (ranks, _) = on_hosts(&[2, 2], 3, |engine, host| {
            let mut norms = vec![];
            if from > 0 {
                engine.load_checkpoint(dirs[host].path(), None, &LoadOptions::default())?.unwrap();
            }
            while engine.global_steps() < 6 {
                step(engine)?;
                norms.push(engine.global_grad_norm().unwrap().to_bits());
                if from == 0 && engine.global_steps() <= 3 {
                    let options = SaveOptions { in_background: true, keep: Some(2), ..SaveOptions::default() };
                    engine.save_checkpoint_with(dirs[host].path(), None, Value::Null, &options)?;
                }
            }
            Ok(norms)
        });
        ranks.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let uninterrupted = run(0);
    for dir in &dirs {
        assert_eq!(names(dir.path()), ["global_step2", "global_step3", "latest"]);
    }
    let after: Vec<_> = uninterrupted.iter().map(|norms| norms[3..].to_vec()).collect();
    assert_eq!(run(3), after);
}

/// Loads on the hosts that saved, and returns the steps or the errors of all ranks.
fn load(dirs: &[TempDir; 2], tag: Option<&str>) -> Vec<std::result::Result<u64, String>> {
    let (ranks, _) = on_hosts(&[2, 2], 3, |engine, host| {
        let loaded = engine.load_checkpoint(dirs[host].path(), tag, &LoadOptions::default());
        let steps = loaded.map(|loaded| loaded.map_or(0, |_| engine.global_steps())).map_err(|e| e.to_string());
        // The ranks are in step, whatever the result.
        step(engine)?;
        Ok(steps)
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

#[test]
fn a_tag_that_only_one_host_committed_is_passed_over() {
    for host in 0..2 {
        let dirs = save_on_two_hosts(3);
        // The folders are as if the job had died before the other host renamed its folder.
        let other = dirs[1 - host].path();
        std::fs::rename(other.join("two"), other.join(".candle-zero-saving-two")).unwrap();
        std::fs::write(other.join("latest"), "one").unwrap();
        assert_eq!(load(&dirs, None), [Ok(1), Ok(1), Ok(1), Ok(1)]);
        for text in load(&dirs, Some("two")) {
            let text = text.unwrap_err();
            assert!(text.contains("all hosts together have no complete copy"), "{text}");
        }
        // The next save can use the tag `two`.
        let (ranks, _) = on_hosts(&[2, 2], 3, |engine, host| {
            engine.load_checkpoint(dirs[host].path(), None, &LoadOptions::default())?.unwrap();
            step(engine)?;
            engine.save_checkpoint(dirs[host].path(), Some("two"), Value::Null).map(drop)
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
        assert_eq!(load(&dirs, None), [Ok(2), Ok(2), Ok(2), Ok(2)]);
        assert_eq!(names(other), ["latest", "one", "two"]);
    }
}

#[test]
fn a_host_whose_disk_lost_its_part_is_named() {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let host = host.trim();
    let errors_after = |lose: &dyn Fn(&[TempDir; 2])| {
        let dirs = save_on_two_hosts(3);
        lose(&dirs);
        let texts = load(&dirs, None);
        assert!(texts.iter().all(|text| text == &texts[0] || text.is_err()), "{texts:?}");
        texts.into_iter().map(Result::unwrap_err).collect::<Vec<_>>()
    };
    for text in errors_after(&|dirs| std::fs::remove_file(dirs[1].path().join("two").join(RANKS[3])).unwrap()) {
        let expected = format!(
            "all hosts together have no complete copy: no host has {} (written on host {host}); start ranks",
            RANKS[3]
        );
        assert!(text.contains(&expected), "{text}");
    }
    for text in errors_after(&|dirs| std::fs::remove_dir_all(dirs[1].path()).unwrap()) {
        let expected =
            format!("no host has {} (written on host {host}), {} (written on host {host})", RANKS[2], RANKS[3]);
        assert!(text.contains(&expected), "{text}");
        assert!(text.contains(&format!("host {host} (ranks 2 to 3) has no ")), "{text}");
    }
    for text in errors_after(&|dirs| std::fs::write(dirs[0].path().join("two/manifest.json"), "{}").unwrap()) {
        assert!(text.contains(&format!("host {host} (ranks 0 to 1) reports: ")), "{text}");
    }
    let texts = errors_after(&|dirs| {
        dirs.iter().for_each(|dir| std::fs::remove_file(dir.path().join("latest")).unwrap());
    });
    for rank in [0, 2] {
        assert!(texts[rank].contains("it has no file `latest`"), "{texts:?}");
    }
    // A file that is sent to the other host is damaged.
    let dirs = save_on_two_hosts(3);
    let path = dirs[0].path().join("two").join(RANKS[1]);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (ranks, _) = on_hosts(&[1, 1], 3, |engine, host| {
        let error = engine.load_checkpoint(dirs[host].path(), None, &LoadOptions::default()).unwrap_err();
        engine.load_checkpoint(dirs[host].path(), Some("one"), &LoadOptions::default())?.unwrap();
        Ok(error.to_string())
    });
    let texts: Vec<String> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(texts[0].contains(&path.display().to_string()) && texts[0].contains("are damaged"), "{texts:?}");
    assert!(texts[1].contains("rank 0 failed"), "{texts:?}");
}

#[test]
fn there_is_nothing_to_load_in_empty_folders() {
    assert_eq!(load(&[folder(), folder()], None), [Ok(0), Ok(0), Ok(0), Ok(0)]);
}

#[test]
fn a_host_that_cannot_write_keeps_the_others_from_committing() {
    let dirs = save_on_two_hosts(3);
    let file = dirs[1].path().join("a file");
    std::fs::write(&file, "").unwrap();
    let (ranks, _) = on_hosts(&[2, 2], 3, |engine, host| {
        let at = [dirs[0].path(), &file][host];
        let error = engine.save_checkpoint(at, Some("three"), Value::Null).unwrap_err().to_string();
        assert!(engine.check_save_dir(at).is_err());
        engine.check_save_dir(dirs[host].path())?;
        Ok(error)
    });
    for (rank, text) in ranks.into_iter().map(Result::unwrap).enumerate() {
        let expected = if rank == 2 { "cannot be written" } else { "rank 2 failed" };
        assert!(text.contains(expected), "{rank}: {text}");
    }
    assert_eq!(names(dirs[0].path()), ["latest", "one", "two"]);
}

#[test]
fn ranks_of_a_host_that_name_several_folders_are_told() {
    let dirs = [folder(), folder()];
    let (ranks, _) = on_hosts(&[2, 1], 3, |engine, _| {
        let dir = dirs[engine.rank() % 2].path();
        Ok(engine.save_checkpoint(dir, None, Value::Null).unwrap_err().to_string())
    });
    for text in ranks {
        assert!(text.unwrap().contains("ranks 1 and 0 are on one host but name different folders"));
    }
}

#[test]
fn hosts_that_see_one_folder_save_into_it_together() {
    let dir = folder();
    // The link is a different path to the same folder.
    let link = folder().path().join("link");
    std::fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let (ranks, sent) = on_hosts(&[2, 2], 3, |engine, host| {
        let at = [dir.path(), &link][host];
        step(engine)?;
        engine.save_checkpoint(at, Some("two"), Value::Null)?;
        engine.load_checkpoint(at, None, &LoadOptions::default())?.unwrap();
        Ok(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
    assert_eq!(sent, 0);
    assert_eq!(names(dir.path()), ["latest", "two"]);
    let checkpoint = Checkpoint::open(dir.path(), None).unwrap().unwrap();
    assert!(checkpoint.manifest().files.iter().all(|file| file.host.is_none()));
    std::fs::remove_dir_all(link.parent().unwrap()).unwrap();
}

#[test]
fn buffers_reach_hosts_that_have_no_file_of_them() {
    let dirs = [folder(), folder()];
    let settings = config(3, 1, json!({}), json!({"checkpoint": {"use_node_local_storage": true}}));
    let shape = convnet::Shape { units: true, checkpointed: false };
    let run = |saves: bool| {
        let ranks = threads::run(2, |inner| {
            let rank = inner.rank();
            let comm = Arc::new(HostCommunicator { inner, here: rank..rank + 1, pieces: AtomicUsize::new(0) });
            let mut engine = convnet::engine(comm, shape, &settings, |builder| builder)?;
            let dir = dirs[rank].path();
            if saves {
                convnet::steps(&mut engine, 0, 2)?;
                engine.save_checkpoint(dir, Some("T"), Value::Null)?;
            } else {
                engine.load_checkpoint(dir, None, &LoadOptions::default())?.unwrap();
            }
            Ok(engine.model().statistics())
        });
        ranks.unwrap().into_iter().map(Result::unwrap).collect::<Vec<Vec<f32>>>()
    };
    let saved = run(true);
    assert!(dirs[0].path().join("T/buffers.safetensors").exists());
    assert!(!dirs[1].path().join("T/buffers.safetensors").exists());
    // Rank 0's buffers are saved.
    assert_eq!(run(false), [saved[0].clone(), saved[0].clone()]);
}
