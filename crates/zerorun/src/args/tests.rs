//! Tests of the command line.

use super::*;
use crate::launch::LaunchMode;
use crate::launch::hosts::host_filter::HostSelection;
use crate::launch::hosts::recorded_cases;
use crate::launch::mpirun::{MpirunFlavor, MpirunOptions};
use crate::launch::nodes::DEFAULT_PORT;
use serde_json::json;

fn parse(words: &str) -> std::result::Result<LaunchOptions, CommandLineError> {
    parse_with("", words)
}

/// Parses a command line with environment variables given as `A=1 B=2`.
fn parse_with(variables: &str, words: &str) -> std::result::Result<LaunchOptions, CommandLineError> {
    let all: Vec<(&str, &str)> = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
    let lookup = |name: &str| all.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_string());
    let words = std::iter::once("zerorun").chain(words.split_whitespace()).map(OsString::from);
    read_with_variables(words, &LauncherVariables(&lookup))
}

fn refusal(words: &str) -> String {
    parse(words).unwrap_err().message()
}

#[test]
fn everything_after_the_script_belongs_to_the_script() {
    let options = parse("--num_ranks 3 train.rs --num_ranks 7 --help -- -n x").unwrap();
    assert_eq!(options.ranks, 3);
    assert_eq!(options.script, PathBuf::from("train.rs"));
    assert_eq!(options.script_args, ["--num_ranks", "7", "--help", "--", "-n", "x"]);
    let options = parse("-- train.rs --timeout 1").unwrap();
    assert_eq!((options.ranks, options.timeout), (1, None));
    assert_eq!(options.script_args, ["--timeout", "1"]);
}

#[test]
fn the_number_of_ranks_has_deepspeed_names_in_both_spellings() {
    for name in ["--num_ranks", "--num-ranks", "--num_gpus", "--num-gpus", "--num_accelerators", "--num-accelerators"] {
        assert_eq!(parse(&format!("{name} 5 x.rs")).unwrap().ranks, 5, "{name}");
        assert_eq!(parse(&format!("{name}=5 x.rs")).unwrap().ranks, 5, "{name}=");
    }
    assert_eq!(parse("-n 2 x.rs").unwrap().ranks, 2);
    assert_eq!(parse("x.rs").unwrap().ranks, 1);
}

#[test]
fn restarts_are_asked_for_in_both_spellings() {
    for (restarts, ranks) in [("--max_restarts", "--min_ranks"), ("--max-restarts", "--min-ranks")] {
        let options = parse(&format!("-n 4 {restarts} 3 {ranks}=2 x.rs")).unwrap();
        assert_eq!((options.max_restarts, options.min_ranks), (3, 2));
    }
    let options = parse("-n 4 --max_restarts 1 x.rs --min_ranks 9").unwrap();
    assert_eq!((options.max_restarts, options.min_ranks), (1, 4));
    assert_eq!(parse("x.rs").unwrap().max_restarts, 0);
}

#[test]
fn a_script_with_the_name_of_a_tool_has_a_folder_in_front() {
    assert_eq!(parse("-n 2 ./bench disk").unwrap().script, PathBuf::from("./bench"));
    assert_eq!(parse("train.rs bench").unwrap().script_args, ["bench"]);
}

#[test]
fn help_lists_the_tools() {
    let help = refusal("--help");
    assert!(help.contains("\n  bench     "), "{help}");
}

#[test]
fn an_example_of_the_help_names_files_that_are_there_and_gives_the_configuration_as_the_example_takes_it() {
    let help = refusal("--help");
    let line = help.lines().find(|line| line.contains("examples/train_gpt.rs")).expect("an example");
    let words: Vec<&str> = line.split_whitespace().collect();
    let [.., script, "--ds_config", config] = words[..] else { panic!("{line}") };
    for file in [script, config] {
        assert!(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(file).is_file(), "{file}");
    }
}

/// Returns the problem without the usage text.
fn wrong(words: &str) -> String {
    refusal(words).split("\n\n").next().unwrap_or_default().to_string()
}

#[test]
fn wrong_hosts_are_named() {
    insta::assert_snapshot!(wrong("--nnodes 4:2 x.rs"), @"zerorun: --nnodes 4:2 is not a number of hosts; write N, FEWEST:N with 1 <= FEWEST <= N, or auto, for example 2 or 1:4");
    insta::assert_snapshot!(wrong("--nnodes 0 x.rs"), @"zerorun: --nnodes 0 is not a number of hosts; write N, FEWEST:N with 1 <= FEWEST <= N, or auto, for example 2 or 1:4");
    insta::assert_snapshot!(wrong("--nnodes 2 --node_rank 2 --master_addr a x.rs"), @"zerorun: --node_rank 2 is not below --nnodes 2; number the hosts from 0 to 1");
    insta::assert_snapshot!(wrong("--nnodes 2 --master_addr a x.rs"), @"zerorun: --nnodes 2 needs --node_rank; give each host its index from 0 to 1, and give all hosts the first host's address");
    insta::assert_snapshot!(wrong("--nnodes 2 --node_rank 1 x.rs"), @"zerorun: --nnodes 2 needs --master_addr; give each host its index from 0 to 1, and give all hosts the first host's address");
    insta::assert_snapshot!(wrong("--nnodes 2 --hostfile hosts x.rs"), @"zerorun: the argument '--nnodes <N>' cannot be used with '--hostfile <FILE>'");
    insta::assert_snapshot!(wrong("--min_nodes 1 --max_restarts 1 x.rs"), @"zerorun: --min_nodes 1 is the minimum number of hosts after a restart, but this job has one host; give --hostfile or --nnodes, or leave --min_nodes out");
    insta::assert_snapshot!(wrong("--hostfile hosts --min_nodes 1 x.rs"), @"zerorun: --min_nodes 1 is the minimum number of hosts after a restart, but restarts are off; give a --max_restarts of at least 1, or leave --min_nodes out");
    insta::assert_snapshot!(wrong("--hostfile hosts --min_nodes 0 --max_restarts 1 x.rs"), @"zerorun: --min_nodes 0 is the minimum number of hosts after a restart, but a job needs at least one host; give a --min_nodes of at least 1, or leave --min_nodes out");
    insta::assert_snapshot!(wrong("--hostfile hosts --max_restarts 1 --min_ranks 1 x.rs"), @"zerorun: --min_ranks 1 is for one host; on several hosts, each keeps its number of ranks; give --min_nodes instead, or leave --min_ranks out");
    assert!(wrong("--include a x.rs").contains("--hostfile"), "{}", wrong("--include a x.rs"));
}

#[test]
fn hosts_are_read_with_the_fewest_of_them() {
    let options = parse("--nnodes 2:4 --node_rank 3 --master_addr first x.rs").unwrap();
    let LaunchMode::PerHostLaunchers(node) = options.job_hosts else { panic!("several hosts") };
    assert_eq!((node.nodes, node.min_nodes, node.node, node.master_addr.as_str()), (4, 2, 3, "first"));
    assert!(matches!(parse("--nnodes 1 x.rs").unwrap().job_hosts, LaunchMode::OneHost));
    let LaunchMode::Hostfile(hosts) = parse("-H hosts -e a:1 --num_gpus 2 x.rs").unwrap().job_hosts else {
        panic!("the hosts in a hostfile")
    };
    assert_eq!((hosts.selection.exclude.as_str(), hosts.selection.num_gpus), ("a:1", Some(2)));
    let LaunchMode::Hostfile(hosts) = parse("-H hosts x.rs").unwrap().job_hosts else {
        panic!("the hosts in a hostfile")
    };
    assert_eq!(hosts.selection, HostSelection::default());
}

#[test]
fn what_the_command_line_leaves_open_comes_from_the_launcher_that_has_started_zerorun() {
    let node = |variables: &str, words: &str| match parse_with(variables, words).unwrap() {
        LaunchOptions { job_hosts: LaunchMode::PerHostLaunchers(node), master_port, .. } => {
            (node.node, node.nodes, node.master_addr, master_port)
        }
        options => panic!("{:?}", options.job_hosts),
    };
    let torchrun =
        "PET_NNODES=2:4 PET_NODE_RANK=3 PET_RDZV_ENDPOINT=first:4711 PET_NPROC_PER_NODE=2 PET_MAX_RESTARTS=5";
    assert_eq!(node(torchrun, "x.rs"), (3, 4, "first".into(), Some(4711)));
    let options = parse_with(torchrun, "x.rs").unwrap();
    assert_eq!((options.ranks, options.max_restarts), (2, 5));
    let options = parse_with(torchrun, "-n 8 --max_restarts 1 x.rs").unwrap();
    assert_eq!((options.ranks, options.max_restarts), (8, 1));
    let words = "--nnodes 2 --node_rank 1 --master_addr a --master_port 1 x.rs";
    assert_eq!(node(torchrun, words), (1, 2, "a".into(), Some(1)));
    let mpirun = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2";
    for nodes in ["2", "auto"] {
        let words = format!("--nnodes {nodes} --master_addr a x.rs");
        assert_eq!(node(mpirun, &words), (1, 2, "a".into(), Some(DEFAULT_PORT)));
    }
    assert!(matches!(parse_with(mpirun, "x.rs").unwrap().job_hosts, LaunchMode::OneHost));
    let of_mpirun = parse_with("PMI_RANK=0 PMI_SIZE=1", "--nnodes auto x.rs").unwrap();
    assert!(matches!(of_mpirun.job_hosts, LaunchMode::OneHost));
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(parse_with("PET_NPROC_PER_NODE=cpu", "x.rs").unwrap().ranks, cores);
}

#[test]
fn a_hostfile_says_more_than_the_variables() {
    let options =
        parse_with("PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=b PET_MAX_RESTARTS=2", "-H hosts x.rs").unwrap();
    let LaunchMode::Hostfile(hosts) = options.job_hosts else { panic!("the hosts in a hostfile") };
    assert_eq!((hosts.selection, hosts.master_addr, options.max_restarts), (HostSelection::default(), None, 0));
}

#[test]
fn a_variable_that_is_wrong_is_named() {
    let wrong = |variables: &str| {
        parse_with(variables, "x.rs").unwrap_err().message().split("\n\n").next().unwrap_or_default().to_string()
    };
    insta::assert_snapshot!(wrong("PET_NPROC_PER_NODE=many"), @"zerorun: PET_NPROC_PER_NODE is `many`; give a number from 1 to 1024, or `auto`, `cpu` or `gpu`");
    insta::assert_snapshot!(wrong("PET_NPROC_PER_NODE=0"), @"zerorun: PET_NPROC_PER_NODE is `0`; 0 is not in 1..=1024");
    insta::assert_snapshot!(wrong("PET_MAX_RESTARTS=-1"), @"zerorun: environment variable PET_MAX_RESTARTS is `-1`; it must be a whole number");
    insta::assert_snapshot!(wrong("PET_NNODES=two"), @"zerorun: --nnodes two is not a number of hosts; write N, FEWEST:N with 1 <= FEWEST <= N, or auto, for example 2 or 1:4");
    insta::assert_snapshot!(wrong("PET_MASTER_PORT=70000"), @"zerorun: environment variable PET_MASTER_PORT is `70000`; it must be a port number from 1 to 65535");
}

#[test]
fn the_backend_is_chosen_on_one_host_alone() {
    assert_eq!(parse("x.rs").unwrap().backend, CommBackend::Shm);
    assert_eq!(parse("--backend mpi x.rs").unwrap().backend, CommBackend::Mpi);
    insta::assert_snapshot!(wrong("--backend shm --nnodes 2 x.rs"), @"zerorun: --backend shm is for ranks on one host, because hosts do not share memory; leave --backend out, so that the ranks use MPI");
    insta::assert_snapshot!(wrong("--backend nccl x.rs"), @r"
        zerorun: invalid value 'nccl' for '--backend <BACKEND>'
          [possible values: shm, mpi]
        ");
}

#[test]
fn mpirun_starts_the_ranks_of_a_hostfile_if_it_is_asked_to() {
    let hosts = |words: &str| match parse(words).unwrap().job_hosts {
        LaunchMode::Hostfile(hosts) => hosts.mpirun.map(|MpirunOptions { kind, args }| (kind, args)),
        other => panic!("{other:?}"),
    };
    assert_eq!(hosts("-H hosts x.rs"), None);
    assert_eq!(hosts("-H hosts --launcher mpich x.rs"), Some((MpirunFlavor::Mpich, vec![])));
    let quoted = ["zerorun", "-H", "hosts", "--launcher", "OpenMPI", "--launcher_args", "--bind-to none", "x.rs"];
    let LaunchMode::Hostfile(hosts) = read(quoted.map(OsString::from)).unwrap().job_hosts else {
        panic!("the hosts in a hostfile")
    };
    let MpirunOptions { kind, args } = hosts.mpirun.unwrap();
    assert_eq!((kind, args), (MpirunFlavor::OpenMpi, vec!["--bind-to".into(), "none".into()]));
    insta::assert_snapshot!(wrong("-H hosts --launcher openmpi --max_restarts 2 x.rs"), @"zerorun: --max_restarts is for ranks that zerorun starts, but with --launcher openmpi, mpirun starts them; leave --max_restarts out, pass mpirun's equivalent in --launcher_args, or use --launcher ssh");
    insta::assert_snapshot!(wrong("-H hosts --launcher_args -v x.rs"), @"zerorun: --launcher_args is for mpirun; give --launcher openmpi or --launcher mpich, or leave --launcher_args out");
    insta::assert_snapshot!(wrong("-H hosts --launcher slurm x.rs"), @r"
        zerorun: invalid value 'slurm' for '--launcher <LAUNCHER>'
          [possible values: ssh, openmpi, mpich]
        ");
    assert!(wrong("--launcher openmpi x.rs").contains("--hostfile"));
}

#[test]
fn ranks_are_bound_to_all_cores_or_to_a_list() {
    let binding = |words: &str| parse(words).unwrap().binding;
    assert_eq!(binding("x.rs"), None);
    assert_eq!(binding("--bind_cores_to_rank x.rs"), Some(CoreBinding { list: None }));
    let list = Some(CoreList::of(vec![0, 2, 3, 4, 6]));
    assert_eq!(binding("--bind-cores-to-rank --bind-core-list 0,2-4,6 x.rs"), Some(CoreBinding { list }));
    insta::assert_snapshot!(wrong("--bind_core_list 0-1 x.rs"), @r"
        zerorun: the following required arguments were not provided:
          --bind_cores_to_rank
        ");
    insta::assert_snapshot!(wrong("--bind_cores_to_rank --bind_core_list 0,2-6,5-9 x.rs"), @"zerorun: invalid value '0,2-6,5-9' for '--bind_core_list <LIST>': `5-9` in the core list `0,2-6,5-9` does not begin above the preceding core, 6; write each core once, in ascending order");
    insta::assert_snapshot!(wrong("--bind_cores_to_rank --bind_core_list some x.rs"), @"zerorun: invalid value 'some' for '--bind_core_list <LIST>': `some` in the core list `some` is neither a core nor a range of cores; write numbers below 65536 or FIRST-LAST, for example 0,2-4");
    insta::assert_snapshot!(wrong("--bind_cores_to_rank --bind_core_list 6-2 x.rs"), @"zerorun: invalid value '6-2' for '--bind_core_list <LIST>': the range of cores `6-2` ends before it starts; write 2-6");
}

#[test]
fn recorded_defaults_with_a_counterpart_hold() {
    let case = recorded_cases::case("cli-defaults");
    let argv: Vec<String> = serde_json::from_value(case["input"]["argv"].clone()).unwrap();
    let arguments = ZerorunArguments::try_parse_from(std::iter::once("zerorun".to_string()).chain(argv)).unwrap();
    // Python prints -1 if no value is given.
    let number = |number: Option<usize>| number.map_or(-1, |number| number as i64);
    let words: Vec<&str> = arguments.command.iter().map(|word| word.to_str().unwrap()).collect();
    let found = json!({
        "include": arguments.hosts.include,
        "exclude": arguments.hosts.exclude,
        "num_nodes": number(arguments.hosts.num_nodes),
        "master_port": arguments.master_port.unwrap_or(DEFAULT_PORT),
        "master_addr": arguments.hosts.master_addr.unwrap_or_default(),
        "node_rank": number(arguments.hosts.node_rank),
        "force_multi": arguments.hosts.force_multi,
        "bind_cores_to_rank": arguments.bind_cores_to_rank,
        "bind_core_list": arguments.bind_core_list.map(|list| list.cores().to_vec()),
        "ssh_port": arguments.hosts.ssh_port,
        "user_script": words[0],
        "user_args": words[1..],
    });
    for (name, value) in found.as_object().unwrap() {
        assert_eq!(case["expect"]["values"].get(name), Some(value), "{name}");
    }
}

#[test]
fn durations_take_a_unit_or_are_seconds() {
    for (text, milliseconds) in [("500ms", 500), ("90s", 90_000), ("90", 90_000), ("10m", 600_000), ("2h", 7_200_000)] {
        let options = parse(&format!("--timeout {text} x.rs")).unwrap();
        assert_eq!(options.timeout, Some(Duration::from_millis(milliseconds)), "{text}");
    }
    for text in ["", "s", "0", "0ms", "1.5h", "-3", "3 s", "1d", "99999999999999999999h", "1001h"] {
        assert!(duration(text).is_err(), "{text}");
    }
}

#[test]
fn a_wrong_command_line_says_what_is_wrong() {
    insta::assert_snapshot!(refusal(""), @r#"
        zerorun: the following required arguments were not provided:
          <SCRIPT> [ARGS]...

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_ranks 0 train.rs"), @r#"
        zerorun: invalid value '0' for '--num_ranks <N>': 0 is not in 1..=1024

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_ranks two train.rs"), @r#"
        zerorun: invalid value 'two' for '--num_ranks <N>': give a number from 1 to 1024, or `auto`, `cpu` or `gpu`

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_ranks 2 --num_gpus 3 train.rs"), @r#"
        zerorun: the argument '--num_ranks <N>' cannot be used multiple times

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_rank 2 train.rs"), @r#"
        zerorun: unexpected argument '--num_rank' found

          tip: a similar argument exists: '--num_ranks'
          tip: to pass '--num_rank' as a value, use '-- --num_rank'

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--timeout 10days train.rs"), @r#"
        zerorun: invalid value '10days' for '--timeout <DURATION>': give a whole number with ms, s, m or h, for example 90s or 10m

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--island_server host0 train.rs"), @r#"
        zerorun: invalid value 'host0' for '--island_server <HOST:PORT>': give a name or an address, a colon and a port from 1 to 65535, for example host0:29600

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--master_port 0 train.rs"), @r#"
        zerorun: invalid value '0' for '--master_port <PORT>': 0 is not in 1..=65535

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--max_restarts often train.rs"), @r#"
        zerorun: invalid value 'often' for '--max_restarts <K>': invalid digit found in string

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--max_restarts 1 --min_ranks 0 train.rs"), @r#"
        zerorun: invalid value '0' for '--min_ranks <M>': 0 is not in 1..=1024

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("-n 2 --max_restarts 1 --min_ranks 3 train.rs"), @r#"
        zerorun: --min_ranks 3 is above --num_ranks 2; give at most 2, or a larger --num_ranks

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("-n 2 --min_ranks 2 train.rs"), @r#"
        zerorun: --min_ranks 2 is the minimum number of ranks after a restart, but restarts are off; give a --max_restarts of at least 1, or leave --min_ranks out

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_ranks 2 bench disk /x"), @r#"
        zerorun: `bench` is a tool and must be the first word: `zerorun bench ...`. To start a script of that name, write ./bench

        Usage: zerorun [OPTIONS] SCRIPT [ARGS]...

        For more information, try '--help'.
        "#);
    insta::assert_snapshot!(refusal("--num_ranks"), @r#"
        zerorun: a value is required for '--num_ranks <N>' but none was supplied

        For more information, try '--help'.
        "#);
}
