//! A network link between hosts, and the time that messages take on it.

use crate::comm::InterHostTransferEstimate;
use crate::error::EstimateError;
use std::fmt;
use std::str::FromStr;

/// The data bytes and the total bytes of a full Ethernet frame that carries TCP. The limits of a link, and those of
/// `tc`, count total bytes.
const TCP_FRAME_BYTES: [f64; 2] = [1448.0, 1514.0];

/// The network link of each host: its rate in each direction, its one-way latency, and its load on the host's
/// processors.
///
/// Written as `25Gbit,50us`: a rate, in bits on the wire as `tc` writes them (`bit`, `kbit`, `Mbit`, `Gbit`, in steps
/// of 1,000) or in bytes of data (`MB/s`, `GB/s`), and a one-way latency (`us`, `ms`, `s`). `25Gbit,50us,10%` adds the
/// share of a host's processors that messages keep busy while the link is busy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    rate: f64,
    rate_unit: RateUnit,
    latency: f64,
    latency_unit: LatencyUnit,
    /// The share of a host's processors that messages keep busy, in percent.
    busy_percent: f64,
}

/// A unit of rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RateUnit {
    name: &'static str,
    /// The bits on the wire or the bytes of data that one unit represents, per second.
    bytes: u64,
    /// The number of bits in a byte, if the unit counts bits on the wire.
    bits: Option<u64>,
}

/// A unit of latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LatencyUnit {
    name: &'static str,
    /// The number of these units in a second.
    per_second: u64,
}

const RATES: [RateUnit; 6] = [
    // The other bit units also end in "bit", so the plain unit comes after them.
    RateUnit { name: "kbit", bytes: 1_000, bits: Some(8) },
    RateUnit { name: "Mbit", bytes: 1_000_000, bits: Some(8) },
    RateUnit { name: "Gbit", bytes: 1_000_000_000, bits: Some(8) },
    RateUnit { name: "bit", bytes: 1, bits: Some(8) },
    RateUnit { name: "MB/s", bytes: 1_000_000, bits: None },
    RateUnit { name: "GB/s", bytes: 1_000_000_000, bits: None },
];

const LATENCIES: [LatencyUnit; 3] = [
    LatencyUnit { name: "us", per_second: 1_000_000 },
    LatencyUnit { name: "ms", per_second: 1_000 },
    LatencyUnit { name: "s", per_second: 1 },
];

/// The time that a transfer between hosts takes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct TransferTime {
    /// The seconds from the transfer's start to its end.
    pub seconds: f64,
    /// The time for which it occupies the host's processors, expressed in seconds of all processors.
    pub processors: f64,
}

/// The allowed form of a description and of its parts.
const ALLOWED_FORM: &str = "separate them with a comma";
const BUSY_FORM: &str = "the third part is the share of a host's processors that is busy while its link is busy: a number \
                    up to 100 followed by %";
const RATE_FORM: &str = "the rate is a number above 0 followed by bit, kbit, Mbit or Gbit (bits on the wire, in each \
                    direction) or by MB/s or GB/s (bytes of data)";
const LATENCY_FORM: &str = "the latency is a number followed by us, ms or s (one way)";

impl Network {
    /// The network that is assumed if none is given: 10 Gbit/s, with a latency of 50 us.
    pub const ASSUMED: Self =
        Self { rate: 10.0, rate_unit: RATES[2], latency: 50.0, latency_unit: LATENCIES[0], busy_percent: 0.0 };

    /// Returns the bytes of data that the link carries per second, in each direction.
    pub fn bytes_per_s(&self) -> f64 {
        let bytes = self.rate * self.rate_unit.bytes as f64;
        self.rate_unit.bits.map_or(bytes, |bits| bytes / bits as f64 * TCP_FRAME_BYTES[0] / TCP_FRAME_BYTES[1])
    }

    /// Returns the one-way latency between hosts in seconds.
    pub fn latency_s(&self) -> f64 {
        self.latency / self.latency_unit.per_second as f64
    }

    /// Returns the share of a host's processors that messages keep busy while the link is busy.
    pub fn busy(&self) -> f64 {
        self.busy_percent / 100.0
    }

    /// Returns the time of a transfer from its start to its end, headers included.
    ///
    /// A message waits for the message `window` places before it. Therefore, either the link is always busy, or each
    /// window waits for the latency of its messages.
    pub(super) fn travel(&self, transfer: &InterHostTransferEstimate) -> TransferTime {
        let InterHostTransferEstimate { bytes_in, bytes_out, messages, window, hops, later_hop_bytes } = *transfer;
        let (rate, latency) = (self.bytes_per_s(), self.latency_s());
        let wire_s = bytes_in.max(bytes_out) as f64 / rate;
        let per_message = wire_s / messages as f64;
        let windows = (messages - 1) / window;
        let path_latency = (1 + hops) as f64 * latency;
        let seconds = path_latency
            + wire_s.max(per_message + windows as f64 * (latency + per_message))
            + later_hop_bytes as f64 / rate;
        TransferTime { seconds, processors: self.busy() * wire_s }
    }
}

impl FromStr for Network {
    type Err = EstimateError;

    fn from_str(text: &str) -> Result<Self, EstimateError> {
        let error = |allowed| EstimateError::Network { found: text.into(), allowed };
        let (rate, rest) = text.split_once(',').ok_or_else(|| error(ALLOWED_FORM))?;
        let (latency, busy) = rest.split_once(',').map_or((rest, None), |(latency, busy)| (latency, Some(busy)));
        let share =
            |text: &str| text.ends_with('%').then(|| number(text, "%")).flatten().filter(|share| *share <= 100.0);
        let busy_percent = busy.map_or(Ok(0.0), |busy| share(busy).ok_or_else(|| error(BUSY_FORM)))?;
        let matches_rate = |unit: &&RateUnit| match unit.bits {
            // tc ignores the case of these units as well.
            Some(_) => ends_with_ignoring_case(rate, unit.name),
            None => rate.ends_with(unit.name),
        };
        let rate_unit = *RATES.iter().find(matches_rate).ok_or_else(|| error(RATE_FORM))?;
        let latency_unit =
            *LATENCIES.iter().find(|unit| latency.ends_with(unit.name)).ok_or_else(|| error(LATENCY_FORM))?;
        let rate = number(rate, rate_unit.name).filter(|rate| *rate > 0.0).ok_or_else(|| error(RATE_FORM))?;
        let latency = number(latency, latency_unit.name).ok_or_else(|| error(LATENCY_FORM))?;
        let network = Self { rate, rate_unit, latency, latency_unit, busy_percent };
        // Rejects numbers that are too small or too large to compute with.
        match (network.bytes_per_s().is_normal(), network.latency_s().is_finite()) {
            (true, true) => Ok(network),
            (false, _) => Err(error(RATE_FORM)),
            (true, false) => Err(error(LATENCY_FORM)),
        }
    }
}

fn ends_with_ignoring_case(text: &str, end: &str) -> bool {
    let start = text.len().checked_sub(end.len());
    start.and_then(|start| text.get(start..)).is_some_and(|last| last.eq_ignore_ascii_case(end))
}

/// Returns the number in front of a unit: digits, with at most one decimal point among them.
fn number(text: &str, unit: &str) -> Option<f64> {
    let digits = text[..text.len() - unit.len()].trim();
    let is_plain = digits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    digits.parse::<f64>().ok().filter(|number| is_plain && number.is_finite())
}

/// Writes the network in the format that is parsed.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{},{}{}", self.rate, self.rate_unit.name, self.latency, self.latency_unit.name)?;
        match self.busy_percent {
            0.0 => Ok(()),
            percent => write!(f, ",{percent}%"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::comm::{CollectiveKind, UniformHosts, WireFormat};
    use candle_core::DType;
    use proptest::prelude::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap()
    }

    proptest! {
        #[test]
        fn a_network_is_read_as_it_is_written(
            (rate, rate_unit) in (1e-3..1e9, prop::sample::select(&RATES[..])),
            (latency, latency_unit) in (prop_oneof![Just(0.0), 1e-6..1e6], prop::sample::select(&LATENCIES[..])),
            busy_percent in prop_oneof![Just(0.0), 1e-6..=100.0],
        ) {
            let network = Network { rate, rate_unit, latency, latency_unit, busy_percent };
            prop_assert_eq!(network.to_string().parse::<Network>().unwrap(), network);
        }
    }

    #[test]
    fn units_are_those_of_cables_and_of_data() {
        assert_eq!(network("10gbit,50us"), Network::ASSUMED);
        assert_eq!(network("1000Mbit,1ms").bytes_per_s(), network("1Gbit,1ms").bytes_per_s());
        assert_eq!(network("125MB/s,1ms").bytes_per_s(), 125e6);
        assert_eq!(network("0.125GB/s,1000us").latency_s(), 1e-3);
        assert_eq!(network("1Gbit,1ms").bytes_per_s(), 125e6 * 1448.0 / 1514.0);
        assert_eq!(network("8bit,2s").latency_s(), 2.0);
        assert_eq!([network("8bit,2s").busy(), network("8bit,2s,12.5%").busy()], [0.0, 0.125]);
    }

    #[test]
    fn what_is_no_network_is_named_with_what_is() {
        for (text, words) in [
            ("", "a comma"),
            ("25Gbit", "a comma"),
            ("25,50us", "the rate is"),
            ("Gbit,50us", "the rate is"),
            ("0Gbit,50us", "the rate is"),
            ("-1Gbit,50us", "the rate is"),
            ("infGbit,50us", "the rate is"),
            ("1e3Mbit,50us", "the rate is"),
            ("1Mb/s,50us", "the rate is"),
            ("25Gbit,50", "the latency is"),
            ("25Gbit,us", "the latency is"),
            ("25Gbit,50us,1", "the third part is"),
            ("25Gbit,50us,%", "the third part is"),
            ("25Gbit,50us,101%", "the third part is"),
            ("25Gbit,50us,1%,2%", "the third part is"),
            ("25Gbit,NaNs", "the latency is"),
            ("ä,ö", "the rate is"),
        ] {
            let error = text.parse::<Network>().unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(&format!("\"{text}\"")), "{text}: {error}");
        }
    }

    #[test]
    fn a_passage_takes_its_bytes_and_its_ways() {
        let seconds =
            |network: &str, transfer: &InterHostTransferEstimate| self::network(network).travel(transfer).seconds;
        let one = InterHostTransferEstimate {
            bytes_in: 3000,
            bytes_out: 5000,
            messages: 1,
            window: 2,
            hops: 1,
            later_hop_bytes: 0,
        };
        // The header's latency, the message's latency, and the bytes of the busier direction.
        assert!((seconds("1MB/s,1ms", &one) - 7e-3).abs() < 1e-12);
        assert!((network("1MB/s,1ms,20%").travel(&one).processors - 1e-3).abs() < 1e-12);
        // A hundred messages of 1 ms each, two at a time: a slow link is always busy; a fast one waits for the latency.
        let many = InterHostTransferEstimate { bytes_in: 100_000, bytes_out: 100_000, messages: 100, ..one };
        assert!((seconds("1MB/s,1ms", &many) - 102e-3).abs() < 1e-12);
        assert!((seconds("1MB/s,100ms", &many) - (200e-3 + 1e-3 + 49.0 * 101e-3)).abs() < 1e-12);
    }

    #[test]
    fn a_slower_or_longer_cable_never_takes_less() {
        let all = [(2, 1), (2, 2), (2, 8), (4, 4)].map(|(hosts, each)| UniformHosts::new(hosts, each));
        let transfers = all.iter().flat_map(|hosts| {
            let sizes = [0, 1, 5000, 1 << 17, 1 << 24];
            sizes.into_iter().flat_map(move |n| {
                [CollectiveKind::ReduceScatter, CollectiveKind::AllReduce, CollectiveKind::AllGather]
                    .into_iter()
                    .flat_map(move |kind| hosts.transfers(kind, WireFormat::Exact, DType::F32, 16 * n))
            })
        });
        for transfer in transfers {
            let by_rate =
                ["40Gbit,50us", "1Gbit,50us", "1Mbit,50us"].map(|text| network(text).travel(&transfer).seconds);
            let by_latency =
                ["1Gbit,0s", "1Gbit,1us", "1Gbit,20ms"].map(|text| network(text).travel(&transfer).seconds);
            assert!(by_rate.is_sorted() && by_latency.is_sorted(), "{transfer:?} {by_rate:?} {by_latency:?}");
        }
    }
}
