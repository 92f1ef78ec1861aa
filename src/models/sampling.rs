//! Chooses the next token from a row of logits.

/// A small random generator for sampling: splitmix64 (Steele et al. 2014), with the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct TokenRng {
    state: u64,
}

impl TokenRng {
    /// Creates a generator whose numbers depend only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns the next number, uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses a token from `logits` `[vocab]`: the one with the largest logit (the first of several equal ones) at
/// temperature 0 or below, otherwise one sampled from softmax(logits / temperature). NaN logits are never chosen unless
/// all are NaN.
///
/// # Panics
/// Panics if the row is empty.
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
    let mut remaining = rng.uniform() * total;
    for (i, x) in logits.iter().enumerate() {
        remaining -= weight(x);
        if remaining < 0.0 {
            return i as u32;
        }
    }
    best as u32
}

/// Keeps the `top_k` largest of `logits` (0 keeps all), and of those the most likely ones whose probabilities,
/// softmax(logits / temperature), add up to `top_p` (1 keeps all), but at least one. The others become minus infinity,
/// as do those that are NaN. Of equal logits, the first ones are kept. Nothing changes if neither limit applies, or at
/// temperature 0 or below, at which the largest logit is chosen anyway.
pub fn keep_likeliest(logits: &mut [f32], top_k: usize, top_p: f64, temperature: f64) {
    let by_rank = top_k > 0 && top_k < logits.len();
    if !(temperature > 0.0 && (by_rank || top_p < 1.0)) {
        return;
    }
    logits.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NEG_INFINITY);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let larger = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut count = logits.len();
    if by_rank {
        order.select_nth_unstable_by(top_k - 1, larger);
        count = top_k;
    }
    if top_p < 1.0 {
        order[..count].sort_unstable_by(larger);
        let max = order.first().map_or(0.0, |best| logits[*best as usize]);
        let weight = |i: &u32| (f64::from(logits[*i as usize] - max) / temperature).exp();
        let total: f64 = order[..count].iter().map(weight).sum();
        let mut sum = 0.0;
        let is_within_top_p = |i: &&u32| {
            let is_kept = sum < top_p * total;
            sum += weight(i);
            is_kept
        };
        count = order[..count].iter().take_while(is_within_top_p).count().max(1);
    }
    order.iter().skip(count).for_each(|i| logits[*i as usize] = f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_are_those_of_the_rank_and_of_the_probability() {
        const EXCLUDED: f32 = f32::NEG_INFINITY;
        let kept = |top_k, top_p, temperature| {
            // The probabilities are 0.5, 0.1, 0.3 and 0.1 at temperature 1.
            let mut logits = [0.5f32.ln(), 0.1f32.ln(), 0.3f32.ln(), 0.1f32.ln(), f32::NAN];
            keep_likeliest(&mut logits, top_k, top_p, temperature);
            logits.map(|x| x > EXCLUDED)
        };
        assert_eq!(kept(1, 1.0, 1.0), [true, false, false, false, false]);
        assert_eq!(kept(3, 1.0, 1.0), [true, true, true, false, false]);
        assert_eq!(kept(0, 0.45, 1.0), [true, false, false, false, false]);
        assert_eq!(kept(0, 0.7, 1.0), [true, false, true, false, false]);
        assert_eq!(kept(0, 0.85, 1.0), [true, true, true, false, false]);
        // Of the two largest, the first has probability 5/8.
        assert_eq!(kept(2, 0.6, 1.0), [true, false, false, false, false]);
        // A high temperature makes all probabilities nearly equal.
        assert_eq!(kept(0, 0.7, 1e6), [true, true, true, false, false]);
        let mut logits = [1.0f32, 3.0];
        keep_likeliest(&mut logits, 1, 0.1, 0.0);
        assert_eq!(logits, [1.0, 3.0]);
        keep_likeliest(&mut logits, 0, 1e-300, 1.0);
        assert_eq!(logits, [EXCLUDED, 3.0]);
        keep_likeliest(&mut [], 1, 0.5, 1.0);
    }

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
