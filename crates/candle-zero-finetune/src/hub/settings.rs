//! Reads the environment variables of the Hugging Face Hub.

use super::error::HubError;
use crate::error::Result;
use candle_zero::util::cache_home;
use std::path::PathBuf;

/// The settings from the environment, read as huggingface_hub reads them.
#[derive(Debug)]
pub(super) struct HubSettings {
    /// The endpoint, without a slash at its end.
    pub endpoint: String,
    /// The folder that contains the repositories.
    pub cache: PathBuf,
    pub token: Option<String>,
    /// A file of certificates that are trusted instead of Mozilla's.
    pub certificates: Option<PathBuf>,
    /// Whether fetching is disabled.
    pub is_offline: bool,
}

/// The maximum size of a token file in bytes.
const MAX_TOKEN_BYTES: u64 = 1 << 16;

impl HubSettings {
    pub fn from_env() -> Result<Self> {
        let home = std::env::home_dir().filter(|home| home.is_absolute());
        Self::of(|name| std::env::var_os(name).filter(|value| !value.is_empty()), home)
    }

    fn of(get: impl Fn(&str) -> Option<std::ffi::OsString>, home: Option<PathBuf>) -> Result<Self> {
        let hugging_face = get("HF_HOME").map(PathBuf::from);
        let hugging_face = hugging_face.or_else(|| Some(cache_home(get("XDG_CACHE_HOME"), home)?.join("huggingface")));
        let cache = get("HF_HUB_CACHE").map(PathBuf::from);
        let cache = cache.or_else(|| Some(hugging_face.as_ref()?.join("hub"))).ok_or(HubError::NoCache)?;
        let token_file = get("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(hugging_face?.join("token")));
        // The file is optional. If it cannot be read, a request that needs the token fails with a message.
        let in_file = |path: PathBuf| {
            let token = candle_zero::files::read_text(&path, MAX_TOKEN_BYTES).ok()?;
            Some((format!("the token in {}", path.display()), token))
        };
        let named_token = get("HF_TOKEN").map(|token| ("HF_TOKEN".into(), token.to_string_lossy().into_owned()));
        let named_token =
            named_token.or_else(|| in_file(token_file?)).map(|(name, token)| (name, token.trim().to_owned()));
        let token = match named_token.filter(|(_, token)| !token.is_empty()) {
            Some((name, token)) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                let found = "a string with spaces or other special characters".into();
                let allowed = "a token, such as hf_ followed by letters";
                return Err(HubError::Setting { name, found, allowed }.into());
            }
            named_token => named_token.map(|(_, token)| token),
        };
        let endpoint = get("HF_ENDPOINT").map_or("https://huggingface.co".into(), |e| e.to_string_lossy().into_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let host = ["https://", "http://"].into_iter().find_map(|scheme| endpoint.strip_prefix(scheme));
        if host
            .is_none_or(|host| host.is_empty() || host.contains(|c: char| !c.is_ascii_graphic() || "?#@".contains(c)))
        {
            let allowed = "the address of a Hub, such as https://huggingface.co";
            return Err(HubError::Setting { name: "HF_ENDPOINT".into(), found: endpoint, allowed }.into());
        }
        // As in huggingface_hub, all other values mean no.
        let is_true = |value: &str| ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str());
        let is_offline = get("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value.to_string_lossy()));
        Ok(Self { endpoint, cache, token, certificates: get("SSL_CERT_FILE").map(PathBuf::from), is_offline })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)], home: Option<&str>) -> Result<HubSettings> {
        let get = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        HubSettings::of(get, home.map(PathBuf::from))
    }

    #[test]
    fn the_cache_is_where_hugging_faces_programs_have_it() {
        let cache = |variables: &[(&str, &str)]| of(variables, Some("/home/me")).unwrap().cache;
        assert_eq!(cache(&[]), PathBuf::from("/home/me/.cache/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/hf/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/models")]), PathBuf::from("/models"));
        insta::assert_snapshot!(of(&[], None).unwrap_err(), @"there is no folder for downloads from the Hugging Face Hub: HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME and HOME are not set; set HF_HOME to a folder");
    }

    #[test]
    fn a_token_comes_from_its_variable_or_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let token = |variables: &[(&str, &str)]| {
            let variables = [&[("HF_HOME", home)], variables].concat();
            of(&variables, None).unwrap().token
        };
        assert_eq!(token(&[]), None);
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(folder.path().join("other"), "hf_other").unwrap();
        assert_eq!(token(&[]).unwrap(), "hf_file");
        assert_eq!(token(&[("HF_TOKEN", " hf_said ")]).unwrap(), "hf_said");
        let other = folder.path().join("other");
        assert_eq!(token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]).unwrap(), "hf_other");
        let error = of(&[("HF_HOME", home), ("HF_TOKEN", "hf_a\nb: c")], None).unwrap_err();
        insta::assert_snapshot!(error, @"HF_TOKEN is a string with spaces or other special characters, but must be a token, such as hf_ followed by letters");
        std::fs::write(folder.path().join("token"), "hf_a b").unwrap();
        let error = of(&[("HF_HOME", home)], None).unwrap_err().to_string();
        let file = folder.path().join("token").display().to_string();
        insta::assert_snapshot!(error.replace(&file, "FILE"), @"the token in FILE is a string with spaces or other special characters, but must be a token, such as hf_ followed by letters");
    }

    #[test]
    fn the_address_and_being_offline_are_read_as_huggingface_hub_reads_them() {
        let with = |variables: &[(&str, &str)]| of(variables, Some("/home/me"));
        assert_eq!(with(&[]).unwrap().endpoint, "https://huggingface.co");
        assert_eq!(with(&[("HF_ENDPOINT", "http://localhost:80/hub/")]).unwrap().endpoint, "http://localhost:80/hub");
        for (value, expected) in [("1", true), ("yes", true), ("True", true), ("0", false), ("no", false), ("x", false)]
        {
            assert_eq!(with(&[("HF_HUB_OFFLINE", value)]).unwrap().is_offline, expected, "{value}");
        }
        for wrong in ["huggingface.co", "https://", "ftp://a", "https://a b", "https://a?b", "https://me:secret@a"] {
            assert!(with(&[("HF_ENDPOINT", wrong)]).is_err(), "{wrong}");
        }
        let error = with(&[("HF_ENDPOINT", "huggingface.co")]).unwrap_err();
        insta::assert_snapshot!(error, @"HF_ENDPOINT is huggingface.co, but must be the address of a Hub, such as https://huggingface.co");
    }
}
