#!/usr/bin/env bash
# Prints the table of measured bytes per rank in docs/performance.md: gpt2 (124M parameters) at stages 0 to 3.
#
#   scripts/memory_table.sh [STEPS]      needs about 6 GB of memory and a few minutes
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release --workspace --bin zerorun --bin train_gpt

for stage in 0 1 2 3; do
    cat >"$work/$stage.json" <<JSON
{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "zero_optimization": {
    "stage": $stage,
    "reduce_bucket_size": 5e6,
    "allgather_bucket_size": 5e6,
    "stage3_prefetch_bucket_size": 1e7,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0
  }
}
JSON
    target/release/zerorun --num_ranks 2 examples/train_gpt.rs --ds_config "$work/$stage.json" \
        --model gpt2 --ctx 256 --steps "$steps" --sample 0 --metrics "$work/$stage.jsonl" >&2
done

python3 - "$work" <<'PY'
import json, sys

MIB = 2**20
rows = []
for stage in range(4):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/{stage}.jsonl")]
    steps = [line for line in lines if not line.get("summary")]
    memory = lines[-1]["memory"]
    kinds = {row["kind"]: row for row in memory["rows"]}
    states = sum(row["peak"] for row in memory["rows"] if row["formula"] is not None)
    formula = sum(row["formula"] for row in memory["rows"] if row["formula"] is not None)
    rows.append((stage, kinds, states, formula, max(line["rss_peak_bytes"] for line in steps)))

print("| stage | parameters | gradients | master weights | moments | sum | formula | peak resident |")
print("|---|---|---|---|---|---|---|---|")
for stage, kinds, states, formula, rss in rows:
    cells = [kinds[k]["peak"] / MIB for k in ("parameters", "gradients", "master_weights", "moments")]
    cells += [states / MIB, formula / MIB, rss / MIB]
    print(f"| {stage} | " + " | ".join(f"{c:.1f}" for c in cells) + " |")
promised = rows[0][3] - rows[3][3]
saved = rows[0][4] - rows[3][4]
print(f"\nPeak resident memory: stage 3 saves {saved / MIB:.0f} MiB compared with stage 0, {100 * saved / promised:.0f} % of the {promised / MIB:.0f} MiB predicted by the formula.")
PY
