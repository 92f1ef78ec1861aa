//! Leaf units, which are gathered together with all units inside them, whichever of these units a rank runs.
//!
//! Leaf units correspond to DeepSpeed's `z3_leaf_module`. The experts of a mixture are units that some ranks run and
//! others do not. If each were gathered separately, ranks would wait for different gathers. Nothing inside a leaf is
//! gathered separately: all ranks that enter the leaf gather everything in it, and gradients that a rank's experts did
//! not produce count as zeros.

use crate::config::{LeafModule, ZeroConfig};
use crate::param::{Param, UnitId};
use std::collections::{BTreeMap, BTreeSet};

/// The position of a unit relative to leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeafPosition {
    /// The unit is gathered separately, like any other unit.
    Outside,
    /// The unit is a leaf, and not inside another leaf.
    Leaf,
    /// The unit is in a leaf, and is gathered with it.
    Inside,
}

/// The nesting of units, and which of them are leaves.
#[derive(Debug, Clone)]
pub(crate) struct LeafUnits {
    /// The enclosing unit of each unit. The root encloses itself.
    enclosing: Vec<UnitId>,
    is_marked: Vec<bool>,
    /// For each routed unit (one that is gathered only if the input of its layer chose it), the first routed unit of
    /// that layer.
    routed: Vec<Option<UnitId>>,
}

impl Default for LeafUnits {
    /// Creates a set that has only the root.
    fn default() -> Self {
        Self { enclosing: vec![crate::param::ROOT], is_marked: vec![false], routed: vec![None] }
    }
}

impl LeafUnits {
    /// Adds a unit inside the unit `enclosing`. It gets the next number.
    pub fn push(&mut self, enclosing: UnitId) {
        self.enclosing.push(enclosing);
        self.is_marked.push(false);
        self.routed.push(None);
    }

    pub fn mark(&mut self, unit: UnitId) {
        self.is_marked[unit] = true;
    }

    /// Marks a unit as one that is gathered only if the input of a layer chose it. `first` is the first of the layer's
    /// routed units.
    pub fn mark_routed(&mut self, unit: UnitId, first: UnitId) {
        self.routed[unit] = Some(first);
    }

    /// Returns whether a unit is routed.
    pub fn is_routed(&self, unit: UnitId) -> bool {
        self.routed[unit].is_some()
    }

    /// Returns the routed units that these parameters belong to, layer by layer, without those in leaves.
    pub fn routed_of<'a>(&self, params: impl IntoIterator<Item = &'a Param>) -> Vec<Vec<UnitId>> {
        let outermost = self.outermost();
        let mut layers: BTreeMap<UnitId, BTreeSet<UnitId>> = BTreeMap::new();
        for param in params {
            if let Some(first) = self.routed[param.unit].filter(|_| outermost[param.unit] == param.unit) {
                layers.entry(first).or_default().insert(param.unit);
            }
        }
        layers.into_values().map(|units| units.into_iter().collect()).collect()
    }

    /// Returns, for each unit, the unit whose layer runs it: for a routed unit, the unit around it; for any other unit,
    /// the unit itself. Units in leaves are run by the leaf.
    pub fn running_units(&self) -> Vec<UnitId> {
        let outermost = self.outermost();
        let running_unit = |(unit, outer): (UnitId, &UnitId)| match self.routed[unit].is_some() {
            true => outermost[self.enclosing[unit]],
            false => *outer,
        };
        outermost.iter().enumerate().map(running_unit).collect()
    }

    /// Marks the units that the configuration selects. `units` has the names of all units. Returns the entries that
    /// match no unit.
    pub fn mark_named<'a>(&mut self, units: &[String], leaves: &'a LeafModule) -> Vec<&'a str> {
        let mut mark = |is_leaf: &dyn Fn(&str) -> bool| {
            let matching: Vec<UnitId> = (1..units.len()).filter(|unit| is_leaf(&units[*unit])).collect();
            matching.iter().for_each(|unit| self.mark(*unit));
            matching.is_empty()
        };
        let names = leaves.names.iter().filter(|name| mark(&|unit| unit == **name)).collect::<Vec<_>>();
        let suffixes = leaves.name_suffixes.iter().filter(|suffix| mark(&|unit| unit.ends_with(&***suffix)));
        names.into_iter().chain(suffixes).map(String::as_str).collect()
    }

    /// Returns the outermost leaf around each unit, or the unit itself if it is in no leaf.
    pub fn outermost(&self) -> Vec<UnitId> {
        let mut outermost: Vec<UnitId> = Vec::new();
        for (unit, enclosing) in self.enclosing.iter().enumerate() {
            // Outer units have smaller numbers.
            let is_in_leaf = *enclosing < unit && self.is_marked[outermost[*enclosing]];
            outermost.push(if is_in_leaf { outermost[*enclosing] } else { unit });
        }
        outermost
    }

    /// Returns the position of each unit.
    pub fn positions(&self) -> Vec<LeafPosition> {
        let position = |(unit, leaf): (UnitId, UnitId)| match (self.is_marked[leaf], unit == leaf) {
            (false, _) => LeafPosition::Outside,
            (true, true) => LeafPosition::Leaf,
            (true, false) => LeafPosition::Inside,
        };
        self.outermost().into_iter().enumerate().map(position).collect()
    }

    /// Returns, for each parameter, whether its gradient may be missing on some ranks in a backward pass.
    pub fn has_optional_gradient(&self, params: &[Param], zero: &ZeroConfig) -> Vec<bool> {
        let positions = self.positions();
        let is_optional =
            |param: &Param| zero.ignore_unused_parameters || positions[param.unit] != LeafPosition::Outside;
        params.iter().map(is_optional).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::LeafPosition::{Inside, Leaf, Outside};
    use super::*;

    /// Returns the root, a (with a.x, a.x.y and a.z inside), and b.
    fn nested() -> (LeafUnits, Vec<String>) {
        let mut leaves = LeafUnits::default();
        [0, 1, 2, 1, 0].into_iter().for_each(|enclosing| leaves.push(enclosing));
        (leaves, ["", "a", "a.x", "a.x.y", "a.z", "b"].map(String::from).to_vec())
    }

    #[test]
    fn all_that_lies_in_a_leaf_belongs_to_the_outermost() {
        let (mut leaves, _) = nested();
        assert_eq!(leaves.outermost(), [0, 1, 2, 3, 4, 5]);
        leaves.mark(2);
        assert_eq!(leaves.outermost(), [0, 1, 2, 2, 4, 5]);
        assert_eq!(leaves.positions(), [Outside, Outside, Leaf, Inside, Outside, Outside]);
        leaves.mark(1);
        assert_eq!(leaves.outermost(), [0, 1, 1, 1, 1, 5]);
        assert_eq!(leaves.positions(), [Outside, Leaf, Inside, Inside, Inside, Outside]);
    }

    #[test]
    fn routed_units_are_run_by_the_unit_around_them_or_by_its_leaf() {
        let (mut leaves, _) = nested();
        [2, 4].into_iter().for_each(|unit| leaves.mark_routed(unit, 2));
        assert_eq!(leaves.running_units(), [0, 1, 1, 3, 1, 5]);
        assert_eq!([1, 2, 4].map(|unit| leaves.is_routed(unit)), [false, true, true]);
        leaves.mark(1);
        assert_eq!(leaves.running_units(), [0, 1, 1, 1, 1, 5]);
    }

    #[test]
    fn leaves_are_named_whole_or_by_their_ending() {
        let (mut leaves, units) = nested();
        let strings = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
        let named = LeafModule { names: strings(&["b", "x"]), name_suffixes: strings(&[".z", "q"]) };
        assert_eq!(leaves.mark_named(&units, &named), ["x", "q"]);
        assert_eq!(leaves.positions(), [Outside, Outside, Outside, Outside, Leaf, Leaf]);
    }
}
