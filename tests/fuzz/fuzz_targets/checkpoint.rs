//! The entry of target `checkpoint` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::checkpoint::run(data);
});
