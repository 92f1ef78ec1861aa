//! Writes one CSV file per tag, as DeepSpeed's `csv_monitor` does.

use super::end_last_line;
use super::{Monitor, MonitorEvent};
use crate::files;
use crate::{Error, Result};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A monitor that appends to `FOLDER/TAG.csv`, with `/` and spaces in the tag replaced by `_`. The first line of a file
/// is `step,NAME`, where NAME is the tag's last component. A resumed run appends to the existing files.
#[derive(Debug)]
pub struct CsvMonitor {
    folder: PathBuf,
    /// The files that have been opened before.
    opened: HashSet<PathBuf>,
}

impl CsvMonitor {
    /// Creates a monitor that writes into `folder`, which is created if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder, or a file in it, cannot be created.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let probe = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
        probe.map_err(|source| Error::Io { action: "write to", path: folder.into(), source })?;
        Ok(Self { folder: folder.into(), opened: HashSet::new() })
    }

    fn append(&mut self, tag: &str, rows: &str) -> Result<()> {
        let path = self.folder.join(format!("{}.csv", file_stem(tag)));
        let mut write = || {
            if let Ok(metadata) = path.metadata() {
                files::check_regular_file(&metadata)?;
            }
            let mut file = OpenOptions::new().create(true).append(true).read(true).open(&path)?;
            let header = format!("step,{}\n", quote(tag.rsplit('/').next().unwrap_or(tag)));
            if !self.opened.contains(&path) {
                reject_foreign_file(&file, &header)?;
                end_last_line(&file)?;
                self.opened.insert(path.clone());
            }
            let header = if file.metadata()?.len() == 0 { header } else { String::new() };
            file.write_all((header + rows).as_bytes())
        };
        write().map_err(|source| Error::Io { action: "write", path: path.clone(), source })
    }
}

impl Monitor for CsvMonitor {
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
        events.iter().try_for_each(|MonitorEvent { tag, value, step }| self.append(tag, &format!("{step},{value:?}\n")))
    }
}

/// Rejects a file that begins neither with a header line nor with the part of one that a killed run left behind.
fn reject_foreign_file(file: &File, header: &str) -> std::io::Result<()> {
    let mut prefix = vec![0; header.len()];
    let read = file.read_at(&mut prefix, 0)?;
    // An earlier run may have written a different name, but the first column is always the step.
    if header.as_bytes().starts_with(&prefix[..read]) || prefix[..read].starts_with(b"step,") {
        return Ok(());
    }
    let text =
        "it is not a CSV file of this monitor, so it is left unchanged; give another folder, or remove this file";
    Err(std::io::Error::new(std::io::ErrorKind::AlreadyExists, text))
}

/// Converts a tag to a file name without `.csv`: at most 200 bytes, without a slash or a zero byte.
fn file_stem(tag: &str) -> String {
    let stem = tag.replace(['/', ' ', '\0'], "_");
    let end = (0..=stem.len().min(200)).rfind(|end| stem.is_char_boundary(*end)).unwrap_or(0);
    stem[..end].to_string()
}

/// Returns a field of a line, in quotes if it needs them.
fn quote(field: &str) -> String {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.into(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(dir: &tempfile::TempDir, file: &str) -> String {
        std::fs::read_to_string(dir.path().join(file)).unwrap()
    }

    #[test]
    fn a_file_has_one_header_and_a_run_that_goes_on_appends() {
        let dir = tempfile::tempdir().unwrap();
        for step in [8, 16] {
            let mut monitor = CsvMonitor::create(dir.path()).unwrap();
            monitor
                .write(&[
                    MonitorEvent::new("Train/Samples/lr", 1e-3, step),
                    MonitorEvent::new("Own, \"odd\"", 1.0, step),
                ])
                .unwrap();
        }
        assert_eq!(text(&dir, "Train_Samples_lr.csv"), "step,lr\n8,0.001\n16,0.001\n");
        assert_eq!(text(&dir, "Own,_\"odd\".csv"), "step,\"Own, \"\"odd\"\"\"\n8,1.0\n16,1.0\n");
    }

    #[test]
    fn what_a_full_disk_has_torn_is_written_anew_and_a_long_tag_has_a_file_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.csv"), "step,a\n8,0.5\n16,0.0").unwrap();
        std::fs::write(dir.path().join("b.csv"), "ste").unwrap();
        let long = "x".repeat(300);
        let mut monitor = CsvMonitor::create(dir.path()).unwrap();
        for tag in ["a", "b", &long] {
            monitor.write(&[MonitorEvent::new(tag, 0.25, 16)]).unwrap();
        }
        assert_eq!(text(&dir, "a.csv"), "step,a\n8,0.5\n16,0.25\n");
        assert_eq!(text(&dir, "b.csv"), "step,b\n16,0.25\n");
        assert!(text(&dir, &format!("{}.csv", "x".repeat(200))).ends_with("\n16,0.25\n"));
    }

    #[test]
    fn a_tag_leads_to_no_other_folder() {
        let dir = tempfile::tempdir().unwrap();
        let mut monitor = CsvMonitor::create(dir.path().join("in")).unwrap();
        monitor.write(&[MonitorEvent::new("../../x", f64::NAN, 1)]).unwrap();
        assert_eq!(text(&dir, "in/.._.._x.csv"), "step,x\n1,NaN\n");
    }
}
