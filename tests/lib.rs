//! The integration tests of candle-zero and candle-zero-finetune: README.md lists them.
