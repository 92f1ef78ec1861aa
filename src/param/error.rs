//! Errors of parameters and of the files that they are initialized from.

use crate::util::{counted, is_or_are};
use std::path::{Path, PathBuf};

/// Errors of parameters and of the files that they are initialized from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// The model's constructor requested no parameter.
    #[error(
        "the model has no parameters: its constructor took nothing from the VarBuilder; create every weight with \
         vb.get, vb.get_with_hints or candle_nn's layers"
    )]
    NoParameters,
    /// A name that safetensors files cannot contain.
    #[error(
        "a parameter or buffer is named {name}, which safetensors files reserve for their header; give it another name"
    )]
    ReservedName {
        /// The name.
        name: &'static str,
    },
    /// A rule that freezes all parameters.
    #[error(
        "{} frozen, so there is nothing to train; leave {} trainable with EngineBuilder::trainable, set_trainable or \
         the parameter groups",
        if *count == 1 { "the only parameter is".into() } else { format!("all {count} parameters are") },
        if *count == 1 { "it" } else { "some" }
    )]
    NothingTrained {
        /// The number of the model's parameters.
        count: usize,
    },
    /// A rule that quantizes a trained parameter.
    #[error(
        "parameter {name} is quantized and trained, but only frozen parameters can be quantized; \
         freeze it (EngineBuilder::trainable, a frozen group), or exclude it in EngineBuilder::quantized"
    )]
    QuantizedTrained {
        /// The parameter.
        name: String,
    },
    /// A group that freezes no parameter.
    #[error(
        "parameter group {index} (counted from 0) is frozen but selects no parameter that earlier groups left; correct \
         its names, or remove it"
    )]
    NothingFrozen {
        /// The group's index.
        index: usize,
    },
    /// A name pattern that freezes no parameter.
    #[error(
        "the pattern `{pattern}` selects no parameter to freeze; the model has {names} (* matches any characters, as in h.*)"
    )]
    NothingOfPattern {
        /// The pattern.
        pattern: String,
        /// The first few parameter names.
        names: String,
    },
    /// Name patterns that freeze all parameters.
    #[error(
        "{} {patterns} and {} frozen, so there is nothing to train; leave {} trainable",
        if *count == 1 { "the only parameter matches".into() } else { format!("all {count} parameters match") },
        is_or_are(*count),
        if *count == 1 { "it" } else { "some" }
    )]
    AllOfPatterns {
        /// The patterns.
        patterns: String,
        /// The number of the model's parameters.
        count: usize,
    },
    /// A name that no parameter has.
    #[error("the model has no parameter {name}: {suggestion}")]
    Unknown {
        /// The name.
        name: String,
        /// Similar names.
        suggestion: String,
    },
    /// A module of `data_types.keep_in_fp32_modules` that the model does not have.
    #[error(
        "data_types.keep_in_fp32_modules: the model has no module {name}: {suggestion}; a module is given as complete \
         dot-separated parts of a parameter's name, in which * matches any characters; correct the name, or remove it"
    )]
    NoSuchModule {
        /// The name in the list.
        name: String,
        /// Similar names, or otherwise some existing ones.
        suggestion: String,
    },
    /// A weight that is not a finite number.
    #[error(
        "tensor {name} in {} has the value {value} (element {element}): the file is damaged, or the training that \
         wrote it diverged; use another copy, or an earlier checkpoint",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor, by the model's name for it.
        name: String,
        /// The index of the first such value in the tensor, in row-major order, counted from 0.
        element: usize,
        /// The value: NaN or infinite.
        value: f32,
    },
    /// An optimizer state that the parameter does not have.
    #[error("parameter {name} has no optimizer state {key}: it has {existing}")]
    UnknownState {
        /// The parameter.
        name: String,
        /// The state.
        key: String,
        /// The parameter's states.
        existing: String,
    },
    /// An attempt to set a factored optimizer state (`exp_avg_sq_row` or `exp_avg_sq_col` of Adafactor).
    #[error("the optimizer state {key} of parameter {name} is factored; it can be read but not set")]
    ReadOnlyState {
        /// The parameter.
        name: String,
        /// The state.
        key: String,
    },
    /// A value whose shape differs from the parameter's.
    #[error(
        "a value of shape {found:?} is given for parameter {name}, whose shape is {expected:?}; give a value of that \
         shape"
    )]
    ValueShape {
        /// The parameter.
        name: String,
        /// The value's shape.
        found: Vec<usize>,
        /// The parameter's shape.
        expected: Vec<usize>,
    },
    /// A value whose shape differs from that of a rank's part of the parameter.
    #[error(
        "a value of shape {found:?} is given for rank {rank}'s part of parameter {name}, which has shape [{len}]; \
         give a value of the shape that safe_get_local_fp32_param returns"
    )]
    LocalShape {
        /// The parameter.
        name: String,
        /// This rank.
        rank: usize,
        /// The value's shape.
        found: Vec<usize>,
        /// The number of elements of the rank's part.
        len: usize,
    },
    /// A request to mark a nonexistent unit as a leaf.
    #[error(
        "EngineBuilder::leaf_units names {name}, but no unit of the model has that name; its units are {units} (a name \
         is the prefix of the VarBuilder from which the unit was built)"
    )]
    NoSuchUnit {
        /// The name, or its ending after a `*`.
        name: String,
        /// The first few units.
        units: String,
    },
    /// Two requests for one name with different shapes.
    #[error(
        "{name} is requested twice, with shapes {first:?} and {second:?}; give the layers different prefixes (vb.pp)"
    )]
    Twice {
        /// The name.
        name: String,
        /// The shape at the first request.
        first: Vec<usize>,
        /// The shape at the second request.
        second: Vec<usize>,
    },
    /// A dtype other than the engine's.
    #[error(
        "parameter {name} is requested as {found}, but this engine trains in {expected} (set by the fp16 and bf16 \
         sections); request it without a separate dtype"
    )]
    Dtype {
        /// The name.
        name: String,
        /// The dtype that the model requests.
        found: String,
        /// The dtype that the configuration selects.
        expected: String,
    },
    /// A request without a shape.
    #[error(
        "parameter {name} is requested without a shape (get_unchecked), which works only after it has been registered; \
         use vb.get with its shape"
    )]
    WithoutShape {
        /// The name.
        name: String,
    },
    /// A request, by a second instance of the model, for something that the first one does not have.
    #[error(
        "the model that is built for evaluation uses {name}, which the engine's model does not have; build it like the \
         engine's model"
    )]
    NotTheModel {
        /// A parameter or a unit.
        name: String,
    },
    /// The model's constructor computed with a parameter.
    #[error(
        "the model computes with a parameter while the model is being built (the last parameter taken is {last}): the \
         result would keep the initial values forever while the parameter is trained; compute the result in the \
         forward pass (views such as t() and reshape may be taken immediately)"
    )]
    UsedWhileBuilding {
        /// The parameter that was taken last.
        last: String,
    },
    /// A parameter was used while it was sharded.
    #[error(
        "an operation used a sharded parameter that is not currently gathered: {names}; use parameters only inside the \
         closure given to engine.forward or engine.eval, and a unit's parameters only inside that unit's \
         forward pass ({why})"
    )]
    Absent {
        /// Candidates: parameters that were absent.
        names: String,
        /// Candle's message, without a backtrace.
        why: String,
    },
    /// An operand without values: a sharded parameter outside its engine's calls, or a copy of a parameter that was
    /// made before it had values.
    #[error(
        "an operation used a parameter without values ({why}); if it is a sharded parameter outside its engine's \
         calls, use it in the closure passed to that engine's forward or eval (elsewhere, use Engine::gathered and \
         safe_get_full_fp32_param); if it is a copy that the model's constructor made (copy(), force_contiguous) \
         before the values were set, copy the parameter in the forward pass instead"
    )]
    AbsentElsewhere {
        /// The operation's message, without a backtrace.
        why: String,
    },
    /// A parameter that something other than the engine has written to.
    #[error(
        "parameter {name} was changed outside the engine (by Var::set, slice_set, zero_set or another call that \
         changes a tensor in place): the optimizer's copy has other values, and the next update would overwrite the \
         change; set weights with Engine::gathered_mut or safe_set_full_fp32_param, load them with load_safetensors or \
         load_checkpoint, or change the values of the constructor's VarBuilder"
    )]
    Written {
        /// The parameter.
        name: String,
    },
    /// A file that is not a safetensors file, or not an index of such files.
    #[error("{} is not a {}: {why}", path.display(), weight_file_kind(path))]
    BadWeightFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// A file that an index names and that cannot be read.
    #[error(
        "{} names {}, which has {tensors} of its tensors but cannot be read: {why}; all files of an index are needed",
        index.display(), path.display()
    )]
    NoShard {
        /// The index.
        index: PathBuf,
        /// The file.
        path: PathBuf,
        /// The number of tensors in it.
        tensors: usize,
        /// The system's reason.
        why: String,
    },
    /// An index that names the wrong file for a tensor.
    #[error(
        "according to {}, tensor {name} is in {file}, which has no such tensor; one of the two files belongs to \
         another model",
        path.display()
    )]
    NotInShard {
        /// The index.
        path: PathBuf,
        /// The file.
        file: String,
        /// The tensor.
        name: String,
    },
    /// An index that refers to a file outside its folder.
    #[error(
        "according to {}, tensor {name} is in {file:?}; an index names files in its own folder, without a path",
        path.display()
    )]
    ShardOutside {
        /// The index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The file.
        file: String,
    },
    /// A parameter or buffer whose tensor is missing.
    #[error(
        "{} has no tensor {name} of shape {shape:?}, which the model needs; the file must hold exactly the model's \
         tensors; it has {existing}",
        path.display()
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The parameter or buffer.
        name: String,
        /// The shape in the model.
        shape: Vec<usize>,
        /// The first few names in the file.
        existing: String,
    },
    /// A parameter whose elements on this rank need more memory than the system has.
    #[error(
        "the system does not have enough memory for the {} of parameter {name} on this rank; use a \
         smaller model, or more ranks at stage 3",
        counted(*elements, "element")
    )]
    NoMemory {
        /// The parameter.
        name: String,
        /// The number of its elements on this rank.
        elements: usize,
    },
    /// Tensors that belong to no parameter.
    #[error(
        "{} holds tensors that the model does not have: {names}; does it belong to a different model, or to one of a \
         different size?",
        path.display()
    )]
    ExtraTensors {
        /// The file.
        path: PathBuf,
        /// The first few names.
        names: String,
    },
    /// A tensor whose shape differs from the parameter's.
    #[error(
        "tensor {name} in {} has shape {found:?}, but the model's parameter has {expected:?}; check the model's sizes",
        path.display()
    )]
    MisshapenTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape in the model.
        expected: Vec<usize>,
    },
    /// A tensor of a type other than F32, F16 and BF16.
    #[error("tensor {name} in {} is of type {found}; only F32, F16 and BF16 can be read", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// The tensor's type.
        found: String,
    },
    /// A buffer of an unsupported type.
    #[error("buffer {name} is requested as {found}; buffers are u8, u32, i16, i32, i64, bf16, f16, f32 or f64")]
    BufferDtype {
        /// The name.
        name: String,
        /// The requested type.
        found: String,
    },
    /// Two requests for one buffer with different types.
    #[error("buffer {name} is requested as {second}, but was first requested as {first}; use one type")]
    BufferTwice {
        /// The name.
        name: String,
        /// The type at the first request.
        first: String,
        /// The type at the second request.
        second: String,
    },
    /// A buffer whose memory does not contain the elements that its shape and type require.
    #[error(
        "buffer {name} of shape {shape:?} holds {found} instead of {expected}; a buffer keeps its original \
         shape and type; change its values with Var::set"
    )]
    BufferChanged {
        /// The name.
        name: String,
        /// The buffer's shape.
        shape: Vec<usize>,
        /// The number and type of the elements that it holds.
        found: String,
        /// The number and type of the elements that it should hold.
        expected: String,
    },
    /// A tensor whose kind of number differs from the buffer's.
    #[error(
        "tensor {name} in {} is of type {found}, but the model's buffer is {expected}; a buffer is read from a tensor \
         of the same kind, integer or floating point, whose values it can hold",
        path.display()
    )]
    BufferFileDtype {
        /// The file.
        path: PathBuf,
        /// The buffer.
        name: String,
        /// The type in the file.
        found: String,
        /// The type in the model.
        expected: String,
    },
}

/// Returns what the file at `path` should have been.
fn weight_file_kind(path: &Path) -> &'static str {
    match path.extension() {
        Some(extension) if extension == "json" => "valid index of safetensors files",
        _ => "readable safetensors file",
    }
}
