//! Maps flags of other trainers (Transformers' Trainer, TRL, axolotl, unsloth, LLaMA-Factory) to those of `zerorun
//! finetune`.

use clap::error::{ContextKind, ContextValue};
use clap::{Error, error::ErrorKind};

/// The flags of other trainers, each with its replacement in `zerorun finetune` or the reason why there is none.
const FLAG_REPLACEMENTS: &[(&[&str], &str)] = &[
    (&["num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch"], "--epochs E"),
    (&["max_steps", "max_train_steps", "num_steps", "iters"], "--steps N"),
    (&["learning_rate"], "--lr RATE"),
    (
        &["per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "device_batch_size"],
        "--micro_batch ROWS, the number of rows that a rank processes at a time (--batch sets the number per step)",
    ),
    (&["per_device_eval_batch_size", "eval_batch_size"], "--micro_batch ROWS, which validation uses too"),
    (
        &["gradient_accumulation_steps", "gradient_accumulation"],
        "--batch ROWS, the number of rows per step: micro batch x accumulation steps x ranks",
    ),
    (&["batch_size", "train_batch_size", "global_batch_size", "total_batch_size"], "--batch ROWS"),
    (
        &["model", "model_name", "model_name_or_path", "base_model", "pretrained_model_name_or_path", "model_path"],
        "the model as the first argument, without a flag: zerorun finetune MODEL --data FILE --out DIR",
    ),
    (&["output_dir", "output", "save_dir", "output_path", "adapter_path"], "--out DIR"),
    (
        &[
            "dataset",
            "datasets",
            "dataset_name",
            "dataset_path",
            "dataset_dir",
            "train_file",
            "train_data",
            "data_path",
        ],
        "--data FILE...",
    ),
    (
        &["validation_file", "eval_dataset", "eval_file", "val_data", "val_size", "val_set_size", "test_size"],
        "--val FILE..., or --val 5% for a part of the training data",
    ),
    (&["validation_split_percentage", "validation_split"], "--val 5% for a part of the training data"),
    (
        &[
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "seq_len",
            "sequence_len",
            "cutoff_len",
            "model_max_length",
            "block_size",
            "context_length",
            "seq_length",
        ],
        "--ctx TOKENS",
    ),
    (&["lr_scheduler", "lr_scheduler_type", "lr_scheduler_kwargs"], "--scheduler cosine, linear or constant"),
    (&["warmup_steps"], "--warmup N"),
    (&["warmup_ratio"], "--warmup 3% for a percentage of all steps"),
    (&["lora_r", "lora_rank", "rank", "r"], "--lora r=16"),
    (&["lora_alpha", "alpha"], "--lora r=16,alpha=32"),
    (&["lora_dropout", "dropout"], "--lora dropout=0.05"),
    (
        &["lora_target", "lora_target_modules", "target_modules", "lora_modules", "lora_target_linear"],
        "--lora targets=q_proj+v_proj, or targets=all-linear, which is the default",
    ),
    (
        &["lora_target_parameters", "target_parameters"],
        "--lora target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj",
    ),
    (&["use_rslora", "peft_use_rslora", "rslora"], "--lora rslora"),
    (&["use_dora", "peft_use_dora", "dora"], "--lora dora"),
    (&["use_peft", "use_lora", "finetuning_type", "train_type"], "--lora SETTINGS (the default), --qlora or --full"),
    (
        &["load_in_4bit", "quantization_bit", "load_in_8bit", "quantization"],
        "--qlora, which packs the base into 4 bits",
    ),
    (&["full_finetuning", "full_finetune"], "--full"),
    (&["bf16", "bfloat16"], "--dtype bf16"),
    (&["fp16", "float16", "half"], "--dtype fp16"),
    (&["torch_dtype", "precision", "mixed_precision"], "--dtype f32, bf16 or fp16"),
    (&["gradient_checkpointing", "use_gradient_checkpointing", "checkpoint_activations"], "--activation_checkpointing"),
    (&["save_steps", "save_interval", "checkpoint_every"], "--save DIR --save_every N"),
    (&["save_total_limit", "keep_last"], "--save DIR --keep K"),
    (
        &["resume_from_checkpoint", "auto_resume_from_checkpoints", "resume_from"],
        "--save DIR --resume, which resumes from the newest checkpoint in DIR",
    ),
    (&["eval_steps", "eval_interval", "evals_per_epoch"], "--eval_every N"),
    (&["early_stopping_patience", "early_stopping"], "--patience N"),
    (&["deepspeed", "deepspeed_config_file"], "--ds_config FILE"),
    (
        &[
            "optim",
            "optimizer",
            "weight_decay",
            "max_grad_norm",
            "gradient_clipping",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
        ],
        "--ds_config FILE, with the section optimizer or the key gradient_clipping of DeepSpeed's JSON",
    ),
    (&["sample_packing", "pack", "neat_packing", "pad_to_sequence_len"], "--packing true or false"),
    (&["data_seed", "random_seed", "random_state"], "--seed N"),
    (&["shuffle", "disable_shuffling", "shuffle_data"], "--order shuffled or sequential"),
    (&["beta", "dpo_beta", "pref_beta", "rl", "loss_type", "rlhf_type"], "--dpo beta=0.1"),
    (&["logging_dir", "report_to", "log_file"], "--metrics FILE.jsonl, which has a line for each step"),
    (&["run_name"], "--run NAME"),
    (
        &["logging_steps", "logging_strategy"],
        "there is no such flag: every step is reported, and --metrics FILE.jsonl writes each report to a file",
    ),
    (&["test_prompt", "sample_prompt"], "--prompt TEXT"),
    (&["max_new_tokens"], "--max_tokens N"),
    (
        &[
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "pp_size",
            "pp",
            "num_stages",
            "pipe_parallel_size",
        ],
        "--pipeline RANKS",
    ),
    (&["nproc_per_node", "num_processes", "num_workers_per_node", "n_gpus", "gpus"], "-n N, the number of ranks"),
    (
        &["train_on_inputs", "train_on_input", "completion_only_loss", "assistant_only_loss"],
        "there is no such flag: the model is trained on the assistant's messages, or on all of the text in plain-text \
         files",
    ),
    (
        &["chat_template", "template", "prompt_template"],
        "there is no such flag: the model's own chat template is used; edit its chat_template.jinja to change it",
    ),
    (
        &["push_to_hub", "hub_model_id", "hub_token", "token", "hf_token"],
        "there is no such flag: the result stays on this machine; a token to fetch models is read from HF_TOKEN",
    ),
    (
        &["group_by_length", "length_group"],
        "there is no such flag: samples are packed into rows, so there is little padding",
    ),
    (
        &["overwrite_output_dir", "overwrite", "force"],
        "there is no such flag: an existing folder is never overwritten; give a different --out, or remove the folder",
    ),
];

/// Adds the replacement, or the reason why there is none, to the error about an unknown flag that another trainer has.
pub(super) fn explain(mut error: Error) -> Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidArg) else { return error };
    let Some(replacement) = replacement_for(found) else { return error };
    let tip = if replacement.starts_with("there is") { replacement.to_owned() } else { format!("write {replacement}") };
    // Clap's own suggestion would be misleading.
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::TrailingArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

/// Returns the replacement for a flag of another trainer.
fn replacement_for(flag: &str) -> Option<&'static str> {
    let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default().replace('-', "_").to_lowercase();
    FLAG_REPLACEMENTS.iter().find(|(names, _)| names.contains(&name.as_str())).map(|(_, replacement)| *replacement)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::FinetuneArguments;
    use super::*;
    use clap::{CommandFactory as _, Parser as _};
    use std::collections::BTreeSet;

    fn message(flag: &str) -> String {
        let words = ["finetune", "MODEL", "--data", "a.jsonl", "--out", "o", flag, "1"];
        let error = explain(FinetuneArguments::try_parse_from(words).unwrap_err());
        error.to_string().lines().take(3).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn a_flag_of_another_trainer_is_refused_with_its_name_here() {
        insta::assert_snapshot!(message("--num_train_epochs"), @"error: unexpected argument '--num_train_epochs' found||  tip: write --epochs E");
        insta::assert_snapshot!(message("--learning-rate=2e-5"), @"error: unexpected argument '--learning-rate' found||  tip: write --lr RATE");
        insta::assert_snapshot!(message("--model"), @"error: unexpected argument '--model' found||  tip: write the model as the first argument, without a flag: zerorun finetune MODEL --data FILE --out DIR");
        insta::assert_snapshot!(message("--epoch"), @"error: unexpected argument '--epoch' found||  tip: write --epochs E");
        insta::assert_snapshot!(message("--template"), @"error: unexpected argument '--template' found||  tip: there is no such flag: the model's own chat template is used; edit its chat_template.jinja to change it");
    }

    #[test]
    fn a_misspelt_flag_keeps_the_nearest_one_as_its_tip() {
        insta::assert_snapshot!(message("--sed"), @"error: unexpected argument '--sed' found||  tip: a similar argument exists: '--seed'");
    }

    #[test]
    fn each_name_stands_once_is_not_one_of_ours_and_leads_to_flags_that_exist() {
        let command = FinetuneArguments::command();
        let our_flags: BTreeSet<String> = command
            .get_arguments()
            .flat_map(|argument| {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                argument.get_long().into_iter().chain(aliases).map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        let mut seen = BTreeSet::new();
        for (names, replacement) in FLAG_REPLACEMENTS {
            for name in *names {
                assert!(seen.insert(*name), "{name} occurs twice");
                assert!(!our_flags.contains(*name), "--{name} is a flag of ours");
            }
            let flags = replacement.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'));
            for flag in flags.filter_map(|word| word.strip_prefix("--")) {
                assert!(our_flags.contains(flag), "{replacement}: no flag --{flag} exists");
            }
        }
    }
}
