//! Decides which requests are answered.
//!
//! A page of another site can make the browser send requests to this server. Such a site cannot read the responses
//! unless its name resolves to this host (DNS rebinding), so only names that no other site can own are accepted as the
//! host. POST requests need the token, which is shown only in the terminal.

use super::error::DashboardError;
use super::http::{HttpRefusal, HttpRequest};
use candle_zero::util::{hex, host_name};
use std::net::{IpAddr, Ipv6Addr};

/// The number of random bytes of a token.
const TOKEN_BYTES: usize = 24;

/// A random text that proves that a request comes from somebody who has seen the terminal.
#[derive(Clone)]
pub(super) struct ActionToken(String);

impl std::fmt::Debug for ActionToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ActionToken(...)")
    }
}

impl ActionToken {
    /// Draws a token.
    pub(super) fn draw() -> Result<Self, DashboardError> {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| DashboardError::Token { reason: error.to_string() })?;
        Ok(Self(hex(&bytes)))
    }

    /// Returns the token as text, for the link in the terminal.
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Returns whether a request has the token. The time that this takes does not depend on the position of a wrong
    /// character.
    fn is_in(&self, request: &HttpRequest) -> bool {
        let given = request.header("authorization").and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        let differences = self.0.bytes().zip(given.bytes()).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
        given.len() == self.0.len() && differences == 0
    }
}

/// The rules for a server that is bound to an address.
#[derive(Debug, Clone)]
pub(super) struct AccessRules {
    pub(super) token: ActionToken,
    /// The name of this host, if others can reach the server.
    pub(super) name: Option<String>,
}

impl AccessRules {
    pub(super) fn new(bound: IpAddr) -> Result<Self, DashboardError> {
        Ok(Self { token: ActionToken::draw()?, name: (!bound.is_loopback()).then(host_name) })
    }

    /// Checks the host that a request names and, for a POST request, also the token.
    ///
    /// # Errors
    /// Fails with status 403 and the reason if the request is not allowed.
    pub(super) fn check(&self, request: &HttpRequest) -> Result<(), HttpRefusal> {
        let forbidden = |text: &str| Err(HttpRefusal::new(403, text));
        match request.header("host") {
            Some(host) if self.is_own_host(host) => {}
            _ => {
                return forbidden("the host name in this address is unknown; use the address that zerorun has printed");
            }
        }
        // Other sites must not even find out whether a run exists.
        if request.header("sec-fetch-site") == Some("cross-site") && request.path.starts_with("/api/") {
            return forbidden("this request comes from another site");
        }
        if request.method != "POST" {
            return Ok(());
        }
        if request.header("origin").is_some_and(|origin| !self.is_own_origin(origin)) {
            return forbidden("this request comes from another site");
        }
        match self.token.is_in(request) {
            true => Ok(()),
            false => forbidden("this request needs the token; open the link that zerorun has printed"),
        }
    }

    /// Returns whether a `Host` header is one that no other site can own: an IP address, localhost, or the name of this
    /// host if others can reach the server. The port may differ, because the request may come through a tunnel.
    fn is_own_host(&self, host: &str) -> bool {
        if let Some((address, rest)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let is_port = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
            return address.parse::<Ipv6Addr>().is_ok() && is_port;
        }
        let name = match host.rsplit_once(':') {
            Some((name, port)) if is_port(port) => name,
            Some(_) => return false,
            None => host,
        };
        let is_name = |own: &String| name.eq_ignore_ascii_case(own);
        name.parse::<std::net::Ipv4Addr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || self.name.as_ref().is_some_and(is_name)
    }

    fn is_own_origin(&self, origin: &str) -> bool {
        origin.strip_prefix("http://").is_some_and(|host| self.is_own_host(host))
    }
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn request(method: &str, headers: &[(&str, &str)]) -> HttpRequest {
        HttpRequest {
            method: method.into(),
            path: "/api/request".into(),
            query: vec![],
            headers: headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        }
    }

    #[test]
    fn only_names_that_no_other_site_can_own_are_accepted_as_the_host() {
        let rules = AccessRules::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let open = AccessRules { name: Some("node-1".into()), ..rules.clone() };
        for host in ["127.0.0.1:80", "127.0.0.1", "localhost:1", "LOCALHOST", "10.1.2.3:8321", "[::1]:8321", "[::1]"] {
            assert!(rules.is_own_host(host), "{host}");
        }
        let others = [
            "",
            "evil.example",
            "evil.example:8321",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            ":80",
            "[::1",
            "[evil]:1",
            "[::1]evil",
            "127.0.0.1:",
            "127.0.0.1:x",
            "node-1:80",
            "localhost:80:80",
        ];
        for host in others {
            assert!(!rules.is_own_host(host), "{host}");
        }
        assert!(open.is_own_host("Node-1:80") && !open.is_own_host("node-2:80"));
    }

    #[test]
    fn requests_that_act_need_the_token_and_the_own_origin() {
        let rules = AccessRules::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let token = format!("Bearer {}", rules.token.text());
        let is_allowed = |method: &str, headers: &[(&str, &str)]| rules.check(&request(method, headers)).is_ok();
        let host = ("host", "localhost:1");
        assert!(is_allowed("GET", &[host]) && !is_allowed("GET", &[]) && !is_allowed("POST", &[host]));
        assert!(is_allowed("POST", &[host, ("authorization", &token)]));
        for wrong in ["Bearer ", "Bearer x", &token[..token.len() - 1], &format!("{token}0"), &token["Bearer ".len()..]]
        {
            assert!(!is_allowed("POST", &[host, ("authorization", wrong)]), "{wrong}");
        }
        let authorization = ("authorization", token.as_str());
        assert!(is_allowed("POST", &[host, authorization, ("origin", "http://localhost:1")]));
        for origin in ["http://evil.example", "null", "https://localhost:1"] {
            assert!(!is_allowed("POST", &[host, authorization, ("origin", origin)]), "{origin}");
        }
        assert!(!is_allowed("GET", &[host, ("sec-fetch-site", "cross-site")]));
        assert!(is_allowed("GET", &[host, ("sec-fetch-site", "same-origin")]));
        assert_ne!(ActionToken::draw().unwrap().text(), rules.token.text());
        assert!(!format!("{rules:?}").contains(rules.token.text()));
    }
}
