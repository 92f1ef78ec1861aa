//! `zerorun --help`, completions and manual pages come from one definition of the command line.

use crate::support::processes::{stderr, stdout, zerorun};

fn printed(words: &[&str]) -> String {
    let output = zerorun().args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output)
}

/// Returns the names in the list of commands of `zerorun --help`.
fn commands() -> Vec<String> {
    let help = printed(&["--help"]);
    let list = help.split("Commands (").nth(1).unwrap().split("\n\n").next().unwrap();
    list.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_string()).collect()
}

#[test]
fn help_lists_the_commands_before_the_options() {
    let help = printed(&["--help"]);
    let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text:?} in {help}"));
    assert!(
        at("Usage: zerorun [OPTIONS] SCRIPT") < at("Commands (") && at("\n  finetune ") < at("\nOptions:\n"),
        "{help}"
    );
    assert!(commands().len() > 15, "{help}");
}

#[test]
fn completions_know_every_command_and_its_options() {
    for shell in ["bash", "zsh", "fish"] {
        let text = printed(&["completions", shell]);
        for word in commands().iter().map(String::as_str).chain(["num_ranks", "qlora"]) {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
    let output = zerorun().args(["completions", "csh"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("possible values: bash"), "{}", stderr(&output));
}

#[test]
fn every_command_has_a_manual_page() {
    let manual = printed(&["man"]);
    for command in commands() {
        let page = printed(&["man", &command]);
        assert!(page.contains(".SH NAME") && page.contains(&format!("zerorun-{command}")), "{command}: {page}");
        // Hyphens are escaped.
        assert!(manual.contains(&command.replace('-', r"\-")), "{command}");
    }
    let output = zerorun().args(["man", "fine"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no command fine; the commands are bench"), "{}", stderr(&output));
}
