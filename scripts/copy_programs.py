#!/usr/bin/env python3
"""Copies programs that cargo has built to a folder, without cargo's suffixes and without debug information.

    cargo build --message-format json | copy_programs.py FOLDER NAME...

NAME is the name of a binary, a test, or a library's unit tests. Exit code: 1 if cargo has not built one of them.
"""

import json
import os
import shutil
import subprocess
import sys


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    built = {}
    for line in sys.stdin:
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable"):
            built[message["target"]["name"]] = message["executable"]
    missing = [name for name in names if name not in built]
    if missing:
        sys.exit(f"cargo has not built {', '.join(missing)}")
    for name in names:
        path = os.path.join(folder, name)
        shutil.copy(built[name], path)
        if shutil.which("strip"):
            subprocess.run(["strip", path], check=True)
        print(f"{path}: {os.path.getsize(path) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
