//! The messages between the launchers of several hosts. The first byte selects what is tested: the parsing of message
//! lines, or one end of a connection (with its handshake), with or without a secret.

use super::{join, split};
use crate::launch::nodes::{messages, session};

/// Words of the messages.
pub(super) const WORDS: [&str; 16] = [
    "\n",
    "Hello",
    "Refused",
    "Joined",
    "Start",
    "Values",
    "Failed",
    "Signal",
    "Regroup",
    "Ended",
    "Finish",
    "Beat",
    "Challenge",
    "Answer",
    "Welcome",
    "\\u0000",
];

/// Reads messages.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    match first % 8 {
        4 | 5 => session(rest, false, first % 2 == 1),
        6 | 7 => session(rest, true, first % 2 == 1),
        _ => messages(rest),
    }
}

/// Returns messages of all kinds.
pub fn seeds() -> Vec<Vec<u8>> {
    let version = env!("CARGO_PKG_VERSION");
    let nonce = "0123456789abcdef".repeat(4);
    let answer = |proof: &str, has_secret: bool| {
        format!(
            r#"{{"Answer":{{"version":"{version}","host":"b","nonce":"{nonce}","has_secret":{has_secret},"proof":{proof}}}}}"#
        )
    };
    let challenge = |has_secret: bool| {
        format!(r#"{{"Challenge":{{"version":"{version}","nonce":"{nonce}","has_secret":{has_secret}}}}}"#)
    };
    let welcome = r#"{"Welcome":{"proof":null}}"#;
    let proof = format!("\"{nonce}\"");
    [
        (0, MESSAGES.join("\n")),
        (4, [&answer("null", false), MESSAGES[0], MESSAGES[8]].join("\n")),
        (5, [&answer(&proof, true), MESSAGES[0]].join("\n")),
        (6, [&challenge(false), welcome, MESSAGES[3], MESSAGES[4], ""].join("\n")),
        (6, [&challenge(false), r#"{"Refused":"no"}"#, ""].join("\n")),
        (7, [&challenge(true), &format!(r#"{{"Welcome":{{"proof":{proof}}}}}"#), ""].join("\n")),
    ]
    .map(|(first, text)| join(first, text.as_bytes()))
    .into_iter()
    .chain(MESSAGES.map(|message| join(0, message.as_bytes())))
    .collect()
}

const MESSAGES: [&str; 12] = [
    r#"{"Hello":{"nodes":2,"node":1,"ranks":4,"host":"b","words":["--nnodes","2"],"files":{"the program":"0f"},"folders":{"data":{"a":"1"}},"clock":1700000000,"launcher":7}}"#,
    r#"{"Refused":"why"}"#,
    r#""Joined""#,
    r#"{"Start":{"attempt":1,"restart":0,"place":1,"ranks":[4,4],"port":29500,"space":"s-1","note":null}}"#,
    r#"{"Values":{"attempt":1,"values":[["key","value"],["line\nbreak","é"]]}}"#,
    r#"{"Failed":{"attempt":1,"rank":3,"why":"signal 9"}}"#,
    r#"{"Signal":15}"#,
    r#"{"Regroup":{"attempt":2}}"#,
    r#"{"Ended":{"attempt":1,"how":{"Failed":{"rank":1,"after":{"secs":3,"nanos":5},"headline":"h","code":1,"blames":null}}}}"#,
    r#"{"Ended":{"attempt":1,"how":"Well"}}"#,
    r#"{"Finish":{"code":0,"text":null,"culprit":2}}"#,
    r#""Beat""#,
];
