#!/usr/bin/env python3
"""Checks that a module uses only modules on lower floors, as defined in scripts/floors*.txt.

    scripts/check_floors.py              checks every path in the sources of the three packages against the package's table
    scripts/check_floors.py --arrows     prints which module (room) of candle-zero uses which other module

The compiler enforces the floors between packages.

Prints every arrow (see source_paths.py) that does not lead to a lower floor, and every cycle of files that the table does not
allow. Exits with code 1 if there is one.
"""
import pathlib
import re
import sys

sys.dont_write_bytecode = True
from source_paths import Crate

MAX_CYCLES = 3
# The sources of each package, and the table of its floors.
PACKAGES = {
    "src": "floors.txt",
    "crates/candle-zero-finetune/src": "floors-finetune.txt",
    "crates/zerorun/src": "floors-zerorun.txt",
}


class Table:
    """The order of the floors and the allowed cycles, read from one of scripts/floors*.txt."""

    def __init__(self, text):
        self.floor, self.files, self.cycles = {}, {}, []
        section, number = None, 0
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if line.startswith("["):
                section = line
            elif section == "[floors]" and line:
                number += 1
                for name, patterns in re.findall(r"([\w.]+)(?:\s*\(([^)]*)\))?", line):
                    self.floor[name] = number
                    self.files[name] = (patterns or f"{name}.rs {name}/").split()
            elif section == "[cycles]" and line:
                files, _, reason = line.partition(":")
                self.cycles.append((set(files.split()), reason.strip()))

    def room(self, file):
        """Returns the room with the longest matching pattern, preferring files to folders; None if no room matches."""
        matches = [
            (not pattern.endswith("/"), len(pattern), name)
            for name, patterns in self.files.items()
            for pattern in patterns
            if re.fullmatch(pattern.replace("*", "[^/]*") + (".*" if pattern.endswith("/") else ""), file)
        ]
        return max(matches, default=(False, 0, None))[2]


def cycles_of(arrows):
    """Returns the sets of files that reach each other (Tarjan's strongly connected components of more than one file)."""
    targets = {}
    for a, b, *_ in arrows:
        targets.setdefault(a, []).append(b)
    index, low, stack, found = {}, {}, [], []

    def visit(file):
        index[file] = low[file] = len(index)
        stack.append(file)
        for other in targets.get(file, []):
            if other not in index:
                visit(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], index[other])
        if low[file] == index[file]:
            at = stack.index(file)
            cycle = set(stack[at:])
            del stack[at:]
            if len(cycle) > 1:
                found.append(cycle)

    sys.setrecursionlimit(10000)
    for file in sorted(targets):
        if file not in index:
            visit(file)
    return found


def problems(src, table):
    """Returns the problems, one line each."""
    arrows, files = Crate(src).arrows(), sorted(path.relative_to(src).as_posix() for path in src.rglob("*.rs"))
    rooms = {file: table.room(file) for file in files}
    found = [f"{file}: not in any room of the table" for file in files if rooms[file] is None]
    found += [f"the table's room {name} has no file" for name in table.floor if name not in rooms.values()]
    for a, b, line, _ in sorted(arrows):
        here, there = rooms[a], rooms[b]
        if here and there and here != there and table.floor[there] >= table.floor[here]:
            direction = "upwards" if table.floor[there] > table.floor[here] else "along the floor"
            found.append(f"{a}:{line}: {here} uses {there} ({b}), {direction}")
    arrows_in_rooms = [arrow for arrow in arrows if rooms[arrow[0]] == rooms[arrow[1]] and not arrow[3]]
    matched = []
    for cycle in cycles_of(arrows_in_rooms):
        allowed = next((files for files, _ in table.cycles if cycle <= files), None)
        matched.append(allowed)
        if allowed is None:
            found.append(f"a cycle of {len(cycle)} files:")
            found += [f"    {a}:{line}: uses {b}" for a, b, line, _ in sorted(arrows_in_rooms) if a in cycle and b in cycle]
    for files, reason in table.cycles:
        if files not in matched or not reason:
            found.append(f"the table's cycle {' '.join(sorted(files))} " + ("no longer exists" if reason else "has no reason"))
    if len(table.cycles) > MAX_CYCLES:
        found.append(f"the table has {len(table.cycles)} cycles; at most {MAX_CYCLES} are allowed")
    return found


def main():
    home = pathlib.Path(__file__).resolve().parent
    if "--arrows" in sys.argv[1:]:
        table = Table((home / "floors.txt").read_text())
        between = {(table.room(a), table.room(b)): None for a, b, *_ in sorted(Crate(home.parent / "src").arrows())}
        return print("\n".join(f"{a} -> {b}" for a, b in between if a != b))
    wrong = False
    for src, name in PACKAGES.items():
        table = Table((home / name).read_text())
        found = problems(home.parent / src, table)
        wrong |= bool(found)
        counts = f"{len(table.floor)} rooms, every arrow downwards, {len(table.cycles)} cycles of files"
        print(f"{src}: " + ("\n".join(["", *found]) if found else counts))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
