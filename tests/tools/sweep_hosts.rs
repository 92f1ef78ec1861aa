//! `zerorun sweep --hostfile`: trials on several hosts. Trials fail, hosts are lost, and hosts do not share the folder.

use crate::support::processes::{
    descendants, launcher, program, send, start, stderr, stdout, wait_for, wait_until_gone,
};
use crate::sweep::{Folder, asha};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Output};

/// A program that acts as ssh. The processes on a host neither belong to the session of this program nor end with it. A
/// host for which a file `down-HOST` exists cannot be reached, and connections to it are closed.
const SHELL: &str = r#"host=$1
unreachable() { echo "rsh: $host: no route to host" >&2; exit 255; }
[ -e "$DIR/down-$host" ] && unreachable
trap unreachable USR1
(while [ ! -e "$DIR/down-$host" ] && kill -0 $$ 2>/dev/null; do sleep 0.02; done; kill -USR1 $$ 2>/dev/null) &
watcher=$!
exec 3<&0
echo "Welcome to $host!"
setsid sh -c "$2" <&3 &
wait $!
code=$?
kill $watcher 2>/dev/null
exit $code"#;

/// A folder with a script that trains, and a program that reaches hosts.
struct Cluster {
    folder: Folder,
    shell: PathBuf,
}

impl Cluster {
    fn new() -> Self {
        let folder = Folder::new();
        let shell = program(folder.0.path(), "rsh", SHELL);
        Self { folder, shell }
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path(name), text).unwrap();
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.folder.command(words);
        command.env("ZERORUN_RSH", &self.shell).env("DIR", self.folder.0.path());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn run_successfully(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}{}", stdout(&output), stderr(&output));
        stderr(&output)
    }

    /// Returns the last message of a command that ends with this exit code.
    fn refused(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}{}", stdout(&output), stderr(&output));
        let path = launcher().display().to_string();
        let message = stderr(&output).replace(&path, "ZERORUN");
        message.trim_end().lines().last().unwrap_or_default().replace(self.folder.0.path().to_str().unwrap(), "DIR")
    }

    fn journal(&self, sweep: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.folder.path(sweep).join("journal.jsonl")).unwrap_or_default();
        // The last line may be incomplete while the sweep is running.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Returns the decisions of a sweep: which trials it has started, and the order of their results.
    fn decisions(&self, sweep: &str) -> Vec<Value> {
        let is_decision = |line: &Value| line["event"] == "start" || line["event"] == "take";
        self.journal(sweep).into_iter().filter(is_decision).collect()
    }

    fn has_placed_on(&self, sweep: &str, host: &str) -> bool {
        self.journal(sweep).iter().any(|line| line["event"] == "place" && line["host"] == host)
    }

    /// Waits until a trial of a sweep has been placed on a host, and the record of a trial exists.
    fn wait_for_trial_on(&self, sweep: &str, host: &str) {
        let runs = self.folder.path(sweep).join("runs");
        let has_runs = || std::fs::read_dir(&runs).is_ok_and(|mut runs| runs.next().is_some());
        wait_for("a trial on a host", || (self.has_placed_on(sweep, host) && has_runs()).then_some(()));
    }

    /// Checks that two sweeps have made the same decisions and have the same best model.
    fn assert_same(&self, one: &str, other: &str) {
        assert_eq!(self.decisions(one), self.decisions(other));
        let [shown, other_shown] = [one, other].map(|sweep| self.folder.show_json(sweep));
        assert_eq!(shown, other_shown);
        let model = |sweep: &str| {
            let trial = shown["best"].as_u64().unwrap();
            self.folder.bytes(&format!("{sweep}/trials/{trial:04}/model.safetensors"))
        };
        assert_eq!(model(one), model(other));
    }
}

/// Returns a sweep of six trials, three at a time, most of which pause.
fn small() -> String {
    asha(3).replace("points = 16", "points = 6").replace("min_steps = 1", "min_steps = 2, eta = 2")
}

#[test]
fn two_hosts_share_the_trials_and_make_the_decisions_of_one_host() {
    let cluster = Cluster::new();
    cluster.folder.sweep_file("s.toml", &small());
    cluster.folder.run_successfully(&["s.toml", "--out", "whole"]);
    cluster.write("hosts", "alpha slots=2\nbeta slots=1\nunused slots=3\n");
    let messages =
        cluster.run_successfully(&["s.toml", "--out", "shared", "--hostfile", "hosts", "--exclude", "unused"]);
    assert!(messages.contains(" runs on alpha\n") && messages.contains(" runs on beta\n"), "{messages}");
    assert!(cluster.has_placed_on("shared", "alpha") && cluster.has_placed_on("shared", "beta"));
    assert!(!cluster.has_placed_on("shared", "unused"));
    cluster.assert_same("whole", "shared");
    // No probe is left in the folder.
    let names = std::fs::read_dir(cluster.folder.path("shared")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!names.into_iter().any(|name| name.to_string_lossy().starts_with(".hosts")));
    // With fewer places than trials at a time, the others wait, and the decisions are the same.
    cluster.write("few", "localhost slots=1\nbeta slots=1\n");
    cluster.run_successfully(&["s.toml", "--out", "few-places", "--hostfile", "few"]);
    assert!(cluster.has_placed_on("few-places", "localhost"));
    cluster.assert_same("whole", "few-places");
}

#[test]
fn a_population_on_two_hosts_equals_that_on_one_host() {
    let cluster = Cluster::new();
    let file = "trials = 4\nscheduler = \"pbt\"\npbt = { every = 8 }\nparallel = 2\n[parameters]\n\
                \"optimizer.params.lr\" = { log_uniform = [1e-4, 0.1] }";
    cluster.folder.sweep_file("pbt.toml", file);
    cluster.folder.run_successfully(&["pbt.toml", "--out", "whole"]);
    cluster.write("hosts", "alpha slots=1\nbeta slots=1\n");
    cluster.run_successfully(&["pbt.toml", "--out", "shared", "--hostfile", "hosts"]);
    assert!(
        cluster.folder.show_json("shared")["trials"]
            .as_array()
            .unwrap()
            .iter()
            .any(|trial| trial["branch"].is_object())
    );
    cluster.assert_same("whole", "shared");
}

#[test]
fn a_trial_that_fails_on_another_host_is_recorded_with_its_error() {
    let cluster = Cluster::new();
    let file = "searcher = \"grid\"\nhostfile = \"hosts\"\n[parameters]\n\"--fail\" = [1, 9]";
    cluster.folder.sweep_file("s.toml", file);
    cluster.write("hosts", "alpha slots=1\n");
    cluster.run_successfully(&["s.toml", "--steps", "2"]);
    let shown = cluster.folder.show_json("sweeps/s");
    assert_eq!(shown["trials"][0]["error"], "error: the data of step 1 are missing");
    assert_eq!(shown["trials"][1]["state"], "complete");
}

#[test]
fn trials_of_a_lost_host_continue_on_another_without_counting_as_failed() {
    let cluster = Cluster::new();
    let slow = small().replace("[parameters]", "[parameters]\n\"--slow\" = [15]");
    cluster.folder.sweep_file("s.toml", &slow);
    cluster.folder.run_successfully(&["s.toml", "--out", "whole"]);
    cluster.write("hosts", "alpha slots=1\nbeta slots=2\n");
    let sweep = start(&mut cluster.command(&["s.toml", "--out", "lost", "--hostfile", "hosts"]));
    cluster.wait_for_trial_on("lost", "beta");
    cluster.write("down-beta", "");
    let output = sweep.wait_with_output().unwrap();
    let messages = stderr(&output);
    assert!(output.status.success(), "{messages}");
    let warnings: Vec<&str> = messages.lines().filter(|line| line.contains("warning")).collect();
    insta::assert_snapshot!(warnings.join("\n"), @"zerorun: warning: host beta is lost: the remote shell ended with exit code 255: rsh: beta: no route to host; no more trials are started on it, and its trials continue on other hosts from their newest checkpoints");
    cluster.assert_same("whole", "lost");
    assert_eq!(cluster.folder.show_json("lost")["failures"], 0);
}

#[test]
fn a_sweep_that_loses_all_hosts_ends_and_continues_on_others() {
    let cluster = Cluster::new();
    let slow = small().replace("[parameters]", "[parameters]\n\"--slow\" = [15]");
    cluster.folder.sweep_file("s.toml", &slow);
    cluster.folder.run_successfully(&["s.toml", "--out", "whole"]);
    cluster.write("hosts", "alpha slots=3\n");
    let sweep = start(&mut cluster.command(&["s.toml", "--out", "lost", "--hostfile", "hosts"]));
    cluster.wait_for_trial_on("lost", "alpha");
    cluster.write("down-alpha", "");
    let output = sweep.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let messages = stderr(&output).replace(cluster.folder.0.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(messages.lines().last().unwrap(), @"zerorun: all hosts are lost; the last one was alpha: the remote shell ended with exit code 255: rsh: alpha: no route to host; when hosts can be reached again, or with another --hostfile, continue the sweep with `zerorun sweep resume DIR/lost`");
    // `show` has the host on which a trial was running.
    let shown = cluster.folder.show_json("lost");
    let running = shown["trials"].as_array().unwrap().iter().find(|trial| trial["state"] == "running").unwrap();
    assert_eq!(running["host"], "alpha");
    let table = cluster.folder.run_successfully(&["show", "lost"]);
    assert!(table.contains("running on alpha"), "{table}");
    insta::assert_snapshot!(cluster.refused(&["resume", "lost"], 2), @"zerorun: host alpha: the remote shell ended with exit code 255: rsh: alpha: no route to host; the host must be reachable by ssh without a password, and have zerorun and the working directory at the same paths as on this host; otherwise, remove it from the hostfile");
    cluster.write("others", "beta slots=1\ngamma slots=1\n");
    cluster.run_successfully(&["resume", "lost", "--hostfile", "others"]);
    cluster.assert_same("whole", "lost");
}

#[test]
fn a_killed_sweep_leaves_no_trial_on_other_hosts_and_continues() {
    let cluster = Cluster::new();
    cluster.folder.sweep_file("s.toml", &small());
    cluster.folder.run_successfully(&["s.toml", "--out", "whole"]);
    cluster.write("hosts", "alpha slots=2\nbeta slots=1\n");
    let words = ["s.toml", "--out", "killed", "--hostfile", "hosts"];
    for at in [6, 14, 20] {
        let mut sweep = start(&mut cluster.command(&words));
        wait_for("a line of the journal", || {
            let has_ended = sweep.try_wait().unwrap().is_some();
            (cluster.journal("killed").len() >= at || has_ended).then_some(())
        });
        let processes = descendants(i32::try_from(sweep.id()).unwrap());
        send(Signal::KILL, &sweep);
        sweep.wait().unwrap();
        if at == 14 {
            // The trials save a checkpoint and end, although no sweep waits for them.
            wait_until_gone(&processes);
        }
    }
    cluster.run_successfully(&words);
    cluster.assert_same("whole", "killed");
}

#[test]
fn a_sweep_that_is_stopped_saves_its_trials_on_other_hosts() {
    let cluster = Cluster::new();
    let slow = small().replace("[parameters]", "[parameters]\n\"--slow\" = [30]");
    cluster.folder.sweep_file("s.toml", &slow);
    cluster.write("hosts", "alpha slots=3\n");
    let sweep = start(&mut cluster.command(&["s.toml", "--out", "stopped", "--hostfile", "hosts"]));
    cluster.wait_for_trial_on("stopped", "alpha");
    let processes = descendants(i32::try_from(sweep.id()).unwrap());
    send(Signal::TERM, &sweep);
    let output = sweep.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15), "{}", stderr(&output));
    wait_until_gone(&processes);
    // Without the hostfile, the sweep continues on this host.
    let messages = cluster.run_successfully(&["s.toml", "--out", "stopped"]);
    assert!(!messages.contains(" runs on alpha"), "{messages}");
}

#[test]
fn hosts_that_trials_cannot_use_are_refused_at_the_start_with_their_names() {
    let cluster = Cluster::new();
    cluster.folder.sweep_file("s.toml", &small());
    cluster.write("hosts", "localhost slots=1\nalpha slots=1\n");
    let words = ["s.toml", "--out", "s/out", "--hostfile", "hosts"];
    let with = |shell: &str| {
        program(cluster.folder.0.path(), "rsh", shell);
        cluster.refused(&words, 2)
    };
    let unreachable = "echo \"rsh: $1: no route to host\" >&2; exit 255";
    let no_launcher = "echo \"env: zerorun: No such file or directory\" >&2; exit 127";
    // The other host has a different folder at the same path.
    let elsewhere = |folder: &str| format!("exec sh -c \"$(printf %s \"$2\" | sed \"s,$DIR/s/out,{folder},g\")\"");
    let copied = "rm -rf \"$DIR/copy\"; cp -r \"$DIR/s/out\" \"$DIR/copy\"\n";
    let other_contents = format!("{copied}for file in \"$DIR\"/copy/.hosts-*; do echo x >\"$file\"; done\n");
    let no_program = "exec sh -c \"$(printf %s \"$2\" | sed \"s,./train,./missing,g\")\"";
    let said = [
        with(unreachable),
        with(no_launcher),
        with(&elsewhere("$DIR/other")),
        with(&format!("{other_contents}{}", elsewhere("$DIR/copy"))),
        with(&format!("{copied}{}", elsewhere("$DIR/copy"))),
        with(no_program),
    ];
    insta::assert_snapshot!(said.join("\n"));
    std::fs::remove_file(&cluster.shell).unwrap();
    insta::assert_snapshot!(cluster.refused(&words, 2), @"zerorun: cannot reach host alpha with DIR/rsh: No such file or directory (os error 2); install it, or name another program in ZERORUN_RSH");
    // Once the host can be used, the sweep begins.
    program(cluster.folder.0.path(), "rsh", SHELL);
    cluster.run_successfully(&words);
}

#[test]
fn hostfiles_and_flags_that_do_not_fit_the_sweep_are_refused_before_a_folder_is_created() {
    let cluster = Cluster::new();
    cluster.folder.sweep_file("s.toml", &small());
    let refused = |hosts: &str, more: &[&str]| {
        cluster.write("hosts", hosts);
        let said = cluster.refused(&[&["s.toml", "--out", "out"], more].concat(), 2);
        assert!(!cluster.folder.path("out").exists(), "{said}");
        said
    };
    let hosts = "alpha slots=2\nbeta slots=1\n";
    let file: &[&str] = &["--hostfile", "hosts"];
    let with = |more: &[&str]| refused(hosts, &[file, more].concat());
    let finetune = json!({
        "command": ["finetune", "m", "--data", "d.jsonl", "-H", "hosts"],
        "metric": "val_loss",
        "steps": 4,
    });
    let lines = finetune.as_object().unwrap().iter().map(|(key, value)| format!("{key} = {value}\n"));
    let finetune = lines.collect::<String>() + "[parameters]\n\"--lr\" = [1e-4]\n";
    cluster.write("finetune.toml", &finetune);
    let said = [
        refused("alpha\n", file),
        refused("alpha slots=2\nalpha slots=1\n", file),
        refused("# none\n", file),
        refused("alpha slots=0\n", file),
        refused(hosts, &["--hostfile", "missing"]),
        refused(hosts, &["--include", "alpha"]),
        refused(hosts, &["--ssh_port", "22"]),
        with(&["--ssh_port", "70000"]),
        with(&["--include", "gamma"]),
        with(&["--exclude", "alpha@beta"]),
        with(&["--include", "alpha", "--exclude", "beta"]),
        with(&["-n", "3"]),
        cluster.refused(&["finetune.toml", "--out", "out"], 2),
    ];
    insta::assert_snapshot!(said.join("\n"));
    // A host without enough memory for a trial is not used.
    let said = cluster.refused(&["s.toml", "--out", "memory", "--hostfile", "hosts", "--memory", "4096TiB"], 2);
    let (begin, end) = said.split_once("and the host has ").unwrap();
    insta::assert_snapshot!(begin, @"zerorun: s.toml: no host in the hostfile has room for a trial (host alpha is not used: a trial needs 4.0 PiB of memory, ");
    assert!(end.ends_with("; name other hosts, or set memory to a smaller value"), "{end}");
}
