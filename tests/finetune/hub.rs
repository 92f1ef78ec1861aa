//! Models by name from the Hugging Face Hub: which files are fetched, the resulting cache, broken connections, and the
//! messages on failure.

use crate::fixtures::path;
use crate::hub_server::{COMMIT, Faults, NAME, Server, TOKEN, digest};
use crate::support::processes::{start, stderr, stdout, zerorun};
use candle_zero_finetune::{Adapter, BaseModel};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use tempfile::TempDir;

/// Starts a Hub with the tiny Llama, a license, and files that are not needed.
fn tiny() -> Server {
    let more =
        [("README.md", "about"), ("pytorch_model.bin", "weights"), ("model.onnx", "weights"), ("LICENSE", "free")];
    Server::start(&path("models/llama"), &more)
}

/// Returns a `zerorun` command with the Hub of this test and a separate cache.
fn command(server: &Server, home: &Path, words: &[&str]) -> Command {
    let mut command = zerorun();
    for name in [
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
    ] {
        command.env_remove(name);
    }
    command.env("HF_HOME", home).env("HF_ENDPOINT", server.endpoint()).env("XDG_CACHE_HOME", home).args(words);
    command
}

fn run(server: &Server, home: &Path, words: &[&str]) -> Output {
    command(server, home, words).output().unwrap()
}

/// Writes the fetched model with `zerorun merge`. Returns the command's output and the model's folder.
fn merged(server: &Server, home: &TempDir) -> (Output, PathBuf) {
    let out = home.path().join("out");
    _ = std::fs::remove_dir_all(&out);
    (run(server, home.path(), &["merge", NAME, "--out", out.to_str().unwrap()]), out)
}

/// Returns the message of a failed merge.
fn refusal(server: &Server, home: &TempDir, name: &str, variables: &[(&str, &str)]) -> String {
    let out = home.path().join("out");
    let mut command = command(server, home.path(), &["merge", name, "--out", out.to_str().unwrap()]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!out.exists());
    let text = stderr(&output).replace(&server.endpoint(), "ENDPOINT").replace(home.path().to_str().unwrap(), "HOME");
    text.lines()
        .filter(|line| line.starts_with("zerorun: ") && !line.ends_with(" B") && !line.ends_with("iB"))
        .collect()
}

fn snapshot(home: &Path) -> PathBuf {
    home.join("hub/models--org--tiny/snapshots").join(COMMIT)
}

/// Returns the byte range of each request for weights, or an empty string for a request without a range.
fn of_weights(server: &Server) -> Vec<String> {
    let storage = "GET /storage/model.safetensors";
    server
        .requests()
        .iter()
        .filter_map(|request| request.strip_prefix(storage))
        .map(|range| range.trim().into())
        .collect()
}

#[test]
fn a_run_on_a_model_by_its_name_fetches_it_once_and_ends_as_one_on_its_folder() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let data = home.path().join("chats.jsonl");
    let chat = r#"{"messages": [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]}"#;
    std::fs::write(&data, format!("{chat}\n").repeat(12)).unwrap();
    let train = |model: &str, out: &str| {
        let out = home.path().join(out);
        let words = ["finetune", model, "-n", "2", "--steps", "3", "--ctx", "48", "--data"];
        let output = command(&server, home.path(), &words).arg(&data).arg("--out").arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (out, stderr(&output))
    };
    let (by_name, messages) = train(NAME, "by-name");
    let (by_path, _) = train(path("models/llama").to_str().unwrap(), "by-path");
    let bytes = |out: &Path| std::fs::read(out.join("adapter_model.safetensors")).unwrap();
    assert_eq!(bytes(&by_name), bytes(&by_path));
    assert_eq!(Adapter::read(&by_name).unwrap().base.unwrap(), NAME);
    let files: Vec<&str> = messages.lines().filter(|line| line.starts_with("zerorun: ")).collect();
    assert!(files.len() == 7 && files.contains(&"zerorun: model.safetensors, 397.2 KiB"), "{messages}");
    assert!(messages.contains("org/tiny at commit 0123456789ab: fetching 23.2 KiB (5 files)"), "{messages}");

    // Only the necessary files were fetched, once each. The ranks requested nothing.
    let requests = server.requests();
    let gets =
        |name: &str| requests.iter().filter(|request| request.starts_with("GET") && request.ends_with(name)).count();
    assert_eq!(gets("/revision/main"), 1);
    for needed in ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "LICENSE"] {
        // Each file is requested once by its name, and once at the redirect's target.
        assert_eq!(gets(&format!("/{needed}")), 2, "{needed}: {requests:?}");
    }
    assert_eq!(of_weights(&server), [""]);
    for unneeded in ["README.md", "pytorch_model.bin", "model.onnx", "config.v4.json"] {
        assert!(!requests.iter().any(|request| request.contains(unneeded)), "{requests:?}");
    }

    // The cache has huggingface_hub's structure.
    let repository = home.path().join("hub/models--org--tiny");
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), COMMIT);
    let weights = snapshot(home.path()).join("model.safetensors");
    let content = Path::new("../../blobs").join(digest(server.file("model.safetensors")));
    assert_eq!(weights.read_link().unwrap(), content);
    assert_eq!(std::fs::read(weights).unwrap(), server.file("model.safetensors"));
    let names = |folder: &str| std::fs::read_dir(repository.join(folder)).unwrap().count();
    assert_eq!((names("blobs"), names("snapshots"), names("")), (6, 1, 3));

    // Cached files are not fetched again.
    server.set(Faults::default());
    let (again, messages) = train(NAME, "again");
    assert_eq!(bytes(&again), bytes(&by_path));
    assert_eq!(server.requests(), ["GET /api/models/org/tiny/revision/main"]);
    assert!(!messages.contains("fetching"), "{messages}");
}

#[test]
fn chat_templates_with_names_of_their_own_are_fetched_and_nothing_else_of_their_folder() {
    let more = [
        ("additional_chat_templates/tool_use.jinja", "{{ messages }}"),
        ("additional_chat_templates/../../../up.jinja", "up"),
        ("additional_chat_templates/notes.txt", "notes"),
    ];
    let (server, home) = (Server::start(&path("models/llama"), &more), tempfile::tempdir().unwrap());
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    let folder = snapshot(home.path()).join("additional_chat_templates");
    let names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["tool_use.jinja"]);
    assert_eq!(std::fs::read_to_string(folder.join("tool_use.jinja")).unwrap(), "{{ messages }}");
}

#[test]
fn every_command_that_takes_a_model_takes_its_name_and_offline_what_the_cache_has() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let data = home.path().join("texts.txt");
    std::fs::write(&data, "a line\n").unwrap();
    let show = ["data", "show", NAME, data.to_str().unwrap()];
    let output = run(&server, home.path(), &show);
    assert!(output.status.success() && stdout(&output).contains("a line"), "{}", stderr(&output));
    assert_eq!(of_weights(&server), [""; 0], "data show needs no weights");
    let generate = ["generate", NAME, "--prompt", "so?", "--max_tokens", "2"];
    // The commit itself, given as the revision, names the same folder.
    let by_commit = format!("{NAME}@{COMMIT}");
    let offline = |words: &[&str]| command(&server, home.path(), words).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let refused = offline(&generate);
    let message = stderr(&refused).replace(home.path().to_str().unwrap(), "HOME");
    insta::assert_snapshot!(message.trim(), @"zerorun: HF_HUB_OFFLINE is set, and model.safetensors of org/tiny is not in HOME/hub; unset HF_HUB_OFFLINE for one run to fetch the model, or give a folder");
    let answered = run(&server, home.path(), &generate);
    assert!(answered.status.success(), "{}", stderr(&answered));
    server.set(Faults::default());
    for words in [&show[..], &generate, &["generate", &by_commit, "--prompt", "so?", "--max_tokens", "2"]] {
        let again = offline(words);
        assert!(again.status.success(), "{}", stderr(&again));
    }
    let out = home.path().join("out");
    let written = offline(&["merge", NAME, "--out", out.to_str().unwrap()]);
    assert!(written.status.success(), "{}", stderr(&written));
    assert!(out.join("LICENSE").is_file());
    BaseModel::open(out).unwrap();
    assert_eq!(server.requests(), [""; 0]);
}

#[test]
fn a_path_that_is_there_goes_before_a_name() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let folder = home.path().join(NAME);
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = command(&server, home.path(), &["merge", NAME, "--out", "out"]);
    let output = command.current_dir(home.path()).output().unwrap();
    insta::assert_snapshot!(stderr(&output).trim(), @"zerorun: org/tiny is not a model: it has neither config.json nor a GGUF file; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    assert_eq!(server.requests(), [""; 0]);
}

#[test]
fn shards_are_those_of_the_index() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(&path("models/qwen3"), &[("model-00005-of-00004.safetensors", "left over")]);
    let (output, out) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    let shards = server.requests().iter().filter(|request| request.starts_with("GET /storage/model-0000")).count();
    assert_eq!(shards, 4);
    assert_eq!(BaseModel::open(out).unwrap().config(), BaseModel::open(path("models/qwen3")).unwrap().config());
    let index = r#"{"weight_map": {"a": "model-00009-of-00009.safetensors"}}"#;
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(&path("models/qwen3"), &[("model.safetensors.index.json", index)]);
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[]), @"zerorun: org/tiny has no model-00009-of-00009.safetensors: the repository is incomplete (model.safetensors.index.json lists this file); use another revision");
    let home = tempfile::tempdir().unwrap();
    let index = r#"{"weight_map": {"a": "../../../../token"}}"#;
    let server = Server::start(&path("models/qwen3"), &[("model.safetensors.index.json", index)]);
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[]), @r#"zerorun: according to HOME/hub/models--org--tiny/snapshots/0123456789abcdef0123456789abcdef01234567/model.safetensors.index.json, tensor a is in "../../../../token"; an index names files in its own folder, without a path"#);
}

#[test]
fn bytes_that_end_too_early_go_on_where_they_ended() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let size = server.file("model.safetensors").len();
    let [half, more] = [size / 2, size / 2 + 1000];
    server.set(Faults { cut_positions: vec![half, more], busy: 1, ..Faults::default() });
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(of_weights(&server), [String::new(), format!("bytes={half}-"), format!("bytes={more}-")]);
    assert_eq!(
        std::fs::read(snapshot(home.path()).join("model.safetensors")).unwrap(),
        server.file("model.safetensors")
    );

    // If the server does not support ranges, the complete file is fetched from the beginning.
    let home = tempfile::tempdir().unwrap();
    server.set(Faults { cut_positions: vec![half], no_ranges: true, ..Faults::default() });
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(
        std::fs::read(snapshot(home.path()).join("model.safetensors")).unwrap(),
        server.file("model.safetensors")
    );
}

#[test]
fn what_came_before_an_error_is_kept_and_what_is_wrong_is_fetched_again() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    // No response delivers any byte after the first 1000.
    server.set(Faults { cut_positions: vec![1000; 9], ..Faults::default() });
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[]), @"zerorun: received only 1000 B of the 397.2 KiB of model.safetensors in org/tiny (after several attempts; the last one failed: Peer disconnected); the received part is kept; run the command again to resume from there");
    assert_eq!(of_weights(&server).len(), 4);
    let content = home.path().join("hub/models--org--tiny/blobs").join(digest(server.file("model.safetensors")));
    let part = PathBuf::from(format!("{}.candle-zero.part", content.display()));
    let bytes = server.file("model.safetensors");
    assert_eq!(std::fs::read(&part).unwrap(), bytes[..1000]);
    server.set(Faults::default());
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(of_weights(&server), ["bytes=1000-"]);
    assert!(!part.exists());

    // The checksum reveals that the earlier bytes belong to different content.
    std::fs::remove_file(&content).unwrap();
    std::fs::write(&part, vec![7; 1000]).unwrap();
    server.set(Faults::default());
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(of_weights(&server), ["bytes=1000-", ""]);
    assert_eq!(std::fs::read(&content).unwrap(), bytes);

    // Content that another revision already has is only linked.
    std::fs::remove_file(snapshot(home.path()).join("model.safetensors")).unwrap();
    server.set(Faults::default());
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(of_weights(&server), [""; 0]);

    std::fs::remove_file(&content).unwrap();
    std::fs::remove_dir_all(home.path().join("out")).unwrap();
    server.set(Faults { wrong_bytes: 2, ..Faults::default() });
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[]), @"zerorun: model.safetensors of org/tiny did not match its checksum in two downloads, so something is changing it in transit; check HF_ENDPOINT and proxies");
    assert!(!content.exists() && !part.exists());
}

#[test]
fn of_two_that_need_a_model_at_once_one_fetches_it() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    server.set(Faults { pause: Duration::from_millis(500), ..Faults::default() });
    let both = ["a", "b"].map(|out| {
        let out = home.path().join(out);
        start(&mut command(&server, home.path(), &["merge", NAME, "--out", out.to_str().unwrap()]))
    });
    for child in both {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    assert_eq!(of_weights(&server), [""]);
}

#[test]
fn a_private_model_comes_with_the_right_token_which_no_other_host_sees() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let private = || server.set(Faults { is_private: true, ..Faults::default() });
    private();
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[]), @"zerorun: there is no public repository org/tiny at ENDPOINT, and no local file or folder has that name; check its spelling and, for a private repository, give a token of an account that may read it (HF_TOKEN)
");
    insta::assert_snapshot!(refusal(&server, &home, NAME, &[("HF_TOKEN", "hf_wrong")]), @"zerorun: this token can access no repository named org/tiny at ENDPOINT, and no local file or folder has that name; check its spelling and, for a private repository, give a token of an account that may read it (HF_TOKEN)
");
    private();
    // huggingface_hub stores the token in this file.
    std::fs::write(home.path().join("token"), format!("{TOKEN}\n")).unwrap();
    let (output, _) = merged(&server, &home);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn what_cannot_be_fetched_is_refused_with_what_to_do() {
    let (server, home) = (tiny(), tempfile::tempdir().unwrap());
    let plain = |name: &str, variables: &[(&str, &str)]| refusal(&server, &home, name, variables);
    let with = |faults: Faults| {
        server.set(faults);
        refusal(&server, &home, NAME, &[])
    };
    let refused = |file, status, code, message| {
        with(Faults { refused: Some((file, status, code, message)), ..Faults::default() })
    };
    insta::assert_snapshot!(plain("org/tyni", &[]), @"zerorun: there is no public repository org/tyni at ENDPOINT, and no local file or folder has that name; check its spelling and, for a private repository, give a token of an account that may read it (HF_TOKEN)");
    insta::assert_snapshot!(plain("org/tiny@v2", &[]), @r#"zerorun: org/tiny has no branch, tag or commit "v2"; give another one, or just org/tiny for the branch main"#);
    insta::assert_snapshot!(plain(NAME, &[("HF_HUB_OFFLINE", "1")]), @"zerorun: HF_HUB_OFFLINE is set, and config.json of org/tiny is not in HOME/hub; unset HF_HUB_OFFLINE for one run to fetch the model, or give a folder");
    insta::assert_snapshot!(plain(NAME, &[("HF_ENDPOINT", "huggingface.co")]), @"zerorun: HF_ENDPOINT is huggingface.co, but must be the address of a Hub, such as https://huggingface.co");
    insta::assert_snapshot!(plain(NAME, &[("SSL_CERT_FILE", "/dev/null")]), @"zerorun: cannot read /dev/null: it is a device, but a file is needed");
    insta::assert_snapshot!(plain(NAME, &[("SSL_CERT_FILE", "Cargo.toml")]), @"zerorun: SSL_CERT_FILE is Cargo.toml, but must be a file with certificates in PEM format");
    insta::assert_snapshot!(plain(NAME, &[("HF_ENDPOINT", "http://127.0.0.1:9")]), @"zerorun: cannot reach http://127.0.0.1:9 for the list of files of org/tiny: io: Connection refused (os error 111); check the network, HTTPS_PROXY and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use files fetched before, or give a folder");
    insta::assert_snapshot!(refused("config.json", 403, "GatedRepo", "Access to model org/tiny is restricted."), @"zerorun: config.json of org/tiny requires accepting the model's conditions; accept them at ENDPOINT/org/tiny, and give a token of the account that accepted them (HF_TOKEN)");
    insta::assert_snapshot!(refused("config.json", 403, "", "Your token has no right to this."), @"zerorun: ENDPOINT refuses access to config.json of org/tiny (HTTP 403): Your token has no right to this; give a token of an account that may read it (HF_TOKEN)");
    insta::assert_snapshot!(refused("", 401, "", "Invalid credentials in Authorization header"), @"zerorun: ENDPOINT refuses access to the list of files of org/tiny (HTTP 401): Invalid credentials in Authorization header; give a token of an account that may read it (HF_TOKEN)");
    insta::assert_snapshot!(refused("", 429, "", ""), @"zerorun: ENDPOINT answered the request for the list of files of org/tiny with HTTP 429; too many requests came from this address; wait a few minutes, or give a token (HF_TOKEN)");
    insta::assert_snapshot!(refused("", 502, "", ""), @"zerorun: ENDPOINT answered the request for the list of files of org/tiny with HTTP 502; try again later");
    insta::assert_snapshot!(refused("", 404, "", ""), @"zerorun: there is no public repository org/tiny at ENDPOINT, and no local file or folder has that name; check its spelling and, for a private repository, give a token of an account that may read it (HF_TOKEN)");
    let text = with(Faults { size: Some(1 << 60), ..Faults::default() });
    let (before, after) = (text.find("where ").unwrap() + 6, text.find(" is free").unwrap());
    insta::assert_snapshot!([&text[..before], "FREE", &text[after..]].concat(), @"zerorun: model.safetensors of org/tiny needs 1024.0 PiB in HOME/hub/models--org--tiny, where FREE is free; free up space there, or set HF_HOME to a folder on another disk");
    insta::assert_snapshot!(with(Faults { list: Some("<html>"), ..Faults::default() }), @"zerorun: the response from ENDPOINT for the list of files of org/tiny is not that of a Hugging Face Hub: it is not a list of files: json: expected value at line 1 column 1; check HF_ENDPOINT");
    insta::assert_snapshot!(with(Faults { list: Some(r#"{"sha": "../..", "siblings": []}"#), ..Faults::default() }), @"zerorun: the response from ENDPOINT for the list of files of org/tiny is not that of a Hugging Face Hub: it names no commit; check HF_ENDPOINT");
    insta::assert_snapshot!(with(Faults { list: Some(r#"{"sha": "0123456789", "siblings": []}"#), ..Faults::default() }), @"zerorun: org/tiny has no config.json: it has no files; use the repository of a model for transformers");
    insta::assert_snapshot!(with(Faults { list: Some(r#"{"sha": "0123456789", "siblings": [{"rfilename": "config.json"}, {"rfilename": "model.gguf"}]}"#), ..Faults::default() }), @"zerorun: org/tiny has no model.safetensors or model.safetensors.index.json: it has model.gguf; use a repository with safetensors files, or convert this one, for example with AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)");
    let other = tempfile::tempdir().unwrap();
    server.set(Faults { etag: Some("../../../../.bashrc"), ..Faults::default() });
    insta::assert_snapshot!(refusal(&server, &other, NAME, &[]), @"zerorun: the response from ENDPOINT for config.json of org/tiny is not that of a Hugging Face Hub: it has no ETag that identifies the content; check HF_ENDPOINT");
    assert_eq!(std::fs::read_dir(other.path().join("hub/models--org--tiny")).unwrap().count(), 0);
}
