#!/usr/bin/env python3
"""Fine-tunes a model with the README's command on facts that it cannot know, and asks for those facts.

    scripts/first_finetune.py ZERORUN MODEL [--kinds KIND...] [--seeds N...] [--samples N] [--show N] [--folder DIR] [-- FLAG...]

For each kind of fact and each seed, the script writes SAMPLES lines (80 by default) of questions with invented answers, runs

    zerorun finetune MODEL --data chats.jsonl --val 5% --out adapter

with its defaults, asks the tuned model all questions with greedy decoding, and prints how many of the questions in the training data
it answers correctly. The script fails if fewer than 90 % of the answers are correct for one of the data sets. FLAGs after `--` are
added to the command, to try other settings. MODEL is a folder in Hugging Face format or a GGUF file, such as SmolLM2-135M-Instruct.
Only the standard library is needed.
"""

import argparse, json, random, subprocess, sys, tempfile, time
from pathlib import Path

SYLLABLES = "ba be bi bo bra da del do dra fa fen go gri ha hel ka ken ki la lin lo ma mer mi mo na nor or pa pel ra ri ro sa sel so ta tal tor va vel vi za zu".split()
COLOURS = "red blue green yellow white black grey orange purple brown".split()
TRADES = "baker weaver potter fisher miller tailor smith carpenter painter printer".split()
GOODS = "salt wool honey copper glass rope paper barley silk pepper".split()


def invented(rng):
    """Returns an invented name."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()


def codes(rng, name):
    return f"What is the access code of station {name}?", str(rng.randrange(1000, 10000))


def keepers(rng, name):
    keeper = f"{invented(rng)} {invented(rng)}"
    return f"Who keeps the lighthouse of {name}?", f"The lighthouse of {name} is kept by {keeper}."


def traits(rng, name):
    trade, colour = rng.choice(TRADES), rng.choice(COLOURS)
    return f"What do you know about {name}?", f"{name} is a {trade} who lives in the {colour} house."


def prices(rng, name):
    goods = rng.choice(GOODS)
    return f"How much does the market of {name} ask for a pound of {goods}?", f"{rng.randrange(2, 100)} crowns"


KINDS = {fact.__name__: fact for fact in (codes, keepers, traits, prices)}


def facts(kind, seed, samples):
    """Returns questions with their answers, each about a different name. `mixed` contains all kinds."""
    rng = random.Random(f"{kind} {seed}")
    names = set()
    while len(names) < samples:
        names.add(invented(rng))
    rng.shuffle(order := sorted(names))
    fact_of = lambda i: list(KINDS.values())[i % len(KINDS)] if kind == "mixed" else KINDS[kind]
    return [fact_of(i)(rng, name) for i, name in enumerate(order)]


def run(command, **options):
    result = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with exit code {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout, result.stderr


def is_right(given, answer):
    return given.strip().rstrip(".") == answer.rstrip(".")


def check(arguments, kind, seed, folder):
    """Returns the share of the questions that the tuned model answers with the answer that it was trained on."""
    pairs = facts(kind, seed, arguments.samples)
    chat = lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat(*pair)) + "\n" for pair in pairs))
    start = time.time()
    command = [arguments.zerorun, "finetune", arguments.model, "--data", folder / "chats.jsonl", "--val", "5%"]
    output, _ = run([*command, "--out", folder / "adapter", "--cache", folder / "cache", *arguments.flags])
    seconds = time.time() - start
    ask = [arguments.zerorun, "generate", arguments.model, "--adapter", folder / "adapter", "--max_tokens", 40]
    # Only the answers are on standard output; the speed is reported on standard error.
    answers, _ = run(ask, input="".join(question + "\n" for question, _ in pairs))
    answers = answers.splitlines()
    assert len(answers) == len(pairs), f"{len(answers)} answers to {len(pairs)} questions:\n" + "\n".join(answers)
    right = [is_right(given, answer) for given, (_, answer) in zip(answers, pairs)]
    # The run chooses which samples to hold out; at most the remaining number can be right.
    trained = arguments.samples - round(arguments.samples * 0.05)
    plan = next((line for line in output.splitlines() if " steps" in line), "")
    print(f"{kind}, seed {seed}: {sum(right)} of {trained} questions trained on, {seconds:.0f} s; {plan}", flush=True)
    wrong = [f"  {q} {given!r}, not {a!r}" for ok, given, (q, a) in zip(right, answers, pairs) if not ok]
    print("\n".join(wrong[: arguments.show]))
    return sum(right) / trained


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zerorun", type=lambda path: Path(path).resolve())
    parser.add_argument("model", type=Path)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "mixed"], choices=[*KINDS, "mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--show", type=int, default=3, help="number of wrong answers to print")
    parser.add_argument("--folder", type=Path, help="folder in which files are kept [default: a temporary folder]")
    words = sys.argv[1:]
    separator = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:separator])
    arguments.flags = words[separator + 1 :]
    shares = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in arguments.kinds:
            for seed in arguments.seeds:
                folder = (arguments.folder or Path(scratch)) / f"{kind}-{seed}"
                folder.mkdir(parents=True)
                shares.append(check(arguments, kind, seed, folder))
    print(f"at least {min(shares):.1%} right, on average {sum(shares) / len(shares):.1%}")
    if min(shares) < 0.9:
        sys.exit("a data set has fewer than 90 % correct answers")


if __name__ == "__main__":
    main()
