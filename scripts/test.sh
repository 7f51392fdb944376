#!/usr/bin/env bash
# Set up, then every check a change must pass: lints, types, tests on the CPU.
# Arguments go to pytest:  bash scripts/test.sh tests/unit_tests/test_cli.py -k help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # compiled modules halve the time that torch and Megatron-Core import
export PATH=$PWD/.venv/bin:$PATH

status=0
run() {
    printf '\n== %s\n' "$*"
    "$@" || { status=1; printf '== FAILED: %s\n' "$*"; }
}
run ruff check .
run mypy
run python scripts/lint_no_sync.py

# One thread each: the models under test are too small to share a matrix product. A worker more than
# cores, because tests of several ranks wait for each other a lot.
export OMP_NUM_THREADS=1
workers=(-n 3 --dist worksteal) # tests take from milliseconds to half a minute
for argument in "$@"; do
    [[ $argument == -n* || $argument == --pdb || $argument == -s ]] && workers=()
done
run python -m pytest "${workers[@]}" "$@"
exit $status
