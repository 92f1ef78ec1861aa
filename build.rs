//! With the feature `cuda`, compiles the kernels in src/cuda/kernels to PTX, which is embedded in the library.
//!
//! The compiler is `$NVCC`, `$CUDA_HOME/bin/nvcc`, or nvcc on the PATH. The PTX is compiled for the compute capability
//! in `$CUDA_COMPUTE_CAP` (for example `90`), for that of the first GPU that nvidia-smi lists, or for 8.0, and runs on
//! GPUs of this capability and all later ones.

use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const KERNELS: &str = "src/cuda/kernels";
/// The capability that is used if no GPU is found: the lowest whose tensor cores support bfloat16.
const MIN_COMPUTE_CAPABILITY: &str = "80";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed={KERNELS}");
    for variable in ["NVCC", "CUDA_HOME", "CUDA_COMPUTE_CAP"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(error) = compile_all() {
        println!("cargo::error={error}");
        exit(1);
    }
}

fn compile_all() -> Result<(), String> {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    let (nvcc, capability) = (nvcc(), capability());
    let files = std::fs::read_dir(KERNELS).map_err(|error| format!("{KERNELS}: {error}"))?;
    for file in files {
        let file = file.map_err(|error| format!("{KERNELS}: {error}"))?.path();
        if file.extension().is_some_and(|extension| extension == "cu") {
            compile(&nvcc, &capability, &file, &out)?;
        }
    }
    Ok(())
}

fn compile(nvcc: &Path, capability: &str, file: &Path, out: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["--ptx", "-O3", "-std=c++17", "--default-stream", "per-thread"]);
    // A product and a sum are rounded separately, as on the CPU. A kernel that fuses them calls fmaf.
    command.arg("--fmad=false").arg(format!("--gpu-architecture=compute_{capability}"));
    command.arg("--output-directory").arg(out).arg(file);
    let source = file.display();
    let output = command.output().map_err(|error| {
        format!("{}: {error}; the feature cuda needs CUDA's compiler; put nvcc on the PATH or set NVCC", nvcc.display())
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    let lines = String::from_utf8_lossy(&text).replace('\n', "\ncargo::warning=");
    println!("cargo::warning={lines}");
    Err(format!("{} failed to compile {source} for compute_{capability}: {}", nvcc.display(), output.status))
}

fn nvcc() -> PathBuf {
    let from_toolkit = || std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let configured = std::env::var_os("NVCC").map(PathBuf::from);
    configured.or_else(|| from_toolkit().filter(|nvcc| nvcc.is_file())).unwrap_or_else(|| "nvcc".into())
}

/// Returns the compute capability without its dot.
fn capability() -> String {
    let configured = std::env::var("CUDA_COMPUTE_CAP").ok();
    let of_gpu = || {
        let query = ["--query-gpu=compute_cap", "--format=csv,noheader"];
        let output = Command::new("nvidia-smi").args(query).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.lines().next()?.trim().to_owned())
    };
    let capability = configured.or_else(of_gpu).map(|text| text.replace('.', ""));
    capability.filter(|text| !text.is_empty()).unwrap_or_else(|| MIN_COMPUTE_CAPABILITY.to_owned())
}
