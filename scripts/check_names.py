#!/usr/bin/env python3
"""Checks that no two types of the sources have the same name.

    scripts/check_names.py [ROOT]        reads the Rust files in ROOT/src and ROOT/crates/*/src

A type is a struct, enum, trait, union or type alias in a module. Types in functions, macros and impls, associated types, and
types that are compiled only in tests do not count. Prints every name that is defined more than once, with its files, and every name
in ALLOWED that is not, and exits with code 1 if there are any.
"""
import pathlib
import re
import sys

sys.dont_write_bytecode = True
from source_paths import MOD, code_of, end_of_item

# Names that may be defined more than once, each with its reason.
ALLOWED = {
    "CheckpointUpload": "one type, with object stores (feature `s3`) and without",
    "F32x4": "one type, with one definition per instruction set",
    "Result": "the usual alias of std's Result for the errors of a module",
}

DEFINED = re.compile(r"(?<!\$)\b(?:struct|enum|trait|union|type)\s+([A-Za-z_]\w*)")


def module_level(text):
    """Returns the text with the contents of all braces removed, except those of modules."""
    characters, at = list(text), 0
    while (brace := text.find("{", at)) >= 0:
        at = brace + 1
        heads = [found for found in MOD.finditer(text, max(0, text.rfind("\n", 0, brace)), at) if found.end() == at]
        if not heads:
            at = end_of_item(text, brace)
            characters[brace + 1 : at - 1] = " " * max(at - brace - 2, 0)
    return "".join(characters)


def sources(root):
    """Returns the source folders: that of the crate, and those of the crates below it."""
    return [folder for folder in (root / "src", *sorted(root.glob("crates/*/src"))) if folder.is_dir()]


def definitions(src):
    """Yields (name, file) of every type of a module below `src`; files that are compiled only in tests are left out."""
    texts, tests = {}, {"tests"}
    for file in sorted(src.rglob("*.rs")):
        texts[file], only_tests = code_of(file.read_text())
        folder = file.parent if file.stem in ("mod", "lib", "main") else file.with_suffix("")
        tests.update(folder / name for name in only_tests)
    for file, text in texts.items():
        ancestors = [file.with_suffix(""), *file.parents]
        if not any(ancestor in tests or ancestor.name == "tests" for ancestor in ancestors if src in ancestor.parents):
            for name in DEFINED.findall(module_level(text)):
                yield name, file


def problems(root, allowed=None):
    """Returns the problems, one line each."""
    allowed, files = ALLOWED if allowed is None else allowed, {}
    for src in sources(root):
        for name, file in definitions(src):
            files.setdefault(name, []).append(file.relative_to(root).as_posix())
    twice = {name: paths for name, paths in sorted(files.items()) if len(paths) > 1}
    found = [f"{name} is defined {len(paths)} times: {', '.join(paths)}" for name, paths in twice.items() if name not in allowed]
    found += [f"{name} need not be allowed: it is not defined more than once" for name in allowed if name not in twice]
    return found + [f"{name} is allowed without a reason" for name, reason in allowed.items() if not reason]


def main():
    root = pathlib.Path(sys.argv[1]) if sys.argv[1:] else pathlib.Path(__file__).resolve().parent.parent
    found = problems(root)
    print("\n".join(found) if found else f"every type has a unique name, except {', '.join(ALLOWED)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
