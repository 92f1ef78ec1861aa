//! Splits a sequence of items into contiguous parts by the rules of DeepSpeed's pipeline and loaders. candle-zero's own
//! rules for layers are those of `candle_zero::pipeline`.

/// Returns the bounds of `parts` contiguous parts of `items` items, as equal as possible; the first parts get one more
/// item.
pub fn partition_uniform(items: usize, parts: usize) -> Vec<usize> {
    let (each, more) = (items / parts, items % parts);
    (0..=parts).map(|p| p * each + p.min(more)).collect()
}

/// Returns the bounds of `parts` contiguous parts whose sums differ little. As in DeepSpeed, only the best split of
/// each prefix is extended, which need not lead to the best split of all items: the one in which the heaviest and the
/// lightest part differ the least. Of equally good splits, the one with the later bounds is chosen. If there are no
/// more items than parts, each part has at most one item.
pub fn partition_balanced(weights: &[u64], parts: usize) -> Vec<usize> {
    let n = weights.len();
    if n <= parts {
        return partition_uniform(n, parts);
    }
    let mut prefix = vec![0u64];
    for w in weights {
        prefix.push(prefix[prefix.len() - 1] + w);
    }
    // best[k][i]: the first i items in k parts, as (spread, lightest, heaviest, start of the last part).
    type Cell = Option<(u64, u64, u64, usize)>;
    let mut best: Vec<Vec<Cell>> = vec![vec![None; n + 1]; parts + 1];
    for i in 1..=n {
        best[1][i] = Some((0, prefix[i], prefix[i], 0));
    }
    for k in 2..=parts {
        for i in k..=n {
            for start in k - 1..i {
                let Some((_, light, heavy, _)) = best[k - 1][start] else { continue };
                let last = prefix[i] - prefix[start];
                let (light, heavy) = (light.min(last), heavy.max(last));
                if best[k][i].is_none_or(|b| heavy - light <= b.0) {
                    best[k][i] = Some((heavy - light, light, heavy, start));
                }
            }
        }
    }
    let mut bounds = vec![n];
    let mut end = n;
    for k in (1..=parts).rev() {
        end = best[k][end].map_or(0, |b| b.3);
        bounds.push(end);
    }
    bounds.reverse();
    bounds
}
