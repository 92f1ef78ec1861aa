//! `optimizer`: the table of parameters depends on the type.

use super::keys::typed_section;
use super::walk::{Walk, defaults};
use super::{AdamConfig, OptimizerConfig, Rule, SgdConfig};
use crate::layout::ZeroStage;
use serde_json::Value;

/// Optimizers that DeepSpeed or PyTorch has and that are not offered here.
const OTHER_OPTIMIZERS: [&str; 18] = [
    "Adagrad",
    "Lamb",
    "Lion",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Muon",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "Adadelta",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SparseAdam",
];

/// Default `weight_decay` of torch.optim.AdamW.
const TORCH_ADAMW_DECAY: f64 = 0.01;

const OPTIMIZER: &str = "optimizer";

/// The optimizer of the file; problems go to the walk.
pub(super) fn optimizer(walk: &mut Walk<'_>, stage: ZeroStage) -> Option<OptimizerConfig> {
    if !walk.given.contains_key(OPTIMIZER) || walk.get(OPTIMIZER) == Some(&Value::Null) {
        untested(walk, None, stage);
        return None;
    }
    // DeepSpeed's names go in any letter case; ours do all.
    let names = ["Adam", "AdamW", "SGD"];
    let found = walk.str("optimizer.type").map(str::to_string);
    let name = found.and_then(|found| {
        let name = names.into_iter().find(|name| name.eq_ignore_ascii_case(&found));
        if name.is_none() {
            stranger(walk, "optimizer.type", &found, &names, &OTHER_OPTIMIZERS, true);
        }
        name
    });
    let Some(name) = name else {
        needs_type(walk, OPTIMIZER, &names);
        return None;
    };
    parameters(walk, OPTIMIZER, name)?;
    untested(walk, Some(name), stage);
    let of = |key: &str| format!("optimizer.params.{key}");
    let float = |walk: &Walk<'_>, key: &str| walk.float(&of(key));
    let config = if name == "SGD" {
        let sgd = SgdConfig {
            lr: float(walk, "lr"),
            momentum: float(walk, "momentum"),
            dampening: float(walk, "dampening"),
            weight_decay: float(walk, "weight_decay"),
            nesterov: walk.bool(&of("nesterov")),
        };
        if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0) {
            let place = walk.place(&of("nesterov"));
            walk.problem(Rule::Conflict, &of("nesterov"), place, "needs momentum > 0 and dampening 0");
        }
        OptimizerConfig::Sgd(sgd)
    } else {
        let betas = walk.get(&of("betas")).and_then(Value::as_array).map(Vec::as_slice);
        let Some([beta1, beta2]) = betas else { panic!("betas are two numbers of the table") };
        let betas = (beta1.as_f64().unwrap_or_default(), beta2.as_f64().unwrap_or_default());
        let adam_w_mode = walk.bool(&of("adam_w_mode"));
        let decoupled = name == "AdamW" || adam_w_mode;
        // DeepSpeed hands the parameters to torch.optim.AdamW, whose default decay is not 0.
        if decoupled && walk.bool(&of("torch_adam")) && !walk.given.contains_key(&of("weight_decay")) {
            walk.set(&of("weight_decay"), TORCH_ADAMW_DECAY.into());
            walk.note(&of("weight_decay"), format!("{TORCH_ADAMW_DECAY}, the default of PyTorch's AdamW (torch_adam)"));
        }
        let adam = AdamConfig {
            lr: float(walk, "lr"),
            betas,
            eps: float(walk, "eps"),
            weight_decay: float(walk, "weight_decay"),
            bias_correction: walk.bool(&of("bias_correction")),
            decoupled,
        };
        if name == "AdamW" && !adam_w_mode {
            walk.note(&of("adam_w_mode"), "accepted and has no effect: AdamW is always decoupled, as in DeepSpeed");
        }
        OptimizerConfig::Adam(adam)
    };
    Some(config)
}

/// Reads `params` by the table of its type; `None` where there is none.
pub(super) fn parameters(walk: &mut Walk<'_>, owner: &str, of_type: &str) -> Option<()> {
    let path = format!("{owner}.params");
    let section = typed_section(&path, of_type)?;
    walk.set(&path, Value::Object(defaults(section)));
    if let Some(entries) = walk.params.get(&path).copied() {
        walk.section(section, entries);
    }
    Some(())
}

/// Complains about an absent type, once.
pub(super) fn needs_type(walk: &mut Walk<'_>, owner: &str, names: &[&str]) {
    let path = format!("{owner}.type");
    if !walk.problems.iter().any(|problem| problem.path.starts_with(owner)) {
        let place = walk.place(owner);
        walk.problem(Rule::Type, &path, place, format!("has to be given: {}", names.join(", ")));
    }
}

/// Complains about a type that is not offered.
pub(super) fn stranger(walk: &mut Walk<'_>, path: &str, found: &str, names: &[&str], others: &[&str], any_case: bool) {
    const ALIKE: f64 = 0.6;
    let same = |name: &&&str| if any_case { name.eq_ignore_ascii_case(found) } else { **name == found };
    let place = walk.place(path);
    let offered = names.join(", ");
    if others.iter().any(|name| same(&name)) {
        return walk.problem(Rule::Unsupported, path, place, format!("\"{found}\" is not supported: use {offered}"));
    }
    let likeness = |name: &str| strsim::normalized_damerau_levenshtein(&name.to_lowercase(), &found.to_lowercase());
    let near = names.iter().filter(|name| likeness(name) >= ALIKE).max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let near = near.map(|near| format!(" Did you mean \"{near}\"?")).unwrap_or_default();
    walk.problem(Rule::Range, path, place, format!("\"{found}\" is unknown: use {offered}.{near}"));
}

/// `zero_allow_untested_optimizer`: SGD under ZeRO has to be asked for.
fn untested(walk: &mut Walk<'_>, name: Option<&str>, stage: ZeroStage) {
    let allowed = walk.bool("zero_allow_untested_optimizer");
    let needed = name == Some("SGD") && stage > ZeroStage::Zero;
    if needed && !allowed {
        let place = walk.place("optimizer.type");
        let text = format!(
            "SGD counts as untested with ZeRO (stage {stage}): set \"zero_allow_untested_optimizer\": true, or use Adam \
             or AdamW"
        );
        walk.problem(Rule::Conflict, "optimizer.type", place, text);
    } else if allowed && !needed {
        let text = "accepted and has no effect here: only SGD at stage 1 to 3 needs it";
        walk.note("zero_allow_untested_optimizer", text);
    }
}
