"""Gated DeltaNet's ops for `benchmark_recurrent.py`: what to time, and the bytes and operations
that it takes at the least."""

from __future__ import annotations

from collections.abc import Callable

import torch
from recurrent_inputs import layers_that_fit, random

from megatron_async.ops.recurrent.delta_decode import delta_decode
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.delta_prefill import delta_prefill
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.gated_head_norm import gated_head_norm
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools

SHAPES = {
    "qwen3-next": DeltaShape(16, 128, 32, 128),
    "qwen3.5-48": DeltaShape(16, 128, 48, 128),
}
TILE = 64
"""Tokens between which a prefill multiplies keys."""
Calls = tuple[int, int, dict[str, Callable[[], object]]]


def parameters(shape: DeltaShape) -> DeltaParams:
    """One layer's parameters."""
    a_log = torch.log(torch.linspace(0.001, 0.1, shape.value_heads, device="cuda"))
    return DeltaParams(random(shape.conv_dim, 4), random(shape.value_heads), a_log)


def layer_pools(shape: DeltaShape, rows: int, rule: FlushRule, width: int) -> RecurrentPools:
    """Pools of several layers."""
    heads, state = shape.value_heads, shape.value_inner * shape.key_dim
    ring = rule.ring_length(width)
    layers = layers_that_fit(rows * state * 4)
    return RecurrentPools(
        random(layers, rows, heads, shape.value_dim, shape.key_dim, dtype=torch.float32),
        # Of about the length that pseudo values and keys have.
        random(layers, rows, ring, shape.value_inner + shape.key_inner) * shape.key_dim**-0.5,
        -torch.rand(layers, rows, ring, 1, heads, device="cuda") / 10,
        random(layers, rows, rule.conv_length(width), shape.conv_dim),
    )


def decode_calls(shape: DeltaShape, rows: int, width: int) -> Calls:
    """Layers, least bytes of a layer's decode, and what to time."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, rows + 1, rule, width)
    pools = [RecurrentPools(*layer) for layer in zip(*every)]
    # Rows at all phases; a step of `width` tokens before this one.
    first = 1000 + torch.arange(rows, device="cuda") * 7 % rule.period
    before = ((first - width) // rule.period * rule.period).int()
    after = (first // rule.period * rule.period).int()
    positions = (first[:, None] + torch.arange(width, device="cuda")).view(-1)
    index = torch.arange(rows, device="cuda")
    qkvzba = random(rows * width, shape.in_proj)
    o, weight = random(rows * width, shape.value_inner), random(shape.value_dim)
    z = qkvzba[:, shape.conv_dim : shape.conv_dim + shape.value_inner]

    def ours() -> None:
        flush(every, index, before, after, rule)
        for pool in pools:
            delta_decode(qkvzba, params, pool, index, positions, after, width, rule, out=o)

    def only_flush() -> None:
        flush(every, index, before, after, rule)

    def norm() -> None:
        for _ in pools:
            gated_head_norm(o, z, weight, 1e-6)

    calls: dict[str, Callable[[], object]] = {"ours": ours, "flush": only_flush, "norm": norm}
    heads = shape.value_heads
    state = shape.value_inner * shape.key_dim * 4 * (1 + width / rule.period)
    # On average half a period of entries, and the query tokens themselves, written and read.
    entry = (shape.value_inner + shape.key_inner) * 2 + heads * 4
    ring = (rule.period / 2 + 2 * width) * entry
    conv = (3 + width) * shape.conv_dim * 2
    token = (shape.conv_dim + 2 * heads + shape.value_inner) * 2 * width
    return len(pools), int(rows * (state + ring + conv + token)), calls


def prefill_calls(shape: DeltaShape, lengths: list[int]) -> Calls:
    """Layers, least bytes of a layer's prefill, and what to time."""
    rule, params, chunks = FlushRule(), parameters(shape), len(lengths)
    pools = [RecurrentPools(*layer) for layer in zip(*layer_pools(shape, chunks + 1, rule, 1))][:4]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    index = torch.arange(chunks, device="cuda")
    rows = PrefillRows(ends, torch.zeros_like(ends[1:]), index, index, torch.ones_like(ends[1:]))
    base = (ends.diff() // rule.period * rule.period).int()
    qkvzba = random(sum(lengths), shape.in_proj)
    o = random(sum(lengths), shape.value_inner)

    def ours() -> None:
        for pool in pools:
            delta_prefill(qkvzba, params, pool, rows, base, rule, out=o)

    token = (shape.conv_dim + 2 * shape.value_heads + shape.value_inner) * 2
    state = shape.value_inner * shape.key_dim * 4
    return len(pools), sum(lengths) * token + chunks * state, {"ours": ours}


def operations(shape: DeltaShape, tokens: int) -> float:
    """What a prefill's products take: keys with keys and queries, twice with pseudo values in a
    tile, and three times with the state; without the triangular inverses."""
    in_tile = 2 * (2 * TILE * shape.key_dim) + 2 * (2 * TILE * shape.value_dim)
    with_state = 3 * 2 * shape.key_dim * shape.value_dim
    return float(tokens * shape.value_heads * (in_tile + with_state))
