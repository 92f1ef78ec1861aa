//! `zerorun bench`: measures the performance of this machine, or of the network between hosts.

mod scaling;

use crate::launch::console::{CommandLineError, EXIT_SETUP, refused};
use candle_zero::comm::stats::network_bench;
use candle_zero::comm::{self, RankEnv};
use candle_zero::config::Aio;
use candle_zero::monitor::Progress;
use candle_zero::offload::disk_bench::{
    DiskBenchReport, DiskBenchSettings, DiskOverlapResult, DiskPassTiming, IoRequestSettings, measure,
};
use candle_zero::util::counted;
use clap::{Args, Parser, Subcommand};
use serde_json::json;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure the performance of this machine, or of the network between hosts.
#[derive(Debug, Parser)]
#[command(name = "bench", bin_name = "zerorun bench", disable_help_subcommand = true)]
struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Disk(DiskBenchArguments),
    Network(NetworkBenchArguments),
    Scaling(scaling::ScalingArguments),
}

/// Measure MPI and collectives on the network between hosts. Start this command as the program of a job's ranks:
/// `zerorun --hostfile HOSTS -- zerorun bench network`, or under mpirun or srun
#[derive(Debug, Args)]
struct NetworkBenchArguments {
    /// Size of each buffer, 1MiB or more
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = whole_size)]
    size: u64,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Measure how fast offloaded state is read from and written to files in a folder: sequential access, and the optimizer
/// step compared with a plain loop
#[derive(Debug, Args)]
struct DiskBenchArguments {
    /// Folder to test, as in `nvme_path`; the files that are written there are temporary
    path: PathBuf,

    /// Disk space to use, 1MiB or more, such as 512MiB or 4GiB; a number without a unit is in bytes
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = whole_size)]
    size: u64,

    /// `aio.block_size`: bytes per request, 4KiB to 16MiB in multiples of 4KiB
    #[arg(long = "block_size", alias = "block-size", value_name = "SIZE", default_value = "1MiB", value_parser = block_size)]
    block_size: usize,

    /// `aio.queue_depth`: requests in flight per unit of intra_op_parallelism
    #[arg(long = "queue_depth", alias = "queue-depth", value_name = "N", default_value = "8",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    queue_depth: u16,

    /// `aio.intra_op_parallelism`: multiplies queue_depth; at most 64 requests are in flight
    #[arg(long = "intra_op_parallelism", alias = "intra-op-parallelism", value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    intra_op_parallelism: u16,

    /// Also try other block sizes and queue depths, and print the fastest as a section for the configuration
    #[arg(long)]
    sweep: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <BenchArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(match BenchArguments::try_parse_from(&words).map_err(CommandLineError)?.command {
        BenchCommand::Disk(disk) => disk.run(),
        BenchCommand::Network(network) => network.run(),
        BenchCommand::Scaling(scaling) => scaling.run(words),
    })
}

impl NetworkBenchArguments {
    fn run(self) -> ExitCode {
        let measured = RankEnv::from_env().and_then(|env| comm::from_env(&env)).and_then(|comm| {
            let bytes = usize::try_from(self.size).unwrap_or(usize::MAX);
            Ok((comm.rank(), network_bench::measure(&*comm, bytes)?))
        });
        let text = match measured {
            Ok((0, Some(network))) if self.json => {
                serde_json::to_string(&network).unwrap_or_else(|e| unreachable!("numbers: {e}"))
            }
            Ok((0, Some(network))) => network_table(&network),
            Ok((0, None)) => {
                let text = "zerorun bench network: all ranks are on this host; start it on several hosts with \
                            zerorun --hostfile HOSTS, mpirun or srun";
                _ = writeln!(std::io::stderr(), "{text}");
                return ExitCode::from(EXIT_SETUP);
            }
            Ok(_) => return ExitCode::SUCCESS,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        match writeln!(std::io::stdout(), "{}", text.trim_end()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        }
    }
}

/// Formats the measurements between hosts as text.
fn network_table(network: &network_bench::NetworkMeasurement) -> String {
    let ranks: Vec<String> = network.hosts.iter().map(usize::to_string).collect();
    let mut text = format!(
        "{} with {} ranks; one-way latency {:.1} us; buffers of {:.1} MiB\n\n{:32}{:>16}{:>12}{:>16}{:>20}\n",
        counted(ranks.len(), "host"),
        ranks.join(" + "),
        network.one_way_s * 1e6,
        network.bytes as f64 / f64::from(1 << 20),
        "fastest of 3",
        "into a host",
        "seconds",
        "rate",
        "of plain messages",
    );
    for (name, row) in [
        ("MPI's messages of 4 MiB", network.plain),
        ("reduce-scatter, f32", network.reduce_scatter),
        ("all-gather, f32", network.all_gather),
    ] {
        let (mib, percent) = (row.into_a_host / f64::from(1 << 20), 100.0 * row.rate() / network.plain.rate());
        let (seconds, rate) = (row.seconds, row.rate() / 1e6);
        let line = format!("{name:32}{mib:>12.1} MiB{seconds:>12.4}{rate:>11.1} MB/s{percent:>18.0} %");
        text.push_str(&line);
        text.push('\n');
    }
    let mut network_flag = format!("{:.1}MB/s,{:.1}us", network.plain.rate() / 1e6, network.one_way_s * 1e6);
    if let Some(busy) = network.busy {
        _ = write!(text, "\n{:.0} % of a host's processors are busy while its link is in use\n", 100.0 * busy);
        _ = write!(network_flag, ",{:.1}%", 100.0 * busy);
    }
    _ = write!(text, "\nzerorun estimate --network {network_flag}\n");
    text
}

impl DiskBenchArguments {
    fn run(self) -> ExitCode {
        let settings = DiskBenchSettings {
            folder: self.path,
            bytes: self.size,
            aio: Aio {
                block_size: self.block_size,
                queue_depth: self.queue_depth.into(),
                intra_op_parallelism: self.intra_op_parallelism.into(),
            },
            sweep: self.sweep,
        };
        let mut progress: Option<Progress> = None;
        let measured = measure(&settings, &mut |done, passes, description| {
            let progress = progress.get_or_insert_with(|| Progress::new(passes, None).counting("passes,"));
            progress.step(done, || description.to_string());
        });
        if let Some(progress) = progress {
            progress.finish();
        }
        let text = match measured {
            Ok(bench) if self.json => serde_json::to_string(&bench).unwrap_or_else(|e| unreachable!("numbers: {e}")),
            Ok(bench) => DiskBenchTable(&bench).to_string(),
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        match writeln!(std::io::stdout(), "{}", text.trim_end()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        }
    }
}

/// Parses a size such as `512MiB`, `4GiB` or `4096`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wrong = || "give bytes, or a whole number with KiB, MiB, GiB or TiB, for example 512MiB".to_string();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return Err(wrong()),
    };
    if number.is_empty() {
        return Err(wrong());
    }
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    // Files are smaller than 2^63 bytes.
    bytes.filter(|bytes| *bytes < 1 << 63).ok_or_else(|| "no disk is this large".to_string())
}

fn whole_size(text: &str) -> Result<u64, String> {
    size(text).and_then(|bytes| if bytes < 1 << 20 { Err("give 1MiB or more".to_string()) } else { Ok(bytes) })
}

fn block_size(text: &str) -> Result<usize, String> {
    let bytes = size(text)?;
    let is_allowed = (4096..=16 << 20).contains(&bytes) && bytes.is_multiple_of(4096);
    usize::try_from(bytes)
        .ok()
        .filter(|_| is_allowed)
        .ok_or_else(|| "give a multiple of 4KiB from 4KiB to 16MiB".to_string())
}

/// The results of `zerorun bench disk`, shown as text.
struct DiskBenchTable<'a>(&'a DiskBenchReport);

/// Formats a speed, such as `1.23 GB/s`.
fn speed(timing: &DiskPassTiming) -> String {
    format!("{:.2} GB/s", timing.bytes_per_s / 1e9)
}

fn requests(IoRequestSettings { block_size, queue_depth, intra_op_parallelism }: &IoRequestSettings) -> String {
    let threads = (queue_depth * intra_op_parallelism).min(64);
    format!("blocks of {} KiB, {threads} at a time", block_size >> 10)
}

impl fmt::Display for DiskBenchTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiskBenchReport { folder, bytes, aio, direct_is_possible, cached_at_start, sequential, step, sweep } =
            self.0;
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        writeln!(f, "{}: files of {:.2} GiB, {}; medians of 3 rounds", folder.display(), gib(*bytes), requests(aio))?;
        if !direct_is_possible {
            writeln!(f, "The file system does not support access without the page cache.")?;
        }
        if let Some(share) = cached_at_start.filter(|share| *share > 0.01) {
            let percent = share * 100.0;
            writeln!(f, "Up to {percent:.0} % of a file stayed in the page cache: reads look faster than the disk.")?;
        }
        writeln!(f, "\n{:40}{:>12}{:>12}", "sequential", "write", "read")?;
        for row in sequential {
            writeln!(f, "{:40}{:>12}{:>12}", row.access.to_string(), speed(&row.write), speed(&row.read))?;
        }
        writeln!(f, "\noptimizer step (Adam, bf16): {} elements, windows of {}", step.elements, step.window)?;
        writeln!(f, "{:40}{:>12}{:>12}{:>16}", "", "read+write", "seconds", "of plain loop")?;
        let fastest = step.plain.iter().map(|plain| plain.timing.bytes_per_s).fold(f64::MIN_POSITIVE, f64::max);
        let mut row = |name: String, timing: &DiskPassTiming| {
            let percent = timing.bytes_per_s / fastest * 100.0;
            writeln!(f, "{name:40}{:>12}{:>12.2}{percent:>14.0} %", speed(timing), timing.seconds)
        };
        for plain in &step.plain {
            row(format!("plain loop {}", plain.access), &plain.timing)?;
        }
        for piped in &step.pipeline {
            let flags = match (piped.pipeline_read, piped.pipeline_write) {
                (false, false) => "no flag",
                (true, false) => "pipeline_read",
                (false, true) => "pipeline_write",
                (true, true) => "pipeline_read, pipeline_write",
            };
            row(format!("engine, {flags}"), &piped.timing)?;
        }
        writeln!(f, "{:40}{:>12}{:>12.2}", "update only, in memory", "", step.update.seconds)?;
        let DiskOverlapResult { updates, one_after_the_other, overlapped, speedup } = &step.balanced;
        writeln!(f, "\nthe update repeated to take as long as the disk ({})", counted(*updates, "time"))?;
        writeln!(f, "{:40}{:>12}{:>12.2}", "engine, no flag", "", one_after_the_other.seconds)?;
        let both = "engine, pipeline_read, pipeline_write";
        writeln!(f, "{both:40}{:>12}{:>12.2}{speedup:>9.2} times as fast", "", overlapped.seconds)?;
        writeln!(
            f,
            "\nThe plain loop uses one thread and blocks of 1 MiB, and computes no update. The engine reads and writes \
             {}.",
            step.access
        )?;
        if let Some(best) = sweep.first() {
            writeln!(f, "\n{:40}{:>12}{:>12}", "step with both flags", "read+write", "seconds")?;
            for row in sweep {
                writeln!(f, "{:40}{:>12}{:>12.2}", requests(&row.aio), speed(&row.timing), row.timing.seconds)?;
            }
            let section = json!({ "aio": best.aio });
            let text = serde_json::to_string_pretty(&section).map_err(|_| fmt::Error)?;
            let lines: Vec<&str> = text.lines().filter(|line| !["{", "}"].contains(line)).collect();
            f.write_char('\n')?;
            writeln!(f, "The fastest settings, for the configuration:\n{}", lines.join("\n"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_zero::offload::DiskAccess;
    use candle_zero::offload::disk_bench::{
        PipelineBench, PlainLoopBench, RequestSweepRow, SequentialBench, StepBench,
    };

    fn parse_disk(words: &str) -> Result<DiskBenchArguments, CommandLineError> {
        let words = std::iter::once("bench").chain(words.split_whitespace()).map(OsString::from);
        match BenchArguments::try_parse_from(words).map_err(CommandLineError)?.command {
            BenchCommand::Disk(disk) => Ok(disk),
            BenchCommand::Network(_) | BenchCommand::Scaling(_) => panic!("the command is not `bench disk`"),
        }
    }

    fn refusal(words: &str) -> String {
        parse_disk(words).unwrap_err().message()
    }

    #[test]
    fn names_have_two_spellings_and_defaults_are_those_of_aio() {
        let disk = parse_disk("disk /x").unwrap();
        assert_eq!((disk.size, disk.block_size, disk.queue_depth, disk.intra_op_parallelism), (2 << 30, 1 << 20, 8, 1));
        let other = "--block-size 4MiB --queue-depth=2 --intra-op-parallelism 3 --size 5000000 --json --sweep";
        for words in [other.to_string(), other.replace("k-s", "k_s").replace("e-d", "e_d").replace("a-op-p", "a_op_p")]
        {
            let disk = parse_disk(&format!("disk {words} /x")).unwrap();
            assert_eq!((disk.size, disk.block_size), (5_000_000, 4 << 20), "{words}");
            assert_eq!((disk.queue_depth, disk.intra_op_parallelism), (2, 3), "{words}");
            assert!(disk.sweep && disk.json, "{words}");
        }
    }

    #[test]
    fn sizes_take_a_unit_or_are_bytes() {
        for (text, bytes) in
            [("0", 0), ("7", 7), ("4KiB", 4096), ("512MiB", 512 << 20), ("4GiB", 4 << 30), ("1TiB", 1 << 40)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.5GiB", "4GB", "4 GiB", "9EiB", "8388608TiB", "99999999999999999999"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wrong_command_line_says_what_is_wrong() {
        insta::assert_snapshot!(refusal("disc /x"), @r#"
        zerorun: unrecognized subcommand 'disc'

          tip: a similar subcommand exists: 'disk'

        Usage: zerorun bench <COMMAND>

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk"), @r#"
        zerorun: the following required arguments were not provided:
          <PATH>

        Usage: zerorun bench disk <PATH>

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk /x --size 0"), @r#"
        zerorun: invalid value '0' for '--size <SIZE>': give 1MiB or more

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk /x --size 4GB"), @r#"
        zerorun: invalid value '4GB' for '--size <SIZE>': give bytes, or a whole number with KiB, MiB, GiB or TiB, for example 512MiB

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk /x --block_size 1000"), @r#"
        zerorun: invalid value '1000' for '--block_size <SIZE>': give a multiple of 4KiB from 4KiB to 16MiB

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk /x --queue_depth 0"), @r#"
        zerorun: invalid value '0' for '--queue_depth <N>': 0 is not in 1..=64

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --ranks 0"), @r#"
        zerorun: invalid value '0' for '--ranks <N|LIST>': 0 is not in 1..=1024

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --ranks 1,x"), @r#"
        zerorun: invalid value 'x' for '--ranks <N|LIST>': invalid digit found in string

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --stages 4"), @r#"
        zerorun: invalid value '4' for '--stages <LIST>': 4 is not in 0..=3

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --scaling fast"), @r#"
        zerorun: invalid value 'fast' for '--scaling <LIST>'
          [possible values: weak, strong]

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --steps 0"), @r#"
        zerorun: invalid value '0' for '--steps <N>': 0 is not in 1..=100000

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling --batch 0"), @r#"
        zerorun: invalid value '0' for '--batch <N>': 0 is not in 1..=65536

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("scaling nano"), @r#"
        zerorun: unexpected argument 'nano' found

        Usage: zerorun bench scaling [OPTIONS]

        For more information, try '--help'.
        "#);
        insta::assert_snapshot!(refusal("disk /x --queue 4"), @r#"
        zerorun: unexpected argument '--queue' found

          tip: a similar argument exists: '--queue-depth'

        Usage: zerorun bench disk --queue_depth <N> <PATH>

        For more information, try '--help'.
        "#);
    }

    #[test]
    fn the_table_shows_every_pass() {
        let timing = |seconds: f64| DiskPassTiming { seconds, bytes_per_s: 28e9 / seconds, rounds: vec![seconds] };
        let aio = IoRequestSettings { block_size: 1 << 20, queue_depth: 8, intra_op_parallelism: 1 };
        let piped = |pipeline_read, pipeline_write, of_plain: f64| PipelineBench {
            pipeline_read,
            pipeline_write,
            timing: timing(10.0 / of_plain),
            of_plain,
        };
        let bench = DiskBenchReport {
            folder: "/disk".into(),
            bytes: 16_000_000_000,
            aio,
            direct_is_possible: true,
            cached_at_start: Some(0.5),
            sequential: vec![SequentialBench { access: DiskAccess::Direct, write: timing(9.0), read: timing(8.0) }],
            step: StepBench {
                access: DiskAccess::Direct,
                elements: 1_000_000_000,
                window: 1 << 22,
                bytes: 28_000_000_000,
                plain: vec![PlainLoopBench { access: DiskAccess::Direct, timing: timing(10.0) }],
                pipeline: vec![piped(false, false, 0.7), piped(true, true, 1.1)],
                update: timing(2.5),
                balanced: DiskOverlapResult {
                    updates: 4,
                    one_after_the_other: timing(20.0),
                    overlapped: timing(11.0),
                    speedup: 20.0 / 11.0,
                },
            },
            sweep: vec![RequestSweepRow { aio, timing: timing(9.0) }],
        };
        insta::assert_snapshot!(DiskBenchTable(&bench).to_string(), @r#"
        /disk: files of 14.90 GiB, blocks of 1024 KiB, 8 at a time; medians of 3 rounds
        Up to 50 % of a file stayed in the page cache: reads look faster than the disk.

        sequential                                     write        read
        without the page cache                     3.11 GB/s   3.50 GB/s

        optimizer step (Adam, bf16): 1000000000 elements, windows of 4194304
                                                  read+write     seconds   of plain loop
        plain loop without the page cache          2.80 GB/s       10.00           100 %
        engine, no flag                            1.96 GB/s       14.29            70 %
        engine, pipeline_read, pipeline_write      3.08 GB/s        9.09           110 %
        update only, in memory                                      2.50

        the update repeated to take as long as the disk (4 times)
        engine, no flag                                            20.00
        engine, pipeline_read, pipeline_write                      11.00     1.82 times as fast

        The plain loop uses one thread and blocks of 1 MiB, and computes no update. The engine reads and writes without the page cache.

        step with both flags                      read+write     seconds
        blocks of 1024 KiB, 8 at a time            3.11 GB/s        9.00

        The fastest settings, for the configuration:
          "aio": {
            "block_size": 1048576,
            "intra_op_parallelism": 1,
            "queue_depth": 8
          }
        "#);
    }
}
