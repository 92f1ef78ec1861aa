#!/usr/bin/env bash
# Reads candle-zero's event files with TensorBoard's reader: every value must equal that in the metrics file of the same run.
# One run ends normally. Another is killed while it trains, and everything that it wrote must be readable too.
#
#   scripts/check_tensorboard.sh VENV
#
# VENV is a Python environment with tensorboard. Without tensorboard, the check is skipped with a message (exit code 3).
set -euo pipefail
venv=${1:?usage: scripts/check_tensorboard.sh VENV}
venv=$(cd "$venv" && pwd)
cd "$(dirname "$0")/.."
cargo build --release --workspace --bin zerorun --bin train_gpt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

config() {
    cat > "$folder/$1.json" <<JSON
{
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": true, "steps_per_print": 1000000,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, "zero_optimization": {"stage": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    "fp16": {"enabled": $2, "initial_scale_power": 8, "loss_scale_window": 4},
    "tensorboard": {"enabled": true, "output_path": "$folder", "job_name": "$1"}
}
JSON
}

train() {
    local name=$1
    shift
    exec target/release/zerorun -n 2 target/release/train_gpt --n_layer 2 --n_head 2 --n_embd 32 --ctx 32 \
        --sample 0 --ds_config "$folder/$name.json" --metrics "$folder/$name.jsonl" "$@" 2> /dev/null
}

config whole true
(train whole --steps 30)
"$venv/bin/python" scripts/check_tensorboard.py "$folder/whole" "$folder/whole.jsonl" 8

config killed false
train killed --steps 1000000 &
sleep 4
kill -KILL $!
wait $! 2> /dev/null || true
sleep 1
# The interrupted step may be in one file while it is missing or incomplete in the other.
"$venv/bin/python" - "$folder/killed" "$folder/killed.jsonl" <<'PYTHON'
import json, struct, sys
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0})
events.Reload()
found = [event.value for event in events.Scalars("Train/Samples/train_loss")]
lines = [line for line in open(sys.argv[2]) if line.endswith("\n")]
metrics = [struct.unpack("f", struct.pack("f", json.loads(line)["loss"]))[0] for line in lines]
count = min(len(found), len(metrics))
assert count > 10 and abs(len(found) - len(metrics)) <= 1 and found[:count] == metrics[:count]
print(f"a killed run left {len(found)} steps that can be read")
PYTHON
