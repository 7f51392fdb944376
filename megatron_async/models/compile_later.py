"""Import Megatron-Core without what only training, checkpoints and its own engines need.

Megatron-Core's files name all that they ever use at their head: torch's distributed tensors, FSDP
and checkpoints, through them sympy, and optimizers, schedules, kernels of experts: 1,000 modules
that no start needs. While Megatron-Core is imported here, a module of `LATER` is not run: it stands
in `sys.modules` as `importlib.util.LazyLoader` would leave it, and a name of it that a file of
Megatron-Core takes is a `LaterName`. Both become the real ones when they are first used.

`torch.compile` is later too: as a decorator it imports torch's compiler at once, for functions that
this engine's own layers do not call.
"""

from __future__ import annotations

import copyreg
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any, override

import torch

IMPORTS: Any = import_module("importlib._bootstrap")
CORE = "megatron.core"
LATER = frozenset({
    "einops", "yaml", "torch.distributed._tensor", "torch.distributed.tensor",
    "torch.distributed.tensor.placement_types", "torch.utils.cpp_extension",
    *(f"{CORE}.{name}" for name in (
        "dist_checkpointing", "distributed", "fusions.fused_cross_entropy", "inference.contexts",
        "inference.moe", "inference.symmetric_memory", "optimizer",
        "pipeline_parallel", "recompute", "tensor_parallel.data",
        "tensor_parallel.inference_layers", "transformer.moe.paged_stash",
        "transformer.moe.router", "transformer.moe.shared_experts",
        "transformer.moe.token_dispatcher", "transformer.moe.token_dispatcher_inference",
        "transformer.multi_latent_attention", "transformer.multi_token_prediction",
    )),
})  # fmt: skip
"""Modules that run when they are used, if Megatron-Core imports them first."""
NOW = {f"{CORE}.optimizer.OptimizerConfig": f"{CORE}.optimizer.optimizer_config"}
"""Names of such modules that must be the real ones, and where they are: torch is told which classes
a checkpoint may have."""
_importing = 0
"""The thread that imports Megatron-Core here, while it does."""


class LaterName:
    """A class or function of a module that has not run; once Megatron-Core is imported, all that is
    asked of it is asked of the real one, whose module runs then."""

    def __init__(self, module: ModuleType, name: str) -> None:
        vars(self).update(_module=module, _name=name)

    def found(self) -> Any:
        """The real one; its module runs, if it has not."""
        _run(self._module)
        return getattr(self._module, self._name)

    def __getattribute__(self, name: str) -> Any:
        if _importing or name in OWN:
            return object.__getattribute__(self, name)
        return getattr(self.found(), name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `typing` asks for some, of every class in an annotation
            raise AttributeError(f"{self._name} has no {name} before it is used")
        return getattr(self.found(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.found(), name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.found()(*args, **options)

    def __eq__(self, other: object) -> bool:
        return self is other if _importing else bool(self.found() == other)

    def __hash__(self) -> int:
        return object.__hash__(self) if _importing else hash(self.found())

    def __getitem__(self, item: Any) -> Any:
        return self.found()[item]

    def __or__(self, other: Any) -> Any:
        return self.found() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.found()

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.found())

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(subclass, self.found())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.found(),)


OWN = frozenset({"found", "_module", "_name", "__mro_entries__"})
# As pickles and copies have a class: by its name.
copyreg.pickle(
    LaterName, lambda one: (pkgutil.resolve_name, (f"{one._module.__name__}:{one._name}",))
)


class LaterModule(ModuleType):
    """A module that runs when it is asked for a name that it has not yet."""

    def __getattr__(self, name: str) -> Any:
        is_import = _importing == threading.get_ident() and "_runs" not in vars(self)
        spec = vars(self)["__spec__"]
        if is_import and name == "__path__" and spec.submodule_search_locations is not None:
            return spec.submodule_search_locations
        if is_import and _is_head_of_megatron(sys._getframe(1)):
            if name.startswith("__"):  # what imports ask of a module that is no package
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            now = NOW.get(f"{self.__name__}.{name}")
            return LaterName(self, name) if now is None else getattr(import_module(now), name)
        _run(self)
        return ModuleType.__getattribute__(self, name)


def _is_head_of_megatron(frame: FrameType | None) -> bool:
    """Whether an import at the top of a file of Megatron-Core asks, not a function or others."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "<module>":
        return False
    return str(frame.f_globals.get("__name__")).startswith(CORE)


def _run(module: ModuleType) -> None:
    """In its place, once; other threads wait, by the lock of the module's import: one of threads
    that wait for each other has an error, as in other imports."""
    with IMPORTS._ModuleLockManager(module.__name__):
        if type(module) is ModuleType or "_runs" in vars(module):
            return
        vars(module)["_runs"] = True
        spec: Any = module.__spec__
        later = spec.loader
        spec.loader = module.__loader__ = later.loader
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(module)
        except BaseException:
            spec.loader = later
            del vars(module)["_runs"]  # what it lacks is said again
            raise
        module.__class__ = ModuleType
        for name, other in list(sys.modules.items()):
            for key, value in list(vars(other).items()) if name.startswith(CORE) else ():
                if type(value) is LaterName and value._module is module:
                    setattr(other, key, value.found())


class _LaterLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LaterModule(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Nothing: see `_run`. An import of one of a package's modules asks for the package's path,
        so the package runs before the module, as it must."""
        vars(module).pop("__path__", None)


class _LaterFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LATER else None
        if spec is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec


def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`torch.compile`, done when the function is called for the first time; what is no function is
    compiled at once."""
    if model is None:
        return partial(compile_later, **options)
    if not inspect.isfunction(model):
        return COMPILE(model, **options)
    compiled: list[Callable[..., Any]] = []

    @wraps(model)
    def call(*args: Any, **values: Any) -> Any:
        if not compiled:
            compiled.append(COMPILE(model, **options))
        return compiled[0](*args, **values)

    return call


COMPILE: Callable[..., Any] = torch.compile


@contextmanager
def _importing_megatron() -> Iterator[None]:
    """Inside, this thread imports files of Megatron-Core so."""
    global _importing
    finder, _importing = _LaterFinder(), threading.get_ident()
    sys.meta_path.insert(0, finder)
    torch.compile = compile_later  # Megatron-Core takes it once, in `megatron.core.jit`
    try:
        yield
    finally:
        torch.compile = COMPILE
        sys.meta_path.remove(finder)
        _importing = 0


with _importing_megatron():
    import megatron.core.models.hybrid.hybrid_block
    import megatron.core.models.hybrid.hybrid_model
    import megatron.core.ssm.mamba_layer
    import megatron.core.ssm.mlp_layer
    import megatron.core.transformer.attention
    import megatron.core.transformer.moe.moe_layer  # noqa: F401
