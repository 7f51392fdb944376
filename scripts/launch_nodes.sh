#!/usr/bin/env bash
# Start a command on several nodes: run this on each of them; `--help` says how.
set -euo pipefail
name=launch_nodes
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
    cat <<'EOF'
usage: scripts/launch_nodes.sh [OPTION ...] [--] COMMAND [ARGUMENT ...]

Run COMMAND on the ranks of several nodes. Start it on each node, with the same options but for the
node's rank, and within two minutes of each other (MEGATRON_ASYNC_JOIN_TIMEOUT_S):
  host-a$ scripts/launch_nodes.sh --nnodes 2 --node-rank 0 --master-addr host-a --tp 8 --pp 2 \
              examples/many_ranks.py --model ./my-llama
  host-b$ ... --node-rank 1 ...
Under SLURM nodes, ranks and the master are known:
  srun --nodes 2 --ntasks-per-node 1 scripts/launch_nodes.sh --tp 8 --dp 2 COMMAND ...

nodes, from options, else from the environment, else from SLURM:
  --nnodes N          (NNODES, SLURM_NNODES)
  --node-rank R       of this node, from 0 (NODE_RANK, SLURM_NODEID)
  --master-addr HOST  the node of rank 0, as the others reach it (MASTER_ADDR, SLURM's first node)
  --master-port PORT  free there (MASTER_PORT, else a number from SLURM_JOB_ID, else 29500)
MEGATRON_ASYNC_INTERFACE names the network interface (docs/ranks.md).

EOF
    size_usage
}

nnodes='' node_rank=''
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        -m) break ;;
        -*) take_option "$@"; shift "$taken" ;;
        *) break ;;
    esac
done
(($#)) || die "there is no COMMAND to run (see --help)"

nnodes=${nnodes:-${NNODES:-${SLURM_NNODES:-${SLURM_JOB_NUM_NODES:-}}}}
node_rank=${node_rank:-${NODE_RANK:-${SLURM_NODEID:-}}}
[[ -n $nnodes ]] || die "how many nodes are there? Give --nnodes N, or set NNODES"
positive --nnodes "$nnodes"
[[ -n $node_rank ]] || die "which node is this? Give --node-rank R (0 to $((nnodes - 1))), or set NODE_RANK"
[[ $node_rank =~ ^[0-9]{1,5}$ ]] && ((node_rank < nnodes)) || die \
    "--node-rank $node_rank: with $nnodes nodes it is one of 0 to $((nnodes - 1))"

master_addr=${master_addr:-${MASTER_ADDR:-}}
if [[ -z $master_addr && -n ${SLURM_JOB_NODELIST:-} ]] && command -v scontrol >/dev/null 2>&1; then
    master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
[[ -n $master_addr ]] || die "which node is the master? Give --master-addr HOST, or set MASTER_ADDR"
# Two jobs of SLURM may share a node, so they do not share a port.
port_of_job=$((${SLURM_JOB_ID:-0} ? 20000 + ${SLURM_JOB_ID:-0} % 10000 : 29500))
master_port=${master_port:-${MASTER_PORT:-$port_of_job}}
[[ $master_port =~ ^[0-9]{1,5}$ ]] && ((master_port > 0 && master_port < 65536)) || die \
    "--master-port $master_port: it is no port (1 to 65535)"

settle_sizes
launch --nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master_addr" \
    --master-port "$master_port" -- "$@"
