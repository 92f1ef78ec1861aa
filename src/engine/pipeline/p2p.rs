//! Activations and gradients as messages between the stages of a pipeline.
//!
//! ```text
//!   header   number of dimensions, dtype, position in the random stream, dimensions; each f32 carries 16 bits
//!   data     the elements, in row-major order
//! ```

use crate::comm::{Communicator, Pending};
use crate::error::{EngineError, Result};
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, MemoryTier};
use crate::pipeline::{PipelineMessage, PipelineSchedule};
use crate::precision::Flat;
use crate::tensor::residency::{storage_on, to_storage, with_view};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Tensor};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The maximum number of dimensions of an activation.
const MAX_DIMS: usize = 6;
/// The number of words of a header.
const WORDS: usize = 3 + MAX_DIMS;
/// The number of f32 elements that carry a word.
const PARTS: usize = 4;

/// The kind of a message between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BoundaryMessageKind {
    /// The output of a stage, for the next one.
    Activation,
    /// The gradient of a stage's input, for the previous stage.
    Gradient,
    /// The gradient of the rows that the first stage looks up in a tied weight, for the last stage.
    LookupGradient,
    /// The new values of a tied weight, for the first stage.
    TiedWeight,
    /// The output of the last stage in inference, for all ranks.
    Output,
}

/// An activation or its gradient, and the position in the random stream after the layers so far.
#[derive(Debug)]
pub(super) struct BoundaryTensor {
    pub tensor: Tensor,
    pub next_draw: u64,
    /// The entry in the ledger, unless the memory is that of a stage's output.
    #[allow(dead_code, reason = "held for its Drop")]
    pub memory: Option<MemoryLedgerEntry>,
}

/// A message on its way to another rank.
struct SentMessage {
    tag: u64,
    header: Pending<()>,
    data: Pending<()>,
    #[allow(dead_code, reason = "held for its Drop")]
    memory: MemoryLedgerEntry,
}

impl SentMessage {
    /// Waits until the message has been sent.
    fn wait(self) -> Result<()> {
        self.header.wait()?;
        self.data.wait()
    }
}

/// The messages of this rank's stages to and from other ranks.
pub(super) struct StageP2p {
    /// The ranks along the pipeline.
    comm: Arc<dyn Communicator>,
    device: Device,
    ledger: MemoryLedger,
    /// The messages on their way to other ranks, oldest first.
    sending: VecDeque<SentMessage>,
    /// The tags of the messages of this step that each rank will still send to this one, in the order of sending.
    expected: BTreeMap<usize, VecDeque<u64>>,
    /// The messages that have arrived but that this rank does not need yet, by tag.
    early: BTreeMap<u64, BoundaryTensor>,
}

impl StageP2p {
    pub fn new(comm: Arc<dyn Communicator>, device: Device, ledger: MemoryLedger) -> Self {
        let (sending, expected, early) = (VecDeque::new(), BTreeMap::new(), BTreeMap::new());
        Self { comm, device, ledger, sending, expected, early }
    }

    /// Begins a step: from now on, ranks send in the order of `schedule`, which may differ from the order in which this
    /// rank needs the messages.
    pub fn begin_step(&mut self, schedule: PipelineSchedule) {
        let rank = self.comm.rank();
        let tags = |from: usize| {
            schedule.messages(from, rank).into_iter().map(|PipelineMessage { is_gradient, boundary, micro_batch }| {
                let kind = if is_gradient { BoundaryMessageKind::Gradient } else { BoundaryMessageKind::Activation };
                tag(kind, boundary, micro_batch)
            })
        };
        self.early.clear();
        self.expected = (0..schedule.ranks()).map(|from| (from, tags(from).collect())).collect();
    }

    /// Sends the message of micro batch `micro_batch` that crosses the boundary before stage `boundary` to rank `to`.
    ///
    /// # Errors
    /// The tensor's values cannot be read, or an earlier message could not be sent.
    pub fn send(
        &mut self,
        message: BoundaryMessageKind,
        (boundary, micro_batch): (usize, usize),
        to: usize,
        BoundaryTensor { tensor, next_draw, .. }: &BoundaryTensor,
    ) -> Result<()> {
        while let Some(oldest) = self.sending.pop_front_if(|oldest| oldest.data.is_available()) {
            oldest.wait()?;
        }
        let (tag, dims) = (tag(message, boundary, micro_batch), tensor.dims());
        assert!(dims.len() <= MAX_DIMS, "{} dimensions", dims.len());
        let data = with_view(tensor, |values| values.to_flat())?;
        let mut words = [0; WORDS];
        words[..3].copy_from_slice(&[dims.len() as u64, code_of(data.dtype()), *next_draw]);
        words[3..].iter_mut().zip(dims).for_each(|(word, dim)| *word = *dim as u64);
        let memory = self.ledger.hold(MemoryKind::StageMessages, data.capacity_in_bytes());
        let header = self.comm.send(to, header_of(words), tag);
        self.sending.push_back(SentMessage { tag, header, data: self.comm.send(to, data, tag), memory });
        Ok(())
    }

    /// Receives the message of micro batch `micro_batch` that crosses the boundary before stage `boundary` from rank
    /// `from`.
    ///
    /// # Errors
    /// A rank has failed, or is in a different operation.
    pub fn receive(
        &mut self,
        message: BoundaryMessageKind,
        (boundary, micro_batch): (usize, usize),
        from: usize,
    ) -> Result<BoundaryTensor> {
        let wanted_tag = tag(message, boundary, micro_batch);
        let received = self.receive_with_tag(wanted_tag, from)?;
        if message == BoundaryMessageKind::Gradient {
            // The gradient depends on the activation, which has therefore arrived.
            let activation = tag(BoundaryMessageKind::Activation, boundary, micro_batch);
            if let Some(index) = self.sending.iter().position(|sent| sent.tag == activation) {
                self.sending.remove(index).map_or(Ok(()), SentMessage::wait)?;
            }
        }
        Ok(received)
    }

    fn receive_with_tag(&mut self, tag: u64, from: usize) -> Result<BoundaryTensor> {
        if let Some(arrived) = self.early.remove(&tag) {
            return Ok(arrived);
        }
        while let Some(next) = self.expected.get_mut(&from).and_then(VecDeque::pop_front).filter(|next| *next != tag) {
            let early = self.receive_next(from, next)?;
            self.early.insert(next, early);
        }
        self.receive_next(from, tag)
    }

    /// Receives the next message from rank `from`. The message must have the tag `tag`.
    fn receive_next(&self, from: usize, tag: u64) -> Result<BoundaryTensor> {
        let words = words_of(&self.comm.receive(from, DType::F32, WORDS * PARTS, tag).wait()?);
        let dims: Vec<usize> = words[3..][..words[0] as usize].iter().map(|dim| *dim as usize).collect();
        let (shape, dtype) = (Shape::from(dims), dtype_of(words[1]));
        let data = self.comm.receive(from, dtype, shape.elem_count(), tag).wait()?;
        let memory = self.record_memory(data.size_in_bytes());
        let storage = storage_on(&self.device, to_storage(data))?;
        let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        Ok(BoundaryTensor { tensor, next_draw: words[2], memory: Some(memory) })
    }

    /// Records that this rank holds `bytes` of a message in the memory of its device.
    pub fn record_memory(&self, bytes: usize) -> MemoryLedgerEntry {
        self.ledger.hold_in(MemoryTier::of(&self.device), MemoryKind::StageMessages, bytes)
    }

    /// Waits until all messages have been sent.
    pub fn finish(&mut self) -> Result<()> {
        self.finish_until(0)
    }

    /// Waits until all messages except the newest `messages` have been sent.
    pub fn finish_until(&mut self, messages: usize) -> Result<()> {
        while self.sending.len() > messages
            && let Some(oldest) = self.sending.pop_front()
        {
            oldest.wait()?;
        }
        Ok(())
    }
}

/// Checks that the output of `stage` can be the input of the next one.
pub(super) fn check_boundary(stage: usize, output: &Tensor) -> Result<()> {
    let Some(problem) = problem_of(output) else { return Ok(()) };
    let why = format!(
        "the output of stage {stage} has {problem}; merge this stage's last layer and the next layer into one layer, or \
         choose another pipeline.partition"
    );
    Err(EngineError::Pipeline { why }.into())
}

/// Checks that the last layer's output can be sent to all ranks.
pub(super) fn check_output(output: &Tensor) -> Result<()> {
    let Some(problem) = problem_of(output) else { return Ok(()) };
    let why = format!(
        "the output of the last layer has {problem}; use infer_batch_on_last_stage, which sends it to no other rank"
    );
    Err(EngineError::PipelineInference { why }.into())
}

/// Returns the reason why a tensor cannot be sent to another rank.
fn problem_of(tensor: &Tensor) -> Option<String> {
    let (dtype, dims) = (tensor.dtype(), tensor.dims().len());
    match matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        true if dims <= MAX_DIMS => None,
        true => Some(format!("{dims} dimensions, but at most {MAX_DIMS} are supported")),
        false => Some(format!("the dtype {dtype:?}, but only f32, bf16 and f16 are supported")),
    }
}

/// Returns the tag of a message, which both sides compute.
fn tag(message: BoundaryMessageKind, boundary: usize, micro_batch: usize) -> u64 {
    (message as u64) << 60 | (boundary as u64 & 0xf_ffff) << 40 | (micro_batch as u64 & 0xff_ffff_ffff)
}

fn code_of(dtype: DType) -> u64 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

fn dtype_of(code: u64) -> DType {
    match code {
        1 => DType::BF16,
        2 => DType::F16,
        _ => DType::F32,
    }
}

/// Returns words as f32 elements that carry 16 bits each.
fn header_of(words: [u64; WORDS]) -> Flat {
    let parts = words.into_iter().flat_map(|word| (0..PARTS).map(move |part| (word >> (16 * part) & 0xffff) as f32));
    Flat::from(parts.collect::<Vec<_>>())
}

fn words_of(header: &Flat) -> [u64; WORDS] {
    let part = |word: usize, part: usize| (header.as_ref().get(PARTS * word + part) as u64) << (16 * part);
    std::array::from_fn(|word| (0..PARTS).map(|at| part(word, at)).sum())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::comm::threads;
    use crate::memory::HeldBytes;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_has_the_words_that_it_was_made_of(words in proptest::array::uniform9(any::<u64>())) {
            prop_assert_eq!(words_of(&header_of(words)), words);
        }
    }

    #[test]
    fn a_tensor_crosses_a_boundary_with_its_shape_dtype_and_bits() {
        let tensor = |dtype| {
            let values = (0..24).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>();
            Tensor::from_vec(values, (2, 3, 4), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
        };
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        let results = threads::run(2, |comm| {
            let ledger = MemoryLedger::default();
            let mut boundaries = StageP2p::new(comm.clone(), Device::Cpu, ledger.clone());
            for (micro_batch, dtype) in dtypes.into_iter().enumerate() {
                let (key, message) =
                    ((1, micro_batch), BoundaryTensor { tensor: tensor(dtype), next_draw: u64::MAX - 7, memory: None });
                if comm.rank() == 0 {
                    boundaries.send(BoundaryMessageKind::Activation, key, 1, &message)?;
                    continue;
                }
                let arrived = boundaries.receive(BoundaryMessageKind::Activation, key, 0)?;
                assert_eq!((arrived.tensor.dims(), arrived.tensor.dtype()), (&[2, 3, 4][..], dtype));
                let bits =
                    |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>();
                assert_eq!(bits(&arrived.tensor).unwrap(), bits(&message.tensor).unwrap());
                assert_eq!(arrived.next_draw, u64::MAX - 7);
            }
            boundaries.finish()?;
            // Rank 1 used each tensor before it received the next one.
            let HeldBytes { held, peak } = ledger.bytes(MemoryKind::StageMessages);
            assert_eq!((held, comm.rank() == 0 || peak == 24 * 4), (0, true));
            Ok(())
        });
        results.unwrap().into_iter().for_each(|result| result.unwrap());
    }
}
