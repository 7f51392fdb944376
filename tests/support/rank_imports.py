"""What ranks need before their first step: imported once, by the server that ranks are forked from.

A rank that imports Numba and loads the compiled loops itself takes a second for it.
"""

import megatron_async.llm
import megatron_async.ranks.join_group  # noqa: F401
from megatron_async.ops.cpu.compile_loops import compile_all

compile_all(has_float64=True)
