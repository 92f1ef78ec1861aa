//! Gradients in a rehearsal: as `zero/gradients.rs` collects, reduces and adds them up, without values.

use super::rehearsal::{Home, Rehearsal};
use crate::comm::Kind as Collective;
use crate::layout::{BucketRule, PACKED_BELOW, chunk_offsets};
use crate::memory::{Held, Kind};
use crate::offload::UNWRITTEN;
use crate::param::ParamId;
use crate::zero::gradients::IN_FLIGHT;
use std::collections::VecDeque;

/// Gradients of the micro step under way, and this rank's shares.
pub(super) struct GradientRehearsal<'r, 'a> {
    rank: &'r Rehearsal<'a>,
    rule: BucketRule,
    bucket: Vec<(ParamId, Held)>,
    /// Whole gradients that stay until backward is over.
    held: Vec<(ParamId, Held)>,
    in_flight: VecDeque<(Vec<ParamId>, Held)>,
    shares: Vec<Share>,
    /// Shares on their way to a file, as if no disk were fast enough to write one before it has to be waited for.
    unwritten: VecDeque<(ParamId, usize, Held)>,
}

/// A gradient's share.
enum Share {
    /// None has arrived since the last step.
    Absent,
    Memory(#[expect(dead_code, reason = "held for its Drop")] Held),
    File,
}

impl<'r, 'a> GradientRehearsal<'r, 'a> {
    pub fn new(rank: &'r Rehearsal<'a>) -> Self {
        Self {
            rank,
            rule: BucketRule::new(rank.config.zero.reduce_bucket_size),
            bucket: Vec::new(),
            held: Vec::new(),
            in_flight: VecDeque::new(),
            shares: rank.params.iter().map(|_| Share::Absent).collect(),
            unwritten: VecDeque::new(),
        }
    }

    /// A parameter's gradient is complete.
    pub fn arrive(&mut self, id: ParamId) {
        let kind = if self.rank.plan.hold { Kind::Gradients } else { Kind::Buckets };
        let bytes = self.rank.params[id].numel * self.rank.dtype.size_in_bytes();
        let held = self.rank.ledger.hold(kind, bytes);
        if self.rank.plan.hold { self.held.push((id, held)) } else { self.collect(id, held) }
    }

    /// Backward is over.
    pub fn end_backward(&mut self) {
        for (id, held) in std::mem::take(&mut self.held) {
            self.collect(id, held);
        }
        self.rule.reset();
        if !self.bucket.is_empty() {
            self.launch_bucket();
        }
        self.finish(0);
    }

    fn collect(&mut self, id: ParamId, held: Held) {
        let numel = self.rank.params[id].numel;
        if numel >= PACKED_BELOW {
            drop(held);
            return self.reduce(vec![id]);
        }
        if self.rule.push(numel) {
            self.launch_bucket();
        }
        self.bucket.push((id, held));
    }

    fn launch_bucket(&mut self) {
        // Gradients are dropped as they are packed.
        let params = std::mem::take(&mut self.bucket).into_iter().map(|(id, _)| id).collect();
        self.reduce(params);
    }

    fn reduce(&mut self, params: Vec<ParamId>) {
        let (rank, plan) = (self.rank, &self.rank.plan);
        let numels: Vec<usize> = params.iter().map(|p| rank.params[*p].numel).collect();
        let elements = chunk_offsets(&numels, rank.world, plan.wire.alignment()).1 * rank.world;
        let held = rank.ledger.hold(Kind::Buckets, elements * plan.dtype.size_in_bytes());
        rank.coded(
            if plan.scatter { Collective::ReduceScatter } else { Collective::AllReduce },
            elements,
            plan.dtype,
            plan.wire,
        );
        self.in_flight.push_back((params, held));
        self.finish(if plan.overlap { IN_FLIGHT - 1 } else { 0 });
    }

    /// Waits for the oldest reductions until at most `left` are under way, and adds them to this rank's share.
    fn finish(&mut self, left: usize) {
        while self.in_flight.len() > left {
            let Some((params, held)) = self.in_flight.pop_front() else { break };
            drop(held);
            params.into_iter().for_each(|id| self.accumulate(id));
        }
    }

    fn accumulate(&mut self, id: ParamId) {
        let (rank, dtype) = (self.rank, self.rank.plan.accumulate);
        let (group, share) = rank.shares[id];
        let bytes = share * dtype.size_in_bytes();
        let hold = || rank.ledger.hold(Kind::Gradients, bytes);
        match (rank.groups[group].states, &self.shares[id]) {
            (Home::File, known) => {
                if matches!(known, Share::File) {
                    // What is there is read, once it is written.
                    self.unwritten.retain(|(other, ..)| *other != id);
                    rank.traffic.borrow_mut().read(share, dtype);
                }
                self.shares[id] = Share::File;
                let held = hold();
                while !self.unwritten.is_empty()
                    && self.unwritten.iter().map(|u| u.1).sum::<usize>() + bytes > UNWRITTEN
                {
                    self.unwritten.pop_front();
                }
                self.unwritten.push_back((id, bytes, held));
                rank.traffic.borrow_mut().write(share, dtype);
            }
            (_, Share::Absent) => self.shares[id] = Share::Memory(hold()),
            _ => {}
        }
    }

    /// Everything on its way to files is there.
    pub fn written(&mut self) {
        self.unwritten.clear();
    }

    /// After an optimizer step: no gradients.
    pub fn clear(&mut self) {
        self.shares.fill_with(|| Share::Absent);
    }
}
