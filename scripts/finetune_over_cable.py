#!/usr/bin/env python3
"""Measures fine-tuning of a model with the shape of Llama 3.2 1B on two hosts, in a pipeline and at ZeRO stage 3.

    cargo build --release --bins && scripts/fetch_mpi.sh target/mpi
    python3 scripts/finetune_over_cable.py [--model SHAPE_OR_FOLDER] [--ctx N] [--steps N] [--cable BITS_PER_SECOND,MICROSECONDS ...]
                                           [--setting NAME ...] [--work DIR]

The hosts are network namespaces on this machine, each with one rank and half of the cores, connected by the simulated cable of
scripts/cable.c. The script must be run as root, on an otherwise idle machine, with MPICH in target/mpi. A step has 8 micro batches
of 1,024 tokens in bf16. In full fine-tuning, optimizer states are in files. The first step is not counted. Prints Markdown.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster_figures import RELEASE, ROOT, Cable, environment, run, step_of

MICRO_BATCHES = 8
# For each setting: flags of `zerorun finetune`, and the configuration. With two data-parallel ranks, each has half of the micro batches.
LORA = ["--lora", "r=16,alpha=32,targets=all-linear"]
SETTINGS = {
    "LoRA, pipeline": ([*LORA, "--pipeline", "2"], {}),
    "full, pipeline": (["--full", "--pipeline", "2"], {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}),
    "LoRA, stage 3": (LORA, {"zero_optimization": {"stage": 3}}),
    "full, stage 3": (["--full"], {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}),
}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", default="llama-3.2-1b")
    arguments.add_argument("--ctx", type=int, default=1024)
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--cable", nargs="+", default=["100e9,20", "1e9,300"])
    arguments.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments.add_argument("--work", type=Path)
    options = arguments.parse_args()
    env = environment("mpich")
    env["LD_LIBRARY_PATH"] = str(ROOT / "target" / "mpi" / "mpich" / "lib")
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        program = Path(folder) / "cable"
        run(["cc", "-O2", "-pthread", "-o", program, ROOT / "scripts" / "cable.c"])
        model = Path(options.model) if Path(options.model).is_dir() else work / options.model
        fixtures = ROOT / "tests" / "fixtures" / "finetune"
        if not model.exists():
            run([sys.executable, ROOT / "scripts" / "make_model.py", options.model, model, fixtures / "models" / "llama"])
        print("| setting | cable | time of a step | received per host and step |\n| --- | --- | --- | --- |", flush=True)
        for name in options.setting:
            flags, config = SETTINGS[name]
            for cable in options.cable:
                rate, delay = cable.split(",")
                hosts = Cable(program, rate, delay, Path(folder))
                try:
                    seconds, between = train(hosts, env, options, work, model, fixtures, flags, config)
                finally:
                    hosts.close()
                print(f"| {name} | {float(rate) / 1e9:g} Gbit/s, {float(delay) / 1e3:g} ms | {seconds:.2f} s | {between / 1e6:.1f} MB |",
                      flush=True)


def train(hosts, env, options, work, model, fixtures, flags, config):
    """Trains on both hosts, and returns the figures."""
    ranks = 1 if "--pipeline" in flags else 2
    config = {**config, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES // ranks}
    zero = config.get("zero_optimization", {})
    if "offload_optimizer" in zero:
        zero["offload_optimizer"]["nvme_path"] = str(work / "files")
        (work / "files").mkdir(exist_ok=True)
    (work / "config.json").write_text(json.dumps(config))
    metrics = work / "cable.jsonl"
    metrics.unlink(missing_ok=True)
    subprocess.run(["rm", "-rf", str(work / "out")], check=True)
    jobs = []
    for host in range(2):
        words = [*hosts.launch_prefix(host), RELEASE / "zerorun", "finetune", model, "--nnodes", "2", "--node_rank", host, "-n", "1",
                 "--master_addr", "10.77.0.1", "--master_port", "29500", "--data", fixtures / "smollm2" / "chats.jsonl",
                 "--dtype", "bf16", "--ctx", options.ctx, "--batch", MICRO_BATCHES, "--steps", options.steps, *flags,
                 "--ds_config", work / "config.json", "--out", work / "out", "--metrics", metrics, "--cache", work / "cache"]
        jobs.append(subprocess.Popen([str(word) for word in words], env=env, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    errors = [job.communicate()[1] for job in jobs]
    if any(job.returncode for job in jobs):
        sys.exit("".join(errors))
    return step_of(metrics, ignored=1)


if __name__ == "__main__":
    main()
