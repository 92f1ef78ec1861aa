//! Values of a configuration by their paths, such as `optimizer.params.lr`.

use serde_json::{Value, json};

/// Returns the value at a path of keys, or null if there is none.
pub(super) fn get<'a>(config: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(config, |value, key| &value[key])
}

/// Sets the value at a path of keys, or removes the key if the value is null.
pub(super) fn set(config: &mut Value, path: &str, value: Value) {
    let (section, key) = path.rsplit_once('.').map_or((None, path), |(section, key)| (Some(section), key));
    let parent = section.iter().flat_map(|section| section.split('.')).try_fold(config, |parent, key| {
        let map = parent.as_object_mut()?;
        Some(map.entry(key).or_insert_with(|| json!({})))
    });
    if let Some(map) = parent.and_then(Value::as_object_mut) {
        if value.is_null() {
            map.remove(key);
        } else {
            map.insert(key.into(), value);
        }
    }
}
