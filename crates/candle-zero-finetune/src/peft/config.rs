//! Reads and writes PEFT's `adapter_config.json`.

use candle_zero::models::shortened;
use candle_zero::nn::{LoraConfig, LoraTargets};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The part of the file's content that candle-zero uses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PeftConfig {
    pub lora: LoraConfig,
    /// The name of the base.
    pub base: Option<String>,
    /// Whether `target_modules` is a regular expression, as unsloth writes it. If it is, the tensor file determines
    /// the modules.
    pub is_pattern: bool,
    /// The modules of a classifier that are saved completely (`modules_to_save` with the task type SEQ_CLS), or `None`
    /// for the adapter of a language model.
    pub saved: Option<Vec<String>>,
}

/// The task type of a classifier's adapter.
const CLASSIFIER_TASK: &str = "SEQ_CLS";

/// The modules that PEFT always saves with a classifier's adapter.
const CLASSIFIER_MODULES: [&str; 2] = ["classifier", "score"];

/// Unsupported settings, which change what an adapter computes or which weights it has.
const UNSUPPORTED_SETTINGS: [&str; 15] = [
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "exclude_modules",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
];

/// Settings that are checked individually, and those that do not change a finished adapter: who wrote it, how it was
/// initialized, and details of settings that are refused.
const HANDLED_SETTINGS: [&str; 27] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// The names in `init_lora_weights` that leave the base's weights unchanged, as `true` and `false` do. With other names,
/// PEFT subtracts the initial adapter from the base's weights (PiSSA, OLoRA, CorDA, LoRA-GA) or quantizes them (LoftQ).
/// Such an adapter belongs to base weights that are not saved anywhere.
const UNCHANGED_BASE_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

impl PeftConfig {
    /// Parses a file's text, or returns the problem with it.
    pub fn read(text: &str) -> Result<Self, String> {
        let config: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| format!("it is not a JSON object: {e}"))?;
        let get = |key: &str| config.get(key).filter(|value| !value.is_null());
        match get("peft_type").and_then(Value::as_str) {
            Some("LORA") => (),
            Some(other) => return Err(format!("peft_type is {other}; only LORA is supported")),
            None => return Err("it has no peft_type; only LORA is supported".into()),
        }
        let is_off = |value: &Value| match value {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(_) => false,
        };
        for (key, value) in config.iter().filter(|(_, value)| !is_off(value)) {
            let value = shortened(value);
            if UNSUPPORTED_SETTINGS.contains(&key.as_str()) {
                return Err(format!("{key} is {value}, which is not supported; train the adapter without it"));
            }
            if !HANDLED_SETTINGS.contains(&key.as_str()) {
                return Err(format!(
                    "{key} is {value}, but this key is unknown: it may change what the adapter computes; remove it \
                     from the file if it does not"
                ));
            }
        }
        let saved = saved_modules(get("task_type"), get("modules_to_save").filter(|value| !is_off(value)))?;
        check_initialization(get("init_lora_weights"))?;
        if let Some(bias) = get("bias").filter(|bias| *bias != "none") {
            return Err(format!("bias is {bias}; only \"none\" is supported"));
        }
        let number = |key: &str, default: Option<f64>| match get(key).map(Value::as_f64) {
            Some(Some(number)) => Ok(number),
            Some(None) => Err(format!("{key} is {}, which is not a number", config[key])),
            None => default.ok_or_else(|| format!("it has no {key}")),
        };
        let flag = |key: &str| match get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| format!("{key} is {value}, which is neither true nor false")),
        };
        let r = match get("r").and_then(Value::as_u64).and_then(|r| usize::try_from(r).ok()) {
            Some(r) => r,
            None => {
                return Err(format!(
                    "r is {}; it must be a positive whole number",
                    config.get("r").unwrap_or(&Value::Null)
                ));
            }
        };
        let target_parameters = names("target_parameters", get("target_parameters"))?.unwrap_or_default();
        let has_parameters = !target_parameters.is_empty();
        let lora = LoraConfig {
            r,
            alpha: number("lora_alpha", None)?,
            dropout: number("lora_dropout", Some(0.0))? as f32,
            targets: targets(get("target_modules"), has_parameters)?,
            target_parameters,
            rslora: flag("use_rslora")?,
            dora: flag("use_dora")?,
        };
        lora.validate().map_err(|e| e.to_string())?;
        let is_pattern = get("target_modules").is_some_and(Value::is_string) && lora.targets != LoraTargets::AllLinear;
        let base = get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        Ok(Self { lora, base, is_pattern, saved })
    }

    /// Returns the text of a file for adapters of these projections, with the keys that all versions of PEFT since 0.10
    /// read. `is_conv1d` indicates whether their weights have shape `[in, out]`.
    pub fn write<'a>(&self, modules: impl IntoIterator<Item = &'a str>, is_conv1d: bool) -> String {
        let LoraConfig { r, alpha, dropout, ref targets, ref target_parameters, rslora, dora } = self.lora;
        let targets: BTreeSet<&str> = match targets {
            LoraTargets::Names(names) => names.iter().map(String::as_str).collect(),
            LoraTargets::AllLinear => {
                modules.into_iter().filter(|module| !is_of_experts(module)).filter_map(target_name).collect()
            }
        };
        let task = if self.saved.is_some() { CLASSIFIER_TASK } else { "CAUSAL_LM" };
        // PEFT writes an integer.
        let alpha = if alpha.fract() == 0.0 && alpha < 1e15 { json!(alpha as u64) } else { json!(alpha) };
        // The shortest decimal number with this f32 value.
        let dropout: f64 = dropout.to_string().parse().unwrap_or(f64::from(dropout));
        let config = json!({
            "alpha_pattern": {},
            "auto_mapping": null,
            "base_model_name_or_path": self.base,
            "bias": "none",
            "fan_in_fan_out": is_conv1d,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": null,
            "layers_to_transform": null,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "modules_to_save": self.saved,
            "peft_type": "LORA",
            "r": r,
            "rank_pattern": {},
            "revision": null,
            "target_modules": targets,
            "task_type": task,
            "use_dora": dora,
            "use_rslora": rslora,
        });
        // Versions of PEFT before 0.17 do not have the key `target_parameters`.
        let config = match (config, target_parameters.is_empty()) {
            (Value::Object(mut config), false) => {
                config.insert("target_parameters".into(), json!(target_parameters));
                Value::Object(config)
            }
            (config, _) => config,
        };
        format!("{config:#}\n")
    }
}

/// Returns whether a module with an adapter is the wrapper of a parameter of experts rather than a projection.
pub(super) fn is_of_experts(module: &str) -> bool {
    let module = module.strip_suffix(".base_layer").unwrap_or(module);
    module == "experts" || module.ends_with(".experts")
}

/// Returns the target that selects a module in a block: the last part of its path. If the head also has modules
/// of that name, as in BERT and RoBERTa, the target is the path within the block.
fn target_name(module: &str) -> Option<&str> {
    const NAMES_IN_HEADS: [&str; 1] = ["dense"];
    let last = module.rsplit('.').next()?;
    let mut suffixes = module.match_indices('.').map(|(at, _)| &module[at + 1..]);
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<usize>().is_ok());
    let after_number = suffixes.find(|rest| is_number(module[..module.len() - rest.len() - 1].rsplit('.').next()));
    Some(if NAMES_IN_HEADS.contains(&last) { after_number.unwrap_or(last) } else { last })
}

/// Returns the modules that are saved completely, for a classifier's adapter.
fn saved_modules(task: Option<&Value>, found: Option<&Value>) -> Result<Option<Vec<String>>, String> {
    let names = |list: &Vec<Value>| list.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    match (task.is_some_and(|task| task == CLASSIFIER_TASK), found) {
        (false, None) => Ok(None),
        (false, Some(found)) => Err(format!(
            "modules_to_save is {}, which is supported only with the task_type {CLASSIFIER_TASK}; train the adapter \
             without it",
            shortened(found)
        )),
        (true, None) => Ok(Some(CLASSIFIER_MODULES.map(str::to_owned).to_vec())),
        (true, Some(found)) => match found.as_array().and_then(names) {
            Some(names) => Ok(Some(names)),
            None => Err(format!("modules_to_save is {}; it must be a list of names", shortened(found))),
        },
    }
}

/// Refuses an adapter whose initialization changed the base's weights.
fn check_initialization(found: Option<&Value>) -> Result<(), String> {
    let is_plain = match found {
        None | Some(Value::Bool(_)) => true,
        Some(Value::String(name)) => UNCHANGED_BASE_INITS.contains(&name.to_lowercase().as_str()),
        Some(_) => false,
    };
    match found {
        Some(found) if !is_plain => Err(format!(
            "init_lora_weights is {}, which changes the base's weights before training, so the adapter fits only the \
             changed weights; the supported values are true, false, {}; save the adapter from PEFT as a plain one, with \
             model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL), where INITIAL is the adapter \
             before training",
            shortened(found),
            UNCHANGED_BASE_INITS.map(|name| format!("\"{name}\"")).join(", ")
        )),
        _ => Ok(()),
    }
}

/// Returns the names in a list.
fn names(key: &str, found: Option<&Value>) -> Result<Option<Vec<String>>, String> {
    let names = |list: &Vec<Value>| list.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    match found {
        None => Ok(None),
        Some(value) => match value.as_array().and_then(names) {
            Some(names) => Ok(Some(names)),
            None => Err(format!("{key} is {value}; it must be a list of names")),
        },
    }
}

/// Returns the projections with adapters. If parameters of experts have adapters, projections need none.
fn targets(found: Option<&Value>, has_parameters: bool) -> Result<LoraTargets, String> {
    match found {
        Some(Value::String(all)) if all == "all-linear" => Ok(LoraTargets::AllLinear),
        Some(Value::String(pattern)) => Ok(LoraTargets::Names(vec![pattern.clone()])),
        Some(Value::Array(_)) => Ok(LoraTargets::Names(names("target_modules", found)?.unwrap_or_default())),
        None if has_parameters => Ok(LoraTargets::Names(Vec::new())),
        Some(other) => Err(format!(
            "target_modules is {other}; a list of names, \"all-linear\" or a regular expression is supported"
        )),
        None => Err("it has no target_modules; a list of names is needed".into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_written_configuration_is_read_again_with_the_names_of_all_targets() {
        let lora: LoraConfig = "r=4,alpha=9,dropout=0.05,dora,targets=all-linear".parse().unwrap();
        let config = PeftConfig { lora, base: Some("dir".into()), is_pattern: false, saved: None };
        let modules = ["h.0.attn.c_proj", "h.0.attn.c_attn", "h.0.mlp.c_proj"];
        let text = config.write(modules, true);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["target_modules"], json!(["c_attn", "c_proj"]));
        assert_eq!((&value["lora_alpha"], &value["lora_dropout"]), (&json!(9), &json!(0.05)));
        assert_eq!(value["fan_in_fan_out"], true);
        let names = LoraTargets::Names(vec!["c_attn".into(), "c_proj".into()]);
        let expected = LoraConfig { targets: names, ..config.lora.clone() };
        assert_eq!(PeftConfig::read(&text).unwrap(), PeftConfig { lora: expected, ..config });
    }

    #[test]
    fn a_classifiers_configuration_names_its_head_and_no_module_of_the_head_by_accident() {
        let saved = Some(vec!["classifier".to_owned()]);
        let config = PeftConfig { lora: LoraConfig::default(), base: None, is_pattern: false, saved };
        let block = "bert.encoder.layer.11";
        let modules = ["attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"]
            .map(|module| format!("{block}.{module}"));
        let text = config.write(modules.iter().map(String::as_str), false);
        let value: Value = serde_json::from_str(&text).unwrap();
        let targets = ["attention.output.dense", "intermediate.dense", "output.dense", "query"];
        assert_eq!(value["target_modules"], json!(targets));
        assert_eq!((&value["task_type"], &value["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["classifier"])));
        assert_eq!(PeftConfig::read(&text).unwrap().saved, config.saved);
        // PEFT's own default.
        let usual =
            json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"], "task_type": "SEQ_CLS"});
        let usual = PeftConfig::read(&usual.to_string()).unwrap().saved.unwrap();
        assert_eq!(usual, ["classifier", "score"]);
    }

    #[test]
    fn of_the_starts_those_are_read_that_leave_the_base_as_it_is() {
        let read = |start: Value| {
            let config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
                "init_lora_weights": start});
            PeftConfig::read(&config.to_string())
        };
        for start in
            [json!(true), json!(false), json!(null), json!("gaussian"), json!("Gaussian"), json!("eva"), json!("mica")]
        {
            read(start).unwrap();
        }
        let refused = ["pissa", "pissa_niter_4", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga", "new", ""];
        for start in refused.map(|start| json!(start)).into_iter().chain([json!(1), json!({}), json!([])]) {
            assert!(read(start.clone()).unwrap_err().starts_with("init_lora_weights is "), "{start}");
        }
    }

    #[test]
    fn keys_that_peft_writes_without_effect_are_read() {
        let config = r#"{"task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": {"unsloth_fixed": true},
            "peft_version": "0.21.2", "base_model_name_or_path": null, "revision": "main", "inference_mode": true, "r": 8,
            "target_modules": ["q"], "exclude_modules": null, "lora_alpha": 8, "lora_dropout": 0.0, "fan_in_fan_out": true,
            "bias": "none", "use_rslora": false, "modules_to_save": [], "init_lora_weights": true,
            "layers_to_transform": null, "layers_pattern": null, "rank_pattern": {}, "alpha_pattern": {},
            "megatron_config": null, "megatron_core": "megatron.core", "trainable_token_indices": null,
            "loftq_config": {}, "eva_config": {"rho": 2.0}, "corda_config": null, "lora_ga_config": null,
            "use_dora": false, "velora_config": null, "alora_invocation_tokens": null, "use_qalora": false,
            "qalora_group_size": 16, "monteclora_config": null, "layer_replication": null, "lora_bias": false,
            "target_parameters": null, "use_bdlora": null, "arrow_config": null, "kasa_config": null,
            "ensure_weight_tying": true, "of_a_later_version": null, "and_another": false}"#;
        PeftConfig::read(config).unwrap();
    }

    #[test]
    fn configurations_that_cannot_be_computed_with_are_refused() {
        let text = |more: Value| {
            let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
            for (key, value) in more.as_object().unwrap() {
                config[key] = value.clone();
            }
            PeftConfig::read(&config.to_string()).unwrap_err()
        };
        insta::assert_snapshot!(PeftConfig::read("[1]").unwrap_err(), @"it is not a JSON object: invalid type: sequence, expected a map at line 1 column 0");
        insta::assert_snapshot!(PeftConfig::read("{}").unwrap_err(), @"it has no peft_type; only LORA is supported");
        insta::assert_snapshot!(text(json!({"peft_type": "IA3"})), @"peft_type is IA3; only LORA is supported");
        insta::assert_snapshot!(text(json!({"r": -1})), @"r is -1; it must be a positive whole number");
        insta::assert_snapshot!(text(json!({"r": 0})), @"LoRA settings: r is 0, but must be from 1 to 1048576");
        insta::assert_snapshot!(text(json!({"lora_alpha": null})), @"it has no lora_alpha");
        insta::assert_snapshot!(text(json!({"bias": "all"})), @r#"bias is "all"; only "none" is supported"#);
        insta::assert_snapshot!(text(json!({"modules_to_save": ["lm_head"]})), @r#"modules_to_save is ["lm_head"], which is supported only with the task_type SEQ_CLS; train the adapter without it"#);
        insta::assert_snapshot!(text(json!({"modules_to_save": [1], "task_type": "SEQ_CLS"})), @"modules_to_save is [1]; it must be a list of names");
        insta::assert_snapshot!(text(json!({"init_lora_weights": "pissa_niter_16"})), @r#"init_lora_weights is "pissa_niter_16", which changes the base's weights before training, so the adapter fits only the changed weights; the supported values are true, false, "gaussian", "eva", "orthogonal", "mica"; save the adapter from PEFT as a plain one, with model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL), where INITIAL is the adapter before training"#);
        insta::assert_snapshot!(text(json!({"use_new_thing": 2})), @"use_new_thing is 2, but this key is unknown: it may change what the adapter computes; remove it from the file if it does not");
        insta::assert_snapshot!(text(json!({"layers_to_transform": 0})), @"layers_to_transform is 0, which is not supported; train the adapter without it");
        insta::assert_snapshot!(text(json!({"lora_alpha": 1e308})), @"LoRA settings: alpha is 1e308, but must be a number that is positive and finite in f32");
        insta::assert_snapshot!(text(json!({"lora_alpha": 1e-300})), @"LoRA settings: alpha is 1e-300, but must be a number that is positive and finite in f32");
        insta::assert_snapshot!(text(json!({"target_modules": 3})), @r#"target_modules is 3; a list of names, "all-linear" or a regular expression is supported"#);
        insta::assert_snapshot!(text(json!({"use_dora": 1})), @"use_dora is 1, which is neither true nor false");
    }
}
