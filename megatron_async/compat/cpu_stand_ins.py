"""Stand-ins with which Megatron's scripts start on a machine without a GPU.

Megatron's training stack asks for CUDA where a model for the CPU needs none of it: it asserts that
a GPU is there, resets memory counters, names "cuda" as the device of small tensors. `stand_in`
answers these calls, each listed here with its reason. `torch.cuda.is_available()` stays False, so
code that asks first is not misled. Nothing here computes: what needs a CUDA kernel fails as ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, override

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Tensors that ask for the device "cuda", and `.cuda()`, get the CPU."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        return func(*(_on_cpu(value) for value in args), **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return CPU
    return value


def _nothing(*_: Any, **__: Any) -> None:
    """What a machine without a GPU does for "wait for the GPU"."""


def _no_memory_used(*_: Any, **__: Any) -> dict[str, int]:
    return defaultdict(int)


def _no_properties(*_: Any) -> SimpleNamespace:
    return SimpleNamespace(major=0, minor=0)


TORCH_CUDA: Mapping[str, tuple[Callable[..., Any], str]] = {
    "current_device": (lambda: CPU, "the device of small tensors, and of a model that is moved"),
    "set_device": (_nothing, "one device is all there is"),
    "synchronize": (_nothing, "the examples time a run; a step's results are there when it ends"),
    "empty_cache": (_nothing, "after a checkpoint is loaded"),
    "reset_peak_memory_stats": (_nothing, "the examples report peak memory, here 0"),
    "memory_stats": (_no_memory_used, "the same"),
    "max_memory_allocated": (lambda *_: 0, "the same"),
    "get_device_capability": (lambda *_: (0, 0), "the argument parser asks for features of a GPU"),
    "LongTensor": (torch.LongTensor, "the examples tell all ranks the first one's time by it"),
    "get_device_properties": (_no_properties, "the same, where several ranks share a model"),
}
"""Functions of `torch.cuda` that scripts call without asking for a GPU: stand-in and reason."""


def stand_in() -> None:
    """Put the stand-ins in place, for the rest of the process.

    Beside those of `TORCH_CUDA`: `torch.nn.Module.cuda` leaves a model where it is; the backend
    "nccl" of `init_process_group` is "gloo"; Megatron's `initialize_megatron` is called with
    `allow_no_cuda=True`, its own argument for this, after its process groups are made, and without
    compiling the C++ helpers of data sets: no inference needs these, and the wheel lacks their
    sources. Where a GPU is there, nothing is changed.
    """
    if torch.cuda.is_available():
        return
    for name, (replacement, _) in TORCH_CUDA.items():
        setattr(torch.cuda, name, replacement)
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    CudaMeansCpu().__enter__()
    _use_gloo()
    _initialize_without_cuda()


def _use_gloo() -> None:
    start = torch.distributed.init_process_group

    @wraps(start)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return start("gloo" if backend == "nccl" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _initialize_without_cuda() -> None:
    import megatron.core.datasets.utils
    import megatron.training
    import megatron.training.initialize

    megatron.core.datasets.utils.compile_helpers = _nothing
    real = megatron.training.initialize.initialize_megatron

    @wraps(real)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups

        given = megatron.training.get_args()
        given.use_cpu_initialization = True  # weights are made where they lie
        sizes = ParallelSizes(
            given.tensor_model_parallel_size,
            given.pipeline_model_parallel_size,
            given.expert_model_parallel_size,
        )
        # Megatron makes its groups only where it counts a GPU.
        ensure_process_groups(sizes)
        return real(*args, **{**kwargs, "allow_no_cuda": True})

    for module in (megatron.training.initialize, megatron.training):
        module.initialize_megatron = initialize_megatron
