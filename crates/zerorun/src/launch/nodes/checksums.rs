//! The checksums of the program, and of the files and folders that its arguments name. The launchers of a job's hosts
//! compare them.

use candle_zero::util::counted;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{BufReader, Read};
use std::path::Path;
use twox_hash::XxHash3_64;

/// The maximum number of bytes of a file that are checksummed.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// The maximum number of files in a folder that are compared, in the order of their paths.
const MAX_FILES: usize = 1000;
/// The size in bytes up to which the contents of a file in a folder are compared. For larger files, only the size is
/// compared.
const MAX_COMPARED_BYTES: u64 = 1 << 20;

/// Checksums by file name, as given on the command line or, for a file in a folder, relative to that folder.
pub(super) type FileChecksums = BTreeMap<String, String>;

/// Returns the checksums of the program and of the files that its arguments name.
pub(super) fn of_files(program: &Path, args: &[OsString]) -> FileChecksums {
    let files = possible_paths(args)
        .filter(|name| Path::new(name).is_file())
        .map(|name| (name.clone(), checksum(name.as_ref())));
    let program = [("the program".to_string(), checksum(program))];
    files
        .chain(program)
        .map(|(name, sum)| (name, sum.unwrap_or_else(|error| format!("unreadable ({error})"))))
        .collect()
}

/// Returns the folders that the arguments name, with the checksums of their files.
pub(super) fn of_folders(args: &[OsString]) -> BTreeMap<String, FileChecksums> {
    let folders = possible_paths(args).filter(|name| Path::new(name).is_dir());
    let sums = |name: String| {
        let (mut files, root) = (FileChecksums::new(), Path::new(&name).to_path_buf());
        add_files(&root, "", &mut files);
        (name, files)
    };
    folders.map(sums).collect()
}

/// Returns the words of a command line that may name a file, including those after `--flag=`.
fn possible_paths(args: &[OsString]) -> impl Iterator<Item = String> {
    args.iter().map(|word| {
        let word = word.to_string_lossy();
        word.split_once('=').filter(|(flag, _)| flag.starts_with('-')).map_or(&*word, |(_, name)| name).to_string()
    })
}

/// Adds the files below a folder, up to [`MAX_FILES`], without hidden files and folders and without links to folders.
fn add_files(folder: &Path, prefix: &str, checksums: &mut FileChecksums) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut names: Vec<OsString> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    for name in names.iter().filter(|name| !name.to_string_lossy().starts_with('.')) {
        let (path, name) = (folder.join(name), format!("{prefix}{}", name.to_string_lossy()));
        let Ok(kind) = fs::symlink_metadata(&path) else { continue };
        if checksums.len() >= MAX_FILES {
            return;
        }
        if kind.is_dir() {
            add_files(&path, &format!("{name}/"), checksums);
        } else if let Ok(metadata) = fs::metadata(&path)
            && metadata.is_file()
        {
            let bytes = metadata.len();
            let sum = if bytes <= MAX_COMPARED_BYTES { checksum(&path) } else { Ok(counted(bytes, "byte")) };
            checksums.insert(name, sum.unwrap_or_else(|error| format!("unreadable ({error})")));
        }
    }
}

/// Returns the size and the checksum of a file. Only the beginning of a very long file is read.
fn checksum(path: &Path) -> std::io::Result<String> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let (mut hash, mut reader, mut buffer) =
        (XxHash3_64::new(), BufReader::new(file).take(MAX_FILE_BYTES), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(format!("{} with checksum {:x}", counted(bytes, "byte"), hash.finish())),
            read => hash.write(&buffer[..read]),
        }
    }
}

/// Describes the first file that differs between the folders of two hosts, each given with the host's name.
pub(super) fn difference([(on_a, a), (on_b, b)]: [(&str, &FileChecksums); 2]) -> Option<String> {
    let name = a.keys().chain(b.keys()).filter(|name| a.get(*name) != b.get(*name)).min()?;
    let describe = |sums: &FileChecksums| sums.get(name).map_or("missing".to_string(), Clone::clone);
    Some(format!("{name} is {} on {on_a} and {} on {on_b}", describe(a), describe(b)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_compared_file_by_file_up_to_a_number() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let write = |at: usize, name: &str, text: &str| {
            let path = folders[at].path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let sums = |at: usize| {
            let all = of_folders(&[format!("--data={}", folders[at].path().display()).into(), "--steps".into()]);
            assert_eq!(all.len(), 1);
            all.into_values().next().unwrap()
        };
        for at in 0..2 {
            write(at, "part/b.txt", "to be");
            write(at, "c.txt", "or not");
            write(at, ".hidden", &at.to_string());
        }
        assert_eq!(sums(0).keys().collect::<Vec<_>>(), ["c.txt", "part/b.txt"]);
        let difference = || difference([("x", &sums(0)), ("y", &sums(1))]);
        assert_eq!(difference(), None);
        write(1, "part/b.txt", "to bE");
        let message = difference().unwrap();
        assert!(
            message.starts_with("part/b.txt is 5 bytes with checksum ") && message.contains(" on x and 5 bytes "),
            "{message}"
        );
        write(0, "a.txt", "");
        let message = difference().unwrap();
        assert!(
            message.starts_with("a.txt is 0 bytes with checksum ") && message.ends_with(" on x and missing on y"),
            "{message}"
        );
        (0..MAX_FILES).for_each(|i| write(0, &format!("many/{i:04}"), ""));
        assert_eq!(sums(0).len(), MAX_FILES);
    }
}
