"""`python -m megatron_async` is `megatron-async`."""

import sys

from megatron_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
