//! Uploads checkpoints to a store in memory and downloads them; some transfers are interrupted, and some objects are
//! damaged.

use super::bucket::{ObjectBucket, objects, run};
use super::download::{choose, download};
use super::upload::CheckpointUpload;
use super::{UploadRequest, address};
use crate::checkpoint::folder::LATEST;
use crate::checkpoint::manifest::{MANIFEST, Manifest, Parameter, tests::manifest};
use crate::checkpoint::rank_file::RankFileWriter;
use crate::comm::agree::JointOperationFailure;
use crate::comm::threads;
use crate::error::Result;
use crate::files::{FolderLock, FolderLockOutcome};
use crate::precision::FlatRef;
use crate::zero::share::state_access::{WEIGHTS, pieces};
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const URL: &str = "s3://bucket/runs/one";

/// The number of elements of the only parameter, chosen so that the file of each of the two ranks is uploaded in two
/// parts.
const ELEMENTS: usize = 5_000_000;

struct Store(Arc<InMemory>);

impl Store {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn bucket(&self) -> ObjectBucket {
        ObjectBucket::new(self.0.clone(), Key::from("runs/one"), URL)
    }

    /// Sends the checkpoint in `folder` from both of its ranks.
    fn send(&self, folder: &Path) {
        self.send_results(folder).into_iter().for_each(|rank| rank.unwrap());
    }

    /// Sends the checkpoint from both ranks and returns the result of each.
    fn send_results(&self, folder: &Path) -> Vec<std::result::Result<(), String>> {
        let results = threads::run(2, |comm| {
            let ended = self.start(folder, comm.rank()).wait(&*comm);
            Ok(ended.map_err(|failure| match failure {
                JointOperationFailure::InStep(error) | JointOperationFailure::OutOfStep(error) => error.to_string(),
            }))
        });
        results.unwrap().into_iter().map(|rank| rank.unwrap()).collect()
    }

    fn start(&self, folder: &Path, rank: usize) -> CheckpointUpload {
        let request = UploadRequest { url: URL.into(), folder: folder.to_owned(), rank, piece: rank, is_latest: true };
        CheckpointUpload::start_in(self.bucket(), request).unwrap()
    }

    fn choose(&self, tag: Option<&str>) -> Result<Option<String>> {
        run(URL, async || choose(&self.bucket(), tag).await)
    }

    fn download(&self, tag: &str, dir: &Path) -> Result<FolderLock> {
        run(URL, async || download(&self.bucket(), tag, dir, false).await)
    }

    fn objects(&self, tag: &str) -> Vec<String> {
        run(URL, async || self.bucket().sizes(tag).await).unwrap().into_keys().collect()
    }

    fn put(&self, names: &[&str], bytes: &[u8]) {
        run(URL, async || self.bucket().put(names, bytes.to_vec()).await).unwrap();
    }

    fn get(&self, names: &[&str]) -> Vec<u8> {
        run(URL, async || self.bucket().get(names, u64::MAX).await).unwrap().unwrap()
    }
}

/// Saves a checkpoint of two ranks in `dir`.
fn save(dir: &Path, tag: &str, steps: u64) -> PathBuf {
    let folder = dir.join(tag);
    std::fs::create_dir_all(&folder).unwrap();
    let weights = Parameter {
        name: "w".into(),
        shape: vec![ELEMENTS],
        states: None,
        block: 0,
        updates_before: 0,
        state_lens: std::collections::BTreeMap::new(),
        pipeline_rank: 0,
        expert: None,
    };
    let mut saved = Manifest { global_steps: steps, world_size: 2, parameters: vec![weights], ..manifest(tag) };
    let layout = saved.layout();
    saved.files = (0..2)
        .map(|rank| {
            let states = [WEIGHTS.to_owned()];
            let mut file = RankFileWriter::create(&folder, &layout, &["w"], &states, rank).unwrap();
            for piece in pieces(&layout.shard(0, 0, rank)) {
                file.make_room(piece.len()).unwrap();
                let values: Vec<f32> = piece.map(|i| (i as u64 * 31 + steps) as f32).collect();
                file.append(FlatRef::F32(&values));
            }
            file.finish().unwrap()
        })
        .collect();
    std::fs::write(folder.join(MANIFEST), saved.to_text()).unwrap();
    folder
}

fn is_same(folder: &Path, other: &Path) -> bool {
    let files = || std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    files().count() == std::fs::read_dir(other).unwrap().count()
        && files().all(|name| std::fs::read(folder.join(&name)).unwrap() == std::fs::read(other.join(&name)).unwrap())
}

#[test]
fn a_checkpoint_comes_back_as_it_was_sent() {
    let (dir, target, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Store::new());
    assert_eq!(store.choose(None).unwrap(), None);
    let (one, two) = (save(dir.path(), "one", 1), save(dir.path(), "two", 2));
    store.send(&two);
    assert_eq!(store.choose(None).unwrap().as_deref(), Some("two"));
    // `latest` names the checkpoint that was sent last.
    store.send(&one);
    assert_eq!(store.choose(None).unwrap().as_deref(), Some("one"));
    store.download("two", target.path()).unwrap();
    assert!(is_same(&two, &target.path().join("two")));
    // One checkpoint is kept at a time, and damaged files are downloaded again.
    store.download("one", target.path()).unwrap();
    assert!(!target.path().join("two").exists());
    let file = target.path().join("one/rank_00001_of_00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    store.download("one", target.path()).unwrap();
    assert!(is_same(&one, &target.path().join("one")));
    // Another checkpoint of the same name replaces the first one completely.
    let other = save(&dir.path().join("other"), "one", 3);
    store.send(&other);
    store.download("one", target.path()).unwrap();
    assert!(is_same(&other, &target.path().join("one")));
    assert_eq!(store.objects("one").len(), 3);
}

#[test]
fn no_other_job_fetches_into_a_folder_until_what_came_is_loaded() {
    let (dir, target, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Store::new());
    store.send(&save(dir.path(), "one", 1));
    let is_free =
        || matches!(FolderLock::acquire(target.path(), std::time::Duration::ZERO).unwrap(), FolderLockOutcome::Held(_));
    let lock = store.download("one", target.path()).unwrap();
    assert!(!is_free());
    drop(lock);
    assert!(is_free());
}

#[test]
fn a_copy_that_was_cut_in_the_middle_is_not_taken_for_a_checkpoint() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Store::new());
    store.send(&save(dir.path(), "one", 1));
    // Rank 1 sends nothing, and rank 0's upload is abandoned.
    let two = save(dir.path(), "two", 2);
    let first = store.start(&two, 0);
    while store.objects("two").is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(first);
    assert_eq!(store.choose(None).unwrap().as_deref(), Some("one"));
    let problem = store.choose(Some("two")).unwrap_err().to_string();
    insta::assert_snapshot!(problem, @"the object store s3://bucket/runs/one cannot be used: two is incomplete: it has no manifest.json; give another tag");
    // An upload that stops in the middle of a file creates no object.
    let (stop, file) = (AtomicBool::new(false), two.join("rank_00001_of_00002.safetensors"));
    let bytes = file.metadata().unwrap().len();
    let send = async || {
        let on_progress = |_| stop.store(true, Ordering::Relaxed);
        store.bucket().put_file(&["two", "half"], (&file, bytes), &stop, on_progress).await
    };
    let problem = run(URL, send).unwrap_err().to_string();
    insta::assert_snapshot!(problem, @"the object store s3://bucket/runs/one cannot be used: stopped writing runs/one/two/half: another rank failed");
    assert_eq!(store.objects("two").len(), 1);
    // The next upload continues with the existing objects.
    store.send(&two);
    assert_eq!(store.choose(None).unwrap().as_deref(), Some("two"));
    // A checkpoint that `latest` names but that has lost a file is skipped.
    let manifest = Manifest::read(&two.join(MANIFEST)).unwrap();
    let (lost_object, _) = objects(&manifest).last().unwrap();
    let remove = async || {
        store.bucket().remove(&["two", &lost_object]).await;
        Ok(())
    };
    run(URL, remove).unwrap();
    assert_eq!(store.choose(None).unwrap().as_deref(), Some("one"));
    let problem = store.choose(Some("two")).unwrap_err().to_string();
    assert!(problem.contains(&format!("it lacks {lost_object}")), "{problem}");
    store.put(&["one", MANIFEST], b"{}");
    let problem = store.choose(None).unwrap_err().to_string();
    assert!(problem.contains("no checkpoint in it is complete (two: it lacks "), "{problem}");
    assert_eq!(store.get(&[LATEST]), b"two");
}

#[test]
fn an_object_that_is_damaged_is_named() {
    let (dir, target, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Store::new());
    let one = save(dir.path(), "one", 1);
    store.send(&one);
    let manifest = Manifest::read(&one.join(MANIFEST)).unwrap();
    let (object, _) = objects(&manifest).next().unwrap();
    let mut bytes = store.get(&["one", &object]);
    let at = bytes.len() - 9;
    bytes[at] ^= 1;
    store.put(&["one", &object], &bytes);
    let problem = store.download("one", target.path()).unwrap_err().to_string();
    assert!(problem.contains(&format!("cannot use runs/one/one/{object}: it is damaged there: ")), "{problem}");
    assert!(!target.path().join("one").join(MANIFEST).exists());
}

#[test]
fn a_file_that_cannot_be_sent_is_an_error_on_all_ranks() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Store::new());
    let one = save(dir.path(), "one", 1);
    std::fs::remove_file(one.join("rank_00001_of_00002.safetensors")).unwrap();
    let ended: Vec<String> = store.send_results(&one).into_iter().map(|rank| rank.unwrap_err()).collect();
    assert!(ended[0].contains("rank 1 failed"), "{ended:?}");
    assert!(ended[1].contains("cannot send") && ended[1].contains("rank_00001_of_00002"), "{ended:?}");
    assert_eq!(store.choose(None).unwrap_err().to_string().matches("it has no manifest.json").count(), 1);
}

#[test]
fn addresses_are_told_from_folders_and_what_is_none_is_refused() {
    assert_eq!(address(Path::new("s3://bucket/a/b")), Some("s3://bucket/a/b"));
    assert_eq!(address(Path::new("file:///mnt/a")), Some("file:///mnt/a"));
    for folder in ["ckpt", "/mnt/s3", "s3:/bucket"] {
        assert_eq!(address(Path::new(folder)), None, "{folder}");
    }
    for url in ["s3://", "s3:///a", "file://a", "gs://bucket/a", "bucket"] {
        let problem = super::check(url).unwrap_err().to_string();
        let text = "it is not the address of an object store; give s3://BUCKET/PREFIX, or file:///FOLDER";
        assert_eq!(problem, format!("the object store {url} cannot be used: {text}"));
    }
}
