//! The addresses on which the first host listens: those of `--bind_addr` or `--master_addr`. If a name in
//! `--master_addr`, other than localhost, resolves only to loopback addresses, the first host listens on all its
//! addresses.

use crate::error::{HostsError, Result};
use crate::launch::console::eprint;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The interval at which an unknown name is looked up again, and the time after which this is reported.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
const REPORT_DELAY: Duration = Duration::from_secs(3);

/// The option that gives the address to listen on if other hosts reach this host at a different address.
pub(crate) const BIND_ADDR: &str = "bind_addr";

/// The addresses on which the first host listens.
#[derive(Debug)]
pub(super) struct ListenAddresses {
    pub(super) listeners: Vec<TcpListener>,
    /// The addresses at which this host itself connects to the listeners.
    pub(super) local_addresses: Vec<SocketAddr>,
}

impl ListenAddresses {
    /// Returns an address that is reachable from other hosts, if any.
    pub(super) fn open_to_others(&self) -> Option<IpAddr> {
        let addresses = self.listeners.iter().filter_map(|listener| listener.local_addr().ok());
        addresses.map(|address| address.ip()).find(|ip| !ip.is_loopback())
    }
}

/// Listens on `master_addr`, or on `bind_addr` if it is given. An unknown name is looked up again for up to `patience`
/// (a cluster's DNS entries may appear after its pods).
///
/// # Errors
/// Fails if the port is in use, the name stays unknown, or the address belongs to another host.
pub(super) fn listen(
    master_addr: &str,
    bind_addr: Option<&str>,
    port: u16,
    patience: Duration,
) -> Result<ListenAddresses> {
    let name = bind_addr.unwrap_or(master_addr);
    let option = if bind_addr.is_some() { BIND_ADDR } else { "master_addr" };
    let addresses = resolve((option, name), port, patience)?;
    let port_error = |source: std::io::Error| HostsError::PortTaken { port, why: source.to_string() };
    let mut listeners = Vec::new();
    for address in &addresses {
        match TcpListener::bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if is_elsewhere(&error) => {}
            Err(error) => return Err(port_error(error).into()),
        }
    }
    if listeners.is_empty() {
        let texts: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
        let (address, found) = (name.to_string(), texts.join(" and "));
        return Err(HostsError::FirstIsElsewhere { option, address, found }.into());
    }
    let is_loopback = |listener: &TcpListener| listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    if bind_addr.is_none() && !means_loopback(name) && listeners.iter().all(is_loopback) {
        // On Debian, for example, /etc/hosts maps a host's own name to a loopback address. Other hosts resolve it
        // differently.
        eprint(&format!(
            "zerorun: on this host, {name} resolves to {}, which other hosts cannot reach, so zerorun listens on all \
             addresses of this host; set --{BIND_ADDR} to choose one",
            addresses[0].ip()
        ));
        drop(listeners);
        listeners = vec![listen_on_all_addresses(port).map_err(port_error)?];
    }
    let local_addresses =
        listeners.iter().filter_map(|listener| listener.local_addr().ok()).flat_map(connect_addresses).collect();
    Ok(ListenAddresses { listeners, local_addresses })
}

/// Returns the addresses of the name that an option gives, without duplicates.
fn resolve((option, name): (&'static str, &str), port: u16, patience: Duration) -> Result<Vec<SocketAddr>> {
    let (since, mut is_reported) = (Instant::now(), false);
    loop {
        let why = match (name, port).to_socket_addrs() {
            Ok(found) => {
                let mut addresses = Vec::new();
                found.for_each(|address| {
                    if !addresses.contains(&address) {
                        addresses.push(address);
                    }
                });
                if !addresses.is_empty() {
                    return Ok(addresses);
                }
                "it has no address".to_string()
            }
            Err(error) => error.to_string(),
        };
        if since.elapsed() >= patience {
            let (address, seconds) = (name.into(), patience.as_secs());
            return Err(HostsError::UnknownAddress { option, address, seconds, why }.into());
        }
        if since.elapsed() >= REPORT_DELAY && !is_reported {
            is_reported = true;
            eprint(&format!("zerorun: {name} cannot be resolved yet ({why}); trying again"));
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Returns whether listening failed because the address does not belong to this host.
fn is_elsewhere(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable
        || error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
}

/// Returns whether a name that resolves to loopback addresses is meant to do so: whether it is an IP address or one of
/// localhost's names.
fn means_loopback(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let first = name.split('.').next().unwrap_or_default();
    name.parse::<IpAddr>().is_ok()
        || ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"].contains(&first)
        || name.ends_with(".localhost")
}

/// Listens on all addresses of this host.
fn listen_on_all_addresses(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        ErrorKind::AddrInUse => Err(error),
        // IPv6 is not available.
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    })
}

/// Returns the addresses at which this host connects to its own listening address.
fn connect_addresses(address: SocketAddr) -> Vec<SocketAddr> {
    match address.ip() {
        ip if !ip.is_unspecified() => vec![address],
        IpAddr::V4(_) => vec![(Ipv4Addr::LOCALHOST, address.port()).into()],
        IpAddr::V6(_) => {
            vec![(Ipv4Addr::LOCALHOST, address.port()).into(), (Ipv6Addr::LOCALHOST, address.port()).into()]
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn listen_at(name: &str, bind_addr: Option<&str>) -> Result<ListenAddresses> {
        listen(name, bind_addr, 0, Duration::ZERO)
    }

    #[test]
    fn the_port_is_open_at_the_address_alone() {
        let listening = listen_at("127.0.0.1", None).unwrap();
        assert_eq!(listening.open_to_others(), None);
        assert_eq!(listening.local_addresses[0], listening.listeners[0].local_addr().unwrap());
        // All of 127/8 is local on Linux, but nothing listens on the second address.
        let port = listening.local_addresses[0].port();
        assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        assert!(std::net::TcpStream::connect(("127.0.0.2", port)).is_err());
        assert_eq!(listen_at("localhost", None).unwrap().open_to_others(), None);
    }

    #[test]
    fn an_address_of_another_host_is_named_with_what_to_do() {
        let message = |name: &str, bind_addr| listen_at(name, bind_addr).unwrap_err().to_string();
        insta::assert_snapshot!(message("192.0.2.1", None), @"--master_addr 192.0.2.1 is 192.0.2.1, which is not an address of this host, but the other hosts connect to this one (--node_rank 0); set --master_addr to this host's address, or, if the others reach it at a different one (NAT, a container's published port, a service), also set --bind_addr to an address of this host, for example 0.0.0.0");
        insta::assert_snapshot!(message("127.0.0.1", Some("192.0.2.1")), @"--bind_addr 192.0.2.1 is 192.0.2.1, which is not an address of this host, but the other hosts connect to this one (--node_rank 0); set --master_addr to this host's address, or, if the others reach it at a different one (NAT, a container's published port, a service), also set --bind_addr to an address of this host, for example 0.0.0.0");
        let check = |bind_addr, option: &str| {
            let message = message("far.invalid", bind_addr);
            let expected = format!("--{option} far.invalid could not be resolved within 0 s: ");
            assert!(message.starts_with(&expected), "{message}");
        };
        check(None, "master_addr");
        check(Some("far.invalid"), "bind_addr");
    }

    #[test]
    fn behind_nat_another_address_of_this_host_can_be_given() {
        let listening = listen_at("192.0.2.1", Some("0.0.0.0")).unwrap();
        assert_eq!(listening.open_to_others(), Some(IpAddr::from([0, 0, 0, 0])));
        assert_eq!(listening.local_addresses[0].ip(), IpAddr::from([127, 0, 0, 1]));
        assert!(std::net::TcpStream::connect(listening.local_addresses[0]).is_ok());
    }

    #[test]
    fn a_name_that_loops_back_here_may_mean_something_else_to_others() {
        for name in ["127.0.1.1", "::1", "localhost", "LocalHost.localdomain", "a.localhost", "ip6-localhost"] {
            assert!(means_loopback(name), "{name}");
        }
        for name in ["node-0", "localhost-7.example.org", "train-host-0-0.train"] {
            assert!(!means_loopback(name), "{name}");
        }
    }
}
