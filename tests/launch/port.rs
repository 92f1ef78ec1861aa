//! The port at which the launchers of several hosts meet: which hosts are admitted, where the port is open, and what
//! strangers can do there.

use crate::nodes::{ARGS, host_folder, launcher_in, normalized_stderr, wait_with_output};
use crate::support::processes::{
    free_port, launcher, program, send, start, stderr, stdout, wait_up_to, zerorun, zerorun_within,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECRET: &str = "correct horse battery staple";

/// Connects to the first launcher's port, once it is open.
fn reach(port: u16) -> TcpStream {
    wait_up_to(Duration::from_secs(60), "the first launcher", || TcpStream::connect(("127.0.0.1", port)).ok())
}

/// Returns the exit codes and the messages of two launchers with these variables: those of the first, which gets a
/// SIGTERM if the second fails, and those of the second.
fn two_launchers(first: &[(&str, &str)], second: &[(&str, &str)]) -> [(Option<i32>, String); 2] {
    let (folder, port) = (host_folder(), free_port());
    let mut launcher = launcher_in(folder.path(), port, "--nnodes 2 --node_rank 0", ARGS);
    let first = start(launcher.envs(first.iter().copied()));
    drop(reach(port));
    let mut launcher = launcher_in(folder.path(), port, "--nnodes 2 --node_rank 1", ARGS);
    let second = launcher.envs(second.iter().copied()).output().unwrap();
    // If the second launcher succeeded, the job has already ended.
    if !second.status.success() {
        send(Signal::TERM, &first);
    }
    [wait_with_output(first), second].map(|output| {
        let is_relevant = |line: &&str| !line.starts_with("zerorun: stopped by");
        (
            output.status.code(),
            normalized_stderr(&output, port).lines().filter(is_relevant).collect::<Vec<_>>().join("\n"),
        )
    })
}

#[test]
fn hosts_with_one_secret_meet_and_others_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let [ours, file] = [("CANDLE_ZERO_SECRET", SECRET), ("CANDLE_ZERO_SECRET_FILE", file.to_str().unwrap())];
    // The program sleeps for five seconds and succeeds.
    let [first, second] = two_launchers(&[ours], &[file]);
    assert_eq!([first, second], [(Some(0), String::new()), (Some(0), String::new())]);
    let [first, second] = two_launchers(&[ours], &[]);
    assert_eq!(second.0, Some(2));
    insta::assert_snapshot!(first.1, @"zerorun: host NAME (127.0.0.1) was refused: the first host has a secret but the other has none; set CANDLE_ZERO_SECRET to the same value on every host");
    insta::assert_snapshot!(second.1, @"zerorun: the first host refused this one: the first host has a secret but the other has none; set CANDLE_ZERO_SECRET to the same value on every host");
    let [first, second] = two_launchers(&[], &[ours]);
    assert_eq!(second.0, Some(2));
    insta::assert_snapshot!(first.1, @"zerorun: host NAME (127.0.0.1) was refused: the other host has a secret but the first has none; set CANDLE_ZERO_SECRET to the same value on every host, or on none");
    insta::assert_snapshot!(second.1, @"zerorun: the first host refused this one: the other host has a secret but the first has none; set CANDLE_ZERO_SECRET to the same value on every host, or on none");
    let [first, second] = two_launchers(&[ours], &[("CANDLE_ZERO_SECRET", "correct horse battery stable")]);
    assert_eq!(second.0, Some(2));
    insta::assert_snapshot!(first.1, @"zerorun: host NAME (127.0.0.1) was refused: its secret differs from the first host's; set CANDLE_ZERO_SECRET to the same value on every host");
    insta::assert_snapshot!(second.1, @"zerorun: the first host refused this one: its secret differs from the first host's; set CANDLE_ZERO_SECRET to the same value on every host");
}

#[test]
fn a_secret_that_cannot_be_one_is_refused_before_anything_starts() {
    let folder = host_folder();
    let message = |variables: &[(&str, &str)]| {
        let mut launcher = launcher_in(folder.path(), free_port(), "--nnodes 2 --node_rank 0", ARGS);
        let output = launcher.envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output).trim_end().to_string()
    };
    insta::assert_snapshot!(message(&[("CANDLE_ZERO_SECRET", "hunter2")]), @"zerorun: CANDLE_ZERO_SECRET cannot be used as the secret of the hosts: it is 7 bytes long; give one line of 16 to 4096 bytes that no one can guess, such as the output of `openssl rand -hex 32`");
    insta::assert_snapshot!(message(&[("CANDLE_ZERO_SECRET", SECRET), ("CANDLE_ZERO_SECRET_FILE", "x")]), @"zerorun: CANDLE_ZERO_SECRET cannot be used as the secret of the hosts: CANDLE_ZERO_SECRET_FILE is also set; unset one of them");
    insta::assert_snapshot!(message(&[("CANDLE_ZERO_SECRET_FILE", "/no/such/file")]), @"zerorun: CANDLE_ZERO_SECRET_FILE=/no/such/file cannot be used as the secret of the hosts: the file cannot be read: No such file or directory (os error 2)");
}

#[test]
fn the_port_is_open_at_the_first_hosts_address_alone() {
    let (folder, port) = (host_folder(), free_port());
    let first = start(&mut launcher_in(folder.path(), port, "--nnodes 2 --node_rank 0", ARGS));
    drop(reach(port));
    // All of 127/8 is local on Linux.
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err());
    send(Signal::TERM, &first);
    let output = wait_with_output(first);
    assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));

    let mut command = zerorun();
    command.args(["--nnodes", "2", "--node_rank", "0", "--master_addr", "192.0.2.1", "./train"]);
    let output = command.current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(stderr(&output).trim_end(), @"zerorun: --master_addr 192.0.2.1 is 192.0.2.1, which is not an address of this host, but the other hosts connect to this one (--node_rank 0); set --master_addr to this host's address, or, if the others reach it at a different one (NAT, a container's published port, a service), also set --bind_addr to an address of this host, for example 0.0.0.0");

    // Behind NAT, the port is open to everyone who can reach the host. Without a secret, a warning is printed.
    let options = "--nnodes 2 --node_rank 0 --bind_addr 0.0.0.0 --timeout 1s";
    let messages = |secret: Option<&str>| {
        let mut launcher = zerorun();
        launcher.args(options.split_whitespace()).args([
            "--master_addr",
            "192.0.2.1",
            "--master_port",
            &port.to_string(),
        ]);
        let output = launcher.envs(secret.map(|s| ("CANDLE_ZERO_SECRET", s))).arg("./train").current_dir(folder.path());
        normalized_stderr(&output.output().unwrap(), port)
    };
    let warning = messages(None);
    insta::assert_snapshot!(warning.lines().next().unwrap(), @"zerorun: warning: anyone who can reach port PORT on 0.0.0.0 can take a host's place in this job, because CANDLE_ZERO_SECRET is not set; set it to the same value on every host, for example the output of `openssl rand -hex 32`");
    assert!(
        warning.contains("1 of 2 hosts connected within 1 s"),
        "the first host connects to its own port: {warning}"
    );
    assert!(!messages(Some(SECRET)).contains("warning"));
}

#[test]
fn a_hostfiles_launchers_get_the_secret_over_their_standard_input_and_ranks_do_not_get_it() {
    let folder = tempfile::tempdir().unwrap();
    let shell = program(folder.path(), "rsh", "printf '%s\\n' \"$*\" >> $DIR/commands\nshift\nexec sh -c \"$1\"");
    program(folder.path(), "train", "env > $DIR/env.$RANK");
    std::fs::write(folder.path().join("hosts"), "localhost slots=1\n127.0.0.1 slots=1\n").unwrap();
    for given in [Some(SECRET), None] {
        let mut command = zerorun();
        command.env("ZERORUN_RSH", &shell).env("DIR", folder.path()).envs(given.map(|s| ("CANDLE_ZERO_SECRET", s)));
        command.args(["--master_port", &free_port().to_string(), "--hostfile", "hosts", "--force_multi", "./train"]);
        let output = command.current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
        assert!(!stderr(&output).contains("warning: anyone"), "{}", stderr(&output));
        for file in ["commands", "env.0", "env.1"] {
            let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
            assert!(!text.contains(SECRET) && !text.contains("CANDLE_ZERO_SECRET"), "{file}: {text}");
        }
    }
}

/// Returns the next 64-bit number after `state` (SplitMix64).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A port that forwards connections to another port and records the data that is sent there.
struct RecordingProxy {
    port: u16,
    received: Arc<Mutex<Vec<u8>>>,
}

impl RecordingProxy {
    fn new(to: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (port, received) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<u8>>>::default());
        let record = received.clone();
        std::thread::spawn(move || {
            for host in listener.incoming().map_while(Result::ok) {
                let Ok(first) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                let (mut back, mut there) = (first.try_clone().unwrap(), host.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut back, &mut there));
                let (mut host, mut first, record) = (host, first, record.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(read @ 1..) = host.read(&mut buffer) {
                        record.lock().unwrap().extend_from_slice(&buffer[..read]);
                        if first.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { port, received }
    }

    /// Returns the lines that the host has sent so far.
    fn lines(&self) -> Vec<Vec<u8>> {
        self.received.lock().unwrap().split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect()
    }
}

/// Returns the `Hello` message `original` of a host in the job, with the fields in `change` replaced.
fn hello(original: &[u8], change: &Value) -> Vec<u8> {
    let mut hello: Value = serde_json::from_slice(original).unwrap();
    hello["Hello"].as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    [serde_json::to_vec(&hello).unwrap(), b"\n".to_vec()].concat()
}

/// Acts as a stranger at the port, in a way chosen by `state`. `lines` contains the lines of a host in the job, and
/// `has_secret` states whether the job has a secret. If the connection is returned, it stays open.
fn intrude(port: u16, lines: &[Vec<u8>], has_secret: bool, state: &mut u64) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut challenge = Vec::new();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let answers = !random(state).is_multiple_of(4);
    if answers {
        let _ = reader.read_until(b'\n', &mut challenge);
    }
    let all: Vec<u8> = lines.concat();
    let bytes = |state: &mut u64, limit: u64| {
        let length = random(state) % limit;
        (0..length).map(|_| random(state) as u8).collect::<Vec<u8>>()
    };
    let message = match random(state) % 9 {
        0 => bytes(state, 5000),
        1 => vec![b'['; 100_000],
        2 => b"\"Beat\"\n".repeat(3),
        // Part of a host's lines, all of them again, or an altered copy.
        3 => all[..random(state) as usize % all.len()].to_vec(),
        4 => all,
        5 => {
            let (mut all, at) = (all.clone(), random(state) as usize);
            let at = at % all.len();
            all[at] = random(state) as u8;
            all
        }
        6 => lines[0].clone(),
        7 if !has_secret => {
            let changes = [
                json!({"node": 5}),
                json!({"node": 1, "launcher": 1}),
                json!({"node": 0, "launcher": 1}),
                json!({"node": 7, "nodes": 8}),
                json!({"ranks": 0}),
                json!({"ranks": u64::MAX, "node": 5}),
                json!({"words": ["\u{1b}[2J".repeat(99)], "host": "\u{1b}[2J", "launcher": 2}),
                json!({"node": -1}),
                json!({"files": {}, "clock": u64::MAX, "launcher": 1}),
            ];
            let change = &changes[random(state) as usize % changes.len()];
            [lines[0].clone(), hello(&lines[1], change)].concat()
        }
        _ => [lines[0].clone(), vec![b'a'; 3 << 20]].concat(),
    };
    let _ = stream.write_all(&message);
    (!random(state).is_multiple_of(3)).then_some(stream)
}

/// Returns the peak memory of a process in MiB.
fn peak_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// Two launchers whose ranks run until the file `end` exists.
struct Pair {
    folder: tempfile::TempDir,
    script: PathBuf,
    secret: bool,
}

impl Pair {
    fn new(secret: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = "[ $RANK = 0 ] && echo $WORLD_SIZE >> $DIR/worlds\nuntil [ -e $DIR/end ]; do sleep 0.1; done";
        let script = program(folder.path(), "script", text);
        Self { folder, script, secret }
    }

    fn launcher(&self, node: usize, port: u16) -> Child {
        // The launcher is started without `env`, so that the process ID is its own from the beginning.
        let mut command = Command::new(launcher());
        command.args(["--nnodes", "2", "--node_rank", &node.to_string(), "--master_addr", "127.0.0.1"]);
        command.args(["--master_port", &port.to_string(), "--max_restarts", "2"]).arg(&self.script);
        start(command.env("DIR", self.folder.path()).envs(self.secret.then_some(("CANDLE_ZERO_SECRET", SECRET))))
    }

    fn worlds(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("worlds")).unwrap_or_default()
    }

    fn end(&self) -> &Path {
        std::fs::write(self.folder.path().join("end"), "").unwrap();
        self.folder.path()
    }
}

#[test]
fn strangers_at_the_port_neither_stop_a_job_nor_restart_it_nor_take_much_of_its_host() {
    let seed = std::env::var("CANDLE_ZERO_STRANGERS_SEED").map_or_else(
        |_| std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    );
    let number = std::env::var("CANDLE_ZERO_STRANGERS").map_or(150, |number| number.parse().unwrap());
    for has_secret in [true, false] {
        let context = format!("CANDLE_ZERO_STRANGERS_SEED={seed}, secret: {has_secret}");
        println!("{context}");
        let (pair, port, mut state) = (Pair::new(has_secret), free_port(), seed);
        let first = pair.launcher(0, port);
        drop(reach(port));
        // These connections exist before the second host arrives and while the job runs.
        let idle: Vec<TcpStream> = (0..200).map_while(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
        let proxy = RecordingProxy::new(port);
        let second = pair.launcher(1, proxy.port);
        wait_up_to(Duration::from_secs(100), "the ranks", || (pair.worlds() == "2\n").then_some(()));
        let lines = proxy.lines();
        assert!(lines.len() >= 2 && lines[0].starts_with(b"{\"Answer\""), "{context}");
        if has_secret {
            assert!(!lines.concat().windows(SECRET.len()).any(|bytes| bytes == SECRET.as_bytes()));
        }
        let open: Vec<TcpStream> = (0..number).filter_map(|_| intrude(port, &lines, has_secret, &mut state)).collect();
        let memory = peak_memory(first.id());
        assert!(memory < 300, "{context}: {memory} MiB");
        let threads = std::fs::read_dir(format!("/proc/{}/task", first.id())).unwrap().count();
        assert!(threads < 100, "{context}: {threads} threads");
        pair.end();
        let outputs: Vec<Output> = [first, second].into_iter().map(wait_with_output).collect();
        for output in &outputs {
            let errors = stderr(output);
            assert!(output.status.success(), "{context}: {errors}");
            assert!(!errors.contains('\u{1b}') && !errors.contains("panicked"), "{context}: {errors}");
            assert!(errors.lines().count() < 70, "{context}: {errors}");
        }
        assert_eq!(pair.worlds(), "2\n", "{context}");
        drop((idle, open));
    }
}

#[test]
fn out_of_descriptors_a_launcher_waits_and_lets_hosts_in_afterwards() {
    let (pair, port) = (Pair::new(false), free_port());
    let mut shell = zerorun_within("-n 60");
    shell.args(["--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", &port.to_string()]);
    let first = start(shell.arg(&pair.script).env("DIR", pair.folder.path()));
    drop(reach(port));
    let all: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let ticks = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    // The second host arrives while these connections exist.
    let second = pair.launcher(1, port);
    wait_up_to(Duration::from_secs(100), "the ranks", || (pair.worlds() == "2\n").then_some(()));
    std::thread::sleep(Duration::from_secs(1));
    let used = ticks() - before;
    assert!(used < 100, "{used} hundredths of a second of computing");
    pair.end();
    drop(all);
    for output in [first, second].map(wait_with_output) {
        assert!(output.status.success(), "{}", stderr(&output));
    }
}
