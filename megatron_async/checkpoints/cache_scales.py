"""Scales of keys and values in a Hugging Face folder, which a cache in fp8 stores them by.

Quantisers write one for a layer, or one for each KV head, beside its weights: `k_proj.k_scale` and
`v_proj.v_scale` (Model-Optimizer), `k_scale` and `v_scale`, or `k_proj.output_scale`
(compressed-tensors), or a `kv_scale` for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.safetensors_file import StoredTensor
from megatron_async.checkpoints.weight import Weight
from megatron_async.ops.attention.narrow_cache import scales_of

ENDS = (".k_scale", ".v_scale", ".kv_scale", ".output_scale")
"""Ends of names of these scales."""
QKV = ".linear_qkv.weight"
NAMES = (
    ("k_proj.k_scale", "k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_proj.v_scale", "v_scale", "v_proj.output_scale", "kv_scale"),
)
"""Names of the scale of keys, and of values, behind those of a layer's attention."""
LEAST, MOST = 2.0**-24, 2.0**24
"""Scales that are read. By others all numbers of a model are stored as 0, or as the largest one."""
REMEDY = "use kv_cache_dtype='model', which needs no scales"


def load_cache_scales(
    model: nn.Module,
    wanted: Iterable[Weight],
    stored: Mapping[str, str],
    tensor: Callable[[str], StoredTensor],
) -> None:
    """Give each attention layer of a model its `cache_scales`, where a folder has them.

    Args:
        model: with a rank's share of the heads.
        wanted: the model's weights.
        stored: names of scales, as in a folder of the language model alone -> as they are stored.
        tensor: a stored tensor by its stored name.

    Raises:
        CheckpointError: a scale that is no number from `LEAST` to `MOST`, of another shape, or
            without the other one.
    """
    for weight in wanted:
        if not weight.name.endswith(QKV):
            continue
        key = next((name for name in weight.parts if name.endswith("k_proj.weight")), None)
        if key is None:
            continue
        prefix = key.removesuffix("k_proj.weight")
        found = [next((prefix + n for n in names if prefix + n in stored), None) for names in NAMES]
        there = [tensor(stored[name]) for name in found if name is not None]
        if not there:
            continue
        if len(there) < len(NAMES):
            raise CheckpointError(
                f"{there[0].file.path}: tensor {there[0].name!r:.200} has no counterpart: scales "
                f"are read of keys and of values; {REMEDY}"
            )
        attention: Any = model.get_submodule(weight.name.removesuffix(QKV))
        heads = attention.config.num_query_groups
        own = weight.shard.range_of(heads)
        keys, values = (read_scales(each, heads, REMEDY)[own.start : own.stop] for each in there)
        attention.cache_scales = scales_of(keys, values).to(next(model.parameters()).device)


def read_scales(stored: StoredTensor, heads: int, remedy: str) -> Tensor:
    """A scale for each KV head, float32 `[heads]`; 1: one of something else.

    Raises:
        CheckpointError: as `load_cache_scales`, with a remedy.
    """
    where = f"{stored.file.path}: tensor {stored.name!r:.200}"
    if stored.torch_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{where} is stored as {stored.dtype}: scales are 16-bit or float32; {remedy}"
        )
    if prod(stored.shape) not in (1, heads):  # before memory is made for it
        others = f", or one for each of {heads} KV heads," if heads > 1 else ""
        raise CheckpointError(
            f"{where} has the shape {list(stored.shape)}: one scale{others} is read; {remedy}"
        )
    scale = stored.read().to(torch.float32).reshape(-1)
    if not ((scale >= LEAST) & (scale <= MOST)).all():
        raise CheckpointError(
            f"{where} has a scale that is no number from {LEAST:.0e} to {MOST:.0e}; {remedy}"
        )
    return scale.expand(heads)
