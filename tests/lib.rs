//! The integration tests of candle-zero and candle-zero-finetune, which README.md lists.
