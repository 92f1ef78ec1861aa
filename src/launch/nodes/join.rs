//! A host's way into the job: the greeting, then what it brings, which the first host takes or refuses.

use super::door::LONGEST_OF_A_STRANGER;
use super::greeting::{self, Parting, printable};
use super::secret::{SECRET, Secret};
use super::wire::{Hello, LONGEST, Message, Session, Wait};
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Says who this is, and is let in or not, within `patience`.
pub(super) fn join(
    stream: TcpStream,
    secret: Option<&Secret>,
    hello: &Hello,
    patience: Duration,
) -> Result<Session, Parting> {
    let refused = |why: String| Parting::Refused { host: hello.host.clone(), why };
    let wait = Wait::Until(Instant::now() + patience);
    let mut session = Session::over(Arc::new(stream)).map_err(|error| Parting::Lost(error.to_string()))?;
    greeting::introduce(&mut session, secret, &hello.host, wait)?;
    let hello = fitting(hello, if secret.is_some() { LONGEST } else { LONGEST_OF_A_STRANGER }).map_err(refused)?;
    session.send(&Message::Hello(hello));
    match session.next(LONGEST_OF_A_STRANGER, wait).map_err(Parting::Lost)? {
        Message::Joined => Ok(session),
        Message::Refused(why) => Err(refused(printable(&why, 4000))),
        _ => Err(Parting::NoLauncher),
    }
}

/// What a host brings, in a line of at most `longest` bytes: without folders, whose comparison is a warning at most, where
/// they take more.
fn fitting(hello: &Hello, longest: usize) -> Result<Hello, String> {
    // The seal, and what JSON puts around it.
    let fits = |hello: &Hello| serde_json::to_vec(hello).is_ok_and(|text| text.len() + 100 < longest);
    if fits(hello) {
        return Ok(hello.clone());
    }
    let without = Hello { folders: BTreeMap::new(), ..hello.clone() };
    if fits(&without) {
        return Ok(without);
    }
    Err(format!(
        "the program's arguments and the files that they name take more than {longest} bytes to compare; name a folder in place of \
         its files, or set {} on every host, with which more is allowed",
        SECRET
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::admission::tests::hello;
    use super::*;

    #[test]
    fn folders_are_left_out_where_all_takes_more_than_a_stranger_may_say_and_arguments_are_not() {
        let files = |number: usize| (0..number).map(|at| (format!("{at}"), "0 bytes".to_string())).collect();
        let small = Hello { folders: BTreeMap::from([("data".into(), files(10))]), ..hello("b") };
        assert_eq!(fitting(&small, LONGEST_OF_A_STRANGER).unwrap(), small);
        let large = Hello { folders: BTreeMap::from([("data".into(), files(100_000))]), ..hello("b") };
        assert_eq!(fitting(&large, LONGEST_OF_A_STRANGER).unwrap(), hello("b"));
        assert_eq!(fitting(&large, LONGEST).unwrap(), large);
        let told = fitting(&Hello { files: files(100_000), ..hello("b") }, LONGEST_OF_A_STRANGER).unwrap_err();
        insta::assert_snapshot!(told, @"the program's arguments and the files that they name take more than 1048576 bytes to compare; name a folder in place of its files, or set CANDLE_ZERO_SECRET on every host, with which more is allowed");
    }
}
