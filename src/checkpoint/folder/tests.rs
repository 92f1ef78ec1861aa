//! Tests of the folder of checkpoints.

use super::super::manifest::tests::manifest;
use super::*;

/// Writes a folder with a manifest of `tag`, as a finished save leaves it.
fn put(dir: &Path, folder: &Path, tag: &str, steps: u64) {
    std::fs::create_dir_all(folder).unwrap();
    let manifest = Manifest { global_steps: steps, ..manifest(tag) };
    std::fs::write(folder.join(MANIFEST), manifest.to_text()).unwrap();
    assert!(folder.starts_with(dir));
}

fn steps(dir: &Path, tag: &str) -> u64 {
    Manifest::read(&find_tag_folder(dir, tag).unwrap().join(MANIFEST)).unwrap().global_steps
}

#[test]
fn without_locks_only_what_a_dead_process_of_this_system_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let without_locks = |_: &File| Err(Errno::NOLCK);
    let this = OwnerProcess::this().unwrap();
    assert_eq!(OwnerProcess::of_text(&this.to_text()), OwnerProcess::this());
    let put = |tag: &str, owner: Option<OwnerProcess>| {
        std::fs::create_dir(unfinished_path(dir, tag)).unwrap();
        owner
            .iter()
            .for_each(|owner| std::fs::write(unfinished_path(dir, tag).join(OWNER_FILE), owner.to_text()).unwrap());
    };
    put("living", None);
    record_owner(&unfinished_path(dir, "living"), Err(Errno::NOLCK)).unwrap();
    put("dead", Some(OwnerProcess { pid: this.pid, start_time: "1".into(), system: this.system.clone() }));
    put("unknown", None);
    put("elsewhere", Some(OwnerProcess { pid: this.pid, start_time: "1".into(), system: "other/pid:[1]".into() }));
    std::fs::write(dir.join(format!("{VISIBILITY_PREFIX}x")), "").unwrap();
    let remaining = || {
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| {
                entry.unwrap().file_name().to_string_lossy().replace(SAVING_PREFIX, "").replace(VISIBILITY_PREFIX, "")
            })
            .collect();
        names.sort();
        names
    };
    clear_by(dir, without_locks).unwrap();
    assert_eq!(remaining(), ["elsewhere", "living", "unknown", "x"]);
    // A complete checkpoint contains no trace of its writer.
    give_final_name(dir, "living", None).unwrap();
    assert_eq!(std::fs::read_dir(dir.join("living")).unwrap().count(), 0);
    // With locks, anything that is not locked counts as abandoned.
    clear(dir).unwrap();
    assert_eq!(remaining(), ["living"]);
}

#[test]
fn a_checkpoint_is_replaced_where_names_cannot_be_exchanged() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    put(dir, &dir.join("T"), "T", 1);
    put(dir, &unfinished_path(dir, "T"), "T", 2);
    replace(dir, "T").unwrap();
    assert_eq!((tags(dir), steps(dir, "T")), (vec!["T".to_string()], 2));
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1);
}

#[test]
fn what_a_job_that_died_while_it_replaced_a_checkpoint_left_loads_and_is_put_right() {
    for old in [format!("{REPLACED_PREFIX}T"), "T.replaced".to_string()] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        // The job died between the two renames.
        put(dir, &dir.join(&old), "T", 1);
        put(dir, &unfinished_path(dir, "T"), "T", 2);
        assert_eq!(tags(dir), Vec::<String>::new(), "{old}");
        if old.starts_with('.') {
            assert_eq!(steps(dir, "T"), 1);
        }
        drop(begin(dir, "other").unwrap());
        assert_eq!((tags(dir), steps(dir, "T")), (vec!["T".to_string()], 1), "{old}");
        // The job died before the old one was removed.
        put(dir, &dir.join(&old), "T", 0);
        assert_eq!(tags(dir), ["T"]);
        put(dir, &unfinished_path(dir, "T"), "T", 3);
        replace(dir, "T").unwrap();
        drop(begin(dir, "other").unwrap());
        assert_eq!((tags(dir), steps(dir, "T"), dir.join(&old).exists()), (vec!["T".to_string()], 3, false));
    }
    // A user's tag with this suffix is a normal tag.
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &dir.path().join("T.replaced"), "T.replaced", 1);
    assert_eq!(tags(dir.path()), ["T.replaced"]);
}

#[test]
fn the_first_checkpoint_of_a_run_that_died_before_it_was_the_latest_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let leave_unpublished = |tag: &str| new_latest(dir, tag).unwrap().keep().map(drop).unwrap();
    leave_unpublished("T");
    assert_eq!(latest(dir).unwrap(), None);
    put(dir, &dir.join("T"), "T", 1);
    assert_eq!(latest(dir).unwrap().as_deref(), Some("T"));
    // `latest` also appears when another run begins to save and dies.
    drop(begin(dir, "other").unwrap());
    assert_eq!(std::fs::read_to_string(dir.join(LATEST)).unwrap(), "T");
    leave_unpublished("T");
    std::fs::write(dir.join(LATEST), "elsewhere").unwrap();
    drop(begin(dir, "other").unwrap());
    assert_eq!(latest(dir).unwrap().as_deref(), Some("elsewhere"));
    assert_eq!(almost_latest(dir), None);
}
