//! `zerorun dash`: a page in the browser about recorded runs.

use crate::dashboard::{Dashboard, ServedFolder};
use crate::launch::OPEN_DASHBOARD;
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use crate::tools::sweep::DashboardSweepReader;
use candle_zero::runs::RunsFolder;
use candle_zero::stop_signal::asked_to_stop;
use clap::Parser;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// The time between two checks of whether the server has been asked to end.
const INTERVAL: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "\
Examples:
  zerorun dash                         the runs in the folder `runs` of the current folder
  zerorun dash /data/runs --port 0     another folder, and a free port
  zerorun dash sweeps/lr-sweep         a sweep, with the runs of its trials
  zerorun -n 2 --dashboard 8321 train.rs   the page of a job, available until the job ends";

/// Serve a page about recorded runs: curves of running and earlier runs in the same charts, the memory and times of
/// each rank, log lines, samples, and the differences between configurations. If RUNS is the folder of a sweep, of its
/// runs, or of several sweeps, the page also shows the trials of each sweep.
///
/// Prints a link with a token, without which the page cannot request that a running program save or stop. Runs until it
/// receives SIGINT, SIGTERM or SIGHUP. The page needs no network.
///
/// Exit code: 0 after a signal, 2 if the server cannot start, the folder cannot be read, standard output cannot be
/// written, or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "dash", bin_name = "zerorun dash", after_help = EXAMPLES)]
struct DashArguments {
    /// Folder of runs, or of a sweep [default: $CANDLE_ZERO_RUNS_DIR, else runs]
    #[arg(value_name = "RUNS")]
    runs: Option<PathBuf>,

    /// Port to listen on; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value = "8321")]
    port: u16,

    /// Local address to listen on, such as 127.0.0.1; with 0.0.0.0 (all addresses), other machines can read
    /// the runs
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = local_address)]
    bind: IpAddr,
}

/// Parses the address to listen on.
fn local_address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| "give a numeric address of this machine, such as 127.0.0.1, or 0.0.0.0 for all".to_owned())
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <DashArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let DashArguments { runs, port, bind } = DashArguments::try_parse_from(words).map_err(CommandLineError)?;
    // The handlers are installed before the output shows that the server is running.
    if let Err(source) = asked_to_stop() {
        return Ok(refused(&candle_zero::error::EngineError::Signals { source }.into(), EXIT_SETUP));
    }
    let folder = RunsFolder::find(runs);
    // A folder that does not exist yet is created by its first run.
    if let Err(error) = folder.path().exists().then(|| folder.ids()).transpose() {
        return Ok(refused(&error, EXIT_SETUP));
    }
    let sweeps = Box::new(DashboardSweepReader::new(folder.path()));
    let address = SocketAddr::new(bind, port);
    let dashboard = match Dashboard::serve(ServedFolder::new(folder.path()), Some(sweeps), address) {
        Ok(dashboard) => dashboard,
        Err(error) => return Ok(refused(&error.into(), EXIT_SETUP)),
    };
    if !print(format_args!("dashboard: {}", dashboard.link())) {
        return Ok(ExitCode::from(EXIT_SETUP));
    }
    if !folder.path().exists() {
        eprint(&format!(
            "zerorun: there is no folder {} yet; the page will show runs as soon as they are recorded there",
            folder.path().display()
        ));
    }
    if dashboard.is_open_to_others() {
        eprint(OPEN_DASHBOARD);
    }
    while matches!(asked_to_stop(), Ok(false)) {
        std::thread::sleep(INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}
