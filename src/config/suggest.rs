//! Suggests the key that an unknown key was probably meant to be.

use super::ConfigRule;
use super::keys::{ConfigSection, ConfigValueKind, sections};

/// The minimum similarity of two names, from 0 to 1, at which one is suggested for the other.
const MIN_SIMILARITY: f64 = 0.5;
/// The minimum for a key in another section. There are many such keys, so accidental similarity is more probable.
const MIN_SIMILARITY_ACROSS_SECTIONS: f64 = 0.8;

/// Names longer than this resemble no key and are not compared, because comparing very long names takes seconds.
const MAX_COMPARED_CHARS: usize = 100;

/// Names that PyTorch, Transformers and Lightning use for DeepSpeed's keys.
const OTHER_NAMES: [(&str, &str); 16] = [
    ("learning_rate", "lr"),
    ("epsilon", "eps"),
    ("adam_epsilon", "eps"),
    ("beta1", "betas"),
    ("beta2", "betas"),
    ("adam_beta1", "betas"),
    ("adam_beta2", "betas"),
    ("wd", "weight_decay"),
    ("warmup_steps", "warmup_num_steps"),
    ("num_warmup_steps", "warmup_num_steps"),
    ("max_steps", "total_num_steps"),
    ("num_training_steps", "total_num_steps"),
    ("max_grad_norm", "gradient_clipping"),
    ("clip_grad_norm", "gradient_clipping"),
    ("accumulate_grad_batches", "gradient_accumulation_steps"),
    ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
];

/// Keys of other schedules that WarmupCosineLR does not have, and what to do instead. The rates of WarmupCosineLR are
/// fractions of the optimizer's rate.
const RATES_OF_OTHER_SCHEDULES: [(&str, &str); 2] = [
    (
        "warmup_max_lr",
        "warms up to the optimizer's own rate; set `optimizer.params.lr` to this value and remove the key",
    ),
    (
        "warmup_min_lr",
        "starts at a share of `optimizer.params.lr`; set that share as `scheduler.params.warmup_min_ratio` instead",
    ),
];

/// Returns the message about a key that its section does not have.
pub(crate) fn advice(section: &ConfigSection, name: &str) -> (ConfigRule, String) {
    let location = if section.path.is_empty() { "at the top level".into() } else { format!("of `{}`", section.path) };
    if name.len() > MAX_COMPARED_CHARS {
        return (ConfigRule::UnknownKey, format!("not a key {location}, and no name is similar; remove it"));
    }
    let rate_hint = RATES_OF_OTHER_SCHEDULES.iter().find(|(other, _)| *other == name);
    if let (Some((_, hint)), true) = (rate_hint, section.key("cos_min_ratio").is_some()) {
        return (ConfigRule::UnknownKey, format!("not a key {location}: WarmupCosineLR {hint}"));
    }
    if let Some((_, key)) = OTHER_NAMES.iter().find(|(other, _)| other.eq_ignore_ascii_case(name)) {
        let home = if section.key(key).is_some() { Some(section) } else { sections().find(|s| s.key(key).is_some()) };
        if let Some(home) = home {
            return (ConfigRule::UnknownKey, format!("not a key {location}; did you mean `{}`?", home.join(key)));
        }
    }
    if section.path.rsplit('.').next() == Some(name) && section.key("enabled").is_some() {
        return (ConfigRule::UnknownKey, format!("not a key {location}; did you mean `{}`?", section.join("enabled")));
    }
    if let Some(home) = in_other_sections(section, name).find(|(_, _, score)| *score == 1.0) {
        let home = home.0.join(home.1);
        return (ConfigRule::MisplacedKey, format!("not a key {location}: it belongs at `{home}`; move it there"));
    }
    let candidates =
        names(section).map(|key| (section, key, similarity(name, key))).filter(|found| found.2 >= MIN_SIMILARITY);
    let other_candidates = in_other_sections(section, name).filter(|found| found.2 >= MIN_SIMILARITY_ACROSS_SECTIONS);
    let nearest = best(candidates).or_else(|| best(other_candidates));
    let text = match nearest {
        Some((section, key, _)) => format!("not a key {location}; did you mean `{}`?", section.join(key)),
        None if section.path.is_empty() => {
            format!(
                "not a key {location}, and no name is similar; remove it, or start its name with `_` if it is a comment"
            )
        }
        None => format!("not a key {location}, and no name is similar; remove it"),
    };
    (ConfigRule::UnknownKey, text)
}

fn best<'a>(
    candidates: impl Iterator<Item = (&'a ConfigSection, &'a str, f64)>,
) -> Option<(&'a ConfigSection, &'a str, f64)> {
    // Of equally similar names, the first wins: the table of keys lists the important ones first.
    candidates.reduce(|best, next| if next.2 > best.2 { next } else { best })
}

/// Returns the keys of all other sections with their similarity. Sections that are not checked contribute none.
fn in_other_sections<'a>(
    current: &'a ConfigSection,
    name: &'a str,
) -> impl Iterator<Item = (&'a ConfigSection, &'a str, f64)> {
    sections()
        .filter(|section| section.path != current.path && section.checked)
        .flat_map(|section| names(section).map(move |key| (section, key)))
        .map(move |(section, key)| (section, key, similarity(name, key)))
}

/// Returns the names of a section's keys, without those that should not be suggested.
fn names(section: &ConfigSection) -> impl Iterator<Item = &'static str> {
    section
        .keys
        .iter()
        .filter(|key| key.default != super::keys::NO_DEFAULT || key.kind == ConfigValueKind::Str)
        .flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()))
}

/// The minimum length of a word that counts; shorter words (`size`, `data`) are too common.
const MIN_DISTINCTIVE_CHARS: usize = 5;

/// Returns the larger of the similarity by edit distance and the share of common words (`monitor_config`,
/// `csv_monitor`).
fn similarity(a: &str, b: &str) -> f64 {
    let words = |s: &str| s.split(['_', '-']).map(str::to_ascii_lowercase).collect::<Vec<_>>();
    let (of_a, of_b) = (words(a), words(b));
    let common = of_a.iter().filter(|word| word.len() >= MIN_DISTINCTIVE_CHARS && of_b.contains(word)).count();
    let words = 2.0 * common as f64 / (of_a.len() + of_b.len()) as f64;
    let letters = strsim::normalized_damerau_levenshtein(&a.to_ascii_lowercase(), &b.to_ascii_lowercase());
    // Common words are never enough to make two names equal.
    if a == b { 1.0 } else { letters.max(words).min(0.99) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::keys::section;

    #[test]
    fn a_very_long_name_is_not_compared() {
        let name = "train_batch_size".repeat(10_000);
        let start = std::time::Instant::now();
        assert!(advice(section(""), &name).1.contains("no name is similar"));
        assert!(start.elapsed() < std::time::Duration::from_secs(1));
    }

    #[test]
    fn the_nearest_key_of_the_section_is_named_first() {
        for (path, name, suggestion) in [
            ("", "gradient_cliping", "`gradient_clipping`"),
            ("", "comms_config", "`comms_logger`"),
            ("", "monitor_config", "`csv_monitor`"),
            ("", "train_batch", "`train_batch_size`"),
            ("", "max_grad_norm", "`gradient_clipping`"),
            ("optimizer", "learning_rate", "`optimizer.params.lr`"),
            ("optimizer.params", "learning_rate", "`optimizer.params.lr`"),
            ("fp16", "enable", "`fp16.enabled`"),
            ("fp16", "fp16", "`fp16.enabled`"),
            ("zero_optimization", "reduce_bukcet_size", "`zero_optimization.reduce_bucket_size`"),
            (
                "zero_optimization",
                "stage3_param_persitance_threshold",
                "`zero_optimization.stage3_param_persistence_threshold`",
            ),
        ] {
            let table = sections().find(|section| section.path == path).unwrap();
            let (rule, text) = advice(table, name);
            assert_eq!(rule, ConfigRule::UnknownKey, "{name}");
            assert!(text.contains(suggestion), "{name}: {text}");
        }
    }

    #[test]
    fn rates_of_other_schedules_are_explained_for_the_cosine() {
        let table = sections().find(|section| section.key("cos_min_ratio").is_some()).unwrap();
        let (rule, text) = advice(table, "warmup_max_lr");
        assert_eq!(rule, ConfigRule::UnknownKey);
        assert!(text.contains("set `optimizer.params.lr` to this value"), "{text}");
        assert!(advice(table, "warmup_min_lr").1.contains("`scheduler.params.warmup_min_ratio`"));
    }

    #[test]
    fn a_key_of_another_section_is_sent_home() {
        for (path, name, home) in [
            ("", "offload_optimizer", "`zero_optimization.offload_optimizer`"),
            ("zero_optimization", "aio", "`aio`"),
            ("bf16", "loss_scale", "`fp16.loss_scale`"),
            ("", "stage", "`zero_optimization.stage`"),
            ("", "lr", "`optimizer.params.lr`"),
        ] {
            let (rule, text) = advice(section(path), name);
            assert_eq!(rule, ConfigRule::MisplacedKey, "{name}");
            assert!(text.contains(home), "{name}: {text}");
        }
    }

    #[test]
    fn a_stranger_is_not_forced_on_any_key() {
        let (rule, text) = advice(section(""), "cuda_visible_devices");
        assert_eq!(rule, ConfigRule::UnknownKey);
        assert!(text.contains("no name is similar"), "{text}");
    }
}
