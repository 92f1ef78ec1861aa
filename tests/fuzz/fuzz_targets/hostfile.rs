//! The libFuzzer entry point of the `hostfile` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::hostfile::run(data);
});
