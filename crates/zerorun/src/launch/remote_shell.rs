//! Commands on other hosts, through ssh or the program that replaces it.

use super::hosts::export_rules::literal_word;
use crate::error::{HostsError, Result};
use candle_zero::util::host_name;
use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// The variable that names a program to use in place of ssh, called as `PROGRAM HOST COMMAND`.
const REMOTE_SHELL: &str = "ZERORUN_RSH";
/// The exit code of ssh if it cannot reach a host.
pub(crate) const EXIT_UNREACHABLE: u8 = 255;
/// The options with which ssh ends within about a minute if the other host no longer answers.
const LOSS_DETECTION: [&str; 6] =
    ["-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"];

/// The settings of ssh.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RemoteShellOptions {
    /// The port, or `None` for ssh's default.
    pub(crate) port: Option<u16>,
    /// Whether ssh itself checks that the other host still answers.
    pub(crate) detects_lost_hosts: bool,
}

impl RemoteShellOptions {
    /// Returns the command that runs `words` on a host, with these variables, in `folder`.
    pub(crate) fn command(
        &self,
        host: &str,
        words: &[String],
        variables: &[(String, String)],
        folder: &Path,
    ) -> Command {
        let shell = std::env::var_os(REMOTE_SHELL).filter(|shell| !shell.is_empty());
        let mut command = Command::new(shell.as_deref().unwrap_or("ssh".as_ref()));
        if shell.is_none() {
            // ssh cannot ask for the passwords of several hosts at the same time.
            command.args(["-o", "BatchMode=yes"]);
            if self.detects_lost_hosts {
                command.args(LOSS_DETECTION);
            }
            if let Some(port) = self.port {
                command.args(["-p", &port.to_string()]);
            }
        }
        command.args([host, &remote_line(words, variables, folder)]);
        command
    }
}

/// Returns the error for a host that was not reached because the remote shell could not be started.
pub(crate) fn not_reached(host: &str, command: &Command, source: &std::io::Error) -> HostsError {
    let program = command.get_program().to_string_lossy().into_owned();
    HostsError::NotReached { host: host.to_owned(), program, why: source.to_string() }
}

/// Returns a word for another host's shell.
///
/// # Errors
/// Fails if the word is not UTF-8.
pub(crate) fn as_text(word: &OsStr) -> Result<String> {
    let text = word.to_str().map(str::to_owned);
    text.ok_or_else(|| HostsError::WordNotUtf8 { word: word.to_string_lossy().into_owned() }.into())
}

/// Returns the line that the other host's shell runs.
fn remote_line(words: &[String], variables: &[(String, String)], folder: &Path) -> String {
    let variables: Vec<String> =
        variables.iter().map(|(name, value)| format!("{name}={}", literal_word(value))).collect();
    let words: Vec<String> = words.iter().map(|word| literal_word(word)).collect();
    let folder = literal_word(&folder.to_string_lossy());
    format!("cd {folder} && exec env {} {}", variables.join(" "), words.join(" "))
}

/// Returns whether a name belongs to this host: it is the host's name, or this process can listen on its address.
pub(crate) fn is_here(name: &str) -> bool {
    name == host_name() || TcpListener::bind((name, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_hosts_shell_gets_words_as_they_are() {
        let words = ["/bin/zerorun", "--", "train.rs", "--prompt", "it's $HOME"].map(String::from);
        let exports = [("NCCL_DEBUG".to_string(), "INFO".to_string()), ("UCX_TLS".to_string(), "tcp self".to_string())];
        insta::assert_snapshot!(remote_line(&words, &exports, Path::new("/data/my runs")), @r"cd '/data/my runs' && exec env NCCL_DEBUG=INFO UCX_TLS='tcp self' /bin/zerorun -- train.rs --prompt 'it'\''s $HOME'");
    }

    #[test]
    fn this_host_is_known_by_its_names() {
        assert!(is_here("localhost") && is_here(&host_name()));
        assert!(!is_here("worker-7.example.org"));
    }
}
