"""Gated DeltaNet's ops: what is timed, and the bytes and operations that it takes at the least."""

from __future__ import annotations

import torch

from kernel_cases.case import OURS, Chain
from kernel_cases.hardware import Need
from kernel_cases.recurrent_rows import DecodeRows, prefill_rows
from kernel_cases.tensors import layers_that_fit, random
from megatron_async.ops.recurrent.delta_decode import delta_decode_gpu
from megatron_async.ops.recurrent.delta_pools import DeltaParams, DeltaShape
from megatron_async.ops.recurrent.delta_prefill import delta_prefill_gpu
from megatron_async.ops.recurrent.flush import flush_gpu
from megatron_async.ops.recurrent.gated_head_norm import gated_head_norm_gpu
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, RecurrentPools

SHAPES = {
    "qwen3-next": DeltaShape(16, 128, 32, 128),
    "qwen3.5-48": DeltaShape(16, 128, 48, 128),
}
TILE = 64
"""Tokens between which a prefill multiplies keys."""


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


def decode_need(shape: DeltaShape, rows: int, width: int) -> Need:
    """What a layer's decode needs."""
    rule, heads = FlushRule(), shape.value_heads
    state = shape.value_inner * shape.key_dim * 4 * (1 + width / rule.period)
    # On average half a period of entries, and the query tokens themselves, written and read.
    entry = (shape.value_inner + shape.key_inner) * 2 + heads * 4
    ring = (rule.period / 2 + 2 * width) * entry
    conv = (3 + width) * shape.conv_dim * 2
    token = (shape.conv_dim + 2 * heads + shape.value_inner) * 2 * width
    return Need(int(rows * (state + ring + conv + token)))


def decode_chains(shape: DeltaShape, rows: int, width: int) -> dict[str, Chain]:
    """A decode step of each layer; its flush and its norms alone."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, rows + 1, rule, width)
    pools = [RecurrentPools(*layer) for layer in zip(*every)]
    at = DecodeRows(rows, width, rule)
    qkvzba = random(rows * width, shape.in_proj)
    o, weight = random(rows * width, shape.value_inner), random(shape.value_dim)
    z = qkvzba[:, shape.conv_dim : shape.conv_dim + shape.value_inner]

    def ours() -> None:
        flush_gpu(every, at.index, at.before, at.after, rule)
        for pool in pools:
            delta_decode_gpu(
                qkvzba, params, pool, at.index, at.positions, at.after, width, rule, out=o
            )

    def only_flush() -> None:
        flush_gpu(every, at.index, at.before, at.after, rule)

    def norm() -> None:
        for _ in pools:
            gated_head_norm_gpu(o, z, weight, 1e-6)

    runs = {OURS: ours, "flush": only_flush, "norm": norm}
    return {name: Chain(run, len(pools)) for name, run in runs.items()}


def prefill_need(shape: DeltaShape, lengths: list[int]) -> Need:
    """What a layer's prefill needs; its products are keys with keys and queries, twice with pseudo
    values in a tile, and three times with the state; without the triangular inverses."""
    tokens = sum(lengths)
    token = (shape.conv_dim + 2 * shape.value_heads + shape.value_inner) * 2
    state = shape.value_inner * shape.key_dim * 4
    in_tile = 2 * (2 * TILE * shape.key_dim) + 2 * (2 * TILE * shape.value_dim)
    with_state = 3 * 2 * shape.key_dim * shape.value_dim
    operations = float(tokens * shape.value_heads * (in_tile + with_state))
    return Need(tokens * token + len(lengths) * state, operations)


def prefill_chains(shape: DeltaShape, lengths: list[int]) -> dict[str, Chain]:
    """A prefill of each layer."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, len(lengths) + 1, rule, 1)
    pools = [RecurrentPools(*layer) for layer in zip(*every)][:4]
    rows, base = prefill_rows(lengths, rule)
    qkvzba = random(sum(lengths), shape.in_proj)
    o = random(sum(lengths), shape.value_inner)

    def ours() -> None:
        for pool in pools:
            delta_prefill_gpu(qkvzba, params, pool, rows, base, rule, out=o)

    return {OURS: Chain(ours, len(pools))}
