//! A rank of `zerorun finetune`: makes the steps; the first one shows them.

use super::flags::Flags;
use crate::comm::{self, RankEnv};
use crate::error::Result;
use crate::finetune::{Ended, FineTune, Options, Prepared, Sampling, StepReport};
use crate::launch::console::{print, refused, say};
use crate::monitor::{MetricsWriter, Progress};
use crate::offload::OffloadReport;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Trains to the end, and writes the result.
pub(super) fn run(options: Options, flags: &Flags) -> ExitCode {
    match train(options, flags) {
        Ok(Ended::Asked) => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => refused(&error, 1),
    }
}

fn train(options: Options, flags: &Flags) -> Result<Ended> {
    let comm = comm::from_env(&RankEnv::from_env()?)?;
    let first = comm.rank() == 0;
    let prepared = Prepared::new(options, &mut |_| ()).inspect_err(|error| comm.abort(&error.to_string()))?;
    let mut run = FineTune::start(prepared, comm)?;
    if first {
        introduce(&mut run);
    }
    let mut metrics = match &flags.metrics {
        Some(path) if first => Some(open_metrics(path, &run)?),
        _ => None,
    };
    let mut progress = if first { Progress::new(run.total_steps(), None) } else { Progress::silent() };
    let begun = Instant::now();
    while let Some(step) = run.step()? {
        write(&mut metrics, &step);
        progress.step(step.step + 1, || line(&step));
        if let Some(loss) = step.val_loss {
            if first {
                say(&validated(&run, &step, loss));
            }
            answer(&mut run, flags, first)?;
        }
    }
    progress.finish();
    let mut summary = run.summary();
    summary["seconds"] = begun.elapsed().as_secs_f64().into();
    write(&mut metrics, &summary);
    let ended = run.ended().unwrap_or(Ended::Complete);
    let (steps, out, best) = (run.steps(), run.prepared().options().out.clone(), run.best());
    let best_folder = run.prepared().options().best();
    if ended == Ended::Asked {
        if first {
            print(format!("a signal asked for the end: step {steps} is saved, --resume goes on from there"));
        }
        return Ok(ended);
    }
    if run.prepared().validation().is_none() {
        answer(&mut run, flags, first)?;
    }
    run.finish()?;
    if first {
        if ended == Ended::NoImprovement {
            print(format!("ended after {steps} steps: validation has not improved any more"));
        }
        print(format!("the result is in {}", out.display()));
        if let Some((at, loss)) = best {
            print(format!("the best, of step {at} with validation loss {loss:.4}, is in {}", best_folder.display()));
        }
    }
    Ok(ended)
}

/// What is trained, and how.
fn introduce(run: &mut FineTune) {
    let (rows, steps, at) = (run.rows_per_epoch(), run.total_steps(), run.steps());
    let resumed = run.resumed().map(Path::to_owned);
    if let Some(chosen) = run.chosen() {
        print(format!("chosen for the memory at hand: {chosen}"));
    }
    let ctx = run.prepared().ctx();
    let engine = run.engine();
    let (names, trained) = (engine.parameter_names().len(), engine.trainable_parameters().len());
    let (world, batch) = (engine.world_size(), engine.config().batch);
    let stage = engine.config().zero.stage;
    print(format!("{trained} of {names} parameter tensors are trained, at stage {stage} on {world} rank(s)"));
    print(format!(
        "{rows} rows of up to {ctx} tokens, {} a step ({} a rank at once): {steps} steps",
        batch.train_batch_size, batch.train_micro_batch_size_per_gpu
    ));
    let files = engine.offload_report();
    if files != OffloadReport::default() {
        print(files);
    }
    if let Some(checkpoint) = resumed {
        print(format!("goes on after step {at}: {}", checkpoint.display()));
    }
}

fn open_metrics(path: &Path, run: &FineTune) -> Result<MetricsWriter> {
    if run.resumed().is_some() { MetricsWriter::resume(path, run.steps()) } else { MetricsWriter::create(path) }
}

/// Writes a line of metrics. Training is worth more than its log: one that cannot be written ends, and says so.
fn write(metrics: &mut Option<MetricsWriter>, line: &impl Serialize) {
    if let Some(Err(error)) = metrics.as_mut().map(|metrics| metrics.write(line)) {
        say(&format!("{error}: training goes on, and the metrics end here"));
        *metrics = None;
    }
}

/// Answers the user's prompts: with the likeliest tokens, on all ranks alike.
fn answer(run: &mut FineTune, flags: &Flags, first: bool) -> Result<()> {
    let sampling = Sampling { max_tokens: flags.max_tokens, ..Sampling::default() };
    for prompt in &flags.prompt {
        let answer = run.answer(prompt, &sampling)?;
        if first {
            say(&format!("  {prompt:?}: {:?}", answer.text));
        }
    }
    Ok(())
}

fn line(step: &StepReport) -> String {
    format!("loss {:.4} lr {:.3e} {:.0} tokens/s", step.loss, step.lr, step.tokens_per_s)
}

/// A line about a validation.
fn validated(run: &FineTune, step: &StepReport, loss: f64) -> String {
    let best = if run.best().is_some_and(|(at, _)| at == step.step + 1) { ", the best so far" } else { "" };
    let f1 = step.val_f1.map(|f1| format!(", macro F1 {f1:.4}")).unwrap_or_default();
    match step.val_accuracy {
        Some(accuracy) => {
            format!("step {}: validation loss {loss:.4}, accuracy {:.1}%{f1}{best}", step.step + 1, 100.0 * accuracy)
        }
        None => format!("step {}: validation loss {loss:.4}, perplexity {:.3}{best}", step.step + 1, loss.exp()),
    }
}
