//! Continuing a text with cached keys and values, compared with recomputing the complete text for each token.

use crate::{gpt, llama};
use candle_core::{DType, Result};
use candle_zero::models::{Architecture, GptConfig, LanguageModel, LlamaConfig, Session};

/// Returns the configuration of a GPT-2 with a context of `ctx` tokens.
fn gpt_config(ctx: usize) -> GptConfig {
    GptConfig { ctx, ..GptConfig::preset("nano").unwrap() }
}

/// Returns the configuration of a Llama with grouped heads and a context of `ctx` tokens.
fn llama_config(ctx: usize) -> LlamaConfig {
    LlamaConfig { ctx, ..llama::odd() }
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 31 + 7 * i + 5) % 77).collect()
}

fn likeliest(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

/// Returns the largest difference, relative to the largest number in `want`.
fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |most, x| most.max(x.abs()));
    assert_eq!(got.len(), want.len());
    largest(&mut got.iter().zip(want).map(|(a, b)| a - b)) / largest(&mut want.iter().copied())
}

/// Continues a text greedily by `n` tokens, beyond the context, and compares each row of logits with that of the
/// complete text.
fn continues_as_without_a_cache<A: Architecture>(model: &LanguageModel<A>, n: usize, accuracy: f32) {
    let mut session = Session::new();
    let mut text = prompt(5);
    let mut logits = model.extend(&mut session, &text).unwrap();
    assert_eq!(logits, model.last_logits(&text).unwrap(), "the first tokens give the same bits");
    for _ in 0..n {
        text.push(likeliest(&logits));
        logits = model.extend(&mut session, &text[text.len() - 1..]).unwrap();
        assert_eq!(session.tokens(), text);
        let difference = relative_error(&logits, &model.last_logits(&text).unwrap());
        assert!(difference <= accuracy, "{difference} after {} tokens", text.len());
    }
    assert_eq!(model.generate(&prompt(5), n, 0.0, 0).unwrap(), text[5..]);
}

#[test]
fn logits_are_those_of_the_whole_text_also_beyond_the_context() {
    for (dtype, accuracy) in [(DType::F32, 2e-6), (DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        continues_as_without_a_cache(&gpt::model(&gpt_config(24), dtype).0, 24, accuracy);
        continues_as_without_a_cache(&llama::model(&llama_config(24), dtype).0, 24, accuracy);
    }
}

#[test]
fn greedy_tokens_are_those_without_a_cache() {
    fn check<A: Architecture>(model: &LanguageModel<A>) {
        let mut text = prompt(9);
        for _ in 0..40 {
            text.push(likeliest(&model.last_logits(&text).unwrap()));
        }
        assert_eq!(model.generate(&prompt(9), 40, 0.0, 0).unwrap(), text[9..]);
    }
    check(&gpt::model(&gpt_config(40), DType::F32).0);
    check(&llama::model(&llama_config(40), DType::F32).0);
}

#[test]
fn a_prompt_in_pieces_gives_what_it_gives_at_once() {
    fn check<A: Architecture>(model: &LanguageModel<A>, accuracy: f32) {
        let text = prompt(40);
        let at_once = model.extend(&mut Session::new(), &text).unwrap();
        for pieces in [vec![1, 39], vec![39, 1], vec![7, 1, 1, 20, 11]] {
            let (mut session, mut from) = (Session::new(), 0);
            let mut logits = Vec::new();
            for piece in &pieces {
                logits = model.extend(&mut session, &text[from..from + piece]).unwrap();
                from += piece;
            }
            assert!(relative_error(&logits, &at_once) <= accuracy, "{pieces:?}: {}", relative_error(&logits, &at_once));
        }
    }
    for (dtype, accuracy) in [(DType::F32, 2e-6), (DType::BF16, 2e-2)] {
        check(&gpt::model(&gpt_config(40), dtype).0, accuracy);
        check(&llama::model(&llama_config(40), dtype).0, accuracy);
    }
}

#[test]
fn a_session_goes_back_to_any_of_its_tokens() {
    let (gpt, ..) = gpt::model(&gpt_config(16), DType::F32);
    let text = prompt(20);
    let mut session = Session::new();
    gpt.extend(&mut session, &text[..8]).unwrap();
    let want = gpt.extend(&mut session, &[3]).unwrap();
    for others in [3, 11] {
        // 3 more tokens stay within the context, and 11 go beyond it.
        gpt.extend(&mut session, &text[9..9 + others]).unwrap();
        session.truncate(8);
        assert_eq!(session.tokens(), &text[..8]);
        let got = gpt.extend(&mut session, &[3]).unwrap();
        assert!(relative_error(&got, &want) <= 2e-6);
    }
}

#[test]
fn a_refusal_leaves_the_session_as_it_was() {
    let (gpt, ..) = gpt::model(&gpt_config(16), DType::F32);
    let (other, ..) = llama::model(&llama_config(16), DType::F32);
    let (mut session, mut untouched) = (Session::new(), Session::new());
    for session in [&mut session, &mut untouched] {
        gpt.extend(session, &prompt(6)).unwrap();
    }
    // The message is the first line; a backtrace may follow.
    let text =
        |result: Result<Vec<f32>>| result.unwrap_err().to_string().lines().next().unwrap_or_default().to_string();
    assert!(text(gpt.extend(&mut session, &[4, 256])).contains("token id 256"));
    insta::assert_snapshot!(text(gpt.extend(&mut session, &[])), @"the model continues a text of at least one token, but none was given");
    insta::assert_snapshot!(text(other.extend(&mut session, &[1])), @"the session was started by a model of 4 blocks, but this one has 2; a session belongs to one model");
    assert_eq!(session.tokens(), prompt(6));
    assert_eq!(gpt.extend(&mut session, &[4]).unwrap(), gpt.extend(&mut untouched, &[4]).unwrap());
}

#[test]
fn memory_is_that_of_the_tokens_and_none_beyond_the_context() {
    let (llama, ..) = llama::model(&llama_config(40), DType::BF16);
    let mut session = Session::new();
    session.reserve(30);
    llama.extend(&mut session, &prompt(3)).unwrap();
    // Keys and values of two blocks: two heads of ten elements, two bytes each, for multiples of sixteen tokens.
    let bytes = |tokens: usize| 2 * 2 * tokens * 20 * 2;
    assert_eq!(session.cache_bytes(), bytes(32));
    llama.extend(&mut session, &prompt(30)).unwrap();
    assert_eq!(session.cache_bytes(), bytes(48), "33 tokens need three blocks of sixteen");
    llama.extend(&mut session, &prompt(10)).unwrap();
    assert_eq!((session.cache_bytes(), session.tokens().len()), (0, 43));
}
