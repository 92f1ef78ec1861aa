//! The decisions of the island server on which islands take part in which exchange. Sockets are not involved.
//!
//! ```text
//!   forming    islands begin without a donor; the first exchange needs `min_islands` of them, at the same step
//!   running    an exchange is closed when every member has sent its change; islands that connect wait
//!              exchange closed -> a donor is named -> its state passes through the server -> joined
//!   forming    again, when no member is left
//! ```
//!
//! All ranks of an island are in the same exchanges, because an island's changes count only once all its ranks have
//! sent theirs.

use super::frame::{Frame, FrameKind};
use super::membership_log::{IslandEvent, RecordedRound, Replay, first_event};
use super::messages::{DonationHead, Hello, RoundKey, RunShape, Welcome, split_numbers};
use crate::util::{counted, list};
use std::collections::{BTreeMap, HashMap};

mod rounds;

/// The number of a connection.
pub(super) type ConnectionId = u64;

/// An action of the server after a message.
#[derive(Debug)]
pub(super) enum ServerAction {
    Send(ConnectionId, Frame),
    /// Sends the waiting frames, and ends the connection.
    Close(ConnectionId),
    Record(IslandEvent),
    /// Prints a message.
    Print(String),
}

/// An island whose ranks are not all connected yet.
#[derive(Debug)]
struct AssemblingIsland {
    hello: Hello,
    lens: Vec<Option<Vec<u64>>>,
    connections: Vec<Option<ConnectionId>>,
}

/// An island in a slot.
#[derive(Debug)]
struct Island {
    launcher: u64,
    connections: Vec<ConnectionId>,
    state: IslandState,
    /// The last exchange for which each rank has sent its change.
    last: Vec<Option<RoundKey>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IslandState {
    /// Takes part in the exchanges after step `since`, or in all of them if it is `None`.
    Member { since: Option<u64> },
    /// Waits for a donor.
    Waiting,
    /// Receives a donation. `since` is the donor's step, as soon as it is known.
    Receiving { since: Option<u64> },
}

impl IslandState {
    /// Returns whether an exchange needs this island.
    fn is_needed_in(self, key: RoundKey) -> bool {
        match self {
            Self::Member { since: None } => true,
            Self::Member { since } | Self::Receiving { since } => since.is_some_and(|since| key.step > since),
            Self::Waiting => false,
        }
    }
}

/// The pseudo-gradient of one rank: the change in its weights since the last exchange.
#[derive(Debug)]
struct RankPseudoGradient {
    samples: u64,
    /// A hash of the weights after the last exchange.
    weights: u64,
    bytes: Vec<u8>,
}

/// The transfer of an island's state to the islands that join.
#[derive(Debug)]
struct Donation {
    number: u64,
    donor: usize,
    joiners: Vec<usize>,
    /// The exchange after which the donor was named.
    key: RoundKey,
    /// The number of the donor's ranks that have sent everything.
    ended: usize,
}

/// The islands of a run.
#[derive(Debug, Default)]
pub(super) struct Membership {
    shape: Option<RunShape>,
    /// The length of each fragment, by rank.
    lens: Vec<Option<Vec<u64>>>,
    /// The islands whose ranks are not all connected yet, by the random number that identifies each island's start.
    assembling: HashMap<u64, AssemblingIsland>,
    /// The islands, by slot.
    islands: BTreeMap<usize, Island>,
    /// The last slot of each launcher's island.
    slots_of_launchers: HashMap<u64, usize>,
    /// Whether an exchange has been closed since the first member began.
    is_running: bool,
    /// The number of members at the time of the last notice that the first exchange waits for more islands.
    noticed_members: usize,
    /// Whether the program of a member has ended normally. Islands that begin later then need not wait for others.
    has_ended: bool,
    rounds: BTreeMap<RoundKey, BTreeMap<usize, Vec<Option<RankPseudoGradient>>>>,
    last_closed: Option<RoundKey>,
    donation: Option<Donation>,
    donations: u64,
    replay: Replay,
    is_replay: bool,
    actions: Vec<ServerAction>,
}

impl Membership {
    pub fn new(replay: Option<Replay>) -> Self {
        Self { is_replay: replay.is_some(), replay: replay.unwrap_or_default(), ..Self::default() }
    }

    /// Returns the actions to be taken, in order.
    pub fn take_actions(&mut self) -> Vec<ServerAction> {
        std::mem::take(&mut self.actions)
    }

    /// Returns the maximum length of the body of a change.
    pub fn max_change(&self) -> u64 {
        let Some(shape) = &self.shape else { return 0 };
        let longest = self.lens.iter().flatten().flatten().copied().max().unwrap_or(0);
        shape.format.encoded_len(longest).unwrap_or(0) + (RoundKey::BYTES + 16) as u64
    }

    /// Returns the number of bytes of the changes that wait for other islands.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.rounds.values().flat_map(BTreeMap::values).flatten().flatten().map(|change| change.bytes.len()).sum()
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) {
        self.actions.push(ServerAction::Send(connection, frame));
    }

    fn send_to_island(&mut self, slot: usize, frame: &Frame) {
        let connections = self.islands.get(&slot).map(|island| island.connections.clone()).unwrap_or_default();
        connections.into_iter().for_each(|connection| self.send(connection, frame.clone()));
    }

    fn refuse(&mut self, connection: ConnectionId, why: &str) {
        self.send(connection, Frame::new(FrameKind::Refused, why.as_bytes().to_vec()));
        self.actions.push(ServerAction::Close(connection));
    }

    fn print(&mut self, message: String) {
        self.actions.push(ServerAction::Print(message));
    }

    /// Returns the slot and the position of a rank.
    fn slot_and_position(&self, connection: ConnectionId) -> Option<(usize, usize)> {
        self.islands.iter().find_map(|(slot, island)| {
            let position = island.connections.iter().position(|id| *id == connection)?;
            Some((*slot, position))
        })
    }

    /// Admits a rank and, once all ranks of its island are connected, the island.
    pub fn hello(&mut self, connection: ConnectionId, hello: Hello) {
        if let Err(why) = self.check(&hello) {
            return self.refuse(connection, &why);
        }
        let Hello { start, position, .. } = hello;
        let ranks = hello.run.ranks;
        if self.shape.is_none() {
            self.shape = Some(hello.run.clone());
            self.lens = vec![None; ranks];
            self.actions.push(ServerAction::Record(first_event(hello.run.slots, ranks)));
        }
        let island = self.assembling.entry(start).or_insert_with(|| AssemblingIsland {
            lens: vec![None; ranks],
            connections: vec![None; ranks],
            hello: hello.clone(),
        });
        if island.connections[position].is_some() {
            return self.refuse(connection, &format!("position {position} of this island is already connected"));
        }
        island.connections[position] = Some(connection);
        island.lens[position] = Some(hello.lens);
        if island.connections.iter().all(Option::is_some)
            && let Some(island) = self.assembling.remove(&start)
        {
            self.lens = island.lens;
            let connections = island.connections.into_iter().flatten().collect();
            self.assign_slot(connections, &island.hello);
        }
    }

    /// Checks a rank's numbers, and compares its island with the others.
    fn check(&self, hello: &Hello) -> Result<(), String> {
        /// The maximum number of ranks, and of slots. The maximum number of fragments is 16 times as large.
        const MAX_COUNT: usize = 1 << 16;
        let Hello { position, run, lens, slot, .. } = hello;
        let fits = (1..=MAX_COUNT).contains(&run.ranks)
            && *position < run.ranks
            && (1..=MAX_COUNT).contains(&run.slots)
            && (1..=run.slots).contains(&run.min_islands)
            && (1..=MAX_COUNT << 4).contains(&lens.len())
            && run.fingerprint.len() <= 64
            && lens.iter().all(|len| run.format.encoded_len(*len).is_some());
        if !fits {
            return Err("its first message has numbers that are out of range or inconsistent".into());
        }
        if let Some(slot) = slot.filter(|slot| *slot >= run.slots) {
            return Err(format!(
                "it requests slot {slot}, but the run has {} (local_steps.islands); request a slot from 0 to {}",
                counted(run.slots, "slot"),
                run.slots - 1
            ));
        }
        let Some(shape) = &self.shape else { return Ok(()) };
        if let Some(property) = run.difference(shape) {
            return Err(format!(
                "it and the islands of the run have different {property}; start the same program with the same \
                 files and configuration for all islands"
            ));
        }
        match self.lens.get(*position) {
            Some(Some(expected)) if expected != lens => {
                Err("the lengths of its fragments differ from those of the run's \
                                                    islands; start the same program with the same configuration for \
                                                    all islands"
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// Gives an island a slot.
    fn assign_slot(&mut self, connections: Vec<ConnectionId>, hello: &Hello) {
        let slots = hello.run.slots;
        let previous_slot =
            self.islands.iter().find(|(_, island)| island.launcher == hello.launcher).map(|(slot, _)| *slot);
        if let Some(slot) = previous_slot {
            self.remove(slot, "its launcher has started it again", None);
        }
        let is_free = |slot: &usize| !self.islands.contains_key(slot);
        let last_slot =
            self.slots_of_launchers.get(&hello.launcher).copied().filter(|slot| *slot < slots).filter(is_free);
        let slot = match hello.slot {
            Some(slot) if is_free(&slot) => Ok(slot),
            Some(slot) => {
                Err(format!("slot {slot} is taken by another island; request a different slot, or end that island"))
            }
            None => last_slot.or_else(|| (0..slots).find(is_free)).ok_or_else(|| {
                format!(
                    "all {} are taken; end an island, or start all islands with a larger local_steps.islands",
                    counted(slots, "slot")
                )
            }),
        };
        let slot = match slot {
            Ok(slot) => slot,
            Err(why) => {
                connections.iter().for_each(|connection| self.refuse(*connection, &why));
                return self.forget_an_empty_run();
            }
        };
        self.slots_of_launchers.insert(hello.launcher, slot);
        let begins = !self.is_running && (!self.is_replay || self.replay_begins(slot));
        let state = if begins { IslandState::Member { since: None } } else { IslandState::Waiting };
        let last = vec![None; connections.len()];
        self.islands.insert(slot, Island { launcher: hello.launcher, connections, state, last });
        self.send_to_island(slot, &Frame::new(FrameKind::Welcome, json(&Welcome { slot, joins: !begins })));
        if begins {
            self.actions.push(ServerAction::Record(IslandEvent::Begin { slot }));
            self.print(format!("island {slot} begins"));
        } else {
            self.print(format!("island {slot} waits to join"));
        }
        self.advance();
    }

    /// Returns whether an island begins without a donor in the recorded run.
    fn replay_begins(&self, slot: usize) -> bool {
        self.replay.rounds.is_empty() || self.replay.begins.contains(&slot)
    }

    /// Takes a rank's change.
    pub fn change(&mut self, connection: ConnectionId, body: Vec<u8>) {
        let Some((slot, position)) = self.slot_and_position(connection) else { return };
        if let Err(why) = self.add_change(slot, position, body) {
            self.remove(slot, &why, Some(&why));
        }
        self.advance();
    }

    fn add_change(&mut self, slot: usize, position: usize, mut body: Vec<u8>) -> Result<(), String> {
        let protocol_error = || "it does not follow the protocol".to_string();
        let (key, rest) = RoundKey::split(&body).ok_or_else(protocol_error)?;
        let ([samples, weights], rest) = split_numbers(rest).ok_or_else(protocol_error)?;
        let (shape, island) = (self.shape.as_ref().ok_or_else(protocol_error)?, &self.islands[&slot]);
        let len = self.lens.get(position).and_then(Option::as_ref);
        let len = len.and_then(|lens| lens.get(usize::try_from(key.fragment).ok()?)).ok_or_else(protocol_error)?;
        if shape.format.encoded_len(*len) != Some(rest.len() as u64) || !island.state.is_needed_in(key) {
            return Err(protocol_error());
        }
        if island.last[position].is_some_and(|last| last >= key) || self.last_closed.is_some_and(|last| last >= key) {
            let last = self.last_closed.or(island.last[position]).map_or(0, |last| last.step);
            return Err(format!(
                "it exchanges after step {}, but the islands have already exchanged after step {last}; start the same \
                 program for all islands, or restart this one, which then joins",
                key.step
            ));
        }
        let ranks = island.connections.len();
        let header = body.len() - rest.len();
        body.drain(..header);
        let changes = self.rounds.entry(key).or_default();
        let island_changes = changes.entry(slot).or_insert_with(|| (0..ranks).map(|_| None).collect());
        island_changes[position] = Some(RankPseudoGradient { samples, weights, bytes: body });
        if let Some(island) = self.islands.get_mut(&slot) {
            island.last[position] = Some(key);
        }
        Ok(())
    }

    /// Returns the slots of the islands that are not members yet.
    pub fn waiting(&self) -> Vec<usize> {
        let members = self.members();
        self.islands.keys().copied().filter(|slot| !members.contains(slot)).collect()
    }

    /// Returns the slots of the islands that take part in exchanges.
    pub fn members(&self) -> Vec<usize> {
        let is_member = |island: &Island| matches!(island.state, IslandState::Member { .. });
        self.islands.iter().filter(|(_, island)| is_member(island)).map(|(slot, _)| *slot).collect()
    }

    /// Names a donor if islands wait to join, and returns the donor's slot and the number of the donation.
    fn begin_donation(
        &mut self,
        key: RoundKey,
        members: &[usize],
        recorded: Option<&RecordedRound>,
    ) -> Option<(usize, u64)> {
        if self.donation.is_some() {
            return None;
        }
        let (joiners, donor): (Vec<usize>, usize) = match recorded {
            Some(recorded) => (recorded.joins.iter().map(|(slot, _)| *slot).collect(), recorded.joins.first()?.1),
            None => {
                let is_waiting = |island: &Island| island.state == IslandState::Waiting;
                let joiners = self.islands.iter().filter(|(_, island)| is_waiting(island)).map(|(slot, _)| *slot);
                (joiners.collect(), *members.first()?)
            }
        };
        // At the end of a run, when fragments are exchanged one after the other, no island joins.
        if joiners.is_empty() || key.call > 0 {
            return None;
        }
        for slot in &joiners {
            if let Some(island) = self.islands.get_mut(slot) {
                island.state = IslandState::Receiving { since: None };
            }
        }
        let names: Vec<String> = joiners.iter().map(usize::to_string).collect();
        let islands = if names.len() == 1 { "island" } else { "islands" };
        self.print(format!("island {donor} gives its state to {islands} {} after step {}", list(&names), key.step));
        self.donations += 1;
        self.donation = Some(Donation { number: self.donations, donor, joiners, key, ended: 0 });
        Some((donor, self.donations))
    }

    /// Returns the connections to which a frame of a donation is passed on: those of the joining ranks at the same
    /// position.
    pub fn donation(&mut self, connection: ConnectionId, kind: FrameKind, body: &[u8]) -> Vec<ConnectionId> {
        let Some((slot, position)) = self.slot_and_position(connection) else { return Vec::new() };
        let Some(donation) = self.donation.as_mut().filter(|donation| donation.donor == slot) else {
            return Vec::new();
        };
        let joiners = donation.joiners.clone();
        if kind == FrameKind::DonationHead {
            let head = serde_json::from_slice::<DonationHead>(body).ok();
            let Some(head) = head.filter(|head| head.donation == donation.number) else { return Vec::new() };
            for joiner in &joiners {
                if let Some(island) = self.islands.get_mut(joiner) {
                    island.state = IslandState::Receiving { since: Some(head.step) };
                }
            }
        }
        joiners.iter().filter_map(|joiner| Some(self.islands.get(joiner)?.connections[position])).collect()
    }

    /// Counts a rank of the donor whose complete state has been passed on.
    pub fn donation_ended(&mut self, connection: ConnectionId) {
        let Some((slot, _)) = self.slot_and_position(connection) else { return };
        let ranks = self.lens.len();
        let Some(donation) = self.donation.as_mut().filter(|donation| donation.donor == slot) else { return };
        donation.ended += 1;
        if donation.ended < ranks {
            return;
        }
        let Some(Donation { joiners, donor, key, .. }) = self.donation.take() else { return };
        for joiner in joiners {
            let Some(island) = self.islands.get_mut(&joiner) else { continue };
            let IslandState::Receiving { since } = island.state else { continue };
            island.state = IslandState::Member { since };
            self.send_to_island(joiner, &Frame::new(FrameKind::Joined, Vec::new()));
            self.actions.push(ServerAction::Record(IslandEvent::Join { slot: joiner, donor, exchange: key }));
            self.print(format!("island {joiner} joins after step {}", since.unwrap_or(key.step)));
        }
        self.advance();
    }

    /// Removes an island whose program has ended.
    pub fn goodbye(&mut self, connection: ConnectionId) {
        if let Some((slot, _)) = self.slot_and_position(connection) {
            if matches!(self.islands[&slot].state, IslandState::Member { .. }) {
                self.has_ended = true;
            }
            self.remove(slot, "its program has ended", None);
        } else {
            self.lost(connection, "its program has ended");
        }
    }

    /// Removes an island that has lost a rank.
    pub fn lost(&mut self, connection: ConnectionId, why: &str) {
        if let Some((slot, position)) = self.slot_and_position(connection) {
            let why = format!("the connection of rank {position} of this island has ended ({why})");
            return self.remove(slot, &why, Some(&why));
        }
        let found = self.assembling.iter().find(|(_, island)| island.connections.contains(&Some(connection)));
        if let Some(start) = found.map(|(start, _)| *start)
            && let Some(island) = self.assembling.remove(&start)
        {
            let others = island.connections.into_iter().flatten().filter(|other| *other != connection);
            let why = format!("another rank of this island has lost its connection ({why})");
            others.for_each(|other| self.refuse(other, &why));
        }
        self.forget_an_empty_run();
    }

    /// Removes an island, and closes the exchanges that waited for it.
    fn remove(&mut self, slot: usize, why: &str, refusal: Option<&str>) {
        self.remove_one(slot, why, refusal);
        self.advance();
    }

    /// Removes an island. Its ranks receive `refusal`, if there is one.
    fn remove_one(&mut self, slot: usize, why: &str, refusal: Option<&str>) {
        let Some(island) = self.islands.remove(&slot) else { return };
        if let Some(refusal) = refusal {
            island.connections.iter().for_each(|connection| self.refuse(*connection, refusal));
        }
        self.rounds.values_mut().for_each(|round| _ = round.remove(&slot));
        self.rounds.retain(|_, round| !round.is_empty());
        self.actions.push(ServerAction::Record(IslandEvent::Leave { slot, why: why.to_owned() }));
        self.print(format!("island {slot} leaves: {why}"));
        if self.donation.as_ref().is_some_and(|donation| donation.donor == slot)
            && let Some(donation) = self.donation.take()
        {
            for joiner in donation.joiners {
                if let Some(island) = self.islands.get_mut(&joiner)
                    && matches!(island.state, IslandState::Receiving { .. })
                {
                    island.state = IslandState::Waiting;
                    self.send_to_island(joiner, &Frame::new(FrameKind::DonationAborted, Vec::new()));
                }
            }
        }
        self.forget_an_empty_run();
    }
}

fn json(message: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_else(|error| unreachable!("numbers and strings are valid JSON: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
