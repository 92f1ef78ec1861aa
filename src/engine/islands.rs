//! Local steps: the islands of a job, and the exchange of their changes to the weights.
//!
//! ```text
//!   island 0   step step ... step | send fragment ... | receive: outer step, publish | step ...
//!   island 1   step step ... step | send fragment ... | receive: outer step, publish | step ...
//!                   H steps           delay steps
//! ```
//!
//! An island is a group of consecutive ranks that train as one data-parallel job, at any ZeRO stage. A rank
//! exchanges its pieces of the parameters with the ranks at the same position on the other islands: it sends its
//! change, weighted by the samples of its island, and receives the sum. `island_transport.rs` implements the path of
//! these messages: a communicator of all islands, or a server that islands join and leave.

use super::island_transport::{IslandRanks, IslandServerTransport, IslandTransport};
use crate::checkpoint::IslandProgress;
use crate::comm::{CollectiveKind, CollectiveKindReport, CommReport, Communicator, Pending, WireFormat};
use crate::config::{LocalStepsConfig, OptimizerConfig, SgdConfig};
use crate::error::{EngineError, Error, Result};
use crate::island_server::{PseudoGradientFormat, RoundKey};
use crate::layout::{FragmentSchedule, exchanged_len, fragments_of};
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
use serde_json::Value;
use std::collections::VecDeque;

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
    /// The number of `synchronize` calls since the last step.
    calls: u64,
    /// The islands that took part in the last exchange, if there is a server.
    members: Vec<usize>,
    /// The donation that this island must make to islands that join.
    donation: Option<u64>,
    /// The traffic with a server.
    traffic: CollectiveKindReport,
    /// The client state that was saved, loaded or received last.
    pub client_state: Value,
    /// The step at which this island joined others.
    pub joined_at: Option<u64>,
}

/// A fragment that has been sent but has not yet taken effect.
struct FragmentExchange {
    fragment: usize,
    /// The number of elements, without padding.
    len: usize,
    progress: ExchangeProgress,
    memory: MemoryLedgerEntry,
    /// The donation that this island must make when the exchange takes effect.
    donation: Option<u64>,
}

enum ExchangeProgress {
    /// The server has the change.
    Sent(RoundKey),
    /// The parts of the sum are being computed: each rank receives the sum of its own part.
    Summing(Pending<Flat>),
    /// All parts of the sum are being gathered.
    Gathering(Pending<Flat>),
    /// The sum is stored among the optimizer states of this rank.
    Stored,
}

/// The result of an exchange.
enum ExchangeResult {
    /// The mean change of this rank's pieces.
    Mean(Vec<f32>),
    /// The mean change is already among the optimizer states.
    Stored,
    /// No island trained between the previous exchange and this one.
    Nothing,
}

impl Islands {
    /// Begins local steps with the weights of `core`, which are the same on all islands. With a server, this rank
    /// connects to it; `fingerprint` contains the properties that all islands must share.
    pub fn begin(
        ranks: IslandRanks,
        config: &LocalStepsConfig,
        core: &RankCore,
        fingerprint: Vec<(String, u64)>,
    ) -> Result<Self> {
        let schedule = FragmentSchedule::new(config.steps, config.fragments, config.fragment_delay);
        let (params, elements): (Vec<_>, Vec<_>) = core.trained_params().map(|(id, param)| (id, param.numel)).unzip();
        if schedule.fragments() > params.len() {
            let why = format!(
                "local_steps.fragments is {}, but the model has {}; use at most that many fragments",
                config.fragments,
                counted(params.len(), "trained parameter")
            );
            return Err(EngineError::LocalSteps { why }.into());
        }
        let mut fragments = vec![Vec::new(); schedule.fragments()];
        let assignment = fragments_of(&elements, fragments.len());
        params.into_iter().zip(assignment).for_each(|(param, fragment)| fragments[fragment].push(param));
        core.begin_local_steps()?;
        if let IslandTransport::Server(server) = &ranks.transport {
            let lens = fragments.iter().map(|params| core.pieces_len(params, core.comm().rank()) as u64);
            server.connect(&*ranks.island, config, lens.collect(), fingerprint)?;
        }
        Ok(Self {
            ranks,
            config: config.clone(),
            schedule,
            outer: outer_optimizer(config),
            samples: vec![0; fragments.len()],
            fragments,
            in_flight: VecDeque::new(),
            calls: 0,
            members: Vec::new(),
            donation: None,
            traffic: CollectiveKindReport::default(),
            client_state: Value::Null,
            joined_at: None,
        })
    }

    /// Collective among all ranks of the job if a fragment is sent or arrives after this step: counts the samples of
    /// step `step`, sends the fragment whose turn it is, and takes the outer step on the one that arrives. Returns
    /// whether weights have changed.
    pub fn after_step(&mut self, core: &RankCore, step: u64, samples: u64) -> Result<bool> {
        self.samples.iter_mut().for_each(|sum| *sum = sum.saturating_add(samples));
        self.calls = 0;
        self.advance(step)?;
        let sent = self.schedule.sent_after(step);
        let arriving = self.schedule.arrives_after(step);
        if sent.is_none() && arriving.is_none() {
            return Ok(false);
        }
        let _span = timeline::span(timeline::EventCategory::Optimizer, "exchange between islands");
        // A delayed update would overwrite the result.
        let settled = core.has_pending_update();
        core.settle()?;
        if let Some(fragment) = sent {
            self.send(core, fragment, step)?;
        }
        let received = match arriving {
            Some(fragment) => self.receive(core, fragment, self.config.fragment_alpha as f32)?,
            None => false,
        };
        Ok(settled || received)
    }

    /// Ends all exchanges: those in flight take effect now, and then every fragment is exchanged. Afterwards all
    /// islands have the same weights. `step` is the last step.
    pub fn synchronize(&mut self, core: &RankCore, step: u64) -> Result<()> {
        self.calls += 1;
        let alpha = self.config.fragment_alpha as f32;
        while let Some(fragment) = self.in_flight.front().map(|exchange| exchange.fragment) {
            self.receive(core, fragment, alpha)?;
        }
        for fragment in 0..self.fragments.len() {
            self.send(core, fragment, step)?;
            if !self.receive(core, fragment, 0.0)? {
                // No island has trained, but islands may have kept a share of their own weights.
                core.take_outer_weights(&self.fragments[fragment])?;
            }
        }
        Ok(())
    }

    /// Sends this island's change in a fragment. Without a server, it is sent only if any island has trained since the
    /// last exchange.
    fn send(&mut self, core: &RankCore, fragment: usize, step: u64) -> Result<()> {
        let inter_island_comm = match &self.ranks.transport {
            IslandTransport::Communicator { inter_island_comm, .. } => inter_island_comm.clone(),
            IslandTransport::Server(server) => {
                let server = server.clone();
                return self.send_to_server(&server, core, fragment, step);
            }
        };
        let own_samples = std::mem::take(&mut self.samples[fragment]) as f64;
        let all_samples: f64 = inter_island_comm.gather_f64(vec![own_samples]).wait()?.iter().flatten().sum();
        if all_samples == 0.0 {
            // Nothing has changed, and without a change, the momentum must not move the weights.
            return Ok(());
        }
        let weight = own_samples / all_samples;
        let (dtype, wire) = encoding(self.config.wire);
        let len = core.pieces_len(&self.fragments[fragment], core.comm().rank());
        let padded = exchanged_len(len, inter_island_comm.size(), wire.alignment());
        let mut memory = core.hold_exchange(padded * DType::F32.size_in_bytes());
        let mut change = core.change_since_exchange(&self.fragments[fragment], weight as f32, padded)?;
        change.resize(padded, 0.0);
        let sent = Flat::from_f32(change, dtype);
        memory.resize(sent.capacity_in_bytes());
        let sum = inter_island_comm.reduce_scatter_as(wire, sent, tag(fragment));
        let progress = ExchangeProgress::Summing(sum);
        self.in_flight.push_back(FragmentExchange { fragment, len, progress, memory, donation: None });
        Ok(())
    }

    /// Sends this island's change in a fragment to the server. The server weights the changes once it has all of them.
    fn send_to_server(
        &mut self,
        server: &IslandServerTransport,
        core: &RankCore,
        fragment: usize,
        step: u64,
    ) -> Result<()> {
        let samples = std::mem::take(&mut self.samples[fragment]);
        let (params, format) = (&self.fragments[fragment], PseudoGradientFormat::from(self.config.wire));
        let len = core.pieces_len(params, core.comm().rank());
        let bytes = format.encoded_len(len as u64).and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let mut memory = core.hold_exchange(len * DType::F32.size_in_bytes() + bytes);
        let weights = core.outer_weights_hash(params)?;
        let change = format.encode(core.change_since_exchange(params, 1.0, len)?);
        memory.resize(bytes);
        let key = RoundKey { step, call: self.calls, fragment: fragment as u64 };
        server.link()?.send_change(key, samples, weights, change);
        let progress = ExchangeProgress::Sent(key);
        self.in_flight.push_back(FragmentExchange { fragment, len, progress, memory, donation: None });
        Ok(())
    }

    /// Begins to gather the sums of a fragment that is halfway through its delay.
    fn advance(&mut self, step: u64) -> Result<()> {
        let (schedule, half) = (self.schedule, self.config.fragment_delay.div_ceil(2));
        let Some(due) = step.checked_sub(half).and_then(|sent| schedule.sent_after(sent)) else { return Ok(()) };
        let IslandTransport::Communicator { inter_island_comm, .. } = &self.ranks.transport else { return Ok(()) };
        match self.in_flight.iter_mut().find(|exchange| exchange.fragment == due) {
            Some(exchange) => exchange.gather(&**inter_island_comm, encoding(self.config.wire).1),
            None => Ok(()),
        }
    }

    /// Waits for a fragment that was sent, and takes the outer step on it. `alpha` is the share of its own weights that
    /// an island keeps. Returns whether weights have changed.
    fn receive(&mut self, core: &RankCore, fragment: usize, alpha: f32) -> Result<bool> {
        // A run that has just begun, or resumed, may not have sent it.
        let Some(index) = self.in_flight.iter().position(|exchange| exchange.fragment == fragment) else {
            return Ok(false);
        };
        let Some(mut exchange) = self.in_flight.remove(index) else { return Ok(false) };
        let result = self.result(&mut exchange)?;
        self.donation = self.donation.or(exchange.donation);
        let change = match result {
            ExchangeResult::Mean(mean) => MeanChange::Received(mean),
            ExchangeResult::Stored => MeanChange::Stored,
            ExchangeResult::Nothing => return Ok(false),
        };
        core.outer_step(&self.fragments[fragment], change, &*self.outer, alpha)?;
        Ok(true)
    }

    /// Waits for the result of an exchange. Afterwards the exchange counts as stored.
    fn result(&mut self, exchange: &mut FragmentExchange) -> Result<ExchangeResult> {
        match &self.ranks.transport {
            IslandTransport::Communicator { inter_island_comm, .. } => {
                exchange.sum(&**inter_island_comm, encoding(self.config.wire).1)
            }
            IslandTransport::Server(server) => {
                let server = server.clone();
                self.mean_of_server(&server, exchange)
            }
        }
    }

    fn mean_of_server(
        &mut self,
        server: &IslandServerTransport,
        exchange: &mut FragmentExchange,
    ) -> Result<ExchangeResult> {
        let ExchangeProgress::Sent(key) = exchange.progress else { return Ok(ExchangeResult::Stored) };
        let island = self.ranks.island.clone();
        let mean = server.link()?.mean(key, &|| island.failure().map(Error::from))?;
        exchange.progress = ExchangeProgress::Stored;
        exchange.donation = mean.donation;
        if island.rank() == 0 && !self.members.is_empty() && self.members != mean.members {
            let text = |members: &[usize]| list(&members.iter().map(usize::to_string).collect::<Vec<_>>());
            let (current, previous) = (text(&mean.members), text(&self.members));
            emit(&format!(
                "local_steps: islands in the exchange after step {}: {current}; in the exchange before it: {previous}",
                key.step
            ));
        }
        self.members = mean.members;
        if mean.samples == 0 {
            return Ok(ExchangeResult::Nothing);
        }
        let (f32_bytes, bytes) = (exchange.len * DType::F32.size_in_bytes(), mean.bytes.len());
        self.traffic.calls += 1;
        self.traffic.elements += exchange.len as u64;
        self.traffic.wire_bytes += bytes as u64;
        self.traffic.exact_bytes += f32_bytes as u64;
        self.traffic.between_hosts_bytes += bytes as u64;
        exchange.memory.resize(f32_bytes + bytes);
        let mean_change = server.decode(self.config.wire, &mean.bytes, exchange.len)?;
        drop(mean.bytes);
        exchange.memory.resize(f32_bytes);
        Ok(ExchangeResult::Mean(mean_change))
    }

    /// Collective among all ranks that exchange with each other: waits for the fragments in flight and stores their
    /// sums among the optimizer states, so that checkpoints contain them. The sums take effect when they are due.
    pub fn store_exchanges(&mut self, core: &RankCore) -> Result<()> {
        for mut exchange in std::mem::take(&mut self.in_flight) {
            match self.result(&mut exchange)? {
                ExchangeResult::Mean(sum) => {
                    core.store_change(&self.fragments[exchange.fragment], sum)?;
                    exchange.memory.resize(0);
                }
                ExchangeResult::Stored => {}
                ExchangeResult::Nothing => {
                    self.donation = self.donation.or(exchange.donation);
                    continue;
                }
            }
            self.in_flight.push_back(exchange);
        }
        Ok(())
    }

    /// Takes the donation that this island must make.
    pub fn take_donation(&mut self) -> Option<u64> {
        self.donation.take()
    }

    /// Returns this rank's traffic with other islands so far.
    pub fn report(&self) -> CommReport {
        match &self.ranks.transport {
            IslandTransport::Communicator { inter_island_comm, .. } => inter_island_comm.report(),
            IslandTransport::Server(_) => {
                let mut report = CommReport::default();
                if self.traffic.calls > 0 {
                    report.kinds.insert(CollectiveKind::AllReduce, self.traffic);
                }
                report
            }
        }
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

    /// Continues with the state of a donor, whose progress is `progress`. This island has not trained yet.
    pub fn join(&mut self, core: &RankCore, progress: &IslandProgress) {
        self.resume(core, progress);
        self.samples.fill(0);
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
                    "local_steps: the checkpoint was saved with different values of steps, fragments or \
                     fragment_delay; exchanges that had begun are dropped",
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
    fn stored(fragment: usize, memory: MemoryLedgerEntry) -> Self {
        Self { fragment, len: 0, progress: ExchangeProgress::Stored, memory, donation: None }
    }

    /// Begins the gather of the sums, if they are not being gathered yet.
    fn gather(&mut self, inter_island_comm: &dyn Communicator, wire: WireFormat) -> Result<()> {
        self.progress = match std::mem::replace(&mut self.progress, ExchangeProgress::Stored) {
            ExchangeProgress::Summing(sum) => {
                ExchangeProgress::Gathering(inter_island_comm.all_gather_as(wire, sum.wait()?, tag(self.fragment)))
            }
            other => other,
        };
        Ok(())
    }

    /// Waits for the sum of all islands, unless it is already stored among the optimizer states. Afterwards the
    /// exchange counts as stored.
    fn sum(&mut self, inter_island_comm: &dyn Communicator, wire: WireFormat) -> Result<ExchangeResult> {
        self.gather(inter_island_comm, wire)?;
        let ExchangeProgress::Gathering(pending) = std::mem::replace(&mut self.progress, ExchangeProgress::Stored)
        else {
            return Ok(ExchangeResult::Stored);
        };
        let mut sum = pending.wait()?;
        sum.truncate(self.len);
        Ok(ExchangeResult::Mean(match sum {
            Flat::F32(values) => values,
            sum => {
                self.memory.resize(sum.capacity_in_bytes() + self.len * DType::F32.size_in_bytes());
                let mut values = vec![0.0; self.len];
                FlatMut::F32(&mut values).copy_cast(sum.as_ref());
                drop(sum);
                self.memory.resize(self.len * DType::F32.size_in_bytes());
                values
            }
        }))
    }
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
