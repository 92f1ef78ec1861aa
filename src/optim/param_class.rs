//! What is kept of a parameter, by which sub-groups are divided.

use crate::precision::{Nf4Scales, WeightPacking};
use candle_core::DType;

/// Which of an optimizer's two halves trains a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum OptimizerRole {
    /// The optimizer itself.
    Main,
    /// Its auxiliary.
    Auxiliary,
}

impl OptimizerRole {
    /// Both, in the order in which a group's halves are counted.
    pub const ALL: [Self; 2] = [Self::Main, Self::Auxiliary];
}

/// How a parameter's weights are held and travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WeightFormat {
    /// In the model's dtype; with master weights where that has 16 bits and they are trained.
    Model,
    /// In f32, in a 16-bit model.
    F32,
    /// Packed, where parameters are sharded.
    Packed(WeightPacking),
}

impl WeightFormat {
    /// The dtype that the model computes with, in a model of `dtype`.
    pub fn dtype(self, dtype: DType) -> DType {
        if self == Self::F32 { DType::F32 } else { dtype }
    }

    /// How they are packed.
    pub fn packing(self) -> Option<WeightPacking> {
        match self {
            Self::Packed(packing) => Some(packing),
            Self::Model | Self::F32 => None,
        }
    }

    /// Number of variants.
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

/// What the parameters of a sub-group have in common. In order: those that are trained, then the frozen ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ParamClass {
    training: ParamTraining,
    pub weights: WeightFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ParamTraining {
    /// Parameters with gradients, and the moments of their half of the optimizer.
    By(OptimizerRole),
    /// Weights and nothing else.
    Frozen,
}

impl ParamClass {
    /// Number of classes.
    pub const COUNT: usize = (OptimizerRole::ALL.len() + 1) * WeightFormat::COUNT;

    /// That of parameters which the half `role` trains, or frozen ones.
    pub fn new(role: OptimizerRole, is_trained: bool, weights: WeightFormat) -> Self {
        Self { training: if is_trained { ParamTraining::By(role) } else { ParamTraining::Frozen }, weights }
    }

    /// Its number, from 0.
    pub fn index(self) -> usize {
        let training = self.role().map_or(OptimizerRole::ALL.len(), |role| role as usize);
        training * WeightFormat::COUNT + self.weights.index()
    }

    /// The half of the optimizer that trains its parameters.
    pub fn role(self) -> Option<OptimizerRole> {
        match self.training {
            ParamTraining::By(role) => Some(role),
            ParamTraining::Frozen => None,
        }
    }

    pub fn is_trained(self) -> bool {
        self.role().is_some()
    }

    /// Whether there are f32 weights behind those that a model of `dtype` computes with.
    pub fn has_master(self, dtype: DType) -> bool {
        self.is_trained() && self.weights.dtype(dtype) != DType::F32
    }
}
