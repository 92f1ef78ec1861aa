//! A rank of `zerorun finetune`: runs the steps. The first rank also prints their results.

use super::flags::FinetuneFlags;
use crate::error::{FinetuneError, Result};
use crate::launch::console::{all_output_written, eprint, print, refused};
use candle_zero::comm::{self, RankEnv};
use candle_zero::monitor::{MetricsWriter, Progress};
use candle_zero::offload::OffloadReport;
use candle_zero::stop_signal::{asked_to_stop, is_planned_stop};
use candle_zero::util::{counted, is_or_are};
use candle_zero_finetune::{FineTune, Options, PreparedRun, Rewards, Sampling, StepReport, StopReason, TrainingEngine};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Trains to the end and writes the result.
pub(super) fn run(options: Options, flags: &FinetuneFlags) -> ExitCode {
    match train(options, flags) {
        Ok(TrainingEnd::Interrupted) => ExitCode::FAILURE,
        // If there are several ranks, the launcher performs the same check.
        Ok(_) if !all_output_written() => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => refused(&error, 1),
    }
}

/// The outcome of training without errors.
enum TrainingEnd {
    /// The result is written, or the run has ended where it was meant to: at a planned step, or when the user stopped
    /// it on the dashboard.
    AsPlanned,
    /// A signal ended the training.
    Interrupted,
}

fn train(options: Options, flags: &FinetuneFlags) -> Result<TrainingEnd> {
    let comm = comm::from_env(&RankEnv::from_env()?)?;
    let first = comm.rank() == 0;
    let prepared = PreparedRun::new(options, &mut |_| ()).inspect_err(|error| comm.abort(&error.to_string()))?;
    // The process that started this one locks the folders against other jobs.
    let prepared = prepared.claimed();
    let mut run = FineTune::start(prepared, comm)?;
    if first {
        introduce(&run);
        if run.engine().pipeline_ranks().is_some() && !flags.prompt.is_empty() {
            eprint(
                "zerorun: --prompt is ignored, because the ranks of a pipeline have only parts of the model; use \
                    zerorun generate with the result",
            );
        }
    }
    let mut metrics = match &flags.metrics {
        Some(path) if first => Some(open_metrics(path, &run, flags.resume)?),
        _ => None,
    };
    let mut progress = if first { Progress::new(run.total_steps(), None) } else { Progress::silent() };
    let start = Instant::now();
    progress.begin(run.steps(), || "the first step is in progress".into());
    let mut done = run.steps();
    while let Some(step) = run.step_with_progress(&mut |micro, of| progress.show_step_progress(done, micro, of))? {
        done = step.step + 1;
        write(&mut metrics, &step);
        progress.step(step.step + 1, || line(&step));
        if let Some(loss) = step.val_loss {
            if first {
                eprint(&validation_line(&run, &step, loss));
            }
            answer(&mut run, flags, first)?;
        }
    }
    progress.finish();
    let mut summary = run.summary();
    summary["seconds"] = start.elapsed().as_secs_f64().into();
    write(&mut metrics, &summary);
    let reason = run.stop_reason().unwrap_or(StopReason::Complete);
    let (steps, out, best) = (run.steps(), run.prepared().options().out.clone(), run.best());
    let (best_folder, best_is_lost) = (run.prepared().options().best(), run.best_is_lost());
    if reason == StopReason::Requested {
        let (end, why) = match () {
            () if is_planned_stop(steps) => (TrainingEnd::AsPlanned, "as planned"),
            () if is_by_signal() => (TrainingEnd::Interrupted, "by a signal"),
            // A job that the user stops on the dashboard does not count as failed, because a failed job would be
            // restarted.
            () => (TrainingEnd::AsPlanned, "on request"),
        };
        stop(run, flags, first, why)?;
        return Ok(end);
    }
    if run.prepared().validation().is_none() {
        answer(&mut run, flags, first)?;
    }
    run.finish()?;
    if first {
        if reason == StopReason::NoImprovement {
            print(format!("ended after {}: validation no longer improves", counted(steps, "step")));
        }
        print(format!("the result is in {}", out.display()));
        if let (Some((at, loss)), false) = (best, best_is_lost) {
            print(format!("the best result (step {at}, validation loss {loss:.4}) is in {}", best_folder.display()));
        }
    }
    Ok(TrainingEnd::AsPlanned)
}

/// Returns whether a signal, rather than the dashboard, has asked this rank to end.
fn is_by_signal() -> bool {
    !matches!(asked_to_stop(), Ok(false))
}

/// Ends the run early, and reports what is saved and what is lost. `why` follows the word "stopped" in the message.
fn stop(run: FineTune, flags: &FinetuneFlags, first: bool, why: &str) -> Result<()> {
    let (steps, made, total) = (run.steps(), run.steps_made(), run.total_steps());
    if flags.save.is_some() && steps > 0 {
        if first {
            print(format!("stopped {why}: step {steps} of {total} is saved, and --resume continues from there"));
        }
        return Ok(());
    }
    if made == 0 {
        if first {
            print(format!("stopped {why} before the first step was complete: nothing is lost"));
        }
        return Ok(());
    }
    let folder = run.finish_stopped()?;
    if first {
        print(format!(
            "stopped {why} after step {steps} of {total}: the model at that point is in {}. Training cannot be \
             resumed from it, because the optimizer's state is not kept without checkpoints; give --save DIR next \
             time, and --resume to continue",
            folder.display()
        ));
    }
    Ok(())
}

/// Prints the model, the data and the settings of the training run.
fn introduce(run: &FineTune) {
    let (rows, steps, at) = (run.rows_per_epoch(), run.total_steps(), run.steps());
    let (epochs, samples) = (run.epochs(), run.prepared().training().len());
    let resumed = run.resumed_from().map(Path::to_owned);
    if let Some(explanation) = run.config_explanation() {
        print(format!("chosen for the available memory: {explanation}"));
    }
    let ctx = run.prepared().ctx();
    let (engine, (trained, names)) = (run.engine(), run.parameter_counts());
    let batch = engine.config().batch;
    let (stage, ranks) = (engine.config().zero.stage, counted(engine.world_size(), "rank"));
    let division = engine.pipeline_ranks().map_or(String::new(), |ranks_per_pipeline| {
        let (pipelines, waiting) = (counted(engine.data_position().1, "pipeline"), 100.0 * run.waiting_share());
        let ranks_per_pipeline = counted(ranks_per_pipeline, "rank");
        format!(", in {pipelines} of {ranks_per_pipeline}, which wait for {waiting:.0} % of a step")
    });
    let islands = islands(engine, run.prepared().validation().is_some());
    print(format!(
        "{trained} of {} {} trained, at stage {stage} on {ranks}{division}{islands}",
        counted(names, "parameter tensor"),
        is_or_are(trained)
    ));
    if run.waiting_share() > 0.5 {
        eprint(&format!(
            "zerorun: warning: the ranks of the pipeline wait longer than they compute, because a step has only {} micro \
             {}; give a larger --batch, or fewer ranks along the pipeline",
            batch.gradient_accumulation_steps,
            if batch.gradient_accumulation_steps == 1 { "batch" } else { "batches" }
        ));
    }
    let row = match run.shortened_row_tokens() {
        Some(tokens) => format!("{} (not {ctx}, so that an epoch has more steps)", counted(tokens, "token")),
        None => counted(ctx, "token"),
    };
    print(format!(
        "{} in {} of up to {row}, {} per step ({} per {} at once): {}, {} through the data",
        counted(samples, "sample"),
        counted(rows, "row"),
        batch.train_batch_size,
        batch.train_micro_batch_size_per_gpu,
        if engine.pipeline_ranks().is_some() { "pipeline" } else { "rank" },
        counted(steps, "step"),
        times(epochs),
    ));
    if let Some(warning) = few_steps(steps, rows, batch.train_batch_size) {
        eprint(&warning);
    }
    let files = engine.offload_report();
    if files != OffloadReport::default() {
        print(files);
    }
    if let Some(checkpoint) = resumed {
        print(format!("continues after step {at}: {}", checkpoint.display()));
    }
    if let Some(at) = run.joined_at() {
        print(format!("continues after step {at}, with the state of the other islands"));
    }
}

/// Describes the islands of a run with local steps.
fn islands(engine: &TrainingEngine, validates: bool) -> String {
    let (Some((island, islands)), Some(local_steps)) = (engine.island(), &engine.config().local_steps) else {
        return String::new();
    };
    let this = if local_steps.server.is_some() { format!(" (this is island {island})") } else { String::new() };
    format!(
        ", in {}{this}, which exchange the changes in their weights every {}{}",
        counted(islands, "island"),
        counted(local_steps.steps, "step"),
        if validates { " and before each validation" } else { "" }
    )
}

/// Returns a warning with a remedy if a run is too short to learn much.
fn few_steps(steps: u64, rows: usize, batch: usize) -> Option<String> {
    if steps >= MIN_LEARNING_STEPS {
        return None;
    }
    let epochs = (MIN_LEARNING_STEPS as usize * batch).div_ceil(rows);
    let smaller = if batch > 1 { ", or a smaller --batch" } else { "" };
    Some(format!(
        "zerorun: warning: a model learns little in {}; the data fills {}, and each step takes {batch}; give --epochs \
         {epochs} or more{smaller}",
        counted(steps, "step"),
        counted(rows, "row"),
    ))
}

/// The number of steps after which a model begins to learn.
const MIN_LEARNING_STEPS: u64 = 30;

/// Formats a number of epochs as `once`, `3 times` or `2.5 times`.
fn times(epochs: f64) -> String {
    let rounded = (epochs * 100.0).round() / 100.0;
    if rounded == 1.0 { "once".into() } else { format!("{rounded} times") }
}

/// Opens the metrics file. `resumes` states whether the file may contain lines from an earlier start of this run.
fn open_metrics(path: &Path, run: &FineTune, resumes: bool) -> Result<MetricsWriter> {
    let continues = run.resumed_from().is_some() || resumes && run.joined_at().is_some();
    if continues { MetricsWriter::resume(path, run.steps()) } else { MetricsWriter::create(path) }
}

/// Writes a line of metrics. Training matters more than its log: if a line cannot be written, a message reports this
/// and the log ends.
fn write(metrics: &mut Option<MetricsWriter>, line: &impl Serialize) {
    if let Some(Err(error)) = metrics.as_mut().map(|metrics| metrics.write(line)) {
        eprint(&format!("{error}: training continues, but no more metrics are written"));
        *metrics = None;
    }
}

/// Answers the user's prompts by greedy decoding, identically on all ranks.
fn answer(run: &mut FineTune, flags: &FinetuneFlags, first: bool) -> Result<()> {
    if run.engine().pipeline_ranks().is_some() {
        return Ok(());
    }
    let sampling = Sampling { max_tokens: flags.max_tokens, ..Sampling::default() };
    for prompt in &flags.prompt {
        let text = match run.answer(prompt, &sampling) {
            Ok(answer) => {
                run.record_sample(prompt, &answer.text);
                format!("{:?}", answer.text)
            }
            // Logits can become infinite or NaN with 16-bit weights, for example. This does not end the run, because
            // training checks its own loss. All ranks have the same logits, and therefore the same error.
            Err(error) if matches!(error.downcast_ref(), Some(FinetuneError::LogitsNotFinite)) => error.to_string(),
            Err(error) => return Err(error),
        };
        if first {
            eprint(&format!("  {prompt:?}: {text}"));
        }
    }
    Ok(())
}

fn line(step: &StepReport) -> String {
    let StepReport { loss, lr, tokens_per_s, .. } = step;
    let rewards = step.rewards.map(|rewards| format!(" {}", rewards_text(&rewards))).unwrap_or_default();
    format!("loss {loss:.4}{rewards} lr {lr:.3e} {tokens_per_s:.0} tokens/s")
}

/// Formats the rewards of preference pairs.
fn rewards_text(rewards: &Rewards) -> String {
    let Rewards { chosen, rejected, margin, accuracy, .. } = rewards;
    format!("rewards {chosen:.3} and {rejected:.3}, margin {margin:.3}, accuracy {:.0}%", 100.0 * accuracy)
}

/// Formats the line about a validation.
fn validation_line(run: &FineTune, step: &StepReport, loss: f64) -> String {
    let best = if run.best().is_some_and(|(at, _)| at == step.step + 1) { ", the best so far" } else { "" };
    let f1 = step.val_f1.map(|f1| format!(", macro F1 {f1:.4}")).unwrap_or_default();
    match (step.val_accuracy, &step.val_rewards) {
        (Some(_), Some(rewards)) => {
            format!("step {}: validation loss {loss:.4}, {}{best}", step.step + 1, rewards_text(rewards))
        }
        (Some(accuracy), None) => {
            format!("step {}: validation loss {loss:.4}, accuracy {:.1}%{f1}{best}", step.step + 1, 100.0 * accuracy)
        }
        (None, _) => format!("step {}: validation loss {loss:.4}, perplexity {:.3}{best}", step.step + 1, loss.exp()),
    }
}
