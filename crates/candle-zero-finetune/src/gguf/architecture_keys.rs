//! Values of the metadata keys that begin with the name of the architecture.

use super::weight_reader::GgufFile;
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use candle_zero::util::counted;

/// A reader of the metadata of an architecture.
pub(super) struct ArchitectureMetadataReader<'a> {
    pub gguf: &'a GgufFile,
    pub architecture: &'a str,
}

impl<'a> ArchitectureMetadataReader<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.gguf.header.metadata.get(&format!("{}.{key}", self.architecture))
    }

    pub fn refuse(&self, key: &str, allowed: impl ToString) -> candle_zero::Error {
        let found = self.get(key).map_or("absent".to_owned(), |value| match value {
            Value::Array(values) => format!("a list of {}", counted(values.len(), "value")),
            Value::String(text) => format!("{text:?}"),
            // The number in the parentheses after the type name.
            value => format!("{value:?}").split(['(', ')']).nth(1).unwrap_or_default().to_owned(),
        });
        self.gguf.refuse(&format!("{}.{key}", self.architecture), found, allowed)
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = match value {
            Value::I32(size) => u32::try_from(*size).ok(),
            Value::I64(size) => u32::try_from(*size).ok(),
            value => value.to_u64().ok().and_then(|size| u32::try_from(size).ok()),
        };
        match size.filter(|size| *size > 0) {
            Some(size) => Ok(Some(size as usize)),
            None => Err(self.refuse(key, format!("a whole number from 1 to {}", u32::MAX))),
        }
    }

    pub fn need_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.refuse(key, "a whole number"))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value {
            // The shortest number that rounds to this value: 1e-5 is stored as 9.999999747e-6.
            Value::F32(number) if number.is_finite() => Ok(number.to_string().parse().ok()),
            Value::F64(number) if number.is_finite() => Ok(Some(*number)),
            value => match value.to_u64() {
                Ok(number) => Ok(Some(number as f64)),
                Err(_) => Err(self.refuse(key, "a number")),
            },
        }
    }

    pub fn need_number(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.refuse(key, "a number"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.refuse(key, "a string")),
        }
    }
}
