#!/usr/bin/env python3
"""Looks for zerorun commands that change files that do not belong to them.

    scripts/outputs_campaign.py ZERORUN [--seconds 60] [--seed 1]

Each round creates a small world with a model, data, an adapter, checkpoints and files of other users. It then starts a command with
randomly placed outputs: on an input, inside one, on a link to one, in a folder with files of others, in a read-only folder or on a
full disk, on a pipe, or where a second job writes at the same time. Afterwards, these conditions must hold:

  - every file that existed before still exists, unchanged, under the same name or link;
  - no incomplete files are left behind;
  - a command that succeeded has written its result, and a command that trained but failed has reported where the result is;
  - of two jobs with the same output, at most one has succeeded, and its result is identical to that of a job
    that ran without the other.

Exits with 1 if one of these conditions is violated. Checks that the machine does not support (mounts without root) are skipped and
reported.
"""
import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = HERE / "tests/fixtures"
NOBODY = 65534
# Training time in seconds of each of two concurrent jobs. The second waits 2 s for locks, in case the first was killed, and
# training may be twice as fast as when it is measured.
LONG = 6.0
IS_ROOT = os.geteuid() == 0


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def snapshot(folder):
    """Returns the content of a folder: files with their digests, links with their targets, folders, and pipes."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = pathlib.Path(parent) / name
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[path] = ("link", os.readlink(path))
            elif stat.S_ISDIR(mode):
                found[path] = ("folder",)
            elif stat.S_ISREG(mode):
                found[path] = ("file", digest(path))
            else:
                found[path] = ("other", stat.S_IFMT(mode))
    return found


class World:
    """A folder with inputs and files of other users."""

    def __init__(self, root, inputs, chance):
        self.root, self.chance, self.mounts = root, chance, []
        for name in ("model", "adapter", "ck", "deepspeed"):
            if (inputs / name).exists():
                shutil.copytree(inputs / name, root / name)
        (root / "data").mkdir()
        shutil.copy(inputs / "d.jsonl", root / "data/d.jsonl")
        (root / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
        for name in ("cache", "home", "tmp", "empty"):
            (root / name).mkdir()
        # Files of another user, named like results and unfinished files.
        theirs = root / "theirs"
        for name in ("config.json", "adapter_config.json", "adapter_model.safetensors", "latest", "README.md", "src/main.rs",
                     ".candle-zero-writing-abcdef/thesis", ".weightsAbCdEf", ".d.samples-abcdef", "best.json", "loss.csv",
                     "results.jsonl", "trace.json", "notes.jsonl", ".candle-zero-abcdef", "global_step1/thesis"):
            path = theirs / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} of another user, {chance.random()}\n")
        for name in (".candle-zero-writing-ghijkl", ".candle-zero-verify-abcdef", "candle-zero-verify-abcdef"):
            for parent in (root, root / "tmp"):
                (parent / name).mkdir()
                (parent / name / "thesis").write_text("mine\n")
        (root / ".weightsAbCdEf.safetensors").write_text("mine\n")
        (root / "theirs-best").mkdir()
        (root / "theirs-best/adapter_config.json").write_text("mine\n")
        os.link(root / "data/d.jsonl", root / "hard.jsonl")
        os.symlink(root / "data/d.jsonl", root / "link.jsonl")
        os.symlink("theirs", root / "link")
        os.symlink("model", root / "linked-model")
        os.symlink("empty", root / "linked-empty")
        os.symlink("nowhere", root / "dangling")
        os.mkfifo(root / "pipe")
        (root / "read-only").mkdir()
        (root / "read-only/notes").write_text("mine\n")

    def random_path(self):
        """Returns a random path for an output, in most cases a forbidden one."""
        root, chance = self.root, self.chance
        names = ["new", "new", "new", "deep/er/new", "empty", "linked-empty", "theirs", "link", "theirs/new", "link/../model",
                 "model", "model/new", "linked-model/model.safetensors", "model/config.json", "data", "data/d.jsonl",
                 "hard.jsonl", "link.jsonl", "model/../data/./d.jsonl", "adapter", "adapter/adapter_model.safetensors", "ck",
                 "ck/latest", "ck/new", "dangling", "dangling/new", "pipe", "read-only", "read-only/new", "ds.json",
                 "ds.json/new", "theirs/notes.jsonl", "theirs/best.json", "theirs/results.jsonl", "theirs/trace.json", ".", "..",
                 "New", "new/inner", "new-best", "cache", "full/new", "tiny/new", "bound/new", "bound/notes", "deepspeed",
                 "deepspeed/latest", "model/model.safetensors.index.json"]
        return root / chance.choice(names)

    def restrict(self, skipped):
        """Makes a folder read-only and, as root, mounts small and read-only disks."""
        (self.root / "read-only").chmod(0o555)
        for name in ("full", "tiny", "bound"):
            (self.root / name).mkdir(exist_ok=True)
        if not IS_ROOT:
            skipped["small and read-only disks need root"] += 1
            return
        try:
            for name, size in (("full", "16k"), ("tiny", f"{self.chance.choice([100, 300, 700])}k")):
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "x", self.root / name], check=True,
                               stderr=subprocess.DEVNULL)
                self.mounts.append(self.root / name)
            (self.root / "bound/notes").write_text("mine\n")
            subprocess.run(["mount", "--bind", self.root / "bound", self.root / "bound"], check=True, stderr=subprocess.DEVNULL)
            self.mounts.append(self.root / "bound")
            subprocess.run(["mount", "-o", "remount,bind,ro", self.root / "bound"], check=True, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            skipped["this machine refuses mounts"] += 1

    def end(self):
        for mount in reversed(self.mounts):
            subprocess.run(["umount", "-l", mount], check=False)
        (self.root / "read-only").chmod(0o755)
        shutil.rmtree(self.root, ignore_errors=True)


class Campaign:
    def __init__(self, zerorun, seed, folder):
        self.chance, self.folder = random.Random(seed), folder
        # An unprivileged user can start zerorun from this folder.
        self.zerorun = folder / "zerorun"
        shutil.copy(zerorun, self.zerorun)
        gpt = zerorun.resolve().parent / "train_gpt"
        self.gpt = folder / "train_gpt" if gpt.exists() else None
        self.skipped, self.counts, self.problems = collections.Counter(), collections.Counter(), []
        if self.gpt:
            shutil.copy(gpt, self.gpt)
        else:
            self.skipped["train_gpt was not found next to zerorun: --timeline and --export are not tested"] += 1
        self.inputs = folder / "made"
        self.prepare()

    def prepare(self):
        """Creates the files with which every world begins."""
        inputs = self.inputs
        inputs.mkdir()
        shutil.copytree(FIXTURES / "finetune/models/llama", inputs / "model")
        lines = (FIXTURES / "finetune/smollm2/chats.jsonl").read_text().splitlines(keepends=True)[:12]
        (inputs / "d.jsonl").write_text("".join(lines))
        done = self.run(["finetune", "model", "--data", "d.jsonl", *self.short, "--steps", "2", "--out", "adapter",
                         "--save", "ck"], inputs, root=inputs)
        assert done.returncode == 0, done.stderr
        # Enough steps to make two jobs overlap on machines of any speed.
        job = ["finetune", "model", "--data", "d.jsonl", *self.short, "--out", "timed"]
        seconds = []
        for steps in ("2", "42"):
            start = time.monotonic()
            done = self.run([*job, "--steps", steps], inputs, root=inputs)
            seconds.append(time.monotonic() - start)
            assert done.returncode == 0, done.stderr
            shutil.rmtree(inputs / "timed")
        self.long = str(40 + int(40 * LONG / max(seconds[1] - seconds[0], 0.01)))
        shutil.rmtree(inputs / "home", ignore_errors=True)
        deepspeed = sorted((FIXTURES / "deepspeed").glob("*/*/latest"))
        if deepspeed:
            shutil.copytree(deepspeed[0].parent, inputs / "deepspeed")
        else:
            self.skipped["a DeepSpeed checkpoint was not found: import is not tested"] += 1

    short = ["--ctx", "48", "--batch", "2", "--lora", "r=2"]

    def environment(self, root):
        (root / "home").mkdir(exist_ok=True)
        (root / "tmp").mkdir(exist_ok=True)
        keep = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
        return keep | {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "RAYON_NUM_THREADS": "1"}

    def start(self, words, cwd, root, user=None):
        as_user = {"user": user, "group": user, "extra_groups": []} if user else {}
        return subprocess.Popen([self.zerorun, *words], cwd=cwd, env=self.environment(root), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **as_user)

    def end(self, process):
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nHANG"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, words, cwd, root, user=None):
        return self.end(self.start(words, cwd, root, user))

    def command(self, world):
        """Returns the kind of a random command, its arguments, and the path of its result (None if it has none)."""
        root, chance = world.root, self.chance
        random_path = world.random_path
        data = [str(root / "data/d.jsonl")]
        kinds = ["finetune"] * 5 + ["merge", "gguf", "consolidate", "data", "cache"]
        kinds += ["import"] if (root / "deepspeed").exists() else []
        kinds += ["gpt", "gpt"] if self.gpt else []
        kind = chance.choice(kinds)
        out, self.own_paths = random_path(), set()
        if kind == "finetune":
            words = ["finetune", str(root / "model"), "--data", *data, *self.short, "--steps", "3", "--out", str(out)]
            words += ["--ds_config", str(root / "ds.json")] if chance.random() < 0.4 else []
            if chance.random() < 0.3:
                words[words.index("--lora"):words.index("--lora") + 2] = ["--full"]
            if chance.random() < 0.5:
                save = random_path()
                words += ["--save", str(save)] + (["--resume"] if chance.random() < 0.7 else [])
                if "--resume" in words and os.path.realpath(save) == os.path.realpath(root / "ck"):
                    # The command continues the run of these checkpoints.
                    self.own_paths = {path for path in (root / "ck").rglob("*")}
            if chance.random() < 0.5:
                words += ["--metrics", str(random_path())]
            if chance.random() < 0.3:
                words += ["--cache", str(random_path())]
            if chance.random() < 0.3:
                words += ["--val", "20%", "--eval_every", "1"]
            return kind, words, out
        if kind in ("merge", "gguf"):
            format = ["--format", "gguf-f16"] if kind == "gguf" else ["--format", "hf"]
            return kind, ["merge", str(root / "model"), str(root / "adapter"), "--out", str(out), *format], out
        if kind == "consolidate":
            return kind, ["consolidate", str(root / "ck"), str(out)], out
        if kind == "import":
            name = chance.choice([[], ["--as", "mine"]])
            # An imported checkpoint becomes the latest of this library's checkpoints.
            own = ["ck/latest"] if os.path.realpath(out) == os.path.realpath(root / "ck") else []
            self.own_paths = {root / name for name in own}
            return kind, ["import", str(root / "deepspeed"), str(out), *name], out
        if kind == "data":
            return kind, ["data", "show", str(root / "model"), *data, "--cache", str(out)], None
        if kind == "cache":
            return kind, ["finetune", str(root / "model"), "--data", *data, *self.short, "--steps", "1", "--out",
                          str(root / "result"), "--cache", str(out)], root / "result"
        config = root / "gpt.json"
        config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                                      **chance.choice([{}, {"csv_monitor": {"enabled": True, "output_path": str(random_path()),
                                                                            "job_name": "j"}}])}))
        words = ["--timeline", str(random_path())] if chance.random() < 0.5 else []
        words += [str(self.gpt), "--ds_config", str(config), "--n_layer", "1", "--n_embd", "16", "--n_head", "2", "--seq_len",
                  "16", "--steps", "2", "--sample", "0"]
        words += ["--export", str(out)] if chance.random() < 0.7 else []
        words += ["--metrics", str(random_path())] if chance.random() < 0.5 else []
        if chance.random() < 0.5:
            # Checkpoints are not saved in the checkpoint folder of another run, because they would change its file `latest`.
            save = next(save for save in iter(random_path, None) if not os.path.realpath(save).startswith(str(root / "ck")))
            words += ["--save", str(save)] + (["--resume"] if chance.random() < 0.5 else [])
        return kind, words, None

    def report_problem(self, problem, words, done):
        self.problems.append(problem)
        print(f"WRONG: {problem}\n  zerorun {' '.join(map(str, words))}\n  code {done.returncode}: {done.stderr[-600:]}", flush=True)

    def check(self, world, before, words, done, out, kind):
        """Checks the conditions that must hold after any command."""
        after = snapshot(world.root)
        for path, entry in before.items():
            if path.is_relative_to(world.root / "home") or path in self.own_paths:
                continue
            if path not in after:
                self.report_problem(f"{path.relative_to(world.root)} was removed", words, done)
            elif after[path] != entry:
                self.report_problem(f"{path.relative_to(world.root)} has changed", words, done)
        unfinished = re.compile(r"^\.(candle-zero-|weights)|\.candle-zero\.lock$|^\.candle-zero")
        for path in after.keys() - before.keys():
            is_kept = path.name == ".candle-zero-outputs.json" and path.parent.name != "home"
            if unfinished.search(path.name) and not is_kept:
                self.report_problem(f"{path.relative_to(world.root)} was left behind", words, done)
            if path.is_relative_to(world.root / "home/.cache/candle-zero") and path.lstat().st_mode & 0o077:
                self.report_problem(f"{path.relative_to(world.root)} can be read by others", words, done)
        if "panicked" in done.stderr or done.returncode in (-6, 101, 134):
            self.report_problem("a panic", words, done)
        if "HANG" in done.stderr:
            self.report_problem("the command did not end within a minute", words, done)
        if done.returncode != 0 and not done.stderr.strip():
            self.report_problem("the command failed without an error message", words, done)
        if done.returncode == 0 and out is not None:
            names = [entry.name for entry in out.iterdir()] if out.is_dir() else []
            has_result = out.is_file() if kind == "gguf" else any(n.endswith(".safetensors") or n == "latest" for n in names)
            if not has_result:
                self.report_problem("the command succeeded without a result", words, done)
        if kind == "finetune" and done.returncode != 0 and "step 1/" in done.stderr:
            places = re.findall(r"(?:the result is in|the last step is saved in) (\S+?)[,;]?(?:\s|$)", done.stderr)
            if not any(pathlib.Path(place).exists() for place in places):
                self.report_problem("the command trained, but its result was not found", words, done)

    def alone(self, number):
        """Runs one command in its own world."""
        root = self.folder / f"w{number}"
        root.mkdir()
        world = World(root, self.inputs, self.chance)
        try:
            kind, words, out = self.command(world)
            user = NOBODY if IS_ROOT and self.chance.random() < 0.5 else None
            if user:
                for path in [root, *root.rglob("*")]:
                    os.chown(path, user, user, follow_symlinks=False)
            world.restrict(self.skipped)
            before = snapshot(root)
            done = self.run(words, root, root, user)
            self.counts[kind] += 1
            self.counts["refused" if done.returncode else "done"] += 1
            self.check(world, before, words, done, out, kind)
            if done.returncode == 0 and kind in ("finetune", "merge", "gguf", "consolidate") and out is not None:
                # The same command again: existing results must not be replaced.
                again = [word for word in words if word != "--resume"]
                before = snapshot(root)
                done = self.run(again, root, root, user)
                self.counts["again"] += 1
                if done.returncode == 0:
                    self.report_problem("an existing result was overwritten", again, done)
                metrics = pathlib.Path(again[again.index("--metrics") + 1]) if "--metrics" in again else None
                saved = pathlib.Path(again[again.index("--save") + 1]) if "--save" in again else None
                own = lambda path: path == metrics or saved is not None and path.is_relative_to(saved)
                self.check(world, {path: was for path, was in before.items() if not own(path)}, again, done, None, kind)
        finally:
            world.end()

    def together(self, number):
        """Runs two jobs at the same time with one shared output; the result must equal that of an undisturbed job."""
        root = self.folder / f"w{number}"
        root.mkdir()
        world = World(root, self.inputs, self.chance)
        try:
            seeds = self.chance.sample(range(1000), 2)
            shared = self.chance.choice(["--out", "--metrics", "--save"])
            job = lambda seed, out, save, metrics: [
                "finetune", "model", "--data", "data/d.jsonl", *self.short, "--steps", self.long, "--seed", str(seed), "--out", out,
                "--save", save, "--metrics", metrics]
            names = lambda n: [word if flag == shared else f"{word}{n}"
                               for flag, word in (("--out", "o"), ("--save", "s"), ("--metrics", "m.jsonl"))]
            before = snapshot(root)
            first = self.start(job(seeds[0], *names(1)), root, root)
            time.sleep(self.chance.uniform(0, 0.3))
            second = self.start(job(seeds[1], *names(2)), root, root)
            results = [self.end(first), self.end(second)]
            self.counts["two at once"] += 1
            for n, done in enumerate(results):
                self.check(world, before, job(seeds[n], *names(n + 1)), done, None, "finetune" if done.returncode == 0 else "two")
            successes = [n for n, done in enumerate(results) if done.returncode == 0]
            if len(successes) != 1:
                self.report_problem(f"of two jobs with the same {shared}, {len(successes)} succeeded", job(seeds[0], *names(1)), results[0])
            for n in successes:
                reference = root / f"o9{n}"
                alone = self.run(job(seeds[n], reference.name, f"s9{n}", f"m9{n}.jsonl"), root, root)
                out = root / names(n + 1)[0]
                same = alone.returncode == 0 and all(
                    digest(reference / name) == digest(out / name) for name in os.listdir(reference)
                    if name.endswith(".safetensors"))
                if not same:
                    self.report_problem("the result differs from that of an undisturbed job", job(seeds[n], *names(n + 1)), results[n])
        finally:
            world.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("zerorun", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outputs-campaign-"))).resolve()
        folder.chmod(0o755)
        campaign = Campaign(args.zerorun, args.seed, folder)
        start, number = time.monotonic(), 0
        while time.monotonic() - start < args.seconds:
            number += 1
            (campaign.together if number % 12 == 0 else campaign.alone)(number)
    for why in campaign.skipped:
        print(f"skipped: {why} (scripts/outputs_campaign.py)")
    figures = ", ".join(f"{count} {name}" for name, count in sorted(campaign.counts.items()))
    print(f"seed {args.seed}: {number} worlds: {figures}; {len(campaign.problems)} wrong")
    sys.exit(bool(campaign.problems))


if __name__ == "__main__":
    main()
