"""Which implementation of each hot-path op a device gets: Triton on a GPU, else plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_async.ops import (
    rms_norm,
    rope_append,
    sampling,
    skinny_linear,
    swiglu,
    triton_sampling,
)


@dataclass(frozen=True)
class Kernels:
    """Ops of a step beside attention; see the modules of their names for shapes."""

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_append: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_swiglu: Callable[..., Tensor]
    swiglu: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]


TORCH_KERNELS = Kernels(
    rms_norm.add_rms_norm_reference,
    rope_append.rope_append_reference,
    skinny_linear.linear_reference,
    skinny_linear.linear_swiglu_reference,
    swiglu.swiglu_reference,
    sampling.sample_reference,
)
TRITON_KERNELS = Kernels(
    rms_norm.add_rms_norm,
    rope_append.rope_append,
    skinny_linear.linear,
    skinny_linear.linear_swiglu,
    swiglu.swiglu,
    triton_sampling.sample,
)


def kernels_for(tensor: Tensor) -> Kernels:
    """The ops for a tensor's device."""
    return TRITON_KERNELS if tensor.is_cuda else TORCH_KERNELS
