//! The arguments of training scripts: `DsArgs` for scripts with clap (feature `cli`), and [`ds_config_from_args`] for
//! scripts without it.

use crate::error::{ConfigError, Error, Result};
use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

/// The arguments of a DeepSpeed script, to be flattened into a script's own clap struct. Requires the `cli` feature.
///
/// ```
/// use clap::Parser;
///
/// #[derive(Parser)]
/// struct Args {
///     #[command(flatten)]
///     deepspeed: candle_zero::cli::DsArgs,
///     /// Number of optimizer steps.
///     #[arg(long, default_value_t = 100)]
///     steps: u64,
/// }
///
/// let args = Args::parse_from(["train", "--ds_config", "ds.json", "--local_rank", "0"]);
/// assert_eq!(args.deepspeed.ds_config, std::path::Path::new("ds.json"));
/// ```
#[cfg(feature = "cli")]
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
// Without these settings, clap shows this struct's documentation as that of the script that flattens it.
#[command(about = None, long_about = None)]
pub struct DsArgs {
    /// DeepSpeed JSON configuration.
    #[arg(long = "ds_config", alias = "deepspeed_config", alias = "ds-config", value_name = "FILE")]
    pub ds_config: PathBuf,
    /// Accepted for the sake of DeepSpeed launch scripts, and ignored: ranks come from the environment.
    #[arg(long = "local_rank", alias = "local-rank", value_name = "N", allow_negative_numbers = true, hide = true)]
    pub local_rank: Option<i64>,
}

/// Returns the FILE of `--ds_config FILE` or `--ds_config=FILE` (also `--ds-config` and `--deepspeed_config`) in this
/// program's arguments, for scripts without clap. All other arguments are left to the script.
///
/// # Errors
/// Fails if the argument is missing, has no file, or is given twice.
pub fn ds_config_from_args() -> Result<PathBuf> {
    // The launcher sets this variable. The program is in the launcher's cache, so its path differs from what the user
    // typed.
    let script = std::env::var_os(crate::comm::rank_env::SCRIPT).filter(|script| !script.is_empty());
    find_ds_config(std::env::args_os(), script.map(|script| format!("zerorun {}", script.to_string_lossy())))
}

/// Does the same as [`ds_config_from_args`] for a `main` that leaves the handling of wrong arguments to this call, as
/// with clap's `parse`: the message goes to stderr, without a backtrace, and the process exits with code 2.
pub fn ds_config_or_exit() -> PathBuf {
    ds_config_from_args().unwrap_or_else(|error| {
        // A closed stderr does not change the exit code.
        _ = writeln!(std::io::stderr(), "error: {error}");
        std::process::exit(2)
    })
}

fn find_ds_config(args: impl Iterator<Item = OsString>, script_command: Option<String>) -> Result<PathBuf> {
    const NAMES: [&str; 3] = ["--ds_config", "--deepspeed_config", "--ds-config"];
    let mut args = args;
    let program = args.next().map(|program| program.to_string_lossy().into_owned());
    let program = script_command.or(program).unwrap_or_else(|| "PROGRAM".into());
    let argument_error =
        |problem: &str| Error::from(ConfigError::Argument { problem: problem.into(), program: program.clone() });
    let mut found: Option<PathBuf> = None;
    while let Some(arg) = args.next() {
        if arg == "--" {
            break;
        }
        let value = if NAMES.iter().any(|name| arg == *name) {
            args.next().filter(|value| !value.to_string_lossy().starts_with("--"))
        } else {
            // A path that is not UTF-8 can still be given as a separate argument.
            let text = arg.to_str().and_then(|arg| arg.split_once('=')).filter(|(name, _)| NAMES.contains(name));
            let Some((_, value)) = text else { continue };
            Some(value.into())
        };
        let value =
            value.filter(|value| !value.is_empty()).ok_or_else(|| argument_error("--ds_config needs a file"))?;
        if found.replace(value.into()).is_some() {
            return Err(argument_error("--ds_config is given twice"));
        }
    }
    found.ok_or_else(|| argument_error("the argument --ds_config is missing"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    #[cfg(feature = "cli")]
    use clap::Parser;

    fn find(args: &[&str]) -> Result<PathBuf> {
        find_ds_config(args.iter().map(OsString::from), None)
    }

    #[test]
    fn under_zerorun_the_script_is_named_rather_than_the_program_in_the_cache() {
        let args = ["/home/me/.cache/zerorun/target/release/train-3601f999f4ad10ba"].map(OsString::from);
        let error = find_ds_config(args.into_iter(), Some("zerorun train.rs".into())).unwrap_err();
        insta::assert_snapshot!(error, @"the argument --ds_config is missing; run: zerorun train.rs --ds_config FILE");
    }

    #[test]
    fn the_file_is_found_in_both_forms_among_other_arguments() {
        for args in [
            &["train", "--steps", "5", "--ds_config", "a.json", "--local_rank", "0"][..],
            &["train", "--ds_config=a.json"],
            &["train", "--deepspeed_config", "a.json", "--", "--ds_config", "b.json"],
        ] {
            assert_eq!(find(args).unwrap(), PathBuf::from("a.json"), "{args:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_the_arguments_is_said_with_the_mend() {
        let all = [
            find(&["train", "--steps", "5"]),
            find(&["train", "--ds_config"]),
            find(&["train", "--ds_config", "--steps"]),
            find(&["train", "--ds_config="]),
            find(&["train", "--ds_config", "a", "--ds_config=b"]),
        ];
        let text = all.map(|result| result.unwrap_err().to_string()).join("\n");
        insta::assert_snapshot!(text, @r#"
        the argument --ds_config is missing; run: train --ds_config FILE
        --ds_config needs a file; run: train --ds_config FILE
        --ds_config needs a file; run: train --ds_config FILE
        --ds_config needs a file; run: train --ds_config FILE
        --ds_config is given twice; run: train --ds_config FILE
        "#);
    }

    #[cfg(feature = "cli")]
    #[derive(Parser)]
    struct Args {
        #[command(flatten)]
        ds: DsArgs,
        #[arg(long)]
        steps: Option<u64>,
    }

    #[cfg(feature = "cli")]
    #[test]
    fn the_help_of_a_script_is_its_own() {
        use clap::CommandFactory as _;
        let command = Args::command().about("Trains a net");
        assert!(command.get_long_about().is_none());
        let help = command.clone().render_long_help().to_string();
        assert!(help.starts_with("Trains a net\n") && !help.contains("flattened"), "{help}");
    }

    #[cfg(feature = "cli")]
    #[test]
    fn a_script_flattens_them_into_its_own() {
        let args = Args::try_parse_from(["t", "--deepspeed_config=a.json", "--local_rank", "-1", "--steps", "3"]);
        let args = args.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((args.ds.ds_config, args.ds.local_rank, args.steps), ("a.json".into(), Some(-1), Some(3)));
        assert!(Args::try_parse_from(["t"]).is_err());
    }
}
