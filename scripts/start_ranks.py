"""Starts the ranks of a job for the launch scripts.

Ranks of this host alone are processes that meet in a folder of this user: no port is opened. Ranks
of several hosts are started by torchrun, with its arguments.

Ranks print their own errors. So when a rank fails, this script prints one line with the rank's
number where torchrun prints a page. The script's exit status is the rank's (128 + N for
signal N); torchrun's is always 1.
"""

import argparse
import logging
import sys
from pathlib import Path

from megatron_async.communication.local_ranks import LocalRanks, RankEnd
from megatron_async.communication.own_folder import OwnFolder
from megatron_async.errors import ConfigurationError

OF_FAILURES = "torch.distributed.elastic.multiprocessing.api"
"""Logger that announces each failure, and each process that is ended for it."""


def main() -> int:
    """Run the ranks; returns their exit status."""
    arguments = parse(sys.argv[1:])
    try:
        failed = start_here(arguments) if arguments.standalone else start_on_hosts(sys.argv[1:])
    except ConfigurationError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    if isinstance(failed, RankEnd):
        print(f"launch: {failed}", file=sys.stderr)
        return failed.status
    return failed or 0


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments of torchrun that the launch scripts give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--standalone", action="store_true", help="all ranks are on this host")
    for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--tee"):
        parser.add_argument(option)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("-m", dest="is_module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def start_here(arguments: argparse.Namespace) -> RankEnd | None:
    """Run ranks of this host; returns the end of the first that failed."""
    python = [] if arguments.no_python else [sys.executable, "-u"]
    module = ["-m"] if arguments.is_module else []
    command = [*python, *module, arguments.program, *arguments.arguments]
    with OwnFolder() as folder:
        ranks = LocalRanks(command, arguments.nproc_per_node, folder.path, arguments.log_dir)
        return ranks.run()


def start_on_hosts(words: list[str]) -> RankEnd | int:
    """Run this host's ranks of a job of several by torchrun."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger(OF_FAILURES).setLevel(logging.CRITICAL)
    try:
        run(parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return RankEnd(rank, failure.pid, failure.exitcode)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
