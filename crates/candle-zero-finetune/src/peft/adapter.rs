//! Low-rank adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The keys of the tensors are `base_model.model.` followed by the parameter's name in transformers' language model,
//! whose blocks have the prefix `model.` or `transformer.`. Files of the models themselves may omit that prefix.

use super::config::{PeftConfig, is_of_experts};
use crate::error::{Error, FinetuneError, Result};
use crate::model::output_dir::new_folder;
use candle_zero::engine::Engine;
use candle_zero::files;
use candle_zero::nn::{LoraConfig, LoraTargets, adapted_module, is_adapter};
use candle_zero::param::check_finite;
use candle_zero::util::{fnv1a, list};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";
/// The prefix of a language model inside a model for images and text, in transformers.
const IMAGE_TEXT_PREFIX: &str = "model.language_model.";
/// The maximum size of an adapter's configuration in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The maximum size of an adapter's tensor file in bytes.
const MAX_TENSOR_FILE_BYTES: u64 = 1 << 36;

/// A tensor of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterTensor {
    /// The shape.
    pub shape: Vec<usize>,
    /// The values, row by row.
    pub values: Vec<f32>,
}

/// A low-rank adapter, completely in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The settings that the adapter was trained with.
    pub config: LoraConfig,
    /// The model that the adapter was trained on, as a folder or a Hub name, if the adapter names it.
    pub base: Option<String>,
    /// The modules of a classifier's head that are trained completely, or `None` for the adapter of a language model.
    saved: Option<Vec<String>>,
    /// The folder that the adapter was read from.
    path: PathBuf,
    /// The tensors by parameter name, without the prefix of the blocks.
    tensors: BTreeMap<String, AdapterTensor>,
}

impl Adapter {
    /// Creates an adapter from parameters named as in the model.
    pub fn new(
        config: LoraConfig,
        base: Option<String>,
        parameters: impl IntoIterator<Item = (String, AdapterTensor)>,
    ) -> Self {
        let tensors = parameters.into_iter().map(|(name, tensor)| (without_prefix(&name).to_owned(), tensor)).collect();
        Self { config, base, saved: None, path: PathBuf::new(), tensors }
    }

    /// Marks this adapter as that of a classifier, which includes the complete parameters of the modules `saved`
    /// (`modules_to_save` of PEFT's task type SEQ_CLS).
    #[must_use]
    pub fn of_classifier(self, saved: Vec<String>) -> Self {
        Self { saved: Some(saved), ..self }
    }

    /// Returns the modules of a classifier's head that are trained completely, or `None` for the adapter of a language
    /// model.
    pub fn saved_modules(&self) -> Option<&[String]> {
        self.saved.as_deref()
    }

    /// Returns the number of labels of a classifier's adapter.
    ///
    /// # Errors
    /// The adapter of a language model; an adapter without a projection to labels.
    pub(crate) fn labels(&self) -> Result<usize> {
        self.check_classifies()?;
        let projections = ["score.weight", "classifier.weight", "classifier.out_proj.weight"];
        let weight = projections.iter().find_map(|name| self.tensors.get(*name));
        let labels = weight.and_then(|weight| weight.shape.first().copied());
        labels.ok_or_else(|| {
            let reason = format!("it has no projection to labels, whose name would be one of {}", list(&projections));
            unusable(&self.path.join(TENSORS), reason)
        })
    }

    /// Checks that this is the adapter of a classifier.
    ///
    /// # Errors
    /// The adapter of a language model.
    pub(crate) fn check_classifies(&self) -> Result<()> {
        match self.saved {
            Some(_) => Ok(()),
            None => {
                let reason =
                    "its task_type is not SEQ_CLS: it is the adapter of a language model, without a classifier";
                Err(unusable(&self.path.join(CONFIG), reason.into()))
            }
        }
    }

    /// Returns the adapter that an engine trains. Collective.
    ///
    /// # Errors
    /// Errors of [`Engine::safe_get_full_fp32_param`].
    pub fn of_engine<M>(engine: &mut Engine<M>, config: LoraConfig, base: Option<String>) -> Result<Self> {
        Self::of_parameters(engine, config, base, is_adapter)
    }

    /// Returns the adapter of a classifier that an engine trains, with the modules `saved`. Collective.
    ///
    /// # Errors
    /// Errors of [`Engine::safe_get_full_fp32_param`].
    pub fn of_classifying_engine<M>(
        engine: &mut Engine<M>,
        config: LoraConfig,
        base: Option<String>,
        saved: Vec<String>,
    ) -> Result<Self> {
        let is_included = |name: &str| is_adapter(name) || is_saved(name, &saved);
        Ok(Self::of_parameters(engine, config, base, is_included)?.of_classifier(saved))
    }

    /// Returns an adapter with the trained parameters for which `is_included` returns true. Collective.
    fn of_parameters<M>(
        engine: &mut Engine<M>,
        config: LoraConfig,
        base: Option<String>,
        is_included: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let names: Vec<String> = engine.trainable_parameters().into_iter().filter(|name| is_included(name)).collect();
        let mut parameters = Vec::with_capacity(names.len());
        for name in names {
            let tensor = engine.safe_get_full_fp32_param(&name)?;
            let (shape, values) = (tensor.dims().to_vec(), tensor.flatten_all()?.to_vec1()?);
            parameters.push((name, AdapterTensor { shape, values }));
        }
        Ok(Self::new(config, base, parameters))
    }

    /// Returns a hash of names, shapes and values.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut bytes = Vec::new();
        for (name, tensor) in &self.tensors {
            bytes.extend_from_slice(name.as_bytes());
            tensor.shape.iter().for_each(|dim| bytes.extend((*dim as u64).to_le_bytes()));
            let values = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            bytes.extend(fnv1a(&values).to_le_bytes());
        }
        fnv1a(&bytes)
    }

    /// Reads a folder that PEFT or [`Adapter::write`] has written.
    ///
    /// # Errors
    /// A file that is missing, damaged or too large; a different kind of adapter; unsupported settings; values that are
    /// not finite.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action: "read", path, source }
        };
        let path = folder.join(CONFIG);
        let text = files::read_text(&path, MAX_CONFIG_BYTES).map_err(io(&path))?;
        let mut config = PeftConfig::read(&text).map_err(|reason| unusable(&path, reason))?;
        let path = folder.join(TENSORS);
        let bytes = files::read(&path, MAX_TENSOR_FILE_BYTES).map_err(io(&path))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| unusable(&path, e.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (key, view) in file.iter() {
            let is_included =
                |name: &&str| is_adapter(name) || config.saved.as_ref().is_some_and(|saved| is_saved(name, saved));
            let name = key.strip_prefix(PREFIX).filter(is_included).ok_or_else(|| {
                unusable(
                    &path,
                    format!("{key} is not a tensor of a LoRA adapter, whose keys are {PREFIX}NAME.lora_A.weight"),
                )
            })?;
            let values = values_of(&view).ok_or_else(|| {
                unusable(&path, format!("{key} has dtype {:?}; f32, bf16 and f16 are supported", view.dtype()))
            })?;
            check_finite(&path, key, 0, &values)?;
            tensors.insert(without_prefix(name).to_owned(), AdapterTensor { shape: view.shape().to_vec(), values });
        }
        if config.is_pattern {
            let modules = tensors.keys().filter_map(|name: &String| adapted_module(name));
            let modules: BTreeSet<&str> = modules.filter(|module| !is_of_experts(module)).collect();
            config.lora.targets = LoraTargets::Names(modules.into_iter().map(str::to_owned).collect());
            config.lora.validate().map_err(|_| unusable(&path, "it has no adapter tensors".into()))?;
        }
        let PeftConfig { lora, base, saved, .. } = config;
        Ok(Self { config: lora, base, saved, path: folder.to_owned(), tensors })
    }

    /// Checks that all values are finite.
    ///
    /// # Errors
    /// [`ParamError::NotFinite`](crate::error::ParamError::NotFinite).
    pub(crate) fn check_finite(&self) -> Result<()> {
        self.tensors.iter().try_for_each(|(name, tensor)| check_finite(&self.path, name, 0, &tensor.values))
    }

    /// Returns the adapter's tensor for a parameter, given the parameter's name in the model.
    pub fn tensor(&self, parameter: &str) -> Option<&AdapterTensor> {
        self.tensors.get(without_prefix(parameter))
    }

    /// Checks that this is an adapter for a model with these parameters and shapes, including those of its adapters.
    ///
    /// # Errors
    /// [`FinetuneError::AdapterDoesNotFit`] names a tensor that the model does not have or that has a different shape;
    /// [`FinetuneError::IncompleteAdapter`] names missing tensors.
    pub fn check_fits(&self, parameters: &[(String, Vec<usize>)]) -> Result<()> {
        let wrong = |tensor: &str, problem: String| {
            let (path, base) = (self.path.clone(), self.base.clone());
            Err(FinetuneError::AdapterDoesNotFit { path, base, tensor: tensor.into(), problem }.into())
        };
        let shapes: HashMap<&str, &[usize]> =
            parameters.iter().map(|(name, shape)| (without_prefix(name), shape.as_slice())).collect();
        for (name, tensor) in &self.tensors {
            match shapes.get(name.as_str()) {
                None if self.saved.is_some() && !parameters.iter().any(|(name, _)| is_head(name)) => {
                    let problem = "it belongs to a classifier (task_type SEQ_CLS), which zerorun classify uses";
                    return wrong(name, problem.into());
                }
                None => return wrong(name, "the model has no such projection".into()),
                Some(shape) if **shape != tensor.shape => {
                    return wrong(name, format!("it has shape {:?}, but the model needs {shape:?}", tensor.shape));
                }
                Some(_) => (),
            }
        }
        let has = |name: &str| self.tensor(name).is_some();
        let is_included =
            |name: &str| is_adapter(name) || self.saved.as_ref().is_some_and(|saved| is_saved(name, saved));
        let lacks = |name: &&str| is_included(name) && !has(name);
        let missing: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).filter(lacks).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let (path, base, names) = (self.path.clone(), self.base.clone(), list(&missing));
        Err(FinetuneError::IncompleteAdapter { path, base, names }.into())
    }

    /// Returns the folder that the adapter was read from, which is empty for an adapter created in memory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the folder `out` in the way that PEFT does. `out` must be absent or empty. `parameters` are the names of
    /// all parameters of the base, which determine the prefix of the tensors' names and the layout of the base's
    /// weights.
    ///
    /// # Errors
    /// [`Error::Io`]; a folder that is not empty. On an error, `out` is unchanged.
    pub fn write<'a>(&self, out: impl AsRef<Path>, parameters: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let out = out.as_ref();
        let wrong = |source| Error::Io { action: "write", path: out.to_owned(), source };
        let folder = new_folder(out)?;
        self.write_into(folder.path(), parameters).map_err(wrong)?;
        folder.finish().map_err(wrong)
    }

    /// Writes the two files into an existing folder.
    pub(crate) fn write_into<'a>(
        &self,
        folder: &Path,
        parameters: impl IntoIterator<Item = &'a str>,
    ) -> std::io::Result<()> {
        let mut prefix = "model.";
        for name in parameters {
            if name.ends_with(".attn.c_attn.weight") {
                prefix = "transformer.";
            } else if name.starts_with(IMAGE_TEXT_PREFIX) {
                prefix = IMAGE_TEXT_PREFIX;
            }
        }
        let is_conv1d = prefix == "transformer.";
        let modules = self.tensors.keys().filter_map(|name| name.strip_suffix(".lora_A.weight"));
        let (lora, base, saved) = (self.config.clone(), self.base.clone(), self.saved.clone());
        let config = PeftConfig { lora, base, is_pattern: false, saved }.write(modules, is_conv1d);
        files::write_atomically(&folder.join(CONFIG), ".adapter", config.as_bytes())?;
        // In a classifier's adapter, only the names of tensors in blocks get the prefix of the model's files.
        let prefix = |name: &str| match self.saved.is_none() || ["layers.", "h."].iter().any(|b| name.starts_with(b)) {
            true => prefix,
            false => "",
        };
        let bytes: Vec<(String, &[usize], Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, tensor)| {
                let bytes = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (format!("{PREFIX}{}{name}", prefix(name)), tensor.shape.as_slice(), bytes)
            })
            .collect();
        let invalid = |e: safetensors::SafeTensorError| std::io::Error::new(std::io::ErrorKind::InvalidData, e);
        let views = bytes.iter().map(|(name, shape, bytes)| {
            Ok((name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).map_err(invalid)?))
        });
        let views = views.collect::<std::io::Result<Vec<_>>>()?;
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let file = safetensors::serialize(views, Some(metadata)).map_err(invalid)?;
        files::write_atomically(&folder.join(TENSORS), ".adapter", &file)?;
        files::sync_folder(folder)
    }
}

/// Returns whether a parameter belongs to one of the modules that are saved completely. As in PEFT, a module is saved
/// completely if its path ends with one of the names.
pub(crate) fn is_saved(parameter: &str, saved: &[String]) -> bool {
    let mut modules = parameter.match_indices('.').map(|(at, _)| &parameter[..at]);
    !is_adapter(parameter) && modules.any(|module| saved.iter().any(|name| module.ends_with(name.as_str())))
}

/// Returns whether a parameter belongs to the projection of a classifier to labels.
fn is_head(parameter: &str) -> bool {
    ["score.", "classifier."].iter().any(|head| parameter.starts_with(head))
}

/// Returns a parameter's name without the prefix of the blocks.
fn without_prefix(name: &str) -> &str {
    // A language model inside a model for images and text has two prefixes, whose order depends on the version of
    // transformers.
    ["model.language_model.", "language_model.model.", "model.", "transformer."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}

fn unusable(path: &Path, reason: String) -> Error {
    FinetuneError::AdapterFile { path: path.to_owned(), reason }.into()
}

/// Returns the values in f32, or `None` if the dtype is not f32, bf16 or f16.
fn values_of(view: &TensorView<'_>) -> Option<Vec<f32>> {
    // The header can have any length, so elements may be unaligned.
    fn read<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Option<Vec<f32>> {
        Some(bytes.as_chunks::<N>().0.iter().map(|b| f(*b)).collect())
    }
    match view.dtype() {
        Dtype::F32 => read(view.data(), f32::from_le_bytes),
        Dtype::BF16 => read(view.data(), |b| bf16::from_le_bytes(b).to_f32()),
        Dtype::F16 => read(view.data(), |b| f16::from_le_bytes(b).to_f32()),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn adapter() -> Adapter {
        let tensor = |shape: &[usize]| AdapterTensor {
            shape: shape.to_vec(),
            values: (0..shape.iter().product::<usize>()).map(|i| i as f32 / 3.0).collect(),
        };
        let config = "r=2,alpha=3,targets=q_proj,rslora".parse().unwrap();
        let parameters = [
            ("model.layers.0.self_attn.q_proj.lora_A.weight".to_owned(), tensor(&[2, 6])),
            ("model.layers.0.self_attn.q_proj.lora_B.weight".to_owned(), tensor(&[4, 2])),
        ];
        Adapter::new(config, Some("llama".into()), parameters)
    }

    fn parameters() -> Vec<(String, Vec<usize>)> {
        [("lora_A.weight", [2, 6]), ("lora_B.weight", [4, 2]), ("weight", [4, 6])]
            .map(|(end, shape)| (format!("model.layers.0.self_attn.q_proj.{end}"), shape.to_vec()))
            .to_vec()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("adapter");
        let adapter = adapter();
        adapter.write(&out, ["model.layers.0.self_attn.q_proj.weight"]).unwrap();
        let read = Adapter::read(&out).unwrap();
        assert_eq!(read, Adapter { path: out.clone(), ..adapter.clone() });
        read.check_fits(&parameters()).unwrap();
        let file = std::fs::read(out.join(TENSORS)).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        let expected = ["A", "B"].map(|m| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{m}.weight"));
        assert_eq!(names, expected);
        // A folder with files is never overwritten.
        adapter.write(&out, []).unwrap_err();
    }

    #[test]
    fn the_head_of_a_classifier_is_written_under_its_own_name() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("adapter");
        let head = AdapterTensor { shape: vec![2, 6], values: vec![0.5; 12] };
        let mut adapter = adapter().of_classifier(vec!["score".into()]);
        adapter.tensors.insert("score.weight".into(), head);
        adapter.write(&out, ["model.layers.0.self_attn.q_proj.weight"]).unwrap();
        assert_eq!(Adapter::read(&out).unwrap(), Adapter { path: out.clone(), ..adapter.clone() });
        let file = std::fs::read(out.join(TENSORS)).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        let block = "base_model.model.model.layers.0.self_attn.q_proj";
        let expected = [
            format!("{block}.lora_A.weight"),
            format!("{block}.lora_B.weight"),
            "base_model.model.score.weight".to_owned(),
        ];
        assert_eq!(names, expected);
        assert_eq!(adapter.labels().unwrap(), 2);
        let mut model_parameters = parameters();
        insta::assert_snapshot!(adapter.check_fits(&model_parameters).unwrap_err());
        model_parameters.push(("score.weight".into(), vec![3, 6]));
        insta::assert_snapshot!(adapter.check_fits(&model_parameters).unwrap_err());
        model_parameters.pop();
        model_parameters.push(("score.weight".into(), vec![2, 6]));
        adapter.check_fits(&model_parameters).unwrap();
        adapter.tensors.remove("score.weight");
        insta::assert_snapshot!(adapter.check_fits(&model_parameters).unwrap_err());
        insta::assert_snapshot!(adapter.labels().unwrap_err());
        insta::assert_snapshot!(Adapter { saved: None, ..adapter }.labels().unwrap_err());
    }

    #[test]
    fn saved_modules_are_meant_by_the_ends_of_their_paths() {
        let saved = ["classifier".to_owned(), "pooler".to_owned()];
        assert!(
            ["classifier.weight", "pre_classifier.bias", "classifier.out_proj.weight", "bert.pooler.dense.weight"]
                .iter()
                .all(|name| is_saved(name, &saved))
        );
        assert!(!is_saved("bert.encoder.layer.0.output.dense.weight", &saved));
        assert!(!is_saved("classifiers.weight", &saved));
    }

    #[test]
    fn an_adapter_for_another_base_is_refused_by_the_name_of_the_tensor() {
        let text = |parameters: &[(String, Vec<usize>)]| adapter().check_fits(parameters).unwrap_err().to_string();
        let mut other = parameters();
        other[0].1 = vec![2, 8];
        insta::assert_snapshot!(text(&other), @"the adapter  (trained on llama) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: it has shape [2, 6], but the model needs [2, 8]; use the model that it was trained on");
        insta::assert_snapshot!(text(&other[1..]), @"the adapter  (trained on llama) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: the model has no such projection; use the model that it was trained on");
        let mut more = parameters();
        more.push(("model.layers.1.self_attn.q_proj.lora_A.weight".into(), vec![2, 6]));
        insta::assert_snapshot!(text(&more), @"the adapter  (trained on llama) is incomplete: according to its adapter_config.json and this model, it should also have model.layers.1.self_attn.q_proj.lora_A.weight; copy it again from its source, or use the model that it was trained on");
    }
}
