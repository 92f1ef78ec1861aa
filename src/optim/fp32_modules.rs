//! The modules of a 16-bit model whose parameters stay in f32 (`data_types.keep_in_fp32_modules`).
//!
//! ```text
//!   "ln_f"          h.3.ln_f.weight, ln_f.bias                  complete words of a name, between dots
//!   "mlp.c_proj"    h.0.mlp.c_proj.weight                       several consecutive words
//!   "ln_*"          ln_f.bias, h.3.ln_1.weight                  * matches any characters
//! ```

use crate::error::{ParamError, Result};
use crate::util::{list, matches, suggest_names};
use std::collections::BTreeSet;

/// The names of the modules whose parameters stay in f32, as given in the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp32Modules<'a>(pub &'a [String]);

impl Fp32Modules<'_> {
    /// Returns whether a parameter or buffer of this name belongs to one of the modules.
    pub fn keep(self, name: &str) -> bool {
        self.0.iter().any(|module| is_in(module, name))
    }

    /// Checks that each module occurs in a name.
    ///
    /// # Errors
    /// [`ParamError::NoSuchModule`] for a module that does not occur in any name of `all`.
    pub fn check<'n>(self, all: impl Iterator<Item = &'n str> + Clone) -> Result<()> {
        let Some(name) = self.0.iter().find(|module| !all.clone().any(|name| is_in(module, name))) else {
            return Ok(());
        };
        let modules: BTreeSet<&str> = all.flat_map(names).filter(|name| name.parse::<u64>().is_err()).collect();
        let suggestion = suggest_names(name, modules.iter().copied()).unwrap_or_else(|| {
            let modules: Vec<&str> = modules.iter().copied().filter(|name| !name.contains('.')).collect();
            format!("no name is similar; the modules are {}", list(&modules))
        });
        Err(ParamError::NoSuchModule { name: name.clone(), suggestion }.into())
    }
}

/// Returns whether `module` matches complete words of `name`.
fn is_in(module: &str, name: &str) -> bool {
    let starts = std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1));
    starts.map(|start| &name[start..]).any(|rest| {
        let ends = rest.match_indices('.').map(|(at, _)| at).chain(std::iter::once(rest.len()));
        ends.map(|end| &rest[..end]).any(|words| matches(module, words))
    })
}

/// Returns the possible names of the modules that contain a parameter: each prefix of the parameter's path, and the
/// last word of each prefix.
fn names(parameter: &str) -> impl Iterator<Item = &str> {
    let ends = parameter.match_indices('.').map(|(at, _)| at);
    ends.flat_map(|end| {
        let path = &parameter[..end];
        [path, path.rsplit('.').next().unwrap_or(path)]
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_by_whole_words_of_its_path() {
        for (module, name, expected) in [
            ("ln_f", "ln_f.weight", true),
            ("ln_f", "model.ln_f.weight", true),
            ("ln", "ln_f.weight", false),
            ("ln_f", "xln_f.weight", false),
            ("ln_*", "h.0.ln_1.bias", true),
            ("*layernorm*", "blocks.1.post_layernorm.bias", true),
            ("layernorm", "blocks.1.post_layernorm.bias", false),
            ("mlp.c_proj", "h.0.mlp.c_proj.weight", true),
            ("mlp.weight", "h.0.mlp.c_proj.weight", false),
            ("h.0", "h.0.ln_1.bias", true),
            ("h.1", "h.11.ln_1.bias", false),
            ("h.0.ln_1.bias", "h.0.ln_1.bias", true),
            ("bias", "h.0.ln_1.bias", true),
            ("LN_F", "ln_f.weight", false),
            ("é", "h.é.weight", true),
        ] {
            assert_eq!(Fp32Modules(&[module.to_string()]).keep(name), expected, "{module} {name}");
        }
        assert!(!Fp32Modules(&[]).keep("ln_f.weight"));
    }

    #[test]
    fn a_module_that_is_not_there_is_told_with_those_that_are_like_it() {
        let all = ["wte.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.bias", "ln_f.weight"];
        let check = |module: &str| {
            let modules = ["wte".to_string(), module.to_string()];
            Fp32Modules(&modules).check(all.into_iter()).map_err(|error| error.to_string())
        };
        assert_eq!(check("ln_f"), Ok(()));
        insta::assert_snapshot!(check("lnf").unwrap_err(), @"data_types.keep_in_fp32_modules: the model has no module lnf: the nearest are ln_f, ln_1; a module is given as complete dot-separated parts of a parameter's name, in which * matches any characters; correct the name, or remove it");
        insta::assert_snapshot!(check("router").unwrap_err(), @"data_types.keep_in_fp32_modules: the model has no module router: no name is similar; the modules are attn, c_attn, h, ln_1, ln_f, wte; a module is given as complete dot-separated parts of a parameter's name, in which * matches any characters; correct the name, or remove it");
    }
}
