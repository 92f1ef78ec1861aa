"""Compares TensorBoard's event files with the metrics of the same run: check_tensorboard.py LOGS METRICS.jsonl BATCH

LOGS is output_path/job_name of the `tensorboard` section, and BATCH is train_batch_size. Every value of every step must be present,
in f32. TensorBoard's own reader verifies all checksums. Needs the tensorboard package; without it, nothing is checked (exit code 3).
"""

import json
import struct
import sys

try:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
except ImportError:
    print("skipped: the Python package tensorboard is not installed")
    sys.exit(3)

logs, metrics, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
rows = [row for row in map(json.loads, open(metrics)) if not row.get("summary")]
assert rows, f"{metrics} has no steps"

events = EventAccumulator(logs, size_guidance={SCALARS: 0})
events.Reload()


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def compare(name, expected):
    found = [(event.step, event.value) for event in events.Scalars(f"Train/Samples/{name}")]
    assert found == expected, f"{name}: found {found}, expected {expected}"


def steps(key, rows):
    return [((row["step"] + 1) * batch, f32(row[key])) for row in rows]


compare("train_loss", steps("loss", rows))
compare("grad_norm", steps("grad_norm", rows))
for phase in ("forward", "backward", "step"):
    compare(f"elapsed_time_ms_{phase}", steps(f"{phase}_ms", rows))
# Events contain the learning rate and the loss scale of the next step; the metrics contain those of the step itself.
compared = ["lr", "loss_scale"] if "Train/Samples/loss_scale" in events.Tags()["scalars"] else ["lr"]
for name in compared:
    found = [(event.step, event.value) for event in events.Scalars(f"Train/Samples/{name}")]
    assert found[:-1] == [(row["step"] * batch, f32(row[name])) for row in rows[1:]], f"{name}: {found}"
    assert found[-1][0] == (rows[-1]["step"] + 1) * batch
tags = events.Tags()["scalars"]
print(f"{len(rows)} steps of {len(tags)} tags are equal: {', '.join(tag.split('/')[-1] for tag in tags)}")
