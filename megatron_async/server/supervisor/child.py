"""What the supervisor's children run:

    python -m megatron_async.server.supervisor.child PARENT PIPE SIGNAL WHAT

    WHAT: api LISTENER ... | replica ARGUMENT ... | ranks NUMBER FOLDER ARGUMENT ... |
        serve ARGUMENT ...

Each binds itself to the life of its parent first, however that ends (PIPE -1: there is none). `api`
is an API process, its configuration comes in as JSON by standard input (keys are in it, and must
not be seen in a list of processes). `replica` is the command of that name, and `ranks` the same as
a job of several ranks on this host, which meet in a folder that is made in FOLDER; each of them is
a child `replica` of this process. `serve` is the command of that name, for a process that is no
supervisor: any of its threads may have started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_async.communication.host import process_state
from megatron_async.communication.local_ranks import LocalRanks
from megatron_async.server.supervisor.processes import MODULE

PR_SET_PDEATHSIG = 1
"""Option of Linux' prctl(2): the signal that a process gets when its parent thread ends."""
LOOK_S = 0.5
"""Between two looks whether the caller of a server still runs."""


def end_with_parent(parent: int, pipe: int, number: int = signal.SIGKILL) -> None:
    """Let this process get a signal when its parent is gone.

    On Linux the kernel sends it, even to a process that hangs. Elsewhere, and behind a wrapper that
    is not the parent itself, a thread waits for the end of a pipe that only the parent holds.
    `pipe` is the end that is read, nobody writes to the other; `number` is SIGKILL, or SIGTERM for
    a process that has children of its own to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), number)
    if pipe >= 0:
        os.set_inheritable(pipe, False)  # it is no business of this process' own children
        threading.Thread(
            target=_watch, args=(pipe, number), name="parent-watch", daemon=True
        ).start()


def _watch(pipe: int, number: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), number)


def _end_after(caller: int) -> None:
    """End in order when a process has ended, however it did: neither the end of the thread that
    started this one nor a pipe, which a fork of it holds open, says so."""
    while process_state(caller) != "ended":
        time.sleep(LOOK_S)
    for _ in range(2):  # the second signal: at once, nobody is left to serve
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LOOK_S)


def main(arguments: Sequence[str]) -> int:
    """Run a child of the supervisor."""
    parent, pipe, number, what, *rest = arguments
    if what == "serve":
        watch = threading.Thread(target=_end_after, args=(int(parent),), name="caller-watch")
        watch.daemon = True
        watch.start()
    else:
        end_with_parent(int(parent), int(pipe), int(number))
    if what == "api":
        return _run_api(list(map(int, rest)))
    if what == "ranks":
        return _run_ranks(int(rest[0]), Path(rest[1]), rest[2:])
    from megatron_async.__main__ import main as command_line

    sys.argv = ["megatron-async", what, *rest]
    return command_line()


def _run_api(listeners: Sequence[int]) -> int:
    import msgspec

    from megatron_async.server.api_config import ApiConfig
    from megatron_async.server.api_process import run_api_process

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiConfig)
    return run_api_process(config, listeners) or 0


def _run_ranks(number: int, parent: Path, rest: Sequence[str]) -> int:
    """The ranks of a replica, which end with this process."""
    bound = [str(os.getpid()), "-1", str(int(signal.SIGKILL))]
    command = [sys.executable, "-m", MODULE, *bound, "replica", *rest]
    with TemporaryDirectory(prefix="ranks-", dir=parent) as folder:  # mode 0700
        failed = LocalRanks(command, number, Path(folder)).run()
    if failed is None:
        return 0
    sys.stderr.write(f"replica: {failed}\n")
    return failed.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
