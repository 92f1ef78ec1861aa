//! Builds the scores of SentencePiece's pieces from the merges of a tokenizer.json with BPE and byte fallback.
//!
//! llama.cpp merges any two neighbours whose combined text is a piece, beginning with the piece that has the highest
//! score. A tokenizer.json has a list of merges instead, of which the earliest possible one is applied first.
//! Transformers builds that list from the scores of the pieces: for each piece, all pairs of pieces that it consists
//! of.

use super::tokenizer_import::{BYTE, NORMAL, SPACE, UNKNOWN, USER_DEFINED};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The tokens of a tokenizer: their texts and types, by their ids.
pub(super) type Tokens<'a> = BTreeMap<usize, (&'a str, i32)>;

/// The maximum number of merges: scores are in f32, which represents every whole number up to this one.
const MAX_MERGES: usize = 1 << 24;

/// Returns whether the model of a tokenizer.json is that of SentencePiece: BPE whose unknown characters become bytes.
pub(super) fn is_sentence_piece(model: &Json) -> bool {
    model["byte_fallback"] == true
}

/// Returns whether texts begin with an additional space, or why llama.cpp cannot prepare texts as this tokenizer does.
pub(super) fn adds_space(tokenizer: &Json) -> Result<bool, String> {
    let (normalizer, pre_tokenizer) = (&tokenizer["normalizer"], &tokenizer["pre_tokenizer"]);
    let steps: Vec<&Json> = match normalizer["type"].as_str() {
        None => Vec::new(),
        Some("Sequence") => normalizer["normalizers"].as_array().into_iter().flatten().collect(),
        Some(_) => vec![normalizer],
    };
    let is_prefix = |step: &Json| step["type"] == "Prepend" && step["prepend"] == SPACE;
    let is_replacement = |step: &Json| {
        step["type"] == "Replace" && step["pattern"] == json!({"String": " "}) && step["content"] == SPACE
    };
    // After the replacement, there are no spaces to split at.
    let is_without_effect = pre_tokenizer.is_null()
        || (pre_tokenizer["type"] == "Split" && pre_tokenizer["pattern"] == json!({"String": " "}));
    match &steps[..] {
        [] if pre_tokenizer["type"] == "Metaspace"
            && pre_tokenizer["replacement"] == SPACE
            && pre_tokenizer["split"] == false =>
        {
            match pre_tokenizer["prepend_scheme"].as_str() {
                Some("always" | "first") => Ok(true),
                Some("never") => Ok(false),
                _ => Ok(pre_tokenizer["add_prefix_space"] != false),
            }
        }
        [only] if is_replacement(only) && is_without_effect => Ok(false),
        [first, second] if is_prefix(first) && is_replacement(second) && is_without_effect => Ok(true),
        _ => Err(format!(
            "it prepares text with normalizer {normalizer} and pre-tokenizer {pre_tokenizer}; llama.cpp's \
             SentencePiece only replaces spaces with {SPACE:?}, with or without one more at the beginning; write a Hugging Face \
             folder and convert it with llama.cpp"
        )),
    }
}

/// Changes the types of the byte tokens and of the unknown token `unknown`.
///
/// # Errors
/// A byte without a token.
pub(super) fn set_types(tokens: &mut Tokens<'_>, unknown: Option<&str>) -> Result<(), String> {
    let mut bytes = HashSet::new();
    for (text, kind) in tokens.values_mut() {
        if Some(*text) == unknown {
            *kind = UNKNOWN;
        } else if let Some(byte) = byte_of(text).filter(|_| *kind == NORMAL) {
            *kind = BYTE;
            bytes.insert(byte);
        }
    }
    match (0..=u8::MAX).find(|byte| !bytes.contains(byte)) {
        Some(byte) => Err(format!(
            "it has no token <0x{byte:02X}>, but llama.cpp's SentencePiece needs a token for each of the 256 bytes"
        )),
        None => Ok(()),
    }
}

/// Returns the byte that a token such as `<0x0A>` stands for.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let are_two = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    are_two.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Returns the score of each of the `rows` tokens: minus the position of the first merge into the piece. A normal
/// piece without merges has a lower score than any piece with merges. Other tokens without merges have a score of 0.
///
/// # Errors
/// Merges that yield no token, or that llama.cpp would not apply in the same order; pairs that only llama.cpp would
/// merge; too many merges.
pub(super) fn scores(tokens: &Tokens<'_>, merges: &[(&str, &str)], rows: usize) -> Result<Vec<f32>, String> {
    const REASON: &str = "llama.cpp's SentencePiece derives merges from one score per token; write a Hugging Face \
                          folder and convert it with llama.cpp";
    if merges.len() > MAX_MERGES {
        return Err(format!("it has {} merges, but must have at most {MAX_MERGES}", merges.len()));
    }
    let is_piece = |kind: i32| kind == NORMAL || kind == USER_DEFINED;
    let pieces = tokens.iter().filter(|(_, (_, kind))| is_piece(*kind));
    let ids: HashMap<&str, (usize, i32)> = pieces.map(|(id, (text, kind))| (*text, (*id, *kind))).collect();
    let mut ranks: HashMap<usize, usize> = HashMap::new();
    let mut merged_pairs: HashSet<(&str, &str)> = HashSet::new();
    let mut last = None;
    for (rank, (a, b)) in merges.iter().enumerate() {
        let text = format!("{a}{b}");
        let Some((id, kind)) = ids.get(text.as_str()).copied() else {
            return Err(format!("its merge of {a:?} and {b:?} yields no token"));
        };
        // Tokens that match their text wherever it occurs are never merged.
        if kind == NORMAL {
            if ranks.contains_key(&id) && last != Some(id) {
                return Err(format!("its merges into {text:?} do not follow one another, but {REASON}"));
            }
            merged_pairs.insert((a, b));
            last = Some(id);
        }
        ranks.entry(id).or_insert(rank);
    }
    for (text, (_, kind)) in &ids {
        let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let mut parts = parts.filter(|(a, b)| *kind == NORMAL && ids.contains_key(a) && ids.contains_key(b));
        if let Some((a, b)) = parts.find(|pair| !merged_pairs.contains(pair)) {
            return Err(format!("it does not merge {a:?} and {b:?} into {text:?}, but {REASON}"));
        }
    }
    let score = |id: usize| match (tokens.get(&id), ranks.get(&id)) {
        (_, Some(rank)) => -(*rank as f32),
        (Some((_, NORMAL)), None) => -(merges.len() as f32),
        _ => 0.0,
    };
    Ok((0..rows).map(score).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tokens(pieces: &[&'static str]) -> Tokens<'static> {
        pieces.iter().enumerate().map(|(id, text)| (id, (*text, NORMAL))).collect()
    }

    #[test]
    fn scores_fall_with_the_position_of_the_first_merge() {
        let tokens = tokens(&["a", "b", "ab", "abb", "bb"]);
        let merges = [("a", "b"), ("b", "b"), ("ab", "b"), ("a", "bb")];
        assert_eq!(scores(&tokens, &merges, 6).unwrap(), [-4.0, -4.0, 0.0, -2.0, -1.0, 0.0]);
    }

    #[test]
    fn merges_that_scores_cannot_describe_are_refused() {
        let tokens = tokens(&["a", "b", "ab", "abb", "bb"]);
        let error = |merges: &[(&'static str, &'static str)]| scores(&tokens, merges, 5).unwrap_err();
        let all = [
            error(&[("a", "b"), ("b", "b"), ("ab", "b")]),
            error(&[("a", "b"), ("ab", "b"), ("b", "b"), ("a", "bb")]),
            error(&[("a", "b"), ("a", "a")]),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }

    #[test]
    fn only_texts_that_llama_cpp_prepares_in_the_same_way_are_accepted() {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prepend = json!({"type": "Prepend", "prepend": SPACE});
        let sequence = |steps: Json| json!({"type": "Sequence", "normalizers": steps});
        let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"});
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false});
        let found = |normalizer: &Json, pre_tokenizer: &Json| {
            adds_space(&json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer})).ok()
        };
        let both = sequence(json!([prepend, replace]));
        assert_eq!(found(&both, &Json::Null), Some(true));
        assert_eq!(found(&replace, &split), Some(false));
        assert_eq!(found(&Json::Null, &metaspace("first")), Some(true));
        assert_eq!(found(&Json::Null, &metaspace("never")), Some(false));
        assert_eq!(found(&sequence(json!([replace, prepend])), &Json::Null), None);
        assert_eq!(found(&json!({"type": "NFKC"}), &Json::Null), None);
        assert_eq!(found(&both, &metaspace("first")), None);
        assert_eq!(found(&Json::Null, &Json::Null), None);
    }

    #[test]
    fn bytes_and_the_unknown_token_have_their_types() {
        let names: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        let all: Vec<&str> = ["<unk>", "a", "<0x0G>"].into_iter().chain(names.iter().map(String::as_str)).collect();
        let mut tokens: Tokens<'_> = all.iter().enumerate().map(|(id, text)| (id, (*text, NORMAL))).collect();
        set_types(&mut tokens, Some("<unk>")).unwrap();
        let kinds: Vec<i32> = tokens.values().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds[..4], [UNKNOWN, NORMAL, NORMAL, BYTE]);
        assert!(kinds[3..].iter().all(|kind| *kind == BYTE));
        tokens.remove(&13);
        tokens.iter_mut().for_each(|(_, (_, kind))| *kind = NORMAL);
        assert!(set_types(&mut tokens, None).unwrap_err().contains("<0x0A>"));
    }
}
