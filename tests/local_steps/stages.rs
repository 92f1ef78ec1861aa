//! Every stage, with and without offload to files, gives the same bits; bytes in memory and on the wire match the
//! formula.

use super::{SIZES, config, engine, on_ranks, train, weights};
use candle_zero::memory::MemoryKind;
use serde_json::{Value, json};

const PSI: usize = SIZES[0] + SIZES[1] + SIZES[2] + SIZES[3];

fn settings(wire: &str) -> Value {
    json!({"steps": 3, "fragments": 2, "fragment_delay": 1, "fragment_alpha": 0.5, "wire_dtype": wire})
}

#[test]
fn all_stages_with_and_without_files_have_the_same_bits_in_every_wire_format() {
    let folder = tempfile::tempdir().unwrap();
    let mut of_wires = Vec::new();
    for wire in ["fp32", "bf16", "int8", "int4"] {
        let run = |stage: usize, in_files: bool| {
            on_ranks(4, |comm| {
                let mut config = config(&settings(wire), stage, 2);
                if in_files {
                    let offload = json!({"device": "nvme", "nvme_path": folder.path()});
                    config["zero_optimization"]["offload_optimizer"] = offload.clone();
                    if stage == 3 {
                        config["zero_optimization"]["offload_param"] = offload;
                    }
                }
                let mut engine = engine(comm, config)?;
                train(&mut engine, 1..=7)?;
                let in_flight = weights(&mut engine);
                engine.synchronize_islands()?;
                Ok((in_flight, weights(&mut engine)))
            })
        };
        let expected = run(0, false);
        assert_ne!(expected[0].0, expected[2].0, "islands differ within a window");
        assert!(expected.iter().all(|(_, ends)| *ends == expected[0].1), "islands are equal when the window has ended");
        for (stage, in_files) in [(1, false), (2, false), (3, false), (1, true), (2, true), (3, true)] {
            assert!(run(stage, in_files) == expected, "{wire}, stage {stage}, in files: {in_files}");
        }
        of_wires.push(expected[0].1.clone());
    }
    assert!((1..4).all(|wire| of_wires[wire] != of_wires[0]));
}

#[test]
fn outer_states_are_sharded_among_the_ranks_of_an_island_and_in_the_ledger() {
    for (section, states) in [
        (json!({"steps": 2}), 2),
        (json!({"steps": 2, "outer_momentum": 0.0}), 1),
        (json!({"steps": 2, "fragment_delay": 1}), 3),
    ] {
        for (stage, shards) in [(0, 1.0), (1, 2.0), (3, 2.0)] {
            let rows = on_ranks(4, |comm| {
                let engine = engine(comm, config(&section, stage, 2))?;
                let rows = engine.memory_report().rows;
                Ok(rows.into_iter().find(|row| row.kind == MemoryKind::OuterStates).unwrap())
            });
            for row in rows {
                assert_eq!(row.formula, Some((states * 4 * PSI) as f64 / shards));
                assert_eq!(row.bytes.held as f64, row.formula.unwrap() + row.padding);
            }
        }
    }
}

#[test]
fn an_exchange_moves_the_bytes_of_the_formula() {
    let received = |wire: &str, islands: usize| {
        let section = json!({"steps": 5, "wire_dtype": wire});
        on_ranks(2 * islands, |comm| {
            let mut engine = engine(comm, config(&section, 2, islands))?;
            train(&mut engine, 1..=10)?;
            let report = engine.island_report().unwrap();
            Ok(report
                .kinds
                .iter()
                .filter(|(kind, _)| kind.name() != "control")
                .map(|(_, traffic)| traffic.wire_bytes)
                .sum::<u64>())
        })
    };
    for islands in [2, 4] {
        // There are two exchanges, each with a sum and a gather. The 42 elements in a rank's pieces are divided into
        // one part per island; a sum or a gather receives one part from each other island.
        let part = |align: usize| (PSI.div_ceil(2)).div_ceil(islands).next_multiple_of(align) as u64;
        let times = 2 * 2 * (islands as u64 - 1);
        assert_eq!(received("fp32", islands)[0], times * 4 * part(1));
        assert_eq!(received("bf16", islands)[0], times * 2 * part(1));
    }
}
