//! `zerorun report` matches what the system reports.

use crate::support::cluster::Mpi;
use crate::support::processes::{stderr, stdout, zerorun};
use crate::support::skips::skipped_in_part;
use candle_core::{DType, Device, Tensor};
use candle_zero::nn::{WeightLayout, linear};
use candle_zero::{Engine, Error};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;

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
    // Other processes may write to the disk between the two queries.
    assert!(free.abs_diff(now.f_bavail * now.f_frsize) < 20 << 30, "{free}");
    #[cfg(target_arch = "x86_64")]
    for (name, found) in [("avx2", is_x86_feature_detected!("avx2")), ("avx512f", is_x86_feature_detected!("avx512f"))]
    {
        assert_eq!(report["simd"].as_array().unwrap().contains(&name.into()), found, "{name}");
    }
    assert_eq!(report["features"].as_array().unwrap().contains(&"cuda".into()), cfg!(feature = "cuda"));
    assert!(report["verdicts"].as_array().unwrap().len() >= 5);
    // Nothing is left behind.
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
    assert!(text.contains("the folder is in memory"), "{text}");
}

/// The SIMD levels, narrowest first.
const LEVELS: [&str; 3] = ["portable", "avx2", "avx512"];

fn report_at(level: &str) -> std::process::Output {
    zerorun().args(["report", "--json"]).env("CANDLE_ZERO_SIMD", level).output().unwrap()
}

/// Returns the level in use, and those that this processor supports.
fn level_of(output: &std::process::Output) -> (String, Vec<String>) {
    assert!(output.status.success(), "{}", stderr(output));
    let report: Value = serde_json::from_str(&stdout(output)).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let level = &report["simd_level"];
    (text(&level["name"]), level["available"].as_array().unwrap().iter().map(text).collect())
}

#[test]
fn the_level_of_the_kernels_is_the_best_unless_one_is_forced() {
    let (best, available) = level_of(&report_at("auto"));
    assert_eq!(best, available[0], "widest first");
    assert_eq!(available.last().unwrap(), "portable", "every processor has it");
    assert_eq!(level_of(&report_at("")).0, best);
    for level in &available {
        assert_eq!(level_of(&report_at(level)), (level.clone(), available.clone()));
        let text = stdout(&zerorun().arg("report").env("CANDLE_ZERO_SIMD", level).output().unwrap());
        let all = available.join(", ");
        let line = format!("simd level   {level} (CANDLE_ZERO_SIMD={level}; this processor has {all})");
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

#[test]
fn a_level_that_is_not_there_is_refused_with_those_that_are() {
    let (_, available) = level_of(&report_at("auto"));
    let allowed = format!("{} or auto", available.join(", "));
    let unsupported = LEVELS.iter().filter(|level| !available.iter().any(|has| has == *level));
    let unsupported = unsupported.map(|level| (*level, "which this processor does not support; use"));
    for (level, why) in unsupported.chain([("sse9", "which is not a SIMD level; use")]) {
        let expected = format!("zerorun: environment variable CANDLE_ZERO_SIMD is `{level}`, {why} {allowed}\n");
        for words in [vec!["report"], vec!["-n", "2", "no_such_script.rs"]] {
            let output = zerorun().args(&words).env("CANDLE_ZERO_SIMD", level).output().unwrap();
            assert_eq!((output.status.code(), stderr(&output)), (Some(2), expected.clone()), "{words:?}");
        }
    }
}

#[test]
fn an_engine_and_a_layer_without_one_refuse_a_wrong_level() {
    const TEST: &str = "an_engine_and_a_layer_without_one_refuse_a_wrong_level";
    const MESSAGE: &str = "environment variable CANDLE_ZERO_SIMD is `sse9`, which is not a SIMD level";
    if std::env::var("CANDLE_ZERO_SIMD").as_deref() != Ok("sse9") {
        // The level is read once per process, so this test runs again in another process.
        let program = std::env::current_exe().unwrap();
        let output = std::process::Command::new(program).arg(TEST).env("CANDLE_ZERO_SIMD", "sse9").output().unwrap();
        assert!(output.status.success() && stdout(&output).contains("1 passed"), "{}", stdout(&output));
        return;
    }
    let config = json!({"train_batch_size": 1});
    let built = Engine::initialize(|vb| candle_nn::linear(2, 2, vb), config).map(|_| ());
    let error = built.unwrap_err();
    assert!(matches!(error, Error::Kernel(_)) && error.to_string().starts_with(MESSAGE), "{error}");
    let x = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
    let error = linear(&x, &x, None, WeightLayout::InOut).unwrap_err();
    assert!(error.to_string().contains(MESSAGE), "{error}");
}

#[test]
fn ranks_at_different_levels_are_told_apart() {
    const TEST: &str = "ranks_at_different_levels_are_told_apart";
    if std::env::var_os("RANK").is_some() {
        // This process is a rank of the job below.
        let built = Engine::initialize(|vb| candle_nn::linear(2, 2, vb), json!({"train_batch_size": 2}));
        let error = built.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("uses the SIMD level"), "{error}");
        return;
    }
    let (best, _) = level_of(&report_at("auto"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let script = folder.path().join("ranks");
    let program = std::env::current_exe().unwrap();
    let text =
        format!("#!/bin/sh\n[ $RANK = 1 ] && export CANDLE_ZERO_SIMD=portable\nexec '{}' {TEST}\n", program.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = zerorun().env("CANDLE_ZERO_SIMD", "auto").args(["-n", "2"]).arg(&script).output().unwrap();
    // If the best level is the portable one, the ranks agree, and neither finds an error.
    assert_eq!(output.status.success(), best != "portable", "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let output = zerorun().args(["report", "/no/such/folder"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/no/such/folder"), "{}", stderr(&output));
}

#[test]
fn the_mpi_library_is_named_or_said_to_be_missing() {
    let report_with =
        |library: &str| stdout(&zerorun().arg("report").env("CANDLE_ZERO_MPI_LIBRARY", library).output().unwrap());
    let text = report_with("/no/such/libmpi.so");
    // The row includes its continuation lines, none of which a terminal wraps.
    let line = |text: &str| {
        let from = text.lines().skip_while(|line| !line.starts_with("mpi "));
        let row: Vec<&str> =
            from.enumerate().take_while(|(at, l)| *at == 0 || l.starts_with(' ')).map(|l| l.1).collect();
        assert!(row.iter().all(|line| line.chars().count() <= 100), "{row:?}");
        row.iter().map(|line| line.trim_start()).collect::<Vec<_>>().join(" ")
    };
    insta::assert_snapshot!(line(&text), @"mpi          none (tried /no/such/libmpi.so from CANDLE_ZERO_MPI_LIBRARY (/no/such/libmpi.so: cannot open shared object file: No such file or directory))");
    assert!(text.contains("no usable MPI library: ranks run only on this host"), "{text}");
    insta::assert_snapshot!(line(&report_with("libc.so.6")), @"mpi          none (libc.so.6 has no MPI_Init_thread: it is not an MPI library that this program can use; use MPICH, Intel MPI, or Open MPI 4 or later)");
    match Mpi::Mpich.library() {
        Some(library) => {
            let library = library.display().to_string();
            let text = report_with(&library);
            assert!(
                text.split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
                    .contains(&format!(" mpi {library} (MPICH Version: ")),
                "{text}"
            );
        }
        None => {
            skipped_in_part(the_mpi_library_is_named_or_said_to_be_missing, "no MPICH; scripts/fetch_mpi.sh fetches it")
        }
    }
}
