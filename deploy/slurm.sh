#!/bin/bash
# One launcher on each host, which starts that host's ranks: sbatch FILE
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@CORES@
#SBATCH --mem=@SLURM_MEMORY@
# Time for a checkpoint before the end.
#SBATCH --signal=TERM@60
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# By which the launchers know one another: no other job of the cluster can take the place of one.
: "${CANDLE_ZERO_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export CANDLE_ZERO_SECRET
# The number of the host comes from SLURM_NODEID.
exec srun --cpus-per-task=@CORES@ @LAUNCHER@ --master_addr "$first" @WORDS@
