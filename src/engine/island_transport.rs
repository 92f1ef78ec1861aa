//! The ranks of an island, and the path by which its exchanges reach the other islands: a communicator, if all islands
//! are parts of one job, or a server, if each island is a separate job.

use crate::comm::Communicator;
use crate::comm::agree::{gather_u64, ranks_per_host};
use crate::config::{IslandWireDtype, LocalStepsConfig};
use crate::error::{EngineError, Error, IslandError, Result};
use crate::island_server::{EntryMode, Hello, IslandLink, LAUNCHER, PseudoGradientFormat, RunShape, SLOT};
use crate::layout::{MeshAxis, RankMesh};
use crate::notice::emit;
use crate::util::{counted, list};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// This rank's island among the others.
#[derive(Clone)]
pub(super) struct IslandRanks {
    /// The ranks of this island.
    pub island: Arc<dyn Communicator>,
    pub transport: IslandTransport,
}

/// The path by which exchanges reach the other islands.
#[derive(Clone)]
pub(super) enum IslandTransport {
    /// All islands are parts of one job.
    Communicator {
        /// The ranks at this rank's position on all islands, in the order of the islands.
        inter_island_comm: Arc<dyn Communicator>,
        job: Arc<dyn Communicator>,
    },
    /// Each island is a separate job.
    Server(Arc<IslandServerTransport>),
}

/// The path through an island server.
pub(super) struct IslandServerTransport {
    address: String,
    slots: usize,
    /// The slot to request. `None`: the slot that the environment specifies, if any.
    requested_slot: Option<usize>,
    /// The connection, once the model has been built.
    link: OnceLock<IslandLink>,
}

impl IslandRanks {
    /// Collective: divides the ranks of a job into islands. With a server, all ranks are one island. `slot` is the slot
    /// to request from the server.
    ///
    /// # Errors
    /// The ranks cannot be divided into that many islands of equal size, or, if the configuration states no number of
    /// islands, the hosts have different numbers of ranks; a failed collective.
    pub fn new(config: &LocalStepsConfig, job: &Arc<dyn Communicator>, slot: Option<usize>) -> Result<Self> {
        if let (Some(address), Some(slots)) = (&config.server, config.islands) {
            let server =
                IslandServerTransport { address: address.clone(), slots, requested_slot: slot, link: OnceLock::new() };
            return Ok(Self { island: job.clone(), transport: IslandTransport::Server(Arc::new(server)) });
        }
        let islands = match config.islands {
            Some(islands) => islands,
            None => hosts_of_equal_size(&**job)?,
        };
        let mesh = RankMesh::new(job.size(), &[(MeshAxis::Island, islands)])
            .map_err(|_| EngineError::indivisible_islands(islands, job.size()))?;
        let inter_island_comm = job.group(&mesh.groups(&[MeshAxis::Island]))?;
        let transport = IslandTransport::Communicator { inter_island_comm, job: job.clone() };
        Ok(Self { island: job.group(&mesh.groups(&[MeshAxis::Data]))?, transport })
    }

    /// Returns all ranks of the job: those of all islands or, with a server, those of this island.
    pub fn job(&self) -> &Arc<dyn Communicator> {
        match &self.transport {
            IslandTransport::Communicator { job, .. } => job,
            IslandTransport::Server(_) => &self.island,
        }
    }

    /// Returns the ranks at this rank's position on all islands, and all ranks of the job; `None` if there is a server.
    pub fn inter_island_comm(&self) -> Option<(&dyn Communicator, &Arc<dyn Communicator>)> {
        match &self.transport {
            IslandTransport::Communicator { inter_island_comm, job } => Some((&**inter_island_comm, job)),
            IslandTransport::Server(_) => None,
        }
    }

    /// Returns the server, if there is one.
    pub fn server(&self) -> Option<&IslandServerTransport> {
        match &self.transport {
            IslandTransport::Communicator { .. } => None,
            IslandTransport::Server(server) => Some(server),
        }
    }

    /// Returns the number of islands or, with a server, of slots.
    pub fn count(&self) -> usize {
        match &self.transport {
            IslandTransport::Communicator { inter_island_comm, .. } => inter_island_comm.size(),
            IslandTransport::Server(server) => server.slots,
        }
    }

    /// Returns the number of this rank's island, counted from 0. With a server, this is the island's slot, or 0 before
    /// the rank is connected.
    pub fn number(&self) -> usize {
        match &self.transport {
            IslandTransport::Communicator { inter_island_comm, .. } => inter_island_comm.rank(),
            IslandTransport::Server(server) => server.link.get().map_or(0, IslandLink::slot),
        }
    }

    /// Returns this rank's number among the ranks of all islands.
    pub fn rank(&self) -> usize {
        self.number() * self.island.size() + self.island.rank()
    }

    /// Returns the number of ranks of all islands, including those of empty slots.
    pub fn world_size(&self) -> usize {
        self.count() * self.island.size()
    }

    /// Returns the folder in which this island saves its checkpoints.
    pub fn folder(&self, dir: &Path) -> PathBuf {
        match self.number() {
            0 => dir.to_owned(),
            island => dir.join(format!("island_{island}")),
        }
    }
}

impl IslandServerTransport {
    /// Collective among the ranks of the island: connects them to the server, and waits until it has given the island a
    /// slot. `lens` are the lengths of this rank's pieces of each fragment.
    ///
    /// # Errors
    /// The server cannot be reached or refuses the island; the environment variable of the slot or the launcher is not
    /// a number; a failed collective.
    pub fn connect(
        &self,
        island: &dyn Communicator,
        config: &LocalStepsConfig,
        lens: Vec<u64>,
        fingerprint: Vec<(String, u64)>,
    ) -> Result<()> {
        /// The number that represents "no slot".
        const ANY: u64 = u64::MAX;
        let slot = match self.requested_slot {
            Some(slot) => Some(slot as u64),
            None => number_from_env(SLOT, "a slot, counted from 0")?,
        };
        let launcher = match number_from_env(LAUNCHER, "a number that zerorun sets")? {
            Some(launcher) => launcher,
            None => random(),
        };
        // All ranks use the numbers of the first rank.
        let all = gather_u64(island, &[random(), launcher, slot.unwrap_or(ANY)])?;
        let (start, launcher, slot) = (all[0][0], all[0][1], all[0][2]);
        let slot = (slot != ANY).then(|| usize::try_from(slot).unwrap_or(usize::MAX));
        let run = RunShape {
            slots: self.slots,
            ranks: island.size(),
            min_islands: config.min_islands.unwrap_or(self.slots),
            format: PseudoGradientFormat::from(config.wire),
            fingerprint,
        };
        let hello = Hello { start, launcher, slot, position: island.rank(), run, lens };
        let link = IslandLink::connect(&self.address, &hello, &|| island.failure().map(Error::from))?;
        if island.rank() == 0 {
            let action = match link.entry_mode() {
                EntryMode::Begin => "begins",
                EntryMode::Join => "waits for the next exchange of the others, to join them",
            };
            emit(&format!(
                "local_steps: this is island {} of {} at {}; it {action}",
                link.slot(),
                self.slots,
                self.address
            ));
        }
        _ = self.link.set(link);
        Ok(())
    }

    /// Returns the connection.
    ///
    /// # Errors
    /// This rank is not connected yet.
    pub fn link(&self) -> Result<&IslandLink> {
        let not_connected =
            || IslandError::Lost { address: self.address.clone(), why: "this rank is not connected".into() };
        self.link.get().ok_or_else(|| not_connected().into())
    }

    /// Decodes a mean of `len` elements.
    ///
    /// # Errors
    /// The server has sent too few or too many bytes.
    pub fn decode(&self, wire: IslandWireDtype, bytes: &[u8], len: usize) -> Result<Vec<f32>> {
        let format = PseudoGradientFormat::from(wire);
        if format.encoded_len(len as u64) != Some(bytes.len() as u64) {
            let why = format!("a mean of {} has {}", counted(len, "element"), counted(bytes.len(), "byte"));
            return Err(IslandError::NoServer { address: self.address.clone(), why }.into());
        }
        Ok(format.decode(bytes, len))
    }
}

/// Returns a random number.
pub(super) fn random() -> u64 {
    // A new hasher has random keys.
    RandomState::new().build_hasher().finish()
}

/// Reads a number from the environment.
fn number_from_env(name: &str, description: &str) -> Result<Option<u64>> {
    let Some(text) = std::env::var_os(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let text = text.to_string_lossy();
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => {
            let why = format!("{name} is {text:?}, but must be {description}; unset it, or give a whole number");
            Err(EngineError::LocalSteps { why }.into())
        }
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
