#!/usr/bin/env python3
"""Tests that check_floors.py finds the upward arrows and cycles that are planted in a small crate, and nothing else."""
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
from check_floors import Table, problems

FILES = {
    "lib.rs": "mod high;\nmod low;\npub use high::Top;",
    "high/mod.rs": "mod part;\npub use part::{Part, self};\npub struct Top;\nfn f() { part::g() }\nfn t() { tests::x() }",
    "high/part.rs": "use crate::low::{self, a::{Deep as D}};\npub struct Part;\n#[cfg(test)]\nmod tests { use super::super::Top; }",
    "low/mod.rs": "//! crate::high::Top\npub mod a;\nconst TEXT: &str = \"crate::high::Top\";",
    "low/a.rs": "pub struct Deep;\n#[cfg(test)]\nuse crate::high::Top;",
}
TABLE = "[floors]\nlow\nhigh\nlib"
CYCLE = "\n[cycles]\nhigh/mod.rs high/part.rs: a reason"
ENDS_A_CYCLE = "use super::Top;"
UP = "high (high/part.rs), upwards"


class Planted(unittest.TestCase):
    def found(self, table=TABLE, **planted):
        with tempfile.TemporaryDirectory() as folder:
            for file, text in (FILES | {key.replace("__", "/") + ".rs": text for key, text in planted.items()}).items():
                path = pathlib.Path(folder, file)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            return problems(pathlib.Path(folder), Table(table))

    def test_comments_strings_tests_and_reexports_are_no_arrows(self):
        self.assertEqual(self.found(), [])

    def test_an_import_upwards_is_found_in_nested_braces_on_its_line(self):
        found = self.found(low__a="pub struct Deep;\nuse crate::{\n  high::Part};")
        self.assertEqual(found, [f"low/a.rs:3: low uses {UP}"])

    def test_a_path_upwards_is_found_in_code(self):
        self.assertEqual(self.found(low__a="pub fn f(part: &crate::high::part::Part) {}"), [f"low/a.rs:1: low uses {UP}"])
        self.assertEqual(self.found(low__a="use super::super::high;\nfn f(part: &high::Part) {}"), [f"low/a.rs:2: low uses {UP}"])

    def test_a_name_of_the_root_leads_to_its_module(self):
        self.assertEqual(self.found(low__a="use crate::Top;"), ["low/a.rs:1: low uses high (high/mod.rs), upwards"])

    def test_rooms_of_one_floor_do_not_use_each_other(self):
        found = self.found("[floors]\nlow high\nlib")
        self.assertEqual(found, ["high/part.rs:1: high uses low (low/a.rs), along the floor"])

    def test_a_circle_of_files_is_found_unless_the_table_allows_it(self):
        arrows = ["    high/mod.rs:4: uses high/part.rs", "    high/part.rs:1: uses high/mod.rs"]
        self.assertEqual(self.found(high__part=ENDS_A_CYCLE), ["a cycle of 2 files:", *arrows])
        self.assertEqual(self.found(TABLE + CYCLE, high__part=ENDS_A_CYCLE), [])

    def test_what_the_table_says_holds(self):
        self.assertEqual(self.found(TABLE + CYCLE), ["the table's cycle high/mod.rs high/part.rs no longer exists"])
        self.assertEqual(self.found(TABLE + "\nnone"), ["the table's room none has no file"])
        self.assertEqual(self.found(other=""), ["other.rs: not in any room of the table"])


if __name__ == "__main__":
    unittest.main()
