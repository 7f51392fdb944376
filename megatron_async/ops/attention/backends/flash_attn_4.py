"""Prefill attention with FlashAttention-4 (package flash-attn-4, written in the CuTe DSL).

Its kernels are compiled when they are first called, about two seconds a shape. A block of exactly
128 tokens is loaded whole, whatever the sequence's length: stray NaN in the unused end of its last
block would spoil its output (the cache is zeroed when it is made).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from typing import Any, override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    require,
    require_tensor_core_shape,
)

DISTRIBUTION = "flash-attn-4"
TESTED_VERSION = "4.0.0b36"
ARGUMENTS = (
    "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
    "causal", "num_splits",
)  # fmt: skip
LARGEST_DIM = {9: 256, 10: 128, 11: 128}
"""Largest head dimension by major compute capability."""


class FlashAttention4Prefill(PrefillBackend):
    """Prefill by FlashAttention-4, for the shapes that the package serves.

    Args:
        shape: of the engine's attention.

    Raises:
        BackendUnavailable: the package, its version, the GPU or the shape does not fit.
    """

    name = "flash_attn_4"
    captures = True

    def __init__(self, shape: AttentionShape) -> None:
        self._function = _find_function()
        major = torch.cuda.get_device_capability(shape.device)[0]
        require(
            major in LARGEST_DIM,
            self.name,
            f"it needs a Hopper or Blackwell GPU, not compute capability {major}.x",
            "use attention_backend='triton'",
        )
        require_tensor_core_shape(self.name, shape, LARGEST_DIM[major])
        # Its compiler says so of an argument that only masks of a user's need; nothing is wrong.
        warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        rows = self.rows
        result = self._function(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=rows.starts,
            seqused_k=rows.kv_lengths,
            max_seqlen_q=rows.max_query_length,
            max_seqlen_k=rows.max_kv_length,
            page_table=rows.block_tables,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )
        attended: Tensor = result[0] if isinstance(result, tuple) else result
        return attended if out is None else out.copy_(attended)


def _find_function() -> Callable[..., Any]:
    """The package's function, after a look at what it takes."""
    name = FlashAttention4Prefill.name
    install = f"pip install '{DISTRIBUTION}[cu13]=={TESTED_VERSION}'"
    try:
        version = importlib.metadata.version(DISTRIBUTION)
        from flash_attn.cute import flash_attn_varlen_func
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        require(False, name, f"the package cannot be imported ({error})", install)
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    missing = [argument for argument in ARGUMENTS if argument not in parameters]
    require(
        not missing,
        name,
        f"{DISTRIBUTION} {version} takes no {', '.join(missing)}",
        install,
    )
    function: Callable[..., Any] = flash_attn_varlen_func
    return function
