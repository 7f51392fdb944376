"""Cases of the ops beside attention."""

import torch
from torch import Tensor

from megatron_async.ops.attention.output_gate import output_gate
from megatron_async.ops.attention.rope_append import rope_append
from tests.unit_tests.ops.cases import Arguments, Axes, Numbers, grid


def tables(positions: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[positions, dim]`."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32),
        1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim),
    )
    angles = torch.cat((angles, angles), dim=-1).to(device)
    return angles.cos(), angles.sin()


def rope_arguments(
    at: Numbers,
    tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    has_norm: bool = False,
    blocks: int = 9,
    block_size: int = 16,
    pad: int = 0,
    rotated: int | None = None,
    has_gate: bool = False,
    positions: int = 200,
) -> Arguments:
    """Arguments of `rope_append`; the caches are full of NaN, so what a kernel writes elsewhere is
    seen."""
    width = kv_heads * (group * (1 + has_gate) + 2) * dim
    qkv = at.rows(tokens, width, pad=pad)
    cos, sin = tables(positions, dim if rotated is None else rotated, at.device)
    places = torch.randperm(blocks * block_size, device=at.device)[:tokens]
    shape = (2, blocks, block_size, kv_heads, dim)
    caches = torch.full(shape, torch.nan, dtype=at.dtype, device=at.device)
    weights = (1 + torch.rand(2, dim, device=at.device)).to(at.dtype)
    norm = (weights[0], weights[1], 1e-6) if has_norm else (None, None, 0.0)
    row_positions = torch.randint(positions, (tokens,), device=at.device)
    return qkv, cos, sin, row_positions, places, caches[0], caches[1], *norm, has_gate


def gate_arguments(at: Numbers, tokens: int, kv_heads: int, group: int, dim: int) -> Arguments:
    """Arguments of `output_gate`: the gates alone of the rows of `linear_qkv` are numbers."""
    mixed = torch.full((tokens, kv_heads, 2 * group + 2, dim), torch.nan, device=at.device)
    mixed[:, :, group : 2 * group] = 3 * torch.randn(tokens, kv_heads, group, dim, device=at.device)
    padded = torch.nn.functional.pad(mixed.flatten(1).to(at.dtype), (0, 5))
    return at.rows(tokens, kv_heads * group, dim), padded[:, :-5], kv_heads


HEADS: Axes = {
    "tokens kv_heads group dim": [
        (1, 3, 3, 64), (5, 2, 4, 128), (4, 1, 1, 8), (3, 2, 7, 80), (2, 5, 2, 2), (0, 2, 2, 16),
    ],
    "has_norm": [False, True],
    "pad": [0, 3],
}  # fmt: skip
ROTATIONS: Axes = {
    "tokens kv_heads group dim": [(5, 2, 3, 16)],
    "rotated": [2, 6, 16],
    "has_norm": [False, True],
    "has_gate": [False, True],
}
LARGE: Axes = {
    "tokens": [1, 67, 2048],
    "kv_heads group dim has_norm": [(3, 3, 64, False), (8, 4, 128, False), (8, 2, 128, True)],
    "blocks block_size": [(40, 64)],
}
GATES: Axes = {
    "tokens kv_heads group dim": [(3, 2, 8, 256), (5, 1, 3, 24), (1, 4, 1, 16), (0, 2, 2, 8)]
}
CASES = [
    *grid(rope_append, rope_arguments, HEADS),
    *grid(rope_append, rope_arguments, ROTATIONS),
    *grid(rope_append, rope_arguments, LARGE, is_large=True),
    *grid(output_gate, gate_arguments, GATES),
]
