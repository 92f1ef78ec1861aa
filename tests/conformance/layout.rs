//! DeepSpeed's layouts, as recorded from DeepSpeed 0.19.8.

use crate::flat_layout::FlatLayout;
use crate::partition::{partition_balanced, partition_uniform};
use candle_zero::layout::{BucketFill, SubGroupFill, shard_len, shard_range};
use serde_json::{Value, json};

fn numbers(v: &Value) -> Vec<usize> {
    v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

fn number(v: &Value) -> usize {
    v.as_u64().unwrap() as usize
}

/// Returns the indices of items in groups; `closes` returns whether a group ends after an item.
fn grouped(n: usize, mut closes: impl FnMut(usize) -> bool) -> Vec<Vec<usize>> {
    let mut groups = vec![vec![]];
    for i in 0..n {
        groups.last_mut().unwrap().push(i);
        if closes(i) {
            groups.push(vec![]);
        }
    }
    groups.retain(|g| !g.is_empty());
    groups
}

fn run(case: &Value) -> Value {
    let input = &case["input"];
    let world = input["world_size"].as_u64().unwrap_or(1) as usize;
    match case["area"].as_str().unwrap() {
        "zero12-layout" if input.get("param_numels").is_some() => {
            let layout = FlatLayout::new(&numbers(&input["param_numels"]), world, input["round_robin"] == true);
            let ranges: Vec<_> =
                layout.order.iter().zip(&layout.ranges).map(|(i, r)| json!([i, r.start, r.end])).collect();
            json!({
                "order": layout.order, "padded_total": layout.padded_total, "partition_size": layout.partition_size,
                "padding_per_rank": (0..world).map(|r| layout.padding(r)).collect::<Vec<_>>(),
                "params_touching_rank": (0..world).map(|r| layout.params_of(r)).collect::<Vec<_>>(),
                "flat_ranges": ranges,
            })
        }
        "zero12-layout" => {
            // All partitions of a layout start at multiples of the start of partition 1, which is computed here in
            // bytes of a 16-bit format.
            let starts = (1..200).map(|n| FlatLayout::new(&[n], world, false).partition(1).start * 2);
            json!({ "partition_start_byte_alignment": if starts.into_iter().all(|s| s % 4 == 0) { 4 } else { 2 } })
        }
        "zero3-layout" if input.get("numel").is_some() => {
            let n = number(&input["numel"]);
            let ranges: Vec<_> =
                (0..world).map(|r| shard_range(n, world, r)).map(|r| json!([r.start, r.end])).collect();
            json!({ "elements_per_rank": shard_len(n, world), "padded_total": shard_len(n, world) * world, "real_range_of_rank": ranges })
        }
        "zero3-layout" if input.get("param_shape").is_some() => {
            json!({ "elements_per_rank": shard_len(numbers(&input["param_shape"]).iter().product(), world) })
        }
        "zero3-layout" => {
            let numels = numbers(&input["param_numels"]);
            let mut groups = SubGroupFill::new(number(&input["sub_group_size"]));
            json!({ "sub_groups (param indices)": grouped(numels.len(), |i| groups.push(shard_len(numels[i], world))) })
        }
        "gradient-bucket" => {
            let numels = numbers(&input["grad_numels_in_arrival_order"]);
            let mut fill = BucketFill::new(number(&input["reduce_bucket_size"]));
            fill.push(numels[0]);
            json!({ "reductions": grouped(numels.len(), |i| i + 1 < numels.len() && fill.push(numels[i + 1])) })
        }
        "partition" => {
            let parts = number(&input["parts"]);
            let bounds = match input.get("weights") {
                Some(w) => partition_balanced(&numbers(w).iter().map(|w| *w as u64).collect::<Vec<_>>(), parts),
                None => partition_uniform(number(&input["items"]), parts),
            };
            json!({ "bounds": bounds })
        }
        other => panic!("no such area here: {other}"),
    }
}

#[test]
fn layouts_are_deepspeeds() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/conformance_layout.json")).unwrap();
    for case in &cases {
        assert_eq!(run(case), case["expect"], "{}", case["id"]);
    }
    assert_eq!(cases.len(), 23);
}
