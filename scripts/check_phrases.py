#!/usr/bin/env python3
"""Finds phrases that are wrong or overused in technical English, as listed in scripts/phrases.txt.

    scripts/check_phrases.py [PATH...]       checks the files and folders (default: the whole repository)
    scripts/check_phrases.py --counts ...    prints only the number of findings per folder

Reads Markdown files (without code and links), comments and string literals of Rust files, and comments and docstrings of
scripts. Prints the file, the line, the phrase and the better phrase, and exits with code 1 if there is a finding.
"""
import ast
import collections
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUST = ("src", "crates/*/src", "examples", "benches", "tests")
FILES = [
    "README.md", "CHANGELOG.md", "docs/**/*.md", "tests/README.md", *(f"{folder}/**/*.rs" for folder in RUST), "scripts/*.py",
    "scripts/*.sh", "scripts/*.c", ".ci/run", "build.rs", "crates/zerorun/deploy/*", "ds_configs/*.json",
]
TOKEN = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|\b[bc]?r(?P<hashes>\#*)"(?P<raw>.*?)"(?P=hashes)|"(?P<text>(?:\\.|[^"\\])*)"|"""
    r"""'(?:\\[^\n']*'|[^'\\\n]')""",
    re.S,
)
ESCAPE = re.compile(r"\\\n\s*|\\u\{[0-9a-fA-F]+\}|\\.|[^\\]", re.S)
ESCAPED = {"\\n": " ", "\\t": " ", '\\"': '"', "\\'": "'", "\\\\": "\\"}
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1|\]\([^)\s]*\)|<https?:[^>]*>|https?://\S+")
LIST_OR_TABLE = re.compile(r"\s*(?:[-*+] |\d+\. |#|\||>)")


class Entry:
    """A line of the list: a regular expression and a better phrase."""

    def __init__(self, line):
        pattern, separator, self.better = line.partition(" => ")
        if not separator or not self.better.strip():
            raise SystemExit(f"phrases.txt: not of the form `regex => better`: {line}")
        self.regex = re.compile(pattern.strip(), re.I)


def entries(text):
    lines = (line.strip() for line in text.splitlines())
    return [Entry(line) for line in lines if line and not line.startswith("#")]


class Passage:
    """Consecutive lines that form a sentence or a paragraph. White space becomes single spaces; each character keeps its line number."""

    def __init__(self, marker=""):
        self.text, self.lines = marker, [0] * len(marker)

    def add(self, text, line):
        """Appends a piece of text that begins on a line."""
        for c in text:
            if not c.isspace():
                self.text += c
                self.lines.append(line)
            elif self.text and self.text[-1] != " ":
                self.text += " "
                self.lines.append(line)
            line += c == "\n"
        return self

    def matches(self, phrases):
        """Yields the line, the words and the better phrase of each occurrence of an entry."""
        text = without_code(self.text.rstrip())
        for entry in phrases:
            for match in entry.regex.finditer(text):
                first = match.start() + len(match[0]) - len(match[0].lstrip())
                line = next(line for line in self.lines[first:] if line)
                yield line, self.text[first : match.end()].rstrip(), entry.better


def without_code(text):
    """Replaces inline code and link targets with underscores."""
    return CODE.sub(lambda code: re.sub(r"[^`]", "_", code[0]), text)


def paragraphs(lines, marker=""):
    """Yields the paragraphs of (number, line) pairs of Markdown, without code blocks; in Rust comments, `text` blocks are read too."""
    passage, fence, is_read = Passage(marker), None, False
    for number, line in lines:
        stripped = line.strip()
        if fence:
            if stripped.startswith(fence):
                fence = None
            elif is_read:
                yield Passage().add(line, number)
            continue
        opening = re.match(r"(```+|~~~+)(.*)", stripped)
        if opening:
            fence, is_read = opening[1], bool(marker) and opening[2].strip() == "text"
        is_code = line.startswith("    ") and (not marker or passage.text == marker) and passage.text in ("", marker)
        if opening or not stripped or is_code or LIST_OR_TABLE.match(line):
            if passage.text not in ("", marker):
                yield passage
                passage = Passage()
        if not (opening or is_code):
            passage.add(line + "\n", number)
    if passage.text not in ("", marker):
        yield passage


def rust(text):
    """Yields the comments and string literals of a Rust file."""
    comment, marker, last = [], None, 0
    for token in TOKEN.finditer(text):
        number = text.count("\n", 0, token.start()) + 1
        if token["line"]:
            prefix = re.match(r"//[/!]?", token[0])[0] if not token[0].startswith("////") else "//"
            is_alone = not text[text.rfind("\n", 0, token.start()) + 1 : token.start()].strip()
            if comment and (prefix != marker or number != last + 1 or not is_alone):
                yield from paragraphs(comment, marker + " ")
                comment = []
            comment.append((number, token[0][len(prefix) :].removeprefix(" ")))
            marker, last = prefix, number if is_alone else -1
        elif token["block"]:
            yield Passage("// ").add(token[0][2:-2], number)
        elif token["text"] or token["raw"]:
            passage, line = Passage(), number
            for piece in ESCAPE.findall(token["text"]) if token["text"] else token["raw"]:
                is_escape = token["text"] and len(piece) > 1
                passage.add(ESCAPED.get(piece, "") if is_escape else piece, line)
                line += piece.count("\n")
            yield passage
    yield from paragraphs(comment, f"{marker} ")


def python(text):
    """Yields the comments and docstrings of a Python file."""
    comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    yield from passages_of([(t.start[0], t.line[: t.start[1]].strip() == "", t.string.lstrip("#! ")) for t in comments])
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            if isinstance(body[0].value.value, str):
                first = body[0].lineno
                yield from paragraphs([(first + n, line) for n, line in enumerate(body[0].value.value.splitlines())])


def shell(text):
    """Yields the comments of a shell script, a YAML file or a Dockerfile."""
    comments = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(r"(?:^|(?<=\s))#+(?!!|SBATCH)", line)
        if match and all(line[: match.start()].count(quote) % 2 == 0 for quote in "'\""):
            comments.append((number, not line[: match.start()].strip(), line[match.end() :]))
    yield from passages_of(comments)


def c_comments(text):
    """Yields the comments of a C or JSON file."""
    for token in TOKEN.finditer(text):
        if token["line"] or token["block"]:
            yield Passage().add(token[0].strip("/* \n"), text.count("\n", 0, token.start()) + 1)


def passages_of(comments):
    """Yields passages of (number, is alone on its line, text); comments on consecutive lines belong together."""
    passage, last = Passage(), -1
    for number, is_alone, text in comments:
        if passage.text and (number != last + 1 or not is_alone or not text.strip() or text.startswith("    ")):
            yield passage
            passage = Passage()
        if not text.startswith("    "):
            passage.add(text + "\n", number)
        last = number if is_alone else -1
    if passage.text:
        yield passage


READERS = {
    ".md": lambda text: paragraphs(list(enumerate(text.splitlines(), 1))),
    ".rs": rust, ".py": python, ".c": c_comments, ".json": c_comments, ".sh": shell, ".yaml": shell, "": shell,
}


def findings(text, suffix, phrases):
    """Returns (line, phrase, better phrase) of all findings in a text, by line."""
    return sorted(match for passage in READERS[suffix](text) for match in passage.matches(phrases))


def files(words):
    """Returns the files below the given paths, or those of the repository."""
    selected = {path for pattern in FILES for path in ROOT.glob(pattern) if path.is_file() and path.suffix in READERS}
    if words:
        paths = [pathlib.Path(word).resolve() for word in words]
        selected = {path for path in selected if any(path == parent or parent in path.parents for parent in paths)}
    return sorted(selected)


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    phrases = entries((ROOT / "scripts/phrases.txt").read_text())
    counts = collections.Counter()
    for path in files(words):
        name = path.relative_to(ROOT)
        for line, phrase, better in findings(path.read_text(), path.suffix, phrases):
            counts["/".join(name.parts[:2]) if len(name.parts) > 2 else "/".join(name.parts[:-1]) or str(name)] += 1
            if "--counts" not in sys.argv:
                print(f'{name}:{line}: "{phrase}" => {better}')
    if "--counts" in sys.argv:
        print("\n".join(f"{count:6} {folder}" for folder, count in sorted(counts.items())))
    print(f"{counts.total()} findings in {len(files(words))} files", file=sys.stderr)
    sys.exit(counts.total() > 0)


if __name__ == "__main__":
    main()
