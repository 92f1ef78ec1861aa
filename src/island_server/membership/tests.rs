//! Decisions of the island server, without sockets.

use super::super::membership_log;
use super::super::pseudo_gradient_codec::PseudoGradientFormat;
use super::*;
use crate::island_server::membership_log::RoundMember;
use crate::island_server::messages::MeanHead;

const RANKS: usize = 2;
const LEN: usize = 3;

/// A server without sockets. The connection of rank r of the island in slot s is `10 * s + r`.
struct TestServer {
    membership: Membership,
    /// The frames that were sent to each connection.
    sent: HashMap<ConnectionId, Vec<Frame>>,
    events: Vec<IslandEvent>,
}

impl TestServer {
    fn new(replay: Option<Replay>) -> Self {
        Self { membership: Membership::new(replay), sent: HashMap::new(), events: Vec::new() }
    }

    fn work(&mut self) {
        for action in self.membership.take_actions() {
            match action {
                ServerAction::Send(to, frame) => self.sent.entry(to).or_default().push(frame),
                ServerAction::Record(event) => self.events.push(event),
                ServerAction::Close(_) | ServerAction::Print(_) => {}
            }
        }
    }

    fn connect(&mut self, slot: usize) {
        for position in 0..RANKS {
            let run = RunShape {
                slots: 3,
                ranks: RANKS,
                min_islands: 2,
                format: PseudoGradientFormat::Fp32,
                fingerprint: vec![("models".into(), 1)],
            };
            let (start, launcher) = (self.events.len() as u64 + 100 * slot as u64, slot as u64);
            let hello = Hello { start, launcher, slot: Some(slot), position, run, lens: vec![LEN as u64] };
            self.membership.hello(connection(slot, position), hello);
        }
        self.work();
    }

    fn change_of(&mut self, slot: usize, position: usize, step: u64, value: f32) {
        let mut body = RoundKey { step, call: 0, fragment: 0 }.to_bytes().to_vec();
        body.extend([8u64, 7].into_iter().flat_map(u64::to_le_bytes));
        body.extend(PseudoGradientFormat::Fp32.encode(vec![value; LEN]));
        self.membership.change(connection(slot, position), body);
        self.work();
    }

    fn change(&mut self, slot: usize, step: u64, value: f32) {
        (0..RANKS).for_each(|position| self.change_of(slot, position, step, value));
    }

    /// Returns the means that a rank has received since the last call, each with its members and donation.
    fn means(&mut self, slot: usize, position: usize) -> Vec<(f32, Vec<usize>, Option<u64>)> {
        let frames = self.sent.remove(&connection(slot, position)).unwrap_or_default();
        let of_mean = |frame: Frame| {
            let (_, rest) = RoundKey::split(&frame.head)?;
            let ([_], head) = split_numbers::<1>(rest)?;
            let head: MeanHead = serde_json::from_slice(head).unwrap();
            Some((PseudoGradientFormat::Fp32.decode(&frame.body, LEN)[0], head.members, head.donation))
        };
        frames.into_iter().filter(|frame| frame.kind == FrameKind::Mean).filter_map(of_mean).collect()
    }

    fn kinds(&mut self, slot: usize, position: usize) -> Vec<FrameKind> {
        let frames = self.sent.remove(&connection(slot, position)).unwrap_or_default();
        frames.iter().map(|frame| frame.kind).collect()
    }

    fn donate(&mut self, donor: usize, donation: u64, step: u64, ranks: usize) {
        let head = json(&DonationHead { donation, step, manifest: String::new() });
        for position in 0..ranks {
            self.membership.donation(connection(donor, position), FrameKind::DonationHead, &head);
            self.membership.donation_ended(connection(donor, position));
        }
        self.work();
    }
}

fn connection(slot: usize, position: usize) -> ConnectionId {
    10 * slot as u64 + position as u64
}

#[test]
fn an_island_that_dies_is_left_out_at_all_positions_and_the_exchange_is_closed_without_it() {
    let mut server = TestServer::new(None);
    (0..3).for_each(|slot| server.connect(slot));
    server.change(0, 5, 1.0);
    server.change(1, 5, 3.0);
    // Only one rank of the third island has sent its change.
    server.change_of(2, 0, 5, 100.0);
    assert!(server.means(0, 0).is_empty());
    assert_eq!(server.membership.bytes(), 5 * LEN * 4);
    server.membership.lost(connection(2, 1), "killed");
    server.work();
    for (slot, position) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert_eq!(server.means(slot, position), [(2.0, vec![0, 1], None)]);
    }
    assert_eq!(server.kinds(2, 0), [FrameKind::Welcome, FrameKind::Refused]);
    assert_eq!(server.membership.bytes(), 0);
}

#[test]
fn islands_that_wait_for_others_at_the_first_exchange_get_a_notice_once() {
    let mut server = TestServer::new(None);
    server.connect(0);
    server.change(0, 5, 1.0);
    server.change(0, 10, 1.0);
    assert_eq!(server.kinds(0, 0), [FrameKind::Welcome, FrameKind::Notice]);
    server.connect(1);
    server.change(1, 5, 1.0);
    server.change(1, 10, 1.0);
    assert_eq!(server.means(0, 0).len(), 2);
}

#[test]
fn a_donor_that_dies_is_replaced_after_the_next_exchange() {
    let mut server = TestServer::new(None);
    (0..2).for_each(|slot| server.connect(slot));
    server.change(0, 5, 1.0);
    server.change(1, 5, 3.0);
    server.connect(2);
    (0..2).for_each(|slot| server.change(slot, 10, 1.0));
    assert_eq!(server.means(0, 1)[1].2, Some(1));
    // One rank of the donor has sent everything.
    server.donate(0, 1, 10, 1);
    server.membership.lost(connection(0, 1), "killed");
    server.work();
    assert_eq!(server.kinds(2, 0), [FrameKind::Welcome, FrameKind::DonationAborted]);
    server.change(1, 15, 1.0);
    assert_eq!(server.means(1, 0).last().unwrap().2, Some(2));
    server.donate(1, 2, 15, RANKS);
    assert_eq!(server.kinds(2, 0), [FrameKind::Joined]);
    // From now on, the exchanges need the new member.
    server.change(1, 20, 1.0);
    assert!(server.means(1, 0).is_empty());
    server.change(2, 20, 3.0);
    assert_eq!(server.means(1, 0), [(2.0, vec![1, 2], None)]);
    let joins = server.events.iter().filter(|event| matches!(event, IslandEvent::Join { slot: 2, donor: 1, .. }));
    assert_eq!(joins.count(), 1);
}

#[test]
fn the_last_members_leave_and_an_island_that_waits_begins() {
    let mut server = TestServer::new(None);
    (0..2).for_each(|slot| server.connect(slot));
    (0..2).for_each(|slot| server.change(slot, 5, 1.0));
    server.connect(2);
    server.membership.goodbye(connection(0, 0));
    server.membership.goodbye(connection(1, 1));
    server.work();
    assert_eq!(server.kinds(2, 1), [FrameKind::Welcome, FrameKind::Begin]);
    // It need not wait for others, because they have ended normally.
    server.change(2, 5, 4.0);
    assert_eq!(server.means(2, 0), [(4.0, vec![2], None)]);
}

#[test]
fn an_island_that_skips_an_exchange_or_repeats_one_is_removed() {
    let mut server = TestServer::new(None);
    (0..3).for_each(|slot| server.connect(slot));
    (0..3).for_each(|slot| server.change(slot, 5, 1.0));
    server.change(0, 10, 1.0);
    server.change(1, 10, 1.0);
    server.change(2, 15, 1.0);
    assert_eq!(server.membership.members(), [0, 1]);
    server.change(1, 5, 1.0);
    assert_eq!(server.membership.members(), [0]);
    assert_eq!(server.kinds(1, 0).last(), Some(&FrameKind::Refused));
    // Messages of connections that are no longer part of the run have no effect.
    server.change(1, 20, 1.0);
    server.membership.goodbye(connection(1, 0));
    server.change(0, 15, 2.0);
    assert_eq!(server.means(0, 1).last(), Some(&(2.0, vec![0], None)));
}

#[test]
fn changes_that_do_not_follow_the_protocol_remove_their_island_only() {
    let mut server = TestServer::new(None);
    (0..2).for_each(|slot| server.connect(slot));
    for body in [Vec::new(), vec![0; 39], vec![0; 41], vec![0xff; 40 + 4 * LEN]] {
        server.membership.change(connection(1, 0), body);
        server.work();
        assert_eq!(server.membership.members(), [0]);
        server.connect(1);
    }
    (0..2).for_each(|slot| server.change(slot, 5, 1.0));
    assert_eq!(server.means(0, 0).len(), 1);
}

#[test]
fn a_replay_waits_for_those_that_took_part_and_sends_the_others_away() {
    let members = |slots: &[usize]| slots.iter().map(|slot| RoundMember { slot: *slot, samples: 8 }).collect();
    let weights = {
        let mut server = TestServer::new(None);
        (0..2).for_each(|slot| server.connect(slot));
        (0..2).for_each(|slot| server.change(slot, 5, 1.0));
        let round = server.events.iter().find_map(|event| match event {
            IslandEvent::Round { weights, .. } => Some(weights.clone()),
            _ => None,
        });
        round.unwrap()
    };
    let round = |step: u64, slots: &[usize], joins: Vec<(usize, usize)>| membership_log::RecordedRound {
        key: RoundKey { step, call: 0, fragment: 0 },
        members: members(slots),
        weights: weights.clone(),
        joins,
    };
    let rounds = [round(5, &[0, 1], vec![(2, 1)]), round(10, &[1, 2], vec![])];
    let mut server = TestServer::new(Some(Replay { rounds: rounds.into(), begins: vec![0, 1] }));
    server.connect(0);
    server.change(0, 5, 1.0);
    server.connect(1);
    server.change(1, 5, 1.0);
    // The island that joins is not there yet.
    assert!(server.means(0, 0).is_empty());
    server.connect(2);
    assert_eq!(server.means(1, 0), [(1.0, vec![0, 1], Some(1))]);
    server.donate(1, 1, 5, RANKS);
    server.change(0, 10, 1.0);
    server.change(1, 10, 1.0);
    server.change(2, 10, 1.0);
    assert_eq!(server.membership.members(), [1, 2]);
    assert_eq!(server.means(2, 0), [(1.0, vec![1, 2], None)]);
}
