//! Choosing the next token from a row of logits.

/// A small random generator for sampling: splitmix64 (Steele et al. 2014), the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct TokenRng {
    state: u64,
}

impl TokenRng {
    /// A generator whose numbers follow from `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next number, uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses a token from `logits` `[vocab]`: the largest (the first of equals) at temperature 0 or below, else one drawn
/// from softmax(logits / temperature). Logits that are nan are never chosen while another is not.
///
/// Panics on an empty row.
pub fn next_token(logits: &[f32], temperature: f64, rng: &mut TokenRng) -> u32 {
    assert!(!logits.is_empty(), "no logits to choose from");
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] || (logits[best].is_nan() && !x.is_nan()) {
            best = i;
        }
    }
    if temperature.is_nan() || temperature <= 0.0 {
        return best as u32;
    }
    let weight = |x: &f32| {
        let w = (f64::from(*x - logits[best]) / temperature).exp();
        if w.is_nan() { 0.0 } else { w }
    };
    let total: f64 = logits.iter().map(weight).sum();
    let mut left = rng.uniform() * total;
    for (i, x) in logits.iter().enumerate() {
        left -= weight(x);
        if left < 0.0 {
            return i as u32;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_largest_and_skips_nan() {
        let mut rng = TokenRng::new(0);
        assert_eq!(next_token(&[f32::NAN, 1.0, 3.0, 3.0], 0.0, &mut rng), 2);
        assert_eq!(next_token(&[f32::NAN, f32::NEG_INFINITY], 0.0, &mut rng), 1);
        assert_eq!(next_token(&[f32::NAN], 1.0, &mut rng), 0);
    }

    #[test]
    fn sampling_follows_the_softmax_of_the_tempered_logits() {
        let logits = [1.0f32, 0.0, f32::NEG_INFINITY, 2.0];
        let mut rng = TokenRng::new(7);
        let mut counts = [0f64; 4];
        let n = 40_000;
        (0..n).for_each(|_| counts[next_token(&logits, 0.5, &mut rng) as usize] += 1.0 / f64::from(n));
        let weights = logits.map(|x| (f64::from(x) / 0.5).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            assert!((count - weight / total).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(counts[2], 0.0);
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again() {
        let draw = |seed| {
            let mut rng = TokenRng::new(seed);
            (0..20).map(|_| next_token(&[0.1, 0.2, 0.3, 0.4], 1.0, &mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
