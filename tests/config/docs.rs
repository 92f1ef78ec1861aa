//! docs/config.md says what the table of keys says.

#[test]
fn the_reference_of_keys_is_the_table_of_keys() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/config.md");
    let wanted = candle_zero::config::reference_markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == wanted, "docs/config.md is out of date: UPDATE_DOCS=1 cargo test --release --test config docs::");
}
