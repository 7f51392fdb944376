"""Prefill attention with FlashAttention-3, where a user has built it.

Its wheels are on no registry, so this file has never run: it calls the function that Megatron-Core
0.19 calls, by the arguments that it has there, and checks at the start that they exist. Decode
stays with our kernel, which is the faster one at almost every size
(docs/records/prefill_attention.md).
"""

from __future__ import annotations

import importlib
import inspect
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

MODULES = ("flash_attn_3.flash_attn_interface", "flashattn_hopper.flash_attn_interface")
FUNCTION = "flash_attn_with_kvcache"
ARGUMENTS = (
    "q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q",
    "softmax_scale", "causal", "num_splits",
)  # fmt: skip
LARGEST_DIM = 256


class FlashAttention3Prefill(PrefillBackend):
    """Prefill by FlashAttention-3, for the shapes that the package serves.

    Args:
        shape: of the engine's attention.

    Raises:
        BackendUnavailable: the package, its function, the GPU or the shape does not fit.
    """

    name = "flash_attn_3"
    captures = True

    def __init__(self, shape: AttentionShape) -> None:
        self._function = _find_function()
        capability = torch.cuda.get_device_capability(shape.device)
        require(
            capability[0] == 9,
            self.name,
            f"it needs a Hopper GPU, not compute capability {capability[0]}.{capability[1]}",
            "use attention_backend='triton'",
        )
        require_tensor_core_shape(self.name, shape, LARGEST_DIM)

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
            q=query,
            k_cache=key_cache,
            v_cache=value_cache,
            cache_seqlens=rows.kv_lengths,
            page_table=rows.block_tables,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.max_query_length,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )
        attended: Tensor = result[0] if isinstance(result, tuple) else result
        return attended if out is None else out.copy_(attended)


def _find_function() -> Callable[..., Any]:
    """The package's function, after a look at what it takes."""
    name = FlashAttention3Prefill.name
    remedy = "build FlashAttention-3 (the folder hopper of github.com/Dao-AILab/flash-attention)"
    problems = []
    for path in MODULES:
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            problems.append(str(error))
            continue
        function: Callable[..., Any] | None = getattr(module, FUNCTION, None)
        parameters = inspect.signature(function).parameters if function is not None else {}
        missing = [argument for argument in ARGUMENTS if argument not in parameters]
        version = getattr(module, "__version__", "of an unknown version")
        require(
            function is not None and not missing,
            name,
            f"{path} {version} has no {FUNCTION} that takes {', '.join(missing)}",
            remedy,
        )
        assert function is not None
        return function
    require(False, name, f"the package cannot be imported ({'; '.join(problems)})", remedy)
    raise AssertionError  # not reached
