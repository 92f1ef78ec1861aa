#!/usr/bin/env bash
# Measures the figures of the table in docs/performance.md that compares candle-zero with DeepSpeed (the peer). The two do the
# same work in alternating runs. This takes half an hour on two cores, with nothing else running.
#
#   scripts/compare_table.sh VENV OUT [ROUNDS] [STEPS]
#
# VENV is the Python environment with DeepSpeed that the peer's setup.sh creates. The variable PEER names the folder of
# the peer's scripts (../shared/peer by default). The table is written to OUT.
set -euo pipefail
venv=${1:?usage: scripts/compare_table.sh VENV OUT [ROUNDS] [STEPS]}
out=${2:?usage: scripts/compare_table.sh VENV OUT [ROUNDS] [STEPS]}
rounds=${3:-3}
steps=${4:-12}
cd "$(dirname "$0")/.."
peer=${PEER:-../shared/peer}
[ -f "$peer/compare.py" ] || { echo "there is no compare.py in $peer; set PEER to the folder of the peer's scripts" >&2; exit 1; }
cargo build --release --workspace --bin zerorun --bin train_gpt
log=$(mktemp)
trap 'rm -f "$log"' EXIT

row() { # preset dtype stage ranks samples-per-rank model [tokens per sample]
    local ours=(target/release/zerorun --num_ranks {world} target/release/train_gpt --model "$6")
    [ -z "${7:-}" ] || ours+=(--seq_len "$7")
    echo "== $6 $2 $4 $3" | tee -a "$log"
    python3 "$peer/compare.py" --venv "$venv" --preset "$1" --dtype "$2" --stage "$3" --world "$4" --micro "$5" \
        --ctx "${7:-0}" --rounds "$rounds" --steps "$steps" -- "${ours[@]}" --ds_config {config} --init {init} \
        --data {data} --order sequential --steps {steps} --metrics {metrics} | tee -a "$log"
}

for dtype in f32 bf16; do
    row mini $dtype 0 1 8 mini
    for stage in 0 1 2 3; do row mini $dtype $stage 2 4 mini; done
done
for dtype in f32 bf16; do
    row small $dtype 0 1 1 gpt2 512
    row small $dtype 3 2 1 gpt2 512
done

python3 - "$log" > "$out" <<'TABLE'
import json, re, statistics, sys
print("| model | dtype | ranks | stage | tokens/s | DeepSpeed | ratio | peak MiB | DeepSpeed | ratio |")
print("|---|---|---|---|---|---|---|---|---|---|")
for section in re.split(r"^== ", open(sys.argv[1]).read(), flags=re.M)[1:]:
    head, *lines = section.splitlines()
    result = json.loads(next(line for line in lines if line.startswith("{")))
    peaks = [map(int, pair) for pair in re.findall(r"peak ours (\d+) MiB, DeepSpeed (\d+) MiB", section)]
    ours, theirs = map(statistics.median, zip(*peaks))
    speeds = "{ours_tokens_per_s:,.0f} | {deepspeed_tokens_per_s:,.0f} | {ratio:.2f}".format(**result)
    print(f"| {' | '.join(head.split())} | {speeds} | {ours:,.0f} | {theirs:,.0f} | {result['rss_ratio']:.2f} |")
TABLE
cat "$out"
