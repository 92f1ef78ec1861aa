//! The protocol between ranks, run by loom in every order that the memory model allows, in some tests only up to a
//! limited number of thread switches.
//!
//! `piece_slots.rs`, `mailbox.rs`, `published_count.rs` and `rank_state.rs` in `src/comm/shm` are compiled here
//! unchanged; `region.rs` and `mailbox_memory.rs` give them memory that loom observes. The tests named
//! `loom_finds_...` plant an error in that memory and pass when loom finds it.
//!
//!     cargo test --release --manifest-path tests/loom/Cargo.toml

#[path = "../../src/comm/shm/mailbox.rs"]
#[allow(dead_code)]
mod mailbox;
mod mailbox_memory;
#[path = "../../src/comm/shm/piece_slots.rs"]
#[allow(dead_code)]
mod piece_slots;
#[path = "../../src/comm/shm/published_count.rs"]
mod published_count;
#[path = "../../src/comm/shm/rank_state.rs"]
#[allow(dead_code)]
mod rank_state;
mod region;

use mailbox::{MailboxReceiver, MailboxSender};
use mailbox_memory::Mailbox;
use piece_slots::{PieceSlots, SpinLimits};
use rank_state::{PeerFailure, RankFault};
use region::{Plant, SharedMemoryRegion, Sleep};
use std::sync::Arc;

/// A wait that never sleeps, because loom runs another thread each time the wait spins.
const AWAKE: SpinLimits = SpinLimits { spins: 1000, yields: 0 };
/// A wait that checks once before it sleeps.
const SLEEPY: SpinLimits = SpinLimits { spins: 1, yields: 0 };

/// The work of a rank in the shared memory.
type Rank = fn(Arc<SharedMemoryRegion>, usize);

/// Runs `rank(region, r)` for every rank r of a job in every order with at most `switches` switches away from a thread
/// that could continue, or in every possible order if `switches` is `None`.
fn in_every_order(
    switches: Option<usize>,
    region: impl Fn() -> SharedMemoryRegion + Send + Sync + 'static,
    rank: Rank,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = switches;
    model.max_branches = 10_000;
    model.check(move || {
        let region = Arc::new(region());
        let others: Vec<_> = (1..region.world_size())
            .map(|r| {
                let region = region.clone();
                loom::thread::spawn(move || rank(region, r))
            })
            .collect();
        rank(region.clone(), 0);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// Returns the byte that fills piece `k` of `rank`.
fn byte(rank: usize, k: u64) -> u8 {
    (16 * (rank as u64 + 1) + k) as u8
}

fn wait_for(pieces: &PieceSlots, peer: usize, spin_limits: SpinLimits) -> Result<(), PeerFailure> {
    if pieces.spin_for(peer, spin_limits) { Ok(()) } else { pieces.sleep_for(peer, || None) }
}

/// Publishes piece `k`, and waits for every peer's piece. Reads each header when its piece arrives, as the check of
/// headers does, and then the bytes of all pieces.
fn exchange(pieces: &mut PieceSlots, k: u64, spin_limits: SpinLimits) -> Result<(), PeerFailure> {
    let rank = pieces.rank();
    pieces.publish([k], 1, |slot| slot[0] = byte(rank, k));
    let peers = || (0..pieces.region().world_size()).filter(|peer| *peer != rank);
    for peer in peers() {
        wait_for(pieces, peer, spin_limits)?;
        assert_eq!(pieces.header(peer), [k], "header of rank {peer}");
    }
    for peer in peers() {
        assert_eq!(pieces.bytes(peer, 0, 1), [byte(peer, k)], "piece of rank {peer}");
    }
    Ok(())
}

/// Exchanges `count` pieces on every rank.
fn all_exchange(region: Arc<SharedMemoryRegion>, rank: usize, count: u64, spin_limits: SpinLimits) {
    let mut pieces = PieceSlots::new(region, rank, 0);
    for k in 1..=count {
        exchange(&mut pieces, k, spin_limits).unwrap();
    }
}

/// The ranks exchange three pieces, the third of which uses the slot of the first.
#[test]
fn two_ranks_see_each_others_pieces_in_every_order() {
    in_every_order(
        None,
        || SharedMemoryRegion::new(2, Sleep::Never, Plant::None),
        |region, rank| all_exchange(region, rank, 3, AWAKE),
    );
}

#[test]
fn three_ranks_see_each_others_pieces() {
    in_every_order(
        Some(1),
        || SharedMemoryRegion::new(3, Sleep::UntilWoken, Plant::None),
        |region, rank| all_exchange(region, rank, 3, SLEEPY),
    );
}

/// A sleep that nothing ends would cause a deadlock.
#[test]
fn a_rank_that_sleeps_is_woken_by_the_piece_that_it_waits_for() {
    in_every_order(
        Some(4),
        || SharedMemoryRegion::new(2, Sleep::UntilWoken, Plant::None),
        |region, rank| all_exchange(region, rank, 3, SLEEPY),
    );
}

#[test]
fn a_rank_that_waits_is_told_why_its_peer_gave_up() {
    in_every_order(
        None,
        || SharedMemoryRegion::new(2, Sleep::Nap, Plant::None),
        |region, rank| {
            region.start(rank).unwrap();
            if rank == 0 {
                region.abort(0, "no disk");
                return;
            }
            let mut pieces = PieceSlots::new(region.clone(), rank, 0);
            let failure = exchange(&mut pieces, 1, SLEEPY).unwrap_err();
            assert_eq!(failure, PeerFailure { peer: 0, fault: RankFault::GaveUp, why: "no disk".into() });
        },
    );
}

/// An exchange succeeds if all its pieces have been published.
#[test]
fn a_piece_arrives_although_its_rank_leaves_right_after_it() {
    in_every_order(
        Some(4),
        || SharedMemoryRegion::new(2, Sleep::Nap, Plant::None),
        |region, rank| {
            region.start(rank).unwrap();
            all_exchange(region.clone(), rank, 2, SLEEPY);
            region.finish(rank);
            assert_eq!(region.first_failure(), None);
        },
    );
}

#[test]
fn a_piece_arrives_although_its_rank_gives_up_right_after_it() {
    in_every_order(
        Some(4),
        || SharedMemoryRegion::new(2, Sleep::Nap, Plant::None),
        |region, rank| {
            region.start(rank).unwrap();
            let mut pieces = PieceSlots::new(region.clone(), rank, 0);
            if rank == 0 {
                pieces.publish([1], 1, |slot| slot[0] = byte(0, 1));
                region.abort(0, "no disk");
            } else {
                exchange(&mut pieces, 1, SLEEPY).unwrap();
            }
        },
    );
}

#[test]
fn a_rank_that_leaves_too_early_is_blamed() {
    in_every_order(
        None,
        || SharedMemoryRegion::new(2, Sleep::Nap, Plant::None),
        |region, rank| {
            region.start(rank).unwrap();
            if rank == 0 {
                region.finish(0);
                return;
            }
            let mut pieces = PieceSlots::new(region.clone(), rank, 0);
            let failure = exchange(&mut pieces, 1, SLEEPY).unwrap_err();
            assert_eq!(failure, PeerFailure { peer: 0, fault: RankFault::Left, why: String::new() });
            assert_eq!(region.first_failure(), Some((0, RankFault::Left)));
        },
    );
}

/// Rank 0 fails while ranks 1 and 2 wait; each of them gives up in turn, and is not mistaken for the cause.
#[test]
fn every_rank_is_told_the_failure_that_came_first() {
    in_every_order(
        Some(2),
        || SharedMemoryRegion::new(3, Sleep::Nap, Plant::None),
        |region, rank| {
            region.start(rank).unwrap();
            if rank == 0 {
                region.abort(0, "no disk");
                return;
            }
            let mut pieces = PieceSlots::new(region.clone(), rank, 0);
            let failure = exchange(&mut pieces, 1, SLEEPY).unwrap_err();
            region.abort(rank, "echo");
            assert_eq!(failure, PeerFailure { peer: 0, fault: RankFault::GaveUp, why: "no disk".into() });
            assert_eq!(region.first_failure(), Some((0, RankFault::GaveUp)));
        },
    );
}

/// Returns the error that loom finds in a job of two ranks with the mistake `plant`, or `None` if it finds nothing.
fn found(plant: Plant, sleep: Sleep, rank: Rank) -> Option<String> {
    let check = || in_every_order(Some(3), move || SharedMemoryRegion::new(2, sleep, plant), rank);
    let panic = std::panic::catch_unwind(check).err()?;
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    Some(text.unwrap_or("a panic without a message").to_string())
}

#[track_caller]
fn assert_found(found: Option<String>, expected: &str) {
    assert!(found.as_ref().is_some_and(|text| text.contains(expected)), "not {expected:?} but {found:?}");
}

const RACE: &str = "Causality violation";

#[test]
fn loom_finds_a_publication_that_is_ordered_before_the_data() {
    let three_pieces: Rank = |region, rank| all_exchange(region, rank, 3, AWAKE);
    for plant in [Plant::PublicationBeforeData, Plant::RelaxedPublication, Plant::RelaxedPublicationLoad] {
        println!("{plant:?}");
        assert_found(found(plant, Sleep::Never, three_pieces), RACE);
    }
}

#[test]
fn loom_finds_a_slot_that_is_written_while_a_peer_reads_it() {
    assert_found(found(Plant::OneSlot, Sleep::Never, |region, rank| all_exchange(region, rank, 2, AWAKE)), RACE);
}

#[test]
fn loom_finds_a_sleep_that_nobody_ends() {
    let two_pieces: Rank = |region, rank| all_exchange(region, rank, 2, SLEEPY);
    assert_found(found(Plant::NoTotalOrder, Sleep::UntilWoken, two_pieces), "deadlock");
}

#[test]
fn loom_finds_a_text_that_is_read_while_it_is_written() {
    for plant in [Plant::RelaxedState, Plant::RelaxedStateLoad] {
        println!("{plant:?}");
        let look: Rank = |region, rank| {
            if rank == 0 { region.abort(0, "no disk") } else { drop(region.state(0)) }
        };
        assert_found(found(plant, Sleep::Never, look), RACE);
    }
}

/// Sends three packets through a mailbox with room for two.
fn messages(switches: Option<usize>, sleep: Sleep, plant: Plant) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = switches;
    model.max_branches = 10_000;
    let wait = move |ready: &dyn Fn() -> bool, nap: &dyn Fn()| {
        while !ready() {
            if sleep == Sleep::Never { loom::thread::yield_now() } else { nap() }
        }
    };
    model.check(move || {
        let mailbox = Mailbox::new(sleep, plant);
        let sending = mailbox.clone();
        let sender = loom::thread::spawn(move || {
            let mut sender = MailboxSender::new(sending);
            for k in 1..4 {
                wait(&|| sender.has_room(), &|| sender.sleep(1));
                sender.send([k], 1, |slot| slot[0] = byte(0, k));
            }
        });
        let mut receiver = MailboxReceiver::new(mailbox);
        for k in 1..4 {
            wait(&|| receiver.has_packet(), &|| receiver.sleep(1));
            assert_eq!(receiver.header(), [k]);
            receiver.receive(1, |packet| assert_eq!(packet, [byte(0, k)]));
        }
        sender.join().unwrap();
    });
}

#[test]
fn packets_of_a_mailbox_arrive_complete_in_every_order() {
    messages(None, Sleep::Never, Plant::None);
    messages(Some(4), Sleep::UntilWoken, Plant::None);
}

#[test]
fn loom_finds_a_packet_that_is_published_before_its_data() {
    for plant in [Plant::RelaxedPublication, Plant::RelaxedPublicationLoad] {
        let found = std::panic::catch_unwind(|| messages(None, Sleep::Never, plant));
        assert!(found.is_err(), "{plant:?}");
    }
    assert!(std::panic::catch_unwind(|| messages(Some(4), Sleep::UntilWoken, Plant::NoTotalOrder)).is_err());
}
