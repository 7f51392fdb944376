"""What the supervisor's children run:

    python -m megatron_async.server.supervisor.child PARENT PIPE SIGNAL WHAT

    WHAT: api LISTENER | replica ARGUMENT ... | ranks NUMBER FOLDER ARGUMENT ...

Each binds itself to the life of its parent first. `api` is an API process, its configuration comes
in as JSON by standard input (keys are in it, and must not be seen in a list of processes).
`replica` is the command of that name, and `ranks` the same as a job of several ranks on this host,
which meet in a folder that is made in FOLDER.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_async.communication.local_ranks import LocalRanks
from megatron_async.server.supervisor.parent import end_with_parent
from megatron_async.server.supervisor.rank import PARENT_VARIABLE


def main(arguments: Sequence[str]) -> int:
    """Run a child of the supervisor."""
    parent, pipe, number, what, *rest = arguments
    end_with_parent(int(parent), int(pipe), int(number))
    if what == "api":
        return _run_api(int(rest[0]))
    if what == "ranks":
        return _run_ranks(int(rest[0]), Path(rest[1]), rest[2:])
    from megatron_async.__main__ import main as command_line

    sys.argv = ["megatron-async", what, *rest]
    return command_line()


def _run_api(listener: int) -> int:
    import msgspec

    from megatron_async.server.api_config import ApiConfig
    from megatron_async.server.api_process import run_api_process

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiConfig)
    return run_api_process(config, listener) or 0


def _run_ranks(number: int, parent: Path, rest: Sequence[str]) -> int:
    """The ranks of a replica, which end with this process."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    command = [sys.executable, "-m", "megatron_async.server.supervisor.rank", "replica", *rest]
    with TemporaryDirectory(prefix="ranks-", dir=parent) as folder:  # mode 0700
        failed = LocalRanks(command, number, Path(folder)).run()
    if failed is None:
        return 0
    sys.stderr.write(f"replica: {failed}\n")
    return failed.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
