#!/usr/bin/env python3
"""Checks the dependencies that users of the three packages compile: licences, sources, and packages in two versions.

    scripts/check_dependencies.py

Performs the checks of `cargo deny check licenses sources bans`; building cargo-deny takes longer than all of CI's checks that need
no build. Reads `cargo metadata` for Linux on x86_64 and aarch64 with features hub and s3, without dependencies for tests. Exits
with code 1 if a package has a licence that is not in LICENCES, does not come from crates.io or this repository, or occurs in
several versions without a reason in TWICE. An entry of TWICE that is no longer needed is also an error.
"""
import json
import re
import subprocess
import sys

# Licences that allow linking into any program. MPL-2.0 (option-ext, for hf-hub) requires publishing only the
# sources of its own files.
LICENCES = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CDLA-Permissive-2.0", "ISC",
    "MIT", "MIT-0", "MPL-2.0", "Unicode-3.0", "Unlicense", "Zlib",
}
# Packages that occur in more than one version, with the packages that need the older ones.
TWICE = {
    "base64": "spm_precompiled, of tokenizers",
    "crypto-common": "digest",
    "digest": "crc-fast, of object_store",
    "getrandom": "ring, ahash, rand",
    "hashbrown": "safetensors",
    "itertools": "tokenizers",
    "rand": "candle-core",
    "rand_core": "rand",
    "syn": "derive_builder, of tokenizers",
}
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
OWN = {"candle-zero", "candle-zero-finetune", "zerorun"}


def metadata(target):
    words = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target, "--features", "hub,s3"]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


def is_allowed(licence):
    """Returns whether an SPDX expression of OR, AND and parentheses can be satisfied with the allowed licences."""
    words = re.findall(r"\(|\)|[\w.+-]+(?: WITH [\w.+-]+)?", licence.replace("/", " OR "))

    def term(at):
        if words[at] == "(":
            value, at = disjunction(at + 1)
            return value, at + 1
        return words[at] in LICENCES, at + 1

    def conjunction(at):
        value, at = term(at)
        while at < len(words) and words[at] == "AND":
            other, at = term(at + 1)
            value = value and other
        return value, at

    def disjunction(at):
        value, at = conjunction(at)
        while at < len(words) and words[at] == "OR":
            other, at = conjunction(at + 1)
            value = value or other
        return value, at

    return bool(words) and disjunction(0)[0]


def compiled_packages(cargo_metadata):
    """Returns the packages that the three packages compile into users' programs, by id."""
    packages = {package["id"]: package for package in cargo_metadata["packages"]}
    needs = {
        node["id"]: [dep["pkg"] for dep in node["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
        for node in cargo_metadata["resolve"]["nodes"]
    }
    reached, pending = set(), [id_ for id_, package in packages.items() if package["name"] in OWN and package["source"] is None]
    while pending:
        id_ = pending.pop()
        if id_ not in reached:
            reached.add(id_)
            pending += needs[id_]
    return {id_: packages[id_] for id_ in reached}


def main():
    packages = {id_: package for target in TARGETS for id_, package in compiled_packages(metadata(target)).items()}
    problems, versions = [], {}
    for package in packages.values():
        name = f"{package['name']} {package['version']}"
        versions.setdefault(package["name"], set()).add(package["version"])
        if not is_allowed(package["license"] or ""):
            problems.append(f"{name}: licence {package['license']!r} is not allowed (LICENCES in scripts/check_dependencies.py)")
        source = package["source"]
        if source is None and package["name"] not in OWN or source and "crates.io" not in source:
            problems.append(f"{name}: comes from {source or package['manifest_path']}, not from crates.io")
    for name, occurring in sorted(versions.items()):
        if len(occurring) > 1 and name not in TWICE:
            problems.append(f"{name}: occurs in versions {', '.join(sorted(occurring))}; use one, or give the reason in TWICE")
    problems += [f"{name}: in TWICE, but occurs in one version; remove the entry" for name in TWICE if len(versions.get(name, ())) < 2]
    print("\n".join(sorted(problems)) if problems else f"{len(packages)} packages: licences, sources and versions are as allowed")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
