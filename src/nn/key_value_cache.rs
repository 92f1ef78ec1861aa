//! Attention for text continuation, with cached keys and values of the text so far.

use super::attention::{
    attention_with_optional_sinks, check_sinks, fused_heads, fused_parts, grouped_heads, rows, wide_values,
};
use super::{AttentionOptions, composed, fused_attention};
use crate::graph::is_without_gradients;
use crate::kernels::attention::{
    AttentionRule, AttentionShape, KvCacheView, MultiHeadRows, capacity_for, forward_cached, store_keys, store_values,
};
use crate::kernels::buffer;
use crate::precision::Flat;
use crate::tensor::element::{TensorElement, with_all, with_element};
use crate::util::counted;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::fmt::{self, Display, Formatter};

/// The keys and values that one attention layer has computed for a text, or for a batch of texts of the same length.
/// With a cache, the layer needs to compute only those of new positions.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// use candle_zero::nn::{KeyValueCache, causal_attention};
///
/// // Six positions of two heads of four elements.
/// let qkv = Tensor::randn(0f32, 1f32, (1, 6, 3 * 8), &Device::Cpu)?;
/// let mut cache = KeyValueCache::new(6);
/// cache.causal_attention(&qkv.narrow(1, 0, 5)?, 2)?;
/// let sixth = cache.causal_attention(&qkv.narrow(1, 5, 1)?, 2)?;
/// let all = causal_attention(&qkv, 2)?;
/// let difference = (sixth - all.narrow(1, 5, 1)?)?.abs()?.sum_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// A cache is for evaluation: attention with a cache has no backward pass, and rejects inputs for which a graph is
/// being recorded. The cached values have the dtype of the keys. On the CPU, memory grows with the text, doubling each
/// time up to the limit, and is allocated for multiples of 16 positions.
#[derive(Debug, Clone)]
pub struct KeyValueCache {
    limit: usize,
    len: usize,
    /// The minimum number of positions for which the next allocation has room.
    reserved: usize,
    /// The keys and values on the CPU; `None` if they are on another device.
    host: Option<HostCache>,
    /// The keys and values on another device, `[batch, positions, kv_heads * head]`, and their sizes.
    device: Option<(CacheSizes, [Tensor; 2])>,
}

/// The keys and values by sequence and key head, in the layout of the attention kernel.
#[derive(Debug, Clone)]
struct HostCache {
    keys: Flat,
    values: Flat,
    capacity: usize,
    sizes: CacheSizes,
}

/// The sizes that all positions of a cache share.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CacheSizes {
    batch: usize,
    kv_heads: usize,
    head: usize,
    dtype: DType,
}

impl CacheSizes {
    fn of(h: &AttentionShape, dtype: DType) -> Self {
        Self { batch: h.batch, kv_heads: h.kv_heads, head: h.head, dtype }
    }
}

impl Display for CacheSizes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { batch, kv_heads, head, dtype } = self;
        let (heads, elements) = (counted(*kv_heads, "key head"), counted(*head, "element"));
        write!(f, "{batch} x {heads} of {elements} in {dtype:?}")
    }
}

impl KeyValueCache {
    /// Creates an empty cache for at most `limit` positions.
    pub fn new(limit: usize) -> Self {
        Self { limit, len: 0, reserved: 0, host: None, device: None }
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes allocated for keys and values, including room for more positions.
    pub fn size_in_bytes(&self) -> usize {
        let host = self.host.iter().flat_map(|host| [&host.keys, &host.values]).map(Flat::capacity_in_bytes);
        let device =
            self.device.iter().flat_map(|(_, tensors)| tensors).map(|x| x.elem_count() * x.dtype().size_in_bytes());
        host.chain(device).sum()
    }

    /// Makes the next allocation on the CPU large enough for this total number of positions, or for the limit if that
    /// is less.
    pub fn reserve(&mut self, positions: usize) {
        self.reserved = positions;
    }

    /// Removes all positions but the first `len`, and keeps the memory.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Computes [`causal_attention`](crate::nn::causal_attention()) for positions that follow those in the cache. The
    /// new positions also see the cached ones, and are added to the cache.
    ///
    /// On the CPU, if the cache is empty, the results have the same bits as without a cache. Other results may differ
    /// in their last digits, because sums are computed in a different order.
    ///
    /// # Errors
    /// Returns the same errors as without a cache. Also fails if there are more positions than the limit, if the heads,
    /// the batch size, the dtype or the device differ from those in the cache, or if a graph is being recorded for an
    /// input.
    pub fn causal_attention(&mut self, qkv: &Tensor, n_head: usize) -> Result<Tensor> {
        self.fused_attention(qkv, n_head, &AttentionOptions::default())
    }

    /// Computes [`KeyValueCache::causal_attention`] with options, which must be the same for all positions of a text.
    ///
    /// # Errors
    /// Returns the errors of [`KeyValueCache::causal_attention`]. Also fails if an option is not positive and finite,
    /// or if the attention is bidirectional.
    pub fn fused_attention(&mut self, qkv: &Tensor, n_head: usize, options: &AttentionOptions) -> Result<Tensor> {
        let h = fused_heads(qkv, n_head)?;
        self.check(&h, (qkv.dtype(), qkv.device().is_cpu()), &[qkv])?;
        let rule = causal_rule(options, &h)?;
        let width = n_head * h.head;
        if !qkv.device().is_cpu() {
            let [q, k, v] = [0, 1, 2].map(|part| qkv.narrow(2, part * width, width));
            return self.on_device(&h, [&q?, &k?, &v?], None, options);
        }
        let qkv = qkv.contiguous()?.detach();
        let first = self.is_empty().then(|| fused_attention(&qkv, n_head, options, None)).transpose()?;
        with_element!(qkv.dtype(), NAME, E => with_all::<E, _, 1>([Some(&qkv)], NAME, |[qkv]| {
            self.attend((&h, &rule), fused_parts::<E>(qkv.unwrap_or_default(), width), first)
        }))
    }

    /// Computes [`grouped_attention`](crate::nn::grouped_attention()) for positions that follow those in the cache. The
    /// new positions also see the cached ones, and are added to the cache. Everything else is as in
    /// [`KeyValueCache::causal_attention`].
    ///
    /// # Errors
    /// Returns the errors of [`KeyValueCache::causal_attention`].
    pub fn grouped_attention(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        n_head: usize,
        n_kv_head: usize,
    ) -> Result<Tensor> {
        self.attention(q, k, v, n_head, n_kv_head, &AttentionOptions::default())
    }

    /// Computes [`KeyValueCache::grouped_attention`] with options, which must be the same for all positions of a text.
    ///
    /// # Errors
    /// Returns the errors of [`KeyValueCache::fused_attention`].
    pub fn attention(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        n_head: usize,
        n_kv_head: usize,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        self.attention_with_optional_sinks([q, k, v], None, (n_head, n_kv_head), options)
    }

    /// Computes [`KeyValueCache::attention`] with the scores of sinks, as in
    /// [`attention_with_sinks`](crate::nn::attention_with_sinks()).
    ///
    /// # Errors
    /// Returns the errors of [`KeyValueCache::attention`]. Also fails if there is not one sink for each query head.
    pub fn attention_with_sinks(
        &mut self,
        qkv: [&Tensor; 3],
        sinks: &Tensor,
        n_head: usize,
        n_kv_head: usize,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        self.attention_with_optional_sinks(qkv, Some(sinks), (n_head, n_kv_head), options)
    }

    fn attention_with_optional_sinks(
        &mut self,
        [q, k, v]: [&Tensor; 3],
        sinks: Option<&Tensor>,
        (n_head, n_kv_head): (usize, usize),
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let h = grouped_heads(q, k, v, n_head, n_kv_head)?;
        self.check(&h, (k.dtype(), k.device().is_cpu()), &[q, k, v])?;
        check_sinks(sinks, n_head)?;
        let rule = causal_rule(options, &h)?;
        if !q.device().is_cpu() {
            return self.on_device(&h, [q, k, v], sinks, options);
        }
        let sinks = sinks.map(Tensor::detach);
        let scores = sinks.as_ref().map(wide_values).transpose()?;
        let rule = AttentionRule { sinks: scores.as_deref(), ..rule };
        let (q, k, v) = (q.contiguous()?.detach(), k.contiguous()?.detach(), v.contiguous()?.detach());
        let complete = || attention_with_optional_sinks(&q, &k, &v, sinks.as_ref(), (n_head, n_kv_head), options, None);
        let first = self.is_empty().then(complete).transpose()?;
        let (width, kv_width) = (h.heads * h.head, h.kv_heads * h.head);
        with_element!(q.dtype(), NAME, E => {
            with_all::<E, _, 3>([Some(&q), Some(&k), Some(&v)], NAME, |[q, k, v]| {
                self.attend((&h, &rule), [rows(q, width), rows(k, kv_width), rows(v, kv_width)], first)
            })
        })
    }

    /// Rejects inputs that do not match the cache.
    fn check(&self, h: &AttentionShape, (dtype, on_cpu): (DType, bool), inputs: &[&Tensor]) -> Result<()> {
        if !is_without_gradients() && inputs.iter().any(|input| input.track_op()) {
            bail!(
                "attention with a cache has no backward pass, but a graph of its input is being recorded; detach \
                 the input, or train with causal_attention or grouped_attention"
            )
        }
        let (len, time, limit) = (self.len, h.time, self.limit);
        if time > limit - len {
            bail!(
                "attention with a cache: {} after {len} {} the cache's limit of {limit}",
                counted(time, "position"),
                if time == 1 { "exceeds" } else { "exceed" }
            )
        }
        if len > 0 && on_cpu != self.host.is_some() {
            let [held, new] = if on_cpu { ["another device", "the CPU"] } else { ["the CPU", "another device"] };
            bail!("attention with a cache: it holds positions on {held}, but the new input is on {new}")
        }
        let new = CacheSizes::of(h, dtype);
        let on_device = || self.device.as_ref().map(|(sizes, _)| *sizes);
        let held = self.host.as_ref().map(|host| host.sizes).or_else(on_device);
        match held.filter(|held| len > 0 && *held != new) {
            Some(held) => bail!(
                "attention with a cache: it holds {held}, but the new input has {new}; each layer and each text needs \
                 its own cache"
            ),
            None => Ok(()),
        }
    }

    /// Caches new positions and returns their result, which is `first` if given.
    fn attend<E: TensorElement>(
        &mut self,
        (h, rule): (&AttentionShape, &AttentionRule<'_>),
        [q, k, v]: [MultiHeadRows<'_, E>; 3],
        first: Option<Tensor>,
    ) -> Result<Tensor> {
        let past_len = self.len;
        let HostCache { keys, values, capacity, .. } =
            self.reserve_host(CacheSizes::of(h, E::DTYPE), past_len + h.time);
        let (Some(keys), Some(values)) = (E::of_flat_mut(keys), E::of_flat_mut(values)) else {
            bail!("attention with a cache: its memory is not of dtype {:?}", E::DTYPE)
        };
        store_keys(h, k, past_len, keys);
        store_values(h, v, past_len, values);
        let result = match first {
            Some(result) => result,
            None => {
                let mut y = buffer::<E>(h.batch * h.time * h.heads * h.head);
                forward_cached((h, rule), q, KvCacheView { keys, values, capacity: *capacity, past_len }, &mut y);
                Tensor::from_vec(y, (h.batch, h.time, h.heads * h.head), &Device::Cpu)?
            }
        };
        self.len = past_len + h.time;
        Ok(result)
    }

    /// Returns the cache's memory, with room for this number of positions.
    fn reserve_host(&mut self, sizes: CacheSizes, positions: usize) -> &mut HostCache {
        self.device = None;
        let old = self.host.take().filter(|host| host.sizes == sizes);
        let host = match old {
            Some(host) if positions <= host.capacity => host,
            old => {
                let doubled = old.as_ref().map_or(0, |host| 2 * host.capacity);
                let mut host =
                    HostCache::new(sizes, capacity_for(positions.max(doubled).max(self.reserved).min(self.limit)));
                if let Some(old) = old {
                    host.copy_from(&old, self.len);
                }
                host
            }
        };
        self.host.insert(host)
    }

    /// Does the same as [`KeyValueCache::attend`] with Candle's operations, which copy keys and values when the cache
    /// grows.
    fn on_device(
        &mut self,
        h: &AttentionShape,
        [q, k, v]: [&Tensor; 3],
        sinks: Option<&Tensor>,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let after = |cached: &Tensor, new: &Tensor| Tensor::cat(&[&cached.narrow(1, 0, self.len)?, &new.detach()], 1);
        let (keys, values) = match &self.device {
            Some((_, [keys, values])) if !self.is_empty() => (after(keys, k)?, after(values, v)?),
            _ => (k.contiguous()?.detach(), v.contiguous()?.detach()),
        };
        let sinks = sinks.map(Tensor::detach);
        let all = [&q.detach(), &keys, &values];
        let y = composed::attention_with_optional_sinks(all, sinks.as_ref(), (h.heads, h.kv_heads), options, None)?;
        self.host = None;
        self.device = Some((CacheSizes::of(h, keys.dtype()), [keys, values]));
        self.len += h.time;
        Ok(y)
    }
}

/// Returns the attention rule in which no position sees a later one.
fn causal_rule(options: &AttentionOptions, h: &AttentionShape) -> Result<AttentionRule<'static>> {
    if options.bidirectional {
        bail!("{NAME}: bidirectional attention sees positions that the cache does not hold yet")
    }
    options.rule(h.head, None)
}

impl HostCache {
    fn new(sizes: CacheSizes, capacity: usize) -> Self {
        let len = sizes.batch * sizes.kv_heads * capacity * sizes.head;
        let [keys, values] = [(); 2].map(|()| Flat::zeros(sizes.dtype, len));
        Self { keys, values, capacity, sizes }
    }

    /// Copies the first `len` positions of a smaller cache.
    fn copy_from(&mut self, old: &Self, len: usize) {
        let CacheSizes { batch, kv_heads, head, dtype } = self.sizes;
        let position = head * dtype.size_in_bytes();
        for i in 0..batch * kv_heads {
            let bytes = |capacity: usize| i * capacity * position..(i * capacity + capacity_for(len)) * position;
            for (to, from) in [(&mut self.keys, &old.keys), (&mut self.values, &old.values)] {
                to.as_bytes_mut()[bytes(self.capacity)].copy_from_slice(&from.as_bytes()[bytes(old.capacity)]);
            }
        }
    }
}

const NAME: &str = "attention with a cache";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_other_devices_run_gives_the_same() {
        let h = AttentionShape { batch: 2, time: 9, heads: 4, kv_heads: 2, head: 6 };
        let numbers = |width: usize, seed: usize| {
            let number = move |i: usize| ((i * 7919 + seed) % 2003) as f32 / 500.0 - 2.0;
            Tensor::from_iter((0..2 * 9 * width).map(number), &Device::Cpu).unwrap().reshape((2, 9, width)).unwrap()
        };
        let (q, k, v) = (numbers(24, 1), numbers(12, 2), numbers(12, 3));
        let custom = AttentionOptions { scale: Some(0.3), soft_cap: Some(2.0), window: Some(4), bidirectional: false };
        let sinks = Tensor::new(&[0.5f32, -1.0, 2.0, 0.0], &Device::Cpu).unwrap();
        for (options, sinks) in [(AttentionOptions::default(), None), (custom, None), (custom, Some(&sinks))] {
            let (mut host, mut device) = (KeyValueCache::new(10), KeyValueCache::new(10));
            for (from, time) in [(0, 5), (5, 1), (6, 3)] {
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, from, time).unwrap());
                let (want, got) = (host.attention_with_optional_sinks([&q, &k, &v], sinks, (4, 2), &options), {
                    device.on_device(&AttentionShape { time, ..h }, [&q, &k, &v], sinks, &options)
                });
                let (want, got) = (want.unwrap(), got.unwrap());
                let difference = (got - want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(difference < 4e-6, "{from}: {difference}");
            }
            assert_eq!((host.len(), device.len()), (9, 9));
            assert_eq!(device.size_in_bytes(), 2 * 2 * 9 * 12 * 4);
            // The keys have the same width, but are those of other heads.
            let other_heads = AttentionShape { time: 1, heads: 8, kv_heads: 4, head: 3, ..h };
            let refusal = |cache: &KeyValueCache, h: &AttentionShape, on_cpu: bool| {
                let text = cache.check(h, (DType::F32, on_cpu), &[]).unwrap_err().to_string();
                crate::error::without_backtrace(&text)
            };
            let next = AttentionShape { time: 1, ..h };
            assert!(refusal(&host, &next, false).contains("positions on the CPU"));
            assert!(refusal(&device, &next, true).contains("positions on another device"));
            let [host, device] = [refusal(&host, &other_heads, true), refusal(&device, &other_heads, false)];
            assert!(device.contains("it holds") && device == host, "{device}");
        }
    }
}
