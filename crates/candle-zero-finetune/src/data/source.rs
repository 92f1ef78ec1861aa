//! A data file and its weight.

use crate::error::FinetuneError;
use crate::error::Result;
use std::path::PathBuf;

/// A data file with the weight of its samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// The number of times that each of its samples occurs in an epoch. The default is 1; 0.5 uses half of the samples
    /// once.
    pub weight: f64,
}

impl Source {
    /// Parses a path, or a path and a weight (`chats.jsonl:2.5`).
    ///
    /// # Errors
    /// [`FinetuneError::Weight`] for a weight that is not above 0, or is above 1000.
    pub fn parse(text: &str) -> Result<Self> {
        let unweighted = Self { path: text.into(), weight: 1.0 };
        let Some((path, weight)) = text.rsplit_once(':').filter(|_| !unweighted.path.exists()) else {
            return Ok(unweighted);
        };
        match weight.parse::<f64>() {
            Ok(weight) if weight > 0.0 && weight <= 1000.0 => Ok(Self { path: path.into(), weight }),
            Ok(_) => Err(FinetuneError::Weight { text: text.into() }.into()),
            Err(_) => Ok(unweighted),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_stands_after_the_last_colon() {
        let parse = |text: &str| Source::parse(text).map_err(|e| e.to_string());
        let source = |path: &str, weight| Ok(Source { path: path.into(), weight });
        assert_eq!(parse("a.jsonl"), source("a.jsonl", 1.0));
        assert_eq!(parse("a.jsonl:2.5"), source("a.jsonl", 2.5));
        assert_eq!(parse("c:/a.jsonl"), source("c:/a.jsonl", 1.0));
        assert!(parse("a.jsonl:0").unwrap_err().contains("weight"));
        assert!(parse("a.jsonl:-1").is_err());
    }
}
