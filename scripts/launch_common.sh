# What launch_node.sh and launch_nodes.sh share; sourced by them, with `name` set.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() { printf '%s: %s\n' "$name" "$@" >&2; exit 2; }

tp='' pp='' dp='' ep='' nproc='' nsys='' log_dir='' cpu=false dry=false
nnodes=1 node_rank=0 master_addr='' master_port=''

size_usage() {
    cat <<'EOT'
sizes, by Megatron-Core's names; what is not given is found so that ranks = tp x pp x dp:
  --tp N         tensor-parallel ranks of a model   (passed on as --tensor-model-parallel-size N)
  --pp N         pipeline stages of a model         (--pipeline-model-parallel-size N)
  --dp N         data-parallel replicas             (default: --ep, or what is left of the ranks)
  --ep N         replicas that share the experts    (--expert-model-parallel-size N); divides dp
  --nproc N      ranks of a node (default: tp x pp x dp, or a rank a GPU). Alone, without a size, it
                 passes no option on: for commands that know their sizes
further options:
  --cpu          hide the GPUs from the ranks
  --nsys REPORT  run each rank under Nsight Systems: REPORT-rank0.nsys-rep, REPORT-rank1... (see
                 scripts/profile_nsys.sh); with --nsys-whole-run, loading and capturing too
  --log-dir DIR  keep each rank's output in a file, too
  --dry-run      print the command, run nothing
  -h, --help     this text
COMMAND is a script (examples/many_ranks.py ...), a module (-m PACKAGE ...), megatron-async ...,
or any program. Its exit status is that of the rank that failed first.
EOT
}

# Take one option and its value; sets `taken` to how many words that were.
nsys_options=()
take_option() {
    taken=2
    case $1 in
        --cpu | --dry-run | --nsys-whole-run) ;;
        *) [[ $# -gt 1 && $2 != -* ]] || die "$1 needs a value, or is unknown (see --help)" ;;
    esac
    case $1 in
        --tp | --pp | --dp | --ep | --nproc | --nnodes) positive "$1" "$2" ;;
    esac
    case $1 in
        --tp) tp=$2 ;;
        --pp) pp=$2 ;;
        --dp) dp=$2 ;;
        --ep) ep=$2 ;;
        --nproc) nproc=$2 ;;
        --nnodes) nnodes=$2 ;;
        --node-rank) node_rank=$2 ;;
        --master-addr) master_addr=$2 ;;
        --master-port) master_port=$2 ;;
        --nsys) nsys=$2 ;;
        --log-dir) log_dir=$2 ;;
        --nsys-whole-run) nsys_options=(--whole-run) taken=1 ;;
        --cpu) cpu=true taken=1 ;;
        --dry-run) dry=true taken=1 ;;
        *) die "unknown option $1 (see --help)" ;;
    esac
}

positive() {
    [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || die "$1 $2: it must be an integer of at least 1"
}

count_gpus() {
    if $cpu; then
        echo 0
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null 2>&1; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# Fill in what was not given, and check that it fits. Sets world, and sizes that are passed on.
settle_sizes() {
    local gpus known='' given="$tp$pp$dp$ep"
    gpus=$(count_gpus)
    if [[ -n $nproc ]]; then
        known=given
    elif ((gpus > 0)) && { [[ -z $tp ]] || ((nnodes > 1)); }; then
        nproc=$gpus known=gpus
    fi
    sizes=()
    if [[ -n $known && ($known == gpus || -n $given) ]]; then
        world=$((nnodes * nproc))
        fill_sizes
    elif [[ -n $known ]]; then
        world=$((nnodes * nproc))
    else
        tp=${tp:-1} pp=${pp:-1} ep=${ep:-1}
        dp=${dp:-$ep}
        world=$((tp * pp * dp))
        ((world % nnodes == 0)) || die \
            "tp $tp x pp $pp x dp $dp = $world ranks cannot be spread evenly over $nnodes nodes"
        nproc=$((world / nnodes))
    fi
    if [[ -n $tp ]]; then
        ((tp * pp * dp == world)) || die \
            "tp $tp x pp $pp x dp $dp = $((tp * pp * dp)), but there are $world ranks ($nnodes x $nproc): change a size, or --nproc"
        ((dp % ep == 0)) || die \
            "--ep $ep does not divide the $dp data-parallel replicas that experts are spread over: change --ep or --dp"
        ((tp == 1)) || sizes+=(--tensor-model-parallel-size "$tp")
        ((pp == 1)) || sizes+=(--pipeline-model-parallel-size "$pp")
        ((ep == 1)) || sizes+=(--expert-model-parallel-size "$ep")
    fi
    ((gpus == 0 || nproc <= gpus)) || die \
        "$nproc ranks on a node with $gpus GPUs: each needs one; take smaller sizes, more nodes (scripts/launch_nodes.sh), or --cpu"
    $dry || ((tp <= nproc)) || printf '%s: note: a tensor-parallel group spans nodes, whose network is slower\n' "$name" >&2
}

# Sizes that were not given, for `world` ranks: a model as wide as a node, then replicas.
fill_sizes() {
    pp=${pp:-1} ep=${ep:-1}
    local replicas=${dp:-$ep}
    if [[ -z $tp ]]; then
        ((world % (pp * replicas) == 0)) || die \
            "$world ranks ($nnodes x $nproc) cannot be divided into pp $pp x dp $replicas: change a size, or --nproc"
        tp=$((world / (pp * replicas)))
        ((tp <= nproc)) || [[ -n $dp ]] || tp=$nproc
    fi
    if [[ -z $dp ]]; then
        ((world % (tp * pp) == 0)) || die \
            "$world ranks ($nnodes x $nproc) are no multiple of tp $tp x pp $pp: change a size, or --nproc"
        dp=$((world / (tp * pp)))
    fi
}

# launch TORCHRUN_OPTION ... -- COMMAND ...
launch() {
    local options=(--nproc-per-node "$nproc") python=python3 program
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
    [[ -z $log_dir ]] || options+=(--log-dir "$log_dir" --tee 3)
    case $1 in
        megatron-async) program=(-m megatron_async "${@:2}") ;;
        -m | *.py) program=("$@") ;;
        *) program=(--no-python "$@") ;;
    esac
    if [[ -n $nsys ]]; then
        [[ ${program[0]} != -m ]] || program=("$python" "${program[@]}")
        [[ ${program[0]} != --no-python ]] || program=("${program[@]:1}")
        program=(--no-python bash "$root/scripts/profile_nsys.sh" -o "$nsys"
            ${nsys_options[@]+"${nsys_options[@]}"} -- "${program[@]}")
    fi
    local command=("$python" "$root/scripts/start_ranks.py" "${options[@]}" "${program[@]}"
        ${sizes[@]+"${sizes[@]}"}) # so written for bash 3, where an empty array counts as unset
    # Without it torchrun takes one thread a rank, and says so at length.
    local threads=$(($(getconf _NPROCESSORS_ONLN) / nproc))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    ! $cpu || export CUDA_VISIBLE_DEVICES=
    unset PYTHONDONTWRITEBYTECODE # compiled modules halve the time that torch and Megatron-Core import
    local shown
    printf -v shown '%q ' "${command[@]}"
    printf '%s\n' "${shown% }" >&2
    $dry || exec "${command[@]}"
}
