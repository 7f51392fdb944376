"""Cases of the gated norms; the gate is a strip of `in_proj`'s output."""

from megatron_async.ops.recurrent.gated_norms import gated_head_norm, gated_rms_norm
from tests.unit_tests.ops.cases import Arguments, Numbers, grid


def group_arguments(at: Numbers, tokens: int, groups: int, size: int, pad: int = 0) -> Arguments:
    """Of `gated_rms_norm`."""
    channels = groups * size
    z = at.rows(tokens, channels, pad=pad, scale=2.0)
    return at.rows(tokens, channels), z, at.rows(channels), groups, 1e-5


def head_arguments(at: Numbers, tokens: int, heads: int, size: int, pad: int = 0) -> Arguments:
    """Of `gated_head_norm`."""
    y, z, *_ = group_arguments(at, tokens, heads, size, pad)
    return y, z, at.rows(size), 1e-6


GROUPS = [(1, 1, 64), (5, 8, 12), (3, 2, 500), (2, 7, 1), (0, 2, 4), (1, 1, 1536), (5, 4, 33)]
HEADS = [(1, 1, 64), (5, 3, 48), (3, 24, 128), (2, 5, 7), (0, 2, 8), (5, 4, 33), (3, 3, 1)]
TOKENS = {"tokens": [1, 67, 2048], "pad": [1000]}
LARGE_GROUPS = {**TOKENS, "groups size": [(8, 512), (8, 1280), (1, 8192)]}
LARGE_HEADS = {**TOKENS, "heads": [1, 8, 32, 48, 64], "size": [128]}
CASES = [
    *grid(gated_rms_norm, group_arguments, {"tokens groups size": GROUPS, "pad": [0, 5]}),
    *grid(gated_rms_norm, group_arguments, LARGE_GROUPS, is_large=True),
    *grid(gated_head_norm, head_arguments, {"tokens heads size": HEADS, "pad": [0, 5]}),
    *grid(gated_head_norm, head_arguments, LARGE_HEADS, is_large=True),
]
