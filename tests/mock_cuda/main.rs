//! The mock of CUDA (tools/mock_cuda) finds faults that a GPU tolerates: most tests plant a fault in a child process,
//! and some also run the same program without the fault. On a machine with a real driver, or without any, the tests are
//! skipped.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "only a part of it is used")]
#[path = "../support/skips.rs"]
mod skips;

mod device;
mod nccl;

use device::{Device, is_mock};
use std::process::{Command, Output};

const SEEDS: std::ops::RangeInclusive<u64> = 0..=20;
const ROLE: &str = "MOCK_CUDA_TEST_ROLE";

/// Runs `test` again as a child with a role, a seed for the order of streams, and more variables.
fn child(test: &str, role: &str, seed: u64, env: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(device::PTX_OF_PARENT, device::ptx())
        .env("MOCK_CUDA_SEED", seed.to_string())
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

/// Returns the text that a child prints with [`answer`].
fn answer_of(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let line = stdout.lines().find_map(|l| l.split_once("answer: "));
    line.unwrap_or_else(|| panic!("no answer: {stdout}{stderr}")).1.into()
}

fn answer(value: impl std::fmt::Debug) {
    println!("answer: {value:?}");
}

/// Returns the mock's message about the fault that ended a child.
fn fault_of(output: &Output) -> String {
    assert!(!output.status.success(), "the fault was not found: {}", String::from_utf8_lossy(&output.stdout));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let line = stderr.lines().find(|l| l.starts_with("mock_cuda: "));
    line.unwrap_or_else(|| panic!("the child ended differently: {:?}: {stderr}", output.status)).into()
}

/// Returns the role of this process, if it is a child.
fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Returns whether `test` can run. If it cannot, reports it as skipped.
fn has_mock<T: Fn()>(test: T) -> bool {
    let is_available = is_mock();
    if !is_available {
        skips::skipped(test, "needs the mock of CUDA, tools/mock_cuda");
    }
    is_available
}

#[test]
fn a_missing_wait_between_streams_is_found() {
    if !has_mock(a_missing_wait_between_streams_is_found) {
        return;
    }
    let name = "a_missing_wait_between_streams_is_found";
    if let Some(role) = role() {
        let device = Device::new(0);
        let (one, two) = (device.stream(), device.stream());
        let (values, copy) = (device.filled(one, &[1f32; 64]), device.filled(one, &[0f32; 64]));
        device.wait(one);
        device.add_one(one, values, 64);
        if role == "ordered" {
            device.order(one, two);
        }
        device.copy(two, copy, values, 64);
        device.wait(two);
        return answer(device.read(two, copy, 64)[63]);
    }
    let answers = |role| -> Vec<String> { SEEDS.map(|seed| answer_of(&child(name, role, seed, &[]))).collect() };
    assert!(answers("ordered").iter().all(|a| a == "2.0"));
    let wrong = answers("not ordered").iter().filter(|a| *a == "1.0").count();
    assert!(wrong > SEEDS.count() / 4, "the number of orders that reveal it is only {wrong}");
}

#[test]
fn a_copy_to_pinned_memory_that_nobody_waits_for_is_found() {
    if !has_mock(a_copy_to_pinned_memory_that_nobody_waits_for_is_found) {
        return;
    }
    let name = "a_copy_to_pinned_memory_that_nobody_waits_for_is_found";
    if let Some(role) = role() {
        let device = Device::new(0);
        let stream = device.stream();
        let values = device.filled(stream, &[3f32; 64]);
        let pinned = device.pinned(64);
        device.copy_to_pinned(stream, pinned, values);
        if role == "waits" {
            device.wait(stream);
        }
        return answer(pinned[0]);
    }
    for seed in SEEDS {
        assert_eq!(answer_of(&child(name, "waits", seed, &[])), "3.0");
        assert_eq!(answer_of(&child(name, "does not", seed, &[])), "NaN");
    }
}

#[test]
fn a_host_that_reads_device_memory_is_found() {
    if !has_mock(a_host_that_reads_device_memory_is_found) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let values = device.filled(device.stream(), &[1f32; 64]) as *const f32;
        // SAFETY: none; this is the fault.
        return answer(unsafe { values.add(3).read_volatile() });
    }
    insta::assert_snapshot!(
        fault_of(&child("a_host_that_reads_device_memory_is_found", "", 0, &[])),
        @"mock_cuda: the host touches device memory: byte 12 of allocation 1, which has 256 bytes and is live"
    );
}

#[test]
fn memory_used_after_its_release_is_found() {
    if !has_mock(memory_used_after_its_release_is_found) {
        return;
    }
    if let Some(role) = role() {
        let device = Device::new(0);
        let (one, two) = (device.stream(), device.stream());
        let values = device.filled(one, &[1f32; 64]);
        match role.as_str() {
            "same stream" => {
                device.free(one, values);
                device.add_one(one, values, 64);
            }
            _ => {
                device.wait(one);
                device.add_one(two, values, 64);
                device.free(one, values);
                device.wait(one);
            }
        }
        device.wait(one);
        device.wait(two);
        return answer(());
    }
    for role in ["same stream", "released while another stream uses it"] {
        assert_eq!(
            fault_of(&child("memory_used_after_its_release_is_found", role, 0, &[])),
            "mock_cuda: kernel add_one touches memory that is not its own: byte 0 of allocation 1, which has 256 bytes and is freed"
        );
    }
}

#[test]
fn a_second_release_is_found() {
    if !has_mock(a_second_release_is_found) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let stream = device.stream();
        let values = device.filled(stream, &[1f32; 64]);
        device.free(stream, values);
        return device.free(stream, values);
    }
    let fault = fault_of(&child("a_second_release_is_found", "", 0, &[]));
    assert!(
        fault.starts_with("mock_cuda: cuMemFreeAsync: 0x")
            && fault.ends_with(" is not an allocation, or was already freed"),
        "{fault}"
    );
}

#[test]
fn a_kernel_that_leaves_its_memory_is_found() {
    if !has_mock(a_kernel_that_leaves_its_memory_is_found) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let stream = device.stream();
        let values = device.filled(stream, &[1f32; 64]);
        device.add_one(stream, values, 65);
        return device.wait(stream);
    }
    insta::assert_snapshot!(
        fault_of(&child("a_kernel_that_leaves_its_memory_is_found", "", 0, &[])),
        @"mock_cuda: kernel add_one touches memory that is not its own: byte 256 of allocation 1, which has 256 bytes and is live"
    );
}

#[test]
fn an_address_in_a_table_is_followed_only_as_one_of_global_memory() {
    if !has_mock(an_address_in_a_table_is_followed_only_as_one_of_global_memory) {
        return;
    }
    let name = "an_address_in_a_table_is_followed_only_as_one_of_global_memory";
    if let Some(role) = role() {
        let device = Device::new(0);
        let stream = device.stream();
        let value = device.filled(stream, &[1f32]);
        let table = device.filled(stream, &[value as u32, (value >> 32) as u32].map(f32::from_bits));
        device.launch(stream, "add_one_by_table", (1, 1, 0), &[table, u64::from(role == "global")]).unwrap();
        return answer(device.read(stream, value, 1)[0]);
    }
    assert_eq!(answer_of(&child(name, "global", 0, &[])), "2.0");
    insta::assert_snapshot!(
        fault_of(&child(name, "as it is", 0, &[])),
        @"mock_cuda: kernel add_one_by_table touches a device address that it did not get as an argument: byte 0 of allocation 1, which has 4 bytes and is live"
    );
}

#[test]
fn memory_of_another_device_is_refused() {
    if !has_mock(memory_of_another_device_is_refused) {
        return;
    }
    let (zero, one) = (Device::new(0), Device::new(1));
    one.make_current();
    let theirs = one.filled(one.stream(), &[1f32; 64]);
    zero.make_current();
    assert_eq!(zero.try_add_one(zero.stream(), theirs, 64), Err("CUDA_ERROR_INVALID_VALUE".into()));
}

#[test]
fn fresh_memory_is_not_a_number() {
    if has_mock(fresh_memory_is_not_a_number) {
        let device = Device::new(0);
        let stream = device.stream();
        let values = device.alloc(stream, 64);
        assert!(device.read(stream, values, 64).iter().all(|v| v.is_nan()));
    }
}

#[test]
fn a_device_has_no_more_memory_than_it_is_given_and_counts_what_lives() {
    if !has_mock(a_device_has_no_more_memory_than_it_is_given_and_counts_what_lives) {
        return;
    }
    if role().is_some() {
        let device = Device::new(1);
        let stream = device.stream();
        let first = device.alloc(stream, 192 << 10);
        let second = device.try_alloc(stream, 128 << 10);
        let before = device.live_and_peak_bytes();
        device.free(stream, first);
        let third = device.try_alloc(stream, 128 << 10);
        return answer((second.unwrap_err(), before, third.is_ok(), device.live_and_peak_bytes()));
    }
    // The device has 1 MiB. 192 Ki floats take 768 KiB, and 128 Ki floats take 512 KiB.
    let name = "a_device_has_no_more_memory_than_it_is_given_and_counts_what_lives";
    assert_eq!(
        answer_of(&child(name, "", 0, &[("MOCK_CUDA_MEMORY", "1048576")])),
        r#"("CUDA_ERROR_OUT_OF_MEMORY", (786432, 786432), true, (524288, 786432))"#
    );
}

#[test]
fn barriers_and_shuffles_give_the_sum_in_every_order_of_threads() {
    if !has_mock(barriers_and_shuffles_give_the_sum_in_every_order_of_threads) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let stream = device.stream();
        // The sums of these small integers are exact.
        let values: Vec<f32> = (0..1024u16).map(|i| f32::from(i % 37)).collect();
        let (values, sums) = (device.filled(stream, &values), device.alloc(stream, 4));
        let mut all = Vec::new();
        for kernel in ["sum_of_block", "sum_by_shuffles"] {
            device.launch(stream, kernel, (4, 256, 8 * 4), &[values, sums]).unwrap();
            all.extend(device.read(stream, sums, 4));
        }
        return answer(all);
    }
    let want: Vec<f32> = (0..4).map(|b| (b * 256..(b + 1) * 256).map(|i| (i % 37) as f32).sum()).collect();
    let want = format!("{:?}", [&want[..], &want].concat());
    for seed in SEEDS {
        assert_eq!(
            answer_of(&child("barriers_and_shuffles_give_the_sum_in_every_order_of_threads", "", seed, &[])),
            want
        );
    }
}

#[test]
fn a_forgotten_barrier_is_found_in_some_order_of_threads() {
    if !has_mock(a_forgotten_barrier_is_found_in_some_order_of_threads) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let stream = device.stream();
        let (values, reversed) = (device.filled(stream, &[5f32; 256]), device.alloc(stream, 256));
        device.launch(stream, "forgotten_barrier", (1, 256, 0), &[values, reversed]).unwrap();
        return answer(device.read(stream, reversed, 256).iter().all(|v| *v == 5.0));
    }
    let name = "a_forgotten_barrier_is_found_in_some_order_of_threads";
    assert!(SEEDS.map(|seed| answer_of(&child(name, "", seed, &[]))).any(|right| right == "false"));
}

#[test]
fn a_kernel_that_would_hang_is_an_error_with_its_name() {
    if !has_mock(a_kernel_that_would_hang_is_an_error_with_its_name) {
        return;
    }
    if role().is_some() {
        let device = Device::new(0);
        let stream = device.stream();
        let values = device.alloc(stream, 64);
        device.launch(stream, "waits_for_ever", (1, 64, 0), &[values]).unwrap();
        return device.wait(stream);
    }
    insta::assert_snapshot!(
        fault_of(&child("a_kernel_that_would_hang_is_an_error_with_its_name", "", 0, &[])),
        @"mock_cuda: waits_for_ever hangs: 32 threads of a block wait for all the others, and 32 wait for lanes of their warp that do not arrive"
    );
}

#[test]
fn a_call_without_a_stand_in_says_its_name() {
    if !has_mock(a_call_without_a_stand_in_says_its_name) {
        return;
    }
    if role().is_some() {
        // SAFETY: the call ends the process before it reads its arguments.
        unsafe { candle_core::cuda_backend::cudarc::driver::sys::cuGraphDestroy(std::ptr::null_mut()) };
    }
    insta::assert_snapshot!(
        fault_of(&child("a_call_without_a_stand_in_says_its_name", "", 0, &[])),
        @"mock_cuda: cuGraphDestroy is not implemented"
    );
}
