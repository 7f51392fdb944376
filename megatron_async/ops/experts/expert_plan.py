"""How the grouped products of experts are laid out.

The rule depends on the number of (token, expert) pairs, of experts and on the dtype only, so a
captured step and an eager one of as many tokens agree. Few tokens an expert: the time is that of
the weights' bytes, so tiles are low, narrow and deep in the pipeline. Many: the matrix units set
the time, and tiles are large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class ProductPlan:
    """Tiles of one grouped product: `block_m` pairs of one expert by `block_n` outputs, `block_k`
    inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ExpertPlan:
    """Both products of the experts' MLPs; their tiles have one height."""

    up: ProductPlan
    down: ProductPlan


BY_HEIGHT = {
    16: ExpertPlan(ProductPlan(16, 32, 128, 4, 4), ProductPlan(16, 64, 128, 4, 4)),
    32: ExpertPlan(ProductPlan(32, 64, 64, 4, 5), ProductPlan(32, 128, 64, 4, 5)),
    64: ExpertPlan(ProductPlan(64, 64, 64, 4, 4), ProductPlan(64, 128, 64, 4, 4)),
    128: ExpertPlan(ProductPlan(128, 128, 64, 8, 3), ProductPlan(128, 256, 64, 8, 4)),
}
"""Plans for 16-bit dtypes by the height of their tiles; of SwiGLU, whose first product has two sums
an output."""
UNGATED_UP = {128: ProductPlan(128, 256, 64, 8, 4)}
"""The first product without a gate, where it differs."""
FLOAT32 = ExpertPlan(ProductPlan(16, 32, 32, 4, 3), ProductPlan(16, 32, 32, 4, 3))
"""Float32 has no matrix units that compute exactly: small tiles, for tests and small models."""


@lru_cache(maxsize=4096)
def plan_experts(pairs: int, num_experts: int, itemsize: int, gated: bool) -> ExpertPlan:
    """The layout for `pairs` (token, expert) pairs that fall on `num_experts` experts.

    Args:
        pairs: of all ranks' tokens, also with experts elsewhere.
        num_experts: of all ranks.
        itemsize: bytes of an element.
        gated: whether the first product has a gate.
    """
    if itemsize > 2:
        return FLOAT32
    mean = pairs / num_experts
    height = next((height for height in BY_HEIGHT if mean <= height), max(BY_HEIGHT))
    plan = BY_HEIGHT[height]
    return plan if gated else replace(plan, up=UNGATED_UP.get(height, plan.up))
