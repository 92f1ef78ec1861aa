#!/usr/bin/env bash
# Compiles this library's CUDA kernels (src/cuda/kernels/*.cu) with NVIDIA's compiler for three architectures, assembles them, and
# prints the registers, shared memory and spills of each. Needs no GPU.
#
#   scripts/check_kernels.sh [TOOLKIT]
#
# TOOLKIT is a folder as scripts/fetch_cuda.sh makes it, which is called where there is none: target/cuda-toolkit by default.
# The exit status is 1 where a file does not compile, gives a warning, or a kernel spills registers to memory; no kernel may.
# It is 77 where the compiler cannot be had; the last line says why.
set -uo pipefail
cd "$(dirname "$0")/.."
toolkit=${1:-${CARGO_TARGET_DIR:-target}/cuda-toolkit}
scripts/fetch_cuda.sh "$toolkit"
code=$?
[ "$code" = 0 ] || exit "$code"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
kernels=0
for file in src/cuda/kernels/*.cu; do
    name=$(basename "$file" .cu)
    for architecture in 80 90 100; do
        # As build.rs does.
        "$toolkit/bin/nvcc" --ptx -O3 -std=c++17 --default-stream per-thread --fmad=false --Werror all-warnings \
            --gpu-architecture="compute_$architecture" --output-directory "$work" "$file" &&
            "$toolkit/bin/ptxas" -v -arch="sm_$architecture" "$work/$name.ptx" -o "$work/$name.cubin" 2>"$work/log" ||
            { cat "$work/log" 2>/dev/null; echo "FAILED: $file for $architecture"; failed=1; continue; }
        # A line for each kernel: what ptxas says in three.
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
            END { exit bad > 0 }' "$work/log" >"$work/lines" || { echo "FAILED: $file spills for $architecture"; failed=1; }
        cat "$work/lines"
        kernels=$((kernels + $(wc -l <"$work/lines")))
    done
done
# Without any there would be nothing that could have failed.
[ "$kernels" -gt 0 ] || { echo "FAILED: no kernel was assembled"; exit 1; }
[ "$failed" = 0 ] && echo "$kernels kernels assembled, no spills"
exit "$failed"
