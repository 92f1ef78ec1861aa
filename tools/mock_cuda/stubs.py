#!/usr/bin/env python3
"""Prints C functions that print their own name and abort, for functions that a program links to and the mock lacks.

    stubs.py --rust FILE                     each function that a Rust file declares in `extern "C" { ... }`
    stubs.py --rust FILE --without LIBRARY   those that the shared library does not define
"""
import argparse
import re
import subprocess
from pathlib import Path


def declared(text: str) -> set[str]:
    names = set()
    for block in re.finditer(r'extern "C" \{(.*?)\n?\s*\}', text, re.S):
        names |= set(re.findall(r"\bfn (\w+)\(", block[1]))
    return names


def defined(library: Path) -> set[str]:
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in symbols.splitlines() if line.strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rust", type=Path, required=True)
    parser.add_argument("--without", type=Path)
    arguments = parser.parse_args()
    names = declared(arguments.rust.read_text()) - (defined(arguments.without) if arguments.without else set())
    print("#include <stdio.h>\n#include <stdlib.h>")
    for name in sorted(names):
        print(f'void {name}(void) {{ fputs("mock_cuda: {name} is not implemented\\n", stderr); abort(); }}')


if __name__ == "__main__":
    main()
