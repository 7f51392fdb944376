"""Mamba-2's ops: what is timed, and the bytes and operations that it takes at the least."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_cases.case import OURS, Chain
from kernel_cases.hardware import Need
from kernel_cases.mamba_megatron import megatron_decode, megatron_prefill
from kernel_cases.recurrent_rows import DecodeRows, prefill_rows
from kernel_cases.tensors import layers_that_fit, random
from megatron_async.ops.recurrent.flush import flush_gpu
from megatron_async.ops.recurrent.gated_rms_norm import gated_rms_norm_gpu
from megatron_async.ops.recurrent.mamba_decode import mamba_decode_gpu
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_prefill import mamba_prefill_gpu
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, RecurrentPools

SHAPES = {
    "nemotron-3-nano": MambaShape(64, 64, 8, 128),
    "nemotron-nano-9b-v2": MambaShape(128, 80, 8, 128),
    "granite-4.0-h-350m": MambaShape(48, 32, 1, 128),
}


def parameters(shape: MambaShape) -> MambaParams:
    """One layer's parameters."""
    a_log = torch.log(torch.linspace(0.001, 0.1, shape.heads, device="cuda"))
    return MambaParams(
        random(shape.conv_dim, 4),
        random(shape.conv_dim),
        random(shape.heads),
        a_log,
        random(shape.heads, dtype=torch.float32),
    )


def gates(shape: MambaShape, *sizes: int) -> Tensor:
    """Gates of the rings' inputs: the logarithm of a decay, and dt."""
    dt = torch.rand(*sizes, shape.heads, device="cuda") / 10
    return torch.stack((-dt / 10, dt), -2)


def layer_pools(shape: MambaShape, rows: int, rule: FlushRule, width: int) -> RecurrentPools:
    """Pools of as many layers as fit, so that no layer's state stays in a cache."""
    state = rows * shape.d_inner * shape.d_state * 4
    layers, ring = layers_that_fit(state), rule.ring_length(width)
    return RecurrentPools(
        random(layers, rows, shape.heads, shape.head_dim, shape.d_state, dtype=torch.float32),
        random(layers, rows, ring, shape.d_inner + shape.bc_dim),
        gates(shape, layers, rows, ring),
        random(layers, rows, rule.conv_length(width), shape.conv_dim),
    )


def projected(shape: MambaShape, tokens: int) -> Tensor:
    """What the input projection gives for so many tokens, `[tokens, columns]`."""
    return random(tokens, 2 * shape.d_inner + 2 * shape.bc_dim + shape.heads)


def decode_need(shape: MambaShape, rows: int, width: int) -> Need:
    """What a layer's decode needs."""
    rule = FlushRule()
    state = shape.d_inner * shape.d_state * 4 * (1 + width / rule.period)
    # On average half a period of inputs, and the query tokens themselves, written and read.
    ring = (rule.period / 2 + 2 * width) * ((shape.d_inner + shape.bc_dim) * 2 + shape.heads * 8)
    conv = (3 + width) * shape.conv_dim * 2
    token = (shape.conv_dim + shape.heads + shape.d_inner) * 2 * width
    return Need(int(rows * (state + ring + conv + token)))


def decode_chains(
    shape: MambaShape, rows: int, width: int, with_megatron: bool
) -> dict[str, Chain]:
    """A decode step of each layer; its flush and its norms alone; what others have."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, rows + 1, rule, width)
    pools = [RecurrentPools(*layer) for layer in zip(*every)]
    at = DecodeRows(rows, width, rule)
    zxbcdt = projected(shape, rows * width)
    y, weight = random(rows * width, shape.d_inner), random(shape.d_inner)

    def ours() -> None:
        flush_gpu(every, at.index, at.before, at.after, rule)
        for pool in pools:
            mamba_decode_gpu(
                zxbcdt, params, pool, at.index, at.positions, at.after, width, rule, out=y
            )

    def only_flush() -> None:
        flush_gpu(every, at.index, at.before, at.after, rule)

    def norm() -> None:
        for _ in pools:
            gated_rms_norm_gpu(y, zxbcdt[:, : shape.d_inner], weight, shape.groups, 1e-5)

    runs = {OURS: ours, "flush": only_flush, "norm": norm}
    if with_megatron:
        runs |= megatron_decode(shape, params, pools, zxbcdt, at.index, width)
    return {name: Chain(run, len(pools)) for name, run in runs.items()}


def prefill_need(shape: MambaShape, lengths: list[int]) -> Need:
    """What a layer's prefill needs; its products are those of a scan in chunks of 128, of which
    those of C and B are once a group."""
    tokens = sum(lengths)
    token = (shape.conv_dim + shape.heads + shape.d_inner) * 2
    moved = tokens * token + len(lengths) * shape.d_inner * shape.d_state * 4
    by_head = 2 * 128 * shape.head_dim + 4 * shape.head_dim * shape.d_state
    return Need(moved, tokens * (shape.heads * by_head + 2 * 128 * shape.bc_dim))


def prefill_chains(shape: MambaShape, lengths: list[int], with_megatron: bool) -> dict[str, Chain]:
    """A prefill of each layer, and Megatron-Core's."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, len(lengths) + 1, rule, 1)
    pools = [RecurrentPools(*layer) for layer in zip(*every)][:4]
    rows, base = prefill_rows(lengths, rule)
    zxbcdt, y = projected(shape, sum(lengths)), random(sum(lengths), shape.d_inner)

    def ours() -> None:
        for pool in pools:
            mamba_prefill_gpu(zxbcdt, params, pool, rows, base, rule, out=y)

    runs = {OURS: ours}
    if with_megatron:
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        runs |= megatron_prefill(shape, params, lengths, len(pools), zxbcdt, ends)
    return {name: Chain(run, len(pools)) for name, run in runs.items()}
