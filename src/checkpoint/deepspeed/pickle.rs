//! Reads Python pickles as data. The opcodes are followed as a list of instructions for building values; nothing that
//! they name is ever looked up or called. An object is kept as its class and the arguments of its constructor.
//!
//! Values live in one list and refer to each other by index, so that shared and recursive values cost nothing and are
//! freed without recursion.

use crate::util::{counted, is_or_are};
use std::collections::HashMap;

/// The index of a node in its pickle.
pub(super) type PickleNodeId = usize;

/// The description of a problem; callers add the name of the file.
pub(super) type PickleProblem = String;

/// The maximum number of values in a pickle: one byte can create a value, which takes about 40 bytes of memory.
/// Checkpoints with 100,000 tensors have fewer.
const MAX_NODES: usize = 4 << 20;

/// One value.
#[derive(Debug)]
pub(super) enum PickleNode {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<PickleNodeId>),
    List(Vec<PickleNodeId>),
    /// Entries in the order in which they were set; if keys are equal, the last one counts.
    Dict(Vec<(PickleNodeId, PickleNodeId)>),
    /// The name of a class or function, `module.name`.
    Global(String),
    /// The class or function, its arguments and its state, instead of the value that it would have returned.
    Object {
        class: PickleNodeId,
        arguments: PickleNodeId,
        state: Option<PickleNodeId>,
    },
    /// A reference to something outside the pickle: a storage.
    Persistent(PickleNodeId),
    /// A value that is not needed here: bytes, or a number of more than 64 bits.
    Opaque,
}

/// A pickle that was read.
#[derive(Debug)]
pub(super) struct Pickle {
    nodes: Vec<PickleNode>,
    pub root: PickleNodeId,
}

impl Pickle {
    /// Reads a pickle of protocol 2, which `torch.save` writes, or of a lower protocol.
    pub fn parse(bytes: &[u8]) -> Result<Self, PickleProblem> {
        let mut machine =
            PickleMachine { bytes, position: 0, nodes: vec![], stack: vec![], marks: vec![], memo: HashMap::new() };
        let root = loop {
            let start = machine.position;
            match machine.step() {
                Ok(None) if machine.nodes.len() > MAX_NODES => {
                    return Err(format!(
                        "data.pkl, byte {start}: more than {MAX_NODES} values; torch.save writes about ten for each tensor"
                    ));
                }
                Ok(None) => {}
                Ok(Some(root)) => break root,
                Err(problem) => return Err(format!("data.pkl, byte {start}: {problem}")),
            }
        };
        Ok(Self { nodes: machine.nodes, root })
    }

    pub fn node(&self, id: PickleNodeId) -> &PickleNode {
        // Indices are created only by `PickleMachine::push`.
        &self.nodes[id]
    }
}

/// The stack machine that executes a pickle.
struct PickleMachine<'a> {
    bytes: &'a [u8],
    position: usize,
    nodes: Vec<PickleNode>,
    stack: Vec<PickleNodeId>,
    /// The heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, PickleNodeId>,
}

impl PickleMachine<'_> {
    /// Executes one opcode. Returns the root at the end.
    fn step(&mut self) -> Result<Option<PickleNodeId>, PickleProblem> {
        let [opcode] = self.take()?;
        match opcode {
            0x80 => self.protocol()?,
            b'.' => return self.pop().map(Some),
            b'N' => self.push(PickleNode::None),
            0x88 => self.push(PickleNode::Bool(true)),
            0x89 => self.push(PickleNode::Bool(false)),
            b'K' | b'M' | b'J' | 0x8a | 0x8b => self.integer(opcode)?,
            b'G' => {
                let number = f64::from_be_bytes(self.take()?);
                self.push(PickleNode::Float(number));
            }
            b'X' => self.text()?,
            b'T' | b'U' => self.bytes(opcode)?,
            b'(' => self.marks.push(self.stack.len()),
            b')' => self.push(PickleNode::Tuple(vec![])),
            0x85..=0x87 => self.short_tuple(usize::from(opcode - 0x84))?,
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(PickleNode::Tuple(items));
            }
            b']' => self.push(PickleNode::List(vec![])),
            b'l' => {
                let items = self.pop_to_mark()?;
                self.push(PickleNode::List(items));
            }
            b'}' => self.push(PickleNode::Dict(vec![])),
            b'd' => {
                let entries = pairs(&self.pop_to_mark()?)?;
                self.push(PickleNode::Dict(entries));
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.append(&items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![(key, value)])?;
            }
            b'u' => {
                let entries = pairs(&self.pop_to_mark()?)?;
                self.set(entries)?;
            }
            b'c' => self.global()?,
            b'R' | 0x81 => self.object()?,
            b'b' => self.build()?,
            b'Q' => {
                let id = self.pop()?;
                self.push(PickleNode::Persistent(id));
            }
            b'q' | b'r' => {
                let index = self.memo_index(opcode == b'q')?;
                self.memo.insert(index, self.top()?);
            }
            b'h' | b'j' => {
                let index = self.memo_index(opcode == b'h')?;
                let id = self
                    .memo
                    .get(&index)
                    .ok_or_else(|| format!("it refers to value {index}, which was never stored"))?;
                self.stack.push(*id);
            }
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_to_mark()?),
            b'2' => self.stack.push(self.top()?),
            other => {
                return Err(format!("opcode 0x{other:02x} is not written by torch.save (protocol 2)"));
            }
        }
        Ok(None)
    }

    // ---- bytes ---------------------------------------------------------------------------------

    fn slice(&mut self, length: usize) -> Result<&[u8], PickleProblem> {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let slice = rest.get(..length).ok_or_else(|| {
            format!(
                "it ends in the middle of a value ({} {} needed, {} {})",
                counted(length, "more byte"),
                is_or_are(length),
                rest.len(),
                if rest.len() == 1 { "remains" } else { "remain" }
            )
        })?;
        self.position += length;
        Ok(slice)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], PickleProblem> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(N)?);
        Ok(array)
    }

    fn length(&mut self) -> Result<usize, PickleProblem> {
        let length = u32::from_le_bytes(self.take()?);
        usize::try_from(length).map_err(|e| e.to_string())
    }

    fn line(&mut self) -> Result<String, PickleProblem> {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let length = rest.iter().position(|b| *b == b'\n').ok_or("it ends in the middle of a name")?;
        let line = std::str::from_utf8(&rest[..length]).map_err(|_| "a name is not UTF-8 text")?;
        self.position += length + 1;
        Ok(line.to_owned())
    }

    // ---- the stack -----------------------------------------------------------------------------

    fn push(&mut self, node: PickleNode) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    /// Returns the height down to which values may be popped: values below a mark stay until the mark is popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<PickleNodeId, PickleProblem> {
        let values = self.stack.get(self.floor()..).unwrap_or_default();
        values.last().copied().ok_or_else(|| "a value is needed but missing".into())
    }

    fn pop(&mut self) -> Result<PickleNodeId, PickleProblem> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_to_mark(&mut self) -> Result<Vec<PickleNodeId>, PickleProblem> {
        let mark = self.marks.pop().ok_or("a mark is needed but missing")?;
        // No value below a mark has been popped, so the stack is at least this high.
        Ok(self.stack.split_off(mark))
    }

    // ---- values --------------------------------------------------------------------------------

    fn protocol(&mut self) -> Result<(), PickleProblem> {
        match self.take()? {
            [0..=2] => Ok(()),
            [other] => {
                Err(format!("pickle protocol {other}; torch.save writes protocol 2 unless pickle_protocol is given"))
            }
        }
    }

    fn integer(&mut self, opcode: u8) -> Result<(), PickleProblem> {
        let node = match opcode {
            b'K' => PickleNode::Int(self.take::<1>()?[0].into()),
            b'M' => PickleNode::Int(u16::from_le_bytes(self.take()?).into()),
            b'J' => PickleNode::Int(i32::from_le_bytes(self.take()?).into()),
            _ => {
                let length = if opcode == 0x8a { usize::from(self.take::<1>()?[0]) } else { self.length()? };
                long(self.slice(length)?)
            }
        };
        self.push(node);
        Ok(())
    }

    fn text(&mut self) -> Result<(), PickleProblem> {
        let length = self.length()?;
        // Python writes lone surrogates if a string contains them; such text is never a name.
        let text = String::from_utf8_lossy(self.slice(length)?).into_owned();
        self.push(PickleNode::Text(text));
        Ok(())
    }

    fn bytes(&mut self, opcode: u8) -> Result<(), PickleProblem> {
        let length = if opcode == b'U' { usize::from(self.take::<1>()?[0]) } else { self.length()? };
        self.slice(length)?;
        self.push(PickleNode::Opaque);
        Ok(())
    }

    fn short_tuple(&mut self, length: usize) -> Result<(), PickleProblem> {
        let mut items = (0..length).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        items.reverse();
        self.push(PickleNode::Tuple(items));
        Ok(())
    }

    fn append(&mut self, items: &[PickleNodeId]) -> Result<(), PickleProblem> {
        let target = self.top()?;
        match &mut self.nodes[target] {
            PickleNode::List(list) => list.extend_from_slice(items),
            // This is an object of a list subclass, whose items are not needed here.
            PickleNode::Object { .. } => {}
            _ => return Err("items are appended to a value that is not a list".into()),
        }
        Ok(())
    }

    fn set(&mut self, new: Vec<(PickleNodeId, PickleNodeId)>) -> Result<(), PickleProblem> {
        let target = self.top()?;
        match &mut self.nodes[target] {
            PickleNode::Dict(entries) => entries.extend(new),
            PickleNode::Object { .. } => {}
            _ => return Err("entries are set in a value that is not a dictionary".into()),
        }
        Ok(())
    }

    fn global(&mut self) -> Result<(), PickleProblem> {
        let (module, name) = (self.line()?, self.line()?);
        self.push(PickleNode::Global(format!("{module}.{name}")));
        Ok(())
    }

    fn object(&mut self) -> Result<(), PickleProblem> {
        let (arguments, class) = (self.pop()?, self.pop()?);
        let is_dict = matches!(&self.nodes[class], PickleNode::Global(name)
            if ["collections.OrderedDict", "collections.defaultdict"].contains(&name.as_str()));
        self.push(match is_dict {
            true => PickleNode::Dict(vec![]),
            false => PickleNode::Object { class, arguments, state: None },
        });
        Ok(())
    }

    fn build(&mut self) -> Result<(), PickleProblem> {
        let new = self.pop()?;
        let target = self.top()?;
        match &mut self.nodes[target] {
            PickleNode::Object { state, .. } => *state = Some(new),
            // The attributes of an ordered dictionary are not needed here.
            PickleNode::Dict(_) => {}
            _ => return Err("attributes are set on a value that is not an object".into()),
        }
        Ok(())
    }

    fn memo_index(&mut self, is_short: bool) -> Result<u32, PickleProblem> {
        Ok(if is_short { self.take::<1>()?[0].into() } else { u32::from_le_bytes(self.take()?) })
    }
}

/// Reads a little-endian number in two's complement, of any length.
fn long(bytes: &[u8]) -> PickleNode {
    let is_negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut wide = [if is_negative { 0xff } else { 0 }; 8];
    match wide.get_mut(..bytes.len()) {
        Some(low) => low.copy_from_slice(bytes),
        None => return PickleNode::Opaque,
    }
    PickleNode::Int(i64::from_le_bytes(wide))
}

fn pairs(items: &[PickleNodeId]) -> Result<Vec<(PickleNodeId, PickleNodeId)>, PickleProblem> {
    match items.as_chunks::<2>() {
        (pairs, []) => Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect()),
        _ => Err("a key has no value".into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    /// `{"a": [1, -2, 300, 2**40, -1.5, None, True], "b": (OrderedDict(), posix.system("x"))}`.
    const SAMPLE: &[u8] =
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01](K\x01J\xfe\xff\xff\xffM,\x01\x8a\x06\x00\x00\x00\x00\
        \x00\x01G\xbf\xf8\x00\x00\x00\x00\x00\x00N\x88eX\x01\x00\x00\x00bccollections\nOrderedDict\n)Rcposix\nsystem\n\
        X\x01\x00\x00\x00x\x85R\x86u.";

    #[test]
    fn calls_are_kept_as_data() {
        let pickle = Pickle::parse(SAMPLE).unwrap();
        let PickleNode::Dict(entries) = pickle.node(pickle.root) else { panic!("{pickle:?}") };
        let PickleNode::Tuple(items) = pickle.node(entries[1].1) else { panic!("{pickle:?}") };
        assert!(matches!(pickle.node(items[0]), PickleNode::Dict(empty) if empty.is_empty()));
        let PickleNode::Object { class, .. } = pickle.node(items[1]) else { panic!("{pickle:?}") };
        assert!(matches!(pickle.node(*class), PickleNode::Global(name) if name == "posix.system"));
    }

    #[test]
    fn numbers_of_every_length() {
        let numbers = |bytes: &[u8]| match long(bytes) {
            PickleNode::Int(number) => Some(number),
            _ => None,
        };
        assert_eq!(numbers(&[]), Some(0));
        assert_eq!(numbers(&[0xff]), Some(-1));
        assert_eq!(numbers(&[0xff, 0]), Some(255));
        assert_eq!(numbers(&[0, 0, 0, 0, 0, 0, 0, 0x80]), Some(i64::MIN));
        assert_eq!(numbers(&[1; 9]), None);
    }

    #[test]
    fn a_pickle_of_more_values_than_any_checkpoint_has_is_refused() {
        let bytes = [&b"\x80\x02"[..], &vec![b'N'; MAX_NODES + 8]].concat();
        assert!(Pickle::parse(&bytes).unwrap_err().contains("more than 4194304 values"));
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_place() {
        let problem = |bytes: &[u8]| Pickle::parse(bytes).unwrap_err();
        assert_eq!(
            problem(b"\x80\x05."),
            "data.pkl, byte 0: pickle protocol 5; torch.save writes protocol 2 unless pickle_protocol is given"
        );
        assert!(problem(b"\x80\x02i").contains("byte 2: opcode 0x69"));
        assert!(problem(b"\x80\x02(.").contains("but missing"));
        assert!(problem(b"X\xff\xff\xff\xff").contains("4294967295 more bytes are needed"));
        assert!(problem(b"h\x07").contains("value 7"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Pickle::parse(&bytes);
        }

        #[test]
        fn changed_pickles_are_read_or_refused(
            changes in proptest::collection::vec((0..SAMPLE.len(), any::<u8>()), 1..6),
            end in 0..=SAMPLE.len(),
        ) {
            let mut bytes = SAMPLE.to_vec();
            for (index, byte) in changes {
                bytes[index] = byte;
            }
            let _ = Pickle::parse(&bytes);
            let _ = Pickle::parse(&bytes[..end]);
        }
    }
}
