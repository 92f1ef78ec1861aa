//! A random search for tokenizers for which this crate's tokens differ from those of the `tokenizers` library.
//!
//! `CANDLE_ZERO_VOCABULARIES` sets the number of tokenizers, and `CANDLE_ZERO_SEED` the seed.

use super::tokenizer::Tokenizer;
use candle_zero::util::mix;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        (mix(self.0) % end as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn one<'a, T: ?Sized>(&mut self, options: &[&'a T]) -> &'a T {
        options[self.below(options.len())]
    }

    /// Returns a text composed of a limited set of parts, so that pieces repeat. The parts include everything that
    /// pre-tokenizers, normalizers and added tokens react to.
    fn text(&mut self, parts: usize) -> String {
        const PARTS: [&[&str]; 9] = [
            &["a", "b", "ab", "the", "cat", "The", "THE", "e", "xY", "abc", "ing", "s", "K"],
            &[" ", " ", " ", "\n", "  ", "\n\n", "\t", "\r\n", " \n", "\n ", "   ", "\u{b}", "\u{c}"],
            &[" a", " the", " b", " cat", "\na", "\nthe", " The", " e", " xY", " s"],
            &[
                ".", ",", "!", "?", "'s", "'LL", "'re", "-", "_", "/", "(", ")", ":", "1", "23", "4567", "'", "\"",
                "#", "$",
            ],
            &["<|a|>", "<b>", "<|im_end|>", "</b>", "<x>>", "a<b>", "<<b>", "<", ">", "<|", "[MASK]", "<0x20>"],
            &[
                "é", "e\u{301}", "ñ", "ß", "Å", "\u{212B}", "\u{212A}", "\u{37E}", "ﬁ", "ǅ", "İ", "²", "½", "٣",
                "\u{338}",
            ],
            &["中", "文", "日本", "한", "กำ", "🙂", "👩\u{200D}👩", "🇩🇪", "👍🏽", "\u{301}", "\u{FE0F}"],
            &[
                "\u{A0}", "\u{2003}", "\u{3000}", "\u{2028}", "\u{85}", "\u{1c}", "\u{1f}", "\u{feff}", "\u{200b}",
                "▁", "Ġ", "Ċ",
            ],
            &["\0", "\u{7f}", "\u{1b}", "\u{80}", "\u{FFFD}", "\u{E000}", "\u{10FFFC}"],
        ];
        let mut text = String::new();
        for _ in 0..parts {
            let kind = self.one(&[&0, &0, &0, &1, &1, &2, &2, &2, &2, &3, &3, &4, &5, &6, &7, &8]);
            text.push_str(self.one(PARTS[*kind]));
        }
        text
    }

    fn normalizer(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 13 } else { 12 }) {
            0 | 1 => json!({"type": "NFC"}),
            2 => json!({"type": "NFKC"}),
            3 => json!({"type": "Lowercase"}),
            4 => json!({"type": "Strip", "strip_left": self.chance(50), "strip_right": self.chance(50)}),
            5 | 6 => json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            7 => json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": self.one(&[" ", "_", "", "▁"])}),
            8 => json!({"type": "Prepend", "prepend": "▁"}),
            9 => json!({"type": "NFD"}),
            10 => json!({"type": "StripAccents"}),
            11 => {
                json!({"type": "Replace", "pattern": {"String": self.one(&["a", "e", "\n"])}, "content": self.one(&["b", " ", "x y"])})
            }
            _ => {
                let all: Vec<Value> = (0..1 + self.below(3)).map(|_| self.normalizer(depth + 1)).collect();
                json!({"type": "Sequence", "normalizers": all})
            }
        }
    }

    fn pre_tokenizer(&mut self, depth: usize) -> Value {
        let behaviors = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"];
        match self.below(if depth == 0 { 18 } else { 14 }) {
            0..3 => {
                json!({"type": "ByteLevel", "add_prefix_space": self.chance(15), "trim_offsets": true, "use_regex": self.chance(70)})
            }
            3..6 => {
                let regex = self.one(&super::encode_cache::CACHEABLE_PATTERNS);
                let behavior = if self.chance(85) { "Isolated" } else { self.one(&behaviors) };
                json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": self.chance(5)})
            }
            6 => json!({"type": "Digits", "individual_digits": self.chance(50)}),
            7 => json!({"type": "Whitespace"}),
            8 => json!({"type": "WhitespaceSplit"}),
            9 => json!({"type": "Punctuation", "behavior": self.one(&behaviors)}),
            10 => {
                let scheme = self.one(&["always", "never", "first"]);
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": self.chance(50)})
            }
            11 => json!({"type": "BertPreTokenizer"}),
            12 => {
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": self.one(&behaviors), "invert": self.chance(10)})
            }
            13 => json!({"type": "Split", "pattern": {"Regex": self.one(&["\\s", "[a-z]+", " ?[^ ]+", "\\n"])},
                         "behavior": self.one(&behaviors), "invert": self.chance(20)}),
            // The form of the best-known tokenizers.
            14 | 15 => json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": self.one(&super::encode_cache::CACHEABLE_PATTERNS)}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]}),
            _ => {
                let all: Vec<Value> = (0..1 + self.below(3)).map(|_| self.pre_tokenizer(depth + 1)).collect();
                json!({"type": "Sequence", "pretokenizers": all})
            }
        }
    }

    /// Returns a BPE model whose tokens consist of characters in byte-level form, or of the texts' own characters with
    /// `▁` in place of spaces.
    fn bpe(&mut self, texts: &[String], byte_level: bool) -> Value {
        let symbols_of = |text: &str| match byte_level {
            true => text.bytes().map(byte_char).collect::<Vec<char>>(),
            false => text.chars().map(|c| if c == ' ' { '▁' } else { c }).collect(),
        };
        let mut symbols: BTreeSet<char> = texts.iter().flat_map(|text| symbols_of(text)).collect();
        if byte_level && self.chance(80) {
            symbols.extend((0..=255).map(byte_char));
        }
        symbols.extend([' ', '▁', '\n'].into_iter().filter(|_| !byte_level && self.chance(80)));
        if self.chance(25) {
            symbols.retain(|_| !self.chance(10));
        }
        let mut tokens: Vec<String> = symbols.iter().map(char::to_string).collect();
        let mut known: BTreeSet<String> = tokens.iter().cloned().collect();
        let mut merges: Vec<[String; 2]> = vec![];
        // Most merges join adjacent tokens of the texts, in some models also across spaces; a few join random tokens.
        let joins_across_spaces = self.chance(35);
        let mut words: Vec<Vec<String>> =
            texts.iter().map(|text| symbols_of(text).into_iter().map(String::from).collect()).collect();
        for _ in 0..self.below(120) {
            let pair = if self.chance(97) {
                let word = self.below(words.len());
                let word = &words[word];
                if word.len() < 2 {
                    continue;
                }
                let at = self.below(word.len() - 1);
                [word[at].clone(), word[at + 1].clone()]
            } else {
                [0, 1].map(|_| tokens[self.below(tokens.len())].clone())
            };
            let is_blank = |c: Option<char>| c.is_none_or(|c| [' ', '▁', 'Ġ', 'Ċ', '\n'].contains(&c));
            let is_across_spaces = !is_blank(pair[0].chars().last()) && is_blank(pair[1].chars().next())
                || is_blank(pair[0].chars().last()) && pair[0].chars().count() > 1;
            if is_across_spaces && !joins_across_spaces || !pair.iter().all(|token| known.contains(token)) {
                continue;
            }
            let new = pair.concat();
            if known.insert(new.clone()) {
                tokens.push(new.clone());
            }
            if !merges.contains(&pair) {
                merges.push(pair.clone());
            }
            for word in &mut words {
                let mut at = 0;
                while at + 1 < word.len() {
                    if word[at] == pair[0] && word[at + 1] == pair[1] {
                        word[at] = new.clone();
                        word.remove(at + 1);
                    }
                    at += 1;
                }
            }
        }
        // Words that no merge produces.
        for word in ["Ġthe", "▁the", "the", "▁a▁", "Ġcat", "a▁b"] {
            if self.chance(15) && known.insert(word.into()) {
                tokens.push(word.into());
            }
        }
        let byte_fallback = self.chance(25);
        if byte_fallback {
            let missing = if self.chance(20) { self.below(256) } else { 256 };
            tokens.extend((0..256).filter(|byte| *byte != missing).map(|byte| format!("<0x{byte:02X}>")));
            tokens.extend(["<0x0A>a", "e<0x20>"].into_iter().filter(|_| self.chance(10)).map(String::from));
        }
        let unk = self.chance(50);
        if unk {
            tokens.push("<unk>".into());
        }
        let vocab: Map<String, Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
        json!({"type": "BPE", "dropout": null, "unk_token": unk.then_some("<unk>"), "continuing_subword_prefix": null,
               "end_of_word_suffix": null, "fuse_unk": self.chance(50), "byte_fallback": byte_fallback,
               "ignore_merges": self.chance(25), "vocab": vocab, "merges": merges})
    }

    fn model(&mut self, texts: &[String], byte_level: bool) -> Value {
        let pieces = |random: &mut Self| {
            let mut all: BTreeSet<String> = texts.iter().flat_map(|text| text.chars().map(String::from)).collect();
            all.extend(["▁", "▁the", "the", "ab", "▁a", "e ", "t▁", "cat", "ing"].map(String::from));
            for text in texts {
                all.extend(text.split(' ').filter(|_| random.chance(10)).map(String::from));
            }
            all.remove("");
            all.remove("<unk>");
            all
        };
        match self.below(10) {
            0 => {
                let plain = pieces(self);
                let mut all: Vec<String> = plain.iter().map(|piece| format!("##{piece}")).collect();
                all.extend(plain);
                all.push("[UNK]".into());
                let vocab: Map<String, Value> =
                    all.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
                json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": vocab})
            }
            1 => {
                let mut all: Vec<Value> = vec![json!(["<unk>", 0.0])];
                all.extend(pieces(self).into_iter().map(|piece| json!([piece, -1.0 - self.below(900) as f64 / 100.0])));
                json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": all})
            }
            2 => {
                let mut all: Vec<String> = pieces(self).into_iter().collect();
                all.push("<unk>".into());
                let vocab: Map<String, Value> =
                    all.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
                json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab})
            }
            _ => self.bpe(texts, byte_level),
        }
    }

    /// Returns a normalizer and a pre-tokenizer such as those of GPT-2, Llama 3, Qwen, SmolLM2 and Gemma.
    fn typical_components(&mut self) -> (Value, Value) {
        let normalizer = if self.chance(40) { json!({"type": "NFC"}) } else { Value::Null };
        let byte_level =
            |regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let sequence = |all: [Value; 2]| json!({"type": "Sequence", "pretokenizers": all});
        let regex = self.one(&super::encode_cache::CACHEABLE_PATTERNS);
        let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let digits = json!({"type": "Digits", "individual_digits": self.chance(50)});
        match self.below(7) {
            0 | 1 => (normalizer, sequence([split, byte_level(false)])),
            2 => (normalizer, byte_level(true)),
            3 => (normalizer, byte_level(false)),
            4 => (normalizer, sequence([digits, byte_level(true)])),
            5 => (normalizer, split),
            _ => {
                let normalizer = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
                let pattern = json!({"String": " "});
                let split =
                    json!({"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": false});
                (normalizer, if self.chance(80) { split } else { Value::Null })
            }
        }
    }

    fn tokenizer(&mut self, texts: &[String]) -> Value {
        // Half of the tokenizers have the structure of the best-known ones, with different content.
        let is_typical = self.chance(50);
        let (normalizer, pre_tokenizer) = match is_typical {
            true => self.typical_components(),
            false => {
                let normalizer = if self.chance(40) { Value::Null } else { self.normalizer(0) };
                (normalizer, if self.chance(15) { Value::Null } else { self.pre_tokenizer(0) })
            }
        };
        let byte_level = pre_tokenizer.to_string().contains("ByteLevel") != self.chance(3);
        let model = if is_typical { self.bpe(texts, byte_level) } else { self.model(texts, byte_level) };
        let contents = [
            "<|a|>",
            "<b>",
            "<|im_end|>",
            "</b>",
            "<x>>",
            "THE",
            "the ",
            "  ",
            "\n\n",
            "<a<b>",
            "b>",
            " the",
            "e ",
            "\na",
            "\n",
            "a b",
            "[MASK]",
            "e\n",
            "▁",
            "a▁",
            "\u{212A} ",
            "é ",
            "\u{212A};",
            "\t",
            "cat",
            ". ",
            " ",
            "<|",
        ];
        let size = model["vocab"].as_object().map_or(0, Map::len).max(model["vocab"].as_array().map_or(0, Vec::len));
        let mut added: Vec<Value> = vec![];
        let plain = self.chance(50);
        for content in contents {
            if !self.chance(if plain { 3 } else { 12 }) {
                continue;
            }
            let known = model["vocab"].get(content).and_then(Value::as_u64);
            added.push(json!({
                "id": known.unwrap_or((size + added.len()) as u64), "content": content, "special": self.chance(50),
                "lstrip": !plain && self.chance(15), "rstrip": !plain && self.chance(15),
                "single_word": !plain && self.chance(8), "normalized": self.chance(35),
            }));
        }
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
               "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model})
    }
}

/// Returns the character that represents a byte in GPT-2's vocabulary.
fn byte_char(byte: u8) -> char {
    let is_own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    match is_own(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|byte| !is_own(*byte)).count() as u32).unwrap_or_default(),
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Returns the result of `encode`, or `None` if it fails or panics.
fn attempt<T>(encode: impl FnOnce() -> Option<T>) -> Option<T> {
    catch_unwind(AssertUnwindSafe(encode)).ok().flatten()
}

#[test]
fn random_tokenizers_have_the_tokens_of_their_own_library() {
    let (count, seed) = (number("CANDLE_ZERO_VOCABULARIES", 60), number("CANDLE_ZERO_SEED", 1));
    let folder = tempfile::tempdir().unwrap();
    let (mut tested, mut splitting, mut case) = (0, 0, 0);
    while tested < count {
        case += 1;
        let mut random = Random(mix(mix(seed) ^ case));
        let texts: Vec<String> = (0..40)
            .map(|_| {
                let parts = 1 + random.below(30);
                random.text(parts)
            })
            .collect();
        let json = random.tokenizer(&texts);
        let drops_unknown = json["model"]["type"] == "BPE" && json["model"]["unk_token"].is_null();
        let json = json.to_string();
        // The library does not load every combination.
        let Some(theirs) = attempt(|| tokenizers::Tokenizer::from_bytes(&json).ok()) else { continue };
        std::fs::write(folder.path().join("tokenizer.json"), &json).unwrap();
        let ours = match Tokenizer::open(folder.path()) {
            // The library's encoding does not end, or differs from one process to the next.
            Err(error)
                if ["would match endlessly", "which one matches is random"]
                    .iter()
                    .any(|reason| error.to_string().contains(reason)) =>
            {
                continue;
            }
            ours => ours.unwrap(),
        };
        tested += 1;
        splitting += u64::from(ours.is_cut());
        for text in &texts {
            let encode = || theirs.encode(text.as_str(), false).ok();
            let Some(expected) = attempt(encode) else { continue };
            let found = ours.encode(text).unwrap();
            // Without a token for unknown characters, the library omits them and shifts the offsets after them.
            let same = found.ids == expected.get_ids() && (drops_unknown || found.offsets == expected.get_offsets());
            assert!(
                same,
                "case {case} of seed {seed}: {text:?} should have the tokens {:?} at {:?}, but has {:?} at {:?}: \
                 {json}",
                expected.get_ids(),
                expected.get_offsets(),
                found.ids,
                found.offsets
            );
        }
    }
    // Checks that texts are cut at all.
    assert!(splitting * 6 > tested, "only {splitting} of {tested} tokenizers split texts");
    eprintln!("{tested} tokenizers, {splitting} of which split texts: all tokens match the library's");
}
