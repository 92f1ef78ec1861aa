//! Local steps: the islands of a job, and the exchange of their changes to the weights.
//!
//! ```text
//!   island 0   step step ... step | send fragment ... | receive: outer step, publish | step ...
//!   island 1   step step ... step | send fragment ... | receive: outer step, publish | step ...
//!                   H steps           delay steps
//! ```
//!
//! An island is a group of consecutive ranks that train as one data-parallel job, under any ZeRO stage. A rank exchanges
//! its pieces of the parameters with the ranks at the same position on the other islands: it sends its change, weighted
//! by the samples of its island, and receives the sum.

use crate::checkpoint::IslandProgress;
use crate::comm::agree::ranks_per_host;
use crate::comm::{Communicator, Pending, WireFormat};
use crate::config::{LocalStepsConfig, OptimizerConfig, SgdConfig};
use crate::error::{EngineError, Result};
use crate::layout::{FragmentSchedule, MeshAxis, RankMesh, exchanged_len, fragments_of};
use crate::memory::MemoryLedgerEntry;
use crate::notice::emit;
use crate::optim::{self, Optimizer};
use crate::param::ParamId;
use crate::precision::{Flat, FlatMut};
use crate::timeline;
use crate::util::{counted, fnv1a, list};
use crate::zero::rank_core::RankCore;
use crate::zero::step::outer_step::{MeanChange, encoding};
use candle_core::DType;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// This rank's island among those of the job.
#[derive(Clone)]
pub(super) struct IslandRanks {
    /// The ranks of this island.
    pub island: Arc<dyn Communicator>,
    /// The ranks at this rank's position on all islands, in the order of the islands.
    across: Arc<dyn Communicator>,
    job: Arc<dyn Communicator>,
}

impl IslandRanks {
    /// Collective: divides the ranks of a job into islands.
    ///
    /// # Errors
    /// The ranks cannot be divided into that many islands of equal size, or hosts have different numbers of ranks.
    pub fn new(config: &LocalStepsConfig, job: &Arc<dyn Communicator>) -> Result<Self> {
        let islands = match config.islands {
            Some(islands) => islands,
            None => hosts_of_equal_size(&**job)?,
        };
        let mesh = RankMesh::new(job.size(), &[(MeshAxis::Island, islands)])
            .map_err(|_| EngineError::indivisible_islands(islands, job.size()))?;
        Ok(Self {
            island: job.group(&mesh.groups(&[MeshAxis::Data]))?,
            across: job.group(&mesh.groups(&[MeshAxis::Island]))?,
            job: job.clone(),
        })
    }

    /// Returns all ranks of the job.
    pub fn job(&self) -> &Arc<dyn Communicator> {
        &self.job
    }

    /// Returns the ranks at this rank's position on all islands.
    pub fn across(&self) -> &dyn Communicator {
        &*self.across
    }

    /// Returns the number of islands.
    pub fn count(&self) -> usize {
        self.across.size()
    }

    /// Returns the number of this rank's island.
    pub fn number(&self) -> usize {
        self.across.rank()
    }

    /// Returns the folder in which this island saves its checkpoints.
    pub fn folder(&self, dir: &Path) -> PathBuf {
        match self.number() {
            0 => dir.to_owned(),
            island => dir.join(format!("island_{island}")),
        }
    }
}

/// The exchanges of this rank's island with the others.
pub(super) struct Islands {
    pub ranks: IslandRanks,
    config: LocalStepsConfig,
    schedule: FragmentSchedule,
    outer: Box<dyn Optimizer>,
    /// The parameters of each fragment.
    fragments: Vec<Vec<ParamId>>,
    /// The samples of this island since the last exchange of each fragment.
    samples: Vec<u64>,
    in_flight: VecDeque<FragmentExchange>,
}

/// A fragment that has been sent but has not yet taken effect.
struct FragmentExchange {
    fragment: usize,
    /// The number of elements, without padding.
    len: usize,
    progress: ExchangeProgress,
    held: MemoryLedgerEntry,
}

enum ExchangeProgress {
    /// Each rank receives the sum of its part.
    Summing(Pending<Flat>),
    /// All parts of the sum are gathered.
    Gathering(Pending<Flat>),
    /// The sum is stored among the optimizer states of this rank.
    Stored,
}

impl Islands {
    /// Begins local steps with the weights of `core`, which are the same on all islands.
    pub fn begin(ranks: IslandRanks, config: &LocalStepsConfig, core: &RankCore) -> Result<Self> {
        let schedule = FragmentSchedule::new(config.steps, config.fragments, config.fragment_delay);
        let (params, elements): (Vec<_>, Vec<_>) = core.trained_params().map(|(id, param)| (id, param.numel)).unzip();
        if schedule.fragments() > params.len() {
            let why = format!(
                "local_steps.fragments is {}, but the model has {}; use at most as many fragments",
                config.fragments,
                counted(params.len(), "trained parameter")
            );
            return Err(EngineError::LocalSteps { why }.into());
        }
        let mut fragments = vec![Vec::new(); schedule.fragments()];
        let of = fragments_of(&elements, fragments.len());
        params.into_iter().zip(of).for_each(|(param, fragment)| fragments[fragment].push(param));
        core.begin_local_steps()?;
        Ok(Self {
            ranks,
            config: *config,
            schedule,
            outer: outer_optimizer(config),
            samples: vec![0; fragments.len()],
            fragments,
            in_flight: VecDeque::new(),
        })
    }

    /// Collective among all ranks of the job if a fragment is sent or arrives after this step: counts the samples of step
    /// `step`, sends the fragment whose turn it is, and takes the outer step on the one that arrives. Returns whether
    /// weights have changed.
    pub fn after_step(&mut self, core: &RankCore, step: u64, samples: u64) -> Result<bool> {
        self.samples.iter_mut().for_each(|sum| *sum = sum.saturating_add(samples));
        self.advance(step)?;
        let sent = self.schedule.sent_after(step);
        let arriving = self.schedule.arrives_after(step);
        if sent.is_none() && arriving.is_none() {
            return Ok(false);
        }
        let _span = timeline::span(timeline::EventCategory::Optimizer, "exchange between islands");
        // A delayed update would overwrite the result.
        let settled = core.is_behind();
        core.settle()?;
        if let Some(fragment) = sent {
            self.send(core, fragment)?;
        }
        let received = match arriving {
            Some(fragment) => self.receive(core, fragment, self.config.fragment_alpha as f32)?,
            None => false,
        };
        Ok(settled || received)
    }

    /// Ends all exchanges: those in flight take effect now, and then every fragment is exchanged. Afterwards all islands
    /// have the same weights.
    pub fn synchronize(&mut self, core: &RankCore) -> Result<()> {
        let alpha = self.config.fragment_alpha as f32;
        while let Some(fragment) = self.in_flight.front().map(|exchange| exchange.fragment) {
            self.receive(core, fragment, alpha)?;
        }
        for fragment in 0..self.fragments.len() {
            self.send(core, fragment)?;
            if !self.receive(core, fragment, 0.0)? {
                // No island has trained, but islands may have kept a share of their own weights.
                core.take_outer_weights(&self.fragments[fragment])?;
            }
        }
        Ok(())
    }

    /// Sends this island's change of a fragment, if any island has trained since the last exchange.
    fn send(&mut self, core: &RankCore, fragment: usize) -> Result<()> {
        let across = &self.ranks.across;
        let own = std::mem::take(&mut self.samples[fragment]) as f64;
        let all: f64 = across.gather_f64(vec![own]).wait()?.iter().flatten().sum();
        if all == 0.0 {
            // Nothing has changed, and the momentum alone must not change weights.
            return Ok(());
        }
        let weight = own / all;
        let (dtype, wire) = encoding(self.config.wire);
        let len = core.pieces_len(&self.fragments[fragment], core.comm().rank());
        let padded = exchanged_len(len, across.size(), wire.alignment());
        let mut held = core.hold_exchange(padded * DType::F32.size_in_bytes());
        let mut change = core.change_since_exchange(&self.fragments[fragment], weight as f32, padded)?;
        change.resize(padded, 0.0);
        let sent = Flat::from_f32(change, dtype);
        held.resize(sent.capacity_in_bytes());
        let sum = across.reduce_scatter_as(wire, sent, tag(fragment));
        self.in_flight.push_back(FragmentExchange { fragment, len, progress: ExchangeProgress::Summing(sum), held });
        Ok(())
    }

    /// Begins to gather the sums of a fragment that is halfway through its delay.
    fn advance(&mut self, step: u64) -> Result<()> {
        let (schedule, half) = (self.schedule, self.config.fragment_delay.div_ceil(2));
        let Some(due) = step.checked_sub(half).and_then(|sent| schedule.sent_after(sent)) else { return Ok(()) };
        let (across, wire) = (self.ranks.across.clone(), encoding(self.config.wire).1);
        match self.in_flight.iter_mut().find(|exchange| exchange.fragment == due) {
            Some(exchange) => exchange.gather(&*across, wire),
            None => Ok(()),
        }
    }

    /// Waits for a fragment that was sent, and takes the outer step on it. `alpha` is the share of its own weights that an
    /// island keeps.
    fn receive(&mut self, core: &RankCore, fragment: usize, alpha: f32) -> Result<bool> {
        // A run that has just begun, or resumed, may not have sent it.
        let Some(at) = self.in_flight.iter().position(|exchange| exchange.fragment == fragment) else {
            return Ok(false);
        };
        let Some(mut exchange) = self.in_flight.remove(at) else { return Ok(false) };
        let change = match exchange.sum(&*self.ranks.across, encoding(self.config.wire).1)? {
            Some(own) => MeanChange::Received(own),
            None => MeanChange::Stored,
        };
        core.outer_step(&self.fragments[fragment], change, &*self.outer, alpha)?;
        Ok(true)
    }

    /// Collective among all ranks of the job: waits for the fragments in flight and stores their sums among the optimizer
    /// states, so that checkpoints contain them. The sums take effect when they are due.
    pub fn store_exchanges(&mut self, core: &RankCore) -> Result<()> {
        for exchange in &mut self.in_flight {
            if let Some(sum) = exchange.sum(&*self.ranks.across, encoding(self.config.wire).1)? {
                core.store_change(&self.fragments[exchange.fragment], sum)?;
                exchange.held.resize(0);
            }
        }
        Ok(())
    }

    /// Begins with weights that are the same on all islands.
    pub fn begin_anew(&mut self) {
        self.samples.fill(0);
        self.in_flight.clear();
    }

    /// Returns the information that a checkpoint stores about this island. `save` identifies the save.
    pub fn progress(&self, save: u64) -> IslandProgress {
        IslandProgress {
            islands: self.ranks.count(),
            save,
            schedule: self.schedule_numbers(),
            samples: self.samples.clone(),
            in_flight: self.in_flight.iter().map(|exchange| exchange.fragment).collect(),
        }
    }

    fn schedule_numbers(&self) -> [u64; 3] {
        [self.config.steps, self.config.fragments, self.config.fragment_delay]
    }

    /// Continues a run that this island has saved. The sums of fragments in flight are among the optimizer states. With
    /// a different schedule, they are dropped, and the samples are counted anew.
    pub fn resume(&mut self, core: &RankCore, saved: &IslandProgress) {
        self.begin_anew();
        if saved.schedule != self.schedule_numbers() || saved.samples.len() != self.samples.len() {
            if self.ranks.job().rank() == 0 {
                emit(
                    "local_steps: the checkpoint was saved with other values of steps, fragments or fragment_delay; \
                     exchanges that had begun are dropped",
                );
            }
            return;
        }
        self.samples.copy_from_slice(&saved.samples);
        // Without a delay, nothing is in flight between two steps.
        let exists = |fragment: &&usize| **fragment < self.fragments.len() && self.config.fragment_delay > 0;
        let in_flight = saved.in_flight.iter().filter(exists);
        self.in_flight = in_flight.map(|fragment| FragmentExchange::stored(*fragment, core.hold_exchange(0))).collect();
    }
}

impl FragmentExchange {
    fn stored(fragment: usize, held: MemoryLedgerEntry) -> Self {
        Self { fragment, len: 0, progress: ExchangeProgress::Stored, held }
    }

    /// Begins the gather of the sums, if they are not being gathered yet.
    fn gather(&mut self, across: &dyn Communicator, wire: WireFormat) -> Result<()> {
        self.progress = match std::mem::replace(&mut self.progress, ExchangeProgress::Stored) {
            ExchangeProgress::Summing(sum) => {
                ExchangeProgress::Gathering(across.all_gather_as(wire, sum.wait()?, tag(self.fragment)))
            }
            other => other,
        };
        Ok(())
    }

    /// Waits for the sum of all islands and returns it, or `None` if it is already stored among the optimizer states.
    /// Afterwards the exchange counts as stored.
    fn sum(&mut self, across: &dyn Communicator, wire: WireFormat) -> Result<Option<Vec<f32>>> {
        self.gather(across, wire)?;
        let ExchangeProgress::Gathering(pending) = std::mem::replace(&mut self.progress, ExchangeProgress::Stored)
        else {
            return Ok(None);
        };
        let mut sum = pending.wait()?;
        sum.truncate(self.len);
        Ok(Some(match sum {
            Flat::F32(own) => own,
            sum => {
                self.held.resize(sum.capacity_in_bytes() + self.len * DType::F32.size_in_bytes());
                let mut own = vec![0.0; self.len];
                FlatMut::F32(&mut own).copy_cast(sum.as_ref());
                drop(sum);
                self.held.resize(self.len * DType::F32.size_in_bytes());
                own
            }
        }))
    }
}

/// Collective: returns the number of hosts, or an error if they have different numbers of ranks.
fn hosts_of_equal_size(job: &dyn Communicator) -> Result<usize> {
    let hosts = ranks_per_host(job)?;
    if hosts.iter().any(|ranks| *ranks != hosts[0]) {
        let ranks: Vec<String> = hosts.iter().map(usize::to_string).collect();
        let why = format!(
            "local_steps.islands is \"auto\", one island per host, but the hosts have {} ranks; start the same \
             number on each host, or give a number of islands",
            list(&ranks)
        );
        return Err(EngineError::LocalSteps { why }.into());
    }
    Ok(hosts.len())
}

/// Returns the outer optimizer.
fn outer_optimizer(config: &LocalStepsConfig) -> Box<dyn Optimizer> {
    let (lr, momentum) = (config.outer_lr, config.outer_momentum);
    // Nesterov's rule looks ahead along the momentum, so it requires momentum.
    let nesterov = config.nesterov && momentum > 0.0;
    optim::from_config(&OptimizerConfig::Sgd(SgdConfig { lr, momentum, dampening: 0.0, weight_decay: 0.0, nesterov }))
}

/// Returns the identity of a fragment's exchange, which is compared between islands.
fn tag(fragment: usize) -> u64 {
    fnv1a(format!("fragment {fragment}").as_bytes())
}
