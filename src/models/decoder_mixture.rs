//! The mixture of experts of a sparse block.

use super::decoder_mlp::Mlp;
use super::{DecoderConfig, MixtureConfig, MixtureNaming};
use crate::nn::{
    ExpertAdapter, ExpertMlp, ExpertProjection, ExpertTensors, GateUpOrder, GradientCheckedRouter, LoraConfig,
    Projection, Routing, WeightLayout, add_gated, linear, normal,
};
use crate::zero::{RoutedUnits, routed_units};
use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder, init};

/// A mixture of experts: y = the weighted sum of the chosen experts, plus the shared expert times its gate.
///
/// The parameters have the names and shapes of the files ([`MixtureNaming`]): one for each expert and projection, or
/// one for all experts per projection.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    router: Router,
    experts: ExpertMlp,
    shared: Option<SharedExpert>,
}

/// The linear layer whose outputs are the logits of the experts.
#[derive(Debug, Clone)]
struct Router {
    weight: Tensor,
    bias: Option<Tensor>,
    choices: GradientCheckedRouter,
}

/// An expert through which every token passes.
#[derive(Debug, Clone)]
struct SharedExpert {
    mlp: Mlp,
    gate: Projection,
}

/// The names that transformers gives, in memory, to the parameters that contain all experts. Adapters of experts are
/// named after these parameters.
pub(super) const EXPERT_PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];
/// The path, within a block, of the module with the [`EXPERT_PARAMETERS`], whatever their names in files.
pub(super) const EXPERTS: &str = "mlp.experts";

impl Mixture {
    /// Builds the mixture of a block of `config`; `vb` is the block's builder.
    pub fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let Some(mixture) = &config.mixture else {
            candle_core::bail!("{}: a sparse block needs the sizes of a mixture", vb.prefix())
        };
        let (module, d) = (vb.pp(mixture.naming.module()), config.hidden_size);
        let router_vb = module.pp(mixture.naming.router());
        let router = Router {
            weight: router_vb.get_with_hints((mixture.experts, d), "weight", normal(config.initial_std(false)))?,
            bias: match mixture.naming.has_biases() {
                true => Some(router_vb.get_with_hints(mixture.experts, "bias", init::ZERO)?),
                false => None,
            },
            choices: GradientCheckedRouter::new(mixture.router),
        };
        let (gate_up, down, units) = projections(config, mixture, &module.pp("experts"))?;
        let adapters =
            ExpertAdapterBuilder { lora: config.lora.as_ref(), experts: mixture.experts, vb: vb.pp(EXPERTS) };
        let [first, second] = adapters.build([[d, 2 * mixture.expert_width], [mixture.expert_width, d]])?;
        let adapted = |projection: ExpertProjection, adapter: Option<ExpertAdapter>| match adapter {
            Some(adapter) => projection.with_adapter(adapter),
            None => Ok(projection),
        };
        let order = match mixture.naming {
            MixtureNaming::GptOss => GateUpOrder::Interleaved,
            MixtureNaming::Mixtral | MixtureNaming::Qwen => GateUpOrder::Halves,
        };
        let experts = ExpertMlp::new(adapted(gate_up, first)?, adapted(down, second)?, mixture.gate, order)?;
        let experts = match units {
            Some(units) => experts.with_units(units)?,
            None => experts,
        };
        let shared = mixture.shared_width.map(|width| {
            Ok::<_, candle_core::Error>(SharedExpert {
                mlp: Mlp::new(config, width, &module.pp("shared_expert"))?,
                gate: config.projection("shared_expert_gate", [d, 1], false, false, &module)?,
            })
        });
        Ok(Self { router, experts, shared: shared.transpose()? })
    }

    /// Applies the mixture to `x` `[batch, time, hidden_size]`, and returns the choices of its router, too.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Routing)> {
        let logits = linear(x, &self.router.weight, self.router.bias.as_ref(), WeightLayout::OutIn)?;
        let routing = self.router.choices.route(&logits)?;
        let y = self.experts.forward(x, &routing)?;
        let y = match &self.shared {
            Some(shared) => add_gated(&y, &shared.gate.forward(x)?, &shared.mlp.forward(x)?)?,
            None => y,
        };
        Ok((y, routing))
    }
}

/// Builds the two projections of all experts: to gate and up, and to the output. If each expert has separate tensors,
/// the expert is a unit, which is gathered only if a row chose the expert.
fn projections(
    config: &DecoderConfig,
    mixture: &MixtureConfig,
    vb: &VarBuilder<'_>,
) -> Result<(ExpertProjection, ExpertProjection, Option<RoutedUnits>)> {
    let (d, width, experts) = (config.hidden_size, mixture.expert_width, mixture.experts);
    let (to_inner, to_output) = (normal(config.initial_std(false)), normal(config.initial_std(true)));
    let Some(names) = mixture.naming.expert_tensor_names() else {
        let fused = |shape: [usize; 3], name: &str, init: Init| {
            let weight = vb.get_with_hints(&shape[..], name, init)?;
            let bias = vb.get_with_hints((experts, shape[2]), &format!("{name}_bias"), init::ZERO)?;
            let [weight, bias] = [weight, bias].map(|tensor| vec![ExpertTensors::Fused(tensor)]);
            ExpertProjection::new(weight, bias, WeightLayout::InOut)
        };
        let [gate_up, down] = EXPERT_PARAMETERS;
        let gate_up = fused([experts, d, 2 * width], gate_up, to_inner)?;
        return Ok((gate_up, fused([experts, width, d], down, to_output)?, None));
    };
    // The parameters of an expert follow one another, as in files.
    let (expert_tensors, units) = routed_units(vb.clone(), experts, |_, vb| {
        let shapes = [(width, d, to_inner), (width, d, to_inner), (d, width, to_output)];
        let tensors = names
            .into_iter()
            .zip(shapes)
            .map(|(name, (outputs, inputs, init))| vb.pp(name).get_with_hints((outputs, inputs), "weight", init));
        tensors.collect::<Result<Vec<Tensor>>>()
    })?;
    let separate =
        |part: usize| ExpertTensors::Separate(expert_tensors.iter().map(|tensors| tensors[part].clone()).collect());
    let projection = |weights| ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn);
    Ok((projection(vec![separate(0), separate(1)])?, projection(vec![separate(2)])?, Some(units)))
}

/// A builder of the adapters of a block's experts, with PEFT's names: the adapter of the first adapted parameter wraps
/// the module, and the adapter of the next parameter wraps the first adapter.
struct ExpertAdapterBuilder<'a> {
    lora: Option<&'a LoraConfig>,
    experts: usize,
    vb: VarBuilder<'a>,
}

impl ExpertAdapterBuilder<'_> {
    /// Builds the adapters of those [`EXPERT_PARAMETERS`] that the settings select. `sizes` contains the numbers of
    /// inputs and outputs of each.
    fn build(&self, sizes: [[usize; 2]; 2]) -> Result<[Option<ExpertAdapter>; 2]> {
        let mut adapters = [None, None];
        let Some(lora) = self.lora else { return Ok(adapters) };
        let names = EXPERT_PARAMETERS.map(|name| format!("{}.{name}", self.vb.prefix()));
        let wrappers = lora.expert_wrappers(&names);
        for ((adapter, wrapper), [inputs, outputs]) in adapters.iter_mut().zip(wrappers).zip(sizes) {
            let Some(wrapper) = wrapper else { continue };
            let vb = wrapper.split('.').filter(|part| !part.is_empty()).fold(self.vb.clone(), |vb, part| vb.pp(part));
            let (rows, bound) = (self.experts * lora.r, 1.0 / (inputs as f64).sqrt());
            let a = Init::Uniform { lo: -bound, up: bound };
            *adapter = Some(ExpertAdapter {
                a: vb.pp("lora_A").get_with_hints((rows, inputs), "weight", a)?,
                b: vb.pp("lora_B").get_with_hints((outputs, rows), "weight", init::ZERO)?,
                scale: lora.scale(),
            });
        }
        Ok(adapters)
    }
}
