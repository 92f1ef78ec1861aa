//! Tools: what `zerorun` does besides starting scripts. The first word of the command line names one.
//!
//! A tool has a file, or a folder, of its own name. `picture` belongs to `check`, `sizes` to `estimate` and `tune`,
//! `samples` to `data` and `finetune`, `model` to
//! all that take a model.
//! A script of the same name is started as `./NAME`.

mod bench;
mod cache;
mod check;
mod classify;
mod consolidate;
mod data;
mod deploy;
pub(crate) mod error;
mod estimate;
mod finetune;
mod forecast;
mod generate;
mod gpus;
mod import;
mod inspect;
mod merge;
mod model;
mod picture;
mod progress;
mod report;
mod samples;
mod schedule;
mod schema;
mod sizes;
mod tune;
mod verify;

use crate::launch::console::Refused;
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

/// Something that `zerorun NAME ...` does.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// One line for `zerorun --help`.
    about: &'static str,
    /// Gets the command line from the name on.
    pub(crate) run: fn(Vec<OsString>) -> Result<ExitCode, Refused>,
}

/// All of them, in the order of the help.
const ALL: [Tool; 18] = [
    Tool { name: "bench", about: "Measure an offload folder, or the network between hosts", run: bench::run },
    Tool { name: "cache", about: "Show what builds of scripts take on the disk, and remove it", run: cache::run },
    Tool { name: "check", about: "Check a configuration and list every problem", run: check::run },
    Tool { name: "classify", about: "Tell the labels of texts with a fine-tuned BERT", run: classify::run },
    Tool { name: "consolidate", about: "Write a checkpoint's parameters as Hugging Face files", run: consolidate::run },
    Tool { name: "data", about: "Show what fine-tuning makes of data files", run: data::run },
    Tool { name: "deploy", about: "Print what Kubernetes or Slurm need to start a job", run: deploy::run },
    Tool { name: "estimate", about: "Compute memory and traffic before training", run: estimate::run },
    Tool { name: "finetune", about: "Fine-tune a Hugging Face model or a GGUF file", run: finetune::run },
    Tool { name: "generate", about: "Answer prompts with a model and an adapter", run: generate::run },
    Tool { name: "import", about: "Convert a DeepSpeed checkpoint", run: import::run },
    Tool { name: "inspect", about: "Look into a folder of checkpoints", run: inspect::run },
    Tool { name: "merge", about: "Merge an adapter into a model, as a Hugging Face folder or GGUF", run: merge::run },
    Tool { name: "report", about: "Describe this machine and what it can train", run: report::run },
    Tool { name: "schedule", about: "Show learning rate and momentum of each step", run: schedule::run },
    Tool { name: "schema", about: "Print a JSON Schema of the configuration, for editors", run: schema::run },
    Tool { name: "tune", about: "Find the fastest configuration of a script by short runs", run: tune::run },
    Tool { name: "verify", about: "Prove that all stages give the same bits on this machine", run: verify::run },
];

/// The tool of that name.
pub(crate) fn named(word: &OsStr) -> Option<&'static Tool> {
    ALL.iter().find(|tool| word == tool.name)
}

/// The name of the tool that a mistyped word is most like, if any is.
pub(crate) fn nearest(word: &str) -> Option<&'static str> {
    /// The least likeness, from 0 to 1.
    const ALIKE: f64 = 0.6;
    let likeness = |tool: &Tool| strsim::normalized_damerau_levenshtein(&word.to_lowercase(), tool.name);
    let nearest = ALL.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    Some(nearest.name).filter(|_| likeness(nearest) >= ALIKE)
}

/// The part of the help that lists them.
pub(crate) fn help() -> String {
    let lines = ALL.iter().map(|Tool { name, about, .. }| format!("  {name:13}{about}: see `zerorun {name} --help`\n"));
    format!(
        "Tools, in the place of SCRIPT (a script of such a name is started as ./NAME):\n{}",
        lines.collect::<String>()
    )
}
