#!/bin/bash
# Runs one launcher on each host, which starts the ranks of that host. To start the job: sbatch FILE
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@CORES@
#SBATCH --mem=@SLURM_MEMORY@
# SIGTERM is sent 60 s before the time limit, which leaves time for a checkpoint.
#SBATCH --signal=TERM@60
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The launchers authenticate each other with this secret, so that no other job on the cluster can impersonate one of them.
: "${CANDLE_ZERO_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export CANDLE_ZERO_SECRET
# The index of the host comes from SLURM_NODEID.
exec srun --cpus-per-task=@CORES@ @LAUNCHER@ --master_addr "$first" @WORDS@
