#!/bin/sh
# Kills a job that saves in every step, 200 times or as often as the first argument says, at random moments, and loads
# what it left each time.
set -eu
cd "$(dirname "$0")/.."
CHECKPOINT_KILLS="${1:-200}" exec cargo test --release --test checkpoint_faults -- --nocapture --exact \
    a_job_killed_at_any_moment_leaves_a_whole_checkpoint_at_most_one_save_old
