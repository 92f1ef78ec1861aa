//! `zerorun bench scaling`: measures how the speed of training grows with the number of ranks.
//!
//! ```text
//! plan.rs     kinds of scaling x stages x numbers of ranks -> jobs
//! rank.rs     a rank of a job, started from this executable -> times and bytes
//! results.rs  all measurements -> rows, a table, JSON
//! svg_chart.rs, picture.rs  rows -> a picture
//! ```

mod picture;
mod plan;
mod rank;
mod results;
mod svg_chart;

use super::super::model_size_flags::{ModelSizeFlags, SizedPreset};
use super::super::own_job_launcher::{OwnJobLauncher, OwnJobStop};
use crate::error::{Error, Result, ToolError};
use crate::launch::console::{EXIT_SETUP, eprint, print, refused};
use crate::launch::core_binding::CoreBinding;
use crate::launch::hosts::core_list::CoreList;
use candle_zero::files::{
    AtomicFile, InputOutputPaths, OutputKind, OutputLocks, ScratchFolder, check_replaceable, folder_of,
};
use candle_zero::util::counted;
use clap::{Args, ValueEnum};
use plan::{ScalingJob, ScalingKind, ScalingPoint};
use rank::RankMeasurement;
use results::{ScalingSetting, ScalingSpeed};
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Measure how the speed of training grows with the number of ranks on this host: with the same batch per rank (weak
/// scaling), and with the same batch in total (strong scaling), at each stage. Trains a model with random weights on
/// the embedded corpus. Each rank is bound to the same number of cores in all jobs, if there are enough.
///
/// Exit code: 0 if everything was measured; 1 if a rank failed or standard output could not be written; 2 if the
/// command line is wrong or the picture cannot be written; 128 + n if signal n ended the measurement.
#[derive(Debug, Args)]
pub(super) struct ScalingArguments {
    /// Model: nano, mini, gpt2, llama-mini, ..., as for `zerorun estimate --model`
    #[arg(long, value_name = "NAME", default_value = "nano")]
    model: String,

    #[command(flatten)]
    sizes: ModelSizeFlags,

    /// Tokens per sequence [default: the context length of the model]
    #[arg(long = "seq_len", alias = "seq-len", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    seq_len: Option<u32>,

    /// Number format of the model
    #[arg(long, value_enum, default_value = "f32")]
    dtype: ScalingDtype,

    /// Sequences per rank and micro batch
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,

    /// Largest number of ranks, up to which 1, 2, 4, ... ranks are measured; or a list of the numbers of ranks to
    /// measure [default: the number of physical cores]
    #[arg(long, value_name = "N|LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Vec<u16>,

    /// Stages to measure
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,1,2,3",
          value_parser = clap::value_parser!(u8).range(0..=3))]
    stages: Vec<u8>,

    /// Kinds of scaling to measure
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "weak,strong")]
    scaling: Vec<ScalingKind>,

    /// Number of measured steps of each job; two unmeasured steps precede them
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    steps: u64,

    /// File for a picture of the results
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,

    /// Start as a rank of the measured job in this folder
    #[arg(long = "rank_of", value_name = "FOLDER", hide = true)]
    rank_of: Option<PathBuf>,
}

/// The number format of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScalingDtype {
    F32,
    Bf16,
}

/// The prefix of the folder for jobs. The leftovers of a killed run are removed by the next run.
const PREFIX: &str = "candle-zero-scaling-";

impl ScalingArguments {
    /// Runs the tool. `words` are the words of its command line, which are also passed to its ranks.
    pub(super) fn run(self, words: Vec<OsString>) -> ExitCode {
        let model = match self.sizes.preset(&self.model) {
            Ok(model) => model,
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        if let Some(folder) = &self.rank_of {
            return match rank::run(folder, &model, self.tokens(&model), self.steps) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => refused(&error, 1),
            };
        }
        match self.measure(&model, words) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(stop) => stop.report(),
        }
    }

    /// Returns the number of tokens per sequence.
    fn tokens(&self, model: &SizedPreset) -> usize {
        self.seq_len.map_or(model.ctx(), |tokens| tokens as usize)
    }

    /// Measures all jobs and reports the results. Returns whether they could be reported.
    fn measure(&self, model: &SizedPreset, words: Vec<OsString>) -> Result<bool, OwnJobStop> {
        let scaling_error = |problem| Error::from(ToolError::Scaling { problem });
        if self.tokens(model) > model.ctx() {
            let (tokens, ctx) = (self.tokens(model), model.ctx());
            let problem = format!("--seq_len is {tokens}; it must be 1 to {ctx}, the context of the model (see --ctx)");
            return Err(scaling_error(problem).into());
        }
        let cores = CoreBinding { list: None }.cores(1, "this host").ok();
        let available = cores.as_ref().map_or(1, |cores| cores.cores().len());
        let counts = plan::rank_counts(&self.ranks, available);
        let points = plan::points(&self.scaling, &self.stages, &counts).map_err(scaling_error)?;
        let _claims = self.svg.as_deref().map(claim_picture).transpose()?;
        // Each rank gets the same number of cores in all jobs.
        let max_ranks = counts.iter().copied().max().unwrap_or(1);
        let cores_per_rank = Some(available / max_ranks).filter(|cores| *cores > 0);
        let setting = ScalingSetting {
            model: model.name().into(),
            dtype: match self.dtype {
                ScalingDtype::F32 => "f32",
                ScalingDtype::Bf16 => "bf16",
            },
            seq_len: self.tokens(model),
            micro_batch: self.batch as usize,
            steps: self.steps,
            cores_per_rank,
        };
        let temporary = std::env::temp_dir();
        let failed = |source| Error::Io { action: "create a folder in", path: temporary.clone(), source };
        let folder = ScratchFolder::new(&temporary, PREFIX).map_err(failed)?;
        let mut launcher = OwnJobLauncher::new()?;
        let mut speeds: BTreeMap<ScalingJob, ScalingSpeed> = BTreeMap::new();
        let mut measured: Vec<(ScalingPoint, ScalingSpeed)> = Vec::new();
        for point in points {
            let speed = match speeds.get(&point.job) {
                Some(speed) => *speed,
                None => {
                    // If there are too few cores for one per rank, each rank computes with one thread.
                    let job_cores = cores.as_ref().and_then(|cores| job_cores(cores, point.job.ranks, cores_per_rank));
                    let folder = folder.path().join(speeds.len().to_string());
                    let speed = self.run_job(point.job, &folder, &words, (&mut launcher, job_cores))?;
                    speeds.insert(point.job, speed);
                    eprint(&progress_line(point, speed));
                    speed
                }
            };
            measured.push((point, speed));
        }
        let rows = results::rows(&measured, &setting);
        let text = if self.json { setting.json(&rows).to_string() } else { setting.table(&rows) };
        let is_printed = print(text.trim_end());
        if let Some(path) = &self.svg {
            write_picture(path, &picture::draw(&setting, &rows))?;
        }
        Ok(is_printed)
    }

    /// Runs a job and reads what its ranks measured.
    fn run_job(
        &self,
        job: ScalingJob,
        folder: &Path,
        words: &[OsString],
        (launcher, cores): (&mut OwnJobLauncher, Option<CoreList>),
    ) -> Result<ScalingSpeed, OwnJobStop> {
        let failed = |source| Error::Io { action: "write", path: folder.to_owned(), source };
        std::fs::create_dir(folder).map_err(failed)?;
        let config = json!({
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": job.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": job.stage},
            "bf16": {"enabled": self.dtype == ScalingDtype::Bf16},
            "gradient_check": false,
        });
        std::fs::write(folder.join(rank::CONFIG), config.to_string()).map_err(failed)?;
        let rank_flags = ["--rank_of".into(), folder.into()];
        let args: Vec<OsString> = words.iter().cloned().chain(rank_flags).collect();
        launcher.run(args, job.ranks, cores)?;
        Ok(ScalingSpeed::of(&RankMeasurement::read_all(folder, job.ranks)?))
    }
}

/// Returns the cores of a job in which each rank has `per_rank` of them, or one if `per_rank` is `None`. Returns
/// `None` if there are too few.
fn job_cores(cores: &CoreList, ranks: usize, per_rank: Option<usize>) -> Option<CoreList> {
    let needed = ranks * per_rank.unwrap_or(1);
    (needed <= cores.cores().len()).then(|| cores.first(needed))
}

fn progress_line(ScalingPoint { job, .. }: ScalingPoint, speed: ScalingSpeed) -> String {
    let ScalingJob { stage, ranks, accumulation } = job;
    let ranks = counted(ranks, "rank");
    let micro_batches =
        if accumulation == 1 { "1 micro batch".into() } else { format!("{accumulation} micro batches") };
    format!("zerorun: stage {stage}, {ranks}, {micro_batches} per rank: {:.1} ms a step", speed.step_ms)
}

/// Checks that a picture can be written to `path`, and keeps other jobs from writing there.
fn claim_picture(path: &Path) -> Result<OutputLocks> {
    let claims = InputOutputPaths::default().writes("--svg", path, OutputKind::File).claim()?;
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    };
    let folder = folder_of(path);
    tempfile::tempfile_in(folder).map_err(failed("write to", folder))?;
    check_replaceable(path, picture::BEGIN.as_bytes(), "picture of `zerorun bench scaling`")
        .map_err(failed("write", path))?;
    Ok(claims)
}

fn write_picture(path: &Path, svg: &str) -> Result<()> {
    let write = || {
        check_replaceable(path, picture::BEGIN.as_bytes(), "picture of `zerorun bench scaling`")?;
        let mut file = AtomicFile::create_for(path)?;
        file.file().write_all(svg.as_bytes())?;
        file.finish().map(drop)
    };
    write().map_err(|source| Error::Io { action: "write", path: path.to_owned(), source })
}
