"""Finds the paths in the files of a crate: which file uses which items of which other file.

An arrow leads from a file to the file that defines an item named by a path in the first file: `use crate::a::B`, `crate::a::b()`,
`super::c`, or `child::d()` in the file of its parent. Re-exports are followed to the definition. Comments, strings and code under
`#[cfg(test)]` are ignored. A re-export of an item of a child module counts as an entry in a table of contents, which
check_floors.py ignores when it looks for cycles.
"""
import pathlib
import re

CRATE = "candle_zero"
COMMENT_OR_TEXT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\'|\\[^']+|[^'\\\n])'""", re.S
)
CFG_TEST = re.compile(r"#\[cfg\((?:test|all\([^\]]*\btest\b[^\]]*)\)\]")
USE = re.compile(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);")
MOD = re.compile(r"\bmod\s+\$?(\w+)\s*([;{])")
DEFINED = re.compile(r"\b(?:fn|struct|enum|union|trait|type|const|static|macro_rules!)\s+(?:mut\s+)?([A-Za-z_]\w*)")
PATH = re.compile(r"(?<![\w:.])[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)+")


class Module:
    """A module: its file, its children by name, the names that it defines, and the names that it imports."""

    def __init__(self, path, file, parent):
        self.path, self.file, self.parent = path, file, parent
        self.children, self.defined, self.imported, self.globs = {}, set(), {}, []


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def end_of_item(text, at):
    """Returns the end of the item that begins at `at`: after its semicolon or its closing brace."""
    depth = 0
    for i in range(at, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth < 0 or (depth == 0 and text[i] == "}"):
                return i + (depth == 0)
        elif text[i] == ";" and depth == 0:
            return i + 1
    return len(text)


def code_of(text):
    """Returns the text without comments, strings and code that is compiled only in tests, and the names of test modules."""
    text = COMMENT_OR_TEXT.sub(lambda found: blank(found[0]), text)
    only_tests = set()
    while found := CFG_TEST.search(text):
        end = end_of_item(text, found.end())
        only_tests.update(name for name, kind in MOD.findall(text[found.end():end]) if kind == ";")
        text = text[: found.start()] + blank(text[found.start():end]) + text[end:]
    return text, only_tests


def leaves(tree):
    """Returns the paths of a use declaration, each with the name that it defines: `a::{b, c as d}` gives a::b (b) and a::c (d)."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        path, _, name = (part.strip() for part in tree.partition(" as "))
        parts = [part.strip() for part in path.split("::") if part.strip()]
        if parts and parts[-1] == "self":
            parts.pop()
        return [(parts, name or parts[-1])] if parts else []
    before = [part.strip() for part in tree[:brace].split("::") if part.strip()]
    found, depth, start = [], 0, brace + 1
    for i in range(brace, len(tree)):
        depth += (tree[i] == "{") - (tree[i] == "}")
        if (tree[i] == "," and depth == 1) or depth == 0:
            for parts, name in leaves(tree[start:i]) if tree[start:i].strip() != "self" else [([], before[-1])]:
                found.append((before + parts, name))
            start = i + 1
        if depth == 0:
            break
    return found


class Crate:
    """The modules of a source folder and the paths that their files name."""

    def __init__(self, src):
        self.root = Module((), next(name for name in ("lib.rs", "main.rs") if (src / name).exists()), None)
        self.paths = []  # (module, parts, line, is a re-export)
        self.read(src, self.root)
        for program in sorted(src.glob("bin/*.rs")):
            self.read(src, Module((program.stem,), f"bin/{program.name}", None))

    def read(self, src, module):
        text, only_tests = code_of((src / module.file).read_text())
        self.body(src, module, text, 0, len(text), only_tests)

    def body(self, src, module, text, start, end, only_tests):
        """Reads text[start:end], the body of a module; inline modules in it are read as modules of the same file."""
        part, inner = text[start:end], []
        folder = pathlib.Path(*module.path)
        for found in MOD.finditer(part):
            name, at = found[1], start + found.start()
            if name in only_tests or any(a <= at < b for a, b, _ in inner):
                continue
            if found[2] == "{":
                child = Module((*module.path, name), module.file, module)
                inner.append((start + found.end(), end_of_item(text, at) - 1, child))
            else:
                options = [folder / f"{name}.rs", folder / name / "mod.rs"]
                file = next((option for option in options if (src / option).exists()), None)
                if file is None:
                    raise SystemExit(f"{module.file}: mod {name} has no file")
                child = Module((*module.path, name), file.as_posix(), module)
                self.read(src, child)
            module.children[name] = child
        for a, b, child in inner:
            self.body(src, child, text, a, b, only_tests)
            text = text[:a] + blank(text[a:b]) + text[b:]
        part = text[start:end]
        for found in USE.finditer(part):
            for parts, name in leaves(found[2]):
                line = text.count("\n", 0, start + found.start(2) + max(found[2].find(parts[-1]), 0)) + 1
                self.paths.append((module, parts, line, found[1] is not None))
                module.globs.append(parts[:-1]) if name == "*" else module.imported.setdefault(name, parts)
        rest = USE.sub(lambda found: blank(found[0]), part)
        module.defined.update(DEFINED.findall(rest))
        for found in PATH.finditer(rest):
            parts = re.split(r"\s*::\s*", found[0])
            self.paths.append((module, parts, text.count("\n", 0, start + found.start()) + 1, False))

    def walk(self, module, parts, visited=()):
        """Resolves a path: returns the module that it names, or the module of the item that it names, and the rest of the path (empty
        if it names a module). Returns None for a path of another crate."""
        root = module
        while root.parent:
            root = root.parent
        first, rest = parts[0], parts[1:]
        if first == "crate":
            module = root
        elif first == CRATE and root is not self.root:
            module = self.root
        elif first == "super":
            module = module.parent or root
        elif first in module.children:
            module = module.children[first]
        elif first in module.imported and (module.path, first) not in visited:
            return self.walk(module, module.imported[first] + rest, (*visited, (module.path, first)))
        elif first != "self":
            return None
        while rest and (rest[0] in module.children or rest[0] == "super"):
            module = module.children.get(rest[0]) or module.parent or root
            rest = rest[1:]
        if not rest or rest[0] in module.defined or (module.path, rest[0]) in visited:
            return module, rest
        visited = (*visited, (module.path, rest[0]))
        if rest[0] in module.imported:
            return self.walk(module, module.imported[rest[0]] + rest[1:], visited) or (module, rest)
        for glob in module.globs:
            found = self.walk(module, glob + rest, visited)
            if found and found[1] and found[1][0] in found[0].defined:
                return found
        return module, rest

    def arrows(self):
        """Returns (file, file, line, whether it is an entry of a table of contents), once for each pair of files and kind."""
        found = {}
        for module, parts, line, exported in self.paths:
            target, rest = self.walk(module, parts) or (module, [])
            target = target.file if rest else module.file  # a module is only a name for the paths that begin with it
            if target != module.file:
                folder = module.file.removesuffix("mod.rs").removesuffix(".rs").rstrip("/") + "/"
                contents = exported and (target.startswith(folder) or module is self.root)
                found.setdefault((module.file, target, contents), line)
        return [(a, b, line, contents) for (a, b, contents), line in found.items()]
