//! A second instance of a model, for evaluation, which shares the weights of the first.
//!
//! Candle records an operation whenever one of its arguments is recorded, such as a parameter's tensor, and keeps the
//! arguments for as long as the result. The tensors of this instance share the parameters' storages, whether gathered
//! or released, and are not recorded. Both instances use the same variables as buffers.

use super::unit::UnitRegistrar;
use crate::error::{Error, ParamError, Result};
use crate::param::UnitId;
use crate::tensor::residency;
use crate::util::lock;
use crate::zero::rank_core::{EngineLink, RankCore};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The `VarBuilder` backend behind a second instance.
#[derive(Clone)]
pub(crate) struct EvalVarBuilderBackend(Arc<EvalVarBuilderBackendInner>);

struct EvalVarBuilderBackendInner {
    core: Arc<RankCore>,
    link: EngineLink,
    by_name: HashMap<String, usize>,
    /// The first error; Candle's own error type cannot carry it.
    failure: Mutex<Option<Error>>,
}

impl EvalVarBuilderBackend {
    pub fn new(core: &Arc<RankCore>) -> Self {
        let link = EngineLink::default();
        link.connect(core);
        let by_name = core.params().iter().enumerate().map(|(id, param)| (param.name.clone(), id)).collect();
        Self(Arc::new(EvalVarBuilderBackendInner { core: core.clone(), link, by_name, failure: Mutex::new(None) }))
    }

    /// Returns the typed error behind a failed construction.
    pub fn explain(&self, error: candle_core::Error) -> Error {
        if let Some(failure) = lock(&self.0.failure).take() {
            return failure;
        }
        match self.0.core.params().last().filter(|_| residency::names_absent(&error)) {
            Some(last) => ParamError::UsedWhileBuilding { last: last.name.clone() }.into(),
            None => error.into(),
        }
    }

    fn tensor(&self, name: &str, shape: Option<Shape>) -> Result<Tensor> {
        let core = &self.0.core;
        let tensor = match self.0.by_name.get(name) {
            Some(id) => core.params()[*id].tensor.detach(),
            // A buffer's tensor is a variable, as layers expect.
            None => match core.buffers().list().iter().find(|buffer| buffer.name == name) {
                Some(buffer) => buffer.tensor.clone(),
                None => return Err(ParamError::NotTheModel { name: name.into() }.into()),
            },
        };
        match shape.filter(|shape| shape != tensor.shape()) {
            Some(shape) => {
                let (first, second) = (tensor.dims().to_vec(), shape.dims().to_vec());
                Err(ParamError::Twice { name: name.into(), first, second }.into())
            }
            None => Ok(tensor),
        }
    }

    fn fail(&self, error: Error) -> candle_core::Error {
        let text = error.to_string();
        lock(&self.0.failure).get_or_insert(error);
        candle_core::Error::Msg(text)
    }
}

impl UnitRegistrar for EvalVarBuilderBackend {
    fn open_unit(&self, name: String) -> candle_core::Result<(UnitId, EngineLink)> {
        let id = self.0.core.unit_named(&name);
        let id = id.ok_or_else(|| self.fail(ParamError::NotTheModel { name }.into()))?;
        Ok((id, self.0.link.clone()))
    }

    fn close_unit(&self) {}

    /// Does nothing: the first instance has marked the leaf.
    fn mark_leaf(&self, _: UnitId) {}

    /// Does nothing: the first instance has marked the unit.
    fn mark_routed(&self, _: UnitId, _: UnitId, _: (usize, usize)) -> candle_core::Result<()> {
        Ok(())
    }

    fn link(&self) -> EngineLink {
        self.0.link.clone()
    }
}

impl SimpleBackend for EvalVarBuilderBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        self.tensor(name, Some(shape)).map_err(|e| self.fail(e))
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        self.tensor(name, None).map_err(|e| self.fail(e))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.by_name.contains_key(name) || self.0.core.buffers().list().iter().any(|buffer| buffer.name == name)
    }
}
