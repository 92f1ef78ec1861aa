//! The pickle in a file of a DeepSpeed checkpoint. The first byte selects the file.

use super::deepspeed_files::files;
use super::{join, split};

/// Globals, names and opcodes of such pickles.
pub(super) const WORDS: [&str; 14] = [
    "ccollections\nOrderedDict\n",
    "ctorch\nFloatStorage\n",
    "ctorch\nHalfStorage\n",
    "ctorch\nBFloat16Storage\n",
    "ctorch\nLongStorage\n",
    "ctorch._utils\n_rebuild_tensor_v2\n",
    "ctorch._utils\n_rebuild_parameter\n",
    "ctorch\nSize\n",
    "optimizer_state_dict",
    "param_shapes",
    "buffer_names",
    "(lp1\n",
    "\u{0}",
    "}q\u{1}(",
];

/// Reads the checkpoint with this pickle.
pub fn run(data: &[u8]) -> bool {
    let (first, pickle) = split(data);
    let file = &files()[usize::from(first) % files().len()];
    file.read_as(&file.with_pickle(pickle))
}

/// Returns the pickles of two checkpoints.
pub fn seeds() -> Vec<Vec<u8>> {
    files().iter().enumerate().map(|(index, file)| join(index as u8, &file.pickle())).collect()
}
