#!/usr/bin/env python3
"""Measures training on two hosts and compares it with the prediction of `zerorun estimate --hosts`.

    cargo build --release --bins && cargo build --release --manifest-path examples/Cargo.toml --bin train_gpt
    scripts/fetch_mpi.sh target/mpi
    python3 scripts/cluster_figures.py [--mpi mpich|openmpi] [--ranks N] [--steps N] [--cable BITS_PER_SECOND,MICROSECONDS ...]

The hosts are network namespaces on this machine, each with N ranks and half of the cores, connected by the simulated cable of
scripts/cable.c. The script must be run as root, on an otherwise idle machine. The estimate starts from the step time on one host. To
measure it, two jobs run at the same time, one on each host, and the time of one of them is used. The network parameters are those
measured by `zerorun bench network`. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target" / "release"
HOSTS = ["czfa", "czfb"]
ALL_CORES = sorted(os.sched_getaffinity(0))
HALF = len(ALL_CORES) // 2
CORES = [",".join(map(str, cores)) for cores in [ALL_CORES[:HALF], ALL_CORES[HALF : 2 * HALF]]]
COMPRESSED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# For each setting: its name, its stage, and additional keys of zero_optimization.
SETTINGS = [
    ("stage 3", 3, {}),
    ("stage 3, int8 weights, int4 gradients", 3, COMPRESSED),
    ("stage 3, hpZ", 3, {"zero_hpz_partition_size": 2}),
    ("stage 3, hpZ, int8 weights, int4 gradients", 3, {"zero_hpz_partition_size": 2, **COMPRESSED}),
    ("stage 2", 2, {}),
    ("stage 2, int4 gradients", 2, {"zero_quantized_gradients": True}),
    ("stage 0", 0, {}),
]


def run(words, **more):
    return subprocess.run([str(word) for word in words], check=True, **more)


def environment(library):
    folder = ROOT / "target" / "mpi" / library
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": "/tmp",
        "RAYON_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self",
    }


class Cable:
    """Two hosts and the simulated cable between them."""

    def __init__(self, program, rate, delay, work):
        self.end()
        for host in HOSTS:
            run(["ip", "netns", "add", host])
        self.process = subprocess.Popen([program, *HOSTS, str(rate), str(delay)], stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline():
            sys.exit("the cable could not be created")
        for number, host in enumerate(HOSTS, 1):
            run(["ip", "-n", host, "link", "set", "lo", "up"])
            run(["ip", "-n", host, "address", "add", f"10.77.0.{number}/24", "dev", "cable"])
            run(["ip", "-n", host, "link", "set", "cable", "mtu", "65000", "up"])
        self.remote_shell = work / "reach"
        self.remote_shell.write_text(
            "#!/bin/sh\n"
            '[ "$1" = -x ] && shift\n'
            f"case $1 in 10.77.0.1) host={HOSTS[0]} cores={CORES[0]};; *) host={HOSTS[1]} cores={CORES[1]};; esac\n"
            "shift\n"
            'exec taskset -c $cores ip netns exec $host unshare -u sh -c "hostname $host; $*"\n'
        )
        self.remote_shell.chmod(0o755)
        time.sleep(3)

    @staticmethod
    def end():
        for host in HOSTS:
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-KILL", pid])
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.end()

    def launch_prefix(self, host):
        """Returns the command prefix that starts a program on the cores of a host."""
        return ["taskset", "-c", CORES[host], "ip", "netns", "exec", HOSTS[host], "unshare", "-u", "sh", "-c", f'hostname {HOSTS[host]}; exec "$@"', "sh"]

    def mpirun(self, library, ranks):
        """Returns the command prefix that starts this number of ranks on each host."""
        words = self.launch_prefix(0) + [str(ROOT / "target" / "mpi" / library / "bin" / "mpirun")]
        host_list, rank_count = f"10.77.0.1:{ranks},10.77.0.2:{ranks}", str(2 * ranks)
        if library == "mpich":
            return words + ["-launcher", "ssh", "-launcher-exec", self.remote_shell, "-hosts", host_list, "-iface", "cable", "-n", rank_count]
        words += ["--allow-run-as-root", "--bind-to", "none", "--host", host_list, "--prefix", ROOT / "target" / "mpi" / library]
        words += ["--mca", "plm", "ssh", "--mca", "plm_rsh_agent", self.remote_shell, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        words += ["--mca", "btl_tcp_if_include", "10.77.0.0/24", "--prtemca", "oob_tcp_if_include", "10.77.0.0/24"]
        return words + ["-n", rank_count]


def training(config, metrics, steps):
    words = [RELEASE / "train_gpt", "--model", "mini", "--steps", steps, "--sample", "0"]
    return [*words, "--ds_config", config, "--metrics", metrics]


def step_of(metrics, ignored=3):
    """Returns the median seconds of a step, ignoring the first ones, and the bytes between hosts per step, from the summary."""
    lines = [json.loads(line) for line in Path(metrics).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    phases = ["forward_ms", "backward_ms", "step_ms"]
    seconds = [sum(line[phase] for phase in phases) / 1e3 for line in steps[ignored:]]
    kinds = lines[-1]["comm"]["kinds"]
    between = sum(kind["between_hosts_bytes"] for kind in kinds.values())
    return statistics.median(seconds), between / len(steps)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mpi", default="mpich")
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--cable", nargs="+", default=["1e9,1000"])
    flags = arguments.parse_args()
    env = environment(flags.mpi)
    options = {"env": env, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        program = work / "cable"
        run(["cc", "-O2", "-pthread", "-o", program, ROOT / "scripts" / "cable.c"])
        configs = {}
        for name, stage, more in SETTINGS:
            # hpZ keeps a second copy of the weights in each group of ranks. Here, the group must consist of the ranks of one host.
            if more.get("zero_hpz_partition_size", flags.ranks) != flags.ranks:
                continue
            config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
            config["zero_optimization"].update(more)
            configs[name] = work / f"{len(configs)}.json"
            configs[name].write_text(json.dumps(config))
        one_host_metrics = {}
        for cable in flags.cable:
            rate, delay = cable.split(",")
            hosts = Cable(program, rate, delay, work)
            try:
                bench = run([*hosts.mpirun(flags.mpi, flags.ranks), RELEASE / "zerorun", "bench", "network", "--json"],
                            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
                bench = json.loads(bench.stdout.splitlines()[-1])
                speed = {key: bench[key]["into_a_host"] / bench[key]["seconds"] for key in ["plain", "reduce_scatter", "all_gather"]}
                share = [f"{100 * speed[key] / speed['plain']:.0f} %" for key in ["reduce_scatter", "all_gather"]]
                one_way = bench["one_way_s"]
                print(f"{float(rate) / 1e9:g} Gbit/s, {float(delay) / 1e3:g} ms: MPI's messages {speed['plain'] / 1e6:.1f} MB/s, one way "
                      f"{one_way * 1e3:.2f} ms, reduce-scatter {share[0]} and all-gather {share[1]} of plain messages, {100 * bench['busy']:.0f} % of the processors busy\n\n"
                      "| setting | on one host | received per rank and step | measured | predicted | difference |\n| --- | --- | --- | --- | --- | --- |",
                      flush=True)
                for name, config in configs.items():
                    if name not in one_host_metrics:
                        one_host_metrics[name] = work / f"{config.stem}-alone.jsonl"
                        jobs = []
                        for host in range(2):
                            metrics = one_host_metrics[name] if host == 0 else work / "other.jsonl"
                            metrics.unlink(missing_ok=True)
                            words = [*hosts.launch_prefix(host), RELEASE / "zerorun", "-n", str(flags.ranks), *training(config, metrics, flags.steps)]
                            jobs.append(subprocess.Popen([str(word) for word in words], env=env, stdin=subprocess.DEVNULL,
                                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                        if any(job.wait() for job in jobs):
                            sys.exit(f"{name}: a job on one host failed")
                    metrics = work / "both.jsonl"
                    metrics.unlink(missing_ok=True)
                    run([*hosts.mpirun(flags.mpi, flags.ranks), *training(config, metrics, flags.steps)], **options)
                    measured, between = step_of(metrics)
                    words = [RELEASE / "zerorun", "estimate", "--model", "mini", "--ds_config", config, "-n", str(2 * flags.ranks), "--hosts", "2",
                             "--network", f"{speed['plain'] / 1e6:.3f}MB/s,{one_way * 1e6:.1f}us,{100 * bench['busy']:.1f}%", "--measured", one_host_metrics[name], "--json"]
                    estimate = json.loads(run(words, capture_output=True, text=True).stdout)["across_hosts"]["forecast"]
                    one_host, predicted = step_of(one_host_metrics[name])[0], estimate["step_s"]
                    print(f"| {name} | {one_host * 1e3:.0f} ms | {between / 1e6:.2f} MB | {measured * 1e3:.0f} ms | {predicted * 1e3:.0f} ms "
                          f"| {100 * (predicted / measured - 1):+.0f} % |", flush=True)
            finally:
                hosts.close()


if __name__ == "__main__":
    main()
