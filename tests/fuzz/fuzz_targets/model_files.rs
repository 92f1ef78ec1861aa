//! The entry of target `model_files` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    candle_zero_fuzz::targets::model_files::run(data);
});
