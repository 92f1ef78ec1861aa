//! The optimizer step of a rehearsal, as `zero/step.rs`, `zero/whole.rs` and `zero/walk.rs` make it, without values.

use super::files::{Stretch, Walk};
use super::gradients::GradientRehearsal;
use super::rehearsal::{Group, Rehearsal};
use crate::comm::{Kind as Collective, Wire};
use crate::layout::{BucketRule, PACKED_BELOW, shard_len};
use crate::memory::{Held, Kind};
use crate::optim::{Needs, Wholewise};
use crate::param::ParamId;
use crate::zero::parcel::Parcel;
use crate::zero::step::IN_FLIGHT;
use crate::zero::sub_group::Pass;
use crate::zero::whole::SQUARES_AT_A_TIME;
use candle_core::DType;
use std::cmp::Reverse;
use std::collections::VecDeque;

impl<'a> Rehearsal<'a> {
    /// The optimizer step.
    pub(super) fn step(&self, gradients: &mut GradientRehearsal<'_, 'a>) {
        gradients.written();
        // The norm of this rank's gradients, whether they are finite, and the loss.
        self.collective(Collective::Control, 3, DType::F64);
        let which = |wanted: fn(Needs<'_>) -> bool| -> Vec<&Group> {
            self.groups.iter().filter(|group| wanted(self.needs(group))).collect()
        };
        let norms = which(|needs| matches!(needs, Needs::Norms(_)));
        if !norms.is_empty() {
            self.pass(&norms, Pass::Look);
            for params in self.params.chunks(SQUARES_AT_A_TIME) {
                self.collective(Collective::Control, 2 * params.len(), DType::F64);
            }
        }
        let mut publisher = Publisher::new(self);
        let by_elements = which(|needs| !matches!(needs, Needs::Whole(_)));
        self.pass(&by_elements, Pass::Update);
        by_elements.iter().flat_map(|group| &group.params).for_each(|param| publisher.push(*param));
        self.update_whole(&mut publisher);
        publisher.finish();
        gradients.clear();
    }

    /// What the optimizer of a sub-group needs of its parameters.
    fn needs(&self, group: &Group) -> Needs<'_> {
        self.grouping.optimizer(group.role).map_or(Needs::Elements, |optimizer| optimizer.needs())
    }

    /// A walk through whole sub-groups.
    fn pass(&self, groups: &[&Group], pass: Pass) {
        let stretches: Vec<_> = groups.iter().map(|group| Stretch::of_group(self, group, pass)).collect();
        let mut walk = Walk::new(self, &stretches);
        stretches.iter().for_each(|_| walk.visit());
    }

    /// The parameters whose optimizer needs whole ones.
    fn update_whole(&self, publisher: &mut Publisher<'_, 'a>) {
        let mut items: Vec<(&Group, ParamId, &dyn Wholewise, u128)> = Vec::new();
        for group in &self.groups {
            let Needs::Whole(wholewise) = self.needs(group) else { continue };
            let cost = |param: ParamId| wholewise.cost(self.params[param].shape.dims());
            items.extend(group.params.iter().map(|param| (group, *param, wholewise, cost(*param))));
        }
        items.sort_by_key(|(.., cost)| Reverse(*cost));
        let stretches: Vec<Stretch> = items
            .chunks(self.world)
            .flat_map(|batch| {
                let of_pass = move |pass| {
                    batch
                        .iter()
                        .map(move |(group, param, ..)| Stretch::of_share(self, group, self.shares[*param].1, pass))
                };
                of_pass(Pass::Moments).chain(of_pass(Pass::Weights))
            })
            .collect();
        let mut walk = Walk::new(self, &stretches);
        for batch in items.chunks(self.world) {
            // This rank is the first, and keeps the first direction.
            let mut kept = None;
            for (owner, (_, param, ..)) in batch.iter().enumerate() {
                let direction = self.rough_direction(*param, &mut walk);
                if owner == 0 {
                    kept = Some(direction);
                }
            }
            if let [(_, param, wholewise, _), ..] = batch {
                let workspace = wholewise.workspace(self.params[*param].shape.dims());
                drop(self.ledger.hold(Kind::Buckets, workspace));
            }
            for (_, param, ..) in batch {
                let _direction = self.own_direction(*param, kept.take());
                walk.visit();
                publisher.push(*param);
            }
        }
    }

    fn rough_direction(&self, param: ParamId, walk: &mut Walk<'_, 'a>) -> Held {
        let (numel, sharded) = (self.params[param].numel, self.placement.optim.is_sharded());
        let shard = shard_len(numel, self.world);
        let held = self.ledger.hold(Kind::Buckets, 4 * shard * self.world);
        walk.visit();
        if sharded {
            self.collective(Collective::AllGather, shard, DType::F32);
        }
        held
    }

    fn own_direction(&self, param: ParamId, whole: Option<Held>) -> Held {
        let padded = shard_len(self.params[param].numel, self.world) * self.world;
        let held = whole.unwrap_or_else(|| self.ledger.hold(Kind::Buckets, 4 * padded));
        if self.placement.optim.is_sharded() {
            self.collective(Collective::ReduceScatter, padded, DType::F32);
        } else {
            self.collective(Collective::AllReduce, self.params[param].numel, DType::F32);
        }
        held
    }
}

/// Brings every rank's updated shards to all ranks, where parameters are whole.
struct Publisher<'r, 'a> {
    rank: &'r Rehearsal<'a>,
    publishes: bool,
    rule: BucketRule,
    batch: Vec<ParamId>,
    in_flight: VecDeque<Held>,
}

impl<'r, 'a> Publisher<'r, 'a> {
    fn new(rank: &'r Rehearsal<'a>) -> Self {
        Self {
            rank,
            publishes: rank.placement.optim.is_sharded() && !rank.placement.params.is_sharded(),
            rule: BucketRule::new(rank.config.zero.allgather_bucket_size),
            batch: Vec::new(),
            in_flight: VecDeque::new(),
        }
    }

    /// This rank's shard of a parameter is up to date.
    fn push(&mut self, param: ParamId) {
        if !self.publishes {
            return;
        }
        let numel = self.rank.params[param].numel;
        if numel >= PACKED_BELOW {
            return self.launch(vec![param]);
        }
        if self.rule.push(numel) {
            let batch = std::mem::take(&mut self.batch);
            self.launch(batch);
        }
        self.batch.push(param);
    }

    fn launch(&mut self, params: Vec<ParamId>) {
        let rank = self.rank;
        let chunk = Parcel::new(params, rank.params, rank.world, Wire::Exact).chunk;
        self.in_flight.push_back(rank.ledger.hold(Kind::Buckets, rank.bytes(chunk * rank.world)));
        rank.collective(Collective::AllGather, chunk, rank.dtype);
        while self.in_flight.len() > IN_FLIGHT - 1 {
            self.in_flight.pop_front();
        }
    }

    fn finish(mut self) {
        let batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.launch(batch);
        }
    }
}
