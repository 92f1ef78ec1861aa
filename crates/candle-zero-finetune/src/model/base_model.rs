//! The model that fine-tuning starts from: a folder in Hugging Face's format, or a GGUF file.

use super::mxfp4::{Mxfp4WeightReader, check_packed, is_packed, packed_names};
use crate::chat::tokenizer_files::has_tokenizer;
use crate::error::{FinetuneError, ParamError, Result};
use crate::gguf::weight_reader::{GgufFile, gguf_files};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use candle_zero::engine::InitialValues;
use candle_zero::models::DecoderConfig;
use candle_zero::nn::refuse;
use candle_zero::param::{FileTensor, WeightFiles};
use candle_zero::util::list;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A published language model: its description, and its weights by name. No weights are loaded yet.
///
/// ```no_run
/// use candle_zero::Engine;
/// use candle_zero_finetune::BaseModel;
/// use candle_zero::models::Decoder;
///
/// let base = BaseModel::open("SmolLM2-135M-Instruct")?;
/// // Each rank reads only the part that it keeps.
/// let builder = Engine::builder().initial_values(base.values());
/// let config = r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}"#;
/// let engine = builder.initialize(|vb| Decoder::new(base.config(), vb), config)?;
/// // Without an engine.
/// let vb = base.var_builder(candle_core::DType::F32, &candle_core::Device::Cpu);
/// let model = Decoder::new(base.config(), vb)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct BaseModel {
    folder: PathBuf,
    tokenizer: PathBuf,
    json: Value,
    config: DecoderConfig,
    values: Arc<dyn InitialValues>,
    /// The parts of the model that are not read, if it contains more than a language model.
    other_parts: Option<OtherParts>,
}

/// The tensors of the parts of a model other than its language model. Results contain these tensors unchanged.
#[derive(Debug, Clone)]
pub(crate) struct OtherParts {
    pub files: Arc<WeightFiles>,
    pub names: Vec<String>,
}

/// The file name of the description.
pub(crate) const CONFIG: &str = "config.json";

impl OtherParts {
    /// Returns the tensors with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, FileTensor<'_>)> {
        let is_other = |name: &str| self.names.binary_search_by(|other| other.as_str().cmp(name)).is_ok();
        self.files.tensors().filter(move |(name, _)| is_other(name))
    }
}

impl BaseModel {
    /// Opens a folder with `config.json` and weights (`model.safetensors`, or the shards that
    /// `model.safetensors.index.json` lists, in f32, bf16 or f16, and experts also in MXFP4), a GGUF file, or a folder
    /// with one. Reads only headers, and compares the weights' names, shapes and types with the description.
    ///
    /// If the model has no separate output projection, an output projection among the weights is ignored.
    ///
    /// # Errors
    /// A description of an unsupported model ([`DecoderConfig::read`]); files that are missing, truncated, or outside
    /// the folder; tensors that are missing, superfluous, or of a different shape or type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let no_model = |reason: String| FinetuneError::NoModel { path: path.to_owned(), reason }.into();
        if path.is_file() {
            return match path.extension() {
                Some(extension) if extension == "gguf" => Self::of_gguf(path),
                _ => Err(no_model("it is a file whose name does not end in .gguf".into())),
            };
        }
        if !path.is_dir() {
            return Err(no_model("there is no such file or folder".into()));
        }
        if path.join(CONFIG).is_file() {
            return Self::of_folder(path);
        }
        match &gguf_files(path)?[..] {
            [] => Err(no_model("it has neither config.json nor a GGUF file".into())),
            [file] => Self::of_gguf(file),
            several => {
                let names: Vec<String> = several.iter().map(|file| file.display().to_string()).collect();
                Err(no_model(format!("it has several GGUF files; give one of {}", list(&names))))
            }
        }
    }

    fn of_folder(folder: &Path) -> Result<Self> {
        let description = folder.join(CONFIG);
        let json = DecoderConfig::parse(&description)?;
        let config = DecoderConfig::from_parsed(&json, &description)?;
        let files = Arc::new(weights_of(folder)?);
        let parameters = config.parameters()?;
        let mut packed = Vec::new();
        for (name, shape) in &parameters {
            if is_packed(&files, name) {
                check_packed(&files, name, shape)?;
                packed.extend(packed_names(name));
            } else {
                check_weight(&files, name, shape, &description)?;
            }
        }
        let used = parameters.iter().map(|(name, _)| name.as_str()).chain([LM_HEAD]);
        let used: BTreeSet<&str> = used.chain(packed.iter().map(String::as_str)).collect();
        let extra: Vec<&str> = files.unused(&used).into_iter().filter(|name| !is_vision_tensor(&json, name)).collect();
        if !extra.is_empty() {
            let (path, names) = (files.path().to_owned(), list(&extra));
            return Err(ParamError::ExtraTensors { path, names }.into());
        }
        let other_parts = json.get("text_config").is_some().then(|| {
            let mut names: Vec<String> = files.unused(&used).into_iter().map(str::to_owned).collect();
            names.sort_unstable();
            OtherParts { files: files.clone(), names }
        });
        let (folder, tokenizer) = (folder.to_owned(), folder.to_owned());
        let values: Arc<dyn InitialValues> =
            if packed.is_empty() { files } else { Arc::new(Mxfp4WeightReader::new(files)) };
        Ok(Self { folder, tokenizer, json, config, values, other_parts })
    }

    fn of_gguf(file: &Path) -> Result<Self> {
        let gguf = GgufFile::open(file)?;
        let json = gguf.config_json()?;
        let config = DecoderConfig::from_parsed(&json, file)?;
        let gguf = gguf.described_by(&config)?;
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let tokenizer = if has_tokenizer(folder) { folder } else { file }.to_owned();
        Ok(Self { folder: folder.to_owned(), tokenizer, json, config, values: Arc::new(gguf), other_parts: None })
    }

    /// Returns the model's description. A model built from a copy with a shorter `ctx` has smaller tables of rotary
    /// positions.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the parts of the model besides its language model, or `None` if it is only a language model.
    pub(crate) fn other_parts(&self) -> Option<&OtherParts> {
        self.other_parts.as_ref()
    }

    /// Returns the content of `config.json` or, for a GGUF file, its equivalent.
    pub fn config_json(&self) -> &Value {
        &self.json
    }

    /// Returns the model's folder. For a GGUF file, this is the folder that contains it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of the tokenizer and the chat template, for [`Tokenizer::open`](crate::Tokenizer::open) and
    /// [`Template::open`](crate::Template::open): the folder, or a GGUF file without a tokenizer.json next to it.
    pub fn tokenizer_path(&self) -> &Path {
        &self.tokenizer
    }

    /// Returns the weights, for [`EngineBuilder::initial_values`](candle_zero::EngineBuilder::initial_values).
    pub fn values(&self) -> Arc<dyn InitialValues> {
        self.values.clone()
    }

    /// Returns a builder of the weights for a model without an engine. Each weight is read when the model requests it.
    /// A request for an unknown weight is an error.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        builder_over(self.values.clone(), dtype, device)
    }

    /// Checks that the embedding has a row for each id of a tokenizer. `ids` is the largest id plus one.
    ///
    /// # Errors
    /// Ids without a row. The message contains their number.
    pub fn check_tokens(&self, ids: usize) -> Result<()> {
        check_rows(self.config.vocab, ids)
    }
}

/// Opens the weights in a Hugging Face folder.
pub(super) fn weights_of(folder: &Path) -> Result<WeightFiles> {
    WeightFiles::open(folder).map_err(|error| match error {
        // If the error names the folder itself, neither of the files exists in it.
        candle_zero::Error::Io { path, .. } if path == folder => {
            let reason = "it has neither model.safetensors nor model.safetensors.index.json".into();
            FinetuneError::NoModel { path, reason }.into()
        }
        other => other,
    })
}

/// Checks that there is a tensor of this shape for a parameter, as the file `description` requires.
pub(super) fn check_weight(files: &WeightFiles, name: &str, shape: &[usize], description: &Path) -> Result<()> {
    let Some((_, tensor)) = files.find(name) else { return Err(files.missing(name, shape)) };
    if tensor.shape() != shape {
        let paths = [tensor.file(), description];
        return Err(FinetuneError::not_as_described(name, paths, tensor.shape(), shape).into());
    }
    tensor.check(name, shape)
}

/// Checks that an embedding with `rows` rows has a row for each of `ids` ids.
pub(super) fn check_rows(rows: usize, ids: usize) -> Result<()> {
    match ids.checked_sub(rows) {
        None | Some(0) => Ok(()),
        Some(beyond) => Err(FinetuneError::TokensBeyondEmbedding { last: ids - 1, rows, beyond }.into()),
    }
}

/// The output projection, which files may contain even if the model uses its embedding instead.
pub(super) const LM_HEAD: &str = "lm_head.weight";

/// Returns whether a tensor belongs to the vision part of a model that contains a language model.
fn is_vision_tensor(json: &Value, name: &str) -> bool {
    const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "multi_modal_projector."];
    let name = name.strip_prefix("model.").unwrap_or(name);
    json.get("text_config").is_some() && VISION_PREFIXES.iter().any(|part| name.starts_with(part))
}

/// Returns a builder for models without an engine. Each tensor is read when the model requests it.
pub(crate) fn builder_over(values: Arc<dyn InitialValues>, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(InitialValuesBackend(values)), dtype, device.clone())
}

/// A backend that creates the tensors that a model requests.
struct InitialValuesBackend(Arc<dyn InitialValues>);

impl SimpleBackend for InitialValuesBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        if !self.0.has(name) {
            candle_core::bail!("the model has no tensor {name}")
        }
        let values = self.0.values(name, shape.dims(), 0..shape.elem_count()).map_err(refuse)?;
        Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name} is requested without a shape; use vb.get with its shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.has(name)
    }
}
