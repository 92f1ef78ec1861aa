//! Parameter groups: parameters with their own learning rate, weight decay or betas.
//!
//! ```text
//!   name, shape -> the first group that selects them, otherwise the rest -> the main optimizer, or its auxiliary
//! ```
//!
//! Groups are assigned while parameters are registered, because the optimizer states of a parameter depend on its
//! group. Then the empty groups are dropped, as in DeepSpeed, and the others are numbered.

use super::{
    FactoredOptimizer, Fp32Modules, Momentum, Optimizer, OptimizerNeeds, OptimizerRole, WeightAveraging, WeightFormat,
};
use crate::error::{OptimError, Result};
use crate::precision::WeightPacking;
use crate::util::matches;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Parameters with their own hyperparameters, for
/// [`EngineBuilder::parameter_groups`](crate::EngineBuilder::parameter_groups). A parameter belongs to the first group
/// that selects it. Parameters that no group selects form a last group, with the optimizer's own hyperparameters.
///
/// ```
/// use candle_zero::Engine;
/// use candle_zero::optim::ParameterGroup;
///
/// let groups = vec![
///     ParameterGroup::new().names(["*.bias"]).lr(2e-3).weight_decay(0.0),
///     ParameterGroup::no_decay(),
/// ];
/// let config =
///     r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}"#;
/// let builder = Engine::builder().parameter_groups(groups);
/// let engine = builder.initialize(|vb| candle_nn::linear(4, 1, vb.pp("head")), config)?;
/// // The second group is empty (the only vector is in the first group), so it is dropped.
/// assert_eq!(engine.lr(), [2e-3, 1e-3]);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ParameterGroup {
    names: Option<Vec<String>>,
    dims: Option<RangeInclusive<usize>>,
    use_muon: Option<bool>,
    lr: Option<f64>,
    overrides: GroupOverrides,
    is_frozen: bool,
    keeps_f32: bool,
}

/// The hyperparameters of a group that override the optimizer's own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct GroupOverrides {
    pub betas: Option<(f64, f64)>,
    pub eps: Option<f64>,
    pub weight_decay: Option<f64>,
    pub trust_ratio: Option<bool>,
}

impl ParameterGroup {
    /// Creates a group of all parameters, with the optimizer's own hyperparameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a group of all parameters with at most one dimension, such as norms and biases, without weight decay.
    pub fn no_decay() -> Self {
        Self::new().dims(0..=1).weight_decay(0.0)
    }

    /// Selects only parameters whose name matches one of `patterns`, in which `*` matches any characters, as in
    /// `h.*.ln_*`.
    #[must_use]
    pub fn names<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.names = Some(patterns.into_iter().map(Into::into).collect());
        self
    }

    /// Selects only parameters whose number of dimensions is in this range.
    #[must_use]
    pub fn dims(mut self, dims: RangeInclusive<usize>) -> Self {
        self.dims = Some(dims);
        self
    }

    /// Sets the learning rate that applies without a schedule, and on which some schedules are based (WarmupCosineLR,
    /// WarmupLR without `warmup_max_lr`). Other schedules give all groups the rates in the schedule's own parameters,
    /// as in DeepSpeed. The same applies to a custom schedule without [`lr_of_group`](super::LrSchedule::lr_of_group).
    #[must_use]
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = Some(lr);
        self
    }

    /// Sets the weight decay.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.overrides.weight_decay = Some(weight_decay);
        self
    }

    /// Sets the betas. They are an error if neither the optimizer nor its auxiliary has betas.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.overrides.betas = Some((beta1, beta2));
        self
    }

    /// Sets the number that an adaptive optimizer adds to its denominator (Adafactor: to the squares of gradients). It
    /// has no effect on optimizers without such a number (SGD, Lion).
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.overrides.eps = Some(eps);
        self
    }

    /// Sets whether LARS and Lamb multiply the learning rate of each parameter of this group by the parameter's trust
    /// ratio, which is the default. LARS is often used without it for norms and biases:
    /// `ParameterGroup::no_decay().trust_ratio(false)`. The setting has no effect on other optimizers.
    #[must_use]
    pub fn trust_ratio(mut self, trust_ratio: bool) -> Self {
        self.overrides.trust_ratio = Some(trust_ratio);
        self
    }

    /// Sets DeepSpeed's parameter attribute of this name: whether Muon or AdamW trains the matrices of this group,
    /// whatever their names. (Parameters that are not matrices are trained by AdamW.) Without this setting, matrices
    /// with `embed` or `lm_head` in their names are trained by AdamW, as in DeepSpeed, whereas GPT-2's embeddings,
    /// `wte` and `wpe`, are trained by Muon. The setting affects every optimizer with an
    /// [`auxiliary`](Optimizer::auxiliary), such as those with 8-bit states: with `false`, the auxiliary trains the
    /// parameters of this group. Other optimizers train all parameters themselves.
    #[must_use]
    pub fn use_muon(mut self, use_muon: bool) -> Self {
        self.use_muon = Some(use_muon);
        self
    }

    /// Freezes the parameters of this group: they have no gradients, master weights or optimizer states.
    /// [`Engine::set_trainable`](crate::Engine::set_trainable) can change that later.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        self.is_frozen = true;
        self
    }

    /// Keeps the parameters of this group, for example norms and routers, in f32 in a 16-bit model. This applies to the
    /// model's tensors, to their gradients and to the shards of the parameters. The parameters then have no master
    /// weights, and are gathered in f32. Their gradients are reduced in `communication_data_type`, like all others. The
    /// model must compute with tensors of both dtypes: layers of [`candle_zero::nn`](crate::nn) do, whereas
    /// candle-nn's need a cast around them. The corresponding configuration key is `data_types.keep_in_fp32_modules`.
    #[must_use]
    pub fn keep_f32(mut self) -> Self {
        self.keeps_f32 = true;
        self
    }

    fn selects(&self, name: &str, shape: &[usize]) -> bool {
        self.names.as_ref().is_none_or(|patterns| patterns.iter().any(|pattern| matches(pattern, name)))
            && self.dims.as_ref().is_none_or(|dims| dims.contains(&shape.len()))
    }

    /// Returns the problem with the group's hyperparameters, if any.
    fn problem(&self, optimizer: &dyn Optimizer) -> Option<String> {
        let GroupOverrides { betas, eps, weight_decay, trust_ratio: _ } = self.overrides;
        for (name, number) in [("lr", self.lr), ("weight_decay", weight_decay), ("eps", eps)] {
            if let Some(number) = number.filter(|n| !(0.0..f64::INFINITY).contains(n)) {
                return Some(format!("{name} is {number}; it must be a finite number of at least 0"));
            }
        }
        let (beta1, beta2) = betas?;
        // Kernels use the betas in f32.
        if [beta1, beta2].iter().any(|beta| !(0.0..1.0).contains(&(*beta as f32))) {
            return Some(format!("the betas are {beta1}, {beta2}; each must be at least 0 and below 1"));
        }
        let has_betas = |o: &dyn Optimizer| matches!(o.momentum(), Momentum::Betas(..));
        let any_has_betas = has_betas(optimizer) || optimizer.auxiliary().is_some_and(has_betas);
        (!any_has_betas).then(|| format!("it has betas, but {} has none; leave them out", optimizer.name()))
    }
}

/// A predicate on a parameter's name and shape, such as whether the parameter is trained.
pub(crate) type TrainableFilter = Arc<dyn Fn(&str, &[usize]) -> bool + Send + Sync>;

/// An engine's optimizer, and the rules that assign parameters to groups and freeze them.
#[derive(Default)]
pub(crate) struct ParameterGrouping {
    optimizer: Option<Arc<dyn Optimizer>>,
    user_groups: Vec<ParameterGroup>,
    trainable: Option<TrainableFilter>,
    quantized: Option<(WeightPacking, TrainableFilter)>,
    kept_modules: Vec<String>,
    /// A parameter of which this rank has a copy, and which another rank trains.
    copied: Option<String>,
}

/// The settings of a group that has parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupSettings {
    pub role: OptimizerRole,
    pub lr: Option<f64>,
    pub overrides: GroupOverrides,
}

impl ParameterGrouping {
    /// Checks and stores the optimizer and the given groups.
    ///
    /// # Errors
    /// [`OptimError::ParameterGroup`] for hyperparameters that the optimizer cannot work with; [`OptimError::States`]
    /// for names of states that a checkpoint cannot use.
    pub fn new(optimizer: Option<Arc<dyn Optimizer>>, user_groups: Vec<ParameterGroup>) -> Result<Self> {
        if let Some(optimizer) = &optimizer {
            for role_optimizer in [Some(&**optimizer), optimizer.auxiliary()].into_iter().flatten() {
                check_states(role_optimizer)?;
            }
            for (index, group) in user_groups.iter().enumerate() {
                if let Some(problem) = group.problem(&**optimizer) {
                    return Err(OptimError::ParameterGroup { index, problem }.into());
                }
            }
        }
        Ok(Self { optimizer, user_groups, ..Self::default() })
    }

    /// Trains only the parameters that `rule` selects.
    #[must_use]
    pub fn trainable(self, rule: Option<TrainableFilter>) -> Self {
        Self { trainable: rule, ..self }
    }

    /// Declares that another rank trains parameter `name`.
    #[must_use]
    pub fn copied(self, name: Option<String>) -> Self {
        Self { copied: name, ..self }
    }

    /// Packs the frozen parameters that `rule` selects.
    #[must_use]
    pub fn quantized(self, rule: Option<(WeightPacking, TrainableFilter)>) -> Self {
        Self { quantized: rule, ..self }
    }

    /// Returns whether frozen parameters are packed.
    pub fn packs(&self) -> bool {
        self.quantized.is_some()
    }

    /// Keeps the parameters of these modules in f32 in a 16-bit model, whatever their groups specify.
    #[must_use]
    pub fn keep_f32(self, modules: &[String]) -> Self {
        Self { kept_modules: modules.to_vec(), ..self }
    }

    /// Returns the modules that stay in f32, by name.
    pub fn kept_modules(&self) -> Fp32Modules<'_> {
        Fp32Modules(&self.kept_modules)
    }

    /// Returns the format of a parameter's weights. Packing takes precedence.
    pub fn weights(&self, name: &str, shape: &[usize]) -> WeightFormat {
        let packing = self.quantized.as_ref().filter(|(_, rule)| rule(name, shape)).map(|(packing, _)| *packing);
        let group = || self.user_groups.iter().find(|group| group.selects(name, shape));
        let keeps_f32 = || self.kept_modules().keep(name) || group().is_some_and(|group| group.keeps_f32);
        match packing {
            Some(packing) => WeightFormat::Packed(packing),
            None if keeps_f32() => WeightFormat::F32,
            None => WeightFormat::Model,
        }
    }

    /// Returns whether a parameter is trained at the start, on this rank.
    pub fn trains(&self, name: &str, shape: &[usize]) -> bool {
        self.copied.as_deref() != Some(name) && self.trains_rule()(name, shape)
    }

    /// Returns a predicate for the parameters that are trained at the start, on any rank.
    pub fn trains_rule(&self) -> TrainableFilter {
        let (user_groups, trainable) = (self.user_groups.clone(), self.trainable.clone());
        Arc::new(move |name, shape| {
            let group = user_groups.iter().find(|group| group.selects(name, shape));
            !group.is_some_and(|group| group.is_frozen) && trainable.as_ref().is_none_or(|rule| rule(name, shape))
        })
    }

    /// Returns the indices of the given groups that freeze parameters.
    pub fn freezing(&self) -> impl Iterator<Item = usize> + '_ {
        self.user_groups.iter().enumerate().filter(|(_, group)| group.is_frozen).map(|(index, _)| index)
    }

    /// Returns the number that identifies a parameter's group before groups are [settled](Self::settle).
    pub fn group(&self, name: &str, shape: &[usize]) -> usize {
        let index = self.user_groups.iter().position(|group| group.selects(name, shape));
        let use_muon = index.and_then(|i| self.user_groups[i].use_muon);
        let main = match (&self.optimizer, use_muon) {
            (Some(optimizer), Some(use_muon)) if optimizer.auxiliary().is_some() => {
                // The empty name stands for any name: only the shape decides.
                use_muon && optimizer.trains("", shape)
            }
            (Some(optimizer), _) => optimizer.auxiliary().is_none() || optimizer.trains(name, shape),
            (None, _) => true,
        };
        index.unwrap_or(self.user_groups.len()) * OptimizerRole::ALL.len() + usize::from(!main)
    }

    /// Returns the role of the optimizer that trains the parameters of a group that is not settled yet.
    pub fn role(group: usize) -> OptimizerRole {
        OptimizerRole::ALL[group % OptimizerRole::ALL.len()]
    }

    /// Returns the optimizer in a role.
    pub fn optimizer(&self, role: OptimizerRole) -> Option<&dyn Optimizer> {
        let optimizer = self.optimizer.as_deref()?;
        match role {
            OptimizerRole::Main => Some(optimizer),
            OptimizerRole::Auxiliary => optimizer.auxiliary(),
        }
    }

    /// Returns whether every optimizer computes an element from the element's own values only.
    pub fn updates_by_elements(&self) -> bool {
        let mut optimizers = OptimizerRole::ALL.into_iter().filter_map(|role| self.optimizer(role));
        optimizers.all(|optimizer| matches!(optimizer.needs(), OptimizerNeeds::Elements))
    }

    /// Returns the averaging of the optimizer in a role, if it averages weights.
    pub fn averaging(&self, role: OptimizerRole) -> Option<&dyn WeightAveraging> {
        self.optimizer(role)?.averaging()
    }

    /// Returns the optimizer in a role, if it has factored states.
    pub fn factored(&self, role: OptimizerRole) -> Option<&dyn FactoredOptimizer> {
        match self.optimizer(role)?.needs() {
            OptimizerNeeds::Factors(factored) => Some(factored),
            _ => None,
        }
    }

    /// Returns the names of the factored states of parameters that are trained in a role.
    pub fn factored_names(&self, role: OptimizerRole) -> &'static [&'static str] {
        self.factored(role).map_or(&[], |factored| factored.factored_names())
    }

    /// Returns the names of the states of parameters that are trained in a role.
    pub fn state_names(&self, role: OptimizerRole) -> &'static [&'static str] {
        self.optimizer(role).map_or(&[], |optimizer| optimizer.state_names())
    }

    /// Returns the names of all states, each once, in order.
    pub fn all_state_names(&self) -> Vec<&'static str> {
        let mut all = Vec::new();
        let names_of_role = |role| self.state_names(role).iter().chain(self.factored_names(role));
        for name in OptimizerRole::ALL.into_iter().flat_map(names_of_role) {
            if !all.contains(name) {
                all.push(*name);
            }
        }
        all
    }

    /// Drops the groups without parameters and numbers the others: the given ones in their order, then the rest. Within
    /// each, the main optimizer's parameters come first, then its auxiliary's. `groups` contains the number of each
    /// parameter's group: the old one on entry, the new one on return. `used` contains, in ascending order, the old
    /// numbers of the groups that have parameters, on this rank or another one. Also returns the indices of the given
    /// groups that are dropped.
    pub(super) fn settle(&self, mut groups: Vec<&mut usize>, used: &[usize]) -> (Vec<GroupSettings>, Vec<usize>) {
        for group in &mut groups {
            **group = used.binary_search(group).unwrap_or_else(|_| unreachable!("it is one of those used"));
        }
        let given_index = |group: &usize| group / OptimizerRole::ALL.len();
        let settled = used.iter().map(|group| {
            let ParameterGroup { lr, overrides, .. } =
                self.user_groups.get(given_index(group)).cloned().unwrap_or_default();
            GroupSettings { role: Self::role(*group), lr, overrides }
        });
        let empty = (0..self.user_groups.len()).filter(|index| !used.iter().any(|group| given_index(group) == *index));
        (settled.collect(), empty.collect())
    }
}

/// Checks the names of states, which become names in checkpoints.
fn check_states(optimizer: &dyn Optimizer) -> Result<()> {
    let mut names = optimizer.state_names().to_vec();
    if let OptimizerNeeds::Factors(factored) = optimizer.needs() {
        names.extend(factored.factored_names());
    }
    for (i, name) in names.iter().enumerate() {
        let problem = match *name {
            "" => "one has no name",
            "fp32" => "checkpoints call the weights fp32",
            name if names[..i].contains(&name) => "two have the same name",
            // A checkpoint's tensors are named STATE.PARAMETER.
            name if name.contains(['.', '\0']) => "a dot or a zero byte is not allowed in a name",
            _ => continue,
        };
        let (optimizer, names) = (optimizer.name().into(), names.join(", "));
        return Err(OptimError::States { optimizer, names, problem }.into());
    }
    Ok(())
}
