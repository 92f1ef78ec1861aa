#!/usr/bin/env python3
"""Lists the names of all tests in src/, crates/ and tests/, read from the sources, to make sure that no test is lost when files move.

    scripts/test_names.py            prints each name (the last part of its path) and the number of tests with that name
    scripts/test_names.py COMMIT     prints the names that occur more often in COMMIT than in the working tree, and vice versa;
                                     the exit code is 1 if a name is lost
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "crates", "tests")
# Attributes and comments are allowed between `#[test]` and the function.
TEST = re.compile(r"#\[test\]\s*(?:(?:#\[.*\]|//.*)\s*)*(?:pub )?fn\s+(\$?\w+)")
# A macro that generates tests: each line `name: ...;` in its calls is a test.
MACRO = re.compile(r"macro_rules!\s*(\w+)\s*\{(.*?)^\}", re.S | re.M)


def names_in(text):
    names = [name for name in TEST.findall(text) if not name.startswith("$")]
    for macro, body in MACRO.findall(text):
        if any(name.startswith("$") for name in TEST.findall(body)):
            for call in re.findall(rf"^{macro}!\s*\{{(.*?)^\}}", text, re.S | re.M):
                names += re.findall(r"^\s*(\w+):", call, re.M)
    return names


def names_now():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.rs")]
    return Counter(name for file in files for name in names_in(file.read_text()))


def names_at(commit):
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    files = git("ls-tree", "-r", "--name-only", commit, *FOLDERS).splitlines()
    texts = (git("show", f"{commit}:{file}") for file in files if file.endswith(".rs"))
    return Counter(name for text in texts for name in names_in(text))


current = names_now()
if len(sys.argv) == 1:
    for name, count in sorted(current.items()):
        print(count, name)
    sys.exit()
before = names_at(sys.argv[1])
lost, new = before - current, current - before
print(f"{sys.argv[1]}: {before.total()} tests; now: {current.total()}; lost: {lost.total()}; new: {new.total()}")
for word, names in ("lost", lost), ("new", new):
    for name, count in sorted(names.items()):
        print(f"{word}: {name}" + (f" ({count})" if count > 1 else ""))
sys.exit(lost.total() > 0)
