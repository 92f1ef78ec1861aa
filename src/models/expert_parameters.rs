//! The parameters of experts as adapters see them: for each projection, one parameter for all experts, whatever tensors
//! the files contain.

use super::decoder_mixture::{EXPERT_PARAMETERS, EXPERTS};
use super::{DecoderConfig, MixtureNaming};
use crate::nn::{LoraConfig, WeightLayout};
use std::ops::Range;

/// The part of a parameter of all experts that a tensor in a file contains.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(hidden)]
pub struct ExpertPart {
    /// The path of the module with the adapters of this parameter, if the settings select the parameter.
    pub adapter: Option<String>,
    /// The experts that the tensor belongs to: one, or all.
    pub experts: Range<usize>,
    /// The total number of experts.
    pub expert_count: usize,
    /// The range of the parameter's outputs that the tensor contains.
    pub outputs: Range<usize>,
    /// The number of inputs.
    pub inputs: usize,
    /// The layout of an expert's matrix.
    pub layout: WeightLayout,
}

impl DecoderConfig {
    /// Returns, for each sparse block, the names of the parameters of all experts. These parameters can have adapters.
    pub fn expert_parameters(&self) -> Vec<String> {
        let names_in = |block| self.expert_parameters_of(block);
        self.sparse_blocks().flat_map(names_in).collect()
    }

    fn expert_parameters_of(&self, block: usize) -> [String; 2] {
        EXPERT_PARAMETERS.map(|name| format!("{}layers.{block}.{EXPERTS}.{name}", self.prefix))
    }

    /// Returns the part of a parameter of all experts that the tensor `name` contains, with the module of that
    /// parameter's adapter according to the settings `lora`. Returns `None` for biases and other tensors.
    #[doc(hidden)]
    pub fn expert_part(&self, name: &str, lora: &LoraConfig) -> Option<ExpertPart> {
        let mixture = self.mixture.as_ref()?;
        let (block, rest) = name.strip_prefix(self.prefix)?.strip_prefix("layers.")?.split_once('.')?;
        let block = block.parse().ok().filter(|block| self.sparse_blocks().any(|sparse| sparse == *block))?;
        let rest = rest.strip_prefix(mixture.naming.module())?.strip_prefix(".experts.")?;
        let (d, width) = (self.hidden_size, mixture.expert_width);
        let parameters = self.expert_parameters_of(block);
        let module = parameters[0].strip_suffix(EXPERT_PARAMETERS[0])?;
        let adapters = lora.expert_wrappers(&parameters).map(|wrapper| {
            let path = format!("{module}{}", wrapper?);
            Some(path.trim_end_matches('.').to_owned())
        });
        let [gate_up_adapter, down_adapter] = adapters;
        let (experts, projection) = match mixture.naming.expert_tensor_names() {
            None => (0..mixture.experts, EXPERT_PARAMETERS.iter().position(|candidate| *candidate == rest)? * 2),
            Some(names) => {
                let (expert, module) = rest.strip_suffix(".weight")?.split_once('.')?;
                let expert = expert.parse().ok().filter(|expert| *expert < mixture.experts)?;
                (expert..expert + 1, names.iter().position(|candidate| *candidate == module)?)
            }
        };
        let is_fused = mixture.naming == MixtureNaming::GptOss;
        let layout = if is_fused { WeightLayout::InOut } else { WeightLayout::OutIn };
        let (adapter, outputs, inputs) = match projection {
            0 if is_fused => (gate_up_adapter, 0..2 * width, d),
            0 => (gate_up_adapter, 0..width, d),
            1 => (gate_up_adapter, width..2 * width, d),
            _ => (down_adapter, 0..d, width),
        };
        Some(ExpertPart { adapter, experts, expert_count: mixture.experts, outputs, inputs, layout })
    }
}
