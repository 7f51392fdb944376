"""Weights of a file that are kept as its blocks: parameters without numbers of their own.

Such a layer has a `GroupedWeight` of the file's own numbers, and its parameter is on the meta
device: it has a shape, and no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.quantised_model import FILE
from megatron_async.checkpoints.source import ModelSource
from megatron_async.errors import ConfigurationError
from megatron_async.ops.cpu.compiler import multiplies_integers

if TYPE_CHECKING:
    from megatron_async.models.parallel_state import ParallelSizes


def settle_quantization(
    settings: dict[str, Any],
    source: ModelSource,
    device: str,
    dtype: torch.dtype,
    sizes: ParallelSizes | None = None,
) -> int | None:
    """Let `quantization` of an engine's settings be `FILE` by default where weights of a source can
    be kept as its blocks. `sizes`: of the ranks; None: there is one.

    Returns:
        bytes of the weights if blocks are kept; None: no blocks are.

    Raises:
        ConfigurationError: `FILE` was asked for, and is not possible.
    """
    asked = settings.get("quantization")
    ranks = 1
    if sizes is not None:
        ranks = sizes.tensor_model_parallel * sizes.pipeline_model_parallel
        ranks *= sizes.expert_model_parallel
    can = (
        (device, dtype, ranks) == ("cpu", torch.float32, 1)
        and not settings.get("enable_sleep_mode")
        and multiplies_integers()
        and source.kept_bytes is not None
    )
    if asked == FILE and not can:
        raise ConfigurationError(
            f"quantization={FILE!r} keeps weights of a quantised folder on a GPU, and the blocks "
            "of a quantised GGUF file on an x86 CPU with AVX2 where Numba is installed, in "
            "float32, on one rank and without enable_sleep_mode: leave it out."
        )
    if can and asked is None:
        settings["quantization"] = FILE
    return source.kept_bytes if can and asked in (None, FILE, "int8", "auto") else None


def keep_blocks(source: ModelSource, model: nn.Module, is_fine: bool) -> None:
    """Give the layers of a model, of one rank, the blocks of a file; `load_weights` fills all other
    parameters.

    Args:
        source: of the model; it has blocks.
        model: from `build_model`, with uninitialised weights on a CPU.
        is_fine: rows of inputs are rounded to 16 bits, else to 8.

    Raises:
        CheckpointError: numbers that cannot be kept; the message names the tensors.
    """
    # Imports Megatron, which takes seconds and is not needed to describe a file.
    from megatron_async.models.kept_weights import keep_weight, may_be_kept
    from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight

    modules = dict(model.named_modules())
    for weight, stored in source.stored_groups():
        module = modules.get(weight.name.removesuffix(".weight"))
        if module is None or not may_be_kept(model, module):
            continue
        try:
            keep_weight(model, module, GroupedWeight(stored, is_fine))
        except ValueError as error:
            raise CheckpointError(
                f"{source.name}: one of {', '.join(weight.parts)} {error}: fetch the file again, "
                "or use quantization='none'"
            ) from error
