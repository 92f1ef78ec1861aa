//! Protobuf messages: a writer, field by field, and a reader of the fields of one message.

/// The encodings of values.
const VARINT: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const LENGTH_DELIMITED: u8 = 2;
const FOUR_BYTES: u8 = 5;

/// A protobuf message under construction, field by field.
#[derive(Debug, Clone, Default)]
pub(super) struct ProtobufMessage(pub Vec<u8>);

impl ProtobufMessage {
    /// Writes a key: the field's number and the encoding of its value.
    fn key(&mut self, field: u32, wire_type: u8) {
        self.push_varint(u64::from(field) << 3 | u64::from(wire_type));
    }

    fn push_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn varint(mut self, field: u32, value: u64) -> Self {
        self.key(field, VARINT);
        self.push_varint(value);
        self
    }

    pub fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, EIGHT_BYTES);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, FOUR_BYTES);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.key(field, LENGTH_DELIMITED);
        self.push_varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    pub fn message(self, field: u32, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Writes a text unless it is absent.
    pub fn optional_text(self, field: u32, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.text(field, value),
            None => self,
        }
    }
}

/// The value of a field that was read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ProtobufValue<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// A number of four or eight bytes.
    Fixed(&'a [u8]),
}

/// A reader of the fields of a message, in the order in which they were written. It ends early if the message is
/// damaged.
#[derive(Debug, Clone)]
pub(super) struct ProtobufReader<'a>(pub &'a [u8]);

impl<'a> ProtobufReader<'a> {
    /// Returns the first value of a field that is a varint.
    pub fn varint(mut self, field: u64) -> Option<u64> {
        self.find_map(|(number, value)| match value {
            ProtobufValue::Varint(value) if number == field => Some(value),
            _ => None,
        })
    }

    /// Returns all values of a field that are messages, texts or bytes.
    pub fn all_bytes(self, field: u64) -> impl Iterator<Item = &'a [u8]> {
        self.filter_map(move |(number, value)| match value {
            ProtobufValue::Bytes(bytes) if number == field => Some(bytes),
            _ => None,
        })
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn take_varint(&mut self) -> Option<u64> {
        const MAX_VARINT_BYTES: usize = 10;
        let length = self.0.iter().take(MAX_VARINT_BYTES).position(|byte| byte & 0x80 == 0)? + 1;
        let bytes = self.take(length as u64)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f)))
    }
}

impl<'a> Iterator for ProtobufReader<'a> {
    type Item = (u64, ProtobufValue<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let key = self.take_varint()?;
        let value = match (key & 7) as u8 {
            VARINT => ProtobufValue::Varint(self.take_varint()?),
            EIGHT_BYTES => ProtobufValue::Fixed(self.take(8)?),
            LENGTH_DELIMITED => {
                let length = self.take_varint()?;
                ProtobufValue::Bytes(self.take(length)?)
            }
            FOUR_BYTES => ProtobufValue::Fixed(self.take(4)?),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_bytes_of_the_encoding() {
        // 150 and `testing` are the examples in the encoding's documentation.
        assert_eq!(ProtobufMessage::default().varint(1, 150).0, [0x08, 0x96, 0x01]);
        assert_eq!(ProtobufMessage::default().text(2, "testing").0, b"\x12\x07testing");
        let long = ProtobufMessage::default().bytes(200, &[7; 300]).0;
        assert_eq!(long[..4], [0xc2, 0x0c, 0xac, 0x02]);
        assert_eq!(ProtobufMessage::default().double(1, 1.0).0, [9, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
        assert_eq!(ProtobufMessage::default().float(2, 1.0).0, [0x15, 0, 0, 0x80, 0x3f]);
    }

    #[test]
    fn fields_are_read_back_and_a_cut_message_ends_early() {
        let inner = ProtobufMessage::default().varint(1, u64::MAX);
        let message =
            ProtobufMessage::default().varint(1, 7).message(300, &inner).double(4, 0.5).float(5, 0.5).text(6, "x");
        let fields: Vec<_> = ProtobufReader(&message.0).collect();
        assert_eq!(fields.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 300, 4, 5, 6]);
        assert_eq!(fields[4].1, ProtobufValue::Bytes(b"x"));
        let found = ProtobufReader(&message.0).all_bytes(300).next().unwrap();
        assert_eq!(ProtobufReader(found).varint(1), Some(u64::MAX));
        for end in 0..message.0.len() {
            assert!(ProtobufReader(&message.0[..end]).count() < fields.len(), "{end}");
        }
        assert_eq!(ProtobufReader(&[0xff; 30]).count(), 0);
        assert_eq!(ProtobufReader(&[0x0f, 1]).count(), 0);
    }
}
