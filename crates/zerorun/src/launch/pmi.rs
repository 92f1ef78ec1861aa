//! Connects the MPI libraries of ranks on one or several hosts: the launcher's side of PMI version 1, MPICH's process
//! management interface.
//!
//! ```text
//!   each rank    put NAME=VALUE ... barrier_in ----> the launchers exchange the values ---> barrier_out, get NAME ...
//! ```
//!
//! A rank communicates through an inherited socket, in lines of `key=value` words. MPICH and the libraries derived from
//! it (Intel MPI, MVAPICH) support the protocol; Open MPI does not.

use candle_zero::util::lock;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};

/// Names and values that ranks have put.
pub(crate) type PmiValues = Vec<(String, String)>;

/// The maximum number of bytes of a name and of a value. The MPI library observes these limits.
const MAX_NAME_BYTES: usize = 64;
const MAX_VALUE_BYTES: usize = 4096;

/// The PMI server of the ranks of this host.
pub(crate) struct PmiServer {
    /// The name of the key-value space. Libraries name shared memory after it, so it is unique for each start.
    kvs_name: String,
    /// The number of ranks on all hosts.
    world: usize,
    /// The number of ranks on this host.
    local: usize,
    state: Mutex<PmiState>,
    /// Sends the values of this host's ranks once all these ranks are at the barrier.
    send: Box<dyn Fn(PmiValues) + Send + Sync>,
}

#[derive(Default)]
struct PmiState {
    values: BTreeMap<String, String>,
    /// The values put since the last barrier.
    fresh: PmiValues,
    /// The ranks at the barrier.
    waiting: Vec<UnixStream>,
}

impl PmiServer {
    /// Creates the server for a start whose key-value space is called `kvs_name`. `ranks` contains the number of ranks
    /// on each host; `host_index` is the index of this host. When all ranks of this host are at a barrier, `send`
    /// receives the values that they have put, and [`PmiServer::deliver`] then releases the ranks.
    pub(crate) fn new(
        kvs_name: String,
        ranks: &[usize],
        host_index: usize,
        send: impl Fn(PmiValues) + Send + Sync + 'static,
    ) -> Self {
        let world = ranks.iter().sum();
        // Each rank appears to MPICH as a separate host: the ranks of one host already share memory through
        // candle-zero, and MPICH's own shared memory would stay in /dev/shm if ranks were killed.
        let values = BTreeMap::from([("PMI_process_mapping".to_string(), format!("(vector,(0,{world},1))"))]);
        let state = Mutex::new(PmiState { values, ..PmiState::default() });
        Self { kvs_name, world, local: ranks[host_index], state, send: Box::new(send) }
    }

    /// Creates the server for a start whose ranks are all on this host.
    pub(crate) fn for_one_host(kvs_name: String, ranks: usize) -> Arc<Self> {
        Arc::new_cyclic(|server: &Weak<Self>| {
            let server = server.clone();
            let deliver =
                move |fresh| server.upgrade().into_iter().for_each(|server| server.deliver(Clone::clone(&fresh)));
            Self::new(kvs_name, &[ranks], 0, deliver)
        })
    }

    /// Returns the number of ranks on all hosts.
    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// Begins to serve a rank. Returns its socket, which a child inherits.
    ///
    /// # Errors
    /// Fails if a system call does.
    pub(crate) fn socket(self: &Arc<Self>) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs);
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
        let server = Arc::clone(self);
        let serve = move || {
            // A rank that has ended or closed the socket needs no answer.
            let _ = server.serve(ours);
        };
        std::thread::Builder::new().name("PMI of a rank".into()).spawn(serve)?;
        Ok(theirs)
    }

    fn serve(&self, mut to_rank: UnixStream) -> io::Result<()> {
        for line in BufReader::new(to_rank.try_clone()?).lines() {
            let line = line?;
            if let Some(answer) = self.answer(&line, &to_rank)? {
                to_rank.write_all(answer.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Returns the answer to a line, if it is answered immediately.
    fn answer(&self, line: &str, rank: &UnixStream) -> io::Result<Option<String>> {
        // The value comes last and may contain spaces.
        let (words, value) = line.split_once(" value=").unwrap_or((line, ""));
        let word = |key: &str| words.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        Ok(Some(match word("cmd").unwrap_or_default() {
            "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n".into(),
            "get_maxes" => {
                format!("cmd=maxes kvsname_max=256 keylen_max={MAX_NAME_BYTES} vallen_max={MAX_VALUE_BYTES}\n")
            }
            "get_appnum" => "cmd=appnum appnum=0\n".into(),
            "get_my_kvsname" => format!("cmd=my_kvsname kvsname={}\n", self.kvs_name),
            "get_universe_size" => format!("cmd=universe_size size={}\n", self.world),
            "put" => {
                let name = word("key").unwrap_or_default().to_string();
                lock(&self.state).fresh.push((name, value.to_string()));
                "cmd=put_result rc=0 msg=success\n".into()
            }
            "get" => match lock(&self.state).values.get(word("key").unwrap_or_default()) {
                Some(value) => format!("cmd=get_result rc=0 msg=success value={value}\n"),
                None => "cmd=get_result rc=-1 msg=key_not_found value=unknown\n".into(),
            },
            "barrier_in" => {
                let rank = rank.try_clone()?;
                let mut state = lock(&self.state);
                state.waiting.push(rank);
                if state.waiting.len() == self.local {
                    let fresh = std::mem::take(&mut state.fresh);
                    drop(state);
                    (self.send)(fresh);
                }
                return Ok(None);
            }
            "finalize" => "cmd=finalize_ack\n".into(),
            // `abort` precedes the rank's end, which is noticed anyway. Commands that start processes are not needed.
            _ => return Ok(None),
        }))
    }

    /// Stores the values put by the ranks of all hosts, and releases this host's ranks from the barrier.
    pub(crate) fn deliver(&self, values: PmiValues) {
        let mut state = lock(&self.state);
        state.values.extend(values);
        for mut rank in std::mem::take(&mut state.waiting) {
            // A rank that has ended no longer waits.
            let _ = rank.write_all(b"cmd=barrier_out rc=0\n");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Returns a rank's side of the socket.
    fn rank(server: &Arc<PmiServer>) -> (UnixStream, BufReader<UnixStream>) {
        let socket = UnixStream::from(server.socket().unwrap());
        (socket.try_clone().unwrap(), BufReader::new(socket))
    }

    fn ask((to, from): &mut (UnixStream, BufReader<UnixStream>), line: &str) -> String {
        writeln!(to, "{line}").unwrap();
        let mut answer = String::new();
        from.read_line(&mut answer).unwrap();
        answer.trim_end().to_string()
    }

    #[test]
    fn ranks_get_what_others_have_put_when_all_hosts_are_at_the_barrier() {
        let (sender, sent) = channel();
        let server = Arc::new(PmiServer::new("a_start".into(), &[2, 1], 0, move |values| sender.send(values).unwrap()));
        let (mut a, mut b) = (rank(&server), rank(&server));
        assert_eq!(
            ask(&mut a, "cmd=init pmi_version=1 pmi_subversion=1"),
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        );
        assert_eq!(ask(&mut a, "cmd=get_my_kvsname"), "cmd=my_kvsname kvsname=a_start");
        assert_eq!(ask(&mut a, "cmd=get_universe_size"), "cmd=universe_size size=3");
        let get = |name: &str| format!("cmd=get kvsname=a_start key={name}");
        assert_eq!(ask(&mut a, &get("PMI_process_mapping")), "cmd=get_result rc=0 msg=success value=(vector,(0,3,1))");
        assert_eq!(ask(&mut a, "cmd=put kvsname=x key=a value=some words"), "cmd=put_result rc=0 msg=success");
        writeln!(a.0, "cmd=barrier_in").unwrap();
        assert!(ask(&mut b, &get("a")).contains("rc=-1"), "before the barrier");
        writeln!(b.0, "cmd=barrier_in").unwrap();
        let fresh = sent.recv().unwrap();
        assert_eq!(fresh, [("a".to_string(), "some words".to_string())]);
        server.deliver([fresh, vec![("c".into(), "of the other host".into())]].concat());
        for (rank, name, value) in [(&mut a, "c", "of the other host"), (&mut b, "a", "some words")] {
            let mut line = String::new();
            rank.1.read_line(&mut line).unwrap();
            assert_eq!(line, "cmd=barrier_out rc=0\n");
            assert_eq!(ask(rank, &get(name)), format!("cmd=get_result rc=0 msg=success value={value}"));
        }
        assert_eq!(ask(&mut a, "cmd=finalize"), "cmd=finalize_ack");
    }
}
