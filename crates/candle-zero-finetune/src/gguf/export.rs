//! Writes a decoder as a GGUF file that follows llama.cpp's conventions for keys, tensor names and the layout of some
//! tensors.

use super::architectures::GgufArchitecture;
use super::tensor_names::{TensorForm, tensor_mapping};
use super::tokenizer_export::keys as tokenizer_keys;
use super::weight_reader::GgufFile;
use super::writer::{BLOCK, GgmlFormat, GgufTensor, GgufValue, write};
use crate::BaseModel;
use crate::error::{Error, FinetuneError, Result};
use crate::model::merged_model::{MergedModel, MergedTensor, too_large};
use candle_zero::files;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The storage format of the weights in a GGUF file. Vectors, routers and learned positions are stored in f32 in either
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufFormat {
    /// f16.
    F16,
    /// Blocks of 32 signed 8-bit integers with an f16 scale. Tensors whose row length is not a multiple of 32 elements
    /// are stored in f16.
    Q8_0,
}

impl MergedModel<'_> {
    /// Writes the model to the file `out` in llama.cpp's format, with the tokenizer of the base's folder or GGUF file.
    /// An existing file is replaced.
    ///
    /// # Errors
    /// A model or a tokenizer that cannot be represented; a value that f16 cannot hold; errors in reading or writing.
    /// On an error, `out` is unchanged.
    pub fn write_gguf(&self, out: impl AsRef<Path>, format: GgufFormat) -> Result<()> {
        write_gguf(self, self.base, format, out.as_ref())
    }
}

fn write_gguf(merged: &MergedModel<'_>, base: &BaseModel, format: GgufFormat, out: &Path) -> Result<()> {
    let (json, config) = (base.config_json(), base.config());
    let wrong = |problem| FinetuneError::Gguf { path: base.folder().to_owned(), problem };
    let kind = model_type(json);
    let architecture = GgufArchitecture::of_type(kind).map_err(wrong)?;
    if let Some(problem) = architecture.problem(config) {
        return Err(wrong(problem).into());
    }
    let mut metadata = general_keys(architecture.name, base.folder(), format);
    metadata.extend(architecture.keys(config));
    let tokenizer = base.tokenizer_path();
    metadata.extend(match tokenizer.is_file() {
        true => GgufFile::open(tokenizer)?.tokenizer_keys(),
        false => tokenizer_keys(tokenizer, json, config.vocab)?,
    });
    let mut entries = Vec::new();
    let mut sources = Vec::new();
    for (name, factors) in architecture.rotary_factors(config) {
        let (name, shape) = (name.to_owned(), vec![factors.len()]);
        entries.push(GgufTensor { name, shape, format: GgmlFormat::F32 });
        sources.push(TensorOrigin::Values(factors));
    }
    let experts = config.mixture.as_ref().map_or(0, |mixture| mixture.experts);
    // The indices in `entries` of the tensors that contain a projection of all experts, by name.
    let mut expert_tensors: HashMap<String, usize> = HashMap::new();
    for (name, shape) in merged.shapes() {
        let unknown = || wrong(format!("llama.cpp has no name for tensor {name} of a {kind} model"));
        let mapping = tensor_mapping(name, config, architecture.pairs).ok_or_else(unknown)?;
        let expert = if let TensorForm::OfExpert(expert) = mapping.form { Some(expert) } else { None };
        let new_shape = mapping.shape_in_file(shape, experts);
        let is_f32 = new_shape.len() < 2 || mapping.is_always_f32();
        let row = new_shape.last().copied().unwrap_or(1);
        let format = match format {
            _ if is_f32 => GgmlFormat::F32,
            GgufFormat::Q8_0 if row.is_multiple_of(BLOCK) => GgmlFormat::Q8_0,
            _ => GgmlFormat::F16,
        };
        let tensors = mapping.names.len();
        for (first, tensor) in mapping.names.into_iter().enumerate() {
            if let Some(expert) = expert {
                let known = expert_tensors.get(&tensor).and_then(|at| sources.get_mut(*at));
                if let Some(TensorOrigin::Experts(parts, _)) = known {
                    parts.push((expert, name.as_str()));
                    continue;
                }
                expert_tensors.insert(tensor.clone(), entries.len());
            }
            sources.push(match expert {
                Some(expert) => TensorOrigin::Experts(vec![(expert, name)], shape),
                None => TensorOrigin::Parameter(ParameterOrigin {
                    name,
                    shape,
                    form: mapping.form,
                    outputs: OutputStride { first, tensors },
                    plus_one: mapping.plus_one,
                }),
            });
            entries.push(GgufTensor { name: tensor, shape: new_shape.clone(), format });
        }
    }
    for source in &mut sources {
        if let TensorOrigin::Experts(parts, ..) = source {
            parts.sort_unstable();
        }
    }
    let wrong = |source| Error::Io { action: "write", path: out.to_owned(), source };
    let mut file = files::AtomicFile::create_for(out).map_err(wrong)?;
    let bytes = entries.iter().map(GgufTensor::bytes).sum();
    files::check_free_space(files::folder_of(out), bytes)?;
    let mut buffered = BufWriter::new(file.file());
    let mut count = merged.counter(bytes);
    let mut put = |bytes: &[u8]| buffered.write_all(bytes).map_err(wrong);
    write(&metadata, &entries, &mut put, |at, take| match &sources[at] {
        TensorOrigin::Values(values) => {
            take(&entries[at].format.encode(values).map_err(|v| too_large(&entries[at].name, v, "f16"))?)
        }
        TensorOrigin::Experts(parts, shape) => parts.iter().try_for_each(|(_, name)| {
            let parameter = ParameterOrigin::unchanged(name, shape);
            parameter.emit(&merged.tensor(name, shape)?, entries[at].format, &mut |bytes| {
                count(bytes.len());
                take(bytes)
            })
        }),
        TensorOrigin::Parameter(parameter) => {
            parameter.emit(&merged.tensor(parameter.name, parameter.shape)?, entries[at].format, &mut |bytes| {
                count(bytes.len());
                take(bytes)
            })
        }
    })?;
    buffered.flush().map_err(wrong)?;
    drop(buffered);
    file.finish().map(drop).map_err(wrong)
}

/// Returns the type of the model, or of its text part.
fn model_type(json: &Json) -> &str {
    let inner = json.get("text_config").and_then(|text| text["model_type"].as_str());
    inner.or_else(|| json["model_type"].as_str()).unwrap_or_default()
}

/// Returns the keys that all files have.
fn general_keys(architecture: &str, base: &Path, format: GgufFormat) -> Vec<(String, GgufValue)> {
    let text = |text: &str| GgufValue::String(text.to_owned());
    let mut keys: Vec<(String, GgufValue)> = Vec::new();
    keys.push(("general.architecture".into(), text(architecture)));
    keys.push(("general.type".into(), text("model")));
    if let Some(name) = base.file_name() {
        keys.push(("general.name".into(), text(&name.to_string_lossy())));
    }
    keys.push(("general.file_type".into(), GgufValue::U32(if format == GgufFormat::F16 { 1 } else { 7 })));
    keys.push(("general.quantization_version".into(), GgufValue::U32(2)));
    keys
}

/// The source of a written tensor.
enum TensorOrigin<'a> {
    Values(Vec<f32>),
    /// The indices of experts with the names of their parameters, and the shape of each of these parameters.
    Experts(Vec<(usize, &'a str)>, &'a [usize]),
    Parameter(ParameterOrigin<'a>),
}

/// A parameter, some or all of whose outputs a tensor contains.
struct ParameterOrigin<'a> {
    name: &'a str,
    shape: &'a [usize],
    form: TensorForm,
    outputs: OutputStride,
    plus_one: bool,
}

/// The outputs of a parameter that a tensor contains: every `tensors`-th output, beginning with output `first`.
#[derive(Debug, Clone, Copy)]
struct OutputStride {
    first: usize,
    tensors: usize,
}

impl<'a> ParameterOrigin<'a> {
    /// Returns the source of a tensor that contains a parameter unchanged.
    fn unchanged(name: &'a str, shape: &'a [usize]) -> Self {
        Self { name, shape, form: TensorForm::Same, outputs: OutputStride { first: 0, tensors: 1 }, plus_one: false }
    }

    /// Passes the bytes of the tensor to `take`, given the parameter.
    fn emit(
        &self,
        parameter: &MergedTensor<'_>,
        format: GgmlFormat,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (lines, width) = parameter.lines();
        let mut put =
            |values: &[f32]| take(&format.encode(values).map_err(|value| too_large(self.name, value, format.name()))?);
        match self.form {
            TensorForm::Same | TensorForm::Vector | TensorForm::OfExpert(_) => {
                for piece in parameter.pieces(1) {
                    let mut values = parameter.values(piece)?;
                    if self.plus_one {
                        values.iter_mut().for_each(|x| *x += 1.0);
                    }
                    put(&values)?;
                }
                Ok(())
            }
            // All rows are needed: each row of the result contains one element from each row of the parameter.
            TensorForm::Transposed => self.emit_transposed(&parameter.values(0..lines)?, [lines, width], &mut put),
            TensorForm::OfAllExperts { inputs } => {
                for expert in 0..lines {
                    self.emit_transposed(&parameter.values(expert..expert + 1)?, [inputs, width / inputs], &mut put)?;
                }
                Ok(())
            }
            TensorForm::Interleaved(head) => {
                // The rows of a vector are its elements.
                let (lines_of_head, width) = if lines == 1 { (1, 1) } else { (head, width) };
                for piece in parameter.pieces(lines_of_head) {
                    let values = parameter.values(piece)?;
                    let mut output = Vec::with_capacity(values.len());
                    for values in values.chunks(head * width) {
                        let line = |i: usize| &values[i * width..(i + 1) * width];
                        (0..head / 2)
                            .for_each(|i| [i, i + head / 2].iter().for_each(|i| output.extend_from_slice(line(*i))));
                    }
                    put(&output)?;
                }
                Ok(())
            }
        }
    }

    /// Passes the outputs of a matrix `[inputs, outputs]` to `put`, one after another.
    fn emit_transposed(
        &self,
        matrix: &[f32],
        [inputs, outputs]: [usize; 2],
        put: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let OutputStride { first, tensors } = self.outputs;
        let tensor_outputs = (first..outputs).step_by(tensors);
        if inputs == 1 {
            return put(&tensor_outputs.map(|output| matrix[output]).collect::<Vec<f32>>());
        }
        let mut line = vec![0f32; inputs];
        for output in tensor_outputs {
            line.iter_mut().enumerate().for_each(|(i, x)| *x = matrix[i * outputs + output]);
            put(&line)?;
        }
        Ok(())
    }
}
