//! The lists that guide a newcomer are complete: the table of the sources and the indexes of the documents.

use crate::support::processes::repository;
use std::path::Path;

/// Returns the names that `select` returns for the entries of `folder`, a path relative to the repository.
fn names(folder: &str, select: impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let folder = repository().join(folder);
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().filter_map(|entry| select(&entry.unwrap().path())).collect();
    names.sort();
    names
}

fn text(file: &str) -> String {
    std::fs::read_to_string(repository().join(file)).unwrap()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

fn documents(path: &Path) -> Option<String> {
    let name = file_name(path);
    (name.ends_with(".md") && name != "README.md").then(|| format!("({name})"))
}

#[test]
fn the_list_names_every_source_and_document() {
    let folder = |path: &Path| path.is_dir().then(|| file_name(path));
    let mut folders: Vec<String> = names("src", folder).iter().map(|name| format!("`src/{name}/")).collect();
    for package in ["candle-zero-finetune", "zerorun"] {
        let of_package = names(&format!("crates/{package}/src"), folder);
        folders.extend(of_package.iter().map(|name| format!("`crates/{package}/src/{name}/")));
    }
    let lists = [
        ("docs/architecture.md", folders),
        ("docs/README.md", names("docs", documents)),
        ("docs/tools/README.md", names("docs/tools", documents)),
    ];
    for (file, names) in lists {
        let list = text(file);
        let missing: Vec<_> = names.iter().filter(|name| !list.contains(*name)).collect();
        assert!(names.len() > 5 && missing.is_empty(), "{file} does not mention {missing:?}");
    }
}
