#!/usr/bin/env bash
# Builds the mock of CUDA in FOLDER, with the layout of a toolkit: bin/nvcc, lib64/libcuda.so.1 and the other libraries.
#
#   tools/mock_cuda/build.sh TOOLKIT FOLDER
#
# TOOLKIT contains NVIDIA's headers in include/ (scripts/fetch_cuda.sh). Needs g++ and Python 3. After that, with
#   CUDA_HOME=FOLDER PATH=FOLDER/bin:$PATH LD_LIBRARY_PATH=FOLDER/lib64 CUDA_COMPUTE_CAP=90
# `cargo test --features cuda` builds and runs without a GPU. Use a separate target folder.
set -euo pipefail
root=$(dirname "$(readlink -f "$0")")
toolkit=$(readlink -f "$1")
mkdir -p "$2/bin" "$2/lib64" "$2/build"
folder=$(readlink -f "$2")
lib=$folder/lib64

# The folder of cudarc, whose bindings name the functions that Rust programs link to.
cudarc=$(cd "$root/../.." && cargo metadata --format-version 1 --locked --features cuda --filter-platform "$(rustc -vV | sed -n "s/^host: //p")" | python3 -c '
import json, sys
print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc").rsplit("/", 1)[0])')

compile() { # the library, its file name, its bindings, further arguments for g++...
    local name=$1 file=$2 bindings=$3
    shift 3
    # The first link contains only this folder's functions; the second also contains stubs for all others.
    g++ -std=c++20 -O3 -Wall -Wextra -ffp-contract=off -fPIC -shared -pthread -I"$toolkit/include" "$@" -o "$folder/build/$name"
    "$root/stubs.py" --rust "$cudarc/src/$bindings/sys/mod.rs" --without "$folder/build/$name" | gcc -x c -O1 -fPIC -c -o "$folder/build/$name.o" -
    g++ -std=c++20 -O3 -ffp-contract=off -fPIC -shared -pthread -w -I"$toolkit/include" "$@" "$folder/build/$name.o" \
        -Wl,-soname,"$file" -o "$lib/$file"
    [ "$file" = "$name" ] || ln -sf "$file" "$lib/$name"
}

compile libcuda.so libcuda.so.1 driver "$root"/driver/*.cpp
compile libcublas.so libcublas.so cublas "$root/libs/cublas.cpp" -L"$lib" -lcuda
compile libcurand.so libcurand.so curand "$root/libs/curand.cpp" -L"$lib" -lcuda
compile libnccl.so libnccl.so.2 nccl "$root/libs/nccl.cpp" -L"$lib" -lcuda
empty=$folder/build/empty.c
: > "$empty"
compile libcublasLt.so libcublasLt.so cublaslt "$empty"
compile libnvrtc.so libnvrtc.so nvrtc "$empty"
compile libcudart.so libcudart.so runtime "$empty"

printf '#!/bin/sh\nMOCK_CUDA_HEADERS=%q exec %q "$@"\n' "$toolkit/include" "$root/nvcc" > "$folder/bin/nvcc"
chmod +x "$folder/bin/nvcc"
ln -sfn "$toolkit/include" "$folder/include"
rm -r "$folder/build"
