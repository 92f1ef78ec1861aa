//! OneCycle: in one cycle, the rate rises and falls while beta1 falls and rises; then the rate decays, and beta1 grows
//! at the rate `decay_mom_rate`.

use crate::config::OneCycleConfig;

/// The value of beta2 if `cycle_momentum` is true, whatever the optimizer's own value is.
const BETA2: f64 = 0.99;

/// The phase of the schedule at a value of the counter.
enum OneCyclePhase {
    /// The height in the cycle: 0 at its ends, 1 at its top.
    Cycle(f64),
    /// The number of steps since the end of the cycle, in units of `decay_step_size`.
    Decay(f64),
}

/// Returns the rate of a parameter group at counter `it`.
pub(super) fn lr(config: &OneCycleConfig, group: usize, it: f64) -> f64 {
    let decay_lr_rate = config.decay_lr_rate;
    let (min, max) = (config.cycle_min_lr.for_group(group), config.cycle_max_lr.for_group(group));
    match phase(config, it) {
        OneCyclePhase::Cycle(height) => min + (max - min) * height,
        OneCyclePhase::Decay(k) => min / (1.0 + decay_lr_rate * k),
    }
}

/// Returns the betas at counter `it`, unless `cycle_momentum` is false.
pub(super) fn betas(config: &OneCycleConfig, it: f64) -> Option<(f64, f64)> {
    let OneCycleConfig { cycle_min_mom: min, cycle_max_mom: max, decay_mom_rate, cycle_momentum, .. } = *config;
    let beta1 = match phase(config, it) {
        // DeepSpeed's constructor sets the minimum momentum, although the rate is at its minimum too.
        _ if it < 0.0 => min,
        OneCyclePhase::Cycle(height) => max - (max - min) * height,
        OneCyclePhase::Decay(k) => max * (1.0 + decay_mom_rate * k),
    };
    cycle_momentum.then_some((beta1, BETA2))
}

fn phase(config: &OneCycleConfig, it: f64) -> OneCyclePhase {
    let (first, second) = (config.cycle_first_step_size, config.cycle_second_step_size);
    let total = first + second;
    let done = it + 1.0;
    if it >= total {
        let steps = done - total;
        return OneCyclePhase::Decay(if config.decay_step_size == 0.0 { 0.0 } else { steps / config.decay_step_size });
    }
    let up = first / total;
    // Adding 1 and subtracting the integer part rounds the value, as in DeepSpeed.
    let turn = 1.0 + done / total;
    let x = turn - turn.floor();
    let (height, stairs, steps, size) = if x <= up {
        (x / up, config.cycle_first_stair_count, done % total, first)
    } else {
        ((x - 1.0) / (up - 1.0), config.cycle_second_stair_count, total - done, second)
    };
    OneCyclePhase::Cycle(match stairs {
        0 => height,
        // The stair is computed from the number of steps, because `height` may be slightly below the stair's edge.
        stairs => (steps * stairs as f64 / size).floor() / stairs as f64,
    })
}
