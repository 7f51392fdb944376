"""How `megatron_async.compat.inference` stands for `megatron.core.inference`.

A module with a file here is ours, and a name that it lacks is taken from Megatron's module of the
same place. A module without a file here is Megatron's: `sys.modules` has the same object under both
names. So a changed import never finds less than before, and a class that is not ours is not a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MEGATRON = "megatron.core.inference"
MIRROR = "megatron_async.compat.inference"


def mirror_of(name: str) -> str | None:
    """The mirror's name for a module of Megatron's, None if `name` lies outside of it."""
    return _moved(name, MEGATRON, MIRROR)


def original_of(name: str) -> str | None:
    """Megatron's name for a module of the mirror, None if `name` lies outside of it."""
    return _moved(name, MIRROR, MEGATRON)


def names_of_megatron(module_name: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: the names that a mirrored module lacks, from Megatron's. Names with
    two underscores at each end say what a module is, and are never another's."""

    def from_megatron(name: str) -> Any:
        if not (name.startswith("__") and name.endswith("__")):
            original = _original(module_name)
            if original is not None and hasattr(original, name):
                value = getattr(original, name)
                if isinstance(value, ModuleType) and mirror_of(value.__name__) is not None:
                    # A submodule that Megatron has loaded already: ours comes first here too.
                    return importlib.import_module(f"{module_name}.{name}")
                return value
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    return from_megatron


def add_finder() -> None:
    """Let `import` look for the mirror's modules as this file says. Again: nothing happens."""
    if not any(isinstance(finder, MirrorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MirrorFinder())


class MirrorFinder(MetaPathFinder):
    """Finds the modules of the mirror, those without a file included."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of Megatron's; None for modules of others, and for those that
        neither the mirror nor Megatron has."""
        original = original_of(name)
        if original is None or name == MIRROR:
            return None
        parent = name.rpartition(".")[0]
        # Below a package of Megatron's, its own search path would find the files a second time.
        is_ours = sys.modules[parent].__name__ == parent
        spec = PathFinder.find_spec(name, path, target) if is_ours else None
        if spec is None:
            if not _exists(original):
                return None
            return ModuleSpec(name, _MegatronsOwn(original))
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Mirrored(spec.loader.name, spec.loader.path)
        return spec


class _Mirrored(SourceFileLoader):
    """Loads a file of the mirror; names that it lacks are Megatron's."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).setdefault("__getattr__", names_of_megatron(module.__name__))


class _MegatronsOwn(Loader):
    """Loads Megatron's module under the mirror's name."""

    def __init__(self, original: str) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the module is an ordinary one until `exec_module`."""

    def exec_module(self, module: ModuleType) -> None:
        # A module may put another in its place in sys.modules; `import` then hands that one out.
        sys.modules[module.__name__] = importlib.import_module(self._original)


def _moved(name: str, source: str, target: str) -> str | None:
    if name == source or name.startswith(source + "."):
        return target + name[len(source) :]
    return None


def _original(mirror_name: str) -> ModuleType | None:
    original = original_of(mirror_name)
    if original is None or not _exists(original):
        return None
    return importlib.import_module(original)


def _exists(original: str) -> bool:
    try:
        return importlib.util.find_spec(original) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
