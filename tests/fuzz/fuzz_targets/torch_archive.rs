//! The libFuzzer entry point of the `torch_archive` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::torch_archive::run(data);
});
