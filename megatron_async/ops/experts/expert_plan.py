"""Choice between kernels for a few tokens and grouped products for experts, and their tiles.

The rules depend only on the number of tokens, or of (token, expert) pairs, on the layer's shape and
on the dtype. So a captured step and an eager step with as many tokens agree. With few tokens an
expert, the bytes of the weights set the time, so tiles are low, narrow and deeply pipelined. With
many, the matrix units set the time: tiles are large, empty parts of tiles are not computed, and
neighbouring programs share pairs, whose bytes are read more often than those of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import triton

from megatron_async.ops.linear.load_tile import step_of
from megatron_async.ops.linear.quantised_weight import Form
from megatron_async.ops.linear.row_tiles import TILE_BYTES

LEAST_WIDTH = 16
"""Fewest columns of a tile that a matrix unit computes."""


@dataclass(frozen=True)
class ProductPlan:
    """Tiles of one grouped product: `block_m` pairs of one expert by `block_n` outputs, `block_k`
    inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    trimmed: bool = False
    """Whether tiles that are half empty, or at the end of the outputs, are computed as smaller
    ones: large tiles of a product that the matrix units bound."""
    by_rows: bool = False
    """Whether programs that share pairs are neighbours, not programs that share weights."""
    shares: int = 1
    """Shares of a step, of `block_k` inputs each: of weights that are kept in fewer bits."""

    def last_n(self, outputs: int) -> int:
        """Outputs of the last tile of columns: `block_n`, or a smaller power of two."""
        rest = outputs % self.block_n
        if not (self.trimmed and rest):
            return self.block_n
        return max(LEAST_WIDTH, triton.next_power_of_2(rest))


@dataclass(frozen=True)
class ExpertPlan:
    """Both products of the experts' MLPs; their tiles have one height."""

    up: ProductPlan
    down: ProductPlan


BY_HEIGHT = {
    16: ExpertPlan(ProductPlan(16, 32, 128, 4, 4), ProductPlan(16, 64, 128, 4, 4)),
    32: ExpertPlan(ProductPlan(32, 64, 64, 4, 5), ProductPlan(32, 128, 64, 4, 5)),
    64: ExpertPlan(ProductPlan(64, 64, 64, 4, 4), ProductPlan(64, 128, 64, 4, 4)),
    128: ExpertPlan(
        ProductPlan(128, 128, 64, 8, 3, trimmed=True, by_rows=True),
        ProductPlan(128, 256, 64, 8, 4, trimmed=True, by_rows=True),
    ),
}
"""Plans for 16-bit dtypes by the height of their tiles; of SwiGLU, whose first product has two sums
an output."""
UNGATED_UP = {128: ProductPlan(128, 256, 64, 8, 4, trimmed=True, by_rows=True)}
"""The first product without a gate, where it differs."""
FLOAT32 = ExpertPlan(ProductPlan(16, 32, 32, 4, 3), ProductPlan(16, 32, 32, 4, 3))
"""Float32 has no matrix units that compute exactly: small tiles, for tests and small models."""


KEPT_BY_HEIGHT = {
    8: ExpertPlan(ProductPlan(8, 32, 128, 2, 3), ProductPlan(8, 32, 128, 2, 3)),
    16: ExpertPlan(ProductPlan(16, 32, 128, 2, 3), ProductPlan(16, 32, 128, 2, 3)),
    32: ExpertPlan(ProductPlan(32, 64, 128, 4, 3), ProductPlan(32, 64, 128, 4, 3)),
    64: ExpertPlan(ProductPlan(64, 64, 128, 4, 3), ProductPlan(64, 64, 128, 4, 3)),
}
"""Plans for weights that are kept in fewer bits, which hold more numbers in registers."""


@lru_cache(maxsize=4096)
def plan_experts(
    pairs: int, num_experts: int, itemsize: int, gated: bool, form: Form | None = None
) -> ExpertPlan:
    """The layout for the (token, expert) pairs of all ranks, which fall on all ranks' experts;
    `form` of weights that are kept in fewer bits."""
    mean = pairs / num_experts
    if form is not None:
        height = next((each for each in KEPT_BY_HEIGHT if mean <= each), max(KEPT_BY_HEIGHT))
        plan, step = KEPT_BY_HEIGHT[height], step_of(form)
        return ExpertPlan(replace(plan.up, block_k=step), replace(plan.down, block_k=step))
    if itemsize > 2:
        return FLOAT32
    height = next((height for height in BY_HEIGHT if mean <= height), max(BY_HEIGHT))
    plan = BY_HEIGHT[height]
    return plan if gated else replace(plan, up=UNGATED_UP.get(height, plan.up))


FEW_TOKENS = 1
"""Most tokens of a step whose experts have the kernels for a few tokens. Measured on an H200 beside
the grouped products: 0.79 to 0.81 of their time at 1 token, 0.99 to 1.08 at 2 and 1.03 to 1.07 at
4, where tiles share a weight among tokens (docs/records/several_gpus.md). The kernels have become
faster by a tenth at 1 token since; at 2 they were not measured again."""
MOST_FEW_TOKENS = 8
"""Most tokens that these kernels are compiled for: their number is a constant of each."""
FEW_TOKENS_MAJOR = 9
"""Compute capability of the devices that the rule is for (Hopper); others keep the grouped
products."""
MOST_HIDDEN = 8192
"""A token is held in the registers of one program."""
MOST_EXPERTS = 1024
"""Logits of a token are held in the registers of one program."""
PROCESSORS = 132
"""Streaming multiprocessors of an H200."""
UP_TILES, UP_TILES_GATED, DOWN_TILES = 12, 8, 8
"""Most tiles of a weight row that a warp asks for at once: of the first product as many as its
registers hold beside the sums, of the second one by measurement."""
DOWN_LINES = 8
"""Units of weight rows that a program of the second product takes, if a row has no more."""
MOST_UNITS = 16
"""Most units of a row of the second product."""
UP_REGISTERS = 128
"""Registers of a thread of the first product."""
UP_PROGRAMS = 4
"""Programs of the first product that a processor holds: 4 warps each, by their registers. All are
there at once, so that they end together."""
LOGIT_PROGRAMS = 2
"""Programs of the logits that a processor should hold at least, if there are so many experts."""


@dataclass(frozen=True)
class FewTokenPlan:
    """Layout of the kernels for a few tokens."""

    block_experts: int
    """Logits that a program computes."""
    warps: int
    """Warps of a program of the first product."""
    up_rows: int
    """Weight rows that a program of the first product takes at a time, a multiple of `warps`."""
    up_depth: int
    """Tiles of `TILE_BYTES` of each row that it asks for at once."""
    turns: int
    """Number of times that it does so."""
    down_rows: int
    """Outputs of a program of the second product, a power of two."""
    down_warps: int
    """Warps of such a program, which share the units of its outputs."""
    down_depth: int
    """Tiles of `TILE_BYTES` of each unit that it asks for at once."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer with experts, all on one rank, `topk` of them a token; `ffn` are the inner
    elements of each, `shared_ffn` those of the shared expert or 0."""

    experts: int
    topk: int
    hidden: int
    ffn: int
    shared_ffn: int
    gated: bool
    itemsize: int
    """Bytes of a number, as it is kept."""

    @property
    def longer(self) -> int:
        """How many times as long the shared expert's rows of the second product are, at most: a
        power of two."""
        return triton.next_power_of_2(max(triton.cdiv(self.shared_ffn, self.ffn), 1))

    @property
    def units(self) -> int:
        """Inputs of an output of the second product, in parts of `ffn` elements: one for each
        expert of a token, the others for the shared expert."""
        return self.topk + triton.cdiv(self.shared_ffn, self.ffn)


@lru_cache(maxsize=4096)
def plan_few_tokens(tokens: int, shape: LayerShape, most: int = FEW_TOKENS) -> FewTokenPlan | None:
    """The layout for so many tokens, padding included; None: the grouped products are for these,
    as they are for more than `most`."""
    inner = shape.hidden, shape.ffn, shape.shared_ffn
    if not 0 < tokens <= most or any(size * shape.itemsize % 16 for size in inner):
        return None
    if shape.hidden > MOST_HIDDEN or shape.experts > MOST_EXPERTS or shape.units > MOST_UNITS:
        return None
    warps = 4
    programs = PROCESSORS * LOGIT_PROGRAMS
    block_experts = triton.next_power_of_2(triton.cdiv(shape.experts * tokens, programs))
    up_tiles = triton.cdiv(shape.hidden * shape.itemsize, TILE_BYTES)
    down_tiles = triton.cdiv(shape.ffn * shape.itemsize, TILE_BYTES)
    units = triton.next_power_of_2(shape.units)
    return FewTokenPlan(
        block_experts=block_experts,
        warps=warps,
        up_rows=warps,
        up_depth=_even(up_tiles, UP_TILES_GATED if shape.gated else UP_TILES),
        turns=_turns(tokens, shape, warps),
        down_rows=max(DOWN_LINES * max(2 // shape.itemsize, 1) // units, 1),
        down_warps=8,
        down_depth=_even(max(down_tiles, 1), DOWN_TILES),
    )


@dataclass(frozen=True)
class ChainTiles:
    """Tiles of a product of a few tokens whose inputs are added in one order: outputs of a program,
    inputs at a time, warps, and how many times `inputs` are under way."""

    outputs: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ChainPlan:
    """Both products of an expert layer for a few tokens that keep the promise "invariant"."""

    up: ChainTiles
    down: ChainTiles


FEW_CHAINS = 4
"""Most tokens of a step whose experts have these kernels: at 2 and 4 they took 0.67 to 0.99 of the
time of those for many (docs/records/one_order.md)."""
MOST_SLOTS = 16
"""Most experts of a token: a tile of the second product has them all."""
MOST_LONGER = 4
"""Largest `LayerShape.longer`: more of the shared expert at a time would fill the shared memory."""
UP_CHAINS, UP_CHAINS_GATED = ChainTiles(32, 128, 2, 4), ChainTiles(16, 256, 1, 4)
"""Measured on an H200 at 1 token among twelve (docs/records/one_order.md)."""
FULL = 0.9
"""Share of the processors that have a program of the second product, at the least, in its last
round; else there are twice as many, each half as wide."""


@lru_cache(maxsize=4096)
def plan_few_chains(tokens: int, shape: LayerShape, most: int = FEW_CHAINS) -> ChainPlan | None:
    """The layout of the kernels that keep the promise "invariant", as `plan_few_tokens` finds the
    layout of the others; any gives the same bits."""
    inner = shape.hidden, shape.ffn, shape.shared_ffn
    if not 0 < tokens <= most or any(size * shape.itemsize % 16 for size in inner):
        return None
    if shape.hidden > MOST_HIDDEN or shape.experts > MOST_EXPERTS or shape.itemsize != 2:
        return None
    if shape.topk > MOST_SLOTS or shape.longer > MOST_LONGER:
        return None
    slots = triton.next_power_of_2(shape.topk)
    if slots <= 8:
        down = ChainTiles(16, 128, 4, min(24 // slots, 6))
    else:
        down = ChainTiles(128 // slots, 64, 4, 4)
    programs = triton.cdiv(shape.hidden, down.outputs) / PROCESSORS
    if programs < FULL * math.ceil(programs):
        down = ChainTiles(down.outputs // 2, 64, 4, 6)
    return ChainPlan(UP_CHAINS_GATED if shape.gated else UP_CHAINS, down)


def _even(tiles: int, most: int) -> int:
    """Tiles at once, if a row is asked for in as few equal parts as possible."""
    return triton.cdiv(tiles, triton.cdiv(tiles, most))


def _turns(tokens: int, shape: LayerShape, rows: int) -> int:
    """Least turns with which all programs of the first product run at once."""
    turns = 1
    while True:
        programs = tokens * shape.topk * triton.cdiv(shape.ffn, rows * turns)
        programs += tokens * triton.cdiv(shape.shared_ffn, rows * turns)
        if programs <= PROCESSORS * UP_PROGRAMS or rows * turns >= shape.ffn:
            return turns
        turns += 1
