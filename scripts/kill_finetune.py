#!/usr/bin/env python3
"""Kills fine-tuning runs at random moments, resumes them, and compares their outputs with those of uninterrupted runs.

    scripts/kill_finetune.py ZERORUN [--kills 1000] [--seed 1]

A job runs LoRA, QLoRA, full fine-tuning or DPO, with or without validation, at a random stage, on one or two ranks, possibly with its
state in files, with --save, --resume and --metrics. It is started repeatedly. A rank, zerorun, or all processes of the job are killed
with SIGKILL, often at the moment when a file appears among the job's outputs. When the job is done, these conditions must hold:

  - its result, the best model and the losses in the metrics are identical to those of an uninterrupted run;
  - its folders, its cache, its temporary files and /dev/shm contain only files that an uninterrupted run leaves too;
  - none of its processes is alive.

Prints figures, and exits with 1 if one of these conditions is violated. Linux only, because the script reads /proc.
"""
import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/finetune"
Job = collections.namedtuple("Job", "mode stage files ranks steps")
MODES = ("lora", "lora_val", "qlora", "full", "full_val", "dpo")
# The files of a run's record: a killed job continues its record or begins another one, whose name contains the time.
RECORD = re.compile(
    r"runs/|runs/[^/]+/((run|ranks|summary)\.json|(metrics|events|samples|launch)\.jsonl|log(\.1)?\.txt|\.candle-zero\.lock)?"
)
MARK = "KILL_FINETUNE_JOB"


def tree(folder):
    """Returns the names under a folder, with the digests of files."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders:
            found[os.path.relpath(os.path.join(parent, name), folder) + "/"] = ""
        for name in files:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, folder)] = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]
    return found


def losses(file):
    """Returns the reproducible values of each step in the metrics; times differ between runs."""
    keys = ("loss", "lr", "grad_norm", "val_loss")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [[line.get("step"), *(line.get(key) for key in keys)] for line in lines]


def children(pid):
    """Returns the process ids of all descendants of a process."""
    try:
        direct_children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in direct_children] + [other for child in direct_children for other in children(int(child))]


def live_processes(mark):
    """Returns the process ids of all live processes that were started for a job."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state not in "ZX" else []
            except OSError:
                pass
    return found


class Campaign:
    def __init__(self, zerorun, seed, root):
        self.zerorun, self.chance, self.root, self.seed = zerorun.resolve(), random.Random(seed), root, seed
        self.counts, self.references = collections.Counter(), {}
        self.shm = set(os.listdir("/dev/shm"))
        chats = (FIXTURES / "smollm2/chats.jsonl").read_text().splitlines(keepends=True)[:24]
        (root / "chats.jsonl").write_text("".join(chats))
        with (root / "pairs.jsonl").open("w") as pairs:
            for n in range(24):
                record = {"prompt": f"What is {n} and {n}?", "chosen": f"It is {2 * n}.", "rejected": "I do not know."}
                pairs.write(json.dumps(record) + "\n")

        # Two jobs of each mode. The number of jobs is small, because each needs an uninterrupted reference run.
        chance = self.chance
        self.jobs = [Job(mode, chance.choice((0, 1, 2, 3, 3)), chance.choice((None, None, "optimizer", "all")),
                         chance.choice((1, 2)), chance.choice((6, 10))) for mode in MODES * 2]

    def words(self, job, folder, restarts):
        zero = {"stage": job.stage}
        to = {"device": "nvme", "nvme_path": str(folder / "nvme")}
        if job.files and job.stage > 0:
            zero["offload_optimizer"] = to
        if job.files == "all" and job.stage == 3:
            zero["offload_param"] = to | {"max_in_cpu": 0}
        if job.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        mode = job.mode.split("_")[0]
        words = ["finetune", FIXTURES / "models/llama", "--data", self.root / ("pairs.jsonl" if mode == "dpo" else "chats.jsonl"),
                 "--ctx", "48", "--batch", "2", "-n", job.ranks, "--steps", job.steps, "--out", folder / "out", "--save",
                 folder / "ck", "--save_every", "1", "--keep", "2", "--resume", "--metrics", folder / "m.jsonl", "--ds_config",
                 folder / "ds.json"]
        words += ["--full"] if mode == "full" else ["--lora", "r=4,alpha=8,dropout=0.1"]
        words += ["--qlora"] if mode == "qlora" else []
        words += ["--dpo", "beta=0.1"] if mode == "dpo" else []
        words += ["--val", "20%", "--eval_every", "2"] if job.mode.endswith("_val") else []
        return [str(word) for word in words + (["--max_restarts", "5"] if restarts else [])]

    def start(self, words, folder, mark):
        for name in ("home", "tmp", "nvme"):
            (folder / name).mkdir(exist_ok=True)
        environment = os.environ | {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), MARK: mark}
        environment.pop("XDG_CACHE_HOME", None)
        log = (folder / "log").open("ab")
        log.write(b"=== start\n")
        log.flush()
        return subprocess.Popen([self.zerorun, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @staticmethod
    def outputs(folder):
        """Returns the names of all files that a job leaves, the digests of its results, and its losses."""
        names = sorted(name for name in tree(folder) if not name.startswith(("tmp/.", "log")) and not RECORD.fullmatch(name))
        results = {name: tree(folder / name) for name in ("out", "out-best")}
        return names, results, losses(folder / "m.jsonl")

    def reference(self, job):
        if job not in self.references:
            folder = self.root / f"alone{len(self.references)}"
            folder.mkdir()
            start = time.monotonic()
            code = self.start(self.words(job, folder, False), folder, "alone").wait(timeout=300)
            assert code == 0, (folder / "log").read_text()[-2000:]
            self.references[job] = (self.outputs(folder), time.monotonic() - start)
        return self.references[job]

    def kill(self, process, folder, seconds):
        """Kills at a random moment; returns what was killed, or None."""
        chance = self.chance
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0.01, seconds))
        else:
            # When a file appears in or disappears from the outputs, or soon after.
            time.sleep(chance.uniform(0, seconds * 0.8))
            names = lambda: {name for part in (folder, folder / "ck") if part.is_dir() for name in os.listdir(part)}
            before, deadline = names(), time.monotonic() + 0.5
            while time.monotonic() < deadline and names() == before and process.poll() is None:
                pass
            time.sleep(chance.choice((0, 0, 0.0005, 0.001, 0.002, 0.005)))
        if process.poll() is not None:
            return None
        ranks, draw = children(process.pid), chance.random()
        if draw < 0.55 and ranks:
            target, pids = "a rank", [chance.choice(ranks)]
        elif draw < 0.9:
            target, pids = "zerorun", [process.pid]
        else:
            target, pids = "all processes", [*ranks, process.pid]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return None
        self.counts["kills"] += 1
        self.counts[f"kills of {target}"] += 1
        return target

    def report_problem(self, problem, job, kills, folder, more=""):
        self.counts[problem] += 1
        log = (folder / "log").read_text(errors="replace").split("=== start")[-1][-500:]
        print(f"WRONG: {problem}: {job}, killed {kills} {more}\n{log}", flush=True)

    def round(self, number):
        """Runs a job to its end, with several kills."""
        job, restarts = self.chance.choice(self.jobs), self.chance.random() < 0.4
        (names, results, metrics), seconds = self.reference(job)
        folder, mark = self.root / f"j{number}", f"{self.seed}.{os.getpid()}.{number}"
        folder.mkdir()
        words, kills, killed_starts = self.words(job, folder, restarts), [], self.chance.choice((1, 2, 3, 4, 5))
        self.counts["jobs"] += 1
        for attempt in range(40):
            process = self.start(words, folder, mark)
            self.counts["starts"] += 1
            if attempt < killed_starts:
                for _ in range(self.chance.choice((1, 2, 3)) if restarts else 1):
                    kills.append(self.kill(process, folder, seconds))
            try:
                code = process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                self.report_problem("hangs", job, kills, folder)
                process.kill()
                code = process.wait()
            deadline = time.monotonic() + 4
            while (alive := live_processes(mark)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if alive:
                self.report_problem("orphans", job, kills, folder, alive)
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
            if code == 0:
                break
            if attempt >= killed_starts:
                self.report_problem("refusals", job, kills, folder, f"code {code}")
                return
        outputs = self.outputs(folder)
        counts_before = self.counts.copy()
        if outputs[1] != results:
            self.report_problem("different results", job, kills, folder, (outputs[1], results))
        if outputs[2] != metrics:
            self.report_problem("different metrics", job, kills, folder)
        # Checkpoints are named after their step, so both runs have the same names.
        if outputs[0] != names:
            self.report_problem("leftovers", job, kills, folder, sorted(set(outputs[0]) ^ set(names)))
        if more := set(os.listdir("/dev/shm")) - self.shm:
            leftovers = [name for name in more if "candle" in name or "zero" in name]
            if leftovers and not any(live_processes("alone")):
                self.report_problem("leftovers in /dev/shm", job, kills, folder, leftovers)
        if self.counts == counts_before:
            shutil.rmtree(folder)

    PROBLEMS = ("hangs", "orphans", "refusals", "different results", "different metrics", "leftovers", "leftovers in /dev/shm")

    def figures(self):
        kinds = ("jobs", "starts", "kills", "kills of a rank", "kills of zerorun", "kills of all processes", *self.PROBLEMS)
        return ", ".join(f"{self.counts[key]} {key}" for key in kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("zerorun", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(prefix="kill-finetune-"))
    campaign = Campaign(args.zerorun, args.seed, root)
    number = reported_kills = 0
    while campaign.counts["kills"] < args.kills:
        campaign.round(number := number + 1)
        if campaign.counts["kills"] >= reported_kills + 50:
            reported_kills = campaign.counts["kills"]
            print(campaign.figures(), flush=True)
    print(f"seed {args.seed}: {campaign.figures()}")
    if any(campaign.counts[key] for key in Campaign.PROBLEMS):
        print(f"the folders of failed jobs are in {root}")
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
