#!/usr/bin/env bash
# Make .venv in the checkout: Python >= 3.12, the locked packages, the demo model, this package.
# Run it as often as you like: when the locks have not changed it does nothing and needs no network.
#
#   MEGATRON_ASYNC_PYTHON   interpreter to use (otherwise one is looked for)
#   PIP_INDEX_URL, PIP_CERT, UV_*, pip.conf: your package index and certificates are respected
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.setup-done
unfinished=$venv/.setup-unfinished
log= # made below: a known name in a shared folder may be another user's link

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf '\nsetup: %s\n' "$@" >&2; exit 1; }

# True if $1 starts and is new enough: a pyenv shim exists on PATH and still fails.
python_runs() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    if [[ -n ${MEGATRON_ASYNC_PYTHON:-} ]]; then
        python_runs "$MEGATRON_ASYNC_PYTHON" || die \
            "MEGATRON_ASYNC_PYTHON=$MEGATRON_ASYNC_PYTHON is not a Python >= 3.12 that runs."
        echo "$MEGATRON_ASYNC_PYTHON"
        return
    fi
    local home=~ candidate # without HOME, as in some services, bash asks for the user's folder
    local pyenv=${PYENV_ROOT:-$home/.pyenv} uv_pythons=$home/.local/share/uv/python
    for candidate in \
        python3.12 "$pyenv"/versions/3.12*/bin/python3.12 \
        "$uv_pythons"/cpython-3.12*/bin/python3.12 \
        python3.13 "$pyenv"/versions/3.13*/bin/python3.13 \
        "$uv_pythons"/cpython-3.13*/bin/python3.13 python3 python; do
        if python_runs "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.12 or newer is needed, and none was found that runs. Install one of these and
run this again (or set MEGATRON_ASYNC_PYTHON to an interpreter that you have):
  Debian 13, Ubuntu 24.04   sudo apt-get install python3 python3-venv
  macOS                     brew install python@3.12
  pyenv                     pyenv install 3.12
  uv                        uv python install 3.12"
}

network_failed() {
    grep -qiE 'failed to (fetch|download)|error sending request|dns error|connection (error|refused|reset)|newconnectionerror|name resolution|timed out|proxyerror|certificate|network was disabled|no matching distribution found for uv|could not find a version' "$log"
}

# Run a command that may use the network; on failure say what is missing, not how pip felt.
fetch() {
    "$@" >>"$log" 2>&1 && return
    if network_failed; then
        rm -f "$unfinished" # packages are fetched before any is installed
        die "The Python package index could not be reached (or refused), so the packages cannot be
installed. Check the network, or point PIP_INDEX_URL (and PIP_CERT for a private certificate) at
an index that you can reach, then run this again.
  last words: $(grep -v '^[[:space:]]*$' "$log" | tail -n 1)
  full log:   $log"
    fi
    die "Installing the packages failed (about 6 GB of free disk space are needed).
  last words: $(grep -v '^[[:space:]]*$' "$log" | tail -n 1)
  full log:   $log"
}

# Megabytes that lie in the environment and in uv's cache (links between the two count once).
unpacked() { du -smc $venv "$($venv/bin/uv cache dir 2>/dev/null)" 2>/dev/null | tail -n 1 | cut -f 1; }

# On a terminal, say every three seconds how much has come, until it is killed.
show_unpacked() {
    local first=$1 now
    while sleep 3; do
        now=$(unpacked)
        printf '\rsetup: %d MB unpacked of about 6,000, after %d s \033[K' \
            $((now - first)) $SECONDS >&2
    done
}

# What the environment must match: the locks, the package's metadata, the checkout's path.
# (`cksum`, because macOS has no sha256sum.)
wanted=$(cat requirements.lock requirements-demo.lock setup.py | cksum; printf '%s' "$PWD")
if [[ -f $stamp && "$(cat "$stamp")" == "$wanted" ]] && python_runs $venv/bin/python; then
    exit 0
fi

log=$(mktemp "${TMPDIR:-/tmp}/megatron-async-setup.XXXXXX")
moved=false # scripts in an environment carry its path
[[ ! -f $stamp || "$(tail -n 1 "$stamp")" == "$PWD" ]] || moved=true
if $moved || [[ -e $unfinished || ! -x $venv/bin/pip ]] || ! python_runs $venv/bin/python; then
    [[ ! -L $venv ]] || die "$venv is a link to $(readlink $venv), whose packages would be deleted: \
remove the link (rm $venv) and run this again."
    python=$(find_python)
    say "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear $venv >>"$log" 2>&1 || die \
        "$python cannot make a virtual environment. On Debian and Ubuntu install the package
python3-venv (or python3.12-venv) and run this again.
  full log: $log"
fi
touch "$unfinished"
rm -f "$stamp"

if [[ ! -x $venv/bin/uv ]]; then
    awk '/^[a-z]/ { on = /^uv==/ } on' requirements.lock >$venv/uv.lock
    fetch $venv/bin/python -m pip install --require-hashes --no-deps -r $venv/uv.lock
fi

# uv reads its own variables only: hand it what pip was told.
index=${PIP_INDEX_URL:-$($venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
[[ -z $index ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
export VIRTUAL_ENV=$PWD/$venv

say "installing the locked packages (2.5 GB to download the first time; log: $log)"
watcher=
if [[ -t 2 ]]; then
    SECONDS=0
    show_unpacked "$(unpacked)" &
    watcher=$!
    trap 'kill $watcher 2>/dev/null || true; printf "\r\033[K" >&2' EXIT
fi
fetch $venv/bin/uv pip install --no-deps --require-hashes \
    -r requirements.lock -r requirements-demo.lock
if [[ -n $watcher ]]; then
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true # or bash would say that it was killed
    trap - EXIT
    printf '\r\033[K' >&2
fi
fetch $venv/bin/uv pip install --no-deps --no-build-isolation --offline --editable .

say "compiling loops for this CPU (once; half a minute to a minute on two cores)"
"$venv/bin/python" -c \
    'from megatron_async.ops.cpu.compile_loops import compile_all; compile_all(progress=True)' \
    >>"$log" || say "they are compiled at their first use instead"

rm -f "$unfinished"
printf '%s\n' "$wanted" >"$stamp"
say "ready: source $venv/bin/activate, or call $venv/bin/megatron-async"
