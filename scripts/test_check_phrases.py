#!/usr/bin/env python3
"""Tests that check_phrases.py finds a bad example of each entry of phrases.txt, and nothing in good English."""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
from check_phrases import entries, findings

PHRASES = entries((pathlib.Path(__file__).resolve().parent / "phrases.txt").read_text())
# A bad and a good example for each entry, in the order of the list.
EXAMPLES = [
    ("a value that is no number", "There is no number; it is no longer a number, it is no larger than 7, and the default is no limit."),
    ("it would be no file", "There would be no file, and the second run would be no faster."),
    ("Training goes on.", "This is what goes on in a step. The flag goes on the command line. It cannot go on to read."),
    ("going on with the next step", "To see what is going on in a rank, print its log."),
    ("The reason is said once.", "The two cases can be told apart; a rank that is idle is said to be free, and is told to stop."),
    ("what the file says of the run", "The file says that the run has ended, and tells which of the ranks failed."),
    ("It ended without a word.", "It ended without a message."),
    ("It waits for ever.", "It waits forever, and for every rank."),
    ("Nobody reads it.", "No one reads it."),
    ("a file beside the script", "a file next to the script; besides, a folder"),
    ("It rounds otherwise than rank 0.", "It rounds differently from rank 0; otherwise, the sums are equal."),
    ("a value other than before", "a value other than the default, as before"),
    ("It failed for want of memory.", "It failed for lack of memory."),
    ("The package cannot be had.", "The package is not available and can be loaded later."),
    ("The file is saved as ever.", "The file is saved as usual, as every file is."),
    ("a table that is none any more", "None of them is needed any more."),
    ("It needs an own thread.", "It needs its own thread, and another one."),
    ("in the beginning of the file", "at the beginning of the file; in the end, it fails"),
    ("in the moment in which it ends", "at the moment when it ends"),
    ("Else the job ends.", "Otherwise the job ends, or else it waits. Else if it fails, it ends."),
    ("files, folders and the like", "files, folders and similar ones; the like button"),
    ("The sums are the same to the bit.", "The sums are the same bit for bit. Set it to the bit width."),
    ("with `-best` behind its name", "with the suffix `-best`, behind the first name"),
    ("It has a thread of its own.", "It has its own thread, and the size of its own buffer."),
    ("Each head is read by itself.", "Each head is read separately. It is divided by itself."),
    ("a folder as the tool has it", "a folder in the tool's format, as long as the cache has it"),
    ("Rank 0 alone writes it.", "Only rank 0 writes it. The state alone exceeds the limit."),
    ("a sum between hosts alone", "a sum only between hosts; leave it alone"),
    ("memory for this launch alone", "memory only for this launch; for this reason, it is left alone"),
    ("on one host alone", "on only one host; one of them runs alone in the end"),
    ("Weights are packed there alone.", "Weights are packed only there."),
    ("as in DeepSpeed; so does the second", "The second does too. It ends, and so does not write."),
    ("It panics; so do all functions here.", "All functions here panic, so do not call them. It is empty, and so is dropped."),
    ("The checkpoint is whole.", "The checkpoint is complete; the whole file was read as a whole."),
    ("The file is read, all of it.", "The file is read completely, and all of its lines are used."),
    ("a buffer of so many bytes", "a buffer of this number of bytes; on so many hosts that it takes long"),
    ("a file that is there", "a file that exists; it is there for tests, and that is there to help"),
    ("what is left of the samples", "the remaining samples, what is left, and what is on the left of the table"),
    ("/// What a rank sends.", "/// What to send.\n\nfn f() {}\n/// Returns what a rank sends."),
    ("//! Where files go.", "//! Where possible, files are shared.\n\nfn f() {}\n/// Where to write files."),
    ("/// Its name.", "/// The name of the file.\n\nfn f() {}\n/// Its values are read when they are needed."),
    ("/// Those of the rank.", "/// The values of the rank; those of other ranks differ."),
    ("/// Of the argument.", "/// Of these, the first is used."),
    ("/// The most bytes of a message.", "/// The most recent message.\n\nfn f() {}\n/// The maximum number of bytes."),
]


def found(text, suffix):
    return [(line, phrase) for line, phrase, _ in findings(text, suffix, PHRASES)]


class Phrases(unittest.TestCase):
    def test_each_entry_has_a_bad_and_a_good_example(self):
        self.assertEqual(len(EXAMPLES), len(PHRASES))
        for entry, (bad, good) in zip(PHRASES, EXAMPLES):
            is_rust = bad.startswith("//")
            for text, suffix in [(bad, ".rs")] if is_rust else [(bad, ".md"), (f"// {bad}", ".rs"), (f'let text = "{bad}";', ".rs")]:
                with self.subTest(text=text):
                    self.assertTrue(findings(text, suffix, [entry]))
            for text, suffix in [(good, ".rs")] if is_rust else [(good, ".md"), (f"// {good}", ".rs"), (f"# {good}", ".sh")]:
                with self.subTest(text=text):
                    self.assertEqual(found(text, suffix), [])

    def test_a_phrase_that_continues_on_the_next_line_is_found_on_its_first_line(self):
        self.assertEqual(found("# Title\n\nIt waits for\never.", ".md"), [(3, "for ever")])
        self.assertEqual(found("fn f() {}\n/// It waits\n/// for\n/// ever.\nfn g() {}", ".rs"), [(3, "for ever")])
        self.assertEqual(found('let a = "It waits \\\n    for \\\n    ever";', ".rs"), [(2, "for ever")])
        self.assertEqual(found("x = 1\n# It waits for\n# ever.\n", ".py"), [(2, "for ever")])

    def test_code_links_and_sample_outputs_are_not_read(self):
        self.assertEqual(found("Run `nobody`, or [it](nobody.md).\n\n```text\nnobody\n```\n\n    nobody\n", ".md"), [])
        self.assertEqual(found("/// ```\n/// let nobody = 1;\n/// ```\nfn nobody() -> &'static str { beside }", ".rs"), [])
        self.assertEqual(found("nobody = 'nobody'", ".py"), [])
        self.assertEqual(found("echo 'nobody # nobody'; nobody", ".sh"), [])

    def test_comments_strings_and_diagrams_of_rust_are_read(self):
        text = 'let a = "nobody"; // nobody\nlet b = r#"a " nobody"#;\n/* nobody */\n/// ```text\n/// nobody\n/// ```\n'
        text += 'let c = \'"\'; let d = "\\"";'
        self.assertEqual([line for line, _ in found(text, ".rs")], [1, 1, 2, 3, 5])

    def test_comments_and_docstrings_of_scripts_are_read(self):
        self.assertEqual(found('"""One.\n\nNobody."""\n\n\ndef f():\n    """Nobody."""\n    return 1  # nobody\n', ".py"),
                         [(3, "Nobody"), (7, "Nobody"), (8, "nobody")])
        self.assertEqual(found("#!/bin/sh\n# Nobody.\nrun it # nobody\n", ".sh"), [(2, "Nobody"), (3, "nobody")])
        self.assertEqual(found("/* Nobody. */\n", ".c"), [(1, "Nobody")])
        self.assertEqual(found('{\n  // Nobody.\n  "a": "nobody"\n}', ".json"), [(2, "Nobody")])

    def test_paragraphs_lists_and_tables_are_separate(self):
        self.assertEqual(found("It waits for\n\never.\n- It waits for\n- ever.\n| for |\n| ever |", ".md"), [])


if __name__ == "__main__":
    unittest.main()
