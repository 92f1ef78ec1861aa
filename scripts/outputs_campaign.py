#!/usr/bin/env python3
"""Looks for a command of zerorun that touches what is not its own.

    scripts/outputs_campaign.py ZERORUN [--seconds 60] [--seed 1]

Each round makes a small world of a model, data, an adapter, checkpoints and files of other people's, and starts a command
whose outputs lie where chance puts them: on an input, in one, on a link to one, in a folder with foreign files, on a read-only
folder or a full disk, on a pipe, or where a second job writes at the same time. Afterwards

  - every file that was there is there, byte for byte, with its link or its name,
  - nothing that is not complete lies about,
  - a command that says it is done has left its result, and one that has trained in vain says where the result is,
  - of two jobs with one output, at most one is done, and it has the bytes of a run that was left alone.

Exits with 1 if something of this does not hold. What the machine cannot do (mounts without root) is skipped, and reported.
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
# Seconds that each of two jobs at once trains: the second waits 2 s for locks, as the first may be one that was killed.
LONG = 3.0
IS_ROOT = os.geteuid() == 0


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def look(folder):
    """What is in a folder: files with their digests and modes, links with what they name, folders, pipes."""
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
    """A folder with inputs and files of other people's."""

    def __init__(self, root, made, chance):
        self.root, self.chance, self.mounts = root, chance, []
        for name in ("model", "adapter", "ck", "deepspeed"):
            if (made / name).exists():
                shutil.copytree(made / name, root / name)
        (root / "data").mkdir()
        shutil.copy(made / "d.jsonl", root / "data/d.jsonl")
        (root / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
        for name in ("cache", "home", "tmp", "empty"):
            (root / name).mkdir()
        # Of somebody else's: names that results and unfinished files have too.
        theirs = root / "theirs"
        for name in ("config.json", "adapter_config.json", "adapter_model.safetensors", "latest", "README.md", "src/main.rs",
                     ".candle-zero-writing-abcdef/thesis", ".weightsAbCdEf", ".d.samples-abcdef", "best.json", "loss.csv",
                     "results.jsonl", "trace.json", "notes.jsonl", ".candle-zero-abcdef", "global_step1/thesis"):
            path = theirs / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} of somebody else's, {chance.random()}\n")
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

    def places(self):
        """Where an output may be put: mostly where it must not be."""
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
        """A read-only folder and, for root, small and read-only disks."""
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
        # Where a user without rights can start it.
        self.zerorun = folder / "zerorun"
        shutil.copy(zerorun, self.zerorun)
        gpt = zerorun.resolve().parent / "train_gpt"
        self.gpt = folder / "train_gpt" if gpt.exists() else None
        self.skipped, self.counts, self.wrong = collections.Counter(), collections.Counter(), []
        if self.gpt:
            shutil.copy(gpt, self.gpt)
        else:
            self.skipped["there is no train_gpt beside zerorun: --timeline and --export are not tried"] += 1
        self.made = folder / "made"
        self.prepare()

    def prepare(self):
        """What every world begins with."""
        made = self.made
        made.mkdir()
        shutil.copytree(FIXTURES / "finetune/models/llama", made / "model")
        lines = (FIXTURES / "finetune/smollm2/chats.jsonl").read_text().splitlines(keepends=True)[:12]
        (made / "d.jsonl").write_text("".join(lines))
        done = self.run(["finetune", "model", "--data", "d.jsonl", *self.short, "--steps", "2", "--out", "adapter",
                         "--save", "ck"], made, root=made)
        assert done.returncode == 0, done.stderr
        # So many steps that two jobs are at work at once, however fast the machine is.
        job = ["finetune", "model", "--data", "d.jsonl", *self.short, "--out", "timed"]
        seconds = []
        for steps in ("2", "42"):
            begun = time.monotonic()
            done = self.run([*job, "--steps", steps], made, root=made)
            seconds.append(time.monotonic() - begun)
            assert done.returncode == 0, done.stderr
            shutil.rmtree(made / "timed")
        self.long = str(40 + int(40 * LONG / max(seconds[1] - seconds[0], 0.01)))
        shutil.rmtree(made / "home", ignore_errors=True)
        deepspeed = sorted((FIXTURES / "deepspeed").glob("*/*/latest"))
        if deepspeed:
            shutil.copytree(deepspeed[0].parent, made / "deepspeed")
        else:
            self.skipped["there is no checkpoint of DeepSpeed: import is not tried"] += 1

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
        """A command, the outputs that it was told, and the folder or file that has its result if all is well."""
        root, chance = world.root, self.chance
        place = world.places
        data = [str(root / "data/d.jsonl")]
        kinds = ["finetune"] * 5 + ["merge", "gguf", "consolidate", "data", "cache"]
        kinds += ["import"] if (root / "deepspeed").exists() else []
        kinds += ["gpt", "gpt"] if self.gpt else []
        kind = chance.choice(kinds)
        out, self.own = place(), set()
        if kind == "finetune":
            words = ["finetune", str(root / "model"), "--data", *data, *self.short, "--steps", "3", "--out", str(out)]
            words += ["--ds_config", str(root / "ds.json")] if chance.random() < 0.4 else []
            if chance.random() < 0.3:
                words[words.index("--lora"):words.index("--lora") + 2] = ["--full"]
            if chance.random() < 0.5:
                save = place()
                words += ["--save", str(save)] + (["--resume"] if chance.random() < 0.7 else [])
                if "--resume" in words and os.path.realpath(save) == os.path.realpath(root / "ck"):
                    # It continues the run of these checkpoints.
                    self.own = {path for path in (root / "ck").rglob("*")}
            if chance.random() < 0.5:
                words += ["--metrics", str(place())]
            if chance.random() < 0.3:
                words += ["--cache", str(place())]
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
            # Among checkpoints of this library a new one becomes the latest.
            own = ["ck/latest"] if os.path.realpath(out) == os.path.realpath(root / "ck") else []
            self.own = {root / name for name in own}
            return kind, ["import", str(root / "deepspeed"), str(out), *name], out
        if kind == "data":
            return kind, ["data", "show", str(root / "model"), *data, "--cache", str(out)], None
        if kind == "cache":
            return kind, ["finetune", str(root / "model"), "--data", *data, *self.short, "--steps", "1", "--out",
                          str(root / "result"), "--cache", str(out)], root / "result"
        config = root / "gpt.json"
        config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                                      **chance.choice([{}, {"csv_monitor": {"enabled": True, "output_path": str(place()),
                                                                            "job_name": "j"}}])}))
        words = ["--timeline", str(place())] if chance.random() < 0.5 else []
        words += [str(self.gpt), "--ds_config", str(config), "--n_layer", "1", "--n_embd", "16", "--n_head", "2", "--seq_len",
                  "16", "--steps", "2", "--sample", "0"]
        words += ["--export", str(out)] if chance.random() < 0.7 else []
        words += ["--metrics", str(place())] if chance.random() < 0.5 else []
        if chance.random() < 0.5:
            # Not among checkpoints of another run: there the newest becomes the latest.
            save = next(path for path in iter(place, None) if not os.path.realpath(path).startswith(str(root / "ck")))
            words += ["--save", str(save)] + (["--resume"] if chance.random() < 0.5 else [])
        return kind, words, None

    def tell(self, what, words, done):
        self.wrong.append(what)
        print(f"WRONG: {what}\n  zerorun {' '.join(map(str, words))}\n  code {done.returncode}: {done.stderr[-600:]}", flush=True)

    def check(self, world, before, words, done, out, kind):
        """What must hold whatever happened."""
        after = look(world.root)
        for path, was in before.items():
            if path.is_relative_to(world.root / "home") or path in self.own:
                continue
            if path not in after:
                self.tell(f"{path.relative_to(world.root)} is gone", words, done)
            elif after[path] != was:
                self.tell(f"{path.relative_to(world.root)} has changed", words, done)
        unfinished = re.compile(r"^\.(candle-zero-|weights)|\.candle-zero\.lock$|^\.candle-zero")
        for path in after.keys() - before.keys():
            is_kept = path.name == ".candle-zero-outputs.json" and path.parent.name != "home"
            if unfinished.search(path.name) and not is_kept:
                self.tell(f"{path.relative_to(world.root)} lies about", words, done)
            if path.is_relative_to(world.root / "home/.cache/candle-zero") and path.lstat().st_mode & 0o077:
                self.tell(f"{path.relative_to(world.root)} can be read by others", words, done)
        if "panicked" in done.stderr or done.returncode in (-6, 101, 134):
            self.tell("a panic", words, done)
        if "HANG" in done.stderr:
            self.tell("no end within a minute", words, done)
        if done.returncode != 0 and not done.stderr.strip():
            self.tell("no word about what is wrong", words, done)
        if done.returncode == 0 and out is not None:
            names = [entry.name for entry in out.iterdir()] if out.is_dir() else []
            is_there = out.is_file() if kind == "gguf" else any(n.endswith(".safetensors") or n == "latest" for n in names)
            if not is_there:
                self.tell("it says that it is done, and there is no result", words, done)
        if kind == "finetune" and done.returncode != 0 and "step 1/" in done.stderr:
            places = re.findall(r"(?:the result is in|the last step is saved in) (\S+?)[,;]?(?:\s|$)", done.stderr)
            if not any(pathlib.Path(place).exists() for place in places):
                self.tell("it has trained, and the result is nowhere", words, done)

    def alone(self, number):
        """One command in a world of its own."""
        root = self.folder / f"w{number}"
        root.mkdir()
        world = World(root, self.made, self.chance)
        try:
            kind, words, out = self.command(world)
            user = NOBODY if IS_ROOT and self.chance.random() < 0.5 else None
            if user:
                for path in [root, *root.rglob("*")]:
                    os.chown(path, user, user, follow_symlinks=False)
            world.restrict(self.skipped)
            before = look(root)
            done = self.run(words, root, root, user)
            self.counts[kind] += 1
            self.counts["refused" if done.returncode else "done"] += 1
            self.check(world, before, words, done, out, kind)
            if done.returncode == 0 and kind in ("finetune", "merge", "gguf", "consolidate") and out is not None:
                # Once more into the same place: what is there is not replaced, and stays.
                again = [word for word in words if word != "--resume"]
                before = look(root)
                done = self.run(again, root, root, user)
                self.counts["again"] += 1
                if done.returncode == 0:
                    self.tell("a result that is there was written over", again, done)
                metrics = pathlib.Path(again[again.index("--metrics") + 1]) if "--metrics" in again else None
                saved = pathlib.Path(again[again.index("--save") + 1]) if "--save" in again else None
                own = lambda path: path == metrics or saved is not None and path.is_relative_to(saved)
                self.check(world, {path: was for path, was in before.items() if not own(path)}, again, done, None, kind)
        finally:
            world.end()

    def together(self, number):
        """Two jobs at once with one output; what stays has the bytes of a job that was left alone."""
        root = self.folder / f"w{number}"
        root.mkdir()
        world = World(root, self.made, self.chance)
        try:
            seeds = self.chance.sample(range(1000), 2)
            shared = self.chance.choice(["--out", "--metrics", "--save"])
            job = lambda seed, out, save, metrics: [
                "finetune", "model", "--data", "data/d.jsonl", *self.short, "--steps", self.long, "--seed", str(seed), "--out", out,
                "--save", save, "--metrics", metrics]
            names = lambda n: [word if flag == shared else f"{word}{n}"
                               for flag, word in (("--out", "o"), ("--save", "s"), ("--metrics", "m.jsonl"))]
            before = look(root)
            first = self.start(job(seeds[0], *names(1)), root, root)
            time.sleep(self.chance.uniform(0, 0.3))
            second = self.start(job(seeds[1], *names(2)), root, root)
            ended = [self.end(first), self.end(second)]
            self.counts["two at once"] += 1
            for n, done in enumerate(ended):
                self.check(world, before, job(seeds[n], *names(n + 1)), done, None, "finetune" if done.returncode == 0 else "two")
            well = [n for n, done in enumerate(ended) if done.returncode == 0]
            if len(well) != 1:
                self.tell(f"of two jobs with one {shared}, {len(well)} are done", job(seeds[0], *names(1)), ended[0])
            for n in well:
                beside = root / f"o9{n}"
                alone = self.run(job(seeds[n], beside.name, f"s9{n}", f"m9{n}.jsonl"), root, root)
                out = root / names(n + 1)[0]
                same = alone.returncode == 0 and all(
                    digest(beside / name) == digest(out / name) for name in os.listdir(beside)
                    if name.endswith(".safetensors"))
                if not same:
                    self.tell("the result is not that of a job that was left alone", job(seeds[n], *names(n + 1)), ended[n])
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
        begun, number = time.monotonic(), 0
        while time.monotonic() - begun < args.seconds:
            number += 1
            (campaign.together if number % 12 == 0 else campaign.alone)(number)
    for why in campaign.skipped:
        print(f"skipped: {why} (scripts/outputs_campaign.py)")
    figures = ", ".join(f"{count} {name}" for name, count in sorted(campaign.counts.items()))
    print(f"seed {args.seed}: {number} worlds: {figures}; {len(campaign.wrong)} wrong")
    sys.exit(bool(campaign.wrong))


if __name__ == "__main__":
    main()
