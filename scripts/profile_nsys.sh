#!/usr/bin/env bash
# Profile a command of the engine with Nsight Systems; `--help` says how.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'EOF'
usage: scripts/profile_nsys.sh [-o REPORT] [--whole-run] [--] [COMMAND ...]

Run COMMAND under Nsight Systems and write REPORT.nsys-rep, to be opened in nsys-ui. The trace has
the kernels of graph replays one by one, CUDA calls, blocking system calls, and the engine's steps and
stages (Decode step 12 rows 64, prepare_step, launch_step, resolve, ...) as NVTX ranges: COMMAND runs
with MEGATRON_ASYNC_NVTX=1, which is the engine's option --nvtx. docs/observing.md names the ranges, and
the kernels that end a captured step's parts.

COMMAND defaults to one steady decode:
  scripts/benchmarks/benchmark_engine.py steady --models dummy:smollm2-135m --batch-sizes 64 --lookahead 1 --steps 20
Give another one as you would run it; a script of this folder or megatron-async runs in .venv:
  scripts/profile_nsys.sh -o churn scripts/benchmarks/benchmark_engine.py churn --lookahead 1
  scripts/profile_nsys.sh megatron-async generate --model smollm2 --prompt "Hello"

On several ranks each has its own nsys and its own report, REPORT-rank0.nsys-rep and so on; the launch
scripts start them so:
  scripts/launch_node.sh --tp 2 --nsys tp2 scripts/benchmarks/benchmark_engine.py ranks --model dummy:llama-3.1-8b
In nsys-ui they can be opened together ("New multi-report view").

  -o REPORT     report file without its ending (default: nsys_DATE_TIME)
  --whole-run   trace all of it, loading and capturing too. Otherwise the loads steady,
                churn and ranks of benchmark_engine.py are traced in their measured steps only,
                one report for each measurement; other commands mark no steps and are always
                traced whole.
  --dry-run     print the nsys command, run nothing
  -h, --help    this text

The nsys program is looked for on PATH, then in /usr/local/cuda/bin and /opt/nvidia/nsight-systems;
set NSYS to use another one.
EOF
}

die() { printf 'profile_nsys: %s\n' "$@" >&2; exit 2; }

report=nsys_$(date +%Y%m%d_%H%M%S)
whole=false dry=false
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        -o | --output)
            (($# > 1)) || die "$1 needs a file name (see --help)"
            report=${2%.nsys-rep}
            shift
            ;;
        --whole-run) whole=true ;;
        --dry-run) dry=true ;;
        --) shift; break ;;
        -*) die "unknown option $1 (see --help)" ;;
        *) break ;;
    esac
    shift
done
(($#)) || set -- scripts/benchmarks/benchmark_engine.py steady --models dummy:smollm2-135m --batch-sizes 64 \
    --lookahead 1 --steps 20

find_nsys() {
    local candidate
    for candidate in "${NSYS:-nsys}" /usr/local/cuda/bin/nsys \
        /opt/nvidia/nsight-systems/*/bin/nsys /opt/nvidia/nsight-systems-cli/*/bin/nsys; do
        if command -v "$candidate" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
        [[ -z ${NSYS:-} ]] || break
    done
    return 1
}

python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
command=("$@")
case $1 in
    *.py) command=("$python" "$@") ;;
    megatron-async) command=("$python" -m megatron_async "${@:2}") ;;
esac

trace=cuda,nvtx,osrt
if [[ -n ${RANK:-} ]]; then
    # A rank under torchrun. Many processes' system calls would be more than one can read.
    report=$report-rank$RANK trace=cuda,nvtx
fi
options=(
    --output="$report" --force-overwrite=true
    # By node: else a graph's replay is one bar without the names of its kernels.
    --trace="$trace" --cuda-graph-trace=node --env-var=MEGATRON_ASYNC_NVTX=1
    # Call stacks of the CPU are not wanted here, and taking them slows the engine's thread.
    --sample=none --cpuctxsw=none
)
if ! $whole && [[ $1 == *benchmark_engine.py && ${2:-} =~ ^(steady|churn|ranks)$ ]]; then
    # The scripts call cudaProfilerStart and cudaProfilerStop around what they measure.
    options+=(--capture-range=cudaProfilerApi --capture-range-end=repeat)
fi

if $dry; then
    printf '%q ' "${NSYS:-nsys}" profile "${options[@]}" "${command[@]}"
    echo
    exit 0
fi
nsys=$(find_nsys) || die "Nsight Systems (${NSYS:-nsys}) is not installed, or not on PATH. It comes with the CUDA toolkit,
or alone (package nsight-systems-cli) from https://developer.nvidia.com/nsight-systems.
Without it, scripts/profile_torch.py reports the GPU's idle time between steps and its kernels."
"$nsys" profile "${options[@]}" "${command[@]}"
ls -l "$report"*.nsys-rep
printf 'summary: %s stats --report cuda_gpu_kern_sum --report nvtx_sum FILE.nsys-rep\n' "$nsys"
