//! A rank's description of a collective, which is compared with those of other ranks before the collective's data is
//! touched.

use super::collective_kind::CollectiveKind;
use super::engine_call;
use super::wire::format::WireFormat;
use super::wire::inter_host::InterHostFormat;
use crate::precision::IntFormat;
use crate::util::counted;
use candle_core::DType;
use std::fmt;

/// The number of bits that encode the dtype.
const WIRE_SHIFT: u32 = 8;
/// The wire formats, indexed by their codes.
const WIRE_FORMATS: [&str; 7] = [
    "",
    " as int8",
    " as int4",
    " as int8 between hosts",
    " as int4 between hosts",
    " as bf16 between hosts",
    " as f16 between hosts",
];

/// One rank's description of one collective. It consists of plain numbers so that it can be stored in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CollectiveFingerprint {
    /// The number of this collective among those that the rank has begun, counted from 1; 0 if they are not counted.
    pub sequence: u64,
    /// The [`CollectiveKind`] as a number.
    pub kind: u64,
    /// A number for the dtype and the wire format.
    pub dtype: u64,
    /// The number of elements in the call's argument.
    pub elements: u64,
    /// The caller's hash of what the buffer contains.
    pub tag: u64,
}

impl CollectiveFingerprint {
    pub(super) const WORDS: usize = 5;

    pub(super) fn new(
        sequence: u64,
        kind: CollectiveKind,
        wire: WireFormat,
        dtype: DType,
        elements: usize,
        tag: u64,
    ) -> Self {
        let dtype = match dtype {
            DType::F32 => 1,
            DType::BF16 => 2,
            DType::F16 => 3,
            DType::F64 => 4,
            _ => 0,
        };
        let wire = match wire {
            WireFormat::Exact => 0,
            WireFormat::Blocks(IntFormat::Int8) => 1,
            WireFormat::Blocks(IntFormat::Int4) => 2,
            WireFormat::BetweenHosts(InterHostFormat::Blocks(IntFormat::Int8)) => 3,
            WireFormat::BetweenHosts(InterHostFormat::Blocks(IntFormat::Int4)) => 4,
            WireFormat::BetweenHosts(InterHostFormat::Bf16) => 5,
            WireFormat::BetweenHosts(InterHostFormat::F16) => 6,
        };
        let dtype = dtype | wire << WIRE_SHIFT;
        Self { sequence, kind: kind as u64, dtype, elements: elements as u64, tag }
    }

    /// Returns this description with another kind of operation.
    pub(super) fn of_kind(self, kind: CollectiveKind) -> Self {
        Self { kind: kind as u64, ..self }
    }

    pub(super) fn words(&self) -> [u64; Self::WORDS] {
        [self.sequence, self.kind, self.dtype, self.elements, self.tag]
    }

    pub(super) fn from_words(w: [u64; Self::WORDS]) -> Self {
        Self { sequence: w[0], kind: w[1], dtype: w[2], elements: w[3], tag: w[4] }
    }

    /// Describes the collective and the engine call with index `call`, to which it belongs.
    pub(super) fn within(&self, call: u64) -> String {
        match engine_call::name(call) {
            Some(call) => format!("{call} ({self})"),
            None => self.to_string(),
        }
    }
}

/// Returns the content hash in the text of a collective: the low half of the tag.
pub(crate) fn content_of(text: &str) -> Option<u32> {
    let (_, content) = text.rsplit_once("(content hash ")?;
    u32::from_str_radix(content.strip_suffix(')')?.trim_end_matches(')'), 16).ok()
}

impl fmt::Display for CollectiveFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = CollectiveKind::ALL.iter().find(|k| **k as u64 == self.kind).map_or("unknown", |k| k.name());
        let name_at = |names: &[&'static str], i: u64| names.get(i as usize).copied().unwrap_or("unknown");
        let units = ["byte", "f32 element", "bf16 element", "f16 element", "f64 element"];
        let elements = counted(self.elements, name_at(&units, self.dtype % (1 << WIRE_SHIFT)));
        let wire = name_at(&WIRE_FORMATS, self.dtype >> WIRE_SHIFT);
        write!(f, "{kind} no. {} with {elements}{wire} (content hash {:08x})", self.sequence, self.tag as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_tells_the_content_of_its_collective() {
        let tag = 0x1234_5678_0abc_def0;
        let call = CollectiveFingerprint::new(7, CollectiveKind::AllGather, WireFormat::Exact, DType::F32, 12, tag);
        assert_eq!(content_of(&call.to_string()), Some(tag as u32));
        assert_eq!(content_of("a barrier"), None);
    }

    #[test]
    fn every_way_to_travel_has_a_text_of_its_own() {
        let ints = [IntFormat::Int8, IntFormat::Int4];
        let codes = ints
            .map(InterHostFormat::Blocks)
            .into_iter()
            .chain([InterHostFormat::Bf16, InterHostFormat::F16])
            .map(WireFormat::BetweenHosts);
        let wires = [WireFormat::Exact].into_iter().chain(ints.map(WireFormat::Blocks)).chain(codes);
        let texts: Vec<String> = wires
            .map(|wire| CollectiveFingerprint::new(1, CollectiveKind::AllReduce, wire, DType::F32, 9, 0).to_string())
            .collect();
        for (i, text) in texts.iter().enumerate() {
            assert!(
                !texts[..i].contains(text) && text.contains(&format!("f32 elements{} (", WIRE_FORMATS[i])),
                "{text}"
            );
        }
    }
}
