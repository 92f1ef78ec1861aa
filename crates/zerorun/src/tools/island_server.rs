//! `zerorun island-server`: the meeting point of islands that are separate jobs.

use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::island_server::{IslandServer, IslandServerOptions};
use candle_zero::stop_signal::asked_to_stop;
use clap::Parser;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// The time between two checks of whether the server has been asked to end.
const INTERVAL: Duration = Duration::from_millis(200);

/// Run the server through which islands join a run and exchange their changes. Islands are jobs that train the same model with local steps, that join and leave while the others
/// train, and that exchange the changes in their weights. Start each island with `zerorun --island_server HOST:PORT`,
/// or set local_steps.server.
///
/// The server prints the address on which it listens, and runs until it receives SIGINT, SIGTERM or SIGHUP. Connections
/// are neither encrypted nor authenticated; use the server only on a trusted network, or through a tunnel.
///
/// Exit code: 0 after a signal, 2 if the server cannot start or print its address, or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "island-server", bin_name = "zerorun island-server")]
struct IslandServerArguments {
    /// Port to listen on; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value = "29600")]
    port: u16,

    /// Local address to listen on; 0.0.0.0 means all
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    bind: String,

    /// Record every start, join, exchange and departure in a new file
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Repeat the joins and departures of the run recorded in FILE, so that this run gives the same bits
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,

    /// Seconds without a sign of life after which a rank counts as dead
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u64).range(4..=86_400))]
    silence: u64,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <IslandServerArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = IslandServerArguments::try_parse_from(words).map_err(CommandLineError)?;
    let mut options = IslandServerOptions::default();
    let bind = &arguments.bind;
    options.listen =
        if bind.contains(':') { format!("[{bind}]:{}", arguments.port) } else { format!("{bind}:{}", arguments.port) };
    options.record = arguments.record;
    options.replay = arguments.replay;
    options.silence_timeout = Duration::from_secs(arguments.silence);
    options.print_events = true;
    // The handlers are installed before the server prints its address, after which a signal may arrive.
    if let Err(source) = asked_to_stop() {
        return Ok(refused(&candle_zero::error::EngineError::Signals { source }.into(), EXIT_SETUP));
    }
    let server = match IslandServer::start(&options) {
        Ok(server) => server,
        Err(error) => return Ok(refused(&error, EXIT_SETUP)),
    };
    if !print(format_args!("island server: listening on {}", server.address())) {
        return Ok(ExitCode::from(EXIT_SETUP));
    }
    while matches!(asked_to_stop(), Ok(false)) {
        std::thread::sleep(INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}
