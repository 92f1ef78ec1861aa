"""Checks the output files of a run of examples/train_gpt.rs: check_run.py METRICS.jsonl WEIGHTS.safetensors STEPS"""

import json
import math
import struct
import sys

metrics, weights, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])

lines = [json.loads(line) for line in open(metrics)]
rows = [line for line in lines if not line.get("summary")]
assert [row["step"] for row in rows] == list(range(steps)), f"steps in {metrics}: {[row['step'] for row in rows]}"
assert len(lines) == steps + 1 and lines[-1]["summary"], f"{metrics} has no summary at its end"
for row in rows:
    assert all(math.isfinite(row[key]) for key in ("loss", "grad_norm", "lr")), row

with open(weights, "rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    data = file.read()
header.pop("__metadata__", None)
values = struct.unpack(f"<{len(data) // 4}f", data)
assert header and all(entry["dtype"] == "F32" for entry in header.values()), "some weights are not f32"
ends = sorted(entry["data_offsets"] for entry in header.values())
assert ends[0][0] == 0 and ends[-1][1] == len(data), "the header does not describe the data"
assert all(a[1] == b[0] for a, b in zip(ends, ends[1:])), "there are gaps between tensors"
assert all(map(math.isfinite, values)), "some weights are not finite"
print(f"{len(rows)} steps, loss {rows[0]['loss']:.4f} to {rows[-1]['loss']:.4f}; {len(header)} tensors with {len(values)} elements")
