//! Writes the files next to a result's weights: a README that describes the model and its use, a record of the run and,
//! for an adapter, the tokenizer's files.

use super::options::{Objective, TuningMethod};
use super::prepare::PreparedRun;
use crate::chat::tokenizer_files::TokenizerFiles;
use crate::data::data_report::DataReport;
use crate::data::dataset::Dataset;
use crate::error::{Error, Result};
use crate::model::output_dir::{TOKENIZER, copy_files};
use candle_zero::checkpoint::{create, write_json};
use candle_zero::util::counted;
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::Path;

/// The file name of the record.
pub(super) const RECORD: &str = "run.json";
const README: &str = "README.md";

/// The outcome of a run, in addition to its settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RunOutcome {
    /// The number of steps completed.
    pub steps: u64,
    /// The number of steps of the complete run.
    pub total: u64,
    /// The loss of the last step.
    pub loss: Option<f64>,
    /// The best validation: the number of steps and the loss.
    pub best: Option<(u64, f64)>,
}

/// The facts about a run that are known when its result is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelCard<'a> {
    pub prepared: &'a PreparedRun,
    /// The settings that determine the result, by name.
    pub settings: &'a Value,
    pub outcome: RunOutcome,
}

impl ModelCard<'_> {
    /// Writes the files into a result's folder. The same run writes the same bytes, however often it was interrupted.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn write(&self, into: &Path) -> Result<()> {
        let Self { prepared, settings, outcome } = *self;
        if prepared.options.method.lora().is_some() {
            match prepared.start.tokenizer_path() {
                file if file.is_file() => TokenizerFiles::read(file)?.write(into)?,
                folder => copy_files(folder, into, TOKENIZER)?,
            }
        }
        write_json(into, RECORD, &record(prepared, settings, outcome))?;
        let text = readme(prepared, outcome);
        create(into, README, |file| {
            let wrong = |source| Error::Io { action: "write", path: into.join(README), source };
            file.write_all(text.as_bytes()).map_err(wrong)
        })
    }
}

/// Returns the name of the base for the README.
fn base_name(prepared: &PreparedRun) -> String {
    let folder = || prepared.options.model.display().to_string();
    prepared.options.base_name.clone().unwrap_or_else(folder)
}

fn method(prepared: &PreparedRun) -> String {
    let options = &prepared.options;
    let summary = match &options.method {
        TuningMethod::Full => "All weights were trained".to_owned(),
        TuningMethod::Lora(lora) => {
            format!("Low-rank adapters (LoRA, r {}, alpha {}) were trained", lora.r, lora.alpha)
        }
        TuningMethod::Qlora(lora) => format!(
            "Low-rank adapters (LoRA, r {}, alpha {}) were trained on top of weights in NF4 (QLoRA)",
            lora.r, lora.alpha
        ),
    };
    match options.objective {
        Objective::Generate => summary,
        Objective::Prefer { beta } => format!("{summary} on preferences (DPO, beta {beta})"),
        Objective::Classify => format!("{summary} to classify texts"),
    }
}

fn readme(prepared: &PreparedRun, outcome: RunOutcome) -> String {
    let (base, options) = (base_name(prepared), &prepared.options);
    let (library, pipeline) = match (&options.method, options.objective) {
        (TuningMethod::Full, Objective::Classify) => ("transformers", "text-classification"),
        (_, Objective::Classify) => ("peft", "text-classification"),
        (TuningMethod::Full, _) => ("transformers", "text-generation"),
        _ => ("peft", "text-generation"),
    };
    // JSON strings are YAML strings.
    let quoted = Value::from(base.as_str());
    let mut text =
        format!("---\nbase_model: {quoted}\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags:\n- candle-zero\n");
    if options.method.lora().is_some() {
        text += "- lora\n";
    }
    text += &format!(
        "---\n\n# A fine-tuned model\n\n{}, starting from `{base}`, with candle-zero {} for {} of {}",
        method(prepared),
        env!("CARGO_PKG_VERSION"),
        outcome.steps,
        counted(outcome.total, "step"),
    );
    if let Some(loss) = outcome.loss {
        text += &format!("; the loss of the last step is {loss:.4}");
    }
    if let Some((steps, loss)) = outcome.best {
        text += &format!("; the best validation loss is {loss:.4}, after {}", counted(steps, "step"));
    }
    text += &format!(". [{RECORD}]({RECORD}) lists the settings and the data files.\n\n## Use\n\n```sh\n");
    text += match (&options.method, options.objective) {
        (TuningMethod::Full, Objective::Classify) => "zerorun classify THIS_FOLDER \"a text\"\n",
        (_, Objective::Classify) => "zerorun classify BASE_MODEL --adapter THIS_FOLDER \"a text\"\n",
        (TuningMethod::Full, _) => "zerorun generate THIS_FOLDER --prompt \"a question\"\n",
        _ => {
            "zerorun generate BASE_MODEL --adapter THIS_FOLDER --prompt \"a question\"\n\
              zerorun merge BASE_MODEL THIS_FOLDER --out merged\n"
        }
    };
    text += "```\n\n```python\n";
    text += &match (&options.method, options.objective) {
        (TuningMethod::Full, Objective::Classify) => "from transformers import pipeline\n\n\
             pipeline(\"text-classification\", \"THIS_FOLDER\")(\"a text\")\n"
            .to_owned(),
        (_, Objective::Classify) => format!(
            "from peft import PeftModel\nfrom transformers import AutoConfig, AutoModelForSequenceClassification, \
             AutoTokenizer\n\n\
             config = AutoConfig.from_pretrained(\"THIS_FOLDER\")\n\
             model = AutoModelForSequenceClassification.from_pretrained({quoted}, config=config)\n\
             model = PeftModel.from_pretrained(model, \"THIS_FOLDER\")\n\
             tokenizer = AutoTokenizer.from_pretrained(\"THIS_FOLDER\")\n"
        ),
        (TuningMethod::Full, _) => "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
             model = AutoModelForCausalLM.from_pretrained(\"THIS_FOLDER\")\n\
             tokenizer = AutoTokenizer.from_pretrained(\"THIS_FOLDER\")\n"
            .to_owned(),
        _ => format!(
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
             model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({quoted}), \"THIS_FOLDER\")\n\
             tokenizer = AutoTokenizer.from_pretrained(\"THIS_FOLDER\")\n"
        ),
    };
    text += "```\n";
    text
}

fn record(prepared: &PreparedRun, settings: &Value, outcome: RunOutcome) -> Value {
    let files = |data: &Dataset| -> Vec<Value> {
        let of_file = |(path, report): (&Path, &DataReport)| json!({ "path": path.display().to_string(), "found": report.to_string(), "notes": report.notes() });
        data.reports().map(of_file).collect()
    };
    let data = |data: &Dataset| json!({ "samples": data.len(), "files": files(data) });
    let best = outcome.best.map(|(steps, loss)| json!({ "steps": steps, "loss": loss }));
    json!({
        "program": concat!("candle-zero ", env!("CARGO_PKG_VERSION")),
        "base_model": base_name(prepared),
        "settings": settings,
        "training_data": data(prepared.training()),
        "validation_data": prepared.validation().map(data),
        "steps": outcome.steps,
        "total_steps": outcome.total,
        "loss": outcome.loss,
        "best_validation": best,
    })
}
