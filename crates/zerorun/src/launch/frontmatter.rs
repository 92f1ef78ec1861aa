//! Reads the manifest at the top of a script, in the syntax of Rust's frontmatter (RFC 3503) as cargo scripts use it
//! (RFC 3502).
//!
//! The top of a script consists of the following parts, in this order: an optional first line `#!...`; blank lines; a
//! fence of three or more dashes, optionally followed by the word `cargo`; TOML; and the same number of dashes again.
//! Stable rustc refuses this syntax, so the `#!` line and the lines from fence to fence become comments, and every line of
//! the code keeps its number.

/// A script split into manifest and code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ScriptParts {
    /// The TOML text between the fences, and the script's line where it begins, counted from 1. `None` if there is no
    /// frontmatter.
    pub(super) manifest: Option<(String, usize)>,
    /// The complete script, with `//` in place of the `#!` line and of each line of the frontmatter.
    pub(super) code: String,
}

/// A problem in the frontmatter.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FrontmatterProblem {
    /// The line in the script, counted from 1.
    pub(super) line: usize,
    pub(super) found: String,
    pub(super) fix: String,
}

/// Splits a script.
pub(super) fn split(script: &str) -> Result<ScriptParts, FrontmatterProblem> {
    let script = script.strip_prefix('\u{feff}').unwrap_or(script);
    let lines: Vec<&str> = script.split_inclusive('\n').collect();
    let first = usize::from(lines.first().is_some_and(|line| is_shebang(line)));
    let opening = lines.iter().skip(first).position(|line| !line.trim().is_empty()).map(|at| first + at);
    let fence = opening.map_or(0, |at| dashes(lines[at]));
    let (Some(opening), 3..) = (opening, fence) else {
        return Ok(ScriptParts { manifest: None, code: with_comments(&lines, |at| at < first) });
    };
    let line = opening + 1;
    let info = lines[opening][fence..].trim();
    if !matches!(info, "" | "cargo") {
        return Err(FrontmatterProblem {
            line,
            found: format!("the frontmatter is marked `{info}`"),
            fix: "only `cargo`, or nothing, may follow the dashes".to_string(),
        });
    }
    let closing = lines.iter().skip(opening + 1).position(|line| dashes(line) >= fence).map(|at| opening + 1 + at);
    let Some(closing) = closing else {
        return Err(FrontmatterProblem {
            line,
            found: "the frontmatter that begins here is not closed".to_string(),
            fix: format!("close it with a line `{}`", "-".repeat(fence)),
        });
    };
    if lines[closing].trim_end().len() != fence {
        return Err(FrontmatterProblem {
            line: closing + 1,
            found: format!("`{}` does not close the frontmatter on line {line}", shortened(lines[closing].trim_end())),
            fix: format!("close it with a line `{}` and nothing else", "-".repeat(fence)),
        });
    }
    let manifest = lines[opening + 1..closing].concat();
    let hidden = |at: usize| at < first || (opening..=closing).contains(&at);
    Ok(ScriptParts { manifest: Some((manifest, opening + 2)), code: with_comments(&lines, hidden) })
}

/// Returns whether the line names a program, by rustc's rule: it starts with `#!`, unless an attribute follows, as in
/// `#![allow(...)]`.
fn is_shebang(line: &str) -> bool {
    line.strip_prefix("#!").is_some_and(|rest| !rest.trim_start().starts_with('['))
}

fn dashes(line: &str) -> usize {
    let count = line.bytes().take_while(|byte| *byte == b'-').count();
    if count >= 3 { count } else { 0 }
}

/// Joins the lines, with `//` in place of the hidden ones (their line ends are kept).
fn with_comments(lines: &[&str], hidden: impl Fn(usize) -> bool) -> String {
    let mut code = String::with_capacity(lines.iter().map(|line| line.len() + 2).sum());
    for (at, line) in lines.iter().enumerate() {
        if hidden(at) {
            code.push_str("//");
            code.push_str(&line[line.trim_end_matches(['\r', '\n']).len()..]);
        } else {
            code.push_str(line);
        }
    }
    code
}

fn shortened(line: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 40;
    match line.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest(script: &str) -> Option<(String, usize)> {
        split(script).unwrap().manifest
    }

    fn problem(script: &str) -> String {
        let problem = split(script).unwrap_err();
        format!("{}: {}; {}", problem.line, problem.found, problem.fix)
    }

    #[test]
    fn a_script_without_frontmatter_is_left_alone() {
        for script in [
            "",
            "fn main() {}\n",
            "// ---\n---\n",
            "#![allow(unused)]\nfn main() {}",
            " ---\na = 1\n ---\n",
            "--\n--\n",
        ] {
            assert_eq!(split(script).unwrap(), ScriptParts { manifest: None, code: script.to_string() }, "{script:?}");
        }
    }

    #[test]
    fn a_shebang_becomes_a_comment() {
        let parts = split("#!/usr/bin/env zerorun\r\nfn main() {}\n").unwrap();
        assert_eq!(parts, ScriptParts { manifest: None, code: "//\r\nfn main() {}\n".to_string() });
    }

    #[test]
    fn the_manifest_is_found_behind_shebang_and_blank_lines_and_lines_keep_their_numbers() {
        let parts =
            split("#!/usr/bin/env zerorun\n\n---- cargo \n[package]\n--- x\n----\n//! doc\nfn main() {}").unwrap();
        assert_eq!(parts.manifest, Some(("[package]\n--- x\n".to_string(), 4)));
        assert_eq!(parts.code, "//\n\n//\n//\n//\n//\n//! doc\nfn main() {}");
    }

    #[test]
    fn the_fence_may_stand_on_the_first_and_on_the_last_line() {
        assert_eq!(manifest("---\na = 1\n---"), Some(("a = 1\n".to_string(), 2)));
        assert_eq!(manifest("\u{feff}---cargo\r\na = 1\r\n---\r\n"), Some(("a = 1\r\n".to_string(), 2)));
        assert_eq!(manifest("---\n---\nfn main() {}"), Some((String::new(), 2)));
    }

    #[test]
    fn a_broken_frontmatter_is_refused_with_its_line() {
        insta::assert_snapshot!(problem("\n---\n[dependencies]\nfn main() {}\n"), @"2: the frontmatter that begins here is not closed; close it with a line `---`");
        insta::assert_snapshot!(problem("---toml\n---\n"), @"1: the frontmatter is marked `toml`; only `cargo`, or nothing, may follow the dashes");
        insta::assert_snapshot!(problem("---\na = 1\n-----\n"), @"3: `-----` does not close the frontmatter on line 1; close it with a line `---` and nothing else");
        insta::assert_snapshot!(problem("---\na = 1\n--- fn main() {}\n"), @"3: `--- fn main() {}` does not close the frontmatter on line 1; close it with a line `---` and nothing else");
    }

    proptest! {
        #[test]
        fn any_text_is_taken_apart_or_refused_and_keeps_its_lines(script in "(#!|-{0,5}|[a-z= \\r\\n\\t\u{e9}\u{feff}]|\\n|cargo){0,30}") {
            let bare = script.strip_prefix('\u{feff}').unwrap_or(&script);
            match split(&script) {
                Ok(parts) => {
                    prop_assert_eq!(parts.code.matches('\n').count(), bare.matches('\n').count());
                    if let Some((text, first_line)) = parts.manifest {
                        prop_assert!(bare.contains(&text));
                        prop_assert!(first_line >= 2 && first_line <= bare.matches('\n').count() + 1);
                    }
                }
                Err(problem) => prop_assert!(problem.line >= 1 && problem.line <= bare.matches('\n').count() + 1),
            }
        }

        #[test]
        fn a_wrapped_manifest_comes_back_whole(lines in proptest::collection::vec("[ a-z=\"\\[\\]#]{0,12}", 0..6), dashes in 3usize..7) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let fence = "-".repeat(dashes);
            let parts = split(&format!("{fence}\n{text}{fence}\nfn main() {{}}\n")).unwrap();
            prop_assert_eq!(parts.manifest, Some((text, 2)));
        }
    }
}
