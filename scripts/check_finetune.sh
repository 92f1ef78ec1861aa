#!/usr/bin/env bash
# Fine-tunes a real model, SmolLM2-135M-Instruct, and uses the results with Python libraries.
#
#   scripts/check_finetune.sh VENV SMOLLM2 [FOLDER]
#
# VENV is a Python environment with torch (for CPU), transformers, peft, safetensors and gguf. SMOLLM2 is the folder of the
# model in f32. The results stay in FOLDER; without FOLDER they are removed at the end.
#
#   1. The model's logits, and LoRA's losses over 20 steps, match those of transformers and PEFT.
#   2. After 300 steps on dialogues about sums and differences of numbers up to 20, and about sorting, the model answers at
#      least 90 % of 100 held-out questions correctly.
#   3. PEFT loads the adapter, and its logits match candle-zero's within 1e-4. transformers loads the merged folder. In
#      candle-zero, the adapter and the merged folder give the same answers.
#   4. gguf's reader finds the fields that llama.cpp needs, and the merged weights, in both GGUF files.
#
# 300 steps of 4 x 256 tokens take half an hour on two idle cores. The answers are judged last.
set -euo pipefail
venv=${1:?usage: scripts/check_finetune.sh VENV SMOLLM2 [FOLDER]}
model=${2:?usage: scripts/check_finetune.sh VENV SMOLLM2 [FOLDER]}
venv=$(cd "$venv" && pwd)
model=$(cd "$model" && pwd)
if [ $# -gt 2 ]; then
    mkdir -p "$3"
    folder=$(cd "$3" && pwd)
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
cd "$(dirname "$0")/.."
cargo build --release --bin zerorun
zerorun=${CARGO_TARGET_DIR:-target}/release/zerorun
python() { "$venv/bin/python" scripts/check_finetune.py "$@"; }

export CANDLE_ZERO_SMOLLM2=$model
cargo test --release --test finetune smollm2::

python data "$folder"
"$zerorun" finetune "$model" --data "$folder/dialogues.jsonl" --out "$folder/adapter" --lora r=16,alpha=32 --steps 300 --ctx 256 \
    --batch 4 --lr 5e-4 --cache "$folder/cache" --metrics "$folder/metrics.jsonl"
"$zerorun" generate "$model" --adapter "$folder/adapter" --max_tokens 40 < "$folder/questions.txt" > "$folder/given.txt" \
    2> "$folder/speed.txt"

"$zerorun" merge "$model" "$folder/adapter" --out "$folder/merged"
"$zerorun" merge "$model" "$folder/adapter" --out "$folder/f16.gguf"
"$zerorun" merge "$model" "$folder/adapter" --out "$folder/q8_0.gguf" --format gguf-q8_0
head -n 5 "$folder/questions.txt" | "$zerorun" generate "$folder/merged" --max_tokens 40 2>> "$folder/speed.txt" \
    | diff - <(head -n 5 "$folder/given.txt")
CANDLE_ZERO_ADAPTER=$folder/adapter CANDLE_ZERO_LOGITS=$folder/logits.safetensors \
    cargo test --release --test finetune -- --ignored logits_for_peft
python logits "$model" "$folder/adapter" "$folder/merged" "$folder/logits.safetensors"
python gguf "$folder/merged" "$folder/f16.gguf" "$folder/q8_0.gguf"
python judge "$folder/answers.txt" "$folder/given.txt"
echo "all checks passed"
