//! Determines the kind of the named file: a program, a target of the cargo package around it, or a single file that
//! becomes a package. A name without a slash that is not a file in the current folder is a program on the `PATH`.

use super::cargo_build::{CargoBuild, CargoTargetKind};
use super::frontmatter::{self, ScriptParts};
use crate::error::{Error, LaunchError, Result};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The program to start.
#[derive(Debug)]
pub(crate) enum ScriptTarget {
    /// An executable, started directly.
    Program {
        /// The absolute path, so that `PATH` cannot lead to another program.
        path: PathBuf,
    },
    /// An example or binary of the package that contains the file.
    InPackage(PackageTarget),
    /// A single-file script.
    Single(SingleFileScript),
}

/// A target of an existing package.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PackageTarget {
    /// The folder of the package's Cargo.toml.
    pub(super) manifest_dir: PathBuf,
    pub(super) kind: CargoTargetKind,
    /// Cargo's name for the target.
    pub(super) name: String,
}

/// A single file that becomes a package.
#[derive(Debug)]
pub(crate) struct SingleFileScript {
    /// The path as typed.
    pub(super) given_path: PathBuf,
    /// The absolute path, without symbolic links.
    pub(super) path: PathBuf,
    pub(super) parts: ScriptParts,
}

/// Determines the kind of a file.
pub(crate) fn find(given_path: &Path) -> Result<ScriptTarget> {
    let read = |source| Error::Io { action: "read", path: given_path.to_path_buf(), source };
    let metadata = match std::fs::metadata(given_path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return match on_path(given_path, &std::env::var_os("PATH").unwrap_or_default()) {
                Some(path) => Ok(ScriptTarget::Program { path }),
                None => Err(not_found(given_path)),
            };
        }
        Err(error) => return Err(read(error)),
    };
    let not_startable = |found: &str| {
        Error::from(LaunchError::NotStartable {
            path: given_path.to_path_buf(),
            found: found.to_string(),
            fix: "give a Rust file (.rs) or an executable".to_string(),
        })
    };
    if !metadata.is_file() {
        return Err(not_startable(if metadata.is_dir() { "it is a folder" } else { "it is not a regular file" }));
    }
    if !is_rust(given_path) {
        if metadata.permissions().mode() & 0o111 == 0 {
            return Err(not_startable("its name does not end in .rs, and it is not executable"));
        }
        return Ok(ScriptTarget::Program { path: std::path::absolute(given_path).map_err(read)? });
    }
    let path = std::fs::canonicalize(given_path).map_err(read)?;
    let text = std::fs::read_to_string(&path).map_err(read)?;
    let parts = frontmatter::split(&text).map_err(|problem| LaunchError::Frontmatter {
        path: given_path.to_path_buf(),
        line: problem.line,
        problem: problem.found,
        fix: problem.fix,
    })?;
    // Stable rustc refuses a frontmatter, so a file that has one cannot be a target of the package around it.
    if parts.manifest.is_none()
        && let Some(in_package) = in_package(&path)
    {
        return Ok(ScriptTarget::InPackage(in_package));
    }
    Ok(ScriptTarget::Single(SingleFileScript { given_path: given_path.to_path_buf(), path, parts }))
}

/// Returns whether a name is looked up in `PATH`, as a shell does for a name without a slash. A Rust file is never
/// looked up there.
fn is_bare(given_path: &Path) -> bool {
    let is_plain_name = |name: &OsStr| name == given_path.as_os_str();
    let bare = given_path.components().count() == 1 && given_path.file_name().is_some_and(is_plain_name);
    bare && !is_rust(given_path)
}

fn is_rust(given_path: &Path) -> bool {
    given_path.extension().is_some_and(|extension| extension == "rs")
}

/// Returns the first executable of this name in the folders of a `PATH`.
fn on_path(given_path: &Path, path: &OsStr) -> Option<PathBuf> {
    let is_program = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    // An empty entry stands for the current folder, where the file does not exist.
    let folders = std::env::split_paths(path).filter(|folder| is_bare(given_path) && !folder.as_os_str().is_empty());
    std::path::absolute(folders.map(|folder| folder.join(given_path)).find(is_program)?).ok()
}

fn not_found(given_path: &Path) -> Error {
    let mut with_ending = given_path.as_os_str().to_owned();
    with_ending.push(".rs");
    let with_ending = PathBuf::from(with_ending);
    let example = Path::new("examples").join(if given_path.extension().is_some() { given_path } else { &with_ending });
    let fix = match [with_ending, example].into_iter().find(|path| path.is_file()) {
        Some(path) => format!("did you mean {}?", path.display()),
        None => "give a Rust file (.rs) or an executable".to_string(),
    };
    let found = match is_bare(given_path) {
        true => "there is no such file here and no program with that name on the PATH",
        false => "there is no such file",
    };
    LaunchError::NotStartable { path: given_path.to_path_buf(), found: found.to_string(), fix }.into()
}

/// Returns the target that `path` (absolute, without symbolic links) belongs to in the nearest package around it,
/// according to cargo's rules for the locations of targets and the manifest's own `path` keys.
fn in_package(path: &Path) -> Option<PackageTarget> {
    for dir in path.ancestors().skip(1) {
        let Ok(text) = std::fs::read_to_string(dir.join("Cargo.toml")) else { continue };
        // If the manifest does not parse, cargo reports this during the build. Until then, the usual locations apply.
        let manifest: Option<toml::Table> = text.parse().ok();
        let package = manifest.as_ref().and_then(|manifest| manifest.get("package")?.as_table());
        if manifest.is_some() && package.is_none() {
            continue; // This is a workspace without a root package.
        }
        let (kind, name) = named_target(manifest.as_ref(), dir, path).or_else(|| usual_target(package, dir, path))?;
        return Some(PackageTarget { manifest_dir: dir.to_path_buf(), kind, name });
    }
    None
}

/// Returns a `[[bin]]` or `[[example]]` with this file as its `path`.
fn named_target(manifest: Option<&toml::Table>, dir: &Path, path: &Path) -> Option<(CargoTargetKind, String)> {
    for (key, kind) in [("example", CargoTargetKind::Example), ("bin", CargoTargetKind::Bin)] {
        for target in manifest?.get(key).and_then(toml::Value::as_array).into_iter().flatten() {
            let target_path = target.get("path").and_then(toml::Value::as_str);
            let target_path = target_path.and_then(|target_path| std::fs::canonicalize(dir.join(target_path)).ok());
            if target_path.is_some_and(|target_path| target_path == path) {
                return Some((kind, target.get("name")?.as_str()?.to_string()));
            }
        }
    }
    None
}

/// Returns the target of a file in a location where cargo finds targets automatically.
fn usual_target(package: Option<&toml::Table>, dir: &Path, path: &Path) -> Option<(CargoTargetKind, String)> {
    let relative = path.strip_prefix(dir).ok()?;
    let words: Vec<&str> = relative.iter().map(|word| word.to_str()).collect::<Option<_>>()?;
    let stem = |file: &str| file.strip_suffix(".rs").map(str::to_string);
    let (kind, switch, name) = match words[..] {
        ["examples", file] => (CargoTargetKind::Example, "autoexamples", stem(file)?),
        ["examples", name, "main.rs"] => (CargoTargetKind::Example, "autoexamples", name.to_string()),
        ["src", "main.rs"] => (CargoTargetKind::Bin, "autobins", package?.get("name")?.as_str()?.to_string()),
        ["src", "bin", file] => (CargoTargetKind::Bin, "autobins", stem(file)?),
        ["src", "bin", name, "main.rs"] => (CargoTargetKind::Bin, "autobins", name.to_string()),
        _ => return None,
    };
    let switched_off = package.and_then(|package| package.get(switch)?.as_bool()) == Some(false);
    (!switched_off).then_some((kind, name))
}

impl PackageTarget {
    /// Returns the build of this target, in its package's own target folder.
    pub(crate) fn into_build(self, given_path: &Path, features: Option<&str>) -> CargoBuild {
        CargoBuild {
            script: given_path.to_path_buf(),
            package_dir: self.manifest_dir,
            target_dir: None,
            kind: self.kind,
            name: self.name,
            features: features.map(str::to_string),
            missing_source: None,
            printed_path: None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn package(manifest: &str, files: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::write(root.join("Cargo.toml"), manifest).unwrap();
        for file in files {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "fn main() {}\n").unwrap();
        }
        (dir, root)
    }

    const PLAIN: &str = "[package]\nname = \"outer\"\n";

    #[test]
    fn files_where_cargo_looks_are_targets_of_the_package() {
        let (_dir, root) = package(PLAIN, &[]);
        for (file, kind, name) in [
            ("examples/gpt.rs", CargoTargetKind::Example, "gpt"),
            ("examples/big/main.rs", CargoTargetKind::Example, "big"),
            ("src/main.rs", CargoTargetKind::Bin, "outer"),
            ("src/bin/tool.rs", CargoTargetKind::Bin, "tool"),
        ] {
            let found = in_package(&root.join(file)).unwrap();
            assert_eq!(found, PackageTarget { manifest_dir: root.clone(), kind, name: name.to_string() });
        }
        for file in ["train.rs", "scripts/train.rs", "examples/big/helper.rs", "examples/a/b/main.rs"] {
            assert_eq!(in_package(&root.join(file)), None, "{file}");
        }
    }

    #[test]
    fn the_manifests_own_paths_and_switches_count() {
        let manifest = "[package]\nname = \"outer\"\nautoexamples = false\n\
                        [[example]]\nname = \"special\"\npath = \"runs/train.rs\"\n";
        let (_dir, root) = package(manifest, &["runs/train.rs", "examples/gpt.rs"]);
        assert_eq!(in_package(&root.join("runs/train.rs")).unwrap().name, "special");
        assert_eq!(in_package(&root.join("examples/gpt.rs")), None);
    }

    #[test]
    fn the_nearest_package_decides_and_a_bare_workspace_is_none() {
        let (_dir, root) = package(PLAIN, &["examples/inner/examples/gpt.rs"]);
        std::fs::write(root.join("examples/inner/Cargo.toml"), PLAIN).unwrap();
        let found = in_package(&root.join("examples/inner/examples/gpt.rs")).unwrap();
        assert_eq!(found.manifest_dir, root.join("examples/inner"));
        let (_dir, root) = package("[workspace]\n", &["examples/gpt.rs"]);
        assert_eq!(in_package(&root.join("examples/gpt.rs")), None);
    }

    #[test]
    fn a_name_without_a_slash_is_looked_up_in_the_path_as_a_shell_does() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        for folder in [&first, &second] {
            std::fs::create_dir(folder).unwrap();
            for name in ["train", "train.rs"] {
                std::fs::write(folder.join(name), "").unwrap();
            }
        }
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        for name in ["train", "train.rs"] {
            std::fs::set_permissions(second.join(name), Clone::clone(&executable)).unwrap();
        }
        let path = std::env::join_paths([Path::new(""), &first, &second]).unwrap();
        // The first file is not executable.
        assert_eq!(on_path(Path::new("train"), &path), Some(second.join("train")));
        for name in ["train.rs", "./train", "second/train", "second", ".", ".."] {
            assert_eq!(on_path(Path::new(name), &path), None, "{name}");
        }
    }

    #[test]
    fn a_file_with_a_manifest_of_its_own_is_a_package_of_its_own() {
        let (_dir, root) = package(PLAIN, &["examples/plain.rs"]);
        std::fs::write(root.join("examples/own.rs"), "---\n---\nfn main() {}\n").unwrap();
        assert!(matches!(find(&root.join("examples/plain.rs")).unwrap(), ScriptTarget::InPackage(_)));
        assert!(matches!(find(&root.join("examples/own.rs")).unwrap(), ScriptTarget::Single(_)));
    }
}
