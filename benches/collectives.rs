//! Collectives between two ranks as threads. Bytes per second are of the whole, unsharded buffer.
//!
//!     cargo bench --bench collectives
#![allow(clippy::unwrap_used)]

use candle_zero::comm::{Communicator, Pending, threads};
use candle_zero::precision::Flat;
use divan::Bencher;
use divan::counter::BytesCount;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

const RANKS: usize = 2;
const MIB: [usize; 3] = [1, 16, 64];

fn main() {
    divan::main();
}

/// Times `collective` on rank 0 while the other ranks do the same; each is given `elements` f32 zeros.
fn measure(
    bencher: Bencher<'_, '_>,
    bytes: usize,
    elements: usize,
    collective: fn(&dyn Communicator, Flat) -> Pending<Flat>,
) {
    let mut ranks = threads::communicators(RANKS, Duration::from_secs(60)).unwrap().into_iter();
    let first = ranks.next().unwrap();
    std::thread::scope(|scope| {
        let peers: Vec<_> = ranks
            .map(|comm| {
                let (peer, inputs) = sync_channel::<Flat>(1);
                scope.spawn(move || inputs.iter().for_each(|input| drop(collective(&*comm, input).wait().unwrap())));
                peer
            })
            .collect();
        // Ones: memory that was only asked for zeros would not be there before the clock runs.
        let input = Flat::from(vec![1f32; elements]);
        bencher.counter(BytesCount::new(bytes)).with_inputs(|| [(); RANKS].map(|()| input.clone())).bench_local_values(
            |[mine, theirs @ ..]| {
                peers.iter().zip(theirs).for_each(|(peer, input)| peer.send(input).unwrap());
                collective(&*first, mine).wait().unwrap()
            },
        );
    });
}

#[divan::bench(args = MIB, sample_count = 30, sample_size = 1)]
fn reduce_scatter(bencher: Bencher<'_, '_>, mib: usize) {
    measure(bencher, mib << 20, (mib << 20) / 4, |comm, input| comm.reduce_scatter(input, 0));
}

#[divan::bench(args = MIB, sample_count = 30, sample_size = 1)]
fn all_gather(bencher: Bencher<'_, '_>, mib: usize) {
    measure(bencher, mib << 20, (mib << 20) / 4 / RANKS, |comm, input| comm.all_gather(input, 0));
}

#[divan::bench(args = MIB, sample_count = 30, sample_size = 1)]
fn all_reduce(bencher: Bencher<'_, '_>, mib: usize) {
    measure(bencher, mib << 20, (mib << 20) / 4, |comm, input| comm.all_reduce(input, 0));
}
