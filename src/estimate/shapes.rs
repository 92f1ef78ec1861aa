//! Names, shapes and units of a model's parameters, without the parameters themselves.

use crate::config::Config;
use crate::error::{EngineError, ParamError, Result};
use crate::layout::ExpertPlacement;
use crate::models::{Gpt, GptConfig, Llama, LlamaConfig, preset_named};
use crate::optim::{Fp32Modules, WeightFormat};
use crate::param::{Param, WeightFiles};
use crate::precision::WeightPacking;
use crate::util::{counted, list, matches};
use crate::zero::expert_ranks::indivisible;
use crate::zero::gather::leaf_units::LeafUnits;
use crate::zero::gather::unit::building;
use crate::zero::rank_core::RegisteredModel;
use crate::zero::share::var_builder_backend::VarBuilderBackend;
use candle_core::{DType, Device, Shape};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::path::Path;
use std::sync::atomic::Ordering;

/// The parameters of a model in order of registration, with their units.
pub struct Shapes {
    name: String,
    registered: RegisteredModel,
    /// The storage format of packed parameters, and the rule that selects them among the frozen parameters; without a
    /// rule, matrices are packed.
    packing: Option<(WeightPacking, Option<ParameterFilter>)>,
    /// The rule that selects the parameters that are kept in f32 in a 16-bit model.
    kept_f32: Option<ParameterFilter>,
    assumptions: Vec<String>,
}

/// A predicate on the name and shape of a parameter.
type ParameterFilter = Box<dyn Fn(&str, &[usize]) -> bool>;

/// A rule for grouping the tensors of a file into units.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum UnitRule {
    /// Tensors whose names are equal up to and including their first number (`model.layers.7.`) form a unit.
    #[default]
    Numbered,
    /// Tensors with one of these prefixes and the same number after it form a unit.
    Prefixes(Vec<String>),
    /// There are no separate units: the model is one unit.
    None,
}

/// The nominal dtype of tensors without memory; shapes do not depend on it.
const DTYPE: DType = DType::F32;

impl Shapes {
    /// Returns the shapes of the model that `build` creates, with `name` as its display name. The tensors are absent,
    /// so `build` must not compute with them. The same restriction applies at stage 3.
    ///
    /// # Errors
    /// The error of `build`; a model without parameters.
    pub fn of<M>(name: &str, build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>) -> Result<Self> {
        let registry = VarBuilderBackend::of_shapes(DTYPE);
        let vb = VarBuilder::from_backend(Box::new(registry.clone()), DTYPE, Device::Cpu);
        building(&registry, || build(vb)).map_err(|e| registry.explain(e))?;
        Ok(Self {
            name: name.into(),
            registered: registry.finish()?,
            packing: None,
            kept_f32: None,
            assumptions: Vec::new(),
        })
    }

    /// Returns the shapes of a preset of [`crate::models`]; see [`GptConfig::preset_names`] and
    /// [`LlamaConfig::preset_names`].
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self> {
        let name = preset_named(name)?;
        if LlamaConfig::preset_names().any(|known| known == name) {
            let config = LlamaConfig::preset(name)?;
            return Self::of(name, |vb| Llama::new(&config, vb));
        }
        let config = GptConfig::preset(name)?;
        Self::of(name, |vb| Gpt::new(&config, vb))
    }

    /// Reads the shapes from a safetensors file, or from the files that an index (`model.safetensors.index.json`)
    /// names. Only headers are read, not weights. Every tensor counts as a parameter.
    ///
    /// # Errors
    /// A file that cannot be read or is not a safetensors file; a file without tensors.
    pub fn safetensors(path: impl AsRef<Path>, rule: &UnitRule) -> Result<Self> {
        let path = path.as_ref();
        let files = WeightFiles::open(path)?;
        let mut tensors: Vec<_> =
            files.tensors().map(|(name, tensor)| (name.to_owned(), tensor.shape().to_vec())).collect();
        // Numbers are compared by value: layer 10 comes after layer 2.
        tensors.sort_by_cached_key(|(name, _)| natural(name));
        let registry = VarBuilderBackend::of_shapes(DTYPE);
        let mut open_unit: Option<String> = None;
        for (name, shape) in tensors {
            let unit = rule.unit(&name);
            if unit != open_unit {
                if open_unit.is_some() {
                    registry.close_unit();
                }
                if let Some(unit) = &unit {
                    registry.open_unit(unit.clone());
                }
                open_unit = unit;
            }
            let zeros = Init::Const(0.0);
            registry.get(Shape::from(shape), &name, zeros, DTYPE, &Device::Cpu).map_err(|e| registry.explain(e))?;
        }
        let registered = registry.finish()?;
        let units = registered.units.len() - 1;
        let grouping = match rule {
            UnitRule::Numbered => "derived from the first number in the names",
            UnitRule::Prefixes(_) => "by the given prefixes",
            UnitRule::None => "as requested: the parameters are not grouped",
        };
        let assumptions = vec![
            "every tensor is a parameter, used in the natural order of the names".to_string(),
            format!("{}, {grouping}", counted(units, "unit")),
        ];
        Ok(Self { name: path.display().to_string(), registered, packing: None, kept_f32: None, assumptions })
    }

    /// Freezes the parameters whose names match one of `patterns`, in which `*` matches any characters, as with
    /// [`EngineBuilder::trainable`](crate::EngineBuilder::trainable). The others are trained.
    ///
    /// # Errors
    /// [`ParamError::NothingOfPattern`] for a pattern that matches no name; [`ParamError::AllOfPatterns`] if nothing
    /// would be trained.
    pub fn frozen(self, patterns: &[impl AsRef<str>]) -> Result<Self> {
        let params = &self.registered.params;
        let names = || params.iter().map(|param| param.name.as_str());
        for pattern in patterns.iter().map(AsRef::as_ref) {
            if !names().any(|name| matches(pattern, name)) {
                let names = list(&names().collect::<Vec<_>>());
                return Err(ParamError::NothingOfPattern { pattern: pattern.into(), names }.into());
            }
        }
        let is_frozen = |param: &Param| patterns.iter().any(|pattern| matches(pattern.as_ref(), &param.name));
        if params.iter().all(|param| is_frozen(param) || param.numel == 0) {
            let patterns = patterns.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
            return Err(ParamError::AllOfPatterns { patterns, count: params.len() }.into());
        }
        params.iter().for_each(|param| param.trained.store(!is_frozen(param), Ordering::Relaxed));
        Ok(self)
    }

    /// Packs frozen matrices in this format, as with [`EngineBuilder::quantized`](crate::EngineBuilder::quantized).
    /// Without this call, the configuration's `zero_quantized_nontrainable_weights` decides.
    #[must_use]
    pub fn quantized(self, packing: WeightPacking) -> Self {
        Self { packing: Some((packing, None)), ..self }
    }

    /// Packs the frozen parameters that `rule` selects by name and shape.
    #[must_use]
    pub fn quantized_by(self, packing: WeightPacking, rule: impl Fn(&str, &[usize]) -> bool + 'static) -> Self {
        Self { packing: Some((packing, Some(Box::new(rule)))), ..self }
    }

    /// Trains only the parameters that `rule` selects by name and shape, as with
    /// [`EngineBuilder::trainable`](crate::EngineBuilder::trainable).
    #[must_use]
    pub fn trainable(self, rule: impl Fn(&str, &[usize]) -> bool) -> Self {
        let params = &self.registered.params;
        params.iter().for_each(|param| param.trained.store(rule(&param.name, param.shape.dims()), Ordering::Relaxed));
        self
    }

    /// Freezes a parameter, in addition to those that are already frozen.
    #[must_use]
    pub(super) fn freeze(self, name: &str) -> Self {
        let matching = self.registered.params.iter().filter(|param| param.name == name);
        matching.for_each(|param| param.trained.store(false, Ordering::Relaxed));
        self
    }

    /// Keeps the parameters that `rule` selects by name and shape in f32, even in a 16-bit model, as with
    /// [`ParameterGroup::keep_f32`](crate::optim::ParameterGroup::keep_f32).
    #[must_use]
    pub fn keep_f32(self, rule: impl Fn(&str, &[usize]) -> bool + 'static) -> Self {
        Self { kept_f32: Some(Box::new(rule)), ..self }
    }

    /// Returns whether [`quantized`](Self::quantized) or [`quantized_by`](Self::quantized_by) has selected a format.
    pub fn is_quantized(&self) -> bool {
        self.packing.is_some()
    }

    /// Returns the display name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the assumptions that were made.
    pub fn assumptions(&self) -> &[String] {
        &self.assumptions
    }

    /// Returns the number of elements of all parameters.
    pub fn num_parameters(&self) -> usize {
        self.registered.params.iter().fold(0, |sum, p| sum.saturating_add(p.numel))
    }

    /// Returns the number of elements of the trained parameters.
    pub fn num_trained(&self) -> usize {
        self.registered.params.iter().filter(|p| p.is_trained()).fold(0, |sum, p| sum.saturating_add(p.numel))
    }

    /// Returns the number of elements of the largest unit. All parameters outside units count together as one unit.
    pub fn largest_unit(&self) -> usize {
        let mut elements = vec![0usize; self.registered.units.len()];
        let outermost = self.registered.leaves.outermost();
        self.registered.params.iter().for_each(|p| elements[outermost[p.unit]] += p.numel);
        elements.into_iter().max().unwrap_or(0)
    }

    /// Returns the number of units, without the one for all parameters outside units.
    pub fn num_units(&self) -> usize {
        self.registered.units.len() - 1
    }

    /// Returns the size in bytes of the buffers, which every rank has.
    pub fn buffer_bytes(&self) -> usize {
        self.registered.buffers.iter().map(|buffer| buffer.size()).sum()
    }

    /// Returns the parameters as `config` stores them, and the leaf units, marked as such in the model or named by
    /// `config`.
    ///
    /// # Errors
    /// [`ParamError::NoSuchModule`] for a module in `data_types.keep_in_fp32_modules` that does not exist;
    /// [`EngineError::ExpertParallel`] for experts that cannot be divided as `config` requests.
    pub(super) fn registered(&self, config: &Config) -> Result<(Vec<Param>, LeafUnits)> {
        let RegisteredModel { params, units, leaves, .. } = &self.registered;
        let mut leaves = leaves.clone();
        leaves.mark_named(units, &config.zero.leaf_module);
        let fp32_modules = Fp32Modules(&config.keep_in_fp32_modules);
        fp32_modules.check(self.registered.names())?;
        let config_packing = config.zero.quantized_nontrainable_weights.then_some((WeightPacking::Int8, None));
        let packing = self.packing.as_ref().or(config_packing.as_ref());
        let selects = |rule: &ParameterFilter, param: &Param| rule(&param.name, param.shape.dims());
        let packing = |param: &Param| {
            let (packing, rule) = packing.filter(|_| !param.is_trained())?;
            let is_packed = rule.as_ref().map_or(param.shape.rank() >= 2, |rule| selects(rule, param));
            is_packed.then_some(*packing)
        };
        let is_f32 = |param: &Param| {
            fp32_modules.keep(&param.name) || self.kept_f32.as_ref().is_some_and(|rule| selects(rule, param))
        };
        let weights = |param: &Param| match packing(param) {
            Some(packing) => WeightFormat::Packed(packing),
            None if is_f32(param) => WeightFormat::F32,
            None => param.weights,
        };
        let mut stored_params: Vec<Param> = params.iter().map(|param| param.for_estimate(weights(param))).collect();
        if config.expert_parallel_size > 1 {
            divide_experts(&mut stored_params, &leaves, config.expert_parallel_size)?;
        }
        Ok((stored_params, leaves))
    }
}

/// Divides the experts of each layer among `ranks` ranks, as an engine does.
fn divide_experts(params: &mut [Param], leaves: &LeafUnits, ranks: usize) -> Result<()> {
    let refused = |why: String| Err(EngineError::ExpertParallel { why }.into());
    let layers = leaves.routed_of(&*params);
    if layers.is_empty() {
        return refused(format!(
            "expert_parallel.autoep_size is {ranks}, but the model has no experts whose tensors are separate units"
        ));
    }
    for units in layers {
        let count = units.len();
        if !count.is_multiple_of(ranks) {
            return Err(indivisible(ranks, count, "a layer").into());
        }
        for param in params.iter_mut() {
            if let Ok(number) = units.binary_search(&param.unit) {
                param.expert = Some(ExpertPlacement::of(number, count, ranks));
            }
        }
    }
    Ok(())
}

impl std::fmt::Debug for Shapes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shapes").field("name", &self.name).field("parameters", &self.num_parameters()).finish()
    }
}

impl UnitRule {
    /// Returns the unit that a tensor belongs to.
    fn unit(&self, name: &str) -> Option<String> {
        let parts: Vec<&str> = name.split('.').collect();
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let up_to = |i: usize| parts[..=i].join(".");
        match self {
            Self::None => None,
            Self::Numbered => parts.iter().position(|part| is_number(part)).map(up_to),
            Self::Prefixes(prefixes) => {
                let numbers = (1..parts.len()).filter(|i| is_number(parts[*i]));
                numbers.map(|i| (up_to(i - 1), i)).find(|(start, _)| prefixes.contains(start)).map(|(_, i)| up_to(i))
            }
        }
    }
}

/// Returns a sort key that orders numbers in names by their value.
fn natural(name: &str) -> Vec<(u64, String)> {
    // Words come after numbers.
    name.split('.').map(|part| part.parse().map_or((u64::MAX, part.to_string()), |n| (n, String::new()))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ModelError;

    #[test]
    fn a_preset_has_its_published_parameters_and_a_unit_for_each_block() {
        for (name, parameters, units) in
            [("nano", 842_496, 4), ("gpt2-xl", 1_557_611_200, 48), ("llama-2-7b", 6_738_415_616, 32)]
        {
            let shapes = Shapes::preset(name).unwrap();
            assert_eq!((shapes.num_parameters(), shapes.num_units()), (parameters, units), "{name}");
        }
        assert!(matches!(Shapes::preset("gpt3").unwrap_err(), crate::Error::Model(ModelError::UnknownPreset { .. })));
    }

    #[test]
    fn units_of_names() {
        let unit = |rule: &UnitRule, name: &str| rule.unit(name).unwrap_or_default();
        let numbered = UnitRule::Numbered;
        assert_eq!(unit(&numbered, "model.layers.10.mlp.experts.3.w"), "model.layers.10");
        assert_eq!(unit(&numbered, "model.norm.weight"), "");
        let experts = UnitRule::Prefixes(vec!["model.layers.10.mlp.experts".into(), "h".into()]);
        assert_eq!(unit(&experts, "model.layers.10.mlp.experts.3.w"), "model.layers.10.mlp.experts.3");
        assert_eq!(unit(&experts, "h.7.ln_1.bias"), "h.7");
        assert_eq!(unit(&experts, "model.layers.2.norm"), "");
        let mut names = ["h.10.w", "wte", "h.2.w", "h.2.b"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(names, ["h.2.b", "h.2.w", "h.10.w", "wte"]);
    }
}
