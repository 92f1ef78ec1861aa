//! The libFuzzer entry point of the `wire` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::wire::run(data);
});
