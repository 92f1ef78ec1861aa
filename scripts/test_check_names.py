#!/usr/bin/env python3
"""Shows that check_names.py finds a type's name that is planted twice in a small crate, and nothing else."""
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
from check_names import problems

FILES = {
    "src/lib.rs": "mod a;\nmod b;\n#[cfg(test)]\nmod planted;\npub struct Top<T>(T);",
    "src/a.rs": "//! struct Other\npub enum One { Top(Top<u8>) }\nmod inner { pub trait Inner { type Other; } }",
    "src/b.rs": "pub type Other = u8;\nconst TEXT: &str = \"struct One;\";",
}
TWICE = ["One is defined 2 times: src/a.rs, src/b.rs"]


class Planted(unittest.TestCase):
    def found(self, allowed=None, **planted):
        with tempfile.TemporaryDirectory() as folder:
            files = FILES | {key.replace("__", "/") + ".rs": text for key, text in planted.items()}
            for file, text in files.items():
                path = pathlib.Path(folder, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return problems(pathlib.Path(folder), allowed or {})

    def test_comments_strings_variants_and_associated_types_are_no_types(self):
        self.assertEqual(self.found(), [])

    def test_a_name_of_two_files_is_found_whatever_its_kind(self):
        for text in ("struct One;", "pub(crate) struct One<'a>(&'a u8);", "unsafe trait One {}", "type One = u8;", "enum One {}"):
            self.assertEqual(self.found(src__b=text + "\nstruct Other;"), TWICE)

    def test_a_name_in_a_module_of_the_file_or_in_another_crate_is_found(self):
        self.assertEqual(self.found(src__b="mod c {\n  mod d { struct One; }\n}"), TWICE)
        found = self.found(crates__low__src__lib="struct One;")
        self.assertEqual(found, ["One is defined 2 times: src/a.rs, crates/low/src/lib.rs"])

    def test_a_name_that_only_tests_compile_is_not_found(self):
        self.assertEqual(self.found(src__b="#[cfg(test)]\nmod tests {\n  struct One;\n}\n#[cfg(test)]\nstruct Top;"), [])
        self.assertEqual(self.found(src__planted="struct One;", src__b__tests="struct One;", src__b="mod tests;"), [])

    def test_a_name_in_a_function_an_impl_or_a_macro_is_not_found(self):
        text = "fn f() { struct One; }\nimpl Inner for u8 { type One = u8; }\nmacro_rules! m { () => { struct One; } }"
        self.assertEqual(self.found(src__b=text), [])

    def test_an_allowed_name_has_a_reason_and_is_defined_twice(self):
        self.assertEqual(self.found({"One": "one type"}, src__b="struct One;"), [])
        self.assertEqual(self.found({"One": ""}, src__b="struct One;"), ["One is allowed without a reason"])
        self.assertEqual(self.found({"One": "x"}), ["One need not be allowed: it is not defined more than once"])


if __name__ == "__main__":
    unittest.main()
