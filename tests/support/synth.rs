//! Initial weights and tokens, computed with integers and IEEE doubles, and therefore the same in any programming
//! language: the inputs of the recorded runs.

/// The sizes of a GPT-2.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub n_layer: usize,
    pub n_embd: usize,
    pub ctx: usize,
    pub vocab: usize,
}

/// The nano model of the recorded runs.
pub const NANO: Sizes = Sizes { n_layer: 4, n_embd: 128, ctx: 128, vocab: 256 };

fn mix(k: u32, j: u32) -> u32 {
    let mut x = k.wrapping_mul(0x9E37_79B1).wrapping_add(j.wrapping_mul(0x85EB_CA77)).wrapping_add(0x1656_67B1);
    x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
    x = (x ^ (x >> 12)).wrapping_mul(0x297A_2D39);
    x ^ (x >> 15)
}

/// Returns the name, shape and values of every parameter, in the order of the published files.
pub fn weights(sizes: Sizes) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    #[derive(Clone, Copy)]
    enum Start {
        Weight,
        Residual,
        Constant(f32),
    }
    use Start::{Constant, Residual, Weight};
    let d = sizes.n_embd;
    let mut list = vec![
        ("wte.weight".to_string(), vec![sizes.vocab, d], Weight),
        ("wpe.weight".into(), vec![sizes.ctx, d], Weight),
    ];
    for i in 0..sizes.n_layer {
        let block = [
            ("ln_1.weight", vec![d], Constant(1.0)),
            ("ln_1.bias", vec![d], Constant(0.0)),
            ("attn.c_attn.weight", vec![d, 3 * d], Weight),
            ("attn.c_attn.bias", vec![3 * d], Constant(0.0)),
            ("attn.c_proj.weight", vec![d, d], Residual),
            ("attn.c_proj.bias", vec![d], Constant(0.0)),
            ("ln_2.weight", vec![d], Constant(1.0)),
            ("ln_2.bias", vec![d], Constant(0.0)),
            ("mlp.c_fc.weight", vec![d, 4 * d], Weight),
            ("mlp.c_fc.bias", vec![4 * d], Constant(0.0)),
            ("mlp.c_proj.weight", vec![4 * d, d], Residual),
            ("mlp.c_proj.bias", vec![d], Constant(0.0)),
        ];
        list.extend(block.map(|(name, shape, start)| (format!("h.{i}.{name}"), shape, start)));
    }
    list.push(("ln_f.weight".into(), vec![d], Constant(1.0)));
    list.push(("ln_f.bias".into(), vec![d], Constant(0.0)));
    let values = |k: u32, count: usize, start: Start| -> Vec<f32> {
        let std = match start {
            Weight => 0.02,
            Residual => 0.02 / (2.0 * sizes.n_layer as f64).sqrt(),
            Constant(value) => return vec![value; count],
        };
        let uniform = |j| f64::from(mix(k, j)) / 4_294_967_296.0 - 0.5;
        (0..count as u32).map(|j| (uniform(j) * 2.0 * std * 1.732_050_807_568_877_2) as f32).collect()
    };
    (0..)
        .zip(list)
        .map(|(k, (name, shape, start))| {
            let count = shape.iter().product();
            (name, shape, values(k, count, start))
        })
        .collect()
}

/// Returns the 65,536 tokens of the recorded runs.
pub fn tokens() -> Vec<u16> {
    let mut tokens: Vec<u16> = Vec::with_capacity(65_536);
    for i in 0..65_536 {
        let x = mix(1_000_003, i);
        tokens.push(match tokens.last() {
            Some(last) if !x.is_multiple_of(4) => (5 * last + 17) & 255,
            _ => ((x >> 8) & 255) as u16,
        });
    }
    tokens
}

/// Returns the inputs and targets, row by row, of `samples` global samples starting at `first`, in the recorded runs'
/// order.
pub fn samples(tokens: &[u16], ctx: usize, first: usize, samples: usize) -> (Vec<u32>, Vec<u32>) {
    let window = |shift: usize| {
        (first..first + samples)
            .flat_map(|i| {
                let start = (i * ctx) % (tokens.len() - ctx - 1) + shift;
                tokens[start..start + ctx].iter().map(|t| u32::from(*t))
            })
            .collect()
    };
    (window(0), window(1))
}
