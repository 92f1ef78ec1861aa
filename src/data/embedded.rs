//! The default data set: this project's own sources and documents, inside the library, so that a first training run
//! needs no file.

/// Reads each file at compile time. One path per line, sorted; a test compares the list with the work tree.
macro_rules! embed {
    ($($path:literal,)*) => {
        &[$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $path)))),*]
    };
}

/// Path and text of every embedded file.
#[rustfmt::skip]
pub(super) const FILES: &[(&str, &str)] = embed! {
    // begin of the list
    "src/bin/zerorun.rs",
    "src/cli.rs",
    "src/comm/mod.rs",
    "src/config/mod.rs",
    "src/config/resolved.rs",
    "src/data/embedded.rs",
    "src/data/loader.rs",
    "src/data/mod.rs",
    "src/data/sampler.rs",
    "src/data/tokens.rs",
    "src/engine.rs",
    "src/error.rs",
    "src/launch/mod.rs",
    "src/layout/mod.rs",
    "src/layout/stage.rs",
    "src/lib.rs",
    "src/models/mod.rs",
    "src/monitor/memory.rs",
    "src/monitor/metrics.rs",
    "src/monitor/mod.rs",
    "src/monitor/progress.rs",
    "src/nn/mod.rs",
    "src/optim/adam.rs",
    "src/optim/chunks.rs",
    "src/optim/mod.rs",
    "src/optim/schedule.rs",
    "src/optim/sgd.rs",
    "src/param/mod.rs",
    "src/precision/cast.rs",
    "src/precision/flat.rs",
    "src/precision/mod.rs",
    "src/precision/norm.rs",
    "src/precision/scaler.rs",
    "src/zero/mod.rs",
    "src/zero/unit.rs",
    // end of the list
};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const THIS_FILE: &str = "src/data/embedded.rs";
    const BEGIN: &str = "    // begin of the list\n";
    const END: &str = "    // end of the list\n";

    /// Collects the files with extension `ext` below `dir`, as paths relative to `root`.
    fn collect(root: &Path, dir: &Path, ext: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(root, &path, ext, found);
            } else if path.extension().is_some_and(|e| e == ext) {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/"));
            }
        }
    }

    /// With `UPDATE_EMBEDDED=1` in the environment the test mends the list.
    #[test]
    fn the_list_names_every_source_and_document() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut expected = vec![];
        collect(root, &root.join("src"), "rs", &mut expected);
        if root.join("docs").is_dir() {
            collect(root, &root.join("docs"), "md", &mut expected);
        }
        if root.join("README.md").is_file() {
            expected.push("README.md".into());
        }
        expected.sort();
        let listed: Vec<&str> = FILES.iter().map(|(path, _)| *path).collect();
        if std::env::var_os("UPDATE_EMBEDDED").is_some() && listed != expected {
            let text = fs::read_to_string(root.join(THIS_FILE)).unwrap();
            let (head, rest) = text.split_once(BEGIN).unwrap();
            let (_, tail) = rest.split_once(END).unwrap();
            let list: String = expected.iter().map(|path| format!("    {path:?},\n")).collect();
            fs::write(root.join(THIS_FILE), [head, BEGIN, &list, END, tail].concat()).unwrap();
            return;
        }
        assert_eq!(listed, expected, "run this test with UPDATE_EMBEDDED=1 to rewrite the list");
    }
}
