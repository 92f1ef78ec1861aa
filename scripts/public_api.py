#!/usr/bin/env python3
"""Lists the public items of the library packages, with their signatures, from rustdoc's JSON.

    scripts/public_api.py            compares the lists with api/PACKAGE.txt; prints the differences and exits with code 1 if there are any
    scripts/public_api.py --write    writes the lists

--profile NAME selects a profile of Cargo.toml, whose checked dependencies are then reused; the default is release.

Items marked #[doc(hidden)] are for the other packages of this repository. They are not listed unless a public re-export names them.
rustdoc writes JSON only as an unstable option, which RUSTC_BOOTSTRAP allows; the format is that of Rust 1.95 (FORMAT).
"""
import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 57
PACKAGES = ["candle-zero", "candle-zero-finetune"]
# The features that zerorun enables: all features of the libraries that do not need a GPU.
FEATURES = "hub,s3"
# Traits that are derived or automatic. They are listed by name on the line of the type instead of on separate lines.
MARKERS = {"Copy", "Clone", "Debug", "Default", "Eq", "Hash", "Ord", "PartialEq", "PartialOrd", "Display", "Error", "Serialize"}


def args_of(args):
    if not args:
        return ""
    if "angle_bracketed" in args:
        inner = args["angle_bracketed"]
        words = [arg.get("lifetime") or (type_of(arg["type"]) if "type" in arg else arg["const"]["expr"] if "const" in arg else "_") for arg in inner["args"]]
        for constraint in inner["constraints"]:
            binding = constraint["binding"]
            if "equality" in binding:
                words.append(f"{constraint['name']} = {type_of(binding['equality']['type'])}")
            else:
                words.append(f"{constraint['name']}: {bounds_of(binding['constraint'])}")
        return f"<{', '.join(words)}>" if words else ""
    if "parenthesized" in args:
        inner = args["parenthesized"]
        output = f" -> {type_of(inner['output'])}" if inner["output"] else ""
        return f"({', '.join(map(type_of, inner['inputs']))}){output}"
    return "(..)"


def path_of(path):
    return path["path"].split("::")[-1] + args_of(path["args"])


def bounds_of(bounds):
    words = []
    for bound in bounds:
        if "trait_bound" in bound:
            inner = bound["trait_bound"]
            words.append(("?" if inner["modifier"] == "maybe" else "") + path_of(inner["trait"]))
        elif "outlives" in bound:
            words.append(bound["outlives"])
        else:
            words.append("use<..>")
    return " + ".join(words)


def type_of(kind):
    (name, inner), = kind.items() if isinstance(kind, dict) else [(kind, None)]
    match name:
        case "resolved_path":
            return path_of(inner)
        case "dyn_trait":
            words = [path_of(bound["trait"]) for bound in inner["traits"]] + ([inner["lifetime"]] if inner["lifetime"] else [])
            return "dyn " + " + ".join(words)
        case "generic" | "primitive":
            return inner
        case "tuple":
            return f"({', '.join(map(type_of, inner))})"
        case "slice":
            return f"[{type_of(inner)}]"
        case "array":
            return f"[{type_of(inner['type'])}; {inner['len']}]"
        case "impl_trait":
            return "impl " + bounds_of(inner)
        case "borrowed_ref":
            lifetime = inner["lifetime"] + " " if inner["lifetime"] else ""
            return f"&{lifetime}{'mut ' if inner['is_mutable'] else ''}{type_of(inner['type'])}"
        case "raw_pointer":
            return f"*{'mut' if inner['is_mutable'] else 'const'} {type_of(inner['type'])}"
        case "qualified_path":
            owner = type_of(inner["self_type"])
            return f"<{owner} as {path_of(inner['trait'])}>::{inner['name']}" if inner["trait"] else f"{owner}::{inner['name']}"
        case "function_pointer":
            sig = inner["sig"]
            output = f" -> {type_of(sig['output'])}" if sig["output"] else ""
            return f"fn({', '.join(type_of(kind) for _, kind in sig['inputs'])}){output}"
    return name


def generics_of(generics):
    words = []
    for param in generics["params"]:
        kind = param["kind"]
        if "lifetime" in kind:
            words.append(param["name"])
        elif "type" in kind and not kind["type"]["is_synthetic"]:
            bounds = bounds_of(kind["type"]["bounds"])
            words.append(param["name"] + (f": {bounds}" if bounds else ""))
        elif "const" in kind:
            words.append(f"const {param['name']}: {type_of(kind['const']['type'])}")
    where = []
    for predicate in generics["where_predicates"]:
        if "bound_predicate" in predicate:
            inner = predicate["bound_predicate"]
            where.append(f"{type_of(inner['type'])}: {bounds_of(inner['bounds'])}")
    return (f"<{', '.join(words)}>" if words else ""), (f" where {', '.join(where)}" if where else "")


def function(item, name):
    inner = item["inner"]["function"]
    params, where = generics_of(inner["generics"])
    inputs = []
    for arg, kind in inner["sig"]["inputs"]:
        text = type_of(kind)
        inputs.append({"Self": "self", "&Self": "&self", "&mut Self": "&mut self"}.get(text, f"self: {text}") if arg == "self" else text)
    output = f" -> {type_of(inner['sig']['output'])}" if inner["sig"]["output"] else ""
    unsafe = "unsafe " if inner["header"]["is_unsafe"] else ""
    return f"{unsafe}fn {name}{params}({', '.join(inputs)}){output}{where}"


def is_hidden(item):
    return re.search(r"\bhidden\b", json.dumps(item["attrs"])) is not None


class Api:
    """The lines of one crate."""

    def __init__(self, crate):
        self.index, self.lines, self.seen = crate["index"], [], {}
        root = self.index[str(crate["root"])]
        self.module(root, root["name"])

    def module(self, item, path):
        # Items are listed in the module that defines them; a re-export elsewhere takes one line.
        items = item["inner"]["module"]["items"]
        for id_ in sorted(items, key=lambda id_: "use" in self.index.get(str(id_), {"inner": {}})["inner"]):
            self.item(id_, path)

    def item(self, id_, path, name=None):
        item = self.index.get(str(id_))
        if item is None or is_hidden(item):
            return
        (kind, inner), = item["inner"].items()
        if kind == "use":
            if str(inner["id"]) not in self.index:
                self.lines.append(f"pub use {path}::{inner['name']} = {inner['source']}")
            elif inner["is_glob"]:
                self.module(self.index[str(inner["id"])], path)
            else:
                self.item(inner["id"], path, inner["name"])
            return
        at = f"{path}::{name or item['name']}"
        if first := self.seen.get(id_):
            if first != at:
                self.lines.append(f"pub use {at} = {first}")
            return
        self.seen[id_] = at
        non_exhaustive = " #[non_exhaustive]" if "non_exhaustive" in json.dumps(item["attrs"]) else ""
        if kind == "module":
            self.lines.append(f"pub mod {at}")
            self.module(item, at)
        elif kind == "function":
            self.lines.append(f"pub {function(item, at)}")
        elif kind in ("struct", "enum", "union"):
            params, where = generics_of(inner["generics"])
            markers = self.markers(inner["impls"])
            self.lines.append(f"pub {kind} {at}{params}{where}{non_exhaustive}{markers}")
            self.fields(kind, inner, at)
            self.impls(inner["impls"], at)
        elif kind == "trait":
            params, where = generics_of(inner["generics"])
            bounds = bounds_of(inner["bounds"])
            self.lines.append(f"pub trait {at}{params}" + (f": {bounds}" if bounds else "") + where)
            for member in inner["items"]:
                self.member(member, at)
        elif kind == "type_alias":
            params, _ = generics_of(inner["generics"])
            self.lines.append(f"pub type {at}{params} = {type_of(inner['type'])}")
        elif kind == "constant":
            self.lines.append(f"pub const {at}: {type_of(inner['type'])}")
        elif kind == "static":
            self.lines.append(f"pub static {at}: {type_of(inner['type'])}")
        elif kind == "macro":
            self.lines.append(f"pub macro {at}!")

    def fields(self, kind, inner, at):
        if kind == "enum":
            for id_ in inner["variants"]:
                variant = self.index.get(str(id_))
                if variant is None:
                    continue
                shape = variant["inner"]["variant"]["kind"]
                text = ""
                if isinstance(shape, dict) and "tuple" in shape:
                    text = f"({', '.join(self.field(field) for field in shape['tuple'])})"
                elif isinstance(shape, dict):
                    fields = shape["struct"]["fields"]
                    text = " { " + ", ".join(f"{self.index[str(f)]['name']}: {self.field(f)}" for f in fields if str(f) in self.index) + " }"
                self.lines.append(f"pub {at}::{variant['name']}{text}")
            return
        shape = inner["kind"] if kind == "struct" else {"plain": inner}
        if isinstance(shape, dict) and "plain" in shape:
            for id_ in shape["plain"]["fields"]:
                field = self.index.get(str(id_))
                if field is not None:
                    self.lines.append(f"pub {at}.{field['name']}: {type_of(field['inner']['struct_field'])}")
        elif isinstance(shape, dict) and "tuple" in shape:
            for number, id_ in enumerate(shape["tuple"]):
                if id_ is not None and str(id_) in self.index:
                    self.lines.append(f"pub {at}.{number}: {self.field(id_)}")

    def field(self, id_):
        item = self.index.get(str(id_))
        return type_of(item["inner"]["struct_field"]) if item else "_"

    def traits(self, impls):
        for id_ in impls:
            item = self.index.get(str(id_))
            if item and not item["inner"]["impl"]["is_synthetic"] and not item["inner"]["impl"]["blanket_impl"]:
                yield item["inner"]["impl"]

    def markers(self, impls):
        names = {impl["trait"]["path"].split("::")[-1] for impl in self.traits(impls) if impl["trait"]}
        found = sorted(names & MARKERS)
        return f": {', '.join(found)}" if found else ""

    def impls(self, impls, at):
        for impl in self.traits(impls):
            if impl["trait"] is None:
                for member in impl["items"]:
                    self.member(member, at)
            elif (name := path_of(impl["trait"])).split("<")[0] not in MARKERS | {"StructuralPartialEq", "Deserialize"}:
                self.lines.append(f"impl {name} for {at}")

    def member(self, id_, at):
        item = self.index.get(str(id_))
        if item is None or is_hidden(item):
            return
        (kind, inner), = item["inner"].items()
        name = f"{at}::{item['name']}"
        if kind == "function":
            self.lines.append(f"pub {function(item, name)}")
        elif kind == "assoc_const":
            self.lines.append(f"pub const {name}: {type_of(inner['type'])}")
        elif kind == "assoc_type":
            bounds = bounds_of(inner["bounds"])
            self.lines.append(f"pub type {name}" + (f": {bounds}" if bounds else ""))


def document(profile):
    """Makes rustdoc write the JSON of all packages in one command, so that dependencies have the features of other builds."""
    command = ["cargo", "doc", "--profile", profile, "-q", "--no-deps", "--features", FEATURES]
    flags = "-Z unstable-options --output-format json --document-hidden-items --cap-lints allow"
    # Only rustdoc gets RUSTC_BOOTSTRAP: otherwise, cargo would check all dependencies again.
    with tempfile.TemporaryDirectory() as folder:
        rustdoc = Path(folder) / "rustdoc"
        rustdoc.write_text('#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc "$@"\n')
        rustdoc.chmod(0o755)
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "RUSTDOC": str(rustdoc), "RUSTDOCFLAGS": flags})


def lines_of(package):
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    crate = json.loads((ROOT / target / "doc" / f"{package.replace('-', '_')}.json").read_text())
    if crate["format_version"] != FORMAT:
        sys.exit(f"rustdoc writes JSON of format {crate['format_version']}, and this script reads format {FORMAT}; adapt the script, then change FORMAT")
    return sorted(set(Api(crate).lines))


def main():
    parser = argparse.ArgumentParser(description="Lists the public items of the library packages.")
    parser.add_argument("--write", action="store_true", help="write the lists instead of comparing them")
    parser.add_argument("--profile", default="release", help="the profile of Cargo.toml")
    arguments = parser.parse_args()
    differs = False
    document(arguments.profile)
    for package in PACKAGES:
        path = ROOT / "api" / f"{package}.txt"
        lines = lines_of(package)
        if arguments.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines) + "\n")
            continue
        recorded = path.read_text().splitlines() if path.exists() else []
        changes = [line for line in difflib.unified_diff(recorded, lines, "recorded", "now", lineterm="", n=0) if not line.startswith("@@")]
        differs |= bool(changes)
        print("\n".join(changes) if changes else f"{package}: {len(lines)} public items, as recorded in {path.relative_to(ROOT)}")
    if differs:
        print("If this is intended, run scripts/public_api.py --write and describe the change for users in CHANGELOG.md.")
    sys.exit(differs)


if __name__ == "__main__":
    main()
