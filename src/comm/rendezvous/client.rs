//! The rendezvous as run by ranks other than 0: finds rank 0, and receives the shared memory from it.

use super::messages::{self, JoinReply, JoinRequest};
use super::peer_credentials::PeerCredentials;
use super::socket::{address, system};
use crate::comm::rank_env::RankEnv;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Result};
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time between two attempts to find rank 0.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The time by which this rank's limit exceeds that of rank 0, which must give up first, because only it can name the
/// missing ranks.
const EXTRA_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the shared memory, and the connection to rank 0.
///
/// # Errors
/// Returns the errors of [`super::meet`].
pub(super) fn join(env: &RankEnv) -> Result<(Arc<SharedMemoryRegion>, UnixStream)> {
    let stream = find(env)?;
    let (rank, world) = (env.rank, env.world_size);
    let gone = || CommError::GoneBeforeStart { rank: 0 };
    if !PeerCredentials::of(&stream).map_err(system("check the socket of rank 0"))?.is_own() {
        return Err(CommError::MasterPortInUse { port: env.master_port }.into());
    }
    JoinRequest { rank, world }.send(&stream).map_err(|_| gone())?;
    stream.set_read_timeout(Some(env.timeout + EXTRA_TIMEOUT)).map_err(system("wait on the socket of rank 0"))?;
    match messages::receive_reply(&stream) {
        Ok(Some(JoinReply::Welcome(memory))) => Ok((Arc::new(SharedMemoryRegion::open(memory, world)?), stream)),
        Ok(Some(JoinReply::Rejected(why))) => Err(CommError::RendezvousCancelled { why }.into()),
        Ok(None) => Err(gone().into()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Err(CommError::Rank0Silent { rank, limit: env.timeout + EXTRA_TIMEOUT }.into())
        }
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Err(gone().into()),
        Err(error) => Err(system("receive the memory that ranks share")(error).into()),
    }
}

/// Waits until rank 0 listens, and connects to it.
fn find(env: &RankEnv) -> Result<UnixStream> {
    let (address, start) = (address(env.master_port)?, Instant::now());
    loop {
        match UnixStream::connect_addr(&address) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() != ErrorKind::ConnectionRefused => {
                return Err(system("reach rank 0")(error).into());
            }
            Err(_) if start.elapsed() < env.timeout => std::thread::sleep(RETRY_INTERVAL),
            Err(_) => {
                let (rank, port, world) = (env.rank, env.master_port, env.world_size);
                return Err(CommError::Rank0Missing { rank, world, port, limit: env.timeout }.into());
            }
        }
    }
}
