#!/bin/sh
# Kills a job that saves in every step, 200 times or as often as the first argument says, at random moments, and loads
# what it left each time. Then kills ranks of a job that restarts itself, 10 times or as the second argument says, and
# compares its end with that of a job that was left alone.
set -eu
cd "$(dirname "$0")/.."
CHECKPOINT_KILLS="${1:-200}" RESTART_KILLS="${2:-10}" exec cargo test --release --test checkpoint -- --nocapture \
    faults::a_job_
