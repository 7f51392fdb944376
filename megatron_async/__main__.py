"""`megatron-async`, and `python -m megatron_async`: the command line."""

import sys

from megatron_async.cli.terminal import STATUS, ending_at_once, say_interrupted


def main() -> int:
    """Run one command; Ctrl-C is no traceback even while the command line is imported.

    Returns:
        exit status: see `megatron_async.cli.main.main`; 130: interrupted.
    """
    try:
        with ending_at_once():
            from megatron_async.cli.main import main as run

            return run()
    except KeyboardInterrupt:
        say_interrupted()
        return STATUS


if __name__ == "__main__":
    sys.exit(main())
