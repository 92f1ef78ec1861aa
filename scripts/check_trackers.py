"""Reads Weights & Biases runs and TensorBoard's hyperparameters with their own readers: check_trackers.py ZERORUN [TRAIN_GPT]

ZERORUN is the launcher, and TRAIN_GPT the built example, or its source, which the launcher builds (default). Trains a tiny model
with two ranks, kills the job while it trains, reads what the job has left behind, resumes the job from its checkpoint, and reads
everything again. Every value must equal that in the record of the run, and each step must occur exactly once. Needs the packages
wandb and tensorboard; uses no network.
"""

import json
import logging
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as ExperimentHandler
from tensorboard.plugins.hparams.list_session_groups import Handler as GroupsHandler

# TensorBoard reports the steps that it leaves out because they are repeated.
logging.getLogger("tensorboard").setLevel(logging.ERROR)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BATCH = 8
PREFIX = "Train/Samples/"
zerorun = str(pathlib.Path(sys.argv[1]).resolve())
train_gpt = str(pathlib.Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT / "examples" / "train_gpt.rs")


def config(folder):
    path = folder / "ds_config.json"
    path.write_text(json.dumps({
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}, "zero_optimization": {"stage": 2},
        "wandb": {"enabled": True, "project": "trackers", "group": "ci", "team": "team"},
        "comet": {"enabled": True, "api_key": "a-secret-key"},
        "tensorboard": {"enabled": True, "output_path": str(folder), "job_name": "tensorboard"},
    }))
    return path


def command(folder, steps):
    return [
        zerorun, "--num_ranks", "2", "--run", "trackers", "--runs", str(folder / "runs"), train_gpt,
        "--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--ctx", "16", "--sample", "0", "--ds_config", str(folder / "ds_config.json"),
        "--save", str(folder / "checkpoints"), "--save_every", "5", "--keep", "2", "--resume", "--steps", str(steps),
    ]


def recorded_rows(folder):
    """Returns the values of each step in the record of the run, as the launcher exports it."""
    out = subprocess.run(
        [zerorun, "runs", "export", "trackers", "--jsonl", "--runs", str(folder / "runs")], check=True, capture_output=True, text=True)
    return {row["step"]: row for row in map(json.loads, out.stdout.splitlines())}


def records_of_wandb(path):
    """Returns the records of a run, read by each of wandb's readers that is installed."""
    readers = []
    try:
        from wandb.proto.wandb_internal_pb2 import Record
        from wandb.sdk.internal.datastore import DataStore
    except ImportError:
        pass
    else:
        readers.append(lambda: list(by_datastore(path, DataStore, Record)))
    # Newer versions of the package read the file with a separate program.
    wandb = pathlib.Path(sys.executable).with_name("wandb")
    if subprocess.run([wandb, "leet", "inspect", "--help"], capture_output=True).returncode == 0:
        readers.append(lambda: list(by_leet(path, wandb)))
    assert readers, "this version of wandb has no reader that this script supports"
    results = [read() for read in readers]
    assert all(result == results[0] for result in results), "the readers of wandb disagree"
    return results[0]


def by_datastore(path, datastore, record):
    store = datastore()
    store.open_for_scan(str(path))
    while True:
        try:
            data = store.scan_data()
        except AssertionError:
            # The last record is incomplete, because the job was killed; `wandb sync` treats it in the same way.
            assert store.in_last_block()
            return
        if data is None:
            return
        message = record()
        message.ParseFromString(data)
        kind = message.WhichOneof("record_type")
        items = {"history": "item", "summary": "update", "config": "update"}.get(kind)
        if kind == "run":
            run = message.run
            values = {name: getattr(run, name) for name in ("run_id", "entity", "project", "run_group", "display_name")}
            values["config"] = {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "exit":
            values = {"exit_code": message.exit.exit_code}
        elif items:
            list_of_items = getattr(getattr(message, kind), items)
            values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in list_of_items}
        else:
            values = {}
        yield kind, values


def by_leet(path, wandb):
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
    out = subprocess.run(
        [wandb, "leet", "inspect", "--json", path], check=True, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    for line in out.stdout.splitlines():
        record = json.loads(line)
        kind = record["type"]
        content = record.get(kind, {})
        if kind == "run":
            values = {name: content.get(name, "") for name in ("run_id", "entity", "project", "run_group", "display_name")}
            values["config"] = content["config"]["update"]
        elif kind == "exit":
            values = {"exit_code": content["exit_code"]}
        else:
            values = content.get({"history": "item"}.get(kind, "update"), {})
        yield kind, values


def check_wandb(folder, is_killed):
    paths = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(paths) == 1, f"expected one run, found {paths}"
    assert b"a-secret-key" not in paths[0].read_bytes(), "the run contains a secret"
    records = records_of_wandb(paths[0])
    kinds = [kind for kind, _ in records]
    assert kinds[:2] == ["header", "run"], kinds[:5]
    run = records[1][1]
    assert paths[0].name == f"run-{run['run_id']}.wandb"
    named = {name: run[name] for name in ("entity", "project", "run_group", "display_name")}
    assert named == {"entity": "team", "project": "trackers", "run_group": "ci", "display_name": "trackers"}, named
    configuration = run["config"]["configuration"]
    assert configuration["train_batch_size"] == BATCH and configuration["optimizer"]["params"]["lr"] == 3e-3, configuration
    assert run["config"]["settings"]["model"]["n_embd"] == 16 and run["config"]["world_size"] == 2, run["config"]
    assert ("exit" in kinds) != is_killed and (is_killed or records[-1] == ("exit", {"exit_code": 0})), kinds[-3:]

    rows, newest = {}, {}
    steps = []
    for kind, values in records:
        if kind == "history":
            row = rows.setdefault(values["_step"], {})
            assert not (row.keys() & values.keys()) - {"_step", "_timestamp", "_runtime"}, f"step {values['_step']} appears twice"
            row.update(values)
            steps.append(values["_step"])
        elif kind == "summary":
            newest.update(values)
    assert steps == sorted(steps)
    expected = recorded_rows(folder)
    # A record that is being written when the job is killed may be in one file and not in the other.
    last = max(rows) // BATCH
    assert len(rows) >= last - 1 and last >= len(expected) - 1 and (is_killed or last == len(expected)), (last, len(expected))
    names = {"train_loss": "loss", "grad_norm": "grad_norm"}
    for step, row in expected.items():
        found = rows.get(step * BATCH)
        if found is None:
            assert is_killed and step >= last, f"step {step} is missing"
            continue
        for tag, name in names.items():
            assert found[PREFIX + tag] == row[name], (step, tag, found, row)
        following = expected.get(step + 1)
        assert following is None or found[PREFIX + "lr"] == following["lr"], (step, found, following)
        assert "tokens_per_s" not in row or step == last or found["tokens_per_s"] == row["tokens_per_s"], (step, found, row)
    assert newest[PREFIX + "train_loss"] == rows[max(rows)][PREFIX + "train_loss"]
    return len(rows), paths[0]


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def check_tensorboard(folder, is_killed):
    logs = folder / "tensorboard"
    events = EventAccumulator(str(logs), size_guidance={SCALARS: 0})
    events.Reload()
    expected = recorded_rows(folder)
    for tag, name in (("train_loss", "loss"), ("grad_norm", "grad_norm")):
        found = [(event.step, event.value) for event in events.Scalars(PREFIX + tag)]
        expected_values = [(step * BATCH, f32(row[name])) for step, row in sorted(expected.items())]
        # The record of a killed run lacks the steps of its last second.
        count = len(expected_values) if is_killed else None
        assert found[:count] == expected_values, (tag, found[-3:], expected_values[-3:])

    content = {
        tag: events.SummaryMetadata(tag).plugin_data.content
        for tag in (metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG)
    }
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    expected_values = {
        "train_batch_size": 8.0, "train_micro_batch_size_per_gpu": 2.0, "gradient_accumulation_steps": 2.0, "world_size": 2.0,
        "zero_optimization.stage": 2.0, "optimizer.type": "AdamW", "optimizer.params.lr": 3e-3, "optimizer.params.betas": "[0.9,0.95]",
        "total_steps": 1_000_000.0, "model.n_embd": 16.0, "model.n_layer": 1.0,
    }
    assert expected_values.items() <= values.items(), values
    assert "a-secret-key" not in str(values)

    # The same through the backend of the plugin, from which TensorBoard's page gets its data.
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder), name=None)
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context = Context(TBContext(logdir=str(folder), multiplexer=multiplexer, data_provider=provider))
    request = api_pb2.GetExperimentRequest(experiment_name="")
    experiment = ExperimentHandler(RequestContext(), context, "", request).run()
    assert {info.name for info in experiment.hparam_infos} == values.keys()
    statuses = api_pb2.Status.values()
    names = [PREFIX + "train_loss", PREFIX + "lr"]
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=statuses, aggregation_type=api_pb2.AGGREGATION_AVG, slice_size=10,
        col_params=[api_pb2.ColParams(metric=api_pb2.MetricName(tag=name)) for name in names])
    groups = GroupsHandler(RequestContext(), context, "", request).run().session_groups
    assert len(groups) == 1 and len(groups[0].sessions) == 1, groups
    session = groups[0].sessions[0]
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in groups[0].hparams.items()} == values
    metrics = {metric.name.tag: metric.value for metric in session.metric_values}
    last = events.Scalars(PREFIX + "train_loss")[-1].value
    assert metrics[PREFIX + "train_loss"] == last, (metrics, last)
    success = api_pb2.STATUS_SUCCESS
    assert (session.status == success) != is_killed, session.status
    return len(values)


def main():
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config(folder)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "CANDLE_ZERO_"))}
        environment["WANDB_DIR"] = str(folder)
        log = open(folder / "log", "w")
        job = subprocess.Popen(command(folder, 1_000_000), env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        # Building the example may take a while.
        deadline = time.monotonic() + 900
        while not list((folder / "checkpoints").glob("*10/manifest.json")) and not list((folder / "checkpoints").glob("*15/manifest.json")):
            assert job.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        job.send_signal(signal.SIGKILL)
        job.wait()
        # The ranks end with the launcher; then their locks are free.
        time.sleep(1)
        rows, _ = check_wandb(folder, True)
        hyperparameters = check_tensorboard(folder, True)
        print(f"a killed job: {rows} steps of Weights & Biases, {hyperparameters} hyperparameters of TensorBoard")
        steps = rows + 7
        subprocess.run(command(folder, steps), env=environment, check=True, capture_output=True, text=True)
        rows, path = check_wandb(folder, False)
        assert rows == steps, (rows, steps)
        hyperparameters = check_tensorboard(folder, False)
        print(f"the resumed job: {rows} steps of Weights & Biases, {hyperparameters} hyperparameters of TensorBoard, all equal")
        print(f"{path.stat().st_size} bytes in {path.name}; {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
