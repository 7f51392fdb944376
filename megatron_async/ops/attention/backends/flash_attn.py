"""Prefill attention with FlashAttention's packages. Decode stays with our kernel, which is the
faster one at almost every size (docs/records/prefill_attention.md).

FlashAttention-3 is where a user has built it: its wheels are on no registry, so its class has never
run. The class calls the function that Megatron-Core 0.19 calls, by the arguments that it has there,
and checks at the start that they exist.

FlashAttention-4 is the package flash-attn-4, written in the CuTe DSL. Its kernels are compiled when
they are first called, about two seconds a shape. A block of exactly 128 tokens is loaded whole,
whatever the sequence's length: stray NaN in the unused end of its last block would spoil its output
(the cache is zeroed when it is made). So would another request's NaN in the first tile of a window.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, override

import torch
from torch import Tensor

from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    require,
    require_all_keys,
    require_tensor_core_shape,
)

MODULES = ("flash_attn_3.flash_attn_interface", "flashattn_hopper.flash_attn_interface")
FUNCTION = "flash_attn_with_kvcache"
ARGUMENTS_3 = (
    "q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q",
    "softmax_scale", "causal", "num_splits",
)  # fmt: skip
LARGEST_DIM_3 = 256
DISTRIBUTION = "flash-attn-4"
TESTED_VERSION = "4.0.0b36"
ARGUMENTS_4 = (
    "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
    "causal", "num_splits", "window_size", "learnable_sink",
)  # fmt: skip
LARGEST_DIM_4 = {9: 256, 10: 128, 11: 128}
"""Largest head dimension by major compute capability."""


class FlashAttention(PrefillBackend):
    """A package's function that reads the paged cache."""

    captures = True
    _function: Callable[..., Any]

    @override
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
        scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        result = self._call(query, key_cache, value_cache, scale, sinks)
        attended: Tensor = result[0] if isinstance(result, tuple) else result
        return attended if out is None else out.copy_(attended)

    @abstractmethod
    def _call(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Any:
        """The package's function."""


class FlashAttention3Prefill(FlashAttention):
    """Prefill by FlashAttention-3, for the shapes that the package serves.

    Raises:
        BackendUnavailable: the package, its function, the GPU or the shape does not fit.
    """

    name = "flash_attn_3"

    def __init__(self, shape: AttentionShape) -> None:
        self._function = _find_3()
        capability = torch.cuda.get_device_capability(shape.device)
        require(
            capability[0] == 9,
            self.name,
            f"it needs a Hopper GPU, not compute capability {capability[0]}.{capability[1]}",
            "use attention_backend='triton'",
        )
        require_all_keys(self.name, shape)
        require_tensor_core_shape(self.name, shape, LARGEST_DIM_3)

    @override
    def _call(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Any:
        rows = self.rows
        return self._function(
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


def _find_3() -> Callable[..., Any]:
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
        missing = [argument for argument in ARGUMENTS_3 if argument not in parameters]
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


class FlashAttention4Prefill(FlashAttention):
    """Prefill by FlashAttention-4, for the shapes that the package serves.

    Raises:
        BackendUnavailable: the package, its version, the GPU or the shape does not fit.
    """

    name = "flash_attn_4"

    def __init__(self, shape: AttentionShape) -> None:
        self._function = _find_4()
        major = torch.cuda.get_device_capability(shape.device)[0]
        require(
            major in LARGEST_DIM_4,
            self.name,
            f"it needs a Hopper or Blackwell GPU, not compute capability {major}.x",
            "use attention_backend='triton'",
        )
        require_tensor_core_shape(self.name, shape, LARGEST_DIM_4[major])
        require_all_keys(self.name, replace(shape, window=0, has_sinks=False))
        self._window = (shape.window - 1 if shape.window else None, None)
        # Its compiler says so of an argument that only masks of a user's need; nothing is wrong.
        warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)

    @override
    def _call(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Any:
        rows = self.rows
        return self._function(
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
            window_size=self._window,
            learnable_sink=sinks,
            num_splits=1,
        )


def _find_4() -> Callable[..., Any]:
    """The package's function, after a look at what it takes."""
    name = FlashAttention4Prefill.name
    install = f"pip install '{DISTRIBUTION}[cu13]=={TESTED_VERSION}'"
    try:
        version = importlib.metadata.version(DISTRIBUTION)
        from flash_attn.cute import flash_attn_varlen_func
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        require(False, name, f"the package cannot be imported ({error})", install)
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    missing = [argument for argument in ARGUMENTS_4 if argument not in parameters]
    require(not missing, name, f"{DISTRIBUTION} {version} takes no {', '.join(missing)}", install)
    function: Callable[..., Any] = flash_attn_varlen_func
    return function
