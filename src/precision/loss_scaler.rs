//! The loss scale of fp16 training.
//!
//! f16 gradients underflow. Multiplying the loss by a scale lifts them into range, and dividing the gradients by the
//! scale before the update undoes this. A dynamic scale grows while no gradient overflows, and shrinks on
//! overflow.
//!
//! DeepSpeed has two rules for a dynamic scale, and both are implemented. At stages 1 to 3, it takes `fp16.hysteresis`
//! overflows to halve the scale, and the run ends when the scale cannot decrease any further. At stage 0, each overflow
//! halves the scale, and the run never ends for this reason.

use crate::config::{Fp16, Precision};
use crate::error::{EngineError, Result};
use crate::layout::ZeroStage;
use serde::{Deserialize, Serialize};

/// The factor by which the loss is multiplied, and its reaction to overflow.
#[derive(Debug, Clone, PartialEq)]
pub enum LossScaler {
    /// No scaling, for f32 and bf16.
    None,
    /// A constant scale, if `fp16.loss_scale` is above 0. A step that overflows is still skipped.
    Static {
        /// The factor.
        scale: f64,
        /// The number of consecutive overflows.
        overflows: u32,
    },
    /// A dynamic scale, if `fp16.loss_scale` is 0.
    Dynamic(DynamicLossScale),
}

/// The number of consecutive overflows that end a run with a constant scale. The weights do not change meanwhile, so
/// only other data could produce a gradient that does not overflow.
const MAX_STATIC_OVERFLOWS: u32 = 20;

/// The state of a dynamic loss scale.
#[derive(Debug, Clone, PartialEq)]
pub struct DynamicLossScale {
    scale: f64,
    min: f64,
    window: u64,
    /// The number of overflows that it takes to halve the scale: `fp16.hysteresis`, or 1 at stage 0.
    patience: u32,
    /// The remaining hysteresis.
    patience_left: u32,
    /// Whether the run ends if an overflow should lower the scale but the scale is at its minimum.
    ends_at_min: bool,
    refill_each_clean_step: bool,
    steps: u64,
    /// The number of clean steps since the start of the run or the last overflow.
    clean: u64,
}

/// The part of a loss scale that changes during a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The factor.
    pub scale: f64,
    /// The remaining part of `fp16.hysteresis`.
    pub patience_left: u32,
    /// The number of steps so far.
    pub steps: u64,
    /// The number of clean steps since the start of the run or the last overflow.
    pub clean: u64,
}

impl LossScaler {
    /// Returns the state to save, or `None` without scaling.
    pub fn state(&self) -> Option<ScalerState> {
        match self {
            Self::None => None,
            Self::Static { scale, .. } => Some(ScalerState { scale: *scale, patience_left: 1, steps: 0, clean: 0 }),
            Self::Dynamic(d) => {
                let DynamicLossScale { scale, patience_left, steps, clean, .. } = *d;
                Some(ScalerState { scale, patience_left, steps, clean })
            }
        }
    }

    /// Restores a saved state. A static scale keeps the value of the configuration.
    pub fn restore(&mut self, state: &ScalerState) {
        if let Self::Dynamic(dynamic) = self {
            dynamic.scale = state.scale;
            dynamic.patience_left = state.patience_left.min(dynamic.patience);
            dynamic.steps = state.steps;
            dynamic.clean = state.clean;
        }
    }

    /// Creates the scaler that the configuration requests at `stage`.
    pub fn new(precision: &Precision, stage: ZeroStage) -> Self {
        match precision {
            Precision::F32 | Precision::Bf16 { .. } => Self::None,
            Precision::Fp16(fp16) if fp16.loss_scale > 0.0 => Self::Static { scale: fp16.loss_scale, overflows: 0 },
            Precision::Fp16(fp16) => {
                let initial = 2.0f64.powf(f64::from(fp16.initial_scale_power));
                Self::Dynamic(DynamicLossScale::new(initial, fp16, stage))
            }
        }
    }

    /// Returns the factor for the next loss. Gradients must be divided by the scale by which their loss was
    /// multiplied, so read the factor before [`update`](Self::update).
    pub fn scale(&self) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Static { scale, .. } => *scale,
            Self::Dynamic(dynamic) => dynamic.scale,
        }
    }

    /// Reports one optimizer step. `overflow` means that a gradient on any rank was not finite. All ranks must report
    /// the same value.
    ///
    /// # Errors
    /// Returns [`EngineError::LossScaleAtMinimum`] on an overflow that would lower the dynamic scale if the scale were
    /// not at `fp16.min_loss_scale` already, at stages 1 to 3, and [`EngineError::StaticLossScaleTooLarge`] on the 20th
    /// consecutive overflow with a constant scale.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Static { scale, overflows } => {
                *overflows = if overflow { *overflows + 1 } else { 0 };
                if *overflows < MAX_STATIC_OVERFLOWS {
                    return Ok(());
                }
                Err(EngineError::StaticLossScaleTooLarge { scale: *scale, steps: *overflows }.into())
            }
            Self::Dynamic(dynamic) => dynamic.update(overflow),
        }
    }
}

impl DynamicLossScale {
    fn new(scale: f64, fp16: &Fp16, stage: ZeroStage) -> Self {
        let sharded = stage != ZeroStage::Zero;
        let patience = if sharded { fp16.hysteresis } else { 1 };
        Self {
            scale,
            min: fp16.min_loss_scale,
            window: fp16.loss_scale_window,
            patience,
            patience_left: patience,
            ends_at_min: sharded,
            refill_each_clean_step: fp16.consecutive_hysteresis,
            steps: 0,
            clean: 0,
        }
    }

    fn update(&mut self, overflow: bool) -> Result<()> {
        if overflow {
            self.on_overflow()?;
        } else {
            self.on_clean_step();
        }
        self.steps += 1;
        Ok(())
    }

    fn on_overflow(&mut self) -> Result<()> {
        if self.patience_left > 1 {
            self.patience_left -= 1;
        } else if self.scale == self.min && self.ends_at_min {
            return Err(EngineError::LossScaleAtMinimum { scale: self.scale, step: self.steps + 1 }.into());
        } else {
            self.scale = (self.scale / 2.0).max(self.min);
        }
        self.clean = 0;
        Ok(())
    }

    fn on_clean_step(&mut self) {
        if self.refill_each_clean_step {
            self.patience_left = self.patience;
        }
        // The scale doubles on clean step `window + 1`, not `window`: DeepSpeed counts from 0.
        if self.clean > 0 && self.clean.is_multiple_of(self.window) {
            self.patience_left = self.patience;
            self.scale *= 2.0;
        }
        self.clean += 1;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn fp16(case: &Value) -> Fp16 {
        Fp16 {
            loss_scale: 0.0,
            initial_scale_power: case["initial_scale_power"].as_u64().map_or(16, |p| p as u32),
            loss_scale_window: case["loss_scale_window"].as_u64().unwrap(),
            hysteresis: case["hysteresis"].as_u64().unwrap() as u32,
            consecutive_hysteresis: case["consecutive_hysteresis"].as_bool().unwrap(),
            min_loss_scale: case["min_loss_scale"].as_f64().unwrap(),
        }
    }

    #[test]
    fn every_recorded_sequence_of_deepspeed_is_followed() {
        let file: Value = serde_json::from_str(include_str!("../../tests/fixtures/loss_scale.json")).unwrap();
        let cases = file["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 19);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let mut scaler = DynamicLossScale::new(case["init_scale"].as_f64().unwrap(), &fp16(case), ZeroStage::One);
            let overflows: Vec<u64> =
                case["overflow_steps"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).collect();
            let raises = case["raises"]["step"].as_u64();
            let (scales, hystereses) = (&case["scale_after"], &case["hysteresis_after"]);
            assert_eq!(scales.as_array().unwrap().len() as u64, raises.unwrap_or(case["steps"].as_u64().unwrap()));
            for (step, scale) in (0u64..).zip(scales.as_array().unwrap()) {
                scaler.update(overflows.contains(&step)).unwrap();
                assert_eq!(scaler.scale, scale.as_f64().unwrap(), "{name}: scale after step {step}");
                let hysteresis = hystereses[step as usize].as_u64().unwrap();
                assert_eq!(u64::from(scaler.patience_left), hysteresis, "{name}: hysteresis after step {step}");
            }
            if raises.is_some() {
                assert!(scaler.update(true).is_err(), "{name}: at the minimum");
                assert_eq!(scaler.scale, case["raises"]["scale"].as_f64().unwrap(), "{name}");
            }
        }
    }

    #[test]
    fn the_conformance_cases_hold() {
        let file: Value = serde_json::from_str(include_str!("../../tests/fixtures/conformance_data.json")).unwrap();
        let (mut run, mut skipped) = (0, vec![]);
        for case in file.as_array().unwrap().iter().filter(|c| c["area"] == "loss-scaler") {
            let id = case["id"].as_str().unwrap();
            // This case counts an engine's steps: see tests/engine/overflow.rs.
            if id == "bf16-check" {
                skipped.push(id);
                continue;
            }
            let input = &case["input"];
            let mut scaler = match input["fp16"].is_null() {
                false => LossScaler::new(&Precision::Fp16(fp16(&input["fp16"])), ZeroStage::Three),
                true => {
                    let config = json!({
                        "initial_scale_power": (input["init"].as_f64().unwrap().log2() as u32),
                        "loss_scale_window": input["window"], "min_loss_scale": input["min"],
                        // Stage 0 ignores these keys.
                        "hysteresis": 4, "consecutive_hysteresis": true,
                    });
                    LossScaler::new(&Precision::Fp16(fp16(&config)), ZeroStage::Zero)
                }
            };
            let scales = case["expect"]["scale_after_each_step"].as_array().unwrap();
            let overflows = case["input"]["overflow_at_each_step"].as_array().unwrap();
            for (step, (overflow, scale)) in overflows.iter().zip(scales).enumerate() {
                scaler.update(overflow == 1).unwrap();
                assert_eq!(scaler.scale(), scale.as_f64().unwrap(), "{id}: scale after step {step}");
            }
            if let Some(step) = case["expect"]["error_at_step"].as_u64() {
                assert_eq!(step as usize, scales.len(), "{id}");
                assert!(scaler.update(overflows[step as usize] == 1).is_err(), "{id}: step {step}");
            }
            run += 1;
        }
        assert_eq!((run, skipped.len()), (10, 1));
    }

    #[test]
    fn an_overflow_at_the_minimum_says_what_to_do() {
        let fp16 = Fp16 {
            loss_scale: 0.0,
            initial_scale_power: 0,
            loss_scale_window: 1000,
            hysteresis: 1,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        };
        let mut scaler = LossScaler::new(&Precision::Fp16(fp16), ZeroStage::Three);
        scaler.update(false).unwrap();
        insta::assert_snapshot!(scaler.update(true).unwrap_err(), @"a gradient is not finite at optimizer step 2, and the loss scale cannot fall below 1 (fp16.min_loss_scale): training is diverging; lower the learning rate, look for NaN in the data and the loss, train in bf16, or lower fp16.min_loss_scale");
    }

    #[test]
    fn at_stage_0_an_overflow_at_the_minimum_goes_on() {
        let case = json!({"initial_scale_power": 1, "loss_scale_window": 9, "hysteresis": 2,
            "consecutive_hysteresis": false, "min_loss_scale": 1});
        let mut scaler = LossScaler::new(&Precision::Fp16(fp16(&case)), ZeroStage::Zero);
        for _ in 0..5 {
            scaler.update(true).unwrap();
        }
        assert_eq!(scaler.scale(), 1.0);
    }

    #[test]
    fn a_static_scale_that_overflows_for_ever_ends_the_run() {
        let mut scaler = LossScaler::Static { scale: 1e38, overflows: 0 };
        for overflow in [vec![true; 19], vec![false], vec![true; 19]].concat() {
            scaler.update(overflow).unwrap();
        }
        insta::assert_snapshot!(scaler.update(true).unwrap_err(), @"gradients overflowed in 20 optimizer steps in a row, and the loss scale stays at 100000000000000000000000000000000000000 (fp16.loss_scale): no weight will ever change; let the scale adapt (fp16.loss_scale 0), set a smaller one, or train in bf16");
        assert_eq!(scaler.state().unwrap().scale, 1e38);
    }

    #[test]
    fn a_static_scale_ignores_overflow_and_no_scale_is_one() {
        let fp16 = Fp16 {
            loss_scale: 128.0,
            initial_scale_power: 16,
            loss_scale_window: 1,
            hysteresis: 1,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        };
        let scalers = [
            (LossScaler::new(&Precision::Fp16(fp16), ZeroStage::Three), 128.0),
            (LossScaler::new(&Precision::F32, ZeroStage::Three), 1.0),
            (LossScaler::new(&Precision::Bf16 { check_grad_overflow: true }, ZeroStage::Three), 1.0),
        ];
        for (mut scaler, scale) in scalers {
            for overflow in [true, false, false, true, true, true] {
                scaler.update(overflow).unwrap();
                assert_eq!(scaler.scale(), scale);
            }
        }
    }
}
