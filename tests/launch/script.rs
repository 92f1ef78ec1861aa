//! `zerorun` with Rust files: generated packages, rustc's messages, examples of a package.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::processes::{stderr, stdout, zerorun};
use crate::support::skips::skipped;

/// The beginning of a script, with a manifest that ends on line 5. The script has no dependencies, so it compiles
/// quickly.
const HEAD: &str = "#!/usr/bin/env zerorun\n---\n[package]\nedition = \"2024\"\n---\n";

fn in_dir(dir: &Path) -> Command {
    let mut command = zerorun();
    command.current_dir(dir).env("ZERORUN_CACHE_DIR", dir.join("cache"));
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    in_dir(dir).args(args).output().unwrap()
}

#[test]
fn a_script_is_built_and_runs_on_every_rank_and_a_second_start_compiles_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let code = "fn main() {\n    let args: Vec<String> = std::env::args().skip(1).collect();\n    \
                println!(\"{args:?} at {}:{}\", file!(), line!());\n}\n";
    std::fs::write(dir.path().join("train.rs"), format!("{HEAD}{code}")).unwrap();
    let first = run(dir.path(), &["-n", "2", "train.rs", "--steps", "3"]);
    assert_eq!(first.status.code(), Some(0), "{}", stderr(&first));
    let mut lines: Vec<String> = stdout(&first).lines().map(str::to_string).collect();
    lines.sort();
    let line = r#"["--steps", "3"] at train.rs:8"#;
    assert_eq!(lines, [format!("[rank 0] {line}"), format!("[rank 1] {line}")]);
    assert!(stderr(&first).contains("Compiling train-"), "{}", stderr(&first));

    let second = run(dir.path(), &["train.rs"]);
    assert_eq!(stdout(&second), "[] at train.rs:8\n");
    assert!(!stderr(&second).contains("Compiling"), "{}", stderr(&second));

    std::fs::write(dir.path().join("train.rs"), format!("{HEAD}fn main() {{ println!(\"changed\") }}\n")).unwrap();
    assert_eq!(stdout(&run(dir.path(), &["train.rs"])), "changed\n");
}

#[test]
fn two_scripts_of_one_name_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        let script = format!("{HEAD}fn main() {{ println!(\"{name}\") }}\n");
        std::fs::write(dir.path().join(name).join("train.rs"), script).unwrap();
    }
    for name in ["one", "two", "one"] {
        assert_eq!(stdout(&run(dir.path(), &[&format!("{name}/train.rs")])), format!("{name}\n"));
    }
}

#[test]
fn a_compile_error_shows_the_scripts_own_path_and_line() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("runs")).unwrap();
    let script = format!("{HEAD}fn main() {{\n    let steps: u32 = \"many\";\n}}\n");
    std::fs::write(dir.path().join("runs/train.rs"), script).unwrap();
    let output = run(dir.path(), &["runs/train.rs"]);
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(101), "{errors}");
    assert!(errors.contains("error[E0308]") && errors.contains(" --> runs/train.rs:7:22\n"), "{errors}");
    assert!(errors.ends_with("zerorun: runs/train.rs does not compile\n"), "{errors}");
    let coloured = in_dir(dir.path()).arg("runs/train.rs").env("CARGO_TERM_COLOR", "always").output().unwrap();
    assert!(stderr(&coloured).contains("\x1b[0mruns/train.rs:7:22\n"), "{}", stderr(&coloured));
}

#[test]
fn relative_dependencies_are_found_from_the_scripts_folder_and_a_missing_one_is_a_set_up_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("helper/src")).unwrap();
    std::fs::create_dir(dir.path().join("runs")).unwrap();
    let manifest = "[package]\nname = \"helper\"\nedition = \"2024\"\n";
    std::fs::write(dir.path().join("helper/Cargo.toml"), manifest).unwrap();
    std::fs::write(dir.path().join("helper/src/lib.rs"), "pub const WORD: &str = \"helped\";\n").unwrap();
    let script = "---cargo\n[dependencies]\nhelper = { path = \"../helper\" }\n---\n\
                  fn main() { println!(\"{}\", helper::WORD) }\n";
    std::fs::write(dir.path().join("runs/train.rs"), script).unwrap();
    let output = run(dir.path(), &["runs/train.rs"]);
    assert_eq!(stdout(&output), "helped\n", "{}", stderr(&output));

    std::fs::write(dir.path().join("runs/lost.rs"), script.replace("../helper", "../nowhere")).unwrap();
    let output = run(dir.path(), &["runs/lost.rs"]);
    assert_eq!(output.status.code(), Some(2));
    let errors = stderr(&output);
    assert!(errors.contains("/nowhere/Cargo.toml`"), "{errors}");
    assert!(errors.contains("zerorun: cargo could not build runs/lost.rs: exit status: 101"), "{errors}");
}

#[test]
fn an_example_is_built_by_the_package_around_it_in_its_own_target_folder() {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("package");
    std::fs::create_dir_all(package.join("src")).unwrap();
    std::fs::create_dir_all(package.join("examples/big")).unwrap();
    let manifest = "[package]\nname = \"outer\"\nedition = \"2024\"\n[features]\nloud = []\n[workspace]\n";
    std::fs::write(package.join("Cargo.toml"), manifest).unwrap();
    std::fs::write(package.join("src/lib.rs"), "pub const LOUD: bool = cfg!(feature = \"loud\");\n").unwrap();
    let code = "fn main() { println!(\"{} loud {}\", file!(), outer::LOUD) }\n";
    std::fs::write(package.join("examples/small.rs"), code).unwrap();
    std::fs::write(package.join("examples/big/main.rs"), code).unwrap();

    let small = run(dir.path(), &["package/examples/small.rs"]);
    assert_eq!(stdout(&small), "examples/small.rs loud false\n", "{}", stderr(&small));
    assert!(package.join("target/release/examples/small").is_file());
    assert!(!dir.path().join("cache").exists(), "no package is generated");
    let big = run(&package, &["--features", "loud", "examples/big/main.rs"]);
    assert_eq!(stdout(&big), "examples/big/main.rs loud true\n", "{}", stderr(&big));

    let mut elsewhere = in_dir(dir.path());
    let output = elsewhere.arg("package/examples/small.rs").env("CARGO_TARGET_DIR", "built").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(dir.path().join("built/release/examples/small").is_file(), "relative to where zerorun was started");
}

#[test]
fn the_generated_package_can_be_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("train.rs"), "fn main() {}\n").unwrap();
    let output = run(dir.path(), &["--print_package", "train.rs"]);
    let package = stdout(&output).trim_end().to_string();
    assert!(Path::new(&package).starts_with(dir.path().join("cache/packages")), "{package}");
    let manifest = std::fs::read_to_string(Path::new(&package).join("Cargo.toml")).unwrap();
    assert!(manifest.contains("candle-zero = ") && manifest.contains("candle-nn = "), "{manifest}");
    assert!(!dir.path().join("cache/target").exists(), "nothing is built");
}

/// Compiles Candle, which takes minutes; therefore, this test runs only on demand.
#[test]
fn a_script_without_manifest_gets_candle_and_this_library() {
    if std::env::var_os("CANDLE_ZERO_SLOW_TESTS").is_none() {
        return skipped(
            a_script_without_manifest_gets_candle_and_this_library,
            "set CANDLE_ZERO_SLOW_TESTS=1 to build a script with the default dependencies",
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let code = "mod helper;\nuse candle_core::{Device, Tensor};\nuse candle_zero::comm::RankEnv;\n\
                fn main() -> anyhow::Result<()> {\n    let env = RankEnv::from_env()?;\n    \
                let x = Tensor::ones(3, candle_core::DType::F32, &Device::Cpu)?;\n    \
                let x = candle_nn::ops::sigmoid(&x)?.affine(0.0, helper::FACTOR)?;\n    \
                println!(\"{} of {}: {}\", env.rank, env.world_size, x.sum_all()?.to_scalar::<f32>()?);\n    Ok(())\n}\n";
    std::fs::write(dir.path().join("train.rs"), code).unwrap();
    std::fs::write(dir.path().join("helper.rs"), "pub const FACTOR: f64 = 2.0;\n").unwrap();
    let output = run(dir.path(), &["-n", "2", "train.rs"]);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 0 of 2: 6", "[rank 1] 1 of 2: 6"], "{}", stderr(&output));
    let second = run(dir.path(), &["train.rs"]);
    assert!(!stderr(&second).contains("Compiling"), "{}", stderr(&second));
}
