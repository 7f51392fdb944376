#!/usr/bin/env bash
# Set up, then every check a change must pass: lints, types, tests on the CPU.
#
#   bash scripts/test.sh                                            everything
#   bash scripts/test.sh --quick                                    lints, types, and the tests in `quick`
#   bash scripts/test.sh --gpus                                     the tests of GPUs, and nothing else
#   bash scripts/test.sh tests/unit_tests/cli/test_cli.py -k help   lints, types, and these tests
#
# Times on 2 cores: everything 10 to 20 minutes, by the host, --quick under 4. --quick is for between
# two edits; before a change is handed in, all must pass. Other arguments go to pytest, after --quick
# and --gpus too (`--quick -x`). `--gpus` is for machines with GPUs: a worker has its own, as many as
# its tests need (tests/support/cards.py), and tests that need more than there are say so and are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # compiled modules halve the time that torch and Megatron-Core import
export PATH=$PWD/.venv/bin:$PATH

# What a change touches most often: the books and the loop, what requests ask for and how they end,
# the command line, and decisions of serving. Left out: many ranks, kernels, rollback, fuzzing,
# checkpoints, scripts. No file of it takes more than 45 s of CPU time, all of them about 4 minutes.
quick=(
    tests/unit_tests/cli
    tests/unit_tests/planning
    tests/unit_tests/device_state
    tests/unit_tests/devices
    tests/unit_tests/engine
    tests/unit_tests/requests
    tests/unit_tests/rollback
    tests/unit_tests/scripts/test_lint_no_sync.py
    tests/unit_tests/serving
    tests/unit_tests/lab
    tests/unit_tests/text
    tests/unit_tests/test_*.py
    tests/functional_tests/lifecycle/test_closing.py
    tests/functional_tests/lifecycle/test_api.py
    tests/functional_tests/features/test_bad_features.py
    tests/functional_tests/faults/test_bad_input.py
    tests/functional_tests/faults/test_fault_reuse.py
    tests/functional_tests/features/test_log_probs.py
    tests/functional_tests/lifecycle/test_overlap.py
    tests/functional_tests/lifecycle/test_parity.py
    tests/functional_tests/lifecycle/test_pause_suspend.py
    tests/functional_tests/lifecycle/test_streaming.py
)
tests=() cards=0
if [[ ${1:-} == --quick ]]; then
    shift
    tests=("${quick[@]}")
elif [[ ${1:-} == --gpus ]]; then
    shift
    cards=$(python -c 'import torch; print(torch.cuda.device_count())')
    ((cards)) || { echo "torch finds no GPU here; without --gpus this script runs the CPU's tests."; exit 1; }
fi

failed=()
run() {
    printf '\n== %s\n' "$*"
    "$@" || { failed+=("$*"); printf '== FAILED: %s\n' "$*"; }
}
finish() { # last, so that a failure of a lint is seen below the tests
    ((${#failed[@]})) || exit 0
    printf '== FAILED: %s\n' "${failed[@]}"
    exit 1
}
# Once for all workers and ranks, which would compile them at the same time; the lints, which need
# one core, run beside it.
compile=(python -c 'from megatron_async.ops.cpu.compile_loops import compile_all; compile_all(has_float64=True)')
"${compile[@]}" &
compiling=$!
compiled_loops() { wait $compiling; }
if ((!cards)); then
    run ruff check .
    run ruff format --check megatron_async scripts tests examples
    run mypy
    run python scripts/lint_no_sync.py
fi
run compiled_loops

# One thread each: the models under test are too small to share a matrix product. No more workers
# than cores: an engine and its CPU device hand work to each other all the time, and where threads
# wait for a core at each hand-over, a test takes four times as long (measured).
export OMP_NUM_THREADS=1
is_alone=false
for argument in "$@"; do
    [[ $argument == -n* || $argument == --pdb || $argument == -s ]] && is_alone=true
done
tests_by() { # workers, arguments
    local workers=(-n "$1" --dist worksteal) # tests take from milliseconds to half a minute
    $is_alone && workers=()
    python -m pytest "${workers[@]}" "${@:2}"
}
if ((!cards)); then
    run tests_by 2 "${tests[@]}" "$@"
    finish
fi
gpu_tests() { tests_by "$@" || (($? == 5)); } # 5: none of what was asked for needs so many cards
run gpu_tests $((cards > 1 ? cards : 2)) --cards "1/$cards" "$@" # on one card two share it
for each in 2 4; do
    ((each <= cards)) && run gpu_tests $((cards / each)) --cards "$each/$cards" "$@"
done
finish
