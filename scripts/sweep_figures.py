#!/usr/bin/env python3
"""Compares successive halving with training all configurations: 64 configurations of the model nano.

    cargo build --release --bins && cargo build --release --manifest-path examples/Cargo.toml --bin train_gpt
    python3 scripts/sweep_figures.py [--steps N] [--min_steps N] [--eta N] [--work DIR]

The configurations are the combinations of 16 learning rates and 4 values of weight decay. One sweep trains each of them for all steps;
another one uses ASHA. Compares the winners and the numbers of steps, and compares the weights of ASHA's winner with those of the same
configuration trained alone. Prints Markdown. An interrupted measurement continues if --work names the same folder.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target" / "release"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}
LEARNING_RATES, DECAYS = 16, [0, 0.1, 1, 10]


def sweep(folder, scheduler, flags, work, steps):
    """Runs a sweep, and returns what `zerorun sweep show --json` prints about it, and the seconds that it took."""
    (work / "ds_config.json").write_text(json.dumps(CONFIG))
    (work / "sweep.toml").write_text(f"""[parameters]
"optimizer.params.lr" = {{ log_uniform = [1e-4, 1e-1], points = {LEARNING_RATES} }}
"optimizer.params.weight_decay" = {DECAYS}
""")
    begin = time.monotonic()
    command = [RELEASE / "zerorun", "sweep", work / "sweep.toml", "--metric", "loss", "--steps", steps, "--searcher", "grid", "--scheduler",
               scheduler, *flags, "--threads", 1, "--out", folder, "--", RELEASE / "train_gpt", "--ds_config", work / "ds_config.json",
               "--model", "nano", "--ctx", 64, "--sample", 0, "--export", "{trial}/model.safetensors"]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    seconds = time.monotonic() - begin
    shown = subprocess.run([RELEASE / "zerorun", "sweep", "show", folder, "--json"], check=True, capture_output=True, text=True)
    return json.loads(shown.stdout), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--min_steps", type=int, default=32)
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--work", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        work = flags.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        return measure(flags, work.resolve())


def measure(flags, work):
    halving = ["--min_steps", flags.min_steps, "--eta", flags.eta]
    sweeps = {name: sweep(work / name, scheduler, extra, work, flags.steps)
              for name, scheduler, extra in (("asha", "asha", halving), ("all", "none", []))}
    print("| scheduler | steps | share | minutes | best configuration | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    all_steps = sweeps["all"][0]["steps_done"]
    for name, (state, seconds) in sweeps.items():
        best = best_of(state)
        print(f"| {name} | {state['steps_done']:,} | {state['steps_done'] / all_steps:.1%} | {seconds / 60:.1f} | "
              f"lr {best['parameters']['optimizer.params.lr']}, weight decay {best['parameters']['optimizer.params.weight_decay']} | "
              f"{best['results'][-1]['value']} |")
    ranked = sorted((trial["results"][-1]["value"], json.dumps(trial["parameters"])) for trial in sweeps["all"][0]["trials"])
    found = best_of(sweeps["asha"][0])
    rank = [parameters for _, parameters in ranked].index(json.dumps(found["parameters"])) + 1
    print(f"\nThe winner of ASHA is number {rank} of {len(ranked)}. The best losses: {', '.join(str(value) for value, _ in ranked[:5])}.")
    (work / "alone").exists() or subprocess.run(
        ["sh", str(work / "asha/best/run.sh"), str(work / "alone")], check=True, stdout=sys.stderr, env={**os.environ, "ZERORUN": str(RELEASE / "zerorun")})
    trial_weights = work / "asha/trials" / f"{found['trial']:04}" / "model.safetensors"
    same = trial_weights.read_bytes() == (work / "alone/model.safetensors").read_bytes()
    print(f"Its weights have {'the same bytes as' if same else 'OTHER BYTES THAN'} those of the configuration trained alone.")
    return 0 if same and rank == 1 else 1


def best_of(state):
    return next(trial for trial in state["trials"] if trial["trial"] == state["best"])


if __name__ == "__main__":
    sys.exit(main())
