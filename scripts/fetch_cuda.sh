#!/usr/bin/env bash
# Fetches NVIDIA's compiler and headers from PyPI into FOLDER: bin/nvcc, nvvm/, include/. Neither a driver nor a kernel library is
# included.
#
#   scripts/fetch_cuda.sh [FOLDER]
#
# FOLDER is target/cuda-toolkit by default. Needs Python 3 with venv and pip. The exit status is 77 if the packages cannot be
# fetched; the last line gives the reason.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-${CARGO_TARGET_DIR:-target}/cuda-toolkit}
[ ! -x "$folder/bin/nvcc" ] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# nvcc calls cicc from the nvvm package and includes headers from crt and cccl; cuda_fp16.h and similar headers come from runtime.
python3 -m venv "$work/venv" &&
    "$work/venv/bin/python" -m pip -q install --disable-pip-version-check --no-deps --target "$work/packages" \
        nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 ||
    { echo "skipped: NVIDIA's compiler (nvidia-cuda-nvcc==13.0.88 and others) is not available from PyPI"; exit 77; }
mkdir -p "$(dirname "$folder")"
rm -rf "$folder"
mv "$work/packages/nvidia/cu13" "$folder"
