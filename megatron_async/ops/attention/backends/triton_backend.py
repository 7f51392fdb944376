"""Prefill attention with our own kernel: every dtype, head and block size, no package."""

from __future__ import annotations

from functools import partial

import torch

from megatron_async.ops.attention.backends.base import AttentionShape
from megatron_async.ops.attention.backends.own_kernel import OwnKernelPrefill
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_parts import PrefillParts
from megatron_async.ops.attention.prefill_tiles import queries_of


class TritonPrefill(OwnKernelPrefill):
    """Prefill attention by the Triton kernel of `ops/attention/prefill_attention.py`.

    Args:
        shape: of the engine's attention.
        first_key: queries behind this position do not see the keys before it.
    """

    name = "triton"

    def __init__(self, shape: AttentionShape, first_key: int = 0) -> None:
        parts = None
        if shape.device.type == "cuda" and not first_key:
            properties = torch.cuda.get_device_properties(shape.device)
            queries = queries_of(shape.dtype, shape.dim)
            parts = PrefillParts(
                properties.multi_processor_count, shape.kv_heads, queries, shape.dim, shape.device
            )
        super().__init__(partial(paged_prefill_attention, first_key=first_key, parts=parts))
