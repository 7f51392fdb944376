"""`megatron-async`, and `python -m megatron_async`: the command line."""

import os
import sys


def main() -> int:
    """Run one command; Ctrl-C is no traceback even while the command line is imported.

    Returns:
        exit status: see `megatron_async.cli.main.main`; 130: interrupted.
    """
    try:
        from megatron_async.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("\nmegatron-async: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
