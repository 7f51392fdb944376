"""`python launch.py CHECKOUT ARGS`: `python -m megatron_async.compat ARGS` with a checkout at hand.

The checkout comes last on the search path: of it are what no installed package has (the examples,
`megatron.inference`, the tests), while megatron-core is the installed one.
"""

import sys

from megatron_async.compat.__main__ import main

if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    main(sys.argv[2:])
