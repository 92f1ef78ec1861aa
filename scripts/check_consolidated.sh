#!/usr/bin/env bash
# Loads consolidated checkpoints of a GPT-2 and two Llamas with transformers; the logits must match candle-zero's within 1e-4.
#
#   scripts/check_consolidated.sh VENV
#
# VENV is a Python environment with torch (for CPU), transformers and safetensors.
set -euo pipefail
venv=${1:?usage: scripts/check_consolidated.sh VENV}
venv=$(cd "$venv" && pwd)
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
CANDLE_ZERO_CONSOLIDATED=$folder cargo test --release --test tools -- --ignored models_and_logits_for_transformers
"$venv/bin/python" scripts/check_consolidated.py "$folder"
