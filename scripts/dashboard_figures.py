#!/usr/bin/env python3
"""Measures by how much a page that shows a running job slows down the job's steps.

    cargo build --release --bins && cargo build --release --manifest-path examples/Cargo.toml --bin train_gpt
    python3 scripts/dashboard_figures.py [--ranks N] [--pairs N] [--window SECONDS]

A job with N ranks trains a tiny model, so that its steps are short, and `zerorun dash` serves its record. In every second window of
time, a client receives the live updates, as the page does; in the others, it does not. The client represents a browser on another
machine, so it has the lowest priority. Compares the numbers of steps in adjacent windows, and counts the processor time that the
server uses. Must be run on an otherwise idle machine. Prints Markdown.
"""
import argparse
import bisect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from dashboard_browser import Server

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target" / "release"
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
SIZES = ["--model", "nano", "--n_layer", 1, "--n_embd", 8, "--n_head", 1, "--ctx", 8]
# The number of seconds between a change and the window that is measured.
SETTLE = 0.5


def cpu_seconds(pid):
    """Returns the processor time that all threads of a process have used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--window", type=float, default=1)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as work:
        measure(flags, pathlib.Path(work))


def measure(flags, work):
    runs = work / "runs"
    runs.mkdir()
    (work / "ds_config.json").write_text(json.dumps(CONFIG))
    command = [RELEASE / "zerorun", "--num_ranks", flags.ranks, "--run", "job", "--runs", runs, RELEASE / "train_gpt", "--ds_config",
               work / "ds_config.json", *SIZES, "--sample", 0, "--steps", 100_000_000]
    job = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server([str(RELEASE / "zerorun"), "dash", str(runs), "--port", "0"])
    try:
        while not (found := list(runs.glob("job-*/metrics.jsonl"))):
            time.sleep(0.1)
        time.sleep(2)
        run = found[0].parent
        # Like a page that has loaded the contents of the files, the client asks only for what is appended.
        position = lambda: ".".join(map(str, server.get(f"/api/run?id={run.name}")["positions"]))
        windows, received = [], 0
        for index in range(2 * flags.pairs):
            # Windows with and without the client in the order ABBA, so that a drift does not favour either.
            watches = index % 4 in (1, 2)
            client = subprocess.Popen(["nice", "-n", "19", "curl", "-sN", f"{server.address}/api/live?run={run.name}@{position()}", "-o", str(work / "news")]) if watches else None
            time.sleep(SETTLE)
            used, begin = cpu_seconds(server.process.pid), time.time()
            time.sleep(flags.window)
            windows.append((watches, begin, time.time(), cpu_seconds(server.process.pid) - used))
            if client:
                client.terminate()
                client.wait()
                received += (work / "news").stat().st_size
                assert received > 0, "the client received nothing"
    finally:
        job.terminate()
        job.wait()
        server.stop()
    report(flags, windows, run, received)


def report(flags, windows, folder, received):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if "loss" in row]
    rate = lambda begin, end: (bisect.bisect_left(times, end) - bisect.bisect_left(times, begin)) / (end - begin)
    rates = [(watches, rate(begin, end)) for watches, begin, end, _ in windows]
    slower = []
    for first, second in zip(rates[::2], rates[1::2]):
        with_page, without = sorted((first, second), reverse=True)
        slower.append(1 - with_page[1] / without[1])
    error = statistics.stdev(slower) / len(slower) ** 0.5
    steps = statistics.mean(rate for watches, rate in rates if not watches)
    used = {watches: sum(cpu for at, _, _, cpu in windows if at == watches) / sum(end - begin for at, begin, end, _ in windows if at == watches)
            for watches in (False, True)}
    seconds = sum(end - begin for watches, begin, end, _ in windows if watches)
    print(f"- {flags.ranks} ranks, {steps:.0f} steps and {steps * len(rows) / len(times):.0f} recorded rows a second")
    print(f"- steps with the page open: {statistics.mean(slower):+.2%} slower (standard error {error:.2%}, {len(slower)} pairs of windows)")
    print(f"- the server uses {1000 * used[True]:.1f} ms of processor time a second with the page open, {1000 * used[False]:.1f} ms without, "
          f"and sends {received / seconds / 1000:.0f} kB a second")


if __name__ == "__main__":
    main()
