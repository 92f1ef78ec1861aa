#!/usr/bin/env bash
# A real model: SmolLM2-135M-Instruct is fine-tuned, and what comes out is used by Python's libraries.
#
#   scripts/check_finetune.sh VENV SMOLLM2 [FOLDER]
#
# VENV is a Python environment with torch (for CPU), transformers, peft, safetensors and gguf. SMOLLM2 is the model's folder
# in f32. What is made stays in FOLDER, or is removed at the end.
#
#   1. the model's logits, and LoRA's losses over 20 steps, are those of transformers and PEFT;
#   2. after 300 steps on dialogues about sums and differences of numbers to 20, and about orders, the model answers at least
#      90 % of 100 other questions;
#   3. PEFT loads the adapter, with our logits within 1e-4, and transformers the merged folder; both answer alike here;
#   4. gguf's reader finds in both GGUF files what llama.cpp looks for, and the merged weights.
#
# 300 steps of 4 x 256 tokens take half an hour on two idle cores: what is answered right is judged last.
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
echo "all is as it should be"
