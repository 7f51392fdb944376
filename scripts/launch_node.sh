#!/usr/bin/env bash
# Start a command on several ranks of this machine; `--help` says how.
set -euo pipefail
name=launch_node
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
    cat <<'EOF'
usage: scripts/launch_node.sh [OPTION ...] [--] COMMAND [ARGUMENT ...]

Run COMMAND on several ranks of this machine, one a GPU, or on CPUs where there is none:
  scripts/launch_node.sh --tp 2 examples/many_ranks.py --model smollm2
  scripts/launch_node.sh --pp 2 --dp 2 megatron-async generate --model dummy:tiny --prompt "1 2 3"
  scripts/launch_node.sh -m megatron_async replica ./my-llama     # one model over all GPUs
Several machines: scripts/launch_nodes.sh.

EOF
    size_usage
}

while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --nnodes | --node-rank | --master-*) die "$1: for several nodes there is scripts/launch_nodes.sh" ;;
        --) shift; break ;;
        -m) break ;;
        -*) take_option "$@"; shift "$taken" ;;
        *) break ;;
    esac
done
(($#)) || die "there is no COMMAND to run (see --help)"
settle_sizes
launch --standalone -- "$@"
