"""One rank of a replica: the command line, bound to the life of the process that started the ranks.

python -m megatron_async.server.supervisor.rank replica ARGUMENT ...
"""

from __future__ import annotations

import os
import sys

from megatron_async.server.supervisor.parent import end_with_parent

PARENT_VARIABLE = "MEGATRON_ASYNC_RANKS_PARENT"
"""Environment: id of the process that started the ranks."""


def main() -> int:
    """Run the command line; returns its exit status."""
    end_with_parent(int(os.environ[PARENT_VARIABLE]), None)
    from megatron_async.__main__ import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
