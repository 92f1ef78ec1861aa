//! Checks that all ranks start training with the same model, configuration, data and weights.

use super::config_comparison::{ContentFingerprint, CustomComponents, RankConfig};
use super::island_transport::IslandRanks;
use crate::comm::Communicator;
use crate::comm::agree::gather_u64;
use crate::config::{Config, OffloadTo};
use crate::error::{EngineError, Result, SimdLevelError};
use crate::kernels::checked_level;
use crate::optim::GroupedOptimizer;
use crate::util::{counted, fnv1a};
use crate::zero::rank_core::RankCore;
use candle_nn::Init;
use serde_json::Value;

/// Hashes and sizes of everything in an engine that must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EngineFingerprint {
    parameters: u64,
    elements: u64,
    /// A hash, like every field below.
    model: u64,
    config: u64,
    weights: u64,
    simd: u64,
    rounding: u64,
    inits: u64,
    buffers: u64,
}

impl EngineFingerprint {
    const NUMBERS: usize = 9;

    fn numbers(self) -> [u64; Self::NUMBERS] {
        let Self { parameters, elements, model, config, weights, simd, rounding, inits, buffers } = self;
        [parameters, elements, model, config, weights, simd, rounding, inits, buffers]
    }

    fn from_numbers(numbers: &[u64]) -> Self {
        match numbers[..] {
            [parameters, elements, model, config, weights, simd, rounding, inits, buffers] => {
                Self { parameters, elements, model, config, weights, simd, rounding, inits, buffers }
            }
            _ => unreachable!("all ranks give the same number of values"),
        }
    }

    /// Returns the properties that all islands must have in common, each with a name. `config` is a hash of the
    /// configuration without the keys in which islands may differ.
    fn island_properties(&self, config: u64) -> Vec<(String, u64)> {
        let Self { parameters, elements, model, weights, simd, rounding, inits, buffers, .. } = *self;
        let properties = [
            ("models", combined_hash(&[parameters, elements, model])),
            ("configurations or data", config),
            ("initial weights", combined_hash(&[weights, inits, buffers])),
            ("seeds of stochastic rounding", rounding),
            ("SIMD levels", simd),
        ];
        properties.map(|(name, hash)| (name.to_owned(), hash)).to_vec()
    }

    fn describe(&self) -> String {
        let (parameters, elements) = (counted(self.parameters, "parameter"), counted(self.elements, "element"));
        format!("{parameters} with {elements} in total, hash {:08x}", self.model as u32)
    }

    /// Returns the fingerprint without initial values, which are compared one by one if only they differ.
    fn without_initial_values(self) -> Self {
        Self { inits: 0, buffers: 0, ..self }
    }
}

/// Collective: returns an error if ranks built different models, read different configurations or `data`, start from
/// different `weights` (a hash), initializers (`inits`) or buffers, have a different optimizer, schedule or parameter
/// groups, round states differently, or compute at different SIMD levels. Otherwise, returns the properties that all
/// islands must have in common.
pub(super) fn check_same_on_all_ranks(
    (core, islands): (&RankCore, Option<&IslandRanks>),
    config: &Config,
    custom: CustomComponents,
    trainer: &GroupedOptimizer,
    weights: u64,
    inits: &[Init],
    data: &[ContentFingerprint],
) -> Result<Vec<(String, u64)>> {
    let (params, buffers) = (core.params(), core.buffers().list());
    let mut model: String = params
        .iter()
        .map(|p| format!("{} {:?} {} {} {:?};", p.name, p.shape, p.unit, p.is_trained(), p.weights))
        .collect();
    model += &format!("{:?};", core.leaves());
    model.extend(buffers.iter().map(|b| format!("{} {:?} {:?};", b.name, b.tensor.shape(), b.tensor.dtype())));
    let groups: Vec<usize> = params.iter().map(|p| p.group).collect();
    let text = format!("{} {groups:?}", configuration(config, custom, trainer, data));
    check_same_on_all_stages(core, config, custom, trainer, (weights, data))?;
    let init_hashes: Vec<u64> = inits.iter().map(|init| fnv1a(format!("{init:?}").as_bytes())).collect();
    let buffer_hashes = core.buffers().hashes()?;
    let mine = EngineFingerprint {
        parameters: params.len() as u64,
        elements: params.iter().map(|p| p.numel).sum::<usize>() as u64,
        model: fnv1a(model.as_bytes()),
        config: fnv1a(text.as_bytes()),
        weights,
        simd: fnv1a(checked_level()?.name().as_bytes()),
        rounding: rounding_of(core),
        inits: combined_hash(&init_hashes),
        buffers: combined_hash(&buffer_hashes),
    };
    let all: Vec<EngineFingerprint> = gather_u64(core.comm(), &mine.numbers())?
        .iter()
        .map(|numbers| EngineFingerprint::from_numbers(numbers))
        .collect();
    let rank = core.comm().rank();
    let Some(other) = (0..all.len()).find(|r| all[*r] != mine) else {
        if let Some((islands, comm)) = islands.and_then(|islands| Some((islands, islands.inter_island_comm()?.0))) {
            check_same_on_all_islands(islands.number(), comm, mine)?;
        }
        let text = format!("{} {groups:?}", configuration(&without_island_keys(config), custom, trainer, data));
        return Ok(mine.island_properties(fnv1a(text.as_bytes())));
    };
    if all.iter().all(|rank| rank.without_initial_values() == mine.without_initial_values()) {
        // All ranks reach this point.
        return Err(initial_values_differ(core, inits, &[init_hashes, buffer_hashes].concat())?);
    }
    let model = |f: EngineFingerprint| (f.parameters, f.elements, f.model);
    let same_models = all.iter().all(|theirs| model(*theirs) == model(mine));
    if same_models && all.iter().any(|theirs| theirs.config != all[0].config) {
        // All ranks reach this point.
        let other = (0..all.len()).find(|r| all[*r].config != mine.config).unwrap_or(other);
        let config = RankConfig::new(config, custom, trainer, &groups, data);
        return Err(config.difference_error(core.comm(), other)?);
    }
    let other =
        (0..all.len()).find(|r| all[*r].without_initial_values() != mine.without_initial_values()).unwrap_or(other);
    let theirs = all[other];
    let (rank, other) = (core.comm().in_job(rank), core.comm().in_job(other));
    Err(if model(mine) != model(theirs) {
        EngineError::ModelsDiffer { rank, other, mine: mine.describe(), theirs: theirs.describe() }.into()
    } else if mine.config != theirs.config {
        EngineError::ConfigsDiffer { rank, other, keys: "some ranks also have different models".into() }.into()
    } else if mine.weights != theirs.weights {
        EngineError::WeightsDiffer { rank, other }.into()
    } else if mine.rounding != theirs.rounding {
        EngineError::RoundingDiffers { rank, other }.into()
    } else {
        SimdLevelError::LevelsDiffer { rank, other, level: checked_level()?.name() }.into()
    })
}

/// Returns a configuration without the keys in which islands that are separate jobs may differ: the address at which
/// they reach the server, and the folders of offloaded states.
fn without_island_keys(config: &Config) -> Config {
    let mut config = config.clone();
    if let Some(local_steps) = &mut config.local_steps {
        local_steps.server = None;
    }
    if let Some(Value::Object(section)) = config.all_keys.get_mut("local_steps") {
        section.remove("server");
    }
    let zero = &mut config.zero;
    let offloads = [
        zero.offload_optimizer.as_mut().map(|offload| &mut offload.device),
        zero.offload_param.as_mut().map(|offload| &mut offload.device),
    ];
    for device in offloads.into_iter().flatten() {
        if let OffloadTo::Nvme { path } = device {
            path.clear();
        }
    }
    for section in ["offload_optimizer", "offload_param"] {
        let section = config.all_keys.get_mut("zero_optimization").and_then(|zero| zero.get_mut(section));
        if let Some(Value::Object(section)) = section {
            section.remove("nvme_path");
        }
    }
    config
}

/// Collective among all ranks of the job: returns an error if islands have different fingerprints. `mine` is the
/// fingerprint that all ranks of island `number` have in common.
fn check_same_on_all_islands(number: usize, comm: &dyn Communicator, mine: EngineFingerprint) -> Result<()> {
    let all: Vec<EngineFingerprint> =
        gather_u64(comm, &mine.numbers())?.iter().map(|numbers| EngineFingerprint::from_numbers(numbers)).collect();
    let Some(other) = (0..all.len()).find(|island| all[*island] != mine) else { return Ok(()) };
    let theirs = all[other];
    let model = |f: EngineFingerprint| (f.parameters, f.elements, f.model);
    let property = if model(mine) != model(theirs) {
        "models"
    } else if mine.config != theirs.config {
        "configurations or data"
    } else if [mine.weights, mine.inits, mine.buffers] != [theirs.weights, theirs.inits, theirs.buffers] {
        "initial weights"
    } else if mine.rounding != theirs.rounding {
        "seeds of stochastic rounding"
    } else {
        "SIMD levels"
    };
    let why = format!(
        "island {number} and island {other} have different {property}; start the same program with the same files on \
         all ranks"
    );
    Err(EngineError::LocalSteps { why }.into())
}

/// Collective among all ranks of the job: returns an error if the stages of a pipeline differ in anything but their
/// parts of the model.
fn check_same_on_all_stages(
    core: &RankCore,
    config: &Config,
    custom: CustomComponents,
    trainer: &GroupedOptimizer,
    (weights, data): (u64, &[ContentFingerprint]),
) -> Result<()> {
    let Some(position) = core.pipeline() else { return Ok(()) };
    let (text, rounding) = (configuration(config, custom, trainer, data), rounding_of(core));
    let simd = checked_level()?.name();
    let mine = [fnv1a(text.as_bytes()), position.fingerprint, weights, rounding, fnv1a(simd.as_bytes())];
    let (job, rank) = (&*position.job, position.job.rank());
    let all = gather_u64(job, &mine)?;
    // All ranks reach the same decision.
    let Some(first) = (0..mine.len()).find(|at| all.iter().any(|theirs| theirs[*at] != all[0][*at])) else {
        return Ok(());
    };
    let other = (0..all.len()).find(|rank| all[*rank][first] != mine[first]).unwrap_or(0);
    Err(match first {
        0 => return Err(RankConfig::new(config, custom, trainer, &[], data).difference_error(job, other)?),
        1 => {
            let why = format!(
                "rank {rank} and rank {other} have different models, or divide the model differently among stages; start \
                 the same program on all ranks"
            );
            EngineError::Pipeline { why }.into()
        }
        2 => EngineError::WeightsDiffer { rank, other }.into(),
        3 => EngineError::RoundingDiffers { rank, other }.into(),
        _ => SimdLevelError::LevelsDiffer { rank, other, level: simd }.into(),
    })
}

/// Returns the text of everything that is configured, apart from the group of each parameter.
fn configuration(
    config: &Config,
    custom: CustomComponents,
    trainer: &GroupedOptimizer,
    data: &[ContentFingerprint],
) -> String {
    let config = Config { notes: Vec::new(), ..config.clone() };
    format!("{config:?} {custom:?} {trainer:?} {:x}", RankConfig::data_hash(data))
}

/// Returns a hash of whether states are rounded stochastically, and with which seed.
fn rounding_of(core: &RankCore) -> u64 {
    combined_hash(&core.rounding_seed().map_or([0, 0], |seed| [1, seed]))
}

fn combined_hash(hashes: &[u64]) -> u64 {
    fnv1a(&hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<u8>>())
}

/// Collective: returns an error that names the first parameter or buffer whose `hashes` differ between ranks.
fn initial_values_differ(core: &RankCore, inits: &[Init], hashes: &[u64]) -> Result<crate::Error> {
    let all = gather_u64(core.comm(), hashes)?;
    let rank = core.comm().rank();
    let differs = |at: &usize| all.iter().any(|theirs| theirs[*at] != all[0][*at]);
    let first = (0..hashes.len()).find(differs).unwrap_or(0);
    let other = (0..all.len()).find(|r| all[*r][first] != hashes[first]).unwrap_or(0);
    let (rank, other) = (core.comm().in_job(rank), core.comm().in_job(other));
    let (subject, hint) = match inits.get(first) {
        Some(init) => (
            format!("parameter {}", core.params()[first].name),
            format!(": its initialization is {init:?} on rank {rank}"),
        ),
        None => (format!("buffer {}", core.buffers().list()[first - inits.len()].name), String::new()),
    };
    Ok(EngineError::InitialValuesDiffer { subject, rank, other, hint }.into())
}
