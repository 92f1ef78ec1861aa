//! The libFuzzer entry point of the `model_files` target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::model_files::run(data);
});
