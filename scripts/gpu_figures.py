#!/usr/bin/env python3
"""Trains models on this machine's GPUs at stages 0 to 3 and with offload, and prints a row of figures with PASS or FAIL for each.

    gpu_figures.py ZERORUN [--models gpt2,gpt2-xl,llama-3.2-1b] [--steps 12] [--ranks N] [--features cuda] [--peak TFLOPS]
                   [--script examples/train_gpt.rs]

tokens/s is the median of all steps except the first three. MFU is the number of operations per second in the model's matrix products
(6 for each weight and token, plus those of attention), divided by the bf16 peak of the GPU's tensor cores. The peak is looked up by the
name that nvidia-smi shows. PASS means that the losses are finite and decrease, and that all rows of a model have the same first losses.
A configuration that does not fit in GPU memory is not a failure, unless none of the model's configurations fits, or it needs less GPU
memory than one that fits. The GPUs are those of CUDA_VISIBLE_DEVICES, in the order of nvidia-smi.
Exit code: 0 if nothing failed, 1 if something failed.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile

# Number of blocks, width and number of parameters.
MODELS = {
    "nano": (4, 128, 858_240),
    "gpt2": (12, 768, 124_439_808),
    "gpt2-xl": (48, 1600, 1_557_611_200),
    "llama-3.2-1b": (16, 2048, 1_235_814_400),
    "tinyllama-1.1b": (22, 2048, 1_100_048_384),
}
# Dense bf16 TFLOPS from NVIDIA's data sheets, by a part of the name that nvidia-smi shows; the first match is used.
PEAKS = [
    ("B200", 2250), ("H200", 989), ("GH200", 989), ("H100 PCIe", 756), ("H100", 989), ("A100", 312), ("L40S", 362), ("L40", 181),
    ("L4", 121), ("A10G", 70), ("A10", 125), ("A6000", 155), ("RTX 5090", 209), ("RTX 4090", 165), ("RTX 3090", 71),
]
OFFLOADS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, states on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


# For each row with offload, the same row without offload: if the latter fits in GPU memory, the former must fit too.
WITHOUT_OFFLOAD = {"stage 2, states on the host": "stage 2", "stage 3, all on the host": "stage 3"}


def smi(what):
    """Queries nvidia-smi for a value of each visible GPU; returns an empty list if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        visible = list(itertools.takewhile(lambda device: device and device[0] != "-", map(str.strip, devices.split(","))))
        if not visible:
            return []
        command += ["-i", ",".join(visible)]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    return run.stdout.splitlines() if run.returncode == 0 else []


def train(options, model, zero, context, folder):
    """Returns the metrics of a run, or None and the reason why there are none."""
    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage3_param_persistence_threshold": 10_000, **zero},
    }
    files = [os.path.join(folder, name) for name in ("ds.json", "metrics.jsonl")]
    with open(files[0], "w") as file:
        json.dump(config, file)
    if os.path.exists(files[1]):
        os.remove(files[1])
    command = [options.zerorun, "-n", str(options.ranks)]
    command += ["--features", options.features] if options.features else []
    command += [options.script, "--ds_config", files[0], "--arch", "gpt2" if "llama" not in model else "llama"]
    command += ["--model", model, "--ctx", str(context), "--steps", str(options.steps), "--sample", "0", "--metrics", files[1]]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        fits = not any("no memory left" in line for line in lines)
        return None, f"exit code {run.returncode}: {lines[-1] if lines else ''}" if fits else "it does not fit"
    rows = [json.loads(line) for line in open(files[1])]
    return [row for row in rows if not row.get("summary")], None


def is_good(losses, first):
    """Returns whether the losses are numbers, decrease, and start with the losses of the first row."""
    numbers = all(isinstance(loss, float) and abs(loss) < 1e9 for loss in losses)
    return numbers and len(losses) > 1 and losses[-1] < losses[0] and losses[: len(first)] == first


def main():
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    parser = argparse.ArgumentParser()
    parser.add_argument("zerorun")
    parser.add_argument("--models", default="gpt2,gpt2-xl,llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=len(smi("name")) or 1)
    parser.add_argument("--features", default="cuda")
    parser.add_argument("--peak", type=float)
    parser.add_argument("--script", default="examples/train_gpt.rs")
    options = parser.parse_args()
    name = (smi("name") or ["no GPU"])[0]
    peak = options.peak or next((tflops for part, tflops in PEAKS if part in name), None)
    print(f"{name}, {options.ranks} rank(s), bf16, micro batches of 4; peak {peak or 'unknown'} TFLOPS")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models.split(","):
            layers, width, parameters = MODELS[model]
            context = 128 if model == "nano" else 512
            first, fitting = None, set()
            for setting, zero in OFFLOADS.items():
                rows, why = train(options, model, zero, context, folder)
                if rows is None:
                    allowed = why == "it does not fit" and WITHOUT_OFFLOAD.get(setting) not in fitting
                    failed |= not allowed
                    print(f"{'-   ' if allowed else 'FAIL'}  {model}, {setting}: {why}", flush=True)
                    continue
                fitting.add(setting)
                losses = [row["loss"] for row in rows]
                speed = statistics.median([row["tokens_per_s"] for row in rows[3:]] or [0.0])
                work = 6 * parameters + 12 * layers * width * context / 2
                mfu = f"{100 * speed * work / (peak * 1e12 * options.ranks):.1f} %" if peak else "unknown"
                first = first if first is not None else losses[:3]
                good = is_good(losses, first)
                failed |= not good
                figures = f"{speed:.0f} tokens/s, MFU {mfu}, losses {losses[:1] + losses[-1:]}"
                print(f"{'PASS' if good else 'FAIL'}  {model}, {setting}: {figures}", flush=True)
            if not fitting:
                failed = True
                print(f"FAIL  {model}: no configuration could be trained", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
