"""torchrun for the launch scripts: takes torchrun's arguments, starts the same ranks.

Ranks print their own errors. So when a rank fails, this script prints one line with the rank's
number where torchrun prints a page. The script's exit status is that of the rank (128 + N for
signal N); torchrun's is always 1.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

OF_FAILURES = "torch.distributed.elastic.multiprocessing.api"
"""Logger that announces each failure, and each process that is ended for it."""


def main() -> int:
    """Run the ranks; returns their exit status."""
    logging.getLogger(OF_FAILURES).setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"status {code}" if code >= 0 else signal.Signals(-code).name
        print(f"launch: rank {rank} (pid {failure.pid}) ended with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
