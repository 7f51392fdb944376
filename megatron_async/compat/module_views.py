"""`megatron` and `megatron.core` as a script sees them: `megatron.core.inference` is ours.

`import megatron.core.inference.config` binds the name `megatron`, and the script walks down from
there. So a script is given these views of the two packages; all else in them is Megatron's.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from megatron_async.compat.mirror import MEGATRON, MIRROR

ROOT, CORE = "megatron", "megatron.core"


class ModuleView(ModuleType):
    """A module, seen with one attribute exchanged.

    Reading and writing go to the module itself, so that a script that sets an attribute of
    `megatron.core` sets Megatron's.

    Args:
        name: of the module: `megatron` or `megatron.core`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        seen = importlib.import_module(name)
        vars(self).update(
            {key: value for key, value in vars(seen).items() if key.startswith("__")}, _seen=seen
        )

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if full_name == CORE:
            return view(CORE)
        if full_name == MEGATRON:
            return importlib.import_module(MIRROR)
        return getattr(vars(self)["_seen"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_seen"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_seen"], name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_seen"])


_views: dict[str, ModuleView] = {}


def view(name: str) -> ModuleView:
    """The view of `megatron` or `megatron.core`, always the same object."""
    if name not in _views:
        _views[name] = ModuleView(name)
    return _views[name]
