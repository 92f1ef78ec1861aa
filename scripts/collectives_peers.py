#!/usr/bin/env python3
"""Measures collectives of MPI libraries and of gloo between two processes on this host, for comparison with
`cargo bench --bench collectives`.

    scripts/fetch_mpi.sh target/mpi
    python3 scripts/collectives_peers.py [PYTHON_WITH_TORCH]

Prints a line for each peer and collective: the rate in GB/s for a buffer of 64 MiB, and the time in microseconds of an all-reduce of
1 KiB.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GLOO = """
import os, sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
BYTES = 64 << 20
full, shard = torch.ones(BYTES // 4), torch.ones(BYTES // 8)
def median(run, rounds):
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        run()
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(elapsed.item())
    return sorted(times)[rounds // 2]
calls = {
    "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
    "all-gather": lambda: dist.all_gather_into_tensor(full, shard),
    "all-reduce": lambda: dist.all_reduce(full),
}
for name, run in calls.items():
    try:
        seconds = median(run, 9)
    except RuntimeError as error:
        rate = str(error).splitlines()[0]
    else:
        rate = f"{BYTES / seconds / 1e9:.2f} GB/s"
    if rank == 0:
        print(name, rate)
    full.fill_(1), shard.fill_(1)
short = torch.ones(256)
seconds = median(lambda: dist.all_reduce(short), 2000)
if rank == 0:
    print(f"all-reduce of 1 KiB {seconds * 1e6:.1f} us")
"""


def mpi(name, folder, work):
    """Returns the output lines of the collectives of an MPI library."""
    program = work / name
    # cc is called directly, because the wheel's compiler wrapper uses the compiler that it was built with.
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(work)}
    flags = ["-O2", f"-I{folder / 'include'}", f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-lmpi"]
    source = str(ROOT / "scripts" / "mpi_calls.c")
    subprocess.run(["cc", "-o", str(program), source, *flags], check=True, env=environment)
    launch = [str(folder / "bin" / "mpirun")]
    if name == "openmpi":
        launch += ["--allow-run-as-root", "--bind-to", "none"]
    run = subprocess.run([*launch, "-n", "2", str(program)], check=True, env=environment, capture_output=True, text=True)
    return run.stdout.splitlines()


def gloo(python, work):
    """Returns the output lines of gloo in torch.distributed."""
    ranks = [[python, "-c", GLOO, str(rank), str(work / "meeting")] for rank in range(2)]
    processes = [subprocess.Popen(rank, stdout=subprocess.PIPE, text=True) for rank in ranks]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("the ranks of gloo failed")
    return outputs[0].splitlines()


def main():
    libraries = ROOT / "target" / "mpi"
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        for name in ["openmpi", "mpich"]:
            folder = libraries / name
            if not (folder / "bin" / "mpirun").exists():
                print(f"{name}: not in {libraries}; scripts/fetch_mpi.sh fetches it")
                continue
            for line in mpi(name, folder, work):
                print(f"{name}: {line}")
        if len(sys.argv) > 1:
            for line in gloo(sys.argv[1], work):
                print(f"gloo: {line}")


if __name__ == "__main__":
    main()
