#!/usr/bin/env bash
# Compiles the engine, the only package with processor-specific code, for aarch64, treating unused code as an error, and runs the
# unit tests of the kernels under qemu, at the highest SIMD level of qemu's processor.
#
#   scripts/check_aarch64.sh [--install] [--all-targets] [FOLDER]
#   scripts/check_aarch64.sh --install-only
#
# With --all-targets, compiles all packages except the fuzz targets, with their tests, benches and examples. Needs cargo, a gcc for
# aarch64 and qemu-user; with --install or --install-only (as root), the last two are installed with apt-get. If the toolchain has
# no standard library for aarch64, Debian's rustc is unpacked into FOLDER (target/aarch64 by default), which also holds the build.
# The exit status is 77 if something is not available; the last line names it.
set -uo pipefail
cd "$(dirname "$0")/.."
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CANDLE_ZERO_SIMD
install=
targets=(-p candle-zero --lib)
case ${1-} in --install | --install-only) install=$1 && shift ;; esac
case ${1-} in --all-targets) targets=(--workspace --exclude candle-zero-fuzz --all-targets) && shift ;; esac
folder=${1:-${CARGO_TARGET_DIR:-target}/aarch64}
triple=aarch64-unknown-linux-gnu
packages=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

skip() { # why
    echo "skipped: $1"
    exit 77
}

[ "$(uname -m)" != aarch64 ] || skip 'this machine is aarch64; run the normal tests instead'
mkdir -p "$folder" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

links() {
    echo 'int main(void) { return 0; }' | aarch64-linux-gnu-gcc -x c -o "$work/probe" - 2>"$work/why"
}

runs() {
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$work/probe" 2>"$work/why"
}

if ! { links && runs; } && [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get -q update && apt-get -q install -y --no-install-recommends "${packages[@]}"
fi
[ "$install" != --install-only ] || exit 0
links || skip "no gcc that links for aarch64 ($(head -n 1 "$work/why")); run apt-get install ${packages[*]}"

if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$triple/lib" ]; then
    python3 scripts/debian_rust.py "$folder/rust" 2>&1 | tee "$work/rust"
    code=${PIPESTATUS[0]}
    [ "$code" != 77 ] || skip "no standard library for aarch64: $(tail -n 1 "$work/rust")"
    [ "$code" = 0 ] || exit 1
    RUSTC=$(realpath "$folder/rust/rustc")
    export RUSTC
fi
export CARGO_TARGET_DIR="$folder/target" CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu'

for manifest in Cargo.toml tests/kernels/Cargo.toml; do
    cargo fetch --locked --target "$triple" --manifest-path "$manifest" || skip 'the crates for aarch64 cannot be fetched'
done
# Tests with cases that take minutes on an emulated processor run only some of these cases.
export CANDLE_ZERO_TEST_EMULATED=1
# Only some warnings are errors, because compilers newer than the project's have new warnings.
RUSTFLAGS='-D unused' cargo check --locked "${targets[@]}" --target "$triple" || exit 1
cargo test --release --locked --no-run --target "$triple" --manifest-path tests/kernels/Cargo.toml || exit 1
runs || skip "no qemu that runs aarch64 programs ($(head -n 1 "$work/why")); run apt-get install ${packages[*]}"
cargo test --release --locked --target "$triple" --manifest-path tests/kernels/Cargo.toml
