//! Decides when an exchange can be closed, and closes it.

use super::super::frame::{Frame, FrameKind};
use super::super::membership_log::{IslandEvent, RecordedRound, Replay, RoundMember};
use super::super::messages::{MeanHead, RoundKey};
use super::{IslandState, Membership, RankPseudoGradient, ServerAction, json};
use crate::util::counted;
use std::sync::Arc;
use twox_hash::XxHash3_64;

impl Membership {
    /// Returns whether all ranks of an island have sent their changes.
    pub(super) fn is_complete(&self, key: RoundKey, slot: usize) -> bool {
        let changes = self.rounds.get(&key).and_then(|round| round.get(&slot));
        changes.is_some_and(|changes| changes.iter().all(Option::is_some))
    }

    /// Closes the exchanges that wait for no other island.
    pub(super) fn advance(&mut self) {
        loop {
            if self.members().is_empty() {
                self.form_again();
            }
            if !self.is_running && !self.is_formed() {
                return;
            }
            let Some(key) = self.rounds.keys().next().copied() else { return };
            let ready = match self.replay.rounds.front().cloned() {
                Some(recorded) => self.is_as_recorded(key, &recorded),
                None => self.is_ready(key),
            };
            match ready {
                // The membership has changed.
                None => {}
                Some(false) => return,
                Some(true) => self.close(key),
            }
        }
    }

    /// Lets the waiting islands begin without a donor, because no member is left.
    pub(super) fn form_again(&mut self) {
        self.rounds.clear();
        (self.is_running, self.donation, self.last_closed) = (false, None, None);
        if self.is_replay && !self.replay.rounds.is_empty() {
            return self.forget_an_empty_run();
        }
        let waiting: Vec<usize> = self.islands.keys().copied().collect();
        for slot in waiting {
            if let Some(island) = self.islands.get_mut(&slot) {
                island.state = IslandState::Member { since: None };
                island.last.fill(None);
            }
            self.actions.push(ServerAction::Record(IslandEvent::Begin { slot }));
            self.send_to_island(slot, &Frame::new(FrameKind::Begin, Vec::new()));
            self.print(format!("island {slot} begins: no other island is left"));
        }
        self.forget_an_empty_run();
    }

    pub(super) fn forget_an_empty_run(&mut self) {
        if self.islands.is_empty() && self.assembling.is_empty() {
            (self.shape, self.has_ended) = (None, false);
            self.lens.clear();
        }
    }

    /// Returns whether the first exchange can be closed. Islands that have taken fewer steps than the furthest island
    /// are removed and asked to start again; they then join.
    fn is_formed(&mut self) -> bool {
        let members = self.members();
        if self.is_replay && !self.replay.rounds.is_empty() {
            return true;
        }
        let required = if self.has_ended { 1 } else { self.shape.as_ref().map_or(1, |shape| shape.min_islands) };
        let first_round =
            |slot: &usize| self.rounds.iter().find(|(_, round)| round.contains_key(slot)).map(|(key, _)| *key);
        let first_rounds: Vec<Option<RoundKey>> = members.iter().map(first_round).collect();
        let complete = |(slot, key): (&usize, &Option<RoundKey>)| key.is_some_and(|key| self.is_complete(key, *slot));
        if !members.iter().zip(&first_rounds).all(complete) {
            return false;
        }
        if members.len() < required {
            if !members.is_empty() && self.noticed_members != members.len() {
                self.noticed_members = members.len();
                let missing = counted(required - members.len(), "more island");
                let notice = format!("the first exchange waits for {missing} (local_steps.min_islands)");
                let frame = Frame::new(FrameKind::Notice, notice.into_bytes());
                members.iter().for_each(|slot| self.send_to_island(*slot, &frame));
            }
            return false;
        }
        self.is_running = true;
        let furthest = first_rounds.iter().copied().max().flatten();
        for (slot, _) in members.iter().zip(first_rounds).filter(|(_, first)| *first < furthest) {
            let why = format!(
                "it is behind: the first exchange of the others is after step {}; start it again, and it joins them \
                 (zerorun --max_restarts does so)",
                furthest.map_or(0, |key| key.step)
            );
            self.remove_one(*slot, &why, Some(&why));
        }
        true
    }

    /// Returns whether every island that an exchange needs has sent its change; `None` if an island was removed.
    fn is_ready(&mut self, key: RoundKey) -> Option<bool> {
        let needed = self.islands.iter().filter(|(_, island)| island.state.is_needed_in(key));
        let missing: Vec<usize> = needed.map(|(slot, _)| *slot).filter(|slot| !self.is_complete(key, *slot)).collect();
        if let Some(slot) = missing.iter().find(|slot| self.has_skipped(key, **slot)) {
            let why =
                format!("it has skipped the exchange after step {}; start the same program for all islands", key.step);
            self.remove_one(*slot, &why, Some(&why));
            return None;
        }
        match missing.is_empty() {
            true => self.agrees_on_weights(key),
            false => Some(false),
        }
    }

    /// Returns whether a rank of an island has sent a later change but not its change for this exchange.
    fn has_skipped(&self, key: RoundKey, slot: usize) -> bool {
        let changes = self.rounds.get(&key).and_then(|round| round.get(&slot));
        let has_sent = |position: usize| changes.is_some_and(|changes| changes[position].is_some());
        let last = self.islands[&slot].last.iter().enumerate();
        last.into_iter().any(|(position, last)| last.is_some_and(|last| last > key) && !has_sent(position))
    }

    /// Returns whether an exchange is complete and the same as in the recorded run; `None` if an island was removed.
    fn is_as_recorded(&mut self, key: RoundKey, recorded: &RecordedRound) -> Option<bool> {
        if key != recorded.key {
            let why =
                mismatch(key, &format!("the next exchange of the recorded run was after step {}", recorded.key.step));
            self.remove_all(&why);
            return None;
        }
        let all_sent = recorded.members.iter().all(|member| self.is_complete(key, member.slot));
        let is_waiting =
            |slot: &usize| self.islands.get(slot).is_some_and(|island| island.state == IslandState::Waiting);
        // Islands that left the recorded run before this exchange are removed first: they may be the same islands that
        // join after it.
        let departed: Vec<usize> = self
            .islands
            .iter()
            .filter(|(slot, island)| {
                island.state.is_needed_in(key) && !recorded.members.iter().any(|member| member.slot == **slot)
            })
            .map(|(slot, _)| *slot)
            .collect();
        if all_sent && !departed.is_empty() {
            let why = format!("in the recorded run, it left before the exchange after step {}", key.step);
            departed.into_iter().for_each(|slot| self.remove_one(slot, &why, Some(&why)));
            return None;
        }
        if !all_sent || !recorded.joins.iter().all(|(slot, _)| is_waiting(slot)) {
            return Some(false);
        }
        let samples = |slot: usize| self.rounds[&key][&slot][0].as_ref().map_or(0, |change| change.samples);
        let problem = if recorded.members.iter().any(|member| samples(member.slot) != member.samples) {
            Some("the islands have trained on different numbers of samples")
        } else {
            (self.weights_before(key) != recorded.weights).then_some("the weights have different bits")
        };
        if let Some(problem) = problem {
            let why = mismatch(key, problem);
            self.remove_all(&why);
            return None;
        }
        self.agrees_on_weights(key)
    }

    pub(super) fn remove_all(&mut self, why: &str) {
        let all: Vec<usize> = self.islands.keys().copied().collect();
        all.into_iter().for_each(|slot| self.remove_one(slot, why, Some(why)));
        self.replay = Replay::default();
    }

    /// Returns true if all islands had the same weights before an exchange; `None` if an island was removed.
    fn agrees_on_weights(&mut self, key: RoundKey) -> Option<bool> {
        let round = &self.rounds[&key];
        let weights_of = |changes: &Vec<Option<RankPseudoGradient>>| -> Vec<u64> {
            changes.iter().flatten().map(|change| change.weights).collect()
        };
        let first = round.values().next().map(weights_of);
        let other = round.iter().find(|(_, changes)| Some(weights_of(changes)) != first).map(|(slot, _)| *slot);
        let Some(slot) = other else { return Some(true) };
        let why = format!(
            "at the exchange after step {}, its weights from the previous exchange differ from those of the other islands: \
             it has loaded a checkpoint of a different run, or of a different state of this run; start it again without \
             that checkpoint, and it joins",
            key.step
        );
        self.remove_one(slot, &why, Some(&why));
        None
    }

    /// Returns a hash of the members' common weights before an exchange.
    fn weights_before(&self, key: RoundKey) -> String {
        let first = self.rounds.get(&key).and_then(|round| round.values().next());
        let hashes: Vec<u8> =
            first.into_iter().flatten().flatten().flat_map(|change| change.weights.to_le_bytes()).collect();
        format!("{:016x}", XxHash3_64::oneshot(&hashes))
    }

    /// Closes an exchange: sends the mean to all members, and names a donor if islands wait to join.
    pub(super) fn close(&mut self, key: RoundKey) {
        let weights = self.weights_before(key);
        let (Some(round), Some(shape)) = (self.rounds.remove(&key), &self.shape) else { return };
        let format = shape.format;
        (self.is_running, self.last_closed) = (true, Some(key));
        let recorded = self.replay.rounds.pop_front();
        let samples_of =
            |changes: &[Option<RankPseudoGradient>]| changes[0].as_ref().map_or(0, |change| change.samples);
        let members: Vec<RoundMember> =
            round.iter().map(|(slot, changes)| RoundMember { slot: *slot, samples: samples_of(changes) }).collect();
        let samples = members.iter().fold(0u64, |sum, member| sum.saturating_add(member.samples));
        self.actions.push(ServerAction::Record(IslandEvent::Round {
            exchange: key,
            members: members.clone(),
            weights,
        }));
        let slots: Vec<usize> = members.iter().map(|member| member.slot).collect();
        let donation = self.begin_donation(key, &slots, recorded.as_ref());
        let fragment = usize::try_from(key.fragment).unwrap_or(usize::MAX);
        for position in 0..self.lens.len() {
            let changes: Vec<(u64, &[u8])> = round
                .values()
                .filter_map(|changes| Some((samples_of(changes), changes[position].as_ref()?.bytes.as_slice())))
                .collect();
            let len = self.lens[position].as_ref().and_then(|lens| lens.get(fragment)).copied().unwrap_or(0);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let mean = Arc::new(if samples == 0 { Vec::new() } else { format.mean(&changes, len) });
            for slot in &slots {
                let is_donor = donation.filter(|(donor, _)| donor == slot).map(|(_, number)| number);
                let head = json(&MeanHead { samples, members: slots.clone(), donation: is_donor });
                let mut start = key.to_bytes().to_vec();
                start.extend((head.len() as u64).to_le_bytes());
                start.extend(head);
                if let Some(connection) = self.islands.get(slot).map(|island| island.connections[position]) {
                    self.send(connection, Frame::with_body(FrameKind::Mean, start, mean.clone()));
                }
            }
        }
    }
}

fn mismatch(key: RoundKey, problem: &str) -> String {
    format!(
        "the replay differs from its record at the exchange after step {}: {problem}; begin from the same weights and \
         data, with the same number of steps, as the recorded run",
        key.step
    )
}
