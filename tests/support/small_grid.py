"""Recurrent states that are written, and can be kept, every 4 tokens instead of every 16 and 128:
short sequences have as many borders as long ones then. For plain torch; kernels have their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_async.contexts import dynamic_context
from megatron_async.device_state import state_table
from megatron_async.ops.recurrent import recurrent_pools, reference_parts
from megatron_async.ops.recurrent.recurrent_pools import FlushRule

GRID = 4
MODULES = (dynamic_context, state_table, recurrent_pools, reference_parts)


def use_small_grid(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, for engines that are made later: others must not run meanwhile.

    Args:
        change: sets an attribute; of a `MonkeyPatch`, for one test.
    """
    for module in MODULES:
        change(module, "GRID", GRID)
    change(FlushRule.__new__, "__defaults__", (GRID, 0))
