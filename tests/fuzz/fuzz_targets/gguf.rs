//! The libFuzzer entry point of the `gguf` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::gguf::run(data);
});
