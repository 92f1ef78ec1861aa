//! Weights that lie on a GPU while the step that changes them runs on the host (ZeRO-Offload, arXiv 2101.06840).
//!
//! ```text
//!   master weights, moments, gradients on the host -> step -> new weights -> GPU, while the next piece is updated -> in their place
//!   without master weights: weights -> host, before the step
//! ```

use super::core::Core;
use super::moving::{Cargo, Moving, UPDATED_TOGETHER};
use super::rank::Rank;
use super::sub_group::{Home, Pass, lie_on_gpu};
use crate::cuda;
use crate::error::Result;
use crate::param::ParamId;
use crate::precision::{ElementBuffer, Flat, FlatMut};
use crate::tensor::device_elements::change;
use crate::tensor::flat_buffer::FlatBuffer;
use crate::tensor::host_slice::with_part;
use candle_core::CudaDevice;
use std::collections::VecDeque;
use std::ops::Range;

/// Pieces on their way at a time.
const IN_FLIGHT: usize = 1;

/// A pass through weights that lie on a GPU.
pub(super) struct Away<'a> {
    core: &'a Core,
    /// Where shards of weights are; nothing where weights are whole, in the parameters' tensors.
    home: Option<&'a mut Home>,
    device: &'a CudaDevice,
    pass: Pass,
    /// The step makes them anew, from master weights.
    made_anew: bool,
    under_way: VecDeque<(Place, Moving)>,
}

/// Some weights of a parameter.
#[derive(Clone)]
pub(super) struct Place {
    pub param: ParamId,
    /// The elements in the parameter's tensor, where it is whole.
    pub in_tensor: Range<usize>,
    /// The elements in the sub-group.
    pub in_group: Range<usize>,
}

impl<'a> Away<'a> {
    /// For the weights of a sub-group, which lie in its `home` or in the parameters' tensors. Where they are not on a GPU, or a pass
    /// does without them, gives their home back.
    pub fn of(
        core: &'a Core,
        home: &'a mut Option<Home>,
        pass: Pass,
        made_anew: bool,
    ) -> (Option<Self>, Option<&'a mut Home>) {
        let is_away = pass.has_weights() && lie_on_gpu(core, home.as_ref());
        let (home, under_way) = (home.as_mut(), VecDeque::new());
        match core.model_place.gpu() {
            Some(device) if is_away => (Some(Self { core, home, device, pass, made_anew, under_way }), None),
            _ => (None, home),
        }
    }

    /// Elements that are visited together. What is only looked at is looked at as a whole.
    pub fn piece(&self) -> usize {
        if self.pass.changes() { UPDATED_TOGETHER } else { usize::MAX }
    }

    /// Calls `visit` with weights on the host, and begins to bring them back if the pass changes them.
    pub fn visit(&mut self, place: Place, visit: impl FnOnce(FlatMut<'_>)) -> Result<()> {
        let mut weights = match self.made_anew {
            true => Flat::zeros(self.core.params[place.param].weights.dtype(self.core.dtype), place.in_group.len()),
            false => self.read(&place)?,
        };
        visit(weights.as_mut());
        if !self.pass.changes() {
            return Ok(());
        }
        let (len, weights) = (weights.len(), FlatBuffer::Host(weights));
        let moving = self.core.send(Cargo::Updates, weights, &self.core.model_place, len)?;
        self.under_way.push_back((place, moving));
        self.settle(IN_FLIGHT)
    }

    /// Waits until all weights are in their place.
    pub fn finish(mut self) -> Result<()> {
        self.settle(0)
    }

    /// Waits for the oldest until at most `left` are on their way, and puts them in their place.
    fn settle(&mut self, left: usize) -> Result<()> {
        while self.under_way.len() > left {
            let Some((place, moving)) = self.under_way.pop_front() else { break };
            let weights = moving.wait()?;
            let from = weights.on_device().part(0..weights.len())?;
            match &mut self.home {
                Some(Home::Memory(home)) => {
                    let to = home.buffer_mut().on_device_mut().part_mut(place.in_group)?;
                    cuda::copy(self.device, to, &from)?;
                }
                Some(Home::File(_)) => unreachable!("what lies in files is not away"),
                None => change(&self.core.params[place.param].tensor, |mut whole| {
                    cuda::copy(self.device, whole.part(place.in_tensor)?, &from)
                })?,
            }
        }
        Ok(())
    }

    fn read(&self, place: &Place) -> Result<Flat> {
        match &self.home {
            Some(Home::Memory(home)) => home.buffer().read(place.in_group.clone(), |values| values.to_flat()),
            Some(Home::File(_)) => unreachable!("what lies in files is not away"),
            None => {
                let (tensor, range) = (&self.core.params[place.param].tensor, place.in_tensor.clone());
                Ok(with_part(tensor, range, |values| values.to_flat())?)
            }
        }
    }
}
