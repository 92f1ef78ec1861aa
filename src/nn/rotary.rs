//! Rotary position embedding (Su et al. 2021).

use crate::graph::OpInputs;
use crate::kernels::{buffer, rope};
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::row_positions::RowPositions;
use crate::nn::{Sequences, composed, frequencies};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::util::{counted, is_or_are, lock};
use candle_core::{Result, Tensor, bail};
use std::fmt;
use std::sync::{Arc, Mutex};

pub use crate::kernels::rope::{RotaryLayout, RotaryPairs};

/// A rotation of the heads of a tensor by angles that are proportional to the position. The cosines and sines of the
/// angles are kept in tables, which are computed once, unless the frequencies depend on the length of the input.
#[derive(Debug, Clone)]
pub struct Rotary {
    ctx: usize,
    layout: RotaryLayout,
    angles: AngleSource,
}

/// A function that returns the frequencies, in radians per position, for an input with the given number of positions.
pub type FrequenciesOfLength = Arc<dyn Fn(usize) -> Result<Vec<f64>> + Send + Sync>;

/// A function that returns the factor of the cosines and sines at a position.
type PositionFactor = Arc<dyn Fn(usize) -> f64 + Send + Sync>;

#[derive(Debug, Clone)]
enum AngleSource {
    /// The angles are the same for all inputs.
    Fixed(Arc<AngleTable>),
    /// The angles depend on the length of the input.
    ByLength(Arc<AnglesByLength>),
}

/// The angles of every position.
struct AngleTable {
    frequencies: Vec<f64>,
    factor: PositionFactor,
    host: rope::RotaryTable,
    #[cfg(feature = "cuda")]
    on_gpu: on_gpu::rotary::AngleTables,
}

struct AnglesByLength {
    frequencies: FrequenciesOfLength,
    factor: PositionFactor,
    /// The most recently used tables; the latest is first.
    recent: Mutex<Vec<Arc<AngleTable>>>,
}

/// The number of tables that are kept for inputs of different lengths: those of short and of long inputs.
const RECENT_TABLES: usize = 2;

impl Rotary {
    /// Creates the tables for heads of `head` elements, an even number, at positions below `ctx`. The frequencies
    /// follow from `theta` (10000 in most models). As in most of Hugging Face's models, an element is paired with the
    /// element half a head away.
    ///
    /// # Errors
    /// A head size that is odd or 0, or a theta that is not a finite number above 0.
    pub fn new(head: usize, ctx: usize, theta: f64) -> Result<Self> {
        Self::from_frequencies(ctx, frequencies::default(head, theta)?)
    }

    /// Creates the tables for heads of twice as many elements as there are `frequencies` ([`crate::nn::frequencies`]),
    /// at positions below `ctx`.
    ///
    /// # Errors
    /// No frequencies, or a frequency that is NaN or infinite.
    pub fn from_frequencies(ctx: usize, frequencies: Vec<f64>) -> Result<Self> {
        Self::with(ctx, RotaryLayout::of_complete_heads(frequencies.len()), frequencies, |_| 1.0)
    }

    /// Creates the tables for heads with this layout, at positions below `ctx`. Each frequency belongs to a pair;
    /// elements beyond the pairs are not rotated. At position t, the rotated elements are also multiplied by
    /// `factor(t)`.
    ///
    /// # Errors
    /// No frequencies, more of them than a head has pairs, a frequency that is NaN or infinite, or an odd head size.
    pub fn with(
        ctx: usize,
        layout: RotaryLayout,
        frequencies: Vec<f64>,
        factor: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) -> Result<Self> {
        let table = AngleTable::new(ctx, layout, frequencies, Arc::new(factor))?;
        Ok(Self { ctx, layout, angles: AngleSource::Fixed(Arc::new(table)) })
    }

    /// Creates a rotation whose frequencies depend on the number of positions of the input, as in rope types "dynamic"
    /// and "longrope". In all other respects, it is the rotation of [`Rotary::with`]. For an input of several rows or
    /// sequences, the longest one counts.
    ///
    /// # Errors
    /// The errors of `frequencies` and of [`Rotary::with`], for an input of one position.
    pub fn by_length(
        ctx: usize,
        layout: RotaryLayout,
        frequencies: FrequenciesOfLength,
        factor: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) -> Result<Self> {
        let factor: PositionFactor = Arc::new(factor);
        AngleTable::new(1, layout, frequencies(1)?, factor.clone())?;
        let angles = AnglesByLength { frequencies, factor, recent: Mutex::default() };
        Ok(Self { ctx, layout, angles: AngleSource::ByLength(Arc::new(angles)) })
    }

    /// Returns `x` `[batch, time, heads * head]` with the heads at position t rotated by t times each pair's frequency.
    ///
    /// # Errors
    /// An input of a different shape; a position that is not below `ctx`; an error of the function given to
    /// [`Rotary::by_length`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_from(x, 0)
    }

    /// Computes [`Rotary::forward`] for an input that follows `first` positions: the heads at position t are rotated
    /// like those at `first + t`.
    ///
    /// # Errors
    /// The errors of [`Rotary::forward`].
    pub fn forward_from(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let length = first.saturating_add(x.dims().get(1).copied().unwrap_or(0));
        self.rotate(x, RowPositions::From(first), self.ctx.saturating_sub(first), first, length)
    }

    /// Computes [`Rotary::forward`] for packed rows: positions begin at 0 in each sequence.
    ///
    /// # Errors
    /// The errors of [`Rotary::forward`] for the longest sequence; sequences that do not match the batch.
    pub fn forward_in(&self, x: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let longest = sequences.longest();
        if longest > self.ctx {
            bail!("rotary: a sequence has {longest} positions, but there are angles for only {}", self.ctx)
        }
        if let [batch, time, _] = *x.dims() {
            sequences.check(NAME, batch, time)?;
        }
        self.rotate(x, RowPositions::Of(sequences.clone()), usize::MAX, 0, longest)
    }

    fn rotate(
        &self,
        x: &Tensor,
        positions: RowPositions,
        max_time: usize,
        first: usize,
        length: usize,
    ) -> Result<Tensor> {
        let head = self.layout.head;
        let (batch, time, width) = match *x.dims() {
            [batch, time, width] if width > 0 && width % head == 0 && time <= max_time => (batch, time, width),
            ref dims if max_time == usize::MAX => {
                bail!("rotary: the input has shape {dims:?}; it must be [batch, time, heads * {head}]")
            }
            ref dims => bail!(
                "rotary: the input has shape {dims:?}; it must be [batch, time, heads * {head}], where time is at most \
                 {max_time} (the input follows {})",
                counted(first, "position")
            ),
        };
        let table = self.angles.table_for(length, self.ctx, self.layout)?;
        #[cfg(feature = "cuda")]
        if let Some(y) = on_gpu::rotary::rotary(x, &table.on_gpu, &table.host, &positions)? {
            return Ok(y);
        }
        if !x.device().is_cpu() {
            let positions: Vec<usize> = (0..batch * time).map(|row| positions.at(row, time)).collect();
            return composed::rotary_with(x, self.layout, &table.frequencies, &positions, &*table.factor);
        }
        let x = x.contiguous()?;
        let inputs = OpInputs::of([Some(&x)])?;
        let shape = x.shape().clone();
        with_element!(x.dtype(), NAME, E => {
            let mut y = buffer::<E>(x.elem_count());
            with_elements::<E, _>(&x, NAME, |x| {
                table.host.forward(x, |row| positions.at(row, time), width, &mut y);
                Ok(())
            })?;
            inputs.result(NAME, E::storage(y), shape.clone(), move |grad, [to_x]| {
                to_x.make::<E>(grad.len(), |dx| {
                    grad.read::<E, _>(NAME, |dy| {
                        table.host.backward(dy, |row| positions.at(row, time), width, dx);
                        Ok(())
                    })
                })
            })
        })
    }
}

impl AngleSource {
    /// Returns the angles of an input of `length` positions, at most `ctx`.
    fn table_for(&self, length: usize, ctx: usize, layout: RotaryLayout) -> Result<Arc<AngleTable>> {
        let by_length = match self {
            Self::Fixed(table) => return Ok(table.clone()),
            Self::ByLength(by_length) => by_length,
        };
        let frequencies = (by_length.frequencies)(length)?;
        let mut recent = lock(&by_length.recent);
        let fits = |table: &Arc<AngleTable>| table.host.positions() >= length && table.frequencies == frequencies;
        let table = match recent.iter().position(fits) {
            Some(index) => recent.remove(index),
            None => {
                let positions = length.next_power_of_two().min(ctx).max(1);
                Arc::new(AngleTable::new(positions, layout, frequencies, by_length.factor.clone())?)
            }
        };
        recent.insert(0, table.clone());
        recent.truncate(RECENT_TABLES);
        Ok(table)
    }
}

impl AngleTable {
    fn new(positions: usize, layout: RotaryLayout, frequencies: Vec<f64>, factor: PositionFactor) -> Result<Self> {
        if frequencies.is_empty() || frequencies.iter().any(|frequency| !frequency.is_finite()) {
            bail!(
                "rotary: the frequencies are {frequencies:?}; each pair of elements of a head needs a finite frequency"
            )
        }
        let RotaryLayout { head, .. } = layout;
        if !head.is_multiple_of(2) || head / 2 < frequencies.len() {
            bail!(
                "rotary: heads have {}, but {} {} rotated; an even number of at least {} is needed",
                counted(head, "element"),
                counted(frequencies.len(), "pair"),
                is_or_are(frequencies.len()),
                2 * frequencies.len()
            )
        }
        let host = rope::RotaryTable::new(positions, layout, &frequencies, &*factor);
        Ok(Self {
            frequencies,
            factor,
            host,
            #[cfg(feature = "cuda")]
            on_gpu: on_gpu::rotary::AngleTables::default(),
        })
    }
}

impl fmt::Debug for AngleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AngleTable").field("frequencies", &self.frequencies).finish_non_exhaustive()
    }
}

impl fmt::Debug for AnglesByLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnglesByLength").finish_non_exhaustive()
    }
}

const NAME: &str = "rotary";
