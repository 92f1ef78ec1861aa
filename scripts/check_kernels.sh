#!/usr/bin/env bash
# Compiles this library's CUDA kernels (src/cuda/kernels/*.cu) with NVIDIA's compiler for three architectures, or for those given,
# assembles them, and prints the registers, shared memory and spills of each kernel. Needs no GPU.
#
#   scripts/check_kernels.sh [--architectures 80,90,100] [TOOLKIT]
#
# TOOLKIT is a folder created by scripts/fetch_cuda.sh, target/cuda-toolkit by default. If it does not contain nvcc, fetch_cuda.sh
# is called to create it. The exit status is 1 if a file does not compile or produces a warning, or if a kernel spills registers to
# memory. It is 77 if the compiler is not available; the last line gives the reason.
set -uo pipefail
cd "$(dirname "$0")/.."
architectures=(80 90 100)
if [ "${1-}" = --architectures ]; then
    IFS=, read -ra architectures <<<"$2"
    shift 2
fi
toolkit=${1:-${CARGO_TARGET_DIR:-target}/cuda-toolkit}
scripts/fetch_cuda.sh "$toolkit"
code=$?
[ "$code" = 0 ] || exit "$code"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Writes a line for each kernel of a file to one file, and the problems to another.
check() { # file, architecture
    local name architecture=$2 output
    name=$(basename "$1" .cu)
    output=$work/$name.$architecture
    mkdir "$output"
    # The same options as in build.rs.
    "$toolkit/bin/nvcc" --ptx -O3 -std=c++17 --default-stream per-thread --fmad=false --Werror all-warnings \
        --gpu-architecture="compute_$architecture" --output-directory "$output" "$1" >"$output/wrong" 2>&1 &&
        "$toolkit/bin/ptxas" -v -arch="sm_$architecture" "$output/$name.ptx" -o "$output/$name.cubin" >"$output/log" 2>&1 ||
        { cat "$output/log" >>"$output/wrong" 2>/dev/null; echo "FAILED: $1 for $architecture" >>"$output/wrong"; return; }
    # ptxas prints three lines for each kernel.
    awk -v where="$name sm_$architecture" '
        /Compiling entry function/ { split($0, quoted, "\047"); kernel = quoted[2] }
        /spill stores/ {
            match($0, /[0-9]+ bytes spill stores, [0-9]+ bytes spill loads/)
            spills = substr($0, RSTART, RLENGTH)
            split(spills, words, " ")
            spilled = words[1] + words[5]
        }
        /Used [0-9]+ registers/ {
            shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) : "0 bytes smem"
            match($0, /[0-9]+ registers/)
            printf "%s: %s: %s, %s, %s\n", where, kernel, substr($0, RSTART, RLENGTH), shared, spilled ? spills : "no spills"
            bad += spilled > 0
        }
        END { exit bad > 0 }' "$output/log" >"$output/lines" || echo "FAILED: $1 spills for $architecture" >>"$output/wrong"
}

for file in src/cuda/kernels/*.cu; do
    for architecture in "${architectures[@]}"; do
        # One job per core at a time.
        [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
        check "$file" "$architecture" &
    done
done
wait
cat "$work"/*/lines "$work"/*/wrong
kernels=$(cat "$work"/*/lines | wc -l)
failed=0
[ -z "$(cat "$work"/*/wrong)" ] || failed=1
# If no kernel was assembled, the absence of problems means nothing.
[ "$kernels" -gt 0 ] || { echo "FAILED: no kernel was assembled"; exit 1; }
[ "$failed" = 0 ] && echo "$kernels kernels assembled, no spills"
exit "$failed"
