#!/usr/bin/env python3
"""Unpacks Debian's rustc for x86_64, with the standard libraries of x86_64 and aarch64, into a folder.

    debian_rust.py FOLDER

This is for machines on which rustup cannot fetch a target, but which can reach Debian's archive. Versions and SHA-256 sums come from
the suite's index. The signature of the index is checked with Debian's keyring if gpgv and the keyring are installed. Nothing outside
FOLDER changes: FOLDER/rustc starts the compiler with the loader and the libraries that are unpacked into FOLDER. If FOLDER/rustc
already exists, nothing is done. The exit status is 77 if something that the script needs is not available; stderr names it.
"""

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ARCHIVE = "http://deb.debian.org/debian"
SUITE = "forky"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SKIPPED = 77
# Dependencies that rustc is installed with but does not load: this machine's own compiler and libc are used for linking.
NOT_LOADED = {"gcc", "binutils", "libc-dev", "libc-gconv-modules-extra"}

WRAPPER = """#!/bin/sh
# Runs rustc of Debian {suite} with the loader and the libraries that are unpacked next to it.
root={root}
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu:$root/usr/lib" \\
    "$root/usr/bin/rustc" --sysroot "$root/usr" "$@"
"""


class Missing(Exception):
    """Something that this machine, its network or the archive lacks."""


def fetch(path):
    try:
        with urllib.request.urlopen(f"{ARCHIVE}/{path}", timeout=30) as answer:
            return answer.read()
    except (OSError, urllib.error.URLError) as error:
        raise Missing(f"{ARCHIVE}/{path} cannot be fetched: {error}") from error


def fetch_checked(path, sha256):
    data = fetch(path)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{ARCHIVE}/{path} has the SHA-256 sum {found}, but the index lists {sha256}")
    return data


def sums():
    """Returns the SHA-256 sums of the suite's indexes, by path."""
    release = fetch(f"dists/{SUITE}/InRelease")
    if shutil.which("gpgv") and KEYRING.exists():
        with tempfile.NamedTemporaryFile() as file:
            file.write(release)
            file.flush()
            # gpgv prints only the signed part.
            run = subprocess.run(["gpgv", "--keyring", KEYRING, "--output", "-", file.name], capture_output=True)
        if run.returncode != 0:
            raise SystemExit(f"the signature of {ARCHIVE}/dists/{SUITE}/InRelease is wrong: {run.stderr.decode()}")
        release = run.stdout
    else:
        print(f"gpgv or {KEYRING} is missing: the signature of the index is not checked", file=sys.stderr)
    section = release.decode().split("\nSHA256:\n")[1]
    return {path: sum for sum, path in re.findall(r"^ ([0-9a-f]{64}) +\d+ (\S+)$", section, re.M)}


def packages(architecture, index_sums):
    """Returns the suite's packages for an architecture by name; each package is a dict of its fields."""
    path = f"main/binary-{architecture}/Packages.xz"
    if path not in index_sums:
        raise Missing(f"{SUITE} has no {path}")
    text = lzma.decompress(fetch_checked(f"dists/{SUITE}/{path}", index_sums[path])).decode()
    found = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Depends|Filename|SHA256): (.*)$", paragraph, re.M))
        if fields:
            found[fields["Package"]] = fields
    return found


def closure(names, index):
    """Returns the named packages and all packages that they load; if there are alternatives, the first is used."""
    selected, pending = {}, list(names)
    while pending:
        name = pending.pop()
        if name in selected or name in NOT_LOADED:
            continue
        if name not in index:
            raise Missing(f"{SUITE} has no package {name}")
        selected[name] = index[name]
        pending += [re.split(r"[ |:(]", depends.strip())[0] for depends in index[name].get("Depends", "").split(",") if depends]
    return list(selected.values())


def unpack(folder):
    if os.uname().machine != "x86_64":
        raise Missing(f"Debian's rustc is unpacked only for x86_64, but this machine is {os.uname().machine}")
    if not shutil.which("dpkg-deb"):
        raise Missing("dpkg-deb was not found on this machine")
    index_sums = sums()
    selected = closure(["rustc"], packages("amd64", index_sums))
    selected += [packages("arm64", index_sums)["libstd-rust-dev"]]
    # The folder is moved into place only when it is complete.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parts:
        root = Path(parts, "root")
        for package in selected:
            print(f"{package['Package']} {package['Version']}", file=sys.stderr, flush=True)
            deb = Path(parts, "deb")
            deb.write_bytes(fetch_checked(package["Filename"], package["SHA256"]))
            subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        wrapper = root / "rustc"
        wrapper.write_text(WRAPPER.format(suite=SUITE, root=folder.resolve()))
        wrapper.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        root.rename(folder)


def main():
    folder = Path(sys.argv[1])
    try:
        if not os.access(folder / "rustc", os.X_OK):
            unpack(folder)
    except Missing as error:
        print(error, file=sys.stderr)
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
