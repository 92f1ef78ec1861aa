//! Errors of parameters and of the files that they are initialized from.

use std::path::PathBuf;

/// Errors of parameters and of the files that they are initialized from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// The model's constructor requested no parameter.
    #[error(
        "the model has no parameters: its constructor took nothing from the VarBuilder; take every weight with \
         vb.get, vb.get_with_hints or candle_nn's layers"
    )]
    NoParameters,
    /// A name that safetensors files cannot contain.
    #[error(
        "a parameter or buffer is called {name}, which safetensors files keep for their own header; give it another name"
    )]
    ReservedName {
        /// The name.
        name: &'static str,
    },
    /// A rule that freezes all parameters.
    #[error(
        "all {count} parameters are frozen, so there is nothing to train; let EngineBuilder::trainable, set_trainable or \
         the parameter groups leave some"
    )]
    NothingTrained {
        /// The number of the model's parameters.
        count: usize,
    },
    /// A rule that quantizes a trained parameter.
    #[error(
        "parameter {name} is quantized and trained, and only frozen ones can be quantized; freeze it \
         (EngineBuilder::trainable, a frozen group), or let EngineBuilder::quantized leave it out"
    )]
    QuantizedTrained {
        /// The parameter.
        name: String,
    },
    /// A group that freezes no parameter.
    #[error(
        "parameter group {index} (from 0) is frozen and selects no parameter that an earlier group left; correct its \
         names, or leave it out"
    )]
    NothingFrozen {
        /// The group's index.
        index: usize,
    },
    /// A name pattern that freezes no parameter.
    #[error(
        "{pattern} selects no parameter to freeze; the model has {names} (a * stands for any characters, as in h.*)"
    )]
    NothingOfPattern {
        /// The pattern.
        pattern: String,
        /// The first few parameter names.
        names: String,
    },
    /// Name patterns that freeze all parameters.
    #[error("{patterns} freezes all {count} parameters, so there is nothing to train; leave some out")]
    AllOfPatterns {
        /// The patterns.
        patterns: String,
        /// The number of the model's parameters.
        count: usize,
    },
    /// A name that no parameter has.
    #[error("the model has no parameter {name}: {near}")]
    Unknown {
        /// The name.
        name: String,
        /// Similar names.
        near: String,
    },
    /// A module of `data_types.keep_in_fp32_modules` that the model does not have.
    #[error(
        "data_types.keep_in_fp32_modules: the model has no module {name}: {near}; allowed are whole words of a \
         parameter's name, between dots, in which * stands for any characters: correct the name, or leave it out"
    )]
    NoSuchModule {
        /// The name in the list.
        name: String,
        /// Similar names, or otherwise some existing ones.
        near: String,
    },
    /// A weight that is not a finite number.
    #[error(
        "tensor {name} in {} has the value {value} (element {element}): the file is damaged, or the training that wrote it \
         has failed; take another copy of it, or an earlier checkpoint",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor, by the model's name for it.
        name: String,
        /// The index of the first such value in it, in row-major order, from 0.
        element: usize,
        /// The value: NaN or infinite.
        value: f32,
    },
    /// An optimizer state that the parameter does not have.
    #[error("parameter {name} has no optimizer state {key}: there are {has}")]
    UnknownState {
        /// The parameter.
        name: String,
        /// The state.
        key: String,
        /// The parameter's states.
        has: String,
    },
    /// A value whose shape differs from the parameter's.
    #[error(
        "a value of shape {found:?} is given for parameter {name}, whose shape is {expected:?}; give one of that shape"
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
        "a value of shape {found:?} is given for rank {rank}'s part of parameter {name}, which is [{len}]; give one \
         dimension, as long as what safe_get_local_fp32_param gives"
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
    /// A unit to be marked that does not exist.
    #[error(
        "EngineBuilder::leaf_units names {name}, but no unit of the model is named so; its units are {units} (a name is \
         the prefix of the VarBuilder that the unit was built from)"
    )]
    NoSuchUnit {
        /// The name, or its ending after a `*`.
        name: String,
        /// The first few units.
        units: String,
    },
    /// Two requests for one name with different shapes.
    #[error(
        "{name} is asked for twice, with shape {first:?} and with {second:?}; give the layers different \
         prefixes (vb.pp)"
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
        "parameter {name} is asked for as {found}, but this engine trains in {expected} (the fp16 and bf16 sections \
         decide); take it without a dtype of its own"
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
        "parameter {name} is asked for without a shape (get_unchecked), which works only after it has been \
         registered; use vb.get with its shape"
    )]
    WithoutShape {
        /// The name.
        name: String,
    },
    /// A request, by a second instance of the model, for something that the first one does not have.
    #[error(
        "the model that is built for evaluation takes {name}, which the engine's model does not have; build it as the \
         engine's own"
    )]
    NotTheModel {
        /// A parameter or a unit.
        name: String,
    },
    /// The model's constructor computed with a parameter.
    #[error(
        "the model computes with a parameter while it is built ({last} was the last that it took): the result would \
         keep the first values for ever while the parameter is trained; compute it in forward (views as t() and \
         reshape may be taken at once)"
    )]
    UsedWhileBuilding {
        /// The parameter that was taken last.
        last: String,
    },
    /// A parameter was used while it was sharded.
    #[error(
        "an operation used a parameter that is sharded and not gathered now: {names}; use parameters only inside the \
         closure given to engine.forward or engine.eval, and a unit's parameters only inside that unit's forward \
         ({why})"
    )]
    Absent {
        /// Candidates: parameters that were absent.
        names: String,
        /// Candle's message, without a backtrace.
        why: String,
    },
    /// An operand without values: a parameter that is sharded, outside of its engine's calls, or an early copy of one.
    #[error(
        "an operation used a parameter without values ({why}): either a sharded one outside of its engine's calls, which \
         belongs into the closure given to that engine's own forward or eval (Engine::gathered and safe_get_full_fp32_param \
         read one elsewhere); or a copy that the model's constructor made of one (copy(), force_contiguous), whose values \
         come after it; copy in forward"
    )]
    AbsentElsewhere {
        /// The operation's message, without a backtrace.
        why: String,
    },
    /// A parameter that something other than the engine has written to.
    #[error(
        "parameter {name} has been written to, and not by the engine (Var::set, slice_set, zero_set or another call that \
         changes a tensor in place): the optimizer's own copy has other values, and the next update would overwrite what was \
         written; set weights with Engine::gathered_mut or safe_set_full_fp32_param, load them with load_safetensors or load_checkpoint, or \
         give the constructor's VarBuilder other values"
    )]
    Written {
        /// The parameter.
        name: String,
    },
    /// A file that is not a safetensors file.
    #[error("{} is not a safetensors file that can be read: {why}", path.display())]
    BadWeightFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// A file of an index that cannot be read.
    #[error(
        "{} names {}, which has {tensors} of its tensors and cannot be read: {why}; all files of an index are needed",
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
    #[error("{} says that tensor {name} is in {file}, which has no such tensor; one of the two is of another model", path.display())]
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
        "{} says that tensor {name} is in {file:?}; an index names files beside it, without a folder",
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
    /// A parameter whose tensor is missing.
    #[error(
        "{} has no tensor {name} of shape {shape:?}, which the model needs; the file must hold exactly the model's \
         parameters, and it has {has}",
        path.display()
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// The shape in the model.
        shape: Vec<usize>,
        /// The first few names in the file.
        has: String,
    },
    /// A parameter that is larger than any memory.
    #[error(
        "parameter {name} begins with {elements} elements on this rank, for which the system gives no memory; take a \
         smaller model, or more ranks at stage 3"
    )]
    NoMemory {
        /// The parameter.
        name: String,
        /// The number of its elements on this rank.
        elements: usize,
    },
    /// Tensors that belong to no parameter.
    #[error(
        "{} holds tensors that the model does not have: {names}; is it the file of another model or size?",
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
    /// A tensor whose type is not floating point.
    #[error("tensor {name} in {} is of type {found}; F32, F16 and BF16 can be read", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The parameter.
        name: String,
        /// The tensor's type.
        found: String,
    },
    /// A buffer of an unsupported type.
    #[error("buffer {name} is asked for as {found}; buffers are u8, u32, i16, i32, i64, bf16, f16, f32 or f64")]
    BufferDtype {
        /// The name.
        name: String,
        /// The requested type.
        found: String,
    },
    /// Two requests for one buffer with different types.
    #[error("buffer {name} is asked for as {second} after it was asked for as {first}; ask for it as one type")]
    BufferTwice {
        /// The name.
        name: String,
        /// The type at the first request.
        first: String,
        /// The type at the second request.
        second: String,
    },
    /// A buffer whose memory no longer has the elements of its shape and type.
    #[error(
        "buffer {name} of shape {shape:?} holds {found} where {expected} belong; a buffer keeps the shape and type with \
         which it was asked for: change its values with Var::set"
    )]
    BufferChanged {
        /// The name.
        name: String,
        /// The buffer's shape.
        shape: Vec<usize>,
        /// The number and type of the elements that it holds.
        found: String,
        /// The number and type of the elements of its shape.
        expected: String,
    },
    /// A tensor whose kind of number differs from the buffer's.
    #[error(
        "tensor {name} in {} is of type {found}, and the model's buffer is {expected}; a buffer is read from a tensor of \
         its own kind, integer or floating point, whose values it can hold",
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
