#!/usr/bin/env python3
"""Trains a model on this machine's GPUs with a timeline, and prints the share of each kind of transfer that overlaps with the
backward pass.

    gpu_overlap.py ZERORUN [--model gpt2] [--context 512] [--steps 8] [--ranks N] [--features cuda]
                   [--script examples/train_gpt.rs] [--gpu]
    gpu_overlap.py --trace FILE        reads a trace written by zerorun --timeline

--gpu means that the script is a program that was built with the feature cuda.
The configurations are stage 2, stage 3, and stage 2 with the optimizer on the host. The first three steps are ignored. The duration of
the backward pass is the time that the GPU spends on it or, without a GPU, that the training thread spends on it, excluding waits.
PASS means that gradient transfers (reduce_scatter, all_reduce, and copies to the host) overlap with the backward pass for at least
half of their time, and that all transfers that the configuration needs are present. All-gathers also overlap with the forward pass
and have no verdict. With one GPU, there are no collectives.
Exit code: 0 if nothing failed, 1 if something failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from gpu_figures import MODELS, smi

# The required share of the time of gradient transfers that overlaps with the backward pass.
REQUIRED_SHARE = 0.5
GRADIENTS = ("reduce_scatter", "all_reduce", "to the host")
# Smaller transfers carry no elements. Ranks use them to exchange norms and overflow flags, and to compare the calls that they
# launch.
MIN_BYTES = 4096
FIRST_STEPS = 3
SETTINGS = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, states on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def union(spans):
    """Merges spans into a sorted list of spans that do not touch."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def subtract(spans, others):
    """Returns the parts of `spans` that are not covered by `others`; both are unions."""
    remaining = []
    for start, end in spans:
        for other_start, other_end in others:
            if other_end > start and other_start < end:
                if other_start > start:
                    remaining.append([start, other_start])
                start = max(start, other_end)
        if start < end:
            remaining.append([start, end])
    return remaining


def overlap_of(span, spans):
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in spans)


def transfers(path):
    """Returns for each kind of transfer the milliseconds per rank and step, and the share that overlaps with the backward pass."""
    events = [event for event in json.load(open(path))["traceEvents"]]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ranks = sorted({pid for pid, _ in lanes})
    sums, steps = {}, 0
    for rank in ranks:
        rank_events = [(e["ts"], e["ts"] + e["dur"], e) for e in events if e["ph"] == "X" and e["pid"] == rank]
        lane = lambda e: lanes[(rank, e["tid"])]
        engine = [(start, end, e) for start, end, e in rank_events if e["cat"] == "engine"]
        ends = sorted(end for _, end, e in engine if e["name"] == "step" and lane(e) == "training")
        if len(ends) <= FIRST_STEPS:
            continue
        since = ends[FIRST_STEPS - 1]
        steps += len(ends) - FIRST_STEPS
        backward = {
            lane_name: union((start, end) for start, end, e in engine if e["name"] == "backward" and lane(e) == lane_name)
            for lane_name in ("GPU", "training")
        }
        waits = union((start, end) for start, end, e in rank_events if e["cat"] == "wait" and lane(e) == "training")
        backward_spans = backward["GPU"] or subtract(backward["training"], waits)
        for start, end, e in rank_events:
            if e["cat"] not in ("collective", "copy") or start < since or e["args"].get("bytes", 0) < MIN_BYTES:
                continue
            kind = next((kind for kind in GRADIENTS if e["name"].startswith(kind)), e["name"].split(" ")[0])
            kind = "to the GPU" if e["name"].startswith("to the GPU") else kind
            duration, overlap = sums.get(kind, (0.0, 0.0))
            sums[kind] = (duration + end - start, overlap + overlap_of((start, end), backward_spans))
    return {kind: (duration / 1e3 / steps, overlap / duration if duration else 0.0) for kind, (duration, overlap) in sums.items()}


def expected(zero, ranks):
    """Returns groups of kinds of gradient transfers; a run must have at least one kind of each group."""
    collectives = GRADIENTS[:2] if ranks > 1 else ()
    return [kinds for kinds in (collectives, GRADIENTS[2:] if "offload_optimizer" in zero else ()) if kinds]


def show(setting, path, needed=()):
    """Prints the rows of a trace; returns whether one failed or is missing."""
    found, failed = transfers(path), False
    for kinds in needed:
        if not any(kind in found for kind in kinds):
            failed = True
            print(f"FAIL  {setting}: no {' or '.join(kinds)} in the timeline", flush=True)
    if not found:
        print(f"-     {setting}: no transfers", flush=True)
    for kind, (duration, share) in sorted(found.items()):
        verdict = "-   " if kind not in GRADIENTS else "PASS" if share >= REQUIRED_SHARE else "FAIL"
        failed |= verdict == "FAIL"
        print(f"{verdict}  {setting}: {kind} {duration:.2f} ms per step, {100 * share:.0f} % overlaps with the backward pass", flush=True)
    return failed


def train(options, zero, folder):
    """Returns the path of the trace of a run, or None and the reason why there is none."""
    parameters = MODELS[options.model][2]
    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        # Several buckets, so that the first are sent while the gradients of the last are computed.
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": parameters // 16, **zero},
    }
    files = [os.path.join(folder, name) for name in ("ds.json", "trace.json")]
    with open(files[0], "w") as file:
        json.dump(config, file)
    if os.path.exists(files[1]):
        os.remove(files[1])
    command = [options.zerorun, "-n", str(options.ranks), "--timeline", files[1]]
    command += ["--features", options.features] if options.features else []
    command += [options.script, "--ds_config", files[0], "--arch", "gpt2" if "llama" not in options.model else "llama"]
    command += ["--model", options.model, "--ctx", str(options.context), "--steps", str(options.steps), "--sample", "0"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode == 0:
        return files[1], None
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    return None, f"exit code {run.returncode}: {lines[-1] if lines else ''}"


def main():
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    parser = argparse.ArgumentParser()
    parser.add_argument("zerorun", nargs="?")
    parser.add_argument("--trace")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=len(smi("name")) or 1)
    parser.add_argument("--features", default="cuda")
    parser.add_argument("--script", default="examples/train_gpt.rs")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if options.trace:
        sys.exit(show("trace", options.trace))
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for setting, zero in SETTINGS.items():
            trace, why = train(options, zero, folder)
            if trace is None:
                print(f"FAIL  {setting}: {why}", flush=True)
                failed = True
                continue
            # Without a GPU, no copies are made.
            failed |= show(setting, trace, expected(zero, options.ranks) if options.gpu or "cuda" in options.features else ())
    sys.exit(failed)


if __name__ == "__main__":
    main()
