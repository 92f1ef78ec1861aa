//! `zerorun report` says what the system says.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::Value;

#[test]
fn the_report_has_what_the_system_says() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = zerorun().arg("report").arg(folder.path()).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["cores"], std::thread::available_parallelism().unwrap().get());
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")).unwrap();
    assert_eq!(report["memory"]["total"], total.parse::<u64>().unwrap() * 1024);
    assert!(report["memory"]["available"].as_u64().unwrap() <= report["memory"]["total"].as_u64().unwrap());
    let free = report["disk"]["free"].as_u64().unwrap();
    let now = rustix::fs::statvfs(folder.path()).unwrap();
    // Others write meanwhile.
    assert!(free.abs_diff(now.f_bavail * now.f_frsize) < 20 << 30, "{free}");
    #[cfg(target_arch = "x86_64")]
    for (name, found) in [("avx2", is_x86_feature_detected!("avx2")), ("avx512f", is_x86_feature_detected!("avx512f"))]
    {
        assert_eq!(report["simd"].as_array().unwrap().contains(&name.into()), found, "{name}");
    }
    assert_eq!(report["features"].as_array().unwrap().contains(&"cuda".into()), cfg!(feature = "cuda"));
    assert!(report["verdicts"].as_array().unwrap().len() >= 5);
    // Nothing stays behind.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_text_has_a_line_of_each_and_memory_is_no_disk() {
    let output = zerorun().arg("report").arg("/dev/shm").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for start in ["candle-zero ", "system ", "processor ", "simd ", "memory ", "disk ", "gpu ", "- "] {
        assert!(text.lines().any(|line| line.starts_with(start)), "{start}: {text}");
    }
    assert!(text.contains("the folder lies in memory"), "{text}");
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let output = zerorun().args(["report", "/no/such/folder"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/no/such/folder"), "{}", stderr(&output));
}
