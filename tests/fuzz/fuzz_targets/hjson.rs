//! The libFuzzer entry point of the `hjson` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::hjson::run(data);
});
