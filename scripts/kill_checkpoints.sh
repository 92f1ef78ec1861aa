#!/bin/sh
# Kills a job at random moments, and each time loads the checkpoint that the job left. The job saves after every step. The number of
# kills is the first argument (default 200). Then kills ranks of a job that restarts itself, and compares its result with that of
# an uninterrupted job. The number of kills is the second argument (default 10).
set -eu
cd "$(dirname "$0")/.."
CHECKPOINT_KILLS="${1:-200}" RESTART_KILLS="${2:-10}" exec cargo test --release --test checkpoint -- --nocapture \
    faults::a_job_
