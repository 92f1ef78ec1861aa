//! The default data set: this project's own sources and documents, inside the library, so that a first training run
//! needs no file.

/// Reads each file at compile time. One path per line, sorted; a test compares the list with the work tree.
macro_rules! embed {
    ($($path:literal,)*) => {
        &[$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $path)))),*]
    };
}

/// Path and text of every embedded file.
#[rustfmt::skip]
pub(super) const FILES: &[(&str, &str)] = embed! {
    // begin of the list
    "README.md",
    "docs/config.md",
    "docs/cuda.md",
    "docs/decisions.md",
    "docs/launcher.md",
    "docs/offload.md",
    "docs/performance.md",
    "src/bin/zerorun.rs",
    "src/checkpoint/consolidate.rs",
    "src/checkpoint/deepspeed/archive.rs",
    "src/checkpoint/deepspeed/folder.rs",
    "src/checkpoint/deepspeed/mod.rs",
    "src/checkpoint/deepspeed/model_file.rs",
    "src/checkpoint/deepspeed/optim_file.rs",
    "src/checkpoint/deepspeed/pickle.rs",
    "src/checkpoint/deepspeed/pieces.rs",
    "src/checkpoint/deepspeed/tensor.rs",
    "src/checkpoint/deepspeed/tests.rs",
    "src/checkpoint/deepspeed/value.rs",
    "src/checkpoint/disk.rs",
    "src/checkpoint/examine.rs",
    "src/checkpoint/folder.rs",
    "src/checkpoint/hugging_face.rs",
    "src/checkpoint/import.rs",
    "src/checkpoint/layout.rs",
    "src/checkpoint/load.rs",
    "src/checkpoint/manifest.rs",
    "src/checkpoint/mod.rs",
    "src/checkpoint/rank_file.rs",
    "src/checkpoint/save.rs",
    "src/cli.rs",
    "src/comm/collectives.rs",
    "src/comm/counters.rs",
    "src/comm/exchange.rs",
    "src/comm/fingerprint.rs",
    "src/comm/mod.rs",
    "src/comm/queue.rs",
    "src/comm/shm.rs",
    "src/comm/solo.rs",
    "src/comm/stream.rs",
    "src/comm/threads.rs",
    "src/config/auto.rs",
    "src/config/batch.rs",
    "src/config/json.rs",
    "src/config/json/tests.rs",
    "src/config/keys.rs",
    "src/config/keys/core.rs",
    "src/config/keys/optim.rs",
    "src/config/keys/other.rs",
    "src/config/keys/zero.rs",
    "src/config/mod.rs",
    "src/config/nearest.rs",
    "src/config/offload.rs",
    "src/config/optim.rs",
    "src/config/print.rs",
    "src/config/problem.rs",
    "src/config/reference.rs",
    "src/config/resolve.rs",
    "src/config/resolved.rs",
    "src/config/scheduler.rs",
    "src/config/schema.rs",
    "src/config/source.rs",
    "src/config/value.rs",
    "src/config/walk.rs",
    "src/data/embedded.rs",
    "src/data/loader.rs",
    "src/data/mod.rs",
    "src/data/sampler.rs",
    "src/data/tokens.rs",
    "src/device.rs",
    "src/engine.rs",
    "src/error.rs",
    "src/estimate/deepspeed.rs",
    "src/estimate/files.rs",
    "src/estimate/gradients.rs",
    "src/estimate/mod.rs",
    "src/estimate/paper.rs",
    "src/estimate/rehearsal.rs",
    "src/estimate/shapes.rs",
    "src/estimate/traffic.rs",
    "src/files.rs",
    "src/graph/grad.rs",
    "src/graph/mod.rs",
    "src/graph/node.rs",
    "src/graph/prepared.rs",
    "src/graph/record.rs",
    "src/kernels/activation.rs",
    "src/kernels/add.rs",
    "src/kernels/attention/avx512/bf16.rs",
    "src/kernels/attention/avx512/mod.rs",
    "src/kernels/attention/avx512/product.rs",
    "src/kernels/attention/backward.rs",
    "src/kernels/attention/forward.rs",
    "src/kernels/attention/mod.rs",
    "src/kernels/attention/portable.rs",
    "src/kernels/attention/strided.rs",
    "src/kernels/attention/tests.rs",
    "src/kernels/attention/tiles.rs",
    "src/kernels/cross_entropy.rs",
    "src/kernels/dropout.rs",
    "src/kernels/element.rs",
    "src/kernels/embedding.rs",
    "src/kernels/gemm/avx512/blocked.rs",
    "src/kernels/gemm/avx512/finish.rs",
    "src/kernels/gemm/avx512/kernel.rs",
    "src/kernels/gemm/avx512/mod.rs",
    "src/kernels/gemm/avx512/pack.rs",
    "src/kernels/gemm/avx512/panels.rs",
    "src/kernels/gemm/column_sums.rs",
    "src/kernels/gemm/epilogue.rs",
    "src/kernels/gemm/matrix.rs",
    "src/kernels/gemm/mod.rs",
    "src/kernels/gemm/portable.rs",
    "src/kernels/gemm/scratch.rs",
    "src/kernels/gemm/tests.rs",
    "src/kernels/math.rs",
    "src/kernels/mod.rs",
    "src/kernels/norm.rs",
    "src/kernels/par.rs",
    "src/kernels/rope.rs",
    "src/kernels/rows.rs",
    "src/kernels/simd.rs",
    "src/kernels/wide.rs",
    "src/launch/args.rs",
    "src/launch/bench.rs",
    "src/launch/build.rs",
    "src/launch/check.rs",
    "src/launch/consolidate.rs",
    "src/launch/discover.rs",
    "src/launch/estimate.rs",
    "src/launch/frontmatter.rs",
    "src/launch/import.rs",
    "src/launch/inspect.rs",
    "src/launch/machine.rs",
    "src/launch/mod.rs",
    "src/launch/output.rs",
    "src/launch/package.rs",
    "src/launch/picture.rs",
    "src/launch/ranks.rs",
    "src/launch/report.rs",
    "src/launch/restarts.rs",
    "src/launch/schedule.rs",
    "src/launch/schema.rs",
    "src/launch/script.rs",
    "src/launch/signals.rs",
    "src/launch/sizes.rs",
    "src/launch/tail.rs",
    "src/launch/tools.rs",
    "src/launch/tune/experiment.rs",
    "src/launch/tune/mod.rs",
    "src/launch/tune/record.rs",
    "src/launch/tune/settings.rs",
    "src/launch/tune/space.rs",
    "src/layout/bucket.rs",
    "src/layout/deepspeed.rs",
    "src/layout/mod.rs",
    "src/layout/partition.rs",
    "src/layout/shard.rs",
    "src/layout/sharing.rs",
    "src/layout/stage.rs",
    "src/lib.rs",
    "src/memory.rs",
    "src/models/config.rs",
    "src/models/gpt.rs",
    "src/models/gpt_config.rs",
    "src/models/language_model.rs",
    "src/models/llama.rs",
    "src/models/llama_config.rs",
    "src/models/mod.rs",
    "src/models/sampling.rs",
    "src/monitor/memory.rs",
    "src/monitor/metrics.rs",
    "src/monitor/mod.rs",
    "src/monitor/progress.rs",
    "src/nn/activation.rs",
    "src/nn/attention.rs",
    "src/nn/composed.rs",
    "src/nn/cross_entropy.rs",
    "src/nn/dropout.rs",
    "src/nn/element.rs",
    "src/nn/embedding.rs",
    "src/nn/linear.rs",
    "src/nn/mod.rs",
    "src/nn/norm.rs",
    "src/nn/rotary.rs",
    "src/nn/sum.rs",
    "src/offload/access.rs",
    "src/offload/aligned.rs",
    "src/offload/arena.rs",
    "src/offload/bench.rs",
    "src/offload/folder.rs",
    "src/offload/io.rs",
    "src/offload/mod.rs",
    "src/offload/pipeline.rs",
    "src/offload/report.rs",
    "src/offload/spill.rs",
    "src/offload/store.rs",
    "src/optim/adagrad.rs",
    "src/optim/adam.rs",
    "src/optim/chunks.rs",
    "src/optim/lamb.rs",
    "src/optim/lion.rs",
    "src/optim/mod.rs",
    "src/optim/schedule.rs",
    "src/optim/schedule/cycle.rs",
    "src/optim/schedule/warmup.rs",
    "src/optim/sgd.rs",
    "src/param/capture.rs",
    "src/param/init.rs",
    "src/param/mod.rs",
    "src/param/registry.rs",
    "src/param/residency.rs",
    "src/param/source.rs",
    "src/precision/cast.rs",
    "src/precision/flat.rs",
    "src/precision/mod.rs",
    "src/precision/norm.rs",
    "src/precision/pages.rs",
    "src/precision/scaler.rs",
    "src/zero/core.rs",
    "src/zero/export.rs",
    "src/zero/gather.rs",
    "src/zero/gradients.rs",
    "src/zero/kept_input.rs",
    "src/zero/mod.rs",
    "src/zero/parcel.rs",
    "src/zero/share.rs",
    "src/zero/step.rs",
    "src/zero/sub_group.rs",
    "src/zero/trace.rs",
    "src/zero/unit.rs",
    // end of the list
};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const THIS_FILE: &str = "src/data/embedded.rs";
    const BEGIN: &str = "    // begin of the list\n";
    const END: &str = "    // end of the list\n";

    /// Collects the files with extension `ext` below `dir`, as paths relative to `root`.
    fn collect(root: &Path, dir: &Path, ext: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(root, &path, ext, found);
            } else if path.extension().is_some_and(|e| e == ext) {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/"));
            }
        }
    }

    /// With `UPDATE_EMBEDDED=1` in the environment the test mends the list.
    #[test]
    fn the_list_names_every_source_and_document() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut expected = vec![];
        collect(root, &root.join("src"), "rs", &mut expected);
        if root.join("docs").is_dir() {
            collect(root, &root.join("docs"), "md", &mut expected);
        }
        if root.join("README.md").is_file() {
            expected.push("README.md".into());
        }
        expected.sort();
        let listed: Vec<&str> = FILES.iter().map(|(path, _)| *path).collect();
        if std::env::var_os("UPDATE_EMBEDDED").is_some() && listed != expected {
            let text = fs::read_to_string(root.join(THIS_FILE)).unwrap();
            let (head, rest) = text.split_once(BEGIN).unwrap();
            let (_, tail) = rest.split_once(END).unwrap();
            let list: String = expected.iter().map(|path| format!("    {path:?},\n")).collect();
            fs::write(root.join(THIS_FILE), [head, BEGIN, &list, END, tail].concat()).unwrap();
            return;
        }
        assert_eq!(listed, expected, "run this test with UPDATE_EMBEDDED=1 to rewrite the list");
    }
}
