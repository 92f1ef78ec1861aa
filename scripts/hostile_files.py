#!/usr/bin/env python3
"""Runs zerorun on models and data that are designed to hang or kill a program, or to exhaust its memory.

    scripts/hostile_files.py ZERORUN [--count 250] [--seed 1] [--only CASE] [--keep DIR]

Four fifths of the files are chat templates and tokenizers. One fifth are bombs: data in all formats, headers, and extreme option
values. Each file is passed to one run of `zerorun data show`, `generate`, `finetune` or `merge`. No run may be killed by a signal, take
more than 10 seconds, hold 1 GiB of memory or more, or print a backtrace. A run that fails must print an error message.
"""

import argparse
import gzip
import json
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/fixtures/finetune/models/llama"
SECONDS = 10
MEMORY = 1 << 30
CHATS = [{"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]}
         for i in range(12)]


def expression(r):
    """Returns an expression whose value is large or takes a long time to compute."""
    n = r.choice([10**5, 10**6, 10**9, 10**10, 2**31, 2**63 - 1, 2**64, 10**30])
    return r.choice([
        f"'x' * {n}", f"[1] * {n}", f"(1, 2) * {n}", f"'%{n}d'|format(1)", f"'%.{n}f'|format(1.5)", f"'{{:>{n}}}'.format('x')",
        f"'{{:.{n}f}}'.format(1.5)", f"('a\n' * 1000)|indent({n})", "('a' * 100000).replace('a', 'b' * 100000)",
        "('a' * 100000)|replace('a', 'b' * 100000)", "(['x' * 1000000] * 10000)|join", "''.join(['x' * 1000000] * 10000)",
        f"messages|batch({n}, 'x')|list", f"messages|slice({n})|list", f"range({n})|list", f"range({n})|sum", f"10 ** {n}",
        f"9 ** 9 ** 9 ** {n}", f"messages|tojson(indent={n})", f"'x'|center({n})", f"'x'.ljust({n})", f"'x'.zfill({n})",
        f"'abc'[{n}:]", f"messages[::{-n}]", "strftime_now('%c' * 1000000)", f"('a ' * 1000000)|wordwrap(1)", "('a,' * 1000000).split(',')",
        "range(100000)|map('string')|join(',' * 10000)", "('x' * 10000000)|title|upper|lower|reverse",
        "(range(100000)|list) == (range(100000)|list)", "range(100000)|sort|unique|list", f"'x'|truncate({n})",
        "dict(range(100000)|map('string')|batch(2))", "range(100000)|groupby('x')", "('<a>' * 1000000)|striptags|escape",
        f"1.5|round({min(n, 2**31)})", f"lipsum({min(n, 10**6)})", "'x' ~ messages ~ messages", f"(1).__class__({n})",
    ])


def body(r, depth=0):
    """Returns statements of a hostile template."""
    count = r.choice([1000, 99999, 100000])
    inner = lambda: body(r, depth + 1) if depth < 3 and r.random() < 0.6 else r.choice(["", "x", "{{ i }}", "{{ 'x' * 100000 }}"])
    kind = r.randrange(15)
    repeated = r.choice([300, 3000, 100000])
    return [
        lambda: f"{{% for i in range({count}) %}}{{% for j in range({count}) %}}{inner()}{{% endfor %}}{{% endfor %}}",
        lambda: f"{{% for i in range({count}) %}}{inner()}{{% endfor %}}",
        lambda: "{{ " + expression(r) + " }}",
        lambda: "{% set ns = namespace(s=" + r.choice(["'x'", "[1]", "(1,)", "{'a': 1}"]) + ") %}{% for i in range(64) %}{% set ns.s = "
        + r.choice(["ns.s ~ ns.s", "ns.s + ns.s", "[ns.s, ns.s]", "{'a': ns.s, 'b': ns.s}", "ns.s * 2", "(ns.s, ns.s)"])
        + " %}{% endfor %}{{ " + r.choice(["ns.s", "ns.s|length", "ns.s|tojson", "ns.s ~ ''", "ns.s == ns.s", "ns.s|string|length"]) + " }}",
        lambda: "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = " + r.choice(["a", "[a]", "b", "{'x': b}"])
        + " %}{% set b.b = " + r.choice(["a", "[b]", "(a, b)"]) + " %}{{ "
        + r.choice(["a", "a|tojson", "a == b", "a ~ b", "[a]|sort", "a in [b]", "a|string", "a|pprint", "[a, b]|unique|list", "a|items|list",
                    "a is eq b", "{a: b}", "a|join", "a|upper", "[a, b]|min", "[b, a]|join"]) + " }}",
        lambda: "{{ " + r.choice(["not ", "-", "- ", "(", "[", "{'a':", "not not -"]) * repeated + "1" + r.choice(["", ")" * repeated]) + " }}",
        lambda: "{{ 1" + r.choice([" + 1", "|string", ".a", "[0]", " ~ 1", " and 1", " if 1 else 1", "|default(1)", " ** 1", " == 1", "()"]) * repeated + " }}",
        lambda: r.choice(["{% if 1 %}", "{% for i in [1] %}", "{% set x %}", "{% filter upper %}", "{% macro f() %}", "{% with %}"]) * repeated,
        lambda: "{% if 0 %}" + "{% elif 0 %}" * repeated + "{% endif %}",
        lambda: "{% macro f(n) %}" + r.choice(["{{ f(n + 1) }}", "{{ f(n) }}{{ f(n) }}", "{% for i in range(99) %}{{ f(n) }}{% endfor %}"])
        + "{% endmacro %}{{ f(0) }}",
        lambda: "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        lambda: "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l" + r.choice(["", "|tojson", " == [ns.l]", "|string"]) + " }}",
        lambda: "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% if " + r.choice(
            ["s.count('y')", "s.find('y') > 0", "'y' in s", "s.upper() == s", "s|length > 3", "s.strip()", "s.split('y')|length", "s == s ~ 'x'", "s.isspace()",
             "s.startswith('y')", "s.title()", "s|trim|length", "s.endswith(['y'] * 1000)", "s.splitlines()|length"]) + " %}{% endif %}{% endfor %}",
        lambda: "{{ " + "a" * 900000 + " }}",
        lambda: "{% generation %}" * repeated + "x",
    ][kind]()


def template(r):
    hostile = "".join(body(r) for _ in range(r.choice([1, 1, 1, 2])))
    chat = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    hidden = r.random()
    if hidden < 0.2:
        # The hostile part is skipped for the conversations that zerorun uses to probe a template.
        return "{% if 'Answer 1' in messages|string %}" + hostile + "{% endif %}" + chat
    return hostile + chat if hidden < 0.8 else chat + hostile


def tokenizer(r):
    """Returns the text of a hostile or damaged tokenizer.json."""
    model = json.loads((MODEL / "tokenizer.json").read_text())
    big = r.choice([10**4, 10**6, 3 * 10**6])
    regexes = ["(a+)+$", "(a|a)*b", "(?=(a+))a*b\\1", "(.*)*x", "((a{1,100}){1,100}){1,100}", "(?<=a{1,1000})b", "a{1000}{1000}", "(" * 5000 + ")" * 5000,
               "\\p{L}+" * 3000, "(x+x+)+y", "(?:(?=a)a|b)*c", "[", "(?<!a*)b", "(?>a*)*b", "\\b*"]
    replace = lambda a, b: {"type": "Replace", "pattern": {"String": a}, "content": b}
    regex = lambda: {"Regex": r.choice(regexes)}
    part = r.choice(["normalizer", "normalizer", "pre_tokenizer", "pre_tokenizer", "decoder", "added", "model", "text", "nested", "post"])
    if part == "normalizer":
        model[part] = r.choice([
            {"type": "Sequence", "normalizers": [replace("a", "aa")] * r.choice([20, 60, 1000])},
            {"type": "Sequence", "normalizers": [replace("e", "x" * big)] * r.choice([1, 3])},
            {"type": "Sequence", "normalizers": [replace("", "x")] * r.choice([1, 60])},
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * big}] * r.choice([1, 20])},
            {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "NFKC"}] * 1000},
            {"type": "Replace", "pattern": regex(), "content": "x" * r.choice([1, 1000])},
            {"type": "Precompiled", "precompiled_charsmap": r.choice(["", "AAAA", "/////w==", "gAAAAAAA" * 1000])},
        ])
    elif part == "pre_tokenizer":
        model[part] = r.choice([
            {"type": "Split", "pattern": regex(), "behavior": r.choice(["Isolated", "Removed", "Contiguous"]), "invert": r.random() < 0.3},
            {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}] * r.choice([5, 12, 60])},
            {"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}] * 1000},
            {"type": "FixedLength", "length": r.choice([0, 1, 2**63])},
            {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        ])
    elif part == "decoder":
        model[part] = r.choice([
            {"type": "Sequence", "decoders": [replace("a", "aa")] * 60},
            {"type": "Strip", "content": "a", "start": r.choice([0, 10, 2**62]), "stop": r.choice([0, 10, 2**62])},
            {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
            {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}] * 1000},
            {"type": "Replace", "pattern": regex(), "content": "x" * 100},
            {"type": "WordPiece", "prefix": "", "cleanup": True}, {"type": "Unknown"},
        ])
    elif part == "added":
        flags = lambda: {k: r.random() < 0.5 for k in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        contents = r.choice([["a", " a", "a ", " ", "  "], ["", "x" * big], [f"t{i}" for i in range(50000)], ["\n", " \n", "\n "]])
        ids = r.choice([[512], [2**32 - 1], [0], range(512, 512 + len(contents))])
        model["added_tokens"] += [dict(flags(), content=c, id=ids[i % len(ids)]) for i, c in enumerate(contents)]
    elif part == "model":
        model[part].update(r.choice([
            {"merges": [["a", "b"]] * big}, {"merges": [["q", "zz"]]}, {"merges": "x"}, {"vocab": {"a": 2**32 - 1}}, {"vocab": {}}, {"unk_token": "nothing"},
            {"dropout": 0.5}, {"continuing_subword_prefix": "é" * 100}, {"end_of_word_suffix": "x" * big},
            {"type": "Unigram", "unk_id": 2**40, "vocab": [["a", -1e308]], "byte_fallback": True},
            {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "x" * 1000, "max_input_chars_per_word": 2**62, "vocab": {"a": 0}},
            {"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}}, {"type": "Nothing"},
        ]))
    elif part == "nested":
        deep = {"type": "NFC"}
        for _ in range(r.choice([50, 120])):
            deep = {"type": "Sequence", "normalizers": [deep]}
        model["normalizer"] = deep
        if r.random() < 0.5:
            return '{"version":"1.0","normalizer":' + '{"type":"Sequence","normalizers":[' * 100000
    elif part == "post":
        model["post_processor"] = r.choice([
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 100000, "pair": [], "special_tokens": {"x": {"id": "x", "ids": [2**31] * 100, "tokens": ["x"] * 100}}},
            {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 7]},
            {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        ])
    text = json.dumps(model)
    if part == "text":
        text = r.choice([text[: r.randrange(len(text))], "\0" * 100, "[" * 1000000, "{}", "null", '{"a":' * 100000, text.replace('"vocab"', '"vocab":{},"vocab"', 1),
                         "".join(c if r.random() > 0.001 else chr(r.randrange(1, 0x250)) for c in text)])
    return text


def parquet(name):
    return (ROOT / "tests/fixtures/finetune/parquet" / name).read_bytes()


def sparse(path, size, head=b""):
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


def varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def one_text(size, rows=1):
    """Returns a Parquet file with one column `text`; each text consists of `size` equal bytes, compressed with gzip."""
    field = lambda delta, kind, value: bytes([delta << 4 | kind]) + value
    i = lambda n: varint(n << 1)
    plain = (struct.pack("<I", size) + b"x" * size) * rows
    data = gzip.compress(plain, 6)
    page = (field(1, 5, i(0)) + field(1, 5, i(len(plain))) + field(1, 5, i(len(data)))
            + field(2, 12, field(1, 5, i(rows)) + field(1, 5, i(0)) + field(1, 5, i(3)) + field(1, 5, i(3)) + b"\0") + b"\0")
    chunk = page + data
    text = lambda t: varint(len(t)) + t
    schema = bytes([0x2C]) + field(4, 8, text(b"root")) + field(1, 5, i(1)) + b"\0" \
        + field(1, 5, i(6)) + field(2, 5, i(0)) + field(1, 8, text(b"text")) + field(2, 5, i(0)) + b"\0"
    column_metadata = field(1, 5, i(6)) + field(1, 9, bytes([0x15]) + i(0)) + field(1, 9, bytes([0x18]) + text(b"text")) + field(1, 5, i(2)) \
        + field(1, 6, i(rows)) + field(1, 6, i(len(page) + len(plain))) + field(1, 6, i(len(chunk))) + field(2, 6, i(4)) + b"\0"
    column = field(2, 6, i(4)) + field(1, 12, column_metadata) + b"\0"
    group = field(1, 9, bytes([0x1C]) + column) + field(1, 6, i(len(chunk))) + field(1, 6, i(rows)) + b"\0"
    footer = field(1, 5, i(1)) + field(1, 9, schema) + field(1, 6, i(rows)) + field(1, 9, bytes([0x1C]) + group) + b"\0"
    return b"PAR1" + chunk + footer + struct.pack("<I", len(footer)) + b"PAR1"


def bomb(r, folder):
    """Creates a bomb; returns its kind, the model, the data, and additional options for `finetune`."""
    kinds = ["line", "sparse", "list", "quote", "columns", "deep", "parquet", "parquet", "damaged", "config", "weights", "gguf", "option", "option", "adapter", "special",
             "numbers", "bom"]
    kind = r.choice(kinds)
    model, data, more = MODEL, folder / "chats.jsonl", []
    size = r.choice([65 << 20, 300 << 20, 64 << 30])
    ending = r.choice(["jsonl", "json", "csv", "tsv", "txt"])
    if kind in ("line", "sparse"):
        data = folder / f"big.{ending}"
        head = {"json": b"[", "csv": b'a,b\n"', "tsv": b'a\tb\n"'}.get(ending, b"")
        sparse(data, size, head if r.random() < 0.7 else b'{"text": "')
    elif kind == "list":
        data = folder / "list.json"
        data.write_bytes(b"[" * r.choice([10**5, 10**7]) + b"]" * r.choice([0, 10**5]))
    elif kind == "quote":
        data = folder / "quote.csv"
        data.write_bytes(b'text\n"' + b"x" * (70 << 20))
    elif kind == "columns":
        data = folder / "columns.csv"
        data.write_bytes(b"," * (30 << 20) + b"\n" + b"," * 100)
    elif kind == "deep":
        data = folder / "deep.jsonl"
        data.write_text('{"messages":' * 100000 + "\n" + '{"messages": ' + "[" * 100 + "]" * 100 + "}\n")
    elif kind == "parquet":
        data = folder / "bomb.parquet"
        data.write_bytes(one_text(r.choice([10 << 20, 65 << 20, 200 << 20, 400 << 20]), r.choice([1, 2])))
    elif kind == "damaged":
        names = sorted(p.name for p in (ROOT / "tests/fixtures/finetune/parquet").glob("*.parquet"))
        bytes_ = bytearray(parquet(r.choice(names)))
        for _ in range(r.choice([1, 3, 30])):
            bytes_[r.randrange(4, len(bytes_) - 4)] = r.randrange(256)
        data = folder / "damaged.parquet"
        data.write_bytes(bytes_)
    elif kind in ("config", "weights", "bom"):
        model = folder / "model"
        shutil.copytree(MODEL, model)
        config = json.loads((model / "config.json").read_text())
        if kind == "bom":
            (model / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(config).encode())
        elif kind == "config":
            for key in r.sample([k for k in config if isinstance(config[k], int)], r.choice([1, 1, 2, 3])):
                config[key] = r.choice([0, -1, 2**20, 2**28, 2**31, 2**40, 2**62, 2**63, 10**30, None, "x", [1], 1e308])
            (model / "config.json").write_text(r.choice([json.dumps(config), json.dumps(config), "[" * 200000, '{"a":' * 200000]))
        else:
            length = r.choice([0, 8, 2**40, 2**63, 2**64 - 1])
            header = r.choice([b"{}", b"[" * 100000, b'{"a":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,%d]}}' % (2**40, 2**40, 2**62), b'{"a":' * 100000])
            (model / "model.safetensors").write_bytes(struct.pack("<Q", r.choice([length, len(header)])) + header)
    elif kind == "gguf":
        model = folder / "model.gguf"
        head = b"GGUF" + struct.pack("<IQQ", r.choice([0, 2, 3, 99]), r.choice([0, 1, 2**60]), r.choice([1, 2**60]))
        text = lambda t: struct.pack("<Q", len(t)) + t
        model.write_bytes(head + r.choice([b"", text(b"x") + struct.pack("<IQ", 8, 2**40), text(b"x") + struct.pack("<IIQ", 9, 4, 2**40),
                                           text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100000, struct.pack("<Q", 2**63 + 5)]))
    elif kind == "option":
        n = str(r.choice([10**9, 10**12, 2**63, 2**64, -1, 0, 10**30]))
        more = r.choice([["--batch", n], ["--micro_batch", n], ["--ctx", n], ["--lora", f"r={n}"], ["--num_ranks", n], ["--eval_every", n, "--val", "10%"],
                         ["--epochs", n], ["--warmup", n], ["--lora", "r=2,alpha=1e308"], ["--seed", n]])
    elif kind == "adapter":
        adapter = folder / "adapter"
        adapter.mkdir()
        settings = {"peft_type": "LORA", "r": r.choice([0, 2**40, 2**63, "x"]), "lora_alpha": r.choice([1e308, 0, -1]), "target_modules": r.choice([["q_proj"], "(a+)+$", ["x"] * 100000])}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
        more = ["--adapter", str(adapter)]
    elif kind == "special":
        path = folder / f"special.{ending}"
        r.choice([lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to(path), path.mkdir])()
        data = path
        if r.random() < 0.4:
            model, data = folder / "model", folder / "chats.jsonl"
            shutil.copytree(MODEL, model)
            name = r.choice(["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "model.safetensors"])
            (model / name).unlink(missing_ok=True)
            r.choice([lambda: os.mkfifo(model / name), lambda: (model / name).symlink_to("/dev/zero"), lambda: sparse(model / name, 64 << 30)])()
    elif kind == "numbers":
        data = folder / "numbers.jsonl"
        data.write_text('{"text": ' + "9" * (20 << 20) + "}\n" + '{"text": "a", "x": 1e999999999}\n')
    return kind, model, data, more


def run(command, folder, trouble):
    """Runs a command and monitors it. Returns its exit code, seconds, peak resident bytes, and output."""
    out = folder / "printed"
    environment = dict(os.environ, HOME=str(folder / "home"), TMPDIR=str(folder), XDG_CACHE_HOME=str(folder / "cache"))
    environment.pop("RUST_BACKTRACE", None)
    start, peak = time.monotonic(), 0
    with open(out, "wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    # The system reports the peak of a child only at its end, and the ranks are children of zerorun, so peaks are polled.
    while process.poll() is None and time.monotonic() - start < 2 * SECONDS and peak < 2 * MEMORY:
        peak = max(peak, resident(process.pid))
        time.sleep(0.005)
    seconds = time.monotonic() - start
    if process.poll() is None:
        os.killpg(process.pid, 9)
        trouble.append("killed by this script")
    return process.wait(), seconds, peak, out.read_text(errors="replace")


def resident(pid):
    """Returns the largest peak of a process and its descendants, in bytes."""
    pids, largest = [pid], 0
    for process in pids:
        try:
            found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
            largest = max(largest, int(found[1]) << 10 if found else 0)
            pids += [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
        except OSError:
            pass
    return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zerorun", type=Path)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run only this case")
    parser.add_argument("--keep", type=Path, help="folder in which the files of failed cases are kept")
    arguments = parser.parse_args()
    zerorun, failed, slowest, largest, codes = arguments.zerorun.resolve(), 0, 0.0, 0, {}
    start = time.monotonic()
    for case in range(arguments.count):
        if arguments.only not in (None, case):
            continue
        r = random.Random(f"{arguments.seed} {case}")
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
            model, data, more = folder / "model", folder / "chats.jsonl", []
            if case % 5 == 4:
                kind, model, data, more = bomb(r, folder)
            else:
                shutil.copytree(MODEL, model)
                kind = r.choice(["template", "template", "tokenizer"])
                if kind == "template":
                    (model / "chat_template.jinja").write_text(template(r))
                else:
                    (model / "tokenizer.json").write_text(tokenizer(r))
            finetune = ["finetune", str(model), "--data", str(data), "--ctx", "64", "--batch", "2", "--lora", "r=2", "--steps", "1", "--out", "out", *more]
            choices = [finetune, ["data", "show", str(model), str(data), "--ctx", "64"], ["generate", str(model), "--prompt", "Question 1?", "--max_tokens", "4"]]
            if kind in ("adapter", "option"):
                choices = [finetune]
            elif kind in ("config", "weights", "gguf", "bom"):
                choices = [finetune, ["merge", str(model), "--out", "out"], ["generate", str(model), "--prompt", "Question"]]
            elif case % 5 == 4:
                choices = choices[:2]
            command = [str(zerorun), *r.choice(choices)]
            trouble = []
            code, seconds, peak, printed = run(command, folder, trouble)
            if code < 0 or code >= 128:
                trouble.append(f"ended by signal {-code if code < 0 else code - 128}")
            if seconds > SECONDS:
                trouble.append(f"took {seconds:.1f} s")
            if peak >= MEMORY:
                trouble.append(f"held {peak >> 20} MiB")
            if code != 0 and not printed.strip():
                trouble.append("printed no error message")
            if code == 101 or re.search(r"panicked at|RUST_BACKTRACE|stack backtrace|memory allocation of|overflowed its stack", printed):
                trouble.append("printed a panic")
            slowest, largest = max(slowest, seconds), max(largest, peak)
            codes[code] = codes.get(code, 0) + 1
            if trouble:
                failed += 1
                print(f"case {case} ({kind}, {' '.join(command[1:3])}): {'; '.join(trouble)}: exit code {code}, {seconds:.1f} s, {peak >> 20} MiB: {printed.strip()[-300:]!r}", flush=True)
                if arguments.keep:
                    shutil.copytree(folder, arguments.keep / f"{arguments.seed}-{case}", dirs_exist_ok=True, symlinks=True,
                                    ignore=lambda at, names: [n for n in names if (Path(at) / n).is_fifo() or (Path(at) / n).stat(follow_symlinks=False).st_size > 64 << 20])
            elif arguments.only is not None:
                print(f"{' '.join(command[1:3])}: exit code {code}, {seconds:.1f} s, {peak >> 20} MiB: {printed.strip()[-1000:]}")
    print(f"{arguments.count} hostile files in {time.monotonic() - start:.0f} s, {failed} failed; exit codes {dict(sorted(codes.items()))}, slowest {slowest:.1f} s, "
          f"largest {largest >> 20} MiB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
