#!/usr/bin/env bash
# Fine-tunes large models with random weights under memory limits (RLIMIT_DATA):
#   a model with the shape of Llama-3.2-1B, with LoRA on one rank in 2 GiB, killed during training and resumed;
#   a model with the shape of Llama-2-7B, with QLoRA on two ranks in 6 GiB each, for three steps;
#   mixtures with the shapes of OLMoE-1B-7B and Qwen3-30B-A3B, with QLoRA on one rank in 2 and 4 GB, parameters in files, for three
#   steps of 512 tokens.
# Usage: scripts/finetune_memory.sh ZERORUN [1b|7b|olmoe|qwen3]...   ($WORK: a folder with space for the models, 2.5, 13.5, 14 and
# 61 GB, and for the files of parameters)
set -euo pipefail
cd "$(dirname "$0")/.."
zerorun=$(realpath "$1"); shift
work=${WORK:-$(mktemp -d)}
tokenizer=tests/fixtures/finetune/models/llama
data=tests/fixtures/finetune/smollm2/chats.jsonl
ctx=${CTX:-256}

# Prints the loss, seconds and peak resident memory of each step, and the memory of each kind of state.
figures() {
    python3 - "$1" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if "summary" not in line]
for line in steps:
    seconds = (line["forward_ms"] + line["backward_ms"] + line["step_ms"]) / 1e3
    print(f"step {line['step']}: loss {line['loss']:.4f}, {seconds:.1f} s, resident peak {line['rss_peak_bytes'] / 2**20:.0f} MiB")
for line in lines:
    if "summary" in line:
        for row in line["memory"]["rows"]:
            if row["peak"] or row["file"]["peak"]:
                print(f"{row['kind']:15} {row['peak'] / 2**20:9.1f} MiB peak, {row['held'] / 2**20:9.1f} held, {row['file']['peak'] / 2**20:9.1f} in files")
PY
}

# Creates a model unless its folder exists. The space that its files and the files of parameters need is checked first.
model() { # shape, folder, GB
    [ -d "$2" ] && return
    local free; free=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') * 1024 / 1000000000))
    if [ "$free" -lt "$3" ]; then
        echo "the shape $1 needs $3 GB in $work, which has $free GB; set WORK to a folder with more space" >&2
        exit 1
    fi
    python3 scripts/make_model.py "$1" "$2" "$tokenizer"
}

one_b() {
    model llama-3.2-1b "$work/1b" 4
    rm -rf "$work/out1" "$work/save1" "$work/m1.jsonl"
    run() {
        (ulimit -d $((2 << 20)); exec "$zerorun" finetune "$work/1b" --dtype bf16 --data "$data" --ctx "$ctx" --batch 1 --steps 4 \
            --out "$work/out1" --save "$work/save1" --save_every 1 --resume --metrics "$work/m1.jsonl" --cache "$work/cache")
    }
    run & job=$!
    # The job is killed during the third step.
    until [ "$(grep -c '"loss"' "$work/m1.jsonl" 2>/dev/null || true)" -ge 2 ] 2>/dev/null; do
        kill -0 "$job" || { wait "$job"; exit 1; }
        sleep 1
    done
    sleep 2
    # shellcheck disable=SC2046
    kill -KILL "$job" $(ps -o pid= --ppid "$job") || true
    wait "$job" || true
    echo "killed after two steps"
    run
    figures "$work/m1.jsonl"
    ls -l "$work/out1"
}

seven_b() {
    model llama-2-7b "$work/7b" 18
    rm -rf "$work/out7" "$work/m7.jsonl"
    (ulimit -d $((6 << 20)); exec "$zerorun" finetune "$work/7b" -n 2 --qlora --dtype bf16 --data "$data" --ctx "$ctx" --batch 2 --steps 3 \
        --out "$work/out7" --metrics "$work/m7.jsonl" --cache "$work/cache")
    figures "$work/m7.jsonl"
    ls -l "$work/out7"
}

mixture() { # shape, limit in kB, GB on disk
    local folder=$work/$1
    model "$1" "$folder" "$3"
    rm -rf "$folder".out "$folder".jsonl
    mkdir -p "$folder.files"
    # By default, the first 1e9 elements stay in memory, as in DeepSpeed.
    printf '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "%s", "max_in_cpu": 0}}, "bf16": {"enabled": true}}' \
        "$folder.files" >"$folder.json"
    (ulimit -d "$2"; exec "$zerorun" finetune "$folder" --qlora --lora r=8,targets=q_proj+v_proj --dtype bf16 --data "$data" \
        --ctx 512 --batch 1 --steps 3 --ds_config "$folder.json" --out "$folder.out" --metrics "$folder.jsonl" --cache "$work/cache")
    figures "$folder.jsonl"
    ls -l "$folder.out"
}

for name in "${@:-1b}"; do
    case $name in
        1b) one_b ;;
        7b) seven_b ;;
        olmoe) mixture olmoe-1b-7b $((2000000000 / 1024)) 19 ;;
        qwen3) mixture qwen3-30b-a3b $((4000000000 / 1024)) 79 ;;
        *) echo "usage: give 1b, 7b, olmoe or qwen3, not $name"; exit 2 ;;
    esac
done
echo "results are in $work"
