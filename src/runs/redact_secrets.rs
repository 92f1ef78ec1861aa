//! Keeps secrets out of records: passwords and tokens in arguments, configurations and messages.

use serde_json::Value;

/// The text that replaces a secret.
const HIDDEN: &str = "***";

/// The words that name a secret, as parts of the names of flags and keys.
const SECRET_WORDS: [&str; 13] = [
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "credential",
    "credentials",
    "apikey",
    "authorization",
    "auth",
    "bearer",
    "signature",
];
/// The words that make a following `key` a secret.
const KEY_WORDS: [&str; 5] = ["api", "access", "secret", "private", "encryption"];
/// The prefixes of well-known tokens, which are followed by at least 16 letters and digits.
const TOKEN_PREFIXES: [&str; 16] = [
    "hf_",
    "sk-",
    "sk_",
    "pk_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "AKIA",
    "ASIA",
    "eyJ",
    "ya29.",
];
const MIN_TOKEN_TAIL: usize = 16;

/// Returns whether a flag or key with this name has a secret as its value. A token count, such as
/// `max_tokens`, is not a secret.
fn names_secret(name: &str) -> bool {
    let mut words: Vec<String> = vec![String::new()];
    let mut was_lower = false;
    for letter in name.chars() {
        if !letter.is_alphanumeric() || letter.is_uppercase() && was_lower {
            words.push(String::new());
        }
        was_lower = letter.is_lowercase();
        if letter.is_alphanumeric() {
            words.last_mut().map(|word| word.extend(letter.to_lowercase())).unwrap_or_default();
        }
    }
    words.retain(|word| !word.is_empty());
    let is_key = |pair: &[String]| KEY_WORDS.contains(&pair[0].as_str()) && ["key", "keys"].contains(&pair[1].as_str());
    // `eos_token` and `token_type` are settings of models.
    let model_words = ["eos", "bos", "pad", "unk", "sep", "cls", "mask", "id", "ids", "type"];
    let is_model_setting = words.iter().any(|word| model_words.contains(&word.as_str()));
    words.iter().any(|word| SECRET_WORDS.contains(&word.as_str()) && !(is_model_setting && word == "token"))
        || words.windows(2).any(is_key)
}

/// Returns a text in which secrets are replaced: well-known tokens, passwords in addresses, and the values of secrets
/// in `name=value` and `Bearer value`.
pub(super) fn without_secrets(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let is_boundary = |letter: char| !(letter.is_ascii_alphanumeric() || "_-.+%~".contains(letter));
    // Words end at quotes, spaces and the separators of addresses.
    for word in text.split_inclusive(is_boundary) {
        let tail = word.chars().next_back().filter(|letter| is_boundary(*letter));
        let body = &word[..word.len() - tail.map_or(0, char::len_utf8)];
        let is_token = TOKEN_PREFIXES.iter().any(|prefix| {
            body.strip_prefix(prefix).is_some_and(|rest| {
                rest.len() >= MIN_TOKEN_TAIL && rest.bytes().filter(u8::is_ascii_alphanumeric).count() >= MIN_TOKEN_TAIL
            })
        });
        out.push_str(if is_token { HIDDEN } else { body });
        out.extend(tail);
    }
    without_queries(&without_passwords(&out))
}

/// Replaces the password, or the token in its place, of each `scheme://user:password@host`.
fn without_passwords(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (head, tail) = rest.split_at(at + 3);
        out.push_str(head);
        let end = tail.find(|c: char| "/?# \"'".contains(c) || c.is_whitespace()).unwrap_or(tail.len());
        let authority = &tail[..end];
        match authority.rsplit_once('@') {
            Some((user, host)) => {
                out.push_str(user.split_once(':').map_or("", |(user, _)| user));
                out.push_str(if user.contains(':') { ":***@" } else { "***@" });
                out.push_str(host);
            }
            None => out.push_str(authority),
        }
        rest = &tail[end..];
    }
    out.push_str(rest);
    out
}

/// Replaces the value of each secret in `name=value`, as in the query of an address, and in `Bearer value`.
fn without_queries(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let is_separator = |c: char| "&;, \"'?".contains(c) || c.is_whitespace();
    let mut follows_bearer = false;
    for field in text.split_inclusive(is_separator) {
        let tail = field.chars().next_back().filter(|letter| is_separator(*letter));
        let body = &field[..field.len() - tail.map_or(0, char::len_utf8)];
        match body.split_once('=') {
            Some((name, value)) if names_secret(name) && !value.is_empty() => {
                out.push_str(name);
                out.push('=');
                out.push_str(HIDDEN);
            }
            _ if follows_bearer && !body.is_empty() => out.push_str(HIDDEN),
            _ => out.push_str(body),
        }
        follows_bearer = body.eq_ignore_ascii_case("bearer") || follows_bearer && body.is_empty();
        out.extend(tail);
    }
    out
}

/// Returns a command line in which secrets are replaced: the values of flags that name a secret, and the secrets that
/// [`without_secrets`] finds.
pub(super) fn command_without_secrets(words: &[String]) -> Vec<String> {
    let mut hides_next = false;
    let is_name = |name: &str| name.chars().all(|letter| letter.is_alphanumeric() || "-_.".contains(letter));
    let hide = |word: &String| {
        // A flag without a value may be followed by another flag.
        if std::mem::take(&mut hides_next) && !word.starts_with("--") {
            return HIDDEN.to_owned();
        }
        if word.starts_with('-') && !word.contains('=') {
            hides_next = names_secret(word);
        }
        match word.split_once('=') {
            Some((name, _)) if is_name(name) && names_secret(name) => format!("{name}={HIDDEN}"),
            _ => without_secrets(word),
        }
    };
    words.iter().map(hide).collect()
}

/// Returns a tree of settings without secrets.
pub(crate) fn settings_without_secrets(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(without_secrets(&text)),
        Value::Array(items) => items.into_iter().map(settings_without_secrets).collect(),
        Value::Object(entries) => entries
            .into_iter()
            .map(|(key, value)| match value {
                Value::String(text) if names_secret(&key) && !text.is_empty() => (key, HIDDEN.into()),
                value => (key, settings_without_secrets(value)),
            })
            .collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn command(text: &str) -> String {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        command_without_secrets(&words).join(" ")
    }

    #[test]
    fn secrets_in_a_command_are_hidden_and_nothing_else() {
        for (input, expected) in [
            ("train --token abc --lr 1", "train --token *** --lr 1"),
            ("train --hf-token=abc", "train --hf-token=***"),
            ("train --apiKey abc -p x", "train --apiKey *** -p x"),
            ("train --api_key abc", "train --api_key ***"),
            ("train --wandb_api_key=abc", "train --wandb_api_key=***"),
            ("WANDB_API_KEY=abc train", "WANDB_API_KEY=*** train"),
            ("train --password --verbose", "train --password --verbose"),
            ("train --password -x1", "train --password ***"),
            ("train hf_abcdefghijklmnopqrst", "train ***"),
            ("train x=hf_abcdefghijklmnopqrst", "train x=***"),
            ("train https://me:pass@host/x?a=1", "train https://me:***@host/x?a=1"),
            ("train https://tokentoken@host/x", "train https://***@host/x"),
            ("train s3://b/x?X-Amz-Signature=ab&y=1", "train s3://b/x?X-Amz-Signature=***&y=1"),
            ("train --max_tokens 64 --tokenizer t", "train --max_tokens 64 --tokenizer t"),
            ("train --eos_token </s> --key_column k", "train --eos_token </s> --key_column k"),
            ("train --data a.jsonl:2 sk-short", "train --data a.jsonl:2 sk-short"),
            ("train user@host.org", "train user@host.org"),
        ] {
            assert_eq!(command(input), expected);
        }
    }

    #[test]
    fn secrets_in_settings_and_messages_are_hidden() {
        let settings =
            json!({"comet": {"api_key": "abc", "project": "p"}, "url": "http://u:p@h", "token": null, "tokens": 3});
        assert_eq!(
            settings_without_secrets(settings),
            json!({"comet": {"api_key": "***", "project": "p"}, "url": "http://u:***@h", "token": null, "tokens": 3})
        );
        let message = "cannot load \"ghp_0123456789abcdefghij\": Authorization: Bearer abc, then";
        assert_eq!(without_secrets(message), "cannot load \"***\": Authorization: Bearer ***, then");
        assert_eq!(without_secrets("ünï — 1:2://"), "ünï — 1:2://");
    }
}
