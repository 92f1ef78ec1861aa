//! The libFuzzer entry point of the `checkpoint` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::checkpoint::run(data);
});
