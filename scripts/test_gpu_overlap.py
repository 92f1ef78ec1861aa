#!/usr/bin/env python3
"""Tests that gpu_overlap.py reads overlaps with the backward pass from a trace, and that gpu_figures.py judges losses and counts
GPUs."""

import json
import os
import sys
import tempfile

sys.dont_write_bytecode = True
from gpu_figures import is_good, smi
from gpu_overlap import SETTINGS, expected, subtract, transfers, union

LANES = {1: "training", 2: "collectives", 4: "gradients to the host", 7: "collectives between GPUs", 8: "GPU"}


def trace(events):
    names = [{"ph": "M", "pid": 0, "tid": n, "name": "thread_name", "args": {"name": name}} for n, name in LANES.items()]
    steps = [(1, "engine", "step", 100 * i, 1, 0) for i in range(4)]
    spans = [
        {"ph": "X", "pid": 0, "tid": tid, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"bytes": size} if size else {}}
        for tid, cat, name, ts, dur, size in steps + events
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"traceEvents": names + spans}, file)
    try:
        return transfers(file.name)
    finally:
        os.remove(file.name)


assert union([(5, 6), (0, 2), (1, 3)]) == [[0, 3], [5, 6]]
assert subtract([[0, 10], [20, 30]], [[2, 3], [8, 22]]) == [[0, 2], [3, 8], [22, 30]]

# The GPU's backward pass is used if there is one. The first steps and control messages are ignored.
found = trace([
    (1, "engine", "backward", 210, 5, 0), (8, "engine", "backward", 220, 40, 0),
    (7, "collective", "reduce_scatter h.1", 250, 20, 1 << 20), (7, "collective", "reduce_scatter h.1", 50, 20, 1 << 20),
    (2, "collective", "control", 212, 2, 64), (4, "copy", "to the host", 230, 10, 1 << 20),
])
assert found == {"reduce_scatter": (0.02, 0.5), "to the host": (0.01, 1.0)}, found

# Otherwise, the training thread's backward pass is used, without its waits.
found = trace([
    (1, "engine", "backward", 210, 40, 0), (1, "wait", "wait", 220, 15, 0), (2, "collective", "all_reduce a", 215, 20, 1 << 20),
])
assert found == {"all_reduce": (0.02, 0.25)}, found
assert trace([]) == {}

# The kinds of transfers that each configuration must have.
all_kinds = [("reduce_scatter", "all_reduce"), ("to the host",)]
assert [expected(zero, 2) for zero in SETTINGS.values()] == [all_kinds[:1], all_kinds[:1], all_kinds]
assert [expected(zero, 1) for zero in SETTINGS.values()] == [[], [], all_kinds[1:]]

assert is_good([3.0, 2.5, 2.0], [3.0, 2.5]) and not is_good([3.0, 2.5, 2.0], [3.0, 2.4])
assert not is_good([3.0, None, 2.0], [3.0]) and not is_good([2.0, 3.0], [2.0]) and not is_good([], [])

# nvidia-smi is queried for the visible GPUs, and its output is used only if it succeeds.
with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "nvidia-smi"), "w") as file:
        file.write('#!/bin/sh\ncase "$*" in *"-i 9"*) echo No devices were found; exit 6;; *"-i 1,3"*) echo b; echo d;; *) echo a;; esac\n')
    os.chmod(file.name, 0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    names_by_devices = {}
    for devices in (None, "1,3", "9", "1, 3,-1,2", "-1", ""):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        names_by_devices[devices] = smi("name")
    assert names_by_devices == {None: ["a"], "1,3": ["b", "d"], "9": [], "1, 3,-1,2": ["b", "d"], "-1": [], "": []}, names_by_devices
print("overlap is read from traces, losses are judged, GPUs are counted")
