#!/usr/bin/env bash
# Runs unit tests of unsafe code under miri, which reports undefined behaviour: reads of uninitialized memory, accesses outside
# an allocation, aliased references, data races.
#
#   scripts/check_miri.sh [--install] [FOLDER]
#
# Needs Rust's nightly toolchain with the components miri and rust-src; with --install, rustup installs them. The build is in
# FOLDER (target/miri by default). The exit status is 77 if something is not available; the last line names it.
# tests/README.md lists what runs and what cannot.
set -uo pipefail
cd "$(dirname "$0")/.."
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS RUST_BACKTRACE
install=
[ "${1-}" != --install ] || { install=1; shift; }
folder=${1:-${CARGO_TARGET_DIR:-target}/miri}

skip() { # why
    echo "skipped: $1"
    exit 77
}

available() {
    cargo +nightly miri --version >/dev/null 2>&1 && [ -d "$(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library" ]
}

command -v rustup >/dev/null || skip 'rustup, which provides the nightly toolchain with miri, was not found'
if ! available && [ -n "$install" ]; then
    rustup toolchain install nightly --profile minimal --component miri --component rust-src --no-self-update
fi
available || skip 'miri was not found; run rustup toolchain install nightly --profile minimal --component miri --component rust-src'
export CARGO_TARGET_DIR="$folder" CARGO_INCREMENTAL=0
cargo +nightly miri setup || skip "miri's standard library cannot be built"
for manifest in Cargo.toml tests/kernels/Cargo.toml; do
    cargo fetch --locked --manifest-path "$manifest" || skip 'the crates cannot be fetched'
done

# Tests read the environment and the clock. Threads of rayon and of the kernels never end, which would count as a leak. rayon's
# queues turn integers into pointers, and satisfy only Tree Borrows. SIMD levels above portable contain assembly.
export MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance -Zmiri-tree-borrows'
export RAYON_NUM_THREADS=2 CANDLE_ZERO_SIMD=portable

run() { # arguments of cargo, --, names of tests...
    echo "miri: $*"
    cargo +nightly miri test --locked --lib "$@"
}

# First the kernels without Candle, which compile faster, then the tests that need the library.
run --manifest-path tests/kernels/Cargo.toml -- parallel:: worker_pool:: vector:: strided:: \
    gemm::tests::column_sums gemm::tests::half_operands gemm::tests::products_of_all \
    half_conversion::tests::slices attention::tests::results_and \
    attention::tests::no_sequences cross_entropy::tests::a_row convolution::tests::a_channels_sum embedding::tests::no_ids &&
    run -p candle-zero -- precision::flat:: tensor::bytes:: tensor::element::
