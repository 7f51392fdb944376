"""Cases of the gated norms, whose gate is a strip of `in_proj`'s output, and of a step's bases."""

import torch

from megatron_async.ops.recurrent.bases import next_bases
from megatron_async.ops.recurrent.gated_norms import gated_head_norm, gated_rms_norm
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, replaying_rule
from tests.unit_tests.ops.cases import Arguments, Numbers, grid


def group_arguments(at: Numbers, tokens: int, groups: int, size: int, pad: int = 0) -> Arguments:
    """Arguments of `gated_rms_norm`."""
    channels = groups * size
    z = at.rows(tokens, channels, pad=pad, scale=2.0)
    return at.rows(tokens, channels), z, at.rows(channels), groups, 1e-5


def head_arguments(at: Numbers, tokens: int, heads: int, size: int, pad: int = 0) -> Arguments:
    """Arguments of `gated_head_norm`."""
    y, z, *_ = group_arguments(at, tokens, heads, size, pad)
    return y, z, at.rows(size), 1e-6


def base_arguments(
    at: Numbers, rows: int, chunks: int, width: int, kind: torch.dtype, rule: FlushRule
) -> Arguments:
    """Arguments of `next_bases`; some rows bring nothing, and some chunks have no tokens."""

    def draw(most: int, *size: int) -> torch.Tensor:
        return torch.randint(most, size, device=at.device)

    total = rows + chunks + 1
    index = torch.randperm(total - 1, device=at.device)
    first = draw(300, rows, 1) * (draw(4, rows, 1) > 0)
    positions = (first + torch.arange(width, device=at.device)).where(first > 0, 0).flatten()
    prefill = None
    if chunks:
        lengths = draw(300, chunks) * (draw(4, chunks) > 0)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        writes, is_last = index[rows:].int(), draw(2, chunks).bool()
        prefill = PrefillRows(starts, draw(1000, chunks).int(), writes, writes, is_last)
    base = draw(300, total).int()
    return base, index[:rows].to(kind), positions, width, prefill, rule


GROUPS = [(1, 1, 64), (5, 8, 12), (3, 2, 500), (2, 7, 1), (0, 2, 4), (1, 1, 1536), (5, 4, 33)]
HEADS = [(1, 1, 64), (5, 3, 48), (3, 24, 128), (2, 5, 7), (0, 2, 8), (5, 4, 33), (3, 3, 1)]
TOKENS = {"tokens": [1, 67, 2048], "pad": [1000]}
LARGE_GROUPS = {**TOKENS, "groups size": [(8, 512), (8, 1280), (1, 8192)]}
LARGE_HEADS = {**TOKENS, "heads": [1, 8, 32, 48, 64], "size": [128]}
STEPS = {
    "rows chunks width": [(0, 7, 1), (300, 0, 3), (130, 40, 1), (6, 0, 1)],
    "kind": [torch.int64, torch.int32],
    "rule": [FlushRule(), FlushRule(8, 3), FlushRule(16, 20), replaying_rule(3)],
}
CASES = [
    *grid(next_bases, base_arguments, STEPS),
    *grid(gated_rms_norm, group_arguments, {"tokens groups size": GROUPS, "pad": [0, 5]}),
    *grid(gated_rms_norm, group_arguments, LARGE_GROUPS, is_large=True),
    *grid(gated_head_norm, head_arguments, {"tokens heads size": HEADS, "pad": [0, 5]}),
    *grid(gated_head_norm, head_arguments, LARGE_HEADS, is_large=True),
]
