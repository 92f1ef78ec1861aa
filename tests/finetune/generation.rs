//! Continuing a text with cached keys and values, with windows and soft caps, compared with recomputing the complete
//! text for each token.

use crate::fixtures::{MODELS, base};
use candle_core::{DType, Device};
use candle_zero::models::{Decoder, Session};

#[test]
fn tokens_with_a_cache_have_the_logits_of_the_whole_text() {
    for name in MODELS {
        let base = base(name);
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        let mut session = Session::new();
        // The prompt is already longer than all windows.
        let mut text: Vec<u32> = (0..29u32).map(|i| (i * i * 31 + 7 * i + 5) % 512).collect();
        let mut logits = model.extend(&mut session, &text).unwrap();
        assert_eq!(logits, model.last_logits(&text).unwrap(), "{name}: the first tokens give the same bits");
        for _ in 0..25 {
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            text.push(best as u32);
            logits = model.extend(&mut session, &text[text.len() - 1..]).unwrap();
            let want = model.last_logits(&text).unwrap();
            let difference = logits.iter().zip(&want).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
            assert!(difference <= 2e-5, "{name}: {difference} after {} tokens", text.len());
        }
        assert_eq!(model.generate(&text[..29], 25, 0.0, 0).unwrap(), text[29..], "{name}");
    }
}

#[test]
fn a_prompt_in_pieces_gives_what_it_gives_at_once() {
    for name in MODELS {
        let base = base(name);
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        let text: Vec<u32> = (0..60u32).map(|i| (i * i * 17 + 3 * i + 1) % 512).collect();
        let want = model.last_logits(&text).unwrap();
        let (mut session, mut logits) = (Session::new(), Vec::new());
        for piece in [&text[..7], &text[7..8], &text[8..40], &text[40..]] {
            logits = model.extend(&mut session, piece).unwrap();
        }
        let difference = logits.iter().zip(&want).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(difference <= 2e-5, "{name}: {difference}");
    }
}
