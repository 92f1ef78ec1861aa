//! The arguments in a script's command line.

use std::ffi::OsString;

/// The names of the flag for the configuration file.
pub(super) const DS_CONFIG: [&str; 3] = ["--ds_config", "--deepspeed_config", "--ds-config"];

/// Removes a flag and its value (`--flag value`, `--flag=value`) from arguments, and returns the flag's position and
/// the value. Does not search the arguments after `--`.
pub(super) fn take(args: &mut Vec<OsString>, names: &[&str]) -> Option<(usize, OsString)> {
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    for at in 0..end {
        if names.iter().any(|name| args[at] == *name) && at + 1 < end {
            args.remove(at);
            return Some((at, args.remove(at)));
        }
        let joined = args[at].to_str().and_then(|arg| arg.split_once('='));
        if let Some((_, value)) = joined.filter(|(name, _)| names.contains(name)) {
            let value = OsString::from(value);
            args.remove(at);
            return Some((at, value));
        }
    }
    None
}
