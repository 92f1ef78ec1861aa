#!/usr/bin/env bash
# Checks the `cuda` feature on this machine's GPU, and prints figures and a verdict for each check.
#
#   scripts/gpu_check.sh [STEPS]                     builds the programs and runs the checks; STEPS of GPT-2 (default 30)
#   scripts/gpu_check.sh --build FOLDER              only builds the programs, into FOLDER; needs the CUDA toolkit but no GPU
#   scripts/gpu_check.sh --programs FOLDER [STEPS]   runs the checks with these programs; needs neither Rust nor the toolkit
#
# The tests read files of this checkout, so it must have the same path on the machine that builds the programs and on the machine
# that runs them. GPU_CHECKS selects some of the checks tests, gpt2, figures, bandwidth and overlap, for example
# GPU_CHECKS="tests bandwidth".
#
# Exit code: 0 if all checks passed, 1 if a check failed, 2 if this machine has no GPU or no CUDA toolkit.
set -uo pipefail
cd "$(dirname "$0")/.."
# Makes CUDA number GPUs in the same way as nvidia-smi.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
programs=
case ${1:-} in
--build | --programs)
    action=$1 programs=${2:?"$1 needs a folder"}
    shift 2
    ;;
*) action=all ;;
esac
steps=${1:-30}
failed=0

verdict() { # PASS|FAIL, what
    printf '%s  %s\n' "$1" "$2"
    [ "$1" = PASS ] || failed=1
}

missing() {
    echo "nothing checked: $1"
    exit 2
}

work=$(mktemp -d)
trap 'kill "${sampler:-}" 2>/dev/null; rm -rf "$work"' EXIT

# Builds the launcher, the example and the tests, and copies them to a folder under the names that the checks use.
build() { # FOLDER
    command -v "${NVCC:-nvcc}" >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] ||
        missing "nvcc was not found; the cuda feature is built with the CUDA toolkit"
    cargo build --release --features cuda --workspace --bin zerorun --bin train_gpt --message-format json >"$work/built" &&
        cargo test --release --features cuda --lib --test nn --test zero --no-run --message-format json >>"$work/built" &&
        mkdir -p "$1" && scripts/copy_programs.py "$1" candle_zero nn zero zerorun train_gpt <"$work/built"
}

if [ "$action" = --build ]; then
    build "$programs"
    exit
fi

compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L >/dev/null 2>&1 || missing "no NVIDIA GPU was found on this machine"

# 1. The feature compiles.
if [ "$action" = all ]; then
    programs=$work/programs
    if ! build "$programs"; then
        verdict FAIL "cargo build --features cuda"
        exit 1
    fi
    verdict PASS "cargo build --features cuda"
fi
programs=$(realpath "$programs")
export CANDLE_ZERO_TEST_LAUNCHER=$programs/zerorun

# Returns whether a check is selected.
selected() { [[ " ${GPU_CHECKS:-tests gpt2 figures bandwidth overlap} " == *" $1 "* ]]; }

# 2. Layers agree with their references, and the stages with each other and with the CPU. Tests that find no GPU pass without
# checking anything. Tests that plant faults in the mock of CUDA (tools/mock_cuda) have nothing to check on a GPU.
run_tests() {
    local failed=0 program
    for program in candle_zero nn zero; do
        (cd tests && "$programs/$program" cuda:: cuda_attention:: cuda_layers:: gpu_collectives:: on_gpu:: --test-threads 1) 2>&1 || failed=1
    done
    return "$failed"
}
if selected tests; then
    layers="layers match their references; stages 0 to 3: identical bits, losses within 1e-4 of the CPU's, missing parameters refused"
    run_tests | tee "$work/test.log"
    if [ "${PIPESTATUS[0]}" != 0 ]; then
        verdict FAIL "$layers"
    elif grep -q 'skipped: .*no CUDA device is available' "$work/test.log"; then
        missing "the CUDA driver finds no device"
    else
        verdict PASS "$layers"
    fi
fi

# Prints a value for the first visible GPU, or nothing without nvidia-smi.
smi() { python3 -B -c 'import sys; sys.path.insert(0, "scripts"); from gpu_figures import smi; print(*smi(sys.argv[1])[:1])' "$1"; }

# 3. GPT-2 (124 million parameters) trains at stage 3 in bf16. Two ranks share the GPU if there is room for both.
train_gpt2() {
    local free_mib ranks=1 before_mib code first last
    free_mib=$(smi memory.free)
    [ "${free_mib:-0}" -ge 20000 ] && ranks=2
    cat >"$work/ds.json" <<'JSON'
{
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10000, "stage3_max_reuse_distance": 0}
}
JSON
    before_mib=$(smi memory.used)
    (while sleep 0.2; do smi memory.used; done >"$work/used" 2>/dev/null) &
    sampler=$!
    "$programs/zerorun" --num_ranks "$ranks" "$programs/train_gpt" --ds_config "$work/ds.json" \
        --model gpt2 --ctx 256 --steps "$steps" --sample 0 --metrics "$work/metrics.jsonl"
    code=$?
    kill "$sampler"

    # Prints the values of a key of the metrics, one per step.
    values() { grep -v '"summary"' "$work/metrics.jsonl" 2>/dev/null | grep -o "\"$1\":[-+0-9.eE]*" | cut -d: -f2; }
    mean() { awk '{ sum += $1 } END { if (NR) printf "%.4f", sum / NR }'; }
    first=$(values loss | head -n 5 | mean)
    last=$(values loss | tail -n 5 | mean)
    printf 'gpt2, context 256, stage 3, bf16, %s rank(s), %s steps\n' "$ranks" "$steps"
    printf '  loss: mean of the first five steps %s, of the last five %s\n' "${first:-none}" "${last:-none}"
    printf '  tokens/s: %s (median step)\n' "$(values tokens_per_s | sort -g | awk '{ v[NR] = $1 } END { if (NR) printf "%.0f", v[int((NR + 1) / 2)] }')"
    if [ -n "${before_mib:-}" ]; then
        printf '  device memory: peak %s MiB, before the run %s MiB\n' "$(sort -g "$work/used" | tail -n 1)" "$before_mib"
    else
        echo '  device memory: unknown (no nvidia-smi)'
    fi
    if [ "$code" != 0 ]; then
        verdict FAIL "gpt2 run: exit code $code"
    elif [ "$(values loss | grep -c '[0-9]')" != "$steps" ]; then
        verdict FAIL "gpt2 run: some of the $steps steps have no numeric loss"
    elif awk "BEGIN { exit !(${last:-9} < ${first:-0} - 0.5) }"; then
        verdict PASS "gpt2 run: the loss falls"
    else
        verdict FAIL "gpt2 run: the loss does not fall by 0.5 in $steps steps"
    fi
}
! selected gpt2 || train_gpt2

# 4. Models at all stages and with offload: tokens/s and the share of the GPU's peak.
if ! selected figures; then
    :
elif scripts/gpu_figures.py "$programs/zerorun" --features '' --script "$programs/train_gpt"; then
    verdict PASS "gpt2, gpt2-xl and a 1B-parameter Llama at stages 0 to 3 and with offload"
else
    verdict FAIL "gpt2, gpt2-xl and a 1B-parameter Llama at stages 0 to 3 and with offload"
fi

# 5. The bandwidth of each kernel compared with that of the driver's own copy: one line with a verdict for each.
measure_bandwidth() {
    "$programs/candle_zero" cuda::kernel_bandwidth --ignored --nocapture 2>&1 | tee "$work/bandwidth.log" |
        grep -E '^(PASS|FAIL|-   )  |^      '
    return "${PIPESTATUS[0]}"
}
if ! selected bandwidth; then
    :
elif measure_bandwidth && grep -q '^PASS  ' "$work/bandwidth.log"; then
    verdict PASS "kernels reach the required share of the memory bandwidth"
else
    grep -A 2 'panicked' "$work/bandwidth.log"
    verdict FAIL "kernels reach the required share of the memory bandwidth"
fi

# 6. The share of gradient communication that overlaps with the backward pass, from the timeline.
if ! selected overlap; then
    :
elif scripts/gpu_overlap.py "$programs/zerorun" --features '' --script "$programs/train_gpt" --gpu; then
    verdict PASS "gradient communication overlaps with the backward pass"
else
    verdict FAIL "gradient communication overlaps with the backward pass"
fi
exit "$failed"
