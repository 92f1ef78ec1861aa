//! `zerorun deploy`: prints the manifest or batch script with which a cluster starts a job on several hosts.

use crate::error::Result as OrError;
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print_and_exit, refused};
use crate::launch::hosts::export_rules::literal_word;
use crate::launch::nodes::secret::JobSecret;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use serde_json::json;
use std::ffi::OsString;
use std::process::ExitCode;

/// The templates in deploy/, with placeholders of the form `@NAME@`.
const JOBSET: &str = include_str!("../../deploy/jobset.yaml");
const MPIJOB: &str = include_str!("../../deploy/mpijob.yaml");
const SLURM: &str = include_str!("../../deploy/slurm.sh");

/// The type of cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ClusterKind {
    /// JobSet for Kubernetes, without ssh
    K8s,
    /// MPIJob for the Kubernetes MPI operator
    Mpijob,
    /// Batch script for Slurm
    Slurm,
}

/// Print the manifest or batch script with which a cluster starts a job on several hosts.
///
/// Kubernetes: `zerorun deploy k8s --nodes 4 -n 8 --image REGISTRY/train train --ds_config /ds_configs/zero3.json >
/// job.yaml`, then `kubectl apply -f job.yaml`. Slurm: `zerorun deploy slurm --nodes 4 -n 8 ./train ... > job.sh`, then
/// `sbatch job.sh`.
///
/// Exit code: 0 if the file is printed, 2 if standard output could not be written or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "deploy", bin_name = "zerorun deploy")]
struct DeployArguments {
    /// Type of cluster
    #[arg(value_enum)]
    cluster: ClusterKind,

    /// Number of hosts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    nodes: u16,

    /// Number of ranks on each host
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,

    /// Number of cores of each host [default: one per rank]
    #[arg(long, value_name = "N")]
    cores: Option<u16>,

    /// Memory of each host, in GiB
    #[arg(long, value_name = "GIB", default_value = "16")]
    memory: u32,

    /// Name of the job: lower-case letters, digits and hyphens
    #[arg(long, default_value = "train", value_parser = name)]
    name: String,

    /// For Kubernetes: image to run; crates/zerorun/deploy/Dockerfile is an example [default: train:latest]
    #[arg(long, value_parser = yaml_word)]
    image: Option<String>,

    /// For Kubernetes: persistent volume claim that the pods of all ranks mount at /shared [default: shared]
    #[arg(long, value_parser = name)]
    claim: Option<String>,

    /// For k8s: existing Secret whose key `secret` holds the secret that the hosts share [default: a new one, included
    /// in the output]
    #[arg(long, value_name = "NAME", value_parser = name)]
    secret: Option<String>,

    /// For k8s and slurm: maximum number of restarts by zerorun after a failure; for k8s, also the maximum number of
    /// restarts of all pods, used when zerorun cannot continue without a lost pod
    #[arg(long = "max_restarts", alias = "max-restarts", value_name = "K", default_value = "0")]
    max_restarts: u32,

    /// Program on the hosts, followed by its arguments
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<String>,
}

/// Checks a name against the rules of Kubernetes and DNS.
fn name(text: &str) -> Result<String, String> {
    let are_valid = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    match are_valid && !text.starts_with('-') && !text.ends_with('-') && (1..=40).contains(&text.len()) {
        true => Ok(text.to_string()),
        false => Err("give 1 to 40 lower-case letters, digits and hyphens, with no hyphen at either end".into()),
    }
}

/// Checks that a word needs no quotes in YAML.
fn yaml_word(text: &str) -> Result<String, String> {
    match !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:@".contains(c)) {
        true => Ok(text.to_string()),
        false => Err("give letters, digits and - _ . / : @".into()),
    }
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <DeployArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = DeployArguments::try_parse_from(words).map_err(CommandLineError)?;
    if arguments.command.iter().any(|word| word.chars().any(char::is_control)) {
        let text = "an argument of the program contains a line break or another control character; remove it";
        return Err(CommandLineError(DeployArguments::command().error(ErrorKind::ValueValidation, text)));
    }
    for option in arguments.ignored() {
        eprint(&format!("zerorun: deploy: {option}"));
    }
    let text = match arguments.fill_in() {
        Ok(text) => text,
        Err(error) => return Ok(refused(&error, EXIT_SETUP)),
    };
    Ok(print_and_exit(text.trim_end()))
}

impl DeployArguments {
    /// Returns messages about the given options that have no effect for this type of cluster.
    fn ignored(&self) -> Vec<&'static str> {
        let is_mpijob = self.cluster == ClusterKind::Mpijob;
        let mut ignored = Vec::new();
        if self.secret.is_some() && is_mpijob {
            ignored.push("--secret has no effect on an MPIJob, in which mpirun starts the ranks and no launcher runs");
        }
        if self.cluster == ClusterKind::Slurm {
            let of_kubernetes = [
                (&self.secret, "--secret is ignored: it names a Secret of Kubernetes, which a Slurm job cannot use"),
                (&self.image, "--image is ignored: a Slurm job runs the program that is installed on its nodes"),
                (&self.claim, "--claim is ignored: a Slurm job uses the file systems that its nodes have mounted"),
            ];
            ignored.extend(of_kubernetes.into_iter().filter(|(option, _)| option.is_some()).map(|(_, text)| text));
        }
        if self.max_restarts > 0 && is_mpijob {
            ignored.push(
                "--max_restarts has no effect on an MPIJob, in which mpirun starts the ranks and no launcher runs",
            );
        }
        ignored
    }

    /// Fills in the template.
    ///
    /// # Errors
    /// Fails if the system provides no random numbers.
    fn fill_in(&self) -> OrError<String> {
        let Self { nodes, ranks, name, .. } = self;
        let options = ["--nnodes", &nodes.to_string(), "--num_ranks", &ranks.to_string()].map(String::from);
        let mut launcher = [vec!["zerorun".to_string()], options.to_vec()].concat();
        if self.max_restarts > 0 {
            launcher.extend(["--max_restarts".into(), self.max_restarts.to_string()]);
        }
        let words = [vec!["--".to_string()], self.command.clone()].concat();
        // This is JobSet's name for its first pod.
        let first = ["--master_addr".to_string(), format!("{name}-host-0-0.{name}")];
        let command = [launcher.clone(), first.to_vec(), words.clone()].concat();
        let total = (u32::from(*nodes) * u32::from(*ranks)).to_string();
        let mpirun = [["mpirun", "-n", &total].map(String::from).to_vec(), self.command.clone()].concat();
        let shell = |words: &[String]| words.iter().map(|word| literal_word(word)).collect::<Vec<_>>().join(" ");
        let cores = self.cores.unwrap_or(*ranks).to_string();
        let text = match self.cluster {
            ClusterKind::K8s => JOBSET,
            ClusterKind::Mpijob => MPIJOB,
            ClusterKind::Slurm => SLURM,
        };
        let secret_name = self.secret.clone().unwrap_or_else(|| format!("{name}-secret"));
        let secret = match &self.secret {
            Some(_) => String::new(),
            None => format!(
                "# The secret is new, and anyone who can read this file knows it; keep the file private, or create the \
                 Secret by hand and use --secret.\napiVersion: v1\nkind: Secret\nmetadata:\n  name: \
                 {secret_name}\ntype: Opaque\nstringData:\n  secret: \"{}\"\n---\n",
                JobSecret::random()?.line().trim_end()
            ),
        };
        let values = [
            ("@SECRET@", secret),
            ("@SECRET_NAME@", secret_name),
            ("@MAX_RESTARTS@", self.max_restarts.to_string()),
            ("@NAME@", name.clone()),
            ("@NODES@", nodes.to_string()),
            ("@RANKS@", ranks.to_string()),
            ("@IMAGE@", self.image.clone().unwrap_or_else(|| "train:latest".into())),
            ("@CLAIM@", self.claim.clone().unwrap_or_else(|| "shared".into())),
            ("@CORES@", cores),
            ("@MEMORY@", format!("{}Gi", self.memory)),
            ("@SLURM_MEMORY@", format!("{}G", self.memory)),
            ("@LAUNCHER@", shell(&launcher)),
            // JSON is also valid YAML.
            ("@COMMAND@", json!(command).to_string()),
            ("@MPIRUN@", json!(mpirun).to_string()),
            ("@WORDS@", shell(&words)),
        ];
        Ok(fill_template(text, &values))
    }
}

/// Replaces the placeholders of a template. Values are not searched for placeholders.
fn fill_template(template: &str, values: &[(&str, String)]) -> String {
    let mut text = String::new();
    let mut rest = template;
    loop {
        let found = values.iter().filter_map(|entry| Some((rest.find(entry.0)?, entry)));
        let Some((at, (word, value))) = found.min_by_key(|(at, _)| *at) else { return text + rest };
        text += &rest[..at];
        text += value;
        rest = &rest[at + word.len()..];
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn filled_in(words: &str) -> String {
        DeployArguments::try_parse_from(words.split_whitespace()).unwrap().fill_in().unwrap()
    }

    #[test]
    fn every_word_is_filled_in() {
        for cluster in ["k8s", "mpijob", "slurm"] {
            let text = filled_in(&format!("deploy {cluster} --nodes 2 -n 4 train --ds_config a@b.json"));
            let unfilled: Vec<&str> = text.lines().filter(|line| line.contains('@') && !line.contains("a@b")).collect();
            assert_eq!(
                unfilled,
                [if cluster == "slurm" { "#SBATCH --signal=TERM@60" } else { "" }; 1][..unfilled.len()],
                "{text}"
            );
        }
    }

    #[test]
    fn the_start_command_names_the_hosts_and_keeps_the_programs_words() {
        let text = filled_in("deploy k8s --nodes 2 -n 4 --name llm --max_restarts 3 train --prompt it's");
        let command = text.lines().find_map(|line| line.trim().strip_prefix("command: ")).unwrap();
        insta::assert_snapshot!(command, @r#"["zerorun","--nnodes","2","--num_ranks","4","--max_restarts","3","--master_addr","llm-host-0-0.llm","--","train","--prompt","it's"]"#);
        let text = filled_in("deploy slurm --nodes 2 -n 4 train --prompt it's");
        insta::assert_snapshot!(text.lines().last().unwrap(), @r#"exec srun --cpus-per-task=4 zerorun --nnodes 2 --num_ranks 4 --master_addr "$first" -- train --prompt 'it'\''s'"#);
        let text = filled_in("deploy mpijob --nodes 2 -n 4 train --steps 3");
        assert!(text.contains(r#"command: ["mpirun","-n","8","train","--steps","3"]"#), "{text}");
        // Words that look like placeholders are kept.
        let text = filled_in("deploy slurm --nodes 2 train @WORDS@ @CORES@ @NAME");
        assert!(text.lines().last().unwrap().ends_with(" -- train @WORDS@ @CORES@ @NAME"), "{text}");
        let text = filled_in("deploy mpijob --nodes 2 --image a@CORES@ train @IMAGE@");
        assert!(text.contains("image: a@CORES@") && text.contains(r#""train","@IMAGE@"]"#), "{text}");
    }

    #[test]
    fn the_pods_share_a_secret_that_is_new_each_time_or_the_clusters_own() {
        let new = |text: &str| {
            let line = text
                .lines()
                .find_map(|line| line.trim().strip_prefix("secret: "))
                .map(|line| line.trim_matches('"').to_string());
            line.map(|secret| JobSecret::of_text("X", &secret).unwrap())
        };
        let [one, other] = [(); 2].map(|()| filled_in("deploy k8s --nodes 2 --name llm train"));
        assert!(new(&one).is_some() && new(&one) != new(&other));
        assert!(
            one.contains("kind: Secret\nmetadata:\n  name: llm-secret\n")
                && one.contains("name: llm-secret\n                          key: secret")
        );
        let own = filled_in("deploy k8s --nodes 2 --secret mine train");
        assert!(
            !own.contains("kind: Secret") && own.contains("name: mine\n                          key: secret"),
            "{own}"
        );
        assert!(filled_in("deploy slurm --nodes 2 train").contains("export CANDLE_ZERO_SECRET"));
    }

    #[test]
    fn a_cluster_restarts_as_often_as_zerorun_and_not_by_itself() {
        assert!(filled_in("deploy k8s --nodes 2 train").contains("maxRestarts: 0\n"));
        assert!(filled_in("deploy k8s --nodes 2 --max_restarts 3 train").contains("maxRestarts: 3\n"));
    }

    #[test]
    fn options_without_a_meaning_for_the_cluster_are_reported() {
        let ignored = |words: &str| {
            let words = format!("deploy {words} --nodes 2 train");
            DeployArguments::try_parse_from(words.split_whitespace()).unwrap().ignored().len()
        };
        assert_eq!(ignored("k8s --secret mine --max_restarts 3"), 0);
        assert_eq!(ignored("mpijob --secret mine --max_restarts 3"), 2);
        assert_eq!(ignored("slurm --secret mine --max_restarts 3"), 1);
        assert_eq!(ignored("mpijob") + ignored("slurm"), 0);
    }

    #[test]
    fn names_that_a_cluster_would_refuse_are_refused_here() {
        for words in ["--name Train", "--name -a", "--image a\tb", "--nodes 0", "--claim a_b"] {
            let words = format!("deploy k8s --nodes 2 {words} train");
            assert!(DeployArguments::try_parse_from(words.split(' ')).is_err(), "{words}");
        }
    }
}
