//! Parameter classes: every sub-group contains parameters of one class.

use crate::precision::{Nf4Scales, WeightPacking};
use candle_core::DType;

/// The role of the optimizer that trains a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum OptimizerRole {
    /// The main optimizer.
    Main,
    /// The auxiliary of the main optimizer.
    Auxiliary,
}

impl OptimizerRole {
    /// Both roles, in the order in which a group's parameters are numbered.
    pub const ALL: [Self; 2] = [Self::Main, Self::Auxiliary];
}

/// The format in which a parameter's weights are stored and communicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WeightFormat {
    /// The model's dtype, with master weights if that dtype has 16 bits and the weights are trained.
    Model,
    /// F32 in a 16-bit model.
    F32,
    /// Packed, if parameters are sharded.
    Packed(WeightPacking),
}

impl WeightFormat {
    /// Returns the dtype in which a model of `dtype` computes with weights in this format.
    pub fn dtype(self, dtype: DType) -> DType {
        if self == Self::F32 { DType::F32 } else { dtype }
    }

    /// Returns the packing, if the weights are packed.
    pub fn packing(self) -> Option<WeightPacking> {
        match self {
            Self::Packed(packing) => Some(packing),
            Self::Model | Self::F32 => None,
        }
    }

    /// The number of formats.
    const COUNT: usize = 5;

    fn index(self) -> usize {
        match self {
            Self::Model => 0,
            Self::F32 => 1,
            Self::Packed(WeightPacking::Int8) => 2,
            Self::Packed(WeightPacking::Nf4(Nf4Scales::Bf16)) => 3,
            Self::Packed(WeightPacking::Nf4(Nf4Scales::DoubleQuantized)) => 4,
        }
    }
}

/// The properties that all parameters of a sub-group share. Classes of trained parameters are ordered before those of
/// frozen ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SubGroupKey {
    training: ParamTraining,
    pub weights: WeightFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ParamTraining {
    /// Parameters with gradients, and with the states of the optimizer in this role.
    By(OptimizerRole),
    /// Parameters with weights only.
    Frozen,
}

impl SubGroupKey {
    /// The number of classes.
    pub const COUNT: usize = (OptimizerRole::ALL.len() + 1) * WeightFormat::COUNT;

    /// Returns the class of parameters that are trained by the optimizer in `role`, or frozen.
    pub fn new(role: OptimizerRole, is_trained: bool, weights: WeightFormat) -> Self {
        Self { training: if is_trained { ParamTraining::By(role) } else { ParamTraining::Frozen }, weights }
    }

    /// Returns the index of the class, counted from 0.
    pub fn index(self) -> usize {
        let training = self.role().map_or(OptimizerRole::ALL.len(), |role| role as usize);
        training * WeightFormat::COUNT + self.weights.index()
    }

    /// Returns the role of the optimizer that trains the parameters, or `None` if they are frozen.
    pub fn role(self) -> Option<OptimizerRole> {
        match self.training {
            ParamTraining::By(role) => Some(role),
            ParamTraining::Frozen => None,
        }
    }

    pub fn is_trained(self) -> bool {
        self.role().is_some()
    }

    /// Returns whether f32 master weights exist in addition to the weights that a model of `dtype` computes with.
    pub fn has_master(self, dtype: DType) -> bool {
        self.is_trained() && self.weights.dtype(dtype) != DType::F32
    }
}
