"""A program's kernels, found without a GPU: an engine of the model starts on a GPU that is not
there. Tensors have no memory, streams run nothing, and a kernel's launch is noted, not made.

For a process that does nothing else: it changes torch and Triton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, override

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

import megatron_async.models.compile_later  # noqa: F401  # isort: skip  # before Megatron-Core

from megatron_async.choices import Choices
from megatron_async.config import InferenceConfig
from megatron_async.devices.base import Graph
from megatron_async.lab.virtual_device import VirtualDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from megatron_async.ops.attention.backends.base import BackendUnavailable
from megatron_async.ops.attention.backends.selection import PrefillRow
from megatron_async.ops.compile_kernels import Kernel
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.text_generation_controller import TextGenerationController

GPU = torch.device("cuda", 0)
FREE = 64 << 30
"""Bytes of the KV pool; nothing is allocated."""
LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
"""Number in a parameter's name, and the name in the layer."""
POINTWISE = (torch.ops.aten.floor_divide.default, torch.ops.aten.__and__.Scalar)
"""Operations without torch's tag."""


def kernels_of(program: Mapping[str, Any]) -> list[Kernel]:
    """The kernels that an engine's start compiles on one GPU: by the choices that are known for the
    GPU, else those that measuring needs too.

    Args:
        program: of `checkpoints/kernel_program.py`.

    Raises:
        ConfigurationError: settings that no engine takes.
    """
    found: dict[str, Kernel] = {}
    measured: list[type] = []
    _take_the_place_of_a_gpu(program["capability"], program["processors"], found)
    _measure_nothing(measured)
    layouts = {name: Layout.of_json(each) for name, each in program.get("layouts", {}).items()}
    architecture = few_layers(ModelArchitecture.from_dict(program["architecture"]), layouts)
    config = InferenceConfig(**program["config"])
    with _AbsentMemory(), torch.no_grad():
        _start(architecture, config, program, layouts)
        if PrefillRow in measured:
            # All backends were timed, but of those equal here the first serves the steps.
            with suppress(BackendUnavailable):
                other = replace(config, choices="shipped", attention_backend="warpgroup")
                _start(architecture, other, program, layouts)
    return list(found.values())


def few_layers(
    architecture: ModelArchitecture, layouts: Mapping[str, Layout] = MappingProxyType({})
) -> ModelArchitecture:
    """The beginning of a model, in which any two kinds of layers that follow each other do so, by
    the layouts of their quantised weights too."""
    pattern, per_layer = architecture.pattern, len(architecture.pattern) // architecture.num_layers
    kept: dict[int, set[tuple[str, Layout]]] = {}
    for name, layout in layouts.items():
        if found := LAYER_NUMBER.fullmatch(name):
            kept.setdefault(int(found[1]), set()).add((found[2], layout))
    kinds = [(kind, frozenset(kept.get(at, ()))) for at, kind in enumerate(pattern)]

    def pairs(end: int) -> set[Any]:
        return {(kinds[at], kinds[at + 1]) for at in range(end - 1)}

    end = per_layer
    while pairs(end) != pairs(len(pattern)):
        end += per_layer
    return replace(architecture, pattern=pattern[:end], num_layers=end // per_layer)


def _start(
    architecture: ModelArchitecture,
    config: InferenceConfig,
    program: Mapping[str, Any],
    layouts: Mapping[str, Layout],
) -> None:
    dtype, with_mtp = getattr(torch, program["dtype"]), config.speculative_method == "mtp"

    def built(model: Any) -> dict[str, Layout]:
        names = {name for name, _ in model.named_parameters()}
        return {name: layout for name, layout in layouts.items() if name in names}

    kind = program["transformer_impl"]
    weights = build_model(architecture, dtype, GPU, kind, with_mtp=with_mtp, layouts=built)
    context = DynamicInferenceContext(weights.config, config, _AbsentDevice(program["gpu"]))
    TextGenerationController(GPTInferenceWrapper(weights, context), None).create_cuda_graphs(False)


class _AbsentDevice(VirtualDevice):
    """All its points are reached at the same time: no step is cheap enough to run eagerly."""

    def __init__(self, name: str) -> None:
        super().__init__(captures_graphs=True)
        self.torch_device, self._name = GPU, name

    @property
    @override
    def name(self) -> str:
        return self._name

    @override
    def free_memory(self) -> int:
        return FREE

    @override
    def capture(self, work: Callable[[], None]) -> Graph:
        self.compute.launch(work)  # its launches are noted
        return SimpleNamespace(replay=lambda: None)


class _AbsentTensor(Tensor):
    """Says that it is on the GPU; `meta` has its shape and strides, as torch's device of that name
    computes them."""

    meta: Tensor

    @staticmethod
    def __new__(cls: Any, meta: Tensor) -> _AbsentTensor:
        with torch.inference_mode(False):  # as the engine's own memory: views work in all modes
            made: _AbsentTensor = Tensor._make_wrapper_subclass(
                cls, meta.size(), strides=meta.stride(), storage_offset=meta.storage_offset(),
                dtype=meta.dtype, device=GPU,
            )  # fmt: skip
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(function, args, kwargs or {})


class _AbsentMemory(TorchDispatchMode):
    """Inside, tensors on a GPU are `_AbsentTensor`s; those of the host stay what they are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch's compiler is imported, to be kept out of each operation

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(function, args, kwargs or {})


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    absent: list[_AbsentTensor] = []

    def enter(x: Any) -> Any:
        if isinstance(x, Tensor):
            if isinstance(x, _AbsentTensor):
                absent.append(x)
                return x.meta
            return x.to("meta") if x.dim() else x
        return type(x)(map(enter, x)) if type(x) in (list, tuple) else x

    def leave(x: Any) -> Any:
        if isinstance(x, Tensor):
            if not x.is_meta:
                return x
            same = [each for each in absent if each.meta is x]  # changed in place
            return same[0] if same else _AbsentTensor(x)
        return type(x)(map(leave, x)) if type(x) in (list, tuple) else x

    given, inner = enter(args), {name: enter(value) for name, value in kwargs.items()}
    place = kwargs.get("device")
    on_gpu = bool(absent) if place is None else torch.device(place).type == "cuda"
    if absent and place is not None and not on_gpu:  # to the host
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if function is torch.ops.aten.copy_.default and not isinstance(args[0], _AbsentTensor):
        return args[0] if absent else function(*args, **kwargs)
    if not on_gpu:
        return function(*args, **kwargs)
    if function is torch.ops.aten._local_scalar_dense.default:
        return 0
    if place is not None:
        inner["device"] = torch.device("meta")
        inner.pop("pin_memory", None)
    is_pointwise = torch.Tag.pointwise in function.tags or function in POINTWISE
    if is_pointwise and all(x.is_contiguous() for x in absent):
        return leave(_pointwise(function, given, inner))
    return leave(function(*given, **inner))


def _pointwise(function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """By broadcasting, with the dtype of one element: `meta` would import torch's compiler."""
    if function._schema.is_mutable:
        changed: Tensor = args[0]
        return changed
    shapes = [x.shape for x in args if isinstance(x, Tensor)]
    one = [torch.ones((1,) * x.dim(), dtype=x.dtype) if isinstance(x, Tensor) else x for x in args]
    dtype = function(*one, **kwargs).dtype
    return torch.empty(torch.broadcast_shapes(*shapes), dtype=dtype, device="meta")


class _Pointer:
    """What Triton asks of a tensor: all memory begins at a round address."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._at


def _take_the_place_of_a_gpu(
    capability: list[int], processors: int, found: dict[str, Kernel]
) -> None:
    """Note launches of our kernels in `found`, by what they are compiled for."""
    major, minor = capability
    backend = make_backend(GPUTarget("cuda", 10 * major + minor, 32))
    binders: dict[Any, Any] = {}

    def point(x: Any) -> Any:
        return _Pointer(x) if isinstance(x, _AbsentTensor) else x

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if (bind := binders.get(id(kernel))) is None:
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            binders[id(kernel)] = bind
        options |= {"debug": False, "instrumentation_mode": ""}
        given = {name: point(value) for name, value in options.items()}
        bound, specialization, others = bind(*map(point, args), **given)
        key = f"{kernel.module}.{kernel} {specialization} {others}"
        if key not in found:
            chosen, *rest = kernel._pack_args(backend, given, bound, specialization, others)
            kind = GluonASTSource if kernel.is_gluon() else ASTSource
            found[key] = kind(kernel, *rest), vars(chosen)

    properties: Any = SimpleNamespace(multi_processor_count=processors, major=major, minor=minor)
    JITFunction.run = run
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda._lazy_init = lambda: None
    # As torch's own FakeTensorMode: guards of a device do nothing, `torch.tensor` makes tensors on
    # the host first.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)


def _measure_nothing(measured: list[type]) -> None:
    """Note types of choices that are measured in `measured`; nothing of them is kept."""
    keep = Choices.keep

    def keep_nothing(choices: Choices, question: Any, value: Any, is_sound: bool = True) -> Any:
        measured.append(type(question.rule))
        return keep(choices, question, value, is_sound=False)

    Choices.keep = keep_nothing  # type: ignore[method-assign, assignment]
