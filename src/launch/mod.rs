//! Starting a program on N ranks: the `zerorun` command, and how a rank finds out who it is.
//!
//! `zerorun train.rs` goes one way: `args` reads what was typed, `script` finds the package that the file belongs
//! to or generates one (`package`; its manifest may stand in front of the code, see `frontmatter`), `build` lets cargo make
//! the executable, and `ranks` starts it N times, carries its output and its signals, and stops everything when a
//! rank fails; `restarts` decides whether it starts again. On the other side `discover` reads the variables that the launcher has set.
//!
//! What `zerorun` does besides are tools, found by the first word (`tools`): `zerorun bench disk PATH` (`bench`),
//! `zerorun inspect DIR` (`inspect`), `zerorun consolidate DIR OUT` (`consolidate`), `zerorun check FILE` (`check`,
//! which draws `picture`s), `zerorun schema` (`schema`), `zerorun schedule` (`schedule`), `zerorun report` (`machine`),
//! `zerorun estimate` (`estimate`, `sizes`), `zerorun tune` (`tune`), `zerorun verify` (`verify`).

mod args;
mod bench;
mod build;
mod check;
mod consolidate;
mod discover;
mod estimate;
mod frontmatter;
mod import;
mod inspect;
mod machine;
mod output;
mod package;
mod picture;
mod ranks;
mod report;
mod restarts;
mod schedule;
mod schema;
mod script;
mod signals;
mod sizes;
mod tail;
mod tools;
mod tune;
mod verify;

pub use discover::RankEnv;
pub use ranks::KEEP_MEMORY;

use std::io::Write;
use std::process::ExitCode;

use crate::kernels::checked_level;
use crate::timeline;
use crate::{Error, Result};
use args::Asked;
use script::Target;

/// Exit code for a wrong command line and for a build or start that could not be set up.
const EXIT_SETUP: u8 = 2;
/// Exit code for a script that does not compile, the same as cargo's.
const EXIT_COMPILE: u8 = 101;

/// The whole of `zerorun`: reads the command line, builds the script, runs the ranks; or runs a tool.
///
/// Must be called on the main thread: the kernel kills the ranks when the thread that started them ends.
/// The result is the exit code: that of the first rank that failed in the last run, 128 + n for a signal n, 2 for a wrong
/// command line or set-up, 101 for a script that does not compile.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1).peekable();
    if let Some(tool) = words.peek().and_then(|word| tools::named(word)) {
        if let Err(error) = checked_level() {
            return tools::refused(&error.into(), EXIT_SETUP);
        }
        return (tool.run)(words.collect()).unwrap_or_else(|refused| refused.print());
    }
    let asked = match args::read(std::env::args_os()) {
        Ok(asked) => asked,
        Err(refused) => return refused.print(),
    };
    match carry_out(&asked) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("zerorun: {error}"));
            ExitCode::from(match error {
                Error::ScriptDoesNotCompile { .. } => EXIT_COMPILE,
                _ => EXIT_SETUP,
            })
        }
    }
}

/// A line on stderr. A closed stderr must not change the exit code, as `eprintln!` would.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn carry_out(asked: &Asked) -> Result<u8> {
    // Every rank would fail with it.
    checked_level()?;
    let target = script::find(&asked.script)?;
    let program = match target {
        Target::Program { path } => path,
        Target::InPackage(in_package) => {
            if asked.print_package {
                println!("{}", in_package.manifest_dir.display());
                return Ok(0);
            }
            build::build(&in_package.into_build(&asked.script, asked.features.as_deref()))?
        }
        Target::Single(single) => {
            let package = single.generate(asked.features.as_deref())?;
            if asked.print_package {
                println!("{}", package.package_dir.display());
                return Ok(0);
            }
            build::build(&package)?
        }
    };
    let recorded = asked.timeline.clone().or_else(|| {
        let file = std::env::var_os(timeline::FILE).filter(|file| !file.is_empty());
        file.map(Into::into)
    });
    let recorded = recorded.as_deref().map(timeline::Job::begin).transpose()?;
    let job = ranks::Job {
        program,
        args: asked.script_args.clone(),
        world: asked.ranks,
        timeout: asked.timeout,
        master_port: asked.master_port,
        prometheus: asked.prometheus,
        restart: 0,
        timeline: recorded.as_ref().map(|job| job.folder().to_owned()),
    };
    let ended = restarts::run(job, &restarts::Rule { max_restarts: asked.max_restarts, min_ranks: asked.min_ranks });
    match recorded.map(timeline::Job::finish) {
        Some(Ok(summary)) => say(&format!("zerorun: {summary}; open it in https://ui.perfetto.dev")),
        // What became of the job weighs more.
        Some(Err(error)) if matches!(ended, Ok(0)) => return Err(error),
        Some(Err(error)) => say(&format!("zerorun: {error}")),
        None => {}
    }
    ended
}
